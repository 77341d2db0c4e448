"""Packs beside the same written by hand in C: bytes, instructions and stack, counted in one emulator.  Instructions are exact."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from calcvm import nn
from calcvm.edge import linker
from calcvm.edge.targets import TARGETS
from tests.conftest import by_turns
from tests.edge.emulator import Machine, code_bytes, linked
from tests.edge.test_packs import EMULATED, Device, apart, model_of, network

BY_HAND = Path(__file__).with_name("by_hand.c").read_bytes()
FLAGS = (
    "-ffreestanding",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fno-sanitize=all",
    "-fno-unwind-tables",
)
STEPS = 5
COMPARED = [t for t in EMULATED if t != "armv7"]  # the compiler's expf and logf for it do not run in this emulator


class ByHand:
    """The C source for sizes, compiled for a processor and linked for its emulator."""

    def __init__(self, target, optimization, sizes, entries, folder, *defines):
        processor = TARGETS[target]
        named = [f"-D{name}={size}" for name, size in zip("IHO", sizes)]
        options = [*processor.zig, optimization, *FLAGS, *named, *defines]
        code = linker.linked({"by_hand.c": BY_HAND}, [*options, "-c"], "C by hand")
        self.elf = linked(code, processor, entries, folder)
        self.machine = Machine(self.elf, processor, 1 << 20)
        self.machine.write(np.zeros(1 << 18, "f4"))

    def write(self, at, array):
        self.machine.write(np.asarray(array, "f4"), 4 * at)

    def read(self, at, n):
        return self.machine.read(n, "f4", 4 * at)


# instructions of a step over those of the best C: at most.  -O3 writes the loops of 4-16-3 out whole
MOST = {(4, 16, 3): 1.5, (64, 64, 10): 1.1}


def pytest_generate_tests(metafunc):
    if "sizes" in metafunc.fixturenames:
        by_turns(metafunc, 4, target=COMPARED, sizes=[(4, 16, 3), (64, 64, 10)])


def test_a_step_beside_c(target, sizes, tmp_path):
    """The numbers are those of the pack, or the work would be another."""
    I, H, O = sizes
    model, rng = model_of(network(sizes), (I,)), np.random.default_rng(1)
    X, Y = rng.uniform(-1, 1, (STEPS, 1, I)).astype("f4"), rng.integers(0, O, (STEPS, 1))
    start = np.concatenate([model.parameters[name].ravel() for name in model.parameters])
    rows = {}
    for objective in ("size", "speed"):
        device = Device(model, target, tmp_path / objective, objective=objective)
        for x, y in zip(X, Y):
            assert device("step", input=x, target=y) == 0
        step, stack = device.machine.count, device.machine.stack
        device("predict", input=X[0])
        rows[f"pack, {objective}"] = (code_bytes(device.elf) - len(device.start), step, device.machine.count, stack)
    for how in ("-Os", "-O3"):
        by_hand = ByHand(target, how, sizes, ["step", "predict"], tmp_path)
        at = I + 4 + O
        by_hand.write(at, start)
        for x, y in zip(X, Y):
            by_hand.write(0, x)
            by_hand.write(I, y)
            by_hand.machine.call("step")
        step, stack = by_hand.machine.count, by_hand.machine.stack
        assert apart(by_hand.read(at, len(start)), np.concatenate([p for p, _ in device.parameters()])) < 1e-4
        by_hand.write(0, X[0])
        by_hand.machine.call("predict")
        assert apart(by_hand.read(I + 2, O), device["output"]) < 1e-4
        rows[f"C {how}"] = (code_bytes(by_hand.elf), step, by_hand.machine.count, stack)
    for what, numbers in rows.items():
        print(
            "{} {}, {}: {} bytes, {} and {} instructions, {} of stack".format(
                target, "-".join(map(str, sizes)), what, *numbers
            )
        )
    (_, size, *_), (_, speed, *_), (_, small, *_), (_, fast, *_) = rows.values()
    assert min(size, speed) <= MOST[sizes] * min(small, fast)


@pytest.mark.parametrize("target", ["cortex-m4f", "raspberry-pi-4"])
def test_a_step_of_an_lstm_beside_c(target, tmp_path):
    I, H, O = sizes = (4, 16, 3)
    model = model_of(nn.LSTM(H) >> nn.Linear(O), (6, I), loss="mse", stream=True)
    device, rng = Device(model, target, tmp_path, paths=["stream"]), np.random.default_rng(1)
    by_hand = ByHand(target, "-O3", sizes, ["stream"], tmp_path, "-DLSTM")
    wx, wh, bx, bh, *linear = (model.parameters[name].ravel() for name in model.parameters)
    by_hand.write(I + 2 * H + O, np.concatenate([wx, wh, bx + bh, *linear]))
    for _ in range(STEPS):
        x = rng.uniform(-1, 1, (1, 1, I)).astype("f4")
        assert device("stream", step=x) == 0
        by_hand.write(0, x)
        by_hand.machine.call("stream")
        assert apart(by_hand.read(I + 2 * H, O), device["stream_output"]) < 1e-5
    ours, theirs = device.machine.count, by_hand.machine.count
    print(f"{target}, a step of an LSTM of 16 units: {ours} instructions, C -O3 {theirs}: {ours / theirs:.2f}")
    assert ours <= 1.1 * theirs

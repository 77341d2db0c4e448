"""Packs as one C source: whatever compiles it, it computes what the object of the same processor does."""

from __future__ import annotations

import shutil
import subprocess

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.edge import linker
from calcvm.edge.targets import TARGETS
from tests.conftest import by_turns
from tests.edge.emulator import Machine, linked, own_bytes
from tests.edge.native import STRICT
from tests.edge.test_packs import Device, apart, beside_the_host, model_of, network

SCALAR = [name for name, processor in TARGETS.items() if processor.scalar]
NEARLY = 1.2  # 1.16 times the bytes and 1.12 times the instructions on a Cortex-M4F, 1.18 on RISC-V
# Stand for the headers of a C library: none is installed for these processors.
LIBRARY = {
    "math.h": b"#define sqrtf __builtin_sqrtf\n",
    "string.h": b"typedef __SIZE_TYPE__ size_t; void *memcpy(void *, const void *, size_t), *memset(void *, int, size_t);\n",
}


def pytest_generate_tests(metafunc):
    for test, name, values in (
        (test_a_thousand_steps, "name", LONG),
        (test_every_processor_without_vectors_has_it, "target", SCALAR),
    ):
        if metafunc.function is test:
            by_turns(metafunc, len(values), **{name: values})


def test_it_trains_as_on_the_host(tmp_path):
    """On this machine, as on any other; the compiler traps on what C leaves undefined."""
    beside_the_host(model_of(network(), (4,)), "esp32", tmp_path, 3)


@pytest.mark.parametrize("target", ["cortex-m4f", "riscv32"])
def test_it_is_nearly_as_small_and_fast_as_the_object(target, tmp_path):
    direct, (count, _) = beside_the_host(model_of(network(), (4,)), target, tmp_path / "direct", 3, steps=1)
    folder, processor = tmp_path / "c", TARGETS[target]
    pack = model_of(network(), (4,)).export(folder, target, "it", format="c")
    files = {name: (folder / name).read_bytes() for name in ("it.c", "it.h")} | LIBRARY
    options = [
        "-Os",
        "-fno-math-errno",
        "-fno-sanitize=all",
        "-ffunction-sections",
        "-I.",
        *STRICT,
        "-c",
    ]
    code = linker.linked(files, [*processor.zig, *options], "a test")
    elf = linked(code, processor, ["it_start", "it_step", "it_predict"], folder)
    machine = Machine(elf, processor, pack.ram)
    machine.call("it_start")
    machine.call("it_step")
    assert machine.count <= NEARLY * count
    size = own_bytes(direct.elf, (tmp_path / "direct" / "it.o").read_bytes())
    assert own_bytes(elf, code) <= NEARLY * size


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_compilers_have_nothing_to_say(compiler, tmp_path):
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    model_of(network(), (4,)).export(tmp_path, "esp32", "it")
    for level in ("-O0", "-O2", "-O3"):
        subprocess.run([compiler, *STRICT, level, "-c", "it.c", "-o", "it.o"], cwd=tmp_path, check=True)


def test_a_trap_is_a_return_code(tmp_path):
    device = Device(model_of(network(), (4,)), "esp32", tmp_path)
    assert device("step", input=[0, 0, 0, 0], target=[3]) & 0xFF == 1
    assert all((found == wanted).all() for found, wanted in device.parameters())


LONG = {
    "mlp": (lambda: network((8, 16, 16, 3)), (8,)),
    "lstm": (lambda: nn.LSTM(6, return_sequences=False) >> nn.Linear(3), (5, 2)),
    "depthwise": (
        lambda: nn.Conv2d(6, 3) >> nn.ReLU() >> nn.Conv2d(6, 3, groups=6, bias=False) >> nn.BatchNorm() >> nn.ReLU() >> nn.Flatten() >> nn.Linear(3),
        (1, 8, 8),
    ),
    "lenet": (lambda: cv.zoo.lenet(3, size=16), (1, 16, 16)),
}  # fmt: skip


def test_a_thousand_steps(name, whole, tmp_path):
    """The device is as near to the host's float64 as the host's float32 is, if that is not within 1e-5."""
    make, shape = LONG[name]
    options = {"batch_size": 4, "optimizer": cv.Adam(1e-3)}
    model, exact = model_of(make(), shape, **options), model_of(make(), shape, dtype="float64", **options)
    for parameter, value in model.parameters.items():
        exact.parameters[parameter][...] = value
    device, rng = Device(model, "esp32", tmp_path), np.random.default_rng(0)
    rule = rng.standard_normal((int(np.prod(shape)), 3))
    for _ in range(1000 if whole else 50):
        x = rng.uniform(-1, 1, (4, *shape)).astype("f4")
        y = (x.reshape(4, -1) @ rule).argmax(1)
        for each in (model, exact):
            each.step(x, y)
        assert device("step", input=x, target=y) == 0
    host = max(apart(value, exact.parameters[parameter]) for parameter, value in model.parameters.items())
    there = max(apart(found, wanted) for found, wanted in device.parameters())
    assert there < max(1e-5, 4 * host), f"host {host:.2e}, device {there:.2e}"


def test_a_state_of_any_bytes_harms_nothing(whole, tmp_path):
    """Numbers of a damaged state train to nonsense, but nothing beside the heap is written."""
    device, rng = (
        Device(model_of(nn.GRU(5) >> nn.Linear(3), (6, 3), loss="mse"), "esp32", tmp_path),
        np.random.default_rng(0),
    )
    start, size = device.pack.state
    good = device.machine.read(size, "u1", start)
    for _ in range(100_000 if whole else 1000):
        state = good.copy()
        places = rng.integers(0, size, rng.integers(1, size))
        state[places] = rng.integers(0, 256, len(places))
        device.machine.write(state, start)
        for function in ("step", "predict"):
            device.machine.call(f"it_{function}")
    assert device.machine.guards_hold()


def test_every_processor_without_vectors_has_it(target, tmp_path):
    pack = model_of(network(), (4,)).export(tmp_path, target, "it", format="c")
    assert [f.name for f in pack.files] == ["it.json", "it.c", "it.h"]
    text = (tmp_path / "it.c").read_text()
    assert "malloc" not in text and "asm" not in text

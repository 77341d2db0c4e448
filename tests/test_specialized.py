"""Specialized programs beside the same ones by rows: numbers, traps, fleets, files, the cache, what is refused."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn, warm
from calcvm.kernels_cpu import _native, _straight
from calcvm.kernels_cpu._target import host
from calcvm.operators import register_op
from calcvm.operators.cpu import Ptr, kernel
from tests.kinds.networks import network, network_inputs
from tests.test_own import own_spec

RNG = np.random.default_rng(0)
BATCH = 4
Make = Callable[[], Any]
NETWORKS: dict[str, tuple[Make, tuple[int, ...], dict[str, Any]]] = {
    "of numbers": (lambda: nn.Linear(16) >> nn.Tanh() >> nn.Dropout(0.2) >> nn.Linear(3), (4,), {}),
    "of images": (
        lambda: (
            nn.Conv2d(3, kernel=3) >> nn.BatchNorm() >> nn.ReLU() >> nn.MaxPool2d(2) >> nn.Flatten() >> nn.Linear(3)
        ),
        (1, 8, 8),
        {"dtype": "float64", "optimizer": cv.SGD(0.05, momentum=0.9)},
    ),
    "of sequences": (lambda: nn.LSTM(5, return_sequences=False) >> nn.Linear(3), (6, 2), {"stream": True}),
}


def pair(kind: str, **more: Any) -> list[cv.Model]:
    """A model by rows, and the specialized one."""
    net, shape, options = NETWORKS[kind]
    options = {"optimizer": cv.Adam(1e-2), "batch_size": BATCH, "workers": 1, "seed": 0, **options, **more}
    return [cv.Model(net(), input_shape=shape, specialize=special, **options) for special in (False, True)]


def data(kind: str, n: int) -> tuple[np.ndarray, np.ndarray]:
    return RNG.standard_normal((n, *NETWORKS[kind][1])), RNG.integers(0, 3, n)


def alike(a: Any, b: Any, dtype: str = "float32") -> None:
    np.testing.assert_allclose(
        a, b, rtol=1e-5 if dtype == "float32" else 1e-12, atol=1e-6 if dtype == "float32" else 1e-13
    )


@pytest.mark.parametrize("kind", NETWORKS)
def test_numbers_are_those_of_rows(kind: str) -> None:
    """Of the planned batch and of others, step by step, in whole epochs, and in a stream."""
    models = pair(kind)
    assert [bool(m.loaded.kernels.sections) for m in models] == [False, True]
    dtype = models[0].program.dtype
    for n in (BATCH, 3, BATCH, 1):
        X, y = data(kind, n)
        alike(*([m.step(X, y) for _ in range(3)] for m in models), dtype)
        alike(*(m.predict(X) for m in models), dtype)
    X, y = data(kind, 3 * BATCH + 2)
    alike(*(m.fit(X, y, epochs=2, progress=False)["loss"] for m in models), dtype)
    alike(*([*m.evaluate(X, y).values()] for m in models), dtype)
    for name in models[0].parameters:
        alike(*(m.parameters[name] for m in models), dtype)
    if "stream" in models[0].program.paths:
        streams = [m.stream(batch=BATCH) for m in models]
        for step in RNG.standard_normal((5, BATCH, 2)):
            alike(*(s(step) for s in streams), dtype)


def test_the_rows_of_sections_are_run() -> None:
    """With the code of another section in its place, the forward leaves the output as it was."""
    plain, special = pair("of numbers")
    assert "specialized" in f"{special.program} {special.program.disassemble()}" and "specialized" not in repr(
        plain.program
    )
    X, y = data("of numbers", BATCH)
    rows, _ = special.loaded.rows(BATCH)
    sections = special.loaded.kernels.sections
    assert sections.keys() == {span for span in special.program.sections.values() if span[0] < span[1]}
    for (start, _), instruction in sections.items():
        assert rows[start, 0] == instruction >= len(special.program.instructions)
    before = special.predict(X)
    start, stop = special.loaded.span("predict", ("forward",))
    code, at = special.loaded.kernels.addresses, sections[start, stop]
    own, code[at] = code[at], code[sections[special.loaded.span("predict", ("loss",))]]
    special["input"], special["target"] = X + 1, y
    special.forward("predict")
    code[at] = own
    np.testing.assert_array_equal(special["output"], before)  # since nothing has computed it again


@pytest.mark.parametrize("accumulate", [False, True])
def test_learning_batches_and_metrics_of_totals(accumulate: bool) -> None:
    X, y = RNG.standard_normal((22, 4)), RNG.standard_normal((22, 2))
    net = nn.Linear(6) >> nn.Tanh() >> nn.Linear(2)
    more = {"learning_batch": 3 * BATCH} if accumulate else {}
    histories, figures = [], []
    for special in (False, True):
        model = cv.Model(
            net, input_shape=(4,), loss="mse", optimizer="adam", metrics=[cv.rmse, "mae"], batch_size=BATCH, workers=1,
            specialize=special, **more,
        )  # fmt: skip
        histories.append(model.fit(X, y, validation=(X, y), epochs=3, progress=False))
        figures.append([*model.evaluate(X, y).values()])
    for name in ("loss", "val_loss", "val_rmse", "val_mae"):
        alike(*(h[name] for h in histories))
    alike(*figures)


def test_a_wrong_label_is_told_and_changes_nothing() -> None:
    told = []
    for model in pair("of numbers"):
        X, y = data("of numbers", BATCH)
        model.step(X, y)
        before = {name: value.copy() for name, value in model.parameters.items()}
        with pytest.raises(cv.CalcError) as error:
            model.step(X, np.array([0, 1, 7, 0]))
        told.append(str(error.value))
        for name, value in before.items():
            np.testing.assert_array_equal(model.parameters[name], value)
    assert told[0] == told[1] and "7" in told[0]


def test_fleets_copies_and_switched_models_have_the_bits_of_one_alone() -> None:
    X, y = data("of numbers", 3 * BATCH)
    net, shape, _ = NETWORKS["of numbers"]
    how = {"input_shape": shape, "optimizer": cv.Adam(1e-2), "batch_size": BATCH, "specialize": True}
    alone = [cv.Model(net(), seed=seed, **how) for seed in range(3)]
    for model in alone:
        model.fit(X, y, epochs=3, progress=False)
    with cv.Fleet(3 * alone[0].program.heap_bytes // 2, workers=2, store=cv.MemoryStore()) as fleet:
        handles = [fleet.add(net(), data=(X, y), seed=seed, **how) for seed in range(3)]
        fleet.fit(epochs=3, progress=False)
        for handle, model in zip(handles, alone):
            np.testing.assert_array_equal(handle.model.predict(X), model.predict(X))
    copy = alone[0].copy()
    assert copy.step(X[:BATCH], y[:BATCH]) == alone[0].step(X[:BATCH], y[:BATCH])


def ran(code: str, folder: Path, seconds: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in another process, in a folder, for so many seconds at most."""
    environment = {**os.environ, "PYTHONPATH": str(_native.PACKAGE.parent), **environment}
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds)


def test_a_file_runs_in_another_process_by_the_code_in_the_cache(tmp_path: Path) -> None:
    _, model = pair("of numbers")
    X, y = data("of numbers", BATCH)
    model.save(tmp_path / "m.calc")
    np.savez(tmp_path / "data.npz", X=X, y=y)
    wanted = [model.step(X, y) for _ in range(3)]
    code = """
import sys
import numpy as np
import calcvm as cv
model, data = cv.load("m.calc"), np.load("data.npz")
assert model.loaded.kernels.sections
print([model.step(data["X"], data["y"]) for _ in range(3)], "numba" in sys.modules)
"""
    done = ran(code, tmp_path)
    assert done.stdout == f"{wanted} False\n", done.stderr


AFTER = """
import numpy as np
import calcvm as cv
from calcvm import nn
x, losses = np.random.default_rng(0).standard_normal((4, 6, 2)), []
for specialize in (True, False):
    model = cv.Model(nn.LSTM(5) >> nn.Linear(3), input_shape=(6, 2), loss="mse", optimizer="adam", batch_size=4, workers=1,
                     specialize=specialize)
    losses.append([model.step(x, np.ones((4, 6, 3))) for _ in range(3)])
assert np.allclose(*losses, rtol=1e-5), losses
"""


def test_what_is_left_of_a_routine_is_not_taken_for_it(tmp_path: Path) -> None:
    """Here the linker meets a section's own form of ``gemm`` before the routine itself."""
    done = ran(AFTER, tmp_path)
    assert done.returncode == 0, done.stderr


BOTH = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # no other process compiles
import numpy as np
import calcvm as cv
from calcvm import nn
for layer, specialize in ((nn.Linear, True), (nn.LSTM, True), (nn.GRU, False), (nn.GRU, True)):
    model = cv.Model(layer(3), input_shape=(4, 2), loss="mse", optimizer="adam", batch_size=2, specialize=specialize, seed=0)
    print(model.step(np.ones((2, 4, 2)), np.ones((2, 4, 3))), float(model.predict(np.ones((2, 4, 2))).sum()))
"""


@pytest.mark.slow
def test_straight_code_and_kernels_may_be_compiled_in_one_process_in_any_order(tmp_path: Path) -> None:
    """Helpers that both call are compiled for each: an operand that is left out is at offset -1 in a kernel, and a null in straight code."""
    answers = [ran(BOTH, tmp_path, 250, CALCVM_CACHE_DIR=str(cache)) for cache in (tmp_path, _native.cache_root())]
    assert [a.returncode for a in answers] == [0, 0], answers[0].stderr
    assert answers[0].stdout == answers[1].stdout


def test_code_is_the_same_whether_bodies_come_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, made = pair("of numbers")[1].program, []
    names, rows = [name for name, _ in program.instructions], program.rows[slice(*program.sections["learn", "loss"])]
    monkeypatch.setenv("CALCVM_CACHE_DIR", str(tmp_path))
    _native.folder.cache_clear()
    try:
        for damaged in (False, False, True):
            for path in tmp_path.rglob("*.bc") if damaged else ():
                path.write_bytes(path.read_bytes()[:-1])
            made.append(_straight.section("calcvm_it", rows, names, "float32", "cpu", host()))
    finally:
        _native.folder.cache_clear()
    assert len({path.name for path in tmp_path.rglob("*.bc")}) >= 2 and made[0] == made[1] == made[2]


def test_sections_are_compiled_ahead() -> None:
    _, model = pair("of numbers")
    symbols = {f.symbol for f in warm.kernels_of(model.program)}
    own = {symbol for symbol in symbols if _native.name_of(symbol).startswith("rows-")}
    assert len(own) == len(model.loaded.kernels.sections) and all(
        _native.is_there(f.symbol, f.places) for f in warm.kernels_of(model.program)
    )
    plain, _ = pair("of numbers")
    assert symbols - own == {f.symbol for f in warm.kernels_of(plain.program)}


def test_a_kernel_registered_again_is_compiled_again(forgotten: None) -> None:
    register_op(own_spec())
    for times in (2, 4):
        scope: dict[str, Any] = {"Ptr": Ptr}
        text = "def own_fwd(me, rows, cols, x: Ptr, y: Ptr):\n    for i in range(rows * cols):\n"
        exec(f"{text}        y[i] = {times} * x[i]\n", scope)
        kernel(scope["own_fwd"])
        graph = cv.CalcGraph()
        x = graph.placeholder("x", (None, 2))
        with graph.path("p") as p:
            p.output = cv.apply("own", x).rename("y")
        program = cv.compile(graph, batch_size=1, specialize=True)
        model = cv.CalcHeap(program.heap_bytes).create(program)
        model["x"] = np.ones((1, 2))
        model.forward("p")
        assert (model["y"] == times).all()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"specialize": "yes"}, "specialize"),
        ({"specialize": True, "workers": 2}, "workers=2"),
        ({"specialize": True, "device": "cuda"}, "device='cuda'"),
        ({"specialize": True, "batch_size": 100_000}, "leave it out"),
    ],
)
def test_what_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(cv.CalcError, match=says):
        cv.Model(nn.Linear(500) >> nn.Linear(500), input_shape=(500,), loss="mse", optimizer="adam", **options)


def test_generated_networks(whole: bool) -> None:
    for seed in range(20 if whole else 1):
        rng = random.Random(seed)
        graph, _ = network(rng, widths=(1, 2, 3, 7, 10, 16, 33))
        batch = rng.choice((1, 2, 5, 16))
        inputs = network_inputs(graph, seed)(batch)
        found = []
        for special in (False, True):
            program = cv.compile(graph, batch_size=batch, workers=1, specialize=special)
            with cv.CalcHeap(program.heap_bytes) as heap:
                model = heap.create(program, seed=seed)
                for name, value in inputs.items():
                    model[name] = value
                found.append([model.run_steps(1) for _ in range(5)])
                found[-1] += [float(np.abs(value).sum()) for value in model.parameters.values()]
        alike(*found)

"""Ctrl-C is heard wherever compiled code runs, and finds a model as it was before or after a step."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.vm.program.encoding import FLAG_SYNC
from calcvm.vm.run import slices

HEARD = 2.0  # seconds after the signal; 0.2 on a machine that nobody else uses
AFTER = 0.3


@contextmanager
def interrupted(after: float = AFTER) -> Iterator[Callable[[], float]]:
    """Ctrl-C ``after`` seconds; gives the seconds since."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    start = time.perf_counter()
    signal.setitimer(signal.ITIMER_REAL, after)
    try:
        yield lambda: time.perf_counter() - start - after
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def straight(workers: int = 1) -> cv.Model:
    """A model whose parameters fall by 2**-20 a step, exactly: they tell how many steps they have seen."""
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 8))
    W = g.parameter("W", (8, 1), init=cv.init.Zeros())
    with g.path("learn", backward=True) as learn:
        learn.minimize(cv.mean(cv.matmul(x, W)), cv.SGD(2.0**-20))
    program = cv.compile(g, batch_size=4, dtype="float64", workers=workers)
    model = cv.CalcHeap(program.heap_bytes).create(program)
    model["x"] = np.ones((4, 8))
    return model


def deep(layers: int = 24, width: int = 512, batch: int = 2048, rate: float = 0.01, **more) -> cv.Model:
    """A step of it lasts seconds, a row hundredths of one."""
    net = nn.Sequential(*(nn.Linear(width) >> nn.ReLU() for _ in range(layers)), nn.Linear(4))
    return cv.Model(net, input_shape=(width,), loss="mse", optimizer=cv.SGD(rate), batch_size=batch, workers=1, **more)


def samples(width: int = 512, n: int = 2048):
    rng = np.random.default_rng(0)
    return rng.standard_normal((n, width)).astype("f4"), rng.standard_normal((n, 4)).astype("f4")


def parameters(model) -> list[bytes]:
    return [array.tobytes() for array in model.parameters.values()]


# ---------------------------------------------------------------- heard
@pytest.mark.parametrize("workers", [1, 2])
def test_many_steps_end_between_two(workers):
    model = straight(workers)
    model.run_steps(1)
    with interrupted() as since, pytest.raises(KeyboardInterrupt):
        model.run_steps(2_000_000_000)
    assert since() < HEARD
    steps = -model.parameters["W"] * 2**20
    assert steps.min() == steps.max() == np.round(steps.min()) > 0
    before = steps.max()
    model.run_steps(1000)
    assert (-model.parameters["W"] * 2**20 == before + 1000).all()


@pytest.mark.parametrize("call", ["step", "predict", "evaluate", "fit"])
def test_one_long_step_or_round_ends_before_it_changes_anything(call):
    X, y = samples()
    model = deep()
    model.predict(X[:1])
    before = parameters(model)
    calls = {
        "step": lambda: model.step(X, y),
        "predict": lambda: model.predict(X),
        "evaluate": lambda: model.evaluate(X, y),
        "fit": lambda: model.fit(X, y, progress=False).stopped,
    }
    began = time.perf_counter()
    with interrupted(0.05) as since:
        if call == "fit":
            assert calls[call]() == "interrupted"
        else:
            with pytest.raises(KeyboardInterrupt):
                calls[call]()
        assert since() < HEARD
    assert time.perf_counter() - began < 0.05 + HEARD
    assert parameters(model) == before
    same = deep()
    assert model.step(X, y) == same.step(X, y) and parameters(model) == parameters(same)


@pytest.mark.parametrize("validated", [False, True])
def test_a_fleet_of_long_rounds_ends_and_goes_on_with_the_same_bits(validated):
    """Also in the middle of a validation, which was run whole."""
    X, y = samples(n=1024)
    program = deep(8, batch=512).program
    more = {"validation": (np.tile(X, (8, 1)), np.tile(y, (8, 1)))} if validated else {}

    def fleet() -> cv.Fleet:
        fleet = cv.Fleet(3 * program.heap_bytes, workers=2)
        for seed in range(3):
            fleet.add(program, data=(X, y), seed=seed, **more)
        return fleet

    whole, broken = fleet(), fleet()
    whole.fit(1, progress=False)
    ends, after = 0, 0.05
    while any(h.epochs_done < 1 for h in broken.handles.values()):
        left = {h: 1 - h.epochs_done for h in broken.handles.values()}
        with interrupted(after) as since:
            try:
                broken.advance(left)
            except KeyboardInterrupt:
                assert since() < HEARD
                ends += 1
        after *= 1.5
    assert ends
    for a, b in zip(whole.handles.values(), broken.handles.values(), strict=True):
        assert a.losses.tolist() == b.losses.tolist() and a.val_losses.tolist() == b.val_losses.tolist()
        assert parameters(a.model) == parameters(b.model)


def test_sigterm_ends_a_fleet_of_long_rounds():
    child = subprocess.Popen(
        [sys.executable, "-c", """
import numpy as np
import calcvm as cv
from calcvm import nn

net = nn.Sequential(*(nn.Linear(512) >> nn.ReLU() for _ in range(8)), nn.Linear(4))
program = cv.compile(cv.build_graph(net, (512,), "mse", cv.SGD(0.01)), batch_size=512)
X, y = np.ones((8192, 512), "f4"), np.ones((8192, 4), "f4")
fleet = cv.Fleet(3 * program.heap_bytes, workers=2)
for seed in range(3):
    fleet.add(program, data=(X, y), seed=seed, validation=(X, y))
print("begins", flush=True)
fleet.fit(1000, progress=False)
"""],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with child:
        assert child.stdout is not None and child.stdout.readline() == "begins\n"
        time.sleep(1)
        start = time.perf_counter()
        child.terminate()
        assert child.wait(60) == 128 + signal.SIGTERM
        assert time.perf_counter() - start < 3 * HEARD, "it ends with the process, which takes a while itself"


# ---------------------------------------------------------------- with the same bits
@pytest.fixture
def eager(monkeypatch):
    """Rows are thought to take years: everything is cut where it can be."""

    def use() -> None:
        monkeypatch.setattr(slices, "FLOPS", 1e-9)
        monkeypatch.setattr(slices, "ELEMENTS", 1e-9)

    return use


def numbers(workers: int, rate: float, learning: int | None, dropout: float) -> list:
    """What all kinds of calls compute; programs of different rates share nothing."""
    rng = np.random.default_rng(1)
    X, y = rng.standard_normal((50, 6)).astype("f4"), rng.integers(0, 3, 50)
    layers = [nn.Linear(16), nn.Tanh(), *([nn.Dropout(dropout)] if dropout else []), nn.Linear(3)]
    model = cv.Model(
        nn.Sequential(*layers), input_shape=(6,), optimizer=cv.Adam(rate), batch_size=8, learning_batch=learning,
        workers=workers, preprocess=nn.Scale(0.5),
    )  # fmt: skip
    out = [model.fit(X, y, epochs=3, validation=0.2, progress=False)["val_loss"], model.predict(X).tobytes()]
    out += [model.evaluate(X, y), parameters(model)]
    if learning is None:
        out += [model.step(X[:5], y[:5]), model.run_steps(7), parameters(model)]
    fleet = cv.Fleet("1 MiB", workers=workers)
    for seed in range(3):
        fleet.add(model.program, data=(X, y), seed=seed, validation=(X[:20], y[:20]), learning_batch=learning)
    fleet.fit(3, progress=False)
    return [*out, *(h.losses.tolist() + h.val_losses.tolist() for h in fleet.handles.values())]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("learning", "dropout"), [(None, 0.0), (20, 0.0), (None, 0.3)])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_parts_have_the_bits_of_the_whole(workers, learning, dropout, late, eager, monkeypatch):
    """Also where every job is past its deadline when it begins."""
    rate = 1e-3 * (1 + workers / 16 + (learning or 0) / 1024 + dropout / 128)  # exact, and not seen before
    whole = numbers(workers, rate, learning, dropout)
    gc.collect()  # the program's loaded, with what was thought of its rows
    if late:
        monkeypatch.setattr(slices, "LATEST_NS", -1)
    if not late or workers == 3:
        eager()
    assert numbers(workers, rate, learning, dropout) == whole


@pytest.mark.parametrize("workers", [1, 3])
def test_cuts_are_where_a_team_meets_and_before_the_first_change(workers):
    program = cv.compile(
        cv.build_graph(nn.Linear(16) >> nn.Tanh() >> nn.Linear(3), (6,), "mse", cv.SGD(0.1)),
        batch_size=8, workers=workers,
    )  # fmt: skip
    changes, rows, long = slices.changing(program), program.rows, np.full(len(program.rows), 1.0)
    sections = program.sections
    learn = (sections["learn", "forward"][0], sections["learn", "optimize"][1])
    spans, parts = slices.cut([learn], rows, long, changes, workers)
    assert spans[0][0] == learn[0] and spans[-1][1] == learn[1] and parts == len(spans) > 1
    assert all(a[1] == b[0] for a, b in zip(spans, spans[1:]))
    assert not changes[learn[0] : spans[-1][0]].any() and changes[spans[-1][0] : learn[1]].any()
    if workers > 1:
        assert all(rows[stop - 1, 1] & FLAG_SYNC for _, stop in spans[:-1])
    predict = (sections["predict", "forward"][0], sections["predict", "loss"][1])
    alone, _ = slices.cut([predict], rows, long, changes, 1)
    assert alone == [(pc, pc + 1) for pc in range(*predict)]
    both, parts = slices.cut([learn, predict], rows, long, changes, workers)
    assert both == [*spans, predict] and parts == len(spans), "what comes after a change is of its part"
    assert slices.cut([learn, predict], rows, 0 * long, changes, workers) == ([learn, predict], 1)


def test_what_is_short_is_one_call(monkeypatch):
    model, calls = straight(), []
    device = model.loaded.device
    run = type(device).run
    monkeypatch.setattr(type(device), "run", lambda self, *job: calls.append(job[0]) or run(self, *job))
    model.run_steps(1)
    model.run_steps(1000)
    assert calls == ["run_rows"] * 2

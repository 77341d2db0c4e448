"""Buffers: what the forward of a path that trains updates, and inference reads."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.vm.program.verify import verify

RNG = np.random.default_rng(0)
X = RNG.standard_normal((24, 4)).astype("f4") + 3
Y = X[:, :2] * 2 - 1


def graph(momentum=0.25, start=0.5):
    g = cv.CalcGraph()
    x, t = g.placeholder("x", (None, 4)), g.placeholder("t", (None, 2))
    w = g.parameter("w", (4, 2), init=np.linspace(-1, 1, 8).reshape(4, 2))
    running = g.buffer("running", (4,), init=np.full(4, start))
    with g.path("learn", backward=True) as learn:
        y = cv.matmul(cv.center(x, running, momentum), w)
        learn.minimize(cv.mse(y, t), cv.SGD(0.1), output=y)
    with g.path("predict") as predict:
        out = cv.matmul(cv.center(x, running, momentum), w)
        predict.output = out
    return g


def load(g, heap=None, **options):
    program = cv.compile(g, batch_size=8, **options)
    return (heap or cv.CalcHeap(program.heap_bytes)).create(program)


def train(m, rounds=1):
    for k in range(rounds):
        m["x"], m["t"] = X[8 * k : 8 * k + 8], Y[8 * k : 8 * k + 8]
        m.forward("learn")
        m.backward("learn")
    m.optimize("learn")


def model(**options):
    net = nn.Center(0.25) >> nn.Linear(2)
    options = {"loss": "mse", "batch_size": 8, "seed": 1, "optimizer": cv.SGD(0.05)} | options
    return cv.Model(net, input_shape=(4,), **options)


# ---------------------------------------------------------------- what it holds
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_training_moves_it_and_inference_reads_it(dtype):
    m = load(graph(), dtype=dtype)
    np.testing.assert_array_equal(m["running"], np.full(4, 0.5))
    train(m)
    want = 0.5 + 0.25 * (X[:8].astype(dtype).mean(0) - 0.5)
    np.testing.assert_allclose(m["running"], want, rtol=1e-6)
    held = m["running"].tobytes()
    m["x"] = X[8:11]
    m.forward("predict")
    np.testing.assert_allclose(m["out"], (X[8:11] - want) @ m["w"], rtol=1e-4, atol=1e-5)
    assert m["running"].tobytes() == held
    m.buffers["running"][:] = 7
    np.testing.assert_array_equal(m["running"], np.full(4, 7))
    assert [*m.buffers] == ["running"] and [*m.parameters] == ["w"]
    m.reset(0)
    np.testing.assert_array_equal(m["running"], np.full(4, 0.5))


@pytest.mark.parametrize("accumulate", [False, True])
def test_any_team_gives_the_same_bits(accumulate):
    got = []
    for workers in (1, 2, 3):
        m = load(graph(), workers=workers, accumulate=accumulate)
        for _ in range(3):
            train(m)
        got.append((m["running"].tobytes(), m["w"].tobytes()))
    assert len(set(got)) == 1


def test_each_round_of_a_learning_batch_moves_it():
    m = load(graph())
    train(m, rounds=3)
    want = np.full(4, 0.5)
    for k in range(3):
        want += 0.25 * (X[8 * k : 8 * k + 8].astype(float).mean(0) - want)
    np.testing.assert_allclose(m["running"], want, rtol=1e-6)


def test_beside_torch():
    torch = pytest.importorskip("torch")
    ours = model(dtype="float64", learning_batch=16)
    norm = torch.nn.BatchNorm1d(4, eps=1e-30, affine=False, momentum=0.25, dtype=torch.float64)
    w = torch.tensor(ours.parameters["linear_1.weight"].copy(), requires_grad=True)
    b = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    sgd = torch.optim.SGD([w, b], 0.05)
    x, t = X[:16].astype(float), Y[:16].astype(float)
    ours.fit(x, t, epochs=3, shuffle=False)
    for _ in range(3):
        sgd.zero_grad()
        for k in (0, 8):
            part = torch.tensor(x[k : k + 8])
            centered = norm(part) * part.std(0, unbiased=False)
            loss = ((centered @ w + b - torch.tensor(t[k : k + 8])) ** 2).mean() / 2
            loss.backward()
        sgd.step()
    np.testing.assert_allclose(ours.buffers["center_1.running"], norm.running_mean.numpy(), rtol=1e-12)
    np.testing.assert_allclose(ours.parameters["linear_1.weight"], w.detach().numpy(), rtol=1e-9)
    mean = norm.running_mean.numpy()
    np.testing.assert_allclose(ours.predict(x), (x - mean) @ w.detach().numpy() + b.detach().numpy(), rtol=1e-9)


# ---------------------------------------------------------------- a model with it
def test_a_model_with_it_is_saved_copied_and_pickled(tmp_path):
    m = model()
    m.fit(X, Y, epochs=3)
    assert (m.buffers["center_1.running"] != 0).all() and m.evaluate(X, Y) is not None
    m.save(tmp_path / "m")
    for other in (cv.load(tmp_path / "m"), copy.copy(m), pickle.loads(pickle.dumps(m))):
        assert other.buffers["center_1.running"].tobytes() == m.buffers["center_1.running"].tobytes()
        np.testing.assert_array_equal(other.predict(X), m.predict(X))
    (tmp_path / "m").unlink()


def test_models_that_take_turns_in_one_heap_keep_their_own(tmp_path):
    alone = [model(seed=s) for s in (1, 2)]
    program = alone[0].program
    with cv.CalcHeap(program.heap_bytes, store=cv.FileStore(tmp_path)) as heap:
        both = [model(seed=s, heap=heap) for s in (1, 2)]
        for k in range(4):
            for a, b in zip(alone, both):
                assert a.step(X[k : k + 8], Y[k : k + 8]) == b.step(X[k : k + 8], Y[k : k + 8])
        for a, b in zip(alone, both):
            np.testing.assert_array_equal(a.buffers["center_1.running"], b.buffers["center_1.running"])


def test_a_fleet_trains_it_as_fit_does():
    ours, program = model(), model().program
    fleet = cv.Fleet(memory="1 MiB")
    handle = fleet.add(program, data=(X, Y), seed=1)
    fleet.fit(epochs=3, progress=False)
    ours.fit(X, Y, epochs=3)
    np.testing.assert_array_equal(handle.model["center_1.running"], ours.buffers["center_1.running"])


# ---------------------------------------------------------------- what is refused
def test_updates_where_nothing_trains_are_refused():
    g = cv.CalcGraph()
    x, running = g.placeholder("x", (None, 4)), g.buffer("running", (4,))
    with g.path("predict"):
        with pytest.raises(cv.CalcError, match=r"updates the buffer 'running', but path 'predict' does not train"):
            cv.center(x, running, training=True)
        with pytest.raises(cv.ShapeError, match="without its leading axis"), g.path("learn", backward=True):
            cv.center(x, g.buffer("other", (3,)))
    with (
        g.path("more", backward=True),
        pytest.raises(cv.CalcError, match=r"updates the parameter 'p': give it a buffer"),
    ):
        cv.center(x, g.parameter("p", (4,)))


def test_a_backward_that_would_read_what_the_forward_updates_is_refused():
    g = cv.CalcGraph()
    x, running, p = g.placeholder("x", (None, 4)), g.buffer("running", (4,)), g.parameter("p", (4,))
    with g.path("learn", backward=True) as learn:
        y = cv.center(x, running) + p * running
        learn.minimize(cv.mean(y), cv.SGD(0.1))
    with pytest.raises(cv.CalcError, match="reads the buffer 'running', which the path's forward updates"):
        cv.plan(g, batch_size=8)


def test_the_verifier_asks_whether_the_path_trains():
    program = cv.compile(graph(), batch_size=8)
    first = {("early", "forward"): program.sections["learn", "forward"]}
    sections = first | {k: v for k, v in program.sections.items() if k != ("learn", "forward")}
    with pytest.raises(cv.ProgramError, match="changes buffer running in a path that does not train"):
        verify(replace(program, sections=sections, info={}))
    moved = {("learn", "backward"): (0, len(program.rows))}
    with pytest.raises(cv.ProgramError, match="changes buffer running in phase backward: it is read-only there"):
        verify(replace(program, sections=moved, info={}))

"""Gradients as equations: what is printed, evaluated by NumPy, is the gradient that the program computes."""

from __future__ import annotations

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn

RNG = np.random.default_rng(5)


def check(graph: cv.CalcGraph, values: dict, path: str = "learn", tolerance: float = 1e-6) -> None:
    """Each parameter's equations give its gradient, and read nothing else than what they name."""
    learn = graph.paths[path]
    program = cv.compile(graph, batch_size=8, workers=1, accumulate=True, dtype="float64")
    with cv.CalcHeap(program.heap_bytes) as heap:
        model = heap.create(program, seed=3)
        for name, value in values.items():
            model[name] = value
        model.forward(path)
        known = {
            v.name: model[v.name]
            for v in graph.variables.values()
            if v.kind in ("parameter", "buffer", "state") and v.name in model
        }
        model.backward(path)
        trained = learn.trained_behind(learn.loss)
        most = max(
            np.abs(model.grad(p.name, path)).max() for p in trained
        )  # of some the gradient is 0 but for rounding
        for p in trained:
            found = learn.gradient_of(p)
            got, want = found.evaluate({**known, **values}), model.grad(p.name, path)
            assert got.shape == want.shape, f"{found}"
            np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * most, err_msg=str(found))
            assert found.equations[-1][0] == found.name and found._repr_latex_().startswith("$$")


def data(shape, classes=0, n=5):
    x = RNG.normal(size=(n, *shape))
    return {"input": x, "target": RNG.integers(0, classes, n) if classes else RNG.normal(size=(n, 3))}


# ---------------------------------------------------------------- the paper's example
def perceptron():
    g = cv.CalcGraph()
    x, t = g.placeholder("x", (None, 6)), g.placeholder("t", (None, 3))
    W, b = g.parameter("W", (6, 4)), g.parameter("b", (4,))
    V = g.parameter("V", (4, 3))
    with g.path("learn", backward=True) as learn:
        A = x @ W + b
        H = cv.sigmoid(A)
        Y = H @ V
        L = cv.mse(Y, t)
        learn.minimize(L, optimizer=cv.SGD(1e-3), output=Y)
    return g, learn, W, b, V


def test_equations_of_a_perceptron():
    g, learn, W, b, V = perceptron()
    assert str(learn.gradient_of(W)) == (
        "A = x @ W + b\nH = sigmoid(A)\nY = H @ V\ndH = 2*(Y - t)/(3*B) @ V.T\ndW = x.T @ (dH*H*(1 - H))"
    )
    assert str(learn.gradient_of("V")) == "A = x @ W + b\nH = sigmoid(A)\nY = H @ V\ndV = H.T @ (2*(Y - t)/(3*B))"
    found = learn.gradient_of(b)
    assert found.equations[-1] == ("db", "(dH*H*(1 - H)).sum(0)") and found.name == "db" and found.parameter == "b"
    assert {*found.sources.values()} == {"x", "t", "W", "b", "V"}
    assert r"x^\top \, \left(dH \odot H \odot \left(1 - H\right)\right)" in learn.gradient_of(W)._repr_latex_()
    assert r"dH &= \frac{2 \, \left(Y - t\right)}{3 \, B} \, V^\top" in learn.gradient_of(W)._repr_latex_()
    check(g, {"x": RNG.normal(size=(5, 6)), "t": RNG.normal(size=(5, 3))})


# ---------------------------------------------------------------- numbers
NETWORKS = {
    "classes": (nn.Linear(5) >> nn.ReLU() >> nn.Linear(4), (6,), 4, "softmax_cross_entropy"),
    "convolution": (
        nn.Conv2d(4, 3, padding=1) >> nn.LeakyReLU() >> nn.MaxPool2d(2) >> nn.Conv2d(3, 2) >> nn.Tanh() >> nn.Flatten() >> nn.Linear(4),
        (2, 6, 6), 4, "softmax_cross_entropy",
    ),
    "normalized": (nn.Linear(6) >> nn.BatchNorm() >> nn.GELU() >> nn.LayerNorm() >> nn.Linear(3), (5,), 0, "huber"),
    "dropped": (nn.Linear(6) >> nn.Mish() >> nn.Dropout(0.4) >> nn.Linear(3), (5,), 0, "mae"),
    "residual": (nn.Linear(6) >> nn.Residual(nn.ELU() >> nn.Linear(6)) >> nn.SiLU() >> nn.Linear(3), (5,), 0, "mse"),
    "scaled": (
        nn.Upsample(scale=2, mode="linear") >> nn.ConvTranspose2d(3, 2, stride=2) >> nn.GroupNorm(3) >> nn.AvgPool2d(2)
        >> nn.Concat(nn.ReLU6(), nn.Softplus()) >> nn.GlobalAvgPool() >> nn.Flatten() >> nn.Linear(3),
        (2, 4, 5), 3, "softmax_cross_entropy",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_equations_of_networks(name):
    net, shape, classes, loss = NETWORKS[name]
    check(cv.build_graph(net, shape, loss, cv.SGD(0.1)), data(shape, classes))


def test_weights_that_are_shared_have_the_sum():
    g = cv.CalcGraph()
    x, t = g.placeholder("x", (None, 4)), g.placeholder("t", (None, 4))
    W = g.parameter("W", (4, 4))
    with g.path("learn", backward=True) as learn:
        y = cv.tanh(cv.tanh(x @ W) @ W) + 0.5 * (x @ cv.transpose(W))
        learn.minimize(cv.mse(y, t) + 0.1 * cv.sum_squares(W), optimizer=cv.SGD(1e-3), output=y)
    found = learn.gradient_of(W)
    assert found.equations[-1][1].count(" + ") >= 2
    check(g, {"x": RNG.normal(size=(5, 4)), "t": RNG.normal(size=(5, 4))})


def test_a_gradient_that_is_0_wherever_there_is_one():
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 4))
    U, W = g.parameter("U", (4, 3)), g.parameter("W", (3, 2))
    with g.path("learn", backward=True) as learn:
        learn.minimize(cv.mean(cv.square(cv.sign(x @ U) @ W)), optimizer=cv.SGD(1e-3))
    assert str(learn.gradient_of(U)) == "dU = np.zeros((4, 3))"
    assert learn.gradient_of(U).evaluate({}).shape == (4, 3) and "dW = " in str(learn.gradient_of(W))


def test_results_of_other_paths_are_sources():
    g = cv.CalcGraph()
    x, t = g.placeholder("x", (None, 4)), g.placeholder("t", (None, 2))
    V, W = g.parameter("V", (4, 3)), g.parameter("W", (3, 2))
    with g.path("code"):
        z = cv.tanh(x @ V)
    with g.path("learn", backward=True) as learn:
        learn.minimize(cv.mse(z @ W, t), optimizer=cv.SGD(1e-3))
    assert {*learn.gradient_of(W).sources.values()} == {"z", "W", "t"}


def test_operators_by_hand():
    g = cv.CalcGraph()
    x, t = g.placeholder("x", (None, 4, 3)), g.placeholder("t", (None, 3))
    W, s = g.parameter("W", (3, 3)), g.parameter("s", (4, 1), init=cv.init.Uniform(0.5, 1.5))
    with g.path("learn", backward=True) as learn:
        y = cv.softmax(cv.max(x * s @ W, axis=1) / cv.exp(cv.mean(cv.abs(x), axis=1)))
        y = cv.concat([y[:, 1:], y[:, :1]], axis=1) ** 1.5 * cv.where(t > 0, t, cv.square(t))
        learn.minimize(cv.mean(cv.log(y + 2.0)), optimizer=cv.SGD(1e-3))
    check(g, {"x": RNG.normal(size=(5, 4, 3)), "t": RNG.normal(size=(5, 3))})


@pytest.mark.parametrize("shape", [(), (1, 1), (3,), (2, 3)])
def test_one_form_that_is_taken_twice(shape):
    """What the same operators make of the same values is one text, though it has several names."""
    g = cv.CalcGraph()
    q = g.parameter("q", shape, RNG.normal(size=shape))
    with g.path("learn", backward=True) as learn:
        h = cv.tanh(q)
        learn.minimize(cv.mean(h) + cv.mean(cv.tanh(h)) + cv.mean(cv.tanh(q)), optimizer=cv.SGD(1e-3))
    check(g, {})


def test_views_of_views():
    """What NumPy gives of a slice, reshaped and turned, may be a view; its elements lie in another order than a heap's."""
    rng = np.random.default_rng(9)
    for _ in range(60):
        g, shape = cv.CalcGraph(), [int(n) for n in rng.integers(2, 5, 3)]
        x, w = g.placeholder("x", (None, *shape)), g.parameter("w", tuple(shape))
        with g.path("learn", backward=True) as learn:
            v = cv.square(x * w)
            for kind in rng.choice(["slice", "reshape", "transpose"], rng.integers(3, 7)):
                at = int(rng.integers(len(shape)))
                if kind == "slice":
                    stop = int(rng.integers(1, shape[at] + 1))
                    start = int(rng.integers(stop))
                    v, shape[at] = v[(slice(None),) * (at + 1) + (slice(start, stop),)], stop - start
                elif kind == "reshape":
                    shape = [shape[0] * shape[1], *shape[2:]] if len(shape) > 1 else [1, *shape]
                    v = cv.reshape(v, (None, *shape))
                else:
                    axes = rng.permutation(len(shape))
                    v, shape = cv.transpose(v, (0, *(int(k) + 1 for k in axes))), [shape[k] for k in axes]
            learn.minimize(cv.mean(cv.square(v)), "adam", output=v)
        check(g, {"x": rng.normal(size=(3, *x.descriptor.generic[1:]))})


# ---------------------------------------------------------------- what is refused
def test_what_has_no_gradient_is_refused():
    g, learn, W, _, _ = perceptron()
    with g.path("score") as score:
        cv.exp(W)
    with pytest.raises(cv.CalcError, match="path 'score' minimizes no loss"):
        score.gradient_of(W)
    for wrong in ("U", g.variables["x"], 3, None):
        with pytest.raises(cv.CalcError, match="path 'learn' does not train a parameter .*; it trains W, b, V"):
            learn.gradient_of(wrong)
    other, *_ = perceptron()
    with pytest.raises(cv.CalcError, match="does not train a parameter"):
        learn.gradient_of(other.variables["W"])


def test_values_that_are_missing_or_do_not_fit_are_refused():
    _, learn, W, _, _ = perceptron()
    found = learn.gradient_of(W)
    values = {"x": np.ones((5, 6)), "t": np.ones((5, 3)), "W": np.ones((6, 4)), "b": np.ones(4), "V": np.ones((4, 3))}
    assert found.evaluate(values).shape == (6, 4)
    with pytest.raises(cv.CalcError, match="no value of 'V'"):
        found.evaluate({k: v for k, v in values.items() if k != "V"})
    with pytest.raises(cv.ShapeError, match="'t' has shape"):
        found.evaluate({**values, "t": np.ones((4, 3))})
    with pytest.raises(cv.CalcError, match="mapping"):
        found.evaluate(3)

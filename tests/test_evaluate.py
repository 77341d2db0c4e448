"""`Path.evaluate`: every value of a path by equations alone.  tests/kinds/test_wild.py has generated graphs."""

from __future__ import annotations

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn

RNG = np.random.default_rng(0)
X, T = RNG.normal(size=(5, 6)), RNG.normal(size=(5, 3))


@pytest.fixture
def learn():
    g = cv.CalcGraph()
    x, t = g.placeholder("x", (None, 6)), g.placeholder("t", (None, 3))
    W, b = g.parameter("W", (6, 3)), g.parameter("b", (3,), init=cv.init.Uniform(-1, 1))
    with g.path("learn", backward=True) as learn:
        y = cv.sigmoid(cv.matmul(x, W) + b)
        y.rename("y")
        learn.minimize(cv.mse(y, t), optimizer=cv.SGD(0.1), output=y)
    return learn


def test_every_value_is_what_a_model_computes(learn):
    program = cv.compile(learn.graph, batch_size=5, dtype="float64", keep=["matmul", "add"])
    model = cv.CalcHeap("1 MiB").create(program, seed=7)
    model["x"], model["t"] = X, T
    model.forward("learn")
    found = learn.evaluate({"x": X, "t": T}, seed=7)
    assert [*found] == ["matmul", "add", "y", "mse"]
    for name, value in found.items():
        np.testing.assert_allclose(value, model[name], 1e-12)


def test_what_follows_from_nothing_given_is_left_out(learn):
    assert [*learn.evaluate({"x": X})] == ["matmul", "add", "y"]
    with pytest.raises(
        cv.CalcError, match="evaluate: all results of path 'learn' depend on values that are not given: x, t"
    ):
        learn.evaluate({})


def test_what_is_missing_is_what_the_path_reads(learn):
    g = learn.graph
    with g.path("more") as more:
        cv.exp(g.variables["y"])
    with pytest.raises(cv.CalcError, match="path 'more' depend on values that are not given: y$"):
        more.evaluate({})


@pytest.mark.parametrize(
    ("of", "wrong"),
    [("int64", 3), ("int64", -1), ("pick", 3), ("pick", -1), *(("float", n) for n in (3, -1, 0.5, np.nan))],
)
def test_indexes_are_refused_where_the_program_refuses_them(of, wrong):
    g = cv.CalcGraph()
    x, t = g.placeholder("x", (None, 3)), g.placeholder("t", (None,), dtype=None if of == "float" else "int64")
    with g.path("p") as p:
        p.output = cv.pick(x, t) if of == "pick" else cv.softmax_cross_entropy(x, t)
    assert {*p.evaluate({"x": X[:3, :3], "t": np.array([0, 1, 2])})} == {p.output.name}
    what = "an index" if of == "pick" else "a label"
    with pytest.raises(
        cv.CalcError, match=rf"evaluate: '{p.output.name}': {what} of 't' is not an integer in \[0, 3\)"
    ):
        p.evaluate({"x": X[:3, :3], "t": np.array([0, wrong, 1])})


def test_values_of_a_model_and_of_steps_before(learn):
    W, add = RNG.normal(size=(6, 3)), RNG.normal(size=(5, 3))
    found = learn.evaluate({"x": X, learn.graph.variables["W"]: W, "add": add})
    np.testing.assert_allclose(found["matmul"], X @ W, 1e-12)
    np.testing.assert_allclose(found["y"], 1 / (1 + np.exp(-add)), 1e-12)


def test_what_is_wrong_is_said(learn):
    with pytest.raises(
        cv.CalcError, match="evaluate: path 'learn' has no value 'q'; it has x, t, W, b, matmul, add, y, mse"
    ):
        learn.evaluate({"q": X})
    with pytest.raises(
        cv.ShapeError, match=r"evaluate: 't' has shape \(4, 3\), expected \(B, 3\), with one batch for all"
    ):
        learn.evaluate({"x": X, "t": T[:4]})
    with pytest.raises(cv.CalcError, match="evaluate: a mapping of arrays by the names of variables is wanted"):
        learn.evaluate(X)


def test_a_network_by_its_equations_and_what_it_draws():
    net = (
        nn.Conv2d(4, 3, stride=2, padding=1)
        >> nn.BatchNorm()
        >> nn.ReLU()
        >> nn.Dropout(0.5)
        >> nn.Flatten()
        >> nn.Linear(3)
    )
    options = {"input_shape": (2, 8, 8), "loss": "softmax_cross_entropy", "optimizer": cv.SGD(0.1)}
    model = cv.Model(net, batch_size=4, seed=0, dtype="float64", **options)
    graph = cv.build_graph(net, **options)
    images, labels = RNG.normal(size=(4, 2, 8, 8)), RNG.integers(0, 3, 4)
    model.fit(images, labels, epochs=2, progress=False)
    state = {**model.parameters, **model.buffers}
    found = graph.paths["predict"].evaluate({"input": images, "target": labels, **state})
    np.testing.assert_allclose(found["output"], model.predict(images), 1e-12, 1e-12)
    learn = graph.paths["learn"]
    with pytest.raises(
        cv.UnsupportedOperator, match="it draws random numbers by a counter; give its result as a value"
    ):
        learn.evaluate({"input": images, "target": labels, **state})
    kept = learn.evaluate({"input": images, "target": labels, **state, "dropout": np.zeros((4, 4, 4, 4))})
    assert kept["loss"] > 0 and not kept["flatten"].any()


@pytest.mark.parametrize("name", ["square", "sin", "log1p", "abs", "tanh", "pow", "gelu", "div", "twice", "itself"])
def test_gradients_are_evaluated_too(name):
    """Of operators that read their input or their result, and where a value is used more than once."""
    of = {
        "pow": lambda x: cv.pow(x, 2.5), "div": lambda x: 1 / x, "twice": lambda x: x + cv.tanh(x) * x,
        "itself": lambda x: cv.matmul(x, cv.transpose(x, (1, 0))),
    }  # fmt: skip
    g = cv.CalcGraph()
    x = g.placeholder("x", (4, 3))
    with g.path("look"):
        d = cv.gradient(cv.sum(of.get(name, getattr(cv, name, None))(x)), x)
    program = cv.compile(g, batch_size=1, dtype="float64", keep=[d.name])
    model = cv.CalcHeap(program.heap_bytes).create(program)
    model["x"] = data = RNG.uniform(0.1, 1, (4, 3))
    model.forward("look")
    np.testing.assert_allclose(g.paths["look"].evaluate({"x": data})[d.name], model[d.name], 1e-12)

"""Typed placeholders on a simulated GPU: epochs, results and training as on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

import calcvm as cv
from calcvm.errors import Trap
from calcvm.formulas import number as n
from calcvm.operators import Choice, Real, elementwise

RNG = np.random.default_rng(0)
X, T = RNG.integers(0, 256, (17, 6)).astype(np.uint8), RNG.integers(0, 3, 17)
WAYS = {
    "one block": dict(mode="grid", workers=1),
    "grid": dict(mode="grid", workers=2),
    "graph": dict(mode="graph", workers=2),
}


def model(device: str, labels: str | None, image: str | None, **how) -> cv.Model:  # type: ignore[no-untyped-def]
    g = cv.CalcGraph()
    x, t = g.placeholder("x", (None, 6), dtype=image), g.placeholder("t", (None,), dtype=labels)
    W = g.parameter("W", (6, 3))
    with g.path("learn", backward=True) as learn:
        z = (x / 255.0) @ W
        Y = cv.where(z > 0, z, 0.1 * z)
        learn.minimize(cv.softmax_cross_entropy(Y, t), optimizer=cv.SGD(0.5), output=Y)
    with g.path("predict"):
        cv.softmax((x / 255.0) @ W)
    program = cv.compile(g, batch_size=5, device=device, **how)
    return cv.CalcHeap(program.heap_bytes, device=device).create(program, seed=1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("labels", "image"), [("int64", "uint8"), ("int32", None), ("uint8", "int64")])
def test_training_is_the_cpus(gpu, way, labels, image):
    cpu = model("cpu", None, None, workers=1)
    own = model("cuda", labels, image, **WAYS[way])
    x, t = X.astype(image or "uint8"), T.astype(labels)
    for m, data in ((cpu, (X, T)), (own, (x, t))):
        m.fit(*data, epochs=2)
        m.step(*(a[:5] for a in data))
    np.testing.assert_allclose(own.parameters["W"], cpu.parameters["W"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(own["t"], t[:5])
    assert own["t"].dtype == labels


def test_a_label_that_is_no_class_traps(gpu):
    """What verification cannot know, the kernel sees: the row is named, and nothing is written elsewhere."""
    m = model("cuda", "int64", "uint8", mode="grid", workers=1)
    m.step(X[:5], T[:5])
    for wrong in (-1, 3, 2**62):
        slot = m.slot
        slot.write(m.program.by_name["t"], np.array([0, 1, wrong, 2, 0]), (5,))
        with pytest.raises(
            Trap, match=r"softmax_cross_entropy_\w+\.int64, .*: a label of 't' is not an integer in \[0, 3\)"
        ):
            m.run_steps(1)


def test_a_parameter_of_a_formula_of_bools(gpu, forgotten):
    @elementwise(limit=Real(0.0, "limit"))
    class above:
        def y(x, limit) -> bool:
            return x > limit

    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 4))
    with g.path("predict"):
        y = cv.where(cv.apply("above", x, limit=0.25), x, -1.0)
    m = cv.CalcHeap("1 MiB", device="cuda").create(cv.compile(g, batch_size=8, device="cuda", mode="grid", workers=1))
    given = RNG.normal(size=(8, 4)).astype("float32")
    m["x"] = given
    m.forward("predict")
    np.testing.assert_array_equal(m[y.name], np.where(given > 0.25, given, -1))


def test_parameters_of_a_formula_of_two(gpu, forgotten):
    @elementwise(k=Real(2.0, "a factor"))
    class scaled:
        def y(a, b, k):
            return a * k + b

    @elementwise(k=Real(2.0, "a factor"), how=Choice(("times", "plus"), "which"))
    class odd:
        def y(x, k, how):
            return x * k if how == "times" else x + k

    g = cv.CalcGraph()
    x, b = g.placeholder("x", (None, 4)), g.parameter("b", (4,))
    with g.path("predict"):
        y = cv.apply("scaled", x, b, k=3.0) + cv.apply("scaled", x, x)
        more = cv.apply("odd", x, k=3.0), cv.apply("odd", x, k=3.0, how="plus")
    m = cv.CalcHeap("1 MiB", device="cuda").create(cv.compile(g, batch_size=8, device="cuda", mode="grid", workers=1))
    m["x"] = np.arange(32.0).reshape(8, 4)
    m.forward("predict")
    np.testing.assert_array_equal(m[y.name], m["x"] * 6 + m.parameters["b"])
    np.testing.assert_array_equal([m[v.name] for v in more], [m["x"] * 3, m["x"] + 3])


def test_the_gradient_may_be_that_of_the_output(gpu, forgotten):
    @elementwise()
    class step:
        def y(x):
            return n.where(x > 0, n.like(x, 1.0), 0.0)

        def dx(dy):
            return dy

    given, got = RNG.normal(size=(5, 6)), []
    for device in ("cpu", "cuda"):
        g = cv.CalcGraph()
        x, w = g.placeholder("x", (None, 6)), g.parameter("w", (6, 3))
        with g.path("learn", backward=True) as learn:
            learn.minimize(cv.mse(cv.apply("step", x @ w), x @ np.ones((6, 3))), cv.SGD(0.1))
        program = cv.compile(g, batch_size=5, device=device)
        m = cv.CalcHeap(program.heap_bytes, device=device).create(program, seed=1)
        before = np.array(m.parameters["w"])
        m.step(given)
        got.append(np.array(m.parameters["w"]))
        assert np.abs(got[-1] - before).min() > 1e-4
    np.testing.assert_allclose(*got, rtol=1e-6, atol=1e-7)

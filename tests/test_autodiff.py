"""What autodiff emits, and what it leaves out."""

from __future__ import annotations

import numpy as np
import pytest

import calcvm as cv
from calcvm.lowering.sections import lower

RNG = np.random.default_rng(0)


def emitted(graph, path, dtype="float32"):
    return [s for s in lower(graph, dtype=dtype)[0].statements if s.path == path]


def load(graph, **options):
    program = cv.compile(graph, batch_size=8, **options)
    return cv.CalcHeap(program.heap_bytes).create(program)


# ---------------------------------------------------------------- saved values
def classifier():
    """Paths that learn and that judge by the same loss."""
    g = cv.CalcGraph()
    x, t, w = g.placeholder("x", (None, 4)), g.placeholder("t", (None,)), g.parameter("w", (4, 3))
    with g.path("learn", backward=True) as learn:
        learn.minimize(cv.softmax_cross_entropy(cv.matmul(x, w), t), cv.SGD(0.1))
    with g.path("judge"):
        score = cv.softmax_cross_entropy(cv.matmul(x, w), t)  # noqa: F841
    return g


def test_what_is_saved_has_cells_where_a_backward_reads_it():
    saved = {
        path: [s.operands["p"] for s in emitted(classifier(), path) if s.spec.name == "softmax_cross_entropy_fwd"]
        for path in ("learn", "judge")
    }
    assert saved["judge"] == [None]
    assert len(saved["learn"]) == 1 and saved["learn"][0] is not None


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_path_that_judges_gives_the_same_loss(dtype):
    m = load(classifier(), dtype=dtype, workers=2)
    m["x"], m["t"] = RNG.standard_normal((8, 4)), RNG.integers(0, 3, 8)
    m.forward("judge")
    judged = m["score"]
    m.forward("learn")
    assert m["softmax_cross_entropy"].tobytes() == judged.tobytes()


# ---------------------------------------------------------------- sums over any axes
SHAPES = [
    ((None, 3, 7), (3, 1)),
    ((None, 3, 2, 5), (3, 1, 5)),
    ((None, 3, 2, 5), (1, 2, 1)),
    ((None, 2, 3, 2, 3), (2, 1, 2, 1)),
    ((2, None, 2, 3, 2, 3), (2, 1, 1, 3, 1, 3)),
    ((None, 5), (5,)),
]


@pytest.mark.parametrize(("shape", "of"), SHAPES)
def test_the_gradient_of_what_is_broadcast_is_one_sum(shape, of):
    g = cv.CalcGraph()
    x, p = g.placeholder("x", shape), g.parameter("p", of, init=RNG.standard_normal(of))
    with g.path("learn", backward=True) as learn:
        learn.minimize(cv.mean(cv.square(x - p * 2.0)), cv.SGD(0.1))
    assert [s.spec.name for s in emitted(g, "learn") if s.phase == "backward"].count("sum_fwd") == 1
    for workers in (1, 3):
        m = load(g, dtype="float64", workers=workers)
        data = RNG.standard_normal([n or 7 for n in shape])
        m["x"] = data
        m.forward("learn")
        m.backward("learn")
        slope = -4 * (data - 2 * m["p"]) / data.size
        axes = [i for i, n in enumerate((1,) * (len(shape) - len(of)) + of) if n == 1 and data.shape[i] != 1]
        want = slope.sum(tuple(axes), keepdims=True).reshape(of)
        np.testing.assert_allclose(m.grad("p"), want, rtol=1e-11)


@pytest.mark.parametrize("name", ["sum", "mean", "sum_squares"])
@pytest.mark.parametrize(("axes", "rows"), [((0, 2), 1), ((1, 3), 1), ((0, 2, 4), 1), ((0, 2, 4, 6), 2)])
def test_sums_over_axes_that_are_no_neighbours(name, axes, rows):
    shape = (None, 2, 3, 2, 3, 2, 3)[: max(axes[-1] + 1, 4)]
    g = cv.CalcGraph()
    x = g.placeholder("x", shape)
    with g.path("p"):
        y = getattr(cv, name)(x, axis=axes, keepdims=True)  # noqa: F841
    assert len(emitted(g, "p")) == rows
    m = load(g, dtype="float64", workers=2)
    data = RNG.standard_normal([n or 5 for n in shape])
    m["x"] = data
    m.forward("p")
    want = (np.mean if name == "mean" else np.sum)(data**2 if name == "sum_squares" else data, axes, keepdims=True)
    np.testing.assert_allclose(m["y"], want, rtol=1e-11)

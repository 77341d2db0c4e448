"""What workers share: from rank 3 on the first two axes together, so that a single sample is shared too."""

from __future__ import annotations

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.lowering.sections import lower
from calcvm.ops.dims import Affine
from calcvm.ops.sizes import evaluate

X = np.random.default_rng(0).standard_normal((3, 6, 4))


def graph():
    g = cv.CalcGraph()
    x, t = g.placeholder("x", (None, 6, 4)), g.placeholder("t", (None, 6))
    w, b, c = g.parameter("w", (4, 5)), g.parameter("b", (5,)), g.parameter("c", (1, 1, 5))
    with g.path("learn", backward=True) as learn:
        y = cv.gelu(cv.linear(x, w, b)) * c
        y = cv.concat([cv.log_softmax(y), y[:, :, 1:3]])
        y = cv.reshape(cv.transpose(cv.reshape(y, (None, 6, 1, 7)), (0, 1, 3, 2)), (None, 6, 7))
        z = cv.mean(cv.square(y), axis=-1) + cv.max(y, axis=-1)
        learn.minimize(cv.softmax_cross_entropy(y, t) + cv.mse(z, t), cv.SGD(0.1))
    return g


def test_rows_of_rank_3_are_shared_at_batch_1():
    """But for what is of rank 2 (z), sums over the batch, and scalars."""
    shared = 0
    for s in lower(graph())[0].statements:
        words = {k: v.at(1) if isinstance(v, Affine) else v for k, v in s.words.items()}
        for o in s.spec.writes:
            value = s.operands[o.name]
            if value is None or value.shape is None or len(value.shape) < 3 or not value.shape[0].a:
                continue
            units = evaluate(o.part, words)
            assert units == 6, f"{s.spec.name}: {o.name} {value.shape} has {units} units"
            shared += 1
    assert shared > 15


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_any_team_gives_the_same_bits(batch):
    got = set()
    for workers in (1, 2, 3, 5):
        program = cv.compile(graph(), batch_size=3, workers=workers)
        m = cv.CalcHeap(program.heap_bytes).create(program)
        m["x"], m["t"] = X[:batch], np.arange(6 * batch).reshape(batch, 6) % 7
        for _ in range(3):
            m.forward("learn")
            m.backward("learn")
            m.optimize("learn")
        got.add(b"".join(m[name].tobytes() for name in ("w", "b", "c")))
    assert len(got) == 1


def test_samples_of_rank_2_are_shared_as_ever():
    g = cv.build_graph(nn.Linear(8) >> nn.ReLU() >> nn.Linear(2), (4,), "mse", "adam")
    for s in lower(g)[0].statements:
        if s.spec.name.startswith(("linear_fwd", "relu", "mse_fwd")):
            assert s.words["rows"] == Affine(1)

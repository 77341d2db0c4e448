"""Random networks of usual widths, and random graphs of shape operators with the batch on any axis, valid by construction."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

import calcvm as cv
from calcvm import init, nn
from calcvm.graph import Variable
from calcvm.ops.dims import numel

WIDTHS = (1, 2, 3, 7, 10, 16, 33, 64, 100, 128, 256, 500, 511, 512, 513, 600, 784, 1024, 1100)
BATCHES = (1, 2, 3, 7, 16, 64, 100, 256, 511, 512, 513, 1000, 2000)
TEAMS = (1, 2, 3, 5, 8)
ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.GELU, nn.Softplus)
OPTIMIZERS = (
    lambda: cv.SGD(0.01),
    lambda: cv.SGD(0.01, momentum=0.9),
    lambda: cv.Adam(0.001),
    lambda: cv.AdamW(0.001, clip_norm=1.0, no_decay="1d"),
    lambda: cv.RMSProp(0.001, clip_value=0.5),
)
Inputs = Callable[[int], dict[str, np.ndarray]]


def network(rng: random.Random, widths: tuple[int, ...] = WIDTHS) -> tuple[cv.CalcGraph, str]:
    """A multi-layer perceptron with a loss, and what it is."""
    sizes = [rng.choice(widths) for _ in range(rng.randint(2, 5))]
    layer = nn.Linear(sizes[1])
    for n in sizes[2:]:
        layer = layer >> rng.choice(ACTIVATIONS)() >> nn.Linear(n)
    if rng.random() < 0.2:
        layer = layer >> nn.Dropout(0.3)
    loss = rng.choice(("mse", "softmax_cross_entropy")) if sizes[-1] > 1 else "mse"
    return cv.build_graph(layer, (sizes[0],), loss, rng.choice(OPTIMIZERS)()), f"{sizes} {loss}"


def network_inputs(graph: cv.CalcGraph, seed: int) -> Inputs:
    """Numbers for the placeholders of a graph: labels of class 0, where they are labels."""

    def of(batch: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng([seed, batch])
        out = {}
        for v in graph.variables.values():
            if v.kind == "placeholder":
                shape = v.descriptor.current(batch)
                labels = any(
                    op.spec.name == "softmax_cross_entropy" and op.inputs["target"] is v and len(shape) == 1
                    for path in graph.paths.values()
                    for op in path.operations
                )
                out[v.name] = np.zeros(shape) if labels else rng.uniform(-1, 1, shape)
        return out

    return of


# ---------------------------------------------------------------- graphs
def shape_graph(rng: random.Random) -> cv.CalcGraph:
    """Products, broadcasts, reductions, slices, transpositions and views, 3 to 12 of them, the batch on any axis."""
    graph, sizes = cv.CalcGraph(), rng.choice(((1, 2, 3, 5, 6),) * 5 + ((1, 5, 520),))  # from 512 on products pack
    with graph.path("learn", backward=True) as learn:
        loss = cv.mean(graph.parameter("scale", (3,), init=init.Constant(0.5)))
        values = [_placeholder(graph, rng, sizes), _placeholder(graph, rng, sizes)]
        values.append(_parameter(graph, [rng.choice(sizes) for _ in range(rng.randint(1, 3))]))
        for _ in range(rng.randint(3, 12)):
            values.append(_grown(graph, rng, values, sizes))
        used = {v for op in learn.operations for v in op.inputs.values()}
        for v in values:
            if v not in used:
                loss = loss + cv.mean(cv.tanh(v))
        learn.minimize(loss, rng.choice(OPTIMIZERS)())
    return graph


def _placeholder(graph: cv.CalcGraph, rng: random.Random, sizes: Sequence[int]) -> Variable:
    shape: list[int | None] = [rng.choice(sizes) for _ in range(rng.randint(0, 2))]
    shape.insert(rng.randint(0, len(shape)), None)
    return graph.placeholder(f"x{len(graph.variables)}", shape)


def _parameter(graph: cv.CalcGraph, shape: Sequence[int]) -> Variable:
    return graph.parameter(f"w{len(graph.variables)}", shape, init=init.Uniform(-0.5, 0.5))


def _grown(graph: cv.CalcGraph, rng: random.Random, values: list[Variable], sizes: Sequence[int]) -> Variable:
    """An operator on drawn values; those that do not fit are drawn anew."""
    while True:
        v, w = rng.choice(values), rng.choice(values)
        try:
            y = rng.choice(OPERATORS)(graph, rng, sizes, v, w)
        except cv.ShapeError:
            continue
        if 0 < numel(y.shape).at(7) <= 100_000:
            return y


def _broadcast(graph, rng, sizes, v, w):  # type: ignore[no-untyped-def]
    how = rng.randrange(4)
    return v + w if how == 0 else v - w if how == 1 else v * w if how == 2 else v / (w * w + 1.0)


def _biased(graph, rng, sizes, v, w):  # type: ignore[no-untyped-def]
    """With a parameter that is broadcast along the batch and some axes more."""
    shape = [n.b if n.constant and rng.random() < 0.6 else 1 for n in v.shape]
    return _broadcast(graph, rng, sizes, v, _parameter(graph, shape[rng.randint(0, len(shape)) :]))


def _weighted(graph, rng, sizes, v, w):  # type: ignore[no-untyped-def]
    if not v.rank or not v.shape[-1].constant:
        return v * 2.0
    y = cv.matmul(v, _parameter(graph, (v.shape[-1].b, n := rng.choice(sizes)))) if v.rank > 1 else v * 0.5
    return y + _parameter(graph, (n,)) if v.rank > 1 and rng.random() < 0.5 else y


def _product(graph, rng, sizes, v, w):  # type: ignore[no-untyped-def]
    return cv.matmul(v, w, transpose_a=rng.random() < 0.4, transpose_b=rng.random() < 0.4)


def _reduced(graph, rng, sizes, v, w):  # type: ignore[no-untyped-def]
    first = rng.randint(0, v.rank)
    axes = tuple(range(first, rng.randint(first, v.rank)))
    return rng.choice((cv.sum, cv.mean, cv.max, cv.sum_squares))(v, axes, rng.random() < 0.5)


def _transposed(graph, rng, sizes, v, w):  # type: ignore[no-untyped-def]
    return cv.transpose(v, tuple(rng.sample(range(v.rank), v.rank)))


def _sliced(graph, rng, sizes, v, w):  # type: ignore[no-untyped-def]
    starts = [rng.randrange(n.b) if n.constant else None for n in v.shape]
    stops = [None if start is None else rng.randint(start + 1, n.b) for start, n in zip(starts, v.shape)]
    return v[tuple(slice(*ends) for ends in zip(starts, stops))]


def _joined(graph, rng, sizes, v, w):  # type: ignore[no-untyped-def]
    return cv.concat((v, w), axis=rng.randrange(max(v.rank, 1)))


def _reshaped(graph, rng, sizes, v, w):  # type: ignore[no-untyped-def]
    return cv.reshape(v, rng.choice(((None, -1), (-1,), (1, -1), (-1, 1), (None, 1, -1))))


def _mapped(graph, rng, sizes, v, w):  # type: ignore[no-untyped-def]
    return rng.choice((cv.tanh, cv.sigmoid, cv.relu, cv.gelu, cv.softmax))(v)


OPERATORS = (
    _broadcast, _broadcast, _biased, _weighted, _product, _product, _reduced, _transposed, _sliced, _joined, _reshaped, _mapped,
)  # fmt: skip

"""Reductions, what runs along an axis, and losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from calcvm.frontends.onnx_writer.declared import INF, Nodes, Tensor, axes_of, indexes, whole, writes
from calcvm.frontends.onnx_writer.elementwise import binary_cross_entropy_term, mae_term, mean_of
from calcvm.ops.dims import numel

REDUCED = {
    "sum": "Sum", "mean": "Mean", "max": "Max", "min": "Min", "sum_squares": "SumSquare", "logsumexp": "LogSumExp",
}  # fmt: skip


@writes(*REDUCED)
def reduced(n: Nodes, x: Tensor, *, axes: Sequence[int] | None, keepdims: bool) -> str:
    return n.reduce(REDUCED[n.op.spec.name], *_over(n, x, axes, keepdims))


def _over(n: Nodes, x: Tensor, axes: Sequence[int] | None, keepdims: bool) -> tuple[str, list[int], bool]:
    """An operand, its axes to reduce, and whether they stay; if there are none, a new one that does not."""
    found = axes_of(x.rank, axes)
    return (x, found, keepdims) if found else (n("Unsqueeze", x, [-1]), [-1], False)


@writes("var", "std")
def spread(n: Nodes, x: Tensor, *, axes: Sequence[int] | None, keepdims: bool, correction: int) -> str:
    count = numel(tuple(x.shape[axis] for axis in axes_of(x.rank, axes)))
    given, over, stays = _over(n, x, axes, keepdims)
    apart = n("Sub", given, n.reduce("Mean", given, over))
    y = n.reduce("Mean", n("Mul", apart, apart), over, stays)
    if correction and count.constant:
        y = n.affine(y, count.b / max(count.b - correction, 0)) if count.b > correction else n("Div", y, 0.0)
    elif correction:
        size = n.cast(n("ReduceProd", n("Gather", n("Shape", x), over), keepdims=0), "float")
        y = n("Mul", y, n("Div", size, n("Max", n.affine(size, b=-float(correction)), 0.0)))
    return n("Sqrt", y) if n.op.spec.name == "std" else y


@writes("softmax", "log_softmax")
def softmax(n: Nodes, x: Tensor, *, axis: int) -> str:
    return n("Softmax" if n.op.spec.name == "softmax" else "LogSoftmax", x, axis=axis)


# ---------------------------------------------------------------- running results
@writes("cumsum", "reverse_cumsum")
def cumsum(n: Nodes, x: Tensor, *, axis: int) -> str:
    return n("CumSum", x, np.array(axis), reverse=int(n.op.spec.name == "reverse_cumsum"))


def _logaddexp(n: Nodes, a: str, b: str) -> str:
    pair = n("Concat", *(n("Unsqueeze", v, [-1]) for v in (a, b)), axis=-1)
    return n.reduce("LogSumExp", pair, [-1], keepdims=False)


RUNNING: dict[str, tuple[float, Callable[[Nodes, str, str], str]]] = {  # what changes nothing, and the pair's result
    "cumprod": (1.0, lambda n, a, b: n("Mul", a, b)),
    "cummax": (-INF, lambda n, a, b: n("Max", a, b)),
    "cummin": (INF, lambda n, a, b: n("Min", a, b)),
    "logcumsumexp": (-INF, _logaddexp),
}


@writes(*RUNNING)
def running(n: Nodes, x: Tensor, *, axis: int) -> str:
    """Twice as many elements are joined in each turn."""
    nothing, join = RUNNING[n.op.spec.name]
    axis, size, y, step = axis % x.rank, whole(x.shape[axis], "the axis of a running result"), str(x), 1
    while step < size:
        pads = [0] * 2 * x.rank
        pads[axis] = step
        before = n("Slice", n("Pad", y, pads, nothing), [0], [size], [axis])
        y, step = join(n, y, before), 2 * step
    return y


# ---------------------------------------------------------------- losses
@writes("mse", "rmse")
def mse(n: Nodes, x: str, t: str) -> str:
    apart = n("Sub", x, t)
    mean = mean_of(n, n("Mul", apart, apart))
    return n("Sqrt", mean) if n.op.spec.name == "rmse" else mean


@writes("mae")
def mae(n: Nodes, x: str, t: str) -> str:
    return mean_of(n, mae_term(n, x, t))


@writes("binary_cross_entropy")
def binary_cross_entropy(n: Nodes, x: str, t: str) -> str:
    return mean_of(n, binary_cross_entropy_term(n, x, t))


@writes("huber")
def huber(n: Nodes, x: str, t: str, *, delta: float) -> str:
    far = mae_term(n, x, t)
    near = n("Min", far, float(delta))
    return mean_of(n, n("Mul", near, n("Sub", far, n.affine(near, 0.5))))


@writes("log_cosh")
def log_cosh(n: Nodes, x: str, t: str) -> str:
    """|d| + log(1 + exp(-2|d|)) - log(2)"""
    far = mae_term(n, x, t)
    return mean_of(n, n.affine(n("Add", far, n("Softplus", n.affine(far, -2.0))), b=-float(np.log(2))))


def _labels(n: Nodes, target: Tensor, scores: Tensor) -> str:
    return n.reshape(indexes(n, target), (*scores.shape[:-1], 1))


@writes("softmax_cross_entropy")
def softmax_cross_entropy(n: Nodes, logits: Tensor, target: Tensor, *, label_smoothing: float) -> str:
    shares = n("LogSoftmax", logits, axis=-1)
    if target.shape == logits.shape:
        own = n.reduce("Sum", n("Mul", target, shares), [-1], keepdims=False)
    else:
        own = n("GatherElements", shares, _labels(n, target, logits), axis=-1)
    own = mean_of(n, n("Neg", own))
    if not label_smoothing:
        return own
    others = n.affine(mean_of(n, n("Neg", shares)), float(label_smoothing))
    return n("Add", n.affine(own, 1.0 - label_smoothing), others)


@writes("accuracy")
def accuracy(n: Nodes, scores: Tensor, target: Tensor) -> str:
    wanted: Any = n("ArgMax", target, axis=-1) if target.shape == scores.shape else _labels(n, target, scores)
    return mean_of(n, n.cast(n("Equal", n("ArgMax", scores, axis=-1), wanted), "float"))

"""Operators over axes: reductions, running sums, norms, order, determinants and losses; and updates of weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from calcvm import functions as F
from calcvm import gathers, images
from calcvm.frontends.arrangement import Arranged
from calcvm.frontends.aten import reductions as aten
from calcvm.frontends.aten.declared import ATEN
from calcvm.frontends.building import Building, arranged, over_axis, variable, whole
from calcvm.frontends.onnx.declared import floats, in_floats, in_type, number, onnx, place_of, type_of, whole_numbers
from calcvm.graph import Variable, apply
from calcvm.indexed import equation
from calcvm.ops.dims import numel
from calcvm.ops.types import FLOAT

Reduce = Callable[[Building, Arranged, list[int], bool], Arranged]


# ---------------------------------------------------------------- reductions
def _product(b: Building, x: Arranged, axes: list[int], keep: bool) -> Arranged:
    """The last of the running products over the axes as one."""
    kept = [k for k in range(x.rank) if k not in axes]
    n = numel(tuple(x.shape[k] for k in axes))
    v = x.permuted([*kept, *axes]).reshaped([numel(tuple(x.shape[k] for k in kept)), n]).variable()
    y = gathers.cumprod(v, 1)[:, n.b - 1] if n.constant else equation("y[a] = prod[i] x[a,i]", x=v)
    return Arranged.of(y).reshaped([1 if k in axes else x.shape[k] for k in range(x.rank) if keep or k in kept])


def _mean_of_integers(b: Building, x: Arranged, axes: list[int], keep: bool) -> Arranged:
    """Their sum divided by their number, which is exact if it is an integer."""
    n = whole(numel(tuple(x.shape[k] for k in axes)))
    return ATEN["sum"](b, x, axes, keep).again(lambda v: v / b.constant(float(n)))


def _reduction(name: str, f: Reduce, of_integers: Reduce | None = None) -> None:
    @onnx(name)
    def reduced(b: Building, x: Any, axes: Any = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Arranged:
        x, kind, keep = arranged(b, x).again(in_floats), type_of(x), bool(keepdims)
        chosen = [] if axes is None else [place_of(axis, x.rank) for axis in whole_numbers(axes, "the axes")]
        if not chosen and noop_with_empty_axes:  # each element alone
            x, chosen, keep = x.reshaped([*x.shape, 1]), [x.rank], False
        of = f if kind == FLOAT else of_integers or f
        return of(b, x, chosen or [*range(x.rank)], keep).again(lambda v: in_type(v, kind))


for _name, _f in {
    "L1": lambda b, x, axes, keep: aten.norm(b, x, 1, axes, keep),
    "L2": lambda b, x, axes, keep: aten.norm(b, x, 2, axes, keep),
    "LogSum": lambda b, x, axes, keep: ATEN["sum"](b, x, axes, keep).again(F.log),
    "LogSumExp": ATEN["logsumexp"],
    "Max": ATEN["amax"],
    "Min": ATEN["amin"],
    "Prod": _product,
    "Sum": ATEN["sum"],
    "SumSquare": lambda b, x, axes, keep: Arranged.of(F.sum_squares(x.variable(), axes or None, keep)),
}.items():
    _reduction(f"Reduce{_name}", _f)
_reduction("ReduceMean", ATEN["mean"], _mean_of_integers)


@onnx("MeanVarianceNormalization")
def mean_variance_normalization(b: Building, x: Any, *, axes: Sequence[int] = (0, 2, 3)) -> Arranged:
    v = variable(b, x)
    chosen = [place_of(axis, v.rank) for axis in axes]
    return Arranged.of((v - F.mean(v, chosen, True)) / (F.std(v, chosen, keepdims=True) + 1e-9))


@onnx("LpNormalization")
def lp_normalization(b: Building, x: Any, *, axis: int = -1, p: int = 2) -> Arranged:
    x = arranged(b, x)
    size = aten.norm(b, x, p, [place_of(axis, x.rank)], True).variable()
    return Arranged.of(x.variable() / F.where(F.equal(size, 0.0), 1.0, size))


# ---------------------------------------------------------------- along an axis
onnx("Softmax")(lambda b, x, *, axis=-1: aten.softmax(b, arranged(b, x), axis))
onnx("LogSoftmax")(lambda b, x, *, axis=-1: aten.log_softmax(b, arranged(b, x), axis))


@onnx("Hardmax")
def hardmax(b: Building, x: Any, *, axis: int = -1) -> Arranged:
    return over_axis(arranged(b, x), axis, lambda v: gathers.one_hot(gathers.argmax(v, -1), whole(v.shape[-1])))


def _flipped(v: Variable, axis: int) -> Variable:
    return gathers.take(v, np.arange(whole(v.shape[axis]))[::-1], axis)


def _products(v: Variable, axis: int, reverse: bool) -> Variable:
    return _flipped(gathers.cumprod(_flipped(v, axis), axis), axis) if reverse else gathers.cumprod(v, axis)


def _running(name: str, f: Callable[[Variable, int, bool], Variable], first: float) -> None:
    @onnx(name)
    def running(b: Building, x: Any, axis: Any, *, exclusive: int = 0, reverse: int = 0) -> Arranged:
        v = floats(b, x)
        axis = place_of(number(axis, "the axis"), v.rank)
        y = Arranged.of(f(v, axis, bool(reverse)))
        if exclusive:
            n, side = whole(v.shape[axis]), (0, 1) if reverse else (1, 0)
            pads = [side if k == axis else (0, 0) for k in range(v.rank)]
            y = Arranged.of(images.pad(y.variable(), pads, value=first)).part(axis, side[1], n + side[1])
        return y.again(lambda v: in_type(v, type_of(x)))


_running("CumSum", F.cumsum, 0.0)
_running("CumProd", _products, 1.0)


def _place(name: str, f: Callable[[Variable, int, bool], Variable]) -> None:
    @onnx(name)
    def place(b: Building, x: Any, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Arranged:
        v = floats(b, x)
        axis, keep = place_of(axis, v.rank), bool(keepdims)
        if not select_last_index:
            return Arranged.of(f(v, axis, keep))
        return Arranged.of(F.cast(whole(v.shape[axis]) - 1 - f(_flipped(v, axis), axis, keep), "int64"))


_place("ArgMax", gathers.argmax)
_place("ArgMin", gathers.argmin)


@onnx("TopK")
def top_k(b: Building, x: Any, k: Any, *, axis: int = -1, largest: int = 1, **_: Any) -> tuple[Any, Any]:
    kind, v = type_of(x), floats(b, x)
    axis, k = place_of(axis, v.rank), whole(number(k, "k"))
    if k == 0:
        sizes = [0 if at == axis else whole(n) for at, n in enumerate(v.shape)]
        return np.zeros(sizes, "float32" if kind == FLOAT else kind), np.zeros(sizes, "int64")
    whole(v.shape[axis])
    places = apply("argsort", v, axis=axis, k=k, descending=bool(largest))
    return Arranged.of(in_type(gathers.take_along_axis(v, places, axis), kind)), Arranged.of(places)


# ---------------------------------------------------------------- determinants
@onnx("Det")
def det(b: Building, x: Any) -> Arranged:
    """By elimination, with the largest element of a column as pivot, down to two rows."""
    x = arranged(b, x)
    *lead, rows, last = x.shape
    n = whole(last)
    v, factor = x.reshaped([numel(tuple(lead)), whole(rows), n]).variable(), None
    for size in range(n, 2, -1):
        chosen = gathers.one_hot(gathers.argmax(F.abs(v[:, :, 0]), 1), size)
        row = F.sum(F.expand_dims(chosen, 2) * v, 1)
        pivot = row[:, :1]
        instead = F.expand_dims(v[:, 0] - row, 1)  # the first row takes the place of the chosen one
        v = v + F.expand_dims(chosen, 2) * instead
        multiple = v[:, 1:, :1] / F.expand_dims(F.where(F.equal(pivot, 0.0), 1.0, pivot), 1)
        v = v[:, 1:, 1:] - multiple * F.expand_dims(row[:, 1:], 1)
        pivot = pivot * (chosen[:, :1] * 2.0 - 1.0)
        factor = pivot if factor is None else factor * pivot
    d = v[:, 0, 0] * v[:, 1, 1] - v[:, 0, 1] * v[:, 1, 0] if n > 1 else v[:, 0, 0]
    return Arranged.of(d if factor is None else d * factor[:, 0]).reshaped(lead)


# ---------------------------------------------------------------- losses
@onnx("NegativeLogLikelihoodLoss")
def negative_log_likelihood(
    b: Building, x: Any, labels: Any, weights: Any = None, *, ignore_index: int | None = None, reduction: str = "mean"
) -> Arranged:
    x, label = arranged(b, x), variable(b, labels)
    ignored = None if ignore_index is None else F.equal(label, ignore_index)
    label = label if ignored is None else F.where(ignored, 0, label)
    loss = -F.pick(x.permuted([0, *range(2, x.rank), 1]).variable(), label)
    weight = 1.0 if weights is None else gathers.take(floats(b, weights), label)
    if ignored is not None:
        loss, weight = F.where(ignored, 0.0, loss), F.where(ignored, 0.0, weight)
    if isinstance(weight, Variable):
        loss = loss * weight
    if reduction == "none":
        return Arranged.of(loss)
    if reduction == "mean" and isinstance(weight, Variable):
        return Arranged.of(F.sum(loss) / F.sum(weight))
    return Arranged.of(F.sum(loss) if reduction == "sum" else F.mean(loss))


@onnx("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy(
    b: Building, x: Any, labels: Any, weights: Any = None, *, ignore_index: int | None = None, reduction: str = "mean"
) -> tuple[Any, Any]:
    x = arranged(b, x)
    if reduction == "mean" and weights is None and ignore_index is None and x.shape[1] != 1:
        loss = F.softmax_cross_entropy(x.variable(), variable(b, labels), axis=1)
        return Arranged.of(loss), lambda: aten.log_softmax(b, x, 1)
    p = aten.log_softmax(b, x, 1)
    return negative_log_likelihood(b, p, labels, weights, ignore_index=ignore_index, reduction=reduction), p


# ---------------------------------------------------------------- updates of weights
def _update(name: str, kinds: int, f: Callable[..., tuple[Variable, ...]]) -> None:
    """An operator that updates several weights; they come first, then their gradients, then their running sums."""

    @onnx(name)
    def update(b: Building, rate: Any, step: Any, *tensors: Any, **settings: Any) -> tuple[Arranged, ...]:
        r, t, *given = (floats(b, x) for x in (rate, step, *tensors))
        n = len(given) // kinds
        new = [f(r, t, *given[k::n], **settings) for k in range(n)]
        return tuple(Arranged.of(v) for of_kind in zip(*new) for v in of_kind)


def _adagrad(
    r: Variable, t: Variable, x: Variable, g: Variable, h: Variable, *, norm_coefficient: float = 0.0,
    decay_factor: float = 0.0, epsilon: float = 1e-6,
) -> tuple[Variable, ...]:  # fmt: skip
    g = x * norm_coefficient + g
    h = h + F.square(g)
    return x - r / (t * decay_factor + 1.0) * g / (F.sqrt(h) + epsilon), h


def _adam(
    r: Variable, t: Variable, x: Variable, g: Variable, v: Variable, h: Variable, *, alpha: float = 0.9,
    beta: float = 0.999, epsilon: float = 1e-6, norm_coefficient: float = 0.0, norm_coefficient_post: float = 0.0,
) -> tuple[Variable, ...]:  # fmt: skip
    g = x * norm_coefficient + g
    v = v * alpha + g * (1 - alpha)
    h = h * beta + F.square(g) * (1 - beta)
    r = F.where(t > 0, r * F.sqrt(_one_minus_power(beta, t)) / _one_minus_power(alpha, t), r)
    return (x - r * v / (F.sqrt(h) + epsilon)) * (1 - norm_coefficient_post), v, h


def _one_minus_power(base: float, t: Variable) -> Variable:
    """1 - base^t."""
    return -F.expm1(t * math.log(base)) if base > 0 else t * 0.0 + 1.0


def _momentum(
    r: Variable, t: Variable, x: Variable, g: Variable, v: Variable, *, alpha: float, beta: float,
    norm_coefficient: float, mode: str,
) -> tuple[Variable, ...]:  # fmt: skip
    g = x * norm_coefficient + g
    v = v * alpha + F.where(t > 0, beta, 1.0) * g
    return x - r * (g + v * alpha if mode == "nesterov" else v), v


_update("Adagrad", 3, _adagrad)
_update("Adam", 4, _adam)
_update("Momentum", 3, _momentum)

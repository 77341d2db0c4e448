"""Sums, means and extrema over axes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from calcvm import functions as F
from calcvm import gathers, images
from calcvm.frontends.arrangement import Arranged
from calcvm.frontends.aten.declared import ATEN, aten
from calcvm.frontends.building import Building, Cannot, axis_of, one_by_one, over_axis
from calcvm.graph import Variable


def _axes(x: Arranged, axes: Any) -> tuple[int, ...] | None:
    if axes is None or axes == []:
        return None
    return tuple(axis_of(x, k) for k in ([axes] if isinstance(axes, int) else axes))


def _reduction(names: str, f: Callable[..., Variable], of_images: Callable[[Variable], Variable] | None = None) -> None:
    def reduced(b: Building, x: Arranged, axes: Any = None, keep: bool = False, **_: Any) -> Arranged:
        v, axes = x.variable(), _axes(x, axes)
        spatial = (*range(2, v.rank),)
        if of_images and v.layout and axes and (*sorted(axes),) == spatial:
            pooled = Arranged.of(of_images(v))
            return pooled if keep else pooled.without(spatial)
        return Arranged.of(f(v if v.type != "bool" else F.cast(v, None), axes, bool(keep)))

    aten(*names.split())(reduced)


_reduction("sum", F.sum)
_reduction("mean", F.mean, images.global_avg_pool)
_reduction("amax", F.max, images.global_max_pool)
_reduction("amin", F.min)
_reduction("logsumexp", F.logsumexp)


def _extreme(largest: bool) -> Callable[..., Any]:
    f, place = (F.max, gathers.argmax) if largest else (F.min, gathers.argmin)

    def extreme(b: Building, x: Arranged, y: Any = None, keep: bool = False) -> Any:
        v = x.variable()
        if y is None:
            return Arranged.of(f(v))
        if isinstance(y, (Arranged, np.ndarray)):
            return one_by_one(b, F.maximum if largest else F.minimum, x, y)
        axis = axis_of(x, y)
        return Arranged.of(f(v, axis, keep)), lambda: Arranged.of(place(v, axis, keep))

    return extreme


ATEN["max"], ATEN["min"] = _extreme(True), _extreme(False)


@aten("argmax")
def argmax(b: Building, x: Arranged, axis: int | None = None, keep: bool = False) -> Arranged:
    return Arranged.of(gathers.argmax(x.variable(), axis, keep))


@aten("argmin")
def argmin(b: Building, x: Arranged, axis: int | None = None, keep: bool = False) -> Arranged:
    return Arranged.of(gathers.argmin(x.variable(), axis, keep))


def _spread(f: Callable[..., Variable]) -> Callable[..., Any]:
    def spread(
        b: Building, x: Arranged, axes: Any = None, correction: Any = 1, keep: bool = False, **more: Any
    ) -> Arranged:
        if isinstance(axes, bool):
            axes, correction = None, axes
        correction, keep = more.get("unbiased", correction), more.get("keepdim", keep)
        correction = 1 if correction is None else int(correction)
        return Arranged.of(f(x.variable(), _axes(x, axes), correction, keep))

    return spread


ATEN["var"], ATEN["std"] = _spread(F.var), _spread(F.std)


@aten("var_mean")
def var_mean(b: Building, x: Arranged, axes: Any = None, **more: Any) -> tuple[Any, Any]:
    return ATEN["var"](b, x, axes, **more), ATEN["mean"](b, x, axes, more.get("keepdim", False))


@aten("norm", "linalg_vector_norm")
def norm(b: Building, x: Arranged, p: Any = 2, axes: Any = None, keep: bool = False, **_: Any) -> Arranged:
    v, axes = x.variable(), _axes(x, axes)
    if p in (None, 2):
        squares = F.sum_squares(v, axes, keep)  # where they are 0, the gradient is 0
        return Arranged.of(F.where(squares > 0.0, F.sqrt(F.where(squares > 0.0, squares, 1.0)), 0.0))
    if p == 1:
        return Arranged.of(F.sum(F.abs(v), axes, keep))
    if p == math.inf:
        return Arranged.of(F.max(F.abs(v), axes, keep))
    raise Cannot(f"the norm of order {p}: orders 1, 2 and inf have counterparts")


@aten("frobenius_norm")
def frobenius_norm(b: Building, x: Arranged, axes: Any = None, keep: bool = False) -> Arranged:
    return norm(b, x, 2, axes, keep)


@aten("softmax", "_softmax", "_safe_softmax")
def softmax(b: Building, x: Arranged, axis: int, *_: Any) -> Arranged:
    return over_axis(x, axis, lambda v: F.softmax(v, -1))


@aten("log_softmax", "_log_softmax")
def log_softmax(b: Building, x: Arranged, axis: int, *_: Any) -> Arranged:
    return over_axis(x, axis, lambda v: F.log_softmax(v, -1))


@aten("cumsum")
def cumsum(b: Building, x: Arranged, axis: int, **_: Any) -> Arranged:
    return Arranged.of(F.cumsum(x.variable(), axis))


@aten("cumprod")
def cumprod(b: Building, x: Arranged, axis: int, **_: Any) -> Arranged:
    return Arranged.of(gathers.cumprod(x.variable(), axis))

"""Resize: for each axis, what elements of the input weigh in an element of the result.

The weights are known, so that a row takes elements, or a matrix product adds them up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import numpy as np

from calcvm import functions as F
from calcvm import images
from calcvm.frontends.arrangement import Arranged
from calcvm.frontends.building import Building, Cannot, arranged, whole
from calcvm.frontends.onnx.declared import floats, in_type, known, onnx, place_of, type_of, whole_numbers
from calcvm.frontends.onnx.places import nothing, taken
from calcvm.ops.dims import ONE, Shape, affine, numel
from calcvm.ops.types import FLOAT

Kernel = Callable[[np.ndarray], np.ndarray]


class Axis(NamedTuple):
    """An axis of n elements that gets ``to`` elements; coordinates of the result are by ``scale`` larger.

    region : the part of the axis, from 0 to 1, that is resized.
    """

    axis: int
    n: int
    to: int
    scale: float
    region: tuple[float, float]

    def coordinates(self, how: str) -> np.ndarray:
        """Where the elements of the result lie among those of the input."""
        at, scale, (first, last) = np.arange(self.to, dtype=np.float64), self.scale, self.region
        width = scale * self.n  # which may be a fraction
        single = width == 1
        if how == "align_corners":
            return at * 0 if single else at * (self.n - 1) / (width - 1)
        if how == "asymmetric":
            return at / scale
        if how == "tf_crop_and_resize":
            along = at * 0 + 0.5 if single else at / (width - 1)
            return (first + along * (last - first)) * (self.n - 1)
        if how == "pytorch_half_pixel" and self.to == 1:
            return at
        if how in ("half_pixel", "pytorch_half_pixel"):
            return (at + 0.5) / scale - 0.5
        if how == "half_pixel_symmetric":
            return self.n / 2 * (1 - self.to / width) + (at + 0.5) / scale - 0.5
        raise Cannot(f"coordinate_transformation_mode {how!r}")


Tables = dict[Axis, np.ndarray]  # (to, n)


# ---------------------------------------------------------------- weights
NEAREST: dict[str, Kernel] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


def _linear(distance: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(distance), 0)


def _cubic(distance: np.ndarray, a: float) -> np.ndarray:
    x = np.abs(distance)
    near, far = ((a + 2) * x - (a + 3)) * x * x + 1, ((x - 5) * x + 8) * x * a - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0))


def _weights(
    at: np.ndarray, n: int, kernel: Kernel, reach: float, narrow: float = 1.0, inside: bool = False
) -> np.ndarray:
    """(coordinates, n): of each element, by its distance; what lies outside is the last one, or with ``inside`` nothing."""
    reach /= narrow
    places = np.arange(np.floor(at.min() - reach), np.ceil(at.max() + reach) + 1)
    weights = kernel((at[:, None] - places) * narrow)
    if inside:
        weights = weights * ((places >= 0) & (places < n))
    total = weights.sum(1, keepdims=True)
    found = np.zeros((len(at), n))
    for place, column in zip(np.clip(places, 0, n - 1).astype(int), (weights / np.where(total == 0, 1, total)).T):
        found[:, place] += column
    return found


def _of_upsample(axis: Axis, mode: str, align_corners: bool) -> np.ndarray:
    """The weights of `images.upsample`."""
    at, step = np.arange(axis.to), axis.n / axis.to
    if mode == "nearest":
        return np.eye(axis.n)[np.minimum(np.floor(np.float32(at * step)).astype(int), axis.n - 1)]
    if align_corners:
        return _weights(at * (axis.n - 1) / max(axis.to - 1, 1), axis.n, _linear, 1)
    return _weights(np.maximum((at + 0.5) * step - 0.5, 0), axis.n, _linear, 1)


# ---------------------------------------------------------------- sizes
def _axes(
    shape: Shape, axes: Sequence[int], scales: Any, sizes: Any, policy: str, regions: Sequence[Any]
) -> list[Axis]:
    """The axes that are resized."""
    old = [shape[k] for k in axes]
    if sizes is not None:
        new = [affine(n) for n in whole_numbers(sizes, "sizes")]
        factors = [1.0 if to == n else whole(to) / whole(n) for to, n in zip(new, old)]
        if policy != "stretch":
            factors = [(min if policy == "not_larger" else max)(factors)] * len(axes)
            new = [n if factor == 1 else affine(int(factor * whole(n) + 0.5)) for factor, n in zip(factors, old)]
    else:
        if any(last - first != 1 for first, last in regions):
            raise Cannot("it crops and scales, for which ONNX's text and its reference differ: give sizes")
        factors = known(scales, "scales").reshape(-1).tolist()
        new = [n if f == 1 else affine(int(np.float32(f) * np.float32(whole(n)))) for f, n in zip(factors, old)]
    return [
        Axis(k, whole(n), whole(to), factor, (first, last))
        for k, n, to, factor, (first, last) in zip(axes, old, new, factors, regions)
        if (n, factor, first, last) != (to, 1, 0, 1)
    ]


# ---------------------------------------------------------------- rows
def _upsampled(x: Arranged, tables: Tables) -> Arranged | None:
    """x resized by the row of `images.upsample`, if that has these weights."""
    spatial = {axis.axis: axis.to for axis in tables}
    if not 3 <= x.rank <= 5 or min(spatial) < 2 or not all(n.constant for n in x.shape[2:]):
        return None
    size = [spatial.get(k, whole(n)) for k, n in enumerate(x.shape[2:], 2)]
    for mode, align in (("nearest", False), ("linear", False), ("linear", True)):
        if all(np.allclose(table, _of_upsample(axis, mode, align), atol=1e-6) for axis, table in tables.items()):
            return Arranged.of(images.upsample(x.variable(), size=size, mode=mode, align_corners=align))
    return None


def _along(b: Building, x: Arranged, axis: int, table: np.ndarray) -> Arranged:
    """Elements of an axis, or sums of them."""
    if (np.count_nonzero(table, 1) == 1).all() and (table.max(1) == 1).all():
        return taken(b, x, table.argmax(1), axis)
    before, n, behind = numel(x.shape[:axis]), x.shape[axis], numel(x.shape[axis + 1 :])
    if behind == ONE:
        y = F.matmul(x.reshaped([before, n]).variable(), b.constant(table.T))
    else:
        y = F.matmul(b.constant(table), x.reshaped([before, n, behind]).variable())
    return Arranged.of(y).reshaped([*x.shape[:axis], len(table), *x.shape[axis + 1 :]])


def _extrapolated(x: Arranged, axes: Sequence[Axis], value: float) -> Arranged:
    """x with a number where the coordinates lie outside the input."""
    outside = np.zeros([1] * x.rank, bool)
    for axis in axes:
        at = axis.coordinates("tf_crop_and_resize")
        beyond = (at < 0) | (at > axis.n - 1)
        outside = outside | beyond.reshape([-1 if k == axis.axis else 1 for k in range(x.rank)])
    return Arranged.of(F.where(outside, value, x.variable())) if outside.any() else x


@onnx("Resize")
def resize(
    b: Building, x: Any, roi: Any = None, scales: Any = None, sizes: Any = None, *, mode: str = "nearest", antialias: int = 0,
    axes: Sequence[int] | None = None, coordinate_transformation_mode: str = "half_pixel", cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0, extrapolation_value: float = 0.0, keep_aspect_ratio_policy: str = "stretch",
    nearest_mode: str = "round_prefer_floor",
) -> Any:  # fmt: skip
    kind, how, nearest = type_of(x), coordinate_transformation_mode, mode == "nearest"
    if antialias and nearest:
        raise Cannot("antialias with the mode nearest")
    y = arranged(b, x) if kind == FLOAT else Arranged.of(floats(b, x))
    places = [*range(y.rank)] if axes is None else [place_of(k, y.rank) for k in axes]
    crops = how == "tf_crop_and_resize"
    regions = known(roi, "roi").reshape(2, -1).T.tolist() if crops else [(0.0, 1.0)] * len(places)
    resized = _axes(y.shape, places, scales, sizes, keep_aspect_ratio_policy, regions)
    if any(axis.to == 0 for axis in resized):
        new = {axis.axis: axis.to for axis in resized}
        return nothing(b, x, [new.get(k, n) for k, n in enumerate(y.shape)])
    kernel, reach = (_linear, 1) if mode == "linear" else (partial(_cubic, a=cubic_coeff_a), 2)
    tables: Tables = {}
    for axis in resized:
        at, narrow = axis.coordinates(how), min(axis.scale, 1.0) if antialias else 1.0
        if nearest:
            found = np.clip(NEAREST[nearest_mode](np.float32(at)), 0, axis.n - 1).astype(int)
            tables[axis] = np.eye(axis.n)[found]
        else:
            tables[axis] = _weights(at, axis.n, kernel, reach, narrow, bool(exclude_outside))
    if resized:
        same = _upsampled(y, tables)
        y = same or reduce(lambda x, of: _along(b, x, of[0].axis, of[1]), tables.items(), y)
    y = _extrapolated(y, resized, extrapolation_value) if crops else y
    return y if kind == FLOAT else Arranged.of(in_type(y.variable() if nearest else F.round(y.variable()), kind))

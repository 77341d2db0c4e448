"""Elements between elements: grids, regions of interest, and convolutions whose places are data.

Places of one axis are ``taps``: the elements around a coordinate, and their weights, both on a new last axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from calcvm import functions as F
from calcvm.frontends.arrangement import Arranged
from calcvm.frontends.building import Building, arranged, variable, whole
from calcvm.frontends.onnx.declared import floats, in_type, is_known, known, onnx, type_of, whole_numbers
from calcvm.gathers import take
from calcvm.graph import Variable
from calcvm.indexed import einsum, equation
from calcvm.ops.dims import numel

Taps = tuple[Variable, Variable]

_A = -0.75
WEIGHTS = {  # of each tap: coefficients of powers of the distance to the element before
    "nearest": [[1.0, 0.0]],
    "linear": [[1.0, -1.0], [0.0, 1.0]],
    "cubic": [
        [0.0, _A, -2 * _A, _A],
        [1.0, 0.0, -_A - 3, _A + 2],
        [0.0, -_A, 2 * _A + 3, -_A - 2],
        [0.0, 0.0, _A, -_A],
    ],
}


# ---------------------------------------------------------------- elements around coordinates
def _taps(at: Variable, mode: str = "linear") -> Taps:
    """Places around coordinates, as floats, and their weights."""
    at = F.expand_dims(at, at.rank)
    before, coefficients = F.floor(at), np.array(WEIGHTS[mode])
    distance, count = at - before, len(coefficients)
    *lower, weights = coefficients.T
    for c in lower[::-1]:
        weights = distance * weights + c
    return before + (np.arange(count) - (count - 1) // 2), weights


def _sampled(x: Variable, taps: Sequence[Taps], lead: str) -> Variable:
    """Weighted sums of the elements at taps, 0 outside: of x (*lead, C, *sizes) with taps (*lead, P, taps) for each axis."""
    axes = range(len(taps))
    reads = ", ".join(f"i{k}[{lead},p,t{k}]" for k in axes)
    factors = "*".join(f"w{k}[{lead},p,t{k}]" for k in axes)
    over = ",".join(f"t{k}" for k in axes)
    operands: dict[str, Any] = {f"i{k}": F.cast(place, "int64") for k, (place, _) in enumerate(taps)}
    operands |= {f"w{k}": weight for k, (_, weight) in enumerate(taps)}
    return equation(f"y[{lead},c,p] = sum[{over}] x[{lead},c,{reads}; 0]*{factors}", x=x, **operands)


def _clipped(at: Variable, size: int) -> Variable:
    return F.minimum(F.maximum(at, 0.0), size - 1.0)


def _mirrored(at: Variable, size: int, align: int) -> Variable:
    """Coordinates, or places, mirrored at the ends of an axis until they are inside."""
    first, last = (0.0, size - 1.0) if align else (-0.5, size - 0.5)
    span = last - first
    return last - F.abs((at - first) % (2 * span) - span) if span else at * 0.0


@onnx("GridSample")
def grid_sample(
    b: Building, x: Any, grid: Any, *, mode: str = "linear", padding_mode: str = "zeros", align_corners: int = 0
) -> Arranged:
    image, places = floats(b, x), arranged(b, grid)
    (n, channels, *sizes), out = image.shape, places.shape[1:-1]
    taps = []
    for axis, size in enumerate(map(whole, sizes)):
        along = places.part(places.rank - 1, len(sizes) - 1 - axis, len(sizes) - axis)
        unit = F.reshape(floats(b, along), (places.shape[0], numel(out)))
        at = (unit + 1.0) * (0.5 * (size - 1)) if align_corners else ((unit + 1.0) * float(size) - 1.0) * 0.5
        at = F.round(at) if mode == "nearest" else at
        if padding_mode == "reflection":
            at = _mirrored(at, size, align_corners)
        elif padding_mode == "border" and mode != "cubic":
            at = _clipped(at, size)
        place, weights = _taps(at, mode)
        if padding_mode == "reflection":
            place = _mirrored(place, size, align_corners)
        if padding_mode != "zeros":
            place = _clipped(place, size)
        taps.append((place, weights))
    y = F.reshape(_sampled(image, taps, "n"), (n, channels, *out))
    return Arranged.of(in_type(y, type_of(x)))


@onnx("AffineGrid")
def affine_grid(b: Building, theta: Arranged, size: Any, *, align_corners: int = 0) -> Arranged:
    sizes = [whole(n) for n in whole_numbers(size, "the size of the grid")[2:]]
    ends = [1.0 - (0.0 if align_corners else 1.0 / n) if n > 1 else 0.0 for n in sizes]
    along = np.meshgrid(*(np.linspace(-end, end, n) for end, n in zip(ends, sizes)), indexing="ij")
    at = np.stack([*along[::-1], np.ones(sizes)], axis=-1).reshape(-1, len(sizes) + 1)
    y = F.matmul(b.constant(at), theta.variable(), transpose_b=True)
    return Arranged.of(F.reshape(y, (theta.shape[0], *sizes, len(sizes))))


@onnx("RoiAlign")
def roi_align(
    b: Building, x: Any, rois: Any, batch_indices: Any, *, coordinate_transformation_mode: str = "half_pixel", mode: str = "avg",
    output_height: int = 1, output_width: int = 1, sampling_ratio: int = 0, spatial_scale: float = 1.0,
) -> Arranged:  # fmt: skip
    half = coordinate_transformation_mode.lower() == "half_pixel"
    corners = F.expand_dims(floats(b, rois), 2)
    taps = []
    for corner, size, bins in ((1, 2, output_height), (0, 3, output_width)):
        samples = _samples(rois, corner, bins, sampling_ratio, spatial_scale, half)
        region = _region(corners, corner, spatial_scale, half)
        taps.append(_bins(*region, bins, samples, whole(x.shape[size]), mode.lower()))
    image, images = floats(b, x), dict[str, Any](k=variable(b, batch_indices))
    if not image.shape[0].constant:  # an equation reads no other samples of the batch
        image, images = take(image, images["k"]), {}
    (i, u), (j, v) = taps
    how, place = "max" if mode.lower() == "max" else "sum", "k[r]" if images else "r"
    text = f"y[r,c,h,w] = {how}[s,t] x[{place}, c, i[r,h,s], j[r,w,t]; 0]*u[r,h,s]*v[r,w,t]"
    return Arranged.of(equation(text, x=image, i=i, j=j, u=u, v=v, **images))


def _samples(rois: Any, corner: int, bins: int, ratio: int, scale: float, half: bool) -> np.ndarray:
    """How many samples a bin has along an axis: (regions, 1, 1), or (1, 1, 1) for all."""
    if ratio > 0:
        return np.full((1, 1, 1), ratio)
    regions = known(rois, "the number of samples of a region of interest, where sampling_ratio is 0,")
    _, extent = _region(regions[..., None], corner, scale, half)
    return np.maximum(np.ceil(extent / bins), 0).astype(int)


def _region(rois: Any, corner: int, scale: float, half: bool) -> tuple[Any, Any]:
    """Where regions (regions, 4, 1) begin along an axis, and how far they go, (regions, 1, 1)."""
    first, last = (rois[:, k : k + 1] * scale for k in (corner, corner + 2))
    extent = last - first
    if half:
        return first - 0.5, extent
    return first, np.maximum(extent, 1.0) if is_known(extent) else F.maximum(extent, 1.0)


def _bins(begin: Variable, extent: Variable, bins: int, samples: np.ndarray, size: int, mode: str) -> Taps:
    """Taps of the samples of each bin, (regions, bins, samples * 2); a region may have fewer samples than others."""
    number = np.arange(max(samples.max(), 1))
    within = (np.minimum(number, np.maximum(samples - 1, 0)) + 0.5) / np.maximum(samples, 1)
    share: Any = (samples > 0) * 1.0 if mode == "max" else (number < samples) / np.maximum(samples, 1)
    at = begin + extent * ((np.arange(bins)[:, None] + within) / bins)
    outside = (at < -1.0) | (at > float(size))
    place, weights = _taps(_clipped(at, size))
    weights = weights * F.expand_dims(F.where(outside, 0.0, share), 3)
    flat = (*place.shape[:2], place.shape[2] * place.shape[3])
    return F.cast(F.reshape(place, flat), "int64"), F.reshape(weights, flat)


@onnx("DeformConv")
def deform_conv(
    b: Building, x: Any, w: Any, offset: Any, bias: Any = None, mask: Any = None, *, dilations: Any = None, group: int = 1,
    kernel_shape: Any = None, offset_group: int = 1, pads: Any = None, strides: Any = None,
) -> Arranged:  # fmt: skip
    image, kernel = floats(b, x), [whole(n) for n in w.shape[2:]]
    (n, channels, *sizes), out = image.shape, [whole(m) for m in offset.shape[2:]]
    rank, taken, made = len(kernel), math.prod(kernel), math.prod(out)
    moved = F.reshape(floats(b, offset), (n, offset_group, taken, rank, made))
    steps, gaps, before = (given or [least] * rank for given, least in ((strides, 1), (dilations, 1), (pads, 0)))
    inner, outer = np.indices(kernel).reshape(rank, taken, 1), np.indices(out).reshape(rank, 1, made)
    taps = []
    for k in range(rank):
        along = F.reshape(moved[:, :, :, k : k + 1], (n, offset_group, taken, made))
        at = along + (inner[k] * gaps[k] + outer[k] * steps[k] - before[k])
        taps.append(_taps(F.reshape(at, (n, offset_group, taken * made))))
    if mask is not None:
        shares = F.reshape(floats(b, mask), (n, offset_group, taken * made, 1))
        taps[0] = taps[0][0], taps[0][1] * shares
    columns = _sampled(F.reshape(image, (n, offset_group, channels // offset_group, *sizes)), taps, "n,g")
    inputs = whole(channels) // group * taken
    weight = F.reshape(floats(b, w), (group, -1, inputs))
    y = einsum("gok,ngkp->ngop", weight, F.reshape(columns, (n, group, inputs, made)))
    y = F.reshape(y, (n, w.shape[0], *out))
    return Arranged.of(y if bias is None else y + F.reshape(floats(b, bias), (-1, *(1,) * rank)))

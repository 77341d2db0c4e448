"""Operators that move elements, and what shapes give."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from calcvm import functions as F
from calcvm import images
from calcvm.frontends.arrangement import Arranged
from calcvm.frontends.building import Building, Cannot, Filled, arranged, plain, variable, whole
from calcvm.frontends.onnx.declared import (
    TYPES,
    in_floats,
    in_type,
    is_known,
    number,
    onnx,
    place_of,
    rank_of,
    type_of,
    whole_numbers,
)
from calcvm.frontends.onnx.places import nothing, numbers, taken
from calcvm.indexed import einsum, equation
from calcvm.ops.dims import ONE, Affine, affine, numel
from calcvm.ops.types import FLOAT

HUGE = 10**9  # an end that means all


# ---------------------------------------------------------------- shapes
def _viewed(b: Building, x: Any, sizes: Sequence[Any]) -> Any:
    return Filled(x.value, sizes, x.type) if isinstance(x, Filled) else arranged(b, x).reshaped(sizes)


@onnx("Reshape")
def reshape(b: Building, x: Any, shape: Any, *, allowzero: int = 0) -> Any:
    sizes = [affine(n) for n in whole_numbers(shape, "the shape")]
    sizes = [x.shape[k] if n == 0 and not allowzero else n for k, n in enumerate(sizes)]
    if -1 in sizes:
        rest = numel(tuple([n for n in sizes if n != -1]))
        sizes[sizes.index(Affine(0, -1))] = numel(tuple(x.shape)) // rest
    return _viewed(b, x, sizes)


@onnx("Flatten")
def flatten(b: Building, x: Any, *, axis: int = 1) -> Any:
    axis += rank_of(x) if axis < 0 else 0
    return _viewed(b, x, [numel(tuple(x.shape[:axis])), numel(tuple(x.shape[axis:]))])


@onnx("Squeeze")
def squeeze(b: Building, x: Any, axes: Any = None) -> Any:
    shape, rank = [affine(n) for n in x.shape], rank_of(x)
    if axes is None:
        return _viewed(b, x, [n for n in shape if n != ONE])
    places = [place_of(k, rank) for k in whole_numbers(axes, "axes")]
    if any(shape[k] != ONE for k in places):
        raise Cannot(f"axes {places} of {shape} are not all of size 1")
    return _viewed(b, x, [n for k, n in enumerate(shape) if k not in places])


@onnx("Unsqueeze")
def unsqueeze(b: Building, x: Any, axes: Any) -> Any:
    axes = whole_numbers(axes, "axes")
    rank, sizes = rank_of(x) + len(axes), iter(x.shape)
    places = [place_of(k, rank) for k in axes]
    return _viewed(b, x, [1 if k in places else next(sizes) for k in range(rank)])


@onnx("Transpose")
def transpose(b: Building, x: Any, *, perm: Sequence[int] | None = None) -> Arranged:
    x = arranged(b, x)
    return x.permuted([*range(x.rank)][::-1] if perm is None else perm)


@onnx("DepthToSpace")
def depth_to_space(b: Building, x: Any, *, blocksize: int, mode: str = "DCR") -> Arranged:
    n, c, h, w = x.shape
    depth = c // blocksize**2
    blocks = [blocksize, blocksize, depth] if mode == "DCR" else [depth, blocksize, blocksize]
    order = [0, 3, 4, 1, 5, 2] if mode == "DCR" else [0, 1, 4, 2, 5, 3]
    split = arranged(b, x).reshaped([n, *blocks, h, w]).permuted(order)
    return split.reshaped([n, depth, h * blocksize, w * blocksize])


@onnx("SpaceToDepth")
def space_to_depth(b: Building, x: Any, *, blocksize: int, mode: str = "DCR") -> Arranged:
    n, c, h, w = x.shape
    h, w = h // blocksize, w // blocksize
    order = [0, 3, 5, 1, 2, 4] if mode == "DCR" else [0, 1, 3, 5, 2, 4]
    split = arranged(b, x).reshaped([n, c, h, blocksize, w, blocksize]).permuted(order)
    return split.reshaped([n, c * blocksize**2, h, w])


@onnx("Einsum")
def einstein_sum(b: Building, *operands: Any, equation: str) -> Arranged:
    y = einsum(equation, *(in_floats(variable(b, x)) for x in operands))
    return Arranged.of(in_type(y, type_of(operands[0])))


# ---------------------------------------------------------------- larger
def expanded(b: Building, x: Any, sizes: Sequence[Affine]) -> Any:
    """x repeated along axes of size 1; the axes of ``sizes`` are its own, with others before them."""
    if isinstance(x, Filled):
        return Filled(x.value, sizes, x.type)
    old = [ONE] * (len(sizes) - rank_of(x)) + [*x.shape]
    x = arranged(b, x).reshaped(old)
    grown = [n if n != m else ONE for n, m in zip(sizes, old)]
    if all(n == ONE for n in grown):
        return x
    if all(n.constant for n in grown):
        everywhere: Any = np.ones([n.b for n in grown], bool)
    else:
        everywhere = plain(b, Filled(1, grown, "bool"))
    v = x.variable()
    return Arranged.of(F.where(everywhere, v, v))


@onnx("Expand")
def expand(b: Building, x: Any, shape: Any) -> Any:
    sizes = [affine(n) for n in whole_numbers(shape, "the shape")]
    old = [affine(n) for n in x.shape]
    rank = max(len(sizes), len(old))
    old, sizes = ([ONE] * (rank - len(s)) + s for s in (old, sizes))
    if any(ONE not in (n, m) and n != m for n, m in zip(sizes, old)):
        raise Cannot(f"{old} does not become {sizes}")
    new = [m if n == ONE else n for n, m in zip(sizes, old)]
    return nothing(b, x, new) if any(n == 0 for n in new) else expanded(b, x, new)


@onnx("Tile")
def tile(b: Building, x: Any, repeats: Any) -> Any:
    times = [affine(n) for n in whole_numbers(repeats, "repeats")]
    if any(n == 0 for n in times):
        return nothing(b, x, [n * m for n, m in zip(x.shape, times)])
    x = arranged(b, x)
    for axis, n in enumerate(times):
        if n != ONE:
            before, size, behind = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
            parts = [numel(before), n, size, numel(behind)]
            x = expanded(b, x.reshaped([parts[0], 1, *parts[2:]]), parts).reshaped([*before, size * n, *behind])
    return x


@onnx("Concat")
def concat(b: Building, *parts: Any, axis: int) -> Any:
    axis = place_of(axis, rank_of(parts[0]))
    some = [p for p in parts if 0 not in p.shape]
    return some[0] if len(some) == 1 else Arranged.of(F.concat([variable(b, p) for p in some], axis))


@onnx("Pad")
def pad(b: Building, x: Any, pads: Any, value: Any = None, axes: Any = None, *, mode: str = "constant") -> Arranged:
    rank, counts = rank_of(x), [whole(n) for n in whole_numbers(pads, "pads")]
    places = [*range(rank)] if axes is None else [place_of(k, rank) for k in whole_numbers(axes, "axes")]
    pairs = dict(zip(places, zip(counts, counts[len(places) :])))
    return padded(b, arranged(b, x), pairs, mode, 0.0 if value is None else value)


def padded(
    b: Building, x: Arranged, pairs: Mapping[int, tuple[int, int]], mode: str = "constant", value: Any = 0.0
) -> Arranged:  # fmt: skip
    """x with elements before and behind axes; negative numbers take away its own."""
    for axis, pair in pairs.items():
        if min(pair) < 0:
            first, last = (max(-n, 0) for n in pair)
            if first + last >= whole(x.shape[axis]):
                raise Cannot(f"pads {pair} leave nothing of axis {axis}")
            x = x.part(axis, first, whole(x.shape[axis]) - last)
    added = [(max(first, 0), max(last, 0)) for first, last in (pairs.get(axis, (0, 0)) for axis in range(x.rank))]
    for axis, pair in enumerate(added):
        if mode == "reflect" and any(pair) and max(pair) >= whole(x.shape[axis]):  # several times to and fro
            x = taken(b, x, np.pad(np.arange(whole(x.shape[axis])), pair, mode="reflect"), axis)
            added[axis] = 0, 0
    if not any(map(any, added)):
        return x
    value = value.item() if is_known(value) else value
    fixed = mode != "constant" or (isinstance(value, (bool, int, float)) and math.isfinite(value))
    y = images.pad(in_floats(x.variable()), added, mode, float(value) if fixed and mode == "constant" else 0.0)
    y = in_type(y, type_of(x))
    if not fixed:
        own = np.pad(np.ones([n.b if n.constant else 1 for n in x.shape], bool), added)
        y = F.where(own, y, value if isinstance(value, float) else arranged(b, value).reshaped([]).variable())
    return Arranged.of(y)


@onnx("CenterCropPad")
def center_crop_pad(b: Building, x: Any, shape: Any, *, axes: Sequence[int] | None = None) -> Arranged:
    rank, pairs = rank_of(x), {}
    for axis, size in zip(range(rank) if axes is None else axes, whole_numbers(shape, "the shape")):
        axis = place_of(axis, rank)
        if size != x.shape[axis]:
            more = whole(size) - whole(x.shape[axis])
            pairs[axis] = int(more / 2), more - int(more / 2)
    return padded(b, arranged(b, x), pairs)


@onnx("Col2Im")
def columns_to_images(
    b: Building, x: Any, image_shape: Any, block_shape: Any, *, dilations: Sequence[int] = (), pads: Sequence[int] = (),
    strides: Sequence[int] = (),
) -> Arranged:  # fmt: skip
    sizes, block = ([whole(n) for n in whole_numbers(y, "sizes")] for y in (image_shape, block_shape))
    n = len(sizes)
    if n > 3:
        raise Cannot(f"images of {n} axes: up to 3 have a counterpart")
    dilations, strides, pads = dilations or [1] * n, strides or [1] * n, pads or [0] * 2 * n
    extent = [(size - 1) * dilation + 1 for size, dilation in zip(block, dilations)]
    whole_sizes = [size + first + last for size, first, last in zip(sizes, pads, pads[n:])]
    counts = [(size - k) // stride + 1 for size, k, stride in zip(whole_sizes, extent, strides)]
    taps, batch = math.prod(block), affine(x.shape[0])
    channels = whole(x.shape[1]) // taps
    made = [(count - 1) * stride + k for count, stride, k in zip(counts, strides, extent)]
    each = np.tile(np.eye(taps).reshape(taps, 1, *block), (channels, *(1,) * (n + 1)))
    v = arranged(b, x).reshaped([batch, channels * taps, *counts]).variable()
    add = getattr(images, f"conv_transpose{n}d")
    y = add(in_floats(v), each, stride=tuple(strides), dilation=tuple(dilations), groups=channels)
    pairs = {k + 2: (-pads[k], sizes[k] + pads[k] - made[k]) for k in range(n)}
    return padded(b, Arranged.of(in_type(y, type_of(x))), pairs)


# ---------------------------------------------------------------- parts
def _places(n: Affine, start: Any, stop: Any, step: int) -> range | None:
    """The places of a slice, None for all."""
    if (start, step) == (0, 1) and (stop == n or (isinstance(stop, int) and stop >= HUGE)):
        return None
    if n.constant:
        return range(n.b)[slice(whole(start), whole(stop), step)]
    if (start, stop, step) != (0, 1, 1):
        raise Cannot(f"elements {start} to {stop} of the batch")
    return range(1)


@onnx("Slice")
def slice_(b: Building, x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
    x, starts = arranged(b, x), whole_numbers(starts, "starts")
    axes = [*range(len(starts))] if axes is None else [place_of(k, x.rank) for k in whole_numbers(axes, "axes")]
    steps = [1] * len(starts) if steps is None else whole_numbers(steps, "steps")
    bounds = zip(axes, starts, whole_numbers(ends, "ends"), steps)
    cuts = {axis: places for axis, *bound in bounds if (places := _places(x.shape[axis], *bound)) is not None}
    sizes = [len(cuts[k]) if k in cuts else n for k, n in enumerate(x.shape)]
    if 0 in sizes:
        return nothing(b, x, sizes)
    for axis, places in cuts.items():
        x = taken(b, x, np.array(places), axis)
    return x


@onnx("Split")
def split(b: Building, x: Any, sizes: Any = None, *, axis: int = 0, num_outputs: int | None = None) -> tuple[Any, ...]:
    x = arranged(b, x)
    axis = place_of(axis, x.rank)
    count = num_outputs or b.outputs
    if sizes is not None:
        parts = whole_numbers(sizes, "split")
    elif count == 1:
        return (x,)
    else:
        n = whole(x.shape[axis])
        each = -(-n // count)
        parts = [each] * (count - 1) + [n - each * (count - 1)]
    if len(parts) == 1:
        return (x,)
    ends = [0, *accumulate(whole(n) for n in parts)]
    if min(parts) < 0 or x.shape[axis] != ends[-1]:
        raise Cannot(f"parts of {parts} elements of an axis of {x.shape[axis]}")
    return tuple([taken(b, x, np.arange(*bounds), axis) for bounds in pairwise(ends)])


@onnx("Trilu")
def triangle(b: Building, x: Any, k: Any = None, *, upper: int = 1) -> Arranged:
    full = np.ones([whole(n) for n in x.shape[-2:]], bool)
    kept = (np.triu if upper else np.tril)(full, 0 if k is None else number(k, "k"))
    return Arranged.of(F.where(kept, variable(b, x), variable(b, np.zeros((), type_of(x)))))


@onnx("ReverseSequence")
def reverse_sequence(b: Building, x: Any, lengths: Any, *, batch_axis: int = 1, time_axis: int = 0) -> Arranged:
    x = arranged(b, x)
    first = [place_of(axis, x.rank) for axis in (batch_axis, time_axis)]
    order = [*first, *(k for k in range(x.rank) if k not in first)]
    moved = x.permuted(order)
    steps = whole(moved.shape[1])
    v = moved.reshaped([*moved.shape[:2], -1]).variable()
    text = f"y[b,t<{steps},r] = x[b,where(t < n[b], n[b] - 1 - t, t),r]"
    y = equation(text, x=in_floats(v), n=plain(b, lengths))
    return Arranged.of(in_type(y, x.type)).reshaped(moved.shape).permuted([*np.argsort(order)])


# ---------------------------------------------------------------- made of shapes and numbers
@onnx("Shape")
def shape_of(b: Building, x: Any, *, start: int = 0, end: int | None = None) -> np.ndarray:
    sizes = [affine(n) for n in x.shape[start:end]]
    fixed = all(n.constant for n in sizes)
    return np.array([n.b if n.constant else n for n in sizes], "int64" if fixed else object)


@onnx("Size")
def size_of(b: Building, x: Any) -> np.ndarray:
    n = numel(tuple([affine(m) for m in x.shape]))
    return np.array(n.b, "int64") if n.constant else np.array(n, object)


@onnx("EyeLike")
def eye_like(b: Building, x: Any, *, dtype: int | None = None, k: int = 0) -> np.ndarray:
    kind = type_of(x) if dtype is None else TYPES[dtype]
    rows, columns = (whole(n) for n in x.shape)
    return np.eye(rows, columns, k=k, dtype=b.type if kind == FLOAT else kind)


@onnx("ConstantOfShape")
def constant_of_shape(b: Building, shape: Any, *, value: Any = None) -> Any:
    value = np.zeros(1, "float32") if value is None else value
    sizes = [affine(n) for n in whole_numbers(shape, "the shape")]
    if all(n.constant for n in sizes):
        return np.full([n.b for n in sizes], value.item(), value.dtype)
    return Filled(value.item(), sizes, str(value.dtype))


@onnx("Range")
def range_(b: Building, start: Any, limit: Any, delta: Any) -> Any:
    (first,), (last,), (step,) = (whole_numbers(x, "its limits") for x in (start, limit, delta))
    if not any(isinstance(n, Affine) for n in (first, last, step)):
        return np.arange(first, last, step).astype(start.dtype)
    places = numbers(b, (last - first) // step)
    return Arranged.of(in_type(in_floats(places) * whole(step) + whole(first), "int64"))


@onnx("OneHot")
def one_hot(b: Building, indices: Any, depth: Any, values: Any, *, axis: int = -1) -> Arranged:
    n, rank = int(whole_numbers(depth, "depth")[0]), rank_of(indices)
    v = F.expand_dims(variable(b, indices), rank)
    places: Any = np.arange(n)
    here = F.logical_or(F.equal(v, places), F.equal(v, places - n))
    off, on = (
        variable(b, values[k]) if is_known(values) else taken(b, values, np.array(k), 0).variable() for k in (0, 1)
    )
    order = [*range(rank)]
    order.insert(place_of(axis, rank + 1), rank)
    return Arranged.of(F.where(here, on, off)).permuted(order)

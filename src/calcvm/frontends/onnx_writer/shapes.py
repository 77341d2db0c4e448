"""Operators that move elements, and places that are data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from calcvm.frontends.onnx_writer.declared import Cannot, Nodes, Tensor, indexes, whole, writes
from calcvm.ops.layouts import LAST, WINDOW, axes, back

END = np.iinfo(np.int64).max


# ---------------------------------------------------------------- views and transposition
@writes("reshape")
def reshape(n: Nodes, x: Tensor, *, shape: Any) -> str:
    return n.reshape(x, n.shape)


@writes("flatten")
def flatten(n: Nodes, x: Tensor) -> str:
    return n("Flatten", x) if x.rank else n.reshape(x, n.shape)


@writes("stop_gradient")
def stop_gradient(n: Nodes, x: Tensor) -> str:
    return x


@writes("channels_last")
def channels_last(n: Nodes, x: Tensor) -> str:
    return n.turn(x, axes(LAST, x.rank))


@writes("channels_first")
def channels_first(n: Nodes, x: Tensor) -> str:
    return n.turn(x, back(LAST, x.rank))


@writes("window_last")
def window_last(n: Nodes, x: Tensor) -> str:
    return n.turn(x, back(WINDOW, x.rank))


@writes("transpose")
def transpose(n: Nodes, x: Tensor, *, axes: tuple[int, ...] | None) -> str:
    return n.turn(x, range(x.rank)[::-1] if axes is None else axes)


# ---------------------------------------------------------------- parts
@writes("concat", "concat_many")
def concat(n: Nodes, *parts: Tensor | None, axis: int) -> str:
    return n("Concat", *(p for p in parts if p is not None), axis=axis)


@writes("slice")
def cut(n: Nodes, x: Tensor, *, starts: tuple[int | None, ...], stops: tuple[int | None, ...]) -> str:
    ends = [(k, a or 0, END if b is None else b) for k, (a, b) in enumerate(zip(starts, stops)) if a or b is not None]
    if not ends:
        return x
    where, first, last = ([*side] for side in zip(*ends))
    return n("Slice", x, first, last, where)


@writes("pad")
def pad(n: Nodes, x: Tensor, *, pads: tuple[int, ...], mode: str, value: float) -> str:
    """Where an axis is repeated, it is gathered."""
    if mode != "wrap":
        filling = n.number(value, x.type) if mode == "constant" else None
        return n("Pad", x, [*pads], filling, mode=mode)
    y: str = x
    for axis, (before, after) in enumerate(zip(pads[: x.rank], pads[x.rank :])):
        if before or after:
            size = whole(x.shape[axis], "a padded axis")
            y = n("Gather", y, np.arange(-before, size + after) % size, axis=axis)
    return y


@writes("crop")
def crop(
    n: Nodes, x: Tensor, rng: Any, *, sizes: Sequence[int], padding: Sequence[int], mode: str, first: int, **_: Any
) -> str:
    """The middle of padded images."""
    if rng is not None:
        raise Cannot("its places are random")
    axes = range(first, first + len(sizes))
    pads = [0] * 2 * x.rank
    for axis, p in zip(axes, padding):
        pads[axis] = pads[x.rank + axis] = p
    starts = [(x.shape[axis].b + 2 * p - size) // 2 for axis, p, size in zip(axes, padding, sizes)]
    y = pad(n, x, pads=tuple(pads), mode=mode, value=0.0) if any(padding) else x
    return n("Slice", y, starts, [a + size for a, size in zip(starts, sizes)], [*axes])


@writes("upsample")
def upsample(
    n: Nodes,
    x: Tensor,
    *,
    sizes: tuple[int, ...] | None,
    scales: tuple[float, ...] | None,
    mode: str,
    align_corners: bool,
) -> str:
    """Of nearest elements: those of ONNX, if its division of floats finds the same, else they are gathered."""
    old, new = ([whole(m, "a scaled axis") for m in shape[2:]] for shape in (x.shape, n.shape))
    steps = [a / b if scales is None else 1 / s for a, b, s in zip(old, new, scales or new)]
    if mode == "linear":
        steps = [1.0 if a == b else step for a, b, step in zip(old, new, steps)]
    factors, how = np.array([1 / step for step in steps], np.float32), {"mode": mode, "axes": [*range(2, x.rank)]}
    if mode == "nearest":
        places = [np.minimum(np.floor(np.float32(np.arange(b) * step)), a - 1) for a, b, step in zip(old, new, steps)]
        theirs = [np.minimum(np.floor(np.float32(np.arange(b)) / f), a - 1) for a, b, f in zip(old, new, factors)]
        if not all(map(np.array_equal, places, theirs)):
            return _gathered(n, x, places)
        how |= {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    else:
        how["coordinate_transformation_mode"] = "align_corners" if align_corners else "half_pixel"
    found = [(np.floor(np.float32(a) * f), np.floor(a * float(f))) for a, f in zip(old, factors)]
    if align_corners or found != [(b, b) for b in new]:
        return n("Resize", x, None, None, new, **how)
    return n("Resize", x, None, factors, **how)


def _gathered(n: Nodes, x: str, places: list[np.ndarray]) -> str:
    for axis, of in enumerate(places, 2):
        x = n("Gather", x, of.astype(np.int64), axis=axis)
    return x


# ---------------------------------------------------------------- places that are data
@writes("argmax", "argmin")
def arg(n: Nodes, x: Tensor, *, axis: int) -> str:
    return n("ArgMax" if n.op.spec.name == "argmax" else "ArgMin", x, axis=axis, keepdims=0)


@writes("argsort")
def argsort(n: Nodes, x: Tensor, *, axis: int, k: int | None, descending: bool) -> str:
    size = x.shape[axis]
    if k is None and not size.constant:
        at = axis % x.rank
        kept = n("Shape", x, start=at, end=at + 1)
    else:
        kept = n.constant([size.b if k is None else k])
    return n("TopK", x, kept, outputs=2, axis=axis, largest=int(descending))[1]


@writes("embedding")
def embedding(n: Nodes, x: Tensor, index: Tensor, *, padding: int) -> str:
    return n("Gather", x, indexes(n, index), axis=0)


@writes("take")
def take(n: Nodes, x: Tensor, index: Tensor, *, axis: int) -> str:
    return n("Gather", x, indexes(n, index), axis=axis)


@writes("take_along_axis")
def take_along_axis(n: Nodes, x: Tensor, index: Tensor, *, axis: int) -> str:
    return n("GatherElements", x, indexes(n, index), axis=axis)


@writes("pick")
def pick(n: Nodes, x: Tensor, index: Tensor) -> str:
    places = n("Unsqueeze", n.reshape(indexes(n, index), x.shape[:-1]), [-1])
    return n.reshape(n("GatherElements", x, places, axis=-1), n.shape)


@writes("one_hot")
def one_hot(n: Nodes, x: Tensor, index: Tensor) -> str:
    """x at the place of the index, and 0 elsewhere."""
    depth = whole(x.shape[0], "the number of classes")
    hot = n("Equal", n("Unsqueeze", indexes(n, index), [-1]), np.arange(depth))
    return n.where(hot, x, 0.0)


@writes("inside")
def inside(n: Nodes, x: Tensor, index: Tensor) -> str:
    return indexes(n, index)


@writes("scatter_add")
def scatter_add(n: Nodes, x: Tensor, index: Tensor, u: Tensor) -> str:
    return n("ScatterND", x, n("Unsqueeze", indexes(n, index), [-1]), u, reduction="add")


@writes("put_line")
def put_line(n: Nodes, x: Tensor, v: Tensor, place: Tensor) -> str:
    lines = np.arange(whole(x.shape[1], "the number of lines"))[:, None]
    here = n("Equal", n("Unsqueeze", indexes(n, place), [1, 2]), lines)
    return n.where(here, n("Unsqueeze", v, [1]), x)

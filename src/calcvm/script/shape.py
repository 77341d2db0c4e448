"""Texts of rows that move elements, scale axes, or draw random numbers."""

from __future__ import annotations

from itertools import permutations
from typing import Any

from calcvm.ops.dims import ONE, ZERO, Affine, Shape, affine, numel
from calcvm.ops.resizing import BEYOND
from calcvm.ops.shape import PARTS
from calcvm.script.code import show
from calcvm.script.elementwise import canonical
from calcvm.script.row import Row, writes


def _strides(shape: Shape) -> list[Affine]:
    out, step = [], ONE
    for n in reversed(shape):
        out.append(step)
        step = step * n
    return out[::-1]


def _pairs(r: Row, size: str, stride: str) -> list[tuple[Affine, Affine]]:
    return [(getattr(r.w, f"{size}{i}"), getattr(r.w, f"{stride}{i}")) for i in range(6)]


# ---------------------------------------------------------------- transposition
def _permuted(r: Row, source: str, target: str, size: str, stride: str) -> None:
    pairs, x, y = _pairs(r, size, stride), r.shape(source), r.shape(target)
    wanted = canonical(pairs)
    strides = _strides(x)
    for axes in permutations(range(len(x))) if len(x) == len(y) else ():
        if tuple(x[a] for a in axes) == y and canonical((x[a], strides[a]) for a in axes) == wanted:
            said = r.x(source)
            r.put(target, said if axes == (*range(len(x)),) else said.method(f"transpose({', '.join(map(str, axes))})"))
            return
    kept = [(n, s) for n, s in pairs if n != ONE] or [(ONE, ONE)]
    order = sorted(range(len(kept)), key=lambda i: kept[i][1].at(2), reverse=True)
    lying = tuple(kept[i][0] for i in order)  # x in the groups of axes that are permuted
    if _strides(lying) == [kept[i][1] for i in order] and numel(lying) == numel(x):
        back = ", ".join(str(order.index(i)) for i in range(len(kept)))
        said = r.x(source, *lying).method(f"transpose({back})")
    else:
        said = _strided(r, source, ZERO, kept)
    r.put(target, said, *(n for n, _ in kept))


def _strided(r: Row, name: str, start: Affine, pairs: list[tuple[Affine, Affine]]) -> Any:
    return r.call("strided", r.x(name), start, tuple(n for n, _ in pairs), tuple(s for _, s in pairs))


@writes("transpose_fwd")
def _transpose(r: Row) -> None:
    _permuted(r, "x", "y", "d", "s")


@writes("transpose_bwd")
def _transpose_back(r: Row) -> None:
    _permuted(r, "dy", "dx", "e", "t")


# ---------------------------------------------------------------- concatenation
def _below(r: Row, part: str) -> Affine:
    return getattr(r.w, part.upper())


def _joined(r: Row, parts: str) -> None:
    lead = r.w.rows * r.w.inner
    there = [p for p in parts if p in r]
    total = sum((_below(r, p) for p in there), ZERO)
    values = [r.x(p, lead, _below(r, p)) for p in there]
    said = ", ".join("{}" for _ in values)
    joined = r.trace.of(f"np.concatenate([{said}], 1)", 9, tuple((v, 0) for v in values))
    r.put("y", joined, lead, total)


@writes("concat_fwd")
def _concat(r: Row) -> None:
    _joined(r, "ab")


@writes("concat_many_fwd")
def _concat_many(r: Row) -> None:
    _joined(r, PARTS)


# ---------------------------------------------------------------- slices
def _ranges(r: Row, whole: str, part: str) -> str | None:
    """The slice as an index in the stored axes of the whole, or None if it is not one."""
    w, x, y = r.w, r.shape(whole), r.shape(part)
    if len(x) != len(y) or not x:
        return None
    start, index = w.first * w.cols + w.off, []
    strides = _strides(x)
    for n, m, stride in zip(x, y, strides):
        first = ZERO
        if n != m or not n.constant:
            try:
                first = affine(start.at(1) // stride.at(1)) if start.constant and stride.constant else ZERO
            except ZeroDivisionError:
                return None
        start = start - first * stride if stride.constant else start
        if n != m and not (n.constant and m.constant and first.b + m.b <= n.b):
            return None  # an axis of size 1 is elsewhere
        whole_axis = n == m and first == 0
        index.append(":" if whole_axis else f"{show(first)}:{show(first + m)}")
    pairs = [(w.d0, w.cols), *((getattr(w, f"d{i}"), getattr(w, f"s{i}")) for i in range(1, 5)), (w.d5, ONE)]
    if start != 0 or canonical(zip(y, strides)) != canonical(pairs):
        return None
    while len(index) > 1 and index[-1] == ":":
        index.pop()
    return ", ".join(index)


def _slice_pairs(r: Row) -> list[tuple[Affine, Affine]]:
    w = r.w
    pairs = [(w.d0, w.cols), *((getattr(w, f"d{i}"), getattr(w, f"s{i}")) for i in range(1, 5)), (w.d5, ONE)]
    return [(n, s) for n, s in pairs if n != ONE] or [(ONE, ONE)]


@writes("slice_fwd")
def _slice(r: Row) -> None:
    index = _ranges(r, "x", "y")
    if index is not None:
        r.put("y", r.x("x")[index])
        return
    pairs = _slice_pairs(r)
    r.put("y", _strided(r, "x", r.w.first * r.w.cols + r.w.off, pairs), *(n for n, _ in pairs))


@writes("slice_bwd")
def _slice_back(r: Row) -> None:
    pairs, start = _slice_pairs(r), r.w.first * r.w.cols + r.w.off
    sizes, strides = tuple(n for n, _ in pairs), tuple(s for _, s in pairs)
    total = numel(r.shape("dx"))
    dx = r.call("unstrided", r.x("dy", *sizes), start, sizes, strides, total)
    r.put("dx", dx, total)


# ---------------------------------------------------------------- padding
def _pads(r: Row) -> tuple[Shape, tuple[tuple[int, int], ...], Shape]:
    """x, its padding, and y, without unpadded axes of size 1."""
    w = r.w
    axes = [(getattr(w, f"d{k}"), r.integer(f"p{k}"), r.integer(f"q{k}")) for k in range(5)] + [(w.n, 0, 0)]
    kept = [axis for axis in axes if axis != (ONE, 0, 0)] or axes[:1]
    x = tuple(n for n, _, _ in kept)
    return x, tuple((p, q) for _, p, q in kept), tuple(n + (p + q) for n, p, q in kept)


@writes("pad_fwd")
def _pad(r: Row) -> None:
    x, pairs, y = _pads(r)
    mode = BEYOND[r.integer("mode")]
    more = {"constant_values": r.number(r.w.value)} if mode == "constant" and r.w.value else {}
    r.put("y", r.call("np.pad", r.x("x", *x), pairs, mode, **more), *y)


@writes("pad_bwd")
def _pad_back(r: Row) -> None:
    x, pairs, y = _pads(r)
    r.put("dx", r.call("pad_back", r.x("dy", *y), pairs, BEYOND[r.integer("mode")]), *x)


# ---------------------------------------------------------------- scaling
def _scaling(r: Row) -> tuple[Shape, Shape, tuple[float, ...]]:
    w = r.w
    three = [(w.D, w.E, w.sd), (w.H, w.F, w.sh), (w.W, w.G, w.sw)]
    kept = [axis for axis in three if (axis[0], axis[1]) != (ONE, ONE)] or three[1:2]
    return tuple(a[0] for a in kept), tuple(a[1] for a in kept), tuple(a[2] for a in kept)


@writes("upsample_fwd")
def _upsample(r: Row) -> None:
    of, to, steps = _scaling(r)
    y = r.call("scaled", r.x("x", r.w.N, *of, r.w.C), to, steps, r.w.mode == 1, r.w.align == 1)
    r.put("y", y, r.w.N, *to, r.w.C)


@writes("upsample_bwd")
def _upsample_back(r: Row) -> None:
    of, to, steps = _scaling(r)
    dy = r.x("dy", r.w.N, *to, r.w.C)
    r.put("dx", r.call("scaled", dy, of, steps, r.w.mode == 1, r.w.align == 1, True), r.w.N, *of, r.w.C)


# ---------------------------------------------------------------- random numbers
def _mask(r: Row, y: str) -> Any:
    named = {} if r.dtype(y) == "float64" else {"dtype": f"np.{r.dtype(y)}"}
    return r.call("dropout_mask", r.x("rng"), r.x("rate"), r.integer("stream"), r.shape(y), **named)


@writes("dropout_fwd", "dropout_bwd")
def _dropout(r: Row) -> None:
    x, y = ("x", "y") if "x" in r else ("dy", "dx")
    r.put(y, r.like(x, y) * _mask(r, y))


@writes("dropout_mask_fwd")
def _dropout_mask(r: Row) -> None:
    r.put("y", _mask(r, "y"))


@writes("rng_advance")
def _advance(r: Row) -> None:
    r.put("rng", r.trace.of("(0, 1)"), add=True)


@writes("crop_fwd")
def _crop(r: Row) -> None:
    w = r.w
    rng = r.x("rng") if "rng" in r else "None"
    x = r.x("x", w.N, w.A, w.D, w.H, w.W, w.C)
    sizes, pads, flips = (w.ED, w.EH, w.EW), (w.pd, w.ph, w.pw), (w.fd, w.fh, w.fw)
    stream = r.integer("stream")
    of = r.trace.of(rng) if isinstance(rng, str) else rng
    y = r.call("crop", x, of, stream, sizes, pads, flips, BEYOND[r.integer("mode")])
    r.put("y", y, w.N, w.A, *sizes, w.C)

"""Operators that move elements, and constants of the batch's size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from calcvm import functions as F
from calcvm import images
from calcvm.frontends.arrangement import Arranged
from calcvm.frontends.aten.declared import ATEN, aten
from calcvm.frontends.aten.elementwise import where
from calcvm.frontends.aten.places import taken
from calcvm.frontends.building import (
    Building,
    Cannot,
    Filled,
    Sizes,
    arranged,
    axis_of,
    is_number,
    one_by_one,
    plain,
    variable,
    whole,
)
from calcvm.ops.dims import ONE, Affine, affine, numel
from calcvm.ops.types import FLOAT


# ---------------------------------------------------------------- shapes
@aten("view", "reshape", "_unsafe_view")
def view(b: Building, x: Any, sizes: Any) -> Any:
    if isinstance(sizes, str):
        raise Cannot("it reads bytes as another type")
    return Filled(x.value, sizes, x.type) if isinstance(x, Filled) else x.reshaped(sizes)


ATEN["view_as"] = ATEN["reshape_as"] = lambda b, x, y: view(b, x, y.shape)


@aten("flatten")
def flatten(b: Building, x: Arranged, start: int = 0, end: int = -1) -> Arranged:
    start, end = axis_of(x, start), axis_of(x, end)
    return x.reshaped([*x.shape[:start], numel(x.shape[start : end + 1]), *x.shape[end + 1 :]])


@aten("unflatten")
def unflatten(b: Building, x: Arranged, axis: int, sizes: Sizes) -> Arranged:
    axis = axis_of(x, axis)
    known = numel(tuple(affine(n) for n in sizes if affine(n) != -1))
    given = [n if affine(n) != -1 else x.shape[axis] // known for n in sizes]
    return x.reshaped([*x.shape[:axis], *given, *x.shape[axis + 1 :]])


@aten("unsqueeze")
def unsqueeze(b: Building, x: Any, axis: int) -> Any:
    axis %= len(x.shape) + 1
    return view(b, x, [*x.shape[:axis], 1, *x.shape[axis:]])


@aten("squeeze")
def squeeze(b: Building, x: Arranged, axes: Any = None) -> Arranged:
    given = range(x.rank) if axes is None else [axes] if isinstance(axes, int) else axes
    return x.without([k for k in (axis_of(x, a) for a in given) if x.shape[k] == ONE])


@aten("permute")
def permute(b: Building, x: Arranged, order: Sequence[int]) -> Arranged:
    return x.permuted([axis_of(x, k) for k in order])


@aten("transpose", "swapaxes", "swapdims")
def transpose(b: Building, x: Arranged, i: int, j: int) -> Arranged:
    return x.swapped(axis_of(x, i), axis_of(x, j))


@aten("t", "numpy_T", "mT")
def turned(b: Building, x: Arranged) -> Arranged:
    return x if x.rank < 2 else x.swapped()


@aten("movedim", "moveaxis")
def movedim(b: Building, x: Arranged, source: Any, to: Any) -> Arranged:
    sources, places = ([a] if isinstance(a, int) else a for a in (source, to))
    moved = dict(sorted(zip((axis_of(x, k) for k in places), (axis_of(x, k) for k in sources))))
    others = iter([k for k in range(x.rank) if k not in moved.values()])
    return x.permuted([moved[k] if k in moved else next(others) for k in range(x.rank)])


@aten("contiguous", "clone", "alias", "lift_fresh_copy", "positive")
def same(b: Building, x: Any, **_: Any) -> Any:
    return x


@aten("detach")
def detach(b: Building, x: Arranged) -> Arranged:
    return x.again(F.stop_gradient)


@aten("select")
def select(b: Building, x: Arranged, axis: int, index: int) -> Arranged:
    axis = axis_of(x, axis)
    index = whole(index) % whole(x.shape[axis])
    return x.part(axis, index, index + 1).without([axis])


@aten("slice")
def slice_(b: Building, x: Arranged, axis: int = 0, start: Any = None, stop: Any = None, step: int = 1) -> Arranged:
    axis = axis_of(x, axis)
    size = x.shape[axis]
    begins, ends = start in (None, 0), stop is None or stop == size or (isinstance(stop, int) and stop >= 2**62)
    if begins and ends and step == 1:
        return x
    first, last = (None if n is None else whole(n) for n in (start, stop))
    places = range(whole(size))[first:last:step]
    if not places:
        raise Cannot("it has no elements")
    if step != 1:
        return taken(b, x, np.asarray(places), axis)
    return x.part(axis, places[0], places[-1] + 1)


@aten("narrow")
def narrow(b: Building, x: Arranged, axis: int, start: Any, length: Any) -> Arranged:
    return slice_(b, x, axis, start, whole(start) + whole(length))


@aten("split", "split_with_sizes")
def split(b: Building, x: Arranged, sizes: Any, axis: int = 0) -> list[Arranged]:
    axis = axis_of(x, axis)
    n = whole(x.shape[axis])
    if isinstance(sizes, (int, Affine)):
        sizes = [min(whole(sizes), n - at) for at in range(0, n, whole(sizes))]
    ends = np.cumsum([whole(s) for s in sizes])
    return [x.part(axis, int(end) - whole(size), int(end)) for size, end in zip(sizes, ends)]


@aten("chunk")
def chunk(b: Building, x: Arranged, parts: int, axis: int = 0) -> list[Arranged]:
    return split(b, x, -(-whole(x.shape[axis_of(x, axis)]) // parts), axis)


@aten("unbind")
def unbind(b: Building, x: Arranged, axis: int = 0) -> list[Arranged]:
    return [select(b, x, axis, k) for k in range(whole(x.shape[axis_of(x, axis)]))]


@aten("cat", "concat", "concatenate")
def cat(b: Building, parts: Sequence[Any], axis: int = 0) -> Arranged:
    parts = [p for p in parts if not (isinstance(p, np.ndarray) and not p.size)]
    rank = len(parts[0].shape)
    return Arranged.of(F.concat([variable(b, p) for p in parts], axis % rank))


@aten("slice_scatter")
def slice_scatter(
    b: Building, x: Any, part: Any, axis: int = 0, start: Any = None, stop: Any = None, step: int = 1
) -> Arranged:
    x = arranged(b, x)
    axis = axis_of(x, axis)
    n = whole(x.shape[axis])
    first, last, _ = slice(start, None if stop is None else whole(stop)).indices(n)
    if step != 1:
        raise Cannot("it changes every second element, or so: a part without gaps has a counterpart")
    sides = [x.part(axis, *ends) for ends in ((0, first), (last, n)) if ends[0] < ends[1]]
    return cat(b, [*sides[: first > 0], part, *sides[first > 0 :]], axis) if sides else arranged(b, part)


@aten("select_scatter")
def select_scatter(b: Building, x: Any, part: Any, axis: int, index: int) -> Arranged:
    axis = axis % len(x.shape)
    index %= whole(x.shape[axis])
    return slice_scatter(b, x, unsqueeze(b, part, axis), axis, index, index + 1)


@aten("copy")
def copy(b: Building, x: Any, of: Any, *_: Any) -> Any:
    return expand(b, of, x.shape)


@aten("stack")
def stack(b: Building, parts: Sequence[Any], axis: int = 0) -> Arranged:
    parts = [arranged(b, p) for p in parts]
    return cat(b, [unsqueeze(b, p, axis) for p in parts], axis % (parts[0].rank + 1))


@aten("expand", "broadcast_to")
def expand(b: Building, x: Any, sizes: Sizes, implicit: bool = False) -> Any:
    shape = tuple([affine(n) for n in x.shape])
    added = len(sizes) - len(shape)
    old = (*(ONE,) * added, *shape)
    new = [n if affine(size) == -1 else affine(size) for size, n in zip(sizes, old)]
    if isinstance(x, Filled):
        return Filled(x.value, new, x.type)
    if is_number(x) or (isinstance(x, np.ndarray) and x.size == 1):
        return Filled(float(np.asarray(x).item()), new)
    x = x.reshaped(old) if isinstance(x, Arranged) else x.reshape([n.b for n in old])
    if old == (*new,):
        return x
    zeros = Filled(0.0, [n if n != o else ONE for n, o in zip(new, old)])
    if any(not n.constant for n in zeros.shape):
        return one_by_one(b, F.add, x, Arranged.of(plain(b, zeros)))
    return one_by_one(b, F.add, x, np.zeros([n.b for n in zeros.shape]))


ATEN["expand_as"] = lambda b, x, y: expand(b, x, y.shape)


@aten("repeat", "tile")
def repeat(b: Building, x: Any, times: Sizes) -> Any:
    x = arranged(b, x) if not isinstance(x, Filled) else x
    x = view(b, x, [*(1,) * (len(times) - len(x.shape)), *x.shape])
    for axis, n in enumerate(times):
        if affine(n) == ONE:
            continue
        if x.shape[axis] == ONE:
            x = expand(b, x, [n if k == axis else -1 for k in range(len(x.shape))])
        else:
            x = cat(b, [x] * whole(n), axis)
    return x


@aten("repeat_interleave")
def repeat_interleave(b: Building, x: Arranged, times: Any, axis: Any = None, **_: Any) -> Arranged:
    if axis is None or not isinstance(times, int):
        raise Cannot("one number of repeats, along an axis, has a counterpart")
    axis = axis_of(x, axis)
    before, n, behind = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    wide = expand(b, x.reshaped([*before, n, 1, *behind]), [*before, n, times, *behind])
    return wide.reshaped([*before, n * times, *behind])


@aten("flip")
def flip(b: Building, x: Arranged, axes: Sequence[int]) -> Arranged:
    for axis in axes:
        x = taken(b, x, np.arange(whole(x.shape[axis_of(x, axis)]))[::-1], axis_of(x, axis))
    return x


@aten("roll")
def roll(b: Building, x: Arranged, shifts: Any, axes: Any = ()) -> Arranged:
    for shift, axis in zip(shifts, axes, strict=True):
        axis = axis_of(x, axis)
        n = whole(x.shape[axis])
        if at := -shift % n:
            x = cat(b, [x.part(axis, at, n), x.part(axis, 0, at)], axis)
    return x


@aten("pad", "constant_pad_nd")
def pad(b: Building, x: Arranged, pads: Sequence[int], mode: Any = "constant", value: Any = None) -> Arranged:
    mode, value = (mode, value) if isinstance(mode, str) else ("constant", mode)
    pairs = [(whole(before), whole(after)) for before, after in zip(pads[::2], pads[1::2])][::-1]
    first = x.rank - len(pairs)
    for axis, (before, after) in enumerate(pairs, first):
        if min(before, after) < 0:
            x = x.part(axis, max(-before, 0), whole(x.shape[axis]) - max(-after, 0))
    pairs = [(max(before, 0), max(after, 0)) for before, after in pairs]
    if not any(map(any, pairs)):
        return x
    modes = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}
    return Arranged.of(images.pad(x.variable(), tuple(pairs), modes[mode], float(value or 0)))


def _padded(mode: str) -> Callable[..., Any]:
    return lambda b, x, pads: pad(b, x, pads, mode)


for _n in (1, 2, 3):
    ATEN[f"reflection_pad{_n}d"], ATEN[f"replication_pad{_n}d"] = _padded("reflect"), _padded("replicate")


@aten("pixel_shuffle")
def pixel_shuffle(b: Building, x: Arranged, r: int) -> Arranged:
    n, c, h, w = x.shape
    split = x.reshaped([n, c // (r * r), r, r, h, w])
    return split.permuted([0, 1, 4, 2, 5, 3]).reshaped([n, c // (r * r), h * r, w * r])


@aten("pixel_unshuffle")
def pixel_unshuffle(b: Building, x: Arranged, r: int) -> Arranged:
    n, c, h, w = x.shape
    split = x.reshaped([n, c, h // r, r, w // r, r])
    return split.permuted([0, 1, 3, 5, 2, 4]).reshaped([n, c * (r * r), h // r, w // r])


@aten("channel_shuffle")
def channel_shuffle(b: Building, x: Arranged, groups: int) -> Arranged:
    n, c, *sizes = x.shape
    return x.reshaped([n, groups, c // groups, *sizes]).swapped(1, 2).reshaped(x.shape)


def _triangle(x: Arranged, diagonal: int, lower: bool) -> np.ndarray:
    rows, columns = (whole(n) for n in x.shape[-2:])
    full = np.ones((rows, columns), bool)
    return np.tril(full, diagonal) if lower else np.triu(full, diagonal)


ATEN["tril"] = lambda b, x, diagonal=0: where(b, _triangle(x, diagonal, True), x, 0.0)
ATEN["triu"] = lambda b, x, diagonal=0: where(b, _triangle(x, diagonal, False), x, 0.0)


# ---------------------------------------------------------------- constants of the batch's size
def _filled(name: str, value: float) -> None:
    ATEN[name] = lambda b, sizes, dtype=None, **_: Filled(value, sizes, dtype)
    ATEN[f"new_{name}"] = lambda b, x, sizes, dtype=None, **_: Filled(value, sizes, dtype or _type(x))
    ATEN[f"{name}_like"] = lambda b, x, dtype=None, **_: Filled(value, x.shape, dtype or _type(x))


def _type(x: Any) -> str | None:
    """The type of what depends on the batch, None for floats."""
    kind = x.type if isinstance(x, Filled) else x.base.type
    return None if kind == FLOAT else kind


for _name, _number in {"zeros": 0.0, "ones": 1.0, "empty": 0.0}.items():
    _filled(_name, _number)
ATEN["full"] = lambda b, sizes, value, dtype=None, **_: Filled(value, sizes, dtype)
ATEN["new_full"] = lambda b, x, sizes, value, dtype=None, **_: Filled(value, sizes, dtype or _type(x))
ATEN["full_like"] = ATEN["fill"] = lambda b, x, value, dtype=None, **_: Filled(value, x.shape, dtype or _type(x))

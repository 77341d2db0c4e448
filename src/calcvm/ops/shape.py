"""Operators that move elements: views, transposition, concatenation, slices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calcvm.ops.dims import ONE, ZERO, Affine, Shape, affine, numel, show
from calcvm.ops.repetition import each
from calcvm.ops.spec import (
    LAST,
    WINDOW,
    Attr,
    Example,
    R,
    RowSpec,
    Shapes,
    W,
    are_axes,
    choice,
    dims,
    joined,
    operator,
    same_shape,
)
from calcvm.ops.types import CELLS, FLOAT

AXES = 6


def _are_ends(v: Any) -> bool:
    return isinstance(v, tuple) and all(n is None or isinstance(n, int) for n in v)


# ---------------------------------------------------------------- views
def reshape_shape(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
    x = shapes["x"]
    total = numel(x)
    asked = tuple(attrs["shape"])
    if asked.count(-1) > 1:
        raise ValueError(f"reshape to {asked}: at most one size may be -1")
    known = numel(tuple(Affine(1) if n is None else affine(n) for n in asked if n != -1))
    rest = ONE
    if -1 in asked:
        try:
            rest = total // known
        except ArithmeticError:
            raise ValueError(f"unknown batch in a reshape, or no whole size: {show(x)} to {asked}") from None
    y = tuple(Affine(1) if n is None else rest if n == -1 else affine(n) for n in asked)
    if numel(y) != total:
        unknown = total.a and not numel(y).a
        why = "unknown batch in a reshape: give it as None or -1" if unknown else "the numbers of elements differ"
        raise ValueError(f"{why}: {show(x)} to {asked}")
    return {"y": y}


def flatten_shape(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
    x = shapes["x"]
    return {"y": (x[0] if x else ONE, numel(x[1:]))}


def _view(name: str, synopsis: str, shape: Any = same_shape, **more: Any) -> None:
    operator(
        name=name,
        synopsis=synopsis,
        category="shape",
        inputs=("x",),
        shape=shape,
        words=lambda shapes, attrs: {},
        view=True,
        **more,
    )


_view(
    "reshape",
    "y = x under another shape",
    reshape_shape,
    attrs=(
        Attr(
            name="shape",
            check=lambda v: isinstance(v, tuple) and all(n is None or (isinstance(n, int) and n >= -1) for n in v),
            doc="sizes; None is the batch, one -1 is the remaining size",
        ),
    ),
    differentiable=("x",),
    onnx=("Reshape", "Squeeze", "Unsqueeze"),
    examples=(
        Example(shapes=((None, 6),), attrs={"shape": (None, 2, 3)}),
        Example(shapes=((None, 2, 3),), attrs={"shape": (-1, 6)}),
        Example(shapes=((4, 3),), attrs={"shape": (2, -1)}),
    ),
)
_view(
    "flatten",
    "y = x as (leading axis, everything else)",
    flatten_shape,
    differentiable=("x",),
    onnx=("Flatten",),
    examples=(Example(shapes=((None, 2, 3),)), Example(shapes=((None,),))),
)
_view(
    "channels_last",
    "y (N, *sizes, C) = x (N, C, *sizes): images lie so",
    layouts={"x": LAST},
    differentiable=("x",),
    examples=(Example(shapes=((None, 4, 5, 3),)), Example(shapes=((None, 5, 3),)), Example(shapes=((None, 3),))),
)
_view(
    "channels_first",
    "y (N, C, *sizes) = x (N, *sizes, C): images lie so",
    layouts={"y": LAST},
    differentiable=("x",),
    examples=(Example(shapes=((None, 4, 5, 3),)), Example(shapes=((None, 5, 3),)), Example(shapes=((None, 3),))),
)
_view(
    "window_last",
    "y (F, C, *window) = x (*window, C, F): weights lie so",
    layouts={"y": WINDOW},
    differentiable=("x",),
    examples=(Example(shapes=((3, 2, 4, 5),)), Example(shapes=((3, 4, 5),))),
)
_view(
    "stop_gradient",
    "y = x, taken for a constant by the backward",
    stops=True,
    anyhow=True,
    examples=(Example(shapes=((None, 2, 3),)), Example(shapes=((4,),))),
)


# ---------------------------------------------------------------- transposition
def transpose_shape(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
    x = shapes["x"]
    axes = _axes(x, attrs)
    return {"y": tuple(x[a] for a in axes)}


def _axes(x: Shape, attrs: Mapping[str, Any]) -> tuple[int, ...]:
    axes = attrs.get("axes")
    if axes is None:
        axes = tuple(reversed(range(len(x))))
    if sorted(axes) != list(range(len(x))):
        raise ValueError(f"axes {tuple(axes)} are not a permutation of the axes of {show(x)}")
    return tuple(axes)


def _permutation(x: Shape, axes: tuple[int, ...], size: str, stride: str, same: str) -> dict[str, Any]:
    """Sizes of the permuted tensor and the strides of x along them; its leading axis, or two that stay, are one group."""
    if len(x) > 2 and axes[:2] == (0, 1):
        x, axes = joined(x), (0, *(a - 1 for a in axes[2:]))
    strides, step = [ONE] * len(x), ONE
    for i in reversed(range(len(x))):
        strides[i], step = step, step * x[i]
    groups: list[tuple[Affine, Affine]] = []
    for a in axes[1:]:
        n, s = x[a], strides[a]
        if n == ONE:
            continue
        if groups and groups[-1][1] == s * n:
            groups[-1] = (groups[-1][0] * n, s)
        else:
            groups.append((n, s))
    if len(groups) > AXES - 1:
        raise ValueError(f"transpose of {show(x)} by {axes}: more than {AXES} groups of axes")
    groups = [(ONE, ZERO)] * (AXES - 1 - len(groups)) + groups
    if axes:
        groups.insert(0, (x[axes[0]], strides[axes[0]]))
    else:
        groups.insert(0, (ONE, ONE))
    words: dict[str, Any] = {f"{size}{i}": n for i, (n, _) in enumerate(groups)}
    words |= {f"{stride}{i}": s for i, (_, s) in enumerate(groups)}
    return {**words, same: int(not axes or axes[0] == 0)}


def transpose_words(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Any]:
    x = shapes["x"]
    axes = _axes(x, attrs)
    inverse = tuple(axes.index(i) for i in range(len(axes)))
    y = tuple(x[a] for a in axes)
    return {**_permutation(x, axes, "d", "s", "same"), **_permutation(y, inverse, "e", "t", "back")}


def _permute(name: str, source: str, target: str, d: str, s: str, same: str, of: str = FLOAT) -> RowSpec:
    total = "*".join(f"{d}{i}" for i in range(AXES))
    below = "1 + " + " + ".join(f"({d}{i} - 1)*{s}{i}" for i in range(1, AXES))
    # If the leading axis stays, its stride covers the elements below it: workers read their own rows.
    span = f"{below} + ({d}0 - 1)*{s}0"
    return RowSpec(
        name=name,
        synopsis=lambda: each("012345", f"{target}[{{i0<{d}0}}] = {source}[{{+ i0*{s}0}}]"),
        declares=f"{source}[k<where({same} == 1, {d}0*{s}0, {span})]",
        words=(*dims(" ".join(f"{v}{i}" for v in (d, s) for i in range(AXES))), choice(same, 2)),
        operands=(
            R(source, f"{d}0*{s}0 if {same} else {span}", f"{d}0 if {same} else 0", type=of),
            W(target, total, f"{d}0", type=of),
        ),
        require=(f"{s}0 - ({below}) if {same} else 0",),
    )


WOVEN = ((2, FLOAT), (3, FLOAT), (4, FLOAT), (3, "uint8"))  # lines for which kernels have special code
operator(
    name="transpose",
    synopsis="y[i_axes[0], i_axes[1], ...] = x[i_0, i_1, ...]",
    category="shape",
    inputs=("x",),
    attrs=(Attr(name="axes", check=are_axes, doc="None: reversed"),),
    shape=transpose_shape,
    words=transpose_words,
    fwd=(_permute("transpose_fwd", "x", "y", "d", "s", "same", CELLS),),
    bwd=(_permute("transpose_bwd", "dy", "dx", "e", "t", "back"),),
    differentiable=("x",),
    onnx=("Transpose",),
    examples=(
        Example(shapes=((None, 7),), attrs={"axes": (1, 0)}),
        Example(shapes=((17, 35),)),
        *(Example(shapes=((17, 35),), types={CELLS: t}) for t in ("uint8", "int64")),
        Example(shapes=((None, 3, 5),), attrs={"axes": (0, 2, 1)}),
        Example(shapes=((None, 3, 4, 5),), attrs={"axes": (0, 3, 1, 2)}),
        Example(shapes=((None, 3, 4, 5),), attrs={"axes": (2, 0, 3, 1)}),
        Example(shapes=((2, 3, 2, 4, 2, 3),), attrs={"axes": (0, 5, 1, 4, 2, 3)}, batch=2),
        *(Example(shapes=((2, n, 70),), attrs={"axes": (0, 2, 1)}, types={CELLS: t}) for n, t in WOVEN),
        *(Example(shapes=((2, 70, n),), attrs={"axes": (0, 2, 1)}, types={CELLS: t}) for n, t in WOVEN),
        Example(shapes=((None, 3),), attrs={"axes": (0, 1)}),
        Example(shapes=((),)),
        Example(shapes=((None, 64, 64),), attrs={"axes": (0, 2, 1)}, batch=16, bench=True),
    ),
)


COPY_ROW = "transpose_fwd"  # makes an output's storage order the users' order


# ---------------------------------------------------------------- concatenation
CONCAT = dims("rows inner A B")
PARTS = "abcdefgh"  # of `concat_many`


def _axis(x: Shape, attrs: Mapping[str, Any]) -> int:
    axis = attrs.get("axis", -1)
    if not -len(x) <= axis < len(x):
        raise ValueError(f"axis {axis} of shape {show(x)}")
    return axis % len(x)


def concat_shape(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
    a, *others = (x for x in shapes.values() if x is not None)
    i = _axis(a, attrs)
    size = a[i]
    for b in others:
        if len(a) != len(b) or a[:i] != b[:i] or a[i + 1 :] != b[i + 1 :]:
            raise ValueError(f"concat of {show(a)} and {show(b)} along axis {i}: the other sizes must agree")
        size += b[i]
    return {"y": (*a[:i], size, *a[i + 1 :])}


def concat_words(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Any]:
    parts = {name: x for name, x in shapes.items() if name in PARTS}
    a = parts["a"]
    i, leading = _axis(a, attrs), a
    if i > 1:
        i, leading = i - 1, joined(a)
    below = {name.upper(): ZERO if x is None else numel(x[len(a) - len(leading) + i :]) for name, x in parts.items()}
    return {"rows": leading[0] if i else ONE, "inner": numel(leading[1:i]), **below}


def _concat_bwd(wrt: str, start: str, n: str) -> RowSpec:
    return RowSpec(
        name=f"concat_bwd_{wrt}",
        synopsis=f"d{wrt}[r<rows*inner,i<{n}] = dy[r,{start}i]",
        declares="dy[r,j<A + B]",
        words=CONCAT,
        operands=(R("dy", "rows*inner*(A + B)", "rows"), W(f"d{wrt}", f"rows*inner*{n}", "rows")),
    )


def along_axis(attrs: Mapping[str, Any], order: tuple[int, ...]) -> dict[str, Any]:
    """The axis to join along, as a place in this storage order."""
    axis = attrs["axis"]
    return {**attrs, "axis": order.index(axis % len(order)) if -len(order) <= axis < len(order) else axis}


AXIS = Attr(name="axis", default=-1, check=lambda v: isinstance(v, int), doc="axis to join along")
operator(
    name="concat",
    synopsis="y[r] = a[r] followed by b[r]",
    category="shape",
    inputs=("a", "b"),
    attrs=(AXIS,),
    shape=concat_shape,
    words=concat_words,
    fwd=(
        RowSpec(
            name="concat_fwd",
            synopsis="y[r<rows*inner,i<A + B] = where(i < A, a[r,i], b[r,i - A])",
            declares="a[r,j<A]; b[r,k<B]",
            words=CONCAT,
            operands=(
                R("a", "rows*inner*A", "rows", type=CELLS),
                R("b", "rows*inner*B", "rows", type=CELLS),
                W("y", "rows*inner*(A + B)", "rows", type=CELLS),
            ),
        ),
    ),
    bwd=(_concat_bwd("a", "", "A"), _concat_bwd("b", " A + ", "B")),
    anyhow=True,
    relaid=along_axis,
    differentiable=("a", "b"),
    onnx=("Concat",),
    examples=(
        Example(shapes=((None, 3), (None, 5))),
        *(Example(shapes=((None, 3), (None, 5)), types={CELLS: t}) for t in ("uint8", "int64")),
        Example(shapes=((None, 2, 3), (None, 4, 3)), attrs={"axis": 1}),
        Example(shapes=((None, 2, 3), (None, 2, 17)), attrs={"axis": -1}),
        Example(shapes=((4, 3), (2, 3)), attrs={"axis": 0}),
    ),
)
MANY = dims(f"rows inner {' '.join(PARTS.upper())}")
ALL_PARTS = " + ".join(PARTS.upper())
MANY_SIZE = f"rows*inner*({ALL_PARTS})"
ALONG = {p: f"{i}<{p.upper()}" for p, i in zip(PARTS, "jklmnopq")}  # an index and its range for each
BEFORE = {p: PARTS.upper()[: PARTS.index(p)] for p in PARTS}
operator(
    name="concat_many",
    synopsis="y[r] = a[r] followed by b[r], c[r], ...",
    category="shape",
    inputs=tuple(PARTS),
    optional_inputs=tuple(PARTS[3:]),
    attrs=(AXIS,),
    shape=concat_shape,
    words=concat_words,
    fwd=(
        RowSpec(
            name="concat_many_fwd",
            synopsis=f"y[r<rows*inner,i<{ALL_PARTS}] = "
            + " + ".join(f"{p}[r, {' - '.join(('i', *BEFORE[p]))}]" for p in PARTS),
            declares="; ".join(f"{p}[r,{ALONG[p]}]{'' if p in 'abc' else ' = 0'}" for p in PARTS),
            words=MANY,
            operands=(
                *(
                    R(
                        p,
                        f"rows*inner*{p.upper()}",
                        "rows",
                        type=CELLS,
                        optional=False if p in "abc" else f"{p.upper()} == 0",
                    )
                    for p in PARTS
                ),
                W("y", MANY_SIZE, "rows", type=CELLS),
            ),
        ),
    ),
    bwd=(
        RowSpec(
            name="concat_many_bwd",
            synopsis="; ".join(f"d{p}[r,{i}] = dy[r, {' + '.join((*BEFORE[p], i[0]))}]" for p, i in ALONG.items()),
            declares=f"dy[r<rows*inner,i<{ALL_PARTS}]",
            words=MANY,
            operands=(
                R("dy", MANY_SIZE, "rows"),
                *(W(f"d{p}", f"rows*inner*{p.upper()}", "rows", optional=True) for p in PARTS),
            ),
        ),
    ),
    anyhow=True,
    relaid=along_axis,
    differentiable=tuple(PARTS),
    onnx=("Concat",),
    examples=(
        Example(shapes=((None, 3), (None, 5), (None, 1))),
        *(Example(shapes=((None, 3), (None, 5), (None, 1)), types={CELLS: t}) for t in ("uint8", "int64")),
        Example(shapes=((None, 2, 3), (None, 4, 3), (None, 1, 3), (None, 2, 3)), attrs={"axis": 1}),
        Example(shapes=tuple((None, 2, 3, n) for n in (17, 1, 4, 3, 16, 2, 1, 5)), attrs={"axis": 3}),
        Example(shapes=((4, 3), (2, 3), (3, 3)), attrs={"axis": 0}),
        Example(shapes=tuple((None, 28, 28, n) for n in (64, 128, 32, 32)), batch=8, bench=True),
    ),
)


# ---------------------------------------------------------------- slices
def _ranges(x: Shape, attrs: Mapping[str, Any]) -> list[tuple[int, Affine, bool]]:
    """(start, size, whole) for each axis."""
    starts, stops = attrs["starts"], attrs["stops"]
    if len(starts) != len(stops) or len(starts) > len(x):
        raise ValueError(f"starts {starts} and stops {stops} need one number per axis of {show(x)}")
    out = []
    for i, size in enumerate(x):
        start, stop = (starts[i] or 0, stops[i]) if i < len(starts) else (0, None)
        if start == 0 and stop is None:
            out.append((0, size, True))
            continue
        if not size.constant:
            raise ValueError(f"axis {i} of {show(x)} is the batch, which cannot be cut: give it as :")
        n = size.b
        start = start + n if start < 0 else start
        stop = n if stop is None else stop + n if stop < 0 else stop
        if not 0 <= start <= stop <= n:
            raise ValueError(f"{start}:{stop} is not a range of axis {i} of {show(x)}")
        out.append((start, affine(stop - start), stop - start == n))
    return out


def slice_shape(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
    return {"y": tuple(n for _, n, _ in _ranges(shapes["x"], attrs))}


def slice_words(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Any]:
    x = shapes["x"]
    ranges = _ranges(x, attrs)
    if len(x) > 2 and ranges[0][2] and ranges[1][2]:
        x = joined(x)
        ranges = [(0, x[0], True), *ranges[2:]]
    groups: list[tuple[Affine, Affine]] = []  # inner axes from the last on: size, stride of x
    step, off, whole_below = ONE, ZERO, True
    for size, (start, n, whole) in zip(x[:0:-1], ranges[:0:-1]):
        off = off + step * start
        if groups and whole_below:
            groups[-1] = (groups[-1][0] * n, groups[-1][1])
        elif not groups or n != ONE:
            groups.append((n, step))
        else:
            whole = False  # one element merges nothing: the axes below stay separate from those above
        whole_below, step = whole, step * size
    if len(groups) > AXES - 1:
        raise ValueError(f"slice of {show(x)}: more than {AXES} groups of axes")
    groups += [(ONE, ZERO)] * (AXES - 1 - len(groups))
    words: dict[str, Any] = {"rows": x[0] if x else ONE, "cols": numel(x[1:]), "off": off}
    words |= {"first": ranges[0][0] if x else 0, "d0": ranges[0][1] if x else ONE}
    words |= {f"d{AXES - 1 - i}": n for i, (n, _) in enumerate(groups)}
    return words | {f"s{AXES - 1 - i}": s for i, (_, s) in enumerate(groups) if i}


SLICE = dims("rows cols first off d0 d1 d2 d3 d4 d5 s1 s2 s3 s4")
SLICE_SIZE = "d0*d1*d2*d3*d4*d5"
SLICE_REQUIRE = (
    "rows - first - d0",
    "cols - off - (d5 + " + " + ".join(f"(d{i} - 1)*s{i}" for i in range(1, AXES - 1)) + ")",
)
operator(
    name="slice",
    synopsis="y = x[starts[0]:stops[0], starts[1]:stops[1], ...]",
    category="shape",
    inputs=("x",),
    attrs=(
        Attr(name="starts", check=_are_ends, doc="first index along each axis, None: 0"),
        Attr(name="stops", check=_are_ends, doc="end along each axis, None: the axis's size"),
    ),
    shape=slice_shape,
    words=slice_words,
    fwd=(
        RowSpec(
            name="slice_fwd",
            synopsis=lambda: each("012345", "y[{i0<d0}] = x[first + i0, off + ") + each("1234", "{+ i1*s1} + i5]"),
            declares="x[r<rows,c<cols]",
            words=SLICE,
            operands=(
                R("x", "rows*cols", "d0 if d0 == rows else 0", type=CELLS),
                W("y", SLICE_SIZE, "d0", type=CELLS),
            ),
            require=SLICE_REQUIRE,
        ),
    ),
    bwd=(
        RowSpec(
            name="slice_bwd",
            synopsis="dx[r<rows,c<cols] = "
            + each("12345", "sum[{i1<d1}] where(c == off + ")
            + each("1234", "{+ i1*s1} + i5, dy[r - first, {i1}, i5], 0)"),
            declares=lambda: each("012345", "dy[{i0<d0}]"),
            words=SLICE,
            operands=(R("dy", SLICE_SIZE, "d0 if d0 == rows else 0"), W("dx", "rows*cols", "rows")),
            require=SLICE_REQUIRE,
        ),
    ),
    differentiable=("x",),
    onnx=("Slice", "Split"),
    examples=(
        Example(shapes=((None, 7),), attrs={"starts": (None, 2), "stops": (None, 5)}),
        Example(shapes=((None, 4, 5),), attrs={"starts": (0, 1), "stops": (None, 3)}),
        *(
            Example(shapes=((None, 4, 5),), attrs={"starts": (0, 1), "stops": (None, 3)}, types={CELLS: t})
            for t in ("uint8", "int64")
        ),
        Example(shapes=((None, 4, 5),), attrs={"starts": (0, 1, 2), "stops": (None, None, -1)}),
        Example(shapes=((None, 3, 4, 2, 5),), attrs={"starts": (0, 1, 1, 0, 1), "stops": (None, 3, 3, 1, 5)}),
        Example(shapes=((None, 4, 1, 2),), attrs={"starts": (0, 1, 0, 0), "stops": (None, None, None, 1)}),
        Example(shapes=((5, None, 3),), attrs={"starts": (1, None, 0), "stops": (4, None, 2)}, batch=4),
        Example(shapes=((4, 3, None),), attrs={"starts": (0, 1), "stops": (3, -1)}, batch=4),
        Example(shapes=((6, 4),), attrs={"starts": (1,), "stops": (4,)}),
        Example(shapes=((6, 4),), attrs={"starts": (2, 1), "stops": (-1, 3)}),
        Example(shapes=((9,),), attrs={"starts": (3,), "stops": (8,)}),
    ),
)

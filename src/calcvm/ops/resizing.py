"""Operators that enlarge or shrink axes: padding, and scaling of images."""

from __future__ import annotations

from collections.abc import Mapping
from math import floor
from typing import Any

from calcvm.ops.dims import ONE, Affine, Shape, affine, show
from calcvm.ops.repetition import each
from calcvm.ops.sizes import On
from calcvm.ops.spec import LAST, WN, Attr, Example, R, RowSpec, S, Shapes, W, Word, choice, dims, operator

# ---------------------------------------------------------------- padding
BEYOND = ("constant", "reflect", "edge", "wrap")  # values beyond an axis's ends
CONSTANT, REFLECT = 0, 1
PADDED = 5  # axes
LARGEST = 3.4e38  # of float32


def _pads(x: Shape, attrs: Mapping[str, Any]) -> list[tuple[Affine, int, int]]:
    """(size, elements before, elements after) for each axis."""
    pads, mode, rank = attrs["pads"], attrs["mode"], len(x)
    if len(pads) != 2 * rank:
        raise ValueError(f"pads {pads} of {show(x)}: give one number before each axis, then one after each")
    found = [*zip(x, pads[:rank], pads[rank:])]
    for i, (size, p, q) in enumerate(found):
        if min(p, q) < 0:
            raise ValueError(f"pads {(p, q)} of axis {i} of {show(x)}: they must not be negative; use a slice to cut")
        if p + q == 0:
            continue
        if not size.constant:
            raise ValueError(f"axis {i} of {show(x)} is the batch, which cannot be padded")
        if mode == "reflect" and max(p, q) >= size.b:
            raise ValueError(f"pads {(p, q)} of axis {i} of {show(x)}: reflection needs numbers below its size")
        if mode != "constant" and not size.b:
            raise ValueError(f"axis {i} of {show(x)} has nothing to pad it with")
    return found


def pad_shape(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
    return {"y": tuple(n + (p + q) for n, p, q in _pads(shapes["x"], attrs))}


def pad_words(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """The leading two axes, three below them, and the rest below the last padded axis; unpadded neighbours are merged."""
    axes = _pads(shapes["x"], attrs)
    padded = [p + q > 0 for _, p, q in axes]
    leading = 2 if len(axes) > 2 else int(len(axes) == 2 or padded != [True])
    groups: list[tuple[Affine, int, int]] = []
    for axis in axes[leading:]:
        if groups and groups[-1][1:] == axis[1:] == (0, 0):
            groups[-1] = (groups[-1][0] * axis[0], 0, 0)
        else:
            groups.append(axis)
    n = groups.pop()[0] if groups and groups[-1][1:] == (0, 0) else ONE
    if len(groups) > PADDED - 2:
        raise ValueError(f"pads of {show(shapes['x'])}: more than {PADDED - 2} groups of axes below the leading two")
    one = [(ONE, 0, 0)]
    first = [*axes[:leading], *one * (2 - len(axes[:leading]))]
    words: dict[str, Any] = {"n": n, "mode": BEYOND.index(attrs["mode"]), "value": attrs["value"]}
    for k, axis in enumerate(first + one * (PADDED - 2 - len(groups)) + groups):
        words |= dict(zip((f"d{k}", f"p{k}", f"q{k}"), axis))
    return words


def _along(attrs: Mapping[str, Any], order: tuple[int, ...]) -> dict[str, Any]:
    """Pads of the axes in this storage order."""
    n, pads = len(order), attrs["pads"]
    if len(pads) != 2 * n:  # rejected elsewhere
        return dict(attrs)
    return {**attrs, "pads": tuple(pads[side + axis] for side in (0, n) for axis in order)}


LARGEST_PAD = 2**40
PAD = (
    *dims(" ".join(f"d{k}" for k in range(PADDED))),
    *(Word(name=f"{v}{k}", kind="int", lo=0, hi=LARGEST_PAD) for v in "pq" for k in range(PADDED)),
    *dims("n"),
    choice("mode", len(BEYOND)),
)
PAD_X = "*".join(f"d{k}" for k in range(PADDED)) + "*n"
PAD_Y = "*".join(f"(d{k} + p{k} + q{k})" for k in range(PADDED)) + "*n"
STAY = "p0 + q0 + p1 + q1 == 0"  # the leading two axes are not padded: workers read their own rows
PAD_REQUIRE = tuple(
    f"d{k} - 1 - (max(p{k}, q{k}) if mode == {REFLECT} else 0) if mode != {CONSTANT} and p{k} + q{k} > 0 else 0"
    for k in range(PADDED)
)
# The element of x for element o of the padded axis; it may be one beyond the ends.
SHOWN = (
    "{; i0[o0<d0 + p0 + q0] = where(mode == 0 or p0 + q0 == 0, o0 - p0, where(mode == 1, d0 - 1 - |d0 - 1 - |o0 - p0||, "
    "where(mode == 2, max(0, min(o0 - p0, d0 - 1)), (o0 - p0)%d0)))}; "
)
operator(
    name="pad",
    synopsis="y = x with elements before and after its axes",
    category="shape",
    inputs=("x",),
    attrs=(
        Attr(
            name="pads",
            check=lambda v: isinstance(v, tuple) and all(isinstance(n, int) for n in v),
            doc="elements before each axis, then after each",
        ),
        Attr(
            name="mode",
            default="constant",
            check=lambda v: v in BEYOND,
            doc="their values: constant, or x mirrored (reflect), its ends (edge), x again (wrap)",
        ),
        Attr(
            name="value",
            default=0.0,
            check=lambda v: isinstance(v, (int, float)) and abs(v) <= LARGEST,
            doc="the constant",
        ),
    ),
    shape=pad_shape,
    words=pad_words,
    anyhow=True,
    relaid=_along,
    fwd=(
        RowSpec(
            name="pad_fwd",
            synopsis=lambda: each(
                "01234",
                SHOWN + "inside[{j0<d0}] = 1; y[{o0},k<n] = where(inside[{i0[o0]}] == 1, x[{i0[o0]},k], value)",
            ),
            declares=lambda: each("01234", "x[{j0},k]"),
            words=(*PAD, Word(name="value", kind="float", lo=-LARGEST, hi=LARGEST)),
            operands=(R("x", PAD_X, f"d0*d1 if {STAY} else 0"), W("y", PAD_Y, "(d0 + p0 + q0)*(d1 + p1 + q1)")),
            require=PAD_REQUIRE,
        ),
    ),
    bwd=(
        RowSpec(
            name="pad_bwd",
            synopsis=lambda: each(
                "01234",
                SHOWN
                + "dx[{j0<d0},k<n] = where(mode == 0, dy[{j0 + p0},k], sum[{o0}] where({and i0[o0] == j0}, dy[{o0},k], 0))",
            ),
            words=PAD,
            operands=(R("dy", PAD_Y, f"(d0 + p0 + q0)*(d1 + p1 + q1) if {STAY} else 0"), W("dx", PAD_X, "d0*d1")),
            require=PAD_REQUIRE,
            flops=PAD_X,
        ),
    ),
    differentiable=("x",),
    onnx=("Pad",),
    examples=(
        Example(shapes=((None, 5),), attrs={"pads": (0, 2, 0, 1)}),
        Example(shapes=((None, 5),), attrs={"pads": (0, 0, 0, 0)}),
        Example(shapes=((None, 4, 3, 2),), attrs={"pads": (0, 1, 2, 0, 0, 2, 1, 0), "value": -1.5}),
        *(
            Example(shapes=((None, 4, 3, 2),), attrs={"pads": (0, 1, 2, 0, 0, 2, 1, 0), "mode": mode})
            for mode in BEYOND[1:]
        ),
        *(Example(shapes=((3, 4),), attrs={"pads": (2, 1, 1, 3), "mode": mode}) for mode in BEYOND),
        *(
            Example(shapes=((None, 2, 3, 2, 3),), attrs={"pads": (0, 1, 2, 1, 1, 0, 1, 0, 1, 2), "mode": mode}, batch=2)
            for mode in BEYOND
        ),
        Example(shapes=((2, 3),), attrs={"pads": (0, 7, 5, 8), "mode": "wrap"}),
        Example(shapes=((3,),), attrs={"pads": (2, 2), "mode": "reflect"}),
        Example(shapes=((None, 1, 3),), attrs={"pads": (0, 2, 0, 0, 1, 0), "mode": "edge"}),
        *(
            Example(
                shapes=((None, 56, 56, 64),),
                attrs={"pads": (0, 1, 1, 0, 0, 1, 1, 0), "mode": mode},
                batch=8,
                bench=True,
            )
            for mode in BEYOND
        ),
    ),
)


# ---------------------------------------------------------------- scaling
NEAREST, LINEAR = "nearest", "linear"
SPATIAL = 3
SMALLEST = 2**22  # a larger step is not an int64 for all sizes


def _sizes(x: Shape, attrs: Mapping[str, Any]) -> list[tuple[int, int, float]]:
    """(size, size in y, step in x of one in y) for each spatial axis, as in PyTorch."""
    sizes, scales = attrs["sizes"], attrs["scales"]
    if not 3 <= len(x) <= SPATIAL + 2:
        raise ValueError(f"upsample of {show(x)}: it needs 1 to {SPATIAL} spatial axes between batch and channels")
    if (sizes is None) == (scales is None):
        raise ValueError("upsample takes either sizes or scales")
    asked = scales if sizes is None else sizes
    if len(asked) != len(x) - 2:
        raise ValueError(f"upsample of {show(x)} to {asked}: give one number for each of {len(x) - 2} spatial axes")
    if attrs["align_corners"] and attrs["mode"] == NEAREST:
        raise ValueError("align_corners needs the mode linear: nearest has none")
    found = []
    for i, (size, n) in enumerate(zip(x[1:-1], asked)):
        if not size.constant:
            raise ValueError(f"spatial axis {i} of {show(x)} is the batch, which cannot be scaled")
        to = n if scales is None else floor(size.b * n)
        if size.b < 1 or to < 1 or size.b > SMALLEST * to:
            raise ValueError(f"upsample of {show(x)} to {asked}: spatial axis {i} of {size} would have {to}")
        if attrs["align_corners"]:
            step = (size.b - 1) / (to - 1) if to > 1 else 0.0
        elif size.b == to and attrs["mode"] == LINEAR:
            step = 1.0
        else:
            step = size.b / to if scales is None else 1 / n
        found.append((size.b, to, step))
    return found


def upsample_shape(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
    x = shapes["x"]
    return {"y": (x[0], *(affine(to) for _, to, _ in _sizes(x, attrs)), x[-1])}


def upsample_words(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """One spatial axis is H, two are H and W; workers then share N*H."""
    x, axes = shapes["x"], _sizes(shapes["x"], attrs)
    one = (1, 1, 1.0)
    axes = [one, *axes, one] if len(axes) == 1 else [one] * (SPATIAL - len(axes)) + axes
    words: dict[str, Any] = {"N": x[0], "C": x[-1], "mode": int(attrs["mode"] == LINEAR)}
    for axis, names in zip(axes, (("D", "E", "sd"), ("H", "F", "sh"), ("W", "G", "sw"))):
        words |= dict(zip(names, axis))
    return words | {"align": int(attrs["align_corners"])}


UPSAMPLE = (
    *dims("N D H W E F G C"),
    choice("mode", 2),
    choice("align", 2),
    *(Word(name=name, kind="float", lo=0, hi=SMALLEST) for name in ("sd", "sh", "sw")),
    WN,
)
UPSAMPLE_X, UPSAMPLE_Y = "N*D*H*W*C", "N*E*F*G*C"
UNITS = "N*{0} if D*E > 1 else N*{0}*{1}"  # workers share the first spatial axis that exists


def upsample_fwd_workspace(w: Any, on: On) -> tuple[Any, Any]:
    """A line of x; on a GPU nothing."""
    room = 0 if on.gpu or w.mode == 0 else w.W * w.C
    return room, room


def upsample_bwd_workspace(w: Any, on: On) -> tuple[Any, Any]:
    """A line of dy; on a GPU nothing."""
    room = 0 if on.gpu else w.G * w.C
    return room, room


# The weight of an element of x for an element of y, by their distance along the axis, placed as in PyTorch; it counts if above 0.
NEAR = (
    "at_{d}[{e}<{E}] = min(where(mode == 0, floor(float32({e}*s{d})), "
    "where(align == 1, {e}*s{d}, max(({e} + 0.5)*s{d} - 0.5, 0))), {D} - 1); near_{d}[{e},{d}<{D}] = 1 - |at_{d}[{e}] - {d}|; "
)
ALL_NEAR = "".join(NEAR.format(d=d, D=d.upper(), e=e, E=e.upper()) for d, e in ("de", "hf", "wg"))
BESIDE = " and ".join(f"at_{d}[{e}] - 1 < {d} and {d} < at_{d}[{e}] + 1" for d, e in ("de", "hf", "wg"))
WEIGHTED = f"where({BESIDE}, {{}}*near_d[e,d]*near_h[f,h]*near_w[g,w], 0)"
operator(
    name="upsample",
    synopsis="y = x with its spatial axes scaled",
    category="shape",
    inputs=("x",),
    attrs=(
        Attr(
            name="sizes",
            check=lambda v: v is None or (isinstance(v, tuple) and all(isinstance(n, int) for n in v)),
            doc="spatial sizes of y; None: those of x times `scales`, rounded down",
        ),
        Attr(
            name="scales",
            check=lambda v: (
                v is None
                or (isinstance(v, tuple) and all(isinstance(n, (int, float)) and 2**-20 <= n <= 2**20 for n in v))
            ),
            doc="factors of the spatial sizes",
        ),
        Attr(name="mode", default=NEAREST, check=lambda v: v in (NEAREST, LINEAR), doc="nearest or linear"),
        Attr(
            name="align_corners",
            default=False,
            check=lambda v: isinstance(v, bool),
            doc="for linear: aligns the first and last elements of x and y, instead of the ends of axes",
        ),
    ),
    shape=upsample_shape,
    words=upsample_words,
    fwd=(
        RowSpec(
            name="upsample_fwd",
            synopsis=f"{ALL_NEAR}y[n<N,e,f,g,c<C] = sum[d,h,w] {WEIGHTED.format('x[n,d,h,w,c]')}",
            words=UPSAMPLE,
            operands=(R("x", UPSAMPLE_X), W("y", UPSAMPLE_Y, UNITS.format("E", "F")), S("ws", "nw*wn")),
            require=("min(D, H, W) - 1",),
            workspace=upsample_fwd_workspace,
            flops=f"3*{UPSAMPLE_Y}*mode",
        ),
    ),
    bwd=(
        RowSpec(
            name="upsample_bwd",
            synopsis=f"{ALL_NEAR}dx[n<N,d,h,w,c<C] = sum[e,f,g] {WEIGHTED.format('dy[n,e,f,g,c]')}",
            words=UPSAMPLE,
            operands=(R("dy", UPSAMPLE_Y), W("dx", UPSAMPLE_X, UNITS.format("D", "H")), S("ws", "nw*wn")),
            require=("min(D, H, W) - 1",),
            workspace=upsample_bwd_workspace,
            flops=f"3*{UPSAMPLE_Y}",
        ),
    ),
    layouts={"x": LAST, "y": LAST},
    differentiable=("x",),
    onnx=("Resize", "Upsample"),
    examples=(
        Example(shapes=((None, 4, 3),), attrs={"scales": (2.0,)}),
        Example(shapes=((None, 4, 3, 2),), attrs={"scales": (2, 3)}),
        Example(shapes=((None, 5, 4, 17),), attrs={"sizes": (7, 3)}, batch=2),
        Example(shapes=((None, 2, 3, 2, 3),), attrs={"sizes": (3, 3, 5)}, batch=2),
        Example(shapes=((None, 5, 3),), attrs={"scales": (1.7,), "mode": "linear"}),
        *(
            Example(shapes=((None, *s),), attrs={"sizes": to, "mode": "linear", "align_corners": align}, batch=2)
            for s, to in (
                ((4, 3), (9,)),
                ((3, 4, 2), (6, 8)),
                ((5, 4, 17), (3, 9)),
                ((1, 3, 1), (2, 1)),
                ((2, 3, 2, 3), (3, 3, 5)),
            )
            for align in (False, True)
        ),
        Example(shapes=((None, 4, 5, 1),), attrs={"scales": (1.3, 0.6), "mode": "linear"}),
        *(
            Example(shapes=((None, 28, 28, 64),), attrs={"scales": (2, 2), "mode": mode}, batch=8, bench=True)
            for mode in (NEAREST, LINEAR)
        ),
    ),
)

"""Numbers in int8: inference in exact integers, the same bits on every processor.

A number is an int8 times a scale, which the rows do not see.  Sums are int32.  A sum becomes int8 again by a factor and a shift,
which ``scale`` packs into one int32: the bits below 15 are the factor, the five above them the shift, and

    y = clip(floor((floor(sum*factor/2^(16 + shift)) + 1)/2), lo, 127).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calcvm.ops.dims import ONE, Shape, affine, numel, show
from calcvm.ops.repetition import each
from calcvm.ops.spec import (
    LAST,
    ROWS_COLS,
    SIZE,
    Attr,
    Example,
    R,
    RowSpec,
    Shapes,
    W,
    Word,
    dims,
    operator,
    rows_cols,
)
from calcvm.ops.windows import (
    CEIL,
    DILATION,
    KERNEL,
    PADDING,
    SIZES,
    STRIDE,
    WINDOW,
    Y_ROWS,
    X,
    Y,
    out_shape,
    slid,
    words,
)

LEAST, MOST = -128, 127
SUMMANDS = (2**30 - 1) // LEAST**2  # products whose sum, with a bias of at most 2^30, fits int32
LO = Word(name="lo", kind="int", lo=LEAST, hi=MOST)


def _whole(least: int, most: int) -> Any:
    return lambda v: type(v) is int and least <= v <= most


AT_LEAST = Attr(name="lo", default=LEAST, check=_whole(LEAST, MOST), doc="the least result; 0: ReLU")
CATEGORY = "quantized"


def _rounded(total: str, shift: str) -> str:
    return f"max(lo, min({MOST}, floor((floor({total}/2^{shift}) + 1)/2)))"


# ---------------------------------------------------------------- products
GROUPS = dims("G F")  # channels are C in each of G groups, to F each
TAPS = "kd*kh*kw"
CONV_X, CONV_Y = "N*D*H*W*G*C", "N*OD*OH*OW*G*F"
CONV_ROW = RowSpec(
    name="conv_int8_fwd",
    synopsis=lambda: each(
        "dhw",
        "total[n<N,{od<OD},g<G,f<F] = sum[{td<kd},c<C] x[n, {od*sd + td*dd - pd}, g, c]*wt[g,f,{td},c] + b[g,f]; "
        "y[n,{od},g,f] = " + _rounded("total[n,{od},g,f]*(scale[g,f]%32768)", "(16 + scale[g,f]//32768%32)"),
    ),
    declares=lambda: each("dhw", "x[n,{d<D},g,c]"),
    words=(*SIZES, *WINDOW, *GROUPS, LO),
    operands=(
        R("x", CONV_X, type="int8"),
        R("wt", f"G*F*{TAPS}*C", type="int8"),
        R("b", "G*F", type="int32"),
        R("scale", "G*F", type="int32"),
        W("y", CONV_Y, Y_ROWS, type="int8"),
    ),
    require=(f"{SUMMANDS} - {TAPS}*C",),
    flops=f"2*{CONV_Y}*{TAPS}*C",
)


def _vectors(shapes: Shapes, channels: Any) -> None:
    for name in ("b", "scale"):
        if shapes[name] != (channels,):
            raise ValueError(f"{name} {show(shapes[name])} must have shape {show((channels,))}")


def linear_shape(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
    x, w = shapes["x"], shapes["wt"]
    if len(x) < 2 or len(w) != 2 or x[-1] != w[1] or not w[0].constant:
        raise ValueError(f"x {show(x)} and weights {show(w)}: the last size of x must be the last of the weights")
    _vectors(shapes, w[0])
    return {"y": (*x[:-1], w[0])}


def linear_words(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Any]:
    x, w = shapes["x"], shapes["wt"]
    image = (numel(x[:-1]), ONE, x[-1])
    return {**words(image, slid(image, (1,))), "G": 1, "F": w[0], "lo": attrs["lo"]}


def _axes(shapes: Shapes, attrs: Mapping[str, Any]) -> Any:
    x, w = shapes["x"], shapes["wt"]
    if len(w) != len(x) or not all(s.constant for s in w):
        raise ValueError(f"x {show(x)} and weights {show(w)}: they need output channels, a window, and input channels")
    window = tuple(s.b for s in w[1:-1])
    return slid(x, window, attrs["stride"], attrs["padding"], attrs["dilation"])


def conv_shape(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
    x, w, groups = shapes["x"], shapes["wt"], attrs["groups"]
    y = out_shape(x, _axes(shapes, attrs))
    if x[-1] != w[-1] * groups or w[0].b % groups:
        raise ValueError(f"x {show(x)} and weights {show(w)}: their channels do not fit groups={groups}")
    _vectors(shapes, w[0])
    return {"y": (*y[:-1], w[0])}


def conv_words(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Any]:
    x, w, groups = shapes["x"], shapes["wt"], attrs["groups"]
    sizes = words(x, _axes(shapes, attrs))
    return {**sizes, "C": w[-1], "G": groups, "F": affine(w[0].b // groups), "lo": attrs["lo"]}


DRAWN: dict[str, Any] = {"low": -120.0, "high": 120.0, "integer": {"scale": 8 << 15}}  # shifts of most sums
PRODUCT: dict[str, Any] = {
    "category": CATEGORY,
    "inputs": ("x", "wt", "b", "scale"),
    "fwd": (CONV_ROW,),
    "source": "Jacob et al., 2017: weights by output channel, symmetric",
}

operator(
    name="linear_int8",
    synopsis="y = clip((sum[k] x[m,k]*wt[n,k] + b[n])*scale[n], lo, 127), in integers",
    attrs=(AT_LEAST,),
    shape=linear_shape,
    words=linear_words,
    onnx=("QLinearMatMul",),
    examples=(
        Example(shapes=((None, 19), (7, 19), (7,), (7,)), **DRAWN),
        Example(
            shapes=((None, 3, 5), (33, 5), (33,), (33,)), attrs={"lo": 0}, **{**DRAWN, "integer": {"scale": 32 << 15}}
        ),
    ),
    **PRODUCT,
)
operator(
    name="conv_int8",
    synopsis="y[n,o,f] = clip((sum[k,c] x[n, o*S + k*L - P, c]*wt[f,k,c] + b[f])*scale[f], lo, 127), in integers",
    attrs=(
        STRIDE,
        PADDING,
        DILATION,
        Attr(name="groups", default=1, check=_whole(1, 2**31), doc="of channels, each convolved separately"),
        AT_LEAST,
    ),
    shape=conv_shape,
    words=conv_words,
    layouts={"x": LAST, "y": LAST},
    onnx=("QLinearConv",),
    examples=(
        Example(shapes=((None, 6, 7, 5), (9, 3, 3, 5), (9,), (9,)), attrs={"padding": (1, 1, 1, 1)}, batch=3, **DRAWN),
        Example(shapes=((None, 9, 8, 3), (17, 3, 2, 3), (17,), (17,)), attrs={"stride": (2, 2), "padding": (1, 0, 0, 1), "lo": 0}, batch=2, **DRAWN),
        Example(shapes=((None, 7, 9, 6), (10, 3, 3, 3), (10,), (10,)), attrs={"groups": 2, "dilation": (2, 1)}, batch=2, **DRAWN),
        Example(shapes=((None, 4, 3, 19), (19, 3, 3, 1), (19,), (19,)), attrs={"groups": 19, "padding": (1, 1, 1, 1)}, batch=2, **DRAWN),
        Example(shapes=((None, 40, 3), (7, 5, 3), (7,), (7,)), attrs={"stride": (3,), "dilation": (2,), "padding": (4, 2)}, **DRAWN),
        Example(shapes=((None, 4, 5, 3, 2), (5, 2, 3, 2, 2), (5,), (5,)), attrs={"padding": (1, 0, 1, 0, 2, 0)}, batch=2, **DRAWN),
    ),
    **PRODUCT,
)  # fmt: skip


# ---------------------------------------------------------------- windows, sums
def _slid(shapes: Shapes, attrs: Mapping[str, Any]) -> Any:
    stride = attrs["stride"] or attrs["kernel"]
    return slid(shapes["x"], attrs["kernel"], stride, attrs["padding"], attrs["dilation"], attrs["ceil_mode"])


operator(
    name="max_pool_int8",
    synopsis="y[o] = max of x over window o",
    category=CATEGORY,
    inputs=("x",),
    attrs=(KERNEL, STRIDE, PADDING, DILATION, CEIL),
    shape=lambda shapes, attrs: {"y": out_shape(shapes["x"], _slid(shapes, attrs))},
    words=lambda shapes, attrs: {**words(shapes["x"], _slid(shapes, attrs))},
    fwd=(
        RowSpec(
            name="max_pool_int8_fwd",
            synopsis=lambda: each("dhw", "y[n<N,{od<OD},c<C] = max[{td<kd}] x[n, {od*sd + td*dd - pd}, c; -128]"),
            declares=lambda: each("dhw", "x[n,{d<D},c]"),
            words=(*SIZES, *WINDOW),
            operands=(R("x", X, type="int8"), W("y", Y, Y_ROWS, type="int8")),
            flops=f"{Y}*{TAPS}",
        ),
    ),
    layouts={"x": LAST, "y": LAST},
    examples=(
        Example(shapes=((None, 6, 4, 3),), attrs={"kernel": (2, 2)}, low=-120.0, high=120.0),
        Example(shapes=((None, 7, 5, 2),), attrs={"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1, 1, 1)}, low=-120.0, high=120.0),
        Example(shapes=((None, 9, 2),), attrs={"kernel": (3,), "stride": (2,), "padding": (1, 0), "ceil_mode": True}, low=-120.0, high=120.0),
    ),
    source="Goodfellow et al., Deep Learning, 9.3",
)  # fmt: skip


def _same(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
    a, b = shapes["a"], shapes["b"]
    if a != b:
        raise ValueError(f"a {show(a)} and b {show(b)} must have one shape")
    return {"y": a}


FACTORS = tuple(Word(name=n, kind="int", lo=0, hi=2**22) for n in ("factor_a", "factor_b"))
operator(
    name="add_int8",
    synopsis="y = clip(a*factor_a + b*factor_b over 2^(shift + 1), lo, 127), in integers",
    category=CATEGORY,
    inputs=("a", "b"),
    attrs=(
        *(Attr(name=w.name, check=_whole(0, 2**22), doc="an integer up to 2^22") for w in FACTORS),
        Attr(name="shift", check=_whole(0, 30), doc="one bit less than the sum is shifted by"),
        AT_LEAST,
    ),
    shape=_same,
    words=lambda shapes, attrs: {**rows_cols(shapes["a"]), **{k: attrs[k] for k in ("factor_a", "factor_b", "shift", "lo")}},
    fwd=(
        RowSpec(
            name="add_int8_fwd",
            synopsis="y[r<rows,c<cols] = " + _rounded("(a[r,c]*factor_a + b[r,c]*factor_b)", "shift"),
            words=(*ROWS_COLS, *FACTORS, Word(name="shift", kind="int", lo=0, hi=30), LO),
            operands=(R("a", SIZE, "rows", type="int8"), R("b", SIZE, "rows", type="int8"), W("y", SIZE, "rows", type="int8")),
            flops=f"5*{SIZE}",
        ),
    ),
    anyhow=True,
    examples=(
        Example(shapes=((None, 19), (None, 19)), attrs={"factor_a": 700, "factor_b": 300, "shift": 10}, low=-120.0, high=120.0),
        Example(shapes=((None, 4, 3), (None, 4, 3)), attrs={"factor_a": 1, "factor_b": 3, "shift": 0, "lo": 0}, low=-120.0, high=120.0),
    ),
    source="Jacob et al., 2017",
)  # fmt: skip

"""Pooling: reduces each window to one number per channel."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from calcvm.ops.dims import Shape
from calcvm.ops.reduction import sum_words
from calcvm.ops.repetition import each
from calcvm.ops.spec import (
    LAST,
    OPS,
    Attr,
    Example,
    OpSpec,
    R,
    RowSpec,
    Shapes,
    W,
    Word,
    choice,
    operator,
)
from calcvm.ops.windows import (
    AFTER,
    CEIL,
    DILATION,
    KERNEL,
    OUT,
    PADDING,
    SIZES,
    STRIDE,
    WINDOW,
    X_ROWS,
    Y_ROWS,
    Axis,
    X,
    Y,
    adapted,
    out_shape,
    slid,
    words,
)

TAPS = 256  # taps of a window whose place max_pool can save
TAPS_OF = "kd*kh*kw"
POWER = Word(name="power", kind="float", lo=0, hi=1e300)
Attrs = Mapping[str, Any]
Rule = Callable[[Shapes, Attrs], tuple[Axis, ...]]


def _slid(shapes: Shapes, attrs: Attrs) -> tuple[Axis, ...]:
    """The axes of x; the stride defaults to the window's size."""
    stride = attrs["stride"] or attrs["kernel"]
    padding, dilation = attrs.get("padding"), attrs.get("dilation")
    return slid(shapes["x"], attrs["kernel"], stride, padding, dilation, attrs["ceil_mode"])


def _slid_max(shapes: Shapes, attrs: Attrs) -> tuple[Axis, ...]:
    if math.prod(attrs["kernel"]) > TAPS:
        raise ValueError(f"a window {attrs['kernel']} has more than {TAPS} elements: pool in several steps")
    return _slid(shapes, attrs)


def _adapted(shapes: Shapes, attrs: Attrs) -> tuple[Axis, ...]:
    return adapted(shapes["x"], attrs["sizes"])


def _pooling(
    name: str, axes: Rule, more: Callable[[Attrs], Mapping[str, Any]] = lambda attrs: {}, made: str = "", **spec: Any
) -> OpSpec:
    """An operator of windows.  more : further words.  made : a further result of the output's shape."""

    def shape(shapes: Shapes, attrs: Attrs) -> dict[str, Shape]:
        y = out_shape(shapes["x"], axes(shapes, attrs))
        return {"y": y, made: y} if made else {"y": y}

    return operator(
        name=name,
        category="pooling",
        inputs=("x",),
        shape=shape,
        words=lambda shapes, attrs: {**words(shapes["x"], axes(shapes, attrs)), **more(attrs)},
        differentiable=("x",),
        layouts=dict.fromkeys(("x", "y", *spec.get("saved", ())), LAST),
        **spec,
    )


DX = W("dx", X, X_ROWS)
# How many taps of a window are elements of x: tap (td,th,tw) of window (od,oh,ow) is x[n, {od*sd + td*dd - pd}, c].
COUNT = "{* (min(kd, (D - 1 + pd - od*sd)//dd + 1) - max(0, (pd - od*sd + dd - 1)//dd))}"
# Adaptive windows: their elements, from floor(od*D/OD) to ceil((od + 1)*D/OD), and taps along an axis, as kernels number them.
HAS = "has[{od<OD},{d<D}] = {and od*D < (d + 1)*OD and d*OD < (od + 1)*D}; "
HAS_COUNT = HAS + "count[{od}] = {* (((od + 1)*D + OD - 1)//OD - od*D//OD)}; "
TAPS_ALONG = "where(D%OD == 0, D//OD, D//OD + 2)"


def _equation(synopsis: str, declares: str = "") -> Mapping[str, Any]:
    """A row's synopsis and declarations, over the three axes."""
    return {"synopsis": lambda: each("dhw", synopsis), "declares": lambda: each("dhw", declares)}


def _example(*shape: int | None, batch: int = 3, bench: bool = False, **attrs: Any) -> Example:
    return Example(shapes=(shape,), attrs=attrs, batch=batch, bench=bench)


WINDOWS = (
    _example(None, 6, 4, 3, kernel=(2, 2)),
    _example(None, 7, 5, 2, kernel=(3, 3), stride=(2, 2), padding=(1, 1, 1, 1)),
    _example(None, 5, 6, 19, kernel=(3, 3), stride=(1, 1), padding=(1, 1, 1, 1), batch=2),
    _example(None, 9, 2, kernel=(3,), stride=(2,), padding=(1, 0), ceil_mode=True),
    _example(None, 11, 3, kernel=(4,), stride=(1,)),
    _example(None, 3, 4, 5, 2, kernel=(2, 2, 3), stride=(1, 2, 2), padding=(0, 1, 1, 1, 0, 1), batch=2),
    _example(2, 7, 4, 17, kernel=(3, 2), stride=(2, 1), padding=(1, 0, 1, 1), ceil_mode=True),
    _example(1, 8, 9, 1, kernel=(2, 3), stride=(3, 2), ceil_mode=True),
    _example(None, 2, 5, 3, kernel=(3, 3), stride=(2, 2), ceil_mode=True),
    _example(None, 1, 1, 4, kernel=(1, 1)),
)
FAST = (
    _example(None, 28, 28, 16, batch=32, bench=True, kernel=(2, 2)),
    _example(None, 56, 56, 64, batch=8, bench=True, kernel=(3, 3), stride=(2, 2), padding=(1, 1, 1, 1)),
)
ADAPTED = (
    _example(None, 7, 5, 3, sizes=(3, 2)),
    _example(None, 6, 4, 2, sizes=(3, 2)),
    _example(None, 6, 3, 17, sizes=(4, 1), batch=2),
    _example(None, 7, 2, sizes=(3,)),
    _example(None, 2, 3, 2, sizes=(5, 3)),
    _example(2, 3, 4, 5, 1, sizes=(2, 4, 3)),
    _example(None, 28, 28, 16, batch=32, bench=True, sizes=(7, 7)),
)


# ---------------------------------------------------------------- the largest
def _max(
    name: str,
    index: str,
    of: tuple[Word, ...],
    flops: str,
    forward: Mapping[str, Any],
    backward: Mapping[str, Any],
    require: tuple[str, ...] = (),
    **spec: Any,
) -> None:
    _pooling(
        name,
        synopsis="y[o] = max of x over window o (NaN if any is)",
        saved=("index",),
        made="index",
        fwd=(
            RowSpec(
                name=f"{name}_fwd",
                **forward,
                words=(*SIZES, *of),
                operands=(
                    R("x", X),
                    W("y", Y, Y_ROWS),
                    W("index", Y, Y_ROWS, type=index, optional=True),
                ),
                require=require,
                flops=flops,
            ),
        ),
        bwd=(
            RowSpec(
                name=f"{name}_bwd",
                **backward,
                words=(*SIZES, *of),
                operands=(R("dy", Y), R("index", Y, type=index), DX),
                require=require,
                flops=f"2*{X}",
            ),
        ),
        **spec,
    )


_max(
    "max_pool",
    "uint8",
    WINDOW,
    f"{Y}*{TAPS_OF}",
    _equation(  # kernels take the first element if a whole window is -inf; the equation takes it for padding
        "y[n<N,{od<OD},c<C] = max[{td<kd}] x[n, {od*sd + td*dd - pd}, c; -inf]; "
        "index[n,{od},c] = argmax[{td}] x[n, {od*sd + td*dd - pd}, c; -inf]",
        "x[n,{d<D},c]",
    ),
    _equation(
        "dx[n<N,{d<D},c<C] = sum[{td<kd}] where(index[n, {(d + pd - td*dd)/sd}, c; -1] == (td*kh + th)*kw + tw, "
        "dy[n, {(d + pd - td*dd)/sd}, c], 0)",
        "index[n,{od<OD},c]; dy[n,{od},c]",
    ),
    (f"{TAPS} - {TAPS_OF}",),
    axes=_slid_max,
    attrs=(KERNEL, STRIDE, PADDING, DILATION, CEIL),
    onnx=("MaxPool",),
    examples=(
        *WINDOWS,
        _example(None, 9, 8, 2, kernel=(2, 3), dilation=(3, 2), padding=(2, 1, 1, 2)),
        _example(None, 10, 18, kernel=(3,), stride=(4,), dilation=(2,), batch=2),
        _example(None, 12, 5, kernel=(3,), stride=(1,), dilation=(2,), padding=(2, 2)),
        *FAST,
    ),
    source="the first of equals gets the gradient, as in PyTorch; padding is not an element",
)
_max(
    "adaptive_max_pool",
    "int32",
    (),
    f"{X} + {Y}",
    _equation(
        HAS + "y[n<N,{od},c<C] = max[{d}] where(has[{od},{d}], x[n,{d},c], -inf); "
        "index[n,{od},c] = argmax[{td<" + TAPS_ALONG + "}] "
        "where(has[{od}, {od*D//OD + td}], x[n, {od*D//OD + td}, c], -inf)",
    ),
    _equation(
        f"kh = {TAPS_ALONG.replace('D', 'H')}; kw = {TAPS_ALONG.replace('D', 'W')}; "
        "dx[n<N,{d<D},c<C] = sum[{od<OD}] where(od*D//OD + index[n,{od},c]//(kh*kw) == d "
        "and oh*H//OH + index[n,{od},c]//kw%kh == h and ow*W//OW + index[n,{od},c]%kw == w, dy[n,{od},c], 0)",
    ),
    axes=_adapted,
    attrs=(OUT,),
    examples=ADAPTED,
    source="torch.nn.AdaptiveMaxPool2d: window o is from floor(o*size/out) to ceil((o + 1)*size/out)",
)


# ---------------------------------------------------------------- the mean
def _avg(
    name: str, of: tuple[Word, ...], flops: str, forward: Mapping[str, Any], backward: Mapping[str, Any], **spec: Any
) -> None:
    _pooling(
        name,
        synopsis="y[o] = mean of x over window o",
        fwd=(
            RowSpec(
                name=f"{name}_fwd",
                **forward,
                words=(*SIZES, *of),
                operands=(R("x", X), W("y", Y, Y_ROWS)),
                flops=flops,
            ),
        ),
        bwd=(
            RowSpec(
                name=f"{name}_bwd",
                **backward,
                words=(*SIZES, *of),
                operands=(R("dy", Y), DX),
                flops=f"2*{X}",
            ),
        ),
        **spec,
    )


COUNTED = f"count[{{od<OD}}] = where(padded == 1, {{* min(kd, D + pd + qd - od*sd)}}, {COUNT}); "
_avg(
    "avg_pool",
    (*WINDOW, *AFTER, choice("padded", 2)),
    f"{Y}*{TAPS_OF}",
    _equation(
        COUNTED + "y[n<N,{od},c<C] = sum[{td<kd}] x[n, {od*sd + td*dd - pd}, c]/count[{od}]",
        "x[n,{d<D},c]",
    ),
    _equation(
        COUNTED + "share[n<N,{od},c<C] = dy[n,{od},c]/count[{od}]; "
        "dx[n,{d<D},c] = sum[{td<kd}] share[n, {(d + pd - td*dd)/sd}, c]",
    ),
    axes=_slid,
    more=lambda attrs: {"padded": int(attrs["count_include_pad"])},
    attrs=(
        KERNEL,
        STRIDE,
        PADDING,
        CEIL,
        Attr(
            name="count_include_pad",
            default=True,
            check=lambda v: isinstance(v, bool),
            doc="whether padding zeros are counted; places added by ceil_mode never are",
        ),
    ),
    onnx=("AveragePool",),
    examples=(
        *WINDOWS,
        *(
            Example(shapes=e.shapes, attrs={**e.attrs, "count_include_pad": False}, batch=e.batch)
            for e in WINDOWS
            if "padding" in e.attrs
        ),
        *FAST,
    ),
    source="torch.nn.AvgPool2d",
)
_avg(
    "adaptive_avg_pool",
    (),
    f"{X} + {Y}",
    _equation(HAS_COUNT + "y[n<N,{od},c<C] = sum[{d}] where(has[{od},{d}], x[n,{d},c]/count[{od}], 0)"),
    _equation(HAS_COUNT + "dx[n<N,{d},c<C] = sum[{od}] where(has[{od},{d}], dy[n,{od},c]/count[{od}], 0)"),
    axes=_adapted,
    attrs=(OUT,),
    examples=ADAPTED,
    source="torch.nn.AdaptiveAvgPool2d: window o is from floor(o*size/out) to ceil((o + 1)*size/out)",
)


# ---------------------------------------------------------------- the norm
_POWERS = (*SIZES, *WINDOW, POWER)
PRESENT = f"count[{{od<OD}}] = {COUNT}; "
_pooling(
    "lp_pool",
    _slid,
    more=lambda attrs: {"power": float(attrs["p"])},
    made="t_g",
    synopsis="y[o] = (sum of x^p over window o)^(1/p)",
    attrs=(
        Attr(
            name="p",
            default=2.0,
            check=lambda v: type(v) in (int, float) and 0 < v < math.inf,
            doc="the power, > 0; 1 gives sums",
        ),
        KERNEL,
        STRIDE,
        CEIL,
    ),
    fwd=(
        RowSpec(
            name="lp_pool_fwd",
            **_equation(
                PRESENT
                + "y[n<N,{od},c<C] = (kd*kh*kw/count[{od}]*sum[{td<kd}] x[n, {od*sd + td*dd - pd}, c]^power)^(1/power)",
                "x[n,{d<D},c]",
            ),
            words=_POWERS,
            operands=(R("x", X), W("y", Y, Y_ROWS)),
            flops=f"2*{Y}*{TAPS_OF}",
        ),
    ),
    bwd=(
        RowSpec(
            name="lp_pool_bwd_y",
            **_equation(
                PRESENT + "t_g[n<N,{od},c<C] = where(y[n,{od},c] == 0, 0, "
                "kd*kh*kw/count[{od}]*dy[n,{od},c]*y[n,{od},c]^(1 - power))"
            ),
            words=_POWERS,
            operands=(R("dy", Y, Y_ROWS), R("y", Y, Y_ROWS), W("t_g", Y, Y_ROWS)),
            in_place=(("t_g", "dy"), ("t_g", "y")),
            flops=f"3*{Y}",
        ),
        RowSpec(
            name="lp_pool_bwd",
            **_equation(
                "dx[n<N,{d<D},c<C] = x[n,{d},c]^(power - 1)*sum[{td<kd}] t_g[n, {(d + pd - td*dd)/sd}, c]",
                "t_g[n,{od<OD},c]",
            ),
            words=_POWERS,
            operands=(R("t_g", Y), R("x", X, X_ROWS), DX),
            flops=f"3*{X}",
        ),
    ),
    onnx=("LpPool",),
    examples=(
        *(Example(shapes=e.shapes, attrs=e.attrs, batch=e.batch, low=0.1) for e in WINDOWS if "padding" not in e.attrs),
        *(
            Example(shapes=((None, 7, 5, 3),), attrs={"p": p, "kernel": (3, 2), "stride": (2, 1)}, batch=2, low=0.1)
            for p in (1.0, 3.0, 2.5)
        ),
        Example(shapes=((None, 5, 17),), attrs={"p": 2.0, "kernel": (2,)}),
        FAST[0],
    ),
    source="torch.nn.LPPool2d: powers of x itself, not of its absolute value; a window that leaves the image counts as a whole one",
)


# ---------------------------------------------------------------- global pooling
def _whole(shapes: Shapes, attrs: Attrs) -> tuple[Axis, ...]:
    return adapted(shapes["x"], (1,) * (len(shapes["x"]) - 2))


def _but_channels(shapes: Shapes) -> Attrs:
    return {"axes": (*range(1, len(shapes["x"]) - 1),), "keepdims": True}


WHOLE = (
    _example(None, 4, 3, 5),
    _example(None, 7, 2),
    _example(2, 2, 3, 2, 17),
    _example(None, 1, 1, 3),
    _example(None, 9, 8, 17, batch=2),
    _example(None, 7, 7, 64, batch=32, bench=True),
)
_pooling(
    "global_max_pool",
    _whole,
    made="index",
    saved=("index",),
    synopsis="y = max of x over the spatial axes (NaN if any is)",
    fwd=OPS["adaptive_max_pool"].fwd,
    bwd=OPS["adaptive_max_pool"].bwd,
    onnx=("GlobalMaxPool",),
    examples=WHOLE,
    source="the rows of adaptive_max_pool",
)
operator(
    name="global_avg_pool",
    synopsis="y = mean of x over the spatial axes",
    category="pooling",
    inputs=("x",),
    shape=lambda shapes, attrs: {"y": out_shape(shapes["x"], _whole(shapes, attrs))},
    words=lambda shapes, attrs: sum_words(shapes, _but_channels(shapes)),
    fwd=OPS["mean"].fwd,
    bwd=OPS["mean"].bwd,
    differentiable=("x",),
    layouts={"x": LAST, "y": LAST},
    onnx=("GlobalAveragePool",),
    examples=WHOLE,
    source="the rows of mean",
)

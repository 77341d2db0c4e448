"""Convolution of images, volumes and signals, stored channels-last, with weights stored window first.

Rows have three spatial axes; missing ones come first, with size 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from calcvm.ops.contraction import PARTIAL_SUMS, WORKSPACE, Room, partial_over
from calcvm.ops.dims import ONE, Affine, Shape, numel, show
from calcvm.ops.epilogues import ALL, BACKWARD, operands_of, words_of
from calcvm.ops.repetition import each
from calcvm.ops.sizes import On
from calcvm.ops.spec import (
    ACC,
    LAST,
    PHASES,
    WINDOW,
    WN,
    A,
    Attr,
    Example,
    Operand,
    R,
    RowSpec,
    Shapes,
    W,
    Word,
    dims,
    joined,
    operator,
)

AXES = range(3)
LEAST = {"K": 1, "S": 1, "L": 1, "P": 0}  # window, stride, dilation, padding before


def _each(*letters: str) -> tuple[Word, ...]:
    return tuple(Word(name=f"{v}{i}", kind="int", lo=LEAST[v], hi=2**31) for v in letters for i in AXES)


# rows x inner places of the result, in_rows x in_inner of the input; G groups of C channels each, to F each
WORDS = (*dims("rows inner in_rows in_inner N I0 I1 I2 O0 O1 O2 G C F"), *_each("K", "S", "P", "L"))
X, Y = "in_rows*in_inner*G*C", "rows*inner*G*F"
TAPS = "K0*K1*K2"
WT = f"{TAPS}*C*G*F"
SAME = tuple(
    text
    for one, all_ in (("rows*inner", "N*O0*O1*O2"), ("in_rows*in_inner", "N*I0*I1*I2"))
    for text in (f"{one} - {all_}", f"{all_} - {one}")
)
SMALL = tuple(f"{2**31 - 1} - {v}" for v in ("N", "C", "F", *(f"{v}{i}" for v in "IO" for i in AXES)))  # int32 on GPUs
FLOPS = f"2*{Y}*{TAPS}*C"


# ---------------------------------------------------------------- workspace of a worker on a CPU: (minimum, best for speed)
ROWS, COLUMNS = 2048, 64  # of a packed panel
PIXELS = 240  # of a block
PLANES, ENTRIES = 1 << 15, 4096  # cells of planes and of columns, most taps
CHAIN = 512  # cells in a column of taps
FEW = 16  # from so many channels on, a tap is a separate product
NEAR = 8  # the longest stride of rows that are copied


def near(w: Any) -> Any:
    """Whether rows of the input may be copied with their padding, so that taps along them are contiguous."""
    return w.G == 1 and w.K2 > 1 and w.S2 <= NEAR and w.L2 == 1


def lanewise(w: Any) -> Any:
    """Whether each channel has its own window."""
    return w.G > 1 and w.C == 1 and w.F == 1


def _rows(taps: Any, depth: Any) -> Any:
    """The rows of a packed panel, which holds whole taps of ``depth`` channels."""
    return depth * min(taps, max(1, ROWS // max(depth, 1)))


def _copied(w: Any) -> Any:
    """The cells for copied rows of the input."""
    return w.K0 * w.K1 * ((PIXELS // 2 - 1) * w.S2 + w.K2) * w.C


def fwd_workspace(w: Any, on: On) -> Room:
    if on.plain:
        return 0, 0
    if lanewise(w):
        return w.G, w.G
    least = w.C + (_copied(w) if near(w) and w.C < FEW else 0)
    return least, least + (_rows(w.K0 * w.K1 * w.K2, w.C) * COLUMNS if w.F > COLUMNS else 0)


def _planes(w: Any) -> int:
    """The cells for the gradient of an input with few channels, computed in planes; 0 if it is not."""
    one = w.G * w.I0 * w.O0 * w.K0 * w.S0 * w.S1 * w.S2 == 1 and w.C < FEW and w.in_inner == w.I2
    more1, more2 = (w.K1 - 1) * w.L1, (w.K2 - 1) * w.L2
    if not one or w.K1 * w.K2 > ENTRIES or more1 > 64 or more2 > 64:
        return 0
    pitch = w.I2 + more2
    rows = (PLANES // max(w.F, 1) - 16) // pitch - more1
    return w.F * ((rows + more1) * pitch + 16) + w.C * rows * pitch + w.I2 * FEW + 16 if rows > 0 else 0


def _columns(w: Any) -> int:
    """The cells for the gradient computed from columns, with the weights transposed; 0 if it is not."""
    one = w.G * w.I0 * w.O0 * w.K0 * w.S0 * w.L2 == 1 and w.K1 * w.K2 > 1 and w.S1 <= NEAR and w.S2 <= NEAR
    n = w.K1 * w.K2 * w.C
    if not one or w.in_inner != w.I2 or n * 24 > PLANES or n * w.F > 2 * PLANES:
        return 0
    lanes = (w.C + 15) // 16 * 16
    if 4 * w.I1 * w.I2 * lanes * w.F <= 5 * w.S1 * w.S2 * w.O1 * w.O2 * w.C * (w.F + 16):
        return 0
    return PLANES + (n + COLUMNS - 1) // COLUMNS * COLUMNS * w.F


def bwd_x_workspace(w: Any, on: On) -> Room:
    if on.plain:
        return 0, 0
    if cells := _planes(w) or _columns(w):
        return cells, cells
    taps = w.K0 * w.K1 * w.K2
    n = w.G + _rows(taps, 1) * w.G if lanewise(w) else w.F + _rows(taps, w.F) * COLUMNS
    return n, n


def bwd_w_workspace(w: Any, on: On) -> Room:
    if on.plain:
        return partial_over(w.rows * w.inner, (w.K0 * w.K1 * w.K2 * w.C + 1) * w.G * w.F, on)
    if lanewise(w):
        return w.G, w.G
    n = w.C + PIXELS * COLUMNS
    depth, taps = max(w.K2 * w.C, 1), w.K0 * w.K1
    rows = taps * depth
    turned = 10 * ((rows + 15) // 16) * w.F < 9 * ((w.F + 15) // 16) * rows
    if near(w) and (w.C < FEW or (rows <= CHAIN and turned)):
        column, found = max(min(taps, CHAIN // depth), 1) * depth, rows * w.F if turned else 0
        n = _copied(w) + max(min(PIXELS, PLANES // column), 24) * column + FEW + found
    return n, n


def transpose_bwd_w_workspace(w: Any, on: On) -> Room:
    least, wanted = bwd_w_workspace(w, on)
    return least, wanted + (partial_over(w.in_rows * w.in_inner, w.G * w.C, on)[1] if on.gpu else 0)


# ---------------------------------------------------------------- shapes
def _three(v: Any, n: int) -> tuple[Any, ...]:
    """A size or setting per axis, extended to three axes; missing ones get 1."""
    return (ONE if isinstance(v[0], Affine) else 1,) * (3 - n) + (*v,)


def settings(attrs: Mapping[str, Any], n: int) -> dict[str, tuple[int, ...]]:
    """Attributes of n spatial axes, with their defaults."""
    pads = attrs.get("padding") or (0,) * (2 * n)
    return {
        "stride": attrs.get("stride") or (1,) * n,
        "dilation": attrs.get("dilation") or (1,) * n,
        "before": pads[:n],
        "after": pads[n:],
        "output_padding": attrs.get("output_padding") or (0,) * n,
    }


def _checked(x: Shape, w: Shape, attrs: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The settings of a window over x, with as many axes."""
    n = len(x) - 2
    if n not in (1, 2, 3):
        raise ValueError(f"x {show(x)} has {len(x)} axes: it needs a batch, 1 to 3 spatial axes and channels")
    if len(w) != n + 2 or not all(s.constant for s in w):
        raise ValueError(f"weights {show(w)} of x {show(x)}: they need a window of {n} axes, input and output channels")
    of = settings(attrs, n)
    for name, values in of.items():
        if len(values) != n:
            what = "padding" if name in ("before", "after") else name
            raise ValueError(f"{what} {attrs[what]} does not match the {n} spatial axes of x {show(x)}")
    if not all(s.constant for s in x[1:]):
        raise ValueError(f"x {show(x)}: the first axis must be the batch, and spatial sizes numbers")
    return of


def _dilated(of: Mapping[str, tuple[int, ...]]) -> str:
    return f", dilated by {of['dilation']}," if max(of["dilation"]) > 1 else ""


def conv_shape(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
    x, w, b, groups = shapes["x"], shapes["wt"], shapes["b"], attrs.get("groups", 1)
    n, of = len(x) - 2, _checked(x, w, attrs)
    if x[-1] != w[-2] * groups:
        raise ValueError(f"x {show(x)} has {x[-1]} channels, weights {show(w)} take {w[-2]} in each of groups={groups}")
    if w[-1].b % groups:
        raise ValueError(f"{w[-1]} output channels of weights {show(w)} are not divisible by groups={groups}")
    if b is not None and b != (w[-1],):
        raise ValueError(f"bias {show(b)} must have shape {show((w[-1],))}")
    sizes = []
    for i in range(n):
        padded = x[1 + i] + of["before"][i] + of["after"][i]
        window = (w[i].b - 1) * of["dilation"][i] + 1
        if window > padded.b or w[i].b < 1:
            raise ValueError(
                f"the window {show(w[:n])} of weights{_dilated(of)} is larger than x {show(x)} with its padding"
            )
        sizes.append(Affine(0, (padded.b - window) // of["stride"][i] + 1))
    return {"y": (x[0], *sizes, w[-1])}


def conv_transpose_shape(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
    x, w, b, groups = shapes["x"], shapes["wt"], shapes["b"], attrs.get("groups", 1)
    n, of = len(x) - 2, _checked(x, w, attrs)
    if x[-1] != w[-1] or w[-1].b % groups:
        raise ValueError(f"x {show(x)} has {x[-1]} channels, weights {show(w)} take {w[-1]}, in groups={groups}")
    channels = w[-2] * groups
    if b is not None and b != (channels,):
        raise ValueError(f"bias {show(b)} must have shape {show((channels,))}")
    sizes = []
    for i in range(n):
        stride, dilation, more = of["stride"][i], of["dilation"][i], of["output_padding"][i]
        if more >= max(stride, dilation):
            raise ValueError(f"output_padding {of['output_padding']} of x {show(x)} is not below stride or dilation")
        size = (x[1 + i].b - 1) * stride + (w[i].b - 1) * dilation + 1 + more - of["before"][i] - of["after"][i]
        if size < 1 or x[1 + i].b < 1 or w[i].b < 1:
            raise ValueError(
                f"x {show(x)} and weights {show(w)}: nothing is left of a spatial axis without its padding"
            )
        sizes.append(Affine(0, size))
    return {"y": (x[0], *sizes, channels)}


def conv_words(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Any]:
    x, w, y, groups = shapes["x"], shapes["wt"], shapes["y"], attrs.get("groups", 1)
    n = len(x) - 2
    of = settings(attrs, n)
    words = {"N": x[0], "G": groups, "C": w[-2], "F": w[-1].b // groups}
    for prefix, shape in (("", y), ("in_", x)):
        rows = joined(shape)
        words |= {f"{prefix}rows": rows[0], f"{prefix}inner": numel(rows[1:-1])}
    for letter, sizes in (("I", x[1:-1]), ("O", y[1:-1]), ("K", w[:n]), ("S", of["stride"]), ("L", of["dilation"])):
        words |= {f"{letter}{i}": size for i, size in enumerate(_three(sizes, n))}
    words |= {f"P{i}": size for i, size in enumerate((0,) * (3 - n) + of["before"])}
    return {k: v.b if k[0] == "K" and isinstance(v, Affine) else v for k, v in words.items()}


def conv_transpose_words(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """The words of the convolution from y to x."""
    return conv_words({"x": shapes["y"], "wt": shapes["wt"], "y": shapes["x"]}, attrs)


# ---------------------------------------------------------------- rows
def _row(
    name: str,
    synopsis: str,
    declares: str,
    *operands: Operand,
    workspace: Callable[[Any, On], Room],
    takes: tuple[str, ...] = (),
    columns: str = "",
) -> RowSpec:
    """A row of any pass.  The weights' gradient adds to its result and has phases on GPUs; the others take epilogues."""
    result = operands[-1]
    sums = result.access == "a"
    return RowSpec(
        name=name,
        synopsis=lambda: each("012", synopsis),
        declares=lambda: each("012", declares),
        words=(PHASES, *WORDS, ACC, WN) if sums else (*WORDS, *words_of(takes), WN),
        operands=(*operands, *operands_of(takes, result.elems, result.part, columns), WORKSPACE),
        require=(*SAME, *SMALL),
        takes=takes,
        workspace=workspace,
        phases=PARTIAL_SUMS if sums else "1",
        flops=FLOPS,
    )


FILTERS = R("wt", WT)
CONV_FWD = _row(
    "conv_fwd",
    "y[n<N,{o0<O0},g<G,f<F] = act((sum[{k0<K0},c<C] x[n, {o0*S0 + k0*L0 - P0}, g, c]*wt[{k0},c,g,f] + b[g,f] - mean[g,f])"
    "*factor[g,f] + offset[g,f] + other[n,{o0},g,f])",
    "x[n,{i0<I0},g,c]; b[g,f] = 0; mean[g,f] = 0; factor[g,f] = 1; offset[g,f] = 0; other[n,{o0},g,f] = 0",
    *(R("x", X), FILTERS, R("b", "G*F", optional=True), W("y", Y, "rows")),
    workspace=fwd_workspace,
    takes=ALL,
    columns="G*F",
)
CONV_BWD_W = _row(
    "conv_bwd_w",
    "dwt[{k0<K0},c<C,g<G,f<F] = sum[n<N,{o0<O0}] x[n, {o0*S0 + k0*L0 - P0}, g, c]*dy[n,{o0},g,f]; "
    "db[g,f] = sum[n,{o0}] dy[n,{o0},g,f]",
    "x[n,{i0<I0},g,c]",
    *(R("x", X), R("dy", Y), A("dwt", WT, f"{TAPS}*C"), A("db", "G*F", "G*F", optional=True)),
    workspace=bwd_w_workspace,
)
CONV_BWD_X = _row(
    "conv_bwd_x",
    "dx[n<N,{i0<I0},g<G,c<C] = dact(ya[n,{i0},g,c])"
    "*(sum[{k0<K0},f<F] dy[n, {(i0 + P0 - k0*L0)/S0}, g, f]*wt[{k0},c,g,f] + other[n,{i0},g,c])",
    "dy[n,{o0<O0},g,f]; ya[n,{i0},g,c] = 0; other[n,{i0},g,c] = 0",
    *(FILTERS, R("dy", Y), W("dx", X, "in_rows")),
    workspace=bwd_x_workspace,
    takes=BACKWARD,
)
CONV_TRANSPOSE_FWD = _row(
    "conv_transpose_fwd",
    "y[n<N,{i0<I0},g<G,c<C] = act((sum[{k0<K0},f<F] x[n, {(i0 + P0 - k0*L0)/S0}, g, f]*wt[{k0},c,g,f] + b[g,c] - mean[g,c])"
    "*factor[g,c] + offset[g,c] + other[n,{i0},g,c])",
    "x[n,{o0<O0},g,f]; b[g,c] = 0; mean[g,c] = 0; factor[g,c] = 1; offset[g,c] = 0; other[n,{i0},g,c] = 0",
    *(R("x", Y), FILTERS, R("b", "G*C", optional=True), W("y", X, "in_rows")),
    workspace=bwd_x_workspace,
    takes=ALL,
    columns="G*C",
)
CONV_TRANSPOSE_BWD_W = _row(
    "conv_transpose_bwd_w",
    "dwt[{k0<K0},c<C,g<G,f<F] = sum[n<N,{o0<O0}] dy[n, {o0*S0 + k0*L0 - P0}, g, c]*x[n,{o0},g,f]; "
    "db[g,c] = sum[n,{i0<I0}] dy[n,{i0},g,c]",
    "dy[n,{i0},g,c]",
    *(R("x", Y), R("dy", X), A("dwt", WT, f"{TAPS}*C"), A("db", "G*C", "G*C", optional=True)),
    workspace=transpose_bwd_w_workspace,
)
CONV_TRANSPOSE_BWD_X = _row(
    "conv_transpose_bwd_x",
    "dx[n<N,{o0<O0},g<G,f<F] = dact(ya[n,{o0},g,f])"
    "*(sum[{k0<K0},c<C] dy[n, {o0*S0 + k0*L0 - P0}, g, c]*wt[{k0},c,g,f] + other[n,{o0},g,f])",
    "dy[n,{i0<I0},g,c]; ya[n,{o0},g,f] = 0; other[n,{o0},g,f] = 0",
    *(FILTERS, R("dy", X), W("dx", Y, "rows")),
    workspace=fwd_workspace,
    takes=BACKWARD,
)


def _numbers(least: int) -> Any:
    return lambda v: v is None or (isinstance(v, tuple) and all(isinstance(i, int) and i >= least for i in v))


ATTRS = (
    Attr(name="stride", check=_numbers(1), doc="steps of the window, one per axis: at least 1"),
    Attr(name="padding", check=_numbers(0), doc="zeros before each axis, then those after each"),
    Attr(name="dilation", check=_numbers(1), doc="distance of a window's elements, one per axis: at least 1"),
    Attr(
        name="groups",
        default=1,
        check=lambda v: isinstance(v, int) and v >= 1,
        doc="of channels, each convolved separately",
    ),
)

operator(
    name="conv",
    synopsis="y[n,o,f] = sum[k,c] x[n, o*S + k*L - P, c]*wt[k,c,f] + b[f]",
    category="contraction",
    inputs=("x", "wt", "b"),
    optional_inputs=("b",),
    attrs=ATTRS,
    shape=conv_shape,
    words=conv_words,
    fwd=(CONV_FWD,),
    bwd=(CONV_BWD_W, CONV_BWD_X),
    differentiable=("x", "wt", "b"),
    layouts={"x": LAST, "y": LAST, "wt": WINDOW},
    onnx=("Conv",),
    examples=(
        Example(shapes=((None, 6, 7, 5), (3, 3, 5, 9), (9,)), attrs={"padding": (1, 1, 1, 1)}, batch=3),
        Example(shapes=((None, 9, 8, 3), (3, 2, 3, 17)), attrs={"stride": (2, 2), "padding": (1, 0, 0, 2)}, batch=2),
        Example(shapes=((None, 3, 4, 20), (1, 1, 20, 33), (33,)), batch=2),
        Example(shapes=((None, 4, 5, 16), (2, 3, 16, 3)), attrs={"padding": (1, 0, 0, 1)}, batch=2),
        Example(shapes=((None, 12, 12, 1), (17, 9, 1, 2)), attrs={"stride": (1, 2), "padding": (8, 4, 8, 4)}, batch=3),
        Example(shapes=((None, 5, 6, 18), (1, 1, 18, 4)), attrs={"stride": (2, 3)}, batch=2),
        Example(shapes=((None, 7, 9, 6), (3, 3, 3, 10), (10,)), attrs={"groups": 2, "dilation": (2, 1)}, batch=2),
        Example(
            shapes=((None, 4, 3, 19), (3, 3, 1, 19), (19,)), attrs={"groups": 19, "padding": (1, 1, 1, 1)}, batch=2
        ),
        Example(
            shapes=((None, 7, 6, 4), (3, 3, 1, 8)),
            attrs={"groups": 4, "stride": (2, 2), "padding": (0, 1, 1, 1)},
            batch=2,
        ),
        Example(shapes=((None, 40, 3), (5, 3, 7), (7,)), attrs={"stride": (3,), "dilation": (2,), "padding": (4, 2)}),
        Example(shapes=((None, 4, 5, 3, 2), (2, 3, 2, 2, 5), (5,)), attrs={"padding": (1, 0, 1, 0, 2, 0)}, batch=2),
        Example(
            shapes=((None, 28, 28, 64), (3, 3, 64, 64), (64,)), attrs={"padding": (1, 1, 1, 1)}, batch=8, bench=True
        ),
    ),
    source="Goodfellow et al., Deep Learning, 9.1 (cross-correlation, as in PyTorch)",
)

operator(
    name="conv_transpose",
    synopsis="y[n,i,c] = sum[k,f] x[n, (i + P - k*L)/S, f]*wt[k,c,f] + b[c]",
    category="contraction",
    inputs=("x", "wt", "b"),
    optional_inputs=("b",),
    attrs=(*ATTRS, Attr(name="output_padding", check=_numbers(0), doc="additional places at the end of each axis")),
    shape=conv_transpose_shape,
    words=conv_transpose_words,
    fwd=(CONV_TRANSPOSE_FWD,),
    bwd=(CONV_TRANSPOSE_BWD_W, CONV_TRANSPOSE_BWD_X),
    differentiable=("x", "wt", "b"),
    layouts={"x": LAST, "y": LAST, "wt": WINDOW},
    onnx=("ConvTranspose",),
    examples=(
        Example(shapes=((None, 4, 3, 6), (2, 2, 5, 6), (5,)), attrs={"stride": (2, 2)}, batch=3),
        Example(shapes=((None, 3, 2, 3), (3, 3, 7, 3)), attrs={"padding": (1, 0, 0, 1)}, batch=2),
        Example(
            shapes=((None, 3, 2, 9), (3, 4, 5, 9), (5,)),
            attrs={"stride": (2, 3), "padding": (1, 0, 0, 2), "output_padding": (1, 2)},
            batch=2,
        ),
        Example(
            shapes=((None, 3, 4, 6), (3, 2, 8, 6), (16,)),
            attrs={"groups": 2, "stride": (1, 2), "dilation": (2, 1), "output_padding": (1, 0)},
            batch=2,
        ),
        Example(shapes=((None, 4, 3, 5), (3, 3, 1, 5), (5,)), attrs={"groups": 5, "stride": (2, 2)}, batch=2),
        Example(shapes=((None, 4, 3, 4), (2, 3, 3, 4), (6,)), attrs={"groups": 2, "stride": (3, 2)}, batch=2),
        Example(
            shapes=((None, 9, 7), (4, 3, 7), (3,)), attrs={"stride": (3,), "padding": (1, 2), "output_padding": (2,)}
        ),
        Example(
            shapes=((None, 2, 3, 2, 4), (2, 3, 2, 3, 4), (3,)),
            attrs={"stride": (2, 1, 2), "padding": (1, 0, 0, 0, 1, 1)},
            batch=2,
        ),
        Example(shapes=((None, 14, 14, 64), (4, 4, 32, 64), (32,)), attrs={"stride": (2, 2)}, batch=8, bench=True),
    ),
    source="Dumoulin and Visin, A guide to convolution arithmetic for deep learning, 4",
)

"""Statistics of a batch, and the running statistics that training keeps of them in buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from calcvm.ops.dims import ONE, Shape, affine, numel, show
from calcvm.ops.epilogues import FORWARD, NORMALIZATION, operands_of, words_of
from calcvm.ops.sizes import On
from calcvm.ops.spec import (
    LAST,
    PHASES,
    PLACES,
    ROWS_COLS,
    SIZE,
    VECTORS,
    WN,
    Attr,
    Example,
    R,
    RowSpec,
    S,
    Shapes,
    U,
    W,
    Word,
    choice,
    dims,
    joined,
    leading,
    operator,
    places,
)

MOMENTUM = Word(name="momentum", kind="float", lo=0, hi=1)
EPS = Word(name="eps", kind="float", lo=0, hi=1e30)


def _shape(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
    x, running = shapes["x"], shapes["running"]
    if not x or running != x[1:]:
        raise ValueError(f"running {show(running)} is not of the shape of x {show(x)} without its leading axis")
    return {"y": x, "t_m": running, "t_d": running}


def _less(name: str, x: str, mean: str, y: str) -> RowSpec:
    return RowSpec(
        name=name,
        synopsis=f"{y}[r<rows,c<cols] = {x}[r,c] - {mean}[c]",
        words=ROWS_COLS,
        operands=(R(x, SIZE, "rows"), R(mean, "cols"), W(y, SIZE, "rows")),
        in_place=((y, x),),
        flops=SIZE,
    )


def _momentum(doc: str) -> Attr:
    return Attr(name="momentum", default=0.1, check=lambda v: 0 <= v <= 1, doc=doc)


operator(
    name="center",
    synopsis="y = x - m, m = mean of x over the leading axis; running += momentum*(m - running)",
    category="normalization",
    inputs=("x", "running"),
    attrs=(_momentum("weight of a batch's mean in the running mean"),),
    shape=_shape,
    words=lambda shapes, attrs: {**leading(shapes["x"]), **attrs},
    fwd=(
        RowSpec(
            name="center_mean",
            synopsis="t_m[c<cols] = sum[r<rows] x[r,c]/rows; running[c] += momentum*(t_m[c] - running[c])",
            words=(*ROWS_COLS, MOMENTUM),
            operands=(R("x", SIZE), W("t_m", "cols", "cols"), U("running", "cols", "cols")),
            flops=SIZE,
        ),
        _less("center_fwd", "x", "t_m", "y"),
    ),
    bwd=(
        RowSpec(
            name="center_mean_bwd",
            synopsis="t_d[c<cols] = sum[r<rows] dy[r,c]/rows",
            words=ROWS_COLS,
            operands=(R("dy", SIZE), W("t_d", "cols", "cols")),
            flops=SIZE,
        ),
        _less("center_bwd", "dy", "t_d", "dx"),
    ),
    differentiable=("x",),
    examples=(
        Example(shapes=((None, 5), (5,))),
        Example(shapes=((None, 3, 7), (3, 7)), attrs={"momentum": 1.0}),
        Example(shapes=((None,), ()), attrs={"momentum": 0.0}),
        Example(shapes=((131, 3), (3,))),
        Example(shapes=((None, 64), (64,)), batch=256, bench=True),
    ),
    source="Ioffe and Szegedy 2015, batch normalization, its mean alone",
)


# ---------------------------------------------------------------- of channels, over all samples and places
EPS_ATTR = Attr(name="eps", default=1e-5, check=lambda v: v >= 0, doc="added to the variance")
RUNNING = ("running_mean", "running_var")
SCALED, OTHER = "scale[c] = 1; shift[c]", "other[r,c]"  # values if left out: 1, and 0
SCALE, SHIFT = R("scale", "N", optional=True), R("shift", "N", optional=True)
CHUNKS, GPU_CHUNKS = 64, 256  # most partial results of a sum over rows: as in both kernels' normalization.py
BLOCK, GPU_BLOCK = 128, 32  # fewest rows per partial result


def _chunks(rows: Any, block: int, most: int) -> int:
    """A power of two, at least the number of chunks of ``rows`` rows."""
    n = 1
    while n < most and rows > block * n:
        n *= 2
    return n


def batch_workspace(w: Any, on: On) -> tuple[Any, Any]:
    """Two partial results of each channel for each chunk of rows."""
    rows = w.rows * w.inner
    chunks = _chunks(rows, GPU_BLOCK, GPU_CHUNKS) if on.gpu else _chunks(rows, BLOCK, CHUNKS)
    return 2 * w.N * chunks, 2 * w.N * chunks


def _channels(shapes: Shapes, names: tuple[str, ...]) -> Shape:
    """The shape of a value per channel; the given inputs must have it."""
    x = shapes["x"]
    if len(x) < 2:
        raise ValueError(f"x {show(x)} has no axis of channels: its rank must be 2 or more")
    for name in names:
        if shapes[name] is not None and shapes[name] != x[-1:]:
            raise ValueError(
                f"{name} {show(shapes[name])} is not {show(x[-1:])}, a number for each channel of x {show(x)}"
            )
    return x[-1:]


def _batch_shape(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
    channels = _channels(shapes, ("scale", "shift", *RUNNING))
    if numel(shapes["x"][:-1]) == ONE:
        raise ValueError(f"x {show(shapes['x'])} has one value per channel, which has no variance")
    return {"y": shapes["x"], **dict.fromkeys(("mean", "inv", "t_p", "t_q"), channels)}


def _places_with(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Any]:
    return {**places(shapes["x"]), **attrs}


operator(
    name="batch_norm",
    synopsis="y = (x - mean)/sqrt(var + eps)*scale + shift, over all axes but that of channels; running += momentum*(. - running)",
    category="normalization",
    inputs=("x", *RUNNING, "scale", "shift"),
    optional_inputs=("scale", "shift"),
    saved=("mean", "inv"),
    attrs=(EPS_ATTR, _momentum("weight of a batch's statistics in the running ones")),
    shape=_batch_shape,
    words=_places_with,
    layouts={"x": LAST, "y": LAST},
    fwd=(
        RowSpec(
            name="batch_norm_stats",
            synopsis="mean[c<N] = sum[r<rows*inner] x[r,c]/R; var[c] = sum[r] (x[r,c] - mean[c])^2/R; inv[c] = 1/sqrt(var[c] + eps); "
            "running_mean[c] += momentum*(mean[c] - running_mean[c]); "
            "running_var[c] += momentum*where(R > 1, var[c]*R/max(R - 1, 1) - running_var[c], 0)",
            words=(PHASES, *PLACES, EPS, MOMENTUM, WN),
            operands=(
                R("x", VECTORS),
                W("mean", "N", "N"),
                W("inv", "N", "N"),
                *(U(name, "N", "N") for name in RUNNING),
                S("ws", "wn"),
            ),
            phases="2",
            workspace=batch_workspace,
            flops=f"4*{VECTORS}",
            useful=(("rows*inner - 2", "there is one value per channel, which has no variance"),),
        ),
        RowSpec(
            name="batch_norm_fwd",
            synopsis="y[r<rows*inner,c<N] = act((x[r,c] - mean[c])*inv[c]*scale[c] + shift[c] + other[r,c])",
            declares=SCALED + "; " + OTHER,
            words=(*PLACES, *words_of(FORWARD)),
            operands=(
                R("x", VECTORS, "rows"),
                SCALE,
                SHIFT,
                R("mean", "N"),
                R("inv", "N"),
                W("y", VECTORS, "rows"),
                *operands_of(FORWARD, VECTORS, "rows"),
            ),
            in_place=(("y", "x"),),
            flops=f"4*{VECTORS}",
            takes=FORWARD,
        ),
    ),
    bwd=(
        RowSpec(
            name="batch_norm_sums",
            synopsis="dscale[c<N] = sum[r<rows*inner] dy[r,c]*(x[r,c] - mean[c])*inv[c]; dshift[c] = sum[r] dy[r,c]; "
            "t_p[c] = -inv[c]*dscale[c]/R; t_q[c] = -scale[c]*inv[c]*dshift[c]/R",
            declares="scale[c] = 1",
            words=(PHASES, *PLACES, WN),
            operands=(
                R("dy", VECTORS),
                R("x", VECTORS),
                replace(SCALE, part="N"),
                R("mean", "N"),
                R("inv", "N", "N"),
                W("dscale", "N", "N", optional=True),
                W("dshift", "N", "N", optional=True),
                W("t_p", "N", "N"),
                W("t_q", "N", "N"),
                S("ws", "wn"),
            ),
            phases="2",
            workspace=batch_workspace,
            flops=f"4*{VECTORS}",
        ),
        RowSpec(
            name="batch_norm_bwd",
            synopsis="dx[r<rows*inner,c<N] = scale[c]*inv[c]*(dy[r,c] + (x[r,c] - mean[c])*t_p[c]) + t_q[c]",
            declares="scale[c] = 1",
            words=PLACES,
            operands=(
                R("dy", VECTORS, "rows"),
                R("x", VECTORS, "rows"),
                SCALE,
                *(R(name, "N") for name in ("mean", "inv", "t_p", "t_q")),
                W("dx", VECTORS, "rows"),
            ),
            in_place=(("dx", "dy"), ("dx", "x")),
            flops=f"5*{VECTORS}",
        ),
    ),
    differentiable=("x", "scale", "shift"),
    onnx=("BatchNormalization",),
    examples=(
        Example(shapes=((None, 3, 2, 5), (5,), (5,), (5,), (5,))),
        Example(shapes=((None, 37), (37,), (37,), (37,), (37,)), attrs={"momentum": 1.0, "eps": 0.01}, batch=7),
        Example(shapes=((None, 2, 70), (70,), (70,), (70,)), attrs={"momentum": 0.0}),
        Example(shapes=((2, 3, 2, 2, 1), (1,), (1,))),
        Example(shapes=((300, 2), (2,), (2,), (2,), (2,))),
        Example(shapes=((None, 28, 28, 16), (16,), (16,), (16,), (16,)), batch=32, bench=True),
    ),
    source="Ioffe and Szegedy 2015; sums of squares by blocks: Chan, Golub and LeVeque 1983",
)


operator(
    name="batch_norm_inference",
    synopsis="y = (x - running_mean)/sqrt(running_var + eps)*scale + shift, by channel",
    category="normalization",
    inputs=("x", *RUNNING, "scale", "shift"),
    optional_inputs=("scale", "shift"),
    attrs=(EPS_ATTR,),
    shape=lambda shapes, attrs: {
        "y": shapes["x"],
        "t_factor": _channels(shapes, ("scale", "shift", *RUNNING)),
    },
    words=_places_with,
    layouts={"x": LAST, "y": LAST},
    fwd=(
        RowSpec(
            name="batch_norm_inference_factor",
            synopsis="t_factor[c<N] = scale[c]/sqrt(running_var[c] + eps)",
            declares="scale[c] = 1",
            words=(*dims("N"), EPS),
            operands=(replace(SCALE, part="N"), R("running_var", "N", "N"), W("t_factor", "N", "N")),
            flops="4*N",
        ),
        RowSpec(
            name="batch_norm_inference_fwd",
            synopsis="y[r<rows*inner,c<N] = act((x[r,c] - running_mean[c])*t_factor[c] + shift[c] + other[r,c])",
            declares="shift[c]; " + OTHER,
            words=(*PLACES, *words_of(FORWARD)),
            operands=(
                R("x", VECTORS, "rows"),
                R("t_factor", "N"),
                SHIFT,
                R("running_mean", "N"),
                W("y", VECTORS, "rows"),
                *operands_of(FORWARD, VECTORS, "rows"),
            ),
            in_place=(("y", "x"),),
            flops=f"3*{VECTORS}",
            epilogues=(NORMALIZATION,),
            takes=FORWARD,
        ),
    ),
    bwd=(
        RowSpec(
            name="batch_norm_inference_sums",
            synopsis="dscale[c<N] = sum[r<rows*inner] dy[r,c]*(x[r,c] - running_mean[c])/sqrt(running_var[c] + eps); "
            "dshift[c] = sum[r] dy[r,c]",
            words=(PHASES, *PLACES, EPS, WN),
            operands=(
                R("dy", VECTORS),
                R("x", VECTORS),
                R("running_mean", "N"),
                R("running_var", "N", "N"),
                W("dscale", "N", "N", optional=True),
                W("dshift", "N", "N", optional=True),
                S("ws", "wn"),
            ),
            phases="2",
            workspace=batch_workspace,
            flops=f"4*{VECTORS}",
        ),
        RowSpec(
            name="batch_norm_inference_bwd",
            synopsis="dx[r<rows*inner,c<N] = dy[r,c]*scale[c]/sqrt(running_var[c] + eps)",
            declares="scale[c] = 1",
            words=(*PLACES, EPS),
            operands=(R("dy", VECTORS, "rows"), SCALE, R("running_var", "N"), W("dx", VECTORS, "rows")),
            in_place=(("dx", "dy"),),
            flops=VECTORS,
        ),
    ),
    differentiable=("x", "scale", "shift"),
    onnx=("BatchNormalization",),
    examples=(
        Example(shapes=((None, 3, 2, 5), (5,), (5,), (5,), (5,)), low=0.1),
        Example(shapes=((None, 37), (37,), (37,), (37,), (37,)), attrs={"eps": 0.01}, low=0.1),
        Example(shapes=((2, 70), (70,), (70,)), low=0.1),
        Example(shapes=((None, 28, 28, 16), (16,), (16,), (16,), (16,)), low=0.1, batch=32, bench=True),
    ),
    source="Ioffe and Szegedy 2015",
)


# ---------------------------------------------------------------- of each sample, by groups of channels
GROUPS = dims("rows inner groups D")
OF_GROUPS = "rows*inner*groups*D"
AFFINE = choice("affine", 2)  # 1: there is a scale or a shift, whose gradients are sums over all rows
BY_CHUNKS = "0 if affine else rows"


def _of_affine(shapes: Shapes, **words: Any) -> dict[str, Any]:
    return {**words, "affine": int(shapes["scale"] is not None or shapes.get("shift") is not None)}


def _group_words(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Any]:
    x = shapes["x"]
    groups = shapes["mean"][-1]
    return _of_affine(shapes, rows=x[0], inner=numel(x[1:-1]), groups=groups, D=x[-1] // groups, eps=attrs["eps"])


def _group_shape(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
    x, (channels,) = shapes["x"], _channels(shapes, ("scale", "shift"))
    groups = affine(attrs["groups"]) if "groups" in attrs else channels
    if groups != channels and (not channels.constant or channels.b % groups.b):
        raise ValueError(f"the {channels} channels of x {show(x)} do not divide into {groups} equal groups")
    if numel(x[1:-1]) * (channels // groups) == ONE:
        raise ValueError(f"x {show(x)} has one value per group (of {groups}), which has no variance")
    return {"y": x, "mean": (x[0], groups), "inv": (x[0], groups)}


def group_fwd_workspace(w: Any, on: On) -> tuple[Any, Any]:
    """Two numbers of each channel for each worker."""
    return 2 * w.groups * w.D, 2 * w.groups * w.D


def group_bwd_workspace(w: Any, on: On) -> tuple[Any, Any]:
    """Six numbers of each channel for each chunk of samples, or four for each worker."""
    parts = 6 * _chunks(w.rows, 1, GPU_CHUNKS if on.gpu else CHUNKS) if w.affine else 4 * on.nw
    return w.groups * w.D * parts, w.groups * w.D * parts


GROUP_FWD = RowSpec(
    name="group_norm_fwd",
    synopsis="mean[r<rows,g<groups] = sum[i<inner,c<D] x[r,i,g,c]/(I*C); var[r,g] = sum[i,c] (x[r,i,g,c] - mean[r,g])^2/(I*C); "
    "inv[r,g] = 1/sqrt(var[r,g] + eps); "
    "y[r,i,g,c] = act((x[r,i,g,c] - mean[r,g])*inv[r,g]*scale[g,c] + shift[g,c] + other[r,i,g,c])",
    declares="scale[g,c] = 1; shift[g,c]; other[r,i,g,c]",
    words=(*GROUPS, EPS, *words_of(FORWARD), WN),
    operands=(
        R("x", OF_GROUPS, "rows"),
        R("scale", "groups*D", optional=True),
        R("shift", "groups*D", optional=True),
        W("y", OF_GROUPS, "rows"),
        W("mean", "rows*groups", "rows", optional=True),
        W("inv", "rows*groups", "rows", optional=True),
        *operands_of(FORWARD, OF_GROUPS, "rows"),
        S("ws", "nw*wn"),
    ),
    in_place=(("y", "x"),),
    takes=FORWARD,
    workspace=group_fwd_workspace,
    flops=f"8*{OF_GROUPS}",
)
GROUP_BWD = RowSpec(
    name="group_norm_bwd",
    synopsis="normal[r<rows,i<inner,g<groups,c<D] = (x[r,i,g,c] - mean[r,g])*inv[r,g]; "
    "dscale[g,c] = sum[r,i] dy[r,i,g,c]*normal[r,i,g,c]; dshift[g,c] = sum[r,i] dy[r,i,g,c]; "
    "a[r,g] = sum[i,c] dy[r,i,g,c]*scale[g,c]/(I*C); b[r,g] = sum[i,c] dy[r,i,g,c]*scale[g,c]*normal[r,i,g,c]/(I*C); "
    "dx[r,i,g,c] = inv[r,g]*(dy[r,i,g,c]*scale[g,c] - a[r,g] - normal[r,i,g,c]*b[r,g])",
    declares="scale[g,c] = 1",
    words=(PHASES, *GROUPS, AFFINE, WN),
    operands=(
        R("dy", OF_GROUPS, BY_CHUNKS),
        R("x", OF_GROUPS, BY_CHUNKS),
        R("scale", "groups*D", optional=True),
        R("mean", "rows*groups", BY_CHUNKS),
        R("inv", "rows*groups", BY_CHUNKS),
        W("dx", OF_GROUPS, BY_CHUNKS, optional=True),
        W("dscale", "groups*D", "groups*D", optional=True),
        W("dshift", "groups*D", "groups*D", optional=True),
        S("ws", "wn"),
    ),
    in_place=(("dx", "dy"), ("dx", "x")),
    phases="2 if affine else 1",
    workspace=group_bwd_workspace,
    flops=f"9*{OF_GROUPS}",
)


def _by_groups(
    name: str, onnx: str, attrs: tuple[Attr, ...], examples: tuple[Example, ...], synopsis: str, source: str
) -> None:
    operator(
        name=name,
        synopsis=synopsis,
        category="normalization",
        inputs=("x", "scale", "shift"),
        optional_inputs=("scale", "shift"),
        saved=("mean", "inv"),
        attrs=(*attrs, EPS_ATTR),
        shape=_group_shape,
        words=_group_words,
        layouts={"x": LAST, "y": LAST},
        fwd=(GROUP_FWD,),
        bwd=(GROUP_BWD,),
        differentiable=("x", "scale", "shift"),
        onnx=(onnx,),
        examples=examples,
        source=source,
    )


_by_groups(
    "group_norm",
    "GroupNormalization",
    (Attr(name="groups", default=1, check=lambda v: isinstance(v, int) and v > 0, doc="how many, of channels"),),
    (
        Example(shapes=((None, 2, 3, 6), (6,), (6,)), attrs={"groups": 2}),
        Example(shapes=((None, 3, 5), (5,), (5,)), attrs={"groups": 1, "eps": 0.01}, batch=3),
        Example(shapes=((None, 10),), attrs={"groups": 2, "eps": 0.1}),
        Example(shapes=((67, 2, 4), (4,), (4,)), attrs={"groups": 2}),
        Example(shapes=((2, 2, 1, 2, 36), (36,)), attrs={"groups": 2}),
        Example(shapes=((None, 28, 28, 16), (16,), (16,)), attrs={"groups": 4}, batch=8, bench=True),
    ),
    "y = (x - mean)/sqrt(var + eps)*scale + shift, mean and var of each sample and group of channels",
    "Wu and He 2018",
)
_by_groups(
    "instance_norm",
    "InstanceNormalization",
    (),
    (
        Example(shapes=((None, 2, 3, 5), (5,), (5,))),
        Example(shapes=((None, 4, 3),), attrs={"eps": 0.01}, batch=3),
        Example(shapes=((2, 2, 2, 2, 70), (70,), (70,))),
        Example(shapes=((None, 28, 28, 16), (16,), (16,)), batch=8, bench=True),
    ),
    "y = (x - mean)/sqrt(var + eps)*scale + shift, mean and var of each sample and channel",
    "Ulyanov et al. 2016",
)


# ---------------------------------------------------------------- of vectors: the last axes of any tensor
OF_ROWS = "rows*inner"
LAST_AXES = Attr(name="axes", default=1, check=lambda v: isinstance(v, int) and v > 0, doc="how many of the last axes")


def _vector_shape(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
    x, axes = shapes["x"], attrs["axes"]
    if axes > len(x):
        raise ValueError(f"x {show(x)} does not have {axes} axes")
    lead, last = x[: len(x) - axes], x[len(x) - axes :]
    for name in ("scale", "shift"):
        if shapes.get(name) is not None and shapes[name] != last:
            raise ValueError(
                f"{name} {show(shapes[name])} is not of the shape {show(last)}, the last {axes} axes of x {show(x)}"
            )
    return {"y": x, "mean": lead, "inv": lead}


def _vector_words(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Any]:
    x, lead = shapes["x"], shapes["inv"]
    rows = joined(lead + (ONE,)) if len(lead) > 1 else lead
    last = numel(x[len(lead) :])
    return _of_affine(shapes, rows=rows[0] if lead else ONE, inner=numel(rows[1:]), N=last, eps=attrs["eps"])


PARTIAL = (
    1 << 18
)  # elements of long vectors' partial sums, unless there are only four chunks: as in both kernels' normalization.py


def vector_workspace(w: Any, on: On) -> tuple[Any, Any]:
    """Two partial sums of each element of a vector for each chunk of vectors."""
    most = GPU_CHUNKS if on.gpu else CHUNKS
    while most > 4 and most * w.N > PARTIAL:
        most //= 2
    wanted = 2 * w.N * _chunks(w.rows * w.inner, 1, most) * w.affine
    return wanted, wanted


def _of_vectors(name: str, onnx: str, mean: bool, synopsis: str, rows: tuple[str, str], source: str) -> None:
    scaled = ("scale", "shift") if mean else ("scale",)
    saved = ("mean", "inv") if mean else ("inv",)
    operator(
        name=name,
        synopsis=synopsis,
        category="normalization",
        inputs=("x", *scaled),
        optional_inputs=scaled,
        saved=saved,
        attrs=(LAST_AXES, EPS_ATTR),
        shape=_vector_shape
        if mean
        else lambda shapes, attrs: {k: v for k, v in _vector_shape(shapes, attrs).items() if k != "mean"},
        words=_vector_words,
        fwd=(
            RowSpec(
                name=f"{name}_fwd",
                synopsis=rows[0],
                declares="scale[n] = 1; shift[n]" if mean else "scale[n] = 1",
                words=(*PLACES, EPS),
                operands=(
                    R("x", VECTORS, "rows"),
                    *(R(v, "N", optional=True) for v in scaled),
                    W("y", VECTORS, "rows"),
                    *(W(v, OF_ROWS, "rows", optional=True) for v in saved),
                ),
                in_place=(("y", "x"),),
                flops=f"{8 if mean else 4}*{VECTORS}",
            ),
        ),
        bwd=(
            RowSpec(
                name=f"{name}_bwd",
                synopsis=rows[1],
                declares="scale[n] = 1",
                words=(PHASES, *PLACES, AFFINE, WN),
                operands=(
                    R("dy", VECTORS, BY_CHUNKS),
                    R("x", VECTORS, BY_CHUNKS),
                    R("scale", "N", optional=True),
                    *(R(v, OF_ROWS, BY_CHUNKS) for v in saved),
                    W("dx", VECTORS, BY_CHUNKS, optional=True),
                    *(W(f"d{v}", "N", "N", optional=True) for v in scaled),
                    S("ws", "wn"),
                ),
                in_place=(("dx", "dy"), ("dx", "x")),
                phases="2 if affine else 1",
                workspace=vector_workspace,
                flops=f"9*{VECTORS}",
            ),
        ),
        differentiable=("x", *scaled),
        onnx=(onnx,),
        examples=tuple(
            Example(
                shapes=(x, *(x[len(x) - axes :],) * n), attrs={"axes": axes, "eps": eps}, batch=batch, bench=batch > 99
            )
            for x, axes, n, eps, batch in (
                ((None, 7), 1, len(scaled), 1e-5, 5),
                ((None, 3, 67), 1, len(scaled), 0.01, 3),
                ((None, 2, 3, 5), 2, len(scaled), 1e-5, 3),
                ((None, 2, 3), 2, 0, 1e-5, 3),
                ((2, 2, 3, 4), 1, 1, 1e-5, 3),
                ((37,), 1, len(scaled), 1e-5, 3),
                ((131, 3), 1, len(scaled), 1e-5, 3),
                ((None, 256), 1, len(scaled), 1e-5, 256),
            )
        ),
        source=source,
    )


_of_vectors(
    "layer_norm",
    "LayerNormalization",
    True,
    "y = (x - mean)/sqrt(var + eps)*scale + shift, mean and var over the last axes",
    (
        "mean[r<rows*inner] = sum[n<N] x[r,n]/N; var[r] = sum[n] (x[r,n] - mean[r])^2/N; inv[r] = 1/sqrt(var[r] + eps); "
        "y[r,n] = (x[r,n] - mean[r])*inv[r]*scale[n] + shift[n]",
        "normal[r<rows*inner,n<N] = (x[r,n] - mean[r])*inv[r]; "
        "dscale[n] = sum[r] dy[r,n]*normal[r,n]; dshift[n] = sum[r] dy[r,n]; "
        "a[r] = sum[n] dy[r,n]*scale[n]/N; b[r] = sum[n] dy[r,n]*scale[n]*normal[r,n]/N; "
        "dx[r,n] = inv[r]*(dy[r,n]*scale[n] - a[r] - normal[r,n]*b[r])",
    ),
    "Ba, Kiros and Hinton 2016",
)
_of_vectors(
    "rms_norm",
    "RMSNormalization",
    False,
    "y = x/sqrt(mean of x^2 + eps)*scale, the mean over the last axes",
    (
        "inv[r<rows*inner] = 1/sqrt(sum[n<N] x[r,n]^2/N + eps); y[r,n] = x[r,n]*inv[r]*scale[n]",
        "normal[r<rows*inner,n<N] = x[r,n]*inv[r]; dscale[n] = sum[r] dy[r,n]*normal[r,n]; "
        "b[r] = sum[n] dy[r,n]*scale[n]*normal[r,n]/N; dx[r,n] = inv[r]*(dy[r,n]*scale[n] - normal[r,n]*b[r])",
    ),
    "Zhang and Sennrich 2019",
)


# ---------------------------------------------------------------- by neighbouring channels
LRN = (
    *PLACES,
    Word(name="size", kind="int", lo=1, hi=2**20),
    *(Word(name=n, kind="float", lo=-1e30, hi=1e30) for n in ("alpha", "beta", "k")),
)
BASE = "d[r<rows*inner,c<N] = k + alpha/size*sum[j<size] x[r, c - size//2 + j]^2"


ROOM = 256  # elements of scratch that rows of few channels share, as in kernels_cpu/normalization.py


def _lrn_workspace(vectors: int) -> Callable:
    """So many vectors of channels for each of a CPU's workers, with space for their neighbours."""
    return lambda w, on: (0 if on.gpu else vectors * max(w.N + w.size, ROOM),) * 2


operator(
    name="local_response_norm",
    synopsis="y = x / d^beta, d[r,c] = k + alpha/size * sum of x^2 over size neighbouring channels",
    category="normalization",
    inputs=("x",),
    attrs=(
        Attr(name="size", default=5, check=lambda v: isinstance(v, int) and 0 < v < 2**20, doc="channels of a sum"),
        Attr(name="alpha", default=1e-4, doc="weight of the mean of squares, times size"),
        Attr(name="beta", default=0.75, doc="exponent"),
        Attr(name="k", default=1.0, doc="added to the squares"),
    ),
    shape=lambda shapes, attrs: {"y": shapes["x"]} if _channels(shapes, ()) else {},
    words=_places_with,
    layouts={"x": LAST, "y": LAST},
    fwd=(
        RowSpec(
            name="local_response_norm_fwd",
            synopsis=f"{BASE}; y[r,c] = x[r,c]*d[r,c]^(-beta)",
            words=(*LRN, WN),
            operands=(R("x", VECTORS, "rows"), W("y", VECTORS, "rows"), S("ws", "nw*wn")),
            workspace=_lrn_workspace(2),
            flops=f"8*{VECTORS}",
        ),
    ),
    bwd=(
        RowSpec(
            name="local_response_norm_bwd",
            synopsis=f"{BASE}; dx[r,c] = dy[r,c]*d[r,c]^(-beta) - 2*alpha*beta/size*x[r,c]*sum[j] dy[r, c + size//2 - j]"
            "*x[r, c + size//2 - j]*d[r, c + size//2 - j; 1]^(-beta - 1)",
            words=(*LRN, WN),
            operands=(R("dy", VECTORS, "rows"), R("x", VECTORS, "rows"), W("dx", VECTORS, "rows"), S("ws", "nw*wn")),
            workspace=_lrn_workspace(4),
            flops=f"16*{VECTORS}",
        ),
    ),
    differentiable=("x",),
    onnx=("LRN",),
    examples=(
        Example(shapes=((None, 2, 3, 7),), attrs={"size": 5, "alpha": 0.5}),
        Example(shapes=((None, 3, 4),), attrs={"size": 2, "alpha": 1.0, "beta": 0.5, "k": 2.0}, batch=3),
        Example(shapes=((None, 35),), attrs={"size": 3, "alpha": 0.3, "beta": 0.75, "k": 1.0}),
        Example(shapes=((2, 3, 1, 2, 3),), attrs={"size": 9, "alpha": 2.0, "beta": 1.3}),
        Example(shapes=((None, 28, 28, 16),), batch=8, bench=True),
    ),
    source="Krizhevsky, Sutskever and Hinton 2012, 3.3; torch.nn.LocalResponseNorm",
)

"""Matrix products: linear (with bias and a fused activation) and matmul (transposable, batched)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from calcvm.frozen import frozen
from calcvm.ops.dims import ONE, Shape, numel, show
from calcvm.ops.epilogues import ACT, ALPHA
from calcvm.ops.sizes import On
from calcvm.ops.spec import (
    ACC,
    OPS,
    PHASES,
    WN,
    A,
    Attr,
    Example,
    R,
    RowSpec,
    S,
    Shapes,
    W,
    choice,
    dims,
    joined,
    operator,
)

# ---------------------------------------------------------------- workspace: (minimum, best for speed)
Room = tuple[Any, Any]
NOTHING: Room = (0, 0)


def _turned(k: Any, n: Any) -> Room:
    """For a worker that must pack panels of k rows and n columns of a GEMM's second operand, because it is column-major."""
    return min(k, 512) * min(n + 15, 16), min(k, 512) * min(n + 15, 256)


def _packed(k: Any, n: Any) -> Room:
    """For a worker that may pack them, because the rows are long."""
    return (0, _turned(k, n)[1]) if n >= 512 else NOTHING


def _partial(elems: Any, on: On) -> Room:
    """For the partial sums of a result of so many elements, on a GPU with several workers.

    At most what `summands` in kernels_cuda/_gemm.py uses: up to 64 partial results, with 2**20 elements in total or one
    result.
    """
    return (0, min(64 * elems, max(1 << 20, elems))) if on.nw > 1 else NOTHING


def partial_over(summed: Any, elems: Any, on: On) -> Room:
    """The same for a result whose size does not depend on the batch; if it is small, at most one partial sum per 512 summands."""
    few = summed * -(-elems // 512) + elems
    return (0, max(1 << 20, elems) if elems >= 1 << 16 else few) if on.nw > 1 else NOTHING


def linear_fwd_workspace(w: Any, on: On) -> Room:
    return NOTHING if on.plain else _packed(w.K, w.N)


def linear_bwd_w_workspace(w: Any, on: On) -> Room:
    summed = w.rows * w.inner
    return partial_over(summed, (w.K + 1) * w.N, on) if on.plain else _packed(summed, w.N)


def linear_bwd_x_workspace(w: Any, on: On) -> Room:
    return NOTHING if on.plain else _turned(w.N, w.K)


def matmul_fwd_workspace(w: Any, on: On) -> Room:
    return NOTHING if on.plain else _turned(w.K, w.N) if w.tb else _packed(w.K, w.N)


def matmul_bwd_a_workspace(w: Any, on: On) -> Room:
    if on.plain:
        return NOTHING if w.by or w.ab else _partial(w.M * w.K, on)
    return _turned(w.N, w.M) if w.ta else _packed(w.N, w.K) if w.tb else _turned(w.N, w.K)


def matmul_bwd_b_workspace(w: Any, on: On) -> Room:
    if on.plain:
        return NOTHING if w.bb and not w.by else _partial(w.K * w.N, on)
    return (_turned(w.M, w.K) if w.ta else _packed(w.M, w.K)) if w.tb else _packed(w.M, w.N)


PARTIAL_SUMS = "2 if gpu and wn else 1"  # computed, then added
WORKSPACE = S("ws", "wn if gpu else nw*wn")  # partial sums of all workers, or each worker's panels


LINEAR = dims("rows inner N K")
MATMUL = (*dims("G M N K"), *(choice(n, 2) for n in ("ta", "tb", "ab", "bb", "by")))
ONE_PRODUCT = ("1 - G if by else 0", "G - 1 if by else 0")
A_ELEMS, B_ELEMS, Y_ELEMS = "(G if ab else 1)*M*K", "(G if bb else 1)*K*N", "G*M*N"

A_BATCH, B_BATCH = "where(ab == 1, G, 1)", "where(bb == 1, G, 1)"  # how many products each operand has


def _turns(*names: str) -> Callable[[Mapping[str, Any]], dict[str, tuple[int, ...]]]:
    """Which of these operands are stored with their last two axes swapped, by the words ta and tb."""
    return lambda words: {name: (0, 2, 1) for name in names if words[f"t{name[-1]}"]}


def linear_shape(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
    x, w, b = shapes["x"], shapes["wt"], shapes["b"]
    if not all(s.constant for s in w):
        raise ValueError(f"the weights {show(w)} depend on the batch: use matmul")
    if len(x) < 2 or len(w) != 2 or x[-1] != w[0]:
        raise ValueError(f"x {show(x)} and w {show(w)}: the last size of x must be the first of w")
    if b is not None and b != (w[1],):
        raise ValueError(f"bias {show(b)} must have shape {show((w[1],))}")
    return {"y": (*x[:-1], w[1])}


def linear_words(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Any]:
    x, w = joined(shapes["x"]), shapes["wt"]
    return {"rows": x[0], "inner": numel(x[1:-1]), "N": w[1], "K": w[0]}


def matmul_shape(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Shape]:
    a, b = shapes["a"], shapes["b"]
    if len(a) < 2 or len(b) < 2:
        raise ValueError(f"a {show(a)} and b {show(b)}: both must have rank 2 or more")
    if a[:-2] and b[:-2] and a[:-2] != b[:-2]:
        raise ValueError(f"a {show(a)} and b {show(b)}: leading sizes must agree, or one operand have none")
    m, k = (a[-1], a[-2]) if attrs.get("transpose_a") else (a[-2], a[-1])
    kb, n = (b[-1], b[-2]) if attrs.get("transpose_b") else (b[-2], b[-1])
    if k != kb:
        raise ValueError(f"a {show(a)} and b {show(b)}: the summed sizes differ, {k} and {kb}")
    return {"y": (*(a[:-2] or b[:-2]), m, n)}


def matmul_words(shapes: Shapes, attrs: Mapping[str, Any]) -> dict[str, Any]:
    a, b, y = shapes["a"], shapes["b"], shapes["y"]
    ta, tb = bool(attrs.get("transpose_a")), bool(attrs.get("transpose_b"))
    lead = y[:-2]
    return {
        "G": numel(lead), "M": y[-2], "N": y[-1], "K": a[-2] if ta else a[-1],
        "ta": ta, "tb": tb, "ab": bool(a[:-2]), "bb": bool(b[:-2]),
        "by": numel(lead) == ONE,
    }  # fmt: skip


LINEAR_FWD = RowSpec(
    name="linear_fwd",
    synopsis="y[m<rows*inner,n<N] = act(sum[k<K] x[m,k]*wt[k,n] + b[n])",
    declares="b[n] = 0",
    words=(*LINEAR, ACT, ALPHA, WN),
    operands=(
        R("x", "rows*inner*K", "rows"),
        R("wt", "K*N"),
        R("b", "N", optional=True),
        W("y", "rows*inner*N", "rows"),
        WORKSPACE,
    ),
    takes=("activation",),
    workspace=linear_fwd_workspace,
    flops="2*rows*inner*N*K",
)
LINEAR_BWD_W = RowSpec(
    name="linear_bwd_w",
    synopsis="dwt[k<K,n<N] = sum[m<rows*inner] x[m,k]*dy[m,n]; db[n] = sum[m] dy[m,n]",
    words=(PHASES, *LINEAR, ACC, WN),
    operands=(
        R("x", "rows*inner*K"),
        R("dy", "rows*inner*N"),
        A("dwt", "K*N", "K"),
        A("db", "N", "N", optional=True),
        WORKSPACE,
    ),
    workspace=linear_bwd_w_workspace,
    phases=PARTIAL_SUMS,
    flops="2*rows*inner*N*K",
)
LINEAR_BWD_X = RowSpec(
    name="linear_bwd_x",
    synopsis="dx[m<rows*inner,k<K] = dact(ya[m,k])*sum[n<N] dy[m,n]*wt[k,n]",
    declares="ya[m,k] = 0",
    words=(*LINEAR, ACT, ALPHA, WN),
    operands=(
        R("wt", "K*N"),
        R("dy", "rows*inner*N", "rows"),
        R("ya", "rows*inner*K", "rows", optional="act == 0"),
        W("dx", "rows*inner*K", "rows"),
        WORKSPACE,
    ),
    takes=("derivative",),
    workspace=linear_bwd_x_workspace,
    flops="2*rows*inner*N*K",
)

operator(
    name="linear",
    synopsis="y[m,n] = sum[k] x[m,k]*wt[k,n] + b[n]",
    category="contraction",
    inputs=("x", "wt", "b"),
    optional_inputs=("b",),
    shape=linear_shape,
    words=linear_words,
    fwd=(LINEAR_FWD,),
    bwd=(LINEAR_BWD_W, LINEAR_BWD_X),
    differentiable=("x", "wt", "b"),
    onnx=("Gemm", "MatMul"),
    examples=(
        Example(shapes=((None, 7), (7, 5), (5,))),
        Example(shapes=((None, 6), (6, 3)), batch=4),
        Example(shapes=((None, 3, 4), (4, 17), (17,)), batch=3),
        Example(shapes=((None, 16), (16, 33), (33,)), batch=1),
        Example(shapes=((None, 64), (64, 64), (64,)), batch=32, bench=True),
    ),
    source="Goodfellow et al., Deep Learning, 6.5.6",
)

MATMUL_FWD = RowSpec(
    name="matmul_fwd",
    synopsis="y[g<G,m<M,n<N] = sum[k<K] a[ab*g,m,k]*b[bb*g,k,n]",
    declares=f"a[h<{A_BATCH},m,k]; b[e<{B_BATCH},k,n]",
    lies=_turns("a", "b"),
    words=(*MATMUL, WN),
    operands=(
        R("a", A_ELEMS, "(0 if ta else M) if by else (G if ab else 0)"),
        R("b", B_ELEMS, "0 if by or not bb else G"),
        W("y", Y_ELEMS, "M if by else G"),
        WORKSPACE,
    ),
    workspace=matmul_fwd_workspace,
    require=ONE_PRODUCT,
    flops="2*G*M*N*K",
)


def _matmul_bwd(
    x: str, elems: str, other: str, synopsis: str, declares: str, axis: str, workspace: Callable
) -> RowSpec:
    """The row of x's gradient; its products are shared if each has its own, else its stored ``axis``."""
    own = f"G if {x}b and not by else"
    return RowSpec(
        name=f"matmul_bwd_{x}",
        synopsis=synopsis,
        declares=declares,
        lies=_turns(other, f"d{x}"),
        words=(PHASES, *MATMUL, ACC, WN),
        operands=(
            R(other, A_ELEMS if other == "a" else B_ELEMS, "G if ab and bb and not by else 0"),
            R("dy", Y_ELEMS, f"{own} 0"),
            A(f"d{x}", elems, f"{own} {axis}"),
            WORKSPACE,
        ),
        workspace=workspace,
        phases=PARTIAL_SUMS,
        require=ONE_PRODUCT,
        flops="2*G*M*N*K",
    )


MATMUL_BWD_A = _matmul_bwd(
    "a",
    A_ELEMS,
    "b",
    f"da[h<{A_BATCH},m<M,k<K] = sum[e<where(ab == 1, 1, G),n<N] dy[h + e,m,n]*b[bb*(h + e),k,n]",
    f"dy[g<G,m,n]; b[j<{B_BATCH},k,n]",
    "(K if ta else M)",
    matmul_bwd_a_workspace,
)
MATMUL_BWD_B = _matmul_bwd(
    "b",
    B_ELEMS,
    "a",
    f"db[h<{B_BATCH},k<K,n<N] = sum[e<where(bb == 1, 1, G),m<M] a[ab*(h + e),m,k]*dy[h + e,m,n]",
    f"a[j<{A_BATCH},m,k]; dy[g<G,m,n]",
    "(N if tb else K)",
    matmul_bwd_b_workspace,
)

operator(
    name="matmul",
    synopsis="y[g,m,n] = sum[k] a[g,m,k]*b[g,k,n]",
    category="contraction",
    inputs=("a", "b"),
    attrs=(
        Attr(name="transpose_a", default=False, check=lambda v: isinstance(v, bool), doc="a is stored [k,m]"),
        Attr(name="transpose_b", default=False, check=lambda v: isinstance(v, bool), doc="b is stored [n,k]"),
    ),
    shape=matmul_shape,
    words=matmul_words,
    fwd=(MATMUL_FWD,),
    bwd=(MATMUL_BWD_A, MATMUL_BWD_B),
    differentiable=("a", "b"),
    onnx=("MatMul", "Gemm"),
    examples=(
        Example(shapes=((None, 6), (6, 3))),
        Example(shapes=((6, 5), (6, 3)), attrs={"transpose_a": True}),
        Example(shapes=((None, 6), (3, 6)), attrs={"transpose_b": True}),
        Example(shapes=((6, 5), (3, 6)), attrs={"transpose_a": True, "transpose_b": True}),
        Example(shapes=((None, 4, 3), (None, 3, 5)), batch=3),
        Example(shapes=((None, 3, 4), (None, 5, 3)), attrs={"transpose_a": True, "transpose_b": True}, batch=3),
        Example(shapes=((None, 4, 3), (3, 5)), batch=3),
        Example(shapes=((4, 3), (None, 3, 5)), batch=3),
        Example(shapes=((None, 3, 4), (5, 3)), attrs={"transpose_a": True, "transpose_b": True}, batch=3),
        Example(shapes=((None, 64), (64, 64)), batch=32, bench=True),
    ),
    source="Golub and Van Loan, Matrix Computations, 1.1",
)


# ---------------------------------------------------------------- operators fused with a product
@frozen
class Sum:
    """Operators that lowering fuses: ``product`` and a ``sum`` of it and a vector become ``into``, with three inputs."""

    product: str
    sum: str
    into: str


PRODUCTS = {row.name for spec in OPS.values() if spec.category == "contraction" for row in spec.rows}
BIAS = Sum("matmul", "add", "linear")

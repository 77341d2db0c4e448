"""Matrix products: the rows of linear and matmul, all built on one GEMM routine.

A worker computes its rows of the result in blocks that stay in cache, so that activations and their derivatives are
applied to values just computed.
"""

from __future__ import annotations

from numba.core import cgutils
from numba.extending import intrinsic

from calcvm.kernels_cpu._common import Float, Ptr, at, given, kernel, like, njit, share
from calcvm.kernels_cpu._epilogues import NONE, activate, scale_by_derivative
from calcvm.kernels_cpu._gemm import gemm
from calcvm.kernels_cpu._gemv import gemv
from calcvm.kernels_cpu._math import column_sums, elementwise, fill, scale

add_times = elementwise(lambda d, y, a: d + y * a, "vv", "f")
BLOCK_ELEMS = 8192  # elements of a result block: 32 KiB in float32
SET, FROM_INIT = 0, 1  # GEMM's modes


@intrinsic
def one(tc, like):
    """A pointer to 1, of the dtype of the pointer ``like``."""

    def codegen(ctx, b, sig, args):
        return cgutils.alloca_once_value(b, ctx.get_constant(like.dtype, 1))

    return like(like), codegen


@njit(inline=True)
def block_rows(n):
    """Rows of n elements in a block: a multiple of 24, which every tile height divides."""
    return max(BLOCK_ELEMS // max(n, 1) // 24 * 24, 24)


@njit(inline=True)
def product(M, m, n, k, a, a_rs, a_cs, b, b_rs, b_cs, c, c_rs, init, init_rs, mode, ws, wn):
    """m rows of a GEMM that has M rows in all; a single row uses ``gemv``, whose sums have another order.  m may be 0."""
    if M > 1:
        gemm(m, n, k, a, a_rs, a_cs, b, b_rs, b_cs, c, c_rs, init, init_rs, mode, ws, wn)
    elif m == 1:
        gemv(n, k, a, a_cs, b, b_rs, b_cs, c, init, mode)


@kernel
def linear_fwd(me, rows, inner, N, K, act, alpha: Float, wn, x: Ptr, wt: Ptr, b: Ptr, y: Ptr, ws: Ptr):
    """y[m,n] = act(sum_k x[m,k]*wt[k,n] + b[n]);  x (M,K), wt (K,N), b (N,), y (M,N), M = rows*inner."""
    lo, hi = share(me, rows)
    lo, hi = lo * inner, hi * inner
    mode = FROM_INIT if given(me, b) else SET
    step = hi - lo if act == NONE else block_rows(N)
    while lo < hi:
        m = min(step, hi - lo)
        yi = at(y, lo * N)
        product(rows * inner, m, N, K, at(x, lo * K), K, 1, wt, N, 1, yi, N, b, 0, mode, at(ws, me.worker * wn), wn)
        if act != NONE:
            activate(m * N, yi, act, alpha)
        lo += m


@njit(inline=True)
def outer(lo, hi, n, acc, x, y, d):
    """d[k,:] (+)= x[k] * y for k in [lo, hi): a product with one summand (1x16x4 takes 6 ns, by gemm 25)."""
    for k in range(lo, hi):
        if acc:
            add_times(n, at(d, k * n), y, at(d, k * n), x[k])
        else:
            scale(n, y, at(d, k * n), x[k])


@kernel
def linear_bwd_w(me, phases, rows, inner, N, K, acc, wn, x: Ptr, dy: Ptr, dwt: Ptr, db: Ptr, ws: Ptr):
    """dwt[k,n] (+)= sum_m x[m,k]*dy[m,n]; db[n] (+)= sum_m dy[m,n].  Workers own rows of dwt and columns of db."""
    M = rows * inner
    lo, hi = share(me, K)
    if M == 1:
        outer(lo, hi, N, acc, x, dy, dwt)
        if given(me, db):
            lo, hi = share(me, N)
            outer(0, 1, hi - lo, acc, one(dy), at(dy, lo), at(db, lo))
        return
    d = at(dwt, lo * N)
    gemm(hi - lo, N, M, at(x, lo), 1, K, dy, N, 1, d, N, d, N, acc, at(ws, me.worker * wn), wn)
    if given(me, db):
        lo, hi = share(me, N)
        column_sums(hi - lo, M, N, at(dy, lo), at(db, lo), acc)


@kernel
def linear_bwd_x(me, rows, inner, N, K, act, alpha: Float, wn, wt: Ptr, dy: Ptr, ya: Ptr, dx: Ptr, ws: Ptr):
    """dx[m,k] = act'(ya[m,k]) * sum_n dy[m,n]*wt[k,n];  ya is the output of the activation that computed x."""
    lo, hi = share(me, rows)
    lo, hi = lo * inner, hi * inner
    step = hi - lo if act == NONE else block_rows(K)
    while lo < hi:
        m = min(step, hi - lo)
        d, y = at(dx, lo * K), at(ya, lo * K)
        product(rows * inner, m, K, N, at(dy, lo * N), N, 1, wt, 1, N, d, K, d, K, SET, at(ws, me.worker * wn), wn)
        if act != NONE:
            scale_by_derivative(m * K, d, y, act, alpha)
        lo += m


# ---------------------------------------------------------------- matmul
@njit(inline=True)
def strides(transposed, rows, cols):
    """Row and column stride of a logical (rows, cols) matrix that may be stored as (cols, rows)."""
    if transposed:
        return 1, rows
    return cols, 1


@kernel
def matmul_fwd(me, G, M, N, K, ta, tb, ab, bb, by, wn, a: Ptr, b: Ptr, y: Ptr, ws: Ptr):
    """y[g,m,n] = sum_k a[g,m,k]*b[g,k,n].  Workers own products g, or rows m of a single product."""
    a_rs, a_cs = strides(ta, M, K)
    b_rs, b_cs = strides(tb, K, N)
    lo, hi = share(me, M if by else G)
    ws = at(ws, me.worker * wn)
    if by:
        product(M, hi - lo, N, K, at(a, lo * a_rs), a_rs, a_cs, b, b_rs, b_cs, at(y, lo * N), N, y, 0, SET, ws, wn)
    else:
        for g in range(lo, hi):
            gemm(M, N, K, at(a, g * ab * M * K), a_rs, a_cs, at(b, g * bb * K * N), b_rs, b_cs,
                 at(y, g * M * N), N, y, 0, SET, ws, wn)  # fmt: skip


@njit(inline=True)
def shares(me, over_g, G, rows):
    """A worker's part of a gradient: its products g (first, last), and its rows (start, number) of each."""
    lo, hi = share(me, G if over_g else rows)
    if over_g:
        return lo, hi, 0, rows
    return 0, G, lo, hi - lo


@kernel
def matmul_bwd_a(me, phases, G, M, N, K, ta, tb, ab, bb, by, acc, wn, b: Ptr, dy: Ptr, da: Ptr, ws: Ptr):
    """da[g,m,k] (+)= sum_n dy[g,m,n]*b[g,k,n]; summed over g if a is shared.  da is stored like a."""
    b_rs, b_cs = strides(tb, K, N)
    rows, cols = (K, M) if ta else (M, K)
    over_g = ab and not by
    first, last, i, m = shares(me, over_g, G, rows)
    ws = at(ws, me.worker * wn)
    if not acc and not over_g and G == 0:
        fill(m * cols, at(da, i * cols), like(da, 0))
    for g in range(first, last):
        bg, dyg, c = at(b, g * bb * K * N), at(dy, g * M * N), at(da, g * ab * M * K + i * cols)
        mode = FROM_INIT if acc or (not ab and g > 0) else SET
        if ta:
            gemm(m, M, N, at(bg, i * b_rs), b_rs, b_cs, dyg, 1, N, c, M, c, M, mode, ws, wn)
        else:
            gemm(m, K, N, at(dyg, i * N), N, 1, bg, b_cs, b_rs, c, K, c, K, mode, ws, wn)


@kernel
def matmul_bwd_b(me, phases, G, M, N, K, ta, tb, ab, bb, by, acc, wn, a: Ptr, dy: Ptr, db: Ptr, ws: Ptr):
    """db[g,k,n] (+)= sum_m a[g,m,k]*dy[g,m,n]; summed over g if b is shared.  db is stored like b."""
    a_rs, a_cs = strides(ta, M, K)
    rows, cols = (N, K) if tb else (K, N)
    over_g = bb and not by
    first, last, i, m = shares(me, over_g, G, rows)
    ws = at(ws, me.worker * wn)
    if not acc and not over_g and G == 0:
        fill(m * cols, at(db, i * cols), like(db, 0))
    for g in range(first, last):
        ag, dyg, c = at(a, g * ab * M * K), at(dy, g * M * N), at(db, g * bb * K * N + i * cols)
        mode = FROM_INIT if acc or (not bb and g > 0) else SET
        if tb:
            gemm(m, K, M, at(dyg, i), 1, N, ag, a_rs, a_cs, c, K, c, K, mode, ws, wn)
        else:
            gemm(m, N, M, at(ag, i * a_cs), a_cs, a_rs, dyg, N, 1, c, N, c, N, mode, ws, wn)

"""Matrix products: the rows of linear and matmul, all on the one routine of `_gemm`.

Where the batch is summed and the result is small, all workers compute partial sums in scratch, and the
row's second half adds them up.
"""

# ruff: noqa: F821  (a kernel's h, r and has_NAME are bound with its row's words)

from __future__ import annotations

from calcvm.kernels_cuda._common import Float, Optional, Ptr, finish, kernel, share
from calcvm.kernels_cuda._cuda import at, device
from calcvm.kernels_cuda._gemm import (
    DERIVATIVE,
    FROM_INIT,
    KC,
    NONE,
    SET,
    add_up,
    gemm,
    partial_sums,
    product,
    summands,
    worth_splitting,
)


@kernel
def linear_fwd(w, nw, rows, inner, N, K, act, alpha: Float, x: Ptr, wt: Ptr, b: Optional, y: Ptr, ws: Optional):
    """y[m,n] = act(sum_k x[m,k]*wt[k,n] + b[n]);  x (M,K), wt (K,N), b (N,), y (M,N), M = rows*inner.  Rows are shared."""
    lo, hi = share(rows, w, nw)
    lo, m = lo * inner, (hi - lo) * inner
    yi, mode = at(y, lo * N), FROM_INIT if has_b else SET
    if m * N > 0:
        product(h, K, KC, m, at(x, lo * K), K, 1, 0, wt, N, 1, 0, yi, N, b, 0, mode, act, alpha, yi)
        gemm(h, m, N, K)


@kernel
def linear_bwd_w(w, nw, rows, inner, N, K, acc, x: Ptr, dy: Ptr, dwt: Ptr, db: Optional, ws: Optional):
    """dwt[k,n] (+)= sum_m x[m,k]*dy[m,n]; db[n] (+)= sum_m dy[m,n], a row more of dwt for which x is 1.

    Workers own rows of dwt and columns of db; with scratch all compute partial sums, for `finish` to add up.
    """
    M, all_rows = rows * inner, K + 1 if has_db else K
    kc = summands(M, (K + 1) * N)
    if has_ws and worth_splitting(nw, M, kc, (K + 1) * N):
        product(h, M, kc, K, x, 1, K, 0, dy, N, 1, 0, ws, N, ws, N, SET, NONE, 0.0, ws)
        partial_sums(h, w, nw, all_rows, N, M, kc)
    else:
        lo, hi = share(K, w, nw)
        if lo < hi and N > 0:
            d = at(dwt, lo * N)
            product(h, M, kc, hi - lo, at(x, lo), 1, K, 0, dy, N, 1, 0, d, N, d, N, acc, NONE, 0.0, d)
            gemm(h, hi - lo, N, M)
        lo, hi = share(N, w, nw)
        if lo < hi and has_db:
            d = at(db, lo)
            product(h, M, kc, 0, x, 1, K, 0, at(dy, lo), N, 1, 0, d, N, d, N, acc, NONE, 0.0, d)
            gemm(h, 1, hi - lo, M)


@finish
def linear_bwd_w(w, nw, rows, inner, N, K, acc, x: Ptr, dy: Ptr, dwt: Ptr, db: Optional, ws: Optional):  # noqa: F811
    """Partial sums added up in order.  Workers own rows of dwt and columns of db."""
    M, all_rows = rows * inner, K + 1 if has_db else K
    kc = summands(M, (K + 1) * N)
    if has_ws and worth_splitting(nw, M, kc, (K + 1) * N):
        lo, hi = share(K, w, nw)
        add_up(lo * N, hi * N, M, kc, all_rows * N, ws, dwt, acc)
        if has_db:
            lo, hi = share(N, w, nw)
            add_up(lo, hi, M, kc, all_rows * N, at(ws, K * N), db, acc)


@kernel
def linear_bwd_x(w, nw, rows, inner, N, K, act, alpha: Float, wt: Ptr, dy: Ptr, ya: Optional, dx: Ptr, ws: Optional):
    """dx[m,k] = act'(ya[m,k]) * sum_n dy[m,n]*wt[k,n];  ya is the output of the activation that made x.  Rows are shared."""
    lo, hi = share(rows, w, nw)
    lo, m = lo * inner, (hi - lo) * inner
    d, how = at(dx, lo * K), act + DERIVATIVE if act != NONE else NONE
    if m * K > 0:
        product(h, N, KC, m, at(dy, lo * N), N, 1, 0, wt, 1, N, 0, d, K, d, K, SET, how, alpha, at(ya, lo * K))
        gemm(h, m, K, N)


# ---------------------------------------------------------------- matmul
@device
def strides(transposed, rows, cols):
    """Row and column stride of a logical (rows, cols) matrix that may be stored as (cols, rows)."""
    if transposed:
        return 1, rows
    return cols, 1


@kernel
def matmul_fwd(w, nw, G, M, N, K, ta, tb, ab, bb, by, a: Ptr, b: Ptr, y: Ptr, ws: Optional):
    """y[g,m,n] = sum_k a[g,m,k]*b[g,k,n].  Workers own products g, or rows m of the only one."""
    a_rs, a_cs = strides(ta, M, K)
    b_rs, b_cs = strides(tb, K, N)
    lo, hi = share(M if by else G, w, nw)
    i, m, g, last = (lo, hi - lo, 0, 1) if by else (0, M, lo, hi)
    while g < last and m * N > 0:
        ag, bg, yg = at(a, g * ab * M * K + i * a_rs), at(b, g * bb * K * N), at(y, g * M * N + i * N)
        product(h, K, KC, m, ag, a_rs, a_cs, 0, bg, b_rs, b_cs, 0, yg, N, yg, N, SET, NONE, 0.0, yg)
        gemm(h, m, N, K)
        g += 1


@device
def gradient(h, w, nw, over_g, G, m, n, S, a, a_rs, a_ks, a_gs, b, b_ks, b_cs, b_gs, c, acc, ws, has_ws):
    """c[g,i,j] (+)= sum_k A[g,i,k]*B[g,k,j] where workers own products g; else one c, summed over g, of which they own rows."""
    if over_g:
        g, last = share(G, w, nw)
        while g < last and m * n > 0:
            d = at(c, g * m * n)
            product(h, S, KC, m, at(a, g * a_gs), a_rs, a_ks, 0, at(b, g * b_gs), b_ks, b_cs, 0,
                    d, n, d, n, acc, NONE, 0.0, d)  # fmt: skip
            gemm(h, m, n, S)
            g += 1
        return
    kc = summands(G * S, m * n)
    if has_ws and worth_splitting(nw, G * S, kc, m * n):
        product(h, S, kc, m, a, a_rs, a_ks, a_gs, b, b_ks, b_cs, b_gs, ws, n, ws, n, SET, NONE, 0.0, ws)
        partial_sums(h, w, nw, m, n, G * S, kc)
        return
    lo, hi = share(m, w, nw)
    if lo < hi and n > 0:
        d = at(c, lo * n)
        product(h, S, kc, hi - lo, at(a, lo * a_rs), a_rs, a_ks, a_gs, b, b_ks, b_cs, b_gs,
                d, n, d, n, acc, NONE, 0.0, d)  # fmt: skip
        gemm(h, hi - lo, n, G * S)


@device
def gradient_finish(w, nw, over_g, G, m, n, S, c, acc, ws, has_ws):
    """The partial sums of `gradient` added up."""
    kc = summands(G * S, m * n)
    if not over_g and has_ws and worth_splitting(nw, G * S, kc, m * n):
        lo, hi = share(m, w, nw)
        add_up(lo * n, hi * n, G * S, kc, m * n, ws, c, acc)


@kernel
def matmul_bwd_a(w, nw, G, M, N, K, ta, tb, ab, bb, by, acc, b: Ptr, dy: Ptr, da: Ptr, ws: Optional):
    """da[g,m,k] (+)= sum_n dy[g,m,n]*b[g,k,n]; summed over g where a is shared.  da is stored as a is."""
    b_rs, b_cs = strides(tb, K, N)
    over_g = ab and not by
    if ta:
        gradient(
            h, w, nw, over_g, G, K, M, N, b, b_rs, b_cs, bb * K * N, dy, 1, N, M * N, da, acc, ws, has_ws and not by
        )
    else:
        gradient(
            h, w, nw, over_g, G, M, K, N, dy, N, 1, M * N, b, b_cs, b_rs, bb * K * N, da, acc, ws, has_ws and not by
        )


@finish
def matmul_bwd_a(w, nw, G, M, N, K, ta, tb, ab, bb, by, acc, b: Ptr, dy: Ptr, da: Ptr, ws: Optional):  # noqa: F811
    """Partial sums added up in order.  Workers own rows of da."""
    rows, cols = (K, M) if ta else (M, K)
    gradient_finish(w, nw, ab and not by, G, rows, cols, N, da, acc, ws, has_ws and not by)


@kernel
def matmul_bwd_b(w, nw, G, M, N, K, ta, tb, ab, bb, by, acc, a: Ptr, dy: Ptr, db: Ptr, ws: Optional):
    """db[g,k,n] (+)= sum_m a[g,m,k]*dy[g,m,n]; summed over g where b is shared.  db is stored as b is."""
    a_rs, a_cs = strides(ta, M, K)
    over_g = bb and not by
    if tb:
        gradient(h, w, nw, over_g, G, N, K, M, dy, 1, N, M * N, a, a_rs, a_cs, ab * M * K, db, acc, ws, has_ws)
    else:
        gradient(h, w, nw, over_g, G, K, N, M, a, a_cs, a_rs, ab * M * K, dy, N, 1, M * N, db, acc, ws, has_ws)


@finish
def matmul_bwd_b(w, nw, G, M, N, K, ta, tb, ab, bb, by, acc, a: Ptr, dy: Ptr, db: Ptr, ws: Optional):  # noqa: F811
    """Partial sums added up in order.  Workers own rows of db."""
    rows, cols = (N, K) if tb else (K, N)
    gradient_finish(w, nw, bb and not by, G, rows, cols, M, db, acc, ws, has_ws)

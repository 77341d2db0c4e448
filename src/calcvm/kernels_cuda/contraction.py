"""Matrix products: the rows of linear and matmul, all built on the routine of `_gemm`.

If the batch is summed and the result is small, all workers compute partial sums in scratch, and the row's
second phase adds them.
"""

from __future__ import annotations

from calcvm.kernels_cuda._common import Float, Ptr, given, kernel, share
from calcvm.kernels_cuda._cuda import at, device
from calcvm.kernels_cuda._epilogues import NONE
from calcvm.kernels_cuda._gemm import KC, add_up, gemm, partial_sums, summands, worth_splitting
from calcvm.kernels_cuda._product import DERIVATIVE, FROM_INIT, SET, product, see
from calcvm.kernels_cuda._windows import TAPS


@kernel
def linear_fwd(me, rows, inner, N, K, act, alpha: Float, wn, x: Ptr, wt: Ptr, b: Ptr, y: Ptr, ws: Ptr):
    """y[m,n] = act(sum_k x[m,k]*wt[k,n] + b[n]);  x (M,K), wt (K,N), b (N,), y (M,N), M = rows*inner.  Rows are shared."""
    lo, hi = share(me, rows)
    lo, m = lo * inner, (hi - lo) * inner
    yi = at(y, lo * N)
    init, mode = (b, FROM_INIT) if given(me, b) else (yi, SET)
    if m * N > 0:
        product(me.heap, K, KC, m, at(x, lo * K), K, 1, 0, wt, N, 1, 0, yi, N, init, 0, mode, act, alpha, yi)
        gemm(me.heap, m, N, K)


@device
def in_parts(me, M, elems, wn):
    """Summands per part of a result that is a sum over M, and whether all workers compute the parts."""
    kc = summands(M, elems)
    return kc, worth_splitting(me.workers, M, kc, elems, wn)


@device
def rows_added_up(me, M, kc, K, cols, dwt, db, has_db, acc, ws):
    """dwt (K, cols) and db (cols,) from their parts, in which db is an extra row of dwt."""
    elems = (K + 1 if has_db else K) * cols
    lo, hi = share(me, K)
    add_up(lo * cols, hi * cols, M, kc, elems, ws, dwt, acc)
    if has_db:
        lo, hi = share(me, cols)
        add_up(lo, hi, M, kc, elems, at(ws, K * cols), db, acc)


@device
def over_rows(me, seen, G, K, C, M, N, x, dy, dwt, db, has_db, acc, ws, wn):
    """dwt[k,g,n] (+)= sum_m x[m,g,k]*dy[m,g,n]; db[g,n] (+)= sum_m dy[m,g,n]: an extra row of dwt, for x = 1.

    M pixels of G groups of C channels; ``seen``: k is a tap and a channel of the described window.  Returns the elements of
    ``ws`` that it uses.
    """
    h, cols, all_rows = me.heap, G * N, K + 1 if has_db else K
    kc, split = in_parts(me, M, (K + 1) * cols, wn)
    if me.phase == 1:
        if split:
            rows_added_up(me, M, kc, K, cols, dwt, db, has_db, acc, ws)
    else:
        lo, hi = (0, K) if split else share(me, K)
        g = 0
        while g < G and (split or lo < hi) and N > 0:
            a = at(x, g * C if seen else lo)
            c = at(ws if split else dwt, lo * cols + g * N)
            product(h, M, kc, hi - lo, a, 1, G * C, 0, at(dy, g * N), cols, 1, 0, c, cols, c, cols,
                    SET if split else acc, NONE, 0.0, c)  # fmt: skip
            if seen:
                see(h, TAPS, lo)
            if split:
                partial_sums(me, all_rows, N, M, kc)
            else:
                gemm(h, hi - lo, N, M)
            g += 1
        lo, hi = share(me, cols)
        if lo < hi and has_db and not split:
            c = at(db, lo)
            product(h, M, kc, 0, dy, 1, 0, 0, at(dy, lo), cols, 1, 0, c, cols, c, cols, acc, NONE, 0.0, c)
            gemm(h, 1, hi - lo, M)
    return (M + kc - 1) // kc * all_rows * cols if split else 0


@kernel
def linear_bwd_w(me, phases, rows, inner, N, K, acc, wn, x: Ptr, dy: Ptr, dwt: Ptr, db: Ptr, ws: Ptr):
    """dwt[k,n] (+)= sum_m x[m,k]*dy[m,n]; db[n] (+)= sum_m dy[m,n], an extra row of dwt for x = 1.

    Workers own rows of dwt and columns of db; with scratch, all compute partial sums, which the second phase adds.
    """
    over_rows(me, False, 1, K, K, rows * inner, N, x, dy, dwt, db, given(me, db), acc, ws, wn)


@kernel
def linear_bwd_x(me, rows, inner, N, K, act, alpha: Float, wn, wt: Ptr, dy: Ptr, ya: Ptr, dx: Ptr, ws: Ptr):
    """dx[m,k] = act'(ya[m,k]) * sum_n dy[m,n]*wt[k,n];  ya is the output of the activation that computed x.  Rows are shared."""
    lo, hi = share(me, rows)
    lo, m = lo * inner, (hi - lo) * inner
    d, how = at(dx, lo * K), act + DERIVATIVE if act != NONE else NONE
    ya = at(ya, lo * K) if given(me, ya) else d
    if m * K > 0:
        product(me.heap, N, KC, m, at(dy, lo * N), N, 1, 0, wt, 1, N, 0, d, K, d, K, SET, how, alpha, ya)
        gemm(me.heap, m, K, N)


# ---------------------------------------------------------------- matmul
@device
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
    i, m, g, last = (lo, hi - lo, 0, 1) if by else (0, M, lo, hi)
    while g < last and m * N > 0:
        ag, bg, yg = at(a, g * ab * M * K + i * a_rs), at(b, g * bb * K * N), at(y, g * M * N + i * N)
        product(me.heap, K, KC, m, ag, a_rs, a_cs, 0, bg, b_rs, b_cs, 0, yg, N, yg, N, SET, NONE, 0.0, yg)
        gemm(me.heap, m, N, K)
        g += 1


@device
def gradient(me, over_g, G, m, n, S, a, a_rs, a_ks, a_gs, b, b_ks, b_cs, b_gs, c, acc, ws, wn):
    """c[g,i,j] (+)= sum_k A[g,i,k]*B[g,k,j] if workers own products g; else one c, summed over g, whose rows they own."""
    kc = summands(G * S, m * n)
    split = not over_g and worth_splitting(me.workers, G * S, kc, m * n, wn)
    if me.phase == 1:
        if split:
            lo, hi = share(me, m)
            add_up(lo * n, hi * n, G * S, kc, m * n, ws, c, acc)
    elif over_g:
        g, last = share(me, G)
        while g < last and m * n > 0:
            d = at(c, g * m * n)
            product(me.heap, S, KC, m, at(a, g * a_gs), a_rs, a_ks, 0, at(b, g * b_gs), b_ks, b_cs, 0,
                    d, n, d, n, acc, NONE, 0.0, d)  # fmt: skip
            gemm(me.heap, m, n, S)
            g += 1
    elif split:
        product(me.heap, S, kc, m, a, a_rs, a_ks, a_gs, b, b_ks, b_cs, b_gs, ws, n, ws, n, SET, NONE, 0.0, ws)
        partial_sums(me, m, n, G * S, kc)
    else:
        lo, hi = share(me, m)
        if lo < hi and n > 0:
            d = at(c, lo * n)
            product(me.heap, S, kc, hi - lo, at(a, lo * a_rs), a_rs, a_ks, a_gs, b, b_ks, b_cs, b_gs,
                    d, n, d, n, acc, NONE, 0.0, d)  # fmt: skip
            gemm(me.heap, hi - lo, n, G * S)


@kernel
def matmul_bwd_a(me, phases, G, M, N, K, ta, tb, ab, bb, by, acc, wn, b: Ptr, dy: Ptr, da: Ptr, ws: Ptr):
    """da[g,m,k] (+)= sum_n dy[g,m,n]*b[g,k,n]; summed over g if a is shared.  da is stored like a."""
    b_rs, b_cs = strides(tb, K, N)
    over_g = ab and not by
    if ta:
        gradient(me, over_g, G, K, M, N, b, b_rs, b_cs, bb * K * N, dy, 1, N, M * N, da, acc, ws, wn)
    else:
        gradient(me, over_g, G, M, K, N, dy, N, 1, M * N, b, b_cs, b_rs, bb * K * N, da, acc, ws, wn)


@kernel
def matmul_bwd_b(me, phases, G, M, N, K, ta, tb, ab, bb, by, acc, wn, a: Ptr, dy: Ptr, db: Ptr, ws: Ptr):
    """db[g,k,n] (+)= sum_m a[g,m,k]*dy[g,m,n]; summed over g if b is shared.  db is stored like b."""
    a_rs, a_cs = strides(ta, M, K)
    over_g = bb and not by
    if tb:
        gradient(me, over_g, G, N, K, M, dy, 1, N, M * N, a, a_rs, a_cs, ab * M * K, db, acc, ws, wn)
    else:
        gradient(me, over_g, G, K, N, M, a, a_cs, a_rs, ab * M * K, dy, N, 1, M * N, db, acc, ws, wn)

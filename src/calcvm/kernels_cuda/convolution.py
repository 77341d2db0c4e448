"""Convolution: matrix products whose rows are pixels seen through a window (`_windows`), and a loop for narrow groups."""

from __future__ import annotations

from calcvm.kernels_cuda._common import Float, Ptr, given, kernel, share
from calcvm.kernels_cuda._cuda import at, device, like, sync, thread, threads
from calcvm.kernels_cuda._epilogues import NONE, finish, finish_slope
from calcvm.kernels_cuda._gemm import KC, gemm
from calcvm.kernels_cuda._product import FROM_INIT, SET, product, see
from calcvm.kernels_cuda._windows import PIXELS, image, lies, pixel_at, place, result_at, tap_at, window
from calcvm.kernels_cuda.contraction import in_parts, over_rows, rows_added_up

NARROW = 8  # columns of a group below which results are computed one by one


@device
def through(h, first, m, G, C, F, S, K, L, W, x, wt, w_gs, w_cs, w_fs, b, has_b, y, y_rs):
    """y[p,g,f] = b[g,f] + sum_k,c x[tap k of p, g,c] * wt[k,g,c,f], for m pixels p of a window's grid from the first.

    G groups of C channels, to F each.  S consecutive summands of weights are contiguous.  y's rows are ``y_rs`` apart; if it
    is 0, the window places them.
    """
    if G > 1 and F < NARROW:
        one_by_one(h, first, m, G, C, F, K, L, W, x, wt, w_gs, w_cs, w_fs, b, has_b, y, y_rs)
        return
    g = 0
    while g < G and m * F > 0:
        c = at(y, g * F)
        init, mode = (at(b, g * F), FROM_INIT) if has_b else (c, SET)
        product(h, S, KC, m, at(x, g * C), G * C, 1, C, at(wt, g * w_gs), w_cs, w_fs, 0, c, y_rs, init, 0, mode, NONE,
                0.0, c)  # fmt: skip
        see(h, PIXELS, first)
        gemm(h, m, F, K[0] * K[1] * K[2] * C)
        g += 1


@device
def one_by_one(h, first, m, G, C, F, K, L, W, x, wt, w_gs, w_cs, w_fs, b, has_b, y, y_rs):
    """The same, one thread per result."""
    sync()
    size, i = image(h), thread()
    while i < m * G * F:
        row, col = i // (G * F), i % (G * F)
        g, f = col // F, col % F
        pixel = pixel_at(h, first + row)
        total = b[col] if has_b else like(x, 0)
        k0 = 0
        while k0 < K[0]:
            k1 = 0
            while k1 < K[1]:
                k2 = 0
                while k2 < K[2]:
                    src = lies(size, True, pixel, (g * C, k0 * L[0], k1 * L[1], k2 * L[2]))
                    if src >= 0:
                        w = k0 * W[0] + k1 * W[1] + k2 * W[2] + g * w_gs + f * w_fs
                        c = 0
                        while c < C:
                            total += x[src + c] * wt[w + c * w_cs]
                            c += 1
                    k2 += 1
                k1 += 1
            k0 += 1
        y[(row * y_rs if y_rs != 0 else result_at(h, pixel)) + col] = total
        i += threads()
    sync()


# ---------------------------------------------------------------- forward
@device
def forward(me, rows, inner, G, C, F, I, O, K, S, P, L, x, wt, b, has_b, y):
    """The convolution of x; workers own rows of y."""
    lo, hi = share(me, rows)
    lo, m, cols = lo * inner, (hi - lo) * inner, G * F
    W = K[1] * K[2] * C * cols, K[2] * C * cols, C * cols
    window(me.heap, C, G * C, I, O, K, S, P, L, W, (0, 0, 0, 0))
    through(
        me.heap, lo, m, G, C, F, K[0] * K[1] * K[2] * C, K, L, W, x, wt, F, cols, 1, b, has_b, at(y, lo * cols), cols
    )


@kernel
def conv_fwd(
    me, rows, inner, in_rows, in_inner, N, I0, I1, I2, O0, O1, O2, G, C, F, K0, K1, K2, S0, S1, S2, P0, P1, P2, L0, L1,
    L2, act, alpha: Float, wn, x: Ptr, wt: Ptr, b: Ptr, y: Ptr, mean: Ptr, factor: Ptr, offset: Ptr, other: Ptr, ws: Ptr,
):  # fmt: skip
    """y[n,o,f] = sum_k,c x[n,o*S+k*L-P,c]*wt[k,c,f] + b[f].  Workers own rows of y."""
    I, O, K, S, P, L = (I0, I1, I2), (O0, O1, O2), (K0, K1, K2), (S0, S1, S2), (P0, P1, P2), (L0, L1, L2)
    forward(me, rows, inner, G, C, F, I, O, K, S, P, L, x, wt, b, given(me, b), y)
    lo, hi = share(me, rows)
    n = inner * G * F
    finish(me, lo * n, hi * n, G * F, y, act, alpha, mean, factor, offset, other)


# ---------------------------------------------------------------- gradient of weights
@device
def of_weight(h, e, first, last, n, C, F, cols, x, dy):
    """The sum over pixels [first, last) for element e, in n rows of weights and one row of biases."""
    row, col, size, total = e // cols, e % cols, image(h), like(x, 0)
    c, k0, k1, k2 = tap_at(h, row)
    tap = c + col // F * C, k0, k1, k2
    while first < last:
        src = lies(size, True, pixel_at(h, first), tap) if row < n else 0
        if src >= 0:
            total += (x[src] if row < n else like(x, 1)) * dy[first * cols + col]
        first += 1
    return total


@device
def of_own_weights(h, lo, hi, off, M, kc, n, C, F, cols, x, dy, to, acc):
    """to[i] (+)= the sum for element off + i, part by part, for i in [lo, hi)."""
    i = lo + thread()
    while i < hi:
        total = of_weight(h, off + i, 0, min(kc, M), n, C, F, cols, x, dy)
        if acc:
            total = to[i] + total
        first = kc
        while first < M:
            total += of_weight(h, off + i, first, min(first + kc, M), n, C, F, cols, x, dy)
            first += kc
        to[i] = total
        i += threads()


@device
def of_weights(me, M, G, C, F, I, O, K, S, P, L, x, dy, dwt, db, has_db, acc, ws, wn):
    """The gradient of a convolution's weights and bias, by `over_rows` or one by one."""
    h, n, cols = me.heap, K[0] * K[1] * K[2] * C, G * F
    window(h, C, G * C, I, O, K, S, P, L, (0, 0, 0), (0, 0, 0, 0))
    if G == 1 or F >= NARROW:
        return over_rows(me, True, G, n, C, M, F, x, dy, dwt, db, has_db, acc, ws, wn)
    sync()
    all_rows = n + 1 if has_db else n
    kc, split = in_parts(me, M, (n + 1) * cols, wn)
    parts, elems = (M + kc - 1) // kc, all_rows * cols
    if me.phase == 1:
        if split:
            rows_added_up(me, M, kc, n, cols, dwt, db, has_db, acc, ws)
    elif split:
        i = me.worker * threads() + thread()
        while i < parts * elems:
            first = i // elems * kc
            ws[i] = of_weight(h, i % elems, first, min(first + kc, M), n, C, F, cols, x, dy)
            i += me.workers * threads()
    else:
        lo, hi = share(me, n)
        of_own_weights(h, lo * cols, hi * cols, 0, M, kc, n, C, F, cols, x, dy, dwt, acc)
        if has_db:
            lo, hi = share(me, cols)
            of_own_weights(h, lo, hi, n * cols, M, kc, n, C, F, cols, x, dy, db, acc)
    return parts * elems if split else 0


@kernel
def conv_bwd_w(
    me, phases, rows, inner, in_rows, in_inner, N, I0, I1, I2, O0, O1, O2, G, C, F, K0, K1, K2, S0, S1, S2, P0, P1, P2,
    L0, L1, L2, acc, wn, x: Ptr, dy: Ptr, dwt: Ptr, db: Ptr, ws: Ptr,
):  # fmt: skip
    """dwt[k,c,f] (+)= sum_n,o x[n,o*S+k*L-P,c]*dy[n,o,f]; db[f] (+)= sum_n,o dy[n,o,f].  As linear_bwd_w."""
    I, O, K, S, P, L = (I0, I1, I2), (O0, O1, O2), (K0, K1, K2), (S0, S1, S2), (P0, P1, P2), (L0, L1, L2)
    of_weights(me, rows * inner, G, C, F, I, O, K, S, P, L, x, dy, dwt, db, given(me, db), acc, ws, wn)


# ---------------------------------------------------------------- gradient of the input
@device
def taps_to(r, K, S, P, L):
    """The taps along an axis that lead from places of remainder r by the stride: the first, their distance, their number."""
    k, step = 0, 1
    while k < K and (r + P - k * L) % S != 0:
        k += 1
    while step < K and step * L % S != 0:
        step += 1
    return k, step, (K - k + step - 1) // step


@device
def below(p, r, I, S, J):
    """The number of pixels of a class, whose grid is J, before pixel p."""
    n, i0, i1, i2 = place(p, I)
    c0, c1, c2 = (i0 - r[0] + S[0] - 1) // S[0], (i1 - r[1] + S[1] - 1) // S[1], (i2 - r[2] + S[2] - 1) // S[2]
    if i1 % S[1] != r[1]:
        c2 = 0
    if i0 % S[0] != r[0]:
        c1, c2 = 0, 0
    return ((n * J[0] + c0) * J[1] + c1) * J[2] + c2


@device
def backward(me, in_rows, in_inner, G, C, F, I, O, K, S, P, L, dy, wt, b, has_b, dx):
    """The transpose of a convolution; workers own rows of dx.

    Pixels with equal remainders by the strides form a class: the same taps lead to them, so each class is a convolution of stride 1.
    """
    lo, hi = share(me, in_rows)
    lo, hi, ahead = lo * in_inner, hi * in_inner, C * G * F
    to = I[0] * I[1] * I[2] * G * C, S[0] * I[1] * I[2] * G * C, S[1] * I[2] * G * C, S[2] * G * C
    classes = min(S[0], I[0]), min(S[1], I[1]), min(S[2], I[2])
    of = 0
    while of < classes[0] * classes[1] * classes[2] and lo < hi:
        _, r0, r1, r2 = place(of, classes)
        k0, d0, T0 = taps_to(r0, K[0], S[0], P[0], L[0])
        k1, d1, T1 = taps_to(r1, K[1], S[1], P[1], L[1])
        k2, d2, T2 = taps_to(r2, K[2], S[2], P[2], L[2])
        J = (I[0] - r0 + S[0] - 1) // S[0], (I[1] - r1 + S[1] - 1) // S[1], (I[2] - r2 + S[2] - 1) // S[2]
        T, W = (T0, T1, T2), (d0 * K[1] * K[2] * ahead, d1 * K[2] * ahead, d2 * ahead)
        before = (k0 * L[0] - r0 - P[0]) // S[0], (k1 * L[1] - r1 - P[1]) // S[1], (k2 * L[2] - r2 - P[2]) // S[2]
        apart = -(d0 * L[0] // S[0]), -(d1 * L[1] // S[1]), -(d2 * L[2] // S[2])
        window(me.heap, F, G * F, O, J, T, (1, 1, 1), before, apart, W, to)
        first, last = below(lo, (r0, r1, r2), I, S, J), below(hi, (r0, r1, r2), I, S, J)
        w = at(wt, ((k0 * K[1] + k1) * K[2] + k2) * ahead)
        c = at(dx, ((r0 * I[1] + r1) * I[2] + r2) * G * C)
        through(me.heap, first, last - first, G, F, C, F, T, apart, W, dy, w, F, 1, G * F, b, has_b, c, 0)
        of += 1


@kernel
def conv_bwd_x(
    me, rows, inner, in_rows, in_inner, N, I0, I1, I2, O0, O1, O2, G, C, F, K0, K1, K2, S0, S1, S2, P0, P1, P2, L0, L1,
    L2, act, alpha: Float, wn, wt: Ptr, dy: Ptr, dx: Ptr, other: Ptr, ya: Ptr, ws: Ptr,
):  # fmt: skip
    """dx[n,i,c] = sum_k,f dy[n,(i+P-k*L)/S,f]*wt[k,c,f].  Workers own rows of dx."""
    I, O, K, S, P, L = (I0, I1, I2), (O0, O1, O2), (K0, K1, K2), (S0, S1, S2), (P0, P1, P2), (L0, L1, L2)
    backward(me, in_rows, in_inner, G, C, F, I, O, K, S, P, L, dy, wt, dx, False, dx)
    lo, hi = share(me, in_rows)
    n = in_inner * G * C
    finish_slope(me, lo * n, hi * n, dx, act, alpha, other, ya)


# ---------------------------------------------------------------- transposed: the convolution from y to x
@kernel
def conv_transpose_fwd(
    me, rows, inner, in_rows, in_inner, N, I0, I1, I2, O0, O1, O2, G, C, F, K0, K1, K2, S0, S1, S2, P0, P1, P2, L0, L1,
    L2, act, alpha: Float, wn, x: Ptr, wt: Ptr, b: Ptr, y: Ptr, mean: Ptr, factor: Ptr, offset: Ptr, other: Ptr, ws: Ptr,
):  # fmt: skip
    """y[n,i,c] = sum_k,f x[n,(i+P-k*L)/S,f]*wt[k,c,f] + b[c].  Workers own rows of y."""
    I, O, K, S, P, L = (I0, I1, I2), (O0, O1, O2), (K0, K1, K2), (S0, S1, S2), (P0, P1, P2), (L0, L1, L2)
    backward(me, in_rows, in_inner, G, C, F, I, O, K, S, P, L, x, wt, b, given(me, b), y)
    lo, hi = share(me, in_rows)
    n = in_inner * G * C
    finish(me, lo * n, hi * n, G * C, y, act, alpha, mean, factor, offset, other)


@kernel
def conv_transpose_bwd_w(
    me, phases, rows, inner, in_rows, in_inner, N, I0, I1, I2, O0, O1, O2, G, C, F, K0, K1, K2, S0, S1, S2, P0, P1, P2,
    L0, L1, L2, acc, wn, x: Ptr, dy: Ptr, dwt: Ptr, db: Ptr, ws: Ptr,
):  # fmt: skip
    """dwt[k,c,f] (+)= sum_n,o dy[n,o*S+k*L-P,c]*x[n,o,f]; db[c] (+)= sum_n,i dy[n,i,c].  As linear_bwd_w."""
    I, O, K, S, P, L = (I0, I1, I2), (O0, O1, O2), (K0, K1, K2), (S0, S1, S2), (P0, P1, P2), (L0, L1, L2)
    used = of_weights(me, rows * inner, G, C, F, I, O, K, S, P, L, dy, x, dwt, db, False, acc, ws, wn)
    if given(me, db):
        over_rows(me, False, 1, 0, 0, in_rows * in_inner, G * C, dy, dy, dwt, db, True, acc, at(ws, used), wn - used)


@kernel
def conv_transpose_bwd_x(
    me, rows, inner, in_rows, in_inner, N, I0, I1, I2, O0, O1, O2, G, C, F, K0, K1, K2, S0, S1, S2, P0, P1, P2, L0, L1,
    L2, act, alpha: Float, wn, wt: Ptr, dy: Ptr, dx: Ptr, other: Ptr, ya: Ptr, ws: Ptr,
):  # fmt: skip
    """dx[n,o,f] = sum_k,c dy[n,o*S+k*L-P,c]*wt[k,c,f].  Workers own rows of dx."""
    I, O, K, S, P, L = (I0, I1, I2), (O0, O1, O2), (K0, K1, K2), (S0, S1, S2), (P0, P1, P2), (L0, L1, L2)
    forward(me, rows, inner, G, C, F, I, O, K, S, P, L, dy, wt, dx, False, dx)
    lo, hi = share(me, rows)
    n = inner * G * F
    finish_slope(me, lo * n, hi * n, dx, act, alpha, other, ya)

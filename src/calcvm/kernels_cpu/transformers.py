"""Attention: blocks of QUERIES rows of scores meet at most KEYS keys at a time, and sums over keys are made online.

Queries, keys and values are read as linear layers leave them, with heads side by side; only the keys of one head (in the backward
also its values) are turned once, into scratch.  Heads of all samples are shared, in the backward groups of heads.
"""

from __future__ import annotations

from operator import add

from calcvm.kernels_cpu import _formulas as F
from calcvm.kernels_cpu._common import Float, Ptr, at, given, kernel, like, njit, share, trap
from calcvm.kernels_cpu._gemm import gemm
from calcvm.kernels_cpu._math import each, elementwise, exp, fill, log, loop_of, rdot, reduction, rtop, scale
from calcvm.kernels_cpu._simd import transpose

QUERIES, KEYS, FEW = 24, 256, 128  # of a block of scores, with twice as many queries for FEW keys: as in ops.transformers
BAD_LENGTH = 1  # trap code
NONE = float("-inf")

turned = transpose()
# weights(n, x, y, a, m): y = exp(a*x - m), and its sum
weights = reduction(add, 0.0, lambda x, a, m: F.exp(x * a - m), "v", 2, store=True)
bend = elementwise(lambda x, a, cap: cap * F.tanh(x * a / cap), "v", "ff")
bend_and_add = elementwise(lambda x, b, a, cap: cap * F.tanh(x * a / cap) + b, "vv", "ff")
times_and_add = elementwise(lambda x, b, a: x * a + b, "vv", "f")


def _slopes(bent: bool, biased: bool):  # type: ignore[no-untyped-def]
    """A loop ``slopes(n, x, dp, [bias], p, s, a, lse, own, cap)``: weights p, and gradients s of the products x."""

    def formula(x, dp, *more):  # type: ignore[no-untyped-def]
        a, lse, own, cap = more[-4:]
        z = x * a
        t = F.tanh(z / cap) if bent else z
        p = F.exp((cap * t if bent else z) + more[0] - lse if biased else (cap * t if bent else z) - lse)
        s = p * (dp - own) * a
        return p, s * (1 - t * t) if bent else s

    reads = "vvv" if biased else "vv"
    return loop_of("p" * (len(reads) + 2) + "ffff", each(formula, reads, writes=2))


plain, biased_alone, bent_alone, bent_and_biased = (_slopes(*how) for how in ((0, 0), (0, 1), (1, 0), (1, 1)))


# ---------------------------------------------------------------- what a query sees
@njit(inline=True)
def first_key(i, window):
    return max(i + 1 - window, 0) if window > 0 else 0


@njit(inline=True)
def end_of_keys(i, length, causal):
    return min(i + 1, length) if causal else length


@njit(inline=True)
def block_of(S):
    """The stride of turned keys, the keys of a block, and its queries."""
    stride = (S + 15) // 16 * 16
    return stride, min(KEYS, stride), 2 * QUERIES if S <= FEW else QUERIES


@njit(inline=True)
def outside(row, lo, hi, n):
    """Weights of 0 for what a query does not see of a block."""
    if lo > 0:
        fill(lo, row, like(row, 0))
    if hi < n:
        fill(n - hi, at(row, hi), like(row, 0))


# ---------------------------------------------------------------- forward
@njit
def head_forward(
    T, S, D, length, causal, window, a, cap, q, qs, k, v, ks, bias, biased, y, ys, lse, keep, ws
):  # fmt: skip
    """y of one head of one sample; rows of q, of k and v, and of y are qs, ks and ys apart."""
    stride, most, tall = block_of(S)
    turns, x = ws, at(ws, D * stride)
    top, total = at(x, tall * most), at(x, tall * most + tall)
    turned(length, D, k, ks, turns, stride)
    for i in range(0, T, tall):
        n = min(tall, T - i)
        fill(n, top, like(y, NONE))
        fill(n, total, like(y, 0))
        start, stop = first_key(i, window), end_of_keys(i + n - 1, length, causal)
        yi = at(y, i * ys)
        for j in range(start, stop, most):
            w = min(most, stop - j)
            gemm(n, w, D, at(q, i * qs), qs, 1, at(turns, j), stride, 1, x, most, x, most, 0, ws, 0)
            for r in range(n):
                row = at(x, r * most)
                lo, hi = max(first_key(i + r, window) - j, 0), min(end_of_keys(i + r, length, causal) - j, w)
                by, new = a, like(y, NONE)
                if lo < hi:
                    seen = at(row, lo)
                    if biased:
                        own = at(bias, (i + r) * S + j + lo)
                        if cap > 0:
                            bend_and_add(hi - lo, seen, own, seen, a, cap)
                        else:
                            times_and_add(hi - lo, seen, own, seen, a)
                        by = like(y, 1)
                    elif cap > 0:
                        bend(hi - lo, seen, seen, a, cap)
                        by = like(y, 1)
                    new = rtop(hi - lo, seen) * by
                    new = top[r] if top[r] > new else new
                if lo >= hi or new == like(y, NONE):  # no key, or none with a weight
                    fill(w, row, like(y, 0))
                    continue
                added = weights(hi - lo, seen, seen, by, new)
                if top[r] != new and j > start:
                    less = exp(top[r] - new)
                    total[r] *= less
                    scale(D, at(yi, r * ys), at(yi, r * ys), less)
                total[r] += added
                top[r] = new
                outside(row, lo, hi, w)
            gemm(n, D, w, x, most, 1, at(v, j * ks), ks, 1, yi, ys, yi, ys, 1 if j > start else 0, ws, 0)
        for r in range(n):
            nothing = total[r] == like(y, 0)
            if nothing:
                fill(D, at(yi, r * ys), like(y, 0))
            else:
                scale(D, at(yi, r * ys), at(yi, r * ys), like(y, 1) / total[r])
            if keep:
                lse[i + r] = like(y, 0) if nothing else top[r] + log(total[r])


@njit(inline=True)
def length_of(me, lengths, n, S, masked):
    """The keys of a sample; a length outside 0..S traps (and 0 is safe)."""
    if not masked:
        return S
    length = lengths[n]
    if length >= 0 and length <= S:
        whole = int(length)
        if whole == length:
            return whole
    trap(me, BAD_LENGTH)
    return 0


@njit(inline=True)
def forward(me, sizes, masks, wn, q, qs, k, v, ks, lengths, bias, y, lse, ws):
    """Of all heads; q, k and v begin with the first head of the first sample."""
    (N, T, S, G, R, D), (masked, causal, window, biased, bn, bh, a, cap) = sizes, masks
    H = G * R
    lo, hi = share(me, N * H)
    for u in range(lo, hi):
        n, h = u // H, u % H
        length = length_of(me, lengths, n, S, masked)
        kv = n * S * ks + h // R * D
        head_forward(
            T, S, D, length, causal, window, like(y, a), like(y, cap), at(q, n * T * qs + h * D), qs, at(k, kv), at(v, kv), ks,
            at(bias, (n * bn * (H if bh else 1) + h * bh) * T * S), biased, at(y, n * T * H * D + h * D), H * D,
            at(lse, u * T), given(me, lse), at(ws, me.worker * wn),
        )  # fmt: skip


@kernel
def attention_fwd(
    me, N, T, S, G, R, D, masked, causal, window, biased, bn, bh, scale: Float, cap: Float, wn, q: Ptr, k: Ptr, v: Ptr,
    lengths: Ptr.index, bias: Ptr, y: Ptr, lse: Ptr, ws: Ptr,
):  # fmt: skip
    """y = softmax(scale*q k^T + bias) v.  q, y (N, T, G*R*D), k, v (N, S, G*D), lse (N, G*R, T).  Heads are shared."""
    sizes, masks = (N, T, S, G, R, D), (masked, causal, window, biased, bn, bh, scale, cap)
    forward(me, sizes, masks, wn, q, G * R * D, k, v, G * D, lengths, bias, y, lse, ws)


@kernel
def attention_packed_fwd(
    me, N, T, G, R, D, masked, causal, window, biased, bn, bh, scale: Float, cap: Float, wn, qkv: Ptr, lengths: Ptr.index, bias: Ptr,
    y: Ptr, lse: Ptr, ws: Ptr,
):  # fmt: skip
    """The same for qkv (N, T, (R + 2)*G*D): heads of q, then of k, then of v."""
    sizes, masks = (N, T, T, G, R, D), (masked, causal, window, biased, bn, bh, scale, cap)
    k, row = at(qkv, G * R * D), (R + 2) * G * D
    forward(me, sizes, masks, wn, qkv, row, k, at(k, G * D), row, lengths, bias, y, lse, ws)


# ---------------------------------------------------------------- backward
@njit(inline=True)
def add_rows(new, n, m, D, p, ps, x, xs, d, ds, ws):
    """d[:n] (+)= p^T x for m rows of p and x; the first ``new`` rows of d hold sums, to which is added."""
    if new > 0:
        gemm(new, D, m, p, 1, ps, x, xs, 1, d, ds, d, ds, 1, ws, 0)
    gemm(n - new, D, m, at(p, new), 1, ps, x, xs, 1, at(d, new * ds), ds, d, ds, 0, ws, 0)


@njit
def group_backward(
    T, S, D, R, length, causal, window, a, cap, q, qs, k, v, ks, bias, apart, biased, y, dy, ys, lse, dq, dk, dv, wanted, ws
):  # fmt: skip
    """dq, dk and dv of the heads of one group, one after the other; gradients lie as the values do."""
    has_q, has_k, has_v = wanted
    stride, most, tall = block_of(S)
    turned_k, turned_v = ws, at(ws, D * stride)
    x = at(ws, 2 * D * stride)
    dp, own = at(x, tall * most), at(x, 2 * tall * most)
    turned(length, D, k, ks, turned_k, stride)
    turned(length, D, v, ks, turned_v, stride)
    met = 0  # keys before this one have sums
    for h in range(R):
        for i in range(0, T, tall):
            n = min(tall, T - i)
            qi, yi, dyi, dqi = (
                at(q, i * qs + h * D),
                at(y, i * ys + h * D),
                at(dy, i * ys + h * D),
                at(dq, i * qs + h * D),
            )
            for r in range(n):
                own[r] = rdot(D, at(yi, r * ys), at(dyi, r * ys))
            start, stop = first_key(i, window), end_of_keys(i + n - 1, length, causal)
            if has_q and start >= stop:
                for r in range(n):
                    fill(D, at(dqi, r * qs), like(y, 0))
            for j in range(start, stop, most):
                w = min(most, stop - j)
                gemm(n, w, D, qi, qs, 1, at(turned_k, j), stride, 1, x, most, x, most, 0, ws, 0)
                gemm(n, w, D, dyi, ys, 1, at(turned_v, j), stride, 1, dp, most, dp, most, 0, ws, 0)
                for r in range(n):
                    lo, hi = max(first_key(i + r, window) - j, 0), min(end_of_keys(i + r, length, causal) - j, w)
                    lo = min(lo, w)
                    hi = max(lo, hi)
                    p, s, l = at(x, r * most + lo), at(dp, r * most + lo), lse[h * T + i + r]
                    if biased:
                        b = at(bias, (h * apart + i + r) * S + j + lo)
                        if cap > 0:
                            bent_and_biased(hi - lo, p, s, b, p, s, a, l, own[r], cap)
                        else:
                            biased_alone(hi - lo, p, s, b, p, s, a, l, own[r], cap)
                    elif cap > 0:
                        bent_alone(hi - lo, p, s, p, s, a, l, own[r], cap)
                    else:
                        plain(hi - lo, p, s, p, s, a, l, own[r], cap)
                    outside(at(x, r * most), lo, hi, w)
                    outside(at(dp, r * most), lo, hi, w)
                new = max(min(met - j, w), 0)
                if has_v:
                    add_rows(new, w, n, D, x, most, dyi, ys, at(dv, j * ks), ks, ws)
                if has_k:
                    add_rows(new, w, n, D, dp, most, qi, qs, at(dk, j * ks), ks, ws)
                if has_q:
                    gemm(n, D, w, dp, most, 1, at(k, j * ks), ks, 1, dqi, qs, dqi, qs, 1 if j > start else 0, ws, 0)
            met = max(met, stop)
    for j in range(met, S):
        if has_k:
            fill(D, at(dk, j * ks), like(y, 0))
        if has_v:
            fill(D, at(dv, j * ks), like(y, 0))


@njit(inline=True)
def backward(me, sizes, masks, wn, q, qs, k, v, ks, lengths, bias, y, lse, dy, dq, dk, dv, wanted, ws):
    """Of all heads; q, k and v and their gradients begin with the first head of the first sample."""
    (N, T, S, G, R, D), (masked, causal, window, biased, bn, bh, a, cap) = sizes, masks
    H = G * R
    lo, hi = share(me, N * G)
    for u in range(lo, hi):
        n, g = u // G, u % G
        length = length_of(me, lengths, n, S, masked)
        of_q, kv, of_y = n * T * qs + g * R * D, n * S * ks + g * D, n * T * H * D + g * R * D
        group_backward(
            T, S, D, R, length, causal, window, like(y, a), like(y, cap), at(q, of_q), qs, at(k, kv), at(v, kv), ks,
            at(bias, (n * bn * (H if bh else 1) + g * R * bh) * T * S), bh * T, biased, at(y, of_y), at(dy, of_y),
            H * D, at(lse, u * R * T), at(dq, of_q), at(dk, kv), at(dv, kv), wanted, at(ws, me.worker * wn),
        )  # fmt: skip


@kernel
def attention_bwd(
    me, N, T, S, G, R, D, masked, causal, window, biased, bn, bh, scale: Float, cap: Float, wn, q: Ptr, k: Ptr, v: Ptr,
    lengths: Ptr.index, bias: Ptr, y: Ptr, lse: Ptr, dy: Ptr, dq: Ptr, dk: Ptr, dv: Ptr, ws: Ptr,
):  # fmt: skip
    """dq, dk and dv, from scores that are computed again.  Groups of heads are shared."""
    sizes, masks = (N, T, S, G, R, D), (masked, causal, window, biased, bn, bh, scale, cap)
    wanted = given(me, dq), given(me, dk), given(me, dv)
    backward(me, sizes, masks, wn, q, G * R * D, k, v, G * D, lengths, bias, y, lse, dy, dq, dk, dv, wanted, ws)


@kernel
def attention_packed_bwd(
    me, N, T, G, R, D, masked, causal, window, biased, bn, bh, scale: Float, cap: Float, wn, qkv: Ptr, lengths: Ptr.index, bias: Ptr,
    y: Ptr, lse: Ptr, dy: Ptr, dqkv: Ptr, ws: Ptr,
):  # fmt: skip
    """dqkv, in the order of qkv (N, T, (R + 2)*G*D)."""
    sizes, masks, wanted = (N, T, T, G, R, D), (masked, causal, window, biased, bn, bh, scale, cap), (True, True, True)
    k, dk, row = at(qkv, G * R * D), at(dqkv, G * R * D), (R + 2) * G * D
    v, dv = at(k, G * D), at(dk, G * D)
    backward(me, sizes, masks, wn, qkv, row, k, v, row, lengths, bias, y, lse, dy, dqkv, dk, dv, wanted, ws)

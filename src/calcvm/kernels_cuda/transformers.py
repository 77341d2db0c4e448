"""Attention: a warp per query, in the backward also one per key; its lanes take keys (or queries) in turn, then elements of a head.

The sums over keys are made online, a warp of keys at a time, so their order depends on the number of keys alone.
"""

from __future__ import annotations

import numpy as np

from calcvm.kernels_cuda._common import Float, Ptr, given, index_of, kernel, share
from calcvm.kernels_cuda._cuda import at, device, lane, like, shared, shuffle_xor, sync_warp, thread, threads, warp_size
from calcvm.kernels_cuda._math import exp, fma, log, tanh
from calcvm.kernels_cuda._reduce import divide, larger, warp, warp_sum, warps

NONE = -np.inf


@device
def warp_top(x):
    """The largest of the lanes' ``x``; a NaN may be lost."""
    step = warp_size() // 2
    while step > 0:
        x = larger(x, shuffle_xor(x, step))
        step //= 2
    return x


@device
def dot(D, x, y):
    total, c = like(x, 0), 0
    while c < D:
        total = fma(x[c], y[c], total)
        c += 1
    return total


@device
def score(D, q, k, bias, biased, scale, cap):
    """The score of a query and a key, and the slope of the cap."""
    z, slope = dot(D, q, k) * scale, like(q, 1)
    if cap > like(q, 0):
        t = tanh(z / cap)
        z, slope = cap * t, slope - t * t
    return z + bias[0] if biased else z, slope


@device
def length_of(me, lengths, n, S, masked):
    """The keys of a sample."""
    return index_of(me, lengths[n], S + 1) if masked else S


@device
def first_key(i, window):
    return max(i + 1 - window, 0) if window > 0 else 0


@device
def add_rows(D, n, weights, x, apart, factor, y):
    """y = factor*y + sum_r weights[r]*x[r] over n rows; lanes have elements."""
    c = lane()
    while c < D:
        total, r = y[c] * factor, 0
        while r < n:
            total = fma(weights[r], x[r * apart + c], total)
            r += 1
        y[c] = total
        c += warp_size()


@device
def times(D, x, factor):
    """x *= factor; of what is not a number only if factor is not 0."""
    c = lane()
    while c < D:
        x[c] = x[c] * factor if factor != like(x, 0) else like(x, 0)
        c += warp_size()


@device
def bias_at(bias, masks, H, T, S, n, h, i):
    """The row of the bias of a query."""
    return at(bias, ((n * (H if masks[5] else 1) * masks[4] + h * masks[5]) * T + i) * S)


@device
def forward(me, sizes, masks, numbers, q, qs, k, v, ks, lengths, bias, y, lse):
    """Of all heads; q, k and v begin with the first head of the first sample."""
    N, T, S, G, R, D = sizes
    masked, causal, window, biased, _, _ = masks
    scale, cap = like(y, numbers[0]), like(y, numbers[1])
    H = G * R
    room = at(shared(y), warp() * warp_size())
    lo, hi = share(me, N * H * T)
    u = lo + warp()
    while u < hi:
        unit, i = divide(u, T), u - divide(u, T) * T
        n = divide(unit, H)
        h = unit - n * H
        length = length_of(me, lengths, n, S, masked)
        qi, yi = at(q, (n * T + i) * qs + h * D), at(y, ((n * T + i) * H + h) * D)
        kv = n * S * ks + divide(h, R) * D
        own = bias_at(bias, masks, H, T, S, n, h, i)
        top, total = like(y, NONE), like(y, 0)
        times(D, yi, like(y, 0))
        j, stop = first_key(i, window), min(i + 1, length) if causal else length
        while j < stop:
            p, mine = like(y, NONE), j + lane()
            if mine < stop:
                p, _ = score(D, qi, at(k, kv + mine * ks), at(own, mine), biased, scale, cap)
            new = larger(top, warp_top(p))
            less = like(y, 1)
            if new != like(y, NONE):
                p, less = exp(p - new), exp(top - new)
            else:
                p = like(y, 0)
            total = total * less + warp_sum(p)
            top = new
            room[lane()] = p
            sync_warp()
            add_rows(D, min(warp_size(), stop - j), room, at(v, kv + j * ks), ks, less, yi)
            sync_warp()
            j += warp_size()
        nothing = total == like(y, 0)
        times(D, yi, like(y, 0) if nothing else like(y, 1) / total)
        if given(me, lse) and lane() == 0:
            lse[u] = like(y, 0) if nothing else top + log(total)
        u += warps()


@device
def slopes(D, q, k, bias, biased, scale, cap, lse, dy, v, own):
    """The weight of a key for a query, and the gradient of their product."""
    z, slope = score(D, q, k, bias, biased, scale, cap)
    p = exp(z - lse)
    return p, p * (dot(D, dy, v) - own) * scale * slope


@device
def backward(me, sizes, masks, numbers, q, qs, k, v, ks, lengths, bias, y, lse, dy, dq, dk, dv, wanted):
    """Of all heads; q, k and v and their gradients begin with the first head of the first sample."""
    N, T, S, G, R, D = sizes
    masked, causal, window, biased, _, _ = masks
    scale, cap = like(y, numbers[0]), like(y, numbers[1])
    H, zero = G * R, like(y, 0)
    room = at(shared(y), warp() * warp_size() * 2)
    more = at(room, warp_size())
    lo, hi = share(me, N * H * T if wanted[0] else 0)
    u = lo + warp()
    while u < hi:  # a query
        unit, i = divide(u, T), u - divide(u, T) * T
        n = divide(unit, H)
        h = unit - n * H
        length = length_of(me, lengths, n, S, masked)
        of_y, kv = ((n * T + i) * H + h) * D, n * S * ks + divide(h, R) * D
        qi, dqi, dyi = at(q, (n * T + i) * qs + h * D), at(dq, (n * T + i) * qs + h * D), at(dy, of_y)
        own, b = dot(D, dyi, at(y, of_y)), bias_at(bias, masks, H, T, S, n, h, i)
        times(D, dqi, zero)
        j, stop = first_key(i, window), min(i + 1, length) if causal else length
        while j < stop:
            s, mine = zero, j + lane()
            if mine < stop:
                at_key = kv + mine * ks
                _, s = slopes(D, qi, at(k, at_key), at(b, mine), biased, scale, cap, lse[u], dyi, at(v, at_key), own)
            room[lane()] = s
            sync_warp()
            add_rows(D, min(warp_size(), stop - j), room, at(k, kv + j * ks), ks, like(y, 1), dqi)
            sync_warp()
            j += warp_size()
        u += warps()
    lo, hi = share(me, N * G * S if wanted[1] or wanted[2] else 0)
    u = lo + warp()
    while u < hi:  # a key
        unit, j = divide(u, S), u - divide(u, S) * S
        n = divide(unit, G)
        g = unit - n * G
        length = length_of(me, lengths, n, S, masked)
        of_k, h = (n * S + j) * ks + g * D, g * R
        kj, vj, dkj, dvj = at(k, of_k), at(v, of_k), at(dk, of_k), at(dv, of_k)
        if wanted[1]:
            times(D, dkj, zero)
        if wanted[2]:
            times(D, dvj, zero)
        while h < (g + 1) * R and j < length:
            i = j if causal else 0
            stop = min(j + window, T) if window > 0 else T
            while i < stop:
                p, s, mine = zero, zero, i + lane()
                if mine < stop:
                    of_y, b = ((n * T + mine) * H + h) * D, at(bias_at(bias, masks, H, T, S, n, h, mine), j)
                    dyi, qi = at(dy, of_y), at(q, (n * T + mine) * qs + h * D)
                    own, l = dot(D, dyi, at(y, of_y)), lse[(n * H + h) * T + mine]
                    p, s = slopes(D, qi, kj, b, biased, scale, cap, l, dyi, vj, own)
                room[lane()] = p
                more[lane()] = s
                sync_warp()
                count = min(warp_size(), stop - i)
                if wanted[1]:
                    add_rows(D, count, more, at(q, (n * T + i) * qs + h * D), qs, like(y, 1), dkj)
                if wanted[2]:
                    add_rows(D, count, room, at(dy, ((n * T + i) * H + h) * D), H * D, like(y, 1), dvj)
                sync_warp()
                i += warp_size()
            h += 1
        u += warps()


@kernel
def attention_fwd(
    me, N, T, S, G, R, D, masked, causal, window, biased, bn, bh, scale: Float, cap: Float, wn, q: Ptr, k: Ptr, v: Ptr,
    lengths: Ptr.index, bias: Ptr, y: Ptr, lse: Ptr, ws: Ptr,
):  # fmt: skip
    """y = softmax(scale*q k^T + bias) v.  q, y (N, T, G*R*D), k, v (N, S, G*D), lse (N, G*R, T).  Queries are shared."""
    sizes, masks = (N, T, S, G, R, D), (masked, causal, window, biased, bn, bh)
    forward(me, sizes, masks, (scale, cap), q, G * R * D, k, v, G * D, lengths, bias, y, lse)


@kernel
def attention_packed_fwd(
    me, N, T, G, R, D, masked, causal, window, biased, bn, bh, scale: Float, cap: Float, wn, qkv: Ptr, lengths: Ptr.index,
    bias: Ptr, y: Ptr, lse: Ptr, ws: Ptr,
):  # fmt: skip
    """The same for qkv (N, T, (R + 2)*G*D): heads of q, then of k, then of v."""
    sizes, masks = (N, T, T, G, R, D), (masked, causal, window, biased, bn, bh)
    k, row = at(qkv, G * R * D), (R + 2) * G * D
    forward(me, sizes, masks, (scale, cap), qkv, row, k, at(k, G * D), row, lengths, bias, y, lse)


@kernel
def attention_bwd(
    me, N, T, S, G, R, D, masked, causal, window, biased, bn, bh, scale: Float, cap: Float, wn, q: Ptr, k: Ptr, v: Ptr,
    lengths: Ptr.index, bias: Ptr, y: Ptr, lse: Ptr, dy: Ptr, dq: Ptr, dk: Ptr, dv: Ptr, ws: Ptr,
):  # fmt: skip
    """dq, dk and dv, from scores that are computed again.  Queries are shared, and keys."""
    sizes, masks = (N, T, S, G, R, D), (masked, causal, window, biased, bn, bh)
    wanted = given(me, dq), given(me, dk), given(me, dv)
    backward(me, sizes, masks, (scale, cap), q, G * R * D, k, v, G * D, lengths, bias, y, lse, dy, dq, dk, dv, wanted)


@kernel
def attention_packed_bwd(
    me, N, T, G, R, D, masked, causal, window, biased, bn, bh, scale: Float, cap: Float, wn, qkv: Ptr, lengths: Ptr.index,
    bias: Ptr, y: Ptr, lse: Ptr, dy: Ptr, dqkv: Ptr, ws: Ptr,
):  # fmt: skip
    """dqkv, in the order of qkv (N, T, (R + 2)*G*D)."""
    sizes, masks = (N, T, T, G, R, D), (masked, causal, window, biased, bn, bh)
    k, dk, row = at(qkv, G * R * D), at(dqkv, G * R * D), (R + 2) * G * D
    v, dv = at(k, G * D), at(dk, G * D)
    all_of_them = (True, True, True)
    backward(me, sizes, masks, (scale, cap), qkv, row, k, v, row, lengths, bias, y, lse, dy, dqkv, dk, dv, all_of_them)


# ---------------------------------------------------------------- keys and values of the steps before
@kernel
def put_line_fwd(me, N, S, K, x: Ptr, v: Ptr, place: Ptr.index, y: Ptr):
    """y[n] = x[n] (S,K) with v[n] as line place[n].  y may be x.  Samples are shared."""
    lo, hi = share(me, N)
    for n in range(lo, hi):
        first, i = index_of(me, place[n], S) * K, thread()
        while i < S * K:
            y[n * S * K + i] = v[n * K + i - first] if first <= i and i < first + K else x[n * S * K + i]
            i += threads()

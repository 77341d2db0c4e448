"""Attention: blocks of QUERIES rows of scores meet at most KEYS keys at a time, and sums over keys are made online.

Queries, keys and values are read as linear layers leave them, with heads side by side; only the keys of one head (in the backward
also its values) are turned once, into scratch.  Heads of all samples are shared, in the backward groups of heads.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import add
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from calcvm.kernels_cpu import _formulas as F
from calcvm.kernels_cpu._common import Float, Ptr, at, given, index_of, kernel, like, njit, share
from calcvm.kernels_cpu._formulas import V
from calcvm.kernels_cpu._gemm import gemm
from calcvm.kernels_cpu._gemv import column_sums
from calcvm.kernels_cpu._gemv import dots as products
from calcvm.kernels_cpu._math import (
    _horizontal,
    _vectors,
    copy,
    counting,
    each,
    elementwise,
    fill,
    log,
    loop_of,
    rexp,
    rtop,
    scale,
)
from calcvm.kernels_cpu._simd import transpose
from calcvm.kernels_cpu._vectors import word

# A block of scores has QUERIES rows, or twice as many if there are at most FEW keys.  `ops.transformers` has the same numbers.
QUERIES, KEYS, FEW = 24, 256, 128
NONE = float("-inf")

turned = transpose()
bend = elementwise(lambda x, a, cap: cap * F.tanh(x * a / cap), "v", "ff")
bend_and_add = elementwise(lambda x, b, a, cap: cap * F.tanh(x * a / cap) + b, "vv", "ff")
times_and_add = elementwise(lambda x, b, a: x * a + b, "vv", "f")


# ---------------------------------------------------------------- rows of scores
def _rows(
    matrices: int, kinds: str, term: Callable, stores: int = 0, combine: Callable | None = None, initial: float = 0.0
) -> Any:
    """A loop ``rows(n, w, stride, x, ..., [y], more...)`` over n rows of w elements of matrices, four at a time.

    ``term(e, r, more...)`` is a function of a row's elements, one per matrix, that returns a tuple.  Its first values are stored in
    the first matrices; ``combine`` : its first value is reduced to y[r].  Rows past the end repeat the last, with the same results.
    """

    def of(e: Any, n: Any, w: Any, *args: Any) -> None:
        b, last, (strides, xs) = e.b, e.b.sub(n, word(1)), (args[: 2 * matrices : 2], args[1 : 2 * matrices : 2])
        y, more = (args[2 * matrices :][0], args[2 * matrices + 1 :]) if combine else (None, args[2 * matrices :])
        neutral = ir.Constant(e.vec, [initial] * e.lanes)

        def four(r: Any, carried: list) -> list:
            places = [b.select(b.icmp_signed("<", i, last), i, last) for i in (b.add(r, word(k)) for k in range(4))]
            rows = [[b.gep(x, [b.mul(i, stride)]) for stride, x in zip(strides, xs)] for i in places]
            terms = [term(e, i, *more) for i in places]

            def body(i: Any, left: Any, totals: list) -> list:
                mask = None if left is None else e.below(left)
                made = [of(*(e.get(x, i, mask) for x in row)) for of, row in zip(terms, rows)]
                for values, row in zip(made, rows):
                    for value, x in zip(values[:stores], row):
                        e.put(value, x, i, mask)
                firsts = [v[0] if mask is None else V(b, b.select(mask, v[0].v, neutral)) for v in made]
                return [combine(V(b, old), v).v for old, v in zip(totals, firsts)] if combine else totals

            totals = _vectors(e, w, body, [neutral] * 4 if combine else [])
            for i, v in zip(places, totals):
                b.store(_horizontal(e, v, combine), b.gep(y, [i]))
            return carried

        counting(b, word(0), n, 4, [], four)

    return loop_of("i" + "ip" * matrices + "p" * bool(combine) + kinds, of)


def _splat(e: Any, p: Any, i: Any) -> V:
    """Element i in all lanes."""
    return V(e.b, e.splat(e.b.load(e.b.gep(p, [i]))))


def _weight(e: Any, i: Any, top: Any, a: Any) -> Callable:
    by, most = V(e.b, e.splat(a)), _splat(e, top, i)
    return lambda x: (F.exp(x * by - most),)


def _factor(e: Any, i: Any, factors: Any) -> Callable:
    by = _splat(e, factors, i)
    return lambda x: (x * by,)


def _slope(e: Any, i: Any, lse: Any, own: Any, a: Any) -> Callable:
    by, l, less = V(e.b, e.splat(a)), _splat(e, lse, i), _splat(e, own, i)

    def of(x: V, dp: V) -> tuple[V, V]:
        p = F.exp(x * by - l)
        return p, p * (dp - less) * by

    return of


# tops(n, w, stride, x, y): y[r] = the largest of row r.  dots(n, w, stride, x, stride, y, z): z[r] = the product of two rows.
# weights(n, w, stride, x, y, top, a): x = exp(a*x - top[r]), y[r] its sum.  scale_rows(n, w, stride, x, factors).
# slopes(n, w, stride, x, stride, dp, lse, own, a): x = exp(a*x - lse[r]), dp = x*(dp - own[r])*a
tops = _rows(1, "", lambda e, i: lambda x: (x,), 0, lambda x, y: x.where(x > y, y), NONE)
dots = _rows(2, "", lambda e, i: lambda x, y: (x * y,), 0, add)
weights = _rows(1, "pf", _weight, 1, add)
scale_rows = _rows(1, "p", _factor, 1)
slopes = _rows(2, "ppf", _slope, 2)


def _merged(old: V, new: V, a: V) -> tuple[V, V, V]:
    """The larger of two maxima, what is subtracted from scores (0 for rows that see nothing), and the factor of sums so far."""
    new = new * a
    top = old.where(old > new, new)
    less = top.where(top > NONE, 0.0)
    return top, less, F.exp(old - less)


merge = loop_of("pppppf", each(_merged, "vv", writes=3))  # merge(n, old, new, top, less, factor, a)
add_sums = elementwise(lambda total, factor, s: total * factor + s, "vvv")
inverse = elementwise(lambda total: (1 / total).where(total > 0, 0.0), "v")
log_sum = elementwise(lambda top, total: (top + F.log(total)).where(total > 0, 0.0), "vv")


def _slopes(bent: bool, biased: bool):  # type: ignore[no-untyped-def]
    """A loop ``(n, x, dp, [bias], p, s, a, lse, own, cap)`` over a row: weights p, and gradients s of the products x."""

    def formula(x, dp, *more):  # type: ignore[no-untyped-def]
        a, lse, own, cap = more[-4:]
        z = x * a
        if bent:
            t = F.tanh(z / cap)
            z = cap * t
        p = F.exp((z + more[0] if biased else z) - lse)
        s = p * (dp - own) * a
        return p, s * (1 - t * t) if bent else s

    reads = "vvv" if biased else "vv"
    return loop_of("p" * (len(reads) + 2) + "ffff", each(formula, reads, writes=2))


biased_alone, bent_alone, bent_and_biased = _slopes(False, True), _slopes(True, False), _slopes(True, True)


# ---------------------------------------------------------------- what a query sees
@njit(inline=True)
def first_key(i, window):
    return max(i + 1 - window, 0) if window > 0 else 0


@njit(inline=True)
def end_of_keys(i, length, causal):
    return min(i + 1, length) if causal else length


@njit(inline=True)
def seen(i, j, w, length, causal, window):
    """The keys of a block of w from j on that query i sees: first, and behind the last."""
    lo = min(max(first_key(i, window) - j, 0), w)
    return lo, max(min(end_of_keys(i, length, causal) - j, w), lo)


@njit(inline=True)
def block_of(S):
    """The stride of turned keys, the keys of a block, and its queries."""
    stride = (S + 15) // 16 * 16
    return stride, min(KEYS, stride), 2 * QUERIES if S <= FEW else QUERIES


@njit(inline=True)
def outside(row, lo, hi, n, value):
    """Set what a query does not see of a block."""
    if lo > 0:
        fill(lo, row, like(row, value))
    if hi < n:
        fill(n - hi, at(row, hi), like(row, value))


# ---------------------------------------------------------------- forward
@njit
def query_forward(n, D, a, q, k, v, ks, y, lse, keep, x):
    """y of the only query of a head, which sees n keys, without a bias or cap: products with rows that lie where they are."""
    products(n, D, q, k, ks, x, x, 1, 0)
    scale(n, x, x, a)
    top = rtop(n, x)
    if n == 0 or top == like(y, NONE):
        fill(D, y, like(y, 0))
        if keep:
            lse[0] = like(y, 0)
        return
    total = rexp(n, x, x, top)
    column_sums(D, n, x, 1, v, ks, y, y, 0, True)
    scale(D, y, y, 1 / total)
    if keep:
        lse[0] = top + log(total)


@njit
def head_forward(
    T, S, D, length, causal, window, a, cap, q, qs, k, v, ks, bias, biased, y, ys, lse, keep, ws
):  # fmt: skip
    """y of one head of one sample; rows of q, of k and v, and of y are qs, ks and ys apart."""
    stride, most, tall = block_of(S)
    turns, x = ws, at(ws, D * stride)
    top = at(x, tall * most)
    total, new, less, factor = at(top, tall), at(top, 2 * tall), at(top, 3 * tall), at(top, 4 * tall)
    if T == 1 and not (biased or cap > 0):
        start = min(first_key(0, window), S)
        n = max(end_of_keys(0, length, causal) - start, 0)
        query_forward(n, D, a, q, at(k, start * ks), at(v, start * ks), ks, y, lse, keep, x)
        return
    by = like(y, 1) if biased or cap > 0 else a  # what scores are still multiplied by
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
            if cap > 0 or biased or first_key(i + n - 1, window) > j or end_of_keys(i, length, causal) < j + w:
                for r in range(n):
                    lo, hi = seen(i + r, j, w, length, causal, window)
                    row, own = at(x, r * most + lo), at(bias, (i + r) * S + j + lo)
                    if biased and cap > 0:
                        bend_and_add(hi - lo, row, own, row, a, cap)
                    elif biased:
                        times_and_add(hi - lo, row, own, row, a)
                    elif cap > 0:
                        bend(hi - lo, row, row, a, cap)
                    outside(at(x, r * most), lo, hi, w, NONE)
            tops(n, w, most, x, new)
            merge(n, top, new, top, less, factor, by)
            weights(n, w, most, x, new, less, by)
            add_sums(n, total, factor, new, total)
            if j > start:
                scale_rows(n, D, ys, yi, factor)
            gemm(n, D, w, x, most, 1, at(v, j * ks), ks, 1, yi, ys, yi, ys, 1 if j > start else 0, ws, 0)
        if start < stop:
            inverse(n, total, factor)
            scale_rows(n, D, ys, yi, factor)
        else:
            for r in range(n):
                fill(D, at(yi, r * ys), like(y, 0))
        if keep:
            log_sum(n, top, total, at(lse, i))


@njit(inline=True)
def length_of(me, lengths, n, S, masked):
    """The keys of a sample."""
    return index_of(me, lengths[n], S + 1) if masked else S


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
    me, N, T, G, R, D, masked, causal, window, biased, bn, bh, scale: Float, cap: Float, wn, qkv: Ptr, lengths: Ptr.index,
    bias: Ptr, y: Ptr, lse: Ptr, ws: Ptr,
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
            of_q, of_y = i * qs + h * D, i * ys + h * D
            qi, dqi, dyi = at(q, of_q), at(dq, of_q), at(dy, of_y)
            dots(n, D, ys, at(y, of_y), ys, dyi, own)
            start, stop = first_key(i, window), end_of_keys(i + n - 1, length, causal)
            if has_q and start >= stop:
                for r in range(n):
                    fill(D, at(dqi, r * qs), like(y, 0))
            for j in range(start, stop, most):
                w = min(most, stop - j)
                gemm(n, w, D, qi, qs, 1, at(turned_k, j), stride, 1, x, most, x, most, 0, ws, 0)
                gemm(n, w, D, dyi, ys, 1, at(turned_v, j), stride, 1, dp, most, dp, most, 0, ws, 0)
                some = first_key(i + n - 1, window) > j or end_of_keys(i, length, causal) < j + w
                for r in range(n if some or cap > 0 or biased else 0):
                    lo, hi = seen(i + r, j, w, length, causal, window)
                    p, s, l = at(x, r * most + lo), at(dp, r * most + lo), lse[h * T + i + r]
                    b = at(bias, (h * apart + i + r) * S + j + lo)
                    if biased and cap > 0:
                        bent_and_biased(hi - lo, p, s, b, p, s, a, l, own[r], cap)
                    elif biased:
                        biased_alone(hi - lo, p, s, b, p, s, a, l, own[r], cap)
                    elif cap > 0:
                        bent_alone(hi - lo, p, s, p, s, a, l, own[r], cap)
                    outside(at(x, r * most), lo, hi, w, 0 if cap > 0 or biased else NONE)
                    if cap > 0 or biased:
                        outside(at(dp, r * most), lo, hi, w, 0)
                if not (cap > 0 or biased):
                    slopes(n, w, most, x, most, dp, at(lse, h * T + i), own, a)
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
    me, N, T, G, R, D, masked, causal, window, biased, bn, bh, scale: Float, cap: Float, wn, qkv: Ptr, lengths: Ptr.index,
    bias: Ptr, y: Ptr, lse: Ptr, dy: Ptr, dqkv: Ptr, ws: Ptr,
):  # fmt: skip
    """dqkv, in the order of qkv (N, T, (R + 2)*G*D)."""
    sizes, masks, wanted = (N, T, T, G, R, D), (masked, causal, window, biased, bn, bh, scale, cap), (True, True, True)
    k, dk, row = at(qkv, G * R * D), at(dqkv, G * R * D), (R + 2) * G * D
    v, dv = at(k, G * D), at(dk, G * D)
    backward(me, sizes, masks, wn, qkv, row, k, v, row, lengths, bias, y, lse, dy, dqkv, dk, dv, wanted, ws)


# ---------------------------------------------------------------- keys and values of the steps before
@intrinsic
def same(tc, a, b):
    """Whether two pointers are one."""
    return types.boolean(a, b), lambda ctx, bld, sig, args: bld.icmp_unsigned("==", *args)


@kernel
def put_line_fwd(me, N, S, K, x: Ptr, v: Ptr, place: Ptr.index, y: Ptr):
    """y[n] = x[n] (S,K) with v[n] as line place[n].  y may be x, of which only that line then changes.  Samples are shared."""
    lo, hi = share(me, N)
    if S == 0:
        return
    if not same(x, y):
        copy((hi - lo) * S * K, at(x, lo * S * K), at(y, lo * S * K))
    for n in range(lo, hi):
        copy(K, at(v, n * K), at(y, (n * S + index_of(me, place[n], S)) * K))

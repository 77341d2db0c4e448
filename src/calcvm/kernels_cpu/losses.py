"""Losses and metrics: per-row values shared over rows, then a scalar by worker 0 (see `calcvm.ops.losses`)."""

from __future__ import annotations

import math
from operator import add

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from calcvm.formulas.declare import Formula, PairLoss
from calcvm.formulas.losses import PAIR_LOSSES
from calcvm.kernel import words, words_for
from calcvm.kernels_cpu import _formulas as F
from calcvm.kernels_cpu._common import (
    WORD,
    Float,
    Ptr,
    alike,
    at,
    fact,
    given,
    index_of,
    kernel,
    kernel_as,
    lanes,
    like,
    njit,
    seen_as,
    share,
)
from calcvm.kernels_cpu._loops import flat, scaled, total
from calcvm.kernels_cpu._math import Lanes, _horizontal, elementwise, log, reduction, rexp, rexpsum, rmax, rsum, scale
from calcvm.kernels_cpu._target import current

SHORT_ROWS = 4
vector_bits = fact(lambda target: target.vectors[0])


# ---------------------------------------------------------------- from rows to a scalar
@kernel_as("loss_mean", words("rows count", "", ("t_l", "loss")))
@kernel_as("metric_mean", words("rows count", "", ("t_l", "y")))
def _mean(me, rows, count, t_l, y):
    """y = sum_r l[r] / count; only worker 0."""
    if me.worker == 0:
        y[0] = rsum(rows, t_l) / like(t_l, count)


@kernel
def metric_root_mean(me, rows, count, t_l: Ptr, y: Ptr):
    """y = sqrt(sum_r l[r] / count); only worker 0."""
    if me.worker == 0:
        y[0] = like(t_l, math.sqrt(rsum(rows, t_l) / like(t_l, count)))


# ---------------------------------------------------------------- losses over pairs of equal shape
def _term(f: Formula) -> None:
    """l[r] = the sum of row r's terms; rows are shared."""
    each, sum_of, last = flat(f), total(f), len(f.reals) + 2

    @kernel_as(f.name, words_for(f, "rows cols"), f.own)
    def run(me, rows, cols, *given):
        lo, hi = share(me, rows)
        if cols == 1:
            each(hi - lo, lo, given)
        else:
            for i in range(lo, hi):
                given[last][i] = sum_of(cols, i * cols, given)


def _slope(f: Formula) -> None:
    """The term's slope times dloss / count; rows are shared; in place over any operand."""
    each = scaled(f)

    @kernel_as(f.name, words_for(f, "rows cols count", before=("dloss",)), f.own)
    def run(me, rows, cols, count, *given):
        lo, hi = share(me, rows)
        each((hi - lo) * cols, count, lo * cols, given)


def add_loss(op: PairLoss) -> None:
    """The kernels of a loss."""
    _term(op.term)
    for f in op.slopes.values():
        _slope(f)


for _loss in [*PAIR_LOSSES.values()]:
    add_loss(_loss)


# ---------------------------------------------------------------- softmax cross entropy
def _weighted(q, x, m):
    """q*(m - x), without 0*inf for a masked class with the score -inf."""
    return q.const(0.0).where(q.equals(0.0), q * (m - x))


below_max = reduction(add, 0.0, lambda x, m: m - x, "v", 1)  # sum of m - x
weighted = reduction(add, 0.0, _weighted, "vv", 1)
add_weighted_log = elementwise(lambda s, weight, d: weight * F.log(s) + d, "vvv")
add_log = elementwise(lambda s, d: F.log(s) + d, "vv")
affine = elementwise(lambda p, a, c: p * a - c, "v", "ff")
minus = elementwise(lambda p, t, a, b, c: p * a - t * b - c, "vv", "fff")


@intrinsic
def stack(tc, x):
    """Space on the stack for a vector of x's dtype, or for a vector of half as many rows."""
    element = x.dtype

    def codegen(ctx, b, sig, args):
        t = ctx.get_value_type(element)
        n = current().lanes(element.bitwidth)
        return cgutils.alloca_once(b, t, n * max(n // 2, 1))  # Numba would set every element of an array to 0

    return types.CPointer(element)(x), codegen


def softmax_lanes(e, n, x, y):
    """Maximum, sum of exp(x - maximum) and x of a row of one vector; y = softmax(x)."""
    b, mask, first = e.b, e.below(n), ir.Constant(WORD, 0)
    v = e.get(x, first, mask)
    known = b.select(mask, v.v, ir.Constant(e.vec, [float("-inf")] * e.lanes))
    m = _horizontal(e, known, lambda p, q: p.where(p > q, q))  # may miss a NaN; exp and the sum do not
    terms = F.exp(v - F.V(b, e.splat(m)))
    terms = F.V(b, b.select(mask, terms.v, ir.Constant(e.vec, [0.0] * e.lanes)))
    s = _horizontal(e, terms.v, add)
    e.put(terms * F.V(b, e.splat((1.0 / F.V(b, s)).v)), y, first, mask)
    return m, s, v


def one_vector(bits=0):
    """Softmax of a row of n elements that fit one vector (of ``bits``): (max x, sum exp(x - max)).

    y = softmax(x), y may be x.  The row stays in its register, so no masked load waits for a masked store: separate
    passes for maximum, exp and division take three times as long (32 rows of 10, Zen 4).
    """

    @intrinsic
    def softmax(tc, n, x, y):
        element = x.dtype

        def codegen(ctx, b, sig, args):
            e = Lanes(b, ctx.get_value_type(element), current(), bits // element.bitwidth)
            return ctx.make_tuple(b, sig.return_type, softmax_lanes(e, *args)[:2])

        return types.UniTuple(element, 2)(types.intp, x, y), codegen

    return softmax


@intrinsic
def softmax_weighted(tc, n, x, t, y, hard, soft):
    """A row of n elements that fit one vector, with q = hard*t + soft: returns (sum exp(x - max), sum q, sum q*(max - x)).

    y = softmax(x), y may be x.
    """
    element = x.dtype

    def codegen(ctx, b, sig, args):
        n, x, t, y, hard, soft = args
        e = Lanes(b, ctx.get_value_type(element), current())
        mask, zero = e.below(n), ir.Constant(e.vec, [0.0] * e.lanes)
        q = e.get(t, ir.Constant(WORD, 0), mask) * F.V(b, e.splat(hard)) + F.V(b, e.splat(soft))
        m, s, v = softmax_lanes(e, n, x, y)
        q = F.V(b, b.select(mask, q.v, zero))
        weight, term = _horizontal(e, q.v, add), _horizontal(e, _weighted(q, v, F.V(b, e.splat(m))).v, add)
        return ctx.make_tuple(b, sig.return_type, [s, weight, term])

    return types.UniTuple(element, 3)(types.intp, x, t, y, element, element), codegen


softmax_vector = one_vector()


@njit(inline=True)
def softmax_row(n, x, y, m, keep):
    """y = softmax(x), y may be x; m is the maximum of x; returns sum exp(x - m).

    keep : whether y is needed; if not, it only has space for a vector.
    """
    if n <= lanes(x):
        return softmax_vector(n, x, y)[1]
    if not keep:
        return rexpsum(n, x, m)
    s = rexp(n, x, y, m)
    scale(n, y, y, like(x, 1.0) / s)
    return s


def few_classes(bits=0):
    """Cross entropy of rows that fit one vector (of ``bits``), against labels: one log per vector of rows.

    In these functions row k of p begins at k*pitch; pitch is n, or 0 if p is not needed.
    """
    softmax = one_vector(bits)

    @njit
    def rows_of(me, lo, hi, n, logits, labels, p, pitch, t_l):
        sums = stack(p)
        while lo < hi:
            rows = min(hi - lo, lanes(p))
            for j in range(rows):
                k = lo + j
                picked = logits[k * n + index_of(me, labels[k], n)]  # before setting p, which may be logits
                m, s = softmax(n, at(logits, k * n), at(p, k * pitch))
                sums[j] = s
                t_l[k] = m - picked
            add_log(rows, sums, at(t_l, lo), at(t_l, lo))
            lo += rows

    return rows_of


few, four = few_classes(), few_classes(128)  # a short vector is summed in two steps instead of four
exp_each = elementwise(F.exp, "v")


@njit(inline=True)
def short_rows(me, lo, rows, n, logits, labels, p, pitch, t_l, sums):
    """As `few` for a vector of rows much shorter than it: one pass computes the exponentials of all of them."""
    p = at(p, lo * pitch)
    for k in range(lo, lo + rows):
        x, y = at(logits, k * n), at(p, (k - lo) * n)
        picked, m = x[index_of(me, labels[k], n)], x[0]  # before setting p, which may be logits
        for j in range(1, n):
            m = max(m, x[j])
        for j in range(n):
            y[j] = x[j] - m
        t_l[k] = m - picked
    exp_each(rows * n, p, p)
    for k in range(lo, lo + rows):
        y, s = at(p, (k - lo) * n), like(p, 0.0)
        for j in range(n):
            s += y[j]
        sums[k - lo] = s
        s = like(p, 1.0) / s
        for j in range(n):
            y[j] *= s
    add_log(rows, sums, at(t_l, lo), at(t_l, lo))


@njit
def fewest(me, lo, hi, n, logits, labels, p, pitch, t_l):
    """Cross entropy of very short rows; loops over 2, 3 and 4 classes are unrolled (32x4: 195 instead of 323 ns)."""
    sums = stack(p)
    while lo < hi:
        rows = min(hi - lo, lanes(p))
        if n == 2:
            short_rows(me, lo, rows, 2, logits, labels, p, pitch, t_l, sums)
        elif n == 3:
            short_rows(me, lo, rows, 3, logits, labels, p, pitch, t_l, sums)
        elif n == 4:
            short_rows(me, lo, rows, 4, logits, labels, p, pitch, t_l, sums)
        else:
            short_rows(me, lo, rows, n, logits, labels, p, pitch, t_l, sums)
        lo += rows


@njit
def few_weighted(lo, hi, n, logits, target, p, pitch, t_l, hard, soft):
    """Cross entropy of rows that fit one vector, against probabilities: one log per vector of rows."""
    sums, weights = stack(p), stack(p)
    while lo < hi:
        rows = min(hi - lo, lanes(p))
        for j in range(rows):
            k = (lo + j) * n
            s, weight, term = softmax_weighted(n, at(logits, k), at(target, k), at(p, (lo + j) * pitch), hard, soft)
            sums[j] = s
            weights[j] = weight
            t_l[lo + j] = term
        add_weighted_log(rows, sums, weights, at(t_l, lo), at(t_l, lo))
        lo += rows


@kernel
def softmax_cross_entropy_fwd(
    me, rows, inner, N, dense, smoothing: Float, logits: Ptr, target: Ptr.index, p: Ptr, t_l: Ptr
):
    """p[r,j] = softmax(logits[r])[j]; l[r] = -sum_j q[r,j]*log(p[r,j]), q = (1-s)*target + s/N.

    logits (rows*inner, N), target the same or labels (rows*inner,), l (rows,) sums over inner; p may be
    logits or left out; rows shared.
    """
    lo, hi = share(me, rows)
    keep, pitch, y = True, N, p
    if not given(me, p):
        keep, pitch, y = False, 0, stack(p)
    hard, soft = like(p, 1 - smoothing), like(p, smoothing / N)
    dense, q = dense and alike(target, p), seen_as(target, p)
    if inner == 1 and N <= lanes(p) and (dense or smoothing == 0):
        if dense:
            few_weighted(lo, hi, N, logits, q, y, pitch, t_l, hard, soft)
        elif rows >= SHORT_ROWS and N <= lanes(p) // 2:
            fewest(me, lo, hi, N, logits, target, y, pitch, t_l)
        elif N * vector_bits() <= lanes(p) * 128:
            four(me, lo, hi, N, logits, target, y, pitch, t_l)
        else:
            few(me, lo, hi, N, logits, target, y, pitch, t_l)
        return
    for i in range(lo, hi):
        total = like(p, 0.0)
        for k in range(i * inner, (i + 1) * inner):
            x = at(logits, k * N)
            m, weight, term = rmax(N, x), like(p, 1.0), like(p, 0.0)
            if dense:
                t = at(q, k * N)
                weight = hard * rsum(N, t) + like(p, smoothing)
                term = hard * weighted(N, t, x, m)
            else:
                term = hard * (m - x[index_of(me, target[k], N)])
            if smoothing != 0:
                term += soft * below_max(N, x, m)
            total += weight * log(softmax_row(N, x, at(y, k * pitch), m, keep)) + term
        t_l[i] = total


@kernel
def softmax_cross_entropy_bwd(
    me, rows, inner, N, dense, count, smoothing: Float, dloss: Ptr, target: Ptr.index, p: Ptr, dlogits: Ptr
):
    """dlogits[r,j] = dloss/count * (p[r,j]*sum_j(q[r,j]) - q[r,j]); dlogits may be p; rows shared."""
    lo, hi = share(me, rows)
    lo, hi = lo * inner, hi * inner
    a = dloss[0] * (like(p, 1) / like(p, count))
    hard, soft = a * like(p, 1 - smoothing), a * like(p, smoothing / N)
    if dense and alike(target, p):
        for k in range(lo, hi):
            t = at(seen_as(target, p), k * N)
            weight = hard * rsum(N, t) + a * like(p, smoothing)
            minus(N, at(p, k * N), t, at(dlogits, k * N), weight, hard, soft)
    else:
        affine((hi - lo) * N, at(p, lo * N), at(dlogits, lo * N), a, soft)
        for k in range(lo, hi):
            dlogits[k * N + index_of(me, target[k], N)] -= hard


# ---------------------------------------------------------------- one element of each row
@kernel
def pick_fwd(me, rows, inner, N, x: Ptr, index: Ptr.index, y: Ptr):
    """y[r] = x[r, index[r]]; x (rows*inner, N), index and y (rows*inner,); rows shared."""
    lo, hi = share(me, rows)
    for k in range(lo * inner, hi * inner):
        y[k] = x[k * N + index_of(me, index[k], N)]


@kernel
def pick_bwd(me, rows, inner, N, index: Ptr.index, dy: Ptr, dx: Ptr):
    """dx[r, j] = dy[r] if j is index[r], else 0; all of dx is set; rows shared."""
    lo, hi = share(me, rows)
    for k in range(lo * inner * N, hi * inner * N):
        dx[k] = like(dx, 0.0)
    for k in range(lo * inner, hi * inner):
        dx[k * N + index_of(me, index[k], N)] = dy[k]


# ---------------------------------------------------------------- metrics
@njit(inline=True)
def argmax(x, n):
    """Index of the first largest element; NaN is never larger."""
    best = 0
    for j in range(1, n):
        if x[j] > x[best]:
            best = j
    return best


@kernel
def accuracy_fwd(me, rows, inner, N, dense, scores: Ptr, target: Ptr.index, t_l: Ptr):
    """l[r] = the number of inner positions of r whose first largest score is the target's class; rows shared."""
    lo, hi = share(me, rows)
    for i in range(lo, hi):
        hits = 0
        for k in range(i * inner, (i + 1) * inner):
            if dense and alike(target, scores):
                label = argmax(at(seen_as(target, scores), k * N), N)
            else:
                label = index_of(me, target[k], N)
            hits += argmax(at(scores, k * N), N) == label
        t_l[i] = like(scores, hits)

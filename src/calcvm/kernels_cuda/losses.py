"""Losses and metrics: per-row values shared over rows, then a scalar by worker 0 (see `calcvm.ops.losses`)."""

from __future__ import annotations

from collections.abc import Callable

from calcvm.formulas.declare import Formula, PairLoss
from calcvm.formulas.losses import PAIR_LOSSES
from calcvm.kernel import words, words_for
from calcvm.kernels_cuda._common import Float, Ptr, given, index_of, kernel, kernel_as, share
from calcvm.kernels_cuda._cuda import (
    alike,
    device,
    like,
    seen_as,
    shared,
    shuffle_xor,
    sync,
    sync_warp,
    thread,
    threads,
)
from calcvm.kernels_cuda._formulas import formula
from calcvm.kernels_cuda._loops import elementwise, fill
from calcvm.kernels_cuda._math import log, sqrt
from calcvm.kernels_cuda._reduce import (
    add,
    each,
    element,
    fold,
    group_before,
    group_in,
    join_slots,
    lane_in,
    lanes_of,
    outputs_at_once,
    reduce,
    slots_of,
)
from calcvm.kernels_cuda._tuples import likes
from calcvm.kernels_cuda.reduction import softmax_of, sum_of, top_and_sum


# ---------------------------------------------------------------- from rows to a scalar
@device
def _put(y, q, c, total):
    y[q + c] = total


@device
def _put_mean(to, q, c, total):
    y, count = to
    y[0] = total / count


@device
def _put_root_mean(to, q, c, total):
    y, count = to
    y[0] = sqrt(total / count)


def _scalar(name: str, out: str, put: Callable) -> None:
    """A mean, sum_r l[r] / count, or its root; only worker 0."""

    @kernel_as(name, words("rows count", "", ["t_l", out]))
    def run(me, rows, count, t_l, y):
        if me.worker == 0:
            zero = like(y, 0)
            reduce(element, add, zero, zero, t_l, shared(y), put, (y, like(y, count)), 0, 1, rows, 1)


_scalar("loss_mean", "loss", _put_mean)
_scalar("metric_mean", "y", _put_mean)
_scalar("metric_root_mean", "y", _put_root_mean)


# ---------------------------------------------------------------- losses over pairs of equal shape
def _term(f: Formula) -> None:
    """l[r] = the sum of row r's terms; rows shared."""
    n, of = len(f.reals), formula(f.variant())

    @device
    def term(args, q, k):
        return of(args[0][k], args[1][k], *args[2:])

    @kernel_as(f.name, words_for(f, "rows cols"))
    def run(me, rows, cols, *given):
        x, t, t_l = given[n:]
        q, stop = share(me, rows)
        zero, args = like(x, 0), (x, t, *likes(x, given[:n]))
        while q < stop:
            q += reduce(term, add, zero, zero, args, shared(x), _put, t_l, q, stop, cols, 1)


def _slope(f: Formula) -> None:
    """The term's slope times dloss/count.  It may overwrite an operand; rows shared."""
    n, after = len(f.reals), len(f.reals) + 1
    loop = elementwise(formula(f.scaled()))

    @kernel_as(f.name, words_for(f, "rows cols count", before=("dloss",)))
    def run(me, rows, cols, count, *given):
        dloss, dx = given[n], given[-1]
        lo, hi = share(me, rows)
        numbers = (*likes(dx, given[:n]), dloss[0] * (like(dloss, 1) / like(dloss, count)))
        loop(lo * cols, hi * cols, given[after:-1], dx, numbers)


def add_loss(op: PairLoss) -> None:
    """The kernels of a loss."""
    _term(op.term)
    for f in op.slopes.values():
        _slope(f)


for _loss in [*PAIR_LOSSES.values()]:
    add_loss(_loss)


# ---------------------------------------------------------------- rows of scores
@device
def rows_of_scores(value, args, lo, hi, inner, N, t_l):
    """t_l[i] = the sum of ``value(args, place, ok, k, last, g)`` over the ``inner`` places of row i, lo <= i < hi.

    A place is processed by 2**g lanes of a warp: this lane has elements k, k + 2**g, ... up to ``last``, or none
    unless ``ok``.  Places are joined by slots, as `reduce` joins elements.
    """
    g, shift, zero = lanes_of(N), slots_of(inner), like(t_l, 0)
    most, totals = outputs_at_once(shift), shared(t_l)
    i = lo
    while i < hi:
        count = min(most, hi - i)
        before = group_before(g)
        while before < count << shift:
            u = before + group_in(g)
            c, slot = u >> shift, u & ((1 << shift) - 1)
            total, ahead = zero, 0
            while ahead < inner:  # equally often for all lanes of the warp
                place, ok = (i + c) * inner + ahead + slot, c < count and ahead + slot < inner
                total += value(args, place, ok, place * N + lane_in(g), (place + 1) * N - 1 if ok else -1, g)
                ahead += 1 << shift
            if c < count and lane_in(g) == 0:
                if shift == 0:
                    t_l[i + c] = total
                else:
                    totals[slot * most + c] = total
            before += threads() >> g
        if shift > 0:
            sync()
            join_slots(add, zero, zero, totals, _put, t_l, i, count, shift)
        i += count


# ---------------------------------------------------------------- softmax cross entropy
@device
def _below(args, q, k):
    """top - x."""
    x, top = args
    return top - x[k]


@device
def _weighted(args, q, k):
    """t*(top - x), without 0*inf for a masked class with the score -inf."""
    x, top, t = args
    return like(top, 0) if t[k] == like(top, 0) else t[k] * (top - x[k])


@device
def _entropy(args, place, ok, k, last, g):
    """p = softmax(logits) of a place, and its loss."""
    me, N, dense, smoothing, hard, soft, x, target, q, p = args
    zero = like(x, 0)
    top, total = top_and_sum(x, zero, k, last, g)
    weight, term = like(x, 1), zero
    if dense:
        sure = sum_of(element, q, zero, k, last, g)
        weight = hard * sure + smoothing
        term = hard * sum_of(_weighted, (x, top, q), zero, k, last, g)
    elif ok:
        term = hard * (top - x[place * N + index_of(me, target[place], N)])
    if soft != zero:
        term += soft * sum_of(_below, (x, top), zero, k, last, g)
    if given(me, p):
        sync_warp()  # p may be logits, and each lane must have read its label's
        each(softmax_of, (x, top, like(p, 1) / total), 0, p, k, last, 1 << g)
    return weight * log(total) + term if ok else zero


@kernel
def softmax_cross_entropy_fwd(
    me, rows, inner, N, dense, smoothing: Float, logits: Ptr, target: Ptr.index, p: Ptr, t_l: Ptr
):
    """p[r,j] = softmax(logits[r])[j]; l[r] = -sum_j q[r,j]*log(p[r,j]), q = (1-s)*target + s/N.

    logits (rows*inner, N), target the same or labels (rows*inner,), l (rows,) sums over inner; p may be
    logits or left out; rows shared, a row of logits by several lanes of a warp.
    """
    lo, hi = share(me, rows)
    hard, soft, s = like(t_l, 1 - smoothing), like(t_l, smoothing / N), like(t_l, smoothing)
    args = (me, N, dense != 0 and alike(target, logits), s, hard, soft, logits, target, seen_as(target, logits), p)
    rows_of_scores(_entropy, args, lo, hi, inner, N, t_l)


@kernel
def softmax_cross_entropy_bwd(
    me, rows, inner, N, dense, count, smoothing: Float, dloss: Ptr, target: Ptr.index, p: Ptr, dlogits: Ptr
):
    """dlogits[r,j] = dloss/count * (p[r,j]*sum_j(q[r,j]) - q[r,j]); dlogits may be p; rows shared, as forward."""
    lo, hi = share(me, rows)
    hi, g, zero = hi * inner, lanes_of(N), like(p, 0)
    a = dloss[0] * (like(p, 1) / like(p, count))
    hard, soft, weight = a * like(p, 1 - smoothing), a * like(p, smoothing / N), a
    before = lo * inner + group_before(g)
    while before < hi:
        row = before + group_in(g)
        k, last, step = row * N + lane_in(g), (row + 1) * N - 1 if row < hi else -1, 1 << g
        if dense != 0 and alike(target, p):
            sure = sum_of(element, seen_as(target, p), zero, k, last, g)
            weight = hard * sure + a * like(p, smoothing)
            each(_dense_dx, (p, seen_as(target, p), weight, hard, soft), 0, dlogits, k, last, step)
        elif row < hi:
            label = row * N + index_of(me, target[row], N)
            each(_label_dx, (p, label, a, hard, soft), 0, dlogits, k, last, step)
        before += threads() >> g


@device
def _dense_dx(args, q, k):
    p, t, weight, hard, soft = args
    return p[k] * weight - t[k] * hard - soft


@device
def _label_dx(args, q, k):
    p, label, a, hard, soft = args
    d = p[k] * a - soft
    return d - hard if k == label else d


# ---------------------------------------------------------------- one element of each row
@kernel
def pick_fwd(me, rows, inner, N, x: Ptr, index: Ptr.index, y: Ptr):
    """y[r] = x[r, index[r]]; x (rows*inner, N), index and y (rows*inner,); rows shared."""
    lo, hi = share(me, rows)
    k = lo * inner + thread()
    while k < hi * inner:
        y[k] = x[k * N + index_of(me, index[k], N)]
        k += threads()


@kernel
def pick_bwd(me, rows, inner, N, index: Ptr.index, dy: Ptr, dx: Ptr):
    """dx[r, j] = dy[r] if j is index[r], else 0; all of dx is set; rows shared."""
    lo, hi = share(me, rows)
    fill(lo * inner * N, hi * inner * N, dx, like(dx, 0))
    sync()
    k = lo * inner + thread()
    while k < hi * inner:
        dx[k * N + index_of(me, index[k], N)] = dy[k]
        k += threads()


# ---------------------------------------------------------------- metrics
@device
def _with_place(x, q, k):
    return x[k], k


@device
def _first_larger(a, b):
    """The larger of two (value, place) pairs, of equals the first; a, if either is NaN."""
    return b if b[0] > a[0] or (b[0] == a[0] and b[1] < a[1]) else a


@device
def first_largest(x, k, last, N, g):
    """The place of a row's first largest element, by 2**g lanes; NaN is never larger."""
    start = last + 1 - N if last >= 0 else k
    best = (x[start] if last >= 0 else like(x, 0), start)
    best = fold(_with_place, _first_larger, best, best, x, 0, k, last, 1 << g)
    step = (1 << g) >> 1
    while step > 0:
        best = _first_larger(best, (shuffle_xor(best[0], step), shuffle_xor(best[1], step)))
        step >>= 1
    return best[1]


@device
def _hit(args, place, ok, k, last, g):
    """1 if the first largest score is the target's class, else 0."""
    me, N, dense, scores, target, q = args
    found = first_largest(scores, k, last, N, g)
    want = place * N
    if dense:
        want = first_largest(q, k, last, N, g)
    elif ok:
        want += index_of(me, target[place], N)
    return like(scores, 1 if ok and found == want else 0)


@kernel
def accuracy_fwd(me, rows, inner, N, dense, scores: Ptr, target: Ptr.index, t_l: Ptr):
    """l[r] = the number of inner places of r whose first largest score is the target's class; rows shared."""
    lo, hi = share(me, rows)
    dense = dense != 0 and alike(target, scores)
    rows_of_scores(_hit, (me, N, dense, scores, target, seen_as(target, scores)), lo, hi, inner, N, t_l)

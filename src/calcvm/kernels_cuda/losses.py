"""Losses and metrics: per-row values shared over rows, then a scalar by worker 0 (see `calcvm.ops.losses`)."""

from __future__ import annotations

from calcvm.kernels_cuda._common import Float, Ptr, kernel, kernel_from, share, trap  # noqa: F401
from calcvm.kernels_cuda._cuda import device, like, shared, shuffle_xor, sync, sync_warp, thread, threads
from calcvm.kernels_cuda._loops import elementwise, fill
from calcvm.kernels_cuda._math import exp, fabs, log, log1p, sqrt
from calcvm.kernels_cuda._reduce import (  # noqa: F401
    add,
    each,
    element,
    fold,
    group_before,
    group_in,
    join_slots,
    joined,
    lane_in,
    lanes_of,
    larger,
    outputs_at_once,
    reduce,
    slots_of,
)
from calcvm.kernels_cuda.reduction import INF, exp_below

BAD_LABEL = 1  # trap code

# ---------------------------------------------------------------- from rows to a scalar
SCALAR = '''\
def {name}(w, nw, rows, count, t_l: Ptr, {y}: Ptr):
    """{y} = {equation}; worker 0 alone."""
    if w == 0:
        zero = like({y}, 0)
        reduce(element, add, zero, zero, t_l, shared({y}), {put}, ({y}, like({y}, count)), 0, 1, rows, 1)
'''


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


for _name, _y, _equation, _how in (
    ("loss_mean", "loss", "sum_r l[r] / count", "_put_mean"),
    ("metric_mean", "y", "sum_r l[r] / count", "_put_mean"),
    ("metric_root_mean", "y", "sqrt(sum_r l[r] / count)", "_put_root_mean"),
):
    kernel_from(SCALAR.format(name=_name, y=_y, equation=_equation, put=_how), globals())

# ---------------------------------------------------------------- losses over pairs of equal shape
PAIR = '''\
def {name}_fwd(w, nw, rows, cols, {delta}x: Ptr, t: Ptr, t_l: Ptr):
    """l[r] = sum_c {equation}; rows shared."""
    q, stop = share(rows, w, nw)
    zero = like(x, 0)
    while q < stop:
        q += reduce(_{name}, add, zero, zero, ({args}), shared(x), _put, t_l, q, stop, cols, 1)
'''
PAIR_BWD = '''\
def {name}_bwd_{wrt}(w, nw, rows, cols, count, {delta}dloss: Ptr, {reads}: Ptr, d{wrt}: Ptr):
    """d{wrt} = dloss/count * {equation}; d{wrt} may be {either}; rows shared."""
    lo, hi = share(rows, w, nw)
    _{name}_{dx}(lo * cols, hi * cols, {args}, {seed} / like(dloss, count))
'''


@device
def _against(x, t):
    """How much of the target is against the logit."""
    return like(t, 1) - t if x > like(x, 0) else t


@device
def _binary_cross_entropy(pair, q, k):
    x, t = pair[0][k], pair[1][k]
    y, away = fabs(x), _against(x, t)
    return (like(x, 0) if away == like(x, 0) else y * away) + log1p(exp(-y))


@device
def _mse(pair, q, k):
    d = pair[0][k] - pair[1][k]
    return d * d


@device
def _mae(pair, q, k):
    return fabs(pair[0][k] - pair[1][k])


@device
def _huber(args, q, k):
    x, t, delta = args
    e = fabs(x[k] - t[k])
    return e * e * like(e, 0.5) if e <= delta else delta * (e - delta * like(e, 0.5))


def _mae_slope(x, t, a):
    d = x - t
    return a * (like(d, 1) if d > like(d, 0) else like(d, -1) if d < like(d, 0) else d)


def _huber_slope(x, t, delta, a):
    d = x - t
    d = delta if d > delta else d
    return a * (-delta if d < -delta else d)


def _binary_cross_entropy_slope(x, t, a):
    e = exp(-fabs(x))
    p, away = e / (e + like(e, 1)), _against(x, t)
    return a * (away - p if x > like(x, 0) else p - away)


_binary_cross_entropy_dx = elementwise(_binary_cross_entropy_slope, 2, 1)
_binary_cross_entropy_dt = elementwise(lambda x, a: -a * x, 1, 1)
_mse_dx = elementwise(lambda x, t, a: a * (x - t), 2, 1)
_mae_dx = elementwise(_mae_slope, 2, 1)
_huber_dx = elementwise(_huber_slope, 2, 2)

_XT, _ONE = {"args": "x, t"}, {"delta": ""}
_DELTA = {"delta": "delta: Float, "}
for _name, _equation, _how in (
    ("binary_cross_entropy", "|x|*(x > 0 ? 1 - t : t) + log(1 + exp(-|x|))", _ONE | _XT),
    ("mse", "(x - t)^2", _ONE | _XT),
    ("mae", "|x - t|", _ONE | _XT),
    ("huber", "(e = |x - t|) <= delta ? e^2/2 : delta*(e - delta/2)", _DELTA | {"args": "x, t, like(x, delta)"}),
):
    kernel_from(PAIR.format(name=_name, equation=_equation, **_how), globals())

_BOTH = {"reads": "x: Ptr, t", "either": "x or t", "seed": "dloss[0]", "dx": "dx"}
_X_ALONE = {"reads": "x", "either": "x", "seed": "dloss[0]", "dx": "dt", "args": "x, dt"}
_TWICE = _BOTH | {"seed": "(dloss[0] + dloss[0])"}
_DX, _DT = {"args": "x, t, dx"}, {"args": "t, x, dt"}
for _name, _wrt, _equation, _how in (
    ("binary_cross_entropy", "x", "(sigmoid(x) - t)", _ONE | _BOTH | _DX),
    ("binary_cross_entropy", "t", "-x", _ONE | _X_ALONE),
    ("mse", "x", "2*(x - t)", _ONE | _TWICE | _DX),
    ("mse", "t", "2*(t - x)", _ONE | _TWICE | _DT),
    ("mae", "x", "sign(x - t), sign(0) = 0", _ONE | _BOTH | _DX),
    ("mae", "t", "sign(t - x), sign(0) = 0", _ONE | _BOTH | _DT),
    ("huber", "x", "clamp(x - t, -delta, delta)", _DELTA | _BOTH | {"args": "x, t, dx, like(dx, delta)"}),
    ("huber", "t", "clamp(t - x, -delta, delta)", _DELTA | _BOTH | {"args": "t, x, dt, like(dt, delta)"}),
):
    kernel_from(PAIR_BWD.format(name=_name, wrt=_wrt, equation=_equation, **_how), globals())


# ---------------------------------------------------------------- rows of scores
@device
def rows_of_scores(value, args, lo, hi, inner, N, t_l):
    """t_l[i] = the sum of ``value(args, place, ok, k, last, g)`` over the ``inner`` places of row i, lo <= i < hi.

    A place is taken by 2**g lanes of a warp: elements k, k + 2**g, ... up to ``last`` are this lane's, and none
    where ``ok`` is not so.  Places are joined by slots, as `reduce` joins elements.
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
            while ahead < inner:  # all lanes of the warp go round as often
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


@device
def class_of(h, r, label, n):
    """The label as an index; a label that is none of 0..n-1 traps (and the index is safe)."""
    if label >= like(label, 0) and label < like(label, 1e18):
        k = int(label)
        if k < n and like(label, k) == label:
            return k
    trap(h, r, BAD_LABEL)
    return 0


# ---------------------------------------------------------------- softmax cross entropy
@device
def _below(args, q, k):
    """top - x."""
    x, top = args
    return top - x[k]


@device
def _weighted(args, q, k):
    """t*(top - x), without 0*inf where a masked class has the score -inf."""
    x, top, t = args
    return like(top, 0) if t[k] == like(top, 0) else t[k] * (top - x[k])


@device
def _softmax(args, q, k):
    x, top, scale = args
    return exp(x[k] - top) * scale


@device
def _entropy(args, place, ok, k, last, g):
    """p = softmax(logits) of a place, and its loss."""
    h, r, N, dense, smoothing, hard, soft, x, target, p = args
    step, zero = 1 << g, like(p, 0)
    top = joined(larger, fold(element, larger, -like(p, INF), -like(p, INF), x, 0, k, last, step), g)
    total = joined(add, fold(exp_below, add, zero, zero, (x, top), 0, k, last, step), g)
    weight, term = like(p, 1), zero
    if dense:
        sure = joined(add, fold(element, add, zero, zero, target, 0, k, last, step), g)
        weight = hard * sure + smoothing
        term = hard * joined(add, fold(_weighted, add, zero, zero, (x, top, target), 0, k, last, step), g)
    elif ok:
        term = hard * (top - x[place * N + class_of(h, r, target[place], N)])
    if soft != zero:
        term += soft * joined(add, fold(_below, add, zero, zero, (x, top), 0, k, last, step), g)
    sync_warp()  # p may be logits, of which each lane has read its label's
    each(_softmax, (x, top, like(p, 1) / total), 0, p, k, last, step)
    return weight * log(total) + term if ok else zero


@kernel
def softmax_cross_entropy_fwd(
    w, nw, rows, inner, N, dense, smoothing: Float, logits: Ptr, target: Ptr, p: Ptr, t_l: Ptr
):
    """p[r,j] = softmax(logits[r])[j]; l[r] = -sum_j q[r,j]*log(p[r,j]), q = (1-s)*target + s/N.

    logits (rows*inner, N), target the same or labels (rows*inner,), l (rows,) sums over inner; p may be
    logits; rows shared, a row of logits by some lanes of a warp.
    """
    lo, hi = share(rows, w, nw)
    hard, soft, s = like(p, 1 - smoothing), like(p, smoothing / N), like(p, smoothing)
    args = (h, r, N, dense, s, hard, soft, logits, target, p)  # noqa: F821
    rows_of_scores(_entropy, args, lo, hi, inner, N, t_l)


@kernel
def softmax_cross_entropy_bwd(
    w, nw, rows, inner, N, dense, count, smoothing: Float, dloss: Ptr, target: Ptr, p: Ptr, dlogits: Ptr
):
    """dlogits[r,j] = dloss/count * (p[r,j]*sum_j(q[r,j]) - q[r,j]); dlogits may be p; rows shared, as forward."""
    lo, hi = share(rows, w, nw)
    hi, g, zero = hi * inner, lanes_of(N), like(p, 0)
    a = dloss[0] / like(p, count)
    hard, soft, weight = a * like(p, 1 - smoothing), a * like(p, smoothing / N), a
    before = lo * inner + group_before(g)
    while before < hi:
        row = before + group_in(g)
        k, last, step = row * N + lane_in(g), (row + 1) * N - 1 if row < hi else -1, 1 << g
        if dense:
            sure = joined(add, fold(element, add, zero, zero, target, 0, k, last, step), g)
            weight = hard * sure + a * like(p, smoothing)
            each(_dense_dx, (p, target, weight, hard, soft), 0, dlogits, k, last, step)
        elif row < hi:
            label = row * N + class_of(h, r, target[row], N)  # noqa: F821
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


# ---------------------------------------------------------------- an element of each row
@kernel
def pick_fwd(w, nw, rows, inner, N, x: Ptr, index: Ptr, y: Ptr):
    """y[r] = x[r, index[r]]; x (rows*inner, N), index and y (rows*inner,); rows shared."""
    lo, hi = share(rows, w, nw)
    k = lo * inner + thread()
    while k < hi * inner:
        y[k] = x[k * N + class_of(h, r, index[k], N)]  # noqa: F821
        k += threads()


@kernel
def pick_bwd(w, nw, rows, inner, N, index: Ptr, dy: Ptr, dx: Ptr):
    """dx[r, j] = dy[r] where j is index[r], 0 elsewhere; all of dx is set; rows shared."""
    lo, hi = share(rows, w, nw)
    fill(lo * inner * N, hi * inner * N, dx, like(dx, 0))
    sync()
    k = lo * inner + thread()
    while k < hi * inner:
        dx[k * N + class_of(h, r, index[k], N)] = dy[k]  # noqa: F821
        k += threads()


# ---------------------------------------------------------------- metrics
@device
def _with_place(x, q, k):
    return x[k], k


@device
def _first_larger(a, b):
    """Of two (value, place) the larger, the first of equals; a, where one is NaN."""
    return b if b[0] > a[0] or (b[0] == a[0] and b[1] < a[1]) else a


@device
def first_largest(x, k, last, N, g):
    """Place of the first largest element of a row by 2**g lanes; NaN is never larger."""
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
    """1 where the first largest score is the target's class, else 0."""
    h, r, N, dense, scores, target = args
    found = first_largest(scores, k, last, N, g)
    want = place * N
    if dense:
        want = first_largest(target, k, last, N, g)
    elif ok:
        want += class_of(h, r, target[place], N)
    return like(scores, 1 if ok and found == want else 0)


@kernel
def accuracy_fwd(w, nw, rows, inner, N, dense, scores: Ptr, target: Ptr, t_l: Ptr):
    """l[r] = number of the inner places of r whose first largest score is the target's class; rows shared."""
    lo, hi = share(rows, w, nw)
    rows_of_scores(_hit, (h, r, N, dense, scores, target), lo, hi, inner, N, t_l)  # noqa: F821

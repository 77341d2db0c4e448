"""Reductions and softmax.  The order of a sum depends only on R (or N): see `_reduce`."""

from __future__ import annotations

from collections.abc import Callable

from calcvm.kernel import words
from calcvm.kernels_cuda._common import Ptr, kernel, kernel_as, share
from calcvm.kernels_cuda._cuda import as_f64, as_i64, device, like, shared, sync, thread, threads
from calcvm.kernels_cuda._math import exp, log
from calcvm.kernels_cuda._reduce import (
    add,
    divide,
    each,
    element,
    fold,
    group_before,
    group_in,
    joined,
    lane_in,
    lanes_of,
    larger,
    maximum,
    minimum,
    product,
    reduce,
    slot_of,
    slots_of,
    square,
)

INF = float("inf")

_one = device(lambda x, R: like(x, 1))
_part = device(lambda x, R: like(x, 1) / like(x, R))
_two = device(lambda x, R: like(x, 2))


@device
def _put(to, q, c, total):
    y, factor = to
    y[q + c] = like(y, total) * factor


# ---------------------------------------------------------------- sums over (R0, R1, R2) of (O, R0, K0, R1, K1, R2, I)
@device
def _place(sizes, q, k):
    """The place in x of element k, which belongs to output q; x is (O, K0, K1, R, I), R = (R0, R1, R2)."""
    R0, K0, R1, K1, R2, I = sizes
    R = R0 * R1 * R2
    group = divide(q, I)
    above, k1 = divide(group, K1), group - divide(group, K1) * K1
    o, k0 = divide(above, K0), above - divide(above, K0) * K0
    r, i = divide(k, I) - group * R, q - group * I
    r01, r2 = divide(r, R2), r - divide(r, R2) * R2
    r0, r1 = divide(r01, R1), r01 - divide(r01, R1) * R1
    return (((((o * R0 + r0) * K0 + k0) * R1 + r1) * K1 + k1) * R2 + r2) * I + i


def _sum(name: str, term: Callable, factor: Callable) -> None:
    @device
    def apart(args, q, k):
        x, sizes = args
        return term(x, q, _place(sizes, q, k))

    @device
    def all_of(me, O, R0, K0, R1, K1, R2, I, by, x, y):
        kept, R = K0 * K1 * I, R0 * R1 * R2
        units, each_has, ahead, end = (kept, 1, kept, O * kept) if by == 1 else (O, kept, 1, 1)
        lo, hi = share(me, units)
        lo, hi = lo * each_has, hi * each_has
        totals, to, o, zero = as_f64(shared(x)), (y, factor(x, R)), 0, like(x, 0)
        sizes = (R0, K0, R1, K1, R2, I)
        together = R0 * K0 * R1 == 1 or O * K0 * R1 * K1 == 1  # the terms of an output are R elements, I apart
        while o < end:  # once, except for a leading axis that is not shared
            q = o + lo
            while q < o + hi:
                if together:
                    q += reduce(term, add, zero, like(totals, 0), x, totals, _put, to, q, o + hi, R, I)
                else:
                    q += reduce(apart, add, zero, like(totals, 0), (x, sizes), totals, _put, to, q, o + hi, R, I)
            o += ahead

    @kernel_as(f"{name}_fwd")
    def run(me, phases, O, R0, K0, R1, K1, R2, I, by, wn, x: Ptr, y: Ptr, ws: Ptr):
        """y = sum_r term(x) * factor; totals are float64; O is shared, or the kept elements below it (by = 1).

        On a GPU the row has one phase.
        """
        if me.phase == 0:
            all_of(me, O, R0, K0, R1, K1, R2, I, by, x, y)


_sum("sum", element, _one)
_sum("mean", element, _part)
_sum("sum_squares", square, _one)


@device
def _coordinates(e, R, I):
    """(o, r, i) of element e of (O, R, I)."""
    u = divide(e, I)
    o = divide(u, R)
    return o, u - o * R, e - u * I


_spread = device(lambda x, e, d: d)
_spread_times_x = device(lambda x, e, d: d * x[0][e])


@device
def _output(e, sizes):
    """The output that element e of x belongs to."""
    R0, K0, R1, K1, R2, I = sizes
    u, k1, i = _coordinates(e, K1, R2 * I)
    v, k0, r1 = _coordinates(u, K0, R1)
    return ((divide(v, R0) * K0 + k0) * K1 + k1) * I + i - divide(i, I) * I


def _gradient(name: str, factor: Callable, formula: Callable, pointers: str) -> None:
    """dx[o,k,r] = formula of dy[o,k] * factor; all of dx is set, may be x; O*R0 rows are shared."""

    @kernel_as(f"{name}_bwd", words("O R0 K0 R1 K1 R2 I by", "", pointers.split()))
    def run(me, O, R0, K0, R1, K1, R2, I, by, dy, *xs):
        dx = xs[-1]
        lo, hi = share(me, O * R0)
        row = K0 * R1 * K1 * R2 * I
        e, stop, R = lo * row + thread(), hi * row, R0 * R1 * R2
        a, sizes = factor(dx, R), (R0, K0, R1, K1, R2, I)
        if R0 * K0 * R1 != 1 and O * K0 * R1 * K1 != 1:
            while e < stop:
                dx[e] = formula(xs, e, dy[_output(e, sizes)] * a)
                e += threads()
        elif e < stop:  # the thread's element is (o, r, i) of (O*K1, R, I); it advances by threads(), with carries
            o, r, i = _coordinates(e, R, I)
            o_step, r_step, i_step = _coordinates(threads(), R, I)
            while e < stop:
                dx[e] = formula(xs, e, dy[o * I + i] * a)
                e += threads()
                o, r, i = o + o_step, r + r_step, i + i_step
                if i >= I:
                    r, i = r + 1, i - I
                if r >= R:
                    o, r = o + 1, r - R


_gradient("sum", _one, _spread, "dy dx")
_gradient("mean", _part, _spread, "dy dx")
_gradient("sum_squares", _two, _spread_times_x, "dy x dx")


# ---------------------------------------------------------------- extrema over (R0, R1) of (O, P, R0, R1, I)
def _extremum(name: str, join: Callable, zero: float) -> None:
    @kernel_as(f"{name}_fwd")
    def run(me, O, P, R0, R1, I, by, x: Ptr, y: Ptr):
        """y = the extremum of x over R; x (O,P,R,I), y (O,P,I); O is shared, or I (by = 1)."""
        units, each_has, ahead, end = (I, 1, I, O * P * I) if by == 1 else (O, P * I, 1, 1)
        lo, hi = share(me, units)
        lo, hi = lo * each_has, hi * each_has
        totals, to, o, least = shared(x), (y, like(x, 1)), 0, like(x, zero)
        while o < end:  # once, except for a leading axis that is not shared
            q = o + lo
            while q < o + hi:
                q += reduce(element, join, least, least, x, totals, _put, to, q, o + hi, R0 * R1, I)
            o += ahead


_extremum("max", maximum, -INF)
_extremum("min", minimum, INF)

NOWHERE = 1 << 62


@kernel_as("max_bwd")
@kernel_as("min_bwd")
def _select(me, O, P, R0, R1, I, by, dy: Ptr, x: Ptr, y: Ptr, dx: Ptr):
    """dx = dy at the first r where x = y, or is NaN, else 0; all of dx is set, may be x; O is shared."""
    lo, hi = share(me, O)
    q, stop, R = lo * P * I, hi * P * I, R0 * R1
    found = as_i64(shared(x))
    while q < stop:
        n = reduce(_first, min, NOWHERE, NOWHERE, (x, y), found, _keep, found, q, stop, R, I)
        _set_at(found, q, n, R, I, dy, dx)
        sync()
        q += n


@device
def _first(args, q, k):
    """k if x[k] is the extremum (NaN counts as one)."""
    x, y = args
    v = x[k]
    return k if v == y[q] or v != v else NOWHERE


@device
def _keep(found, q, c, k):
    found[c] = k


@device
def _set_at(found, q, n, R, I, dy, dx):
    """dx = dy at found[c] in the columns of outputs q + c, c < n, else 0; each thread sets the places it searched."""
    shift = slots_of(R)
    u = thread()
    while u < n << shift:
        c, slot, k, last = slot_of(u, n, shift, q, R, I)
        each(_one_hot, (found[c], dy[q + c]), 0, dx, k, last, I << shift)
        u += threads()


@device
def _one_hot(args, q, k):
    at, dy = args
    return dy if k == at else like(dy, 0)


# ---------------------------------------------------------------- softmax
@device
def exp_below(args, q, k):
    """exp(x - top)."""
    x, top = args
    return exp(x[k] - top)


@device
def softmax_of(args, q, k):
    x, top, scale = args
    return exp(x[k] - top) * scale


@device
def _softmax_dx(args, q, k):
    dy, y, d = args
    return y[k] * (dy[k] - d)


@device
def _log_softmax(args, q, k):
    x, top, spread = args
    return (x[k] - top) - spread


@device
def _log_softmax_dx(args, q, k):
    dy, y, s = args
    return dy[k] - exp(y[k]) * s


@device
def sum_of(term, args, zero, k, last, g):
    """The sum of a row's terms by 2**g lanes; this lane has elements k, k + 2**g, ... up to ``last``."""
    return joined(add, fold(term, add, zero, zero, args, 0, k, last, 1 << g), g)


@device
def top_and_sum(x, zero, k, last, g):
    """The largest of a row's elements, and the sum of exp(x - top)."""
    least = like(x, -INF)
    top = joined(larger, fold(element, larger, least, least, x, 0, k, last, 1 << g), g)
    return top, sum_of(exp_below, (x, top), zero, k, last, g)


@device
def _softmax_args(x, zero, k, last, g):
    top, total = top_and_sum(x, zero, k, last, g)
    return x, top, like(x, 1) / total


@device
def _log_softmax_args(x, zero, k, last, g):
    top, total = top_and_sum(x, zero, k, last, g)
    return x, top, log(total)


_softmax_dx_args = device(lambda dy, y, zero, k, last, g: (dy, y, sum_of(product, (dy, y), zero, k, last, g)))
_log_softmax_dx_args = device(lambda dy, y, zero, k, last, g: (dy, y, sum_of(element, dy, zero, k, last, g)))


def _over_rows(name: str, pointers: str, totals: Callable, term: Callable) -> None:
    """Rows of N elements, by ``term`` of a row's ``totals``.

    (rows*inner, N); rows are shared, a row by several lanes of a warp; the last operand may be any of the others.
    """

    @kernel_as(name, words("rows inner N", "", pointers.split()))
    def run(me, rows, inner, N, *operands):
        out = operands[-1]
        lo, hi = share(me, rows)
        hi, g, zero = hi * inner, lanes_of(N), like(out, 0)
        before = lo * inner + group_before(g)
        while before < hi:
            row = before + group_in(g)
            k, last = row * N + lane_in(g), (row + 1) * N - 1 if row < hi else -1
            each(term, totals(*operands[:-1], zero, k, last, g), 0, out, k, last, 1 << g)
            before += threads() >> g


_over_rows("softmax_fwd", "x y", _softmax_args, softmax_of)  # y = exp(x - max x) / sum of the same
_over_rows("softmax_bwd", "dy y dx", _softmax_dx_args, _softmax_dx)  # dx = y*(dy - sum dy*y)
_over_rows("log_softmax_fwd", "x y", _log_softmax_args, _log_softmax)  # y = x - max x - log(sum exp(x - max x))
_over_rows("log_softmax_bwd", "dy y dx", _log_softmax_dx_args, _log_softmax_dx)  # dx = dy - exp(y)*sum dy


# ---------------------------------------------------------------- places in order
@kernel
def argsort_fwd(me, O, N, K, I, descending, x: Ptr, y: Ptr.int64):
    """y[o,:,i] = the first K places of x[o,:,i] in order: each place counts those before it.  o is shared."""
    lo, hi = share(me, O)
    t = lo * N * I + thread()
    while t < hi * N * I:
        i, n, o = t % I, t // I % N, t // (N * I)
        a, m, before = x[t], 0, 0
        while m < N and before < K:  # NaN is the largest, and of equals the first comes first
            b = x[(o * N + m) * I + i]
            if a == b or (a != a and b != b):
                before += m < n
            else:
                before += (b > a or b != b) == (descending == 1)
            m += 1
        if before < K:
            y[(o * K + before) * I + i] = n
        t += threads()

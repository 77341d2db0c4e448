"""Pooling of channels-last images: a thread computes an element of y or dx and visits its windows in a fixed order."""

from __future__ import annotations

from collections.abc import Callable

from calcvm.kernels_cuda._common import given, kernel_as, share
from calcvm.kernels_cuda._cuda import device, like, thread, threads
from calcvm.kernels_cuda._reduce import divide
from calcvm.kernels_cuda.elementwise import power_of
from calcvm.kernels_shared import pooling as shared

taps, covering, counted, adaptive = map(device, (shared.taps, shared.covering, shared.counted, shared.adaptive))
INF = float("inf")


@device
def _places(e, h, w, C):
    """(row, i, j, c) of element e of (rows, h, w, C)."""
    p = divide(e, C)
    q = divide(p, w)
    u = divide(q, h)
    return u, q - u * h, p - q * w, e - p * C


@device
def _of(o, i, axis):
    """The tap of window o at i, and the window's count."""
    first, tap, n = taps(o, axis)
    return tap + (i - first) // axis.d, counted(o, n, axis)


@device
def _having(i, axis):
    """The first window that contains i, the distance between such windows, and their end."""
    a, b = axis.s, axis.d
    while b > 0:
        a, b = b, a % b
    step = axis.d // a
    o, tap, n = covering(i, axis, step)
    return o, step, o + n * step


def _forward(take: Callable, put: Callable, start: Callable, place: int = 0) -> Callable:
    """The body of a kernel that computes each element of y from a window of ``x = given[place]``.

    ``state = take(given, x, t, state)`` for its taps, from ``start(x)`` on, then ``put(given, e, state, count, taps of a window)``.
    """

    @device
    def each(me, N, C, D, H, W, given):
        x = given[place]
        lo, hi = share(me, N * D.out)
        row = H.out * W.out * C
        e = lo * row + thread()
        while e < hi * row:
            u, v, o, c = _places(e, H.out, W.out, C)
            n = divide(u, D.out)
            i, ti, na = taps(u - n * D.out, D)
            j, tj, nb = taps(v, H)
            k, tk, nc = taps(o, W)
            state, a = start(x), 0
            while a < na:
                b = 0
                while b < nb:
                    at = (((n * D.size + i + a * D.d) * H.size + j + b * H.d) * W.size + k) * C + c
                    t = ((ti + a) * H.k + tj + b) * W.k + tk
                    m = 0
                    while m < nc:
                        state = take(given, x[at + m * W.d * C], t + m, state)
                        m += 1
                    b += 1
                a += 1
            count = counted(u - n * D.out, na, D) * counted(v, nb, H) * counted(o, nc, W)
            put(given, e, state, count, D.k * H.k * W.k)
            e += threads()

    return each


@device
def _put(given, e, total):
    given[-1][e] = total


def _backward(take: Callable, put: Callable = _put) -> Callable:
    """For each element of dx: sum ``take(given, o, t, count)`` over the windows o that contain it, then ``put(given, e, sum)``."""

    @device
    def each(me, N, C, D, H, W, given):
        lo, hi = share(me, N * D.size)
        row = H.size * W.size * C
        e = lo * row + thread()
        while e < hi * row:
            u, j, k, c = _places(e, H.size, W.size, C)
            n = divide(u, D.size)
            i = u - n * D.size
            a, step_a, end_a = _having(i, D)
            first_b, step_b, end_b = _having(j, H)
            first_m, step_m, end_m = _having(k, W)
            total = like(me.heap, 0)
            while a < end_a:
                ti, of_a = _of(a, i, D)
                b = first_b
                while b < end_b:
                    tj, of_b = _of(b, j, H)
                    m = first_m
                    while m < end_m:
                        tk, of_m = _of(m, k, W)
                        o = (((n * D.out + a) * H.out + b) * W.out + m) * C + c
                        total += take(given, o, (ti * H.k + tj) * W.k + tk, of_a * of_b * of_m)
                        m += step_m
                    b += step_b
                a += step_a
            put(given, e, total)
            e += threads()

    return each


_zero = device(lambda x: like(x, 0))
_least = device(lambda x: (like(x, -INF), 0))


# ---------------------------------------------------------------- the largest
@device
def _top(given, x, t, state):
    """The larger, NaN if either is; the first of equals or of NaNs."""
    best, index = state
    return (x, t) if best == best and not x <= best else (best, index)


@device
def _put_top(operands, e, state, count, taps):
    operands[1][e] = state[0]


@device
def _put_top_and_place(operands, e, state, count, taps):
    operands[1][e], operands[2][e] = state


@device
def _where_it_is(operands, o, t, count):
    dy, index, dx = operands
    return dy[o] if index[o] == t else like(dy, 0)


_tops, _tops_and_places = _forward(_top, _put_top, _least), _forward(_top, _put_top_and_place, _least)
_max_bwd = _backward(_where_it_is)


@device
def _max(me, N, C, D, H, W, operands):
    """y = the largest of x in the window, NaN if any is; index = its first tap; N*OD rows are shared."""
    if given(me, operands[2]):
        _tops_and_places(me, N, C, D, H, W, operands)
    else:
        _tops(me, N, C, D, H, W, operands)


# ---------------------------------------------------------------- the mean
@device
def _plus(operands, x, t, total):
    return total + x


@device
def _put_mean(operands, e, total, count, taps):
    y = operands[1]
    y[e] = total * (like(y, 1) / like(y, count))


@device
def _part(operands, o, t, count):
    dy = operands[0]
    return dy[o] * (like(dy, 1) / like(dy, count))


_avg, _avg_bwd = _forward(_plus, _put_mean, _zero), _backward(_part)


# ---------------------------------------------------------------- the norm
@device
def _plus_power(given, x, t, total):
    return total + power_of(x, given[0])


@device
def _put_root(given, e, total, count, taps):
    p, x, y = given
    y[e] = power_of(total * (like(y, taps) / like(y, count)), 1.0 / p)


@device
def _slope(given, o, t, count):
    return given[1][o]


@device
def _put_times_power(given, e, total):
    p, g, x, dx = given
    dx[e] = total * power_of(x[e], p - 1.0)


@device
def _lp_bwd_y(me, N, C, D, H, W, given):
    """g = k/count * dy*y^(1 - p), 0 where y is 0; N*OD rows are shared; g may be dy or y."""
    power, dy, y, g = given
    lo, hi = share(me, N * D.out)
    row = H.out * W.out * C
    e = lo * row + thread()
    while e < hi * row:
        r, o, q, c = _places(e, H.out, W.out, C)
        na, nb, nc = taps(r - divide(r, D.out) * D.out, D)[2], taps(o, H)[2], taps(q, W)[2]
        p, factor = y[e], like(y, D.k * H.k * W.k) / like(y, na * nb * nc)
        g[e] = like(p, 0) if p == like(p, 0) else dy[e] * power_of(p, 1.0 - power) * factor
        e += threads()


_lp, _lp_bwd = _forward(_plus_power, _put_root, _zero, 1), _backward(_slope, _put_times_power)
shared.register(kernel_as, adaptive, _max, _max_bwd, _max_bwd, _avg, _avg_bwd, _lp, _lp_bwd_y, _lp_bwd)

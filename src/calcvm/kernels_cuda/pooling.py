"""Pooling of channels-last images: a thread computes an element of y or dx and visits its windows in a fixed order."""

from __future__ import annotations

from collections.abc import Callable

from calcvm.formulas import windows
from calcvm.formulas.windows import WindowAxis
from calcvm.kernels_cuda._common import Float, Ptr, given, kernel, share
from calcvm.kernels_cuda._cuda import device, like, thread, threads
from calcvm.kernels_cuda._reduce import divide
from calcvm.kernels_cuda.elementwise import power_of

taps, covering, counted, adaptive = map(device, (windows.taps, windows.covering, windows.counted, windows.adaptive))
NONE = -1  # of padding: it is not counted
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


def _forward(take: Callable, put: Callable) -> Callable:
    """For each element of y: ``state = take(args, x, t, state)`` for its taps, then ``put(args, e, state, count)``."""

    @device
    def each(me, args, x, start, N, C, D, H, W):
        lo, hi = share(me, N * D.out)
        row = H.out * W.out * C
        e = lo * row + thread()
        while e < hi * row:
            u, v, o, c = _places(e, H.out, W.out, C)
            n = divide(u, D.out)
            i, ti, na = taps(u - n * D.out, D)
            j, tj, nb = taps(v, H)
            k, tk, nc = taps(o, W)
            state, a = start, 0
            while a < na:
                b = 0
                while b < nb:
                    at = (((n * D.size + i + a * D.d) * H.size + j + b * H.d) * W.size + k) * C + c
                    t = ((ti + a) * H.k + tj + b) * W.k + tk
                    m = 0
                    while m < nc:
                        state = take(args, x[at + m * W.d * C], t + m, state)
                        m += 1
                    b += 1
                a += 1
            put(args, e, state, counted(u - n * D.out, na, D) * counted(v, nb, H) * counted(o, nc, W))
            e += threads()

    return each


def _backward(take: Callable, put: Callable) -> Callable:
    """For each element of dx: sum ``take(args, o, t, count)`` over the windows o that contain it, then ``put(args, e, sum)``."""

    @device
    def each(me, args, zero, N, C, D, H, W):
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
            total = zero
            while a < end_a:
                ti, of_a = _of(a, i, D)
                b = first_b
                while b < end_b:
                    tj, of_b = _of(b, j, H)
                    m = first_m
                    while m < end_m:
                        tk, of_m = _of(m, k, W)
                        o = (((n * D.out + a) * H.out + b) * W.out + m) * C + c
                        total += take(args, o, (ti * H.k + tj) * W.k + tk, of_a * of_b * of_m)
                        m += step_m
                    b += step_b
                a += step_a
            put(args, e, total)
            e += threads()

    return each


@device
def _put(args, e, total):
    args[0][e] = total


# ---------------------------------------------------------------- the largest
@device
def _top(args, x, t, state):
    """The larger, NaN if either is; the first of equals or of NaNs."""
    best, index = state
    return (x, t) if best == best and not x <= best else (best, index)


@device
def _put_top(args, e, state, count):
    args[0][e] = state[0]


@device
def _put_top_and_place(args, e, state, count):
    args[0][e], args[1][e] = state


@device
def _where_it_is(args, o, t, count):
    dx, dy, index = args
    return dy[o] if index[o] == t else like(dy, 0)


_tops, _tops_and_places = _forward(_top, _put_top), _forward(_top, _put_top_and_place)
_to_places = _backward(_where_it_is, _put)


@device
def _max(me, N, C, D, H, W, x, y, index):
    if given(me, index):
        _tops_and_places(me, (y, index), x, (like(x, -INF), 0), N, C, D, H, W)
    else:
        _tops(me, (y,), x, (like(x, -INF), 0), N, C, D, H, W)


@kernel
def max_pool_fwd(
    me, N, D, H, W, C, OD, OH, OW, kd, kh, kw, sd, sh, sw, pd, ph, pw, dd, dh, dw, x: Ptr, y: Ptr, index: Ptr.uint8
):
    """y = the largest of x in the window, NaN if any is; index = its first tap; N*OD rows are shared."""
    z, v, u = (
        WindowAxis(D, OD, kd, sd, pd, dd, NONE),
        WindowAxis(H, OH, kh, sh, ph, dh, NONE),
        WindowAxis(W, OW, kw, sw, pw, dw, NONE),
    )
    _max(me, N, C, z, v, u, x, y, index)


@kernel
def max_pool_bwd(
    me, N, D, H, W, C, OD, OH, OW, kd, kh, kw, sd, sh, sw, pd, ph, pw, dd, dh, dw, dy: Ptr, index: Ptr.uint8, dx: Ptr
):
    """dx = the sum of dy over the windows whose index is the element's tap; all of dx is set; N*D rows are shared."""
    z, v, u = (
        WindowAxis(D, OD, kd, sd, pd, dd, NONE),
        WindowAxis(H, OH, kh, sh, ph, dh, NONE),
        WindowAxis(W, OW, kw, sw, pw, dw, NONE),
    )
    _to_places(me, (dx, dy, index), like(dx, 0), N, C, z, v, u)


@kernel
def adaptive_max_pool_fwd(me, N, D, H, W, C, OD, OH, OW, x: Ptr, y: Ptr, index: Ptr.int32):
    """y = the largest of x in the window, NaN if any is; index = its first tap; N*OD rows are shared."""
    _max(me, N, C, adaptive(D, OD), adaptive(H, OH), adaptive(W, OW), x, y, index)


@kernel
def adaptive_max_pool_bwd(me, N, D, H, W, C, OD, OH, OW, dy: Ptr, index: Ptr.int32, dx: Ptr):
    """dx = the sum of dy over the windows whose index is the element's tap; all of dx is set; N*D rows are shared."""
    _to_places(me, (dx, dy, index), like(dx, 0), N, C, adaptive(D, OD), adaptive(H, OH), adaptive(W, OW))


# ---------------------------------------------------------------- the mean
@device
def _plus(args, x, t, total):
    return total + x


@device
def _put_mean(args, e, total, count):
    y = args[0]
    y[e] = total * (like(y, 1) / like(y, count))


@device
def _part(args, o, t, count):
    dx, dy = args
    return dy[o] * (like(dy, 1) / like(dy, count))


_means, _parts = _forward(_plus, _put_mean), _backward(_part, _put)


@device
def _after(padded, q):
    return q if padded == 1 else NONE


@kernel
def avg_pool_fwd(
    me, N, D, H, W, C, OD, OH, OW, kd, kh, kw, sd, sh, sw, pd, ph, pw, dd, dh, dw, qd, qh, qw, padded, x: Ptr, y: Ptr
):
    """y = the sum of x in the window / its count; N*OD rows are shared."""
    z, v = WindowAxis(D, OD, kd, sd, pd, dd, _after(padded, qd)), WindowAxis(H, OH, kh, sh, ph, dh, _after(padded, qh))
    _means(me, (y,), x, like(x, 0), N, C, z, v, WindowAxis(W, OW, kw, sw, pw, dw, _after(padded, qw)))


@kernel
def avg_pool_bwd(
    me, N, D, H, W, C, OD, OH, OW, kd, kh, kw, sd, sh, sw, pd, ph, pw, dd, dh, dw, qd, qh, qw, padded, dy: Ptr, dx: Ptr
):
    """dx = the sum of dy / the window's count, over windows that contain the element; all of dx is set; N*D rows are shared."""
    z, v = WindowAxis(D, OD, kd, sd, pd, dd, _after(padded, qd)), WindowAxis(H, OH, kh, sh, ph, dh, _after(padded, qh))
    _parts(me, (dx, dy), like(dx, 0), N, C, z, v, WindowAxis(W, OW, kw, sw, pw, dw, _after(padded, qw)))


@kernel
def adaptive_avg_pool_fwd(me, N, D, H, W, C, OD, OH, OW, x: Ptr, y: Ptr):
    """y = the mean of x in the window; N*OD rows are shared."""
    _means(me, (y,), x, like(x, 0), N, C, adaptive(D, OD), adaptive(H, OH), adaptive(W, OW))


@kernel
def adaptive_avg_pool_bwd(me, N, D, H, W, C, OD, OH, OW, dy: Ptr, dx: Ptr):
    """dx = the sum of dy / the window's size, over windows that contain the element; all of dx is set; N*D rows are shared."""
    _parts(me, (dx, dy), like(dx, 0), N, C, adaptive(D, OD), adaptive(H, OH), adaptive(W, OW))


# ---------------------------------------------------------------- the norm
@device
def _plus_power(args, x, t, total):
    return total + power_of(x, args[1])


@device
def _put_root(args, e, total, count):
    y, p, whole = args
    y[e] = power_of(total * (like(y, whole) / like(y, count)), 1.0 / p)


@device
def _slope(args, o, t, count):
    return args[1][o]


@device
def _put_times_power(args, e, total):
    dx, t_g, x, p = args
    dx[e] = total * power_of(x[e], p - 1.0)


_roots, _from_slopes = _forward(_plus_power, _put_root), _backward(_slope, _put_times_power)


@kernel
def lp_pool_fwd(
    me, N, D, H, W, C, OD, OH, OW, kd, kh, kw, sd, sh, sw, pd, ph, pw, dd, dh, dw, power: Float, x: Ptr, y: Ptr
):
    """y = (k/count * the sum of x^p in the window)^(1/p), k the taps of a whole window; N*OD rows are shared."""
    z, v, u = (
        WindowAxis(D, OD, kd, sd, pd, dd, NONE),
        WindowAxis(H, OH, kh, sh, ph, dh, NONE),
        WindowAxis(W, OW, kw, sw, pw, dw, NONE),
    )
    _roots(me, (y, power, kd * kh * kw), x, like(x, 0), N, C, z, v, u)


@kernel
def lp_pool_bwd_y(
    me, N, D, H, W, C, OD, OH, OW, kd, kh, kw, sd, sh, sw, pd, ph, pw, dd, dh, dw, power: Float, dy: Ptr, y: Ptr,
    t_g: Ptr,
):  # fmt: skip
    """g = k/count * dy*y^(1 - p), 0 where y is 0; N*OD rows are shared; g may be dy or y."""
    lo, hi = share(me, N * OD)
    row = OH * OW * C
    z, v, u = (
        WindowAxis(D, OD, kd, sd, pd, dd, NONE),
        WindowAxis(H, OH, kh, sh, ph, dh, NONE),
        WindowAxis(W, OW, kw, sw, pw, dw, NONE),
    )
    e = lo * row + thread()
    while e < hi * row:
        r, o, q, c = _places(e, OH, OW, C)
        na, nb, nc = taps(r - divide(r, OD) * OD, z)[2], taps(o, v)[2], taps(q, u)[2]
        p, factor = y[e], like(y, kd * kh * kw) / like(y, na * nb * nc)
        t_g[e] = like(p, 0) if p == like(p, 0) else dy[e] * power_of(p, 1.0 - power) * factor
        e += threads()


@kernel
def lp_pool_bwd(
    me, N, D, H, W, C, OD, OH, OW, kd, kh, kw, sd, sh, sw, pd, ph, pw, dd, dh, dw, power: Float, t_g: Ptr, x: Ptr,
    dx: Ptr,
):  # fmt: skip
    """dx = x^(p - 1) * the sum of g over the windows that contain the element; all of dx is set; N*D rows are shared."""
    z, v, u = (
        WindowAxis(D, OD, kd, sd, pd, dd, NONE),
        WindowAxis(H, OH, kh, sh, ph, dh, NONE),
        WindowAxis(W, OW, kw, sw, pw, dw, NONE),
    )
    _from_slopes(me, (dx, t_g, x, power), like(dx, 0), N, C, z, v, u)

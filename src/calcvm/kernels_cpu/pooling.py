"""Pooling of channels-last images.

Forward: windows run one by one, or together along the last axis if all their taps are inside, where their distance is constant.
Backward: an element of dx gathers from the windows that contain it, so a worker writes only its own elements, in the same order
for any team.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import numpy as np

from calcvm.kernels_cpu._common import at, given, kernel_as, lanes, like, njit, share
from calcvm.kernels_cpu._math import fill
from calcvm.kernels_cpu._windows import (
    TABLE,
    chosen,
    first_of_largest,
    largest,
    spread,
    spread_chosen,
    sums,
    table,
)
from calcvm.kernels_cpu.elementwise import odd_power, power_of, power_y, powers
from calcvm.kernels_shared import pooling as shared

taps, covering, counted, adaptive = map(njit, (shared.taps, shared.covering, shared.counted, shared.adaptive))
MANY = 64  # from this many taps on, scattering a window's one element is cheaper than looking at all

_sums, _sums_too = sums("as_they_are"), sums("too", add=True)
_squares = sums("squares", lambda x: x * x)
_of_powers = sums("powers", lambda x, p, odd: power_of(x, p, x.const(0.0), odd).rounded(x), "dd")
_slope = powers(lambda dy, y, z, a: z.const(0.0).where(y.as_f64().equals(0), dy.as_f64() * z * a), "vv")
_times_power = powers(lambda d, x, z, a: d.as_f64() * z, "vv")


# ---------------------------------------------------------------- forward
def _forward(windows: Any) -> Any:
    """A function that sets rows [lo, hi) of y, (N*OD, OH, OW, C), by ``windows(args, m, n, gap, loops, t, i, o, count)``.

    It covers m windows, ``gap`` apart in x, of n elements each.  loops : (na, nb, nc, sa, sb, sc).  t : (t, ta, tb).  i, o : offsets of
    the first tap in x and of the output.  D, H, W : axes.
    """

    @njit
    def line(args, C, W, first, last, na, nb, sa, sb, t, ta, tb, x, y, count):
        begin = end = last  # of windows that lie inside
        if W.s > 0:
            begin = min(max((W.p + W.s - 1) // W.s, first), last)
            end = min(max((W.size - 1 - (W.k - 1) * W.d + W.p) // W.s + 1, begin), last)
        o = first
        while o < last:
            i, tap, nc, m = o * W.s - W.p, 0, W.k, end - o
            inside = begin <= o < end
            if not inside:
                i, tap, nc = taps(o, W)
                m = 1
            among = count * counted(o, nc, W)
            n = C
            if W.s == 1:  # taps of neighbours are neighbours
                n, m = m * C, 1
            loops, numbers = (na, nb, nc, sa, sb, W.d * C), (t + tap, ta, tb)
            windows(args, m, n, W.s * C, loops, numbers, x + i * C, y + o * C, among)
            o = end if inside else o + 1

    @njit
    def rows(args, lo, hi, C, D, H, W):
        if _alone(H) and _alone(W):  # one axis, of which the worker has a part
            u = lo
            while u < hi:
                n = u // D.out
                end = min(hi, (n + 1) * D.out)
                x, y = n * D.size * C, n * D.out * C
                line(args, C, D, u - n * D.out, end - n * D.out, 1, 1, 0, 0, 0, 0, 0, x, y, 1)
                u = end
            return
        sa, sb, ta, tb = D.d * H.size * W.size * C, H.d * W.size * C, H.k * W.k, W.k
        for u in range(lo, hi):
            n = u // D.out
            o = u - n * D.out
            i, td, na = taps(o, D)
            of_d = counted(o, na, D)
            for v in range(H.out):
                j, th, nb = taps(v, H)
                x, y = ((n * D.size + i) * H.size + j) * W.size * C, (u * H.out + v) * W.out * C
                t, count = (td * H.k + th) * W.k, of_d * counted(v, nb, H)
                line(args, C, W, 0, W.out, na, nb, sa, sb, t, ta, tb, x, y, count)

    return rows


@njit(inline=True)
def _alone(a):
    return a.size * a.out * a.k == 1


# ---------------------------------------------------------------- backward
@njit(inline=True)
def _tile(a):
    """Whether windows neither overlap nor leave gaps."""
    return a.s == a.k and a.p == 0 and a.d == 1


@njit(inline=True)
def _step(a):
    """The distance between successive windows that contain one element."""
    return a.d // gcd(a.s, a.d)


def _backward(gather: Any, scatter: Any) -> Any:
    """A function that sets rows [lo, hi) of dx, (N*D, H, W, C).

    Elements gather: ``gather(args, m, n, gap, to_gap, loops, t, o, i)`` sets n elements at each of m places, ``gap`` apart in dy and
    ``to_gap`` in dx; loops : (na, nb, nc, sa, sb, sc) over the windows that contain them, t : (t, ta, tb, tc) their taps there.
    Windows that are tiles scatter, with one load for several stores: ``scatter(args, m, n, gap, nc, sc, t, o, i)`` sets the nc taps
    of m windows of n elements.  o, i : offsets of the first window in dy, and of the first element.
    """

    @njit
    def by_elements(args, C, W, first, last, na, nb, sa, sb, t, ta, tb, y, x):
        step = _step(W)
        begin = min(max((W.k - 1) * W.d - W.p, first), last)  # of elements that no window lacks
        end = min(max(W.out * W.s - W.p, begin), last)
        i = first
        while i < last:
            o, tap, nc = covering(i, W, step)
            m, n = 1, C
            if begin <= i < end and W.s == 1:  # windows of neighbours are neighbours
                n = (end - i) * C
            elif begin <= i < end:
                m = (end - i + W.s - 1) // W.s
            loops, numbers = (na, nb, nc, sa, sb, step * C), (t + tap, ta, tb, -(step * W.s // W.d))
            gather(args, m, n, C, W.s * C, loops, numbers, y + o * C, x + i * C)
            i += 1
            if i == begin + W.s:
                i = max(i, end)

    @njit
    def by_tiles(args, C, W, first, last, covered, t, y, x):
        dx = args[0]
        done = max(min(W.out * W.s, last), first) if covered else first
        fill((last - done) * C, at(dx, x + done * C), like(dx, 0))
        o = first // W.s
        while o * W.s < done:
            i = max(o * W.s, first)
            nc, m = min((o + 1) * W.s, done) - i, 1
            if nc == W.s:
                m = (done - i) // W.s
            scatter(args, m, C, W.s * C, nc, C, t + i - o * W.s, y + o * C, x + i * C)
            o += m

    @njit(inline=True)
    def line(args, tiled, C, W, first, last, na, nb, sa, sb, t, ta, tb, y, x):
        if tiled:
            by_tiles(args, C, W, first, last, na * nb > 0, t, y, x)
        else:
            by_elements(args, C, W, first, last, na, nb, sa, sb, t, ta, tb, y, x)

    @njit
    def rows(args, lo, hi, C, D, H, W):
        tiled = _tile(D) and _tile(H) and _tile(W) and D.s * H.s * W.s > 1
        if _alone(H) and _alone(W):
            u = lo
            while u < hi:
                n = u // D.size
                end = min(hi, (n + 1) * D.size)
                y, x = n * D.out * C, n * D.size * C
                line(args, tiled, C, D, u - n * D.size, end - n * D.size, 1, 1, 0, 0, 0, 0, 0, y, x)
                u = end
            return
        step_d, step_h = _step(D), _step(H)
        sa, sb = step_d * H.out * W.out * C, step_h * W.out * C
        ta, tb = -(step_d * D.s // D.d) * H.k * W.k, -(step_h * H.s // H.d) * W.k
        for u in range(lo, hi):
            n = u // D.size
            o, td, na = covering(u - n * D.size, D, step_d)
            for v in range(H.size):
                g, th, nb = covering(v, H, step_h)
                y, x = ((n * D.out + o) * H.out + g) * W.out * C, (u * H.size + v) * W.size * C
                line(args, tiled, C, W, 0, W.size, na, nb, sa, sb, (td * H.k + th) * W.k, ta, tb, y, x)

    return rows


def _one_by_one(window: Any) -> Any:
    """The same for windows that differ: ``window(args, m, n, nc, C, gap, count, o, i)`` adds the shares of nc windows to n elements.

    It covers m places, ``gap`` apart in dx.  Neighbours in the same windows, except along the last axis, gather together; other
    windows scatter.
    """

    @njit(inline=True)
    def count(o, a):
        return counted(o, taps(o, a)[2], a)

    @njit
    def line(args, C, W, begin, end, of_h, y, x):
        """Add the shares of one row of windows to one row of elements."""
        if begin == end:
            for c in range(W.out):
                i, _, nc = taps(c, W)
                window(args, nc, C, 1, 0, W.d * C, of_h * counted(c, nc, W), y + c * C, x + i * C)
            return
        o, _, nc = covering(begin, W, 1)
        window(args, 1, (end - begin) * C, nc, C, 0, of_h * W.k, y + o * C, x + begin * C)
        for k in range(W.size - (end - begin)):
            i = k if k < begin else k + end - begin
            o, _, nc = covering(i, W, 1)
            for c in range(o, o + nc):
                window(args, 1, C, 1, 0, 0, of_h * count(c, W), y + c * C, x + i * C)

    @njit
    def rows(args, lo, hi, C, D, H, W):
        dx, step_d, step_h = args[0], _step(D), _step(H)
        begin = end = W.size  # of elements whose windows along the last axis are all inside
        if W.s == 1 and W.d == 1:
            begin = min(W.k - 1, W.size)
            end = max(min(W.size - W.k, W.out - 1 - W.p) + 1, begin)
        for u in range(lo, hi):
            n = u // D.size
            o_d, _, n_d = covering(u - n * D.size, D, step_d)
            for v in range(H.size):
                o_h, _, n_h = covering(v, H, step_h)
                x = (u * H.size + v) * W.size * C
                fill(W.size * C, at(dx, x), like(dx, 0))
                for a in range(o_d, o_d + n_d * step_d, step_d):
                    of_d = count(a, D)
                    for b in range(o_h, o_h + n_h * step_h, step_h):
                        y = ((n * D.out + a) * H.out + b) * W.out * C
                        line(args, C, W, begin, end, of_d * count(b, H), y, x)

    return rows


@njit(inline=True)
def _even(a):
    """Whether all windows have the same count."""
    inside = (a.out - 1) * a.s + a.k <= a.size + a.p + max(a.q, 0)
    return a.s > 0 and inside and (a.q >= 0 or a.p == 0)


# ---------------------------------------------------------------- the largest
@njit(inline=True)
def _top(args, m, n, gap, loops, t, i, o, count):
    x, y = args
    na, nb, nc, sa, sb, sc = loops
    largest(m, n, gap, na, nb, nc, sa, sb, sc, at(x, i), at(y, o))


@njit(inline=True)
def _top_and_place(args, m, n, gap, loops, t, i, o, count):
    x, y, index = args
    (na, nb, nc, sa, sb, sc), (t, ta, tb) = loops, t
    first_of_largest(m, n, gap, na, nb, nc, sa, sb, sc, t, ta, tb, at(x, i), at(y, o), at(index, o))


@njit(inline=True)
def _from_places(args, m, n, gap, to_gap, loops, t, o, i):
    dx, dy, index = args
    (na, nb, nc, sa, sb, sc), (t, ta, tb, tc) = loops, t
    chosen(m, n, gap, to_gap, na, nb, nc, sa, sb, sc, t, ta, tb, tc, at(dy, o), at(index, o), at(dx, i))


@njit(inline=True)
def _to_places(args, m, n, gap, nc, sc, t, o, i):
    dx, dy, index = args
    spread_chosen(m, n, gap, nc, sc, t, at(dy, o), at(index, o), at(dx, i))


_tops, _tops_and_places, _chosen = _forward(_top), _forward(_top_and_place), _backward(_from_places, _to_places)


@njit(inline=True)
def _start(o, a):
    """The place where window o begins, inside the axis or not."""
    return o * a.s - a.p if a.s > 0 else o * a.size // a.out


@njit(inline=True)
def _touching(first, last, a):
    """The windows that may contain one of the elements from first to last."""
    if a.s == 0:
        return first * a.out // a.size, (last * a.out + a.size - 1) // a.size
    return max(-(((a.k - 1) * a.d - first - a.p) // a.s), 0), min((last - 1 + a.p) // a.s + 1, a.out)


@njit(inline=True)
def _offset(t, C, D, H, W):
    """The offset of tap t from the start of its window."""
    i = t // W.k
    return (((i // H.k) * D.d * H.size + i % H.k * H.d) * W.size + t % W.k * W.d) * C


@njit
def _scattered(dx, dy, index, lo, hi, C, D, H, W):
    """The same, visiting each window once and each element singly: for few channels C, or many taps."""
    row, n_taps, offset = H.size * W.size * C, D.k * H.k * W.k, table()
    for t in range(min(n_taps, TABLE)):
        offset[t] = _offset(t, C, D, H, W)
    first, last = lo * row, hi * row
    fill(last - first, at(dx, first), like(dx, 0))
    turns, n = (1, W.out * C) if W.s == 1 else (W.out, C)
    u = lo
    while u < hi:
        image = u // D.size
        end = min(hi, (image + 1) * D.size)
        begin, behind = _touching(u - image * D.size, end - image * D.size, D)
        for o in range(begin, behind):
            for v in range(H.out):
                y = ((image * D.out + o) * H.out + v) * W.out * C
                line = ((image * D.size + _start(o, D)) * H.size + _start(v, H)) * W.size
                for g in range(turns):
                    x = (line + _start(g, W)) * C
                    for c in range(n):
                        t = np.int64(index[y + c])
                        if 0 <= t < n_taps:  # data from elsewhere may be anything
                            to = x + c + (offset[t] if n_taps <= TABLE else _offset(t, C, D, H, W))
                            if first <= to < last:
                                dx[to] += dy[y + c]
                    y += n
        u = end


@njit(inline=True)
def _max(me, N, C, D, H, W, operands):
    """y = the largest of x in the window, NaN if any is; index = its first tap; N*OD rows are shared."""
    x, y, index = operands
    lo, hi = share(me, N * D.out)
    if given(me, index):
        _tops_and_places(operands, lo, hi, C, D, H, W)
    else:
        _tops((x, y), lo, hi, C, D, H, W)


@njit(inline=True)
def _of_places(scatters, me, N, C, D, H, W, operands):
    """dx = the sum of dy over the windows whose index is the element's tap; all of dx is set; N*D rows are shared."""
    dy, index, dx = operands
    lo, hi = share(me, N * D.size)
    if scatters:
        _scattered(dx, dy, index, lo, hi, C, D, H, W)
    else:
        _chosen((dx, dy, index), lo, hi, C, D, H, W)


@njit(inline=True)
def _max_bwd(me, N, C, D, H, W, operands):
    # (8, 28, 28, 20) by 3x3, 2 apart, on Zen 4: 37 instead of 60 us; with 32 channels 57 either way
    n = lanes(operands[2])
    few = C < (n if _tile(W) else 2 * n)
    _of_places(8 * C <= n or (few and W.s > 1), me, N, C, D, H, W, operands)


@njit(inline=True)
def _adaptive_max_bwd(me, N, C, D, H, W, operands):
    gathers = C >= lanes(operands[2]) and _tile(D) and _tile(H) and _tile(W) and D.k * H.k * W.k <= MANY
    _of_places(not gathers, me, N, C, D, H, W, operands)


# ---------------------------------------------------------------- the mean
@njit(inline=True)
def _mean(args, m, n, gap, loops, t, i, o, count):
    x, y = args
    na, nb, nc, sa, sb, sc = loops
    _sums(m, n, gap, n, na, nb, nc, sa, sb, sc, at(x, i), at(y, o), like(x, 1) / like(x, count))


@njit(inline=True)
def _from_windows(args, m, n, gap, to_gap, loops, t, o, i):
    dx, dy, factor = args
    na, nb, nc, sa, sb, sc = loops
    _sums(m, n, gap, to_gap, na, nb, nc, sa, sb, sc, at(dy, o), at(dx, i), factor)


@njit(inline=True)
def _to_windows(args, m, n, gap, nc, sc, t, o, i):
    dx, dy, factor = args
    spread(m, n, gap, nc, sc, at(dy, o), at(dx, i), factor)


@njit(inline=True)
def _part_of_window(args, m, n, nc, C, gap, count, o, i):
    dx, dy = args
    _sums_too(m, n, 0, gap, 1, 1, nc, 0, 0, C, at(dy, o), at(dx, i), like(dx, 1) / like(dx, count))


_means, _sums_of_windows, _parts_of_windows = (
    _forward(_mean),
    _backward(_from_windows, _to_windows),
    _one_by_one(_part_of_window),
)


@njit(inline=True)
def _avg(me, N, C, D, H, W, operands):
    """y = the sum of x in the window / its count; N*OD rows are shared."""
    lo, hi = share(me, N * D.out)
    _means(operands, lo, hi, C, D, H, W)


@njit(inline=True)
def _avg_bwd(me, N, C, D, H, W, operands):
    """dx = the sum of dy / the window's count, over windows that contain the element; all of dx is set; N*D rows are shared."""
    dy, dx = operands
    lo, hi = share(me, N * D.size)
    if _even(D) and _even(H) and _even(W):
        factor = like(dx, 1) / like(dx, D.k * H.k * W.k)
        _sums_of_windows((dx, dy, factor), lo, hi, C, D, H, W)
    else:
        _parts_of_windows((dx, dy), lo, hi, C, D, H, W)


# ---------------------------------------------------------------- the norm
@njit(inline=True)
def _powers_in_window(args, m, n, gap, loops, t, i, o, count):
    x, y, p, odd, whole = args
    na, nb, nc, sa, sb, sc = loops
    x, y, factor = at(x, i), at(y, o), like(x, whole) / like(x, count)
    if p == 2.0:
        _squares(m, n, gap, n, na, nb, nc, sa, sb, sc, x, y, factor)
    else:
        _of_powers(m, n, gap, n, na, nb, nc, sa, sb, sc, x, y, factor, p, odd)


@njit(inline=True)
def _slope_of_window(args, m, n, gap, loops, t, i, o, count):
    y, dy, t_g, p, odd, whole = args
    _slope(m * n, at(dy, o), at(y, o), at(t_g, o), p, 0.0, odd, whole / count)


_sums_of_powers, _slopes = _forward(_powers_in_window), _forward(_slope_of_window)


@njit(inline=True)
def _lp(me, N, C, D, H, W, given):
    """y = (k/count * the sum of x^p in the window)^(1/p), k the taps of a whole window; N*OD rows are shared."""
    power, x, y = given
    lo, hi = share(me, N * D.out)
    args, row, root = (x, y, power, odd_power(power), D.k * H.k * W.k), H.out * W.out * C, 1.0 / power
    _sums_of_powers(args, lo, hi, C, D, H, W)
    y = at(y, lo * row)
    power_y((hi - lo) * row, y, y, root, 0.0, odd_power(root), root)


@njit(inline=True)
def _lp_bwd_y(me, N, C, D, H, W, given):
    """g = k/count * dy*y^(1 - p), 0 where y is 0; N*OD rows are shared; g may be dy or y."""
    power, dy, y, g = given
    lo, hi = share(me, N * D.out)
    less, row = 1.0 - power, H.out * W.out * C
    if _even(D) and _even(H) and _even(W):
        first = lo * row
        _slope((hi - lo) * row, at(dy, first), at(y, first), at(g, first), less, 0.0, odd_power(less), 1.0)
    else:
        _slopes((y, dy, g, less, odd_power(less), D.k * H.k * W.k), lo, hi, C, D, H, W)


@njit(inline=True)
def _lp_bwd(me, N, C, D, H, W, given):
    """dx = x^(p - 1) * the sum of g over the windows that contain the element; all of dx is set; N*D rows are shared."""
    power, g, x, dx = given
    lo, hi = share(me, N * D.size)
    _sums_of_windows((dx, g, like(dx, 1)), lo, hi, C, D, H, W)
    less, row = power - 1.0, H.size * W.size * C
    dx, x = at(dx, lo * row), at(x, lo * row)
    _times_power((hi - lo) * row, dx, x, dx, less, 0.0, odd_power(less), less)


shared.register(kernel_as, adaptive, _max, _max_bwd, _adaptive_max_bwd, _avg, _avg_bwd, _lp, _lp_bwd_y, _lp_bwd)

"""Pooling of images that lie channels last.

Forward: a window after the other, or along the last axis all whose taps are inside, where they lie at one distance.  Backward: an element
of dx gathers from the windows that have it, so a worker writes its own elements alone, in one order for any team.
"""

from __future__ import annotations

from math import gcd
from typing import Any

from calcvm.formulas import windows
from calcvm.kernels_cpu._common import Float, Ptr, at, given, kernel, lanes, like, njit, share
from calcvm.kernels_cpu._formulas import V
from calcvm.kernels_cpu._math import fill
from calcvm.kernels_cpu._windows import (
    chosen,
    chosen_too,
    first_of_largest,
    largest,
    spread,
    spread_chosen,
    spread_chosen_too,
    spread_too,
    sums,
    table,
)
from calcvm.kernels_cpu.elementwise import odd_power, power_of, power_y, powers

taps, covering, counted, adaptive = map(njit, (windows.taps, windows.covering, windows.counted, windows.adaptive))
NONE = -1  # of padding: it is not counted

_sums, _sums_too = sums("as_they_are"), sums("too", add=True)
_squares = sums("squares", lambda x: x * x)
_of_powers = sums("powers", lambda x, p, odd: power_of(x, p, x.const(0.0), odd).rounded(x), "dd")
_slope = powers(lambda dy, y, z, a: z.const(0.0).where(y.as_f64().equals(0), dy.as_f64() * z * a), "vv")
_times_power = powers(lambda d, x, z, a: d.as_f64() * z, "vv")


# ---------------------------------------------------------------- forward
def _forward(windows: Any) -> Any:
    """What sets the rows [lo, hi) of y, (N*OD, OH, OW, C), by ``windows(args, m, n, gap, loops, t, i, o, count)``.

    m windows, ``gap`` apart in x, of n elements each.  loops : (na, nb, nc, sa, sb, sc).  t : (t, ta, tb).  i, o : of the first tap
    in x, and of the output.  An axis : (size, out, k, s, p, d, padding after that counts).
    """

    @njit
    def line(args, C, axis, first, last, na, nb, sa, sb, t, ta, tb, x, y, count):
        size, out, k, s, p, d, q = axis
        begin = end = last  # of windows that lie inside
        if s > 0:
            begin = min(max((p + s - 1) // s, first), last)
            end = min(max((size - 1 - (k - 1) * d + p) // s + 1, begin), last)
        o = first
        while o < last:
            i, tap, nc, m = o * s - p, 0, k, end - o
            inside = begin <= o < end
            if not inside:
                i, tap, nc = taps(o, size, out, k, s, p, d)
                m = 1
            among = count * counted(o, nc, size, k, s, p, q)
            n = C
            if s == 1:  # taps of neighbours are neighbours
                n, m = m * C, 1
            loops, numbers = (na, nb, nc, sa, sb, d * C), (t + tap, ta, tb)
            windows(args, m, n, s * C, loops, numbers, x + i * C, y + o * C, among)
            o = end if inside else o + 1

    @njit
    def rows(args, lo, hi, C, D, H, W):
        (d, od, kd, sd, pd, dd, qd), (h, oh, kh, sh, ph, dh, qh), (w, ow, kw, sw, pw, dw, qw) = D, H, W
        if h * oh * kh * w * ow * kw == 1:  # one axis, of which the worker has a part
            u = lo
            while u < hi:
                n = u // od
                end = min(hi, (n + 1) * od)
                line(args, C, D, u - n * od, end - n * od, 1, 1, 0, 0, 0, 0, 0, n * d * C, n * od * C, 1)
                u = end
            return
        for u in range(lo, hi):
            n = u // od
            z = u - n * od
            i, td, nd = taps(z, d, od, kd, sd, pd, dd)
            of_d = counted(z, nd, d, kd, sd, pd, qd)
            for v in range(oh):
                j, th, nh = taps(v, h, oh, kh, sh, ph, dh)
                count = of_d * counted(v, nh, h, kh, sh, ph, qh)
                x, y, t = ((n * d + i) * h + j) * w * C, (u * oh + v) * ow * C, (td * kh + th) * kw
                line(args, C, W, 0, ow, nd, nh, dd * h * w * C, dh * w * C, t, kh * kw, kw, x, y, count)

    return rows


# ---------------------------------------------------------------- backward
def _backward(gather: Any, scatter: Any) -> Any:
    """What sets the rows [lo, hi) of dx, (N*D, H, W, C).

    Where windows step by one along the last axis, elements gather: ``gather(args, n, loops, t, o, i)`` sets n elements; loops : (na, nb, nc,
    sa, sb, sc) over the windows that have them, t : (t, ta, tb, tc) that they are there.  Elsewhere windows scatter: ``scatter(args, m, n,
    gap, nc, sc, t, o, i, add)``, m windows of n elements and nc taps.  o, i : of the first window in dy, and of the first element.
    """

    @njit
    def by_elements(args, C, axis, first, last, na, nb, sa, sb, t, ta, tb, y, x):
        size, out, k, s, p, d, q = axis
        begin = min(max((k - 1) * d - p, first), last)  # of elements that k windows have
        end = min(max(out - p, begin), last)
        i = first
        while i < last:
            o, tap, nc, n = i + p - (k - 1) * d, k - 1, k, end - i
            if i < begin or i >= end:
                o, tap, nc = covering(i, size, out, k, s, p, d, d)
                n = 1
            gather(args, n * C, (na, nb, nc, sa, sb, d * C), (t + tap, ta, tb, -1), y + o * C, x + i * C)
            i += n

    @njit
    def by_windows(args, C, axis, first, last, na, nb, sa, sb, t, ta, tb, y, x):
        size, out, k, s, p, d, q = axis
        dx = args[0]
        tiled = na * nb > 0 and s == k and p == 0 and d == 1  # the first windows set what all have, others add
        done = max(min(out * s, last), first) if tiled else first
        fill((last - done) * C, at(dx, x + done * C), like(dx, 0))
        p, size = p + first, last - first
        before = max(-(((k - 1) * d - p) // s), 0)
        behind = min((size - 1 + p) // s + 1, out)
        begin = min(max((p + s - 1) // s, before), behind)  # of windows that lie inside
        end = min(max((size - 1 - (k - 1) * d + p) // s + 1, begin), behind)
        for a in range(na):
            for b in range(nb):
                o = before
                while o < behind:
                    i, tap, nc, m = o * s - p, 0, k, end - o
                    if o < begin or o >= end:
                        i, tap, nc = taps(o, size, out, k, s, p, d)
                        m = 1
                    number, start = t + a * ta + b * tb + tap, y + a * sa + b * sb + o * C
                    scatter(args, m, C, s * C, nc, d * C, number, start, x + (first + i) * C, a + b > 0 or not tiled)
                    o += m

    @njit(inline=True)
    def line(args, C, axis, first, last, na, nb, sa, sb, t, ta, tb, y, x):
        if axis[3] == 1:
            by_elements(args, C, axis, first, last, na, nb, sa, sb, t, ta, tb, y, x)
        else:
            by_windows(args, C, axis, first, last, na, nb, sa, sb, t, ta, tb, y, x)

    @njit
    def rows(args, lo, hi, C, D, H, W):
        (d, od, kd, sd, pd, dd, qd), (h, oh, kh, sh, ph, dh, qh), (w, ow, kw, sw, pw, dw, qw) = D, H, W
        if h * oh * kh * w * ow * kw == 1:
            u = lo
            while u < hi:
                n = u // d
                end = min(hi, (n + 1) * d)
                line(args, C, D, u - n * d, end - n * d, 1, 1, 0, 0, 0, 0, 0, n * od * C, n * d * C)
                u = end
            return
        step_d, step_h = dd // gcd(sd, dd), dh // gcd(sh, dh)
        sa, sb = step_d * oh * ow * C, step_h * ow * C
        ta, tb = -(step_d * sd // dd) * kh * kw, -(step_h * sh // dh) * kw
        for u in range(lo, hi):
            n = u // d
            o, td, na = covering(u - n * d, d, od, kd, sd, pd, dd, step_d)
            for v in range(h):
                g, th, nb = covering(v, h, oh, kh, sh, ph, dh, step_h)
                y, x = ((n * od + o) * oh + g) * ow * C, (u * h + v) * w * C
                line(args, C, W, 0, w, na, nb, sa, sb, (td * kh + th) * kw, ta, tb, y, x)

    return rows


def _one_by_one(window: Any) -> Any:
    """The same where windows differ: ``window(args, n, nc, C, t, count, o, i)`` adds to n elements what they have of nc windows.

    t : the tap that they are in the first of these, and one less in each after it.
    """

    @njit(inline=True)
    def of(o, i, axis):
        """Of window o: the tap that i is, and what it counts."""
        size, out, k, s, p, d, q = axis
        first, tap, n = taps(o, size, out, k, s, p, d)
        return tap + (i - first) // d, counted(o, n, size, k, s, p, q)

    @njit(inline=True)
    def having(i, axis):
        """The first window that has i, how far they are apart, how many there are."""
        size, out, k, s, p, d, q = axis
        step = d // gcd(s, d)
        o, tap, n = covering(i, size, out, k, s, p, d, step)
        return o, step, n

    @njit
    def rows(args, lo, hi, C, D, H, W):
        (d, od, kd, sd, pd, dd, qd), (h, oh, kh, sh, ph, dh, qh), (w, ow, kw, sw, pw, dw, qw) = D, H, W
        dx = args[0]
        begin = end = w  # of elements whose windows along the last axis all lie inside
        if sw == 1 and dw == 1:
            begin = min(kw - 1, w)
            end = max(min(w - kw, ow - 1 - pw) + 1, begin)
        for u in range(lo, hi):
            n = u // d
            z = u - n * d
            o_d, step_d, n_d = having(z, D)
            for v in range(h):
                o_h, step_h, n_h = having(v, H)
                i = 0
                while i < w:
                    run = end - i if begin <= i < end else 1
                    o_w, step_w, n_w = having(i, W)
                    x = ((u * h + v) * w + i) * C
                    fill(run * C, at(dx, x), like(dx, 0))
                    for a in range(o_d, o_d + n_d * step_d, step_d):
                        td, of_d = of(a, z, D)
                        for b in range(o_h, o_h + n_h * step_h, step_h):
                            th, of_h = of(b, v, H)
                            y = ((n * od + a) * oh + b) * ow
                            if run > 1:
                                t = (td * kh + th + 1) * kw - 1
                                window(args, run * C, n_w, C, t, of_d * of_h * kw, (y + o_w) * C, x)
                                continue
                            for c in range(o_w, o_w + n_w * step_w, step_w):
                                tw, of_w = of(c, i, W)
                                t = (td * kh + th) * kw + tw
                                window(args, C, 1, 0, t, of_d * of_h * of_w, (y + c) * C, x)
                    i += run

    return rows


@njit(inline=True)
def _even(axis):
    """Whether all windows along an axis count the same."""
    size, out, k, s, p, d, q = axis
    return s > 0 and (out - 1) * s + k <= size + p + q if q >= 0 else s > 0 and p == 0 and (out - 1) * s + k <= size


@njit(inline=True)
def _adapted(size, out):
    return (*adaptive(size, out), NONE)


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
def _from_places(args, n, loops, t, o, i):
    dx, dy, index = args
    (na, nb, nc, sa, sb, sc), (t, ta, tb, tc) = loops, t
    chosen(n, na, nb, nc, sa, sb, sc, t, ta, tb, tc, at(dy, o), at(index, o), at(dx, i))


@njit(inline=True)
def _to_places(args, m, n, gap, nc, sc, t, o, i, add):
    dx, dy, index = args
    if add:
        spread_chosen_too(m, n, gap, nc, sc, t, at(dy, o), at(index, o), at(dx, i))
    else:
        spread_chosen(m, n, gap, nc, sc, t, at(dy, o), at(index, o), at(dx, i))


@njit(inline=True)
def _to_place_of_one(args, n, nc, C, t, count, o, i):
    dx, dy, index = args
    chosen_too(n, 1, 1, nc, 0, 0, C, t, 0, 0, -1, at(dy, o), at(index, o), at(dx, i))


_tops, _tops_and_places, _chosen = _forward(_top), _forward(_top_and_place), _backward(_from_places, _to_places)
_chosen_one_by_one = _one_by_one(_to_place_of_one)


@njit
def _scattered(dx, dy, index, lo, hi, C, D, H, W):
    """The same element by element, each window once: where vectors of C elements are no gain."""
    (d, od, kd, sd, pd, dd, qd), (h, oh, kh, sh, ph, dh, qh), (w, ow, kw, sw, pw, dw, qw) = D, H, W
    row, offset = h * w * C, table()
    for t in range(256):  # an index from elsewhere may be any
        i, j = t // (kh * kw), t // kw % kh
        offset[t] = ((i * dd * h + j * dh) * w + t % kw * dw) * C if i < kd else -(1 << 62)
    first, last = lo * row, hi * row
    fill(last - first, at(dx, first), like(dx, 0))
    u = lo
    while u < hi:
        n = u // d
        end = min(hi, (n + 1) * d)
        begin = max(-(((kd - 1) * dd - (u - n * d) - pd) // sd), 0)
        for o in range(begin, min((end - 1 - n * d + pd) // sd + 1, od)):
            for v in range(oh):
                y = ((n * od + o) * oh + v) * ow * C
                x = (((n * d + o * sd - pd) * h + v * sh - ph) * w - pw) * C
                for g in range(ow):
                    for c in range(C):
                        to = x + offset[index[y + c]] + c
                        if first <= to < last:
                            dx[to] += dy[y + c]
                    x, y = x + sw * C, y + C
        u = end


@kernel
def max_pool_fwd(
    me, N, D, H, W, C, OD, OH, OW, kd, kh, kw, sd, sh, sw, pd, ph, pw, dd, dh, dw, x: Ptr, y: Ptr, index: Ptr.uint8
):
    """y = the largest of x in the window, NaN if any is; index = the first tap where it is; N*OD rows are shared."""
    lo, hi = share(me, N * OD)
    Z, V, U = (D, OD, kd, sd, pd, dd, NONE), (H, OH, kh, sh, ph, dh, NONE), (W, OW, kw, sw, pw, dw, NONE)
    if given(me, index):
        _tops_and_places((x, y, index), lo, hi, C, Z, V, U)
    else:
        _tops((x, y), lo, hi, C, Z, V, U)


@kernel
def max_pool_bwd(
    me, N, D, H, W, C, OD, OH, OW, kd, kh, kw, sd, sh, sw, pd, ph, pw, dd, dh, dw, dy: Ptr, index: Ptr.uint8, dx: Ptr
):
    """dx = the sum of dy over the windows whose index is the element's tap; all of dx is set; N*D rows are shared."""
    lo, hi = share(me, N * D)
    Z, V, U = (D, OD, kd, sd, pd, dd, NONE), (H, OH, kh, sh, ph, dh, NONE), (W, OW, kw, sw, pw, dw, NONE)
    if C < lanes(dx) and sw > 1:
        _scattered(dx, dy, index, lo, hi, C, Z, V, U)
    else:
        _chosen((dx, dy, index), lo, hi, C, Z, V, U)


@kernel
def adaptive_max_pool_fwd(me, N, D, H, W, C, OD, OH, OW, x: Ptr, y: Ptr, index: Ptr.int32):
    """y = the largest of x in the window, NaN if any is; index = the first tap where it is; N*OD rows are shared."""
    lo, hi = share(me, N * OD)
    if given(me, index):
        _tops_and_places((x, y, index), lo, hi, C, _adapted(D, OD), _adapted(H, OH), _adapted(W, OW))
    else:
        _tops((x, y), lo, hi, C, _adapted(D, OD), _adapted(H, OH), _adapted(W, OW))


@kernel
def adaptive_max_pool_bwd(me, N, D, H, W, C, OD, OH, OW, dy: Ptr, index: Ptr.int32, dx: Ptr):
    """dx = the sum of dy over the windows whose index is the element's tap; all of dx is set; N*D rows are shared."""
    lo, hi = share(me, N * D)
    Z, V, U = _adapted(D, OD), _adapted(H, OH), _adapted(W, OW)
    if _even(Z) and _even(V) and _even(U):
        _chosen((dx, dy, index), lo, hi, C, Z, V, U)
    else:
        _chosen_one_by_one((dx, dy, index), lo, hi, C, Z, V, U)


# ---------------------------------------------------------------- the mean
@njit(inline=True)
def _mean(args, m, n, gap, loops, t, i, o, count):
    x, y = args
    na, nb, nc, sa, sb, sc = loops
    _sums(m, n, gap, na, nb, nc, sa, sb, sc, at(x, i), at(y, o), like(x, 1) / like(x, count))


@njit(inline=True)
def _from_windows(args, n, loops, t, o, i):
    dx, dy, factor = args
    na, nb, nc, sa, sb, sc = loops
    _sums(1, n, 0, na, nb, nc, sa, sb, sc, at(dy, o), at(dx, i), factor)


@njit(inline=True)
def _to_windows(args, m, n, gap, nc, sc, t, o, i, add):
    dx, dy, factor = args
    if add:
        spread_too(m, n, gap, nc, sc, at(dy, o), at(dx, i), factor)
    else:
        spread(m, n, gap, nc, sc, at(dy, o), at(dx, i), factor)


@njit(inline=True)
def _part_of_window(args, n, nc, C, t, count, o, i):
    dx, dy = args
    _sums_too(1, n, 0, 1, 1, nc, 0, 0, C, at(dy, o), at(dx, i), like(dx, 1) / like(dx, count))


_means, _sums_of_windows, _parts_of_windows = _forward(_mean), _backward(_from_windows, _to_windows), _one_by_one(_part_of_window)


@njit(inline=True)
def _from_means(me, N, C, dy, dx, D, H, W):
    lo, hi = share(me, N * D[0])
    if _even(D) and _even(H) and _even(W):
        factor = like(dx, 1) / like(dx, D[2] * H[2] * W[2])
        _sums_of_windows((dx, dy, factor), lo, hi, C, D, H, W)
    else:
        _parts_of_windows((dx, dy), lo, hi, C, D, H, W)


@njit(inline=True)
def _after(padded, q):
    return q if padded == 1 else NONE


@kernel
def avg_pool_fwd(
    me, N, D, H, W, C, OD, OH, OW, kd, kh, kw, sd, sh, sw, pd, ph, pw, dd, dh, dw, qd, qh, qw, padded, x: Ptr, y: Ptr
):
    """y = the sum of x in the window / what it counts; N*OD rows are shared."""
    lo, hi = share(me, N * OD)
    Z, V = (D, OD, kd, sd, pd, dd, _after(padded, qd)), (H, OH, kh, sh, ph, dh, _after(padded, qh))
    _means((x, y), lo, hi, C, Z, V, (W, OW, kw, sw, pw, dw, _after(padded, qw)))


@kernel
def avg_pool_bwd(
    me, N, D, H, W, C, OD, OH, OW, kd, kh, kw, sd, sh, sw, pd, ph, pw, dd, dh, dw, qd, qh, qw, padded, dy: Ptr, dx: Ptr
):
    """dx = the sum of dy / what a window counts, over those that have the element; all of dx is set; N*D rows are shared."""
    Z, V = (D, OD, kd, sd, pd, dd, _after(padded, qd)), (H, OH, kh, sh, ph, dh, _after(padded, qh))
    _from_means(me, N, C, dy, dx, Z, V, (W, OW, kw, sw, pw, dw, _after(padded, qw)))


@kernel
def adaptive_avg_pool_fwd(me, N, D, H, W, C, OD, OH, OW, x: Ptr, y: Ptr):
    """y = the mean of x in the window; N*OD rows are shared."""
    lo, hi = share(me, N * OD)
    _means((x, y), lo, hi, C, _adapted(D, OD), _adapted(H, OH), _adapted(W, OW))


@kernel
def adaptive_avg_pool_bwd(me, N, D, H, W, C, OD, OH, OW, dy: Ptr, dx: Ptr):
    """dx = the sum of dy / elements of the window, over those that have the element; all of dx is set; N*D rows are shared."""
    _from_means(me, N, C, dy, dx, _adapted(D, OD), _adapted(H, OH), _adapted(W, OW))


# ---------------------------------------------------------------- the norm
@njit(inline=True)
def _powers_in_window(args, m, n, gap, loops, t, i, o, count):
    x, y, p, odd, whole = args
    na, nb, nc, sa, sb, sc = loops
    x, y, factor = at(x, i), at(y, o), like(x, whole) / like(x, count)
    if p == 2.0:
        _squares(m, n, gap, na, nb, nc, sa, sb, sc, x, y, factor)
    else:
        _of_powers(m, n, gap, na, nb, nc, sa, sb, sc, x, y, factor, p, odd)


@njit(inline=True)
def _slope_of_window(args, m, n, gap, loops, t, i, o, count):
    y, dy, t_g, p, odd, whole = args
    _slope(m * n, at(dy, o), at(y, o), at(t_g, o), p, 0.0, odd, whole / count)


_sums_of_powers, _slopes = _forward(_powers_in_window), _forward(_slope_of_window)


@kernel
def lp_pool_fwd(
    me, N, D, H, W, C, OD, OH, OW, kd, kh, kw, sd, sh, sw, pd, ph, pw, dd, dh, dw, power: Float, x: Ptr, y: Ptr
):
    """y = (k/count * the sum of x^p in the window)^(1/p), k the taps of a whole one; N*OD rows are shared."""
    lo, hi = share(me, N * OD)
    Z, V, U = (D, OD, kd, sd, pd, dd, NONE), (H, OH, kh, sh, ph, dh, NONE), (W, OW, kw, sw, pw, dw, NONE)
    args, row, root = (x, y, power, odd_power(power), kd * kh * kw), OH * OW * C, 1.0 / power
    _sums_of_powers(args, lo, hi, C, Z, V, U)
    y = at(y, lo * row)
    power_y((hi - lo) * row, y, y, root, 0.0, odd_power(root), root)


@kernel
def lp_pool_bwd_y(
    me, N, D, H, W, C, OD, OH, OW, kd, kh, kw, sd, sh, sw, pd, ph, pw, dd, dh, dw, power: Float, dy: Ptr, y: Ptr, t_g: Ptr
):
    """g = k/count * dy*y^(1 - p), 0 where y is; N*OD rows are shared; g may be dy or y."""
    lo, hi = share(me, N * OD)
    Z, V, U = (D, OD, kd, sd, pd, dd, NONE), (H, OH, kh, sh, ph, dh, NONE), (W, OW, kw, sw, pw, dw, NONE)
    less, row = 1.0 - power, OH * OW * C
    if _even(Z) and _even(V) and _even(U):
        first = lo * row
        _slope((hi - lo) * row, at(dy, first), at(y, first), at(t_g, first), less, 0.0, odd_power(less), 1.0)
    else:
        _slopes((y, dy, t_g, less, odd_power(less), kd * kh * kw), lo, hi, C, Z, V, U)


@kernel
def lp_pool_bwd(
    me, N, D, H, W, C, OD, OH, OW, kd, kh, kw, sd, sh, sw, pd, ph, pw, dd, dh, dw, power: Float, t_g: Ptr, x: Ptr, dx: Ptr
):
    """dx = x^(p - 1) * the sum of g over the windows that have the element; all of dx is set; N*D rows are shared."""
    lo, hi = share(me, N * D)
    Z, V, U = (D, OD, kd, sd, pd, dd, NONE), (H, OH, kh, sh, ph, dh, NONE), (W, OW, kw, sw, pw, dw, NONE)
    _sums_of_windows((dx, t_g, like(dx, 1)), lo, hi, C, Z, V, U)
    less, row = power - 1.0, H * W * C
    dx, x = at(dx, lo * row), at(x, lo * row)
    _times_power((hi - lo) * row, dx, x, dx, less, 0.0, odd_power(less), less)

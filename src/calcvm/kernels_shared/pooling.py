"""Pooling: the places of windows along an axis, and the kernels' words."""

from __future__ import annotations

from typing import Any, NamedTuple

from calcvm.kernel import words

SIZES, WINDOW = "N D H W C OD OH OW", "kd kh kw sd sh sw pd ph pw dd dh dw"
NONE = -1  # of padding: it is not counted


class WindowAxis(NamedTuple):
    """An axis of ``size`` elements and ``out`` windows of ``k`` taps, ``d`` apart; window o begins at o*s - p.

    q : elements of padding after the axis that are counted, along with those before it, or NONE.
    If s is 0, windows are adaptive: from floor(o*size/out) to ceil((o + 1)*size/out).
    """

    size: Any
    out: Any
    k: Any
    s: Any
    p: Any
    d: Any
    q: Any


def adaptive(size, out):
    """The axis of adaptive windows: of one size if ``out`` divides ``size``; otherwise k exceeds the largest."""
    k = size // max(out, 1)
    if k > 0 and k * out == size:
        return WindowAxis(size, out, k, k, 0, 1, NONE)
    return WindowAxis(size, out, k + 2, 0, 0, 1, NONE)


def taps(o, a):
    """For window o: the first element inside the axis, its tap, and how many taps are inside."""
    if a.s == 0:
        first = o * a.size // a.out
        return first, 0, ((o + 1) * a.size + a.out - 1) // a.out - first
    start = o * a.s - a.p
    t = (a.d - 1 - start) // a.d if start < 0 else 0
    return start + t * a.d, t, max(min(a.k, (a.size - start + a.d - 1) // a.d) - t, 0)


def covering(i, a, step):
    """For element i: the first window that contains it, its tap there, and how many windows contain it.

    These windows are ``step`` = d/gcd(s, d) apart; the tap is step*s/d less in each (in adaptive ones: i less the window's first).
    """
    if a.s == 0:
        o = i * a.out // a.size
        return o, i - o * a.size // a.out, ((i + 1) * a.out + a.size - 1) // a.size - o
    at = i + a.p
    last = min(at // a.s, a.out - 1)
    o = max(-(((a.k - 1) * a.d - at) // a.s), 0)
    while a.d > 1 and o <= last and (at - o * a.s) % a.d != 0:
        o += 1
    return o, (at - o * a.s) // a.d, max((last - o) // step + 1, 0)


def counted(o, n, a):
    """The count of window o, n of whose taps are inside."""
    return n if a.s == 0 or a.q < 0 else min(a.k, a.size + a.q - o * a.s + a.p)


def register(kernel_as, adaptive, max, max_bwd, adaptive_max_bwd, avg, avg_bwd, lp, lp_bwd_y, lp_bwd):
    """Register all kernels, by their bodies ``body(me, N, C, D, H, W, given)``.

    D, H, W : axes.  given : the power of a norm, and the operands.
    """

    def sliding(name, body, operands, reals=""):
        @kernel_as(name, words(f"{SIZES} {WINDOW}", reals, operands.split()))
        def run(me, N, D, H, W, C, OD, OH, OW, kd, kh, kw, sd, sh, sw, pd, ph, pw, dd, dh, dw, *given):
            z, v = WindowAxis(D, OD, kd, sd, pd, dd, NONE), WindowAxis(H, OH, kh, sh, ph, dh, NONE)
            body(me, N, C, z, v, WindowAxis(W, OW, kw, sw, pw, dw, NONE), given)

    def counting(name, body, operands):
        @kernel_as(name, words(f"{SIZES} {WINDOW} qd qh qw padded", "", operands.split()))
        def run(
            me, N, D, H, W, C, OD, OH, OW, kd, kh, kw, sd, sh, sw, pd, ph, pw, dd, dh, dw, qd, qh, qw, padded, *given
        ):
            if padded != 1:
                qd, qh, qw = NONE, NONE, NONE
            z, v = WindowAxis(D, OD, kd, sd, pd, dd, qd), WindowAxis(H, OH, kh, sh, ph, dh, qh)
            body(me, N, C, z, v, WindowAxis(W, OW, kw, sw, pw, dw, qw), given)

    def adapting(name, body, operands):
        @kernel_as(name, words(SIZES, "", operands.split()))
        def run(me, N, D, H, W, C, OD, OH, OW, *given):
            body(me, N, C, adaptive(D, OD), adaptive(H, OH), adaptive(W, OW), given)

    sliding("max_pool_fwd", max, "x y index.uint8")
    sliding("max_pool_bwd", max_bwd, "dy index.uint8 dx")
    adapting("adaptive_max_pool_fwd", max, "x y index.int32")
    adapting("adaptive_max_pool_bwd", adaptive_max_bwd, "dy index.int32 dx")
    counting("avg_pool_fwd", avg, "x y")
    counting("avg_pool_bwd", avg_bwd, "dy dx")
    adapting("adaptive_avg_pool_fwd", avg, "x y")
    adapting("adaptive_avg_pool_bwd", avg_bwd, "dy dx")
    sliding("lp_pool_fwd", lp, "x y", "power")
    sliding("lp_pool_bwd_y", lp_bwd_y, "dy y t_g", "power")
    sliding("lp_pool_bwd", lp_bwd, "t_g x dx", "power")

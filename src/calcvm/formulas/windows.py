"""The places of windows along an axis: integers, for the kernels of both devices."""

from __future__ import annotations

from typing import Any, NamedTuple


class WindowAxis(NamedTuple):
    """An axis of ``size`` elements and ``out`` windows of ``k`` taps, ``d`` apart; window o begins at o*s - p.

    q : elements of padding after the axis that are counted, along with those before it; -1: none is counted.
    If s is 0, windows are adaptive: from floor(o*size/out) to ceil((o + 1)*size/out).
    """

    size: Any
    out: Any
    k: Any
    s: Any
    p: Any
    d: Any
    q: Any


def adaptive(size, out):  # type: ignore[no-untyped-def]
    """The axis of adaptive windows: of one size if ``out`` divides ``size``; otherwise k exceeds the largest."""
    k = size // max(out, 1)
    if k > 0 and k * out == size:
        return WindowAxis(size, out, k, k, 0, 1, -1)
    return WindowAxis(size, out, k + 2, 0, 0, 1, -1)


def taps(o, a):  # type: ignore[no-untyped-def]
    """For window o: the first element inside the axis, its tap, and how many taps are inside."""
    if a.s == 0:
        first = o * a.size // a.out
        return first, 0, ((o + 1) * a.size + a.out - 1) // a.out - first
    start = o * a.s - a.p
    t = (a.d - 1 - start) // a.d if start < 0 else 0
    return start + t * a.d, t, max(min(a.k, (a.size - start + a.d - 1) // a.d) - t, 0)


def covering(i, a, step):  # type: ignore[no-untyped-def]
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


def counted(o, n, a):  # type: ignore[no-untyped-def]
    """The count of window o, n of whose taps are inside."""
    return n if a.s == 0 or a.q < 0 else min(a.k, a.size + a.q - o * a.s + a.p)

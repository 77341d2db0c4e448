"""Where windows lie along an axis: integers, for the kernels of both devices.

An axis of ``size`` elements has ``out`` windows of ``k`` taps, ``d`` apart; window o begins at o*s - p.  Where s is 0 the windows
are adaptive: from floor(o*size/out) to ceil((o + 1)*size/out).
"""


def taps(o, size, out, k, s, p, d):  # type: ignore[no-untyped-def]
    """Of window o: the first element that is inside the axis, the tap that it is, and how many are."""
    if s == 0:
        first = o * size // out
        return first, 0, ((o + 1) * size + out - 1) // out - first
    start = o * s - p
    t = (d - 1 - start) // d if start < 0 else 0
    return start + t * d, t, max(min(k, (size - start + d - 1) // d) - t, 0)


def covering(i, size, out, k, s, p, d, step):  # type: ignore[no-untyped-def]
    """Of element i: the first window that has it, the tap that it is there, and how many have it.

    Windows are ``step`` = d/gcd(s, d) apart, the tap is step*s/d less in each (of adaptive ones: i less the window's first).
    """
    if s == 0:
        o = i * out // size
        return o, i - o * size // out, ((i + 1) * out + size - 1) // size - o
    a = i + p
    last = min(a // s, out - 1)
    o = max(-(((k - 1) * d - a) // s), 0)
    while d > 1 and o <= last and (a - o * s) % d != 0:
        o += 1
    return o, (a - o * s) // d, max((last - o) // step + 1, 0)


def counted(o, n, size, k, s, p, q):  # type: ignore[no-untyped-def]
    """What window o counts where n of its taps are inside: padding too, of which q follow the axis (-1: none)."""
    return n if s == 0 or q < 0 else min(k, size + q - o * s + p)


def adaptive(size, out):  # type: ignore[no-untyped-def]
    """The axis (size, out, k, s, p, d) of adaptive windows, which are of one size where ``out`` divides ``size``."""
    k = size // max(out, 1)
    return (size, out, k, k, 0, 1) if k * out == size and k > 0 else (size, out, k + 2, 0, 0, 1)

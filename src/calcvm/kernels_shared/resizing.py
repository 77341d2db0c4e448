"""Axes that are padded or scaled: which elements are where."""

from __future__ import annotations

import numpy as np


# ---------------------------------------------------------------- padded axes
def padding_of(mode, o, d, p):
    """The element of an axis of length ``d`` at place ``o`` of its padded form, or -1; ``p`` : elements before; mode : see `pad`."""
    i = o - p
    if 0 <= i < d:
        return i
    if mode == 0:
        return -1
    if mode == 1:
        return -i if i < 0 else 2 * (d - 1) - i
    if mode == 2:
        return 0 if i < 0 else d - 1
    return i % d


def shown(mode, i, d, p, q):
    """How often the padded form of an axis contains element i."""
    if mode == 1:
        return 1 + int(1 <= i <= p) + int(d - 1 - q <= i < d - 1)
    if mode == 2:
        return 1 + (p if i == 0 else 0) + (q if i == d - 1 else 0)
    return 1 + (p + i) // d + (q + d - 1 - i) // d if mode == 3 else 1


def showing(mode, i, d, p, k):
    """The place of the k-th copy of an element in the padded form: first its own place, then those before it, then after it."""
    if k == 0:
        return p + i
    if mode == 1:
        return p - i if k == 1 and 1 <= i <= p else p + 2 * (d - 1) - i
    if mode == 2:
        before = p if i == 0 else 0
        return k - 1 if k <= before else p + d + k - 1 - before
    before = (p + i) // d
    return p + i - k * d if k <= before else p + i + (k - before) * d


# ---------------------------------------------------------------- scaled axes
def scaling(compiled, like):
    """The functions ``place``, ``first`` and ``weight`` of a scaled axis."""

    @compiled
    def place(mode, align, o, n, step):
        """For element o of a scaled axis: the element of n at its place or before it, and the weight of the next.

        Nearest as in PyTorch: the place is rounded to float32 in any heap.
        """
        if mode == 0:
            return min(np.int64(np.float32(like(step, o) * step)), n - 1), like(step, 0)
        at_o = like(step, o)
        if align:
            p = at_o * step
        else:
            p = max((at_o + like(step, 0.5)) * step - like(step, 0.5), like(step, 0))
        i = min(np.int64(p), n - 1)
        return i, p - like(step, i) if i < n - 1 else like(step, 0)

    @compiled
    def first(mode, align, i, n, to, step):
        """The first of ``to`` elements whose place is i or after it."""
        lo, hi = 0, to
        while lo < hi:
            o = (lo + hi) >> 1
            before, _ = place(mode, align, o, n, step)
            if before < i:
                lo = o + 1
            else:
                hi = o
        return lo

    @compiled
    def weight(mode, align, o, i, n, step):
        """The weight of element i of n in element o of the scaled axis."""
        j, t = place(mode, align, o, n, step)
        if j == i:
            return like(step, 1) - t
        return t if j + 1 == i else like(step, 0)

    return place, first, weight

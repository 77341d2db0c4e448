"""Reductions and softmax.  Sums have a fixed order: blocks by vectors, whose totals are summed in float64 or by blocks again."""

from __future__ import annotations

from operator import add

import numpy as np

from calcvm.kernel import words
from calcvm.kernels_cpu import _formulas as F
from calcvm.kernels_cpu._common import Ptr, at, kernel, kernel_as, like, njit, share
from calcvm.kernels_cpu._math import (
    column_reduction,
    elementwise,
    fill,
    first_of_columns,
    log,
    rdot,
    rexp,
    rexpsum,
    rmax,
    rmin,
    rsum,
    rsumsq,
    rtop,
    scale,
)

BLOCK = 4096  # elements of a row that one worker sums together: as in ops.reduction


@njit(inline=True)
def add_exactly(total, lost, x):
    """As `_math.add_exactly`."""
    x -= lost
    new = total + x
    rounded = (new - total) - x
    return new, rounded if abs(rounded) < np.inf else 0.0


# ---------------------------------------------------------------- sums over (R0, R1, R2) of (O, R0, K0, R1, K1, R2, I)
def _sum(name: str, part, formula=lambda x: x, mean: bool = False) -> None:  # type: ignore[no-untyped-def]
    """``part(n, x)`` : the sum of the terms of a row."""
    columns, nested = column_reduction(add, 0.0, formula), column_reduction(add, 0.0, formula, nest=True)

    @njit(inline=True)
    def row(R, x):
        """In blocks, as a team sums it.  A single block has separate code: 4096 rows of 3 take half the time."""
        if R <= BLOCK:
            return float(part(R, x))
        total = lost = 0.0
        for start in range(0, R, BLOCK):
            total, lost = add_exactly(total, lost, float(part(min(BLOCK, R - start), at(x, start))))
        return total

    @njit
    def rows(R0, r0, R1, r1, R2, x):
        total = lost = 0.0
        for a in range(R0):
            for b in range(R1):
                total, lost = add_exactly(total, lost, row(R2, at(x, a * r0 + b * r1)))
        return total

    @njit(inline=True)
    def in_blocks(me, R, blocks, factor, x, y, ws):
        if me.phase == 0:
            lo, hi = share(me, blocks)
            for b in range(lo, hi):
                ws[b] = part(min(BLOCK, R - b * BLOCK), at(x, b * BLOCK))
            return
        lo, hi = share(me, 1)
        if lo < hi:
            total = lost = 0.0
            for b in range(blocks):
                total, lost = add_exactly(total, lost, float(ws[b]))
            y[0] = like(x, total) * factor

    @kernel_as(f"{name}_fwd")
    def run(me, phases, O, R0, K0, R1, K1, R2, I, by, wn, x: Ptr, y: Ptr, ws: Ptr):
        """y = the sum of the terms over R; O is shared, or the kept elements below it (by = 1).

        If there is only one long row, its blocks are shared; in the second phase the owner of y adds them.
        """
        R = R0 * R1 * R2
        factor, blocks = like(x, 1) / like(x, R) if mean else like(x, 1), (R + BLOCK - 1) // BLOCK
        if phases > 1 and 1 < blocks <= wn and O * K0 * K1 * I == 1:
            in_blocks(me, R, blocks, factor, x, y, ws)
            return
        if me.phase > 0:
            return
        if K0 * K1 == 1:  # nothing is kept in between
            R0, R1, R2 = 1, 1, R
        together = R0 * K0 * R1 == 1  # the terms of an output are R2 elements, I apart
        kept, r1 = K0 * K1 * I, K1 * R2 * I
        r0 = K0 * R1 * r1
        first, last, lo, hi = 0, O, 0, kept
        if by == 1:
            lo, hi = share(me, kept)
        else:
            first, last = share(me, O)
        # Separate loops: 4096 rows of 3 take 15 us instead of 50 in those below; 64 of (16, 64) columns 3 us instead of 7.
        if together and I == 1:
            for k in range(first * kept + lo, (last - 1) * kept + hi):
                y[k] = like(x, row(R2, at(x, k * R2))) * factor
            return
        if together:
            for g in range(first * K1, last * K1):
                i, end = max(lo - g * I, 0), I if by == 0 else min(hi - g * I, I)
                columns(max(end - i, 0), R2, I, at(x, g * R2 * I + i), at(y, g * I + i), factor)
            return
        for o in range(first, last):
            g = 0  # elements kept before these I
            for k0 in range(K0):
                for k1 in range(K1):
                    i, end = max(lo - g, 0), min(hi - g, I)
                    terms = at(x, ((o * R0 * K0 + k0) * R1 * K1 + k1) * R2 * I + i)
                    if i < end and I == 1:
                        y[o * kept + g] = like(x, rows(R0, r0, R1, r1, R2, terms)) * factor
                    elif i < end:
                        nested(end - i, R2, I, R0, r0, R1, r1, terms, at(y, o * kept + g + i), factor)
                    g += I


_sum("sum", rsum)
_sum("mean", rsum, mean=True)
_sum("sum_squares", rsumsq, lambda x: x * x)


_times = elementwise(lambda dy, x, a: a * dy * x, "vv", "f")


@njit(inline=True)
def _spread(me, O, R0, K0, R1, K1, R2, I, dy, dx, factor, x, by_x):
    """dx[o,k,r] = factor*dy[o,k], times x[o,k,r] if ``by_x``; all of dx is set; O*R0 rows are shared."""
    lo, hi = share(me, O * R0)
    rows = max(hi - lo, 1) if O * K0 * R1 * K1 * I == 1 else 1  # rows that share one dy
    for u in range(lo, hi, rows):
        to = u * K0 * R1 * K1 * R2
        for k0 in range(K0):
            for _ in range(R1):
                for k1 in range(K1):
                    o = ((u // R0) * K0 + k0) * K1 + k1
                    if I == 1:
                        if by_x:
                            scale(rows * R2, at(x, to), at(dx, to), dy[o] * factor)
                        else:
                            fill(rows * R2, at(dx, to), dy[o] * factor)
                    else:
                        for k in range(to * I, (to + R2) * I, I):
                            if by_x:
                                _times(I, at(dy, o * I), at(x, k), at(dx, k), factor)
                            else:
                                scale(I, at(dy, o * I), at(dx, k), factor)
                    to += R2


def _sum_bwd(name: str, reads: str, factor) -> None:  # type: ignore[no-untyped-def]
    """``factor(dy, R)`` : the multiplier of dy, besides x if that is read."""
    factor, by_x = njit(inline=True)(factor), reads == "x"

    @kernel_as(f"{name}_bwd", words("O R0 K0 R1 K1 R2 I by", "", ("dy", *reads, "dx")))
    def run(me, O, R0, K0, R1, K1, R2, I, by, dy, x, *given):
        """dx[o,k,r] = factor*dy[o,k], times x[o,k,r]; all of dx is set; O*R0 rows are shared."""
        _spread(me, O, R0, K0, R1, K1, R2, I, dy, given[0] if by_x else x, factor(dy, R0 * R1 * R2), x, by_x)


_sum_bwd("sum", "", lambda dy, R: like(dy, 1))
_sum_bwd("mean", "", lambda dy, R: like(dy, 1) / like(dy, R))
_sum_bwd("sum_squares", "x", lambda dy, R: like(dy, 2))


# ---------------------------------------------------------------- extrema over (R0, R1) of (O, P, R0, R1, I)
def _extremum(name: str, row, columns) -> None:  # type: ignore[no-untyped-def]
    @kernel_as(f"{name}_fwd")
    def run(me, O, P, R0, R1, I, by, x: Ptr, y: Ptr):
        """y = the extremum of x over R; x (O,P,R,I), y (O,P,I); O is shared, or I (by = 1)."""
        R = R0 * R1
        first, last, lo, hi = 0, O * P, 0, I
        if by == 1:
            lo, hi = share(me, I)
            last = last if lo < hi else 0
        else:
            first, last = share(me, O)
            first, last = first * P, last * P
        for o in range(first, last):
            if I == 1:
                y[o] = row(R, at(x, o * R))
            else:
                columns(hi - lo, R, I, at(x, o * R * I + lo), at(y, o * I + lo), like(x, 1))


_extremum("max", rmax, column_reduction(F.maximum, float("-inf")))
_extremum("min", rmin, column_reduction(F.minimum, float("inf")))


@kernel_as("max_bwd")
@kernel_as("min_bwd")
def _select(me, O, P, R0, R1, I, by, dy: Ptr, x: Ptr, y: Ptr, dx: Ptr):
    """dx = dy at the first r where x = y, or is NaN, else 0; all of dx is set, may be x; O is shared."""
    lo, hi = share(me, O)
    R = R0 * R1
    for o in range(lo * P, hi * P):
        k = o * R * I
        first_of_columns(I, R, I, at(dy, o * I), at(x, k), at(y, o * I), at(dx, k))


# ---------------------------------------------------------------- softmax
_shift = elementwise(lambda x, top, spread: (x - top) - spread, "v", "ff")
_softmax_dx = elementwise(lambda dy, y, d: y * (dy - d), "vv", "f")
_log_softmax_dx = elementwise(lambda dy, y, s: dy - F.exp(y) * s, "vv", "f")


@kernel
def softmax_fwd(me, rows, inner, N, x: Ptr, y: Ptr):
    """y = exp(x - max x) / sum of the same; x, y (rows*inner, N); rows are shared; y may be x."""
    lo, hi = share(me, rows)
    for i in range(lo * inner, hi * inner):
        xi, yi = at(x, i * N), at(y, i * N)
        total = rexp(N, xi, yi, rtop(N, xi))
        scale(N, yi, yi, like(me.heap, 1) / total)


@kernel
def softmax_bwd(me, rows, inner, N, dy: Ptr, y: Ptr, dx: Ptr):
    """dx = y*(dy - sum dy*y); (rows*inner, N); rows are shared; dx may be dy or y."""
    lo, hi = share(me, rows)
    for i in range(lo * inner, hi * inner):
        k = i * N
        _softmax_dx(N, at(dy, k), at(y, k), at(dx, k), rdot(N, at(dy, k), at(y, k)))


@kernel
def log_softmax_fwd(me, rows, inner, N, x: Ptr, y: Ptr):
    """y = x - max x - log(sum exp(x - max x)); (rows*inner, N); rows are shared; y may be x."""
    lo, hi = share(me, rows)
    for i in range(lo * inner, hi * inner):
        xi = at(x, i * N)
        top = rtop(N, xi)
        spread = log(rexpsum(N, xi, top))
        _shift(N, xi, at(y, i * N), top, spread)


@kernel
def log_softmax_bwd(me, rows, inner, N, dy: Ptr, y: Ptr, dx: Ptr):
    """dx = dy - exp(y)*sum dy; (rows*inner, N); rows are shared; dx may be dy or y."""
    lo, hi = share(me, rows)
    for i in range(lo * inner, hi * inner):
        k = i * N
        _log_softmax_dx(N, at(dy, k), at(y, k), at(dx, k), rsum(N, at(dy, k)))


# ---------------------------------------------------------------- places in order
COUNTED = 512  # up to so many elements, counting is faster than a heap: 300 take 7 us and 17 us


@njit(inline=True)
def _before(x, step, i, j, descending):
    """Whether place i of a line comes before j: NaN is the largest, and of equals the first comes first."""
    a, b = x[i * step], x[j * step]
    same = a == b or (a != a and b != b)
    return (same and i < j) or (not same and ((a > b or a != a) == (descending == 1)))


@njit
def _sink(x, y, step, top, end, place, descending):
    """Put a place into the heap y[top:end], where each comes after those below it, at its top.

    It goes down to the end first, by one comparison per level, and then up.  Source: Wegener, Bottom-up heapsort, 1993.
    """
    k = top
    while 2 * k + 2 < end:
        below = 2 * k + 1
        below += _before(x, step, y[below * step], y[(below + 1) * step], descending)
        y[k * step] = y[below * step]
        k = below
    if 2 * k + 2 == end:
        y[k * step] = y[(end - 1) * step]
        k = end - 1
    while k > top and _before(x, step, y[(k - 1) // 2 * step], place, descending):
        y[k * step] = y[(k - 1) // 2 * step]
        k = (k - 1) // 2
    y[k * step] = place


@njit(inline=True)
def _count(x, n, a, equal):
    """How many of n elements are below a, or with ``equal`` at most a."""
    count = 0
    if equal:
        for m in range(n):
            count += x[m] <= a
    else:
        for m in range(n):
            count += x[m] < a
    return count


@njit
def _ranked(x, y, N, K, descending):
    """The first K places of x in order: for each place, those that come before it are counted."""
    for n in range(N):
        a, later, before = x[n], N - 1 - n, 0
        if a == a:
            before = _count(x, n, a, not descending) + _count(at(x, n + 1), later, a, descending)
            before = N - 1 - before if descending else before
        else:
            for m in range(N):  # a is NaN, the largest
                before += descending == 0 if x[m] == x[m] else m < n
        if before < K:
            y[before] = n


@kernel
def argsort_fwd(me, O, N, K, I, descending, x: Ptr, y: Ptr.int64):
    """y[o,:,i] = the first K places of x[o,:,i] in order; x (O, N, I), y (O, K, I).

    Beyond few elements, y is a heap of the first K of all places seen so far, and then sorted.  o is shared.
    """
    lo, hi = share(me, O)
    I = I if lo < hi and K > 0 else 0
    for o in range(lo, hi):
        for i in range(I):
            line, places = at(x, o * N * I + i), at(y, o * K * I + i)
            if I == 1 and N <= COUNTED and 4 * K > N:
                _ranked(line, places, N, K, descending)
                continue
            for k in range(K):
                places[k * I] = k
            for k in range(K // 2 - 1, -1, -1):
                _sink(line, places, I, k, K, places[k * I], descending)
            for n in range(K, N):
                a, least = line[n * I], line[places[0] * I]
                if not (a <= least if descending else a >= least) and _before(line, I, n, places[0], descending):
                    _sink(line, places, I, 0, K, n, descending)
            for end in range(K - 1, 0, -1):
                last, places[end * I] = places[end * I], places[0]
                _sink(line, places, I, 0, end, last, descending)

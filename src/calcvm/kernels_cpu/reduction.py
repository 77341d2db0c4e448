"""Reductions and softmax.  Sums have a fixed shape: blocks by vectors, their totals in float64 or by blocks again."""

from __future__ import annotations

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

BLOCK = 4096  # elements of a row that are summed in the heap's precision


# ---------------------------------------------------------------- over (O, P, R0, R1, I)
def _reduction(row, columns, mean: bool = False):  # type: ignore[no-untyped-def]
    @njit
    def run(me, O, P, R, I, by, x, y):
        first, last, lo, hi = 0, O * P, 0, I
        if by == 1:
            lo, hi = share(me, I)
            last = last if lo < hi else 0
        else:
            first, last = share(me, O)
            first, last = first * P, last * P
        factor = like(x, 1) / like(x, R) if mean else like(x, 1)
        for o in range(first, last):
            if I == 1:
                y[o] = row(R, at(x, o * R)) * factor
            else:
                columns(hi - lo, R, I, at(x, o * R * I + lo), at(y, o * I + lo), factor)

    return run


def _extremum(name: str, row, columns) -> None:  # type: ignore[no-untyped-def]
    all_rows = _reduction(row, columns)

    @kernel_as(f"{name}_fwd")
    def run(me, O, P, R0, R1, I, by, x: Ptr, y: Ptr):
        """y = the extremum of x over R; x (O,P,R,I), y (O,P,I); O is shared, or I (by = 1)."""
        all_rows(me, O, P, R0 * R1, I, by, x, y)


def _sum(name: str, part, columns, mean: bool = False) -> None:  # type: ignore[no-untyped-def]
    @njit(inline=True)
    def row(R, x):
        """The sum of a row by blocks in the heap's precision."""
        total = 0.0
        for start in range(0, R, BLOCK):
            total += part(min(BLOCK, R - start), at(x, start))
        return like(x, total)

    all_rows = _reduction(row, columns, mean)

    @kernel_as(f"{name}_fwd")
    def run(me, phases, O, P, R0, R1, I, by, wn, x: Ptr, y: Ptr, ws: Ptr):
        """y = the terms of x added over R; x (O,P,R,I), y (O,P,I); O is shared, or I (by = 1).

        One long row: its blocks are shared, and added up by the owner of y in the second phase.
        """
        R = R0 * R1
        blocks = (R + BLOCK - 1) // BLOCK
        split = phases > 1 and 1 < blocks <= wn
        if me.phase == 0 and split:
            lo, hi = share(me, blocks)
            for b in range(lo, hi):
                ws[b] = part(min(BLOCK, R - b * BLOCK), at(x, b * BLOCK))
        elif me.phase == 0:
            all_rows(me, O, P, R, I, by, x, y)
        elif split:
            lo, hi = share(me, 1)
            if lo < hi:
                total = 0.0
                for b in range(blocks):
                    total += ws[b]
                y[0] = like(x, total) * (like(x, 1) / like(x, R) if mean else like(x, 1))


_add = lambda a, b: a + b
_column_sums = column_reduction(_add, 0.0)
_sum("sum", rsum, _column_sums)
_sum("mean", rsum, _column_sums, mean=True)
_sum("sum_squares", rsumsq, column_reduction(_add, 0.0, lambda x: x * x))
_extremum("max", rmax, column_reduction(F.maximum, float("-inf")))
_extremum("min", rmin, column_reduction(F.minimum, float("inf")))


_times = elementwise(lambda dy, x, a: a * dy * x, "vv", "f")


@njit(inline=True)
def _spread(me, O, P, R0, R1, I, dy, dx, factor, x, by_x):
    """dx[o,p,r,i] = factor*dy[o,p,i], ``by_x`` times x[o,p,r,i]; all of dx is set; O*R0 rows are shared (one of them is 1)."""
    lo, hi = share(me, O * R0)
    rows = max(hi - lo, 1) if O * P * I == 1 else 1  # that one dy is for
    for u in range(lo, hi, rows):
        for p in range(P):
            o = (u // R0) * P + p
            to = (u * P + p) * R1
            if I == 1:
                if by_x:
                    scale(rows * R1, at(x, to), at(dx, to), dy[o] * factor)
                else:
                    fill(rows * R1, at(dx, to), dy[o] * factor)
            else:
                for k in range(to * I, (to + R1) * I, I):
                    if by_x:
                        _times(I, at(dy, o * I), at(x, k), at(dx, k), factor)
                    else:
                        scale(I, at(dy, o * I), at(dx, k), factor)


@kernel
def sum_bwd(me, O, P, R0, R1, I, by, dy: Ptr, dx: Ptr):
    """dx[o,p,r,i] = dy[o,p,i]; all of dx is set; O*R0 rows are shared (one of O and R0 is 1)."""
    _spread(me, O, P, R0, R1, I, dy, dx, like(dy, 1), dy, False)


@kernel
def mean_bwd(me, O, P, R0, R1, I, by, dy: Ptr, dx: Ptr):
    """dx[o,p,r,i] = dy[o,p,i] / R; all of dx is set; O*R0 rows are shared (one of O and R0 is 1)."""
    _spread(me, O, P, R0, R1, I, dy, dx, like(dy, 1) / like(dy, R0 * R1), dy, False)


@kernel
def sum_squares_bwd(me, O, P, R0, R1, I, by, dy: Ptr, x: Ptr, dx: Ptr):
    """dx[o,p,r,i] = 2*dy[o,p,i]*x[o,p,r,i]; all of dx is set; O*R0 rows are shared (one of O and R0 is 1)."""
    _spread(me, O, P, R0, R1, I, dy, dx, like(dy, 2), x, True)


@kernel_as("max_bwd")
@kernel_as("min_bwd")
def _select(me, O, P, R0, R1, I, by, dy: Ptr, x: Ptr, y: Ptr, dx: Ptr):
    """dx = dy at the first r where x = y, else 0; all of dx is set, may be x; O is shared."""
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

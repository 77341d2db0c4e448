"""Reductions and softmax.  Sums have a fixed shape: blocks by vectors, their totals in float64 or by blocks again."""

from __future__ import annotations

from calcvm.kernels_cpu import _formulas as F
from calcvm.kernels_cpu._common import Ptr, at, kernel, kernel_from, like, share  # noqa: F401
from calcvm.kernels_cpu._math import (  # noqa: F401
    column_reduction,
    copy,
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
FORWARD = '''\
def {name}_fwd(w, nw, O, P, R0, R1, I, by, x: Ptr, y: Ptr):
    """{equation}; x (O,P,R,I), y (O,P,I); O is shared, or I (by = 1)."""
    R = R0 * R1
    first, last, lo, hi = 0, O * P, 0, I
    if by == 1:
        lo, hi = share(I, w, nw)
        last = last if lo < hi else 0
    else:
        first, last = share(O, w, nw)
        first, last = first * P, last * P
    factor = {factor}
    for o in range(first, last):
        if I == 1:
            {along_row}
        else:
            _columns_{name}(hi - lo, R, I, at(x, o * R * I + lo), at(y, o * I + lo), factor)
'''
SUM_ROW = """total = 0.0
            for start in range(0, R, BLOCK):
                total += {part}(min(BLOCK, R - start), at(x, o * R + start))
            y[o] = like(h, total) * factor"""
_add = lambda a, b: a + b
_columns_sum = _columns_mean = column_reduction(_add, 0.0)
_columns_max = column_reduction(F.maximum, float("-inf"))
_columns_min = column_reduction(F.minimum, float("inf"))
_columns_sum_squares = column_reduction(_add, 0.0, lambda x: x * x)
for _name, _equation, _factor, _row in (
    ("sum", "y = sum_r x", "like(h, 1)", SUM_ROW.format(part="rsum")),
    ("mean", "y = sum_r x / R", "like(h, 1) / like(h, R)", SUM_ROW.format(part="rsum")),
    ("max", "y = max_r x", "like(h, 1)", "y[o] = rmax(R, at(x, o * R))"),
    ("min", "y = min_r x", "like(h, 1)", "y[o] = rmin(R, at(x, o * R))"),
    ("sum_squares", "y = sum_r x^2", "like(h, 1)", SUM_ROW.format(part="rsumsq")),
):
    kernel_from(FORWARD.format(name=_name, equation=_equation, factor=_factor, along_row=_row), globals())

SPREAD = '''\
def {name}_bwd(w, nw, O, P, R0, R1, I, by, dy: Ptr, {x}dx: Ptr):
    """dx[o,p,r,i] = {equation}; all of dx is set; O*R0 rows are shared (one of O and R0 is 1)."""
    lo, hi = share(O * R0, w, nw)
    factor = {factor}
    rows = max(hi - lo, 1) if O * P * I == 1 else 1  # that one dy is for
    for u in range(lo, hi, rows):
        for p in range(P):
            o = (u // R0) * P + p
            to = (u * P + p) * R1
            if I == 1:
                {along}
            else:
                for k in range(to * I, (to + R1) * I, I):
                    {across}
'''
_times = elementwise(lambda dy, x, a: a * dy * x, "vv", "f")
FILLED = {
    "along": "fill(rows * R1, at(dx, to), dy[o] * factor)",
    "across": "scale(I, at(dy, o * I), at(dx, k), factor)",
    "x": "",
}
TIMES_X = {
    "along": "scale(rows * R1, at(x, to), at(dx, to), dy[o] * factor)",
    "across": "_times(I, at(dy, o * I), at(x, k), at(dx, k), factor)",
    "x": "x: Ptr, ",
}
for _name, _equation, _factor, _how in (
    ("sum", "dy[o,p,i]", "like(h, 1)", FILLED),
    ("mean", "dy[o,p,i] / R", "like(h, 1) / like(h, R0 * R1)", FILLED),
    ("sum_squares", "2*dy[o,p,i]*x[o,p,r,i]", "like(h, 2)", TIMES_X),
):
    kernel_from(SPREAD.format(name=_name, equation=_equation, factor=_factor, **_how), globals())

SELECT = '''\
def {name}_bwd(w, nw, O, P, R0, R1, I, by, dy: Ptr, x: Ptr, y: Ptr, dx: Ptr):
    """dx = dy at the first r where x = y, else 0; all of dx is set, may be x; O is shared."""
    R = R0 * R1
    lo, hi = share(O, w, nw)
    for o in range(lo * P, hi * P):
        k = o * R * I
        first_of_columns(I, R, I, at(dy, o * I), at(x, k), at(y, o * I), at(dx, k))
'''
kernel_from(SELECT.format(name="max"), globals())
kernel_from(SELECT.format(name="min"), globals())


# ---------------------------------------------------------------- softmax
_shift = elementwise(lambda x, top, spread: (x - top) - spread, "v", "ff")
_softmax_dx = elementwise(lambda dy, y, d: y * (dy - d), "vv", "f")
_log_softmax_dx = elementwise(lambda dy, y, s: dy - F.exp(y) * s, "vv", "f")


@kernel
def softmax_fwd(w, nw, rows, inner, N, x: Ptr, y: Ptr):
    """y = exp(x - max x) / sum of the same; x, y (rows*inner, N); rows are shared; y may be x."""
    lo, hi = share(rows, w, nw)
    for i in range(lo * inner, hi * inner):
        xi, yi = at(x, i * N), at(y, i * N)
        total = rexp(N, xi, yi, rtop(N, xi))
        scale(N, yi, yi, like(h, 1) / total)  # noqa: F821


@kernel
def softmax_bwd(w, nw, rows, inner, N, dy: Ptr, y: Ptr, dx: Ptr):
    """dx = y*(dy - sum dy*y); (rows*inner, N); rows are shared; dx may be dy or y."""
    lo, hi = share(rows, w, nw)
    for i in range(lo * inner, hi * inner):
        k = i * N
        _softmax_dx(N, at(dy, k), at(y, k), at(dx, k), rdot(N, at(dy, k), at(y, k)))


@kernel
def log_softmax_fwd(w, nw, rows, inner, N, x: Ptr, y: Ptr):
    """y = x - max x - log(sum exp(x - max x)); (rows*inner, N); rows are shared; y may be x."""
    lo, hi = share(rows, w, nw)
    for i in range(lo * inner, hi * inner):
        xi = at(x, i * N)
        top = rtop(N, xi)
        spread = log(rexpsum(N, xi, top))
        _shift(N, xi, at(y, i * N), top, spread)


@kernel
def log_softmax_bwd(w, nw, rows, inner, N, dy: Ptr, y: Ptr, dx: Ptr):
    """dx = dy - exp(y)*sum dy; (rows*inner, N); rows are shared; dx may be dy or y."""
    lo, hi = share(rows, w, nw)
    for i in range(lo * inner, hi * inner):
        k = i * N
        _log_softmax_dx(N, at(dy, k), at(y, k), at(dx, k), rsum(N, at(dy, k)))

"""Statistics of a batch: sums over the leading axis, whose shape depends on its size alone."""

from __future__ import annotations

from operator import add

from calcvm.kernel import words
from calcvm.kernels_cpu._common import Float, Ptr, at, kernel, kernel_as, like, share
from calcvm.kernels_cpu._math import column_reduction, elementwise

_column_sums = column_reduction(add, 0.0)
_towards = elementwise(lambda r, m, a: r + a * (m - r), "vv", "f")
_less = elementwise(lambda x, m: x - m, "vv")


@kernel
def center_mean(me, rows, cols, momentum: Float, x: Ptr, t_m: Ptr, running: Ptr):
    """m = the mean of x over rows; running += momentum*(m - running); cols are shared."""
    lo, hi = share(me, cols)
    m, r = at(t_m, lo), at(running, lo)
    _column_sums(hi - lo, rows, cols, at(x, lo), m, like(x, 1) / like(x, rows))
    _towards(hi - lo, r, m, r, like(x, momentum))


@kernel
def center_mean_bwd(me, rows, cols, dy: Ptr, t_d: Ptr):
    """d = the mean of dy over rows; cols are shared."""
    lo, hi = share(me, cols)
    _column_sums(hi - lo, rows, cols, at(dy, lo), at(t_d, lo), like(dy, 1) / like(dy, rows))


@kernel_as("center_fwd", words("rows cols", "", ("x", "t_m", "y")))
@kernel_as("center_bwd", words("rows cols", "", ("dy", "t_d", "dx")))
def _center(me, rows, cols, x, m, y):
    """y = x - m; rows are shared; y may be x."""
    lo, hi = share(me, rows)
    for i in range(lo, hi):
        _less(cols, at(x, i * cols), m, at(y, i * cols))

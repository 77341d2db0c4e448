"""Operators declared by their equations alone; `calcvm.ops.declared` makes operators of them, and kernels_*/ their kernels.

Most see their input as (O, N, I), with the axes that they work on in the middle; workers share O.
"""

from __future__ import annotations

from calcvm.equations.declare import DECLARED, declare, declared_rows

__all__ = ["DECLARED", "declared_rows"]

declare("logsumexp", "y[o<O,i<I] = logsumexp[n<N] x[o,n,i]", "O N I", backward={"dx": "dy x y"})
VARIANCE = "[o<O,i<I] = N*(var[n<N] x[o,n,i])/max(N - correction, 0)"
declare("var", f"y{VARIANCE}", "O N I", integers="correction", backward={"dx": "dy x"})
declare(  # the slope of the deviation is 0 if nothing varies, as in PyTorch
    "std",
    f"v{VARIANCE}; y[o,i] = where(v[o,i] == 0, 0, sqrt(v[o,i]))",
    "O N I",
    integers="correction",
    backward={"dx": "dy x"},
)
declare("cumsum", "y[o<O,n<N,i<I] = y[o, n - 1, i] + x[o,n,i]", "O N I", backward={"dx": "dy"})
declare("reverse_cumsum", "y[o<O,n<N,i<I] = y[o, n + 1, i] + x[o,n,i]", "O N I", backward={"dx": "dy"})
declare(  # the first element is copied: joined with a -inf before it, a -inf would get half a slope
    "logcumsumexp",
    "y[o<O,n<N,i<I] = where(n == 0, x[o,n,i], logaddexp(y[o, n - 1, i], x[o,n,i]))",
    "O N I",
    backward={"t_dy dx": "dy x y"},
)
declare(  # the two halves of a head, p = 0 and 1, are turned; beyond them is 0
    "rotary",
    "y[n<N,t<T,h<H,p<2,c<C] = x[n,t,h,p,c]*cos[t,c] + (x[n, t, h, p - 1, c] - x[n, t, h, p + 1, c])*sin[t,c]",
    "N T H C",
    inputs="x cos sin",
    backward={"dx": "dy cos sin"},
)

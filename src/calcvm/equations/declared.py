"""Operators declared by their equations alone; `calcvm.ops.declared` makes operators of them, and kernels_*/ their kernels.

Most see their input as (O, N, I), with the axes that they work on in the middle; workers share O.
"""

from __future__ import annotations

from typing import Any

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

# ---------------------------------------------------------------- running products and extrema
declare("cumprod", "y[o<O,n<N,i<I] = y[o, n - 1, i; 1]*x[o,n,i]", "O N I", backward={"t_dy dx": "dy x y"})
for _name, _start in (("max", "-inf"), ("min", "inf")):  # of equals the last gets the gradient, as in PyTorch
    declare(
        f"cum{_name}",
        f"y[o<O,n<N,i<I] = {_name}(x[o,n,i], y[o, n - 1, i; {_start}])",
        "O N I",
        backward={"t_dy dx": "dy x y"},
    )

# ---------------------------------------------------------------- places that are data
for _name in ("argmax", "argmin"):
    declare(_name, f"y[o<O,i<I] = {_name}[n<N] x[o,n,i]", "O N I", types={"y": "int64"})
INDEX: dict[str, Any] = {"inputs": "x index", "types": {"index": "index"}}
declare(  # `take` along the first axis, of which workers share the places of the result
    "embedding",
    "y[k<K,i<I] = where(index[k] == padding, stop(x[index[k], i]), x[index[k], i])",
    "N K I",
    integers="padding",
    declares="x[n<N,i]",
    backward={"dx": "dy index"},
    **INDEX,
)
for _name, _place in (("take", "k"), ("take_along_axis", "o,k,i")):
    declare(
        _name,
        f"y[o<O,k<K,i<I] = x[o, index[{_place}], i]",
        "O N K I",
        declares="x[o,n<N,i]",
        backward={"dx": "dy index"},
        **INDEX,
    )
declare("one_hot", "y[k<K,n<N] = x[index[k]]*where(n == index[k], 1, 0)", "K N", declares="x[m<N]", **INDEX)
declare(  # index itself, if all of it are places of x: the condition is never true
    "inside",
    "y[k<K] = where(x[index[k], 0] > inf, -1, index[k])",
    "N K I",
    inputs="x index",
    types={"index": "index", "y": "int64"},
    declares="x[n<N,i<I]",
)
declare(
    "scatter_add",
    "y[n<N,i<I] = x[n,i] + (sum[k<K] where(n == index[k], u[k,i], 0))",
    "N K I",
    inputs="x index u",
    types={"index": "int64"},
    backward={"du": "dy index"},
)


declare(  # the two halves of a head, p = 0 and 1, are turned; beyond them is 0
    "rotary",
    "y[n<N,t<T,h<H,p<2,c<C] = x[n,t,h,p,c]*cos[t,c] + (x[n, t, h, p - 1, c] - x[n, t, h, p + 1, c])*sin[t,c]",
    "N T H C",
    inputs="x cos sin",
    backward={"dx": "dy cos sin"},
)

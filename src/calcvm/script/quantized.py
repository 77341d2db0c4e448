"""Texts of int8."""

from __future__ import annotations

from calcvm.script.pooling import Pool
from calcvm.script.row import Row, writes


@writes("conv_int8_fwd")
def _conv(r: Row) -> None:
    o, w = Pool(r), r.w
    x, wt = r.x("x", w.N, *o.size, w.G * w.C), r.x("wt", w.G * w.F, *o.window, w.C)
    b, scale = r.x("b", w.G * w.F), r.x("scale", w.G * w.F)
    y = r.call("conv_int8", x, wt, b, scale, w.lo, o.stride, o.padding, o.dilation, w.G, o.out)
    r.put("y", y, w.N, *o.out, w.G * w.F)


@writes("max_pool_int8_fwd")
def _max(r: Row) -> None:
    o = Pool(r)
    y = r.call("max_pool_int8", r.x("x", *o.image), o.window, o.stride, o.padding, o.dilation, o.out)
    r.put("y", y, *o.result)


@writes("add_int8_fwd")
def _add(r: Row) -> None:
    w = r.w
    r.put("y", r.call("add_int8", r.x("a"), r.x("b"), w.factor_a, w.factor_b, w.shift, w.lo))

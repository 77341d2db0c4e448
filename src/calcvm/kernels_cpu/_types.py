"""Numbers of formulas in memory: how elements of each type are converted for computing, and results converted back.

Integers are computed as int32, 64-bit ones as int64.  A condition is a byte in memory; anything but 0 is true.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from calcvm.kernels_cpu._common import I1, I8, I32
from calcvm.kernels_cpu._formulas import V
from calcvm.kernels_cpu._vectors import bits_of

UNSIGNED = (types.boolean, types.uint8)


def as_number(v: V, dtype: Any, type_: str) -> V:
    """An element in memory as a number, or as a condition if the formula's ``type_`` says so; ``dtype`` : Numba's."""
    if type_ == "cells":
        return v
    if dtype == types.boolean:
        v = _condition(v)
        return v if type_ == "bool" else V(v.b, v.b.zext(v.v, v.over(I32)))
    if isinstance(v.element, ir.IntType) and v.element.width < 32:
        return V(v.b, (v.b.zext if dtype in UNSIGNED else v.b.sext)(v.v, v.over(I32)))
    return v


def in_memory(v: V, dtype: Any, element: Any) -> V:
    """A number as stored in memory, for an element of an LLVM type.

    A float is truncated towards 0 and saturates; NaN becomes 0.  An integer that is too large keeps its lowest bits.
    """
    if dtype == types.boolean:
        condition = _condition(v)
        return V(v.b, v.b.zext(condition.v, v.over(I8)))
    if v.element == I1:
        v = V(v.b, v.b.zext(v.v, v.over(I32)))
    if v.element == element:
        return v
    of_int, to_int = isinstance(v.element, ir.IntType), isinstance(element, ir.IntType)
    shorter = bits_of(element) < bits_of(v.element)
    if of_int and to_int:
        make = v.b.trunc if shorter else v.b.sext
    elif of_int:
        make = v.b.sitofp
    elif to_int:
        return _nearest(v, element, "fptoui" if dtype in UNSIGNED else "fptosi")
    else:
        make = v.b.fptrunc if shorter else v.b.fpext
    return V(v.b, make(v.v, v.over(element)))


def _condition(v: V) -> V:
    """Whether a number is not 0."""
    if v.element == I1:
        return v
    different = v.b.icmp_signed if isinstance(v.element, ir.IntType) else v.b.fcmp_unordered
    return V(v.b, different("!=", v.v, v.const(0).v))


def _nearest(v: V, element: ir.IntType, name: str) -> V:
    shape, target = f"v{v.lanes}" if v.lanes else "", v.over(element)
    symbol = f"llvm.{name}.sat.{shape}i{element.width}.{shape}f{bits_of(v.element)}"
    fn = cgutils.get_or_insert_function(v.b.module, ir.FunctionType(target, [v.v.type]), symbol)
    return V(v.b, v.b.call(fn, [v.v]))

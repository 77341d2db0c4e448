"""Numbers of formulas in memory: what an element of a type is computed with, and how a result becomes one.

Integers are computed with as int32, those of 64 bits as int64.  A condition lies in memory as a byte: anything but 0 holds.
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
    """What lies in memory, as a number, or as a condition, which a formula then says its ``type_`` is; ``dtype`` : Numba's."""
    if type_ == "cells":
        return v
    if dtype == types.boolean:
        v = _condition(v)
        return v if type_ == "bool" else V(v.b, v.b.zext(v.v, v.over(I32)))
    if isinstance(v.element, ir.IntType) and v.element.width < 32:
        return V(v.b, (v.b.zext if dtype in UNSIGNED else v.b.sext)(v.v, v.over(I32)))
    return v


def in_memory(v: V, dtype: Any, element: Any) -> V:
    """A number as it lies in memory, of an element of LLVM's.

    A float becomes the nearest integer towards 0 that there is, NaN becomes 0; of an integer that is too large the
    lowest bits stay.
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

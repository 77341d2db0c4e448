"""The GPU's numbers, with which formulas (`calcvm.formulas`) compute, in NVVM's IR and in the simulator.

NaN and infinities follow IEEE 754.  Constants take the type of the number that they meet, so that no float64 enters a
formula over float32; a GPU computes float64 at a small fraction of its speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from calcvm.formulas.declare import Formula
from calcvm.formulas.functions import FUNCTIONS
from calcvm.formulas.number import Number
from calcvm.kernels_cuda._cuda import compiled_by, ir, types


class Scalar(Number):
    """The common part of both."""

    def select(self, condition: Any, x: Any, y: Any) -> Any:
        return self.chosen(condition, self.const(x), self.const(y))


# ---------------------------------------------------------------- compiled
class Compiled(Scalar):
    """A float in IR under construction, with Python's operators."""

    def __init__(self, b: Any, v: Any):
        self.b, self.v = b, v

    @property
    def is_f64(self) -> bool:
        return isinstance(self.v.type, ir.DoubleType)

    def const(self, c: Any) -> Any:
        if isinstance(c, Compiled):
            return c
        return Compiled(self.b, ir.Constant(self.v.type, int(c) if isinstance(self.v.type, ir.IntType) else float(c)))

    def chosen(self, condition: Any, x: Any, y: Any) -> Any:
        return Compiled(self.b, self.b.select(condition.v, x.v, y.v))

    def compared(self, sign: str, other: Any) -> Any:
        compare = self.b.icmp_signed if isinstance(self.v.type, ir.IntType) else self.b.fcmp_ordered
        return Compiled(self.b, compare(sign, self.v, self.const(other).v))

    def __and__(self, other: Any) -> Any:
        return Compiled(self.b, self.b.and_(self.v, other.v))

    def __or__(self, other: Any) -> Any:
        return Compiled(self.b, self.b.or_(self.v, other.v))

    def __xor__(self, other: Any) -> Any:
        return Compiled(self.b, self.b.xor(self.v, other.v))

    def __invert__(self) -> Any:
        return Compiled(self.b, self.b.not_(self.v))

    def fma(self, y: Any, z: Any) -> Any:
        return Compiled(self.b, self.b.fma(self.v, self.const(y).v, self.const(z).v))

    def __neg__(self) -> Any:
        return Compiled(self.b, self.b.fsub(ir.Constant(self.v.type, -0.0), self.v))  # NVVM has no fneg

    def equals(self, other: Any) -> Any:
        return self.compared("==", other)

    def leading(self) -> Any:
        bits = ir.IntType(64 if self.is_f64 else 32)
        kept = self.b.and_(self.b.bitcast(self.v, bits), bits(-(1 << 27 if self.is_f64 else 1 << 12)))
        return Compiled(self.b, self.b.bitcast(kept, self.v.type))

    def call(self, name: str) -> Any:
        """A function of libdevice."""
        suffix = "f" if isinstance(self.v.type, ir.FloatType) else ""
        symbol, module = f"__nv_{name}{suffix}", self.b.module
        fn = module.globals.get(symbol) or ir.Function(module, ir.FunctionType(self.v.type, [self.v.type]), symbol)
        return Compiled(self.b, self.b.call(fn, [self.v]))


def _operator(build: str) -> tuple[Callable, Callable]:
    def forward(x: Compiled, y: Any) -> Compiled:
        return Compiled(x.b, getattr(x.b, build)(x.v, x.const(y).v))

    return forward, lambda x, y: forward(x.const(y), x)


# ---------------------------------------------------------------- simulated
class Simulated(Scalar):
    """A NumPy scalar, which keeps its type."""

    def __init__(self, v: Any):
        self.v = v

    @property
    def is_f64(self) -> bool:
        return bool(self.v.dtype == np.float64)

    def const(self, c: Any) -> Any:
        return c if isinstance(c, Simulated) else Simulated(self.v.dtype.type(c))

    def chosen(self, condition: Any, x: Any, y: Any) -> Any:
        return x if condition.v else y

    def compared(self, name: str, other: Any) -> Any:
        return Simulated(getattr(self.v, name)(self.const(other).v))

    def __and__(self, other: Any) -> Any:
        return Simulated(self.v & other.v)

    def __or__(self, other: Any) -> Any:
        return Simulated(self.v | other.v)

    def __xor__(self, other: Any) -> Any:
        return Simulated(self.v ^ other.v)

    def __invert__(self) -> Any:
        return Simulated(np.bool_(not self.v))

    def fma(self, y: Any, z: Any) -> Any:
        return self * y + z  # type: ignore[operator]

    def __neg__(self) -> Any:
        return Simulated(-self.v)

    def equals(self, other: Any) -> Any:
        return self.compared("__eq__", other)

    def leading(self) -> Any:
        bits = self.v.view(np.int64 if self.is_f64 else np.int32)
        return Simulated((bits & -(1 << 27 if self.is_f64 else 1 << 12)).view(self.v.dtype))

    def erf(self) -> Any:
        return self.const(math.erf(self.v))


for _name, _build in (("add", "fadd"), ("sub", "fsub"), ("mul", "fmul"), ("truediv", "fdiv")):
    _forward, _backward = _operator(_build)
    setattr(Compiled, f"__{_name}__", _forward)
    setattr(Compiled, f"__r{_name}__", _backward)
    _of = getattr(np, {"sub": "subtract", "mul": "multiply", "truediv": "divide"}.get(_name, _name))
    setattr(Simulated, f"__{_name}__", lambda x, y, of=_of: Simulated(of(x.v, x.const(y).v)))
    setattr(Simulated, f"__r{_name}__", lambda x, y, of=_of: Simulated(of(x.const(y).v, x.v)))
for _name, _sign in (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">=")):
    setattr(Compiled, f"__{_name}__", lambda x, y, sign=_sign: x.compared(sign, y))
    setattr(Simulated, f"__{_name}__", lambda x, y, name=_name: x.compared(f"__{name}__", y))
for _function in FUNCTIONS.values():
    if _function.libm:
        setattr(Compiled, _function.name, lambda x, name=_function.name: x.call(name))
        if _function.numpy.startswith("np."):
            _of = eval(f"lambda x: {_function.numpy.format('x')}", {"np": np})
            setattr(Simulated, _function.name, lambda x, of=_of: Simulated(of(x.v)))


# ---------------------------------------------------------------- other types
def _number(b: Any, v: Any, type_: Any) -> Compiled:
    """An integer as int32, or as int64 if it has 64 bits."""
    if not isinstance(v.type, ir.IntType) or v.type.width >= 32:
        return Compiled(b, v)
    signed = type_ not in (types.boolean, types.uint8)
    return Compiled(b, (b.sext if signed else b.zext)(v, ir.IntType(32)))


def typed(f: Formula) -> Any:
    """A formula over operands of any types, for kernels: ``of(reads..., reals..., y)``; y is a pointer to the result.

    Bools are read and written as bytes (`_cuda.cells`).  `calcvm.kernels_cpu._types` describes the conversion of
    numbers that y's type cannot hold.
    """
    fn, to_bool = f.variant(), f.types.get(f.writes) == "bool"
    kinds = [f.types.get(name) for name in (*f.reads, *f.reals)]

    def codegen(tc: Any, *given: Any) -> Any:
        to = types.boolean if to_bool else given[-1].dtype

        def build(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            numbers = [_read(b, v, t, kind) for v, t, kind in zip(args, given, kinds)]
            return _element(ctx, b, fn(*numbers).v, to)

        return (types.uint8 if to == types.boolean else to)(*given), build

    @compiled_by(codegen)
    def of(*given: Any) -> Any:
        *reads, y = given
        out = fn(*(Simulated(_simulated(v, kind)) for v, kind in zip(reads, kinds))).v
        return np.uint8(out != 0) if to_bool or y.dtype == np.bool_ else _simulated_element(out, y.dtype)

    return of


def _read(b: Any, v: Any, type_: Any, kind: str | None) -> Compiled:
    if kind == "bool":
        return Compiled(b, b.icmp_unsigned("!=", v, v.type(0)))
    return Compiled(b, v) if kind == "cells" else _number(b, v, type_)


def _simulated(v: Any, kind: str | None) -> Any:
    if kind == "bool":
        return np.bool_(v != 0)
    if kind == "cells" or v.dtype.kind == "f":
        return v
    return (np.int64 if v.itemsize > 4 else np.int32)(v)


def _element(ctx: Any, b: Any, v: Any, to: Any) -> Any:
    """A number as an element of a Numba type."""
    of_int, target = isinstance(v.type, ir.IntType), ctx.get_value_type(to)
    if to == types.boolean:
        if not of_int:
            v = b.fcmp_unordered("!=", v, ir.Constant(v.type, 0.0))
        elif v.type.width > 1:
            v = b.icmp_signed("!=", v, v.type(0))
        return b.zext(v, ir.IntType(8))
    if v.type == target:
        return v
    if of_int and v.type.width == 1:
        v = b.zext(v, ir.IntType(32))
    if isinstance(target, ir.IntType):
        if not of_int:
            v = _nearest(b, v, to)
        short = target.width < v.type.width
        return v if v.type == target else (b.trunc if short else b.sext)(v, target)
    if of_int:
        return b.sitofp(v, target)
    return b.fpext(v, target) if isinstance(target, ir.DoubleType) else b.fptrunc(v, target)


def _nearest(b: Any, v: Any, to: Any) -> Any:
    """A float truncated to an integer of the type; a GPU's conversion saturates and turns NaN into 0 by itself."""
    whole = b.fptosi(v, ir.IntType(max(to.bitwidth, 32)))
    if to.bitwidth < 32:
        for sign, end in (("<", to.minval), (">", to.maxval)):
            whole = b.select(b.icmp_signed(sign, whole, whole.type(end)), whole.type(end), whole)
    return whole


def _simulated_element(v: Any, to: Any) -> Any:
    if to.kind in "iu" and v.dtype.kind == "f":
        ends = np.iinfo(to)
        whole = 0 if np.isnan(v) else ends.max if v >= ends.max else max(int(max(v, -1e19)), ends.min)
        return to.type(whole)
    return v.astype(to)


# ---------------------------------------------------------------- formulas that kernels call
def formula(fn: Callable) -> Any:
    """A function of numbers in a form that kernels can call; it returns a number or a tuple of them."""

    def codegen(tc: Any, *given: Any) -> Any:
        def build(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
            out = fn(*(Compiled(b, v) for v in args))
            return ctx.make_tuple(b, sig.return_type, [x.v for x in out]) if isinstance(out, tuple) else out.v

        results = fn(*(Simulated(np.float64(0.5)) for _ in given))
        to = types.UniTuple(given[0], len(results)) if isinstance(results, tuple) else given[0]
        return to(*given), build

    @compiled_by(codegen)
    def of(*numbers: Any) -> Any:
        out = fn(*map(Simulated, numbers))
        return tuple(x.v for x in out) if isinstance(out, tuple) else out.v

    return of

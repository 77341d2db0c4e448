"""The GPU's numbers: what formulas (`calcvm.formulas`) compute with, in NVVM's IR and in the simulator.

NaN and infinities stay what IEEE 754 says.  Constants have the type of the number that they meet, so that no float64, which
a GPU computes at a small fraction of its speed, comes into a formula over float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from calcvm.formulas.number import FUNCTIONS, Number, exp, fabs, log1p, where
from calcvm.kernels_cuda._cuda import compiled_by, ir, types


class Scalar(Number):
    """What both of them have."""

    def softplus(self) -> Any:
        return where(self < 0, 0.0, self) + log1p(exp(-fabs(self)))  # type: ignore[operator]

    def select(self, condition: Any, x: Any, y: Any) -> Any:
        return self.chosen(condition, self.const(x), self.const(y))


# ---------------------------------------------------------------- compiled
class Compiled(Scalar):
    """A float in IR under construction, with Python's operators."""

    def __init__(self, b: Any, v: Any):
        self.b, self.v = b, v

    def const(self, c: Any) -> Any:
        return c if isinstance(c, Compiled) else Compiled(self.b, ir.Constant(self.v.type, float(c)))

    def chosen(self, condition: Any, x: Any, y: Any) -> Any:
        return Compiled(self.b, self.b.select(condition, x.v, y.v))

    def fma(self, y: Any, z: Any) -> Any:
        return Compiled(self.b, self.b.fma(self.v, self.const(y).v, self.const(z).v))

    def __neg__(self) -> Any:
        return Compiled(self.b, self.b.fsub(ir.Constant(self.v.type, -0.0), self.v))  # NVVM knows no fneg

    def equals(self, other: Any) -> Any:
        return self.b.fcmp_ordered("==", self.v, self.const(other).v)

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
    """A NumPy scalar, whose type stays what it is."""

    def __init__(self, v: Any):
        self.v = v

    def const(self, c: Any) -> Any:
        return c if isinstance(c, Simulated) else Simulated(self.v.dtype.type(c))

    def chosen(self, condition: Any, x: Any, y: Any) -> Any:
        return x if condition else y

    def fma(self, y: Any, z: Any) -> Any:
        return self * y + z  # type: ignore[operator]

    def __neg__(self) -> Any:
        return Simulated(-self.v)

    def equals(self, other: Any) -> bool:
        return self.v == self.const(other).v

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
    setattr(Compiled, f"__{_name}__", lambda x, y, sign=_sign: x.b.fcmp_ordered(sign, x.v, x.const(y).v))
    setattr(Simulated, f"__{_name}__", lambda x, y, name=_name: getattr(x.v, f"__{name}__")(x.const(y).v))
for _name in FUNCTIONS:
    setattr(Compiled, _name, lambda x, name=_name: x.call(name))
    if _name != "erf":
        _of = getattr(np, _name)
        setattr(Simulated, _name, lambda x, of=_of: Simulated(of(x.v)))


# ---------------------------------------------------------------- formulas that kernels call
def formula(fn: Callable) -> Any:
    """A function of numbers as one that kernels call; it gives a number, or a tuple of them."""

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

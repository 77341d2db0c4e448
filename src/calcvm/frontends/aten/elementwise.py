"""Operators that compute each element alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from calcvm import functions as F
from calcvm.frontends.arrangement import Arranged
from calcvm.frontends.aten.declared import ATEN, aten
from calcvm.frontends.building import FLOATS, Building, Cannot, Filled, arranged, clipped, is_number, one_by_one, plain
from calcvm.graph import Variable


def _each(names: str, f: Callable[[Variable], Variable]) -> None:
    aten(*names.split())(lambda b, x: x.again(f))


for _name in (
    "abs acos asin atan ceil cos cosh erf exp expm1 floor log log1p mish neg relu relu6 round selu sigmoid sign silu sin sinh sqrt square "
    "tan tanh"
).split():
    _each(_name, getattr(F, _name))
_each("hardswish", F.hard_swish)
_each("hardsigmoid", F.hard_sigmoid)
_each("rsqrt", lambda x: F.pow(x, -0.5))
_each("reciprocal", lambda x: F.pow(x, -1.0))
_each("logical_not", F.logical_not)
_each("log_sigmoid", lambda x: -F.softplus(-x))
_each("isnan", lambda x: F.not_equal(x, x))
_each("log2", lambda x: F.log(x) / math.log(2))
_each("log10", lambda x: F.log(x) / math.log(10))
_each("exp2", lambda x: F.exp(x * math.log(2)))
_each("erfc", lambda x: 1.0 - F.erf(x))


@aten("add")
def add(b: Building, x: Any, y: Any, alpha: float = 1) -> Arranged:
    if alpha != 1:
        y = y * alpha if not isinstance(y, (Arranged, Filled)) else one_by_one(b, F.mul, y, float(alpha))
    return one_by_one(b, F.add, x, y)


@aten("sub")
def sub(b: Building, x: Any, y: Any, alpha: float = 1) -> Arranged:
    if alpha != 1:
        return add(b, x, y, -alpha)
    return one_by_one(b, F.sub, x, y)


@aten("rsub")
def rsub(b: Building, x: Any, y: Any, alpha: float = 1) -> Arranged:
    return sub(b, y, x, alpha)


@aten("mul")
def mul(b: Building, x: Any, y: Any) -> Arranged:
    return one_by_one(b, F.mul, x, y)


@aten("div")
def div(b: Building, x: Any, y: Any, rounding_mode: str | None = None) -> Arranged:
    quotient = one_by_one(b, F.div, x, y)
    if rounding_mode is None:
        return quotient
    if rounding_mode == "floor":
        return quotient.again(F.floor)
    return quotient.again(lambda v: F.sign(v) * F.floor(F.abs(v)))


for _name, _function in {
    "maximum": F.maximum, "minimum": F.minimum, "eq": F.equal, "ne": F.not_equal, "lt": F.less, "le": F.less_equal, "gt": F.greater,
    "ge": F.greater_equal, "logical_and": F.logical_and, "logical_or": F.logical_or, "logical_xor": F.logical_xor, "remainder": F.mod,
}.items():  # fmt: skip
    aten(_name)(lambda b, x, y, f=_function: one_by_one(b, f, x, y))


def _of_conditions(name: str) -> None:
    """Bits of conditions; those of integers are not combined."""

    def combined(b: Building, *operands: Any) -> Any:
        if any(isinstance(x, Arranged) and x.base.type != "bool" for x in operands):
            raise Cannot("it combines the bits of integers, and conditions alone have a counterpart")
        return ATEN[f"logical_{name}"](b, *operands)

    ATEN[f"bitwise_{name}"] = combined


for _name in ("and", "or", "xor", "not"):
    _of_conditions(_name)


@aten("pow")
def pow(b: Building, x: Any, exponent: Any) -> Arranged:  # noqa: A001
    if isinstance(x, Arranged) and is_number(exponent):
        return x.again(lambda v: F.square(v) if exponent == 2 else F.pow(v, exponent))
    if is_number(x) and x > 0:
        return exponent.again(lambda v: F.exp(v * math.log(x)))
    raise Cannot("the exponent, or a positive base, must be a number")


@aten("gelu")
def gelu(b: Building, x: Arranged, approximate: str = "none") -> Arranged:
    return x.again(lambda v: F.gelu(v, approximate))


@aten("leaky_relu")
def leaky_relu(b: Building, x: Arranged, slope: float = 0.01) -> Arranged:
    return x.again(lambda v: F.leaky_relu(v, slope))


@aten("elu")
def elu(b: Building, x: Arranged, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Arranged:
    if scale != 1 or input_scale != 1:
        raise Cannot("its scales are not 1")
    return x.again(lambda v: F.elu(v, alpha))


ATEN["celu"] = lambda b, x, alpha=1.0: x.again(lambda v: F.elu(v / alpha, 1.0) * alpha)


@aten("softplus")
def softplus(b: Building, x: Arranged, beta: float = 1, threshold: float = 20) -> Arranged:
    return x.again(F.softplus if beta == 1 else lambda v: F.softplus(v * beta) / beta)


@aten("clamp", "clip")
def clamp(b: Building, x: Arranged, low: Any = None, high: Any = None) -> Arranged:
    if is_number(low) and is_number(high):
        return clipped(x, low, high)
    x = x if low is None else one_by_one(b, F.maximum, x, low)
    return x if high is None else one_by_one(b, F.minimum, x, high)


ATEN["clamp_min"] = lambda b, x, low: clamp(b, x, low)
ATEN["clamp_max"] = lambda b, x, high: clamp(b, x, None, high)
ATEN["hardtanh"] = lambda b, x, low=-1.0, high=1.0: clamp(b, x, low, high)


@aten("prelu")
def prelu(b: Building, x: Arranged, slope: Any) -> Arranged:
    v = x.variable()
    slope = arranged(b, slope)
    return Arranged.of(F.prelu(v, slope.reshaped([-1, *(1,) * (v.rank - 2)] if v.rank > 1 else [-1]).variable()))


@aten("where")
def where(b: Building, condition: Any, x: Any, y: Any) -> Arranged:
    return Arranged.of(F.where(plain(b, condition), plain(b, x), plain(b, y)))


@aten("masked_fill")
def masked_fill(b: Building, x: Any, mask: Any, value: Any) -> Arranged:
    return where(b, mask, value, x)


@aten("addcmul")
def addcmul(b: Building, x: Any, y: Any, z: Any, value: float = 1) -> Arranged:
    return add(b, x, mul(b, y, z), value)


@aten("addcdiv")
def addcdiv(b: Building, x: Any, y: Any, z: Any, value: float = 1) -> Arranged:
    return add(b, x, div(b, y, z), value)


@aten("lerp")
def lerp(b: Building, x: Any, y: Any, weight: Any) -> Arranged:
    return add(b, x, mul(b, sub(b, y, x), weight))


@aten("to", "_to_copy", "type_as")
def to(b: Building, x: Any, *given: Any, dtype: Any = None, **_: Any) -> Any:
    dtype = next((t for t in (dtype, *given) if isinstance(t, str)), None)
    if dtype is None or not isinstance(x, Arranged):
        return x
    if dtype in ("float16", "bfloat16"):
        raise Cannot(f"it computes in {dtype}")
    target = None if dtype in FLOATS else dtype
    return x.again(lambda v: F.cast(v, target))

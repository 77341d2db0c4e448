"""Operators that compute each element alone, of one tensor or of several that broadcast."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np

from calcvm import functions as F
from calcvm import gathers
from calcvm.frontends.arrangement import Arranged
from calcvm.frontends.building import (
    OF_BATCH,
    Building,
    Cannot,
    Filled,
    arranged,
    clipped,
    is_number,
    one_by_one,
    plain,
    variable,
)
from calcvm.frontends.onnx.declared import (
    ONNX,
    TYPES,
    floats,
    in_floats,
    in_type,
    is_known,
    onnx,
    rank_of,
    type_of,
    wrapped,
)
from calcvm.graph import Variable
from calcvm.ops.types import BYTES, FLOAT

Of = Callable[..., Variable]


# ---------------------------------------------------------------- operands
def _operand(b: Building, x: Any, other: Any) -> Any:
    """An operand as a number, if it is a finite one and gives the other's shape no other axes or sizes."""
    if is_known(x) and x.dtype == object:
        raise Cannot(OF_BATCH)
    if isinstance(x, Filled) and rank_of(x) <= rank_of(other):
        fits = all(n in (1, m) for n, m in zip(reversed(x.shape), reversed(other.shape)))
        x = np.asarray(x.value, x.type) if fits else x
    if not is_known(x) or x.size != 1 or x.ndim > rank_of(other):
        return x
    return x.item() if math.isfinite(x.item()) else arranged(b, x)


def _of_two(b: Building, f: Of, x: Any, y: Any) -> Arranged:
    """A function of two operands, of which one depends on data."""
    return one_by_one(b, f, _operand(b, x, y), _operand(b, y, x))


def _each(b: Building, f: Of, x: Any) -> Arranged:
    """A function of floats, of each element; if those are integers, so are the results."""
    kind = type_of(x)
    return arranged(b, x).again(lambda v: wrapped(f(in_floats(v)), kind))


# ---------------------------------------------------------------- of one tensor
def _asinh(v: Variable) -> Variable:
    """Odd, with a slope at 0, and without squares of large numbers."""
    size = F.where(v < 0, -v, v)
    near = F.minimum(size, 1e17)
    return F.where(v < 0, -1.0, 1.0) * F.log1p(size + size * (near / (F.sqrt(F.square(near) + 1.0) + 1.0)))


def _acosh(v: Variable) -> Variable:
    above = v - 1.0
    return F.log1p(above + F.sqrt(above) * F.sqrt(v + 1.0))


def _elu(v: Variable, alpha: float = 1.0) -> Variable:
    return F.elu(v, alpha) if alpha >= 0 else F.where(v > 0, v, F.expm1(v) * alpha)


def _selu(v: Variable, alpha: float = 1.6732632, gamma: float = 1.050701) -> Variable:
    return F.selu(v) if _near(alpha, 1.6732632) and _near(gamma, 1.050701) else _elu(v, alpha) * gamma


def _hard_sigmoid(v: Variable, alpha: float = 0.2, beta: float = 0.5) -> Variable:
    return F.hard_sigmoid(v) if _near(alpha, 1 / 6) and beta == 0.5 else F.clip(v * alpha + beta, 0.0, 1.0)


def _near(x: float, y: float) -> bool:
    """Whether they are the same number in float32."""
    return math.isclose(x, y, rel_tol=1e-7)


def _shrink(v: Variable, lambd: float = 0.5, bias: float = 0.0) -> Variable:
    return F.where(v < -lambd, v + bias, F.where(v > lambd, v - bias, 0.0))


def _is_infinite(v: Variable, detect_negative: int = 1, detect_positive: int = 1) -> Variable:
    if detect_negative:
        v = F.abs(v) if detect_positive else -v
    elif not detect_positive:
        v = F.minimum(v, 0.0)
    return F.equal(v, math.inf)


OF_ONE: dict[str, Of] = {
    "Abs": F.abs,
    "Acos": F.acos,
    "Acosh": _acosh,
    "Asin": F.asin,
    "Asinh": _asinh,
    "Atan": F.atan,
    "Atanh": lambda v: (F.log1p(v) - F.log1p(-v)) * 0.5,
    "Binarizer": lambda v, threshold=0.0: F.cast(v > threshold, None),
    "BitwiseNot": lambda v: -1.0 - v,
    "Ceil": F.ceil,
    "Celu": lambda v, alpha=1.0: F.where(v > 0, v, F.expm1(v / alpha) * alpha),
    "Cos": F.cos,
    "Cosh": F.cosh,
    "Elu": _elu,
    "Erf": F.erf,
    "Exp": F.exp,
    "Floor": F.floor,
    "Gelu": F.gelu,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": F.hard_swish,
    "IsInf": _is_infinite,
    "IsNaN": lambda v: F.not_equal(v, v),
    "LeakyRelu": lambda v, alpha=0.01: F.leaky_relu(v, alpha) if alpha >= 0 else F.prelu(v, alpha),
    "Log": F.log,
    "Mish": F.mish,
    "Neg": F.neg,
    "Reciprocal": lambda v: F.pow(v, -1.0),
    "Relu": F.relu,
    "Round": F.round,
    "Selu": _selu,
    "Shrink": _shrink,
    "Sigmoid": F.sigmoid,
    "Sign": F.sign,
    "Sin": F.sin,
    "Sinh": F.sinh,
    "Softplus": F.softplus,
    "Softsign": lambda v: v / (F.abs(v) + 1.0),
    "Sqrt": F.sqrt,
    "Swish": lambda v, alpha=1.0: F.silu(v) if alpha == 1 else v * F.sigmoid(v * alpha),
    "Tan": F.tan,
    "Tanh": F.tanh,
    "ThresholdedRelu": lambda v, alpha=1.0: F.where(v > alpha, v, 0.0),
}
for _name, _function in OF_ONE.items():
    onnx(_name)(lambda b, x, *, f=_function, **settings: _each(b, lambda v: f(v, **settings), x))

onnx("Identity")(lambda b, x: x)
onnx("Not")(lambda b, x: arranged(b, x).again(F.logical_not))


# ---------------------------------------------------------------- of two tensors
def _in_floats(b: Building, f: Of, x: Any, y: Any) -> Arranged:
    """A function of two operands as floats, in the type of the first."""
    return Arranged.of(wrapped(f(floats(b, x), floats(b, y)), type_of(x)))


def _arithmetic(b: Building, f: Of, x: Any, y: Any) -> Arranged:
    return (_of_two if type_of(x) == FLOAT else _in_floats)(b, f, x, y)


ARITHMETIC: dict[str, Of] = {"Add": F.add, "Sub": F.sub, "Mul": F.mul, "Div": F.div}
for _name, _function in ARITHMETIC.items():
    onnx(_name)(lambda b, x, y, f=_function: _arithmetic(b, f, x, y))  # quotients of integers are cut off

CONDITIONS: dict[str, Of] = {
    "And": F.logical_and, "Equal": F.equal, "Greater": F.greater, "GreaterOrEqual": F.greater_equal, "Less": F.less,
    "LessOrEqual": F.less_equal, "Or": F.logical_or, "Xor": F.logical_xor,
}  # fmt: skip
for _name, _function in CONDITIONS.items():
    onnx(_name)(lambda b, x, y, f=_function: _of_two(b, f, x, y))


@onnx("Mod")
def mod(b: Building, x: Any, y: Any, *, fmod: int = 0) -> Arranged:
    finite = type_of(x) != FLOAT or (is_known(y) and np.isfinite(y).all())
    f: Of = F.mod if finite else _remainder
    return _in_floats(b, (lambda v, w: F.sign(v) * f(F.abs(v), F.abs(w))) if fmod else f, x, y)


def _remainder(v: Variable, w: Variable) -> Variable:
    """v mod w, which may be infinite."""
    far = F.logical_and(F.equal(F.abs(w), math.inf), F.abs(v) < math.inf)
    return F.where(far, F.where(v * F.sign(w) < 0, w, v), F.mod(v, w))


@onnx("Pow")
def power(b: Building, x: Any, y: Any) -> Arranged:
    kind, y = type_of(x), _operand(b, y, x)
    if kind == FLOAT and is_number(y):
        return arranged(b, x).again(lambda v: F.square(v) if y == 2 else F.pow(v, y))
    if kind == FLOAT and is_known(x) and (x > 0).all() and np.isfinite(x).all():
        return _of_two(b, lambda v, w: F.exp(w * np.log(v)), x, y)
    v, w = floats(b, x), floats(b, y)
    z = F.pow(v, y) if is_number(y) else _power(v, w)
    return Arranged.of(z if kind == FLOAT else in_type(_cut_off(z, w), kind))


def _power(v: Variable, w: Variable) -> Variable:
    zero, parity = F.equal(v, 0.0), w % 2.0
    z = F.exp(w * F.log(F.where(zero, 1.0, F.abs(v))))
    z = F.where(F.logical_and(zero, F.not_equal(w, 0.0)), F.where(w > 0, 0.0, math.inf), z)
    of_negative = F.where(F.equal(parity, 1.0), -z, F.where(F.equal(parity, 0.0), z, math.nan))
    return F.where(v < 0, of_negative, z)


def _cut_off(z: Variable, w: Variable) -> Variable:
    """Powers of integers as integers: whole powers are computed with an error, others are cut off."""
    return F.sign(z) * F.floor(F.abs(z) + F.where(F.equal(w, F.floor(w)), 0.49, 0.0))


# ---------------------------------------------------------------- bits
@onnx("BitShift")
def bit_shift(b: Building, x: Any, y: Any, *, direction: str) -> Arranged:
    n, right = 8 * BYTES[type_of(x)], direction == "RIGHT"
    factors = 0.5 ** np.arange(n + 1) if right else np.append(2.0 ** np.arange(n), 0.0)

    def shifted(v: Variable, w: Variable) -> Variable:
        places = F.cast(F.where(w < 0, n, F.minimum(w, n)), "int64")
        z = v * gathers.take(b.constant(factors), places)
        if right or n < 64:
            return F.floor(z)
        z = z - F.round(z / 2.0**64) * 2.0**64
        return F.where(z < 2.0**63, z, -(2.0**63))

    return _in_floats(b, shifted, x, y)


def _bitwise(b: Building, f: Of, x: Any, y: Any) -> Arranged:
    """A function of bits, which stand on a new last axis.  Those that differ from the sign are added up."""
    values = 2.0 ** np.arange(min(8 * BYTES[type_of(x)], 53))

    def bits(v: Variable) -> Variable:
        return F.floor(F.expand_dims(v, v.rank) / values) % 2.0 > 0.5

    def combined(v: Variable, w: Variable) -> Variable:
        negative = f(v < 0, w < 0)
        other = F.logical_xor(f(bits(v), bits(w)), F.expand_dims(negative, negative.rank))
        size = F.sum(F.cast(other, None) * values, -1)
        return F.where(negative, -1.0 - size, size)

    return _in_floats(b, combined, x, y)


for _name in ("And", "Or", "Xor"):
    onnx(f"Bitwise{_name}")(lambda b, x, y, f=CONDITIONS[_name]: _bitwise(b, f, x, y))


# ---------------------------------------------------------------- of several tensors
def _combined(b: Building, f: Callable[..., Arranged], operands: Sequence[Any]) -> Any:
    """A function of two operands for all of them, those first that depend on data."""
    return reduce(partial(f, b), sorted(operands, key=lambda x: not isinstance(x, Arranged)))


def _extreme(largest: bool) -> Callable[..., Arranged]:
    """The larger, or smaller, of two; integers are moved, so that each is exact."""
    f, before = (F.maximum, F.greater) if largest else (F.minimum, F.less)

    def extreme(b: Building, x: Any, y: Any) -> Arranged:
        if type_of(x) == FLOAT:
            return _of_two(b, f, x, y)
        v, w = variable(b, x), variable(b, y)
        return Arranged.of(F.where(before(v, w), v, w))

    return extreme


_larger, _smaller = _extreme(True), _extreme(False)
onnx("Max")(lambda b, *operands: _combined(b, _larger, operands))
onnx("Min")(lambda b, *operands: _combined(b, _smaller, operands))
onnx("Sum")(lambda b, *operands: _combined(b, ONNX["Add"], operands))
onnx("Mean")(lambda b, *operands: ONNX["Sum"](b, *operands).again(lambda v: v / len(operands)))


@onnx("Clip")
def clip(b: Building, x: Any, low: Any = None, high: Any = None) -> Arranged:
    x = arranged(b, x)
    least, most = _operand(b, low, x), _operand(b, high, x)
    if type_of(x) == FLOAT and is_number(least) and is_number(most):
        return clipped(x, least, most)
    x = x if low is None else _larger(b, x, low)
    return x if high is None else _smaller(b, x, high)


@onnx("PRelu")
def prelu(b: Building, x: Any, slope: Any) -> Arranged:
    if (
        rank_of(slope) == 1 < rank_of(x) and slope.shape[0] == x.shape[1] != x.shape[-1]
    ):  # of opset 6: one for each channel
        slope = arranged(b, slope).reshaped([slope.shape[0], *(1,) * (rank_of(x) - 2)])
    return _in_floats(b, F.prelu, x, slope)


@onnx("Where")
def where(b: Building, condition: Any, x: Any, y: Any) -> Arranged:
    read = plain if type_of(x) == FLOAT else variable
    return Arranged.of(F.where(plain(b, condition), read(b, x), read(b, y)))


# ---------------------------------------------------------------- types
@onnx("Cast")
def cast(b: Building, x: Any, *, to: int, **_: Any) -> Arranged:
    if to not in TYPES:
        raise Cannot(f"ONNX's type {to} has no counterpart: float, double, uint8, int8, int32, int64 and bool have")
    return arranged(b, x).again(lambda v: in_type(v, TYPES[to]))


@onnx("CastLike")
def cast_like(b: Building, x: Any, of: Any, **_: Any) -> Any:
    kind = type_of(of)
    if is_known(x):
        return x.astype("float64" if kind == FLOAT else kind)
    return arranged(b, x).again(lambda v: in_type(v, kind))

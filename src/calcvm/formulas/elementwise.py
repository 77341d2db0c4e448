"""Elementwise operators.

A backward reads the output rather than the input if it can.  Then the output can overwrite the input, and an activation
fused into the row before needs no copy of its argument.
"""

from __future__ import annotations

import math
from typing import Any

from calcvm.formulas import number as n
from calcvm.formulas.declare import ELEMENTWISE, Cells, Choice, Formula, Real, To, elementwise

__all__ = ["ACCUMULATE", "ACTIVATIONS", "CAST", "ELEMENTWISE", "FILL"]

# Activations that other rows apply to their results.  Stored programs contain their numbers: append only.
ACTIVATIONS = ("none", "relu", "leaky_relu", "sigmoid", "tanh", "elu", "relu6", "silu", "hard_swish")


def _passed(dy: Any, dx: Any) -> Any:
    """dx, but 0 where dy is 0, even if the slope is not a number, as in a branch that `where` did not take."""
    return n.where(n.equal(dy, 0), 0.0, dx)


def _within(x: Any, most: float) -> Any:
    """x clamped to a range beyond which a slope no longer changes; infinities get the limit.  NaN stays."""
    x = n.where(x > most, most, x)
    return n.where(x < -most, -most, x)


def _gated(x: Any, gate: Any) -> Any:
    """x*gate, but 0 where the gate is 0, even for -inf."""
    return n.where(n.equal(gate, 0), 0.0, x * gate)


# ---------------------------------------------------------------- of one operand
@elementwise(onnx="Neg")
class neg:
    def y(x):
        return -x

    def dx(dy):
        return -dy


@elementwise(onnx="Abs", source="the derivative at 0 is 0, as in PyTorch")
class abs:  # noqa: A001
    def y(x):
        return n.fabs(x)

    def dx(dy, x):
        return dy * n.sign(x)


@elementwise(onnx="Sqrt", low=0.1)
class sqrt:
    def y(x):
        return n.sqrt(x)

    def dx(dy, y):
        return _passed(dy, 0.5 * dy / y)


@elementwise()
class square:
    def y(x):
        return x * x

    def dx(dy, x):
        return 2 * (dy * x)


@elementwise(onnx="Exp")
class exp:
    def y(x):
        return n.exp(x)

    def dx(dy, y):
        return _passed(dy, dy * y)


@elementwise(onnx="Log", low=0.1)
class log:
    def y(x):
        return n.log(x)

    def dx(dy, x):
        return _passed(dy, dy / x)


@elementwise(source="accurate where exp(x) is near 1; the slope is accurate to half an ulp of 1")
class expm1:
    def y(x):
        return n.expm1(x)

    def dx(dy, y):
        return _passed(dy, dy * (y + 1))


@elementwise(low=-0.5, source="accurate where x is near 0")
class log1p:
    def y(x):
        return n.log1p(x)

    def dx(dy, x):
        return _passed(dy, dy / (x + 1))


@elementwise(onnx="Erf")
class erf:
    def y(x):
        return n.erf(x)

    def dx(dy, x):
        return dy * (2 / math.sqrt(math.pi) * n.exp(-(x * x)))


# ---------------------------------------------------------------- of angles, in radians
@elementwise(onnx="Sin")
class sin:
    def y(x):
        return n.sin(x)

    def dx(dy, x):
        return dy * n.cos(x)


@elementwise(onnx="Cos")
class cos:
    def y(x):
        return n.cos(x)

    def dx(dy, x):
        return -dy * n.sin(x)


@elementwise(onnx="Tan", low=-1.25, high=1.25)
class tan:
    def y(x):
        return n.tan(x)

    def dx(dy, y):
        return dy * n.fma(y, y, 1.0)


@elementwise(onnx="Asin", low=-0.7, high=0.7, source="NaN outside [-1, 1]")
class asin:
    def y(x):
        return n.asin(x)

    def dx(dy, x):
        return _passed(dy, dy / n.sqrt((1 - x) * (1 + x)))


@elementwise(onnx="Acos", low=-0.7, high=0.7, source="NaN outside [-1, 1]")
class acos:
    def y(x):
        return n.acos(x)

    def dx(dy, x):
        return _passed(dy, -dy / n.sqrt((1 - x) * (1 + x)))


@elementwise(onnx="Atan")
class atan:
    def y(x):
        return n.atan(x)

    def dx(dy, x):
        return dy / n.fma(x, x, 1.0)


@elementwise(onnx="Sinh")
class sinh:
    def y(x):
        return n.sinh(x)

    def dx(dy, x):
        return _passed(dy, dy * n.cosh(x))


@elementwise(onnx="Cosh")
class cosh:
    def y(x):
        return n.cosh(x)

    def dx(dy, x):
        return _passed(dy, dy * n.sinh(x))


# ---------------------------------------------------------------- piecewise, and compositions
@elementwise(onnx="Relu")
class relu:
    def y(x):
        return n.where(x < 0, 0.0, x)

    def dx(dy, y):
        return n.where(y <= 0, 0.0, dy)


@elementwise(
    onnx="LeakyRelu",
    alpha=Real(0.01, "slope for x < 0, >= 0", lo=0.0),
    cases=({"alpha": 0.01}, {"alpha": 0.3}, {"alpha": 0.0}),
)
class leaky_relu:
    def y(x, alpha):
        return n.where(x > 0, x, alpha * x)

    def dx(dy, y, alpha):
        return n.where(y > 0, dy, alpha * dy)


@elementwise(onnx="Sigmoid")
class sigmoid:
    def y(x):
        return n.logistic(x)

    def dx(dy, y):
        return dy * (y * (1 - y))


@elementwise(onnx="Tanh")
class tanh:
    def y(x):
        return n.tanh(x)

    def dx(dy, y):
        return dy * (1 - y * y)


@elementwise(
    onnx="Gelu",
    approximate=Choice(("none", "tanh"), '"none" (erf) or "tanh"'),
    cases=({"approximate": "none"}, {"approximate": "tanh"}),
    source='Hendrycks and Gimpel 2016; with approximate="tanh" the normal distribution by the hyperbolic tangent',
)
class gelu:
    def y(x, approximate):
        if approximate == "tanh":
            return _gated(x, n.logistic(2 * _by_tanh(x)))
        return _gated(x, n.normal_cdf(x))

    def dx(dy, x, approximate):
        x = _within(x, 40.0)
        if approximate == "tanh":
            s = n.logistic(2 * _by_tanh(x))
            slope = 2 * SQRT_2_BY_PI * n.fma(x * x, 3 * CUBIC, 1.0)
            return dy * (s + x * s * (1 - s) * slope)
        return dy * (n.normal_cdf(x) + x * INV_SQRT_2PI * n.exp(-0.5 * x * x))


INV_SQRT_2PI = 1 / math.sqrt(2 * math.pi)
SQRT_2_BY_PI, CUBIC = math.sqrt(2 / math.pi), 0.044715


def _by_tanh(x: Any) -> Any:
    return SQRT_2_BY_PI * n.fma(x * x * x, CUBIC, x)


@elementwise(onnx="Softplus", source="log(1 + exp(x))")
class softplus:
    def y(x):
        return n.softplus(x)

    def dx(dy, y):
        return -dy * n.expm1(-y)


@elementwise(onnx="Swish", source="Elfwing et al. 2018; Ramachandran et al. 2017")
class silu:
    def y(x):
        return _gated(x, n.logistic(x))

    def dx(dy, x):
        x = _within(x, 1000.0)
        s = n.logistic(x)
        return dy * n.fma(x * s, 1 - s, s)


@elementwise(
    onnx="Elu",
    alpha=Real(1.0, "limit for x -> -inf is -alpha, >= 0", lo=0.0),
    cases=({"alpha": 1.0}, {"alpha": 0.5}),
    source="Clevert et al. 2016",
)
class elu:
    def y(x, alpha):
        return n.where(x > 0, x, alpha * n.expm1(x))

    def dx(dy, x, alpha):
        return n.where(x > 0, dy, dy * (alpha * n.exp(x)))


def elu_by_output(dy: Any, y: Any, alpha: Any) -> Any:
    """The dx used by rows of older stored programs, from before it was computed from x: accurate to half an ulp of alpha."""
    return n.where(y > 0, dy, dy * (y + alpha))


@elementwise(onnx="Selu", source="Klambauer et al. 2017")
class selu:
    def y(x):
        return n.where(x > 0, SELU_SCALE * x, SELU_SCALE * SELU_ALPHA * n.expm1(x))

    def dx(dy, x):
        return n.where(x > 0, SELU_SCALE * dy, dy * (SELU_SCALE * SELU_ALPHA * n.exp(x)))


SELU_ALPHA, SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


@elementwise(onnx="Mish", source="Misra 2020; tanh(softplus(x)) = w/(w + 2), w = exp(x)*(exp(x) + 2)")
class mish:
    def y(x):
        e = _exp_of_mish(x)
        w = e * (e + 2)
        return _gated(x, w / (w + 2))

    def dx(dy, x):
        x = _within(x, 1000.0)
        e = _exp_of_mish(x)
        w = e * (e + 2)
        return dy * n.fma(x * (e / (e + 1)), 4 * ((w + 1) / ((w + 2) * (w + 2))), w / (w + 2))


def _exp_of_mish(x: Any) -> Any:
    return n.exp(n.where(x > 40, 40.0, x))  # beyond that y is x and the slope 1, to the last place


@elementwise(onnx="HardSigmoid", source="at the kinks the derivative is 0, as in PyTorch; ONNX's with alpha = 1/6")
class hard_sigmoid:
    def y(x):
        return n.where(x <= -3, 0.0, n.where(x >= 3, 1.0, (x + 3) / 6))

    def dx(dy, y):
        return n.where(y <= 0, 0.0, n.where(y >= 1, 0.0, dy / 6))


@elementwise(onnx="HardSwish", source="Howard et al. 2019; at the kinks the derivative is 0 and 1, as in PyTorch")
class hard_swish:
    def y(x):
        return n.where(x <= -3, 0.0, n.where(x >= 3, x, x * (x + 3) / 6))

    def dx(dy, x):
        return n.where(x <= -3, 0.0, n.where(x >= 3, dy, dy * n.fma(x, 1 / 3, 0.5)))


@elementwise(source="Howard et al. 2017; at both kinks the derivative is 0, as in PyTorch")
class relu6:
    def y(x):
        return n.where(x < 0, 0.0, n.where(x > 6, 6.0, x))

    def dx(dy, y):
        return n.where(y <= 0, 0.0, n.where(y >= 6, 0.0, dy))


@elementwise(
    a=Real(1.0, "factor"),
    b=Real(0.0, "added"),
    cases=({"a": 1.5, "b": -0.25}, {"a": 0.0, "b": 3.0}, {"a": -1.0, "b": 0.0}),
)
class affine:
    def y(x, a, b):
        return n.fma(x, a, b)

    def dx(dy, a):
        return dy * a


@elementwise(
    onnx="Clip",
    lo=Real(None, "the least value; for hi alone write cv.minimum(x, hi)"),
    hi=Real(
        None, "the largest value; if it is below ``lo``, all values become it; for lo alone write cv.maximum(x, lo)"
    ),
    cases=({"lo": -1.0, "hi": 0.5}, {"lo": 0.0, "hi": 6.0}),
    source="NaN stays; at the bounds the derivative is 1, as in PyTorch",
)
class clip:
    def y(x, lo, hi):
        x = n.where(x < lo, lo, x)
        return n.where(x > hi, hi, x)

    def dx(dy, x, lo, hi):
        return n.where(x < lo, 0.0, n.where(x > hi, 0.0, dy))


_RANGED = "max(-128*scale, min(127*scale, x))"


@elementwise(
    text=f"{_RANGED} + stop(rint({_RANGED}/scale)*scale - {_RANGED})",  # the gradient goes straight through the rounding
    scale=Real(None, "the step between neighbouring results, above 0", lo=1e-30),
    cases=({"scale": 0.01}, {"scale": 0.5}),
    source="the slope is 1 within the range: Bengio et al. 2013 (straight through)",
)
class fake_quantize:
    def y(x, scale):
        x = n.where(x < -128.0 * scale, -128.0 * scale, x)
        return n.rint(n.where(x > 127.0 * scale, 127.0 * scale, x) / scale) * scale

    def dx(dy, x, scale):
        return n.where(x < -128.0 * scale, 0.0, n.where(x > 127.0 * scale, 0.0, dy))


# ---------------------------------------------------------------- without slope
@elementwise(onnx="Sign", source="NaN stays")
class sign:
    def y(x):
        return n.where(x > 0, 1.0, n.where(x < 0, -1.0, x))


@elementwise(onnx="Floor")
class floor:
    def y(x):
        return n.floor(x)


@elementwise(onnx="Ceil")
class ceil:
    def y(x):
        return n.ceil(x)


@elementwise(onnx="Round", source="halfway cases round to the even integer")
class round:  # noqa: A001
    def y(x):
        return n.rint(x)


# ---------------------------------------------------------------- of two operands, with NumPy's broadcasting
@elementwise(onnx="Add")
class add:
    def y(a, b):
        return a + b

    def da(dy):
        return dy

    def db(dy):
        return dy


@elementwise(onnx="Sub")
class sub:
    def y(a, b):
        return a - b

    def da(dy):
        return dy

    def db(dy):
        return -dy


@elementwise(onnx="Mul")
class mul:
    def y(a, b):
        return a * b

    def da(dy, b):
        return dy * b

    def db(dy, a):
        return dy * a


@elementwise(onnx="Div", low=0.3)
class div:
    def y(a, b):
        return a / b

    def da(dy, b):
        return _passed(dy, dy / b)

    def db(dy, y, b):
        return _passed(dy, -dy * (y / b))


NAN_OF_TWO = "NaN if either is, and then both get the gradient; equal operands get half each, as in PyTorch"


@elementwise(onnx="Max", source=NAN_OF_TWO)
class maximum:
    def y(a, b):
        return n.where(a > b, a, n.where(a <= b, b, a + b))

    def da(dy, a, b):
        return n.where(a < b, 0.0, n.where(n.equal(a, b), 0.5 * dy, dy))

    def db(dy, a, b):
        return n.where(b < a, 0.0, n.where(n.equal(a, b), 0.5 * dy, dy))


@elementwise(onnx="Min", source=NAN_OF_TWO)
class minimum:
    def y(a, b):
        return n.where(a < b, a, n.where(a >= b, b, a + b))

    def da(dy, a, b):
        return n.where(a > b, 0.0, n.where(n.equal(a, b), 0.5 * dy, dy))

    def db(dy, a, b):
        return n.where(b > a, 0.0, n.where(n.equal(a, b), 0.5 * dy, dy))


@elementwise(
    onnx="Mod",
    text="a - floor(a/b)*b",
    low=0.3,
    exact=True,
    source="of floats; with the sign of b, as Python's %, numpy.mod and torch.remainder; accurate where a/b is finite, "
    "below 2^23 (float64: 2^52), and 0 only if a is",
)
class mod:
    def y(a, b):
        r = n.fma(-n.floor(a / b), b, a)
        r = n.where(r * b < 0, r + b, r)  # the quotient was rounded up to an integer
        return n.where(n.fabs(r) >= n.fabs(b), r - b, r)

    def da(dy):
        return dy

    def db(dy, a, b):
        return _passed(dy, -dy * n.floor(a / b))


@elementwise(onnx="PRelu", source="He et al. 2015; at 0 the derivative is the slope, as in PyTorch")
class prelu:
    def y(x, slope):
        return n.where(x > 0, x, slope * x)

    def dx(dy, x, slope):
        return n.where(x > 0, dy, slope * dy)

    def dslope(dy, x):
        return n.where(x > 0, 0.0, x * dy)


# ---------------------------------------------------------------- of numbers of any type, and of conditions
@elementwise(onnx="Equal")
class equal:
    def y(a: Any, b: Any) -> bool:
        return n.equal(a, b)


@elementwise(source="NaN differs from everything, itself included")
class not_equal:
    def y(a: Any, b: Any) -> bool:
        return n.holds_not(n.equal(a, b))


@elementwise(onnx="Less", types=("float32", "float64", "int64", "int32", "uint8", "int8", "bool"))
class less:
    def y(a: Any, b: Any) -> bool:
        return a < b


@elementwise(onnx="LessOrEqual")
class less_equal:
    def y(a: Any, b: Any) -> bool:
        return a <= b


@elementwise(onnx="Greater")
class greater:
    def y(a: Any, b: Any) -> bool:
        return a > b


@elementwise(onnx="GreaterOrEqual")
class greater_equal:
    def y(a: Any, b: Any) -> bool:
        return a >= b


@elementwise(onnx="Not")
class logical_not:
    def y(x: bool) -> bool:
        return n.holds_not(x)


@elementwise(onnx="And")
class logical_and:
    def y(a: bool, b: bool) -> bool:
        return n.both(a, b)


@elementwise(onnx="Or")
class logical_or:
    def y(a: bool, b: bool) -> bool:
        return n.either(a, b)


@elementwise(onnx="Xor")
class logical_xor:
    def y(a: bool, b: bool) -> bool:
        return n.one(a, b)


# ---------------------------------------------------------------- terms of losses with weighted means
def logistic_loss(x: Any, t: Any) -> Any:
    """softplus(x) - x*t, in terms that are never negative: nothing cancels, and 0*inf is 0."""
    y, away = n.fabs(x), _against(x, t)
    return n.where(n.equal(away, 0), 0.0, y * away) + n.log1p(n.exp(-y))


def logistic_slope(x: Any, t: Any) -> Any:
    """sigmoid(x) - t, from the probability that the logit argues against."""
    e = n.exp(-n.fabs(x))
    p, away = e / (e + 1), _against(x, t)
    return n.where(x > 0, away - p, p - away)


def _against(x: Any, t: Any) -> Any:
    """The part of the target that contradicts the logit."""
    return n.where(x > 0, 1 - t, t)


@elementwise(source="the term of binary_cross_entropy: x is a logit, t a probability")
class binary_cross_entropy_term:
    def y(x, t):
        return logistic_loss(x, t)

    def dx(dy, x, t):
        return dy * logistic_slope(x, t)

    def dt(dy, x):
        return -(dy * x)


def step(d: Any) -> Any:
    """-1, 0 or 1; NaN stays."""
    return n.where(d > 0, 1.0, n.where(d < 0, -1.0, d))


@elementwise(source="the term of mae")
class mae_term:
    def y(x, t):
        return n.fabs(x - t)

    def dx(dy, x, t):
        return dy * step(x - t)

    def dt(dy, x, t):
        return dy * step(t - x)


# ---------------------------------------------------------------- conditions and choices
@elementwise(onnx="Where", types=("uint8", "int64"))
class where:
    def y(c: bool, a: Cells, b: Cells) -> Cells:
        return n.where(c, a, b)

    def da(dy, c: bool):
        return n.where(c, dy, 0.0)

    def db(dy, c: bool):
        return n.where(c, 0.0, dy)


# ---------------------------------------------------------------- rows that lowering inserts
def _as_it_is(x: Any) -> To:
    return x


CAST = Formula("cast_fwd", _as_it_is, "y")
ACCUMULATE = Formula("accumulate", lambda x, y: x + y, "y")
FILL = Formula("fill", lambda value: value, "y", {"value": Real(0.0, "what y is set to")})

"""Operators of one element at a time, with broadcasting, and types."""

from __future__ import annotations

from typing import Any

from calcvm.frontends.onnx_writer.declared import Nodes, Tensor, writes
from calcvm.ops.types import RANKS

ALIKE = {  # operators that are one of ONNX
    "neg": "Neg", "abs": "Abs", "sqrt": "Sqrt", "exp": "Exp", "log": "Log", "erf": "Erf", "sin": "Sin", "cos": "Cos", "tan": "Tan",
    "asin": "Asin", "acos": "Acos", "atan": "Atan", "sinh": "Sinh", "cosh": "Cosh", "relu": "Relu", "sigmoid": "Sigmoid",
    "tanh": "Tanh", "softplus": "Softplus", "selu": "Selu", "mish": "Mish", "hard_swish": "HardSwish", "sign": "Sign",
    "floor": "Floor", "ceil": "Ceil", "round": "Round", "leaky_relu": "LeakyRelu", "elu": "Elu", "gelu": "Gelu",
    "add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "maximum": "Max", "minimum": "Min",
    "logical_not": "Not", "logical_and": "And", "logical_or": "Or", "logical_xor": "Xor",
}  # fmt: skip
COMPARED = {
    "equal": "Equal", "not_equal": "Equal", "less": "Less", "less_equal": "LessOrEqual", "greater": "Greater",
    "greater_equal": "GreaterOrEqual",
}  # fmt: skip
SMALL = RANKS[:3]  # types that not all operators take


@writes(*ALIKE)
def alike(n: Nodes, *inputs: Tensor, **attrs: Any) -> str:
    return n(ALIKE[n.op.spec.name], *inputs, **attrs)


@writes(*COMPARED)
def compared(n: Nodes, a: Tensor, b: Tensor) -> str:
    pair = (n.cast(x, "int32") if x.type in SMALL else x for x in (a, b))
    y = n(COMPARED[n.op.spec.name], *pair)
    return n("Not", y) if n.op.spec.name == "not_equal" else y


@writes("where")
def where(n: Nodes, c: Tensor, a: Tensor, b: Tensor) -> str:
    if a.type not in SMALL:
        return n.where(c, a, b)
    return n.cast(n.where(c, *(n.cast(x, "int32") for x in (a, b))), a.type)


@writes("cast")
def cast(n: Nodes, x: Tensor, *, to: str) -> str:
    """Floats that bytes cannot hold become the nearest that they can."""
    if to in ("uint8", "int8") and x.type not in RANKS:
        low = 0 if to == "uint8" else -128
        return n.cast(n("Clip", x, n.number(low, x.type), n.number(low + 255, x.type)), to)
    return n.cast(x, to)


# ---------------------------------------------------------------- of one operand
@writes("square")
def square(n: Nodes, x: str) -> str:
    return n("Mul", x, x)


@writes("affine")
def affine(n: Nodes, x: str, *, a: float, b: float) -> str:
    return n.affine(x, float(a), float(b))


@writes("pow")
def power(n: Nodes, x: str, *, exponent: float) -> str:
    return n("Pow", x, float(exponent))


@writes("clip")
def clip(n: Nodes, x: str, *, lo: float, hi: float) -> str:
    return n("Clip", x, float(lo), float(hi))


@writes("relu6")
def relu6(n: Nodes, x: str) -> str:
    return clip(n, x, lo=0.0, hi=6.0)


@writes("hard_sigmoid")
def hard_sigmoid(n: Nodes, x: str) -> str:
    return n("HardSigmoid", x, alpha=1 / 6, beta=0.5)


@writes("silu")
def silu(n: Nodes, x: str) -> str:
    return n("Mul", x, n("Sigmoid", x))


@writes("expm1")
def expm1(n: Nodes, x: str) -> str:
    """tanh(x/2)*(exp(x) + 1), which is accurate near 0."""
    return n("Mul", n("Tanh", n.affine(x, 0.5)), n.affine(n("Exp", x), b=1.0))


@writes("log1p")
def log1p(n: Nodes, x: str) -> str:
    """2*atanh(x/(x + 2)) near 0."""
    near = n.affine(n("Atanh", n("Div", x, n.affine(x, b=2.0))), 2.0)
    return n.where(n("Less", n("Abs", x), 0.5), near, n("Log", n.affine(x, b=1.0)))


@writes("fake_quantize")
def fake_quantize(n: Nodes, x: str, *, scale: float) -> str:
    steps = n("Round", n("Div", clip(n, x, lo=-128 * scale, hi=127 * scale), float(scale)))
    return n.affine(steps, float(scale))


# ---------------------------------------------------------------- of several
@writes("mod")
def mod(n: Nodes, a: str, b: str) -> str:
    """The remainder with the sign of a, moved to that of b."""
    r = n("Mod", a, b, fmod=1)
    return n.where(n("Less", n("Mul", n("Sign", r), n("Sign", b)), 0.0), n("Add", r, b), r)


@writes("prelu")
def prelu(n: Nodes, x: Tensor, slope: Tensor) -> str:
    if n.shape == x.shape:
        return n("PRelu", x, slope)
    return n.where(n("Greater", x, 0.0), x, n("Mul", slope, x))


@writes("mae_term")
def mae_term(n: Nodes, x: str, t: str) -> str:
    return n("Abs", n("Sub", x, t))


@writes("binary_cross_entropy_term")
def binary_cross_entropy_term(n: Nodes, x: str, t: str) -> str:
    """|x| times what of the target contradicts the logit, and log(1 + exp(-|x|))."""
    size = n("Abs", x)
    away = n.where(n("Greater", x, 0.0), n("Sub", 1.0, t), t)
    return n("Add", n("Mul", size, away), n("Softplus", n("Neg", size)))


def mean_of(n: Nodes, x: str) -> str:
    """The mean of all elements."""
    return n("ReduceMean", x, keepdims=0)

"""Operators, functions and reductions of equations, as operators of a graph."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from calcvm import functions as F
from calcvm.errors import CalcError
from calcvm.graph import Variable, apply
from calcvm.ops import OPS
from calcvm.ops.spec import is_own
from calcvm.ops.types import RANKS

ELEMENTWISE = ("unary", "binary", "ternary")
# operators of the table for which equations have signs, or other names
SIGNS = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "mod": "%", "neg": "neg", "abs": "abs", "where": "where",
    "maximum": "max", "minimum": "min", "equal": "==", "not_equal": "!=", "less": "<", "less_equal": "<=", "greater": ">",
    "greater_equal": ">=", "logical_and": "and", "logical_or": "or", "logical_not": "not", "round": "rint",
    "stop_gradient": "stop",
}  # fmt: skip


def functions() -> dict[str, int]:
    """Further functions that rows compute, besides those of the language: names, with their numbers of arguments."""
    return {
        name: len(spec.inputs)
        for name, spec in OPS.items()
        if spec.category in ELEMENTWISE
        and name not in SIGNS
        and (name in F.__all__ or any(map(is_own, spec.rows)))
        and all(attr.default is not None for attr in spec.attrs)
    }


def _power(x: Any, exponent: Any) -> Any:
    if isinstance(exponent, (Variable, np.ndarray)):
        if not isinstance(x, (Variable, np.ndarray)) and x > 0:
            return apply("exp", exponent * math.log(x))
        raise CalcError("the exponent or the base must be a number: write exp(exponent*log(x)) for positive x")
    if exponent == 1:
        return x
    return F.square(x) if exponent == 2 else F.pow(x, float(exponent))


def _where(c: Any, a: Any, b: Any) -> Any:
    if isinstance(c, Variable) and not any(isinstance(v, (Variable, np.ndarray)) for v in (a, b)) and (a, b) == (1, 0):
        return F.cast(c, None)
    return F.where(c, a, b)


def _float(x: Any) -> Any:
    """Integers converted to the program's float type, for division."""
    return F.cast(x, None) if isinstance(x, Variable) and x.type in RANKS else x


def _log_add_exp(x: Any, y: Any) -> Any:
    """logaddexp; equal infinities have no difference, and stay."""
    apart = F.where(F.equal(x, y), 0, -F.abs(x - y))
    return F.maximum(x, y) + F.softplus(apart)


OPERATORS: dict[str, Callable[..., Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": lambda a, b: F.floor(_float(a) / _float(b)),
    "%": lambda a, b: F.mod(_float(a), _float(b)),
    "^": _power,
    "neg": operator.neg,
    "abs": F.abs,
    "==": F.equal,
    "!=": F.not_equal,
    "<": F.less,
    "<=": F.less_equal,
    ">": F.greater,
    ">=": F.greater_equal,
    "and": F.logical_and,
    "or": F.logical_or,
    "not": F.logical_not,
    "where": _where,
    "max": F.maximum,
    "min": F.minimum,
    "logaddexp": _log_add_exp,
    "stop": F.stop_gradient,
    "rint": F.round,
}


def _flags(best: Callable[..., Variable]) -> Callable[..., Variable]:
    return lambda x, at: F.greater(best(F.cast(x, None), at), 0.5)


REDUCED: dict[str, Callable[..., Variable]] = {
    "sum": F.sum,
    "mean": F.mean,
    "max": F.max,
    "min": F.min,
    "var": F.var,
    "logsumexp": F.logsumexp,
    "any": _flags(F.max),
    "all": _flags(F.min),
}
FOLDS = {"sum": "+", "mean": "+", "max": "max", "min": "min", "prod": "*", "any": "or", "all": "and"}

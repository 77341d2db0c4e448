"""Functions that equations know: how many numbers they take, and their derivatives, as texts of the language."""

from __future__ import annotations

from functools import cache

from calcvm.equations.tree import Node

# by function of x: its derivative, over x and y, which is its value
DERIVATIVES = {
    "exp": "y",
    "expm1": "y + 1",
    "log": "1/x",
    "log1p": "1/(1 + x)",
    "sqrt": "0.5/y",
    "abs": "sign(x)",
    "sign": "0",
    "floor": "0",
    "ceil": "0",
    "rint": "0",
    "sin": "cos(x)",
    "cos": "-sin(x)",
    "tan": "1 + y^2",
    "asin": "1/sqrt(1 - x^2)",
    "acos": "-1/sqrt(1 - x^2)",
    "atan": "1/(1 + x^2)",
    "sinh": "cosh(x)",
    "cosh": "sinh(x)",
    "tanh": "1 - y^2",
    "erf": "1.1283791670955126*exp(-x^2)",  # 2/sqrt(pi)
    "sigmoid": "y*(1 - y)",
    "softplus": "sigmoid(x)",
    "relu": "where(x > 0, 1, 0)",
}
ARGUMENTS = dict.fromkeys(DERIVATIVES, 1) | {"stop": 1, "where": 3, "max": 2, "min": 2, "neg": 1, "not": 1}


@cache
def derivative(function: str) -> Node:
    """Of a function of one number, over the names x and y."""
    from calcvm.equations.grammar import read

    return read(f"d = {DERIVATIVES[function]}")[0].value

"""Functions that equations know: their numbers of arguments, and their derivatives, as texts of the language."""

from __future__ import annotations

from functools import cache

from calcvm.equations.tree import Node
from calcvm.formulas.functions import FUNCTIONS

# the derivative of each function of x, over x and its value y
DERIVATIVES = {f.equation: f.derivative for f in FUNCTIONS.values() if f.derivative} | {"relu": "where(x > 0, 1, 0)"}
ARGUMENTS = dict.fromkeys(DERIVATIVES, 1) | {
    "stop": 1,
    "where": 3,
    "max": 2,
    "min": 2,
    "logaddexp": 2,
    "neg": 1,
    "not": 1,
}


@cache
def derivative(function: str) -> Node:
    """The derivative of a function of one number, over the names x and y."""
    from calcvm.equations.grammar import read

    return read(f"d = {DERIVATIVES[function]}")[0].value

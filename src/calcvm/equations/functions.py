"""Functions that equations know: how many numbers they take, and their derivatives, as texts of the language."""

from __future__ import annotations

from functools import cache

from calcvm.equations.tree import Node
from calcvm.formulas.functions import FUNCTIONS

# by function of x: its derivative, over x and y, which is its value
DERIVATIVES = {f.equation: f.derivative for f in FUNCTIONS.values() if f.derivative} | {"relu": "where(x > 0, 1, 0)"}
ARGUMENTS = dict.fromkeys(DERIVATIVES, 1) | {"stop": 1, "where": 3, "max": 2, "min": 2, "neg": 1, "not": 1}


@cache
def derivative(function: str) -> Node:
    """Of a function of one number, over the names x and y."""
    from calcvm.equations.grammar import read

    return read(f"d = {DERIVATIVES[function]}")[0].value

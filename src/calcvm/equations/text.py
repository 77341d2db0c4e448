"""Trees become texts: equal trees have one text, and parsing it gives the same tree."""

from __future__ import annotations

import math
from collections.abc import Iterable

from calcvm.equations.tree import COMPARISONS, Call, Element, Equation, Index, Name, Node, Number, Reduction

# Binding strengths.  A part that binds less tightly than its place requires is put in parentheses.
OR, AND, NOT, COMPARED, SUM, PRODUCT, SIGN, POWER, ATOM = range(9)
BINDS = {"or": OR, "and": AND, "+": SUM, "-": SUM, "*": PRODUCT, "/": PRODUCT, "//": PRODUCT, "%": PRODUCT, "^": POWER}
BINDS |= dict.fromkeys(COMPARISONS, COMPARED)
CLOSE = ("*", "/", "^")  # written without spaces


def show_equations(equations: Iterable[Equation]) -> str:
    return "; ".join(map(show_equation, equations))


def show_equation(equation: Equation) -> str:
    kept = "" if equation.kept is None else f"[{show_indexes(equation.kept)}]"
    sign, value = "=", equation.value
    if isinstance(value, Call) and value.function in ("+", "-", "*") and value.arguments[0] == _before(equation):
        sign, value = f"{value.function}=", value.arguments[1]
    return f"{equation.name}{kept} {sign} {show(value)}"


def _before(equation: Equation) -> Node:
    """The old value of an equation's result, as ``+=`` reads it."""
    if not equation.kept:
        return Name(equation.name)
    return Element(equation.name, tuple(Name(i.name) for i in equation.kept))


def show_indexes(indexes: Iterable[Index]) -> str:
    return ",".join(i.name if i.extent is None else f"{i.name}<{show(i.extent, SUM)}" for i in indexes)


def show_number(value: int | float) -> str:
    """All its digits, so that parsing gives the same number."""
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f"{int(value)}" if value or math.copysign(1, value) > 0 else "-0.0"
    return repr(value)


def show(node: Node, least: int = OR) -> str:
    """Its text, in parentheses if it binds less tightly than ``least``."""
    text, binds = _written(node)
    return text if binds >= least else f"({text})"


def _written(node: Node) -> tuple[str, int]:
    if isinstance(node, Number):
        text = show_number(node.value)
        return text, SIGN if text[0] == "-" else ATOM
    if isinstance(node, Name):
        return node.name, ATOM
    if isinstance(node, Element):
        beyond = "" if node.beyond == 0 else f"; {show_number(node.beyond)}"
        comma = "," if all(isinstance(place, Name) for place in node.places) else ", "
        return f"{node.array}[{comma.join(show(place, SUM) for place in node.places)}{beyond}]", ATOM
    if isinstance(node, Reduction):  # a product after it would become part of it
        return f"{node.how}[{show_indexes(node.indexes)}] {show(node.body, PRODUCT)}", PRODUCT
    return _call(node)


def _call(node: Call) -> tuple[str, int]:
    function, arguments = node.function, node.arguments
    if function == "neg":
        return f"-{_operand(arguments[0], SIGN)}", SIGN
    if function == "not":
        return f"not {show(arguments[0], NOT)}", NOT
    if function == "abs":
        return f"|{show(arguments[0], SUM)}|", ATOM
    binds = BINDS.get(function)
    if binds is None:
        return f"{function}({', '.join(map(show, arguments))})", ATOM
    first, second = arguments
    if function == "^":
        return f"{show(first, ATOM)}^{show(second, SIGN)}", POWER
    left = show(first, binds + (binds == COMPARED))
    if binds == PRODUCT and _ends_in_reduction(first):
        left = f"({left})"
    sign = function if function in CLOSE else f" {function} "
    return f"{left}{sign}{_operand(second, binds + 1)}", binds


def _operand(node: Node, least: int) -> str:
    """The last operand of an operator: a reduction extends to the end, so it needs no parentheses there."""
    return show(node, PRODUCT if isinstance(node, Reduction) else least)


def _ends_in_reduction(node: Node) -> bool:
    """Whether a factor written after its text would become part of a reduction."""
    if isinstance(node, Reduction):
        return True
    if isinstance(node, Call) and (node.function == "neg" or BINDS.get(node.function) in (PRODUCT, POWER)):
        return _ends_in_reduction(node.arguments[-1])
    return False

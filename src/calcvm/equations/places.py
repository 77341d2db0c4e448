"""Places of elements: integer expressions of indexes and sizes, in canonical form, solved for an index, and evaluated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calcvm.equations.tree import ZERO, Call, Name, Node, Number, call, names

Terms = dict[tuple[str, ...], int]  # products of names, with their coefficients


def terms(node: Node) -> Terms | None:
    """A place as a sum of products of names; None if it has other operations."""
    if isinstance(node, Number):
        return {(): node.value} if isinstance(node.value, int) else None
    if isinstance(node, Name):
        return {(node.name,): 1}
    if not isinstance(node, Call) or node.function not in ("+", "-", "neg", "*"):
        return None
    found = [terms(argument) for argument in node.arguments]
    if any(part is None for part in found):
        return None
    out: Terms = {}
    if node.function == "*":
        for a, x in found[0].items():  # type: ignore[union-attr]
            for b, y in found[1].items():  # type: ignore[union-attr]
                key = tuple(sorted(a + b))
                out[key] = out.get(key, 0) + x * y
    else:
        signs = (-1,) if node.function == "neg" else (1, -1 if node.function == "-" else 1)
        for part, sign in zip(found, signs):
            for key, x in part.items():  # type: ignore[union-attr]
                out[key] = out.get(key, 0) + sign * x
    return {key: x for key, x in out.items() if x}


def of_terms(found: Terms) -> Node:
    """The node of a sum: positive terms first, longer products before shorter, the constant last."""
    order = sorted(found.items(), key=lambda item: (item[1] < 0, not item[0], item[0]))
    node: Node | None = None
    for key, x in order:
        term: Node | None = None
        for name in key:
            term = Name(name) if term is None else call("*", term, Name(name))
        n = abs(x) if node is not None else x
        if term is None:
            term = Number(n)
        elif n == -1:
            term = call("neg", term)
        elif n != 1:
            term = call("*", term, Number(n)) if n > 0 else call("neg", call("*", term, Number(-n)))
        node = term if node is None else call("-" if x < 0 else "+", node, term)
    return ZERO if node is None else node


def placed(node: Node) -> Node:
    """A place in canonical form: equal sums are equal nodes."""
    if isinstance(node, Call) and node.function == "/":
        return call("/", *map(placed, node.arguments))
    found = terms(node)
    return node if found is None else of_terms(found)


def linear(node: Node, index: str) -> tuple[Node, Node] | None:
    """(c, rest) with ``node = c*index + rest``, neither of which contains the index; None if there are none."""
    found = terms(node)
    if found is None:
        return None if index in names(node) else (ZERO, node)
    if any(key.count(index) > 1 for key in found):
        return None
    factor: Terms = {}
    for key, x in found.items():
        if index in key:
            factor[tuple(name for name in key if name != index)] = x
    return of_terms(factor), of_terms({key: x for key, x in found.items() if index not in key})


def size(node: Node, known: Mapping[str, Any]) -> Any:
    """The value of an expression of integers and sizes.

    Raises
    ------
    KeyError : a name is unknown.
    ArithmeticError : it is not an integer, or not a size.
    """
    if isinstance(node, Number):
        return node.value
    if isinstance(node, Name):
        return known[node.name]
    if not isinstance(node, Call):
        raise ArithmeticError("it is of data")
    if node.function == "where":
        condition, a, b = node.arguments
        return size(a if size(condition, known) else b, known)
    values = [size(argument, known) for argument in node.arguments]
    match node.function:
        case "+":
            return values[0] + values[1]
        case "-":
            return values[0] - values[1]
        case "*":
            return values[0] * values[1]
        case "neg":
            return -values[0]
        case "//" | "/":
            out = values[0] // values[1]
            if node.function == "/" and out * values[1] != values[0]:
                raise ArithmeticError(f"{values[0]} is not a multiple of {values[1]}")
            return out
        case "%":
            return values[0] % values[1]
        case "max":
            return max(values)
        case "min":
            return min(values)
        case "and":
            return bool(values[0] and values[1])
        case "or":
            return bool(values[0] or values[1])
        case "not":
            return not values[0]
        case "==":
            return values[0] == values[1]
        case "!=":
            return values[0] != values[1]
        case "<":
            return values[0] < values[1]
        case "<=":
            return values[0] <= values[1]
        case ">":
            return values[0] > values[1]
        case ">=":
            return values[0] >= values[1]
    raise ArithmeticError(f"{node.function} makes no size")

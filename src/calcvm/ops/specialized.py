"""The equation of one row of a program: what its words choose, and what it leaves out, put in."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from calcvm.equations.places import placed, size, terms
from calcvm.equations.tree import (
    ONE,
    ZERO,
    Call,
    Element,
    Equation,
    Index,
    Name,
    Node,
    Number,
    Reduction,
    arrays,
    bound,
    rewritten,
    substituted,
    walk,
)
from calcvm.ops.epilogues import ACTIVATIONS
from calcvm.ops.equation import RowEquation

MOST_AXES = 4  # of an equation in a listing


def specialized(
    equation: RowEquation, words: Mapping[str, Any], left_out: Collection[str], axes: int = MOST_AXES
) -> tuple[Equation, ...]:
    """Equations without ranges.

    Parameters
    ----------
    words : by name; sizes of the batch are no numbers.
    left_out : operands that are not there: what they count as is put in, equations that only say them are dropped.
    axes : where an equation has more, those of one element are left out.
    """
    numbers = {name: value for name, value in words.items() if isinstance(value, int)}
    flags = {k: Number(v) for k, v in words.items() if isinstance(v, (int, float)) and k not in equation.sizes}
    absent = {name: Number(value) for name, value in equation.left_out.items() if name in left_out}
    units = _units(equation, numbers, axes)

    def put_in(node: Node) -> Node:
        if isinstance(node, Element):
            if node.array in absent:
                return absent[node.array]
            kept = [p for p, n in zip(node.places, equation.axes[node.array]) if not units or _number(n, numbers) != 1]
            return Element(node.array, tuple(placed(_folded(p)) for p in kept), node.beyond)
        if isinstance(node, Name):
            return ZERO if node.name in units else absent.get(node.name, flags.get(node.name, node))
        if isinstance(node, Reduction):
            left = tuple(replace(i, extent=None) for i in node.indexes if i.name not in units)
            return replace(node, indexes=left) if left else node.body
        return _activated(node, words) if isinstance(node, Call) else node

    out: list[Equation] = []
    places: dict[str, Equation] = {}
    for e in equation.equations:
        value = rewritten(e.value, lambda node: _folded(_of_place(put_in(node), places)))
        kept = None if e.kept is None else tuple(Index(i.name) for i in e.kept if i.name not in units)
        made = replace(e, kept=kept, value=_of_numbers(value, numbers))
        if kept is not None and e.name not in equation.results and terms(value) is not None:
            places[e.name] = made
        out.append(made)
    return _wanted(out, equation, left_out)


def _of_place(node: Node, places: Mapping[str, Equation]) -> Node:
    """A place that an equation has named, as what it is."""
    if not isinstance(node, Element) or node.array not in places:
        return node
    of = places[node.array]
    return substituted(of.value, dict(zip([i.name for i in of.kept or ()], node.places)))


def _units(equation: RowEquation, numbers: Mapping[str, int], most: int) -> set[str]:
    """Indexes that run over one place, where an equation has many."""
    indexes = {i.name: i.extent for e in equation.equations for i in bound(e)}
    if len(indexes) <= most:
        return set()
    return {name for name, extent in indexes.items() if extent is not None and _number(extent, numbers) == 1}


def _number(node: Node, numbers: Mapping[str, int]) -> int | None:
    try:
        return size(node, numbers)
    except (KeyError, ArithmeticError):
        return None


def _of_numbers(node: Node, numbers: Mapping[str, int]) -> Node:
    """Places with their sizes as numbers, where they are more than an index."""
    by: dict[str, Node] = {name: Number(value) for name, value in numbers.items()}

    def rule(node: Node) -> Node:
        if not isinstance(node, Element):
            return node
        said = (p if isinstance(p, Name) else placed(_folded_all(p, by)) for p in node.places)
        return Element(node.array, tuple(said), node.beyond)

    return rewritten(node, rule)


def _folded_all(node: Node, by: Mapping[str, Node]) -> Node:
    return rewritten(node, lambda n: _folded(by.get(n.name, n) if isinstance(n, Name) else n))


def _activated(node: Call, words: Mapping[str, Any]) -> Node:
    """``act`` and ``dact`` by their names."""
    if node.function not in ("act", "dact"):
        return node
    name = ACTIVATIONS[words.get("act", 0)]
    if name == "none":
        return node.arguments[0] if node.function == "act" else ONE
    return Call(name if node.function == "act" else f"d{name}", node.arguments)


def _wanted(equations: list[Equation], row: RowEquation, left_out: Collection[str]) -> tuple[Equation, ...]:
    """Those that say what is there, or are read by those."""
    wanted, out = set(row.results) - set(left_out), []
    for e in reversed(equations):
        if e.name in wanted:
            wanted |= {*arrays(e.value)} | {n.name for n in walk(e.value) if isinstance(n, Name)}
            out.append(e)
    return tuple(reversed(out))


# ---------------------------------------------------------------- what is known
def _folded(node: Node) -> Node:
    """Without what is 0, 1 or decided."""
    if not isinstance(node, Call):
        return node
    first, *rest = node.arguments
    match node.function, [a.value if isinstance(a, Number) else None for a in node.arguments]:
        case "where", _ if (holds := _decided(first)) is not None:
            return rest[0] if holds else rest[1]
        case (("+" | "-"), [_, 0]):
            return first
        case "+", [0, _]:
            return rest[0]
        case "*", [1, _]:
            return rest[0]
        case (("*" | "/" | "^"), [_, 1]):
            return first
        case "*", ([0, _] | [_, 0]):
            return ZERO
    return node


def _decided(condition: Node) -> bool | None:
    """Whether a comparison of numbers holds; None: it is of more."""
    if not isinstance(condition, Call):
        return None
    match condition.function, [a.value if isinstance(a, Number) else None for a in condition.arguments]:
        case "==", [int() as a, int() as b]:
            return a == b
        case ("and" | "or") as joined, _:
            found = [_decided(a) for a in condition.arguments]
            if (joined == "or") in found:
                return joined == "or"
            return None if None in found else joined == "and"
    return None

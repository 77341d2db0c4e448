"""The equation of one row of a program, specialized to its words and to the operands that it leaves out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
    walk,
)
from calcvm.frozen import frozen
from calcvm.ops.epilogues import ACTIVATIONS
from calcvm.ops.equation import RowEquation

MOST_AXES = 3  # of an equation in a listing


@frozen
class Specialized:
    """equations : without ranges.  axes : by array, the remaining axes of its equation, in storage order."""

    equations: tuple[Equation, ...]
    axes: dict[str, tuple[int, ...]]


def specialized(
    equation: RowEquation,
    words: Mapping[str, Any],
    left_out: Collection[str],
    axes: int = MOST_AXES,
    orders: Mapping[str, tuple[int, ...]] | None = None,
) -> Specialized:
    """A row's equations with known values inserted.

    Parameters
    ----------
    words : by name; sizes that depend on the batch are not numbers.
    left_out : operands that are left out: their values are inserted, and equations that only define them are dropped.
    axes : if an equation has more, axes of one element are dropped, unless a place is beyond them.
    orders : of operands, the axes in storage order, if that differs (`RowSpec.lies`).
    """
    numbers = {name: value for name, value in words.items() if isinstance(value, int)}
    flags = {k: Number(v) for k, v in words.items() if isinstance(v, (int, float)) and k not in equation.sizes}
    absent = {name: Number(value) for name, value in equation.left_out.items() if name in left_out}
    units = _units(equation, numbers, axes)
    known: dict[str, Node] = {**flags, **absent, **dict.fromkeys(units, ZERO), **{u.upper(): ONE for u in units}}
    places: dict[str, Equation] = {}

    def put_in(node: Node) -> Node:
        if isinstance(node, Element):
            return absent.get(node.array) or _of_place(node, places)
        if isinstance(node, Name):
            return known.get(node.name, node)
        if isinstance(node, Reduction):
            left = tuple(Index(i.name) for i in node.indexes if i.name not in units)
            alone = ZERO if node.how in ("argmax", "argmin", "var") else node.body  # over one place
            return replace(node, indexes=left) if left else alone
        return _activated(node, words) if isinstance(node, Call) else node

    out: list[Equation] = []
    for e in equation.equations:
        value = _of_numbers(rewritten(e.value, lambda node: _folded(put_in(node), numbers)), numbers, equation.axes)
        out.append(replace(e, value=value))
        if e.kept is not None and e.name not in equation.results and terms(value) is not None:
            places[e.name] = replace(e, kept=tuple(i for i in e.kept if i.name not in units), value=value)
    out = _wanted(out, equation, left_out)
    left = _left(equation, out, numbers, bool(units), orders or {})
    return Specialized(tuple([_with_axes(e, left) for e in out]), left)


def _left(
    equation: RowEquation, out: Sequence[Equation], numbers: Mapping[str, int], drop: bool, orders: Mapping[str, Any]
) -> dict[str, tuple[int, ...]]:
    """The remaining axes of each array: those with several elements, or read at other places than 0."""
    read: dict[str, list[Element]] = {}
    for e in out:
        for node in walk(e.value):
            if isinstance(node, Element):
                read.setdefault(node.array, []).append(node)
    left = {}
    for name, extents in equation.axes.items():
        lie = orders.get(name, range(len(extents)))
        elsewhere = {k for n in read.get(name, ()) for k, place in enumerate(n.places) if place != ZERO}
        left[name] = tuple(k for k in lie if not drop or _number(extents[k], numbers) != 1 or k in elsewhere)
    return left


def _with_axes(e: Equation, left: Mapping[str, tuple[int, ...]]) -> Equation:
    """The equation over arrays with only these axes, in this order."""

    def rule(node: Node) -> Node:
        if not isinstance(node, Element):
            return node
        places = tuple(node.places[k] for k in left.get(node.array, range(len(node.places))))
        return Element(node.array, places, node.beyond) if places else Name(node.array)

    kept = e.kept
    if kept is not None:
        of = left.get(e.name, range(len(kept)))
        kept = tuple(Index(kept[k].name) for k in of)
    return replace(e, kept=kept, value=rewritten(e.value, rule))


def _of_place(node: Element, places: Mapping[str, Equation]) -> Node:
    """A place that is defined by an equation, replaced by its value."""
    of = places.get(node.array)
    if of is None or tuple(p for p in node.places if p != ZERO) != tuple(Name(i.name) for i in of.kept or ()):
        return node  # other places may be beyond the ends
    return of.value


def _units(equation: RowEquation, numbers: Mapping[str, int], most: int) -> set[str]:
    """Indexes that run over one place, if the equation has many."""
    indexes = {i.name: i.extent for e in equation.equations for i in bound(e)}
    if len(indexes) <= most:
        return set()
    return {name for name, extent in indexes.items() if extent is not None and _number(extent, numbers) == 1}


def _number(node: Node, numbers: Mapping[str, int]) -> int | None:
    try:
        return size(node, numbers)
    except (KeyError, ArithmeticError):
        return None


def _of_numbers(node: Node, numbers: Mapping[str, int], axes: Mapping[str, Sequence[Node]]) -> Node:
    """Places other than plain indexes with numbers for their sizes; elements beyond the ends become their values there."""
    by: dict[str, Node] = {name: Number(value) for name, value in numbers.items()}

    def rule(node: Node) -> Node:
        if not isinstance(node, Element):
            return node
        said = tuple(p if isinstance(p, Name) else placed(_folded_all(p, by)) for p in node.places)
        for place, extent in zip(said, axes.get(node.array, ())):
            n = _number(extent, numbers)
            if isinstance(place, Number) and n is not None and not 0 <= place.value < n:
                return Number(float(node.beyond))
        return Element(node.array, said, node.beyond)

    return rewritten(node, rule)


def _folded_all(node: Node, by: Mapping[str, Node]) -> Node:
    return rewritten(node, lambda n: _folded(by.get(n.name, n) if isinstance(n, Name) else n, {}))


def _activated(node: Call, words: Mapping[str, Any]) -> Node:
    """``act`` and ``dact`` replaced by the activation's names."""
    if node.function not in ("act", "dact"):
        return node
    name = ACTIVATIONS[words.get("act", 0)]
    if name == "none":
        return node.arguments[0] if node.function == "act" else ONE
    return Call(name if node.function == "act" else f"d{name}", node.arguments)


def _wanted(equations: Sequence[Equation], row: RowEquation, left_out: Collection[str]) -> list[Equation]:
    """The equations that define present results, or that these read."""
    wanted, out = set(row.results) - set(left_out), []
    for e in reversed(equations):
        if e.name in wanted:
            wanted |= {*arrays(e.value)} | {n.name for n in walk(e.value) if isinstance(n, Name)}
            out.append(e)
    return out[::-1]


# ---------------------------------------------------------------- constant folding
def _folded(node: Node, numbers: Mapping[str, int]) -> Node:
    """The node simplified by known zeros, ones and conditions."""
    if not isinstance(node, Call):
        return node
    first, *rest = node.arguments
    match node.function, [a.value if isinstance(a, Number) else None for a in node.arguments]:
        case "where", _ if (holds := _number(first, numbers)) is not None:
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
        case "/", [0, _] if isinstance(rest[0], Name):  # a size
            return ZERO
    return node

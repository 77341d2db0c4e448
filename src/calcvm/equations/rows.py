"""Equations over the words of a row: the range of every index, and the axes of every array."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from calcvm.equations.grammar import read, read_declarations, wrong
from calcvm.equations.tree import (
    Element,
    Equation,
    Index,
    Name,
    Node,
    Number,
    Reduction,
    arrays,
    bound,
    parts,
    rewritten,
    walk,
    with_parts,
)
from calcvm.errors import CalcError
from calcvm.frozen import frozen


@frozen
class Ranged:
    """equations : with all ranges.  axes : of arrays, extents over the words.  left_out : values of operands that are left out."""

    equations: tuple[Equation, ...]
    axes: dict[str, tuple[Node, ...]]
    left_out: dict[str, int | float]


def read_ranged(text: str, declares: str, operands: Collection[str]) -> Ranged:
    """Equations in which each index has one range, stated once.

    Parameters
    ----------
    declares : axes of operands that are read at other places than indexes, and the values of operands that are left out.

    Raises
    ------
    CalcError : the text does not parse; an index has no range, or two; the axes of an operand are unknown.
    """
    operands = {*operands}
    equations, given = read(text, operands), read_declarations(declares, operands)
    extents = _extents(given, equations)
    said = tuple(
        replace(
            e,
            kept=None if e.kept is None else _said(e.kept, extents),
            value=rewritten(e.value, lambda n: _with(n, extents)),
        )
        for e in equations
    )
    axes = {e.name: tuple(extents[i.name] for i in e.kept) for e in (*given, *equations) if e.kept is not None}
    for equation in equations:
        for node in walk(equation.value):
            if isinstance(node, Name) and node.name in operands and equation.kept is not None:
                axes.setdefault(node.name, ())  # a number
            if isinstance(node, Element) and node.array not in axes:
                plain = [place.name for place in node.places if isinstance(place, Name)]
                if len(plain) == len(node.places) and all(name in extents for name in plain):
                    axes[node.array] = tuple(extents[name] for name in plain)
    if unknown := [array for e in equations for array in arrays(e.value) if array not in axes]:
        raise CalcError(f"the axes of {unknown[0]} are unknown: give them in declares=")
    return Ranged(said, axes, {e.name: e.value.value for e in given if isinstance(e.value, Number)})


def said_once(equations: Iterable[Equation], extents: Mapping[str, Node]) -> list[Equation]:
    """Equations with each index's range at its first occurrence, in the form that rows use."""
    met: set[str] = set()

    def of(indexes: Iterable[Index]) -> tuple[Index, ...]:
        new = tuple(Index(i.name, None if i.name in met else extents[i.name]) for i in indexes)
        met.update(i.name for i in new)
        return new

    def go(node: Node) -> Node:
        if isinstance(node, Reduction):
            return Reduction(node.how, of(node.indexes), go(node.body))
        return with_parts(node, tuple(map(go, parts(node)))) if parts(node) else node

    return [Equation(e.name, of(e.kept or ()), go(e.value)) for e in equations]


def _extents(given: tuple[Equation, ...], equations: tuple[Equation, ...]) -> dict[str, Node]:
    """The range of each index, which is stated once."""
    extents: dict[str, Node] = {}
    indexes = [(i, e) for e in (*equations, *given) for i in bound(e)]
    for index, equation in indexes:
        if index.extent is not None and extents.setdefault(index.name, index.extent) != index.extent:
            raise wrong(equation.text, index.at, f"the index {index.name} already has another range")
    for index, equation in indexes:
        if index.name not in extents:
            raise wrong(
                equation.text, index.at, f"the index {index.name} has no range: say it, as in {index.name}<rows"
            )
    return extents


def _said(indexes: tuple[Index, ...], extents: Mapping[str, Node]) -> tuple[Index, ...]:
    return tuple(replace(i, extent=extents[i.name]) for i in indexes)


def _with(node: Node, extents: Mapping[str, Node]) -> Node:
    return replace(node, indexes=_said(node.indexes, extents)) if isinstance(node, Reduction) else node

"""Equations over the words of a row: the range of every index, and the axes of every array."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
    rewritten,
    walk,
)
from calcvm.errors import CalcError
from calcvm.record import record


@record
class Ranged:
    """equations : with every range said.  axes : of arrays, extents over the words.  left_out : what counts for one that is."""

    equations: tuple[Equation, ...]
    axes: dict[str, tuple[Node, ...]]
    left_out: dict[str, int | float]


def read_ranged(text: str, declares: str, operands: Collection[str]) -> Ranged:
    """Equations whose every index has one range, said once.

    Parameters
    ----------
    declares : axes of operands that are read at other places than indexes, and what counts for one that is left out.

    Raises
    ------
    CalcError : the text does not parse; an index has no range, or two; the axes of an operand follow from nothing.
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
        raise CalcError(f"the axes of {unknown[0]} follow from no place: say them in declares=")
    return Ranged(said, axes, {e.name: e.value.value for e in given if isinstance(e.value, Number)})


def _extents(given: tuple[Equation, ...], equations: tuple[Equation, ...]) -> dict[str, Node]:
    """Of each index, its range, which is said once."""
    extents: dict[str, Node] = {}
    indexes = [(i, e) for e in (*equations, *given) for i in bound(e)]
    for index, equation in indexes:
        if index.extent is not None and extents.setdefault(index.name, index.extent) != index.extent:
            raise wrong(equation.text, index.at, f"the index {index.name} has another range before")
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

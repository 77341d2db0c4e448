"""The equation of a row, read: its text over the row's words, and what each operand is in it.

Every index has one range, said once, where it is met first: ``sum[m<rows*inner] x[m,k]*dy[m,n]``.  An operand has the axes of
its places; what is read at other places than indexes has its axes in the row's ``declares``, which also says what an operand counts
as where it is left out: ``x[n,i<I,c]; scale[c] = 1``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from calcvm.equations.check import CONDITION, INTEGER, NUMBER, check
from calcvm.equations.functions import ARGUMENTS
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
from calcvm.formulas.optimizers import HYPER_SLOTS
from calcvm.record import record

if TYPE_CHECKING:
    from calcvm.ops.spec import RowSpec

KINDS = {"bool": CONDITION} | dict.fromkeys(("int64", "int32", "uint8", "int8", "index"), INTEGER)
FUNCTIONS = {
    **ARGUMENTS,
    "act": 1,  # an activation that words choose
    "dact": 1,  # its derivative, of its result
    "float32": 1,  # the nearest one, where a row rounds so in heaps of any type
}


@record
class RowEquation:
    """A row's equation, checked.

    equations : with every range said.  axes : of operands, extents over the words.  left_out : what an operand counts as then.
    results : operands that are set.  sizes : words that are sizes.
    """

    equations: tuple[Equation, ...]
    axes: dict[str, tuple[Node, ...]]
    left_out: dict[str, int | float]
    results: tuple[str, ...]
    sizes: frozenset[str]


def read_row(spec: RowSpec) -> RowEquation:
    """A row's equation, checked.

    Raises
    ------
    CalcError : it does not parse, or is not about the row's operands and words.
    """
    operands = {o.name for o in spec.operands}
    equations, given = read(spec.synopsis, operands), read_declarations(spec.declares, operands)
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
        raise CalcError(f"row {spec.name!r}: the axes of {unknown[0]} follow from no place: say them in declares=")
    _check(spec, said)
    left_out = {e.name: e.value.value for e in given if isinstance(e.value, Number)}
    results = tuple(o.name for o in spec.writes)
    return RowEquation(said, axes, left_out, results, frozenset(w.name for w in spec.words if w.kind == "dim"))


@cache
def equation_of(spec: RowSpec) -> RowEquation | None:
    """A row's equation; None: it has none, or is a user's own, whose synopsis may be any text."""
    try:
        return None if spec.no_equation else read_row(spec)
    except CalcError:
        return None


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


def hyper_slots(spec: RowSpec) -> tuple[str, ...]:
    """Names that stand for elements of its operand ``hyper``: slots of hyperparameters."""
    return HYPER_SLOTS if any(o.name == "hyper" for o in spec.operands) else ()


def _check(spec: RowSpec, equations: tuple[Equation, ...]) -> None:
    words = {w.name: NUMBER if w.kind == "float" else INTEGER for w in spec.words} | dict.fromkeys(
        hyper_slots(spec), NUMBER
    )
    operands = {o.name: KINDS.get(o.type, NUMBER) for o in spec.operands if o.reads and o.access != "s"}
    check(equations, operands, words, FUNCTIONS)
    made = {e.name for e in equations}
    for operand in spec.operands:
        if operand.writes and operand.access != "s" and operand.name not in made:
            raise CalcError(f"row {spec.name!r}: no equation says what {operand.name} is")

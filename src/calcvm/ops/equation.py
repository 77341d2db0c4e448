"""The parsed equation of a row: its text over the row's words, and the role of each operand.

Every index has one range, stated at its first occurrence: ``sum[m<rows*inner] x[m,k]*dy[m,n]``.  An operand has the axes of its
places.  For an operand read at other places than indexes, the row's ``declares`` gives the axes; it also gives the values of
operands that are left out: ``x[n,i<I,c]; scale[c] = 1``.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from calcvm.equations.check import check
from calcvm.equations.functions import ARGUMENTS
from calcvm.equations.kinds import INTEGER, NUMBER, WITH_INDEXES
from calcvm.equations.rows import read_ranged
from calcvm.equations.tree import Equation, Node
from calcvm.errors import CalcError
from calcvm.formulas.optimizers import HYPER_SLOTS
from calcvm.frozen import frozen

if TYPE_CHECKING:
    from calcvm.ops.spec import RowSpec

FUNCTIONS = {
    **ARGUMENTS,
    "act": 1,  # an activation that words choose
    "dact": 1,  # its derivative, from its result
    "float32": 1,  # rounding to float32, as the row does in heaps of any type
}


@frozen
class RowEquation:
    """A row's equation, checked.

    equations : with all ranges.  axes : of operands, extents over the words.  left_out : values of operands that are left out.
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
    CalcError : it does not parse, or does not match the row's operands and words.
    """
    try:
        found = read_ranged(spec.synopsis, spec.declares, [o.name for o in spec.operands])
    except CalcError as error:
        raise type(error)(f"row {spec.name!r}: {error}") from None
    _check(spec, found.equations)
    results = tuple(o.name for o in spec.writes)
    sizes = frozenset(w.name for w in spec.words if w.kind == "dim")
    return RowEquation(found.equations, found.axes, found.left_out, results, sizes)


@cache
def equation_of(spec: RowSpec) -> RowEquation | None:
    """A row's equation; None if it has none, or is a user's row, whose synopsis may be any text."""
    try:
        return None if spec.no_equation else read_row(spec)
    except CalcError:
        return None


def hyper_slots(spec: RowSpec) -> tuple[str, ...]:
    """Names that stand for elements of its operand ``hyper``: slots of hyperparameters."""
    return HYPER_SLOTS if any(o.name == "hyper" for o in spec.operands) else ()


def _check(spec: RowSpec, equations: tuple[Equation, ...]) -> None:
    words = {w.name: NUMBER if w.kind == "float" else INTEGER for w in spec.words} | dict.fromkeys(
        hyper_slots(spec), NUMBER
    )
    operands = {o.name: WITH_INDEXES.get(o.type, NUMBER) for o in spec.operands if o.reads and o.access != "s"}
    check(equations, operands, words, FUNCTIONS)
    made = {e.name for e in equations}
    for operand in spec.operands:
        if operand.writes and operand.access != "s" and operand.name not in made:
            raise CalcError(f"row {spec.name!r}: no equation gives {operand.name} a value")

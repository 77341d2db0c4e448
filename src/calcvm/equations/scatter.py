"""Sums that are scatters: ``dw[j,c] = sum[r] where(j == index[r], dy[r,c], 0)`` adds each ``dy[r,c]`` to one place of ``dw``."""

from __future__ import annotations

from calcvm.equations.simplify import conditions, conjunction, zero_where
from calcvm.equations.tree import Call, Equation, Index, Name, Node, Reduction, names
from calcvm.record import record


@record
class Scatter:
    """``result[.., place, ..] += value`` for all places of the other indexes.

    places : of indexes of the result, where it is added.  over : indexes that are summed.  guard : where it is added, or None.
    """

    places: dict[str, Node]
    over: tuple[Index, ...]
    value: Node
    guard: Node | None = None


def scatter(equation: Equation) -> Scatter | None:
    """What an equation adds where, if each number that it adds goes to one place: nothing else is read for the others."""
    kept = [i.name for i in equation.kept or ()]
    node = equation.value
    if not isinstance(node, Reduction) or node.how != "sum":
        return None
    found = zero_where(node.body)
    if found is None or not found[2]:
        return None
    condition, value, _ = found
    summed = {i.name for i in node.indexes}
    places: dict[str, Node] = {}
    left = []
    for test in conditions(condition):
        index, place = _equal(test, kept, summed)
        if place is None or index in places:
            left.append(test)
        else:
            places[index] = place
    guard = conjunction(left) if left else None
    read = names(value) | (names(guard) if guard else set())
    if not places or {*places} & (read | set().union(*map(names, places.values()))):
        return None
    return Scatter(places, node.indexes, value, guard)


def _equal(test: Node, kept: list[str], summed: set[str]) -> tuple[str, Node | None]:
    """(a kept index, the place of summed indexes that it is equal to)."""
    if isinstance(test, Call) and test.function == "==":
        for a, b in (test.arguments, test.arguments[::-1]):
            if isinstance(a, Name) and a.name in kept and names(b) & summed:
                return a.name, b
    return "", None

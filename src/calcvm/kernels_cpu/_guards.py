"""Bounds of a reduction's terms: integers that are negative where a term is neutral.

A window that reaches beyond the ends adds zeros to a sum, and -inf to a maximum.  Its loops skip these terms without testing each:
an integer that is linear in a loop's index says where the terms begin and end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from calcvm.equations.places import linear
from calcvm.equations.plain import Stage
from calcvm.equations.scatter import vanishing
from calcvm.equations.tree import ONE, ZERO, Call, Element, Name, Node, Number, call, names, walk

Key = Callable[[Node], str]
FAR = Number(2.0**62)  # beyond any index


class Limit(NamedTuple):
    """``factor*(index - (end + more)) >= 0``; the end is a float with an integer value."""

    index: str
    factor: int
    end: Node
    more: int


class Guard(NamedTuple):
    """An integer that is below 0 where a term is neutral.

    mark : the fact that holds where no guard with this mark is below 0.  limit : the bound as a `Limit`, if it is not an integer.
    """

    value: Node
    mark: tuple[str, ...] = ()
    limit: Limit | None = None


def guards(stage: Stage, axes: Mapping[str, tuple[Node, ...]], key: Key) -> list[Guard]:
    """All guards of a reduction; ``axes`` : of arrays in memory."""
    if stage.how == "sum":
        return [*_zero(stage.value, axes, key)]
    if stage.how in ("max", "argmax", "min", "argmin"):
        none = float("-inf") if "max" in stage.how else float("inf")
        return [*_least(stage.value, none, axes, key)]
    return []


def _zero(node: Node, axes: Mapping[str, tuple[Node, ...]], key: Key) -> Iterator[Guard]:
    """The guards of a value that may be 0."""
    for part in vanishing(node):
        if not isinstance(part, Element):
            yield from _holds(part, key)
        elif part.beyond == 0 and part.array in axes:
            yield from _within(part, axes[part.array], key)


def _least(node: Node, none: float, axes: Mapping[str, tuple[Node, ...]], key: Key) -> Iterator[Guard]:
    if isinstance(node, Element) and node.beyond == none and node.array in axes:
        yield from _within(node, axes[node.array], key)
    if isinstance(node, Call) and node.function == "where" and node.arguments[2] == Number(none):
        yield from _holds(node.arguments[0], key)
        yield from _least(node.arguments[1], none, axes, key)


def _within(node: Element, axes: tuple[Node, ...], key: Key) -> Iterator[Guard]:
    """The guards of an element's places: inside the array."""
    for place, extent in zip(node.places, axes):
        if isinstance(place, Name) or any(isinstance(n, Element) for n in walk(place)):
            continue
        if isinstance(place, Call) and place.function == "/":  # the divisor must be positive
            above, below = place.arguments
            if isinstance(below, Number) and below.value > 0:
                yield Guard(above)
                yield Guard(call("-", call("-", call("*", extent, below), ONE), above))
            continue
        mark = (key(place), key(extent))
        yield Guard(place, mark)
        yield Guard(call("-", call("-", extent, ONE), place), mark)


def _holds(node: Node, key: Key) -> Iterator[Guard]:
    """The guards of a condition, as far as it compares integers."""
    if not isinstance(node, Call):
        return
    if node.function == "and":
        for argument in node.arguments:
            yield from _holds(argument, key)
    elif node.function in ("<", "<=", ">", ">="):
        less, more = node.arguments if node.function[0] == "<" else reversed(node.arguments)
        gap = call("-", more, less)
        if any(isinstance(n, Element) for n in walk(gap)):
            return
        strict = "=" not in node.function
        yield Guard(call("-", gap, ONE) if strict else gap, (key(node),), _limit(less, more, strict))


def _limit(less: Node, more: Node, strict: bool) -> Limit | None:
    """The limit of an index that is compared with any number."""
    for index, other, factor in ((more, less, 1), (less, more, -1)):
        if isinstance(index, Name) and index.name not in names(other):
            end = call(
                "floor" if strict == (factor > 0) else "ceil", call("max", call("min", other, FAR), call("neg", FAR))
            )
            return Limit(index.name, factor, end, factor if strict else 0)
    return None


def along(found: list[Guard], index: str, later: frozenset[str]) -> list[tuple[Guard, Node, Node]]:
    """The guards that are linear in an index and free of later ones, each with its factor and its rest (a limit has its end)."""
    out: list[tuple[Guard, Node, Node]] = []
    for guard in found:
        limit = guard.limit
        if limit is not None:
            if limit.index == index and not names(limit.end) & later:
                out.append((guard._replace(mark=()), Number(limit.factor), limit.end))
            continue
        free = names(guard.value)
        parts = linear(guard.value, index) if index in free and not free & later else None
        if parts is not None and parts[0] != ZERO:
            out.append((guard, *parts))
    return out

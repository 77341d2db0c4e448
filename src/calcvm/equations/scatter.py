"""Sums that are scatters: ``dw[j,c] = sum[r] where(j == index[r], dy[r,c], 0)`` adds each ``dy[r,c]`` to one place of ``dw``.

So does ``dx[i] = sum[t] dy[(i + p - t)/s]``: the element at ``o`` goes to ``i = o*s + t - p``, without testing divisibility.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field

from calcvm.equations.places import linear, terms
from calcvm.equations.simplify import conditions, conjunction, zero_where
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
    call,
    names,
    rewritten,
    walk,
)
from calcvm.frozen import frozen

ODD = (
    "neg",
    "abs",
    "sqrt",
    "stop",
    "sin",
    "tan",
    "asin",
    "atan",
    "sinh",
    "tanh",
    "expm1",
    "erf",
    "sign",
)  # functions that are 0 at 0


@frozen
class Scatter:
    """``result[.., place, ..] += value`` for all places of the other indexes.

    places : by index of the result, the place of the addition.  over : summed indexes.  guard : the condition of the addition, or None.
    bands : indexes of the result that run over a band, whose bounds depend on these names.
    """

    places: dict[str, Node]
    over: tuple[Index, ...]
    value: Node
    guard: Node | None = None
    bands: Mapping[str, frozenset[str]] = field(default_factory=dict)


def scatter(equation: Equation) -> Scatter | None:
    """The scatter of an equation, if each of its terms goes to one place and does not depend on that place."""
    node = equation.value
    if not isinstance(node, Reduction) or node.how != "sum":
        return None
    found = at_places(equation.kept or (), node.indexes, node.body)
    read = names(found.value) | (names(found.guard) if found.guard else set()) if found else set()
    return None if found is None or {*found.places} & read else found


def at_places(kept: Sequence[Index], over: tuple[Index, ...], value: Node) -> Scatter | None:
    """The scatter of a sum's value, which may depend on the place, as may the guard."""
    found = zero_where(value)
    if found is None or not found[2]:
        return None
    condition, value, _ = found
    own, summed = [i.name for i in kept], {i.name for i in over}
    places: dict[str, Node] = {}
    left = []
    for test in conditions(condition):
        index, place = _equal(test, own, summed)
        if place is None or index in places:
            left.append(test)
        else:
            places[index] = place
    if not places or {*places} & set().union(*map(names, places.values())):
        return None
    return Scatter(places, over, value, conjunction(left) if left else None)


def _equal(test: Node, kept: list[str], summed: set[str]) -> tuple[str, Node | None]:
    """(a kept index, the place of summed indexes that it equals)."""
    if isinstance(test, Call) and test.function == "==":
        for a, b in (test.arguments, test.arguments[::-1]):
            if isinstance(a, Name) and a.name in kept and names(b) & summed:
                return a.name, b
    return "", None


def scatter_of(
    kept: Sequence[Index], over: tuple[Index, ...], value: Node, axes: Mapping[str, Sequence[Node]]
) -> Scatter | None:
    """The scatter of a sum: to places from data, by quotients, or in bands.  axes : of arrays in memory."""
    return at_places(kept, over, value) or at_multiples(kept, over, value, axes) or in_bands(kept, over, value)


def in_bands(kept: Sequence[Index], over: tuple[Index, ...], value: Node) -> Scatter | None:
    """The scatter of a sum with ``f(e) < d and d < g(e)``, if these cannot be solved for e."""
    found, summed = zero_where(value), {i.name for i in over}
    if found is None or not found[2]:
        return None
    ends: dict[tuple[str, bool], Node] = {}
    for test in conditions(found[0]):
        if isinstance(test, Call) and test.function in ("<", "<=", ">", ">="):
            less, more = test.arguments if test.function[0] == "<" else reversed(test.arguments)
            for index, end, below in ((more, less, True), (less, more, False)):
                if (
                    isinstance(index, Name)
                    and names(end) & summed
                    and not any(isinstance(n, Element) for n in walk(end))
                ):
                    ends[index.name, below] = end
    bands = {}
    for i in kept:
        two = [ends[key] for key in ((i.name, True), (i.name, False)) if key in ends]
        if len(two) == 2 and all(terms(end) is None for end in two):
            bands[i.name] = frozenset().union(*map(names, two))
    if not bands or {*bands} & frozenset().union(*bands.values()):
        return None
    return Scatter({}, over, found[1], found[0], bands)


# ---------------------------------------------------------------- quotients
def at_multiples(
    kept: Sequence[Index], over: tuple[Index, ...], value: Node, axes: Mapping[str, Sequence[Node]]
) -> Scatter | None:
    """The scatter of a sum, derived from its quotients."""
    found = zero_where(value)
    tests, inner = (conditions(found[0]), found[1]) if found and found[2] else ([], value)
    known = {i.name for i in (*kept, *over)}
    places: dict[str, Node] = {}
    new: list[Index] = []
    for above, below, extent in _quotients(value, axes, tests):
        for i in kept:
            parts = linear(above, i.name) if not names(below) & known and i.name not in places else None
            if parts is None or parts[0] not in (ONE, Number(-1)) or names(parts[1]) & {*places}:
                continue
            index = Index(_unused(f"{i.name}_at", known | names(value)), extent)
            at, exact = Name(index.name), call("==", call("%", above, below), ZERO)
            known.add(index.name)
            new.append(index)
            place = call("-", call("*", at, below), parts[1])
            places[i.name] = place if parts[0] == ONE else call("neg", place)
            true = {exact, call("<=", ZERO, call("//", above, below)), call("<", call("//", above, below), extent)}
            tests = [_put(test, above, below, at) for test in tests if test not in true]
            inner = _put(inner, above, below, at)
            break
    said = set().union(*map(names, places.values())) if places else set()
    if not places or {*places} & said:
        return None
    return Scatter(places, (*new, *over), inner, conjunction(tests) if tests else None)


def _quotients(
    value: Node, axes: Mapping[str, Sequence[Node]], tests: Sequence[Node]
) -> dict[tuple[Node, Node, Node], None]:
    """(numerator, denominator, extent) of quotients; nothing is added if one is inexact or outside its extent."""
    found: dict[tuple[Node, Node, Node], None] = {}
    for node in vanishing(value):
        if isinstance(node, Element) and node.beyond == 0:
            for place, extent in zip(node.places, axes.get(node.array, ())):
                if isinstance(place, Call) and place.function == "/":
                    found[place.arguments[0], place.arguments[1], extent] = None
    for test in tests:
        quotient, extent = test.arguments if isinstance(test, Call) and test.function == "<" else (ZERO, ZERO)
        if isinstance(quotient, Call):
            exact = call("==", call("%", *quotient.arguments), ZERO)
            if quotient.function == "//" and {exact, call("<=", ZERO, quotient)} <= {*tests}:
                found[quotient.arguments[0], quotient.arguments[1], extent] = None
    return found


def _put(node: Node, above: Node, below: Node, at: Node) -> Node:
    """The node with a quotient replaced by ``at``."""
    by = {call("/", above, below), call("//", above, below)}
    return rewritten(node, lambda n: at if n in by else n)


def _unused(name: str, known: set[str]) -> str:
    while name in known:
        name += "_"
    return name


def vanishing(node: Node) -> Iterator[Node]:
    """Elements and conditions that make a value 0 if they are 0; their other factors are assumed finite."""
    if isinstance(node, Element):
        yield node
    if not isinstance(node, Call):
        return
    if node.function == "*":
        for argument in node.arguments:
            yield from vanishing(argument)
    elif node.function == "/" or node.function in ODD:
        yield from vanishing(node.arguments[0])
    elif node.function == "^" and isinstance(node.arguments[1], Number) and node.arguments[1].value > 0:
        yield from vanishing(node.arguments[0])
    elif node.function == "where" and node.arguments[2] == ZERO:
        yield node.arguments[0]
        yield from vanishing(node.arguments[1])

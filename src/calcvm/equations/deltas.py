"""Places solved for an index: if ``j`` is ``o*s - p + t``, then ``o`` is ``(j + p - t)/s``."""

from __future__ import annotations

import math
from typing import Any

from calcvm.equations.places import Terms, of_terms, terms
from calcvm.equations.scope import Scope, extent, typical
from calcvm.equations.simplify import factors, finite, zero_where
from calcvm.equations.text import show
from calcvm.equations.tree import ONE, ZERO, Call, Element, Name, Node, Number, call, names, parts, with_parts

Fraction = tuple[Terms, Terms]  # numerator and denominator
WHOLE: Terms = {(): 1}
Atoms = dict[str, Node]


# ---------------------------------------------------------------- fractions
def fraction(node: Node, atoms: Atoms) -> Fraction:
    """A place as a fraction of sums of products of names; any other part, such as data, becomes an atom, ``@..``."""
    if isinstance(node, Call) and node.function in ("+", "-", "*", "/", "neg"):
        (a, b), *rest = [fraction(argument, atoms) for argument in node.arguments]
        if node.function == "neg":
            return _scaled(a, -1), b
        ((c, d),) = rest
        if node.function == "*":
            return _lowest(_times(a, c), _times(b, d))
        if node.function == "/":
            return _lowest(_times(a, d), _times(b, c))
        if b == d:
            return _lowest(_sum(a, c, 1 if node.function == "+" else -1), b)
        return _lowest(_sum(_times(a, d), _times(c, b), 1 if node.function == "+" else -1), _times(b, d))
    found = terms(node)
    if found is not None:
        return found, WHOLE
    name = f"@{show(node)}"
    atoms[name] = node
    return {(name,): 1}, WHOLE


def _times(a: Terms, b: Terms) -> Terms:
    found = terms(call("*", of_terms(a), of_terms(b)))
    assert found is not None
    return found


def _sum(a: Terms, b: Terms, sign: int) -> Terms:
    found = dict(a)
    for key, x in b.items():
        found[key] = found.get(key, 0) + sign * x
    return {key: x for key, x in found.items() if x}


def _scaled(a: Terms, by: int) -> Terms:
    return {key: x * by for key, x in a.items()}


def _lowest(above: Terms, below: Terms) -> Fraction:
    """The fraction reduced by a common factor; this changes neither its value nor whether it is an integer."""
    if below == WHOLE or len(below) != 1:
        return above, below
    ((key, n),) = below.items()
    common = math.gcd(n, *above.values()) * (-1 if n < 0 else 1)
    above, n = {k: x // common for k, x in above.items()}, n // common
    for name in key:
        if above and all(name in k for k in above):
            above = {_without(k, name): x for k, x in above.items()}
            key = _without(key, name)
    return above, {key: n}


def _without(key: tuple[str, ...], name: str) -> tuple[str, ...]:
    k = key.index(name)
    return key[:k] + key[k + 1 :]


def written(found: Fraction, atoms: Atoms, sign: str = "/") -> Node:
    above, below = (_back(of_terms(part), atoms) for part in found)
    return above if below == ONE else call(sign, above, below)


def _back(node: Node, atoms: Atoms) -> Node:
    if isinstance(node, Name):
        return atoms.get(node.name, node)
    below = parts(node)
    return with_parts(node, tuple(_back(part, atoms) for part in below)) if below else node


def settled(node: Node, index: str, value: Node) -> Node:
    """The node with a value in place of an index.  In places, quotients stay quotients: inexact ones are beyond the ends."""
    if isinstance(node, Name):
        return _floored(value) if node.name == index else node
    if isinstance(node, Element):
        return with_parts(node, tuple(_settled_place(place, index, value) for place in node.places))
    below = parts(node)
    return with_parts(node, tuple(settled(part, index, value) for part in below)) if below else node


def _floored(value: Node) -> Node:
    return call("//", *value.arguments) if isinstance(value, Call) and value.function == "/" else value


def _settled_place(node: Node, index: str, value: Node) -> Node:
    if index not in names(node):
        return node
    atoms: Atoms = {}
    found = fraction(_put(node, index, value), atoms)
    return written(found, atoms)


def _put(node: Node, index: str, value: Node) -> Node:
    """As `settled`, but quotients stay quotients in sums and products."""
    if isinstance(node, Name):
        return value if node.name == index else node
    if isinstance(node, Call) and node.function in ("+", "-", "*", "/", "neg"):
        return with_parts(node, tuple(_put(argument, index, value) for argument in node.arguments))
    return settled(node, index, value)


# ---------------------------------------------------------------- solving
def solved(
    scope: Scope, free: list[str], equal: list[tuple[Node, Node]], value: Node
) -> tuple[list[str], Node, list[Node]]:
    """The sum of a value over ``free`` indexes where places are equal: the indexes left, the value, and the conditions.

    Each pair is solved for its index with the largest range.  A condition is dropped if the value is 0 anyway where it fails.
    """
    free, todo = list(free), sorted(equal, key=lambda pair: not isinstance(pair[1], Name))
    guards: list[Node] = []
    bounds: list[tuple[Node, Any, str]] = []
    while todo:
        a, b = todo.pop(0)
        atoms: Atoms = {}
        above, _ = fraction(call("-", a, b), atoms)
        best = _best(scope, free, above, atoms)
        if best is None:
            guards.append(_equality(a, b))
            continue
        at, index = best
        n = scope.extents[index]
        if not (isinstance(at, Name) and scope.extents.get(at.name) == n):
            bounds.append((at, n, index))
        free.remove(index)
        value = settled(value, index, at)
        todo = [(_settled_place(a, index, at), _settled_place(b, index, at)) for a, b in todo]
        guards = [settled(guard, index, at) for guard in guards]
        bounds = [(at, n, i) if at is known else (_settled_place(known, index, at), n, i) for known, n, i in bounds]
    for at, n, index in bounds:
        if not _says_so(scope, value, at, n):
            guards += _within(scope, at, index)
    return free, value, guards


def _best(scope: Scope, free: list[str], above: Terms, atoms: Atoms) -> tuple[Node, str] | None:
    """(value, index): the solution of ``above = 0`` for the best index."""
    hidden = {name for key in above for k in key if k in atoms for name in names(atoms[k])}
    found = []
    if not all(scope.whole(atoms.get(name, Name(name))) for key in above for name in key):
        return None
    for index in free:
        if index in hidden or any(key.count(index) > 1 for key in above):
            continue
        factor = {_without(key, index): x for key, x in above.items() if index in key}
        if not factor or any(name in scope.extents or name in atoms for key in factor for name in key):
            continue
        c = scope.size(of_terms(factor))
        if not isinstance(c, int) or c == 0:
            continue
        rest = {key: x for key, x in above.items() if index not in key}
        sign = -1 if c > 0 else 1
        at = written(_lowest(_scaled(rest, sign), _scaled(factor, -sign)), atoms)
        found.append((typical(scope.extents[index]), abs(c) == 1, at, index))
    if not found:
        return None
    *_, at, index = max(found, key=lambda one: one[:2])
    return at, index


def _equality(a: Node, b: Node) -> Node:
    if isinstance(b, Call) and b.function == "/":
        atoms: Atoms = {}
        return call("==", written(fraction(call("*", a, b.arguments[1]), atoms), atoms), b.arguments[0])
    return call("==", a, b)


def _says_so(scope: Scope, value: Node, at: Node, n: Any) -> bool:
    """Whether the value is 0 if the place is outside 0 to n - 1: one factor is an element there, and the others are finite."""
    while (found := zero_where(value)) is not None:
        value = found[1]
    _, above, below = factors(value)
    sizes = all(isinstance(d, Number) or scope.size(d) is not None for d in below)
    if not sizes or not all(map(finite, above)):
        return False
    return any(
        place == at and _at_most(size, n)
        for factor in above
        if isinstance(factor, Element) and factor.beyond == 0
        for place, size in zip(factor.places, scope.shapes[factor.array])
    )


def _at_most(a: Any, b: Any) -> bool:
    return a == b or isinstance(a, int) and isinstance(b, int) and a < b


def _within(scope: Scope, at: Node, index: str) -> list[Node]:
    """Conditions that a place is an integer from 0 to below the index's extent, without those that always hold."""
    atoms: Atoms = {}
    above, below = fraction(at, atoms)
    most, _ = fraction(call("*", extent(index), of_terms(below)), {})
    up, down = written((above, WHOLE), atoms), of_terms(below)
    out: list[Node] = []
    if below != WHOLE:
        out.append(call("==", call("%", up, down), ZERO))
    if not _never_negative(scope, above):
        out.append(call("<=", ZERO, up))
    if not _never_negative(scope, _sum(_sum(most, above, -1), WHOLE, -1)):
        limit = scope.size(of_terms(most))
        out.append(call("<", up, Number(limit) if isinstance(limit, int) else of_terms(most)))
    return out


def _never_negative(scope: Scope, found: Terms) -> bool:
    """Whether a sum of indexes and sizes is at least 0 for all values of the indexes."""
    least: Any = 0
    for key, x in found.items():
        own = [name for name in key if name in scope.extents]
        if len(own) > 1:
            return False
        times = scope.size(of_terms({tuple(name for name in key if name not in own): x}))
        if times is None:
            return False
        if not own:
            least = least + times
        elif (sign := _sign(times)) is None or sign < 0 and not isinstance(times, int):
            return False
        elif sign < 0:
            least = least + times * (scope.extents[own[0]] - 1)
    sign = _sign(least)
    return sign is not None and sign >= 0


def _sign(n: Any) -> int | None:
    """The sign of a size for every batch from 1 up; None if it depends on the batch."""
    if isinstance(n, int):
        return (n > 0) - (n < 0)
    low, slope = n.at(1), n.a
    if low >= 0 and slope >= 0:
        return 1 if low > 0 else 0
    return -1 if low < 0 and slope <= 0 else None

"""The cost of equations: operations, and array elements read and written.  It selects the cheapest of equal forms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from calcvm.equations.ranges import Ranges, Sizes
from calcvm.equations.scatter import scatter
from calcvm.equations.scope import Scope, typical
from calcvm.equations.tree import Call, Element, Equation, Index, Name, Node, Reduction, names, parts
from calcvm.frozen import frozen

TOUCH = 4  # operations that take as long as reading or writing an element


@frozen
class Cost:
    """operations : on numbers, not on places.  touched : elements read or written; an equation counts each array once.

    large : how many arrays with at least half as many elements as the largest are touched, summed over equations.
    """

    operations: int
    touched: int
    large: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.operations + other.operations, self.touched + other.touched, self.large + other.large)


def cost(equations: Sequence[Equation], found: Ranges) -> Cost:
    """The cost of equations with known ranges.  Sizes that depend on the batch count as for a typical batch."""
    most = max([_volume(shape) for shape in found.shapes.values()], default=1)
    out = Cost(0, 0, 0)
    for equation in equations:
        operations, read = _counted(equation, found.extents)
        touched = {name: _volume(found.shapes[name]) for name in (*read, equation.name) if name in found.shapes}
        once = sum(min(n, read.get(name, n)) for name, n in touched.items())
        out += Cost(operations, once, sum(2 * n >= most for n in touched.values()))
    return out


def weight(equation: Equation, scope: Scope) -> int:
    """The cost of an opened equation as one number.  Nested sums count as arrays that are read, which they become."""
    operations, read = _counted(equation, scope.extents)
    written = scope.volume(i.name for i in equation.kept or ())
    return operations + TOUCH * (sum(read.values()) + written)


def value_weight(value: Node, scope: Scope) -> int:
    """The weight of an equation with this value for all its indexes."""
    return weight(Equation("", tuple(map(Index, scope.indexes(value))), value), scope)


def _volume(shape: Sizes) -> int:
    out = 1
    for n in shape:
        out *= typical(n)
    return out


def _counted(equation: Equation, extents: Mapping[str, Any]) -> tuple[int, dict[str, int]]:
    """Operations, and the number of elements read of each array."""

    def volume(indexes: Iterable[str]) -> int:
        out = 1
        for name in indexes:
            out *= max(1, typical(extents[name])) if name in extents else 1
        return out

    found, elements = operations(equation)
    read: dict[str, int] = {}
    for array, indexes in elements:
        read[array] = max(read.get(array, 0), volume(indexes))
    return sum(n * volume(indexes) for indexes, n in found.items()), read


def operations(equation: Equation) -> tuple[Counter[frozenset[str]], list[tuple[str, frozenset[str]]]]:
    """Counts of operations by the names that they depend on, and the arrays read, with the names in their places.

    A part that depends on few indexes is computed once for all the others.  Names are indexes and everything else it reads.
    """
    done: set[Node] = set()
    read: list[tuple[str, frozenset[str]]] = []
    counted: Counter[frozenset[str]] = Counter()

    def visit(node: Node, places: bool) -> None:
        if node in done or isinstance(node, Name):
            return
        done.add(node)
        if isinstance(node, Element):
            read.append((node.array, frozenset().union(*map(names, node.places))))
            for place in node.places:
                visit(place, True)
            return
        for part in parts(node):
            visit(part, places)
        if isinstance(node, Reduction):
            counted[frozenset(names(node.body) | {i.name for i in node.indexes})] += 1
        elif isinstance(node, Call) and not places and node.function != "stop":
            counted[frozenset(names(node))] += 1

    found = scatter(equation)
    if found is None:
        visit(equation.value, False)
        return counted, read
    for place in found.places.values():
        visit(place, True)
    if found.guard is not None:
        visit(found.guard, False)
    visit(found.value, False)
    counted[frozenset(names(found.value) | {i.name for i in found.over})] += 1
    return counted, read

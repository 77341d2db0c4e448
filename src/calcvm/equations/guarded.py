"""Guards for places that come from data in derived equations: kernels trap at places outside, so these tests come first."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from calcvm.equations.simplify import conjunction
from calcvm.equations.tree import ZERO, Call, Element, Equation, Node, call, is_data, parts, walk, with_parts

Place = tuple[Node, Node]  # a place, and the size of its axis


def data_places(equations: Sequence[Equation], axes: Mapping[str, Sequence[Node]]) -> set[Place]:
    """Places that come from data and trap outside: once such an equation has run, they are known to be inside."""
    elements = [n for e in equations for n in walk(e.value) if isinstance(n, Element) and n.beyond == 0]
    return {(p, size) for n in elements for p, size in zip(n.places, axes.get(n.array, ())) if is_data(p)}


def guarded(
    equations: Sequence[Equation], axes: Mapping[str, Sequence[Node]], inside: Collection[Place]
) -> list[Equation]:
    """The same equations without traps: elements beyond the ends are 0.  inside : places that need no guard."""

    def go(node: Node) -> Node:
        if isinstance(node, Element):
            tests: list[Node] = []
            inner = element(node, tests)
            return call("where", conjunction(tests), inner, ZERO) if tests else node
        below = parts(node)
        return with_parts(node, tuple(map(go, below))) if below else node

    def element(node: Element, tests: list[Node]) -> Node:
        return with_parts(node, tuple(place(node, p, n, tests) for p, n in zip(node.places, axes[node.array])))

    def place(of: Element, at: Node, size: Node, tests: list[Node]) -> Node:
        if not is_data(at) or (at, size) in inside:
            return at
        at = of_place(at, tests)
        if of.beyond != 0:
            return at
        if isinstance(at, Call) and at.function == "/":
            tests.append(call("==", call("%", *at.arguments), ZERO))
            at = call("//", *at.arguments)
        tests += [call("<=", ZERO, at), call("<", at, size)]
        return call("%", at, size)

    def of_place(at: Node, tests: list[Node]) -> Node:
        if isinstance(at, Element):
            return element(at, tests)
        below = parts(at)
        return with_parts(at, tuple(of_place(part, tests) for part in below)) if below else at

    return [replace(e, value=go(e.value)) for e in equations]

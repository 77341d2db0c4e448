"""Reuse of computed values: parts of a value that an equation already computes, up to index names and order, are read instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from calcvm.equations.cost import value_weight
from calcvm.equations.scope import Scope
from calcvm.equations.simplify import addends, factors, product, rewritten_values, total
from calcvm.equations.tree import (
    Call,
    Element,
    Equation,
    Name,
    Node,
    Number,
    Reduction,
    names,
    walk,
)

Match = dict[str, str]  # the pattern's indexes, with the value's names for them


def reused(node: Node, patterns: Sequence[Equation], scope: Scope) -> Node:
    """The value, with results of ``patterns`` in place of the parts that compute them, wherever that is cheaper."""
    weight = value_weight(node, scope)
    for pattern in patterns:
        new = rewritten_values(node, lambda part, pattern=pattern: _read(part, pattern, scope))  # type: ignore[misc]
        if new != node and (less := value_weight(new, scope)) < weight:
            node, weight = new, less
    return node


def pointwise(equation: Equation) -> bool:
    """Whether it computes each element from few others, by more than a name, so that it may occur elsewhere."""
    value = equation.value
    if not isinstance(value, Call) or value.function in ("stop", "neg"):
        return False
    found = list(walk(value))
    kept = {i.name for i in equation.kept or ()}
    read = {node.array for node in found if isinstance(node, Element)}
    return equation.name not in read and kept <= names(value) and not any(isinstance(n, Reduction) for n in found)


def _read(node: Node, pattern: Equation, scope: Scope) -> Node:
    """The node with each match of the pattern at its top replaced by an element."""
    if not isinstance(node, Call):
        return node
    value = pattern.value
    assert isinstance(value, Call)
    kept = [i.name for i in pattern.kept or ()]

    def own(match: Match) -> Node:
        return Element(pattern.name, tuple(Name(match[v]) for v in kept))

    matcher = _Matcher(scope, frozenset(kept))
    if value.function in ("*", "/") and node.function in ("*", "/", "neg"):
        number, above, below = factors(node)
        c, over, under = factors(value)
        for match, left in matcher.among(over, above, {}):
            for again, rest in matcher.among(under, below, match):
                if len(again) == len(kept):
                    return _read(product(number, [own(again), *left], [*rest, Number(c)]), pattern, scope)
    elif value.function in ("+", "-") and node.function in ("+", "-"):
        mine, theirs = addends(node), addends(value)
        for sign in (1, -1):
            for match, kept_terms in matcher.among_terms([(sign * c, n) for c, n in theirs], mine, {}):
                if len(match) == len(kept):
                    return total([(sign, own(match)), *kept_terms])
    elif value.function == node.function:
        for match in matcher.match(value, node, {}):
            if len(match) == len(kept):
                return own(match)
    return node


class _Matcher:
    def __init__(self, scope: Scope, free: frozenset[str]):
        self.scope, self.free = scope, free

    def match(self, pattern: Node, node: Node, match: Match) -> Iterator[Match]:
        """All ways to match the pattern with the node."""
        if isinstance(pattern, Name) and pattern.name in self.free:
            if isinstance(node, Name) and self.scope.extents.get(node.name) == self.scope.extents[pattern.name]:
                if match.get(pattern.name, node.name) == node.name:
                    yield {**match, pattern.name: node.name}
            return
        if isinstance(pattern, Name) and pattern.name[0] == "#" and isinstance(node, Name) and node.name[0] == "#":
            if self.scope.sizes[pattern.name] == self.scope.sizes[node.name]:
                yield match
            return
        if type(pattern) is not type(node):
            return
        if isinstance(pattern, Element) and isinstance(node, Element):
            if (pattern.array, pattern.beyond, len(pattern.places)) == (node.array, node.beyond, len(node.places)):
                yield from self.all(pattern.places, node.places, match)
            return
        if isinstance(pattern, Call) and isinstance(node, Call):
            yield from self.calls(pattern, node, match)
            return
        if pattern == node:
            yield match

    def calls(self, pattern: Call, node: Call, match: Match) -> Iterator[Match]:
        if pattern.function in ("*", "/", "neg"):
            (c, over, under), (d, above, below) = factors(pattern), factors(node)
            if c == d and len(over) == len(above) and len(under) == len(below):
                for found, _ in self.among(over, above, match):
                    yield from (again for again, _ in self.among(under, below, found))
        elif pattern.function in ("+", "-"):
            ours, theirs = addends(pattern), addends(node)
            if len(ours) == len(theirs):
                yield from (found for found, _ in self.among_terms(ours, theirs, match))
        elif pattern.function == node.function and len(pattern.arguments) == len(node.arguments):
            yield from self.all(pattern.arguments, node.arguments, match)

    def all(self, patterns: Sequence[Node], nodes: Sequence[Node], match: Match) -> Iterator[Match]:
        if not patterns:
            yield match
            return
        for found in self.match(patterns[0], nodes[0], match):
            yield from self.all(patterns[1:], nodes[1:], found)

    def among(
        self, patterns: Sequence[Node], nodes: Sequence[Node], match: Match
    ) -> Iterator[tuple[Match, list[Node]]]:
        """All ways to match each pattern with one of the nodes, with the nodes that are left."""
        terms = self.among_terms([(1, p) for p in patterns], [(1, n) for n in nodes], match)
        yield from ((found, [n for _, n in left]) for found, left in terms)

    def among_terms(
        self, patterns: Sequence[tuple[int | float, Node]], nodes: Sequence[tuple[int | float, Node]], match: Match
    ) -> Iterator[tuple[Match, list[tuple[int | float, Node]]]]:
        if not patterns:
            yield match, list(nodes)
            return
        c, pattern = patterns[0]
        for k, (d, node) in enumerate(nodes):
            if c == d:
                for found in self.match(pattern, node, match):
                    yield from self.among_terms(patterns[1:], [*nodes[:k], *nodes[k + 1 :]], found)

"""Sums as separate equations, equal ones only once; each in its cheapest order, and reading results that already exist."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from calcvm.equations.cost import TOUCH, value_weight
from calcvm.equations.deltas import solved
from calcvm.equations.scope import Scope, extent
from calcvm.equations.simplify import addends, chosen, conditions, factors, finite, product, total, where, zero_where
from calcvm.equations.tree import (
    ONE,
    SAID,
    ZERO,
    Call,
    Element,
    Equation,
    Index,
    Name,
    Node,
    Number,
    Reduction,
    arrays,
    call,
    names,
    parts,
    substituted,
    walk,
    with_parts,
)
from calcvm.frozen import frozen

MOST_FACTORS = 5  # the most factors of a sum for which all orders are tried
Factor = tuple[Node, bool]  # (factor, whether it is a divisor)


@frozen
class Known:
    """A value that can be read: ``value`` over indexes, in the order of the key."""

    value: Node
    indexes: tuple[str, ...]


class Shared:
    """Equations as they are generated, indexed by the form of their values."""

    def __init__(self, scope: Scope):
        self.scope = scope
        self.equations: list[Equation] = []
        self.known: dict[str, Known] = {}
        self.facts: dict[str, Known] = {}  # sums with known values; not applied to the forward, which keeps its form
        self.derives = False

    # ------------------------------------------------------------ equal parts
    def add(self, equation: Equation) -> None:
        """Add an equation; later reads reuse its reduction and known sums that follow from it."""
        self.equations.append(equation)
        value = equation.value
        kept = tuple(i.name for i in equation.kept or ())
        if not isinstance(value, Reduction) or equation.name in arrays(value):
            return
        key, order = self.key(value)
        if {*order} != {*kept}:
            return
        own = Element(equation.name, tuple(map(Name, kept)))
        self.known.setdefault(key, Known(own, order))
        body, over = value.body, value.indexes
        if value.how == "mean":
            self.fact(Reduction("sum", over, total([*addends(body), (-1, own)])), ZERO)
            self.fact(Reduction("sum", over, total([(1, own), *((-c, rest) for c, rest in addends(body))])), ZERO)
        if value.how == "logsumexp":
            self.fact(Reduction("sum", over, call("exp", total([*addends(body), (-1, own)]))), ONE)

    def fact(self, node: Node, value: Node) -> None:
        key, order = self.key(node)
        self.facts[key] = Known(value, order)

    def look(self, node: Node) -> Node | None:
        """An existing value equal to it, or None."""
        key, order = self.key(node)
        found = self.facts.get(key) if self.derives else None
        found = found or self.known.get(key)
        return None if found is None else substituted(found.value, dict(zip(found.indexes, map(Name, order))))

    def lifted(self, node: Node, top: bool = False, name: str = "") -> Node:
        """The node with each reduction replaced by an element of an equation; an outermost one stays if it is on ``top``."""
        below = parts(node)
        node = with_parts(node, tuple(self.lifted(part) for part in below)) if below else node
        if not isinstance(node, Reduction):
            return node
        found = self.look(node)
        if found is not None:
            return found
        if top:
            return node
        order = self.scope.indexes(node)
        shape = tuple(self.scope.extents[v] for v in order)
        made = self.scope.array(name, shape) if name else self.scope.numbered("t", shape)
        self.add(Equation(made, tuple(map(Index, order)), node))
        return Element(made, tuple(map(Name, order)))

    def key(self, node: Node) -> tuple[str, tuple[str, ...]]:
        """A text that is equal for values that differ only in index names and order, and the free indexes."""
        met: dict[str, str] = {}
        text = self.spelled(self.ordered(node), met)
        free = names(node)
        return text, tuple(v for v in met if v in free)

    def ordered(self, node: Node) -> Node:
        """The node with terms and factors in an order that does not depend on index names."""
        below = parts(node)
        node = with_parts(node, tuple(map(self.ordered, below))) if below else node
        if isinstance(node, Call) and node.function in ("*", "+"):
            found = sorted(_chain(node, node.function), key=lambda n: self.spelled(n, None))
            out = found[0]
            for part in found[1:]:
                out = call(node.function, out, part)
            return out
        return node

    def spelled(self, node: Node, met: dict[str, str] | None) -> str:
        if isinstance(node, Number):
            return repr(node.value)
        if isinstance(node, Name):
            if node.name[0] == "#":
                return f"#{self.scope.extents[node.name[1:]]}"
            if node.name not in self.scope.extents:
                return node.name
            n = self.scope.extents[node.name]
            return f"${n}" if met is None else f"${met.setdefault(node.name, str(len(met)))}:{n}"
        if isinstance(node, Element):
            return f"{node.array}[{','.join(self.spelled(p, met) for p in node.places)};{node.beyond}{' said' * (node.beyond == SAID)}]"
        if isinstance(node, Reduction):
            body = self.spelled(node.body, met)
            over = [self.spelled(Name(i.name), met) for i in node.indexes]
            return f"{node.how}<{','.join(over if node.how.startswith('arg') else sorted(over))}>({body})"
        return f"{node.function}({','.join(self.spelled(a, met) for a in node.arguments)})"

    # ------------------------------------------------------------ sums inwards
    def inward(self, node: Node) -> Node:
        """Sums of products as sums of sums, in the cheapest order; existing values cost nothing.  Deltas are solved."""
        below = parts(node)
        node = with_parts(node, tuple(map(self.inward, below))) if below else node
        if isinstance(node, Reduction) and node.how == "sum":
            return self.sum([i.name for i in node.indexes], node.body)
        return node

    def sum(self, over: Sequence[str], body: Node) -> Node:
        if body == ZERO:
            return ZERO
        found = zero_where(body)
        if found is not None and found[2]:
            return self.guarded_sum(list(over), conditions(found[0]), found[1])
        if found is not None and not names(found[0]) & {*over}:
            return chosen(found[0], ZERO, self.sum(over, found[1]))
        if isinstance(body, Reduction) and body.how == "sum":
            return self.sum([*over, *(i.name for i in body.indexes)], body.body)
        number, above, below = factors(body)
        out = [f for f in above if not names(f) & {*over}]
        under = [f for f in below if not names(f) & {*over}]
        inner = [(f, False) for f in above if f not in out] + [(f, True) for f in below if f not in under]
        used = set().union(*(names(f) for f, _ in inner))
        sums = [
            self.ordered_sum(group, [v for v in over if v in used and v in _names(group)])
            for group in _groups(inner, over)
        ]
        alone = [extent(v) for v in over if v not in used]
        return product(number, [*out, *alone, *sums], under)

    def guarded_sum(self, over: list[str], guards: list[Node], value: Node) -> Node:
        """A sum that is 0 unless all conditions hold: equal places are solved, and factors free of the indexes move out."""
        equal: list[Node] = []
        other: list[Node] = []
        for guard in guards:
            is_equal = isinstance(guard, Call) and guard.function == "==" and not _data_on_both_sides(guard)
            (equal if is_equal else other).append(guard)
        pairs = [(g.arguments[0], g.arguments[1]) for g in equal if isinstance(g, Call)]
        inner = where(other, value) if other else value
        left, inner, more = solved(self.scope, over, pairs, inner)
        if len(left) < len(over):
            return self.sum(left, where(more, inner)) if left else where(more, inner)
        outside = [guard for guard in guards if not names(guard) & {*over}]
        inside = [guard for guard in guards if guard not in outside]
        if not inside:
            return where(outside, self.sum(over, value))
        number, above, below = factors(value)
        out = [f for f in above if finite(f) and not names(f) & {*over}]
        body = where(inside, product(1, [f for f in above if f not in out], below))
        used = names(body)
        alone = [extent(v) for v in over if v not in used]
        summed = Reduction("sum", tuple(Index(v) for v in over if v in used), body)
        return where(outside, product(number, [*out, *alone, summed]))

    def ordered_sum(self, inner: list[Factor], over: Sequence[str]) -> Node:
        """A sum of a product of connected factors, in the cheapest order."""
        whole = _sum_of(inner, over)
        if len(inner) > MOST_FACTORS:
            return whole
        held: dict[str, Node] = {}
        _, best = self.cheapest(inner, tuple(over), held)
        return _filled(best, held)

    def cheapest(self, inner: list[Factor], over: tuple[str, ...], held: dict[str, Node]) -> tuple[int, Node]:
        """(weight, sum); nested sums are elements of arrays in ``held``."""
        node = _sum_of(inner, over)
        best = self.weight(node, held)
        for mask in range(1, 2 ** len(inner) - 1):
            part = [f for k, f in enumerate(inner) if mask >> k & 1]
            rest = [f for k, f in enumerate(inner) if not mask >> k & 1]
            own = _names(part) - _names(rest)
            if own.isdisjoint(over):
                continue
            first = _sum_of(part, [v for v in over if v in own])
            weight = self.weight(first, held)
            if weight[0] >= best[0]:
                continue
            kept = self.scope.indexes(first)
            name = f"?{len(held)}"
            held[name] = first
            left = tuple(v for v in over if v not in own)
            after: list[Factor] = [*rest, (Element(name, tuple(map(Name, kept))), False)]
            if left:
                more, then = self.cheapest(after, left, held)
            else:
                then = _sum_of(after, ())
                more = value_weight(then, self.scope)
            if weight[0] + more < best[0]:
                best = (weight[0] + more, then)
        return best

    def weight(self, node: Node, held: dict[str, Node]) -> tuple[int, Node]:
        found = self.look(_filled(node, held))
        if found is None:
            return value_weight(node, self.scope), node
        return (TOUCH * self.scope.volume(self.scope.indexes(found)) if arrays(found) else 0), node


def _chain(node: Node, function: str) -> Iterator[Node]:
    if isinstance(node, Call) and node.function == function:
        for argument in node.arguments:
            yield from _chain(argument, function)
    else:
        yield node


def _data_on_both_sides(guard: Call) -> bool:
    return all(any(isinstance(n, Element) for n in walk(side)) for side in guard.arguments)


def _names(inner: Sequence[Factor]) -> frozenset[str]:
    return frozenset().union(*(names(f) for f, _ in inner))


def _sum_of(inner: Sequence[Factor], over: Sequence[str]) -> Node:
    body = product(1, [f for f, under in inner if not under], [f for f, under in inner if under])
    return Reduction("sum", tuple(map(Index, over)), body) if over else body


def _filled(node: Node, held: dict[str, Node]) -> Node:
    """The node with the held arrays replaced by their sums."""
    if isinstance(node, Element) and node.array in held:
        return _filled(held[node.array], held)
    below = parts(node)
    return with_parts(node, tuple(_filled(part, held) for part in below)) if below else node


def _groups(inner: list[Factor], over: Sequence[str]) -> list[list[Factor]]:
    """Groups of factors that share summed indexes; each group is summed separately."""
    groups: list[list[Factor]] = []
    for factor in inner:
        own = names(factor[0]) & {*over}
        joined = [g for g in groups if _names(g) & own]
        groups = [g for g in groups if g not in joined] + [[f for g in joined for f in g] + [factor]]
    return groups

"""Sums of products of several values: the order in which pairs are multiplied, each pair by one product row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from calcvm import functions as F
from calcvm.graph import apply
from calcvm.indexed.values import Size, Value, aligned, numel, ordered, reshaped, size_of
from calcvm.ops.dims import Affine

ALL_ORDERS = 8  # every order is tried for up to so many factors
BATCH = 64  # the batch assumed to compare costs

Extents = dict[str, Size]


@dataclass(eq=False)
class Addend:
    """An addend of a sum.  A row may add it itself and then sets ``used``."""

    value: Value
    used: bool = False

    def bias(self, axes: Sequence[str], units: Size) -> Any:
        """The addend as a vector, if these are its axes."""
        if not axes or self.value.axes != tuple(axes):
            return None
        self.used = True
        return reshaped(self.value.data, (units,))


def count(n: Size) -> int:
    """A size as a number, to compare costs."""
    return n.at(BATCH) if isinstance(n, Affine) else int(n)


def varies(n: Size) -> bool:
    """Whether a size depends on the batch."""
    return isinstance(size_of(n), Affine)


def contract(values: Sequence[Value], kept: Sequence[str], extents: Extents, addend: Addend | None = None) -> Value:
    """The sum, over all indexes except the kept ones, of the product of values.

    kept : in the preferred order of the result's axes.
    """
    values = [summed(v, _alone(v, [*values[:k], *values[k + 1 :]], kept)) for k, v in enumerate(values)]
    if len(values) == 1:
        return values[0]
    for a, b in pairs([frozenset(v.axes) for v in values], frozenset(kept), extents):
        rest = [v for k, v in enumerate(values) if k not in (a, b)]
        needed = {*kept}.union(*(v.axes for v in rest))
        made = multiplied(values[a], values[b], needed, kept, extents, addend if not rest else None)
        values = [*rest, made]
    return values[0]


def summed(v: Value, over: Sequence[str]) -> Value:
    """The value summed over some of its axes."""
    if not over:
        return v
    places = tuple(v.axes.index(name) for name in over)
    data = v.data.sum(places) if v.constant else F.sum(v.data, places)
    return Value(data, tuple(name for name in v.axes if name not in over))


def _alone(v: Value, others: Sequence[Value], kept: Sequence[str]) -> list[str]:
    """Indexes that no other value has and that are not kept."""
    elsewhere = {*kept}.union(*(other.axes for other in others))
    return [name for name in v.axes if name not in elsewhere]


# ---------------------------------------------------------------- choice of pairs
def pairs(sets: Sequence[frozenset[str]], kept: frozenset[str], extents: Extents) -> list[tuple[int, int]]:
    """The order of multiplication: pairs of places in the list of remaining values; each result is appended to the list.

    It takes the fewest multiplications; with many factors it always takes the cheapest next pair.
    """
    if len(sets) == 2:
        return [(0, 1)]
    tree = _cheapest(sets, kept, extents) if len(sets) <= ALL_ORDERS else _greedy(sets, kept, extents)
    left: list[Any] = [*range(len(sets))]
    found: list[tuple[int, int]] = []

    def walk(node: Any) -> None:
        if not isinstance(node, tuple):
            return
        for part in node:
            walk(part)
        a, b = sorted(left.index(part) for part in node)
        found.append((a, b))
        left[:] = [part for k, part in enumerate(left) if k not in (a, b)] + [node]

    walk(tree)
    return found


def _cost(indexes: frozenset[str], extents: Extents) -> float:
    """The multiplications of a pair that has these indexes."""
    return float(numel(count(extents[name]) for name in indexes))


def _quadratic(indexes: frozenset[str], extents: Extents) -> bool:
    return sum(varies(extents[name]) for name in indexes) > 1


def _cheapest(sets: Sequence[frozenset[str]], kept: frozenset[str], extents: Extents) -> Any:
    """The cheapest tree of pairs, over all divisions of every subset of factors."""
    everyone = frozenset(range(len(sets)))

    def outer(subset: frozenset[int]) -> frozenset[str]:
        own = frozenset().union(*(sets[k] for k in subset))
        return own & kept.union(*(sets[k] for k in everyone - subset))

    best: dict[frozenset[int], tuple[float, Any]] = {frozenset([k]): (0.0, k) for k in everyone}
    for n in range(2, len(sets) + 1):
        for members in combinations(sorted(everyone), n):
            whole = frozenset(members)
            ways = [
                _way(whole - {*other}, frozenset(other), best, outer, extents)
                for m in range(1, n)
                for other in combinations(members[1:], m)
            ]
            best[whole] = min(ways, key=lambda way: way[0])
    return best[everyone][1]


def _way(one: frozenset[int], other: frozenset[int], best: Any, outer: Any, extents: Extents) -> tuple[float, Any]:
    indexes = outer(one) | outer(other)
    cost = best[one][0] + best[other][0] + _cost(indexes, extents)
    if _quadratic(outer(one | other), extents):
        cost *= 1e30
    return cost, (best[one][1], best[other][1])


def _greedy(sets: Sequence[frozenset[str]], kept: frozenset[str], extents: Extents) -> Any:
    left: list[tuple[Any, frozenset[str]]] = [*enumerate(sets)]
    while len(left) > 1:
        ways = []
        for a, b in combinations(range(len(left)), 2):
            rest = [one for k, one in enumerate(left) if k not in (a, b)]
            both = left[a][1] | left[b][1]
            made = both & kept.union(*(s for _, s in rest))
            costs = (_quadratic(made, extents), _cost(both, extents), _cost(made, extents))
            ways.append((costs, [*rest, ((left[a][0], left[b][0]), made)]))
        left = min(ways, key=lambda way: way[0])[1]
    return left[0][0]


# ---------------------------------------------------------------- one pair
@dataclass(frozen=True)
class Layout:
    """One way to multiply a pair: leading indexes (of both, or of one), rows of a, columns of b, and summed indexes.

    turned : whether a, and b, are stored transposed.  copies : elements that must be moved before or after.
    """

    a: Value
    b: Value
    lead: tuple[str, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    inner: tuple[str, ...]
    turned: tuple[bool, bool]
    copies: int


def multiplied(
    a: Value, b: Value, needed: set[str], kept: Sequence[str], extents: Extents, addend: Addend | None
) -> Value:
    """The product of two values, summed over the indexes that are no longer needed."""
    inner = [name for name in a.axes if name in b.axes and name not in needed]
    rows = [name for name in a.axes if name not in b.axes]
    columns = [name for name in b.axes if name not in a.axes]
    if not inner or not (rows or columns) or a.constant and b.constant:
        axes = _joined(a, b, kept)
        y = Value(aligned(a, axes) * aligned(b, axes), tuple(axes))
        return summed(y, inner)
    best = min(_layouts(a, b, inner, kept, extents), key=lambda way: (way.copies, not _is_linear(way, extents)))
    return _linear(best, extents, addend) if _is_linear(best, extents) else _matmul(best, extents)


def _joined(a: Value, b: Value, kept: Sequence[str]) -> list[str]:
    """The axes of an elementwise product: those of the value that has all of them, else in the result's order."""
    names = [*dict.fromkeys((*a.axes, *b.axes))]
    for v in (a, b):
        if len(v.axes) == len(names):
            return [*v.axes]
    place = {name: k for k, name in enumerate(kept)}
    return sorted(names, key=lambda name: place.get(name, len(place)))


def _layouts(a: Value, b: Value, inner: list[str], kept: Sequence[str], extents: Extents) -> Iterator[Layout]:
    """All ways to compute a pair as a product of matrices."""
    both = [name for name in a.axes if name in b.axes and name not in inner]
    for x, y in ((a, b), (b, a)):
        rows = [name for name in x.axes if name not in y.axes]
        columns = [name for name in y.axes if name not in x.axes]
        leads = [([], "")] if both else [([], ""), *_leading(x, rows, "x"), *_leading(y, columns, "y")]
        for (lead, of), order in product(leads, _orders(both, x, y, kept)):
            front = (*order, *lead)
            of_rows = [v for v in rows if v not in lead]
            of_columns = [v for v in columns if v not in lead]
            for r, c, k in product(_orders(of_rows, x, kept), _orders(of_columns, y, kept), _orders(inner, x, y)):
                moved, turned = 0, []
                for v, groups, has in ((x, (r, k), of != "y"), (y, (k, c), of != "x")):
                    own = front if has else ()
                    as_is, other = (*own, *groups[0], *groups[1]), (*own, *groups[1], *groups[0])
                    turned.append(v.axes != as_is and v.axes == other)
                    moved += 0 if v.axes in (as_is, other) else count(numel(v.data.shape))
                made = (*front, *r, *c)
                if {*made} <= {*kept} and made != tuple(v for v in kept if v in made):
                    moved += count(numel(extents[v] for v in made))
                yield Layout(x, y, front, r, c, k, (turned[0], turned[1]), moved)


def _leading(v: Value, names: Sequence[str], of: str) -> list[tuple[list[str], str]]:
    """Prefixes of its axes that the other value lacks."""
    n = next((k for k, name in enumerate(v.axes) if name not in names), len(v.axes))
    return [([*v.axes[: k + 1]], of) for k in range(n)]


def _orders(names: Sequence[str], *by: Value | Sequence[str]) -> list[tuple[str, ...]]:
    """Distinct orders of the names, as in values' axes or in other sequences."""
    found = dict.fromkeys(
        tuple(v for v in (axes.axes if isinstance(axes, Value) else axes) if v in names) for axes in by
    )
    return [order for order in found if len(order) == len(names)] or [tuple(names)]


def _is_linear(way: Layout, extents: Extents) -> bool:
    """Whether it is rows times a matrix of weights that does not depend on the batch."""
    fixed = not any(varies(extents[name]) for name in (*way.columns, *way.inner))
    return fixed and not way.lead and not any(way.turned)


def _matrix(
    v: Value, lead: Sequence[str], first: Sequence[str], second: Sequence[str], turned: bool, extents: Extents
) -> Any:
    """A factor's data as a matrix for each combination of leading indexes; transposed if it is turned."""
    one, two = (second, first) if turned else (first, second)
    data = ordered(v, (*lead, *one, *two))
    return reshaped(
        data, [*(extents[name] for name in lead), *(numel(extents[n] for n in names) for names in (one, two))]
    )


def _linear(way: Layout, extents: Extents, addend: Addend | None) -> Value:
    rows = [extents[name] for name in way.rows]
    inner, columns = (numel(extents[name] for name in names) for names in (way.inner, way.columns))
    x = reshaped(ordered(way.a, (*way.rows, *way.inner)), [*(rows or [1]), inner])
    bias = None if addend is None else addend.bias(way.columns, columns)
    y = apply("linear", x, _matrix(way.b, (), way.inner, way.columns, False, extents), bias)
    axes = (*way.rows, *way.columns)
    return Value(reshaped(y, [extents[name] for name in axes]), axes)


def _matmul(way: Layout, extents: Extents) -> Value:
    lead_a = [name for name in way.lead if name in way.a.axes]
    lead_b = [name for name in way.lead if name in way.b.axes]
    a = _matrix(way.a, lead_a, way.rows, way.inner, way.turned[0], extents)
    b = _matrix(way.b, lead_b, way.inner, way.columns, way.turned[1], extents)
    y = F.matmul(a, b, *way.turned)
    axes = (*way.lead, *way.rows, *way.columns)
    return Value(reshaped(y, [extents[name] for name in axes]), axes)

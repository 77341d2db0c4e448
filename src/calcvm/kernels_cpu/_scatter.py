"""Sums in which each term belongs to one place of the result: the term is added there, in memory.

A worker visits all terms and adds those that fall into its own part of the result, in the order of summation, so the
bits are the same for any team.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from calcvm.equations.kinds import NUMBER, kind_of
from calcvm.equations.plain import Stage
from calcvm.equations.scatter import Scatter, scatter_of
from calcvm.equations.simplify import conditions, where
from calcvm.equations.tree import Element, Index, Name, Node, Number, names, rewritten, walk
from calcvm.kernels_cpu._common import WORD
from calcvm.kernels_cpu._math import _vectors, counting, in_groups
from calcvm.kernels_cpu._plain_loops import Loops
from calcvm.kernels_cpu._rounded import added
from calcvm.kernels_cpu._values import Point
from calcvm.kernels_cpu._whole import TRUE, Cond, Whole

BESIDE = 4  # sums at once that share operands


def scattered(loops: Loops, stage: Stage) -> Stage | None:
    """Compute a result, or the sum in it, by a scatter.  Returns the rest of the result still to compute, or None."""
    sum_ = _sum_of(loops, stage)
    if sum_ is None or kind_of(sum_.value, loops.kinds) != NUMBER:
        return stage
    axes = {name: o.axes for name, o in loops.operands.items()}
    found = scatter_of(sum_.kept, sum_.over, sum_.value, axes)
    if found is None or loops.operands[stage.name].pointer.type.pointee != loops.e.element:
        return stage
    Scattering(loops, stage, found).emit()
    if sum_ is stage:
        return None
    del loops.stages[sum_.name]
    loops.operands[sum_.name] = loops.operands[stage.name]  # the memory in which the result reads it
    own = Element(sum_.name, tuple(Name(i.name) for i in stage.kept))
    return replace(stage, value=rewritten(stage.value, lambda n: own if _reads(n, sum_) else n))


def _reads(node: Node, stage: Stage) -> bool:
    return isinstance(node, Element) and node.array == stage.name


def _sum_of(loops: Loops, stage: Stage) -> Stage | None:
    """The sum that is the result, or that only the result reads, at its own place."""
    if stage.scan or not stage.kept:
        return None
    if stage.how:
        return stage if stage.how == "sum" and not _readers(loops, stage) else None
    own = {i.name for i in stage.kept}
    read = [n for n in walk(stage.value) if isinstance(n, Element)]
    sums = [loops.stages[n.array] for n in read if n.array in loops.stages]
    found = [s for s in sums if s.how == "sum" and not s.result and {i.name for i in s.kept} == own]
    if len({s.name for s in found}) != 1 or _readers(loops, found[0]) != {stage.name} or _readers(loops, stage):
        return None
    kept = tuple(Name(i.name) for i in found[0].kept)
    if any(n.places != kept if n.array == found[0].name else n.array in loops.stages for n in read):
        return None
    return found[0]


def _readers(loops: Loops, stage: Stage) -> set[str]:
    return {s.name for s in loops.stages.values() for n in walk(s.value) if _reads(n, stage)}


class Scattering:
    """The loops: kept indexes before the scattered ones, the summed indexes, then the other kept ones, the last in vectors."""

    def __init__(self, loops: Loops, stage: Stage, found: Scatter):
        self.loops, self.b, self.stage, self.found = loops, loops.b, stage, found
        loops.extents |= {i.name: i.extent for i in found.over if i.extent is not None}
        tests = conditions(found.guard) if found.guard else []
        self.sum = Stage(f"{stage.name} by terms", stage.kept, "sum", found.over, where(tests, found.value), False)
        said = frozenset().union(*map(names, (*found.places.values(), *tests)))
        inner = tuple(i for i in found.over if i.name not in said)
        self.over = tuple(i for i in found.over if i.name in said)
        self.inner, value = self.summed(inner, found.value)
        last = {stage.kept[-1].name} - {*found.places}  # in lanes, each at its own place
        self.tests = [*found.places.items(), *(("", test) for test in tests if not names(test) & last)]
        self.value = where([test for test in tests if names(test) & last], value)
        aside = {*found.places, *found.bands}
        first = min(k for k, i in enumerate(stage.kept) if i.name in aside)
        self.order = [*stage.kept[:first], *self.over]
        left = [i for i in stage.kept[first:] if i.name not in found.places]
        for i in [i for i in left if i.name in found.bands]:  # as soon as its bounds are known
            behind = max(k for k, j in enumerate(self.order) if j.name in found.bands[i.name])
            self.order.insert(behind + 1, i)
        self.order += [i for i in left if i.name not in found.bands]
        self.known = {i.name for i in self.order} | {*found.places}

    def summed(self, inner: tuple[Index, ...], value: Node) -> tuple[Stage | None, Node]:
        """The part of the sum over indexes that do not decide the place; it is computed before it is added."""
        if not inner:
            return None, value
        read = names(value)
        kept = tuple(i for i in (*self.stage.kept, *self.over) if i.name in read)
        sum_ = Stage(f"{self.stage.name} at once", kept, "sum", inner, value, False)
        self.loops.stages[sum_.name], self.loops.kinds[sum_.name] = sum_, NUMBER
        return sum_, Element(sum_.name, tuple(Name(i.name) for i in kept))

    def emit(self) -> None:
        with self.loops.scope():
            self.clear()
            self.at(Point({}), self.order, self.tests)

    def clear(self) -> None:
        """Set the worker's part to 0."""
        loops, b, e = self.loops, self.b, self.loops.e
        lo, hi = map(loops.w.value, loops.run(self.stage.kept[0].name))
        below = loops.product([i.extent for i in self.stage.kept[1:]])
        start = b.gep(loops.operands[self.stage.name].pointer, [b.mul(lo, below)])
        zero = e.splat(e.element(0.0))

        def body(i: Any, left: Any, carried: list) -> list:
            e.store(zero, b.gep(start, [i]), None if left is None else e.below(left))
            return carried

        _vectors(e, b.mul(b.sub(hi, lo), below), body, [])

    def at(self, p: Point, left: Sequence[Index], tests: Sequence[tuple[str, Node]]) -> None:
        """Add the terms at a point, if all tests that can be made there succeed."""
        loops, b = self.loops, self.b
        unknown = self.known - p.at.keys()
        for k, (index, node) in enumerate(tests):
            if not names(node) & unknown:
                condition, p = self.test(index, node, p)
                with b.if_then(loops.w.bit(condition)), loops.scope():
                    self.at(p, left, [*tests[:k], *tests[k + 1 :]])
                return
        loops.hoist(self.value, [p], frozenset(unknown))
        if not left:
            self.add([p])
            return
        along, *left = left
        name = along.name
        lo, hi = loops.run(name)
        found = loops.range(self.sum, along, frozenset(unknown - {name}), p)
        if found:
            lo, hi = loops.w.larger(lo, found[0]), loops.w.smaller(hi, found[1])
        lo, hi, true = loops.w.value(lo), loops.w.value(loops.w.larger(lo, hi)), found[2] if found else []
        if not left and not tests and name == self.stage.kept[-1].name and along.extent != Number(1):
            if self.inner is None or loops.takes(self.inner, name):
                self.vectors(p, name, lo, hi)
            else:
                self.several(p, name, lo, hi)
            return

        def body(i: Any, carried: list) -> list:
            with loops.scope(), loops.knowing(true):
                self.at(p.to(name, Whole(i)), left, tests)
            return carried

        counting(b, lo, hi, 1, [], body)

    def test(self, index: str, node: Node, p: Point) -> tuple[Cond, Point]:
        """Whether a place lies in the worker's part, and the point there; without an index, whether a condition holds."""
        loops, w = self.loops, self.loops.w
        if not index:
            return loops.condition(node, p), p
        place = loops.of(node, p)
        place = place if isinstance(place, Whole) else loops.integer(loops.number(place))
        lo, hi = loops.run(index)
        return w.inside(w.sub(place, Whole(lo)), Whole(w.minus(hi, lo))), p.to(index, place)

    def vectors(self, p: Point, name: str, lo: Any, hi: Any) -> None:
        loops, b = self.loops, self.b

        def body(i: Any, left: Any, carried: list) -> list:
            with loops.scope():
                live = TRUE if left is None else Cond(loops.e.below(left))
                self.add([p.to(name, Whole(b.add(lo, i), 1), live)])
            return carried

        _vectors(loops.e, b.sub(hi, lo), body, [])

    def several(self, p: Point, name: str, lo: Any, hi: Any) -> None:
        """Several sums by lanes at once."""
        b = self.b

        def body(n: int, i: Any) -> None:
            with self.loops.scope():
                self.add([p.to(name, Whole(b.add(i, WORD(k)))) for k in range(n)])

        in_groups(b, lo, hi, BESIDE, body)

    def add(self, points: Sequence[Point]) -> None:
        loops, name, kept = self.loops, self.stage.name, [i.name for i in self.stage.kept]
        loops.prepare(self.value, points)
        for p in points:
            value, before = loops.level(loops.of(self.value, p), loops.stored_before(self.stage, p))
            loops.stored(name, added(value, before), p, kept)

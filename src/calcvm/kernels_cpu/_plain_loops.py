"""Loops over the stages of a row that is given by its equation (`calcvm.equations.plain`), emitted as LLVM IR.

Results are computed in loops over their indexes, in storage order.  The last index runs in vectors if the operands are
contiguous along it.  If they are contiguous along a reduced index, that one runs in vectors, and a tree combines the lanes.  A stage
that is not a result is computed once all its indexes are known, and stays in registers.  The order of a sum depends only on its length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llvmlite import ir

from calcvm.equations.functions import DERIVATIVES
from calcvm.equations.kinds import INTEGER, NUMBER, kind_of
from calcvm.equations.places import terms
from calcvm.equations.plain import Stage
from calcvm.equations.scatter import vanishing
from calcvm.equations.tree import ZERO, Call, Element, Index, Name, Node, Number, names, rewritten, substituted, walk
from calcvm.kernels_cpu._common import WORD
from calcvm.kernels_cpu._folds import Fold
from calcvm.kernels_cpu._formulas import V
from calcvm.kernels_cpu._guards import Guard, along, guards
from calcvm.kernels_cpu._math import LONG, _vectors, _when, add_exactly, counting, in_groups
from calcvm.kernels_cpu._values import Point, Value, Values
from calcvm.kernels_cpu._vectors import phi, word
from calcvm.kernels_cpu._whole import TRUE, Cond, Whole

FUNCTIONS = {*DERIVATIVES} - {
    "abs",
    "sign",
    "floor",
    "ceil",
    "rint",
    "relu",
    "sqrt",
}  # functions that take many instructions
BLOCK = 128  # terms of a sum added plainly, per lane
WAYS = 4  # parallel partial sums of a long reduction
WIDE = 4  # vectors of results at once
ROWS = 4  # rows at once that share operands
CHAINS = 8  # parallel scans; each waits for its previous element


# ---------------------------------------------------------------- contiguous access
def strides(node: Element, axes: Sequence[Node], index: str) -> Any:
    """The distance between elements at successive places of an index: 0, 1, or None for anything else."""
    found: dict[tuple[str, ...], int] = {}
    for k, place in enumerate(node.places):
        at = terms(place)
        if at is None:
            if any(isinstance(n, Name) and n.name == index for n in walk(place)):
                return None
            continue
        below: dict[tuple[str, ...], int] = {(): 1}
        for extent in axes[k + 1 :]:
            size = terms(extent) or {(repr(extent),): 1}
            below = _product(below, size)
        for key, x in _product({key: x for key, x in at.items() if index in key}, below).items():
            found[key] = found.get(key, 0) + x
    found = {key: x for key, x in found.items() if x}
    return 0 if not found else 1 if found == {(index,): 1} else None


def _product(x: Mapping[tuple[str, ...], int], y: Mapping[tuple[str, ...], int]) -> dict[tuple[str, ...], int]:
    out: dict[tuple[str, ...], int] = {}
    for a, p in x.items():
        for b, q in y.items():
            key = tuple(sorted(a + b))
            out[key] = out.get(key, 0) + p * q
    return out


class Loops(Values):
    """The loops of a row."""

    bounds: dict[str, tuple[Any, Any]]  # of indexes that the workers share
    terms: dict[str, tuple[Stage, str]] = {}  # see `stored_terms`, by sum

    # ------------------------------------------------------------ choices
    def reads(self, stage: Stage) -> list[Element]:
        """Elements of operands that a stage reads, directly or through other stages."""
        out, left, seen = [], [stage.value], {stage.name}
        while left:
            for node in walk(left.pop()):
                if not isinstance(node, Element):
                    continue
                other = self.stages.get(node.array)
                if other is None or other.scan:
                    out.append(node)
                elif node.array not in seen:
                    seen.add(node.array)
                    left.append(other.value)
        return out

    def score(self, stage: Stage, index: str) -> tuple[int, int]:
        """How many elements are scattered along an index, and the negated number of those that are contiguous; less is better."""
        found = [strides(n, self.operands[n.array].axes, index) for n in self.reads(stage)]
        return sum(s is None for s in found), -sum(s == 1 for s in found)

    def best(self, stage: Stage) -> str:
        """The best reduced index to run in lanes."""
        return min(reversed(stage.over), key=lambda i: self.score(stage, i.name)).name

    def reduces(self, stage: Stage, index: str) -> list[Stage]:
        """The reductions that a stage consists of and that have an index."""
        out = [stage] if stage.how else []
        for node in walk(stage.value):
            other = self.stages.get(node.array) if isinstance(node, Element) else None
            if other is not None and other is not stage and index in {i.name for i in other.kept}:
                out += self.reduces(other, index)
        return out

    def by_lanes(self, stage: Stage) -> str | None:
        """The last index of a result if it runs in vectors, else None."""
        along = stage.scan[0] if stage.scan else ""
        kept = [i.name for i in stage.kept if i.extent != Number(1) or i.name == along]
        if not kept or kept[-1] == along:
            return None
        last = kept[-1]
        return last if all(self.takes(other, last) for other in self.reduces(stage, last)) else None

    def takes(self, stage: Stage, index: str) -> bool:
        """Whether to vectorize a reduction across places of a kept index, instead of along an index that it reduces."""
        own = self.score(stage, index)
        return not stage.over or own <= self.score(stage, self.best(stage)) or not own[0]

    # ------------------------------------------------------------ reductions
    def reduce(self, stage: Stage, points: Sequence[Point]) -> list[Value]:
        """A stage's reduction at several points at once.  A maximum or minimum also yields its place if a stage reads that."""
        place = self.place_of(stage)
        if place is None:
            return self.reduced(stage, points)[1]
        extremes, places = self.reduced(place, points)
        for p, value in zip(points, places):
            self.keep(self.known(f"stage {place.name}", [i.name for i in place.kept], p)[0], value)
        return extremes

    def place_of(self, stage: Stage) -> Stage | None:
        """The stage that is the place of a maximum or minimum."""
        for other in self.stages.values():
            if other.how == f"arg{stage.how}" and (other.kept, other.over) == (stage.kept, stage.over):
                if self.key(other.value)[0] == self.key(stage.value)[0]:
                    return other
        return None

    def reduced(self, stage: Stage, points: Sequence[Point]) -> tuple[list[Value], list[Value]]:
        """For argmax and argmin the extreme values (else nothing), and the results of the reduction."""
        wide = any(p.at[i.name].wide for p in points for i in stage.kept)
        by_lanes = not wide and self.takes_lanes(stage)
        fold = Fold(self, stage.how, kind_of(stage.value, self.kinds), wide or by_lanes)
        *outer, inner = self.loop_order(stage)
        found = _Reduction(self, stage, fold, outer, inner, by_lanes).all(points)
        return [*map(fold.extreme, found)] if fold.places else [], [*map(fold.value, found)]

    def takes_lanes(self, stage: Stage) -> bool:
        """Whether the terms run in lanes if the result does not; not if they read no operand."""
        return bool(self.reads(stage))

    def loop_order(self, stage: Stage) -> list[Index]:
        """Reduced indexes, outermost first; the last is the one with the most contiguous accesses."""
        inner = self.best(stage)
        return [*(i for i in stage.over if i.name != inner), *(i for i in stage.over if i.name == inner)]

    # ------------------------------------------------------------ bounds of terms
    def guards(self, stage: Stage, index: str, later: frozenset[str]) -> list[tuple[Guard, Node, Node]]:
        axes = {name: o.axes for name, o in self.operands.items()}
        found = guards(stage, axes, lambda n: self.key(n)[0])
        found = [g._replace(limit=None) if self.is_whole(g.value) else g for g in found]
        return along([g for g in found if g.limit or self.is_whole(g.value)], index, later)

    def divides(
        self, stage: Stage, index: str, later: Sequence[str], points: Sequence[Point]
    ) -> tuple[Cond, list[tuple[str, ...]]]:
        """Whether quotients that an index decides are places inside (else terms are 0), and the facts that then hold."""
        inside, marks = TRUE, []
        for n in vanishing(stage.value) if stage.how == "sum" else ():
            if not isinstance(n, Element) or n.beyond != 0 or n.array not in self.operands:
                continue
            for place, extent in zip(n.places, self.operands[n.array].axes):
                text, free = self.key(place)
                mark = text, self.key(extent)[0]
                if not (isinstance(place, Call) and place.function == "/") or mark in marks or index not in free:
                    continue
                at = [[p.at[v] for v in sorted(free & p.at.keys())] for p in points]
                if free & {*later} or self.is_data(place) or any(x.wide for x in at[0]):
                    continue
                if all(x is y for other in at[1:] for x, y in zip(at[0], other)):
                    where, exact = self.divided(place, points[0])
                    there = self.w.both(exact, self.w.inside(where, Whole(self.size(extent))))
                    inside = self.w.both(inside, there)
                    marks += [mark, ("divides", text)]
        return inside, marks

    def is_whole(self, node: Node) -> bool:
        return kind_of(node, self.kinds) == INTEGER

    def ranged(self, stage: Stage, p: Point) -> None:
        """Compute the bounds of the terms of its reductions, as far as they are known at a point."""
        for other in self.made_of(stage):
            for k, i in enumerate(self.loop_order(other)):
                self.range(other, i, frozenset(j.name for j in self.loop_order(other)[k + 1 :]), p)

    def made_of(self, stage: Stage) -> list[Stage]:
        """The reductions that a stage consists of, including itself."""
        found = [stage] if stage.how else []
        for node in walk(stage.value):
            other = self.stages.get(node.array) if isinstance(node, Element) else None
            if other is not None and other is not stage and not other.scan:
                found += [s for s in self.made_of(other) if s not in found]
        return found

    def range(self, stage: Stage, index: Index, later: frozenset[str], p: Point) -> tuple[Any, Any, list[Any]] | None:
        """The bounds of the terms along an index, and the facts that hold between them; None if they are unknown at the point."""
        size = self.size(index.extent)  # type: ignore[arg-type]
        found = self.guards(stage, index.name, later)
        free = sorted({*self.extents} & (frozenset().union(*(names(g.value) for g, _, _ in found)) - {index.name}))
        if not found:
            return 0, size, []
        if not {*free} <= p.at.keys():
            return None
        key, value = self.known(f"range {stage.name} {index.name}", free, p)
        if value is None:
            at = [(g, self.of(c, p), self.rest(g, r, p)) for g, c, r in found]
            at = [(g, c.base, r.base) for g, c, r in at if not c.wide and not r.wide]
            marks = {g.mark for g, _, _ in found if g.mark} - {
                g.mark for g, _, _ in found if g not in [known for known, _, _ in at]
            }
            lo, hi = self.cut(size, [(c, r) for _, c, r in at])
            value = self.keep(key, (lo, hi, sorted(marks)))
        return value

    def rest(self, guard: Guard, rest: Node, p: Point) -> Whole:
        """The summand of ``index * factor + rest`` that a guard compares with 0."""
        value = self.of(rest, p)
        if guard.limit is None:
            return value
        end = self.w.add(self.integer(self.number(value)), Whole(guard.limit.more))
        return self.w.neg(end) if guard.limit.factor > 0 else end

    def cut(self, size: Any, found: list[tuple[Any, Any]]) -> tuple[Any, Any]:
        """The range of i in which no ``c*i + r`` is below 0."""
        w, b = self.w, self.b
        lo: Any = 0
        hi = size
        hard = []
        for c, r in found:
            if isinstance(c, int) and c in (1, -1):
                lo, hi = (w.larger(lo, w.minus(0, r)), hi) if c == 1 else (lo, w.smaller(hi, w.plus(r, 1)))
            else:
                hard.append((c, r))
        if hard:
            ends = [w.plus(r, w.times(c, k)) for c, r in hard for k in (0, w.minus(size, 1))]
            inside = TRUE
            for end in ends:
                inside = w.both(inside, w.compare(">=", Whole(end), Whole(0)))
            before = b.block
            with b.if_then(w.bit(w.holds_not(inside)), likely=False):
                first: Any = 0
                last = size
                for c, r in hard:
                    up, down = w.compare(">", Whole(c), Whole(0)), w.compare("<", Whole(c), Whole(0))
                    by = w.max(w.abs(Whole(c)), Whole(1))
                    least = w.neg(w.divided(Whole(r), by)[0]).base  # ceil(-r / by)
                    most = w.plus(w.divided(Whole(r), by)[0].base, 1)
                    none = w.both(w.holds_not(w.either(up, down)), w.compare("<", Whole(r), Whole(0)))
                    first = w.where(up, Whole(w.larger(first, least)), Whole(first)).base
                    last = w.where(down, Whole(w.smaller(last, most)), Whole(last)).base
                    last = w.where(none, Whole(0), Whole(last)).base
                first, last = w.value(first), w.value(last)
                here = b.block
            first = phi(b, WORD, (word(0), before), (first, here))
            last = phi(b, WORD, (w.value(size), before), (last, here))
            lo, hi = w.larger(lo, first), w.smaller(hi, last)
        return lo, w.larger(lo, hi)

    # ------------------------------------------------------------ results
    def row(self, stages: Sequence[Stage], results: list[Stage]) -> None:
        """Compute the remaining results."""
        self.terms = dict(filter(None, map(self.stored_terms, self.stages.values())))
        ones = {i.name: Whole(0) for s in stages for i in s.kept if i.extent == Number(1)}
        self.nest(results, Point(ones), 0)

    def order(self, stage: Stage) -> list[Index]:
        """A result's indexes, outermost first: the index of a scan is last, preceded by those that the reductions it reads lack."""
        along = stage.scan[0] if stage.scan else ""
        kept = [i for i in stage.kept if i.extent != Number(1) and i.name != along]
        read = [n for n in walk(stage.value) if isinstance(n, Element) and n.array in self.stages]
        reduced = [n for n in read if self.made_of(self.stages[n.array])]
        kept.sort(key=lambda i: any(Name(i.name) not in n.places for n in reduced))
        return kept + [i for i in stage.kept if i.name == along]

    def nest(self, stages: Sequence[Stage], p: Point, depth: int) -> None:
        left = list(stages)
        while left:
            axes = self.order(left[0])
            if len(axes) == depth:
                self.complete(left.pop(0), [p])
                continue
            if left[0].scan and len(axes) == depth + 1:
                self.scan(left.pop(0), [p])
                continue
            name = axes[depth].name
            group = [left.pop(0)]
            while left and len(self.order(left[0])) > depth and self.same(group[0], left[0], depth):
                group.append(left.pop(0))
            free = frozenset(i.name for s in group for i in (*s.kept, *s.over) if i.name not in p.at)
            for stage in group:
                self.hoist(stage.value, [p], free)
                self.ranged(stage, p)
            if all(self.by_lanes(s) == name for s in group):
                self.vectors(group, [p], name)
            elif len(group) == 1 and self.rows(group[0], depth) > 1:
                self.tiles(group[0], p, name, self.rows(group[0], depth))
            else:
                self.each(group, p, name, depth)

    def same(self, one: Stage, other: Stage, depth: int) -> bool:
        """Whether two results share the loop at a depth."""
        a, b = self.order(one), self.order(other)
        last = [len(axes) - (1 if s.scan else 0) == depth + 1 for axes, s in ((a, one), (b, other))]
        lanes = [self.by_lanes(s) == axes[depth].name for axes, s in ((a, one), (b, other))]
        return (
            a[depth].name == b[depth].name
            and not one.scan
            and not other.scan
            and lanes[0] == lanes[1]
            and (lanes[0] or last[0] == last[1])
        )

    def run(self, name: str) -> tuple[Any, Any]:
        return self.bounds.get(name) or (0, self.size(self.extents[name]))

    def each(self, stages: Sequence[Stage], p: Point, name: str, depth: int) -> None:
        """The places of an index, one after the other."""
        lo, hi = map(self.w.value, self.run(name))

        def body(i: Any, carried: list) -> list:
            with self.scope():
                self.nest(stages, p.to(name, Whole(i)), depth + 1)
            return carried

        counting(self.b, lo, hi, 1, [], body)

    def rows(self, stage: Stage, depth: int) -> int:
        """How many places of an index run at once: several if they share operands, or wait for their own elements in a scan."""
        names_left = [i.name for i in self.order(stage)[depth:]]
        if len(names_left) == 1:
            return ROWS if self.beside(stage, names_left[0]) else 1
        if len(names_left) != 2 or (set(self.made_of(stage)) - {stage}):
            return 1
        row, last = names_left
        if any(row in names(g.value) for i in stage.over for g, _, _ in self.guards(stage, i.name, frozenset())):
            return 1
        if stage.scan:
            return CHAINS if self.by_lanes(stage) is None else 1
        if not stage.how or self.by_lanes(stage) != last:
            return 1
        used = [frozenset().union(*map(names, n.places)) for n in self.reads(stage)]
        again = any(last in free and row not in free for free in used) and any(row in free for free in used)
        return ROWS if again else 1

    def beside(self, stage: Stage, last: str) -> bool:
        """Whether sums by lanes at several places of a result's last index share operands."""
        made = self.made_of(stage)
        if stage.scan or self.by_lanes(stage) or len(made) != 1:
            return False
        (sum_,) = made
        if last not in {i.name for i in sum_.kept} or not self.takes_lanes(sum_):
            return False
        if any(last in names(g.value) for i in sum_.over for g, _, _ in self.guards(sum_, i.name, frozenset())):
            return False
        free = [last in frozenset().union(*map(names, n.places)) for n in self.reads(sum_)]
        return any(free) and not all(free)

    def is_tiled(self, stage: Stage) -> bool:
        return (
            stage.result
            and bool(stage.how)
            and len(self.order(stage)) > 1
            and self.rows(stage, len(self.order(stage)) - 2) > 1
        )

    def tiles(self, stage: Stage, p: Point, name: str, rows: int) -> None:
        """Several places of an index at once, then the rest one by one."""
        b, (lo, hi) = self.b, map(self.w.value, self.run(name))

        def body(n: int, i: Any) -> None:
            with self.scope():
                points = [p.to(name, Whole(b.add(i, word(k)) if k else i)) for k in range(n)]
                last = self.order(stage)[-1].name
                self.hoist(stage.value, points, frozenset({last, *(i.name for i in stage.over)}))
                if stage.scan:
                    self.scan(stage, points)
                elif last == name:
                    self.complete(stage, points)
                else:
                    self.vectors([stage], points, last)

        in_groups(b, lo, hi, rows, body)

    def vectors(self, stages: Sequence[Stage], rows: Sequence[Point], name: str) -> None:
        """The last index of rows: several vectors at once, then the rest in masked vectors."""
        b, e = self.b, self.e
        lo, hi = map(self.w.value, self.run(name))
        many = WIDE if any(self.reduces(s, name) or s.scan for s in stages) else 1

        def finish(points: list[Point]) -> None:
            with self.scope():
                for stage in stages:
                    axes = [i.name for i in self.order(stage)]
                    self.inside(stage, points, axes[axes.index(name) + 1 :])

        def whole(i: Any, carried: list) -> list:
            places = [Whole(b.add(i, word(k * e.lanes)) if k else i, 1) for k in range(many)]
            finish([p.to(name, at) for p in rows for at in places])
            return carried

        def part(i: Any, carried: list) -> list:
            at, live = Whole(i, 1), Cond(e.below(b.sub(hi, i)))
            finish([p.to(name, at, live) for p in rows])
            return carried

        full = b.add(lo, b.and_(b.sub(hi, lo), word(-many * e.lanes)))
        counting(b, lo, full, many * e.lanes, [], whole)
        counting(b, full, hi, e.lanes, [], part)

    def inside(self, stage: Stage, points: Sequence[Point], left: Sequence[str]) -> None:
        """A result at points, one place after the other along the remaining indexes."""
        if stage.scan and len(left) == 1:
            self.scan(stage, points)
        elif not left:
            self.complete(stage, points)
        else:
            self.prepare(stage.value, points)
            self.hoist(stage.value, points, frozenset({*left, *(i.name for i in stage.over)}))
            lo, hi = map(self.w.value, self.run(left[0]))

            def body(i: Any, carried: list) -> list:
                with self.scope():
                    self.inside(stage, [p.to(left[0], Whole(i)) for p in points], left[1:])
                return carried

            counting(self.b, lo, hi, 1, [], body)

    def stored_terms(self, stage: Stage) -> tuple[str, tuple[Stage, str]] | None:
        """A sum whose terms also occur in a result: the sum's name, the result, and the terms' text there.

        The sum stores its terms in the memory of the result, which reads them again: exp is computed once.  So the result may read
        nothing else, and a term reads only its own place.
        """
        results = [s for s in self.stages.values() if s.result]
        result = results[-1]
        if stage.result or stage.how != "sum" or len(stage.over) != 1 or len(results) > 1 or result.how or result.scan:
            return None
        if not stage.kept or stage.kept != result.kept[:-1]:
            return None
        (over,), last = stage.over, result.kept[-1]
        if over.extent != last.extent or last.extent == Number(1):
            return None
        term = substituted(stage.value, {over.name: Name(last.name)})
        text = self.key(term)[0]
        rest = rewritten(result.value, lambda n: ZERO if self.key(n)[0] == text else n)
        plain = all(isinstance(q, Name) for n in walk(term) if isinstance(n, Element) for q in n.places)
        others = {s.name for s in self.made_of(result)} - {s.name for s in self.made_of(stage)} - {stage.name}
        if rest == result.value or not plain or others or self.by_lanes(result) != last.name:
            return None
        if any(isinstance(n, Element) and n.array not in self.stages for n in walk(rest)):
            return None
        if not any(isinstance(n, Call) and n.function in FUNCTIONS for n in walk(term)):
            return None
        if self.operands[result.name].pointer.type.pointee != self.e.element:
            return None
        return stage.name, (result, text)

    def complete(self, stage: Stage, points: Sequence[Point]) -> None:
        """A result at points that set all its indexes."""
        self.prepare(stage.value, points)
        if stage.how:
            made = [self.known(f"stage {stage.name}", [i.name for i in stage.kept], p) for p in points]
            if any(value is None for _, value in made):
                found = self.reduce(stage, points)
                for (key, _), value in zip(made, found):
                    self.keep(key, value)
        self.again = {text: result for result, text in self.terms.values() if result is stage}
        found = [self.stage(stage, p) for p in points]
        self.again = {}
        for p, value in zip(points, found):
            self.stored(stage.name, value, p, [i.name for i in stage.kept])

    def prepare(self, node: Node, points: Sequence[Point]) -> None:
        """Compute the stages that a value reads, at all points at once."""
        for part in walk(node):
            stage = self.stages.get(part.array) if isinstance(part, Element) else None
            if stage is None or not stage.how or any(not isinstance(q, Name) for q in part.places):
                continue
            names = [i.name for i in stage.kept]
            if [q.name for q in part.places] != names or not all(v in p.at for p in points for v in names):
                continue
            missing = {}
            for p in points:
                key, value = self.known(f"stage {stage.name}", names, p)
                if value is None:
                    live = p.live if any(p.at[v].wide for v in names) else TRUE
                    missing[key[0]] = key, Point({v: p.at[v] for v in names}, live, p.loose & {*names})
            if missing:
                self.prepare(stage.value, [p for _, p in missing.values()])
                for (key, _), value in zip(missing.values(), self.reduce(stage, [p for _, p in missing.values()])):
                    self.keep(key, value)

    def scan(self, stage: Stage, points: Sequence[Point]) -> None:
        """A result along the index of its scan: the result's own elements that it reads stay in registers."""
        b, w = self.b, self.w
        along, sign = stage.scan or ("", 1)
        lo, hi = self.run(along)
        own = [n for n in walk(stage.value) if isinstance(n, Element) and n.array == stage.name]
        k = [i.name for i in stage.kept].index(along)
        texts = {self.key(n)[0]: self.lag(n.places[k], along) for n in own}
        most = max(texts.values())
        wide = any(p.at[v].wide for p in points for v in p.at)
        beyond = {self.key(n)[0]: n.beyond for n in own}
        kind = self.e.vec if wide else self.e.element
        count = w.minus(hi, lo)
        free = frozenset({along}) | {i.name for i in stage.over}
        self.hoist(stage.value, points, free)

        def body(i: Any, state: list) -> list:
            out = []
            at = Whole(w.plus(lo, i) if sign > 0 else w.minus(w.minus(hi, 1), i))
            with self.scope():
                here = [p.to(along, at) for p in points]
                for q, p in enumerate(here):
                    before = state[q * most : (q + 1) * most]  # the nearest first
                    for n in own:
                        text, free_names = self.key(n)
                        lag = texts[text]
                        value = V(b, before[lag - 1])
                        if beyond[text] != 0:
                            begun = Cond(b.icmp_signed(">=", i, word(lag)))
                            value = self.chosen(begun, value, self.as_kind(beyond[text], NUMBER))
                        key, _ = self.known(text, sorted(free_names & p.at.keys()), p)
                        self.keep(key, value)
                for q, p in enumerate(here):
                    value = self.number(self.of(stage.value, p))
                    value = self.wide(value) if wide else value
                    self.stored(stage.name, value, p, [i.name for i in stage.kept])
                    out += [value.v, *state[q * most : (q + 1) * most - 1]]
            return out

        counting(
            b,
            word(0),
            w.value(count),
            1,
            [ir.Constant(kind, [0.0] * self.e.lanes if wide else 0.0)] * (most * len(points)),
            body,
        )

    def lag(self, place: Node, along: str) -> int:
        found = terms(place) or {}
        return abs(found.get((), 0))


class _Reduction:
    """Loops of a reduction; its last index runs in lanes or one by one."""

    def __init__(self, loops: Loops, stage: Stage, fold: Fold, outer: list[Index], inner: Index, by_lanes: bool):
        self.loops, self.stage, self.fold, self.b = loops, stage, fold, loops.b
        self.outer, self.inner, self.by_lanes = outer, inner, by_lanes
        self.names = [*(i.name for i in outer), inner.name]
        windows = any(
            isinstance(n, Element) and any(not isinstance(q, Name) and {*names_in(q)} & {*self.names} for q in n.places)
            for n in walk(stage.value)
        )
        self.ways = WAYS if by_lanes or not (windows or loops.is_tiled(stage)) else 1
        self.chunk = LONG * loops.e.lanes if by_lanes else BLOCK
        self.may_be_long = fold.exact and not self.short()

    def short(self) -> bool:
        count = 1
        for i in (*self.outer, self.inner):
            count *= i.extent.value if isinstance(i.extent, Number) else self.chunk + 1  # type: ignore[operator]
        return count <= self.chunk

    def all(self, points: Sequence[Point]) -> list[list]:
        """Accumulators at points.  A short sum has separate code: totals cost as much as a dozen terms."""
        b, fold, k = self.b, self.fold, len(points)
        self.k = k * fold.n * self.ways
        if not self.may_be_long:
            return self.whole(points, False)
        count = self.loops.product([i.extent for i in (*self.outer, self.inner)])
        with b.if_else(b.icmp_signed("<=", count, word(self.chunk)), likely=True) as (short, long):
            with short:
                alone = self.whole(points, False)
                here = b.block
            with long:
                blocks = self.whole(points, True)
                there = b.block
        return [[phi(b, x.type, (x, here), (y, there)) for x, y in zip(*pair)] for pair in zip(alone, blocks)]

    def whole(self, points: Sequence[Point], long: bool) -> list[list]:
        """Accumulators per point, reduced to one lane.

        State: terms since the totals were last updated, accumulators by way and point, totals, and their rounding errors.
        """
        fold, k = self.fold, len(points)
        self.long = long
        state = [word(0), *fold.neutral * (k * self.ways), *(fold.neutral * (2 * k) if long else [])]
        with self.loops.scope():
            state = self.over([*self.outer], points, state)
        state = self.added(state, k) if long else state
        found = [state[1 + self.k + q : 2 + self.k + q] for q in range(k)] if long else self.parts(state, k)
        return [*map(fold.across, found)] if self.by_lanes else found

    def parts(self, state: list, k: int) -> list[list]:
        """The accumulators of each point joined to one."""
        n, acc = self.fold.n, state[1 : 1 + self.k]
        ways = [acc[w * k * n : (w + 1) * k * n] for w in range(self.ways)]
        return [self.fold.together([way[q * n : (q + 1) * n] for way in ways]) for q in range(k)]

    def added(self, state: list, k: int) -> list:
        """The state with the accumulators added to the totals."""
        b, start = self.b, 1 + self.k
        totals, lost = state[start : start + k], state[start + k :]
        pairs = [add_exactly(V(b, t), V(b, c), V(b, part[0])) for t, c, part in zip(totals, lost, self.parts(state, k))]
        return [word(0), *self.fold.neutral * self.k, *(t.v for t, _ in pairs), *(c.v for _, c in pairs)]

    def over(self, outer: list[Index], points: Sequence[Point], state: list) -> list:
        loops = self.loops
        left = [*(i.name for i in outer), self.inner.name]
        loops.hoist(self.stage.value, points, frozenset(left))
        if not outer:
            return self.along(points, state)
        index, *further = outer
        lo, hi, true = self.range(index, points, further)

        def body(i: Any, state: list) -> list:
            with loops.scope(), loops.knowing(true):
                at = Whole(i)
                here = [p.to(index.name, at) for p in points]
                there, marks = loops.divides(
                    self.stage, index.name, [*(i.name for i in further), self.inner.name], here
                )
                if there.known:
                    return self.over(further, here, state)
                with loops.knowing(marks), loops.scope():
                    return _when(self.b, loops.w.bit(there), lambda state: self.over(further, here, state), state)

        return counting(self.b, lo, hi, 1, state, body)

    def range(self, index: Index, points: Sequence[Point], further: Sequence[Index]) -> tuple[Any, Any, list]:
        """The bounds of the terms along an index if all points share them, else the whole range; and the facts that then hold."""
        loops = self.loops
        later = frozenset(i.name for i in (*further, self.inner)) - {index.name}
        found = [loops.range(self.stage, index, later, p) for p in points]
        if any(x is None or x is not found[0] for x in found[1:]) or found[0] is None:
            return word(0), loops.w.value(loops.size(index.extent)), []  # type: ignore[arg-type]
        lo, hi, true = found[0]
        return loops.w.value(lo), loops.w.value(hi), true

    def along(self, points: Sequence[Point], state: list) -> list:
        """The last index; in blocks if the sum may be long."""
        first, end, true = self.range(self.inner, points, [])
        with self.loops.knowing(true):
            return self.inside(points, state, first, end)

    def inside(self, points: Sequence[Point], state: list, first: Any, end: Any) -> list:
        b, k = self.b, len(points)
        if not self.long:
            return [state[0], *self.block(points, first, end, state[1 : 1 + self.k])]

        def chunk(start: Any, state: list) -> list:
            state = _when(b, b.icmp_signed(">=", state[0], word(self.chunk)), lambda s: self.added(s, k), state)
            left = b.sub(end, start)
            n = b.select(b.icmp_signed("<", left, word(self.chunk)), left, word(self.chunk))
            new = self.block(points, start, b.add(start, n), state[1 : 1 + self.k])
            return [b.add(state[0], n), *new, *state[1 + self.k :]]

        return counting(b, first, end, self.chunk, state, chunk)

    def block(self, points: Sequence[Point], start: Any, end: Any, acc: list) -> list:
        b, width = self.b, len(acc) // self.ways
        if self.by_lanes:

            def lanes(i: Any, left: Any, acc: list) -> list:
                live = TRUE if left is None else Cond(self.loops.e.below(left))
                return self.take(points, Whole(b.add(start, i), 1), live, acc)

            return _vectors(self.loops.e, b.sub(end, start), lanes, acc, self.ways)

        def several(i: Any, acc: list) -> list:
            out = []
            for w in range(self.ways):
                out += self.take(points, Whole(b.add(i, word(w)) if w else i), None, acc[w * width : (w + 1) * width])
            return out

        if self.ways == 1:
            return counting(b, start, end, 1, acc, several)
        whole = b.add(start, b.and_(b.sub(end, start), word(-self.ways)))
        acc = counting(b, start, whole, self.ways, acc, several)
        return [
            *counting(b, whole, end, 1, acc[:width], lambda i, acc: self.take(points, Whole(i), None, acc)),
            *acc[width:],
        ]

    def take(self, points: Sequence[Point], at: Whole, live: Cond | None, acc: list) -> list:
        """The accumulators with the terms at a place of the last index."""
        loops, fold, out = self.loops, self.fold, []
        with loops.scope():
            here = [p.to(self.inner.name, at, live) for p in points]
            loops.prepare(self.stage.value, here)
            for q, p in enumerate(here):
                value = loops.of(self.stage.value, p)
                if self.stage.name in loops.terms:
                    result, _ = loops.terms[self.stage.name]
                    last = result.kept[-1].name
                    loops.stored(result.name, value, p.to(last, at), [i.name for i in result.kept])
                place = self.place(p) if fold.places else None
                out += fold.with_term(acc[q * fold.n : (q + 1) * fold.n], value, place, p.live)
        return out

    def place(self, p: Point) -> Whole:
        """The number of a term among all."""
        w, place = self.loops.w, Whole(0)
        for i in self.stage.over:
            place = w.add(w.mul(place, Whole(self.loops.size(i.extent))), p.at[i.name])  # type: ignore[arg-type]
        return place


def names_in(node: Node) -> set[str]:
    return {n.name for n in walk(node) if isinstance(n, Name)}

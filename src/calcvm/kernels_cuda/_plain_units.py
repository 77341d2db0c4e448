"""Division of a plain row's stages for a GPU: loops over units, which a block of threads processes in batches.

A unit is one value of each of the results' leading indexes.  A *temporary*, which all elements of a unit read, is in shared memory.
The block reduces it before setting any of these elements, so a result may overwrite an operand that the temporary reads.

    y[r,g,j] = x[r,g,j] - t[r] - u[r,g]     for each r: t, then for batches of (r, g): u, then all y of the batch
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from calcvm.equations.plain import Plain, Stage
from calcvm.equations.tree import Element, Index, Name, arrays, walk
from calcvm.errors import CalcError


@dataclass(eq=False)
class Units:
    """A loop over the units of some indexes.

    inside : the stages and loops of a batch of units, in order.  A loop that contains another processes one unit at a time.
    level : the number of loops around it.
    """

    indexes: tuple[Index, ...]
    level: int = 0
    inside: list[Stage | Units] = field(default_factory=list)

    @property
    def single(self) -> bool:
        return any(isinstance(part, Units) for part in self.inside)

    def loops(self) -> Iterable[Units]:
        yield self
        for part in self.inside:
            if isinstance(part, Units):
                yield from part.loops()

    def wide(self) -> list[Stage]:
        """The stages that the block reduces per unit: temporaries, and results without further indexes."""
        stages = [part for part in self.inside if isinstance(part, Stage)]
        return [s for s in stages if s.how and (not s.result or s.kept == self.indexes)]


class Cut:
    """The loops of a row.

    root : the loop that workers share.  home : by name, the loop in which a temporary is in shared memory; other temporaries are
    reduced by each thread that reads them.
    """

    def __init__(self, plain: Plain, stages: Sequence[Stage]):
        self.name, self.stages = plain.name, stages
        self.by_name = {stage.name: stage for stage in stages}
        self.results = [stage for stage in stages if stage.result]
        self.scans = {s.scan[0] for s in self.results if s.scan}
        self.common = self.begin()
        self.needs: dict[str, tuple[Index, ...]] = {}  # the indexes that the loop of a stage must have
        for result in self.results:
            self.chain(result)
        self.root = Units(self.first())
        self.home: dict[str, Units] = {}
        self.fill(self.root, [s for s in stages if s.name in self.needs or self.is_own(s)])
        self.check()

    def wrong(self, what: str) -> CalcError:
        return CalcError(f"row {self.name!r}: {what}")

    def reads(self, stage: Stage) -> dict[str, Stage]:
        """The temporaries that a stage reads, directly or indirectly."""
        found: dict[str, Stage] = {}
        for name in arrays(stage.value):
            of = self.by_name.get(name)
            if of is not None and not of.result:
                found |= {name: of} | self.reads(of)
        return found

    def begin(self) -> tuple[Index, ...]:
        """The indexes that all results begin with and that no scan runs along."""
        found: list[Index] = []
        for at_once in zip(*(s.kept for s in self.results)):
            if {*at_once} != {at_once[0]} or at_once[0].name in self.scans:
                break
            found.append(at_once[0])
        return tuple(found)

    def chain(self, result: Stage) -> None:
        """Nested loops for the temporaries of a result that have fewer indexes."""
        chosen: list[tuple[Index, ...]] = [()]
        fewer = [
            s for s in self.reads(result).values() if len(s.kept) < len(result.kept) and _within(s.kept, result.kept)
        ]
        fewer = [s for s in fewer if s.kept and s.kept[:1] == (self.common[:1] or s.kept[:1])]
        for of in sorted(fewer, key=lambda s: (s.kept != result.kept[: len(s.kept)], len(s.kept))):
            if result.scan and result.scan[0] in {i.name for i in of.kept}:
                if of.kept == result.kept[: len(of.kept)]:
                    raise self.wrong(f"{result.name} is a scan, and reads {of.name} of all lines: make that an operand")
            elif all(_nested(of.kept, other) for other in chosen):
                chosen.append(of.kept)
                self.needs[of.name] = of.kept
        self.needs[result.name] = max(chosen, key=len)

    def first(self) -> tuple[Index, ...]:
        """The indexes of the outermost loop: in each of its units, stages read only results of the same unit."""
        if not self.common:
            return ()
        needed = [kept for kept in self.needs.values() if kept]
        root = min(needed, key=len) if needed else self.common
        while not all(_within(root, s.kept) and self.is_own_of(s, self.results, root) for s in self.results) or not all(
            _nested(root, kept) for kept in needed
        ):
            root = root[:-1]
        return root

    def is_own_of(self, stage: Stage, made: Iterable[Stage], indexes: tuple[Index, ...]) -> bool:
        """Whether a stage reads from others only elements with its own values of the indexes."""
        others, kept = {s.name: s for s in made if s is not stage}, {i.name for i in stage.kept}
        for of in (stage, *self.reads(stage).values()):
            for node in walk(of.value):
                made_by = others.get(node.array) if isinstance(node, Element) else None
                if made_by is not None and isinstance(node, Element):
                    for axis, place in zip(made_by.kept, node.places):
                        if axis in indexes and (place != Name(axis.name) or axis.name not in kept):
                            return False
        return True

    def is_own(self, stage: Stage) -> bool:
        """Whether it is a temporary whose indexes are all in the only loop, in any order."""
        deeper = any(len(kept) > len(self.root.indexes) for kept in self.needs.values())
        return not stage.result and not deeper and {i.name for i in stage.kept} <= {i.name for i in self.root.indexes}

    def fill(self, loop: Units, stages: Sequence[Stage]) -> None:
        """Put stages into a loop; runs of stages with more indexes go to an inner loop."""
        left = list(stages)
        while left:
            stage = left.pop(0)
            indexes = self.needs.get(stage.name, ())
            if len(indexes) <= len(loop.indexes):
                loop.inside.append(stage)
                if not stage.result:
                    self.home[stage.name] = loop
                continue
            run, inner = [stage], Units(indexes, loop.level + 1)
            for other in list(left):
                reads = {*self.reads(other)} | {*arrays(other.value)}
                if self.needs.get(other.name, ())[: len(indexes)] == indexes and self.is_own_of(other, run, indexes):
                    run.append(other)
                elif other.result or reads & {s.name for s in run}:
                    break
                else:  # comes before all that read it
                    self.fill(loop, [other])
                left.remove(other)
            loop.inside.append(inner)
            self.fill(inner, run)

    def check(self) -> None:
        """Reject stages that one worker cannot compute alone, and reads after the loop of a temporary."""
        for stage in self.stages if self.common else ():
            if not self.is_own_of(stage, self.results, self.common[:1]):
                raise self.wrong(f"{stage.name} reads a result where another worker may set it")
        for loop, known in self.around(self.root, ()):
            for stage in loop.inside:
                for name in self.reads(stage) if isinstance(stage, Stage) else ():
                    if name in self.home and self.home[name] not in known:
                        raise self.wrong(
                            f"{stage.name} reads {name} after the loop that computes it: make it an operand"
                        )

    def around(self, loop: Units, outside: tuple[Units, ...]) -> Iterable[tuple[Units, tuple[Units, ...]]]:
        known = (*outside, loop)
        yield loop, known
        for part in loop.inside:
            if isinstance(part, Units):
                yield from self.around(part, known)


def _within(some: Sequence[Index], all_: Sequence[Index]) -> bool:
    """Whether these are among all, in the same order."""
    left = iter(all_)
    return all(index in left for index in some)


def _nested(a: Sequence[Index], b: Sequence[Index]) -> bool:
    """Whether one begins with the other."""
    n = min(len(a), len(b))
    return a[:n] == b[:n]

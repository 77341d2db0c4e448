"""How the stages of a plain row are cut for a GPU: loops over units, which a block of threads does a batch at a time.

A unit is one value of each of some leading indexes of results.  What all elements of a unit read, a *temporary* in shared memory, is
reduced by the block before any of these is set: so a result may lie in the place of an operand that the temporary reads.

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

    inside : what is done for a batch of units, in order.  A loop that has another in it does one unit at a time.
    level : of loops around it.
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
        """What the block reduces for each unit: temporaries, and results that have no other index."""
        stages = [part for part in self.inside if isinstance(part, Stage)]
        return [s for s in stages if s.how and (not s.result or s.kept == self.indexes)]


class Cut:
    """The loops of a row.

    root : over what workers share.  home : by name, the loop in which a temporary is in shared memory; others a thread reduces where
    it reads them.
    """

    def __init__(self, plain: Plain, stages: Sequence[Stage]):
        self.name, self.stages = plain.name, stages
        self.by_name = {stage.name: stage for stage in stages}
        self.depth = self.depths()
        common = self.common()
        self.root = Units(common[: min([*filter(None, self.depth.values()), len(common)])])
        self.home: dict[str, Units] = {}
        self.fill(self.root, [s for s in stages if s.name in self.depth or self.is_own(s)])
        self.check()

    def wrong(self, what: str) -> CalcError:
        return CalcError(f"row {self.name!r}: {what}")

    def reads(self, stage: Stage) -> dict[str, Stage]:
        """Temporaries that it reads, and that these read."""
        found: dict[str, Stage] = {}
        for name in arrays(stage.value):
            of = self.by_name.get(name)
            if of is not None and not of.result:
                found |= {name: of} | self.reads(of)
        return found

    def depths(self) -> dict[str, int]:
        """Of each result, and of each temporary that has the first indexes of one, how many of these are around it."""
        found: dict[str, int] = {}
        for result in [s for s in self.stages if s.result]:
            names = [i.name for i in result.kept]
            most = names.index(result.scan[0]) if result.scan else len(names)
            found[result.name] = 0
            for of in self.reads(result).values():
                n = len(of.kept)
                if 0 < n < len(names) and of.kept == result.kept[:n]:
                    if n > most:
                        raise self.wrong(f"{result.name} is a scan, and reads {of.name} of all lines: make that an operand")
                    found[of.name] = n
                    found[result.name] = max(found[result.name], n)
        return found

    def common(self) -> tuple[Index, ...]:
        """The indexes that all results begin with, and none scans along."""
        results = [s for s in self.stages if s.result]
        scans = {s.scan[0] for s in results if s.scan}
        found: list[Index] = []
        for at_once in zip(*(s.kept for s in results)):
            if {*at_once} != {at_once[0]} or at_once[0].name in scans:
                break
            found.append(at_once[0])
        return tuple(found)

    def is_own(self, stage: Stage) -> bool:
        """Whether it is a temporary of no more indexes than the only loop has, in whatever order."""
        deeper = any(depth > len(self.root.indexes) for depth in self.depth.values())
        return not stage.result and not deeper and {i.name for i in stage.kept} <= {i.name for i in self.root.indexes}

    def fill(self, loop: Units, stages: Sequence[Stage]) -> None:
        """Do stages in a loop: neighbours of more indexes in one inside it."""
        around, k = len(loop.indexes), 0
        while k < len(stages):
            stage, deep = stages[k], self.depth.get(stages[k].name, 0)
            if deep <= around:
                loop.inside.append(stage)
                if not stage.result:
                    self.home[stage.name] = loop
                k += 1
                continue
            end = k + 1
            while end < len(stages) and self.depth[stages[end].name] >= deep and stages[end].kept[:deep] == stage.kept[:deep]:
                end += 1
            inner = Units(stage.kept[:deep], loop.level + 1)
            loop.inside.append(inner)
            self.fill(inner, stages[k:end])
            k = end

    def check(self) -> None:
        """Refuse what a worker cannot do alone, and what would be read after its loop."""
        shared = self.root.indexes[:1]
        for stage in self.stages if shared else ():
            for node in walk(stage.value):
                of = self.by_name.get(node.array) if isinstance(node, Element) else None
                own = shared[0] in stage.kept and isinstance(node, Element) and node.places[:1] == (Name(shared[0].name),)
                if of and of.result and not own:
                    raise self.wrong(f"{stage.name} reads {of.name} where another worker may set it")
        for loop, known in self.around(self.root, ()):
            for stage in loop.inside:
                for name in self.reads(stage) if isinstance(stage, Stage) else ():
                    if name in self.home and self.home[name] not in known:
                        raise self.wrong(f"{stage.name} reads {name} behind what sets others of it: make it an operand")

    def around(self, loop: Units, outside: tuple[Units, ...]) -> Iterable[tuple[Units, tuple[Units, ...]]]:
        known = (*outside, loop)
        yield loop, known
        for part in loop.inside:
            if isinstance(part, Units):
                yield from self.around(part, known)

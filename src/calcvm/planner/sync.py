"""Barriers: needed if a worker touches cells that another worker wrote, or overwrites cells that another still reads.

The decision uses addresses, so it follows packing.  Two rows conflict if they touch a common cell and one
of them writes it, unless both divide the cells among the workers in the same way for every batch size.
Rows run in the order of a path's sections.  The last row of a path always has a barrier; the loop
over rounds has its own before and after a round (`calcvm.vm.run.loop.run_rounds`).

Flags are set as late as possible.  All workers meet inside a row with several phases, so no other barrier is needed between the
rows before it and those after it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence

from calcvm.ops.dims import ZERO
from calcvm.ops.sizes import Extent
from calcvm.ops.spec import Operand
from calcvm.ops.statement import Statement, Value
from calcvm.planner.lifetimes import Machine, at_most, operands

Access = tuple[int, int, object]  # [start, stop) of cells, and how the workers divide them


def _sharing(o: Operand, st: Statement, start: int, extent: Extent, batch: int, machine: Machine) -> object:
    """A key: two accesses with equal keys give each worker the same cells, for each batch up to ``batch``.

    None matches no key.
    """
    if o.part == "w0":
        return "worker 0"
    units = machine.size(o.part, st).until(batch) if o.part else ZERO
    if units == 1:
        return "last worker"
    if units.bounds(batch)[0] > 0:
        return (start, extent.until(batch), units)
    own = o.access == "s" and not machine.gpu and phases(st, batch, machine)[1] == 1
    return (start, extent.until(batch), "scratch") if own else None


def phases(st: Statement, batch: int, machine: Machine) -> tuple[int, int]:
    """The fewest and the most phases of a statement for batches up to ``batch``."""
    return machine.size(st.spec.phases, st).bounds(batch) if st.spec.phases != "1" else (1, 1)


def barriers(
    statements: Sequence[Statement], offsets: Mapping[Value, int], batch: int, machine: Machine
) -> tuple[bool, ...]:
    """Whether a barrier follows each statement: as few as possible, each as late as possible."""
    flags = [False] * len(statements)
    pending = _Touched()  # since the last barrier
    for t, st in enumerate(statements):
        if t and st.path != statements[t - 1].path:
            flags[t - 1] = True
            pending = _Touched()
        own: dict[Access, bool] = {}
        for o, v in operands(st):
            extent = machine.extent(o, st)
            start = machine.start(o.name, v, st, offsets)
            stop = start + at_most(extent, batch)
            if stop > start:
                key = (start, stop, _sharing(o, st, start, extent, batch, machine))
                own[key] = own.get(key, False) or o.writes
        if any(pending.conflicts(key, writes) for key, writes in own.items()):
            flags[t - 1] = True
            pending = _Touched()
        if phases(st, batch, machine)[0] > 1:  # the row has a barrier inside
            pending = _Touched()
        for key, writes in own.items():
            pending.add(key, writes)
    if flags:
        flags[-1] = True
    return tuple(flags)


NOBODY = object()


class _Touched:
    """Touched cells, as sorted disjoint intervals.

    ways : per interval, how the workers divide it in all accesses, and in writes; None if two accesses disagree.
    """

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.stops: list[int] = []
        self.ways: list[tuple[object, object]] = []

    def conflicts(self, access: Access, writes: bool) -> bool:
        start, stop, how = access
        for i in range(bisect_right(self.stops, start), len(self.starts)):
            if self.starts[i] >= stop:
                return False
            before = self.ways[i][not writes]  # a read conflicts with writes only
            if before is not NOBODY and (how is None or before != how):
                return True
        return False

    def add(self, access: Access, writes: bool) -> None:
        start, stop, how = access
        i, j = bisect_right(self.stops, start), bisect_left(self.starts, stop)
        starts: list[int] = []
        stops: list[int] = []
        ways: list[tuple[object, object]] = []

        def put(a: int, b: int, way: tuple[object, object]) -> None:
            if a < b and stops and stops[-1] == a and ways[-1] == way:
                stops[-1] = b
            elif a < b:
                starts.append(a)
                stops.append(b)
                ways.append(way)

        own, at = (how, how if writes else NOBODY), start
        for k in range(i, j):
            a, b, (every, written) = self.starts[k], self.stops[k], self.ways[k]
            put(a, start, self.ways[k])
            put(at, a, own)
            put(max(a, start), min(b, stop), (_both(every, how), _both(written, how) if writes else written))
            put(stop, b, self.ways[k])
            at = b
        put(at, stop, own)
        self.starts[i:j], self.stops[i:j], self.ways[i:j] = starts, stops, ways


def _both(before: object, how: object) -> object:
    """The key of cells that two accesses touch."""
    return how if before is NOBODY or before == how else None

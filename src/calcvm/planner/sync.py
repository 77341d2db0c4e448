"""Barriers: where a worker would touch what another worker wrote, or overwrite what it still reads.

Decided on addresses, after the offsets: two rows with no barrier between them are in conflict if they
touch a common cell, one of them writing, unless both share the cells among the workers in the same way
for every batch size.  Rows run in the order of a path's sections; the last row of a path always has a
barrier.  Any other jump from row to row needs a barrier of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from calcvm.ops.dims import ZERO
from calcvm.ops.sizes import Extent
from calcvm.ops.spec import Operand
from calcvm.ops.statement import Statement, Value
from calcvm.planner.lifetimes import Machine, at_most, operands

Access = tuple[int, int, object]  # [start, stop) of cells, and how the workers share them


def _sharing(o: Operand, st: Statement, start: int, extent: Extent, batch: int, machine: Machine) -> object:
    """A key: two accesses with equal keys give each worker the same cells, for each batch up to ``batch``.

    None: agrees with nothing.
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
    """Whether each statement is followed by a barrier: the fewest, each as late as possible."""
    flags = [False] * len(statements)
    pending: dict[Access, bool] = {}  # accesses since the last barrier: written?
    for t, st in enumerate(statements):
        if t and st.path != statements[t - 1].path:
            flags[t - 1] = True
            pending.clear()
        own: dict[Access, bool] = {}
        for o, v in operands(st):
            extent = machine.extent(o, st)
            start = machine.start(o.name, v, st, offsets)
            stop = start + at_most(extent, batch)
            if stop > start:
                key = (start, stop, _sharing(o, st, start, extent, batch, machine))
                own[key] = own.get(key, False) or o.writes
        if _conflict(pending, own):
            flags[t - 1] = True
            pending.clear()
        if phases(st, batch, machine)[0] > 1:  # all meet inside
            pending.clear()
        for key, writes in own.items():
            pending[key] = pending.get(key, False) or writes
    if flags:
        flags[-1] = True
    return tuple(flags)


def _conflict(earlier: Mapping[Access, bool], later: Mapping[Access, bool]) -> bool:
    return any(
        start < b and a < stop and (writes or wrote) and (how is None or how != before)
        for (start, stop, how), writes in later.items()
        for (a, b, before), wrote in earlier.items()
    )

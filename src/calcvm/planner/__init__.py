"""The planner: pure functions over statements that choose every offset before anything is allocated.

``plan(lowered, itemsize=4, batch_size=100)`` orders the statements, merges updates, and works in place if
the operators allow it.  Then it packs all values into one heap and sets the barriers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from calcvm.errors import PlanError
from calcvm.ops.statement import Lowered, Statement, Value
from calcvm.planner.batch import cannot_count, largest_batch
from calcvm.planner.costs.reckoned import seconds
from calcvm.planner.layout import PERSISTENT_ZONES, Layout, lay_out
from calcvm.planner.lifetimes import Machine, other_ways
from calcvm.planner.merge import Groups, merge_rows
from calcvm.planner.order import improve
from calcvm.planner.packing.pack import Packing, load
from calcvm.planner.paging import File, left_in, may_persist, streamed, with_reads_ahead
from calcvm.planner.recomputation.program import Recomputed, paging_of, recompute_within
from calcvm.planner.result import Plan, Zone
from calcvm.planner.sync import barriers
from calcvm.planner.workspace import with_least

if TYPE_CHECKING:
    from calcvm.planner.recomputation.race import Solvers, Tell

__all__ = ["Plan", "Zone", "plan"]

EFFORT = 40_000  # placements that the packer may try if a gap to the bound remains: about 0.2 s
ATTEMPTS = 4  # schedules to search for if packing adds to the peak of one


def plan(
    lowered: Lowered,
    *,
    itemsize: int,
    batch_size: int | None = None,
    memory: int | None = None,
    workers: int = 1,
    device: str = "cpu",
    least: bool = False,
    merge_updates: bool = True,
    recompute: bool = False,
    solver_seconds: float = 0.0,
    tell: Tell | None = None,
    cost: Callable[[Statement], float] | None = None,
    file: File | None = None,
    stream: Sequence[str] = (),
    effort: int = EFFORT,
    as_given: bool = False,
) -> Plan:
    """Plan a program for a batch size, or for the largest batch that a budget allows.

    Parameters
    ----------
    lowered : the program as statements.
    itemsize : bytes of a heap element, 4 or 8.
    batch_size : the largest batch that will run; None: the largest that ``memory`` allows.
    memory : budget in bytes, a hard cap.
    workers : the largest team that will run the program (scratch is sized for it).
    device : on "cuda" workers are thread blocks, on "small" storage is not in cache lines.
    least : rows get the minimal scratch, not the scratch that is fastest.
    recompute : the backward may recompute values of the forward if ``batch_size`` does not fit into ``memory``.
    solver_seconds : time for solvers to search for the cheapest recomputation and for a packing without a gap (0: no solver).
    tell : callback while solvers run, with the seconds, the overhead and the lower bound so far.
    cost : function from a statement to seconds; None: estimated from operations and bytes.
    file : page file in which values of the forward may wait for the backward (None: no file).
    stream : kinds of values, "optimizer" or "parameter", whose large members may persist in that file: the fewest that
        suffice, or all.
    as_given : keep the statements and their order.

    Raises
    ------
    PlanError
        If the program does not fit into ``memory``, with the bytes needed and allowed.
    """
    if itemsize not in (4, 8):
        raise PlanError(f"itemsize must be 4 (float32) or 8 (float64), not {itemsize}")
    if batch_size is None and memory is None:
        raise PlanError("give a batch size, or the memory to fill")
    if batch_size is not None and batch_size < 1:
        raise PlanError(f"batch_size must be at least 1, not {batch_size}")
    if workers < 1:
        raise PlanError(f"workers must be at least 1, not {workers}")
    machine = Machine(itemsize, workers, device)
    _check_machine(lowered, machine)
    if least:
        lowered = with_least(lowered, machine)

    def prepare(ordered: Lowered) -> tuple[Lowered, Groups, Layout]:
        merged, groups = merge_rows(with_reads_ahead(ordered, itemsize), machine, merge_updates and not as_given)
        return merged, groups, lay_out(merged, groups, machine)

    def missing(ordered: Lowered) -> int:
        assert batch_size is not None and memory is not None
        return prepare(ordered)[2].required(batch_size, effort, memory) - memory

    def largest(layout: Layout, allowed: int) -> int:
        return largest_batch(
            allowed,
            lambda b: max(layout.load(b)),
            lambda b: layout.required(b, effort, allowed),
            lambda b: cannot_count(lowered.statements, b) is None,
        )

    def in_order(batch: int) -> Lowered:
        return lowered if as_given else improve(lowered, batch, machine)

    ordered = in_order(batch_size or 1)
    if stream and file is not None:
        ordered = _streamed(ordered, may_persist(ordered, stream, machine), machine, missing)
        file = left_in(file, ordered, machine)
    merged, groups, layout = prepare(ordered)
    if batch_size is None:
        assert memory is not None
        batch_size = largest(layout, memory)
        tried = {ordered.statements}
        todo = _near(batch_size)
        while todo:  # the best order depends on the batch, and the order of another batch may be better
            again = in_order(todo.pop(0))
            if again.statements not in tried:
                tried.add(again.statements)
                other = prepare(again)
                with suppress(PlanError):
                    if (better := largest(other[2], memory)) > batch_size:
                        ordered, (merged, groups, layout), batch_size = again, other, better
                        todo = _near(batch_size)
    elif memory is not None and not stream and (needed := layout.required(batch_size, effort, memory)) > memory:
        for near in _near(batch_size)[1:]:
            again = in_order(near)
            if again.statements != ordered.statements:
                other = prepare(again)
                if (less := other[2].required(batch_size, effort, memory)) < needed:
                    ordered, (merged, groups, layout), needed = again, other, less
    if st := cannot_count(merged.statements, batch_size):
        raise PlanError(
            f"a batch of {batch_size:,} is more than row {st.spec.name!r} (of {st.label}) can count: take a smaller batch"
        )

    def packed(layout: Layout, batch: int) -> Packing:
        found = layout.pack(batch, effort)
        if solver_seconds and (memory is None or max(layout.load(batch)) <= memory):
            return layout.close_gap(batch, found, solver_seconds, memory or 0)
        return found

    cost = cost or partial(seconds, batch=batch_size, machine=machine)
    if file is not None:
        cost = file.cost(cost, batch_size, machine)
    done = Recomputed(ordered, overhead=max(m / w for m, w in _paging(ordered, cost)) if stream else 0.0)
    packing = packed(layout, batch_size)
    may = recompute or file is not None
    if may and memory is not None and layout.fixed(batch_size) + packing.height * machine.line > memory:
        solvers = None
        if solver_seconds:
            from calcvm.planner.recomputation.race import Solvers  # processes and pipes, which few plans need

            solvers = Solvers(solver_seconds, tell)
        done, (merged, groups, layout) = _recomputed(
            ordered, batch_size, machine, memory, prepare, effort, solvers, cost, recompute, file
        )
        packing = packed(layout, batch_size)
    offsets, bounds = layout.place(batch_size, packing)
    live = layout.load(batch_size)
    needed = bounds["arena"][1]
    if memory is not None and needed > memory:
        raise PlanError(
            f"a batch of {batch_size} needs {needed:,} bytes, {memory:,} are allowed: "
            f"allow more memory{other_ways(batch_size, machine.workers)}",
            needed,
            memory,
        )
    return Plan(
        lowered=merged,
        offsets=offsets,
        sync=barriers(merged.statements, offsets, batch_size, machine),
        zones=_zones(layout, batch_size, bounds),
        heap_elems=needed // itemsize,
        itemsize=itemsize,
        batch_size=batch_size,
        workers=workers,
        live_bytes=tuple(live),
        lower_bound_bytes=max(live),
        blocks=groups.blocks,
        layout=layout,
        effort=effort,
        recomputed=done.recomputed,
        overhead=done.overhead,
        lower_bound=done.lower_bound,
        proved=done.proved,
        solver=done.solver,
        solver_seconds=done.solver_seconds,
        memory_bytes=memory,
    )


def _streamed(ordered: Lowered, may: Sequence[Value], machine: Machine, missing: Callable[[Lowered], int]) -> Lowered:
    """The program with the fewest values of ``may`` in the file that let the rest fit: a prefix, and from the end the first that then suffices.

    If the program does not fit even with all of them in the file, all of them go there.

    missing : bytes by which a program exceeds the memory.
    """

    def fits(paged: Sequence[Value]) -> bool:
        return missing(streamed(ordered, {*paged}, machine)) <= 0

    n = bisect_left(range(len(may)), True, key=lambda n: fits(may[: n + 1]))
    first, rest = may[:n], may[n:]
    last = bisect_left(range(len(rest)), True, key=lambda k: fits([*first, rest[-1 - k]]))
    return streamed(ordered, {*first, *rest[len(rest) - 1 - last :][:1]}, machine)


def _recomputed(
    ordered: Lowered,
    batch: int,
    machine: Machine,
    memory: int,
    prepare: Callable[[Lowered], tuple[Lowered, Groups, Layout]],
    effort: int,
    solvers: Solvers | None,
    cost: Callable[[Statement], float],
    again: bool,
    file: File | None,
) -> tuple[Recomputed, tuple[Lowered, Groups, Layout]]:
    """A program that fits by recomputation, prepared.

    If packing needs more than the peak, the search is repeated with that much less memory.
    After that, the schedule of the search alone may be cheaper than the one from the solvers.
    """
    fixed = prepare(ordered)[2].fixed(batch)
    bound: float | None = None
    searched: tuple[Recomputed, tuple[Lowered, Groups, Layout]] | None = None
    for _ in range(ATTEMPTS):
        done = recompute_within(ordered, batch, machine, memory, fixed, cost, solvers, again, file)
        if bound is None:  # later attempts have less memory, so their bounds do not hold for this problem
            bound = done.lower_bound
        prepared = prepare(done.lowered)
        over = prepared[2].required(batch, effort, memory) - memory
        if over <= 0:
            break
        fixed += over
        if solvers is not None and searched is None:
            with suppress(PlanError):
                searched = _recomputed(ordered, batch, machine, memory, prepare, effort, None, cost, again, file)
    if searched is not None and searched[1][2].required(batch, effort, memory) <= memory:
        if over > 0 or searched[0].overhead < done.overhead:
            done, prepared = searched
    if solvers is not None:
        proved = bound is not None and solvers.proves(bound, done.overhead)
        done = replace(
            done, lower_bound=bound, proved=proved, solver=solvers.says(proved), solver_seconds=solvers.spent
        )
    return done, prepared


def _paging(lowered: Lowered, cost: Callable[[Statement], float]) -> Iterator[tuple[float, float]]:
    """Per path: the cost of its paging statements, and of all others."""
    for path in lowered.paths:
        yield paging_of([st for st in lowered.statements if st.path == path], cost)


def _near(batch: int) -> list[int]:
    """Batches whose best order may be better for this batch too."""
    return [batch, batch + 1, batch + batch // 8 + 1]


def _check_machine(lowered: Lowered, machine: Machine) -> None:
    """Check that lowering sized scratch for the planned number of workers."""
    for st in lowered.statements:
        if st.words.get("nw", machine.workers) < machine.workers:
            raise PlanError(f"{st.label}: lowered for {st.words['nw']} workers, planned for {machine.workers}")


def _zones(layout: Layout, batch: int, bounds: dict[str, tuple[int, int]]) -> dict[str, Zone]:
    itemsize = layout.machine.itemsize
    out = {}
    for name in ("reserved", *PERSISTENT_ZONES, "workspace", "arena"):
        start, stop = bounds.get(name, (0, 0))
        if name == "carry" and start == stop:
            continue
        resident = [u for u in layout.resident if name in (u.zone, "arena")]
        units = [u for u in layout.transient if name in (u.zone, "arena")]
        live = load([layout.size(u, batch) for u in units], [u.first for u in units], [u.last for u in units])
        own = stop - start
        out[name] = Zone(
            name,
            start // itemsize,
            stop // itemsize,
            own,
            persistent_bytes=own if name in PERSISTENT_ZONES else 0,
            resident_bytes=sum(layout.size(u, batch) for u in resident),
            transient_bytes=max(live, default=0),
        )
    if "pages" in bounds:
        start, stop = bounds["pages"]
        kept = sum(layout.size(u, batch) for u in layout.pages if u.values[0][0].kind != "page")
        rest = stop - start - kept
        out["pages"] = Zone("pages", start // itemsize, stop // itemsize, stop - start, kept, transient_bytes=rest)
    return out

"""Rewriting a program with recomputation and paging so that it fits into a memory budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING

from calcvm.errors import PlanError
from calcvm.frozen import frozen
from calcvm.ops.statement import Lowered, Statement, Value, Versions
from calcvm.planner.costs.reckoned import seconds
from calcvm.planner.inplace import may_take
from calcvm.planner.lifetimes import Machine, always_live, at_most, effects, lifetimes, operands, other_ways
from calcvm.planner.paging import PAGE, File, is_paging, page_in, page_out
from calcvm.planner.recomputation.schedule import RecomputationProblem, Run, Step
from calcvm.planner.recomputation.search import solve

if TYPE_CHECKING:
    from calcvm.planner.recomputation.race import Solvers

EARLY = ("forward", "loss")


@frozen
class Recomputed:
    """A program with recomputed statements and page reads.

    recomputed : recomputed statements, each with the statement that it repeats.
    overhead : their cost as a fraction of the cost of their path's own statements: the largest of any path.
    lower_bound : lower bound of the overhead of any schedule (None: no solver ran).
    proved : whether the bound proves that no schedule costs less.
    solver : report of the solvers, as text.
    solver_seconds : the time that they took.
    """

    lowered: Lowered
    recomputed: Mapping[Statement, Statement] = field(default_factory=dict)
    overhead: float = 0.0
    lower_bound: float | None = None
    proved: bool = False
    solver: str = ""
    solver_seconds: float = 0.0


def recompute_within(
    lowered: Lowered,
    batch: int,
    machine: Machine,
    memory: int,
    fixed: int,
    cost: Callable[[Statement], float],
    solvers: Solvers | None = None,
    again: bool = True,
    file: File | None = None,
) -> Recomputed:
    """The program with recomputation or paging so that it needs at most ``memory`` bytes.

    Parameters
    ----------
    fixed : bytes besides the transient values.
    cost : function from a statement to seconds.
    solvers : solvers that continue after the search (None: search only).
    again : whether statements may be recomputed.
    file : page file (None: no paging).

    Raises
    ------
    PlanError
        If none is found, with the least memory found and the largest single statement; or if a cost is invalid.
    """
    size = _sizes(lowered, batch, machine)
    repeated: dict[Statement, Statement] = {}
    statements: list[Statement] = []
    versions = Versions(lowered.values)
    overhead, bound = 0.0, 0.0
    for path in lowered.paths:
        own = [st for st in lowered.statements if st.path == path]
        problem, numbered = _problem(own, size, machine, batch, memory - fixed, again, file)
        floor, s = problem.floor
        if floor <= problem.limit:  # otherwise it is refused, and needs no costs
            problem = _costed(problem, own, cost)
        run = problem.run(())
        least = 0.0
        if run.excess and floor <= problem.limit:
            reckoned = partial(seconds, batch=batch, machine=machine)
            run, *others = _searched(problem, own, reckoned)
            if solvers is not None:
                answer = solvers.improve(problem, run, paging_of(own, cost)[1], others)
                run, least = answer.run, answer.bound
        if run.excess:
            below = floor > problem.limit
            needed = fixed + (floor if below else run.peak)
            what = "needs at least" if below else "was found to need no less than"
            how = " or ".join(["recomputed"] * again + ["moved to a file"] * (file is not None))
            other = "" if below or file is not None else ", let values wait in a file (page_bytes=)"
            raise PlanError(
                f"a batch of {batch} {what} {needed:,} bytes even if values are {how}, {memory:,} are allowed: allow more "
                f"memory{other}{other_ways(batch, machine.workers)} ({own[s].label or own[s].spec.name} alone needs {fixed + floor:,})",
                needed,
                memory,
            )
        moved, whole = paging_of(own, cost)
        overhead, bound = max(overhead, (moved + run.cost) / whole), max(bound, (moved + least) / whole)
        current: dict[Value, Value] = {}

        pages = {numbered[v]: versions.another(numbered[v], "page", **PAGE) for v in sorted(run.paged)}
        scheduled: list[Statement] = []
        for s, t in zip(run.order, run.stage, strict=True):
            if s < 0:
                v = numbered[problem.step(s).makes[0]]
                current[v] = versions.another(v, "again")
                scheduled.append(page_in(pages[v], current[v], own[t], machine.itemsize))
                continue
            st = own[s]
            if s == t:
                scheduled.append(st.with_values(current))
                made = [numbered[v] for v in problem.steps[s].makes if v in run.paged]
                scheduled += [page_out(v, pages[v], st, machine.itemsize) for v in made]
                continue
            for o, v in operands(st):
                if o.writes:
                    current[v] = versions.another(v, "again")
            copy = replace(st.with_values(current), phase=own[t].phase, label=f"{st.label} again")
            repeated[copy] = st
            scheduled.append(copy)
        statements += scheduled
    done = replace(lowered, statements=tuple(statements), values=tuple(versions.values))
    return Recomputed(done, repeated, overhead, bound if solvers is not None and solvers.used else None)


def _searched(
    problem: RecomputationProblem, own: Sequence[Statement], reckoned: Callable[[Statement], float]
) -> list[Run]:
    """The cheapest schedule found, and, if there is a page file, the cheapest one without it.

    If none is found with the given costs, the search runs again with estimated ones.
    """
    without = _searched(problem.without_pages(), own, reckoned) if problem.pages else []
    run = solve(problem, without)
    if run.excess:
        other = _costed(problem, own, reckoned)
        if [step.cost for step in other.steps] != [step.cost for step in problem.steps]:
            run = solve(problem, [solve(other)])
    return [run, *without]


def paging_of(statements: Sequence[Statement], cost: Callable[[Statement], float]) -> tuple[float, float]:
    """The cost of statements that read and write pages, and of all others."""
    moving = [cost(st) for st in statements if is_paging(st)]
    return sum(moving), max(sum(map(cost, statements)) - sum(moving), 1e-12)


def _sizes(lowered: Lowered, batch: int, machine: Machine) -> dict[Value, int]:
    """Bytes of all transient values, without scratch."""
    always = always_live(lowered)
    scratch = {v for st in lowered.statements for o, v in operands(st) if o.access == "s"}
    touched = lifetimes(lowered.statements)
    return {v: machine.up(at_most(machine.bytes(v), batch)) for v in touched if v not in always and v not in scratch}


def _problem(
    own: Sequence[Statement],
    size: Mapping[Value, int],
    machine: Machine,
    batch: int,
    limit: int,
    again: bool = True,
    file: File | None = None,
) -> tuple[RecomputationProblem, list[Value]]:
    """The problem of one path, without costs, and its values by number."""
    number = {v: i for i, v in enumerate(v for v in lifetimes(own) if v in size)}
    writers: dict[Value, list[int]] = {}
    for s, st in enumerate(own):
        for v in effects(st)[1]:
            writers.setdefault(v, []).append(s)
    steps: list[Step] = []
    met: set[int] = set()
    for s, st in enumerate(own):
        at = {o.name: number[v] for o, v in operands(st) if v in number}
        makes = set(at.values()) - met
        uses = set(at.values()) & met
        met |= makes
        steps.append(
            Step(
                uses=tuple(sorted(uses)),
                makes=tuple(sorted(makes)),
                pairs=tuple(
                    (at[y], at[x])
                    for y, x in st.spec.in_place
                    if at.get(y) in makes and at.get(x) in uses and may_take(st, y, x, machine)
                ),
                scratch=sum(
                    machine.up(at_most(machine.extent(o, st), batch)) for o, _ in operands(st) if o.access == "s"
                ),
                until=_until(s, st, number, writers, len(own) - 1) if again else -1,
            )
        )
    backward = next((s for s, st in enumerate(own) if st.phase == "backward"), len(own))
    values = [*number]
    sizes = [size[v] for v in values]
    if file is None:
        return RecomputationProblem(steps, sizes, backward, limit), values
    may = [number[v] for v in values if len(writers.get(v, ())) == 1 and writers[v][0] < backward]
    pages = [Step((), (v,), (), 0, len(own) - 1, file.seconds(sizes[v])) for v in may]
    written = {v: file.seconds(sizes[v]) for v in may}
    return RecomputationProblem(steps, sizes, backward, limit, pages, written, file.room), values


def _costed(
    problem: RecomputationProblem, own: Sequence[Statement], cost: Callable[[Statement], float]
) -> RecomputationProblem:
    """The problem with the costs of its statements."""
    steps = [replace(step, cost=_cost(st, cost)) for step, st in zip(problem.steps, own, strict=True)]
    return RecomputationProblem(
        steps, problem.sizes, problem.backward, problem.limit, problem.pages, problem.written, problem.room
    )


def _cost(st: Statement, cost: Callable[[Statement], float]) -> float:
    """The cost of a statement (PlanError: it is invalid)."""
    found = float(cost(st))
    if not 0 <= found < float("inf"):
        raise PlanError(
            f"{st.label or st.spec.name}: costs {found} seconds: give costs that are finite and not negative"
        )
    return found


def _until(s: int, st: Statement, number: Mapping[Value, int], writers: Mapping[Value, Sequence[int]], end: int) -> int:
    """The last statement before which a statement may run again (-1: none).

    It must be the only writer of its results, and its inputs must not have changed.
    """
    read, _ = effects(st)
    results = {v for o, v in operands(st) if o.writes and o.access != "s"}
    alone = all(v in number and writers[v] == [s] for v in results) and not results & read
    if st.phase not in EARLY or not results or not alone:
        return -1
    return min((w for v in read for w in writers.get(v, ()) if w > s), default=end)

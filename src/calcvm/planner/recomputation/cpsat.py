"""The cheapest schedule of recomputation by retention intervals, with CP-SAT of OR-Tools.

A value has a few *versions*.  The first is made in the forward; each later one is optional, and recomputed in some stage.  A
version is an interval of time, from where it is made to its last read.  Versions of a value do not overlap, and each read lies in
one of them.  A cumulative constraint keeps all versions, plus the bytes that are live in any schedule, below the limit.  After
Bartan et al. 2023 (Moccasin), with memory counted as in `Run`: a version that is overwritten at its last read ends one moment
earlier.

Time is fixed: each stage has one moment for every statement of the forward, in their order, then one for its own statement.
So schedules with that many versions and solutions correspond one to one; each is confirmed by its `Run`.

Groups of stages come first (`calcvm.planner.recomputation.bound_groups_sat`): their bounds and schedules are the starting point.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import gcd
from typing import Any

from calcvm.planner.recomputation import bound_groups
from calcvm.planner.recomputation.bound_groups_sat import Whole
from calcvm.planner.recomputation.schedule import Pair, RecomputationProblem, Run
from calcvm.planner.recomputation.stages import SMALL, Answer, SolverChannel, Stages, cheaper

UNITS = 10**9  # the cost of all of a path's statements, in the solver's units
FIRST = 3  # versions of a value in the first model
GROUPS = ((6, 0.4), (2, 0.1))  # of stages, and parts of the time: few groups find schedules early
MORE = 6  # versions of a value in the second model, at most

Reads = dict[int, dict[int, Any]]  # per value that is read, by version: whether this version is read


class Intervals:
    """A problem as intervals.

    versions : limit of the versions of each value; None: as many as can pay, at most `MORE`.
    """

    def __init__(self, problem: RecomputationProblem, known: Run, versions: int | None):
        from ortools.sat.python import cp_model

        self.cp, self.model = cp_model, cp_model.CpModel()
        self.problem, self.known, self.form = problem, known, Stages(problem)
        most = self.form.most(float("inf") if known.excess else known.cost)
        limit = MORE if versions is None else versions
        self.versions = {i: min(n + 1, limit) for i, n in most.items()}
        steps = problem.steps
        # bytes are counted in their greatest common divisor: cache lines
        self.unit = gcd(*problem.sizes, *(step.scratch for step in steps)) or 1
        # schedules with more versions cost at least this
        self.beyond = min(
            (self.versions[i] * steps[i].cost for i, n in most.items() if n + 1 > limit), default=float("inf")
        )
        self.moment: list[int] = []
        self.base: list[int] = []  # first moment of each stage
        now = 0
        for s in range(len(steps)):
            if s in self.form.of:
                self.base.append(now)
                now += problem.backward
            self.moment.append(now)
            now += 1
        self.end = now
        self.runs: dict[tuple[int, int], tuple[Any, Any]] = {}  # (statement, version): whether it runs, and when
        self.last: dict[tuple[int, int], Any] = {}  # (value, version): its last read
        self.gives: dict[tuple[int, int], list[Any]] = {}  # (value, version): whether it is overwritten at that read
        self._versions()
        self._reads()
        self._memory()
        self.scale = UNITS / max(sum(step.cost for step in steps), 1e-12)
        self.units = {i: int(steps[i].cost * self.scale) for i in self.form.again}
        self.total = sum(self.units[i] * there for (i, c), (there, _) in self.runs.items() if c)
        self.model.minimize(self.total)
        if not known.excess:
            self.model.add(self.total <= sum(self.units.get(i, 0) for _, i in known.chosen))
            self._hint()

    # ------------------------------------------------------------ versions
    def _versions(self) -> None:
        model = self.model
        for i, stages in self.form.again.items():
            own = sorted(self.form.early & {*self.problem.steps[i].makes})
            self.runs[i, 0] = True, self.moment[i]
            for c in range(1, self.versions[i]):
                there = model.new_bool_var(f"there {i} {c}")
                moments = [self.base[k] + i for k in stages]
                start = model.new_int_var_from_domain(self.cp.Domain.from_values(moments), f"start {i} {c}")
                if c > 1:
                    model.add_implication(there, self.runs[i, c - 1][0])
                self.runs[i, c] = there, start
            for v in own:
                forward = max(self.moment[t] for t in self.form.touches[v] if t < self.problem.backward)
                for c in range(self.versions[i]):
                    there, start = self.runs[i, c]
                    last = model.new_int_var(0 if c else forward, self.end, f"last {v} {c}")
                    self.last[v, c], self.gives[v, c] = last, []
                    if c:
                        model.add(last >= start).only_enforce_if(there)
                        model.add(start > self.last[v, c - 1]).only_enforce_if(there)

    def _found(self, values: Iterable[int], when: Any, there: Any) -> Reads:
        """Variables for reads of values at a moment: if the reader runs, it reads one version that is live then."""
        out: Reads = {}
        for v in values:
            i = self.problem.maker[v]
            out[v] = {}
            for c in range(self.versions[i]):
                this = self.model.new_bool_var("")
                made, start = self.runs[i, c]
                if c:
                    self.model.add_implication(this, made)
                    self.model.add(start < when).only_enforce_if(this)
                if there is not True:
                    self.model.add_implication(this, there)
                self.model.add(self.last[v, c] >= when).only_enforce_if(this)
                out[v][c] = this
            some = [*out[v].values()]
            if there is True:
                self.model.add_exactly_one(some)
            else:
                self.model.add_bool_or([*some, there.negated()])
        return out

    def _reads(self) -> None:
        steps = self.problem.steps
        for (i, c), (there, start) in self.runs.items():
            if c:
                self._placed(i, start, self._found(sorted(self.form.reads(i)), start, there))
        for s in range(len(steps)):
            if s < self.problem.backward:
                self._placed(s, self.moment[s], {v: {0: True} for v in self.form.reads(s)}, first=True)
            elif s in self.form.of:
                found = self._found(sorted(self.form.reads(s)), self.moment[s], True)
                self._placed(s, self.moment[s], found, first=True)

    def _placed(self, s: int, when: Any, read: Reads, first: bool = False) -> None:
        """Let the results of a statement overwrite versions whose last read it is."""
        pairs = self.problem.steps[s].pairs
        for y in {y for y, _ in pairs}:
            others = [x for made, x in pairs if made == y]
            if first and any(x not in self.form.early and self.form.touches[x][-1] == s for x in others):
                continue  # it overwrites that one
            takes = []
            for v, c, this in ((x, c, this) for x in others for c, this in read.get(x, {}).items()):
                take = self.model.new_bool_var("")
                self.model.add(self.last[v, c] == when).only_enforce_if(take)
                if this is not True:
                    self.model.add_implication(take, this)
                self.gives[v, c].append(take)
                takes.append(take)
            if len(takes) > 1:
                self.model.add_at_most_one(takes)

    # ------------------------------------------------------------ memory
    def _memory(self) -> None:
        model, problem = self.model, self.problem
        intervals, sizes = [], []
        for (v, c), last in self.last.items():
            there, start = self.runs[problem.maker[v], c]
            stop, length = model.new_int_var(0, self.end + 1, ""), model.new_int_var(0, self.end + 1, "")
            gives = self.gives[v, c]
            if len(gives) > 1:
                model.add_at_most_one(gives)
            model.add(stop == last + 1 - sum(gives))
            intervals.append(
                model.new_optional_interval_var(start, length, stop, there, "")
                if c
                else model.new_interval_var(start, length, stop, "")
            )
            sizes.append(-(-problem.sizes[v] // self.unit))
        for start, stop, size in self._always():
            intervals.append(model.new_fixed_size_interval_var(start, stop - start, ""))
            sizes.append(size)
        for (i, c), (there, start) in self.runs.items():
            if c and problem.steps[i].scratch > problem.limit / SMALL:
                intervals.append(model.new_optional_fixed_size_interval_var(start, 1, there, ""))
                sizes.append(-(-problem.steps[i].scratch // self.unit))
        model.add_cumulative(intervals, sizes, problem.limit // self.unit)

    def _always(self) -> list[tuple[int, int, int]]:
        """Memory that is live in any schedule: first moment, end, and units."""
        steps, load = self.problem.steps, [0] * (self.end + 1)
        for v, touches in self.form.touches.items():
            if v not in self.form.early:
                for now in range(self.moment[touches[0]], self.moment[touches[-1]] + 1):
                    load[now] += self.problem.sizes[v]
        for s, step in enumerate(steps):
            load[self.moment[s]] += step.scratch
            taken, placed = set[int](), set[int]()
            for y, x in step.pairs:
                if x not in self.form.early and self.form.touches[x][-1] == s and x not in taken and y not in placed:
                    taken.add(x)
                    placed.add(y)
                    load[self.moment[s]] -= self.problem.sizes[y]
        changes = [now for now in range(self.end + 1) if not now or load[now] != load[now - 1]]
        spans = zip(changes, [*changes[1:], self.end + 1])
        return [(start, stop, -(-load[start] // self.unit)) for start, stop in spans if load[start] > 0]

    # ------------------------------------------------------------ solutions
    def _hint(self) -> None:
        """Give the known schedule to the solver as a first solution."""
        counts = dict.fromkeys(self.form.again, 0)
        for t, i in sorted(self.known.chosen):
            if i in counts and t in self.form.of:
                counts[i] += 1
                if (run := self.runs.get((i, counts[i]))) is not None:
                    self.model.add_hint(run[0], 1)
                    self.model.add_hint(run[1], self.base[self.form.of[t]] + i)
        for (i, c), (there, _) in self.runs.items():
            if c > counts[i]:
                self.model.add_hint(there, 0)
        known = self.known
        when = [self.moment[s] if s == t else self.base[self.form.of[t]] + s for s, t in zip(known.order, known.stage)]
        for v in sorted(self.form.early):
            for c, u in enumerate(known.versions[v]):
                if (v, c) in self.last:
                    self.model.add_hint(self.last[v, c], when[known.touches[u][-1]])

    def chosen(self, value: Callable[[Any], int]) -> set[Pair]:
        """The schedule of a solution."""
        stage = {start: k for k, start in enumerate(self.base)}
        return {
            (self.form.at[stage[value(start) - i]], i)
            for (i, c), (there, start) in self.runs.items()
            if c and value(there)
        }

    def solve(self, seconds: float, found: Callable[[set[Pair]], None]) -> tuple[float, bool]:
        """A lower bound for schedules with that many versions, and whether it is reached by the best one (found or known).

        found : callback for each schedule that is cheaper than all before.
        """
        solver, outer = self.cp.CpSolver(), self
        solver.parameters.max_time_in_seconds = max(seconds, 0.0)
        solver.parameters.num_workers = 1
        solver.parameters.catch_sigint_signal = False  # it would replace Python's handler for good

        class Found(self.cp.CpSolverSolutionCallback):  # type: ignore[name-defined, misc]
            def on_solution_callback(self) -> None:
                found(outer.chosen(self.value))

        status = solver.solve(self.model, Found())
        if status == self.cp.INFEASIBLE:
            return (0.0 if self.known.excess else self.known.cost), True
        bound = max(solver.best_objective_bound, 0.0) / self.scale
        return bound, status == self.cp.OPTIMAL


def solve(problem: RecomputationProblem, known: Run, seconds: float, channel: SolverChannel) -> Answer:
    """The cheapest schedule found: by groups of stages, for a bound; then with three versions per value, then with all that can pay."""
    end, best, bound = time.monotonic() + seconds, known, 0.0
    if not known.excess:
        with suppress(ImportError):  # SciPy
            for groups, part in GROUPS:
                answer = bound_groups.solve(problem, best, seconds * part, channel, groups, Whole)
                best, bound = answer.run, max(bound, answer.bound)
    for versions, share in ((FIRST, 0.6), (None, 1.0)):
        left = end - time.monotonic()
        if left <= 0 or bound >= best.cost:
            break
        best = cheaper(best, channel.latest())
        model = Intervals(problem, best, versions)

        def found(chosen: set[Pair]) -> None:
            nonlocal best
            run = problem.run(chosen)
            if cheaper(best, run) is run:
                best = run
                channel.found(run)

        least, settled = model.solve(left * share, found)
        bound = max(bound, min(least, model.beyond))
        channel.bound(bound)
        if settled:
            channel.settled(versions or MORE)
        else:
            break
    return Answer(best, min(bound, best.cost))

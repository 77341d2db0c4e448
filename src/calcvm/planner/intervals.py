"""The cheapest schedule of recomputation by retention intervals, with CP-SAT of OR-Tools.

A value has a few *versions*: the first is made in the forward, each later one is optional and made again in some stage.  A version
is an interval of time from where it is made to its last read; versions of a value do not overlap, each read lies in one of
them, and a cumulative constraint keeps all of them, beside what is live whatever runs again, below the limit.  After
Bartan et al. 2023 (Moccasin), with memory counted as a `Run` counts it: where a version ends at the statement that makes a
value in its place, it ends one moment earlier.

Time is fixed: each stage has a moment for every statement of the forward, in their order, then one for its own.  So a
schedule of so many versions is a solution and a solution is a schedule, which its `Run` confirms.

Groups of stages come first (`calcvm.planner.grouped_sat`): what they bound, and the schedules they lead to, intervals start from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import gcd
from typing import TYPE_CHECKING, Any

from calcvm.planner import grouped
from calcvm.planner.grouped_sat import Whole
from calcvm.planner.stages import SMALL, Answer, News, Stages, cheaper

if TYPE_CHECKING:
    from calcvm.planner.recompute import Pair, Problem, Run

UNITS = 10**9  # of cost, for all of a path's statements
FIRST = 3  # versions of a value, to begin with
GROUPS = ((6, 0.4), (2, 0.1))  # of stages, to begin with, and their part of the time: few lead to other schedules soon
MORE = 6  # versions of a value at most, where all that can pay are wanted

Reads = dict[int, dict[int, Any]]  # of each value that is read: by version, whether it is the one


class Intervals:
    """A problem as intervals, of at most so many versions of each value (None: of all that can pay, at most `MORE`)."""

    def __init__(self, problem: Problem, known: Run, versions: int | None):
        from ortools.sat.python import cp_model

        self.cp, self.model = cp_model, cp_model.CpModel()
        self.problem, self.known, self.form = problem, known, Stages(problem)
        most = self.form.most(float("inf") if known.excess else known.cost)
        limit = MORE if versions is None else versions
        self.versions = {i: min(n + 1, limit) for i, n in most.items()}
        steps = problem.steps
        # bytes are counted in the largest unit that divides all: cache lines
        self.unit = gcd(*problem.sizes, *(step.scratch for step in steps)) or 1
        # schedules of more versions cost at least this
        self.beyond = min(
            (self.versions[i] * steps[i].cost for i, n in most.items() if n + 1 > limit), default=float("inf")
        )
        self.moment: list[int] = []
        self.base: list[int] = []  # of each stage, the first moment
        now = 0
        for s in range(len(steps)):
            if s in self.form.of:
                self.base.append(now)
                now += problem.backward
            self.moment.append(now)
            now += 1
        self.end = now
        self.runs: dict[
            tuple[int, int], tuple[Any, Any]
        ] = {}  # of a statement's versions: whether there is one, and when
        self.last: dict[tuple[int, int], Any] = {}  # of a value's versions, the last read
        self.gives: dict[tuple[int, int], list[Any]] = {}  # whether something lies in its place at that read
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
        """Each of the values is read at a moment, if the reader is there, from a version that lives then."""
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
        """What a statement makes may lie in the place of a version that is read last there."""
        pairs = self.problem.steps[s].pairs
        for y in {y for y, _ in pairs}:
            others = [x for made, x in pairs if made == y]
            if first and any(x not in self.form.early and self.form.touches[x][-1] == s for x in others):
                continue  # it lies in that one's
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
        """What is live whatever runs again: moments from and to, and units."""
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
        """What is known, as a solution to begin with."""
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
        """What no schedule of so many versions costs less than, and whether the cheapest of them was found (or what is known is cheaper).

        found : is told each schedule that is cheaper than those before.
        """
        solver, outer = self.cp.CpSolver(), self
        solver.parameters.max_time_in_seconds = max(seconds, 0.0)
        solver.parameters.num_workers = 1
        solver.parameters.catch_sigint_signal = False  # it would take the handler from Python, for good

        class Found(self.cp.CpSolverSolutionCallback):  # type: ignore[name-defined, misc]
            def on_solution_callback(self) -> None:
                found(outer.chosen(self.value))

        status = solver.solve(self.model, Found())
        if status == self.cp.INFEASIBLE:
            return (0.0 if self.known.excess else self.known.cost), True
        bound = max(solver.best_objective_bound, 0.0) / self.scale
        return bound, status == self.cp.OPTIMAL


def solve(problem: Problem, known: Run, seconds: float, news: News) -> Answer:
    """The cheapest schedule found: first from groups of stages, for a bound; then of three versions of a value, and of all that can pay."""
    end, best, bound = time.monotonic() + seconds, known, 0.0
    if not known.excess:
        with suppress(ImportError):  # SciPy
            for groups, part in GROUPS:
                answer = grouped.solve(problem, best, seconds * part, news, groups, Whole)
                best, bound = answer.run, max(bound, answer.bound)
    for versions, share in ((FIRST, 0.6), (None, 1.0)):
        left = end - time.monotonic()
        if left <= 0 or bound >= best.cost:
            break
        best = cheaper(best, news.latest())
        model = Intervals(problem, best, versions)

        def found(chosen: set[Pair]) -> None:
            nonlocal best
            run = problem.run(chosen)
            if cheaper(best, run) is run:
                best = run
                news.found(run)

        least, settled = model.solve(left * share, found)
        bound = max(bound, min(least, model.beyond))
        news.bound(bound)
        if settled:
            news.settled(versions or MORE)
        else:
            break
    return Answer(best, min(bound, best.cost))

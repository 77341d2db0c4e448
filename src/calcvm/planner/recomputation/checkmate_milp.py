"""Schedules of recomputation as a mixed-integer program: stages, the statements recomputed in each, and the values kept.

Stages are the statements of the backward that read values of the forward, in order.  Recomputed statements run just before a
stage, in their original order.  Variables: R[k,i], statement i of the forward runs again in stage k; S[k,v], value v is kept into
stage k.  A stage reads values that are kept into it or recomputed in it, and so do recomputed statements.  A value can only be
kept on if it was there.  After Jain et al. 2020 (Checkmate), with memory counted as in `Run`: a value lives until its last read,
and a new value may overwrite a dying one.  So the memory at a stage's own statement is linear in the values kept into the next.

Values that may wait in a file (`calcvm.planner.paging`) have two more variables.  H[v]: v is written to the file where it is made.
In[k,v]: v is read before the recomputed statements of stage k.  A page stays until the end, so H needs one variable per value,
whose cost is that of Out.  A page step needs no memory constraint: its live values are live at the next statement of its stage.

Memory while a recomputed statement runs is constrained only if a solution exceeds the limit there; then the program is solved again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from calcvm.planner.milp import Milp, Row
from calcvm.planner.recomputation.schedule import Pair, RecomputationProblem, Run
from calcvm.planner.recomputation.stages import SolverChannel, Stages, cheaper

WINDOW_SECONDS = 1.0
NEAR = 3  # neighbouring stages that are constrained too, if a solution exceeds the limit in one
UNIT = 1e6  # the solver's unit of cost is a microsecond


class ScheduleMilp(Milp):
    """The program of all stages."""

    def __init__(self, problem: RecomputationProblem, known: Run):
        super().__init__()
        self.problem = problem
        steps, first = problem.steps, problem.backward
        self.form = Stages(problem)
        self.early, self.touches = self.form.early, self.form.touches
        self.stages, again = self._stages()
        self.size = [b / max(problem.limit, 1) for b in problem.sizes]
        # 1: take the known schedule instead of the program's; so there is a solution, and a bound, at any time
        self.known = self.variable(0.0, binary=True)
        all_costs = sum(step.cost for step in (*steps, *problem.pages)) + sum(problem.written.values())
        self.dear = 2 * len(steps) * all_costs if known.excess else 0.0
        self.R = {
            (k, i): self.variable(steps[i].cost, binary=True)
            for k, i in sorted((k, i) for i, stages in again.items() for k in stages)
        }
        wanted = {v for v in self.early if self.touches[v][-1] >= first} | {
            v for _, i in self.R for v in steps[i].uses if v in self.early
        }
        self.S = {(k, v): self.variable(0.0, binary=True) for k in range(len(self.stages)) for v in sorted(wanted)}
        paged = sorted(wanted & problem.page.keys())
        self.H = {v: self.variable(problem.written[v], binary=True) for v in paged}
        self.In = {
            (k, v): self.variable(problem.step(problem.page[v]).cost, binary=True)
            for k in self.form.places
            for v in paged
        }
        self._flow()
        self._pages()
        for s in range(len(steps)):
            self.memory(s)
        self.done: set[tuple[int, int]] = set()

    def _stages(self) -> tuple[Sequence[int], Mapping[int, Sequence[int]]]:
        """The statements before which others may run again, and for each of these the stages in which it may."""
        return self.form.at, self.form.again

    # ------------------------------------------------------------ solutions
    def solved(
        self,
        known: float,
        seconds: float,
        low: np.ndarray | None = None,
        high: np.ndarray | None = None,
    ) -> Any:
        """The solver's result.

        known : cost of the known schedule.
        low, high : bounds of the variables.
        """
        return self.solve(
            seconds,
            UNIT,
            cost={self.known: self.dear or known},
            low=0.0 if low is None else low,
            high=1.0 if high is None else high,
        )

    def chosen(self, found: Any) -> set[Pair] | None:
        """The schedule of a solution; None: there is no solution, or it is the known schedule."""
        if found.x is None or found.x[self.known] > 0.5:
            return None
        return {pair for x, pair in self._pairs() if found.x[x] > 0.5}

    def _pairs(self) -> Iterator[tuple[int, Pair]]:
        """The variables of a schedule, each with its pair: recomputed statements, and page steps."""
        yield from ((r, (self.stages[k], i)) for (k, i), r in self.R.items())
        yield from ((x, (self.stages[k], self.problem.page[v])) for (k, v), x in self.In.items())

    def by_windows(self, best: Run, end: float, channel: SolverChannel) -> Run:
        """Improve a schedule window by window: solve some stages with all others fixed."""
        width = max(len(self.stages) // 5, 4)
        while not best.excess and best.chosen and time.monotonic() < end:
            best = cheaper(best, channel.latest())
            before = best.cost
            for start in range(0, len(self.stages), max(width // 2, 1)):
                if time.monotonic() >= end:
                    break
                low, high = self.around(best, range(start, start + width))
                found = self.solved(best.cost, min(end - time.monotonic(), WINDOW_SECONDS), low, high)
                chosen = self.chosen(found)
                if chosen is not None:
                    run = self.problem.run(chosen)
                    self.tighten(chosen)
                    if not run.excess and run.cost < best.cost:
                        best = run
                        channel.found(best)
            if best.cost >= before:
                if width >= len(self.stages):
                    break
                width *= 2
        return best

    def around(self, run: Run, free: range) -> tuple[np.ndarray, np.ndarray]:
        """Bounds that leave the variables of some stages free and fix all others to a schedule."""
        low, high = np.zeros(self.n), np.ones(self.n)
        for x, (t, i) in self._pairs():
            if self.form.of[t] not in free:
                low[x] = high[x] = (t, i) in run.chosen
        begins = {t: p for p, t in reversed([*enumerate(run.stage)])}
        for (k, v), s in self.S.items():
            if k not in free:
                p = begins[self.stages[k]]
                low[s] = high[s] = any(run.touches[u][0] < p <= run.touches[u][-1] for u in run.versions[v])
        return low, high

    # ------------------------------------------------------------ available values
    def there(self, k: int, v: int) -> Row:
        """Variables of which one is 1 if a value is available in stage k: kept, recomputed, or read from its page."""
        variables = (self.S.get((k, v)), self.R.get((k, self.problem.maker[v])), self.In.get((k, v)))
        return {x: 1.0 for x in variables if x is not None}

    def _flow(self) -> None:
        steps, maker = self.problem.steps, self.problem.maker
        for k, t in enumerate(self.stages):
            for v in self.form.reads(t):
                self.at_least({**self.there(k, v), self.known: 1.0}, 1.0)
        for (k, v), s in self.S.items():
            if k:
                self.at_least({**self.there(k - 1, v), s: -1.0}, 0.0)
            big = self.early & {*steps[maker[v]].makes}
            if (r := self.R.get((k, maker[v]))) is not None and len(big) == 1:
                self.at_most({s: 1.0, r: 1.0}, 1.0)
        for (k, i), r in self.R.items():
            for u in self.form.reads(i):
                self.at_least({**self.there(k, u), r: -1.0}, 0.0)
            read = [
                self.R[k, j]
                for j in range(i + 1, self.problem.backward)
                if (k, j) in self.R and {*steps[i].makes} & {*steps[j].uses}
            ]
            kept = [self.S[k + 1, v] for v in steps[i].makes if (k + 1, v) in self.S]
            if not {*steps[self.stages[k]].uses} & {*steps[i].makes}:  # a recomputed value must have a reader
                self.at_least({**dict.fromkeys((*read, *kept), 1.0), r: -1.0}, 0.0)

    def _pages(self) -> None:
        """A page that is read has been written, and all fit into the file; a page is read only if its value is missing and used."""
        steps, room = self.problem.steps, self.problem.room / max(self.problem.limit, 1)
        if self.H:
            self.at_most({h: self.size[v] for v, h in self.H.items()}, room)
        for (k, v), x in self.In.items():
            self.at_least({self.H[v]: 1.0, x: -1.0}, 0.0)
            for other in (self.S.get((k, v)), self.R.get((k, self.problem.maker[v]))):
                if other is not None:
                    self.at_most({x: 1.0, other: 1.0}, 1.0)
            if v not in steps[self.stages[k]].uses:
                read = [r for (at, i), r in self.R.items() if at == k and v in steps[i].uses]
                kept = [self.S[k + 1, v]] if (k + 1, v) in self.S else []
                self.at_least({**dict.fromkeys((*read, *kept), 1.0), x: -1.0}, 0.0)

    # ------------------------------------------------------------ memory
    def after(self, s: int, v: int) -> tuple[Row, float]:
        """Whether a value lives on after statement s, as a linear form: variables and a constant."""
        touches, first = self.touches[v], self.problem.backward
        if v not in self.early or self.problem.maker[v] >= first:
            return {}, float(touches[-1] > s)
        if any(s < t < first for t in touches):
            return {}, 1.0
        k = next((k for k, t in enumerate(self.stages) if t > s), None)
        x = None if k is None else self.S.get((k, v))
        return ({}, 0.0) if x is None else ({x: 1.0}, 0.0)

    def memory(self, s: int) -> None:
        """Limit the memory at an original statement: all it touches, what lives on, and scratch, minus in-place writes."""
        step, row = self.problem.steps[s], dict[int, float]()
        constant = step.scratch / max(self.problem.limit, 1)
        for v, size in enumerate(self.size):
            if v not in self.touches or self.problem.maker[v] > s:
                continue
            if v in step.uses or v in step.makes:
                constant += size
                continue
            lives, always = self.after(s, v)
            constant += size * always
            for x, a in lives.items():
                row[x] = row.get(x, 0.0) + a * size
        self.placed(row, step.pairs, {x: self.after(s, x) for _, x in step.pairs})
        if row or constant > 1:
            self.within(row, 1.0 - constant + 1e-9)

    def within(self, row: Row, room: float) -> None:
        """Add the constraint that live values take at most ``room``, in parts of the limit."""
        self.at_most(row, room)

    def placed(self, row: Row, pairs: Any, after: Mapping[int, tuple[Row, float]]) -> None:
        """Subtract the size of values that overwrite one that does not live on."""
        for y in {y for y, _ in pairs}:
            taken = self.variable()
            row[taken] = -self.size[y]
            most: Row = {taken: 1.0}
            free = 0.0
            for _, x in (pair for pair in pairs if pair[0] == y):
                lives, always = after[x]
                free += 1.0 - always
                for variable, a in lives.items():
                    most[variable] = most.get(variable, 0.0) + a
            self.at_most(most, free)

    def tighten(self, chosen: set[tuple[int, int]]) -> bool:
        """Constrain the memory at recomputed statements that exceed the limit in a solution; False: there is no new one."""
        run = self.problem._follow(chosen)
        over = [
            (run.stage[p], run.order[p])
            for p, b in enumerate(run.live)
            if b > self.problem.limit and 0 <= run.order[p] != run.stage[p]
        ]
        here = {(self.form.of[t], i) for t, i in over}
        if here <= self.done:
            return False
        # also in neighbouring stages, to which the solver would move them
        new = {(k, i) for at, i in here for k in self.form.again[i] if abs(k - at) <= NEAR} - self.done
        for k, i in sorted(new):
            self.again(k, i)
        self.done |= new
        return True

    def again(self, k: int, i: int) -> None:
        """Limit the memory while statement i runs again in stage k."""
        steps, step, maker = self.problem.steps, self.problem.steps[i], self.problem.maker
        stage = self.stages[k]
        row: Row = {}
        constant = step.scratch / max(self.problem.limit, 1)
        after: dict[int, tuple[Row, float]] = {}
        most = constant
        for v, size in enumerate(self.size):
            if v not in self.touches:
                continue
            if v not in self.early:
                constant += size * float(maker[v] < stage <= self.touches[v][-1])
                continue
            if not self.there(k, v):
                continue
            later = [
                self.R[k, j] for j in range(i + 1, self.problem.backward) if (k, j) in self.R and v in steps[j].uses
            ]
            needs = [*later, *([self.S[k + 1, v]] if (k + 1, v) in self.S else [])]
            if v in step.makes or v in step.uses:
                constant += size
                on = self.variable()  # lives on after it
                for x in needs:
                    self.at_least({on: 1.0, x: -1.0}, 0.0)
                after[v] = ({}, 1.0) if v in steps[stage].uses else ({on: 1.0}, 0.0)
                continue
            made = self.R.get((k, maker[v])) if maker[v] < i else None
            there = [x for x in (self.S.get((k, v)), made, self.In.get((k, v))) if x is not None]
            if not there:
                continue
            live = self.variable()
            row[live] = size
            most += size
            for x in needs:
                self.at_least({live: 1.0, x: -1.0, **dict.fromkeys(there, -1.0)}, -1.0)
            if v in steps[stage].uses:
                self.at_least({live: 1.0, **dict.fromkeys(there, -1.0)}, 0.0)
        pairs = [(y, x) for y, x in step.pairs if x in after]
        self.placed(row, pairs, after)
        slack = max(most + constant - 1.0, 0.0) + 1.0
        row[self.R[k, i]] = row.get(self.R[k, i], 0.0) + slack
        self.at_most(row, 1.0 - constant + slack + 1e-9)

"""Schedules of recomputation as a mixed-integer program: stages, what runs again in them, and what is kept into them.

Stages are the statements of the backward that read what the forward made, in order; statements run again just before
one, in their own order.  Variables: R[k,i], statement i of the forward runs again in stage k; S[k,v], value v is kept into
stage k.  What a stage reads is kept into it or made in it, so is what runs again; what is kept on was there.  After Jain
et al. 2020 (Checkmate), with memory counted as a `Run` counts it: a value lives until its last read, and one that is made
may lie in the place of one that dies.  So of a stage's own statement what lives is linear in what is kept into the next.

Values that may wait in a file (`calcvm.planner.paging`) have two more: H[v], it is written, where it is made; In[k,v], it is read
before what runs again in stage k.  A page stays until the end, so one variable is enough for H, and Out is its cost; a page step needs
no row of memory: what is live at it is live at the next statement of its stage.

Positions of what runs again are constrained where a solution exceeds the limit there, and the program is solved anew.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from calcvm.planner.milp import Milp, Row
from calcvm.planner.stages import News, Stages, cheaper

if TYPE_CHECKING:
    from calcvm.planner.recompute import Pair, Problem, Run

WINDOW_SECONDS = 1.0
NEAR = 3  # stages around one where a solution exceeds the limit that are constrained too
UNIT = 1e6  # costs are handed over in microseconds


class Program(Milp):
    """Stages as variables and rows."""

    def __init__(self, problem: Problem, known: Run):
        super().__init__()
        self.problem = problem
        steps, first = problem.steps, problem.backward
        self.form = Stages(problem)
        self.early, self.touches = self.form.early, self.form.touches
        self.stages, again = self._stages()
        self.size = [b / max(problem.limit, 1) for b in problem.sizes]
        # all as it is known, in place of what the program decides: so there is a solution, and a bound, at any time
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
        """The statements before which others may run again, and before which of them each may."""
        return self.form.at, self.form.again

    # ------------------------------------------------------------ solutions
    def solved(
        self,
        known: float,
        seconds: float,
        low: np.ndarray | None = None,
        high: np.ndarray | None = None,
    ) -> Any:
        """What the solver says, where what is known costs so much.

        low, high : arrays that variables are between.
        """
        return self.solve(
            seconds,
            UNIT,
            cost={self.known: self.dear or known},
            low=0.0 if low is None else low,
            high=1.0 if high is None else high,
        )

    def chosen(self, found: Any) -> set[Pair] | None:
        """The statements that run again in a solution; None: there is none, or it is what is known."""
        if found.x is None or found.x[self.known] > 0.5:
            return None
        return {pair for x, pair in self._pairs() if found.x[x] > 0.5}

    def _pairs(self) -> Iterator[tuple[int, Pair]]:
        """Variables of what a schedule consists of: statements that run again, and page steps."""
        yield from ((r, (self.stages[k], i)) for (k, i), r in self.R.items())
        yield from ((x, (self.stages[k], self.problem.page[v])) for (k, v), x in self.In.items())

    def by_windows(self, best: Run, end: float, news: News) -> Run:
        """A schedule improved a window of stages at a time, by solving it with all else as it is."""
        width = max(len(self.stages) // 5, 4)
        while not best.excess and best.chosen and time.monotonic() < end:
            best = cheaper(best, news.latest())
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
                        news.found(best)
            if best.cost >= before:
                if width >= len(self.stages):
                    break
                width *= 2
        return best

    def around(self, run: Run, free: range) -> tuple[np.ndarray, np.ndarray]:
        """Bounds that leave variables of some stages free, and those of all others as in a schedule."""
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

    # ------------------------------------------------------------ what is there
    def there(self, k: int, v: int) -> Row:
        """Whether a value is kept into stage k, made in it or read from its page."""
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
            if not {*steps[self.stages[k]].uses} & {*steps[i].makes}:  # nothing is made in vain
                self.at_least({**dict.fromkeys((*read, *kept), 1.0), r: -1.0}, 0.0)

    def _pages(self) -> None:
        """What is read has been written, for which there is room; and neither is there already, nor read in vain."""
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
        """Whether a value lives on after statement s, as variables and a constant."""
        touches, first = self.touches[v], self.problem.backward
        if v not in self.early or self.problem.maker[v] >= first:
            return {}, float(touches[-1] > s)
        if any(s < t < first for t in touches):
            return {}, 1.0
        k = next((k for k, t in enumerate(self.stages) if t > s), None)
        x = None if k is None else self.S.get((k, v))
        return ({}, 0.0) if x is None else ({x: 1.0}, 0.0)

    def memory(self, s: int) -> None:
        """At a statement of the path itself all is live that it touches, and what lives on; scratch; less what is in place."""
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
        """What lives takes at most so much of the limit."""
        self.at_most(row, room)

    def placed(self, row: Row, pairs: Any, after: Mapping[int, tuple[Row, float]]) -> None:
        """Less the size of what takes the place of a value that does not live on."""
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
        """Constrain the memory where a solution's statements that run again exceed the limit; False: nowhere else."""
        run = self.problem._follow(chosen)
        over = [
            (run.stage[p], run.order[p])
            for p, b in enumerate(run.live)
            if b > self.problem.limit and 0 <= run.order[p] != run.stage[p]
        ]
        here = {(self.form.of[t], i) for t, i in over}
        if here <= self.done:
            return False
        # and where it would go next
        new = {(k, i) for at, i in here for k in self.form.again[i] if abs(k - at) <= NEAR} - self.done
        for k, i in sorted(new):
            self.again(k, i)
        self.done |= new
        return True

    def again(self, k: int, i: int) -> None:
        """The memory while statement i runs again in stage k, if it does."""
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

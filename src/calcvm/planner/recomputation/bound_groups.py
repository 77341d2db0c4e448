"""A lower bound for schedules of recomputation, from programs of few stages that are refined where they are too coarse.

Neighbouring stages form a group.  R[j,i]: statement i runs again in any stage of group j.  S[j,v]: value v is kept into group j.
Every schedule is a solution of this program, which counts only bytes that are certainly live: values kept through a group and
not recomputed in it.  So the cheapest solution is a lower bound, and it takes seconds: a program of 16 groups is a tenth of one
of 142 stages.  Its relaxation is also tighter, since less can be recomputed in fractions at several times.

The solution is then replayed as a schedule.  Groups in which it exceeds the limit are split at that point, and the program is
solved again.  A solution that exceeds the limit nowhere is the cheapest schedule of all.

Bounds in per cent of a step, on two cores, beside those of the full program with counts of expensive statements:

| network | memory | seconds | groups | full program |
|---|---|---|---|---|
| ResNet-18, batch 8 | 50 % | 10 | 9.58 | 7.73 |
| UNet, batch 2 | 50 % | 10 | 4.16 | 3.72 |
| ResNet-34, batch 8 | 52 % | 60 | 7.65 | 6.85 |

For the ResNet-34 the solvers find a schedule of 8.99, and one of 8.60 is known.  These did not raise its bound: 9, 12 and 17 groups
with equal numbers of stages (7.27, 7.08, 6.93), fewer integer variables (6.3 to 7.1), a cutoff (7.11).  Nor did splitting one group
at a time (7.69, and 7.62 in 60 s alone).
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from calcvm.planner.milp import GAP, Row
from calcvm.planner.recomputation.checkmate_milp import UNIT, ScheduleMilp
from calcvm.planner.recomputation.schedule import Pair, RecomputationProblem, Run
from calcvm.planner.recomputation.search import mend
from calcvm.planner.recomputation.stages import Answer, SolverChannel, Stages, cheaper

GROUPS = 8  # groups of the first program
DEAR = 0.05  # part of a schedule's cost from which on a statement counts as expensive
ROUGH = 0.01  # relative gap between solution and bound while groups are still split
BIG = 0.03  # part of the limit: the memory is constrained while a statement with larger results runs again


def solve(
    problem: RecomputationProblem,
    known: Run,
    seconds: float,
    channel: SolverChannel,
    groups: int = GROUPS,
    kind: Callable[[RecomputationProblem, Run, Sequence[int]], Grouped] | None = None,
) -> Answer:
    """A lower bound for all schedules, and the cheapest schedule found on the way; ``known`` must not exceed the limit.

    kind : class of the programs (None: `Grouped`).
    """
    end, best, bound = time.monotonic() + seconds, known, 0.0
    ends, gap = peaks(problem, groups), ROUGH
    while bound < best.cost * (1 - GAP) and (left := end - time.monotonic()) > 0:
        best = cheaper(best, channel.latest())
        program = (kind or Grouped)(problem, best, ends)
        found = program.answer(left, gap)
        bound = max(bound, min(best.cost, program.bound(found)))
        channel.bound(bound)
        chosen, finer = program.chosen(found), ends
        if chosen is not None:
            run = problem.run(chosen)
            best = cheaper(best, mend(problem, run, lambda better: better[0]))
            channel.found(best)
            finer = program.parted(run)
        if len(finer) == len(ends):  # nothing to split, or nothing cheaper than the known schedule: solve exactly
            if gap == GAP or found.status != 0:
                break
            gap = GAP
        ends = finer
    return Answer(best, min(bound, best.cost))


def peaks(problem: RecomputationProblem, groups: int) -> list[int]:
    """The last statements of groups with about equal numbers of stages, chosen where most is live: a group is exact at its end."""
    at, live = Stages(problem).at, problem.run(()).live
    parts = [part.tolist() for part in np.array_split(np.array(at, dtype=int), groups) if len(part)]
    return sorted({*(max(part, key=lambda s: (live[s], s)) for part in parts), len(problem.steps) - 1})


class Grouped(ScheduleMilp):
    """The program in which groups of statements of the backward, with last statements ``ends``, replace the stages."""

    def __init__(self, problem: RecomputationProblem, known: Run, ends: Sequence[int]):
        self.ends, self.cheapest = ends, known.cost
        self.begins = [problem.backward, *(s + 1 for s in ends[:-1])]
        self.through: dict[tuple[int, int], Row] = {}  # (group, value): the value is live throughout the group
        super().__init__(problem, known)
        if known.cost > 0:  # exclude schedules that cost more than the known one
            costs = {r: problem.steps[i].cost / known.cost for (_, i), r in self.R.items()}
            self.at_most({**costs, self.known: 1.0}, 1.0)
        self._count([r for (_, i), r in self.R.items() if problem.steps[i].cost > known.cost * DEAR])
        for j, i in self.R:
            made = sum(self.size[v] for v in problem.steps[i].makes) + problem.steps[i].scratch / max(problem.limit, 1)
            if made > BIG:
                self.again(j, i)

    def _stages(self) -> tuple[Sequence[int], Mapping[int, Sequence[int]]]:
        self.members = [[t for t in self.form.at if b <= t <= e] for b, e in zip(self.begins, self.ends)]
        again = {i: sorted({self.group(self.form.at[k]) for k in ks}) for i, ks in self.form.again.items()}
        return self.begins, again

    def group(self, s: int) -> int:
        """The group of a statement of the backward."""
        return bisect_left(self.ends, s)

    def _count(self, dear: Sequence[int]) -> None:
        """Count the expensive statements that run again, in unary, so that the solver may branch on the count."""
        digits = [self.variable(binary=True) for _ in range(int(1 / DEAR) + 1)] if dear else []
        if dear:
            self.between(0.0, {**dict.fromkeys(dear, 1.0), **dict.fromkeys(digits, -1.0)}, 0.0)
        for more, less in zip(digits, digits[1:]):
            self.at_least({more: 1.0, less: -1.0}, 0.0)

    # ------------------------------------------------------------ rows
    def _flow(self) -> None:
        maker = self.problem.maker
        for j, members in enumerate(self.members):
            for v in sorted({v for t in members for v in self.form.reads(t)}):
                self.at_least({**self.there(j, v), self.known: 1.0}, 1.0)
        for (j, v), s in self.S.items():
            if j:
                self.at_least({**self.there(j - 1, v), s: -1.0}, 0.0)
                self.through[j - 1, v] = self._kept(j - 1, v)
            if (r := self.R.get((j, maker[v]))) is not None and len(self.members[j]) == 1 and self._alone(v):
                self.at_most({s: 1.0, r: 1.0}, 1.0)
        for (j, i), r in self.R.items():
            for u in self.form.reads(i):
                self.at_least({**self.there(j, u), r: -1.0}, 0.0)
            self._for_something(j, i)

    def _alone(self, v: int) -> bool:
        """Whether a value is the only one in ``early`` that its statement makes."""
        return len(self.early & {*self.problem.steps[self.problem.maker[v]].makes}) == 1

    def _kept(self, j: int, v: int) -> Row:
        """Whether a value is kept into the next group and not recomputed in this one, as a linear form."""
        r, later = self.R.get((j, self.problem.maker[v])), self.S[j + 1, v]
        if r is None:
            return {later: 1.0}
        through = self.variable()
        self.at_least({through: 1.0, later: -1.0, r: 1.0}, 0.0)
        return {through: 1.0}

    def _for_something(self, j: int, i: int) -> None:
        """A recomputed value must be read in the group or kept into the next."""
        steps, own = self.problem.steps, {*self.problem.steps[i].makes}
        if any(own & {*steps[t].uses} for t in self.members[j]):
            return
        later = range(i + 1, self.problem.backward)
        read = [self.R[j, k] for k in later if (j, k) in self.R and own & {*steps[k].uses}]
        kept = [self.S[j + 1, v] for v in sorted(own) if (j + 1, v) in self.S]
        self.at_least({**dict.fromkeys((*read, *kept), 1.0), self.R[j, i]: -1.0}, 0.0)

    def after(self, s: int, v: int) -> tuple[Row, float]:
        """Whether a value certainly lives on after a statement, as a linear form: variables and a constant."""
        if s < self.problem.backward or v not in self.early or self.problem.maker[v] >= self.problem.backward:
            return super().after(s, v)
        j = self.group(s)
        if any(s < t <= self.ends[j] for t in self.touches[v]):
            r = self.R.get((j, self.problem.maker[v]))
            return ({}, 1.0) if r is None else ({r: -1.0}, 1.0)
        if s == self.ends[j]:
            x = self.S.get((j + 1, v))
            return ({}, 0.0) if x is None else ({x: 1.0}, 0.0)
        return self.through.get((j, v), {}), 0.0

    def again(self, k: int, i: int) -> None:
        """Limit the memory while a statement runs again: all it touches, and values that are live throughout the group."""
        steps, step, maker = self.problem.steps, self.problem.steps[i], self.problem.maker
        always = [(maker[v], t[-1], self.size[v]) for v, t in self.touches.items() if v not in self.early]
        may = [t for t in self.members[k] if t <= step.until]
        constant = min(sum(size for made, last, size in always if made < t <= last) for t in may)
        own = self.early & {*step.makes, *step.uses}
        placed = {y for y, _ in step.pairs}
        row: Row = {
            self.R[k, i]: sum(self.size[v] for v in own - placed) + steps[i].scratch / max(self.problem.limit, 1)
        }
        for v in sorted(self.early - own):
            for x, a in self.through.get((k, v), {}).items():
                row[x] = row.get(x, 0.0) + a * self.size[v]
        self.within(row, 1.0 - constant + 1e-9)

    def within(self, row: Row, room: float) -> None:
        """Add the constraint; the variable ``known`` takes up the room, also in fractions, which tightens the relaxation."""
        self.at_most({**row, self.known: room}, room)

    # ------------------------------------------------------------ solutions
    def answer(self, seconds: float, gap: float) -> Any:
        """The solver's result after at most ``seconds``."""
        return self.solve(seconds, UNIT, cost={self.known: self.cheapest}, gap=gap)

    def bound(self, found: Any) -> float:
        """The lower bound in the solver's result."""
        dual = found.mip_dual_bound
        return dual / UNIT if dual is not None and np.isfinite(dual) else 0.0

    def chosen(self, found: Any) -> set[Pair] | None:
        """A solution as a schedule: each statement runs again in the first stage of its group in which it may."""
        if super().chosen(found) is None:
            return None
        at, again = self.form.at, self.form.again
        return {
            (next(at[k] for k in again[i] if self.group(at[k]) == j), i)
            for (j, i), r in self.R.items()
            if found.x[r] > 0.5
        }

    def parted(self, run: Run) -> list[int]:
        """The ends of finer groups.

        A group that exceeds the limit is split where the excess is largest.  If a recomputed statement runs there, the
        group is also split before its stage.
        """
        over: dict[int, list[tuple[int, int, int]]] = {}
        for p, live in enumerate(run.live):
            if live > self.problem.limit and run.stage[p] >= self.problem.backward:
                over.setdefault(self.group(run.stage[p]), []).append((live, run.stage[p], run.order[p]))
        ends = {*self.ends}
        for places in over.values():
            for _, t, s in sorted(places, reverse=True):
                new = ({t} if s == t else {t - 1, t}) - ends
                new = {e for e in new if e >= self.problem.backward}
                if new:
                    ends |= new
                    break
        return sorted(ends)

"""How cheap a schedule of recomputation can be, from programs of few stages that are made finer where they are too coarse.

Neighbouring stages are one group: R[j,i], statement i runs again in any of its stages; S[j,v], value v is kept into the group.
What a schedule does is a solution of that, which counts only what is live for certain: what is kept through a group and not
made in it.  So it costs at least as much as the cheapest solution, and that is found in seconds: a program of 16 groups is a
tenth of one of 142 stages, and its relaxation is higher, since less can be made again in part, at several times.
The solution is then followed as a schedule.  Groups in which it exceeds the limit are parted there, and so on: one
that exceeds it nowhere is the cheapest schedule of all.

Of a ResNet-18, batch 8, in half of its memory none costs less than 9.58 % of a step (in 10 s on two cores; counts of dear statements in
the whole program showed 7.73); of a UNet, batch 2, 4.16 (3.72); of a ResNet-34, batch 8, in 52 % 7.65 (6.85, in 60 s), where 8.99 is
found and 8.60 is known.  For that one did not help: 9, 12 and 17 groups of as many stages (7.27, 7.08, 6.93), fewer whole variables (6.3
to 7.1), a cutoff (7.11), one group parted at a time (7.69 and 7.62 in 60 s alone).
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from calcvm.planner.milp import GAP, Row
from calcvm.planner.staged import UNIT, Program
from calcvm.planner.stages import Answer, News, Stages, cheaper

if TYPE_CHECKING:
    from calcvm.planner.recompute import Pair, Problem, Run

GROUPS = 8  # to begin with
DEAR = 0.05  # part of a schedule's cost, from which on a statement is dear
ROUGH = 0.01  # between a solution and its bound, as a part of it, while groups are still parted
BIG = 0.03  # part of the limit, from which on what a statement makes is constrained where it runs again


def solve(
    problem: Problem,
    known: Run,
    seconds: float,
    news: News,
    groups: int = GROUPS,
    kind: Callable[[Problem, Run, Sequence[int]], Grouped] | None = None,
) -> Answer:
    """What no schedule costs less than, and the cheapest that was met; ``known`` does not exceed the limit.

    kind : of programs (None: `Grouped`).
    """
    end, best, bound = time.monotonic() + seconds, known, 0.0
    ends, gap = peaks(problem, groups), ROUGH
    while bound < best.cost * (1 - GAP) and (left := end - time.monotonic()) > 0:
        best = cheaper(best, news.latest())
        program = (kind or Grouped)(problem, best, ends)
        found = program.answer(left, gap)
        bound = max(bound, min(best.cost, program.bound(found)))
        news.bound(bound)
        chosen, finer = program.chosen(found), ends
        if chosen is not None:
            run = problem.run(chosen)
            best = cheaper(best, problem.mend(run, lambda better: better[0]))
            news.found(best)
            finer = program.parted(run)
        if len(finer) == len(ends):  # nothing to part, or nothing cheaper than what is known: so exactly, then
            if gap == GAP or found.status != 0:
                break
            gap = GAP
        ends = finer
    return Answer(best, min(bound, best.cost))


def peaks(problem: Problem, groups: int) -> list[int]:
    """The last statements of so many groups of about as many stages: where most is live, since there a group is exact."""
    at, live = Stages(problem).at, problem.run(()).live
    parts = [part.tolist() for part in np.array_split(np.array(at, dtype=int), groups) if len(part)]
    return sorted({*(max(part, key=lambda s: (live[s], s)) for part in parts), len(problem.steps) - 1})


class Grouped(Program):
    """Groups of statements of the backward that end with ``ends``, in place of its stages."""

    def __init__(self, problem: Problem, known: Run, ends: Sequence[int]):
        self.ends, self.cheapest = ends, known.cost
        self.begins = [problem.backward, *(s + 1 for s in ends[:-1])]
        self.through: dict[tuple[int, int], Row] = {}  # values that are there in all of a group
        super().__init__(problem, known)
        if known.cost > 0:  # what costs as much is no news
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
        """How many dear statements run again, in digits of one each: the solver may decide that first."""
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
        """Whether a value is all that is decided about of what its statement makes."""
        return len(self.early & {*self.problem.steps[self.problem.maker[v]].makes}) == 1

    def _kept(self, j: int, v: int) -> Row:
        """Whether a value is kept into the next group and not made in this one."""
        r, later = self.R.get((j, self.problem.maker[v])), self.S[j + 1, v]
        if r is None:
            return {later: 1.0}
        through = self.variable()
        self.at_least({through: 1.0, later: -1.0, r: 1.0}, 0.0)
        return {through: 1.0}

    def _for_something(self, j: int, i: int) -> None:
        """What runs again is read in the group or kept into the next."""
        steps, own = self.problem.steps, {*self.problem.steps[i].makes}
        if any(own & {*steps[t].uses} for t in self.members[j]):
            return
        later = range(i + 1, self.problem.backward)
        read = [self.R[j, k] for k in later if (j, k) in self.R and own & {*steps[k].uses}]
        kept = [self.S[j + 1, v] for v in sorted(own) if (j + 1, v) in self.S]
        self.at_least({**dict.fromkeys((*read, *kept), 1.0), self.R[j, i]: -1.0}, 0.0)

    def after(self, s: int, v: int) -> tuple[Row, float]:
        """Whether a value lives on after a statement for certain, as variables and a constant."""
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
        """While a statement runs again all is live that it touches, and what is there in all of the group."""
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
        """As in all programs; beside what is known nothing lives, not in part either: the relaxation is no lower for it."""
        self.at_most({**row, self.known: room}, room)

    # ------------------------------------------------------------ solutions
    def answer(self, seconds: float, gap: float) -> Any:
        """What the solver says in so many seconds."""
        return self.solve(seconds, UNIT, cost={self.known: self.cheapest}, gap=gap)

    def bound(self, found: Any) -> float:
        """What the solver's answer shows."""
        dual = found.mip_dual_bound
        return dual / UNIT if dual is not None and np.isfinite(dual) else 0.0

    def chosen(self, found: Any) -> set[Pair] | None:
        """A solution as a schedule: each statement runs again where it first may in its group."""
        if super().chosen(found) is None:
            return None
        at, again = self.form.at, self.form.again
        return {
            (next(at[k] for k in again[i] if self.group(at[k]) == j), i)
            for (j, i), r in self.R.items()
            if found.x[r] > 0.5
        }

    def parted(self, run: Run) -> list[int]:
        """The ends of finer groups: each that exceeds the limit ends where it does so most, and before it if something runs again."""
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

"""The mixed-integer program of Jain et al. 2020 (Checkmate), reimplemented from section 4 of the paper, as a rival.

Variables are R (computed in a stage), S (kept into it), U (memory after each of its operators) and FREE (an edge's value is
freed), linearised as in the paper, with one stage per operator and no in-place work.  As in our planner, some operators may
not run again, and statements of the forward run again only in the backward: operators, bytes and costs are the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.harness import number
from calcvm.planner.milp import Milp

UNIT = 1e6  # costs are in microseconds


class Checkmate(Milp):
    """Variables and rows for a `calcvm.planner.recomputation.search.Problem`."""

    def __init__(self, problem: Any):
        super().__init__()
        self.problem = problem
        steps = problem.steps
        self.count = len(steps)
        self.bytes = [sum(problem.sizes[v] for v in step.makes) / problem.limit for step in steps]
        self.reads = [sorted({problem.maker[v] for v in step.uses}) for step in steps]
        self.users: list[list[int]] = [[] for _ in steps]
        for j, made in enumerate(self.reads):
            for i in made:
                self.users[i].append(j)
        self.R, self.S = self._runs(), self._kept()
        self._dependences()
        for t in range(self.count):
            self._memory(t)

    def _runs(self) -> dict[tuple[int, int], int]:
        steps, first = self.problem.steps, self.problem.backward
        out = {}
        for t in range(self.count):
            for i in range(t + 1):
                if i == t or (t >= first > i and t <= steps[i].until):
                    out[t, i] = self.variable(steps[i].cost, binary=True)
        return out

    def _kept(self) -> dict[tuple[int, int], int]:
        return {(t, i): self.variable(binary=True) for t in range(1, self.count) for i in range(t) if self.users[i]}

    def _dependences(self) -> None:
        for (t, j), r in self.R.items():
            if t == j:
                self.between(1.0, {r: 1.0}, 1.0)
            for i in self.reads[j]:
                there = {self.R.get((t, i)): 1.0, self.S.get((t, i)): 1.0}
                there.pop(None, None)
                self.at_least({**there, r: -1.0}, 0.0)  # type: ignore[dict-item]
        for (t, i), s in self.S.items():
            before = {self.R.get((t - 1, i)): 1.0, self.S.get((t - 1, i)): 1.0}
            before.pop(None, None)
            self.at_least({**before, s: -1.0}, 0.0)  # type: ignore[dict-item]

    def _memory(self, t: int) -> None:
        """U of a stage, operator by operator: kept values plus results, minus freed values."""
        steps = self.problem.steps
        ran = [i for i in range(t + 1) if (t, i) in self.R]
        live: dict[int, float] = {self.S[t, i]: self.bytes[i] for i in range(t) if (t, i) in self.S and self.bytes[i]}
        before: int | None = None
        freed: list[tuple[int, float]] = []
        for k in ran:
            r, scratch = self.R[t, k], steps[k].scratch / self.problem.limit
            now = self.variable()  # U, as a share of the limit: at most 1
            row = {now: 1.0, r: -self.bytes[k]}
            if before is None:
                for s, b in live.items():
                    row[s] = row.get(s, 0.0) - b
            else:
                row[before] = -1.0
                for free, b in freed:
                    row[free] = row.get(free, 0.0) + b
            self.between(0.0, row, 0.0)
            self.at_most({now: 1.0, r: scratch}, 1.0 + 1e-9)
            freed = [(self._free(t, i, k), self.bytes[i]) for i in [*self.reads[k], k] if self.bytes[i]]
            before = now

    def _free(self, t: int, i: int, k: int) -> int:
        """FREE: no hazard, which means nothing reads the value later in the stage, it is not kept, and its reader runs."""
        free, r = self.variable(binary=True), self.R[t, k]
        hazards: dict[int, float] = {r: -1.0}
        if (t + 1, i) in self.S:
            hazards[self.S[t + 1, i]] = 1.0
        for j in self.users[i]:
            if j > k and (t, j) in self.R:
                hazards[self.R[t, j]] = 1.0
        most = float(len(hazards))
        self.at_least({**hazards, free: 1.0}, 0.0)  # 1 - FREE <= hazards, one of which is 1 - R
        self.at_most({**hazards, free: most}, most - 1.0)
        return free

    def schedule(self, seconds: float) -> tuple[set[tuple[int, int]] | None, float | None]:
        """The operators to run again, and the lower bound on their cost (None: nothing found, or shown, in the time)."""
        found = self.solve(seconds, UNIT)
        base, bound = sum(step.cost for step in self.problem.steps), found.mip_dual_bound
        shown = None if bound is None or not np.isfinite(bound) else max(bound / UNIT - base, 0.0)
        if found.x is None:
            return None, shown
        return {(t, k) for (t, k), r in self.R.items() if t != k and found.x[r] > 0.5}, shown


def compared(problem: Any, whole: float, seconds: float) -> tuple[list[str], float | None]:
    """Cells of a table: variables, overhead and bound in per cent, overhead in our cost model; the last also as a number."""
    model = Checkmate(problem)
    chosen, bound = model.schedule(seconds)
    shown = "-" if bound is None else number(100 * bound / whole)
    if chosen is None:
        return [f"{model.n:,}", "none found", shown, "-"], None
    own = 100 * sum(problem.steps[i].cost for _, i in chosen) / whole
    run = problem.run(chosen)
    ours = 100 * run.cost / whole
    return [f"{model.n:,}", f"{own:.2f}", shown, f"{ours:.2f}" + (" (exceeds)" if run.excess else "")], own

"""The programs of groups of stages (`calcvm.planner.grouped`), solved by CP-SAT of OR-Tools.

In a schedule all of their variables are 0 or 1, also those that HiGHS may take in part: what lies in a place, what is kept
through a group.  Numbers are made whole so that no schedule is lost: coefficients and costs are rounded down.

On one core of Zen 5, beside HiGHS: ResNet-34, batch 8, 10 % above its largest statement, of 3 groups 0.2 s and 0.7, of 6 groups 6 and
9 to 16.  From 12 groups on in 9 s, at least: ResNet-18, batch 8, in half of its memory 8.4 % and 5.9; UNet at 256, batch 2, 4.2 and 3.7.
"""

from __future__ import annotations

from math import ceil, floor, isfinite

import numpy as np

from calcvm.planner.grouped import Grouped
from calcvm.planner.milp import Row
from calcvm.planner.staged import UNIT
from calcvm.record import record

UNITS = 10**9  # of what is known to be the cheapest
PARTS = 10**6  # of the limit
ROUNDING = 1e-6  # what is nearer than this to a whole number is one


@record
class Found:
    """What is asked of `scipy.optimize.milp`'s answers; x is None: there is none, or it is what is known."""

    x: np.ndarray | None
    mip_dual_bound: float
    status: int  # 0: solved


class Whole(Grouped):
    """Groups of stages, for CP-SAT."""

    def answer(self, seconds: float, gap: float) -> Found:
        """What the solver says in so many seconds of what is cheaper than what is known."""
        from ortools.sat.python import cp_model

        solver, model = cp_model.CpSolver(), cp_model.CpModel()
        variables = [model.new_bool_var("") for _ in range(self.n)]
        model.add(variables[self.known] == 0)
        for row, least, most in self.rows:
            for part, limit in ((row, most), ({x: -a for x, a in row.items()}, -least)):
                if isfinite(limit):
                    whole, at_most = rounded(part, limit)
                    model.add(sum(a * variables[x] for x, a in whole.items()) <= at_most)
        scale = UNITS / max(self.cheapest, 1e-12)
        model.minimize(sum(floor(cost * scale) * x for x, cost in zip(variables, self.cost) if cost))
        solver.parameters.max_time_in_seconds = max(seconds, 0.0)
        solver.parameters.num_workers = 1
        solver.parameters.linearization_level = 2  # with less, two groups take 15 s in place of 0.2
        solver.parameters.relative_gap_limit = gap
        solver.parameters.catch_sigint_signal = False  # it would take the handler from Python, for good
        status = solver.solve(model)
        if status == cp_model.INFEASIBLE:
            return Found(None, self.cheapest * UNIT, 0)
        there = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
        x = np.array([float(solver.value(v)) for v in variables]) if there else None
        bound = max(solver.best_objective_bound, 0.0) / scale * UNIT
        return Found(x, bound, 0 if status == cp_model.OPTIMAL else 1)


def rounded(row: Row, most: float) -> tuple[dict[int, int], int]:
    """A row of whole numbers, which all that is 0 or 1 and fits the row fits: at most so much."""
    if all(float(a).is_integer() for a in row.values()):
        return {x: int(a) for x, a in row.items()}, floor(most + ROUNDING)
    return {x: floor(a * PARTS) for x, a in row.items()}, ceil(most * PARTS)

"""The programs of groups of stages (`calcvm.planner.recomputation.bound_groups`), solved by CP-SAT of OR-Tools.

In a schedule all variables are 0 or 1, also those that are continuous for HiGHS: in-place writes, and values kept through a
group.  CP-SAT needs integers, so coefficients and costs are rounded down, which excludes no schedule.

CP-SAT and HiGHS, each on one core of Zen 5.  ResNet-34, batch 8, 10 % above its largest statement: 0.2 and 0.7 s with 3 groups, 6
and 9 to 16 s with 6 groups.  Bounds in 9 s from 12 groups on: ResNet-18, batch 8, in half of its memory 8.4 and 5.9 %; UNet at 256,
batch 2, 4.2 and 3.7 %.
"""

from __future__ import annotations

from math import ceil, floor, isfinite

import numpy as np

from calcvm.frozen import frozen
from calcvm.planner.milp import Row
from calcvm.planner.recomputation.bound_groups import Grouped
from calcvm.planner.recomputation.checkmate_milp import UNIT

UNITS = 10**9  # the cost of the best known schedule, in the solver's units
PARTS = 10**6  # the limit, in the solver's units
ROUNDING = 1e-6  # numbers closer than this to an integer count as integers


@frozen
class Found:
    """The result in the form of `scipy.optimize.milp`; x is None if there is no solution, or the known one is the best."""

    x: np.ndarray | None
    mip_dual_bound: float
    status: int  # 0: solved


class Whole(Grouped):
    """The program of groups of stages, for CP-SAT."""

    def answer(self, seconds: float, gap: float) -> Found:
        """The solver's result after at most ``seconds``; it searches only for schedules cheaper than the known one."""
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
        solver.parameters.linearization_level = 2  # with less, two groups take 15 s instead of 0.2
        solver.parameters.relative_gap_limit = gap
        solver.parameters.catch_sigint_signal = False  # it would replace Python's handler for good
        status = solver.solve(model)
        if status == cp_model.INFEASIBLE:
            return Found(None, self.cheapest * UNIT, 0)
        there = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
        x = np.array([float(solver.value(v)) for v in variables]) if there else None
        bound = max(solver.best_objective_bound, 0.0) / scale * UNIT
        return Found(x, bound, 0 if status == cp_model.OPTIMAL else 1)


def rounded(row: Row, most: float) -> tuple[dict[int, int], int]:
    """The row with integer coefficients and its limit; every 0-1 solution of the row stays feasible."""
    if all(float(a).is_integer() for a in row.values()):
        return {x: int(a) for x, a in row.items()}, floor(most + ROUNDING)
    return {x: floor(a * PARTS) for x, a in row.items()}, ceil(most * PARTS)

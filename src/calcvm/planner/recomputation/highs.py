"""The cheapest schedule of recomputation by a mixed-integer program, with a lower bound.

First, programs of groups of stages give a bound (`calcvm.planner.recomputation.bound_groups`), unless values may wait in a file.
Then windows of stages of the full program (`calcvm.planner.recomputation.checkmate_milp`) are solved with all other stages
fixed.  The remaining time goes to the whole program.  A solver's schedule is replayed as a `Run` before it is accepted; one that
exceeds the limit is rejected.  The bound comes from HiGHS.  It holds for schedules of this form, which always keep values
smaller than a thousandth of the limit.
"""

from __future__ import annotations

import time

import numpy as np

from calcvm.planner.milp import GAP
from calcvm.planner.recomputation import bound_groups
from calcvm.planner.recomputation.checkmate_milp import UNIT, ScheduleMilp
from calcvm.planner.recomputation.schedule import RecomputationProblem, Run
from calcvm.planner.recomputation.stages import Answer, SolverChannel, cheaper

ROUNDS = 12  # rounds of added constraints
SHARE = 0.7  # of the time for groups of stages; half of the rest for windows, half for the whole program


def solve(problem: RecomputationProblem, known: Run, seconds: float, channel: SolverChannel | None = None) -> Answer:
    """The cheapest schedule found in about ``seconds``; ``known`` if it is feasible and none is cheaper.

    Raises
    ------
    MissingExtra : SciPy is not installed.
    """
    channel, end, best, bound = channel or SolverChannel(), time.monotonic() + seconds, known, 0.0
    if not best.excess and not problem.pages:
        answer = bound_groups.solve(problem, best, seconds * SHARE, channel)
        best, bound = answer.run, answer.bound
    if proved(best, bound):
        return Answer(best, bound)
    milp, windows = ScheduleMilp(problem, best), (end - time.monotonic()) / 2
    best = milp.by_windows(best, time.monotonic() + windows, channel)
    for _ in range(ROUNDS):
        best = cheaper(best, channel.latest())
        found = milp.solved(best.cost, end - time.monotonic())
        if found.mip_dual_bound is not None and np.isfinite(found.mip_dual_bound):
            bound = max(bound, found.mip_dual_bound / UNIT)
            channel.bound(bound)
        chosen = milp.chosen(found)
        if chosen is None:  # nothing cheaper than the known schedule, or out of time
            break
        best = cheaper(best, problem.run(chosen))
        channel.found(best)
        if not milp.tighten(chosen):
            break
    return Answer(best, min(bound, best.cost))


def proved(run: Run, bound: float) -> bool:
    """Whether the bound proves that no schedule is cheaper."""
    return not run.excess and bound >= run.cost * (1 - GAP)

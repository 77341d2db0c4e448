"""The cheapest schedule of recomputation by a mixed-integer program, and how cheap any can be.

Programs of groups of stages show first how cheap any can be (`calcvm.planner.grouped`), unless values may wait in a file.  Then
windows of stages of the program (`calcvm.planner.staged`) are solved with all else as it is, and with what time is left all of it.
Whatever solvers say, a schedule is what its `Run` is: one that exceeds the limit is not taken.  The bound is HiGHS's: of schedules of
this form that keep values below a thousandth of the limit.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from calcvm.planner import grouped
from calcvm.planner.milp import GAP
from calcvm.planner.staged import UNIT, Program
from calcvm.planner.stages import Answer, News, cheaper

if TYPE_CHECKING:
    from calcvm.planner.recompute import Problem, Run

ROUNDS = 12  # of constraints that are added
SHARE = 0.7  # of the time, for groups of stages; half of the rest for windows, half for the whole


def solve(problem: Problem, known: Run, seconds: float, news: News | None = None) -> Answer:
    """The cheapest schedule found in about so many seconds: ``known``, where it is feasible and nothing cheaper was.

    Raises
    ------
    MissingExtra : SciPy is not installed.
    """
    news, end, best, bound = news or News(), time.monotonic() + seconds, known, 0.0
    if not best.excess and not problem.pages:
        answer = grouped.solve(problem, best, seconds * SHARE, news)
        best, bound = answer.run, answer.bound
    if proved(best, bound):
        return Answer(best, bound)
    program, windows = Program(problem, best), (end - time.monotonic()) / 2
    best = program.by_windows(best, time.monotonic() + windows, news)
    for _ in range(ROUNDS):
        best = cheaper(best, news.latest())
        found = program.solved(best.cost, end - time.monotonic())
        if found.mip_dual_bound is not None and np.isfinite(found.mip_dual_bound):
            bound = max(bound, found.mip_dual_bound / UNIT)
            news.bound(bound)
        chosen = program.chosen(found)
        if chosen is None:  # nothing cheaper than what is known, or no time for it
            break
        best = cheaper(best, problem.run(chosen))
        news.found(best)
        if not program.tighten(chosen):
            break
    return Answer(best, min(bound, best.cost))


def proved(run: Run, bound: float) -> bool:
    """Whether no schedule is cheaper."""
    return not run.excess and bound >= run.cost * (1 - GAP)

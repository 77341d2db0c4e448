"""The cheapest assignment of statements to devices: by search, and by a mixed-integer program, which also gives a lower bound.

After Schuler et al. 2022 (XEngine), without recomputation.  X[c,d]: cluster c of statements runs on device d.  Y[v,s,d]: value v,
made on s, is copied to d.  L[v,d,j]: v is needed on d at its j-th read or later.  All constraints are linear.  The program assumes
that a statement works in place if it may.  So it excludes no assignment that fits, and its bound holds for all of them.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from calcvm.errors import MissingExtra
from calcvm.planner.milp import Milp
from calcvm.planner.split.problem import Assigned, AssignmentProblem

TRIALS = 3000  # assignments that the annealing evaluates
FEW = 3000  # up to this many assignments, all are evaluated
# Penalty, in parts of the seconds, for exceeding the budgets by all of the memory: annealing may pass through such assignments.
EXCESS = 0.3
SEED = 0
UNIT = 1e-3  # the solver's unit of cost, in parts of the best known one


def assign(problem: AssignmentProblem, solver_seconds: float = 0.0, known: Sequence[Sequence[int]] = ()) -> Assigned:
    """The cheapest assignment found: never worse than the known ones, or than any single device.

    With ``solver_seconds`` a solver, if installed, continues from there and gives a bound.
    """
    best = _searched(problem, known)
    return _solved(problem, best, solver_seconds) if solver_seconds else best


def _searched(problem: AssignmentProblem, known: Sequence[Sequence[int]]) -> Assigned:
    """Exhaustive search if there are few assignments; else annealing from the best known one."""
    n, devices = problem.n_clusters, [*problem.devices]
    starts = [[d] * n for d in devices] + [list(at) for at in known]
    best = min((problem.evaluate(at) for at in starts), key=lambda a: a.score)
    if len(devices) < 2:
        return best
    if len(devices) ** n <= FEW:
        return min((best, *map(problem.evaluate, product(devices, repeat=n))), key=lambda a: a.score)
    rng, current = random.Random(SEED), best
    largest = max(sum(m for m in problem.memory if m is not None), 1)
    for k in range(TRIALS):
        at = list(current.at)
        d = rng.choice(devices)
        if rng.random() < 0.4:
            at[rng.randrange(n)] = d
        else:
            start = rng.randrange(len(problem.cluster))
            for c in problem.cluster[start : start + 1 + int(rng.expovariate(0.1))]:
                at[c] = d
        trial = problem.evaluate(at)
        heat = 0.02 * (1 - k / TRIALS) ** 2
        worse = (trial.seconds - current.seconds) / max(best.seconds, 1e-12)
        worse += EXCESS * (trial.excess - current.excess) / largest
        if trial.score <= current.score or rng.random() < math.exp(-max(worse, 0.0) / max(heat, 1e-15)):
            current = trial
            if trial.score < best.score:
                best = trial
    return best


# ---------------------------------------------------------------- by a solver
def _solved(problem: AssignmentProblem, best: Assigned, seconds: float) -> Assigned:
    """The best of the known assignment and the solver's, after about ``seconds``; with the solver's bound and status.

    If the solver is missing or fails, the known assignment is returned with the reason.
    """
    start = time.monotonic()
    try:
        program = _Program(problem)
        found = program.milp.solve(seconds, 1 / (unit := max(best.seconds, 1e-12) * UNIT))
    except MissingExtra as error:
        return replace(best, solver=f"{error}; searched only")
    except Exception as error:  # a failing solver must not lose the known assignment
        return replace(best, solver=f"HiGHS failed ({error}): searched only")
    if found.x is not None:
        at = [max(problem.devices, key=lambda d: found.x[X[d]]) for X in program.X]
        best = min(best, problem.evaluate(at), key=lambda a: a.score)
    bound = None
    if found.mip_dual_bound is not None and abs(found.mip_dual_bound) < 1e30:
        bound = min(found.mip_dual_bound * unit, best.seconds)
    return replace(best, bound=bound, solver=f"HiGHS, {time.monotonic() - start:.1f} s")


class _Program:
    def __init__(self, problem: AssignmentProblem):
        self.problem, self.milp = problem, Milp()
        self.unit = max([m for m in problem.memory if m] or [1])
        n, devices, variable = len(problem.cluster), problem.devices, self.milp.variable
        self.X = [[variable(binary=True) for _ in devices] for _ in range(problem.n_clusters)]
        self.live: list[list[dict[int, float]]] = [
            [{} for _ in range(n)] for _ in devices
        ]  # bytes by variable, over time
        for X in self.X:
            self.milp.at_least(dict.fromkeys(X, 1.0), 1.0)
            self.milp.at_most(dict.fromkeys(X, 1.0), 1.0)
        joules: dict[int, float] = {}
        for s, c in enumerate(problem.cluster):
            for d, x in enumerate(self.X[c]):
                self.milp.cost[x] += problem.weight[s] * problem.cost[s][d]
                joules[x] = joules.get(x, 0.0) + problem.weight[s] * problem.joules[s][d]
                self.lives(d, range(s, s + 1), x, problem.scratch[s][d])
        for s, own in enumerate(problem.pairs):  # a relaxation: assumes that every operand that may be overwritten dies
            for d, x in enumerate(self.X[problem.cluster[s]]):
                self.lives(d, range(s, s + 1), x, -sum(problem.made[y][0] for y in {y for y, _ in own}))
        for size, c in problem.homed:
            for d, x in enumerate(self.X[c]):
                self.lives(d, range(n), x, size)
        for read in problem.reads:
            size, c = problem.homed[read.value]
            s = read.statement
            for d, y in self.copied(size, c, [problem.cluster[s]], problem.weight[s]):
                self.lives(d, range(s, s + 1), y, size)
        for v, (size, s, readers) in enumerate(problem.made):
            self.made(size, s, sorted({*readers}), v in problem.kept)
        for d, allowed in enumerate(problem.memory):
            if allowed is not None:
                for row in {tuple(sorted(row.items())): row for row in self.live[d]}.values():
                    if sum(max(a, 0.0) for a in row.values()) * self.unit > allowed:
                        self.milp.at_most(row, allowed / self.unit)
        if problem.joules_allowed is not None:
            self.milp.at_most(joules, problem.joules_allowed)

    def lives(self, d: int, times: range, x: int, size: int) -> None:
        """Count ``size`` bytes as live on device ``d`` at ``times`` if variable ``x`` is 1."""
        for row in (self.live[d][t] for t in times if size):
            row[x] = row.get(x, 0.0) + size / self.unit

    def copied(self, size: int, source: int, targets: list[int], weight: float) -> list[tuple[int, int]]:
        """Copies from the device of cluster ``source`` to each other device that has a target cluster: (device, variable)."""
        out = []
        for d in self.problem.devices:
            for o in self.problem.devices:
                if o != d:
                    y = self.milp.variable(weight * self.problem.copies(o, d, size))
                    for target in targets:
                        self.milp.covers(y, (self.X[source][o], self.X[target][d]))
                    out.append((d, y))
        return out

    def made(self, size: int, s: int, readers: list[int], kept: bool) -> None:
        """A value is live on the device that makes it, and on each device that reads it, until the last read there.

        kept : on the device that makes it, it is live all the time.
        """
        problem, c = self.problem, self.problem.cluster[s]
        for d in problem.devices:
            own = self.X[c][d]
            if kept:
                self.lives(d, range(len(problem.cluster)), own, size)
            later: list[int] = []  # whether it (if kept: a copy of it) is needed there at the next read
            for k in reversed(range(len(readers))):
                needed, row = self.milp.variable(), {self.X[problem.cluster[readers[k]]][d]: -1.0}
                if kept:
                    row[own] = row.get(own, 0.0) + 1.0
                self.milp.at_least({needed: 1.0, **row}, 0.0)
                for x in later:
                    self.milp.covers(needed, (x,))
                later = [needed]
                self.lives(d, range(readers[k - 1] + 1 if k else s + 1, readers[k] + 1), needed, size)
            here = self.milp.variable()
            for x in (*([] if kept else [own]), *later):
                self.milp.covers(here, (x,))
            self.lives(d, range(s, s + 1), here, size)
        if targets := [*{problem.cluster[r] for r in readers} - {c}]:
            self.copied(size, c, targets, problem.weight[s])

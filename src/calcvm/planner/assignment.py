"""The cheapest assignment of statements to devices: searched, and by a mixed-integer program, which says how cheap any can be.

After Schuler et al. 2022 (XEngine), without recomputation: X[c,d], cluster c of statements runs on device d; Y[v,s,d], value v made
on s is copied to d; L[v,d,j], v is needed on d at its j-th read or later.  All is linear.  A statement that may work in place is
taken to do so: no assignment that fits is shut out, and the bound is one of all that do.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from calcvm.errors import MissingExtra
from calcvm.planner.devices import Assigned, Problem
from calcvm.planner.milp import Milp

TRIALS = 3000  # assignments that the search looks at
FEW = 3000  # of so many it looks at all
# What all memory above what is allowed counts, as a part of the seconds: the way to what fits may lead through it.
EXCESS = 0.3
SEED = 0
UNIT = 1e-3  # costs are handed over in thousandths of what is known


def assign(problem: Problem, solver_seconds: float = 0.0, known: Sequence[Sequence[int]] = ()) -> Assigned:
    """The cheapest assignment found: never worse than all on one device, nor than those that are known.

    With ``solver_seconds`` a solver looks on, where it is installed, and gives a bound.
    """
    best = _searched(problem, known)
    return _solved(problem, best, solver_seconds) if solver_seconds else best


def _searched(problem: Problem, known: Sequence[Sequence[int]]) -> Assigned:
    """All that there are, if few; else annealing from the best of those that are known."""
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
def _solved(problem: Problem, best: Assigned, seconds: float) -> Assigned:
    """The best of what is known and of what the solver finds in about so many seconds; with its bound, and what it says.

    Without the solver, or where it fails, it is what is known, and says why.
    """
    start = time.monotonic()
    try:
        program = _Program(problem)
        found = program.milp.solve(seconds, 1 / (unit := max(best.seconds, 1e-12) * UNIT))
    except MissingExtra as error:
        return replace(best, solver=f"{error}; searched only")
    except Exception as error:  # whatever goes wrong in a solver, there is an answer
        return replace(best, solver=f"HiGHS failed ({error}): searched only")
    if found.x is not None:
        at = [max(problem.devices, key=lambda d: found.x[X[d]]) for X in program.X]
        best = min(best, problem.evaluate(at), key=lambda a: a.score)
    bound = None
    if found.mip_dual_bound is not None and abs(found.mip_dual_bound) < 1e30:
        bound = min(found.mip_dual_bound * unit, best.seconds)
    return replace(best, bound=bound, solver=f"HiGHS, {time.monotonic() - start:.1f} s")


class _Program:
    def __init__(self, problem: Problem):
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
        for s, own in enumerate(problem.pairs):  # at least as much as can be: which of what is read dies is not asked
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
        """Bytes that are live on a device where a variable is 1."""
        for row in (self.live[d][t] for t in times if size):
            row[x] = row.get(x, 0.0) + size / self.unit

    def copied(self, size: int, source: int, targets: list[int], weight: float) -> list[tuple[int, int]]:
        """Copies from a cluster's device to another where some of others are: that device, and a variable."""
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
        """A value that a statement makes lives where that runs, and wherever it is read until its last read there.

        kept : where it is made it lives all the time.
        """
        problem, c = self.problem, self.problem.cluster[s]
        for d in problem.devices:
            own = self.X[c][d]
            if kept:
                self.lives(d, range(len(problem.cluster)), own, size)
            later: list[int] = []  # whether it is needed there at the read after; of what is kept, a copy of it
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

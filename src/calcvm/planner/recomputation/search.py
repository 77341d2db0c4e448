"""The search for a cheap schedule of recomputation.  It needs no solver; solvers may improve its result (`race`).

First a greedy descent: drop a value that is idle at the peak, and recompute it before its next read, together with all its inputs
that died before the peak.  The drop with the largest reduction per work comes first.  Then a local search removes parts of the
schedule, repairs it with such drops, and keeps the cheaper schedule.

Overhead of a step in per cent, reckoned and measured (Zen 4):

| network | 75 % of the memory | less |
|---|---|---|
| ResNet-18, batch 8 | 1.1, 0.5 | 62 %: 6.1, 5.2 |
| UNet at 256, batch 2 | 0.5, 0.0 | 50 %: 13.3, 11.3 |
| MobileNetV2 at 224, batch 8 | 4.4, 0.0 | 50 %: 9.7, 1.1 |

The search takes 2 s.  In 4 s it finds 0.0 to 0.2 points less, and 3.3 points less for a UNet with a tenth more than its floor.

More memory can give a more expensive schedule: a UNet once took 4.33 % of a step, and 4.41 % with a little more memory.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from calcvm.planner.recomputation.schedule import Pair, RecomputationProblem, Run

TRIALS = 6  # the most promising drops, whose peaks are computed
EFFORT = 1_000_000  # statements that the search may replay to make a schedule cheaper: about two seconds
IDLE = 1000  # schedules in a row without improvement, after which it stops: small programs have few schedules
# Statements that it may replay to find a first schedule.  A chain of 300 layers in 80 % of the memory takes two seconds; 600 layers in
# 60 %, or 1000 in 80 %, take half a minute.
PATIENCE = 3000 * EFFORT
SEED = 0


def drops(problem: RecomputationProblem, run: Run, p: int) -> list[frozenset[Pair]]:
    """Sets of pairs, each of which lets a value be dead at key ``p``, sorted by bytes per work."""
    found: dict[frozenset[Pair], float] = {}
    placed = {x for _, x in problem.step(problem.at(p)[1]).pairs}  # values that the statement may overwrite if they die
    idle = sorted(
        (life[0], v, life[bisect_right(life, p)])
        for v, life in run.over(p)
        if life[0] < p < life[-1] and (v in placed or p not in life)
    )
    for _, v, next_read in idle:
        t = problem.at(next_read)[0]
        for pairs in (_again_before(problem, run, v, t, p), _read(problem, run, v, t) - run.chosen):
            if pairs:
                cost = sum(_work(problem, run, s) for _, s in pairs)
                found[pairs] = found.get(pairs, 0) + problem.sizes[v] / max(cost, 1e-12)
    return sorted(found, key=lambda pairs: (-found[pairs], sorted(pairs)))


def _again_before(problem: RecomputationProblem, run: Run, value: int, t: int, p: int) -> frozenset[Pair]:
    """The pairs that recompute a value before ``t`` from values that are live at ``p`` or made later (empty: impossible)."""
    out: set[Pair] = set()
    todo = [problem.maker[value]]
    while todo:
        s = todo.pop()
        if not problem.backward <= t <= problem.steps[s].until:
            return frozenset()
        if (t, s) in out or (t, s) in run.chosen:
            continue
        out.add((t, s))
        for v in problem.steps[s].uses:
            if run.found(v, t)[-1] < p:
                maker = problem.steps[problem.maker[v]]
                page = _read(problem, run, v, t)
                if page and (t > maker.until or _work(problem, run, problem.page[v]) < maker.cost):
                    out |= page
                elif t <= maker.until:
                    todo.append(problem.maker[v])
    return frozenset(out)


def _read(problem: RecomputationProblem, run: Run, value: int, t: int) -> frozenset[Pair]:
    """The page step that brings a value back before ``t`` (empty: there is none, or no room)."""
    if value not in problem.page or t < problem.backward:
        return frozenset()
    needed = sum(problem.sizes[v] for v in run.paged | {value})
    return frozenset([(t, problem.page[value])] if needed <= problem.room else ())


def _work(problem: RecomputationProblem, run: Run, s: int) -> float:
    """The cost that a step adds to a schedule; the first read of a page includes writing it."""
    v = problem.step(s).makes[0]
    return problem.step(s).cost + (problem.written[v] if s < 0 and v not in run.paged else 0.0)


# ---------------------------------------------------------------- the search
def mend(problem: RecomputationProblem, run: Run, choose: Callable[[Sequence[Run]], Run]) -> Run:
    """Drop values at the peaks until the schedule is below the limit, or no drop reduces its excess."""
    while run.excess and problem.followed < PATIENCE and (better := _lower(problem, run)):
        run = choose(better)
    return run


def _lower(problem: RecomputationProblem, run: Run) -> list[Run]:
    """Schedules with less excess, the largest reduction per work first, from the highest peak that has any."""
    over = np.flatnonzero(run.counted > problem.limit)
    over = over[np.argsort(-run.counted[over], kind="stable")]
    for p in run.keys[over].tolist():
        better: list[Run] = []
        for n, chosen in enumerate(_trials(problem, run, p)):
            if n >= TRIALS and better:
                break
            trial = problem.run(chosen, run)
            if trial.excess < run.excess:
                better.append(trial)
        if better:
            return sorted(better, key=lambda r: (r.excess - run.excess) / max(r.cost - run.cost, 1e-9))
    return []


def _trials(problem: RecomputationProblem, run: Run, p: int) -> Iterator[frozenset[Pair]]:
    """Schedules with possibly less live at key ``p``: with a drop, or without a recomputed value that is live there."""
    for pairs in drops(problem, run, p):
        yield run.chosen | pairs
    here = {problem.at(life[0]) for _, life in run.over(p)} & run.chosen
    for pair in sorted(here):
        yield run.chosen - {pair}


def solve(problem: RecomputationProblem, known: Iterable[Run] = ()) -> Run:
    """The cheapest schedule found, at most as expensive as the known ones; it may still have an `excess` over the limit."""
    rng = random.Random(SEED)
    greedy = mend(problem, problem.run(()), lambda found: found[0])
    best = min([greedy, *(problem.run(run.chosen) for run in known)], key=lambda run: run.score)
    idle = 0
    while best.chosen and problem.followed < EFFORT and idle < IDLE:
        kept = _less(best, rng)
        run = mend(
            problem, problem.run(kept, best), lambda found: found[min(int(rng.expovariate(1.5)), len(found) - 1)]
        )
        idle = 0 if run.score < best.score else idle + 1
        if run.score <= best.score:
            best = run
    return best


def _less(run: Run, rng: random.Random) -> frozenset[Pair]:
    """A schedule without some of its pairs: all pairs of some stages, or a random share of all."""
    if rng.random() < 0.5:
        gone = {t for t, _ in run.chosen if rng.random() < 0.3} or {rng.choice(sorted(run.chosen))[0]}
        return frozenset(pair for pair in run.chosen if pair[0] not in gone)
    share = rng.choice((0.1, 0.3, 0.6))
    return frozenset(pair for pair in sorted(run.chosen) if rng.random() > share)

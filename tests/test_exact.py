"""The solver's schedules of recomputation: beside all schedules of small problems, and on networks."""

from __future__ import annotations

import random
import signal
from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

import pytest

import calcvm as cv
from bench.planner import problem_of
from calcvm.planner.recomputation.schedule import RecomputationProblem, Run, Step
from calcvm.planner.recomputation.search import mend, solve
from calcvm.planner.recomputation.stages import SolverChannel, Stages

pytest.importorskip("scipy")
from calcvm.planner.recomputation import bound_groups, bound_groups_sat, highs  # noqa: E402
from tests.conftest import ENOUGH

ALWAYS = 10**6


def generated(rng: random.Random) -> tuple[list[Step], list[int], int]:
    """A few statements that read earlier ones, and a backward that reads what they read, or made; some in place."""
    n, steps, sizes, made = rng.randint(3, 4), [], [], []
    for _ in range(n):
        v, uses = len(sizes), set(rng.sample(made, min(len(made), rng.randint(1, 2))))
        if made and rng.random() < 0.7:
            uses.add(made[-1])
        sizes.append(rng.randint(1, 9))
        pairs = tuple((v, u) for u in sorted(uses) if sizes[u] == sizes[v] and rng.random() < 0.7)
        until = ALWAYS if rng.random() < 0.85 else -1
        cost, scratch = float(rng.randint(1, 5)), rng.choice((0, 0, 2))
        steps.append(Step(uses=tuple(sorted(uses)), makes=(v,), pairs=pairs, scratch=scratch, cost=cost, until=until))
        made.append(v)
    above: set[int] = set()
    for i in reversed(range(n)):
        v, uses = len(sizes), {*steps[i].uses, *above, *([made[i]] if rng.random() < 0.5 else [])} or {made[i]}
        sizes.append(rng.randint(1, 6))
        pairs = tuple((v, u) for u in sorted(uses) if sizes[u] == sizes[v])
        steps.append(Step(uses=tuple(sorted(uses)), makes=(v,), pairs=pairs, scratch=0, cost=1.0, until=-1))
        above = {v}
    return steps, sizes, n


def limited(seed: int) -> RecomputationProblem:
    rng = random.Random(seed)
    steps, sizes, n = generated(rng)
    floor, peak = (
        RecomputationProblem(steps, sizes, n, 0).floor[0],
        RecomputationProblem(steps, sizes, n, 0).run(()).peak,
    )
    return RecomputationProblem(steps, sizes, n, rng.randint(floor, max(floor, peak - 1)))


def followed(problem: RecomputationProblem, chosen: frozenset[tuple[int, int]]) -> dict[str, object]:
    """A schedule statement by statement, from its definition."""
    order = [(t, s) for t in range(len(problem.steps)) for s in [*sorted(s for u, s in chosen if u == t), t]]
    found: dict[int, int] = {}  # by value the version that is there
    touches: list[list[int]] = []
    of: list[int] = []
    shared = []
    for p, (_, s) in enumerate(order):
        step = problem.step(s)
        for v in step.uses:
            touches[found[v]].append(p)
        for v in step.makes:
            found[v] = len(of)
            of.append(v)
            touches.append([p])
        shared += [(found[y], found[x], p) for y, x in step.pairs]
    live = [problem.step(s).scratch for _, s in order]
    for v, places in zip(of, touches, strict=True):
        for p in range(places[0], places[-1] + 1):
            live[p] += problem.sizes[v]
    taken, placed = set[int](), set[int]()
    for y, x, p in shared:
        if touches[x][-1] == p and x not in taken and y not in placed:
            taken.add(x)
            placed.add(y)
            live[p] -= problem.sizes[of[y]]
    read = [[order[p] for p in places] for places in touches]
    return {
        "order": [s for _, s in order],
        "stage": [t for t, _ in order],
        "touches": touches,
        "live": live,
        "useless": chosen - {places[0] for places in read if len(places) > 1},
        "versions": [[u for u, own in enumerate(of) if own == v] for v in range(len(problem.sizes))],
    }


@pytest.mark.parametrize("seed", range(30))
def test_a_schedule_followed_from_another_is_what_it_is_by_itself(seed: int) -> None:
    """From any other schedule of any difference, pages among them."""
    rng = random.Random(seed)
    steps, sizes, n = generated(rng)
    pages = [Step((), (v,), (), 0, ALWAYS, 1.0) for v in range(n)] if seed % 2 else []
    problem = RecomputationProblem(steps, sizes, n, max(sizes), pages, dict.fromkeys(range(n), 1.0), sum(sizes))
    pairs = [(t, s) for t in range(n, len(steps)) for s in range(-len(pages), n)]
    may = [pair for pair in pairs if problem.allows([pair])]
    run = problem.nothing
    for _ in range(12):
        run = Run(problem, frozenset(rng.sample(may, rng.randint(0, len(may)))), run)
        told = followed(problem, run.chosen)
        assert run.useless() == told.pop("useless")
        assert {name: getattr(run, name) for name in told} == told
        assert run.peak == max(run.live) and run.area == sum(run.live)


def searched(problem: RecomputationProblem) -> Run:
    """What the first descent of the search finds: some exceed the limit."""
    return mend(problem, problem.run(()), lambda found: found[0])


def cheapest(problem: RecomputationProblem, most: int = 5) -> Run | None:
    """Of all schedules of few statements that run again, or are read."""
    n = problem.backward
    some = range(-len(problem.pages), n)
    pairs = [(t, s) for t in range(n, len(problem.steps)) for s in some if problem.allows([(t, s)])]
    runs = (Run(problem, chosen) for k in range(most + 1) for chosen in combinations(pairs, k))
    return min((run for run in runs if not run.excess), key=lambda run: run.cost, default=None)


@cache
def cheapest_of(seed: int, most: int = 5) -> Run | None:
    """Of `limited`, which several tests ask for."""
    return cheapest(limited(seed), most)


@pytest.fixture(autouse=True)
def first_seeds(request, whole):
    """`make test` takes the first of several ranges of seeds."""
    seeds = getattr(request.node, "callspec", None) and request.node.callspec.params.get("seeds")
    if seeds and seeds.start and not whole:
        pytest.skip("takes --whole")


@pytest.mark.parametrize("seeds", [range(12), range(12, 24), range(24, 36)], ids=str)
def test_nothing_is_cheaper(seeds):
    again = 0
    for seed in seeds:
        problem = limited(seed)
        best = cheapest_of(seed)
        answer = highs.solve(problem, searched(problem), ENOUGH)
        assert answer.run.excess == (problem.run(answer.run.chosen)).excess
        if best is None:
            assert answer.run.excess, seed
            continue
        again += best.cost > 0
        assert not answer.run.excess and answer.run.cost == pytest.approx(best.cost), seed
        assert answer.bound == pytest.approx(best.cost), seed
    assert again >= 2


class Heard(SolverChannel):
    """What a solver says."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.bounds: list[float] = []

    def found(self, run: Run) -> None:
        self.runs.append(run)

    def bound(self, bound: float) -> None:
        self.bounds.append(bound)


@pytest.mark.parametrize("versions", [2, 3, None])
@pytest.mark.parametrize("seeds", [range(12), range(12, 24), range(24, 36)], ids=str)
def test_no_intervals_are_cheaper(seeds, versions):
    """All schedules of so many versions, each as its `Run` says: never below the cheapest of all, and it where all can pay."""
    pytest.importorskip("ortools")
    from calcvm.planner.recomputation.cpsat import Intervals

    met = 0
    for seed in seeds:
        problem = limited(seed)
        best, known = cheapest_of(seed), searched(problem)
        found: list[Any] = []
        model = Intervals(problem, known, versions)
        least, settled = model.solve(ENOUGH, found.append)
        assert settled, seed
        runs = [problem.run(chosen) for chosen in found]
        assert not any(run.excess for run in runs), seed
        if best is None:
            assert not runs
            continue
        here = min((run.cost for run in [*runs, known] if not run.excess), default=float("inf"))
        assert here >= best.cost - 1e-6 and min(least, model.beyond) <= best.cost + 1e-6, seed
        if versions is None and not known.excess:
            assert here == pytest.approx(best.cost), seed
            met += best.cost > 0
        if model.beyond > best.cost and runs:
            assert least == pytest.approx(best.cost), seed
    assert versions is not None or met >= 1


@pytest.mark.parametrize("solver", ["HiGHS", "CP-SAT"])
@pytest.mark.parametrize("groups", [1, 2, 4, 99])
@pytest.mark.parametrize("seeds", [range(8), range(8, 24), range(24, 48)], ids=str)
def test_no_bound_of_groups_is_above_the_cheapest(seeds, groups, solver):
    if solver == "CP-SAT":
        pytest.importorskip("ortools")
    kind, met, proved = {"HiGHS": bound_groups.Grouped, "CP-SAT": bound_groups_sat.Whole}[solver], 0, 0
    for seed in seeds:
        problem = limited(seed)
        best, known, heard = cheapest_of(seed), searched(problem), Heard()
        if best is None or known.excess:
            continue
        answer = bound_groups.solve(problem, known, ENOUGH, heard, groups, kind)
        assert all(bound <= best.cost + 1e-6 for bound in [*heard.bounds, answer.bound]), seed
        assert answer.run.cost >= best.cost - 1e-6 and not answer.run.excess
        met += 1
        proved += answer.bound == pytest.approx(best.cost)
    assert met >= len(seeds) // 2 and proved >= 0.9 * met


def test_groups_are_parted_until_a_network_s_schedule_is_the_cheapest(whole):
    """Of a UNet, from one group on; a solver of all its stages proves the same."""
    if not whole:
        pytest.skip("takes --whole")
    graph = cv.build_graph(cv.zoo.unet(width=4, size=32), (1, 32, 32), "mse", cv.SGD(0.1))
    memory = int(0.55 * cv.plan(graph, batch_size=8, workers=1).heap_bytes)
    problem, heard = problem_of(graph, 8, memory)[0], Heard()
    known = solve(problem)
    answer = bound_groups.solve(problem, known, ENOUGH, heard, 1)
    assert heard.bounds[0] < 0.95 * answer.bound  # one is too coarse
    assert answer.bound == pytest.approx(answer.run.cost, rel=1e-5) and not answer.run.excess
    assert highs.solve(problem, known, ENOUGH).run.cost == pytest.approx(answer.run.cost, rel=1e-5)


def test_rows_of_whole_numbers_lose_nothing():
    """All of 0 and 1 that fits a row fits the one of whole numbers, whose coefficients are of any sign."""
    rng = random.Random(0)
    for _ in range(200):
        row = {x: rng.choice((rng.uniform(-1, 1), 1 / 3, -2 / 3, 1e-7, 1.0)) for x in range(4)}
        for chosen in range(16):
            there = [x for x in row if chosen >> x & 1]
            most = sum(row[x] for x in there)  # so it fits just so
            whole, at_most = bound_groups_sat.rounded(row, most)
            assert sum(whole[x] for x in there) <= at_most


@pytest.mark.parametrize("seed", range(36))
def test_a_schedule_runs_nothing_more_often_than_can_pay(seed):
    problem = limited(seed)
    best = cheapest_of(seed)
    if best is not None:
        most = Stages(problem).most(best.cost)
        assert all(sum(i == s for _, s in best.chosen) <= n for i, n in most.items())


@pytest.mark.parametrize("seed", range(4))
def test_what_is_known_is_kept_where_there_is_no_time(seed):
    problem = limited(13 + 4 * seed)
    known = searched(problem)
    answer = highs.solve(problem, known, 1e-9)
    assert answer.run is known and answer.bound <= known.cost


def test_intervals_leave_ctrl_c_alone():
    """CP-SAT takes its handler unless it is told not to, and leaves that of C, by which the process ends."""
    pytest.importorskip("ortools")
    from calcvm.planner.recomputation.cpsat import Intervals

    problem = limited(0)
    Intervals(problem, searched(problem), 2).solve(ENOUGH, lambda chosen: None)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_network_in_less_memory_with_a_proof():
    graph = cv.build_graph(cv.zoo.unet(width=4, size=32), (1, 32, 32), "mse", cv.SGD(0.1))
    whole = cv.plan(graph, batch_size=8, workers=1)
    searched = cv.plan(graph, batch_size=8, workers=1, memory=int(0.9 * whole.heap_bytes))
    solved = cv.plan(graph, batch_size=8, workers=1, memory=int(0.9 * whole.heap_bytes), solver_seconds=ENOUGH)
    assert searched.lower_bound is None and not searched.proved and searched.recomputed
    assert 0 < solved.lower_bound <= solved.overhead + 1e-9 and solved.overhead <= searched.overhead + 1e-9
    assert solved.proved == (solved.overhead <= solved.lower_bound * (1 + 1e-6))
    assert "recomputed" in str(solved) and solved.to_dict()["proved"] == solved.proved
    assert cv.compile(graph, plan=solved).heap_bytes == solved.heap_bytes


@pytest.mark.parametrize("wrong", [-1, float("nan"), "ten", True])
def test_seconds_are_seconds(wrong):
    graph = cv.build_graph(cv.nn.Linear(3), (2,), "mse", cv.SGD(0.1))
    with pytest.raises(cv.CalcError, match="solver_seconds"):
        cv.plan(graph, batch_size=2, memory="1 MiB", solver_seconds=wrong)


# ---------------------------------------------------------------- pages
def paged(
    problem: RecomputationProblem, bandwidth: float, room: int = 10**6, again: bool = True
) -> RecomputationProblem:
    """The problem with a file for what the forward makes."""
    pages = [
        Step((), (v,), (), 0, len(problem.steps) - 1, problem.sizes[v] / bandwidth) for v in range(problem.backward)
    ]
    steps = [step if again else replace(step, until=-1) for step in problem.steps]
    written = {v: problem.sizes[v] / bandwidth for v in range(problem.backward)}
    return RecomputationProblem(steps, problem.sizes, problem.backward, problem.limit, pages, written, room)


SMALL = [seed for seed in range(60) if limited(seed).backward == 3]


@pytest.mark.parametrize(("bandwidth", "room"), [(2.0, 10**6), (2.0, 5)])
@pytest.mark.parametrize("again", [True, False])
def test_nothing_is_cheaper_with_pages(bandwidth, room, again, whole):
    """Beside all schedules of four statements that run again or are read, in a roomy file and in a small one."""
    moved = made = False
    for seed in SMALL[: None if whole else 12]:
        problem = paged(limited(seed), bandwidth, room, again)
        best, known, without = cheapest(problem, 4), searched(problem), cheapest_of(seed, 4)
        answer = highs.solve(problem, known, ENOUGH)
        run = problem.run(answer.run.chosen)
        assert problem.allows(run.chosen) and run.score == answer.run.score <= known.score
        if best is None:
            continue
        assert not run.excess and run.cost == pytest.approx(best.cost), seed
        assert answer.bound == pytest.approx(best.cost), seed
        assert without is None or not again or run.cost <= without.cost + 1e-9
        moved |= bool(run.paged)
        made |= any(s >= 0 for _, s in run.chosen)
    assert moved and made == again


@pytest.mark.parametrize("seeds", [range(12), range(12, 24), range(24, 36)], ids=str)
def test_a_slow_file_is_as_none(seeds):
    same = 0
    for seed in seeds:
        problem = limited(seed)
        alone = highs.solve(problem, searched(problem), ENOUGH)
        if alone.run.excess:
            continue
        slow = paged(problem, 1e-3)
        answer = highs.solve(slow, searched(slow), ENOUGH)
        assert answer.run.cost == pytest.approx(alone.run.cost) and answer.bound == pytest.approx(alone.bound), seed
        assert not answer.run.paged
        same += bool(answer.run.chosen)
    assert same

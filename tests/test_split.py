"""Networks on several devices: assignments beside all that there are, runs beside those of one device."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import random
import signal
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

import calcvm as cv
from calcvm import planner
from calcvm.planner.split import assignment
from calcvm.planner.split.assignment import FEW, assign
from calcvm.planner.split.problem import AssignmentProblem, Read, problem_of
from calcvm.split_model import plan as devices
from tests.conftest import ENOUGH


# ---------------------------------------------------------------- assignments
def random_problem(seed: int) -> AssignmentProblem:
    """A few statements in a few clusters, on two or three devices, one of which has little memory."""
    rng = random.Random(seed)
    n, n_devices = rng.randint(4, 8), rng.choice((2, 2, 3))
    n_clusters = rng.randint(3, 6 if n_devices == 2 else 4)
    cluster = [rng.randrange(n_clusters) for _ in range(n)]
    homed = [(rng.randint(1, 9) * 64, rng.randrange(n_clusters)) for _ in range(rng.randint(1, 4))]
    reads = [
        Read(s, v) for v in range(len(homed)) for s in range(n) if rng.random() < 0.4 and cluster[s] != homed[v][1]
    ]
    made = []
    for s in range(n - 1):
        readers = sorted(rng.sample(range(s + 1, n), rng.randint(0, min(3, n - s - 1))))
        made.append((rng.randint(1, 9) * 64, s, tuple(readers)))
    cost = tuple(tuple(rng.choice((1.0, 2.0, 5.0)) for _ in range(n_devices)) for _ in range(n))
    return AssignmentProblem(
        cluster=tuple(cluster),
        cost=cost,
        joules=tuple(tuple(c * rng.choice((0.5, 1.0, 2.0)) for c in row) for row in cost),
        scratch=tuple(tuple(rng.choice((0, 64)) for _ in range(n_devices)) for _ in range(n)),
        homed=tuple(homed),
        reads=tuple(reads),
        made=tuple(made),
        weight=(1.0,) * n,
        memory=tuple(rng.choice((None, 1024, 1536, 2048)) for _ in range(n_devices)),
        copies=lambda source, target, nbytes: 0.1 * (1 + source) + nbytes / 2000,
        joules_allowed=rng.choice((None, None, 12.0)),
        n_clusters=n_clusters,
        kept=frozenset(v for v in range(len(made)) if rng.random() < 0.25),
    )


@pytest.mark.parametrize("seed", range(40))
def test_no_assignment_is_cheaper(seed, monkeypatch):
    problem = random_problem(seed)
    every = [problem.evaluate(at) for at in itertools.product(problem.devices, repeat=problem.n_clusters)]
    least = min(every, key=lambda a: a.score)
    assert assign(problem).score == least.score
    monkeypatch.setattr(assignment, "FEW", 0)  # as of many
    searched, solved = assign(problem), assign(problem, solver_seconds=ENOUGH)
    assert searched.excess == solved.excess == 0 or least.excess > 0
    if least.excess == 0:
        assert solved.seconds == pytest.approx(least.seconds, rel=1e-5)
        assert solved.bound == pytest.approx(least.seconds, rel=1e-4)
        assert solved.proved
        assert least.seconds - 1e-9 <= searched.seconds <= 1.1 * least.seconds


def test_the_search_goes_on_without_a_solver(monkeypatch):
    problem = random_problem(0)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "scipy", None)
        found = assign(problem, solver_seconds=5)
    assert found.seconds == assign(problem).seconds and found.bound is None
    assert "calcvm[solver]" in found.solver

    def crash(*_, **__):
        raise RuntimeError("out of luck")

    monkeypatch.setattr("calcvm.planner.milp.Milp.solve", crash)
    found = assign(problem, solver_seconds=5)
    assert found.seconds == assign(problem).seconds and "out of luck" in found.solver


def chain(ops: str, width: int) -> cv.CalcGraph:
    """A path that only predicts: an operator a letter, of which most may work in the place of what they read."""
    made = {"t": cv.tanh, "e": cv.exp, "a": lambda h: h + 1.0, "m": lambda h: h * h, "s": lambda h: cv.softmax(h)}
    g = cv.CalcGraph()
    h = g.placeholder("x", (None, width))
    with g.path("predict"):
        for op in ops:
            h = made[op](h)
        cv.sum(h, axis=1)
    return g


def trained(width: int) -> cv.CalcGraph:
    return cv.build_graph(cv.nn.Linear(width, bias=False) >> cv.nn.Tanh(), (width,), "mse", cv.SGD(0.1))


BATCH, SPEEDS = 64, (("a", 1.0), ("b", 0.6))
SMALL = [lambda: chain("tetae", 64), lambda: chain("mets", 48)]
MORE = [lambda: trained(16), lambda: chain("tsemat", 32), lambda: chain("mmmm", 64)]


@pytest.mark.parametrize("k", range(len(SMALL + MORE)))
def test_no_assignment_that_fits_is_below_the_bound(k, whole):
    """Beside all assignments, each planned for real: the least seconds of those that fit, for budgets between their heaps."""
    if k >= len(SMALL) and not whole:
        pytest.skip("takes --whole")
    pytest.importorskip("scipy")
    graph = (SMALL + MORE)[k]()
    processors = [cv.Processor(name, speed=speed) for name, speed in SPEEDS]
    with contextlib.ExitStack() as measuring:
        sites = devices._sites(graph, processors, BATCH, "float32", False, measuring)
        problem, clusters = problem_of(sites, BATCH, devices._links(processors, None))
    every = []
    for at in itertools.product(problem.devices, repeat=problem.n_clusters):
        found = problem.evaluate(at)
        home = {i: at[c] for i, c in clusters.items()}
        heaps = []
        parts = devices.parts_of([site.lowered for site in sites], found.where, home, "float32")
        for d, part in enumerate(parts.lowered):
            options = dict(itemsize=4, batch_size=BATCH, workers=1)
            needed = planner.plan(part, as_given=True, **options).heap_bytes if part.statements or part.values else 0
            if not parts.copies and needed:
                needed = min(needed, planner.plan(sites[d].lowered, **options).heap_bytes)
            else:  # what an assignment is taken to need, it does: in another order all on one device may need less
                assert needed == (found.peaks[d] + 64 if part.statements or part.values else 0)
            heaps.append(needed)
        every.append((found.seconds, *heaps))
    sizes = sorted({a for _, a, b in every if a and b}), sorted({b for _, a, b in every if a and b})
    rng, compared = random.Random(k), 0
    for _ in range(12 if whole else 4):
        budget = [rng.choice(each) for each in sizes]
        if not (fits := [seconds for seconds, a, b in every if a <= budget[0] and b <= budget[1]]):
            continue
        limited = [cv.Processor(name, speed=speed, memory=m) for (name, speed), m in zip(SPEEDS, budget, strict=True)]
        plan = cv.plan_devices(graph, limited, batch_size=BATCH, solver_seconds=ENOUGH)
        assert all(plan.heap_bytes[p.name] <= p.memory for p in limited)
        assert min(fits) * (1 - 1e-6) <= plan.seconds and plan.lower_bound <= min(fits) * (1 + 1e-6), budget
        if plan.proved or len(every) <= FEW:  # of so many it looks at all
            assert plan.seconds == pytest.approx(min(fits), rel=1e-5), budget
        assert plan.proved == (", proved" in plan.solver)
        compared += 1
    assert compared


# ---------------------------------------------------------------- runs
def network(seed: int) -> tuple[cv.CalcGraph, tuple[int, ...]]:
    rng = random.Random(seed)
    if seed % 4 == 3:  # images
        layers = [
            cv.nn.Conv2d(8, 3, padding=1), cv.nn.BatchNorm(), cv.nn.ReLU(), cv.nn.MaxPool2d(2),
            cv.nn.Conv2d(8, 3, padding=1), cv.nn.ReLU(), cv.nn.Flatten(), cv.nn.Dropout(0.3), cv.nn.Linear(5),
        ]  # fmt: skip
        shape: tuple[int, ...] = (2, 8, 8)
    else:
        layers = []
        for _ in range(rng.randint(2, 5)):
            layers += [cv.nn.Linear(rng.choice((7, 32, 64)))]
            layers += rng.sample(
                [cv.nn.Tanh(), cv.nn.BatchNorm(), cv.nn.Dropout(0.2), cv.nn.LayerNorm(), cv.nn.GELU()],
                rng.randint(0, 3),
            )
        layers.append(cv.nn.Linear(5))
        shape = (12,)
    optimizer = rng.choice((cv.SGD(0.05, momentum=0.9), cv.Adam(1e-2), cv.SGD(0.01)))
    return cv.build_graph(cv.nn.Sequential(*layers), shape, "mse", optimizer), shape


def data_of(shape: tuple[int, ...], batches: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(b, *shape)), rng.normal(size=(b, 5))) for b in batches]


@pytest.mark.parametrize("seed", range(12))
def test_splitting_changes_no_bit(seed, whole):
    if seed > 5 and not whole:
        pytest.skip("takes --whole")
    graph, shape = network(seed)
    accumulate, dtype = seed % 2 == 0, ("float32", "float64")[seed % 3 == 0]
    program = cv.compile(graph, batch_size=16, workers=1, accumulate=accumulate, dtype=dtype)
    one = cv.CalcHeap(program.heap_bytes).create(program, seed=seed)
    rng = random.Random(seed)
    costs = {row: rng.uniform(1e-6, 1e-4) for row, _ in program.instructions}  # so that work goes to and fro
    plan = cv.plan_devices(
        graph,
        [cv.Processor("a"), cv.Processor("b", workers=2, cores=[0], costs=costs)],
        batch_size=16,
        accumulate=accumulate,
        dtype=dtype,
        copies={("a", "b"): (1e-7, 1e12), ("b", "a"): (1e-7, 1e12)},
    )
    split = cv.SplitModel(plan, seed=seed)
    data = data_of(shape, [16, 5, one.loaded.least("learn")[0], 16, 7])
    assert [split.step(*each) for each in data] == [one.step(*each) for each in data]
    image = {s.name: one.slot.cells(replace(s, layout=""), (s.elems.b,)) for s in program.symbols if s.persistent}
    state = split.state()
    assert state.keys() == {s.name for s in program.symbols if s.persistent and not s.members}
    for name, value in state.items():
        np.testing.assert_array_equal(value, image[name], err_msg=name)
    for name, value in one.parameters.items():
        np.testing.assert_array_equal(split.parameters[name], value, err_msg=name)
    x = data[1][0]
    one["input"] = x
    one.run_section("predict", "forward")
    np.testing.assert_array_equal(split.run("predict", x), one["output"])


def test_two_devices_hold_what_neither_does_alone():
    graph, shape = network(1)
    whole = cv.plan(graph, batch_size=16, workers=1)
    allowed = int(0.75 * whole.heap_bytes)
    processors = [cv.Processor("a", memory=allowed), cv.Processor("b", memory=allowed)]
    plan = cv.plan_devices(graph, processors, batch_size=16)
    assert plan.alone == (None, None)
    assert all(0 < b <= allowed for b in plan.heap_bytes.values())
    assert len({*plan.where}) == 2 and plan.copied_bytes > 0
    one = cv.CalcHeap(whole.heap_bytes).create(cv.compile(graph, plan=whole), seed=3)
    split = cv.SplitModel(plan, seed=3)
    for part, nbytes in zip(split._parts, plan.heap_bytes.values()):
        assert part.program.heap_bytes == nbytes
    for x, t in data_of(shape, [16, 3]):
        assert split.step(x, t) == one.step(x, t)
    with pytest.raises(cv.PlanError, match="no assignment .* allow more memory") as caught:
        cv.plan_devices(graph, [cv.Processor("a", memory=4096), cv.Processor("b", memory=4096)], batch_size=16)
    assert caught.value.needed > 4096


@pytest.mark.parametrize("seed", range(10))
def test_never_worse_than_the_better_device(seed, whole):
    """Ten tables of costs."""
    if seed > 1 and not whole:
        pytest.skip("takes --whole")
    rng = random.Random(seed)
    graph = cv.build_graph(cv.zoo.unet(width=8, size=32), (1, 32, 32), "mse", cv.SGD(0.1))
    rows = [name for name, _ in cv.compile(graph, batch_size=4, workers=1).instructions]
    tables = [{row: rng.lognormvariate(-9, 1) for row in rows} for _ in range(2)]
    processors = [cv.Processor(name, costs=table) for name, table in zip("ab", tables)]
    plan = cv.plan_devices(graph, processors, batch_size=4, solver_seconds=5)
    assert plan.seconds <= min(plan.alone)
    bound = plan.lower_bound or 0.0  # the solver may have come to none
    assert bound <= plan.seconds * (1 + 1e-9)
    print(f"alone {plan.alone[0]:.5f} and {plan.alone[1]:.5f} s, both {plan.seconds:.5f}, at least {bound:.5f}")


def test_costs_are_measured_once(tmp_path, monkeypatch):
    monkeypatch.setenv("CALCVM_CACHE_DIR", str(tmp_path))
    graph, _ = network(0)
    processors = [cv.Processor("a", costs="measured"), cv.Processor("b", costs="measured", cores=[0], workers=2)]
    first = cv.plan_devices(graph, processors, batch_size=16)
    assert first.seconds == cv.plan_devices(graph, processors, batch_size=16).seconds > 0
    assert len([*(tmp_path / "costs").iterdir()]) == 2


def test_a_cap_of_energy():
    graph, _ = network(0)
    processors = [cv.Processor("fast", speed=10, watts=50), cv.Processor("frugal", watts=1)]
    free = cv.plan_devices(graph, processors, batch_size=16)
    capped = cv.plan_devices(graph, processors, batch_size=16, joules=0.5 * free.joules)
    assert capped.joules <= 0.5 * free.joules and capped.seconds > free.seconds
    with pytest.raises(cv.PlanError, match="joules"):
        cv.plan_devices(graph, processors, batch_size=16, joules=1e-12)


def test_what_a_plan_says():
    graph, _ = network(2)
    plan = cv.plan_devices(graph, [cv.Processor("a"), cv.Processor("b")], batch_size=8)
    assert {"a", "b"} == plan.heap_bytes.keys()
    text = str(plan)
    assert "processor" in text and "a step of a batch of 8" in text
    assert len(plan.report()) == len(plan.where) == len(plan.to_dict()["statements"])
    assert plan.report()[0].keys() == {"index", "path", "phase", "row", "label", "processor"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cv.Processor("a", costs={"linear_fwd": float("nan")}), "seconds of 'linear_fwd'"),
        (lambda: cv.Processor("a", costs={"linear_fwd": -1.0}), "seconds of 'linear_fwd'"),
        (lambda: cv.Processor("a", costs=3), "costs"),
        (lambda: cv.Processor("a", device="cuda", costs="measured"), "give a table"),
        (lambda: planned([cv.Processor("a", costs={"conv": 1.0})]), "no row and no label 'conv'"),
        (lambda: cv.Processor("a", cores=[10**6]), "none that this process may use"),
        (lambda: cv.Processor("a", cores=[]), "cores is empty"),
        (lambda: cv.Processor("a", cores=[0, 0]), "a duplicate"),
        (lambda: cv.Processor("a", device="cuda", cores=[0]), "a GPU has no cores"),
        (lambda: cv.Processor("a", device="tpu"), "device"),
        (lambda: cv.Processor("a", speed=0), "speed"),
        (lambda: cv.Processor("a", watts=float("inf")), "watts"),
        (lambda: planned([]), "at least one"),
        (lambda: planned([cv.Processor("a"), cv.Processor("a")]), "two are called 'a'"),
        (lambda: planned(["a"]), "cv.Processor"),
        (lambda: planned([cv.Processor("a")], copies={("a", "c"): (0, 1)}), "no pair of processors"),
        (lambda: planned([cv.Processor("a"), cv.Processor("b")], copies={("a", "b"): (0, 0)}), "bytes a second"),
        (lambda: planned([cv.Processor("a"), cv.Processor("b")], copies={("a", "b"): (-1, 1)}), "seconds"),
        (lambda: planned([cv.Processor("a", costs=lambda row: float("nan"))]), "seconds of row"),
        (lambda: cv.SplitModel(None), "plan_devices"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(cv.CalcError, match=message):
        make()


def planned(processors, **options):
    return cv.plan_devices(network(0)[0], processors, batch_size=4, **options)


def test_data_that_do_not_fit():
    graph, shape = network(0)
    model = cv.SplitModel(cv.plan_devices(graph, [cv.Processor("a")], batch_size=4))
    (x, t), (y, _) = data_of(shape, [4, 3])
    with pytest.raises(cv.CalcError, match="number of samples"):
        model.step(y, t)
    with pytest.raises(cv.CalcError, match="above the planned 4"):
        model.step(*data_of(shape, [5])[0])
    with pytest.raises(cv.CalcError, match="2 arrays"):
        model.step(x, t, t)
    with pytest.raises(cv.CalcError, match="2 arrays"):
        model.step(x)
    assert np.isfinite(model.step(x, t))


# ---------------------------------------------------------------- as demanding users tried
def split_and_one(net, shape, optimizer, costs, teams=(1, 1), batch=4, **options):
    """A model on two devices, of which one has rows that cost nothing, and the same on one."""
    graph = cv.build_graph(net, shape, "mse", optimizer)
    program = cv.compile(graph, batch_size=batch, workers=1, **options)
    one = cv.CalcHeap(program.heap_bytes).create(program, seed=3)
    processors = [
        cv.Processor("a", workers=teams[0]),
        cv.Processor("b", workers=teams[1], costs=lambda row: 0.0 if (row["row"], row["label"]) in costs or row["row"] in costs else 1.0),
    ]  # fmt: skip
    copies = {("a", "b"): (0.0, 1e18), ("b", "a"): (0.0, 1e18)}
    plan = cv.plan_devices(graph, processors, batch_size=batch, copies=copies, **options)
    assert len({*plan.where}) == 2
    return cv.SplitModel(plan, seed=3), one


@pytest.mark.parametrize("teams", [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize(
    ("layers", "optimizer", "costs"),
    [
        ([lambda: cv.nn.Linear(4), cv.nn.PReLU, lambda: cv.nn.Dropout(0.5), lambda: cv.nn.Linear(5), cv.nn.PReLU],
         cv.SGD(0.1), {("linear_bwd_w", "linear")}),
        ([lambda: cv.nn.Linear(5)], cv.SGD(0.1, clip_norm=1.0), {"sumsq"}),
        ([lambda: cv.nn.Linear(4), cv.nn.BatchNorm, lambda: cv.nn.Linear(5)], cv.SGD(0.1), {"batch_norm_stats"}),
    ],
)  # fmt: skip
def test_rows_that_share_what_they_write(layers, optimizer, costs, teams):
    """Scratch of one team alone, values that several rows write in parts, running statistics."""
    net = cv.nn.Sequential(*(make() for make in layers))
    split, one = split_and_one(net, (4,), optimizer, costs, teams, accumulate=False)
    rng = np.random.default_rng(0)
    for batch in (4, 2, 3):
        data = rng.normal(size=(batch, 4)), rng.normal(size=(batch, 5))
        assert split.step(*data) == one.step(*data)
    for name, value in one.parameters.items():
        np.testing.assert_array_equal(split.parameters[name], value, err_msg=name)


def test_threads_take_turns():
    graph, shape = network(0)
    plan = cv.plan_devices(graph, [cv.Processor("a"), cv.Processor("b", speed=2)], batch_size=16)
    data = data_of(shape, [16])[0]
    alone, shared = cv.SplitModel(plan, seed=1), cv.SplitModel(plan, seed=1)
    for _ in range(60):
        alone.step(*data)
    threads = [threading.Thread(target=lambda: [shared.step(*data) for _ in range(20)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, value in alone.state().items():
        np.testing.assert_array_equal(shared.state()[name], value, err_msg=name)


def test_an_interrupt_finds_whole_steps():
    graph, shape = network(3)
    plan = cv.plan_devices(graph, [cv.Processor("a"), cv.Processor("b", speed=2)], batch_size=16)
    data = data_of(shape, [16])[0]
    model, wanted = cv.SplitModel(plan, seed=1), cv.SplitModel(plan, seed=1)
    states = [wanted.state()]
    for _ in range(400):
        wanted.step(*data)
        states.append(wanted.state())
    done = 0
    for k in range(8):
        timer = threading.Timer(0.003 + 0.002 * k, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            while done < 380:
                model.step(*data)
                done += 1
            timer.join()
        found = model.state()
        done = next(n for n in (done, done + 1) if all(np.array_equal(v, found[key]) for key, v in states[n].items()))


def test_what_is_refused():
    graph, _ = network(0)
    plan = cv.plan_devices(graph, [cv.Processor("a")], batch_size=4)
    model = cv.SplitModel(plan)
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(cv.CalcError, match="neither copied nor pickled"):
            way(model)
    with pytest.raises(cv.CalcError, match="no path with an operator"):
        cv.plan_devices(cv.CalcGraph(), [cv.Processor("a"), cv.Processor("b")], batch_size=4)
    with pytest.raises(cv.CalcError, match="workers"):
        cv.Processor("a", workers=10**6)

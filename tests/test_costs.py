"""What rows cost: measured once a machine and kept, or a user's own; by it the planner chooses what is made again."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.kernels_cpu import _native
from calcvm.ops.statement import Statement
from calcvm.planner.recomputation import program as recomputation
from calcvm.planner.recomputation.schedule import RecomputationProblem
from calcvm.vm.run import costs
from calcvm.vm.run.costs import Costs
from tests.test_zoo import REDUCED

GUARD = 4096


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Costs, not kernels, are kept in a folder of the test's own."""
    monkeypatch.setattr(costs, "path_of", lambda machine, of=costs.path_of: tmp_path / of(machine).name)


def graph(width: int = 16) -> cv.CalcGraph:
    net = nn.Conv2d(width, 3, padding=1) >> nn.BatchNorm() >> nn.ReLU()
    for _ in range(3):
        net = net >> nn.Residual(nn.Conv2d(width, 3, padding=1) >> nn.BatchNorm() >> nn.ReLU() >> nn.Dropout(0.2))
    net = net >> nn.GlobalAvgPool() >> nn.Flatten() >> nn.Linear(4)
    return cv.build_graph(net, (3, 16, 16), "softmax_cross_entropy", cv.Adam(1e-2))


HOW: dict[str, Any] = {"batch_size": 8, "workers": 1, "accumulate": False}


@pytest.fixture(scope="module")
def planned() -> cv.Plan:
    return cv.plan(graph(), **HOW)


class Fake:
    """A clock: a statement takes as long as its label, and each time is counted."""

    def __init__(self) -> None:
        self.asked: list[Statement] = []

    def __call__(self, st: Statement) -> float:
        self.asked.append(st)
        return 1e-3 * len(st.label or st.spec.name)


# ---------------------------------------------------------------- the file
def test_what_was_measured_is_not_measured_again(planned: cv.Plan) -> None:
    first, clock = Costs(8, 1, "float32", measure=(fake := Fake())), planned.statements
    found = [first(st) for st in clock]
    keys = {first.key(st) for st in clock}
    assert len(fake.asked) == first.measured == len(keys) < len(clock)  # equal rows share one
    first.keep()
    second = Costs(8, 1, "float32", measure=(other := Fake()))
    assert [second(st) for st in clock] == found and not other.asked and not second.measured
    for batch, workers, dtype in ((9, 1, "float32"), (8, 2, "float32"), (8, 1, "float64")):
        another = Costs(batch, workers, dtype, measure=(other := Fake()))
        another(next(st for st in clock if st.spec.name == "conv_fwd"))
        assert len(other.asked) == 1


def test_two_that_measure_at_once_keep_what_both_have(planned: cv.Plan) -> None:
    a, b = (Costs(8, 1, "float32", measure=Fake()) for _ in range(2))
    st = {a.key(st): st for st in planned.statements}
    keys = [*st]
    a(st[keys[0]])
    b(st[keys[1]])
    a.keep()
    b.keep()
    assert costs.read(a.path, a.machine).keys() == {*keys[:2]}
    assert [p.name for p in a.path.parent.iterdir()] == [a.path.name]  # nothing is left beside it


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "folder", "foreign", "machine", "words", "form"])
def test_a_file_that_is_no_good_is_measured_anew(planned: cv.Plan, damage: str) -> None:
    st = planned.statements[0]
    first = Costs(8, 1, "float32", measure=Fake())
    first(st)
    first.keep()
    path, whole = first.path, first.path.read_bytes()
    good = {"machine": first.machine, "seconds": first.seconds}
    other: Any = {
        "machine": {**good, "machine": {**first.machine, "cores": 999}},
        "words": {**good, "seconds": dict.fromkeys(first.seconds, math.nan)},
        "form": {**good, "seconds": [1, 2]},
    }
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage in other:
        _native.store(path, costs.MAGIC, json.dumps(other[damage]).encode(), "costs")
    else:
        byte = bytes([whole[-9] ^ 1])
        path.write_bytes(
            {"cut": whole[:-7], "flipped": whole[:-9] + byte + whole[-8:], "empty": b"", "foreign": b"{}"}[damage]
        )
    second = Costs(8, 1, "float32", measure=(fake := Fake()))
    assert second(st) == first(st) and len(fake.asked) == 1
    if damage == "folder":
        with pytest.warns(RuntimeWarning, match="measured costs cannot be kept"):
            second.keep()
    else:
        second.keep()
        assert path.read_bytes() == whole


def test_seconds_that_are_none_are_not_taken_from_a_file(planned: cv.Plan) -> None:
    first = Costs(8, 1, "float32")
    keys = [first.key(st) for st in planned.statements[:7]]
    seconds = dict(zip(keys, (1.0, -1.0, math.inf, 0.0, "1", True, None), strict=False))
    body = json.dumps({"machine": first.machine, "seconds": seconds}).encode()
    _native.store(first.path, costs.MAGIC, body, "costs")
    assert Costs(8, 1, "float32").seconds == {keys[0]: 1.0}


def test_users_own_rows_are_not_kept(planned: cv.Plan) -> None:
    st = planned.statements[0]
    own = replace(st, spec=replace(st.spec, name="mine_fwd"))
    first = Costs(8, 1, "float32", measure=Fake())
    first(own)
    first.keep()
    assert first.measured == 1 and not first.path.exists()


# ---------------------------------------------------------------- measuring
def test_larger_rows_are_measured_to_take_longer() -> None:
    """Of equal kind: a convolution of 16 times the arithmetic takes more than twice as long, and neither takes seconds.

    By one worker: a team's time is that of the clock, in which others may run.
    """
    small, large = (cv.plan(graph(width), **HOW) for width in (16, 64))
    cost = Costs(8, 1, "float32")
    a, b = (next(cost(st) for st in p.statements if st.label.startswith("conv_2")) for p in (small, large))
    assert 1e-6 < a < b / 2 < 1


@pytest.mark.parametrize("workers", [1, 3])
def test_rows_of_every_kind_can_be_measured(workers: int) -> None:
    """Of several phases, with scratch, of other types, that look labels up and that draw."""
    x, t = np.zeros((4, 300, 300), np.int32), np.zeros(4, np.int64)
    g = cv.CalcGraph()
    data, label = g.placeholder("x", (None, 300, 300), dtype="int32"), g.placeholder("t", (None,), dtype="int64")
    with g.path("learn", backward=True) as learn:
        h = cv.dropout(cv.relu(cv.mean(data * 1.5, axis=2)), 0.1)
        y = cv.matmul(h, g.parameter("w", (300, 5)))
        loss = cv.softmax_cross_entropy(y, label) + 1e-3 * cv.sum(h * h)
        learn.minimize(loss, optimizer=cv.Adam(1e-3, weight_decay=0.1), output=y)
    plan = cv.plan(g, batch_size=4, workers=workers, costs="measured")
    assert plan.costs == "measured" and 0 < plan.seconds < 1
    assert {st.spec.phases for st in plan.statements} != {"1"} and {st.words.get("wn") for st in plan.statements} - {
        None
    }
    assert np.isfinite(cv.CalcHeap(plan.heap_bytes).create(cv.compile(g, plan=plan)).step(x, t))


@pytest.mark.parametrize("name", REDUCED)
def test_rows_touch_their_operands_alone(name: str, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the zoo's networks: the heap that has them lies between guards, which survive."""
    if name not in ("lenet", "googlenet") and not whole:
        pytest.skip("takes --whole")
    width, size, channels = REDUCED[name]
    loss = "mse" if name == "unet" else "softmax_cross_entropy"
    net = getattr(cv.zoo, name)(classes=5, width=width, size=size)
    plan = cv.plan(cv.build_graph(net, (channels, size, size), loss, cv.SGD(0.01)), batch_size=2, workers=2)
    guarded: list[np.ndarray] = []

    def aligned(nbytes: int, of: Any = costs.aligned) -> np.ndarray:
        block = of(nbytes + 2 * GUARD)
        block[:GUARD] = block[-GUARD:] = 0xA5
        guarded.append(block)
        return block[GUARD:-GUARD]

    monkeypatch.setattr(costs, "aligned", aligned)
    cost = Costs(2, 2, "float32")
    assert all(0 < cost(st) < 1 for st in plan.statements) and len(guarded) > 10
    assert all((block[:GUARD] == 0xA5).all() and (block[-GUARD:] == 0xA5).all() for block in guarded)


def test_a_plan_is_made_by_what_was_measured(planned: cv.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second plan measures nothing, and is the first one; what is made again is told by its rows."""
    g, budget = graph(), int(0.7 * planned.heap_bytes)
    plan = cv.plan(g, memory=budget, costs="measured", **HOW)
    cost = Costs(8, 1, "float32")
    rows = sum(cost(st) for st in plan.statements if st.path == "learn")
    again = sum(map(cost, plan.recomputed))  # updates of small parameters are merged later, which saves a little
    assert plan.recomputed and plan.overhead == pytest.approx(again / (rows - again), rel=0.01)
    assert not cost.measured
    for run in ("_run", "_run_cold"):
        monkeypatch.setattr(Costs, run, lambda *_: pytest.fail("it is measured again"))
    second = cv.plan(g, memory=budget, costs="measured", **HOW)
    assert second.seconds == plan.seconds
    assert [s.label for s in second.statements] == [s.label for s in plan.statements]
    assert f"measured to take {100 * plan.overhead:.2f} %" in str(plan) and "a step" in str(plan)
    assert plan.to_dict()["costs"] == "measured" and plan.to_dict()["seconds"] == plan.seconds
    assert planned.costs == "reckoned" and planned.seconds is None


def test_what_cannot_fit_is_refused_before_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Costs, "_run", lambda *_: pytest.fail("it is measured"))
    with pytest.raises(cv.PlanError, match="needs at least"):
        cv.plan(graph(), memory=10_000, costs="measured", **HOW)
    assert cv.plan(graph(), memory=10_000_000, workers=1, costs="measured").seconds is None  # of what batch?


def test_a_row_that_the_machine_has_no_memory_for_is_refused() -> None:
    with pytest.raises(cv.PlanError, match="whose costs are to be measured, needs .* bytes, the machine has"):
        cv.plan(graph(), batch_size=10**8, workers=1, costs="measured")


# ---------------------------------------------------------------- a table of the user's
def test_a_table_decides_what_is_made_again(planned: cv.Plan) -> None:
    """What is told to be dear is kept; other things are made again in its place."""
    g, budget = graph(), int(0.75 * planned.heap_bytes)
    plan = cv.plan(g, memory=budget, **HOW)
    again = {st.spec.name for st in plan.recomputed.values()}
    dear = sorted(again)[0]
    other = cv.plan(g, memory=budget, costs={dear: 10.0}, **HOW)
    assert other.costs == "given" and other.seconds > 10
    assert sum(st.spec.name == dear for st in other.recomputed.values()) < sum(
        st.spec.name == dear for st in plan.recomputed.values()
    )
    asked: list[dict[str, Any]] = []

    def cost(facts: dict[str, Any]) -> float:
        asked.append(facts)
        return 10.0 if facts["row"] == dear else 1e-6

    rows = [st.spec.name for st in planned.statements if st.path == "learn"]
    assert cv.plan(g, costs=cost, **HOW).seconds == pytest.approx(10 * rows.count(dear), rel=1e-3)
    assert asked[0].keys() == {"row", "label", "path", "phase", "operations", "bytes", "batch", "workers"}
    labels = [st.label for st in planned.statements if st.phase == "forward"]
    plan = cv.plan(g, costs={**dict.fromkeys(labels, 0), labels[0]: 2}, **HOW)
    assert 2 <= plan.seconds < 2.1


def test_where_none_is_found_by_costs_the_reckoned_ones_lead_to_one(
    planned: cv.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    g, budget = graph(), int(0.75 * planned.heap_bytes)
    solve = recomputation.solve

    def blind(problem: RecomputationProblem, known: Any = ()) -> Any:
        if not known and all(step.cost in (0, 1) for step in problem.steps):
            return problem.run(())
        return solve(problem, known)

    monkeypatch.setattr(recomputation, "solve", blind)
    plan = cv.plan(g, memory=budget, costs=lambda facts: 1.0, **HOW)
    assert plan.recomputed and plan.heap_bytes <= budget
    rows = sum(st.path == "learn" for st in planned.statements)
    # in the costs that were given, of statements whose updates are merged later
    assert rows <= len(plan.recomputed) / plan.overhead < 1.4 * rows


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 1e7, -1, -math.inf, "1", None, True, 1j, 10**400])
def test_seconds_that_are_none_are_refused_with_the_row(planned: cv.Plan, wrong: Any) -> None:
    row = planned.statements[0]
    told = rf"costs: seconds of row '{row.spec.name}' \(of {row.label}\) must be a number in \[0, 1e\+06\], not "
    for table in ({row.spec.name: wrong}, {row.label: wrong}, lambda facts: wrong):
        with pytest.raises(cv.CalcError, match=told):
            cv.plan(graph(), costs=table, **HOW)


def test_costs_that_are_none_are_refused() -> None:
    with pytest.raises(cv.CalcError, match="no row and no label 'conv_fdw'; rows are .*conv_fwd"):
        cv.plan(graph(), costs={"conv_fdw": 1.0}, **HOW)
    with pytest.raises(cv.CalcError, match="costs .* is unknown; take one of reckoned, measured"):
        cv.plan(graph(), costs="guessed", **HOW)
    for wrong in (3, None, [1.0]):
        with pytest.raises(cv.CalcError, match="costs: .* a function of a row is wanted, not"):
            cv.plan(graph(), costs=wrong, **HOW)
    with pytest.raises(cv.CalcError, match="measured on the processor"):
        cv.plan(graph(), costs="measured", device="cuda", batch_size=8)


def test_models_take_costs() -> None:
    model = cv.Model(
        nn.Linear(3), input_shape=(4,), loss="mse", optimizer=cv.SGD(0.1), batch_size=5, workers=1, costs="measured"
    )
    assert model.plan.costs == "measured" and model.plan.seconds > 0


# ---------------------------------------------------------------- a plan and its graph
def test_a_plan_is_of_one_graph() -> None:
    g, other = graph(), graph()
    plan = cv.plan(g, **HOW)
    with pytest.raises(cv.CalcError, match="the plan is of another graph"):
        cv.compile(other, plan=plan)
    assert cv.compile(g, plan=plan).heap_bytes == plan.heap_bytes
    with g.path("more"):
        cv.relu(g.placeholder("z", (None, 3)))
    with pytest.raises(cv.CalcError, match="has changed since it was planned"):
        cv.compile(g, plan=plan)
    del g
    with pytest.raises(cv.CalcError, match="another graph"):
        cv.compile(other, plan=plan)


def test_a_batch_beyond_all_addresses_is_refused_by_the_plan() -> None:
    g = cv.build_graph(nn.Linear(8) >> nn.ReLU() >> nn.Linear(1), (3000,), "mse", cv.SGD(0.1))
    for options in ({}, {"recompute": False}, {"objective": "memory"}, {"dtype": "float64"}):
        with pytest.raises(
            cv.PlanError, match=r"a batch of 900,000,000,000 needs [\d,]+ bytes, more than a program"
        ) as e:
            cv.plan(g, batch_size=9 * 10**11, **options)
        assert e.value.needed > e.value.allowed
    with pytest.raises(
        cv.PlanError, match=r"10,000,000,000 is more than row 'conv_fwd' \(of conv\) can count: take a smaller"
    ):
        cv.plan(images := graph(), batch_size=10**10)
    for of in (g, images):
        largest = cv.plan(of, memory=2**62, workers=1)
        assert largest.heap_bytes <= 2**50
        assert cv.compile(of, plan=largest).batch_size == largest.batch_size
        with pytest.raises(cv.PlanError):
            cv.plan(of, batch_size=largest.batch_size + 1, workers=1)

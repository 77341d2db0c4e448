"""Recomputation: schedules by hand and generated, checked independently; training has the bits of training without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import calcvm as cv
from bench import memory
from calcvm import nn
from calcvm.errors import PlanError
from calcvm.ops.dims import BATCH
from calcvm.ops.statement import Lowered
from calcvm.planner import plan
from tests.planner_checker import Broken, check, check_live
from tests.test_planner import ACCUMULATE, BINARY, STRICT, Build, programs
from tests.test_zoo import REDUCED

APART = replace(BINARY, name="apart", in_place=())


def chain(n: int) -> Lowered:
    """``n`` activations in a row, each read once more in the backward, the last one first."""
    b = Build()
    made = [b.value("x", "placeholder", BATCH, 16, resident=True)]
    for k in range(n):
        made.append(b.map(STRICT, f"h{k}", x=made[-1]))
    b.phase = "backward"
    g = made[-1]
    for k in reversed(range(n)):
        g = b.map(APART, f"g{k}", "gradient", a=g, b=made[k + 1])
    w = b.value("w", "parameter", BATCH, 16, persistent=True)
    b.shapes[w] = b.shapes[g]
    b.over(ACCUMULATE, "update", x=g, y=w)
    return b.done()


def within(lowered: Lowered, memory: int, batch: int = 1) -> Any:
    return plan(lowered, itemsize=4, batch_size=batch, memory=memory, recompute=True, workers=3)


# ---------------------------------------------------------------- by hand
@pytest.mark.parametrize(("kept", "again"), [(12, 0), (11, 1), (8, 7), (6, 13)])
def test_a_chain_is_made_again(kept: int, again: int) -> None:
    """Of a chain all is known: with k values beside the two that a statement needs, so much must run again."""
    lowered = chain(12)
    free = plan(lowered, itemsize=4, batch_size=1, workers=3)
    p = within(lowered, free.heap_bytes - (12 - kept) * 64)
    check(p, lowered, batches=(1,))
    assert p.heap_bytes <= free.heap_bytes - (12 - kept) * 64
    assert len(p.recomputed) <= again
    assert (p.overhead > 0) == (again > 0)


def test_what_fits_is_left_alone() -> None:
    lowered = chain(6)
    free = plan(lowered, itemsize=4, batch_size=3)
    p = plan(lowered, itemsize=4, batch_size=3, memory=free.heap_bytes, recompute=True)
    assert not p.recomputed and p.overhead == 0
    assert [s.label for s in p.statements] == [s.label for s in free.statements]
    with pytest.raises(PlanError):
        plan(lowered, itemsize=4, batch_size=3, memory=free.heap_bytes - 64)


def test_what_no_schedule_meets_is_refused_with_its_floor() -> None:
    with pytest.raises(PlanError, match="g6 alone needs 384") as e:
        within(chain(8), 350)
    assert e.value.allowed == 350
    assert e.value.needed > 350


def test_what_is_changed_in_between_is_not_made_again() -> None:
    """A value made from a parameter that is updated before the value is read again."""
    b = Build()
    x = b.value("x", "placeholder", BATCH, 16, resident=True)
    w = b.value("w", "parameter", BATCH, 16, persistent=True)
    h = b.map(APART, "h", a=x, b=w)
    k = b.map(STRICT, "k", x=x)
    b.phase = "backward"
    g = b.map(STRICT, "g", "gradient", x=k)
    big = b.map(STRICT, "big", "gradient", x=g)
    b.over(ACCUMULATE, "update", x=big, y=w)
    u = b.map(APART, "u", "gradient", a=h, b=g)
    b.over(ACCUMULATE, "update 2", x=u, y=w)
    lowered = b.done()
    free = plan(lowered, itemsize=4, batch_size=1, workers=3)
    for less in range(64, free.heap_bytes, 64):
        try:
            p = within(lowered, free.heap_bytes - less)
        except PlanError:
            continue
        check(p, lowered, batches=(1,))
        assert "h again" not in [s.label for s in p.statements[p.statements.index(_of(p, "update")) :]]


def _of(p: Any, label: str) -> Any:
    return next(s for s in p.statements if s.label == label)


@pytest.mark.parametrize("lie", ["late", "other", "words"])
def test_the_checker_finds_broken_schedules(lie: str) -> None:
    lowered = chain(8)
    free = plan(lowered, itemsize=4, batch_size=1, workers=3)
    p = within(lowered, free.heap_bytes - 3 * 64)
    copy = next(iter(p.recomputed))
    rows = list(p.statements)
    if lie == "late":  # after the row that reads it
        i = rows.index(copy)
        rows[i : i + 2] = rows[i + 1], rows[i]
        p = replace(p, lowered=replace(p.lowered, statements=tuple(rows)))
    elif lie == "other":
        p = replace(p, recomputed={**p.recomputed, copy: _of(free, "h0" if p.recomputed[copy].label != "h0" else "h1")})
    else:
        other = replace(copy, words={**copy.words, "cols": 8})
        rows[rows.index(copy)] = other
        again = {(other if c is copy else c): s for c, s in p.recomputed.items()}
        p = replace(p, lowered=replace(p.lowered, statements=tuple(rows)), recomputed=again)
    with pytest.raises(Broken):
        check(p, lowered, batches=(1,))


# ---------------------------------------------------------------- generated
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs(), st.integers(1, 6), st.floats(0.3, 1.0))
def test_generated_programs(lowered: Lowered, batch: int, share: float) -> None:
    free = plan(lowered, itemsize=4, batch_size=batch, workers=3)
    memory = int(share * free.heap_bytes)
    try:
        p = within(lowered, memory, batch)
    except PlanError as e:
        assert e.needed is not None and e.needed > memory == e.allowed
        return
    check(p, lowered, batches={batch, 1})
    assert p.heap_bytes <= memory


# ---------------------------------------------------------------- as a user trains
def deep(n: int = 6) -> nn.Layer:
    net: nn.Layer = nn.Conv2d(8, 3, padding=1) >> nn.BatchNorm() >> nn.ReLU()
    for _ in range(n):
        net = net >> nn.Residual(nn.Conv2d(8, 3, padding=1) >> nn.BatchNorm() >> nn.ReLU() >> nn.Dropout(0.2))
    return net >> nn.GlobalAvgPool() >> nn.Flatten() >> nn.Linear(4)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("learning_batch", [None, 64])
def test_training_has_the_same_bits(learning_batch: int | None, workers: int, whole: bool) -> None:
    if (learning_batch is None) == (workers == 1) and not whole:
        pytest.skip("takes --whole")
    rng = np.random.default_rng(3)
    X = rng.normal(size=(96, 3, 12, 12)).astype(np.float32)
    y = rng.integers(0, 4, 96)
    options: dict[str, Any] = {
        "input_shape": (3, 12, 12), "loss": "softmax_cross_entropy", "optimizer": cv.Adam(1e-2), "batch_size": 32,
        "learning_batch": learning_batch, "workers": workers, "seed": 5,
    }  # fmt: skip
    free = cv.Model(deep(), **options)
    losses = free.fit(X, y, epochs=2, progress=False)["loss"]
    for share in (0.75, 0.5):
        model = cv.Model(deep(), memory=int(share * free.program.heap_bytes), **options)
        assert model.program.heap_bytes <= share * free.program.heap_bytes
        assert model.plan.recomputed
        assert model.fit(X, y, epochs=2, progress=False)["loss"] == losses
        for name, value in free.get_weights().items():
            assert np.array_equal(value, model.get_weights()[name]), name


def test_a_budget_that_speed_does_not_fit_is_filled_with_less_scratch():
    """By itself it would allow a batch of one, which batch normalization refuses."""
    net = nn.Linear(64) >> nn.BatchNorm() >> nn.ReLU() >> nn.Linear(64) >> nn.BatchNorm() >> nn.ReLU() >> nn.Linear(10)
    graph = cv.build_graph(net, (20,), "softmax_cross_entropy", cv.SGD(0.1))
    plan = cv.plan(graph, memory=136768, workers=4)
    assert plan.batch_size > 1 and plan.heap_bytes <= 136768
    with pytest.raises(cv.PlanError) as e:
        cv.plan(graph, memory=plan.bytes_at(1), workers=4)
    assert e.value.__suppress_context__


def test_what_is_needed_at_least_is_said_so():
    graph = cv.build_graph(cv.zoo.unet(width=8, size=64), (1, 64, 64), "mse", cv.SGD(0.1))
    with pytest.raises(cv.PlanError, match=r"needs at least [\d,]+ bytes even") as e:
        cv.plan(graph, batch_size=8, workers=1, memory="3 MB")
    with pytest.raises(cv.PlanError, match=r"was found to need no less than [\d,]+ bytes even") as found:
        cv.plan(graph, batch_size=8, workers=1, memory=e.value.needed)
    assert found.value.needed > e.value.needed
    with pytest.raises(cv.PlanError):
        cv.Model(graph, batch_size=8, workers=1, memory="20 MB", recompute=False)
    plan = cv.plan(graph, batch_size=8, workers=1, memory="20 MB")
    assert len(str(next(iter(plan.recomputed)))) < 100
    for wrong in (lambda: plan.describe("all"), lambda: plan.describe(-1), lambda: plan.bytes_at("a")):
        with pytest.raises(cv.CalcError):
            wrong()


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("memory", [1_000_000, 2_500_000])
def test_the_largest_batch_of_least_scratch(memory, workers):
    net = nn.Linear(64) >> nn.Sigmoid() >> nn.Linear(64) >> nn.Sigmoid() >> nn.Linear(10)
    graph = cv.build_graph(net, (784,), "softmax_cross_entropy", cv.Adam(1e-3))
    how = {"workers": workers, "memory": memory, "accumulate": True}
    fast, small = cv.plan(graph, **how), cv.plan(graph, objective="memory", **how)
    assert small.batch_size > fast.batch_size and small.heap_bytes <= memory
    for batch in (fast.batch_size, small.batch_size):
        assert cv.plan(graph, batch_size=batch, recompute=False, **how).heap_bytes <= memory
    with pytest.raises(PlanError):
        cv.plan(graph, batch_size=small.batch_size + 1, recompute=False, **how)
    one = cv.compile(graph, plan=fast)
    other = cv.compile(graph, plan=small)
    x, t = np.random.default_rng(0).random((9, 784)), np.arange(9)
    models = [cv.CalcHeap(p.heap_bytes).create(p, seed=1) for p in (one, other)]
    assert models[0].step(x, t) == models[1].step(x, t)
    with pytest.raises(cv.CalcError, match="objective"):
        cv.plan(graph, objective="space", **how)


@pytest.mark.parametrize("name", REDUCED)
def test_live_bytes_of_published_networks(name: str, whole: bool) -> None:
    """Counted by code of its own at each statement: in all memory, in less, and with pages; as published where all is asked for."""
    if name not in ("lenet", "vgg11") and not whole:
        pytest.skip("takes --whole")
    width, size, channels = REDUCED[name]
    net = getattr(cv.zoo, name)() if whole else getattr(cv.zoo, name)(classes=5, width=width, size=size)
    shape = memory.SHAPES.get(name, (3, 224)) if whole else (channels, size)
    loss = "mse" if name == "unet" else "softmax_cross_entropy"
    graph = cv.build_graph(net, (shape[0], shape[1], shape[1]), loss, cv.SGD(0.01, momentum=0.9))
    options: dict[str, Any] = {"batch_size": 4, "workers": 2, "accumulate": False}
    free = cv.plan(graph, **options)
    check_live(free)
    found = 0
    for share in (0.9, 0.8, 0.6) if whole else (0.8, 0.6):  # of OverFeat one update needs 84 %
        for more in ({}, {"page_bytes": "8 GiB", "page_bandwidth": 1e11}):
            try:
                plan = cv.plan(graph, memory=int(share * free.heap_bytes), **more, **options)
            except PlanError:
                continue
            found += 1
            check_live(plan)
    assert found or name in ("lenet", "googlenet")  # of which one statement needs nearly all, at this size


@pytest.mark.parametrize(("layers", "share"), [(300, 0.8), (400, 0.8), (600, 0.6)])
def test_deep_chains_fit_where_shallow_ones_do(layers, share, whole):
    if not whole:
        pytest.skip("takes --whole")
    chain = nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(8), nn.Tanh())))
    graph = cv.build_graph(chain, (8,), "mse", cv.SGD(0.01))
    memory = int(share * cv.plan(graph, batch_size=16, workers=1).heap_bytes)
    assert cv.plan(graph, batch_size=16, workers=1, memory=memory).heap_bytes <= memory

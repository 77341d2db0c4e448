"""The order of statements: dynamic programming over downsets beside all orders of few statements."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

import calcvm as cv
from calcvm import nn
from calcvm.planner.downsets import Downsets, Item, Touch


def generated(rng: random.Random, n: int) -> Downsets:
    """Statements that read earlier results, some in place of them; some values come from before, or live on."""
    before = [0] * n
    sizes, by, born, dies = [], [], [], []
    for k in range(n):
        sizes.append(rng.randint(1, 9))
        by.append(1 << k)
        born.append(True)
        dies.append(rng.random() < 0.8)
        for j in rng.sample(range(k), min(k, rng.randint(0, 2))):
            before[k] |= 1 << j
            by[j] |= 1 << k
    for _ in range(rng.randint(0, 3)):  # read here, made before
        sizes.append(rng.randint(1, 9))
        by.append(sum(1 << k for k in rng.sample(range(n), 2)))
        born.append(False)
        dies.append(True)
    touches = [Touch(*parts) for parts in zip(sizes, by, born, dies)]
    tasks = []
    for k in range(n):
        mine = [v for v in range(len(touches)) if touches[v].by >> k & 1]
        reads = [j for j, v in enumerate(mine) if v != k]
        pairs = tuple((mine.index(k), j) for j in reads if sizes[mine[j]] == sizes[k] and rng.random() < 0.7)
        tasks.append(Item(tuple(touches[v] for v in mine), pairs, before[k]))
    return Downsets(tasks, sum(s for s, b in zip(sizes, born) if not b))


def orders(tasks: tuple[Item, ...] | list[Item], done: int = 0) -> Iterator[list[int]]:
    """All orders of statements in which each comes after what must come before it."""
    if done == (1 << len(tasks)) - 1:
        yield []
    for k, task in enumerate(tasks):
        if not done >> k & 1 and not task.before & ~done:
            for rest in orders(tasks, done | 1 << k):
                yield [k, *rest]


@pytest.mark.parametrize("seed", range(60))
def test_no_order_has_a_lower_peak(seed: int) -> None:
    parts = generated(random.Random(seed), 6)
    lowest = min(parts.peak(order) for order in orders(parts.tasks))
    found = parts.best(0, lowest + 1, width=10_000)
    assert found is not None and parts.peak(found) == lowest
    assert parts.best(0, lowest, width=10_000) is None


@pytest.mark.parametrize("seed", range(10))
def test_a_beam_finds_orders_that_are_allowed(seed: int) -> None:
    parts = generated(random.Random(seed), 12)
    found = parts.best(0, 1 << 40, width=3)
    assert found is not None and sorted(found) == list(range(12))
    for at, k in enumerate(found):
        assert not parts.tasks[k].before & ~sum(1 << j for j in found[:at])


def test_the_largest_batch_is_looked_for_in_orders_of_batches_near_it() -> None:
    """The order found at 20 to 23 takes more than that at 24."""
    conv = lambda channels, **more: nn.Conv1d(channels, 3, padding=1, **more)
    branch = conv(6, bias=False) >> nn.GroupNorm(2) >> nn.PReLU() >> conv(6, bias=False)
    net = (
        nn.Dropout(0.1) >> conv(4) >> nn.BatchNorm() >> nn.Tanh() >> conv(6) >> nn.GroupNorm(2) >> nn.LeakyReLU()
        >> conv(4, bias=False) >> nn.InstanceNorm() >> nn.ELU() >> conv(4) >> nn.InstanceNorm() >> nn.HardSwish()
        >> conv(6, bias=False) >> nn.BatchNorm() >> nn.ReLU() >> nn.Residual(branch) >> nn.ReLU()
        >> nn.GlobalAvgPool() >> nn.Flatten() >> nn.Linear(8) >> nn.Tanh() >> nn.Linear(5)
    )  # fmt: skip
    graph = cv.build_graph(net, (4, 16), "softmax_cross_entropy", cv.Lion(1e-3))
    how: dict = {"dtype": "float64", "workers": 2, "accumulate": False}
    for memory in (330_000, 348_865):
        best = cv.plan(graph, memory=memory, objective="memory", **how)
        for batch in range(1, best.batch_size + 5):
            fits = True
            try:
                plan = cv.plan(graph, batch_size=batch, memory=memory, objective="memory", recompute=False, **how)
                assert plan.heap_bytes <= memory
            except cv.PlanError:
                fits = False
            assert fits == (batch <= best.batch_size), batch

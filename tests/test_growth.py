"""Planning and compiling take time by rows: lines of Python that run for graphs of many kinds, and for four times as many rows."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

import calcvm as cv
from calcvm import nn
from calcvm.planner import order
from calcvm.planner.recomputation import search

OPTIONS: dict[str, Any] = dict(batch_size=16, workers=1)
MOST = 6.0  # times as many lines for four times as many rows


def layers(n: int, *kinds: Callable[[], nn.Layer]) -> cv.CalcGraph:
    net = nn.Sequential(*(make() for _ in range(n) for make in kinds))
    return cv.build_graph(net, (8,), "mse", cv.SGD(0.01))


def residual(n: int) -> cv.CalcGraph:
    def block() -> nn.Layer:
        return nn.Residual(nn.Sequential(nn.Conv2d(4, 3, padding=1), nn.BatchNorm(), nn.ReLU()))

    net = nn.Sequential(nn.Conv2d(4, 3, padding=1), *(block() for _ in range(n)), nn.Flatten(), nn.Linear(3))
    return cv.build_graph(net, (2, 4, 4), "softmax_cross_entropy", cv.Adam(0.01, clip_norm=1.0))


def learned(build: Callable[[cv.CalcGraph, cv.Variable, int], cv.Variable]) -> Callable[[int], cv.CalcGraph]:
    """A path that trains what is built of x (B, 8)."""

    def graph(n: int) -> cv.CalcGraph:
        g = cv.CalcGraph()
        x, t = g.placeholder("x", (None, 8)), g.placeholder("t", (None, 8))
        with g.path("learn", backward=True) as path:
            y = build(g, cv.matmul(x, g.parameter("w", (8, 8))), n)
            path.minimize(cv.mse(y, t), cv.Adam(0.1), output=y)
        return g

    return graph


def branches(g: cv.CalcGraph, h: cv.Variable, n: int) -> cv.Variable:
    made = [cv.tanh(cv.matmul(h, g.parameter(f"b{i}", (8, 8)))) for i in range(n)]
    while len(made) > 1:
        made = [a + b for a, b in zip(made[::2], made[1::2])] + made[len(made) - len(made) % 2 :]
    return made[0]


def fan(g: cv.CalcGraph, h: cv.Variable, n: int) -> cv.Variable:
    total = h
    for made in [cv.tanh(h * (1.0 + i)) for i in range(n)]:
        total = total + made
    return total


def vectors(g: cv.CalcGraph, h: cv.Variable, n: int) -> cv.Variable:
    for i in range(n):
        h = h * g.parameter(f"v{i}", (8,))
    return h


def skips(g: cv.CalcGraph, h: cv.Variable, n: int) -> cv.Variable:
    kept = []
    for _ in range(n):
        kept.append(h)
        h = cv.tanh(h)
    for each in reversed(kept):
        h = h * each
    return h


def thin(g: cv.CalcGraph, h: cv.Variable, n: int) -> cv.Variable:
    for i in range(n):
        h = cv.where(h < 1.0, h, h * 0.5) if i % 2 else cv.reshape(cv.exp(h), (-1, 8))
    return h


def drawn(g: cv.CalcGraph, h: cv.Variable, n: int) -> cv.Variable:
    for _ in range(n):
        h = cv.dropout(h, 0.1)
    return h


def joined(g: cv.CalcGraph, h: cv.Variable, n: int) -> cv.Variable:
    y = cv.concat([cv.tanh(h * float(i + 1)) for i in range(n)], 1)
    return cv.matmul(y, g.parameter("o", (8 * n, 8)))


def paths(n: int) -> cv.CalcGraph:
    """Each reads what the one before has made."""
    g = cv.CalcGraph()
    h, w = g.placeholder("x", (None, 8)), g.parameter("w", (8, 8))
    for i in range(n):
        with g.path(f"p{i}"):
            h = cv.tanh(cv.matmul(h, w))
    return g


KINDS: dict[str, Callable[[int], cv.CalcGraph]] = {
    "perceptron": lambda n: layers(n, lambda: nn.Linear(8), nn.Tanh),
    "normalized": lambda n: layers(n, lambda: nn.Linear(8), nn.LayerNorm, nn.GELU),
    "residual": residual,
    "branches": learned(branches),
    "fan": learned(fan),
    "vectors": learned(vectors),
    "skips": learned(skips),
    "thin": learned(thin),
    "drawn": learned(drawn),
    "joined": learned(joined),
    "paths": paths,
}


def lines(work: Callable[[], object]) -> int:
    """Lines of calcvm that run, an iteration of a comprehension too."""
    count, before = 0, sys.gettrace()

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal count
        if "calcvm" not in frame.f_code.co_filename and frame.f_code.co_filename[:1] != "<":
            return None
        count += 1
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def assert_grows(what: str, small: int, large: int) -> None:
    assert large <= MOST * small, (
        f"{what}: {large:,} lines for four times what takes {small:,}: {large / small:.1f} times"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_work_grows_as_rows_do(kind: str, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Building, planning, and compiling the plan, each by itself."""
    n = 40 if whole else 4 if kind == "residual" else 8
    if not whole:  # so few rows would not come to what the search of an order may do for each
        monkeypatch.setattr(order, "EACH", 50)
    KINDS[kind](3)
    counts = []
    for size in (n, 4 * n):
        made: list[Any] = []
        built = lines(lambda: made.append(KINDS[kind](size)))  # noqa: B023
        planned = lines(lambda: made.append(cv.plan(made[0], **OPTIONS)))  # noqa: B023
        assembled = lines(lambda: cv.compile(made[0], plan=made[1]))  # noqa: B023
        counts.append((built, planned, assembled))
    for what, small, large in zip(("building", "planning", "compiling"), *counts, strict=True):
        assert_grows(f"{kind}, {what}", small, large)


@pytest.mark.parametrize("kind", ["perceptron", "skips"])
def test_work_in_a_budget_grows_as_rows_do(kind: str, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a search whose effort is a tenth; the whole one takes less for many rows, beside what it has for few."""
    monkeypatch.setattr(search, "EFFORT", search.EFFORT // 10)
    if kind != "perceptron" and not whole:
        pytest.skip("takes --whole")
    counts = []
    n = 40 if whole else 8
    for size in (n, 4 * n):
        graph = KINDS[kind](size)
        memory = int(0.8 * cv.plan(graph, **OPTIONS).heap_bytes)
        counts.append(lines(lambda: cv.plan(graph, memory=memory, **OPTIONS)))  # noqa: B023
    assert_grows(kind, *counts)


def test_work_for_the_largest_batch_grows_as_rows_do(whole: bool) -> None:
    counts = []
    n = 40 if whole else 10
    for size in (n, 4 * n):
        graph = KINDS["perceptron"](size)
        memory = 3 * cv.plan(graph, **OPTIONS).heap_bytes
        counts.append(lines(lambda: cv.plan(graph, memory=memory, workers=1)))  # noqa: B023
    assert_grows("batch from memory", *counts)


@pytest.mark.parametrize(("n", "share", "most"), [(400, 1.0, 1.0), (1600, 1.0, 5.0), (300, 0.8, 3.0)])
def test_deep_networks_are_planned_and_compiled_in_seconds(n: int, share: float, most: float, whole: bool) -> None:
    """CPU seconds, four times what is asked for: a machine may be slow, and have other work."""
    if not whole:
        pytest.skip("takes --whole")
    graph = KINDS["perceptron"](n)
    memory = None if share == 1 else int(share * cv.plan(graph, **OPTIONS).heap_bytes)
    start = time.process_time()
    cv.compile(graph, plan=cv.plan(graph, memory=memory, **OPTIONS))
    seconds = time.process_time() - start
    print(f"{n} layers, {share:.0%} of the memory: {seconds:.2f} s of CPU")
    assert seconds <= 4 * most

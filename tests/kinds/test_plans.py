"""Whatever plans verifies: random networks and graphs, for every dtype, device, team, batch, and way to accumulate."""

from __future__ import annotations

import random

import pytest

import calcvm as cv
from calcvm import nn
from tests.kinds.networks import BATCHES, TEAMS, network, shape_graph

NETWORKS, GRAPHS = (60, 3000), (150, 10_000)  # in `make test`, and whole


def compiled(graph: cv.CalcGraph, rng: random.Random, what: str, batches: tuple[int, ...]) -> cv.Program:
    options = {
        "batch_size": rng.choice(batches),
        "workers": rng.choice(TEAMS),
        "dtype": rng.choice(("float32", "float64")),
        "accumulate": rng.random() < 0.5,
        "device": rng.choice(("cpu", "cpu", "cuda")),
    }
    try:
        return cv.compile(graph, **options)
    except Exception as error:
        raise AssertionError(f"{what}, {options}: {type(error).__name__}: {error}") from error


def test_random_networks(whole: bool) -> None:
    for seed in range(NETWORKS[whole]):
        rng = random.Random(seed)
        graph, what = network(rng)
        compiled(graph, rng, f"seed {seed}: {what}", BATCHES)


def test_random_graphs(whole: bool) -> None:
    for seed in range(GRAPHS[whole]):
        rng = random.Random(seed)
        compiled(shape_graph(rng), rng, f"seed {seed}", (1, 2, 3, 7, 16, 100, 600))


@pytest.mark.parametrize("batch", [1, 2, 64, 256, 511, 512, 513])
@pytest.mark.parametrize("workers", [1, 2])
def test_wide_layers(batch: int, workers: int) -> None:
    net = nn.Linear(512) >> nn.ReLU() >> nn.Linear(512) >> nn.ReLU() >> nn.Linear(10)
    graph = cv.build_graph(net, (784,), "softmax_cross_entropy", cv.Adam())
    assert cv.compile(graph, batch_size=batch, workers=workers).batch_size == batch


def test_scratch_is_as_large_as_the_batch_wants() -> None:
    """Panels of a product over the batch have no more rows than that."""
    graph = cv.build_graph(nn.Linear(600), (700,), "mse", cv.SGD(0.1))
    for batch in (1, 64, 512, 2000):
        plan = cv.plan(graph, batch_size=batch, workers=1)
        (ws,) = (st.operands["ws"] for st in plan.statements if st.spec.name == "linear_bwd_w")
        assert ws.elems.bounds(batch)[1] == min(batch, 512) * 256


BROADCASTS = {
    "x.T + b": lambda g, x: cv.transpose(x) + g.parameter("b", (6, 1)),
    "(B,) + (1, 1)": lambda g, x: cv.sum(x, (1,)) + g.parameter("b", (1, 1)),
    "(5, B, 3) * (5, 1, 3)": lambda g, x: g.placeholder("y", (5, None, 3)) * g.parameter("b", (5, 1, 3)),
    "weights with the batch": lambda g, x: g.parameter("b", (4, 6)) @ g.placeholder("n", (6, None)),
    "and a bias with it": lambda g, x: (
        g.parameter("b", (4, 6)) @ g.placeholder("n", (6, None)) + g.placeholder("c", (None,))
    ),
    "classes by the batch": lambda g, x: cv.softmax(cv.transpose(x) + g.parameter("b", (6, 1))),
}


@pytest.mark.parametrize("what", BROADCASTS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_batch_may_be_any_axis(what: str, device: str) -> None:
    for batch in (1, 511, 512, 700):
        g = cv.CalcGraph()
        x = g.placeholder("x", (None, 6))
        with g.path("p", backward=True) as path:
            path.minimize(cv.mean(cv.tanh(BROADCASTS[what](g, x))), cv.SGD(0.1))
        for workers in (1, 3):
            assert cv.compile(g, batch_size=batch, device=device, workers=workers).batch_size == batch

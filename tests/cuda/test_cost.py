"""The cost model chooses what the figures say: few blocks for little work, launches for large rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

import calcvm as cv
from calcvm import nn
from calcvm.vm.run.cuda.cost import Figures, candidates, choose, seconds

FIGURES = Figures()


def plan_of(sizes, batch):
    net = nn.Linear(sizes[1])
    for n in sizes[2:]:
        net = net >> nn.Sigmoid() >> nn.Linear(n)
    graph = cv.build_graph(net, (sizes[0],), "softmax_cross_entropy", cv.Adam(1e-3))
    return cv.plan(graph, batch_size=batch, device="cuda", mode="grid", workers=2)


def test_a_tiny_network_is_one_blocks():
    assert choose(plan_of((4, 16, 3), 1), FIGURES) == ("grid", 1)


def test_more_work_takes_more_blocks():
    chosen = [choose(plan_of((784, 64, 64, 10), batch), FIGURES, mode="grid")[1] for batch in (1, 32, 1000, 10_000)]
    assert chosen == sorted(chosen) and chosen[-1] == FIGURES.multiprocessors


def test_costly_barriers_make_it_a_graph_and_costly_launches_a_grid():
    plan = plan_of((784, 64, 64, 10), 10_000)
    assert choose(plan, replace(FIGURES, barrier=1e-3, node=1e-9))[0] == "graph"
    assert choose(plan, replace(FIGURES, barrier=1e-9, node=1e-3, grid_memory=0.85))[0] == "grid"


def test_a_workspace_may_grow_by_pieces():
    """A product over the batch is shared in as many parts as there is room for."""
    g = cv.CalcGraph()
    x, w = g.placeholder("x", (None, 7)), g.parameter("w", (7, 1))
    with g.path("learn", backward=True) as learn:
        y = cv.tanh(x @ w)
        learn.minimize(cv.mean(cv.matmul(y, y, transpose_a=True)), cv.SGD(0.1))
    plan = cv.plan(g, batch_size=3, device="cuda", workers=3)
    assert any("from 16385 on" in str(word) for s in plan.statements for word in s.words.values())
    few, many = (seconds(plan.statements, plan.sync, batch, 4, "grid", 2, FIGURES) for batch in (1, 200_000))
    assert 0 < few < many


def test_what_is_given_is_kept():
    plan = plan_of((4, 16, 3), 1)
    assert choose(plan, FIGURES, "graph", 7) == ("graph", 7)
    assert choose(plan, FIGURES, "fleet") == ("fleet", 1)


@pytest.mark.parametrize("n", [1, 2, 132])
def test_candidates(n):
    assert candidates(n)[0] == 1 and candidates(n)[-1] == n


def test_time_falls_with_blocks_where_work_is_large():
    plan = plan_of((784, 64, 64, 10), 10_000)
    times = [seconds(plan.statements, plan.sync, 10_000, 4, "grid", n, FIGURES) for n in candidates(132)]
    assert times == sorted(times, reverse=True)


def test_figures_are_kept(tmp_path):
    path = tmp_path / "gpus" / "x.json"
    assert Figures.load(path) == FIGURES
    measured = replace(FIGURES, name="x", barrier=2e-6)
    measured.save(path)
    assert Figures.load(path) == measured
    path.write_text("{}")
    assert Figures.load(path) == FIGURES

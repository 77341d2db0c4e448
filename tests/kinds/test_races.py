"""No order of the workers' shares between barriers changes a bit (see `tests.kinds.races`)."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.ops import OPS
from calcvm.vm.program.encoding import FLAG_SYNC
from tests.kinds.networks import network, network_inputs, shape_graph
from tests.kinds.placed import OPERATORS, Placed, placements
from tests.kinds.races import Race, kernels, races

NETWORKS, GRAPHS, GENERATED = (10, 200), (30, 800), (20, 300)  # in `make test`, and whole
SAMPLE = 40  # of `make test`: every fortieth placement of the table
LARGEST = 1 << 20  # bytes of a heap: it is copied for each order
SMALL = (1, 2, 3, 7, 16, 33, 64)
OPTIMIZERS = (
    cv.SGD(0.1),
    cv.SGD(0.1, momentum=0.9, clip_norm=1.0),
    cv.Adam(),
    cv.Adagrad(clip_value=0.1),
    cv.RMSProp(),
)


def test_programs_of_the_table(whole: bool) -> None:
    programs = [Placed(OPS[name], e) for name in OPERATORS for e in placements(OPS[name])]
    played = 0
    for k, placed in enumerate(programs if whole else programs[::SAMPLE]):
        accumulate = bool(k % 2)
        program = cv.compile(
            placed.graph(OPTIMIZERS[k % len(OPTIMIZERS)]), batch_size=7, workers=5, accumulate=accumulate,
            dtype=("float32", "float64")[k // 2 % 2],
        )  # fmt: skip
        batches = (1, 2, 3, 5, 7) if whole else (1, 3, 7)
        played += races(program, placed.inputs, batches=batches, seed=k)
    print(f"{played} orders")


def test_random_networks(whole: bool) -> None:
    played = 0
    for seed in range(NETWORKS[whole]):
        rng = random.Random(seed)
        graph, _ = network(rng, SMALL)
        batch = rng.choice((1, 2, 3, 4, 5, 6, 7, 16, 33))
        program = cv.compile(graph, batch_size=batch, workers=rng.choice((2, 3, 5)), accumulate=rng.random() < 0.5)
        played += races(program, network_inputs(graph, seed), seed=seed)
    print(f"{played} orders")


def test_random_graphs(whole: bool) -> None:
    played = large = 0
    for seed in range(GRAPHS[whole]):
        rng = random.Random(seed)
        graph = shape_graph(rng)
        batch = rng.choice((1, 2, 3, 4, 5, 6, 7, 11))
        program = cv.compile(
            graph, batch_size=batch, workers=rng.choice((2, 3, 5)), accumulate=rng.random() < 0.5,
            dtype=rng.choice(("float32", "float64")),
        )  # fmt: skip
        if program.heap_bytes > LARGEST:
            large += 1
            continue
        played += races(program, network_inputs(graph, seed), batches=range(1, batch + 1), seed=seed)
    print(f"{played} orders; {large} graphs are too large")
    assert large <= GRAPHS[whole] / 20


@pytest.mark.filterwarnings("ignore:.*takes scores and applies")
def test_generated_graphs(whole: bool) -> None:
    """Those that `test_graphs` compares with PyTorch: several paths, shared variables, values used often."""
    generate = pytest.importorskip("tests.kinds.graphs", reason="needs PyTorch").generate
    played = 0
    for seed in range(GENERATED[whole]):
        case = generate(seed)
        program = case.compile(workers=(2, 3, 5)[seed % 3])
        played += races(program, case.inputs, batches=range(1, case.batch + 1), seed=seed)
    print(f"{played} orders")


# ---------------------------------------------------------------- the detector detects
@pytest.fixture(scope="module")
def trained() -> tuple[cv.Program, cv.CalcGraph]:
    net = nn.Linear(16) >> nn.Tanh() >> nn.Linear(7) >> nn.ReLU() >> nn.Linear(3)
    graph = cv.build_graph(net, (10,), "mse", cv.Adam(0.1, clip_norm=0.01))
    return cv.compile(graph, batch_size=8, workers=3), graph


def test_every_barrier_that_is_missing_is_seen(trained: tuple[cv.Program, cv.CalcGraph]) -> None:
    program, graph = trained
    inputs = network_inputs(graph, 0)
    assert races(program, inputs) > 100
    ends = {stop - 1 for (path, _), (_, stop) in program.sections.items()}
    barriers = [pc for pc in np.flatnonzero(program.rows[:, 1] & FLAG_SYNC) if int(pc) not in ends]
    assert len(barriers) > 4
    for pc in barriers:
        rows = program.rows.copy()
        rows[pc, 1] &= ~FLAG_SYNC
        with pytest.raises(Race, match=rf"\b{pc} .*a team of"):
            races(replace(program, rows=rows), inputs)


@pytest.mark.parametrize("wrong_at", [1, 2, 7])
def test_a_share_that_is_off_at_one_batch_is_seen(wrong_at: int) -> None:
    """Every worker computes the whole product, at one batch: the row after it works in place."""
    g = cv.CalcGraph()
    x, w = g.placeholder("x", (None, 6)), g.parameter("w", (6, 4))
    with g.path("learn", backward=True) as learn:
        learn.minimize(cv.mean(cv.exp(x @ w)), cv.SGD(0.1))
    program = cv.compile(g, batch_size=9, workers=3)
    native = kernels(program)
    rows = {batch: program.rows_for(batch)[0, 2:7].tolist() for batch in range(1, 10)}

    def off(name: str, heap: int, row: int, worker: int, team: int, phase: int) -> None:
        size = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_int64 * 7).from_address(row))[2:].tolist()
        if name == "matmul_fwd" and size == rows[wrong_at]:
            worker, team = 0, 1
        native(name, heap, row, worker, team, phase)

    for batch in range(1, 10):
        if batch == wrong_at:
            with pytest.raises(Race, match=f"matmul_fwd.*batch {batch},"):
                races(program, network_inputs(g, 0), batches=[batch], call=off)
        else:
            races(program, network_inputs(g, 0), batches=[batch], call=off)

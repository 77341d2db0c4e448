"""Every example of the operator table from end to end: graph, plan, verifier, VM, forward and backward.

The batch stands on every axis that can carry it, at run time it is one sample, some, and the planned number.  The
numbers of a team of one are those of `tests.reference` (gradients: its central differences along random directions);
teams of 2 and 3, played in several orders, give the same bits.
"""

from __future__ import annotations

import numpy as np
import pytest

import calcvm as cv
from calcvm.ops import OPS
from tests.kinds.placed import OPERATORS, Placed, placements
from tests.kinds.races import put, races
from tests.rowrun import SLOPES, Case, check_parts

STEP = 1e-6
SAMPLE = 8  # of `make test`: every eighth placement
BATCHES = (1, 2, 6)


def chosen(name: str, whole: bool) -> list[Placed]:
    found = [Placed(OPS[name], e) for e in placements(OPS[name])]
    return found if whole else found[OPERATORS.index(name) % SAMPLE :: SAMPLE]


def run(placed: Placed, program: cv.Program, rounds: list[dict], parameters: dict) -> dict:
    """Results of a model: output and loss after each round, parameters after the update."""
    with cv.CalcHeap(program.heap_bytes) as heap:
        model = heap.create(program, seed=3, workers=1)
        for name, view in model.parameters.items():
            view[...] = parameters[name]
        out: dict = {"y": [], "loss": [], "rng": []}
        for data in rounds:
            for name, array in data.items():
                put(model, name, array)
            model.forward("learn")
            out["y"].append(np.array(model["y"]))
            out["rng"].append(model["rng"] if placed.spec.name == "dropout" else np.zeros(2, np.int64))
            if placed.trains:
                model.backward("learn")
                out["loss"].append(np.array(model["loss"]))
        if placed.trains:
            kept = program.info["paths"]["learn"]["gradients"]  # None: used up by an update inside the backward
            out["grad"] = {name: model.grad(name, "learn") for name in parameters if kept[name] is not None}
            model.optimize("learn")
            model.end_round("learn")
            out["after"] = {name: np.array(view) for name, view in model.parameters.items()}
        return out


def close(got: np.ndarray, want: np.ndarray | float, tolerance: float, what: str) -> None:
    want = np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    error = np.abs(got - want) / (np.abs(want) + max(np.abs(want).max(initial=0), 1e-3))
    assert error.max(initial=0) <= tolerance, f"{what}: {got}, expected {want}"


def check(placed: Placed, program: cv.Program, batch: int, accumulate: bool) -> None:
    rng = np.random.default_rng(batch)
    parameters = placed.parameters(rng)
    rounds = [placed.data(batch, rng) for _ in range(2 if accumulate else 1)]
    found = run(placed, program, rounds, parameters)
    where = f"{placed}, batch {batch}, accumulate {accumulate}"

    def loss(values: dict[str, np.ndarray]) -> float:
        return sum(placed.expected({**data, **values}, batch, state)[1] for data, state in zip(rounds, found["rng"]))

    for data, state, y in zip(rounds, found["rng"], found["y"]):
        close(y, placed.expected({**data, **parameters}, batch, state)[0], 1e-12, f"{where}: y")
    if not placed.trains:
        return
    close(np.array(sum(found["loss"])), loss(parameters), 1e-12, f"{where}: loss")
    for name, value in parameters.items() if placed.spec.name not in SLOPES else ():
        gradient = found["grad"].get(name, value - found["after"][name])
        assert np.array_equal(found["after"][name], value - gradient), f"{where}: update of {name}"  # the rate is 1
        for _ in range(2):
            way = rng.uniform(-1, 1, value.shape)
            ends = [loss({**parameters, name: value + h * way}) for h in (STEP, -STEP)]
            slope = np.array((ends[0] - ends[1]) / (2 * STEP))
            scale = max(abs(slope), np.abs(gradient * way).sum(), 1e-3)
            assert abs((gradient * way).sum() - slope) <= 1e-6 * scale, f"{where}: gradient of {name}"


@pytest.mark.parametrize("name", OPERATORS)
def test_end_to_end(name: str, whole: bool) -> None:
    """Trained with gradients added up and without; unless --whole by turns."""
    ways = (False, True) if whole else (OPERATORS.index(name) % 2 == 0,)
    batches = BATCHES[1:] if name == "batch_norm" else BATCHES  # it does not train on one value per channel
    for placed in chosen(name, whole):
        for accumulate in ways if placed.trains else (False,):
            program = cv.compile(
                placed.graph(), batch_size=max(BATCHES), dtype="float64", workers=3, accumulate=accumulate, keep=["y"]
            )
            for batch in batches:
                check(placed, program, batch, accumulate)
            races(program, placed.inputs, batches=batches, teams=(2, 3), draws=0)


@pytest.mark.parametrize("name", OPERATORS)
def test_shares_are_those_of_the_specs_at_every_batch(name: str, whole: bool) -> None:
    """Of each row alone, which cells a worker reads and writes."""
    for placed in chosen(name, whole):
        check_parts(Case(placed.spec, placed.example, "float64", max(BATCHES)))


def test_the_batch_stands_on_every_axis() -> None:
    """Of the operators that any axis can carry it through, placements have it on each."""
    for name, rank in (("add", 4), ("transpose", 4), ("slice", 3), ("sum", 2), ("matmul", 3), ("concat", 3)):
        shapes = [Placed(OPS[name], e).graph().variables["y"].shape for e in placements(OPS[name])]
        found = {k for s in shapes if len(s) == rank for k, n in enumerate(s) if not n.constant}
        assert found == {*range(rank)}, name
    assert sum(len(placements(OPS[name])) for name in OPERATORS) > 700

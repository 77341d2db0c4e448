"""Rows that are users' equations on a simulated GPU, as users reach them: beside the processor's, by operators of the table."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import calcvm as cv
from calcvm.equations.stated import STATED
from calcvm.errors import Trap
from tests.equations.test_user_equations import CASES, graded, graph_of

BATCH = 3
WAYS = (dict(mode="grid", workers=1), dict(mode="grid", workers=2))


def found(name: str, device: str, **how) -> tuple[set[str], dict[str, np.ndarray]]:
    """The names of the program's rows; the result and the gradients."""
    case, graph = CASES[name], graph_of(CASES[name])
    keep = ["result", *(f"grad.{n}" for n in graded(case))]
    program = cv.compile(graph, batch_size=BATCH, device=device, dtype="float64", keep=keep, **how)
    with cv.CalcHeap(program.heap_bytes, device=device) as heap:
        model = heap.create(program, seed=0)
        for n, v in case.values(BATCH).items():
            if None in case.shapes[n] or n in case.classes:
                model[n] = v
        model["r"] = np.random.default_rng(1).standard_normal(graph.variables["r"].descriptor.current(BATCH))
        model.forward("p")
        return {row for row, _ in program.instructions}, {n: np.array(model[n]) for n in keep}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_processor(name, gpu, monkeypatch, whole):
    """By one worker and by two; unless --whole by turns."""
    _, want = found(name, "cpu", workers=1)
    monkeypatch.setattr(cv, "equation", partial(cv.equation, fused=True))
    for how in WAYS if whole else WAYS[[*CASES].index(name) % 2 :][:1]:
        rows, got = found(name, "cuda", **how)
        for n, v in want.items():
            np.testing.assert_allclose(got[n], v, rtol=1e-10, atol=1e-10, err_msg=f"{n} {how}")
    if not rows & {*STATED}:
        pytest.skip("operators of the table do all of it")


def test_data_that_are_no_place_trap(gpu):
    g = cv.CalcGraph()
    t, w = g.placeholder("t", (None,), dtype="int64"), g.parameter("w", (4, 2), init=np.ones((4, 2)))
    with g.path("p"):
        cv.equation("y[b,c] = 2*w[t[b],c]*w[0,c]", t=t, w=w, fused=True)
    program = cv.compile(g, batch_size=3, device="cuda", workers=1)
    model = cv.CalcHeap(program.heap_bytes, device="cuda").create(program, seed=0)
    model["t"] = np.array([0, 3, 1])
    model.forward("p")
    for wrong in (-1, 4, 2**62):
        model.slot.write(program.by_name["t"], np.array([0, wrong, 1]), (3,))
        with pytest.raises(Trap, match=r"row 0 \(equation_\w+, .*: an index of 't' is not an integer in \[0, 4\)"):
            model.forward("p")


def test_indexes_of_operators_trap_too(gpu):
    g = cv.CalcGraph()
    t, w = g.placeholder("t", (None,), dtype="int64"), g.parameter("w", (4, 2), init=np.ones((4, 2)))
    x = g.placeholder("x", (None, 2))
    made = {
        "embedding": lambda: cv.take(w, t),
        "one_hot": lambda: cv.one_hot(t, 4),
        "inside": lambda: cv.scatter_add(w, t, x),
    }
    for name, make in made.items():
        with g.path(name):
            make()
    program = cv.compile(g, batch_size=3, device="cuda", workers=2)
    model = cv.CalcHeap(program.heap_bytes, device="cuda").create(program, seed=0)
    model["t"], model["x"] = np.array([0, 3, 1]), np.ones((3, 2))
    for name in made:
        for right in (True, False):
            model.slot.write(program.by_name["t"], np.array([0, 3 if right else 4, 1]), (3,))
            if right:
                model.forward(name)
            else:
                with pytest.raises(Trap, match=rf"\({name}_fwd.*: an index of 't' is not an integer in \[0, 4\)"):
                    model.forward(name)

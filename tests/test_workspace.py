"""Scratch is a budget: rows run with less than speed wants, to the same bits, and plans that would not fit get less."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import calcvm as cv
from calcvm.errors import CalcError, PlanError
from calcvm.ops import OPS
from calcvm.ops.dims import Affine
from calcvm.ops.sizes import On, Piecewise, workspace
from calcvm.planner.lifetimes import Machine
from calcvm.planner.workspace import with_least
from calcvm.vm.program.encoding import decode_row
from tests import rowrun
from tests.rowrun import Case, check_workspace

BATCH = 64


@cache
def graph() -> cv.CalcGraph:
    g = cv.CalcGraph()
    x, t = g.placeholder("x", (None, 40)), g.placeholder("t", (None, 30))
    a, b = g.parameter("a", (40, 520)), g.parameter("b", (30, 520))
    with g.path("learn", backward=True) as learn:
        y = cv.matmul(cv.tanh(cv.matmul(x, a)), b, transpose_b=True)
        learn.minimize(cv.mse(y, t), optimizer=cv.SGD(0.1), output=y)
    return g


def rooms(plan: cv.Plan) -> list[int]:
    return [st.words["wn"].at(BATCH) for st in plan.statements if st.spec.workspace]


def trained(plan: cv.Plan) -> bytes:
    model = cv.CalcHeap(plan.heap_bytes).create(cv.compile(graph(), plan=plan), seed=1)
    rng = np.random.default_rng(0)
    for _ in range(3):
        model.step(rng.random((BATCH, 40), np.float32), rng.random((BATCH, 30), np.float32))
    return model.image().tobytes()


@pytest.mark.parametrize("workers", (1, 2))
def test_a_plan_that_would_not_fit_gets_less(workers: int) -> None:
    fast = cv.plan(graph(), batch_size=BATCH, workers=workers)
    least = cv.plan(graph(), batch_size=BATCH, workers=workers, memory=fast.heap_bytes - 64)
    assert least.heap_bytes < fast.heap_bytes and rooms(fast) != rooms(least)
    assert all(a <= b for a, b in zip(rooms(least), rooms(fast)))
    assert trained(least) == trained(fast)
    with pytest.raises(PlanError) as error:
        cv.plan(graph(), batch_size=BATCH, workers=workers, memory=least.heap_bytes - 1)
    assert error.value.needed == least.heap_bytes


def test_some_rows_get_less() -> None:
    plan = cv.plan(graph(), batch_size=BATCH)
    machine = Machine(plan.itemsize)
    which = [t for t, st in enumerate(plan.statements) if st.spec.workspace]
    some = with_least(plan.lowered, machine, which[1:2])
    changed = [t for t, (a, b) in enumerate(zip(plan.statements, some.statements)) if a is not b]
    assert changed == which[1:2]
    assert len(with_least(plan.lowered, machine).values) < len(plan.lowered.values)  # some can do without


def test_what_speed_wants_is_a_size_for_every_batch() -> None:
    row, on = OPS["linear"].bwd[0], On(3, 0)
    words = {"rows": Affine(1, 0), "inner": 1, "N": 600, "K": 5}
    least, wanted = workspace(row, words, on)
    assert least == Affine(0, 0) and isinstance(wanted, Piecewise)
    for batch in (1, 511, 512, 513, 10**6):
        assert wanted.at(batch) == workspace(row, {**words, "rows": batch}, on)[1].b == min(batch, 512) * 256


def test_word_and_function_go_together() -> None:
    row = OPS["linear"].fwd[0]
    for lie in ({"workspace": None}, {"words": row.words[:-1]}):
        with pytest.raises(CalcError, match="'linear_fwd': the word WN and the function workspace= are given together"):
            replace(row, **lie)


def test_a_lie_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose bits depend on its scratch."""
    spec = OPS["matmul"]
    case = Case(spec, replace(spec.examples[2], shapes=((None, 6), (40, 6))), "float32", 5)
    check_workspace(case)
    run = rowrun.backend.run

    def careless(name, dtype, cells, row, *how):  # type: ignore[no-untyped-def]
        run(name, dtype, cells, row, *how)
        if name == "matmul_fwd":
            words, offsets = decode_row(spec.fwd[0], row)
            cells[offsets["y"]] += np.uint32(words["wn"])

    monkeypatch.setattr(rowrun.backend, "run", careless)
    with pytest.raises(AssertionError, match="differs with"):
        check_workspace(case)

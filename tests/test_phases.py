"""Rows of several phases: all workers meet in between, and read what others have written in scratch before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import calcvm as cv
from calcvm.errors import CalcError, ProgramError
from calcvm.init import Uniform
from calcvm.ops import OPS
from calcvm.ops.spec import PHASES, Example
from calcvm.ops.statement import Lowered
from calcvm.planner.lifetimes import Machine
from calcvm.planner.sync import barriers
from calcvm.vm.program.encoding import FLAG_PHASES, FLAG_SYNC, decode_row, phases_of
from calcvm.vm.program.verify import verify
from tests.kinds.networks import network_inputs
from tests.kinds.races import Race, races
from tests.planner_checker import check_team
from tests.rowrun import Case, check_forward, check_parts, check_workers, check_workspace, words_of

SUMS = ("sum", "mean", "sum_squares")
ROWS, COLS = 33, 2100  # 69 300 elements: 17 blocks, the last one short


def graph(cols: int = COLS) -> cv.CalcGraph:
    g = cv.CalcGraph()
    x, w = g.placeholder("x", (None, cols)), g.parameter("w", (cols,), init=Uniform(-1, 1))
    with g.path("learn", backward=True) as learn:
        learn.minimize(cv.mean(cv.square(x * w)), optimizer=cv.SGD(0.1))
    return g


def program(workers: int = 3, **how: object) -> cv.Program:
    return cv.compile(graph(), batch_size=ROWS, workers=workers, **how)  # type: ignore[arg-type]


def long_row(p: cv.Program) -> int:
    (found,) = (pc for pc in range(len(p.rows)) if p.spec(pc).name == "mean_fwd")
    return found


@pytest.mark.parametrize("check", (check_forward, check_workers, check_parts, check_workspace))
@pytest.mark.parametrize("name", SUMS)
def test_declared(name: str, check: object) -> None:
    for dtype in ("float32", "float64"):
        case = Case(OPS[name], Example(shapes=((ROWS, COLS),), attrs={"axes": None}), dtype, 1)
        assert words_of(case.spec.fwd[0], case.words, 2)["phases"] == 2
        check(case)  # type: ignore[operator]


def test_any_team_has_the_same_bits() -> None:
    """Also one that runs rows in one phase, and batches below the planned one."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, COLS), np.float32)
    found = set()
    for planned, workers in ((1, 1), (3, 1), (3, 2), (3, 3)):
        p = program(planned)
        assert (p.rows[:, 1] & FLAG_PHASES).any() == (planned > 1)
        model = cv.CalcHeap(p.heap_bytes).create(p, seed=1, workers=workers)
        losses = [model.step(x[:batch]) for batch in (ROWS, ROWS, 32, 3, 1)]
        found.add((*losses, model.image().tobytes()))
    assert len(found) == 1


def test_races() -> None:
    p = program()
    assert races(p, network_inputs(graph(), 0), batches=[1, 2, ROWS])
    pc = long_row(p)
    rows = p.rows.copy()
    rows[pc, 1] |= FLAG_SYNC
    races(replace(p, rows=rows), network_inputs(graph(), 0), batches=[ROWS])
    rows[pc - 1, 1] &= ~FLAG_SYNC  # what the row reads is shared in another way
    with pytest.raises(Race, match="mean_fwd"):
        races(replace(p, rows=rows), network_inputs(graph(), 0), batches=[ROWS])


def test_verifier() -> None:
    p = program()
    pc = long_row(p)
    words, _ = decode_row(p.spec(pc), p.rows[pc])
    assert words["phases"] == phases_of(p.rows[pc]) == 2 and words["wn"] == ROWS

    def refused(message: str, *changes: tuple[int, int]) -> None:
        rows = p.rows.copy()
        for word, value in changes:
            rows[pc, word] = value
        with pytest.raises(ProgramError, match=f"row {pc} mean_fwd.*{message}"):
            verify(replace(p, rows=rows))

    flags = int(p.rows[pc, 1])
    refused("it has 3 phases, which is 1 too many", (2, 3))
    refused("it has 1048576 phases", (2, 2**20))
    refused("phases = 1099511627776 is outside", (2, 2**40))
    refused("phases = 0 is outside", (2, 0), (1, flags & ~FLAG_PHASES))
    refused("malformed", (1, flags & ~FLAG_PHASES))
    refused("malformed", (2, 1))
    refused("it has 1 phases", (2, 1), (1, flags & ~FLAG_PHASES))


def test_inside_a_row_all_meet() -> None:
    """Rows before it need no barrier from those after it, its own scratch is everybody's."""
    plan = cv.plan(graph(), batch_size=ROWS, workers=3)
    for team in (2, 3):
        check_team(plan, ROWS, team)
    machine = Machine(4, 3)
    (t,) = (t for t, st in enumerate(plan.statements) if st.spec.name == "mean_fwd")
    st = plan.statements[t]

    def flags(*statements: object) -> tuple[bool, ...]:
        return barriers(statements, plan.offsets, ROWS, machine)  # type: ignore[arg-type]

    assert flags(st, st) == (True, True), "the next row writes scratch that others still read"
    before = replace(plan.statements[t - 1], path=st.path)
    assert flags(before, st)[0], "it reads what others have written"
    assert isinstance(plan.lowered, Lowered)


def test_word_and_expression_go_together() -> None:
    row = OPS["mean"].fwd[0]
    for lie in ({"phases": "1"}, {"words": row.words[1:]}, {"words": (*row.words[1:], PHASES)}):
        with pytest.raises(CalcError, match="'mean_fwd': its first word is PHASES where it has several phases="):
            replace(row, **lie)

"""What caches hold of a step's operands, followed over places of the heap; and seconds of rows by it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import calcvm as cv
from calcvm.kernels_cpu._target import host
from calcvm.ops.statement import Statement
from calcvm.planner.costs import cache_model
from calcvm.planner.costs.cache_model import Touched, of_rows, touched, warm
from calcvm.vm.run import costs
from calcvm.vm.run.costs import Costs, cache_bytes
from tests.test_costs import HOW, empty, graph  # noqa: F401 (a fixture)

KIB = 1 << 10
A, B, SWEEP = (0, 16 * KIB), (16 * KIB, 16 * KIB), (64 * KIB, 512 * KIB)


def test_what_is_used_again_at_once_is_warm() -> None:
    assert warm([[A], [A], [SWEEP]], 100 * KIB)[1] == [1.0]


def test_what_a_larger_sweep_came_after_is_cold() -> None:
    assert warm([[A], [SWEEP], [A]], 100 * KIB)[2] == [0.0]
    assert warm([[A], [SWEEP], [A]], 2 << 20)[2] == [1.0]
    assert warm([[SWEEP], [SWEEP]], 100 * KIB) == [[0.0], [0.0]]


def test_the_same_cells_are_warm_whatever_lies_there() -> None:
    """Half of a value lies where the one before it lay, half where the sweep was long ago."""
    half = (A[0] + A[1] // 2, A[1])
    found = warm([[half], [SWEEP], [A], [half]], 100 * KIB)
    assert found[2] == [0.0] and found[3] == [0.5]
    assert warm([[(0, 8 * KIB)], [(64 * KIB, 8 * KIB), (0, 8 * KIB)]], 100 * KIB)[1][1] == 1.0


def test_a_step_finds_what_the_step_before_it_left() -> None:
    assert warm([[A], [B]], 100 * KIB) == [[1.0], [1.0]]
    assert warm([[A], [SWEEP]], 100 * KIB)[0] == [0.0]


def test_what_is_held_fades_with_what_came_between() -> None:
    """Never more of it where more came between."""
    found = [warm([[A], [(64 * KIB, n * KIB)], [A]], 100 * KIB)[2][0] for n in range(8, 256, 8)]
    assert found == sorted(found, reverse=True) and found[0] == 1 and found[-1] == 0 and len({*found}) > 3


def test_empty_rows_and_places_are_warm() -> None:
    assert warm([], 1) == [] and warm([[], [(5, 0)], [A]], 100 * KIB) == [[], [1.0], [1.0]]


def test_operands_that_lie_in_the_place_of_others_are_told() -> None:
    st: Any = None
    assert Touched(st, {"x": A, "m": B, "y": A, "z": A}).shared == {"y": "x", "z": "x"}


class Table:
    """Seconds of a row: one, and one more for each operand that is cold."""

    cache_bytes = 100 * KIB

    def found(self, statement: Statement, warm: Mapping[str, float], shared: Mapping[str, str]) -> float:
        return 1 + sum(1 - share for share in warm.values())


def test_rows_are_told_by_what_they_find() -> None:
    st: Any = None
    rows = [Touched(st, places) for places in ({"x": A}, {"y": SWEEP}, {"x": A})]
    assert of_rows(rows, Table()) == 1 + 2 + 2  # after the last row the first one finds A warm


def test_a_plans_places_are_those_of_its_program() -> None:
    plan = cv.plan(graph(), **HOW)
    rows = [touched(st, plan.offsets, 8, plan.layout.machine) for st in plan.statements]
    top = max(start + n for row in rows for start, n in row.places.values())
    assert 0 < top <= plan.heap_bytes and any(row.shared for row in rows)
    found = warm([[*row.places.values()] for row in rows], plan.heap_bytes * 4)
    assert all(share == 1 for row in found for share in row)  # all of the heap is held


# ---------------------------------------------------------------- measured rows
def test_a_row_takes_its_parts_by_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = cv.plan(graph(64), **HOW)
    row = next(st for st in plan.statements if st.spec.name == "conv_fwd" and st.label.startswith("conv_2"))
    cost = Costs(8, 1, "float32")
    x, y = [name for name in cost._large(row, {}) if name in ("x", "y")]
    took = {(): 10.0, (x,): 13.0, (y,): 11.0}
    monkeypatch.setattr(cost, "_run_cold", lambda st, shared, cold: took.get(cold, 13.5 if len(cold) > 1 else 10.0))
    cost.cache_bytes = 1 << 30
    all_warm = dict.fromkeys(row.operands, 1.0)
    for missing, seconds in (({}, 10), ({x: 0.0}, 13), ({y: 0.0}, 11), ({x: 0.5}, 11.5), ({x: 0.0, y: 0.0}, 13.5)):
        assert cost.found(row, {**all_warm, **missing}, {}) == seconds
    fresh = Costs(8, 1, "float32")
    assert not fresh.seconds
    cost.keep()
    kept = Costs(8, 1, "float32")
    monkeypatch.setattr(kept, "_run_cold", lambda *_: pytest.fail("it is measured again"))
    kept.cache_bytes = 1 << 30
    assert kept.found(row, {**all_warm, x: 0.0}, {}) == 13


@pytest.mark.skipif(not host().x86, reason="caches cannot be emptied of a line here")
def test_a_row_whose_operands_are_cold_takes_longer() -> None:
    plan = cv.plan(graph(64), **{**HOW, "batch_size": 64})
    row = next(st for st in plan.statements if st.spec.name == "batch_norm_fwd")
    cost = Costs(64, 1, "float32")
    large = tuple(cost._large(row, {}))
    assert cost._state(row, {}, ()) < cost._state(row, {}, large) < 1


def test_caches_are_those_that_the_system_tells(tmp_path: Path) -> None:
    for n, (level, kind, size) in enumerate(((1, "Data", "48K"), (1, "Instruction", "64K"), (2, "Unified", "1024K"))):
        (folder := tmp_path / f"index{n}").mkdir()
        for name, text in (("level", str(level)), ("type", kind), ("size", size)):
            (folder / name).write_text(f"{text}\n")
    assert cache_bytes(2, tmp_path) == (1024 + 2 * 48) << 10
    (folder := tmp_path / "index3").mkdir()
    for name, text in (("level", "3"), ("type", "Unified"), ("size", "32768K")):
        (folder / name).write_text(text)
    assert cache_bytes(2, tmp_path) == (32768 + 2 * 1024) << 10
    (folder / "size").write_text("?")
    assert cache_bytes(1, tmp_path) == cache_bytes(1, tmp_path / "none") == costs.CACHE_BYTES


def test_a_step_in_a_budget_is_told_beside_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both alike, and the same each time; costs of the user's own know no caches."""
    g = graph()
    whole = cv.plan(g, objective="memory", costs="measured", **HOW)
    budget = {"memory": int(0.7 * whole.heap_bytes), **HOW}
    plan = cv.plan(g, costs="measured", **budget)
    assert plan.recomputed and plan.seconds_without == pytest.approx(whole.seconds) and whole.seconds_without is None
    assert "caches counted" in str(plan) and plan.to_dict()["seconds_without"] == plan.seconds_without
    second = cv.plan(g, costs="measured", **budget)
    assert (second.seconds, second.seconds_without) == (plan.seconds, plan.seconds_without)
    monkeypatch.setattr(cache_model, "warm", lambda *_: pytest.fail("caches are followed"))
    given = cv.plan(g, costs=lambda row: 1e-3, **budget)
    assert given.seconds_without is None and given.seconds == pytest.approx(
        1e-3 * sum(st.path == "learn" for st in given.statements)
    )

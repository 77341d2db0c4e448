"""Solvers in processes of their own: whatever befalls them, a plan is made, it is right, and it says what happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import calcvm as cv
from calcvm import helper_process
from calcvm.planner.layout import Layout
from calcvm.planner.recomputation import race, search, solver_process
from calcvm.planner.recomputation.race import Solvers
from calcvm.planner.recomputation.schedule import RecomputationProblem
from calcvm.planner.recomputation.search import solve
from tests.conftest import ENOUGH
from tests.planner_checker import check_live
from tests.test_exact import cheapest, limited, paged, searched
from tests.test_recompute import deep

ANSWERS = "import json, sys; given = json.loads(sys.stdin.readline()); print({}, flush=True)"


def graph() -> cv.CalcGraph:
    return cv.build_graph(cv.zoo.unet(width=4, size=32), (1, 32, 32), "mse", cv.SGD(0.1))


@pytest.fixture(scope="module")
def searched_plan() -> Any:
    whole = cv.plan(graph(), batch_size=8, workers=1)
    return cv.plan(graph(), batch_size=8, workers=1, memory=int(0.8 * whole.heap_bytes))


def planned(plan: Any, seconds: float = 5.0, **options: Any) -> Any:
    return cv.plan(graph(), batch_size=8, workers=1, memory=plan.memory_bytes, solver_seconds=seconds, **options)


def same(one: Any, other: Any) -> bool:
    """Whether two plans run the same rows at the same places."""
    rows = [
        [(st.label, st.phase, [plan.offsets[v] for v in st.operands.values() if v]) for st in plan.statements]
        for plan in (one, other)
    ]
    return rows[0] == rows[1]


# ---------------------------------------------------------------- they work
@pytest.mark.parametrize("seed", [1, 22, 35])
def test_together_they_find_the_cheapest_and_prove_it(seed):
    pytest.importorskip("scipy")
    problem = limited(seed)
    best, known = cheapest(problem), searched(problem)
    assert best is not None
    solvers = Solvers(ENOUGH)
    if not race.SOLVERS[1].missing:
        answer = solvers.improve(problem, known, 1.0)
        assert answer.run.cost == pytest.approx(best.cost) and answer.bound == pytest.approx(best.cost)
        assert solvers.spent < ENOUGH and "HiGHS and CP-SAT" in solvers.says(True)


def test_a_plan_says_who_worked(searched_plan):
    pytest.importorskip("scipy")
    pytest.importorskip("ortools")
    told: list[tuple[float, float, float]] = []
    plan = planned(searched_plan, 20, progress=lambda *what: told.append(what))
    assert plan.overhead <= searched_plan.overhead + 1e-12 and plan.solver.startswith("HiGHS and CP-SAT: ")
    assert plan.solver_seconds > 0 and plan.proved == (", proved" in plan.solver)
    assert told and all(bound <= overhead + 1e-12 for _, overhead, bound in told)
    assert [seconds for seconds, _, _ in told] == sorted(seconds for seconds, _, _ in told)
    assert plan.to_dict()["solver"] == plan.solver and "\nsolver       HiGHS" in str(plan)
    check_live(plan)
    assert searched_plan.solver == "" and "solver " not in str(searched_plan)


def test_progress_is_lines_on_stderr(searched_plan, capsys):
    pytest.importorskip("scipy")
    planned(searched_plan, 2, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(line.startswith("overhead ") and " %, at least " in line for line in lines)
    with pytest.raises(cv.CalcError, match="progress"):
        planned(searched_plan, 2, progress="yes")


@pytest.mark.parametrize("again", [True, False])
def test_with_pages_they_find_the_cheapest_and_prove_it(again):
    """One that knows of no pages looks for schedules without: its bound, which is larger, does not count."""
    pytest.importorskip("scipy")
    problem = paged(limited(22), 2.0, again=again)
    best, known, solvers = cheapest(problem, 4), searched(problem), Solvers(ENOUGH)
    answer = solvers.improve(problem, known, 1.0)
    assert best is not None and best.paged
    assert answer.run.cost == pytest.approx(best.cost) and answer.bound == pytest.approx(best.cost)
    assert solvers.says(True).startswith("HiGHS")
    if find_spec("ortools"):
        assert solvers.says(True).startswith("HiGHS and CP-SAT: ")


def test_a_network_with_pages_is_planned_with_a_proof(monkeypatch, whole):
    """No dearer than what is searched, or than without pages; where the file is too slow as without; and with the bits of all memory."""
    if not whole:
        pytest.skip("takes --whole")
    pytest.importorskip("scipy")
    monkeypatch.setattr(search, "EFFORT", 0)  # the first schedule that fits is searched for
    graph = cv.build_graph(deep(3), (3, 12, 12), "softmax_cross_entropy", cv.SGD(0.1))
    how: dict[str, Any] = {"batch_size": 32, "workers": 1, "accumulate": False}
    whole = cv.plan(graph, **how)
    how["memory"] = int(0.65 * whole.heap_bytes)
    slow, middle = ({"page_bytes": "64 MiB", "page_bandwidth": b} for b in (1e3, 1e10))
    found = cv.plan(graph, **how, **middle)
    without, as_none, solved = (cv.plan(graph, **how, **more, solver_seconds=ENOUGH) for more in ({}, slow, middle))
    assert without.proved and as_none.proved and solved.proved and solved.solver.startswith("HiGHS")
    assert as_none.overhead == pytest.approx(without.overhead) and not as_none.page_bytes
    assert solved.overhead < min(found.overhead, without.overhead) and solved.page_bytes and solved.recomputed
    assert solved.lower_bound == pytest.approx(solved.overhead) and solved.heap_bytes <= how["memory"]
    check_live(solved)
    rng = np.random.default_rng(0)
    data = [(rng.standard_normal((b, 3, 12, 12)), rng.integers(0, 4, b)) for b in (32, 7, 32)]
    models = [cv.CalcHeap(p.heap_bytes).create(cv.compile(graph, plan=p), seed=1) for p in (whole, solved)]
    assert [models[0].step(*d) for d in data] == [models[1].step(*d) for d in data]
    for name, value in models[0].parameters.items():
        np.testing.assert_array_equal(value, models[1].parameters[name])


# ---------------------------------------------------------------- they do not
def test_without_solvers_the_search_stays_and_is_told(searched_plan, monkeypatch, tmp_path):
    for name in ("scipy", "ortools"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.warns(cv.CalcWarning, match="is not installed .extra solver.") as warned:
        plan = planned(searched_plan)
    assert len(warned) == 2
    assert plan.solver == (
        "SciPy is not installed (extra solver); OR-Tools is not installed (extra solver): searched only"
    )
    assert plan.lower_bound is None and not plan.proved and same(plan, searched_plan)
    plan.html(tmp_path / "plan.html")
    assert "SciPy is not installed" in (tmp_path / "plan.html").read_text() and "searched only" in str(plan)


def test_without_one_of_them_the_other_works(searched_plan, monkeypatch):
    pytest.importorskip("scipy")
    monkeypatch.setitem(sys.modules, "ortools", None)
    with pytest.warns(cv.CalcWarning, match="OR-Tools is not installed"):
        plan = planned(searched_plan)
    assert plan.solver.startswith("HiGHS: ") and plan.solver.endswith("OR-Tools is not installed (extra solver)")
    assert plan.lower_bound is not None


FAULTS = {
    "killed": ("import os; os.kill(os.getpid(), 9)", "crashed (exit status -9)"),
    "ends": ("raise SystemExit(3)", "crashed (exit status 3)"),
    "raises": (ANSWERS.format("""'{"ended": "failed (ValueError: no)"}'"""), "failed (ValueError: no)"),
    "nonsense": (ANSWERS.format("'nonsense'"), "sent an invalid answer"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_solver_that_fails_leaves_the_search(searched_plan, monkeypatch, fault):
    pytest.importorskip("scipy")
    code, text = FAULTS[fault]
    monkeypatch.setattr(helper_process, "START", code)
    monkeypatch.setattr(race, "SOLVERS", race.SOLVERS[:1])
    with pytest.warns(cv.CalcWarning, match="HiGHS"):
        plan = planned(searched_plan, ENOUGH)
    assert f"HiGHS {text}" in plan.solver and not plan.proved and same(plan, searched_plan)


def test_an_error_inside_a_solver_is_told(monkeypatch):
    pytest.importorskip("scipy")
    broken = solver_process.Solver("HiGHS", "scipy", "SciPy", "calcvm.planner.no_such_model")
    monkeypatch.setattr(race, "SOLVERS", (broken,))
    problem = limited(1)
    solvers, known = Solvers(ENOUGH), searched(problem)
    with pytest.warns(cv.CalcWarning, match="failed .ModuleNotFoundError"):
        answer = solvers.improve(problem, known, 1.0)
    assert answer.run is known and answer.bound == 0


def test_no_process_can_be_started(searched_plan, monkeypatch):
    pytest.importorskip("scipy")
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.warns(cv.CalcWarning, match="cannot be started"):
        plan = planned(searched_plan)
    assert plan.solver.endswith("searched only") and same(plan, searched_plan)


def test_a_solver_that_does_not_end_is_ended(searched_plan, monkeypatch):
    pytest.importorskip("scipy")
    monkeypatch.setattr(helper_process, "START", "import time; time.sleep(600)")
    monkeypatch.setattr(race, "GRACE", 0.2)
    started: list[Any] = []
    made = solver_process.SolverProcess.__init__
    monkeypatch.setattr(
        solver_process.SolverProcess, "__init__", lambda self, *what: (started.append(self), made(self, *what))[1]
    )
    begin = time.monotonic()
    plan = planned(searched_plan, 0.5)
    assert time.monotonic() - begin < 60 and started and all(one.process.returncode for one in started)
    assert ", not proved" in plan.solver and same(plan, searched_plan)


def test_what_a_solver_claims_is_followed(monkeypatch):
    """A schedule that exceeds the limit is not taken, whatever is said of it; nor is a bound above what is known told."""
    problem = limited(1)
    known = searched(problem)
    assert known.chosen and not known.excess
    lies = '\'{"found": [], "bound": 1e9}\\n{"ended": ""}\''
    monkeypatch.setattr(helper_process, "START", ANSWERS.format(lies))
    monkeypatch.setattr(race, "SOLVERS", (solver_process.Solver("Liar", "json", "json", ""),))
    answer = Solvers(ENOUGH).improve(problem, known, 1.0)
    assert answer.run is known and answer.bound == known.cost


@pytest.mark.parametrize("pair", [(0, 0), (99, 0), (3, -9), (5, 3)], ids=str)
def test_what_is_no_schedule_is_not_followed(monkeypatch, pair):
    problem = paged(limited(22), 2.0)
    known = searched(problem)
    lies = f'\'{{"found": [{[*pair]}]}}\\n{{"ended": ""}}\''
    monkeypatch.setattr(helper_process, "START", ANSWERS.format(lies))
    monkeypatch.setattr(race, "SOLVERS", (solver_process.Solver("Liar", "json", "json", "", pages=True),))
    with pytest.warns(cv.CalcWarning, match="Liar found an invalid schedule"):
        assert Solvers(ENOUGH).improve(problem, known, 1.0).run is known


# ---------------------------------------------------------------- interrupts
def test_an_interrupt_ends_the_solvers_and_not_the_plan(searched_plan):
    pytest.importorskip("scipy")

    def interrupt(*what: float) -> None:
        raise KeyboardInterrupt

    plan = planned(searched_plan, ENOUGH, progress=interrupt)
    assert ", interrupted, " in plan.solver and plan.solver_seconds < ENOUGH
    assert plan.overhead <= searched_plan.overhead + 1e-12
    check_live(plan)


def test_one_more_while_they_are_ended_leaves_no_process(searched_plan, monkeypatch):
    pytest.importorskip("scipy")
    processes: list[Any] = []
    ended = helper_process._end

    def interrupted(process: Any) -> None:
        processes.append(process)
        if len(processes) == 1:
            raise KeyboardInterrupt
        ended(process)

    def interrupt(*what: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(helper_process, "_end", interrupted)
    plan = planned(searched_plan, ENOUGH, progress=interrupt)
    assert ", interrupted, " in plan.solver and plan.overhead <= searched_plan.overhead + 1e-12
    assert processes and all(one.returncode is not None for one in processes)


def test_what_progress_raises_is_raised_and_no_process_is_left(searched_plan, monkeypatch):
    pytest.importorskip("scipy")
    started: list[Any] = []
    made = solver_process.SolverProcess.__init__
    monkeypatch.setattr(
        solver_process.SolverProcess, "__init__", lambda self, *what: (started.append(self), made(self, *what))[1]
    )

    def wrong(*what: float) -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        planned(searched_plan, ENOUGH, progress=wrong)
    assert started and all(one.process.returncode is not None for one in started)


SCRIPT = """
import calcvm as cv
graph = cv.build_graph(cv.zoo.unet(width=8, size=64), (1, 64, 64), "mse", cv.SGD(0.1))
whole = cv.plan(graph, batch_size=8, workers=1)
plan = cv.plan(graph, batch_size=8, workers=1, memory=int(0.6 * whole.heap_bytes), solver_seconds=200, progress=True)
print(plan.solver, plan.heap_bytes <= 0.6 * whole.heap_bytes)
"""


def test_ctrl_c_of_a_terminal(tmp_path):
    """It reaches the whole group of processes: the solvers do not hear it."""
    pytest.importorskip("scipy")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
    )  # fmt: skip
    with process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert line.startswith("overhead "), line
            os.killpg(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 0, err
    assert ", interrupted, " in out and out.strip().endswith("True")


# ---------------------------------------------------------------- costs
@pytest.mark.parametrize("cost", [float("nan"), -1.0, float("inf")])
def test_costs_are_costs(searched_plan, monkeypatch, cost):
    from calcvm import planner

    monkeypatch.setattr(planner, "seconds", lambda st, batch, machine: cost)
    with pytest.raises(cv.PlanError, match="costs .* seconds: give costs that are finite"):
        cv.plan(graph(), batch_size=8, workers=1, memory=searched_plan.memory_bytes)


def test_statements_that_cost_nothing_are_planned():
    """All schedules cost nothing: none is cheaper than another."""
    pytest.importorskip("scipy")
    given = limited(1)
    steps = [replace(s, cost=0.0) for s in given.steps]
    problem = RecomputationProblem(steps, given.sizes, given.backward, given.limit)
    known = searched(problem)
    answer = Solvers(5).improve(problem, known, 1.0)
    assert answer.run.cost == answer.bound == 0 and not answer.run.excess


@pytest.mark.parametrize("share", [0.6, 0.7, 0.8])
def test_solvers_never_make_a_plan_dearer(share, whole):
    """Not even where packing adds to the schedule that they found."""
    if share != 0.7 and not whole:
        pytest.skip("takes --whole")
    pytest.importorskip("scipy")
    graph = cv.build_graph(cv.zoo.unet(width=8, size=32), (1, 32, 32), "mse", cv.SGD(0.1))
    how = {"batch_size": 4, "workers": 1, "accumulate": False}
    memory = int(share * cv.plan(graph, **how).heap_bytes)
    searched, solved = (cv.plan(graph, memory=memory, solver_seconds=s, **how) for s in (0, 2))
    assert solved.heap_bytes <= memory and solved.overhead <= searched.overhead * (1 + 1e-9)


def test_where_packing_adds_too_much_the_search_s_schedule_stays(monkeypatch):
    """The first schedule of the solvers is taken for one that does not fit when it is packed, and all that follow are dearer."""
    pytest.importorskip("scipy")
    graph = cv.build_graph(cv.zoo.unet(width=8, size=32), (1, 32, 32), "mse", cv.SGD(0.1))
    how = {"batch_size": 4, "workers": 1, "accumulate": False}
    memory = int(0.8 * cv.plan(graph, **how).heap_bytes)
    monkeypatch.setattr(search, "EFFORT", 50_000)  # a search is made for each of the dear ones
    searched = cv.plan(graph, memory=memory, **how)
    improve, required = race.Solvers.improve, Layout.required
    unpacked: list[int] = []  # what packing will add to schedules of the solvers: to the first

    def dear(self, problem, known, whole, others):
        answer = improve(self, problem, known, whole, others)
        limit, problem.limit, problem.followed = problem.limit, int(0.9 * problem.limit), 0  # as if all were so dear
        try:
            return replace(answer, run=problem.run(solve(problem).chosen))
        finally:
            problem.limit = limit
            unpacked.append(0 if met else 300_000)
            met.append(True)

    met: list[bool] = []

    def adds(self, batch, effort, allowed=0):
        return required(self, batch, effort, allowed) + (unpacked.pop() if unpacked else 0)

    monkeypatch.setattr(race.Solvers, "improve", dear)
    with monkeypatch.context() as patch:
        patch.setattr(Layout, "required", adds)
        solved = cv.plan(graph, memory=memory, solver_seconds=1, **how)
    assert solved.heap_bytes <= memory and solved.overhead <= searched.overhead * (1 + 1e-9)

"""Recomputation within a budget: overhead, its lower bound and proof, beside a reimplementation of Checkmate's program.

For a network, batch and budget all solvers get the same statements, bytes, costs and seconds.  Published figures, from
other graphs, costs and machines, are quoted beside.  The measured overhead of a step is also given.
"""

from __future__ import annotations

import resource
import time
from typing import Any

import numpy as np

from bench.checkmate import compared
from bench.harness import Result, say
from bench.memory import network

STEPS = 3  # timed, after one for warm-up
# network, batch, seconds, (basis of the budget, share), published figure
Case = tuple[str, int, float, tuple[str, float], str]
CASES: list[Case] = [
    ("resnet18", 8, 10, ("peak", 0.75), "Checkmate 70 %: +2.3 in 367 s"),
    ("resnet18", 8, 10, ("floor", 0.10), "Checkmate 60 %: +4.1 in 1846 s"),
    ("resnet18", 8, 10, ("peak", 0.50), "Checkmate 50 %: unproved in 3600 s"),
    ("vgg16", 8, 10, ("floor", 0.02), ""),
    ("vgg19", 8, 10, ("floor", 0.02), ""),
    ("unet", 2, 10, ("peak", 0.50), ""),
    ("resnet34", 8, 60, ("floor", 0.10), ""),
    ("resnet50", 8, 60, ("peak", 0.80), "Moccasin: +0.3 in 69 s, FastSA +0.4 in 11 s"),
    ("mobilenet_v2", 8, 30, ("peak", 0.50), ""),
    ("resnet18", 8, 10, ("save all", 0.25), "XEngine: +3.8, Checkmate: +3.6"),
    ("resnet18", 16, 10, ("save all", 0.25), "XEngine: +2.6, Checkmate: +2.4"),
    ("resnet34", 8, 30, ("save all", 0.25), "XEngine: +3.4, Checkmate: +3.2"),
    ("resnet34", 16, 30, ("save all", 0.25), "XEngine: +2.7, Checkmate: +2.6"),
    ("unet", 2, 10, ("save all", 0.25), "XEngine: +9.7, Checkmate: +8.1 (another UNet)"),
    ("unet", 4, 10, ("save all", 0.25), "XEngine: +10.3, Checkmate: +8.2 (another UNet)"),
]
QUICK_CASES: list[Case] = [("unet", 2, 2, ("peak", 0.75), "")]
HEADER = [
    "network", "batch", "budget, bytes", "% of peak", "% of save-all", "searched, %", "overhead, %", "at least, %", "what solvers did",
    "CPU s", "measured, %", "published",
]  # fmt: skip
RIVAL = [
    "network",
    "batch",
    "% of peak",
    "seconds",
    "variables",
    "its overhead, %",
    "at least, %",
    "as planned here, %",
    "ours, %",
]
# gates: network, batch, budget, most points between overhead and bound
GATES = {
    ("resnet18", "floor"): 1.0,
    ("vgg16", "floor"): 1.0,
    ("vgg19", "floor"): 1.0,
    ("unet", "peak"): 1.0,
    ("resnet34", "floor"): 0.5,
}


def problem_of(graph: Any, batch: int, memory: int) -> Any:
    """The statements of the training path as numbers, as `cv.plan` has them if it must recompute."""
    from functools import partial

    from calcvm.lowering import lower
    from calcvm.planner.costs.reckoned import seconds
    from calcvm.planner.layout import lay_out
    from calcvm.planner.lifetimes import Machine
    from calcvm.planner.merge import merge_rows
    from calcvm.planner.order import improve
    from calcvm.planner.recomputation.program import _costed, _problem, _sizes
    from calcvm.planner.workspace import with_least

    machine = Machine(4)
    lowered = lower(graph)[0]
    ordered = improve(with_least(lowered, machine), batch, machine)
    merged, groups = merge_rows(ordered, machine, True)
    fixed = lay_out(merged, groups, machine).fixed(batch)
    own = [st for st in ordered.statements if st.path == "learn"]
    cost = partial(seconds, batch=batch, machine=machine)
    return _costed(_problem(own, _sizes(ordered, batch, machine), machine, batch, memory - fixed)[0], own, cost), fixed


def step_seconds(graph: Any, plan: Any, channels: int, size: int) -> float:
    """The least time of a few steps."""
    import calcvm as cv

    program = cv.compile(graph, plan=plan)
    model = cv.CalcHeap(plan.heap_bytes).create(program, seed=0)
    shapes = ([s.at(plan.batch_size) for s in graph.variables[v].shape] for v in ("input", "target"))
    x, y = (np.zeros(shape, np.float32) for shape in shapes)
    times = []
    for _ in range(STEPS + 1):
        start = time.perf_counter()
        model.step(x, y)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def budget(share: tuple[str, float], whole: Any, floor: int) -> int:
    """Bytes: a share of the peak or of save-all, or the floor plus a share of the peak."""
    of, part = share
    if of == "save all":
        return int(part * whole.save_all_bytes)
    return int(part * whole.heap_bytes) + (floor if of == "floor" else 0)


def case(result: Result, spec: Case, measure: bool, **reduced: int) -> tuple[list[str], list[str] | None]:
    """Rows of the two tables."""
    import calcvm as cv

    name, batch, seconds, share, published = spec
    net, channels, size, loss = network(name, **reduced)
    graph = cv.build_graph(net, (channels, size, size), loss, cv.SGD(0.01))
    options: dict[str, Any] = dict(batch_size=batch, workers=1)
    whole = cv.plan(graph, **options)
    problem, fixed = problem_of(graph, batch, whole.heap_bytes)
    memory = budget(share, whole, fixed + problem.floor[0])
    parts = [f"{100 * memory / total:.1f}" for total in (whole.heap_bytes, whole.save_all_bytes)]
    head = [name, str(batch), f"{memory:,}", *parts]
    try:
        searched = cv.plan(graph, memory=memory, **options)
    except cv.PlanError as error:
        return [*head, "-", "-", "-", f"needs {error.needed:,} bytes", "-", "-", published], None
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    plan = cv.plan(graph, memory=memory, solver_seconds=seconds, **options)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    bound = plan.lower_bound or 0.0
    took = "-"
    if measure:
        free, within = (step_seconds(graph, p, channels, size) for p in (whole, plan))
        took = f"{100 * (within / free - 1):.1f}"
    numbers = [f"{100 * x:.2f}" for x in (searched.overhead, plan.overhead, bound)]
    most = GATES.get((name, share[0]))
    if most is not None and not reduced:
        what = f"{name}, batch {batch}, {parts[0]} % of peak: overhead above its bound, {plan.solver_seconds:.0f} s"
        result.target("G1", what, 100 * (plan.overhead - bound), most, "points", at_most=True)
    if (name, share) == ("resnet50", ("peak", 0.80)):
        what = f"resnet50, batch {batch}, 80 % of peak: overhead, {plan.solver_seconds:.0f} s"
        result.target("G2", what, 100 * plan.overhead, 0.3, "%", at_most=True)
    row = [*head, *numbers, plan.solver, f"{cpu:.0f}", took, published]
    say(" | ".join(row))  # because the table is printed much later
    if share[0] == "save all":  # XEngine's budgets
        return row, None
    problem = problem_of(graph, batch, memory)[0]
    cost = sum(step.cost for step in problem.steps)
    cells, theirs = compared(problem, cost, seconds)
    if theirs is not None and theirs < 100 * plan.overhead * (1 - 1e-6):
        result.fail(
            f"{name}, batch {batch}: Checkmate's program has {theirs:.3f} %, {100 * plan.overhead:.3f} % are planned"
        )
    return (
        row,
        [name, str(batch), parts[0], f"{seconds:g}", *cells, numbers[1]],
    )


def main(quick: bool = False) -> bool:
    """Run the workload; True if Checkmate's program is never better."""
    result = Result("planner", "Recomputation within a budget", quick)
    reduced = {"width": 4, "size": 32} if quick else {}
    found = [case(result, spec, not quick, **reduced) for spec in (QUICK_CASES if quick else CASES)]
    result.table("Planned", HEADER, [row for row, _ in found])
    result.table("Checkmate's program on the same costs", RIVAL, [row for _, row in found if row is not None])
    result.note(
        "% of peak: of what a step needs without recomputation, in-place work included; save-all: every value by itself."
    )
    result.note("floor and 2 or 10 %: what the largest statement alone needs, and so much of the peak more.")
    return result.save()

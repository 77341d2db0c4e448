"""How much memory each part of the planner saves in a training step of a MobileNetV2 on one image, starting from all values apart.

*Save all*: every value has separate memory, gradients until the end of the step.  *Lifetimes*: values that do not live at one
time share memory, in the order of lowering.  *In place*: a result overwrites a dying operand if the table allows it.  *Order*:
statements in the planner's order, with each large parameter updated as soon as its gradient is final.  *Least scratch*: rows
get no more than they need.  *Recomputed*: values are recomputed, a tenth above what a single statement needs.  *Pages*: the
least budget, to 2 %, that is met with a file.  All are SGD's float32 bytes as planned, for heaps of one worker.  Seconds are
those of a step, the least of several.

PyTorch's and TinyEngine's figures are as published (Lin et al. 2022, On-device training under 256KB memory: 303 MB and 5.7 MB in
float32, at batch 1).  Their network is narrower (width 0.35) with images of 128, and TinyEngine updates a part of the parameters.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from bench.harness import Result
from bench.memory import LAYOUTS, RATE, measured, network

CASES: list[tuple[str, dict[str, int]]] = [
    ("mobilenet_v2, width 1, 224 x 224", {}),
    ("mobilenet_v2, width 0.34, 128 x 128", {"width": 11, "size": 128}),
]
QUICK_CASES = [("mobilenet_v2, width 0.25, 32 x 32", {"width": 8, "size": 32})]
HEADER = ["a training step of one image", "bytes", "of save all", "ms"]
STEPS = 5
NEAR = 1.02  # relative accuracy of the least budget


def stages(reduced: Mapping[str, int]) -> tuple[Any, dict[str, tuple[int, Any]]]:
    """The graph; and by stage its bytes, and a plan if `cv.plan` has one for it."""
    import calcvm as cv

    net, channels, size, loss = network("mobilenet_v2", **reduced)
    graph = cv.build_graph(net, (channels, size, size), loss, cv.SGD(RATE))
    how: dict[str, Any] = {"batch_size": 1, "workers": 1}
    late = cv.plan(graph, accumulate=True, **how)
    out: dict[str, tuple[int, Any]] = {"save all": (late.save_all_bytes, None)}
    out["lifetimes"] = lowered_bytes(graph, in_place=False), None
    out["in place"] = lowered_bytes(graph, in_place=True), None
    ordered = cv.plan(graph, **how)
    least = cv.plan(graph, objective="memory", **how)
    out["order, early updates"], out["least scratch"] = (ordered.heap_bytes, ordered), (least.heap_bytes, least)
    try:
        floor: int = cv.plan(graph, memory=1, **how).heap_bytes
    except cv.PlanError as refused:
        floor = refused.needed or 0
    budget = int(1.1 * floor)
    while "recomputed" not in out:
        try:
            again = cv.plan(graph, memory=budget, **how)
            out["recomputed"] = again.heap_bytes, again
        except cv.PlanError as refused:
            budget = int(1.01 * (refused.needed or budget))
    low, high, best = 0, again.heap_bytes, again
    while high > NEAR * low:
        middle = (low + high) // 2
        try:
            best = cv.plan(graph, memory=middle, page_bytes="4 GiB", **how)
            high = best.heap_bytes
        except cv.PlanError as refused:
            low = middle
            if (refused.needed or 0) >= high:
                break
    out[f"pages, {best.page_bytes / 1e6:.1f} MB in a file"] = best.heap_bytes, best
    return graph, out


def lowered_bytes(graph: Any, *, in_place: bool) -> int:
    """Bytes of the heap in the order of lowering, with updates at the end, packed."""
    from calcvm.lowering import lower
    from calcvm.planner import EFFORT
    from calcvm.planner.layout import lay_out
    from calcvm.planner.lifetimes import Machine
    from calcvm.planner.merge import merge_rows

    lowered, _ = lower(graph, workers=1, accumulate=True)
    if not in_place:
        statements = tuple(replace(st, spec=replace(st.spec, in_place=())) for st in lowered.statements)
        lowered = replace(lowered, statements=statements)
    machine = Machine(4)
    merged, groups = merge_rows(lowered, machine)
    return lay_out(merged, groups, machine).required(1, EFFORT)


def seconds(plan: Any, graph: Any) -> float:
    """Seconds of a step, the least of several."""
    import calcvm as cv

    x = np.zeros([n.at(1) for n in graph.variables["input"].shape], np.float32)
    data = x, np.zeros(1, np.int64)
    model = cv.CalcHeap(plan.heap_bytes).create(cv.compile(graph, plan=plan), seed=0)
    best = float("inf")
    for _ in range(STEPS):
        start = time.perf_counter()
        model.step(*data)
        best = min(best, time.perf_counter() - start)
    return best


def main(quick: bool = False) -> bool:
    """Run the workload."""
    result = Result("waterfall", "The memory of a training step, part by part", quick)
    for name, reduced in QUICK_CASES if quick else CASES:
        graph, found = stages(reduced)
        whole = found["save all"][0]
        rows = []
        for what, (nbytes, plan) in found.items():
            took = "" if plan is None else f"{1e3 * seconds(plan, graph):.1f}"
            rows.append([what, f"{nbytes:,}", f"{nbytes / whole:.1%}", took])
        if not quick:
            peak = min(
                measured("torchs", name="mobilenet_v2", batch=1, layout=layout, **reduced)["peak"] for layout in LAYOUTS
            )
            rows.append(["torch, peak of the process", f"{peak:,}", f"{peak / whole:.1%}", ""])
        result.table(name, HEADER, rows)
    result.note(
        "As published (width 0.35, 128 x 128, batch 1): PyTorch 303 MB, TinyEngine 5.7 MB in float32, which updates a part."
    )
    return result.save()

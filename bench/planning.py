"""The time of planning: seconds of `cv.plan`, and of `cv.compile` with its plan, by the depth of a chain.

Each measurement is a fresh process, and the best of a few counts.  Kernels are in the cache, so none is compiled.  A chain
is layers of 8 units, each followed by tanh.  Within a budget it recomputes values.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from typing import Any

from bench.harness import Process, Result, answers, number

LAYERS = (100, 200, 400, 800, 1600)
IN_BUDGET = (50, 100, 200, 300)
BUDGET = 0.8  # share of its memory without a budget
REPEATS = 3
# seconds of both at commit e73e458, by `planned` with its sources: the better of two runs (one for 1600, and for 50 and 100 in a
# budget), which differed by up to 2.8 times although the machine was idle
BEFORE = {
    (100, 1.0): 0.447, (200, 1.0): 1.16, (400, 1.0): 3.68, (800, 1.0): 12.8, (1600, 1.0): 65.8,
    (50, BUDGET): 1.82, (100, BUDGET): 3.18, (200, BUDGET): 6.17, (300, BUDGET): 16.8,
}  # fmt: skip
GATES = {(400, 1.0): 1.0, (1600, 1.0): 5.0, (300, BUDGET): 3.0}  # layers, memory: seconds of both


def planned(layers: int, share: float) -> dict[str, float]:
    """Seconds of a plan and of the program."""
    import calcvm as cv
    from calcvm import nn

    chain = nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(8), nn.Tanh())))
    graph = cv.build_graph(chain, (8,), "mse", cv.SGD(0.01))
    options: dict[str, Any] = {"batch_size": 16, "workers": 1}
    memory = None if share == 1 else int(share * cv.plan(graph, **options).heap_bytes)
    begin = time.perf_counter()
    plan = cv.plan(graph, memory=memory, **options)
    between = time.perf_counter()
    cv.compile(graph, plan=plan)
    return {"rows": len(plan.statements), "plan": between - begin, "compile": time.perf_counter() - between}


def main(quick: bool = False) -> bool:
    """Run the workload; True if every check held."""
    result = Result("planning", "Planning", quick)
    for share, depths in ((1.0, (10, 20) if quick else LAYERS), (BUDGET, (10, 20) if quick else IN_BUDGET)):
        rows, before = [], {}
        for layers in depths:
            best: dict[str, float] = {}
            for _ in range(1 if quick else REPEATS):
                with closing(Process("-m", "bench.planning", asked={"layers": layers, "share": share})) as process:
                    found = process.ready
                best = {name: min(value, best.get(name, value)) for name, value in found.items()}
            before[layers] = both = best["plan"] + best["compile"]
            half = before.get(layers // 2)
            known = BEFORE.get((layers, share))
            rows.append(
                [f"{layers:,}", f"{best['rows']:,}", number(best["plan"]), number(best["compile"])]
                + ["" if half is None else f"{number(both / half)} x", "" if known is None else number(known)]
            )
            if (layers, share) in GATES:
                what = f"{layers} layers" + ("" if share == 1 else f" in {100 * share:g} % of their memory")
                result.target("P17", f"{what}: planned and compiled", both, GATES[layers, share], "s", at_most=True)
        what = "without a budget" if share == 1 else f"in {100 * share:g} % of the memory"
        result.table(
            f"Seconds, {what}",
            ["layers", "rows", "plan", "compile", "both, over half as many", "both, at e73e458"],
            rows,
        )
    return result.save()


if __name__ == "__main__":
    answer = answers(None)
    for line in sys.stdin:
        answer(**planned(**json.loads(line)))

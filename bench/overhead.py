"""The overhead of recomputation: predicted by plans from reckoned and from measured costs, and measured for whole steps.

Plans of a network take turns, each in a separate heap.  There is one without a budget, one with the least scratch (which
all plans in a budget have), and plans in budgets, chosen by reckoned and by measured costs.  A budget is a share of the
first plan's heap, or a tenth above what a single statement needs.  *Told* (predicted) and *taken* (measured) are relative to
the plan of least scratch, which does the same work otherwise.  *In all* is relative to the plan without a budget, so it
includes the cost of less scratch.  One worker's time is the CPU time of its thread, in which nothing else runs; a team's is
wall time.  Minima are taken over the turns, which are spread over rounds of all networks: other load on the machine slows
down those plans most that depend on the last-level cache, and for longer than a network's turns.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

from bench.harness import REPEATS, Result, fresh, n_cores
from bench.memory import network, within

RATE = 1e-3
SHARES = (0.75, 0.5)
# network, batch, reductions
CASES: list[tuple[str, int, dict[str, int]]] = [
    ("resnet18", 8, {}),
    ("unet", 2, {}),
    ("mobilenet_v2", 8, {}),
    ("lenet", 64, {}),
    ("vgg11", 8, {"width": 16, "size": 64}),
]
QUICK_CASES = [("resnet18", 4, {"width": 4, "size": 32})]
TURN_SECONDS = 0.1  # of steps, per plan and turn
TURNS = REPEATS  # per round
ROUNDS = 3  # minima of 7 turns of ResNet-18's steps by two workers differ by up to 4 % from those of the next 7
LONG = 1.0  # steps of more seconds get fewer turns
APART_TARGET = 2.0  # points, between told and taken


# ---------------------------------------------------------------- in a separate process
def plans(graph: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Plans by description.  A budget that needs no recomputation has none."""
    import calcvm as cv

    found = {
        "free": cv.plan(graph, costs="measured", **options),
        "least": cv.plan(graph, objective="memory", costs="measured", **options),
    }
    for share in SHARES:
        for costs in ("reckoned", "measured"):
            plan = within(graph, share, costs=costs, **options)
            if plan.recomputed:
                found[f"{share} {costs}"] = plan
    return found


def timed(model: Any, x: np.ndarray, y: np.ndarray, steps: int, clock: Any) -> float:
    start = clock()
    for _ in range(steps):
        model.step(x, y)
    return (clock() - start) / steps


def measured(name: str, batch: int, workers: int, turns: int, turn_seconds: float, reduced: dict[str, int]) -> Any:
    """By plan its bytes, its predictions, and the seconds of its steps."""
    import calcvm as cv

    net, channels, size, loss = network(name, **reduced)
    graph = cv.build_graph(net, (channels, size, size), loss, cv.SGD(RATE))
    found = plans(graph, {"batch_size": batch, "workers": workers})
    rng = np.random.default_rng(0)
    x, y = ([s.at(batch) for s in graph.variables[v].shape] for v in ("input", "target"))
    images = rng.standard_normal(x).astype(np.float32)
    target = rng.standard_normal(y).astype(np.float32) if loss == "mse" else rng.integers(0, 10, batch)
    clock = time.thread_time if workers == 1 else time.perf_counter
    programs = {which: cv.compile(graph, plan=plan) for which, plan in found.items()}
    models = {which: cv.CalcHeap(p.heap_bytes).create(p, seed=0) for which, p in programs.items()}
    losses = {which: [model.step(images, target) for _ in range(2)] for which, model in models.items()}
    once = timed(models["free"], images, target, 1, clock)
    steps, turns = max(1, int(turn_seconds / once)), turns if once < LONG else max(1, turns // 5)
    laps: dict[str, list[float]] = {which: [] for which in models}
    for _ in range(turns):
        for which, model in models.items():
            laps[which].append(timed(model, images, target, steps, clock))
    return {
        which: {
            "bytes": plan.heap_bytes,
            "again": len(plan.recomputed),
            "overhead": plan.seconds / plan.seconds_without - 1 if plan.seconds_without else plan.overhead,
            "told": plan.seconds,
            "seconds": min(laps[which]),
            "same": losses[which] == losses["free"],
        }
        for which, plan in found.items()
    }


# ---------------------------------------------------------------- the tables
def together(least: dict[str, Any], found: dict[str, Any]) -> None:
    """Take the least seconds of two rounds, if the plans are equal.  A search that is limited by time may find another one."""
    for which, plan in least.items():
        again = found.get(which, {})
        plan["same"] &= again.get("same", True)
        if all(again.get(what) == plan[what] for what in ("bytes", "again", "told")):
            plan["seconds"] = min(plan["seconds"], again["seconds"])


def rows(
    result: Result, name: str, batch: int, workers: int, found: dict[str, Any], apart: list[float]
) -> list[list[str]]:
    """Rows of the table for a network and a team; the differences of told and taken by measured costs go to ``apart``."""
    free, least, out = found["free"], found["least"], []
    for which, plan in found.items():
        if not plan["same"]:
            result.fail(f"{name}: the losses of the plan {which!r} are not those of the plan without a budget")
        if which in ("free", "least"):
            continue
        costs = which.split()[1]
        taken = plan["seconds"] / least["seconds"] - 1
        if costs == "measured":
            apart.append(100 * abs(taken - plan["overhead"]))
        in_all = plan["told"] and plan["told"] / free["told"] - 1
        out.append(
            [
                f"{name}, batch {batch}", str(workers), f"{plan['bytes'] / free['bytes']:.0%}", costs, str(plan["again"]),
                percent(plan["overhead"]), percent(taken), f"{100 * (plan['overhead'] - taken):+.1f}",
                percent(in_all), percent(plan["seconds"] / free["seconds"] - 1),
            ]
        )  # fmt: skip
    return out


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:+.1f} %"


def steps_of(name: str, batch: int, workers: int, found: dict[str, Any]) -> list[str]:
    """Whole steps, without a budget and with the least scratch, as predicted from measured costs."""
    cells = [f"{1e3 * found[which][what]:,.4g}" for which in ("free", "least") for what in ("told", "seconds")]
    return [f"{name}, batch {batch}", str(workers), *cells]


def main(quick: bool = False) -> bool:
    """Run the workload; True if losses are the same in any memory."""
    result = Result("overhead", "Recomputation", quick)
    table, steps, apart, without = list[list[str]](), list[list[str]](), list[float](), list[str]()
    how = {"turns": 1, "turn_seconds": 0.01} if quick else {"turns": TURNS, "turn_seconds": TURN_SECONDS}
    least: dict[tuple[str, int, int], Any] = {}
    for _ in range(1 if quick else ROUNDS):
        for name, batch, reduced in QUICK_CASES if quick else CASES:
            for workers in (1,) if quick else sorted({1, n_cores()}):
                spec = {"name": name, "batch": batch, "workers": workers, "reduced": reduced, **how}
                found = fresh("-m", "bench.overhead", json.dumps(spec))
                together(least.setdefault((name, batch, workers), found), found)
    for (name, batch, workers), found in least.items():
        made = rows(result, name, batch, workers, found, apart)
        table += made
        steps.append(steps_of(name, batch, workers, found))
        if not made:
            without.append(name)
    header = [
        "network",
        "workers",
        "memory",
        "costs",
        "rows again",
        "told",
        "taken",
        "apart",
        "told in all",
        "taken in all",
    ]
    result.table("Work above that of a plan of least scratch, and in all", header, table)
    header = ["ms of a step", "workers", "told", "taken", "told, least scratch", "taken, least scratch"]
    result.table("Whole steps by measured costs", header, steps)
    for name in dict.fromkeys(without):
        result.note(f"{name}: one statement needs nearly all of the memory, so nothing can be recomputed for less")
    result.target(
        "R1", "overhead told from measured costs, worst case", max(apart), APART_TARGET, "points", at_most=True
    )
    return result.save()


if __name__ == "__main__":
    print(json.dumps(measured(**json.loads(sys.argv[1]))))

"""P12: ten thousand small models on a GPU, each with its own data and initial weights, in microseconds per model step.

First all of one shape, then of 40 shapes.  No time is printed for a contestant of which a model's mean loss over the
first epoch differs.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from bench.fleet import BATCH, BATCHES, SHAPES, SIZES
from bench.gpu.limits import Limits, result, step_cost
from bench.gpu.many import NAMES, graph_of
from bench.gpu.peers import settings
from bench.harness import QUICK_REPEATS, Process, Result, interleave, number, ratio, turn_ratio

MODELS, QUICK_MODELS, QUICK_SHAPES = 10_000, 80, SHAPES[::10]
REPEATS = 5
TOLERANCE = 1e-4  # relative, between each model's mean losses
LEAST = {"jax_vmap": 10.0, "jax_vmap_chunks": 10.0}  # ratio of a peer's time to ours
FLOP_TARGET = 1.3  # time over that of each architecture alone
ONE_SHAPE = ("ours", "jax_vmap", "jax_vmap_chunks", "torch_stacked_graph", "torch_vmap_graph")
MANY_SHAPES = ("ours", "ours_apart", "jax_vmap_plain", "torch_stacked_graph")


def job(sizes: list[int], models: int) -> dict[str, Any]:
    return {"sizes": sizes, "models": models, "batch": BATCH, "batches": BATCHES}


def limit_of(limits: Limits, tasks: Sequence[dict[str, Any]]) -> float:
    """Seconds that the GPU's rates allow a model step, on average over the tasks' models."""
    cv: Any = import_module("calcvm")
    total = [0.0, 0.0]
    for task in tasks:
        cost = step_cost(cv.plan(graph_of(task["sizes"]), batch_size=task["batch"], workers=1))
        total = [t + c * task["models"] for t, c in zip(total, cost)]
    return limits.seconds(*total) / sum(task["models"] for task in tasks)


def start_all(
    result: Result, who: Sequence[str], tasks: list[dict[str, Any]], what: str, device: str
) -> dict[str, Process]:
    """The contestants that start and whose losses are ours (the first one's); what keeps others from it is noted."""
    running: dict[str, Process] = {}
    for name in who:
        try:
            spec = {"who": name, "tasks": tasks, "device": device}
            process = Process("-m", "bench.gpu.many", json.dumps(spec), threads=None, **settings(name))
        except RuntimeError as error:
            text = f"{NAMES[name]} left out of {what}: {error}"
            result.fail(text) if name.startswith("ours") else result.note(text)
            continue
        reference = next(iter(running.values()), process).ready["losses"]
        worst = float(np.abs(np.array(process.ready["losses"]) / reference - 1).max())
        if not worst <= TOLERANCE:
            result.fail(f"{NAMES[name]} DISAGREES in {what}: a model's mean loss differs by {worst:.1e}")
            process.close()
            continue
        running[name] = process
    return running


def time_models(
    result: Result, limits: Limits, who: Sequence[str], tasks: list[dict[str, Any]], what: str, quick: bool,
    device: str = "cuda",
) -> dict[str, list[float]]:  # fmt: skip
    """Time contestants on the same models, print their table; seconds per model step of every turn."""
    running = start_all(result, who, tasks, what, device)
    try:
        steps = {name: p.ready["models"] * BATCHES for name, p in running.items()}
        runs = {
            name: lambda n=name, p=process: p.ask(epochs=1)["seconds"] / steps[n] for name, process in running.items()
        }
        times = interleave(runs, QUICK_REPEATS if quick else REPEATS)
        limit = limit_of(limits, tasks)
        rows = []
        for name, t in times.items():
            ready = running[name].ready
            rows.append(
                [
                    NAMES[name] + (f" ({ready['note']})" if ready["note"] else ""),
                    number(min(t) * 1e6),
                    number(statistics.median(t) * 1e6),
                    number(ratio(t, times["ours"])) if "ours" in times else "-",
                    number(turn_ratio(t, times["ours"])) if "ours" in times else "-",
                    f"{100 * limit / min(t):.1f} %",
                    number(ready["setup"] + ready["first"]),
                    f"{np.mean(ready['losses']):.7g}",
                ]
            )
        header = ["us per model step", "min", "median", "times ours", "by turns", "of limit", "setup s", "mean loss"]
        result.table(what, header, rows)
        result.note(f"The limit of {what} is {number(limit * 1e6)} us a model step.")
        return times
    finally:
        for process in running.values():
            process.close()


def main(limits: Limits, quick: bool = False, who: Sequence[str] = ()) -> bool:
    """Run the workload with the contestants ``who`` (default all); True when all agree."""
    made = result(limits, "fleet", "On a GPU: many models", quick)
    models, shapes = (QUICK_MODELS, QUICK_SHAPES) if quick else (MODELS, SHAPES)

    def chosen(names: Sequence[str]) -> list[str]:
        return [name for name in names if not who or name in who or name == "ours"]

    what = f"{models:,} models of {'-'.join(map(str, SIZES))}, batch {BATCH}, {BATCHES} steps"
    times = time_models(made, limits, chosen(ONE_SHAPE), [job(SIZES, models)], what, quick)
    for peer, least in LEAST.items():
        value = ratio(times[peer], times["ours"]) if {peer, "ours"} <= times.keys() else None
        made.target("P12", f"GPU, {what}, against {NAMES[peer]}", value, least, "x")
    mixed = [job(sizes, models // len(shapes)) for sizes in shapes]
    what = f"{models // len(shapes) * len(shapes):,} models of {len(shapes)} architectures"
    times = time_models(made, limits, chosen(MANY_SHAPES), mixed, what, quick)
    value = ratio(times["ours"], times["ours_apart"]) if {"ours", "ours_apart"} <= times.keys() else None
    made.target("P12", f"GPU, {what}: time over that of each alone", value, FLOP_TARGET, "x", at_most=True)
    return made.save()

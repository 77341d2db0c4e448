"""The largest batch in a budget: what plans find, whether it trains, and PyTorch's in as much memory.

*Speed* and *memory* are the objectives of `cv.plan(graph, memory=...)`: scratch for fast kernels, or the least scratch.
Each batch found runs one step, whose loss must be finite.  Plans for one and two samples more than "memory" must fail.
*Again* is the largest batch that fits the middle budget with recomputation, found by bisection between a batch that the
search fits and one that it does not.  *Grown* is the most by which the process grows while a model with the batch of
"memory" is created and trains a step.

PyTorch's batch is the largest, by doubling and bisection, with which creating a model and one step of SGD grow a process by
no more than the budget (`VmHWM`, reset before), in the better of its two layouts.  Both processes have trained a small
batch before, so loading and starting libraries does not count.  Both return freed memory and use one thread.
"""

from __future__ import annotations

import gc
import json
import math
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

from bench.harness import Result, fresh, memory_bytes
from bench.memory import GIVES_BACK, LAYOUTS, RATE, forget_peak, network, torch_training

MB = 1_000_000
# network, reductions, budgets in MB
CASES: list[tuple[str, dict[str, int], list[int]]] = [
    ("mlp", {}, [1, 4, 16, 64, 256]),
    ("lenet", {}, [4, 16, 64, 128, 256]),
    ("resnet18", {}, [150, 200, 300, 400, 600]),
    ("unet", {"width": 16, "size": 128}, [40, 80, 120, 200, 400]),
    ("mobilenet_v2", {}, [100, 200, 300, 450, 600]),
]
QUICK_CASES = [("mlp", {}, [1, 2, 3]), ("resnet18", {"width": 4, "size": 32}, [4, 6, 8])]
LARGEST = 1 << 20  # most samples tried
WARM = 2  # samples of the warm-up step


def largest(fits: Callable[[int], bool], low: int = 0) -> int:
    """The largest batch that fits, starting from ``low``, which does (0: none does)."""
    good, bad = low, max(1, 2 * low)
    while bad <= LARGEST and fits(bad):
        good, bad = bad, 2 * bad
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


# ---------------------------------------------------------------- in separate processes
def ours(name: str, budgets: list[int], reduced: dict[str, int]) -> list[dict[str, Any]]:
    """For each budget the batches found, the losses of their steps, which batches fail, and the growth of the process."""
    import calcvm as cv

    net, channels, size, loss = network(name, **reduced)
    shape = (784,) if name == "mlp" else (channels, size, size)
    graph = cv.build_graph(net, shape, loss, cv.SGD(RATE))
    how: dict[str, Any] = {"workers": 1}

    def step(plan: Any) -> tuple[float, int]:
        """The loss of a step, and the growth of the process."""
        x, y = ([s.at(plan.batch_size) for s in graph.variables[v].shape] for v in ("input", "target"))
        data = np.random.default_rng(0).standard_normal(x, np.float32), np.zeros(y, np.float32)
        program = cv.compile(graph, plan=plan)
        gc.collect()  # the previous model
        before = memory_bytes("VmRSS")
        forget_peak()
        value = cv.CalcHeap(plan.heap_bytes).create(program, seed=0).step(*data)
        return math.nan if value is None else value, memory_bytes("VmHWM") - before

    def fits(batch: int, budget: int, **options: Any) -> bool:
        try:
            cv.plan(graph, batch_size=batch, memory=budget, **options, **how)
        except cv.CalcError:
            return False
        return True

    step(cv.plan(graph, batch_size=WARM, **how))
    answers = []
    for k, budget in enumerate(budgets):
        found: dict[str, Any] = {"losses": []}
        for objective in ("speed", "memory"):
            plan = cv.plan(graph, memory=budget, objective=objective, **how)
            found[objective] = plan.batch_size
            value, found["grown"] = step(plan)
            found["losses"].append(value)
        least = {"objective": "memory", "recompute": False}
        found["refused"] = [not fits(found["memory"] + more, budget, **least) for more in (1, 2)]
        if k == len(budgets) // 2 and name != "mlp":
            found["again"] = largest(partial(fits, budget=budget), found["memory"])
            plan = cv.plan(graph, batch_size=found["again"], memory=budget, **how)
            found["overhead"] = plan.overhead
            found["losses"].append(step(plan)[0])
        answers.append(found)
    return answers


def torchs(name: str, budgets: list[int], reduced: dict[str, int], layout: str) -> list[int]:
    """For each budget the largest batch, in one of PyTorch's layouts."""
    import torch

    torch.set_num_threads(1)
    net, channels, size, loss = network(name, **reduced)
    shape = (784,) if name == "mlp" else (channels, size, size)

    @cache
    def grown(batch: int) -> int:
        gc.collect()
        before = memory_bytes("VmRSS")
        forget_peak()
        torch_training(net, (batch, *shape), loss, layout, steps=1)
        return memory_bytes("VmHWM") - before

    grown(WARM)
    grown.cache_clear()
    return [largest(partial(lambda budget, batch: grown(batch) <= budget, budget)) for budget in budgets]


def best_of_torch(result: Result, name: str, spec: dict[str, Any]) -> list[int | None]:
    """For each budget the larger batch of PyTorch's layouts (None: both failed)."""
    found = []
    for layout in LAYOUTS[:1] if name == "mlp" else LAYOUTS:
        how = json.dumps({**spec, "layout": layout})
        try:
            found.append(fresh("-m", "bench.batches", "torchs", how, threads=None, **GIVES_BACK))
        except RuntimeError as error:
            result.note(f"torch, {layout}, left out of {name}: {error}")
    return [max(batches) for batches in zip(*found, strict=True)] if found else [None] * len(spec["budgets"])


# ---------------------------------------------------------------- the table
def main(quick: bool = False) -> bool:
    """Run the workload; True if all batches found train, and larger ones fail."""
    result = Result("batches", "The largest batch of a budget", quick)
    table = []
    for name, reduced, megabytes in QUICK_CASES if quick else CASES:
        spec = {"name": name, "budgets": [MB * m for m in megabytes], "reduced": reduced}
        found = fresh("-m", "bench.batches", "ours", json.dumps(spec), threads=None, **GIVES_BACK)
        theirs = best_of_torch(result, name, spec)
        for budget, of_ours, of_torch in zip(megabytes, found, theirs, strict=True):
            if not all(map(math.isfinite, of_ours["losses"])):
                result.fail(f"{name} in {budget} MB: losses {of_ours['losses']}")
            if not all(of_ours["refused"]):
                result.fail(f"{name} in {budget} MB: more than {of_ours['memory']} samples are planned too")
            again = f"{of_ours['again']:,} ({of_ours['overhead']:.1%})" if "again" in of_ours else ""
            ratio = f"{of_ours['memory'] / of_torch:.2f}" if of_torch else "-"
            which = "-" if of_torch is None else f"{of_torch:,}" if of_torch else "none"
            table.append(
                [name, str(budget), f"{of_ours['speed']:,}", f"{of_ours['memory']:,}", again, f"{of_ours['grown'] / MB:.1f}", which, ratio]
            )  # fmt: skip
    header = ["network", "MB", "speed", "memory", "again (work)", "grown, MB", "torch", "memory over torch"]
    result.table("Samples in a step", header, table)
    return result.save()


if __name__ == "__main__":
    print(json.dumps((ours if sys.argv[1] == "ours" else torchs)(**json.loads(sys.argv[2]))))

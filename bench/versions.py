"""This tree beside another version of itself: ``python -m bench.versions TREE [--part steps,calls,products,fleet,networks]``.

Both run the same script in separate processes, by turns.  The other tree also runs as a third contestant, and the
difference of its two results is the noise of the machine.  A process counts by its fastest turn, a tree by the mean of its
processes.  Only the public API is used, so versions can differ inside.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from bench.harness import ROOT, Process, answers, format_table, geomean, interleave, n_cores, number, say, turn_ratio

PROCESSES, TURNS = (
    6,
    5,
)  # each process places its pages in memory differently, which affects steps that live in the cache
TURN_SECONDS = 0.1
TINY, DIGITS = [4, 16, 3], [784, 64, 64, 10]
SHAPES = [(1, 16, 4), (32, 16, 4), (1, 64, 784), (32, 64, 784), (16, 64, 64), (784, 64, 32), (129, 127, 131),
          (256, 64, 784), (1, 1000, 512), (31, 33, 37), (512, 512, 512), (10000, 64, 784)]  # fmt: skip
PARTS = ("steps", "calls", "products", "fleet", "networks")

Case = Callable[[int], object]  # runs the case a number of times


# ---------------------------------------------------------------- in a process of one version
def model(sizes: list[int], batch: int, workers: int) -> Any:
    import calcvm as cv

    net: Any = cv.nn.Linear(sizes[1])
    for width in sizes[2:]:
        net = net >> cv.nn.Sigmoid() >> cv.nn.Linear(width)
    made = cv.Model(net, input_shape=(sizes[0],), optimizer=cv.Adam(1e-3), batch_size=batch, workers=workers)
    rng = np.random.default_rng(0)
    x, y = rng.random((batch, sizes[0]), np.float32), rng.integers(0, sizes[-1], batch)
    made.step(x, y)
    return made, x, y


def steps() -> dict[str, Case]:
    """P1, P2, P3: steps on data in the heap."""
    cases = {}
    for sizes, batches in ((TINY, (1, 32)), (DIGITS, (1, 32, 256, 10_000))):
        for batch in batches:
            for workers in sorted({1, n_cores()}):
                made, _, _ = model(sizes, batch, workers)
                cases[f"step {'-'.join(map(str, sizes))} batch {batch}, {workers} worker(s)"] = made.run_steps
    return cases


def repeat(call: Callable[[], object], n: int) -> None:
    for _ in range(n):
        call()


def calls() -> dict[str, Case]:
    """The time of a call from Python: one sample, one worker."""
    cases: dict[str, Case] = {}
    for sizes in (TINY, DIGITS):
        for call in ("run_steps(1)", "step(x, y)", "predict(x)"):
            made, x, y = model(sizes, 1, 1)  # a prediction overwrites data in the heap
            method, given = call.split("(")
            arguments = {"1)": (1,), "x, y)": (x, y), "x)": (x,)}[given]
            cases[f"call {call} {'-'.join(map(str, sizes))}"] = partial(
                repeat, partial(getattr(made, method), *arguments)
            )
    return cases


def products() -> dict[str, Case]:
    """P4: matrix products M, N, K."""
    import calcvm as cv

    cases: dict[str, Case] = {}
    for m, n, k in SHAPES:
        graph = cv.CalcGraph()
        a, b = graph.placeholder("a", (None, k)), graph.parameter("b", (k, n))
        with graph.path("p"):
            cv.matmul(a, b)
        program = cv.compile(graph, batch_size=m, workers=1)
        heap = cv.CalcHeap(program.heap_bytes)
        made = getattr(heap, "create" if hasattr(heap, "create") else "load")(
            program, seed=0
        )  # before 0.2.0 it was load
        made["a"] = np.random.default_rng(0).random((m, k), np.float32)
        cases[f"product {m}x{n}x{k}"] = partial(made.run_steps, path="p")
    return cases


def fleet() -> dict[str, Case]:
    """P9: epochs of 300 small models of three architectures."""
    import calcvm as cv

    rng = np.random.default_rng(0)
    cases: dict[str, Case] = {}
    for workers in sorted({1, n_cores()}):
        made = cv.Fleet("64 MiB", workers=workers)
        for sizes in ([16, 32, 32, 4], [16, 16, 4], [16, 64, 4]):
            net: Any = cv.nn.Linear(sizes[1])
            for width in sizes[2:]:
                net = net >> cv.nn.Sigmoid() >> cv.nn.Linear(width)
            graph = cv.build_graph(net, (16,), "softmax_cross_entropy", cv.Adam(1e-3))
            program = cv.compile(graph, batch_size=32, workers=1, accumulate=False)
            for seed in range(100):
                data = rng.random((320, 16), np.float32), rng.integers(0, 4, 320)
                made.add(program, data=data, seed=seed)
        cases[f"fleet of 300, an epoch, {workers} worker(s)"] = partial(made.fit, progress=False)
    return cases


def networks() -> dict[str, Case]:
    """P6, P7, P17: steps and predictions of networks for images, and the time to build and compile them."""
    import calcvm as cv

    sizes: dict[str, Any] = {
        "lenet": (28, 1, {}),
        "resnet18": (32, 3, {"width": 16}),
        "mobilenet_v2": (32, 3, {"width": 16}),
    }
    cases: dict[str, Case] = {}
    for name, (size, channels, how) in sizes.items():
        net, shape = partial(getattr(cv.zoo, name), classes=10, size=size, **how), (channels, size, size)

        def program(net: Any, shape: tuple[int, ...]) -> Any:
            graph = cv.build_graph(net(), shape, "softmax_cross_entropy", cv.Adam(1e-3))
            return cv.compile(graph, batch_size=8, workers=1)

        for batch in (1, 64) if name == "lenet" else (8,):
            x = np.random.default_rng(0).random((batch, *shape), np.float32)
            made = cv.Model(net(), input_shape=shape, optimizer=cv.Adam(1e-3), batch_size=batch, workers=1)
            cases[f"{name} batch {batch}, a step"] = partial(repeat, partial(made.step, x, np.arange(batch) % 10))
            cases[f"{name} batch {batch}, predict"] = partial(repeat, partial(made.predict, x))
        cases[f"{name}, graph and program"] = partial(repeat, partial(program, net, shape))
    return cases


def answer_requests() -> None:
    answer = answers(None)
    cases: dict[str, Case] = {}
    for part in json.loads(sys.stdin.readline())["parts"]:
        cases |= globals()[part]()
    counts = {}
    for name, run in cases.items():
        n, seconds = 1, 0.0
        while seconds < TURN_SECONDS / 4:
            n, start = 2 * n, time.perf_counter()
            run(n)
            seconds = time.perf_counter() - start
        counts[name] = max(1, int(n * TURN_SECONDS / seconds))
    answer(cases=list(cases))
    for line in sys.stdin:
        name = json.loads(line)["case"]
        start = time.perf_counter()
        cases[name](counts[name])
        answer(seconds=(time.perf_counter() - start) / counts[name])


# ---------------------------------------------------------------- the comparison
def turn(process: Process, case: str) -> float:
    return process.ask(case=case)["seconds"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.versions", description=__doc__)
    parser.add_argument("tree", type=Path, help="a checkout of the other version")
    parser.add_argument("--part", default=",".join(PARTS))
    options = parser.parse_args()
    trees = {"this": ROOT, "other": options.tree.resolve(), "other again": options.tree.resolve()}
    times: dict[str, dict[str, list[list[float]]]] = {}  # by case and tree: turns by process
    for _ in range(PROCESSES):
        running = {}
        for name, tree in trees.items():
            path = f"{ROOT}:{tree / 'src'}"
            running[name] = Process(
                "-m", "bench.versions", "--answer", PYTHONPATH=path, asked={"parts": options.part.split(",")}
            )
        for case in running["this"].ready["cases"]:
            taken = interleave({who: partial(turn, process, case) for who, process in running.items()}, TURNS)
            for who, seconds in taken.items():
                times.setdefault(case, {}).setdefault(who, []).append(seconds)
        for process in running.values():
            process.close()
    rows, ratios = [], []
    for case, turns in times.items():
        us = {who: 1e6 * fmean(map(min, processes)) for who, processes in turns.items()}
        by_turns = turn_ratio(*([s for p in turns[who] for s in p] for who in ("this", "other")))
        ratios.append(us["this"] / us["other"])
        figures = ratios[-1], by_turns, us["other again"] / us["other"]
        rows.append([case, *map(number, us.values()), *(f"{figure:.3f}" for figure in figures)])
    header = ["us, mean of minima", *trees, "this / other", "by turns", "noise"]
    say(format_table(header, rows))
    say(f"geometric mean of this / other: {geomean(ratios):.3f}")
    return 0


if __name__ == "__main__":
    if "--answer" in sys.argv:
        answer_requests()
    else:
        sys.exit(main())

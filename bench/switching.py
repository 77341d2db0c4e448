"""P10: the cost of a switch of models beside plain copies of the same bytes, and the memory of 10 000 models.

A switch copies the image (parameters, state, moments) of one model out of the heap and that of another in.  It is
timed as a user's call, `CalcHeap.enter` and `leave` of models that have all changed, in a heap with room for one.
The yardstick copies as many bytes, by `memmove` through ctypes or NumPy's copy, between the same blocks or
between as many others of their size, whichever is fastest, because the location of blocks matters by a fifth.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from bench.harness import (
    QUICK_REPEATS,
    REPEATS,
    Result,
    fresh,
    interleave,
    memory_bytes,
    number,
    ratio,
    turn_ratio,
)

KILO, MEGA = 1 << 10, 1 << 20
SIZES = (10 * KILO, 100 * KILO, MEGA, 4 * MEGA, 16 * MEGA, 64 * MEGA)
QUICK_SIZES = (10 * KILO,)
MODELS = (2, 16)  # used in turns: their images fit into a cache, or do not
IMAGES_BYTES = 512 * MEGA  # of all models together, at most
TURN_SECONDS, QUICK_TURN_SECONDS = 0.1, 0.02
BANDWIDTH_TARGET, SMALL_TARGET = 0.9, 2.0  # share of memcpy from 1 MB up; us for 10 KB
IDENTITY = {"models": 50, "turns": 1100, "switches": 1000}
MANY = {"models": 10_000, "switches": 100_000, "heap": "64 MiB"}
QUICK_MANY = {"models": 50, "switches": 200, "heap": "512 KiB"}
RSS_TARGET, GROWTH_TARGET = 100.0, 4.0  # MiB beyond import and heap; MiB after the first tenth of the switches


def program(image_bytes: int, width: int = 16) -> Any:
    """A program of one layer with Adam whose image has about so many bytes."""
    import calcvm as cv

    n_inputs = max(1, round(image_bytes / 12 / width))
    graph = cv.CalcGraph()
    x, w = graph.placeholder("x", (None, n_inputs)), graph.parameter("w", (n_inputs, width), init=cv.init.Constant(0.1))
    with graph.path("learn", backward=True) as learn:
        learn.minimize(cv.mean(cv.matmul(x, w)), optimizer=cv.Adam())
    return cv.compile(graph, batch_size=1, workers=1)


def switcher(image_bytes: int, n_models: int) -> tuple[Callable[[int], float], Any]:
    """A function for the seconds of n switches in turn, and the heap, which holds the last model."""
    import calcvm as cv

    compiled = program(image_bytes)
    heap = cv.CalcHeap(compiled.heap_bytes)
    models = [heap.create(compiled, seed=i) for i in range(n_models)]

    def run(n: int) -> float:
        order = [models[i % n_models] for i in range(n)]
        started = time.perf_counter()
        for model in order:
            with model.record.turn.mine:
                heap.enter(model.record)
                model.record.changed = True  # as if it had been trained
        return time.perf_counter() - started

    run(2 * n_models)  # so that all of them have been in the store
    return run, heap


def copiers(piece: np.ndarray, kept: Sequence[np.ndarray], where: str) -> dict[str, Callable[[int], float]]:
    """Functions for the seconds of n times two copies: the buffer to a kept one, another kept one to the buffer."""
    in_turn = [(kept[i - 1], kept[i]) for i in range(len(kept))]

    def run_memmove(n: int) -> float:
        memmove, into = ctypes.memmove, piece.ctypes.data
        of_memory = [(out.ctypes.data, back.ctypes.data) for out, back in in_turn]
        order = [of_memory[i % len(kept)] for i in range(n)]
        started = time.perf_counter()
        for out, back in order:
            memmove(out, into, piece.size)
            memmove(into, back, piece.size)
        return time.perf_counter() - started

    def run_copyto(n: int) -> float:
        copyto = np.copyto
        order = [in_turn[i % len(kept)] for i in range(n)]
        started = time.perf_counter()
        for out, back in order:
            copyto(out, piece)
            copyto(piece, back)
        return time.perf_counter() - started

    return {f"memmove, {where}": run_memmove, f"copyto, {where}": run_copyto}


def per_switch(run: Callable[[int], float], n: int) -> float:
    return run(n) / n


def time_switches(result: Result, sizes: Sequence[int], quick: bool) -> None:
    """The cost of a switch by size and number of models; at least the target's share of the speed of copies."""
    rows = []
    for size in sizes:
        for n_models in MODELS[: 1 if quick else None]:
            n_models = max(2, min(n_models, IMAGES_BYTES // size))
            run, heap = switcher(size, n_models)
            with heap.latest:
                slot = heap.latest.slot
                blocks = slot.image, [np.frombuffer(kept, np.uint8) for _, kept in heap.store._kept.values()]
            image = slot.image.size
            others = np.zeros(image, np.uint8), [np.full(image, i, np.uint8) for i in range(n_models)]
            runs = {"switch": run, **copiers(*blocks, "same blocks"), **copiers(*others, "others")}
            each = min(run(2 * n_models) for _ in range(3)) / (2 * n_models)
            n = n_models * max(2, int((QUICK_TURN_SECONDS if quick else TURN_SECONDS) / each / n_models))
            heap.stats.reset()
            turns = {name: partial(per_switch, switch, n) for name, switch in runs.items()}
            times = interleave(turns, QUICK_REPEATS if quick else REPEATS)
            repeats = len(times["switch"])
            if heap.stats.switches != n * repeats or heap.stats.bytes != 2 * image * n * repeats:
                result.fail(f"{n * repeats} switches of {image:,} bytes: {heap.stats}")
            copying = min(runs.keys() - {"switch"}, key=lambda kind: min(times[kind]))
            share, by_turns = ratio(times[copying], times["switch"]), turn_ratio(times[copying], times["switch"])
            seconds = min(times["switch"])
            rows.append(
                [
                    f"{image / KILO:,.0f} KiB",
                    n_models,
                    number(seconds * 1e6),
                    number(statistics.median(times["switch"]) * 1e6),
                    number(min(times[copying]) * 1e6),
                    copying,
                    f"{2 * 2 * image / seconds / 1e9:.1f}",
                    f"{100 * share:.0f} %",
                    f"{100 * by_turns:.0f} %",
                ]
            )
            what = f"{image / KILO:,.0f} KiB of state, {n_models} models in turn"
            if size >= MEGA:
                result.target("P10", f"speed over that of two copies, {what}", share, BANDWIDTH_TARGET, "x")
            elif size == SIZES[0]:
                result.target("P10", f"a switch, {what}", seconds * 1e6, SMALL_TARGET, "us", at_most=True)
            heap.close()
    header = ["image", "models", "us per switch", "median", "two copies", "by", "GB/s", "of copies", "by turns"]
    result.table("A switch: one image out of the heap, one in", header, [[str(c) for c in row] for row in rows])


def identity(result: Result, models: int, turns: int, switches: int) -> None:
    """Check that many models of five programs, switched in random order, have the bits of models that never left their heap."""
    import calcvm as cv
    from tests import switched

    heap = cv.CalcHeap(switched.small_heap(1))
    differing = switched.differing(heap, models, switched.random_order(models, turns))
    if differing:
        result.fail(f"{len(differing)} of {models} models differ after {heap.stats.switches} switches: {differing}")
    elif heap.stats.switches < switches:
        result.fail(f"only {heap.stats.switches} switches")
    else:
        result.note(
            f"{heap.stats.switches} random switches among {models} models of {len(switched.programs())} programs "
            "(Adam, dropout with momentum, rounds that add up, a schedule with clipping, float64): parameters, state "
            "and moments have the bits of models that never left their heaps."
        )


def many(models: int, switches: int, heap: str) -> dict[str, Any]:
    """In a fresh process: train models of a `FileStore` in random order; return resident bytes along the way."""
    import calcvm as cv
    from calcvm import nn
    from calcvm.model import build_graph

    net = nn.Linear(32) >> nn.Sigmoid() >> nn.Linear(32) >> nn.Sigmoid() >> nn.Linear(4)
    compiled = cv.compile(build_graph(net, (16,), "softmax_cross_entropy", cv.Adam()), batch_size=32, workers=1)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((32, 16), dtype=np.float32), rng.integers(0, 4, 32)
    cv.CalcHeap(compiled.heap_bytes).create(compiled).step(x, y)  # first use imports and links: not measured
    imported = memory_bytes("VmRSS")
    with (
        tempfile.TemporaryDirectory() as folder,
        cv.CalcHeap(heap, cv.FileStore(folder, durable=False)) as shared,
    ):
        started = time.perf_counter()
        there = [shared.create(compiled, seed=i, name=f"model {i}") for i in range(models)]
        loading = time.perf_counter() - started
        shared.stats.reset()
        resident, started = [], time.perf_counter()
        for tenth in range(1, 11):
            while shared.stats.switches < switches * tenth // 10:
                there[rng.integers(models)].step(x, y)
            resident.append(memory_bytes("VmRSS"))
        seconds = time.perf_counter() - started
        stats, peak = shared.stats, memory_bytes("VmHWM")
        return {
            "imported": imported,
            "resident": resident,
            "peak": peak,
            "heap": shared.nbytes,
            "loading": loading,
            "seconds": seconds,
            "switches": stats.switches,
            "switching": stats.seconds,
            "image": there[0].loaded.image[1] - there[0].loaded.image[0],
        }


def many_in_a_fresh_process(**asked: Any) -> dict[str, Any]:
    return fresh("-m", "bench.switching", json.dumps(asked), threads=1)


def time_many(result: Result, asked: dict[str, Any]) -> None:
    """Many models in files with a small heap: the process must stay small for any number of switches."""
    reply = many_in_a_fresh_process(**asked)
    beyond = [(r - reply["imported"] - reply["heap"]) / MEGA for r in (*reply["resident"], reply["peak"])]
    growth = (reply["resident"][-1] - reply["resident"][0]) / MEGA
    rows = [
        [
            f"{asked['models']:,}",
            asked["heap"],
            f"{reply['switches']:,}",
            f"{reply['imported'] / MEGA:.0f}",
            f"{reply['resident'][0] / MEGA:.1f}",
            f"{reply['resident'][-1] / MEGA:.1f}",
            f"{reply['peak'] / MEGA:.1f}",
            f"{1e6 * reply['switching'] / reply['switches']:.0f}",
            f"{reply['loading']:.1f}",
            f"{reply['seconds']:.1f}",
        ]
    ]
    header = [
        "models",
        "heap",
        "switches",
        "MiB after import",
        "a tenth",
        "all",
        "peak",
        "us per switch",
        "s to load",
        "s",
    ]
    result.table(
        f"Models of {reply['image']:,} bytes each in a FileStore (not durable), one step of a random one at a time",
        header,
        rows,
    )
    what = f"{asked['models']:,} models, {reply['switches']:,} switches"
    result.target(
        "P10", f"peak RSS over RSS after import and heap, {what}", max(beyond), RSS_TARGET, "MiB", at_most=True
    )
    result.target("P10", f"growth of RSS after the first tenth, {what}", growth, GROWTH_TARGET, "MiB", at_most=True)
    if growth > GROWTH_TARGET:
        result.fail(f"the process grew by {growth:.1f} MiB over {what}")


def main(quick: bool = False) -> bool:
    """Run the workload; True if every check held."""
    result = Result("switching", "Switching models", quick)
    identity(result, **(IDENTITY if not quick else {"models": 20, "turns": 120, "switches": 100}))
    time_switches(result, QUICK_SIZES if quick else SIZES, quick)
    time_many(result, QUICK_MANY if quick else MANY)
    return result.save()


if __name__ == "__main__":
    print(json.dumps(many(**json.loads(sys.argv[1]))))

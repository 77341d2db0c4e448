"""P1, P2, P3: the training step of a multi-layer perceptron, in microseconds, and its memory.

P1 is the tiny network, where overhead dominates; P2 is the 784-64-64-10 network at small batches; P3 is the same
at batch 10000, 400 rounds, as in section 4.3 of the CalcGraph paper.  Every contestant takes the same steps from
the same weights on the same batch.  No time is printed for one whose loss differs after `VERIFY_STEPS` steps.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import (
    QUICK_REPEATS,
    REPEATS,
    Process,
    Result,
    copy_gbs,
    idlest_core,
    interleave,
    n_cores,
    number,
    ratio,
    turn_ratio,
)
from bench.peers import CONTESTANTS, NAMES, VERIFY_STEPS, Task

TINY, DIGITS, BIG_BATCH, ROUNDS = [4, 16, 3], [784, 64, 64, 10], 10_000, 400
CASES = [(TINY, 1), (TINY, 32), (DIGITS, 1), (DIGITS, 32), (DIGITS, 256), (DIGITS, BIG_BATCH)]
QUICK_CASES, QUICK_BATCH = [(TINY, 32)], 64
# (number, sizes, batch): least ratio of the peer's time to ours
TARGETS: list[tuple[str, list[int], int, dict[str, float]]] = [
    ("P1", TINY, 1, {"jax_scan": 4.5, "jax_scan_plain": 4.5, "jax_step": 65, "torch_eager": 650}),
    ("P1", TINY, 32, {"jax_scan": 4.5, "jax_scan_plain": 4.5, "jax_step": 30, "torch_eager": 170}),
    ("P2", DIGITS, 1, {"jax_scan": 2, "torch_compile": 2.5}),
    ("P2", DIGITS, 32, {"jax_scan": 2, "torch_compile": 2.5}),
    ("P2", DIGITS, 256, {"jax_scan": 2, "torch_compile": 2.5}),
    ("P3", DIGITS, BIG_BATCH, {"best peer": 1.5}),
]
MEASURED = ("ours", "ours_from_file", "ours_rounds", "torch_eager", "jax_scan")  # for memory
HEAP_TARGET, RSS_TARGET = 43e6, 1 / 3
TOLERANCE = 1e-4  # relative, between losses after VERIFY_STEPS steps
TURN_SECONDS, QUICK_TURN_SECONDS, MAX_STEPS = 0.15, 0.02, 2000


def start(who: str, sizes: list[int], batch: int, threads: int, core: int | None, **more: Any) -> Process:
    """A contestant in a separate process, ready to be timed."""
    workers = None if who == "ours_default" else threads
    spec = {"who": who, "sizes": sizes, "batch": batch, "threads": workers, "core": core, **more}
    return Process("-m", "bench.peers", json.dumps(spec), threads=threads)


def start_all(result: Result, who: Sequence[str], sizes: list[int], batch: int, threads: int) -> dict[str, Process]:
    """The contestants that start.  Errors of the others are noted; an error of ours fails the run."""
    core = idlest_core() if threads == 1 else None
    running = {}
    for name in who:
        try:
            running[name] = start(name, sizes, batch, threads, core)
        except RuntimeError as error:
            text = f"{NAMES[name]} left out of {label(sizes, batch)}, {threads} thread(s): {error}"
            result.fail(text) if name.startswith("ours") else result.note(text)
    return running


def label(sizes: Sequence[int], batch: int) -> str:
    return f"{'-'.join(map(str, sizes))}, batch {batch}"


def agreeing(result: Result, running: dict[str, Process], what: str) -> dict[str, Process]:
    """The contestants whose loss after the first steps agrees with the median; others fail the run."""
    middle = statistics.median(p.ready["loss"] for p in running.values())
    agree = {n: p for n, p in running.items() if abs(p.ready["loss"] - middle) <= TOLERANCE * abs(middle)}
    for name in running.keys() - agree.keys():
        loss = running[name].ready["loss"]
        result.fail(
            f"{NAMES[name]} DISAGREES in {what}: loss {loss:.7g} after {VERIFY_STEPS} steps, others {middle:.7g}"
        )
    return agree


def turns(agree: dict[str, Process], seconds: float, most: int, quick: bool) -> dict[str, list[float]]:
    """Seconds per step of every turn, one contestant after the other; a turn takes about ``seconds``."""
    n_steps = {}
    for name, process in agree.items():
        one = min(process.ask(steps=VERIFY_STEPS)["seconds"] for _ in range(2)) / VERIFY_STEPS
        n_steps[name] = min(most, max(5, int(seconds / one)))
        process.ask(steps=n_steps[name])  # JAX compiles a scan for each length

    def turn(name: str) -> float:
        return agree[name].ask(steps=n_steps[name])["seconds"] / n_steps[name]

    runs = {name: lambda name=name: turn(name) for name in agree}
    return interleave(runs, QUICK_REPEATS if quick else REPEATS)


def time_case(
    result: Result, who: Sequence[str], sizes: list[int], batch: int, threads: int, quick: bool
) -> dict[str, list[float]]:
    """Time one shape with one number of threads and print its table; return seconds per step of every turn."""
    what = f"{label(sizes, batch)}, {threads} thread{'s' if threads > 1 else ''}"
    running = start_all(result, who, sizes, batch, threads)
    try:
        agree = agreeing(result, running, what) if running else {}
        times = turns(agree, QUICK_TURN_SECONDS if quick else TURN_SECONDS, MAX_STEPS, quick)
        accuracy = {}
        if batch == BIG_BATCH and not quick:
            for name, process in agree.items():
                process.ask(steps=ROUNDS)
                accuracy[name] = process.ask(accuracy=True)["accuracy"]
        task = Task(sizes)
        limit_flops = task.step_flops(batch) / (result.data["limits"]["fma_gflops"] * 1e9 * threads)
        size = task.resident_bytes + 4 * batch * sizes[0]
        limit = max(limit_flops, task.step_bytes(batch) / (copy_gbs(size // 2) * 1e9 * threads))
        ours = best_of(times, "ours", "ours_default")
        rows = []
        for name in running:
            if name not in agree:
                rows.append([NAMES[name], "DISAGREES", *["-"] * 5, f"{running[name].ready['loss']:.7g}", "-"])
                continue
            t, ready = times[name], running[name].ready
            rows.append(
                [
                    NAMES[name] + (f" ({ready['note']})" if ready["note"] else ""),
                    number(min(t) * 1e6),
                    number(statistics.median(t) * 1e6),
                    number(ratio(t, times[ours])) if ours else "-",
                    number(turn_ratio(t, times[ours])) if ours else "-",
                    f"{100 * limit / min(t):.0f} %",
                    number(ready["setup_seconds"]),
                    f"{ready['loss']:.7g}",
                    f"{100 * accuracy[name]:.2f} %" if name in accuracy else "-",
                ]
            )
        header = [
            "us per step",
            "min",
            "median",
            "times ours",
            "by turns",
            "of limit",
            "setup s",
            f"loss at {VERIFY_STEPS}",
        ]
        result.table(what, [*header, f"accuracy at {ROUNDS}"], rows)
        if len(accuracy) > 1 and max(accuracy.values()) - min(accuracy.values()) > 0.005:
            result.fail(f"accuracies differ in {what}")
        return times
    finally:
        for process in running.values():
            process.close()


def best_of(times: dict[str, list[float]], *names: str) -> str | None:
    """The fastest of the `names` that were timed."""
    timed = [name for name in names if name in times]
    return min(timed, key=lambda name: min(times[name])) if timed else None


def add_targets(result: Result, times: dict[str, list[float]], sizes: list[int], batch: int, threads: int) -> None:
    """Add the targets of one case: ours against each peer that it names."""
    ours = best_of(times, "ours", "ours_default")
    for number_, s, b, asked in TARGETS:
        for peer, least in asked.items():
            if (s, b) != (sizes, batch):
                continue
            who = peer
            if peer == "best peer":
                who = best_of(times, *[name for name in CONTESTANTS if not name.startswith("ours")]) or peer
            value = ratio(times[who], times[ours]) if ours and who in times else None
            what = f"{label(sizes, batch)}, {threads} thread(s), against {NAMES.get(who, who)}"
            result.target(number_, what, value, least, "x")


def memory(result: Result, who: Sequence[str], threads: int, batch: int) -> None:
    """Peak resident memory of training at a big batch, each contestant in a separate process.

    The batch comes from a file in one of three ways.  As an array, torch uses it in place and calcvm copies it into its
    heap.  Read straight into the heap, calcvm also holds it once.  In rounds, calcvm reads it in place.
    """
    rows, peaks, heap = [], {}, None
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / name) for name in ("x.npy", "y.npy")]
        for path, array in zip(paths, Task(DIGITS).sample(batch)):
            np.save(path, array)
        for name in who:
            try:
                if name.startswith("ours"):  # a first run, so that the kernels are in the cache
                    start(name, DIGITS, batch, threads, None, data=paths).close()
                process = start(name, DIGITS, batch, threads, None, data=paths)
            except RuntimeError as error:
                result.note(f"{NAMES[name]} left out of memory: {error}")
                continue
            reply = process.ask(memory=True)
            process.close()
            peaks[name] = reply["peak"] - reply["imported"]
            mb = [reply["imported"], reply["peak"], reply["peak"] - reply["imported"], process.ready["heap_bytes"]]
            heap = process.ready["heap_bytes"] if name == "ours" else heap
            rows.append([NAMES[name], *(f"{v / 1e6:.1f}" if v else "-" for v in mb)])
    header = ["MB", "after import", "peak", "peak - import", "heap"]
    result.table(f"Memory of {label(DIGITS, batch)}, {VERIFY_STEPS} steps", header, rows)
    result.target("P3", "heap bytes", heap and heap / 1e6, HEAP_TARGET / 1e6, "MB", at_most=True)
    for name in ("ours", "ours_from_file", "ours_rounds"):
        share = peaks[name] / peaks["torch_eager"] if {name, "torch_eager"} <= peaks.keys() else None
        what = f"peak RSS over RSS after import, {NAMES[name]} over torch eager"
        result.target("P3", what, share, RSS_TARGET, "x", at_most=True)


def main(quick: bool = False, who: Sequence[str] = ()) -> bool:
    """Run the workload with the contestants `who` (default all); True if all agree."""
    who = who or list(CONTESTANTS)
    result = Result("mlp", "MLP training step", quick)
    for sizes, batch in QUICK_CASES if quick else CASES:
        for threads in [n_cores()] if quick else sorted({1, n_cores()}):
            skip = {"ours_from_file"} | ({"sklearn"} if batch == BIG_BATCH else set())
            skip |= {"ours_default"} if threads == 1 else set()
            skip |= {"jax_scan_plain"} if sizes is not TINY or quick else {"ours_rounds"}
            skip |= {"ours_rounds"} if batch != BIG_BATCH else set()
            skip |= {"ours_specialized"} if threads > 1 or batch > 32 else set()
            skip |= {"torch_compile", "jax_step"} if quick else set()
            times = time_case(result, [name for name in who if name not in skip], sizes, batch, threads, quick)
            add_targets(result, times, sizes, batch, threads)
    measured = [name for name in who if name in MEASURED[: 1 if quick else None]]
    memory(result, measured, n_cores(), QUICK_BATCH if quick else BIG_BATCH)
    return result.save()

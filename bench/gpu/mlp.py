"""P12: the training step of the paper's network at batch 10000, and of a tiny one, in microseconds on a GPU.

Every contestant takes the same steps from the same weights on the same batch; no time is printed for one whose loss
differs after `VERIFY_STEPS` steps.  TF32 is another precision: those contestants are shown beside the others, for
information, and held to `TF32_TOLERANCE`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from bench.gpu.limits import Limits, result, step_cost
from bench.gpu.peers import CONTESTANTS, LEARNING_RATE, NAMES, VERIFY_STEPS, Task, settings
from bench.harness import Process, Result, number, ratio, turn_ratio
from bench.mlp import BIG_BATCH, DIGITS, TINY, best_of, label, turns

CASES: dict[str, list[tuple[list[int], int]]] = {"mlp": [(DIGITS, BIG_BATCH)], "tiny": [(TINY, 1), (TINY, 32)]}
TITLES = {"mlp": "On a GPU: the paper's network", "tiny": "On a GPU: a tiny network"}
LEAST = {"mlp": 1.2, "tiny": 3.0}  # ratio of a peer's time to ours
TOLERANCE, TF32_TOLERANCE = 1e-4, 1e-2  # relative, between losses after VERIFY_STEPS steps
TURN_SECONDS, QUICK_TURN_SECONDS, MAX_STEPS = 0.15, 0.01, 5000
SKIPPED = {"mlp": {"ours_grid_1", "jax_scan_plain"}, "tiny": {n for n in CONTESTANTS if n.endswith("tf32")}}


def start_all(result: Result, who: Sequence[str], sizes: list[int], batch: int, device: str) -> dict[str, Process]:
    """The contestants that start; what keeps the others from it is noted, and fails the run if it is us."""
    running = {}
    for name in who:
        spec = {"who": name, "sizes": sizes, "batch": batch, "device": device}
        try:
            running[name] = Process("-m", "bench.gpu.peers", json.dumps(spec), threads=None, **settings(name))
        except RuntimeError as error:
            text = f"{NAMES[name]} left out of {label(sizes, batch)}: {error}"
            result.fail(text) if name.startswith("ours") else result.note(text)
    return running


def agreeing(result: Result, running: dict[str, Process], what: str) -> dict[str, Process]:
    """The contestants whose loss after the first steps is the one of the most of them; others fail the run."""
    exact = [p.ready["loss"] for name, p in running.items() if not name.endswith("tf32")]
    middle = statistics.median(exact or [p.ready["loss"] for p in running.values()])
    agree = {}
    for name, process in running.items():
        tolerance = TF32_TOLERANCE if name.endswith("tf32") else TOLERANCE
        loss = process.ready["loss"]
        if abs(loss - middle) <= tolerance * abs(middle):
            agree[name] = process
        else:
            text = f"loss {loss:.7g} after {VERIFY_STEPS} steps, others {middle:.7g}"
            result.fail(f"{NAMES[name]} DISAGREES in {what}: {text}")
    return agree


def limit_of(limits: Limits, sizes: list[int], batch: int) -> tuple[float, str]:
    """Seconds that the GPU's rates allow a step, and how they come about."""
    cv: Any = import_module("calcvm")
    net = cv.nn.Linear(sizes[1])
    for width in sizes[2:]:
        net = net >> cv.nn.Sigmoid() >> cv.nn.Linear(width)
    graph = cv.build_graph(net, (sizes[0],), "softmax_cross_entropy", cv.Adam(LEARNING_RATE))
    flops, nbytes = step_cost(cv.plan(graph, batch_size=batch))
    seconds = limits.seconds(flops, nbytes)
    least = limits.seconds(Task(sizes).step_flops(batch), Task(sizes).step_bytes(batch))
    text = (
        f"The limit of {label(sizes, batch)} is {number(seconds * 1e6)} us: {flops:,.0f} FLOPs take "
        f"{number(flops / limits.flops * 1e6)} us at the measured FMA rate, {nbytes:,.0f} bytes "
        f"{number(nbytes / limits.bandwidth * 1e6)} us at the measured copy bandwidth.  Its matrix products and what must at "
        f"least be read and written (batch, parameters, moments) would take {number(least * 1e6)} us."
    )
    return seconds, text


def time_case(
    result: Result, limits: Limits, who: Sequence[str], sizes: list[int], batch: int, quick: bool, device: str = "cuda"
) -> dict[str, list[float]]:
    """Time one network at one batch, print its table; seconds per step of every turn."""
    what = label(sizes, batch)
    running = start_all(result, who, sizes, batch, device)
    try:
        agree = agreeing(result, running, what) if running else {}
        times = turns(agree, QUICK_TURN_SECONDS if quick else TURN_SECONDS, MAX_STEPS, quick)
        limit, text = limit_of(limits, sizes, batch)
        best = best_of(times, *(name for name in times if name.startswith("ours") and not name.endswith("tf32")))
        rows = []
        for name, process in running.items():
            ready = process.ready
            if name not in agree:
                rows.append([NAMES[name], "DISAGREES", *["-"] * 5, f"{ready['loss']:.7g}"])
                continue
            t = times[name]
            rows.append(
                [
                    NAMES[name] + (f" ({ready['note']})" if ready["note"] else ""),
                    number(min(t) * 1e6),
                    number(statistics.median(t) * 1e6),
                    number(ratio(t, times[best])) if best else "-",
                    number(turn_ratio(t, times[best])) if best else "-",
                    f"{100 * limit / min(t):.1f} %",
                    number(ready["setup_seconds"]),
                    f"{ready['loss']:.7g}",
                ]
            )
        header = ["us per step", "min", "median", "times ours", "by turns", "of limit", "setup s"]
        result.table(what, [*header, f"loss at {VERIFY_STEPS}"], rows)
        result.note(text)
        return times
    finally:
        for process in running.values():
            process.close()


def add_targets(result: Result, times: dict[str, list[float]], what: str, least: float) -> None:
    """Our fastest against the fastest CUDA graph of torch, and against JAX; TF32 does not count."""
    exact = {name: t for name, t in times.items() if not name.endswith("tf32")}
    best = best_of(exact, *(name for name in exact if name.startswith("ours")))
    for prefix, name in (("torch", "torch in a CUDA graph, its fastest"), ("jax", "JAX scan")):
        peer = best_of(exact, *(n for n in exact if n.startswith(prefix)))
        value = ratio(exact[peer], exact[best]) if peer and best else None
        result.target("P12", f"GPU, {what}, against {name}", value, least, "x")


def main(limits: Limits, part: str, quick: bool = False, who: Sequence[str] = ()) -> bool:
    """Run part "mlp" or "tiny" with the contestants ``who`` (default all); True when all agree."""
    made = result(limits, part, TITLES[part], quick)
    chosen = [name for name in (who or CONTESTANTS) if name in CONTESTANTS and name not in SKIPPED[part]]
    if quick:
        chosen = [name for name in chosen if name not in ("torch_compile_graph", "torch_functional")]
    for sizes, batch in CASES[part]:
        times = time_case(made, limits, chosen, sizes, batch, quick)
        add_targets(made, times, label(sizes, batch), LEAST[part])
    return made.save()

"""4.3: memory and time of training a single model, each contestant in a fresh process."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from bench.harness import Process, Result, interleave, n_cores, number
from bench.mlp import ROUNDS, agreeing, start
from bench.paper.bars import bars
from bench.paper.samples import Source
from bench.peers import NAMES

WHO = ("ours", "ours_rounds", "jax_scan", "torch_eager", "torch_compile")
TURNS, QUICK_ROUNDS, QUICK_SAMPLES = 5, 5, 100  # the rounds are shared out to turns


def run(result: Result, sources: Sequence[Source], quick: bool) -> None:
    """Seconds and megabytes of every source's model."""
    found = {}
    for source in sources[: 1 if quick else None]:
        found[source.name] = compare(result, source.first(QUICK_SAMPLES) if quick else source, quick)
    title = "4.3: seconds of training, and memory beyond what a process takes after its imports"
    result.picture("paper-4.3", title, lambda figure: draw(figure, found))


def compare(result: Result, source: Source, quick: bool) -> dict[str, tuple[float, float]]:
    """Train the paper's network for the paper's rounds, all samples a batch; seconds and bytes by contestant."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    name = "-".join(map(str, source.sizes))
    what = f"4.3: {source.name}, {name}, {rounds} rounds of {len(source.x)} samples"
    running: dict[str, Process] = {}
    with source.files() as (train, _):
        for who in ("ours", "torch_eager") if quick else WHO:
            try:
                if who.startswith("ours"):  # once before, so that the kernels are in the cache, as on any second run
                    start(who, source.sizes, len(source.x), n_cores(), None, data=train).close()
                running[who] = start(who, source.sizes, len(source.x), n_cores(), None, data=train)
            except RuntimeError as error:
                text = f"{NAMES[who]} left out of 4.3: {error}"
                result.fail(text) if who.startswith("ours") else result.note(text)
    try:
        agree = agreeing(result, running, what)
        if "jax_scan" in agree:
            agree["jax_scan"].ask(steps=rounds // TURNS)  # compiled for each length
        times = interleave({who: partial(seconds, p, rounds) for who, p in agree.items()}, TURNS)
        memory = {who: process.ask(memory=True) for who, process in agree.items()}
    finally:
        for process in running.values():
            process.close()
    taken = {who: reply["peak"] - reply["imported"] for who, reply in memory.items()}
    rows = []
    for who, t in times.items():
        heap = agree[who].ready["heap_bytes"]
        rows.append(
            [
                NAMES[who],
                f"{min(t):.2f}",
                f"{statistics.median(t):.2f}",
                number(min(t) / min(times["ours"])) if "ours" in times else "-",
                f"{agree[who].ready['setup_seconds']:.2f}",
                f"{memory[who]['imported'] / 1e6:.1f}",
                f"{taken[who] / 1e6:.1f}",
                number(taken[who] / taken["ours"]) if "ours" in taken else "-",
                f"{heap / 1e6:.1f}" if heap else "-",
            ]
        )
    header = ["4.3", "s", "median", "times ours", "setup s", "MB after import", "MB beyond", "times ours", "heap MB"]
    result.table(what, header, rows)
    peers = [who for who in times if not who.startswith("ours")]
    if "ours" in times and peers:
        least = min(min(times[who]) for who in peers) / min(times["ours"])
        result.target("§4.3", f"{what}: seconds of the fastest peer over ours", least, 1.0, "x")
        least = min(taken[who] for who in peers) / taken["ours"]
        result.target("§4.3", f"{what}: memory of the smallest peer over ours", least, 1.0, "x")
    return {who: (min(t), taken[who]) for who, t in times.items()}


def draw(figure: Any, found: dict[str, dict[str, tuple[float, float]]]) -> None:
    """A row of bars for each source: seconds, and megabytes."""
    for row, (name, contestants) in zip(figure.subplots(len(found), 2, squeeze=False), found.items()):
        bars(row[0], {NAMES[who]: s for who, (s, _) in contestants.items()}, f"{name}: seconds", "%.2f")
        bars(row[1], {NAMES[who]: n / 1e6 for who, (_, n) in contestants.items()}, f"{name}: MB", "%.0f")
        row[1].set_yticklabels([])


def seconds(process: Process, rounds: int) -> float:
    """Seconds that all rounds take by a turn of some of them."""
    return TURNS * process.ask(steps=rounds // TURNS)["seconds"]

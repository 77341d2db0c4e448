"""Stores: the time that keeping 500 small models in files adds to training, and what other processes read meanwhile.

A fleet trains 500 models for 20 epochs with its store in memory, and in files after every epoch, every fifth, and at the
end.  Versions of several sizes are also written one by one, to files and to SQLite in WAL mode.  Each keeps the last two.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np

from bench.harness import Process, Result, answers, interleave, number

MODELS, EPOCHS, REPEATS = 500, 20, 5
SIZES = {4 << 10: 500, 64 << 10: 200, 1 << 20: 40, 100 << 20: 2}  # bytes of an image: versions written
CHECKPOINTS = (1, 5, "end")


def training(store: Any, checkpoint: int | str, models: int) -> float:
    """Seconds of CPU that a fleet takes to train."""
    import calcvm as cv
    from calcvm import nn

    net = nn.Linear(16) >> nn.Tanh() >> nn.Linear(1)
    program = cv.compile(cv.build_graph(net, (8,), "mse", cv.Adam(1e-2)), batch_size=10)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((40, 8), np.float32), rng.standard_normal((40, 1), np.float32)
    fleet = cv.Fleet(models * program.heap_bytes + (1 << 20), workers=1, store=store)
    for seed in range(models):
        fleet.add(program, data=(x, y), seed=seed)
    start = time.process_time()
    fleet.fit(EPOCHS, checkpoint=checkpoint, progress=False)
    seconds = time.process_time() - start
    fleet.heap.close()
    return seconds


def kept(durable: bool, checkpoint: int | str, models: int) -> float:
    import calcvm as cv

    with tempfile.TemporaryDirectory() as folder:
        return training(cv.FileStore(folder, durable=durable), checkpoint, models)


class Sqlite:
    """The peer: a table with two versions of each model, and one transaction per version."""

    def __init__(self, folder: str, durable: bool):
        self.base = sqlite3.connect(f"{folder}/models.db", isolation_level=None)
        self.base.execute("pragma page_size=16384")
        self.base.execute("pragma journal_mode=wal")
        self.base.execute(f"pragma synchronous={'full' if durable else 'normal'}")
        self.base.execute(
            "create table models(name text, odd int, facts blob, image blob, digest blob, primary key(name, odd))"
        )
        self.written = 0

    def put(self, name: str, facts: dict[str, Any], image: memoryview) -> None:
        document = json.dumps(facts).encode()
        digest = hashlib.sha256(document)
        digest.update(image)
        row = (name, self.written & 1, document, image, digest.digest())
        self.base.execute("insert or replace into models values(?, ?, ?, ?, ?)", row)
        self.written += 1

    def close(self) -> None:
        self.base.close()


def writing(open_store: Callable[[str], Any], nbytes: int, versions: int) -> float:
    """Seconds of CPU per version, for a model of which two are kept."""
    image = memoryview(np.random.default_rng(0).bytes(nbytes))
    facts = {"program": "a" * 64, "seed": 3, "rounds": 5}
    with tempfile.TemporaryDirectory() as folder, closing(open_store(folder)) as store:
        for _ in range(2):
            store.put("m", facts, image)
        start = time.process_time()
        for _ in range(versions):
            store.put("m", facts, image)
        return (time.process_time() - start) / versions


# ---------------------------------------------------------------- readers
def read(folder: str, seconds: float) -> dict[str, Any]:
    """Read models at random while another process writes them; this runs in a separate process."""
    import calcvm as cv

    rng, store = np.random.default_rng(0), cv.FileStore(folder, read_only=True)
    names, n, until = store.names(), 0, time.monotonic() + seconds
    rounds = set()
    start = time.process_time()
    while time.monotonic() < until:
        rounds.add(store.get(names[rng.integers(len(names))])[0]["rounds"])
        n += 1
    return {"reads": n, "us": 1e6 * (time.process_time() - start) / n, "versions": len(rounds)}


def readers(result: Result, seconds: float) -> None:
    import calcvm as cv

    with tempfile.TemporaryDirectory() as folder, closing(cv.FileStore(folder, durable=False)) as store:
        image = memoryview(bytes(4 << 10))
        for k in range(50):
            store.put(f"m{k}", {"rounds": 0}, image)
        over, written = threading.Event(), 0

        def write() -> None:
            nonlocal written
            while not over.is_set():
                written += 1
                store.put(f"m{written % 50}", {"rounds": written // 50}, image)

        writer = threading.Thread(target=write)
        with closing(Process("-m", "bench.stores", threads=1)) as process:
            writer.start()
            try:
                reply = process.ask(folder=folder, seconds=seconds)
            finally:
                over.set()
                writer.join()
    result.table(
        f"Another process reads while one writes, {seconds:g} s, 50 models of 4 KiB",
        ["versions written", "versions read, each whole", "us of CPU a read", "different versions seen"],
        [[f"{written:,}", f"{reply['reads']:,}", number(reply["us"]), f"{reply['versions']:,}"]],
    )
    if reply["versions"] < 2:
        result.fail("the reader saw one version")


def main(quick: bool = False) -> bool:
    """Run the workload; True if every check held."""
    import calcvm as cv

    result = Result("stores", "Stores of models", quick)
    models, repeats = (20, 1) if quick else (MODELS, REPEATS)
    ways: dict[str, Callable[[], float]] = {"in memory": lambda: training(None, 1, models)}
    for durable in (False, True):
        for checkpoint in CHECKPOINTS:
            when = {1: "every epoch", "end": "at the end"}.get(checkpoint, f"every {checkpoint} epochs")
            ways[f"{when}{', durable' if durable else ''}"] = lambda d=durable, c=checkpoint: kept(d, c, models)  # type: ignore[misc]
    ways["in memory"]()  # imports and links on first use
    times = interleave(ways, repeats)
    result.table(
        f"A fleet of {models} models, {EPOCHS} epochs: seconds of CPU of its training",
        ["written to the store", "min", "median"],
        [[way, number(min(t)), number(float(np.median(t)))] for way, t in times.items()],
    )
    rows = []
    for nbytes, versions in {4 << 10: 20}.items() if quick else SIZES.items():
        for durable in (False, True):
            each = interleave(
                {
                    "ours": lambda n=nbytes, v=versions, d=durable: writing(lambda f: cv.FileStore(f, d), n, v),  # type: ignore[misc]
                    "sqlite": lambda n=nbytes, v=versions, d=durable: writing(lambda f: Sqlite(f, d), n, v),  # type: ignore[misc]
                },
                repeats,
            )
            best = {who: min(t) for who, t in each.items()}
            rows.append(
                [f"{nbytes:,}", "yes" if durable else "no"]
                + [number(1e6 * best[who]) for who in best]
                + [number(best["sqlite"] / best["ours"])]
            )
    result.table(
        "A version of a model: us of CPU",
        ["bytes", "durable", "FileStore", "SQLite, WAL", "times ours"],
        rows,
    )
    readers(result, 0.5 if quick else 5.0)
    return result.save()


if __name__ == "__main__":
    answer = answers(None)
    answer()
    for line in sys.stdin:
        answer(**read(**json.loads(line)))

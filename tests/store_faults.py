"""Faults for stores: processes killed while they train, files damaged afterwards.

    python -m tests.store_faults --kills 200 --flips 1000

Kills: a child process trains seven models of six programs in a heap with room for two or three, over a `FileStore`, and
is killed (SIGKILL) at a random moment; it tells by a pipe which round of which model it begins and which it has
committed.  Then every model must open, at a round that is the last committed or the one begun, with the bits and the
predictions of a model that trained as many rounds alone and undisturbed.  The next child goes on from there.

Flips: a model's file gets bits flipped, is cut, extended, partly zeroed, or made of two states of it; opening it must be
refused by an error that names it, or give the last version with all its bits where that is not touched.
"""

from __future__ import annotations

import argparse
import os
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

import calcvm as cv
from calcvm.model import persistent
from calcvm.vm.memory import versions
from tests.switched import BATCH, N_CLASSES, N_INPUTS, load, programs

ROOT = Path(__file__).parent.parent
MODELS = 7
BEGIN, COMMITTED = b"begin", b"committed"
HARMS = ("lost", "corrupt", "behind", "differing", "left over")
LONGEST_SECONDS = 0.3  # from the first committed model to the kill


def heap_over(store: cv.FileStore) -> cv.CalcHeap:
    """A heap with room for the largest program and little more."""
    return cv.CalcHeap(2 * max(p.heap_bytes for p in programs().values()), store=store)


def train_round(model: cv.Model, number: int) -> bool:
    """The next round of a model, which depends on its number and the rounds done alone; whether it is committed."""
    done = model.facts["epochs"]
    rng = np.random.default_rng([number, done])
    n = int(rng.integers(1, BATCH + 1))
    x, y = rng.standard_normal((4 * n, N_INPUTS)), rng.integers(0, N_CLASSES, 4 * n)
    if done % 4 == 0:
        model.fit(x, y, progress=False)
        return True
    if model.loaded.accumulating and done % 4 > 1:
        model["input"], model["target"] = x[:n], y[:n]  # the gradient of one round is used in the next
        model.forward("learn")
        model.backward("learn")
        if done % 4 == 3:
            model.optimize("learn")
            model.end_round("learn")
    else:
        model.step(x[:n], y[:n])
    model.facts["epochs"] += 1
    return False


# ---------------------------------------------------------------- kills
def tell(what: bytes, number: int, rounds: int) -> None:
    os.write(1, b"%s %d %d\n" % (what, number, rounds))


def train_forever(folder: str, durable: bool, seed: int) -> None:
    """The child: rounds of models in any order, committed at once or before the next one of that model begins."""
    rng = np.random.default_rng(seed)
    heap = heap_over(cv.FileStore(folder, durable=durable))
    models: dict[int, cv.Model] = {}
    waiting: set[int] = set()

    def commit(number: int) -> None:
        models[number].commit()
        waiting.discard(number)
        tell(COMMITTED, number, models[number].facts["epochs"])

    for number in range(MODELS):
        name = f"model {number}"
        if name in heap:
            models[number] = heap.open(name)
        else:
            tell(BEGIN, number, 0)
            models[number] = load(heap, number)
        commit(number)
    while True:
        number = int(rng.integers(MODELS))
        if number in waiting:
            commit(number)
        tell(BEGIN, number, models[number].facts["epochs"] + 1)
        if train_round(models[number], number):
            tell(COMMITTED, number, models[number].facts["epochs"])
        elif rng.random() < 0.7:
            commit(number)
        else:
            waiting.add(number)


def kills(count: int, seed: int = 0, verbose: bool = True) -> Counter[str]:
    """Kill ``count`` children; what was found, of which `HARMS` must not be."""
    rng, counts = np.random.default_rng(seed), Counter[str]()
    rounds: dict[bytes, dict[int, int]] = {BEGIN: {}, COMMITTED: {}}
    alone = Alone()
    for number in range(MODELS):  # what children run is compiled, or they would be killed while they do that
        alone.after(number, 1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for kill in range(count):
            arguments = [folder, str(kill % 2), str(seed + kill)]
            child = subprocess.Popen(
                [sys.executable, "-m", "tests.store_faults", "--child", *arguments],
                cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
            told = killed(child, rng)
            for line in told.splitlines():
                what, number, done = line.split()
                rounds[what][int(number)] = int(done)
            counts["kills"] += 1
            counts["kills while writing"] += any(map(unfinished, Path(folder).rglob("*.model*")))
            examine(folder, rounds, alone, counts)
    counts["rounds"] = sum(rounds[COMMITTED].values())
    if verbose:
        report(counts, began, seed)
    return counts


def killed(child: subprocess.Popen[bytes], rng: np.random.Generator) -> bytes:
    """Kill a child at a random moment; what it told until then."""
    assert child.stdout is not None and child.stderr is not None
    with child.stdout as out, child.stderr as err:
        told = b""
        if rng.random() < 0.9:  # else anywhere from its start on
            told = os.read(out.fileno(), 1 << 16)
        until = time.monotonic() + rng.random() * LONGEST_SECONDS
        while (left := until - time.monotonic()) > 0:
            if select.select([out], [], [], left)[0]:
                data = os.read(out.fileno(), 1 << 16)
                if not data:
                    break
                told += data
        child.kill()
        told += out.read()
        if child.wait() != -9:
            raise RuntimeError(f"the child ended by itself ({child.returncode}): {err.read().decode()}")
    return told


class Alone:
    """Each model in a heap of its own that it never leaves, trained as far as is asked."""

    def __init__(self) -> None:
        self._models: dict[int, cv.Model] = {}

    def after(self, number: int, rounds: int) -> cv.Model:
        if number not in self._models or self._models[number].facts["epochs"] > rounds:
            self._models[number] = load(cv.CalcHeap("1 MiB"), number)
        model = self._models[number]
        while model.facts["epochs"] < rounds:
            train_round(model, number)
        return model


def state(model: cv.Model) -> list[bytes]:
    """All that a model is, in the middle of an accumulation its gradient too; without the padding between."""
    with model:
        slot = model.slot
        kept = [s for s in persistent(model.program).values() if s.kind != "gradient" or model.record.open]
        return [slot.elements[s.offset : s.offset + s.elems.b].tobytes() for s in kept]


def unfinished(path: Path) -> bool:
    """Whether a model's file is being written: a new one, or a version of which the header, its end, is not there yet."""
    if path.suffix == ".tmp":
        return True
    found = versions.Heads.of(path.read_bytes()[: versions.BODY]).versions
    return len(found) == 1 and found[0].number > 1


def examine(folder: str, rounds: dict[bytes, dict[int, int]], alone: Alone, counts: Counter[str]) -> None:
    """Open every model of a store as a new process would; continue ``rounds`` from what is there."""
    store = cv.FileStore(folder, durable=False)
    counts["left over"] += len([*Path(folder).rglob("*.tmp")])
    with heap_over(store) as heap:
        for number in range(MODELS):
            name = f"model {number}"
            begun, committed = rounds[BEGIN].get(number, -1), rounds[COMMITTED].get(number, -1)
            if name not in heap:
                counts["lost"] += committed >= 0
                continue
            try:
                model = heap.open(name)
                done = model.facts["epochs"]
                before = previous(store, name, done)
            except cv.CalcError as error:
                print(error, flush=True)
                counts["corrupt"] += 1
                continue
            counts["opened"] += 1
            counts["at the round in flight"] += done > committed
            counts["behind"] += not (committed <= done <= max(begun, committed) <= committed + 1) or done - before > 1
            same = alone.after(number, done)
            x = np.random.default_rng(number).standard_normal((5, N_INPUTS))
            predictions = [m.predict(x) for m in (model, same)]
            counts["differing"] += state(model) != state(same) or not np.array_equal(*predictions)
            rounds[BEGIN][number] = rounds[COMMITTED][number] = done


def previous(store: cv.FileStore, name: str, done: int) -> int:
    """Rounds of the version before the last one, which is gone where a new one was being written."""
    try:
        return store.get(name, previous=True)[0]["epochs"]
    except cv.CalcError as error:
        if "no previous version" not in str(error):
            raise
        return done


# ---------------------------------------------------------------- flips
def flips(count: int, seed: int = 0, verbose: bool = True) -> Counter[str]:
    """Damage ``count`` files; how many were refused by name (``refused``), or have the last version's bits (``unharmed``)."""
    rng, counts, began = np.random.default_rng(seed), Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        first, whole = (train_some(folder, rounds) for rounds in (4, 1))
        store = cv.FileStore(folder, durable=False)
        kept = {path: store.get(name_of(path)) for path in whole}
        paths = sorted(whole)
        with heap_over(store) as heap:
            for _ in range(count):
                path = paths[rng.integers(len(paths))]
                name = name_of(path)
                data = damaged(whole[path], first[path], rng)
                path.write_bytes(data)
                counts["damaged"] += 1
                try:
                    heap.open(name).close()
                    same = store.get(name) == kept[path]
                    if not same:
                        print(f"{path.name}: {len(data)} bytes were accepted", flush=True)
                    counts["unharmed" if same else "corrupt"] += 1
                except cv.ProgramError as error:
                    counts["refused"] += str(path) in str(error)
                path.write_bytes(whole[path])
            for name in heap.names:
                heap.open(name).close()
                counts["lost"] += store.get(name, previous=True)[0]["epochs"] != 4
    if verbose:
        report(counts, began, seed)
    return counts


def name_of(path: Path) -> str:
    return path.stem.replace("%20", " ")


def train_some(folder: str, rounds: int) -> dict[Path, bytes]:
    """Train models for more rounds; their files."""
    with heap_over(cv.FileStore(folder, durable=False)) as heap:
        for number in range(MODELS):
            name = f"model {number}"
            model = heap.open(name) if name in heap else load(heap, number)
            for _ in range(rounds):
                train_round(model, number)
                model.commit()
    return {path: path.read_bytes() for path in Path(folder, "models").glob("*.model")}


def damaged(data: bytes, previous: bytes, rng: np.random.Generator) -> bytes:
    """Other bytes than both states of a file."""
    while True:
        out = np.frombuffer(data, np.uint8).copy()
        at = int(rng.integers(len(out)))
        kind = rng.integers(8)
        if kind < 3:
            out[at] ^= 1 << rng.integers(8)
        elif kind == 3:
            out[rng.integers(len(out), size=rng.integers(2, 20))] ^= np.uint8(1 << rng.integers(8))
        elif kind == 4:
            out = out[:at]
        elif kind == 5:
            out = np.append(out, np.frombuffer(rng.bytes(at + 1), np.uint8))
        elif kind == 6:
            out[at : at + 512] = 0
        else:
            out = np.frombuffer(data[:at] + previous[at:], np.uint8)
        if out.tobytes() not in (data, previous):
            return out.tobytes()


# ---------------------------------------------------------------- the outcome
def harmless(counts: Counter[str]) -> bool:
    return not any(counts[harm] for harm in HARMS) and counts["refused"] + counts["unharmed"] == counts["damaged"]


def report(counts: Counter[str], began: float, seed: int) -> None:
    told = ", ".join(f"{n} {what}" for what, n in counts.items())
    print(f"{told} ({time.monotonic() - began:.1f} s, seed {seed})", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        train_forever(sys.argv[2], sys.argv[3] == "1", int(sys.argv[4]))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = kills(options.kills, options.seed), flips(options.flips, options.seed)
    sys.exit(0 if all(map(harmless, found)) else 1)

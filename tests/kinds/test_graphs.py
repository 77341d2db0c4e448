"""Generated graphs: right to rounding, and the same bits for any team, any order of calls, and in any batch.

In `make test` a sample; ``pytest --whole tests/kinds/test_graphs.py`` runs 1 500.  A failing graph is cut down to what
fails still, and printed: ``generate(seed)`` draws the whole one again.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest

import calcvm as cv

pytest.importorskip("torch")

from tests.cuda.conftest import gpu  # noqa: F401 (a fixture)
from tests.kinds.graphs import Case, Twin, Unclear, generate
from tests.kinds.races import plain

SAMPLE, WHOLE = 100, 1_500
TEAMS = (2, 3, 5)
STEPS = 3
RIGHT = 1e-9  # of the largest element of an array, or of 1e-3
CHUNK = 50  # graphs of a process at a time
SHRINK_SECONDS = 30.0  # at most, of a failing graph

Told = list[tuple[str, dict[str, np.ndarray]]]  # what happened, and what could be read then


# ---------------------------------------------------------------- runs
def schedule(case: Case) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Paths to run, and for each round its batch and the draw of its data."""
    for k in range(STEPS):
        batch = case.batch if k != 1 else max(1, case.batch - 1)
        for path in range(len(case.paths)):
            more = case.accumulate and path in case.trains
            yield path, [(batch, k), *[(max(1, case.batch // 2), k + 9)] * more]


class Ours:
    """A case's model, driven by the calls that a user has."""

    def __init__(self, case: Case, program: cv.Program, workers: int = 1):
        self.case, self.names, variables = case, case.names, program.info["variables"]
        self.model = cv.CalcHeap(program.heap_bytes, device=program.info["device"]).create(
            program, seed=0, workers=workers
        )
        self.own = [
            [s.key for s in case.steps if s.path == p and not variables[self.names[s.key]]["unreadable"]]
            for p in range(len(case.paths))
        ]

    def feed(self, path: int, batch: int, draw: int) -> None:
        data = self.case.inputs(batch, draw)
        for name in self.model.loaded.feeds(self.case.paths[path]):
            self.model[name] = data[name]

    def forward(self, path: int, batch: int, draw: int) -> dict[str, np.ndarray]:
        self.feed(path, batch, draw)
        self.model.run_round(self.case.paths[path])
        return {self.names[k]: np.asarray(self.model[self.names[k]]) for k in self.own[path]}

    def backward(self, path: int) -> dict[str, np.ndarray]:
        name = self.case.paths[path]
        self.model.backward(name)
        gradients = self.model.loaded.training(name)["gradients"]
        return {n: self.model.grad(n, name) for n, where in gradients.items() if where is not None}

    def optimize(self, path: int) -> dict[str, np.ndarray]:
        name = self.case.paths[path]
        self.model.optimize(name)
        self.model.end_round(name)
        return self.parameters()

    def parameters(self) -> dict[str, np.ndarray]:
        return {n: self.model[n] for n in self.model.program.info["parameters"]}


def run(case: Case, ours: Ours, between: Callable[[], object] = lambda: None) -> Told:
    """Three steps of every path by hand, and all that can be read on the way."""
    told: Told = []
    for path, rounds in schedule(case):
        for batch, draw in rounds:
            told.append((f"{case.paths[path]!r} forward, batch {batch}", ours.forward(path, batch, draw)))
            if path in case.trains:
                told.append((f"{case.paths[path]!r} backward, batch {batch}", ours.backward(path)))
        if path in case.trains:
            told.append((f"{case.paths[path]!r} optimize", ours.optimize(path)))
        between()
    return told


def twins(case: Case) -> Iterator[dict[str, np.ndarray]]:
    """The same by PyTorch, up to where it comes too near to a kink."""
    twin = Twin(case)

    def named(values: Mapping[int, Any]) -> dict[str, np.ndarray]:
        return {case.names[k]: v.detach().numpy().copy() for k, v in values.items()}

    with suppress(Unclear):
        for path, rounds in schedule(case):
            for batch, draw in rounds:
                values = twin.forward(path, batch, draw)
                yield named(values)
                if path in case.trains:
                    twin.backward(path, values)
                    yield named(twin.gradients[path])
            if path in case.trains:
                twin.optimize(path)
                yield named(twin.parameters)


def run_whole(case: Case, ours: Ours, by_hand: bool) -> Told:
    """One round a step, in whole steps or by hand; the parameters at the end."""
    for path, [(batch, draw), *_] in schedule(case):
        if by_hand:
            ours.forward(path, batch, draw)
            if path in case.trains:
                ours.backward(path)
                ours.optimize(path)
        else:
            ours.feed(path, batch, draw)
            ours.model.run_steps(1, case.paths[path])
    return [("the end", ours.parameters())]


# ---------------------------------------------------------------- comparisons
def right(where: str, ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> int:
    """Ours are theirs, but for rounding; how many."""
    for name, mine in ours.items():
        expected = theirs[name]
        assert mine.shape == expected.shape, f"{where}: {name!r} has shape {mine.shape}, PyTorch {expected.shape}"
        scale = max(1e-3, np.abs(expected).max(initial=0.0))
        error = np.abs(mine - expected).max(initial=0.0) / scale
        assert error <= RIGHT, f"{where}: {name!r} is off by {error:.2e} of {scale:.2e}\n{mine}\nPyTorch\n{expected}"
    return len(ours)


def same_bits(what: str, ours: Told, theirs: Told) -> None:
    for (where, mine), (_, other) in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name, a in mine.items():
            b = other[name]
            assert plain(a).tobytes() == plain(b).tobytes(), f"{what}: {where}: {name!r} differs\n{a}\n{b}"


def compare_batches(case: Case, ours: Ours) -> None:
    """Every batch computes what PyTorch does, right after a larger one too, and a sample's bits depend on no other.

    A library's products may add up in another order for another number of rows: there bits are not compared.
    """
    alike = ours.model.program.info["device"] != "blas"
    twin = Twin(case)
    for path in range(len(case.paths)):
        largest: dict[str, np.ndarray] = {}
        for batch in range(case.batch, 0, -1):
            with suppress(Unclear):
                values = twin.forward(path, batch, 5)
                expected = {case.names[k]: v.detach().numpy() for k, v in values.items()}
                found = ours.forward(path, batch, 5)
                right(f"{case.paths[path]!r} forward, batch {batch}", found, expected)
                for name, mine in found.items() if alike and batch > 1 else ():
                    alone, whole = expected[name], largest.get(name)
                    if whole is not None and alone.ndim and len(alone) == batch and name in case.samples:
                        assert plain(mine).tobytes() == plain(whole[:batch]).tobytes(), (
                            f"{case.paths[path]!r}: {name!r} in a batch of {batch}\n{mine}\nand of {case.batch}\n{whole}"
                        )
                if batch == case.batch:
                    largest = found


def check(case: Case, teams: Sequence[int] = TEAMS, device: str = "cpu") -> Counter[str]:
    """All that holds for a graph; returns what was done."""
    program = case.compile(workers=max(teams, default=1), device=device)

    def fresh(workers: int = 1) -> Ours:
        return Ours(case, program, workers)

    first = run(case, fresh())
    arrays = sum(right(where, mine, theirs) for (where, mine), theirs in zip(first, twins(case)))
    compare_batches(case, fresh())
    for workers in teams:
        same_bits(f"{workers} workers", run(case, fresh(workers)), first)
    other, rest = fresh(), [p for p in range(len(case.paths)) if p not in case.trains]
    same_bits("other paths between", run(case, other, lambda: [other.forward(p, 1, 3) for p in rest]), first)
    same_bits("whole steps", run_whole(case, fresh(), by_hand=False), run_whole(case, fresh(), by_hand=True))
    return Counter(graphs=1, operators=len(case.steps), paths=len(case.paths), training=len(case.trains), arrays=arrays)


def failure(case: Case, **options: Any) -> str:
    """Why a graph fails (nothing: it does not)."""
    try:
        check(case, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def shrunk(case: Case, until: float, **options: Any) -> Case:
    """A part of a failing graph that fails still: a small one, where there is time."""
    for step in reversed(case.steps):
        less = case.without(step.key) if time.monotonic() < until else None
        if less is not None and failure(less, **options):
            return shrunk(less, until, **options)
    return case


def check_all(seeds: range, every_team: bool, device: str = "cpu") -> tuple[Counter[str], list[str]]:
    """What was done over the graphs of seeds up to one that fails, and the part of that one that fails."""
    done, failed = Counter[str](), []
    for seed in seeds:
        case = generate(seed)
        teams = (
            () if device == "blas" else TEAMS if every_team else TEAMS[seed % 3 :][:1]
        )  # BLAS has threads of its own
        options: dict[str, Any] = {"teams": teams, "device": device}
        try:
            done += check(case, **options)
        except Exception:
            part = shrunk(case, time.monotonic() + SHRINK_SECONDS, **options)
            failed.append(f"{failure(part, **options)}\n{part.text}")
            break
    return done, failed


# ---------------------------------------------------------------- tests
def over(n: int, every_team: bool, device: str = "cpu") -> Counter[str]:
    """Check the graphs of the first ``n`` seeds, by all cores where they are many."""
    chunks = [range(i, min(i + CHUNK, n)) for i in range(0, n, CHUNK)]
    if n <= 300:
        found = [check_all(chunk, every_team, device) for chunk in chunks]
    else:
        with get_context("spawn").Pool(os.cpu_count(), maxtasksperchild=4) as pool:
            found = pool.starmap(check_all, [(chunk, every_team, device) for chunk in chunks], chunksize=1)
    failed = [text for _, texts in found for text in texts]
    assert not failed, f"graphs in {len(failed)} of {len(chunks)} ranges of seeds fail:\n\n" + "\n\n".join(failed[:5])
    total = sum((done for done, _ in found), Counter[str]())
    assert total["graphs"] == n and total["training"] > 0.6 * n and total["arrays"] > 20 * n, total
    print(dict(total))
    return total


def test_generated_graphs_agree_with_pytorch_and_with_themselves(whole):
    over(WHOLE if whole else SAMPLE, every_team=whole)


def test_generated_graphs_on_blas(whole):
    pytest.importorskip("scipy")
    over(100 if whole else 2, every_team=False, device="blas")


def test_generated_graphs_on_a_simulated_gpu(whole, gpu):  # noqa: F811
    over(300 if whole else 3, every_team=False, device="cuda")

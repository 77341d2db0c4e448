"""Generated graphs: right to rounding, and the same bits for any team, any order of calls, and in any batch.

In `make test` a sample; ``pytest --whole tests/kinds/test_graphs.py`` runs 10 000.  A failing graph is cut down to what
fails still, and printed: ``generate(seed)`` draws the whole one again.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest

import calcvm as cv

pytest.importorskip("torch")

from tests.kinds.graphs import Case, Twin, Unclear, generate

SAMPLE, WHOLE = 150, 10_000
TEAMS = (1, 2, 3, 5)
STEPS = 3
RIGHT = 1e-9  # of the largest element of an array, or of 1e-3
CHUNK = 50  # graphs of a process at a time

Record = list[tuple[str, np.ndarray]]


# ---------------------------------------------------------------- what is told of a run, by either side
def schedule(case: Case) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Paths to run, and for each round its batch and the draw of its data."""
    for k in range(STEPS):
        batch = case.batch if k != 1 else max(1, case.batch - 1)
        for path in range(len(case.paths)):
            rounds = [(batch, k)] + [(max(1, case.batch // 2), k + 9)] * (case.accumulate and path in case.trains)
            yield path, rounds


class Ours:
    """A case's model, driven through the calls that a user has."""

    def __init__(self, case: Case, program: cv.Program, workers: int = 1):
        self.case, self.names = case, case.names()
        self.model = cv.CalcHeap(program.heap_bytes).load(program, seed=0, workers=workers)
        self.readable = {k for k, n in self.names.items() if not program.info["variables"][n]["unreadable"]}
        self.own = {p: [s.key for s in case.steps if s.path == p and s.key in self.readable] for p in range(len(case.paths))}

    def feed(self, path: int, batch: int, draw: int) -> None:
        data = self.case.inputs(batch, draw)
        for name in self.model.binding.feeds(self.case.paths[path]):
            self.model[name] = data[name]

    def forward(self, path: int, batch: int, draw: int) -> Record:
        self.feed(path, batch, draw)
        self.model.run_round(self.case.paths[path])
        return [(f"%{k}", np.asarray(self.model[self.names[k]])) for k in self.own[path]]

    def backward(self, path: int) -> Record:
        name = self.case.paths[path]
        self.model.backward(name)
        gradients = self.model.binding.training(name)["gradients"]
        return [(f"grad {n}", self.model.grad(n, name)) for n, where in gradients.items() if where is not None]

    def optimize(self, path: int) -> Record:
        name = self.case.paths[path]
        self.model.optimize(name)
        self.model.end_round(name)
        return self.parameters()

    def parameters(self) -> Record:
        return [(n, self.model[n]) for n in self.model.program.info["parameters"]]


def run(case: Case, ours: Ours, between: Callable[[], object] = lambda: None) -> Record:
    """Three steps of every path by hand, and all that can be read on the way."""
    told: Record = []
    for path, rounds in schedule(case):
        for batch, draw in rounds:
            told += ours.forward(path, batch, draw)
            if path in case.trains:
                told += ours.backward(path)
        if path in case.trains:
            told += ours.optimize(path)
        between()
    return told


def run_whole(case: Case, ours: Ours, by_hand: bool) -> Record:
    """The same of one round each, in whole steps or by hand."""
    for path, [(batch, draw), *_] in schedule(case):
        if by_hand:
            ours.forward(path, batch, draw)
            if path in case.trains:
                ours.backward(path)
                ours.optimize(path)
        else:
            ours.feed(path, batch, draw)
            ours.model.run_steps(1, case.paths[path])
    return ours.parameters()


def compare_with_twin(case: Case, ours: Ours) -> int:
    """Compare a run with PyTorch's; returns how many arrays, up to where the twin comes too near to a kink."""
    twin, names, compared = Twin(case), case.names(), 0
    keys = {name: key for key, name in names.items()}

    def same(what: str, mine: np.ndarray, theirs: Any) -> None:
        nonlocal compared
        expected = theirs.detach().numpy()
        assert mine.shape == expected.shape, f"{what}: shape {mine.shape}, PyTorch {expected.shape}"
        scale = max(1e-3, np.abs(expected).max(initial=0.0))
        error = np.abs(mine - expected).max(initial=0.0) / scale
        assert error <= RIGHT, f"{what}: off by {error:.2e} of {scale:.2e}\n{mine}\nPyTorch\n{expected}"
        compared += 1

    try:
        for path, rounds in schedule(case):
            for batch, draw in rounds:
                values = twin.forward(path, batch, draw)
                for what, mine in ours.forward(path, batch, draw):
                    same(f"{case.paths[path]}: {what} (batch {batch})", mine, values[int(what[1:])])
                if path in case.trains:
                    twin.backward(path, values)
                    gradients = dict(ours.backward(path))
                    for key, expected in twin.gradients[path].items():
                        if f"grad {names[key]}" in gradients:
                            same(f"{case.paths[path]}: grad {names[key]!r}", gradients[f"grad {names[key]}"], expected)
            if path in case.trains:
                twin.optimize(path)
                for what, mine in ours.optimize(path):
                    same(f"{case.paths[path]}: updated {what!r}", mine, twin.parameters[keys[what]])
    except Unclear:
        pass
    return compared


def same_bits(what: str, ours: Record, theirs: Record) -> None:
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    for (name, a), (_, b) in zip(ours, theirs):
        assert a.tobytes() == b.tobytes(), f"{what}: {name} differs\n{a}\n{b}"


def compare_batches(case: Case, ours: Ours) -> None:
    """Every batch computes what PyTorch does, also right after a larger one."""
    for path in range(len(case.paths)):
        for batch in range(case.batch, 0, -1):
            try:
                expected = Twin(case).forward(path, batch, 5)
            except Unclear:
                continue
            for what, mine in ours.forward(path, batch, 5):
                theirs = expected[int(what[1:])].detach().numpy()
                scale = max(1e-3, np.abs(theirs).max(initial=0.0))
                assert mine.shape == theirs.shape and np.abs(mine - theirs).max(initial=0.0) <= RIGHT * scale, (
                    f"{case.paths[path]}: {what}, batch {batch}\n{mine}\nPyTorch\n{theirs}"
                )


# ---------------------------------------------------------------- one graph
def check(case: Case, teams: tuple[int, ...] = TEAMS, device: str = "cpu") -> Counter[str]:
    """All that holds for a graph; returns what was done."""
    program = case.compile(workers=max(teams), device=device)
    compared = compare_with_twin(case, Ours(case, program))
    compare_batches(case, Ours(case, program))
    first = run(case, Ours(case, program))
    for workers in teams[1:]:
        same_bits(f"{workers} workers", run(case, Ours(case, program, workers)), first)
    forward_only = [p for p in range(len(case.paths)) if p not in case.trains]
    other = Ours(case, program)
    same_bits("other paths between", run(case, other, lambda: [other.forward(p, 1, 3) for p in forward_only]), first)
    steps = run_whole(case, Ours(case, program), by_hand=False)
    same_bits("whole steps", steps, run_whole(case, Ours(case, program), by_hand=True))
    return Counter(graphs=1, operators=len(case.steps), paths=len(case.paths), training=len(case.trains), arrays=compared)


def failure(case: Case, **options: Any) -> str:
    """Why a graph fails ("" : it does not)."""
    try:
        check(case, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def shrunk(case: Case, **options: Any) -> Case:
    """A part of a failing graph that fails still."""
    smaller = True
    while smaller:
        smaller = False
        for step in reversed(case.steps):
            less = case.without(step.key)
            if less is not None and failure(less, **options):
                case, smaller = less, True
                break
    return case


def check_all(seeds: range, **options: Any) -> tuple[Counter[str], list[str]]:
    """What was done over the graphs of seeds, and the parts of them that fail."""
    done, failed = Counter[str](), []
    for seed in seeds:
        try:
            done += check(generate(seed), **options)
        except Exception:
            part = shrunk(generate(seed), **options)
            failed.append(f"{failure(part, **options)}\n{part.text}")
    return done, failed


# ---------------------------------------------------------------- tests
def over(n: int, **options: Any) -> Counter[str]:
    """Check the graphs of the first ``n`` seeds, by all cores where they are many."""
    chunks = [range(i, min(i + CHUNK, n)) for i in range(0, n, CHUNK)]
    total, failed = Counter[str](), []
    if len(chunks) <= 4:
        found = [check_all(chunk, **options) for chunk in chunks]
    else:
        with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), max_tasks_per_child=4) as pool:
            found = [f.result() for f in [pool.submit(check_all, chunk, **options) for chunk in chunks]]
    for done, errors in found:
        total += done
        failed += errors
    assert not failed, f"{len(failed)} of {n} graphs fail:\n\n" + "\n\n".join(failed[:5])
    assert total["graphs"] == n
    return total


def test_generated_graphs_agree_with_pytorch_and_with_themselves(whole):
    total = over(WHOLE if whole else SAMPLE)
    assert total["training"] > 0.6 * total["graphs"] and total["arrays"] > 20 * total["graphs"], total
    print(dict(total))

"""The default team beside one worker on a busy machine: networks, ways of calling, busy processes on each core.

Contestants take turns on the same work: a default model (*default*), one with one worker (*one*), and the latter again
(*again*), which shows how much two equal runs differ.  *x* is the ratio of the medians.  Busy processes count in a loop,
each pinned to a core.  A model has the same bits by one worker and by default; this is checked for each network.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

import calcvm as cv
from bench.harness import Result, interleave, number
from calcvm import nn
from calcvm.vm.run import job as J

LOADS, TURNS = (0, 1, 2, 5), 7  # busy processes on each core
TURN_SECONDS, START_SECONDS = 0.04, 0.3  # of a turn on an idle machine; of busy processes before the first turn
CALLS = ("run_steps", "step", "predict", "fit", "short epochs")
ROUNDS, EPOCHS = 10, 60  # per epoch; in "short epochs", which is one call
SHORT_SECONDS = 0.2  # of that call by one worker; with long steps it has fewer epochs, at least two
SPIN = """import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
while os.getppid() == int(sys.argv[2]):
    for _ in range(10**6):
        pass"""
LIMIT, IDLE_LIMIT = 1.25, 1.05


def mlp(*sizes: int) -> Any:
    """Layers with ReLU between them, and the shape of a sample."""
    net: Any = nn.Linear(sizes[1])
    for width in sizes[2:]:
        net = net >> nn.ReLU() >> nn.Linear(width)
    return net, sizes[:1]


def autoencoder() -> Any:
    """A variational autoencoder 64-128-8-128-64 as a graph; its noise is an input."""
    g = cv.CalcGraph()
    x, noise, target = (g.placeholder(name, (None, n)) for name, n in (("x", 64), ("noise", 8), ("target", 64)))
    body, mean, spread = nn.Linear(128) >> nn.ReLU(), nn.Linear(8), nn.Linear(8)
    decode = nn.Linear(128) >> nn.ReLU() >> nn.Linear(64)
    for path in ("learn", "predict"):
        with g.path(path, backward=path == "learn") as p:
            h = body.build(x, "body.", path == "learn")
            m, v = mean.build(h, "mean.", path == "learn"), spread.build(h, "spread.", path == "learn")
            y = decode.build(m + cv.exp(v * 0.5) * noise, "decode.", path == "learn")
            if path == "learn":
                divergence = cv.mean(cv.square(m) + cv.exp(v) - v - 1.0)
                p.minimize(cv.mse(y, target) + 0.01 * divergence, cv.Adam(1e-3))
            else:
                p.output = y
    return g, ((64,), (8,))


def convolutional() -> Any:
    return nn.Conv2d(8, 3) >> nn.ReLU() >> nn.MaxPool2d(2) >> nn.Flatten() >> nn.Linear(10), (1, 28, 28)


def serial() -> Any:
    """Rows over one sample, which only one worker can compute."""
    return nn.LayerNorm() >> nn.GELU() >> nn.Tanh() >> nn.SiLU() >> nn.Linear(1), (32768,)


NETWORKS: dict[str, tuple[Callable[[], Any], int]] = {
    "64-128-64-10, batch 64": (partial(mlp, 64, 128, 64, 10), 64),
    "784-128-10, batch 32": (partial(mlp, 784, 128, 10), 32),
    "100-256-256-4, batch 128": (partial(mlp, 100, 256, 256, 4), 128),
    "784-64-64-10, batch 256": (partial(mlp, 784, 64, 64, 10), 256),
    "VAE 64-128-8-128-64, batch 64": (autoencoder, 64),
    "convolutional, batch 32": (convolutional, 32),
    "784-64-64-10, batch 4096": (partial(mlp, 784, 64, 64, 10), 4096),
    "serial rows, batch 1": (serial, 1),
}


class Case:
    """A network, trained by a number of workers (None: the default), and its ways of calling."""

    def __init__(self, network: str, workers: int | None):
        make, batch = NETWORKS[network]
        (net, shape), rng = make(), np.random.default_rng(0)
        several = isinstance(net, cv.CalcGraph)
        options: dict[str, Any] = {"batch_size": batch, "seed": 0, "workers": workers}
        if not several:
            classes = shape != (32768,)
            loss = "softmax_cross_entropy" if classes else "mse"
            options |= {"input_shape": shape, "loss": loss, "optimizer": cv.Adam(1e-3)}
        self.model = cv.Model(net, **options)
        n, shapes = ROUNDS * batch, shape if several else (shape,)
        self.inputs = tuple(rng.standard_normal((n, *s), np.float32) for s in shapes)
        if several:
            self.target: Any = self.inputs[0]
        else:
            self.target = rng.integers(0, 4, n) if classes else rng.standard_normal((n, 1), np.float32)
        self.first = tuple(x[:batch] for x in self.inputs), self.target[:batch]
        self.given: Any = self.first[0] if several else self.first[0][0]
        self.data: Any = self.inputs if several else self.inputs[0]
        self.epochs = EPOCHS
        self.step(1)

    def run_steps(self, n: int) -> None:
        self.step(1)
        self.model.run_steps(n)

    def step(self, n: int) -> None:
        model, inputs, target = self.model, *self.first
        for _ in range(n):
            model.step(*inputs, target)

    def predict(self, n: int) -> None:
        model, x = self.model, self.given
        for _ in range(n):
            model.predict(x)

    def fit(self, n: int) -> None:
        self.model.fit(self.data, self.target, epochs=max(1, n // ROUNDS), progress=False)

    def short_epochs(self, n: int) -> None:
        self.model.fit(self.data, self.target, epochs=self.epochs, progress=False)

    def run(self, call: str, n: int) -> float:
        """Seconds of a call, made or repeated n times."""
        run = getattr(self, call.replace(" ", "_"))
        start = time.perf_counter()
        run(n)
        return time.perf_counter() - start


@contextmanager
def busy(each: int) -> Iterator[None]:
    """Run processes on each of this process's cores that only count."""
    cores = sorted(os.sched_getaffinity(0))
    command = [sys.executable, "-S", "-c", SPIN]
    running = [subprocess.Popen([*command, str(core), str(os.getpid())]) for core in cores for _ in range(each)]
    time.sleep(START_SECONDS if each else 0.0)
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def repeats(one: Case, call: str) -> int:
    """Calls per turn, from the CPU time that a call takes one worker."""
    n, took = ROUNDS, 0.0
    while took < TURN_SECONDS / 4:
        n, start = 2 * n, time.thread_time()
        one.run(call, n)
        took = time.thread_time() - start
    return max(1, int(n * TURN_SECONDS / took))


def measure(
    network: str, loads: Sequence[int] = LOADS, calls: Sequence[str] = CALLS, turns: int = TURNS
) -> dict[tuple[int, str], list[float]]:
    """Median seconds of a call by default, by one worker and by one again, by load and call."""
    default, one = Case(network, None), Case(network, 1)
    one.epochs = default.epochs = max(2, min(EPOCHS, int(SHORT_SECONDS / one.run("fit", ROUNDS))))
    n, found = {call: repeats(one, call) for call in calls}, {}
    time.sleep(J.MOST_PENALTY / 1e9)  # until teams have recovered from the last network's busy processes
    for each in loads:
        with busy(each):
            for call in calls:
                for case in (default, one):
                    case.run(call, n[call] // 4 + 1)
                who = {"default": default, "one": one, "again": one}
                times = interleave({name: partial(case.run, call, n[call]) for name, case in who.items()}, turns)
                found[each, call] = [statistics.median(t) / n[call] for t in times.values()]
    return found


def equal(network: str) -> bool:
    """Whether a network learns the same bits by default and by one worker, with busy processes on the cores."""
    default, one = Case(network, None), Case(network, 1)
    with busy(2):
        for case in (default, one):
            case.run("run_steps", 20 * ROUNDS)
            case.run("fit", ROUNDS)
    return all(np.array_equal(default.model.parameters[name], p) for name, p in one.model.parameters.items())


def main(quick: bool = False) -> bool:
    """Run the workload; True if all bits are equal."""
    result, worst = Result("busy", "A busy machine", quick), dict[int, float]()
    for network in [*NETWORKS][: 1 if quick else None]:
        found = measure(network, LOADS[::2] if quick else LOADS, CALLS, 2 if quick else TURNS)
        if not equal(network):
            result.fail(f"{network}: one worker has learnt other bits")
        for (each, _), times in found.items():
            worst[each] = max(worst.get(each, 0.0), times[0] / times[1])
        rows = [
            [str(each), call, *(number(1e6 * t) for t in times), *(f"{t / times[1]:.2f}" for t in times[::2])]
            for (each, call), times in found.items()
        ]
        result.table(network, ["busy a core", "call", "default, us", "one", "again", "x", "again, x"], rows)
    for each, x in worst.items():
        what = f"default over one worker, {each} busy processes a core, the worst of {len(NETWORKS) * len(CALLS)}"
        result.target("P13", what, x, LIMIT if each else IDLE_LIMIT, "x", at_most=True)
    return result.save()

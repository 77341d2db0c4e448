"""What the tests on a GPU train: the paper's network, in each of the ways that a program is run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

import calcvm as cv
from calcvm import nn
from calcvm.vm.run.cuda.device import SIMULATOR

SMALL = os.environ.get(SIMULATOR) == "1"  # to try the tests out where there is no GPU
SIZES, BATCH, STEPS = ([5, 4, 3], 4, 6) if SMALL else ([784, 64, 64, 10], 128, 100)
BATCHES = 3 if SMALL else 5  # of the data
OPTIMIZERS = {
    "sgd": cv.SGD(0.05),
    "sgd decay": cv.SGD(0.05, weight_decay=0.01),
    "momentum": cv.SGD(0.05, momentum=0.9),
    "nesterov": cv.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": cv.Adam(1e-3),
    "adam clipped": cv.Adam(1e-3, clip_norm=0.5, clip_value=0.1),
    "adamw": cv.AdamW(1e-3, weight_decay=0.05),
    "adamhat": cv.AdamHat(1e-3),
    "rmsprop": cv.RMSProp(1e-3),
    "rmsprop momentum": cv.RMSProp(5e-4, momentum=0.9),
    "adagrad": cv.Adagrad(0.01),
}
MODES: dict[str, dict[str, Any]] = {
    "one block": dict(mode="grid", workers=1),
    "all blocks": dict(mode="grid", workers=3 if SMALL else 132),
    "graph": dict(mode="graph"),
    "fleet": dict(mode="fleet"),
}


def data(n: int = BATCH * BATCHES) -> tuple[np.ndarray, np.ndarray]:
    """Samples of classes with a prototype each."""
    rng = np.random.default_rng(3)
    y = rng.integers(0, SIZES[-1], n)
    prototypes = rng.standard_normal((SIZES[-1], SIZES[0])) * 4 / np.sqrt(2 * SIZES[0])
    return (rng.standard_normal((n, SIZES[0])) + prototypes[y]).astype(np.float32), y


def network(activation: Any = nn.Sigmoid, dropout: float = 0.0) -> Any:
    net = nn.Linear(SIZES[1])
    for width in SIZES[2:]:
        net = net >> activation() >> (nn.Dropout(dropout) >> nn.Linear(width) if dropout else nn.Linear(width))
    return net


def compiled(device: str, optimizer: Any = None, net: Any = None, **how: Any) -> Any:
    graph = cv.build_graph(net or network(), (SIZES[0],), "softmax_cross_entropy", optimizer or cv.Adam(1e-3))
    return cv.compile(graph, **{"batch_size": BATCH, "accumulate": False, "device": device, **how})


def model_of(program: Any, seed: int = 1) -> Any:
    device = program.info["device"]
    return cv.CalcHeap(program.heap_bytes, device=device).create(program, seed=seed)


def stepped(program: Any, steps: int = STEPS) -> tuple[np.ndarray, Any]:
    """Losses of steps on batches in turn, and the model."""
    X, y = data()
    model = model_of(program)
    parts = [slice(k * BATCH, (k + 1) * BATCH) for k in range(BATCHES)]
    return np.array([model.step(X[p], y[p]) for p in (parts * steps)[:steps]]), model


def bits(model: Any) -> dict[str, bytes]:
    return {name: np.ascontiguousarray(value).tobytes() for name, value in model.parameters.items()}


def fleet_of(program: Any, seeds: Sequence[int] = (1,), memory: int | None = None, **how: Any) -> Any:
    """A fleet of models that differ by their seeds, on the same data."""
    room = memory or len(seeds) * (program.heap_bytes + 256)
    fleet = cv.Fleet(room, device=program.info["device"])
    X, y = data()
    for seed in seeds:
        fleet.add(program, data=(X, y), seed=seed, **{"shuffle": False, **how})
    return fleet

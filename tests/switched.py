"""Models of six programs take turns in one heap, beside each alone in another heap."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np

import calcvm as cv
from calcvm import nn
from calcvm.model import build_graph

N_INPUTS, N_CLASSES, BATCH = 9, 4, 12


@cache
def programs() -> dict[str, cv.Program]:
    """What differs in what must survive a switch: moments, random state, open gradients, schedules, float64, carries."""
    sigmoids = nn.Linear(24) >> nn.Sigmoid() >> nn.Linear(N_CLASSES)
    dropping = nn.Linear(32) >> nn.ReLU() >> nn.Dropout(0.4) >> nn.Linear(N_CLASSES)
    return {
        "adam": compiled(sigmoids, cv.Adam(1e-2)),
        "dropout": compiled(dropping, cv.SGD(0.05, momentum=0.9)),
        "rounds": compiled(nn.Linear(17) >> nn.Tanh() >> nn.Linear(N_CLASSES), cv.AdamW(1e-2), accumulate=True),
        "schedule": compiled(sigmoids, cv.RMSProp(0.01, schedule=cv.Cosine(40, warmup_steps=5), clip_norm=0.5)),
        "float64": compiled(sigmoids, cv.Adagrad(0.1), dtype="float64", workers=2),
        "carry": cv.compile(carrying(), batch_size=BATCH),
    }


def carrying() -> cv.CalcGraph:
    """A recurrent network that training moves on."""
    g = cv.CalcGraph()
    x, t = g.placeholder("input", (None, N_INPUTS)), g.placeholder("target", (None,))
    h = g.carry("h", (None, 16), init="ones")
    W, U, V = (
        g.parameter(name, shape) for name, shape in (("W", (N_INPUTS, 16)), ("U", (16, 16)), ("V", (16, N_CLASSES)))
    )
    with g.path("learn", backward=True) as learn:
        y = cv.carry(h, cv.tanh(x @ W + h @ U)) @ V
        learn.minimize(cv.softmax_cross_entropy(y, t), cv.Adam(1e-2), output=y)
    with g.path("predict") as predict:
        predict.output = cv.tanh(x @ W + h @ U) @ V
    return g


def compiled(net: nn.Layer, optimizer: cv.Optimizer, accumulate: bool = False, **options: Any) -> cv.Program:
    graph = build_graph(net, (N_INPUTS,), "softmax_cross_entropy", optimizer)
    return cv.compile(graph, batch_size=BATCH, accumulate=accumulate, **options)


def load(heap: cv.CalcHeap, number: int) -> cv.Model:
    """The model of a number: it chooses program and seed."""
    return heap.create(list(programs().values())[number % len(programs())], seed=number, name=f"model {number}")


def turn(model: cv.Model, number: int, k: int) -> list[float | None]:
    """A model's turn number ``k``: training of one kind or another, and what it tells."""
    rng = np.random.default_rng([number, k])
    n = int(rng.integers(1, BATCH + 1))
    x, y = rng.standard_normal((n, N_INPUTS)), rng.integers(0, N_CLASSES, n)
    if model.loaded.accumulating:
        with model:  # other threads must not take its place between these calls
            model["input"], model["target"] = x, y
            model.forward("learn")
            model.backward("learn")  # the gradient stays open over two turns of three
            told: list[float | None] = [float(model["loss"])]
        if k % 3 == 2:
            model.optimize("learn")
            model.end_round("learn")
        return told
    if k % 4 == 1:
        model.hyper("learn")["learning_rate"] *= 0.9
        return [model.step(x, y), model.step(x, y)]
    if k % 4 == 3:
        fitted = model
        history = fitted.fit(x, y, epochs=2, progress=False)
        return [*history["loss"], *fitted.predict(x).ravel().tolist()]
    return [model.step(x, y)]


def alone(number: int, turns: int) -> tuple[list[list[float | None]], bytes]:
    """What each turn tells of a model that has a heap to itself, and all that it is afterwards."""
    program = list(programs().values())[number % len(programs())]
    model = load(cv.CalcHeap(program.heap_bytes), number)
    told = [turn(model, number, k) for k in range(turns)]
    return told, contents(model)


def contents(model: cv.Model) -> bytes:
    """Parameters, state, moments and, in the middle of an accumulation, gradients."""
    with model:
        slot = model.slot
        return slot.bytes[slice(*(model.loaded.opened if model.record.open else model.loaded.image))].tobytes()


def differing(heap: cv.CalcHeap, models: int, order: Iterable[int]) -> list[str]:
    """Take ``models`` models through a heap, one turn each in ``order``; those whose bits are not those of `alone`."""
    loaded = [load(heap, i) for i in range(models)]
    told: list[list[list[float | None]]] = [[] for _ in loaded]
    for i in order:
        told[i].append(turn(loaded[i], i, len(told[i])))
    return [m.name for i, m in enumerate(loaded) if (told[i], contents(m)) != alone(i, len(told[i]))]


def small_heap(n_models: int = 2) -> int:
    """Bytes for so many of the largest of the models."""
    return n_models * max(p.heap_bytes for p in programs().values())


def random_order(models: int, turns: int, seed: int = 0) -> list[int]:
    """Numbers of models, never the same twice in a row."""
    rng = np.random.default_rng(seed)
    order = [0]
    while len(order) < turns:
        order.append((order[-1] + int(rng.integers(1, models))) % models)
    return order

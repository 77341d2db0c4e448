"""Forms of arguments: CPU time in microseconds of a call with data other than plain arrays of the planned sizes."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from time import process_time
from typing import Any

import numpy as np

from bench.harness import Result, number

SIZES, BATCH = (4, 8, 3), 8
HEADER = ("us a call, minimum", "step", "predict", "evaluate", 'run({"input": x})', 'model["input"] = x')
Calls = dict[str, Callable[[], Any]]


def calls(model: Any, x: Any, y: Any) -> Calls:
    """Every method, called with x and y."""
    return {
        "step": lambda: model.step(x, y), "predict": lambda: model.predict(x), "evaluate": lambda: model.evaluate(x, y),
        "run": lambda: model.run({"input": x}), "set": lambda: model.__setitem__("input", x),
    }  # fmt: skip


def forms() -> dict[str, Calls]:
    """Calls by the form of their arguments."""
    import calcvm as cv
    from calcvm import nn

    def network(**options: Any) -> cv.Model:
        given = {"input_shape": SIZES[:1], "optimizer": "adam", "batch_size": BATCH, "workers": 1, **options}
        return cv.Model(nn.Linear(SIZES[1]) >> nn.Tanh() >> nn.Linear(SIZES[2]), **given)

    rng = np.random.default_rng(0)
    x, y = rng.random((BATCH, *SIZES[:1]), np.float32), rng.integers(0, SIZES[2], BATCH)
    many = np.repeat(x, 13, 0)[:100], np.repeat(y, 13)[:100]
    model = network()
    plain, several = calls(model, x, y), calls(model, *many)
    found = {
        "arrays": plain,
        "`preprocess=`": calls(network(preprocess=nn.Scale(0.5)), x, y),
        "float64 data, float labels": calls(model, x.astype("f8"), y.astype("f8")),
        "arguments by name": {
            "step": lambda: model.step(x, y=y), "predict": lambda: model.predict(X=x),
            "evaluate": lambda: model.evaluate(x, y=y), "run": lambda: model.run(inputs={"input": x}),
        },
        "not contiguous": calls(model, np.repeat(x, 2, 1)[:, ::2], y),
        "lists": calls(model, x.tolist(), y.tolist()),
        f"{len(many[0])} samples, 12.5 batches": {call: several[call] for call in ("predict", "evaluate")},
        "`predict_classes`": {"predict": lambda: model.predict_classes(x)},
        "`predict_proba`": {"predict": lambda: model.predict_proba(x)},
    }  # fmt: skip
    try:
        import torch
    except ImportError:
        return found
    return {**found, "torch tensors": calls(model, torch.from_numpy(x), torch.from_numpy(y))}


def main(quick: bool = False) -> bool:
    """Run the workload."""
    result = Result("forms", "Forms of arguments", quick)
    repeats, n = (2, 50) if quick else (9, 2000)
    rows = []
    for form, given in forms().items():
        us = {}
        for name, call in given.items():
            timeit.timeit(call, number=50)  # compiled calls are made after some calls in Python
            us[name] = min(timeit.repeat(call, number=n, repeat=repeats, timer=process_time)) / n * 1e6
        rows.append(
            [form, *(number(us[name]) if name in us else "-" for name in ("step", "predict", "evaluate", "run", "set"))]
        )
    result.table(f"{'-'.join(map(str, SIZES))}, batch {BATCH}, one worker", HEADER, rows)
    return result.save()

"""P11: seconds from starting Python to the first trained step of a 784-64-64-10 network at batch 32, and of ResNet-18.

Each run is a fresh process, measured from outside, interpreter included.  *Warm* is ours with its kernels in the
cache, *empty* with an empty cache folder.  torch eager and JAX do the same step.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from bench.harness import Result, fresh, interleave, last_line, number
from bench.mlp import DIGITS, label

BATCH, REPEATS = 32, 5
WARM_TARGET, EMPTY_TARGET, RESNET_TARGET = 0.8, 6.0, 20.0  # seconds; ResNet-18's is with an empty cache
DATA = f"""
import json, numpy as np
rng = np.random.default_rng(0)
x = rng.standard_normal(({BATCH}, {DIGITS[0]}), dtype=np.float32)
y = rng.integers(0, {DIGITS[-1]}, {BATCH})
"""
PROGRAMS = {
    "calcvm": """
import calcvm as cv
from calcvm import nn
net = nn.Linear(64) >> nn.Sigmoid() >> nn.Linear(64) >> nn.Sigmoid() >> nn.Linear(10)
model = cv.Model(net, input_shape=(784,), loss="softmax_cross_entropy", optimizer=cv.Adam(1e-3), batch_size=32, seed=0)
loss = model.step(x, y)
""",
    "torch eager": """
import torch
net = torch.nn.Sequential(
    torch.nn.Linear(784, 64), torch.nn.Sigmoid(), torch.nn.Linear(64, 64), torch.nn.Sigmoid(), torch.nn.Linear(64, 10)
)
optimizer = torch.optim.Adam(net.parameters(), 1e-3, fused=True)
loss = torch.nn.functional.cross_entropy(net(torch.from_numpy(x)), torch.from_numpy(y))
loss.backward()
optimizer.step()
""",
    "JAX jit step": """
import jax, jax.numpy as jnp
params = [
    (jnp.asarray(rng.standard_normal((k, n)) / k**0.5, jnp.float32), jnp.zeros(n))
    for k, n in ((784, 64), (64, 64), (64, 10))
]
def loss_of(params, x, y):
    for w, b in params[:-1]:
        x = jax.nn.sigmoid(x @ w + b)
    logits = x @ params[-1][0] + params[-1][1]
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - jnp.take_along_axis(logits, y[:, None], axis=1)[:, 0])
@jax.jit
def step(params, m, v, x, y):
    loss, grads = jax.value_and_grad(loss_of)(params, x, y)
    tree = jax.tree.map
    m = tree(lambda m, g: 0.9 * m + 0.1 * g, m, grads)
    v = tree(lambda v, g: 0.999 * v + 0.001 * g * g, v, grads)
    params = tree(lambda p, m, v: p - 1e-3 * (m / 0.1) / (jnp.sqrt(v / 0.001) + 1e-8), params, m, v)
    return params, m, v, loss
zeros = jax.tree.map(jnp.zeros_like, params)
loss = step(params, zeros, zeros, x, jnp.asarray(y, jnp.int32))[-1]
""",
    "calcvm, ResNet-18": """
import calcvm as cv
model = cv.Model(cv.zoo.resnet18(), input_shape=(3, 224, 224), optimizer=cv.SGD(0.1), batch_size=1, seed=0)
loss = model.step(np.zeros((1, 3, 224, 224), np.float32), np.zeros(1, np.int64))
""",
    "import numpy": "loss = 0\n",
    "import calcvm": "import calcvm\nloss = 0\n",
}


def seconds(name: str, cache: str) -> float:
    """Wall time of one fresh process, interpreter included; its loss must be a number."""
    start = time.perf_counter()
    loss = fresh("-c", DATA + PROGRAMS[name] + "print(json.dumps(float(loss)))", CALCVM_CACHE_DIR=cache)
    elapsed = time.perf_counter() - start
    if not np.isfinite(loss):
        raise RuntimeError(f"loss {loss}")
    return elapsed


def main(quick: bool = False) -> bool:
    """Run the workload; True if ours ran."""
    result = Result("coldstart", "Cold start", quick)
    repeats = 1 if quick else REPEATS
    with tempfile.TemporaryDirectory() as folder:
        warm = str(Path(folder) / "warm")
        runs: dict[str, Callable[[], float]] = {}
        for name in list(PROGRAMS)[: 2 if quick else None]:
            try:
                seconds(name, warm)  # fills our cache, and the operating system's for all
            except RuntimeError as error:
                text = f"{name} left out: {last_line(str(error))}"
                result.fail(text) if "calcvm" in name else result.note(text)
                continue
            runs[name] = partial(seconds, name, warm)
        for name in [name for name in runs if name.startswith("calcvm")]:
            turns = (str(Path(folder) / f"{name}, empty cache, {i}") for i in range(repeats))
            runs[f"{name}, empty cache"] = lambda name=name, turns=turns: seconds(name, next(turns))  # type: ignore[misc]
        times = interleave(runs, repeats)
    rows = [[name, number(min(t)), number(float(np.median(t)))] for name, t in times.items()]
    result.table(f"Python to first trained step, {label(DIGITS, BATCH)}", ["seconds", "min", "median"], rows)
    for name, what, bound in (
        ("calcvm", "warm cache", WARM_TARGET),
        ("calcvm, empty cache", "empty cache", EMPTY_TARGET),
        ("calcvm, ResNet-18, empty cache", "ResNet-18, empty cache", RESNET_TARGET),
    ):
        result.target("P11", what, min(times[name]) if name in times else None, bound, "s", at_most=True)
    return result.save()

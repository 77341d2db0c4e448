"""4.5: how many models there is room for in a given memory: ours from the plan, the peers' by trial.

*At once* is models that all are in the middle of a step, each with its batch: side by side in a heap, or stacked.
*Alive* is models that can each take its next step, one at a time: switched through a heap with room for one, or kept
as a framework's objects.  The memory counts from where a process has trained a first model, so that libraries are
not counted.  Each trial is a fresh process::

    python -m bench.paper.room '{"who": "torch_one", "sizes": [16, 32, 32, 4], "budget": 268435456}'
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from bench.harness import Result, fresh, memory_bytes
from bench.mlp import DIGITS
from bench.paper.bars import bars
from bench.paper.samples import Source
from bench.peers import BETA1, BETA2, EPSILON, LEARNING_RATE, Task, jax_step

SIZES, BATCH = ([16, 32, 32, 4], DIGITS), 32
BUDGET, QUICK_BUDGET = 256 << 20, 4 << 20
AT_ONCE = {"ours": "calcvm, side by side", "torch_stacked": "torch, stacked", "jax_vmap": "JAX vmap"}
ALIVE = {"ours_switched": "calcvm, switched", "torch_one": "torch modules", "jax_one": "JAX, states"}
TRIALS, CLOSE = 5, 0.02  # of a stacking contestant, until it fills the memory to a fiftieth


def run(result: Result, sources: Sequence[Source], quick: bool) -> None:
    """A table for each network."""
    budget = QUICK_BUDGET if quick else BUDGET
    found = {}
    for sizes in SIZES[: 1 if quick else None]:
        name = "-".join(map(str, sizes))
        what = f"4.5: models of {name}, batch {BATCH}, Adam, in {budget >> 20} MiB"
        counts, rows = {}, []
        for who, label in {**AT_ONCE, **ALIVE}.items():
            if quick and not who.startswith("ours"):
                continue
            try:
                n, taken = (trial_stacked if who in ("torch_stacked", "jax_vmap") else trial)(who, sizes, budget)
            except RuntimeError as error:
                text = f"{label} left out of {what}: {error}"
                result.fail(text) if who.startswith("ours") else result.note(text)
                continue
            counts[who] = n
            ours = "ours" if who in AT_ONCE else "ours_switched"
            rows.append(
                [
                    "at once" if who in AT_ONCE else "alive",
                    label,
                    f"{n:,}",
                    f"{taken / n:,.0f}",
                    f"{taken / 2**20:.0f}",
                    f"{n / counts[ours]:.2f}" if ours in counts else "-",
                ]
            )
        found[name] = {label: counts[who] for who, label in {**AT_ONCE, **ALIVE}.items() if who in counts}
        result.table(what, ["", "contestant", "models", "bytes each", "MiB measured", "over ours"], rows)
    title = f"4.5: models in {budget >> 20} MiB"
    result.picture("paper-4.5", title, lambda figure: draw(figure, found))


def draw(figure: Any, found: dict[str, dict[str, int]]) -> None:
    """Bars of the models there is room for, a part for each network."""
    for i, (axes, (name, counts)) in enumerate(zip(figure.subplots(1, len(found), squeeze=False)[0], found.items())):
        bars(axes, counts, name, "%.0f")
        if i:
            axes.set_yticklabels([])


def trial(who: str, sizes: list[int], budget: int, **more: int) -> tuple[int, int]:
    """Models that a fresh process had when its memory was full (or the number asked for), and the bytes they took."""
    reply = fresh("-m", "bench.paper.room", json.dumps({"who": who, "sizes": sizes, "budget": budget, **more}))
    return reply["models"], reply["bytes"]


def trial_stacked(who: str, sizes: list[int], budget: int) -> tuple[int, int]:
    """The most models that were seen to fit when they are trained together."""
    n, best = max(1, budget // (4 * Task(sizes).resident_bytes)), (0, 0)
    over = math.inf
    for _ in range(TRIALS):
        _, taken = trial(who, sizes, budget, models=n)
        if taken <= budget:
            best = max(best, (n, taken))
        else:
            over = min(over, n)
        if best[0] and (best[1] >= (1 - CLOSE) * budget or over - best[0] <= CLOSE * best[0]):
            break
        guess = int(n * (1 - CLOSE / 2) * budget / taken)
        n = guess if best[0] < guess < over else int((best[0] + over) / 2)
    if not best[0]:
        raise RuntimeError(f"no trial fitted; {over} models took more than the memory")
    return best


# ---------------------------------------------------------------- in the fresh process
def ours(sizes: list[int], budget: int, switched: bool) -> dict[str, int]:
    """As many as the plan says: each is loaded and takes a step, and none had to go."""
    import calcvm as cv

    net: cv.nn.Layer = cv.nn.Linear(sizes[1])
    for width in sizes[2:]:
        net = net >> cv.nn.Sigmoid() >> cv.nn.Linear(width)
    graph = import_module("calcvm.model").build_graph(net, (sizes[0],), "softmax_cross_entropy", cv.Adam(LEARNING_RATE))
    program = cv.compile(graph, batch_size=BATCH, workers=1)
    x, y = Task(sizes).sample(BATCH)
    first = cv.CalcHeap(program.heap_bytes).create(program)
    first.step(x, y)
    each = -(-program.heap_bytes // 64) * 64
    start, stop = first.loaded.image
    before = memory_bytes("VmRSS")
    n = 1 + (budget - each) // (stop - start) if switched else budget // each
    heap = cv.CalcHeap(each if switched else budget)
    models = []
    for i in range(n):
        models.append(heap.create(program, seed=i))
        models[-1].step(x, y)
    if not switched:
        for model in models:
            model.step(x, y)
        assert heap.stats.switches == 0 and heap.free_bytes < program.heap_bytes
    return {"models": n, "bytes": memory_bytes("VmRSS") - before}


def until_full(budget: int, make: Callable[[int], Any]) -> dict[str, int]:
    """Make models and keep them until the process has grown by the budget."""
    kept = [make(0)]
    before = memory_bytes("VmRSS")
    taken = fitting = 0
    while taken <= budget:
        fitting, used = len(kept) - 1, taken
        kept += [make(len(kept) + i) for i in range(max(1, len(kept) // 100))]
        taken = memory_bytes("VmRSS") - before
    return {"models": fitting, "bytes": used}


def torch_one(sizes: list[int], budget: int) -> dict[str, int]:
    torch: Any = import_module("torch")
    task = Task(sizes)
    x, y = map(torch.from_numpy, task.sample(BATCH))

    def make(i: int) -> Any:
        layers: list[Any] = []
        for n_in, n_out in zip(sizes[:-1], sizes[1:]):
            layers += [*([torch.nn.Sigmoid()] if layers else []), torch.nn.Linear(n_in, n_out)]
        net = torch.nn.Sequential(*layers)
        optimizer = torch.optim.Adam(net.parameters(), LEARNING_RATE, (BETA1, BETA2), EPSILON, fused=True)
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        return net, optimizer

    return until_full(budget, make)


def jax_one(sizes: list[int], budget: int) -> dict[str, int]:
    jax: Any = import_module("jax")
    task = Task(sizes)
    x, y = (jax.numpy.asarray(a) for a in task.sample(BATCH))
    step = jax.jit(jax_step(), donate_argnums=0)

    def make(i: int) -> Any:
        weights = jax.tree.map(jax.numpy.array, task.weights)
        zeros = lambda: jax.tree.map(jax.numpy.zeros_like, weights)
        state, _ = step((weights, zeros(), zeros(), jax.numpy.float32(0)), x, y)
        return jax.block_until_ready(state)

    return until_full(budget, make)


def torch_stacked(sizes: list[int], models: int) -> dict[str, int]:
    torch: Any = import_module("torch")
    many = import_module("bench.many")
    losses_of = many.stacked_losses()
    one_x, one_y = map(torch.from_numpy, Task(sizes).sample(BATCH))

    def train(n: int) -> None:
        shapes = [shape for k, m in zip(sizes[:-1], sizes[1:]) for shape in ((n, k, m), (n, 1, m))]
        params = [torch.empty(shape).uniform_(-0.1, 0.1).requires_grad_() for shape in shapes]
        optimizer = torch.optim.Adam(params, LEARNING_RATE, (BETA1, BETA2), EPSILON, fused=True)
        x, y = one_x.repeat(n, 1, 1), one_y.repeat(n, 1)
        for _ in range(2):
            losses_of(params, x, y).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return peak_of(train, models)


def jax_vmap(sizes: list[int], models: int) -> dict[str, int]:
    jax: Any = import_module("jax")
    one_x, one_y = Task(sizes).sample(BATCH)
    step = jax.jit(jax.vmap(jax_step()), donate_argnums=0)

    def train(n: int) -> None:
        pairs = list(zip(sizes[:-1], sizes[1:]))
        full = lambda value: [(jax.numpy.full((n, k, m), value), jax.numpy.full((n, m), value)) for k, m in pairs]
        state = full(np.float32(0.01)), full(np.float32(0)), full(np.float32(0)), jax.numpy.zeros(n)
        x, y = (jax.numpy.broadcast_to(a, (n, *a.shape)) for a in (one_x, one_y))
        for _ in range(2):
            state, _ = step(state, x, y)
        jax.block_until_ready(state)

    return peak_of(train, models)


def peak_of(train: Callable[[int], None], models: int) -> dict[str, int]:
    """Memory at its highest while so many models are trained, beyond that of training two."""
    train(2)
    before = memory_bytes("VmRSS")
    train(models)
    return {"models": models, "bytes": memory_bytes("VmHWM") - before}


def main(who: str, sizes: list[int], budget: int, models: int = 0) -> dict[str, int]:
    if who.startswith("ours"):
        return ours(sizes, budget, who == "ours_switched")
    if who in ("torch_one", "jax_one"):
        return {"torch_one": torch_one, "jax_one": jax_one}[who](sizes, budget)
    return {"torch_stacked": torch_stacked, "jax_vmap": jax_vmap}[who](sizes, models)


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))

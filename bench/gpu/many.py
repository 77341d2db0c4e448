"""The contestants of many small models on a GPU: each has its own data and initial weights, all train with Adam.

As in `bench.many`, a contestant has ``train(epochs) -> seconds``, ``losses()`` and ``models``, and goes on where its last
training stopped.  Initial weights are those that calcvm draws from a model's seed.  ``device="cpu"`` is for tests.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar

import numpy as np

from bench import many
from bench.gpu.peers import WARM_STEPS, import_torch, require_jax
from bench.harness import answers
from bench.many import stacked_losses
from bench.peers import BETA1, BETA2, EPSILON, LEARNING_RATE, Task, torch_adam


class Many(many.Many):
    """Models of one architecture, as `bench.many.Many`, drawn fast enough for ten thousand."""

    def __init__(self, sizes: list[int], models: int, batch: int, batches: int, first: int = 0):
        cv: Any = import_module("calcvm")
        self.sizes, self.models, self.batch, self.batches, self.first = sizes, models, batch, batches, first
        self.task = Task(sizes)
        program = cv.compile(graph_of(sizes), batch_size=batch, workers=1)
        heap = cv.CalcHeap(program.heap_bytes)
        drawn = []
        for i in range(models):
            model = heap.create(program, seed=first + i)
            drawn.append([p.copy() for p in model.parameters.values()])
            model.close()
        stacked = [np.stack(arrays) for arrays in zip(*drawn)]
        self.weights = list(zip(stacked[::2], stacked[1::2]))
        n = batch * batches
        self.x = np.empty((models, n, sizes[0]), np.float32)
        self.y = np.empty((models, n), np.int64)
        for i in range(models):
            rng = np.random.default_rng(first + i)
            self.y[i] = rng.integers(0, sizes[-1], n)
            rng.standard_normal(out=self.x[i], dtype=np.float32)
            self.x[i] += self.task.prototypes[self.y[i]]


def graph_of(sizes: list[int]) -> Any:
    """calcvm's graph of a multi-layer perceptron, trained with Adam."""
    cv: Any = import_module("calcvm")
    net = cv.nn.Linear(sizes[1])
    for width in sizes[2:]:
        net = net >> cv.nn.Sigmoid() >> cv.nn.Linear(width)
    return cv.build_graph(net, (sizes[0],), "softmax_cross_entropy", cv.Adam(LEARNING_RATE))


class Ours:
    """calcvm: a `Fleet`; a launch trains all models for a while, each by one block at a time."""

    package = "calcvm"
    note = ""

    def __init__(self, tasks: list[Many], device: str):
        cv: Any = import_module("calcvm")
        how = {"workers": 1} if device == "cpu" else {"mode": "fleet"}
        programs = [cv.compile(graph_of(t.sizes), batch_size=t.batch, device=device, **how) for t in tasks]
        self.models = sum(task.models for task in tasks)
        self.heap_bytes = sum((p.heap_bytes + 256) * t.models for p, t in zip(programs, tasks))
        self.fleet = cv.Fleet(self.heap_bytes, device=device)
        self.handles = [
            self.fleet.add(program, data=(task.x[i], task.y[i]), seed=task.first + i, shuffle=False)
            for program, task in zip(programs, tasks)
            for i in range(task.models)
        ]

    def train(self, epochs: int) -> float:
        start = time.perf_counter()
        self.fleet.fit(epochs, progress=False)
        return time.perf_counter() - start

    def losses(self) -> np.ndarray:
        return np.array([h.loss for h in self.handles])


class OursApart(many.OursApart):
    """calcvm: a fleet for each architecture, one after the other."""

    one = Ours


class JaxVmap(many.JaxVmap):
    """JAX: `vmap` over all models of a jitted `lax.scan` over the steps, donated."""

    CHUNKS: ClassVar[tuple[int, ...]] = (1 << 40,)
    UNROLL: ClassVar[tuple[int, ...]] = (1, 5)

    def __init__(self, tasks: list[Many], device: str):
        require_jax(device)
        super().__init__(list(tasks), threads=0)


class JaxVmapPlain(JaxVmap):
    """The same without unrolling: one compilation for each architecture."""

    UNROLL: ClassVar[tuple[int, ...]] = (1,)


class JaxVmapChunks(JaxVmap):
    """The same in chunks of models, of the size that takes least time."""

    CHUNKS: ClassVar[tuple[int, ...]] = (250, 1000, 2500)
    TRIAL: ClassVar = 2500


class TorchStackedGraph:
    """PyTorch: all models of an architecture stacked, `baddbmm` for their layers, one fused Adam for all; an epoch in a CUDA
    graph."""

    package = "torch"

    def __init__(self, tasks: list[Many], device: str):
        torch = self.torch = import_torch(device)
        self.device, self.models = device, sum(task.models for task in tasks)
        self.runs: list[tuple[Callable[[], Any], list]] = []
        for task in tasks:
            params = [torch.tensor(a, device=device) for w, b in task.weights for a in (w, b[:, None])]
            x = task.x.reshape(task.models, task.batches, task.batch, task.sizes[0]).swapaxes(0, 1)
            y = task.y.reshape(task.models, task.batches, task.batch).swapaxes(0, 1)
            data = [torch.from_numpy(np.ascontiguousarray(a)).to(device).unbind(0) for a in (x, y)]
            self.runs.append(self._prepared(params, list(zip(*data))))
        self.note = "an epoch a graph" if device == "cuda" else ""

    def _prepared(self, params: list, batches: list) -> tuple[Callable[[], Any], list]:
        """What runs an epoch, and where it leaves its losses."""
        torch = self.torch
        step, clear = self._step(params)
        if self.device == "cpu":
            losses: list = [None] * len(batches)

            def epoch() -> None:
                losses[:] = [step(x, y) for x, y in batches]

            return epoch, losses
        initial = [p.detach().clone() for p in params]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for x, y in batches[:WARM_STEPS]:
                step(x, y)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            losses = [step(x, y) for x, y in batches]
        with torch.no_grad():  # as if nothing had been run
            for p, first in zip(params, initial):
                p.copy_(first)
            clear()
        return graph.replay, losses

    def _step(self, params: list) -> tuple[Callable[[Any, Any], Any], Callable[[], None]]:
        """A step's function of (x, y), and what clears the optimizer's state."""
        losses_of = stacked_losses()
        for p in params:
            p.requires_grad_()
        optimizer = self.torch.optim.Adam(
            params, LEARNING_RATE, (BETA1, BETA2), EPSILON, fused=True, capturable=self.device == "cuda"
        )

        def step(x, y):
            optimizer.zero_grad()
            losses = losses_of(params, x, y)
            losses.sum().backward()
            optimizer.step()
            return losses.detach()

        def clear() -> None:
            for state in optimizer.state.values():
                for tensor in state.values():
                    tensor.zero_()

        return step, clear

    def _wait(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def train(self, epochs: int) -> float:
        self._wait()
        start = time.perf_counter()
        for _ in range(epochs):
            for run, _ in self.runs:
                run()
        self._wait()
        return time.perf_counter() - start

    def losses(self) -> np.ndarray:
        return np.concatenate([self.torch.stack(losses).mean(0).cpu().numpy() for _, losses in self.runs])


class TorchVmapGraph(TorchStackedGraph):
    """PyTorch: `torch.func.vmap` over models of the gradient of one, Adam written out; an epoch in a CUDA graph."""

    def _step(self, params: list) -> tuple[Callable[[Any, Any], Any], Callable[[], None]]:
        torch = self.torch
        linear, entropy = torch.nn.functional.linear, torch.nn.functional.cross_entropy
        first, second = ([torch.zeros_like(p) for p in params] for _ in range(2))
        powers = torch.empty(2, device=self.device)
        rate, root = (torch.empty((), device=self.device) for _ in range(2))

        def loss_of(params, x, y):
            for w, b in zip(params[:-2:2], params[1:-2:2]):
                x = linear(x, w.T, b[0]).sigmoid()
            return entropy(linear(x, params[-2].T, params[-1][0]), y)

        gradients = torch.func.vmap(torch.func.grad_and_value(loss_of))

        def step(x, y):
            with torch.no_grad():
                grads, losses = gradients(params, x, y)
                torch_adam(params, first, second, powers, rate, root, grads)
            return losses

        def clear() -> None:
            for moment in [*first, *second]:
                moment.zero_()
            powers.copy_(torch.tensor([BETA1, BETA2]))
            rate.fill_(LEARNING_RATE / (1 - BETA1))
            root.fill_((1 - BETA2) ** 0.5)

        clear()
        return step, clear


CONTESTANTS: dict[str, Any] = {
    "ours": Ours,
    "ours_apart": OursApart,
    "jax_vmap": JaxVmap,
    "jax_vmap_plain": JaxVmapPlain,
    "jax_vmap_chunks": JaxVmapChunks,
    "torch_stacked_graph": TorchStackedGraph,
    "torch_vmap_graph": TorchVmapGraph,
}
NAMES = {
    "ours": "calcvm fleet",
    "ours_apart": "calcvm, a fleet for each architecture",
    "jax_vmap": "JAX vmap, all at once",
    "jax_vmap_plain": "JAX vmap, all at once, plain",
    "jax_vmap_chunks": "JAX vmap, in chunks",
    "torch_stacked_graph": "torch stacked, in a CUDA graph",
    "torch_vmap_graph": "torch.func.vmap, in a CUDA graph",
}


def main(spec: dict[str, Any]) -> None:
    """Serve one contestant over stdin and stdout, a JSON line each way, until stdin ends."""
    answer = answers(None)
    kind = CONTESTANTS[spec["who"]]
    import_module(kind.package)
    tasks = [Many(**task) for task in spec["tasks"]]
    start = time.perf_counter()
    contestant = kind(tasks, spec["device"])
    setup = time.perf_counter() - start
    first = contestant.train(1)
    losses = [float(loss) for loss in contestant.losses()]
    answer(losses=losses, setup=setup, first=first, note=contestant.note, models=contestant.models)
    for line in sys.stdin:
        answer(seconds=contestant.train(json.loads(line)["epochs"]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

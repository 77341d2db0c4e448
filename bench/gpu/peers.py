"""The contestants of the training step on a GPU: calcvm and its peers, each at its best.  None is eager.

As in `bench.peers`, a contestant is a class with ``restart()``, ``steps(n) -> float`` and ``weights()``, and runs in a process of
its own.  ``device="cpu"`` runs what a contestant computes without CUDA graphs: tests compare the losses so.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from typing import Any, ClassVar

import numpy as np

from bench import peers
from bench.harness import answers, best_seconds
from bench.peers import BETA1, BETA2, EPSILON, LEARNING_RATE, VERIFY_STEPS, Task, torch_step

WARM_STEPS = 3  # before a CUDA graph is captured: libraries choose and allocate in the first ones


class Ours:
    """calcvm: `Model.run_steps` on the batch in the device's memory, one call whatever n is."""

    package = "calcvm"
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, task: Task, x: np.ndarray, y: np.ndarray, device: str):
        cv: Any = import_module("calcvm")
        net = None
        for w, b in task.weights:
            init = cv.nn.Linear(w.shape[1], init=w, bias_init=b)
            net = init if net is None else net >> cv.nn.Sigmoid() >> init
        graph = cv.build_graph(net, (task.sizes[0],), "softmax_cross_entropy", cv.Adam(LEARNING_RATE))
        how = {} if device == "cpu" else self.options
        program = cv.compile(graph, batch_size=len(x), device=device, **how)
        self.model = cv.CalcHeap(program.heap_bytes, device=device).create(program)
        self.x, self.y = x, y
        self.heap_bytes = program.heap_bytes
        mode, blocks = program.info.get("mode"), program.workers
        self.note = "" if mode is None else f"{mode}, {blocks} block{'s' * (blocks != 1)}"

    def restart(self) -> None:
        self.model.reset(seed=0)
        self.model["input"], self.model["target"] = self.x, self.y

    def steps(self, n: int) -> float:
        return self.model.run_steps(n)

    def weights(self) -> list:
        flat = [np.array(p) for p in self.model.parameters.values()]
        return list(zip(flat[::2], flat[1::2]))


def ours(**options: Any) -> type[Ours]:
    """`Ours`, compiled with options of `calcvm.plan`."""
    return type("Ours", (Ours,), {"options": options})


class TorchGraph:
    """PyTorch: the whole step (forward, backward, fused Adam) in a CUDA graph; of several steps where that is faster."""

    package = "torch"
    tf32 = False
    STEPS: ClassVar[tuple[int, ...]] = (1, 8, 32)  # of a graph

    def __init__(self, task: Task, x: np.ndarray, y: np.ndarray, device: str):
        torch = self.torch = import_torch(device, self.tf32)
        self.device = device
        self.initial = [torch.from_numpy(np.ascontiguousarray(a)).to(device) for w, b in task.weights for a in (w.T, b)]
        self.x, self.y = torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)
        self._build(task)
        self.graphs: dict[int, Any] = {}
        self.note = ""
        if device == "cuda":
            self._capture()

    def _build(self, task: Task) -> None:
        torch = self.torch
        layers: list[Any] = []
        for n_in, n_out in zip(task.sizes[:-1], task.sizes[1:]):
            layers += [*([torch.nn.Sigmoid()] if layers else []), torch.nn.Linear(n_in, n_out)]
        self.net = torch.nn.Sequential(*layers).to(self.device)
        self.params = list(self.net.parameters())
        self.optimizer = torch.optim.Adam(
            self.params, LEARNING_RATE, (BETA1, BETA2), EPSILON, fused=True, capturable=self.device == "cuda"
        )

    def _step(self) -> Any:
        """One step; its loss, as a tensor."""
        self.optimizer.zero_grad()
        loss = self.torch.nn.functional.cross_entropy(self.net(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        return loss

    def _capture(self) -> None:
        torch = self.torch
        self.restart()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_STEPS):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graphs = {n: self._captured(n) for n in (1, *self.STEPS)}
        seconds = {}
        for n in self.STEPS:
            self.per_graph = n
            seconds[n] = best_seconds(lambda: self.steps(self.STEPS[-1]), 10)
        self.per_graph = min(seconds, key=lambda n: seconds[n])
        self.note = f"{self.per_graph} step{'s' * (self.per_graph != 1)} a graph"

    def _captured(self, n: int) -> tuple[Any, Any]:
        """A CUDA graph of n steps, and where it leaves the last one's loss."""
        torch = self.torch
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(n):
                loss = self._step()
        return graph, loss

    def restart(self) -> None:
        torch = self.torch
        with torch.no_grad():
            for p, initial in zip(self.params, self.initial):
                p.copy_(initial)
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()

    def steps(self, n: int) -> float:
        if not self.graphs:
            for _ in range(n):
                loss = self._step()
            return loss.item()
        many, last = self.graphs[self.per_graph]
        for _ in range(n // self.per_graph):
            many.replay()
        rest = n % self.per_graph
        if rest:
            one, last = self.graphs[1]
            for _ in range(rest):
                one.replay()
        return last.item()

    def weights(self) -> list:
        flat = [p.detach().cpu().numpy() for p in self.params]
        return [(w.T, b) for w, b in zip(flat[::2], flat[1::2])]


class TorchCompileGraph(TorchGraph):
    """`torch.compile(mode="max-autotune-no-cudagraphs")` of the whole step, captured in a CUDA graph."""

    compiled = True

    def _build(self, task: Task) -> None:
        torch = self.torch
        self.params = [torch.empty_like(p) for p in self.initial]
        self.first = [torch.empty_like(p) for p in self.initial]
        self.second = [torch.empty_like(p) for p in self.initial]
        self.powers, self.rate, self.root = (torch.empty(s, device=self.device) for s in ((2,), (), ()))
        step = torch_step(torch)
        mode = "max-autotune-no-cudagraphs"
        self.step = torch.compile(step, fullgraph=True, dynamic=False, mode=mode) if self.compiled else step

    def _step(self) -> Any:
        with self.torch.no_grad():
            return self.step(self.params, self.first, self.second, self.powers, self.rate, self.root, self.x, self.y)

    def restart(self) -> None:
        for p, m, v, initial in zip(self.params, self.first, self.second, self.initial):
            p.copy_(initial)
            m.zero_()
            v.zero_()
        self.powers.copy_(self.torch.tensor([BETA1, BETA2]))
        self.rate.fill_(LEARNING_RATE / (1 - BETA1))
        self.root.fill_((1 - BETA2) ** 0.5)


class TorchFunctional(TorchCompileGraph):
    """The same without the compiler: what tests run."""

    compiled = False


class TorchGraphTf32(TorchGraph):
    """With matrix products in TF32."""

    tf32 = True


class JaxScan(peers.JaxScan):
    """`jax.lax.scan` over all steps in one jitted call with donated buffers, unrolled as suits the network best."""

    def __init__(self, task: Task, x: np.ndarray, y: np.ndarray, device: str):
        require_jax(device)
        super().__init__(task, x, y, threads=0)


class JaxScanPlain(JaxScan):
    """The same without unrolling."""

    UNROLL: ClassVar[tuple[int, ...]] = (1,)


def import_torch(device: str, tf32: bool = False) -> Any:
    """torch, with matrix products in float32 or TF32 (RuntimeError: it cannot use the GPU)."""
    torch = import_module("torch")
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} cannot use a GPU here")
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    return torch


def require_jax(device: str) -> None:
    """RuntimeError: JAX cannot use the GPU."""
    jax = import_module("jax")
    found = {d.platform for d in jax.devices()}
    if device == "cuda" and "gpu" not in found:
        raise RuntimeError(f"jax {jax.__version__} cannot use a GPU here: it has {', '.join(sorted(found))}")


CONTESTANTS: dict[str, Any] = {
    "ours_grid": ours(mode="grid"),
    "ours_graph": ours(mode="graph"),
    "ours_grid_1": ours(mode="grid", workers=1),
    "ours": ours(),
    "ours_grid_tf32": ours(mode="grid", precision="tf32"),
    "ours_graph_tf32": ours(mode="graph", precision="tf32"),
    "torch_graph": TorchGraph,
    "torch_compile_graph": TorchCompileGraph,
    "torch_functional": TorchFunctional,
    "jax_scan": JaxScan,
    "jax_scan_plain": JaxScanPlain,
    "torch_graph_tf32": TorchGraphTf32,
    "jax_scan_tf32": JaxScan,
}
NAMES = {
    "ours_grid": "calcvm grid",
    "ours_graph": "calcvm graph",
    "ours_grid_1": "calcvm grid, one block",
    "ours": "calcvm, as its plan chooses",
    "ours_grid_tf32": "calcvm grid, TF32",
    "ours_graph_tf32": "calcvm graph, TF32",
    "torch_graph": "torch in a CUDA graph",
    "torch_compile_graph": "torch.compile in a CUDA graph",
    "torch_functional": "torch.func in a CUDA graph",
    "jax_scan": "JAX scan",
    "jax_scan_plain": "JAX scan, plain",
    "torch_graph_tf32": "torch in a CUDA graph, TF32",
    "jax_scan_tf32": "JAX scan, TF32",
}


def settings(who: str) -> dict[str, str]:
    """Environment of a contestant's process: TF32 only where its name says so, and no memory taken in advance."""
    tf32 = who.endswith("tf32")
    precision = "tensorfloat32" if tf32 else "float32"
    own = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_DEFAULT_MATMUL_PRECISION": precision}
    return own if tf32 else {**own, "NVIDIA_TF32_OVERRIDE": "0"}


def main(spec: dict[str, Any]) -> None:
    """Serve one contestant over stdin and stdout, a JSON line each way, until stdin ends."""
    answer = answers(None)
    kind, task = CONTESTANTS[spec["who"]], Task(spec["sizes"])
    import_module(kind.package)
    x, y = task.sample(spec["batch"])
    start = time.perf_counter()
    contestant = kind(task, x, y, spec["device"])
    contestant.restart()
    loss = contestant.steps(VERIFY_STEPS)
    answer(loss=loss, setup_seconds=time.perf_counter() - start, note=contestant.note)
    for line in sys.stdin:
        n = json.loads(line)["steps"]
        contestant.restart()
        contestant.steps(n)  # the device's clocks rise
        start = time.perf_counter()
        loss = contestant.steps(n)
        answer(seconds=time.perf_counter() - start, loss=loss)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

"""The contestants with many small models.  Each model has separate data and initial weights; all train with Adam.

A contestant is a class:

    __init__(task, threads)        # imports, builds, compiles, and chooses what is fastest (chunks, unrolling)
    train(epochs) -> seconds       # every model of `models` passes over its own data in their order
    losses() -> ndarray            # mean loss of each model over the last epoch, shape (models,)
    models                         # how many of the task's models it trains: a sample if one takes long

Training continues from the last `train`.  Each contestant runs in a separate process that answers requests of
`bench.harness.Process`, such as ``{"epochs": 1}``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from itertools import product
from typing import Any, ClassVar

import numpy as np

from bench.harness import Process, answers, memory_bytes
from bench.peers import BETA1, BETA2, EPSILON, LEARNING_RATE, Task, jax_step, torch_adam

Weights = list[tuple[np.ndarray, np.ndarray]]


class Many:
    """Models of one architecture, each with its own data: batches of a classification task or of real samples.

    Parameters
    ----------
    sizes : list of int
        Neurons per layer, input first.
    models, batch, batches : int
        Each model's data consist of ``batches`` batches.
    first : int
        Number of the first model, from which seeds are derived.
    data : str
        "made up", or "digits": samples of scikit-learn's digits, in a different order for each model.

    Attributes
    ----------
    weights : list of (w, b), of shapes (models, n_in, n_out) and (models, n_out), float32
    x : ndarray, shape (models, batches * batch, n_in), float32
    y : ndarray, shape (models, batches * batch), int64
    """

    def __init__(self, sizes: list[int], models: int, batch: int, batches: int, first: int = 0, data: str = "made up"):
        self.sizes, self.models, self.batch, self.batches = sizes, models, batch, batches
        self.task = Task(sizes)
        drawn = [Task(sizes, seed=first + i).weights for i in range(models)]
        self.weights: Weights = [(np.stack([w for w, _ in p]), np.stack([b for _, b in p])) for p in zip(*drawn)]
        n = batch * batches
        self.x = np.empty((models, n, sizes[0]), np.float32)
        self.y = np.empty((models, n), np.int64)
        for i in range(models):
            self.x[i], self.y[i] = self._samples(n, first + i, data)

    def _samples(self, n: int, seed: int, data: str) -> tuple[np.ndarray, np.ndarray]:
        if data == "made up":
            return self.task.sample(n, seed)
        x, y = DIGITS or load_digits()
        chosen = np.random.default_rng(seed).permutation(np.arange(n) % len(x))
        return x[chosen], y[chosen]

    def flops(self) -> int:
        """FLOPs of an epoch of all models: their matrix products."""
        return self.models * self.batches * self.task.step_flops(self.batch)


DIGITS: list[np.ndarray] = []


def load_digits() -> list[np.ndarray]:
    """The digits as float32 in [0, 1], and their classes."""
    from calcvm.data import digits

    x, y = digits()
    DIGITS[:] = (x / 16).astype(np.float32), y.astype(np.int64)
    return DIGITS


class Ours:
    """calcvm: a `Fleet` with as many workers as threads."""

    package = "calcvm"
    note = ""

    def __init__(self, tasks: list[Many], threads: int):
        cv: Any = import_module("calcvm")
        graphs = import_module("calcvm.model").build_graph
        programs = []
        for task in tasks:
            net = cv.nn.Linear(task.sizes[1])
            for width in task.sizes[2:]:
                net = net >> cv.nn.Sigmoid() >> cv.nn.Linear(width)
            graph = graphs(net, (task.sizes[0],), "softmax_cross_entropy", cv.Adam(LEARNING_RATE))
            programs.append(cv.compile(graph, batch_size=task.batch, workers=1))
        self.models = sum(task.models for task in tasks)
        self.heap_bytes = sum(p.heap_bytes * t.models for p, t in zip(programs, tasks))
        self.fleet = cv.Fleet(self.heap_bytes + 64 * self.models, workers=threads)
        self.handles = []
        for program, task in zip(programs, tasks):
            for i in range(task.models):
                handle = self.fleet.add(program, data=(task.x[i], task.y[i]), shuffle=False)
                flat = list(handle.model.parameters.values())
                for (w, b), view_w, view_b in zip(task.weights, flat[::2], flat[1::2]):
                    view_w[...], view_b[...] = w[i], b[i]
                self.handles.append(handle)

    def train(self, epochs: int) -> float:
        start = time.perf_counter()
        self.fleet.fit(epochs, progress=False)
        return time.perf_counter() - start

    def losses(self) -> np.ndarray:
        return np.array([h.loss for h in self.handles])


class OursApart:
    """calcvm: one fleet per architecture, one after the other."""

    package = "calcvm"
    note = ""
    one: ClassVar[Any] = Ours

    def __init__(self, tasks: list[Many], where: Any):
        self.fleets = [self.one([task], where) for task in tasks]
        self.models = sum(f.models for f in self.fleets)

    def train(self, epochs: int) -> float:
        return sum(f.train(epochs) for f in self.fleets)

    def losses(self) -> np.ndarray:
        return np.concatenate([f.losses() for f in self.fleets])


class JaxVmap:
    """JAX: `vmap` over models of a jitted `lax.scan` over the steps, donated, in chunks of models.

    The fastest chunk and unrolling are chosen.
    """

    package = "jax"
    CHUNKS: ClassVar[tuple[int, ...]] = (25, 250, 1000)
    UNROLL: ClassVar[tuple[int, ...]] = (1, 5)
    TRIAL: ClassVar = 200  # least models in a trial

    def __init__(self, tasks: list[Many], threads: int):
        self.tasks, self.models = tasks, sum(task.models for task in tasks)
        self.devices = self._devices()
        step = jax_step()
        jax: Any = import_module("jax")

        def one(state, x, y, epochs, unroll):  # x: (batches, batch, inputs)
            def epoch(state, _):
                state, losses = jax.lax.scan(lambda s, xy: step(s, *xy), state, (x, y), unroll=unroll)
                return state, losses.mean()

            if epochs == 1:
                return epoch(state, None)
            state, losses = jax.lax.scan(epoch, state, length=epochs)
            return state, losses[-1]

        self._one: Callable = one
        self._runs: dict[int, Callable] = {}
        self._choose()
        self.place()

    def _devices(self) -> int:
        return 1

    def _compiled(self, epochs: int) -> Callable:
        if epochs not in self._runs:
            self._runs[epochs] = self._map(lambda state, x, y: self._one(state, x, y, epochs, self.unroll))
        return self._runs[epochs]

    def _map(self, one: Callable) -> Callable:
        jax: Any = import_module("jax")
        return jax.jit(jax.vmap(one), donate_argnums=0)

    def _choose(self) -> None:
        """Try chunks and unrolling on the first architecture's models."""
        task = self.tasks[0]
        most = task.models // self.devices
        chunks = sorted({min(chunk, most) for chunk in self.CHUNKS})
        unrolls = [u for u in self.UNROLL if u <= task.batches]
        seconds: dict[tuple[int, int], float] = {}
        for self.chunk, self.unroll in product(chunks, unrolls):
            if len(chunks) * len(unrolls) > 1:
                self._runs.clear()
                n = max(self.TRIAL // (self.chunk * self.devices), 1)
                self.place(n)
                self.train(1)
                models = min(n * self.chunk * self.devices, task.models)
                seconds[self.chunk, self.unroll] = min(self.train(1) for _ in range(5)) / models
        if seconds:
            self.chunk, self.unroll = min(seconds, key=lambda c: seconds[c])
            self._runs.clear()
        self.note = f"chunks of {self.chunk}, unroll {self.unroll}"

    def _chunks(self) -> Iterator[tuple[Many, slice]]:
        for task in self.tasks:
            for start in range(0, task.models, self.chunk * self.devices):
                yield task, slice(start, min(start + self.chunk * self.devices, task.models))

    def _put(self, array: np.ndarray) -> Any:
        return import_module("jax").numpy.array(array)

    def place(self, most: int | None = None) -> None:
        """Put initial weights, moments and data of every chunk (or the first ``most``) on JAX's devices."""
        tree: Any = import_module("jax").tree.map
        self.states, self.data = [], []
        for task, part in list(self._chunks())[:most]:
            weights = [(w[part], b[part]) for w, b in task.weights]
            zeros = lambda weights=weights: tree(lambda a: self._put(np.zeros_like(a)), weights)
            n = part.stop - part.start
            self.states.append((tree(self._put, weights), zeros(), zeros(), self._put(np.zeros(n, np.float32))))
            shape = (n, task.batches, task.batch)
            x, y = task.x[part].reshape(*shape, -1), task.y[part].astype(np.int32).reshape(shape)
            self.data.append((self._put(x), self._put(y)))
        import_module("jax").block_until_ready((self.states, self.data))

    def train(self, epochs: int) -> float:
        run, block = self._compiled(epochs), import_module("jax").block_until_ready
        start = time.perf_counter()
        done = [run(state, x, y) for state, (x, y) in zip(self.states, self.data)]
        block(done)
        seconds = time.perf_counter() - start
        self.states, self.last = [d[0] for d in done], [d[1] for d in done]
        return seconds

    def losses(self) -> np.ndarray:
        return np.concatenate([np.asarray(loss).reshape(-1) for loss in self.last])


class JaxDevices(JaxVmap):
    """The same on one virtual device per core: `pmap` over devices of `vmap` over models."""

    CHUNKS: ClassVar[tuple[int, ...]] = (25, 125, 500)
    UNROLL: ClassVar[tuple[int, ...]] = (1,)

    def _devices(self) -> int:
        return import_module("jax").device_count()

    def _map(self, one: Callable) -> Callable:
        jax: Any = import_module("jax")
        return jax.pmap(jax.vmap(one), donate_argnums=0)

    def _put(self, array: np.ndarray) -> Any:
        jax: Any = import_module("jax")
        sharding = jax.sharding
        mesh = sharding.Mesh(np.array(jax.devices()), ("device",))
        split = array.reshape(self.devices, -1, *array.shape[1:])
        return jax.device_put(split, sharding.NamedSharding(mesh, sharding.PartitionSpec("device")))


class JaxOne(JaxVmap):
    """JAX: one model after the other, each a jitted `lax.scan` over its steps."""

    CHUNKS: ClassVar[tuple[int, ...]] = (1,)

    def _map(self, one: Callable) -> Callable:
        jax: Any = import_module("jax")
        single = lambda state, x, y: one(jax.tree.map(lambda a: a[0], state), x[0], y[0])

        def run(state, x, y):
            state, loss = single(state, x, y)
            return jax.tree.map(lambda a: a[None], state), loss[None]

        return jax.jit(run, donate_argnums=0)


def stacked_losses() -> Callable:
    """A function from stacked models (weights and biases in turn, x, y) to one loss per model."""
    torch: Any = import_module("torch")
    baddbmm, entropy = torch.baddbmm, torch.nn.functional.cross_entropy

    def losses_of(params, x, y):
        for w, b in zip(params[:-2:2], params[1:-2:2]):
            x = baddbmm(b, x, w).sigmoid()
        logits = baddbmm(params[-1], x, params[-2])
        return entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)

    return losses_of


class TorchStacked:
    """PyTorch: the models of a chunk stacked, `baddbmm` for their layers, one fused Adam for all."""

    package = "torch"
    CHUNKS: ClassVar[tuple[int, ...]] = (50, 100, 250, 1000)
    TRIAL: ClassVar = 200

    def __init__(self, tasks: list[Many], threads: int):
        torch: Any = import_module("torch")
        torch.set_num_threads(threads)
        self.tasks, self.models = tasks, sum(task.models for task in tasks)
        self._threads = threads
        self.step = self._step()
        chunks = sorted({min(chunk, tasks[0].models) for chunk in self.CHUNKS})
        seconds = {}
        for self.chunk in chunks:
            if len(chunks) > 1:
                n = max(self.TRIAL // self.chunk, 1)
                self.place(n)
                self.train(1)
                seconds[self.chunk] = min(self.train(1) for _ in range(3)) / min(n * self.chunk, tasks[0].models)
        if seconds:
            self.chunk = min(seconds, key=lambda chunk: seconds[chunk])
        self.note = f"chunks of {self.chunk}"
        self.place()

    def place(self, most: int | None = None) -> None:
        torch: Any = import_module("torch")
        self.states, self.data = [], []
        parts = [
            (t, slice(i, min(i + self.chunk, t.models))) for t in self.tasks for i in range(0, t.models, self.chunk)
        ]
        for task, part in parts[:most]:
            params = [torch.from_numpy(a[part].copy()) for w, b in task.weights for a in (w, b[:, None])]
            self.states.append(self._state(params))
            x = task.x[part].reshape(-1, task.batches, task.batch, task.sizes[0]).swapaxes(0, 1)
            y = task.y[part].reshape(-1, task.batches, task.batch).swapaxes(0, 1)
            batches = [torch.from_numpy(np.ascontiguousarray(a)).unbind(0) for a in (x, y)]
            self.data.append(list(zip(*batches)))

    def _state(self, params: list) -> Any:
        torch: Any = import_module("torch")
        for p in params:
            p.requires_grad_()
        return params, torch.optim.Adam(params, LEARNING_RATE, (BETA1, BETA2), EPSILON, fused=True)

    def _step(self) -> Callable:
        losses_of = stacked_losses()

        def step(state, x, y):
            params, optimizer = state
            optimizer.zero_grad()
            losses = losses_of(params, x, y)
            losses.sum().backward()
            optimizer.step()
            return losses.detach()

        return step

    def train(self, epochs: int) -> float:
        step, self.last = self.step, []
        start = time.perf_counter()
        for state, batches in zip(self.states, self.data):
            for _ in range(epochs):
                losses = [step(state, x, y) for x, y in batches]
            self.last.append(losses)
        return time.perf_counter() - start

    def losses(self) -> np.ndarray:
        torch: Any = import_module("torch")
        return np.concatenate([torch.stack(losses).mean(0).numpy().reshape(-1) for losses in self.last])


class TorchCompiled(TorchStacked):
    """`torch.compile` of the stacked models' whole step, entered by a C++ wrapper."""

    CHUNKS: ClassVar[tuple[int, ...]] = (100, 250)

    def _state(self, params: list) -> Any:
        torch: Any = import_module("torch")
        moments = [[torch.zeros_like(p) for p in params] for _ in range(2)]
        powers = torch.tensor([BETA1, BETA2])
        return params, *moments, powers, torch.tensor(LEARNING_RATE / (1 - BETA1)), torch.tensor((1 - BETA2) ** 0.5)

    def _step(self) -> Callable:
        torch: Any = import_module("torch")
        inductor: Any = import_module("torch._inductor.config")
        inductor.cpp.threads = self._threads
        inductor.cpp_wrapper = True
        losses_of = stacked_losses()

        def total(params, x, y):
            losses = losses_of(params, x, y)
            return losses.sum(), losses

        def step(params, first, second, powers, rate, root, x, y):
            grads, (_, losses) = torch.func.grad_and_value(total, has_aux=True)(params, x, y)
            torch_adam(params, first, second, powers, rate, root, grads)
            return losses

        compiled = torch.compile(step, fullgraph=True, dynamic=False)
        return lambda state, x, y: compiled(*state, x, y)

    def train(self, epochs: int) -> float:
        with import_module("torch").no_grad():
            return super().train(epochs)


class TorchOne(TorchStacked):
    """PyTorch eager, one model after the other: modules and the fused Adam."""

    CHUNKS: ClassVar[tuple[int, ...]] = (1,)

    def _state(self, params: list) -> Any:
        torch: Any = import_module("torch")
        layers: list[Any] = []
        for w, b in zip(params[::2], params[1::2]):
            layers += [*([torch.nn.Sigmoid()] if layers else []), torch.nn.Linear(*w.shape[1:])]
            layers[-1].weight.data.copy_(w[0].T)
            layers[-1].bias.data.copy_(b[0, 0])
        net = torch.nn.Sequential(*layers)
        return net, torch.optim.Adam(net.parameters(), LEARNING_RATE, (BETA1, BETA2), EPSILON, fused=True)

    def _step(self) -> Callable:
        entropy = import_module("torch").nn.functional.cross_entropy

        def step(state, x, y):
            net, optimizer = state
            optimizer.zero_grad()
            loss = entropy(net(x[0]), y[0])
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step


class ScikitLearn:
    """scikit-learn's `MLPClassifier.partial_fit`, one call per step, one model after the other."""

    package = "sklearn"
    note = ""

    def __init__(self, tasks: list[Many], threads: int):
        kind: Any = import_module("sklearn.neural_network").MLPClassifier
        self.tasks, self.nets = tasks, []
        self.models = sum(task.models for task in tasks)
        for task in tasks:
            for i in range(task.models):
                options = {"activation": "logistic", "alpha": 0, "shuffle": False, "learning_rate_init": LEARNING_RATE}
                net = kind(tuple(task.sizes[1:-1]), batch_size=task.batch, **options)
                x, y = task.x[i].reshape(task.batches, task.batch, -1), task.y[i].reshape(task.batches, task.batch)
                net.partial_fit(x[0], y[0], classes=np.arange(task.sizes[-1]))  # allocates
                for (w, b), coef, intercept in zip(task.weights, net.coefs_, net.intercepts_):
                    coef[:], intercept[:] = w[i], b[i]
                net._optimizer.t = 0
                for moment in [*net._optimizer.ms, *net._optimizer.vs]:
                    moment[:] = 0
                self.nets.append((net, list(zip(x, y))))

    def train(self, epochs: int) -> float:
        self.last = []
        start = time.perf_counter()
        for net, batches in self.nets:
            for _ in range(epochs):
                losses = []
                for x, y in batches:
                    net.partial_fit(x, y)
                    losses.append(net.loss_)
            self.last.append(losses)
        return time.perf_counter() - start

    def losses(self) -> np.ndarray:
        return np.array(self.last).mean(1)


CONTESTANTS: dict[str, Any] = {
    "ours": Ours,
    "ours_apart": OursApart,
    "jax_vmap": JaxVmap,
    "jax_devices": JaxDevices,
    "jax_one": JaxOne,
    "torch_compiled": TorchCompiled,
    "torch_stacked": TorchStacked,
    "torch_one": TorchOne,
    "sklearn": ScikitLearn,
}
NAMES = {
    "ours": "calcvm fleet",
    "ours_apart": "calcvm, a fleet for each architecture",
    "jax_vmap": "JAX vmap",
    "jax_devices": "JAX vmap on a device for each core",
    "jax_one": "JAX jit, one by one",
    "torch_compiled": "torch.compile, stacked",
    "torch_stacked": "torch eager, stacked",
    "torch_one": "torch eager, one by one",
    "sklearn": "scikit-learn, one by one",
}
SAMPLED = {"torch_one": 20, "sklearn": 20, "jax_one": 100}  # models to train, if there are more
ONE_BY_ONE = (*SAMPLED,)


class Team:
    """A contestant in separate processes: one, or one per core if it trains models one by one.

    Attributes
    ----------
    losses : ndarray
        Mean loss of each of the first models over the last epoch of the first training.
    models : int
        The number of models that it trains.
    """

    def __init__(self, who: str, tasks: list[dict[str, Any]], threads: int, epochs: int = 1, core: int | None = None):
        each = SAMPLED.get(who)
        tasks = [{**t, "models": min(t["models"], each or t["models"])} for t in tasks]
        n = threads if who in ONE_BY_ONE and len(tasks) == 1 and tasks[0]["models"] >= threads else 1
        shares = [[{**t, "models": t["models"] // n, "first": i * (t["models"] // n)} for t in tasks] for i in range(n)]
        extra = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={threads}"} if who == "jax_devices" else {}
        each_threads = threads // n if who in ONE_BY_ONE else threads
        self.processes: list[Process] = []

        def start(share: list[dict[str, Any]]) -> Process:
            spec = {"who": who, "tasks": share, "threads": each_threads, "core": core, "epochs": epochs}
            return Process("-m", "bench.many", json.dumps(spec), threads=each_threads, **extra)

        self._pool = ThreadPoolExecutor(n)
        futures = [self._pool.submit(start, share) for share in shares]
        try:
            for future in futures:
                self.processes.append(future.result())
        except RuntimeError:
            self.close()
            raise
        ready = [p.ready for p in self.processes]
        self.note, self.setup, self.first = ready[0]["note"], max(r["setup"] for r in ready), ready[0]["first"]
        self.losses = np.concatenate([r["losses"] for r in ready])
        self.models = sum(r["models"] for r in ready)

    def compare(self, others: np.ndarray) -> float:
        """Largest relative difference of its losses from those of a contestant that trained these models first."""
        return float(np.abs(self.losses / others[: len(self.losses)] - 1).max())

    def ask(self, **request: Any) -> list[dict[str, Any]]:
        """Send a request to all processes at once, and return their answers."""
        return list(self._pool.map(lambda p: p.ask(**request), self.processes))

    def seconds(self, epochs: int) -> float:
        """Seconds of training for ``epochs``, until the last process is done."""
        return max(reply["seconds"] for reply in self.ask(epochs=epochs))

    def close(self) -> None:
        for process in self.processes:
            with suppress(OSError):
                process.close()
        self._pool.shutdown()


def main(spec: dict[str, Any]) -> None:
    """Serve one contestant over stdin and stdout, one JSON line each way, until stdin ends."""
    answer = answers(spec.get("core"))
    kind = CONTESTANTS[spec["who"]]
    tasks = [Many(**task) for task in spec["tasks"]]
    import_module(kind.package)
    imported = memory_bytes("VmRSS")
    start = time.perf_counter()
    contestant = kind(tasks, spec["threads"])
    setup = time.perf_counter() - start
    start = time.perf_counter()
    contestant.train(spec["epochs"])
    first = time.perf_counter() - start
    losses = [float(loss) for loss in contestant.losses()]
    answer(losses=losses, setup=setup, first=first, note=contestant.note, models=contestant.models)
    for line in sys.stdin:
        request = json.loads(line)
        if "epochs" in request:
            answer(seconds=contestant.train(request["epochs"]))
        else:
            answer(imported=imported, peak=memory_bytes("VmHWM"))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

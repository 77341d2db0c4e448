"""The contestants of the MLP training step: calcvm and its peers, each at its best.

All train the same network (sigmoid hidden layers, mean softmax cross entropy, Adam) from the same weights on
the same batch.  A contestant is a class:

    __init__(task, x, y, threads)    # imports, builds and compiles
    restart()                        # the initial weights, fresh moments
    steps(n) -> float                # n training steps, done when it returns; the loss that step n computed
    weights() -> [(w, b), ...]       # as they are now

Each runs in a separate process, because most libraries fix their threads at start-up.  It answers requests of
`bench.harness.Process`, such as ``{"steps": 1000}``, and can be tried by hand::

    echo '{"steps": 1000}' | python -m bench.peers '{"who": "jax_scan", "sizes": [4, 16, 3], "batch": 32, "threads": 1}'
"""

from __future__ import annotations

import io
import json
import sys
import time
from importlib import import_module
from typing import Any, ClassVar

import numpy as np

from bench.harness import answers, best_seconds, memory_bytes

LEARNING_RATE, BETA1, BETA2, EPSILON = 1e-3, 0.9, 0.999, 1e-8
VERIFY_STEPS = 20


class Task:
    """A learnable classification task: a prototype per class, under noise that makes classes overlap.

    Parameters
    ----------
    sizes : sequence of int
        Neurons per layer, input first.
    seed : int, optional
        Seed of the prototypes and of the initial weights.

    Attributes
    ----------
    weights : list of (w, b)
        The initial weights of every contestant: w of shape (n_in, n_out), b of shape (n_out,), float32.
    """

    def __init__(self, sizes: list[int], seed: int = 0):
        rng = np.random.default_rng(seed)
        self.sizes = sizes
        self.weights = [
            (
                (rng.standard_normal((n_in, n_out)) / np.sqrt(n_in)).astype(np.float32),
                (rng.standard_normal(n_out) * 0.1).astype(np.float32),
            )
            for n_in, n_out in zip(sizes[:-1], sizes[1:])
        ]
        # prototypes are 4 standard deviations apart, for any number of inputs
        self.prototypes = (rng.standard_normal((sizes[-1], sizes[0])) * 4 / np.sqrt(2 * sizes[0])).astype(np.float32)

    def sample(self, n: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """`n` rows: x of shape (n, sizes[0]), float32, and their classes y, int64."""
        rng = np.random.default_rng(seed)
        y = rng.integers(0, self.sizes[-1], n)
        x = rng.standard_normal((n, self.sizes[0]), dtype=np.float32)
        for i, c in enumerate(y):
            x[i] += self.prototypes[c]  # row by row, without a temporary of x's size
        return x, y

    def step_flops(self, batch: int) -> int:
        """FLOPs of a step's matrix products: forward, weight gradients, input gradients except of the first layer."""
        products = [n_in * n_out for n_in, n_out in zip(self.sizes[:-1], self.sizes[1:])]
        return 2 * batch * (3 * sum(products) - products[0])

    @property
    def resident_bytes(self) -> int:
        """Bytes of parameters and moments."""
        return 3 * 4 * sum(w.size + b.size for w, b in self.weights)

    def step_bytes(self, batch: int) -> int:
        """Least bytes that a step moves: the forward reads the parameters; Adam reads and writes them and their
        moments; the forward and the first weight gradient read the batch."""
        return self.resident_bytes * 7 // 3 + 2 * 4 * batch * self.sizes[0]


def accuracy(weights: list[tuple[np.ndarray, np.ndarray]], x: np.ndarray, y: np.ndarray) -> float:
    """Share of rows that a network with ``weights`` classifies correctly, computed in float64."""
    a = x.astype(np.float64)
    for i, (w, b) in enumerate(weights):
        a = a @ w.astype(np.float64) + b
        if i < len(weights) - 1:
            a = 1 / (1 + np.exp(-a))
    return float((a.argmax(1) == y).mean())


def curve(contestant: Any, rounds: int, every: int, x: np.ndarray, y: np.ndarray) -> dict[str, list[float]]:
    """Loss of each step from the start, and accuracy on x and y after every ``every`` steps."""
    losses, shares = [], []
    contestant.restart()
    for i in range(1, rounds + 1):
        losses.append(contestant.steps(1))
        if i % every == 0:
            shares.append(accuracy(contestant.weights(), x, y))
    return {"losses": losses, "accuracies": shares}


class Ours:
    """calcvm: `Model.run_steps` on the batch in the heap, one call for any n."""

    package = "calcvm"
    note = ""

    def __init__(self, task: Task, x: Any, y: np.ndarray, threads: int | None):
        cv: Any = import_module("calcvm")
        net = cv.nn.Linear(task.sizes[1])
        for width in task.sizes[2:]:
            net = net >> cv.nn.Sigmoid() >> cv.nn.Linear(width)
        self.model = cv.Model(
            net,
            input_shape=(task.sizes[0],),
            loss="softmax_cross_entropy",
            optimizer=cv.Adam(LEARNING_RATE),
            seed=0,
            **self.options(len(x)),
            **({} if threads is None else {"workers": threads}),
        )
        self.initial = task.weights
        # a weight is stored (inputs, outputs) or (outputs, inputs): the shape of the first, not square, shows which
        self.transposed = next(iter(self.model.parameters.values())).shape != task.weights[0][0].shape
        self.x, self.y = x, y
        self.heap_bytes = self.model.plan.heap_bytes

    def options(self, n: int) -> dict[str, Any]:
        return {"batch_size": n}

    def restart(self) -> None:
        self.model.reset(seed=0)
        for (w, b), (initial_w, initial_b) in zip(self.weights(), self.initial):
            assert w.shape == initial_w.shape
            w[...], b[...] = initial_w, initial_b
        self._place()

    def _place(self) -> None:
        self.model["input"], self.model["target"] = self.x, self.y

    def steps(self, n: int) -> float:
        return self.model.run_steps(n)

    def weights(self) -> list:
        flat = list(self.model.parameters.values())
        return [(w.T if self.transposed else w, b) for w, b in zip(flat[::2], flat[1::2])]


class OursDefault(Ours):
    """calcvm with the number of workers that its plan chooses."""


class OursSpecialized(Ours):
    """calcvm with ``specialize=True``."""

    def options(self, n: int) -> dict[str, Any]:
        return {"batch_size": n, "specialize": True}


class OursRounds(Ours):
    """calcvm with a technical batch of `ROUND`, accumulated to the learning batch: `Model.fit` on the arrays in place."""

    ROUND: ClassVar = 500
    note = f"rounds of {ROUND}"

    def options(self, n: int) -> dict[str, Any]:
        return {"batch_size": self.ROUND, "learning_batch": n}

    def _place(self) -> None:
        pass

    def steps(self, n: int) -> float:
        return self.model.fit(self.x, self.y, epochs=n, shuffle=False, progress=False)["loss"][-1]


class OursFromFile(Ours):
    """calcvm reading the batch (a `numpy.memmap`) from its file into the heap, so that the data exist once."""

    def restart(self) -> None:
        super().restart()
        resident, n = self.model, self.x.size
        symbol = next(s for s in resident.program.symbols if s.name == "input")
        cells = memoryview(resident.elements[symbol.offset : symbol.offset + n]).cast("B")
        with io.FileIO(self.x.filename) as file:
            file.seek(self.x.offset)
            assert file.readinto(cells) == len(cells)

    def _place(self) -> None:
        self.model["input"], self.model["target"] = np.broadcast_to(np.float32(0), self.x.shape), self.y


class TorchEager:
    """PyTorch eager with the fused Adam."""

    package = "torch"
    note = ""

    def __init__(self, task: Task, x: np.ndarray, y: np.ndarray, threads: int):
        import torch

        torch.set_num_threads(threads)
        self.initial = [torch.from_numpy(np.ascontiguousarray(a)) for w, b in task.weights for a in (w.T, b)]
        layers: list[Any] = []
        for n_in, n_out in zip(task.sizes[:-1], task.sizes[1:]):
            layers += [*([torch.nn.Sigmoid()] if layers else []), torch.nn.Linear(n_in, n_out)]
        self.net = torch.nn.Sequential(*layers)
        self.x, self.y = torch.from_numpy(x), torch.from_numpy(y)
        self.loss = torch.nn.functional.cross_entropy
        self.optimizer = torch.optim.Adam(self.net.parameters(), LEARNING_RATE, (BETA1, BETA2), EPSILON, fused=True)

    def restart(self) -> None:
        for p, initial in zip(self.net.parameters(), self.initial):
            p.data.copy_(initial)
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()

    def steps(self, n: int) -> float:
        for _ in range(n):
            self.optimizer.zero_grad()
            loss = self.loss(self.net(self.x), self.y)
            loss.backward()
            self.optimizer.step()
        return loss.item()

    def weights(self) -> list:
        flat = [p.detach().numpy() for p in self.net.parameters()]
        return [(w.T, b) for w, b in zip(flat[::2], flat[1::2])]


def torch_adam(params: Any, first: Any, second: Any, powers: Any, rate: Any, root: Any, grads: Any) -> None:
    """Adam, written out, because `torch.optim` would be a second graph for `torch.compile`.

    ``powers`` of the betas, ``rate`` and ``root`` belong to the coming step.  They are state, because Inductor would
    inline their formulas into every element's update.
    """
    for p, m, v, g in zip(params, first, second, grads):
        m.lerp_(g, 1 - BETA1)
        v.mul_(BETA2).addcmul_(g, g, value=1 - BETA2)
        p.sub_(rate * m / (v.sqrt() / root + EPSILON))
    powers[0] *= BETA1
    powers[1] *= BETA2
    rate.copy_(LEARNING_RATE / (1 - powers[0]))
    root.copy_((1 - powers[1]).sqrt())


def torch_step(torch: Any) -> Any:
    """A training step of a multi-layer perceptron as one function: forward, backward and Adam; it returns the loss."""
    linear, entropy = torch.nn.functional.linear, torch.nn.functional.cross_entropy

    def loss_of(params, x, y):
        for w, b in zip(params[:-2:2], params[1:-2:2]):
            x = linear(x, w, b).sigmoid()
        return entropy(linear(x, *params[-2:]), y)

    def step(params, first, second, powers, rate, root, x, y):
        grads, loss = torch.func.grad_and_value(loss_of)(params, x, y)
        torch_adam(params, first, second, powers, rate, root, grads)
        return loss

    return step


class TorchCompile:
    """`torch.compile` of the whole step: forward, backward and Adam in one graph, called through a C++ wrapper."""

    package = "torch"
    note = ""

    def __init__(self, task: Task, x: np.ndarray, y: np.ndarray, threads: int):
        import torch
        import torch._inductor.config as inductor

        torch.set_num_threads(threads)
        inductor.cpp.threads = threads
        inductor.cpp_wrapper = True
        self.initial = [torch.from_numpy(np.ascontiguousarray(a)) for w, b in task.weights for a in (w.T, b)]
        self.state = [torch.empty_like(p) for p in self.initial]
        self.first = [torch.empty_like(p) for p in self.initial]
        self.second = [torch.empty_like(p) for p in self.initial]
        self.powers, self.rate, self.root = torch.empty(2), torch.empty(()), torch.empty(())
        self.x, self.y = torch.from_numpy(x), torch.from_numpy(y)
        self.no_grad = torch.no_grad
        self.step = torch.compile(torch_step(torch), fullgraph=True, dynamic=False)

    def restart(self) -> None:
        for p, m, v, initial in zip(self.state, self.first, self.second, self.initial):
            p.copy_(initial)
            m.zero_()
            v.zero_()
        self.powers[0], self.powers[1] = BETA1, BETA2
        self.rate.fill_(LEARNING_RATE / (1 - BETA1))
        self.root.fill_((1 - BETA2) ** 0.5)

    def steps(self, n: int) -> float:
        step, args = self.step, (self.state, self.first, self.second, self.powers, self.rate, self.root, self.x, self.y)
        with self.no_grad():
            for _ in range(n):
                loss = step(*args)
        return loss.item()

    def weights(self) -> list:
        return [(w.numpy().T, b.numpy()) for w, b in zip(self.state[::2], self.state[1::2])]


def jax_loss(params: Any, x: Any, y: Any) -> Any:
    """The loss of the benchmarks' network."""
    import jax
    import jax.numpy as jnp

    for w, b in params[:-1]:
        x = jax.nn.sigmoid(x @ w + b)
    w, b = params[-1]
    logits = x @ w + b
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - jnp.take_along_axis(logits, y[:, None], axis=1)[:, 0])


def jax_step(loss_of: Any = jax_loss) -> Any:
    """A training step of one network with Adam: (state, x, y) to (state, loss); state is (weights, two moments, steps done)."""
    import jax
    import jax.numpy as jnp

    def step(state, x, y):
        params, first, second, count = state
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        count = count + 1
        rate, root = LEARNING_RATE / (1 - BETA1**count), jnp.sqrt(1 - BETA2**count)
        tree = jax.tree.map
        first = tree(lambda m, g: BETA1 * m + (1 - BETA1) * g, first, grads)
        second = tree(lambda v, g: BETA2 * v + (1 - BETA2) * g * g, second, grads)
        params = tree(lambda p, m, v: p - rate * m / (jnp.sqrt(v) / root + EPSILON), params, first, second)
        return (params, first, second, count), loss

    return step


class JaxStep:
    """`jax.jit` of one step with donated buffers, called once per step."""

    package = "jax"
    note = ""

    def __init__(self, task: Task, x: np.ndarray, y: np.ndarray, threads: int):
        import jax
        import jax.numpy as jnp

        step = jax_step()
        self.initial = task.weights
        self.x, self.y = jnp.asarray(x), jnp.asarray(y, jnp.int32)
        self.asarray, self.tree = jnp.array, jax.tree.map
        self.step = jax.jit(step, donate_argnums=0)
        self._compile(jax, step)

    def _compile(self, jax: Any, step: Any) -> None:
        pass

    def restart(self) -> None:
        zeros = lambda: self.tree(lambda a: self.asarray(np.zeros_like(a)), self.initial)
        self.state = self.tree(self.asarray, self.initial), zeros(), zeros(), self.asarray(np.float32(0))

    def steps(self, n: int) -> float:
        state, step, x, y = self.state, self.step, self.x, self.y
        for _ in range(n):
            state, loss = step(state, x, y)
        self.state = state
        return float(loss)

    def weights(self) -> list:
        return [(np.asarray(w), np.asarray(b)) for w, b in self.state[0]]


class JaxScan(JaxStep):
    """`jax.lax.scan` over all steps in one jitted call with donated buffers, with the best unrolling for the network."""

    UNROLL: ClassVar[tuple[int, ...]] = (1, 4, 16)
    TRIAL_STEPS: ClassVar = 256

    def _compile(self, jax: Any, step: Any) -> None:
        def scan(state, x, y, n, unroll):
            state, losses = jax.lax.scan(lambda s, _: step(s, x, y), state, length=n, unroll=unroll)
            return state, losses[-1]

        self.scan = jax.jit(scan, static_argnums=(3, 4), donate_argnums=0)
        self.unroll = 1
        self.restart()
        if best_seconds(lambda: self.steps(16), 1) < 16e-4:  # for longer steps the loop does not matter
            seconds = {}
            for unroll in self.UNROLL:
                self.unroll = unroll
                seconds[unroll] = best_seconds(lambda: self.steps(self.TRIAL_STEPS), 15)
            self.unroll = min(seconds, key=lambda unroll: seconds[unroll])
        self.note = f"unroll {self.unroll}"

    def steps(self, n: int) -> float:
        self.state, loss = self.scan(self.state, self.x, self.y, n, min(n, self.unroll))
        return float(loss)


class JaxScanPlain(JaxScan):
    """`JaxScan` without unrolling."""

    UNROLL: ClassVar[tuple[int, ...]] = (1,)


class ScikitLearn:
    """scikit-learn's `MLPClassifier.partial_fit`, one call per step."""

    package = "sklearn"
    note = ""

    def __init__(self, task: Task, x: np.ndarray, y: np.ndarray, threads: int):
        from sklearn.neural_network import MLPClassifier

        self.initial, self.x, self.y = task.weights, x, y
        self.net = MLPClassifier(
            tuple(task.sizes[1:-1]),
            activation="logistic",
            alpha=0,
            batch_size=len(x),
            learning_rate_init=LEARNING_RATE,
            shuffle=False,
        )
        self.net.partial_fit(x, y, classes=np.arange(task.sizes[-1]))  # allocates; restart() undoes the training

    def restart(self) -> None:
        for (w, b), coef, intercept in zip(self.initial, self.net.coefs_, self.net.intercepts_):
            coef[:], intercept[:] = w, b
        adam = self.net._optimizer
        adam.t = 0
        for moment in [*adam.ms, *adam.vs]:
            moment[:] = 0

    def steps(self, n: int) -> float:
        for _ in range(n):
            self.net.partial_fit(self.x, self.y)
        return self.net.loss_

    def weights(self) -> list:
        return list(zip(self.net.coefs_, self.net.intercepts_))


CONTESTANTS: dict[str, Any] = {
    "ours": Ours,
    "ours_default": OursDefault,
    "ours_specialized": OursSpecialized,
    "ours_from_file": OursFromFile,
    "ours_rounds": OursRounds,
    "jax_scan": JaxScan,
    "jax_scan_plain": JaxScanPlain,
    "jax_step": JaxStep,
    "torch_eager": TorchEager,
    "torch_compile": TorchCompile,
    "sklearn": ScikitLearn,
}
NAMES = {
    "ours": "calcvm",
    "ours_default": "calcvm, default workers",
    "ours_specialized": "calcvm, specialized",
    "ours_from_file": "calcvm, batch read into the heap",
    "ours_rounds": "calcvm, fit in rounds",
    "jax_scan": "JAX scan",
    "jax_scan_plain": "JAX scan, plain",
    "jax_step": "JAX jit step",
    "torch_eager": "torch eager",
    "torch_compile": "torch.compile",
    "sklearn": "scikit-learn",
}


def main(spec: dict[str, Any]) -> None:
    """Serve one contestant over stdin and stdout, one JSON line each way, until stdin ends."""
    answer = answers(spec.get("core"))
    kind, task = CONTESTANTS[spec["who"]], Task(spec["sizes"])
    import_module(kind.package)
    imported = memory_bytes("VmRSS")
    if "data" in spec:
        x_path, y_path = spec["data"]
        x, y = np.load(x_path, mmap_mode="r" if kind is OursFromFile else None), np.load(y_path)
    else:
        x, y = task.sample(spec["batch"])
    start = time.perf_counter()
    contestant = kind(task, x, y, spec["threads"])
    del x, y  # contestants keep their own references
    contestant.restart()
    loss = contestant.steps(VERIFY_STEPS)
    setup = time.perf_counter() - start
    heap = getattr(contestant, "heap_bytes", None)
    answer(loss=loss, setup_seconds=setup, note=contestant.note, heap_bytes=heap)
    for line in sys.stdin:
        request = json.loads(line)
        if "steps" in request:
            contestant.restart()
            start = time.perf_counter()
            loss = contestant.steps(request["steps"])
            answer(seconds=time.perf_counter() - start, loss=loss)
        elif "accuracy" in request:
            answer(accuracy=accuracy(contestant.weights(), *task.sample(10_000, seed=2)))
        elif "curve" in request:
            answer(**curve(contestant, request["curve"], request["every"], *map(np.load, request["test"])))
        else:
            answer(imported=imported, peak=memory_bytes("VmHWM"))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

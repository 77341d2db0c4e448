"""The contestants of the MLP training step: calcvm and its peers, each at its best.

Every contestant trains the same network (sigmoid hidden layers, mean softmax cross entropy, Adam) from the
same weights on the same batch, and is one class with one method::

    steps(n) -> float        # n training steps, done when it returns; the loss that step n computed

It lives in a process of its own (thread counts are fixed at start-up in most libraries) that builds, reports
its loss after `VERIFY_STEPS` steps and then times batches of steps on request, one JSON line each way; see
`bench.harness.Contestant` for the other end of the pipe.

    echo '{"steps": 1000}' | python -m bench.peers '{"who": "jax_scan", "sizes": [4, 16, 3], "batch": 32, "threads": 1}'
"""

import json
import os
import sys
import time

import numpy as np

LEARNING_RATE, BETA1, BETA2, EPSILON = 1e-3, 0.9, 0.999, 1e-8
VERIFY_STEPS = 20
SCAN_STEPS = 1000  # most steps of one JAX scan: more only lengthens the smallest time that can be asked for


def make_task(sizes, batch, seed=0):
    """A learnable classification task and the initial weights that every contestant starts from.

    Parameters
    ----------
    sizes : sequence of int
        Neurons per layer, input first.
    batch : int
        Rows of the batch.
    seed : int, optional
        Seed of everything.

    Returns
    -------
    weights : list of (w, b)
        ``w`` of shape (n_in, n_out), ``b`` of shape (n_out,), float32.
    x : ndarray, shape (batch, sizes[0]), float32
        One blurred prototype per class, plus noise.
    y : ndarray, shape (batch,), int64
        Class of each row.
    """
    rng = np.random.default_rng(seed)
    weights = [
        (
            (rng.standard_normal((n_in, n_out)) / np.sqrt(n_in)).astype(np.float32),
            (rng.standard_normal(n_out) * 0.1).astype(np.float32),
        )
        for n_in, n_out in zip(sizes[:-1], sizes[1:], strict=True)
    ]
    prototypes = rng.standard_normal((sizes[-1], sizes[0])).astype(np.float32)
    y = rng.integers(0, sizes[-1], batch)
    x = rng.standard_normal((batch, sizes[0]), dtype=np.float32)
    x += 0.35 * prototypes[y]
    return weights, x, y


def step_flops(sizes, batch):
    """FLOPs of the matrix products of one step: forward, weight gradients, and input gradients past layer 1."""
    products = [n_in * n_out for n_in, n_out in zip(sizes[:-1], sizes[1:], strict=True)]
    return 2 * batch * (3 * sum(products) - products[0])


class Ours:
    """calcvm: `Model.run_steps` on the batch in the heap, one call whatever n is."""

    package = "calcvm"

    def __init__(self, sizes, weights, x, y, workers):
        import calcvm as cv
        from calcvm import nn

        net = nn.Linear(sizes[1])
        for width in sizes[2:]:
            net = net >> nn.Sigmoid() >> nn.Linear(width)
        options = {} if workers is None else {"workers": workers}
        self.model = cv.Model(
            net,
            input_shape=(sizes[0],),
            loss="softmax_cross_entropy",
            optimizer=cv.Adam(LEARNING_RATE),
            batch_size=len(x),
            seed=0,
            **options,
        )
        self._start(weights, x, y)

    def _start(self, weights, x, y):
        """Place the batch in the heap and set the weights: the placing step's update is undone by loading again."""
        raise NotImplementedError

    def steps(self, n):
        return float(self.model.run_steps(n))


class TorchEager:
    """PyTorch eager with the fused Adam."""

    package = "torch"

    def __init__(self, sizes, weights, x, y, threads):
        import torch

        torch.set_num_threads(threads)
        layers = []
        for i, (w, b) in enumerate(weights):
            layer = torch.nn.Linear(*w.shape)
            with torch.no_grad():
                layer.weight.copy_(torch.from_numpy(w.T))
                layer.bias.copy_(torch.from_numpy(b))
            layers += [torch.nn.Sigmoid(), layer] if i else [layer]
        self.net = torch.nn.Sequential(*layers)
        self.x, self.y = torch.from_numpy(x), torch.from_numpy(y)
        self.loss = torch.nn.functional.cross_entropy
        self.optimizer = torch.optim.Adam(self.net.parameters(), LEARNING_RATE, (BETA1, BETA2), EPSILON, fused=True)

    def steps(self, n):
        for _ in range(n):
            self.optimizer.zero_grad()
            loss = self.loss(self.net(self.x), self.y)
            loss.backward()
            self.optimizer.step()
        return loss.item()


class TorchCompile:
    """`torch.compile` of the whole step: forward, backward and Adam are one graph, one call a step."""

    package = "torch"
    variant = {}

    def __init__(self, sizes, weights, x, y, threads):
        import torch
        import torch._inductor.config as inductor

        torch.set_num_threads(threads)
        inductor.cpp.threads = threads
        inductor.cpp_wrapper = self.variant.get("cpp_wrapper", True)
        self.state = [torch.from_numpy(np.ascontiguousarray(a)) for w, b in weights for a in (w.T, b)]
        self.first = [torch.zeros_like(p) for p in self.state]
        self.second = [torch.zeros_like(p) for p in self.state]
        self.count = torch.zeros(())
        self.x, self.y = torch.from_numpy(x), torch.from_numpy(y)
        linear, entropy = torch.nn.functional.linear, torch.nn.functional.cross_entropy

        def loss_of(params, x, y):
            for w, b in zip(params[:-2:2], params[1:-2:2], strict=True):
                x = linear(x, w, b).sigmoid()
            return entropy(linear(x, *params[-2:]), y)

        def step(params, first, second, count, x, y):
            grads, loss = torch.func.grad_and_value(loss_of)(params, x, y)
            count.add_(1)
            rate = LEARNING_RATE / (1 - BETA1**count)
            root = (1 - BETA2**count).sqrt()
            for p, m, v, g in zip(params, first, second, grads, strict=True):
                m.lerp_(g, 1 - BETA1)
                v.mul_(BETA2).addcmul_(g, g, value=1 - BETA2)
                p.sub_(rate * m / (v.sqrt() / root + EPSILON))
            return loss

        self.no_grad = torch.no_grad
        self.step = torch.compile(step, fullgraph=True, dynamic=False, mode=self.variant.get("mode"))

    def steps(self, n):
        step, args = self.step, (self.state, self.first, self.second, self.count, self.x, self.y)
        with self.no_grad():
            for _ in range(n):
                loss = step(*args)
        return loss.item()


class JaxStep:
    """`jax.jit` of one step with donated buffers, called once per step."""

    package = "jax"

    def __init__(self, sizes, weights, x, y, threads):
        import jax
        import jax.numpy as jnp

        def loss_of(params, x, y):
            for w, b in params[:-1]:
                x = jax.nn.sigmoid(x @ w + b)
            w, b = params[-1]
            logits = x @ w + b
            return jnp.mean(jax.nn.logsumexp(logits, axis=1) - jnp.take_along_axis(logits, y[:, None], axis=1)[:, 0])

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

        params = [(jnp.asarray(w), jnp.asarray(b)) for w, b in weights]
        zeros = jax.tree.map(jnp.zeros_like, params)
        self.state = params, zeros, jax.tree.map(jnp.copy, zeros), jnp.zeros(())
        self.x, self.y = jnp.asarray(x), jnp.asarray(y, jnp.int32)
        self._compile(jax, step)

    def _compile(self, jax, step):
        self.step = jax.jit(step, donate_argnums=0)

    def steps(self, n):
        state, step, x, y = self.state, self.step, self.x, self.y
        for _ in range(n):
            state, loss = step(state, x, y)
        self.state = state
        return float(loss)


class JaxScan(JaxStep):
    """`jax.lax.scan` over the steps, in one jitted call with donated buffers."""

    def _compile(self, jax, step):
        def scan(state, x, y, n):
            state, losses = jax.lax.scan(lambda s, _: step(s, x, y), state, length=n)
            return state, losses[-1]

        self.scan = jax.jit(scan, static_argnums=3, donate_argnums=0)

    def steps(self, n):
        while n:
            k = min(n, SCAN_STEPS)
            self.state, loss = self.scan(self.state, self.x, self.y, k)
            n -= k
        return float(loss)


class ScikitLearn:
    """scikit-learn's `MLPClassifier.partial_fit`, one call per step."""

    package = "sklearn"

    def __init__(self, sizes, weights, x, y, threads):
        from sklearn.neural_network import MLPClassifier

        self.x, self.y = x, y
        self.net = MLPClassifier(
            tuple(sizes[1:-1]),
            activation="logistic",
            alpha=0,
            batch_size=len(x),
            learning_rate_init=LEARNING_RATE,
            shuffle=False,
        )
        self.net.partial_fit(x, y, classes=np.arange(sizes[-1]))  # allocates; what it learned is overwritten
        for (w, b), coef, intercept in zip(weights, self.net.coefs_, self.net.intercepts_, strict=True):
            coef[:], intercept[:] = w, b
        adam = self.net._optimizer
        adam.t = 0
        for moment in adam.ms + adam.vs:
            moment[:] = 0

    def steps(self, n):
        for _ in range(n):
            self.net.partial_fit(self.x, self.y)
        return self.net.loss_


CONTESTANTS = {
    "ours": Ours,
    "torch_eager": TorchEager,
    "torch_compile": TorchCompile,
    "jax_step": JaxStep,
    "jax_scan": JaxScan,
    "sklearn": ScikitLearn,
}


def thread_environment(threads):
    """Environment that holds every library of a fresh process to `threads` threads."""
    env = {name: str(threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NPROC")}
    if threads == 1:
        env["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    return env


def main(spec):
    """Serve one contestant over stdin and stdout, a JSON line each way, until stdin ends."""
    out, sys.stdout = sys.stdout, sys.stderr  # libraries may print; the pipe is ours
    answer = lambda **reply: print(json.dumps(reply), file=out, flush=True)  # noqa: E731
    if spec.get("cpu") is not None:
        os.sched_setaffinity(0, {spec["cpu"]})
    if spec.get("variant"):
        TorchCompile.variant = spec["variant"]
    weights, x, y = make_task(spec["sizes"], spec["batch"])
    start = time.perf_counter()
    contestant = CONTESTANTS[spec["who"]](spec["sizes"], weights, x, y, spec["threads"])
    loss = contestant.steps(VERIFY_STEPS)
    answer(loss=loss, setup_seconds=time.perf_counter() - start)
    for line in sys.stdin:
        n = json.loads(line)["steps"]
        start = time.perf_counter()
        loss = contestant.steps(n)
        answer(seconds=time.perf_counter() - start, loss=loss)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

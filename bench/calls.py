"""P15: one call from Python on the user's arrays, one worker: ``predict(x)`` and ``step(x, y)``, in microseconds.

Every contestant runs in a separate process and is called with NumPy arrays.  Its loss is read, and its outputs are a NumPy
array.  The time of the rows alone comes from many runs in one call, divided by their number; the rest is the call's overhead.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import Process, Result, answers, interleave, last_line, number
from bench.peers import BETA1, BETA2, EPSILON, LEARNING_RATE, Task

NETWORKS = ([4, 16, 3], [784, 64, 64, 10])
BATCHES = (1, 32)
TURNS, TURN_SECONDS = 9, 0.05
ROWS = {"rows": 100, "rows of predict": 1000}  # runs per call that measures the rows alone
CLOSE = 1e-4  # tolerance between outputs of contestants, after the same step or none

Calls = dict[str, Callable[[np.ndarray, np.ndarray], Any]]  # by method: "predict", "step"


def calcvm(task: Task, batch: int, specialize: bool = False) -> Calls:
    from bench.peers import Ours, OursSpecialized

    x, y = task.sample(batch)
    ours = (OursSpecialized if specialize else Ours)(task, x, y, 1)
    ours.restart()
    model = ours.model
    for _ in range(100):  # compiled calls are made after some calls in Python
        model.predict(x)
        model.step(x, y)
    ours.restart()
    out, inputs = np.empty((batch, task.sizes[-1]), np.float32), {"input": x}

    def rows_of_predict() -> None:
        model.run(inputs)
        model.run_round("predict", ("forward",), ROWS["rows of predict"])

    return {
        "predict": lambda x, y: model.predict(x),
        "predict(out=)": lambda x, y: model.predict(x, out=out),
        "run": partial(_ignore, partial(model.run, inputs)),
        "rows of predict": partial(_ignore, rows_of_predict),
        "evaluate": model.evaluate,
        "step": model.step,
        "bound step": partial(_ignore, model.bind(x, y)),
        "run_steps(1)": partial(_ignore, partial(model.run_steps, 1)),
        "model[name] = x": lambda x, y: model.__setitem__("input", x),
        "rows": partial(_ignore, partial(model.run_steps, ROWS["rows"])),
    }


def _ignore(call: Callable[[], Any], x: Any, y: Any) -> Any:
    return call()


def numpy(task: Task, batch: int) -> Calls:
    weights = task.weights

    def predict(x: np.ndarray, y: Any) -> np.ndarray:
        for w, b in weights[:-1]:
            x = 1 / (1 + np.exp(-(x @ w + b)))
        return x @ weights[-1][0] + weights[-1][1]

    return {"predict": predict}


def _torch_net(task: Task) -> Any:
    import torch

    torch.set_num_threads(1)
    layers: list[Any] = []
    for w, b in task.weights:
        layer = torch.nn.Linear(*w.shape)
        layer.weight.data.copy_(torch.from_numpy(w.T))
        layer.bias.data.copy_(torch.from_numpy(b))
        layers += [*([torch.nn.Sigmoid()] if layers else []), layer]
    return torch.nn.Sequential(*layers)


def torch(task: Task, batch: int) -> Calls:
    import torch

    net = _torch_net(task)
    optimizer = torch.optim.Adam(net.parameters(), LEARNING_RATE, (BETA1, BETA2), EPSILON, fused=True)

    @torch.inference_mode()
    def predict(x: np.ndarray, y: Any) -> np.ndarray:
        return net(torch.from_numpy(x)).numpy()

    def step(x: np.ndarray, y: np.ndarray) -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(torch.from_numpy(x)), torch.from_numpy(y))
        loss.backward()
        optimizer.step()
        return loss.item()

    return {"predict": predict, "step": step}


def torch_jit(task: Task, batch: int) -> Calls:
    import torch

    x, _ = task.sample(batch)
    net = torch.jit.freeze(torch.jit.trace(_torch_net(task).eval(), torch.from_numpy(x)))

    @torch.inference_mode()
    def predict(x: np.ndarray, y: Any) -> np.ndarray:
        return net(torch.from_numpy(x)).numpy()

    return {"predict": predict}


def onnxruntime(task: Task, batch: int) -> Calls:
    import onnxruntime
    import torch

    x, _ = task.sample(batch)
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "net.onnx")
        torch.onnx.export(_torch_net(task), (torch.from_numpy(x),), file, input_names=["x"], dynamo=False)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return {"predict": lambda x, y: session.run(None, {"x": x})[0]}


def jax(task: Task, batch: int) -> Calls:
    import jax
    import jax.numpy as jnp

    tree = jax.tree.map
    state = [[(jnp.asarray(w), jnp.asarray(b)) for w, b in task.weights]]
    state += [tree(jnp.zeros_like, state[0]) for _ in range(2)] + [jnp.zeros(())]

    def outputs(params: Any, x: Any) -> Any:
        for w, b in params[:-1]:
            x = jax.nn.sigmoid(x @ w + b)
        return x @ params[-1][0] + params[-1][1]

    def loss_of(params: Any, x: Any, y: Any) -> Any:
        logits = outputs(params, x)
        return jnp.mean(jax.nn.logsumexp(logits, axis=1) - jnp.take_along_axis(logits, y[:, None], axis=1)[:, 0])

    @partial(jax.jit, donate_argnums=0)
    def one(state: Any, x: Any, y: Any) -> Any:
        params, m, v, t = state
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        t = t + 1
        m = tree(lambda m, g: BETA1 * m + (1 - BETA1) * g, m, grads)
        v = tree(lambda v, g: BETA2 * v + (1 - BETA2) * g * g, v, grads)
        a, b = 1 - BETA1**t, 1 - BETA2**t
        params = tree(lambda p, m, v: p - LEARNING_RATE * (m / a) / (jnp.sqrt(v / b) + EPSILON), params, m, v)
        return [params, m, v, t], loss

    jitted = jax.jit(outputs)

    def step(x: np.ndarray, y: np.ndarray) -> float:
        state[:], loss = one(state, x, y)
        return float(loss)

    return {"predict": lambda x, y: np.asarray(jitted(state[0], x)), "step": step}


CONTESTANTS: dict[str, Callable[[Task, int], Calls]] = {"calcvm": calcvm, "specialized": partial(calcvm, specialize=True), "NumPy": numpy, "ONNX Runtime": onnxruntime, "torch.jit": torch_jit, "torch": torch, "JAX jit": jax}  # fmt: skip


def answer_requests(who: str, sizes: list[int], batch: int) -> None:
    answer = answers(None)
    task = Task(sizes)
    x, y = task.sample(batch)
    calls = CONTESTANTS[who](task, batch)
    before = np.asarray(calls["predict"](x, y), np.float64).tolist()
    counts = {}
    after = [calls["step"](x, y) for _ in range(2)] if "step" in calls else []
    for name, call in calls.items():
        n, seconds = 1, 0.0
        while seconds < TURN_SECONDS / 4:
            n, start = 2 * n, time.perf_counter()
            for _ in range(n):
                call(x, y)
            seconds = time.perf_counter() - start
        counts[name] = max(1, int(n * TURN_SECONDS / seconds))
    answer(calls=[*calls], outputs=before, losses=after)
    for line in sys.stdin:
        name = json.loads(line)["call"]
        call, repeats = calls[name], range(counts[name])
        start = time.perf_counter()
        for _ in repeats:
            call(x, y)
        answer(us=(time.perf_counter() - start) / counts[name] * 1e6 / ROWS.get(name, 1))


def ask(process: Process, call: str) -> float:
    return process.ask(call=call)["us"]


def measure(result: Result, sizes: list[int], batch: int, turns: int) -> dict[str, dict[str, float]]:
    """Microseconds of each contestant's calls, the minimum of alternating turns."""
    running: dict[str, Process] = {}
    for who in CONTESTANTS:
        try:
            running[who] = Process("-m", "bench.calls", who, json.dumps(sizes), str(batch), threads=1)
        except RuntimeError as error:
            text = f"{who} left out: {last_line(str(error))}"
            result.fail(text) if who in ("calcvm", "specialized") else result.note(text)
    told = {who: process.ready for who, process in running.items()}
    for who, ready in told.items():
        off = np.abs(np.subtract(ready["outputs"], told["NumPy"]["outputs"])).max()
        losses = np.abs(np.subtract(ready["losses"] or 0, told["calcvm"]["losses"] if ready["losses"] else 0)).max()
        if off > CLOSE or losses > CLOSE:
            result.fail(f"{who}: outputs are off by {off:.1e}, losses by {losses:.1e}")
    runs = {
        f"{who}: {call}": partial(ask, running[who], call) for who, ready in told.items() for call in ready["calls"]
    }
    us: dict[str, dict[str, float]] = {}
    for name, found in interleave(runs, turns).items():
        who, call = name.split(": ")
        us.setdefault(call, {})[who] = min(found)
    for process in running.values():
        process.close()
    return us


def main(quick: bool = False) -> bool:
    """Run the workload; True if ours ran and all agree."""
    result = Result("calls", "Calls from Python", quick)
    for sizes in NETWORKS[: 1 if quick else None]:
        for batch in BATCHES[: 1 if quick else None]:
            label = f"{'-'.join(map(str, sizes))}, batch {batch}"
            us = measure(result, sizes, batch, 2 if quick else TURNS)
            header = ["us a call, minimum", *CONTESTANTS]
            rows = [[call, *(number(of[who]) if who in of else "-" for who in CONTESTANTS)] for call, of in us.items()]
            result.table(f"{label}, one worker", header, rows)
            judge(result, us, sizes, batch, label)
    return result.save()


def judge(result: Result, us: dict[str, dict[str, float]], sizes: list[int], batch: int, label: str) -> None:
    """The targets of P15 for a network and a batch."""
    ours = {call: of["calcvm"] for call, of in us.items() if "calcvm" in of}
    if not ours:
        return

    def beside(call: str, names: tuple[str, ...], bound: float) -> None:
        best = min((us[call][who] for who in names if who in us[call]), default=None)
        share = None if best is None else best / ours[call]
        result.target("P15", f"{call}, {label}, over {' and '.join(names)}", share, bound, "x")

    tiny = sizes == NETWORKS[0]
    if tiny and batch == 1:
        result.target("P15", f"predict, {label}", ours["predict"], 0.5, "us", at_most=True)
        result.target("P15", f"step, {label}", ours["step"], 0.8, "us", at_most=True)
        beside("predict", ("NumPy", "ONNX Runtime", "torch.jit"), 8)
        beside("step", ("JAX jit",), 80)
        beside("step", ("torch",), 250)
    elif batch == 1:
        beside("predict", ("ONNX Runtime",), 3)
    else:
        for call, rows in (("step", "rows"), ("predict", "rows of predict")):
            over = ours[call] - ours[rows]
            result.target("P15", f"{call} over its rows, {label}", over, 0.5, "us", at_most=True)
    result.target(
        "P15", f"run_steps(1) over its rows, {label}", ours["run_steps(1)"] - ours["rows"], 0.3, "us", at_most=True
    )
    result.target(
        "P15", f"a bound step over its rows, {label}", ours["bound step"] - ours["rows"], 0.15, "us", at_most=True
    )


if __name__ == "__main__":
    answer_requests(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))

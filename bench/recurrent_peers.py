"""JAX and ONNX Runtime on recurrent layers, with the weights of a PyTorch module; a peer that is not installed is left out."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

from bench.peers import jax_step

Run = Callable[[int], Any]


def peers(
    kind: str, module: Any, x: np.ndarray, t: np.ndarray
) -> tuple[dict[str, Run], dict[str, Run], dict[str, np.ndarray]]:
    """Contestants of inference, of a training step with Adam, and what each computes; sequences (N, T, K) are given as each likes them."""
    weights = {name.removesuffix("_l0"): p.detach().numpy() for name, p in module.named_parameters()}
    steps_first = [np.ascontiguousarray(a.swapaxes(0, 1)) for a in (x, t)]
    infer, train, found = dict[str, Run](), dict[str, Run](), dict[str, np.ndarray]()
    if find_spec("jax"):
        infer["JAX"], train["JAX"], found["JAX"] = _jax(kind, weights, *steps_first)
    if find_spec("onnxruntime") and find_spec("onnx"):
        infer["ONNX Runtime"], found["ONNX Runtime"] = _onnxruntime(kind, weights, steps_first[0])
    return infer, train, {name: y.swapaxes(0, 1) for name, y in found.items()}


def _jax(kind: str, weights: dict[str, np.ndarray], x: np.ndarray, t: np.ndarray) -> tuple[Run, Run, np.ndarray]:
    """`jax.lax.scan` over the steps, the products of the inputs before it, in one jitted call."""
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
    import jax
    import jax.numpy as jnp

    sigmoid, tanh = jax.nn.sigmoid, jnp.tanh
    units = weights["weight_hh"].shape[1]
    zeros = jnp.zeros((x.shape[1], units))

    def lstm(params: Any, state: Any, z: Any) -> Any:
        h, c = state
        i, f, g, o = jnp.split(z + h @ params["weight_hh"] + params["bias_hh"], 4, -1)
        c = sigmoid(f) * c + sigmoid(i) * tanh(g)
        h = sigmoid(o) * tanh(c)
        return (h, c), h

    def gru(params: Any, state: Any, z: Any) -> Any:
        (h,) = state
        r, u, n = jnp.split(z, 3, -1)
        of_r, of_u, of_n = jnp.split(h @ params["weight_hh"] + params["bias_hh"], 3, -1)
        u = sigmoid(u + of_u)
        h = (1 - u) * tanh(n + sigmoid(r + of_r) * of_n) + u * h
        return (h,), h

    step, start = {"lstm": (lstm, (zeros, zeros)), "gru": (gru, (zeros,))}[kind]

    def outputs(params: Any, x: Any) -> Any:
        z = x @ params["weight_ih"] + params["bias_ih"]
        return jax.lax.scan(lambda state, z: step(params, state, z), start, z)[1]

    params = {name: jnp.asarray(w.T.copy()) for name, w in weights.items()}
    none = jax.tree.map(jnp.zeros_like, params)
    inference = jax.jit(outputs)
    training = jax.jit(jax_step(lambda params, x, t: jnp.mean((outputs(params, x) - t) ** 2)), donate_argnums=0)
    of_x, of_t = jnp.asarray(x), jnp.asarray(t)
    trained = [jax.tree.map(jnp.array, (params, none, none, np.float32(0)))]

    def infer(n: int) -> None:
        for _ in range(n):
            y = inference(params, of_x)
        y.block_until_ready()

    def train(n: int) -> None:
        state = trained[0]
        for _ in range(n):
            state, loss = training(state, of_x, of_t)
        trained[0] = state
        loss.block_until_ready()

    return infer, train, np.asarray(inference(params, of_x))


def _onnxruntime(kind: str, weights: dict[str, np.ndarray], x: np.ndarray) -> tuple[Run, np.ndarray]:
    """A model of the one operator, whose gates have another order: input, output, forget, cell; update, reset, new."""
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    order = {"lstm": [0, 3, 1, 2], "gru": [1, 0, 2]}[kind]

    def gates(w: np.ndarray) -> np.ndarray:
        return np.concatenate([np.split(w, len(order))[k] for k in order])

    own = {
        "W": gates(weights["weight_ih"])[None],
        "R": gates(weights["weight_hh"])[None],
        "B": np.concatenate([gates(weights["bias_ih"]), gates(weights["bias_hh"])])[None],
    }
    units, (steps, batch, _) = weights["weight_hh"].shape[1], x.shape
    attributes = {"hidden_size": units} | ({"linear_before_reset": 1} if kind == "gru" else {})
    graph = helper.make_graph(
        [helper.make_node(kind.upper(), ["x", "W", "R", "B"], ["y"], **attributes)], kind,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (steps, 1, batch, units))],
        [numpy_helper.from_array(w, name) for name, w in own.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def infer(n: int) -> None:
        for _ in range(n):
            session.run(None, {"x": x})

    return infer, session.run(None, {"x": x})[0][:, 0]

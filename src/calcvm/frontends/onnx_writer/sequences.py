"""Attention, positions, and recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from calcvm.frontends.onnx_writer.declared import INF, Nodes, Tensor, indexes, whole, writes

GATES: dict[
    str, tuple[str, list[int], dict[str, Any]]
] = {  # ONNX's operator and settings, and the blocks of its weights by ours
    "rnn": ("RNN", [0], {"activations": ["Tanh"]}),
    "rnn_relu": ("RNN", [0], {"activations": ["Relu"]}),
    "gru": ("GRU", [1, 0, 2], {"linear_before_reset": 1}),
    "lstm": ("LSTM", [0, 3, 1, 2], {}),
}


# ---------------------------------------------------------------- attention
@writes("attention_packed")
def attention_packed(n: Nodes, qkv: Tensor, lengths: Any, bias: Any, **how: Any) -> str:
    heads, kv = how["heads"], how["kv_heads"] or how["heads"]
    size = whole(n.shape[2], "the number of features") // heads
    q, k, v = n("Split", qkv, [heads * size, kv * size, kv * size], outputs=3, axis=2)
    return _attention(n, q, k, v, qkv.shape[1], lengths, bias, **how)


@writes("attention")
def attention(n: Nodes, q: Tensor, k: Tensor, v: Tensor, lengths: Any, bias: Any, **how: Any) -> str:
    return _attention(n, q, k, v, k.shape[1], lengths, bias, **how)


def _attention(
    n: Nodes, q: str, k: str, v: str, keys: Any, lengths: Tensor | None, bias: Tensor | None, *, heads: int,
    kv_heads: int | None, causal: bool, window: int | None, softcap: float | None, scale: float | None,
) -> str:  # fmt: skip
    """Scores (N, heads, T, S); the heads of a group are rows of one product."""
    samples, steps, width = n.shape
    kv, size = kv_heads or heads, whole(width, "the number of features") // heads
    rows, columns = whole(steps, "the number of steps"), whole(keys, "the number of keys")
    q = n.turn(
        n.reshape(n.affine(q, float(size**-0.5 if scale is None else scale)), (samples, rows, heads, size)),
        [0, 2, 1, 3],
    )
    k = n.turn(n.reshape(k, (samples, columns, kv, size)), [0, 2, 3, 1])
    v = n.turn(n.reshape(v, (samples, columns, kv, size)), [0, 2, 1, 3])
    if kv != heads:
        q = n.reshape(q, (samples, kv, heads // kv * rows, size))
    z = n("MatMul", q, k)
    if kv != heads:
        z = n.reshape(z, (samples, heads, rows, columns))
    if softcap:
        z = n.affine(n("Tanh", n.affine(z, 1 / softcap)), float(softcap))
    z = z if bias is None else n("Add", z, bias)
    behind = np.arange(rows)[:, None] - np.arange(columns)
    seen = (behind >= 0 if causal else behind == behind) & (behind < (window or rows))
    z = z if seen.all() else n.where(seen, z, -INF)
    if lengths is not None:
        z = n.where(n("Less", np.arange(columns), n("Unsqueeze", indexes(n, lengths), [1, 2, 3])), z, -INF)
    shares = (
        _shares(n, z) if lengths is not None or bias is not None or not seen.any(1).all() else n("Softmax", z, axis=-1)
    )
    if kv != heads:
        shares = n.reshape(shares, (samples, kv, heads // kv * rows, columns))
    y = n("MatMul", shares, v)
    if kv != heads:
        y = n.reshape(y, (samples, heads, rows, size))
    return n.reshape(n.turn(y, [0, 2, 1, 3]), n.shape)


def _shares(n: Nodes, z: str) -> str:
    """Softmax, and 0 for a query that sees no key."""
    top = n("Max", n.reduce("Max", z, [-1]), float(np.finfo(n.dtype).min))
    e = n("Exp", n("Sub", z, top))
    return n("Div", e, n("Max", n.reduce("Sum", e, [-1]), 1.0))


@writes("rotary")
def rotary(n: Nodes, x: Tensor, cos: Tensor, sin: Tensor, *, heads: int) -> str:
    samples, steps, _ = x.shape
    half = whole(cos.shape[1], "the size of a head")
    a, b = n("Split", n.reshape(x, (samples, steps, heads, 2 * half)), outputs=2, axis=3, num_outputs=2)
    c, s = (n("Unsqueeze", angles, [1]) for angles in (cos, sin))
    first = n("Sub", n("Mul", a, c), n("Mul", b, s))
    second = n("Add", n("Mul", b, c), n("Mul", a, s))
    return n.reshape(n("Concat", first, second, axis=3), x.shape)


# ---------------------------------------------------------------- recurrent layers
@writes("rnn", "rnn_relu", "gru")
def recurrent(n: Nodes, z: Tensor, wh: Tensor, b: Any, h0: Any, lengths: Any, *, reverse: bool) -> tuple[str, ...]:
    return _steps(n, z, wh, b, [h0], lengths, reverse)


@writes("lstm")
def lstm(n: Nodes, z: Tensor, wh: Tensor, b: Any, h0: Any, c0: Any, lengths: Any, *, reverse: bool) -> tuple[str, ...]:
    return _steps(n, z, wh, b, [h0, c0], lengths, reverse)


def _steps(
    n: Nodes, z: Tensor, wh: Tensor, b: Any, states: Sequence[Any], lengths: Any, reverse: bool
) -> tuple[str, ...]:
    """The sums of the inputs are made by a linear layer, which ONNX's row has in itself."""
    kind, blocks, how = GATES[n.op.spec.name]
    size = whole(wh.shape[0], "the number of units")
    gates = (np.array(blocks)[:, None] * size + np.arange(size)).reshape(-1)
    made, nothing = n.op.inputs["z"].producer, _known(n, np.zeros(len(gates)))
    if made is not None and made.spec.name == "linear":
        x, w = (n.tensors[made.inputs[slot]] for slot in ("x", "wt"))
        of_x = n.tensors[made.inputs["b"]] if "b" in made.inputs else nothing
    else:
        x, w, of_x = z, _known(n, np.eye(len(gates))), nothing
    weights = [_weights(n, name, m, gates) for name, m in (("W", w), ("R", wh))]
    starts = [None if s is None else n("Unsqueeze", s, [0]) for s in states]
    biases = _biases(n, of_x, nothing if b is None else b, gates)
    steps = None if lengths is None else n.cast(lengths, "int32")
    given = n.turn(x, [1, 0, 2]), *weights, biases, steps, *starts
    direction = "reverse" if reverse else "forward"
    y, *last = n(kind, *given, outputs=1 + len(states), hidden_size=size, direction=direction, **how)
    last = [n("Squeeze", s, [0]) for s in last]
    if lengths is not None:  # without steps a state stays
        there = n("Greater", n("Unsqueeze", indexes(n, lengths), [1]), [0])
        last = [s if start is None else n.where(there, s, start) for s, start in zip(last, states)]
    return n.turn(n("Squeeze", y, [1]), [1, 0, 2]), *last


def _known(n: Nodes, array: np.ndarray) -> Tensor:
    tensor = Tensor(n.constant(array))
    tensor.value = array
    return tensor


def _weights(n: Nodes, name: str, w: Tensor, gates: np.ndarray) -> str:
    """(inputs, units of all gates) as (1, units, inputs), in ONNX's order."""
    if w.value is not None:
        return n.store(f"{n.op.name}.{name}", w.value[:, gates].T[None].astype(n.dtype))
    return n("Unsqueeze", n.turn(n("Gather", w, gates, axis=1), [1, 0]), [0])


def _biases(n: Nodes, of_x: Tensor, of_h: Tensor, gates: np.ndarray) -> str:
    """The biases of inputs and states, side by side."""
    if of_x.value is not None and of_h.value is not None:
        both = np.concatenate([of_x.value[gates], of_h.value[gates]])
        return n.store(f"{n.op.name}.B", both[None].astype(n.dtype))
    return n("Unsqueeze", n("Concat", *(n("Gather", b, gates) for b in (of_x, of_h)), axis=0), [0])

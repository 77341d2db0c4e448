"""Recurrent layers: a row for each direction; steps one by one where no row has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from calcvm import functions as F
from calcvm import sequences
from calcvm.frontends.arrangement import Arranged
from calcvm.frontends.aten.layers import is_zero
from calcvm.frontends.aten.places import taken
from calcvm.frontends.aten.shapes import select
from calcvm.frontends.building import Building, Cannot, Filled, arranged, variable, whole
from calcvm.frontends.onnx.declared import is_known, onnx
from calcvm.graph import Variable

Function = Callable[[Any], Any]
OF_TORCH = {1: [0], 3: [1, 0, 2], 4: [0, 2, 3, 1]}  # the gates of ONNX in PyTorch's order, by their number


class Row(NamedTuple):
    """What computes a direction.

    gates : those of the file, in the row's order.  parameters : names of numbers of each unit, in the file's order.
    compute : a function such as those of `calcvm.sequences`.
    """

    gates: Sequence[int]
    compute: Callable[..., tuple[Variable, ...]]
    parameters: tuple[str, ...] = ()


# ---------------------------------------------------------------- activations
ACTIVATIONS: dict[str, Callable[..., Any]] = {  # of a variable, or of a number of a cell; then alpha and beta
    "relu": F.relu,
    "tanh": F.tanh,
    "sigmoid": F.sigmoid,
    "softplus": F.softplus,
    "softsign": lambda x: x / (1 + abs(x)),
    "elu": lambda x, alpha: F.where(x < 0, alpha * F.expm1(F.minimum(x, 0.0)), x),
    "leakyrelu": lambda x, alpha: F.where(x < 0, alpha * x, x),
    "thresholdedrelu": lambda x, alpha: F.where(x < alpha, 0.0, x),
    "affine": lambda x, alpha, beta: alpha * x + beta,
    "scaledtanh": lambda x, alpha, beta: alpha * F.tanh(beta * x),
    "hardsigmoid": lambda x, alpha, beta: F.minimum(F.maximum(alpha * x + beta, 0.0), 1.0),
}
SETTINGS: dict[str, tuple[float | None, ...]] = {  # the defaults of alpha and beta; None: there is none
    "elu": (1.0,), "leakyrelu": (0.01,), "thresholdedrelu": (1.0,), "affine": (None, None), "scaledtanh": (None, None),
    "hardsigmoid": (0.2, 0.5),
}  # fmt: skip


def _activations(names: Sequence[str], alphas: Sequence[float], betas: Sequence[float]) -> list[Function]:
    """Functions by their names; each that has an alpha or a beta takes the next one."""
    given, found = (iter(alphas), iter(betas)), list[Function]()
    for name in names:
        if name not in ACTIVATIONS:
            raise Cannot(f"there is no activation {name!r}")
        numbers = [next(left, default) for left, default in zip(given, SETTINGS.get(name, ()))]
        if None in numbers:
            raise Cannot(f"the activation {name!r} has no activation_alpha or activation_beta")
        found.append(_with(ACTIVATIONS[name], numbers))
    return found


def _with(f: Callable[..., Any], numbers: Sequence[Any]) -> Function:
    return lambda x: f(x, *numbers)


def _clipped(f: Function, clip: float) -> Function:
    return (lambda x: f(F.minimum(F.maximum(x, -clip), clip))) if clip else f


# ---------------------------------------------------------------- rows
def _own(gates: Sequence[int], function: Callable[..., Any], apart: int = 0, parameters: tuple[str, ...] = ()) -> Row:
    """The row of a cell that a function describes."""
    from calcvm.indexed import cell

    own = cell(len(gates), apart=apart)(function)
    return Row(gates, partial(sequences.recurrent, own), parameters)


def lstm_row(names: Sequence[str], functions: Sequence[Function], peepholes: bool, input_forget: int = 0) -> Row:
    if names == ["sigmoid", "tanh", "tanh"] and not peepholes and not input_forget:
        return Row([0, 2, 3, 1], sequences.lstm)
    f, g, of_c = functions

    def step(z: Any, c: Any, of_input: Any = 0.0, of_output: Any = 0.0, of_forget: Any = 0.0) -> Any:
        i = f(z[0] + of_input * c)
        forget = 1 - i if input_forget else f(z[3] + of_forget * c)
        new = forget * c + i * g(z[2])
        return f(z[1] + of_output * new) * of_c(new), new

    def own_lstm(z: Any, h: Any, c: Any) -> Any:
        return step(z, c)

    def coupled_lstm(z: Any, h: Any, c: Any, *, of_input: Any, of_output: Any) -> Any:
        return step(z, c, of_input, of_output)

    def peephole_lstm(z: Any, h: Any, c: Any, *, of_input: Any, of_output: Any, of_forget: Any) -> Any:
        return step(z, c, of_input, of_output, of_forget)

    gates = [0, 1, 3] if input_forget else [0, 1, 3, 2]
    if not peepholes:
        return _own(gates, own_lstm)
    function = coupled_lstm if input_forget else peephole_lstm
    return _own(gates, function, 0, ("of_input", "of_output", "of_forget")[: len(gates) - 1])


def gru_row(names: Sequence[str], functions: Sequence[Function], peepholes: bool, linear_before_reset: int = 0) -> Row:
    f, g = functions
    if not linear_before_reset:
        return Row([0, 1, 2], partial(_gru_steps, f, g))
    if names == ["sigmoid", "tanh"]:
        return Row([1, 0, 2], sequences.gru)

    def own_gru(z: Any, m: Any, h: Any) -> Any:
        new = g(z[2] + f(z[1]) * m[0])
        return new + f(z[0]) * (h - new)

    return _own([0, 1, 2], own_gru, apart=1)


def _gru_steps(
    f: Function, g: Function, x: Variable, w: Variable, r: Variable, bias: Any, more: Any, h: Any, *, lengths: Any, reverse: bool
) -> tuple[Variable, ...]:  # fmt: skip
    """The steps of a GRU that resets its state before the product with the weights, whose gates are update, reset, new."""
    z, size = F.linear(x, w, bias if more is None else bias + more), whole(r.shape[0])
    of_gates, of_new = r[:, : 2 * size], r[:, 2 * size :]
    h = z[:, 0, :size] * 0.0 if h is None else h
    found: list[Any] = [None] * whole(x.shape[1])
    for t in reversed(range(len(found))) if reverse else range(len(found)):
        gates = f(z[:, t, : 2 * size] + h @ of_gates)
        new = g(z[:, t, 2 * size :] + (gates[:, size:] * h) @ of_new)
        new = new + gates[:, :size] * (h - new)
        there = None if lengths is None else F.expand_dims(F.greater(lengths, t), 1)
        found[t] = new if there is None else F.where(there, new, 0.0)
        h = new if there is None else F.where(there, new, h)
    return F.stack(found, 1), h


def rnn_row(names: Sequence[str], functions: Sequence[Function], peepholes: bool) -> Row:
    if names in (["tanh"], ["relu"]):
        return Row([0], partial(sequences.rnn, nonlinearity=names[0]))

    def own_rnn(z: Any, h: Any) -> Any:
        return functions[0](z[0])

    return _own([0], own_rnn)


# ---------------------------------------------------------------- operators
def _recurrent(name: str, defaults: list[str], states: int, build: Callable[..., Row]) -> None:
    def layer(
        b: Building, x: Any, w: Any, r: Any, bias: Any = None, lengths: Any = None, *more: Any, activations: Sequence[str] = (),
        activation_alpha: Sequence[float] = (), activation_beta: Sequence[float] = (), clip: float = 0.0, direction: str = "forward",
        layout: int = 0, hidden_size: int = 0, **own: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        matrices = w if isinstance(w, list) else [w] * whole(w.shape[0])  # those of PyTorch, or all in one
        x, size, n = arranged(b, x), whole((r[0] if isinstance(r, list) else r).shape[-1]), len(defaults)
        v = (x if layout else x.swapped(0, 1)).variable()
        lengths = _lengths(b, lengths, v)
        given = [*more, *[None] * (states + 1 - len(more))]
        starts, peepholes = given[:states], given[states]
        names = [s.lower() for s in activations or defaults * 2]
        functions = _activations(names, activation_alpha, activation_beta)
        if len(names) < n * len(matrices):
            raise Cannot(f"its {len(matrices)} directions have {len(names)} activations: {n} each are wanted")
        found = []
        for k in range(len(matrices)):
            mine = slice(k * n, (k + 1) * n)
            clipped = [_clipped(f, clip) if i < 2 else f for i, f in enumerate(functions[mine])]
            row = build([] if clip else names[mine], clipped, peepholes is not None, **own)
            found.append(
                row.compute(
                    v,
                    *(_blocks(b, m, k, row.gates, size) for m in (w, r)),
                    *_biases(b, bias, k, row.gates, size),
                    *(_start(b, s, layout, k) for s in starts),
                    lengths=lengths,
                    reverse=bool(k) or direction == "reverse",
                    **{p: _blocks(b, peepholes, k, [i], size) for i, p in enumerate(row.parameters)},
                )
            )
        return tuple(partial(_joined, parts, size, layout) for parts in zip(*found))

    onnx(name)(layer)


def _joined(parts: Sequence[Variable], size: int, layout: int) -> Arranged:
    """What the directions give, on a new axis."""
    z = Arranged.of(F.concat(parts, -1))
    z = z.reshaped([*z.shape[:-1], len(parts), size])
    return z if layout else z.permuted([1, 2, 0, 3]) if z.rank == 4 else z.swapped(0, 1)


def _blocks(b: Building, x: Any, direction: int, blocks: Sequence[int], size: int) -> Variable:
    """Blocks of a direction's weights, one for each gate, as (inputs, units of all gates), or (units,)."""
    if isinstance(x, list):
        order = OF_TORCH[len(blocks)]
        return _in_order(b, arranged(b, x[direction]), [order.index(k) for k in blocks], size)
    if is_known(x):
        parts = x[direction].reshape(-1, size, *x.shape[2:])[[*blocks]]
        return b.constant(parts.reshape(-1, *x.shape[2:]).T)
    return _in_order(b, select(b, arranged(b, x), 0, direction), blocks, size)


def _in_order(b: Building, x: Arranged, blocks: Sequence[int], size: int) -> Variable:
    """Blocks of (units of all gates, ...), turned."""
    if [*blocks] != [*range(whole(x.shape[0]) // size)]:
        x = taken(b, x.reshaped([-1, size, *x.shape[1:]]), np.asarray(blocks), 0).reshaped([-1, *x.shape[1:]])
    return (x.swapped() if x.rank > 1 else x).variable()


def _biases(b: Building, x: Any, direction: int, gates: Sequence[int], size: int) -> list[Any]:
    if x is None:
        return [None, None]
    if isinstance(x, list):
        return [_blocks(b, [*part], direction, gates, size) for part in zip(*x)]
    half = whole(x.shape[1]) // size // 2
    return [_blocks(b, x, direction, [first + k for k in gates], size) for first in (0, half)]


def _start(b: Building, x: Any, axis: int, direction: int) -> Any:
    """The state before the first step; None: zeros."""
    return None if x is None or is_zero(x) else select(b, arranged(b, x), axis, direction).variable()


def _lengths(b: Building, x: Any, of: Variable) -> Any:
    """The steps of each sample; None: all."""
    numbers = {int(x.value)} if isinstance(x, Filled) else {*x.tolist()} if is_known(x) else None
    return None if x is None or numbers == {of.shape[1]} else variable(b, x)


_recurrent("LSTM", ["sigmoid", "tanh", "tanh"], 2, lstm_row)
_recurrent("GRU", ["sigmoid", "tanh"], 1, gru_row)
_recurrent("RNN", ["tanh"], 1, rnn_row)

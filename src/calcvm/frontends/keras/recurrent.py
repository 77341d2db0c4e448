"""Recurrent layers: a row for each of them, or the steps one by one where no row has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from calcvm import functions as F
from calcvm.frontends.arrangement import Arranged
from calcvm.frontends.aten.layers import is_zero
from calcvm.frontends.aten.places import taken
from calcvm.frontends.aten.shapes import flip
from calcvm.frontends.building import Building, Cannot, arranged, one_by_one
from calcvm.frontends.keras.declared import keras
from calcvm.frontends.keras.merging import average, concatenate, merged
from calcvm.frontends.onnx.recurrent import Row, gru_row, lstm_row, rnn_row
from calcvm.graph import Variable

# activations of a variable, or of a number of a cell
ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "linear": lambda x: x,
    "relu": F.relu,
    "tanh": F.tanh,
    "sigmoid": F.sigmoid,
    "softplus": F.softplus,
    "softsign": lambda x: x / (1 + abs(x)),
    "elu": lambda x: F.where(x < 0, F.expm1(F.minimum(x, 0.0)), x),
    "hard_sigmoid": lambda x: F.minimum(F.maximum(x / 6 + 0.5, 0.0), 1.0),
    "silu": lambda x: x * F.sigmoid(x),
    "exponential": F.exp,
}
# the gates of the rows of ONNX in Keras's order
GATES = {"SimpleRNN": [0], "GRU": [0, 1, 2], "LSTM": [0, 3, 1, 2]}


def _function(name: Any) -> Callable[[Any], Any]:
    name = name or "linear"
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise Cannot(f"its activation {name} has no counterpart in a cell")
    return ACTIVATIONS[name]


def _row(name: str, activation: Any, recurrent_activation: Any, reset_after: bool) -> Row:
    f, g = _function(activation), _function(recurrent_activation)
    if name == "SimpleRNN":
        return rnn_row([activation], [f], False)
    if name == "GRU":
        return gru_row([recurrent_activation, activation], [g, f], False, int(reset_after))
    return lstm_row([recurrent_activation, activation, activation], [g, f, f], False)


def _in_order(x: Arranged, gates: Sequence[int], b: Building) -> Variable:
    """Columns of the gates in another order."""
    if [*gates] == [*range(len(gates))]:
        return x.variable()
    apart = x.reshaped([*x.shape[:-1], len(gates), x.shape[-1] // len(gates)])
    return taken(b, apart, np.asarray(gates), apart.rank - 2).reshaped(x.shape).variable()


def _recurrent(name: str) -> None:
    def layer(
        b: Building, x: Any, initial_state: Any = None, *, kernel: Arranged, recurrent_kernel: Arranged, bias: Any = None, activation: Any = "tanh",
        recurrent_activation: Any = "sigmoid", return_sequences: bool = False, return_state: bool = False, go_backwards: bool = False,
        stateful: bool = False, reset_after: bool = True, in_order: bool = False, **_: Any,
    ) -> Any:  # fmt: skip
        if stateful:
            raise Cannot("stateful=True keeps a state from call to call: give it as inputs, with return_state=True")
        row = _row(name, activation, recurrent_activation, reset_after)
        gates = [GATES[name][k] for k in row.gates]
        parts = [None, None] if bias is None else [bias, None]
        if bias is not None and bias.rank == 2:
            parts = [bias.part(0, k, k + 1).without([0]) for k in (0, 1)]
        states = [] if initial_state is None else initial_state if isinstance(initial_state, list) else [initial_state]
        y, *last = row.compute(
            arranged(b, x).variable(),
            *(_in_order(w, gates, b) for w in (kernel, recurrent_kernel)),
            *(None if part is None else _in_order(part, gates, b) for part in parts),
            *([None if is_zero(s) else arranged(b, s).variable() for s in states] or [None] * (1 + (name == "LSTM"))),
            lengths=None,
            reverse=go_backwards,
        )
        found = Arranged.of(y if return_sequences else last[0])
        if return_sequences and go_backwards and not in_order:
            found = flip(b, found, [1])
        return (found, *map(Arranged.of, last)) if return_state else found

    keras(name)(layer)


for _name in GATES:
    _recurrent(_name)


@keras("Bidirectional")
def bidirectional(b: Building, forward: Any, backward: Any, *, merge_mode: str | None = "concat", **_: Any) -> Any:
    """What two layers give, whose steps are in order; their states follow."""
    sides = [x if isinstance(x, tuple) else (x,) for x in (forward, backward)]
    outputs, states = [side[0] for side in sides], [s for side in sides for s in side[1:]]
    if merge_mode is None:
        return (*outputs, *states)
    y = {
        "concat": lambda: concatenate(b, outputs),
        "sum": lambda: merged(b, F.add, outputs),
        "ave": lambda: average(b, outputs),
        "mul": lambda: one_by_one(b, F.mul, *outputs),
    }[merge_mode]()
    return (y, *states) if states else y

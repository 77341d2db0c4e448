"""Functions of sequences (N, T, features): recurrent layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from calcvm import checks
from calcvm import functions as F
from calcvm.errors import CalcError, ShapeError
from calcvm.graph import Variable, applied, apply
from calcvm.ops.dims import show

if TYPE_CHECKING:
    from calcvm.equations.cells import OwnCell

__all__ = ["gru", "lstm", "recurrent", "rnn"]

NONLINEARITIES = {"tanh": "rnn", "relu": "rnn_relu"}


def _recurrent(
    cell: str, x: Variable, w_ih: Variable, w_hh: Variable, biases: Any, states: Any, lengths: Any, reverse: bool
) -> tuple[Variable, ...]:
    """All outputs of a cell over sequences."""
    y = apply(cell, F.linear(x, w_ih, biases[0]), w_hh, biases[1], *states, lengths, reverse=reverse)
    assert y.producer is not None
    return tuple(y.producer.outputs.values())


def rnn(
    x: Variable,
    weight_ih: Variable,
    weight_hh: Variable,
    bias_ih: Variable | None = None,
    bias_hh: Variable | None = None,
    h0: Variable | None = None,
    *,
    lengths: Variable | None = None,
    reverse: bool = False,
    nonlinearity: str = "tanh",
) -> tuple[Variable, Variable]:
    """A recurrent layer: h = tanh(x_t weight_ih + bias_ih + h weight_hh + bias_hh), for each step t.

    Parameters
    ----------
    x : Variable (N, T, K)
    weight_ih : Variable (K, H); torch.nn.RNN's, transposed
    weight_hh : Variable (H, H); torch.nn.RNN's, transposed
    bias_ih, bias_hh : Variable (H,)
    h0 : Variable (N, H), the state before the first step; zeros by default
    lengths : Variable (N,) of integers: steps from a sample's length on are not computed, and their outputs are 0
    reverse : bool, from a sample's last step to its first
    nonlinearity : str, "tanh" or "relu"

    Returns
    -------
    y (N, T, H), the states of all steps; h_n (N, H), the last one.
    """
    checks.choice("rnn: nonlinearity", nonlinearity, NONLINEARITIES)
    cell, biases = NONLINEARITIES[nonlinearity], (bias_ih, bias_hh)
    y, h_n = _recurrent(cell, x, weight_ih, weight_hh, biases, (h0,), lengths, reverse)
    return y, h_n


def gru(
    x: Variable,
    weight_ih: Variable,
    weight_hh: Variable,
    bias_ih: Variable | None = None,
    bias_hh: Variable | None = None,
    h0: Variable | None = None,
    *,
    lengths: Variable | None = None,
    reverse: bool = False,
) -> tuple[Variable, Variable]:
    """A gated recurrent unit, as torch.nn.GRU: its gates are reset, update, new.

    Parameters
    ----------
    x : Variable (N, T, K)
    weight_ih : Variable (K, 3*H)
    weight_hh : Variable (H, 3*H)
    bias_ih, bias_hh : Variable (3*H,)
    h0, lengths, reverse : as in `rnn`

    Returns
    -------
    y (N, T, H), the states of all steps; h_n (N, H), the last one.
    """
    y, h_n = _recurrent("gru", x, weight_ih, weight_hh, (bias_ih, bias_hh), (h0,), lengths, reverse)
    return y, h_n


def lstm(
    x: Variable,
    weight_ih: Variable,
    weight_hh: Variable,
    bias_ih: Variable | None = None,
    bias_hh: Variable | None = None,
    h0: Variable | None = None,
    c0: Variable | None = None,
    *,
    lengths: Variable | None = None,
    reverse: bool = False,
) -> tuple[Variable, Variable, Variable]:
    """Long short-term memory, as torch.nn.LSTM: its gates are input, forget, cell, output.

    Parameters
    ----------
    x : Variable (N, T, K)
    weight_ih : Variable (K, 4*H)
    weight_hh : Variable (H, 4*H)
    bias_ih, bias_hh : Variable (4*H,)
    h0, c0 : Variable (N, H), the states before the first step; zeros by default
    lengths, reverse : as in `rnn`

    Returns
    -------
    y (N, T, H), h of all steps; h_n and c_n (N, H), the last states.

    Examples
    --------
    >>> g = cv.CalcGraph()
    >>> x, w, v = g.placeholder("x", (None, 50, 16)), g.parameter("w", (16, 256)), g.parameter("v", (64, 256))
    >>> with g.path("forward"):
    ...     y, h_n, c_n = cv.lstm(x, w, v)
    >>> print(y, h_n)
    y (B, 50, 64) h_n (B, 64)
    """
    states, biases = (h0, c0), (bias_ih, bias_hh)
    y, h_n, c_n = _recurrent("lstm", x, weight_ih, weight_hh, biases, states, lengths, reverse)
    return y, h_n, c_n


def own_cell(what: str, cell: Any) -> OwnCell:
    """The cell, if it is one that `calcvm.cell` made."""
    from calcvm.equations.cells import OwnCell  # a module for equations, which an import does not need

    return checks.one_of(f"{what}: cell", cell, OwnCell, "a cell, a function decorated by cv.cell(gates=...),")


def recurrent(
    cell: OwnCell,
    x: Variable,
    weight_ih: Variable,
    weight_hh: Variable,
    bias_ih: Variable | None = None,
    bias_hh: Variable | None = None,
    *states: Variable | None,
    lengths: Variable | None = None,
    reverse: bool = False,
    **parameters: Variable,
) -> tuple[Variable, ...]:
    """A recurrent layer of a custom cell, see `calcvm.cell`.

    Parameters
    ----------
    cell : the cell, with G gates
    x : Variable (N, T, K)
    weight_ih : Variable (K, G*H); weights of one gate lie side by side
    weight_hh : Variable (H, G*H)
    bias_ih, bias_hh : Variable (G*H,)
    states : Variable (N, H), those before the first step, in the cell's order; zeros by default
    lengths, reverse : as in `rnn`
    parameters : Variable (H,), those of the cell, by name

    Returns
    -------
    y (N, T, H), h of all steps; then the last states (N, H).

    Raises
    ------
    CalcError : there are more states than the cell has, or other parameters.
    ShapeError : a shape does not fit the cell.

    Examples
    --------
    >>> @cv.cell(gates=1)
    ... def leaky(z, h, *, decay=0.9):
    ...     return decay * h + (1 - decay) * cv.tanh(z[0])
    >>> g = cv.CalcGraph()
    >>> x, w, v = g.placeholder("x", (None, 50, 16)), g.parameter("w", (16, 8)), g.parameter("v", (8, 8))
    >>> decay = g.parameter("decay", (8,))
    >>> with g.path("forward"):
    ...     y, h_n = cv.recurrent(leaky, x, w, v, decay=decay)
    >>> print(y, h_n)
    y (B, 50, 8) h_n (B, 8)
    """
    from calcvm.ops.cells import operator_of

    own = own_cell("recurrent", cell)
    if len(states) > len(own.states):
        raise CalcError(
            f"recurrent: {own.name} has {len(own.states)} states, {', '.join(own.states)}; got {len(states)}"
        )
    if wrong := {*own.parameters} ^ {*parameters}:
        named = ", ".join(own.parameters) or "none"
        raise CalcError(
            f"recurrent: parameters of {own.name} are {named}; {min(wrong)} is {'missing' * (min(wrong) in own.parameters) or 'none'}"
        )
    for name, p in parameters.items():
        checks.one_of(f"recurrent: {name}", p, Variable, "a variable (H,)")
        if p.shape != weight_hh.shape[:1]:
            raise ShapeError(
                f"recurrent: {name} {show(p.shape)} must be {show(weight_hh.shape[:1])}, a number for each unit"
            )
    given: list[Any] = [*states, *[None] * (len(own.states) - len(states))]
    h0, *others = given
    if 0 < others.count(None) < len(others):
        raise CalcError(f"recurrent: give all of the states {', '.join(own.states[1:])} before the first step, or none")
    beside = [_beside([parameters[name] for name in own.parameters], 0)] if own.parameters else []
    beside_h = [_beside(others, 1)] if others else []
    z, reverse = F.linear(x, weight_ih, bias_ih), checks.flag("recurrent: reverse", reverse)
    y = applied(operator_of(own), z, weight_hh, *beside, bias_hh, h0, *beside_h, lengths, reverse=reverse)
    assert y.producer is not None
    found = [*y.producer.outputs.values()]
    if len(others) < 2:
        return tuple(found)
    size = weight_hh.shape[0].b
    return (*found[:2], *(found[2][:, k * size : (k + 1) * size] for k in range(len(others))))


def _beside(parts: list[Any], axis: int) -> Any:
    return parts[0] if len(parts) == 1 or parts[0] is None else F.concat(parts, axis=axis)

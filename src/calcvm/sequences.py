"""Functions of sequences (N, T, features): recurrent layers."""

from __future__ import annotations

from typing import Any

from calcvm import checks
from calcvm import functions as F
from calcvm.graph import Variable, apply

__all__ = ["gru", "lstm", "rnn"]

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

"""Recurrent cells: one step of one unit, forward and backward, on the numbers of a device.

A cell has gates.  The sums of a gate, over the input and over the state h, are added, except for those ``apart``, of which the
cell sees both: the input's in ``z`` and the state's in ``more``.

forward : (z, more, before) -> (gates, more, after).  before, after : the states; h is the first.  What it returns as gates and
    more is kept for the backward, in the place of z and more.
backward : (gates, more, before, after, d) -> (dz, dmore, dbefore).  d, dbefore : gradients of the states.  dbefore[0] is what h
    gets without its products with the weights; None: nothing.

A user's cell (`calcvm.equations.cells`) may have any number of states, and parameters of each unit; these follow the states in
``before`` and ``dbefore``.  States other than h lie side by side in one operand, c, and parameters in p.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from calcvm.formulas import number as n
from calcvm.formulas.gates import logistic, tanh
from calcvm.frozen import frozen

Numbers = Sequence[Any]
AHEAD = 16  # steps of which one sample alone gets the products of its inputs at a time
OPERANDS = {  # of the rows, for a cell that has all
    "forward": "z wh p b h0 c0 lengths y hn cn gates more c ws order counts x wi bi",
    "backward": "wh p h0 c0 lengths y gates more c dy dhn dcn dz t_dmore t_dp dh0 dc0 dh dc ws order counts",
    "weights": "y h0 lengths dz t_dmore t_dp dwh dp db",
}


@frozen(kw_only=True)
class Cell:
    """gates, apart, states, parameters : how many.

    kept : how many numbers the forward returns as gates.
    reads_before, reads_after : whether the backward reads h before, h after.  direct : whether it gives dbefore[0].
    """

    name: str
    synopsis: str
    gates: int
    apart: int = 0
    states: int = 1
    parameters: int = 0
    kept: int
    reads_before: bool = False
    reads_after: bool = False
    direct: bool = False
    forward: Callable[[Numbers, Numbers, Numbers], tuple[Numbers, Numbers, Numbers]]
    backward: Callable[[Numbers, Numbers, Numbers, Numbers, Numbers], tuple[Numbers, Numbers, Numbers]]
    flops: int
    source: str = ""

    @property
    def others(self) -> int:
        """States other than h."""
        return self.states - 1

    def operands(self, row: str) -> tuple[str, ...]:
        """Those of a row's operands, "forward", "backward" or "weights", that the cell has."""
        lacks = ("" if self.others else "c0 cn c dcn dc0 dc ") + ("" if self.kept else "gates ")
        lacks += ("" if self.apart else "more t_dmore ") + ("" if self.parameters else "p t_dp dp ")
        if row == "backward" and not self.reads_before:
            lacks += "h0" if self.reads_after else "h0 y"
        return tuple(name for name in OPERANDS[row].split() if name not in lacks.split())

    def places(self, row: str) -> tuple[int, ...]:
        """The place of each operand among those that the cell has; for one that it lacks, the first, which is not touched instead."""
        has = self.operands(row)
        return tuple(has.index(name) if name in has else 0 for name in OPERANDS[row].split())


def _tanh(z: Numbers, more: Numbers, before: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    return (), (), (tanh(z[0]),)


def _tanh_back(gates: Numbers, more: Numbers, before: Numbers, after: Numbers, d: Numbers) -> Any:
    return (d[0] * (1 - after[0] * after[0]),), (), (None,)


def _relu(z: Numbers, more: Numbers, before: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    return (), (), (n.where(z[0] < 0, 0.0, z[0]),)


def _relu_back(gates: Numbers, more: Numbers, before: Numbers, after: Numbers, d: Numbers) -> Any:
    return (n.where(after[0] <= 0, 0.0, d[0]),), (), (None,)


def _gru(z: Numbers, more: Numbers, before: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    r, u, (m,) = logistic(z[0]), logistic(z[1]), more
    g = tanh(n.fma(r, m, z[2]))
    return (r, u, g), more, (n.fma(u, before[0] - g, g),)


def _gru_back(gates: Numbers, more: Numbers, before: Numbers, after: Numbers, d: Numbers) -> Any:
    (r, u, g), (m,), (dh,) = gates, more, d
    dg = dh * (1 - u) * (1 - g * g)
    return (dg * m * (r * (1 - r)), dh * (before[0] - g) * (u * (1 - u)), dg), (dg * r,), (dh * u,)


def _lstm(z: Numbers, more: Numbers, before: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    i, f, g, o = logistic(z[0]), logistic(z[1]), tanh(z[2]), logistic(z[3])
    c = n.fma(f, before[1], i * g)
    return (i, f, g, o), (), (o * tanh(c), c)


def _lstm_back(gates: Numbers, more: Numbers, before: Numbers, after: Numbers, d: Numbers) -> Any:
    (i, f, g, o), (dh, dc), t = gates, d, tanh(after[1])
    e = n.fma(dh * o, 1 - t * t, dc)
    dz = (e * g * (i * (1 - i)), e * before[1] * (f * (1 - f)), e * i * (1 - g * g), dh * t * (o * (1 - o)))
    return dz, (), (None, e * f)


CELLS = {
    cell.name: cell
    for cell in (
        Cell(
            name="rnn", synopsis="h = tanh(z + h wh + b)", gates=1, kept=0, reads_after=True, forward=_tanh, backward=_tanh_back,
            flops=3, source="torch.nn.RNN; Elman 1990",
        ),
        Cell(
            name="rnn_relu", synopsis="h = relu(z + h wh + b)", gates=1, kept=0, reads_after=True, forward=_relu, backward=_relu_back,
            flops=3, source="torch.nn.RNN, nonlinearity relu",
        ),
        Cell(
            name="gru", synopsis="r, u = sigmoid(z + h wh + b); g = tanh(z + r*(h wh + b)); h = g + u*(h - g)",
            gates=3, apart=1, kept=3, reads_before=True, direct=True, forward=_gru, backward=_gru_back, flops=14,
            source="torch.nn.GRU; Cho et al. 2014, with the reset gate after the product",
        ),
        Cell(
            name="lstm", synopsis="i, f, o = sigmoid(z + h wh + b); g = tanh(z + h wh + b); c = f*c + i*g; h = o*tanh(c)",
            gates=4, states=2, kept=4, forward=_lstm, backward=_lstm_back, flops=16,
            source="torch.nn.LSTM; Hochreiter and Schmidhuber 1997, Gers et al. 2000",
        ),
    )
}  # fmt: skip

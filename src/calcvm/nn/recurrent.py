"""Layers of sequences (N, T, features): recurrent ones, with PyTorch's names and order of gates, and the mean over steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from calcvm import checks, sequences
from calcvm import functions as F
from calcvm.errors import CalcError
from calcvm.graph import Variable
from calcvm.init import Constant, Uniform
from calcvm.nn.layers import LARGEST_SIZE, Layer, one_step

if TYPE_CHECKING:
    from calcvm.equations.cells import OwnCell


@dataclass(repr=False, eq=False)
class _Recurrent(Layer):
    gates: ClassVar[int] = 1
    states: ClassVar[tuple[str, ...]] = ("h",)
    function: ClassVar[Callable[..., tuple[Variable, ...]]]

    hidden_size: int
    _: KW_ONLY
    num_layers: int = 1
    bias: bool = True
    dropout: float = 0.0
    bidirectional: bool = False
    return_sequences: bool = True
    trainable: bool = True

    def __post_init__(self) -> None:
        name = type(self).__name__
        self.hidden_size = checks.integer(f"{name}: hidden_size", self.hidden_size, 1, LARGEST_SIZE)
        self.num_layers = checks.integer(f"{name}: num_layers", self.num_layers, 1, 1000)
        for flag in ("bias", "bidirectional", "return_sequences", "trainable"):
            setattr(self, flag, checks.flag(f"{name}: {flag}", getattr(self, flag)))
        self.dropout = checks.number(f"{name}: dropout", self.dropout, 0, 1, ends="[)")
        self.random = bool(self.dropout) and self.num_layers > 1
        if self.dropout and self.num_layers == 1:
            self._warn_once(
                f"{name}: dropout is between layers, and there is one: set num_layers, or add nn.Dropout({self.dropout:g}) behind it"
            )

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        self._given(x)
        if one_step(x, scope) and self.bidirectional:
            raise CalcError(f"{scope}: {self!r} reads a sequence from its end too, so it cannot run step by step")
        y = x
        for layer in range(self.num_layers):
            dropped = F.dropout(y, self.dropout) if layer and self.dropout and training else y
            y, last = self._layer(dropped, layer, x.lengths)
        return y if self.return_sequences else last

    def _layer(self, x: Variable, layer: int, lengths: Variable | None) -> tuple[Variable, Variable]:
        """The outputs of all steps, and the last state h, of one of the layers."""
        if x.rank == 2:
            return self._step(x, layer)
        found = [
            self._called(x, f"_l{layer}{end}", lengths=lengths, reverse=bool(end))
            for end in ("", "_reverse")[: 1 + self.bidirectional]
        ]
        if len(found) == 1:
            return found[0][0], found[0][1]
        return F.concat([y for y, *_ in found], axis=-1), F.concat([h for _, h, *_ in found], axis=-1)

    def _step(self, x: Variable, layer: int) -> tuple[Variable, Variable]:
        """The same for one step, whose states are carried."""
        states = [self.carry(x, f"{name}_l{layer}", (self.hidden_size,)) for name in self.states]
        steps = F.reshape(x, (None, 1, x.shape[1].b))
        _, *new = self._called(steps, f"_l{layer}", *states)
        for state, after in zip(states, new):
            x.graph.active.carry(state, after)
        return new[0], new[0]

    def _called(self, x: Variable, end: str, *states: Variable, **how: Any) -> tuple[Variable, ...]:
        """The results of the function, with the parameters whose names have this end."""
        return type(self).function(x, *self._weights(x, end), *states, **how, **self._options)

    def _weights(self, x: Variable, end: str) -> list[Variable | None]:
        """weight_ih, weight_hh, bias_ih, bias_hh."""
        width, bound = self.gates * self.hidden_size, self.hidden_size**-0.5
        shapes: dict[str, tuple[int, ...]] = {
            "weight_ih": (x.shape[-1].b, width),
            "weight_hh": (self.hidden_size, width),
        }
        shapes |= {"bias_ih": (width,), "bias_hh": (width,)} if self.bias else {}
        start = Uniform(-bound, bound)
        made = [self.parameter(x, name + end, shape, start, trainable=self.trainable) for name, shape in shapes.items()]
        return [*made, *[None] * (4 - len(made))]

    @property
    def _options(self) -> dict[str, Any]:
        return {}


@dataclass(repr=False, eq=False)
class RNN(_Recurrent):
    """h = tanh(x_t weight_ih + bias_ih + h weight_hh + bias_hh), for each step of x (N, T, K): `calcvm.rnn`.

    hidden_size : units H of the state.  num_layers : layers, each on the outputs of the one before.
    dropout : probability that an output between layers is zeroed in training.
    bidirectional : a second direction reads from the last step to the first; its outputs are appended, as 2*H features.
    return_sequences : the outputs of all steps, (N, T, H); False: the state after the last step, (N, H).
    nonlinearity : "tanh" or "relu".

    Parameters are torch.nn.RNN's, with its names and initial values; weights are transposed, (K, H) and (H, H).
    """

    function = staticmethod(sequences.rnn)
    _: KW_ONLY
    nonlinearity: str = "tanh"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.choice("RNN: nonlinearity", self.nonlinearity, sequences.NONLINEARITIES)

    @property
    def _options(self) -> dict[str, Any]:
        return {"nonlinearity": self.nonlinearity}


class GRU(_Recurrent):
    """A gated recurrent unit: `calcvm.gru`; settings as of `RNN`.

    Parameters are torch.nn.GRU's, with its names and order of gates (reset, update, new); weights are transposed, (K, 3*H) and (H, 3*H).
    """

    gates = 3
    function = staticmethod(sequences.gru)


class LSTM(_Recurrent):
    """Long short-term memory: `calcvm.lstm`; settings as of `RNN`.

    Parameters are torch.nn.LSTM's, with its names and order of gates (input, forget, cell, output); weights are transposed, (K, 4*H)
    and (H, 4*H).
    """

    gates = 4
    states = ("h", "c")
    function = staticmethod(sequences.lstm)


@dataclass(repr=False, eq=False)
class _OfCell:
    cell: OwnCell


@dataclass(repr=False, eq=False)
class Recurrent(_Recurrent, _OfCell):
    """A recurrent layer of a custom cell: `calcvm.recurrent`; settings as of `RNN`.

    cell : a function decorated by `calcvm.cell`.

    Parameters are named as torch.nn.RNN's: weights (K, G*H) and (H, G*H) for the cell's G gates, and those of each unit, (H,), by
    their names in the cell.  These start at their defaults there, or as weights do.
    """

    function: ClassVar[Callable[..., tuple[Variable, ...]]] = staticmethod(sequences.recurrent)

    def __post_init__(self) -> None:
        super().__post_init__()
        sequences.own_cell("Recurrent", self.cell)

    @property
    def gates(self) -> int:  # type: ignore[override]
        return self.cell.gates

    @property
    def states(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.cell.states

    def _called(self, x: Variable, end: str, *states: Variable, **how: Any) -> tuple[Variable, ...]:
        bound = self.hidden_size**-0.5
        units = {
            name: self.parameter(
                x,
                name + end,
                (self.hidden_size,),
                Uniform(-bound, bound) if start is None else Constant(start),
                trainable=self.trainable,
            )
            for name, start in zip(self.cell.parameters, self.cell.starts)
        }
        return type(self).function(self.cell, x, *self._weights(x, end), *states, **how, **units)


@dataclass(repr=False, eq=False)
class MeanOverSteps(Layer):
    """The mean over the steps that are there, (N, features), 0 if there are none; step by step over those so far."""

    stateless: ClassVar[bool] = True

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        self._given(x)
        if one_step(x, scope):
            total, seen = self.carry(x, "total", (x.shape[1].b,)), self.carry(x, "seen", (1,))
            return F.carry(total, total + x) / F.carry(seen, seen + 1.0)
        if x.lengths is None:
            return F.mean(x, axis=1)
        steps = F.cast(F.reshape(x.lengths, (None, 1)), None)
        return F.sum(F.where(F.steps_there(x, x), x, 0.0), axis=1) / F.maximum(steps, 1.0)

"""Layers: parts of a network that make their own parameters, composed with ``>>``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from calcvm import functions as F
from calcvm.errors import CalcError, ShapeError
from calcvm.graph import Variable, apply
from calcvm.ops.dims import show


class Layer:
    """Base of layers.  ``layer.build(x, scope, training)`` adds its operators to the active path."""

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        """The layer's output; parameters of ``scope`` that the graph has already are shared."""
        raise NotImplementedError

    def __rshift__(self, other: Layer) -> Sequential:
        return Sequential(self, other)

    @property
    def kind(self) -> str:
        return type(self).__name__.lower()


class Sequential(Layer):
    """Layers one after the other: ``Linear(64) >> Sigmoid() >> Linear(10)``."""

    def __init__(self, *layers: Layer):
        for layer in layers:
            if not isinstance(layer, Layer):
                raise CalcError(f"Sequential takes layers of calcvm.nn; {layer!r} is a {type(layer).__name__}")
        self.layers = [inner for layer in layers for inner in (layer if isinstance(layer, Sequential) else [layer])]

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __repr__(self) -> str:
        return " >> ".join(map(repr, self.layers))

    def build(self, x: Variable, scope: str = "", training: bool = True) -> Variable:
        counts: dict[str, int] = {}
        for layer in self.layers:
            n = counts[layer.kind] = counts.get(layer.kind, 0) + 1
            x = layer.build(x, f"{scope}{layer.kind}_{n}", training)
        return x


@dataclass(repr=True)
class Linear(Layer):
    """``y = x @ weight + bias``: x (..., K), weight (K, units), bias (units,).

    init, bias_init : initializers (default XavierUniform, Zeros).  trainable : False freezes the layer.
    """

    units: int
    bias: bool = True
    init: Any = None
    bias_init: Any = None
    regularizer: Any = field(default=None, kw_only=True)
    trainable: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.units, int) or self.units < 1:
            raise CalcError(f"Linear: units must be a positive integer, not {self.units!r}")

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        if x.rank < 2 or not x.shape[-1].constant:
            raise ShapeError(f"{scope}: the input {x} must have the batch first and a fixed last size")
        parameter = _shared(x, self.trainable)
        k = x.shape[-1].b
        w = parameter(f"{scope}.weight", (k, self.units), self.init, self.regularizer)
        if w.shape[0] != k:
            raise ShapeError(f"{scope}: the input {x} does not fit its weight {show(w.shape)}")
        b = parameter(f"{scope}.bias", (self.units,), self.bias_init, None) if self.bias else None
        return F.linear(x, w, b)


def _shared(x: Variable, trainable: bool) -> Callable[..., Variable]:
    """Parameters of the graph by name: made once, shared by every path that builds the layer."""

    def parameter(name: str, shape: tuple[int, ...], init: Any, regularizer: Any) -> Variable:
        known = x.graph.variables.get(name)
        return known or x.graph.parameter(name, shape, init=init, regularizer=regularizer, trainable=trainable)

    return parameter


@dataclass(repr=True)
class Dropout(Layer):
    """Zeroes elements with probability ``rate`` while training; nothing otherwise."""

    rate: float = 0.5

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        return F.dropout(x, self.rate) if training and self.rate else x


class Function(Layer):
    """A function of one variable as a layer; also the base of the activations."""

    def __init__(self, fn: Callable[[Variable], Variable], *args: float, **kwargs: Any):
        self._fn, self._args, self._kwargs = fn, args, kwargs

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        return self._fn(x, *self._args, **self._kwargs)

    def __repr__(self) -> str:
        given = [*map(str, self._args), *(f"{k}={v!r}" for k, v in self._kwargs.items())]
        name = type(self).__name__ if type(self) is not Function else f"Function {self._fn.__name__}"
        return f"{name}({', '.join(given)})"


def _layer(fn: Callable[..., Variable], name: str) -> Any:
    def __init__(self: Function, *args: float, **kwargs: Any) -> None:
        Function.__init__(self, fn, *args, **kwargs)

    return type(name, (Function,), {"__init__": __init__, "__doc__": fn.__doc__, "__module__": __name__})


Scale = _layer(lambda x, a=1.0, b=0.0: apply("affine", x, a=a, b=b), "Scale")
Scale.__doc__ = "``a * x + b`` with constants: scaling of raw data, for example."
Flatten = _layer(F.flatten, "Flatten")
Reshape = _layer(lambda x, *shape: F.reshape(x, (None, *shape)), "Reshape")
Reshape.__doc__ = "Another shape for each sample: ``Reshape(8, 8)``."
ReLU = _layer(F.relu, "ReLU")
LeakyReLU = _layer(F.leaky_relu, "LeakyReLU")
Sigmoid = _layer(F.sigmoid, "Sigmoid")
Tanh = _layer(F.tanh, "Tanh")
GELU = _layer(F.gelu, "GELU")
Softplus = _layer(F.softplus, "Softplus")
ELU = _layer(F.elu, "ELU")
Softmax = _layer(F.softmax, "Softmax")
LogSoftmax = _layer(F.log_softmax, "LogSoftmax")

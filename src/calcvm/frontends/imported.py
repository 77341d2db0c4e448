"""A network of another library as plain data, and its graph here."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from calcvm import functions as F
from calcvm.errors import CalcError, UnsupportedOperator
from calcvm.frontends import aten
from calcvm.frontends.arrangement import Arranged
from calcvm.frozen import frozen
from calcvm.graph import Variable
from calcvm.lazy import cached_property
from calcvm.nn.layers import Layer

Shape = tuple[int | None, ...]


class Value(NamedTuple):
    """A value of the graph, by number."""

    number: int


@frozen
class Node:
    """An operator.

    path : of the module that calls it, "" for the outermost.  type : of its result.
    trains : whether it does something else in training.  of_sizes : it computes with sizes.
    """

    value: Value
    name: str
    path: str
    type: str
    args: list[Any]
    options: dict[str, Any]
    trains: bool
    of_sizes: bool


@frozen
class Tensor:
    """A parameter or a buffer.  ``across`` : it is stored as (inputs, outputs), as all operators read it."""

    value: Value
    name: str
    array: np.ndarray
    buffer: bool
    across: bool
    trains: bool


@frozen
class Imported:
    """A module of PyTorch as a graph.

    name : the module's class.  inputs : shapes, and types of those that are no floats.  axes : the batch's, in each input.
    left_out : what it does in training alone, besides batch norm and dropout, in words.
    """

    name: str
    inputs: list[tuple[Shape, str | None]]
    axes: list[int | None]
    given: list[Value]
    tensors: list[Tensor]
    nodes: list[Node]
    results: list[Any]
    left_out: str


class Built:
    """A module's graph on variables: what the functions of `aten` call a building."""

    def __init__(self, layer: Layer, imported: Imported, inputs: Sequence[Variable], scope: str, training: bool):
        self.layer, self.imported, self.inputs, self.scope = layer, imported, inputs, scope
        self.graph, self.training, self.type, self._trains = inputs[0].graph, training, "float32", training
        self._values: dict[Value, Any] = {value: Arranged.of(x) for value, x in zip(imported.given, inputs)}
        for tensor in imported.tensors:
            self._values[tensor.value] = self._own(tensor)
        for node in imported.nodes:
            self._values[node.value] = self._computed(node)
        self.outputs = [aten.variable(self, self._argument(x)) for x in imported.results]
        self.graph.active.layers[scope] = self.outputs[0], len(self.graph.active.operations)

    def _own(self, t: Tensor) -> Arranged:
        """A parameter or a buffer."""
        x, array = self.inputs[0], t.array.T if t.across else t.array
        if t.buffer:
            return Arranged.of(self.layer.buffer(x, t.name, array.shape, array))
        v = Arranged.of(self.layer.parameter(x, t.name, array.shape, array, trainable=t.trains))
        return v.swapped() if t.across else v

    def _computed(self, node: Node) -> Any:
        """The value of an operator."""
        where, path = f"{self.scope}.{node.path}" if node.path else self.scope, self.graph.active
        before = len(path.operations)
        self.training, self.type = self._trains and node.trains, node.type
        try:
            value = self._value(node)
        except (CalcError, ArithmeticError, IndexError, TypeError) as error:
            told = str(error) if isinstance(error, CalcError) else f"{type(error).__name__}: {error}"
            raise UnsupportedOperator(
                f"from_torch: {node.name} in {node.path or self.imported.name}: {told}"
            ) from error
        made = path.operations[before:]
        for op in made:
            op.layer = op.layer or where
        if made:
            path.layers[where] = next(iter(made[-1].outputs.values())), len(path.operations)
        return value

    def _value(self, node: Node) -> Any:
        args, options = self._argument(node.args), {k: self._argument(v) for k, v in node.options.items()}
        if node.name == aten.SIZE:
            size = args[0].shape[args[1]]
            return size.b if size.constant else size
        if node.name == aten.GETITEM:
            value = args[0][args[1]]
            return value() if callable(value) else value
        if node.of_sizes:
            return getattr(operator, node.name)(*args)
        function = aten.counterpart(node.name)
        assert function is not None
        return function(self, *args, **options)

    def _argument(self, x: Any) -> Any:
        """An argument, with the values of nodes."""
        if isinstance(x, Value):
            return self._values[x]
        return [self._argument(y) for y in x] if isinstance(x, list) else x

    # ------------------------------------------------------------ what the functions ask for
    @cached_property
    def zeros(self) -> Variable:
        x, axis = self.inputs[0], self.imported.axes[0]
        if x.rank > 1:
            first = [None if k == axis else 1 for k in range(x.rank)]
            x = F.reshape(F.slice(x, [n and 0 for n in first], first), (None,))
        return F.cast(F.less(x, x), None)  # where x is not finite, too

    def constant(self, value: Any) -> Variable:
        return self.graph.constant(self.graph.unique(f"{self.scope}.constant"), np.asarray(value, np.float64))

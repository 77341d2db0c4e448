"""A network of another library as plain data, and its graph here."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from calcvm import functions as F
from calcvm.errors import CalcError, UnsupportedOperator
from calcvm.frontends import aten, keras, onnx
from calcvm.frontends.arrangement import Arranged
from calcvm.frontends.building import OF_BATCH, Cannot, variable
from calcvm.frozen import frozen
from calcvm.graph import Variable
from calcvm.lazy import cached_property
from calcvm.nn.layers import Layer
from calcvm.ops.types import BYTES

Shape = tuple[int | None, ...]
TABLES: dict[str, Callable[[str], Callable[..., Any] | None]] = {
    "from_keras": keras.counterpart,
    "from_torch": aten.counterpart,
    "load_onnx": onnx.counterpart,
}


class Value(NamedTuple):
    """A value of the graph, by number."""

    number: int


@frozen
class Node:
    """An operator.

    path : of the module that calls it, "" for the outermost.  type : of its result.
    trains : whether it does something else in training.  of_sizes : it computes with sizes.  outputs : how many results it has.
    """

    value: Value
    name: str
    path: str
    type: str
    args: list[Any]
    options: dict[str, Any]
    trains: bool
    of_sizes: bool = False
    outputs: int = 1


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
    """A network as a graph.

    by : the function that reads it.  name : the module's class, or the graph's name.
    inputs : names, shapes, and types of those that are no floats.  axes : the batch's, in each input.
    outputs : names.  left_out : what it does in training alone, besides batch norm and dropout, in words.
    as_written : normalization and dropout do what the file says in every path.
    """

    by: str
    name: str
    inputs: list[tuple[str, Shape, str | None]]
    axes: list[int | None]
    outputs: list[str]
    given: list[Value]
    tensors: list[Tensor]
    nodes: list[Node]
    results: list[Any]
    left_out: str = ""
    as_written: bool = False


class Built:
    """A network's graph on variables: what the functions of the tables call a building."""

    def __init__(self, layer: Layer, imported: Imported, inputs: Sequence[Variable], scope: str, training: bool):
        self.layer, self.imported, self.inputs, self.scope = layer, imported, inputs, scope
        self.graph, self.training, self.type, self._trains = inputs[0].graph, training, "float32", training
        self.outputs, self.as_written, self._table = 1, imported.as_written, TABLES[imported.by]
        self.values: dict[Value, Any] = {value: Arranged.of(x) for value, x in zip(imported.given, inputs)}
        for tensor in imported.tensors:
            self.own(tensor)
        for node in imported.nodes:
            self.add(node)

    def results(self) -> list[Variable]:
        """Its outputs."""
        results: list[Variable] = []
        for x, name in zip(self.imported.results, self.imported.outputs):
            try:
                v = variable(self, self.argument(x))
            except CalcError as error:
                raise UnsupportedOperator(
                    f"{self.imported.by}: the output {name!r} of {self.imported.name}: {error}"
                ) from error
            results.append(F.transpose(v, [*range(v.rank)]) if v.kind != "result" or v in results else v)  # a copy
        self.graph.active.layers[self.scope] = results[0], len(self.graph.active.operations)
        return results

    def own(self, t: Tensor) -> None:
        """Add a parameter or a buffer."""
        x, array = self.inputs[0], t.array.T if t.across else t.array
        if t.buffer:
            v = self.layer.buffer(x, t.name, array.shape, array)
        else:
            v = self.layer.parameter(x, t.name, array.shape, array, trainable=t.trains)
        v.turned = t.across
        self.values[t.value] = Arranged.of(v).swapped() if t.across else Arranged.of(v)

    def add(self, node: Node) -> Any:
        """Add an operator; its value."""
        where, path = f"{self.scope}.{node.path}" if node.path else self.scope, self.graph.active
        before = len(path.operations)
        self.training, self.type, self.outputs = self._trains and node.trains, node.type, node.outputs
        try:
            value = self._value(node)
        except (CalcError, ArithmeticError, AttributeError, IndexError, TypeError, ValueError) as error:
            told = str(error) if isinstance(error, (CalcError, ArithmeticError)) else f"{type(error).__name__}: {error}"
            by, name = self.imported.by, self.imported.name
            raise UnsupportedOperator(f"{by}: {node.name} in {node.path or name}: {told}") from error
        made = path.operations[before:]
        for op in made:
            op.layer = op.layer or where
        if made:
            path.layers[where] = next(iter(made[-1].outputs.values())), len(path.operations)
        self.values[node.value] = value
        return value

    def _value(self, node: Node) -> Any:
        args, options = self.argument(node.args), {k: self.argument(v) for k, v in node.options.items()}
        if node.name == aten.SIZE:
            size = args[0].shape[args[1]]
            return size.b if size.constant else size
        if node.name == aten.GETITEM:
            value = args[0][args[1]]
            return value() if callable(value) else value
        if node.of_sizes:
            return getattr(operator, node.name)(*args)
        function = self._table(node.name)
        assert function is not None
        return function(self, *args, **options)

    def argument(self, x: Any) -> Any:
        """An argument, with the values of nodes."""
        if isinstance(x, Value):
            return self.values[x]
        return [self.argument(y) for y in x] if isinstance(x, list) else x

    # ------------------------------------------------------------ what the functions ask for
    @cached_property
    def zeros(self) -> Variable:
        x, axis = next((x, axis) for x, axis in zip(self.inputs, self.imported.axes) if axis is not None)
        if x.rank > 1:
            first = [None if k == axis else 1 for k in range(x.rank)]
            x = F.reshape(F.slice(x, [n and 0 for n in first], first), (None,))
        return F.cast(F.less(x, x), None)  # where x is not finite, too

    def constant(self, value: Any) -> Variable:
        value = np.asarray(value)
        if value.dtype == object:
            raise Cannot(OF_BATCH)
        kind = str(value.dtype) if self.imported.by == "load_onnx" and value.dtype.kind != "f" else None
        kind = kind if kind in BYTES else kind and "int64"
        return self.graph.constant(self.graph.unique(f"{self.scope}.constant"), value, kind)

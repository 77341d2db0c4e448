"""The table of operators that are written, and what its functions share.

A function of the table gets the `Nodes`, then the operator's inputs, `Tensor` or None for one that is left out, and its attributes by
name, with axes as users see them.  It adds nodes, and returns the name of the result, or of each result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from calcvm.frontends.building import Cannot, declaring
from calcvm.ops.dims import Affine, Shape
from calcvm.ops.types import dtype_of

if TYPE_CHECKING:
    import onnx

    from calcvm.graph import Operation, Variable

WRITERS: dict[str, Callable[..., Any]] = {}
INF = float("inf")
writes = declaring(WRITERS)  # by names of operators


class Tensor(str):
    """The name of a variable's tensor, and what is known of it.

    value : the numbers, if no data change them.  turned : the initializer whose transpose it is.
    """

    shape: Shape
    type: str
    value: np.ndarray | None = None
    turned: str | None = None

    @classmethod
    def of(cls, name: str, v: Variable, value: np.ndarray | None = None) -> Tensor:
        tensor = cls(name)
        tensor.shape, tensor.type, tensor.value = v.shape, v.type, value
        return tensor

    @property
    def rank(self) -> int:
        return len(self.shape)


class Nodes:
    """Nodes and initializers of a file, added one by one.

    names : taken ones.  op : the operator that is being written.  opset : the lowest that has what was written.
    """

    def __init__(self, dtype: str, names: Iterable[str]):
        self.dtype, self.names = np.dtype(dtype), {*names}
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.NodeProto] = []
        self.stored: dict[str, np.ndarray] = {}
        self.tensors: dict[Variable, Tensor] = {}
        self.op: Operation
        self.opset = 21
        self._known: dict[Any, str] = {}

    def __call__(self, kind: str, *inputs: Any, outputs: Any = 1, **attrs: Any) -> Any:
        """A node; its output, or several.

        inputs : names, None, numbers of the network's floats, lists of integers, or arrays.
        """
        from onnx import helper

        given = ["" if x is None else x if isinstance(x, str) else self.constant(x) for x in inputs]
        while given and not given[-1]:
            given.pop()
        made = [self.unique(f"{self.op.name}.{kind}") for _ in range(outputs)]
        name = self.unique("/".join(filter(None, (self.op.layer.rstrip("."), self.op.name, kind))))
        self.nodes.append(helper.make_node(kind, given, made, name, **attrs))
        return made[0] if outputs == 1 else made

    def unique(self, stem: str) -> str:
        name, k = stem, 1
        while name in self.names:
            k += 1
            name = f"{stem}_{k}"
        self.names.add(name)
        return name

    # ------------------------------------------------------------ values
    def constant(self, value: Any) -> str:
        """What is no weight: a number or an array of the network's floats, or integers."""
        array = np.asarray(value, np.int64 if isinstance(value, list) else None)
        return self.once(array.astype(self.dtype) if array.dtype == np.float64 else array)

    def number(self, value: float, kind: str) -> str:
        """A number of a type."""
        return self.once(np.array(value, dtype_of(kind, self.dtype.name)))

    def once(self, array: np.ndarray) -> str:
        """Equal constants are one."""
        key = array.dtype, array.shape, array.tobytes()
        if key not in self._known:
            self._known[key] = self.fixed("constant", array)
        return self._known[key]

    def store(self, name: str, array: np.ndarray) -> str:
        """An initializer."""
        name = self.unique(name)
        self.stored[name] = np.ascontiguousarray(array).reshape(array.shape)
        return name

    def fixed(self, name: str, array: np.ndarray) -> str:
        """A constant, by a node: an initializer of floats would be read as a weight that trains."""
        from onnx import helper, numpy_helper

        if not (array.ndim and array.dtype.kind == "f"):
            return self.store(name, array)
        name = self.unique(name)
        self.constants.append(helper.make_node("Constant", [], [name], name, value=numpy_helper.from_array(array)))
        return name

    def type_of(self, kind: str) -> int:
        """ONNX's number of a type."""
        from onnx import helper

        return helper.np_dtype_to_tensor_dtype(np.dtype(dtype_of(kind, self.dtype.name)))

    def cast(self, x: str, kind: str) -> str:
        """A tensor in another type."""
        same = isinstance(x, Tensor) and dtype_of(x.type, self.dtype.name) == dtype_of(kind, self.dtype.name)
        return x if same else self("Cast", x, to=self.type_of(kind))

    # ------------------------------------------------------------ what several operators need
    @property
    def shape(self) -> Shape:
        """The shape of the operator's first result."""
        return next(iter(self.op.outputs.values())).shape

    def reshape(self, x: str, shape: Sequence[Any]) -> str:
        """x under another shape, of which one size may depend on the batch."""
        return self("Reshape", x, [n if isinstance(n, int) else n.b if n.constant else -1 for n in shape])

    def turn(self, x: str, perm: Sequence[int]) -> str:
        return x if [*perm] == [*range(len(perm))] else self("Transpose", x, perm=[*perm])

    def reduce(self, kind: str, x: str, axes: Sequence[int], keepdims: bool = True) -> str:
        return self(f"Reduce{kind}", x, [*axes], keepdims=int(keepdims))

    def where(self, condition: Any, x: Any, y: Any) -> str:
        return self("Where", condition, x, y)

    def affine(self, x: str, a: float = 1.0, b: float = 0.0) -> str:
        """a*x + b"""
        x = x if a == 1 else self("Mul", x, a)
        return x if b == 0 else self("Add", x, b)


def whole(n: Affine, what: str) -> int:
    """A size (Cannot: it depends on the batch)."""
    if not n.constant:
        raise Cannot(f"{what} depends on the batch")
    return n.b


def indexes(n: Nodes, x: Tensor) -> str:
    """Places as int64, also of floats."""
    return n.cast(x, "int64")


def axes_of(rank: int, axes: Sequence[int] | None) -> list[int]:
    """Axes from 0 on, in order; None: all."""
    return [*range(rank)] if axes is None else sorted(axis % rank for axis in axes)

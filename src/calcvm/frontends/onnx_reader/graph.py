"""A file of ONNX read node by node: what is known is computed, all else is built once, and noted as plain data."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
from onnx import AttributeProto, GraphProto, NodeProto, helper

from calcvm import checks
from calcvm.errors import CalcError, UnsupportedOperator
from calcvm.frontends.aten import GETITEM
from calcvm.frontends.building import Cannot, Filled
from calcvm.frontends.imported import Built, Imported, Node, Tensor, Value
from calcvm.frontends.onnx_reader.file import File, nodes_of
from calcvm.frontends.onnx_reader.inputs import VALUES, Input, inputs_of, looked_at
from calcvm.frontends.onnx_reader.joined import join
from calcvm.frontends.onnx_reader.known import computed
from calcvm.graph import CalcGraph
from calcvm.hints import meant
from calcvm.nn.layers import Layer

# inputs that are weights, also where they are numbers of a Constant node, or of what an exporter has folded
WEIGHTS = {
    "BatchNormalization": (1, 2, 3, 4), "Conv": (1, 2), "ConvTranspose": (1, 2), "GRU": (1, 2, 3), "Gemm": (1, 2), "LSTM": (1, 2, 3),
    "LayerNormalization": (1, 2), "MatMul": (0, 1), "RNN": (1, 2, 3),
}  # fmt: skip
RUNNING = (3, 4)  # inputs of a batch normalization that training changes by its forward
IN_TWO_FORMS = ("BatchNormalization", "Dropout")
OF_INTEGERS = ("Quantize", "Dequantize", "QLinear", "MatMulInteger", "ConvInteger")  # whose scales are no weights
MADE = ("val_", "lifted_tensor")  # names that PyTorch's exporter gives to constants
OF_A_SHAPE = {"ConstantOfShape": 0, "Expand": 1, "Range": 1}  # and the input that may have the batch's size
TAKES_FILLED = ("Expand", "GRU", "LSTM", "RNN", "Reshape", "Squeeze", "Unsqueeze")
PARTS = (".", "/")  # the end of what many names begin with
UNNAMED = ("", "main_graph", "torch_jit")  # graphs that exporters have not named
MOST_NODES = 100_000  # with loops written out

Names = MutableMapping[str, Any]


def imported(
    source: Any, sizes: Mapping[str, Any], values: Mapping[str, Any], batch_axes: Any, trainable: Any, as_written: bool = False
) -> Imported:  # fmt: skip
    """The network of a file; ``as_written`` : normalization and dropout do what the file says.  Otherwise as `load_onnx`."""
    file = source if isinstance(source, File) else File(source)
    graph = file.model.graph
    known = _values_of(graph, values)
    given = [x for x in inputs_of(graph, sizes, batch_axes) if x.name not in known]
    for x in [*given]:
        if 0 in x.shape:  # it has no elements
            known[x.name] = np.zeros([n or 1 if n != 0 else 0 for n in x.shape], x.dtype)
            given.remove(x)
    wanted = looked_at(graph)
    if lacking := [x.name for x in given if x.name in wanted]:
        raise CalcError(
            f"load_onnx: the inputs {', '.join(lacking)} give shapes, axes, or the like, which must be known: "
            f"values={{{lacking[0]!r}: [...]}}"
        )
    if not (given or as_written):
        raise CalcError(
            f"load_onnx: {file.name} has no input of data: its outputs are known numbers, and there is nothing to compute"
        )
    return _Reader(file, given, known, trainable, as_written).imported


def _values_of(graph: GraphProto, values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    checks.one_of("load_onnx: values", values, Mapping, "a mapping of names of inputs to their numbers")
    types = {
        x.name: helper.tensor_dtype_to_np_dtype(x.type.tensor_type.elem_type)
        for x in graph.input
        if x.type.HasField("tensor_type")
    }
    for name in values:
        if name not in types:
            raise CalcError(
                f"load_onnx: values: no input is called {checks.shown(name)}{meant(name, types)}; there are {', '.join(types)}"
            )
    return {name: _numbers_of(name, value, types[name]) for name, value in values.items()}


def _numbers_of(name: str, value: Any, dtype: np.dtype) -> np.ndarray:
    try:
        return np.asarray(value, dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise CalcError(
            f"load_onnx: values[{name!r}]: numbers of type {dtype} are wanted, not {checks.shown(value)}"
        ) from error


class _Reader:
    def __init__(self, file: File, given: Sequence[Input], known: Mapping[str, Any], trainable: Any, as_written: bool):
        self.file, self.graph = file, file.model.graph
        initial = {t.name: file.array(t) for t in self.graph.initializer}
        self.initial = {**file.arrays, **initial}
        self.constants = _weights_in_constants(self.graph)
        self.trainable = _chosen(trainable, [*self.initial, *self.constants])
        self.readers: dict[str, list[tuple[NodeProto, int]]] = {}
        for n in nodes_of(self.graph):
            for k, name in enumerate(n.input):
                self.readers.setdefault(name, []).append((n, k))
        self.read = {x.name for x in self.graph.output} | {*self.readers} | _ends(self.graph)
        self.count, self.done = 0, 0
        self.whole: dict[Value, Value] = {}  # constants of the batch's size, computed
        doubles = any(a.dtype == np.float64 for a in self.initial.values()) or any(x.dtype == "float64" for x in given)
        doubles |= any(x.type.tensor_type.elem_type == 11 for x in self.graph.output)
        self.type = "float64" if doubles else "float32"
        name = file.name if self.graph.name in UNNAMED else self.graph.name
        inputs = [
            (x.name, x.shape, x.dtype if not x.dtype.endswith(("16", "float32", "float64")) else None) for x in given
        ]
        values = [self.numbered() for _ in given]
        self.imported = Imported(
            "load_onnx", name, inputs, [x.axis for x in given], [x.name for x in self.graph.output], values, [], [], [], "", as_written,
        )  # fmt: skip
        names: Names = {**self.initial, **known, **{x.name: v for x, v in zip(given, values)}}
        self.weights: dict[str, Value] = {}
        if not given:
            self.built = None
            self.nodes(self.graph, names)
        else:
            g = CalcGraph()
            with g.path("read", backward=True, adopt=False), g.whole("onnxmodel_1"):
                variables = [g.placeholder(f"x{k}", shape, dtype) for k, (_, shape, dtype) in enumerate(inputs)]
                self.built = Built(Layer(), self.imported, variables, "onnxmodel_1", False)
                self.nodes(self.graph, names)
        self.imported.results.extend(self.value(None, 0, x.name, names) for x in self.graph.output)
        if self.built is not None:
            join(self.imported, self.built)

    def numbered(self) -> Value:
        self.count += 1
        return Value(self.count - 1)

    # ------------------------------------------------------------ values
    def value(self, node: NodeProto | None, slot: int, name: str, names: Names) -> Any:
        """What a node reads: an array, a value, or None."""
        if not name:
            return None
        if name not in names:
            raise CalcError(f"load_onnx: {node.op_type if node else 'the graph'} reads {name!r}, which nothing gives")
        x = names[name]
        if not isinstance(x, np.ndarray) or self.built is None:
            return x
        return self.weight(name, x) if self.is_weight(node, slot, name, x) else x

    def is_weight(self, node: NodeProto | None, slot: int, name: str, x: np.ndarray) -> bool:
        """Whether an array is a parameter or a buffer."""
        looked_at = node is not None and slot in VALUES.get(node.op_type, ())
        if node is None or looked_at or name in self.weights:
            return name in self.weights and not looked_at
        floats = x.dtype.kind == "f" or str(x.dtype) == "bfloat16"
        if not floats or not x.size or node.op_type.startswith(OF_INTEGERS):
            return False
        if name in self.initial and not name.startswith(MADE):
            return bool(x.ndim) or self.trainable(name) == "named"
        return bool(x.ndim) and _is_weight(node, slot, x)

    def weight(self, name: str, array: np.ndarray) -> Value:
        """The parameter or buffer of a name."""
        if name not in self.weights:
            assert self.built is not None
            readers = self.readers.get(name, [])
            buffer = any(n.op_type == "BatchNormalization" and k in RUNNING for n, k in readers)
            array = np.asarray(array, np.float64 if array.dtype == np.float64 else np.float32)
            trains = not buffer and bool(self.trainable(name))
            tensor = Tensor(self.numbered(), name, array, buffer, False, trains)
            self.imported.tensors.append(tensor)
            self.built.own(tensor)
            self.weights[name] = tensor.value
        return self.weights[name]

    # ------------------------------------------------------------ nodes
    def nodes(self, graph: GraphProto, names: Names) -> None:
        for n in graph.node:
            self.done += 1
            if self.done > MOST_NODES:
                raise UnsupportedOperator(f"load_onnx: more than {MOST_NODES} nodes, with its loops written out")
            self.node(n, names)

    def node(self, n: NodeProto, names: Names) -> None:
        if n.op_type in ("If", "Loop", "Scan"):
            getattr(self, f"_{n.op_type.lower()}")(n, names)
            return
        args = [self.value(n, k, name, names) for k, name in enumerate(n.input)]
        while args and args[-1] is None:
            args.pop()
        options = _attributes(n)
        if all(x is None or isinstance(x, np.ndarray) for x in args):
            made = self.known(n, args, options)
        else:
            made = self.add(n, args, options)
        names.update((name, x) for name, x in zip(n.output, made) if name)

    def known(self, n: NodeProto, args: Sequence[Any], options: dict[str, Any]) -> Sequence[Any]:
        if n.op_type in OF_A_SHAPE and args[OF_A_SHAPE[n.op_type]].dtype == object:  # the batch's
            return self.add(n, args, options)
        try:
            return computed(n, args, options)
        except Cannot as error:
            raise UnsupportedOperator(f"load_onnx: {n.op_type} {n.name or n.output[0]!r}: {error}") from error

    def add(self, n: NodeProto, args: Sequence[Any], options: dict[str, Any]) -> Sequence[Any]:
        """The outputs of a node that is built."""
        assert self.built is not None
        if n.op_type not in TAKES_FILLED:
            args = [self.filled(x) for x in args]
        outputs = max((k for k, name in enumerate(n.output) if name in self.read), default=-1) + 1
        trains = n.op_type in IN_TWO_FORMS and not self.is_frozen(n)
        node = Node(self.numbered(), n.op_type, _path(n), self.type, [*args], options, trains, outputs=outputs)
        made = self.built.add(node)
        several = made if isinstance(made, tuple) else (made,)
        if all(isinstance(x, np.ndarray) for x in several[:outputs]):
            return several
        self.imported.nodes.append(node)
        if not isinstance(made, tuple):
            return [node.value]
        return [self.part(node, k) if name in self.read else None for k, name in enumerate(n.output)]

    def part(self, node: Node, k: int) -> Any:
        """One of several outputs."""
        assert self.built is not None
        one = Node(self.numbered(), GETITEM, node.path, node.type, [node.value, k], {}, False)
        x = self.built.add(one)
        if isinstance(x, np.ndarray):
            return x
        self.imported.nodes.append(one)
        return one.value

    def filled(self, x: Any) -> Any:
        """A constant of the batch's size as a variable."""
        value = self.built.values[x] if isinstance(x, Value) else None  # type: ignore[union-attr]
        if not isinstance(value, Filled) or 0 in value.shape:
            return x
        if x not in self.whole:
            node = Node(self.numbered(), "filled", "", self.type, [x], {}, False)
            self.built.add(node)  # type: ignore[union-attr]
            self.imported.nodes.append(node)
            self.whole[x] = node.value
        return self.whole[x]

    def is_frozen(self, n: NodeProto) -> bool:
        """Whether a batch normalization has parameters of which none trains."""
        own = [name for name in n.input[1:3] if name in self.weights and self.built is not None]
        return n.op_type == "BatchNormalization" and bool(own) and not any(map(self.trainable, own))

    # ------------------------------------------------------------ graphs inside
    def _if(self, n: NodeProto, names: Names) -> None:
        condition = self.decided(n, self.value(n, 0, n.input[0], names), "condition")
        self.inside(n, _graph(n, "then_branch" if condition else "else_branch"), {}, names, n.output)

    def _loop(self, n: NodeProto, names: Names) -> None:
        most, on, *state = [self.value(n, k, name, names) for k, name in enumerate(n.input)]
        most = None if most is None else int(self.decided(n, most, "number of rounds"))
        on, body = on is None or self.decided(n, on, "condition"), _graph(n, "body")
        given, ends = [x.name for x in body.input], [x.name for x in body.output]
        parts: list[list[Any]] = [[] for _ in ends[1 + len(state) :]]
        k = 0
        while on and (most is None or k < most):
            inner = {given[0]: np.array(k), given[1]: np.array(True), **dict(zip(given[2:], state))}
            on, *found = self.inside(n, body, inner, names)
            on = self.decided(n, on, "condition")
            state = found[: len(state)]
            for part, x in zip(parts, found[len(state) :]):
                part.append(x)
            k += 1
        self.together(n, names, state, parts)

    def _scan(self, n: NodeProto, names: Names) -> None:
        options, body = _attributes(n), _graph(n, "body")
        count = options["num_scan_inputs"]
        args = [self.value(n, k, name, names) for k, name in enumerate(n.input)]
        state, data = args[: len(args) - count], args[len(args) - count :]
        given, backward = [x.name for x in body.input], options.get("scan_input_directions") or [0] * count
        axes = options.get("scan_input_axes") or [0] * count
        parts: list[list[Any]] = [[] for _ in body.output[len(state) :]]
        steps = self.steps(n, data[0], axes[0])
        for k in range(steps):
            slices = [self.taken(x, steps - 1 - k if back else k, axis) for x, axis, back in zip(data, axes, backward)]
            found = self.inside(n, body, dict(zip(given, [*state, *slices])), names)
            state = found[: len(state)]
            for part, x in zip(parts, found[len(state) :]):
                part.append(x)
        turned = options.get("scan_output_directions") or [0] * len(parts)
        parts = [part[::-1] if back else part for part, back in zip(parts, turned)]
        self.together(n, names, state, parts, options.get("scan_output_axes"))

    def inside(
        self, n: NodeProto, graph: GraphProto, given: Mapping[str, Any], names: Names, ends: Sequence[str] = ()
    ) -> list[Any]:
        """The outputs of a graph in an attribute, under other names if there are any."""
        own: Names = {**{t.name: self.file.array(t) for t in graph.initializer}, **given}
        whole = ChainMap(own, names)  # type: ignore[arg-type]
        self.nodes(graph, whole)
        results = [self.value(n, -1, x.name, whole) for x in graph.output]
        names.update(zip(ends, results))
        return results

    def together(
        self, n: NodeProto, names: Names, state: Sequence[Any], parts: Sequence[Sequence[Any]], axes: Any = None
    ) -> None:
        """The outputs of a loop: the last state, and what each round gives, side by side."""
        joined = []
        for k, part in enumerate(parts):
            axis = axes[k] if axes else 0
            if not part:
                raise UnsupportedOperator(
                    f"load_onnx: {n.op_type} {n.name!r} has no rounds, and gives {n.output[len(state) + k]!r}"
                )
            whole = [self.made("Unsqueeze", [x, np.array([axis])]) for x in part]
            joined.append(self.made("Concat", whole, axis=axis) if len(whole) > 1 else whole[0])
        names.update(zip(n.output, [*state, *joined]))

    def taken(self, x: Any, k: int, axis: int) -> Any:
        return self.made("Gather", [x, np.array(k)], axis=axis)

    def made(self, op: str, args: Sequence[Any], **options: Any) -> Any:
        """The output of an operator that the file does not have."""
        names: Names = {f"in{k}": x for k, x in enumerate(args)}
        self.read.add("out")
        self.node(helper.make_node(op, [*names], ["out"], **options), names)
        return names["out"]

    def steps(self, n: NodeProto, x: Any, axis: int) -> int:
        shape = x.shape if isinstance(x, np.ndarray) else self.built.values[x].shape  # type: ignore[union-attr]
        size = shape[axis]
        if not isinstance(size, int) and not size.constant:
            raise UnsupportedOperator(
                f"load_onnx: {n.op_type} {n.name!r} goes over the batch: its rounds cannot be written out"
            )
        return int(size)

    def decided(self, n: NodeProto, x: Any, what: str) -> Any:
        if not isinstance(x, np.ndarray) or x.dtype == object:
            raise UnsupportedOperator(
                f"load_onnx: {n.op_type} {n.name or n.output[0]!r}: its {what} depends on data: it must be known when the file is read"
            )
        return x.reshape(-1)[0]


def _is_weight(n: NodeProto, slot: int, x: np.ndarray) -> bool:
    if x.size > 1 and (x == x.flat[0]).all():
        return False  # a scale of ones, a shift of zeros: of a layer that has none
    return slot in WEIGHTS.get(n.op_type, ()) and (n.op_type != "MatMul" or x.ndim > 1)


def _weights_in_constants(graph: GraphProto) -> list[str]:
    """The names of Constant nodes that are read as weights."""
    arrays = {
        n.output[0]: a
        for n in graph.node
        if n.op_type == "Constant"
        for a in _attributes(n).values()
        if isinstance(a, np.ndarray)
    }
    read = ((name, n, k) for n in graph.node for k, name in enumerate(n.input) if name in arrays)
    return [*dict.fromkeys(name for name, n, k in read if arrays[name].ndim and _is_weight(n, k, arrays[name]))]


def _graph(n: NodeProto, name: str) -> GraphProto:
    return next(a.g for a in n.attribute if a.name == name)


def _ends(graph: GraphProto) -> set[str]:
    """The names of the outputs of all graphs inside."""
    found: set[str] = set()
    for n in nodes_of(graph):
        for a in n.attribute:
            for g in (a.g, *a.graphs):
                found |= {x.name for x in g.output}
    return found


def _attributes(n: NodeProto) -> dict[str, Any]:
    graphs = (AttributeProto.GRAPH, AttributeProto.GRAPHS)
    return {a.name: _plain(a) for a in n.attribute if a.type not in graphs}


def _plain(a: AttributeProto) -> Any:
    from onnx import numpy_helper

    x = helper.get_attribute_value(a)
    if a.type == AttributeProto.TENSOR:
        return numpy_helper.to_array(x)
    if isinstance(x, bytes):
        return x.decode()
    return (
        [y.decode() if isinstance(y, bytes) else y for y in x]
        if hasattr(x, "__len__") and not isinstance(x, str)
        else x
    )


def _path(n: NodeProto) -> str:
    """The module that a node is of, as PyTorch's exporters say."""
    scopes = next((p.value for p in n.metadata_props if p.key == "pkg.torch.onnx.name_scopes"), None)
    if scopes is not None:
        listed = [part.strip(" '\"") for part in scopes.strip("[]").split(",")]
        return listed[-2] if len(listed) > 1 else ""
    path: list[str] = []
    for part in n.name.split("/")[1:-1]:
        if path and part.startswith(f"{path[-1]}."):  # a sequence of modules, and one of them
            path.pop()
        path.append(part)
    return ".".join(path)


def _chosen(trainable: Any, known: Sequence[str]) -> Any:
    """Whether a weight of a name trains: "named" if the user names it."""
    if isinstance(trainable, (bool, np.bool_)):
        return lambda name: bool(trainable)
    names = [*checks.items("load_onnx: trainable", trainable, "True, False, or names of weights")]
    for given in names:
        checks.one_of("load_onnx: trainable", given, str, "a text, such as 'fc.weight', or 'fc.' for all that begin so")
        if given not in known and not (given.endswith(PARTS) and any(name.startswith(given) for name in known)):
            raise CalcError(
                f"load_onnx: trainable: no weight is called {given!r}{meant(given, known)}; there are {', '.join(known[:20])}"
            )
    return lambda name: "named" if name in names else any(name.startswith(n) for n in names if n.endswith(PARTS))

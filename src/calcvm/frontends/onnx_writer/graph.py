"""A path of a graph as a graph of ONNX."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from calcvm.errors import CalcError, MissingExtra, UnsupportedOperator
from calcvm.frontends.building import Cannot
from calcvm.frontends.onnx_writer.declared import WRITERS, Nodes, Tensor
from calcvm.graph import Operation, Path, Variable, same_order
from calcvm.ops import OPS
from calcvm.ops.dims import Affine
from calcvm.ops.layouts import back
from calcvm.ops.types import dtype_of

if TYPE_CHECKING:
    import onnx

IR_VERSION = 10
BATCH = "batch"
MOST = 2**31 - 2**24  # bytes of weights: protobuf reads no more than 2 GiB
Names = Mapping[str, Mapping[str, Any]]


def written(path: Path, weights: Mapping[str, np.ndarray], names: Names, dtype: str) -> onnx.ModelProto:
    """A path's outputs, of its inputs, with the weights.

    names : names and forms of parameters and buffers in state dicts.

    Raises
    ------
    MissingExtra : onnx is not installed.
    UnsupportedOperator : operators have no counterpart.
    CalcError : the path has no output.
    """
    try:
        import onnx  # noqa: F401
    except ImportError as error:
        raise MissingExtra("onnx", "onnx", "to_onnx") from error
    return _Writer(path, weights, names, dtype).model()


def needed(results: Iterable[Variable]) -> list[Operation]:
    """The operators behind results, each after those that it reads."""
    found: dict[Operation, None] = {}
    waiting: list[tuple[Operation, bool]] = [(v.producer, False) for v in results if v.producer is not None][::-1]
    while waiting:
        op, read = waiting.pop()
        if read:
            found[op] = None
        elif op not in found:
            behind = (v.producer for v in reversed([*op.inputs.values()]))
            waiting += [(op, True), *((p, False) for p in behind if p is not None and p not in found)]
    return [*found]


class _Writer:
    def __init__(self, path: Path, weights: Mapping[str, np.ndarray], names: Names, dtype: str):
        self.path, self.weights, self.names, self.dtype = path, weights, names, dtype
        self.carried = {f"{state.name}.next": new for state, new in path.carries.items()}
        self.results = [*path.outputs, *self.carried.values()]
        if not path.outputs:
            raise CalcError(f"to_onnx: path {path.name!r} has no output: set path.output")
        self.operations = needed(self.results)
        read = dict.fromkeys(v for op in self.operations for v in op.inputs.values()) | dict.fromkeys(self.results)
        norms = [op for op in self.operations if op.spec.name.startswith("batch_norm")]
        self.running = {v for op in norms for v in op.inputs.values()}  # statistics that have a place in the file
        self.sources = [v for v in path.graph.variables.values() if v in read and v.kind != "result"]
        self.ends = {v.name for v in self.sources if v.kind in ("placeholder", "carry")}  # names of inputs and outputs
        self.n = Nodes(
            dtype, self.ends.union(self.carried, (v.name for op in self.operations for v in op.outputs.values()))
        )

    # ------------------------------------------------------------ parts
    def model(self) -> onnx.ModelProto:
        from onnx import checker, helper, numpy_helper

        inputs = [self.source(v) for v in self.sources]
        self.write_operators()
        names = [v.name for v in self.path.outputs] + [*self.carried]
        outputs = [self.output(name, v) for name, v in zip(names, self.results)]
        nodes = _read(self.n.constants + self.n.nodes, [o.name for o in outputs])
        used = {name for node in nodes for name in node.input}
        arrays = {name: array for name, array in self.n.stored.items() if name in used}
        if (size := sum(array.nbytes for array in arrays.values())) > MOST:
            raise CalcError(f"to_onnx: the weights have {size:,} bytes, and a file of ONNX holds {MOST:,}")
        stored = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
        of = f"path {self.path.name!r} of a network of calcvm"
        graph = helper.make_graph(nodes, self.path.name, [x for x in inputs if x is not None], outputs, stored, of)
        opset = [helper.make_opsetid("", self.n.opset)]
        model = helper.make_model(graph, ir_version=IR_VERSION, producer_name="calcvm", opset_imports=opset)
        checker.check_model(model, full_check=True)
        return model

    def source(self, v: Variable) -> onnx.ValueInfoProto | None:
        """An input, or None for what is stored."""
        if v.kind == "constant":
            array = np.asarray(v.init).astype(dtype_of(v.type, self.dtype))
            self.n.tensors[v] = Tensor.of(self.n.fixed(v.name, array), v, array)
        elif v.kind in ("parameter", "buffer"):
            self.n.tensors[v] = self.weight(v)
        elif v.kind in ("placeholder", "carry"):
            return self.input(v)
        return None

    def input(self, v: Variable) -> onnx.ValueInfoProto:
        """As data are given; operators see channels first."""
        name = v.name
        if v.laid != v.shape or not same_order(v.shape, v.layout, ""):
            name = self.made(f"{name}.as_seen", "Transpose", [v.name], perm=[*back(v.layout, v.rank)])
        self.n.tensors[v] = Tensor.of(name, v)
        return self.info(v.name, v, v.laid)

    def weight(self, v: Variable) -> Tensor:
        """A parameter or buffer; its form in a state dict is that in the file."""
        facts = self.names.get(v.name, {"names": {v.name: v.name}})
        value, form = np.asarray(self.weights[v.name]), facts.get("form")
        if v.kind == "buffer" and v not in self.running:  # it would be read as a weight that trains
            return Tensor.of(self.n.fixed(facts["names"][v.name], value), v, value)
        there = value.T if form == "turned" else value.reshape(value.shape[:1]) if form == "flat" else value
        stored = self.n.store(facts["names"][v.name], there)
        if there.shape == value.shape and (form != "turned" or value.ndim < 2):
            return Tensor.of(stored, v, value)
        if form == "turned":
            name = self.made(f"{stored}.turned", "Transpose", [stored])
        else:
            name = self.made(f"{stored}.shaped", "Reshape", [stored, self.n.constant([*value.shape])])
        tensor = Tensor.of(name, v, value)
        tensor.turned = stored if form == "turned" else None
        return tensor

    def made(self, stem: str, kind: str, inputs: Sequence[str], **attrs: Any) -> str:
        """The result of a node that is written where something reads it, before all others."""
        from onnx import helper

        name = self.n.unique(stem)
        self.n.nodes.append(helper.make_node(kind, inputs, [name], name, **attrs))
        return name

    # ------------------------------------------------------------ operators
    def write_operators(self) -> None:
        missing, lost = list[str](), set[Variable]()
        for op in self.operations:
            why = "" if op.spec.name in WRITERS and OPS.get(op.spec.name) is op.spec else "no operator of ONNX"
            if not why and not lost.isdisjoint(op.inputs.values()):
                lost.update(op.outputs.values())
                continue
            try:
                if not why:
                    self.operator(op)
            except Cannot as error:
                why = str(error)
            if why:
                missing.append(f"{op.spec.stem!r} of {op.layer.rstrip('.') or op.name} ({why})")
                lost.update(op.outputs.values())
        if missing:
            raise UnsupportedOperator(f"to_onnx: path {self.path.name!r} cannot be written: {'; '.join(missing)}")

    def operator(self, op: Operation) -> None:
        """The nodes of an operator; what they make for a variable has its name."""
        n, n.op = self.n, op
        if op.is_copy:
            n.tensors[op.outputs["y"]] = n.tensors[op.inputs["x"]]
            return
        begin = len(n.nodes)
        given = [n.tensors[op.inputs[slot]] if slot in op.inputs else None for slot in op.spec.inputs]
        made = WRITERS[op.spec.name](n, *given, **op.attrs_as_seen)
        nodes = n.nodes[begin:]
        for v, name in zip(op.outputs.values(), [made] if isinstance(made, str) else made):
            if any(name in node.output for node in nodes):
                _rename(nodes, name, v.name)
                name = v.name
            n.tensors[v] = Tensor.of(name, v)

    def output(self, name: str, v: Variable) -> onnx.ValueInfoProto:
        """An output by its name; by another one, if that is taken."""
        from onnx import helper

        if name in self.ends or name in self.n.stored:
            name = self.n.unique(name)
        if (found := self.n.tensors[v]) != name:
            self.n.nodes.append(helper.make_node("Identity", [found], [name], self.n.unique(f"{name}/Identity")))
        self.ends.add(name)
        return self.info(name, v, v.shape)

    def info(self, name: str, v: Variable, shape: Iterable[Affine]) -> onnx.ValueInfoProto:
        from onnx import helper

        sizes = [n.b if n.constant else str(n).replace("B", BATCH) for n in shape]
        return helper.make_tensor_value_info(name, self.n.type_of(v.type), sizes)


def _rename(nodes: Iterable[onnx.NodeProto], old: str, new: str) -> None:
    for node in nodes:
        for side in (node.input, node.output):
            for k, name in enumerate(side):
                if name == old:
                    side[k] = new


def _read(nodes: Sequence[onnx.NodeProto], names: Iterable[str]) -> list[onnx.NodeProto]:
    """The nodes that results need."""
    wanted, found = {*names}, list[Any]()
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.output):
            wanted.update(node.input)
            found.append(node)
    return found[::-1]

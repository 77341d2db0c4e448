"""ONNX's backend interface, by which `onnx.backend.test` runs its cases: `Backend`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from unittest import SkipTest

import numpy as np

from calcvm.errors import CalcError, MissingExtra, UnsupportedOperator

try:
    import onnx
    import onnx.shape_inference
    from onnx.backend.base import Backend as _Backend
    from onnx.backend.base import BackendRep
except ImportError as _error:
    raise MissingExtra("onnx", "onnx", "calcvm.onnx") from _error

from calcvm.frontends.imported import Value
from calcvm.frontends.onnx_model import OnnxModel
from calcvm.frontends.onnx_reader import File, imported, looked_at
from calcvm.model import Model


class _Compiled(NamedTuple):
    """names : of the inputs that are data.  model : None if all is known.  known : outputs, None for those that are computed."""

    names: list[str]
    model: Model | None
    known: list[Any]


class Prepared(BackendRep):
    """A file that is compiled at the first call, for the shapes of the inputs, and for the numbers of those that give shapes."""

    def __init__(self, model: onnx.ModelProto):
        self._file = File(model)
        graph = self._file.model.graph
        self._names = [x.name for x in graph.input]
        self._known = looked_at(graph)
        self._types = [onnx.helper.tensor_dtype_to_np_dtype(x.type.tensor_type.elem_type) for x in graph.output]
        self._compiled: dict[Any, _Compiled] = {}

    def run(self, inputs: Any, **kwargs: Any) -> tuple[np.ndarray, ...]:
        """The outputs.

        inputs : arrays in the order of the file's inputs, or by name.
        """
        if not isinstance(inputs, Mapping):
            inputs = inputs if isinstance(inputs, (list, tuple)) else [inputs]
            if len(inputs) != len(self._names):
                raise CalcError(f"run: {len(inputs)} arrays for the inputs {', '.join(self._names)}")
            inputs = dict(zip(self._names, inputs))
        given = {name: np.asarray(inputs[name]) for name in self._names}
        values = {name: x for name, x in given.items() if name in self._known}
        key = tuple((name, x.shape, x.tobytes() if name in values else None) for name, x in given.items())
        compiled = self._compiled.get(key) or self._compiled.setdefault(key, self._compile(given, values))
        found = {} if compiled.model is None else compiled.model.run({name: given[name] for name in compiled.names})
        computed = iter(found.values())
        results = [next(computed) if x is None else x for x in compiled.known]
        return tuple([np.asarray(x).astype(kind, copy=False) for x, kind in zip(results, self._types)])

    def _compile(self, given: Mapping[str, np.ndarray], values: Mapping[str, np.ndarray]) -> _Compiled:
        shapes = {name: x.shape for name, x in given.items()}
        network = imported(self._file, shapes, values, [None] * len(given), True, as_written=True)
        known = [None if isinstance(x, Value) else x for x in network.results]
        names = [name for name, _, _ in network.inputs]
        if all(x is not None for x in known):
            return _Compiled([], None, known)
        computed = [k for k, x in enumerate(known) if x is None]
        for facts in (network.results, network.outputs):
            facts[:] = [facts[k] for k in computed]  # type: ignore[index]
        wide = any(x.dtype in (np.float64, np.int64, np.int32) for x in given.values())
        graph = OnnxModel(network).graph()
        used = {v for path in graph.paths.values() for op in path.operations for v in op.inputs.values()}
        read = [name for name in names if graph.variables[name] in used]
        return _Compiled(read, Model(graph, batch_size=1, dtype="float64" if wide else "float32", workers=1), known)


class Backend(_Backend):
    """calcvm as a backend of ONNX, on the CPU.

    Examples
    --------
    >>> from calcvm.onnx import Backend
    >>> from onnx import parser
    >>> text = '<ir_version: 10, opset_import: ["" : 22]> net (float[N, 3] x) => (float[N, 3] y) {y = Tanh(x)}'
    >>> Backend.prepare(parser.parse_model(text)).run([np.zeros((2, 3), "float32")])
    (array([[0., 0., 0.],
           [0., 0., 0.]], dtype=float32),)
    """

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> Prepared:
        """A file to run (SkipTest: an operator has no counterpart; CalcError: another device)."""
        if not cls.supports_device(device):
            raise CalcError(f"prepare: device {device!r}: the backend runs on the CPU")
        try:
            return Prepared(model)
        except UnsupportedOperator as error:
            raise SkipTest(str(error)) from error

    @classmethod
    def run_node(
        cls, node: onnx.NodeProto, inputs: Any, device: str = "CPU", outputs_info: Any = None, **kwargs: Any
    ) -> tuple[np.ndarray, ...]:
        """The outputs of one node of the newest opset, on arrays in the order of its inputs."""
        names = [name for name in node.input if name]
        arrays = [np.asarray(x) for x in (inputs.values() if isinstance(inputs, Mapping) else inputs)]
        if len(arrays) != len(names):
            raise CalcError(f"run_node: {len(arrays)} arrays for the inputs {', '.join(names)}")
        types = [onnx.helper.np_dtype_to_tensor_dtype(x.dtype) for x in arrays]
        given = [onnx.helper.make_tensor_value_info(n, kind, x.shape) for n, kind, x in zip(names, types, arrays)]
        ends = [onnx.ValueInfoProto(name=name) for name in node.output if name]
        model = onnx.shape_inference.infer_shapes(
            onnx.helper.make_model(onnx.helper.make_graph([node], "node", given, ends))
        )
        return cls.prepare(model, device).run(arrays)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device == "CPU"

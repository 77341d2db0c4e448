"""A file of ONNX: opened, checked, in the newest opset, functions inlined, its large arrays apart."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import onnx.version_converter
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper
from onnx.defs import onnx_opset_version

from calcvm import checks
from calcvm.errors import CalcError, FileError, NoSuchFile, UnsupportedOperator
from calcvm.frontends.onnx import counterpart

OPSET = 28  # whose meaning the functions have
WRITTEN_OUT = ("If", "Loop", "Scan")  # by the reader
KNOWN_ALONE = (  # on known numbers alone
    "Constant", "ConstantOfShape", "Range", "EyeLike", "HannWindow", "HammingWindow", "BlackmanWindow", "MelWeightMatrix",
)  # fmt: skip
DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training")
LARGE = 256  # elements; conversion looks at the numbers of smaller ones


class File:
    """model : without its large arrays.  arrays : these, by name.  folder : of arrays in other files."""

    def __init__(self, source: Any):
        self.name = "model"
        self.folder: Path | None = None
        model = self._opened(source)
        self.arrays: dict[str, np.ndarray] = {}
        self._apart(model.graph)
        self.model = _prepared(model)
        inputs = [x for x in self.model.graph.input if x.name not in self.arrays]
        del self.model.graph.input[:]
        self.model.graph.input.extend(inputs)

    def _opened(self, source: Any) -> ModelProto:
        if isinstance(source, ModelProto):
            model = ModelProto()
            model.CopyFrom(source)
            return model
        if isinstance(source, (str, os.PathLike)):
            path = Path(source)
            self.name, self.folder = path.stem, path.resolve().parent
            try:
                source = path.read_bytes()
            except FileNotFoundError as error:
                raise NoSuchFile(f"load_onnx: there is no file {str(path)!r}") from error
            except OSError as error:
                raise FileError(f"load_onnx: {str(path)!r} cannot be read: {error.strerror or error}") from error
        elif hasattr(source, "read"):
            source = source.read()
        checks.one_of("load_onnx", source, (bytes, bytearray, memoryview), "a path, bytes, or an onnx.ModelProto")
        model = ModelProto()
        try:
            model.ParseFromString(bytes(source))
        except Exception as error:  # of several classes, by the version of protobuf
            raise CalcError(f"load_onnx: {self.name} is no ONNX file, or a part of one: {error}") from error
        if not model.graph.output:
            raise CalcError(f"load_onnx: {self.name} has no outputs: it is no ONNX file, or a part of one")
        return model

    # ------------------------------------------------------------ arrays
    def _apart(self, graph: GraphProto, outermost: bool = True) -> None:
        """Take large initializers out of the model: conversion would copy them."""
        for t in [*graph.initializer]:
            array = self.array(t)
            if outermost and array.size > LARGE:
                if t.name in self.arrays:
                    raise CalcError(f"load_onnx: {self.name} has two initializers {t.name!r}")
                self.arrays[t.name] = array
                graph.initializer.remove(t)
                given = [x for x in graph.input if x.name == t.name]
                if not given:
                    graph.input.append(onnx.helper.make_tensor_value_info(t.name, t.data_type, t.dims))
            elif t.data_location == TensorProto.EXTERNAL:
                t.CopyFrom(numpy_helper.from_array(array, t.name))
        for node in graph.node:
            for a in node.attribute:
                if a.type == AttributeProto.GRAPH:
                    self._apart(a.g, False)

    def array(self, t: TensorProto) -> np.ndarray:
        """A tensor's numbers, of which the file must have as many as its shape says."""
        try:
            if t.data_location != TensorProto.EXTERNAL:
                return numpy_helper.to_array(t)
            dtype = onnx.helper.tensor_dtype_to_np_dtype(t.data_type)
            count = int(np.prod(t.dims, dtype=object))
            return np.frombuffer(self._outside(t, count * dtype.itemsize), dtype).reshape(tuple(t.dims))
        except CalcError:
            raise
        except (ValueError, TypeError, KeyError, OverflowError, MemoryError) as error:
            raise CalcError(f"load_onnx: the numbers of {t.name!r} are damaged: {error}") from error

    def _outside(self, t: TensorProto, size: int) -> bytes:
        """Bytes of a tensor in another file, which lies in the model's folder."""
        facts = {entry.key: entry.value for entry in t.external_data}
        what = f"load_onnx: the numbers of {t.name!r}"
        if self.folder is None:
            raise CalcError(f"{what} are in another file, {facts.get('location')!r}: give the model's path")
        path = (self.folder / facts.get("location", "")).resolve()
        if not path.is_relative_to(self.folder) or path == self.folder:
            raise CalcError(f"{what} are in {facts.get('location')!r}, which is outside the model's folder: refused")
        start, length = int(facts.get("offset", 0)), int(facts.get("length", size))
        if length != size or start < 0:
            raise CalcError(f"{what} are {length} bytes from byte {start} on, and {size} are wanted")
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < start + size:
                    raise CalcError(f"{what}: {path.name!r} ends before them")
                file.seek(start)
                return file.read(size)
        except OSError as error:
            raise FileError(f"{what}: {path.name!r} cannot be read: {error.strerror or error}") from error


# ---------------------------------------------------------------- the newest opset
def _prepared(model: ModelProto) -> ModelProto:
    """The model checked, in our opset, without functions that have no row of ours."""
    newest = min(OPSET, onnx_opset_version())
    versions = {o.domain: o.version for o in model.opset_import}
    if versions.get("ai.onnx", versions.get("", 0)) > newest:
        raise CalcError(f"load_onnx: the file is of opset {max(versions.values())}, and {newest} is the newest known")
    model.ir_version = max(model.ir_version, 4)  # where initializers are no inputs
    known = {t.name for t in model.graph.initializer}
    inputs = [x for x in model.graph.input if x.name not in known]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    if model.functions:
        model = _tried("its functions cannot be inlined", onnx.inliner.inline_local_functions, model)
    _tried("it is not valid", onnx.checker.check_model, model, unknown=True)
    version = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), newest)
    if version < 9 and any(n.op_type == "Scan" for n in nodes_of(model.graph)):
        raise UnsupportedOperator(
            "load_onnx: Scan of opset 8 goes over a batch, and is not read: export the model with a newer opset"
        )
    if version < 13:
        _flatten_hardmax(model.graph)
    old = {n.output[0] for n in nodes_of(model.graph) if version < 11 and n.op_type in ("Resize", "Upsample")}
    if version != newest and not _unknown(model.graph, version):
        model = _tried(
            f"it cannot be converted from opset {version} to {newest}, write it with a newer opset", onnx.version_converter.convert_version, model, newest
        )  # fmt: skip
    for n in nodes_of(model.graph):
        if n.output and n.output[0] in old:  # conversion leaves it to the defaults of later opsets
            _set(n, coordinate_transformation_mode="asymmetric", nearest_mode="floor")
    _rename(model.graph)
    bodies = {(n.domain, n.op_type) for n in nodes_of(model.graph) if not is_known(n) and _has_body(n)}
    if bodies:
        model = onnx.inliner.inline_selected_functions(model, [*bodies], exclude=False, inline_schema_functions=True)
    missing: dict[str, list[str]] = {}
    for n in nodes_of(model.graph):
        if not is_known(n):
            missing.setdefault(f"{n.domain}.{n.op_type}".removeprefix("ai.onnx.").lstrip("."), []).append(
                n.name or next(iter(n.output), "")
            )
    if missing:
        told = "; ".join(f"{op} ({', '.join(names[:8])}{', ...' * (len(names) > 8)})" for op, names in missing.items())
        raise UnsupportedOperator(
            f"load_onnx: no counterpart of {told}: export the model without them, or give them as functions of the file, whose bodies are read"
        )
    return model


def _set(n: NodeProto, **attributes: Any) -> None:
    kept = [a for a in n.attribute if a.name not in attributes]
    del n.attribute[:]
    n.attribute.extend([*kept, *(onnx.helper.make_attribute(name, value) for name, value in attributes.items())])


def _flatten_hardmax(graph: GraphProto) -> None:
    """Write Hardmax of opset 12, which goes over all axes from one on, by nodes of any opset: conversion leaves it as it is."""
    nodes: list[NodeProto] = []
    for n in graph.node:
        if n.op_type != "Hardmax":
            nodes.append(n)
            continue
        axis = next((a.i for a in n.attribute if a.name == "axis"), 1)
        shape, flat, hard = (f"{n.output[0]}.{part}" for part in ("shape", "flat", "hard"))
        nodes += [
            onnx.helper.make_node("Shape", [n.input[0]], [shape]),
            onnx.helper.make_node("Flatten", [n.input[0]], [flat], axis=axis),
            onnx.helper.make_node("Hardmax", [flat], [hard], axis=1),
            onnx.helper.make_node("Reshape", [hard, shape], [*n.output], n.name),
        ]
    del graph.node[:]
    graph.node.extend(nodes)


def _rename(graph: GraphProto) -> None:
    """Let all read what an Identity reads: exporters write equal weights once."""
    kept = {x.name for x in graph.output} | {name for n in graph.node for m in _inside(n) for name in m.input}
    names: dict[str, str] = {}
    for n in [*graph.node]:
        for k, name in enumerate(n.input):
            n.input[k] = names.get(name, name)
        if n.op_type == "Identity" and n.domain in DOMAINS and len(n.input) == 1 and n.output[0] not in kept:
            names[n.output[0]] = n.input[0]
            graph.node.remove(n)


def _inside(n: NodeProto) -> Iterator[NodeProto]:
    for a in n.attribute:
        for g in (a.g, *a.graphs):
            yield from nodes_of(g)


def _tried(what: str, f: Any, *args: Any, unknown: bool = False) -> Any:
    try:
        return f(*args)
    except Exception as error:  # whatever onnx raises
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        if unknown and any("No Op registered" in line or "No opset import" in line for line in lines):
            return None  # told with all others below
        raise CalcError(f"load_onnx: {what}: {' '.join(lines[:2])[:400]}") from error


def nodes_of(graph: GraphProto) -> Iterator[NodeProto]:
    """The nodes of a graph, and of the graphs in its attributes."""
    for n in graph.node:
        yield n
        yield from _inside(n)


def is_known(n: NodeProto) -> bool:
    if n.op_type in WRITTEN_OUT:
        return n.domain in DOMAINS
    inner = any(a.type == AttributeProto.GRAPH for a in n.attribute)  # which functions do not see
    return n.domain in DOMAINS and not inner and (counterpart(n.op_type) is not None or n.op_type in KNOWN_ALONE)


def _unknown(graph: GraphProto, version: int) -> bool:
    """Whether operators are in no opset, so that conversion would fail."""
    return any(n.domain not in DOMAINS or not (n.domain or onnx.defs.has(n.op_type)) for n in nodes_of(graph))


def _has_body(n: NodeProto) -> bool:
    """Whether an operator is a function of others."""
    if n.domain not in DOMAINS or not onnx.defs.has(n.op_type, n.domain):
        return False
    schema = onnx.defs.get_schema(n.op_type, n.domain)
    return bool(schema.has_function or schema.has_context_dependent_function)

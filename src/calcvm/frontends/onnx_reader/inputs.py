"""The inputs of a file: names, types, shapes, the batch, and those whose numbers must be known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from onnx import GraphProto, ValueInfoProto, helper

from calcvm import checks
from calcvm.errors import CalcError, UnsupportedOperator
from calcvm.frontends.building import FLOATS
from calcvm.hints import meant
from calcvm.ops.types import BYTES

# the inputs of operators whose numbers are looked at when a file is read: shapes, axes, repeats, scales
VALUES = {
    "AffineGrid": (1,), "CenterCropPad": (1,), "Col2Im": (1, 2), "Compress": (1,), "ConstantOfShape": (0,), "CumProd": (1,), "CumSum": (1,),
    "DFT": (1, 2), "Dropout": (1, 2), "Expand": (1,), "If": (0,), "Loop": (0, 1), "MaxUnpool": (2,), "OneHot": (1,), "Pad": (1, 2, 3),
    "Range": (0, 1, 2), "Reshape": (1,), "Resize": (1, 2, 3), "STFT": (1, 3), "Slice": (1, 2, 3, 4), "Split": (1,), "Squeeze": (1,),
    "Tile": (1,), "TopK": (1,), "Trilu": (1,), "Unsqueeze": (1,), "Upsample": (1,), "BlackmanWindow": (0,), "HammingWindow": (0,),
    "HannWindow": (0,), "MelWeightMatrix": (0, 1, 2, 3, 4),
    **{f"Reduce{name}": (1,) for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")},
}  # fmt: skip
OF_SHAPES = ("Shape", "Size")  # whose results do not depend on numbers
WANTED = "sizes={'input': (None, 3, 224, 224)}, None for the batch"


class Input(NamedTuple):
    """name, NumPy's name of its type, sizes (None: the batch), the batch's axis."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    axis: int | None


def looked_at(graph: GraphProto, kept: Sequence[str] = ()) -> set[str]:
    """The names of values whose numbers must be known, and of those they are made of."""
    wanted: set[str] = {*kept}
    for node in [*graph.node][::-1]:
        made = any(name in wanted for name in node.output if name)
        if made and node.op_type not in OF_SHAPES:
            wanted.update(node.input)
        for a in node.attribute:
            for g in (a.g, *a.graphs):
                wanted |= looked_at(g, [x.name for x in g.output] if made else [])
        wanted.update(node.input[k] for k in VALUES.get(node.op_type, ()) if k < len(node.input))
    return wanted - {""}


def inputs_of(graph: GraphProto, given: Mapping[str, Any], axes: Any) -> list[Input]:
    """The inputs, with the sizes that the user gives by input or by symbol."""
    checks.one_of("load_onnx: sizes", given, Mapping, "a mapping of names of inputs, or of their sizes, to numbers")
    symbols = {d.dim_param for x in graph.input for d in x.type.tensor_type.shape.dim if d.dim_param}
    names = [x.name for x in graph.input]
    for name in given:
        if name not in symbols and name not in names:
            there = [*names, *sorted(symbols)]
            raise CalcError(
                f"load_onnx: sizes: no input or size is called {checks.shown(name)}{meant(name, there)}; there are {', '.join(there)}"
            )
    batch = _axes_of(graph, names, axes)
    found: list[Input] = []
    lacking: list[str] = []
    symbol = None
    for x, axis in zip(graph.input, batch):
        dtype, dims = _typed(x), _dims(x, given)
        if dims is None:
            raise CalcError(f"load_onnx: the input {x.name!r} has no shape: give it, {WANTED.replace('input', x.name)}")
        if axis == "guess":
            first = dims[0] if dims else 0
            if symbol is None and isinstance(first, str) and not any(i.axis is not None for i in found):
                symbol = first
            axis = next((k for k, n in enumerate(dims) if n is None), None)
            if axis is None and isinstance(first, str) and first in (symbol, ""):
                axis = 0
            if axis is None and symbol:
                axis = next((k for k, n in enumerate(dims) if n == symbol), None)
        elif axis is not None:
            axis = checks.integer("load_onnx: batch_axes", axis, 0, max(len(dims) - 1, 0))
        shape = tuple([None if k == axis else n for k, n in enumerate(dims)])
        lacking += [f"{n or 'axis ' + str(k)} of {x.name!r}" for k, n in enumerate(shape) if isinstance(n, str)]
        if shape.count(None) > 1:
            raise CalcError(f"load_onnx: the input {x.name!r} has the batch more than once: {shape}")
        found.append(Input(x.name, dtype, shape, axis))  # type: ignore[arg-type]
    if lacking:
        sizes: list[Any] = [n for x in found for n in x.shape]
        named = next((n for n in sizes if isinstance(n, str) and n), None)
        example = f"sizes={{{named!r}: 128}}" if named else WANTED
        raise CalcError(
            f"load_onnx: these sizes are open, and the batch's alone may be: {', '.join(dict.fromkeys(lacking))}: give them, {example}"
        )
    return found


def _axes_of(graph: GraphProto, names: Sequence[str], axes: Any) -> list[Any]:
    if axes is None:
        return ["guess"] * len(names)
    if isinstance(axes, Mapping):
        if unknown := [n for n in axes if n not in names]:
            raise CalcError(
                f"load_onnx: batch_axes: no input is called {checks.shown(unknown[0])}; there are {', '.join(names)}"
            )
        return [axes.get(n) for n in names]
    listed = [*checks.items("load_onnx: batch_axes", axes, "an axis, or None, for each input")]
    if len(listed) != len(names):
        raise CalcError(f"load_onnx: batch_axes has {len(listed)} axes for {len(names)} inputs, {', '.join(names)}")
    return listed


def _typed(x: ValueInfoProto) -> str:
    kind = x.type.WhichOneof("value")
    if kind != "tensor_type":
        raise UnsupportedOperator(
            f"load_onnx: the input {x.name!r} is a {kind or 'value without a type'}: tensors alone can be inputs"
        )
    try:
        name = str(np.dtype(helper.tensor_dtype_to_np_dtype(x.type.tensor_type.elem_type)))
    except (KeyError, TypeError, ValueError):
        name = str(x.type.tensor_type.elem_type)
    if name not in FLOATS and name not in BYTES:
        raise UnsupportedOperator(
            f"load_onnx: the input {x.name!r} is of type {name}: {', '.join(BYTES)} can be inputs"
        )
    return name


def _dims(x: ValueInfoProto, given: Mapping[str, Any]) -> list[Any] | None:
    """Numbers, None for the batch if the user says so, and texts: names of sizes that are open."""
    if x.name in given:
        what = f"load_onnx: sizes[{x.name!r}]"
        listed = checks.items(what, given[x.name], "sizes, None for the batch")
        sizes = [n if n is None else checks.integer(what, n, 0) for n in listed]
        if x.type.tensor_type.HasField("shape"):
            fixed = [d.dim_value if d.HasField("dim_value") else None for d in x.type.tensor_type.shape.dim]
            if len(fixed) != len(sizes) or any(None not in (n, m) and n != m for n, m in zip(sizes, fixed)):
                raise CalcError(
                    f"{what}: the file says {tuple(fixed)}, which {tuple(sizes)} does not fit".replace("None", "open")
                )
        return sizes
    if not x.type.tensor_type.HasField("shape"):
        return None
    dims: list[Any] = []
    for d in x.type.tensor_type.shape.dim:
        if d.HasField("dim_value"):
            dims.append(max(d.dim_value, 0))
        elif d.dim_param in given:
            n = given[d.dim_param]
            dims.append(None if n is None else checks.integer(f"load_onnx: sizes[{d.dim_param!r}]", n))
        else:
            dims.append(d.dim_param)
    return dims

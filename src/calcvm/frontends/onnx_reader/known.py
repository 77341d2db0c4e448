"""What is known when a file is read: nodes on numbers, computed by ONNX's reference; and on sizes that depend on the batch, here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
from onnx import NodeProto, helper
from onnx.defs import onnx_opset_version
from onnx.reference import ReferenceEvaluator

from calcvm.errors import CalcError
from calcvm.frontends.building import Cannot
from calcvm.frontends.onnx_reader.file import DOMAINS, OPSET
from calcvm.ops.dims import affine

MOST = 2**28  # elements of a result
FIXED = "give the batch a number, by the whole shape of each input, sizes={'x': (8, 3)}"


def computed(node: NodeProto, args: Sequence[Any], options: dict[str, Any]) -> tuple[Any, ...]:
    """A node's outputs on known arrays (CalcError: they do not fit)."""
    try:
        if any(x is not None and x.dtype == object for x in args):
            return (_of_sizes(node, args, options),)
        if node.op_type == "Range":
            args = [x.reshape(()) for x in args]
        _check_size(node.op_type, args)
        names = [f"x{k}" if x is not None else "" for k, x in enumerate(args)]
        alone = helper.make_node(node.op_type, names, [*node.output], domain=node.domain)
        alone.attribute.extend(node.attribute)
        given = [helper.make_value_info(n, helper.make_tensor_type_proto(0, None)) for n in names if n]
        ends = [helper.make_value_info(n, helper.make_tensor_type_proto(0, None)) for n in node.output if n]
        version = min(OPSET, onnx_opset_version())
        opsets = [
            helper.make_opsetid(d, version if d == "" else 5 if d.endswith("ml") else 1)
            for d in (*DOMAINS,)
            if d != "ai.onnx"
        ]
        model = helper.make_model(helper.make_graph([alone], "known", given, ends), opset_imports=opsets)
        with np.errstate(all="ignore"):
            found = iter(ReferenceEvaluator(model).run(None, {n: x for n, x in zip(names, args) if n}))
        return tuple([np.asarray(next(found)) if n else None for n in node.output])
    except CalcError:
        raise
    except Exception as error:  # whatever the reference raises
        told = (
            f"{error}, for every batch: {FIXED}"
            if isinstance(error, ArithmeticError)
            else f"{type(error).__name__}: {error}"
        )
        raise Cannot(told) from error


def _check_size(name: str, args: Sequence[Any]) -> None:
    """Raise Cannot if a shape, written as numbers, is of more elements than is reasonable."""
    slot = {"ConstantOfShape": 0, "Expand": 1, "Tile": 1, "Pad": 1}.get(name)
    if slot is not None and math.prod(max(abs(int(n)), 1) for n in args[slot].reshape(-1).tolist()) > MOST:
        raise Cannot(f"a result of more than {MOST} known numbers")
    if name == "Range" and abs(float(args[1] - args[0])) > MOST * abs(float(args[2] or 1)):
        raise Cannot(f"a result of more than {MOST} known numbers")


# ---------------------------------------------------------------- sizes
def sizes(values: Any) -> np.ndarray:
    """Integers and sizes as an array: int64 if none depends on the batch."""
    values = np.asarray(values, object)
    flat, shape = values.reshape(-1).tolist(), values.shape
    if all(affine(n).constant for n in flat):
        return np.array([affine(n).b for n in flat], np.int64).reshape(shape)
    made = np.empty(len(flat), object)
    made[:] = flat
    return made.reshape(shape)


def _order(a: Any, b: Any) -> int:
    """The sign of a - b, if it is the same for every batch."""
    difference = affine(a) - affine(b)
    least, grows = difference.at(1), difference.a
    if (grows >= 0 and least > 0) or (grows > 0 and least >= 0 and difference.at(2) > 0 and least > 0):
        return 1
    if grows <= 0 and least < 0:
        return -1
    if not grows:
        return 0
    raise Cannot(f"it compares {a} with {b}, which depends on the batch's size")


def _quotient(a: Any, b: Any) -> Any:
    if affine(a).constant and affine(b).constant:
        return int(affine(a).b / affine(b).b) if affine(b).b else 0
    return affine(a) // affine(b)


def _each(f: Callable[..., Any]) -> Callable[..., Any]:
    def of(*args: Any, **_: Any) -> Any:
        arrays = np.broadcast_arrays(*args)
        made = np.empty(arrays[0].shape, object)
        made.reshape(-1)[:] = [f(*numbers) for numbers in zip(*(a.reshape(-1).tolist() for a in arrays))]
        return made

    return of


def _compared(f: Callable[[int], bool]) -> Callable[..., Any]:
    return lambda a, b, **_: _each(lambda m, n: f(_order(m, n)))(a, b).astype(bool)


def _axes(x: np.ndarray, axes: Any) -> tuple[int, ...]:
    return tuple(range(x.ndim)) if axes is None else tuple(int(a) % max(x.ndim, 1) for a in np.reshape(axes, -1))


def _reduced(f: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def of(x: np.ndarray, axes: Any = None, *, keepdims: int = 1, **_: Any) -> Any:
        chosen = _axes(x, axes)
        rest = [k for k in range(x.ndim) if k not in chosen]
        moved = x.transpose(*rest, *chosen).reshape([x.shape[k] for k in rest] + [-1])
        made = np.empty(moved.shape[:-1], object)
        made.reshape(-1)[:] = [reduce(f, row) for row in moved.reshape(-1, moved.shape[-1]).tolist()]
        return made.reshape([1 if k in chosen else n for k, n in enumerate(x.shape)]) if keepdims else made

    return of


def _slice(x: np.ndarray, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
    axes = range(len(starts)) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    where = [slice(None)] * x.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps):
        end = None if step < 0 and end < -x.shape[axis] else int(end)
        where[int(axis)] = slice(int(start), end, int(step))
    return x[tuple(where)]


def _cast(x: np.ndarray, *, to: int, **_: Any) -> Any:
    kind = helper.tensor_dtype_to_np_dtype(to)
    if kind.kind not in "iu":
        raise Cannot(f"it computes in {kind} with the batch's size")
    return x


def _unsqueezed(x: np.ndarray, axes: Any) -> Any:
    rank = x.ndim + np.size(axes)
    return np.expand_dims(x, tuple(int(a) % rank for a in np.reshape(axes, -1)))


def _reshape(x: np.ndarray, shape: Any, *, allowzero: int = 0) -> Any:
    return x.reshape([x.shape[k] if n == 0 and not allowzero else int(n) for k, n in enumerate(shape)])


def _larger(a: Any, b: Any) -> Any:
    return a if _order(a, b) >= 0 else b


def _smaller(a: Any, b: Any) -> Any:
    return a if _order(a, b) <= 0 else b


OF_SIZES: dict[str, Callable[..., Any]] = {
    "Identity": lambda x: x,
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": _each(_quotient),
    "Neg": lambda x: -x,
    "Abs": _each(lambda n: n if _order(n, 0) >= 0 else -n),
    "Max": lambda *xs: reduce(_each(_larger), xs),
    "Min": lambda *xs: reduce(_each(_smaller), xs),
    "Equal": _compared(lambda sign: sign == 0),
    "Less": _compared(lambda sign: sign < 0),
    "Greater": _compared(lambda sign: sign > 0),
    "LessOrEqual": _compared(lambda sign: sign <= 0),
    "GreaterOrEqual": _compared(lambda sign: sign >= 0),
    "Where": _each(lambda c, a, b: a if c else b),
    "Cast": _cast,
    "Gather": lambda x, places, *, axis=0: np.take(x, np.asarray(places, int), axis),
    "Slice": _slice,
    "Concat": lambda *xs, axis: np.concatenate([np.asarray(x, object) for x in xs], axis),
    "Unsqueeze": _unsqueezed,
    "Squeeze": lambda x, axes=None: x.squeeze(None if axes is None else _axes(x, axes)),
    "Reshape": _reshape,
    "Flatten": lambda x, axis=1: x.reshape(math.prod(x.shape[:axis]), -1),
    "Expand": lambda x, shape: np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(int(n) for n in shape))),
    "Transpose": lambda x, perm=None: x.transpose(perm),
    "ReduceProd": _reduced(lambda a, b: a * b),
    "ReduceSum": _reduced(lambda a, b: a + b),
    "ReduceMax": _reduced(_larger),
    "ReduceMin": _reduced(_smaller),
    "Size": lambda x: np.array(x.size),
    "Shape": lambda x, *, start=0, end=None: np.array(x.shape[slice(start, end)]),
}


def _of_sizes(node: NodeProto, args: Sequence[Any], options: dict[str, Any]) -> np.ndarray:
    """A node on sizes of which some depend on the batch."""
    f = OF_SIZES.get(node.op_type)
    if f is None:
        raise Cannot(f"it computes with the batch's size: {FIXED}")
    made = f(*(x if x is None or x.dtype == bool else np.asarray(x, object) for x in args), **options)
    return made if isinstance(made, np.ndarray) and made.dtype.kind == "b" else sizes(made)

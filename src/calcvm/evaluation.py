"""Rows evaluated by their equations alone, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from calcvm.equations.grammar import read
from calcvm.equations.meaning import evaluate
from calcvm.equations.places import size
from calcvm.formulas.elementwise import ACTIVATIONS, ELEMENTWISE
from calcvm.formulas.declare import AXES, Formula
from calcvm.formulas.optimizers import HYPER_SLOTS
from calcvm.ops.equation import hyper_slots, read_row
from calcvm.ops.sizes import evaluate as size_of
from calcvm.ops.spec import RowSpec
from calcvm.ops.types import FLOAT, VARIABLES

read_once = cache(read_row)


def row_values(spec: RowSpec, words: Mapping[str, Any], operands: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """What a row makes of its operands, by its equation alone: flat arrays, by name.

    Parameters
    ----------
    words : by name, sizes at the batch.
    operands : those that are there, as they lie.  One that is written and is not among them is computed as well.
    """
    equation = read_once(spec)
    whole = {name: value for name, value in words.items() if not isinstance(value, float)}
    shapes = {name: tuple(int(size(n, whole)) for n in axes) for name, axes in equation.axes.items()}
    orders = spec.lies(words) if spec.lies else {}
    values = {}
    for operand in spec.operands:
        name = operand.name
        if name in operands and operand.access in "ru":
            shape = shapes[name] if name in shapes else _broadcast(spec, name, words)
            values[name] = _seen(np.asarray(operands[name]), shape, orders.get(name))
        elif name in equation.left_out:
            values[name] = np.full(shapes[name], equation.left_out[name])
    slots = dict(zip(HYPER_SLOTS, operands["hyper"])) if hyper_slots(spec) else {}
    made = evaluate(equation.equations, values, {**words, **slots}, {"float32": _float32, **activation(words)})
    out = {}
    for operand in spec.operands:
        if operand.name in made and operand.writes:
            value, order = made[operand.name], orders.get(operand.name)
            flat = (value if order is None else value.transpose(order)).reshape(-1)
            if flat.size == 1:  # a constant, which is set everywhere
                flat = np.broadcast_to(flat, size_of(operand.elems, words))
            if operand.type not in (FLOAT, *VARIABLES):  # a cast; what is of any type stays as it is
                flat = flat.astype(operand.type)
            added = words.get("acc") == 1 and operand.access == "a" and operand.name in operands
            out[operand.name] = flat + np.asarray(operands[operand.name], np.float64).reshape(-1) if added else flat
    return out


def _seen(x: np.ndarray, shape: tuple[int, ...] | None, order: tuple[int, ...] | None) -> np.ndarray:
    """An operand as its equation reads it."""
    if shape is None or order is None:
        return x.reshape(x.shape if shape is None else shape)
    return x.reshape([shape[k] for k in order]).transpose(np.argsort(order))


def _broadcast(spec: RowSpec, name: str, words: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The shape of a whole operand of a row that broadcasts: words d0, d1, ..., and a0, a1, ... which are 0 where ``a`` does not run."""
    sizes = [words[d] for d in (f"d{i}" for i in range(AXES)) if d in words]
    if not sizes or spec.operand(name).elems == "rows*cols":
        return None
    return tuple(n if words.get(f"{name}{i}", 1) else 1 for i, n in enumerate(sizes))


def _float32(x: Any) -> Any:
    return np.asarray(x, np.float32).astype(np.float64)


def activation(words: Mapping[str, Any]) -> dict[str, Any]:
    """``act`` and ``dact`` of a row's words: an activation, and its derivative by its result."""
    name, alpha = ACTIVATIONS[words.get("act", 0)], words.get("alpha", 0.0)
    if name == "none":
        return {"act": lambda x: x, "dact": lambda y: 1.0}
    forward, back = ELEMENTWISE[name].forward, ELEMENTWISE[name].backward["x"]
    found = {"act": lambda x: formula_value(forward, {"x": x}, alpha)}
    if back.reads == ("dy", "y"):
        found["dact"] = lambda y: formula_value(back, {"dy": np.ones_like(y), "y": y}, alpha)
    return found


def formula_value(f: Formula, operands: Mapping[str, Any], alpha: float) -> np.ndarray:
    return evaluate(read(f.text), operands, dict.fromkeys(f.reals, alpha))[f.writes]

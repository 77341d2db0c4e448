"""Evaluate rows, and all values of a path, in float64 from their equations, without kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from calcvm import checks
from calcvm.equations.grammar import read
from calcvm.equations.meaning import evaluate
from calcvm.equations.places import size
from calcvm.errors import CalcError, ShapeError, UnsupportedOperator
from calcvm.formulas.declare import AXES, Formula
from calcvm.formulas.elementwise import ACTIVATIONS, ELEMENTWISE
from calcvm.formulas.optimizers import HYPER_SLOTS
from calcvm.graph import Path, Variable
from calcvm.lowering.derived import Forward
from calcvm.ops.dims import Shape
from calcvm.ops.equation import equation_of, hyper_slots
from calcvm.ops.layouts import axes, back, laid
from calcvm.ops.sizes import evaluate as size_of
from calcvm.ops.spec import Operand, RowSpec
from calcvm.ops.statement import Statement, Value
from calcvm.ops.types import VARIABLES, dtype_of
from calcvm.script.equations import DTYPE, as_lies, lies
from calcvm.script.helpers import to_integer


def row_values(spec: RowSpec, words: Mapping[str, Any], operands: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Evaluate a row by its equation; the results are flat arrays, by name.

    Parameters
    ----------
    words : by name, sizes at the batch.
    operands : the given operands, as stored.  Written operands that are not given are computed as well.
    """
    equation = equation_of(spec)
    if equation is None:
        raise UnsupportedOperator(
            f"row {spec.name!r} has no equation" + f": {spec.no_equation}" * bool(spec.no_equation)
        )
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
    made = evaluate(equation.equations, values, {**words, **slots}, activation(words))
    out = {}
    for operand in spec.operands:
        if operand.name in made and operand.writes:
            value, order = made[operand.name], orders.get(operand.name)
            flat = (value if order is None else value.transpose(order)).reshape(-1)
            if flat.size == 1:  # a constant fills the operand
                flat = np.broadcast_to(flat, size_of(operand.elems, words))
            if operand.type not in VARIABLES and not operand.moved:  # a cast; operands of any type keep theirs
                to = np.dtype(dtype_of(operand.type, DTYPE))
                flat = to_integer(flat, to.type) if flat.dtype.kind == "f" and to.kind in "iu" else flat.astype(to)
            added = words.get("acc") == 1 and operand.access == "a" and operand.name in operands
            out[operand.name] = flat + np.asarray(operands[operand.name], np.float64).reshape(-1) if added else flat
    return out


def _seen(x: np.ndarray, shape: tuple[int, ...], order: tuple[int, ...] | None) -> np.ndarray:
    """An operand in the shape and axis order of its equation."""
    if order is None:
        return x.reshape(shape)
    return x.reshape([shape[k] for k in order]).transpose(np.argsort(order))


def _broadcast(spec: RowSpec, name: str, words: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of a whole operand: flat, or for broadcasting rows the sizes d0, d1, ..., with 1 where its strides a0, ... are 0."""
    sizes = [words[d] for d in (f"d{i}" for i in range(AXES)) if d in words]
    if not sizes or spec.operand(name).elems == "rows*cols":
        return (-1,)
    return tuple(n if words.get(f"{name}{i}", 1) else 1 for i, n in enumerate(sizes))


def activation(words: Mapping[str, Any]) -> dict[str, Any]:
    """The functions ``act`` and ``dact`` of a row: its activation, and the derivative as a function of the result."""
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


# ---------------------------------------------------------------- a path
def evaluate_path(path: Path, values: Mapping[str, Any], seed: int) -> dict[str, np.ndarray]:
    """See `Path.evaluate`."""
    checks.one_of("evaluate", values, Mapping, "a mapping of arrays by the names of variables")
    given = {getattr(name, "name", name): value for name, value in values.items()}
    forward = Forward(path, path.operations)
    env, statements = forward.emit.env, forward.emit.statements
    results = {v: env[v] for op in path.operations for v in op.outputs.values()}
    known = [v.name for v in (*forward.sources, *results) if v.kind != "state"]
    if unknown := [*{*given} - {*known}]:
        raise CalcError(f"evaluate: path {path.name!r} has no value {unknown[0]!r}; it has {', '.join(known)}")
    read = {v for s in statements for v in s.read_values} | {*results.values()}
    cells, batch = _known([*forward.sources, *results], env, given, seed, read)
    cells |= {v: np.ones(1) for v in forward.ones}
    taken = {*cells}
    for s in statements:
        if all(v in taken for v in s.written_values) or any(v not in cells for v in s.read_values if v.kind != "state"):
            continue  # the result is given, or an input is missing
        operands, words = {name: cells[v] for name, v in s.operands.items() if v in cells}, s.words_at(batch)
        for operand in s.spec.operands:
            if operand.below and operand.name in operands and not words.get("dense"):
                _check_indexes(s, operand, operands[operand.name], size_of(operand.below, words))
        try:
            made = row_values(s.spec, words, operands)
        except UnsupportedOperator as error:
            raise UnsupportedOperator(f"evaluate: {s.label!r}: {error}; give its result as a value") from None
        for name, v in s.operands.items():
            if v is not None and name in made:
                cells[v] = made[name].astype(dtype_of(v.type, DTYPE), copy=False)
    results |= {v: env[v] for v in path.outputs if v in env}  # an output may be a given value
    found = {v.name: _as_seen(cells[value], v, batch) for v, value in results.items() if value in cells}
    if results and not found:
        missing = ", ".join(
            v.name
            for v in forward.sources
            if v.kind in ("placeholder", "result") and v.name not in given and env[v] in read
        )
        raise CalcError(f"evaluate: all results of path {path.name!r} depend on values that are not given: {missing}")
    return found


def _check_indexes(s: Statement, operand: Operand, indexes: np.ndarray, n: int) -> None:
    """Raise CalcError for the indexes at which kernels trap."""
    if not ((indexes >= 0) & (indexes < n) & (indexes == np.floor(indexes))).all():
        v, what = s.operands[operand.name], "a label" if operand.name == "target" else "an index"
        assert v is not None
        raise CalcError(f"evaluate: {s.label!r}: {what} of {v.name!r} is not an integer in [0, {n})")


def _known(
    variables: Iterable[Variable], env: Mapping[Variable, Value], given: Mapping[str, Any], seed: int, read: set[Value]
) -> tuple[dict[Value, np.ndarray], int]:
    """The given values and a model's initial values, as stored; and the batch."""
    cells: dict[Value, np.ndarray] = {}
    batch: int | None = None
    counts = {"parameter": 0, "buffer": 0, "carry": 0}
    states: dict[Value, np.ndarray] = {}
    for v in variables:
        value = env[v]
        number = counts.get(v.kind, 0)
        counts[v.kind] = number + 1
        if v.name in given:
            shape = laid(v.shape, v.layout) if v.kind == "result" else lies(value)[0]
            cells[value], batch = as_lies(v.name, given[v.name], (shape, value.layout, value.type), batch)
            if not cells[value].size and all(n.a or n.b for n in shape):
                raise ShapeError(f"evaluate: {v.name!r} has no samples: at least one is needed")
        elif value in read and v.kind in ("parameter", "buffer", "constant"):
            cells[value] = _initial(v, lies(value), [seed, number] if v.kind == "parameter" else [seed, number, 1])
        elif value in read and v.kind == "carry":
            shape, layout = lies(value)
            states[value] = _initial(v, (shape[1:], layout), [seed, number, 2])
    n = batch or 1
    return cells | {value: np.repeat(one[None], n, axis=0) for value, one in states.items()}, n


def _initial(v: Variable, lying: tuple[Shape, str], seed: list[int]) -> np.ndarray:
    """The initial value of a parameter, buffer or constant, or of a sample of a carry."""
    shape, layout = lying
    if isinstance(v.init, np.ndarray):
        return v.init.transpose(axes(layout, v.init.ndim))
    out = np.empty([n.b for n in shape])
    v.init.fill(out.transpose(back(layout, out.ndim)) if v.init.as_seen else out, np.random.default_rng(seed))
    return out


def _as_seen(flat: np.ndarray, v: Variable, batch: int) -> np.ndarray:
    shape = [n.at(batch) for n in laid(v.shape, v.layout)]
    return flat.reshape(shape).transpose(back(v.layout, len(shape)))

"""Rows that lowering inserts without an operator of the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from calcvm.graph import Variable
from calcvm.lowering.emit import Emitter
from calcvm.ops import OPS
from calcvm.ops.dims import Affine, Shape, affine
from calcvm.ops.layouts import between
from calcvm.ops.spec import leading
from calcvm.ops.statement import Value


# ---------------------------------------------------------------- values of one shape
def zero(emit: Emitter, g: Value, shape: Shape, label: str) -> None:
    """g = 0"""
    emit.elementwise("zero", shape, {"g": g}, label)


def copy(emit: Emitter, x: Value, y: Value, shape: Shape, label: str) -> None:
    """y = x"""
    emit.elementwise("affine_fwd", shape, {"x": x, "y": y}, label, a=1.0, b=0.0)


def move(emit: Emitter, x: Value, y: Value, of: Variable, label: str) -> None:
    """y = x, bit for bit: x in the storage order of ``of``, y in the order that users see."""
    spec, axes = OPS["transpose"], between(of.layout, "", of.rank)
    emit.row(spec.fwd[0], spec.words({"x": of.laid}, {"axes": axes}), {"x": x, "y": y}, label)


def accumulate(emit: Emitter, x: Value, y: Value, shape: Shape, label: str) -> None:
    """y += x"""
    emit.elementwise("accumulate", shape, {"x": x, "y": y}, label)


def add(emit: Emitter, a: Value, b: Value, y: Value, shape: Shape, label: str) -> None:
    """y = a + b"""
    spec = OPS["add"]
    words = spec.words({"a": shape, "b": shape, "y": shape}, {})
    emit.row(spec.fwd[0], words, {"a": a, "b": b, "y": y}, label)


def sum_over(emit: Emitter, x: Value, y: Value, full: Shape, axes: Sequence[int], label: str) -> None:
    """y = the sum of x over axes."""
    spec = OPS["sum"]
    emit.row(spec.fwd[0], spec.words({"x": full}, {"axes": tuple(axes)}), {"x": x, "y": y}, label)


def as_seen(emit: Emitter, v: Variable) -> Value:
    """A variable's elements in the order that users see."""
    y = emit.tensor(v.name, "activation", v.shape, type=emit.env[v].type)
    move(emit, emit.env[v], y, v, v.name)
    return y


# ---------------------------------------------------------------- random numbers
def advance(emit: Emitter, rng: Variable) -> None:
    """Advance a random generator."""
    emit.row("rng_advance", {}, {"rng": emit.env[rng]}, rng.name)


# ---------------------------------------------------------------- a step of an optimizer
def tick(emit: Emitter, hyper: Value, schedule: int) -> None:
    emit.row("tick", {"schedule": schedule}, {"hyper": hyper}, "tick")


def rate_table(emit: Emitter, hyper: Value, table: Value, every: int) -> None:
    emit.row("rate_table", {"n": table.elems, "every": every}, {"table": table, "hyper": hyper}, "tick")


def rate_scale(emit: Emitter, hyper: Value, scaled: Value, factor: float) -> None:
    emit.row("rate_scale", {"factor": factor}, {"hyper": hyper, "scaled": scaled}, "tick")


def decay_scale(emit: Emitter, scaled: Value, factor: float) -> None:
    emit.row("decay_scale", {"factor": factor}, {"scaled": scaled}, "tick")


def penalty(emit: Emitter, p: Variable, g: Value, regularizer: Any) -> None:
    operands = {"p": emit.env[p], "g": g}
    emit.elementwise("penalty", p.laid, operands, p.name, l1=regularizer.l1, l2=regularizer.l2)


def clip_value(emit: Emitter, p: Variable, g: Value, hyper: Value) -> None:
    emit.elementwise("clip_value", p.laid, {"g": g, "hyper": hyper}, p.name)


def sums_of_squares(emit: Emitter, p: Variable, g: Value, sums: Value, at: int) -> int:
    """One sum of squares per row of p's gradient, from element ``at`` of ``sums`` on; returns the next element."""
    words = leading(p.laid)
    emit.row("sumsq", words, {"g": g, "s": sums}, p.name, shifts={"s": at})
    return at + affine(words["rows"]).b


def clip_norm(emit: Emitter, sums: Value, n: Affine | int, hyper: Value) -> None:
    emit.row("clip_norm_scale", {"n": n}, {"s": sums, "hyper": hyper}, "clip_norm")

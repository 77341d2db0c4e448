"""A gradient as operators of the graph, which have gradients themselves.

A gradient in a graph is one operation; its rows are the backward rows of the operations in between.  If that gradient is to be
differentiated, operators replace it: the equations of the same rows, lowered like users' equations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from string import ascii_lowercase
from typing import Any

import numpy as np

from calcvm import functions as F
from calcvm.equations.places import size
from calcvm.equations.ranges import Ranges
from calcvm.equations.tree import Equation, Name, Node, bound, parts
from calcvm.errors import UnsupportedOperator
from calcvm.graph import Operation, Path, Variable, apply, copied, reached, same_order
from calcvm.indexed.einsum import einsum
from calcvm.indexed.lowering import Lowering
from calcvm.indexed.products import varies
from calcvm.indexed.values import ones, padded, reshaped, size_of, spread, transposed
from calcvm.ops.dims import Affine
from calcvm.ops.equation import equation_of
from calcvm.ops.gradient import GRADIENT
from calcvm.ops.layouts import axes, back, laid
from calcvm.ops.spec import RowSpec
from calcvm.ops.specialized import specialized
from calcvm.ops.types import FLOAT

ALL = -1  # marks operands whose axes of one place are left out


def write_out(path: Path, y: Variable) -> None:
    """Replace each gradient that ``y`` is computed from by operators; the path is open."""
    for op in reached(path.operations, y, exactly=True):
        if op.spec is GRADIENT:
            with path.graph.whole():
                _write_out(path, op)


def _write_out(path: Path, op: Operation) -> None:
    y, x, dx = op.inputs["y"], op.inputs["x"], op.outputs["dx"]
    before, n = path.operations.index(op), len(path.operations)
    gradients = _Gradients(path, reached(path.operations[:before], y, exactly=True), y)
    made = _as_result(path, gradients.of(x), dx, n)
    new = path.operations[n:]
    if not any(gradients.one in o.inputs.values() for o in new):
        del path.graph.variables[gradients.one.name]
    for o in new:
        o.inputs.update({slot: dx for slot, v in o.inputs.items() if v is made})
        o.outputs.update({slot: dx for slot, v in o.outputs.items() if v is made})
    dx.producer, dx.layout = made.producer, made.layout
    del path.graph.variables[made.name]
    path.operations[:] = [*path.operations[:before], *new, *path.operations[before + 1 : n]]


def _as_result(path: Path, made: Variable, dx: Variable, n: int) -> Variable:
    """The computed gradient in the layout of ``dx``, as the output of a new operator."""
    if not same_order(dx.shape, made.layout, dx.layout):
        return copied(path, made, dx.layout)
    if made.producer in path.operations[n:]:
        return made
    return apply("reshape", made, shape=tuple(-1 if varies(d) else d.b for d in dx.shape))


class _Gradients:
    """Gradients of ``y`` as variables of the graph, through the path's operators that compute it."""

    def __init__(self, path: Path, operations: Sequence[Operation], y: Variable):
        self.graph, self.operations = path.graph, operations
        self.one = self.graph.constant(self.graph.unique("one"), np.ones([n.b for n in y.shape]))
        self.one.unnamed = True
        self.contributions: dict[Variable, list[Variable]] = {y: [self.one]}

    def of(self, x: Variable) -> Variable:
        self.needs = {x}
        for op in self.operations:
            if any(op.inputs.get(n) in self.needs for n in op.differentiable):
                self.needs.update(op.outputs.values())
        for op in reversed(self.operations):
            wanted = [n for n in op.differentiable if op.inputs.get(n) in self.needs]
            if wanted:
                dy = {f"d{slot}": g for slot, v in op.outputs.items() if (g := self.total(v)) is not None}
                if dy:
                    self.operation(op, wanted, dy)
        found = self.total(x)
        assert found is not None
        return found

    def total(self, v: Variable) -> Variable | None:
        given = self.contributions.pop(v, [])
        return reduce(add, given) if given else None

    def give(self, v: Variable, g: Variable) -> None:
        """Add a contribution, summed over the axes along which ``v`` was broadcast; a constant is copied for each element."""
        own = (1,) * (g.rank - v.rank) + tuple(map(size_of, v.shape))
        over = tuple(k for k, (n, m) in enumerate(zip(map(size_of, g.shape), own)) if n != m == 1)
        g = F.sum(g, over, True) if over and g.rank >= v.rank else g
        self.contributions.setdefault(v, []).append(reshaped(spread(g, own), v.shape))

    def operation(self, op: Operation, wanted: Sequence[str], dy: Mapping[str, Variable]) -> None:
        spec, first = op.spec, next(iter(dy.values()))
        if spec.view or spec.casts:
            v = op.inputs[spec.inputs[0]]
            self.give(v, _lying_as(v, _as_it_lies(first, op.outputs[spec.outputs[0]].layout)))
            return
        if spec.name == "transpose":
            v, y = op.inputs["x"], op.outputs["y"]
            order = op.attrs["axes"] or [*range(v.rank)][::-1]
            turned = transposed(_as_it_lies(first, y.layout), [order.index(k) for k in range(v.rank)])
            self.give(v, _lying_as(v, turned))
            return
        if spec.name == "slice" or (spec.name == "pad" and op.attrs["mode"] != "constant"):
            self.give(op.inputs["x"], _around(first, op) if spec.name == "slice" else _without_pads(first, op))
            return
        for n in spec.passes:
            if n in wanted:
                self.give(op.inputs[n], first)
        rows = _Rows(self, op, dy)
        for row in spec.backward_rows(wanted):
            for o in row.writes:
                if o.name[1:] in wanted:
                    self.give(op.inputs[o.name[1:]], rows.result(row, o.name))


class _Rows:
    """Values of an operator's rows, forward and backward, by their equations."""

    def __init__(self, of: _Gradients, op: Operation, dy: Mapping[str, Variable]):
        self.of, self.op, self.dy = of, op, dy
        defaults = {name: value for row in op.spec.rows for name, value in row.defaults.items()}
        self.words: dict[str, Any] = {**defaults, **op.spec.words(op.shapes(), op.attrs), "acc": 0}
        self.words = {name: size_of(n) for name, n in self.words.items()}
        self.lowered: dict[str, Lowering] = {}

    def result(self, row: RowSpec, name: str) -> Variable:
        """A gradient in the shape that users see; for a broadcast input in the output's shape."""
        x = self.value(row, name)
        return x if self.whole(row) else _lying_as(self.op.inputs[name[1:]], x)

    @staticmethod
    def whole(row: RowSpec) -> bool:
        """Whether its equation reads whole arrays, which may have any common layout."""
        equation = equation_of(row)
        return equation is not None and equation.equations[-1].kept is None

    def value(self, row: RowSpec, name: str) -> Variable:
        """A result of a row, with axes in storage order."""
        try:
            if row.name not in self.lowered:
                self.lowered[row.name] = self.lower(row)
            v = self.lowered[row.name].result(name)
            return F.cast(v, None) if row.operand(name).type == FLOAT != v.type else v  # of numbers such as 1 and 0
        except UnsupportedOperator as error:  # it quotes the row's equation, which the user did not write
            what, *internal = str(error).split("\n")
            if not internal and "counts the batch" not in what:
                raise
            why, of_batch = (
                what.partition(": ")[0],
                "it counts the batch, and no row generates its places: take other axes",
            )
            why = of_batch if "counts the batch" in what else why
            raise UnsupportedOperator(f"gradient: {self.op.name!r} has no second derivative here: {why}") from None

    def words_of(self, row: RowSpec) -> dict[str, Any]:
        """The row's own words: other rows of the operator may use the same names for others."""
        return {w.name: self.words[w.name] for w in row.words if w.name in self.words}

    def lower(self, row: RowSpec) -> Lowering:
        """The lowering of a row's equations; the operands have their remaining axes."""
        equation = equation_of(row)
        if equation is None:
            raise UnsupportedOperator(
                f"gradient: {self.op.name!r} has no second derivative: its row {row.name!r} has no equation"
                + f" ({row.no_equation})" * bool(row.no_equation)
            )
        words, whole = self.words_of(row), self.whole(row)
        known = {o.name: self.operand(o.name, whole) for o in row.operands if o.access == "r"}
        extents = {i.name: size(i.extent, words) for e in equation.equations for i in bound(e) if i.extent is not None}
        axes = {name: tuple(size(n, words) for n in of) for name, of in equation.axes.items()}
        absent = [name for name, v in known.items() if v is None]
        left = specialized(equation, words, absent, ALL, row.lies(words) if row.lies else {})
        shapes = {name: tuple(of[k] for k in left.axes[name]) for name, of in axes.items()}
        operands = {n: reshaped(v, shapes[n]) if n in shapes else v for n, v in known.items() if v is not None}
        shapes |= {name: tuple(map(size_of, v.shape)) for name, v in operands.items()}
        sizes = {**words, **{name.upper(): n for name, n in extents.items()}}
        operands |= {name: self.number(sizes[name]) for name in _values(left.equations) if varies(sizes.get(name, 0))}
        numbers = {name: n for name, n in words.items() if not varies(n)}
        return Lowering(self.of.graph, left.equations, operands, numbers, Ranges(extents, shapes, sizes))

    def number(self, n: Affine) -> Variable:
        """A size of the batch as a number."""
        return F.sum(ones(self.of.graph, Affine(1, 0))) * n.a + n.b

    def operand(self, name: str, as_seen: bool) -> Variable | None:
        """An operand of a row, in storage order or as users see it; None if it is left out."""
        op = self.op
        v = self.dy[name] if name in self.dy else {**op.inputs, **op.outputs}.get(name)
        if v is not None:
            layout = op.outputs[name[1:]].layout if name in self.dy else v.layout
            return v if as_seen else _as_it_lies(v, layout)
        row = next((r for r in op.spec.rows if any(o.name == name for o in r.writes)), None)
        return None if row is None else self.value(row, name)


def _as_it_lies(v: Variable, layout: str) -> Variable:
    """A value with its axes in the storage order of a layout."""
    return transposed(v, axes(layout, v.rank))


def _lying_as(v: Variable, x: Variable) -> Variable:
    """``x``, whose axes are stored like those of ``v``, in the shape that users see of ``v``."""
    return transposed(reshaped(x, laid(v.shape, v.layout)), back(v.layout, v.rank))


def _around(dy: Variable, op: Operation) -> Variable:
    """The gradient of a slice: ``dy`` between zeros."""
    starts = (*op.attrs["starts"], *[0] * dy.rank)
    for axis, (n, m) in enumerate(zip(op.inputs["x"].shape, dy.shape)):
        if n != m:
            first = (starts[axis] or 0) % n.b
            dy = padded(dy, axis, first, n.b - m.b - first, 0.0)
    return dy


def _without_pads(dy: Variable, op: Operation) -> Variable:
    """The gradient of a padding by its own elements: along each axis a product with rows of 0 and 1."""
    pads, rank = op.attrs["pads"], dy.rank
    for axis, (p, q) in enumerate(zip(pads[:rank], pads[rank:])):
        if p + q:
            n = int(op.inputs["x"].shape[axis])
            at = np.arange(-p, n + q)
            shown = {"reflect": n - 1 - abs(n - 1 - abs(at)), "edge": at.clip(0, n - 1), "wrap": at % n}[
                op.attrs["mode"]
            ]
            indexes = ascii_lowercase[:rank]
            result = indexes.replace(indexes[axis], "z")
            dy = einsum(f"{indexes},{indexes[axis]}z->{result}", dy, np.equal.outer(shown, np.arange(n)).astype(float))
    return dy


def _values(equations: Sequence[Equation]) -> set[str]:
    """Names that are read as numbers, outside of places."""

    def read(node: Node) -> set[str]:
        if isinstance(node, Name):
            return {node.name}
        return set().union(*map(read, parts(node))) if not hasattr(node, "places") else set()

    return set().union(*(read(e.value) for e in equations))

"""Simplification: what has been computed is not computed again, and what changes nothing is no row.

On a path's operators, after products have taken their biases and before autodiff.  An operator that is left out becomes a view of the
result that has its numbers, to the bit and whatever they are, so that autodiff, facts and names need not know.  Equal parts have one
gradient, of the sum of what comes to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from collections.abc import Set as AbstractSet
from math import copysign
from typing import Any

from calcvm.graph import Operation, Variable
from calcvm.ops import OPS
from calcvm.ops.gradient import GRADIENT

# Of what they give they make the same again.
IDEMPOTENT = frozenset({"abs", "ceil", "clip", "floor", "relu", "relu6", "round", "sign"})
UNSIGNED = frozenset({"abs", "exp", "sigmoid", "square"})  # whose 0 is no -0.0
PLAIN = frozenset({bool, int, float, str, type(None)})  # of which equal texts are equal values


def simplified(operations: Iterable[Operation], forward: AbstractSet[Variable]) -> list[Operation]:
    """Operators of a path, with a view in place of each that another has the result of.

    forward : results of the path's forward; those of its loss are computed apart.
    """
    operations = [*operations]
    simplification = _Simplification(operations, forward)
    return [simplification.of(op) for op in operations]


def passing(op: Operation) -> tuple[str, ...]:
    """Inputs whose gradient is the result's as it is."""
    return (*op.spec.passes, *op.spec.inputs) if op.spec.name == "affine" and op.attrs["a"] == 1 else op.spec.passes


class _Simplification:
    """
    alone : variables that gradients are taken with respect to: of an equal one the gradient is another.
    same : for each result that is left out the one in its place.
    known : results by what they are computed from.
    updates : how often buffers have been updated, in each section.
    """

    def __init__(self, operations: Iterable[Operation], forward: AbstractSet[Variable]):
        self.forward = forward
        self.alone = {op.inputs["x"] for op in operations if op.spec is GRADIENT}
        self.same: dict[Variable, Variable] = {}
        self.known: dict[Hashable, Variable] = {}
        self.updates = Counter[tuple[bool, Variable]]()

    def of(self, op: Operation) -> Operation:
        y, *others = op.outputs.values()
        here = y in self.forward
        for n in op.spec.updates:
            self.updates[here, op.inputs[n]] += 1
        if others or y in self.alone or not _repeatable(op):
            return op
        x = self._unchanged(op, y)
        x = self.known.setdefault(self._key(op, y), y) if x is None else x
        if x is y:
            return op
        self.same[y] = x
        return Operation(OPS["reshape"], {"x": x}, {"y": y}, {"x": x.laid, "y": y.laid}, {}, {}, op.name, op.layer)

    # ------------------------------------------------------------ the same again
    def _key(self, op: Operation, y: Variable) -> Hashable:
        """Equal for operators that compute the same."""
        here = y in self.forward
        inputs = tuple([(slot, self._number(v, here)) for slot, v in op.inputs.items()])
        return id(op.spec), here, y.layout, _attributes(op), inputs

    def _number(self, v: Variable, here: bool) -> Hashable:
        """Equal for variables that show the same cells in one shape, with the same in them, and whose gradients are of one variable."""
        shown = v
        while True:
            op = shown.producer
            if shown in self.same:
                shown = self.same[shown]
            elif op is not None and op.spec.view and not op.spec.stops and shown not in self.alone:
                shown = op.inputs[op.spec.inputs[0]]
            else:
                break
        number: Hashable = shown
        if shown.kind == "constant" and shown.unnamed and shown not in self.alone:  # numbers in an expression
            number = (shown.type, shown.shape, shown.layout, shown.init.tobytes())
        elif (source := shown.source).kind == "buffer":
            number = (shown, self.updates[here, source])
        return number if shown is v or shown.laid == v.laid else (number, v.laid)

    # ------------------------------------------------------------ nothing changed
    def _unchanged(self, op: Operation, y: Variable) -> Variable | None:
        """The result of the same section that ``y`` is to the bit, if there is one."""
        x = next(iter(op.inputs.values()))
        found = _as_it_is(op, x, None if x in self.alone else x.producer)
        if found is None:
            return None
        origin = _origin(found)
        own = origin.path is y.path and (origin in self.forward) == (y in self.forward)
        return found if own and (found.shape, found.layout) == (y.shape, y.layout) else None


def _as_it_is(op: Operation, x: Variable, before: Operation | None) -> Variable | None:
    """What an operator on x, which another made, has the elements of, if its result is of that shape."""
    name = op.spec.name
    if name == "affine":
        a, b = op.attrs["a"], op.attrs["b"]
        return x if a == 1 and b == 0 and (copysign(1, b) < 0 or _unsigned(x)) else None
    if name in ("slice", "pad"):
        return x
    if before is None or before.spec is not op.spec:
        return None
    if name == "neg":
        return before.inputs["x"]
    if name == "transpose":
        first, then = _axes(before), _axes(op)
        return before.inputs["x"] if [first[i] for i in then] == [*range(len(then))] else None
    return x if name in IDEMPOTENT and _attributes(op) == _attributes(before) else None


def _unsigned(x: Variable) -> bool:
    """Whether no element can be -0.0."""
    op = x.producer
    if op is None or op.spec.name != "affine":
        return op is not None and op.spec.name in UNSIGNED
    a, b = abs(op.attrs["a"]), op.attrs["b"]
    return copysign(1, b) > 0 and (a == 1 or (a > 1 and b == 0))  # of a smaller factor -1e-45*a is -0.0


def _repeatable(op: Operation) -> bool:
    """Whether an operator is no view and makes the same of the same; one that updates a buffer does not find the same in it again."""
    return op.spec.category != "random" and (op.spec.stops or not op.spec.view)


def _origin(v: Variable) -> Variable:
    """The variable in whose cells it may lie."""
    while (op := v.producer) is not None and (op.spec.view or op.spec.casts):
        v = op.inputs[op.spec.inputs[0]]
    return v


def _axes(op: Operation) -> list[int]:
    """Of a transposition, the axes of what it reads as those of its result."""
    rank = len(op.laid["x"])
    return [axis % rank for axis in op.attrs["axes"] or reversed(range(rank))]


def _attributes(op: Operation) -> Hashable:
    return _exactly(tuple(op.attrs.values())) if op.attrs else ()


def _exactly(value: Any) -> Hashable:
    """Equal for equal attributes: 0.0 is not -0.0, and what is of a type that may call anything equal is equal to itself alone."""
    if type(value) is tuple:
        return tuple([_exactly(v) for v in value])
    return repr(value) if type(value) in PLAIN else id(value)

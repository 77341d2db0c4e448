"""Reverse-mode differentiation at compile time, from the specs alone.

The pass walks operators backwards from the loss.  It emits a backward row if the row writes a needed gradient,
or a temporary that such a row reads.  Placeholders, constants and variables that depend on frozen parameters
only need no gradient.  An output that the loss does not use has no gradient: rows leave it out if they may,
else it is zeros.  Gradients are single assignment; the contributions of several uses are added.  Parameter
gradients are the exception: they are set once if a step has one round, and added to if rounds accumulate.

Only hot rows, the weight gradients of linear and matmul, add to a gradient themselves (word ``acc``).  Others write a separate
gradient, which an `accumulate` row adds: a second form of every backward kernel would serve rows that are not hot.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from calcvm.errors import UnsupportedOperator
from calcvm.graph import Operation, Variable, reached
from calcvm.lowering import inserted
from calcvm.lowering.emit import Emitter
from calcvm.lowering.simplify import passing
from calcvm.ops.dims import Affine, Shape
from calcvm.ops.sizes import evaluate
from calcvm.ops.spec import RowSpec
from calcvm.ops.statement import Value


@dataclass
class Backward:
    """A backward under construction: gradients of a loss with respect to variables of one path."""

    emit: Emitter
    operations: list[Operation]
    accumulate: bool  # rounds accumulate: parameter gradients persist and are added to
    parameter_gradient: dict[Variable, Value] = field(default_factory=dict)  # also of other requested variables
    contributions: dict[Variable, list[Value]] = field(default_factory=dict)
    written: set[Variable] = field(default_factory=set)  # parameters whose gradient already holds a value

    def run(self, loss: Variable, seed: Value) -> None:
        behind = reached(self.operations, loss)
        needs = self._needs(behind)
        self.needs = needs
        self.contributions[loss] = [seed]
        for op in reversed(behind):
            if any(v in needs for v in op.outputs.values()):
                self._operation(op)

    def _needs(self, operations: Iterable[Operation]) -> set[Variable]:
        """Variables whose gradient is needed: the trained parameters, and all variables between them and the loss."""
        needs: set[Variable] = set()
        for op in operations:
            inputs = [v for n, v in op.inputs.items() if n in op.differentiable]
            needs.update(v for v in op.inputs.values() if v in self.parameter_gradient)
            if any(v in needs for v in inputs):
                needs.update(op.outputs.values())
            known = (*op.spec.differentiable, *op.spec.flat)
            blocked = [v for n, v in op.inputs.items() if v in needs and n not in known]
            if blocked:
                raise UnsupportedOperator(
                    f"{op.name}: operator {op.spec.name!r} has no gradient for its input {blocked[0].name!r}: "
                    "give it one, if it is a custom elementwise operator, by a function of the input's name, such as dx; "
                    f"freeze the parameters behind it (trainable=False, minimize(parameters=...)), put cv.stop_gradient before "
                    "it, or leave it out of the loss"
                )
        return needs

    def _operation(self, op: Operation) -> None:
        spec, emit = op.spec, self.emit
        dy = {slot: g for slot, v in op.outputs.items() if (g := self._total(v)) is not None}
        if not dy:
            return
        first = next(iter(dy.values()))
        if spec.view or spec.casts:
            self._give(op.inputs[spec.inputs[0]], first, op.name)
            return
        wanted = {n for n, v in op.inputs.items() if v in self.needs and n in spec.differentiable}
        shapes = op.shapes()
        out_shape = shapes[spec.outputs[0]]
        for n in passing(op):
            if n in wanted and (n in spec.passes or op.inputs[n] not in self.parameter_gradient):
                wanted.remove(n)
                self._give_reduced(op.inputs[n], first, out_shape, shapes[n], op.name)
        local = {**emit.locals[op], **{f"d{slot}": g for slot, g in dy.items()}}
        for row in spec.backward_rows(wanted):
            self._fill_missing(op, row, local)
            operands: dict[str, Value | None] = {o.name: local.get(o.name) for o in row.operands}
            given: list[tuple[Variable, Value, Shape, Shape]] = []
            added: dict[str, bool] = {}  # targets that the row can add to: whether they hold a value
            for o in row.writes:
                v = op.inputs.get(o.name[1:])
                if v is None or (v not in self.needs and o.optional):
                    continue
                own = shapes[o.name[1:]]
                shape = out_shape if spec.broadcast else own
                target = self.parameter_gradient.get(v)
                if target is not None and o.access == "a":
                    added[o.name] = not self._first(v)
                elif target is None or shape != own or not self._first(v):
                    target = emit.tensor(f"d{v.name}", "gradient", shape)
                    given.append((v, target, shape, own))
                    if o.access == "a":
                        added[o.name] = False
                operands[o.name] = target
                if o.access == "w":
                    local[o.name] = target  # later rows of the operator may read it
            acc = any(added.values())
            for name, held in added.items():
                if acc and not held:  # the row has one mode for all targets: an empty one starts at zero
                    value = operands[name]
                    assert value is not None and isinstance(value.elems, Affine)
                    inserted.zero(emit, value, (value.elems,), op.name)
            emit.row(row, {**emit.words[op], "acc": int(acc)}, operands, op.name)
            for v, g, shape, own in given:
                self._give_reduced(v, g, shape, own, op.name)

    def _fill_missing(self, op: Operation, row: RowSpec, local: dict[str, Value]) -> None:
        """Zeros for gradients of unused outputs, if the row reads them and cannot leave them out."""
        words = self.emit.words[op]
        for o in row.reads:
            v = op.outputs.get(o.name[1:]) if o.name[0] == "d" else None
            optional = evaluate(o.optional, words) if isinstance(o.optional, str) else o.optional
            if v is not None and o.name not in local and not optional:
                zeros = local[o.name] = self.emit.tensor(f"d{v.name}", "gradient", v.laid)
                inserted.zero(self.emit, zeros, v.laid, op.name)

    def _first(self, v: Variable) -> bool:
        """Whether this contribution may set the parameter's gradient; later ones add."""
        if self.accumulate or v in self.written:
            return False
        self.written.add(v)
        return True

    def _give_reduced(self, v: Variable, g: Value, shape: Shape, own: Shape, label: str) -> None:
        """Add a gradient of ``shape`` to that of ``v``, summed over the axes along which ``v``, of shape ``own``, was broadcast."""
        padded = (1,) * (len(shape) - len(own)) + own
        axes = [i for i, (s, t) in enumerate(zip(shape, padded)) if s != t]
        if axes:
            target = self.parameter_gradient.get(v)
            if target is not None and self._first(v):
                inserted.sum_over(self.emit, g, target, shape, axes, label)
                return
            reduced = self.emit.tensor(f"d{v.name}", "gradient", v.laid)
            inserted.sum_over(self.emit, g, reduced, shape, axes, label)
            g = reduced
        self._give(v, g, label)

    def _give(self, v: Variable, g: Value, label: str) -> None:
        """Record a contribution, of the shape of ``v``, to its gradient."""
        target = self.parameter_gradient.get(v)
        if target is None:
            if v in self.needs:
                self.contributions.setdefault(v, []).append(g)
        elif self._first(v):
            inserted.copy(self.emit, g, target, v.laid, label)
        else:
            inserted.accumulate(self.emit, g, target, v.laid, label)

    def _total(self, v: Variable) -> Value | None:
        """The gradient of ``v``: the sum of its contributions."""
        parts = self.contributions.pop(v, [])
        if not parts or v not in self.needs:
            return None
        total = parts[0]
        for part in parts[1:]:
            g = self.emit.tensor(f"d{v.name}", "gradient", v.laid)
            inserted.add(self.emit, total, part, g, v.laid, f"d{v.name}")
            total = g
        return total

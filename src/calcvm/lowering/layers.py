"""A summary of a path, layer by layer, from its operators before fusion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from calcvm.graph import Operation, Path, Variable
from calcvm.ops.dims import Shape, numel
from calcvm.ops.sizes import evaluate
from calcvm.ops.statement import Statement
from calcvm.ops.types import BYTES, dtype_of


class LayerLine:
    """A layer, or an operator outside of layers: its output shape, number of parameters, and forward rows."""

    def __init__(self, name: str, shape: Shape):
        self.name, self.shape = name, shape
        self.parameters = 0
        self.rows: list[Statement] = []

    def at(self, batch: int, dtype: str) -> list[Any]:
        """For a program's facts: name, shape, parameters, FLOPs and bytes of a batch; each operand counts once per row."""
        flops = sum(int(evaluate(s.spec.flops, s.words_at(batch))) for s in self.rows)
        operands = ((s.operands[name], n) for s in self.rows for name, n in s.extents.items())
        moved = sum(n.at(batch) * BYTES[dtype_of(v.type, dtype)] for v, n in operands if v is not None)
        return [self.name, [[n.a, n.b] for n in self.shape], self.parameters, flops, moved]


def lines_of(path: Path, operations: Sequence[Operation]) -> tuple[list[LayerLine], dict[str, LayerLine]]:
    """The lines of a path in the order of its construction, and a mapping from the labels of rows to lines.

    A label is the name of an operator or of its result.  A parameter counts for its first reader.

    operations : the operators that compute the path's output; layers without any of them are left out.
    """
    others = {op.layer for op in path.operations} - {op.layer for op in operations}
    place = {op.name: i for i, op in enumerate(path.operations, 1)}
    found: list[tuple[int, Any, str, Variable]] = [
        (place[op.name], op, op.name, next(iter(op.outputs.values()))) for op in operations if not op.layer
    ]
    found += [(n, name, name, v) for name, (v, n) in path.layers.items() if name not in others]
    lines = {key: LayerLine(name, v.shape) for _, key, name, v in sorted(found, key=lambda entry: entry[0])}
    known: set[Variable] = set()
    for op in operations:
        read = {v for v in op.inputs.values() if v.kind == "parameter"} - known
        lines[op.layer or op].parameters += sum(numel(v.shape).b for v in read)
        known |= read
    by_name = {v.name: lines[op.layer or op] for op in operations for v in op.outputs.values()}
    return [*lines.values()], by_name | {op.name: lines[op.layer or op] for op in operations}

"""The statement list under construction: values by variable, rows by spec."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from calcvm.errors import UnsupportedOperator
from calcvm.graph import Operation, Variable
from calcvm.ops import ROWS, RowSpec
from calcvm.ops.dims import Affine, Shape, affine, numel
from calcvm.ops.sizes import MAX_BATCH, Extent, On, Piecewise, Undecided, extent, workspace
from calcvm.ops.spec import PHASES, WN, rows_cols
from calcvm.ops.statement import Statement, Value, unique


class Emitter:
    """Collects values and statements of one program.

    Variables keep their names (``reserved``); a value of lowering's own whose name is taken is numbered.  Rows get the
    scratch that speed wants.
    """

    def __init__(self, dtype: str, workers: int, gpu: bool, reserved: Iterable[str]):
        self.on = On({"float32": 2, "float64": 1}[dtype], workers, int(gpu))
        self.values: list[Value] = []
        self._names, self._counts = set(reserved), dict[str, int]()
        self.env: dict[Variable, Value] = {}
        self.statements: list[Statement] = []
        self.locals: dict[Operation, dict[str, Value]] = {}  # an operator's values by the spec's names
        self.words: dict[Operation, dict[str, Any]] = {}
        self.path = self.phase = ""

    @property
    def slots(self) -> int:
        """Heap elements in eight bytes."""
        return self.on.D

    def value(self, stem: str, kind: str, elems: Extent | int, **facts: Any) -> Value:
        """A value of lowering's own."""
        name = unique(stem, self._names, self._counts)
        self._names.add(name)
        return self._value(name, kind, elems if isinstance(elems, Piecewise) else affine(elems), **facts)

    def tensor(self, stem: str, kind: str, shape: Shape, **facts: Any) -> Value:
        return self.value(stem, kind, numel(shape), shape=shape, **facts)

    def variable(self, v: Variable, kind: str, elems: Affine | None = None, **facts: Any) -> None:
        """The value of a variable: of its shape, or of ``elems`` elements."""
        shape = None if elems else v.shape
        self.env[v] = self._value(v.name, kind, elems or numel(v.shape), shape=shape, **facts)

    def _value(self, name: str, kind: str, elems: Extent, **facts: Any) -> Value:
        v = Value(name=name, kind=kind, elems=elems, **facts)
        self.values.append(v)
        return v

    def row(
        self,
        spec: RowSpec | str,
        words: Mapping[str, Any],
        operands: Mapping[str, Value | None],
        label: str,
        shifts: Mapping[str, int] | None = None,
    ) -> Statement:
        """Append a row; scratch operands get values of their own."""
        spec = ROWS[spec] if isinstance(spec, str) else spec
        known = {w.name: words[w.name] for w in spec.words if w not in (WN, PHASES)} | self.on._asdict()
        named = dict(operands)
        try:
            if spec.workspace:
                known["wn"] = workspace(spec, known, self.on)[1]
            for o in spec.operands:
                if o.access == "s":
                    elems = extent(o.elems, known)
                    needed = elems.bounds(MAX_BATCH)[1] > 0
                    named[o.name] = self.value(f"{label}.{o.name}", "workspace", elems) if needed else None
            named = {o.name: named.get(o.name) for o in spec.operands}
            s = Statement(
                spec=spec, words=known, operands=named, path=self.path, phase=self.phase, label=label,
                shifts=shifts or {},
            )  # fmt: skip
        except Undecided as error:
            raise UnsupportedOperator(f"{label}: row {spec.name!r} has no size for every batch: {error}") from None
        self.statements.append(s)
        return s

    def elementwise(
        self, spec: str, shape: Shape, operands: Mapping[str, Value], label: str, **words: Any
    ) -> Statement:
        """A row over all elements of ``shape``, shared by its leading dimension."""
        return self.row(spec, {**rows_cols(shape), **words}, operands, label)

    def forward(self, op: Operation) -> None:
        """The forward rows of an operator; a view is another name for its input's value."""
        spec = op.spec
        if spec.view:
            self.env[op.outputs[spec.outputs[0]]] = self.env[op.inputs[spec.inputs[0]]]
            return
        shapes = op.shapes()
        local: dict[str, Value] = {n: self.env[v] for n, v in op.inputs.items()}
        for slot, v in op.outputs.items():
            self.variable(v, "activation")
            local[slot] = self.env[v]
        for slot, shape in op.saved.items():
            local[slot] = self.tensor(f"{op.name}.{slot}", "activation", shape)
        op_words = spec.words(shapes, op.attrs)
        self.locals[op] = local
        self.words[op] = op_words
        for row in spec.fwd:
            self.row(row, op_words, {o.name: local.get(o.name) for o in row.operands}, op.name)

"""The statement list under construction: values by variable, rows by spec."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from calcvm.errors import UnsupportedOperator
from calcvm.graph import Operation, Variable
from calcvm.ops import ROWS, RowSpec
from calcvm.ops.dims import Shape, affine, numel
from calcvm.ops.sizes import MAX_BATCH, Extent, On, Piecewise, Undecided, extent, workspace
from calcvm.ops.spec import rows_cols
from calcvm.ops.statement import Statement, Value, unique
from calcvm.ops.types import FLOAT, instance_of


class Emitter:
    """Collects the values and statements of one program.

    Variables keep their names (``reserved``); an internal value whose name is taken gets a number.  Rows get the scratch
    that is fastest.
    """

    def __init__(self, dtype: str, workers: int, device: str, reserved: Iterable[str]):
        self.dtype = dtype
        self.on = On.of(workers, device)
        self._on = self.on._asdict()
        self.values: list[Value] = []
        self._names, self._counts = set(reserved), dict[str, int]()
        self.env: dict[Variable, Value] = {}
        self.statements: list[Statement] = []
        self.locals: dict[Operation, dict[str, Value]] = {}  # per operator: its values by the spec's names
        self.words: dict[Operation, dict[str, Any]] = {}
        self.saved: set[Value] = set()  # values that forwards write for backwards
        self.path = self.phase = ""

    def value(self, stem: str, kind: str, elems: Extent | int, **facts: Any) -> Value:
        """An internal value of lowering."""
        name = unique(stem, self._names, self._counts)
        self._names.add(name)
        return self._value(name, kind, elems if isinstance(elems, Piecewise) else affine(elems), **facts)

    def tensor(self, stem: str, kind: str, shape: Shape, **facts: Any) -> Value:
        return self.value(stem, kind, numel(shape), shape=shape, **facts)

    def variable(self, v: Variable, kind: str, **facts: Any) -> None:
        """Create the value of a variable; for a placeholder, Python sees the data as stored."""
        shape, layout = (v.laid, "") if kind == "placeholder" else (v.shape, v.layout)
        self.env[v] = self._value(v.name, kind, numel(shape), shape=shape, layout=layout, type=self._type(v), **facts)

    def _type(self, v: Variable) -> str:
        """The type of a variable; the program's own dtype becomes its float type."""
        return FLOAT if v.type == self.dtype else v.type

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
        """Append a row; each scratch operand gets its own value."""
        spec = self._instance(ROWS[spec] if isinstance(spec, str) else spec, operands)
        known = {name: words[name] for name in spec.given} | self._on
        named = dict(operands)
        try:
            if spec.workspace:
                known["wn"] = workspace(spec, known, self.on)[1]
            for o in spec.operands:
                if o.access == "s":
                    elems = extent(o.elems, known)
                    needed = elems.bounds(MAX_BATCH)[1] > 0
                    named[o.name] = self.value(f"{label}.{o.name}", "workspace", elems, type=o.type) if needed else None
            named = {o.name: named.get(o.name) for o in spec.operands}
            s = Statement(
                spec=spec, words=known, operands=named, path=self.path, phase=self.phase, label=label,
                shifts=shifts or {},
            )  # fmt: skip
        except Undecided as error:
            raise UnsupportedOperator(f"{label}: row {spec.name!r} has no size for every batch: {error}") from None
        self.statements.append(s)
        return s

    def _instance(self, row: RowSpec, operands: Mapping[str, Value | None]) -> RowSpec:
        """The row for the types of its operands; a type of operands that are left out is the program's float."""
        types = {o.type: v.type for o in row.operands if (v := operands.get(o.name)) is not None}
        return row.of(
            tuple(instance_of(variable, types.get(variable, self.dtype), self.dtype) for variable in row.variables)
        )

    def elementwise(
        self, spec: str, shape: Shape, operands: Mapping[str, Value], label: str, **words: Any
    ) -> Statement:
        """A row over all elements of ``shape``; workers share its leading dimension."""
        return self.row(spec, {**rows_cols(shape), **words}, operands, label)

    def forward(self, op: Operation) -> None:
        """The forward rows of an operator; a view is another name for its input's value."""
        spec = op.spec
        if spec.view or (spec.casts and self._type(op.inputs["x"]) == self._type(op.outputs["y"])):
            self.env[op.outputs[spec.outputs[0]]] = self.env[op.inputs[spec.inputs[0]]]
            return
        shapes = op.shapes()
        local: dict[str, Value] = {n: self.env[v] for n, v in op.inputs.items()}
        for slot, v in op.outputs.items():
            if v not in self.env:
                self.variable(v, "activation")
            local[slot] = self.env[v]
        for slot, shape in op.saved.items():
            local[slot] = self.tensor(f"{op.name}.{slot}", "activation", shape, type=spec.type_of(slot))
            if slot in spec.saved:
                self.saved.add(local[slot])
        defaults = {name: value for row in spec.rows for name, value in row.defaults.items()}
        op_words = defaults | spec.words(shapes, op.attrs)
        self.locals[op] = local
        self.words[op] = op_words
        for row in spec.fwd:
            self.row(row, op_words, {o.name: local.get(o.name) for o in row.operands}, op.name)

"""Rows of the table as plain ones: their kernels from their equations, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from calcvm.equations.plain import Plain
from calcvm.equations.text import show
from calcvm.errors import CalcError
from calcvm.kernels_cpu.plain import add
from calcvm.ops.spec import Operand, R, RowSpec, W, Word, dims
from calcvm.ops.types import CELLS, FLOAT


def plain_of(row: RowSpec, name: str) -> Plain:
    """A row's equation as that of a row of another name.

    Raises
    ------
    CalcError : its equation does not say all, or is not of a plain row's form.
    """
    if row.no_equation:
        raise CalcError(f"it has no equation: {row.no_equation}")
    if row.lies:
        raise CalcError("words say how its operands lie")
    if scratch := [o.name for o in row.operands if o.access == "s"]:
        raise CalcError(f"it has scratch, {scratch[0]}")
    if updated := [o.name for o in row.operands if o.access == "u"]:
        raise CalcError(f"it updates {updated[0]}")
    kinds = [w.kind == "float" for w in row.words]
    if kinds != sorted(kinds):
        raise CalcError("an integer word stands after a float")
    words = tuple(w.name for w in row.words if w.kind != "float")
    reals = tuple(w.name for w in row.words if w.kind == "float")
    operands = tuple(o.name for o in row.operands)
    types = {o.name: o.type for o in row.operands if o.type not in (FLOAT, CELLS)}
    plain = Plain(name, row.synopsis, words, operands, reals, types, row.declares)
    _ = plain.shared
    return plain


@cache
def as_plain(row: RowSpec) -> RowSpec:
    """A row with a kernel that follows from its equation, under another name."""
    name = f"plain_{row.name.replace('.', '_')}"
    add(plain_of(row, name), own=True)
    return replace(row, name=name)


def row_of(plain: Plain) -> RowSpec:
    """A row that a plain one says all of, as tests run rows."""
    made = {stage.name for stage in plain.stages if stage.result}

    def operand(name: str) -> Operand:
        elems = "*".join(f"({show(n)})" for n in plain.axes.get(name, ())) or "1"
        left_out = name in plain.left_out
        return (W if name in made else R)(name, elems, type=plain.types.get(name, FLOAT), optional=left_out)

    words = (*dims(" ".join(plain.words)), *(Word(name=n, kind="float", lo=-1e9, hi=1e9) for n in plain.reals))
    return RowSpec(name=plain.name, synopsis=plain.text, words=words, operands=tuple(map(operand, plain.operands)))

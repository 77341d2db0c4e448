"""Rows of the table as plain ones: their kernels from their equations, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from calcvm.equations.grammar import read, read_declarations
from calcvm.equations.plain import Plain
from calcvm.equations.text import show, show_equations
from calcvm.equations.tree import Call, Element, Equation, Index, Name, Node, Number, rewritten
from calcvm.errors import CalcError
from calcvm.kernels_cpu.plain import add
from calcvm.ops.spec import PHASES, WN, Operand, R, RowSpec, W, Word, dims
from calcvm.ops.types import CELLS, FLOAT


def plain_of(row: RowSpec, name: str) -> Plain:
    """A row's equation as that of a row of another name, without an activation.

    Raises
    ------
    CalcError : its equation does not say all, or is not of a plain row's form.
    """
    if row.no_equation:
        raise CalcError(f"it has no equation: {row.no_equation}")
    if row.lies:
        raise CalcError("words say how its operands lie")
    if any(o.access == "u" for o in row.operands):
        raise CalcError("it updates an operand")
    if any(o.name == "hyper" for o in row.operands):
        raise CalcError("it reads slots of hyperparameters")
    row = _alone(row)
    kinds = [w.kind == "float" for w in row.words]
    if kinds != sorted(kinds):
        raise CalcError("an integer word stands after a float")
    words = tuple(w.name for w in row.words if w.kind != "float")
    reals = tuple(w.name for w in row.words if w.kind == "float")
    operands = tuple(o.name for o in row.operands)
    types = {o.name: o.type for o in row.operands if o.type not in (FLOAT, CELLS)}
    equations = [replace(e, value=rewritten(e.value, _inactive)) for e in read(row.synopsis, {*operands})]
    if all(e.kept is None for e in equations):
        equations = _indexed(row, equations)
    plain = Plain(name, show_equations(equations), words, operands, reals, types, row.declares)
    _ = plain.shared
    return plain


def _alone(row: RowSpec) -> RowSpec:
    """A row without scratch and what is said of it, that sets all its results."""
    words = tuple(w for w in row.words if w not in (WN, PHASES))
    operands = tuple(replace(o, optional=False) if o.writes else o for o in row.operands if o.access != "s")
    return replace(row, words=words, operands=operands, phases="1", workspace=None)


def _inactive(node: Node) -> Node:
    if isinstance(node, Call) and node.function in ("act", "dact"):
        return node.arguments[0] if node.function == "act" else Number(1)
    return node


def _indexed(row: RowSpec, equations: Sequence[Equation]) -> list[Equation]:
    """Equations of whole operands, element by element."""
    sizes = {o.elems for o in row.operands}
    if len(sizes) > 1:
        raise CalcError("its whole operands are of several extents")
    ((said,),) = (e.kept or () for e in read_declarations(f"whole[e_<{sizes.pop()}]", {"whole"}))
    whole = {e.name for e in equations} | {o.name for o in row.operands}

    def at(node: Node) -> Node:
        return Element(node.name, (Name("e_"),)) if isinstance(node, Name) and node.name in whole else node

    return [Equation(e.name, (Index("e_") if k else said,), rewritten(e.value, at)) for k, e in enumerate(equations)]


@cache
def as_plain(row: RowSpec) -> RowSpec:
    """A row with a kernel that follows from its equation, under another name."""
    name = f"plain_{row.name.replace('.', '_')}"
    add(plain_of(row, name), own=True)
    return replace(_alone(row), name=name)


def row_of(plain: Plain) -> RowSpec:
    """A row that a plain one says all of, as tests run rows."""
    made = {stage.name for stage in plain.stages if stage.result}

    def operand(name: str) -> Operand:
        elems = "*".join(f"({show(n)})" for n in plain.axes.get(name, ())) or "1"
        left_out = name in plain.left_out
        return (W if name in made else R)(name, elems, type=plain.types.get(name, FLOAT), optional=left_out)

    words = (*dims(" ".join(plain.words)), *(Word(name=n, kind="float", lo=-1e9, hi=1e9) for n in plain.reals))
    operands = tuple(map(operand, plain.operands))
    return RowSpec(name=plain.name, synopsis=plain.text, declares=plain.declares, words=words, operands=operands)

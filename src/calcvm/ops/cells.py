"""Operators of users' recurrent cells: those of `calcvm.ops.recurrent`, for the equations of `calcvm.equations.cells`.

No table contains them: a row is found by its name, which identifies its computation, while the process knows its cell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from calcvm.equations.cells import CELLS, OwnCell, of_document, own_cell
from calcvm.errors import CalcError
from calcvm.ops.recurrent import spec_of
from calcvm.ops.spec import RECURRENT, STATED, OpSpec, RowSpec, row_named


class CellRow(RowSpec):
    """A row of a user's cell."""

    def __reduce__(self) -> tuple:
        return _row_again, (self.name, document_of(self))


class CellOp(OpSpec):
    """The operator of a user's cell."""

    stem = RECURRENT

    def __reduce__(self) -> tuple:
        return operator_said, (document_of(self.fwd[0]),)


def document_of(row: RowSpec) -> dict[str, Any]:
    own = own_cell(row.name)
    assert own is not None
    return own.document


_OPERATORS: dict[str, OpSpec] = {}


def operator_of(own: OwnCell) -> OpSpec:
    """The operator of a checked cell; from now on its rows are found by their names."""
    if own.stem not in _OPERATORS:
        CELLS.setdefault(own.stem, own)
        spec = _OPERATORS[own.stem] = spec_of(own.cell, CellOp, CellRow)
        STATED.update({row.name: row for row in spec.rows})
    return _OPERATORS[own.stem]


def documents_of(rows: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The documents, as stored in files, of the cells that rows belong to."""
    return {own.stem: own.document for row in rows if (own := own_cell(row)) is not None}


def cells_of(documents: Mapping[str, Mapping[str, Any]]) -> None:
    """Register the cells of a file (CalcError: one was changed, or has another version of the language)."""
    for stem, document in documents.items():
        if operator_of(own := of_document(document)).name != stem:
            raise CalcError(f"the recurrent cell {own.name!r} was changed, {own.text!r}: compile the graph again")


def _row_again(name: str, document: Mapping[str, Any]) -> RowSpec:
    operator_of(of_document(document))
    return row_named(name)


def operator_said(document: Mapping[str, Any]) -> OpSpec:
    """The operator of a document (CalcError: it has another version of the language, or is invalid)."""
    return operator_of(of_document(document))

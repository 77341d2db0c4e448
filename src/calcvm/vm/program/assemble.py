"""Assemble statements and a plan into a verified program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from calcvm.errors import ProgramError
from calcvm.ops.dims import Affine, affine
from calcvm.ops.sizes import extent
from calcvm.ops.spec import HEADER_WORDS, STATED, row_words
from calcvm.ops.statement import Lowered, Statement, Value
from calcvm.ops.types import dtype_of
from calcvm.vm.program.encoding import FLAG_PC_SHIFT, FLAG_PHASES, FLAG_SYNC, encode_row, instructions
from calcvm.vm.program.program import Program, Symbol, Zone
from calcvm.vm.program.verify import verify


def assemble(
    lowered: Lowered,
    plan: Any,
    dtype: str,
    info: Mapping[str, Any] | None = None,
    constants: Mapping[str, np.ndarray] | None = None,
) -> Program:
    """Encode every statement for the plan's batch size at the plan's offsets, and verify the result.

    Parameters
    ----------
    lowered : the statements in row order; those of the plan (``plan.lowered``), if any, replace them.
    plan : offsets by value, sync flags, zones, batch_size, workers, heap_elems.
    dtype : "float32" or "float64".
    info : JSON-able facts, such as lowering's; values in them become the numbers of their symbols in the program.

    Raises
    ------
    ProgramError
        Two values have the same name, or the rows do not verify: a defect of lowering or planning, named with row, operator and operand.
    """
    lowered = getattr(plan, "lowered", lowered)
    values = [v for v in lowered.values if v in plan.offsets]
    index = {v: i for i, v in enumerate(values)}
    shared = [name for name, count in Counter(v.name for v in values).items() if count > 1]
    if shared:
        raise ProgramError(f"two values of the program are called {shared[0]!r}: a listing could not tell them apart")
    n = len(lowered.statements)
    used = instructions(s.spec for s in lowered.statements)
    place = {name: k for k, (name, _) in enumerate(used)}
    width = row_words(s.spec for s in lowered.statements)
    rows = np.zeros((n, width), np.int64)
    operand_values = np.full((n, width), -1, np.int32)
    patches: list[tuple[int, int, int, int]] = []
    for i, (statement, sync) in enumerate(zip(lowered.statements, plan.sync, strict=True)):
        flags = i << FLAG_PC_SHIFT | (FLAG_SYNC if sync else 0)
        words, forms = numbers(statement, plan.batch_size)
        patches += [(i, k, a, b) for k, a, b in forms]
        offsets: dict[str, int | None] = {}
        first = HEADER_WORDS + len(statement.spec.words)
        for k, operand in enumerate(statement.spec.operands, first):
            value = statement.operands.get(operand.name)
            if value is not None:
                if value not in index:
                    raise ProgramError(f"row {i} ({statement.label}): the plan has no offset for {value.name}")
                offsets[operand.name] = plan.offsets[value] + statement.shifts.get(operand.name, 0)
                operand_values[i, k] = index[value]
        flags |= FLAG_PHASES if statement.spec.phases != "1" and words["phases"] > 1 else 0
        row = encode_row(statement.spec, words, offsets, flags, place[statement.spec.name])
        rows[i, : len(row)] = row
    program = Program(
        dtype=dtype,
        instructions=used,
        rows=rows,
        patches=np.array(patches, np.int64).reshape(-1, 4),
        sections=lowered.sections(),
        batch_size=plan.batch_size,
        workers=plan.workers,
        heap_elems=plan.heap_elems,
        zones=tuple(_zone(z) for z in plan.zones.values() if z.stop_elems > z.start_elems),
        symbols=tuple(_symbol(v, plan, index, dtype) for v in values),
        operand_values=operand_values,
        labels=tuple(s.label for s in lowered.statements),
        info=_numbered(info or {}, index) | _equations(lowered),
        constants=dict(constants or {}),
    )
    verify(program)
    return program


def numbers(statement: Statement, batch: int) -> tuple[dict[str, Any], list[tuple[int, int, int]]]:
    """The words at ``batch``, and (word index, a, b) of those that depend on it."""
    found: dict[str, Any] = {}
    forms = []
    words, spec = dict(statement.words), statement.spec
    if spec.workspace:
        words["wn"] = words["wn"].bounds(batch)[1]  # enough for every batch
    if spec.phases != "1":
        words["phases"] = extent(spec.phases, words)
    for k, word in enumerate(spec.words, HEADER_WORDS):
        value = words[word.name]
        if isinstance(value, Affine):
            if not value.constant:
                forms.append((k, value.a, value.b))
            value = value.at(batch)
        found[word.name] = value
    return found, forms


def _equations(lowered: Lowered) -> dict[str, Any]:
    """The rows of custom equations, and custom recurrent cells, which the program carries with it."""
    if not STATED:
        return {}
    from calcvm.ops import cells, stated

    rows = {s.spec.name: s.spec for s in lowered.statements}
    found = {"equations": stated.documents_of(rows.values()), "cells": cells.documents_of(rows)}
    return {name: documents for name, documents in found.items() if documents}


def _numbered(info: Any, index: Mapping[Value, int]) -> Any:
    """Facts with each value replaced by the number of its symbol (None: it has no cells)."""
    if isinstance(info, Value):
        return index.get(info)
    if isinstance(info, Mapping):
        return {key: _numbered(fact, index) for key, fact in info.items()}
    return [_numbered(fact, index) for fact in info] if isinstance(info, (list, tuple)) else info


def _symbol(v: Value, plan: Any, index: Mapping[Value, int], dtype: str) -> Symbol:
    elems, shape = v.elems, v.shape
    if v.kind == "workspace" or not isinstance(elems, Affine):
        elems = Affine(0, elems.bounds(plan.batch_size)[1])
    elif v.kind == "carry" and shape is not None:  # it persists, also of samples that a smaller batch has not
        elems, shape = affine(elems.at(plan.batch_size)), tuple(affine(n.at(plan.batch_size)) for n in shape)
    return Symbol(
        name=v.name,
        kind=v.kind,
        offset=int(plan.offsets[v]),
        elems=elems,
        shape=(elems,) if shape is None else shape,
        persistent=v.persistent,
        resident=v.resident,
        members=tuple(index[m] for m in plan.blocks.get(v, ())),
        dtype=dtype_of(v.type, dtype),
        layout=v.layout,
    )


def _zone(z: Any) -> Zone:
    return Zone(
        name=z.name,
        start=z.start_elems,
        stop=z.stop_elems,
        persistent_start=z.start_elems if z.persistent_bytes else 0,
        persistent_stop=z.stop_elems if z.persistent_bytes else 0,
    )

"""Minimal scratch: lower the budget word ``wn`` of rows to save memory."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from calcvm.ops.sizes import MAX_BATCH, workspace
from calcvm.ops.statement import Lowered, Statement, Value
from calcvm.planner.lifetimes import Machine, at_most


def with_least(lowered: Lowered, machine: Machine, of: Container[int] | None = None) -> Lowered:
    """The program with minimal scratch in all statements, or in those whose indices ``of`` contains."""
    smaller: dict[Value, Value | None] = {}
    statements = tuple(
        _least(st, machine, smaller) if st.spec.workspace and (of is None or t in of) else st
        for t, st in enumerate(lowered.statements)
    )
    values = tuple(w for v in lowered.values if (w := smaller.get(v, v)) is not None)
    return replace(lowered, statements=statements, values=values)


def _least(st: Statement, machine: Machine, smaller: dict[Value, Value | None]) -> Statement:
    st = replace(st, words={**st.words, "wn": workspace(st.spec, st.words, machine.on)[0]})
    operands = dict(st.operands)
    for o in st.spec.operands:
        v = operands[o.name]
        if o.access == "s" and v is not None:
            elems = machine.size(o.elems, st)
            smaller[v] = operands[o.name] = replace(v, elems=elems) if at_most(elems, MAX_BATCH) else None
    return replace(st, operands=operands)

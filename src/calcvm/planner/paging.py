"""Paging: values that are moved to a file between two reads, as statements among the others.

A value that is moved has a page, written once, directly after what makes the value; what brings it back makes a new version
of it, as where a value is made again (`calcvm.planner.recompute`).
"""

from __future__ import annotations

from dataclasses import replace

from calcvm.ops.paging import PAGE_AHEAD, PAGE_IN, PAGE_OUT
from calcvm.ops.spec import RowSpec
from calcvm.ops.statement import Statement, Value
from calcvm.ops.types import CELLS, instance_of


def page_of(v: Value, name: str) -> Value:
    """What holds a value's numbers in the file."""
    return replace(v, name=name, kind="page", resident=False, persistent=False)


def page_out(v: Value, page: Value, at: Statement, itemsize: int) -> Statement:
    """Write a value to its page, after a statement."""
    return _moved(PAGE_OUT, v, {"x": v, "page": page}, at, itemsize)


def page_ahead(page: Value, at: Statement, itemsize: int) -> Statement:
    """Say that a page will be read, before a statement."""
    return _moved(PAGE_AHEAD, page, {"page": page}, at, itemsize)


def page_in(page: Value, v: Value, at: Statement, itemsize: int) -> Statement:
    """Read a value from a page, before a statement."""
    return _moved(PAGE_IN, v, {"page": page, "y": v}, at, itemsize)


def _moved(row: RowSpec, v: Value, operands: dict[str, Value], at: Statement, itemsize: int) -> Statement:
    spec = row.of((instance_of(CELLS, v.type, f"float{8 * itemsize}"),))
    return Statement(
        spec=spec,
        words={"n": v.elems},
        operands=operands,
        path=at.path,
        phase=at.phase,
        label=f"{v.name} to or from disk",
    )

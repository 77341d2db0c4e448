"""Paging: values that are moved to a file between two reads, as statements among the others.

A value that is moved has a page, written once, directly after what makes the value; what brings it back makes a new version
of it, as where a value is made again (`calcvm.planner.recompute`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from calcvm.ops.paging import PAGE_AHEAD, PAGE_IN, PAGE_OUT
from calcvm.ops.spec import RowSpec
from calcvm.ops.statement import Statement, Value
from calcvm.ops.types import CELLS, instance_of
from calcvm.record import record

BANDWIDTH = 1e9  # bytes a second of a file, where nothing is said


@record
class File:
    """Where pages are: bytes that there is room for, and bytes a second to it and from it."""

    room: int
    bandwidth: float = BANDWIDTH

    def seconds(self, nbytes: int) -> float:
        """Of one way."""
        return nbytes / self.bandwidth


def page_of(v: Value) -> Value:
    """What holds a value's numbers in the file."""
    return replace(v, kind="page", resident=False, persistent=False)


def page_out(v: Value, page: Value, at: Statement, itemsize: int) -> Statement:
    """Write a value to its page, after a statement."""
    return _moved(PAGE_OUT, v, {"x": v, "page": page}, at, itemsize)


def page_ahead(page: Value, at: Statement, itemsize: int) -> Statement:
    """Say that a page will be read, before a statement."""
    return _moved(PAGE_AHEAD, page, {"page": page}, at, itemsize)


def page_in(page: Value, v: Value, at: Statement, itemsize: int) -> Statement:
    """Read a value from a page, before a statement."""
    return _moved(PAGE_IN, v, {"page": page, "y": v}, at, itemsize)


def with_reads_ahead(statements: Sequence[Statement], itemsize: int) -> list[Statement]:
    """Statements of a path, in which each page is read ahead from where the one before it is read; the first from the backward on."""
    first = next((t for t, st in enumerate(statements) if st.phase == "backward"), len(statements))
    reads = [t for t, st in enumerate(statements) if st.spec.name.partition(".")[0] == PAGE_IN.name]
    ahead: dict[int, list[Statement]] = {}
    for t, before in zip(reads, [min(first, *reads), *reads] if reads else ()):
        page = statements[t].operands["page"]
        assert page is not None
        if before < t:
            ahead.setdefault(before, []).append(page_ahead(page, statements[before], itemsize))
    return [st for t, own in enumerate(statements) for st in (*ahead.get(t, ()), own)]


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

"""Paging: moving values to a file between two reads, by statements among the others.

A paged value has one page, written once, directly after the statement that makes the value.  Reading the page makes a new
version of the value, as recomputation does (`calcvm.planner.recomputation.search`).

One search weighs recomputation against paging, as in POET (Patil et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Any

from calcvm.errors import PlanError
from calcvm.frozen import frozen
from calcvm.ops.paging import PAGE_AHEAD, PAGE_IN, PAGE_OUT
from calcvm.ops.spec import RowSpec
from calcvm.ops.statement import Lowered, Statement, Value, Versions
from calcvm.ops.types import CELLS, instance_of
from calcvm.planner.lifetimes import Machine, at_most, effects

BANDWIDTH = 1e9  # bytes per second of a file, by default
PAGE: dict[str, Any] = {
    "kind": "page",
    "resident": False,
    "persistent": False,
}  # facts of the value that holds another one's numbers in the file


@frozen
class File:
    """The page file: its capacity in bytes, and its bandwidth in bytes per second for reads and for writes."""

    room: int
    bandwidth: float = BANDWIDTH

    def seconds(self, nbytes: int) -> float:
        """Seconds to read or to write ``nbytes``."""
        return nbytes / self.bandwidth

    def cost(self, of_row: Callable[[Statement], float], batch: int, machine: Machine) -> Callable[[Statement], float]:
        """A function from any statement to seconds: ``of_row`` for rows, the bandwidth for paging statements."""

        def cost(st: Statement) -> float:
            if not is_paging(st):
                return of_row(st)
            return self.seconds(moved_bytes(st, batch, machine))

        return cost


def page_out(v: Value, page: Value, at: Statement, itemsize: int) -> Statement:
    """A statement that writes a value to its page, to insert after statement ``at``."""
    return _moved(PAGE_OUT, v, {"x": v, "page": page}, at, itemsize, f"{v.name} to the file")


def page_ahead(page: Value, at: Statement, itemsize: int) -> Statement:
    """A statement that announces the read of a page, to insert before statement ``at``."""
    return _moved(PAGE_AHEAD, page, {"page": page}, at, itemsize, f"{page.name} soon")


def page_in(page: Value, v: Value, at: Statement, itemsize: int) -> Statement:
    """A statement that reads a value from a page, to insert before statement ``at``."""
    return _moved(PAGE_IN, v, {"page": page, "y": v}, at, itemsize, f"{v.name} from the file")


def is_paging(st: Statement) -> bool:
    """Whether a statement reads or writes a page."""
    return any(o.paged for o in st.spec.operands)


def moved_bytes(st: Statement, batch: int, machine: Machine) -> int:
    """Bytes that a statement moves to or from the file."""
    moves = is_paging(st) and len(st.operands) > 1  # an announcement moves nothing
    return at_most(machine.extent(st.spec.operands[0], st), batch) if moves else 0


def with_reads_ahead(lowered: Lowered, itemsize: int) -> Lowered:
    """The program with read-ahead: each page is announced at the read of the previous one, the first page as early as possible."""
    ahead: dict[int, list[Statement]] = {}
    before: int | None = None
    ready: dict[Value, int] = {}  # the statement from which on a page can be read
    start = 0
    for t, st in enumerate(lowered.statements):
        if t and st.path != lowered.statements[t - 1].path:
            before, start = None, t
        page = st.operands.get("page")
        if page is None or not is_paging(st):
            continue
        if st.spec.name.startswith(PAGE_OUT.name):
            ready[page] = t + 1
            continue
        early = max(start if before is None else before, ready.get(page, start))
        if early < t:
            ahead.setdefault(early, []).append(page_ahead(page, lowered.statements[early], itemsize))
        before = t
    if not ahead:
        return lowered
    statements = (st for t, own in enumerate(lowered.statements) for st in (*ahead.get(t, ()), own))
    return replace(lowered, statements=tuple(statements))


def _moved(row: RowSpec, v: Value, operands: dict[str, Value], at: Statement, itemsize: int, label: str) -> Statement:
    spec = row.of((instance_of(CELLS, v.type, f"float{8 * itemsize}"),))
    return Statement(spec=spec, words={"n": v.elems}, operands=operands, path=at.path, phase=at.phase, label=label)


# ---------------------------------------------------------------- values that persist in the file
LARGE = 16384  # bytes from which on a value may persist there
KINDS = ("optimizer", "parameter")  # kinds that may, first those that a step reads least often


def left_in(file: File, lowered: Lowered, machine: Machine) -> File:
    """The file without the room of the values that persist there (PlanError: it is too small for them)."""
    needed = sum(machine.up(at_most(machine.bytes(v), 1)) for v in lowered.paged)
    if needed > file.room:
        raise PlanError(
            f"values that persist in the file take {needed:,} bytes, page_bytes= allows {file.room:,}: allow more there, or more memory",
            needed,
            file.room,
        )
    return replace(file, room=file.room - needed)


def may_persist(lowered: Lowered, kinds: Sequence[str], machine: Machine) -> list[Value]:
    """Large values of some kinds, which may persist in the file: by kind, the largest first."""
    sizes = {v: at_most(machine.bytes(v), 1) for v in lowered.values if v.kind in kinds and v.persistent}
    return sorted((v for v in sizes if sizes[v] >= LARGE), key=lambda v: (kinds.index(v.kind), -sizes[v]))


def streamed(lowered: Lowered, paged: Set[Value], machine: Machine) -> Lowered:
    """The program with values that persist in the file.

    Each statement works on a copy in the heap.  The copy lives as long as consecutive statements use it, and is written
    back after each that changes it.
    """
    versions = Versions(lowered.values)
    out: list[Statement] = []
    here: dict[Value, Value] = {}  # copies that the previous statement used
    for t, st in enumerate(lowered.statements):
        if t and lowered.statements[t - 1].path != st.path:
            here = {}
        used = {v for v in st.operands.values() if v is not None and v in paged}
        copies: dict[Value, Value] = {}
        for v in sorted(used, key=lambda v: v.name):
            if v in here:
                copies[v] = here[v]
                continue
            copies[v] = versions.another(v, "here", kind="activation", persistent=False)
            out.append(page_in(v, copies[v], st, machine.itemsize))
        here = copies
        _, written = effects(st)
        out.append(st.with_values(copies))
        out += [page_out(copies[v], v, st, machine.itemsize) for v in sorted(used & written, key=lambda v: v.name)]
    return replace(lowered, statements=tuple(out), values=tuple(versions.values), paged=frozenset(paged))

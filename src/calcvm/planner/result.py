"""What the planner answers: where every value lies, in which order, and how many bytes that takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import gcd
from os import PathLike
from typing import Any, NoReturn

from calcvm import checks
from calcvm.errors import CalcError
from calcvm.lazy import cached_property
from calcvm.ops.dims import Affine
from calcvm.ops.statement import Lowered, Statement, Value
from calcvm.planner.layout import Layout
from calcvm.planner.lifetimes import LINE
from calcvm.record import record
from calcvm.tables import preformatted


@record
class Zone:
    """A contiguous stretch of the heap, and what values of that zone need.

    start_elems, stop_elems : the zone's own stretch; persistent alone, but for "arena", which the
        resident and transient values of all zones share.
    persistent_bytes : bytes that live between steps; what a model switch copies.
    resident_bytes : bytes that are never shared, but need not be copied.
    transient_bytes : largest total of this zone's transient values that are live at once.
    """

    name: str
    start_elems: int
    stop_elems: int
    bytes: int
    persistent_bytes: int = 0
    resident_bytes: int = 0
    transient_bytes: int = 0


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """A plan allocates nothing; it says what a heap will hold.

    lowered : the program in its final order, with merged rows; ``statements`` are its rows.
    offsets : first element of every value that has cells, in elements of its type (a block's is its first member's).
    sync : whether each statement is followed by a barrier.
    zones : by name: reserved, forward, optimizer, gradient, workspace, arena; beyond the heap, where there are some, pages.
    heap_elems, heap_bytes : what is allocated, exactly.
    lower_bound_bytes : no packing of these statements in this order needs less.
    live_bytes : bytes that must exist at each statement; ``peak`` is the statement with most.
    blocks : members of each value that spans several (merged updates).
    again : statements that run again to save memory, each with the one that it repeats.
    overhead : the time that they take by ``costs``, as a fraction of the step without them; with what moving pages takes.
    lower_bound : what no schedule takes less time than, as the same fraction (None: no solver worked).
    proved : so that none takes less than this one.
    solver : which solvers looked for it, how long and with what success, or why they did not ("": none was asked).
    solver_seconds : what they took.
    memory_bytes : the budget that it was planned for, if one was given.
    costs : what the work of statements was told from: "reckoned", "measured" or "given".
    seconds : that a step of the longest path takes by them (None: they are reckoned, or nobody asked for a batch).
    seconds_without : that one takes which makes nothing again, with as little scratch, where rows are measured (None: likewise,
        or nothing is made again).  Both are of rows that find their operands as warm as in their step; ``overhead`` is not.
    device_bytes : of a program for a GPU, all that is allocated there to run it, by what it is for.
    """

    lowered: Lowered
    offsets: Mapping[Value, int]
    sync: tuple[bool, ...]
    zones: Mapping[str, Zone]
    heap_elems: int
    itemsize: int
    batch_size: int
    workers: int
    live_bytes: tuple[int, ...]
    lower_bound_bytes: int
    blocks: Mapping[Value, tuple[Value, ...]]
    layout: Layout = field(repr=False)
    effort: int = field(repr=False, default=0)
    device_bytes: Mapping[str, int] = field(default_factory=dict)
    again: Mapping[Statement, Statement] = field(repr=False, default_factory=dict)
    overhead: float = 0.0
    lower_bound: float | None = None
    proved: bool = False
    solver: str = ""
    solver_seconds: float = 0.0
    memory_bytes: int | None = None
    costs: str = "reckoned"
    seconds: float | None = None
    seconds_without: float | None = None

    @property
    def statements(self) -> tuple:
        return self.lowered.statements

    @property
    def heap_bytes(self) -> int:
        return self.heap_elems * self.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of the file that values are moved to meanwhile (0: none are)."""
        return self.zones["pages"].bytes if "pages" in self.zones else 0

    @property
    def device_total(self) -> int:
        """Bytes that the program takes on a GPU, data sets apart (0: it is for another device)."""
        return sum(self.device_bytes.values())

    @property
    def gap(self) -> float:
        """How far the heap is above the lower bound, as a fraction of it."""
        return self.heap_bytes / self.lower_bound_bytes - 1

    @property
    def peak(self) -> int:
        """The first statement at which most bytes are live."""
        return max(range(len(self.live_bytes)), key=lambda t: (self.live_bytes[t], -t))

    @property
    def save_all_bytes(self) -> int:
        """Bytes if nothing shared cells: every value in its own."""
        blocks, machine = self.blocks, self.layout.machine
        values = [v for v in self.offsets if v not in blocks and v.kind != "page"]
        own = sum(machine.up(machine.bytes(v).at(self.batch_size)) for v in values)
        return self.layout.reserved + own

    def bytes_at(self, batch: int) -> int:
        """Bytes that must exist at the peak of a batch, cache lines included: the packer may add a gap."""
        batch = checks.integer("bytes_at: batch", batch)
        return max(self.layout.load(batch))

    def required(self, batch: int) -> int:
        """Exact heap bytes of a plan for another batch, in the same order."""
        batch = checks.integer("required: batch", batch)
        return self.heap_bytes if batch == self.batch_size else self.layout.required(batch, self.effort)

    @cached_property
    def _peak_form(self) -> tuple[Affine, int]:
        """Bytes live at the peak as a form of the batch, and how much rounding up may add."""
        t = self.peak
        units = [u for zone in self.layout.persistent.values() for u in zone] + list(self.layout.resident)
        units += [u for u in self.layout.transient if u.first <= t <= u.last]
        form, rounded = Affine(0, self.layout.reserved), 0
        for u in units:
            if u.bytes.constant:
                form += self.layout.machine.up(u.bytes.at(1))
            else:
                own = u.bytes.around(self.batch_size)
                form += own
                rounded += LINE - gcd(LINE, own.a, own.b)
        return form, rounded

    @property
    def formula(self) -> str:
        """Bytes live at the peak statement as a form of the batch size."""
        form, rounded = self._peak_form
        slack = f"up to {rounded} bytes more for alignment" if rounded else "exact at the peak"
        return f"{form} bytes ({slack}; the packing adds {self.heap_bytes - self.lower_bound_bytes})"

    def report(self) -> list[dict[str, Any]]:
        """One dict a statement, of plain numbers, texts and lists.

        index, path, phase, row (the instruction), label (the operator), device, sync (a barrier follows), again (the statement
        that it repeats to save memory, or None); operands, each with its name, whether it is read and written, and its values
        by their places in ``to_dict()["values"]``; bytes_before, live_bytes, bytes_after: that live when it begins, while it
        runs and when it has ended; peak_bytes, most until then; peak, whether it is `peak`; dies, names of the values that
        nobody reads later; in_place, of a value that it makes the one whose cells it takes.
        """
        return self.to_dict()["statements"]

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, for JSON: what it was planned for, bytes, zones, "statements" as `report`, and "values".

        A value: name, kind, zone, shape, bytes, start_byte in the heap, first and last statement of its life, whether its
        cells are shared with other values, whether it is persistent, and whether it is paged: beyond the heap, in the file.
        """
        from calcvm.planner.document import document

        return document(self)

    def html(self, path: str | PathLike[str]) -> None:
        """Write one page that needs nothing else: the heap, live bytes, graph and statements, linked on hover.

        Where values are made again, also the matrices of what is computed and what is kept in each stage of the backward
        (R and S of Jain et al. 2020, Checkmate).

        Raises
        ------
        FileError : it cannot be written.
        """
        from calcvm.planner.page import write

        write(self, path)

    def __copy__(self) -> Plan:
        return self

    def __deepcopy__(self, memo: Any) -> Plan:
        return self

    def __reduce__(self) -> NoReturn:
        raise CalcError("a plan is not pickled: it belongs to its graph; cv.compile makes a program of it, which is")

    def describe(self, max_rows: int | None = 40) -> str:
        """The tables of `str`; long programs are elided in the middle (None: all rows)."""
        from calcvm.planner.report import describe

        return describe(self, None if max_rows is None else checks.integer("describe: max_rows", max_rows))

    def picture(self, path: str) -> None:
        """Draw the heap over the statements into an image file (needs the extra ``plot``)."""
        from calcvm.planner.picture import picture

        picture(self, path)

    def __repr__(self) -> str:
        rows = f"{len(self.statements)} rows, paths {', '.join(self.lowered.paths)}"
        return f"<Plan: batch {self.batch_size:,}, {self.heap_bytes:,} bytes, {rows}>"

    def __str__(self) -> str:
        return self.describe()

    def _repr_html_(self) -> str:
        return preformatted(str(self))

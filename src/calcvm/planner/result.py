"""The plan as users see it: its data and their views."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Any, NoReturn

from calcvm import checks, hints
from calcvm.errors import CalcError
from calcvm.planner.plan_data import PlanData, Zone
from calcvm.tables import preformatted

__all__ = ["Plan", "Zone"]


@hints.names_of_others
@dataclass(frozen=True, eq=False, repr=False)
class Plan(PlanData):
    """The layout of a heap: order, offsets and bytes.  A plan allocates nothing.

    lowered : the program in its final order, with merged rows; ``statements`` are its rows.
    offsets : first element of every value that has cells, in elements of its type (a block has its first member's offset).
    sync : whether a barrier follows each statement.
    zones : by name: reserved, forward, optimizer, gradient, workspace, arena; beyond the heap, if there are any, pages.
    heap_elems, heap_bytes : the exact size of the heap.
    lower_bound_bytes : no packing of these statements in this order needs less.
    live_bytes : bytes that are live at each statement; ``peak`` is the statement with the most.
    blocks : members of each value that spans several (merged updates).
    recomputed : recomputed statements, each with the statement that it repeats.
    overhead : time for recomputing and paging as predicted by ``costs``, as a fraction of the step without them.
    lower_bound : lower bound of the overhead of any schedule (None: no solver ran).
    proved : whether the bound proves that no schedule takes less time.
    solver : the solvers that ran, their time and success, or why they did not run ("": none was requested).
    solver_seconds : the time that they took.
    memory_bytes : the memory budget, if one was given.
    costs : where the costs of rows come from: "reckoned", "measured" or "given".
    seconds : predicted time of a step of the longest path (None: costs are reckoned, or no batch was given).
    seconds_without : predicted time of a step that recomputes nothing and has as little scratch (None: costs are not measured, or
        nothing is recomputed).  With measured costs, both include cache hits from row to row; ``overhead`` does not.
    device_bytes : for a GPU, all bytes allocated there to run the program, by purpose.

    Examples
    --------
    >>> graph = cv.build_graph(nn.Linear(2), (4,), "mse", cv.SGD(0.1))
    >>> plan = cv.plan(graph, batch_size=32, workers=1, accumulate=False)
    >>> plan.bytes_at(16) < plan.heap_bytes == plan.bytes_at(32)
    True
    """

    def report(self) -> list[dict[str, Any]]:
        """One dict per statement, of plain numbers, texts and lists.

        index, path, phase, row (the instruction), label (the operator), device
        sync : whether a barrier follows.
        repeats : index of the statement that it repeats to save memory, or None.
        operands : for each its name, whether it is read and written, and the indices of its values in ``to_dict()["values"]``.
        bytes_before, live_bytes, bytes_after : live bytes before, during and after the statement.
        peak_bytes : the most live bytes so far.  peak : whether it is the statement `peak`.
        dies : names of the values that no later statement reads.
        in_place : for each value that it writes in place, the name of the value whose cells it takes.
        """
        return self.to_dict()["statements"]

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, for JSON: options, bytes, zones, "statements" as in `report`, and "values".

        A value has its name, kind, zone, shape, bytes, start_byte in the heap, first and last statement of its life, and
        whether it shares its cells with other values, is persistent, and is paged (in the file, beyond the heap).
        """
        from calcvm.planner.views.document import document

        return document(self)

    def html(self, path: str | PathLike[str]) -> None:
        """Write one self-contained HTML page: the heap, live bytes, graph and statements, linked on hover.

        If values are recomputed, it also shows which values are computed and kept in each stage of the backward (the
        matrices R and S of Jain et al. 2020, Checkmate).

        Raises
        ------
        FileError : the file cannot be written.
        """
        from calcvm.planner.views.page import write

        write(self, path)

    def __copy__(self) -> Plan:
        return self

    def __deepcopy__(self, memo: Any) -> Plan:
        return self

    def __reduce__(self) -> NoReturn:
        raise CalcError("a plan is not pickled: it belongs to its graph; cv.compile makes a program of it, which is")

    def describe(self, max_rows: int | None = 40) -> str:
        """The tables of `str`; a long program is elided in the middle (``max_rows=None``: all rows)."""
        from calcvm.planner.views.report import describe

        return describe(self, None if max_rows is None else checks.integer("describe: max_rows", max_rows))

    def picture(self, path: str) -> None:
        """Draw the heap over the statements into an image file (needs the extra ``plot``)."""
        from calcvm.planner.views.picture import picture

        picture(self, path)

    def __repr__(self) -> str:
        rows = f"{len(self.statements)} rows, paths {', '.join(self.lowered.paths)}"
        return f"<Plan: batch {self.batch_size:,}, {self.heap_bytes:,} bytes, {rows}>"

    def __str__(self) -> str:
        return self.describe()

    def _repr_html_(self) -> str:
        return preformatted(str(self))

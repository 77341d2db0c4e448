"""Seconds of a statement: estimated from its declared operations and the bytes that it touches, or given by the user."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from calcvm import checks
from calcvm.errors import CalcError
from calcvm.ops.sizes import evaluate
from calcvm.ops.statement import Lowered, Statement
from calcvm.planner.lifetimes import Machine, at_most, operands

FLOPS = 100e9  # per second and core: only the ratio to BYTES matters
BYTES = 15e9  # per second, in and out of caches
ROW = 1e-7  # seconds of an empty row
MOST = 1e6  # the largest seconds that a table may give for a row

Table = Mapping[str, float] | Callable[[dict[str, Any]], float]  # from the user: see `told`


def seconds(st: Statement, batch: int, machine: Machine) -> float:
    """Estimated seconds with one worker: the longer of its arithmetic and its memory traffic."""
    return ROW + max(_flops(st, batch) / FLOPS, _moved(st, batch, machine) / BYTES)


def _flops(st: Statement, batch: int) -> float:
    return float(evaluate(st.spec.flops, st.words_at(batch)))


def _moved(st: Statement, batch: int, machine: Machine) -> int:
    return sum(at_most(machine.extent(o, st), batch) for o, _ in operands(st) if o.access != "s")


def told(table: Table, lowered: Lowered, batch: int, machine: Machine) -> Callable[[Statement], float]:
    """A function from a statement to its seconds, by the user's table.

    Parameters
    ----------
    table : mapping from labels or names of rows to seconds, or a function of a statement's facts: row, label, path, phase,
        operations, bytes, batch, workers.  A label takes precedence; rows that are not named get the estimate.
    lowered : the program; a mapping may only name its rows and labels.

    Raises
    ------
    CalcError : the mapping has an unknown name; from the returned function, seconds that are not a number >= 0.
    """
    if isinstance(table, Mapping):
        known = {name for st in lowered.statements for name in (st.spec.name, st.label)}
        strange = next((name for name in table if name not in known), None)
        if strange is not None:
            rows = ", ".join(sorted({st.spec.name for st in lowered.statements}))
            raise CalcError(f"costs: there is no row and no label {checks.shown(strange)}; rows are {rows}")

    def cost(st: Statement) -> float:
        if not isinstance(table, Mapping):
            found: Any = table(facts(st, batch, machine))
        elif st.label in table or st.spec.name in table:
            found = table[st.label if st.label in table else st.spec.name]
        else:
            return seconds(st, batch, machine)
        return checks.number(f"costs: seconds of row {st.spec.name!r} (of {st.label or 'no operator'})", found, 0, MOST)

    return cost


def facts(st: Statement, batch: int, machine: Machine) -> dict[str, Any]:
    """The argument of the user's function."""
    return {
        "row": st.spec.name,
        "label": st.label,
        "path": st.path,
        "phase": st.phase,
        "operations": _flops(st, batch),
        "bytes": _moved(st, batch, machine),
        "batch": batch,
        "workers": machine.workers,
    }


def of_step(statements: Iterable[Statement], cost: Callable[[Statement], float]) -> float:
    """Seconds of the longest path."""
    totals = dict[str, float]()
    for st in statements:
        totals[st.path] = totals.get(st.path, 0.0) + cost(st)
    return max(totals.values(), default=0.0)

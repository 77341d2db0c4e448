"""In-place writes: a value takes over the storage of a value that dies at the same statement."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from calcvm.ops.statement import Lowered, Statement, Value
from calcvm.planner.lifetimes import Machine, operands


def in_place(
    lowered: Lowered, live: Mapping[Value, tuple[int, int]], pinned: Collection[Value], machine: Machine
) -> dict[Value, Value]:
    """For each value, the value whose storage it uses: the head of its chain (itself, if it owns storage).

    Parameters
    ----------
    live : first and last touch of every value.
    pinned : values that keep their own storage: persistent, resident, or in a block.
    """
    head: dict[Value, Value] = {v: v for v in live}
    end: dict[Value, int] = {v: last for v, (_, last) in live.items()}  # of a chain, stored at its head
    for t, st in enumerate(lowered.statements):
        for written, read in st.spec.in_place:
            y, x = st.operands.get(written), st.operands.get(read)
            if y is None or x is None or y is x or y in pinned or x in pinned:
                continue
            if live[y][0] != t or head[y] is not y or end[head[x]] != t:
                continue
            if may_take(st, written, read, machine):
                head[y] = head[x]
                end[head[x]] = live[y][1]
    return head


def may_take(st: Statement, written: str, read: str, machine: Machine) -> bool:
    """Whether ``written`` may take the storage of ``read`` if that dies: both are whole values of equal size."""
    y, x = st.operands.get(written), st.operands.get(read)
    return (
        y is not None
        and x is not None
        and (y.elems, machine.element(y)) == (x.elems, machine.element(x))
        and _alone(st, written, y, x)
        and _covers(machine, st, written, y)
        and _covers(machine, st, read, x)
    )


def _covers(machine: Machine, st: Statement, name: str, v: Value) -> bool:
    """Whether the operand is the whole value."""
    return not st.shifts.get(name) and machine.extent(st.spec.operand(name), st) == machine.bytes(v)


def _alone(st: Statement, written: str, y: Value, x: Value) -> bool:
    """Whether no other operand is y, and every operand that is x may share storage with ``written``."""
    return all(
        (v is not y or o.name == written) and (v is not x or (written, o.name) in st.spec.in_place)
        for o, v in operands(st)
    )

"""From an assignment to one program per device, and a schedule of stretches of rows and copies of values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from calcvm.frozen import frozen
from calcvm.ops.exchange import RECEIVE, SEND
from calcvm.ops.spec import RowSpec
from calcvm.ops.statement import Lowered, Statement, Value, Versions
from calcvm.ops.types import CELLS, instance_of
from calcvm.planner.lifetimes import effects
from calcvm.planner.split.problem import shared_values

Section = tuple[str, str]  # path and phase


@frozen
class Stretch:
    """Rows [start, stop) of a device's program."""

    device: int
    start: int
    stop: int


@frozen
class Copy:
    """A copy of a value from one device's program to a value of another's."""

    source: int
    value: Value
    target: int
    into: Value


@frozen
class Parts:
    """The program of each device, and per section the sequence of stretches and copies."""

    lowered: tuple[Lowered, ...]
    schedule: dict[Section, list[Stretch | Copy]]

    @property
    def copies(self) -> list[Copy]:
        return [event for events in self.schedule.values() for event in events if isinstance(event, Copy)]


def parts_of(lowered: Sequence[Lowered], where: Sequence[int], home: dict[int, int], dtype: str) -> Parts:
    """Split a program into parts.

    Parameters
    ----------
    lowered : the program as lowered for each device.
    where : the device of each statement.
    home : the device of each value with a home, by the value's index.
    """
    return _Splitter(lowered, where, home, dtype).run()


class _Splitter:
    def __init__(self, lowered: Sequence[Lowered], where: Sequence[int], home: dict[int, int], dtype: str):
        self.lowered, self.where, self.home, self.dtype = lowered, where, home, dtype
        self.common = [shared_values(each) for each in lowered]
        self.place = [{v: i for i, v in enumerate(each)} for each in self.common]
        self.versions = [Versions(each.values) for each in lowered]
        self.statements: list[list[Statement]] = [[] for _ in lowered]
        self.schedule: dict[Section, list[Stretch | Copy]] = {}
        self.copied: dict[tuple[int, int], Value] = {}  # (index, device): the copy there, for all later readers
        self.written: dict[int, int] = {}  # the last statement that writes a value
        self.users: dict[int, set[int]] = {}
        for s, d in enumerate(where):
            read, written = effects(lowered[d].statements[s])
            for v in written & self.place[d].keys():
                self.written[self.place[d][v]] = s
            for v in read & self.place[d].keys():
                self.users.setdefault(self.place[d][v], set()).add(d)

    def run(self) -> Parts:
        for s, d in enumerate(self.where):
            st = self.lowered[d].statements[s]
            section = st.path, st.phase
            read, written = effects(st)
            places = self.place[d]
            here: dict[Value, Value] = {}
            for v in sorted(read & places.keys(), key=places.__getitem__):
                i = places[v]
                if i in self.home:
                    if self.home[i] != d:
                        here[v] = self.copy(i, self.home[i], d, section)
                elif (i, d) in self.copied:
                    here[v] = self.copied[i, d]
            self.emit(d, st.with_values(here), section)
            for v in sorted(written & places.keys(), key=places.__getitem__):
                i = places[v]
                if i in self.home or self.written[i] != s:
                    continue
                for other in sorted(self.users.get(i, set()) - {d}):
                    self.copied[i, other] = self.copy(i, d, other, section)
        return Parts(tuple(self.part(d) for d in range(len(self.lowered))), self.schedule)

    def part(self, d: int) -> Lowered:
        """A device's program, with the values that its statements touch, or whose home it is."""
        own = {v for st in self.statements[d] for v in st.operands.values() if v is not None}
        own |= {self.common[d][i] for i, home in self.home.items() if home == d}
        values = tuple(v for v in self.versions[d].values if v in own)
        return replace(self.lowered[d], statements=tuple(self.statements[d]), values=values)

    def emit(self, d: int, st: Statement, section: Section) -> None:
        """Append a statement to a device's program and to the schedule."""
        row = len(self.statements[d])
        self.statements[d].append(st)
        events = self.schedule.setdefault(section, [])
        if events and isinstance(last := events[-1], Stretch) and last.device == d and last.stop == row:
            events[-1] = Stretch(d, last.start, row + 1)
        else:
            events.append(Stretch(d, row, row + 1))

    def copy(self, i: int, source: int, target: int, section: Section) -> Value:
        """Copy value ``i`` from device ``source``; returns the copy on device ``target``."""
        v, other = self.common[source][i], self.common[target][i]
        there = self.versions[target].another(other, "copy", kind="activation", persistent=False, resident=False)
        self.emit(source, self.row(SEND, v, "x", section), section)
        self.schedule[section].append(Copy(source, v, target, there))
        self.emit(target, self.row(RECEIVE, there, "y", section), section)
        return there

    def row(self, row: RowSpec, v: Value, operand: str, section: Section) -> Statement:
        path, phase = section
        spec = row.of((instance_of(CELLS, v.type, self.dtype),))
        return Statement(
            spec=spec, words={"n": v.elems}, operands={operand: v}, path=path, phase=phase, label=f"copy of {v.name}"
        )

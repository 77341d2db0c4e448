"""The layout of the heap: its zones, and the storage units that share its arena.

[reserved][forward persistent][optimizer][carry][gradient persistent][arena: resident values, then transient ones]

Pages lie in a file, with addresses beyond the heap's end: values that persist there, then pages of transient values.
"""

from __future__ import annotations

from collections.abc import Mapping

from calcvm.errors import PlanError
from calcvm.frozen import frozen
from calcvm.ops.sizes import Extent
from calcvm.ops.statement import Lowered, Value
from calcvm.planner.inplace import in_place
from calcvm.planner.lifetimes import (
    Machine,
    always_live,
    at_most,
    is_persistent,
    lifetimes,
    scratch_sizes,
)
from calcvm.planner.merge import Groups
from calcvm.planner.packing.gap import close_gap
from calcvm.planner.packing.pack import Packing, load, pack

RESERVED = 16  # elements at the start of a heap, for traps
MOST_BYTES = 1 << 60  # the largest heap that is planned

PERSISTENT_ZONES = ("forward", "optimizer", "carry", "gradient")


@frozen
class Unit:
    """Cells that hold one value, a chain of values that overwrite one another, or a block of values.

    values : (value, offset in the unit in bytes).
    first, last : first and last statement of its life, inclusive.
    """

    values: tuple[tuple[Value, int], ...]
    bytes: Extent
    first: int
    last: int
    zone: str


@frozen
class Layout:
    """All of the storage except the offsets of transient units; valid for every batch size."""

    machine: Machine
    persistent: Mapping[str, tuple[Unit, ...]]  # by zone, in order
    resident: tuple[Unit, ...]
    transient: tuple[Unit, ...]
    pages: tuple[Unit, ...]
    n_statements: int

    @property
    def reserved(self) -> int:
        return self.machine.up(RESERVED * self.machine.itemsize)

    def size(self, unit: Unit, batch: int) -> int:
        """Bytes of a unit, rounded up to whole cache lines."""
        return self.machine.up(at_most(unit.bytes, batch))

    def fixed(self, batch: int) -> int:
        """Bytes below the transient part of the arena."""
        units = [u for zone in self.persistent.values() for u in zone] + list(self.resident)
        return self.reserved + sum(self.size(u, batch) for u in units)

    def load(self, batch: int) -> list[int]:
        """Live bytes at each statement."""
        sizes = [self.size(u, batch) for u in self.transient]
        live = load(sizes, [u.first for u in self.transient], [u.last for u in self.transient])
        fixed = self.fixed(batch)
        return [fixed + (live[t] if t < len(live) else 0) for t in range(max(self.n_statements, 1))]

    def pack(self, batch: int, effort: int, allowed: int = 0) -> Packing:
        """Pack the transient units; stop at a heap of ``allowed`` bytes."""
        if (least := max(self.load(batch))) > MOST_BYTES:
            raise PlanError(
                f"a batch of {batch} needs at least {least:,} bytes, which no machine has", least, allowed or None
            )
        return pack(*self._items(batch), effort=effort, enough=self._enough(batch, allowed))

    def close_gap(self, batch: int, known: Packing, seconds: float, allowed: int = 0) -> Packing:
        """A lower packing than ``known``, if there is a gap and it can be closed in time."""
        return close_gap(*self._items(batch), known, seconds=seconds, enough=self._enough(batch, allowed))

    def _items(self, batch: int) -> tuple[list[int], list[int], list[int]]:
        """Cache lines of each transient unit, and the first and last statement of its life."""
        units = self.transient
        return (
            [self.size(u, batch) // self.machine.line for u in units],
            [u.first for u in units],
            [u.last for u in units],
        )

    def _enough(self, batch: int, allowed: int) -> int:
        """Cache lines for transient units in a heap of ``allowed`` bytes."""
        return (allowed - self.fixed(batch)) // self.machine.line

    def required(self, batch: int, effort: int, allowed: int = 0) -> int:
        """Bytes of the heap with the packer's result."""
        return self.fixed(batch) + self.pack(batch, effort, allowed).height * self.machine.line

    def place(self, batch: int, packing: Packing) -> tuple[dict[Value, int], dict[str, tuple[int, int]]]:
        """Offsets of all values, in elements of their types, and [start, stop) of every zone, in bytes."""
        offsets: dict[Value, int] = {}
        bounds: dict[str, tuple[int, int]] = {"reserved": (0, self.reserved)}
        top = self.reserved

        def put(unit: Unit, start: int) -> int:
            for v, inner in unit.values:
                offsets[v] = (start + inner) // self.machine.element(v)
            return start + self.size(unit, batch)

        for zone in PERSISTENT_ZONES:
            start = top
            for unit in self.persistent[zone]:
                top = put(unit, top)
            bounds[zone] = (start, top)
        arena = top
        for unit in self.resident:
            top = put(unit, top)
        for unit, offset in zip(self.transient, packing.offsets, strict=True):
            put(unit, top + offset * self.machine.line)
        top += packing.height * self.machine.line
        bounds["arena"] = (arena, top)
        if self.pages:
            start = top
            for unit in self.pages:
                top = put(unit, top)
            bounds["pages"] = (start, top)
        return offsets, bounds


def lay_out(lowered: Lowered, groups: Groups, machine: Machine) -> Layout:
    """Storage units of a program, from lifetimes, in-place writes and blocks."""
    live = lifetimes(lowered.statements)
    always = always_live(lowered) | groups.promoted
    member_of = {v: block for block, members in groups.blocks.items() for v in members}
    pinned = always | member_of.keys() | groups.blocks.keys()
    scratch = scratch_sizes(lowered, machine)
    head = in_place(lowered, live, pinned, machine)
    chains: dict[Value, list[Value]] = {}
    for v in live:
        if v not in groups.blocks and v not in member_of:
            chains.setdefault(head[v], []).append(v)

    end = max(len(lowered.statements) - 1, 0)
    persistent: dict[str, list[tuple[tuple, Unit]]] = {zone: [] for zone in PERSISTENT_ZONES}
    resident: list[tuple[tuple, Unit]] = []
    transient: list[Unit] = []
    pages: list[Unit] = []
    kept_pages: list[Unit] = []
    created = {v: i for i, v in enumerate(lowered.values)}

    def add(values: tuple[tuple[Value, int], ...], nbytes: Extent, zone: str) -> None:
        v = values[0][0]
        spans = [live[u] for u, _ in values if u in live]
        if any(u in always and u not in groups.blocks for u, _ in values):
            unit = Unit(values, nbytes, 0, end, zone)
            if v in lowered.paged:
                kept_pages.append(unit)
            elif is_persistent(v) or v in groups.promoted:
                rank = groups.order.get(v)
                key = (rank is None, rank or (), created.get(v, len(created)))
                persistent[zone if zone in persistent else "forward"].append((key, unit))
            else:
                resident.append(((v.kind != "placeholder", created.get(v, len(created))), unit))
        elif spans:
            unit = Unit(values, nbytes, min(f for f, _ in spans), max(e for _, e in spans), zone)
            (pages if v.kind == "page" else transient).append(unit)

    done: set[Value] = set()
    for v in [*lowered.values, *live]:
        if v in done:
            continue
        if v in member_of:
            block = member_of[v]
            members, inner, at = groups.blocks[block], [], 0
            for m in members:
                inner.append((m, at))
                at += machine.up(machine.bytes(m).at(1))
            add((*inner, (block, 0)), machine.bytes(block), block.zone)
            done.update(members, (block,))
        elif v in groups.blocks:
            continue
        elif v in live:
            chain = chains.get(head[v], [])
            if head[v] is v:
                add(tuple((u, 0) for u in chain), scratch.get(v) or machine.bytes(v), v.zone)
            done.update(chain if head[v] is v else (v,))
        elif v in always:
            add(((v, 0),), machine.bytes(v), v.zone)
            done.add(v)
    return Layout(
        machine,
        {zone: tuple(u for _, u in sorted(items, key=lambda item: item[0])) for zone, items in persistent.items()},
        tuple(u for _, u in sorted(resident, key=lambda item: item[0])),
        tuple(transient),
        (*kept_pages, *pages),
        len(lowered.statements),
    )

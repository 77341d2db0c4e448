"""A plan as plain data, for reports, pages and other programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from calcvm.ops.statement import Statement, Value
from calcvm.planner.lifetimes import operands
from calcvm.planner.packing.pack import load
from calcvm.planner.plan_data import PlanData


class Document:
    """Which statement of a plan touches which value, by index.

    values : the values that have cells, without blocks; a value's number is its index here.
    touched : first and last statement of each value; for values that are always live, the first and last of the plan.
    """

    def __init__(self, plan: PlanData):
        self.plan, layout = plan, plan.layout
        self.values = [v for v in plan.offsets if v not in plan.blocks]
        self.number = {v: k for k, v in enumerate(self.values)}
        self.end = max(len(plan.statements) - 1, 0)
        self.paged = {v for u in layout.pages for v, _ in u.values}
        self.shared = {v for u in layout.transient for v, _ in u.values} | {v for v in self.paged if v.kind == "page"}
        self.touched = {v: (0, self.end) for v in self.values if v not in self.shared}
        for t, st in enumerate(plan.statements):
            for _, v in operands(st):
                for member in self.members(v):
                    if member in self.shared:
                        self.touched[member] = (self.touched.get(member, (t, t))[0], t)
        self.unit = {v: k for k, u in enumerate(layout.transient) for v, _ in u.values}

    def members(self, v: Value) -> tuple[Value, ...]:
        return tuple(self.plan.blocks.get(v, (v,)))

    def bytes_of(self, v: Value) -> int:
        return max(self.plan.layout.machine.bytes(v).at(self.plan.batch_size), 0)

    def value(self, v: Value) -> dict[str, Any]:
        """Name, kind, zone, shape, bytes, offset, lifetime, and whether its cells are shared or persistent."""
        first, last = self.touched.get(v, (0, -1))
        sizes = (v.elems,) if v.shape is None else v.shape
        return {
            "name": v.name,
            "kind": v.kind,
            "zone": v.zone,
            "shape": [n.at(self.plan.batch_size) for n in sizes],
            "bytes": self.bytes_of(v),
            "start_byte": self.plan.offsets[v] * self.plan.layout.machine.element(v),
            "first": first,
            "last": last,
            "shared": v in self.shared,
            "persistent": v.persistent,
            "paged": v in self.paged,
        }

    def statements(self) -> Iterator[dict[str, Any]]:
        """One dict per statement, in order; see `Plan.report`."""
        plan, layout = self.plan, self.plan.layout
        index = {st: t for t, st in enumerate(plan.statements)}
        long = [u for u in layout.transient if u.first < u.last]
        stays = load(
            [layout.size(u, plan.batch_size) for u in long], [u.first for u in long], [u.last - 1 for u in long]
        )
        stays = [layout.fixed(plan.batch_size) + more for more in (*stays, *[0] * (self.end + 1 - len(stays)))]
        dies: dict[int, list[str]] = {}
        for v in self.values:
            if v in self.shared and v in self.touched:
                dies.setdefault(self.touched[v][1], []).append(v.name)
        most, info = 0, plan.lowered.info
        for t, st in enumerate(plan.statements):
            most = max(most, plan.live_bytes[t])
            yield {
                "index": t,
                "path": st.path,
                "phase": st.phase,
                "row": st.spec.name,
                "label": st.label,
                "operands": [self.operand(o.name, o.access, st.needs(o), v) for o, v in operands(st)],
                "bytes_before": stays[t - 1] if t else layout.fixed(plan.batch_size),
                "live_bytes": plan.live_bytes[t],
                "bytes_after": stays[t],
                "peak_bytes": most,
                "dies": dies.get(t, []),
                "in_place": self.in_place(t, st),
                "sync": plan.sync[t],
                "peak": t == plan.peak,
                "repeats": index.get(plan.recomputed[st]) if st in plan.recomputed else None,
                "device": info.get("device", "cpu"),
            }

    def operand(self, name: str, access: str, read: bool, v: Value) -> dict[str, Any]:
        members = [m for m in self.members(v) if m in self.number]
        return {
            "operand": name,
            "reads": read,
            "writes": access != "r",
            "values": [self.number[m] for m in members],
        }

    def in_place(self, t: int, st: Statement) -> dict[str, str]:
        """Values that the statement makes in place: the name of each, and of the operand whose cells it takes."""
        found: dict[str, str] = {}
        present = [(o, v) for o, v in operands(st) if v in self.unit]
        for o, y in present:
            if o.access == "w" and self.touched[y][0] == t:
                for p, x in present:
                    same = self.unit[x] == self.unit[y] and self.plan.offsets[x] == self.plan.offsets[y]
                    if x is not y and same and p.reads and self.touched[x][1] == t:
                        found[y.name] = x.name
        return found


def document(plan: PlanData) -> dict[str, Any]:
    """See `Plan.to_dict`."""
    found = Document(plan)
    machine = plan.layout.machine
    return {
        "batch_size": plan.batch_size,
        "workers": plan.workers,
        "dtype": f"float{8 * plan.itemsize}",
        "device": plan.lowered.info.get("device", "cpu"),
        "memory_bytes": plan.memory_bytes,
        "heap_bytes": plan.heap_bytes,
        "page_bytes": plan.page_bytes,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "save_all_bytes": plan.save_all_bytes,
        "formula": plan.formula,
        "overhead": plan.overhead,
        "lower_bound": plan.lower_bound,
        "solver": plan.solver,
        "solver_seconds": plan.solver_seconds,
        "proved": plan.proved,
        "costs": plan.costs,
        "seconds": plan.seconds,
        "seconds_without": plan.seconds_without,
        "peak": plan.peak,
        "zones": [
            {
                "name": z.name,
                "start_byte": z.start_elems * machine.itemsize,
                "stop_byte": z.stop_elems * machine.itemsize,
                "persistent_bytes": z.persistent_bytes,
                "resident_bytes": z.resident_bytes,
                "transient_bytes": z.transient_bytes,
            }
            for z in plan.zones.values()
        ],
        "statements": [*found.statements()],
        "values": [found.value(v) for v in found.values],
    }

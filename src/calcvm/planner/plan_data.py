"""The planner's result as data: order, offsets and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import gcd

from calcvm import checks
from calcvm.frozen import frozen
from calcvm.lazy import cached_property
from calcvm.ops.dims import Affine
from calcvm.ops.statement import Lowered, Statement, Value
from calcvm.planner.layout import Layout


@frozen
class Zone:
    """A contiguous range of the heap, and the bytes of that zone's values.

    start_elems, stop_elems : the range.  It holds persistent values only, except in "arena", which the
        resident and transient values of all zones share.
    persistent_bytes : bytes that live between steps; a model switch copies these.
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
class PlanData:
    """The data of a `Plan`, whose docstring describes the fields."""

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
    recomputed: Mapping[Statement, Statement] = field(repr=False, default_factory=dict)
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
        """Bytes of the page file (0: no value is paged)."""
        return self.zones["pages"].bytes if "pages" in self.zones else 0

    @property
    def device_total(self) -> int:
        """Bytes that the program takes on a GPU, without data sets (0: it is for another device)."""
        return sum(self.device_bytes.values())

    @property
    def gap(self) -> float:
        """How far the heap exceeds the lower bound, as a fraction of the bound."""
        return self.heap_bytes / self.lower_bound_bytes - 1

    @property
    def peak(self) -> int:
        """The first statement with the most live bytes."""
        return max(range(len(self.live_bytes)), key=lambda t: (self.live_bytes[t], -t))

    @property
    def save_all_bytes(self) -> int:
        """Bytes if every value had its own cells."""
        blocks, machine = self.blocks, self.layout.machine
        values = [v for v in self.offsets if v not in blocks and v.kind != "page"]
        own = sum(machine.up(machine.bytes(v).at(self.batch_size)) for v in values)
        return self.layout.reserved + own

    def bytes_at(self, batch: int) -> int:
        """Live bytes at the peak for a batch, in whole cache lines; the packer may add a gap."""
        batch = checks.integer("bytes_at: batch", batch)
        return max(self.layout.load(batch))

    def required(self, batch: int) -> int:
        """Exact heap bytes of a plan for another batch with the same order."""
        batch = checks.integer("required: batch", batch)
        return self.heap_bytes if batch == self.batch_size else self.layout.required(batch, self.effort)

    @cached_property
    def _peak_form(self) -> tuple[Affine, int]:
        """Bytes live at the peak, linear in the batch, and the most that rounding up adds."""
        t, machine = self.peak, self.layout.machine
        units = [u for zone in self.layout.persistent.values() for u in zone] + list(self.layout.resident)
        units += [u for u in self.layout.transient if u.first <= t <= u.last]
        form, rounded = Affine(0, self.layout.reserved), 0
        for u in units:
            if u.bytes.constant:
                form += machine.up(u.bytes.at(1))
            else:
                own = u.bytes.around(self.batch_size)
                form += own
                rounded += machine.line - gcd(machine.line, own.a, own.b)
        return form, rounded

    @property
    def formula(self) -> str:
        """Bytes live at the peak statement, as a formula of the batch size."""
        form, rounded = self._peak_form
        slack = f"up to {rounded} bytes more for alignment" if rounded else "exact at the peak"
        return f"{form} bytes ({slack}; the packing adds {self.heap_bytes - self.lower_bound_bytes})"

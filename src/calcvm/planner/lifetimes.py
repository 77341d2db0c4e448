"""Which statement touches which value: the facts on which the rest of the planner is built.

Time is the index of a statement.  Lifetimes are inclusive.  Paths never run interleaved, and a path's
transient values need not survive another path's run, so values of different paths never overlap in time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from calcvm.frozen import frozen
from calcvm.ops.sizes import Extent, On, extent, largest, times
from calcvm.ops.spec import Operand
from calcvm.ops.statement import Lowered, Statement, Value
from calcvm.ops.types import bytes_of

LINE, WORD = 64, 8  # bytes of a cache line, and of the largest element: sizes are rounded up to either
PERSISTENT_KINDS = ("parameter", "buffer", "carry", "state", "optimizer")


def other_ways(batch: int, workers: int) -> str:
    """Other remedies for a plan that does not fit, after "allow more memory"."""
    ways = ["fewer workers"] * (workers > 1) + ["a smaller batch"] * (batch > 1)
    return f", or take {' or '.join(ways)}" if ways else ""


@frozen
class Machine:
    """What sizes depend on besides a statement's words: bytes of a float, workers, device.

    The planner counts bytes.
    """

    itemsize: int
    workers: int = 1
    device: str = "cpu"

    @property
    def gpu(self) -> bool:
        """Whether workers are thread blocks of a GPU."""
        return self.device == "cuda"

    @property
    def line(self) -> int:
        """The unit of storage in bytes."""
        return WORD if self.device == "small" else LINE

    def up(self, nbytes: int) -> int:
        """Round up to whole lines."""
        return -(-nbytes // self.line) * self.line

    def element(self, of: Value | Operand) -> int:
        """Bytes per element."""
        return bytes_of(of.type, self.itemsize)

    def bytes(self, v: Value) -> Extent:
        return times(v.elems, self.element(v))

    def size(self, expression: str, st: Statement) -> Extent:
        """Evaluate a size expression of the operator table with a statement's words."""
        return extent(expression, {**self.on._asdict(), **st.words})

    @property
    def on(self) -> On:
        return On.of(self.workers, self.device)

    def extent(self, operand: Operand, st: Statement) -> Extent:
        """Bytes of an operand that the statement may touch."""
        known = st.extents.get(operand.name)
        return times(known if known is not None else self.size(operand.elems, st), self.element(operand))

    def start(self, name: str, v: Value, st: Statement, offsets: Mapping[Value, int]) -> int:
        """The first byte of an operand."""
        return (offsets[v] + st.shifts.get(name, 0)) * self.element(v)


def at_most(size: Extent, batch: int) -> int:
    """The largest value of a size for batches from 1 to ``batch``."""
    return max(size.bounds(batch)[1], 0)


def is_persistent(v: Value) -> bool:
    return v.persistent or v.kind in PERSISTENT_KINDS


def operands(st: Statement) -> tuple[tuple[Operand, Value], ...]:
    """The operands of a statement, without those left out."""
    return st.present


def effects(st: Statement) -> tuple[frozenset[Value], frozenset[Value]]:
    """Values that a statement reads, and values that it writes (including scratch)."""
    return st.effects


def always_live(lowered: Lowered) -> set[Value]:
    """Values whose storage is never shared.

    These are persistent or resident values, values that several paths use, and values that a path may
    read before it writes them.
    """
    out = {v for v in lowered.values if is_persistent(v) or v.resident or v.kind == "placeholder"}
    path_of: dict[Value, str] = {}
    for st in lowered.statements:
        read, written = effects(st)
        out |= {v for v in read if v not in path_of}
        for v in read | written:
            if path_of.setdefault(v, st.path) != st.path:
                out.add(v)
            if is_persistent(v) or v.resident:
                out.add(v)
    return out


def lifetimes(statements: Sequence[Statement]) -> dict[Value, tuple[int, int]]:
    """First and last statement that touches each value, in order of first touch."""
    return lifetimes_of([st.touched for st in statements])


def lifetimes_of(touched: Sequence[Sequence[Value]]) -> dict[Value, tuple[int, int]]:
    """The same, from the values that each statement touches."""
    first: dict[Value, int] = {}
    last: dict[Value, int] = {}
    for t, values in enumerate(touched):
        for v in values:
            last[v] = t
            first.setdefault(v, t)
    return {v: (t, last[v]) for v, t in first.items()}


def scratch_sizes(lowered: Lowered, machine: Machine) -> dict[Value, Extent]:
    """Sizes of workspaces, from the operator table and the planned number of workers."""
    out: dict[Value, Extent] = {}
    for st in lowered.statements:
        for o, v in operands(st):
            if o.access == "s":
                out[v] = largest(machine.extent(o, st), out.get(v) or machine.bytes(v))
    return out

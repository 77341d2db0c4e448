"""What a statement takes, reckoned from its declared operations and the bytes that it touches."""

from __future__ import annotations

from calcvm.ops.sizes import evaluate
from calcvm.ops.statement import Statement
from calcvm.planner.lifetimes import Machine, at_most, operands

FLOPS = 100e9  # a second, of a core: only its ratio to the bytes matters
BYTES = 15e9  # a second, in and out of caches
ROW = 1e-7  # seconds of a row that does nothing


def seconds(st: Statement, batch: int, machine: Machine) -> float:
    """Of one worker: the longer of its arithmetic and its memory."""
    moved = sum(at_most(machine.extent(o, st), batch) for o, _ in operands(st) if o.access != "s")
    return ROW + max(float(evaluate(st.spec.flops, st.words_at(batch))) / FLOPS, moved / BYTES)

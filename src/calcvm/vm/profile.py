"""Where a step's time goes: each row measured alone."""

from __future__ import annotations

import time
from dataclasses import dataclass

from calcvm.ops.spec import OPCODES, evaluate
from calcvm.ops.statement import PHASES
from calcvm.vm import job as layout
from calcvm.vm.encoding import decode_row
from calcvm.vm.resident import Resident


@dataclass(frozen=True)
class RowTime:
    """One row: its index, instruction, label, nanoseconds a run, and floating-point operations."""

    pc: int
    name: str
    label: str
    ns: float
    flops: int

    def __str__(self) -> str:
        rate = self.flops / self.ns if self.ns else 0.0
        return f"{self.pc:5d}  {self.name:26s} {self.ns:12.1f} ns  {rate:8.1f} GFLOP/s  {self.label}"


def profile(model: Resident, path: str, *, phases: tuple[str, ...] = PHASES, seconds: float = 0.02) -> list[RowTime]:
    """Run each row of a path alone, many times in one call, and take the best of 5; the heap is restored.

    A row alone finds its operands in cache: the sum is a lower bound of the step's time.
    """
    saved = model.elements.copy()
    model.forward(path)
    out = []
    try:
        for phase in phases:
            start, stop = model._span(path, (phase,))
            for pc in range(start, stop):
                spec, words, _ = decode_row(model._rows[pc])
                flops = int(evaluate(spec.flops, {**words, "D": 8 // model.elements.itemsize}))
                ns = _best(model, pc, seconds)
                out.append(RowTime(pc, OPCODES[spec.opcode].name, model.program.labels[pc], ns, flops))
    finally:
        model.elements[:] = saved
    return out


def _best(model: Resident, pc: int, seconds: float) -> float:
    job, steps, best = model._job, 1, float("inf")
    job[layout.ROWS] = model._rows_address
    job[layout.START], job[layout.STOP] = pc, pc + 1
    spent = 0.0
    for _ in range(40):
        job[layout.STEPS] = steps
        began = time.perf_counter()
        model.execute("run_rows", job, model._job_address)
        spent = time.perf_counter() - began
        if spent > seconds / 4:
            best = min(best, spent / steps)
        else:
            steps *= 4
    return best * 1e9

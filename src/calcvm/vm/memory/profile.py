"""Where a step's time goes: each row measured alone."""

from __future__ import annotations

import time
from dataclasses import dataclass

from calcvm.ops.sizes import evaluate
from calcvm.ops.statement import PHASES
from calcvm.vm.memory.resident import Resident
from calcvm.vm.program.encoding import decode_row
from calcvm.vm.run import job as layout


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
    with model:
        saved = model.slot.snapshot()
    model.forward(path)
    rows, address = model.loaded.rows(model.record.ran[path, "forward"])
    out = []
    try:
        for phase in phases:
            start, stop = model.loaded.span(path, (phase,))
            for pc in range(start, stop):
                spec = model.program.spec(pc)
                words, _ = decode_row(spec, rows[pc])
                flops = int(evaluate(spec.flops, words))
                ns = _best(model, address, pc, seconds)
                out.append(RowTime(pc, spec.name, model.program.labels[pc], ns, flops))
    finally:
        with model:
            model.slot.fill(saved)
    return out


def _best(model: Resident, rows: int, pc: int, seconds: float) -> float:
    steps, best, spent = 1, float("inf"), 0.0
    with model:
        slot = model.slot
        for _ in range(40):
            slot.job[layout.ROWS : layout.STEPS + 1] = rows, pc, pc + 1, steps
            began = time.perf_counter()
            slot.execute("run_rows", slot.job, slot.job_address, model.workers)
            spent = time.perf_counter() - began
            if spent > seconds / 4:
                best = min(best, spent / steps)
            else:
                steps *= 4
    return best * 1e9

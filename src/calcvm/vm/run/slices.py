"""Slices of work: compiled code comes back to Python this often, where Ctrl-C is heard.

Many steps or rounds are sliced by the time that the last ones took.  How long the first may take, and where one that is
long by itself is cut, is estimated from the rows: an estimate that is far too long costs a call for each `SLICE_SECONDS` of it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from calcvm.ops.sizes import evaluate
from calcvm.ops.spec import HEADER_WORDS
from calcvm.vm.program.encoding import FLAG_SYNC, decode_row
from calcvm.vm.run import job as layout

if TYPE_CHECKING:
    from calcvm.vm.program.program import Program

SLICE_SECONDS = 0.1
LATEST_NS = 150_000_000  # after this a team or a fleet ends its slice, whatever was expected of it
FLOPS, ELEMENTS = 4e9, 5e8  # a second, that the slowest of rows computes and touches: a worker of an old processor
BRIEF_SECONDS = 20e-6  # a worker that sleeps takes longer to wake up
FAST_FLOPS, FAST_ELEMENTS = 1e11, 2e10  # a second, of a worker of a processor of today, whose data are in its caches
GROWTH = 8  # at most, from slice to slice: a measurement may be of a moment

Span = tuple[int, int]


def sliced(
    total: int, first: int, seconds: float, run: Callable[[int], float | None], marks: Sequence[int] = ()
) -> Iterator[tuple[int, float]]:
    """Run ``total`` units in slices of about ``seconds``, ``first`` at first; yields how many are done, and seconds a unit.

    marks : a slice ends where a multiple of one of them is done.
    run : what it returns is the time that the units took, where it has waited for a turn before.
    """
    done, count = 0, max(1, first)
    while done < total:
        n = min(count, total - done, *(mark - done % mark for mark in marks))
        start = time.perf_counter()
        took = run(n)
        each = max((time.perf_counter() - start if took is None else took) / n, 1e-9)
        done += n
        count = max(1, min(int(seconds / each), GROWTH * count))
        yield done, each


def latest() -> int:
    """The deadline of a job that begins now."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) + LATEST_NS


def ended(job: np.ndarray, stop: int) -> int:
    """Before which step or round a team has ended a job that was to be run up to ``stop``."""
    return min(job.item(layout.UNTIL) or stop, stop)


def work_of(program: Program, batch: int, span: Span) -> tuple[np.ndarray, np.ndarray]:
    """For each row of a span its floating-point operations, and the elements that it touches, at a batch."""
    elems = [symbol.elems.at(batch) for symbol in program.symbols]
    touched = np.array([*elems, 0])[program.operand_values[slice(*span)]].sum(axis=1)  # -1: no operand
    flops = np.zeros(len(touched))
    for pc, row in enumerate(program.rows_for(batch)[slice(*span)]):
        spec = program.spec(span[0] + pc)
        words, _ = decode_row(spec, row)
        flops[pc] = evaluate(spec.flops, words)
    return flops, touched


def seconds_of(program: Program) -> np.ndarray:
    """For each row the seconds that it may take at the largest batch."""
    flops, touched = work_of(program, program.batch_size, (0, len(program.rows)))
    return flops / FLOPS + touched / ELEMENTS


def brief_batch(program: Program, span: Span) -> int:
    """The largest batch that rows are through with before a second worker would have woken up; 0: none."""

    def too_long(batch: int) -> bool:
        flops, touched = (of.sum() for of in work_of(program, batch, span))
        return bool(flops / FAST_FLOPS + touched / FAST_ELEMENTS > BRIEF_SECONDS)

    return bisect_left(range(1, program.batch_size + 1), True, key=too_long)


def changing(program: Program) -> np.ndarray:
    """For each row whether it changes what persists."""
    persists = np.array([*(symbol.persistent for symbol in program.symbols), False])
    out = np.zeros(len(program.rows), bool)
    for pc in range(len(program.rows)):
        spec = program.spec(pc)
        for k, operand in enumerate(spec.operands, HEADER_WORDS + len(spec.words)):
            out[pc] |= operand.access != "r" and persists[program.operand_values[pc, k]]
    return out


def cut(
    spans: Sequence[Span], rows: np.ndarray, seconds: np.ndarray, changes: np.ndarray, workers: int
) -> tuple[list[Span], int]:
    """Spans of rows that are run one after the other, cut so that each part takes a slice; and how many parts they are.

    One where all of it fits in a slice.  Cuts are where a team meets anyway.  From the first row that changes what persists
    on there is one part, the last, which may be several spans: no update is left half done.
    """
    if sum(float(seconds[start:stop].sum()) for start, stop in spans) <= SLICE_SECONDS:
        return list(spans), 1
    out: list[Span] = []
    for i, (start, stop) in enumerate(spans):
        begun = start
        for pc in range(start, stop):
            if changes[pc]:
                return [*out, (begun, stop), *spans[i + 1 :]], len(out) + 1
            meets = workers == 1 or rows[pc, 1] & FLAG_SYNC
            if meets and pc + 1 < stop and seconds[begun : pc + 1].sum() > SLICE_SECONDS:
                out.append((begun, pc + 1))
                begun = pc + 1
        out.append((begun, stop))
    return out, len(out)

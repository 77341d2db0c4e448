"""Slices of work: compiled code returns to Python once per slice, so that Ctrl-C works.

The length of a slice of steps or rounds follows from the time of earlier ones.  The first slice, and the cuts of a long step,
are estimated from the rows.  If the estimate is far too long, it costs one call per estimated `SLICE_SECONDS`.

From its first row that changes something persistent on, a long step is one part.  That row is mostly an update; with updates
inlined it is in the backward, with dropout in the forward.
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
from calcvm.vm.run import job as J

if TYPE_CHECKING:
    from calcvm.vm.program.program import Program

SLICE_SECONDS = 0.1
LATEST_NS = 150_000_000  # a team or a fleet ends its slice after this time, whatever the estimate
FLOPS, ELEMENTS = 4e9, 5e8  # per second, for the slowest rows on one worker of an old processor
BRIEF_SECONDS = 20e-6  # waking up a sleeping worker takes longer
FAST_FLOPS, FAST_ELEMENTS = 1e11, 2e10  # per second, for one worker of a current processor with its data in caches
GROWTH = 8  # upper limit from slice to slice: a single measurement may be an outlier

Span = tuple[int, int]


def sliced(
    total: int, first: int, seconds: float, run: Callable[[int], float | None], marks: Sequence[int] = ()
) -> Iterator[tuple[int, float]]:
    """Run ``total`` units in slices of about ``seconds``, the first of ``first`` units; yields units done and seconds per unit.

    marks : a slice ends when a multiple of one of them is reached.
    run : returns the time that the units took, if the call also waited for a turn; else None.
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
    """The deadline of a job that starts now."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) + LATEST_NS


def ended(job: np.ndarray, stop: int) -> int:
    """The step or round before which a team ended a job; ``stop`` if it ran to the end."""
    return min(job.item(J.UNTIL) or stop, stop)


def work_of(program: Program, batch: int, span: Span) -> tuple[np.ndarray, np.ndarray]:
    """The floating-point operations and the elements touched, for each row of a span at a batch."""
    most = program.batch_size  # a carry has the elements of all samples, of which a batch touches its own
    elems = [s.elems.b * batch // most if s.kind == "carry" else s.elems.at(batch) for s in program.symbols]
    touched = np.array([*elems, 0])[program.operand_values[slice(*span)]].sum(axis=1)  # -1: no operand
    flops = np.zeros(len(touched))
    for pc, row in enumerate(program.rows_for(batch)[slice(*span)]):
        spec = program.spec(span[0] + pc)
        words, _ = decode_row(spec, row)
        flops[pc] = evaluate(spec.flops, words)
    return flops, touched


def seconds_of(program: Program) -> np.ndarray:
    """An upper estimate of each row's seconds at the largest batch."""
    flops, touched = work_of(program, program.batch_size, (0, len(program.rows)))
    return flops / FLOPS + touched / ELEMENTS


def brief_batch(program: Program, span: Span) -> int:
    """The largest batch whose rows finish before a second worker would have woken up; 0: none."""

    def too_long(batch: int) -> bool:
        flops, touched = (of.sum() for of in work_of(program, batch, span))
        return bool(flops / FAST_FLOPS + touched / FAST_ELEMENTS > BRIEF_SECONDS)

    return bisect_left(range(1, program.batch_size + 1), True, key=too_long)


def changing(program: Program) -> np.ndarray:
    """For each row whether it changes persistent values."""
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
    """Cut consecutive spans of rows into parts of about a slice; returns the spans and the number of parts.

    There is one part if everything fits in a slice.  Cuts are at barriers, where a team meets anyway.  The last part starts at
    the first row that changes persistent values, and may have several spans, so that no update is left unfinished.
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

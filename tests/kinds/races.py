"""A race detector that needs neither luck nor cores: one thread plays a team, in orders that a seed draws.

Between two barriers the workers of a team may be anywhere: each does its share of one row after the other, and how
the shares of different workers follow each other is chance.  `races` calls the kernels as the VM does, share by
share, in orders that are as unlike as possible, and compares the heap at each barrier with that of a team of one, bit
for bit.  What scratch holds is nobody's.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import calcvm as cv
from calcvm.kernels_cpu import address_of
from calcvm.ops.sizes import evaluate
from calcvm.ops.types import bytes_of
from calcvm.vm.program.encoding import FLAG_SYNC, aligned, decode_row, phases_of
from calcvm.vm.program.program import Program

NATIVE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3)
Call = Callable[[str, int, int, int, int, int], None]  # instruction, heap, row (addresses), worker, team, phase
Inputs = Callable[[int], Mapping[str, np.ndarray]]  # data for the placeholders, for a batch


class Race(AssertionError):
    """A cell depends on how the workers' shares followed each other."""


def put(model: Any, name: str, array: np.ndarray) -> None:
    """Set a placeholder, or a buffer."""
    if name in model.buffers:
        model.buffers[name][...] = array
    else:
        model[name] = array


def races(
    program: Program,
    inputs: Inputs,
    *,
    batches: Sequence[int] = (),
    teams: Sequence[int] = (2, 3, 5),
    seed: int = 0,
    draws: int = 2,
    call: Call | None = None,
) -> int:
    """Play teams over all paths of a program, twice each; returns how many orders were played.

    Parameters
    ----------
    inputs : batch -> arrays by placeholder.
    batches : 1, 2 and the largest, unless given.
    teams : sizes; those above the program's workers are left out, as there is no scratch for them.
    draws : random orders beside those that are played always.
    call : runs a worker's share of a row; by default the kernel.

    Raises
    ------
    Race : naming the rows since the last barrier, team, order, batch and the first cell that differs.
    """
    model = cv.CalcHeap(program.heap_bytes).create(program, seed=seed, workers=1)
    call = call or kernels(program)
    rng, played = random.Random(seed), 0
    for batch in sorted(set(batches or (1, 2, program.batch_size)) & {*range(1, program.batch_size + 1)}):
        for name, array in inputs(batch).items():
            put(model, name, array)
        with model:
            slot = model.slot
            start = slot.snapshot()
        heap, scratch = _heap(start), np.zeros(start.nbytes, bool)
        rows = program.rows_for(batch)
        for path in program.paths:
            for _ in range(2):
                for group in _groups(program, path, rows):
                    before = heap.copy()
                    for pc, phase in group:
                        call(program.spec(pc).name, heap.ctypes.data, rows[pc].ctypes.data, 0, 1, phase)
                        _mark(program, pc, rows[pc], scratch)
                    for team in (n for n in teams if 1 < n <= program.workers):
                        for how, order in _orders(len(group), team, rng, draws):
                            other = _heap(before)
                            for k, w in order:
                                pc, phase = group[k]
                                call(program.spec(pc).name, other.ctypes.data, rows[pc].ctypes.data, w, team, phase)
                            _compare(program, group, heap, other, scratch, f"batch {batch}, a team of {team}, {how}")
                            played += 1
    model.close()
    return played


def kernels(program: Program) -> Call:
    """Calls of the kernels themselves."""
    natives = {name: NATIVE(address_of(name, program.dtype, "cpu")) for name, _ in program.instructions}
    return lambda name, *arguments: natives[name](*arguments)


def _heap(elements: np.ndarray) -> np.ndarray:
    """A copy that begins on a cache line."""
    heap = aligned(elements.nbytes).view(elements.dtype)
    heap[:] = elements
    return heap


def _groups(program: Program, path: str, rows: np.ndarray) -> Iterator[list[tuple[int, int]]]:
    """Rows of a path and their phases, from one meeting of the team to the next."""
    group: list[tuple[int, int]] = []
    for (p, _), (start, stop) in program.sections.items():
        for pc in range(start, stop) if p == path else ():
            group.append((pc, 0))
            for phase in range(1, phases_of(rows[pc])):
                yield group
                group = [(pc, phase)]
            if program.rows[pc, 1] & FLAG_SYNC:
                yield group
                group = []
    if group:
        yield group


def _orders(rows: int, team: int, rng: random.Random, draws: int) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """What an order is called, and its (row, worker) pairs; each worker's rows follow each other."""
    workers, backwards = range(team), range(team)[::-1]
    yield "row by row", [(k, w) for k in range(rows) for w in workers]
    yield "row by row, the last worker first", [(k, w) for k in range(rows) for w in backwards]
    yield "a worker after the other", [(k, w) for w in workers for k in range(rows)]
    yield "a worker after the other, the last first", [(k, w) for w in backwards for k in range(rows)]
    for draw in range(draws):
        order, at = [], [0] * team
        while left := [w for w in workers if at[w] < rows]:
            w = rng.choice(left)
            for _ in range(rng.randint(1, rows - at[w])):
                order.append((at[w], w))
                at[w] += 1
        yield f"drawn order {draw}: {order}", order


def _mark(program: Program, pc: int, row: np.ndarray, scratch: np.ndarray) -> None:
    """Which cells were written as scratch last: what phases leave each other there is compared."""
    spec = program.spec(pc)
    words, offsets = decode_row(spec, row)
    alone = phases_of(row) == 1
    names = {**words, "nw": program.workers, "gpu": 0}
    for o in spec.operands:
        if o.writes and offsets[o.name] >= 0:
            size = bytes_of(o.type, program.itemsize)
            start, stop = offsets[o.name] * size, (offsets[o.name] + evaluate(o.elems, names)) * size
            scratch[start:stop] = o.access == "s" and alone


def _compare(
    program: Program,
    group: Sequence[tuple[int, int]],
    heap: np.ndarray,
    other: np.ndarray,
    scratch: np.ndarray,
    how: str,
) -> None:
    a, b = heap.view(np.uint8), other.view(np.uint8)
    found = np.flatnonzero((a != b) & ~scratch)
    found = found[~_without_numbers(program, heap, other)[found // heap.itemsize]]
    if len(found):
        byte = int(found[0])
        symbols = [s for s in program.symbols if s.start <= byte < s.start + s.bytes.at(program.batch_size)]
        told = [
            f"element {cell - s.offset} of {s.name} is {b.view(s.dtype)[cell]}, of a team of one {a.view(s.dtype)[cell]}"
            for s in symbols
            for cell in (byte // s.itemsize,)
        ]
        rows = ", ".join(f"{pc} {program.spec(pc).name} ({program.labels[pc]})" for pc, _ in group)
        raise Race(f"rows {rows}: {' or '.join(told)}; {how}")


def plain(x: np.ndarray) -> np.ndarray:
    """Floats, but NaN without its sign: that is the first operand's, and a compiler may exchange them, as in a loop's tail."""
    return np.where(np.isnan(x), np.abs(x), x)


def _without_numbers(program: Program, heap: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Where floats are NaNs that differ in nothing but their sign (see `plain`)."""
    bits = f"u{heap.itemsize}"
    nan = np.isnan(heap) & (plain(heap).view(bits) == plain(other).view(bits))
    for s in program.symbols:
        if s.dtype != program.dtype:
            nan[s.start // heap.itemsize : -(-(s.start + s.bytes.at(program.batch_size)) // heap.itemsize)] = False
    return nan

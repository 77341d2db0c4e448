"""Pieces of a block of memory, aligned to cache lines: first fit; adjacent free pieces are merged."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from calcvm.vm.program.encoding import ALIGN_BYTES


class Pieces:
    """The free bytes among ``nbytes``; pieces start on cache lines."""

    def __init__(self, nbytes: int):
        self._nbytes = nbytes
        self._free = [(0, nbytes)] if nbytes else []  # sorted, never adjacent

    @property
    def free_bytes(self) -> int:
        return sum(stop - start for start, stop in self._free)

    def take(self, nbytes: int) -> tuple[int, int] | None:
        """The first free piece of at least ``nbytes``, as [start, stop); None: there is none."""
        for i, (start, end) in enumerate(self._free):
            if end - start >= nbytes:
                stop = min(-(-(start + nbytes) // ALIGN_BYTES) * ALIGN_BYTES, end)
                self._free[i : i + 1] = [(stop, end)] if stop < end else []
                return start, stop
        return None

    def give(self, start: int, stop: int) -> None:
        """Free a piece."""
        i = bisect_left(self._free, (start, stop))
        if i < len(self._free) and self._free[i][0] == stop:
            stop = self._free.pop(i)[1]
        if i and self._free[i - 1][1] == start:
            i -= 1
            start = self._free.pop(i)[0]
        if start < stop:
            self._free.insert(i, (start, stop))

    def leave(self, taken: Iterable[tuple[int, int]]) -> None:
        """Set the free pieces to everything that is not ``taken``."""
        ends = sorted(taken)
        free = zip([0, *(stop for _, stop in ends)], [*(start for start, _ in ends), self._nbytes])
        self._free = [(start, stop) for start, stop in free if start < stop]


@dataclass
class Shared:
    """Small memory that the host and compiled code both write: sums, means.  It is freed with this object.

    array : on the host.
    address : its address, as compiled code sees it.
    """

    __slots__ = ("address", "array")

    array: np.ndarray
    address: int

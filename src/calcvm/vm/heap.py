"""The heap: one allocation of a fixed size, in which programs are loaded."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from calcvm.errors import CalcError, PlanError

if TYPE_CHECKING:
    from calcvm.vm.program import Program
    from calcvm.vm.resident import Resident

ALIGN_BYTES = 64
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(memory: int | str) -> int:
    """Bytes from a number or a text such as ``"64 MiB"`` (or MB, GiB, ...)."""
    if isinstance(memory, (int, np.integer)) and not isinstance(memory, bool) and memory >= 0:
        return int(memory)
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", memory) if isinstance(memory, str) else None
    if match is None or match[2].upper() not in _UNITS or match[1].count(".") > 1:
        raise CalcError(f"memory {memory!r}: give bytes, or a text such as '64 MiB' or '1.5 GB'")
    return int(float(match[1]) * _UNITS[match[2].upper()])


class CalcHeap:
    """Memory for programs: ``nbytes`` bytes, allocated once and never more.

    Parameters
    ----------
    memory : int or str
        Bytes, or a text such as ``"64 MiB"``.
    """

    def __init__(self, memory: int | str):
        self.nbytes = parse_bytes(memory)
        block = np.zeros(self.nbytes + ALIGN_BYTES, np.uint8)
        start = -block.ctypes.data % ALIGN_BYTES
        self._bytes = block[start : start + self.nbytes]
        self._taken: dict[int, int] = {}  # start -> stop

    @property
    def free_bytes(self) -> int:
        """Bytes that no program holds (not necessarily in one piece)."""
        return self.nbytes - sum(stop - start for start, stop in self._taken.items())

    def load(self, program: Program, seed: int = 0, workers: int | None = None) -> Resident:
        """Place a program in the heap and initialize its parameters from ``seed``.

        Raises
        ------
        PlanError : the heap has no free piece of the program's size (``needed`` and ``allowed`` bytes).
        """
        from calcvm.vm.resident import Resident

        return Resident(program, self, seed=seed, workers=workers)

    def take(self, nbytes: int) -> tuple[int, np.ndarray]:
        """Reserve a zeroed piece: its start, and its bytes."""
        start, largest = 0, 0
        for taken, stop in [*sorted(self._taken.items()), (self.nbytes, self.nbytes)]:
            if taken - start >= nbytes:
                self._taken[start] = start + nbytes
                piece = self._bytes[start : start + nbytes]
                piece[:] = 0
                return start, piece
            largest = max(largest, taken - start)
            start = max(start, -(-stop // ALIGN_BYTES) * ALIGN_BYTES)
        raise PlanError(
            f"the program needs {nbytes:,} bytes, the heap's largest free piece has {largest:,} of {self.nbytes:,}: "
            f"make the heap larger, close a model, or compile with memory={largest}",
            nbytes,
            largest,
        )

    def release(self, start: int) -> None:
        """Give a piece back."""
        self._taken.pop(start, None)

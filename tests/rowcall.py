"""One row on a hand-made heap: for tests of single kernels."""

from __future__ import annotations

import ctypes

import numpy as np

from calcvm.kernels_cpu import elementwise, losses, optimizers  # noqa: F401  (registers the kernels)
from calcvm.kernels_cpu._common import KERNELS
from calcvm.ops import ROWS
from calcvm.vm.program.encoding import encode_row

NATIVE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3)
RESERVED, GAP = 16, 16  # elements at the start of a heap, and between operands
ROW_INDEX = 5  # what the row believes to be its place in the program


class Heap:
    """Operands laid out with guards between them; `call` runs a row over them, `[name]` reads one back.

    types : of operands that are not of the heap's own float.
    """

    def __init__(self, dtype: str, operands: dict, types: dict | None = None, alias: dict | None = None):
        self.dtype, self.arrays, self.offset = np.dtype(dtype), {}, {}
        types = {"hyper": "float64", **(types or {})}
        values = {k: np.ascontiguousarray(v, types.get(k, self.dtype)) for k, v in operands.items()}
        lines = {name: -(-value.nbytes // 64) for name, value in values.items()}
        n_bytes = (RESERVED + GAP) * self.dtype.itemsize + sum(64 * (n + 1) for n in lines.values())
        memory = np.full(n_bytes + 64, 0xFF, np.uint8)
        self.bytes = memory[-memory.ctypes.data % 64 :][:n_bytes]  # on a cache line, as every heap
        self.cells = self.bytes.view(self.dtype)
        self.cells[:RESERVED] = 0
        self.inside = np.zeros(self.bytes.size, bool)
        self.inside[: RESERVED * self.dtype.itemsize] = True
        end = (RESERVED + GAP) * self.dtype.itemsize
        for name, value in values.items():
            self.inside[end : end + value.nbytes] = True
            self.arrays[name] = self.bytes[end : end + value.nbytes].view(value.dtype).reshape(value.shape)
            self.arrays[name][...] = value
            self.offset[name] = end // value.itemsize
            end += 64 * (lines[name] + 1)
        for name, other in (alias or {}).items():
            self.arrays[name], self.offset[name] = self.arrays[other], self.offset[other]

    def call(self, row: str, n_workers: int = 1, **words) -> Heap:
        spec = ROWS[row]
        encoded = encode_row(spec, words, self.offset, flags=ROW_INDEX << 8)
        native = NATIVE(KERNELS[row].address(self.dtype.name))
        for worker in range(n_workers):
            native(self.cells.ctypes.data, encoded.ctypes.data, worker, n_workers, 0)
        assert (self.bytes[~self.inside] == 0xFF).all(), f"{row} wrote outside its operands"
        return self

    @property
    def trap(self) -> tuple[int, int]:
        return int(self.cells[0]), int(self.cells[1])

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

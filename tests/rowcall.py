"""One row on a hand-made heap: for tests of single kernels."""

from __future__ import annotations

import ctypes

import numpy as np

from calcvm.kernels_cpu import losses, optimizers  # noqa: F401  (registers the kernels)
from calcvm.kernels_cpu._common import KERNELS
from calcvm.ops import ROWS
from calcvm.vm.encoding import encode_row

NATIVE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3)
RESERVED, GAP = 16, 16  # elements at the start of a heap, and between operands
ROW_INDEX = 5  # what the row believes to be its place in the program


class Heap:
    """Operands laid out with guards between them; `call` runs a row over them, `[name]` reads one back.

    float64 blocks (hyperparameters) are stored in the heap's elements by their bits.
    """

    def __init__(self, dtype: str, operands: dict, blocks: tuple[str, ...] = ("hyper",), alias: dict | None = None):
        self.dtype, self.shape, self.offset = np.dtype(dtype), {}, {}
        self.blocks, end, parts = blocks, RESERVED + GAP, []
        for name, value in operands.items():
            value = np.ascontiguousarray(value, np.float64 if name in blocks else self.dtype)
            self.shape[name] = value.shape
            self.offset[name] = end
            parts.append((end, value.reshape(-1).view(self.dtype)))
            end += parts[-1][1].size + GAP
        self.cells = np.full(end, np.nan, self.dtype)
        self.cells[:RESERVED] = 0
        self.inside = np.zeros(end, bool)
        self.inside[:RESERVED] = True
        for start, value in parts:
            self.cells[start : start + value.size] = value
            self.inside[start : start + value.size] = True
        for name, other in (alias or {}).items():
            self.shape[name], self.offset[name] = self.shape[other], self.offset[other]

    def call(self, row: str, n_workers: int = 1, **words) -> Heap:
        spec = ROWS[row]
        encoded = encode_row(spec, words, self.offset, flags=ROW_INDEX << 8)
        native = NATIVE(KERNELS[row].address(self.dtype.name))
        for worker in range(n_workers):
            native(self.cells.ctypes.data, encoded.ctypes.data, worker, n_workers, 0)
        assert np.isnan(self.cells[~self.inside]).all(), f"{row} wrote outside its operands"
        return self

    @property
    def trap(self) -> tuple[int, int]:
        return int(self.cells[0]), int(self.cells[1])

    def __getitem__(self, name: str) -> np.ndarray:
        shape, start = self.shape[name], self.offset[name]
        if name in self.blocks:
            return self.cells[start : start + int(np.prod(shape)) * (8 // self.dtype.itemsize)].view(np.float64)
        return self.cells[start : start + int(np.prod(shape))].reshape(shape)

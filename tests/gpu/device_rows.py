"""Rows by the compiled CUDA kernels on a GPU's memory: what `tests.rowrun` runs in place of the CPU's kernels."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from calcvm.kernels_cuda import FAMILIES
from calcvm.kernels_cuda._common import KERNELS
from calcvm.ops.spec import MAX_WORDS, Operand
from calcvm.vm.run.cuda import build
from calcvm.vm.run.cuda.device import cuda

for _family in FAMILIES:
    import_module(f"calcvm.kernels_cuda.{_family}")

MARGIN = 4096  # bytes on either side of the heap, which no row may touch
FILL = 0xA5


class DeviceRows:
    """``threads`` to a block; all blocks of a launch at once.  What the simulator orders by a seed is run twice here."""

    gpu, kernels, teams = 1, KERNELS, (2, 3, 5, 132)

    def __init__(self, threads: int | None = None):
        self.device = cuda()
        self.driver = self.device.driver
        self.threads = threads or self.device.threads
        self._address, self._bytes = 0, 0

    def kind(self, o: Operand) -> str:
        return "ptr"

    def run(
        self,
        name: str,
        dtype: str,
        cells: np.ndarray,
        row: np.ndarray,
        n_workers: int,
        phase: int,
        only: Any,
        reverse: bool,
    ) -> None:
        assert only is None, "a grid runs all of its blocks: tests/cuda looks at a block alone"
        driver, row = self.driver, row.copy()
        row[0] = build.number(name)
        heap = self._room(cells.nbytes + 2 * MARGIN) + MARGIN
        at_row = self._at_row
        driver.fill(heap - MARGIN, FILL, cells.nbytes + 2 * MARGIN)
        driver.to_device(heap, cells)
        driver.to_device(at_row, row)
        target = build.Target(driver.compute_capability, self.threads, 1, "float32")
        function, _ = self.device.function("row", (name,), dtype, target)
        shared = target.shared_bytes(np.dtype(dtype).itemsize)
        driver.launch(function, n_workers, self.threads, [heap, at_row, phase], shared_bytes=shared)()
        driver.synchronize()
        driver.to_host(cells, heap)
        for start in (heap - MARGIN, heap + cells.nbytes):
            margin = np.empty(MARGIN, np.uint8)
            driver.to_host(margin, start)
            assert (margin == FILL).all(), f"{name} wrote outside the heap"

    def _room(self, nbytes: int) -> int:
        if not self._address:
            self._at_row = self.driver.alloc(8 * MAX_WORDS)
        if nbytes > self._bytes:
            if self._address:
                self.driver.free(self._address)
            self._address, self._bytes = self.driver.alloc(2 * nbytes), 2 * nbytes
        return self._address

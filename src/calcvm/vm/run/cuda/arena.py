"""Small pieces of device memory, each with a copy in page-locked host memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from calcvm.vm.run.cuda.driver import Driver
from calcvm.vm.run.pieces import Pieces, Shared


class Piece(Shared):
    """Cells written by both sides: ``array`` on the host, ``address`` on the device."""

    def __init__(self, array: np.ndarray, address: int, give: Callable[[], None]):
        super().__init__(array, address)
        self._end = weakref.finalize(self, give)
        self._end.atexit = False


class Arena:
    """Chunks of memory on both sides, cut into pieces.

    allocate : a function from bytes to the address of new device memory.
    """

    def __init__(self, driver: Driver, allocate: Callable[[int], int], chunk_bytes: int):
        self._driver, self._allocate, self._chunk_bytes = driver, allocate, chunk_bytes
        self._chunks: list[tuple[Pieces, np.ndarray, int]] = []
        self._grow(0)

    def _grow(self, nbytes: int) -> None:
        size = max(self._chunk_bytes, -(-nbytes // 64) * 64)
        self._chunks.append((Pieces(size), self._driver.pinned(size), self._allocate(size)))

    def take(self, shape: Any, dtype: Any) -> Piece:
        """A piece, zeroed on the host."""
        nbytes = max(int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize, 1)
        while True:
            for pieces, host, address in self._chunks:
                span = pieces.take(nbytes)
                if span is not None:
                    cells = host[slice(*span)]
                    cells[:] = 0
                    array = cells[: int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize].view(dtype)
                    return Piece(array.reshape(shape), address + span[0], partial(pieces.give, *span))
            self._grow(nbytes)

    def send(self, stream: int) -> None:
        """Copy the host's side to the device."""
        for _, host, address in self._chunks:
            self._driver.to_device(address, host, stream)

    def fetch(self, stream: int) -> None:
        """Copy the device's side to the host."""
        for _, host, address in self._chunks:
            self._driver.to_host(host, address, stream)

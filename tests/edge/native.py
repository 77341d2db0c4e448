"""Packs in C, compiled for this machine and called as those in emulators are."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import numpy as np

COMPILER = [sys.executable, "-m", "ziglang", "cc"]
STRICT = ["-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]

# an absent operand is NULL: places in it are reckoned, though never read
CHECKED = ["-fsanitize=undefined", "-fno-sanitize=pointer-overflow", "-fsanitize-trap=undefined"]
GUARD, PAINT = 4096, 0xA5  # bytes before and behind the heap


class Native:
    """The functions of ``it.c`` with a heap; count, stack : not known here."""

    def __init__(self, folder: Path, heap_bytes: int):
        command = [*COMPILER, *STRICT, "-O1", *CHECKED, "-fPIC", "-shared"]
        subprocess.run([*command, "it.c", "-o", "it.so", "-lm"], cwd=folder, check=True)
        self.library = ctypes.CDLL(str(folder / "it.so"))
        self.room = np.full(heap_bytes + 3 * GUARD, PAINT, np.uint8)
        first = GUARD + -self.room.ctypes.data % GUARD
        self.heap = self.room[first : first + heap_bytes]
        self.outside = self.room[:first], self.room[first + heap_bytes :]
        self.count = self.stack = 0

    def guards_hold(self) -> bool:
        """Whether nothing beside the heap has been written."""
        return all((part == PAINT).all() for part in self.outside)

    def call(self, name: str) -> int:
        return self.library[name](ctypes.c_void_p(self.heap.ctypes.data))

    def write(self, array: np.ndarray, at: int = 0) -> None:
        data = np.ascontiguousarray(array).view(np.uint8).ravel()
        self.heap[at : at + data.size] = data

    def read(self, n: int, dtype: str, at: int = 0) -> np.ndarray:
        return self.heap[at : at + n * np.dtype(dtype).itemsize].view(dtype).copy()

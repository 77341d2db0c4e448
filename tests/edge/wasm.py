"""A pack for browsers in a WebAssembly machine, called as those in emulators are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import wasmtime

PAINT = 0xA5


class Wasm:
    """The functions of a module with a heap; bytes : of the module; count, stack : not known here."""

    def __init__(self, file: Path, heap_bytes: int):
        self.store = wasmtime.Store()
        code = file.read_bytes()
        module = wasmtime.Module(self.store.engine, code)
        assert module.imports == []
        self.exports = wasmtime.Instance(self.store, module, []).exports(self.store)
        self.memory, end = self.exports["memory"], self.exports["__heap_base"].value(self.store)
        self.heap = -(-end // 64) * 64
        self.memory.grow(self.store, -(-heap_bytes // 65536))
        self.write(np.full(heap_bytes, PAINT, np.uint8))
        self.bytes, self.count, self.stack = len(code), 0, 0

    def call(self, name: str) -> int:
        return self.exports[name](self.store, self.heap)

    def write(self, array: np.ndarray, at: int = 0) -> None:
        self.memory.write(self.store, np.ascontiguousarray(array).tobytes(), self.heap + at)

    def read(self, n: int, dtype: str, at: int = 0) -> np.ndarray:
        start = self.heap + at
        data = self.memory.read(self.store, start, start + int(n) * np.dtype(dtype).itemsize)
        return np.frombuffer(bytes(data), dtype)

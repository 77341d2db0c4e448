"""Heaps in device memory: slots that copy their cells, and a store in page-locked memory."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from calcvm.errors import DeviceError
from calcvm.vm.memory.slot import NO_TRAP, Slot, as_seen, lasting_elems, shape_of
from calcvm.vm.memory.store import MemoryStore, Store

if TYPE_CHECKING:
    from calcvm.vm.program.program import Symbol
    from calcvm.vm.run.cuda.device import Cuda
    from calcvm.vm.run.loaded import Loaded


class DeviceMemory:
    """The single allocation of a heap on a GPU."""

    def __init__(self, device: Cuda, nbytes: int):
        self.device, self.nbytes = device, nbytes
        self.address = device.allocate(nbytes)
        self._end = weakref.finalize(self, device.free, self.address, nbytes)
        self._end.atexit = False

    def slot(self, loaded: Loaded, start: int, stop: int) -> DeviceSlot:
        return DeviceSlot(self, loaded, start, stop)

    def close(self) -> None:
        self._end()


class DeviceSlot(Slot):
    """A piece of a heap on a GPU; its cells are copied to and from the host.

    The host keeps a copy of the image after the last job.  If the device is lost, `cells` and `keep` use that copy, so the model
    can still be saved.
    """

    writable = False

    def __init__(self, memory: DeviceMemory, loaded: Loaded, start: int, stop: int):
        self._bind(loaded, start, stop, memory.address + start)
        self.memory, self.device, self.driver = memory, memory.device, memory.device.driver
        self.program, self.itemsize = loaded.program, loaded.program.itemsize
        self._last: np.ndarray | None = None

    # ------------------------------------------------------------ cells of symbols
    def cells(self, symbol: Symbol, shape: tuple[int, ...] | None = None) -> np.ndarray:
        shape = shape_of(symbol) if shape is None else shape
        cells = np.empty(math.prod(shape), symbol.dtype)
        self._read(cells, symbol.start)
        return as_seen(cells, symbol, shape)

    def write(self, symbol: Symbol, value: Any, shape: tuple[int, ...] | None = None) -> None:
        shape = shape_of(symbol) if shape is None else shape
        cells = np.empty(math.prod(shape), symbol.dtype)
        as_seen(cells, symbol, shape)[...] = value
        self._write(cells, symbol.start)

    def scalar(self, offset: int) -> float:
        cell = np.empty(1, self.program.dtype)
        self._read(cell, offset * self.itemsize)
        return float(cell[0])

    def _read(self, cells: np.ndarray, start: int) -> None:
        """Copy bytes of the piece from ``start`` on; if the device is lost, from the host's copy."""
        try:
            with self.device.lock:
                self.driver.to_host(cells.reshape(-1), self.address + start, self.device.stream)
                self.driver.synchronize(self.device.stream)
        except DeviceError as error:
            first, last = self.loaded.opened
            if not (error.lost and self._last is not None and first <= start and start + cells.nbytes <= last):
                raise
            cells.reshape(-1).view(np.uint8)[:] = self._last[start - first : start - first + cells.nbytes]

    def _write(self, cells: np.ndarray, start: int) -> None:
        """Copy bytes to the piece, in stream order.  The source is pageable memory, so ``cells`` may be freed on return."""
        with self.device.lock:
            self.driver.to_device(self.address + start, cells.reshape(-1), self.device.stream)

    # ------------------------------------------------------------ the whole piece
    def clear(self) -> None:
        self._zero(0, lasting_elems(self.loaded) * self.itemsize)

    def _zero(self, start: int, stop: int) -> None:
        with self.device.lock:
            self.driver.fill(self.address + start, 0, stop - start, self.device.stream)

    def clear_padding(self) -> None:
        for run in np.split(self.loaded.padding, np.flatnonzero(np.diff(self.loaded.padding) > 1) + 1):
            if len(run):
                self._zero(int(run[0]) * self.itemsize, int(run[-1] + 1) * self.itemsize)

    def blank(self) -> np.ndarray:
        return np.zeros(lasting_elems(self.loaded), self.program.dtype)

    def snapshot(self) -> np.ndarray:
        elements = np.empty(self.program.heap_elems, self.program.dtype)
        self._read(elements, 0)
        return elements

    def fill(self, elements: np.ndarray) -> None:
        self._write(elements, 0)

    def renew(self, record: Any, elements: np.ndarray, facts: Mapping[str, Any]) -> None:
        came: BaseException | None = None
        try:
            self.fill(elements)
        except Exception:
            raise
        except BaseException as signal:  # a signal, which does not show how far the copy has come
            self.fill(elements)
            came = signal
        kept, closed = record.facts.kept, set[str]()
        kept |= facts
        record.open, record.passing = closed, ()
        if came is not None:
            raise came

    # ------------------------------------------------------------ the image
    def _span(self, open: bool) -> tuple[int, int]:  # noqa: A002
        return self.loaded.opened if open else self.loaded.image

    def get_image(self, open: bool = False) -> np.ndarray:  # noqa: A002
        start, stop = self._span(open)
        image = np.empty(stop - start, np.uint8)
        self._read(image, start)
        return image

    def set_image(self, image: np.ndarray, open: bool = False) -> None:  # noqa: A002
        self._write(np.ascontiguousarray(image), self._span(open)[0])

    def keep(self, store: Store, name: str, facts: Mapping[str, Any], open: bool) -> int:  # noqa: A002
        start, stop = self._span(open)
        if isinstance(store, PinnedStore):  # in stream order, without waiting
            with self.device.lock:
                self.driver.to_host(store.room(name, facts, stop - start), self.address + start, self.device.stream)
        else:
            store.put(name, facts, self.get_image(open).data)
        return stop - start

    def restore(self, store: Store, name: str, open: bool) -> int:  # noqa: A002
        start, stop = self._span(open)
        if isinstance(store, PinnedStore):
            with self.device.lock:
                self.driver.to_device(self.address + start, store.kept(name, stop - start), self.device.stream)
        else:
            image = np.empty(stop - start, np.uint8)
            store.get(name, image.data)
            self._write(image, start)
        self._zero(0, 2 * self.itemsize)
        if self.loaded.accumulating and not open:
            self._zero(*self.loaded.gradient)
        return stop - start

    # ------------------------------------------------------------ running
    def _run(self, code: str, job: np.ndarray, address: int, workers: int) -> None:
        start, stop = self.loaded.opened
        with self.device.lock:
            if self._last is None:
                self._last = self.driver.pinned(stop - start)
                self._traps = self.driver.pinned(2 * self.itemsize).view(self.program.dtype)
            self.device.with_job = [(self._traps, self.address), (self._last, self.address + start)]
            self.device.run(code, job, address, workers, self.loaded)
            trapped = bool(self._traps[0])
        if trapped:
            self.check()

    def trap(self) -> tuple[int, int]:
        cells = np.empty(2, self.program.dtype)
        self._read(cells, 0)
        if not cells[0]:
            return NO_TRAP
        self._zero(0, 2 * self.itemsize)
        return int(cells[0]), int(cells[1])


class PinnedStore(MemoryStore):
    """A `MemoryStore` in page-locked memory: a switch is queued on the device's stream, and the host goes on."""

    def __init__(self, device: Cuda):
        super().__init__()
        self._device = device

    def put(self, name: str, facts: Mapping[str, Any], image: memoryview) -> None:
        self._device.driver.synchronize(self._device.stream)
        self.room(name, facts, image.nbytes)[:] = np.frombuffer(image, np.uint8)

    def room(self, name: str, facts: Mapping[str, Any], nbytes: int) -> np.ndarray:
        """The destination for a model's image."""
        kept = self._kept.get(name)
        if kept is None or kept[1].nbytes != nbytes or kept[0] is not facts:
            view = self._device.driver.pinned(nbytes).data if kept is None or kept[1].nbytes != nbytes else kept[1]
            kept = self._kept[name] = facts, view
        return np.frombuffer(kept[1], np.uint8)

    def kept(self, name: str, nbytes: int) -> np.ndarray:
        """A model's image, as the source of a copy to the device."""
        _, view = self._kept[name]
        return np.frombuffer(view, np.uint8, nbytes)

    def get(self, name: str, image: memoryview | None = None) -> tuple[Mapping[str, Any], memoryview]:
        self._device.driver.synchronize(self._device.stream)
        return super().get(name, image)

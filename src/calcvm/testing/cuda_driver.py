"""A stand-in for NVIDIA's driver library on a machine without a GPU: device memory is host memory, kernels are Python.

`Library` has the C functions that `calcvm.vm.run.cuda.driver` calls, with the same arguments and results, so
``Driver(Library())`` runs the same code as with a GPU.  Streams execute at once and in order; addresses are real.  Kernels
run in the simulator of `cuda_threads`, which can access only device memory and page-locked memory.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import itertools
import threading
import time
from bisect import bisect_right, insort
from collections.abc import Callable
from ctypes import c_int64
from dataclasses import dataclass
from typing import Any

import numpy as np

from calcvm.errors import CalcError
from calcvm.testing.cuda_threads import launch

KERNELS: dict[bytes, Callable] = {}  # `cuModuleLoadDataEx` gets a key of it as PTX; arguments are 64-bit integers

SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NO_DEVICE, INVALID_CONTEXT = 0, 1, 2, 100, 201
INVALID_PTX, INVALID_HANDLE, NOT_FOUND, ALREADY_REGISTERED, NOT_REGISTERED = 218, 400, 500, 712, 713
LAUNCH_FAILED, TOO_LARGE, CAPTURE_UNSUPPORTED, CAPTURE_UNMATCHED = 719, 720, 900, 903
ERRORS = {
    SUCCESS: ("CUDA_SUCCESS", "no error"),
    INVALID_VALUE: ("CUDA_ERROR_INVALID_VALUE", "invalid argument"),
    OUT_OF_MEMORY: ("CUDA_ERROR_OUT_OF_MEMORY", "out of memory"),
    INVALID_CONTEXT: ("CUDA_ERROR_INVALID_CONTEXT", "invalid device context"),
    INVALID_PTX: ("CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"),
    INVALID_HANDLE: ("CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"),
    NOT_FOUND: ("CUDA_ERROR_NOT_FOUND", "named symbol not found"),
    ALREADY_REGISTERED: (
        "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        "part or all of the memory is registered already",
    ),
    NOT_REGISTERED: ("CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "the memory is not registered"),
    LAUNCH_FAILED: ("CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"),
    TOO_LARGE: ("CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", "too many blocks in cooperative launch"),
    CAPTURE_UNSUPPORTED: ("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"),
    CAPTURE_UNMATCHED: ("CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "the capture was not begun in this stream"),
}
ALIGN = 256  # alignment of device memory


class Memory:
    """Allocations by address."""

    def __init__(self) -> None:
        self.blocks: dict[int, np.ndarray] = {}  # start: bytes
        self._starts: list[int] = []

    def add(self, block: np.ndarray) -> int:
        start = block.ctypes.data
        self.blocks[start] = block
        insort(self._starts, start)
        return start

    def drop(self, start: int) -> bool:
        """Drop an allocation; returns whether it existed."""
        if self.blocks.pop(start, None) is None:
            return False
        self._starts.remove(start)
        return True

    def find(self, address: int, n_bytes: int) -> np.ndarray | None:
        """The bytes from an address to the end of its allocation, or None if these are fewer than ``n_bytes``."""
        k = bisect_right(self._starts, address)
        if k == 0:
            return None
        block = self.blocks[self._starts[k - 1]]
        rest = block.size - (address - self._starts[k - 1])
        return block[block.size - rest :] if rest >= n_bytes else None

    @property
    def n_bytes(self) -> int:
        return sum(b.size for b in self.blocks.values())


@dataclass
class Function:
    module: int
    fn: Callable
    name: str
    max_dynamic_shared: int = 48 << 10


class Capture:
    """The work recorded while a stream was captured, and the capturing thread."""

    def __init__(self) -> None:
        self.thread, self.work = threading.get_ident(), list[Callable[[], int]]()


class _Thread(threading.local):
    context = 0


_thread = _Thread()
_handles = itertools.count(0x1000, 16)  # unique across all libraries


def _call(fn: Callable | None = None, *, context: bool = True, capture: bool = False) -> Any:
    """Wrap a C function: calls are counted and serialized; they fail on a lost device and, if needed, without a ``context``.

    capture : a thread may call it while it captures a stream.
    """
    if fn is None:
        return functools.partial(_call, context=context, capture=capture)

    @functools.wraps(fn)
    def call(self: Library, *arguments: Any) -> int:
        with self._lock:
            if self._calls_left is not None:
                self._calls_left -= 1
                if self._calls_left <= 0:
                    return LAUNCH_FAILED
            if context and _thread.context != self.context:
                return INVALID_CONTEXT
            if not capture and any(c.thread == threading.get_ident() for c in self.captures.values()):
                return CAPTURE_UNSUPPORTED
            return fn(self, *arguments) or SUCCESS

    return call


class Library:
    """The driver library of a machine with one simulated device.

    Parameters
    ----------
    memory_bytes : int
        Size of the device's memory.
    multiprocessors, blocks : int
        Number of multiprocessors, and of blocks that each runs at once.
    shared_bytes : int
        Limit of shared memory per block.
    devices : int
        0 simulates a machine with the driver but no device.
    seed : int
        Seed of the order in which the threads of a launch run.
    """

    def __init__(
        self,
        memory_bytes: int = 1 << 26,
        *,
        multiprocessors: int = 2,
        blocks: int = 1,
        shared_bytes: int = 227 << 10,
        compute_capability: tuple[int, int] = (9, 0),
        devices: int = 1,
        seed: int = 0,
    ):
        self.memory_bytes, self.multiprocessors, self.blocks = memory_bytes, multiprocessors, blocks
        self.devices, self.seed = devices, seed
        major, minor = compute_capability
        self.attributes = {97: shared_bytes, 16: multiprocessors, 75: major, 76: minor}
        self.context = next(_handles)
        self.retained = 0
        self.device, self.host = Memory(), Memory()
        self.modules: dict[int, Callable] = {}
        self.functions: dict[int, Function] = {}
        self.streams: set[int] = {0}
        self.events: dict[int, float | None] = {}  # seconds at which they happened
        self.captures: dict[int, Capture] = {}  # by stream
        self.graphs: dict[int, list[Callable[[], int]]] = {}
        self.launches = 0
        self._lock = threading.RLock()
        self._calls_left: int | None = None

    def lose_after(self, n_calls: int) -> None:
        """Let the ``n_calls``-th call from now and all later ones fail, as on a lost device."""
        self._calls_left = n_calls

    @property
    def left(self) -> int:
        """Number of objects still to be freed: allocations, registrations, modules, streams, events, graphs, contexts."""
        handles = len(self.modules) + len(self.events) + len(self.graphs) + len(self.streams) - 1
        return len(self.device.blocks) + len(self.host.blocks) + handles + self.retained

    # ---------------------------------------------------------------- errors, device, context
    def cuGetErrorName(self, code, text):
        return self._text(code, text, 0)

    def cuGetErrorString(self, code, text):
        return self._text(code, text, 1)

    def _text(self, code, text, which):
        if code not in ERRORS:
            return INVALID_VALUE
        text.value = ERRORS[code][which].encode()
        return SUCCESS

    @_call(context=False)
    def cuInit(self, flags):
        return SUCCESS if self.devices else NO_DEVICE

    @_call(context=False, capture=True)
    def cuDriverGetVersion(self, version):
        version.value = 13000

    @_call(context=False)
    def cuDeviceGetCount(self, count):
        count.value = self.devices

    @_call(context=False)
    def cuDeviceGet(self, device, number):
        device.value = number

    @_call(context=False, capture=True)
    def cuDeviceGetName(self, text, size, device):
        text.value = b"simulated"

    @_call(context=False, capture=True)
    def cuDeviceGetAttribute(self, value, number, device):
        if number not in self.attributes:
            return INVALID_VALUE
        value.value = self.attributes[number]

    @_call(context=False)
    def cuDevicePrimaryCtxRetain(self, context, device):
        self.retained += 1
        context.value = self.context

    @_call(context=False)
    def cuDevicePrimaryCtxRelease_v2(self, device):
        self.retained -= 1

    @_call(context=False, capture=True)
    def cuCtxSetCurrent(self, context):
        if context != self.context or not self.retained:
            return INVALID_CONTEXT
        _thread.context = context

    @_call
    def cuCtxSynchronize(self):
        pass

    # ---------------------------------------------------------------- memory
    @_call(capture=True)
    def cuMemGetInfo_v2(self, free, total):
        free.value, total.value = self.memory_bytes - self.device.n_bytes, self.memory_bytes

    @_call
    def cuMemAlloc_v2(self, address, n_bytes):
        if not n_bytes:
            return INVALID_VALUE
        if n_bytes > self.memory_bytes - self.device.n_bytes:
            return OUT_OF_MEMORY
        address.value = self.device.add(_aligned(n_bytes))

    @_call
    def cuMemFree_v2(self, address):
        return SUCCESS if self.device.drop(address) else INVALID_VALUE

    @_call
    def cuMemHostAlloc(self, start, n_bytes, flags):
        start.value = self.host.add(_aligned(n_bytes))

    @_call
    def cuMemFreeHost(self, start):
        return SUCCESS if self.host.drop(start) else INVALID_VALUE

    @_call
    def cuMemHostRegister_v2(self, start, n_bytes, flags):
        if not n_bytes:
            return INVALID_VALUE
        if self.host.find(start, 1) is not None:
            return ALREADY_REGISTERED
        cells = (ctypes.c_ubyte * n_bytes).from_address(start)
        self.host.add(np.frombuffer(cells, np.uint8))

    @_call
    def cuMemHostUnregister(self, start):
        return SUCCESS if self.host.drop(start) else NOT_REGISTERED

    @_call(capture=True)
    def cuMemHostGetDevicePointer_v2(self, address, start, flags):
        if self.host.find(start, 1) is None:
            return INVALID_VALUE
        address.value = start

    @_call
    def cuMemcpyHtoD_v2(self, to, origin, n_bytes):
        return self._copy(to, origin, n_bytes, (to,))

    @_call
    def cuMemcpyDtoH_v2(self, to, origin, n_bytes):
        return self._copy(to, origin, n_bytes, (origin,))

    @_call
    def cuMemcpyDtoD_v2(self, to, origin, n_bytes):
        return self._copy(to, origin, n_bytes, (to, origin))

    @_call(capture=True)
    def cuMemcpyHtoDAsync_v2(self, to, origin, n_bytes, stream):
        return self._give(stream, lambda: self._copy(to, origin, n_bytes, (to,)))

    @_call(capture=True)
    def cuMemcpyDtoHAsync_v2(self, to, origin, n_bytes, stream):
        return self._give(stream, lambda: self._copy(to, origin, n_bytes, (origin,)))

    @_call(capture=True)
    def cuMemcpyDtoDAsync_v2(self, to, origin, n_bytes, stream):
        return self._give(stream, lambda: self._copy(to, origin, n_bytes, (to, origin)))

    @_call
    def cuMemsetD8_v2(self, address, byte, n_bytes):
        return self._fill(address, byte, n_bytes)

    @_call(capture=True)
    def cuMemsetD8Async(self, address, byte, n_bytes, stream):
        return self._give(stream, lambda: self._fill(address, byte, n_bytes))

    def _copy(self, to, origin, n_bytes, on_device):
        if any(self._cells(address, n_bytes) is None for address in on_device):
            return INVALID_VALUE
        ctypes.memmove(to, origin, n_bytes)
        return SUCCESS

    def _fill(self, address, byte, n_bytes):
        cells = self._cells(address, n_bytes)
        if cells is None:
            return INVALID_VALUE
        cells[:n_bytes] = byte
        return SUCCESS

    def _cells(self, address: int, n_bytes: int) -> np.ndarray | None:
        """The memory that the device sees at an address."""
        for memory in (self.device, self.host):
            cells = memory.find(address, n_bytes)
            if cells is not None:
                return cells
        return None

    # ---------------------------------------------------------------- streams, events, graphs
    def _give(self, stream: int, work: Callable[[], int]) -> int:
        """Run work on a stream: now, or, during a capture, when the graph runs."""
        if stream not in self.streams:
            return INVALID_HANDLE
        if self.captures and not stream:
            return CAPTURE_UNSUPPORTED  # the default stream would wait for the captured one
        if stream in self.captures:
            self.captures[stream].work.append(work)
            return SUCCESS
        return work()

    @_call
    def cuStreamCreate(self, stream, flags):
        stream.value = next(_handles)
        self.streams.add(stream.value)

    @_call
    def cuStreamDestroy_v2(self, stream):
        return _remove(self.streams, stream)

    @_call
    def cuStreamSynchronize(self, stream):
        return self._give(stream, lambda: SUCCESS)

    @_call
    def cuEventCreate(self, event, flags):
        event.value = next(_handles)
        self.events[event.value] = None

    @_call
    def cuEventDestroy_v2(self, event):
        return _remove(self.events, event)

    @_call(capture=True)
    def cuEventRecord(self, event, stream):
        def happen():
            self.events[event] = time.perf_counter()
            return SUCCESS

        return self._give(stream, happen) if event in self.events else INVALID_HANDLE

    @_call(capture=True)
    def cuEventSynchronize(self, event):
        return SUCCESS if event in self.events else INVALID_HANDLE

    @_call(capture=True)
    def cuEventElapsedTime(self, value, start, end):
        first, last = self.events.get(start), self.events.get(end)
        if first is None or last is None:
            return INVALID_HANDLE
        value.value = (last - first) * 1e3

    @_call
    def cuStreamBeginCapture_v2(self, stream, mode):
        if not stream or stream not in self.streams:
            return CAPTURE_UNSUPPORTED
        self.captures[stream] = Capture()

    @_call(capture=True)
    def cuStreamEndCapture(self, stream, graph):
        if stream not in self.captures:
            return CAPTURE_UNMATCHED
        graph.value = next(_handles)
        self.graphs[graph.value] = self.captures.pop(stream).work

    @_call
    def cuGraphInstantiateWithFlags(self, runnable, graph, flags):
        if graph not in self.graphs:
            return INVALID_HANDLE
        runnable.value = next(_handles)
        self.graphs[runnable.value] = list(self.graphs[graph])

    @_call
    def cuGraphLaunch(self, runnable, stream):
        if runnable not in self.graphs or stream not in self.streams:
            return INVALID_HANDLE
        for work in self.graphs[runnable]:
            code = work()
            if code:
                return code

    @_call
    def cuGraphExecDestroy(self, graph):
        return _remove(self.graphs, graph)

    @_call
    def cuGraphDestroy(self, graph):
        return _remove(self.graphs, graph)

    # ---------------------------------------------------------------- kernels
    @_call
    def cuModuleLoadDataEx(self, module, image, n_options, options, values):
        if image not in KERNELS:
            given = dict(zip(options, values))
            if 5 in given:
                text = b"simulated assembler: no kernel has the key " + repr(image[:40]).encode()
                ctypes.memmove(given[5], text[: given[6] - 1] + b"\0", min(len(text), given[6] - 1) + 1)
            return INVALID_PTX
        module.value = next(_handles)
        self.modules[module.value] = KERNELS[image]

    @_call
    def cuModuleUnload(self, module):
        return _remove(self.modules, module)

    @_call(capture=True)
    def cuModuleGetFunction(self, function, module, name):
        if module not in self.modules:
            return INVALID_HANDLE
        function.value = next(_handles)
        self.functions[function.value] = Function(module, self.modules[module], name.decode())

    @_call(capture=True)
    def cuFuncSetAttribute(self, function, attribute, value):
        if function not in self.functions or attribute != 8 or value > self.attributes[97]:
            return INVALID_VALUE
        self.functions[function].max_dynamic_shared = value

    @_call(capture=True)
    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, value, function, threads, shared_bytes):
        if function not in self.functions:
            return INVALID_HANDLE
        fits = shared_bytes <= self.functions[function].max_dynamic_shared and threads <= 1024
        value.value = self.blocks if fits else 0

    @_call(capture=True)
    def cuLaunchKernel(self, function, x, y, z, threads, ty, tz, shared_bytes, stream, arguments, extra):
        return self._launch(function, x, threads, shared_bytes, stream, arguments)

    @_call(capture=True)
    def cuLaunchCooperativeKernel(self, function, x, y, z, threads, ty, tz, shared_bytes, stream, arguments):
        if x.value > self.blocks * self.multiprocessors:
            return TOO_LARGE
        return self._launch(function, x, threads, shared_bytes, stream, arguments)

    def _launch(self, *packed):
        function, blocks, threads, shared_bytes, stream = (x.value or 0 for x in packed[:-1])
        arguments = packed[-1]
        kernel = self.functions.get(function)
        if kernel is None or kernel.module not in self.modules:
            return INVALID_HANDLE
        n = len(inspect.signature(kernel.fn).parameters)
        if len(arguments) != n:
            raise CalcError(f"{kernel.name} takes {n} arguments, the launch has {len(arguments)}")
        values = [c_int64.from_address(arguments[k]).value for k in range(n)]
        if not blocks or not 0 < threads <= 1024 or shared_bytes > kernel.max_dynamic_shared:
            return INVALID_VALUE

        def run():
            self.launches += 1
            try:
                launch(
                    kernel.fn, values, blocks=blocks, threads=threads, shared_bytes=shared_bytes, memory=self._at, seed=self.seed
                )  # fmt: skip
            except IndexError as error:
                raise CalcError(f"{kernel.name} leaves its memory: {error}") from error
            return SUCCESS

        return self._give(stream, run)

    def _at(self, address: int, dtype: Any) -> np.ndarray:
        """The memory that a kernel sees at an address: elements up to the end of the allocation."""
        address, size = int(address), np.dtype(dtype).itemsize
        cells = self._cells(address, 1)
        if cells is None:
            cells = self._cells(address, 0)  # an end address: it points to nothing, and cannot be read
        if cells is None:
            raise CalcError(f"address {address:#x} is in no memory of the device")
        if address % size:
            raise CalcError(f"address {address:#x} is no multiple of {size}, as {np.dtype(dtype).name} needs it")
        return cells[: cells.size // size * size].view(dtype)


def _aligned(n_bytes: int) -> np.ndarray:
    """New memory, all bytes 0xFF (NaN)."""
    store = np.full(n_bytes + ALIGN, 0xFF, np.uint8)
    start = -store.ctypes.data % ALIGN
    return store[start : start + n_bytes]


def _remove(where: Any, what: int) -> int:
    if what not in where:
        return INVALID_HANDLE
    where.pop(what) if isinstance(where, dict) else where.remove(what)
    return SUCCESS

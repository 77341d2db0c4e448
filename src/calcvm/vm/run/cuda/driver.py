"""NVIDIA's driver, called through ctypes: memory, streams, events, modules, launches, graphs, and nothing more.

Addresses and handles are integers.  Sizes are bytes.  Stream 0 is the device's default stream.  Copies without a stream are
complete on return; they wait for earlier work on streams, except independent ones.  A `Driver` owns the objects that it
created, and frees the remaining ones with itself.

NVIDIA's `cuda.bindings`, a dependency of numba-cuda, would replace the table of functions and the output arguments, some 80
lines, and take 0.8 us of Python per launch in place of 1.6 (measured with a stub library).  The exchange waits for a machine
with a GPU that can test it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_char_p, c_float, c_int, c_int64, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any, NoReturn

import numpy as np

from calcvm.errors import CalcError, DeviceError, PlanError

LIBRARY = "libcuda.so.1"

_INT, _SIZE, _ADDRESS, _HANDLE = POINTER(c_int), POINTER(c_size_t), POINTER(c_uint64), POINTER(c_void_p)
_LAUNCH = [c_void_p, *[c_uint] * 7, c_void_p, _HANDLE]
# Types of the arguments, as in the header cuda.h; the names are those exported by drivers since CUDA 12.
FUNCTIONS: dict[str, list[Any]] = {
    "cuInit": [c_uint],
    "cuGetErrorName": [c_int, POINTER(c_char_p)],
    "cuGetErrorString": [c_int, POINTER(c_char_p)],
    "cuDriverGetVersion": [_INT],
    "cuDeviceGetCount": [_INT],
    "cuDeviceGet": [_INT, c_int],
    "cuDeviceGetName": [c_char_p, c_int, c_int],
    "cuDeviceGetAttribute": [_INT, c_int, c_int],
    "cuDevicePrimaryCtxRetain": [_HANDLE, c_int],
    "cuDevicePrimaryCtxRelease_v2": [c_int],
    "cuCtxSetCurrent": [c_void_p],
    "cuCtxSynchronize": [],
    "cuMemGetInfo_v2": [_SIZE, _SIZE],
    "cuMemAlloc_v2": [_ADDRESS, c_size_t],
    "cuMemFree_v2": [c_uint64],
    "cuMemHostAlloc": [_HANDLE, c_size_t, c_uint],
    "cuMemFreeHost": [c_void_p],
    "cuMemHostRegister_v2": [c_void_p, c_size_t, c_uint],
    "cuMemHostUnregister": [c_void_p],
    "cuMemHostGetDevicePointer_v2": [_ADDRESS, c_void_p, c_uint],
    "cuMemcpyHtoD_v2": [c_uint64, c_void_p, c_size_t],
    "cuMemcpyDtoH_v2": [c_void_p, c_uint64, c_size_t],
    "cuMemcpyDtoD_v2": [c_uint64, c_uint64, c_size_t],
    "cuMemcpyHtoDAsync_v2": [c_uint64, c_void_p, c_size_t, c_void_p],
    "cuMemcpyDtoHAsync_v2": [c_void_p, c_uint64, c_size_t, c_void_p],
    "cuMemcpyDtoDAsync_v2": [c_uint64, c_uint64, c_size_t, c_void_p],
    "cuMemsetD8_v2": [c_uint64, c_ubyte, c_size_t],
    "cuMemsetD8Async": [c_uint64, c_ubyte, c_size_t, c_void_p],
    "cuStreamCreate": [_HANDLE, c_uint],
    "cuStreamSynchronize": [c_void_p],
    "cuStreamDestroy_v2": [c_void_p],
    "cuEventCreate": [_HANDLE, c_uint],
    "cuEventRecord": [c_void_p, c_void_p],
    "cuEventSynchronize": [c_void_p],
    "cuEventElapsedTime": [POINTER(c_float), c_void_p, c_void_p],
    "cuEventDestroy_v2": [c_void_p],
    "cuModuleLoadDataEx": [_HANDLE, c_char_p, c_uint, _INT, _HANDLE],
    "cuModuleGetFunction": [_HANDLE, c_void_p, c_char_p],
    "cuModuleUnload": [c_void_p],
    "cuFuncSetAttribute": [c_void_p, c_int, c_int],
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": [_INT, c_void_p, c_int, c_size_t],
    "cuLaunchKernel": [*_LAUNCH, _HANDLE],
    "cuLaunchCooperativeKernel": _LAUNCH,
    "cuStreamBeginCapture_v2": [c_void_p, c_int],
    "cuStreamEndCapture": [c_void_p, _HANDLE],
    "cuGraphInstantiateWithFlags": [_HANDLE, c_void_p, c_uint64],
    "cuGraphLaunch": [c_void_p, c_void_p],
    "cuGraphExecDestroy": [c_void_p],
    "cuGraphDestroy": [c_void_p],
}

# Results of calls, and numbers of attributes and options.
OUT_OF_MEMORY, NO_DEVICE = 2, 100
LOST = {214, 220, 226, 700, 702, 709, 710, *range(714, 720), 721, 810, 911, 999}  # every later call fails as well
COMPUTE_CAPABILITY, MULTIPROCESSORS = (75, 76), 16
JIT_ERROR_LOG, JIT_ERROR_LOG_BYTES, FUNCTION_MAX_DYNAMIC_SHARED = 5, 6, 8
HOST_PORTABLE_AND_MAPPED = 3
STREAM_NON_BLOCKING, EVENT_DISABLE_TIMING, CAPTURE_THREAD_LOCAL = 1, 2, 1
LOG_BYTES = 1 << 14


class _Current(threading.local):
    """The owner of this thread's current context."""

    owner: object = None


_current = _Current()


def load_library(name: str = LIBRARY) -> Any:
    """NVIDIA's driver library (DeviceError: there is none)."""
    try:
        library = ctypes.CDLL(name)
    except OSError:
        raise DeviceError(
            f"no CUDA driver: {name} was not found; install NVIDIA's driver, or use device='cpu'"
        ) from None
    for function, arguments in FUNCTIONS.items():
        try:
            getattr(library, function).argtypes = arguments
        except AttributeError:
            raise DeviceError(f"the CUDA driver has no {function}: install one for CUDA 12 or later") from None
    return library


class Driver:
    """One device, through its primary context, which it shares with other libraries of the process.

    Parameters
    ----------
    library : object
        Provides the functions in `FUNCTIONS`: `load_library`, or a stand-in (`calcvm.testing.cuda_driver`).
    device : int
        Number of the device.
    """

    def __init__(self, library: Any, device: int = 0):
        self._c = {name: getattr(library, name) for name in FUNCTIONS}
        code = self._c["cuInit"](0)
        count = c_int()
        if code != NO_DEVICE:
            self._check("cuInit", code)
            self._check("cuDeviceGetCount", self._c["cuDeviceGetCount"](count))
        if not 0 <= device < count.value:
            raise DeviceError(f"no CUDA device {device}: the driver has {count.value}; use device='cpu'")
        handle, context = c_int(), c_void_p()
        self._check("cuDeviceGet", self._c["cuDeviceGet"](handle, device))
        self._device = handle.value
        self._check("cuDevicePrimaryCtxRetain", self._c["cuDevicePrimaryCtxRetain"](context, self._device))
        self._context = context.value or 0
        self._token = object()  # identifies this driver in `_current`
        self._live: dict[tuple[str, int], None] = {}  # objects to be freed: (freeing function, handle)
        self._host: dict[int, tuple[int, int, Any]] = {}  # page-locked: bytes, device address, a registered array
        self._close = weakref.finalize(self, _release, self._c, os.getpid(), self._device, self._context, self._live)
        self._close.atexit = False  # the end of the process frees everything, and other threads may still run
        self.compute_capability = self._attribute(COMPUTE_CAPABILITY[0]), self._attribute(COMPUTE_CAPABILITY[1])
        self.multiprocessors = self._attribute(MULTIPROCESSORS)
        text = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", text, len(text), self._device)
        self.name = text.value.decode()

    @classmethod
    def open(cls, device: int = 0) -> Driver:
        """Open a device of NVIDIA's driver (DeviceError: no driver, or no such device)."""
        return cls(load_library(), device)

    def close(self) -> None:
        """Free all remaining objects; page-locked arrays must not be used any more."""
        self._token = object()
        self._close()

    # ---------------------------------------------------------------- calls
    def _result(self, name: str, *arguments: Any) -> int:
        if _current.owner is not self._token:
            self._enter()
        return self._c[name](*arguments)

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(name, self._result(name, *arguments))

    def _enter(self) -> None:
        """Make the context current in this thread."""
        if not self._close.alive:
            raise DeviceError("the driver was closed")
        self._check("cuCtxSetCurrent", self._c["cuCtxSetCurrent"](self._context))
        _current.owner = self._token

    def _check(self, name: str, code: int) -> None:
        if code:
            self._raise(name, code)

    def _raise(self, name: str, code: int) -> NoReturn:
        texts = []
        for ask in ("cuGetErrorName", "cuGetErrorString"):
            text = c_char_p()
            known = self._c[ask](code, text) == 0 and text.value
            texts.append(known.decode() if known else "unknown")
        lost = code in LOST
        advice = "; the device is lost to this process: restart the process" if lost else ""
        raise DeviceError(f"{name}: {texts[0]} ({code}): {texts[1]}{advice}", lost)

    def _made(self, name: str, destroyer: str, *arguments: Any) -> int:
        """The handle that a call creates, recorded for freeing."""
        handle = c_void_p()
        self._call(name, handle, *arguments)
        assert handle.value
        self._live[destroyer, handle.value] = None
        return handle.value

    def _drop(self, destroyer: str, what: int) -> None:
        """Free an object; with a lost device or a closed driver it is gone already."""
        if not self._close.alive:
            return
        if (destroyer, what) not in self._live:
            raise CalcError(f"{destroyer}: {what:#x} is not this driver's, or was freed before")
        del self._live[destroyer, what]
        try:
            self._call(destroyer, what)
        except DeviceError as error:
            if not error.lost:
                raise

    def _attribute(self, number: int) -> int:
        value = c_int()
        self._call("cuDeviceGetAttribute", value, number, self._device)
        return value.value

    @property
    def version(self) -> tuple[int, int]:
        """The newest CUDA version that the driver supports."""
        value = c_int()
        self._call("cuDriverGetVersion", value)
        return value.value // 1000, value.value % 1000 // 10

    # ---------------------------------------------------------------- memory
    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the device's memory."""
        free, total = c_size_t(), c_size_t()
        self._call("cuMemGetInfo_v2", free, total)
        return free.value, total.value

    def alloc(self, n_bytes: int) -> int:
        """Address of new device memory, a multiple of 256 (PlanError: it exceeds the free memory; nothing was allocated)."""
        free, total = self.memory()
        address = c_uint64()
        code = self._result("cuMemAlloc_v2", address, max(n_bytes, 1)) if n_bytes <= free else OUT_OF_MEMORY
        if code == OUT_OF_MEMORY:
            raise PlanError(
                f"{n_bytes} bytes do not fit {self.name}: {free} of its {total} bytes are free", n_bytes, free
            )
        self._check("cuMemAlloc_v2", code)
        self._live["cuMemFree_v2", address.value] = None
        return address.value

    def free(self, address: int) -> None:
        """Free memory from `alloc`."""
        self._drop("cuMemFree_v2", address)

    def pinned(self, n_bytes: int) -> np.ndarray:
        """Page-locked host memory as an array of uint8: copies run at full speed, and the device can read and write it.

        It is freed with the last array that views it (PlanError: the machine cannot lock that much).
        """
        start = c_void_p()
        code = self._result("cuMemHostAlloc", start, max(n_bytes, 1), HOST_PORTABLE_AND_MAPPED)
        if code == OUT_OF_MEMORY:
            raise PlanError(f"{n_bytes} bytes of host memory cannot be page-locked", n_bytes)
        self._check("cuMemHostAlloc", code)
        assert start.value
        buffer = (c_ubyte * max(n_bytes, 1)).from_address(start.value)
        weakref.finalize(buffer, self._free_pinned, start.value).atexit = False
        self._live["cuMemFreeHost", start.value] = None
        self._host[start.value] = n_bytes, self._mapped(start.value), None
        return np.ctypeslib.as_array(buffer)[:n_bytes]

    def _free_pinned(self, start: int) -> None:
        del self._host[start]
        self._drop("cuMemFreeHost", start)

    def register(self, array: np.ndarray) -> int:
        """Page-lock an existing array until `unregister`; returns its device address."""
        start = _contiguous(array).ctypes.data
        self._call("cuMemHostRegister_v2", start, array.nbytes, HOST_PORTABLE_AND_MAPPED)
        self._live["cuMemHostUnregister", start] = None
        self._host[start] = array.nbytes, self._mapped(start), array
        return self._host[start][1]

    def unregister(self, array: np.ndarray) -> None:
        self._host.pop(array.ctypes.data, None)
        self._drop("cuMemHostUnregister", array.ctypes.data)

    def _mapped(self, start: int) -> int:
        address = c_uint64()
        self._call("cuMemHostGetDevicePointer_v2", address, start, 0)
        return address.value

    def device_address(self, array: np.ndarray) -> int:
        """The device address of an array from `pinned` or `register`, or of a part of it."""
        at = array.ctypes.data
        for start, (n_bytes, address, _) in tuple(self._host.items()):
            if start <= at and at + array.nbytes <= start + n_bytes:
                return address + at - start
        raise CalcError("the array is not page-locked: register it, or copy it to the device")

    def to_device(self, address: int, array: np.ndarray, stream: int | None = None) -> None:
        """Copy an array to device memory; on a stream, without waiting: keep the array, page-locked if the copy is to overlap."""
        self._copy("cuMemcpyHtoD", address, _contiguous(array).ctypes.data, array.nbytes, stream)

    def to_host(self, array: np.ndarray, address: int, stream: int | None = None) -> None:
        """Fill an array from device memory; on a stream, without waiting."""
        self._copy("cuMemcpyDtoH", _contiguous(array).ctypes.data, address, array.nbytes, stream)

    def copy(self, to: int, origin: int, n_bytes: int, stream: int | None = None) -> None:
        """Copy from device memory to device memory."""
        self._copy("cuMemcpyDtoD", to, origin, n_bytes, stream)

    def _copy(self, name: str, to: int, origin: int, n_bytes: int, stream: int | None) -> None:
        if n_bytes:
            if stream is None:
                self._call(name + "_v2", to, origin, n_bytes)
                self.synchronize(0)  # the driver call may return before the device has the bytes
            else:
                self._call(name + "Async_v2", to, origin, n_bytes, stream)

    def fill(self, address: int, byte: int, n_bytes: int, stream: int | None = None) -> None:
        """Set every byte."""
        if n_bytes:
            if stream is None:
                self._call("cuMemsetD8_v2", address, byte, n_bytes)
                self.synchronize(0)
            else:
                self._call("cuMemsetD8Async", address, byte, n_bytes, stream)

    # ---------------------------------------------------------------- streams and events
    def stream(self, *, independent: bool = False) -> int:
        """A new stream: its work runs in order.

        independent : it does not synchronize with work without a stream.
        """
        return self._made("cuStreamCreate", "cuStreamDestroy_v2", STREAM_NON_BLOCKING if independent else 0)

    def free_stream(self, stream: int) -> None:
        self._drop("cuStreamDestroy_v2", stream)

    def synchronize(self, stream: int | None = None) -> None:
        """Wait for a stream, or for all work of the device."""
        if stream is None:
            self._call("cuCtxSynchronize")
        else:
            self._call("cuStreamSynchronize", stream)

    def event(self, *, timing: bool = True) -> int:
        """A new event; without ``timing`` it is cheaper, but `elapsed_ms` rejects it."""
        return self._made("cuEventCreate", "cuEventDestroy_v2", 0 if timing else EVENT_DISABLE_TIMING)

    def free_event(self, event: int) -> None:
        self._drop("cuEventDestroy_v2", event)

    def record(self, event: int, stream: int = 0) -> None:
        """Record an event that happens when the stream has finished its work so far."""
        self._call("cuEventRecord", event, stream)

    def synchronize_event(self, event: int) -> None:
        """Wait for an event."""
        self._call("cuEventSynchronize", event)

    def elapsed_ms(self, start: int, end: int) -> float:
        """Milliseconds between two events that have happened."""
        value = c_float()
        self._call("cuEventElapsedTime", value, start, end)
        return value.value

    # ---------------------------------------------------------------- kernels
    def load(self, ptx: str | bytes) -> int:
        """A module of PTX, assembled for this device (DeviceError with the assembler's log)."""
        image = ptx.encode() if isinstance(ptx, str) else ptx
        log = ctypes.create_string_buffer(LOG_BYTES)
        options = {JIT_ERROR_LOG: ctypes.addressof(log), JIT_ERROR_LOG_BYTES: LOG_BYTES}
        n = len(options)
        numbers, values = (c_int * n)(*options), (c_void_p * n)(*options.values())
        try:
            return self._made("cuModuleLoadDataEx", "cuModuleUnload", image, n, numbers, values)
        except DeviceError as error:
            text = log.value.decode(errors="replace").strip()
            raise DeviceError(f"{error}\n{text}" if text else str(error), error.lost) from None

    def unload(self, module: int) -> None:
        """Free a module and its functions."""
        self._drop("cuModuleUnload", module)

    def function(self, module: int, name: str) -> int:
        """A kernel of a module."""
        handle = c_void_p()
        self._call("cuModuleGetFunction", handle, module, name.encode())
        assert handle.value
        return handle.value

    def allow_shared(self, function: int, n_bytes: int) -> None:
        """Allow blocks of a kernel this much dynamic shared memory; needed above 48 KB."""
        self._call("cuFuncSetAttribute", function, FUNCTION_MAX_DYNAMIC_SHARED, n_bytes)

    def occupancy(self, function: int, threads: int, shared_bytes: int = 0) -> int:
        """Number of blocks, with these threads and dynamic shared memory, that one multiprocessor runs at once."""
        value = c_int()
        self._call("cuOccupancyMaxActiveBlocksPerMultiprocessor", value, function, threads, shared_bytes)
        return value.value

    def launch(
        self,
        function: int,
        blocks: int,
        threads: int,
        arguments: Sequence[int],
        *,
        shared_bytes: int = 0,
        stream: int = 0,
        cooperative: bool = False,
    ) -> Launch:
        """A prepared launch; call it any number of times (see `Launch`)."""
        return Launch(self, function, blocks, threads, arguments, shared_bytes, stream, cooperative)

    # ---------------------------------------------------------------- graphs
    def graph(self, stream: int, work: Callable[[], Any]) -> int:
        """Record the work that ``work`` submits to a stream (of `stream`) without running it; one `run_graph` runs all of it."""
        self._call("cuStreamBeginCapture_v2", stream, CAPTURE_THREAD_LOCAL)
        template = c_void_p()
        try:
            work()
        except BaseException:
            if self._c["cuStreamEndCapture"](stream, template) == 0 and template.value:
                self._c["cuGraphDestroy"](template.value)
            raise
        self._call("cuStreamEndCapture", stream, template)
        try:
            return self._made("cuGraphInstantiateWithFlags", "cuGraphExecDestroy", template.value, 0)
        finally:
            self._c["cuGraphDestroy"](template.value)

    def run_graph(self, graph: int, stream: int) -> None:
        self._call("cuGraphLaunch", graph, stream)

    def free_graph(self, graph: int) -> None:
        self._drop("cuGraphExecDestroy", graph)


class Launch:
    """A kernel with its grid and arguments, packed once: a call takes about a microsecond of Python.

    arguments : the kernel's 64-bit integers; assignments here take effect with the next call.
    """

    def __init__(
        self,
        driver: Driver,
        function: int,
        blocks: int,
        threads: int,
        arguments: Sequence[int],
        shared_bytes: int,
        stream: int,
        cooperative: bool,
    ):
        n = len(arguments)
        self.arguments = (c_int64 * n)(*arguments)
        start = ctypes.addressof(self.arguments)
        pointers = (c_void_p * n)(*range(start, start + 8 * n, 8))
        self._driver, self._name = driver, "cuLaunchCooperativeKernel" if cooperative else "cuLaunchKernel"
        self._fn = driver._c[self._name]
        numbers = map(c_uint, (blocks, 1, 1, threads, 1, 1, shared_bytes))  # converted once: a third of a call's time
        self._packed: tuple = (c_void_p(function), *numbers, c_void_p(stream), pointers)
        if not cooperative:
            self._packed += (None,)

    def __call__(self) -> None:
        if _current.owner is not self._driver._token:
            self._driver._enter()
        code = self._fn(*self._packed)
        if code:
            self._driver._raise(self._name, code)


def _contiguous(array: np.ndarray) -> np.ndarray:
    if not array.flags.c_contiguous:
        raise CalcError(f"an array of shape {array.shape} has gaps between its elements: copy it first")
    return array


def _release(c: dict[str, Any], pid: int, device: int, context: int, live: dict[tuple[str, int], None]) -> None:
    """Free the remaining objects and ignore errors.  A forked child owns none of them."""
    if os.getpid() == pid and c["cuCtxSetCurrent"](context) == 0:
        _current.owner = None
        c["cuCtxSynchronize"]()
        while live:
            destroyer, what = live.popitem()[0]
            c[destroyer](what)
        c["cuDevicePrimaryCtxRelease_v2"](device)

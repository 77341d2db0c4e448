"""The driver, over the simulated library; and the names of its functions, in a real one."""

from __future__ import annotations

import ctypes
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from calcvm.errors import CalcError, DeviceError, PlanError
from calcvm.kernels_cuda._cuda import block, blocks, f32_at, f64_at, i64_at, like, sync, thread, threads
from calcvm.testing import cuda_driver
from calcvm.testing.cuda_driver import Library
from calcvm.vm.run.cuda.driver import FUNCTIONS, LIBRARY, Driver, load_library


@pytest.fixture
def library():
    return Library(1 << 16, multiprocessors=3)


@pytest.fixture
def driver(library):
    driver = Driver(library)
    yield driver
    driver.close()
    assert library.left == 0


def scale(x, y, n, factor):
    """y = factor*x."""
    a, b = f32_at(x), f32_at(y)
    i = block() * threads() + thread()
    while i < n:
        b[i] = like(b, factor) * a[i]
        i += blocks() * threads()


def count_up(counter):
    """Add 1, by one thread after all have met."""
    c = i64_at(counter)
    sync()
    if block() == 0 and thread() == 0:
        c[0] += 1


def read_wide(x):
    f64_at(x)[0] = 0.0


cuda_driver.KERNELS |= {b"test scale": scale, b"test count_up": count_up, b"test read_wide": read_wide}


def kernel(driver, key):
    return driver.function(driver.load(key), "calcvm_test")


# ---------------------------------------------------------------- the device
def test_what_a_device_is(driver):
    assert (driver.name, driver.compute_capability, driver.multiprocessors) == ("simulated", (9, 0), 3)
    assert driver.version >= (12, 0)


def test_no_library_no_device():
    with pytest.raises(DeviceError, match="libnone.so.1 was not found; install NVIDIA's driver, or use device='cpu'"):
        load_library("libnone.so.1")
    with pytest.raises(DeviceError, match="has no cuInit: install one for CUDA 12 or later"):
        load_library("libc.so.6")
    for devices, number in ((0, 0), (1, 1), (1, -1)):
        with pytest.raises(DeviceError, match=f"no CUDA device {number}: the driver has {devices}; use device='cpu'"):
            Driver(Library(devices=devices), number)


# ---------------------------------------------------------------- memory
def test_copies(driver):
    x, y = np.arange(10, dtype=np.float32), np.zeros(10, np.float32)
    a, b = driver.alloc(x.nbytes), driver.alloc(x.nbytes)
    assert a % 256 == 0
    driver.to_host(y, a)
    assert np.isnan(y).all(), "new memory is not 0"
    for stream in (None, driver.stream(), driver.stream(independent=True), 0):
        driver.fill(b, 0, x.nbytes, stream)
        driver.to_device(a, x, stream)
        driver.copy(b, a, 12, stream)
        driver.to_host(y, b, stream)
        driver.synchronize(stream)
        assert y.tolist() == [0, 1, 2] + 7 * [0]
    driver.to_device(0, x[:0])  # nothing is copied anywhere
    with pytest.raises(CalcError, match=r"an array of shape \(5,\) has gaps"):
        driver.to_device(a, x[::2])


def test_a_copy_stays_inside_an_allocation(driver):
    a = driver.alloc(40)
    for address, n in ((a, 41), (a + 4, 40), (a - 4, 8), (12345, 4)):
        with pytest.raises(DeviceError, match=r"cuMemcpyHtoD_v2: CUDA_ERROR_INVALID_VALUE \(1\): invalid argument"):
            driver.to_device(address, np.zeros(n, np.uint8))
        with pytest.raises(DeviceError, match="cuMemsetD8_v2"):
            driver.fill(address, 0, n)
    driver.free(a)
    with pytest.raises(DeviceError, match="INVALID_VALUE"):
        driver.fill(a, 0, 4)


def test_too_much_memory(driver):
    assert driver.memory() == (1 << 16, 1 << 16)
    a = driver.alloc(1 << 15)
    with pytest.raises(PlanError, match="40000 bytes do not fit simulated: 32768 of its 65536 bytes are free") as error:
        driver.alloc(40000)
    assert (error.value.needed, error.value.allowed) == (40000, 1 << 15)
    driver.free(a)
    driver.alloc(1 << 16)
    with pytest.raises(PlanError):
        driver.alloc(1)


def test_freed_once(driver):
    a = driver.alloc(8)
    driver.free(a)
    with pytest.raises(CalcError, match="is not this driver's, or was freed before"):
        driver.free(a)
    driver.free(driver.alloc(0))


def test_page_locked_memory(driver, library):
    x = driver.pinned(64).view(np.float32)
    x[:] = 2
    y = driver.alloc(64)
    driver.launch(kernel(driver, b"test scale"), 1, 4, [driver.device_address(x[4:]), y, 12, 3])()
    driver.to_host(x[:12], y)
    assert x.tolist() == 12 * [6] + 4 * [2]
    part = x[3:]
    del x
    gc.collect()
    assert part.sum() == 9 * 6 + 4 * 2, "a part keeps it"
    assert len(library.host.blocks) == 1
    del part
    assert not library.host.blocks
    assert driver.pinned(0).size == 0


def test_registered_memory(driver):
    x = np.arange(8, dtype=np.float32)
    address = driver.register(x)
    assert driver.device_address(x[2:]) == address + 8
    with pytest.raises(DeviceError, match="ALREADY_REGISTERED"):
        driver.register(x)
    driver.launch(kernel(driver, b"test scale"), 1, 4, [address, address, 8, 2])()
    assert x.tolist() == list(range(0, 16, 2))
    driver.unregister(x)
    with pytest.raises(CalcError, match="not page-locked"):
        driver.device_address(x)


# ---------------------------------------------------------------- streams, events, graphs
def test_events(driver):
    stream, other = driver.stream(), driver.stream()
    start, end = driver.event(), driver.event(timing=False)
    with pytest.raises(DeviceError, match="cuEventElapsedTime: CUDA_ERROR_INVALID_HANDLE"):
        driver.elapsed_ms(start, end)
    driver.record(start, stream)
    driver.record(end, other)
    driver.synchronize_event(end)
    assert driver.elapsed_ms(start, end) > 0
    driver.free_event(start)
    with pytest.raises(DeviceError, match="cuEventRecord"):
        driver.record(start, stream)
    driver.free_stream(stream)
    with pytest.raises(DeviceError, match="cuStreamSynchronize"):
        driver.synchronize(stream)


def test_graph(driver, library):
    x, y = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    a, b = driver.alloc(16), driver.alloc(16)
    stream = driver.stream()
    launch = driver.launch(kernel(driver, b"test scale"), 2, 4, [a, b, 4, 3], stream=stream)

    def work():
        driver.to_device(a, x, stream)
        driver.fill(b, 0, 16, stream)
        launch()
        driver.to_host(y, b, stream)

    graph = driver.graph(stream, work)
    assert library.launches == 0 and not y.any()
    launch.arguments[3] = 100  # what was recorded does not change
    for k in (1, 2):
        x[:] = k
        driver.run_graph(graph, stream)
        driver.synchronize(stream)
        assert library.launches == k and y.tolist() == 4 * [3 * k]
    driver.free_graph(graph)


def test_a_capture_ends_also_where_it_fails(driver):
    stream = driver.stream()
    for call in (lambda: driver.alloc(4), driver.synchronize, lambda: driver.fill(0, 0, 1, 0), lambda: 1 / 0):
        with pytest.raises((DeviceError, ZeroDivisionError)) as error:
            driver.graph(stream, call)
        assert error.type is ZeroDivisionError or "STREAM_CAPTURE_UNSUPPORTED" in str(error.value)
    driver.synchronize()
    with pytest.raises(DeviceError, match="STREAM_CAPTURE"):
        driver.graph(0, lambda: None)


# ---------------------------------------------------------------- kernels
def test_launch(driver):
    x = np.arange(50, dtype=np.float32)
    a, b = driver.alloc(x.nbytes), driver.alloc(x.nbytes)
    driver.to_device(a, x)
    launch = driver.launch(kernel(driver, b"test scale"), 2, 4, [a, b, 50, 3])
    for factor in (3, -5):
        launch.arguments[3] = factor
        launch()
        y = np.empty_like(x)
        driver.to_host(y, b)
        assert (y == factor * x).all()
    launch.arguments[2] = 0
    launch()


def test_cooperative_launch(driver):
    function, counter = kernel(driver, b"test count_up"), driver.alloc(8)
    driver.fill(counter, 0, 8)
    assert driver.occupancy(function, 4) == 1
    driver.launch(function, 3, 4, [counter], cooperative=True)()
    with pytest.raises(DeviceError, match="cuLaunchCooperativeKernel: CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"):
        driver.launch(function, 4, 4, [counter], cooperative=True)()
    driver.launch(function, 4, 4, [counter])()
    count = np.zeros(1, np.int64)
    driver.to_host(count, counter)
    assert count[0] == 2


def test_shared_memory_must_be_allowed(driver):
    function, counter = kernel(driver, b"test count_up"), driver.alloc(8)
    launch = driver.launch(function, 1, 4, [counter], shared_bytes=64 << 10)
    with pytest.raises(DeviceError, match="cuLaunchKernel: CUDA_ERROR_INVALID_VALUE"):
        launch()
    assert driver.occupancy(function, 4, 64 << 10) == 0
    driver.allow_shared(function, 64 << 10)
    assert driver.occupancy(function, 4, 64 << 10) == 1
    driver.fill(counter, 0, 8)
    launch()
    with pytest.raises(DeviceError, match="cuFuncSetAttribute"):
        driver.allow_shared(function, 1 << 20)


def test_modules(driver):
    with pytest.raises(DeviceError, match=r"cuModuleLoadDataEx: CUDA_ERROR_INVALID_PTX \(218\).*\n.*no kernel .*other"):
        driver.load("other")
    module = driver.load("test count_up")
    function = driver.function(module, "f")
    driver.unload(module)
    with pytest.raises(DeviceError, match="INVALID_HANDLE"):
        driver.launch(function, 1, 4, [0])()


def test_a_kernel_that_leaves_its_memory(driver):
    function, a = kernel(driver, b"test scale"), driver.alloc(16)
    with pytest.raises(CalcError, match=f"address {0x123450:#x} is in no memory of the device"):
        driver.launch(function, 1, 4, [a, 0x123450, 4, 1])()
    with pytest.raises(CalcError, match="calcvm_test leaves its memory: .*index 4 is out of bounds"):
        driver.launch(function, 1, 4, [a, a, 5, 1])()
    host = np.zeros(4, np.float32)
    with pytest.raises(CalcError, match="is in no memory of the device"):
        driver.launch(function, 1, 4, [a, host.ctypes.data, 4, 1])()
    with pytest.raises(CalcError, match="is no multiple of 8, as float64 needs it"):
        driver.launch(kernel(driver, b"test read_wide"), 1, 4, [a + 4])()
    driver.launch(function, 1, 4, [a, a + 16, 0, 1])()  # a pointer to the end, which is not read


# ---------------------------------------------------------------- threads, ends
def test_threads_and_drivers_have_their_contexts(library, driver):
    other = Driver(Library(1 << 10))

    def work(k):
        for one in (driver, other):
            a = one.alloc(8)
            one.to_device(a, np.array([k]))
            one.free(a)
        return threading.get_ident()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(12)))
    work(0)
    assert not library.device.blocks
    other.close()


def test_a_lost_device(library):
    driver = Driver(library)
    a, stream = driver.alloc(8), driver.stream()
    launch = driver.launch(kernel(driver, b"test count_up"), 1, 4, [a], stream=stream)
    driver.fill(a, 0, 8)
    library.lose_after(2)
    launch()
    for _ in range(2):
        with pytest.raises(DeviceError, match="LAUNCH_FAILED .719.: .*the device is lost to this process") as error:
            driver.synchronize(stream)
        assert error.value.lost
    with pytest.raises(DeviceError) as error:
        driver.alloc(8)
    assert error.value.lost
    driver.free(a)  # it is gone already
    driver.free_stream(stream)
    driver.close()


def test_other_errors_are_not_a_lost_device(driver):
    with pytest.raises(DeviceError) as error:
        driver.fill(0, 0, 8)
    assert not error.value.lost and isinstance(error.value, CalcError)


@pytest.mark.parametrize("how", ["close", "forget"])
def test_what_is_left_is_freed(how):
    library = Library()
    driver = Driver(library)
    x = np.zeros(4)
    driver.alloc(8), driver.register(x), driver.event(), driver.stream(), driver.load(b"test scale")
    driver.graph(driver.stream(), lambda: None)
    kept = driver.pinned(8)
    assert library.left == 9  # the context is one
    if how == "close":
        driver.close()
        with pytest.raises(DeviceError, match="the driver was closed"):
            driver.memory()
        assert library.left == 0
        del kept
    else:
        del driver
        gc.collect()
        assert library.left == 9, "page-locked memory that is in use keeps its driver"
        del kept
        gc.collect()
        assert library.left == 0


@pytest.mark.gpu
def test_a_real_library_has_the_functions():
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        pytest.skip(f"{LIBRARY} is not installed")
    load_library()
    assert all(hasattr(Library, name) for name in FUNCTIONS)

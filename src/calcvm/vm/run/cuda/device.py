"""`Cuda`: a GPU as a device of calcvm.  It runs jobs of the VM in one of three ways, with the same bits.

*grid*: one kernel runs all rows of a job; its blocks meet at the plan's barriers.  *fleet*: one block per model.
*graph*: one launch per row; the launches are recorded once, and then launched as one graph.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from calcvm.errors import CalcError, DeviceError
from calcvm.kernels_cpu._native import cache_root
from calcvm.ops.contraction import PRODUCTS
from calcvm.vm.program.encoding import phases_of
from calcvm.vm.run import job as J
from calcvm.vm.run.cuda import build
from calcvm.vm.run.cuda.arena import Arena, Piece
from calcvm.vm.run.cuda.cost import Figures
from calcvm.vm.run.cuda.driver import Driver, Launch
from calcvm.vm.run.cuda.loop import CONTROL_BYTES, GAVE_UP, PATIENCE_NS, round_of, rows_of
from calcvm.without_signals import uncollected

SIMULATOR = "CALCVM_CUDA_SIMULATOR"  # set to 1: use a simulated device instead of a GPU
PATIENCE_SECONDS = 20  # the time a block waits for the others before the launch is given up
CAPABILITIES = (8, 0), (9, 0)  # the oldest that runs, the newest compile target
CHUNK_BYTES = 1 << 16
ROW_COPIES = 4  # number of copies of a program's rows, each patched for a batch, in one allocation
KEPT_GRAPHS = 64
RESERVED_BYTES = 256 << 20  # device memory that data sets leave free, for code and for other processes
# Threads of a block that runs one model, and blocks per multiprocessor.  With 6 blocks a thread has 168 registers.  With 8 it has
# 128, and NVIDIA's assembler takes 36 s for the paper's network instead of 7 (CUDA 13.0).
FLEET_THREADS, FLEET_BLOCKS = 64, 6
WIDE_BLOCKS = 2  # per multiprocessor, for the launch of a row that is no matrix product

# The box: words that a launch gets and returns.
CONTROL, JOB = 0, CONTROL_BYTES // 8
FLEET = JOB + J.TASK_WORDS
SELF = FLEET + J.FLEET_WORDS  # the address of the job, as a table of one task
BOX_WORDS = SELF + 1
PROCESS_BYTES = 2 * CHUNK_BYTES + 8 * BOX_WORDS  # device memory that the first program of a process takes in addition


def table_bytes(n_rows: int, n_words: int) -> int:
    """Device memory of a program's rows, with ``n_words`` words each."""
    return 8 * n_words * ROW_COPIES * n_rows


class Kernels:
    """The data that a program's models share on the device: its instructions, and room for its rows."""

    address = 0  # there is no table of kernels: dispatch is compiled

    def __init__(self, device: Cuda, program: Any):
        self.names = tuple(name for name, _ in program.instructions)
        self._numbers = np.array([build.number(name) for name in self.names], np.int64)
        self.mode = program.info.get("mode") or "grid"
        self.precision = program.info.get("precision") or "float32"
        self.dtype, self.itemsize, self.rows = program.dtype, program.itemsize, program.rows
        self.graphs: dict[Any, int] = {}
        self._device = device
        self._places: list[int] = []  # free addresses for copies of the rows
        self._room = 0, 0
        self._free_room: Any = None
        self.staged: np.ndarray | None = None  # the feeds of the last pass with staged samples
        self._grow()

    def _grow(self) -> None:
        nbytes = table_bytes(*self.rows.shape)
        start = self._device.allocate(nbytes)
        weakref.finalize(self, self._device.free, start, nbytes).atexit = False
        self._places += range(start, start + nbytes, max(nbytes // ROW_COPIES, 1))

    def room(self, nbytes: int) -> int:
        """Device address of a buffer for staged samples."""
        if nbytes > self._room[1]:
            if self._free_room is not None:
                self._free_room()
            self._room = self._device.allocate(nbytes), nbytes
            self._free_room = weakref.finalize(self, self._device.free, *self._room)
            self._free_room.atexit = False
        return self._room[0]

    def place(self, rows: np.ndarray) -> int:
        """Device address of a copy of rows, valid while the array lives."""
        if not self._places:
            self._grow()
        address = self._places.pop()
        weakref.finalize(rows, self._places.append, address).atexit = False
        numbered = rows.copy()
        numbered[:, 0] = self._numbers[rows[:, 0]]
        self._device.driver.to_device(address, numbered)
        return address


class Cuda:
    """One GPU, for the whole process.

    driver : of the GPU, or of a simulated one (``compiled`` is False then: kernels are Python functions).
    allocated_bytes, allocations : device memory now held; number of allocations so far.
    jobs : number of jobs so far.
    reserved_bytes : device memory that data sets leave free; a data set that does not fit is read from the host.
    context_bytes : memory of the driver and of other processes when this object was created.
    """

    name = "cuda"
    stops = False

    def __init__(
        self, driver: Driver, *, compiled: bool = True, threads: int = 256, fleet_threads: int = FLEET_THREADS
    ):
        if driver.compute_capability < CAPABILITIES[0]:
            raise DeviceError(
                f"{driver.name} has compute capability {driver.compute_capability}, {CAPABILITIES[0]} or later is needed: "
                "use device='cpu'"
            )
        self.driver, self.compiled = driver, compiled
        self.threads, self.fleet_threads = threads, fleet_threads
        self.reserved_bytes = RESERVED_BYTES if compiled else 0
        self.allocated_bytes = self.allocations = self.jobs = 0
        free, total = driver.memory()
        self.context_bytes = total - free
        self.figures = replace(Figures.load(self.figures_path), multiprocessors=driver.multiprocessors)
        self.lock = threading.RLock()
        self.stream = driver.stream(independent=True)
        self.shared_pieces = Arena(driver, self.allocate, CHUNK_BYTES)
        self._constants = Arena(driver, self.allocate, CHUNK_BYTES)
        self._known: dict[bytes, weakref.ref[Piece]] = {}
        self._owned: dict[int, list] = {}  # objects kept for an array of the caller's, by its id
        self._outputs: dict[int, tuple[int, int]] = {}  # by the array's id: device address, bytes
        self._box, self._box_address = driver.pinned(8 * BOX_WORDS).view(np.int64), self.allocate(8 * BOX_WORDS)
        self._modules: dict[Any, tuple[int, int]] = {}
        self._far: set[int] = set()  # addresses of data sets in host memory
        self.with_job: list[tuple[np.ndarray, int]] = []  # copies at the end of the next job: array, device address
        self._table: tuple[int, int] = (0, 0)  # for a fleet's tasks: address, bytes

    @property
    def n_workers(self) -> int:
        """Number of a fleet's blocks that the device runs at once."""
        return self.driver.multiprocessors * FLEET_BLOCKS

    @property
    def figures_path(self) -> Any:
        """The file for measured figures of this GPU."""
        return cache_root() / "gpus" / f"{self.driver.name.replace(' ', '-')}.json"

    # ------------------------------------------------------------ memory
    def allocate(self, nbytes: int) -> int:
        """Device memory (PlanError, with the bytes needed and free: it is too small)."""
        with self.lock:
            address = self.driver.alloc(nbytes)
            self.allocated_bytes += nbytes
            self.allocations += 1
        return address

    def free(self, address: int, nbytes: int) -> None:
        with self.lock:  # a finalizer may call it, in any thread
            self.driver.free(address)
            self.allocated_bytes -= nbytes

    def place(self, rows: np.ndarray, kernels: Kernels) -> int:
        """Device address of a copy of a program's rows, patched for a batch."""
        return kernels.place(rows)

    def constant(self, array: np.ndarray) -> int:
        """Device address of a copy of a constant array, valid while the array lives; equal arrays share a copy."""
        content = np.ascontiguousarray(array).tobytes()
        known = self._known.get(content)
        piece = known() if known else None
        if piece is None:
            piece = self._constants.take(array.shape, array.dtype)
            piece.array[...] = array
            self.driver.to_device(piece.address, piece.array.reshape(-1))
            self._known[content] = weakref.ref(piece, partial(_unknow, self._known, content))
        self._keep(array, piece)
        return piece.address

    def shared(self, elems: int, dtype: Any = np.float64) -> Piece:
        """Cells for both sides: the device sees the host's writes when a job begins, the host the device's when it ends."""
        return self.shared_pieces.take(elems, dtype)

    def samples(self, array: np.ndarray) -> int:
        """Device address of a data set: a copy, or, if that does not fit, the array itself, page-locked."""
        held = next((x for x in self._owned.get(id(array), ()) if isinstance(x, DataSet)), None)
        if held is None:
            held = DataSet(self, array)
            self._keep(array, held)
        elif held.resident and held.jobs != self.jobs:  # the array may have changed since its last use
            held.copy(self, array)
        return held.address

    def output(self, array: np.ndarray) -> int:
        """Device address of memory for an array's bytes; `collect` copies them back."""
        address = self.allocate(array.nbytes)
        self._outputs[id(array)] = address, array.nbytes
        weakref.finalize(array, self._forget, id(array)).atexit = False
        return address

    def _forget(self, output: int) -> None:
        self.free(*self._outputs.pop(output))

    def collect(self, *outputs: np.ndarray) -> None:
        """Copy the device's results to outputs; shared pieces are copied with each job."""
        with self.lock:
            for array in outputs:
                self.driver.to_host(array.reshape(-1), self._outputs[id(array)][0], self.stream)
            self.driver.synchronize(self.stream)

    def _keep(self, array: np.ndarray, what: Any) -> None:
        """Keep an object alive as long as the caller's array."""
        if id(array) not in self._owned:
            weakref.finalize(array, self._owned.pop, id(array), None).atexit = False
        self._owned.setdefault(id(array), []).append(what)

    # ------------------------------------------------------------ programs
    def prepare(self, program: Any) -> Kernels:
        """The data that a program's models share; nothing is compiled before the program runs."""
        return Kernels(self, program)

    def function(self, entry: str, names: Iterable[str], dtype: str, target: build.Target) -> tuple[int, int]:
        """A kernel for rows with these names, and the number of its blocks that one multiprocessor runs at once."""
        key = entry, tuple(names), dtype, target
        found = self._modules.get(key)
        if found is None:
            if self.compiled:
                image: str | bytes = build.ptx(entry, names, dtype, target)
            else:
                from calcvm.testing import cuda_driver

                image = repr(key).encode()
                cuda_driver.KERNELS[image] = build.functions(names, dtype)[entry]
            function = self.driver.function(self.driver.load(image), f"calcvm_{entry}")
            nbytes = target.shared_bytes(np.dtype(dtype).itemsize)
            if nbytes > 48 << 10:
                self.driver.allow_shared(function, nbytes)
            found = self._modules[key] = function, self.driver.occupancy(function, target.threads, nbytes)
        return found

    def _target(self, precision: str, threads: int, blocks: int) -> build.Target:
        newest = min(self.driver.compute_capability, CAPABILITIES[1])  # later ones assemble its PTX
        return build.Target(newest, threads, blocks, precision)

    # ------------------------------------------------------------ jobs
    def prepare_task(self, job: np.ndarray, loaded: Any) -> None:
        """Do nothing: the device's words of a job are set when it runs."""

    def run(self, code: str, job: np.ndarray, address: int, workers: int, loaded: Any) -> None:
        """Run a job for one model (see `calcvm.vm.run.device.Device`)."""
        with self.lock:
            box, rows = self._box, loaded.kernels
            box[:FLEET] = 0
            box[JOB : JOB + len(job)] = job
            box[JOB + J.BARRIER] = self._at(CONTROL)
            if code == "run_rows":
                run = self._rows_as_graph if rows.mode == "graph" else self._rows_by_grid
            elif code == "run_rounds":
                run = self._rounds_as_graphs if rows.mode == "graph" else self._rounds_by_grid
            else:
                run = self._task
                self._set_fleet(self._at(SELF), 1, int(job[J.COUNT]))
                box[SELF] = self._at(JOB)
            if code == "run_rounds":
                if rows.mode != "graph":
                    box[JOB + J.STAGED] = self._staged(job, rows)
                if box[JOB + J.PART] == 0 or box[JOB + J.PART] == box[JOB + J.PARTS]:
                    box[JOB + J.REACHED] = job[J.FIRST] + job[J.COUNT]  # the value after the job
            if code != "run_rows":
                self.shared_pieces.send(self.stream)
            self._send_box()
            run(job, workers, rows)
            if code != "run_rows":
                self.shared_pieces.fetch(self.stream)
            self._fetch_box()
            if code != "run_rows":
                job[:] = box[JOB : JOB + len(job)]

    def run_fleet(
        self, tasks: np.ndarray, places: np.ndarray, rounds: int, laps: int, workers: int, loaded: Iterable[Any]
    ) -> None:
        """A turn of ``rounds`` * ``laps`` rounds for each task, with one block per model, in one launch."""
        all_kernels = list({id(b): b.kernels for b in loaded}.values())
        names = sorted({name for kernels in all_kernels for name in kernels.names})
        if len({(c.dtype, c.precision) for c in all_kernels}) > 1:
            raise CalcError("models that train in one launch have one dtype and one precision: use a fleet for each")
        with self.lock:
            nbytes = tasks.nbytes + 8 * len(tasks)
            if nbytes > self._table[1]:
                if self._table[1]:
                    self.free(*self._table)
                self._table = self.allocate(nbytes), nbytes
            start = self._table[0]
            tasks[:, J.BARRIER] = self._at(CONTROL)
            there = tasks.copy()
            there[there[:, J.JUDGE] != 0, J.JUDGE] += start - tasks.ctypes.data
            self.driver.to_device(start, there.reshape(-1), self.stream)
            self.driver.to_device(start + tasks.nbytes, start + places * tasks.strides[0], self.stream)
            self._box[:FLEET] = 0
            self._set_fleet(start + tasks.nbytes, len(places), rounds * laps)
            self.shared_pieces.send(self.stream)
            self._send_box()
            self._turns(names, all_kernels[0], len(places))
            self.shared_pieces.fetch(self.stream)
            there = np.empty_like(tasks)
            self.driver.to_host(there.reshape(-1), start, self.stream)
            self._fetch_box()
            judges = tasks[:, J.JUDGE].copy()
            tasks[:] = there
            tasks[:, J.JUDGE] = judges

    def _set_fleet(self, addresses: int, n: int, rounds: int) -> None:
        box = self._box
        box[FLEET:] = 0
        box[[FLEET + J.TASKS, FLEET + J.N_TASKS, FLEET + J.SLICE]] = addresses, n, rounds

    def _at(self, word: int) -> int:
        """Device address of a word of the box."""
        return self._box_address + 8 * word

    def _send_box(self) -> None:
        self.jobs += 1
        self._box[CONTROL + PATIENCE_NS] = PATIENCE_SECONDS * 10**9
        self.driver.to_device(self._box_address, self._box, self.stream)

    def _fetch_box(self) -> None:
        """Wait for the launched work."""
        wanted, self.with_job = self.with_job, []
        for array, address in (*wanted, (self._box, self._box_address)):
            self.driver.to_host(array, address, self.stream)
        self.driver.synchronize(self.stream)
        if self._box[CONTROL + GAVE_UP]:
            raise DeviceError(
                f"a grid's blocks waited {PATIENCE_SECONDS} s for each other, and the launch was given up: "
                "another process may hold the GPU; try mode='graph', or fewer workers"
            )

    # ------------------------------------------------------------ a grid
    def _rows_by_grid(self, job: np.ndarray, workers: int, kernels: Kernels) -> None:
        self._grid("rows", kernels, workers, 0)

    def _rounds_by_grid(self, job: np.ndarray, workers: int, kernels: Kernels) -> None:
        self._grid("rounds", kernels, workers, 1 if self._box[JOB + J.STAGED] else 0)

    def _staged(self, job: np.ndarray, kernels: Kernels) -> int:
        """The feeds of a feeder block, which brings samples from host memory; 0 if all samples are on the device.

        The feeder reads them over the bus while the workers run the previous round.
        """
        feeds = np.zeros((int(job[J.N_FEEDS]), J.FEED_WORDS), np.int64)
        self.driver.to_host(feeds, int(job[J.FEEDS]))
        if not self._far.intersection(feeds[:, J.ADDRESS].tolist()):
            return 0
        sizes = {code: size for size, code in J.FEED_CELLS.items()}
        cells = np.array([sizes.get(code, 0) for code in feeds[:, J.DTYPE].tolist()], np.int64)
        each = np.where(cells, cells, kernels.itemsize)
        bytes_each = -(-feeds[:, J.ELEMS] * int(job[J.BATCH]) * each // 64) * 64
        staged = feeds.copy()
        staged[:, J.ADDRESS] = kernels.room(int(bytes_each.sum())) + np.cumsum(bytes_each) - bytes_each
        staged[cells == 0, J.DTYPE] = J.FEED_DTYPES[kernels.dtype]
        kernels.staged = staged
        return self.constant(staged)

    def _grid(self, entry: str, kernels: Kernels, workers: int, feeders: int) -> None:
        """Launch one kernel of ``workers`` blocks, or of as many as can be resident at once, since they wait for each other."""
        _, resident = self.function(
            entry, kernels.names, kernels.dtype, self._target(kernels.precision, self.threads, 1)
        )
        most = resident * self.driver.multiprocessors
        if most < 1 + feeders:
            raise DeviceError(f"{self.driver.name} cannot run {1 + feeders} blocks of {self.threads} threads at once")
        blocks = min(workers, most - feeders) + feeders
        self._job_launch(entry, kernels.names, kernels, blocks, blocks > 1)()

    # ------------------------------------------------------------ one block per task
    def _task(self, job: np.ndarray, workers: int, kernels: Kernels) -> None:
        self._turns(kernels.names, kernels, 1)

    def _turns(self, names: Sequence[str], kernels: Kernels, n: int) -> None:
        """Run turns of the ``n`` tasks of the fleet in the box, with one block each if there is room."""
        target = self._target(kernels.precision, self.fleet_threads, FLEET_BLOCKS)
        function, resident = self.function("fleet", names, kernels.dtype, target)
        blocks = max(min(n, resident * self.driver.multiprocessors), 1)
        self._launch(function, target, kernels, blocks, [self._at(FLEET)], False)()

    # ------------------------------------------------------------ graphs
    def _rows_as_graph(self, job: np.ndarray, workers: int, kernels: Kernels) -> None:
        start, stop, rows = (int(job[word]) for word in (J.START, J.STOP, J.ROWS))
        heap = int(job[J.HEAP])
        key = ("rows", rows, start, stop, heap, workers)
        graph = self._graph(kernels, key, lambda: self._row_launches(kernels, workers, rows, [(start, stop)], heap))
        for _ in range(int(job[J.STEPS])):
            self.driver.run_graph(graph, self.stream)

    def _rounds_as_graphs(self, job: np.ndarray, workers: int, kernels: Kernels) -> None:
        """Run one graph per round: its samples, its rows, its results."""
        heap, order = int(job[J.HEAP]), self._pairs(job, J.ORDER, J.N_ORDER)
        paths = {0: job, **{address: self._words(address) for address, _ in order}}
        spans = {
            a: [self._pairs(path, J.SPANS, J.N_SPANS), self._pairs(path, J.END_SPANS, J.N_END_SPANS)]
            for a, path in paths.items()
        }
        for k in range(int(job[J.FIRST]), int(job[J.FIRST] + job[J.COUNT])):
            of, j = order[k % len(order)] if order else (0, k)
            _, m, of_learning, is_last = round_of(paths[of], j)
            rows = int(rows_of(paths[of], m, of_learning))
            all_spans = sum(spans[of], []) if is_last else spans[of][0]

            def launches(rows: int = rows, all_spans: list = all_spans) -> list[Launch]:
                bring, hand_over = (
                    self._job_launch(e, (), kernels, n, False) for e, n in (("bring", workers), ("hand_over", 1))
                )
                return [bring, *self._row_launches(kernels, workers, rows, all_spans, heap), hand_over]

            key = ("rounds", rows, tuple(all_spans), heap, workers)
            self.driver.run_graph(self._graph(kernels, key, launches), self.stream)

    def _words(self, address: int) -> np.ndarray:
        """The words of a path, read from the device."""
        found = np.zeros(J.JOB_WORDS, np.int64)
        self.driver.to_host(found, address)
        return found

    def _pairs(self, job: np.ndarray, word: int, count: int) -> list[tuple[int, int]]:
        """Pairs that a job names, such as spans, read from the device."""
        found = np.zeros(2 * int(job[count]), np.int64)
        self.driver.to_host(found, int(job[word]))
        return [(int(a), int(b)) for a, b in found.reshape(-1, 2)]

    def _graph(self, kernels: Kernels, key: Any, make: Callable[[], list[Launch]]) -> int:
        """The graph of a list of launches, recorded at first use."""
        if key not in kernels.graphs:
            if len(kernels.graphs) >= KEPT_GRAPHS:
                self.driver.free_graph(kernels.graphs.pop(next(iter(kernels.graphs))))
            launches = make()  # before the recording, because it loads modules
            # a finalizer that frees memory would invalidate the recording
            kernels.graphs[key] = uncollected(lambda: self.driver.graph(self.stream, lambda: _make(launches)))
        return kernels.graphs[key]

    def _row_launches(
        self, kernels: Kernels, workers: int, rows: int, spans: list[tuple[int, int]], heap: int
    ) -> list[Launch]:
        """A launch for each phase of each row, with enough blocks to fill the device."""
        found = []
        for start, stop in spans:
            for pc in range(start, stop):
                name = kernels.names[kernels.rows[pc, 0]]
                product = name in PRODUCTS
                target = self._target(kernels.precision, self.threads, 1 if product else WIDE_BLOCKS)
                function, resident = self.function("row", (name,), kernels.dtype, target)
                blocks = workers if product else max(workers, resident * self.driver.multiprocessors)
                for phase in range(phases_of(kernels.rows[pc])):
                    arguments = [heap, rows + kernels.rows.strides[0] * pc, phase]
                    found.append(self._launch(function, target, kernels, blocks, arguments, False))
        return found

    # ------------------------------------------------------------ launches
    def _job_launch(self, entry: str, names: Sequence[str], kernels: Kernels, blocks: int, cooperative: bool) -> Launch:
        """A launch of the job in the box."""
        target = self._target(kernels.precision, self.threads, 1)
        function, _ = self.function(entry, names, kernels.dtype, target)
        return self._launch(function, target, kernels, blocks, [self._at(JOB)], cooperative)

    def _launch(
        self,
        function: int,
        target: build.Target,
        kernels: Kernels,
        blocks: int,
        arguments: list[int],
        cooperative: bool,
    ) -> Launch:
        return self.driver.launch(
            function, blocks, target.threads, arguments, shared_bytes=target.shared_bytes(kernels.itemsize),
            stream=self.stream, cooperative=cooperative,
        )  # fmt: skip


class DataSet:
    """Samples for the device: a copy in its memory, or page-locked host memory."""

    def __init__(self, device: Cuda, array: np.ndarray):
        self.resident = array.nbytes + device.reserved_bytes <= device.driver.memory()[0]
        if self.resident:
            self.address = device.allocate(array.nbytes)
            weakref.finalize(self, device.free, self.address, array.nbytes).atexit = False
            self.copy(device, array)
            return
        try:
            cells = (ctypes.c_ubyte * array.nbytes).from_address(array.ctypes.data)  # does not keep the array alive
            locked = np.ctypeslib.as_array(cells)
            self.address = device.driver.register(locked)
            weakref.finalize(self, device.driver.unregister, locked).atexit = False
        except DeviceError as error:
            if error.lost:
                raise
            self._copy = device.driver.pinned(array.nbytes)  # another locked array shares its pages
            self._copy[:] = array.reshape(-1).view(np.uint8)
            self.address = device.driver.device_address(self._copy)
        device._far.add(self.address)
        weakref.finalize(self, device._far.discard, self.address).atexit = False

    def copy(self, device: Cuda, array: np.ndarray) -> None:
        """Update the copy."""
        device.driver.to_device(self.address, array.reshape(-1))
        self.jobs = device.jobs


def _unknow(known: dict[bytes, Any], content: bytes, dead: Any) -> None:
    if known.get(content) is dead:  # unless another has replaced it
        del known[content]


def _make(launches: Iterable[Launch]) -> None:
    for launch in launches:
        launch()


# ---------------------------------------------------------------- the process's device
_device: Cuda | None = None
_opening = threading.Lock()


def cuda() -> Cuda:
    """The process's GPU, opened at first use (DeviceError: no driver, no GPU; MissingExtra: no numba-cuda)."""
    global _device
    with _opening:
        if _device is None:
            if os.environ.get(SIMULATOR) == "1":
                from calcvm.testing.cuda_driver import Library

                _device = Cuda(Driver(Library()), compiled=False, threads=16, fleet_threads=4)
            else:
                _device = Cuda(Driver.open())
        return _device

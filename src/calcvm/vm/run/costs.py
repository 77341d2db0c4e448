"""Row times on this machine: each row is measured alone, in a few runs, and the result is kept for later processes.

A row runs on a scratch heap that holds only its operands.  Numbers that it reads are between 0.5 and 1.5, so that none becomes
infinite, or so small that it slows arithmetic down; indexes and flags are 0.  Before each run other memory is written, which
moves the operands out of the core's private caches, as a step's other rows would.  A row shorter than
`SHORT` finds them warm, as it does in a step.  An empty job wakes the team, and its time is subtracted.  With one worker the
thread's own time counts, so other processes do not matter.

A step of a LeNet, batch 64, takes 4.8 ms, and 4.8 ms are predicted; if 24 MiB are written instead of 8, 6.2 ms (Zen 5, one
worker).

Summing these times ignores the caches' effect on a step: rows that read old values are slower, and all rows are faster in less
memory.  Example: a MobileNetV2, batch 8, whose rows were timed one by one in their step.  The rows that rerun in three quarters
of its memory take 7.4 ms; the sum predicts 3.5.  All other rows together take 12.5 ms less than the 146.9 ms of a step with the
least scratch.  So the rows of a finished plan are also measured with each large operand cold, the others as the row itself left
them, and with all large operands cold; operands that share a place do so there too.  `calcvm.planner.costs.cache_model` computes
the warm fraction of each.  Flushing an operand's cache lines makes it cold; writing as much other memory as the caches hold leaves
part of frequently used operands in place.  It matters which operand is cold: a weight gradient with operands of 4.6 and 0.8 MB
takes 0.30 ms, and the first one alone adds 0.34 to 0.40.  With this, 7.0 ms are predicted for the rerun rows, and 8.5 ms less for
all others.

The fastest of `FEWEST` to `MOST` runs counts, warm and cold.  Once `BOX` seconds are over, the remaining rows run only once.

Rows are timed with their pages in the TLB, which a step's rows do not always find there: without, 149 ms are predicted for a
step instead of 141, measured 152 to 159.  With a team the clock counts, so measurements on a busy machine are too long.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from calcvm.errors import CalcError, PlanError, ProgramError
from calcvm.kernels_cpu import FAMILIES, _native, prepare
from calcvm.kernels_cpu._target import host
from calcvm.ops.sizes import On, evaluate, extent
from calcvm.ops.spec import is_own
from calcvm.ops.statement import Statement
from calcvm.ops.types import bytes_of, dtype_of
from calcvm.system import machine_bytes, n_cores
from calcvm.vm.program.assemble import numbers
from calcvm.vm.program.encoding import ALIGN_BYTES, FLAG_PHASES, ITEMSIZE, RESERVED, aligned, encode_row, form_of
from calcvm.vm.run import job as J
from calcvm.vm.run.device import Cpu, Table, device_of
from calcvm.vm.run.entry import entry

MAGIC = b"calcvm costs 1\n"
FEWEST, MOST, ENOUGH = 2, 7, 0.02  # runs of a row: more until they have taken ENOUGH seconds
BOX = 4.0  # seconds for all rows, and again for those measured cold
SHORT, LONG_ENOUGH = 10e-6, 50e-6  # rows that take less than SHORT are repeated for LONG_ENOUGH seconds
OTHERS = 8 << 20  # bytes written before each run: more than a core's private caches, less than the shared ones
LARGE = 1 << 16  # bytes of an operand from which on it matters whether it is cold
CACHE_BYTES = 32 << 20  # of caches, if the system does not report it
PATTERN = 1 << 14  # length of the repeated pattern of numbers


class Costs:
    """Seconds of statements on a device, with a team: read from a file, and otherwise measured on demand.

    batch, workers, dtype, device : the conditions of the measurement.
    rows : names of the rows that will be needed; their kernels are compiled together.
    measure : returns a statement's seconds, instead of running it.
    measured : number of measurements.
    """

    def __init__(
        self,
        batch: int,
        workers: int,
        dtype: str,
        device: str = "cpu",
        rows: Iterable[str] = (),
        measure: Callable[[Statement], float] | None = None,
    ):
        self.batch, self.workers, self.dtype, self.measured = batch, workers, dtype, 0
        on = device_of(device)
        if not isinstance(on, Cpu):
            raise CalcError(
                f"costs are measured on the processor, not on device {device!r}: use costs='reckoned', or give a table"
            )
        self._device = on
        self._rows, self._measure = sorted(set(rows)), measure or self._run
        self.machine = machine(workers, dtype, device)
        self.path = path_of(self.machine)
        self.seconds = read(self.path, self.machine)
        self._new: dict[str, float] = {}
        self._spent = {"warm": 0.0, "cold": 0.0}  # time of the runs, in seconds
        self._clock = time.thread_time if workers == 1 and device == "cpu" else time.perf_counter
        self._others = np.zeros(0, np.uint8)
        self.cache_bytes = cache_bytes(workers) if host().x86 else 0  # elsewhere `flush` does nothing
        self._given = measure is not None
        self._heap = np.zeros(0, np.uint8)

    def __call__(self, statement: Statement) -> float:
        return self._known(self.key(statement), statement, self._measure)

    def found(self, statement: Statement, warm: Mapping[str, float], shared: Mapping[str, str]) -> float:
        """Seconds if fractions ``warm`` of its operands are in caches, and some operands share the place of others.

        Each operand adds the time that it costs when it alone is cold, times its missing fraction.  The sum never exceeds the time
        with all operands cold.
        """
        large = self._large(statement, shared)
        if not large or self._given:
            return self(statement)
        least = self._state(statement, shared, ())
        kept = min(1.0, self.cache_bytes / sum(large.values()))  # the fraction that the row itself leaves in caches
        more = sum(
            max(self._state(statement, shared, (name,)) - least, 0.0) * max(1 - warm[name] / kept, 0.0)
            for name in large
        )
        return min(least + more, max(self._state(statement, shared, tuple(large)), least)) if more else least

    def _known(self, key: str, statement: Statement, measure: Callable[[Statement], float]) -> float:
        """The table's entry for a key, measured if it is missing."""
        found = self.seconds.get(key)
        if found is None:
            found = self.seconds[key] = measure(statement)
            self.measured += 1
            if not is_own(statement.spec):  # a custom row may have another kernel in the next process
                self._new[key] = found
        return found

    def _state(self, statement: Statement, shared: Mapping[str, str], cold: tuple[str, ...]) -> float:
        """Seconds with some operands in no cache, and everything else as the row itself left it."""
        lies = [f"{name}@{of}" for name, of in shared.items()]
        key = " ".join([self.key(statement), "; shared", *lies, "; cold", *cold])
        return self._known(key, statement, lambda st: self._run_cold(st, shared, cold))

    def _large(self, statement: Statement, shared: Mapping[str, str]) -> dict[str, int]:
        """Bytes of operands that take long to fetch, each place once."""
        words, _ = numbers(statement, self.batch)
        sizes = {name: nbytes for name, nbytes, _ in self._sizes(statement, words) if nbytes >= LARGE}
        return {name: nbytes for name, nbytes in sizes.items() if name not in shared}

    def key(self, statement: Statement) -> str:
        """Everything that the time depends on: the instruction, its words at the batch, the operands that are present."""
        words = numbers(statement, self.batch)[0]
        present = [o.name for o in statement.spec.operands if statement.operands.get(o.name) is not None]
        texts = [f"{name}={value}" for name, value in words.items()]
        return " ".join([statement.spec.name, form_of(statement.spec), *texts, ":", *present])

    def keep(self) -> None:
        """Write the measurements to the file, merged with those of other processes."""
        if self._new:
            body = {"machine": self.machine, "seconds": {**read(self.path, self.machine), **self._new}}
            _native.store(self.path, MAGIC, json.dumps(body).encode(), "measured costs")
            self._new = {}

    # ------------------------------------------------------------ measuring
    def _run(self, statement: Statement) -> float:
        self._prepare()
        job, _, alive = self._job(statement, {})

        def lap() -> float:
            self._others[...] = 0
            return self._seconds(job, 1)

        once = self._fastest(lap, "warm")
        if once < SHORT:
            steps = int(LONG_ENOUGH / max(once, 1e-7))
            once = min(self._seconds(job, steps) / steps for _ in range(MOST))
        del alive
        return max(once, 1e-9)

    def _run_cold(self, statement: Statement, shared: Mapping[str, str], cold: tuple[str, ...]) -> float:
        """The fastest of some runs; before each the row runs once, and some operands are flushed from all caches."""
        self._prepare()
        job, places, alive = self._job(statement, shared)
        heap = self._heap.ctypes.data

        def lap() -> float:
            self._seconds(job, 1)
            for name in cold:
                start, nbytes = places[name]
                entry("flush")(heap + start, heap + start + nbytes)
            return self._seconds(job, 1)

        once = self._fastest(lap, "cold")
        del alive
        return max(once, 1e-9)

    def _fastest(self, lap: Callable[[], float], of: str) -> float:
        """The shortest time among some runs."""
        laps, fewest = list[float](), FEWEST if self._spent[of] < BOX else 1
        while len(laps) < fewest or (len(laps) < MOST and sum(laps) < ENOUGH):
            laps.append(lap())
        self._spent[of] += sum(laps)
        return min(laps)

    def _prepare(self) -> None:
        """Compile the kernels of all rows together, and allocate the memory that is written between runs."""
        if self._rows:
            prepare(self._rows, self.dtype, self._device.name)
            self._rows, self._others = [], np.zeros(OTHERS, np.uint8)

    def _seconds(self, job: np.ndarray, steps: int) -> float:
        """Seconds of ``steps`` runs, less those of an empty job."""
        laps = []
        for job[J.STEPS] in (0, 0, steps):  # the first wakes the team
            start = self._clock()
            self._device.run("run_rows", job, job.ctypes.data, self.workers)
            laps.append(self._clock() - start)
        return max(laps[2] - laps[1], 0.0)

    def _job(
        self, statement: Statement, shared: Mapping[str, str]
    ) -> tuple[np.ndarray, dict[str, tuple[int, int]], Any]:
        """A job that runs a statement, the places of its operands, and objects that must live as long."""
        words, _ = numbers(statement, self.batch)
        places = self._placed(statement, words, shared)
        offsets: dict[str, int | None] = {
            o.name: places[o.name][0] // bytes_of(o.type, ITEMSIZE[self.dtype])
            for o in statement.spec.operands
            if o.name in places
        }
        flags = FLAG_PHASES if words.get("phases", 1) > 1 else 0
        row = aligned(8 * len(encoded := encode_row(statement.spec, words, offsets, flags))).view(np.int64)
        row[...] = encoded
        table = Table([statement.spec.name], self.dtype, self.workers, self._device.name)
        job = np.zeros(J.JOB_WORDS, np.int64)
        job[[J.TABLE, J.HEAP, J.ROWS]] = table.address, self._heap.ctypes.data, row.ctypes.data
        job[[J.START, J.STOP, J.ROW_BYTES]] = 0, 1, row.nbytes
        return job, places, (row, table)

    def _sizes(self, statement: Statement, words: Mapping[str, Any]) -> Iterator[tuple[str, int, Any]]:
        """Names, bytes and declarations of a statement's operands."""
        env = {**On(self.workers, 0)._asdict(), **words}
        for o in statement.spec.operands:
            if statement.operands.get(o.name) is not None:
                yield o.name, extent(o.elems, env).at(1) * bytes_of(o.type, ITEMSIZE[self.dtype]), o

    def _placed(
        self, statement: Statement, words: Mapping[str, Any], shared: Mapping[str, str]
    ) -> dict[str, tuple[int, int]]:
        """First byte in the scratch heap and size of each operand, after filling it with numbers."""
        env = {**On(self.workers, 0)._asdict(), **words}
        if any(evaluate(text, env) < 0 for text in statement.spec.require):
            raise ProgramError(f"row {statement.spec.name} ({statement.label}) does not have what it requires: {words}")
        itemsize = ITEMSIZE[self.dtype]
        places, filled, end = dict[str, tuple[int, int]](), [], RESERVED * itemsize
        for name, nbytes, o in self._sizes(statement, words):
            if name in shared:
                places[name] = places[shared[name]]
                continue
            places[name] = end, nbytes
            if o.access != "s":
                filled.append((end, nbytes, dtype_of(o.type, self.dtype)))
            end += -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
        if end > len(self._heap):
            self._heap = np.zeros(0, np.uint8)
            if end > machine_bytes():
                who = f"{statement.label or statement.spec.name}, whose costs are to be measured,"
                raise PlanError(f"{who} needs {end:,} bytes, the machine has {machine_bytes():,}", end, machine_bytes())
            self._heap = aligned(end)
        self._heap[: RESERVED * itemsize] = 0
        for start, nbytes, dtype in filled:
            fill(self._heap[start : start + nbytes], dtype)
        return places


def fill(memory: np.ndarray, dtype: str) -> None:
    """Fill with floats between 0.5 and 1.5, or zeros for other types."""
    if not dtype.startswith("float"):
        memory[...] = 0
        return
    cells, pattern = memory.view(dtype), _pattern(dtype)
    whole = len(cells) // PATTERN * PATTERN
    cells[:whole].reshape(-1, PATTERN)[...] = pattern
    cells[whole:] = pattern[: len(cells) - whole]


@cache
def _pattern(dtype: str) -> np.ndarray:
    return np.random.default_rng(0).uniform(0.5, 1.5, PATTERN).astype(dtype)


def cache_bytes(workers: int, root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Bytes of the last cache, plus those of each worker's core in the cache before it, as the system reports them."""
    levels = dict[int, int]()
    with suppress(OSError, ValueError):
        for folder in root.glob("index*"):
            if (folder / "type").read_text().strip() != "Instruction":
                kib = int((folder / "size").read_text().strip().removesuffix("K"))
                levels[int((folder / "level").read_text())] = kib << 10
    if max(levels, default=0) < 2:
        return CACHE_BYTES
    last = levels.pop(max(levels))
    return last + workers * max(levels.values())


# ---------------------------------------------------------------- the file
def machine(workers: int, dtype: str, device: str) -> dict[str, Any]:
    """The conditions of measured costs: the processor, the kernels with their sources, the team."""
    kernels = (*(m for family in FAMILIES for m in _native.modules_of(family, device)), "vm.run.loop")
    return {
        "processor": _processor(),
        "cores": n_cores(),
        "kernels": _native.folder(kernels, host()).name,
        "workers": workers,
        "dtype": dtype,
        "device": device,
    }


@cache
def _processor() -> str:
    """Its name, from the system."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(named, platform.processor())} ({host().cpu})"


def path_of(machine: Mapping[str, Any]) -> Path:
    """The file for a machine's costs."""
    return _native.cache_root() / "costs" / hashlib.sha256(json.dumps(machine).encode()).hexdigest()[:20]


def read(path: Path, machine: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of rows by key; empty if the file is damaged or from another machine."""
    body = _native.fetch(path, MAGIC)
    if body is None:
        return {}
    try:
        found = json.loads(body)
        seconds = dict[str, Any](found["seconds"]) if found["machine"] == machine else {}
    except (ValueError, TypeError, KeyError):
        return {}
    return dict(_sound(seconds))


def _sound(seconds: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in seconds.items():
        if type(value) is float and math.isfinite(value) and value > 0:
            yield key, value

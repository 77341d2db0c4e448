"""Devices: what runs the jobs of models.

A program is compiled for a device (``program.info["device"]``).  What it needs of the device goes through the one
object that `device_of` has for the name: kernels, addresses as compiled code sees them, running.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from calcvm import checks
from calcvm.errors import MissingExtra, UnsupportedOperator
from calcvm.kernels_cpu import address_of, prepare
from calcvm.system import check_runs
from calcvm.teams import default_team
from calcvm.vm.run import job as layout
from calcvm.vm.run.entry import address as entry_address
from calcvm.vm.run.entry import entry, places
from calcvm.vm.run.pieces import Shared
from calcvm.vm.run.slices import latest
from calcvm.vm.run.team import run as run_by_team

if TYPE_CHECKING:
    from calcvm.vm.program.program import Program
    from calcvm.vm.run.loaded import Loaded

DEVICES = ("cpu", "blas", "cuda")


class Kernels(Protocol):
    """What a device has of a program.  ``address`` is what jobs hold as TABLE (0: nothing)."""

    address: int


class Device(Protocol):
    """One of `DEVICES`.

    Addresses are as compiled code sees them.  The caller keeps an array whose address it has got, and does not
    move it; a device may take back what it holds for an array when that is gone.
    """

    name: str
    stops: bool  # a step or round that is long can be run in parts, so that Ctrl-C is heard between them

    @property
    def n_workers(self) -> int:
        """Workers that a fleet has unless told otherwise."""

    def prepare(self, program: Program) -> Kernels:
        """Make a program's rows ready to be run; what `Loaded.kernels` keeps."""

    def prepare_task(self, job: np.ndarray, loaded: Loaded) -> None:
        """Set the words of a rounds job (TASK_WORDS) that are the device's own."""

    def place(self, rows: np.ndarray, kernels: Any) -> int:
        """Address of a program's rows, patched for a batch; ``kernels`` are what `prepare` made."""

    def constant(self, array: np.ndarray) -> int:
        """Address of contents that compiled code reads and nobody changes; equal ones may share a copy."""

    def samples(self, array: np.ndarray) -> int:
        """Address of a data set, C-contiguous, whose samples are fetched."""

    def output(self, array: np.ndarray) -> int:
        """Address of an array, C-contiguous, that results are delivered to."""

    def shared(self, elems: int, dtype: Any = np.float64) -> Shared:
        """Zeroed memory for ``elems`` numbers."""

    def run(self, code: str, job: np.ndarray, address: int, workers: int, loaded: Loaded) -> None:
        """Run the job (``address`` is that of the array ``job``) to its end; its words are then as the loop left them.

        code : "run_rows", "run_rounds", or "run_task" by one worker, whose budget is the job's COUNT.
        """

    def run_fleet(
        self, tasks: np.ndarray, places: np.ndarray, rounds: int, laps: int, workers: int, loaded: Iterable[Loaded]
    ) -> None:
        """Run turns of ``rounds`` rounds for the tasks in ``places``, about ``laps`` times around, or for a slice of time.

        tasks : int64 (n_places, TASK_WORDS); a task's JUDGE is 0 or the host address of another of its rows.  Its
            words are afterwards as the loop left them, and what it wrote to shared memory is visible.
        loaded : the programs, in the order of ``places``.
        """

    def collect(self, *outputs: np.ndarray) -> None:
        """Make visible on the host what compiled code wrote to shared memory, and to these outputs."""


# ---------------------------------------------------------------- the processor
class Table:
    """Native addresses of the kernels of instructions, in their order."""

    def __init__(self, names: Sequence[str], dtype: str, workers: int, device: str):
        self.addresses = np.zeros(len(names), np.int64)
        loops = ("run_rows", "run_team", "serve") if workers > 1 else ("run_rows",)  # which are wanted next
        try:
            prepare(names, dtype, device, places(loops))
            for k, name in enumerate(names):
                self.addresses[k] = address_of(name, dtype, device)
        except KeyError:
            raise UnsupportedOperator(f"row {name!r} has no kernel: write one of its name (CONTRIBUTING.md)") from None
        except ImportError as error:
            if device == "cpu":
                raise
            raise MissingExtra("scipy", device, f"the device {device!r}") from error
        self.address = self.addresses.ctypes.data


class Cpu:
    """The processor, by own kernels ("cpu") or with SciPy's matrix products ("blas"): arrays are read where they are."""

    stops = True

    def __init__(self, name: str, team: str = "team"):
        self.name, self.team = name, team

    @property
    def n_workers(self) -> int:
        return default_team()

    def prepare(self, program: Program) -> Table:
        check_runs(f"device {self.name!r}", program.page_bytes > 0)
        return Table([name for name, _ in program.instructions], program.dtype, program.workers, self.name)

    def prepare_task(self, job: np.ndarray, loaded: Loaded) -> None:
        job[layout.CODE] = entry_address("run_rounds")
        job[layout.TABLE] = loaded.table_address

    def place(self, rows: np.ndarray, kernels: Any) -> int:
        return rows.ctypes.data

    def constant(self, array: np.ndarray) -> int:
        return array.ctypes.data

    samples = output = constant

    def shared(self, elems: int, dtype: Any = np.float64) -> Shared:
        array = np.zeros(elems, dtype)
        return Shared(array, array.ctypes.data)

    def run(self, code: str, job: np.ndarray, address: int, workers: int, loaded: Loaded | None = None) -> None:
        if workers > 1:
            run_by_team(code, job, address, workers, self.team)
        elif code == "run_task":
            entry(code)(address, int(job[layout.COUNT]))
        else:
            job[layout.TEAM] = 1
            entry(code)(address, 0)

    def run_fleet(
        self, tasks: np.ndarray, places: np.ndarray, rounds: int, laps: int, workers: int, loaded: Iterable[Loaded]
    ) -> None:
        addresses = tasks.ctypes.data + places * tasks.strides[0]
        job = np.zeros(layout.FLEET_WORDS, np.int64)
        job[[layout.TASKS, layout.N_TASKS]] = addresses.ctypes.data, len(places)
        job[[layout.SLICE, layout.LAPS]] = rounds, laps
        job[layout.DEADLINE] = latest()
        run_by_team("run_fleet", job, job.ctypes.data, min(workers, len(places)))

    def collect(self, *outputs: np.ndarray) -> None:
        """It is there."""


# ---------------------------------------------------------------- by name
_host = {name: Cpu(name) for name in ("cpu", "blas")}


def device_of(name: str) -> Device:
    """The process's device of that name (CalcError: there is none)."""
    checks.choice("device", name, DEVICES)
    if name == "cuda":
        from calcvm.vm.run.cuda.device import cuda

        return cuda()
    return _host[name]


def heaps_of(name: str) -> str:
    """The device whose heaps hold models of a device."""
    return "cpu" if name == "blas" else name

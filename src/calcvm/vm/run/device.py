"""Devices: they run the jobs of models.

A program is compiled for a device (``program.info["device"]``).  `device_of` returns the device object for a name.  It provides
the kernels, addresses as compiled code sees them, and running.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from calcvm import checks
from calcvm.errors import MissingExtra, UnsupportedOperator
from calcvm.kernels_cpu import address_of, prepare
from calcvm.system import check_runs
from calcvm.teams import default_team
from calcvm.vm.run import job as J
from calcvm.vm.run.entry import address as entry_address
from calcvm.vm.run.entry import entry, places
from calcvm.vm.run.pieces import Shared
from calcvm.vm.run.slices import latest
from calcvm.vm.run.specialized import Code, sections_of
from calcvm.vm.run.team import run as run_by_team

if TYPE_CHECKING:
    from calcvm.vm.program.program import Program

DEVICES = ("cpu", "blas", "cuda", "small")


class Kernels(Protocol):
    """A device's data for a program.  ``address`` is the TABLE of jobs (0: none)."""

    address: int


class OnDevice(Protocol):
    """The part of a program on a device (`calcvm.vm.run.loaded.Loaded`) that devices use."""

    program: Program
    kernels: Any
    table_address: int


class Device(Protocol):
    """One of `DEVICES`.

    Addresses are as compiled code sees them.  The caller keeps alive, and does not move, an array whose address it got; a device
    may free its data for an array once the array is gone.
    """

    name: str
    stops: bool  # a long step or round can run in parts, so that Ctrl-C works between them

    @property
    def n_workers(self) -> int:
        """Default number of workers of a fleet."""

    def prepare(self, program: Program) -> Kernels:
        """Prepare a program's rows to run; returns the value of `Loaded.kernels`."""

    def prepare_task(self, job: np.ndarray, loaded: OnDevice) -> None:
        """Set the device's words of a rounds job (TASK_WORDS)."""

    def place(self, rows: np.ndarray, kernels: Any) -> int:
        """Address of a program's rows, patched for a batch; ``kernels`` : the result of `prepare`."""

    def constant(self, array: np.ndarray) -> int:
        """Address of constant contents for compiled code; equal ones may share a copy."""

    def samples(self, array: np.ndarray) -> int:
        """Address of a C-contiguous data set whose samples are fetched."""

    def output(self, array: np.ndarray) -> int:
        """Address of a C-contiguous array for results."""

    def shared(self, elems: int, dtype: Any = np.float64) -> Shared:
        """Zeroed memory for ``elems`` numbers."""

    def run(self, code: str, job: np.ndarray, address: int, workers: int, loaded: OnDevice) -> None:
        """Run the job at ``address`` (that of the array ``job``) to its end; its words are then as the loop left them.

        code : "run_rows", "run_rounds", or "run_task" with one worker, whose budget is the job's COUNT.
        """

    def run_fleet(
        self, tasks: np.ndarray, places: np.ndarray, rounds: int, laps: int, workers: int, loaded: Iterable[OnDevice]
    ) -> None:
        """Run turns of ``rounds`` rounds of the tasks in ``places``, about ``laps`` times around, or for a slice of time.

        tasks : int64 (n_places, TASK_WORDS); a task's JUDGE is 0 or the host address of another of its rows.  Afterwards
            the words are as the loop left them, and its writes to shared memory are visible.
        loaded : the programs, in the order of ``places``.
        """

    def collect(self, *outputs: np.ndarray) -> None:
        """Make the host see compiled code's writes to shared memory, and to these outputs."""


# ---------------------------------------------------------------- the processor
class Table:
    """Native addresses of the instructions' kernels, in order; then those of ``sections`` (`calcvm.vm.run.specialized`)."""

    def __init__(self, names: Sequence[str], dtype: str, workers: int, device: str):
        self.addresses, self.sections = np.zeros(len(names), np.int64), dict[tuple[int, int], int]()
        loops = ("run_rows", "run_team", "serve") if workers > 1 else ("run_rows",)  # the loops that are needed next
        try:
            prepare(names, dtype, device, places(loops))
            for k, name in enumerate(names):
                self.addresses[k] = address_of(name, dtype, device)
        except KeyError:
            raise UnsupportedOperator(f"row {name!r} has no kernel: write one of its name (CONTRIBUTING.md)") from None
        except ImportError as error:
            if device != "blas":
                raise
            raise MissingExtra("scipy", device, f"the device {device!r}") from error
        self.address = self.addresses.ctypes.data

    def add(self, sections: Mapping[tuple[int, int], Code]) -> None:
        """Append the code of sections, which become instructions."""
        self.sections = {span: len(self.addresses) + k for k, span in enumerate(sections)}
        self.addresses = np.array([*self.addresses, *(code.address for code in sections.values())], np.int64)
        self.address = self.addresses.ctypes.data


class Cpu:
    """The processor, with calcvm's kernels ("cpu"), with SciPy's matrix products ("blas"), or with plain ones ("small"): arrays are read in place."""

    stops = True

    def __init__(self, name: str, team: str = "team"):
        self.name, self.team = name, team

    @property
    def n_workers(self) -> int:
        return default_team()

    def prepare(self, program: Program) -> Table:
        check_runs(f"device {self.name!r}", program.page_bytes > 0)
        table = Table([name for name, _ in program.instructions], program.dtype, program.workers, self.name)
        table.add(sections_of(program))
        return table

    def prepare_task(self, job: np.ndarray, loaded: OnDevice) -> None:
        job[J.CODE] = entry_address("run_rounds")
        job[J.TABLE] = loaded.table_address

    def place(self, rows: np.ndarray, kernels: Any) -> int:
        return rows.ctypes.data

    def constant(self, array: np.ndarray) -> int:
        return array.ctypes.data

    samples = output = constant

    def shared(self, elems: int, dtype: Any = np.float64) -> Shared:
        array = np.zeros(elems, dtype)
        return Shared(array, array.ctypes.data)

    def run(self, code: str, job: np.ndarray, address: int, workers: int, loaded: OnDevice | None = None) -> None:
        if workers > 1:
            run_by_team(code, job, address, workers, self.team)
        elif code == "run_task":
            entry(code)(address, int(job[J.COUNT]))
        else:
            job[J.TEAM] = 1
            entry(code)(address, 0)

    def run_fleet(
        self, tasks: np.ndarray, places: np.ndarray, rounds: int, laps: int, workers: int, loaded: Iterable[OnDevice]
    ) -> None:
        addresses = tasks.ctypes.data + places * tasks.strides[0]
        job = np.zeros(J.FLEET_WORDS, np.int64)
        job[[J.TASKS, J.N_TASKS]] = addresses.ctypes.data, len(places)
        job[[J.SLICE, J.LAPS]] = rounds, laps
        job[J.DEADLINE] = latest()
        run_by_team("run_fleet", job, job.ctypes.data, min(workers, len(places)))

    def collect(self, *outputs: np.ndarray) -> None:
        """Do nothing: the host sees all writes."""


# ---------------------------------------------------------------- by name
_host = {name: Cpu(name) for name in ("cpu", "blas", "small")}


def device_of(name: str) -> Device:
    """The process's device with that name (CalcError: there is none)."""
    checks.choice("device", name, DEVICES)
    if name == "cuda":
        from calcvm.vm.run.cuda.device import cuda

        return cuda()
    return _host[name]


def heaps_of(name: str) -> str:
    """The name of the device whose heaps hold a device's models."""
    return name if name == "cuda" else "cpu"

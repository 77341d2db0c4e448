"""A device in a plan over several: its workers, its memory, and the costs of rows on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from calcvm import checks, system
from calcvm.compiler import measured
from calcvm.errors import CalcError
from calcvm.ops.statement import Lowered, Statement
from calcvm.planner.costs.costing import Costing, check_costs
from calcvm.planner.costs.reckoned import MOST, Table, seconds
from calcvm.planner.lifetimes import Machine
from calcvm.vm.memory.heap import parse_bytes
from calcvm.vm.program.documents import MAX_BLOCKS, MAX_WORKERS

KINDS = ("cpu", "cuda")


@contextmanager
def on_cores(cores: tuple[int, ...] | None) -> Iterator[None]:
    """Keep the calling thread on these cores; team threads that it creates meanwhile stay there."""
    if cores is None:
        yield
        return
    before = system.affinity()
    system.set_affinity(cores)
    try:
        yield
    finally:
        system.set_affinity(before)


class Processor:
    """A device among several.

    Parameters
    ----------
    name : str
    device : "cpu" or "cuda"
    workers : int
        The size of its team: threads, or thread blocks.
    cores : sequence of int, optional
        Cores that its threads run on ("cpu"; default: all that the process may use).
    memory : int or str, optional
        Maximal bytes of its heap (default: no limit).
    speed : float
        Speed of its rows relative to one core, for reckoned costs.
    costs : "reckoned", "measured", mapping or callable
        Seconds of rows, as in `cv.plan`: reckoned, measured on this machine by the processor's team, a mapping from names of
        rows or labels to seconds (other rows are reckoned), or a function of a statement's facts.
    watts : float
        Power while it runs.

    Raises
    ------
    CalcError : a number is invalid, negative or not finite; a core does not exist.
    """

    def __init__(
        self,
        name: str,
        device: str = "cpu",
        *,
        workers: int = 1,
        cores: Iterable[int] | None = None,
        memory: int | str | None = None,
        speed: float = 1.0,
        costs: str | Table = "reckoned",
        watts: float = 0.0,
    ):
        self.name = checks.text("a processor's name", name, "big")
        self.device = checks.choice(f"processor {name!r}: device", device, KINDS)
        self.workers = checks.integer(
            f"processor {name!r}: workers", workers, 1, MAX_BLOCKS if device == "cuda" else MAX_WORKERS
        )
        self.memory = None if memory is None else parse_bytes(memory)
        self.speed = checks.number(f"processor {name!r}: speed", speed, 0, 1e9, ends="(]")
        self.watts = checks.number(f"processor {name!r}: watts", watts, 0, 1e9)
        self.cores = None if cores is None else self._checked_cores(cores)
        if isinstance(costs, Mapping):
            for row, value in costs.items():
                checks.number(f"processor {name!r}: seconds of {row!r}", value, 0, MOST)
        self.costs = check_costs(costs, device, f"processor {name!r}: costs")

    def _checked_cores(self, cores: Any) -> tuple[int, ...]:
        if self.device != "cpu":
            raise CalcError(f"processor {self.name!r}: a GPU has no cores to choose: leave cores= out")
        found = checks.items(f"processor {self.name!r}: cores", cores, "a list of numbers of cores, such as [0],")
        there = system.affinity()
        for core in found:
            if checks.integer(f"processor {self.name!r}: a core", core, 0) not in there:
                raise CalcError(f"processor {self.name!r}: core {core} is none that this process may use: {there}")
        if not found:
            raise CalcError(f"processor {self.name!r}: cores is empty; leave it out for any")
        if len({*found}) < len(found):
            raise CalcError(f"processor {self.name!r}: cores {found} has a duplicate")
        return tuple(found)

    @contextmanager
    def cost(
        self, lowered: Lowered, batch: int, machine: Machine, dtype: str
    ) -> Iterator[Callable[[Statement], float]]:
        """A function to the seconds of the program's statements, for a batch; measurements are stored at the end."""
        with Costing(self.costs, dtype, self.device, batch, measured) as costing:
            own = costing.of(lowered, self.workers) or (lambda st: seconds(st, batch, machine) / self.speed)

            def of(st: Statement) -> float:
                with on_cores(self.cores):  # per call, since other processors have their own
                    return own(st)

            yield of

    def __repr__(self) -> str:
        memory = "" if self.memory is None else f", {self.memory:,} bytes"
        return f"<Processor {self.name!r}: {self.device}, {self.workers} workers{memory}>"

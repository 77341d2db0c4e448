"""What a device is for a plan of several: who runs its rows, its memory, and what they take there."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from calcvm import checks
from calcvm.errors import CalcError
from calcvm.ops.statement import Statement
from calcvm.planner.cost import seconds
from calcvm.planner.lifetimes import Machine
from calcvm.vm.memory.heap import parse_bytes

KINDS = ("cpu", "cuda")


class Processor:
    """A device among several.

    Parameters
    ----------
    name : str
    device : "cpu" or "cuda"
    workers : int
        Its team: threads, or thread blocks.
    cores : sequence of int, optional
        Cores that its threads run on ("cpu"; default: wherever the process may).
    memory : int or str, optional
        Most bytes of its heap (default: no limit).
    speed : float
        How many times as fast as one core its rows are reckoned to be.
    costs : mapping or callable, optional
        Seconds of a statement in place of what is reckoned: by the name of the instruction (such as "conv_fwd"; of those that
        are left out they are reckoned), or a function of a `Statement`.
    watts : float
        That it takes while it runs.

    Raises
    ------
    CalcError : a number is none, negative or not finite; a core is not there.
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
        costs: Mapping[str, float] | Callable[[Statement], float] | None = None,
        watts: float = 0.0,
    ):
        self.name = checks.text("a processor's name", name, "big")
        self.device = checks.choice(f"processor {name!r}: device", device, KINDS)
        self.workers = checks.integer(f"processor {name!r}: workers", workers)
        self.memory = None if memory is None else parse_bytes(memory)
        self.speed = checks.number(f"processor {name!r}: speed", speed, 0, 1e9, ends="(]")
        self.watts = checks.number(f"processor {name!r}: watts", watts, 0, 1e9)
        self.cores = None if cores is None else self._checked_cores(cores)
        if costs is not None and not callable(costs) and not isinstance(costs, Mapping):
            raise CalcError(
                f"processor {name!r}: costs are seconds by the name of an instruction, or a function of a statement, not "
                f"{checks.called(costs)}"
            )
        self._costs = costs
        if isinstance(costs, Mapping):
            for row, value in costs.items():
                self._checked(value, repr(row))

    def _checked_cores(self, cores: Any) -> tuple[int, ...]:
        if self.device != "cpu":
            raise CalcError(f"processor {self.name!r}: a GPU has no cores to choose: leave cores= out")
        found = checks.items(f"processor {self.name!r}: cores", cores, "a list of numbers of cores, such as [0],")
        there = os.sched_getaffinity(0)
        for core in found:
            if checks.integer(f"processor {self.name!r}: a core", core, 0) not in there:
                raise CalcError(
                    f"processor {self.name!r}: core {core} is none that this process may use: {sorted(there)}"
                )
        if not found:
            raise CalcError(f"processor {self.name!r}: cores is empty; leave it out for any")
        return tuple(found)

    def _checked(self, value: Any, what: str) -> float:
        if not checks.is_number(value) or not math.isfinite(value) or value < 0:
            raise CalcError(
                f"processor {self.name!r}: the cost of {what} is {checks.shown(value)}: seconds, finite and not negative, are wanted"
            )
        return float(value)

    def cost(self, batch: int, machine: Machine) -> Callable[[Statement], float]:
        """Seconds of a statement, for a batch."""

        def of(st: Statement) -> float:
            if callable(self._costs):
                return self._checked(self._costs(st), f"{st.spec.name} ({st.label})")
            if self._costs is not None and st.spec.name in self._costs:
                return float(self._costs[st.spec.name])
            return seconds(st, batch, machine) / self.speed

        return of

    def __repr__(self) -> str:
        memory = "" if self.memory is None else f", {self.memory:,} bytes"
        return f"<Processor {self.name!r}: {self.device}, {self.workers} workers{memory}>"

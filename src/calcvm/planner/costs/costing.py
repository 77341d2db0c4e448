"""Costs of rows, as the user chose: reckoned (estimated), measured on this machine, or given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from calcvm import checks
from calcvm.errors import CalcError
from calcvm.ops.statement import Lowered, Statement
from calcvm.ops.types import BYTES
from calcvm.planner.costs.cache_model import Stateful, Touched, of_rows, touched
from calcvm.planner.costs.reckoned import of_step, told
from calcvm.planner.lifetimes import Machine
from calcvm.planner.paging import File, is_paging, moved_bytes
from calcvm.planner.plan_data import PlanData

COSTS = ("reckoned", "measured")
Planned = TypeVar("Planned", bound=PlanData)


class Measured(Stateful, Protocol):
    """Costs that are measured on demand (`calcvm.vm.run.costs.Costs`)."""

    def __call__(self, statement: Statement) -> float: ...

    def keep(self) -> None:
        """Store the measurements."""


def check_costs(how: Any, device: str, what: str = "costs") -> Any:
    """Check and return the ``costs`` option."""
    if isinstance(how, type) or not (isinstance(how, Mapping) or callable(how)):
        if not isinstance(how, str):
            raise CalcError(
                f"{what}: 'reckoned', 'measured', a mapping from rows to seconds or a function of a row is wanted, not "
                f"{checks.called(how)}"
            )
        checks.choice(what, how, COSTS)
    if how == "measured" and device == "cuda":
        raise CalcError(
            f"{what} are measured on the processor, not on device 'cuda': take costs='reckoned', or give a table"
        )
    return how


class Costing:
    """Costs of rows, as the user chose.  Leaving the context stores the measurements.

    how : "reckoned", "measured", or the user's table.
    measured : function that creates the table of measured costs, from a batch, a team, a dtype, a device and names of rows.
    """

    def __init__(
        self,
        how: Any,
        dtype: str,
        device: str,
        batch: int | None,
        measured: Callable[..., Measured],
        file: File | None = None,
    ):
        self.how, self.dtype, self.device, self.batch = check_costs(how, device), dtype, device, batch
        self.measured, self.file = measured, file
        self.without: dict[int, Callable[[], PlanData]] = {}
        self._made: dict[int, Any] = {}

    def of(self, lowered: Lowered, team: int) -> Callable[[Statement], float] | None:
        """A function from a statement to its seconds with a team (None: the planner's estimate)."""
        if self.how == "reckoned" or (self.how == "measured" and self.batch is None):
            return None
        if self.how == "measured":
            assert self.batch is not None
            rows = {st.spec.name for st in lowered.statements}
            self._made[team] = self.measured(self.batch, team, self.dtype, self.device, rows)
        else:
            machine = Machine(BYTES[self.dtype], team, self.device)
            self._made[team] = told(self.how, lowered, self.batch or 1, machine)
        return self._made[team]

    def on(self, plan: Planned) -> Planned:
        """The plan with the kind of its costs and the seconds of a step filled in."""
        seconds = without = None
        if plan.workers in self._made and self.batch is not None:
            seconds = self._step(plan)
            if plan.recomputed and self.how == "measured":
                without = self._step(self.without[plan.workers]())
        costs = self.how if isinstance(self.how, str) else "given"
        return replace(plan, costs=costs, seconds=seconds, seconds_without=without)

    def _step(self, plan: PlanData) -> float:
        """Seconds of a step of a plan; with measured costs, cache hits are followed from row to row."""
        made, machine = self._made[plan.workers], plan.layout.machine
        assert self.batch is not None
        if self.how != "measured" or not made.cache_bytes:
            cost = made if self.file is None else self.file.cost(made, self.batch, machine)
            return of_step(plan.statements, cost)
        paths: dict[str, list[Touched]] = {}
        moved = dict[str, float]()
        for st in plan.statements:
            if self.file is not None and is_paging(st):
                moved[st.path] = moved.get(st.path, 0.0) + self.file.seconds(moved_bytes(st, self.batch, machine))
            else:
                paths.setdefault(st.path, []).append(touched(st, plan.offsets, self.batch, machine))
        return max((of_rows(rows, made) + moved.get(path, 0.0) for path, rows in paths.items()), default=0.0)

    def __enter__(self) -> Costing:
        return self

    def __exit__(self, *error: object) -> None:
        if self.how == "measured":
            for made in self._made.values():
                made.keep()

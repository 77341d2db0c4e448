"""Several solvers race: each starts from the schedules that the others find, and a plan is made even if all of them fail.

Each solver runs in a separate process.  A schedule is replayed before it is accepted; the bound is the largest that any solver
reports.  If values may wait in a file, a solver without support for pages searches for schedules without them, and its bounds do
not count.  If a solver is missing, crashes or finds nothing in time, the schedule of the search stays, and `Solvers.says` reports
it.  Ctrl-C ends the solvers, not the planning: the best schedule so far is taken.

Overhead of the best schedule in per cent of a step (two cores of Zen 5; searched: without solvers, if that is worse):

| network | batch | memory | searched | found | bound | seconds |
|---|---|---|---|---|---|---|
| ResNet-18 | 8 | 75 % of the peak | | 0.87 | proved | 0.7 |
| | 8 | 56.9 % | 5.38 | 5.35 | proved | 1.3 |
| | 8 | 50 % | 9.85 | 9.68 | 9.53 | 10 |
| UNet at 256 | 2 | 50 % | 4.51 | 4.37 | 4.24; none of six versions of a value is cheaper | 10 |
| MobileNetV2 | 8 | 50 % | 9.39 | 9.278 | 9.277 | 30 |
| ResNet-50 | 8 | 80 % | 1.06 | 1.05 | proved | 2.8 |
| VGG-16, VGG-19 | 8 | 2 % of the peak above the largest statement | | 0.18, 0.20 | proved | 0.4, 0.5 |
| ResNet-34 | 8 | 10 % above it | 10.19 | 8.99 | 7.74 | 60 |
| ResNet-18 | 8 | 25 % of saving everything | 1.93 | 1.69 | proved | 9.4 |
| | 16 | 25 % of saving everything | | 1.08 | proved | 1.0 |
| ResNet-34 | 8 | 25 % of saving everything | 1.91 | 1.86 | proved | 15 |
| | 16 | 25 % of saving everything | | 0.89 | proved | 3.8 |
| UNet | 2 | 25 % of saving everything | | 0.33 | proved | 0.6 |
"""

from __future__ import annotations

import selectors
import time
import warnings
from collections.abc import Callable, Sequence

from calcvm.errors import CalcWarning
from calcvm.planner.recomputation.schedule import RecomputationProblem, Run
from calcvm.planner.recomputation.solver_process import SOLVERS, Solver, SolverProcess, pairs_of
from calcvm.planner.recomputation.stages import Answer, cheaper

GRACE = 1.0  # seconds that a solver may exceed its limit
LEAST = 0.25  # minimal part of the seconds for each later problem
PROVED = 1e-6  # relative distance of bound and cost at which the schedule counts as proved
TICK = 0.2  # seconds between looks at the clock

Tell = Callable[[float, float, float], None]  # seconds, overhead and lower bound so far


class Solvers:
    """The solvers of a plan: their time limit, the time spent, and their report.

    tell : callback while they run.
    """

    def __init__(self, seconds: float, tell: Tell | None = None):
        self.seconds, self.tell = seconds, tell
        self.spent = 0.0
        self.used: list[str] = []
        self.faults: dict[str, None] = {}  # in order of occurrence
        self.interrupted = False
        self.settled: int | None = None

    def improve(self, problem: RecomputationProblem, known: Run, whole: float, others: Sequence[Run] = ()) -> Answer:
        """The cheapest schedule found, and a lower bound of the cost of any.

        whole : seconds of a step, for the overhead that ``tell`` reports.
        others : other known schedules, for solvers without support for pages.
        """
        if self.interrupted:
            return Answer(known, 0.0)
        begin, self.settled = time.monotonic(), None
        work = Work(self, problem, known, others, whole, max(self.seconds - self.spent, self.seconds * LEAST))
        try:
            try:
                work.start()
                work.follow()
            finally:
                work.end()
        except KeyboardInterrupt:  # at any time: solvers still running end when ``work`` is dropped
            self.interrupted = True
        finally:
            self.spent += time.monotonic() - begin
        return Answer(work.best, min(work.bound, work.best.cost))

    @staticmethod
    def proves(bound: float, cost: float) -> bool:
        """Whether the bound proves that no schedule is cheaper."""
        return cost <= bound * (1 + PROVED)

    def fault(self, text: str) -> None:
        if text not in self.faults:
            self.faults[text] = None
            warnings.warn(f"solver_seconds: {text}", CalcWarning, stacklevel=2)

    def says(self, proved: bool) -> str:
        """The solvers that ran, with their time and success, and the faults of the others."""
        parts = []
        if self.used:
            end = ", interrupted" if self.interrupted else ""
            parts.append(f"{' and '.join(self.used)}: {self.spent:.1f} s{end}, {'proved' if proved else 'not proved'}")
            if self.settled and not proved:
                parts.append(f"no schedule with at most {self.settled} versions of a value is cheaper")
        parts += self.faults
        return "; ".join(parts) + ("" if self.used else ": searched only")


class Work:
    """Solvers at work on one problem."""

    def __init__(
        self,
        solvers: Solvers,
        problem: RecomputationProblem,
        known: Run,
        others: Sequence[Run],
        whole: float,
        seconds: float,
    ):
        self.solvers, self.problem, self.others, self.whole = solvers, problem, others, whole
        self.best, self.bound = known, 0.0
        self.begin = time.monotonic()
        self.until = self.begin + seconds
        self.processes: list[SolverProcess] = []

    def start(self) -> None:
        for solver in SOLVERS:
            if solver.missing:
                self.solvers.fault(f"{solver.package} is not installed (extra solver)")
                continue
            try:
                self.processes.append(SolverProcess(solver, *self._asked(solver), self.until))
            except OSError as error:
                self.solvers.fault(f"{solver.name} cannot be started ({error})")
                continue
            if solver.name not in self.solvers.used:
                self.solvers.used.append(solver.name)

    def _asked(self, solver: Solver) -> tuple[RecomputationProblem, Run]:
        """The problem for a solver, and the best known schedule of it."""
        if solver.pages or not self.problem.pages:
            return self.problem, self.best
        without = self.problem.without_pages()
        plain = [run for run in (self.best, *self.others) if not run.paged]
        return without, min(plain, key=lambda run: run.score) if plain else without.run(())

    def follow(self) -> None:
        """Read the solvers' messages until all have ended, the time is over, or the best schedule is proved."""
        with selectors.DefaultSelector() as selector:
            for each in self.processes:
                selector.register(each, selectors.EVENT_READ, each)
            while selector.get_map() and not self.proved and (left := self.until + GRACE - time.monotonic()) > 0:
                for key, _ in selector.select(min(left, TICK)):
                    process: SolverProcess = key.data
                    for said in process.heard():
                        self.hear(process, said)
                    if process.ended is not None:
                        selector.unregister(process)
                        if process.ended:
                            self.fail(process.solver, process.ended)
                if self.solvers.tell is not None:
                    seconds = self.solvers.spent + time.monotonic() - self.begin
                    self.solvers.tell(
                        seconds, self.best.cost / self.whole, min(self.bound, self.best.cost) / self.whole
                    )

    @property
    def proved(self) -> bool:
        return not self.best.excess and self.bound >= self.best.cost * (1 - PROVED)

    def hear(self, who: SolverProcess, said: dict) -> None:
        if "found" in said:
            pairs = pairs_of(said["found"])
            if not self.problem.allows(pairs):
                self.fail(who.solver, "found an invalid schedule")
                return
            run = self.problem.run(pairs)
            if cheaper(self.best, run) is run:
                self.best = run
                for other in self.processes:
                    if other is not who and other.ended is None and other.problem.allows(run.chosen):
                        other.tell(known=sorted(run.chosen))
        if who.problem is self.problem:
            self.bound = max(self.bound, said.get("bound", 0.0))
            self.solvers.settled = said.get("settled", self.solvers.settled)

    def fail(self, solver: Solver, text: str) -> None:
        self.solvers.fault(f"{solver.name} {text}")

    def end(self) -> None:
        while self.processes:
            self.processes.pop().end()

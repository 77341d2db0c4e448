"""Solvers beside each other: what any of them finds the others start from, and whatever befalls them a plan is made.

Each works in a process of its own.  A schedule counts for what following it shows, a bound is the largest that any has shown.
Where values may wait in a file, a solver that knows of no pages looks for schedules without, and its bounds do not count.  Where a
solver is missing, crashes or finds nothing in its time, the schedule of the search stays, and `Solvers.says` tells so.  Ctrl-C ends
the solvers and not the planning: the best that was found is taken.

Overhead of a step in per cent, searched, found and at least, and seconds (two cores of Zen 5): ResNet-18, batch 8, in 75 % of its
memory 0.87, proved in 0.7; in 56.9 % 5.38, 5.35, proved in 1.3; in half 9.85, 9.68, 9.53 in 10.  UNet at 256, batch 2, in half 4.51,
4.37, 4.24 in 10, and none of six versions of a value is cheaper.  MobileNetV2, batch 8, in half 9.39, 9.278, 9.277 in 30.  ResNet-50,
batch 8, in 80 % 1.06, 1.05, proved in 2.8.  VGG-16 and VGG-19, batch 8, 2 % of the peak above the largest statement, 0.18 and 0.20,
proved in 0.4 and 0.5; ResNet-34, batch 8, 10 % above it 10.19, 8.99, 7.74 in 60.  In 25 % of what saving all takes: ResNet-18,
batch 8, 1.93, 1.69, proved in 9.4, batch 16 1.08, proved in 1.0; ResNet-34, batch 8, 1.91, 1.86, proved in 15, batch 16 0.89, proved
in 3.8; UNet, batch 2, 0.33, proved in 0.6.
"""

from __future__ import annotations

import selectors
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from calcvm.errors import CalcWarning
from calcvm.planner.aside import SOLVERS, Aside, Solver, pairs_of
from calcvm.planner.stages import Answer, cheaper

if TYPE_CHECKING:
    from calcvm.planner.recompute import Problem, Run

GRACE = 1.0  # seconds that a solver may take longer than it was told
LEAST = 0.25  # part of the seconds that each later problem has at least
PROVED = 1e-6  # bounds are this near to the cost, as a part of it
TICK = 0.2  # seconds between looks at the clock

Tell = Callable[[float, float, float], None]  # seconds, overhead and lower bound so far


class Solvers:
    """The solvers of a plan: how long they may take, what they took, and what is to be said of them.

    tell : called now and then while they work.
    """

    def __init__(self, seconds: float, tell: Tell | None = None):
        self.seconds, self.tell = seconds, tell
        self.spent = 0.0
        self.used: list[str] = []
        self.faults: dict[str, None] = {}  # in the order in which they were met
        self.interrupted = False
        self.settled: int | None = None

    def improve(self, problem: Problem, known: Run, whole: float, others: Sequence[Run] = ()) -> Answer:
        """The cheapest schedule found and what none costs less than; of ``whole`` seconds the overhead is told.

        others : schedules that are known too, for solvers that know of no pages.
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
        except KeyboardInterrupt:  # at any time: solvers that have not been ended are when ``work`` is dropped
            self.interrupted = True
        finally:
            self.spent += time.monotonic() - begin
        return Answer(work.best, min(work.bound, work.best.cost))

    @staticmethod
    def proves(bound: float, cost: float) -> bool:
        """Whether none is cheaper."""
        return cost <= bound * (1 + PROVED)

    def fault(self, text: str) -> None:
        if text not in self.faults:
            self.faults[text] = None
            warnings.warn(f"solver_seconds: {text}", CalcWarning, stacklevel=2)

    def says(self, proved: bool) -> str:
        """Who worked, for how long and with what success; who did not, and why."""
        parts = []
        if self.used:
            end = ", interrupted" if self.interrupted else ""
            parts.append(f"{' and '.join(self.used)}: {self.spent:.1f} s{end}, {'proved' if proved else 'not proved'}")
            if self.settled and not proved:
                parts.append(f"none is cheaper that makes a value at most {self.settled} times")
        parts += self.faults
        return "; ".join(parts) + ("" if self.used else ": searched only")


class Work:
    """Solvers at work on one problem."""

    def __init__(
        self, solvers: Solvers, problem: Problem, known: Run, others: Sequence[Run], whole: float, seconds: float
    ):
        self.solvers, self.problem, self.others, self.whole = solvers, problem, others, whole
        self.best, self.bound = known, 0.0
        self.begin = time.monotonic()
        self.until = self.begin + seconds
        self.asides: list[Aside] = []

    def start(self) -> None:
        for solver in SOLVERS:
            if solver.missing:
                self.solvers.fault(f"{solver.package} is not installed (extra solver)")
                continue
            try:
                self.asides.append(Aside(solver, *self._asked(solver), self.until))
            except OSError as error:
                self.solvers.fault(f"{solver.name} cannot be started ({error})")
                continue
            if solver.name not in self.solvers.used:
                self.solvers.used.append(solver.name)

    def _asked(self, solver: Solver) -> tuple[Problem, Run]:
        """What a solver is asked, and what is known of that."""
        if solver.pages or not self.problem.pages:
            return self.problem, self.best
        without = self.problem.without_pages()
        plain = [run for run in (self.best, *self.others) if not run.paged]
        return without, min(plain, key=lambda run: run.score) if plain else without.run(())

    def follow(self) -> None:
        """Hear the solvers until all have ended, the time is over, or nothing is left to find."""
        with selectors.DefaultSelector() as selector:
            for each in self.asides:
                selector.register(each, selectors.EVENT_READ, each)
            while selector.get_map() and not self.proved and (left := self.until + GRACE - time.monotonic()) > 0:
                for key, _ in selector.select(min(left, TICK)):
                    aside: Aside = key.data
                    for said in aside.heard():
                        self.hear(aside, said)
                    if aside.ended is not None:
                        selector.unregister(aside)
                        if aside.ended:
                            self.fail(aside.solver, aside.ended)
                if self.solvers.tell is not None:
                    seconds = self.solvers.spent + time.monotonic() - self.begin
                    self.solvers.tell(
                        seconds, self.best.cost / self.whole, min(self.bound, self.best.cost) / self.whole
                    )

    @property
    def proved(self) -> bool:
        return not self.best.excess and self.bound >= self.best.cost * (1 - PROVED)

    def hear(self, who: Aside, said: dict) -> None:
        if "found" in said:
            pairs = pairs_of(said["found"])
            if not self.problem.allows(pairs):
                self.fail(who.solver, "found what is no schedule")
                return
            run = self.problem.run(pairs)
            if cheaper(self.best, run) is run:
                self.best = run
                for other in self.asides:
                    if other is not who and other.ended is None and other.problem.allows(run.chosen):
                        other.tell(known=sorted(run.chosen))
        if who.problem is self.problem:
            self.bound = max(self.bound, said.get("bound", 0.0))
            self.solvers.settled = said.get("settled", self.solvers.settled)

    def fail(self, solver: Solver, text: str) -> None:
        self.solvers.fault(f"{solver.name} {text}")

    def end(self) -> None:
        while self.asides:
            self.asides.pop().end()

"""A solver in a separate process: it may crash, run too long or be killed at any moment, and costs a plan only time.

Both sides exchange lines of JSON.  The caller sends a problem, the known schedule and the time limit, and later the schedules
that other solvers find.  The solver sends schedules, bounds, and its final status.  It ends when the caller does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from calcvm.frozen import frozen
from calcvm.helper_process import HelperProcess
from calcvm.planner.recomputation.schedule import Pair, RecomputationProblem, Run, Step
from calcvm.planner.recomputation.stages import SolverChannel


@frozen
class Solver:
    """A solver: its name, the module and the name of the package that it needs, its model, and whether it supports pages."""

    name: str
    module: str
    package: str
    model: str  # the module of calcvm whose `solve` it runs
    pages: bool = False

    @property
    def missing(self) -> bool:
        try:
            return find_spec(self.module) is None
        except (ImportError, ValueError):
            return True


SOLVERS = (
    Solver("HiGHS", "scipy", "SciPy", "calcvm.planner.recomputation.highs", pages=True),
    Solver("CP-SAT", "ortools", "OR-Tools", "calcvm.planner.recomputation.cpsat"),
)


# ---------------------------------------------------------------- the caller's side
class SolverProcess(HelperProcess):
    """A solver at work on a problem, until a time of the monotonic clock, which all processes share.

    Raises
    ------
    OSError : no process can be started.
    """

    def __init__(self, solver: Solver, problem: RecomputationProblem, known: Run, until: float):
        self.solver, self.problem, self.rest = solver, problem, b""
        self.ended: str | None = None  # its final status: empty if it succeeded
        super().__init__(__name__, solver.model)
        self.tell(
            steps=[[*vars(step).values()] for step in problem.steps],
            pages=[[*vars(step).values()] for step in problem.pages],
            written=[*problem.written.items()],
            room=problem.room,
            sizes=[*problem.sizes],
            backward=problem.backward,
            limit=problem.limit,
            known=sorted(known.chosen),
            until=until,
        )

    def tell(self, **what: Any) -> None:
        with suppress(OSError):  # it has ended: its messages say so
            self.say(what)

    def heard(self) -> Iterator[dict[str, Any]]:
        """New messages; sets `ended` if it has ended."""
        data = self.read()
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            try:
                said = json.loads(line)
            except ValueError:
                self.ended = "sent an invalid answer"
                return
            if "ended" in said:
                self.ended = said["ended"]
            yield said
        if not data and self.ended is None:
            status = self.process.wait()
            self.ended = f"crashed (exit status {status})"


# ---------------------------------------------------------------- the solver's side
class PipeChannel(SolverChannel):
    """The channel to and from the caller, over the standard streams."""

    def __init__(self, problem: RecomputationProblem):
        self.problem = problem
        self.pairs: list[list[int]] | None = None
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            self.pairs = json.loads(line)["known"]
        os._exit(0)  # the caller has ended

    def say(self, **what: Any) -> None:
        print(json.dumps(what), flush=True)

    def found(self, run: Run) -> None:
        self.say(found=sorted(run.chosen))

    def bound(self, bound: float) -> None:
        self.say(bound=bound)

    def settled(self, versions: int) -> None:
        self.say(settled=versions)

    def latest(self) -> Run | None:
        pairs, self.pairs = self.pairs, None
        return None if pairs is None else self.problem.run(pairs_of(pairs))


def pairs_of(said: Iterable[Iterable[int]]) -> set[Pair]:
    """A schedule from JSON."""
    return {(t, i) for t, i in said}


def serve(model: str) -> None:
    """The main function of a solver's process."""
    given = json.loads(sys.stdin.readline())
    steps, pages = (
        [
            Step(tuple(uses), tuple(makes), tuple((y, x) for y, x in pairs), *rest)
            for uses, makes, pairs, *rest in given[of]
        ]
        for of in ("steps", "pages")
    )
    problem = RecomputationProblem(
        steps, given["sizes"], given["backward"], given["limit"], pages, dict(given["written"]), given["room"]
    )
    channel = PipeChannel(problem)
    try:
        answer = import_module(model).solve(
            problem, problem.run(pairs_of(given["known"])), given["until"] - time.monotonic(), channel
        )
        channel.found(answer.run)
        channel.bound(answer.bound)
        channel.say(ended="")
    except Exception as error:
        channel.say(ended=f"failed ({type(error).__name__}: {error})")
    sys.stdout.flush()
    os._exit(0)

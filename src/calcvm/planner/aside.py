"""A solver in a process of its own: it may crash, run too long or be ended at any moment, and costs a plan nothing but time.

Both sides speak in lines of JSON.  The solver is told a problem, the schedule that is known and its seconds, later of schedules
that others have found; it tells schedules, bounds, and how it ended.  It hears no Ctrl-C, and ends with the one who asked.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calcvm.planner.stages import News
from calcvm.record import record
from calcvm.system import interpreter

if TYPE_CHECKING:
    from calcvm.planner.recompute import Pair, Problem, Run

# calcvm without its public names: they would be half of the start
START = """
import sys, types
calcvm = sys.modules["calcvm"] = types.ModuleType("calcvm")
calcvm.__path__ = [sys.argv[1]]
import calcvm.planner.aside
calcvm.planner.aside.serve(sys.argv[2])
"""


LATE = 0.2  # seconds that a solver may overrun


@record
class Solver:
    """Its name, the package that it needs, as it is imported and as it is called, what it solves, and whether it knows of pages."""

    name: str
    module: str
    package: str
    model: str  # the module here whose `solve` it runs
    pages: bool = False

    @property
    def missing(self) -> bool:
        try:
            return find_spec(self.module) is None
        except (ImportError, ValueError):
            return True


SOLVERS = (
    Solver("HiGHS", "scipy", "SciPy", "calcvm.planner.exact", pages=True),
    Solver("CP-SAT", "ortools", "OR-Tools", "calcvm.planner.intervals"),
)


# ---------------------------------------------------------------- who asks
class Aside:
    """A solver at work on a problem, until a time of the monotonic clock, which processes share.

    Raises
    ------
    OSError : no process can be started.
    """

    def __init__(self, solver: Solver, problem: Problem, known: Run, until: float):
        self.solver, self.problem, self.rest = solver, problem, b""
        self.ended: str | None = None  # what it said last: nothing where it did its work
        python = interpreter()
        if python is None:
            raise OSError("it runs in a process of its own, and there is no Python to start in this application")
        command = [python, "-c", START, str(Path(__file__).parents[1]), solver.model]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self.dropped = weakref.finalize(self, _end, self.process)  # where an interrupt has kept `end` from it
        self.dropped.atexit = False
        self.tell(
            path=sys.path,
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
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(what).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:  # it has ended: its answers say so
            pass

    def fileno(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def heard(self) -> Iterator[dict[str, Any]]:
        """What it has said since; when it has ended, `ended` is set."""
        data = os.read(self.fileno(), 1 << 20)
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            try:
                said = json.loads(line)
            except ValueError:
                self.ended = "answered what is no answer"
                return
            if "ended" in said:
                self.ended = said["ended"]
            yield said
        if not data and self.ended is None:
            status = self.process.wait()
            self.ended = f"crashed (exit status {status})"

    def end(self) -> None:
        _end(self.process)
        self.dropped.detach()


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


# ---------------------------------------------------------------- who is asked
class Told(News):
    """News to and from the one who asked, by the standard streams."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.pairs: list[list[int]] | None = None
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            self.pairs = json.loads(line)["known"]
        os._exit(0)  # nobody listens

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
    """A schedule out of JSON."""
    return {(t, i) for t, i in said}


def serve(model: str) -> None:
    """The process of a solver."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of Ctrl-C the one who asked hears, and ends this
    from calcvm.planner.recompute import Problem, Step

    given = json.loads(sys.stdin.readline())
    sys.path[:] = given["path"]
    steps, pages = (
        [
            Step(tuple(uses), tuple(makes), tuple((y, x) for y, x in pairs), *rest)
            for uses, makes, pairs, *rest in given[of]
        ]
        for of in ("steps", "pages")
    )
    problem = Problem(
        steps, given["sizes"], given["backward"], given["limit"], pages, dict(given["written"]), given["room"]
    )
    told = Told(problem)
    try:
        answer = import_module(model).solve(
            problem, problem.run(pairs_of(given["known"])), given["until"] - time.monotonic(), told
        )
        told.found(answer.run)
        told.bound(answer.bound)
        told.say(ended="")
    except Exception as error:
        told.say(ended=f"failed ({type(error).__name__}: {error})")
    sys.stdout.flush()
    os._exit(0)

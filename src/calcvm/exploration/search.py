"""The search itself: send trials to workers, collect their figures, and let Optuna prune."""

from __future__ import annotations

import bisect
import math
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable

from calcvm.errors import CalcError, CalcWarning
from calcvm.exploration.engine import Engine
from calcvm.exploration.study import Study
from calcvm.exploration.trial import Trial, seed_of
from calcvm.exploration.worker import Report, Turn
from calcvm.vm.run.signals import orderly_end

TRIES = 3  # for a trial whose workers die


class Search:
    """Send turns to workers until ``n_trials`` trials have ended.

    Attributes
    ----------
    trials : by number
    kept : numbers of the best complete trials, best first, at most ``keep``
    stopped : why it ended early
    lost : workers that died
    """

    def __init__(
        self,
        study: Study,
        engine: Engine,
        *,
        n_trials: int,
        epochs: int,
        metric: str,
        maximize: bool,
        concurrent: int,
        keep: int,
        seed: int,
        show: Callable[[Search], None],
    ):
        self.study, self.engine, self.metric, self.epochs, self.seed = study, engine, metric, epochs, seed
        self.n_trials, self.concurrent, self.keep, self.show = n_trials, concurrent, keep, show
        self.sign = -1 if maximize else 1
        self.trials = {trial.number: trial for trial in study.earlier}
        self.stopped, self.lost = "", 0
        self._ranks: list[tuple[float, int]] = []  # kept trials: the value, smallest first, and the number
        self._home: dict[int, int] = {}  # home of every trial that a worker holds, running or kept
        self._live: list[set[int]] = [set() for _ in range(engine.homes)]
        self._release: list[list[int]] = [[] for _ in range(engine.homes)]
        self._save: list[list[int]] = [[] for _ in range(engine.homes)]
        self._idle = set(range(engine.homes))
        self._again: deque[Trial] = deque()  # trials of workers that died
        self._tries: Counter[int] = Counter()
        self._asked = len(self.trials)
        self._start = time.perf_counter()

    @property
    def kept(self) -> list[int]:
        return [number for _, number in self._ranks]

    @property
    def ended(self) -> int:
        return len(self.trials) - sum(map(len, self._live)) - len(self._again)

    def run(self) -> None:
        """Search.  Ctrl-C, an unwritable storage or a lost cluster end it with the finished trials."""
        try:
            with orderly_end() as check:
                while self._hand_out():
                    home, reports = self.engine.wait()
                    check()
                    self._idle.add(home)
                    if reports is None:
                        self._lose(home)
                    else:
                        for report in sorted(reports, key=lambda r: r.number):
                            self._take(self.trials[report.number], report)
                        if reports:
                            self.show(self)
        except KeyboardInterrupt:
            self.stopped = "interrupted"
        except CalcError as error:
            self.stopped = str(error)
            warnings.warn(f"the search ended early, with the finished trials: {error}", CalcWarning, stacklevel=3)
        finally:
            for trial in self.trials.values():
                if trial.status == "running":
                    trial.status, trial.reason = "interrupted", self.stopped
            self.study.close()

    # ------------------------------------------------------------ to workers
    def _hand_out(self) -> bool:
        """Give every idle worker a turn, if there is one.  False if no worker is busy afterwards."""
        for home in sorted(self._idle):
            start = []
            while len(self._live[home]) < self.concurrent and (trial := self._next()):
                start.append(trial)
                self._live[home].add(trial.number)
                self._home[trial.number] = home
            if not (self._live[home] or self._release[home] or self._save[home]):
                continue
            epochs = {n: self.study.next_rung(self.trials[n].epochs) - self.trials[n].epochs for n in self._live[home]}
            self.engine.submit(home, Turn(start, self._release[home], self._save[home], epochs))
            self._release[home], self._save[home] = [], []
            self._idle.remove(home)
        return len(self._idle) < self.engine.homes

    def _next(self) -> Trial | None:
        if self._again:
            return self._again.popleft()
        if self._asked >= self.n_trials or self.study.exhausted:
            return None
        self._asked += 1
        number, params = self.study.ask()
        trial = self.trials[number] = Trial(number, params, seed_of(self.seed, number))
        return trial

    # ------------------------------------------------------------ from workers
    def _take(self, trial: Trial, report: Report) -> None:
        """Record the report on a trial, and decide how it continues."""
        for name, figures in report.curves.items():
            trial.curves.setdefault(name, []).extend(figures)
        trial.epochs, trial.nbytes = len(trial.curves.get("loss", ())), report.nbytes
        if report.status != "failed" and self.metric not in trial.curves:
            known = ", ".join(map(repr, trial.curves))
            report.status, report.reason = "failed", f"metric {self.metric!r}: the figures of an epoch are {known}"
            if not any(self.metric in other.curves for other in self.trials.values()):  # other trials will lack it too
                self._end(trial, "failed", report.reason)
                raise CalcError(report.reason)
        if report.status == "failed":
            return self._end(trial, "failed", report.reason)
        trial.value = trial.curves[self.metric][-1]
        if not math.isfinite(trial.value):
            figure, trial.value = trial.value, None
            return self._end(trial, "pruned", report.reason or f"{self.metric} is {figure} after {trial.epochs} epochs")
        if report.status == "pruned":
            return self._end(trial, "pruned", report.reason)
        if trial.epochs >= self.epochs:
            return self._end(trial, "complete")
        if self.study.prunes(trial):
            self._end(trial, "pruned", f"behind other trials after {trial.epochs} epochs")

    def _end(self, trial: Trial, status: str, reason: str = "") -> None:
        home = self._home[trial.number]
        self._live[home].discard(trial.number)
        trial.status, trial.reason, trial.seconds = status, reason, time.perf_counter() - self._start
        leaves = trial.number
        if status == "complete" and trial.value is not None:
            bisect.insort(self._ranks, (self.sign * trial.value, trial.number))
            leaves = self._ranks.pop()[1] if len(self._ranks) > self.keep else -1
            if leaves != trial.number:
                self._save[home].append(trial.number)
        if leaves >= 0:
            its = self._home[leaves]
            self._save[its] = [number for number in self._save[its] if number != leaves]
            self._release[its].append(leaves)
        self.study.end(trial)

    def _lose(self, home: int) -> None:
        """A worker died: restart its trials on any worker that has room."""
        self.lost += 1
        for number in sorted(self._live[home]):
            trial = self.trials[number]
            self._tries[number] += 1
            if self._tries[number] >= TRIES:
                self._end(trial, "failed", f"{TRIES} workers died while they trained it")
            else:
                trial.curves, trial.epochs, trial.value = {}, 0, None
                self._again.append(trial)
        self._live[home].clear()
        self._release[home], self._save[home] = [], []

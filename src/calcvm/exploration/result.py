"""The result of a search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike
from typing import Any

import numpy as np

from calcvm import checks
from calcvm.ensemble import Ensemble
from calcvm.errors import CalcError, Uncopied
from calcvm.exploration.trial import Trial
from calcvm.exploration.worker import Task, Turn, Worker
from calcvm.model import Model
from calcvm.tables import Table, frame, number
from calcvm.vm.program.encoding import ALIGN_BYTES


class Exploration(Table, Uncopied):
    """The trials of a search, and its models.  Printing shows the best trials and the counts by status.

    Attributes
    ----------
    trials : list of Trial, by number
    study : Optuna's study, for its plots and importances
    metric : str
    maximize : bool
    stopped : why the search ended early, or ""
    lost : workers that died
    seconds : dict of float: ``total``, and the part spent in ``optuna``
    """

    _instead = "copy its trials and models: result.trials, result.top(k); storage= keeps a study"

    SHOWN = 10

    def __init__(
        self,
        trials: list[Trial],
        study: Any,
        metric: str,
        maximize: bool,
        task: Task,
        model: Callable[[int], Model | None],
        *,
        stopped: str,
        lost: int,
        seconds: Mapping[str, float],
    ):
        self.trials, self.study, self.metric, self.maximize = trials, study, metric, maximize
        self.stopped, self.lost, self.seconds = stopped, lost, dict(seconds)
        self._task, self._model = task, model

    def __len__(self) -> int:
        return len(self.trials)

    def __repr__(self) -> str:
        ranked = self.ranked
        best = f", best {self.metric} {ranked[0].value:.4g} (trial {ranked[0].number})" if ranked else ""
        return f"<exploration of {len(self)} trials{best}>"

    def to_frame(self) -> Any:
        """A pandas DataFrame with one row per trial, indexed by number (MissingExtra: pandas is not installed, extra ``pandas``)."""
        rows = [
            {
                "trial": t.number,
                "status": t.status,
                self.metric: t.value,
                **t.params,
                "epochs": t.epochs,
                "bytes": t.nbytes,
            }
            for t in self.trials
        ]
        return frame("Exploration.to_frame", rows, "trial")

    @property
    def counts(self) -> dict[str, int]:
        """The number of trials by status."""
        return dict(Counter(trial.status for trial in self.trials).most_common())

    @property
    def ranked(self) -> list[Trial]:
        """Complete trials, best first."""
        done = [(t.value, t) for t in self.trials if t.status == "complete" and t.value is not None]
        sign = -1 if self.maximize else 1
        return [t for _, t in sorted(done, key=lambda pair: (sign * pair[0], pair[1].number))]

    @property
    def best(self) -> Trial:
        """The complete trial with the best value.

        Raises
        ------
        CalcError : no trial is complete; the message gives the most frequent reason.
        """
        return self._first(1)[0]

    def _first(self, k: int) -> list[Trial]:
        k, ranked = checks.integer("the number of models", k), self.ranked
        if not 1 <= k <= len(ranked):
            reasons = Counter(t.reason for t in self.trials if t.status == "failed").most_common(1)
            why = f"; {reasons[0][1]} failed with: {reasons[0][0]}" if reasons else ""
            raise CalcError(f"the best {k}: of {len(self)} trials {len(ranked)} are complete{why}")
        return ranked[:k]

    def column(self, name: str) -> np.ndarray:
        """An attribute or parameter of every trial, shape (n_trials,): ``column("value")``, ``column("width")``."""
        known = {"number", "seed", "status", "reason", "value", "epochs", "nbytes", "seconds"}
        known |= {p for t in self.trials for p in t.params}
        if not isinstance(name, str) or name not in known:
            raise CalcError(f"no column {checks.shown(name)}; there are {', '.join(sorted(known))}")
        values = [t.params[name] if name in t.params else getattr(t, name, None) for t in self.trials]
        return np.array([np.nan if value is None else value for value in values])

    # ------------------------------------------------------------ models
    def top(self, k: int = 1) -> list[Model]:
        """Models of the k best trials, best first.

        The ``keep`` best are in memory; others are retrained, which gives the same bits.
        """
        trials = self._first(k)
        models = {t.number: self._model(t.number) for t in trials}
        missing = [t for t in trials if models[t.number] is None]
        if missing:
            models |= self._trained_again(missing)
        return [model for t in trials if (model := models[t.number]) is not None]

    def _trained_again(self, trials: list[Trial]) -> dict[int, Model | None]:
        room = sum((t.nbytes or 0) + ALIGN_BYTES for t in trials)
        worker = Worker(replace(self._task, validation=None, memory=max(room, self._task.memory)))
        fresh = [Trial(t.number, t.params, t.seed) for t in trials]
        for report in worker.turn(Turn(fresh, epochs={t.number: t.epochs for t in trials})):
            if report.status == "failed":
                raise CalcError(f"trial {report.number} cannot be retrained: {report.reason}")
        return {t.number: worker.model(t.number) for t in trials}

    def ensemble(self, k: int, method: str = "mean") -> Ensemble:
        """An `Ensemble` of the k best models."""
        return Ensemble(self.top(k), method=method)

    # ------------------------------------------------------------ showing
    def picture(self, path: str | PathLike[str]) -> None:
        """Draw learning curves and the best value over time into a file (extra ``plot``)."""
        from calcvm.exploration.picture import draw

        draw(self.trials, self.metric, self.maximize, path)

    def _shown(self) -> tuple[list[str], list[list[str]], list[str]]:
        """Column names, the best trials, and the notes below them."""
        header = ["trial", self.metric, *self.trials[0].params, "epochs", "bytes"] if self.trials else []
        rows = [
            [
                str(t.number),
                f"{t.value:.4f}",
                *(_text(v) for v in t.params.values()),
                str(t.epochs),
                f"{t.nbytes or 0:,}",
            ]
            for t in self.ranked[: self.SHOWN]
        ]
        counts = ", ".join(f"{n:,} {status}" for status, n in self.counts.items())
        rest = [f"{len(self):,} trials: {counts}; {self.seconds['total']:.1f} s, Optuna {self.seconds['optuna']:.1f} s"]
        reasons = Counter(t.reason for t in self.trials if t.status == "failed").most_common(3)
        rest += [f"{n} failed: {reason}" for reason, n in reasons]
        if self.lost:
            rest.append(f"workers that died, their trials run again: {self.lost}")
        return header, rows, [*rest, *([f"stopped: {self.stopped}"] if self.stopped else [])]


def _text(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)

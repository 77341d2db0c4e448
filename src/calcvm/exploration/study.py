"""Optuna's part of a search: choosing trials, and pruning them.

The study is in memory, where a call takes microseconds.  A storage gets every trial once, in one transaction when it has
ended: 6 ms per trial in SQLite.  Storing each step there would take 43 ms.
"""

from __future__ import annotations

import bisect
import json
import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import wraps
from typing import Any, TypeVar

from calcvm import checks
from calcvm.errors import CalcError, MissingExtra
from calcvm.exploration.space import distributions, grid
from calcvm.exploration.trial import Trial, seed_of

REDUCTION = 3  # one of 3 trials continues after a rung
STARTUP_TRIALS = 10  # complete trials that the median pruner needs for comparison
FACTS = "calcvm"  # attribute of a stored study, and of its trials
T = TypeVar("T")


def library() -> Any:
    """Import Optuna, which is optional."""
    try:
        with warnings.catch_warnings():  # in notebooks tqdm warns of missing progress bars
            warnings.filterwarnings("ignore", "IProgress not found")
            import optuna
    except ImportError as error:
        raise MissingExtra("optuna", "explore", "cv.explore") from error
    return optuna


def _timed(method: Callable[..., T]) -> Callable[..., T]:
    @wraps(method)
    def timed(self: Study, *args: Any) -> T:
        start = time.perf_counter()
        try:
            return method(self, *args)
        finally:
            self.seconds += time.perf_counter() - start

    return timed


class Study:
    """An Optuna study in memory, with an optional storage.

    Parameters
    ----------
    maximize : bool
    facts : JSON-able dict; a stored study continues only with equal facts.

    Attributes
    ----------
    optuna : Optuna's study, in memory
    earlier : trials that the storage already had
    size : the most trials that the sampler has (a grid's), or None
    exhausted : whether the sampler has no more trials
    seconds : spent in Optuna
    """

    def __init__(
        self,
        space: Mapping[str, Any],
        sampler: Any,
        pruner: Any,
        *,
        maximize: bool,
        epochs: int,
        seed: int,
        storage: Any,
        name: str,
        facts: dict[str, Any],
    ):
        lib = library()
        self.space, self.seconds, self.exhausted, self.size = distributions(space), 0.0, False, None
        self.rungs = _rungs(pruner, epochs)
        direction = "maximize" if maximize else "minimize"
        self._stored = None if storage is None else _open(lib, storage, name, direction, facts)
        stored = [] if self._stored is None else self._stored.get_trials(deepcopy=False)
        earlier = [trial for trial in stored if FACTS in trial.user_attrs]  # without trials that other programs added
        if isinstance(sampler, str) and sampler == "grid":
            self.size = math.prod(map(len, grid(space).values()))
        sampler = _sampler(
            lib, sampler, space, seed if not earlier else seed_of(seed, len(earlier)), pruner is not None
        )
        pruner = _pruner(lib, pruner, epochs)
        make: Callable[[], Any] = lambda: lib.create_study(
            study_name=name, direction=direction, sampler=sampler, pruner=pruner
        )
        self.optuna = _quietly(lib, make)
        self._live: dict[int, Any] = {}
        self._judged: dict[int, int] = {}  # last judged epoch, by number
        self.earlier = [
            self._go_on_from(frozen) for frozen in sorted(earlier, key=lambda t: t.user_attrs[FACTS]["number"])
        ]

    def _go_on_from(self, frozen: Any) -> Trial:
        """Add a trial of the storage to the study in memory."""
        trial = Trial(**{"params": frozen.params, "value": frozen.value, **frozen.user_attrs[FACTS]})
        lib = library()
        while len(self.optuna.get_trials(deepcopy=False)) < trial.number:  # it was running when the search ended
            self.optuna.add_trial(lib.trial.create_trial(state=lib.trial.TrialState.FAIL))
        self.optuna.add_trial(frozen)
        return trial

    # ------------------------------------------------------------ ask and tell
    @_timed
    def ask(self) -> tuple[int, dict[str, Any]]:
        """The next trial's number and parameters."""
        trial = self.optuna.ask(self.space)
        self._live[trial.number] = trial
        return trial.number, trial.params

    def next_rung(self, epochs: int) -> int:
        """The epoch of the next rung, for a trial that has done ``epochs``."""
        return self.rungs[bisect.bisect_right(self.rungs, epochs)]

    @_timed
    def prunes(self, trial: Trial) -> bool:
        """Whether to prune a trial, by its value after the epochs done."""
        live = self._live[trial.number]
        if trial.epochs <= self._judged.get(trial.number, 0):  # an earlier try passed this rung
            return False
        self._judged[trial.number] = trial.epochs
        live.report(trial.value, trial.epochs)
        return live.should_prune()

    @_timed
    def end(self, trial: Trial) -> None:
        """Record the end of a trial, and store it.

        Raises
        ------
        CalcError : the storage cannot be written.
        """
        states = library().trial.TrialState
        state = {"complete": states.COMPLETE, "pruned": states.PRUNED}.get(trial.status, states.FAIL)
        live = self._live.pop(trial.number)
        self._judged.pop(trial.number, None)
        if trial.reason:
            live.set_user_attr("reason", trial.reason)
        try:
            self.optuna.tell(live, trial.value if state is states.COMPLETE else None, state)
        except RuntimeError as error:
            if "Study.stop" not in str(error):  # raised by an exhausted sampler, which means to end `Study.optimize`
                raise
            self.exhausted = True
        if self._stored is None:
            return
        frozen = self.optuna.get_trials(deepcopy=False)[trial.number]
        facts = {k: v for k, v in asdict(trial).items() if k not in ("params", "value")}
        attributes = {**frozen.user_attrs, FACTS: facts}
        create = library().trial.create_trial
        try:
            self._stored.add_trial(
                create(
                    state=state, value=frozen.value, params=frozen.params, distributions=frozen.distributions,
                    user_attrs=attributes, system_attrs=frozen.system_attrs,
                    intermediate_values=frozen.intermediate_values,
                )
            )  # fmt: skip
        except Exception as error:  # storages raise their own types
            raise CalcError(f"the storage cannot be written: {_first_line(error)}") from error

    def close(self) -> None:
        """End all running trials, including one that was being chosen when the search was interrupted."""
        states = library().trial.TrialState
        for frozen in self.optuna.get_trials(deepcopy=False, states=(states.RUNNING,)):
            self.optuna.tell(frozen.number, state=states.FAIL)


# ---------------------------------------------------------------- by name
def _sampler(lib: Any, given: Any, space: Mapping[str, Any], seed: int, pruned: bool) -> Any:
    make = lib.samplers
    if isinstance(given, make.BaseSampler):
        return given
    known: dict[str, Callable[[], Any]] = {
        "tpe": lambda: make.TPESampler(seed=seed, multivariate=True, constant_liar=True),
        "random": lambda: make.RandomSampler(seed=seed),
        "grid": lambda: make.GridSampler(grid(space), seed=seed),
        "cmaes": lambda: make.CmaEsSampler(seed=seed, warn_independent_sampling=False, consider_pruned_trials=pruned),
    }
    if not isinstance(given, str) or given not in known:
        raise CalcError(
            f"sampler {checks.shown(given)}: take one of {', '.join(map(repr, known))}, or a sampler of Optuna"
        )
    if given == "cmaes":
        try:
            import cmaes  # noqa: F401
        except ImportError as error:
            raise MissingExtra("cmaes", "explore", "sampler='cmaes'") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lib.exceptions.ExperimentalWarning)
        return known[given]()


def _pruner(lib: Any, given: Any, epochs: int) -> Any:
    make = lib.pruners
    if isinstance(given, make.BasePruner):
        return given
    known: dict[str | None, Callable[[], Any]] = {
        "hyperband": lambda: make.HyperbandPruner(1, epochs, REDUCTION),
        "halving": lambda: make.SuccessiveHalvingPruner(1, REDUCTION),
        "median": lambda: make.MedianPruner(STARTUP_TRIALS),
        None: make.NopPruner,
    }
    if not isinstance(given, (str, type(None))) or given not in known:
        raise CalcError(
            f"pruner {checks.shown(given)}: take one of {', '.join(map(repr, known))}, or a pruner of Optuna"
        )
    return known[given]()


def _rungs(pruner: Any, epochs: int) -> list[int]:
    """The epochs after which a pruner can decide; the last is ``epochs``."""
    if pruner is None:
        return [epochs]
    if isinstance(pruner, str) and pruner in ("hyperband", "halving"):
        return [*(REDUCTION**k for k in range(64) if REDUCTION**k < epochs), epochs]
    return list(range(1, epochs + 1))


# ---------------------------------------------------------------- storage
ATTEMPTS = 3  # to open a storage


def _open(lib: Any, storage: Any, name: str, direction: str, facts: dict[str, Any]) -> Any:
    """The stored study, created or loaded."""
    where = storage if isinstance(storage, str) else type(storage).__name__
    for attempt in range(ATTEMPTS):
        try:
            study = _quietly(
                lib,
                lambda: lib.create_study(storage=storage, study_name=name, direction=direction, load_if_exists=True),
            )
            known = study.user_attrs.get(FACTS)
            foreign = known is None and len(study.get_trials(deepcopy=False)) > 0
            if known is None and not foreign:
                study.set_user_attr(FACTS, facts)
            break
        except Exception as error:  # storages raise their own types
            if attempt == ATTEMPTS - 1:
                raise CalcError(f"storage {where}: cannot be used: {_first_line(error)}") from error
            time.sleep(0.1)  # another process may be creating its tables
    if foreign:
        raise CalcError(f"storage {where}: the study {name!r} was not made by cv.explore; give another study_name")
    facts = json.loads(json.dumps(facts))
    for key in known or {}:
        if known[key] != facts.get(key):
            raise CalcError(
                f"storage {where}: the study {name!r} was begun with {key}={known[key]!r}, not {facts.get(key)!r}: "
                "continue with the same value, or give another study_name"
            )
    return study


def _quietly(lib: Any, make: Callable[[], T]) -> T:
    """Call ``make`` without the line that Optuna logs for each new study."""
    level = lib.logging.get_verbosity()
    try:
        lib.logging.set_verbosity(max(level, lib.logging.WARNING))
        return make()
    finally:
        try:
            lib.logging.set_verbosity(level)
        finally:  # in case a signal came first
            lib.logging.set_verbosity(level)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]

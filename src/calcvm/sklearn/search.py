"""Grid search that trains its candidates side by side, as a fleet."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from numbers import Integral
from typing import Any

import numpy as np
from joblib import effective_n_jobs
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, ParameterGrid, check_cv
from sklearn.utils import _safe_indexing, check_array, indexable

from calcvm.errors import PlanError
from calcvm.fleet import Fleet
from calcvm.sklearn.estimators import Compiled, Task, dense, instead_of_training, with_options
from calcvm.sklearn.network import allowed_workers, program_of
from calcvm.vm.memory.heap import parse_bytes
from calcvm.vm.program.encoding import ALIGN_BYTES

# attributes set by training; all others are set before
LEARNED = (
    "coefs_", "intercepts_", "n_iter_", "t_", "loss_", "loss_curve_", "best_loss_", "validation_scores_",
    "best_validation_score_", "_best_coefs", "_best_intercepts", "_no_improvement_count", "_optimizer",
)  # fmt: skip


@dataclass
class Fit:
    """An estimator, ready to be trained, and its fold."""

    place: int  # index among all pairs of candidate and fold
    fold: int
    train: np.ndarray
    estimator: Any
    task: Task
    trained: bool = False
    converged: bool = False


@with_options(memory="1 GiB")
class FleetSearchCV(GridSearchCV):
    """`GridSearchCV` over a calcvm estimator: all candidates are trained on all folds at once, as one fleet.

    The features are shared, not copied for each fold.  The models are those that `GridSearchCV` would train: with
    a fixed ``random_state`` they are equal bit for bit, and so are the scores.  Fits that a fleet cannot do run one
    after the other: solver "lbfgs", several outputs of a regressor, sparse features, and estimators that are not
    calcvm's, such as pipelines.

    Parameters
    ----------
    estimator, param_grid, ... : as for `GridSearchCV`
    n_jobs : int, optional
        Workers of the fleet (default: the machine's cores).
    memory : int or str
        The most memory for the fleet's heap.  Models that do not fit at once are trained in turns.

    Notes
    -----
    ``cv_results_["mean_fit_time"]`` divides the fleet's time in proportion to the epochs of each model.
    """

    n_jobs: int | None
    _parameter_constraints = {**GridSearchCV._parameter_constraints, "memory": [str, Integral]}

    def fit(self, X: Any, y: Any = None, **params: Any) -> FleetSearchCV:
        """Find the best candidate by cross-validation and train it on all data: see `GridSearchCV.fit`."""
        if not isinstance(self.estimator, Compiled):
            return super().fit(X, y, **params)
        n_jobs: int | None = self.n_jobs
        self._given = *indexable(X, y), params
        self._workers = allowed_workers() if n_jobs is None else effective_n_jobs(n_jobs)
        self.n_jobs = None  # candidates are only scored here, so processes would have nothing to do
        try:
            return super().fit(X, y, **params)
        finally:
            self.n_jobs = n_jobs
            del self._given, self._workers

    def _run_search(self, evaluate_candidates: Callable[..., dict[str, Any]]) -> None:
        candidates = list(ParameterGrid(self.param_grid))
        if not hasattr(self, "_given"):
            evaluate_candidates(candidates)
            return
        X, y, params = self._given
        routed = self._get_routed_params_for_fit(params)
        splits = list(self._checked_cv_orig.split(X, y, **routed.splitter.split))
        start = time.perf_counter()
        fits = self._fits(X, y, routed.estimator.fit, candidates, [train for train, _ in splits])
        elapsed = time.perf_counter() - start
        waiting = iter(fits)

        def adopt(estimator: Any, task: Task) -> bool:
            fit = next(waiting, None)
            if fit is None or not fit.trained:
                return False
            learned = vars(fit.estimator)
            vars(estimator).update({name: learned[name] for name in LEARNED if name in learned})
            if not fit.converged:
                estimator._warn_of_max_iter()
            return True

        results = instead_of_training(adopt, lambda: evaluate_candidates(candidates, cv=check_cv(splits)))
        shares = np.zeros((len(candidates), len(splits)))
        for fit in fits:
            shares.flat[fit.place] = fit.estimator.n_iter_
        shares *= elapsed / max(shares.sum(), 1)
        results["mean_fit_time"] += shares.mean(axis=1)
        results["std_fit_time"] = np.where(shares.any(axis=1), shares.std(axis=1), results["std_fit_time"])

    def _fits(
        self, X: Any, y: Any, params: Mapping[str, Any], candidates: Sequence[dict], folds: Sequence[np.ndarray]
    ) -> list[Fit]:
        """Candidates on folds, in this order.  A fleet trains those that it can."""
        try:
            features = check_array(X, dtype=(np.float64, np.float32))
        except (TypeError, ValueError):  # sparse, or unfit for training: each fit will raise
            return []
        fits = []
        for place, (candidate, (fold, train)) in enumerate(product(candidates, enumerate(folds))):
            given = {name: v if v is None else _safe_indexing(v, train) for name, v in params.items()}
            estimator = clone(self.estimator)
            task = task_of(estimator, candidate, features, train, _safe_indexing(y, train), given)
            if task is not None:
                fits.append(Fit(place, fold, train, estimator, task))
        train_together(fits, features, self.memory, self._workers)
        return fits


def task_of(
    estimator: Any, parameters: Mapping[str, Any], X: np.ndarray, train: np.ndarray, y: Any, params: Mapping[str, Any]
) -> Task | None:
    """The task that an estimator would learn.  Its training set is not copied: a stand-in of the same shape is used."""
    stand_in = np.broadcast_to(X.dtype.type(0), (len(train), X.shape[1]))
    tasks: list[Task] = []

    def take(_: Any, task: Task) -> bool:
        tasks.append(task)
        return True

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the real fit repeats warnings and errors
        try:
            estimator.set_params(**clone(parameters, safe=False))
            if estimator.solver != "lbfgs":
                instead_of_training(take, lambda: estimator.fit(stand_in, y, **params))
        except Exception:
            return None
    return tasks[0] if tasks else None


def train_together(fits: Sequence[Fit], X: np.ndarray, memory: int | str, workers: int) -> None:
    """Train all fits that a fleet can train, as one fleet."""
    todo = [fit for fit in fits if not fit.task.design.two_losses]
    needed = sum(program_of(fit.task.design).heap_bytes + ALIGN_BYTES for fit in todo)
    largest = max((program_of(fit.task.design).heap_bytes for fit in todo), default=0)
    if largest > (allowed := parse_bytes(memory)):
        text = f"FleetSearchCV: memory={memory!r}, but a candidate needs {largest:,} bytes: raise memory="
        raise PlanError(text, largest, allowed)
    fleet = Fleet(min(allowed, needed), workers)
    shared: dict[tuple, np.ndarray] = {}  # arrays common to all models, or all of a fold
    running = {}
    for fit in todo:
        estimator, task, train = fit.estimator, fit.task, fit.train
        key: tuple = (task.design.dtype,)
        if key not in shared:
            shared[key] = dense(X, task.design.dtype)
        data = {"input": shared[key]}
        for name, array in task.targets.items():
            key = (fit.fold, name, array.dtype.str, array.shape)
            if key not in shared:
                shared[key] = np.zeros((len(X), *array.shape[1:]), array.dtype)
                shared[key][train] = array
            data[name] = shared[key]
        task.rows = rows = train if task.rows is None else train[task.rows]
        task.held = None if task.held is None else train[task.held]
        handle = fleet.add(
            program_of(task.design), data=data, samples=rows, seed=task.seed, hyper=task.hyper,
            shuffle=estimator.shuffle,
        )  # fmt: skip
        estimator._place(handle.model, {})
        running[handle] = fit, estimator._judge(handle.model, task, data["input"]), len(rows)
    while running:
        for handle in fleet.advance({h: fit.estimator._certain_epochs() for h, (fit, *_) in running.items()}):
            (fit, score, n_samples), resident = running[handle], handle.model
            estimator = fit.estimator
            for loss in handle.losses[estimator.n_iter_ :]:
                fit.converged = estimator._epoch_ends(resident, float(loss), n_samples, score)
            if not handle.open or fit.converged or estimator.n_iter_ == estimator.max_iter:
                fit.trained = handle.open  # others are trained again alone, to end as they do there
                estimator._take(resident)
                handle.close()
                del running[handle]

"""Exploration: hyperparameter and architecture search.  Optuna chooses and prunes trials, fleets train them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from calcvm import checks
from calcvm.errors import CalcError, ShapeError, warn
from calcvm.exploration.cluster import Cluster, RayEngine
from calcvm.exploration.engine import Engine, Local
from calcvm.exploration.result import Exploration
from calcvm.exploration.search import Search
from calcvm.exploration.study import Study
from calcvm.exploration.trial import Trial
from calcvm.exploration.worker import Build, Task
from calcvm.model.figures import largest_of
from calcvm.progress import Count
from calcvm.vm.memory.heap import parse_bytes
from calcvm.vm.program.documents import MAX_WORKERS
from calcvm.vm.run.feeds import numbers

__all__ = ["Exploration", "RayEngine", "Trial", "explore"]

# Trials at once in a heap.  More do not keep its workers busier.  A sampler learns from finished trials only, so at most a
# share of all trials run at once, and few if there are few.
CONCURRENT, SHARE, FEW = 64, 8, 4


def explore(
    build: Build,
    space: Mapping[str, Any],
    *,
    data: Any,
    validation: Any = None,
    n_trials: int = 100,
    epochs: int = 30,
    memory: int | str = "256 MiB",
    workers: int | None = None,
    batch_size: int = 32,
    sampler: Any = "tpe",
    pruner: Any = "hyperband",
    metric: str | None = None,
    maximize: bool | None = None,
    concurrent: int | None = None,
    engine: str | RayEngine = "local",
    storage: Any = None,
    study_name: str = "explore",
    seed: int = 0,
    keep: int = 1,
    progress: bool = True,
) -> Exploration:
    """Search hyperparameters and architectures.

    Parameters
    ----------
    build : callable
        ``build(trial)`` returns a graph (`build_graph`, or any with a path that trains and one called "predict"), or a
        graph and a dict of hyperparameters; ``"batch_size"`` in it applies to this trial.  ``trial["width"]`` is the
        sampler's choice.  Graphs that differ only in hyperparameters of the optimizer share one program.
    space : dict
        By name a list of values, ``(low, high)``, ``(low, high, "log")``, ``(low, high, step)`` (integers if the bounds
        are), or a distribution of Optuna.
    data : tuple of ndarray, or mapping
        As for `Fleet.add`; shared by all trials, never copied.
    validation : the same, or the share of samples at the end of the data to hold out
    n_trials : int
        Trials of the whole study; with ``storage`` those of earlier runs count.
    epochs : int
        Epochs of a trial that is not pruned.
    memory : int or str
        Bytes of the heap; a trial whose program is larger fails.
    workers : int, optional
        Default: all cores.
    batch_size : int
    sampler : "tpe", "random", "grid", "cmaes", or a sampler of Optuna
    pruner : "hyperband", "halving", "median", None, or a pruner of Optuna
    metric : str, optional
        A figure of an epoch: "val_loss" (the default with validation data), "val_accuracy", "loss".
    maximize : bool, optional
        Default: inferred from names such as loss or accuracy.  For other metrics it is required.
    concurrent : int, optional
        The most trials at once in a heap; fewer run if they do not fit.  Default: an eighth of ``n_trials``, from 4 to 64.
        The sampler learns from finished trials only.  If all trials run at once it is no better than random sampling.
    engine : "local", "ray", or a `RayEngine`
        "ray": a fleet with a heap of ``memory`` bytes on every node.
    storage : str, optional
        Such as ``"sqlite:///search.db"``.  Every finished trial is stored there.  A search with the same ``study_name``
        continues after the last one.
    seed : int
        With engine "local" the same seed gives the same result, for any number of workers.
    keep : int
        Number of models to keep in memory; `Exploration.top` retrains others.
    progress : bool

    Returns
    -------
    Exploration : also after Ctrl-C, with the finished trials (``result.stopped`` says so)

    Raises
    ------
    CalcError : an argument is invalid; the study is unchanged.
    MissingExtra : Optuna (extra ``explore``) or Ray (extra ``ray``) is not installed.

    Notes
    -----
    For 1000 trials with Hyperband, Optuna takes 6 s of 10 s with TPE, and 1.3 s of 6 s with random sampling (two cores, the
    digits, networks up to 64-64-64-64-10).  It is called only when a decision is possible, not between two rungs.  A
    storage is written once per trial: 6 to 25 ms in SQLite, depending on the disk.

    Examples
    --------
    >>> def build(trial):
    ...     net = nn.Linear(trial["width"]) >> nn.ReLU() >> nn.Linear(2)
    ...     return cv.build_graph(net, (4,), "softmax_cross_entropy", cv.Adam(trial["rate"]))
    >>> X, y = np.eye(40, 4, dtype="float32"), np.arange(40) % 2
    >>> space = {"width": (8, 64), "rate": (1e-4, 1e-1, "log")}
    >>> result = cv.explore(build, space, data=(X, y), validation=0.2, n_trials=8, metric="val_accuracy", progress=False)
    >>> sorted(result.best.params), result.top(1)[0].predict(X).shape
    (['rate', 'width'], (40, 2))
    """
    start = time.perf_counter()
    if not callable(build):
        raise CalcError(f"build: a function of a trial that returns a graph is wanted, not {checks.called(build)}")
    n_trials, epochs = checks.integer("n_trials", n_trials), checks.integer("epochs", epochs)
    if concurrent is None:
        concurrent = max(FEW, min(n_trials // SHARE, CONCURRENT))
    concurrent, batch_size = checks.integer("concurrent", concurrent), checks.integer("batch_size", batch_size)
    workers = None if workers is None else checks.integer("workers", workers, 1, MAX_WORKERS)
    seed, keep = checks.integer("seed", seed, 0), checks.integer("keep", keep, 0)
    maximize = None if maximize is None else checks.flag("maximize", maximize)
    progress = checks.flag("progress", progress)
    checks.text("study_name", study_name, "explore")
    data, validation = _held_out(data, validation)
    if metric is None:
        metric = "loss" if validation is None else "val_loss"
    checks.text("metric", metric, "val_loss")
    if validation is None and metric.startswith("val_"):
        raise CalcError(
            f"metric {checks.shown(metric)} needs validation data: give validation=(X, y) or a share such as 0.2"
        )
    maximize = largest_of("explore", metric, maximize, "maximize")
    task = Task(build, data, validation, epochs, batch_size, parse_bytes(memory), workers)
    study = Study(
        space, sampler, pruner, maximize=maximize, epochs=epochs, seed=seed, storage=storage, name=study_name,
        facts={"metric": metric, "epochs": epochs, "seed": seed, "space": _described(space)},
    )  # fmt: skip
    n_trials = min(n_trials, study.size or n_trials)
    trainer = _engine(engine, task)
    count = Count(n_trials, progress, "trials")
    sign = -1 if maximize else 1

    def show(search: Search) -> None:
        values = [sign * t.value for t in search.trials.values() if t.status == "complete" and t.value is not None]
        count.step(search.ended, lambda: f"best {metric} {sign * min(values):.4g}" if values else "")

    search = Search(
        study, trainer, n_trials=n_trials, epochs=epochs, metric=metric, maximize=maximize, concurrent=concurrent,
        keep=keep, seed=seed, show=show,
    )  # fmt: skip
    try:
        search.run()
    finally:
        count.close()
        trainer.close()
    trials = [search.trials[number] for number in sorted(search.trials)]
    if trials and not search.stopped and all(trial.status == "failed" for trial in trials):
        warn(f"all of the {len(trials)} trials have failed; the first: {trials[0].reason}")
    seconds = {"total": time.perf_counter() - start, "optuna": study.seconds}
    return Exploration(
        trials, study.optuna, metric, maximize, task, trainer.model,
        stopped=search.stopped, lost=search.lost, seconds=seconds,
    )  # fmt: skip


def _held_out(data: Any, validation: Any) -> tuple[Any, Any]:
    """The training data and the validation data."""
    if not isinstance(data, (tuple, list, Mapping)) or not data:
        raise CalcError(f"data: a tuple of arrays (X, y), or a mapping by name, is wanted, not {checks.called(data)}")
    arrays = list(data.values() if isinstance(data, Mapping) else data)
    sizes = {np.shape(array)[:1] for array in arrays}
    if len(sizes) > 1:
        raise ShapeError(
            f"data of shapes {', '.join(str(np.shape(a)) for a in arrays)}: their numbers of samples differ"
        )
    if not checks.is_number(validation):
        return data, validation
    validation = checks.number("validation", validation, 0, 1, ends="()", unless=", the share of samples, or arrays")
    n = len(arrays[0])
    n_kept = n - round(n * validation)
    if not 0 < n_kept < n:
        raise CalcError(f"validation={validation}: no samples are left on one side of {n}")
    names = list(data) if isinstance(data, Mapping) else None
    parts = [tuple(numbers("data", a)[part] for a in arrays) for part in (slice(n_kept), slice(n_kept, None))]
    kept, held = (dict(zip(names, part)) if names else part for part in parts)
    return kept, held


def _described(space: Mapping[str, Any]) -> dict[str, str]:
    return {name: repr(entry) for name, entry in space.items()} if isinstance(space, Mapping) else {}


def _engine(engine: str | RayEngine, task: Task) -> Engine:
    if isinstance(engine, str) and engine == "local":
        return Local(task)
    if isinstance(engine, str) and engine == "ray":
        engine = RayEngine()
    if not isinstance(engine, RayEngine):
        raise CalcError(f"engine {checks.shown(engine)}: take 'local', 'ray', or a cv.RayEngine")
    return Cluster(engine, task)

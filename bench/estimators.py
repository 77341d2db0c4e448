"""P14: `calcvm.sklearn` beside scikit-learn's estimators, on its digits: fits, updates, cross-validation, search.

Both get the same parameters, splits and seeds, and the features of `load_digits` (float64; scikit-learn also float32).
Each turn of a fit has another seed and another split.  Contestants stop after different numbers of epochs, so there are
milliseconds per epoch beside seconds per fit.  The accuracy is that on held-out digits.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from bench.harness import Process, Result, answers, idlest_core, interleave, n_cores, number, ratio, turn_ratio

NAMES = {
    "ours": "calcvm",
    "ours_float64": 'calcvm, dtype="float64"',
    "sklearn": "scikit-learn",
    "sklearn_float32": "scikit-learn, float32 features",
    "grid": "GridSearchCV of calcvm",
    "fleet": "FleetSearchCV",
    "sklearn_jobs": "scikit-learn, a process for each core",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "default parameters": {},
    "batch_size=32": {"batch_size": 32},
    "early_stopping=True": {"early_stopping": True},
    'solver="sgd"': {"solver": "sgd"},
    "hidden_layer_sizes=(32, 32)": {"hidden_layer_sizes": (32, 32)},
    'solver="lbfgs"': {"solver": "lbfgs"},
}
SEEDS, FEW_SEEDS, QUICK_SEEDS = 20, 6, 1  # for the accuracy of the default parameters, for times, for a smoke run
QUICK_SAMPLES, QUICK_EPOCHS = 400, 15
ACCURACY_TOLERANCE, FEW_TOLERANCE = 0.005, 0.03  # between mean accuracies over all seeds, over few
SPEED_TARGET = 10.0
PARTIAL_ROWS, PARTIAL_CALLS, PREDICT_ROWS = (32, 200), 50, 100_000
GRID: dict[str, list[Any]] = {
    "hidden_layer_sizes": [(16,), (64,), (32, 32)],
    "alpha": [1e-5, 1e-3],
    "learning_rate_init": [3e-4, 1e-3, 3e-3, 1e-2],
}
QUICK_GRID: dict[str, list[Any]] = {"hidden_layer_sizes": [(16,)], "alpha": [1e-5, 1e-3]}
FOLDS, TURNS = 3, 2
IDLE_SECONDS = 0.1  # before each turn, while idle threads of the previous contestant still spin


# ---------------------------------------------------------------- in a separate process
class Contestant:
    """One of `NAMES` in this process."""

    def __init__(self, who: str, threads: int, quick: bool):
        from sklearn.datasets import load_digits

        self.threads = threads
        self.kind = import_module(
            "calcvm.sklearn" if who.startswith("ours") else "sklearn.neural_network"
        ).MLPClassifier
        self.options: dict[str, Any] = {"dtype": "float64"} if who == "ours_float64" else {}
        self.X, self.y = load_digits(return_X_y=True)
        if quick:
            self.X, self.y = self.X[:QUICK_SAMPLES], self.y[:QUICK_SAMPLES]
            self.options["max_iter"] = QUICK_EPOCHS
        if who == "sklearn_float32":
            self.X = self.X.astype("float32")

    def estimator(self, seed: int = 0, **parameters: Any) -> Any:
        return self.kind(random_state=seed, **{**self.options, **parameters})

    def fit(self, seed: int, parameters: Mapping[str, Any]) -> dict[str, float]:
        from sklearn.model_selection import train_test_split

        X, X_test, y, y_test = train_test_split(self.X, self.y, test_size=0.2, random_state=seed, stratify=self.y)
        model = self.estimator(seed, **parameters)
        start = time.perf_counter()
        model.fit(X, y)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "epochs": model.n_iter_, "accuracy": model.score(X_test, y_test)}

    def partial_fit(self, rows: int) -> dict[str, float]:
        model, X, y = self.estimator(), self.X[:rows], self.y[:rows]
        model.partial_fit(X, y, classes=np.arange(10))
        start = time.perf_counter()
        for _ in range(PARTIAL_CALLS):
            model.partial_fit(X, y)
        return {"seconds": (time.perf_counter() - start) / PARTIAL_CALLS}

    def predict(self, rows: int) -> dict[str, float]:
        model, X = self.estimator(max_iter=1).fit(self.X, self.y), np.resize(self.X, (rows, self.X.shape[1]))
        start = time.perf_counter()
        model.predict_proba(X)
        return {"seconds": time.perf_counter() - start}

    def cross_validate(self) -> dict[str, float]:
        from sklearn.model_selection import cross_val_score

        start = time.perf_counter()
        scores = cross_val_score(self.estimator(), self.X, self.y, cv=5)
        return {"seconds": time.perf_counter() - start, "score": scores.mean()}

    def search(self, how: str, grid: Mapping[str, Any]) -> dict[str, Any]:
        from sklearn.model_selection import GridSearchCV

        options: dict[str, Any] = {
            "cv": FOLDS,
            "refit": False,
            "n_jobs": self.threads if how == "sklearn_jobs" else None,
        }
        kind: Any = GridSearchCV
        if how == "fleet":
            from calcvm.sklearn import FleetSearchCV

            kind, options["n_jobs"] = FleetSearchCV, self.threads
        start = time.perf_counter()
        found = kind(self.estimator(), grid, **options).fit(self.X, self.y)
        seconds = time.perf_counter() - start
        scores = found.cv_results_["mean_test_score"]
        return {"seconds": seconds, "score": scores.mean(), "scores": scores.tolist()}


def serve(spec: Mapping[str, Any]) -> None:
    """Answer requests, one JSON line each way: the name of a method and its arguments."""
    answer = answers(spec["core"])
    warnings.simplefilter("ignore")  # searches and short fits do not converge
    contestant = Contestant(spec["who"], spec["threads"], spec["quick"])
    answer(ready=True)
    for line in sys.stdin:
        request = json.loads(line)
        time.sleep(IDLE_SECONDS)
        answer(**getattr(contestant, request.pop("call"))(**request))


# ---------------------------------------------------------------- the tables
def start(who: str, threads: int, core: int | None, quick: bool) -> Process:
    spec = {"who": who, "threads": threads, "core": core, "quick": quick}
    return Process("-m", "bench.estimators", json.dumps(spec), threads=threads)


def fits(result: Result, running: Mapping[str, Process], threads: int, setting: str, quick: bool) -> None:
    """Fits of one setting by all contestants, seed by seed."""
    seeds = QUICK_SEEDS if quick else FEW_SEEDS if SETTINGS[setting] else SEEDS
    replies: dict[str, list[dict[str, float]]] = {name: [] for name in running}
    first = {}
    for name, process in running.items():
        first[name] = process.ask(call="fit", seed=0, parameters=SETTINGS[setting])["seconds"]

    def turn(name: str) -> float:
        seed = len(replies[name])
        replies[name].append(running[name].ask(call="fit", seed=seed, parameters=SETTINGS[setting]))
        return replies[name][-1]["seconds"]

    times = interleave({name: partial(turn, name) for name in running}, seeds)
    mean = {
        n: {k: statistics.fmean(r[k] for r in replies[n]) for k in ("seconds", "epochs", "accuracy")} for n in running
    }
    epoch = {n: min(r["seconds"] / r["epochs"] for r in replies[n]) for n in running}
    what = f"{setting}, {threads} thread{'s' if threads > 1 else ''}"
    result.table(
        f"Fit of the digits, {what}, {seeds} seeds",
        [
            "seconds a fit", "first", "min", "mean", "times ours", "by turns", "epochs", "ms an epoch, min",
            "times ours", "accuracy",
        ],
        [
            [
                NAMES[n], number(first[n]), number(min(times[n])), number(mean[n]["seconds"]),
                number(mean[n]["seconds"] / mean["ours"]["seconds"]), number(turn_ratio(times[n], times["ours"])),
                f"{mean[n]['epochs']:.1f}", number(1e3 * epoch[n]), number(epoch[n] / epoch["ours"]),
                f"{100 * mean[n]['accuracy']:.2f} %",
            ]
            for n in running
        ],
    )  # fmt: skip
    gap = abs(mean["ours"]["accuracy"] - mean["sklearn"]["accuracy"])
    if gap > (ACCURACY_TOLERANCE if seeds == SEEDS else FEW_TOLERANCE):
        result.fail(f"mean accuracies differ by {gap:.4f}, {what}")
    if setting == "default parameters":
        share = mean["sklearn"]["seconds"] / mean["ours"]["seconds"]
        result.target("P14", f"MLPClassifier on the digits, {what}", share, SPEED_TARGET, "x")


def others(result: Result, running: Mapping[str, Process], threads: int, quick: bool) -> None:
    """Updates, predictions, cross-validation and search."""
    rows: list[list[str]] = []

    def compare(what: str, who: Mapping[str, str], **request: Any) -> dict[str, dict[str, Any]]:
        """Time a request of contestants, each in the process that ``who`` names; return their last replies."""
        replies: dict[str, dict[str, Any]] = {}

        def turn(name: str) -> float:
            how = {"how": name} if request["call"] == "search" else {}
            replies[name] = running[who[name]].ask(**request, **how)
            return replies[name]["seconds"]

        for name in who:
            if who[name] == "ours":
                turn(name)  # compiles programs
        times = interleave({name: partial(turn, name) for name in who}, 1 if quick else TURNS)
        ours = next(iter(times.values()))
        for name, t in times.items():
            ms = [number(1e3 * min(t)), number(1e3 * statistics.median(t)), number(ratio(t, ours))]
            score = replies[name].get("score")
            rows.append([what, NAMES[name], *ms, "-" if score is None else f"{score:.4f}"])
        return replies

    each = {name: name for name in ("ours", "sklearn")}
    for n in PARTIAL_ROWS:
        compare(f"partial_fit of {n} rows", each, call="partial_fit", rows=n)
    n = QUICK_SAMPLES if quick else PREDICT_ROWS
    compare(f"predict_proba of {n:,} rows", each, call="predict", rows=n)
    compare("cross_val_score, 5 folds", each, call="cross_validate")
    searchers = {"fleet": "ours", "grid": "ours", "sklearn": "sklearn"}
    if threads > 1:
        searchers["sklearn_jobs"] = "sklearn"
    grid = QUICK_GRID if quick else GRID
    n_fits = FOLDS * math.prod(len(values) for values in grid.values())
    found = compare(f"search, {n_fits} fits", searchers, call="search", grid=grid)
    if found["fleet"]["scores"] != found["grid"]["scores"]:
        result.fail("FleetSearchCV and GridSearchCV find different scores")
    header = ["milliseconds", "", "min", "median", "times ours", "mean score"]
    result.table(f"Updates, predictions, cross-validation, search; {threads} thread(s)", header, rows)


def main(quick: bool = False) -> bool:
    """Run the workload; True if fits are as accurate as scikit-learn's and searches agree."""
    result = Result("estimators", "scikit-learn estimators", quick)
    for threads in [1] if quick else sorted({1, n_cores()}):
        core = idlest_core() if threads == 1 else None
        who = ("ours", "sklearn") if quick else ("ours", "ours_float64", "sklearn", "sklearn_float32")
        running = {name: start(name, threads, core, quick) for name in who}
        try:
            for setting in list(SETTINGS)[: 1 if quick else None]:
                fits(result, running, threads, setting, quick)
            others(result, running, threads, quick)
        finally:
            for process in running.values():
                process.close()
    return result.save()


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))

"""Exploration: 1000 architectures of up to 30 epochs with TPE and Hyperband on the digits, in seconds.

The same search is run three ways: here; as a loop of Optuna and torch, of which a sample is run and the rest estimated;
and on Ray with two workers on this machine, one of which is killed midway.  Each runs in a separate process::

    python -m bench.exploration '{"who": "ours", "n_trials": 1000, "n_epochs": 30}'
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import Result, answers, fresh, n_cores
from bench.peers import Task

TRIALS, EPOCHS, REPEATS, SAMPLED = 1000, 30, 3, 100
QUICK_TRIALS, QUICK_EPOCHS, QUICK_SAMPLED = 6, 2, 1
BATCH, REDUCTION = 32, 3
SPACE: dict[str, Any] = {
    "depth": [1, 2, 3],
    "width": (8, 64),
    "activation": ["relu", "tanh", "sigmoid"],
    "rate": (1e-4, 1e-1, "log"),
}


def data() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """X, y for training and for validation: the digits, or made-up data without scikit-learn."""
    from calcvm.data import digits, train_test_split
    from calcvm.errors import MissingExtra

    try:
        X, y = digits()
        X = X.astype(np.float32) / 16
    except MissingExtra:
        X, y = Task([64, 10]).sample(1797)
    return train_test_split(X, y.astype(np.int64))


def ours(n_trials: int, n_epochs: int, **options: Any) -> dict[str, Any]:
    """The search by `cv.explore`; ``kill`` names a file that the first worker to take the middle trial creates."""
    import calcvm as cv
    from calcvm import nn

    kill, middle = options.pop("kill", None), n_trials // 2

    def build(trial: Any) -> cv.CalcGraph:
        if kill and trial.number == middle and not os.path.exists(kill):
            Path(kill).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        activation = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid}[trial["activation"]]
        net: nn.Layer = nn.Linear(10)
        for _ in range(trial["depth"]):
            net = nn.Linear(trial["width"]) >> activation() >> net
        return cv.build_graph(net, (64,), "softmax_cross_entropy", cv.Adam(trial["rate"]))

    if options.pop("ray", False):
        options["engine"] = cv.RayEngine(actors=2)
    X, y, *held_out = data()
    result = cv.explore(
        build, SPACE, data=(X, y), validation=tuple(held_out), n_trials=n_trials, epochs=n_epochs, batch_size=BATCH,
        metric="val_accuracy", progress=False, **options,
    )  # fmt: skip
    return {
        "seconds": result.seconds["total"],
        "optuna": result.seconds["optuna"],
        "best": result.best.value,
        "accuracy": result.top(1)[0].evaluate(*held_out)["accuracy"],
        "counts": result.counts,
        "epochs": int(result.column("epochs").sum()),
        "trials": len(result),
        "lost": result.lost,
        "values": [trial.value for trial in result.trials],
        "bytes": max(trial.nbytes or 0 for trial in result.trials),
    }


def torch_and_optuna(n_trials: int, n_epochs: int) -> dict[str, Any]:
    """The same search as a loop of Optuna and torch, on one thread, which spares these networks the cost of a thread pool."""
    import optuna
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    X, y, X_held, y_held = map(torch.from_numpy, data())
    activations = {"relu": torch.nn.ReLU, "tanh": torch.nn.Tanh, "sigmoid": torch.nn.Sigmoid}
    epochs, training = 0, 0.0

    def objective(trial: Any) -> float:
        nonlocal epochs, training
        depth, width = trial.suggest_categorical("depth", SPACE["depth"]), trial.suggest_int("width", *SPACE["width"])
        activation = activations[trial.suggest_categorical("activation", SPACE["activation"])]
        rate = trial.suggest_float("rate", *SPACE["rate"][:2], log=True)
        start = time.perf_counter()
        sizes = [64, *[width] * depth]
        hidden = [layer for n in zip(sizes, sizes[1:]) for layer in (torch.nn.Linear(*n), activation())]
        net = torch.nn.Sequential(*hidden, torch.nn.Linear(width, 10))
        optimizer = torch.optim.Adam(net.parameters(), rate, fused=True)
        accuracy = 0.0
        for step in range(1, n_epochs + 1):
            for batch in torch.randperm(len(X)).split(BATCH):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(net(X[batch]), y[batch]).backward()
                optimizer.step()
            with torch.no_grad():
                accuracy = (net(X_held).argmax(1) == y_held).float().mean().item()
            epochs += 1
            training += time.perf_counter() - start
            trial.report(accuracy, step)
            if step < n_epochs and trial.should_prune():
                raise optuna.TrialPruned
            start = time.perf_counter()
        return accuracy

    study = optuna.create_study(
        study_name="explore", direction="maximize", sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.HyperbandPruner(1, n_epochs, REDUCTION),
    )  # fmt: skip
    start = time.perf_counter()
    study.optimize(objective, n_trials=n_trials)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "training": training, "epochs": epochs, "best": study.best_value}


def main(quick: bool) -> bool:
    """Print and store the tables; False if a search does not account for every trial."""
    n_trials, n_epochs, sampled = (QUICK_TRIALS, QUICK_EPOCHS, QUICK_SAMPLED) if quick else (TRIALS, EPOCHS, SAMPLED)
    size = {"n_trials": n_trials, "n_epochs": n_epochs}
    result = Result("exploration", f"Exploration: {n_trials:,} trials of {n_epochs} epochs, TPE and Hyperband", quick)

    def run(**options: Any) -> dict[str, Any]:
        return fresh("-m", "bench.exploration", json.dumps({**size, **options}), threads=1)

    turns = [run(who="ours") for _ in range(1 if quick else REPEATS)]
    ours = min(turns, key=lambda t: t["seconds"])
    if any(t["values"] != ours["values"] for t in turns):
        result.fail("two runs of one seed gave different results")
    chance = run(who="ours", sampler="random")
    stored = run(who="ours", storage=True)
    try:
        torch = run(who="torch", n_trials=sampled)
    except RuntimeError as error:
        result.note(f"Optuna and torch left out: {error}")
        torch = None
    try:
        ray = None if quick else run(who="ours", ray=True)  # starting Ray takes longer than everything else
    except RuntimeError as error:
        result.note(f"Ray left out: {error}")
        ray = None

    rows = [row("calcvm", ours), row("calcvm, random sampler", chance), row("calcvm, study in SQLite", stored)]
    if ray:
        rows.append(row("calcvm on Ray, 2 workers, one killed", ray))
    if torch:
        training = torch["training"] / torch["epochs"] * ours["epochs"]
        reckoned = training / n_cores() + ours["optuna"]
        first = max(v for v in ours["values"][:sampled] if v is not None)
        result.table(
            f"a sample of {sampled} trials",
            ["", "s", "of it training", "epochs", "ms an epoch", "best"],
            [
                ["Optuna and torch, one thread", f"{torch['seconds']:.1f}", f"{torch['training']:.1f}",
                 str(torch["epochs"]), f"{1e3 * torch['training'] / torch['epochs']:.1f}", f"{torch['best']:.4f}"],
                ["calcvm's first as many", "", "", "", "", f"{first:.4f}"],
            ],
        )  # fmt: skip
        rows.append(["Optuna and torch, reckoned", f"{reckoned:.0f}", f"{ours['optuna']:.1f}", f"{ours['epochs']:,}",
                     "", "", "", f"{reckoned / ours['seconds']:.1f}"])  # fmt: skip
        result.note(
            f"Optuna and torch, reckoned: its time for an epoch, times the {ours['epochs']:,} epochs of calcvm's search, "
            f"shared by {n_cores()} cores without loss, plus the time that Optuna takes there. All of them on one core, "
            f"as the sample was run: {training + ours['optuna']:.0f} s."
        )
    header = ["", "s", "of it Optuna", "epochs", "complete", "pruned", "best", "torch's time / ours"]
    result.table(f"{n_trials:,} trials", header, rows)
    spread = statistics.median(t["seconds"] for t in turns)
    result.note(f"calcvm: the least of {len(turns)} runs, the median is {spread:.1f} s; all found the same.")
    for name, answer in (("calcvm", ours), ("random", chance), ("SQLite", stored), ("Ray", ray)):
        if answer and (answer["trials"] != n_trials or sum(answer["counts"].values()) != n_trials):
            result.fail(f"{name}: {answer['trials']} trials of {n_trials:,} are accounted for: {answer['counts']}")
        if answer and answer["accuracy"] != answer["best"]:
            result.fail(f"{name}: the best model's accuracy is {answer['accuracy']}, not {answer['best']}")
    if ray:
        if ray["lost"] != 1:
            result.fail(f"Ray: {ray['lost']} workers died, one was killed")
        result.note(
            f"Ray: the worker that took trial {n_trials // 2} was killed by SIGKILL; {ray['trials']:,} of {n_trials:,} "
            "trials are accounted for. The time includes starting and ending Ray."
        )
    return result.save()


def row(name: str, answer: dict[str, Any]) -> list[str]:
    counts = answer["counts"]
    seconds, optuna = f"{answer['seconds']:.1f}", f"{answer['optuna']:.1f}"
    numbers = [f"{answer['epochs']:,}", str(counts.get("complete", 0)), str(counts.get("pruned", 0))]
    return [name, seconds, optuna, *numbers, f"{answer['best']:.4f}", ""]


def one(who: str, storage: bool = False, **options: Any) -> dict[str, Any]:
    """A search in this process."""
    if who == "torch":
        return torch_and_optuna(**options)
    with tempfile.TemporaryDirectory() as folder:
        if storage:
            options["storage"] = f"sqlite:///{folder}/search.db"
        if options.get("ray"):
            options["kill"] = f"{folder}/killed"
        return ours(**options)


if __name__ == "__main__":
    answers(None)(**one(**json.loads(sys.argv[1])))

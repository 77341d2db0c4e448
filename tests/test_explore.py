"""Exploration: trials are trained as alone, judged as Optuna judges, and no input or accident loses more than its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.exploration.engine import Local
from calcvm.exploration.search import TRIES, Search
from calcvm.exploration.space import distributions, grid
from calcvm.exploration.study import Study
from calcvm.exploration.trial import Trial
from calcvm.exploration.worker import Report, Task, Turn, Worker
from calcvm.fleet.programs import Programs

optuna = pytest.importorskip("optuna")
ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh}
SPACE = {"width": (4, 12), "activation": list(ACTIVATIONS), "rate": (1e-3, 1e-1, "log")}


def samples(n: int = 200) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((n, 6)).astype("float32")
    return X, (X[:, 0] * X[:, 1] > 0).astype("int64") + (X[:, 2] > 0)


X, Y = samples()
DATA, VALIDATION = (X[:150], Y[:150]), (X[150:], Y[150:])


def network(trial):
    net = nn.Linear(trial["width"]) >> ACTIVATIONS[trial["activation"]]() >> nn.Linear(3)
    return cv.build_graph(net, (6,), "softmax_cross_entropy", cv.Adam(trial["rate"]))


def explore(build=network, space=SPACE, **options):
    defaults = dict(data=DATA, validation=VALIDATION, n_trials=20, epochs=9, sampler="random", progress=False)
    return cv.explore(build, space, **{**defaults, **options})


def outcome(result):
    """All that is the same whenever the same search is run, but for the clock."""
    return [{k: v for k, v in asdict(trial).items() if k != "seconds"} for trial in result.trials]


def alone(trial, epochs: int) -> cv.Model:
    """The trial's model by `Model.fit`."""
    heap = cv.CalcHeap("1 MiB")
    program = cv.compile(network(trial), batch_size=32, workers=1, accumulate=False)
    model = heap.create(program, seed=trial.seed)
    model.fit(*DATA, epochs=epochs, progress=False)
    return model


def same_bits(a: cv.Model, b: cv.Model) -> bool:
    return all(np.array_equal(v, b.parameters[k]) for k, v in a.parameters.items())


# ---------------------------------------------------------------- what it answers
def test_a_search_finds_a_model():
    result = explore(n_trials=60, pruner="hyperband", keep=2, metric="val_accuracy")
    assert len(result) == 60 and result.counts["complete"] >= 3 and result.counts["pruned"] >= 30
    assert [t.number for t in result.trials] == list(range(60))
    best = result.best
    assert best.value == max(t.value for t in result.trials if t.status == "complete") > 0.6
    for trial in result.trials:
        assert trial.epochs == len(trial.curves["loss"]) == len(trial.curves["val_accuracy"])
        assert trial.value == trial.curves["val_accuracy"][-1]
        assert trial.epochs == 9 if trial.status == "complete" else trial.epochs in (1, 3)
    first, second = result.top(2)
    assert first.evaluate(*VALIDATION)["accuracy"] == best.value
    assert second.evaluate(*VALIDATION)["accuracy"] == result.ranked[1].value
    assert result.study.best_value == best.value and len(result.study.trials) == 60
    assert result.column("value").shape == result.column("width").shape == (60,)
    with pytest.raises(cv.CalcError, match="no column 'widht'; there are .*width"):
        result.column("widht")
    shown = str(result)
    assert f"{best.value:.4f}" in shown and "60 trials: " in shown and "activation" in shown


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_the_same_seed_gives_the_same_result_for_any_number_of_workers(sampler):
    first = explore(sampler=sampler, workers=1, concurrent=8)
    assert outcome(first) == outcome(explore(sampler=sampler, workers=2, concurrent=8))
    assert outcome(first) != outcome(explore(sampler=sampler, workers=1, concurrent=8, seed=1))


@pytest.mark.parametrize("keep", [0, 3])
def test_models_have_the_bits_of_fit_kept_or_trained_again(keep):
    result = explore(keep=keep, pruner=None, n_trials=6)
    for trial, model in zip(result.ranked, result.top(3)):
        assert same_bits(model, alone(trial, 9))
    assert result.column("epochs").tolist() == [9] * 6


def test_a_sampler_learns_from_most_trials_of_a_search_by_its_defaults(monkeypatch):
    optuna, known = pytest.importorskip("optuna"), []
    ask = optuna.Study.ask

    def asked(study, *given):
        known.append(sum(trial.state.is_finished() for trial in study.get_trials(deepcopy=False)))
        return ask(study, *given)

    monkeypatch.setattr(optuna.Study, "ask", asked)
    explore(n_trials=40)
    assert len(known) == 40 and known[-1] >= 34


def test_less_memory_means_fewer_at_once_and_the_same_result():
    need = max(t.nbytes for t in explore(pruner=None).trials)
    small = explore(pruner=None, memory=need + need // 2, keep=2)
    assert outcome(small) == outcome(explore(pruner=None, memory="64 MiB", keep=2))
    assert same_bits(small.top(2)[1], alone(small.ranked[1], 9))


def test_pruned_trials_give_their_slice_back():
    worker = Worker(Task(network, DATA, VALIDATION, 9, 32, 2**20, 1))
    trials = [Trial(n, {"width": 8, "activation": "relu", "rate": 0.01}, n) for n in range(4)]
    reports = worker.turn(Turn(trials, epochs=dict.fromkeys(range(4), 1)))
    free = worker.fleet.free_bytes
    worker.turn(Turn(release=[1, 2], epochs={0: 1, 3: 1}))
    assert worker.fleet.free_bytes >= free + 2 * reports[0].nbytes
    assert [len(r.curves["loss"]) for r in worker.turn(Turn(epochs={0: 2, 3: 4}))] == [2, 4]


def test_an_ensemble_of_the_best():
    result = explore(pruner=None, keep=3)
    ensemble = result.ensemble(3)
    assert len(ensemble.models) == 3
    alone = [m.evaluate(*VALIDATION)["accuracy"] for m in result.top(3)]
    assert ensemble.evaluate(*VALIDATION)["accuracy"] >= min(alone)


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    explore(n_trials=12).picture(tmp_path / "search.png")
    assert (tmp_path / "search.png").read_bytes()[:4] == b"\x89PNG"


def test_a_trial_may_have_its_own_batch_size_and_hyperparameters():
    seen = []

    def build(trial):
        seen.append(trial)
        return network(trial), {"batch_size": 10 * (1 + trial.number), "learning_rate": 0.0}

    result = explore(build, n_trials=2, pruner=None, keep=2)
    assert sorted(m.batch_size for m in result.top(2)) == [10, 20]
    assert all(len(set(t.curves["loss"])) <= 9 and t.curves["val_loss"][0] == t.curves["val_loss"][-1] for t in seen)


# ---------------------------------------------------------------- samplers and pruners
@pytest.mark.parametrize("sampler", ["tpe", "random", "cmaes"])
def test_samplers_by_name(sampler):
    result = explore(sampler=sampler, concurrent=4)
    assert len({json.dumps(t.params) for t in result.trials}) > 10
    assert all(4 <= t["width"] <= 12 and 1e-3 <= t["rate"] <= 1e-1 for t in result.trials)


def test_a_grid_is_searched_once():
    space = {"width": (4, 12, 4), "activation": ["relu", "tanh"], "rate": [0.01, 0.1]}
    result = explore(space=space, sampler="grid", n_trials=100)
    assert len(result) == 12 == len({json.dumps(t.params) for t in result.trials})


def test_samplers_and_pruners_of_optuna():
    space = {"width": [4, 8], "activation": ["relu"], "rate": [0.01, 0.1]}
    sampler, pruner = optuna.samplers.GridSampler(space), optuna.pruners.ThresholdPruner(upper=0.0, n_warmup_steps=2)
    result = explore(space=space, sampler=sampler, pruner=pruner, n_trials=4)
    assert [t.epochs for t in result.trials] == [2] * 4 and result.counts == {"pruned": 4}


@pytest.mark.parametrize("pruner", ["halving", "hyperband", "median"])
def test_pruners_decide_as_in_optunas_own_loop(pruner):
    result = explore(pruner=pruner, concurrent=1, n_trials=40)

    def objective(trial):
        for step, value in enumerate(result.trials[trial.number].curves["val_loss"], 1):
            trial.report(value, step)
            if step < 9 and trial.should_prune():
                raise optuna.TrialPruned
        assert step == 9, "Optuna would have gone on"
        return value

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(study_name="explore", pruner=type(result.study.pruner)(**PRUNERS[pruner]))
    study.optimize(objective, n_trials=40)
    states = {"PRUNED": "pruned", "COMPLETE": "complete"}
    assert [states[t.state.name] for t in study.trials] == [t.status for t in result.trials]
    assert [len(t.intermediate_values) for t in study.trials] == [t.epochs for t in result.trials]
    assert {*result.counts} == {"pruned", "complete"}


PRUNERS = {
    "halving": dict(min_resource=1, reduction_factor=3),
    "hyperband": dict(min_resource=1, max_resource=9, reduction_factor=3),
    "median": dict(n_startup_trials=10),
}


# ---------------------------------------------------------------- programs
def graph(optimizer=None, width=8, **linear):
    net = nn.Linear(width, **linear) >> nn.ReLU() >> nn.Dropout(0.1) >> nn.Linear(3)
    return cv.build_graph(net, (6,), "softmax_cross_entropy", optimizer or cv.Adam(1e-2))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (cv.Adam(1e-2), cv.Adam(1e-3, beta1=0.8, eps=1e-6, weight_decay=0.1)),
        (cv.AdamW(1e-2), cv.AdamW(1e-3, weight_decay=0.0)),
        (cv.SGD(1e-2, momentum=0.9), cv.SGD(1e-1, momentum=0.5)),
        (cv.SGD(1e-2, clip_norm=1.0, schedule=cv.Step(10)), cv.SGD(1e-1, clip_norm=0.1, schedule=cv.Step(3, 0.5))),
        (cv.Adam(1e-2, clip_value=0.5), cv.Adam(1e-2, clip_value=0.01)),
    ],
)
def test_graphs_of_one_form_share_a_program_and_train_as_with_their_own(a, b):
    assert graph(a).form == graph(b).form
    programs = Programs()
    program, none = programs.of(graph(a), batch_size=32)
    shared, hyper = programs.of(graph(b), batch_size=32)
    assert shared is program and not none and hyper
    fleet = cv.Fleet("1 MiB", workers=1)
    model = fleet.add(shared, data=DATA, seed=3, hyper=hyper).model
    fleet.advance(3)
    own = cv.compile(graph(b), batch_size=32, workers=1, accumulate=False)
    other = cv.CalcHeap("1 MiB").create(own, seed=3)
    other.fit(*DATA, epochs=3, progress=False)
    assert same_bits(model, other) and dict(model.hyper) == dict(other.hyper)


@pytest.mark.parametrize(
    "other",
    [
        graph(cv.AdamW(1e-2)),
        graph(cv.SGD(1e-2)),
        graph(cv.Adam(1e-2, clip_norm=1.0)),
        graph(cv.Adam(1e-2, clip_value=1.0)),
        graph(cv.Adam(1e-2, schedule=cv.Exponential(0.9))),
        graph(width=9),
        graph(bias=False),
        graph(init=cv.init.HeNormal()),
        graph(bias_init=cv.init.Constant(0.5)),
        graph(regularizer=cv.L2(1e-4)),
        graph(trainable=False),
        graph(init=cv.init.Uniform(-0.1, 0.1)),
    ],
)
def test_graphs_of_other_forms_do_not(other):
    assert other.form != graph().form
    programs = Programs()
    assert programs.of(other, batch_size=32)[0] is not programs.of(graph(), batch_size=32)[0]


def test_values_that_the_optimizer_starts_from_and_constants_are_part_of_the_form():
    assert graph(cv.Adagrad(1e-2)).form != graph(cv.Adagrad(1e-2, initial_accumulator=0.1)).form
    assert graph(cv.SGD(1e-2)).form != graph(cv.SGD(1e-2, momentum=0.9)).form
    forms = []
    for scale in (1.0, 2.0):
        g = cv.CalcGraph()
        x, w = g.placeholder("x", (None, 2)), g.parameter("w", (2, 1), init=np.full((2, 1), scale))
        with g.path("learn", backward=True) as learn:
            learn.minimize(cv.mean((x @ w) * 2.0), cv.SGD(0.1))
        forms.append(g.form)
    assert forms[0] != forms[1]


def test_programs_used_last_are_remembered(monkeypatch):
    monkeypatch.setattr(Programs, "KEPT", 2)
    programs = Programs()
    first, second = (programs.of(graph(width=w), batch_size=32)[0] for w in (4, 5))
    assert programs.of(graph(width=4), batch_size=32)[0] is first
    programs.of(graph(width=6), batch_size=32)
    assert (
        programs.of(graph(width=4), batch_size=32)[0] is first
        and programs.of(graph(width=5), batch_size=32)[0] is not second
    )
    assert programs.of(graph(width=5), batch_size=16)[0].batch_size == 16


# ---------------------------------------------------------------- bad input and accidents
def test_a_build_that_raises_fails_its_trial_alone():
    def build(trial):
        if trial.number % 3 == 1:
            raise ValueError(f"no {trial.number}")
        return network(trial)

    result = explore(build, n_trials=12, pruner=None)
    assert [t.number for t in result.trials if t.status == "failed"] == [1, 4, 7, 10]
    assert result.counts == {"complete": 8, "failed": 4}
    assert "ValueError: no 4" in result.trials[4].reason and "test_explore.py" in result.trials[4].reason
    assert "failed: " in str(result)
    assert result.study.trials[4].state.name == "FAIL" and "no 4" in result.study.trials[4].user_attrs["reason"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda t: None, "build must return a graph"),
        (lambda t: (network(t), 3), "build must return a graph"),
        (lambda t: t["depth"], "the space has no 'depth'; it has 'width', 'activation', 'rate'"),
        (lambda t: (network(t), {"momentum": 1.0}), "no hyperparameter 'momentum'"),
        (lambda t: cv.build_graph(nn.Linear(3), (5,), "softmax_cross_entropy", cv.SGD(0.1)), "'input'"),
        (lambda t: (network(t), {"batch_size": 0}), "batch_size"),
    ],
)
def test_where_every_trial_fails_the_result_says_with_what(answer, reason):
    with pytest.warns(cv.CalcWarning, match="all of the 3 trials have failed; the first: "):
        result = explore(answer, n_trials=3)
    assert result.counts == {"failed": 3} and reason in result.trials[0].reason
    with pytest.raises(cv.CalcError, match="of 3 trials 0 are complete; 3 failed with: "):
        _ = result.best
    with pytest.raises(cv.CalcError):
        result.top()
    assert "3 failed: " in str(result)


def test_a_loss_that_is_not_finite_prunes():
    def build(trial):
        net = nn.Linear(4) >> nn.Linear(3)
        return cv.build_graph(net, (6,), "softmax_cross_entropy", cv.SGD(1e30 if trial.number == 2 else 0.1))

    for sampler in ("random", "tpe"):
        result = explore(build, n_trials=15, pruner="hyperband", sampler=sampler)
        bad = result.trials[2]
        assert bad.status == "pruned" and bad.value is None and "loss" in bad.reason and "nan" in bad.reason.lower()
        assert result.study.trials[2].state.name == "PRUNED" and result.counts["complete"]


def test_a_trial_that_traps_fails():
    bad = (X[:150], np.where(np.arange(150) == 70, 7, Y[:150]))
    with pytest.warns(cv.CalcWarning, match="all of the 2 trials have failed; the first: .*label"):
        result = explore(data=bad, n_trials=2)
    assert result.counts == {"failed": 2} and "label" in result.trials[0].reason


def test_a_trial_that_does_not_fit_fails_with_the_bytes():
    result = explore(space={**SPACE, "width": [4, 5000]}, memory="64 KiB", n_trials=12, pruner=None)
    failed = [t for t in result.trials if t.status == "failed"]
    assert failed and result.counts["complete"] and all(t["width"] == 5000 for t in failed)
    assert "65,536 are allowed" in failed[0].reason and "bytes" in failed[0].reason


def test_a_metric_that_there_is_not_ends_the_search():
    with pytest.warns(cv.CalcWarning, match="the figures of an epoch are 'loss', 'val_loss', 'val_accuracy'"):
        result = explore(metric="val_recall", n_trials=200)
    assert result.counts["failed"] == 1 and len(result.trials) < 200


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (dict(n_trials=0), "n_trials must be an integer >= 1, not 0"),
        (dict(rounds=3), "no argument 'rounds': did you mean epochs="),
        (dict(epochs=0), "epochs must be an integer >= 1, not 0"),
        (dict(metric="val_loss", validation=None), "needs validation data"),
        (dict(validation=0.001), "no samples are left"),
        (dict(data=(X, Y[:-1])), "samples differ"),
        (dict(sampler="annealing"), "sampler 'annealing': take one of 'tpe'"),
        (dict(pruner="patience"), "pruner 'patience': take one of 'hyperband'"),
        (dict(engine="dask"), "engine 'dask'"),
        (dict(memory="much"), "memory 'much'"),
        (dict(sampler="grid"), "'rate' has no steps"),
        (dict(space={}), "at least one parameter"),
        (dict(space={"width": 3}), r"space\['width'\] = 3: give a list"),
        (dict(space={"width": (8, 4)}), "lower bound"),
        (dict(space={"width": (0, 4, "log")}), "above 0"),
        (dict(space={"width": (1, 4, "exp")}), "give a list"),
        (dict(space={"width": [nn.ReLU]}), "give other objects names"),
        (dict(space={"width": []}), "values to choose from"),
        (dict(space={"width": (1, float("inf"))}), "give a list"),
    ],
)
def test_unusable_arguments_are_refused_at_once(options, error):
    with pytest.raises(cv.CalcError, match=error):
        explore(lambda trial: pytest.fail("a trial was begun"), **options)


def test_a_space_in_all_its_forms():
    of = optuna.distributions
    given = {"a": [1, 2], "b": (1, 9), "c": (1, 9, 2), "d": (0.5, 2), "e": (1e-3, 1.0, "log"), "f": (0.0, 1.0, 0.25)}
    assert distributions({**given, "g": of.IntDistribution(3, 4)}) == {
        "a": of.CategoricalDistribution([1, 2]),
        "b": of.IntDistribution(1, 9),
        "c": of.IntDistribution(1, 9, step=2),
        "d": of.FloatDistribution(0.5, 2),
        "e": of.FloatDistribution(1e-3, 1.0, log=True),
        "f": of.FloatDistribution(0.0, 1.0, step=0.25),
        "g": of.IntDistribution(3, 4),
    }
    assert grid({"c": (1, 9, 2), "f": (0.0, 1.0, 0.25)}) == {"c": [1, 3, 5, 7, 9], "f": [0, 0.25, 0.5, 0.75, 1]}


@pytest.mark.parametrize(
    ("module", "extra", "options"),
    [
        ("optuna", "explore", {}),
        ("cmaes", "explore", dict(sampler="cmaes")),
        ("ray", "ray", dict(engine="ray")),
    ],
)
def test_what_is_not_installed_is_named(monkeypatch, module, extra, options):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(cv.MissingExtra) as error:
        explore(**options)
    assert (error.value.package, error.value.extra) == (module, extra)


def interrupting(at: int):
    def build(trial):
        if trial.number == at:
            raise KeyboardInterrupt
        return network(trial)

    return build


def test_ctrl_c_returns_what_is_done(tmp_path):
    where = f"sqlite:///{tmp_path / 'search.db'}"
    result = explore(interrupting(13), concurrent=4, storage=where)
    assert result.stopped == "interrupted" and "stopped: interrupted" in str(result)
    assert result.counts["interrupted"] >= 1 and result.counts["pruned"] >= 5
    assert not [t for t in result.study.trials if not t.state.is_finished()]
    stored = optuna.load_study(study_name="explore", storage=where).trials
    assert len(stored) == len(result) - result.counts["interrupted"]
    again = explore(storage=where)
    assert len(again) == 20 and "interrupted" not in again.counts and not again.stopped


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the first may be raised in a finalizer
@pytest.mark.parametrize("after", [0.2, 0.35, 0.5, 0.65])
def test_ctrl_c_at_any_moment(after):
    done = threading.Event()

    def press() -> None:  # again, where a finalizer dropped the first
        wait = after
        while not done.wait(wait):
            os.kill(os.getpid(), signal.SIGINT)
            wait = 10

    presser = threading.Thread(target=press, daemon=True)
    presser.start()
    try:
        result = explore(n_trials=100_000, epochs=81, sampler="tpe", pruner="hyperband")
    finally:
        done.set()
        presser.join()
    assert result.stopped == "interrupted" and {"running"}.isdisjoint(result.counts)
    assert not [t for t in result.study.get_trials(deepcopy=False) if not t.state.is_finished()]
    if result.counts.get("complete"):
        assert np.isfinite(result.top(1)[0].evaluate(*VALIDATION)["loss"])


def test_a_ctrl_c_that_python_drops_ends_the_search_after_the_turn():
    def build(trial):
        if trial.number == 5:
            with contextlib.suppress(KeyboardInterrupt):  # as in a finalizer
                signal.raise_signal(signal.SIGINT)
        return network(trial)

    handler = signal.getsignal(signal.SIGINT)
    result = explore(build, concurrent=3)
    assert result.stopped == "interrupted" and len(result) < 20 and signal.getsignal(signal.SIGINT) is handler


# ---------------------------------------------------------------- storage
def test_a_stored_study_goes_on(tmp_path):
    where = f"sqlite:///{tmp_path / 'search.db'}"
    first = explore(storage=where, n_trials=10)
    more = explore(storage=where, n_trials=25)
    assert len(more) == 25 and outcome(more)[:10] == outcome(first)
    assert len({json.dumps(t.params) for t in more.trials}) > 20  # the sampler does not begin anew
    assert same_bits(more.top(1)[0], alone(more.best, 9))
    stored = optuna.load_study(study_name="explore", storage=where)
    assert len(stored.trials) == 25 and stored.best_value == more.best.value
    stored.enqueue_trial({"width": 4})  # by somebody else
    none = explore(lambda trial: pytest.fail("no trial is left"), storage=where, n_trials=25)
    assert outcome(none) == outcome(more)
    assert len(explore(storage=where, study_name="another", n_trials=3)) == 3


def test_hyperband_goes_on_with_the_brackets_of_the_first_run(tmp_path):
    where = f"sqlite:///{tmp_path / 'search.db'}"
    explore(interrupting(21), pruner="hyperband", concurrent=5, storage=where, n_trials=60)
    more = explore(pruner="hyperband", concurrent=5, storage=where, n_trials=40)
    assert len(more) == 40
    of = more.study.pruner._get_bracket_id
    for frozen, rungs in [
        (t, [k for k in t.system_attrs if k.startswith("completed_rung")]) for t in more.study.trials
    ]:
        epochs = max(frozen.intermediate_values, default=0)
        assert len(rungs) == max(0, [1, 3, 9].index(epochs) + 1 - of(more.study, frozen)) if epochs in (1, 3) else True


@pytest.mark.parametrize(
    "options", [dict(epochs=3), dict(seed=5), dict(metric="val_accuracy"), dict(space={"width": (4, 5)})]
)
def test_a_stored_study_of_another_search_is_refused(tmp_path, options):
    where = f"sqlite:///{tmp_path / 'search.db'}"
    explore(storage=where, n_trials=2)
    with pytest.raises(cv.CalcError, match="study 'explore' was begun with|cannot be used"):
        explore(storage=where, **options)
    assert len(optuna.load_study(study_name="explore", storage=where).trials) == 2


def test_a_storage_that_another_process_is_making_is_asked_again(tmp_path, monkeypatch):
    asked, create = [], optuna.create_study

    def racing(**how):
        asked.append(how)
        if len(asked) == 1:
            raise RuntimeError("table studies already exists")
        return create(**how)

    monkeypatch.setattr(optuna, "create_study", racing)
    result = explore(storage=f"sqlite:///{tmp_path / 'search.db'}", n_trials=2)
    assert len(result.study.trials) == 2 and len(asked) == 3  # a study in memory, and twice the stored one


def test_a_storage_that_cannot_be_used_is_named(tmp_path):
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with pytest.raises(cv.CalcError, match="storage sqlite:///.*cannot be used"):
        explore(storage=f"sqlite:///{tmp_path / 'missing' / 'search.db'}")
    where = f"sqlite:///{tmp_path / 'other.db'}"
    optuna.create_study(storage=where, study_name="explore").optimize(lambda t: t.suggest_float("x", 0, 1), n_trials=1)
    with pytest.raises(cv.CalcError, match="was not made by cv.explore"):
        explore(storage=where)


def test_a_storage_that_fails_on_the_way_ends_the_search_with_what_is_done(tmp_path, monkeypatch):
    where, add, written = f"sqlite:///{tmp_path / 'search.db'}", optuna.Study.add_trial, []

    def full(study, trial):
        written.append(trial)
        if len(written) > 5:
            raise OSError(28, "No space left on device")
        add(study, trial)

    monkeypatch.setattr(optuna.Study, "add_trial", full)
    with pytest.warns(RuntimeWarning, match="storage cannot be written: OSError.*No space left"):
        result = explore(storage=where, concurrent=4)
    assert "No space left" in result.stopped and len(optuna.load_study(study_name="explore", storage=where).trials) == 5
    assert result.counts.get("running", 0) == 0 and len(result) < 20


CHILD = """
from tests.test_explore import explore
explore(storage={where!r}, n_trials=4000, pruner="halving", sampler="tpe")
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_ended_leaves_a_study_to_go_on_with(tmp_path, end, whole):
    if end == signal.SIGTERM and not whole:
        pytest.skip("takes --whole")
    where = f"sqlite:///{tmp_path / 'search.db'}"
    optuna.storages.RDBStorage(where)  # or both that look first would make its tables
    child = subprocess.Popen([sys.executable, "-c", CHILD.format(where=where)], stderr=subprocess.PIPE, env=ENVIRONMENT)
    stored = 0
    while stored < 20 and child.poll() is None:
        time.sleep(0.05)
        try:
            stored = len(optuna.load_study(study_name="explore", storage=where).trials)
        except Exception:  # not there yet
            continue
    child.send_signal(end)
    child.communicate(timeout=60)
    assert child.returncode in (-signal.SIGKILL, 128 + signal.SIGTERM)
    stored = len(optuna.load_study(study_name="explore", storage=where).trials)
    result = explore(storage=where, n_trials=stored + 20, pruner="halving", sampler="tpe")
    assert len(result) == stored + 20 and {*result.counts} <= {"complete", "pruned"}


# ---------------------------------------------------------------- workers that die
class Mortal(Local):
    """A worker that dies in the turns given, with all its trials."""

    def __init__(self, task: Task, deaths):
        super().__init__(task)
        self.task, self.deaths, self.turns = task, deaths, 0

    def wait(self) -> tuple[int, list[Report] | None]:
        self.turns += 1
        if self.turns in self.deaths:
            self._turns.popleft()
            self.worker = Worker(self.task)
            return 0, None
        return super().wait()


def searched(deaths, n_trials: int = 20) -> Search:
    study = Study(SPACE, "random", "halving", maximize=False, epochs=9, seed=0, storage=None, name="s", facts={})
    engine = Mortal(Task(network, DATA, VALIDATION, 9, 32, 2**20, 1), deaths)
    search = Search(
        study, engine, n_trials=n_trials, epochs=9, metric="val_loss", maximize=False, concurrent=6, keep=1, seed=0,
        show=lambda search: None,
    )  # fmt: skip
    search.run()
    return search


def test_the_trials_of_a_dead_worker_are_run_again():
    search = searched({2, 4})
    assert search.lost == 2 and len(search.trials) == search.ended == 20
    assert {t.status for t in search.trials.values()} == {"complete", "pruned"}
    without_signals = searched(())
    for number, trial in search.trials.items():
        n = min(trial.epochs, without_signals.trials[number].epochs)
        assert trial.curves["loss"][:n] == without_signals.trials[number].curves["loss"][:n]
    assert not [t for t in search.study.optuna.trials if not t.state.is_finished()]


def test_a_trial_that_kills_its_workers_is_given_up():
    search = searched(range(1, TRIES + 1), n_trials=6)
    assert search.lost == TRIES and {t.status for t in search.trials.values()} == {"failed"}
    assert "workers died" in search.trials[0].reason


def test_a_cluster_that_is_gone_ends_the_search_with_what_is_done():
    def wait(self):
        if self.turns == 5:
            raise cv.CalcError("Ray is gone")
        return Mortal.wait(self)

    lost = type("Lost", (Mortal,), {"wait": wait})
    study = Study(SPACE, "random", None, maximize=False, epochs=9, seed=0, storage=None, name="s", facts={})
    engine = lost(Task(network, DATA, VALIDATION, 9, 32, 2**20, 1), ())
    options = dict(n_trials=20, epochs=9, metric="val_loss", maximize=False, concurrent=2, keep=1, seed=0)
    search = Search(study, engine, **options, show=lambda search: None)
    with pytest.warns(RuntimeWarning, match="Ray is gone"):
        search.run()
    assert search.stopped == "Ray is gone"
    assert [t.status for t in search.trials.values()] == ["complete"] * 10 + ["interrupted"] * 2


def test_ray_that_cannot_be_reached_is_named():
    pytest.importorskip("ray")
    with pytest.raises(cv.CalcError, match="Ray at 127.0.0.1:1 cannot be reached: .*refused"):
        explore(engine=cv.RayEngine("127.0.0.1:1"))


ON_RAY = """
import json, os, signal
from tests import test_explore as t
import calcvm as cv
import ray

ray.cloudpickle.register_pickle_by_value(t)
mark = {mark!r}

def build(trial):
    if trial.number == 30 and not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if trial.number == 7:
        raise ValueError("seven")
    return t.network(trial)

result = t.explore(build, engine=cv.RayEngine(actors=2), n_trials=60, keep=2, memory="4 MiB", concurrent=8)
one, two = result.top(2)
same = [t.same_bits(model, t.alone(trial, 9)) for model, trial in zip((one, two), result.ranked)]
print(json.dumps(dict(counts=result.counts, lost=result.lost, same=same, n=len(result), mark=os.path.exists(mark),
                      seven=result.trials[7].reason, running=sum(not x.state.is_finished() for x in result.study.trials))))
"""


@pytest.mark.slow
def test_ray_with_two_workers_one_of_them_killed(tmp_path):
    pytest.importorskip("ray")
    code = ON_RAY.format(mark=str(tmp_path / "killed"))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=tmp_path, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    assert answer["mark"] and answer["lost"] == 1 and answer["n"] == 60 and answer["running"] == 0
    assert sum(answer["counts"].values()) == 60 and answer["counts"]["failed"] == 1 and "seven" in answer["seven"]
    assert answer["same"] == [True, True]

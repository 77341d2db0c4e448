"""Interrupts of what makes models, and exceptions of callbacks: the next call makes what it would have made.

These calls have up to a hundred thousand steps: the whole takes `MOST` of each, evenly spread.
"""

import gc
import importlib
import os
import signal
import sys
import threading
from collections import UserDict
from contextlib import suppress
from io import BytesIO, StringIO

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn, progress
from calcvm.kernels_cpu import _native
from calcvm.kernels_cpu._target import host
from calcvm.vm.memory import heap
from calcvm.vm.run import entry
from calcvm.without_signals import uncollected
from tests.kinds.interrupts import (
    MOST,
    NET,
    B,
    Failed,
    Hook,
    World,
    X,
    Y,
    chosen,
    interrupted,
    program_of,
    steps_of,
)  # fmt: skip

FEW = 3  # steps of a call in `make test`
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Training interrupted by user"),
    pytest.mark.filterwarnings("ignore:Stochastic Optimizer", "ignore:lbfgs failed to converge"),
]


@pytest.fixture(scope="module", autouse=True)
def nothing_leaks():
    """No heap, no open file and no thread is left by all of these tests; Optuna keeps what its imports have raised."""
    with suppress(ImportError):
        importlib.import_module("optuna")

    def there():
        gc.collect()
        return len(heap._living()), len(os.listdir("/proc/self/fd")), threading.active_count()

    before = there()
    yield
    assert np.less_equal(there(), before).all(), (there(), before)


@pytest.fixture(autouse=True)
def no_temporary_file_is_left(tmp_path):
    yield
    assert not [*tmp_path.rglob(".*")]


def worlds(tmp_path):
    """Worlds with a program, a graph and files; what calls look at is the same in all."""
    graph = cv.build_graph(NET, (4,), "softmax_cross_entropy", cv.Adam(0.02))
    path = tmp_path / "files"
    path.mkdir()
    World(2).model.save(path / "model.calc")
    program_of().save(path / "program.calc")

    def make():
        world = World(3)
        world.graph, world.path, world.hook = graph, path, Hook()
        return world

    return make


def test_garbage_is_collected_after_an_interrupt_at_any_step_of_a_plan(whole):
    """`interrupted` asks: every step around what goes without collections, in the whole every step of the plan."""
    graph = cv.build_graph(nn.Linear(2), (4,), "mse", cv.SGD(0.1))
    for act in (lambda: uncollected(list), lambda: cv.plan(graph, batch_size=8, workers=1))[: 1 + whole]:
        act()
        for n in range(1, steps_of(act) + 1):
            interrupted(act, n)


def test_garbage_is_collected_where_another_thread_ends_between_two_steps(monkeypatch):
    """That thread has disabled collections, and enables them when this one has seen that they are disabled."""
    seen = gc.isenabled

    def isenabled():
        found = seen()
        gc.enable()
        return found

    gc.disable()
    try:
        monkeypatch.setattr(gc, "isenabled", isenabled)
        uncollected(list)
        assert seen()
    finally:
        gc.enable()


def goes_well_after(call, make, fail, total, whole, seed):
    """Whatever was raised at the n-th of ``total`` steps: all is sound, and the call makes what it would have made."""
    wanted = call(make())
    for n in chosen(total, whole, seed, FEW, MOST):
        world = make()
        raised = fail(world, n)  # kept: so is what its frames hold
        world.sound()
        world.hook.at = 0
        assert call(world) == wanted, f"step {n} of {total}, {raised!r}"


def interrupted_anywhere(call, make, whole, seed):
    """Ctrl-C at steps of even number, SIGTERM at the others."""
    call(make())  # what is compiled at the first time, is
    world = make()
    total = steps_of(lambda: call(world))

    def fail(w, n):
        return interrupted(lambda: call(w), n, signal.SIGTERM if n % 2 else signal.SIGINT)[0]

    goes_well_after(call, make, fail, total, whole, seed)


# ---------------------------------------------------------------- signals
def model(net=NET, loss="softmax_cross_entropy", **options):
    return cv.Model(
        net, input_shape=(4,), loss=loss, optimizer=cv.Adam(0.02), batch_size=8, workers=1, seed=5, **options
    )


def state(m):
    return m.program.hash, m.image().tobytes()


def in_a_heap(w):
    if "new" in w.heap:
        w.heap["new"].close()
    return state(model(heap=w.heap, name="new"))


def saved_program(w):
    w.program.save(w.path / "again.calc")
    return (w.path / "again.calc").read_bytes()


def linked(w):
    """Compiled code is linked as in a process that has none; what was linked stays for those who call it."""
    LINKED.append(_native._engine())
    for known in (_native._addresses, _native._engine, entry.address, entry.entry):
        getattr(known, "cache_clear", getattr(known, "clear", None))()
    return w.heap["model"].predict(X).tobytes()


def kept_code(w):
    """What was compiled is written to the cache, which holds whole files and no others."""
    _native._write("calcvm_any", _native.ObjectCode(CODE, b"code", {}), host())
    return [(path.name, path.read_bytes()) for path in _native.folder(CODE, host()).iterdir()]


def snapshots(w):
    m = cv.Model(
        NET, input_shape=(4,), optimizer=cv.SGD(0.1, schedule=cv.CosineRestarts(1)), batch_size=8, workers=1, seed=5
    )
    made = cv.snapshot_ensemble(m, X, Y, cycles=2, epochs_per_cycle=1, progress=False)
    assert np.isfinite(made.predict(X)).all()
    return len(made), made.predict(X).tobytes()


LINKED, CODE = [], ("vm.run.job", "vm.run.pieces")
MAKING = {
    "build_graph": lambda w: cv.compile(cv.build_graph(NET, (4,), "mse", "adam"), plan=None, batch_size=8).hash,
    "plan": lambda w: cv.plan(w.graph, batch_size=8, workers=1).heap_bytes,
    "compile": lambda w: cv.compile(w.graph, batch_size=8, workers=1).hash,
    "Model": lambda w: state(model()),
    "Model in a heap": in_a_heap,
    "load": lambda w: state(cv.load(w.path / "model.calc")),
    "load_program": lambda w: cv.load_program(w.path / "program.calc").hash,
    "Program.save": saved_program,
    "FileStore": lambda w: type(cv.FileStore(w.path / "store")).__name__,  # whose lock no interrupt keeps
    "snapshot_ensemble": snapshots,
    "linking": linked,
    "compiled code": kept_code,
}


@pytest.mark.parametrize("name", MAKING)
def test_a_signal_at_any_step_of_making_something(name, tmp_path, whole, monkeypatch):
    folder = _native.folder
    monkeypatch.setattr(
        _native, "folder", lambda modules, target: tmp_path / "code" if modules is CODE else folder(modules, target)
    )
    interrupted_anywhere(MAKING[name], worlds(tmp_path), whole, len(name))


# ---------------------------------------------------------------- callbacks
class Array:
    """Data of another library."""

    def __init__(self, values, hook):
        self.values, self.hook = values, hook

    def __array__(self, dtype=None, copy=None):
        self.hook()
        return self.values


class File(BytesIO):
    def __init__(self, hook, data=b""):
        super().__init__(data)
        self.hook = hook

    def write(self, data):
        self.hook()
        return super().write(data)

    def read(self, *size):
        self.hook()
        return super().read(*size)


class Mapping(UserDict):
    """A user's own, whose items are looked at one by one."""

    def __init__(self, hook, **items):
        self.hook = hook
        super().__init__(items)

    def __getitem__(self, name):
        self.hook()
        return super().__getitem__(name)


class Told(StringIO):
    def __init__(self, hook):
        super().__init__()
        self.hook = hook

    def write(self, text):
        self.hook()
        return super().write(text)


def called(w, value):
    w.hook()
    return value


def in_loss(w):
    return state(model(loss=lambda y, t: called(w, cv.softmax_cross_entropy(y, t))))


def in_layer(w):
    return state(model(nn.Linear(6) >> nn.Function(lambda x: called(w, cv.tanh(x))) >> nn.Linear(3)))


def in_arrays(w):
    m, x = model(), Array(X, w.hook)
    m["input"] = Array(B[0], w.hook)
    m.step(Array(B[0], w.hook), B[1])
    m.fit(x, Array(Y, w.hook), epochs=1, validation=(x, Y), progress=False)
    return state(m), m.evaluate(x, Y), m.predict(x).tobytes(), m.run({"input": Array(B[0], w.hook)})["output"].tobytes()


def in_added_data(w):
    fleet = cv.Fleet(3 * w.program.heap_bytes, workers=1)
    handle = fleet.add(
        w.program, data=Mapping(w.hook, input=Array(X, w.hook), target=Y), hyper=Mapping(w.hook, learning_rate=0.1)
    )
    fleet.advance(2)
    return handle.losses.tolist()


def in_file(w):
    file = File(w.hook)
    w.heap["model"].reset(3)
    w.heap["model"].save(file)
    return state(cv.load(File(w.hook, file.getvalue())))


def in_progress(w):
    before, sys.stderr = sys.stderr, Told(w.hook)
    try:
        m = model()
        m.fit(X, Y, epochs=2, progress=True)
        fleet = cv.Fleet(3 * w.program.heap_bytes, workers=1)
        fleet.add(w.program, data=(X, Y))
        fleet.fit(2, progress=True)
    finally:
        sys.stderr = before
    return state(m), fleet.handles["model-0"].losses.tolist()


CALLBACKS = {f.__name__: f for f in (in_loss, in_layer, in_arrays, in_added_data, in_file)}


@pytest.mark.parametrize("name", CALLBACKS)
def test_an_exception_of_a_callback_at_any_of_its_calls(name, tmp_path, whole):
    make, call = worlds(tmp_path), CALLBACKS[name]
    call(world := make())
    assert world.hook.calls

    def fail(w, n):
        w.hook.at = n
        with pytest.raises((Failed, cv.CalcError)) as raised:
            call(w)
        return raised.value

    goes_well_after(call, make, fail, world.hook.calls, whole, len(name))


def test_an_exception_of_progress_ends_nothing(tmp_path, whole, monkeypatch):
    """At any write to stderr: what is trained is what it would have been."""
    for name in ("SHORT", "SECONDS"):  # the first line of each work is due at once, ...
        monkeypatch.setattr(progress, name, 0.0)
    monkeypatch.setattr(progress._Lines, "seconds", 1e9)  # ... and the next at its end
    make = worlds(tmp_path)
    wanted = in_progress(world := make())
    assert world.hook.calls >= 3  # before and at the end of `fit`, and of the fleet at least once

    def fail(w, n):
        w.hook.at = n
        assert in_progress(w) == wanted and w.hook.calls >= n

    goes_well_after(in_progress, make, fail, 3, whole, 1)


# ---------------------------------------------------------------- searches
def explored(w):
    def build(trial):
        w.hook()
        net = nn.Linear(trial["width"]) >> nn.Tanh() >> nn.Linear(3)
        return cv.build_graph(net, (4,), "softmax_cross_entropy", cv.Adam(trial["rate"]))

    found = cv.explore(
        build, {"width": [2, 3], "rate": (1e-3, 1e-1, "log")}, data=(X, Y), validation=0.25, n_trials=3, epochs=3,
        memory="64 KiB", workers=1, batch_size=8, sampler="random", progress=False,
    )  # fmt: skip
    assert not any(trial.status == "running" for trial in found.trials)
    if found.ranked:
        found.top(1)[0].predict(X)
    return [(trial.params, trial.status, trial.value) for trial in found.trials]


def test_a_signal_at_any_step_of_a_search(tmp_path, whole):
    """What is returned then can be used, and the next search finds what it would have found."""
    pytest.importorskip("optuna")
    interrupted_anywhere(explored, worlds(tmp_path), whole, 1)


def test_a_signal_at_any_step_leaves_what_optuna_says_as_it_was():
    optuna = pytest.importorskip("optuna")
    from calcvm.exploration.study import _quietly

    before, level = optuna.logging.get_verbosity(), optuna.logging.INFO  # other tests of the process may have set it
    optuna.logging.set_verbosity(level)

    def call():
        assert _quietly(optuna, optuna.logging.get_verbosity) > level

    try:
        for n in range(1, steps_of(call) + 1):
            raised, _ = interrupted(call, n)
            assert optuna.logging.get_verbosity() == level, (n, raised)
    finally:
        optuna.logging.set_verbosity(before)


def test_an_exception_of_a_search_s_build_fails_its_trial(tmp_path):
    pytest.importorskip("optuna")
    world = worlds(tmp_path)()
    wanted = explored(world)
    for n in range(1, 4):
        world.hook.calls, world.hook.at = 0, n
        trials = explored(world)
        assert [status for _, status, _ in trials].count("failed") == 1
        world.sound()
    world.hook.at = 0
    assert explored(world) == wanted


def learned(estimator):
    return [array.tolist() for array in (*estimator.coefs_, *estimator.intercepts_)]


def estimators():
    pytest.importorskip("sklearn")
    from sklearn.model_selection import StratifiedKFold

    from calcvm.sklearn import FleetSearchCV, MLPClassifier, MLPRegressor

    small = {"hidden_layer_sizes": (3,), "max_iter": 3, "random_state": 0}

    def searched(w):
        def score(estimator, x, y):
            w.hook()
            return estimator.score(x, y)

        grid, folds = {"alpha": [0.1, 0.2]}, StratifiedKFold(2)
        search = FleetSearchCV(MLPClassifier(**small), grid, scoring=score, cv=folds, n_jobs=1, error_score="raise")
        search.fit(X, Y)
        assert search.n_jobs == 1 and not hasattr(search, "_given")
        return learned(search.best_estimator_), search.cv_results_["mean_test_score"].tolist()

    def fitted(estimator, y=Y):
        estimator.fit(X, y)
        assert estimator.predict(X).shape == Y.shape
        return learned(estimator)

    def fitted_on(w):
        estimator = MLPClassifier(**small)
        for _ in range(2):
            estimator.partial_fit(X, Y, classes=[0, 1, 2])
        return learned(estimator)

    def predicted(w):
        estimator = MLPClassifier(**small).fit(X, Y)
        return estimator.predict_proba(np.tile(X, (40_000, 1))[: 1 << 19]).sum()

    return {
        "adam": lambda w: fitted(MLPClassifier(**small)),
        "early stopping": lambda w: fitted(MLPClassifier(**small, solver="sgd", early_stopping=True)),
        "lbfgs": lambda w: fitted(MLPRegressor(**small, solver="lbfgs"), X[:, 0]),
        "partial_fit": fitted_on,
        "predict": predicted,
        "FleetSearchCV": searched,
    }


@pytest.mark.parametrize("name", ["adam", "early stopping", "lbfgs", "partial_fit", "predict", "FleetSearchCV"])
def test_a_signal_at_any_step_of_an_estimator(name, tmp_path, whole):
    interrupted_anywhere(estimators()[name], worlds(tmp_path), whole, len(name))


def test_a_signal_leaves_no_stand_in_for_the_training_of_estimators():
    pytest.importorskip("sklearn")
    from calcvm.sklearn import estimators

    def call():
        assert estimators.instead_of_training(lambda *_: True, lambda: estimators._stand_in.get() is not None)

    for n in range(1, steps_of(call) + 1):
        raised, _ = interrupted(call, n)
        assert estimators._stand_in.get() is None, (n, raised)

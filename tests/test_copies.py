"""Copies, pickles and forks of all that is public: each goes on, with the same numbers, or says what to do."""

from __future__ import annotations

import copy
import inspect
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

import calcvm as cv
from calcvm import nn, optim
from calcvm.ops import OPS
from tests.frontends.files import parsed

x, y = np.ones((4, 3), "f4"), np.ones((4, 2), "f4")


def graph(trial=None):
    return cv.build_graph(nn.Linear(2), (3,), "mse", cv.SGD(0.1))


def model(**how):
    return cv.Model(nn.Linear(2), input_shape=(3,), loss="mse", optimizer=cv.SGD(0.1), batch_size=4, **how)


def compiled():
    made = model()
    for _ in range(80):  # so that its methods are compiled ones
        made.step(x, y)
    return made


def samples(folder):
    """An object of each public kind, and what can be got from one: by name, with a number that using it gives."""
    made, plain, fleet, store = compiled(), model(), cv.Fleet("1 MiB"), cv.FileStore(Path(folder) / "store")
    handle = fleet.add(made.program, data=(x, y))
    results = fleet.fit(1, progress=False)
    found = cv.explore(
        graph, {"lr": [0.1, 0.2]}, data=(x, y), validation=(x, y), n_trials=2, epochs=1, batch_size=4, metric="val_loss",
        progress=False,
    )  # fmt: skip
    g, memory = graph(), cv.MemoryStore()
    memory.put("kept", {}, memoryview(bytes(8)))
    split = cv.plan_devices(graph(), [cv.Processor("a")], batch_size=4)
    stop, history = cv.EarlyStopping(3, figure="loss"), plain.fit(x, y, epochs=1, progress=False)

    def step(m):
        return float(m.step(x, y))

    def steps(resident):
        return float(resident.step(x, y))

    return {
        "Model": (made, step),
        "Model in Python": (plain, step),
        "a model's method": (made.step, lambda method: float(method(x, y))),
        "a bound step": (made.bind(x, y), lambda bound: float(bound())),
        "a bound step in Python": (Own(made).bind(x, y), lambda bound: float(bound())),
        "a model of a fleet": (handle.model, step),
        "Fleet": (fleet, lambda f: f.fit(2, progress=False) and float(handle.losses[-1])),
        "Handle": (handle, lambda h: float(h.losses[-1])),
        "Results": (results, lambda r: float(r[0]["loss"])),
        "CalcHeap": (made.heap, lambda heap: steps(heap.create(made.program, seed=3))),
        "Hyper": (made.hyper("learn"), lambda hyper: hyper["learning_rate"]),
        "parameters": (made.parameters, lambda views: float(views["linear_1.bias"].sum())),
        "SplitModel": (cv.SplitModel(split), step),
        "SplitPlan": (split, lambda plan: len(plan.heap_bytes)),
        "Processor": (cv.Processor("a"), lambda p: p.workers),
        "Stream": (carrying_model().stream(), lambda s: float(s([1.0]).sum())),
        "Ensemble": (cv.Ensemble([made, plain]), lambda e: float(e.predict(x).sum())),
        "MemoryStore": (memory, lambda s: len(s.names())),
        "FileStore": (store, lambda s: len(s.names())),
        "Exploration": (found, lambda e: len(e.trials) + float(e.top(1)[0].predict(x).sum())),
        "Trial": (found.trials[0], lambda t: t.value),
        "RayEngine": (cv.RayEngine(), lambda r: str(r.address)),
        "Program": (made.program, lambda p: steps(cv.CalcHeap("64 KiB").create(p, seed=1))),
        "Pack": (cv.Pack(files=(), target="pico", batch_size=1, flash=9, ram=8, stack={}, undefined=(), program="", state=(0, 0), lasting={}), str),
        "TorchModule": (cv.from_torch(torch.nn.Linear(3, 2), torch.zeros(1, 3)), lambda net: cv.build_graph(net, (3,), "mse", "adam").paths["learn"].name),
        "OnnxModel": (cv.load_onnx(parsed("net (float[N, 3] x) => (float[N, 3] y) {y = Tanh(x)}")), lambda net: float(cv.Model(net).predict(x[:, :3]).sum())),
        "Plan": (cv.plan(g, batch_size=4), lambda p: p.heap_bytes),
        "CalcGraph": (g, lambda g: cv.compile(g, batch_size=4).heap_bytes),
        "Path": (g.paths["learn"], lambda p: p.name),
        "Variable": (g.variables["input"], lambda v: v.name),
        "TensorDescriptor": (g.variables["input"].descriptor, str),
        "OpSpec": (OPS["tanh"], lambda spec: spec.name),
        "RowSpec": (OPS["tanh"].fwd[0], lambda row: row.name),
        "History": (history, lambda h: h["loss"]),
        "EarlyStopping": (stop, lambda c: c.patience),
        "ReduceOnPlateau": (cv.ReduceOnPlateau(), lambda c: c.patience),
        "Callback": (cv.Callback(), lambda c: type(c).__name__),
        "layers": (nn.Linear(2) >> nn.ReLU(), lambda net: cv.build_graph(net, (3,), "mse", "adam").paths["learn"].name),
        **{f"error {e.__name__}": (error(e), str) for e in errors()},
        **{name: (value, repr) for name, value in settings().items()},
    }  # fmt: skip


def carrying_model():
    """A model that keeps a state."""
    g = cv.CalcGraph()
    x, total = g.placeholder("x", (None, 1)), g.carry("total", (None, 1))
    with g.path("predict") as predict:
        predict.output = cv.carry(total, total + x)
    program = cv.compile(g, batch_size=2)
    return cv.CalcHeap(program.heap_bytes).create(program)


class Own(cv.Model):
    """A user's class whose step is no compiled one."""

    def __init__(self, other):
        vars(self).update(vars(other))

    def step(self, *data):
        return super().step(*data)


def errors():
    return [c for c in map(cv.__dict__.get, cv.__all__) if inspect.isclass(c) and issubclass(c, Exception)]


def error(kind):
    if kind is cv.MissingExtra:
        return kind("scipy", "blas", "a test")
    return kind("what") if issubclass(kind, cv.CalcWarning) else kind("what to do")


def settings():
    """Optimizers, schedules, regularizers."""
    plain = {name: getattr(cv, name) for name in optim.__all__ if inspect.isclass(getattr(cv, name))}
    given = {"L1": (0.1,), "L2": (0.1,), "Elastic": (0.1, 0.1), "SGD": (0.1,), "Step": (3,), "Cosine": (10,), "Exponential": (0.9,),
             "CosineRestarts": (5,), "Sampled": (lambda k: 1.0, 5)}  # fmt: skip
    return {name: kind(*given.get(name, ())) for name, kind in plain.items() if name not in ("Optimizer",)}


WAYS = {
    **{f"pickle {n}": lambda o, n=n: pickle.loads(pickle.dumps(o, n)) for n in range(pickle.HIGHEST_PROTOCOL + 1)},
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}
# what is in one place
REFUSED = {
    "Fleet",
    "Handle",
    "Results",
    "CalcHeap",
    "Hyper",
    "SplitModel",
    "Stream",
    "MemoryStore",
    "FileStore",
    "Exploration",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    found = samples(tmp_path_factory.mktemp("samples"))
    yield found
    found["FileStore"][0].close()


def test_every_public_class_is_among_the_samples(made):
    classes = {name for name in cv.__all__ if inspect.isclass(getattr(cv, name))}
    known = {*made, *(name.removeprefix("error ") for name in made), "Optimizer", "KerasModel"}  # tests/frontends
    assert classes <= known


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_works_or_says_what_to_do(made, way, whole):
    if way[-1] in "1234" and not whole:
        pytest.skip("takes --whole")
    wrong = []
    for name, (thing, use) in made.items():
        try:
            copied = WAYS[way](thing)
        except cv.CalcError as refusal:
            if (
                name not in REFUSED | {"Plan", "SplitPlan"}
                or "copied" not in str(refusal)
                and "pickled" not in str(refusal)
            ):
                wrong.append((name, str(refusal)))
            continue
        except Exception as failure:
            wrong.append((name, repr(failure)))
            continue
        if name in REFUSED:
            wrong.append((name, "made a copy of what is in one place"))
            continue
        try:
            if use(copied) != use(thing) and "bound" not in name:  # which steps on the model itself, or on a copy
                wrong.append((name, "other numbers"))
        except Exception as failure:
            wrong.append((name, f"its copy: {failure!r}"))
    assert not wrong


@pytest.mark.parametrize("name", [n for n in cv.__all__ if inspect.isroutine(getattr(cv, n))])
def test_functions_are_pickled_by_their_names(name):
    assert pickle.loads(pickle.dumps(getattr(cv, name))) is getattr(cv, name)


def use_in_child(things, answers):
    """In a process that was started anew."""
    answers.put({name: use_of(name)(thing) for name, thing in things.items()})


def use_of(name):
    step = lambda m: float(m.step(x, y))  # noqa: E731
    return {"Model": step, "a bound step": lambda bound: float(bound()), "Ensemble": lambda e: float(e.predict(x).sum()),
            "a model of a fleet": step, "Program": lambda p: p.hash}[name]  # fmt: skip


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_arguments_of_a_process_that_is_started_anew(made, method, whole):
    if method == "forkserver" and not whole:
        pytest.skip("takes --whole")
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    names = ("Model", "a bound step", "Ensemble", "a model of a fleet", "Program")
    things = {name: pickle.loads(pickle.dumps(made[name][0])) for name in names}
    child = context.Process(target=use_in_child, args=(things, answers))
    child.start()
    answer = answers.get(timeout=120)
    child.join()
    assert child.exitcode == 0
    assert answer == {name: use_of(name)(thing) for name, thing in things.items()}
    for name in REFUSED:
        with pytest.raises(cv.CalcError, match="neither copied nor pickled"):
            context.Process(target=print, args=(made[name][0],)).start()


def test_a_forked_child_goes_on_with_the_same_numbers_or_says_what_to_do(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_copies", str(tmp_path)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    child, parent = map(json.loads, done.stdout.splitlines())
    assert "closed here (a fork closes it in the child)" in child.pop("FileStore")
    assert parent.pop("FileStore") == 0 and len(parent) > 50
    assert child == parent


def used(things):
    found = {}
    for name, (thing, use) in things.items():
        try:
            found[name] = use(thing)
        except cv.CalcError as refusal:
            found[name] = str(refusal)
    return found


if __name__ == "__main__":
    things = samples(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    if not (pid := os.fork()):
        print(json.dumps(used(things)), flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    print(json.dumps(used(things)))

"""Every public callable with a value of a wrong type or size in the place of each parameter: it works, or says why not.

What a user may see of a mistake is a `CalcError`, or Python's own TypeError about the names and the number of arguments.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import re
import tempfile
import time
import warnings
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import calcvm as cv
from calcvm import nn
from calcvm.functions import __all__ as OF_FUNCTIONS
from calcvm.gathers import __all__ as OF_GATHERS
from calcvm.images import __all__ as IMAGES
from calcvm.sequences import __all__ as OF_SEQUENCES
from tests.frontends.files import parsed

FUNCTIONS = [*OF_FUNCTIONS, *OF_GATHERS, *OF_SEQUENCES]
X = np.random.default_rng(0).standard_normal((24, 4)).astype("float32")
Y = np.arange(24) % 3
WRONG = [
    None, True, -1, 0, 3, 10**30, -(10**400), 1.5, -0.0, float("nan"), float("inf"), 1e308, 1j, "x", "", b"x", [], [1, 2], ["x"],
    [None], (), (0,), (None, None), ({},), {}, {"x": 1}, {1: 2}, set(), object(), lambda *a: None, int, cv.Adam, np.int64(3),
    np.float32(0.5), np.bool_(True), np.zeros(0), np.zeros((2, 2)), np.array("x"), np.array([None]), range(3), iter([1]), slice(1),
    Ellipsis, NotImplemented,
]  # fmt: skip
SECONDS = 60.0  # that a call may take, with the compiling of kernels at first use
ARGUMENTS = re.compile(r"unexpected keyword|positional argument|required|multiple values|takes (no|\d+)")


def graph(optimizer=None, restarts=False):
    optimizer = optimizer or (cv.SGD(0.1, schedule=cv.CosineRestarts(2)) if restarts else cv.Adam())
    return cv.build_graph(nn.Linear(3), (4,), "softmax_cross_entropy", optimizer)


@cache
def programs():
    return SimpleNamespace(
        plain=cv.compile(graph(), batch_size=8, workers=1),
        restarts=cv.compile(graph(restarts=True), batch_size=8, workers=1),
    )


def scene():
    """What the calls are made on: everything anew, so that none sees what another did."""
    s = SimpleNamespace(g=cv.CalcGraph())
    s.x, s.t = s.g.placeholder("x", (None, 4)), s.g.placeholder("t", (None,))
    s.i = s.g.placeholder("i", (None,), "int64")
    s.W, s.b = s.g.parameter("W", (4, 4)), s.g.parameter("b", (4,))
    s.path = s.g.path("learn", backward=True).__enter__()
    return s


def model(program=None):
    made = cv.CalcHeap("1 MiB").create(program or programs().plain)
    made.step(X[:8], Y[:8])
    return made


def fleet(**options):
    return cv.Fleet("1 MiB", workers=1)


def found(trial):
    return graph(cv.SGD(trial["rate"]))


OPERANDS = {
    "x": "x", "a": "x", "b": "W", "weight": "W", "bias": "b", "logits": "x", "target": "x", "scores": "x", "slope": "b", "index": "i", "indexes": "i", "updates": "x",
}  # of functions, by their parameters: variables of the scene  # fmt: skip
OTHERS = {
    "exponent": 2.0,
    "shape": (None, 2, 2),
    "starts": (None, 0),
    "stops": (None, 2),
    "axis": -1,
    "sections": 2,
    "k": 2,
    "num_classes": 4,
}


def leaky(z, h):
    return 0.9 * h + 0.1 * cv.tanh(z[0])


def function(name):
    """A function of variables with right arguments, in a scene of its own."""
    fn = getattr(cv, name)

    def call(**wrong):
        s = scene()
        right = {p: getattr(s, OPERANDS[p]) for p in inspect.signature(fn).parameters if p in OPERANDS}
        right |= {p: OTHERS[p] for p in inspect.signature(fn).parameters if p in OTHERS}
        right |= {"variables": [s.x, s.x]} if name in ("concat", "stack") else {}
        right |= {"axis": None} if name == "squeeze" else {}
        right |= {"b": s.x} if name in ("add", "sub", "mul", "div") else {}
        if name in OF_SEQUENCES:
            width = {"rnn": 3, "gru": 9, "lstm": 12, "recurrent": 3}[name]
            right |= {"cell": cv.cell(1)(leaky)} if name == "recurrent" else {}
            right |= {"x": s.g.placeholder("s", (None, 5, 4))}
            right |= {w: s.g.parameter(w, (n, width)) for w, n in (("weight_ih", 4), ("weight_hh", 3))}
        return fn(**{**right, **wrong})

    return call, [*inspect.signature(fn).parameters]


OF_IMAGES = {
    "kernel": 2, "p": 1.0, "size": 3, "groups": 2, "padding": 0, "channels": 4, "running_mean": None,
    "running_var": None, "most": 1, "mean": 0.5, "std": 2.0,
}  # fmt: skip


def image(name):
    """A function of images with right arguments, in a scene of its own."""
    fn, axes = getattr(cv, name), int(name[-2]) if name[-2].isdigit() else 2

    def call(**wrong):
        s = scene()
        right = {p: OF_IMAGES[p] for p in inspect.signature(fn).parameters if p in OF_IMAGES}
        right |= {p: s.g.buffer(p, (2,)) for p in right if p.startswith("running")}
        if name.startswith("conv"):
            right["weight"] = s.g.parameter("weight", (2, 2, *(3,) * axes))
        return fn(**{"x": s.g.placeholder("image", (None, 2, *(6,) * axes)), **right, **wrong})

    return call, [*inspect.signature(fn).parameters]


def layer(kind):
    """A layer made of right settings but some, and built."""

    def call(**wrong):
        s, axes = scene(), int(kind.__name__[-2]) if kind.__name__[-2].isdigit() else 2
        right = {p: OF_IMAGES[p] for p in _parameters(kind) if p in OF_IMAGES}
        x = s.g.placeholder("image", (None, 2, *(6,) * axes))
        return kind(**{**right, **wrong}).build(x, "layer", True)

    return call, _parameters(kind)


SEQUENCES = {
    **dict.fromkeys((nn.RNN, nn.GRU, nn.LSTM), {"hidden_size": 3}), nn.Recurrent: {"cell": cv.cell(1)(leaky), "hidden_size": 3}, nn.MultiHeadAttention: {"num_heads": 2}, nn.PositionalEmbedding: {"max_length": 5}, nn.MeanOverSteps: {},
    **dict.fromkeys((nn.TransformerEncoderLayer, nn.TransformerDecoderLayer), {"nhead": 2}),
}  # fmt: skip


def of_sequences(kind):
    """A layer of sequences, built; one that reads a memory reads the sequence itself."""

    def call(**wrong):
        x = scene().g.placeholder("s", (None, 5, 4))
        more = (x,) if kind is nn.TransformerDecoderLayer else ()
        return kind(**{**SEQUENCES[kind], **wrong}).build(x, "layer", True, *more)

    return call, _parameters(kind)


def looking(name):
    """A picture of what a network looks at, in a scene of its own."""
    fn = getattr(cv, name)

    def call(**wrong):
        s = scene()
        x = s.g.placeholder("image", (None, 2, 6, 6))
        right = dict(
            zip(_parameters(fn), (cv.flatten(cv.max_pool(x, 2)), s.g.placeholder("classes", (None,), "int64"), x))
        )
        return fn(**{**right, **wrong})

    return call, _parameters(fn)


LAYERS = [
    k for k in vars(nn).values()
    if isinstance(k, type) and issubclass(k, nn.Layer)
    and k.__module__ in ("calcvm.nn.augment", "calcvm.nn.images", "calcvm.nn.norms")
]  # fmt: skip


def plain(fn, skip=(), /, **right):
    """A callable whose right arguments do not change."""
    return lambda **wrong: fn(**{**right, **wrong}), [p for p in _parameters(fn) if p not in skip]


def method(kind, make, name, /, **right):
    """A method of an object that is made anew for each call."""
    return lambda **wrong: getattr(make(), name)(**{**right, **wrong}), _parameters(getattr(kind, name))[1:]


def item(make, key="x", value=None):
    """``object[key]`` and ``object[key] = value``."""

    def call(key=key, **wrong):
        if value is None:
            return make()[key]
        make()[key] = wrong.get("value", value)

    return call, ["key"] if value is None else ["key", "value"]


def _parameters(fn):
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [p for p, of in inspect.signature(fn).parameters.items() if of.kind not in kinds]


DATA = dict(X=X, y=Y)
QUIET = dict(progress=False)
OPTIMIZERS = (cv.SGD, cv.Adam, cv.AdamHat, cv.AdamW, cv.RMSProp, cv.Adagrad, cv.Lion)
SCHEDULES = {cv.Step: {"step_size": 3}, cv.Exponential: {"gamma": 0.5}, cv.Cosine: {"total_steps": 3},
             cv.CosineRestarts: {"period": 3}, cv.Constant: {}}  # fmt: skip
ACTIVATIONS = [
    k for k in vars(nn).values() if isinstance(k, type) and issubclass(k, nn.Activation) and k is not nn.Activation
]


def targets():
    """Name: (call with some arguments wrong, the parameters)."""
    out = {f"cv.{name}": function(name) for name in FUNCTIONS}
    out |= {f"cv.{k.__name__}": plain(k, learning_rate=0.1) for k in OPTIMIZERS}
    out |= {f"cv.{k.__name__}": plain(k, **right) for k, right in SCHEDULES.items()}
    out |= {f"cv.{k.__name__}": plain(k, l=0.1) for k in (cv.L1, cv.L2)}
    out |= {"cv.Elastic": plain(cv.Elastic, l1=0.1, l2=0.1)}
    out |= {f"init.{k.__name__}": plain(k, **({"value": 1.0} if k is cv.init.Constant else {})) for k in cv.init.KINDS}
    out |= {f"nn.{k.__name__}": plain(k) for k in ACTIVATIONS}
    out |= {f"cv.{name}": image(name) for name in IMAGES} | {f"nn.{k.__name__}": layer(k) for k in LAYERS}

    def network(**wrong):
        return cv.build_graph(nn.Linear(**{"units": 3, **wrong}), (4,), "mse", "adam")

    def dropout(layer, **wrong):
        return cv.build_graph(layer(**wrong) >> nn.Linear(3), (4,), "mse", "adam")

    def team(n=1):
        try:
            cv.set_workers(n)
            cv.Fleet("1 MiB")
        finally:
            cv.set_workers(None)

    out |= {
        "cv.set_workers": (team, ["n"]),
        "cv.pad_sequences": (
            lambda **wrong: cv.pad_sequences(**{"sequences": [[1.0], [2.0, 3.0]], "steps": 3, **wrong}), ["sequences", "steps"],
        ),
        **{f"nn.{kind.__name__}": of_sequences(kind) for kind in SEQUENCES},
        "nn.Linear": (network, _parameters(nn.Linear)),
        "nn.Dropout": (partial(dropout, nn.Dropout), _parameters(nn.Dropout)),
        "nn.Dropout2d": (partial(dropout, nn.Dropout2d), _parameters(nn.Dropout2d)),
        "nn.Embedding": (
            lambda **wrong: nn.Embedding(**{"num_embeddings": 9, "embedding_dim": 3, **wrong}).build(scene().x), _parameters(nn.Embedding),
        ),
        "nn.TiedLinear": (
            lambda **wrong: nn.Sequential(
                e := nn.Embedding(9, 3), nn.TiedLinear(**{"embedding": e, **wrong})
            ).build(scene().x), _parameters(nn.TiedLinear),
        ),
        "nn.Center": (lambda momentum: nn.Center(momentum), ["momentum"]),
        "nn.Standardize": plain(nn.Standardize, mean=1.0, std=2.0, axis=1),
        "nn.PReLU": plain(nn.PReLU),
        "nn.Residual": (lambda branch, shortcut=None: nn.Residual(branch, shortcut), ["branch", "shortcut"]),
        "nn.Concat": (lambda branch: nn.Concat(branch), ["branch"]),
        "nn.Reshape": (lambda size: nn.Reshape(size), ["size"]),
        "nn.Sequential": (lambda layer: nn.Sequential(layer), ["layer"]),
        "nn.Function": (lambda fn: nn.Function(fn), ["fn"]),
        "layer >>": (lambda other: nn.ReLU() >> other, ["other"]),
        "cv.gradient": (
            lambda **wrong: (s := scene()) and cv.gradient(**{"y": cv.sum(s.x @ s.W), "x": s.x, **wrong}), ["y", "x"],
        ),
        **{f"cv.{name}": looking(name) for name in ("saliency", "grad_cam")},
        "cv.equation": (equation, _parameters(equation)),
        "equation[]": (lambda index: cv.equation[index](scene().x[cv.indexes("b"), 0]), ["index"]),
        "equation[]()": (lambda value: cv.equation[cv.indexes("b")](value), ["value"]),
        "equation.reduce": (reduced, _parameters(reduced)),
        "cv.einsum": (einsum, _parameters(einsum)),
        "cv.cell": (lambda gates=1, apart=0: cv.cell(gates, apart=apart), ["gates", "apart"]),
        "cv.cell()": (lambda function: cv.cell(1)(function), ["function"]),
        "cv.indexes": (lambda names: cv.indexes(names), ["names"]),
        "Variable[index]": (lambda place: scene().x[cv.indexes("b"), place], ["place"]),
        "sum(index)": (lambda index: cv.sum(index, scene().x[cv.indexes("b"), 0]), ["index"]),
        "element +": (lambda other: scene().x[cv.indexes("b"), 0] + other, ["other"]),
        "element **": (lambda other: scene().x[cv.indexes("b"), 0] ** other, ["other"]),
        "cv.apply": (lambda name="relu", x=None: cv.apply(name, scene().x if x is None else x), ["name", "x"]),
        "cv.register_op": (lambda spec: cv.register_op(spec), ["spec"]),
        "CalcGraph.placeholder": method(cv.CalcGraph, cv.CalcGraph, "placeholder", name="x", shape=(None, 4)),
        "CalcGraph.parameter": method(cv.CalcGraph, cv.CalcGraph, "parameter", name="x", shape=(2, 4)),
        "CalcGraph.buffer": method(cv.CalcGraph, cv.CalcGraph, "buffer", name="x", shape=(2, 4)),
        "CalcGraph.constant": method(cv.CalcGraph, cv.CalcGraph, "constant", name="x", value=1.0),
        "CalcGraph.path": method(cv.CalcGraph, cv.CalcGraph, "path", name="x"),
        "CalcGraph.extend": (lambda name: scene().g.extend(name).__enter__(), ["name"]),
        "Variable.rename": (lambda name: scene().x.rename(name), ["name"]),
        "cv.build_graph": plain(
            cv.build_graph, net=nn.Linear(3), input_shape=(4,), loss="softmax_cross_entropy", optimizer="adam"
        ),
        "cv.plan": (lambda **wrong: cv.plan(**{"graph": graph(), "batch_size": 8, **wrong}), _parameters(cv.plan)),
        "Plan.describe": method(cv.Plan, lambda: cv.plan(graph(), batch_size=8), "describe"),
        "Program.disassemble": method(cv.Program, lambda: programs().plain, "disassemble"),
        "cv.compile": (
            lambda **wrong: cv.compile(**{"graph": graph(), "batch_size": 8, "workers": 1, **wrong}), ["graph", "plan"],
        ),
        "cv.Model": plain(
            cv.Model, net=nn.Linear(3), input_shape=(4,), optimizer="adam", batch_size=8, workers=1
        ),
        "Model.fit": method(cv.Model, model, "fit", **DATA, **QUIET),
        "Model.evaluate": method(cv.Model, model, "evaluate", **DATA),
        "Model.predict": method(cv.Model, model, "predict", X=X),
        "Model.step": method(cv.Model, model, "step", x=X[:8], y=Y[:8]),
        **{f"Model.{n}": method(cv.Model, model, n, X=X) for n in ("predict_classes", "predict_proba")},
        "Model.bind": (lambda **wrong: model().bind(**{"x": X[:8], "y": Y[:8], **wrong})(), ["x", "y"]),
        "Model.run_steps": method(cv.Model, model, "run_steps", n=1),
        "Model.run": method(cv.Model, model, "run"),
        "Model.grad": method(cv.Model, model, "grad", name="linear_1.weight"),
        "Model[]": item(model, "output"),
        "Model[] =": item(model, "input", X[:8]),
        "Model.learning_batch": (lambda n: setattr(model(), "learning_batch", n), ["n"]),
        "Model.hyper[]": item(lambda: model().hyper, "learning_rate"),
        "Model.hyper[] =": item(lambda: model().hyper, "learning_rate", 0.1),
        "History[]": item(lambda: model().fit(X, Y, **QUIET), "loss"),
        "Model.reset": method(cv.Model, model, "reset"),
        "Model.copy": method(cv.Model, model, "copy"),
        "Model.hyper()": (lambda path: model().hyper(path), ["path"]),
        "Model.run_section": method(cv.Model, model, "run_section", path="learn", phase="forward"),
        **{f"Model.{n}": method(cv.Model, model, n, path="learn") for n in ("forward", "backward", "optimize", "end_round")},
        "cv.CalcHeap": plain(cv.CalcHeap, memory="1 MiB"),
        "CalcHeap.create": (
            lambda **wrong: cv.CalcHeap("1 MiB").create(**{"program": programs().plain, **wrong}),
            _parameters(cv.CalcHeap.create)[1:],
        ),
        "CalcHeap.open": method(cv.CalcHeap, partial(cv.CalcHeap, "1 MiB"), "open", name="x"),
        "CalcHeap[]": item(partial(cv.CalcHeap, "1 MiB")),
        "in CalcHeap": (lambda name: name in cv.CalcHeap("1 MiB"), ["name"]),
        "cv.Fleet": plain(cv.Fleet, memory="1 MiB"),
        "Fleet.add": (
            lambda **wrong: fleet().add(**{"net": programs().plain, "data": (X, Y), "validation": (X, Y), **wrong}),
            _parameters(cv.Fleet.add)[1:],
        ),
        **{f"FileStore.{n}": (partial(stored, n), ["name"]) for n in ("remove", "restore")},
        "cv.Processor": plain(cv.Processor, name="a"),
        "cv.plan_devices": (
            lambda **wrong: cv.plan_devices(**{"graph": graph(), "processors": [cv.Processor("a")], "batch_size": 8, **wrong}),
            _parameters(cv.plan_devices),
        ),
        "cv.SplitModel": plain(cv.SplitModel, plan=split()),
        "SplitModel.step": (lambda x=X[:8], y=Y[:8], path=None: cv.SplitModel(split()).step(x, y, path=path), ["x", "y", "path"]),
        "SplitModel.run": (lambda path="predict", x=X[:8]: cv.SplitModel(split()).run(path, x), ["path", "x"]),
        "SplitModel[]": item(lambda: cv.SplitModel(split()), "linear_1.weight"),
        "Fleet.fit": method(cv.Fleet, trained, "fit", **QUIET),
        "Fleet.advance": method(cv.Fleet, trained, "advance"),
        "Fleet.predict": method(cv.Fleet, trained, "predict", name="model-0", X=X),
        "Fleet.step": method(cv.Fleet, trained, "step", name="model-0", x=X[:8], y=Y[:8]),
        "cv.Ensemble": (lambda **wrong: cv.Ensemble(**{"models": [model()], **wrong}), _parameters(cv.Ensemble)),
        "Ensemble.predict": method(cv.Ensemble, lambda: cv.Ensemble([model()]), "predict"),
        **{
            f"Ensemble.{n}": method(cv.Ensemble, lambda: cv.Ensemble([model()]), n, X=X)
            for n in ("predict_classes", "predict_proba")
        },
        "Ensemble.evaluate": method(cv.Ensemble, lambda: cv.Ensemble([model()]), "evaluate", **DATA),
        "cv.snapshot_ensemble": (
            lambda **wrong: cv.snapshot_ensemble(
                **{"model": model(programs().restarts), **DATA, "cycles": 1, "epochs_per_cycle": 1, **QUIET, **wrong}
            ),
            _parameters(cv.snapshot_ensemble),
        ),
        **{
            f"variable {sign}": (lambda other, do=do: do(scene().x, other), ["other"])
            for sign, do in {
                "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "@": operator.matmul,
                "**": operator.pow, "[]": operator.getitem,
            }.items()
        },
        **{
            f"{sign} variable": (lambda other, do=do: do(other, scene().x), ["other"])
            for sign, do in {
                "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "@": operator.matmul,
            }.items()
        },
        "cv.from_keras": plain(cv.from_keras, model=None),  # right ones: tests/frontends
        "cv.from_sklearn": plain(cv.from_sklearn, estimator=None),
        "cv.from_torch": (lambda **wrong: cv.from_torch(*{"module": torch.nn.Linear(3, 2), "example": X, **wrong}.values()), ["module", "example"]),
        "cv.load_onnx": plain(cv.load_onnx, source=parsed("net (float[N, 4] x) => (float[N, 4] y) {y = Tanh(x)}"), sizes={}, values={}, batch_axes=[0], trainable=True),
        "cv.quantize": plain(cv.quantize, model=model(), data=X),
        "Model.to_onnx": method(cv.Model, model, "to_onnx"),
        "Model.to_python": method(cv.Model, model, "to_python"),
        "Path.gradient_of": (lambda parameter: graph().paths["learn"].gradient_of(parameter), ["parameter"]),
        "cv.read_graph": (cv.read_graph, ["text"]),
        "Equations.evaluate": (lambda values: graph().paths["learn"].gradient_of("linear_1.bias").evaluate(values), ["values"]),
        "Path.minimize": (minimize, ["loss", "optimizer", "output", "parameters", "rates"]),
        "Results.column": method(cv.Results, lambda: trained().fit(**QUIET), "column"),
        "Results.best": method(cv.Results, lambda: trained().fit(**QUIET), "best"),
        "Exploration.column": method(cv.Exploration, searched, "column"),
        "Exploration.top": method(cv.Exploration, searched, "top"),
        "Exploration.ensemble": method(cv.Exploration, searched, "ensemble", k=1),
        "Trial[]": item(lambda: searched().trials[0], "rate"),
        "cv.RayEngine": plain(cv.RayEngine),
        "cv.EarlyStopping": plain(cv.EarlyStopping),
        "cv.ReduceOnPlateau": plain(cv.ReduceOnPlateau),
        "cv.Sampled": plain(cv.Sampled, function=lambda k: 1.0, total_steps=5),
        "Model.adapt": method(cv.Model, lambda: model(), "adapt"),
        "Model.load_state_dict": method(cv.Model, lambda: model(), "load_state_dict"),
        "Model.state_dict": method(cv.Model, lambda: model(), "state_dict"),
        "Model.set_weights": method(cv.Model, lambda: model(), "set_weights"),
        "CalcGraph.parameters": method(cv.CalcGraph, lambda: scene().g, "parameters"),
        "cv.explore": plain(
            cv.explore, ("engine",), build=found, space={"rate": (0.01, 0.1)}, data=(X, Y), n_trials=1, epochs=1, sampler="random",
            **QUIET,
        ),
    }  # fmt: skip
    return out


def equation(text="y[b,o] = sum[i] x[b,i]*W[i,o]*k", results=None, k=1.0):
    s = scene()
    return cv.equation(text, results=results, x=s.x, W=s.W, k=k)


def einsum(subscripts="bi,io->bo", operand=None):
    s = scene()
    return cv.einsum(subscripts, s.x, s.W if operand is None else operand)


def reduced(how="max", index=None, value=None):
    index = cv.indexes("i") if index is None else index
    return cv.equation.reduce(how, index, scene().x[0, cv.indexes("i")] if value is None else value)


def minimize(**wrong):
    s = scene()
    s.path.minimize(**{"loss": cv.mean(s.x @ s.W), "optimizer": "adam", **wrong})


def stored(method, name):
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.closing(cv.FileStore(folder)) as store:
            getattr(store, method)(name)


@cache
def split():
    return cv.plan_devices(graph(), [cv.Processor("a")], batch_size=8)


@cache
def searched():
    return cv.explore(found, {"rate": (0.01, 0.1)}, data=(X, Y), n_trials=1, epochs=1, sampler="random", **QUIET)


def trained():
    many = fleet()
    many.add(programs().plain, data=(X, Y))
    return many


# public, and not called with values of a user: types of what is returned, bases, and data of the operator table
NOT_CALLED = {
    "Callback", "CalcError", "CalcWarning", "CalcGraph", "Exploration", "Handle", "History", "MemoryStore", "MissingExtra", "Pack",
    "FileError", "NoSuchFile", "Optimizer", "Path", "Plan", "PlanError", "Program", "ProgramError", "Results", "ShapeError", "SplitPlan",
    "KerasModel", "OnnxModel", "Stream", "TorchModule", "Trap", "Trial", "UnsupportedOperator", "Variable", "init", "nn", "zoo",
}  # fmt: skip
FILES = {"FileStore", "load", "load_program"}  # what a name of a file may be is the system's to say


def test_every_public_callable_is_here():
    called = {name.removeprefix("cv.").removesuffix("()") for name in targets() if name.startswith("cv.")}
    assert called | NOT_CALLED | FILES == {*cv.__all__, *FUNCTIONS, "compile"}
    layers = {k.__name__ for k in vars(nn).values() if isinstance(k, type) and issubclass(k, nn.Layer)}
    assert {f"nn.{k}" for k in layers - {"Layer", "Activation"}} <= {*targets()}


@pytest.mark.parametrize("name", targets())
def test_a_wrong_value_is_refused_in_words_or_works(name, whole):
    """Each value for each parameter; unless --whole every third pair."""
    every = targets()
    (call, parameters), turn, bad = every[name], [*every].index(name), []
    for k, parameter in enumerate(parameters):
        for value in WRONG if whole else WRONG[(turn + k) % 3 :: 3]:
            start = time.perf_counter()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    call(**{parameter: value})
            except cv.CalcError as error:
                assert str(error) and len(str(error)) < 2000, error
            except TypeError as error:
                if not ARGUMENTS.search(str(error)):
                    bad.append((parameter, value, error))
            except Exception as error:
                bad.append((parameter, value, error))
            seconds = time.perf_counter() - start
            if seconds > SECONDS:
                bad.append((parameter, value, f"{seconds:.1f} s"))
    text = "\n".join(f"{name}({p}={str(v)[:40]!r}): {type(e).__name__}: {str(e)[:150]}" for p, v, e in bad)
    assert not bad, f"{len(bad)} raw errors\n{text}"

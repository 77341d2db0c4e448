"""What a user writes by mistake, and the sentence that is the answer; numbers of NumPy, strings and repr."""

from __future__ import annotations

import builtins
import copy
import pickle
import re
from dataclasses import replace
from datetime import date
from decimal import Decimal
from functools import cache, partial
from io import BytesIO
from types import SimpleNamespace

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.ops import OPS, ROWS
from calcvm.ops.optimizers import COMPUTED, HYPER_SLOTS, SLOTS, slots_of
from calcvm.ops.spec import OWN, dims
from calcvm.vm.calls.methods import WORTH

X = np.random.default_rng(0).standard_normal((40, 4)).astype("float32")
Y = np.arange(40) % 3


def model(net=None, **options):
    defaults = dict(input_shape=(4,), optimizer=cv.SGD(0.1), batch_size=8, workers=1)
    return cv.Model(net or nn.Linear(3), **{**defaults, **options})


def graph(**options):
    return cv.build_graph(nn.Linear(3), (4,), "softmax_cross_entropy", **{"optimizer": cv.SGD(0.1), **options})


@cache
def shared():
    """Models that mistakes leave as they were."""
    program = cv.compile(graph(), batch_size=8, workers=1)
    return SimpleNamespace(
        model=model(), program=program, heap=cv.CalcHeap("1 MiB"), fleet=cv.Fleet("1 MiB", workers=1)
    )


class scene:
    """A graph with variables x (B, 4), W (4, 4) and b (4,), and a path that trains, open."""

    def __init__(self):
        self.g = g = cv.CalcGraph()
        self.x, self.W, self.b = g.placeholder("x", (None, 4)), g.parameter("W", (4, 4)), g.parameter("b", (4,))
        self.path = g.path("learn", backward=True).__enter__()

    def loss(self):
        return cv.mean(cv.square(self.x @ self.W))


def own_graph(**compiled):
    """The program of a graph of one's own, with no path called predict."""
    s = scene()
    s.path.minimize(s.loss(), cv.SGD(0.1))
    return cv.compile(s.g, batch_size=8, workers=1)


def built(layer, shape=(4, 6, 6), **settings):
    """A layer whose settings were set after it was made."""
    for name, value in settings.items():
        setattr(layer, name, value)
    g = cv.CalcGraph()
    with g.path("learn", backward=True):
        return layer.build(g.placeholder("x", (None, *shape)), "layer", True)


class Momentum(cv.optim.Optimizer):
    pass


class Heavy(cv.optim.Optimizer):
    row = "momentum"


class Nothing(nn.Layer):
    def build(self, x, scope, training):
        return None


def row_spec(**changes):
    return replace(OPS["relu"].fwd[0], name="nok_fwd", **changes)


def operator(**changes):
    return replace(OPS["relu"], **{"name": "nok", "fwd": (), "bwd": (), "differentiable": (), **changes})


def fit(*args, **kwargs):
    return shared().model.fit(*(args or (X, Y)), progress=False, **kwargs)


def explore(**changes):
    defaults = dict(data=(X, Y), validation=0.2, n_trials=1, epochs=1, progress=False)
    space = changes.pop("space", {"rate": (0.01, 0.1)})
    build = changes.pop("build", lambda trial: graph(optimizer=cv.SGD(trial["rate"])))
    return cv.explore(build, space, **{**defaults, **changes})


def add(program=None, **options):
    return shared().fleet.add(program or shared().program, **{"data": (X, Y), **options})


def binary(y):
    net = model(nn.Linear(1), loss="binary_cross_entropy")
    return net.fit(X, y.reshape(-1, 1), progress=False)


C, S, P, U = cv.CalcError, cv.ShapeError, cv.PlanError, cv.UnsupportedOperator
MISTAKES = [
    # ---- layers, where they are written
    ("Linear bias text", lambda: nn.Linear(4, bias="no"), C, "bias must be True or False, not 'no'"),
    ("Linear 0 units", lambda: nn.Linear(0), C, "units must be an integer from 1 to"),
    ("Linear 1.5 units", lambda: nn.Linear(1.5), C, "units must be an integer .* not 1.5"),
    ("Linear True units", lambda: nn.Linear(True), C, "units must be an integer .* not True"),
    ("Linear without end", lambda: nn.Linear(10**4000), C, "not an integer of 13288 bits"),
    ("Linear trainable", lambda: nn.Linear(3, trainable="yes"), C, "trainable must be True or False"),
    ("Linear regularizer", lambda: nn.Linear(3, regularizer=0.01), C, r"one such as cv.L2\(0.01\), not 0.01"),
    ("Linear init class of ours that needs a value", lambda: nn.Linear(3, init=cv.init.Constant), C, "needs its value"),
    ("Linear init unknown name", lambda: nn.Linear(3, init="he"), C, "initializer 'he' is unknown; .* he_normal"),
    ("init that gives a wrong shape", lambda: model(nn.Linear(3, init=lambda s, r: r.random(5))), C, "of shape .* is wanted"),
    ("init that is a class", lambda: nn.Linear(3, init=object), C, "a function of .shape, rng., or an array is wanted"),
    ("Linear init list of another shape", lambda: model(nn.Linear(3, init=[[1.0, 2]])), S, r"\(1, 2\) is not of its"),
    ("Linear init ragged", lambda: model(nn.Linear(3, init=[[1.0], [1, 2]])), C, "differ in length"),
    ("Linear init text array", lambda: model(nn.Linear(3, init=[["a"] * 3] * 4)), C, "an array of <U1"),
    ("Orthogonal of a vector", lambda: nn.Linear(3, bias_init=cv.init.Orthogonal()) and model(
        nn.Linear(3, bias_init="orthogonal")), C, "fewer than 2 axes"),
    ("LeakyReLU text", lambda: nn.LeakyReLU("x"), C, "alpha must be a finite number, not 'x'"),
    ("ELU nan", lambda: nn.ELU(float("nan")), C, "alpha must be a finite number, not nan"),
    ("GELU", lambda: nn.GELU("erf"), C, "approximate 'erf' is unknown; take one of none, tanh"),
    ("Softmax axis", lambda: nn.Softmax(0.5), C, "axis must be an integer"),
    ("Scale", lambda: nn.Scale("1"), C, "Scale: a must be a finite number"),
    ("Dropout 1", lambda: nn.Dropout(1), C, r"rate must be a number in \[0, 1\), not 1"),
    ("Dropout text", lambda: nn.Dropout("half"), C, "rate must be a number"),
    ("Reshape 1.5", lambda: nn.Reshape(1.5), S, "1.5 is no size"),
    ("Function of a layer", lambda: nn.Function(nn.ReLU()), C, "a function of one variable"),
    ("Function that returns nothing", lambda: model(nn.Function(lambda x: None)), C, "must return a variable"),
    ("layer that builds nothing", lambda: model(Nothing() >> nn.Linear(3)), C, "build of .* must return a variable"),
    ("layer >> 3", lambda: nn.ReLU() >> 3, C, "a layer of calcvm.nn, .* not 3"),
    ("3 >> layer", lambda: 3 >> nn.ReLU(), C, "a layer of calcvm.nn, .* not 3"),
    ("layer >> class", lambda: nn.Linear(3) >> nn.ReLU, C, r"not the class ReLU \(write ReLU\(...\)\)"),
    ("the same layer twice", lambda: (lambda l: l >> nn.ReLU() >> l)(nn.Linear(4)), C, "twice, .* make another Linear"),
    # ---- optimizers, schedules, initializers
    ("unknown optimizer", lambda: model(optimizer="adma"), C, r"optimizer 'adma' is unknown \(did you mean 'adam'\?\); take one of 'sgd', 'adam'"),
    ("sgd by name", lambda: model(optimizer="sgd"), C, r"SGD has no default learning rate: .*cv.SGD\(0.1\)"),
    ("class SGD", lambda: model(optimizer=cv.SGD), C, "SGD has no default learning rate"),
    ("no optimizer", lambda: model(optimizer=None), C, r"optimizer is missing; give optimizer=cv.Adam\(1e-3\)"),
    ("base optimizer", lambda: model(optimizer=cv.Optimizer(0.1)), C, r"one such as cv.Adam\(1e-3\)"),
    ("minimize by None", lambda: (lambda s: s.path.minimize(s.loss(), None))(scene()), C, "optimizer: one such as"),
    ("rate text", lambda: cv.SGD("0.1"), C, "SGD: learning_rate must be a number >= 0, not '0.1'"),
    ("rate negative", lambda: cv.Adam(-1), C, "learning_rate must be a number >= 0, not -1"),
    ("rate bool", lambda: cv.SGD(True), C, "learning_rate must be a number >= 0, not True"),
    ("rate nan", lambda: cv.SGD(float("nan")), C, "must be a number >= 0, not nan"),
    ("beta1", lambda: cv.Adam(beta1=1), C, r"Adam: beta1 must be a number in \[0, 1\), not 1"),
    ("nesterov", lambda: cv.SGD(0.1, nesterov=1), C, "nesterov must be True or False"),
    ("clip_norm", lambda: cv.SGD(0.1, clip_norm=0), C, "clip_norm must be a number > 0 or None, not 0"),
    ("schedule class", lambda: cv.SGD(0.1, schedule=cv.Cosine), C, r"a schedule .* not the class Cosine"),
    ("step size", lambda: cv.Step(2.5), C, "step_size must be an integer from 1 to .* not 2.5"),
    ("L2 text", lambda: cv.L2("x"), C, "L2: l2 must be a number"),
    ("Uniform text", lambda: cv.init.Uniform("a"), C, "Uniform: low must be a finite number"),
    # ---- variables and operators
    ("variable + text", lambda: scene().x + "a", C, "a variable, a number or an array is wanted, not 'a'"),
    ("axes twice", lambda: cv.sum(scene().x, (0, 0)), cv.ShapeError, "names a dimension twice: give each once"),
    ("variable + None", lambda: scene().x + None, C, "a variable, a number or an array is wanted, not None"),
    ("variable * nan", lambda: scene().x * float("nan"), C, "must be a finite number, not nan"),
    ("variable / 0", lambda: scene().x / 0, C, "division by zero"),
    ("variable % 0", lambda: scene().x % 0, C, "division by zero"),
    ("variable ** variable", lambda: (lambda s: s.x**s.b)(scene()), C, r"write cv.exp\(exponent \* cv.log\(x\)\)"),
    ("variable @ text", lambda: scene().x @ "a", C, "matmul: b: a variable, a number or an array"),
    ("iterating", lambda: list(scene().x), C, "one variable, not a sequence"),
    ("concat of one", lambda: cv.concat(scene().x), S, "concat: give a list of variables"),
    ("concat of numbers", lambda: cv.concat([1, 2]), C, "concat: a list of variables is wanted"),
    ("relu of a number", lambda: cv.relu(3), C, "relu: at least one input must be a variable of a graph, not 3"),
    ("add of numbers", lambda: cv.add(1, 2), C, "add: a variable is wanted, not 1 .int. and 2"),
    ("reshape to a number", lambda: cv.reshape(scene().x, 4), S, "give a tuple such as"),
    ("axes text", lambda: cv.sum(scene().x, "rows"), S, "sum: axis 'rows': give an integer, or a tuple"),
    ("keepdims", lambda: cv.sum(scene().x, 1, keepdims=2), C, "attribute keepdims=2 is not allowed"),
    ("transpose by text", lambda: cv.transpose(scene().x, "10"), S, "transpose: axes '10'"),
    ("slice to 2.5", lambda: scene().x[:, 0:2.5], S, "must be integers"),
    ("constant of nothing", lambda: scene().g.constant("c", np.zeros((0,))), S, "has no elements"),
    ("FileStore of a number", lambda: cv.FileStore(3), C, "not the path of a folder"),
    ("heap.create seed 2**63", lambda: shared().heap.create(shared().program, seed=2**63), C, "from 0 to 9223372036854775807"),
    ("slice by numbers", lambda: cv.slice(scene().x, 0, 2), S, "starts 0: give a tuple"),
    ("alpha text", lambda: cv.leaky_relu(scene().x, "0.1"), C, "attribute alpha='0.1' is not allowed"),
    ("exponent None", lambda: cv.pow(scene().x, None), C, "attribute exponent=None is not allowed"),
    ("smoothing text", lambda: (lambda s: cv.softmax_cross_entropy(s.x, s.x, "a"))(scene()), C, "label_smoothing must be a number"),
    ("cross entropy of one output", lambda: model(nn.Linear(1)), S, "use one output per class .*, or binary_cross_entropy"),
    ("dropout rate", lambda: cv.dropout(scene().x, "a"), C, r"rate must be a number in \[0, 1\)"),
    ("unknown operator", lambda: cv.apply(None, scene().x), U, "operator None is not in the table"),
    # ---- graphs
    ("placeholder shape number", lambda: cv.CalcGraph().placeholder("x", 4), S, r"write \(4,\)"),
    ("placeholder shape text", lambda: cv.CalcGraph().placeholder("x", "4"), S, "a tuple of sizes"),
    ("placeholder name", lambda: cv.CalcGraph().placeholder(None, (None, 4)), C, "a variable's name is a text"),
    ("parameter with the batch", lambda: cv.CalcGraph().parameter("w", (None, 4)), S, "a tuple of sizes"),
    ("parameter name", lambda: cv.CalcGraph().parameter(3, (4,)), C, "a variable's name is a text such as 'x', not 3"),
    ("parameter regularizer", lambda: cv.CalcGraph().parameter("w", (4,), regularizer=cv.L2), C, "its regularizer must be"),
    ("constant text", lambda: cv.CalcGraph().constant("c", "a"), C, "constant 'c': a variable, a number or an array"),
    ("path name", lambda: cv.CalcGraph().path(["learn"]), C, "a path's name is a text such as 'learn'"),
    ("path backward", lambda: cv.CalcGraph().path("learn", backward="yes"), C, "backward must be True or False"),
    ("extend", lambda: scene().g.extend("zz").__enter__(), C, "no path 'zz'; there are learn"),
    ("minimize a number", lambda: scene().path.minimize(3, cv.SGD(0.1)), C, "minimize: a variable, the loss, is wanted"),
    ("minimize output", lambda: (lambda s: s.path.minimize(s.loss(), cv.SGD(0.1), "y"))(scene()), C, "output: a variable"),
    # ---- models
    ("input_shape number", lambda: model(input_shape=4), S, r"input_shape, .* not 4: write \(4,\)"),
    ("input_shape with the batch", lambda: model(input_shape=(None, 4)), S, "the batch is added to it"),
    ("target_shape", lambda: model(target_shape=3), S, "target_shape"),
    ("net class", lambda: model(nn.ReLU), C, "not the class ReLU"),
    ("net text", lambda: model("mlp"), C, "a layer of calcvm.nn"),
    ("loss number", lambda: model(loss=3), C, "loss 3 is unknown"),
    ("loss that returns nothing", lambda: model(loss=lambda y, t: None, target_shape=()), C, "returns a variable .* not None"),
    ("loss that returns a number", lambda: model(loss=lambda y, t: 0.0, target_shape=()), C, "returns a variable .* not 0.0"),
    ("batch_size 1.5", lambda: model(batch_size=1.5), C, "batch_size must be an integer from 1 to .* not 1.5"),
    ("batch_size text", lambda: model(batch_size="8"), C, "batch_size must be an integer .* not '8'"),
    ("batch_size 0", lambda: model(batch_size=0), C, "batch_size must be an integer from 1"),
    ("batch_size of a terabyte", lambda: model(batch_size=10**12), P, "a heap of .* bytes: the machine has not so much"),
    ("learning_batch", lambda: model(learning_batch=0), C, "learning_batch must be an integer >= 1, not 0"),
    ("workers 0", lambda: model(workers=0), C, "workers must be an integer from 1 to 1024, not 0"),
    ("workers 10**9", lambda: model(workers=10**9), C, "workers must be an integer from 1 to 1024"),
    ("dtype", lambda: model(dtype="float16"), C, "dtype 'float16' is unknown; take one of float32, float64"),
    ("dtype object", lambda: model(dtype=object()), C, "take one of float32, float64"),
    ("device", lambda: model(device="gpu"), C, "device 'gpu' is unknown; take one of cpu, blas, cuda"),
    ("seed -1", lambda: model(seed=-1), C, "seed must be an integer >= 0, not -1"),
    ("seed None", lambda: model(seed=None), C, "seed must be an integer >= 0, not None"),
    ("seed 2**63", lambda: model(seed=2**63), C, "seed must be an integer"),
    ("heap text", lambda: model(heap="1 MiB"), C, r"a heap such as cv.CalcHeap\(.* not '1 MiB'"),
    ("memory .", lambda: model(memory="."), C, r"memory '.': give bytes"),
    ("memory nan", lambda: model(memory=float("nan")), C, "memory nan: give bytes"),
    ("plan of a model", lambda: cv.plan(shared().model, batch_size=8), C, "a graph .* is wanted, not <Model"),
    ("compile a model", lambda: cv.compile(shared().model), C, "compile: a graph .* is wanted, not <Model"),
    ("compile with a number as plan", lambda: cv.compile(graph(), plan=8), C, "compile: plan: a plan"),
    ("compile with a plan and options", lambda: cv.compile(graph(), plan=cv.plan(graph(), batch_size=8), batch_size=8), C,
     "the plan has its batch_size already"),
    ("keep text", lambda: cv.plan(graph(), batch_size=8, keep="output"), C, "keep=.'y'., is wanted, not 'output'"),
    ("keep -1", lambda: cv.plan(graph(), batch_size=8, keep=-1), C, "a list of names of results"),
    # ---- training
    ("fit(None)", lambda: fit(None, Y), C, "an array of samples is wanted, not None"),
    ("fit of a generator", lambda: fit((x for x in X), Y), C, "an array of samples is wanted, not .*generator"),
    ("fit of a dict", lambda: fit({"a": X}, Y), C, "X is a mapping, and the model's one input is called 'input': give the array"),
    ("fit of a list of one array", lambda: fit([X], Y), C, "X is a list of one array, and .* one input .* give the array itself"),
    ("predict of a tuple of one array", lambda: shared().model.predict((X,)), C, "X is a tuple of one array"),
    ("fit of a dict of targets", lambda: fit(X, {"y": Y}), C, "y is a mapping, and the model's one target is called 'target'"),
    ("fit of batches with learning_batch", lambda: model(learning_batch=16).fit([(X[:8], Y[:8])]), C,
     "learning_batch=16: batches that come one by one are an update each: give arrays, or"),
    ("fit of rows of different lengths", lambda: fit([[1.0], [1.0, 2]], Y), C, "X|input"),
    ("epochs 0", lambda: fit(epochs=0), C, "epochs must be an integer >= 1, not 0"),
    ("epochs -1", lambda: fit(epochs=-1), C, "epochs must be an integer >= 1, not -1"),
    ("epochs 1.5", lambda: fit(epochs=1.5), C, "epochs must be an integer >= 1, not 1.5"),
    ("validation 1", lambda: fit(validation=1), C, r"validation must be a number in \(0, 1\).* not 1"),
    ("validation 1.5", lambda: fit(validation=1.5), C, r"a number in \(0, 1\), the share of samples, or \(X, y\), not 1.5"),
    ("validation of X alone", lambda: fit(validation=(X,)), C, r"\(X, y\) or a share .* not a tuple of 1"),
    ("validation with weights", lambda: fit(validation=(X, Y, Y)), C, "there are no sample weights"),
    ("validation text", lambda: fit(validation="0.2"), C, r"\(X, y\) or a share of the samples such as 0.2"),
    ("patience -1", lambda: fit(validation=0.2, patience=-1), C, "patience must be an integer >= 0, not -1"),
    ("shuffle", lambda: fit(shuffle="no"), C, "shuffle must be True or False"),
    ("run_steps 1.5", lambda: shared().model.run_steps(1.5), C, "number of steps must be an integer >= 1, not 1.5"),
    ("run_steps 0", lambda: shared().model.run_steps(0), C, "number of steps must be an integer >= 1"),
    *(("predict " + what, lambda run=run: run(shared().model), C, "path 'predict' does not train") for what, run in {
        "takes no steps": lambda m: m.step(X[:8], Y[:8], path="predict"), "has no update": lambda m: m.optimize("predict"),
        "has no backward": lambda m: m.backward("predict"), "has no rounds": lambda m: m.end_round("predict"),
        "has no section optimize": lambda m: m.run_section("predict", "optimize"),
    }.items()),
    ("history of no such figure", lambda: fit()["acc"], C, "no figure 'acc' of the epochs; there are loss, seconds"),
    ("val_loss without validation", lambda: fit()["val_loss"], C, "no figure 'val_loss'"),
    ("targets above 1", lambda: binary(np.where(Y > 0, 2.0, 0)), C, r"targets in \[0, 1\]; found 0.0 to 2.0"),
    ("targets of -1", lambda: binary(np.where(Y > 0, 1, -1)), C, r"targets in \[0, 1\]; found -1 to 1"),
    ("targets of nan", lambda: binary(np.where(Y > 0, 1, np.nan)), C, r"targets in \[0, 1\]; found nan"),
    ("predict of None", lambda: shared().model.predict(None), C, "an array of samples is wanted, not None"),
    ("unknown variable", lambda: shared().model[0], C, "no variable 0; there are input"),
    ("result after predict", lambda: (lambda m: (m.predict(X), m["output"]))(model()), C,
     r"or only by predict, evaluate or fit, which keep no results there: take what model.run\(inputs\) returns, or set"),
    ("a closed model", lambda: (lambda m: (m.close(), m.predict(X)))(model()), C, "is closed: load it from its file, open it"),
    ("gradient of none", lambda: shared().model.grad(["W"]), C, "has no gradient; these have one"),
    # ---- hyperparameters
    ("rate text in hyper", lambda: hyper(cv.SGD(0.1), "learning_rate", "a"), C, "must be a number >= 0, not 'a'"),
    ("rate -1 in hyper", lambda: hyper(cv.SGD(0.1), "learning_rate", -1), C, "must be a number >= 0, not -1"),
    ("rate nan in hyper", lambda: hyper(cv.SGD(0.1), "learning_rate", float("nan")), C, "must be a number >= 0"),
    ("beta1 of SGD", lambda: hyper(cv.SGD(0.1), "beta1", 0.9), C, "has no effect: path 'learn' .* read learning_rate"),
    ("beta1 of RMSProp", lambda: hyper(cv.RMSProp(), "beta1", 0.9), C, "'beta1' has no effect"),
    ("beta1 of Adam", lambda: hyper(cv.Adam(), "beta1", 2), C, r"must be a number in \[0, 1\), not 2"),
    ("clip_norm not compiled in", lambda: hyper(cv.Adam(), "clip_norm", 1.0), C, "'clip_norm' has no effect"),
    ("clip_value not compiled in", lambda: hyper(cv.Adam(), "clip_value", 1.0), C, "'clip_value' has no effect"),
    ("clip_norm 0", lambda: hyper(cv.SGD(0.1, clip_norm=1), "clip_norm", 0), C, "must be a number > 0, not 0"),
    ("gamma without schedule", lambda: hyper(cv.SGD(0.1), "gamma", 0.5), C, "'gamma' has no effect"),
    ("total_steps without", lambda: hyper(cv.SGD(0.1, schedule=cv.Step(3)), "total_steps", 5), C, "has no effect"),
    ("total_steps 1.5", lambda: hyper(cv.SGD(0.1, schedule=cv.Cosine(3)), "total_steps", 1.5), C, "an integer from 1 to"),
    ("factor below 1", lambda: hyper(cv.SGD(0.1, schedule=cv.CosineRestarts(3)), "gamma", 0.5), C, "a number >= 1"),
    ("hyper of no name", lambda: hyper(cv.SGD(0.1), None, 0.5), C, "no hyperparameter None; there are"),
    *((f"{name} in hyper", lambda name=name: hyper(cv.Adam(clip_norm=1.0), name, 5.0), C,
       f"'{name}' is computed in each step: set '{instead}'") for name, instead in COMPUTED.items()),
    ("gamma_t without schedule", lambda: hyper(cv.Adam(), "gamma_t", 5.0), C, "'gamma_t' has no effect"),
    ("hyper lists what may be set", lambda: hyper(cv.SGD(0.1), "rate", 1), C, "there are learning_rate, warmup_steps, weight_decay$"),
    ("hyper of a fleet", lambda: add(hyper={"beta1": 0.9}), C, "'beta1' has no effect"),
    ("hyper of a fleet out of range", lambda: add(hyper={"learning_rate": -1}), C, "a number >= 0, not -1"),
    # ---- heaps, fleets, ensembles
    ("heap of nonsense", lambda: cv.CalcHeap("lots"), C, "memory 'lots': give bytes"),
    ("heap of a petabyte", lambda: cv.CalcHeap("1000000 GiB"), P, "a heap of 1,073,741,824,000,000 bytes"),
    ("heap with a store class", lambda: cv.CalcHeap("1 MiB", cv.MemoryStore), C, "not the class MemoryStore"),
    ("load a model", lambda: shared().heap.create(shared().model), C, "a compiled program: its .program is wanted"),
    ("load a graph", lambda: shared().heap.create(graph()), C, r"a compiled program: cv.compile\(graph\) is wanted"),
    ("load a plan", lambda: shared().heap.create(cv.plan(graph(), batch_size=8)), C, r"cv.compile\(graph, plan=plan\)"),
    ("load a file name", lambda: shared().heap.create("x.calc"), C, "a compiled program .*load_program"),
    ("load with seed -1", lambda: shared().heap.create(shared().program, seed=-1), C, "seed must be an integer >= 0"),
    ("open None", lambda: shared().heap.open(None), C, "a model's name is a text"),
    ("section", lambda: shared().model.run_section("learn", "backwards"), C, "'backwards' is unknown; take one of forward"),
    ("path of a model", lambda: shared().model.forward(["learn"]), C, r"no path \['learn'\]; there are learn"),
    ("fleet workers", lambda: cv.Fleet("1 MiB", workers=1.5), C, "workers must be an integer from 1 to 1024, not 1.5"),
    ("fleet workers 0", lambda: cv.Fleet("1 MiB", workers=0), C, "workers must be an integer from 1"),
    ("create a model", lambda: shared().heap.create(shared().model), C, "a compiled program: its .program is wanted"),
    ("add a plan", lambda: add(cv.plan(graph(), batch_size=8)), C, "layers, a graph, a cv.Model or a program .* is wanted"),
    ("add data X", lambda: add(data=X), C, r"a tuple of arrays \(input, target\).* not ndarray of shape \(40, 4\)"),
    ("add epochs", lambda: add(epochs=0), C, "epochs must be an integer >= 1"),
    ("add patience", lambda: add(patience=-1, validation=(X, Y)), C, "patience must be an integer >= 0"),
    ("add validation without a path predict", lambda: add(own_graph(), data=(X,), validation=(X,)), C,
     "path 'predict' evaluates models, and the program's paths are learn"),
    ("fleet epochs", lambda: shared().fleet.fit(epochs=0, progress=False), C, "epochs must be an integer >= 1"),
    ("advance", lambda: shared().fleet.advance(-1), C, "epochs must be an integer >= 0"),
    ("advance names", lambda: shared().fleet.advance({"a": 1}), C, "a handle of the fleet is wanted, not 'a'"),
    ("ensemble of a model", lambda: cv.Ensemble(shared().model), C, r"a list of models, such as \[model\] or fleet.results.best\(5\), is wanted, not <Model"),
    ("ensemble of numbers", lambda: cv.Ensemble([1, 2]), C, "model 0 of the ensemble: a model .* is wanted, not 1"),
    ("ensemble method", lambda: cv.Ensemble([shared().model], "median"), C, "method 'median' is unknown; take one of mean, vote"),
    ("ensemble weights", lambda: cv.Ensemble([shared().model], weights="a"), C, "weights 'a': give a number for each"),
    # ---- exploration
    ("explore keep", lambda: explore(keep=-1), C, "keep must be an integer >= 0, not -1"),
    ("explore epochs", lambda: explore(epochs=1.5), C, "epochs must be an integer >= 1, not 1.5"),
    ("explore seed", lambda: explore(seed=-1), C, "seed must be an integer >= 0"),
    ("explore data", lambda: explore(data=X), C, "a tuple of arrays .X, y., or a mapping by name, is wanted"),
    ("explore validation", lambda: explore(validation=1), C, "the share of samples, or arrays, not 1"),
    ("explore build", lambda: explore(build=graph()), C, "a function of a trial that returns a graph is wanted, not <CalcGraph"),
    ("explore sampler", lambda: explore(sampler=[]), C, r"sampler \[\]: take one of 'tpe'"),
    ("explore pruner", lambda: explore(pruner={}), C, r"pruner {}: take one of 'hyperband'"),
    ("explore engine", lambda: explore(engine={}), C, r"engine {}: take 'local'"),
    # ---- settings of layers that were set after they were made
    ("groups set to 0", lambda: built(nn.Conv2d(8, 3), groups=0), C, "Conv2d: groups must be an integer from 1"),
    ("a kernel set to a text", lambda: built(nn.Conv2d(8, 3), kernel="x"), C, "Conv2d: kernel: a number or 2 of them is wanted"),
    ("units set to None", lambda: built(nn.Linear(8), units=None), C, "Linear: units must be an integer"),
    ("an initializer set to a number", lambda: built(nn.Linear(8), init=5), C, "^Linear: init: an initializer such as"),
    ("eps set to a text", lambda: built(nn.GroupNorm(2), eps="x"), C, "GroupNorm: eps must be a number"),
    # ---- images
    ("a network in preprocess=", lambda: model(preprocess=nn.BatchNorm()), C, "preprocess: .* would be learnt"),
    ("a padding of 10**9", lambda: cv.plan(cv.build_graph(nn.Conv2d(4, 3, padding=2 * 10**9), (3, 8, 8), "mse", cv.SGD(0.1)), batch_size=1),
     cv.PlanError, "a batch of 1 needs at least .* bytes, which no machine has"),
    ("a pair for one axis", lambda: built(nn.Conv1d(8, 3, padding=(1, 0)), (4, 6)), C,
     r"conv1d: padding: a pair .before, after. per axis is wanted: write \(\(1, 0\),\)"),
    ("scale and size", lambda: built(nn.Upsample(3, size=(12, 12))), C, r"scale 3 and size \(12, 12\): give one of them"),
    ("windows of padding", lambda: built(nn.MaxPool2d(2, padding=2, dilation=3), (4, 1, 1)), C,
     r"window of 2, 3 apart, beside an axis of 1 .* would see padding \(2, 2\) alone"),
    ("build without training", lambda: type("Half", (nn.Layer,), {"build": lambda self, x, scope: x}), C,
     r"Half.build must take \(self, x, scope, training\): "),
    ("a label out of range", lambda: shared().model.fit(X, np.where(np.arange(40) == 7, 3, Y), progress=False), C,
     r"'target': .* integers in \[0, 3\); found 0 to 3, 3 at index \(7,\)"),
    ("channels last, and one", lambda: model(nn.Conv2d(3, 3), input_shape=(28, 28, 1)), S, r"has 28 channels, 28 by 1: .*channels_last=True"),
    ("no Flatten", lambda: model(nn.Linear(2), input_shape=(3, 6)).step(np.zeros((8, 3, 6)), np.zeros(8, int)), S,
     r"\(B, 3\) is wanted: as many labels as places of the output; of images nn.Flatten\(\) comes before nn.Linear"),
    ("a file at its end", lambda: cv.load(BytesIO()), cv.ProgramError, r"nothing is left to read: go back to its start, .seek\(0\)"),
    ("momentum by another's name", lambda: hyper(cv.SGD(0.1, momentum=0.9), "momentum", 0.5), C, "momentum is beta1; there are learning"),
    ("smoothing of one", lambda: (lambda x: cv.softmax_cross_entropy(x, x, label_smoothing=1.0))(scene().x), C, "label_smoothing must be a number in"),
    ("a sparse matrix", lambda: shared().model.fit(SimpleNamespace(toarray=None), Y, progress=False), C, r"X.toarray\(\) is one"),
    ("labels as objects", lambda: shared().model.evaluate(X, Y.astype(object)), C, r"give data.astype\(np.int64\)"),
    ("labels picked without their shape", lambda: model(loss=lambda y, t: -cv.mean(cv.pick(cv.log_softmax(y), t))), cv.ShapeError,
     r"pick\(.*a Model's target is a label of each sample by target_shape=\(\)"),
    ("one value per group", lambda: built(nn.GroupNorm(4), (4, 1, 1)), C, "has one value per group .of 4., which has no variance"),
    ("one value per channel", lambda: built(nn.InstanceNorm(), (4, 1, 1)), C, "has one value per group .of 4., which has no variance"),
    # ---- initializers and updates of one's own
    ("an initializer of NaN", lambda: model(nn.Linear(3, init=lambda shape, rng: np.full(shape, np.nan))), C,
     "'linear_1.weight': its initializer .* gives numbers that are not finite in float32"),
    ("an initializer beyond float32", lambda: model(nn.Linear(3, init=lambda shape, rng: np.full(shape, 1e300))), C,
     "'linear_1.weight': its initializer .* gives numbers that are not finite in float32"),
    ("an optimizer of a name that is taken", lambda: model(optimizer=Momentum(0.1)), C,
     "optimizer Momentum: calcvm already has an update 'momentum', the name in lower case: rename the class"),
    ("one of calcvm's updates without its fields", lambda: model(optimizer=Heavy(0.1)), C, "'momentum' reads beta1, for which Heavy has no"),
    # ---- operators of one's own
    ("register nothing", lambda: cv.register_op("relu"), C, "register_op takes a calcvm.operators.OpSpec, not 'relu'"),
    ("register a name twice", lambda: cv.register_op(OPS["relu"]), C, "operator 'relu' is registered already"),
    ("register a row otherwise", lambda: cv.register_op(operator(fwd=(replace(OPS["relu"].fwd[0], flops="7"),))), C,
     "row 'relu_fwd' is registered already, and differs"),
    ("register calcvm's own anew", lambda: cv.register_op(replace(OPS["relu"], fwd=(replace(OPS["relu"].fwd[0]),))), C,
     "operator 'relu' is registered already: take another name"),
    ("row of many words", lambda: row_spec(words=dims(" ".join(f"w{k}" for k in range(120)))), C, "has more than 120 words"),
]  # fmt: skip


def hyper(optimizer, name, value):
    model(optimizer=optimizer).hyper[name] = value


@pytest.mark.parametrize(("mistake", "kind", "message"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_a_mistake_is_told_in_a_sentence(mistake, kind, message):
    with pytest.raises(kind) as error:
        mistake()
    assert re.search(message, str(error.value)), str(error.value)
    assert "\n" not in str(error.value) and type(error.value).__module__ == "calcvm.errors"


def test_a_setting_may_be_set_after_a_layer_was_made():
    assert built(nn.Conv2d(8, 3), kernel=5).shape[2:] == built(nn.Conv2d(8, 5)).shape[2:]
    assert repr(nn.Sequential()) == "Sequential()"


def test_there_is_a_row_of_every_kind_of_mistake():
    assert len(MISTAKES) > 120 and len({m[0] for m in MISTAKES}) == len(MISTAKES)


# ---------------------------------------------------------------- numbers
I64, F32 = np.int64, np.float32
NUMBERS = {
    "batch_size": lambda: model(batch_size=I64(8)).batch_size == 8,
    "learning_batch": lambda: model(learning_batch=I64(16)).learning_batch == 16,
    "workers": lambda: model(workers=np.int32(1)),
    "seed": lambda: model(seed=np.uint8(3)),
    "input_shape": lambda: model(input_shape=np.array([4]), target_shape=()),
    "memory": lambda: model(batch_size=None, memory=I64(4096)),
    "dtype type": lambda: model(dtype=np.float64).program.dtype == "float64",
    "dtype": lambda: model(dtype=np.dtype("float64")).program.dtype == "float64",
    "units": lambda: nn.Linear(I64(3)).units.__class__ is int,
    "rate": lambda: cv.SGD(F32(0.5), momentum=F32(0.5)),
    "schedule": lambda: cv.SGD(0.5, schedule=cv.Step(I64(3), F32(0.5))),
    "clip": lambda: model(optimizer=cv.Adam(clip_norm=F32(1), clip_value=I64(1))),
    "regularizer": lambda: model(nn.Linear(3, regularizer=cv.L2(F32(0.5)))),
    "dropout": lambda: model(nn.Dropout(F32(0.5)) >> nn.Linear(3)),
    "uniform": lambda: model(nn.Linear(3, init=cv.init.Uniform(F32(-1), F32(1)))),
    "constant": lambda: model(nn.Linear(3, init=cv.init.Constant(np.array(2.0)))),
    "activation": lambda: model(nn.Linear(3) >> nn.LeakyReLU(F32(0.5)) >> nn.ELU(F32(2))),
    "reshape": lambda: model(nn.Reshape(I64(2), I64(2)) >> nn.Flatten() >> nn.Linear(3)),
    "operators": lambda: (lambda s: F32(2) * (s.x + I64(3)) / np.float64(2) - np.array(1))(scene()),
    "axes": lambda: (lambda s: cv.transpose(cv.sum(s.W, I64(1), keepdims=np.True_), (I64(1), I64(0))))(scene()),
    "slices": lambda: cv.slice(scene().W, (I64(1), 0), (I64(2), None)),
    "epochs": lambda: fit(epochs=I64(2), validation=F32(0.25), patience=I64(1)),
    "run_steps": lambda: (lambda m: (m.step(X[:8], Y[:8]), m.run_steps(I64(2))))(model()),
    "hyper": lambda: hyper(cv.SGD(0.1, schedule=cv.Step(3)), "step_size", I64(5)),
    "whole hyper": lambda: hyper(cv.SGD(0.1, schedule=cv.Step(3)), "step_size", 5.0),
    "fleet": lambda: cv.Fleet(I64(2**20), workers=I64(1)).add(
        shared().program, data=(X, Y), epochs=I64(1), seed=I64(1), hyper={"learning_rate": F32(0.1)}
    ),
    "explore": lambda: explore(
        space={"rate": [F32(0.1)], "width": (I64(2), I64(3)), "x": (F32(0.5), F32(1))},
        n_trials=I64(1), epochs=I64(1), batch_size=I64(8), keep=I64(1), seed=I64(1),
    ),
    "snapshots": lambda: cv.snapshot_ensemble(
        model(optimizer=cv.SGD(0.1, schedule=cv.CosineRestarts(1))), X, Y, cycles=I64(1), epochs_per_cycle=I64(1),
        progress=False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("make", NUMBERS.values(), ids=NUMBERS)
def test_numbers_of_numpy_are_numbers(make, tmp_path):
    answer = make()
    assert answer is not False
    if isinstance(answer, cv.Model):  # what it holds can be written
        answer.save(tmp_path / "m.calc")
        assert cv.load(tmp_path / "m.calc").program == answer.program


# ---------------------------------------------------------------- names in place of objects
@pytest.mark.parametrize("given", ["adam", "Adam", cv.Adam])
def test_optimizers_by_name_and_class(given):
    by_name, by_hand = model(optimizer=given), model(optimizer=cv.Adam())
    assert by_name.program == by_hand.program


@pytest.mark.parametrize("given", ["he_normal", "kaiming_normal", cv.init.HeNormal])
def test_initializers_by_name_and_class(given):
    by_name, by_hand = model(nn.Linear(3, init=given)), model(nn.Linear(3, init=cv.init.HeNormal()))
    assert by_name.program == by_hand.program
    assert np.array_equal(by_name["linear_1.weight"], by_hand["linear_1.weight"])


def test_every_initializer_that_needs_no_value_has_a_name():
    named = {type(cv.init.initializer_of("", name, (2, 2))) for name in cv.init.NAMES}
    assert named == {*cv.init.KINDS} - {cv.init.Constant, cv.init.Function}


def test_sizes_of_variables_are_sizes():
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 5, 4, 4))
    w = g.parameter("w", (x.shape[1], 1))
    with g.path("run"):
        for shape in (x.shape, (x.shape[0], x.shape[1], 16), (None, x.shape[1], -1)):
            assert cv.reshape(x, shape).shape[:2] == x.shape[:2]
        assert nn.Conv2d(x.shape[1], 3).build(x, "conv", training=False).shape[1] == 5
    assert w.shape == (5, 1) and [*range(x.shape[1])] == [0, 1, 2, 3, 4]
    with pytest.raises(TypeError, match="not known before the batch"):
        range(x.shape[0])


def test_statistics_of_one_value_are_none():
    net = nn.Conv2d(2, 3) >> nn.GlobalAvgPool() >> nn.BatchNorm() >> nn.Flatten()
    given = {"input_shape": (3, 5, 5), "loss": "mse", "optimizer": cv.SGD(0.1)}
    with pytest.raises(cv.ShapeError, match="batch_norm: in a batch of 1 there is one value per channel.*path 'learn'"):
        cv.Model(net, **given, batch_size=1)
    model = cv.Model(net, **given, batch_size=2)
    x, t = np.ones((5, 3, 5, 5), "f4"), np.ones((5, 2), "f4")
    for _ in range(2 * WORTH):  # from some call on compiled
        model.step(x[:2], t[:2])
        model.run_steps(1)
    before, fleet = model.image(), cv.Fleet("1 MiB")
    graph = cv.build_graph(net, (3, 5, 5), "mse", cv.SGD(0.1))
    split = cv.SplitModel(cv.plan_devices(graph, [cv.Processor("a")], batch_size=2))
    last = "batch_norm: in the last batch, 1 of 5 samples, there is one value per channel, .*: take another batch_size, or leave out"
    for message, call in (
        ("batch_norm: in a batch of 1 there is one value per channel", lambda: model.step(x[:1], t[:1])),
        ("in a batch of 1", lambda: model.bind(x[:1], t[:1])()),
        ("in a batch of 1", lambda: model.fit([(x[:1], t[:1])], progress=False)),
        ("in a batch of 1", lambda: split.step(x[:1], t[:1])),
        (last, lambda: model.fit(x, t, progress=False)),
        (last, lambda: fleet.add(model, data=(x, t))),
        ("1 of 3 samples", lambda: cv.Model(net, **given, batch_size=2, learning_batch=3).fit(x, t, progress=False)),
    ):
        with pytest.raises(cv.ShapeError, match=message):
            call()
    model["input"], model["target"] = x[:1], t[:1]
    with pytest.raises(cv.ShapeError, match="in a batch of 1"):
        model.run_steps(1)
    np.testing.assert_array_equal(model.image(), before)
    model.forward("learn")
    with pytest.raises(cv.ShapeError, match="in a batch of 1"):
        model.backward("learn")
    assert not len(fleet) and model.predict(x[:1]).shape == (1, 2)
    model.fit(x[:4], t[:4], progress=False)
    cv.Model(nn.Conv2d(2, 3) >> nn.BatchNorm() >> nn.Flatten() >> nn.Linear(2), **given, batch_size=4).step(
        x[:1], t[:1]
    )


def test_lists_are_arrays():
    weight = [[1.0, 2, 3]] * 4
    assert model(nn.Linear(3, init=weight, bias_init=[1, 2, 3]))["linear_1.weight"].tolist() == weight


def test_stateless_layers_may_come_twice():
    act = nn.ReLU()
    assert len(model(nn.Linear(4) >> act >> nn.Linear(3) >> act).parameters) == 4


# ---------------------------------------------------------------- arrays beside variables
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda a, x: a * x, lambda a, x: a * x),
        (lambda a, x: a + x, lambda a, x: a + x),
        (lambda a, x: a - x, lambda a, x: a - x),
        (lambda a, x: a / x, lambda a, x: a / x),
        (lambda a, x: a.tolist() * x, lambda a, x: a * x),
        (
            lambda a, x: np.eye(4) @ cv.transpose(x) if not isinstance(x, np.ndarray) else 0,
            lambda a, x: np.eye(4) @ x.T,
        ),
        (lambda a, x: a[0] * x, lambda a, x: a[0] * x),
        (lambda a, x: a[:1][0] / x, lambda a, x: a[0] / x),
    ],
)
def test_arrays_on_the_left_of_variables(ours, theirs):
    a, values = np.array([1.0, 2, 3, 4]), np.full((5, 4), 2.0)
    g = cv.CalcGraph()
    x = g.placeholder("x", (5, 4))
    with g.path("run", adopt=False) as path:
        path.output = ours(a, x).rename("y")
    resident = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=1, dtype="float64"))
    resident["x"] = values
    resident.forward("run")
    np.testing.assert_allclose(resident["y"], theirs(a, values))


def test_a_refused_operator_leaves_the_graph_as_it_was():
    s = scene()
    before = [*s.g.variables], len(s.path.operations)
    for refused in (lambda: s.x + np.ones(3), lambda: np.ones((2, 2)) @ s.x, lambda: cv.dropout(s.x, 2)):
        with pytest.raises(cv.CalcError):
            refused()
    s.path.__exit__()
    with pytest.raises(cv.CalcError, match="operators belong to a path"):
        cv.dropout(s.x)
    assert before == ([*s.g.variables], len(s.path.operations))


def test_star_import_leaves_pythons_functions_alone():
    scope = {}
    exec("from calcvm import *", scope)
    shadowed = [name for name in scope if hasattr(builtins, name) and not name.startswith("__")]
    assert shadowed == [] and "relu" in scope and callable(cv.sum) and callable(cv.compile)


# ---------------------------------------------------------------- hyperparameters have the effect that is declared
OPTIMIZERS = {
    "sgd": cv.SGD(0.1), "momentum": cv.SGD(0.1, momentum=0.5), "nesterov": cv.SGD(0.1, momentum=0.5, nesterov=True),
    "adam": cv.Adam(), "adamhat": cv.AdamHat(), "adamw": cv.AdamW(), "rmsprop": cv.RMSProp(),
    "rmsprop momentum": cv.RMSProp(momentum=0.5), "adagrad": cv.Adagrad(), "clip": cv.SGD(0.1, clip_norm=0.1),
    "clip value": cv.SGD(0.1, clip_value=0.01),
    "step": cv.SGD(0.1, schedule=cv.Step(2)), "exponential": cv.SGD(0.1, schedule=cv.Exponential(0.9)),
    "cosine": cv.SGD(0.1, schedule=cv.Cosine(9)), "restarts": cv.SGD(0.1, schedule=cv.CosineRestarts(3, 2)),
}  # fmt: skip
OTHER = {"step_size": 3.0, "total_steps": 4.0, "warmup_steps": 2.0, "gamma": 1.5, "learning_rate": 0.07, "eps": 1e-3,
         "clip_value": 0.02, "clip_norm": 0.05, "min_lr": 0.01, "weight_decay": 0.3, "beta1": 0.3, "beta2": 0.4}  # fmt: skip


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_what_may_be_set_is_what_training_reads(optimizer):
    """Every slot, written behind the back of the check: the parameters differ after seven steps where it may be set."""
    program = cv.compile(graph(optimizer=optimizer), batch_size=8, workers=1, dtype="float64")
    heap = cv.CalcHeap("1 MiB")

    def trained(**slots):
        resident = heap.create(program, seed=1)
        mapping = resident.hyper
        with resident:
            slot = resident.slot
            values = mapping._values(slot)
            for name, value in slots.items():
                values[HYPER_SLOTS.index(name)] = value
        for _ in range(7):
            resident.step(X[:8], Y[:8])
        weight = resident["linear_1.weight"].tobytes()
        allowed = set(resident.loaded.hyper["learn"])
        resident.close()
        return weight, allowed

    weight, allowed = trained()
    assert allowed == {name for name in SLOTS if trained(**{name: OTHER[name]})[0] != weight}


def test_slots_are_those_of_every_row_that_reads_hyperparameters():
    assert {*SLOTS, *OTHER} == {*SLOTS} == {*OTHER} and set(SLOTS) < set(HYPER_SLOTS)
    readers = [
        row for row in ROWS.values() if any(o.name == "hyper" for o in row.operands) and row.name != "rate_scale"
    ]
    assert all(slots_of(row, {"schedule": 0}) for row in readers) and len(readers) >= 11


def test_hyperparameters_are_copied_between_models_of_one_program():
    a, b = model(optimizer=cv.Adam(0.5)), model(optimizer=cv.Adam(0.25))
    a.fit(X, Y, progress=False)
    b.hyper.update(a.hyper)
    assert dict(b.hyper) == dict(a.hyper) and len(a.hyper) == len(dict(a.hyper)) and not COMPUTED.keys() & {*a.hyper}
    assert a.hyper["lr_t"] == 0.5


# ---------------------------------------------------------------- losses that are not finite
def diverging(**options):
    data = np.full_like(X, 1e30)
    return model(loss="mse", optimizer=cv.SGD(1e30)), dict(X=data, y=np.zeros((40, 3)), progress=False, **options)


def test_a_loss_that_is_not_finite_is_told_once_with_its_epoch():
    net, call = diverging(epochs=4)
    with pytest.warns(cv.CalcWarning, match="the loss of epoch 1 is (inf|nan), and training went on") as told:
        history = net.fit(**call)
    assert len(told) == 1 and told[0].filename == __file__ and len(history) == 4
    assert re.fullmatch("all epochs done; the loss of epoch 1 is (inf|nan)", history.stopped)


def test_training_can_stop_at_a_loss_that_is_not_finite():
    net, call = diverging(epochs=4, terminate_on_nan=True)
    history = net.fit(**call)
    assert len(history) == 1 and re.fullmatch("the loss of epoch 1 is (inf|nan)", history.stopped)


def test_finite_losses_are_no_news():
    assert model().fit(X, Y, epochs=2, terminate_on_nan=True, progress=False).stopped == "all epochs done"


# ---------------------------------------------------------------- plans, pickles, kernels
def test_the_largest_batch_that_fits_is_not_cut_off():
    plan = cv.plan(graph(), memory="100 GiB", workers=1)
    assert (
        2**24 < plan.batch_size and cv.plan(graph(), batch_size=plan.batch_size + 3, workers=1).heap_bytes > 100 * 2**30
    )


@pytest.mark.parametrize(
    "error",
    [cv.CalcError("a"), cv.ShapeError("a"), cv.PlanError("a", 1, 2), cv.ProgramError("a"), cv.UnsupportedOperator("a"),
     cv.Trap("a"), cv.MissingExtra("ray", "ray", "engine"), __import__("calcvm.errors").errors.DeviceError("a", lost=True)],
    ids=lambda e: type(e).__name__,
)  # fmt: skip
def test_errors_survive_a_process_pool(error):
    for other in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(other) is type(error) and str(other) == str(error) and vars(other) == vars(error)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))], ids=["deepcopy", "pickle"])
def test_graphs_are_copied_whole(how):
    g = graph(optimizer=cv.Adam(schedule=cv.Cosine(9)))
    other = how(g)
    assert other.form == g.form and cv.compile(other, batch_size=8) == cv.compile(g, batch_size=8)
    assert all(v.graph is other for v in other.variables.values())


def test_a_row_without_a_kernel_is_named():
    spec = operator(fwd=(row_spec(),))
    cv.register_op(spec)
    try:
        s = scene()
        s.path.minimize(cv.mean(cv.apply("nok", s.x) + cv.sum(s.W)), cv.SGD(0.1))
        with pytest.raises(cv.UnsupportedOperator, match="row 'nok_fwd' has no kernel"):
            cv.CalcHeap("1 MiB").create(cv.compile(s.g, batch_size=8, workers=1))
    finally:
        del OPS["nok"], ROWS["nok_fwd"]
        OWN.remove("nok_fwd")


def test_a_fleet_search_names_its_own_parameter():
    sk = pytest.importorskip("calcvm.sklearn")
    search = sk.FleetSearchCV(sk.MLPClassifier((4,), max_iter=2), {"alpha": [0.1]}, memory="1 KiB", cv=2)
    with pytest.raises(cv.PlanError, match=r"FleetSearchCV: memory='1 KiB', but a candidate needs [\d,]+ bytes"):
        search.fit(X, Y)


# ---------------------------------------------------------------- what a notebook shows
def test_representations_are_one_short_line():
    fleet = cv.Fleet("1 MiB", workers=1)
    fleet.add(shared().program, data=(X, Y))
    found = explore()
    things = [shared().model, cv.plan(graph(), batch_size=8), graph(), shared().heap, fleet.fit(progress=False), found,
              fleet, nn.Linear(3) >> nn.LeakyReLU(0.5)]  # fmt: skip
    for thing in things:
        text = repr(thing)
        assert len(text) < 160 and "\n" not in text and " object at 0x" not in text
    assert "15 parameters" in repr(shared().model) and "batch 8" in repr(things[1]) and "trial 0" in repr(found)


def test_help_shows_the_parameters_of_activations():
    import inspect

    assert [*inspect.signature(nn.LeakyReLU).parameters] == ["alpha"] and [*inspect.signature(nn.ReLU).parameters] == []


# ---------------------------------------------------------------- data that are no numbers, and where they are none
def calls(net, data, target, weights=None):
    """Everything that takes data and targets."""
    options = {} if weights is None else {"sample_weight": weights}
    yield lambda: net.fit(data, target, progress=False, **options)
    if weights is None:
        yield lambda: net.evaluate(data, target)
        yield lambda: net.step(data[:8], target[:8])
        yield lambda: net.fit(X, Y > 1, validation=(data, target), progress=False)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("what", ["labels", "probabilities", "weights", "typed"])
def test_the_index_of_a_missing_number_is_told(what, seed):
    at = int(np.random.default_rng(seed).integers(8))
    y, w = Y.astype("float64" if seed % 2 else "float32"), np.ones(40)
    (w if what == "weights" else y)[at] = np.nan
    where = rf"nan at index \({at},\)"
    if what == "probabilities":
        net, y, where = model(nn.Linear(1), loss="binary_cross_entropy"), (y / 2)[:, None], rf"nan at index \({at}, 0\)"
    elif what == "weights":
        net = model(sample_weight=True)
    else:
        net = model(**({"target_dtype": "int64"} if what == "typed" else {}))
    for call in calls(net, X, y, w if what == "weights" else None):
        with pytest.raises(cv.CalcError, match=where):
            call()


def test_labels_with_an_axis_too_many():
    net = model()
    for call in calls(net, X, Y[:, None]):
        with pytest.raises(cv.ShapeError, match=r"of labels: write np.asarray\(y\)\[:, 0\]$"):
            call()
    images = cv.Model(nn.Conv2d(3, 1), input_shape=(1, 4, 4), optimizer="adam")
    x, y = np.zeros((6, 1, 4, 4)), np.zeros((6, 4, 4), int)
    for given, hint in ((y[:, None], r"\[:, 0\]"), (y[..., None], r"\[:, :, :, 0\]")):
        with pytest.raises(cv.ShapeError, match=rf"of labels: write np.asarray\(y\){hint}$"):
            images.fit(x, given, progress=False)
    with pytest.raises(cv.ShapeError, match="a target_shape with the classes"):
        net.fit(X, np.eye(3)[Y], progress=False)


NOT_NUMBERS = {
    "labels": (np.array(["b", "a"] * 20), r"\('b' at index \(0,\)\) .*np.unique\(y, return_inverse=True\)"),
    "objects": (np.array(["b", "a"] * 20, object), r"np.unique\(y, return_inverse=True\)"),
    "list": ([None, 1.0] * 20, r"\(None at index \(0,\)\) .*give it a value"),
    "numbers": (np.array([1, 0] * 20, object), r"give data.astype\(np.int64\)"),
    "decimals": (np.array([Decimal(1)] * 40), r"convert them, data.astype\(float\)"),
    "dates": (np.array([date(2020, 1, 1)] * 40), "convert it to a number, or leave its column out"),
    "beyond": (np.array([10**400] * 40), r"number at index \(0,\) is beyond 1.8e308\) cannot be used; give smaller"),
    "complex": (np.ones(40, complex), r"\(\(1\+0j\) at index"),
    "days": (np.zeros(40, "datetime64[D]"), r"1970, 1, 1\) at index"),
}


@pytest.mark.parametrize("name", NOT_NUMBERS)
def test_labels_that_are_no_numbers(name):
    given, message = NOT_NUMBERS[name]
    for call in calls(model(), X, given):
        with pytest.raises(cv.CalcError, match=message):
            call()


@pytest.mark.parametrize("column", range(4))
@pytest.mark.parametrize("kind", ["text", "missing", "day"])
def test_a_table_names_its_column(kind, column):
    pandas = pytest.importorskip("pandas")
    names = ["age", "size", 7, ("a", "b")]
    frame, row = pandas.DataFrame(X), 3 * column
    series = {
        "text": lambda s: s.astype(object).where(s.index != row, "Rome"),
        "missing": lambda s: s.astype("Float32").where(s.index != row),
        "day": lambda s: s.astype(object).where(s.index != row, pandas.Timestamp("2020-01-01")),
    }[kind](frame[column])
    frame = frame.assign(no=series).drop(columns=column)
    frame = frame[[c if c != column else "no" for c in range(4)]].set_axis(names, axis=1)
    message = rf"index \({row}, {column}\), column {re.escape(repr(names[column]))}\)"
    for call in (lambda: model().predict(frame), lambda: fit(frame, Y)):
        with pytest.raises(cv.CalcError, match=message):
            call()


@pytest.mark.parametrize("fault", ["nan", "label", "shape", "no samples"])
def test_what_is_wrong_with_validation_data_is_told_of_them(fault):
    inputs, labels = X.copy(), Y.copy()
    if fault == "nan":
        inputs[3, 1] = np.nan
    elif fault == "label":
        labels[5] = 9
    elif fault == "shape":
        inputs = inputs[:, :3]
    else:
        inputs, labels = inputs[:0], labels[:0]
    net = model()
    with cv.Fleet("1 MiB") as fleet:
        add = partial(fleet.add, net.program, check_finite=True)
        fit = partial(net.fit, progress=False, check_finite=True)
        for call in (lambda **held: fit(X, Y, **held), lambda **held: add(data=(X, Y), **held)):
            with pytest.raises(cv.CalcError, match="^validation.*'(input|target|X|y)'"):
                call(validation=(inputs, labels))
        with pytest.raises(cv.CalcError) as told:
            fit(inputs, labels)
        assert not str(told.value).startswith("validation")


@pytest.mark.parametrize("kind", ["numbers and flags", "nullable", "pyarrow"])
def test_a_table_of_numbers_of_several_types_is_read(kind):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X)
    if kind == "numbers and flags":  # as pandas.get_dummies gives
        frame[1] = frame[1] > 0
    elif kind == "pyarrow":
        pytest.importorskip("pyarrow")
        frame = frame.convert_dtypes(dtype_backend="pyarrow")
    else:
        frame = frame.convert_dtypes()
    net, plain = model(), frame.to_numpy(np.float32)
    assert np.array_equal(net.predict(frame), net.predict(plain))
    assert net.evaluate(frame, Y) == net.evaluate(plain, Y)
    losses = [model(seed=0).fit(data, Y, progress=False)["loss"] for data in (frame, plain)]
    assert losses[0] == losses[1]

"""Compiled methods: whatever is called in whatever order, numbers, errors and what Python knows are as without them."""

import ctypes
import gc
import inspect
import multiprocessing
import random
import subprocess
import sys
import threading
from collections import Counter
from functools import partial

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.errors import CalcError, ShapeError
from calcvm.ops.statement import PHASES
from calcvm.vm.calls import methods
from calcvm.vm.memory.epoch import Epoch
from calcvm.vm.run import job as J
from calcvm.vm.run.entry import METHODS

RNG = np.random.default_rng(0)
WRITTEN = {}  # the methods in Python, by name


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Compiled methods are there, from the first call on; a busy machine makes no call a long one."""
    if not methods.possible():
        pytest.skip("this interpreter's objects are laid out in another way")
    methods._calls = methods.WORTH
    model = network()
    model.step(*data(2))
    for name, entry in METHODS.items():
        assert not inspect.isfunction(vars(cv.Model)[name])
        WRITTEN[name] = inspect.unwrap(vars(cv.Model)[f"_calcvm_{entry}"])
    before, J.LONG_NS = J.LONG_NS, 10**9
    yield
    J.LONG_NS = before


def network(loss="softmax_cross_entropy", **options):
    options = {"batch_size": 8, "workers": 1, "optimizer": cv.Adam(0.02), **options}
    net = nn.Linear(7) >> nn.Tanh() >> nn.Dropout(0.2) >> nn.Linear(3)
    return cv.Model(net, input_shape=(5,), loss=loss, **options)


def data(n, dtype=np.float32, labels=np.int64):
    x = RNG.standard_normal((n, 5)) if np.dtype(dtype).kind == "f" else RNG.integers(0, 9, (n, 5))
    return x.astype(dtype), RNG.integers(0, 3, n).astype(labels)


def knows(model):
    """What Python knows of a model, and what it is."""
    resident, record = model, model.record
    with resident:
        resident.slot  # noqa: B018 (whoever uses the model looks what compiled calls have done)
        notes = (
            dict(record.held),
            dict(record.ran),
            record.arena,
            record.changed,
            set(record.open),
            set(record.graded),
        )
        return *notes, resident.image().tobytes()


def is_compiled(model, which=J.STEP):
    """Whether the last call was a compiled one: Python has not looked since."""
    calls = model.record.calls
    return calls is not None and calls._seen != calls.words[J.SEQ] == calls.words[J.DONE + 2 * which + 1]


def here(m, name):
    return getattr(m, name)


# ---------------------------------------------------------------- the same
ACTIONS = {
    "step": lambda m, way, x, y: way(m, "step")(x, y),
    "step of lists": lambda m, way, x, y: way(m, "step")(x.tolist(), y.tolist()),
    "step in another order": lambda m, way, x, y: way(m, "step")(np.asfortranarray(x), y),
    "predict": lambda m, way, x, y: way(m, "predict")(x).tobytes(),
    "predict out": lambda m, way, x, y: way(m, "predict")(x, out=np.empty((len(x), 3), m.program.dtype)).tobytes(),
    "predict many": lambda m, way, x, y: way(m, "predict")(np.repeat(x, 5, 0)).tobytes(),
    "run_steps": lambda m, way, x, y: [way(m, "step")(x, y), way(m, "run_steps")(1), way(m, "run_steps")(3)],
    "run_steps in an order": lambda m, way, x, y: [
        way(m, "step")(x, y), way(m, "run_steps")(2, order=["learn"]), way(m, "run_steps")(1), m["loss"].tobytes(),
    ],
    "evaluate": lambda m, way, x, y: way(m, "evaluate")(x, y),
    "evaluate many": lambda m, way, x, y: way(m, "evaluate")(np.repeat(x, 5, 0), np.repeat(y, 5)),
    "run": lambda m, way, x, y: same(way(m, "run")({"input": x})),
    "run and read": lambda m, way, x, y: [same(way(m, "run")({"input": x})), m["output"].tobytes(), m["input"].tobytes()],
    "fit": lambda m, way, x, y: m.fit(x, y, epochs=1, progress=False)["loss"],
    "set and run": lambda m, way, x, y: [*put(m, way, x, y), way(m, "run_steps")(2)],
    "set one": lambda m, way, x, y: [way(m, "step")(x, y), way(m, "__setitem__")("input", x[::-1]), way(m, "run_steps")(1)],
    "set and read": lambda m, way, x, y: [way(m, "__setitem__")("input", x), m["input"].tobytes()],
    "set in between": lambda m, way, x, y: [
        way(m, "step")(x, y), m.forward("learn"), way(m, "__setitem__")("input", x),
        refused(CalcError, lambda: m.backward("learn")),
    ],
    "set and go on": lambda m, way, x, y: [
        *put(m, way, x, y), m.forward("learn"), m.backward("learn"), m["loss"].tobytes()
    ],
    "run and go on": lambda m, way, x, y: [
        same(way(m, "run")({"input": x})), refused(CalcError, lambda: m.backward("learn")),
    ],
    "set a few": lambda m, way, x, y: [
        *put(m, way, x, y), way(m, "__setitem__")("target", y[:1]),
        refused(ShapeError, lambda: way(m, "run_steps")(1)) if len(x) > 1 else way(m, "run_steps")(1),
    ],
    "read": lambda m, way, x, y: [way(m, "step")(x, y), m["loss"].tobytes(), m["input"].tobytes()],
    "rate": lambda m, way, x, y: m.hyper.__setitem__("learning_rate", 0.01 * len(x)),
    "reset": lambda m, way, x, y: m.reset(len(x)),
    "forward and backward": lambda m, way, x, y: [
        way(m, "step")(x, y), m.forward("learn"), m.backward("learn"), m["loss"].tobytes()
    ],
    "a bad label": lambda m, way, x, y: refused(CalcError, lambda: way(m, "step")(x, y + 3)),
    "a bad label set": lambda m, way, x, y: refused(CalcError, lambda: way(m, "__setitem__")("target", y + 3)),
    "a bad label judged": lambda m, way, x, y: refused(CalcError, lambda: way(m, "evaluate")(x, y + 3)),
    "a bad name": lambda m, way, x, y: refused(CalcError, lambda: way(m, "__setitem__")("loss", x)),
    "a bad name run": lambda m, way, x, y: refused(CalcError, lambda: way(m, "run")({"inputs": x})),
    "a bad shape": lambda m, way, x, y: refused(ShapeError, lambda: way(m, "predict")(x[:, :4])),
    "what is gone": lambda m, way, x, y: [way(m, "predict")(x).tobytes(), refused(CalcError, lambda: way(m, "run_steps")(1))],
}  # fmt: skip


def put(m, way, x, y):
    return [way(m, "__setitem__")("input", x), way(m, "__setitem__")("target", y)]


def same(found):
    return {name: (array.shape, array.dtype, array.tobytes()) for name, array in found.items()}


def refused(error, call):
    with pytest.raises(error) as found:
        call()
    return str(found.value)


@pytest.mark.parametrize("options", [{}, {"dtype": "float64"}, {"workers": 2}, {"learning_batch": 8}], ids=str)
def test_calls_in_any_order_do_what_those_in_python_do(options, whole):
    def in_python(m, name):
        return lambda *args, **more: WRITTEN[name](m, *args, **more)

    rng, reached = random.Random(str(options)), Counter()
    for _ in range(60 if whole else 6):
        ours, theirs = network(**options), network(**options)
        for _ in range(60):
            name, n = rng.choice([*ACTIONS]), rng.choice([1, 2, 3, 8])
            given = data(n, rng.choice(["f4", "f8", "u1", "i4", "i8"]), rng.choice(["u1", "i4", "i8", "f4"]))
            found = ACTIONS[name](ours, here, *given)
            reached.update(which for which in range(J.N_METHODS) if is_compiled(ours, which))
            assert found == ACTIONS[name](theirs, in_python, *given), name
            if rng.random() < 0.3:
                assert knows(ours) == knows(theirs), name
        assert knows(ours) == knows(theirs)
    assert len(reached) == J.N_METHODS and min(reached.values()) > 3, reached


def test_values_of_all_types_are_converted_as_in_python():
    ours, theirs = network(), network()
    for dtype in ("f4", "f8", "u1", "i4", "i8"):
        for labels in ("u1", "i4", "i8"):
            for n in (1, 5, 8):
                for _ in range(3):
                    x, y = data(n, dtype, labels)
                    assert ours.step(x, y) == WRITTEN["step"](theirs, x, y)
                assert is_compiled(ours), (dtype, labels, n)


@pytest.mark.parametrize(
    "loss, wrong", [("binary_cross_entropy", 1.01), ("binary_cross_entropy", np.nan), ("mse", None)]
)
def test_targets_are_checked_as_in_python(loss, wrong):
    ours, theirs = network(loss), network(loss)
    for _ in range(3):
        x, t = data(8)[0], RNG.random((8, 3))
        assert ours.step(x, t) == WRITTEN["step"](theirs, x, t)
    assert is_compiled(ours)
    if wrong is not None:
        before = ours["input"].copy()
        t[7, 2] = wrong
        assert refused(CalcError, lambda: ours.step(x + 1, t)) == refused(
            CalcError, lambda: WRITTEN["step"](theirs, x + 1, t)
        )
        assert np.array_equal(ours["input"], before)


def test_wrong_arguments_are_told_as_in_python():
    model, (x, y), fixed = network(), data(8), np.zeros((8, 3), "f4")
    fixed.flags.writeable = False
    for _ in range(3):
        model.step(x, y)
        model.predict(x)
    for call, message in (
        (lambda: model.step(x), r"step takes 2 arrays \(input, target\), not 1"),
        (lambda: model.step(x, y, 3), r"step takes 2 arrays \(input, target\), not 3"),
        (lambda: model.step(*[x] * 40), r"step takes 2 arrays \(input, target\), not"),
        (lambda: model.step(x, z=y), "Model.step has no argument 'z'"),
        (lambda: model.predict(x, out=x), "out must be a C-contiguous"),
        (
            lambda: model.predict(x, out=np.zeros((8, 3), "f8")),
            r"out must be a C-contiguous, .*, not one of float64 \(8, 3\)",
        ),
        (lambda: model.predict(x, out=fixed), "not one that is read-only"),
        (lambda: model.predict(), "missing a required argument"),
        (lambda: model.step(x[:0], y[:0]), "the data are empty"),
        (lambda: model.step(x, y[:4]), "differ in their number of samples"),
        (lambda: model.step(np.repeat(x, 2, 0), np.repeat(y, 2)), "above the planned 8"),
        (lambda: model.step(None, y), "no array|cannot be used|rank 0"),
        (lambda: model.evaluate(x), "y: an array|no array|cannot be used|array"),
        (lambda: model.evaluate(x, y, y), "too many positional arguments"),
        (lambda: model.evaluate(x, y[:3]), "differ in their number of samples"),
        (lambda: model.run(x), "run: inputs"),
        (lambda: model.run({"input": x}, 3), "too many positional arguments"),
        (lambda: model.run({}), "placeholder 'input'"),
        (lambda: model.run({"input": x, "output": x}), "'output' is a result"),
        (lambda: model.__setitem__("input"), "missing a required argument"),
        (lambda: model.__setitem__(3, x), "no variable 3"),
        (lambda: model.__setitem__("input", x[:, :4]), "do not fit"),
        (lambda: model.__setitem__("input", np.repeat(x, 2, 0)), "above the planned 8"),
        (lambda: model.run_steps(0), "must be an integer >= 1"),
        (lambda: model.run_steps("3"), "must be an integer >= 1"),
        (lambda: model.run_steps(2**70), "must be an integer"),
        (lambda: cv.Model.step(3, x, y), "doesn't apply to a 'int' object"),
    ):
        with pytest.raises((CalcError, TypeError), match=message):
            call()
    assert model.step(x=x, y=y) > 0
    assert model.predict(X=x).shape == (8, 3)


def test_a_step_is_noted_also_where_a_prediction_came_after_it():
    model, (x, y) = network(learning_batch=8), data(8)
    for _ in range(3):
        model.step(x, y)
        model.predict(x)
    for _ in range(3):
        model.step(x, y)
        model.forward("learn")
        model.backward("learn")
        assert "learn" in model.record.open
        model.step(x, y)
        model.predict(x)
        assert is_compiled(model, J.PREDICT)
        assert not knows(model)[4] and not model.adding


def test_a_trap_is_raised_once():
    model, (x, y) = network(), data(8)
    for call in (
        lambda: model.step(x, y), lambda: model.predict(x), lambda: model.run_steps(1), model.bind(x, y),
        lambda: model.evaluate(x, y), lambda: model.run({"input": x}),
    ):  # fmt: skip
        for _ in range(3):
            model.step(x, y)
            model.predict(x)
            model.evaluate(x, y)
            model.run({"input": x})
        model.step(x, y)
        assert is_compiled(model)
        view, specs = model.elements, map(model.program.spec, range(len(model.program.rows)))
        row = [spec.name for spec in specs].index("softmax_cross_entropy_fwd")
        model.step(x, y)  # Python has looked
        view[:2] = 1, row  # as a kernel does
        with pytest.raises(cv.errors.Trap, match="a label of 'target' is not"):
            call()
        with pytest.raises(CalcError, match="has not been run"):
            model["loss"]
        assert np.isfinite(model.step(x, y))


def test_a_method_taken_before_the_first_call_is_the_one_taken_later():
    """Of models from anywhere; and functions that were taken from the class before there was a model."""
    code = """
import copy, io
import numpy as np, calcvm as cv
from calcvm import nn
from calcvm.vm.calls import methods
from calcvm.vm.run.entry import METHODS

class Own(cv.Model):
    def step(self, x, y):
        return super().step(x, y)

predict, step = cv.Model.predict, cv.Model.step  # functions written in Python
net, given = nn.Linear(3), {"input_shape": (4,), "optimizer": "adam", "batch_size": 8}
x, y, file = np.zeros((1, 4), "float32"), np.zeros(1, "int64"), io.BytesIO()
model = cv.Model(net, **given)
early = {"made": (model, {name: getattr(model, name) for name in METHODS})}
model.save(file)
file.seek(0)
fleet = cv.Fleet(model.program.heap_bytes * 8)
handle = fleet.add(model.program, data=(np.repeat(x, 8, 0), np.repeat(y, 8)))
others = {
    "loaded": cv.load(file), "copied": copy.copy(model), "in a heap": model.copy(heap=cv.CalcHeap("1 MiB")),
    "of a fleet": handle.model, "of a class": Own(net, **given),
}
early |= {of: (m, {name: getattr(m, name) for name in METHODS}) for of, m in others.items()}

def use(taken):
    taken["step"](x, y), taken["predict"](x), taken["evaluate"](x, y), taken["run"]({"input": x})
    taken["__setitem__"]("input", x), taken["__setitem__"]("target", y), taken["run_steps"](1)

for _, taken in early.values():
    for _ in range(methods.WORTH):
        use(taken)
seen, counted = [], 0
for name, called in METHODS.items():
    written = getattr(cv.Model, "_calcvm_" + called)
    setattr(cv.Model, "_calcvm_" + called, lambda *a, w=written, **k: seen.append(1) or w(*a, **k))
for of, (m, taken) in early.items():
    for name in METHODS:
        assert taken[name] == getattr(m, name), (of, name)
        counted += 1
    for _ in range(10):
        use(taken)
    assert not seen, (of, len(seen))
    predict(m, x), step(m, x, y)
    assert not seen, of
    taken["predict"]([[0, 0, 0, 0]])  # Python's
    assert len(seen) == 1
    seen.clear()
print(counted)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True)
    assert done.stdout == "36\n"


def test_means_are_rounded_as_over_whole_data_sets():
    ours, theirs = network("mse", dtype="float64"), network("mse", dtype="float64")
    for _ in range(200):
        for n in (3, 5, 6, 7):
            x, t = data(n)[0], RNG.standard_normal((n, 3))
            assert ours.evaluate(x, t) == WRITTEN["evaluate"](theirs, x, t)
    assert is_compiled(ours, J.EVALUATE)


@pytest.mark.parametrize("value", [0.0, -0.0, np.nan, 1e-45, -3e38], ids=str)
def test_a_loss_is_the_one_in_python_whatever_it_is(value):
    """Of a step and of several, to the bit: 0 keeps its sign."""
    g = cv.CalcGraph()
    x, w = g.placeholder("x", (None, 1)), g.parameter("w", (1, 1), init=cv.init.Constant(1.0))
    with g.path("learn", backward=True) as learn:
        learn.minimize(cv.max(x * w), cv.SGD(0.0))
    with g.path("predict") as predict:
        predict.output = x * w
    model, seen = cv.Model(g, batch_size=1, workers=1), set()
    for call in (WRITTEN["step"], cv.Model.step, cv.Model.step):
        seen.add(np.float64(call(model, np.full((1, 1), value, np.float32))).tobytes())
    seen |= {np.float64(call(model, 1)).tobytes() for call in (WRITTEN["run_steps"], cv.Model.run_steps)}
    assert is_compiled(model, J.STEP) and len(seen) == 1


def of_two_inputs():
    """A model over a graph with two inputs, two outputs and a figure; the target comes first."""
    g = cv.CalcGraph()
    t, a, b = (g.placeholder(name, (None, size)) for name, size in (("t", 2), ("a", 3), ("b", 4)))
    left, right = nn.Linear(2), nn.Linear(2)
    with g.path("learn", backward=True) as learn:
        loss = cv.mse(left.build(a, "left.", True) + right.build(b, "right.", True), t)
        learn.minimize(loss, cv.SGD(0.1))
    with g.path("predict") as predict:
        y, z = left.build(a, "left.", False), right.build(b, "right.", False)
        predict.output = y, z
        error = cv.mse(y + z, t)
    assert error.name == "error"
    return cv.Model(g, batch_size=8, workers=1)


def test_several_inputs_and_outputs_are_as_in_python():
    ours, theirs = of_two_inputs(), of_two_inputs()
    for n in (1, 8, 3, 8, 3, 8):
        t, a, b = (RNG.standard_normal((n, size)).astype("f4") for size in (2, 3, 4))
        for _ in range(2):
            assert ours.step(t, a, b) == WRITTEN["step"](theirs, t, a, b)
        for once in ((a, b), t), ({"b": b, "a": a}, {"t": t}), ((a.tolist(), b), t), ((a, np.asfortranarray(b)), t):
            assert ours.step(*once) == WRITTEN["step"](theirs, t, a, b)
            assert is_compiled(ours)
        for given in (a, b), {"b": b, "a": a}, [a, b]:
            assert same(ours.predict(given)) == same(WRITTEN["predict"](theirs, given))
        for given in (a, b), {"b": b, "a": a}:
            assert [*ours.predict(given)] == ["y", "z"] and is_compiled(ours, J.PREDICT)
        for given in (a, b), {"b": b, "a": a}, [a.tolist(), b]:
            assert ours.evaluate(given, t) == WRITTEN["evaluate"](theirs, given, t)
            assert ours.evaluate(given, t) == WRITTEN["evaluate"](theirs, given, t)
            assert is_compiled(ours, J.EVALUATE)
        for wrong in ((a, b), t, t), (a, b, t), ((a, b),), (a, t):
            assert refused((CalcError, TypeError), lambda: ours.evaluate(*wrong))  # noqa: B023
        assert same(ours.run({"b": b, "a": a})) == same(WRITTEN["run"](theirs, {"b": b, "a": a}))
        ours["a"], theirs["a"] = a + 1, a + 1
        assert same(ours.run({"b": b})) == same(WRITTEN["run"](theirs, {"b": b}))
        for model in ours, theirs:
            with pytest.raises(TypeError):
                model.predict(a, b)
            for wrong in (a,), (a, b, a), {"a": a}, {"a": a, "c": b}, {"a": a, 3: b}, a:
                assert refused(CalcError, lambda: model.predict(wrong))  # noqa: B023
            out = {"y": np.empty((n, 2), "f4")}
            assert model.predict((a, b), out=out)["y"] is out["y"]
            with pytest.raises(ShapeError, match="different sizes|number of samples"):
                model.run({"a": a, "b": np.zeros((2, 4))})
        assert same(ours.run({"b": b, "a": a})) == same(WRITTEN["run"](theirs, {"b": b, "a": a}))
        assert is_compiled(ours, J.RUN)
        assert knows(ours) == knows(theirs)


# ---------------------------------------------------------------- forms of arguments
class Foreign:
    """Another library's array."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


class Kept(np.ndarray):
    """A subclass, as `numpy.memmap` is."""


def read_only(a):
    a = a.copy()
    a.flags.writeable = False
    return a


def torch_tensor(a):
    return pytest.importorskip("torch").tensor(a)


FORMS = {
    "plain": lambda a: a, "list": lambda a: a.tolist(), "tuple": lambda a: tuple(a.tolist()), "rows": lambda a: [*a],
    "float64": lambda a: a.astype("f8"), "float16": lambda a: a.astype("f2"), "int8": lambda a: a.astype("i1"),
    "uint64": lambda a: a.astype("u8"), "big-endian": lambda a: a.astype(a.dtype.newbyteorder(">")),
    "strided": lambda a: np.repeat(a, 2, -1)[..., ::2], "backwards": lambda a: a[::-1].copy()[::-1],
    "Fortran": np.asfortranarray, "read only": read_only, "subclass": lambda a: a.view(Kept), "foreign": Foreign,
    "masked": np.ma.array, "tensor": torch_tensor, "tensor, strided": lambda a: torch_tensor(np.repeat(a, 2, -1))[..., ::2],
}  # fmt: skip


def typed():
    """A model of data that lie in the heap as they are."""
    g = cv.CalcGraph()
    x, t, known = (
        g.placeholder(n, (None, *s), dtype=d)
        for n, s, d in (("x", (5,), "uint8"), ("t", (), "int32"), ("known", (), "bool"))
    )
    layer = nn.Linear(3)
    with g.path("learn", backward=True) as learn:
        y = layer.build(x / 9, "layer", True)
        learn.minimize(cv.mean(cv.where(known, -cv.pick(cv.log_softmax(y), t), 0.0)), cv.SGD(0.1), output=y)
    with g.path("predict") as predict:
        predict.output = y = layer.build(x / 9, "layer", False)
        error = cv.mean(cv.where(known, -cv.pick(cv.log_softmax(y), t), 0.0))
    assert error.name == "error"
    return cv.Model(g, batch_size=8, workers=1)


MODELS = {
    "network": (network, lambda x, t: (x, (t,))),
    "float64, a team": (lambda: network(dtype="float64", workers=2), lambda x, t: (x, (t,))),
    "preprocess": (lambda: network(preprocess=nn.Scale(0.5, 1.0) >> nn.Tanh()), lambda x, t: (x, (t,))),
    "weights": (lambda: network(sample_weight=True), lambda x, t: (x, (t, np.ones(len(t), "f4")))),
    "types": (typed, lambda x, t: (x, (t, t == 1))),
}  # fmt: skip


def exact(found):
    return (
        same(found) if isinstance(found, dict) and isinstance(next(iter(found.values())), np.ndarray) else repr(found)
    )


@pytest.mark.parametrize("of", MODELS)
def test_arguments_of_any_form_stay_in_compiled_calls(of):
    """Each form of each method's arguments: as in Python, and without it from the second call on."""
    make, arranged = MODELS[of]
    ours, theirs, compiled = make(), make(), 0
    for form, change in FORMS.items():
        for n in (8, 3):
            x, targets = arranged(data(n, "u1")[0].astype("f4"), data(n)[1])
            x = change(x.astype("u1") if of == "types" else x)
            targets = [change(t) if t.dtype != bool else t for t in targets]
            judged = targets if of == "types" else targets[:1]
            name = ours.roles.inputs[0]
            calls = [
                ("step", (x, *targets), {}),
                ("evaluate", (x, judged[0] if len(judged) == 1 else tuple(judged)), {}),
                *(("predict", *given) for given in (((x,), {}), ((), {"X": x}))),
                *(("run", *given) for given in ((({name: x},), {}), ((), {"inputs": {name: x}}))),
                ("__setitem__", (name, x), {}),
            ]
            if len(targets) == 1:
                calls += [("step", (x,), {"y": targets[0]}), ("evaluate", (), {"X": x, "y": targets[0]})]
            for method, given, named in calls:
                for _ in range(3):
                    found = getattr(ours, method)(*given, **named)
                    assert exact(found) == exact(WRITTEN[method](theirs, *given, **named)), (form, method)
                words = ours.record.calls
                assert words._seen != words.words[J.SEQ], (form, method)  # Python has not looked since
                which = getattr(J, method.upper(), None)
                assert which is None or is_compiled(ours, which), (form, method)
                compiled += 1
            assert knows(ours) == knows(theirs)
    assert compiled == len(FORMS) * 2 * (9 if of in ("network", "float64, a team", "preprocess") else 7)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("preprocess", [None, nn.Scale(0.5)])
def test_more_samples_than_the_batch_are_as_in_python(workers, preprocess):
    ours, theirs = (network(preprocess=preprocess, workers=workers) for _ in range(2))

    def both(method, *given, **named):
        wanted = exact(WRITTEN[method](theirs, *given, **named))
        for _ in range(100):  # the first may have taken so long that the next are made in Python
            assert exact(getattr(ours, method)(*given, **named)) == wanted
            if workers == 2 or is_compiled(ours, getattr(J, method.upper())):
                return
        raise AssertionError("no call was compiled")

    for n in (9, 16, 17, 40, 77):
        for dtype in ("f4", "f8", "u1"):
            x, y = data(n, dtype)
            both("predict", x)
            both("evaluate", x, y)
            found = ours.predict(x, out=np.empty((n, 3), "f4"))
            assert exact(found) == exact(WRITTEN["predict"](theirs, x))
            y[-1] = 3
            told = [
                refused(CalcError, partial(evaluate, x, y))
                for evaluate in (ours.evaluate, partial(WRITTEN["evaluate"], theirs))
            ]
            assert told[0] == told[1]
    assert knows(ours) == knows(theirs)
    x = data(40)[0]
    wanted = ours.predict(x)
    over = np.concatenate([x, x])  # results over the samples that they are made from
    assert np.array_equal(ours.predict(over[:40], out=over[:24].reshape(40, 3)), wanted)
    for call in (
        lambda: ours.step(x, np.zeros(40)),
        lambda: ours.run({"input": x}),
        lambda: ours.__setitem__("input", x),
    ):
        assert "above the planned 8" in refused(CalcError, call)


def test_they_look_like_what_they_stand_for():
    assert [*inspect.signature(cv.Model.step).parameters] == ["self", "x", "y", "more", "path"]
    assert "One training step" in cv.Model.step.__doc__ and "One training step" in network().step.__doc__

    class Loud(cv.Model):
        def step(self, x, y):
            return -super().step(x, y)

    loud = Loud(nn.Linear(3), input_shape=(5,), optimizer="adam", batch_size=8)
    plain = cv.Model(nn.Linear(3), input_shape=(5,), optimizer="adam", batch_size=8)
    for _ in range(4):
        x, y = data(8)
        assert loud.step(x, y) == -plain.step(x, y)


class Words(cv.Model):
    """A class with names that calcvm might have for its own."""

    def __init__(self):
        super().__init__(nn.Linear(3), input_shape=(5,), optimizer="adam", batch_size=8, workers=1)
        self._words, self.words, self.seen = ["the", "cat"], {}, []

    def _step(self):
        raise AssertionError

    _predict = _evaluate = _run_steps = _set_item = _run_by_name = _trapped = _bound = _step


def test_a_users_class_may_have_any_names():
    for _ in range(2):
        model, (x, y) = Words(), data(8)
        for _ in range(4):
            for given in ((x, y), (x.tolist(), y.tolist())):  # plain ones, and others that compiled code hands on
                model.step(*given), model.evaluate(*given), model.predict(given[0]), model.run({"input": given[0]})
                model["input"], model["target"] = given
                model.run_steps(1)
        assert model._words == ["the", "cat"]


def test_a_bound_step_is_the_users_own_where_there_is_one():
    class Halved(cv.Model):
        def step(self, x, y):
            return super().step(x / 2, y)

    ours, twin = (Halved(nn.Linear(3), input_shape=(5,), optimizer="adam", batch_size=8) for _ in range(2))
    x, y = data(8)
    bound = ours.bind(x, y)
    for _ in range(4):
        assert bound() == twin.step(x, y)
    plain = network()
    with pytest.raises(TypeError, match="a bound step takes nothing"):
        plain.bind(x, y)(3)
    with pytest.raises(TypeError, match="a bound step takes nothing"):
        plain.bind(x, y)(x=3)


def test_what_somebody_puts_in_the_place_of_a_method_stays():
    code = """
import functools, unittest.mock
import numpy as np, calcvm as cv
from calcvm import nn
from calcvm.vm.calls import methods
model = cv.Model(nn.Linear(3), input_shape=(4,), optimizer="adam", batch_size=8)
x, y, seen, step = np.zeros((1, 4), "float32"), np.zeros(1, "int64"), [], cv.Model.step

@functools.wraps(step)
def traced(self, *given):
    seen.append(1)
    return step(self, *given)

cv.Model.step = traced
with unittest.mock.patch.object(cv.Model, "predict", lambda self, x: 7):
    for _ in range(2 * methods.WORTH):
        model.step(x, y)
        assert model.predict(x) == 7
assert len(seen) == 2 * methods.WORTH and model.hyper["t"] == len(seen)
bound = model.bind(x, y)
bound()
assert len(seen) == 2 * methods.WORTH + 1
assert model.predict(x).shape == (1, 3) and model.evaluate(x, y)["loss"] > 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_garbage_collector_may_run_any_code_in_the_middle_of_a_call():
    """Where an answer is a dict: its finalizers are run before anything is looked at."""
    model, (x, y), hits = network(), data(8), []
    other = x[::-1].copy()

    class Bomb:
        def __init__(self):
            self.me = self

        def __del__(self):
            hits.append(phase)
            model.evaluate(other, y)
            model.run({"input": other})

    for _ in range(3):
        wanted, found = model.evaluate(x, y), model.run({"input": x})
    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(1, 1, 1)
    try:
        for _ in range(40):
            phase = "before"
            Bomb()
            phase = "evaluate"
            assert model.evaluate(x, y) == wanted
            Bomb()
            phase = "run"
            assert same(model.run({"input": x})) == same(found)
            phase = "after"
    finally:
        gc.set_threshold(*before)
    assert hits


# ---------------------------------------------------------------- bound
def test_a_bound_step_reads_what_its_arrays_hold():
    model, twin, (x, y) = network(), network(), data(8)
    step = model.bind(x, y)
    for k in range(6):
        x[:], y[:] = data(8)
        assert step() == WRITTEN["step"](twin, x, y), k
        assert is_compiled(model) == (k > 1)
    y[3] = 5
    with pytest.raises(CalcError, match="labels must be integers"):
        step()
    with pytest.raises(CalcError, match="C-contiguous array"):
        model.bind(x.tolist(), y)
    with pytest.raises(ShapeError):
        model.bind(x[:, :3].copy(), y)
    assert knows(model) == knows(twin)


# ---------------------------------------------------------------- models that come and go
@pytest.mark.parametrize("room", [1, 2])
def test_models_that_take_turns_in_a_heap(room, whole):
    """Switched out in the middle of compiled calls, and in again: with the bits of models that never left."""
    alone = [network(seed=k) for k in range(3)]
    heap = cv.CalcHeap(room * -(-alone[0].program.heap_bytes // 64) * 64)
    models = [heap.create(alone[0].program, seed=k) for k in range(3)]
    rng, reached = random.Random(room), 0
    for _ in range(2000 if whole else 300):
        k, (x, y) = rng.randrange(3), data(8)
        for _ in range(rng.choice([1, 4])):
            assert models[k].step(x, y) == alone[k].step(x, y)
            reached += is_compiled(models[k])
            assert np.array_equal(models[k].predict(x), alone[k].predict(x))
    assert reached > 100
    heap.close()
    with pytest.raises(CalcError, match="closed"):
        models[0].step(x, y)


def test_a_model_used_by_compiled_calls_is_not_the_oldest():
    heap = cv.CalcHeap(2 * -(-network().program.heap_bytes // 64) * 64)
    used, other, third = (heap.create(network().program, seed=k) for k in range(3))
    used.step(*data(8)), used.step(*data(8))
    other.step(*data(8))
    used.step(*data(8))
    assert is_compiled(used)
    switches = heap.stats.switches
    third.step(*data(8))
    used.step(*data(8))
    assert heap.stats.switches == switches + 1


def test_what_compiled_calls_changed_is_written(tmp_path):
    with cv.CalcHeap("1 MiB", cv.FileStore(tmp_path, durable=False)) as heap:
        model = heap.create(network().program, seed=1, name="model")
        for _ in range(3):
            model.step(*data(8))
        model.commit()
        model.step(*data(8))
        assert is_compiled(model)
        found = {name: value.tobytes() for name, value in model.parameters.items()}
    with cv.CalcHeap("1 MiB", cv.FileStore(tmp_path, durable=False)) as heap:
        assert {name: value.tobytes() for name, value in heap.open("model").parameters.items()} == found


# ---------------------------------------------------------------- threads and processes
@pytest.mark.parametrize("n_models", [1, 2])
def test_threads_count_each_step(n_models, whole):
    """Of models whose only parameter falls by 1 a step, with predictions and fits between."""
    models = [cv.Model(nn.Linear(1, bias=False), input_shape=(1,), loss=lambda o, t: cv.mean(o - t), optimizer=cv.SGD(1.0),
                       batch_size=2, workers=1, target_shape=(1,)) for _ in range(n_models)]  # fmt: skip
    one, start, steps = np.ones((2, 1), "f4"), threading.Barrier(4), 4000 if whole else 400
    begun = [float(m.predict(one)[0, 0]) for m in models]
    wrong, before = [], sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def work(k):
        model = models[k % n_models]
        start.wait()
        for i in range(steps):
            model.step(one, one)
            if i % 7 == k:
                model.predict(one)
            if i % 97 == k:
                model.fit(one, one, epochs=1, progress=False)

    def guarded(k):
        try:
            work(k)
        except BaseException as error:
            wrong.append(error)
            start.abort()

    threads = [threading.Thread(target=guarded, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    sys.setswitchinterval(before)
    assert not wrong, wrong
    fits = [sum(i % 97 == k for i in range(steps)) for k in range(4)]
    for j, model in enumerate(models):
        taken = sum(steps + fits[k] for k in range(4) if k % n_models == j)
        assert float(model.predict(one)[0, 0]) == pytest.approx(begun[j] - taken, abs=1e-2)


def test_models_of_one_program_share_what_compiled_code_knows(whole):
    """Batches whose rows take the same place, from threads that have a model each: right answers, all of them."""
    models = [network(batch_size=40) for _ in range(4)]
    assert len({id(m.loaded.sheet) for m in models}) == 1
    given = {n: data(n) for n in (1, 9, 17, 25, 33)}
    wanted = {n: models[0].predict(x.tolist()) for n, (x, _) in given.items()}
    wrong, before = [], sys.getswitchinterval()

    def work(k):
        rng = random.Random(k)
        for _ in range(4000 if whole else 300):
            n = rng.choice([*given])
            found = models[k].predict(given[n][0])
            if not np.array_equal(found, wanted[n]) or models[k].evaluate(*given[n])["loss"] <= 0:
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    sys.setswitchinterval(1e-5)
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    sys.setswitchinterval(before)
    assert not wrong


def _in_a_child(model, x, y, answer):
    answer.put([model.step(x, y) for _ in range(4)])


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # JAX's, where another test has imported it
@pytest.mark.parametrize("workers", [1, 2])
def test_a_forked_child_goes_on_by_itself(workers):
    model, twin, (x, y) = network(workers=workers), network(workers=workers), data(8)
    for _ in range(3):
        assert model.step(x, y) == twin.step(x, y)
    context = multiprocessing.get_context("fork")
    answer = context.Queue()
    child = context.Process(target=_in_a_child, args=(model, x, y, answer))
    child.start()
    found = answer.get(timeout=60)
    child.join()
    assert found == [twin.step(x, y) for _ in range(4)]
    assert found == [model.step(x, y) for _ in range(4)]


# ---------------------------------------------------------------- nothing is lost, nothing is kept
def test_no_reference_and_no_memory_is_lost(whole):
    model, (x, y) = network(), data(8)
    step, out, inputs = model.bind(x, y), np.empty((8, 3), "f4"), {"input": x}
    calls = {
        "step": lambda: model.step(x, y), "predict": lambda: model.predict(x), "out": lambda: model.predict(x, out=out),
        "bound": step, "run_steps": lambda: model.run_steps(1), "lists": lambda: model.step([[1, 2, 3, 4, 5]], [1]),
        "keyword": lambda: model.step(x, y=y), "few": lambda: model.predict(x[:3]),
        "evaluate": lambda: model.evaluate(x, y), "run": lambda: model.run(inputs), "set": lambda: put(model, here, x, y),
        "run otherwise": lambda: model.run({"input": x}),
    }  # fmt: skip
    watched = (
        inputs,
        x,
        y,
        out,
        model,
        "input",
        "target",
        "output",
        "loss",
        np.dtype("f4"),
        np.dtype("f8"),
        np.dtype("i8"),
        None,
        "out",
        np.ndarray,
    )
    for name, call in calls.items():
        model.step(x, y)
        for _ in range(5):
            call()
        gc.collect()
        counts, n = [sys.getrefcount(o) for o in watched], 2_500_000 if whole and name != "lists" else 500
        blocks = sys.getallocatedblocks()
        for _ in range(n):
            call()
        gc.collect()
        assert sys.getallocatedblocks() - blocks < 100, name  # the interpreter's own come and go by 50
        assert max(abs(sys.getrefcount(o) - c) for o, c in zip(watched, counts)) < 10, name


def test_a_model_goes_when_it_is_not_used_any_more():
    model, (x, y) = network(), data(8)
    for _ in range(4):
        model.step(x, y)
    gone, words = [], model._calcvm_words
    import weakref

    weakref.finalize(model, gone.append, 1)
    del model
    assert gone == [1] and words[J.ARMED] in (0, 1)


# ---------------------------------------------------------------- where they cannot be
@pytest.mark.parametrize("what", ["_arrays_are_known", "_slots_are_known"])
def test_an_interpreter_laid_out_otherwise_stays_with_python(what, monkeypatch):
    monkeypatch.setattr(methods, what, lambda: False)
    methods.possible.cache_clear()
    try:
        assert not methods.possible()
        model = network()
        for _ in range(6):
            model.step(*data(8))
        assert model.record.calls is None
    finally:
        methods.possible.cache_clear()


def test_long_calls_are_made_in_python(monkeypatch):
    model, (x, y) = network(), data(8)
    for _ in range(4):
        model.step(x, y)
    sheet = model.loaded.sheet.words
    steps = 4_000_000 // int(sheet[J.METHODS + J.ROWS_OF + 3 * J.KEPT_ROWS + 2])  # of the planned batch
    model.run_steps(steps)
    assert not is_compiled(model) and model.hyper["t"] == 4 + steps
    monkeypatch.setattr(J, "LONG_NS", 0)
    slow = network()
    for _ in range(4):
        slow.step(x, y)
    assert not is_compiled(slow)


def test_short_predictions_stay_on_one_worker():
    model, x = network(workers=2, batch_size=20_000), RNG.standard_normal((20_000, 5)).astype("f4")
    brief = model.loaded.brief("predict", ("forward",))
    assert 100 < brief < 19_000
    whole = model.predict(x)
    for n, team in ((1, 1), (brief, 1), (brief + 1, 2), (20_000, 2), (2, 1)):
        run = Epoch(model, {"input": x[:n]}, "predict", outputs={"output": np.empty((n, 3), "f4")})
        assert run._workers == team
        for _ in range(3):
            assert np.array_equal(model.predict(x[:n]), whole[:n])
        if is_compiled(model, J.PREDICT):  # the largest take so long that they are made in Python
            assert model.slot.job[J.TEAM] in {1, team}  # a team whose workers find no cores goes on alone
    assert model.loaded.brief("learn", PHASES) < brief


def test_what_is_read_of_the_interpreter_is_there():
    assert methods.possible()
    assert ctypes.sizeof(ctypes.c_void_p) == 8

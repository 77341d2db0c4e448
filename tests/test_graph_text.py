"""A graph's text is read back: the same program, the same text; what is no graph's text is refused where it is wrong."""

from __future__ import annotations

import random
import re
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.graph import CalcGraph, apply
from calcvm.graph_text.parse import TOKEN
from calcvm.graph_text.words import CONSTANTS, STATES
from calcvm.ops import OPS, layouts
from calcvm.ops.types import FLOAT, VARIABLES
from calcvm.vm.program.documents import STARTS, _start
from tests.kinds import graphs
from tests.kinds.networks import network, shape_graph
from tests.kinds.placed import OPERATORS, Placed
from tests.kinds.wild import wild

SAMPLE, WHOLE = 40, 300  # random graphs
MUTATED, MUTATED_WHOLE = 500, 20_000  # texts


def facts(graph: CalcGraph) -> Any:
    """All that a graph holds: what decides its program, and what it is called in."""
    unnamed = {name: v.unnamed for name, v in graph.variables.items()}
    adapts = {scope: (v.name, axis) for scope, (v, axis) in graph.adapts.items()}
    optimizers = [None if p.optimizer is None else p.optimizer.slots() for p in graph.paths.values()]
    states = {key: v.name for key, v in graph.states.items()}
    return graph.form, unnamed, adapts, optimizers, states, graph._streams, graph.layer_results().keys()


def hash_of(graph: CalcGraph, **options: Any) -> str:
    """That of its program, or why there is none."""
    try:
        return cv.compile(graph, **{"batch_size": 3, "workers": 1, **options}).hash
    except cv.CalcError as error:
        return f"{type(error).__name__}: {error}"


def read_back(graph: CalcGraph, **options: Any) -> CalcGraph:
    """The graph of its text, which is the same in every respect, and the same program."""
    text = graph.text()
    read = cv.read_graph(text)
    assert facts(read) == facts(graph), text
    assert read.text() == text
    assert hash_of(read, **options) == hash_of(graph, **options), text
    return read


# ---------------------------------------------------------------- round trips
@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_is_read_back(name: str, whole: bool) -> None:
    examples = [e for e in OPS[name].examples if not e.bench]
    for example in examples if whole else examples[:2]:
        assert len(hash_of(read_back(Placed(OPS[name], example).graph()))) == 64


def test_every_example_of_the_table_is_read_back() -> None:
    """Of types, and of operators that are rows of training, too; of those that have no input there is no graph."""
    done = Counter[str]()
    for spec in OPS.values():
        for example in spec.examples:
            g, inputs = CalcGraph(), []
            with g.path("p", backward=True, adopt=False):
                for slot, shape in zip(spec.inputs, example.shapes):
                    of = spec.types.get(slot, FLOAT)
                    type_ = example.types.get(of, FLOAT if of in VARIABLES else of)
                    sizes = layouts.seen(shape, spec.layouts.get(slot, ""))
                    if slot in spec.updates and None not in sizes:
                        inputs.append(g.buffer(slot, sizes))
                    elif None in sizes or type_ != FLOAT:
                        inputs.append(g.placeholder(slot, sizes, type_))
                    else:
                        inputs.append(g.parameter(slot, sizes))
                if not inputs or slot in spec.updates and None in example.shapes[-1]:
                    done["refused"] += 1
                    continue
                apply(spec.name, *inputs, **example.attrs)
            read = cv.read_graph(g.text())
            assert facts(read) == facts(g) and read.text() == g.text(), spec.name
            done["read"] += 1
    assert done["read"] > 900 and done["refused"] < 10, done


RANDOM: dict[str, Callable[[int], CalcGraph]] = {
    "wild": lambda seed: wild(seed).graph,
    "wild names": lambda seed: wild(seed, odd=True).graph,
    "shapes": lambda seed: shape_graph(random.Random(seed)),
    "networks": lambda seed: network(random.Random(seed))[0],
    "twins": lambda seed: graphs.generate(seed).build(),
}


@pytest.mark.parametrize("kind", RANDOM)
def test_random_graphs_are_read_back(kind: str, whole: bool) -> None:
    done = Counter[bool]()
    for seed in range(WHOLE if whole else SAMPLE // len(RANDOM)):
        read = read_back(RANDOM[kind](seed), accumulate=seed % 2 == 0)
        done[len(hash_of(read, accumulate=seed % 2 == 0)) == 64] += 1
    print(f"{kind}: {done[True]} programs read back, {done[False]} graphs that none is compiled of")
    assert done[True] > 0.9 * done.total()


ZOO = {"lenet": (1, 28, 28), "resnet18": (3, 32, 32), "unet": (1, 32, 32)}
OTHERS = {name: (3, 64, 64) for name in cv.zoo.IMAGES if name not in ZOO} | {"overfeat": (3, 241, 241)}


def test_networks_of_the_zoo_are_read_back(whole: bool) -> None:
    for name, shape in {**ZOO, **(OTHERS if whole else {})}.items():
        net = getattr(cv.zoo, name)(width=8, size=max(shape))
        loss = "mse" if name == "unet" else "softmax_cross_entropy"
        graph = cv.build_graph(net, shape, loss, cv.SGD(0.1, momentum=0.9))
        assert len(hash_of(read_back(graph, batch_size=2))) == 64, name


def everything() -> CalcGraph:
    """Of layers: augmentation, statistics of data and batches, dropout, weights, rates, a schedule that is a function."""
    net = nn.Standardize() >> nn.Conv2d(4, 3, padding=1) >> nn.BatchNorm()
    net = net >> nn.Residual(nn.Conv2d(4, 3, padding=1, regularizer=cv.L1(0.1)) >> nn.ReLU()) >> nn.Dropout2d(0.3)
    net = (
        net
        >> nn.Flatten()
        >> nn.Dropout(0.2)
        >> nn.Linear(3, trainable=False)
        >> nn.Linear(3, regularizer=cv.Elastic(1e-3, 0.5))
    )
    schedule = cv.Sampled(lambda k: 0.5**k if k else 1, 5, every=2, warmup_steps=3)
    optimizer = cv.SGD(
        0.1, momentum=0.9, nesterov=True, schedule=schedule, no_decay="1d", weight_decay=0.1, clip_norm=1
    )
    return cv.build_graph(
        net, (2, 8, 8), "softmax_cross_entropy", optimizer, preprocess=nn.Scale(0.5) >> nn.RandomCrop(8, padding=1), rates={".bias": 2.0},
        input_dtype="uint8", sample_weight=True, train_metrics=True, ignore_index=2,
    )  # fmt: skip


def looks() -> CalcGraph:
    """Gradients as variables, several outputs, channels last, a label of integers."""
    g = CalcGraph()
    x, c = g.placeholder("x", (None, 8, 8, 3), channels_last=True), g.placeholder("c", (None,), "int64")
    with g.path("see") as see:
        maps = cv.relu(cv.conv2d(x, g.parameter("W", (4, 3, 3, 3))))
        scores = cv.flatten(cv.global_avg_pool(maps))
        dW = cv.gradient(cv.sum(scores), g.variables["W"])
        see.output = cv.grad_cam(scores, c, maps), cv.saliency(scores, c, x), dW
    return g


def shared() -> CalcGraph:
    """A network twice in a path, and in another one; parameters to train, by name; a view, a result of another path."""
    g = CalcGraph()
    x, z = g.placeholder("x", (None, 3)), g.placeholder("z", (None, 3))
    net = nn.Linear(4) >> nn.ReLU() >> nn.Linear(1)
    with g.path("learn", backward=True) as learn:
        a, b = net.build(x), net.build(z)
        loss = cv.mean(a) - cv.mean(cv.stop_gradient(b)) + cv.mean(b[:, 0] * 0.3)
        schedule = cv.CosineRestarts(10, warmup_steps=3)
        learn.minimize(
            loss, cv.Lion(clip_value=1.0, schedule=schedule), (a, x), ["linear_2.weight"], {"linear_2.": 0.5}
        )
    with g.path("judge"):
        cv.rmse(a, b)
    with g.path("predict") as predict:
        predict.output = net.build(x, "", False)
    return g


def interleaved() -> CalcGraph:
    """A path that was extended by what a later one makes, and reads a parameter that the later one has read before."""
    g = CalcGraph()
    x, W = g.placeholder("x", (None, 3, 8, 8)), g.parameter("W", (4, 3, 3, 3))
    with g.path("first"):
        g.constant("k", np.arange(3), "int8")
    with g.path("second"):
        y = cv.conv2d(x, W)
    with g.extend("first"):
        cv.mean(W * 2.0, axis=(1, 2))
    with g.path("third"):
        z = cv.tanh(y)
    with g.extend("second") as second:
        second.output = cv.exp(x)
        w = W + g.parameter("V", (3, 3))
    with g.extend("third") as third:
        third.output = cv.sum(w) * z
    return g


def renamed() -> CalcGraph:
    """Parameters with settings, called otherwise since then."""
    g = CalcGraph()
    x, W, b = g.placeholder("x", (None, 3)), g.parameter("W", (3, 2)), g.parameter("b", (2,))
    with g.path("learn", backward=True) as learn:
        learn.minimize(cv.mean(cv.square(x @ W + b)), cv.AdamW(no_decay=["b"]), rates={"W": 0.5}, parameters=["W", "b"])
    W.rename("None")
    b.rename("path learn:")
    return g


CASES = {of.__name__: of for of in (everything, looks, shared, interleaved, renamed)}
OPTIONS: dict[str, dict[str, Any]] = {
    "rounds": {"accumulate": True},
    "steps": {"accumulate": False, "dtype": "float64"},
    "a team": {"workers": 3, "batch_size": 7},
    "cuda": {"device": "cuda", "workers": 2},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("case", CASES)
def test_what_a_graph_holds_is_read_back(case: str, options: str) -> None:
    assert len(hash_of(read_back(CASES[case](), **OPTIONS[options]), **OPTIONS[options])) == 64


def test_layers_are_kept_by_their_names() -> None:
    g = cv.build_graph(nn.Linear(4) >> nn.ReLU() >> nn.Linear(2), (3,), "mse", cv.SGD(0.1))
    keep = ["relu_1", "learn.linear_1"]
    assert len(hash_of(read_back(g, keep=keep), keep=keep)) == 64


def start(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal(shape)


ARRAYS = {
    "float64": np.array([[0.1, -0.0, np.inf], [-np.inf, 1e-320, 1 / 3]]),
    "nan": np.array([[np.nan, 1, 2], [3, 4, np.array(0x7FF8000000000001).view(np.float64)]]),
    "float32": np.float32([[0.1, 1, 2], [3, 4, 1e-45]]),
    "float16": np.float16([[0.1, 1, 2], [3, 4, 6e-8]]),
    "foreign": np.arange(6, dtype=">i4").reshape(2, 3),
    "long": np.arange(6, dtype=np.longdouble).reshape(2, 3),
    "bool": np.array([[True, False, True], [False, True, True]]),
    "uint64": np.array([[2**64 - 1, 0, 1], [2, 3, 4]], "uint64"),
    "turned": np.arange(6.0).reshape(3, 2).T,
}


@pytest.mark.parametrize("what", ARRAYS)
def test_arrays_keep_their_bits_and_types(what: str) -> None:
    g, value = CalcGraph(), ARRAYS[what]
    with g.path("p") as p:
        p.output = g.placeholder("x", (None, 2)) @ g.parameter("W", (2, 3), value)
    init = read_back(g).variables["W"].init
    assert (init.dtype, init.shape, init.tobytes()) == (value.dtype, value.shape, value.tobytes())


@pytest.mark.parametrize("type_", [None, "float32", "float64", "int64", "int32", "uint8", "int8", "bool"])
@pytest.mark.parametrize("n", [0, 1, 64, 65])
def test_constants_of_any_size_and_type(type_: str | None, n: int) -> None:
    """Small ones as numbers, larger ones as bytes; of no axis a number."""
    g, rng = CalcGraph(), np.random.default_rng(0)
    value = rng.integers(0, 2, n or ()) if type_ and type_[0] != "f" else rng.standard_normal(n or ())
    with g.path("p") as p:
        p.output = g.placeholder("x", (None, max(n, 1))) * cv.cast(g.constant("c", value, type_), None)
    assert ("base64" in g.text()) == (n > 64)
    assert len(hash_of(read_back(g))) == 64


INITIALIZERS = [kind() for kind in dict.fromkeys(cv.init.NAMES.values())]
INITIALIZERS += [cv.init.Constant(3), cv.init.Uniform(-1, 0.5), cv.init.HeNormal(gain=1.0), cv.init.function(start)]


@pytest.mark.parametrize("init", INITIALIZERS, ids=lambda init: type(init).__name__)
def test_every_initializer_is_read_back(init: Any) -> None:
    g = CalcGraph()
    with g.path("p") as p:
        p.output = g.placeholder("x", (None, 2)) @ g.parameter("W", (2, 3), init)
    assert len(hash_of(read_back(g))) == 64


OPTIMIZERS = [
    cv.SGD(0), cv.SGD(0.1, nesterov=True, momentum=1), cv.Adam(), cv.AdamHat(0.1, eps=1), cv.AdamW(weight_decay=0.2, no_decay=(".b", "1d")),
    cv.RMSProp(momentum=0.5), cv.Adagrad(initial_accumulator=1), cv.Lion(beta1=0.1, clip_value=2, clip_norm=3.5),
    *(cv.SGD(0.1, schedule=s) for s in (
        cv.Constant(warmup_steps=3), cv.Step(3), cv.Step(3, 0.5), cv.Exponential(0.9), cv.Cosine(7, min_lr=0.1), cv.CosineRestarts(3, 2),
        cv.Sampled(lambda k: 1 / (1 + k), 9), cv.Sampled(lambda k: k, 2**53, every=2**52 + 1),
    )),
]  # fmt: skip


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o.schedule or o).__name__)
def test_every_optimizer_and_schedule_is_read_back(optimizer: cv.Optimizer) -> None:
    g = CalcGraph()
    with g.path("learn", backward=True) as learn:
        y = g.placeholder("x", (None, 2)) @ g.parameter("W", (2, 3)) + g.parameter("W.b", (3,))
        learn.minimize(cv.mean(cv.square(y)), optimizer)
    read = read_back(g).paths["learn"].optimizer
    assert read.slots() == optimizer.slots() and len(hash_of(g)) == 64


# ---------------------------------------------------------------- the text
def test_the_text_says_what_a_person_would_write() -> None:
    g = CalcGraph()
    x, t = g.placeholder("x", (None, 6)), g.placeholder("t", (None, 3))
    W, b = g.parameter("W", (6, 3), cv.init.Uniform(0.1, 0.9), cv.L2(1e-4)), g.parameter("b", (3,))
    with g.path("learn", backward=True) as learn:
        y = cv.sigmoid(x @ W + b)
        loss = cv.mse(y, t)
        learn.minimize(loss, cv.SGD(1e-3), output=y)
    assert (
        g.text()
        == """\
calcvm graph 1
# %name: an automatic name
x = placeholder[None, 6]
t = placeholder[None, 3]
W = parameter[6, 3] init=Uniform(low=0.1, high=0.9) regularizer=L2(0.0001)
b = parameter[3] init=Zeros()

path learn (backward):
    %matmul = matmul(x, W)
    %add = add(matmul, b)
    y = sigmoid(add)
    loss = mse(y, t)
    minimize(loss, optimizer=SGD(0.001), output=y)
"""
    )


BY_HAND = """
calcvm graph 1     # numbers, comments and blanks as somebody likes them
x=placeholder[ None,6 ]\r
W = parameter[6, 3] init=Uniform(0.1, .9) regularizer=L2(1e-4)

path learn(backward) :
  # a layer need not be said
  y = matmul(x,W)
  far = where(y, 2, add(y)) #
"""


def test_a_text_by_hand() -> None:
    text = BY_HAND.replace(
        "  far = where(y, 2, add(y)) #\n",
        "  far = where(y, 2, y)\n  L = mean(far)\n  minimize(L, optimizer=Adam(0.01))",
    )
    g = cv.read_graph(text)
    assert g.paths["learn"].optimizer == cv.Adam(0.01) and g.variables["W"].init == cv.init.Uniform(0.1, 0.9)
    assert "L" in g.variables and "%where_a = constant[] value=2.0" in read_back(g).text()


def test_the_text_does_not_depend_on_what_was_made_first() -> None:
    def built(first: bool, two: float) -> CalcGraph:
        g = CalcGraph()
        x = g.placeholder("x", (None, 3))
        b = g.parameter("b", (3,)) if first else None
        with g.path("p"):
            y = x * two  # noqa: F841
            z = x + (b or g.parameter("b", (3,)))  # noqa: F841
        return g

    assert built(True, 2).text() == built(False, 2.0).text() == built(False, np.int64(2)).text()


def test_what_the_text_leaves_to_the_reader_is_a_part_of_its_layer() -> None:
    text = "calcvm graph 1\ni = placeholder[None, 3] dtype='int8'\nx = placeholder[None, 3]\n\npath p:\n    layer mul_1:\n        y = mul(x, i)"
    g = cv.read_graph(text + "\n        return y\n    z = cast(x, to='bool')")
    made = [(op.name, op.layer) for op in g.paths["p"].operations]
    assert made == [("cast", "mul_1"), ("mul", "mul_1"), ("cast_2", "")]
    assert len(hash_of(read_back(g))) == 64


def test_a_graph_of_nothing() -> None:
    assert read_back(CalcGraph()).text() == "calcvm graph 1\n"


def test_a_graph_that_was_read_goes_on() -> None:
    g = CalcGraph()
    x = g.placeholder("x", (None, 3))
    with g.path("learn"):
        h = cv.dropout(x)  # noqa: F841
    read = cv.read_graph(g.text())
    for graph in (g, read):
        with graph.extend("learn"):
            cv.add(cv.dropout(graph.variables["h"]), cv.dropout(graph.variables["x"]))
    assert read.form == g.form and read._streams == 3
    assert [op.name for op in read.paths["learn"].operations] == ["dropout", "dropout_2", "dropout_3", "add"]


@pytest.mark.parametrize(
    "name",
    ["a b", "None", "nan", "path", "output", "é", "𝐱", "\udcff", "\ud835\udc31", "\u202e\n'\"\\", "a.1", "1", "x."],
)
def test_any_name_is_read_back(name: str) -> None:
    g = CalcGraph()
    x, w = g.placeholder(name, (None, 3)), g.parameter("W" + name, (3,))
    with g.path(name, backward=True, adopt=False) as path:
        nn.Function(cv.tanh).build(x, name, True).rename("y" + name)
        loss = cv.mean(w + x).rename("L" + name)
        path.minimize(loss, cv.SGD(0.1), output=(x, g.variables["y" + name]), parameters=[w], rates={w: 0.1})
    text = read_back(g).text()
    assert text.isprintable() or {c for c in text if not c.isprintable()} == {"\n"}


def test_custom_operators_are_named(forgotten: None) -> None:
    from calcvm.formulas import number as n
    from calcvm.operators import Real, elementwise

    @elementwise(slope=Real(1.0, "a number"))
    class bent:
        def y(x, slope):
            return x / (1 + slope * n.fabs(x))

    def graph() -> CalcGraph:
        g = CalcGraph()
        with g.path("p") as p:
            p.output = apply("bent", g.placeholder("x", (None, 3)), slope=2)
        return g

    g = graph()
    text = g.text()
    assert "%bent = bent(x, slope=2.0)" in text and len(hash_of(read_back(g))) == 64
    former = OPS.pop("bent")
    with pytest.raises(
        cv.UnsupportedOperator,
        match=r"line 6, column 13: no operator is called 'bent': a custom one must be declared before",
    ):
        cv.read_graph(text)
    with pytest.raises(cv.CalcError, match="operator 'bent' has no text: 'bent' is no longer in the table"):
        g.text()
    OPS["bent"] = former


def test_an_operator_of_several_results(forgotten: None) -> None:
    from calcvm.operators import OpSpec, R, RowSpec, W, dims, register_op, rows_cols

    operands = (R("x", "rows*cols", "rows"), W("y", "rows*cols", "rows"), W("z", "rows*cols", "rows"))
    row = RowSpec(name="both_fwd", synopsis="y = z = x", words=dims("rows cols"), operands=operands)
    register_op(OpSpec(
        name="both", synopsis="y = z = x", category="unary", inputs=("x",), outputs=("y", "z"), fwd=(row,),
        shape=lambda shapes, attrs: {"y": shapes["x"], "z": shapes["x"]}, words=lambda shapes, attrs: rows_cols(shapes["x"]),
    ))  # fmt: skip
    g = CalcGraph()
    x = g.placeholder("x", (None, 3))
    with g.path("p", adopt=False):
        apply("both", x)
        y = apply("both", x, out="y")
        assert y.producer is not None
        cv.add(y, y.producer.outputs["z"].rename("z"))
    assert "%both, %both.z = both(x)\n    y, z = both(x) as y\n    %add = add(y, z)\n" in g.text()
    assert len(hash_of(read_back(g))) == 64
    with pytest.raises(cv.CalcError, match=r"line 5, column 5: names before '=': 1; results of both: 2"):
        cv.read_graph("calcvm graph 1\nx = placeholder[None, 3]\n\npath p:\n    y = both(x)")


def test_what_has_no_text_is_refused() -> None:
    class Mine(cv.Adam):
        row = "adam"

    g = CalcGraph()
    x, W = g.placeholder("x", (None, 3)), g.parameter("W", (3, 2))
    with g.path("learn", backward=True) as learn:
        y = x @ W
        loss = cv.mean(y)
        learn.minimize(loss, Mine())
    with pytest.raises(
        cv.CalcError,
        match=r"path 'learn': optimizer has no text: Mine is a custom class.*set it on the graph that is read",
    ):
        g.text()
    learn.optimizer = cv.SGD(0.1)
    learn.rates = {"V": 0.1}
    with pytest.raises(cv.CalcError, match="a setting for 'V', which is not a trainable parameter of the loss"):
        g.text()
    learn.rates, learn.optimizer = {}, None
    with pytest.raises(cv.CalcError, match="a loss that nothing minimizes"):
        g.text()
    learn.optimizer = cv.SGD(0.1)
    g.state("mine", 2, "int64", {"kind": "rng", "other": 3})
    with pytest.raises(cv.CalcError, match="state 'mine' has no text"):
        g.text()
    del g.variables["mine"]
    op = y.producer
    assert op is not None
    op.attrs["transpose_a"] = np.zeros(3)
    with pytest.raises(cv.CalcError, match=r"operator 'matmul': transpose_a: ndarray of shape \(3,\) has no text"):
        g.text()


def test_the_class_of_an_optimizer_of_yours_is_given_to_what_is_read() -> None:
    """As the message says."""
    g = CalcGraph()
    with g.path("learn", backward=True):
        loss = cv.mean(g.placeholder("x", (None, 3)) @ g.parameter("W", (3, 2)))
    read = cv.read_graph(g.text())
    read.paths["learn"].minimize(read.variables["loss"], cv.SGD(0.1))
    g.paths["learn"].minimize(loss, cv.SGD(0.1))
    assert hash_of(read) == hash_of(g)


def test_a_function_must_be_known_where_the_text_is_read() -> None:
    g = CalcGraph()
    g.parameter("W", (2,), start)
    text = g.text()
    name = re.findall(r"Function\('(.*?)'\)", text)[0]
    known = cv.init.FUNCTIONS.pop(name)
    with pytest.raises(
        cv.CalcError,
        match=r"line 2, column 23: this process does not know the function '.*start-\w+'.*cv.init.function",
    ):
        cv.read_graph(text)
    cv.init.FUNCTIONS[name] = known
    assert cv.read_graph(text).form == g.form


# ---------------------------------------------------------------- errors
HEAD = "calcvm graph 1\nx = placeholder[None, 6]\nt = placeholder[None, 3]\nW = parameter[6, 3]\n"
BODY = f"{HEAD}path learn (backward):\n    y = matmul(x, W)\n    L = mse(y, t)\n"
# text with an ^ before what is wrong, and what is said of it
RNG = "calcvm graph 1\ns = state[2] dtype='int64' kind='rng'"
WRONG = {
    "": "the text of a graph begins with the line 'calcvm graph 1'",
    "^x = placeholder[3]": "the text of a graph begins with the line",
    "calcvm graph ^2\nwhatever": "the text has version 2 of the language, and this calcvm reads version 1",
    "calcvm graph 1\nx = placeholder[None, 6^": "',' or ']' is wanted here, not the end of the line",
    "calcvm graph 1\nx = ^placeholder[None, 6] dtype='int65'": "placeholder 'x': dtype 'int65' is unknown; take one of float,",
    "calcvm graph 1\nx = placeholder[None, 6] ^dtyp='int64'": "placeholder has no setting 'dtyp': did you mean dtype=?",
    "calcvm graph 1\nx = placeholder[2] dtype='int8' ^dtype='int8'": "dtype= is given twice",
    "calcvm graph 1\nx = ^placeholder[None, None]": "placeholder 'x': shape (B, B) has the batch more than once",
    "calcvm graph 1\nx = placehold^[None, 6]": "'(' after the operator 'placehold' is wanted here",
    "calcvm graph 1\nx = ^'abc": "the text that begins here does not end in this line",
    "calcvm graph 1\nx = placeholder[^?]": "'?' is not a sign of the language",
    "calcvm graph 1\n^\tx = placeholder[2]": "'\\t' is not a sign of the language",
    "calcvm graph 1\nx ^placeholder[2]": "'=', between results and operator, is wanted here",
    "calcvm graph 1\nx = ^3": "an operator such as add(x, y), or one of placeholder[...], parameter[...],",
    "calcvm graph 1\nx = placeholder[2] ^3": "the end of the statement is wanted here, not '3'",
    "calcvm graph 1\n'a^\\q' = placeholder[2]": "\\q is not an escape sequence",
    "calcvm graph 1\n^None = placeholder[2]": "None is a constant: as the name of a variable it must be in quotes, 'None'",
    "calcvm graph 1\n^'' = placeholder[2]": "the name of a variable is empty",
    "calcvm graph 1\na, ^b = placeholder[2]": "a placeholder defines one variable",
    "calcvm graph 1\nW = parameter[2] init=^[1, 2, 3]": "a list of 2 is wanted here, as the shape says",
    "calcvm graph 1\nW = parameter[2] init=[1, ^'a']": "a number is wanted here",
    "calcvm graph 1\nW = parameter[2] init=^[1, True]": "True is not of type float64",
    "calcvm graph 1\nW = parameter[2] init=array([1, 2], dtype=^'object')": "dtype 'object' is not a type of numbers",
    "calcvm graph 1\nW = parameter[2] init=array([1, 2], dtype=^'float7')": "dtype 'float7' is not a type of numbers",
    "calcvm graph 1\nW = parameter[2] init=^He()": "init: one of Zeros, Ones, Constant,",
    "calcvm graph 1\nW = parameter[2] init=^HeNormel()": "init: did you mean HeNormal(...)?",
    "calcvm graph 1\nW = parameter[2] init=^Uniform(1, 0)": "Uniform: low 1 must be at most high 0",
    "calcvm graph 1\nW = parameter[2] init=^Constant()": "Constant: value is missing",
    "calcvm graph 1\nW = ^parameter[2] init=Orthogonal()": "parameter 'W': Orthogonal: the shape (2,) has fewer than 2 axes",
    "calcvm graph 1\nW = parameter[2] regularizer=L2(0.1, ^0.2)": "L2 takes l2 by position, and nothing more",
    "calcvm graph 1\nW = parameter[2] layout=^'window first'": "the layout of W (2,) must be ''",
    "calcvm graph 1\nc = ^constant[2]": "the constant 'c' has no value",
    "calcvm graph 1\nc = constant[2] dtype='int8' value=^[1, 300]": "a number is beyond int8",
    "calcvm graph 1\nc = constant[2] dtype='int8' value=^[1, 1.5]": "1.5 is not of type int8",
    "calcvm graph 1\nc = constant[2] value=base64(^'AAAA')": "shape (2,) of float64 needs 16 bytes, and the text has 3",
    "calcvm graph 1\nc = constant[2] value=base64(^'AAA')": "the text is not base64",
    "calcvm graph 1\nc = constant[4] dtype='bool' value=base64(^'AAECAA==')": "a byte of a bool must be 0 or 1",
    "calcvm graph 1\ns = ^state[2]": "state 's': kind is a text such as 'rng'",
    RNG + "\nr = state[2] kind='rng' of=^'s'": "there already is a state of 's'",
    RNG.replace("'rng'", "^'floats'"): "state 's': kind 'floats' is unknown; take one of rng, float64, fill",
    RNG.replace("state[2]", "^state[7]"): "state 's' of kind 'rng' is state[2] dtype='int64'",
    RNG.replace("state", "^state").replace("int64", "float64"): "state 's' of kind 'rng' is state[2] dtype='int64'",
    RNG + " value=^3": "state 's' of kind 'rng' starts from the seed: it has no value=",
    "calcvm graph 1\ns = state[1] dtype='float64' kind=^'float64'": "state 's' of kind 'float64' starts from a value: add value=",
    "calcvm graph 1\nx = parameter[" + 69 * "(" + "^(": "brackets are nested 70 deep",
    "calcvm graph 1\nx = parameter[^" + 5000 * "9" + "]": "an integer of more than 4000 digits",
    "calcvm graph 1\nadapt(a, ^b)": "no line above defines 'b'",
    HEAD + "adapt(a, ^W)": "W (6, 3) must have the batch first and fixed sizes after it",
    HEAD + "^adapt(x)": "adapt needs a layer and its input",
    HEAD + "^x = parameter[3]": "'x' is defined already",
    HEAD + "y = ^add(x, W)": "an operator belongs to a path",
    HEAD + "^minimize(x)": "minimize belongs to a path",
    HEAD + "  ^y = parameter[3]": "the line is indented by 2, and the lines above it by 0",
    HEAD + "path ^q (continued):": "no path 'q' above",
    HEAD + "path q (^bakward):": "after a path only (backward), (continued) or nothing is allowed",
    BODY + "path ^learn:": "path 'learn' exists already: continue it by path learn (continued):",
    BODY + "   ^z = exp(y)": "the line is indented by 3",
    BODY + "        ^z = exp(y)": "the line is indented by 8, and the lines above it by 4",
    BODY + "    path ^p:": "a path cannot be inside another path",
    BODY + "    layer a:\n        layer ^b:": "a layer cannot be written inside another layer",
    BODY + "    return ^y": "only a layer returns something",
    BODY + "    layer a:\n        return ^z": "no line above defines 'z'",
    BODY + "    z = ^matmull(x, W)": "no operator is called 'matmull' (did you mean 'matmul'?): a custom one must be declared before",
    BODY + "    z = ^__import__('os')": "no operator is called '__import__'",
    BODY + "    z = matmul(x, ^w)": "no line above defines 'w': did you mean 'W'?",
    BODY + "    z = ^matmul(W, x)": "matmul(W (6, 3), x (B, 6)): a (6, 3) and b (B, 6): the summed sizes differ, 3 and B",
    BODY + "    z = matmul(x, W, ^transpose_c=True)": "matmul has no setting 'transpose_c': did you mean transpose_b=?",
    BODY + "    z = matmul(x, W, transpose_a=True, ^transpose_a=True)": "transpose_a= is given twice",
    BODY + "    z = matmul(x, transpose_a=True, ^W)": "a name with '=', as before, is wanted here",
    BODY + "    z = ^matmul(x, W, transpose_a=1)": "matmul: attribute transpose_a=1 is not allowed (a is stored [k,m])",
    BODY + "    z = sum(y, axes=^x)": "a number, a text, or a tuple or list of them is wanted here, not 'x'",
    BODY + "    z = ^exp(3)": "exp: at least one input must be a variable",
    BODY + "    z = add(y, ^exp(y))": "a number is wanted here",
    BODY + "    a, ^b = exp(y)": "names before '=': 2; results of exp: 1",
    BODY + "    a, ^a = exp(y)": "'a' is defined twice",
    BODY + "    z = exp(y) as^": "the name of the operator is wanted here, not the end of the line",
    BODY + "    z = ^gradient(y, x)": "gradient: y (B, 3) must have one element",
    BODY + "    z = ^gradient(y)": "gradient takes 2 variables, not 1",
    BODY + "    z = laid(y, layout=^'channels last')": "the layout of y (B, 3) must be ''",
    BODY + "    z = ^laid(y)": "laid needs a layout, such as laid(x, layout='channels last')",
    BODY + "    ^output()": "output() needs the path's results",
    BODY + "    ^minimize(L)": "minimize needs an optimizer",
    BODY + "    ^minimize(y, optimizer=SGD(0.1))": "minimize: loss y (B, 3) must have one element",
    BODY + "    minimize(L, optimizer=^SGD(-1.0))": "SGD: learning_rate must be a number >= 0, not -1.0",
    BODY + "    minimize(L, optimizer=^SGD())": "SGD: learning_rate is missing",
    BODY + "    minimize(L, optimizer=SGD(0.1, ^momentom=0.9))": "SGD has no setting 'momentom': did you mean momentum=?",
    BODY + "    minimize(L, optimizer=SGD(0.1, schedule=^Cosin(3)))": "schedule: did you mean Cosine(...)?",
    BODY + "    minimize(L, optimizer=SGD(0.1, schedule=^Sampled([])))": "Sampled: its list of factors is empty",
    BODY + "    ^minimize(L, optimizer=SGD(0.1), parameters=[x])": "minimize: 'x' is no parameter, and cannot be trained",
    BODY + "    minimize(L, optimizer=SGD(0.1), rates=^3)": "rates must be given by parameter, such as {W: 0.1}",
}  # fmt: skip


@pytest.mark.parametrize("marked", WRONG, ids=lambda marked: marked.split("\n")[-1][:50])
def test_what_is_wrong_is_shown_where_it_is(marked: str) -> None:
    text, place = marked.replace("^", ""), marked.index("^") if "^" in marked else 0
    line, column = text.count("\n", 0, place), place - (text.rfind("\n", 0, place) + 1)
    with pytest.raises(cv.CalcError) as caught:
        cv.read_graph(text)
    said, shown, caret = str(caught.value).split("\n")
    assert said.startswith(f"line {line + 1}, column {column + 1}: {WRONG[marked]}")
    whole = text.split("\n")[line].replace("\t", "?")
    assert shown[4:] in whole and (column == len(whole) or shown[len(caret) - 1] == whole[column])
    assert caret.strip() == "^" and len(shown) <= 104


def test_states_are_those_of_programs() -> None:
    for kind, (type_, elems, valued) in STATES.items():
        assert STARTS.get(kind, (None, None)) == (type_, elems)
        start = {"symbol": 0, "kind": kind, **({"value": 1.0} if valued else {})}
        assert _start(start) == start


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("z = matmul(W, x)", cv.ShapeError),
        ("z = nothing(x)", cv.UnsupportedOperator),
        ("minimize(y, optimizer=SGD(0.1))", cv.ShapeError),
    ],
)
def test_errors_are_of_the_kinds_of_the_calls(line: str, kind: type) -> None:
    with pytest.raises(kind):
        cv.read_graph(f"{BODY}    {line}")


@pytest.mark.parametrize("given", [None, 3, b"calcvm graph 1", Path("graph.txt")])
def test_a_text_is_wanted(given: Any) -> None:
    with pytest.raises(cv.CalcError, match="read_graph: a text is wanted, such as graph.text\\(\\) gives"):
        cv.read_graph(given)


# ---------------------------------------------------------------- any text
ODD = (
    *"'\"()[]{},=:%#\\.", "as", *CONSTANTS, "-1", "0", "1", "2", "1.5", "1e400", 30 * "9", str(2**63 - 1), "path", "layer", "return",
    "minimize", "output", "adapt", "laid", "gradient", "add", "placeholder", "state", "axes", "shape", "layout", "'channels last'", "'int64'",
    "Adam()", "SGD(0.1)", "\t", "\0", "é", "    ", "\n", "\r", "\u2028", "array", "base64('AAAA')", "fill", "sgd",
)  # fmt: skip


@cache
def texts() -> tuple[list[str], list[str]]:
    found = [make(seed).text() for make in RANDOM.values() for seed in range(12)] + [
        of().text() for of in CASES.values()
    ]
    return found, [
        token[0] for text in found for line in text.split("\n") for token in TOKEN.finditer(line) if token[0].strip()
    ]


def mutated(rng: random.Random) -> str:
    """A text of a graph, with a few parts taken away, put in, exchanged or doubled."""
    found, tokens = texts()
    text = rng.choice(found)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        begin, end = rng.choice([m.span() for m in re.finditer(r"[\w.]+|\s+|[^\w\s]", text)])
        new, how = rng.choice(rng.choice((ODD, tokens))), rng.randrange(5)
        if how < 3:
            text = text[: end if how == 2 else begin] + ("" if how == 0 else new) + text[begin if how == 2 else end :]
        elif how == 3:
            text = text[:begin] + chr(rng.choice((rng.randrange(32, 127), rng.randrange(0x300)))) + text[begin + 1 :]
        else:
            lines = text.split("\n")
            i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
            lines[i : i + 1] = rng.choice(([], [lines[i], lines[i]], [lines[j]]))
            text = "\n".join(lines)
    return text


@pytest.mark.time_limit(600)
def test_any_text_is_a_graph_or_refused(whole: bool) -> None:
    done = Counter[str]()
    for seed in range(MUTATED_WHOLE if whole else MUTATED):
        text = mutated(random.Random(seed))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", cv.CalcWarning)
                graph = cv.read_graph(text)
        except cv.CalcError as error:
            assert re.fullmatch(r"(?s)line \d+, column \d+: .+\n    .*\n +\^", str(error)), (seed, error)
            done["refused"] += 1
        else:
            assert cv.read_graph(graph.text()).text() == graph.text(), seed
            done["read"] += 1
    print(f"mutated texts: {done['refused']} refused, {done['read']} read")
    assert done["refused"] and done["read"]

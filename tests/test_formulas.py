"""Formulas: what is said of them, and operators, losses and optimizers that users declare by them."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn, optim
from calcvm.formulas import declare
from calcvm.formulas import number as n
from calcvm.formulas.elementwise import ELEMENTWISE
from calcvm.formulas.losses import PAIR_LOSSES
from calcvm.formulas.optimizers import UPDATES
from calcvm.operators import Choice, Real, elementwise, pair_loss, update
from calcvm.ops import spec as table

pytestmark = pytest.mark.usefixtures("forgotten")

RNG = np.random.default_rng(3)
X = RNG.normal(size=(64, 4))
Y = np.sin(X.sum(1, keepdims=True))


def swish(beta: float = 1.5, twice: int = 1):
    """x * sigmoid(beta*x), times a number that is not among its parameters."""

    @elementwise(beta=Real(1.0, "slope"))
    class swish:
        def y(x, beta):
            return twice * x * n.logistic(beta * x)

        def dx(dy, x, beta):
            s = n.logistic(beta * x)
            return twice * dy * (s + beta * x * s * (1 - s))

    return swish


def model(activation, loss="mse", optimizer=None, **how):
    net = nn.Linear(8) >> nn.Function(activation) >> nn.Linear(1)
    optimizer = optimizer or cv.SGD(0.1)
    return cv.Model(net, input_shape=(4,), loss=loss, optimizer=optimizer, batch_size=64, dtype="float64", **how)


# ---------------------------------------------------------------- what is said of them
def test_texts():
    say = {
        "a - (b - c)": lambda a, b, c: a - (b - c),
        "a*(b + c)": lambda a, b, c: a * (b + c),
        "a/(b*c)": lambda a, b, c: a / (b * c),
        "-a^2": lambda a, b, c: -(a * a),
        "where(a > 0, b, c)": lambda a, b, c: n.where(a > 0, b, c),
        "1/(1 + exp(-a))": lambda a, b, c: n.logistic(a),
        "|a - b|": lambda a, b, c: n.fabs(a - b),
        "a*b + c": lambda a, b, c: n.fma(a, b, c),
        "2 - a": lambda a, b, c: 2 - a,
        "(a + b)*c": lambda a, b, c: (a + b) * c,
    }
    assert {n.text_of(fn, ("a", "b", "c")).removeprefix("y = "): fn for fn in say.values()} == say


def _formulas():
    yield from (f for op in ELEMENTWISE.values() for f in op.formulas)
    yield from (f for op in PAIR_LOSSES.values() for f in (op.term, *op.slopes.values()))
    yield from UPDATES.values()


@pytest.mark.parametrize("formula", [*_formulas()], ids=lambda f: f.name)
def test_formulas_of_calcvm_are_what_rows_can_compute(formula):
    formula.check()
    assert not formula.own


def test_operations_are_counted():
    counts = {name: op.forward.operations for name, op in ELEMENTWISE.items()}
    assert counts["neg"] == counts["exp"] == counts["add"] == 1
    assert counts["sigmoid"] == 4 and counts["affine"] == counts["leaky_relu"] == 2


def test_a_formula_reads_what_it_names():
    op = ELEMENTWISE["leaky_relu"]
    assert op.backward["x"].reads == ("dy", "y") and op.backward["x"].reals == ("alpha",)
    assert ELEMENTWISE["add"].backward["a"].passes and not ELEMENTWISE["sub"].backward["b"].passes


# ---------------------------------------------------------------- of one's own
@pytest.mark.parametrize("workers", [1, 2])
def test_an_elementwise_operator_of_ones_own_trains_as_what_it_is_made_of(workers):
    swish()
    own = model(lambda x: cv.apply("swish", x, beta=1.5), workers=workers)
    known = model(lambda x: x * cv.sigmoid(1.5 * x), workers=workers)
    for _ in range(20):
        losses = [m.step(X, Y) for m in (own, known)]
        np.testing.assert_allclose(*losses, rtol=1e-12)


def test_parameters_have_ranges_and_names():
    @elementwise(power=Choice(("one", "two"), "1 or 2"), a=Real(2.0, "factor", lo=0.0))
    class ramp:
        def y(x, a):
            return a * n.where(x > 0, x, 0.0)

        def dx(dy, x, power):
            return dy if power == "one" else 2 * dy

    with pytest.raises(cv.CalcError, match="a"):
        model(lambda x: cv.apply("ramp", x, a=-1.0))
    with pytest.raises(cv.CalcError, match="power"):
        model(lambda x: cv.apply("ramp", x, power="three"))


def test_two_operands_are_broadcast():
    @elementwise()
    class squares:
        def y(a, b):
            return a * a + b * b

        def da(dy, a):
            return 2 * a * dy

        def db(dy, b):
            return 2 * b * dy

    g = cv.CalcGraph()
    x, b = g.placeholder("x", (None, 4)), g.parameter("b", (4,), init=np.arange(4.0))
    with g.path("learn", backward=True) as learn:
        learn.minimize(cv.sum(cv.apply("squares", x, b)), cv.SGD(0.1))
    m = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=8, dtype="float64"))
    m["x"] = X[:8]
    m.forward("learn")
    m.backward("learn")
    np.testing.assert_allclose(m.grad("b"), 2 * 8 * np.arange(4.0), rtol=1e-12)


def above():
    @elementwise(limit=Real(0.0, "limit"))
    class above:
        def y(x, limit) -> bool:
            return x > limit


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_parameter_of_a_formula_of_bools(dtype):
    above()
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 4))
    with g.path("predict"):
        y = cv.where(cv.apply("above", x, limit=0.25), x, -1.0)
    m = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=8, dtype=dtype))
    given = X[:8].astype(dtype)
    m["x"] = given
    m.forward("predict")
    np.testing.assert_array_equal(m[y.name], np.where(given > 0.25, given, -1))


def test_an_input_without_a_formula_has_no_gradient():
    own = model(lambda x: x * cv.sign(x))
    known = model(cv.abs)
    for _ in range(5):
        np.testing.assert_allclose(own.step(X, Y), known.step(X, Y), rtol=1e-12)


def test_a_loss_of_ones_own():
    @pair_loss(source="Charbonnier")
    class charbonnier:
        def term(x, t):
            return n.sqrt((x - t) * (x - t) + 1e-3)

        def dx(x, t):
            return (x - t) / n.sqrt((x - t) * (x - t) + 1e-3)

        def dt(x, t):
            return (t - x) / n.sqrt((x - t) * (x - t) + 1e-3)

    own = model(cv.tanh, lambda out, t: cv.apply("charbonnier", out, t))
    known = model(cv.tanh, lambda out, t: cv.mean(cv.sqrt(cv.square(out - t) + 1e-3)))
    for _ in range(20):
        np.testing.assert_allclose(own.step(X, Y), known.step(X, Y), rtol=1e-12)


def test_an_optimizer_of_ones_own():
    @update(source="SGD with a sign", decay=False)
    class signed:
        def m(g, m, beta1, rest1):
            return beta1 * m + rest1 * g

        def p(p, m, keep, lr_t):
            return keep * p - lr_t * n.sign(m)

    @dataclass(frozen=True)
    class Signed(optim.Optimizer):
        learning_rate: float = 1e-2
        beta1: float = 0.9
        weight_decay: float = 0.1

    own = model(cv.tanh, optimizer=Signed())
    p = {name: own[name].copy() for name in ("linear_1.weight", "linear_2.bias")}
    m = dict.fromkeys(p, 0.0)
    for _ in range(10):
        own.step(X, Y)
        for name in p:
            m[name] = 0.9 * m[name] + (1 - 0.9) * own.grad(name)
            p[name] = (1 - 1e-2 * 0.1) * p[name] - 1e-2 * np.sign(m[name])
            np.testing.assert_allclose(own[name], p[name], rtol=1e-12)


def test_a_decorator_needs_no_parentheses():
    @update
    class plainly:
        def p(p, g, lr_t):
            return p - lr_t * g

    @dataclass(frozen=True)
    class Plainly(optim.Optimizer):
        learning_rate: float = 1e-2

    own, known = model(cv.tanh, optimizer=Plainly()), model(cv.tanh, optimizer=cv.SGD(1e-2))
    assert [own.step(X, Y) for _ in range(3)] == [known.step(X, Y) for _ in range(3)]
    with pytest.raises(cv.CalcError, match="update decorates a class of formulas, not 5"):
        update(5)


def test_declared_again_it_is_the_new_one():
    swish()
    first = model(lambda x: cv.apply("swish", x, beta=1.5)).predict(X)
    swish(twice=2)
    second = model(lambda x: cv.apply("swish", x, beta=1.5)).predict(X)
    assert np.abs(first - second).max() > 1e-3


def test_declared_again_it_may_have_other_parameters():
    swish()
    model(lambda x: cv.apply("swish", x, beta=1.5)).predict(X)
    again = elementwise(shift=Real(0.0, "what is added"))

    def y(x, shift):
        return x + shift

    again(type("swish", (), {"y": y}))
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 4))
    with g.path("p"):
        shifted = cv.apply("swish", x, shift=2.0)
    m = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=64, dtype="float64"))
    m["x"] = X
    m.forward("p")
    np.testing.assert_array_equal(m[shifted.name], X + 2)


SCALE = 2.0


def test_a_formula_keeps_the_numbers_around_it_of_when_it_was_declared(monkeypatch):
    factor = 3.0
    elementwise()(type("odd", (), {"y": lambda x: SCALE * x, "dx": lambda dy: (lambda g: SCALE * g)(dy)}))
    elementwise()(type("odder", (), {"y": lambda x: factor * x, "dx": lambda dy: factor * dy}))
    monkeypatch.setitem(globals(), "SCALE", 5.0)
    factor = 5.0
    for dtype in ("float32", "float64"):
        g = cv.CalcGraph()
        x, w = g.placeholder("x", (None, 4)), g.parameter("w", (4,), init=cv.init.Constant(1.0))
        with g.path("learn", backward=True) as learn:
            learn.minimize(cv.sum(cv.apply("odder", cv.apply("odd", x * w))), cv.SGD(0.1))
        m = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=8, dtype=dtype))
        m["x"] = np.ones((8, 4))
        m.forward("learn")
        m.backward("learn")
        np.testing.assert_array_equal(m.grad("w"), np.full(4, 8 * 6.0))


def otherwise(kind):
    """swish, with other words or operands than it has."""

    def y(x, beta):
        return x * n.logistic(x)

    def dx(dy, x, y):
        return dy * (y + x)

    def gain(x, gain, beta):
        return gain * x * n.logistic(beta * x)

    how, functions = {
        "a choice": ({"beta": Choice(("one", "two"), "which")}, {"y": y}),
        "one more": ({"gain": Real(1.0, "a factor"), "beta": Real(1.0, "slope")}, {"y": gain}),
        "no parameter": ({}, {"y": lambda x: x * n.logistic(x)}),
        "another input": ({"beta": Real(1.0, "slope")}, {"y": lambda q, beta: beta * q}),
        "other operands": ({"beta": Real(1.0, "slope")}, {"y": y, "dx": dx}),
    }[kind]
    elementwise(**how)(type("swish", (), functions))


@pytest.mark.parametrize("kind", ["a choice", "one more", "no parameter", "another input", "other operands"])
def test_declared_again_in_another_form_what_was_made_before_is_refused(kind):
    swish()
    net = nn.Linear(1) >> nn.Function(lambda x: cv.apply("swish", x, beta=1.5))
    graph = cv.build_graph(net, (4,), "mse", cv.SGD(0.1))
    program = cv.compile(graph, batch_size=64, dtype="float64")
    alive = cv.CalcHeap(program.heap_bytes).create(program, seed=0)
    twin = cv.CalcHeap(program.heap_bytes).create(program, seed=0)
    assert alive.step(X, Y) == twin.step(X, Y)
    pickled = pickle.dumps(graph), pickle.dumps(program)
    expected = alive.step(X, Y)
    otherwise(kind)
    assert twin.step(X, Y) == expected
    for late in (program, pickle.loads(pickled[1])):
        with pytest.raises(cv.ProgramError, match="instruction.* .*swish_bwd.*compile the graph again"):
            cv.CalcHeap("1 MiB").create(late, seed=0)
    with pytest.raises(cv.ProgramError, match="instruction.* .*swish_bwd.*compile the graph again"):
        cv.compile(graph, batch_size=64)
    for copied in (lambda: pickle.loads(pickled[0]), lambda: copy.deepcopy(graph)):
        with pytest.raises(cv.CalcError, match="operator 'swish' has been declared .* build it again"):
            copied()


def test_what_is_declared_wrongly_again_stays_as_it_was():
    swish()
    first = model(lambda x: cv.apply("swish", x, beta=1.5)).predict(X)
    wrong, right = (lambda x: x.arctan()), (lambda x: x)
    for functions in ({"y": wrong}, {"y": right, "dx": wrong}, {"dx": right}):
        with pytest.raises(cv.CalcError, match="swish"):
            elementwise()(type("swish", (), functions))
        again = model(lambda x: cv.apply("swish", x, beta=1.5))
        np.testing.assert_array_equal(again.predict(X), first)


SCRIPT = """
import numpy as np, calcvm as cv
from calcvm import nn
from calcvm.formulas import number as n
from calcvm.operators import elementwise

@elementwise()
class scaled:
    def y(x): return {factor} * x
    def dx(dy): return {factor} * dy

g = cv.CalcGraph()
x = g.placeholder("x", (None, 2))
with g.path("p") as p:
    p.output = cv.apply("scaled", x).rename("y")
m = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=1))
m["x"] = np.ones((1, 2), np.float32)
m.forward("p")
print(m["y"].tolist())
"""


def test_nothing_of_it_is_kept_from_one_process_to_another(tmp_path):
    """Its name says nothing of what it computes."""
    for factor in (2, 3):
        script = tmp_path / "own.py"
        script.write_text(SCRIPT.format(factor=factor))
        environment = {**os.environ, "CALCVM_CACHE_DIR": str(tmp_path / "cache")}
        done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
        assert done.stdout == f"[[{factor}.0, {factor}.0]]\n", done.stderr


# ---------------------------------------------------------------- mistakes
def wrong_name():
    @elementwise()
    class relu:
        def y(x):
            return x


def unknown_function():
    @elementwise()
    class odd:
        def y(x):
            return x.arctan()


def no_forward():
    @elementwise()
    class odd:
        def dx(dy):
            return dy


def no_slope():
    @pair_loss()
    class odd:
        def term(x, t):
            return x - t


def a_choice_of_types():
    @elementwise(power=Choice(("one", "two"), "1 or 2"))
    class odd:
        def y(x, power) -> bool:
            return x > 0 if power == "one" else x * x > 0


def a_parameter_and_no_float():
    @elementwise(limit=Real(0.0, "limit"))
    class odd:
        def y(x: Any, limit) -> bool:
            return x > limit


@pytest.mark.parametrize(
    "mistake", [a_choice_of_types, a_parameter_and_no_float, wrong_name, unknown_function, no_forward, no_slope]
)
def test_a_mistake_is_told_and_leaves_nothing(mistake):
    known = [dict(t) for t in (declare.ELEMENTWISE, declare.PAIR_LOSSES, declare.UPDATES, table.OPS, table.ROWS)]
    with pytest.raises(cv.CalcError, match="relu|odd"):
        mistake()
    assert known == [declare.ELEMENTWISE, declare.PAIR_LOSSES, declare.UPDATES, table.OPS, table.ROWS]


def asked(y):
    def declare_it():
        elementwise()(type("odd", (), {"y": y}))

    return declare_it


def in_steps(x):
    if x > 0:
        return x
    return -x


def gradient(name, *reads):
    def declare_it():
        functions = {"y": lambda x: x * x, name: {1: lambda dy: dy, 2: lambda dy, z: dy * z}[len(reads)]}
        elementwise()(type("odd", (), functions))

    return declare_it


def raises(x):
    raise RuntimeError("of its own")


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        (asked(in_steps), "where"),
        (asked(lambda x: x if x < 0 else -x), "where"),
        (asked(lambda a, b: max(a, b)), "where"),
        (asked(lambda x: n.where(0 < x < 1, x, 0.0)), "where"),
        (asked(lambda x: n.where(x == 1, x, 0.0)), "equal"),
        (asked(lambda y: y * 2), "'y' is a word"),
        (asked(lambda rows: rows * 2), "'rows' is a word"),
        (asked(lambda a, b, c, d: a + b + c + d), "4 inputs"),
        (asked(lambda: 1.0), "0 inputs"),
        (asked(raises), "of its own"),
        (gradient("dX", "dy"), "dX is the gradient of no input"),
        (gradient("dx", "dy", "z"), "reads 'z'"),
    ],
)
def test_what_a_formula_cannot_say_is_told(mistake, told):
    with pytest.raises(cv.CalcError, match=told):
        mistake()
    with pytest.raises(cv.CalcError, match="class"):
        elementwise()(lambda x: x)


# ---------------------------------------------------------------- what rows could not compute
def typed(y, /, **annotations):
    y.__annotations__ = {("return" if name == "y" else name): of for name, of in annotations.items()}
    return asked(y)


def slope(dx):
    def declare_it():
        elementwise()(type("odd", (), {"y": lambda x: x * x, "dx": dx}))

    return declare_it


def of_loss(**functions):
    right = {"term": lambda x, t: x - t, "dx": lambda x, t: x - t, "dt": lambda x, t: t - x}

    def declare_it():
        pair_loss()(type("odd", (), {**right, **functions}))

    return declare_it


def of_update(**functions):
    def declare_it():
        update()(type("odd", (), functions))

    return declare_it


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        (asked(lambda x: x > 0), "y is a condition: annotate it so"),
        (slope(lambda dy: dy > 0), "dx is a condition: take where"),
        (typed(lambda a: a * 2.0, y="bool"), "y is a number, annotated as a condition"),
        (asked(lambda x: n.where(x > 0, 1.0, 0.0)), r"make one a number, like\(x, 1.0\)"),
        (asked(lambda x: 1.0), "it makes 1.0"),
        (asked(lambda x: None), "it makes None"),
        (asked(lambda x: n.where(n.both(x > 0, x), x, 0.0)), "a number is no condition"),
        (asked(lambda x: n.where(n.both(x > 0, True), x, 0.0)), "True is no number, and no condition"),
        (asked(lambda x: n.where(n.either(False, x > 0), x, 0.0)), "False is no number, and no condition"),
        (asked(lambda x: n.where(n.holds_not(x), x, 0.0)), "a number is no condition"),
        (asked(lambda x: n.where(x, x, 0.0)), "a number is no condition"),
        (asked(lambda x: n.exp(x > 0)), "a condition, such as x > 0, is no number"),
        (asked(lambda x: x * (x > 0)), "a condition, such as x > 0, is no number"),
        (asked(lambda x: 1 + (x > 0)), "a condition, such as x > 0, is no number"),
        (asked(lambda x: n.exp(2.0) * x), "exp of the constant 2.0"),
        (asked(lambda x: x**2), "exp, expm1"),
        (asked(lambda x: (x, x)), "it makes several values"),
        (asked(lambda x: x * "2"), "'2' is no number"),
        (asked(lambda x: x * X), "is no number"),
        (typed(lambda a, b: a * b, a="Any"), "annotated Any"),
        (typed(lambda a, b: n.where(a > 0, a, b), a="Any"), "different types"),
        (typed(lambda a: a < 0.5, a="Any", y="bool"), "0.5 meets what may be integers"),
        (typed(lambda a: a < 2.0, a="Any", y="bool"), "2.0 meets what may be integers"),
        (typed(lambda a: a < 2**31, a="Any", y="bool"), "2147483648 meets"),
        (typed(lambda a: a, a="int"), "the annotation 'int' is none of"),
        (typed(lambda a: a, y="Any"), "of which there is none"),
        (typed(lambda a: a, a="Cells"), "moved as it is"),
        (typed(lambda a, b: n.where(a < b, a, b), a="Cells", b="Cells", y="Cells"), "moved as it is"),
        (typed(lambda a: a, y="To"), "To is what cast makes"),
        (asked(lambda d, e: d * e), "'d0' is a word of the row, a stride of 'd'"),
        (asked(lambda a, a1: a * a1), "'a1' is a word of the row, a stride of 'a'"),
        (of_loss(term=lambda a, b: a - b), "reads 'a'"),
        (of_loss(term=lambda t, x: x - t), "x, t and parameters, in this order"),
        (of_loss(term=lambda x: x), "x, t and parameters, in this order"),
        (of_loss(dx=lambda x, t: x > t), "dx is a condition"),
        (of_loss(dt=None), "a formula dt is wanted"),
        (of_update(m=lambda m, g: m + g), "a formula p of p"),
        (of_update(p=lambda p, g, lr: p - lr * g), "'lr' is neither p, g nor state, .*learning_rate"),
        (of_update(p=lambda p, g, lr_t: 0.0), "it makes 0.0"),
        (of_update(p=lambda p, g, lr_t: p - lr_t * (g > 0)), "is no number"),
    ],
)
def test_what_no_row_could_compute_is_refused_where_it_is_declared(mistake, told):
    known = [dict(t) for t in (declare.ELEMENTWISE, declare.PAIR_LOSSES, declare.UPDATES, table.OPS, table.ROWS)]
    with pytest.raises(cv.CalcError, match=told):
        mistake()
    assert known == [declare.ELEMENTWISE, declare.PAIR_LOSSES, declare.UPDATES, table.OPS, table.ROWS]


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"a": 1.0}, "a: a parameter is a Real or a Choice, not 1.0"),
        ({"a": Real("x", "factor")}, "a: the default 'x' is none"),
        ({"a": Real(-1.0, "factor", lo=0.0)}, "a: the default -1.0 is none"),
        ({"a": Choice(("one",), "which")}, "a: a choice is one of two names"),
        ({"a": Choice(("one", 2), "which")}, "a: a choice is one of two names"),
        ({"sauce": "Pareto"}, "sauce: a parameter is a Real or a Choice"),
        ({"source": 5}, "source must be a text"),
    ],
)
def test_parameters_that_no_formula_could_have(how, told):
    for decorator, names in ((elementwise, {"y": lambda x: x * x}), (pair_loss, {"term": lambda x, t: x - t})):
        with pytest.raises(cv.CalcError, match=f"'odd': {told}"):
            decorator(**how)(type("odd", (), names))


def test_a_name_that_is_none():
    for name in ("my op", "größer"):
        with pytest.raises(cv.CalcError, match="must be an identifier in ASCII"):
            elementwise()(type(name, (), {"y": lambda x: x * x}))
    with pytest.raises(cv.CalcError, match="each parameter has a name"):
        elementwise()(type("odd", (), {"y": lambda *x: x[0]}))


def test_the_other_name_of_a_choice_is_looked_at_too():
    def y(x, how):
        return x if how == "one" else x.arctan()

    with pytest.raises(cv.CalcError, match="arctan"):
        elementwise(how=Choice(("one", "two"), "which"))(type("odd", (), {"y": y}))


def test_numbers_of_any_type_that_meet_floats_are_the_programs():
    def y(a: Any, b: Any, c: Any) -> Any:
        return n.where(a < b, b, n.where(a > c, c, a))

    elementwise()(type("odd", (), {"y": y}))
    whole = np.arange(-8, 8).reshape(8, 2)
    g = cv.CalcGraph()
    given = {
        of: g.placeholder(of, (None, 2), dtype=None if of == "float" else of) for of in ("float", "int64", "uint8")
    }
    with g.path("p"):
        made = {of: cv.apply("odd", x, 1, 3) for of, x in given.items()}
        mixed = cv.apply("odd", given["float"], given["int64"], 3)
    m = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=8))
    for of, x in given.items():
        m[x.name] = whole.astype("float32" if of == "float" else of)
    m.forward("p")
    for of, v in made.items():
        dtype = np.dtype("float32" if of == "float" else of)
        assert m[v.name].dtype == dtype
        np.testing.assert_array_equal(m[v.name], np.clip(whole.astype(dtype), 1, 3))
    assert m[mixed.name].dtype == np.float32
    np.testing.assert_array_equal(m[mixed.name], np.minimum(whole, 3))


def result_of(name, *inputs):
    """What an operator makes of arrays."""
    g = cv.CalcGraph()
    given = [g.placeholder(f"in{i}", (None, *x.shape[1:])) for i, x in enumerate(inputs)]
    with g.path("p"):
        out = cv.apply(name, *given)
    m = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=len(inputs[0]), dtype="float64"))
    for v, x in zip(given, inputs):
        m[v.name] = x
    m.forward("p")
    return m[out.name]


def test_an_operand_may_have_any_name():
    elementwise()(type("odd", (), {"y": lambda s: s * s, "ds": lambda dy, s: 2 * s * dy}))
    np.testing.assert_array_equal(result_of("odd", X), X * X)
    elementwise()(type("odd", (), {"y": lambda x, index, rng: n.where(x < index, x, rng)}))
    np.testing.assert_array_equal(result_of("odd", X, 2 * X, 3 * X), np.where(X < 2 * X, X, 3 * X))


def test_the_gradient_may_be_that_of_the_output():
    """As of a step that is trained as if it were none."""
    elementwise()(type("odd", (), {"y": lambda x: n.where(x > 0, n.like(x, 1.0), 0.0), "dx": lambda dy: dy}))
    m = model(lambda x: cv.apply("odd", x), seed=1)
    before = {name: v.copy() for name, v in m.get_weights().items()}
    hidden = ((X @ before["linear_1.weight"] + before["linear_1.bias"]) > 0) * 1.0
    slope = 2 * (hidden @ before["linear_2.weight"] + before["linear_2.bias"] - Y) / Y.size
    m.step(X, Y)
    expected = before["linear_1.weight"] - 0.1 * X.T @ (slope @ before["linear_2.weight"].T)
    np.testing.assert_allclose(m.get_weights()["linear_1.weight"], expected, rtol=1e-12, atol=1e-13)


def test_a_slope_without_operations_is_not_the_outputs():
    elementwise()(type("odd", (), {"y": lambda x: x * x, "dx": lambda x: x}))
    assert [row.name for row in table.OPS["odd"].bwd] == ["odd_bwd"] and not table.OPS["odd"].passes


# ---------------------------------------------------------------- what is used again
def doubled(x):
    for _ in range(40):
        x = x + x
    return x


def test_what_is_used_again_is_written_and_counted_once():
    op = elementwise()(type("odd", (), {"y": doubled, "dx": lambda dy: 2.0**40 * dy}))
    assert op.forward.operations == 40 and len(op.forward.text) < 1000
    np.testing.assert_array_equal(result_of("odd", X), 2.0**40 * X)
    assert len(cv.ops.OPS["odd"].synopsis) < 1000


def test_names_of_what_is_used_again():
    def wave(x, u1):
        s = n.exp(x * x + u1) - x
        return s * n.tanh(s) / (s + u1)

    assert n.text_of(wave, ("x", "u1")) == "u2 = exp(x^2 + u1) - x; y = u2*tanh(u2)/(u2 + u1)"
    assert n.text_of(lambda x: n.where(x > 0, x - 1, 1 - (x - 1)), ("x",)) == "y = where(x > 0, x - 1, 1 - (x - 1))"


def test_an_update_that_uses_values_again():
    def p(p, g, lr_t):
        return p - lr_t * doubled(g)

    assert len(update()(type("odd", (), {"p": p})).text) < 1000


# ---------------------------------------------------------------- as a demanding user found them
def test_parameters_of_operators_of_several_operands():
    @elementwise(k=Real(2.0, "a factor"), less=Real(0.0, "a summand"))
    class scaled:
        def y(a, b, c, k, less):
            return a * k + b * c - less

        def da(dy, k):
            return dy * k

        def db(dy, c):
            return dy * c

    g = cv.CalcGraph()
    x, w = g.placeholder("x", (None, 3)), g.parameter("w", (3,))
    with g.path("learn", backward=True) as learn:
        y = cv.apply("scaled", w, x, 5.0, k=3.0) + cv.apply("scaled", x, w, 7.0, less=1.0)
        learn.minimize(cv.sum(y), cv.SGD(0.1), output=y)
    m = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=4), seed=0)
    given = np.arange(12.0).reshape(4, 3)
    m["x"], m.parameters["w"][...] = given, [1, 2, 3]
    m.forward("learn")
    np.testing.assert_array_equal(m[y.name], np.array([1, 2, 3]) * (3 + 7) + given * (5 + 2) - 1)
    m.backward("learn")
    np.testing.assert_array_equal(m.grad("w"), np.full(3, 4 * (3 + 7)))
    with pytest.raises(cv.CalcError, match="a Choice is of an operator of one input"):
        elementwise(how=Choice(("one", "two"), "which"))(type("odd", (), {"y": lambda a, b, how: a * b}))


def test_a_choice_after_a_number():
    @elementwise(k=Real(2.0, "a factor"), how=Choice(("times", "plus"), "which"))
    class odd:
        def y(x, k, how):
            return x * k if how == "times" else x + k

    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 3))
    with g.path("p"):
        made = [cv.apply("odd", x, k=3.0), cv.apply("odd", x, k=3.0, how="plus")]
    m = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=2), seed=0)
    m["x"] = np.arange(6.0).reshape(2, 3)
    m.forward("p")
    for v, want in zip(made, (m["x"] * 3, m["x"] + 3)):
        np.testing.assert_array_equal(m[v.name], want)


def test_an_operator_without_a_gradient_is_refused_where_it_would_train_nothing():
    elementwise()(type("squared", (), {"y": lambda x: x * x}))
    square = nn.Function(lambda x: cv.apply("squared", x))
    how = dict(input_shape=(4,), target_shape=(8,), loss="mse", optimizer=cv.SGD(0.1), batch_size=10)
    for net in (nn.Linear(8) >> square, nn.Linear(8) >> square >> nn.Linear(8)):
        with pytest.raises(cv.UnsupportedOperator, match="'squared' has no gradient for its input .*: give it one"):
            cv.Model(net, **how)
    model = cv.Model(square >> nn.Linear(8), **how)  # through data alone
    model.step(np.ones((10, 4)), np.ones((10, 8)))
    elementwise()(type("squared", (), {"y": lambda x: x * x, "dx": lambda dy, x: 0.0 * dy}))
    model = cv.Model(nn.Linear(8) >> square >> nn.Linear(8), **how)
    before = model.get_weights()
    model.step(np.ones((10, 4)), np.ones((10, 8)))
    moved = {name for name, value in model.get_weights().items() if (value != before[name]).any()}
    assert moved == {"linear_2.weight", "linear_2.bias"}


def annotated(p: bool, g):
    return p


@pytest.mark.parametrize("p, why", [(lambda p, g: p > g, "is a condition"), (annotated, "no annotation")])
def test_an_update_is_of_floats(p, why):
    with pytest.raises(cv.CalcError, match=why):
        update()(type("odd", (), {"p": p}))


@pytest.mark.parametrize("name", ["nw", "gpu", "out", "name", "types", "acc", "wn"])
def test_parameters_whose_names_mean_something_else(name):
    with pytest.raises(cv.CalcError, match="cannot be called"):
        elementwise(**{name: Real(1.0, "a factor")})(type("odd", (), {"y": eval(f"lambda x, {name}: x * {name}")}))


def _times(slot):
    """A formula of a parameter that reads a slot."""
    return {
        "gamma": lambda p, g, lr_t, gamma: p - lr_t * gamma * g,
        "total_steps": lambda p, g, lr_t, total_steps: p - lr_t * total_steps * g,
        "weight_decay": lambda p, g, lr_t, weight_decay: p - lr_t * weight_decay * g,
        "beta2_t": lambda p, g, lr_t, beta2_t: p - lr_t * beta2_t * g,
    }[slot]


def test_fields_of_an_optimizer_are_what_its_update_reads():
    @update()
    class heavy:
        def m(g, m, beta1):
            return beta1 * m + g

        def p(p, m, lr_t):
            return p - lr_t * m

    def optimizer(**attributes):
        kinds = {"learning_rate": float, "momentum": float} if "momentum" in attributes else {"learning_rate": float}
        made = type("Heavy", (optim.Optimizer,), {"__annotations__": kinds, "learning_rate": 0.1, **attributes})
        return dataclass(frozen=True)(made)()

    with pytest.raises(cv.CalcError, match="'momentum' is none of"):
        optim.optimizer_of(optimizer(momentum=0.9))
    for wrong in ("0.5", None, np.nan):
        with pytest.raises(cv.CalcError, match="Heavy: momentum must be a finite number"):
            optim.optimizer_of(optimizer(momentum=wrong, slot_of={"momentum": "beta1"}))
    with pytest.raises(cv.CalcError, match="reads beta1"):
        optim.optimizer_of(optimizer())
    for unset in ("gamma", "total_steps", "weight_decay", "beta2_t"):  # nothing sets it: it would be 0
        update()(type("idle", (), {"p": _times(unset)}))
        with pytest.raises(cv.CalcError, match=f"reads {unset}, for which Heavy has no field"):
            optim.optimizer_of(optimizer(row="idle"))
    with pytest.raises(cv.CalcError, match="no update 'light' is declared"):
        optim.optimizer_of(optimizer(row="light"))
    assert optim.optimizer_of(optimizer(momentum=0.9, slot_of={"momentum": "beta1"})).slots()["beta1"] == 0.9


def test_what_stands_in_another_ones_way_is_said():
    """A row of a name that is taken; an operator declared again between two of its uses; the batch twice; a parameter's range."""
    update()(type("odd_fwd", (), {"p": lambda p, g, lr_t: p - lr_t * g}))
    with pytest.raises(cv.CalcError, match="operator 'odd': row 'odd_fwd' is registered already"):
        elementwise()(type("odd", (), {"y": lambda x: 2 * x}))
    g = cv.CalcGraph()
    x, column = g.placeholder("x", (None,)), g.placeholder("column", (None, 1))
    with g.path("p"):
        for factor in (2.0, 3.0):
            elementwise()(type("odder", (), {"y": times(factor)}))
            cv.apply("odder", x)
        elementwise()(type("product", (), {"y": lambda a, b: a * b}))
        with pytest.raises(cv.ShapeError, match=r"the result \(B, B\) has the batch more than once"):
            cv.apply("product", column, x)
        elementwise(k=Real(1.0, "gain", 0, 10))(type("gained", (), {"y": lambda x, k: k * x}))
        with pytest.raises(cv.CalcError, match=r"attribute k=11 is not allowed \(gain, in \[0, 10\]\)"):
            cv.apply("gained", x, k=11)
    with pytest.raises(cv.ProgramError, match="the instruction 'odder_fwd' is there twice: .* build it again"):
        cv.compile(g, batch_size=2)


def times(factor):
    return lambda x: factor * x

"""What users bring themselves: initializers as functions, operators with kernels."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import numpy as np
import pytest

import calcvm as cv
from calcvm import init, nn

ROOT = Path(__file__).parent.parent
RNG = np.random.default_rng(0)
X = RNG.standard_normal((8, 4)).astype("float32")


def small(shape, rng):
    return 0.01 * rng.standard_normal(shape)


def model(start=small, seed=0, **options):
    net = nn.Linear(6, init=start) >> nn.Tanh() >> nn.Linear(2)
    return cv.Model(net, input_shape=(4,), optimizer="adam", batch_size=8, seed=seed, **options)


# ---------------------------------------------------------------- initializers
def test_a_function_draws_from_the_models_seed():
    a, b, c = (model(seed=s).parameters["linear_1.weight"] for s in (0, 0, 1))
    np.testing.assert_array_equal(a, b)
    assert (a != c).all() and 0 < np.abs(a).max() < 0.06
    assert model(seed=0).program == model(seed=1).program


def test_functions_made_again_with_the_same_values_are_the_same_and_others_are_not():
    def make(scale):
        return lambda shape, rng: scale * np.ones(shape)

    one, again, other = (model(make(s)).program for s in (1.0, 1.0, 2.0))
    assert one == again != other
    for program, scale in ((one, 1.0), (other, 2.0)):
        with cv.CalcHeap(program.heap_bytes) as heap:
            assert (heap.create(program)["linear_1.weight"] == scale).all()


class Filling:
    def __init__(self, value):
        self.value = value

    def fill(self, shape, rng):
        return np.full(shape, self.value)


def test_functions_that_differ_by_what_is_around_them_are_others():
    def keyword(value):
        def fill(shape, rng, *, v=value):
            return np.full(shape, v)

        return fill

    def held(values):
        return lambda shape, rng: np.full(shape, values[0])

    for make in (lambda v: Filling(v).fill, keyword, lambda v: held([v])):
        starts = [make(v) for v in (1.0, 2.0)]
        assert [model(f).parameters["linear_1.weight"][0, 0] for f in starts] == [1.0, 2.0]


def test_a_file_does_not_take_another_lambda_for_its_own():
    ours = model(lambda shape, rng: np.full(shape, 7.0))
    program = ours.program
    name = program.info["parameters"]["linear_1.weight"]["init"]["fields"]["name"]
    other = model(lambda shape, rng: np.full(shape, -3.0)).program
    assert other.info["parameters"]["linear_1.weight"]["init"]["fields"]["name"] != name
    init.FUNCTIONS.pop(name)
    with pytest.raises(cv.CalcError, match="which this process does not know"):
        cv.CalcHeap("1 MiB").create(program)


def test_a_file_holds_a_functions_name_alone():
    ours = model()
    file = io.BytesIO()
    ours.save(file)
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    code = """
import io, sys
import numpy as np
import calcvm as cv
data = sys.stdin.buffer.read()
model = cv.load(io.BytesIO(data))  # what it has learnt is in the file
sys.stdout.buffer.write(model.predict(np.ones((3, 4), "float32")).tobytes())
try:
    model.heap.create(cv.load_program(io.BytesIO(data)))
except cv.PlanError:
    cv.CalcHeap("1 MiB").create(cv.load_program(io.BytesIO(data)))
"""
    run = subprocess.run(
        [sys.executable, "-c", code], input=file.getvalue(), capture_output=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert run.stdout == ours.predict(np.ones((3, 4), "float32")).tobytes()
    told = run.stderr.decode().splitlines()[-1]
    assert f"CalcError: a parameter is initialized by the function '{small.__module__}.small-" in told
    again = pickle.loads(pickle.dumps(ours))
    again.reset(0)
    np.testing.assert_array_equal(again.parameters["linear_1.weight"], model().parameters["linear_1.weight"])


def test_fleets_and_graphs_take_functions():
    graph = cv.build_graph(nn.Linear(2, init=small), (4,), "mse", "adam")
    assert graph.form == pickle.loads(pickle.dumps(graph)).form
    program = cv.compile(graph, batch_size=8)
    fleet = cv.Fleet(memory="1 MiB")
    handles = [fleet.add(program, data=(X, X[:, :2]), seed=s) for s in range(3)]
    first = [h.model["linear_1.weight"] for h in handles]
    assert len({w.tobytes() for w in first}) == 3


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            lambda shape, rng: np.zeros(5),
            r"an array of numbers of shape \(4, 6\) is wanted, not ndarray of shape \(5,\)",
        ),
        (lambda shape, rng: "a", r"of shape \(4, 6\) is wanted, not 'a'"),
        (lambda shape, rng: None, r"of shape \(4, 6\) is wanted, not None"),
        (dict, "a function of .shape, rng., or an array is wanted"),
    ],
)
def test_functions_that_give_no_array_are_refused(given, why):
    heap = cv.CalcHeap("1 MiB")
    with pytest.raises(cv.CalcError, match=why):
        model(given, heap=heap)
    assert not heap.names and heap.free_bytes == heap.nbytes


def test_an_error_of_a_function_is_the_users_and_leaves_no_model():
    def wrong(shape, rng):
        raise LookupError("mine")

    heap = cv.CalcHeap("1 MiB")
    with pytest.raises(LookupError, match="mine"):
        model(wrong, heap=heap)
    assert not heap.names and heap.free_bytes == heap.nbytes
    for bad in (3, init.Zeros, init.Zeros()):
        with pytest.raises(cv.CalcError, match=r"a function of \(shape, rng\) is wanted"):
            init.function(bad)  # type: ignore[arg-type]


# ---------------------------------------------------------------- operators
OWN = """
import sys
import numpy as np
import calcvm as cv
from calcvm.operators import Example, OpSpec, R, RowSpec, W, dims, register_op, rows_cols, same_shape
from calcvm.operators.cpu import Ptr, fabs, kernel, like, share

def rows(*names):
    return tuple((R if n[0] != "!" else W)(n.strip("!"), "rows*cols", "rows") for n in names)

def operator(name):
    register_op(OpSpec(
        name=name, synopsis="y = x / (1 + |x|)", category="unary", inputs=("x",), differentiable=("x",),
        shape=same_shape, words=lambda shapes, attrs: rows_cols(shapes["x"]),
        fwd=(RowSpec(name=name + "_fwd", synopsis="y = x / (1 + |x|)", words=dims("rows cols"),
                     operands=rows("x", "!y"), in_place=(("y", "x"),)),),
        bwd=(RowSpec(name=name + "_bwd", synopsis="dx = dy*(1 - |y|)^2", words=dims("rows cols"),
                     operands=rows("y", "dy", "!dx"), in_place=(("dx", "dy"),)),),
    ))

for name in sys.argv[2].split(","):
    operator(name)

@kernel
def softsign_fwd(me, rows, cols, x: Ptr, y: Ptr):
    lo, hi = share(me, rows)
    for i in range(lo * cols, hi * cols):
        y[i] = x[i] / (like(x, 1.0) + fabs(x[i]))

@kernel
def softsign_bwd(me, rows, cols, y: Ptr, dy: Ptr, dx: Ptr):
    lo, hi = share(me, rows)
    for i in range(lo * cols, hi * cols):
        t = like(y, 1.0) - fabs(y[i])
        dx[i] = dy[i] * t * t

x = np.linspace(-2, 2, 12).reshape(4, 3)
if sys.argv[1] == "-":
    g = cv.CalcGraph()
    v, a = g.placeholder("x", (None, 3)), g.parameter("a", (3, 3))
    with g.path("learn", backward=True) as learn:
        y = cv.apply("softsign", v @ a)
        learn.minimize(cv.mean(cv.square(y - 0.5)), cv.SGD(0.3), output=y)
    program = cv.compile(g, batch_size=4, dtype="float64", keep=["y"])
    program.save("program.calc")
else:
    program = cv.load_program(sys.argv[1])
model = cv.CalcHeap("1 MiB").create(program, seed=1)
a = np.array(model["a"])
for _ in range(3):
    z = x @ a
    y = z / (1 + abs(z))
    d = 2 * (y - 0.5) / y.size * (1 - abs(y)) ** 2
    loss = model.step(x)
    assert abs(loss - np.mean((y - 0.5) ** 2)) < 1e-12
    a = a - 0.3 * x.T @ d
    np.testing.assert_allclose(model["a"], a, rtol=1e-10)
print("it works")
"""


def test_an_operator_by_public_names_and_in_stored_programs(tmp_path):
    """Programs name their instructions: another process, which registers in another order, reads the program."""
    (tmp_path / "own.py").write_text(OWN)
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    for arguments in (("-", "softsign,other"), ("program.calc", "third,other,softsign")):
        run = subprocess.run(
            [sys.executable, "own.py", *arguments], cwd=tmp_path, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        assert run.stdout == "it works\n", run.stderr


def test_a_kernel_that_is_defined_again_is_the_one_that_runs(tmp_path):
    (tmp_path / "helper.py").write_text(
        "from calcvm.operators.cpu import njit\n\n@njit\ndef times(x):\n    return x * FACTOR\n"
    )
    code = """
import sys
import numpy as np
import calcvm as cv
from calcvm.operators import OpSpec, R, RowSpec, W, dims, register_op, rows_cols, same_shape
from calcvm.operators.cpu import Ptr, kernel, like, share
import helper

def spec():
    return OpSpec(
        name="times", synopsis="y = c*x", category="unary", inputs=("x",), shape=same_shape,
        words=lambda s, a: rows_cols(s["x"]),
        fwd=(RowSpec(name="times_fwd", synopsis="y = c*x", words=dims("rows cols"),
                     operands=(R("x", "rows*cols", "rows"), W("y", "rows*cols", "rows"))),),
    )

def run():
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 2))
    with g.path("p") as p:
        p.output = cv.apply("times", x).rename("y")
    model = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=1, keep=["y"]))
    model["x"] = np.ones((1, 2))
    model.forward("p")
    return float(model["y"][0, 0])

C = float(sys.argv[1])

@kernel
def times_fwd(me, rows, cols, x: Ptr, y: Ptr):
    lo, hi = share(me, rows)
    for i in range(lo * cols, hi * cols):
        y[i] = helper.times(x[i]) * like(x, C)

register_op(spec())
first = run()
register_op(spec())  # a cell of a notebook, run again
print(first)
"""
    (tmp_path / "own.py").write_text(code)
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    for constant, factor in ((2, 3), (7, 3), (7, 5)):
        text = (tmp_path / "helper.py").read_text()
        (tmp_path / "helper.py").write_text(f"{text.split('FACTOR =')[0]}FACTOR = {factor}.0\n")
        run = subprocess.run(
            [sys.executable, "-B", "own.py", str(constant)], cwd=tmp_path, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        assert run.stdout == f"{constant * factor:.1f}\n", run.stderr


def own_spec(**changes):
    """An operator whose row has ``changes``."""
    from calcvm.operators import OpSpec, R, RowSpec, W, dims, rows_cols, same_shape

    row = {
        "name": "own_fwd", "synopsis": "y = x", "words": dims("rows cols"),
        "operands": (R("x", "rows*cols", "rows"), W("y", "rows*cols", "rows")), **changes,
    }  # fmt: skip
    return OpSpec(
        name="own", synopsis="y = x", category="unary", inputs=("x",), shape=same_shape,
        words=lambda s, a: rows_cols(s["x"]), fwd=(RowSpec(**row),),
    )  # fmt: skip


@pytest.fixture
def forgotten():
    """What a test registers under "own" is gone after it."""
    from calcvm.kernels_cpu._common import KERNELS
    from calcvm.ops import spec as table

    yield
    table.ROWS.pop("own_fwd", None)
    table.OPS.pop("own", None)
    table.OWN.discard("own_fwd")
    KERNELS.pop("own_fwd", None)


WRONG_KERNELS = {
    "a word is missing": "def own_fwd(me, rows, x: Ptr, y: Ptr): pass",
    "no worker": "def own_fwd(rows, cols, x: Ptr, y: Ptr): pass",
    "operands change places": "def own_fwd(me, rows, cols, y: Ptr, x: Ptr): pass",
    "words change places": "def own_fwd(me, cols, rows, x: Ptr, y: Ptr): pass",
    "no pointer": "def own_fwd(me, rows, cols, x, y): pass",
    "more than the row has": "def own_fwd(me, rows, cols, x: Ptr, y: Ptr, z: Ptr): pass",
}


@pytest.mark.parametrize("first", ["row", "kernel"])
@pytest.mark.parametrize("what", WRONG_KERNELS)
def test_a_kernel_that_does_not_fit_its_row_is_refused(what, first, forgotten):
    from calcvm.operators import register_op
    from calcvm.operators.cpu import Ptr, kernel

    scope = {"Ptr": Ptr}
    exec(WRONG_KERNELS[what], scope)
    with pytest.raises(cv.CalcError, match=r"its parameters must be \(me, rows, cols, x: Ptr, y: Ptr\)"):
        for step in (lambda: register_op(own_spec()), lambda: kernel(scope["own_fwd"]))[:: 1 if first == "row" else -1]:
            step()


def wrong_rows():
    from calcvm.operators import A, Operand, R, W, Word, dims

    x, y = R("x", "rows*cols", "rows"), W("y", "rows*cols", "rows")

    def typed(of, below=""):
        return R("x", "rows*cols", "rows", type=of, below=below)

    return {
        "reads 'columns'; the row's words are rows, cols": {"operands": (R("x", "rows*columns"), y)},
        "part of operand 'x': 'row' reads 'row'": {"operands": (R("x", "rows*cols", "row"), y)},
        r"elems of operand 'x': 'rows\*' is no expression": {"operands": (R("x", "rows*"), y)},
        r"'rows\*\*2' is no expression .sizes know words": {"operands": (R("x", "rows**2"), y)},
        "'rows/2' is no expression": {"operands": (R("x", "rows/2"), y)},
        "'rows.real' is no expression": {"flops": "rows.real"},
        "'open.rows.' is no expression": {"flops": "open(rows)"},
        "require 'n - 1': 'n - 1' reads 'n'": {"require": ("n - 1",)},
        "operand 'z' is no value of the operator: there are dx, dy, x, y": {"operands": (x, W("z", "rows"))},
        "in_place has pairs": {"in_place": (("x", "y"),)},
        "in_place has": {"in_place": (("y", "z"),)},
        "'x' is no name of one word or operand": {"operands": (x, R("x", "rows"), y)},
        "'rows' is no name of one": {"words": dims("rows cols rows")},
        "has access 'rw': R, W, A": {"operands": (Operand(name="x", access="rw", elems="rows"), y)},
        "elems of operand 'x': 5 is no expression .it must be a text": {"operands": (R("x", 5), y)},
        "flops: 3 is no expression": {"flops": 3},
        "words must be a tuple of Word, not": {"words": ("rows", "cols")},
        "operands must be a tuple of Operand, not 'xy'": {"operands": "xy"},
        "not 'floaty' from 0": {"words": (*dims("rows cols"), Word(name="k", kind="floaty"))},
        "not 'int' from 3 to 1": {"words": (*dims("rows cols"), Word(name="k", kind="int", lo=3, hi=1))},
        "the word 'acc' is lowering's: take ACC": {"words": (*dims("rows cols"), Word(name="acc", kind="float"))},
        "which the word ACC says": {"operands": (x, A("y", "rows*cols"))},
        "operand 'x' is of the type 'int63', which is none of float, float32, .*any": {"operands": (typed("int63"), y)},
        "operand 'x' is of the type 64, which is": {"operands": (typed(64), y)},
        "below of operand 'x': 'N' reads 'N'; the row's": {"operands": (typed("index", "N"), y)},
        "below of operand 'x': 7 is no expression": {"operands": (typed("int64", 7), y)},
        "operand 'x' of type 'float' has below=, which is of indexes": {"operands": (typed("float", "rows"), y)},
    }


@pytest.mark.parametrize("why", wrong_rows())
def test_a_row_that_could_not_be_planned_is_refused_at_once(why):
    from calcvm.operators import register_op
    from calcvm.ops import spec as table

    with pytest.raises(cv.CalcError, match=f"operator 'own', row 'own_fwd': .*{why}"):
        register_op(own_spec(**wrong_rows()[why]))
    assert "own" not in table.OPS and "own_fwd" not in table.ROWS


def wrong_operators():
    from calcvm.operators import R, RowSpec, S, dims

    row = own_spec().fwd[0]

    def bwd(*operands):
        return (RowSpec(name="own_bwd", synopsis="", words=dims("rows cols"), operands=operands),)

    return {
        "its name must be an identifier": {"name": "my op"},
        "operator 5: its name must be": {"name": 5},
        "category 'foo' is none of unary, binary": {"category": "foo"},
        "inputs must be a tuple of names": {"inputs": "x"},
        "fwd must be a tuple of RowSpec": {"fwd": row},
        "'x' is no name of one input": {"inputs": ("x", "x")},
        "'dx' is the gradient of 'x', and cannot be": {"inputs": ("x", "dx")},
        "differentiable names 'q', which is no input": {"differentiable": ("q",)},
        "flat names 'q', which is no input": {"flat": ("q",)},
        "no forward row writes 'y'": {"fwd": ()},
        "'x' is declared differentiable, but no backward row writes 'dx'": {"differentiable": ("x",)},
        "differentiable, but no backward row writes": {"differentiable": ("x",), "bwd": bwd(R("dy", "rows*cols"), S("s", "rows"))},
    }  # fmt: skip


@pytest.mark.parametrize("why", wrong_operators())
def test_an_operator_that_could_not_be_used_is_refused_at_once(why):
    from dataclasses import replace

    from calcvm.operators import register_op
    from calcvm.ops import spec as table

    before = set(table.OPS), set(table.ROWS)
    with pytest.raises(cv.CalcError, match=why):
        register_op(replace(own_spec(), **wrong_operators()[why]))
    assert (set(table.OPS), set(table.ROWS)) == before


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ({"shape": lambda i, a: None}, "`shape` must return a dict with a tuple of sizes for 'y'.* it returned None"),
        ({"shape": lambda i, a: {"y": (3, 4)}}, "`shape` must return a dict"),
        ({"shape": lambda i, a: 1 // 0}, "`shape` of operator 'own' has raised ZeroDivisionError"),
        ({"words": lambda s: {}}, "`words` of operator 'own' has raised TypeError: .* positional argument"),
        ({"words": lambda s, a: None}, "`words` must return a dict, not None"),
        ({"words": lambda s, a: {"rows": "aa", "cols": 1}}, "row 'own_fwd' has a word 'rows', for which `words` gives 'aa'"),
        ({"words": lambda s, a: {"rows": 1, "cols": 2}}, "row 'own_fwd' writes 2 elements of 'y', which has"),
    ],
)  # fmt: skip
def test_rules_that_are_wrong_are_said_where_the_operator_is_used(rules, why, forgotten):
    from dataclasses import replace

    from calcvm.operators import register_op

    register_op(replace(own_spec(), **rules))
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 2))
    with g.path("p"), pytest.raises(cv.CalcError, match=why):
        cv.apply("own", x)


def test_a_kernel_cannot_raise():
    from calcvm.operators.cpu import kernel

    def raises(me):
        raise ValueError

    def asserts(me):
        assert me

    def yields(me):
        yield

    def prints(me):
        print(me.worker)

    for fn in raises, asserts, yields, prints:
        with pytest.raises(cv.CalcError, match="compiled code cannot raise, assert, yield or print: trap"):
            kernel(fn)
    for nothing in 5, lambda me: None:
        with pytest.raises(cv.CalcError, match="@kernel takes a function named like a row, not"):
            kernel(nothing)


def test_a_kernel_registered_again_is_that_of_programs_loaded_from_then_on(forgotten):
    from calcvm.operators import register_op
    from calcvm.operators.cpu import Ptr, kernel

    register_op(own_spec())
    found = []
    for times in (2, 4):
        scope = {"Ptr": Ptr}
        text = "def own_fwd(me, rows, cols, x: Ptr, y: Ptr):\n    for i in range(rows * cols):\n"
        text += f"        y[i] = {' + '.join(['x[i]'] * times)}\n"
        exec(text, scope)
        scope["own_fwd"].text = text
        kernel(scope["own_fwd"])
        g = cv.CalcGraph()
        x = g.placeholder("x", (None, 2))
        with g.path("p") as p:
            p.output = cv.apply("own", x).rename("y")
        found.append(cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=1, workers=1)))
    assert found[0].program == found[1].program
    for times, model in zip((2, 4), found):
        model["x"] = np.ones((1, 2))
        model.forward("p")
        assert (model["y"] == times).all()


def test_words_that_leave_one_out_are_refused_where_the_operator_is_used(forgotten):
    from calcvm.operators import dims, register_op

    register_op(own_spec(words=dims("rows cols depth")))
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 2))
    with (
        g.path("p"),
        pytest.raises(cv.CalcError, match="row 'own_fwd' has a word 'depth', for which `words` gives None"),
    ):
        cv.apply("own", x)


def unknown_name(me, rows, cols, x, y):
    y[0] = nobody_knows(x[0])  # noqa: F821


def inner_import(me, rows, cols, x, y):
    import math

    y[0] = math.sin(x[0])


def other_float(me, rows, cols, x, y):
    y[0] = np.float16(x[0])


@pytest.mark.parametrize(
    ("fn", "told"), [(unknown_name, "nobody_knows"), (inner_import, "IMPORT_NAME"), (other_float, "float16")]
)
def test_a_kernel_that_does_not_compile_is_said(fn, told, forgotten):
    from calcvm.operators import register_op
    from calcvm.operators.cpu import Ptr, kernel

    made = FunctionType(fn.__code__, globals(), "own_fwd")
    made.__annotations__ = {"x": Ptr, "y": Ptr}
    kernel(made)
    register_op(own_spec())
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 2))
    with g.path("p") as p:
        p.output = cv.apply("own", x).rename("y")
    with pytest.raises(cv.CalcError, match=r"kernel 'own_fwd' cannot be compiled for float32: (.|\n)*" + told):
        cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=1))


def test_calcvms_own_kernels_stay():
    from calcvm.operators.cpu import Ptr, kernel

    def relu_fwd(me, rows, cols, x: Ptr, y: Ptr):
        pass

    with pytest.raises(cv.CalcError, match="kernel 'relu_fwd': the row of that name is calcvm's own"):
        kernel(relu_fwd)
    assert (model().predict(X) != 0).any()


def test_annotations_that_are_no_text():
    """As they are where a file has no ``from __future__ import annotations``."""
    from calcvm.kernel import Float, Ptr, words_of

    def rows_of(me, n, scale, table, i, to): ...

    rows_of.__annotations__ = {"scale": Float, "table": Ptr, "i": Ptr.int64, "to": Ptr.cells}
    assert words_of(rows_of) == (
        ("n", "int"), ("scale", "float"), ("table", "ptr"), ("i", "ptr.int64"), ("to", "ptr.cells"),
    )  # fmt: skip

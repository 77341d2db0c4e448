"""Simplification: the rows that are left, the same bits with and without it, and what must stay apart."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import calcvm as cv
from calcvm.graph import CalcGraph, Operation, Path, Variable, apply
from calcvm.lowering import autodiff, sections
from calcvm.lowering.sections import lower
from calcvm.lowering.simplify import IDEMPOTENT, UNSIGNED
from calcvm.ops import OPS
from tests.kinds.graphs import generate
from tests.kinds.wild import wild

SAMPLE, WHOLE = 12, 400
DTYPES = ("float32", "float64")


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Simplification on or off."""
    simplified, passing = sections.simplified, autodiff.passing

    def to(on: bool) -> None:
        monkeypatch.setattr(sections, "simplified", simplified if on else lambda operations, forward: [*operations])
        monkeypatch.setattr(autodiff, "passing", passing if on else lambda op: op.spec.passes)

    return to


def listing(graph: CalcGraph, phases: tuple[str, ...] = ("forward", "loss", "backward"), **options: Any) -> list[str]:
    """A program's rows and their equations, section by section."""
    text = cv.compile(graph, batch_size=3, workers=1, **options).disassemble()
    sections_of = re.split(r"\n\S+ / (\S+)  \[.*\n", text)[1:]
    found = [part for phase, part in zip(sections_of[::2], sections_of[1::2]) if phase in phases]
    return [" ".join(row) for part in found for row in re.findall(r"^ +\d+  (\S+) +(.*?)  \{", part, re.MULTILINE)]


def rows(graph: CalcGraph, **options: Any) -> list[str]:
    return [s.spec.name for s in lower(graph, **options)[0].statements]


def loaded(graph: CalcGraph, batch: int = 5, dtype: str = "float64", **options: Any) -> Any:
    program = cv.compile(graph, batch_size=batch, dtype=dtype, workers=1, **options)
    return cv.CalcHeap(program.heap_bytes).create(program, seed=3)


def plain(make: Callable[..., Any], backward: bool = False) -> CalcGraph:
    """One path over x (batch, 4) and W (4, 4)."""
    g = CalcGraph()
    x = g.placeholder("x", (None, 4))
    W = g.parameter("W", (4, 4), np.linspace(-1, 1, 16).reshape(4, 4))
    with g.path("p", backward=backward) as p:
        y = make(x, W)
        if backward:
            p.minimize(cv.mean(y), cv.SGD(0.1))
    return g


def minus(x: Variable) -> Variable:
    return -x


def affine(x: Variable, a: float, b: float) -> Variable:
    return apply("affine", x, a=a, b=b)


# ---------------------------------------------------------------- what is left
MATMUL = "matmul_fwd matmul[m,n] = sum[k] x[m,k]*W[k,n]"


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda x, W: cv.exp(x @ W) + cv.exp(x @ W), [MATMUL, "exp_fwd exp = exp(matmul)", "add_fwd y = exp + exp"]),
        (lambda x, W: x * 1.0 + 0.0, ["affine_fwd affine = x"]),
        (lambda x, W: cv.tanh(x) - 0.0, ["tanh_fwd tanh = tanh(x)"]),
        (lambda x, W: cv.tanh(x) * 2 * 3, ["tanh_fwd tanh = tanh(x)", "affine_fwd affine = tanh*2", "affine_fwd y = affine*3"]),
        (lambda x, W: cv.relu(cv.relu(x)) / 1, ["relu_fwd relu = relu(x)", "affine_fwd y = relu"]),
        (lambda x, W: minus(-cv.tanh(x)), ["tanh_fwd tanh = tanh(x)", "neg_fwd neg = -tanh"]),
    ],
)  # fmt: skip
def test_rows_of_a_forward(make, expected):
    found = listing(plain(make))
    assert [re.sub(r"where\(x < 0, 0, x\)", "relu(x)", row) for row in found] == expected


def test_equal_parts_have_one_gradient():
    g = plain(lambda x, W: cv.exp(x @ W) + cv.exp(x @ W), backward=True)
    assert listing(g, ("backward",))[1:] == [
        "mean_bwd dy[a,c] = p.seed/(R0*R1*R2)",
        "add_fwd dexp = dy + dy",
        "exp_bwd dmatmul = where(dexp == 0, 0, dexp*exp)",
        "matmul_bwd_b dW[k,n] = sum[m] x[m,k]*dmatmul[m,n]",
    ]
    assert str(g.paths["p"].gradient_of("W")).splitlines() == [
        "dy = np.broadcast_to(1/(4*B), (B, 4))",
        "dexp = dy + dy",
        "matmul = x @ W",
        "dW = x.T @ np.where(dexp == 0, 0, dexp*np.exp(matmul))",
    ]


def test_a_factor_of_1_is_no_row_of_a_gradient():
    g = plain(lambda x, W: cv.tanh(x @ W) + 5.0, backward=True)
    assert [row.split()[0] for row in listing(g, ("backward",))] == ["tick", "mean_bwd", "tanh_bwd", "matmul_bwd_b"]
    g = plain(lambda x, W: W + 5.0, backward=True)  # the row sets the parameter's gradient, which a copy would
    assert listing(g, ("backward",))[-1] == "affine_bwd dW = dy"


def test_products_that_have_a_bias():
    """A linear row starts its sums from the bias, and rounds otherwise than a product and an addition: it stays what it is."""
    g = CalcGraph()
    x, W, b = g.placeholder("x", (None, 4)), g.parameter("W", (4, 4)), g.parameter("b", (4,))
    with g.path("p"):
        h = cv.tanh(x @ W + b) * cv.tanh(x @ W + b)
        h * (x @ W) + cv.sigmoid(x @ W)
    assert rows(g) == ["linear_fwd", "mul_fwd", "matmul_fwd", "mul_fwd", "sigmoid_fwd", "add_fwd"]


def test_an_activation_of_what_is_read_twice_is_a_row():
    g = plain(lambda x, W: cv.relu(cv.linear(x, W)) + cv.tanh(cv.linear(x, W)))
    assert rows(g) == ["linear_fwd", "relu_fwd", "tanh_fwd", "add_fwd"]


def test_views_are_seen_through():
    def make(x, W):
        once, again = cv.reshape(x, (None, 2, 2)), cv.reshape(cv.flatten(x), (None, 2, 2))
        assert once is not again
        return cv.exp(once) * cv.exp(again) + cv.exp(cv.reshape(x, (None, 1, 2, 2)))[:, 0]

    assert rows(plain(make)).count("exp_fwd") == 2  # that of another shape is shared among workers in another way


def test_numbers_are_the_same_and_named_constants_are_not():
    def make(x, W):
        one, two = (x.graph.constant(name, np.zeros(())) for name in ("one", "two"))
        assert cv.less(x, 0.0) is not cv.less(x, 0.0)
        return (
            cv.where(cv.less(x, 0.0), 0.0, x) + cv.where(cv.less(x, one), 0.0, x) + cv.where(cv.less(x, two), -0.0, x)
        )

    assert rows(plain(make)).count("less_fwd") == 3
    assert rows(plain(lambda x, W: cv.less(x, 0.0) | cv.less(x, 1.0) | cv.less(x, -0.0))).count("less_fwd") == 3


# ---------------------------------------------------------------- generated graphs
def seeds(whole: bool) -> Iterator[int]:
    """Of wild graphs that can be lowered: some have a loss without a gradient."""
    for seed in range(WHOLE if whole else SAMPLE):
        with suppress(cv.UnsupportedOperator):
            lower(wild(seed).graph)
            yield seed


def kept_values(case: Any, keep: bool) -> tuple[dict[str, bytes], int]:
    """All that can be read of all paths after a round of each, and how many rows their forwards have."""
    graph = case.graph
    names = [v.name for v in graph.variables.values() if v.kind == "result"] if keep else []
    program = cv.compile(graph, batch_size=case.batch, workers=1, keep=names)
    model, data, found = cv.CalcHeap(program.heap_bytes).create(program, seed=3), case.data(case.batch, 1), {}
    for path in graph.paths:
        for name in model.loaded.feeds(path):
            model[name] = data[name]
        try:
            model.run_round(path)
        except cv.Trap:
            break
        for name, facts in program.info["variables"].items():
            if facts["path"] == path and not facts["unreadable"]:
                found[name] = model[name].tobytes()
    spans = [program.sections[path, phase] for path in graph.paths for phase in ("forward", "loss")]
    return found, sum(stop - start for start, stop in spans)


@pytest.mark.parametrize("keep", [True, False])
def test_generated_graphs_have_the_same_bits(keep, switch, whole):
    graphs = fewer = compared = 0
    for seed in seeds(whole):
        case = wild(seed)
        for path in case.graph.paths.values():
            doubled(path)
        (found, n), (want, n_without) = (switch(on) or kept_values(case, keep) for on in (True, False))
        assert {*want} <= {*found}
        assert [name for name in want if want[name] != found[name]] == [], f"seed {seed}"
        assert n <= n_without, f"seed {seed}"
        graphs, fewer, compared = graphs + 1, fewer + (n < n_without), compared + len(want)
    assert fewer > 0.9 * graphs > SAMPLE / 2 and compared > 10 * graphs


def doubled(path: Path) -> dict[Variable, Variable]:
    """Add to a path all its operators once more, on what they make, but those that draw or update; results by those they repeat."""
    graph, again = path.graph, dict[Variable, Variable]()
    for op in [*path.operations]:
        if op.spec.updates or op.spec.category == "random":
            continue
        name = graph.unique(f"{op.name}_again")
        outputs = {
            slot: graph._add(
                graph.unique(f"{v.name}_again"), "result", v.shape, type=v.type, path=path, layout=v.layout
            )
            for slot, v in op.outputs.items()
        }
        inputs = {slot: again.get(v, v) for slot, v in op.inputs.items()}
        new = Operation(op.spec, inputs, outputs, op.laid, op.saved, op.attrs, name, op.layer)
        for v, same in zip(op.outputs.values(), outputs.values()):
            same.producer, again[v] = new, same
        path.operations.append(new)
    return again


def test_a_doubled_graph_is_the_graph(monkeypatch, whole):
    """Its rows are those of the graph alone: of products that take a bias both must do so, or neither."""
    monkeypatch.setattr(sections, "fuse_bias", lambda path, kept: [*path.operations])
    found = 0
    for seed in seeds(whole):
        for graph in (wild(seed).graph, generate(seed).build()):
            for path in graph.paths.values():
                path.output = None  # what it does not need would be computed in another section
            once = [(s.spec.name, s.path, s.phase) for s in lower(graph)[0].statements]
            for path in graph.paths.values():
                doubled(path)
            assert [(s.spec.name, s.path, s.phase) for s in lower(graph)[0].statements] == once, f"seed {seed}"
            found += len(once)
    assert found > 100


def test_gradients_of_doubled_graphs_are_twice_as_large(whole):
    compared = 0
    for seed in seeds(whole):
        gradients = []
        for twice in (False, True):
            case = wild(seed)
            learn = case.learn
            if twice and learn.loss is not None and learn.loss in (again := doubled(learn)):
                with case.graph.extend("learn"):
                    learn.loss = cv.add(learn.loss, again[learn.loss])
            model, data = loaded(case.graph, case.batch), case.data(case.batch)
            for name in model.loaded.feeds("learn"):
                model[name] = data[name]
            for path, _ in model.loaded.before("learn", ("forward", "loss")):
                for name in model.loaded.feeds(path):
                    model[name] = data[name]
                model.run_round(path)
            model.run_round("learn")
            model.backward("learn")
            gradients.append({n: np.array(model.grad(n, "learn")) for n in model.loaded.paths["learn"]["gradients"]})
        assert gradients[0].keys() == gradients[1].keys()
        for name, once in gradients[0].items():
            if np.isfinite(once).all():
                np.testing.assert_allclose(
                    gradients[1][name], 2 * once, rtol=1e-9, atol=1e-12, err_msg=f"seed {seed}, {name}"
                )
                compared += bool(once.any())
    assert compared > SAMPLE


# ---------------------------------------------------------------- to the bit
def special(dtype: str) -> np.ndarray:
    info = np.finfo(dtype)
    ends = (
        0.0,
        1.0,
        1.5,
        2.5,
        6.0,
        800.0,
        info.max,
        info.tiny,
        info.smallest_subnormal,
        3 * info.smallest_subnormal,
        np.inf,
        np.nan,
    )
    numbers = np.array([(x, -x) for x in ends], dtype).ravel()
    return np.resize(numbers, (len(numbers) // 4, 4))


H: Callable[[Variable], Variable] = cv.tanh  # what is made of data: tanh(-0.0) is -0.0
NOTHING: dict[str, Callable[[Variable], Variable]] = {
    "h - 0.0": lambda x: H(x) - 0.0,
    "h*1 and no -0.0 added": lambda x: affine(H(x), 1.0, -0.0),
    "x*1*1": lambda x: x * 1 * 1.0,
    "(x + 1) + 0": lambda x: x + 1 + 0,
    "(1 - x)*1": lambda x: (1 - x) * 1,
    "x*-2*1": lambda x: x * -2 * 1,
    "-(-h)": lambda x: minus(-H(x)),
    "h[:]": lambda x: H(x)[:, 0:4],
    "h.T.T": lambda x: cv.transpose(cv.transpose(H(x))),
    "turned in threes": lambda x: cv.transpose(cv.transpose(cv.reshape(H(x), (None, 2, 2)), (1, 2, 0)), (2, 0, 1)),
    "h padded by nothing": lambda x: cv.pad(H(x), ((0, 0), (0, 0))),
    "of what is twice": lambda x: H(x) * minus(-H(x)),
    "h four times turned around": lambda x: minus(-minus(-H(x))),
} | {f"{name}*1": lambda x, name=name: apply(name, x) * 1 for name in sorted(UNSIGNED)} | {
    f"{name}({name})": lambda x, name=name: apply(name, apply(name, x, **ATTRS.get(name, {})), **ATTRS.get(name, {}))
    for name in sorted(IDEMPOTENT)
}  # fmt: skip
ATTRS = {"clip": {"lo": -0.0, "hi": 2.0}}
SOMETHING: dict[str, Callable[[Variable], Variable]] = {
    "h*1, of which -0.0 is 0.0": lambda x: H(x) * 1,
    "h + 0": lambda x: H(x) + 0.0,
    "x*0.5*1": lambda x: x * 0.5 * 1,
    "h + 1 - 1": lambda x: H(x) + 1 - 1,
    "h*3/3": lambda x: H(x) * 3 / 3,
    "h*0": lambda x: H(x) * 0.0,
    "h - h": lambda x: H(x) - H(x),
    "h*2*3": lambda x: H(x) * 2 * 3,
    "h - 1e-50*1": lambda x: affine(affine(H(x), 1.0, -1e-50), 1.0, 0.0),
    "x*1.5 - 0.0*1": lambda x: affine(H(x), 1.0, -0.0) * 1,
    "h[1:]": lambda x: H(x)[:, 1:],
    "turned twice": lambda x: cv.transpose(
        cv.transpose(cv.reshape(cv.concat([H(x), x], 1), (None, 2, 2, 2)), (0, 2, 3, 1)), (0, 2, 3, 1)
    ),
    "h padded": lambda x: cv.pad(H(x), ((0, 0), (0, 1))),
    "clip by others": lambda x: cv.clip(cv.clip(x, -1.0, 2.0), -2.0, 1.0),
    "leaky": lambda x: cv.leaky_relu(cv.leaky_relu(x)),
}


def row_and_values(make: Callable[[Variable], Variable], dtype: str) -> tuple[list[str], bytes]:
    g = CalcGraph()
    x, data = g.placeholder("x", (None, 4)), special(dtype)
    with g.path("p"):
        make(x).rename("y")
    program = cv.compile(g, batch_size=len(data), dtype=dtype, workers=1)
    model = cv.CalcHeap(program.heap_bytes).create(program)
    model["x"] = data
    model.run_round("p")
    return [program.instructions[row[0]].name for row in program.rows], model["y"].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("what", NOTHING)
def test_what_changes_nothing_is_no_row(what, dtype, switch):
    found, values = row_and_values(NOTHING[what], dtype)
    switch(False)
    whole, want = row_and_values(NOTHING[what], dtype)
    assert values == want
    assert len(found) < len(whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("what", SOMETHING)
def test_what_may_change_a_bit_is_a_row(what, dtype, switch):
    found, values = row_and_values(SOMETHING[what], dtype)
    switch(False)
    whole, want = row_and_values(SOMETHING[what], dtype)
    assert values == want
    assert len(found) == len(whole) - (what == "h - h") - (what == "x*1.5 - 0.0*1")  # tanh twice; - 0.0


# ---------------------------------------------------------------- what must stay apart
def test_a_buffer_is_read_before_and_after_its_update():
    g = CalcGraph()
    x, mean = g.placeholder("x", (None, 3)), g.buffer("mean", (3,), "ones")
    w = g.parameter("w", (3,), np.ones(3))
    with g.path("learn", backward=True, adopt=False) as learn:
        seen = cv.stop_gradient(mean)
        read = [cv.sub(x, mean).rename("a"), (cv.stop_gradient(mean) * 2).rename("as"), (seen * 3).rename("at")]
        cv.sub(x, mean).rename("a_too")
        centered = cv.center(x, mean)
        after = [cv.sub(x, mean).rename("b"), (cv.stop_gradient(mean) * 2).rename("bs"), (seen * 3).rename("bt")]
        learn.minimize(cv.mean(centered * w), cv.SGD(0.0))
    assert [s.spec.name for s in lower(g)[0].statements].count("sub_fwd") == 2
    model = loaded(g)
    X = np.arange(15.0).reshape(5, 3)
    model["x"] = X
    model.run_round("learn")
    now = model.buffers["mean"]
    assert not np.allclose(now, 1)
    for (a, b), was in zip(zip(read, after), (X - 1, 2 * np.ones(3), 3 * np.ones(3))):
        np.testing.assert_allclose(model[a.name], was)
        np.testing.assert_allclose(model[b.name], {"b": X - now, "bs": 2 * now, "bt": 3 * now}[b.name])
    assert model["a"].tobytes() == model["a_too"].tobytes()


def test_what_is_drawn_is_drawn_again():
    g = CalcGraph()
    x = g.placeholder("x", (None, 50))
    with g.path("p", adopt=False) as p:
        a, b = cv.dropout(x, 0.5), cv.dropout(x, 0.5)
        op = p.operations[0]
        again = apply("dropout", *op.inputs.values(), **op.attrs)  # from the stream that it draws from
        cv.concat([a, b, again], 1).rename("y")
    assert rows(g).count("dropout_fwd") == 3
    model = loaded(g)
    model["x"] = np.ones((5, 50))
    model.run_round("p")
    assert not np.array_equal(model["y"][:, :50], model["y"][:, 50:100])


def test_custom_operators(monkeypatch):
    """They are computed once, unless their category says that they draw."""
    for category, n in (("unary", 1), ("random", 2)):
        monkeypatch.setitem(OPS, "custom", replace(OPS["exp"], name="custom", category=category))
        assert rows(plain(lambda x, W: apply("custom", x) * apply("custom", x))) == ["exp_fwd"] * n + ["mul_fwd"]


def test_operators_of_several_results(monkeypatch):
    several = replace(
        OPS["exp"], name="several", outputs=("y", "z"), shape=lambda shapes, attrs: dict.fromkeys("yz", shapes["x"])
    )
    monkeypatch.setitem(OPS, "several", several)
    assert rows(plain(lambda x, W: apply("several", x) * apply("several", x))) == ["exp_fwd", "exp_fwd", "mul_fwd"]


def test_a_buffer_is_updated_twice():
    g = CalcGraph()
    x, mean, w = g.placeholder("x", (None, 3)), g.buffer("mean", (3,)), g.parameter("w", (3,))
    with g.path("learn", backward=True) as learn:
        learn.minimize(cv.sum((cv.center(x, mean) + cv.center(x, mean)) * w), cv.SGD(0.0))
    assert rows(g).count("center_fwd") == 2


def test_equal_attributes_are_equal_to_the_bit():
    zeros = plain(lambda x, W: affine(x, 2.0, 0.0) * affine(x, 2.0, -0.0) * affine(x, 2.0, 0.0))
    assert rows(zeros).count("affine_fwd") == 2
    assert rows(plain(lambda x, W: cv.sum(x, (1,)) * cv.sum(x, 1) + cv.sum(x, 0)[0])).count("sum_fwd") == 2
    assert rows(plain(lambda x, W: x @ W + cv.matmul(x, W, transpose_b=True))).count("matmul_fwd") == 2


def test_operands_are_told_apart():
    norms = plain(lambda x, W: apply("layer_norm", x, W[0], None) + apply("layer_norm", x, None, W[0]))
    assert rows(norms).count("layer_norm_fwd") == 2
    assert rows(plain(lambda x, W: (x @ W - x) + (x - x @ W))).count("sub_fwd") == 2


def test_paths_and_sections_compute_for_themselves():
    g = CalcGraph()
    x, t, w = g.placeholder("x", (None, 3)), g.placeholder("t", (None, 3)), g.parameter("w", (3,))
    with g.path("learn", backward=True) as learn:
        h = cv.exp(x * w)
        loss = cv.mse(h, t) + cv.mean(cv.exp(x * w)) + cv.mean(cv.exp(x * w))
        for v in (h, x):  # of what they are when the loss is computed
            (v - 0.0).rename(f"{v.name} then")
        learn.minimize(loss, cv.SGD(0.1), output=h)
    with g.path("predict"):
        cv.exp(x * w)
    where = [(s.path, s.phase) for s in lower(g)[0].statements if s.spec.name == "exp_fwd"]
    assert where == [("learn", "forward"), ("learn", "loss"), ("predict", "forward")]
    assert rows(g).count("affine_fwd") == 2


def test_a_gradient_is_by_one_of_two_equal_variables():
    """d(a*b)/da is b, also where b is computed as a is."""
    g = CalcGraph()
    x = g.placeholder("x", (None, 3))
    with g.path("p", adopt=False):
        a, b = cv.exp(x), cv.exp(x)
        r, q = cv.reshape(a, (None, 3, 1)), cv.reshape(a, (None, 3, 1))
        m = -cv.tanh(x)
        dots = {
            "da": (cv.sum(a * b), a), "db": (cv.sum(a * b), b), "dr": (cv.sum(cv.square(r) + cv.square(q)), r),
            "dm": (cv.sum(cv.square(-m)), m), "dx": (cv.sum(a * b), x),
        }  # fmt: skip
        scaled = x * np.full(3, 2.0)
        dots["dc"] = cv.sum(scaled * (x * np.full(3, 2.0))), scaled.producer.inputs["b"]
        for name, (y, by) in dots.items():
            cv.gradient(y, by).rename(name)
    model, X = loaded(g), np.linspace(-1, 1, 15).reshape(5, 3)
    model["x"] = X
    model.run_round("p")
    e = np.exp(X)
    for name, want in {
        "da": e,
        "db": e,
        "dr": 2 * e[..., None],
        "dm": -2 * np.tanh(X),
        "dx": 2 * e * e,
        "dc": 2 * (X * X).sum(0),
    }.items():
        np.testing.assert_allclose(model[name], want, err_msg=name)


def test_gradients_are_asked_for_once():
    def make(x, W):
        y = cv.sum(cv.tanh(x @ W))
        return cv.gradient(y, x) * cv.gradient(cv.sum(cv.tanh(x @ W)), x)

    assert rows(plain(make)).count("tanh_bwd") == rows(plain(make)).count("matmul_bwd_a") == 1


def test_gradients_stop_where_they_did():
    g = CalcGraph()
    x, w = g.placeholder("x", (None, 3)), g.parameter("w", (3,), np.full(3, 0.5))
    with g.path("learn", backward=True) as learn:
        h = x * w
        y = cv.exp(cv.stop_gradient(h)) + cv.exp(cv.stop_gradient(h)) + 3 * cv.exp(h)
        learn.minimize(cv.sum(y), cv.SGD(0.1))
    assert rows(g).count("exp_fwd") == 2
    model, X = loaded(g), np.linspace(-1, 1, 15).reshape(5, 3)
    model["x"] = X
    model.run_round("learn")
    model.backward("learn")
    np.testing.assert_allclose(model.grad("w", "learn"), (3 * np.exp(X / 2) * X).sum(0))


def test_what_is_not_computed_in_the_section_keeps_its_row():
    """A kept result is what it was when it was computed, whatever becomes of the data, parameters and results it was made of."""
    g = CalcGraph()
    x, z, w = (
        g.placeholder("x", (None, 3)),
        g.placeholder("z", (None, 3), "float64"),
        g.parameter("w", (3,), np.ones(3)),
    )
    with g.path("first", adopt=False):
        h = cv.exp(x)
    with g.path("learn", backward=True, adopt=False) as learn:
        sources = (x, w, h, cv.stop_gradient(w), cv.reshape(x, (3, None)), cv.cast(z, None))
        kept = [(v - 0.0).rename(f"of {v.name}") for v in sources]
        learn.minimize(cv.sum(h * w), cv.SGD(0.5))
    assert rows(g, dtype="float64").count("affine_fwd") == len(kept)
    model = loaded(g)
    model["x"] = model["z"] = np.zeros((5, 3))
    model.run_round("first")
    model.run_round("learn")
    model.backward("learn")
    model.optimize("learn")
    model["x"] = model["z"] = np.ones((5, 3))
    model.forward("first")
    assert model.parameters["w"][0] != 1
    for v, was in zip(kept, (0, 1, 1, 1, 0, 0)):
        assert (model[v.name] == was).all(), v


def test_images_that_lie_otherwise():
    """The same cells, seen as images with channels last: what is made of them has another shape for users."""
    g = CalcGraph()
    x, w = g.placeholder("x", (None, 2, 4, 3)), g.parameter("w", (3, 2, 1, 1), np.ones((3, 2, 1, 1)))
    with g.path("p", adopt=False) as p:
        h = cv.conv2d(x, w)
        made = [
            cv.exp(h).rename("a"),
            cv.exp(cv.channels_last(h)).rename("b"),
            cv.transpose(h, (0, 2, 3, 1)).rename("c"),
        ]
        p.output = tuple(made)
    model, X = loaded(g), np.random.default_rng(0).normal(size=(5, 2, 4, 3))
    model["x"] = X
    model.run_round("p")
    want = np.repeat(X.sum(1, keepdims=True), 3, 1)
    np.testing.assert_allclose(model["a"], np.exp(want))
    np.testing.assert_allclose(model["b"], np.exp(want).transpose(0, 2, 3, 1))
    np.testing.assert_allclose(model["c"], want.transpose(0, 2, 3, 1))


# ---------------------------------------------------------------- names
def test_both_are_read_by_their_names():
    g = CalcGraph()
    x = g.placeholder("x", (None, 3))
    with g.path("first", adopt=False) as first:
        a, b = cv.exp(x).rename("a"), cv.exp(x).rename("b")
        c = cv.reshape(b, (3, None)).rename("c")
        first.output = (a, b, minus(-a).rename("d"))
    with g.path("second", adopt=False):
        (a * 2 + b * 3 + cv.reshape(c, (None, 3))).rename("y")
    assert rows(g).count("exp_fwd") == 1
    model, X = loaded(g), np.linspace(-1, 1, 15).reshape(5, 3)
    model["x"] = X
    model.run_round("first")
    model.run_round("second")
    np.testing.assert_allclose(model["a"], np.exp(X))
    for name in "bcd":
        assert model[name].tobytes() == model["a"].tobytes()
    assert model["c"].shape == (3, 5)
    np.testing.assert_allclose(model["y"], 6 * np.exp(X))


def test_what_is_overwritten_cannot_be_read():
    g = plain(lambda x, W: cv.exp(cv.exp(x)) + cv.exp(cv.exp(x)))
    model = loaded(g)
    for name in ("exp", "exp_2", "exp_3", "exp_4"):
        with pytest.raises(cv.CalcError, match="overwritten within the step"):
            model[name]


def test_what_nobody_keeps_is_not_there_because_its_equal_is():
    """Else it would be a figure of the model."""
    g = CalcGraph()
    x = g.placeholder("x", (None, 3))
    with g.path("p", adopt=False):
        cv.sum(cv.tanh(x)).rename("kept")
        passing = cv.sum(cv.tanh(x)).rename("passing")
        view = cv.reshape(passing, (1,)).rename("view")
        (view * 2).rename("y")
    variables = cv.compile(g, batch_size=5).info["variables"]
    assert len({variables[name]["symbol"] for name in ("kept", "passing", "view")}) == 1
    assert [name for name in ("kept", "passing", "view", "y") if not variables[name]["unreadable"]] == ["kept", "y"]
    kept = cv.compile(g, batch_size=5, keep=["view"]).info["variables"]
    assert not kept["view"]["unreadable"] and not kept["passing"]["unreadable"]


def test_layers_and_figures_stay():
    """A network that is built twice on the same data, and the same figure by two names."""
    net = cv.nn.Linear(4) >> cv.nn.ReLU()
    g = CalcGraph()
    x, t = g.placeholder("x", (None, 3)), g.placeholder("t", (None, 4))
    with g.path("learn", backward=True) as learn:
        y = net.build(x) + net.build(x)
        loss = cv.mse(y, t)
        learn.minimize(loss, cv.SGD(0.1), output=y)
    with g.path("predict") as predict:
        out = net.build(x) + net.build(x)
        for name in ("one", "two"):
            cv.mean(out).rename(name)
        predict.output = out
    model = cv.Model(g, batch_size=5, workers=1, seed=0)
    X, T = np.ones((5, 3)), np.ones((5, 4))
    before = model.step(X, T)
    assert model.step(X, T) < before
    names = [line[0] for line in model.program.info["layers"]["learn"]]
    assert len(names) == len({*names}) and {"linear_1", "relu_1"} <= {*names}
    assert sum(line[2] for line in model.program.info["layers"]["learn"]) == 3 * 4 + 4
    shown = model.evaluate(X, T)
    assert shown["one"] == shown["two"]


# ---------------------------------------------------------------- wherever graphs are lowered
def network_of_equals() -> tuple[CalcGraph, np.ndarray, np.ndarray]:
    g = CalcGraph()
    x, t = g.placeholder("x", (None, 6)), g.placeholder("t", (None, 3))
    rng = np.random.default_rng(0)
    W, V = g.parameter("W", (6, 8), rng.normal(size=(6, 8))), g.parameter("V", (8, 3), rng.normal(size=(8, 3)))
    for name in ("learn", "predict"):
        with g.path(name, backward=name == "learn", adopt=False) as path:
            h = cv.tanh(x @ W) * cv.sigmoid(minus(-(x @ W))) + cv.tanh(x @ W)
            y = h @ V + 1.0
            if name == "predict":
                path.output = y
            else:
                path.minimize(cv.mse(y, t) + 0.1 * cv.mse(y, t), cv.Adam(0.01), output=y)
    return g, rng.normal(size=(8, 6)), rng.normal(size=(8, 3))


@pytest.mark.parametrize("options", [{}, {"learning_batch": 16}, {"workers": 2}])
def test_training_is_as_without(options, switch):
    trained = []
    for on in (True, False):
        switch(on)
        g, X, T = network_of_equals()
        model = cv.Model(g, batch_size=8, dtype="float64", seed=0, **{"workers": 1, **options})
        trained.append(([model.step(X, T) for _ in range(6)], model.parameters["W"].copy(), model.predict(X)))
    for found, want in zip(*trained):
        np.testing.assert_allclose(found, want, rtol=1e-12)


def test_a_script_computes_as_the_model(tmp_path):
    g, X, T = network_of_equals()
    model = cv.Model(g, batch_size=8, dtype="float64", seed=0, workers=1)
    model.to_python(tmp_path / "script.py")
    scope: dict[str, Any] = {"__name__": "script", "__file__": str(tmp_path / "script.py")}
    exec((tmp_path / "script.py").read_text(), scope)
    for _ in range(3):
        np.testing.assert_allclose(scope["step"](X, T), model.step(X, T), rtol=1e-12)
    np.testing.assert_allclose(scope["predict"](X), model.predict(X), rtol=1e-12)


def test_on_several_devices():
    g, X, T = network_of_equals()
    program = cv.compile(g, batch_size=8, workers=1)
    one = cv.CalcHeap(program.heap_bytes).create(program, seed=3)
    processors = [
        cv.Processor("a", workers=1),
        cv.Processor("b", workers=1, costs=lambda row: 0.0 if row["row"] in ("tanh_fwd", "sigmoid_fwd") else 1.0),
    ]
    plan = cv.plan_devices(g, processors, batch_size=8, copies={("a", "b"): (0.0, 1e18), ("b", "a"): (0.0, 1e18)})
    assert len({*plan.where}) == 2
    split = cv.SplitModel(plan, seed=3)
    for _ in range(3):
        assert split.step(X, T) == one.step(X, T)


def test_stored_and_read_again(tmp_path):
    g, X, T = network_of_equals()
    model = cv.Model(g, batch_size=8, seed=0, workers=1)
    model.step(X, T)
    model.save(tmp_path / "m.calc")
    np.testing.assert_array_equal(cv.load(tmp_path / "m.calc").predict(X), model.predict(X))
    again = cv.read_graph(g.text())
    assert cv.compile(again, batch_size=8, workers=1).hash == cv.compile(g, batch_size=8, workers=1).hash

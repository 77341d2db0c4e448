"""Equations on variables of a graph: numbers and gradients beside PyTorch and the language's own meaning, their rows, what is refused."""

from __future__ import annotations

import re
import runpy
import string

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.equations.functions import ARGUMENTS
from calcvm.equations.grammar import read
from calcvm.equations.meaning import evaluate
from calcvm.indexed.einsum import equation_of
from calcvm.indexed.products import pairs
from tests.cuda.conftest import gpu  # noqa: F401
from tests.equations.random_windows import random_windows
from tests.equations.user_cases import Case, cases

CASES = cases() if pytest.importorskip("torch") else {}
BATCHES = (5, 1, 3)
ON_CUDA = (
    "linear",
    "conv1d",
    "softmax",
    "cross entropy",
    "attention",
    "max with zeros beyond",
    "pick in the middle",
    "diagonal",
)


def graph_of(case: Case, trains: bool = False) -> cv.CalcGraph:
    """A path "p" with the case's result, and the gradients of its sum by weights r; "f" with the result alone."""
    g, given = cv.CalcGraph(), {}
    values = case.values(max(BATCHES))
    for name, shape in case.shapes.items():
        data = None in shape or name in case.classes
        type_ = "int64" if name in case.classes else None
        given[name] = g.placeholder(name, shape, type_) if data else g.parameter(name, shape, init=values[name])
    with g.path("f"):
        cv.equation(case.text, **given, **case.numbers).rename("alone")
    with g.path("p"):
        y = cv.equation(case.text, **given, **case.numbers).rename("result")
        r = g.placeholder("r", y.descriptor.generic)
        total = cv.sum(y * r)
        for name in graded(case):
            cv.gradient(total, given[name]).rename(f"grad.{name}")
    return g


def graded(case: Case) -> list[str]:
    return [name for name in case.shapes if case.graded and name not in case.classes]


def meant(case: Case, values: dict[str, np.ndarray]) -> np.ndarray:
    """The result as the language says it, in float64."""
    numbers = {n: v for n, v in case.numbers.items() if not isinstance(v, np.ndarray)}
    arrays = {**values, **{n: v for n, v in case.numbers.items() if n not in numbers}}
    found = evaluate(read(case.text), arrays, numbers)
    return found[[*found][-1]]


def forward_rows(program: cv.Program, path: str = "f") -> list[str]:
    """Names of the rows of a path's forward, without types."""
    text = program.disassemble().partition(f"{path} / forward")[2].split("\n\n")[0]
    return [
        re.split(r"[\s.]|(?<=^equation)_", line.split(None, 1)[1])[0]
        for line in text.splitlines()[1:]
        if line.strip()[:1].isdigit()
    ]


def listing(program: cv.Program) -> list[str]:
    """Rows with the shapes of their operands and their words, without names and offsets."""
    rows = [line.split(None, 2)[1:] for line in program.disassemble().splitlines() if re.match(r"\s+\d+  \w", line)]
    return [" ".join([name, *re.findall(r"\[[^]]*\]|{.*}|[|]sync", rest)]) for name, rest in rows]


@pytest.mark.peers
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_torch(name):
    import torch

    case, seen = CASES[name], {}
    keep = ["alone", "result", *(f"grad.{n}" for n in graded(case))]
    for workers in (1, 2, 3):
        program = cv.compile(graph_of(case), batch_size=max(BATCHES), workers=workers, dtype="float64", keep=keep)
        with cv.CalcHeap(program.heap_bytes) as heap:
            model = heap.create(program, seed=0)
            for batch in BATCHES:
                batch = max(batch, case.least)
                values = case.values(batch)
                theirs = [torch.tensor(v, requires_grad=n in graded(case)) for n, v in values.items()]
                want = case.theirs(*theirs)
                r = np.random.default_rng(1).standard_normal(want.shape)
                for n, v in {**values, "r": r}.items():
                    if n == "r" or None in case.shapes[n] or n in case.classes:
                        model[n] = v
                model.forward("f")
                alone = model["alone"].copy()
                model.forward("p")
                ours = {n: model[n].copy() for n in keep[1:]}
                assert alone.tobytes() == ours["result"].tobytes()
                assert ours["result"].shape == tuple(want.shape)
                wanted = {"result": want.detach().numpy()}
                np.testing.assert_allclose(ours["result"], meant(case, values), rtol=1e-9, atol=1e-9)
                if graded(case):
                    slopes = torch.autograd.grad((want * torch.tensor(r)).sum(), [t for t in theirs if t.requires_grad])
                    wanted |= {f"grad.{n}": s.numpy() for n, s in zip(graded(case), slopes)}
                for n, v in ours.items():
                    np.testing.assert_allclose(v, wanted[n], rtol=1e-9, atol=1e-9, err_msg=f"{n}, batch {batch}")
                bits = {n: v.tobytes() for n, v in ours.items()}
                assert seen.setdefault(batch, bits) == bits, f"{workers} workers give other bits"
    rows = forward_rows(program)
    assert {*case.rows} <= {*rows} and not {*case.without} & {*rows}, rows


# ---------------------------------------------------------------- the same rows as the operators that there are
def _ours_and_theirs():
    def layer(text, weight, bias=None):
        def build(x, g):
            given = {"x": x, "w": g.parameter("w", weight), **({"v": g.parameter("v", bias)} if bias else {})}
            return cv.equation(text, **given)

        return build

    def built(net):
        return lambda x, g: net.build(x)

    return {
        "linear": (
            (None, 7), layer("y[b,o] = relu(sum[i] x[b,i]*w[i,o] + v[o])", (7, 5), (5,)), built(nn.Linear(5) >> nn.ReLU()),
        ),
        "linear of sequences": (
            (None, 3, 7), layer("y[b,t,o] = sum[i] x[b,t,i]*w[i,o] + v[o]", (7, 5), (5,)), built(nn.Linear(5) >> nn.Sequential()),
        ),
        "linear, no bias": (
            (None, 7), layer("y[b,o] = tanh(sum[i] x[b,i]*w[i,o])", (7, 5)), built(nn.Linear(5, bias=False) >> nn.Tanh()),
        ),
        "conv2d": (
            (None, 3, 8, 8), layer("y[n,f,i,j] = relu(sum[c,t,u] x[n, c, i - 1 + t, j - 1 + u]*w[f,c,t,u] + v[f])", (4, 3, 3, 3), (4,)),
            built(nn.Conv2d(4, 3, padding=1) >> nn.ReLU()),
        ),
        "conv1d, stride": (
            (None, 3, 9), layer("y[n,f,o] = sum[c,t] x[n, c, o*2 + t]*w[f,c,t] + v[f]", (4, 3, 3), (4,)),
            built(nn.Conv1d(4, 3, stride=2) >> nn.Sequential()),
        ),
        "max_pool": (
            (None, 3, 8, 8), lambda x, g: cv.equation("y[n,c,i,j] = max[t<2,u<2] x[n, c, i*2 + t, j*2 + u]", x=x),
            lambda x, g: cv.max_pool(x, 2),
        ),
        "softmax": (
            (None, 6), lambda x, g: cv.equation("y[r,j] = exp(x[r,j])/sum[k] exp(x[r,k])", x=x), lambda x, g: cv.softmax(x),
        ),
        "matmul": (
            (None, 4, 6), lambda x, g: cv.equation("y[b,i,j] = sum[k] x[b,i,k]*x[b,j,k]", x=x), lambda x, g: cv.matmul(x, x, transpose_b=True),
        ),
        "gram": ((None, 6), lambda x, g: cv.einsum("bi,bj->ij", x, x), lambda x, g: cv.matmul(x, x, transpose_a=True)),
    }  # fmt: skip


@pytest.mark.parametrize("name", _ours_and_theirs())
def test_rows_are_those_of_the_built_in_layer(name):
    shape, *ways = _ours_and_theirs()[name]
    found = []
    for way in ways:
        g = cv.CalcGraph()
        x = g.placeholder("x", shape)
        with g.path("learn", backward=True) as learn:
            scale = g.parameter("scale", ())
            learn.minimize(cv.mean(cv.square(way(x, g)) * scale), cv.SGD(0.1))
        found.append(listing(cv.compile(g, batch_size=8, workers=2)))
    assert found[0] == found[1]
    assert len(found[0]) > 5


# ---------------------------------------------------------------- other ways of writing the same
def compiled(make, shapes: dict, **more) -> cv.Program:
    g = cv.CalcGraph()
    given = {n: g.placeholder(n, s) if None in s else g.parameter(n, s) for n, s in shapes.items()}
    with g.path("p"):
        make(**given).rename("out")
    return cv.compile(g, batch_size=4, workers=1, **more)


def traced_linear(x, w, v):
    b, o, i = cv.indexes("b o i")
    return cv.equation[b, o](cv.tanh(cv.sum(i, x[b, i] * w[i, o]) + v[o]))


def traced_conv(x, w):
    n, o, c, f, t = cv.indexes("n, o, c, f, t<3")
    return cv.equation[n, o, f](cv.sum((t, c), x[n, o * 2 - 1 + t, c] * w[t, c, f]))


def traced_pool(x):
    n, o, c, t = cv.indexes("n o c t<2")
    return cv.equation[n, o, c](cv.max(t, x[n, 2 * o + t, c].beyond(-np.inf)))


def traced_mask(x, w):
    b, i, j = cv.indexes("b i<4 j")
    e = cv.where((j <= i) & ~cv.equal(j, 1), x[b, j] ** 2 - abs(w[j]) / 2, 0.5 % (w[j] + 3))
    return cv.equation[b, i](cv.equation.reduce("logsumexp", j, e) + cv.mean(j, x[b, j]) * cv.maximum(w[i], 0) - 1)


def traced_scalar(x, s):
    b, i = cv.indexes("b i")
    return cv.equation[()](s * cv.sum((b, i), cv.square(x[b, i]) - cv.pow(x[b, i], 3) + cv.leaky_relu(x[b, 0])))


@pytest.mark.parametrize(
    ("trace", "text", "shapes"),
    [
        (traced_linear, "y[b,o] = tanh((sum[i] x[b,i]*w[i,o]) + v[o])", {"x": (None, 4), "w": (4, 3), "v": (3,)}),
        (traced_conv, "y[n,o,f] = sum[t<3,c] x[n, o*2 - 1 + t, c]*w[t,c,f]", {"x": (None, 9, 2), "w": (3, 2, 4)}),
        (traced_pool, "y[n,o,c] = max[t<2] x[n, 2*o + t, c; -inf]", {"x": (None, 8, 3)}),
        (
            traced_mask,
            "y[b,i<4] = (logsumexp[j] where(j <= i and not j == 1, x[b,j]^2 - |w[j]|/2, 0.5 % (w[j] + 3))) "
            "+ (mean[k] x[b,k])*max(w[i], 0) - 1",
            {"x": (None, 4), "w": (4,)},
        ),
        (
            traced_scalar,
            "y[] = s*sum[b,i] (x[b,i]^2 - x[b,i]^3 + leaky_relu(x[b,0]))",
            {"x": (None, 3), "s": ()},
        ),
    ],
)
def test_traced_equations_are_those_of_texts(trace, text, shapes):
    ours = compiled(trace, shapes)
    assert listing(ours) == listing(compiled(lambda **given: cv.equation(text, **given), shapes))


def test_operands_of_traced_equations_need_no_names():
    """Names that are none of the language's, or an index's or its extent, are made others."""
    g = cv.CalcGraph()
    x, w = g.placeholder("linear_1.in", (None, 4)), g.parameter("I", (4,))
    with g.path("p"):
        b, i = cv.indexes("b i")
        y = cv.equation[b](cv.sum(i, x[b, i] * w[i] * x[b, i]))
    assert y.shape == x.shape[:1] and repr(x[b, i] * w[i]) == "x[b,i]*I_2[i]"


@pytest.mark.parametrize(
    ("subscripts", "shapes", "text"),
    [
        ("bi,io->bo", [(2, 3), (3, 4)], "y[b,o] = sum[i] x1[b,i]*x2[i,o]"),
        ("ij,jk", [(2, 3), (3, 4)], "y[i,k] = sum[j] x1[i,j]*x2[j,k]"),
        ("ba", [(2, 3)], "y[a,b] = x1[b,a]"),
        ("ii", [(3, 3)], "y[] = sum[i] x1[i,i]"),
        ("aBb->Ba", [(2, 3, 4)], "y[bb,a] = sum[b] x1[a,bb,b]"),
        ("...ij,...jk->...ik", [(5, 2, 3), (3, 4)], "y[i0,i,k] = sum[j] x1[i0,i,j]*x2[j,k]"),
        ("i...,i...", [(3, 1, 2), (3, 4, 2)], "y[i0,i1] = sum[i] x1[i,0,i1]*x2[i,i0,i1]"),
        (",i->i", [(), (3,)], "y[i] = x1*x2[i]"),
        ("yz,Yz->yY", [(2, 3), (4, 3)], "y0[y,yy] = sum[z] x1[y,z]*x2[yy,z]"),
    ],
)
def test_einsum_is_an_equation(subscripts, shapes, text):
    arrays = [np.random.default_rng(0).standard_normal(s) for s in shapes]
    assert equation_of(subscripts, arrays)[0] == text
    ours = evaluated(subscripts, arrays)
    np.testing.assert_allclose(ours, np.einsum(subscripts, *arrays), rtol=1e-12)


def evaluated(subscripts: str, arrays: list[np.ndarray]) -> np.ndarray:
    return computed(lambda **given: cv.einsum(subscripts, *given.values()), {f"p{k}": v for k, v in enumerate(arrays)})[
        0
    ]


def computed(make, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, list[str]]:
    """What is made of parameters that are these arrays, and the rows of it."""
    g = cv.CalcGraph()
    given = {name: g.parameter(name, v.shape, init=v) for name, v in arrays.items()}
    with g.path("p"):
        make(**given).rename("out")
    program = cv.compile(g, batch_size=1, workers=1, dtype="float64", keep=["out"])
    with cv.CalcHeap(program.heap_bytes) as heap:
        model = heap.create(program, seed=0)
        model.forward("p")
        return model["out"].copy(), forward_rows(program, "p")


def random_einsum(rng: np.random.Generator) -> tuple[str, list[np.ndarray]]:
    letters = string.ascii_letters
    sizes = {c: int(rng.integers(1, 4)) for c in rng.choice([*letters], 5, replace=False)}
    names, parts = [*sizes], []
    for _ in range(rng.integers(1, 5)):
        part = [str(c) for c in rng.choice(names, rng.integers(0, 4), replace=rng.random() < 0.2)]
        parts.append("".join(part))
    used = sorted({*"".join(parts)})
    subscripts = ",".join(parts)
    if rng.random() < 0.8:
        out = [str(c) for c in rng.permutation(used)[: rng.integers(0, 4)]] if used else []
        subscripts += "->" + "".join(out)
    return subscripts, [rng.standard_normal([sizes[c] for c in part]) for part in parts]


def test_random_einsums_are_numpys(whole):
    n = 500 if whole else 25
    for seed in range(n):
        subscripts, arrays = random_einsum(np.random.default_rng(seed))
        want = np.einsum(subscripts, *arrays, optimize=True)
        got = evaluated(subscripts, arrays)
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12, err_msg=f"{seed}: {subscripts}")


def test_random_windows_are_as_the_language_means_them(whole):
    seen: set[str] = set()
    for seed in range(600 if whole else 20):
        text, arrays = random_windows(np.random.default_rng(seed))
        want = evaluate(read(text), arrays)["y"]
        try:
            got, rows = computed(lambda **given: cv.equation(text, **given), arrays)  # noqa: B023
        except cv.UnsupportedOperator as error:
            assert "only up to 64 are read place by place" in str(error)
            continue
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-10, err_msg=f"{seed}: {text}")
        seen |= {*rows}
    assert {
        "conv_fwd",
        "max_pool_fwd",
        "maximum_fwd",
        *(["conv_transpose_fwd", "avg_pool_fwd"] if whole else []),
    } <= seen


def test_orders_of_pairs_are_as_good_as_numpys(whole):
    """NumPy's is opt_einsum's: multiplications of pairs, each over all the indexes that the two have."""
    compared = 0
    for seed in range(300 if whole else 40):
        rng = np.random.default_rng(seed)
        sizes = {c: int(rng.integers(2, 9)) for c in "abcdefg"}
        n = int(rng.integers(3, 7))
        parts = ["".join(rng.choice([*sizes], rng.integers(1, 4), replace=False)) for _ in range(n)]
        out = frozenset(map(str, rng.choice(sorted({*"".join(parts)}), 2)))
        parts = [
            "".join(c for c in p if c in out or "".join(parts).count(c) > 1) for p in parts
        ]  # others are summed first
        arrays = [np.empty([sizes[c] for c in part]) for part in parts]
        path, _ = np.einsum_path(f"{','.join(parts)}->{''.join(sorted(out))}", *arrays, optimize="optimal")
        sets = [frozenset(part) for part in parts]
        if any(len(step) > 2 for step in path[1:]):  # where no pair gains it ends with all that is left
            continue
        theirs = cost(sets, out, sizes, [tuple(pair) for pair in path[1:]])
        assert cost(sets, out, sizes, pairs(sets, out, sizes)) <= theirs, parts
        many = [*sets, *sets, *sets]
        order = pairs(many, out, sizes)
        assert len(order) == len(many) - 1
        compared += cost(many, out, sizes, order) <= cost(many, out, sizes, [(0, 1)] * (len(many) - 1))
    assert compared > 20


def cost(sets, out, sizes, path) -> int:
    left, total = [*sets], 0
    for places in path:
        chosen = [left[k] for k in places]
        left = [s for k, s in enumerate(left) if k not in places]
        both = frozenset().union(*chosen)
        total += int(np.prod([sizes[c] for c in both]))
        left.append(both & out.union(*left))
    return total


# ---------------------------------------------------------------- several results, values that are shared
def test_several_equations_give_the_results_that_are_named():
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 4))
    text = "m[b] = mean[i] x[b,i]; d[b,i] = x[b,i] - m[b]; y[b] = sum[i] d[b,i]^2"
    with g.path("p"):
        last = cv.equation(text, x=x)
        middle, deviation = cv.equation(text.rpartition(";")[0], x=x, results=("m", "d"))
        one = cv.equation(text.rpartition(";")[0], results="d", x=x)
    assert [v.name for v in (last, middle, deviation, one)] == ["last", "middle", "deviation", "one"]
    assert (last.rank, middle.rank, deviation.rank, one.rank) == (1, 1, 2, 2)


def test_equal_parts_are_computed_once():
    shapes = {"x": (None, 4), "w": (4, 3)}
    text = (
        "y[b,o] = tanh(sum[i] x[b,i]*w[i,o]) + (sum[k] x[b,k]*w[k,o])*exp(tanh(sum[j] x[b,j]*w[j,o]))"
        " + w[0,o] + w[0,o]*w[0,o]"
    )
    rows = forward_rows(compiled(lambda **given: cv.equation(text, **given), shapes), "p")
    assert [rows.count(row) for row in ("linear_fwd", "tanh_fwd", "slice_fwd")] == [1, 1, 1]
    text = "y[b,d] = (x[b,d] - mean[i] x[b,i])/sqrt(var[j] x[b,j] + 0.1)"
    rows = forward_rows(compiled(lambda x, w: cv.equation(text, x=x), shapes), "p")
    assert [rows.count(row) for row in ("mean_fwd", "sub_fwd", "var_fwd", "square_fwd")] == [1, 1, 1, 0]


@pytest.mark.parametrize("body", ["x[b, o*3 + t]", "exp(x[b, o*3 + t])", "sigmoid(2*x[b, o*3 + t] + x[b, o*3 + t])"])
@pytest.mark.parametrize("how", ["max", "min"])
def test_the_first_of_equals_in_a_window_has_the_gradient(how, body):
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 6))
    with g.path("p") as p:
        y = cv.equation(f"y[b,o] = {how}[t<3] {body}", x=x)
        p.output = d = cv.gradient(cv.sum(y), x)
    model = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=2, dtype="float64"))
    model["x"] = np.zeros((2, 6))
    model.forward("p")
    assert (model[d.name] > 0).tolist() == 2 * [2 * [True, False, False]]


def test_operands_may_have_any_name():
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 4))
    with g.path("p"):
        y = cv.equation("y[b] = sum[i] text[b,i]*results*exp[i]", text=x, results=2.0, exp=np.arange(4.0))
        z = cv.equation("self = x*K + K_", x=x, K=3, K_=np.float64(0.5))
    assert (y.rank, z.shape) == (1, x.shape)


def test_copies_for_each_sample_need_no_other_placeholder():
    """The batch is that of an operand, not of a target that stands before it in the graph."""
    g = cv.CalcGraph()
    t, x, w = g.placeholder("t", (None,)), g.placeholder("x", (None, 4)), g.parameter("w", (4,))
    with g.path("p") as p:
        cv.equation("y[i,b<A] = w[i] + 0*max[a] x[a,0]", x=x, w=w)
    read = {v for op in p.operations for v in op.inputs.values()}
    assert x in read and t not in read


def test_an_operand_that_is_returned_keeps_its_name():
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 4))
    with g.path("p"):
        y = cv.equation("y[b,i] = x[b,i]", x=x)
        k = cv.equation("k[i<4] = 2*i + 0*stop(s)", s=g.parameter("s", ()))
    assert y is x and x.name == "x" and k.rank == 1


# ---------------------------------------------------------------- devices and scripts
@pytest.mark.parametrize("name", ON_CUDA)
def test_a_simulated_gpu_gives_the_same(name, gpu):  # noqa: F811
    case, found = CASES[name], []
    for device in ("cpu", "cuda"):
        keep = ["result", *(f"grad.{n}" for n in graded(case))]
        program = cv.compile(graph_of(case), batch_size=3, workers=1, device=device, dtype="float64", keep=keep)
        heap = cv.CalcHeap(program.heap_bytes, device=device)
        model = heap.create(program, seed=0)
        values = case.values(3)
        for n, v in values.items():
            if None in case.shapes[n] or n in case.classes:
                model[n] = v
        model["r"] = np.random.default_rng(1).standard_normal(_shape_of_r(case, 3))
        model.forward("p")
        found.append({n: np.array(model[n]) for n in keep})
        heap.close()
    for n, v in found[0].items():
        np.testing.assert_allclose(found[1][n], v, rtol=1e-10, atol=1e-10, err_msg=n)


def _shape_of_r(case: Case, batch: int) -> tuple[int, ...]:
    return graph_of(case).variables["r"].descriptor.current(batch)


@pytest.mark.parametrize("name", ["conv2d", "attention", "embedding", "conv_transpose1d", "logsumexp", "diagonal"])
def test_a_graph_of_equations_is_a_text_and_evaluated_by_its_rows(name):
    """The operators are the graph's as any others: no trace of the equation is needed."""
    case = CASES[name]
    g = graph_of(case)
    again = cv.read_graph(g.text())
    assert again.text() == g.text()
    programs = [cv.compile(graph, batch_size=3, workers=1) for graph in (g, again)]
    assert programs[0].disassemble() == programs[1].disassemble()
    values = case.values(3)
    found = g.paths["f"].evaluate(values)
    np.testing.assert_allclose(found["alone"], meant(case, values), rtol=1e-10, atol=1e-10)


FAR = np.array([1e3, 1e-300, 0.5, 37.0, 745.0, 1e300, np.inf])
FAR = np.array([*FAR, *-FAR, np.nan, 0.0, 1.0])
UNARY = sorted(f for f, n in ARGUMENTS.items() if n == 1 and f not in ("neg", "not"))


@pytest.mark.parametrize("fused", [None, True, False])
def test_evaluation_and_programs_agree_far_away(fused):
    """Of all functions, also of infinite numbers: what judges a program must be right where the program is."""
    g = cv.CalcGraph()
    x, z = g.placeholder("x", (None,)), g.placeholder("z", (None,))
    texts = {f: f"y[b] = {f}(x[b])" for f in UNARY}
    texts |= {f"infinite {at}": f"y[b] = logaddexp(x[b], {at})" for at in ("inf", "-inf")}
    texts |= {f: f"y[b] = {f}(x[b], z[b])" for f in ("max", "min", "logaddexp")} | {"quotient": "y[b] = x[b]//z[b]"}
    with g.path("p") as path:
        for f, text in texts.items():
            operands = {"x": x, "z": z} if "z" in text else {"x": x}
            cv.equation(text, fused=fused, **operands).rename(f"result.{f}")
        soft = cv.equation("y[b] = softplus(sum[i<2] 0.5*x[b])", x=x, fused=fused).rename("sum")
        path.output = soft, cv.equation("y[b] = x[b]", x=x)
    keep = [f"result.{f}" for f in texts if f != "stop"] + ["sum"]
    program = cv.compile(g, batch_size=FAR.size**2, dtype="float64", keep=keep, workers=1)
    values = dict(zip("xz", (a.reshape(-1) for a in np.meshgrid(FAR, FAR))))
    with cv.CalcHeap(program.heap_bytes) as heap:
        model = heap.create(program, seed=0)
        for name, v in values.items():
            model[name] = v
        model.forward("p")
        shown, made = path.evaluate(values), {name: np.array(model[name]) for name in keep}
    if fused is not True:  # it is x itself, and a result all the same
        np.testing.assert_array_equal(shown["x"], values["x"])
    for name in keep:
        meant = shown[name] if name == "sum" else evaluate(read(texts[name[7:]]), values)["y"]
        known = (
            np.isfinite(values["x"]) if name == "result.sign" else slice(None)
        )  # of NaN rows make 0, the operator NaN
        for judge in (shown[name], meant):
            np.testing.assert_allclose(judge[known], made[name][known], 1e-14, 1e-307, err_msg=name)


def test_a_script_computes_the_same(tmp_path):
    g = cv.CalcGraph()
    x, t = g.placeholder("x", (None, 9, 2)), g.placeholder("t", (None,), "int64")
    with g.path("learn", backward=True) as learn:
        h = cv.equation(
            "y[n,o,f] = relu(sum[k,c] x[n, o*2 + k - 1, c]*w[k,c,f] + v[f])", x=x,
            w=g.parameter("w", (3, 2, 4), init="xavier_uniform"), v=g.parameter("v", (4,)),
        )  # fmt: skip
        s = cv.equation(
            "s[n,j] = sum[o,f] h[n,o,f]*u[o,f,j]", h=h, u=g.parameter("u", (5, 4, 3), init="xavier_uniform")
        )
        loss = cv.equation("l[] = mean[r] (logsumexp[k] s[r,k] - s[r, t[r]])", s=s, t=t)
        learn.minimize(loss, cv.SGD(0.1), output=s)
    with g.path("predict"):
        p = cv.equation("p[n,j] = s[n,j] - logsumexp[k] s[n,k]", s=s)  # noqa: F841
    model = cv.Model(g, batch_size=6, dtype="float64", workers=1, seed=1)
    model.to_python(tmp_path / "train.py")
    script = runpy.run_path(str(tmp_path / "train.py"))
    rng = np.random.default_rng(0)
    for n in (6, 4, 6):
        data = rng.standard_normal((n, 9, 2)), rng.integers(0, 3, n)
        assert script["step"](*data) == pytest.approx(model.step(*data), rel=1e-12)


# ---------------------------------------------------------------- what is refused
REFUSED = [
    (
        "y[b,o] = sum[i] x[b,i]*w[o,i]", "xw", cv.ShapeError,
        "the index i runs over 4, and over 3 here: w has 3 there", "i]",
    ),
    ("y[b,o] = sum[i] x[b,i]*w[i]", "xw", cv.ShapeError, "w has 2 axes (4, 3), and 1 place here", "w[i]"),
    ("y[b,o] = sum[i] x[b,i]*w[i,o] + u[o]", "xw", cv.CalcError, "there is no operand 'u'; operands are x, w", "u[o]"),
    ("y[b] = x[b,0] - eps[b]", ("x", "eps"), cv.CalcError, "eps is a number, and has no places: write it without brackets", "eps"),
    ("m[] = mean[b] x[b,0]; y[b] = x[b,1] - m[]", "x", cv.CalcError, "an array without axes is read without brackets: m", "]"),
    *(
        (text, "xv", cv.ShapeError, f"the range of {i} is unknown: write it, as in {i}<10, or read an axis with it", f"{i}] =")
        for text, i in (
            ("y[b,s] = sum[t] x[b,t]*v[s - t]", "s"), ("y[b,s] = sum[t<3] x[b, s - t]*v[t]", "s"), ("y[b,o] = sum[t] x[b,o + t]*v[2 - t]", "o"),
        )
    ),
    *(
        (text, "x", cv.CalcError, "a place, or a range, of numbers above 2^40: no array is as long", at)
        for text, at in (
            ("y[b,i<4] = x[b,i - 9223372036854775808]", "- 9"), ("y[b,i<4] = x[b,i*2305843009213693952 + i*2]", "+ i"),
            ("y[b,i<4] = x[b,i*3000000*3000000]", "*3000000]"), ("y[b] = sum[i<2000000000000] x[b,i]", "2000"),
        )
    ),
    ("y[b,o] = sum[i] x[b i]*w[i,o]", "xw", cv.CalcError, "',' or ']' is wanted here, not 'i'", "i]*"),
    ("y[b] = sum[w] x[b,w]*v[w]", "xwv", cv.CalcError, "w is the name of an operand: name the index otherwise", "w] x"),
    (
        "y[n,c] = im[n + 1, 0, c]", "im", cv.ShapeError,
        "axis 0 of im (B, 6, 2) is the batch, whose samples are independent: its place must be a plain index", "im[",
    ),
    (
        "y[n<3,c] = im[n, 0, c]", "im", cv.ShapeError,
        "n runs over 3, and im has B there: the batch is read as a whole, each place by a plain index", "n, 0",
    ),
    (
        "y[i,j] = sum[k] x[i,k]*x[j,k]", "x", cv.ShapeError,
        "y would have the batch twice, along i and j: sizes are linear in the batch", "j] =",
    ),
    (
        "y[b,i] = y[b - 1,i] + x[b,i]", "x", cv.ShapeError,
        "b runs over B, and y has B there: the batch is read as a whole, each place by a plain index", "b - 1",
    ),
    ("x[b,i] += 1", "x", cv.CalcError, "x is an operand, and a variable is not written to: give the result another name", "x["),
    (
        "y[b] = sum[i] x[b,i]/B", "x", cv.UnsupportedOperator,
        "B is the size of the batch, and no row turns it into a number yet: take mean over b instead of dividing a sum by it", "B",
    ),
    (
        "y[r,c] = tab[x[r,0], c]", ("tab", "x"), cv.CalcError,
        "a place of tab is a number: take indexes, sizes, whole numbers, + - * // %, and arrays of integers", "x[r",
    ),
    ("y[b] = x[t[b], 0]", "xt", cv.ShapeError,
     "axis 0 of x (B, 4) is the batch, whose samples are independent: its place must be a plain index", "x[t"),
    (
        "y[b,i] = x[b,i]^x[b,i]", "x", cv.CalcError,
        "the exponent or the base must be a number: write exp(exponent*log(x)) for positive x", "^",
    ),
    ("m[b] = max[i] x[b,i]; y[b] = sum[i] x[b,i]", "x", cv.CalcError, "m is never read: leave it out, or name it in results", "m["),
    ("m[b] = x[b,0]; m[b] = x[b,1]", "x", cv.CalcError, "m is set by several equations: give each its own name", "m["),
    ("y[b] = sum[y] x[b,y]", "x", cv.CalcError, "y is the name of a result: name the index otherwise", "y] x"),
    ("y = x + w", "xw", cv.ShapeError, "w of shape (4, 3) does not broadcast with (B, 4)", "w"),
    ("y[b] = sum[i] x[b,i]/0", "x", cv.CalcError, "division by zero", "/0"),
]  # fmt: skip

OPERATORS_ALONE = [
    *(
        (f"y[b] = {how}[i,u<3] x[b,i]", "x", cv.UnsupportedOperator, f"the argument of {how} is the same for every u: {remedy}", how)
        for how, remedy in {"argmax": "leave u out", "prod": "take a power"}.items()
    ),
    (
        "y[b,i] = 2*y[b,i - 1] + x[b,i]", "x", cv.UnsupportedOperator,
        "y is read by its own equation, and operators compute only running sums so, y[r,i] = y[r,i - 1] + ..., or y[r,i + 1]: leave out "
        "fused=False, or write each step as an equation", "y[b,i - 1]",
    ),
    (
        "y[i] = sum[b] x[b,i]*b", "x", cv.UnsupportedOperator,
        "b counts the batch, and no row generates its numbers yet: give them as an operand of integers", "b",
    ),
    (
        "y[r,c] = tab[t[r], c]", ("tab", "t"), cv.UnsupportedOperator,
        "no row reads by an index out of 5000 yet, and the product with rows of 0 and 1 that replaces it is limited to "
        "4096", "tab[",
    ),
    (
        "y[b,t<100] = im[b, 5 - t, 0]", "im", cv.UnsupportedOperator,
        "no row has such windows of 100 places, and only up to 64 are read place by place: write it as a convolution (a sum of "
        "products with taps of one array), as pooling, or with fewer places", "im[",
    ),
    (
        "y[b] = prod[i] wide[b,i]", ("wide",), cv.UnsupportedOperator,
        "prod over 70 has no row yet, and only up to 64 factors are multiplied one by one: take exp(sum[..] log(..)) of "
        "positive factors", "prod",
    ),
]  # fmt: skip


def operands():
    g = cv.CalcGraph()
    given = {
        "x": g.placeholder("x", (None, 4)), "w": g.parameter("w", (4, 3)), "v": g.parameter("v", (3,)),
        "im": g.placeholder("im", (None, 6, 2)), "t": g.placeholder("t", (None,), "int64"), "tab": g.parameter("tab", (5000, 3)),
        "wide": g.placeholder("wide", (None, 70)), "eps": 1e-5,
    }  # fmt: skip
    return g, given


CARETS = [*((*case, None) for case in REFUSED), *((*case, False) for case in OPERATORS_ALONE)]


@pytest.mark.parametrize(("text", "names", "kind", "what", "at", "fused"), CARETS, ids=[text for text, *_ in CARETS])
def test_what_is_refused_is_shown_by_a_caret(text, names, kind, what, at, fused):
    g, given = operands()
    with g.path("p"):
        before = g.form
        names = names if isinstance(names, tuple) or names == "im" else tuple(names)
        names = (names,) if isinstance(names, str) else names
        with pytest.raises(cv.CalcError) as caught:
            cv.equation(text, fused=fused, **{name: given[name] for name in names})
        assert g.form == before, "something is left in the graph"
    place = text.rindex(at) if at not in ("i]*", "m[", "x[", "^", "j] =", "w] x") else text.index(at)
    assert type(caught.value) is kind
    assert str(caught.value) == f"equation: {what}\n    {text}\n    {' ' * place}^"


WRONG = [
    (
        lambda x, w: cv.equation("y[b] = sum[i] x[b,i]", x=x, w=w),
        "the operand w is never read: leave it out, or read it, in the equation",
    ),
    (lambda x, w: cv.equation("y[b] = x[b,0]", x=x, sum=1), "the operand 'sum' needs another name"),
    (
        lambda x, w: cv.equation("y[b] = x[b,0]", x=np.ones((3, 4))),
        "none of the operands is a variable of a graph: give at least one",
    ),
    (
        lambda x, w: cv.equation("y[b] = x[b,0]*w[0,0]", x=x, w=cv.CalcGraph().parameter("w", (4, 3))),
        "of another graph",
    ),
    (lambda x, w: cv.equation("y[b] = x[b,0]", x=x, results="z"), "there is no equation of 'z'; there are y"),
    (lambda x, w: cv.equation("y[b] = x[b,0]", x=x, results=()), "results: no name is given"),
    (
        lambda x, w: cv.equation("y[b] = x[b,0]", x=x, results=0),
        "results: the name of a result, or a list of names, is wanted, not 0",
    ),
    (
        lambda x, w: cv.equation("y[b] = x[b,0]*w[0,0]", x=x, w="abc"),
        "the operand w: a variable, a number or an array is wanted",
    ),
    (lambda x, w: cv.equation("y[b] = x[b,0]*w", x=x, w=True), "the operand w is True: give a variable"),
    (lambda x, w: cv.equation("y[b] = x[b,0]", x=x, fused=7), "fused: True, False or None is wanted, not 7"),
    (
        lambda x, w: cv.equation(f"y[b] = x[b,0]*{'9' * 5000}", x=x),
        "a number of 5000 characters: 309 are the most\n    y[b]",
    ),
    (lambda x, w: cv.equation("y[b] = x[b,K]", x=x, K=2**41), "numbers above 2^40"),
    (lambda x, w: cv.equation(3, x=x), "an equation is a text, such as"),
    (lambda x, w: cv.equation("y[b] = foo(x[b,0])", x=x), "there is no function 'foo'; did you mean floor?"),
    (lambda x, w: cv.einsum("bi,io->bo", x), "has 2 operands, but 1 are given"),
    (lambda x, w: cv.einsum("bi,io->bq", x, w), "the result names 'q', which no operand has"),
    (lambda x, w: cv.einsum("bi,io->bb", x, w), "the result names 'b' twice"),
    (lambda x, w: cv.einsum("b...,io->b", x, w), "... must be in operands and result"),
    (lambda x, w: cv.einsum("b!,io->b", x, w), "'b!' is not letters"),
    (lambda x, w: cv.einsum("bij,io->b", x, w), "operand 1 has 2 axes, and 'bij' names 3"),
    (lambda x, w: cv.einsum(x, "bi"), "subscripts are a text"),
    (
        lambda x, w: cv.einsum("bi,oi->bo", x, w),
        "the index i runs over 4, and over 3 here: x2 has 3 there\n    y[b,o] = ",
    ),
    (lambda x, w: cv.equation["b"](x), "takes indexes that cv.indexes makes, not 'b'"),
    (lambda x, w: cv.indexes("sum"), "'sum' is a word of the language"),
    (lambda x, w: cv.indexes("3 b"), "'3' is not an index, such as i, or t<3"),
    (lambda x, w: cv.indexes(3), "give names, such as 'b o i', not 3"),
    (lambda x, w: x[cv.indexes("b"), 0:1], "a place is an index or a number, not a slice"),
    (
        lambda x, w: cv.sum("i", x[cv.indexes("b"), 0]),
        "sum in an equation is over indexes that cv.indexes makes, not 'i'",
    ),
    (lambda x, w: x[cv.indexes("b"), 0] * w, "w (4, 3) has 2 axes: read an element of it in an equation, as in w[...]"),
    (lambda x, w: 1 if x[cv.indexes("b"), 0] > 0 else 0, "take & | ~ for and, or, not, cv.where(c, a, b) for an if"),
    (lambda x, w: np.ones(3)[cv.indexes("b")], "such as g.constant(name, array), instead of arrays"),
    (lambda x, w: cv.softmax(x[cv.indexes("b"), 0]), "softmax applies to variables, not to elements"),
    (
        lambda x, w: cv.leaky_relu(x[cv.indexes("b"), 0], 0.2),
        "leaky_relu(alpha=0.2) in an equation: only default settings work",
    ),
    (lambda x, w: cv.indexes("b").beyond(0), "beyond applies to an element"),
    (lambda x, w: cv.equation.reduce("sum", cv.indexes("b"), x), "sum takes elements such as x[r, k]"),
    (lambda x, w: cv.equation.reduce("total", cv.indexes("b"), x), "equation.reduce: how"),
    (lambda x, w: cv.equation("y[b] = x[b,0]*w", x=x, w=cv.indexes("i")), "the operand w is an expression of indexes"),
]


@pytest.mark.parametrize("k", range(len(WRONG)))
def test_what_is_wrong_is_told(k):
    make, what = WRONG[k]
    g, given = operands()
    with g.path("p"):
        before = g.form
        with pytest.raises(cv.CalcError, match=re.escape(what)):
            make(given["x"], given["w"])
        assert g.form == before


def test_equations_belong_to_a_path():
    g, given = operands()
    with pytest.raises(cv.CalcError, match="operators belong to a path"):
        cv.equation("y[b] = x[b,0]", x=given["x"])


def test_a_refusal_in_the_middle_leaves_nothing():
    """The first equation has operators when the second is refused."""
    g, given = operands()
    with g.path("p"):
        before = g.form
        with pytest.raises(cv.UnsupportedOperator, match="B is the size of the batch"):
            cv.equation("m[b] = sum[i] exp(x[b,i]); y[b] = m[b]*k[0]/B", x=given["x"], k=np.ones(2))
        assert g.form == before

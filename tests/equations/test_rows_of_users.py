"""Rows that are users' equations, as users reach them: values and gradients, files, texts, scripts, and what is refused.

In `make test` a sample of generated equations; ``pytest --whole tests/equations/test_rows_of_users.py`` runs 320.
"""

from __future__ import annotations

import io
import pickle
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

import calcvm as cv
from calcvm.equations.grammar import read
from calcvm.equations.meaning import evaluate
from calcvm.equations.stated import Stated
from calcvm.equations.text import show_equations
from calcvm.kernels_cpu import _common
from calcvm.ops.stated import operator_of
from tests.cuda.conftest import gpu  # noqa: F401
from tests.equations.derive import Derived
from tests.equations.generate import generate
from tests.equations.test_plain_kernels import in_range
from tests.equations.test_random import error

RNG = np.random.default_rng(0)
NEAR = 1e-9
SAMPLE, WHOLE, PARTS = 4, 320, 4
BATCHES = (5, 1, 4)


def rows_of(program: cv.Program) -> set[str]:
    """The program's rows that are users' equations."""
    return {name for name, _ in program.instructions if name.startswith("equation_")}


# ---------------------------------------------------------------- generated equations
def computed(graph: cv.CalcGraph, keep: list[str], workers: int) -> dict[str, np.ndarray]:
    program = cv.compile(graph, batch_size=1, workers=workers, dtype="float64", keep=keep)
    with cv.CalcHeap(program.heap_bytes) as heap:
        model = heap.create(program, seed=0)
        model.forward("p")
        return {name: model[name].copy() for name in keep}


def examine(seed: int) -> bool:
    """Values, gradients and second derivatives of one, and the same bits by teams; whether operators alone do it, too."""
    drawn, rng = generate(seed), np.random.default_rng(seed)
    values = in_range(drawn.text, drawn.values)
    made = Derived(drawn.text, values, {}, drawn.wrt)
    dy, dz = rng.normal(size=made.shape), rng.normal(size=values[drawn.wrt[0]].shape)
    made.derive_again(drawn.wrt[0], dy)
    second = made.second_gradient(dy, dz)
    want = {"out": made.value()} | {f"d.{n}": v for n, v in made.gradient(dy).items()}
    want |= {f"dd.{n}": second[n] for n in drawn.wrt}

    def graph(fused: bool) -> tuple[cv.CalcGraph, list[str]]:
        g, keep = cv.CalcGraph(), [name for name in want if not name.startswith("dd.")]
        given = {n: g.parameter(n, v.shape, init=v) if n in drawn.wrt else v for n, v in values.items()}
        with g.path("p"):
            total = cv.sum(cv.equation(drawn.text, fused=fused, **given).rename("out") * dy)
            first = {n: cv.gradient(total, given[n]).rename(f"d.{n}") for n in drawn.wrt}
            again = cv.sum(first[drawn.wrt[0]] * dz)
            for n in drawn.wrt:
                try:
                    cv.gradient(again, given[n]).rename(f"dd.{n}")
                    keep.append(f"dd.{n}")
                except cv.CalcError as refused:
                    assert "no gradient" in str(refused)
                    assert not second[n].any()
        return g, keep

    g, keep = graph(True)
    got = computed(g, keep, 1)
    for name, value in got.items():
        assert error(value, want[name]) < NEAR, name
    several = computed(g, keep, 3)
    assert {n: v.tobytes() for n, v in several.items()} == {n: v.tobytes() for n, v in got.items()}, "teams differ"
    try:
        g, keep = graph(False)
    except cv.UnsupportedOperator:
        return False
    for name, value in computed(g, keep, 1).items():
        assert error(value, want[name]) < NEAR, f"{name} of operators"
    return True


@pytest.mark.parametrize("seed", [778, 783, 805])
def test_equations_that_were_wrong_once(seed: int) -> None:
    """Second derivatives: a place of data along an axis of one place; a gradient that is 1 or 0."""
    examine(seed)


@pytest.mark.parametrize("part", range(PARTS))
def test_generated_equations(part: int, whole: bool) -> None:
    beside, seeds = 0, range(part, WHOLE if whole else SAMPLE, PARTS)
    for seed in seeds:
        try:
            beside += examine(seed)
        except Exception as failure:
            raise AssertionError(f"generate({seed}): {generate(seed).text}") from failure
    assert beside > len(seeds) / 2


# ---------------------------------------------------------------- named equations
@dataclass
class Case:
    """shapes : of operands, None the batch.  theirs : the same of PyTorch's tensors.  classes : of integers, below this."""

    text: str
    shapes: dict[str, tuple[int | None, ...]]
    theirs: Callable[..., Any]
    classes: dict[str, int] = field(default_factory=dict)

    def values(self, batch: int) -> dict[str, np.ndarray]:
        """Those of operands without a batch are the same for every batch."""
        out = {}
        for k, (name, shape) in enumerate(self.shapes.items()):
            rng, sizes = np.random.default_rng(k), [batch if n is None else n for n in shape]
            out[name] = (
                rng.integers(0, self.classes[name], sizes) if name in self.classes else rng.standard_normal(sizes)
            )
        return out

    @property
    def graded(self) -> list[str]:
        return [name for name in self.shapes if name not in self.classes]

    def built(self, **options: Any) -> cv.CalcGraph:
        """A path "p" with "out", gradients "d.x" of its sum by weights r, and "dd.x" of the squares of the first of these."""
        g, values = cv.CalcGraph(), self.values(1)
        given = {
            n: g.placeholder(n, s, "int64" if n in self.classes else None)
            if None in s or n in self.classes
            else g.parameter(n, s, init=values[n])
            for n, s in self.shapes.items()
        }
        with g.path("p"):
            y = cv.equation(self.text, **{"fused": True, **options}, **given).rename("out")
            total = cv.sum(y * y * g.placeholder("r", y.descriptor.generic))
            first = [cv.gradient(total, given[n]).rename(f"d.{n}") for n in self.graded]
            again = cv.sum(first[0] * first[0])
            for n in self.graded:
                cv.gradient(again, given[n]).rename(f"dd.{n}")
        return g

    @property
    def names(self) -> list[str]:
        return ["out", *(f"{d}.{n}" for d in ("d", "dd") for n in self.graded)]

    def wanted(self, values: dict[str, np.ndarray], r: np.ndarray) -> dict[str, np.ndarray]:
        import torch

        theirs = {n: torch.tensor(v, requires_grad=n in self.graded) for n, v in values.items()}
        y = self.theirs(*theirs.values())
        by = [theirs[n] for n in self.graded]
        first = torch.autograd.grad((y * y * torch.tensor(r)).sum(), by, create_graph=True)
        second = torch.autograd.grad((first[0] ** 2).sum(), by, allow_unused=True)
        made = [y, *first, *(torch.zeros_like(x) if d is None else d for d, x in zip(second, by))]
        return {n: v.detach().numpy() for n, v in zip(self.names, made)}


def scanned(x: Any, gate: Any) -> Any:
    import torch

    y, before = [], torch.zeros_like(x[:, 0])
    for i in range(x.shape[1]):
        before = torch.sigmoid(gate) * before + x[:, i]
        y.append(before)
    return torch.stack(y, 1)


CASES = {
    "distances": Case(
        "y[b,i,j] = sqrt(0.1 + sum[c] (x[b,i,c] - w[j,c])^2)", {"x": (None, 3, 4), "w": (5, 4)},
        lambda x, w: (0.1 + ((x[:, :, None] - w) ** 2).sum(-1)).sqrt(),
    ),
    "kernel": Case(
        "y[b,j] = logsumexp[i] (-|x[b,i] - w[j]|^1.5 + v[i])", {"x": (None, 6), "w": (4,), "v": (6,)},
        lambda x, w, v: (-((x[:, :, None] - w).abs() ** 1.5) + v[:, None]).logsumexp(1),
    ),
    "largest of pairs": Case(
        "y[b,i] = max[j] tanh(x[b,i]*w[j] - x[b,j])", {"x": (None, 5), "w": (5,)},
        lambda x, w: (x[:, :, None] * w - x[:, None]).tanh().amax(-1),
    ),
    "scan": Case("y[b,i,c] = sigmoid(w[c])*y[b, i - 1, c] + x[b,i,c]", {"x": (None, 6, 3), "w": (3,)}, scanned),
    "gather": Case(
        "y[b,s,c] = tab[t[b,s], c]*x[b,c]", {"x": (None, 3), "tab": (9, 3), "t": (None, 4)},
        lambda x, tab, t: tab[t] * x[:, None], {"t": 9},
    ),
    "product": Case("y[b] = prod[i] (1 + x[b,i]*w[i]/9)", {"x": (None, 20), "w": (20,)}, lambda x, w: (1 + x * w / 9).prod(1)),
    "over the batch": Case(
        "y[i] = sum[b] tanh(x[b,i])*where(b % 2 == 0, w[i], 1)", {"x": (None, 4), "w": (4,)},
        lambda x, w: (x.tanh() * (w * (1 - (n := w.new_tensor(range(len(x))) % 2)[:, None]) + n[:, None])).sum(0),
    ),
}  # fmt: skip


def run(model: Any, case: Case, batch: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    values = case.values(batch)
    r = np.random.default_rng(7).standard_normal(evaluate(read(case.text), values)["y"].shape)
    for n, v in {**values, "r": r}.items():
        if n == "r" or None in case.shapes[n] or n in case.classes:
            model[n] = v
    model.forward("p")
    return {n: model[n].copy() for n in case.names}, r


@pytest.mark.peers
@pytest.mark.parametrize("name", CASES)
def test_named_equations_are_pytorchs_for_any_batch_and_team(name: str) -> None:
    """One program for all batches; values beside the language's meaning, too."""
    pytest.importorskip("torch")
    case, seen = CASES[name], {}
    for workers in (1, 2, 3):
        program = cv.compile(case.built(), batch_size=max(BATCHES), workers=workers, dtype="float64", keep=case.names)
        assert rows_of(program)
        with cv.CalcHeap(program.heap_bytes) as heap:
            model = heap.create(program, seed=0)
            for batch in BATCHES:
                got, r = run(model, case, batch)
                values = case.values(batch)
                np.testing.assert_allclose(got["out"], evaluate(read(case.text), values)["y"], rtol=1e-9, atol=1e-9)
                for n, want in case.wanted(values, r).items():
                    np.testing.assert_allclose(got[n], want, rtol=1e-8, atol=1e-8, err_msg=f"{n}, batch {batch}")
                bits = {n: v.tobytes() for n, v in got.items()}
                assert seen.setdefault(batch, bits) == bits, f"{workers} workers give other bits"


@pytest.mark.parametrize("name", CASES)
def test_a_graphs_text_has_the_equation(name: str) -> None:
    g = CASES[name].built()
    text = g.text()
    again = cv.read_graph(text)
    assert again.text() == text and "= equation(" in text
    assert cv.compile(again, batch_size=4) == cv.compile(g, batch_size=4)


@pytest.mark.parametrize("name", CASES)
def test_evaluation_and_listings_show_the_equation(name: str) -> None:
    case = CASES[name]
    g, values = case.built(), case.values(3)
    found = g.paths["p"].evaluate(values)
    np.testing.assert_allclose(found["out"], evaluate(read(case.text), values)["y"], rtol=1e-10, atol=1e-10)
    listed = str(cv.compile(g, batch_size=3).disassemble())
    assert re.search(r"\d  equation_\w{8} +\w+\[[^]]*\] = ", listed)


# ---------------------------------------------------------------- which parts become rows
def forward_of(text: str, shapes: dict[str, tuple[int | None, ...]], fused: bool | None) -> list[str]:
    g = cv.CalcGraph()
    given = {n: g.placeholder(n, s) if None in s else g.parameter(n, s) for n, s in shapes.items()}
    with g.path("p") as path:
        cv.equation(text, fused=fused, **given)
    return [op.spec.stem for op in path.operations]


PAIRS = "y[b,i] = sum[j] |x[b,i] - w[j]|"
LARGE = {"x": (None, 300), "w": (300,)}  # for each sample 90 000 differences
SMALL = {"x": (None, 3), "w": (3,)}


def test_parts_become_rows_by_cost_always_or_never() -> None:
    assert forward_of(PAIRS, LARGE, None) == ["equation"]
    assert "equation" not in forward_of(PAIRS, LARGE, False) + forward_of(PAIRS, SMALL, None)
    assert forward_of(PAIRS, SMALL, True) == ["equation"]


def test_products_are_no_rows_of_users() -> None:
    """Nor is what one row of a product makes: the vector that is added, the activation; of other sums the rest is one."""
    shapes = {"x": (None, 4), "w": (4, 3), "v": (3,)}
    layer = "y[b,o] = tanh(sum[i] x[b,i]*w[i,o] + v[o])"
    assert forward_of(layer, shapes, True) == forward_of(layer, shapes, False)
    assert (
        forward_of("s[b,o] = sum[i] x[b,i]*w[i,o] + v[o]; y[b,o] = s[b,o]*sigmoid(s[b,o])", shapes, True)[-1]
        == "equation"
    )


def test_what_workers_cannot_share_is_the_first_ones() -> None:
    """So the others are waited for before it."""
    g = cv.CalcGraph()
    x = g.parameter("x", (400,), init=np.linspace(-1, 1, 400))
    with g.path("p"):
        e = cv.equation("e[i] = exp(x[i])", x=x, fused=True)
        cv.equation("s[i] = s[i - 1]/2 + e[i]", e=e).rename("s")
    program = cv.compile(g, batch_size=1, workers=3, dtype="float64", keep=["s"])
    producer, scan = str(program.disassemble()).splitlines()[-2:]
    assert "s[i - 1]" in scan and "|sync" in producer
    for text in ("y[i<N] = y[i - 1]/2 + x1[i]", "y[] = max[i<N] x1[i]"):
        (row,) = operator_of(Stated(text, ("N",), ("x1",), ("y",))).fwd
        assert {o.part for o in row.operands} == {"w0"}
    e = np.exp(np.linspace(-1, 1, 400))
    with cv.CalcHeap(program.heap_bytes) as heap:
        model = heap.create(program, seed=0)
        model.forward("p")
        want = [e[: k + 1] @ 0.5 ** np.arange(k, -1, -1.0) for k in range(400)]
        np.testing.assert_allclose(model["s"], want, rtol=1e-12)


def test_gradients_of_what_has_no_axes_are_read_by_others_as_temporaries() -> None:
    (spec,) = [operator_of(Stated("y[] = x1/(sinh(x2) + 1)", (), ("x1", "x2"), ("y",)))]
    assert {o.name for row in spec.bwd for o in row.reads} <= {"dy", "x1", "x2", "y"}
    g = cv.CalcGraph()
    x, v = g.parameter("x", (), init=np.array(1.5)), g.parameter("v", (), init=np.array(0.5))
    with g.path("p"):
        y = cv.equation("y[] = x/(sinh(v) + 1)", x=x, v=v, fused=True)
        for name, p in {"dx": x, "dv": v}.items():
            cv.gradient(y, p).rename(name)
    program = cv.compile(g, batch_size=1, dtype="float64", keep=["dx", "dv"])
    with cv.CalcHeap(program.heap_bytes) as heap:
        model = heap.create(program, seed=0)
        model.forward("p")
        below = np.sinh(0.5) + 1
        np.testing.assert_allclose([model["dx"], model["dv"]], [1 / below, -1.5 * np.cosh(0.5) / below**2], 1e-14)


@pytest.mark.parametrize("text", ["where(x[b,i] > 0, y[b,i - 1]*a[i], 0.5)", "max(y[b,i - 1], x[b,i])*a[i]"])
def test_what_a_scan_only_compares_has_no_gradient(text: str) -> None:
    """Nor has it where a gradient alone compares it, as that of max does."""
    values, wrong = RNG.normal(size=(3, 5)), "no gradient"
    g = cv.CalcGraph()
    x, a = g.placeholder("x", (None, 5)), g.parameter("a", (5,), init=np.linspace(0.5, 1.5, 5))
    with g.path("p"):
        y = cv.equation(f"y[b,i] = {text}", x=x, a=a)
        first = cv.gradient(cv.sum(y * y), a)
        total = cv.sum(first * first)
        total.rename("total"), cv.gradient(total, a).rename("dd"), cv.sum(y * y).rename("loss"), first.rename("d")
        if "where" in text:
            with pytest.raises(cv.CalcError, match=wrong):
                cv.gradient(cv.sum(y * y), x)
    program = cv.compile(g, batch_size=3, dtype="float64", keep=["loss", "d", "total", "dd"])
    with cv.CalcHeap(program.heap_bytes) as heap:
        model = heap.create(program, seed=0)
        model["x"] = values

        def at(k: int, step: float) -> dict[str, np.ndarray]:
            model.parameters["a"][...] = np.linspace(0.5, 1.5, 5) + step * (np.arange(5) == k)
            model.forward("p")
            return {name: model[name].copy() for name in ("loss", "d", "total", "dd")}

        for of, slope in ("loss", "d"), ("total", "dd"):
            want = [(at(k, 1e-6)[of] - at(k, -1e-6)[of]) / 2e-6 for k in range(5)]
            np.testing.assert_allclose(at(0, 0.0)[slope], want, 1e-7, 1e-7)


@pytest.mark.parametrize("how", ["sum", "mean", "max", "prod"])
def test_a_scan_in_a_reduction_is_that_of_its_terms(how: str) -> None:
    """Of few; others are refused with the reason."""
    text = f"y[b,i] = x[b,i] + 0.5*({how}[k<3] (k + x[b,i + k])*w[i]*y[b,i - 1])"
    g = cv.CalcGraph()
    x, w = g.placeholder("x", (None, 4)), g.parameter("w", (4,), init=np.arange(4.0))
    terms = {"sum": "({} + {} + {})", "mean": "(({} + {} + {})/3)", "max": "max(max({}, {}), {})", "prod": "({}*{}*{})"}
    out = terms[how].format(*(f"({k} + x[b,i + {k}])*w[i]*y[b,i - 1]" for k in range(3)))
    with g.path("p"):
        for name, said in {"y": text, "z": f"y[b,i] = x[b,i] + 0.5*{out}"}.items():
            y = cv.equation(said, x=x, w=w).rename(name)
            cv.gradient(cv.sum(y), w).rename(f"d{name}")
        with pytest.raises(cv.UnsupportedOperator, match=r"in sum over 9: .* of up to 8 can be written out"):
            cv.equation(text.replace(how, "sum").replace("k<3", "k<9"), x=x, w=w)
    program = cv.compile(g, batch_size=2, dtype="float64", keep=["y", "z", "dy", "dz"])
    values = RNG.normal(size=(2, 4))
    with cv.CalcHeap(program.heap_bytes) as heap:
        model = heap.create(program, seed=0)
        model["x"] = values
        model.forward("p")
        want = evaluate(read(text), {"x": values, "w": np.arange(4.0)})["y"]
        np.testing.assert_allclose(model["y"], want, 1e-12)
        np.testing.assert_allclose(model["dy"], model["dz"], 1e-12)


# ---------------------------------------------------------------- gathers
def table(text: str, **options: Any) -> Any:
    g = cv.CalcGraph()
    tab, t = g.parameter("tab", (50, 3), init=np.arange(150.0).reshape(50, 3)), g.placeholder("t", (None,), "int64")
    with g.path("p"):
        y = cv.equation(text, tab=tab, t=t, **options).rename("y")
        cv.gradient(cv.sum(y), tab).rename("d")
    program = cv.compile(g, batch_size=4, keep=["y", "d"])
    assert rows_of(program)
    return cv.CalcHeap(program.heap_bytes).create(program, seed=0)


@pytest.mark.parametrize("at", [-2, 49, 2**40])
def test_an_index_outside_traps(at: int) -> None:
    model = table("y[r,c] = tab[t[r] + 1, c]")
    model["t"] = [2, 48, 2]
    model.forward("p")
    assert model["y"].tolist() == [[9, 10, 11], [147, 148, 149], [9, 10, 11]]
    assert model["d"][[3, 49, 0]].tolist() == [[2, 2, 2], [1, 1, 1], [0, 0, 0]]
    model["t"] = [2, at, 2]
    with pytest.raises(cv.Trap, match=r"out of range in y\[r,c\] = tab\[t\[r\] \+ 1, c\]: give a value for"):
        model.forward("p")


def test_what_lies_beyond_may_be_said() -> None:
    model = table("y[r,c] = tab[t[r], c; -7]")
    model["t"] = [-1, 2, 50]
    model.forward("p")
    assert model["y"].tolist() == [[-7, -7, -7], [6, 7, 8], [-7, -7, -7]]
    assert model["d"].sum() == 3


@pytest.mark.parametrize("fused", [None, True, False])
@pytest.mark.parametrize("type_", ["float", "int64", "bool"])
def test_zero_may_be_said(type_: str, fused: bool | None, gpu: Any, tmp_path: Any) -> None:  # noqa: F811
    """Of places that data say: without it they trap.  In programs of both devices, by evaluation, in texts, and in scripts."""
    text, at = "y[r,c] = tab[t[r] - 1, c; 0]", np.array([0, 6, 2])
    values = np.arange(1, 16).reshape(5, 3)
    values = values % 2 > 0 if type_ == "bool" else values if type_ == "int64" else values / 1.0
    g = cv.CalcGraph()
    tab = g.parameter("tab", (5, 3), init=values) if type_ == "float" else g.constant("tab", values, type_)
    t, keep = g.placeholder("t", (None,), "int64"), ["y"]
    with g.path("p") as path:
        path.output = y = cv.equation(text, fused=fused, tab=tab, t=t).rename("y")
        if type_ == "float":
            cv.gradient(cv.sum(y * y), tab).rename("d")
            keep.append("d")
    want, slope = np.zeros((3, 3), values.dtype), np.zeros((5, 3))
    want[2], slope[1] = values[1], 2 * values[1]
    assert (path.evaluate({"t": at, "tab": values})["y"] == want).all()
    assert cv.read_graph(g.text()).text() == g.text()
    for device in "cpu", "cuda":
        program = cv.compile(g, batch_size=3, workers=1, device=device, dtype="float64", keep=keep)
        with cv.CalcHeap(program.heap_bytes, device=device) as heap:
            model = heap.create(program, seed=0)
            model["t"] = at
            model.forward("p")
            assert (np.array(model["y"]) == want).all()
            assert type_ != "float" or (np.array(model["d"]) == slope).all()
    if type_ == "float":
        g = cv.CalcGraph()
        tab, t = g.parameter("tab", (5, 3), init=values), g.placeholder("t", (None,), "int64")
        b = g.placeholder("b", (None,))
        with g.path("learn", backward=True) as learn:
            y = cv.equation(text, fused=fused, tab=tab, t=t)
            learn.minimize(cv.mean(y * y) + cv.mean(b), cv.SGD(0.01), output=y)
        with g.path("predict") as predict:
            predict.output = cv.neg(b)
        model = cv.Model(g, batch_size=3, dtype="float64", workers=1, seed=1)
        model.to_python(tmp_path / "train.py")
        script = runpy.run_path(str(tmp_path / "train.py"))
        with np.errstate(all="ignore"):  # infinities are made and left out, where a gather is a product
            ours, theirs = ([step(at, np.ones(3)) for _ in range(3)] for step in (model.step, script["step"]))
        np.testing.assert_allclose(theirs, ours, 1e-12)


def test_zero_is_said_where_it_means_something() -> None:
    said, unsaid = read("y[r] = tab[t[r]; 0]"), read("y[r] = tab[t[r]]")
    assert said != unsaid and said == read("y[r]=tab[t[r]; -0.0]") == read(show_equations(said)) == pickle.loads(
        pickle.dumps(said)
    )
    assert show_equations(read("y[r] = x[r + 1; 0]*tab[t[r]; 0]")) == "y[r] = x[r + 1]*tab[t[r]; 0]"
    text = "y[r<R] = x1[x2[r]; 0] - x1[x2[r]]"
    stated = Stated(text, ("R",), ("x1", "x2"), ("y",), {"x2": "int64"}, "x1[x1_0<5]").checked()
    assert stated.text == text


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("y[b,i] = 2*y[b - 1,i] + x[b,i]", "the batch is read as a whole"),
        ("y[b] = sum[i] x[b + 1,i]", "its place must be a plain index"),
        ("y[b] = max[a<3] x[a,0]*x[b,1]", "the batch is read as a whole"),
    ],
)
def test_windows_over_the_batch_are_refused(text: str, what: str) -> None:
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 4))
    with g.path("p"), pytest.raises(cv.ShapeError, match=what):
        cv.equation(text, x=x, fused=True)


# ---------------------------------------------------------------- models
def learner(rate: float = 0.1, width: int = 6) -> cv.CalcGraph:
    """A scan, a gather and a reduction that are rows, with their gradients, in training."""
    g = cv.CalcGraph()
    x, t = g.placeholder("x", (None, width)), g.placeholder("t", (None,), "int64")
    w, tab = g.parameter("w", (width,), init="normal"), g.parameter("tab", (9, width), init="xavier_uniform")
    with g.path("learn", backward=True) as learn:
        s = cv.equation("s[b,i] = sigmoid(w[i])*s[b, i - 1] + x[b,i]", x=x, w=w)
        e = cv.equation("e[b,c] = tab[t[b], c]", tab=tab, t=t)
        y = cv.equation("y[b] = logsumexp[i] (s[b,i] - e[b,i])^2", s=s, e=e, fused=True)
        learn.minimize(cv.mean(y), cv.SGD(rate), output=y)
    with g.path("predict") as predict:
        predict.output = cv.equation("q[b,i] = q[b, i + 1]/2 + x[b,i]*w[i]", x=x, w=w).rename("q")
    return g


def batch(n: int, width: int = 6) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(n).standard_normal((n, width)), "t": np.arange(n) % 9}


def steps(model: Any, sizes: tuple[int, ...] = (6, 4, 6)) -> list[float]:
    return [model.step(*batch(n).values()) for n in sizes]


def test_a_script_computes_the_same(tmp_path: Any) -> None:
    model = cv.Model(learner(), batch_size=6, dtype="float64", workers=1, seed=1)
    model.to_python(tmp_path / "train.py")
    script = runpy.run_path(str(tmp_path / "train.py"))
    np.testing.assert_allclose([script["step"](*batch(n).values()) for n in (6, 4, 6)], steps(model), rtol=1e-12)
    with pytest.raises(IndexError, match="beyond the ends"):
        script["step"](batch(2)["x"], np.array([0, 9]))


def test_scripts_of_generated_equations_compute_the_same(tmp_path: Any, whole: bool) -> None:
    for seed in range(300 if whole else 12):
        drawn, g = generate(seed), cv.CalcGraph()
        values, b = in_range(drawn.text, drawn.values), g.placeholder("b", (None,))
        given = {n: g.parameter(n, v.shape, init=v) if n in drawn.wrt else v for n, v in values.items()}
        with g.path("learn", backward=True) as learn:
            y = cv.equation(drawn.text, fused=True, **given)
            learn.minimize(cv.mean(cv.tanh(y)) + cv.mean(b), cv.SGD(0.01), output=y)
        with g.path("predict") as predict:
            predict.output = cv.neg(b)
        model = cv.Model(g, batch_size=2, dtype="float64", workers=1, seed=1)
        model.to_python(tmp_path / f"train{seed}.py")
        script = runpy.run_path(str(tmp_path / f"train{seed}.py"))
        got, want = ([of(np.ones(2)) for _ in range(3)] for of in (script["step"], model.step))
        np.testing.assert_allclose(got, want, rtol=1e-9, err_msg=f"{seed}: {drawn.text}")


def test_models_that_share_a_heap_are_what_they_are_alone() -> None:
    programs = [cv.compile(learner(rate, width), batch_size=6, workers=1) for rate, width in ((0.1, 6), (0.3, 5))]
    data = [batch(6, width).values() for width in (6, 5)]
    alone = []
    for program, given in zip(programs, data):
        model = cv.CalcHeap(program.heap_bytes).create(program, seed=1)
        alone.append([model.step(*given) for _ in range(4)])
    heap = cv.CalcHeap(max(p.heap_bytes for p in programs) + 256)
    models = [heap.create(program, seed=1, name=f"{k}") for k, program in enumerate(programs)]
    turns = [[model.step(*given) for model, given in zip(models, data)] for _ in range(4)]
    assert heap.stats.switches >= 4
    assert [*map(list, zip(*turns))] == alone


def test_a_stored_model_goes_on(tmp_path: Any) -> None:
    model = cv.Model(learner(), batch_size=6, workers=1, seed=1)
    steps(model)
    model.save(tmp_path / "model.calc")
    again = cv.load(tmp_path / "model.calc")
    assert steps(again) == steps(model)


# ---------------------------------------------------------------- files and processes
ELSEWHERE = """
import sys
import numpy as np
import calcvm as cv
from calcvm.kernels_cpu import _common
compiled = []
build = _common.build
_common.build = lambda symbol, *more: compiled.append(symbol) or build(symbol, *more)
program = cv.load_program(sys.argv[1])
model = cv.CalcHeap(program.heap_bytes).create(program, seed=1)
rng = np.random.default_rng(6)
print([model.step(rng.standard_normal((6, 6)), np.arange(6)) for _ in range(2)])
print(len([s for s in compiled if "equation_" in s]))
"""


def test_a_program_runs_in_another_process_which_keeps_its_kernels(tmp_path: Any, monkeypatch: Any) -> None:
    program = cv.compile(learner(), batch_size=6, workers=1)
    program.save(tmp_path / "program.calc")
    model = cv.CalcHeap(program.heap_bytes).create(program, seed=1)
    rng = np.random.default_rng(6)
    want = [model.step(rng.standard_normal((6, 6)), np.arange(6)) for _ in range(2)]
    monkeypatch.setenv("CALCVM_CACHE_DIR", str(tmp_path / "cache"))
    compiled = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", ELSEWHERE, str(tmp_path / "program.calc")], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        losses, count = done.stdout.splitlines()
        assert losses == str(want)
        compiled.append(int(count))
    assert compiled == [len(rows_of(program)), 0]


def test_programs_and_operators_are_pickled() -> None:
    g = learner()
    program = cv.compile(g, batch_size=6)
    assert pickle.loads(pickle.dumps(program)) == program
    for op in g.paths["learn"].operations:
        assert pickle.loads(pickle.dumps(op.spec)) is op.spec


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: Any) -> Any:
        raise AssertionError("something is compiled")

    monkeypatch.setattr(_common, "build", build)


def forged(program: cv.Program, name: str, document: dict[str, Any], called: str) -> io.BytesIO:
    """The file of a program whose row of a name is another."""
    equations = {called if k == name else k: document if k == name else v for k, v in program.info["equations"].items()}
    rows = tuple(sorted((called if k == name else k, form) for k, form in program.instructions))
    file = io.BytesIO()
    replace(program, instructions=rows, info={**program.info, "equations": equations}).save(file)
    file.seek(0)
    return file


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"text": "y[b<B,i<6] = 2*x1[i]"}, "was changed"),
        ({"language": 2}, "is of version 2 of the language"),
        ({"words": ["B", "C"]}, "was changed"),
        ({"types": {"x1": "int64"}}, "was changed"),
        ({"text": 3}, "text"),
    ],
)
def test_a_changed_equation_is_refused(change: dict[str, Any], what: str) -> None:
    program = cv.compile(learner(), batch_size=6)
    name, document = next((n, d) for n, d in program.info["equations"].items() if "sigmoid(x1[i])*y" in d["text"])
    with pytest.raises(cv.ProgramError, match=what):
        cv.load_program(forged(program, name, {**document, **change}, name))


REFUSED = {
    "y[b<B] = sum[i<99999999] x1[b]": "the range of i is above 65536",
    "y[b<B] = sum[i<60000,j<60000,k<60000] x1[b]*(i + j + k)": "the range of i, j, k is above 65536",
    "y[b<B] = x1[b]*N": "there is no index, size or operand 'N'",
    "y[b<B] = x1[b + 1]": "the axes of x1 are unknown",
    "y[b<B] = x1[x1[b]]": "a place of x1 is a number",
    f"y[b<B] = {'(' * 10_000}x1[b]{')' * 10_000}": "more than 10000 characters",
    f"y[b<B] = {'(' * 4_900}x1[b]{')' * 4_900}": "more than 40 nested levels",
    f"y[b<B] = {'-' * 9_000}x1[b]": "more than 40 nested levels",
    f"y[b<B] = {' + '.join(['x1[b]'] * 1_000)}": "more than 100 + in a row",
    f"y[b<B] = {'9' * 5_000}*x1[b]": "more than 309 digits",
    f"y[b<B] = {''.join(f'var[i{k}<2] ' for k in range(20))}x1[b]": "4096 are the most",
    "; ".join(["e0[b<B] = x1[b]", *(f"e{k + 1}[b] = e{k}[b]*e{k}[b]" for k in range(30)), "y[b] = e30[b]"]): "4096 are the most",
    "y[b<B] = x1[b] + y[b - 4611686018427387904]": "numbers above 2^40",
    "y[b<B] = sum[i<4611686018427387904] x1[b]": "numbers above 2^40",
    "y[b<B] = x1[b] + y[b - 9223372036854775808]": "not in its canonical form",
    "y[b<B] = ( x1[b])": "not in its canonical form",
    "y[b<B,b<B] = x1[b]": "the index b is there already",
    "y[b<B] = gelu(x1[b])": "there is no function 'gelu'",
    "z[b<B] = x1[b]": "y is not set by exactly one equation",
}  # fmt: skip


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:40])
def test_a_text_that_no_row_says_is_refused_before_anything_is_compiled(text: str) -> None:
    """By a file whose hash fits, by a graph's text, and where an operator is made."""
    program = cv.compile(learner(), batch_size=6)
    name = next(iter(program.info["equations"]))
    bad = Stated(text, ("B",), ("x1",), ("y",))
    with pytest.raises(cv.ProgramError, match=re.escape(REFUSED[text])):
        cv.load_program(forged(program, name, bad.document, bad.name))
    with pytest.raises(cv.CalcError, match=re.escape(REFUSED[text])):
        operator_of(bad)
    line = (
        f"calcvm graph 1\nx = placeholder[None]\npath p:\n    y = equation(x, language=1, text={text!r}, words=['B'])\n"
    )
    with pytest.raises(cv.CalcError, match=re.escape(REFUSED[text])):
        cv.read_graph(line)


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ("language=1, text=3", "text of an equation is a text"),
        ("text='y[b<B] = x1[b]', words=['B']", "language of an equation is a number"),
        ("language=2, text='y[b<B] = x1[b]', words=['B']", "is of version 2 of the language"),
        ("language=1, text='y[b<B] = x1[b]', words=[3]", "words of an equation is a list of texts"),
        ("language=1, text='y[b<B] = x1[b]', words=['B'], types={'x1': 'text'}", "operands are of floats or bool"),
        ("language=1, text='y[b<B] = x1[b]', word=['B']", "did you mean words=?"),
    ],
)
def test_what_is_wrong_in_a_graphs_text_is_told(said: str, what: str) -> None:
    text = f"calcvm graph 1\nx = placeholder[None]\npath p:\n    y = equation(x, {said})\n"
    with pytest.raises(cv.CalcError, match=re.escape(what)):
        cv.read_graph(text)


# ---------------------------------------------------------------- integers
@pytest.mark.parametrize(
    "text",
    [
        "y[b,i] = t[b,i]*t[b,i]",
        "y[b] = sum[i] t[b,i]*1000",
        "y[b] = prod[i] t[b,i]",
        "y[b,i] = t[b,i]%(t[b,i] - t[b,i])",
    ],
)
def test_elements_of_integers_are_numbers_in_a_row_too(text: str) -> None:
    """Generated rows once overflowed at 64 bits, and gave a number for a division by 0, which is NaN."""
    found = []
    for fused in (True, False, None):
        g = cv.CalcGraph()
        t = g.placeholder("t", (None, 3), dtype="int64")
        with g.path("p") as p:
            p.output = cv.equation(text, t=t, fused=fused)
        program = cv.compile(g, batch_size=2, dtype="float64")
        model = cv.CalcHeap(program.heap_bytes + 4096).create(program)
        model["t"] = [[2**40, 2**62, 3], [7, -(2**62), 2**61]]
        model.forward("p")
        found.append(np.array(model[p.output.name]))
    for other in found[1:]:
        assert found[0].dtype == other.dtype == np.float64
        np.testing.assert_array_equal(found[0], other)

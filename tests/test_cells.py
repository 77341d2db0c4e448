"""Recurrent cells that users declare, beside PyTorch's gradients of a plain loop in float64.

Random cells are evaluated by NumPy, from their rows' texts; ``--whole`` also compiles them.
"""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.ops.cells import operator_of
from calcvm.ops.dims import shape_of
from calcvm.script import helpers
from calcvm.script.code import trace
from calcvm.script.derived import writer_of
from calcvm.script.row import Row, Seen, lines_of

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parent.parent
RANDOM = 30
pytestmark = pytest.mark.filterwarnings("error")


# ---------------------------------------------------------------- cells: of calcvm's functions, and of PyTorch's
def mgu(F):
    """The minimal gated unit, Zhou et al. 2016, with its reset after the product."""

    def mgu(z, m, h):
        f = F.sigmoid(z[0])
        return h + f * (F.tanh(z[1] + f * m[0]) - h)

    return mgu, 2, 1


def peephole(F):
    """The LSTM with peepholes, Gers and Schmidhuber 2000."""

    def peephole(z, h, c, *, p_i, p_f, p_o=0.1):
        i, f = F.sigmoid(z[0] + p_i * c), F.sigmoid(z[1] + p_f * c)
        c = f * c + i * F.tanh(z[2])
        return F.sigmoid(z[3] + p_o * c) * F.tanh(c), c

    return peephole, 4, 0


def time_constant(F):
    """The liquid time constant by an Euler step, Hasani et al. 2021."""

    def time_constant(z, h, *, tau=1.0, a=1.0):
        f = F.sigmoid(z[0])
        return h + 0.1 * (f * (a - h) - h / tau)

    return time_constant, 1, 0


def independent(F):
    """Units that see their own state alone, if the weights of the state are 0: Li et al. 2018."""

    def independent(z, h, *, u=0.5):
        s = z[0] + u * h
        return F.where(s > 0, s, 0.01 * s)

    return independent, 1, 0


def several(F):
    """Four states, more than gates, and constants."""

    def several(z, h, a, b, n):
        s = F.tanh(a) * z[0]
        return F.tanh(s + b), F.maximum(s, a), F.exp(-(s**2)) + 0.5 * b, 1 / (1 + abs(h) + n * n)

    return several, 1, 0


def leaky(F):
    def leaky(z, h):
        return 0.9 * h + z[0]

    return leaky, 1, 0


MADE = {make.__name__: make for make in (mgu, peephole, time_constant, independent, several, leaky)}


def cell_of(make):
    function, gates, apart = make(cv)
    return cv.cell(gates=gates, apart=apart)(function)


def random_cell(seed):
    """A function of cells, from random expressions."""
    rng = np.random.default_rng(seed)
    gates, states, units = (int(rng.integers(low, high)) for low, high in ((1, 5), (1, 4), (0, 3)))
    apart = int(rng.integers(0, gates + 1)) if rng.random() < 0.4 else 0
    leaves = [("z", k) for k in range(gates)] + [("m", k) for k in range(apart)]
    leaves += [("s", k) for k in range(states)] + [("p", k) for k in range(units)]
    every = [leaves[k] for k in rng.permutation(len(leaves))]  # each is read at least once

    def draw(depth):
        if depth == 0:
            return every.pop() if every else leaves[rng.integers(len(leaves))]
        kind = rng.integers(12)
        if kind < 4:
            return (("sigmoid", "tanh", "sin", "softplus")[kind], draw(depth - 1))
        if kind == 4:
            return "bell", draw(depth - 1)
        if kind == 5:
            return "where", draw(1), draw(depth - 1), draw(depth - 1)
        if kind == 6:
            return "over", draw(depth - 1), draw(depth - 1)
        return ("+", "-", "*")[kind % 3], draw(depth - 1), draw(depth - 1)

    shared = draw(2)
    tops = [("+", draw(int(rng.integers(1, 4))), shared) for _ in range(states)]
    while every:
        tops[0] = "+", tops[0], every.pop()

    def make(F):
        def random(z, m, s, p):
            given, known = {"z": z, "m": m, "s": s, "p": p}, {}

            def value(node):
                if id(node) not in known:
                    known[id(node)] = of(*node)
                return known[id(node)]

            def of(what, *parts):
                if what in given:
                    return given[what][parts[0]]
                x = [value(part) for part in parts]
                match what:
                    case "+":
                        return x[0] + x[1]
                    case "-":
                        return x[0] - 0.5 * x[1]
                    case "*":
                        return x[0] * x[1]
                    case "over":
                        return x[0] / (1 + x[1] ** 2)
                    case "bell":
                        return F.exp(-(x[0] ** 2))
                    case "where":
                        return F.where(x[0] > 0.1, x[1], x[2])
                return getattr(F.nn.functional if F is torch and what == "softplus" else F, what)(x[0])

            return tuple(F.tanh(value(top)) for top in tops)

        scope = {"random": random}
        z, m = "z, m" if apart else "z", "m" if apart else "()"
        s, p = (", ".join(f"{name}{k}" for k in range(n)) for name, n in (("s_", states), ("p_", units)))
        text = f"def drawn({z}, {s}{', *, ' + p if units else ''}):\n    return random(z, {m}, ({s},), ({p}{',' * bool(units)}))"
        exec(text, scope)
        return scope["drawn"], gates, apart

    return make


# ---------------------------------------------------------------- one layer, and its expected values
class Layer:
    """A cell over sequences of different lengths, its data, and PyTorch's values and gradients."""

    def __init__(self, make, seed=0, n=4, steps=5, size=3, inputs=2, reverse=False, ragged=True):
        rng = self.rng = np.random.default_rng(seed)
        self.make, self.own, self.reverse = make, cell_of(make), reverse
        width = self.own.gates * size
        shapes = {"x": (n, steps, inputs), "w": (inputs, width), "v": (size, width), "b": (width,), "d": (width,)}
        shapes |= {f"of_{name}": (n, size) for name in self.own.states} | dict.fromkeys(self.own.parameters, (size,))
        self.data = {name: rng.uniform(-1, 1, shape) for name, shape in shapes.items()}
        if "tau" in self.data:
            self.data["tau"] += 2.0
        self.lengths = np.array([steps, 0, 1, *rng.integers(0, steps + 1, n)])[:n] if ragged else np.full(n, steps)
        self.weights = [rng.uniform(-1, 1, (n, steps, size)), *rng.uniform(-1, 1, (len(self.own.states), n, size))]

    def graph(self):
        g = cv.CalcGraph()
        v = {name: g.parameter(name, value.shape, init=value) for name, value in self.data.items()}
        lengths = g.constant("lengths", self.lengths, "int64")
        with g.path("p"):
            states, units = [v[f"of_{s}"] for s in self.own.states], {p: v[p] for p in self.own.parameters}
            given = [v[name] for name in ("x", "w", "v", "b", "d")]
            found = cv.recurrent(self.own, *given, *states, lengths=lengths, reverse=self.reverse, **units)
            keep = [out.rename(f"out.{k}") for k, out in enumerate(found)]
            total = sum(cv.sum(out * weight) for out, weight in zip(found, self.weights))
            keep += [cv.gradient(total, v[name]).rename(f"d.{name}") for name in self.data]
        return g, [out.name for out in keep]

    def expected(self):
        function, gates, apart = self.make(torch)
        v = {name: torch.tensor(value, requires_grad=True) for name, value in self.data.items()}
        n, steps, _ = self.data["x"].shape
        ys, lasts = [], []
        for i in range(n):
            states = [v[f"of_{s}"][i] for s in self.own.states]
            y = [torch.zeros(len(self.data["v"]), dtype=torch.float64)] * steps
            for t in range(self.lengths[i])[:: -1 if self.reverse else 1]:
                a, b = v["x"][i, t] @ v["w"] + v["b"], states[0] @ v["v"] + v["d"]
                a, b = a.split(len(states[0])), b.split(len(states[0]))
                merged = gates - apart
                sums = [p + q for p, q in zip(a[:merged], b[:merged])] + [*a[merged:]]
                given = (sums, b[merged:]) if apart else (sums,)
                out = function(*given, *states, **{name: v[name] for name in self.own.parameters})
                states = [*out] if isinstance(out, tuple) else [out]
                y[t] = states[0]
            ys.append(torch.stack(y))
            lasts.append(torch.stack(states))
        found = [torch.stack(ys), *torch.stack(lasts, 1)]
        sum((out * torch.tensor(weight)).sum() for out, weight in zip(found, self.weights)).backward()
        out = {f"out.{k}": x.detach().numpy() for k, x in enumerate(found)}
        return out | {f"d.{k}": np.zeros(x.shape) if x.grad is None else x.grad.numpy() for k, x in v.items()}

    def check(self, found, near=1e-9):
        want = self.expected()
        assert {*found} >= {*want}
        for name, value in want.items():
            np.testing.assert_allclose(found[name], value, rtol=near, atol=near, err_msg=f"{name}: {self.own.text}")

    def computed(self, workers=1, dtype="float64", device="cpu", **how):
        g, keep = self.graph()
        program = cv.compile(g, batch_size=1, workers=workers, dtype=dtype, device=device, keep=keep, **how)
        with cv.CalcHeap(program.heap_bytes, device=device) as heap:
            model = heap.create(program, seed=0)
            model.forward("p")
            return {name: model[name].copy() for name in keep}

    def written(self):
        """The same by the rows' texts, which NumPy runs."""
        own, d = self.own, self.data
        spec, (n, steps, _), size = operator_of(own), d["x"].shape, len(d["v"])
        h0, *others = (d[f"of_{s}"] for s in own.states)
        a = {"z": d["x"] @ d["w"] + d["b"], "wh": d["v"], "b": d["d"], "h0": h0, "lengths": self.lengths}
        a |= {"p": np.concatenate([d[p] for p in own.parameters])} if own.parameters else {}
        a |= {"c0": np.concatenate(others, 1)} if others else {}
        made = spec.shape({k: shape_of(v.shape) for k, v in a.items()}, {})
        a |= {f"d{name}": np.full(a[name].shape, np.nan) for name in a}
        a |= {name: np.full([k.b for k in shape], np.nan) for name, shape in made.items()}
        a |= {"dy": self.weights[0], "dhn": self.weights[1]}
        a |= {"dcn": np.concatenate(self.weights[2:], 1)} if others else {}
        words = {"N": n, "T": steps, "H": size, "reverse": int(self.reverse), "acc": 0}
        for row in spec.rows:
            of = trace()
            there = [o.name for o in row.operands if o.name in a]
            r = Row(row, words, {o: Seen(of.of(o), shape_of(a[o].shape), "float64") for o in there}, of)
            writer_of(row.name)(r)
            exec("\n".join(lines_of(r)), {**vars(helpers)}, a)
        out = {"out.0": a["y"], "out.1": a["hn"], "d.of_" + own.states[0]: a["dh0"], "d.v": a["dwh"], "d.d": a["db"]}
        for k, name in enumerate(own.states[1:]):
            at = slice(k * size, (k + 1) * size)
            out |= {f"out.{k + 2}": a["cn"][:, at], f"d.of_{name}": a["dc0"][:, at]}
        out |= {f"d.{name}": a["dp"][k * size : (k + 1) * size] for k, name in enumerate(own.parameters)}
        dz = a["dz"]
        return out | {"d.x": dz @ d["w"].T, "d.w": np.einsum("ntk,nts->ks", d["x"], dz), "d.b": dz.sum((0, 1))}


@pytest.mark.parametrize("name", MADE)
def test_texts_beside_pytorch(name):
    layer = Layer(MADE[name], reverse=name == "several")
    layer.check(layer.written())


@pytest.mark.parametrize("number", range(RANDOM))
def test_random_cells_beside_pytorch(number, whole):
    layer = Layer(random_cell(number), number, reverse=bool(number % 2))
    layer.check(layer.written())
    if whole and number < RANDOM * 2 // 3:  # LLVM takes up to two minutes for the kernels of one
        layer.check(layer.computed(1 + number % 3))


# ---------------------------------------------------------------- kernels
@pytest.mark.parametrize("name", ["peephole", "mgu", "several"])
def test_kernels_beside_pytorch(name):
    """In float64 to 1e-9, with the same bits for any team; in float32 to its precision."""
    layer = Layer(MADE[name], n=7, size=17, reverse=name == "mgu")
    one, three = layer.computed(1), layer.computed(3)
    layer.check(one)
    assert {k: v.tobytes() for k, v in one.items()} == {k: v.tobytes() for k, v in three.items()}
    if name == "peephole":
        layer.check(layer.computed(2, "float32"), 2e-5)


@pytest.mark.parametrize("name", [name for name in MADE if name not in ("peephole", "mgu", "several")])
def test_other_kernels_beside_pytorch(name, whole):
    if not whole:
        pytest.skip("compiled with --whole")
    for size in (1, 16, 33):
        layer = Layer(MADE[name], n=9, size=size)
        layer.check(layer.computed(2))


# ---------------------------------------------------------------- layers, streams
def lstm(z, h, c):
    c = cv.sigmoid(z[1]) * c + cv.sigmoid(z[0]) * cv.tanh(z[2])
    return cv.sigmoid(z[3]) * cv.tanh(c), c


LSTM = cv.cell(gates=4)(lstm)
RNG = np.random.default_rng(0)
PIECES = [RNG.standard_normal((n, 3)) for n in (3, 7, 0, 1, 5)]
TARGETS = [RNG.standard_normal((len(x), 2)) for x in PIECES]


def model(net, **how):
    options = {"loss": "mse", "optimizer": cv.SGD(0.1), "batch_size": 8, "dtype": "float64", "seed": 0, "lengths": True}
    return cv.Model(net >> nn.Linear(2), input_shape=(7, 3), **{**options, **how})


@pytest.mark.parametrize("how", [{"num_layers": 2}, {"bidirectional": True, "return_sequences": True}])
def test_layers_are_as_the_built_in_ones(how):
    """Layers, directions, lengths, steps of training; and step by step."""
    once = not how.get("bidirectional")
    ours, theirs = (model(net, stream=once) for net in (nn.Recurrent(LSTM, 8, **how), nn.LSTM(8, **how)))
    assert [*ours.parameters] == [name.replace("lstm_1", "recurrent_1") for name in theirs.parameters]
    theirs.set_parameters({name.replace("recurrent_1", "lstm_1"): p for name, p in ours.parameters.items()})
    for _ in range(3):
        padded, lengths = cv.pad_sequences(PIECES, 7)
        targets, _ = cv.pad_sequences(TARGETS, 7)
        assert ours.step((padded, lengths), targets) == pytest.approx(
            theirs.step((padded, lengths), targets), rel=1e-12
        )
    want = theirs.predict(PIECES)
    for found, wanted in zip(ours.predict(PIECES), want, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12)
    if once:
        stream = ours.stream()
        assert {*stream.state} == {f"recurrent_1.{s}_l{k}" for s in "hc" for k in (0, 1)}
        for x, y in zip(PIECES[1], want[1]):
            np.testing.assert_allclose(stream(x), y, rtol=1e-9, atol=1e-12)


def test_parameters_of_units_start_where_the_cell_says():
    own = model(nn.Recurrent(cell_of(peephole), 5))
    start = {name: p.copy() for name, p in own.parameters.items()}
    np.testing.assert_array_equal(start["recurrent_1.p_o_l0"], np.full(5, 0.1))
    assert 0 < np.abs(start["recurrent_1.p_i_l0"]).max() <= 5**-0.5
    own.fit(PIECES, TARGETS, epochs=2, progress=False)
    assert all(
        (own.parameters[f"recurrent_1.{p}_l0"] != start[f"recurrent_1.{p}_l0"]).all() for p in ("p_i", "p_f", "p_o")
    )


# ---------------------------------------------------------------- files, texts, pickles
ELSEWHERE = """
import io, pickle, sys
import numpy as np
import calcvm as cv
model, graph = pickle.load(sys.stdin.buffer)
out = cv.load(io.BytesIO(model)).predict(np.ones((3, 7, 3)))
again = cv.compile(graph, batch_size=8, dtype="float64").instructions
sys.stdout.buffer.write(pickle.dumps((out, again)))
"""


def test_files_and_pickles_hold_the_formula():
    """Another process runs a model and compiles a graph without the function."""
    ours, file = model(nn.Recurrent(LSTM, 8), lengths=False), io.BytesIO()
    graph = cv.build_graph(nn.Recurrent(LSTM, 8) >> nn.Linear(2), (7, 3), "mse", "adam")
    ours.save(file)
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-c", ELSEWHERE], input=pickle.dumps((file.getvalue(), graph)), capture_output=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr.decode()
    out, instructions = pickle.loads(run.stdout)
    assert out.tobytes() == ours.predict(np.ones((3, 7, 3))).tobytes()
    assert instructions == cv.compile(graph, batch_size=8, dtype="float64").instructions
    assert ours.program.info["cells"] == {LSTM.stem: LSTM.document}
    assert f"lstm_{LSTM.stem.split('_')[1][:8]}_fwd " in ours.program.disassemble()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"text": "new_h = tanh(z0 + z1 + z2 + z3)", "states": ["h"]}, "was changed"),
        ({"language": 2}, "version 2 of the language"),
        ({"gates": 5}, "z4 is never read"),
        ({"text": "new_h = tanh(z0); new_c = c*h"}, "z1 is never read"),
        ({"text": "new_h = z0*z1*z2*z3*c; new_c = z9"}, "z9"),
        ({"states": ["h", "sum"]}, "'sum' has a meaning"),
        ({"text": 3}, "text"),
    ],
)
def test_a_changed_cell_is_refused(change, what):
    program = cv.compile(cv.build_graph(nn.Recurrent(LSTM, 8), (7, 3), "mse", "adam"), batch_size=2)
    cells, file = {name: document | change for name, document in program.info["cells"].items()}, io.BytesIO()
    replace(program, info={**program.info, "cells": cells}).save(file)
    file.seek(0)
    with pytest.raises(cv.ProgramError, match=what):
        cv.load_program(file)


def test_texts_of_graphs():
    layer = Layer(several)
    g, _ = layer.graph()
    again = cv.read_graph(g.text())
    assert again.text() == g.text() and "= recurrent(" in g.text()
    with pytest.raises(cv.CalcError, match="gates of a recurrent cell is a number"):
        cv.read_graph(g.text().replace("gates=1", "gates='1'"))
    with pytest.raises(cv.CalcError, match="canonical"):
        cv.read_graph(g.text().replace("text='", "text=' "))


def test_scripts(tmp_path, monkeypatch):
    ours = model(nn.Recurrent(cell_of(peephole), 5), lengths=False)
    ours.to_python(tmp_path / "of_cells.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    import of_cells

    x, t = RNG.standard_normal((6, 7, 3)), RNG.standard_normal((6, 7, 2))
    for _ in range(3):
        assert of_cells.step(x, t) == pytest.approx(ours.step(x, t), rel=1e-9)
    np.testing.assert_allclose(of_cells.predict(x), ours.predict(x), rtol=1e-9, atol=1e-12)


def test_the_same_formula_is_the_same_cell_and_another_is_another():
    def make(factor):
        def scaled(z, h):
            return factor * cv.tanh(z[0])

        return cv.cell(gates=1)(scaled)

    assert make(2.0).stem == make(2.0).stem != make(3.0).stem
    assert pickle.loads(pickle.dumps(make(2.0))) == make(2.0)
    assert str(nn.Recurrent(make(2.0), 8)) == "Recurrent(cell=scaled, hidden_size=8)"


# ---------------------------------------------------------------- wrong input
def _of(body, gates=1, arguments="z, h", **how):
    """A cell of one line."""
    scope = {"cv": cv, "np": np}
    exec(f"def wrong({arguments}):\n    {body}", scope)
    return cv.cell(gates=gates, **how)(scope["wrong"])


def _recurrent(own=None, **how):
    g = cv.CalcGraph()
    x, w, v, p = (
        g.placeholder("x", (None, 5, 3)),
        g.parameter("w", (3, 4)),
        g.parameter("v", (4, 4)),
        g.parameter("p", (4,)),
    )
    s = g.placeholder("s", (None, 4))
    with g.path("p"):
        own = own or _of("return cv.tanh(z[0]) + p*h, c", arguments="z, h, c, *, p")
        states = [s if name else None for name in how.pop("states", ())]
        given = {"p": p} | how
        return cv.recurrent(own, x, w, v, None, None, *states, **given)


WRONG = [
    (lambda: _of("return None"), "it returns None, and its states are h"),
    (lambda: _of("return h, z[0]"), "it returns 2 values, and its states are h"),
    (lambda: _of("return z[0]", arguments="z, h, c"), "it returns 1 value, and its states are h, c"),
    (lambda: _of("return np.ones(3)"), "the new h must be a number of the cell"),
    (lambda: _of("return z[0] > 0"), "the new h is a condition: take cv.where"),
    (lambda: _of("return h if z[0] > 0 else z[0]"), "cv.where"),
    (lambda: _of("return np.tanh(z[0])"), "cv.where"),
    (lambda: _of("return z[1]"), "a sum that is not there: gates=1, apart=0"),
    (lambda: _of("return h"), "z0 is never read"),
    (lambda: _of("return z[0]", arguments="z, h, *, p"), "p is never read"),
    (lambda: _of("return z[0]**h"), "an exponent is a number"),
    (lambda: _of("return cv.softmax(z[0], axis=-1)"), "softmax applies to variables"),
    (lambda: _of("return z[0] @ h"), "@ applies to variables, not to elements"),
    (lambda: _of("return z[0]", arguments="z"), "its parameters are z, h and other states"),
    (lambda: _of("return z[0]", arguments="z, *h"), "its parameters are z, h and other states"),
    (lambda: _of("return z[0]", arguments="z, h=0.0"), "without defaults"),
    (lambda: _of("return z[0]*p", arguments="z, h, *, p='one'"), "p: its initial value"),
    (lambda: _of("return z[0]", arguments="z, max"), "'max' has a meaning"),
    (lambda: _of("return z[0]", arguments="z, z0"), "'z0' has a meaning"),
    (lambda: _of("return z[0]*x", arguments="z, h, *, x"), "'x' would be an argument of cv.recurrent"),
    (lambda: _of("return sum((cv.tanh(k * z[0]) for k in range(40)), h)"), "functions and values that are used again: 32"),
    (lambda: _of("return z[0]", gates=0), "gates must be an integer from 1 to 16, not 0"),
    (lambda: _of("return z[0]", apart=2), "apart must be an integer from 0 to 1"),
    (lambda: cv.cell(_of), "gates must be an integer"),
    (lambda: cv.cell(gates=1)(3), "a function of sums and states is wanted"),
    (lambda: cv.cell(gates=1)(lambda z, h: z[0]), "it needs a name"),
    (lambda: _recurrent(3), "a cell, a function decorated by cv.cell"),
    (lambda: _recurrent(p=None), "recurrent: p"),
    (lambda: _recurrent(q=1), "parameters of wrong are p; q is none"),
    (lambda: _recurrent(states=(1, 1, 1)), "wrong has 2 states, h, c; got 3"),
    (lambda: _recurrent(reverse=2), "reverse"),
    (lambda: _recurrent(_of("return z[0]*z[1]*p", 2, "z, h, *, p")), r"the weights \(4, 4\) must be \(H, 2\*H\)"),
    (lambda: nn.Recurrent(lstm, 8), "a cell, a function decorated by cv.cell"),
    (lambda: nn.Recurrent(LSTM, 0), "hidden_size"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "told"), WRONG, ids=[told for _, told in WRONG])
def test_wrong_input(call, told):
    with pytest.raises(cv.CalcError, match=told):
        call()


def test_a_shape_of_a_parameter():
    g = cv.CalcGraph()
    x, w, v = g.placeholder("x", (None, 5, 3)), g.parameter("w", (3, 4)), g.parameter("v", (4, 4))
    own = _of("return z[0]*p", arguments="z, h, *, p")
    with g.path("p"), pytest.raises(cv.ShapeError, match=r"p \(3,\) must be \(4,\), a number for each unit"):
        cv.recurrent(own, x, w, v, p=g.parameter("q", (3,)))

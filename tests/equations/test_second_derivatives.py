"""Gradients of gradients: every operator of the table beside differences, and networks beside PyTorch."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import calcvm as cv
from calcvm.graph import apply
from calcvm.ops import OPS
from tests.kinds.placed import OPERATORS, Placed

RECURRENT = [n for n in OPERATORS if OPS[n].category == "recurrent"]  # their rows have no equations
DIFFERENTIABLE = [n for n in OPERATORS if OPS[n].differentiable and n not in ("dropout", "fake_quantize", *RECURRENT)]
STEP = 1e-5


def looked_at(placed: Placed) -> tuple[cv.CalcGraph, Any, list[tuple[Any, Any]]]:
    """A graph with an operator, the squares of its gradients summed up, and gradients of that by what the operator reads."""
    spec, g = placed.spec, cv.CalcGraph()
    trains = bool(spec.updates)
    with g.path("look", backward=trains, adopt=False) as look:
        inputs = []
        for slot, shape in placed.seen.items():
            if slot in spec.updates:
                inputs.append(g.buffer(slot, shape))
            elif placed.is_data(slot) or None in shape:
                inputs.append(g.placeholder(slot, shape))
            else:
                inputs.append(g.parameter(slot, shape))
        y = apply(spec.name, *inputs, out="y", **placed.example.attrs)
        weight = g.constant("weight", placed.weight([n.b if n.constant else 1 for n in y.shape]))
        s = cv.sum(cv.tanh(y * weight))
        sources = [x for x, slot in zip(inputs, placed.seen) if slot in spec.differentiable]
        q = None
        for x in sources:
            with suppress(cv.ShapeError):
                d = cv.gradient(s, x)
                q = cv.sum(d * d) if q is None else q + cv.sum(d * d)
        assert q is not None
        q = q * 1.0
        found = [(x, cv.gradient(q, x)) for x in sources]
        if trains:  # only then are buffers updated
            factor = g.parameter("factor", (1,), init=cv.init.Ones())
            look.minimize(cv.sum(q * factor), optimizer=cv.SGD(0.0), output=y)
    return g, q, found


def slopes(name: str, limit: int) -> Counter[str]:
    done = Counter[str]()
    for example in [e for e in OPS[name].examples if not e.bench][:limit]:
        placed = Placed(OPS[name], example)
        try:
            g, q, found = looked_at(placed)
        except (
            cv.UnsupportedOperator
        ) as error:  # the largest of a batch; gradients of weights by windows over many places
            assert str(error).startswith("gradient: 'y' has no second derivative here: "), error
            assert name in ("max", "min", "conv") or "it counts the batch" in str(error), error
            assert "\n" not in str(error), error
            done["refused"] += 1
            continue
        except cv.CalcError as error:  # x*0 and x^0
            assert "nothing leads from one to the other" in str(error) and 0 in example.attrs.values(), error
            continue
        batch = example.batch
        program = cv.compile(
            g, batch_size=batch, dtype="float64", workers=1, keep=[q.name, *(d.name for _, d in found)]
        )
        model = cv.CalcHeap(program.heap_bytes).create(program, seed=3)
        rng = np.random.default_rng(5)
        data = {k: v for k, v in placed.data(batch, rng).items() if k in model.loaded.feeds("look")}
        if "t" in data and name == "binary_cross_entropy":  # targets are probabilities
            data["t"] = 1 / (1 + np.exp(-data["t"]))
        starts = placed.parameters(rng)

        def at(
            x: Any, way: Any, h: float, model: Any = model, data: Any = data, starts: Any = starts, q: Any = q
        ) -> float:
            for slot, value in starts.items():
                if slot in model.parameters:
                    model.parameters[slot][...] = value + (h * way if x.name == slot else 0)
            for slot, value in data.items():
                model[slot] = value + h * way if x.name == slot else value
            model.run_round("look")
            return float(model[q.name])

        for x, d in found:
            own = starts[x.name] if x.name in starts else data[x.name]
            way = rng.uniform(-1, 1, np.shape(own))
            slope = (at(x, way, STEP) - at(x, way, -STEP)) / (2 * STEP)
            at(x, way, 0.0)
            got = np.sum(model[d.name].reshape(np.shape(way)) * way)
            assert abs(got - slope) <= 1e-5 * max(abs(slope), 1.0), f"{placed}: {x.name}: {got}, slope {slope}"
            done["slopes"] += 1
    return done


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_second_derivatives_are_slopes_of_first_ones(name, whole):
    assert slopes(name, 99 if whole else 1)["slopes"]


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
def test_second_derivatives_of_what_is_padded_by_itself(mode):
    """As of the same elements put side by side."""
    places = {"reflect": (2, 1, 0, 1, 2, 1), "edge": (0, 0, 0, 1, 2, 2), "wrap": (1, 2, 0, 1, 2, 0)}[mode]
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 3, 2))
    found = []
    with g.path("look"):
        for y in (cv.pad(x, ((2, 1), (0, 0)), mode=mode), cv.concat([x[:, k : k + 1] for k in places], axis=1)):
            d = cv.gradient(cv.sum(cv.sin(y) * y), x)
            found.append(cv.gradient(cv.sum(d * d), x))
    model = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=2, dtype="float64", keep=[v.name for v in found]))
    model["x"] = np.random.default_rng(0).normal(size=(2, 3, 2))
    model.forward("look")
    np.testing.assert_allclose(*(model[v.name] for v in found), 1e-12, 1e-12)


def test_the_gradient_of_a_sum_reads_as_ones():
    """As many as samples, whatever those are, without a factor of 1."""
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 2))
    with g.path("look") as look:
        d = cv.gradient(cv.sum(cv.sin(x)), x)
        look.output = dd = cv.gradient(cv.sum(cv.square(d)), x)
    made = [op.spec.name for op in look.operations if not op.spec.view]
    assert made == ["sin", "sum", "slice", "pow", "where", "cos", "mul", "square", "sum", "gradient"]
    assert "ones" in g.variables and "one" not in g.variables
    model = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=4, dtype="float64"))
    model["x"] = data = np.array([[np.nan, 1], [np.inf, 2], [0, 3], [-1, 4]])
    model.forward("look")
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(model[dd.name], -np.sin(2 * data), 1e-12, 1e-15)


def test_what_draws_has_none():
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 3))
    with g.path("look", backward=True), pytest.raises(cv.UnsupportedOperator) as error:
        d = cv.gradient(cv.sum(cv.dropout(x * x, 0.5)), x)
        cv.gradient(cv.sum(d), x)
    assert str(error.value) == (
        "gradient: 'dropout' has no second derivative: its row 'dropout_bwd' has no equation (it draws random numbers by a counter)"
    )


# ---------------------------------------------------------------- networks beside PyTorch
def network(x: Any, layers: Any, F: Any) -> Any:
    for W, b in layers[:-1]:
        x = F.tanh(F.matmul(x, W) + b)
    W, b = layers[-1]
    return F.matmul(x, W) + b


def test_a_loss_of_second_derivatives_trains_as_in_pytorch():
    """The heat equation: the loss is of du/dt - d2u/dx2, and its gradient of third derivatives."""
    torch = pytest.importorskip("torch")
    g, sizes = cv.CalcGraph(), (2, 8, 8, 1)
    x, t = g.placeholder("x", (None, 1)), g.placeholder("t", (None, 1))
    layers = [
        (g.parameter(f"W{i}", (n, m)), g.parameter(f"b{i}", (m,), init=cv.init.Uniform(-1, 1)))
        for i, (n, m) in enumerate(zip(sizes, sizes[1:]))
    ]
    with g.path("learn", backward=True) as learn:
        u = network(cv.concat((x, t)), layers, cv)
        s = cv.sum(u)
        u_t, u_x = cv.gradient(s, t), cv.gradient(s, x)
        u_xx = cv.gradient(cv.sum(u_x), x)
        loss = cv.mean(cv.square(u_t - u_xx)) + cv.mean(cv.square(u))
        learn.minimize(loss, optimizer=cv.SGD(0.1), output=u)
    program = cv.compile(g, batch_size=16, dtype="float64", accumulate=True, keep=[u_t.name, u_xx.name])
    rng = np.random.default_rng(0)
    data = [rng.normal(size=(16, 1)) for _ in range(2)]
    bits = []
    for workers in (1, 2, 3):
        model = cv.CalcHeap(program.heap_bytes).create(program, seed=1, workers=min(workers, program.workers))
        model["x"], model["t"] = data
        model.forward("learn")
        model.backward("learn")
        bits.append(model.grad("W0", "learn").tobytes())
    assert len({*bits}) == 1
    tx, tt = (torch.tensor(a, requires_grad=True) for a in data)
    own = [[torch.tensor(np.array(model.parameters[v.name]), requires_grad=True) for v in pair] for pair in layers]
    v = network(torch.cat([tx, tt], 1), own, torch)
    v_x, v_t = torch.autograd.grad(v.sum(), [tx, tt], create_graph=True)
    (v_xx,) = torch.autograd.grad(v_x.sum(), tx, create_graph=True)
    want = ((v_t - v_xx) ** 2).mean() + (v**2).mean()
    want.backward()
    np.testing.assert_allclose(model[u_xx.name], v_xx.detach(), 1e-11, 1e-12)
    np.testing.assert_allclose(model[loss.name], want.item(), 1e-12)
    for pair, theirs in zip(layers, own):
        for p, tensor in zip(pair, theirs):
            np.testing.assert_allclose(model.grad(p.name, "learn"), tensor.grad, 1e-9, 1e-12)


def test_a_third_derivative():
    g = cv.CalcGraph()
    x = g.placeholder("x", (None,))
    with g.path("look"):
        d = cv.sum(cv.exp(2 * x) + x * x * x)
        for _ in range(3):
            d = cv.gradient(d if d.rank == 0 else cv.sum(d), x)
        d.rename("d")
    program = cv.compile(g, batch_size=5, dtype="float64")
    model = cv.CalcHeap(program.heap_bytes).create(program)
    model["x"] = X = np.linspace(-1, 1, 5)
    model.forward("look")
    np.testing.assert_allclose(model["d"], 8 * np.exp(2 * X) + 6, 1e-12)


def test_a_gradient_penalty_of_a_convolution_is_that_of_pytorch():
    torch = pytest.importorskip("torch")
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 2, 6, 6))
    w, v = g.parameter("w", (4, 2, 3, 3)), g.parameter("v", (4 * 9, 1))
    with g.path("learn", backward=True) as learn:
        h = cv.leaky_relu(cv.conv2d(x, w, stride=2, padding=1))
        score = cv.matmul(cv.flatten(h), v)
        d = cv.gradient(cv.sum(score), x)
        norms = cv.sqrt(cv.sum(cv.square(d), axis=(1, 2, 3)))
        loss = cv.mean(cv.square(norms - 1.0)) + cv.mean(score)
        learn.minimize(loss, optimizer=cv.SGD(0.1), output=score)
    program = cv.compile(g, batch_size=3, dtype="float64", accumulate=True)
    model = cv.CalcHeap(program.heap_bytes).create(program, seed=2)
    model["x"] = data = np.random.default_rng(4).normal(size=(3, 2, 6, 6))
    model.forward("learn")
    model.backward("learn")
    tx = torch.tensor(data, requires_grad=True)
    tw, tv = (torch.tensor(np.array(model.parameters[n]), requires_grad=True) for n in ("w", "v"))
    h = torch.nn.functional.leaky_relu(torch.nn.functional.conv2d(tx, tw, stride=2, padding=1), 0.01)
    score = h.flatten(1) @ tv
    (d,) = torch.autograd.grad(score.sum(), tx, create_graph=True)
    want = ((d.flatten(1).norm(dim=1) - 1) ** 2).mean() + score.mean()
    want.backward()
    np.testing.assert_allclose(model[loss.name], want.item(), 1e-12)
    np.testing.assert_allclose(model.grad("w", "learn"), tw.grad, 1e-9, 1e-12)
    np.testing.assert_allclose(model.grad("v", "learn"), tv.grad, 1e-9, 1e-12)

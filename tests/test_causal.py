"""Causal convolutions: PyTorch's numbers over sequences, and the same step by step."""

from __future__ import annotations

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from tests.cuda.conftest import gpu  # noqa: F401 (a fixture)

RNG = np.random.default_rng(0)
T, C = 23, 3


def network(dilations=(1, 2, 4), kernel=3, **options):
    layers = [nn.CausalConv1d(5 - i, kernel, d, **options) for i, d in enumerate(dilations)]
    return nn.Sequential([part for layer in layers for part in (layer, nn.Tanh())][:-1])


def graph(net):
    g = cv.build_graph(net, (T, C), "mse", cv.SGD(0.1))
    with g.path("stream") as stream:
        stream.output = net.build(g.placeholder("step", (None, C)), "", training=False)
    return g


def model_of(net, batch=4, **options):
    return cv.Model(graph(net), batch_size=batch, seed=3, **{"workers": 1, "dtype": "float64", **options})


@pytest.mark.parametrize("kernel, dilations", [(3, (1, 2, 4)), (1, (1,)), (2, (8, 1)), (5, (7,)), (2, (30,))])
@pytest.mark.parametrize("bias", [True, False])
def test_a_step_of_training_is_pytorchs(kernel, dilations, bias):
    torch = pytest.importorskip("torch")
    model = model_of(network(dilations, kernel, bias=bias))
    x = RNG.standard_normal((4, T, C))
    t = RNG.standard_normal(model.predict(x).shape)
    found, given = (
        torch.tensor(x).transpose(1, 2),
        {name: torch.tensor(w, requires_grad=True) for name, w in model.get_weights().items()},
    )
    for i, d in enumerate(dilations, 1):
        w, b = given[f"causalconv1d_{i}.weight"], given.get(f"causalconv1d_{i}.bias")
        found = torch.nn.functional.pad(found, ((kernel - 1) * d, 0))
        found = torch.nn.functional.conv1d(found, w, b, dilation=d)
        found = torch.tanh(found) if i < len(dilations) else found
    found = found.transpose(1, 2)
    np.testing.assert_allclose(model.predict(x), found.detach(), atol=1e-12)
    loss = torch.nn.functional.mse_loss(found, torch.tensor(t))
    loss.backward()
    assert model.step(x, t) == pytest.approx(float(loss.detach()), abs=1e-12)
    for name, w in given.items():
        np.testing.assert_allclose(model.get_weights()[name], (w - 0.1 * w.grad).detach(), atol=1e-12)


@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-12), ("float32", 1e-6)])
@pytest.mark.parametrize("kernel, dilations", [(3, (1, 2, 4)), (1, (1,)), (2, (8, 1)), (2, (30,))])
def test_streams_answer_as_over_whole_sequences(kernel, dilations, dtype, tolerance):
    model = model_of(network(dilations, kernel), dtype=dtype)
    x = RNG.standard_normal((4, T, C)).astype(dtype)
    wanted = model.predict(x)
    if max(kernel - 1 for _ in dilations) == 0:
        with pytest.raises(cv.CalcError, match="keeps no state"):
            model.stream("stream")
        return
    one, pair = model.stream("stream", place=3), model.stream("stream", batch=2)
    for _ in range(2):
        for k in range(T):
            np.testing.assert_allclose(one(x[3, k]), wanted[3, k], atol=tolerance)
            np.testing.assert_allclose(pair(x[:2, k]), wanted[:2, k], atol=tolerance)
        assert {name: array.shape for name, array in one.state.items()} == {
            f"causalconv1d_{i}.past": (1, (kernel - 1) * d, C if i == 1 else 7 - i) for i, d in enumerate(dilations, 1)
        }
        one.reset()
        pair.reset()
    model.step(x, wanted + 1)
    changed = model.predict(x)
    for k in range(T):
        np.testing.assert_allclose(one(x[3, k]), changed[3, k], atol=tolerance)


@pytest.mark.parametrize("steps", [7, 5])
def test_scores_of_each_step(steps):
    """Classes are the channels of the sequence, on its last axis, for the loss and the accuracy: also of as many steps."""
    x, y = RNG.standard_normal((4, steps, C)), RNG.integers(0, 5, (4, steps))
    model = cv.Model(
        nn.CausalConv1d(5, 2), input_shape=(steps, C), optimizer="adam", loss="softmax_cross_entropy", seed=0
    )
    found = model.evaluate(x, y)
    assert found["accuracy"] == pytest.approx((model.predict(x).argmax(-1) == y).mean(), abs=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_any_team_has_the_same_bits(dtype):
    x, found = RNG.standard_normal((4, T, C)), []
    for workers in (1, 2, 3):
        model = model_of(network(), workers=workers, dtype=dtype)
        t = np.ones_like(model.predict(x))
        stream, losses = model.stream("stream", batch=4), [model.step(x, t) for _ in range(3)]
        found.append((losses, model.predict(x).tobytes(), [stream(x[:, k]).tobytes() for k in range(T)]))
    assert found[0] == found[1] == found[2]


def test_a_simulated_gpu_streams_too(gpu):  # noqa: F811
    here, there = (model_of(network((1, 2)), workers=2, dtype="float32", **more) for more in ({}, {"device": "cuda"}))
    x = RNG.standard_normal((4, T, C)).astype("f4")
    there.set_weights(here.get_weights())
    streams = [m.stream("stream", batch=2, place=1) for m in (here, there)]
    for k in range(4):
        np.testing.assert_allclose(*[s(x[1:3, k]) for s in streams], atol=1e-5)
    np.testing.assert_allclose(here.predict(x), there.predict(x), atol=1e-5)


def test_files_and_texts():
    model = model_of(network())
    again = cv.read_graph(graph(network()).text())
    assert again.form == graph(network()).form
    assert repr(nn.CausalConv1d(4, 3, 2, bias=False)) == "CausalConv1d(channels=4, kernel=3, dilation=2, bias=False)"
    x = RNG.standard_normal((T, C))
    stream, other = model.stream("stream"), model.copy().stream("stream")
    for k in range(5):
        assert stream(x[k]).tobytes() == other(x[k]).tobytes()
    goes_on = model.copy().stream("stream")
    assert (
        goes_on(x[5]).tobytes()
        == stream(x[5]).tobytes()
        != other.model.copy().stream("stream", place=1)(x[5]).tobytes()
    )


def test_what_is_refused():
    for given, message in (
        ((0, 3), "channels"),
        ((4, 0), "kernel"),
        ((4, 3, 0), "dilation"),
        ((4, 3, 1.5), "dilation"),
        (("a", 3), "channels"),
    ):
        with pytest.raises(cv.CalcError, match=f"CausalConv1d: {message}"):
            nn.CausalConv1d(*given)
    g = cv.CalcGraph()
    with g.path("learn"):
        for shape in ((None,), (None, 3, 4, 5)):
            with pytest.raises(cv.ShapeError, match=r"is not \(N, steps, features\), or \(N, features\) for one step"):
                nn.CausalConv1d(4, 3).build(g.placeholder(f"x{len(shape)}", shape), "a", training=True)

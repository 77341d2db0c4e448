"""Gradients as variables of the graph, and the pictures made of them, beside PyTorch with copied weights."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn

SIDE = 32


def looked_into(net: nn.Layer, channels: int, workers: int = 1, dtype: str = "float32") -> cv.Model:
    """A network with a path that looks into it: at its image, and at what its last convolution has made."""
    g = cv.build_graph(net, (channels, SIDE, SIDE), "softmax_cross_entropy", cv.SGD(0.01))
    classes = g.placeholder("classes", (None,), "int64")
    with g.path("look") as look:
        scores = net.build(g.variables["input"], training=False)
        maps = [op for op in look.operations if op.spec.name == "conv"][-1].outputs["y"]
        cv.saliency(scores, classes, g.variables["input"]).rename("saliency")
        cv.grad_cam(scores, classes, maps).rename("cam")
    return cv.Model(g, batch_size=5, workers=workers, dtype=dtype, seed=0)


def look(model: cv.Model, x: np.ndarray, classes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    model["input"], model["classes"] = x, classes
    model.forward("look")
    return model["saliency"], model["cam"]


@pytest.mark.peers
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("name", "width", "channels"), [("lenet", 6, 1), ("resnet18", 4, 3)])
def test_maps_are_those_of_torch(name, width, channels, workers):
    torch = pytest.importorskip("torch")
    from tests.torch_networks import start_alike, theirs_of

    torch.manual_seed(0)
    net = getattr(cv.zoo, name)(classes=7, width=width, size=SIDE)
    theirs = theirs_of(net)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, channels, SIDE, SIDE)).astype("float32")
    theirs(torch.tensor(x))  # its layers find their channels, its running statistics are no longer 0 and 1
    theirs.eval()
    model = looked_into(net, channels, workers)
    start_alike(model, theirs)

    made = []
    last = [m for m in theirs.modules() if isinstance(m, torch.nn.Conv2d)][-1]
    last.register_forward_hook(lambda module, given, y: made.append(y))
    image, classes = torch.tensor(x, requires_grad=True), rng.integers(0, 7, 5)
    scores = theirs(image)[range(5), classes].sum()
    dx, dmaps = torch.autograd.grad(scores, [image, made[0]])
    cam = torch.relu((dmaps.mean((2, 3), keepdim=True) * made[0]).sum(1)).detach().numpy()
    for n in 5, 3:  # also a smaller batch than the planned one
        saliency, ours = look(model, x[:n], classes[:n])
        np.testing.assert_allclose(saliency, dx.abs().amax(1).numpy()[:n], rtol=1e-4, atol=1e-4 * float(dx.abs().max()))
        np.testing.assert_allclose(ours, cam[:n], rtol=1e-4, atol=1e-4 * cam.max())
        assert ours.max() > 0


def test_looking_changes_nothing_and_is_the_same_for_any_team_and_in_a_file(tmp_path):
    net = cv.zoo.lenet(7, width=6, size=SIDE)
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((5, 1, SIDE, SIDE)), rng.integers(0, 7, 5)
    one, two, plain = looked_into(net, 1, 1), looked_into(net, 1, 2), cv.Model(
        net, input_shape=(1, SIDE, SIDE), optimizer=cv.SGD(0.01), batch_size=5, seed=0
    )  # fmt: skip
    for _ in range(3):
        seen = [look(model, x, y) for model in (one, two)]
        assert all(np.array_equal(a, b) for a, b in zip(*seen))
        assert len({model.step(x, y) for model in (one, two, plain)}) == 1
    one.save(tmp_path / "model.calc")
    again = cv.load(tmp_path / "model.calc")
    assert all(np.array_equal(a, b) for a, b in zip(look(one, x, y), look(again, x, y)))


@pytest.mark.parametrize("how", [lambda g: g, copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))])
@pytest.mark.parametrize("accumulate", [False, True])
def test_gradients_of_anything_are_variables_that_operators_read(how, accumulate):
    """f = sum(square(x @ w) * s), where x is used twice: s = sum of x along rows."""
    rng = np.random.default_rng(2)
    x, w = rng.standard_normal((4, 3)), rng.standard_normal((3, 2))
    g = cv.CalcGraph()
    X, W = g.placeholder("x", (None, 3)), g.parameter("w", (3, 2), init=w)
    with g.path("learn", backward=True) as learn:
        H = X @ W
        F = cv.sum(cv.square(H) * cv.sum(X, axis=1, keepdims=True))
        dx, dh = cv.gradient(F, X), cv.gradient(F, H)
        cv.gradient(F, W).rename("dw")
        cv.sum(cv.square(dx)).rename("norm")
        learn.minimize(F, cv.SGD(0.1))
    with g.path("other"):
        (2 * dh).rename("doubled")
    model = cv.CalcHeap("1 MiB").create(
        cv.compile(how(g), batch_size=4, dtype="float64", accumulate=accumulate, keep=["dx", "dh"])
    )
    model["x"] = x
    model.forward("learn")
    model.forward("other")
    h, s = x @ w, x.sum(axis=1, keepdims=True)
    of_h = 2 * h * s
    of_x = of_h @ w.T + np.square(h).sum(axis=1, keepdims=True)
    for name, value in (
        ("dx", of_x),
        ("dw", x.T @ of_h),
        ("dh", of_h),
        ("norm", np.square(of_x).sum()),
        ("doubled", 2 * of_h),
    ):
        np.testing.assert_allclose(model[name], value, rtol=1e-12, err_msg=name)
    model.forward("learn")
    model.backward("learn")
    np.testing.assert_allclose(model.grad("w"), model["dw"], rtol=1e-12)


def test_what_has_no_gradient_is_refused():
    g = cv.CalcGraph()
    x, k, w = g.placeholder("x", (None, 3)), g.placeholder("k", (None,), "int64"), g.parameter("w", (3, 2))
    with g.path("first"):
        h = x @ w
        total = cv.sum(h)
    with g.path("learn", backward=True) as learn:
        with pytest.raises(cv.CalcError, match="'total' is not computed in path 'learn'"):
            cv.gradient(total, x)
        y = cv.tanh(h)
        one = cv.sum(cv.square(y))
        with pytest.raises(cv.ShapeError, match=r"gradient: tanh \(B, 2\) must have one element: take the sum"):
            cv.gradient(y, h)
        with pytest.raises(
            cv.CalcError, match="'sum_2' has no gradient with respect to 'x': in path 'learn' nothing leads"
        ):
            cv.gradient(one, x)  # it does so in another path
        with pytest.raises(
            cv.CalcError,
            match="with respect to 'x'.*; the derivative of a linear term is constant and its gradient 0: leave",
        ):
            cv.gradient(cv.sum(cv.gradient(cv.sum(3 * x), x)), x)
        with pytest.raises(cv.CalcError, match="has no gradient with respect to 'k'"):
            cv.gradient(cv.sum(cv.pick(y, k)), k)
        with pytest.raises(cv.CalcError, match="has no gradient with respect to 'tanh'"):
            cv.gradient(cv.sum(cv.sign(y)), y)
        with pytest.raises(cv.ShapeError, match=r"saliency: tanh \(B, 2\) must be images"):
            cv.saliency(y, k, y)
        steep = cv.sum(cv.abs(cv.gradient(cv.sum(cv.square(x @ w)), x)))
        learn.minimize(
            one + steep, cv.SGD(0.1)
        )  # which has one by operators: tests/equations/test_second_derivatives.py
    cv.plan(g, batch_size=2)


def test_what_goes_through_another_path_is_not_left_out():
    g = cv.CalcGraph()
    x, w = g.placeholder("x", (None, 3)), g.parameter("w", (3, 3))
    with g.path("features"):
        h = x @ w
        sign = cv.sign(h)
    with g.path("more"):
        u = cv.tanh(h)
        typed = cv.cast(h, "float64")
    with g.path("look"):
        for through in (h, u, typed):
            with pytest.raises(cv.CalcError, match=rf"goes through '{through.name}', a result of path '\w+', at which"):
                cv.gradient(cv.sum(cv.cast(through, None) * x), x)
        with pytest.raises(cv.CalcError, match="goes through 'u'"):
            cv.gradient(cv.sum(u * h), h)
        kept = [
            cv.gradient(cv.sum(y), v)
            for y, v in ((h * x, h), (cv.stop_gradient(h) * x, x), (sign * x, x), (cv.where(h > 0, x, 0.0), x))
        ]
    model = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=4, dtype="float64", keep=[d.name for d in kept]))
    model["x"] = values = np.random.default_rng(0).standard_normal((4, 3))
    for path in ("features", "more", "look"):
        model.forward(path)
    of_h = values @ model["w"]
    for d, want in zip(kept, (values, of_h, np.sign(of_h), of_h > 0)):
        np.testing.assert_allclose(model[d.name], want, rtol=1e-12)

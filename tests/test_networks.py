"""Networks for images, trained beside PyTorch with the same weights."""

from __future__ import annotations

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn

torch = pytest.importorskip("torch")
T = torch.nn

from tests.torch_networks import Branches, given, ordered, start_alike  # noqa: E402


def residual():
    ours = (
        nn.Conv2d(6, 3, padding=1, bias=False) >> nn.BatchNorm() >> nn.ReLU() >> nn.MaxPool2d(3, 2, 1)
        >> nn.Residual(
            nn.Conv2d(8, 3, stride=2, padding=1, bias=False) >> nn.BatchNorm() >> nn.ReLU()
            >> nn.Conv2d(8, 3, padding=1, bias=False) >> nn.BatchNorm(),
            nn.Conv2d(8, 1, stride=2, bias=False) >> nn.BatchNorm(),
        )
        >> nn.ReLU() >> nn.GlobalAvgPool() >> nn.Flatten() >> nn.Linear(4)
    )  # fmt: skip
    theirs = T.Sequential(
        T.Conv2d(3, 6, 3, padding=1, bias=False), T.BatchNorm2d(6), T.ReLU(), T.MaxPool2d(3, 2, 1),
        Branches(
            T.Sequential(T.Conv2d(6, 8, 3, 2, 1, bias=False), T.BatchNorm2d(8), T.ReLU(),
                         T.Conv2d(8, 8, 3, padding=1, bias=False), T.BatchNorm2d(8)),
            T.Sequential(T.Conv2d(6, 8, 1, 2, bias=False), T.BatchNorm2d(8)),
        ),
        T.ReLU(), T.AdaptiveAvgPool2d(1), T.Flatten(), T.Linear(8, 4),
    )  # fmt: skip
    return ours, theirs


def depthwise():
    """As in MobileNetV2, and a transposed convolution, instance normalization and joined branches as in a UNet."""
    ours = (
        nn.Conv2d(12, 1) >> nn.GroupNorm(3) >> nn.ReLU6()
        >> nn.Conv2d(12, 3, stride=2, padding=1, groups=12) >> nn.InstanceNorm() >> nn.LeakyReLU(0.1)
        >> nn.ConvTranspose2d(5, 2, stride=2)
        >> nn.Concat([nn.Conv2d(3, 3, padding=1) >> nn.SiLU(), nn.AvgPool2d(3, 1, 1)])
        >> nn.Flatten() >> nn.Linear(4)
    )  # fmt: skip
    theirs = T.Sequential(
        T.Conv2d(3, 12, 1), T.GroupNorm(3, 12), T.ReLU6(),
        T.Conv2d(12, 12, 3, 2, 1, groups=12), T.InstanceNorm2d(12, affine=True), T.LeakyReLU(0.1),
        T.ConvTranspose2d(12, 5, 2, 2),
        Branches(T.Sequential(T.Conv2d(5, 3, 3, padding=1), T.SiLU()), T.AvgPool2d(3, 1, 1), join=True),
        T.Flatten(), T.Linear(8 * 8 * 8, 4),
    )  # fmt: skip
    return ours, theirs


def train_alike(model, theirs, rate, x, y, loss, rel, **tolerance):
    """Steps by SGD: the losses, and then the parameters and running statistics."""
    optimizer = torch.optim.SGD(theirs.parameters(), rate)
    for one_x, one_y in zip(x, y):
        out = loss(theirs(torch.tensor(one_x)), torch.tensor(one_y))
        optimizer.zero_grad()
        out.backward()
        optimizer.step()
        assert model.step(one_x, one_y) == pytest.approx(out.item(), rel=rel)
    for name, value in zip(ordered(model), given(theirs), strict=True):
        found = model.parameters[name] if name in model.parameters else model.buffers[name]
        np.testing.assert_allclose(found, value, err_msg=name, **tolerance)


@pytest.mark.peers
@pytest.mark.parametrize("network", [residual, depthwise])
@pytest.mark.parametrize("settings", [{"workers": 1}, {"workers": 2}], ids=["1", "2"])
def test_training_is_that_of_torch(network, settings):
    torch.manual_seed(0)
    ours, theirs = network()
    theirs.double()
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((5, 6, 3, 8, 8)), rng.integers(0, 4, (5, 6))
    model = cv.Model(
        ours, input_shape=(3, 8, 8), loss="softmax_cross_entropy", optimizer=cv.SGD(0.05), batch_size=6, seed=0,
        dtype="float64", **settings,
    )  # fmt: skip
    start_alike(model, theirs)
    train_alike(model, theirs, 0.05, x, y, T.functional.cross_entropy, rel=1e-9, rtol=1e-7, atol=1e-9)
    theirs.eval()
    np.testing.assert_allclose(model.predict(x[0]), theirs(torch.tensor(x[0])).detach().numpy(), rtol=1e-8, atol=1e-9)


def test_layers_say_what_does_not_fit():
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 3, 6, 6))
    with g.path("learn", backward=True):
        for layer, text in (
            (nn.Residual(nn.Conv2d(4, 3)), r"the branch gives .*4, 4, 4.*, the input is x \(B, 3, 6, 6\)"),
            (nn.Concat(nn.Conv2d(4, 3), nn.Conv2d(4, 1)), "differ in more than their channels"),
            (nn.Conv2d(4, 3, groups=2), "3 channels of the input .* are not divisible by groups=2"),
            (nn.Conv1d(4, 3), r"is not \(N, channels, 1 sizes\)"),
            (nn.MaxPool2d(9), "window"),
        ):
            with pytest.raises(cv.ShapeError, match=text):
                layer.build(x, "layer", True)
    for make, text in (
        (lambda: nn.Conv2d(5, 3, groups=2), "5 channels are not divisible by groups=2"),
        (lambda: nn.Conv2d(5, (3, 3, 3)), "kernel"),
        (lambda: nn.Conv2d(5, 3, stride=0), "stride"),
        (lambda: nn.BatchNorm(momentum=2.0), "momentum"),
        (lambda: nn.Concat(), "at least one branch"),
        (lambda: nn.Concat([]), "at least one branch"),
    ):
        with pytest.raises(cv.CalcError, match=text):
            make()


@pytest.mark.parametrize("mode", ["constant", "reflect"])
def test_images_of_any_size_are_padded(mode):
    for shape, padding in (((16, 32, 32), 1), ((3, 64, 64), ((1, 1), (0, 0))), ((4, 300), 2)):
        net = nn.Pad(padding, mode) >> nn.GlobalAvgPool() >> nn.Flatten() >> nn.Linear(2)
        g = cv.build_graph(net, shape, "softmax_cross_entropy", cv.SGD(0.1))
        assert cv.compile(g, batch_size=64).batch_size == 64


def test_a_layer_without_build_and_one_without_parameters_twice():
    class Nothing(nn.Layer):
        pass

    with pytest.raises(cv.CalcError, match=r"Nothing has no method build\(self, x, scope, training\)"):
        cv.build_graph(nn.Sequential(Nothing()), (3,), "mse", cv.SGD(0.1))
    twice = nn.LocalResponseNorm(2)
    assert len([*(twice >> nn.ReLU() >> twice)]) == 3


def test_running_statistics_follow_every_round():
    """Of a learning batch of several rounds: as of as many batches."""
    x = np.random.default_rng(0).standard_normal((8, 3, 4, 4)).astype(np.float32)
    net = nn.Conv2d(4, 3) >> nn.BatchNorm(momentum=0.5) >> nn.Flatten() >> nn.Linear(2)
    model = cv.Model(
        net, input_shape=(3, 4, 4), loss="softmax_cross_entropy", optimizer=cv.SGD(0.0), batch_size=4, learning_batch=8,
        seed=0,
    )  # fmt: skip
    w, b = (model.parameters[f"conv2d_1.{n}"] for n in ("weight", "bias"))
    made = torch.nn.functional.conv2d(torch.tensor(x), torch.tensor(w), torch.tensor(b)).numpy()
    model.fit(x, np.zeros(8, int), epochs=1, shuffle=False)
    mean = np.zeros(4)
    for part in made[:4], made[4:]:
        mean = 0.5 * mean + 0.5 * part.mean((0, 2, 3))
    np.testing.assert_allclose(model.buffers["batchnorm_1.running_mean"], mean, rtol=1e-5, atol=1e-6)

"""The networks of the zoo: as large as published, and beside PyTorch with copied weights at reduced size."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

import calcvm as cv
from calcvm import zoo
from calcvm.graph import CalcGraph

# parameters as published: by the authors, Caffe's models (LeNet, AlexNet in groups, GoogLeNet) or torchvision
PARAMETERS = {
    "lenet": 431_080, "alexnet": 60_965_224, "googlenet": 6_998_552, "vgg11": 132_863_336, "vgg16": 138_357_544,
    "vgg19": 143_667_240, "resnet18": 11_689_512, "resnet34": 21_797_672, "resnet50": 25_557_032,
    "mobilenet_v2": 3_504_872, "overfeat": 145_920_872,
}  # fmt: skip
# width, size of images that they are trained at here, channels of these
REDUCED = {
    "lenet": (4, 16, 1), "alexnet": (6, 63, 3), "overfeat": (4, 71, 3), "vgg11": (4, 32, 3), "vgg16": (4, 32, 3),
    "vgg19": (4, 32, 3), "googlenet": (4, 32, 3), "resnet18": (4, 32, 3), "resnet34": (4, 16, 3),
    "resnet50": (4, 64, 3), "mobilenet_v2": (4, 32, 3), "unet": (3, 32, 2),
}  # fmt: skip
SAMPLE = ("lenet", "alexnet", "googlenet", "resnet18", "unet")


@pytest.mark.parametrize("name", PARAMETERS)
def test_it_is_as_large_as_published(name):
    net, size = getattr(zoo, name)(), {"lenet": 28, "overfeat": 231}.get(name, 224)
    g = CalcGraph()
    x = g.placeholder("x", (None, 1 if name == "lenet" else 3, size, size))
    with g.path("predict"):
        y = net.build(x, training=False)
    assert y.shape[-1].b == (10 if name == "lenet" else 1000)
    assert sum(prod(n.b for n in v.shape) for v in g.variables.values() if v.kind == "parameter") == PARAMETERS[name]


@pytest.mark.peers
@pytest.mark.parametrize("name", REDUCED)
def test_it_trains_as_torchs(name, whole):
    if name not in SAMPLE and not whole:
        pytest.skip("takes --whole")
    torch = pytest.importorskip("torch")
    from tests.test_networks import train_alike
    from tests.torch_networks import start_alike, theirs_of, without_dropout

    torch.manual_seed(0)
    width, size, channels = REDUCED[name]
    net = without_dropout(getattr(zoo, name)(classes=5, width=width, size=size))
    theirs = theirs_of(net).double()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 4, channels, size, size))
    theirs.eval()(torch.tensor(x[0]))
    theirs.train()
    y = rng.integers(0, 5, (5, 4)) if name != "unet" else rng.standard_normal((5, 4, 5, size, size))
    loss = "mse" if name == "unet" else "softmax_cross_entropy"
    model = cv.Model(
        net, input_shape=(channels, size, size), loss=loss, optimizer=cv.SGD(0.01), batch_size=4, dtype="float64",
        workers=2,
    )  # fmt: skip
    start_alike(model, theirs)
    theirs.eval()
    expected = theirs(torch.tensor(x[0])).detach().numpy()
    np.testing.assert_allclose(model.predict(x[0]), expected, rtol=1e-6, atol=1e-9)
    theirs.train()
    of = torch.nn.functional.mse_loss if name == "unet" else torch.nn.functional.cross_entropy
    train_alike(model, theirs, 0.01, x, y, of, rel=1e-6, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", zoo.IMAGES)
def test_what_does_not_fit_is_refused(name):
    for given in {"size": 7}, {"size": "28"}, {"width": 0}, {"classes": 2.5}:
        with pytest.raises(cv.CalcError, match=f"zoo.{name}: {[*given][0]} must be an integer"):
            getattr(zoo, name)(**given)

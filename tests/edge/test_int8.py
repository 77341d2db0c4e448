"""Networks in int8 on other processors: the bits of the host, in fewer bytes and instructions."""

import importlib.util
import sys

import numpy as np
import pytest

import calcvm as cv
from tests.conftest import by_turns
from tests.edge.test_packs import EMULATED, Device, model_of, network
from tests.test_quantization import images, lenet

SHAPES = {"network": (4,), "wide": (64,), "lenet": (1, 8, 8), "images": (2, 8, 8)}


def made(kind, seed=2):
    """A model in floats, one in int8, and data."""
    net = {"network": network, "wide": lambda: network((64, 64, 10)), "lenet": lenet, "images": lambda: images(seed)}[
        kind
    ]()
    model = model_of(net, SHAPES[kind])
    X = np.random.default_rng(0).normal(size=(40, *SHAPES[kind])).astype("float32")
    model.fit(X, np.arange(40) % 3, epochs=2, progress=False)
    return model, cv.quantize(model, X), X


def instructions(device, X):
    """Predict a few samples; the results, and the instructions of the last."""
    found = []
    for x in X:
        assert device("predict", input=x.ravel()) == 0
        found.append(device["output"])
    return np.array(found), device.machine.count


def pytest_generate_tests(metafunc):
    if metafunc.function is test_a_device_predicts_with_the_bits_of_the_host:
        by_turns(metafunc, 4, kind=list(SHAPES), target=EMULATED)


def test_a_device_predicts_with_the_bits_of_the_host(kind, target, tmp_path):
    _, small, X = made(kind)
    device = Device(small, target, tmp_path, batch_size=1, paths=["predict"])
    assert instructions(device, X[:3])[0].tobytes() == small.predict(X[:3]).tobytes()


@pytest.mark.parametrize("kind, target", [("network", "esp32"), ("lenet", "cortex-m4f")])
def test_c_has_the_bits_of_the_host(kind, target, tmp_path):
    _, small, X = made(kind)
    device = Device(small, target, tmp_path, batch_size=1, paths=["predict"], format="c")
    for x, want in zip(X[:3], small.predict(X[:3])):
        assert device("predict", input=x.ravel()) == 0
        assert device["output"].tobytes() == want.tobytes()


def test_a_package_has_the_bits_of_the_host(tmp_path):
    pytest.importorskip("ziglang")
    _, small, X = made("lenet")
    small.export(tmp_path / "seen", "linux-x86_64", batch_size=1, format="python")
    spec = importlib.util.spec_from_file_location("seen", tmp_path / "seen" / "__init__.py")
    sys.modules["seen"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    got = np.concatenate([module.Model().predict(x[None]) for x in X])
    assert got.tobytes() == small.predict(X).tobytes()


@pytest.mark.parametrize(
    "kind, target, instructions_most, flash_most",
    [
        ("network", "pico", 0.25, 1.3),
        ("wide", "pico", 0.12, 0.35),
        ("lenet", "pico", 0.12, 0.35),
        ("lenet", "cortex-m4f", 0.55, 0.4),
        ("wide", "cortex-m4f", 0.85, 0.35),
    ],
)
def test_it_takes_less(kind, target, instructions_most, flash_most, tmp_path):
    """Beside floats, without what the processor's floats take of flash on a Pico."""
    model, small, X = made(kind)
    found = []
    for name, of in (("floats", model), ("ints", small)):
        (tmp_path / name).mkdir()
        device = Device(of, target, tmp_path / name, batch_size=1, paths=["predict"])
        found.append((instructions(device, X[:1])[1], device.pack.flash))
    (floats, flash), (ints, flash_ints) = found
    assert ints <= instructions_most * floats and flash_ints <= flash_most * flash, found

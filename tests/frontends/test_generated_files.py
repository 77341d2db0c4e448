"""Random modules of PyTorch as files of ONNX: beside PyTorch and ONNX Runtime in float64, and two steps of SGD."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator

import calcvm as cv
from tests.conftest import whole_of
from tests.frontends.files import exported
from tests.frontends.test_generated import BATCH, Random

CASES, SAMPLE = 500, 20
MOST = 40  # files that are asked whether they take any batch
RATE = 0.01


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(CASES if whole_of(metafunc) else SAMPLE))


def model_of(net, shape, batch):
    g = cv.CalcGraph()
    given = net.inputs["x0"][0]
    x, t = g.placeholder("x0", given), g.placeholder("t", (*(given[:1] if None in given else shape[:1]), *shape[1:]))
    with g.path("learn", backward=True) as learn:
        learn.minimize(cv.mse(net.call(x, training=True)[0], t), cv.SGD(RATE))
    with g.path("predict") as predict:
        predict.output = net.call(x, training=False)[0]
    return cv.Model(g, batch_size=batch, dtype="float64", seed=0)


def model_with_any_batch(file, shape):
    """The model, or None where the exporter has written the batch of its example as a number."""
    try:
        model = model_of(cv.load_onnx(file), shape, BATCH)
    except (cv.UnsupportedOperator, cv.ShapeError) as error:
        assert "batch" in str(error) or "B" in str(error)
        return None
    return model


def test_a_random_module_as_a_file(seed):
    module = Random(seed)
    try:
        file = exported(module, (module.example,), [0], "training")
    except torch.onnx.errors.OnnxExporterError as error:
        assert "rms_norm" in str(error) or "not supported" in str(error)
        return
    with torch.no_grad():  # now: the exporter runs batch normalization in training
        wanted = module.eval()(module.example)
    X = module.example.numpy()
    model, fixed = model_with_any_batch(file, wanted.shape), False
    if model is None:
        net, fixed = cv.load_onnx(file, sizes={"x0": X.shape}, batch_axes=[None]), True
        model = model_of(net, wanted.shape, BATCH)
    reference = ReferenceEvaluator(onnx.load_from_string(exported(module.eval(), (module.example,), [0], "script")))
    evaluated = reference.run(None, {"x0": X})[0]
    if abs(evaluated - wanted.numpy()).max() > 1e-6:  # the exporter rolls wrongly by more than the size
        assert "flip" in module.told
        evaluation = cv.load_onnx(
            exported(module.eval(), (module.example,), [0], "script"), sizes={"x0": X.shape}, batch_axes=[None]
        )
        found = cv.Model(evaluation, batch_size=1, dtype="float64").run({"x0": X})
        np.testing.assert_allclose([*found.values()][0], evaluated, rtol=1e-7, atol=1e-8)
        return
    found = model.run({"x0": X})
    np.testing.assert_allclose([*found.values()][0], wanted, rtol=1e-7, atol=1e-8, err_msg=str(module.told))
    if not fixed:
        one = module.eval()(module.example[:1]).detach()
        np.testing.assert_allclose(model.predict(X[:1]), one, rtol=1e-7, atol=1e-8)
    target = torch.from_numpy(np.random.default_rng(seed).standard_normal(wanted.shape))
    optimizer = torch.optim.SGD(module.train().parameters(), RATE)
    for _ in range(2):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(module(module.example), target)
        loss.backward()
        optimizer.step()
        assert model.step(X, target.numpy()) == pytest.approx(loss.item(), rel=1e-7, abs=1e-9), module.told
    names = dict(module.named_parameters())
    state = {name: array for name, array in model.state_dict().items() if name in names}
    for name, array in state.items():
        np.testing.assert_allclose(array, names[name].detach(), rtol=1e-6, atol=1e-8)


def test_most_files_take_any_batch():
    """Of all, those alone do not in which the exporter has written the batch as a number."""
    fixed = 0
    for seed in range(MOST):
        module = Random(seed)
        file = exported(module, (module.example,), [0], "training")
        with torch.no_grad():
            shape = module.eval()(module.example).shape
        fixed += model_with_any_batch(file, shape) is None
    assert fixed <= MOST // 8

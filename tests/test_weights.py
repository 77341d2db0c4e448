"""Weights of samples: of one they change nothing, of zero a sample is none, of any loss and any number."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.model.networks import LOSSES

DTYPES = ("float32", "float64")
LOGITS = (
    0.0,
    -0.0,
    1e-30,
    0.3,
    1.0,
    2.0,
    17.5,
    88.8,
    104.0,
    710.0,
    1e5,
    1.7e7,
    3e7,
    1e10,
    1.5e19,
    1e30,
    np.inf,
    np.nan,
)


class Bias(nn.Layer):
    """x + b: the gradient of b is that of the loss by its output, of one sample."""

    def build(self, x, scope, training):
        known = x.graph.variables.get("b")
        return x + (known or x.graph.parameter("b", tuple(s.b for s in x.shape[1:]), init="zeros"))


def own_mse(output, target):
    return cv.square(output - target)


class Loss:
    """A loss of one batch, with its gradient by the output summed over the samples."""

    def __init__(self, loss, dtype, shape, *, weighted, batch=1, device="cpu", dense=False):
        self.weighted, self.shape = weighted, shape
        loss = loss if isinstance(loss, str) or weighted else lambda o, t: cv.mean(own_mse(o, t))
        options = {"target_shape": shape} if dense else {}
        self.model = cv.Model(
            Bias(), input_shape=shape, loss=loss, optimizer=cv.SGD(0.0), batch_size=batch, sample_weight=weighted, dtype=dtype,
            device=device, **options,
        )  # fmt: skip

    def __call__(self, x, t, weights=None):
        self.model.parameters["b"][:] = 0  # a rate of 0 times an infinite gradient is NaN
        if self.weighted:
            loss = self.model.step(x, t, np.ones(len(x)) if weights is None else weights)
        else:
            loss = self.model.step(x, t)
        return loss, self.model.grad("b").reshape(-1).copy()


def values(dtype):
    numbers = [x for x in LOGITS if not np.isfinite(x) or x < np.finfo(dtype).max]
    return [*dict.fromkeys([*numbers, *(-x for x in numbers)])]


def same(dtype, found, wanted, case):
    """Of one form but for the order of a sum."""
    (loss, gradient), (right, slope) = found, wanted
    near = dict(rtol=20 * np.finfo(dtype).eps, atol=0, equal_nan=True)
    assert np.isclose(loss, right, **near), (case, loss, right)
    scale = np.abs(slope[np.isfinite(slope)]).max(initial=0)
    near["atol"] = 20 * np.finfo(dtype).eps * scale
    assert np.isclose(gradient, slope, **near).all(), (case, gradient, slope)


def cases(loss, dtype, dense, rng, n):
    """Samples of two outputs and their targets: all pairs of special numbers, or so many of them."""
    numbers = values(dtype)
    pairs = [*itertools.product(numbers, numbers)]
    chosen = pairs if n is None else [pairs[i] for i in rng.choice(len(pairs), n, replace=False)]
    for a, b in chosen:
        if loss == "softmax_cross_entropy" and not dense:
            for label in (0, 1):
                yield np.array([[a, b]]), np.array([label])
        elif loss in ("softmax_cross_entropy", "binary_cross_entropy"):
            p = rng.choice([0.0, 1.0, 0.25, 1e-30])
            yield np.array([[a, b]]), np.array([[p, 1 - p]])
        else:
            yield np.array([[a, rng.standard_normal()]]), np.array([[b, 0.5]])


KINDS = [(loss, False) for loss in LOSSES] + [("softmax_cross_entropy", True), (own_mse, False)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss, dense", KINDS, ids=lambda v: getattr(v, "__name__", str(v)))
def test_weights_of_one_change_nothing(loss, dense, dtype, whole):
    """Of any loss, forward and backward: also of numbers that overflow, of infinities and NaN."""
    rng, counted = np.random.default_rng(0), 0
    plain, ones = (Loss(loss, dtype, (2,), weighted=w, dense=dense) for w in (False, True))
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for x, t in cases(loss, dtype, dense, rng, None if whole else 150):
            same(dtype, ones(x, t), plain(x, t), (x, t))
            counted += 1
    assert counted >= 150


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss", LOSSES)
def test_weights_of_one_train_to_the_same_numbers(loss, dtype, whole):
    """To the same bits, in rounds too; of scores of classes to rounding, 16 eps after some steps."""
    rng = np.random.default_rng(1)
    for n, batch, learning in ((29, 5, None), (29, 3, 14), (65, 32, 65), (257, 32, 96))[: None if whole else 3]:
        X, labels = rng.standard_normal((n, 4)), loss == "softmax_cross_entropy"
        y = rng.integers(0, 3, n) if labels else rng.random((n, 3))
        found = []
        for given in ({}, {"sample_weight": np.ones(n)}):
            model = cv.Model(
                nn.Linear(3), input_shape=(4,), loss=loss, optimizer=cv.SGD(0.1), batch_size=batch, learning_batch=learning,
                seed=0, sample_weight=bool(given), dtype=dtype,
            )  # fmt: skip
            model.fit(X, y, epochs=3, progress=False, **given)
            found.append(model.get_weights())
        for name, plain in found[0].items():
            if labels:
                np.testing.assert_allclose(found[1][name], plain, rtol=0, atol=16 * np.finfo(dtype).eps)
            else:
                assert np.array_equal(found[1][name], plain), (loss, n, batch, learning, name)


BAD = (np.inf, -np.inf, np.nan, 1e300, -1e30)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss", [*LOSSES, own_mse], ids=lambda v: getattr(v, "__name__", v))
def test_a_sample_of_weight_zero_is_none_whatever_it_is(loss, dtype):
    """Also where its loss or its slope is infinite or NaN; a function's slope is then times 0."""
    one, two = (Loss(loss, dtype, (2,), weighted=True, batch=n) for n in (1, 2))
    labels = loss == "softmax_cross_entropy"
    x, t = np.array([[0.3, -1.2]]), np.array([1]) if labels else np.array([[1.0, 0.25]])
    loss_of_one, gradient = one(x, t)
    for bad, where in itertools.product(BAD, "x" if labels or loss == "binary_cross_entropy" else "xt"):
        data = {"x": np.repeat(x, 2, 0), "t": np.repeat(t, 2, 0)}
        data[where][1, 0] = bad
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found, slope = two(data["x"], data["t"], np.array([2.0, 0.0]))
        np.testing.assert_allclose(found, loss_of_one, rtol=1e-6, err_msg=f"{where} {bad}")
        if loss is not own_mse:
            np.testing.assert_allclose(slope, gradient, rtol=1e-6, err_msg=f"{where} {bad}")


def test_images_and_labels_a_pixel_have_weights_of_samples():
    rng = np.random.default_rng(0)
    X, T = rng.standard_normal((4, 1, 5, 6)), rng.integers(0, 3, (4, 3, 4))
    found = []
    for weighted, n in ((False, 3), (True, 4)):
        model = cv.Model(
            nn.Conv2d(3, 3),
            input_shape=(1, 5, 6),
            optimizer=cv.SGD(0.0),
            batch_size=n,
            sample_weight=weighted,
            dtype="float64",
        )
        weights = ([1.0, 1.0, 1.0, 0.0],) if weighted else ()
        loss = model.step(X[:n], T[:n], *weights)
        found.append((loss * n, *(model.grad(name) * n for name in model.parameters)))
    for plain, ones in zip(*found):
        np.testing.assert_allclose(ones, plain, rtol=1e-12)

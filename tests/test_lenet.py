"""LeNet on scikit-learn's digits, as `calcvm demo --network lenet` trains it: the same bits for any team, and in half the memory."""

from __future__ import annotations

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.data import digits, train_test_split

pytest.importorskip("sklearn")
ENOUGH, EPOCHS = 0.985, 30


def lenet(optimizer: cv.Optimizer, **options) -> cv.Model:
    larger = nn.Scale(1 / 16) >> nn.Upsample(size=(16, 16), mode="linear")
    return cv.Model(
        cv.zoo.lenet(10, size=16), input_shape=(1, 8, 8), preprocess=larger, optimizer=optimizer, seed=0, **options
    )


@pytest.fixture(scope="module")
def scans() -> tuple[np.ndarray, ...]:
    X, y = digits()
    return train_test_split(X.reshape(-1, 1, 8, 8), y, 0.2)


def alike(one: cv.Model, other: cv.Model) -> bool:
    weights = other.get_weights()
    return all(np.array_equal(w, weights[name]) for name, w in one.get_weights().items())


def trained(scans, rate: float, whole: bool, **options) -> cv.Model:
    """By one worker and by two, to the same bits; as it is run whole, to the accuracy that is asked for."""
    models = [lenet(cv.Adam(rate), workers=workers, **options) for workers in (1, 2)]
    for model in models:
        model.fit(*scans[:2], epochs=EPOCHS if whole else 2, progress=False)
    assert alike(*models)
    assert not whole or models[0].evaluate(*scans[2:])["accuracy"] >= ENOUGH
    return models[0]


@pytest.mark.slow
def test_it_learns_to_the_same_bits_by_one_worker_and_by_two(scans, whole):
    trained(scans, 1e-3, whole, batch_size=32)


@pytest.mark.slow
def test_it_learns_in_half_the_memory_by_rounds(scans, whole):
    """A learning batch in rounds: to the same bits for any team, to other roundings than at once."""
    rounds = {"batch_size": 64, "learning_batch": 256}
    assert trained(scans, 4e-3, whole, **rounds).heap.nbytes <= lenet(cv.Adam(4e-3), batch_size=256).heap.nbytes // 2
    x, y = (a[:256] for a in scans[:2])
    at_once, in_rounds = lenet(cv.SGD(0.1), batch_size=256), lenet(cv.SGD(0.1), **rounds)
    start = at_once.get_weights()
    for each in (at_once, in_rounds):
        each.fit(x, y, shuffle=False, progress=False)
    for name, w in at_once.get_weights().items():
        step, other = w - start[name], in_rounds.get_weights()[name] - start[name]
        np.testing.assert_allclose(other, step, rtol=0, atol=2e-6 * np.abs(step).max() + 1e-7, err_msg=name)

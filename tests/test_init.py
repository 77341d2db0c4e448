"""Initializers: their statistics, fans and orthogonality."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from calcvm import init
from calcvm.errors import CalcError

N = (400, 500)


def draw(initializer, shape=N, seed=0):
    x = initializer(shape, np.random.default_rng(seed))
    assert x.shape == shape and x.dtype == np.float64
    return x


def test_constants():
    assert (draw(init.Zeros()) == 0).all()
    assert (draw(init.Ones()) == 1).all()
    assert (draw(init.Constant(0.3)) == 0.3).all()
    assert draw(init.Constant(2), ()) == 2


@pytest.mark.parametrize(
    ("initializer", "mean", "std"),
    [
        (init.Uniform(0.1, 0.9), 0.5, 0.8 / np.sqrt(12)),
        (init.Normal(1.0, 0.2), 1.0, 0.2),
        (init.TruncatedNormal(0.0, 1.0), 0.0, 0.8796),  # of a standard normal cut at 2
        (init.XavierUniform(), 0.0, np.sqrt(2 / 900)),
        (init.XavierNormal(gain=2), 0.0, 2 * np.sqrt(2 / 900)),
        (init.HeUniform(), 0.0, np.sqrt(2 / 400)),
        (init.HeNormal(gain=1), 0.0, np.sqrt(1 / 400)),
    ],
    ids=lambda v: type(v).__name__,
)
def test_mean_and_deviation(initializer, mean, std):
    x = draw(initializer)  # 200 000 values: the deviation's own error is 0.16 %
    assert abs(x.mean() - mean) < 0.01 * std
    assert abs(x.std() / std - 1) < 0.01
    assert (draw(initializer, seed=1) != x).any()
    np.testing.assert_array_equal(draw(initializer), x)


def test_ranges():
    x = draw(init.Uniform(0.1, 0.9))
    assert 0.1 <= x.min() < 0.101 and 0.899 < x.max() < 0.9
    assert 1.99 < np.abs(draw(init.TruncatedNormal(0.0, 1.0))).max() <= 2
    assert np.abs(draw(init.XavierUniform())).max() == pytest.approx(np.sqrt(6 / 900), rel=1e-3)
    assert np.abs(draw(init.HeUniform())).max() == pytest.approx(np.sqrt(6 / 400), rel=1e-3)


def test_fans_of_stored_layouts():
    assert init.fans((784, 64)) == (784, 64)
    assert init.fans((3, 3, 16, 32)) == (144, 288)
    assert init.fans((7,)) == (7, 7)
    assert init.fans(()) == (1, 1)


def test_fan_matches_torch():
    torch = pytest.importorskip("torch")
    w = torch.empty(32, 16, 3, 3)  # torch stores (out, in, field)
    assert init.fans((3, 3, 16, 32)) == torch.nn.init._calculate_fan_in_and_fan_out(w)


@pytest.mark.parametrize("shape", [(5, 5), (8, 3), (3, 8), (3, 2, 4), (1, 6)])
def test_orthogonal(shape):
    q = draw(init.Orthogonal(gain=2.0), shape).reshape(-1, shape[-1]) / 2
    gram = q.T @ q if q.shape[0] >= q.shape[1] else q @ q.T
    np.testing.assert_allclose(gram, np.eye(len(gram)), atol=1e-12)


def test_orthogonal_is_uniform():
    """Without the sign of R's diagonal the corner of Q would be of one sign."""
    rng = np.random.default_rng(0)
    corner = [init.Orthogonal()((2, 2), rng)[0, 0] for _ in range(400)]
    assert 140 < sum(c > 0 for c in corner) < 260


def test_empty():
    assert init.XavierNormal()((0, 3), np.random.default_rng(0)).shape == (0, 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: init.Uniform(1.0, 0.0),
        lambda: init.Normal(0.0, -1.0),
        lambda: init.HeNormal(gain=-1.0),
        lambda: init.Uniform(float("nan"), 1.0),
        lambda: init.Orthogonal()((3,), np.random.default_rng(0)),
    ],
)
def test_bad_values(make):
    with pytest.raises(CalcError):
        make()


@pytest.mark.parametrize("make", [lambda: init.Uniform(0.0, -0.0), lambda: init.XavierUniform(-0.0),
                                  lambda: init.HeUniform(gain=-0.0), lambda: init.Normal(0.0, -0.0)])  # fmt: skip
def test_a_negative_zero_is_a_zero(make):
    """As an altered file had one: NumPy refuses bounds and deviations whose sign bit is set."""
    assert not make()((3, 2), np.random.default_rng(0)).any()


@pytest.mark.parametrize(
    "made", [init.Normal(0.1, 2), init.Uniform(-1, 2), init.HeNormal(), init.XavierUniform(), init.Ones()]
)
@pytest.mark.parametrize("shape", [(), (5,), (0, 3), (300_000,), (3, 100_000), (7, 5, 300, 200), (2, 70_000, 1, 3)])
def test_blocks_draw_what_is_drawn_at_once(made, shape):
    found = np.empty(shape[::-1], np.float32).T
    tracemalloc.start()
    made.fill(found, np.random.default_rng(0))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 9 * init.BLOCK + 50_000
    np.testing.assert_array_equal(found, made(shape, np.random.default_rng(0)).astype(np.float32))

"""The device blas: the same training through SciPy's BLAS."""

import sys

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("batch", [1, 33])
def test_blas_trains_as_cpu_does(dtype, batch):
    pytest.importorskip("scipy")
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((batch, 20)), rng.integers(0, 5, batch)
    losses = []
    for device in ("cpu", "blas"):
        net = nn.Linear(40) >> nn.Tanh() >> nn.Linear(17) >> nn.ReLU() >> nn.Linear(5)
        model = cv.Model(net, input_shape=(20,), optimizer=cv.Adam(0.01), batch_size=batch, dtype=dtype, device=device)
        losses.append([model.step(X, y) for _ in range(20)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4 if dtype == "float32" else 1e-10)
    from calcvm.kernels_cpu._common import KERNELS

    assert KERNELS["linear_fwd"].address(dtype, "blas") != KERNELS["linear_fwd"].address(dtype)


def test_blas_matmul_in_every_layout():
    pytest.importorskip("scipy")
    rng = np.random.default_rng(0)
    for ta in (False, True):
        for tb in (False, True):
            g = cv.CalcGraph()
            a = g.placeholder("a", (None, *((4, 3) if ta else (3, 4))))
            b = g.parameter("b", (5, 4) if tb else (4, 5))
            with g.path("run"):
                y = cv.matmul(a, b, transpose_a=ta, transpose_b=tb)  # noqa: F841
            model = cv.CalcHeap("1 MiB").load(cv.compile(g, batch_size=6, dtype="float64", device="blas"))
            x = rng.standard_normal((6, *((4, 3) if ta else (3, 4))))
            model["a"] = x
            model.forward("run")
            left = x.swapaxes(1, 2) if ta else x
            np.testing.assert_allclose(model["y"], left @ (model["b"].T if tb else model["b"]), rtol=1e-12)


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.linalg.cython_blas", None)
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(cv.MissingExtra, match=r"calcvm\[blas\]"):
        cv.Model(nn.Linear(2), input_shape=(2,), optimizer=cv.Adam(), batch_size=1, device="blas")


def test_unknown_devices_and_teams_are_refused():
    for options, message in (({"device": "tpu"}, "tpu"), ({"device": "blas", "workers": 2}, "workers=1")):
        with pytest.raises(cv.CalcError, match=message):
            cv.Model(nn.Linear(2), input_shape=(2,), optimizer=cv.Adam(), batch_size=1, **options)

"""Convolutions by CUDA kernels in the simulator: sums of several blocks, narrow groups, strides, bits of any team."""

from __future__ import annotations

import numpy as np

from calcvm.kernels_cuda import _tensor
from calcvm.ops import OPS
from calcvm.ops.spec import Example
from tests import rowrun
from tests.conftest import whole_of
from tests.cuda.simulated import Simulated
from tests.rowrun import Case, same_bits

TEAMS = ((4, 2), (16, 1), (4, 3))  # threads, workers
EXAMPLES = {
    "many summands": Example(shapes=((1, 4, 2, 60), (3, 3, 60, 2), (2,)), attrs={"padding": (1, 1, 1, 1)}),
    "many pixels": Example(shapes=((1, 700, 2), (3, 2, 3), (3,)), attrs={"padding": (1, 1)}),
    "narrow groups": Example(shapes=((1, 540, 6), (3, 2, 9), (9,)), attrs={"groups": 3, "stride": (1,)}),
    "wide groups": Example(shapes=((1, 5, 4, 8), (2, 2, 4, 16), (16,)), attrs={"groups": 2, "stride": (2, 1)}),
    "beside": Example(
        shapes=((2, 3, 2, 4), (3, 2, 4, 4)), attrs={"padding": (7, 0, 6, 3), "stride": (3, 5), "dilation": (2, 1)}
    ),
    "long strides": Example(shapes=((2, 9, 7, 4), (2, 1, 4, 4)), attrs={"stride": (4, 2**31), "dilation": (3, 2**31)}),
}


def all_values(case, workers, **words):
    case.words |= words
    values = case.forward(n_workers=workers)
    return values | case.backward(values | case.output_gradients(), n_workers=workers)


def pytest_generate_tests(metafunc):
    """Of the products of tensor cores a sample, with --whole all."""
    if "precision" in metafunc.fixturenames:
        tf32 = EXAMPLES if whole_of(metafunc) else ["wide groups", "long strides"]
        metafunc.parametrize(("of", "precision"), [(e, "float32") for e in EXAMPLES] + [(e, "tf32") for e in tf32])


def test_convolution(of, precision, monkeypatch):
    """Values by the definition, and the same bits by any team, with scratch for partial sums and without."""
    example = EXAMPLES[of]

    def case():
        return Case(OPS["conv"], example, "float32", 1)

    monkeypatch.setattr(rowrun, "backend", Simulated(4))
    monkeypatch.setattr(_tensor, "precision", precision)
    if precision == "float32":
        rowrun.check_forward(case())
        rowrun.check_gradients_float32(case())
    want = all_values(case(), 1)
    for threads, workers in TEAMS:
        monkeypatch.setattr(rowrun, "backend", Simulated(threads))
        for words in ({}, {"wn": 0}) if workers == 3 else ({},):
            found = all_values(case(), workers, **words)
            for name, x in want.items():
                assert same_bits(found[name], x), f"{name} differs with {workers} workers of {threads} threads, {words}"


def test_a_transposed_sum_of_many(monkeypatch):
    """Of the gradients of weights and of biases, which are sums over different pixels, some are in parts."""
    example = Example(shapes=((1, 300, 3), (2, 2, 3), (2,)), attrs={"stride": (2,)})
    monkeypatch.setattr(rowrun, "backend", Simulated(4))
    case = Case(OPS["conv_transpose"], example, "float32", 1)
    rowrun.check_gradients_float32(case)
    want = all_values(case, 1)
    assert np.isfinite(want["db"]).all()
    for threads, workers in TEAMS:
        monkeypatch.setattr(rowrun, "backend", Simulated(threads))
        found = all_values(Case(OPS["conv_transpose"], example, "float32", 1), workers)
        assert all(same_bits(found[name], x) for name, x in want.items())

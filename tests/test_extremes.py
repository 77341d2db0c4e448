"""Numbers at the ends of their range, by the CPU's kernels: special values, confident logits, extreme magnitudes."""

from __future__ import annotations

import numpy as np
import pytest

from calcvm.ops.epilogues import ACTIVATIONS
from tests import extremes

DTYPES = ("float32", "float64")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS[1:])
def test_fused_activations_have_the_bits_of_those_alone(name: str, dtype: str) -> None:
    extremes.check_fused(name, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_binary_cross_entropy_is_exact_however_confident(dtype: str) -> None:
    extremes.check_binary_cross_entropy(dtype, bound=4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_binary_cross_entropy_of_infinite_logits(dtype: str) -> None:
    extremes.check_binary_cross_entropy_of_infinities(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", extremes.POWERS)
def test_pow_is_within_2_ulp_over_the_whole_range(exponent: float, dtype: str) -> None:
    extremes.check_pow(dtype, exponent, bound=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", extremes.POWERS)
def test_pow_of_special_values(exponent: float, dtype: str) -> None:
    extremes.check_special_powers(dtype, exponent)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_slope_of_elu_is_off_by_no_more_than_its_output(dtype: str) -> None:
    """It is y + alpha: right to half an ulp of alpha, and so 0 where y is rounded to -alpha."""
    x = np.linspace(-40, 0, 500).astype(dtype)
    case = extremes.unary("elu", dtype, x, {"alpha": 0.7})
    slope = case.backward(case.forward() | {"dy": np.ones(x.size, dtype)})["dx"]
    assert np.abs(slope - 0.7 * np.exp(extremes.exact(x))).max() <= 2 * np.finfo(dtype).eps * 0.7

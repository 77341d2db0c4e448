"""Numbers at the ends of their range, by the CPU's kernels: special values, confident logits, extreme magnitudes."""

from __future__ import annotations

import pytest

from calcvm.ops import OPS
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
@pytest.mark.parametrize("name", extremes.UNARY)
def test_values_and_slopes_of_any_magnitude(name: str, dtype: str) -> None:
    assert extremes.check_unary(name, dtype) > 400


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "maximum", "minimum"])
def test_pairs_of_special_values(name: str, dtype: str) -> None:
    assert extremes.check_binary(name, dtype) > 700


def test_all_operators_of_one_float_are_swept() -> None:
    swept = {name.removesuffix("_tanh") for name in extremes.UNARY} | {"tanh"}
    assert swept == {name for name, op in OPS.items() if op.category == "unary" and not op.types} - {"pow"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", extremes.NORMS)
def test_norms_of_any_magnitude(name: str, dtype: str) -> None:
    assert extremes.check_norm(name, dtype) > 5000


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_that_gradients_are_clipped_to(dtype: str) -> None:
    assert extremes.check_clip_norm(dtype) >= 30


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_very_many_are_as_exact_as_of_few(dtype: str, whole: bool) -> None:
    extremes.check_long_sums(dtype, 12_000_000 if whole else 90_000, ulp=8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_summed_over_a_large_batch(dtype: str, whole: bool) -> None:
    """Of the weight and the bias of linear layers, from equal numbers, whose roundings all go one way."""
    extremes.check_gradients_of_a_batch(dtype, 1_000_000 if whole else 150_000)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", extremes.SQUARES)
def test_slopes_of_large_errors(name: str, dtype: str) -> None:
    assert extremes.check_slopes_of_large_errors(name, dtype) == 8

"""CUDA kernels over elements: special values, sizes that cross quads and tiles, any alignment."""

from __future__ import annotations

import numpy as np
import pytest

from calcvm.formulas.functions import FUNCTIONS
from calcvm.kernels_cuda import _loops
from calcvm.kernels_cuda._cuda import at
from calcvm.kernels_cuda._formulas import formula
from calcvm.ops import OPS
from calcvm.ops.epilogues import ACTIVATIONS
from calcvm.ops.spec import Example
from calcvm.testing.cuda_threads import launch
from tests import extremes, rowrun
from tests.cuda.compiling import ptx_of
from tests.cuda.simulated import Simulated
from tests.rowrun import Case, Cpu, run_row
from tests.test_math import BOUND, arguments, error_in_ulps

SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 100.0, -100.0, 1e-30])
UNARY = sorted(n for n in OPS if OPS[n].category == "unary" and not OPS[n].types)


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    monkeypatch.setattr(rowrun, "backend", Simulated(4))


def unary(name, dtype, x, attrs=None):
    case = Case(OPS[name], Example(shapes=((x.size,),), attrs=attrs or OPS[name].examples[0].attrs), dtype, 1)
    case.values["x"] = x.astype(dtype)
    return case


# ---------------------------------------------------------------- functions of numbers
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", BOUND)
def test_functions_of_numbers(name, dtype):
    """As a device's number has them, and by their values: to 2 ulp more, since functions are NumPy's here, and fma rounds twice."""
    x = np.random.default_rng(0).choice(arguments(dtype), 150)
    for function in {FUNCTIONS[name], FUNCTIONS[name].value} - {None}:
        with np.errstate(all="ignore"):
            y = np.array([formula(function)(v) for v in x])
        error, at = error_in_ulps(name, x, y)
        assert error <= BOUND[name] + 2, f"{error:.2f} ulp at {at!r}"


# ---------------------------------------------------------------- special values
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", UNARY)
def test_special_values(name, dtype):
    """NaN, infinities and zeros give what NumPy gives, as an element of a quad and as one of a rest."""
    for special in SPECIAL:
        case = unary(name, dtype, np.array([special, 0.5, -0.5, 1.5, special, 0.25]))
        with np.errstate(all="ignore"):
            want = next(iter(case.expected().values()))
            if dtype == "float32":
                want = want.astype(np.float32).astype(float)  # what overflows there
        got = case.forward()["y"].astype(float)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-12, err_msg=f"{name}({special})")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", [name for name in UNARY if OPS[name].bwd])
def test_special_gradients(monkeypatch, name, dtype):
    """Backward rows give what the CPU's give."""
    for attrs in [dict(e.attrs) for e in OPS[name].examples if not e.bench]:
        case = unary(name, dtype, SPECIAL, attrs)
        gradients = []
        for backend in (Cpu(), Simulated(4)):
            monkeypatch.setattr(rowrun, "backend", backend)
            values = case.forward() | {"dy": np.linspace(-1, 2, SPECIAL.size).astype(dtype)}
            gradients.append(case.backward(values)["dx"])
        np.testing.assert_allclose(gradients[1], gradients[0], rtol=1e-5, atol=1e-30, err_msg=f"{name} {attrs}")


@pytest.mark.parametrize("exponent", [-3.0, -2.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, 17.0])
def test_pow_of_any_base(exponent):
    x = np.array([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, np.nan, np.inf])
    with np.errstate(all="ignore"):
        want = np.power(x, exponent)
    np.testing.assert_allclose(unary("pow", "float64", x, {"exponent": exponent}).forward()["y"], want, rtol=1e-13)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ACTIVATIONS[1:])
def test_fused_activations_have_the_bits_of_those_alone(name, dtype):
    with np.errstate(all="ignore"):
        extremes.check_fused(name, dtype, n=1)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_binary_cross_entropy_is_exact_however_confident(dtype):
    with np.errstate(all="ignore"):
        extremes.check_binary_cross_entropy(dtype, bound=4, n=81)
        extremes.check_binary_cross_entropy_of_infinities(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("exponent", [-1.0, 0.1, 0.5, 1.0, 2.0, 2.5, 3.0])
def test_pow_is_within_2_ulp_over_the_whole_range(exponent, dtype):
    with np.errstate(all="ignore"):
        extremes.check_pow(dtype, exponent, bound=2, n=50)
        extremes.check_special_powers(dtype, exponent)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", extremes.NORMS)
def test_norms_of_any_magnitude(name, dtype):
    with np.errstate(all="ignore"):
        extremes.check_norm(name, dtype, examples=2)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_norm_that_gradients_are_clipped_to(dtype):
    with np.errstate(all="ignore"):
        extremes.check_clip_norm(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", extremes.UNARY)
def test_values_and_slopes_of_any_magnitude(name, dtype):
    with np.errstate(all="ignore"):
        extremes.check_unary(name, dtype, numpys=True)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", extremes.SQUARES)
def test_slopes_of_large_errors(name, dtype):
    with np.errstate(all="ignore"):
        assert extremes.check_slopes_of_large_errors(name, dtype) == 8


# ---------------------------------------------------------------- sizes
@pytest.mark.parametrize("threads", [4, 16, 64])
@pytest.mark.parametrize(
    "shape, axes",
    [
        ((37, 53), (1, 0)),  # tiles of the shared axis
        ((2, 37, 53), (0, 2, 1)),
        ((2, 5, 8, 9), (0, 3, 1, 2)),
        ((3, 9, 2, 8), (2, 0, 3, 1)),
        ((2, 9, 2, 3, 2, 5), (0, 5, 1, 4, 2, 3)),
        ((50, 3), (1, 0)),  # narrower than a tile
        ((3, 50), (1, 0)),
        ((9, 2, 4, 8), (0, 2, 1, 3)),  # lines stay lines
        ((9, 12), (0, 1)),
    ],
)
def test_transposes(threads, shape, axes, monkeypatch):
    monkeypatch.setattr(rowrun, "backend", Simulated(threads))
    for dtype, n_workers in (("float32", 1), ("float64", 3)):
        case = Case(OPS["transpose"], Example(shapes=(shape,), attrs={"axes": axes}), dtype, 1)
        x = np.arange(np.prod(shape)).astype(dtype)
        case.values["x"] = x
        y = np.transpose(x.reshape(shape), axes).reshape(-1)
        assert np.array_equal(case.forward(n_workers=n_workers)["y"], y)
        values = case.values | {"dy": y}
        assert np.array_equal(case.backward(values, n_workers=n_workers)["dx"], x)


@pytest.mark.parametrize("threads", [4, 16])
@pytest.mark.parametrize(
    "a, b",
    [
        ((9, 53), (53,)),  # a row over rows; lines of no quads
        ((9, 52), (52,)),  # of quads
        ((9, 52), (9, 1)),  # one element a row
        ((9, 1), (1, 53)),
        ((9, 1), (1, 52)),
        ((205,), ()),
        ((1,), (205,)),
        ((5, 6, 1, 7), (8, 1)),
        ((5, 1, 8, 1), (6, 1, 4)),
        ((11, 19), (11, 19)),
    ],
)
@pytest.mark.parametrize("name", ["sub", "div"])
def test_broadcasts(name, a, b, threads, monkeypatch):
    monkeypatch.setattr(rowrun, "backend", Simulated(threads))
    for dtype, n_workers in (("float32", 3), ("float64", 1)):
        case = Case(OPS[name], Example(shapes=(a, b), low=0.5), dtype, 1)
        operands = [case.array(n, case.values[n]).astype(dtype) for n in "ab"]
        want = (operands[0] - operands[1] if name == "sub" else operands[0] / operands[1]).reshape(-1)
        values = case.forward(n_workers=n_workers)
        assert np.array_equal(values["y"], want)
        for row in OPS[name].bwd:
            values["dy"] = np.linspace(-1, 1, want.size).astype(dtype)
            got = run_row(row, case.words, values, dtype, known=case.known(), n_workers=n_workers)
            full = [np.broadcast_to(v, case.shapes["y"]).reshape(-1) for v in operands]
            dy = values["dy"]
            sums = {"sub_bwd_b": -dy, "div_bwd_a": dy / full[1], "div_bwd_b": -dy * (want / full[1])}
            np.testing.assert_array_equal(got[f"d{row.name[-1]}"], sums[row.name])


# ---------------------------------------------------------------- quads
@pytest.mark.parametrize("name", ["relu_bwd", "add_fwd", "dropout_fwd", "concat_bwd_a"])
def test_wide_accesses(name):
    text = ptx_of(name, "float32")
    assert "ld.global.v4.f32" in text and "st.global.v4.f32" in text
    assert "ld.global.v2.f64" in ptx_of(name, "float64")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_any_alignment(dtype):
    """Elements from anywhere to anywhere, of operands that lie anywhere."""
    twice = _loops.elementwise(lambda x, i, p: x + x + p * i, indexed=True)
    lines = _loops.linewise(lambda a, b: a - b)
    one = {"blocks": 1, "threads": 4, "shared_bytes": 0}
    store = np.zeros(64 + 16, dtype)
    x = store[-store.ctypes.data % 64 // store.itemsize :][:64]
    x[:] = np.arange(64) / 2
    for x_at, y_at, start, n in [(0, 0, 0, 16), (0, 0, 3, 14), (0, 4, 1, 2), (1, 0, 0, 9), (0, 3, 4, 8), (4, 8, 5, 0)]:
        y = np.full_like(x, 99)
        want = y.copy()
        i = np.arange(start, start + n)
        want[y_at + i] = 2 * x[x_at + i] + 3 * i
        launch(twice, (start, start + n, (at(x, x_at),), at(y, y_at), (x.dtype.type(3),)), **one)
        assert np.array_equal(y, want)
        want[:] = y[:] = 99
        for l in range(2):
            want[y_at + 20 * l :][:n] = x[x_at + 24 * l :][:n] - x[3 * l]
        launch(lines, (2, n, (at(x, x_at), x), (24, 3), (1, 0), at(y, y_at), 20, ()), **one)
        assert np.array_equal(y, want)

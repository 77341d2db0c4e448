"""Elementary functions, vector loops and reductions of kernels: bounds in units of the last place, full range."""

from __future__ import annotations

import ctypes
import math
import re
from dataclasses import replace

import mpmath
import numba
import numpy as np
import pytest

from calcvm.formulas import gates
from calcvm.formulas.functions import FUNCTIONS, sqrt
from calcvm.kernels_cpu import _math, emit
from calcvm.kernels_cpu._common import FAST, at, kernel_signature
from calcvm.kernels_cpu._target import host
from calcvm.script import helpers
from tests import extremes
from tests.rowcall import Heap

NATIVE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3)
DTYPES = ("float32", "float64")
# Largest error in units of the last place, as declared; a test of its own has what is not declared so.
BOUND = {f.name: f.ulp for f in FUNCTIONS.values() if f.ulp is not None}


def compile_kernel(fn, dtype):
    return numba.cfunc(kernel_signature(dtype), fastmath=FAST, error_model="numpy")(fn)


def vector_kernel(name, dtype):
    return _elementwise_kernel(FUNCTIONS[name], dtype)


def _elementwise_kernel(formula, dtype):
    loop = _math.elementwise(formula, "v")

    def kernel(h, r, w, nw, phase):
        loop(r[0], at(h, r[1]), at(h, r[2]))

    return compile_kernel(kernel, dtype)


def scalar_kernel(name, dtype):
    function = _math.scalar(FUNCTIONS[name])

    def kernel(h, r, w, nw, phase):
        x, y = at(h, r[1]), at(h, r[2])
        for i in range(r[0]):
            y[i] = function(x[i])

    return compile_kernel(kernel, dtype)


_KERNELS: dict = {}


def evaluate(name, x, make=vector_kernel):
    key = (name, x.dtype.name, make)
    if key not in _KERNELS:
        _KERNELS[key] = make(name, x.dtype.name)
    n = x.size
    heap = np.concatenate([x, np.zeros(n, x.dtype)])
    words = np.array([n, 0, n], np.int64)
    NATIVE(_KERNELS[key].address)(heap.ctypes.data, words.ctypes.data, 0, 1, 0)
    return heap[n:]


def exact(name, x):
    """As a script says it, in extended precision (erf: by the C library, in float64, to 1 ulp)."""
    if np.finfo(np.longdouble).nmant < 60:
        pytest.skip("long double is no wider than float64 here: no reference")
    wide = np.nan_to_num(x) if name == "sign" else x
    with np.errstate(all="ignore"):
        return eval(FUNCTIONS[name].numpy.format("x"), vars(helpers) | {"x": wide.astype(np.longdouble)})


def arguments(dtype, n=20_000):
    """Of all magnitudes and signs, more around 0 and 1, where exponentials are finite, and next to multiples of pi/2."""
    rng = np.random.default_rng(1)
    limit, span = (87.0, 38) if dtype == "float32" else (708.0, 308)
    x = [
        rng.uniform(-6, 6, n),
        rng.uniform(-1, 2, n),
        rng.standard_normal(n) * 10.0 ** rng.uniform(-6, 1, n),
        rng.uniform(-limit, limit, n),
        10.0 ** rng.uniform(-span, span, n) * rng.choice([-1, 1], n),
        (2.0 ** rng.uniform(0, 50, n)).round() * np.pi / 2,
    ]
    return rng.permutation(np.concatenate(x)).astype(dtype)


def error_in_ulps(name, x, y):
    """Of normal results, and infinite where there is NaN on one side alone; and the number where it is largest."""
    want = exact(name, x)
    seen = (np.abs(want) >= np.finfo(x.dtype).tiny) | ~np.isfinite(want)
    error = extremes.ulps(y, want)[seen]
    worst = int(np.argmax(error))
    return error[worst], x[seen][worst]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BOUND)
def test_error_in_ulps(name, dtype):
    x = arguments(dtype)
    error, at = error_in_ulps(name, x, evaluate(name, x))
    slack = 1 if name == "erf" and dtype == "float64" else 0  # of the reference itself
    assert error <= BOUND[name] + slack, f"{error:.2f} ulp at {at!r}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_normal_distribution(dtype):
    x = np.random.default_rng(1).uniform(-12.9, 12.9, 30_000).astype(dtype)
    y, want = evaluate("normal_cdf", x), np.array([0.5 * math.erfc(-float(v) * math.sqrt(0.5)) for v in x])
    if dtype == "float64":
        np.testing.assert_allclose(y, want, rtol=0, atol=2 * np.finfo(dtype).eps)
        return
    bound = np.where(x > -2, 5, 2 + x * x / 4)
    assert (np.abs(y - want) <= bound * np.finfo(dtype).eps * want).all()
    ends = evaluate("normal_cdf", np.array([np.inf, -np.inf, np.nan, 0], dtype))
    np.testing.assert_array_equal(ends[:3], [1, 0, np.nan])
    assert ends[3] == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BOUND)
def test_special_values(name, dtype):
    info = np.finfo(dtype)
    x = np.array(
        [0.0, 1e-30, 0.5, 1.0, 2.0, 88.8, 104.5, 710.0, 760.0, 1e30, info.tiny, info.max, np.inf, np.nan], dtype
    )
    x = np.concatenate([x, -x])
    with np.errstate(all="ignore"):
        want = exact(name, x).astype(dtype)
    y = evaluate(name, x)
    tiny = np.abs(want) < info.tiny
    np.testing.assert_allclose(y[~tiny], want[~tiny], rtol=1e-6)
    assert (np.abs(y[tiny]) <= info.tiny).all()
    assert (np.signbit(y) == np.signbit(want))[x == 0].all(), "the sign of 0 is lost"


@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_angles_next_to_multiples_of_half_pi(name):
    """The float64 that comes nearest to one, 4.7e-19; others that are very large."""
    x = np.array([6381956970095103 * 2.0**797, 1e22, np.finfo("float64").max])
    with mpmath.workprec(1200):
        want = np.array([np.longdouble(mpmath.nstr(getattr(mpmath, name)(v), 25)) for v in x.tolist()])
    assert extremes.ulps(evaluate(name, x), want).max() <= BOUND[name]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_quotient_by_the_root_of_zero_is_infinite(dtype):
    _KERNELS["by a root", dtype, vector_kernel] = _elementwise_kernel(lambda x: 1 / sqrt(x), dtype)
    x = np.array([0, np.inf, np.nan, 4, *np.full(30, 0.25)], dtype)
    np.testing.assert_array_equal(evaluate("by a root", x), [np.inf, 0, np.nan, 0.5, *np.full(30, 2)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_denormals(dtype):
    """exp underflows gradually, and log takes denormal arguments."""
    x = np.linspace(-103.5, -87.4, 100) if dtype == "float32" else np.linspace(-744.5, -708.5, 100)
    x = x.astype(dtype)
    y = evaluate("exp", x)
    want = np.exp(x.astype(np.longdouble))
    assert (np.abs(y - want) <= 1.01 * np.finfo(dtype).smallest_subnormal).all()
    np.testing.assert_allclose(evaluate("log", want.astype(dtype)), np.log(want.astype(dtype)), rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["expm1", "log1p", "sinh", "sin", "asin", "atan", "tanh"])
def test_the_smallest_arguments_are_results(name, dtype):
    x = np.finfo(dtype).smallest_subnormal * np.array([1, 2, 3, 5, -1, -7, 0, -0.0], dtype)
    assert extremes.same_values(evaluate(name, x), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_scalar_functions_equal_loops(name, dtype):
    x = arguments(dtype)[:4099]
    np.testing.assert_array_equal(evaluate(name, x, scalar_kernel), evaluate(name, x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name, ulp in BOUND.items() if ulp > 0.5])
def test_loops_are_packed(name, dtype):
    """Loops use vector registers, and no function calls."""
    for make in (vector_kernel, scalar_kernel) if name in ("exp", "erf") else (vector_kernel,):
        assembly = make(name, dtype)._library.get_asm_str()
        packed = "mulpd" if dtype == "float64" else "mulps"
        assert packed in assembly or "fmul\tv" in assembly or "fmla\tv" in assembly, f"{name}: nothing is packed"
        libm = "|".join(f.name for f in FUNCTIONS.values() if f.libm)
        assert not re.search(rf"(?<!\w)({libm})f?(?!\w)", assembly), f"{name} calls libm"


def reductions(dtype):
    def kernel(h, r, w, nw, phase):
        n, x, y, out = r[0], at(h, r[1]), at(h, r[2]), at(h, r[3])
        out[0] = _math.rsum(n, x)
        out[1] = _math.rsumsq(n, x)
        out[2] = _math.rmax(n, x)
        out[3] = _math.rmin(n, x)
        out[4] = _math.rdot(n, x, x)
        out[5] = _math.rexpsum(n, x, out[2])
        out[6] = _math.rexp(n, x, y, out[2])
        _math.scale(n, y, y, 1 / out[6])

    return compile_kernel(kernel, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions(dtype):
    native = reductions(dtype)
    rtol = 1e-5 if dtype == "float32" else 1e-13
    for n in (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 1000):
        x = np.random.default_rng(n).standard_normal(n).astype(dtype)
        heap = np.full(4000, 77, dtype)
        heap[16 : 16 + n] = x
        words = np.array([n, 16, 1500, 3000], np.int64)
        NATIVE(native.address)(heap.ctypes.data, words.ctypes.data, 0, 1, 0)
        v = x.astype(float)
        e = np.exp(v - v.max())
        want = [v.sum(), (v * v).sum(), v.max(), v.min(), (v * v).sum(), e.sum(), e.sum()]
        np.testing.assert_allclose(heap[3000:3007], want, rtol=rtol, atol=rtol)
        np.testing.assert_allclose(heap[1500 : 1500 + n], e / e.sum(), rtol=rtol)
        outside = np.ones(4000, bool)
        outside[16 : 16 + n] = outside[1500 : 1500 + n] = outside[3000:3007] = False
        assert (heap[outside] == 77).all()


def test_extrema_propagate_nan():
    native = reductions("float32")
    for n in (1, 5, 40, 200):
        for k in range(0, n, max(n // 7, 1)):
            heap = np.zeros(4000, np.float32)
            heap[16 + k] = np.nan
            words = np.array([n, 16, 1500, 3000], np.int64)
            NATIVE(native.address)(heap.ctypes.data, words.ctypes.data, 0, 1, 0)
            assert np.isnan(heap[3000:3007]).all()


# ---------------------------------------------------------------- past the caches
@pytest.mark.parametrize("in_place", [False, True], ids=["", "in place"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_large_results_have_the_bits_of_small_ones(dtype, in_place):
    """One worker writes past the caches, many do not: so large a share, on a cache line and in no operand's place, one alone has."""
    rows, cols = 9, _math.STREAMED // np.dtype(dtype).itemsize // 9 + 37
    x = np.random.default_rng(0).standard_normal(rows * cols)

    def run(workers, row, **operands):
        alias = {"y": "x"} if in_place else {}
        made = {name: np.zeros(rows * cols) for name in "y" if name not in alias}
        return Heap(dtype, {**operands, **made}, alias=alias).call(row, workers, rows=rows, cols=cols)["y"]

    one = run(1, "silu_fwd", x=x)
    assert one.tobytes() == run(8, "silu_fwd", x=x).tobytes()
    assert (run(1, "relu_fwd", x=x) == np.maximum(x.astype(dtype), 0)).all()


@pytest.mark.skipif(not host().streams, reason="stores past the caches are none of this processor's")
def test_large_results_go_past_the_caches():
    (code,) = emit(["silu_fwd"], "float32", replace(host(), jit=False)).values()
    assert b"\x0f\xae\xf8" in code  # sfence


@pytest.mark.parametrize(
    ("formula", "exact", "most"),
    [(gates.tanh, np.tanh, 3e-7), (gates.logistic, lambda x: 1 / (1 + np.exp(-x)), 2e-7)],
)
def test_gates_of_float32(formula, exact, most):
    """As exact as stated, never beyond the function's range; NaN stays."""
    x = np.concatenate([np.linspace(-40, 40, 400_001), [-np.inf, np.inf, np.nan, 0.0]]).astype("float32")
    y = evaluate(formula, x, _elementwise_kernel)
    np.testing.assert_allclose(y, exact(x.astype("float64")), rtol=0, atol=most)
    assert np.nanmax(y) <= 1 and np.nanmin(y) >= round(float(exact(-40.0)), 9)

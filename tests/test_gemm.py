"""GEMM and GEMV against float64 NumPy, inside guarded memory, for any split of the rows."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from calcvm.kernels_cpu import _gemm, _gemv  # noqa: F401  (registers the routines)
from calcvm.kernels_cpu._common import ROUTINES

DTYPES = ["float32", "float64"]
GUARD = 64  # NaN elements on each side of an operand, and between rows of C
SIZES = [
    (1, 1, 1), (1, 16, 4), (2, 3, 5), (7, 10, 64), (6, 64, 17), (5, 80, 33), (13, 49, 16), (25, 33, 31), (24, 128, 8),
    (31, 17, 1), (8, 1, 37), (70, 1, 130), (12, 50, 0), (0, 5, 3), (5, 0, 3), (3, 48, 513), (37, 300, 40), (65, 1030, 20),
    (9, 65, 1100), (64, 63, 64), (1, 7, 3), (23, 15, 9), (100, 8, 2), (11, 113, 12),
    (65, 520, 20), (100, 100, 36), (32, 3, 16), (50, 33, 37), (61, 131, 520), (121, 20, 18), (16, 2, 9),
    (8, 3083, 1023), (20, 1030, 3060),
]  # fmt: skip


def native(name: str, dtype: str):
    kinds = {"p": ctypes.c_void_p, "i": ctypes.c_int64}
    routine = ROUTINES[name]
    return ctypes.CFUNCTYPE(None, *[kinds[k] for k in routine.kinds])(routine.address(dtype))


class Guarded:
    """An array of ``shape`` inside NaN: what a kernel reads outside it shows, and what it writes is seen."""

    def __init__(self, values: np.ndarray, row_gap: int = 0):
        rows, cols = values.shape
        self.stride = cols + row_gap
        self.memory = np.full(2 * GUARD + rows * self.stride, np.nan, values.dtype)
        self.view = self.memory[GUARD : GUARD + rows * self.stride].reshape(rows, self.stride)[:, :cols]
        self.view[...] = values
        self.pointer = self.memory.ctypes.data + GUARD * values.itemsize

    def intact(self) -> bool:
        outside = self.memory.copy()
        outside[GUARD : len(outside) - GUARD].reshape(self.view.shape[0], self.stride)[:, : self.view.shape[1]] = np.nan
        return bool(np.isnan(outside).all())


def strides(g: Guarded, transposed: bool) -> tuple[int, int]:
    return (1, g.stride) if transposed else (g.stride, 1)


def rooms(N, K, b_t):
    """The least and the most workspace that a worker has use for."""
    return (16 * min(K, 512) if b_t else 0), min(K, 512) * min(N + 15, 256)


def product(dtype, a, b, a_t, b_t, init, parts=1, wn=None):
    """A @ B (+ init: None, a bias row, or a matrix that C accumulates into), its rows in ``parts`` calls."""
    (M, K), N = a.shape, b.shape[1]
    ga, gb = Guarded(a.T if a_t else a, 3), Guarded(b.T if b_t else b, 0 if K == 0 else 2)
    gc = Guarded(np.full((M, N), 7.0, dtype), 5)
    bias = Guarded(np.zeros((1, N), dtype))
    mode, init_pointer, init_rs = 0, 0, 0
    if init is not None and init.ndim == 1:
        bias.view[...] = init
        mode, init_pointer = 1, bias.pointer
    elif init is not None:
        gc.view[...] = init
        mode, init_pointer, init_rs = 1, gc.pointer, gc.stride
    wn = rooms(N, K, b_t)[1] if wn is None else wn
    ws = Guarded(np.full((1, wn), np.nan, dtype))
    size = a.itemsize
    gemm = native("gemm", dtype)
    for w in range(parts):
        lo, hi = M * w // parts, M * (w + 1) // parts
        a_rs, a_cs = strides(ga, a_t)
        gemm(
            hi - lo, N, K, ga.pointer + lo * a_rs * size, a_rs, a_cs, gb.pointer, *strides(gb, b_t),
            gc.pointer + lo * gc.stride * size, gc.stride, init_pointer + lo * init_rs * size, init_rs, mode, ws.pointer,
            wn,
        )  # fmt: skip
    assert gc.intact() and ws.intact() and bias.intact()
    return gc.view


def operands(shape, dtype, seed=0):
    M, N, K = shape
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(s).astype(dtype) for s in ((M, K), (K, N), (M, N), (N,))]


def close(got, want, K, dtype):
    np.testing.assert_allclose(got, want, rtol=0, atol=(K + 4) * (1e-6 if dtype == "float32" else 2e-15))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("b_t", [False, True], ids=["b", "bT"])
@pytest.mark.parametrize("a_t", [False, True], ids=["a", "aT"])
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_gemm(shape, a_t, b_t, dtype):
    a, b, c, bias = operands(shape, dtype)
    reference = a.astype(float) @ b.astype(float)
    for init in (None, bias, c):
        want = reference if init is None else reference + init
        got = product(dtype, a, b, a_t, b_t, init).copy()
        close(got, want, shape[2], dtype)
        for parts in (2, 3, 5):
            np.testing.assert_array_equal(product(dtype, a, b, a_t, b_t, init, parts), got)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemm_over_all_tile_remainders(dtype):
    for M in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 24, 27):
        for N in (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 97):
            a, b, _, bias = operands((M, N, 19), dtype, seed=M * N)
            for b_t in (False, True):
                close(product(dtype, a, b, False, b_t, bias), a.astype(float) @ b + bias, 19, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_unit_stride(dtype):
    """Strides of which none is 1 are slow but right."""
    a, b, _, _ = operands((5, 20, 18), dtype)
    wide_a, wide_b, c = np.repeat(a, 2, 1), np.repeat(b, 3, 1), np.zeros((5, 20), dtype)
    wn = rooms(20, 18, True)[1]
    ws = np.zeros(wn, dtype)
    p = [x.ctypes.data for x in (wide_a, wide_b, c, ws)]
    native("gemm", dtype)(5, 20, 18, p[0], 36, 2, p[1], 60, 3, p[2], 20, 0, 0, 0, p[3], wn)
    close(c, a.astype(float) @ b, 18, dtype)
    native("gemv", dtype)(20, 18, p[0], 2, p[1], 60, 3, p[2], 0, 0)
    close(c[0], a[0].astype(float) @ b, 18, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_inf_stay_in_their_row_and_column(value, dtype):
    for a_t in (False, True):
        a, b, _, _ = operands((21, 70, 40), dtype)
        a[11, 7] = value
        with np.errstate(invalid="ignore"):
            want = a.astype(float) @ b.astype(float)
        got = product(dtype, a, b, a_t, a_t, None)
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
        np.testing.assert_array_equal(np.sign(got[11]), np.sign(want[11]))
        a[11, 7], b[3, 69] = 1, value
        got = product(dtype, a, b, a_t, a_t, None)
        assert not np.isfinite(got[:, 69]).any() and np.isfinite(got[:, :69]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("b_t", [False, True], ids=["b", "bT"])
def test_gemv(b_t, dtype):
    gemv = native("gemv", dtype)
    for N in (0, 1, 2, 3, 4, 7, 8, 9, 10, 16, 17, 33, 64, 65, 130, 300):
        for K in (0, 1, 2, 3, 7, 8, 9, 16, 30, 65):
            a, b, c, bias = operands((1, N, K), dtype, seed=N * 100 + K)
            ga, gb, gi = Guarded(a), Guarded(b.T if b_t else b, 2), Guarded(bias[None])
            for mode, init in ((0, None), (1, gi), (1, "y")):
                gy = Guarded(c)
                start = (
                    {None: 0, "y": gy.pointer}.get(init, gi.pointer) if not isinstance(init, Guarded) else gi.pointer
                )
                gemv(N, K, ga.pointer, 1, gb.pointer, *strides(gb, b_t), gy.pointer, start, mode)
                want = a[0].astype(float) @ b + (0 if init is None else c[0] if init == "y" else bias)
                close(gy.view[0], want, K, dtype)
                assert gy.intact()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("b_t", [False, True], ids=["b", "bT"])
@pytest.mark.parametrize("shape", [s for s in SIZES if s[1] > 16 and min(s) > 0] + [(40, 530, 700)], ids=str)
def test_any_workspace(shape, b_t, dtype):
    """Bits do not depend on how many columns are packed at once, nor on whether they are."""
    a, b, _, bias = operands(shape, dtype)
    least, most = rooms(*shape[1:], b_t)
    want = product(dtype, a, b, False, b_t, bias).copy()
    for wn in (least, least + 1, (3 * least + most) // 4, (least + most) // 2, most - 1):
        np.testing.assert_array_equal(product(dtype, a, b, False, b_t, bias, wn=wn), want)


@pytest.mark.parametrize(("cpu", "dtype"), [("x86-64-v2", "float64"), ("x86-64-v3", "float32")])
def test_narrower_vectors(cpu, dtype, tmp_path, whole):
    """The same tests without AVX and FMA; with --whole also without AVX-512, and of both dtypes."""
    if cpu == "x86-64-v3" and not whole:
        pytest.skip("takes --whole")
    if "amd64" not in os.uname().machine.replace("x86_64", "amd64"):
        pytest.skip("an x86 test")
    here = Path(__file__)
    env = dict(os.environ, CALCVM_CPU=cpu, CALCVM_CACHE_DIR=str(tmp_path))
    env["PYTHONPATH"] = os.pathsep.join([str(here.parents[1] / "src"), env.get("PYTHONPATH", "")])
    other = "" if whole else f" and not {next(d for d in DTYPES if d != dtype)}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", f"not narrower{other}", str(here)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]

"""Every CUDA kernel compiles to PTX, and computes in float32 where its heap is float32."""

from __future__ import annotations

import re

import pytest

from calcvm.kernels_cuda import kernels
from calcvm.kernels_cuda._cuda import POINTERS, WORDS, block, blocks, compile_ptx

# Rows of float32 heaps that compute in float64, by design: hyperparameters, totals of long sums, pow.
IN_FLOAT64 = {
    "tick", "clip_norm_scale", "pow_fwd", "pow_bwd", "sum_fwd", "mean_fwd", "sum_squares_fwd", "dropout_fwd", "dropout_bwd",
}  # fmt: skip
ARITHMETIC = re.compile(r"^\s*(?:add|sub|mul|fma|div|sqrt|rcp|neg|abs)\.(?:rn\.)?f64\b", re.M)


def ptx_of(name, dtype, cc=(9, 0)):
    kernel = kernels()[name]
    halves = [half.bound for half in (kernel, kernel.finish) if half]
    one, two = halves[0], halves[-1]
    both = len(halves) == 2

    def run(h, r):
        one(h, r, block(), blocks())
        if both:
            two(h, r, block(), blocks())

    return compile_ptx(run, (POINTERS[dtype], WORDS), f"calcvm_{name}", cc, 256, 2)


@pytest.mark.parametrize("name", sorted(kernels()))
def test_float32_kernel(name):
    ptx = ptx_of(name, "float32")
    assert f".entry calcvm_{name}(" in ptx and ".target sm_90" in ptx
    found = ARITHMETIC.findall(ptx)
    if name in IN_FLOAT64:
        assert len(found) <= 400
    elif len(found) > 6:  # scalars of a row (1 - beta, 1/count) may be float64; its elements may not
        raise AssertionError(f"{name}: {len(found)} operations in float64 on a float32 heap: {found[:5]}")

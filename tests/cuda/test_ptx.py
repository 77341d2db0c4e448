"""Every CUDA kernel and every entry of the VM compiles to PTX, and computes in float32 where its heap is float32."""

from __future__ import annotations

import os
import re

import pytest

import calcvm as cv
from calcvm import nn
from calcvm.kernels_cuda import kernels
from calcvm.kernels_cuda._cuda import POINTERS, WORDS, block, blocks, compile_ptx
from calcvm.vm.cuda import build

CAPABILITIES = ((9, 0), (8, 0))
ALL = os.environ.get("CALCVM_ALL_PTX") == "1"  # make ptx
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


def check(ptx, entry, cc):
    assert f".entry {entry}(" in ptx and f".target sm_{cc[0]}{cc[1]}" in ptx and ".version 8.0" in ptx


# One compute capability after the other: what kernels share is compiled once for each.
@pytest.mark.parametrize("name", sorted(kernels()))
@pytest.mark.parametrize("cc", CAPABILITIES)
def test_float32_kernel(cc, name):
    ptx = ptx_of(name, "float32", cc)
    check(ptx, f"calcvm_{name}", cc)
    found = ARITHMETIC.findall(ptx)
    if name in IN_FLOAT64:
        assert len(found) <= 400
    elif len(found) > 6:  # scalars of a row (1 - beta, 1/count) may be float64; its elements may not
        raise AssertionError(f"{name}: {len(found)} operations in float64 on a float32 heap: {found[:5]}")


SAMPLE = ["adam", "add_fwd", "linear_bwd_w", "max_bwd", "softmax_cross_entropy_fwd", "transpose_fwd"]


@pytest.mark.parametrize("name", sorted(kernels()) if ALL else SAMPLE)
@pytest.mark.parametrize("cc", CAPABILITIES if ALL else CAPABILITIES[1:])
def test_float64_kernel(cc, name):
    check(ptx_of(name, "float64", cc), f"calcvm_{name}", cc)


@pytest.mark.parametrize("entry", build.ARGUMENTS)
@pytest.mark.parametrize("cc", CAPABILITIES)
def test_entry_of_the_vm(cc, entry, tmp_path, monkeypatch):
    """The paper's network, in each way that a program is run; a second time from the cache."""
    monkeypatch.setenv("CALCVM_CACHE_DIR", str(tmp_path))
    net = nn.Linear(64) >> nn.Sigmoid() >> nn.Linear(64) >> nn.Sigmoid() >> nn.Linear(10)
    graph = cv.build_graph(net, (784,), "softmax_cross_entropy", cv.Adam(1e-3))
    program = cv.compile(graph, batch_size=32, device="cuda", mode="grid", workers=2, accumulate=False)
    target = build.Target(cc, 64 if entry == "fleet" else 256, 1)
    opcodes = {int(c) for c in program.rows[:, 0]}
    ptx = build.ptx(entry, opcodes, "float32", target)
    check(ptx, f"calcvm_{entry}", cc)
    assert "%ntid.x" not in ptx and "%envreg0" not in ptx
    (kept,) = (tmp_path / "ptx").iterdir()
    monkeypatch.setattr(build, "_compile", None)
    assert build.ptx(entry, opcodes, "float32", target) == ptx
    kept.write_text(kept.read_text()[:-100])  # torn: compiled again
    with pytest.raises(TypeError):
        build.ptx(entry, opcodes, "float32", target)

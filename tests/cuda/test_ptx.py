"""Every CUDA kernel and every entry of the VM compiles to PTX, and computes in float32 where its heap is float32."""

from __future__ import annotations

import os
import re
from itertools import product
from pathlib import Path

import pytest

import calcvm as cv
from calcvm import nn
from calcvm.equations.stated import STATED
from calcvm.kernels_cuda import kernels
from calcvm.kernels_cuda._routines import symbol_of
from calcvm.ops.types import FLOAT
from calcvm.vm.run.cuda import build
from calcvm.warm import instances
from tests.conftest import whole_of
from tests.cuda.compiling import ASSEMBLER, assemble, functions_in, process, submit

CAPABILITIES = ((9, 0), (8, 0))
# Rows of float32 heaps that compute in float64, by design: hyperparameters, totals of long sums, pow.
IN_FLOAT64 = {
    "tick", "clip_norm_scale", "pow_fwd", "pow_bwd", "lp_pool_fwd", "lp_pool_bwd_y", "lp_pool_bwd", "sum_fwd", "mean_fwd", "sum_squares_fwd", "dropout_fwd", "dropout_bwd",
}  # fmt: skip
IN_LOCAL = re.compile(
    "tick|(sin|cos|tan)_(fwd|bwd)"
)  # whose arguments may be so large that their reduction looks up a table
ARITHMETIC = re.compile(r"^\s*(?:add|sub|mul|fma|div|sqrt|rcp|neg|abs)\.(?:rn\.)?f64\b", re.M)


def check(ptx, entry, cc):
    assert f".entry {entry}(" in ptx and f".target sm_{cc[0]}{cc[1]}" in ptx and ".version 8.0" in ptx


def check_kernel(ptx, name, dtype, cc):
    """A module of a row's kernel: that and what it calls are there once, each before who calls it; as of one compiler."""
    check(ptx, "calcvm_row", cc)
    there = functions_in(ptx)
    assert symbol_of(f"row_{name}", dtype) in there and len(there) == len(set(there))
    for call in re.finditer(r"^\t(?:call\.uni \(returned\), )?(calcvm_[\w$]+), ", ptx, re.M):
        assert "$" in call[1] or call[1] in functions_in(ptx[: call.start()])
    assert ".local" not in ptx or IN_LOCAL.fullmatch(name), f"{name} has local memory"
    assert ".extern .func" not in ptx and ".visible .func" not in ptx and "NumbaEnv" not in ptx


TYPED = [
    "cast_fwd.float.uint8",
    "less_fwd.int64",
    "slice_fwd.uint8",
    "softmax_cross_entropy_bwd.int64",
    "where_fwd.uint8",
]
SAMPLE = ["adam", "add_fwd", "linear_bwd_w", "max_bwd", "softmax_cross_entropy_fwd", "transpose_fwd"]


def pytest_generate_tests(metafunc):
    """A sample of kernels, of each family some, and of the VM's entries; with --whole, everything; with --sampled each kernel of each
    type for one of the capabilities."""
    (first, second), sampled = CAPABILITIES, {"key", "equation", "of"} & {*metafunc.fixturenames}
    whole = bool(sampled) and whole_of(metafunc)
    every = sorted(kernels()) + (sorted(instances()) if whole else TYPED)
    if "key" in metafunc.fixturenames:
        dtype = metafunc.function.__name__.split("_")[1]
        firsts = {kernel.fn.__module__: name for name, kernel in sorted(kernels().items(), reverse=True)}
        taken = {*SAMPLE, *TYPED, *firsts.values(), *every[::48]}
        some = [name for name in every if name in taken]
        sample = {first: some} if dtype == "float32" else {second: SAMPLE}
        # One compute capability after the other: what kernels share is compiled once for each.
        names = dict.fromkeys(CAPABILITIES, every) if whole else sample
        if whole and metafunc.config.getoption("--sampled"):
            turn = dtype == "float64"
            names = {first: every[turn::2], second: every[1 - turn :: 2]}
        keys = [(name, dtype, cc) for cc in names for name in names[cc]]
        metafunc.parametrize("key", keys, ids=lambda k: f"{k[0]}-{k[2][0]}")
    if "equation" in metafunc.fixturenames:  # its text and the dtype
        equations = product(EQUATIONS, ("float32", "float64")) if whole else product(EQUATIONS[::2], ("float32",))
        metafunc.parametrize("equation", [*equations], ids="-".join)
    if "of" in metafunc.fixturenames:
        entries = dict.fromkeys(CAPABILITIES, build.ARGUMENTS) if whole else {first: ["fleet", "row", "rows"]}
        pairs = [(entry, cc) for cc in entries for entry in entries[cc]]
        metafunc.parametrize("of", pairs, ids=lambda of: f"{of[0]}-{of[1][0]}")


def asked_for(request, name):
    """Parameters of the tests at hand, in their order."""
    own = [i for i in request.session.items if i.path == request.path]
    return [i.callspec.params[name] for i in own if name in getattr(i, "fixturenames", ())]


@pytest.fixture(scope="module")
def compiled(request, entries):
    """PTX of kernels; entries are compiled meanwhile."""
    with process() as pool:
        yield submit(pool, asked_for(request, "key"))


def test_float32_kernel(key, compiled):
    name, _, cc = key
    ptx = compiled[key].result()
    check_kernel(ptx, name, "float32", cc)
    found = ARITHMETIC.findall(ptx)
    if name in IN_FLOAT64:
        assert len(found) <= 400
    elif len(found) > 6:  # scalars of a row (1 - beta, 1/count) may be float64; its elements may not
        raise AssertionError(f"{name}: {len(found)} operations in float64 on a float32 heap: {found[:5]}")


def test_float64_kernel(key, compiled):
    name, _, cc = key
    check_kernel(compiled[key].result(), name, "float64", cc)


@pytest.mark.skipif(ASSEMBLER is None, reason="no ptxas is installed")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_is_joined_is_assembled(dtype, whole, compiled, tmp_path):
    """Of all kernels that are compiled at hand those of other types and some of each family, with --whole all."""
    keys = [key for key in compiled if key[1] == dtype and (whole or key[0] in (*TYPED, *SAMPLE))]
    assert keys
    for key in keys:
        assert "calcvm_row" in assemble(compiled[key].result(), str(tmp_path / "cubin"))


# ---------------------------------------------------------------- users' equations
EQUATIONS = (
    "y[b,i] = w[i]*(x[b,i] - mean[j] x[b,j])/sqrt(var[k] x[b,k] + 0.01)",
    "y[b,o<4] = max[t<3] exp(x[b,o])*x[b, 2*o + t - 1]",
    "y[b,i] = w[k[b]]*x[b,i]",
    "y[b,i] = y[b, i - 1] + w[i]^3*erf(x[b,i])",
    "y[b] = argmin[i,j] abs(x[b,i] - w[j])",
    "y[b,j] = any[i] (x[b,i] == w[j] and k[b] % 2 == 0)",
)


def ptx_of_equation(text, dtype):
    """PTX of the rows of an equation and its gradients, by row."""
    g = cv.CalcGraph()
    given = {
        "x": g.placeholder("x", (None, 300)),
        "w": g.parameter("w", (300,)),
        "k": g.placeholder("k", (None,), "int64"),
    }
    given = {name: v for name, v in given.items() if f"{name}[" in text.partition("=")[2]}
    with g.path("p"):
        y = cv.equation(text, **given, fused=True)
        if y.type == FLOAT:
            [cv.gradient(cv.sum(y * y), given[name]) for name in ("x", "w") if name in given]
    target = build.Target(CAPABILITIES[0], 256, 2)
    return {name: build.ptx("row", (name,), dtype, target) for name in STATED}


@pytest.fixture(scope="module")
def of_equations(request):
    with process() as pool:
        yield {equation: pool.submit(ptx_of_equation, *equation) for equation in asked_for(request, "equation")}


def test_kernels_of_a_users_equation(equation, of_equations):
    found, dtype = of_equations[equation].result(), equation[1]
    assert found
    for name, ptx in found.items():
        check_kernel(ptx, name, dtype, CAPABILITIES[0])
        assert dtype == "float64" or not ARITHMETIC.findall(ptx)


# ---------------------------------------------------------------- entries
def entry_of(entry, cc, cache):
    """The PTX of an entry for the paper's network, the same from the cache and mended; the functions compiled at first, and to mend it."""
    os.environ["CALCVM_CACHE_DIR"] = cache
    net = nn.Linear(64) >> nn.Sigmoid() >> nn.Linear(64) >> nn.Sigmoid() >> nn.Linear(10)
    graph = cv.build_graph(net, (784,), "softmax_cross_entropy", cv.Adam(1e-3))
    program = cv.compile(graph, batch_size=32, device="cuda", mode="grid", workers=2)
    target = build.Target(cc, 64 if entry == "fleet" else 256, 1)
    names = [name for name, _ in program.instructions]
    compiled = []
    before = build._kept
    build._kept = lambda name, cc, made_of, make: before(name, cc, made_of, lambda: compiled.append(name) or make())
    try:
        texts = [build.ptx(entry, names, "float32", target)]
        of_all, compiled[:] = list(compiled), []
        texts.append(build.ptx(entry, names, "float32", target))
        (kept,) = (Path(cache) / "ptx").glob(f"calcvm_{entry}-*.sm_{cc[0]}{cc[1]}.ptx")
        kept.write_bytes(kept.read_bytes()[:-100])  # torn: it is compiled again
        texts.append(build.ptx(entry, names, "float32", target))
    finally:
        build._kept = before
    return texts, of_all, compiled, sorted(set(names))


@pytest.fixture(scope="module")
def entries(request, tmp_path_factory):
    cache = {cc: str(tmp_path_factory.mktemp("ptx")) for cc in CAPABILITIES}  # entries share what they call
    with process() as pool:
        yield {of: pool.submit(entry_of, *of, cache[of[1]]) for of in asked_for(request, "of")}


def test_entry_of_the_vm(of, entries, tmp_path):
    """The paper's network, in each way that a program is run: what no program had is compiled, and only that."""
    entry, cc = of
    (ptx, again, mended), first, then, names = entries[of].result()
    check(ptx, f"calcvm_{entry}", cc)
    assert "%ntid.x" not in ptx and "%envreg0" not in ptx
    assert again == ptx and f"calcvm_{entry}" in first and len(first) == len(set(first))
    kernels_of_rows = [] if entry in build.WITHOUT_ROWS else [symbol_of(f"row_{name}", "float32") for name in names]
    assert set(kernels_of_rows) <= set(functions_in(ptx))
    assert mended == ptx and then == [f"calcvm_{entry}"]
    if ASSEMBLER:
        assert f"calcvm_{entry}" in assemble(ptx, str(tmp_path / "cubin"))

"""The cache of compiled code: what each function's place in it depends on, and what does not go well."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import calcvm as cv
from calcvm import kernels_cpu
from calcvm.kernels_cpu import FAMILIES, _native
from calcvm.kernels_cpu._target import host

SOURCE = Path(cv.__file__).parent
KERNELS = {family: _native.modules_of(family) for family in (*FAMILIES, "_gemm", "_gemv", "_blas")}
PRODUCTS = [f"{family}{on}" for family in ("contraction", "convolution") for on in ("", " on blas")]
ON_BLAS = {f"{family} on blas": _native.modules_of(family, "blas") for family in FAMILIES}
LOOPS = {"loops": ("vm.run.loop",)}
PLACES = KERNELS | ON_BLAS | LOOPS


def forget():
    for remembered in (_native.folder, _native._scan, _native._file):
        remembered.cache_clear()


def edit(file):
    file.write_text(file.read_text() + "\n# edited\n")


# ---------------------------------------------------------------- keys
@pytest.mark.parametrize(
    "file, compiled_again",
    [
        ("kernels_cpu/losses.py", {"losses", "losses on blas"}),
        ("kernels_cpu/_gemm.py", {"_gemm", *PRODUCTS}),
        ("kernels_cpu/_gemv.py", {"_gemv", "_gemm", *PRODUCTS}),
        ("kernels_cpu/_blas.py", {"_blas", *ON_BLAS}),
        ("kernels_cpu/_common.py", set(PLACES)),
        ("vm/run/loop.py", {"loops"}),
        ("vm/run/samples.py", {"loops"}),
        ("vm/run/job.py", {"loops"}),
        ("ops/spec.py", set()),  # the loops know no instruction
        ("kernels_cpu/_target.py", set(PLACES)),
        ("kernels_cpu/_aside.py", set()),
        ("kernels_cpu/__init__.py", set()),
        ("vm/run/team.py", set()),
        ("kernels_cuda/losses.py", set()),
    ],
)
def test_an_edit_compiles_again_what_is_made_of_it_and_nothing_else(package, file, compiled_again):
    before = {name: _native.folder(modules, host()) for name, modules in PLACES.items()}
    edit(package / file)
    forget()
    assert {
        name for name, modules in PLACES.items() if _native.folder(modules, host()) != before[name]
    } == compiled_again


def rows_of_a_program():
    """The names of 32 different rows."""
    g = cv.CalcGraph()
    x, u, W = g.placeholder("x", (None, 8)), g.placeholder("u", (None, 8)), g.parameter("W", (8, 8))
    with g.path("run") as run:
        s = cv.square(x)
        y = cv.matmul(x, W) + x / s + x * u - u
        for function in (
            cv.exp,
            cv.tanh,
            cv.sigmoid,
            cv.relu,
            cv.abs,
            cv.softplus,
            cv.elu,
            cv.leaky_relu,
            cv.gelu,
            cv.softmax,
        ):
            y = y + function(x)
        y = y + cv.log(s) + cv.sqrt(s) + cv.pow(s, 0.3) + cv.log_softmax(u)
        z = cv.concat([y, u], 1)[:, 3:11]
        turned = cv.mean(cv.transpose(cv.reshape(z, (-1, 2, 4)), (0, 2, 1)), 1)
        loss = cv.mse(z, u) + cv.mae(z, u) + cv.huber(z, u) + cv.sum_squares(cv.max(z, 1) + cv.min(x, 1))
        run.output = loss + cv.sum(turned)
    return {name for name, _ in cv.compile(g, batch_size=4, workers=1).instructions}


@pytest.mark.parametrize(
    "file, compiled_again",
    [
        ("losses", {"loss_mean", "mse_fwd", "mae_fwd", "huber_fwd"}),
        ("shape", {"concat_fwd", "slice_fwd", "transpose_fwd"}),
        (
            "reduction",
            {"max_fwd", "min_fwd", "mean_fwd", "sum_fwd", "sum_squares_fwd", "softmax_fwd", "log_softmax_fwd"},
        ),
        ("_gemm", {"matmul_fwd"}),
    ],
)
def test_of_a_programs_rows_an_edit_compiles_again_those_of_the_file(package, file, compiled_again):
    modules = {name: kernels_cpu.find(name).modules() for name in rows_of_a_program()}
    assert len(modules) == 32
    before = {name: _native.folder(places, host()) for name, places in modules.items()}
    edit(package / "kernels_cpu" / f"{file}.py")
    forget()
    assert {
        name for name, places in modules.items() if _native.folder(places, host()) != before[name]
    } == compiled_again


def test_the_imports_that_keys_follow_are_those_that_python_sees():
    everything = (*(f"kernels_cpu.{path.stem}" for path in _native.SOURCES.glob("*.py")), "vm.run.loop")
    followed = _native.closure(everything)
    assert {"vm.run.job", "vm.run.samples", "vm.run.atomics"} < followed.keys()
    for module, (_, imports) in followed.items():
        assert imports == tuple(sorted(imported(SOURCE.joinpath(*module.split(".")).with_suffix(".py")))), module


def imported(file):
    """Modules of the package that a file imports, at any depth, by its syntax tree."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("calcvm") for alias in node.names), "the keys follow `from` alone"
        elif isinstance(node, ast.ImportFrom) and (node.level or node.module.partition(".")[0] == "calcvm"):
            assert not node.level and "." in node.module, "the keys follow `from calcvm.` alone"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            inside = [name for name in names if (SOURCE.parent / f"{name.replace('.', '/')}.py").is_file()]
            found.update(name.removeprefix("calcvm.") for name in inside or [node.module])
    return found


# ---------------------------------------------------------------- processes
ADDRESSES = """
import json, pathlib, sys
from calcvm.kernels_cpu import address_of
if pathlib.Path("own.py").exists():
    import own
from calcvm.vm.run.entry import address
for name in sys.argv[1:]:
    assert address(name) if name == "permute" else address_of(name, "float32")
print(json.dumps("numba" in sys.modules))
"""


def compiles(sources, cache, *names, **environment):
    """Take the addresses of kernels in a new process: whether it imported Numba, and the files that it wrote."""
    before = files(cache)
    environment = {**os.environ, "PYTHONPATH": str(sources), "CALCVM_CACHE_DIR": str(cache), **environment}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ADDRESSES, *names],
        cwd=sources,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), {at.name for at, time in files(cache).items() if before.get(at) != time}


def files(cache):
    return {path: path.stat().st_mtime_ns for path in Path(cache).rglob("*.o")}


def test_an_edited_kernel_is_compiled_and_its_neighbours_come_from_the_cache(tmp_path, package):
    cache, names = tmp_path / "cache", ("concat_fwd", "rng_advance", "permute")
    concat, rng, permute = (
        f"calcvm_{name}_cpu.o" for name in ("concat_fwd_float32", "rng_advance_float32", "permute_any")
    )
    assert compiles(package.parent, cache, *names) == (True, {concat, rng, permute})
    assert compiles(package.parent, cache, *names) == (False, set())
    edit(package / "kernels_cpu" / "shape.py")
    assert compiles(package.parent, cache, *names) == (True, {concat})
    edit(package / "vm" / "run" / "loop.py")
    assert compiles(package.parent, cache, *names) == (True, {permute})
    assert compiles(package.parent, cache, *names) == (False, set())


def test_a_routine_that_is_gone_is_compiled_for_the_kernels_that_are_there(tmp_path, package):
    cache = tmp_path / "cache"
    kernel, gemm = "calcvm_matmul_bwd_a_float32_cpu.o", "calcvm_gemm_float32_cpu.o"
    assert compiles(package.parent, cache, "matmul_bwd_a") == (True, {kernel, gemm})
    (damaged,) = cache.rglob(gemm)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert compiles(package.parent, cache, "matmul_bwd_a") == (True, {gemm})
    assert compiles(package.parent, cache, "matmul_bwd_a") == (False, set())


OWN = """
from calcvm.kernels_cpu._common import Ptr, kernel

@kernel
def own(me, x: Ptr):
    x[0] = {value}
"""


def test_a_kernel_from_elsewhere_is_compiled_anew_in_each_process(tmp_path, package):
    """Nobody knows all that it is made of: what its file imports, values around it."""
    cache, own = tmp_path / "cache", package.parent / "own.py"
    for value in (1, 2, 2):
        own.write_text(OWN.format(value=value))
        assert compiles(package.parent, cache, "own") == (True, set())


def test_a_cache_that_cannot_be_written_leaves_nothing_behind_and_is_told_of(tmp_path):
    (tmp_path / "file").touch()
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    code = "from calcvm.kernels_cpu import address_of; print(address_of('concat_fwd', 'float32') != 0)"
    environment = {**os.environ, "CALCVM_CACHE_DIR": str(tmp_path / "file"), "TMPDIR": str(temporary)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert "RuntimeWarning: compiled code cannot be kept in" in done.stderr and "CALCVM_CACHE_DIR" in done.stderr
    assert not list(temporary.iterdir())

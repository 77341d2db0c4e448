"""The cache of compiled code: what each function's place in it depends on, and what does not go well."""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import calcvm as cv
from calcvm import kernels_cpu
from calcvm.kernels_cpu import FAMILIES, _native
from calcvm.kernels_cpu._target import Target, host

SOURCE = Path(cv.__file__).parent
KERNELS = {family: _native.modules_of(family) for family in (*FAMILIES, "_gemm", "_gemv", "_blas")}
PRODUCTS = [
    f"{family}{on}" for family in ("contraction", "convolution", "recurrent", "transformers") for on in ("", " on blas")
]
ON_BLAS = {f"{family} on blas": _native.modules_of(family, "blas") for family in FAMILIES}
LOOPS = {"loops": ("vm.run.loop",)}
PLACES = KERNELS | ON_BLAS | LOOPS


def forget():
    for remembered in (_native.key, _native.folder, _native._scan, _native._file):
        remembered.cache_clear()


def edit(file):
    file.write_text(file.read_text() + "\n# edited\n")


# ---------------------------------------------------------------- keys
@pytest.mark.parametrize(
    "file, compiled_again",
    [
        ("kernels_cpu/losses.py", {"losses", "losses on blas"}),
        ("kernels_shared/pooling.py", {"pooling", "pooling on blas", "quantized", "quantized on blas"}),
        ("kernels_cpu/_gemm.py", {"_gemm", *PRODUCTS}),
        ("kernels_cpu/_gemv.py", {"_gemv", "_gemm", *PRODUCTS}),
        ("kernels_cpu/_blas.py", {"_blas", *ON_BLAS}),
        ("kernels_cpu/_common.py", set(PLACES)),
        ("vm/run/loop.py", {"loops"}),
        ("vm/run/samples.py", {"loops"}),
        ("vm/run/job.py", {"loops"}),
        ("ops/spec.py", set()),  # the loops know no instruction
        ("kernels_cpu/_target.py", set(PLACES)),
        ("kernels_cpu/_compile_workers.py", set()),
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
    assert compiles(package.parent, cache, "matmul_bwd_a", PYTHONHASHSEED="1") == (True, {kernel, gemm})
    (damaged,), (other,) = cache.rglob(gemm), cache.rglob(kernel)
    whole = damaged.read_bytes(), other.read_bytes()
    damaged.write_bytes(whole[1])
    other.write_bytes(whole[0])
    assert compiles(package.parent, cache, "matmul_bwd_a", PYTHONHASHSEED="2") == (True, {kernel, gemm})
    assert (damaged.read_bytes(), other.read_bytes()) == whole
    damaged.write_bytes(whole[0][:-1])
    assert compiles(package.parent, cache, "matmul_bwd_a") == (True, {gemm})
    assert compiles(package.parent, cache, "matmul_bwd_a") == (False, set())


# ---------------------------------------------------------------- files that hold what they should not
ROWS = [("tanh_fwd", "elementwise"), ("exp_fwd", "elementwise"), ("matmul_fwd", "contraction"), ("mse_fwd", "losses")]
OTHER = Target(host().triple, "haswell" if host().x86 else "cortex-a72", jit=True)  # no level, so not the host's
TARGETS = [host(), OTHER]


@pytest.fixture(scope="module")
def kept():
    """Functions of several modules, types and targets as the cache has them."""
    found = {}
    for (name, family), dtype, target in itertools.product(ROWS, ("float32", "float64"), TARGETS):
        if target != host() and name != "exp_fwd":
            continue
        symbol, places = _native.symbol_of(name, dtype), (_native.modules_of(family),)
        _native.objects(symbol, kernels_cpu._build, *places, target=target)
        found[symbol, target] = _native._read(symbol, places[0], target)
    return found


def damages(files, whole):
    """Contents for each file by what is wrong with them, of a cache whose files are all right."""
    paths = sorted(files)
    for shift in range(1, len(paths)) if whole else (1, 2, 5, 8, 11):
        yield f"moved by {shift}", {path: files[other] for path, other in zip(paths, paths[shift:] + paths)}
    rng = random.Random(0)
    for k in range(100 if whole else 3):
        shuffled = rng.sample(paths, len(paths))
        yield f"permutation {k}", {path: files[other] for path, other in zip(paths, shuffled)}
    for path, other in itertools.permutations(paths, 2) if whole else [(paths[0], paths[-1])]:
        yield "one in place of another", files | {path: files[other]}
    for size in (0, 1, len(_native.MAGIC), 60, 200, 1000):
        yield f"{size} bytes", {path: data[:size] for path, data in files.items()}
    yield "the last byte gone", {path: data[:-1] for path, data in files.items()}
    yield "longer", {path: data + b"x" for path, data in files.items()}
    yield "zeros", {path: bytes(len(data)) for path, data in files.items()}
    for k in range(200 if whole else 20):
        at = rng.random()
        yield f"a bit at {at:.3f}", {path: flipped(data, int(at * len(data)), k % 8) for path, data in files.items()}
    for what, alter in FORGED.items():
        yield f"{what}, with the right checksum", {path: forged(path, data, alter) for path, data in files.items()}


def flipped(data, at, bit):
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


FORGED = {
    "nothing": lambda needs, code: b"",
    "garbage": lambda needs, code: b"garbage" * 99,
    "no object": lambda needs, code: needs + b"\n",
    "garbage in place of the object": lambda needs, code: needs + b"\n" + b"garbage" * 99,
    "half an object": lambda needs, code: needs + b"\n" + code[: len(code) // 2],
    "an object of 31 bits": lambda needs, code: needs + b"\n" + code[:4] + b"\1" + code[5:],
    "no list of what it needs": lambda needs, code: b"[1, 2]\n" + code,
    "what it needs is no text": lambda needs, code: b'{"a": 3}\n' + code,
    "another's name inside": lambda needs, code: needs + b"\n" + code.replace(b"calcvm_", b"melcvm_"),
}


def forged(path, data, alter):
    body = data[len(_native._head(path, _native.MAGIC)) + 32 :]
    needs, _, code = body.partition(b"\n")
    made = alter(needs, code)
    return _native._head(path, _native.MAGIC) + hashlib.sha256(made).digest() + made


def test_whatever_a_file_holds_that_is_not_its_own_is_noticed_and_mended(kept, tmp_path, monkeypatch, whole):
    monkeypatch.setenv("CALCVM_CACHE_DIR", str(tmp_path))
    forget()
    try:
        of = {_native.folder(made.modules, target) / f"{symbol}.o": (symbol, target, made)
              for (symbol, target), made in kept.items()}  # fmt: skip
        for symbol, target, made in of.values():
            _native._write(symbol, made, target)
        files = {path: path.read_bytes() for path in of}
        assert len(set(files.values())) == len(files) == len(kept)
        built = []

        def build(symbol, places, target):
            built.append((symbol, target))
            return kept[symbol, target]

        cases = 0
        for what, contents in damages(files, whole):
            for path, data in contents.items():
                path.write_bytes(data)
            for again in (True, False):
                built.clear()
                for symbol, target, made in of.values():
                    assert _native._obtain(symbol, build, (made.modules,), target) == made, what
                wrong = [of[path][:2] for path, data in contents.items() if data != files[path]]
                assert sorted(built, key=repr) == sorted(wrong if again else [], key=repr), what
            assert {path: path.read_bytes() for path in of} == files, what
            cases += len(wrong)
        print(f"{cases} files damaged, noticed and mended")
        assert cases > (3000 if whole else 400)
    finally:
        forget()


def test_an_address_that_is_none_is_refused_and_not_called(kept):
    for (symbol, target), made in kept.items():
        if target == host() and not made.needs:
            with pytest.raises(cv.CalcError, match=f"of '{symbol}_x' does not define it"):
                _native._link(f"{symbol}_x", made.code)
    with pytest.raises(cv.CalcError, match="has no address"):
        _native.publish("calcvm_nothing", 0)
    code = kept[_native.symbol_of("matmul_fwd", "float64"), host()].code.replace(b"calcvm_gemm", b"calcvm_gone")
    with pytest.raises(cv.CalcError, match=r"calls 'calcvm_g\w+_float64_cpu', which this system does not have"):
        _native._link("calcvm_matmul_fwd_float64_cpu", code)


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
    assert "CalcWarning: compiled code cannot be kept in" in done.stderr and "CALCVM_CACHE_DIR" in done.stderr
    assert not list(temporary.iterdir())

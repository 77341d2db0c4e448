"""Code that a wheel brings, and the levels of processors for which it is compiled."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import calcvm as cv
from bench import memory
from calcvm import nn, warm
from calcvm.kernels_cpu import _native, _shipped, _target
from calcvm.kernels_cpu._target import LEVELS, host, levels, of_level

SIZES, STEPS = (4, 16, 3), 40  # steps enough for compiled calls
TRAINING = """
import json, os, pathlib, sys
import numpy as np
import calcvm as cv
from calcvm import nn
rng = np.random.default_rng(0)
X, y = rng.standard_normal((8, 4), dtype=np.float32), rng.integers(0, 3, 8)
if len(sys.argv) > 1:
    model = cv.load(sys.argv[1])
else:
    model = cv.Model(nn.Linear(16) >> nn.Tanh() >> nn.Linear(3), input_shape=(4,), loss="softmax_cross_entropy",
                     optimizer=cv.Adam(1e-2, schedule=cv.Cosine(100)), batch_size=8, workers=1, seed=0)
losses = [float(model.step(X, y)) for _ in range(40)]
losses += [float(model.predict(X).sum()), *model.fit(X, y, epochs=2, progress=False)["loss"]]
cache = pathlib.Path(os.environ.get("CALCVM_CACHE_DIR", "/nowhere"))
print(json.dumps(["numba" in sys.modules, sorted(p.name for p in cache.rglob("*.o")), losses]))
"""


def train(sources: Path, cache: Path, *arguments: str, **environment: str) -> tuple[bool, list[str], list[float]]:
    """Train in a new process: whether it imported Numba, the files of the cache, the losses."""
    environment = {**os.environ, "PYTHONPATH": str(sources), "CALCVM_CACHE_DIR": str(cache), **environment}
    command = [sys.executable, "-W", "error", "-c", TRAINING, *arguments]
    done = subprocess.run(command, cwd=sources, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    numba, files, losses = json.loads(done.stdout)
    return numba, files, losses


def forget() -> None:
    for remembered in (_native.key, _native.folder, _native._scan, _native._file, _shipped._names, _shipped._member):
        remembered.cache_clear()


@pytest.fixture(scope="module")
def functions() -> dict[str, _native.ObjectCode]:
    """What the training needs."""
    model = cv.Model(
        nn.Linear(16) >> nn.Tanh() >> nn.Linear(3), input_shape=(4,), loss="softmax_cross_entropy",
        optimizer=cv.Adam(1e-2, schedule=cv.Cosine(100)), batch_size=8, workers=1, seed=0,
    )  # fmt: skip
    needed = [*warm.kernels_of(model.program), *warm.loops()]
    return {symbol: made for f in needed for symbol, made in f.objects(host()).items()}


@pytest.fixture
def wheel(package: Path, functions: dict[str, _native.ObjectCode]) -> Path:
    """A copy of the package with an archive for this machine's level."""
    (package / "objects").mkdir(exist_ok=True)
    warm.write_archive(package / "objects" / f"{host().cpu}.zip", functions, host())
    return package


# ---------------------------------------------------------------- code of a wheel
@pytest.fixture(scope="module")
def shipped() -> set[str]:
    return {f.symbol for f in warm.everything()}


@pytest.mark.parametrize("dtype", warm.DTYPES)
@pytest.mark.parametrize("name", ["mlp", "googlenet", "mobilenet_v2", "unet", *cv.zoo.SEQUENCES])
def test_a_wheel_has_what_networks_need(name: str, dtype: str, shipped: set[str]) -> None:
    program = cv.compile(memory.graph_of(name), batch_size=1, dtype=dtype, workers=1)
    assert {f.symbol for f in warm.kernels_of(program)} <= shipped


@pytest.mark.parametrize("layer", [nn.RNN, nn.GRU, nn.LSTM, lambda n: nn.Linear(n) >> nn.TransformerEncoderLayer(2)])
@pytest.mark.parametrize("labels", [False, True])
def test_a_wheel_has_what_sequences_of_unequal_lengths_need(layer: Any, labels: bool, shipped: set[str]) -> None:
    net, recurrent = layer(4) >> nn.Linear(3), layer in (nn.RNN, nn.GRU, nn.LSTM)
    loss = "softmax_cross_entropy" if labels else "mse"
    graph = cv.build_graph(net, (5, 2), loss, "adam", lengths=True, stream=recurrent)
    assert {f.symbol for f in warm.kernels_of(cv.compile(graph, batch_size=4))} <= shipped


def test_a_wheel_trains_without_numba_or_a_cache_to_the_bits_of_a_checkout(wheel: Path, tmp_path: Path) -> None:
    numba, files, losses = train(wheel.parent, tmp_path / "empty")
    assert not numba and not files
    checkout = Path(cv.__file__).parents[1]
    assert train(checkout, _native.cache_root())[2] == losses


def test_of_an_edited_wheel_what_is_made_of_the_edit_is_compiled(wheel: Path, tmp_path: Path) -> None:
    losses = train(wheel.parent, tmp_path / "empty")[2]
    source = wheel / "kernels_cpu" / "losses.py"
    source.write_text(source.read_text() + "\n# edited\n")
    _, files, again = train(wheel.parent, tmp_path / "cache")
    assert files and all(re.search("softmax_cross_entropy|_mean_|accuracy", name) for name in files)
    assert again == losses


def test_a_damaged_archive_is_as_none(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = wheel / "objects" / f"{host().cpu}.zip"
    whole, rng = path.read_bytes(), random.Random(0)
    with zipfile.ZipFile(path) as archive:
        members = archive.namelist()
    monkeypatch.setattr(_shipped, "OBJECTS", path.parent)

    def bodies() -> list[dict[str, bytes]]:
        forget()
        return [_shipped._member(host().cpu, name) if name in _shipped._names(host().cpu) else {} for name in members]

    right = bodies()
    assert all(right) and sum(map(len, right)) >= 20
    cut = [whole[: rng.randrange(len(whole))] for _ in range(20)]
    flipped = [whole[:at] + bytes([whole[at] ^ 1 << k % 8]) + whole[at + 1 :] for k in range(300)
               for at in [rng.randrange(len(whole))]]  # fmt: skip
    noticed = 0
    for data in (b"", b"no zip file", bytes(len(whole)), *cut, *flipped):
        path.write_bytes(data)
        found = bodies()
        assert all(some in (one, {}) for one, some in zip(right, found))
        noticed += found != right
    assert noticed > 250
    path.write_bytes(whole)
    monkeypatch.setitem(sys.modules, "lzma", None)  # a Python without it
    assert not any(bodies())
    forget()


def test_kernels_call_no_function_of_libm_whose_bits_depend_on_the_processor() -> None:
    """Equal code then gives equal bits on all processors of a level.  The remainder is exact."""
    exact = {"fmod", "memset", "memcpy", "pread", "pwrite", "posix_fadvise", "sync_file_range"}
    called = {}
    for function in warm.everything():
        for symbol, made in function.objects(host()).items():
            known = _native.symbols(made.code)
            assert known is not None
            called |= {name: symbol for name in known.wanted if not name.startswith("calcvm_")}
    of_loops = {f.symbol for f in warm.loops()}
    assert {name: symbol for name, symbol in called.items() if symbol not in of_loops and name not in exact} == {}
    arithmetic = {"exp", "log", "pow", "sin", "cos", "tanh"}
    assert not {name.rstrip("f") for name in called} & arithmetic
    assert len(called) > 20


# ---------------------------------------------------------------- levels
HASWELL = dict.fromkeys([f for name in ("x86-64-v2", "x86-64-v3") for f in LEVELS["x86_64"][name]], True)


def test_a_processor_has_the_highest_level_of_which_it_has_all() -> None:
    assert levels("x86_64", HASWELL | {"sha": True})[-1] == "x86-64-v3"
    assert levels("x86_64", HASWELL | {"fma": False})[-1] == "x86-64-v2"
    assert levels("x86_64", HASWELL | dict.fromkeys(LEVELS["x86_64"]["x86-64-v4"], True))[-1] == "x86-64-v4"
    assert levels("x86_64", dict.fromkeys(LEVELS["x86_64"]["x86-64-v4"], True)) == ["x86-64"]
    assert levels("aarch64", {}) == ["generic"] and levels("riscv64", HASWELL) == []


def test_processors_of_a_level_are_one_target(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for cpu, triple, more in (
        ("haswell", "x86_64-unknown-linux-gnu", {}),
        ("znver3", "x86_64-conda-linux-gnu", {"sha": True}),
    ):
        with monkeypatch.context() as m:
            m.setattr(_target.llvm, "get_host_cpu_features", lambda more=more: HASWELL | more)
            m.setattr(_target.llvm, "get_host_cpu_name", lambda cpu=cpu: cpu)
            m.setattr(_target.llvm, "get_process_triple", lambda triple=triple: triple)
            found.append(_target._host.__wrapped__(None))
    assert found[0] == found[1] == of_level("x86_64", "x86-64-v3")


@pytest.mark.parametrize(
    "named, message",
    [
        ("x86-64-v9", "'x86-64-v9', which is unknown: take one of x86-64, x86-64-v2, x86-64-v3, native, or leave it unset"),
        ("x86-64-v4", "'x86-64-v4', which this processor lacks: take one of x86-64, x86-64-v2, x86-64-v3, native"),
    ],
)  # fmt: skip
def test_a_level_that_is_none_of_the_processor_is_refused(
    named: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Found(dict):
        pass

    monkeypatch.setattr(_target.llvm, "get_host_cpu_features", lambda: Found(HASWELL))
    monkeypatch.setattr(_target.llvm, "get_process_triple", lambda: "x86_64-unknown-linux-gnu")
    with pytest.raises(cv.CalcError, match=message):
        _target._host.__wrapped__(named)


@pytest.mark.skipif(not host().x86, reason="levels of x86")
def test_one_can_name_a_level_or_the_processor_itself() -> None:
    said = "from calcvm.kernels_cpu._target import host; print(host().cpu)"
    v2, native = "x86-64-v2", _target.llvm.get_host_cpu_name()
    for named, cpu in ((v2, v2), (" X86_64_v2 ", v2), ("native", native), ("", host().cpu)):
        environment = {**os.environ, "CALCVM_CPU": named}
        done = subprocess.run([sys.executable, "-c", said], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout == f"{cpu}\n"


# ---------------------------------------------------------------- ahead
def test_what_is_compiled_ahead_serves_where_nothing_can_be_written(tmp_path: Path) -> None:
    """As when an image is built: later there is no home, no folder for temporary files, and the cache is another user's."""
    model = cv.Model(
        nn.Linear(16) >> nn.Tanh() >> nn.Linear(3), input_shape=(4,), loss="softmax_cross_entropy", batch_size=8,
        optimizer=cv.Adam(1e-2), workers=1, seed=0,
    )  # fmt: skip
    path, cache = tmp_path / "small.calc", tmp_path / "cache"
    model.save(path)
    environment = {**os.environ, "CALCVM_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "calcvm", "warm", str(path)]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert int(said.split()[1]) > 20 and str(cache) in said
    before = sorted(cache.rglob("*"))
    for folder in cache.iterdir():
        folder.chmod(0o500)
    nowhere = str(tmp_path / "nowhere")
    given = dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME"), nowhere)
    numba, _, losses = train(Path(cv.__file__).parents[1], cache, str(path), **given)
    assert not numba and np.isfinite(losses).all() and sorted(cache.rglob("*")) == before
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert said.startswith("compiled 0 functions")
    (tmp_path / "file").touch()
    done = subprocess.run(
        command, env={**environment, "CALCVM_CACHE_DIR": str(tmp_path / "file")}, capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stderr.startswith(f"calcvm: {tmp_path / 'file'}: cannot be written")

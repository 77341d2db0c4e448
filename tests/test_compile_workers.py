"""Kernels compiled in processes beside this one: the same code, nothing left behind, and without them it goes too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import llvmlite
import pytest

from calcvm.kernels_cpu import _compile_workers

SOURCES = Path(_compile_workers.__file__).parents[2]
PROGRAM = """
import contextlib, json, os, pathlib, signal, sys, time, warnings
before = sys.executable
sys.executable = os.environ.get("EXECUTABLE", before)
import numpy as np
import calcvm as cv
from calcvm.kernels_cpu import _compile_workers
from calcvm.vm.run.device import device_of

g = cv.CalcGraph()
x = g.placeholder("x", (None, 6))
with g.path("run") as run:
    y = cv.tanh(cv.exp(x) * cv.sigmoid(x)) - cv.square(x)
program = cv.compile(g, batch_size=4, workers=1)

def children():
    found = []
    for task in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has ended since
            found += map(int, (task / "children").read_text().split())
    return found

def done(**more):
    table = device_of("cpu").prepare(program)
    assert table.addresses.any()
    print(json.dumps({"numba": "numba" in sys.modules, "children": children(), **more}))
"""
KERNELS = ("exp_fwd", "mul_fwd", "sigmoid_fwd", "square_fwd", "sub_fwd", "tanh_fwd")
NEVER = "from calcvm import kernels_cpu; kernels_cpu.FEW = 1 << 30\n"  # all in one process


def run(cache, text="done()", **environment):
    """Answers of a program in a new process, what it has written to the terminal, and the files in its cache."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "CALCVM_CACHE_DIR": str(cache), **environment}
    made = subprocess.run([sys.executable, "-c", PROGRAM + text], env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    files = [path for path in Path(cache).rglob("*") if path.is_file()] if Path(cache).is_dir() else []
    assert all(path.suffix == ".o" for path in files)
    return json.loads(made.stdout), made.stderr, {path.relative_to(cache): path.read_bytes() for path in files}


needs_cores = pytest.mark.skipif(
    _compile_workers.n_cores() < 2 or _compile_workers.interpreter() is None, reason="one core alone"
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process makes."""
    answer, error, files = run(tmp_path_factory.mktemp("cache"), NEVER + "done()")
    assert (answer, error) == ({"numba": True, "children": []}, "")
    return files


@needs_cores
def test_builders_make_the_code_that_one_process_makes_and_it_does_not_import_numba(alone, tmp_path):
    answer, error, files = run(tmp_path)
    assert (answer, error) == ({"numba": False, "children": []}, "")
    assert {path.stem for path in alone} == {f"calcvm_{name}_float32_cpu" for name in KERNELS}
    loop = [path for path in files if path.stem == "calcvm_run_rows_any_cpu"]
    assert len(loop) == 1
    assert {path: code for path, code in files.items() if path not in loop} == alone


@pytest.mark.parametrize("script", [None, "exit 3", "echo nonsense; cat > /dev/null", "kill -9 $$"])
def test_where_no_builder_can_be_had_the_process_compiles_by_itself(script, alone, tmp_path, whole):
    """An application with an interpreter inside; a Python that does not start, does not know us, or dies."""
    if script and script != "kill -9 $$" and not whole:
        pytest.skip("takes --whole")
    executable = tmp_path / ("python3" if script else "application")
    executable.write_text(f"#!/bin/sh\n{script or 'touch ' + str(tmp_path / 'started')}\n")
    executable.chmod(0o755)
    answer, error, files = run(tmp_path / "cache", EXECUTABLE=str(executable))
    assert (answer, error) == ({"numba": True, "children": []}, "")
    assert files == alone
    assert not (tmp_path / "started").exists()


@needs_cores
def test_builders_import_what_the_process_imports(tmp_path):
    """Where the environment names another llvmlite than the interpreter's own, its objects would be none of ours."""
    package, marks = tmp_path / "elsewhere" / "llvmlite", tmp_path / "marks"
    package.mkdir(parents=True)
    marks.mkdir()
    package.joinpath("__init__.py").write_text(
        f"import os\nopen({str(marks)!r} + f'/{{os.getpid()}}', 'w').close()\n"
        f"__file__ = {llvmlite.__file__!r}\n__path__ = [os.path.dirname(__file__)]\nexec(open(__file__).read())\n"
    )
    answer, error, _ = run(tmp_path / "cache", PYTHONPATH=os.pathsep.join([str(package.parent), str(SOURCES)]))
    assert (answer, error) == ({"numba": False, "children": []}, "")
    assert len([*marks.iterdir()]) > 1, "only the process itself"


@needs_cores
def test_what_a_builder_has_to_say_is_said_here(alone, tmp_path):
    """It answers without code to what fails there or warns: here an interpreter that cannot import Numba."""
    code = "from calcvm import helper_process as a; a.START = 'import sys; sys.modules[\"numba\"] = None\\n' + a.START; done()"
    answer, error, files = run(tmp_path, code)
    assert (answer, error) == ({"numba": True, "children": []}, "")
    assert files == alone


@needs_cores
def test_a_cache_that_cannot_be_written_is_told_of_as_ever(tmp_path):
    (tmp_path / "file").touch()
    answer, error, _ = run(tmp_path / "file")
    assert answer == {"numba": False, "children": []}
    assert error.count("CalcWarning: compiled code cannot be kept in") == 1


INTERRUPTED = """
signal.signal(signal.SIGALRM, signal.default_int_handler)
most = [0]
begin = _compile_workers.Worker.__init__
def counted(worker, *given):
    begin(worker, *given)
    most[0] += 1
_compile_workers.Worker.__init__ = counted
signal.setitimer(signal.ITIMER_REAL, float(os.environ["AFTER"]))
try:
    device_of("cpu").prepare(program)
    interrupted = False
except KeyboardInterrupt:
    interrupted = True
signal.setitimer(signal.ITIMER_REAL, 0)
end = time.monotonic() + 10
while children() and time.monotonic() < end:
    time.sleep(0.01)
left = children()
done(interrupted=interrupted, left=left, workers=most[0])
"""


@needs_cores
def test_an_interrupt_leaves_no_builder_and_no_half_of_a_file(alone, tmp_path, whole):
    heard = 0
    for after in [0.1 * n for n in range(1, 20)] if whole else [0.3, 1.0]:
        answer, error, files = run(tmp_path / f"{after}", INTERRUPTED, AFTER=str(after))
        assert (answer["left"], answer["children"], error) == ([], [], "")
        assert alone.items() <= files.items()
        heard += answer["interrupted"]
    assert heard


@needs_cores
def test_a_process_that_ends_at_once_after_an_interrupt_leaves_nothing(tmp_path):
    code = INTERRUPTED.replace("end = time", "print(json.dumps(children())); raise SystemExit\nend = time")
    pids, error, _ = run(tmp_path, code, AFTER="0.5")
    assert not error and not [pid for pid in pids if Path(f"/proc/{pid}").exists()]

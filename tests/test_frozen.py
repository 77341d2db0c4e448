"""Applications in which calcvm has no files of its own: frozen, zipped, bytecode alone, and an interpreter with other flags."""

from __future__ import annotations

import compileall
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import calcvm as cv
from calcvm.__pyinstaller import get_hook_dirs
from calcvm.kernels_cpu import FAMILIES, _native
from calcvm.kernels_cpu._target import host

ROOT = Path(__file__).parents[1]
PACKAGE = Path(cv.__file__).parent
MODULES = [_native.modules_of(family) for family in FAMILIES] + [("vm.run.loop",), ("vm.calls.compiled",)]
README = next(
    block for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S) if ".fit(" in block
)
APP = f"""{README}
import json, sys
for _ in range(40):  # then steps are compiled methods
    loss = model.step(X[:50], y[:50])
cv.plan(cv.build_graph(net, (2,), "mse", "adam"), batch_size=50).html("plan.html")
try:
    model.to_python("script.py")
    script = "written"
except cv.CalcError as error:
    script = str(error)
print(json.dumps({{"accuracy": float(accuracy), "loss": float(loss), "numba": "numba" in sys.modules, "script": script}}))
"""
KEYS = """
import json, sys
import calcvm
from calcvm.kernels_cpu import _native
from calcvm.kernels_cpu._target import host
folders = [_native.folder(tuple(modules), host()).name for modules in json.loads(sys.argv[1])]
print(json.dumps([calcvm.__file__, "numba" in sys.modules, folders]))
"""


def of_text():
    return [_native.folder(modules, host()).name for modules in MODULES]


def ran(command, folder, **environment):
    """The last line that a process says, as JSON."""
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# ---------------------------------------------------------------- installed in other ways
def bytecode(folder):
    """A copy of the package without sources."""
    shutil.copytree(PACKAGE, folder / "calcvm", ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    compileall.compile_dir(folder, legacy=True, quiet=1, optimize=0)
    for path in folder.rglob("*.py"):
        path.unlink()
    return folder


def zipped(folder, archive, **more):
    """An archive of what is in a folder, without what Python has written there, and of texts by their names."""
    with zipfile.ZipFile(archive, "w") as file:
        for path in folder.rglob("*"):
            if "__pycache__" not in path.parts:
                file.write(path, path.relative_to(folder))
        for name, text in more.items():
            file.writestr(name, text)
    return archive


@pytest.fixture(scope="module", params=["zip", "bytecode", "zip of bytecode"])
def installed(request, tmp_path_factory, whole):
    """What of ``sys.path`` has calcvm, and whether its text is there."""
    if request.param != "zip of bytecode" and not whole:
        pytest.skip("takes --whole")
    folder = tmp_path_factory.mktemp("installed")
    if request.param == "zip":
        return zipped(PACKAGE.parent, folder / "calcvm.zip"), True
    of = bytecode(folder / "bytecode")
    return (of if request.param == "bytecode" else zipped(of, folder / "calcvm.zip")), False


def test_compiled_code_has_a_key_wherever_the_package_is(installed, tmp_path):
    """That of its text where that is there; else of its bytecode, the same in each process."""
    path, text = installed
    command = [sys.executable, "-c", KEYS, json.dumps(MODULES)]
    found = [ran(command, tmp_path, PYTHONPATH=str(path), PYTHONHASHSEED=seed) for seed in ("1", "2")]
    assert found[0] == found[1]
    where, numba, folders = found[0]
    assert where.startswith(str(path)) and not numba
    assert (folders == of_text()) == text
    assert len(set(folders)) == len(set(of_text()))


def test_an_installation_without_files_trains(installed, tmp_path, whole):
    """A zipped one runs what is in the cache of any other; bytecode compiles its own, once."""
    path, text = installed
    if not text and not whole:
        pytest.skip("takes --whole")
    environment = {"PYTHONPATH": str(path)} | ({} if text else {"CALCVM_CACHE_DIR": str(tmp_path / "cache")})
    (tmp_path / "app.py").write_text(APP)
    first, then = (ran([sys.executable, "app.py"], tmp_path, **environment) for _ in range(2))
    assert first["accuracy"] > 0.95 and {**first, "numba": False} == then
    assert then["script"] == "written" if text else "this application lacks the source" in then["script"]


def test_a_zipapp_runs_the_program_of_the_readme(tmp_path):
    main = "import calcvm; assert '.pyz' in calcvm.__file__, calcvm.__file__\n" + APP
    app = zipped(PACKAGE.parent, tmp_path / "app.pyz", **{"__main__.py": main})
    found = ran([sys.executable, app.name], tmp_path)
    assert found["accuracy"] > 0.95 and found["script"] == "written"


def test_keys_by_bytecode_follow_the_imports_that_keys_by_text_follow():
    for name, (_, imports) in _native.closure(tuple(m for modules in MODULES for m in modules)).items():
        source = PACKAGE.joinpath(*name.split(".")).with_suffix(".py")
        _, statements = _native.code_of(compile(source.read_text(), "elsewhere", "exec"))
        found = set()
        for base, names in statements:
            inside = {f"{base}.{n}" for n in names if _native._file(f"{base}.{n}")}
            found |= {base} if _native._file(base) else inside or {base}
        assert tuple(sorted(found)) == imports, name


@pytest.mark.parametrize("flags", ["-OO", "-O", "-I", "-S", "-E", "-B", "-X utf8", "-X dev", "-s -P"])
def test_the_program_of_the_readme_runs_with_flags_of_the_interpreter(flags, tmp_path, whole):
    if flags != "-OO" and not whole:
        pytest.skip("takes --whole")
    if "-P" in flags and sys.version_info < (3, 11):
        pytest.skip("of Python 3.11")
    (tmp_path / "app.py").write_text(f"import sys; sys.path[:0] = {sys.path!r}\n{APP}")
    found = ran([sys.executable, *flags.split(), "app.py"], tmp_path)
    assert found["accuracy"] > 0.95 and found["script"] == "written"


# ---------------------------------------------------------------- frozen
FROZEN = f"""
import multiprocessing, pathlib, sys

def child(seed):
    import calcvm as cv, numpy as np
    from calcvm import nn
    model = cv.Model(nn.Linear(2), input_shape=(3,), loss="mse", optimizer="adam", batch_size=4, seed=seed)
    return float(model.step(np.ones((4, 3)), np.ones((4, 2))))

if __name__ == "__main__":
    multiprocessing.freeze_support()
    with open("started", "a") as file:
        print("started", file=file)
    import calcvm as cv
    for how in ("spawn", "forkserver"):
        with multiprocessing.get_context(how).Pool(2) as pool:
            assert pool.map(child, [1, 1, 1]) == [child(1)] * 3
    deep = cv.nn.Linear(64) >> cv.nn.Tanh()
    for _ in range(4):
        deep = deep >> cv.nn.Linear(64) >> cv.nn.Tanh()
    deep = cv.build_graph(deep, (64,), "mse", "adam")
    room = int(0.9 * cv.plan(deep, batch_size=512, workers=1).heap_bytes)
    cv.plan(deep, batch_size=512, workers=1, memory=room, solver_seconds=3)
{"".join("    " + line + chr(10) for line in APP.splitlines())}
"""
LARGE = (
    "torch",
    "sklearn",
    "matplotlib",
    "ray",
    "optuna",
    "pandas",
    "ortools",
    "IPython",
    "pytest",
    "hypothesis",
    "numba_cuda",
)


@pytest.mark.time_limit(1200)
@pytest.mark.slow
def test_an_application_that_pyinstaller_froze_trains(tmp_path, whole):
    """With the package's hook, a cold and a warm cache; then without sources; its processes do not start it anew."""
    if not whole:
        pytest.skip("takes --whole: a minute")
    (tmp_path / "app.py").write_text(FROZEN)
    command = [sys.executable, "-m", "PyInstaller", "--noconfirm", "--log-level", "ERROR", "--paths", PACKAGE.parent]
    command += [part for folder in get_hook_dirs() for part in ("--additional-hooks-dir", folder)]
    command += [part for name in LARGE for part in ("--exclude-module", name)]
    done = subprocess.run([*map(str, command), "app.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    app, inside = tmp_path / "dist" / "app" / "app", tmp_path / "dist" / "app" / "_internal" / "calcvm"
    for sources in (True, False):
        if not sources:
            for path in inside.rglob("*.py"):
                path.unlink()
        cache = {"CALCVM_CACHE_DIR": str(tmp_path / f"cache {sources}"), "PYTHONPATH": ""}
        first, then = (ran([app], tmp_path, **cache) for _ in range(2))
        assert first["accuracy"] > 0.95 and {**first, "numba": False} == then
        assert then["script"] == "written" if sources else "this application lacks the source" in then["script"]
        assert list((tmp_path / f"cache {sources}").rglob("*.o"))
    assert (tmp_path / "started").read_text() == "started\n" * 4

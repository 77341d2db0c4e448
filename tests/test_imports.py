"""The import arrows of docs/architecture.md: which room of src/calcvm may import which, and no module in a circle."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import rooms
from tools.rooms import ROOT, imports, module_of, room_of

VM = {"vm.program", "vm.run", "vm.memory", "vm.calls"}
# room (a folder or a module of src/calcvm): (rooms of ours, packages of others) that it may import.
# "" is the package itself, the public API.  A room may always import itself and the standard library.
ALL_LOWER = {
    "errors",
    "files",
    "checks",
    "hints",
    "ops",
    "graph",
    "functions",
    "gathers",
    "sequences",
    "gradients",
    "images",
    "nn",
    "init",
    "optim",
    "lowering",
    "planner",
    "progress",
    "tables",
    "lazy",
    "frozen",
} | VM
ARROWS: dict[str, tuple[set[str], set[str]]] = {
    "errors": (set(), set()),
    "checks": ({"errors"}, set()),
    "hints": ({"errors"}, set()),
    "dtypes": ({"errors", "checks", "ops"}, {"numpy"}),
    "lazy": (set(), set()),
    "files": ({"errors", "checks", "system"}, set()),
    "tables": ({"errors"}, {"pandas"}),
    "without_signals": (set(), set()),
    "cgroups": (set(), set()),
    "system": ({"errors", "cgroups"}, set()),
    "teams": ({"errors", "checks", "system"}, set()),
    "frozen": (set(), {"typing_extensions"}),
    "helper_process": ({"system"}, set()),
    "formulas": ({"frozen"}, set()),
    "kernel": (set(), {"numpy", "llvmlite"}),
    "kernels_shared": ({"formulas", "kernel"}, {"numpy"}),
    "ops": ({"equations", "errors", "formulas", "lazy", "frozen"}, set()),
    "init": ({"errors", "checks", "hints", "ops", "frozen"}, {"numpy"}),
    "optim": ({"errors", "checks", "hints", "ops", "frozen"}, {"numpy"}),
    # functions: types of the methods that it sets
    "graph": ({"errors", "checks", "hints", "dtypes", "ops", "init", "optim", "tables"}, {"numpy"}),
    "functions": ({"errors", "checks", "dtypes", "ops", "graph"}, {"numpy"}),
    "sequences": ({"checks", "equations", "errors", "ops", "graph", "functions"}, set()),  # equations: users' cells
    "images": ({"errors", "checks", "ops", "graph"}, set()),
    "gathers": ({"errors", "checks", "ops", "graph", "functions"}, {"numpy"}),
    "gradients": ({"errors", "checks", "ops", "graph", "functions"}, set()),
    "nn": (
        {
            "errors",
            "checks",
            "hints",
            "ops",
            "init",
            "optim",
            "graph",
            "functions",
            "gathers",
            "images",
            "sequences",
            "frozen",
            "equations",
        },
        {"numpy"},
    ),
    "indexed": (  # above the graph; `equations` knows none, so that the table may say its rows in its language
        {"checks", "equations", "errors", "formulas", "functions", "graph", "ops", "sequences"},
        {"numpy"},
    ),
    "zoo": ({"checks", "errors", "hints", "init", "nn"}, set()),
    "planner": (
        {"errors", "files", "checks", "hints", "lazy", "ops", "frozen", "system", "tables", "helper_process"},
        {"numpy", "matplotlib", "scipy", "ortools"},
    ),
    "lowering": ({"errors", "ops", "graph", "optim"}, {"numpy"}),
    "equations": ({"errors", "formulas", "lazy", "frozen"}, {"numpy"}),
    # kernels import equations: those of a declared operator follow from the equation of which `ops` makes its row
    "kernels_cpu": (
        {"equations", "errors", "formulas", "helper_process", "kernel", "kernels_shared", "system", "without_signals"},
        {"numba", "numpy", "llvmlite"},
    ),
    "kernels_cuda": (
        {"equations", "errors", "formulas", "kernel", "kernels_shared", "lazy", "without_signals"},
        {"numba", "numba_cuda", "numpy", "llvmlite", "greenlet"},
    ),
    "testing": ({"errors", "without_signals"}, {"numpy", "greenlet"}),
    "vm": (set(), set()),
    "vm.program": ({"equations", "errors", "files", "checks", "lazy", "ops", "init", "tables"}, {"numpy"}),
    "vm.run": (
        {
            "errors",
            "formulas",
            "files",
            "checks",
            "dtypes",
            "lazy",
            "ops",
            "init",
            "kernels_cpu",
            "kernels_cuda",
            "kernels_shared",
            "system",
            "teams",
            "testing",
            "without_signals",
            "vm.program",
        },
        {"numba", "numpy", "llvmlite"},
    ),
    "vm.memory": (
        {"errors", "files", "checks", "hints", "ops", "system", "tables", "vm.program", "vm.run"},
        {"numpy", "typing_extensions"},
    ),
    "vm.calls": (
        {"errors", "hints", "kernels_cpu", "ops", "system", "vm.run", "vm.memory"},
        {"numpy", "numba", "llvmlite"},
    ),
    "script": (
        {
            "equations",
            "errors",
            "files",
            "checks",
            "formulas",
            "graph",
            "lowering",
            "ops",
            "frozen",
            "vm.program",
            "vm.run",
        },
        {"numpy"},
    ),  # vm.run: a type
    "graph_text": (
        {"errors", "checks", "hints", "dtypes", "ops", "init", "optim", "tables", "graph", "gradients"},
        {"numpy"},
    ),
    "progress": ({"tables"}, {"rich", "IPython"}),
    "compiler": (
        {
            "errors",
            "checks",
            "ops",
            "graph",
            "lowering",
            "planner",
            "kernels_cuda",
            "progress",
            "teams",
            "without_signals",
        }
        | VM,
        {"typing_extensions"},
    ),
    "edge": (
        {
            "errors",
            "files",
            "checks",
            "formulas",
            "frozen",
            "helper_process",
            "kernel",
            "kernels_cpu",
            "ops",
            "planner",
            "tables",
        }
        | VM,
        {"numpy", "llvmlite"},
    ),
    "model": (
        ALL_LOWER | {"compiler", "edge", "frontends", "script"},
        {"numpy", "onnx", "pandas", "matplotlib", "typing_extensions"},
    ),
    "fleet": (
        {"errors", "checks", "hints", "graph", "nn", "ops", "compiler", "model", "progress", "tables"} | VM,
        {"numpy", "typing_extensions"},
    ),
    "split_model": (
        {
            "errors",
            "checks",
            "hints",
            "ops",
            "graph",
            "lowering",
            "planner",
            "kernels_cuda",
            "tables",
            "frozen",
            "compiler",
            "model",
        }
        | {"system", "without_signals"}
        | VM,
        {"numpy"},
    ),
    "warm": ({"errors", "kernels_cpu", "ops"} | VM, set()),
    "quantization": ({"errors", "checks", "functions", "graph", "ops", "compiler", "model"}, {"numpy"}),
    "frontends": (
        {
            "errors",
            "checks",
            "dtypes",
            "frozen",
            "functions",
            "gathers",
            "graph",
            "hints",
            "images",
            "indexed",
            "lazy",
            "nn",
            "ops",
            "sequences",
        },
        {"keras", "numpy", "onnx", "sklearn", "torch"},
    ),
    "onnx": ({"errors", "frontends", "model"}, {"numpy", "onnx"}),
    "ensemble": ({"errors", "checks", "hints", "fleet", "model", "ops", "vm.program", "vm.memory"}, {"numpy"}),
    "exploration": (
        {"errors", "files", "checks", "hints", "graph", "model", "fleet", "ensemble", "progress", "tables"} | VM,
        {"numpy", "optuna", "cmaes", "ray", "matplotlib"},
    ),
    "sklearn": (ALL_LOWER | {"compiler", "model", "fleet", "system", "teams"}, {"numpy", "scipy", "sklearn", "joblib"}),
    "operators": ({"errors", "formulas", "ops", "kernels_cpu", "kernels_cuda"}, set()),
    "data": ({"", "errors", "tables"}, {"numpy", "pandas", "sklearn"}),
    "cli": ({"", "errors", "commands", "report"}, {"typer", "rich"}),
    "report": ({"", "errors", "kernels_cpu", "system", "vm.run"}, set()),
    "commands": (
        {"", "errors", "files", "data", "kernels_cpu", "model", "nn", "report", "vm.program", "vm.run", "warm"},
        {"numpy", "typer", "matplotlib"},
    ),
    "__main__": ({"cli"}, set()),
    "__pyinstaller": (set(), {"PyInstaller"}),
    "": (
        ALL_LOWER
        | {
            "compiler",
            "edge",
            "split_model",
            "indexed",
            "model",
            "fleet",
            "ensemble",
            "exploration",
            "frontends",
            "graph_text",
            "data",
            "operators",
            "quantization",
            "script",
            "teams",
            "zoo",
        },
        set(),
    ),
}


def violations(root: Path) -> list[str]:
    """Every import below ``root`` that ARROWS does not allow, as ``file:line: reason``."""
    bad = []
    for path in sorted(root.rglob("*.py")):
        room, where = room_of(module_of(path, root), root), path.relative_to(root)
        if room not in ARROWS:
            bad.append(f"{where}: room {room!r} is not in ARROWS")
            continue
        ours, others = ARROWS[room]
        for line, target, _ in imports(path, root):
            top = target.partition(".")[0]
            if top == "calcvm":
                name = room_of(target, root)
                if name != room and name not in ours:
                    bad.append(f"{where}:{line}: {room or 'calcvm'} must not import {target}")
            elif top not in sys.stdlib_module_names and top not in others:
                bad.append(f"{where}:{line}: {room or 'calcvm'} must not import {target}")
    return bad


def test_import_arrows() -> None:
    assert violations(ROOT) == []


def test_no_modules_import_each_other() -> None:
    """Not in functions either, nor for type checkers."""
    assert rooms.circles(ROOT) == []


@pytest.mark.parametrize(
    ("imported", "circles"),
    [
        ({"a": "import calcvm.vm.b", "b": "", "c": "from calcvm.vm import a, b"}, []),
        (
            {"a": "from calcvm.vm import b", "b": "def f():\n    from calcvm.vm.c import x", "c": "from . import a"},
            ["abca"],
        ),
        ({"a": "if TYPE_CHECKING:\n    from calcvm.vm import b", "b": "from calcvm.vm import a"}, ["aba"]),
        ({"a": "if TYPE_CHECKING:\n    pass\nelse:\n    from calcvm.vm import b", "b": "import calcvm.vm.a"}, ["aba"]),
    ],
)
def test_a_circle_is_found(tmp_path: Path, imported: dict[str, str], circles: list[str]) -> None:
    (tmp_path / "vm").mkdir()
    for name, text in imported.items():
        (tmp_path / "vm" / f"{name}.py").write_text(text)
    assert ["".join(m.rpartition(".")[2] for m in way) for way in rooms.circles(tmp_path)] == circles


def test_the_picture_of_the_rooms_is_up_to_date() -> None:
    assert rooms.TARGET.read_text() == rooms.picture(), "run `make docs`"


@pytest.mark.parametrize(
    ("file", "line", "caught"),
    [
        ("ops/broken.py", "from calcvm.planner import plan", "ops must not import calcvm.planner"),
        ("ops/broken.py", "import numba", "ops must not import numba"),
        ("ops/broken.py", "from calcvm import Model", "ops must not import calcvm.Model"),
        ("planner/broken.py", "def f():\n    from calcvm import kernels_cpu", "calcvm.kernels_cpu"),
        (
            "planner/broken.py",
            "import calcvm.vm.program.encoding as e",
            "planner must not import calcvm.vm.program.encoding",
        ),
        ("planner/deep/broken.py", "from ...vm import run", "planner must not import calcvm.vm"),
        ("kernels_cpu/broken.py", "from ..ops.spec import OPS", "kernels_cpu must not import calcvm.ops.spec"),
        ("vm/run/broken.py", "import torch", "vm.run must not import torch"),
        ("vm/run/broken.py", "from calcvm.vm.memory import heap", "vm.run must not import calcvm.vm.memory"),
        (
            "vm/run/cuda/broken.py",
            "def f():\n    from ...memory import heap",
            "vm.run must not import calcvm.vm.memory",
        ),
        (
            "vm/program/broken.py",
            "if TYPE_CHECKING:\n    from ..run import job",
            "vm.program must not import calcvm.vm.run",
        ),
        ("new_room/broken.py", "import math", "room 'new_room' is not in ARROWS"),
        ("vm/program/fine.py", "import numpy\nfrom calcvm.ops import spec\nfrom . import encoding", None),
        ("vm/memory/fine.py", "from calcvm.vm.program import encoding\nfrom ..run.job import LINE", None),
    ],
)
def test_a_forbidden_import_is_caught(tmp_path: Path, file: str, line: str, caught: str | None) -> None:
    for room in ("ops", "planner", "kernels_cpu", "vm", "vm/program", "vm/run", "vm/memory", "vm/calls"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").touch()
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(line + "\n")
    found = violations(tmp_path)
    if caught is None:
        assert found == []
    else:
        assert len(found) == 1 and caught in found[0] and file in found[0]


def test_importing_calcvm_brings_no_optional_package() -> None:
    optional = [
        "scipy",
        "matplotlib",
        "rich",
        "typer",
        "sklearn",
        "torch",
        "jax",
        "onnxruntime",
        "optuna",
        "ray",
        "calcvm.testing",
    ]
    code = f"import calcvm, sys; print([m for m in {optional} if m in sys.modules])"
    # numba imports scipy itself where it is installed, to see whether it is: that much is not ours
    numba = f"import numba, sys; print([m for m in {optional} if m in sys.modules])"
    ours, theirs = (
        set(
            ast.literal_eval(subprocess.run([sys.executable, "-c", c], capture_output=True, check=True).stdout.decode())
        )
        for c in (code, numba)
    )
    assert ours <= theirs


def test_rows_are_named_where_they_are_declared_and_in_one_file_beside():
    """What else must know a row learns it from the table: see `calcvm.lowering.inserted`."""
    from calcvm.ops import ROWS

    names = {name for name in ROWS if re.search("_(fwd|bwd)", name)}
    looked = (*VM, "planner", "lowering", "model", "fleet", "ensemble", "compiler", "graph", "functions")
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        if room_of(module_of(path, ROOT)) in looked and path.name != "inserted.py":
            texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
            found += [(str(path.relative_to(ROOT)), text) for text in texts if isinstance(text, str) and text in names]
    assert not found

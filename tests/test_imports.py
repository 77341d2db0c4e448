"""The import arrows of docs/architecture.md: which room of src/calcvm may import which."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "calcvm"

# room (a folder or a module of src/calcvm): (rooms of ours, packages of others) that it may import.
# "" is the package itself, the public API.  A room may always import itself and the standard library.
ALL_LOWER = {
    "errors",
    "checks",
    "ops",
    "graph",
    "functions",
    "nn",
    "init",
    "optim",
    "lowering",
    "planner",
    "vm",
    "progress",
    "tables",
    "lazy",
}
ARROWS: dict[str, tuple[set[str], set[str]]] = {
    "errors": (set(), set()),
    "checks": ({"errors"}, set()),
    "lazy": (set(), set()),
    "tables": (set(), set()),
    "undisturbed": (set(), set()),
    "formulas": (set(), set()),
    "kernel": (set(), {"numpy", "llvmlite"}),
    "ops": ({"errors", "formulas"}, set()),
    "init": ({"errors", "checks", "ops"}, {"numpy"}),
    "optim": ({"errors", "checks", "ops"}, {"numpy"}),
    "graph": ({"errors", "checks", "ops", "init", "optim", "tables"}, {"numpy"}),
    "functions": ({"errors", "checks", "ops", "graph"}, {"numpy"}),
    "nn": ({"errors", "checks", "ops", "init", "optim", "graph", "functions"}, {"numpy"}),
    "planner": ({"errors", "lazy", "ops", "tables"}, {"numpy", "matplotlib"}),
    "lowering": ({"errors", "ops", "graph", "optim"}, {"numpy"}),
    "kernels_cpu": ({"errors", "formulas", "kernel", "undisturbed"}, {"numba", "numpy", "llvmlite"}),
    "kernels_cuda": (
        {"errors", "formulas", "kernel", "lazy", "undisturbed"},
        {"numba", "numba_cuda", "numpy", "llvmlite", "greenlet"},
    ),
    "vm": (
        {"errors", "checks", "lazy", "ops", "init", "kernels_cpu", "kernels_cuda", "tables"},
        {"numba", "numpy", "llvmlite", "scipy"},
    ),
    "progress": ({"errors", "tables"}, {"rich"}),
    "compiler": (
        {"errors", "checks", "ops", "graph", "lowering", "planner", "vm", "kernels_cuda"},
        {"typing_extensions"},
    ),
    "model": (ALL_LOWER | {"compiler"}, {"numpy"}),
    "fleet": ({"errors", "checks", "compiler", "model", "progress", "tables", "vm"}, {"numpy"}),
    "ensemble": ({"errors", "checks", "model", "ops", "vm"}, {"numpy"}),
    "exploration": (
        {"errors", "checks", "graph", "compiler", "model", "fleet", "ensemble", "progress", "tables", "vm"},
        {"numpy", "optuna", "cmaes", "ray", "matplotlib"},
    ),
    "sklearn": (ALL_LOWER | {"compiler", "model", "fleet"}, {"numpy", "scipy", "sklearn", "joblib"}),
    "operators": ({"errors", "formulas", "ops", "kernels_cpu", "kernels_cuda"}, set()),
    "data": ({"", "errors"}, {"numpy", "sklearn"}),
    "cli": ({"", "errors", "commands"}, {"typer", "rich"}),
    "commands": (
        {"", "errors", "data", "nn", "kernels_cpu", "vm"},
        {"numpy", "typer", "matplotlib"},
    ),  # kernels_cpu, vm: info
    "__main__": ({"cli"}, set()),
    "": (ALL_LOWER | {"compiler", "model", "fleet", "ensemble", "exploration", "data", "operators"}, set()),
}


def room_of(path: Path, root: Path) -> str:
    first = path.relative_to(root).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imports(path: Path, root: Path) -> list[tuple[int, str]]:
    """(line, dotted target) of every import in a file, at any depth; ``calcvm.x`` for our own."""
    package = ("calcvm", *path.relative_to(root).parts[:-1])
    found = []
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            if base == "calcvm":  # from calcvm import ops: the name may be a room
                found += [(node.lineno, f"calcvm.{alias.name}") for alias in node.names]
            else:
                found.append((node.lineno, base))
    return found


def violations(root: Path) -> list[str]:
    """Every import below ``root`` that ARROWS does not allow, as ``file:line: reason``."""
    rooms = ARROWS.keys() | {room_of(p, root) for p in root.rglob("*.py")}
    bad = []
    for path in sorted(root.rglob("*.py")):
        room, where = room_of(path, root), path.relative_to(root)
        if room not in ARROWS:
            bad.append(f"{where}: room {room!r} is not in ARROWS")
            continue
        ours, others = ARROWS[room]
        for line, target in imports(path, root):
            top, _, rest = target.partition(".")
            if top == "calcvm":
                name = rest.partition(".")[0]
                name = name if name in rooms else ""  # from calcvm import Model: the public API
                if name != room and name not in ours:
                    bad.append(f"{where}:{line}: {room or 'calcvm'} must not import {target}")
            elif top not in sys.stdlib_module_names and top not in others:
                bad.append(f"{where}:{line}: {room or 'calcvm'} must not import {target}")
    return bad


def test_import_arrows() -> None:
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "line", "caught"),
    [
        ("ops/broken.py", "from calcvm.planner import plan", "ops must not import calcvm.planner"),
        ("ops/broken.py", "import numba", "ops must not import numba"),
        ("ops/broken.py", "from calcvm import Model", "ops must not import calcvm.Model"),
        ("planner/broken.py", "def f():\n    from calcvm import kernels_cpu", "calcvm.kernels_cpu"),
        ("planner/broken.py", "import calcvm.vm.encoding as e", "planner must not import calcvm.vm.encoding"),
        ("planner/deep/broken.py", "from ...vm import encoding", "planner must not import calcvm.vm"),
        ("kernels_cpu/broken.py", "from ..ops.spec import OPS", "kernels_cpu must not import calcvm.ops.spec"),
        ("vm/broken.py", "import torch", "vm must not import torch"),
        ("new_room/broken.py", "import math", "room 'new_room' is not in ARROWS"),
        ("vm/fine.py", "import numpy\nfrom calcvm.ops import spec\nfrom . import encoding", None),
    ],
)
def test_a_forbidden_import_is_caught(tmp_path: Path, file: str, line: str, caught: str | None) -> None:
    for room in ("ops", "planner", "vm", "kernels_cpu"):
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
    optional = ["scipy", "matplotlib", "rich", "typer", "sklearn", "torch", "jax", "onnxruntime", "optuna", "ray"]
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
    """What else must know a row learns it from the table: see `calcvm.lowering.inserted`; but for former forms of rows."""
    from calcvm.ops import ROWS

    names = {name for name in ROWS if re.search("_(fwd|bwd)", name)}
    rooms = ("vm", "planner", "lowering", "model", "fleet", "ensemble", "compiler", "graph", "functions")
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        if room_of(path, ROOT) in rooms and path.name not in ("inserted.py", "formats.py"):
            texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
            found += [(str(path.relative_to(ROOT)), text) for text in texts if isinstance(text, str) and text in names]
    assert not found

"""Run what depends on arithmetic as on other processors: x86-64-v2, -v3 and -v4, one after the other.

python -m tests.levels [LEVEL ...] [-- PYTEST_ARGS ...]

Code is compiled for each level, and runs on this machine.  By default its own level is left out, which `make test` runs.  A level that
the machine lacks is said to have not run; the exit status is that of the levels that ran.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm

from calcvm.kernels_cpu import _target

LEVELS = _target.LEVELS["x86_64"]

FILES = [  # whose tests compare numbers that kernels compute
    *(f"test_{name}.py" for name in (
        "autodiff", "buffers", "epilogues", "equations", "extremes", "formulas", "gemm", "gradients", "images", "lenet", "losses",
        "math", "minimize", "networks", "operators", "optimizers", "pooling", "recompute", "script", "script_rows", "segmentation",
        "sklearn", "split", "training", "types", "zoo",
    )),
    "kinds/test_graphs.py", "kinds/test_table.py", "kinds/test_wild.py",
]  # fmt: skip


def missing(level: str) -> list[str]:
    """What this machine has not of a level."""
    wanted, features = [*LEVELS], llvm.get_host_cpu_features()
    return [f for name in wanted[: wanted.index(level) + 1] for f in LEVELS[name] if not features.get(f)]


def run(level: str, options: list[str]) -> int:
    """Compile all kernels for a level, and run the files: pytest's exit status."""
    environment = {**os.environ, "CALCVM_CPU": level}
    compiled = subprocess.run([sys.executable, "-m", "calcvm", "warm"], env=environment)
    files = [str(Path(__file__).parent / name) for name in FILES]
    command = [sys.executable, "-m", "pytest", "-q", *files, *options]
    return compiled.returncode or subprocess.run(command, env=environment).returncode


def main(arguments: list[str]) -> int:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    own = next(level for level in reversed(LEVELS) if not missing(level))
    levels, options = arguments[:at] or [level for level in [*LEVELS][1:] if level != own], arguments[at + 1 :]
    said = {}
    for level in levels:
        lacks = missing(level)
        status = None if lacks else run(level, options)
        said[level] = (
            f"NOT RUN: this machine has no {', '.join(lacks)}" if lacks else "passed" if not status else "FAILED"
        )
    print("\n".join(f"{level}: {result}" for level, result in said.items()))
    return int("FAILED" in said.values() or "passed" not in said.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

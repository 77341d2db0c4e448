"""Linking by the compiler that the package ziglang brings (extra ``edge``)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from calcvm.edge.targets import Processor
from calcvm.errors import CalcError, MissingExtra


def linked(code: bytes, processor: Processor, options: Sequence[str], purpose: str) -> bytes:
    """What ``zig cc`` makes of an object.

    Raises
    ------
    MissingExtra : ziglang is not installed.
    CalcError : the linker gives up.
    """
    if find_spec("ziglang") is None:
        raise MissingExtra("ziglang", "edge", purpose)
    with TemporaryDirectory() as folder:
        (Path(folder) / "pack.o").write_bytes(code)
        command = [sys.executable, "-m", "ziglang", "cc", *processor.zig, *options, "pack.o", "-o", "linked"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CalcError(f"{purpose}: the linker has given up: {done.stderr.strip()[-300:]}")
        return (Path(folder) / "linked").read_bytes()

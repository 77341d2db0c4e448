"""Linking by the compiler that the package ziglang brings (extra ``edge``)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from calcvm.errors import CalcError, MissingExtra

LINKED, ARCHIVE = "linked", "pack.a"  # what is made


def linked(files: Mapping[str, bytes], options: Sequence[str], purpose: str) -> bytes:
    """What ``zig cc`` makes of objects and sources (headers, *.h, are found).

    Raises
    ------
    MissingExtra : ziglang is not installed.
    CalcError : the linker gives up.
    """
    sources = [name for name in files if not name.endswith(".h")]
    return _made(files, ["cc", *options, *sources, "-o", LINKED], LINKED, purpose)


def archive(code: bytes, name: str) -> bytes:
    """A static library of one object (errors as of `linked`)."""
    return _made({name: code}, ["ar", "rcsD", ARCHIVE, name], ARCHIVE, "a static library")


def _made(files: Mapping[str, bytes], command: Sequence[str], made: str, purpose: str) -> bytes:
    if find_spec("ziglang") is None:
        raise MissingExtra("ziglang", "edge", purpose)
    with TemporaryDirectory() as folder:
        for name, data in files.items():
            (Path(folder) / name).write_bytes(data)
        done = subprocess.run(
            [sys.executable, "-m", "ziglang", *command], cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise CalcError(f"{purpose}: the linker has given up: {done.stderr.strip()[-300:]}")
        return (Path(folder) / made).read_bytes()

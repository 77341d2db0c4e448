"""Compiled code that a wheel brings: an archive for each level of processors, in calcvm/objects/.

With it the first step needs neither Numba nor a cache.  `tools/wheels.py` makes the archives; a checkout has none.

An archive is a zip file.  A member has the functions of one type that are made of the same modules; it is named after a hash of
these and the target, so that no code is taken which an edit has made old.  Its first line lists their symbols and sizes; then come the
contents of their files, as a cache has them.  A level has 730 functions; their 6.2 MB are compressed to 1.5 MB.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

OBJECTS = Path(__file__).parent.parent / "objects"


def archive_of(level: str) -> Path:
    """The path of a level's archive."""
    return OBJECTS / f"{level}.zip"


def write(path: Path, members: Mapping[tuple[str, str], Mapping[str, bytes]]) -> None:
    """Write an archive: bodies of functions by symbol, by their key and type."""
    import zipfile

    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        for (key, dtype), bodies in sorted(members.items()):
            head = json.dumps({symbol: len(body) for symbol, body in sorted(bodies.items())})
            data = b"".join(body for _, body in sorted(bodies.items()))
            archive.writestr(zipfile.ZipInfo(f"{key}/{dtype}"), head.encode() + b"\n" + data, zipfile.ZIP_LZMA)


def find(level: str, key: str, symbol: str) -> bytes | None:
    """The body of a function's file; None if there is no such archive, member or function, or it is damaged."""
    name = f"{key}/{symbol.rsplit('_', 2)[1]}"
    return _member(level, name).get(symbol) if name in _names(level) else None


@cache
def _names(level: str) -> frozenset[str]:
    """The members of a level's archive."""
    path = archive_of(level)
    return frozenset(_read(path, lambda archive: archive.namelist()) or ()) if path.is_file() else frozenset()


@cache
def _member(level: str, name: str) -> dict[str, bytes]:
    """The bodies of a member by symbol; none if it is damaged."""
    head, _, data = (_read(archive_of(level), lambda archive: archive.read(name)) or b"{}").partition(b"\n")
    found, at = {}, 0
    for symbol, size in json.loads(head).items():
        found[symbol] = data[at : at + size]
        at += size
    return found


def _read(path: Path, what: Callable[[Any], Any]) -> Any:
    """What a function reads in an archive; None if this is damaged, or Python has no LZMA."""
    try:
        from lzma import LZMAError
        from zipfile import BadZipFile, ZipFile
    except ImportError:
        return None
    try:
        with ZipFile(path) as archive:
            return what(archive)
    except (OSError, EOFError, ValueError, NotImplementedError, BadZipFile, LZMAError):
        return None

"""Files that are written whole or not at all: beside their place, flushed, and then renamed into it."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

from calcvm.errors import CalcError, telling
from calcvm.system import set_mode

_TEMPORARY = ".tmp"
MIN_KEPT = 24  # bytes of a name that a temporary one has too


def checked(path: Any) -> Path:
    """The path of a file (CalcError: it is none)."""
    if not isinstance(path, (str, PathLike)) or "\0" in str(path) or not Path(path).name:
        raise CalcError(f"{path!r} is not the path of a file: give a text, a pathlib.Path or an open binary file")
    return Path(path)


def place(path: Any) -> Path:
    """Where the file of a path lies, or will: what a link leads to.

    Raises
    ------
    CalcError : it is no path of a file, or what is there is no plain file (a device, a pipe).
    """
    found = os.path.realpath(checked(path))
    if os.path.exists(found) and not (os.path.isfile(found) or os.path.isdir(found)):
        raise CalcError(f"{path} is a device or a pipe, which a file cannot take the place of: name a file")
    return Path(found)


def write(path: Any, write: Callable[[BinaryIO], object]) -> None:
    """Let ``write`` write the file of a path that a user has given: whole, or the file is as it was.

    Raises
    ------
    FileError : the system refuses, with why and what to do.
    CalcError : it is no path of a file.
    """
    with telling(str(path), "written"):
        replace(place(path), write)


def picture(path: Any, figure: Any, dpi: int) -> None:
    """Write a figure of matplotlib as the suffix of a path says, without one as .png; or to a binary file that is open.

    Raises
    ------
    FileError, CalcError : as `write`; it knows no such format.
    """
    if hasattr(path, "write"):
        figure.savefig(path, dpi=dpi)
        return
    target = checked(path)
    target = target if target.suffix else target.with_name(f"{target.name}.png")
    formats, kind = figure.canvas.get_supported_filetypes(), target.suffix[1:].lower()
    if kind not in formats:
        raise CalcError(f"{path}: no picture is written as {target.suffix!r}; take one of {', '.join(formats)}")
    write(target, lambda file: figure.savefig(file, format=kind, dpi=dpi))


def replace(path: Path, write: Callable[[BinaryIO], object], *, durable: bool = True) -> None:
    """Let ``write`` write a file that takes the place of ``path`` when it ends well; else ``path`` is as it was.

    No context manager: an exception between its beginning and the block would leave the file to whoever keeps the traceback.

    durable : what was written is on the disk before it takes the place, and its place is when the block has ended.
    """
    temporary = _temporary(path)
    try:
        with open(temporary, "xb") as file:
            with suppress(FileNotFoundError):
                set_mode(file, stat.S_IMODE(path.stat().st_mode))  # who may read and write it stays
            write(file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def remove_temporaries(folder: Path) -> None:
    """Remove what writers that were killed left behind; nobody may be writing to the folder."""
    for path in folder.glob(f".*{_TEMPORARY}"):
        path.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    """A name beside a path, no longer than its own where that is long: it fits wherever that does."""
    name, end = os.fsencode(path.name), f".{os.getpid()}.{secrets.token_hex(4)}{_TEMPORARY}"
    kept = name[: max(len(name) - len(end) - 1, MIN_KEPT)].decode(errors="ignore")
    return path.with_name(f".{kept}{end}")


def sync_folder(folder: Path) -> None:
    """Make names given, changed and removed in a folder durable, where the system can."""
    handles: list[int] = []
    try:
        # by C alone: between the call of Python's and the handle's place in a variable a signal would lose it
        handles.extend(map(os.open, (folder,), (os.O_RDONLY,)))
        os.fsync(handles[0])
    except OSError:
        pass
    finally:
        for handle in handles:
            os.close(handle)

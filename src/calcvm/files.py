"""Atomic writes: a file is written beside its place, flushed, and then renamed into it."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

from calcvm.checks import SHOWN, shown
from calcvm.errors import CalcError, telling
from calcvm.system import set_mode

_TEMPORARY = ".tmp"
MIN_KEPT = 24  # bytes of a name that its temporary name keeps, at least


def checked(path: Any) -> Path:
    """The path of a file (CalcError: it is not one)."""
    if not isinstance(path, (str, PathLike)) or "\0" in str(path) or not Path(path).name:
        if isinstance(path, (bytes, bytearray)) and len(path) > SHOWN:
            raise CalcError(f"{shown(path)}: wrap them in io.BytesIO")
        raise CalcError(f"{shown(path)} is not the path of a file: give a text, a pathlib.Path or an open binary file")
    return Path(path)


def place(path: Any) -> Path:
    """The actual place of a path's file, existing or not, with links resolved.

    Raises
    ------
    CalcError : it is not the path of a file, or there is no plain file (but a device or a pipe).
    """
    found = os.path.realpath(checked(path))
    if os.path.exists(found) and not (os.path.isfile(found) or os.path.isdir(found)):
        raise CalcError(f"{path} is a device or a pipe, which a file cannot replace: name a file")
    return Path(found)


def write(path: Any, write: Callable[[BinaryIO], object]) -> None:
    """Let ``write`` write the file of a user's path; if that fails, the file is unchanged.

    Raises
    ------
    FileError : the system refuses; with the reason and a remedy.
    CalcError : it is not the path of a file.
    """
    with telling(str(path), "written"):
        replace(place(path), write)


def picture(path: Any, figure: Any, dpi: int) -> None:
    """Write a matplotlib figure in the format of the path's suffix (default .png), or to an open binary file.

    Raises
    ------
    FileError, CalcError : as in `write`; or the format is unknown.
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
    """Let ``write`` write a file that replaces ``path`` if it succeeds; otherwise ``path`` is unchanged.

    This is no context manager: after an exception between its beginning and the block, the traceback would keep the file open.

    durable : flush the data to the disk before the file replaces ``path``, and the folder before the call returns.
    """
    temporary = _temporary(path)
    try:
        with open(temporary, "xb") as file:
            with suppress(FileNotFoundError):
                set_mode(file, stat.S_IMODE(path.stat().st_mode))  # keep the permissions
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
    """Remove temporary files of killed writers; no writer may be using the folder."""
    for path in folder.glob(f".*{_TEMPORARY}"):
        path.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    """A temporary name beside a path; not longer than a long name, so it is valid on the same file systems."""
    name, end = os.fsencode(path.name), f".{os.getpid()}.{secrets.token_hex(4)}{_TEMPORARY}"
    kept = name[: max(len(name) - len(end) - 1, MIN_KEPT)].decode(errors="ignore")
    return path.with_name(f".{kept}{end}")


def sync_folder(folder: Path) -> None:
    """Make new, changed and removed names in a folder durable, if the system can."""
    handles: list[int] = []
    try:
        # entirely in C: between a Python call and its assignment, a signal would lose the handle
        handles.extend(map(os.open, (folder,), (os.O_RDONLY,)))
        os.fsync(handles[0])
    except OSError:
        pass
    finally:
        for handle in handles:
            os.close(handle)

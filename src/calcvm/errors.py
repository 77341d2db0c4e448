"""Errors.  Each message says what is wrong, where, and what to do."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn


class CalcError(ValueError):
    """Base of all errors that calcvm raises for bad input.  Nothing has changed when it is raised."""


class ShapeError(CalcError):
    """Shapes do not fit; the message names the operator, the variables and both shapes."""


class PlanError(CalcError):
    """No plan fits.  ``needed`` and ``allowed`` are bytes (None if memory is not the reason)."""

    def __init__(self, message: str, needed: int | None = None, allowed: int | None = None):
        super().__init__(message)
        self.needed = needed
        self.allowed = allowed


class ProgramError(CalcError):
    """A program or model file is damaged, foreign, of an unknown version, or fails verification."""


class FileError(CalcError, OSError):
    """The system refused to read or write a file; the message has its name, the reason and a remedy.  ``errno`` is the system's."""


class NoSuchFile(FileError, FileNotFoundError):
    """There is no such file, or no such folder to write it to."""


class UnsupportedOperator(CalcError):
    """The operator, or this use of it, has no rule or kernel."""


class NoNumber(CalcError, TypeError):
    """A variable of a graph was used as a number, an array or a condition; the message says what to write."""


class Trap(CalcError):
    """A kernel met a value that it cannot compute with; the message names row, operator and variable.

    Unlike the other errors, it is raised after the call in which it happened.
    """


class DeviceError(CalcError):
    """A device is missing, or refused a call.  ``lost``: it refuses all calls until the process is restarted."""

    def __init__(self, message: str, lost: bool = False):
        super().__init__(message)
        self.lost = lost


class MissingExtra(CalcError, ImportError):
    """An optional package is not installed; the message names the extra that installs it."""

    def __init__(self, package: str, extra: str, purpose: str):
        super().__init__(f'{purpose} needs {package}: install it with pip install "calcvm[{extra}]"')
        self.package, self.extra, self.purpose = package, extra, purpose

    def __reduce__(self) -> tuple:  # a pool's worker pickles its errors
        return type(self), (self.package, self.extra, self.purpose)


class Uncopied:
    """An object that cannot be copied or pickled; the `CalcError` says what to do ``_instead``."""

    __slots__ = ()
    _instead: ClassVar[str]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise CalcError(f"the {type(self).__name__} is neither copied nor pickled: {self._instead}")


class CalcWarning(RuntimeWarning):
    """Something continued that is hardly intended, such as training after a loss that is not finite."""


def warn(message: str) -> None:
    """A `CalcWarning` at the line outside of calcvm that led here."""
    level, frame, ours = 1, sys._getframe(), os.path.dirname(__file__) + os.sep
    while frame is not None and frame.f_code.co_filename.startswith(ours):
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    warnings.warn(message, CalcWarning, stacklevel=level)


# ---------------------------------------------------------------- errors of the system
REMEDIES = {
    errno.ENOENT: "look at the path",
    errno.EISDIR: "give the path of a file",
    errno.ENOTDIR: "look at the path: a part of it is a file and not a folder",
    errno.ENAMETOOLONG: "take a shorter name",
    errno.ENOSPC: "make room on the disk",
    errno.EDQUOT: "make room in your quota",
    errno.EFBIG: "raise the limit on the size of files",
    errno.EROFS: "make the disk writable, or copy the files elsewhere",
    errno.EACCES: "change its permissions, or copy the files elsewhere",
}


LONGEST_PATH = 4096  # characters that messages show; systems take no longer ones


@contextmanager
def within(what: str) -> Iterator[None]:
    """Begin the message of a `CalcError` with ``what``, the data concerned."""
    try:
        yield
    except CalcError as error:
        if not str(error).startswith(what):
            error.args = (f"{what}: {error}", *error.args[1:])
        raise


@contextmanager
def telling(where: str, what: str, after: str = "") -> Iterator[None]:
    """Convert errors of the system to a `FileError` with the file, the reason and a remedy."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CalcError):
            raise
        remedy = REMEDIES.get(error.errno or 0, "see to the disk")
        if error.errno == errno.ENOENT and what != "read":
            remedy += "; the folder to write to must be there"
        where = where if len(where) <= LONGEST_PATH else f"{where[:LONGEST_PATH]}..."
        kind = NoSuchFile if isinstance(error, FileNotFoundError) else FileError
        told = kind(f"{where}: cannot be {what} ({error.strerror or error}): {remedy}{after}")
        told.errno = error.errno
        raise told from error

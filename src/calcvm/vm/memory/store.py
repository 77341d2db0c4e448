"""Stores: where the images of models are that are not in a heap, in memory or in files."""

from __future__ import annotations

import json
import os
import re
import weakref
from collections.abc import Mapping
from contextlib import suppress
from io import FileIO
from os import PathLike
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, unquote

import numpy as np

from calcvm import checks
from calcvm.errors import CalcError, NoSuchFile, ProgramError, Uncopied, telling
from calcvm.files import remove_temporaries, sync_folder
from calcvm.system import at_fork, lock
from calcvm.vm.memory import versions
from calcvm.vm.program.program import Program, load_program
from calcvm.vm.program.serialize import parsed, plain

LONGEST_NAME = 200  # characters when quoted: file names hold 255, with the suffixes of temporary files

NEVER = 1 << 62  # epochs between two versions, where a model is written at the end of its training alone

UNCHANGED = ".  What the store held is unchanged"


def checkpoint_epochs(given: int | str) -> int:
    """Epochs after which a training writes its model to a `FileStore`: a number, or "end"."""
    if isinstance(given, str) and given == "end":
        return NEVER
    return checks.integer('checkpoint, in epochs or "end",', given)


class Store(Protocol):
    """What a heap asks of a store.

    persistent : what it holds outlives the process.
    """

    persistent: bool

    def put(self, name: str, facts: Mapping[str, Any], image: memoryview) -> None:
        """Keep a copy of ``image`` (bytes, contiguous) and ``facts`` (JSON-able)."""

    def get(self, name: str, image: memoryview | None = None) -> tuple[Mapping[str, Any], memoryview]:
        """Facts and a copy of the image, in ``image`` if that is given (of the same size)."""

    def __contains__(self, name: str) -> bool: ...

    def names(self) -> list[str]: ...

    def remove(self, name: str) -> None:
        """Forget a model; one that is not there is no error."""

    def put_program(self, program: Program) -> None: ...

    def get_program(self, digest: str) -> Program:
        """The program of a hash."""

    def close(self) -> None: ...


class MemoryStore(Uncopied):
    """Images in memory beside the heap: an array a model, allocated once."""

    _instead = "models are, or save them to files; another store has its own"

    persistent = False

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Mapping[str, Any], memoryview]] = {}
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()  # heaps, as of a `FileStore`
        self._programs: dict[str, Program] = {}

    def put(self, name: str, facts: Mapping[str, Any], image: memoryview) -> None:
        """Copy ``image``; ``facts`` itself is kept."""
        kept = self._kept.get(name)
        if kept is None or kept[1].nbytes != image.nbytes:
            kept = self._kept[name] = facts, np.empty(image.nbytes, np.uint8).data
        elif kept[0] is not facts:
            kept = self._kept[name] = facts, kept[1]
        kept[1][:] = image

    def get(self, name: str, image: memoryview | None = None) -> tuple[Mapping[str, Any], memoryview]:
        try:
            facts, kept = self._kept[name]
        except KeyError:
            raise CalcError(f"the store has no model {name!r}") from None
        if image is None:
            image = memoryview(bytearray(kept))
        elif image.nbytes != kept.nbytes:
            raise CalcError(f"model {name!r}: its image has {kept.nbytes:,} bytes, room for {image.nbytes:,} was given")
        else:
            image[:] = kept
        return facts, image

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    def names(self) -> list[str]:
        return list(self._kept)

    def remove(self, name: str) -> None:
        self._kept.pop(name, None)

    def put_program(self, program: Program) -> None:
        self._programs[program.hash] = program

    def get_program(self, digest: str) -> Program:
        try:
            return self._programs[digest]
        except KeyError:
            raise ProgramError(f"the store has no program {digest!r}") from None

    def close(self) -> None:
        """Give the memory back."""
        self._kept.clear()
        self._programs.clear()


class FileStore(Uncopied):
    """Images in files: one file per model, in a folder that one process writes and others may read meanwhile.

    ``models/NAME.model`` holds the last two versions of a model (its name quoted as in a web address),
    ``programs/HASH.calc`` a program.  A version is there whole or not at all, and is checked when it is read; whenever
    the process is killed, each model is there in its last version or the one being written.

    Parameters
    ----------
    folder : path
        Made if it is not there.
    durable : bool
        Wait until each version is on the disk.  Without, writing is faster and survives a killed process, but
        not a power cut or a crash of the system: models written shortly before may then be damaged (and refused).
    read_only : bool
        Only read, also while another process writes.  A heap reads a model whole when it is opened, in the last version that was
        written, and keeps that in memory until the model is closed.  It may be trained there: nothing of that is written.

    Raises
    ------
    CalcError : the folder is open for writing in this or another process, or cannot be written; with ``read_only``, there
        is no store.
    """

    _instead = "hand over its folder, which one process at a time has open"

    persistent = True

    def __init__(self, folder: str | PathLike[str], durable: bool = True, *, read_only: bool = False):
        if not isinstance(folder, (str, os.PathLike)) or not str(folder):
            raise CalcError(f"FileStore: {folder!r} is not the path of a folder")
        self.folder = Path(folder).absolute()  # wherever the process goes
        self.durable = checks.flag("FileStore: durable", durable)
        self.read_only = checks.flag("FileStore: read_only", read_only)
        self._models, self._of_programs = self.folder / "models", self.folder / "programs"
        self._programs: weakref.WeakValueDictionary[str, Program] = weakref.WeakValueDictionary()
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()  # heaps, which answer ``user.opened(name)``
        if self.read_only:
            self._open: FileIO | None = None
            if not self._models.is_dir():
                raise CalcError(
                    f"{self.folder}: there is no store here: look at the path, or open it for writing first"
                )
            return
        locked: FileIO | None = None
        try:
            with telling(str(self.folder), "opened as a store"):
                for path in (self._models, self._of_programs):
                    path.mkdir(parents=True, exist_ok=True)
                self._open = locked = _lock(self.folder)  # closed in one piece, however often
                weakref.finalize(self, _close, weakref.ref(locked)).atexit = False
                _locks.add(locked)
                for path in (self._models, self._of_programs):
                    remove_temporaries(path)
            if durable:
                sync_folder(self.folder)
                sync_folder(self.folder.parent)
        except BaseException:  # whose traceback would keep the folder locked
            if locked is not None:
                locked.close()
            raise

    def __repr__(self) -> str:
        return f"FileStore({str(self.folder)!r})"

    # ------------------------------------------------------------ models
    def put(self, name: str, facts: Mapping[str, Any], image: memoryview) -> None:
        """Write a version of a model, in the place of the version before its last one.

        Raises
        ------
        CalcError : the disk is full or cannot be written.  The store then holds the last version as before.
        """
        path = self._written(name)
        try:
            document = json.dumps(dict(facts), default=plain).encode()
        except (TypeError, ValueError) as error:
            raise CalcError(f"model {name!r}: its notes hold what cannot be written as JSON ({error})") from None
        with telling(str(path), "written", UNCHANGED):
            versions.write(path, document, image, self.durable)

    def get(
        self, name: str, image: memoryview | None = None, *, previous: bool = False
    ) -> tuple[Mapping[str, Any], memoryview]:
        """Facts and image of a model, checked.

        Parameters
        ----------
        image : memoryview of bytes, optional
            Where to read the image to; what it holds is undefined where the file is refused.
        previous : bool
            The version before the last one; the one that is left, where the other's header is damaged.

        Raises
        ------
        CalcError : there is no such model, or the file cannot be read.
        ProgramError : the file is truncated, altered, foreign or of an unknown version.
        """
        path = self._path(name)
        try:
            with telling(str(path), "read"):
                document, image = versions.read(path, name, image, previous)
        except NoSuchFile:
            version = "previous version of" if previous else "model"
            raise CalcError(f"{self.folder}: the store has no {version} {name!r}") from None
        facts = parsed(document, f"{path}: its facts")
        if not isinstance(facts, dict):
            raise ProgramError(f"{path}: not a model that calcvm wrote.  Copy it anew, or remove it")
        return facts, image

    def restore(self, name: str) -> None:
        """Go back to the version before the last one, for example where that is damaged.

        Raises
        ------
        CalcError : there is no such model, or no version before its last one; it is open, and would be written again.
        ProgramError : that version is damaged, too.
        """
        path = self._written(name)
        self._check_closed(name, "restored")
        try:
            with telling(str(path), "written", UNCHANGED):
                versions.restore(path, name, self.durable)
        except NoSuchFile:
            raise CalcError(f"{self.folder}: the store has no model {name!r}") from None

    def __contains__(self, name: str) -> bool:
        return self._path(name).exists()

    def names(self) -> list[str]:
        with telling(str(self._models), "read"), os.scandir(self._checked(self._models)) as entries:
            stems = [entry.name.removesuffix(".model") for entry in entries if entry.name.endswith(".model")]
        return [unquote(stem, errors="surrogatepass") for stem in stems]

    def remove(self, name: str) -> None:
        """Forget a model; one that is not there is no error (CalcError: it is open, and would be written again)."""
        path = self._written(name)
        self._check_closed(name, "removed")
        with telling(str(path), "removed", UNCHANGED):
            path.with_suffix(".previous").unlink(missing_ok=True)  # of format 1; first: it is of no other model
            path.unlink(missing_ok=True)
        if self.durable:
            sync_folder(self._models)

    # ------------------------------------------------------------ programs
    def put_program(self, program: Program) -> None:
        """Write a program's file, if there is none."""
        path = self._checked(self._of_programs) / f"{program.hash}.calc"
        if not path.exists():
            self._check_writable(path)
            with telling(str(path), "written", UNCHANGED):
                program.save(path)
        self._programs[program.hash] = program

    def get_program(self, digest: str) -> Program:
        """The program of a hash, verified; models in use share one.

        Raises
        ------
        ProgramError : its file is missing, truncated, altered, foreign or of an unknown version.
        """
        path = self._checked(self._of_programs) / f"{digest}.calc"
        program = self._programs.get(digest)
        if program is None:
            if not re.fullmatch("[0-9a-f]{64}", digest) or not path.exists():
                raise ProgramError(f"{path}: there is no such program: copy it from a whole copy of the store")
            with telling(str(path), "read"):
                program = load_program(path)
            if digest not in (program.hash, program.former):
                raise ProgramError(f"{path}: holds another program ({program.hash}): copy it anew")
            if program.former and not self.read_only:  # the model will be written with the hash of today
                self.put_program(program)
            self._programs[digest] = program
        return program

    def close(self) -> None:
        """Let others open the folder; the store cannot be used afterwards."""
        if self._open is not None:
            self._open.close()

    # ------------------------------------------------------------ files
    def _checked(self, path: Path) -> Path:
        if self._open is not None and self._open.closed:
            raise CalcError(f"{self.folder}: the store is closed here (a fork closes it in the child): open it again")
        return path

    def _check_writable(self, what: Path) -> None:
        if self.read_only:
            raise CalcError(f"{what}: cannot be written: the store was opened with read_only=True.  Open it without")

    def _check_closed(self, name: str, what: str) -> None:
        if any(user.opened(name) for user in self.users):
            raise CalcError(
                f"model {name!r} is open, and cannot be {what} now: close it first, by the close() of its model or handle"
            )

    def _written(self, name: str) -> Path:
        path = self._path(name)
        self._check_writable(path)
        return path

    def _path(self, name: str) -> Path:
        if not isinstance(name, str) or not name:
            raise CalcError(f"a model's name is a text that is not empty, not {name!r}")
        quoted = re.sub(r"^\.", "%2E", quote(name, safe="", errors="surrogatepass"))
        if len(quoted) > LONGEST_NAME:
            raise CalcError(
                f"the name {name[:40]!r}... takes {len(quoted)} characters in a file name, {LONGEST_NAME} are allowed "
                "(letters, digits and _.-~ take one each, other bytes three): take a shorter one"
            )
        return self._checked(self._models) / f"{quoted}.model"


_locks: weakref.WeakSet[FileIO] = weakref.WeakSet()


def _close(file: weakref.ref[FileIO]) -> None:
    """Close a file that may be gone; where a signal keeps this from being called, it goes with the last who has it."""
    if (there := file()) is not None:
        there.close()


def _after_fork() -> None:
    for file in _locks:  # else a child would keep the stores locked
        file.close()


at_fork(after_in_child=_after_fork)


def _lock(folder: Path) -> FileIO:
    """A file that keeps others from locking the folder until it is closed, as it is when nobody has it any more."""
    file = FileIO(folder / "lock", "a+")
    try:
        lock(file, f"FileStore({str(folder)!r})")
        with suppress(OSError):  # it only serves the message below
            file.truncate(0)
            file.write(str(os.getpid()).encode())
        return file
    except BlockingIOError:
        file.seek(0)
        owner = file.read(20).decode("ascii", "replace") or "unknown"
        file.close()
        where = "this process" if owner == str(os.getpid()) else f"process {owner}"
        raise CalcError(f"{folder}: the store is open in {where}: close it there, or take another folder") from None
    except BaseException:
        file.close()
        raise

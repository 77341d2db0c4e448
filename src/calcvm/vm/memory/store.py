"""Stores: they hold the images of models that are not in a heap, in memory or in files."""

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

LONGEST_NAME = 200  # characters of a quoted name: file names have at most 255, with the suffixes of temporary files

NEVER = 1 << 62  # epochs between two versions, if a model is written only at the end of its training

UNCHANGED = ".  What the store held is unchanged"


def checkpoint_epochs(given: int | str) -> int:
    """Epochs after which training writes its model to a `FileStore`: a number, or "end"."""
    if isinstance(given, str) and given == "end":
        return NEVER
    return checks.integer('checkpoint, in epochs or "end",', given)


class Store(Protocol):
    """The interface that a heap needs.

    persistent : the contents outlive the process.
    """

    persistent: bool

    def put(self, name: str, facts: Mapping[str, Any], image: memoryview) -> None:
        """Keep a copy of ``image`` (bytes, contiguous) and ``facts`` (JSON-able)."""

    def get(self, name: str, image: memoryview | None = None) -> tuple[Mapping[str, Any], memoryview]:
        """Facts and a copy of the image, in ``image`` if given (of the same size)."""

    def __contains__(self, name: str) -> bool: ...

    def names(self) -> list[str]: ...

    def remove(self, name: str) -> None:
        """Forget a model; an unknown name is no error."""

    def put_program(self, program: Program) -> None: ...

    def get_program(self, digest: str) -> Program:
        """The program with a hash."""

    def close(self) -> None: ...


class MemoryStore(Uncopied):
    """Images in memory beside the heap: one array per model, allocated once.

    Examples
    --------
    >>> program = cv.compile(cv.build_graph(nn.Linear(2), (4,), "mse", cv.SGD(0.1)), batch_size=8)
    >>> heap = cv.CalcHeap(program.heap_bytes, store=cv.MemoryStore())
    >>> models = [heap.create(program, seed=s) for s in range(3)]  # they take turns in the heap
    """

    _instead = "copy its models, or save them to files; another store has its own models"

    persistent = False

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Mapping[str, Any], memoryview]] = {}
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()  # the heaps, as in a `FileStore`
        self._programs: dict[str, Program] = {}

    def put(self, name: str, facts: Mapping[str, Any], image: memoryview) -> None:
        """Copy ``image``; keep ``facts`` itself."""
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
            raise CalcError(f"the store has no model {checks.shown(name)}") from None
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
        """Free the memory."""
        self._kept.clear()
        self._programs.clear()


class FileStore(Uncopied):
    """Images in files: one file per model, in a folder that one process writes while others may read.

    ``models/NAME.model`` holds the last two versions of a model (its name quoted as in a URL), ``programs/HASH.calc`` a program.
    A version is either complete or absent, and is checked when it is read.  If the process is killed, each model is there in
    its last version or in the one being written.

    Parameters
    ----------
    folder : path
        Created if it does not exist.
    durable : bool
        Wait until each version is on the disk.  Without it, writing is faster and survives a killed process, but
        not a power cut or a system crash: models written shortly before may then be damaged (and refused).
    read_only : bool
        Only read, even while another process writes.  Opening a model reads its last version as a whole, and the heap keeps that in
        memory until the model is closed.  The model can be trained, but no changes are written.

    Raises
    ------
    CalcError : the folder is open for writing in this or another process, or cannot be written; with ``read_only``, it
        holds no store.

    Examples
    --------
    >>> program = cv.compile(cv.build_graph(nn.Linear(2), (4,), "mse", cv.SGD(0.1)), batch_size=8)
    >>> with cv.CalcHeap("1 MiB", store=cv.FileStore("models")) as heap:
    ...     first = heap.create(program, seed=0, name="first")
    >>> with cv.CalcHeap("1 MiB", store=cv.FileStore("models")) as heap:
    ...     print(heap.open("first").name)
    first
    """

    _instead = "pass its folder instead, which one process at a time can open"

    persistent = True

    def __init__(self, folder: str | PathLike[str], durable: bool = True, *, read_only: bool = False):
        if not isinstance(folder, (str, os.PathLike)) or not str(folder):
            raise CalcError(f"FileStore: {checks.shown(folder)} is not the path of a folder")
        self.folder = Path(folder).absolute()  # independent of later changes of the working directory
        self.durable = checks.flag("FileStore: durable", durable)
        self.read_only = checks.flag("FileStore: read_only", read_only)
        self._models, self._of_programs = self.folder / "models", self.folder / "programs"
        self._programs: weakref.WeakValueDictionary[str, Program] = weakref.WeakValueDictionary()
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()  # the heaps, which implement ``user.opened(name)``
        if self.read_only:
            self._open: FileIO | None = None
            if not self._models.is_dir():
                raise CalcError(f"{self.folder}: there is no store here: check the path, or open it for writing first")
            return
        locked: FileIO | None = None
        try:
            with telling(str(self.folder), "opened as a store"):
                for path in (self._models, self._of_programs):
                    path.mkdir(parents=True, exist_ok=True)
                self._open = locked = _lock(self.folder)  # any number of closes is safe
                weakref.finalize(self, _close, weakref.ref(locked)).atexit = False
                _locks.add(locked)
                for path in (self._models, self._of_programs):
                    remove_temporaries(path)
            if durable:
                sync_folder(self.folder)
                sync_folder(self.folder.parent)
        except BaseException:  # its traceback would keep the folder locked
            if locked is not None:
                locked.close()
            raise

    def __repr__(self) -> str:
        return f"FileStore({str(self.folder)!r})"

    # ------------------------------------------------------------ models
    def put(self, name: str, facts: Mapping[str, Any], image: memoryview) -> None:
        """Write a version of a model over the version before its last one.

        Raises
        ------
        CalcError : the disk is full or cannot be written.  The store then holds the last version as before.
        """
        path = self._written(name)
        try:
            document = json.dumps(dict(facts), default=plain).encode()
        except (TypeError, ValueError) as error:
            raise CalcError(f"model {name!r}: its notes hold values that cannot be written as JSON ({error})") from None
        with telling(str(path), "written", UNCHANGED):
            versions.write(path, document, image, self.durable)

    def get(
        self, name: str, image: memoryview | None = None, *, previous: bool = False
    ) -> tuple[Mapping[str, Any], memoryview]:
        """Facts and image of a model, checked.

        Parameters
        ----------
        image : memoryview of bytes, optional
            Destination of the image; its contents are undefined if the file is refused.
        previous : bool
            Read the version before the last one; if a header is damaged, the version with the intact header.

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
            raise ProgramError(f"{path}: not a model that calcvm wrote.  Copy it again, or remove it")
        return facts, image

    def restore(self, name: str) -> None:
        """Go back to the version before the last one, for example if the last one is damaged.

        Raises
        ------
        CalcError : there is no such model, or no version before its last one; or it is open, and would be written again.
        ProgramError : the earlier version is damaged too.
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
        """Forget a model; an unknown name is no error (CalcError: the model is open, and would be written again)."""
        path = self._written(name)
        self._check_closed(name, "removed")
        with telling(str(path), "removed", UNCHANGED):
            path.with_suffix(".previous").unlink(missing_ok=True)  # of format 1; first: no later model inherits it
            path.unlink(missing_ok=True)
        if self.durable:
            sync_folder(self._models)

    # ------------------------------------------------------------ programs
    def put_program(self, program: Program) -> None:
        """Write a program's file, unless it exists."""
        path = self._checked(self._of_programs) / f"{program.hash}.calc"
        if not path.exists():
            self._check_writable(path)
            with telling(str(path), "written", UNCHANGED):
                program.save(path)
        self._programs[program.hash] = program

    def get_program(self, digest: str) -> Program:
        """The program with a hash, verified; open models share it.

        Raises
        ------
        ProgramError : its file is missing, truncated, altered, foreign or of an unknown version.
        """
        path = self._checked(self._of_programs) / f"{digest}.calc"
        program = self._programs.get(digest)
        if program is None:
            if not re.fullmatch("[0-9a-f]{64}", digest) or not path.exists():
                raise ProgramError(f"{path}: there is no such program: copy it from a complete copy of the store")
            with telling(str(path), "read"):
                program = load_program(path)
            if digest != program.hash:
                raise ProgramError(f"{path}: holds another program ({program.hash}): copy it again")
            self._programs[digest] = program
        return program

    def close(self) -> None:
        """Release the folder; the store cannot be used afterwards."""
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
                f"model {name!r} is open, and cannot be {what} now: close it first, with close() of its model or handle"
            )

    def _written(self, name: str) -> Path:
        path = self._path(name)
        self._check_writable(path)
        return path

    def _path(self, name: str) -> Path:
        if not isinstance(name, str) or not name:
            raise CalcError(f"a model's name is a non-empty text, not {checks.shown(name)}")
        quoted = re.sub(r"^\.", "%2E", quote(name, safe="", errors="surrogatepass"))
        if len(quoted) > LONGEST_NAME:
            raise CalcError(
                f"the name {name[:40]!r}... takes {len(quoted)} characters in a file name, {LONGEST_NAME} are allowed "
                "(letters, digits and _.-~ take one each, other bytes three): take a shorter one"
            )
        return self._checked(self._models) / f"{quoted}.model"


_locks: weakref.WeakSet[FileIO] = weakref.WeakSet()


def _close(file: weakref.ref[FileIO]) -> None:
    """Close a file that may be gone.  If a signal prevents this call, the file closes with its last reference."""
    if (there := file()) is not None:
        there.close()


def _after_fork() -> None:
    for file in _locks:  # otherwise a child would keep the stores locked
        file.close()


at_fork(after_in_child=_after_fork)


def _lock(folder: Path) -> FileIO:
    """A file that locks the folder until it is closed, at the latest with its last reference."""
    file = FileIO(folder / "lock", "a+")
    try:
        lock(file, f"FileStore({str(folder)!r})")
        with suppress(OSError):  # only the message below needs it
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

"""Archives: documents (JSON) and arrays (.npy) in one checked, atomically written zip file.  No pickle.

Layout: ``manifest.json`` first, then one member a document and one an array, all stored without
compression (so that nothing can unpack to more than the file's own size).  The manifest names kind,
version, and each member's size and sha256; the zip comment holds the sha256 of the manifest.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import secrets
import stat
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from calcvm.errors import CalcError, ProgramError, telling
from calcvm.vm.program import schema
from calcvm.vm.program.schema import integer, listing, one_of, record, text

FORMAT = "calcvm"
MANIFEST = "manifest.json"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # equal content, equal bytes
_TEMPORARY = ".tmp"
MIN_KEPT = 24  # bytes of a name that a temporary one has too

HEADED = 10  # bytes before the header of a .npy file
_ARRAY = re.compile(
    rb"\x93NUMPY\x01\x00(..)\{'descr': '([<>|][biuf]\d{1,2})', 'fortran_order': False, 'shape': \(([\d, ]{0,700})\), \} *\n",
    re.DOTALL,
)

_MEMBER = record(
    {
        "member": text(), "type": one_of("document", "array"), "name": text(), "bytes": integer(0, 2**62),
        "sha256": text("[0-9a-f]{64}", "a sha256 in hexadecimal digits"),
    }
)  # fmt: skip
_MANIFEST = record({"format": text(), "kind": text(), "version": integer(0, 2**31), "members": listing(_MEMBER)})


@dataclass(frozen=True, kw_only=True)
class Archive:
    """What a file holds; its arrays are read-only.  ``name`` is the file's, for errors."""

    name: str
    kind: str
    version: int
    documents: dict[str, Any]
    arrays: dict[str, np.ndarray]

    def document(self, name: str) -> Any:
        """A document by name (ProgramError: the file has none of that name)."""
        return self._part(self.documents, "document", name)

    def array(self, name: str) -> np.ndarray:
        """An array by name (ProgramError: the file has none of that name)."""
        return self._part(self.arrays, "array", name)

    def _part(self, parts: Mapping[str, Any], what: str, name: str) -> Any:
        if name not in parts:
            raise ProgramError(f"{self.name}: not a whole {self.kind}, it has no {what} {name!r}: save it again")
        return parts[name]


# ---------------------------------------------------------------- writing
def write_archive(
    path: str | PathLike[str] | BinaryIO,
    documents: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    *,
    kind: str,
    version: int,
) -> None:
    """Write an archive to a binary file that is open, or so that ``path`` holds what it held before or all of the new.

    Raises
    ------
    FileError : the file cannot be written; what was there is unchanged.
    """
    members: list[tuple[dict[str, Any], bytes]] = []
    for i, (name, document) in enumerate(documents.items()):
        members.append(_member(f"documents/{i}.json", "document", name, json.dumps(document).encode()))
    for i, (name, array) in enumerate(arrays.items()):
        buffer = io.BytesIO()
        np.lib.format.write_array(buffer, np.asarray(array, order="C"), version=(1, 0), allow_pickle=False)
        members.append(_member(f"arrays/{i}.npy", "array", name, buffer.getvalue()))
    manifest = json.dumps(
        {"format": FORMAT, "kind": kind, "version": version, "members": [entry for entry, _ in members]}, indent=1
    ).encode()

    if isinstance(path, io.TextIOBase):
        raise CalcError(f"{path!r} is open for text: open the file in mode 'wb'")

    def write(file: BinaryIO) -> None:
        archive = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED)
        try:
            archive.comment = hashlib.sha256(manifest).hexdigest().encode()
            archive.writestr(zipfile.ZipInfo(MANIFEST, _EPOCH), manifest)
            for entry, data in members:
                archive.writestr(zipfile.ZipInfo(entry["member"], _EPOCH), data)
            archive.close()
        except BaseException:
            archive.fp = None  # given up: closing it in the middle of a member would raise another error
            raise

    with telling(str(path), "written"):
        if hasattr(path, "write"):
            write(path)  # type: ignore[arg-type]
        else:
            replace(place(path), write)


def _path(path: Any) -> Path:
    if not isinstance(path, (str, PathLike)) or "\0" in str(path) or not Path(path).name:
        raise CalcError(f"{path!r} is not the path of a file: give a text, a pathlib.Path or an open binary file")
    return Path(path)


def place(path: Any) -> Path:
    """Where the file of a path lies, or will: what a link leads to.

    Raises
    ------
    CalcError : it is no path of a file, or what is there is no plain file (a device, a pipe).
    """
    found = os.path.realpath(_path(path))
    if os.path.exists(found) and not (os.path.isfile(found) or os.path.isdir(found)):
        raise CalcError(f"{path} is a device or a pipe, which a file cannot take the place of: name a file")
    return Path(found)


def replace(
    path: Path, write: Callable[[BinaryIO], object], *, durable: bool = True, previous: Path | None = None
) -> None:
    """Let ``write`` write a file that takes the place of ``path`` when it ends well; else ``path`` is as it was.

    No context manager: an exception between its beginning and the block would leave the file to whoever keeps the traceback.

    durable : what was written is on the disk before it takes the place, and its place is when the block has ended.
    previous : where to keep what ``path`` held before.
    """
    temporary = _temporary(path)
    try:
        with open(temporary, "xb") as file:
            with suppress(FileNotFoundError):
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))  # who may read and write it stays
            write(file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        if previous is not None:
            _keep(path, previous)
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


def _keep(path: Path, previous: Path) -> None:
    """Make ``previous`` another name of the file at ``path``, if there is one; at no time is there less than before."""
    link = _temporary(path)
    try:
        os.link(path, link)
    except FileNotFoundError:
        return
    try:
        os.replace(link, previous)
    finally:
        link.unlink(missing_ok=True)  # where both were the same file already, replacing does nothing


# ---------------------------------------------------------------- reading
def read_archive(path: str | PathLike[str] | BinaryIO, *, kinds: Sequence[str], versions: Sequence[int]) -> Archive:
    """Read an archive of one of ``kinds`` from a path or an open binary file, checking every byte that is used.

    Raises
    ------
    ProgramError
        The file is truncated, altered, not ours, of another kind or of an unknown version.
    FileError
        It cannot be read.
    """
    name = str(path)
    with telling(name, "read"):
        data = path.read() if hasattr(path, "read") else _path(path).read_bytes()
    if not isinstance(data, bytes):
        raise CalcError(f"{name}: a file of text; open it with mode 'rb'")
    members, comment = _members(data, name)
    if MANIFEST not in members:
        raise ProgramError(f"{name}: a zip file, but not one that calcvm wrote: it has no {MANIFEST}")
    manifest = members.pop(MANIFEST)
    if comment != hashlib.sha256(manifest).hexdigest().encode():
        raise ProgramError(f"{name}: the manifest was altered or is damaged: copy the file anew")
    contents = schema.check(_MANIFEST, parsed(manifest, f"{name}: {MANIFEST}"), f"{name}: {MANIFEST}")
    kind, version = contents["kind"], contents["version"]
    if contents["format"] != FORMAT:
        raise ProgramError(f"{name}: format {contents['format']!r} is not {FORMAT!r}")
    if kind not in kinds:
        raise ProgramError(f"{name}: holds a {kind}, not a {kinds[0]}: load it as a {kind}")
    if version not in versions:
        known = ", ".join(str(v) for v in versions)
        raise ProgramError(
            f"{name}: {kind} format {version}, this calcvm reads {known}: use the calcvm that wrote it, or compile the graph again"
        )
    listed = [entry["member"] for entry in contents["members"]]
    if sorted(listed) != sorted(members):
        strange = ", ".join(sorted({*listed} ^ {*members})) or "one is listed twice"
        raise ProgramError(f"{name}: members and manifest differ ({strange}): copy the file anew")
    documents: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    for entry in contents["members"]:
        member, data = entry["member"], members[entry["member"]]
        where = f"{name}: {member} ({entry['name']})"
        if len(data) != entry["bytes"]:
            raise ProgramError(f"{where} has {len(data)} bytes, the manifest says {entry['bytes']}")
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise ProgramError(f"{where} does not match its checksum: copy the file anew")
        if entry["name"] in (arrays if entry["type"] == "array" else documents):
            raise ProgramError(f"{where}: there is another {entry['type']} of this name: file refused")
        if entry["type"] == "array":
            arrays[entry["name"]] = _parse_array(data, where)
        else:
            documents[entry["name"]] = parsed(data, where)
    return Archive(name=name, kind=kind, version=version, documents=documents, arrays=arrays)


def _members(data: bytes, name: str) -> tuple[dict[str, bytes], bytes]:
    """Members of a zip file in memory by name, and its comment.  No byte is read from the disk here: errors are damage."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            infos = archive.infolist()
            for info in infos:
                if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                    raise ProgramError(
                        f"{name}: member {info.filename} is compressed; calcvm never writes that: file refused"
                    )
            if len({info.filename for info in infos}) != len(infos) or sum(i.file_size for i in infos) > len(data):
                raise ProgramError(f"{name}: members overlap or repeat: file refused")
            return {info.filename: archive.read(info) for info in infos}, archive.comment
    except zipfile.BadZipFile as error:
        raise ProgramError(
            f"{name}: truncated or not a calcvm file ({error}): save it again or copy it anew"
        ) from error
    except (EOFError, LookupError, OSError, OverflowError, RuntimeError, ValueError, struct.error) as error:
        if isinstance(error, ProgramError):
            raise
        raise ProgramError(f"{name}: damaged ({type(error).__name__}: {error}): copy it anew") from error


def parsed(data: bytes, where: str) -> Any:
    """A document from its bytes."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProgramError(
            f"{where} is no JSON document ({type(error).__name__}: {error}): copy the file anew"
        ) from None


def _member(member: str, type_: str, name: str, data: bytes) -> tuple[dict[str, Any], bytes]:
    digest = hashlib.sha256(data).hexdigest()
    return {"member": member, "type": type_, "name": name, "bytes": len(data), "sha256": digest}, data


def _parse_array(data: bytes, where: str) -> np.ndarray:
    """A .npy file as `write_archive` writes them; ``np.load`` would evaluate the header, and allocate what it says."""
    header = _ARRAY.match(data)
    if header is None:
        raise ProgramError(f"{where}: not an array file of version 1.0")
    length, descr, sizes = header.groups()
    shape = tuple(int(n) for n in re.findall(rb"\d+", sizes))
    start, n = header.end(), math.prod(shape)
    try:
        dtype = np.dtype(descr.decode())
        if n * dtype.itemsize != len(data) - start or start != HEADED + int.from_bytes(length, "little"):
            raise ProgramError(f"{where}: the header says {shape} of {dtype}, but {len(data) - start} bytes follow")
        array = np.frombuffer(data, dtype, n, start) if n else np.empty(0, dtype)
        return array.reshape(shape).astype(dtype.newbyteorder("="), copy=False)
    except (TypeError, ValueError) as error:  # no such type, more dimensions than NumPy has
        if isinstance(error, ProgramError):
            raise
        raise ProgramError(f"{where}: no array ({error})") from None


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

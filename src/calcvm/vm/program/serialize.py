"""Archives: documents (JSON) and arrays (.npy) in one checked, atomically written zip file.  No pickle.

Layout: ``manifest.json`` first, then one member per document and one per array, all stored without
compression (so that nothing can unpack to more than the file's own size).  The manifest names kind,
version, and each member's size and sha256; the zip comment holds the sha256 of the manifest.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, BinaryIO

import numpy as np

from calcvm import files
from calcvm.errors import CalcError, ProgramError, telling
from calcvm.vm.program import schema
from calcvm.vm.program.schema import integer, listing, mapping, one_of, text

FORMAT = "calcvm"
OF_STORES = b"calcvmMD"  # the magic of files of `calcvm.vm.memory.versions`
MANIFEST = "manifest.json"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # a fixed time, so that equal content gives equal bytes

HEADED = 10  # bytes before the header text of a .npy file
_ARRAY = re.compile(
    rb"\x93NUMPY\x01\x00(..)\{'descr': '([<>|][biuf]\d{1,2})', 'fortran_order': False, 'shape': \(([\d, ]{0,700})\), \} *\n",
    re.DOTALL,
)

_MEMBER = mapping(
    {
        "member": text(), "type": one_of("document", "array"), "name": text(), "bytes": integer(0, 2**62),
        "sha256": text("[0-9a-f]{64}", "a sha256 in hexadecimal digits"),
    }
)  # fmt: skip
_MANIFEST = mapping({"format": text(), "kind": text(), "version": integer(0, 2**31), "members": listing(_MEMBER)})


@dataclass(frozen=True, kw_only=True)
class Archive:
    """The contents of a file; its arrays are read-only.  ``name`` is the file's, for errors."""

    name: str
    kind: str
    version: int
    documents: dict[str, Any]
    arrays: dict[str, np.ndarray]

    def document(self, name: str) -> Any:
        """A document by name (ProgramError: the file has none with that name)."""
        return self._part(self.documents, "document", name)

    def array(self, name: str) -> np.ndarray:
        """An array by name (ProgramError: the file has none with that name)."""
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
    """Write an archive to an open binary file or to a path; ``path`` then holds either its old content or all of the new.

    Raises
    ------
    FileError : the file cannot be written; its old content is unchanged.
    """
    members: list[tuple[dict[str, Any], bytes]] = []
    for i, (name, document) in enumerate(documents.items()):
        members.append(_member(f"documents/{i}.json", "document", name, json.dumps(document, default=plain).encode()))
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
            archive.fp = None  # abandoned: closing it in the middle of a member would raise another error
            raise

    if hasattr(path, "write"):
        with telling(str(path), "written"):
            write(path)  # type: ignore[arg-type]
    else:
        files.write(path, write)


# ---------------------------------------------------------------- reading
def read_archive(path: str | PathLike[str] | BinaryIO, *, kinds: Mapping[str, int]) -> Archive:
    """Read an archive of one of ``kinds`` from a path or an open binary file, and check every byte that is used.

    Raises
    ------
    ProgramError
        The file is truncated, altered, not ours, of another kind or of an unknown version.
    FileError
        It cannot be read.
    """
    name = str(path)
    with telling(name, "read"):
        data = path.read() if hasattr(path, "read") else files.checked(path).read_bytes()
    if not isinstance(data, bytes):
        raise CalcError(f"{name}: a file of text; open it with mode 'rb'")
    if not data and hasattr(path, "read"):
        raise ProgramError(f"{name}: nothing is left to read: go back to its start, .seek(0)")
    members, comment = _members(data, name)
    if MANIFEST not in members:
        raise ProgramError(f"{name}: a zip file, but not one that calcvm wrote: it has no {MANIFEST}")
    manifest = members.pop(MANIFEST)
    if comment != hashlib.sha256(manifest).hexdigest().encode():
        raise ProgramError(f"{name}: the manifest was altered or is damaged: copy the file again")
    contents = schema.check(_MANIFEST, parsed(manifest, f"{name}: {MANIFEST}"), f"{name}: {MANIFEST}")
    kind, version = contents["kind"], contents["version"]
    if contents["format"] != FORMAT:
        raise ProgramError(f"{name}: format {contents['format']!r} is not {FORMAT!r}")
    if kind not in kinds:
        raise ProgramError(f"{name}: holds a {kind}, not a {next(iter(kinds))}: load it as a {kind}")
    if version != kinds[kind]:
        raise ProgramError(
            f"{name}: {kind} format {version}, this calcvm reads {kinds[kind]}: use the calcvm that wrote it, or compile the graph again"
        )
    listed = [entry["member"] for entry in contents["members"]]
    if sorted(listed) != sorted(members):
        strange = ", ".join(sorted({*listed} ^ {*members})) or "one is listed twice"
        raise ProgramError(f"{name}: members and manifest differ ({strange}): copy the file again")
    documents: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    for entry in contents["members"]:
        member, data = entry["member"], members[entry["member"]]
        where = f"{name}: {member} ({entry['name']})"
        if len(data) != entry["bytes"]:
            raise ProgramError(f"{where} has {len(data)} bytes, the manifest says {entry['bytes']}")
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise ProgramError(f"{where} does not match its checksum: copy the file again")
        if entry["name"] in (arrays if entry["type"] == "array" else documents):
            raise ProgramError(f"{where}: there is another {entry['type']} of this name: file refused")
        if entry["type"] == "array":
            arrays[entry["name"]] = _parse_array(data, where)
        else:
            documents[entry["name"]] = parsed(data, where)
    return Archive(name=name, kind=kind, version=version, documents=documents, arrays=arrays)


def _members(data: bytes, name: str) -> tuple[dict[str, bytes], bytes]:
    """Members of a zip file in memory, by name, and its comment.  Nothing is read from the disk here, so errors mean damage."""
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
        if data[: len(OF_STORES)] == OF_STORES:
            raise ProgramError(
                f"{name}: is a model of a store: open it by cv.CalcHeap(memory, store=cv.FileStore(folder)).open(its name)"
            ) from None
        raise ProgramError(
            f"{name}: truncated or not a calcvm file ({error}): save it again or copy it again"
        ) from error
    except (EOFError, LookupError, OSError, OverflowError, RuntimeError, ValueError, struct.error) as error:
        if isinstance(error, ProgramError):
            raise
        raise ProgramError(f"{name}: damaged ({type(error).__name__}: {error}): copy it again") from error


def plain(value: Any) -> Any:
    """NumPy's numbers as Python's, for JSON."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r} is no number, text, list or mapping")


def parsed(data: bytes, where: str) -> Any:
    """A document from its bytes."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProgramError(
            f"{where} is no JSON document ({type(error).__name__}: {error}): copy the file again"
        ) from None


def _member(member: str, type_: str, name: str, data: bytes) -> tuple[dict[str, Any], bytes]:
    digest = hashlib.sha256(data).hexdigest()
    return {"member": member, "type": type_, "name": name, "bytes": len(data), "sha256": digest}, data


def _parse_array(data: bytes, where: str) -> np.ndarray:
    """Parse a .npy file as `write_archive` writes it; ``np.load`` would evaluate the header, and allocate the stated size."""
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
    except (TypeError, ValueError) as error:  # an unknown type, or more dimensions than NumPy supports
        if isinstance(error, ProgramError):
            raise
        raise ProgramError(f"{where}: no array ({error})") from None

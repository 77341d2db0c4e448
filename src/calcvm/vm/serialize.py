"""Archives: documents (JSON) and arrays (.npy) in one checked, atomically written zip file.  No pickle.

Layout: ``manifest.json`` first, then one member a document and one an array, all stored without
compression (so that nothing can unpack to more than the file's own size).  The manifest names kind,
version, and each member's size and sha256; the zip comment holds the sha256 of the manifest.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from calcvm.errors import ProgramError

FORMAT = "calcvm"
MANIFEST = "manifest.json"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # equal content, equal bytes
_TEMPORARY = ".tmp"


@dataclass(frozen=True, kw_only=True)
class Archive:
    """What a file holds; its arrays are read-only."""

    kind: str
    version: int
    documents: dict[str, Any]
    arrays: dict[str, np.ndarray]


def write_archive(
    path: str | PathLike[str],
    documents: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    *,
    kind: str,
    version: int,
) -> None:
    """Write an archive so that ``path`` holds either what it held before or all of the new content."""
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

    with replacing(Path(path)) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.comment = hashlib.sha256(manifest).hexdigest().encode()
        archive.writestr(zipfile.ZipInfo(MANIFEST, _EPOCH), manifest)
        for entry, data in members:
            archive.writestr(zipfile.ZipInfo(entry["member"], _EPOCH), data)


@contextmanager
def replacing(path: Path, *, durable: bool = True, previous: Path | None = None) -> Iterator[BinaryIO]:
    """A file to write that takes the place of ``path`` when the block ends well; else ``path`` is as it was.

    durable : what was written is on the disk before it takes the place, and its place is when the block has ended.
    previous : where to keep what ``path`` held before.
    """
    temporary = _temporary(path)
    file = open(temporary, "xb")
    try:
        with file:
            yield file
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
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{_TEMPORARY}")


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


def read_archive(path: str | PathLike[str], *, kind: str, versions: Sequence[int]) -> Archive:
    """Read an archive of ``kind``, checking every byte that is used.

    Raises
    ------
    ProgramError
        The file is truncated, altered, not ours, of another kind or of an unknown version.
    """
    name = str(path)
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            size = os.fstat(file.fileno()).st_size
            return _read(archive, size, kind, tuple(versions), name)
    except zipfile.BadZipFile as error:
        raise ProgramError(
            f"{name}: truncated or not a calcvm file ({error}): save it again or copy it anew"
        ) from error
    except (RecursionError, NotImplementedError, RuntimeError, EOFError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ProgramError):
            raise
        raise ProgramError(f"{name}: damaged ({type(error).__name__}: {error}): copy it anew") from error


def _read(archive: zipfile.ZipFile, size: int, kind: str, versions: tuple[int, ...], name: str) -> Archive:
    infos = {info.filename: info for info in archive.infolist()}
    if MANIFEST not in infos:
        raise ProgramError(f"{name}: a zip file, but not one that calcvm wrote: it has no {MANIFEST}")
    for info in archive.infolist():
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise ProgramError(f"{name}: member {info.filename} is compressed; calcvm never writes that: file refused")
    if len(infos) != len(archive.infolist()) or sum(i.file_size for i in infos.values()) > size:
        raise ProgramError(f"{name}: members overlap or repeat: file refused")
    manifest = archive.read(MANIFEST)
    if archive.comment != hashlib.sha256(manifest).hexdigest().encode():
        raise ProgramError(f"{name}: the manifest was altered or is damaged: copy the file anew")
    contents = json.loads(manifest)
    if contents.get("format") != FORMAT:
        raise ProgramError(f"{name}: format {contents.get('format')!r} is not {FORMAT!r}")
    if contents["kind"] != kind:
        raise ProgramError(f"{name}: holds a {contents['kind']}, not a {kind}: load it as a {contents['kind']}")
    if contents["version"] not in versions:
        known = ", ".join(str(v) for v in versions)
        raise ProgramError(
            f"{name}: {kind} format {contents['version']}, this calcvm reads {known}: "
            "use the calcvm that wrote it, or compile the graph again"
        )
    listed = {entry["member"] for entry in contents["members"]} | {MANIFEST}
    if listed != set(infos):
        strange = ", ".join(sorted(listed ^ set(infos)))
        raise ProgramError(f"{name}: members and manifest differ ({strange}): copy the file anew")
    documents: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    for entry in contents["members"]:
        member = entry["member"]
        if infos[member].file_size != entry["bytes"]:
            raise ProgramError(
                f"{name}: {member} has {infos[member].file_size} bytes, the manifest says {entry['bytes']}"
            )
        data = archive.read(member)
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise ProgramError(f"{name}: {member} ({entry['name']}) does not match its checksum: copy the file anew")
        if entry["type"] == "array":
            arrays[entry["name"]] = _parse_array(data, f"{name}: {member} ({entry['name']})")
        else:
            documents[entry["name"]] = json.loads(data)
    return Archive(kind=kind, version=contents["version"], documents=documents, arrays=arrays)


def _member(member: str, type_: str, name: str, data: bytes) -> tuple[dict[str, Any], bytes]:
    digest = hashlib.sha256(data).hexdigest()
    return {"member": member, "type": type_, "name": name, "bytes": len(data), "sha256": digest}, data


def _parse_array(data: bytes, where: str) -> np.ndarray:
    """A .npy file whose header agrees with its length (``np.load`` would allocate what the header says)."""
    buffer = io.BytesIO(data)
    if np.lib.format.read_magic(buffer) != (1, 0):
        raise ProgramError(f"{where}: not an array file of version 1.0")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(buffer, max_header_size=4096)
    if dtype.hasobject or dtype.kind not in "biuf" or fortran:
        raise ProgramError(f"{where}: arrays of {dtype} are not read")
    start, count = buffer.tell(), 1
    for n in shape:
        count *= n
    if min(shape, default=0) < 0 or count * dtype.itemsize != len(data) - start:
        raise ProgramError(f"{where}: the header says {shape} of {dtype}, but {len(data) - start} bytes follow")
    return np.frombuffer(data, dtype, count, start).reshape(shape) if count else np.empty(shape, dtype)


def sync_folder(folder: Path) -> None:
    """Make names given, changed and removed in a folder durable, where the system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)

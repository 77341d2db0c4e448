"""A file with the last two versions of a model: always intact if the writer is killed, and readable during a write.

```text
 0           512         1024               1024 + room
 | header 0  | header 1  | facts, image of 0 | facts, image of 1 |
```

A new version overwrites the older one.  Its header is cleared first and written last, so the newest version with a header is
always complete.  A header that is neither empty nor valid, or a body that does not match its header, counts as damage.  Files
of format 1 hold one version, and a second file holds the version before it.  They are read, and rewritten as files of this format.

SQLite in WAL mode (`python -m bench stores`) is as fast for existing small models, creates new ones three times as fast, and
takes four to eight times as long for images of 100 MB.  But one damaged page can make all models unreadable, a plain copy of the
folder may be torn, and its shared memory needs a local file system.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO

import numpy as np

from calcvm.errors import CalcError, ProgramError
from calcvm.files import replace
from calcvm.vm.program.serialize import OF_STORES

FORMAT_VERSION = 2
MAGIC = OF_STORES
HEADER = struct.Struct(
    "<8sIIQQQ32s"
)  # magic, format, bytes of the facts, bytes of the image, version number, room, digest
CHECK_BYTES = 16  # the header's own digest, after it
PLACE = 512  # room for a header: one sector, which disks write whole
BODY = 2 * PLACE
SPARE = 512  # room beyond the first version's size: facts grow by some digits
SYNC = getattr(os, "fdatasync", os.fsync)
ATTEMPTS = 100  # reads, each spoiled by a new version

FORMER = struct.Struct("<8sIIQ")  # format 1: magic, format, bytes of the facts, bytes of the image; then a digest


class Damage(Exception):
    """Reason why a version cannot be read."""


@dataclass(frozen=True)
class Version:
    """The fields of a header.  ``place`` : 0 or 1; ``digest`` : of facts and image."""

    place: int
    number: int
    n_facts: int
    n_image: int
    room: int
    digest: bytes

    @property
    def start(self) -> int:
        return BODY + self.place * self.room

    def header(self) -> bytes:
        fields = (MAGIC, FORMAT_VERSION, self.n_facts, self.n_image, self.number, self.room, self.digest)
        header = HEADER.pack(*fields)
        return (header + hashlib.sha256(header).digest()[:CHECK_BYTES]).ljust(PLACE, b"\0")


@dataclass(frozen=True)
class Former:
    """The only version in a file of format 1."""

    n_facts: int
    n_image: int
    digest: bytes
    start: int = FORMER.size


@dataclass(frozen=True)
class Heads:
    """The headers of a file: the valid ones, newest first, and whether one is damaged.

    A damaged header may belong to the last version, and is treated as such.
    """

    versions: tuple[Version, ...]
    damaged: bool

    @property
    def last(self) -> Version | None:
        """The last version; None: the file has format 1, or is not ours."""
        if self.versions and self.damaged:
            raise Damage("altered: a header does not match its checksum")
        return self.versions[0] if self.versions else None

    @property
    def before(self) -> Version | None:
        """The version before the last one."""
        return self.versions[-1] if len(self.versions) + self.damaged > 1 and self.versions else None

    @classmethod
    def of(cls, data: bytes) -> Heads:
        found = [_parsed(place, data[place * PLACE : (place + 1) * PLACE]) for place in (0, 1)]
        versions = sorted((v for v in found if isinstance(v, Version)), key=lambda v: -v.number)
        return cls(tuple(versions), any(v is None for v in found))


def _parsed(place: int, data: bytes) -> Version | bool | None:
    """A header; False: there is none; None: it is damaged."""
    if len(data) == PLACE and not any(data):
        return False
    header, check = data[: HEADER.size], data[HEADER.size : HEADER.size + CHECK_BYTES]
    if len(data) < PLACE or hashlib.sha256(header).digest()[:CHECK_BYTES] != check:
        return None
    magic, version, n_facts, n_image, number, room, digest = HEADER.unpack(header)
    if magic != MAGIC or version != FORMAT_VERSION or n_facts + n_image > room:
        return None
    return Version(place, number, n_facts, n_image, room, digest)


# ---------------------------------------------------------------- writing
def write(path: Path, document: bytes, image: memoryview, durable: bool) -> None:
    """Write the next version.  If it fails, the last one stays.

    durable : return only when the version is on the disk.
    """
    digest, n = _digest(document, image), len(document) + image.nbytes
    try:
        file = FileIO(path, "r+")
    except FileNotFoundError:
        last = None
    else:
        with file:
            last = next(iter(Heads.of(_read(file, 0, BODY)).versions), None)
            if last is not None and n <= last.room and os.fstat(file.fileno()).st_size == BODY + 2 * last.room:
                new = Version(1 - last.place, last.number + 1, len(document), image.nbytes, last.room, digest)
                _write(file, new.place * PLACE, bytes(PLACE))
                _write(file, new.start, document, image)
                if durable:
                    SYNC(file.fileno())
                _write(file, new.place * PLACE, new.header())
                if durable:
                    SYNC(file.fileno())
                return
    before = _whole(path, last)
    room = -(-(max(n, sum(map(len, before))) + SPARE) // PLACE) * PLACE
    first = Version(0, 1, len(before[0]), len(before[1]), room, _digest(*before)) if before else None
    new = Version(1 if first else 0, 2 if first else 1, len(document), image.nbytes, room, digest)

    def both(file: BinaryIO) -> None:
        for version, body in ((first, before), (new, (document, image))):
            if version is not None:
                file.seek(version.place * PLACE)
                file.write(version.header())
                file.seek(version.start)
                for part in body:
                    file.write(part)
        file.truncate(BODY + 2 * room)

    replace(path, both, durable=durable)
    path.with_suffix(".previous").unlink(missing_ok=True)  # of format 1: its version is in the file now


def _whole(path: Path, last: Version | Former | None) -> tuple[bytes | memoryview, ...]:
    """Facts and image of the last version, if intact, of a file that a larger file will replace."""
    try:
        with FileIO(path) as file:
            return _body(file, last or _former(file))
    except (FileNotFoundError, Damage):
        return ()


def restore(path: Path, name: str, durable: bool) -> None:
    """Delete the last version, or a damaged header, from a file that also holds the version before it.

    Raises
    ------
    CalcError : there is no earlier version.
    ProgramError : the earlier version is damaged too.
    """
    with FileIO(path, "r+") as file:
        head = _read(file, 0, BODY)
        before = Heads.of(head).before
        if before is None:
            raise CalcError(f"{path}: the store has no previous version of {name!r}")
        try:
            _body(file, before)
        except Damage as damage:
            raise _refused(path, name, str(damage), Heads.of(head), True) from None
        _write(file, (1 - before.place) * PLACE, bytes(PLACE))
        if durable:
            SYNC(file.fileno())


def _write(file: FileIO, start: int, *parts: bytes | memoryview) -> None:
    for part in parts:
        left = memoryview(part)
        file.seek(start)
        while left.nbytes:
            left = left[file.write(left) :]
        start += len(part)


# ---------------------------------------------------------------- reading
def read(path: Path, name: str, image: memoryview | None, previous: bool) -> tuple[bytes, memoryview]:
    """Facts and image of the last version, or of the one before it; each byte is checked.  ``image``: the destination, if given.

    Another process may write at the same time.

    Raises
    ------
    CalcError : there is no version before the last one; ``image`` has another size.
    ProgramError : the file is truncated, altered, foreign or of an unknown format.
    """
    former = path.with_suffix(".previous")
    with FileIO(path) as file:
        for attempt in range(ATTEMPTS):
            head = _read(file, 0, BODY)
            try:
                heads = Heads.of(head)
                version = heads.before if previous else heads.last or _former(file)
                if version is None and former.exists():
                    return read(former, name, image, False)
                if version is None:
                    raise CalcError(f"{path}: the store has no previous version of {name!r}")
                return _body(file, version, name, image)
            except Damage as damage:
                if attempt == ATTEMPTS - 1 or _read(file, 0, BODY) == head:  # no process has written
                    raise _refused(path, name, str(damage), Heads.of(head), previous) from None
    raise AssertionError("unreachable")


def _former(file: FileIO) -> Former:
    """The version in a file of format 1."""
    size = os.fstat(file.fileno()).st_size
    header = _read(file, 0, FORMER.size)
    if len(header) < FORMER.size:
        raise Damage(f"truncated to {size} bytes")
    magic, version, n_facts, n_image = FORMER.unpack(header)
    if magic != MAGIC:
        raise Damage("not a model that calcvm wrote")
    if version == FORMAT_VERSION:
        raise Damage("truncated or altered: it has no header that matches its checksum")
    if version != 1:
        raise Damage(f"format {version}, this calcvm reads 1 and {FORMAT_VERSION}: use the calcvm that wrote it")
    wanted = FORMER.size + n_facts + n_image + hashlib.sha256().digest_size
    if size != wanted:
        raise Damage(f"truncated or altered: it has {size:,} bytes, its header says {wanted:,}")
    return Former(n_facts, n_image, _read(file, FORMER.size + n_facts + n_image, wanted))


def _body(
    file: FileIO, version: Version | Former, name: str = "", image: memoryview | None = None
) -> tuple[bytes, memoryview]:
    size = os.fstat(file.fileno()).st_size
    if size < version.start + version.n_facts + version.n_image:  # first: no memory for a truncated image
        raise Damage(f"truncated to {size:,} bytes")
    if image is None:
        image = np.empty(version.n_image, np.uint8).data
    elif image.nbytes != version.n_image:
        raise CalcError(f"model {name!r}: its image has {version.n_image:,} bytes, room for {image.nbytes:,} was given")
    document = _read(file, version.start, version.n_facts)
    _fill(file, version.start + version.n_facts, image)
    before = b"" if isinstance(version, Version) else _read(file, 0, FORMER.size)
    if _digest(before + document, image) != version.digest:
        raise Damage("altered: it does not match its checksum")
    return document, image


def _digest(document: bytes | memoryview, image: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(document)
    digest.update(image)
    return digest.digest()


def _read(file: FileIO, start: int, n: int) -> bytes:
    file.seek(start)
    return file.read(n)


def _fill(file: FileIO, start: int, image: memoryview) -> None:
    file.seek(start)
    while image.nbytes and (done := file.readinto(image)):
        image = image[done:]


def _refused(path: Path, name: str, reason: str, heads: Heads, previous: bool) -> ProgramError:
    former = path.with_suffix(".previous")
    remedy = "Copy it again, or remove it"
    if not previous and heads.before is not None:
        remedy = f"store.restore({name!r}) goes back to the version before it"
    elif not heads.versions and former.exists():
        remedy = f"{former} is the version before it: rename that to {path.name}"
    return ProgramError(f"{path}: {reason}.  {remedy}")

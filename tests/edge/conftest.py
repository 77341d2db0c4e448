"""Objects of packs by processes that stay: to start one for each, with Numba, took most of the time of these tests."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator

import pytest

from calcvm.edge import emission
from calcvm.helper_process import HelperProcess

MOST = 50  # requests of a process: what it has compiled stays in its memory


class Emitter:
    """A process for processors of a width."""

    def __init__(self, bits: int):
        self.told, self.asked = tempfile.TemporaryFile(), 0
        self.helper = HelperProcess(emission.__name__, str(bits), errors=self.told.fileno())

    def answered(self, request: bytes) -> tuple[bytes, str]:
        self.asked += 1
        self.told.seek(0)
        self.told.truncate()
        pipe, answer = self.helper.process, b""
        assert pipe.stdin is not None and pipe.stdout is not None
        pipe.stdin.write(request)
        pipe.stdin.flush()
        if head := pipe.stdout.readline():
            answer = head + pipe.stdout.read(json.loads(head)["bytes"])
        else:
            self.asked = MOST
        self.told.seek(0)
        return answer, self.told.read().decode(errors="replace")

    def end(self) -> None:
        self.helper.end()
        self.told.close()


@pytest.fixture(scope="package", autouse=True)
def emitters() -> Iterator[None]:
    kept: dict[int, Emitter] = {}

    def answered(bits: int, request: bytes) -> tuple[bytes, str]:
        if bits in kept and kept[bits].asked >= MOST:
            kept.pop(bits).end()
        if bits not in kept:
            kept[bits] = Emitter(bits)
        return kept[bits].answered(request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emission, "answered", answered)
        yield
    for emitter in kept.values():
        emitter.end()

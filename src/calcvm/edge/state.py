"""What lasts in a pack, there and back: bytes of a device from a model's, and a model's from those of a device.

Values are known by their names, so programs of one graph understand each other whatever their batches and layouts.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping

import numpy as np

from calcvm.errors import CalcError
from calcvm.formulas.steps import BETA1_T, BETA2_T, N_SLOTS
from calcvm.frozen import frozen
from calcvm.vm.run.loaded import Loaded

PAGE = struct.Struct(
    "<4I"
)  # of a page before the state: the program's first bytes, a counter, the state's bytes, a checksum
POWERS = [BETA1_T, BETA2_T]


@frozen
class Lasting:
    """A value that lasts: ``at`` bytes from the start of the state.  narrowed : hyperparameters, float32 on the device.

    A device keeps 1 - beta^t in place of Adam's beta^t: see calcvm.kernels_cpu._small.
    """

    at: int
    bytes: int
    narrowed: bool


def lasting_of(loaded: Loaded, span: tuple[int, int], batch: int, narrow: bool) -> dict[str, Lasting]:
    """The values in some bytes of a program's heap; narrow : the device has no float64."""
    hyper = {facts["hyper"] for facts in loaded.paths.values() if narrow and facts["backward"]}
    names = {loaded.program.symbols[number].name for number in hyper}
    found = [
        s for s in loaded.program.symbols if s.persistent and s.kind != "gradient" and span[0] <= s.start < span[1]
    ]
    return {s.name: Lasting(s.start - span[0], s.bytes.at(batch), s.name in names) for s in found}


def to_device(image: np.ndarray, source: Loaded, lasting: Mapping[str, Lasting], size: int) -> bytes:
    """The state of a device from a model's image with gradients."""
    out = np.zeros(size, np.uint8)
    for mine, of in _pairs(image, source, lasting):
        if of.narrowed:
            slots = mine.view(np.float64).copy()
            slots[POWERS] = 1 - slots[POWERS]
            with np.errstate(over="ignore", invalid="ignore"):
                mine = slots.astype(np.float32).view(np.uint8)
        out[of.at : of.at + of.bytes][: len(mine)] = mine[: of.bytes]
    return out.tobytes()


def from_device(data: bytes, image: np.ndarray, source: Loaded, lasting: Mapping[str, Lasting]) -> None:
    """Set a model's image with gradients to a device's state."""
    given = np.frombuffer(data, np.uint8)
    for mine, of in _pairs(image, source, lasting):
        if of.narrowed:
            with np.errstate(invalid="ignore"):  # numbers of a damaged device, which the next step finds
                slots = given[of.at : of.at + 4 * N_SLOTS].view(np.float32).astype(np.float64)
                slots[POWERS] = 1 - slots[POWERS]
            mine[...] = slots.view(np.uint8)
        else:
            n = min(of.bytes, len(mine))
            mine[:n] = given[of.at : of.at + n]


def _pairs(image: np.ndarray, source: Loaded, lasting: Mapping[str, Lasting]) -> Iterable[tuple[np.ndarray, Lasting]]:
    """The bytes of each value in a model's image."""
    known = {s.name: s for s in source.program.symbols if s.persistent}
    for name, of in lasting.items():
        if name not in known:
            raise CalcError(f"the pack is of another graph: the model has no {name!r}")
        if known[name].kind != "carry" and known[name].bytes.b != of.bytes:  # states of streams are of any batch
            raise CalcError(
                f"the pack is of another graph: {name!r} has {of.bytes:,} bytes there, {known[name].bytes.b:,} in the model"
            )
    return [(image[source.in_image(known[name])], of) for name, of in lasting.items()]


def newest(pages: Iterable[bytes], program: str, size: int) -> bytes:
    """The state of the newest page that is whole (CalcError: there is none)."""
    found = []
    for page in pages:
        if len(page) >= PAGE.size + size:
            head, state = page[:12], page[PAGE.size : PAGE.size + size]
            mark, counter, length, check = PAGE.unpack_from(page)
            if mark == int(program[:8], 16) and length == size and check == zlib.crc32(head + state):
                found.append((counter, state))
    if not found:
        raise CalcError(
            "no page is whole and of this program: give pages that the code of this pack has written (another pack of the model "
            "reads its own, and states go from one to the other by state_of), or the bytes of a state"
        )
    newest = max(found, key=lambda c: (c[0] - found[0][0] + (1 << 31)) % (1 << 32))  # a counter begins again at 0
    return newest[1]

"""What a pack is described by, whatever is written for it: functions, arrays in the heap, bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from calcvm.edge.state import Lasting
from calcvm.edge.targets import Processor
from calcvm.frozen import frozen
from calcvm.ops.types import BYTES

# of labels that a function takes: place, type, number of elements, classes, the one that is ignored, the row that a trap tells
Labels = tuple[int, str, int, int, "int | None", int]
# functions of every pack, and methods in MicroPython
OWN = (
    "start", "save", "load", "state", "checksum", "number", "number_at", "is_whole", "self_test", "apart", "array", "page",
)  # fmt: skip


def c_name(text: str) -> str:
    """A name as C may have it, behind the pack's."""
    return re.sub(r"\W", "_", text, flags=re.ASCII)


@frozen
class Function:
    """A function of a pack.

    name : without the pack's.  spans : of rows; a trap ends it behind the first in which it was met.
    feeds, outputs : names of arrays.
    """

    name: str
    spans: list[tuple[int, int]]
    feeds: tuple[str, ...]
    outputs: tuple[str, ...]


@frozen
class Array:
    """An array in the heap, ``at`` bytes from its start.  classes : its numbers are integers below it; 0: any."""

    at: int
    shape: tuple[int, ...]
    dtype: str
    classes: int = 0

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * BYTES[self.dtype]


@frozen
class Description:
    """A pack.

    program : the hash of the program whose rows it is made of.
    flash, ram, align : bytes of code and constants; of the heap, and what its address is a multiple of.
    state : where what lasts begins in the heap, and its bytes.  lasting : its values.
    stack : bytes by function.  undefined : functions of the compiler's runtime that it calls.
    self_test : see `calcvm.edge.self_test`.
    """

    name: str
    processor: Processor
    program: str
    batch: int
    functions: tuple[Function, ...]
    arrays: Mapping[str, Array]
    flash: int
    ram: int
    align: int
    state: tuple[int, int]
    lasting: Mapping[str, Lasting]
    stack: Mapping[str, int]
    undefined: tuple[str, ...]
    self_test: Mapping[str, Mapping[str, list[float]]]

    def facts(self) -> dict:
        """As it is written beside the code."""
        return {
            "name": self.name, "target": self.processor.name, "program": self.program, "batch_size": self.batch, "flash": self.flash, "ram": self.ram,
            "align": self.align, "state": list(self.state), "stack": dict(self.stack), "undefined": list(self.undefined),
            "lasting": {name: [of.at, of.bytes, of.narrowed] for name, of in self.lasting.items()},
            "functions": {"start": {"takes": [], "gives": []}, **{f.name: {"takes": list(f.feeds), "gives": list(f.outputs)} for f in self.functions}},
            "arrays": {name: {"at": a.at, "shape": list(a.shape), "dtype": a.dtype, "classes": a.classes} for name, a in self.arrays.items()},
            "self_test": {name: dict(outputs) for name, outputs in self.self_test.items()},
        }  # fmt: skip

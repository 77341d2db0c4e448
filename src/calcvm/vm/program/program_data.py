"""A program as data: rows of integers over one heap, and everything needed to run, show, check and store them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from calcvm.errors import CalcError, ProgramError
from calcvm.lazy import cached_property
from calcvm.ops.dims import Affine, Shape
from calcvm.ops.shape import COPY_ROW
from calcvm.ops.spec import HEADER_WORDS, RowSpec, find_row, row_named, stem_of
from calcvm.ops.types import BYTES
from calcvm.vm.program.documents import PAGES, know_equations
from calcvm.vm.program.encoding import FORMAT_VERSION, ITEMSIZE, Instruction, copied, form_of
from calcvm.vm.program.serialize import plain

KEPT_KINDS = ("parameter", "buffer", "carry", "state", "optimizer", "placeholder")


@dataclass(frozen=True, kw_only=True)
class Symbol:
    """The place of a value: ``elems`` elements of ``dtype`` from ``offset`` on, for any batch size.

    offset : of its first element, in the heap as an array of ``dtype``.
    name : unique in the program, for listings.
    members : for a block, the values (by index) that it spans; merged rows work on blocks.
    layout : the storage order, if it differs from the ``shape`` that users see.
    """

    name: str
    kind: str
    offset: int
    elems: Affine
    shape: Shape
    persistent: bool = False
    resident: bool = False
    members: tuple[int, ...] = ()
    dtype: str
    layout: str = ""

    @property
    def itemsize(self) -> int:
        return BYTES[self.dtype]

    @property
    def start(self) -> int:
        """Its first byte."""
        return self.offset * self.itemsize

    @property
    def bytes(self) -> Affine:
        return self.elems * self.itemsize

    @property
    def kept(self) -> bool:
        """Whether it never shares its storage."""
        return self.persistent or self.resident or self.kind in KEPT_KINDS


@dataclass(frozen=True, kw_only=True)
class Zone:
    """A zone of the heap, in elements: [start, stop), of which [persistent_start, persistent_stop) persists."""

    name: str
    start: int
    stop: int
    persistent_start: int = 0
    persistent_stop: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class ProgramData:
    """The fields of a `Program`, which describes them."""

    dtype: str
    instructions: tuple[Instruction, ...] = field(repr=False)
    rows: np.ndarray = field(repr=False)
    patches: np.ndarray = field(repr=False)
    sections: Mapping[tuple[str, str], tuple[int, int]]
    batch_size: int
    workers: int
    heap_elems: int
    zones: tuple[Zone, ...] = field(repr=False)
    symbols: tuple[Symbol, ...] = field(repr=False)
    operand_values: np.ndarray = field(repr=False)
    labels: tuple[str, ...] = field(repr=False)
    info: Mapping[str, Any] = field(default_factory=dict, repr=False)
    constants: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        freeze = object.__setattr__
        freeze(self, "rows", _read_only(self.rows, np.int64))
        freeze(self, "patches", _read_only(self.patches, np.int64))
        freeze(self, "operand_values", _read_only(self.operand_values, np.int32))
        freeze(self, "constants", {k: _read_only(v, None) for k, v in self.constants.items()})
        freeze(self, "info", json.loads(json.dumps(self.info, default=plain)))  # the same before and after a file

    def __getstate__(self) -> dict[str, Any]:
        """Its fields only; values derived from them and the table are derived again, from the table of the new process."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    # ------------------------------------------------------------ facts
    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    def __repr__(self) -> str:
        return (
            f"<Program: {self.dtype}, batch {self.batch_size}, {len(self.rows)} rows, {self.heap_bytes:,} bytes, paths "
            f"{', '.join(self.info['paths'])}{', specialized' * self.info.get('specialize', False)}>"
        )

    @property
    def heap_bytes(self) -> int:
        """Bytes of the heap that it takes."""
        return self.heap_elems * self.itemsize

    @property
    def page_bytes(self) -> int:
        """Size of the page file."""
        return sum((z.stop - z.start) * self.itemsize for z in self.zones if z.name == PAGES)

    @property
    def row_bytes(self) -> int:
        return 8 * self.rows.shape[1]

    @cached_property
    def specs(self) -> tuple[RowSpec, ...]:
        """Its instructions' specs in this calcvm's table."""
        know_equations(self.info)
        return tuple(row_named(name) for name, _ in self.instructions)

    def check_instructions(self) -> None:
        """Check that each is in the table, in the form that the program was compiled for, and in order (ProgramError)."""
        know_equations(self.info)
        names = [name for name, _ in self.instructions]
        if names != sorted(names):
            raise ProgramError("the program's instructions are not in the order of their names")
        if twice := [name for name in names if names.count(name) > 1]:
            raise ProgramError(
                f"the instruction {twice[0]!r} is there twice: its operator was declared again while the graph was built: "
                "build it again"
            )
        for name in names:
            if find_row(name) is None:
                of = re.split("_(?:fwd|bwd)", stem_of(name))[0]
                raise ProgramError(
                    f"no operator has the instruction {name!r}: declare the custom operator {of!r} as the program that made this "
                    "did (calcvm.operators.elementwise, cv.register_op), or compile the graph again"
                )
        changed = ", ".join(name for name, form in self.instructions if form != form_of(row_named(name)))
        if changed:
            raise ProgramError(f"written for other instructions ({changed}): build and compile the graph again")

    def spec(self, pc: int) -> RowSpec:
        """The instruction of a row."""
        return self.specs[self.rows[pc, 0]]

    def symbol_of(self, pc: int, operand: str) -> int:
        """The number of the symbol of a row's operand; -1: it is left out."""
        spec = self.spec(pc)
        return int(self.operand_values[pc, HEADER_WORDS + len(spec.words) + spec.operands.index(spec.operand(operand))])

    def copied_from(self, path: str, output: int) -> int:
        """The number of the symbol that an output is copied from, if its storage order differs from the users' view; or its own."""
        return self.copies.get(output, {}).get(path, output)

    @cached_property
    def copies(self) -> dict[int, dict[str, int]]:
        """For outputs stored in another order than users see: the symbols they are copied from, by path."""
        found: dict[int, dict[str, int]] = {}
        for (path, phase), span in self.sections.items():
            for pc in range(*span) if phase == "forward" else ():
                if stem_of(self.spec(pc).name) == COPY_ROW:
                    x, y = self.symbol_of(pc, "x"), self.symbol_of(pc, "y")
                    if self.symbols[x].layout:  # otherwise the user wrote a transposition
                        found.setdefault(y, {}).setdefault(path, x)
        return found

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(path for path, _ in self.sections))

    @cached_property
    def by_name(self) -> dict[str, Symbol]:
        """Symbols by name, for users; references between symbols use numbers."""
        return {s.name: s for s in self.symbols}

    def symbol(self, name: str) -> Symbol:
        try:
            return self.by_name[name]
        except KeyError:
            raise CalcError(f"the program has no value {name!r}; it has {', '.join(sorted(self.by_name))}") from None

    @cached_property
    def hash(self) -> str:
        """sha256 of the program's whole content."""
        return _hash(*self.to_parts())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProgramData) and self.hash == other.hash

    def __hash__(self) -> int:
        return int(self.hash[:15], 16)

    # ------------------------------------------------------------ batches
    def patch(self, rows_out: np.ndarray, batch: int) -> None:
        """Set the words of ``rows_out`` (a copy of ``rows``, C-contiguous) that depend on the batch."""
        if not 1 <= batch <= self.batch_size:
            raise CalcError(f"batch {batch}: the program is planned for 1 to {self.batch_size}")
        at, a, b = self._patch_plan
        rows_out.reshape(-1)[at] = a * batch + b

    def rows_for(self, batch: int, place: int = 0) -> np.ndarray:
        """A new, writable array of rows for ``batch``, aligned to cache lines.

        place : of the first sample among those of the largest batch, whose carries the rows take.
        """
        rows = copied(self.rows)
        self.patch(rows, batch)
        for i, symbol in enumerate(self.symbols if place else ()):
            if symbol.kind == "carry":
                rows[self.operand_values == i] += place * symbol.elems.b // self.batch_size
        return rows

    @cached_property
    def _patch_plan(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        row, word, a, b = (np.ascontiguousarray(c) for c in self.patches.T)
        return row * self.rows.shape[1] + word, a, b

    def to_parts(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The program as JSON-able documents and arrays, each under a name that starts with ``program``."""
        document = {
            "format_version": self.format_version,
            "dtype": self.dtype,
            "batch_size": self.batch_size,
            "workers": self.workers,
            "heap_elems": self.heap_elems,
            "sections": [[path, phase, *span] for (path, phase), span in self.sections.items()],
            "zones": [asdict(z) for z in self.zones],
            "symbols": [
                [
                    s.name,
                    s.kind,
                    s.offset,
                    _form(s.elems),
                    [_form(d) for d in s.shape],
                    s.persistent,
                    s.resident,
                    list(s.members),
                    s.dtype,
                ]
                for s in self.symbols
            ],  # fmt: skip
            "labels": list(self.labels),
            "info": dict(self.info),
            "instructions": [list(instruction) for instruction in self.instructions],
        }
        if layouts := {str(i): s.layout for i, s in enumerate(self.symbols) if s.layout}:
            document["layouts"] = layouts
        arrays = {"rows": self.rows, "patches": self.patches, "operand_values": self.operand_values}
        named = {f"program/{k}": v for k, v in arrays.items()}
        named.update({f"program/constants/{k}": v for k, v in self.constants.items()})
        return {"program": document}, named


def _hash(documents: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256(json.dumps(documents, sort_keys=True, separators=(",", ":")).encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode("utf-8", "surrogatepass"))
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _read_only(array: np.ndarray, dtype: Any) -> np.ndarray:
    array = np.asarray(array, dtype, order="C")
    if array.flags.writeable:
        array = array.copy()
        array.flags.writeable = False
    return array


def _form(n: Affine) -> list[int]:
    return [n.a, n.b]

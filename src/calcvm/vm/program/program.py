"""A program: rows of integers over one heap, and all that is needed to run, show, check and store them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from os import PathLike
from typing import Any, BinaryIO

import numpy as np

from calcvm import checks
from calcvm.errors import CalcError, ProgramError
from calcvm.lazy import cached_property
from calcvm.ops.dims import Affine, Shape
from calcvm.ops.shape import COPY_ROW
from calcvm.ops.spec import HEADER_WORDS, RowSpec, find_row, row_named, stem_of
from calcvm.ops.types import BYTES
from calcvm.tables import Lines
from calcvm.vm.program import schema
from calcvm.vm.program.documents import DOCUMENT, PAGES, know_equations
from calcvm.vm.program.encoding import FORMAT_VERSION, ITEMSIZE, Instruction, aligned, form_of
from calcvm.vm.program.formats import FORMER, converted
from calcvm.vm.program.serialize import plain, read_archive, write_archive
from calcvm.vm.program.verify import verify

KEPT_KINDS = ("parameter", "buffer", "state", "optimizer", "placeholder")


@dataclass(frozen=True, kw_only=True)
class Symbol:
    """Where a value lives: ``elems`` elements of ``dtype`` from ``offset`` on, for a batch of any size.

    offset : of its first element, in the heap seen as an array of ``dtype``.
    name : a symbol's own among its program's, for reading.
    members : of a block, the values (by index) that it spans; merged rows work on blocks.
    layout : how it lies, where that is not as users see its ``shape``.
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
        """Its storage is nobody else's at any time."""
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
class Program:
    """Verified rows over one heap.  Build one with `assemble` or `load_program`, never by hand.

    instructions : what rows may use, each by its place here; in the order of the names.
    rows : int64[n, width], encoded for ``batch_size``, the largest batch: cache lines enough for the longest instruction.
    patches : int64[m, 4], (row, word, a, b) sorted by row and word: this word is ``a*B + b``.
    sections : (path, phase) -> [start, stop) of rows.
    workers : the largest team; scratch is sized for it.
    operand_values : int32[n, width], the symbol behind each operand word, -1 elsewhere.
    labels : for each row the operator and variable it serves.
    info : facts about the graph, JSON-able (`calcvm.lowering.Facts`); symbols in them are their numbers.
    former : its hash in the file of a former format that it comes from.
    """

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
    former: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        freeze = object.__setattr__
        freeze(self, "rows", _read_only(self.rows, np.int64))
        freeze(self, "patches", _read_only(self.patches, np.int64))
        freeze(self, "operand_values", _read_only(self.operand_values, np.int32))
        freeze(self, "constants", {k: _read_only(v, None) for k, v in self.constants.items()})
        freeze(self, "info", json.loads(json.dumps(self.info, default=plain)))  # the same before and after a file

    def __getstate__(self) -> dict[str, Any]:
        """Its fields: what is found out of them and of the table is found out anew, by the table that is there then."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    # ------------------------------------------------------------ facts
    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    def __repr__(self) -> str:
        return (
            f"<Program: {self.dtype}, batch {self.batch_size}, {len(self.rows)} rows, {self.heap_bytes:,} bytes, paths "
            f"{', '.join(self.info['paths'])}>"
        )

    @property
    def heap_bytes(self) -> int:
        return self.heap_elems * self.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of the file that holds its pages."""
        return sum((z.stop - z.start) * self.itemsize for z in self.zones if z.name == PAGES)

    @property
    def row_bytes(self) -> int:
        return 8 * self.rows.shape[1]

    @cached_property
    def specs(self) -> tuple[RowSpec, ...]:
        """Its instructions in this calcvm's table."""
        know_equations(self)
        return tuple(row_named(name) for name, _ in self.instructions)

    def check_instructions(self) -> None:
        """Each is in the table, in the form that the program was made for, and they are in order (ProgramError)."""
        know_equations(self)
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
                    f"no operator has the instruction {name!r}: declare a user's operator {of!r} as the program did that made "
                    "this (calcvm.operators.elementwise, cv.register_op), or compile the graph again"
                )
        changed = ", ".join(name for name, form in self.instructions if form != form_of(row_named(name)))
        if changed:
            raise ProgramError(f"written for other instructions ({changed}): build and compile the graph again")

    def spec(self, pc: int) -> RowSpec:
        """The instruction of a row."""
        return self.specs[self.rows[pc, 0]]

    def symbol_of(self, pc: int, operand: str) -> int:
        """The number of the symbol behind an operand of a row, -1 if it is left out."""
        spec = self.spec(pc)
        return int(self.operand_values[pc, HEADER_WORDS + len(spec.words) + spec.operands.index(spec.operand(operand))])

    def copied_from(self, path: str, output: int) -> int:
        """The number of the symbol that an output was copied from, since it lies otherwise than users see it; or its own."""
        return self.copies.get(output, {}).get(path, output)

    @cached_property
    def copies(self) -> dict[int, dict[str, int]]:
        """Of outputs that lie otherwise than users see them, by path, the symbols that they are copied from."""
        found: dict[int, dict[str, int]] = {}
        for (path, phase), span in self.sections.items():
            for pc in range(*span) if phase == "forward" else ():
                if stem_of(self.spec(pc).name) == COPY_ROW:
                    x, y = self.symbol_of(pc, "x"), self.symbol_of(pc, "y")
                    if self.symbols[x].layout:  # else it is a transposition of the user's
                        found.setdefault(y, {}).setdefault(path, x)
        return found

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(path for path, _ in self.sections))

    @cached_property
    def by_name(self) -> dict[str, Symbol]:
        """Symbols by name, for people: what refers to a symbol does so by its number."""
        return {s.name: s for s in self.symbols}

    def symbol(self, name: str) -> Symbol:
        try:
            return self.by_name[name]
        except KeyError:
            raise CalcError(f"the program has no value {name!r}; it has {', '.join(sorted(self.by_name))}") from None

    @cached_property
    def hash(self) -> str:
        """sha256 of everything the program holds."""
        return _hash(*self.to_parts())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self.hash == other.hash

    def __hash__(self) -> int:
        return int(self.hash[:15], 16)

    # ------------------------------------------------------------ batches
    def patch(self, rows_out: np.ndarray, batch: int) -> None:
        """Set the words of ``rows_out`` (a copy of ``rows``, C-contiguous) that depend on the batch."""
        if not 1 <= batch <= self.batch_size:
            raise CalcError(f"batch {batch}: the program is planned for 1 to {self.batch_size}")
        at, a, b = self._patch_plan
        rows_out.reshape(-1)[at] = a * batch + b

    def rows_for(self, batch: int) -> np.ndarray:
        """A new, writable array of rows for ``batch``, which begin on cache lines."""
        rows = aligned(self.rows.nbytes).view(np.int64).reshape(self.rows.shape)
        rows[...] = self.rows
        self.patch(rows, batch)
        return rows

    @cached_property
    def _patch_plan(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        row, word, a, b = (np.ascontiguousarray(c) for c in self.patches.T)
        return row * self.rows.shape[1] + word, a, b

    # ------------------------------------------------------------ showing and storing
    def disassemble(self, batch: int | None = None) -> str:
        """One line a row, as an equation with names, shapes and offsets, for a batch (None: ``batch_size``)."""
        from calcvm.vm.program.disassemble import disassemble  # which reads equations: an import needs none

        batch = None if batch is None else checks.integer("disassemble: batch", batch, -checks.LARGEST)
        return Lines(disassemble(self, batch))

    def save(self, path: str | PathLike[str] | BinaryIO) -> None:
        """Write the program to a file that is open, or to a path: the file appears whole or not at all."""
        documents, arrays = self.to_parts()
        write_archive(path, documents, arrays, kind="program", version=self.format_version)

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

    @staticmethod
    def from_parts(documents: Mapping[str, Any], arrays: Mapping[str, np.ndarray], where: str = "program") -> Program:
        """The program that `to_parts` took apart, verified; ``where`` names its source in errors."""
        document = documents.get("program")
        version = document.get("format_version") if isinstance(document, Mapping) else None
        former = ""
        if isinstance(document, Mapping) and version == FORMER:
            former = _hash({"program": document}, {k: v for k, v in arrays.items() if k.startswith("program/")})
            document, arrays = converted(document, arrays, where)
        elif version is not None and version != FORMAT_VERSION:
            raise ProgramError(
                f"{where}: program format {version}, this calcvm reads {FORMER} and {FORMAT_VERSION}: compile the graph again"
            )
        document = schema.check(DOCUMENT, document, f"{where}: not a well-formed program, it")
        prefix, layouts = "program/constants/", document.get("layouts", {})
        program = Program(
            dtype=document["dtype"],
            instructions=tuple(Instruction(*instruction) for instruction in document["instructions"]),
            rows=_array(arrays, "rows", np.int64, where),
            patches=_array(arrays, "patches", np.int64, where),
            sections={(path, phase): (start, stop) for path, phase, start, stop in document["sections"]},
            batch_size=document["batch_size"],
            workers=document["workers"],
            heap_elems=document["heap_elems"],
            zones=tuple(Zone(**z) for z in document["zones"]),
            symbols=tuple(
                Symbol(name=name, kind=kind, offset=offset, elems=elems, shape=shape, persistent=persistent,
                       resident=resident, members=tuple(members), dtype=dtype, layout=layouts.get(str(i), ""))
                for i, (name, kind, offset, elems, shape, persistent, resident, members, dtype)
                in enumerate(document["symbols"])
            ),
            operand_values=_array(arrays, "operand_values", np.int32, where),
            labels=tuple(document["labels"]),
            info=document["info"],
            constants={k[len(prefix) :]: v for k, v in arrays.items() if k.startswith(prefix)},
            format_version=FORMAT_VERSION,
            former=former,
        )  # fmt: skip
        if len(program.sections) != len(document["sections"]):
            raise ProgramError(f"{where}: a section of the program is there twice")
        try:
            verify(program)
        except ProgramError as error:
            raise ProgramError(f"{where}: {error}") from None
        return program


def load_program(path: str | PathLike[str] | BinaryIO) -> Program:
    """Read and verify a program that `Program.save` wrote, or that of a model that `Model.save` wrote.

    No memory is asked for but for the file's own content: ``heap_bytes`` is what running the program would take.

    Raises
    ------
    ProgramError
        The file is truncated, altered, foreign, of an unknown version, or does not verify.
    FileError
        It cannot be read.
    """
    archive = read_archive(path, kinds=("program", "model"), versions=(FORMER, FORMAT_VERSION))
    return Program.from_parts(archive.documents, archive.arrays, where=archive.name)


# ---------------------------------------------------------------- small helpers
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


def _array(arrays: Mapping[str, np.ndarray], name: str, dtype: Any, where: str) -> np.ndarray:
    array = arrays.get(f"program/{name}")
    if array is None or array.dtype != dtype or array.ndim != 2:
        found = "missing" if array is None else f"{array.dtype} of {array.ndim} axes"
        raise ProgramError(f"{where}: the program's {name} are {found}, not {np.dtype(dtype)} of 2 axes")
    return array


def _form(n: Affine) -> list[int]:
    return [n.a, n.b]

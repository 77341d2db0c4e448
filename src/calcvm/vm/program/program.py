"""A program as users see it: its data, its listing, and its file."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any, BinaryIO

import numpy as np

from calcvm import checks
from calcvm.errors import ProgramError
from calcvm.tables import Lines
from calcvm.vm.program import schema
from calcvm.vm.program.documents import DOCUMENT
from calcvm.vm.program.encoding import FORMAT_VERSION, MODEL_VERSION, Instruction
from calcvm.vm.program.program_data import ProgramData, Symbol, Zone
from calcvm.vm.program.serialize import read_archive, write_archive
from calcvm.vm.program.verify import verify

__all__ = ["Program", "Symbol", "Zone", "load_program"]


class Program(ProgramData):
    """Verified rows over one heap.  Build one with `assemble` or `load_program`, never by hand.

    instructions : those that rows may use, by index; in order of their names.
    rows : int64[n, width], encoded for ``batch_size``, the largest batch; width: cache lines for the longest instruction.
    patches : int64[m, 4], (row, word, a, b) sorted by row and word: this word is ``a*B + b``.
    sections : (path, phase) -> [start, stop) of rows.
    workers : the largest team; scratch is sized for it.
    operand_values : int32[n, width], the symbol behind each operand word, -1 elsewhere.
    labels : for each row the operator and variable it serves.
    info : facts about the graph, JSON-able (`calcvm.lowering.sections.GraphFacts`); they refer to symbols by number.

    Examples
    --------
    >>> graph = cv.build_graph(nn.Linear(2), (4,), "mse", cv.SGD(0.1))
    >>> program = cv.compile(graph, batch_size=32, accumulate=False)
    >>> "linear_fwd" in program.disassemble()
    True
    """

    def disassemble(self, batch: int | None = None) -> str:
        """One line per row, as an equation with names, shapes and offsets, for a batch (default: sizes in terms of the batch ``B``)."""
        from calcvm.vm.program.disassemble import disassemble  # a module for equations, which an import does not need

        batch = None if batch is None else checks.integer("disassemble: batch", batch, -checks.LARGEST)
        return Lines(disassemble(self, batch))

    def save(self, path: str | PathLike[str] | BinaryIO) -> None:
        """Write the program to an open file, or to a path, where it appears completely or not at all."""
        documents, arrays = self.to_parts()
        write_archive(path, documents, arrays, kind="program", version=self.format_version)

    @staticmethod
    def from_parts(documents: Mapping[str, Any], arrays: Mapping[str, np.ndarray], where: str = "program") -> Program:
        """The program from the parts of `to_parts`, verified; ``where`` names its source in errors."""
        document = documents.get("program")
        version = document.get("format_version") if isinstance(document, Mapping) else None
        if version is not None and version != FORMAT_VERSION:
            raise ProgramError(
                f"{where}: program format {version}, this calcvm reads {FORMAT_VERSION}: compile the graph again"
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
        )  # fmt: skip
        if len(program.sections) != len(document["sections"]):
            raise ProgramError(f"{where}: a section of the program is there twice")
        try:
            verify(program)
        except ProgramError as error:
            raise ProgramError(f"{where}: {error}") from None
        return program


def load_program(path: str | PathLike[str] | BinaryIO) -> Program:
    """Read and verify a program that `Program.save` wrote, or the program of a model that `Model.save` wrote.

    This allocates only the file's own content; running the program takes ``heap_bytes``.

    Raises
    ------
    ProgramError
        The file is truncated, altered, foreign, of an unknown version, or does not verify.
    FileError
        It cannot be read.

    Examples
    --------
    >>> graph = cv.build_graph(nn.Linear(2), (4,), "mse", cv.SGD(0.1))
    >>> program = cv.compile(graph, batch_size=32)
    >>> program.save("program.calc")
    >>> cv.load_program("program.calc") == program
    True
    """
    archive = read_archive(path, kinds={"program": FORMAT_VERSION, "model": MODEL_VERSION})
    return Program.from_parts(archive.documents, archive.arrays, where=archive.name)


def _array(arrays: Mapping[str, np.ndarray], name: str, dtype: Any, where: str) -> np.ndarray:
    array = arrays.get(f"program/{name}")
    if array is None or array.dtype != dtype or array.ndim != 2:
        found = "missing" if array is None else f"{array.dtype} of {array.ndim} axes"
        raise ProgramError(f"{where}: the program's {name} are {found}, not {np.dtype(dtype)} of 2 axes")
    return array

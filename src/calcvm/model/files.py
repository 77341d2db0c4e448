"""Models in files."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from calcvm.errors import PlanError, ProgramError
from calcvm.vm.memory.heap import CalcHeap, parse_bytes
from calcvm.vm.memory.resident import Resident
from calcvm.vm.program import schema
from calcvm.vm.program.facts import MAX_LEARNING, MAX_ROUNDS, MAX_SEED, check_learning_batch
from calcvm.vm.program.program import Program, Symbol
from calcvm.vm.program.schema import boolean, integer, record
from calcvm.vm.program.serialize import read_archive, write_archive
from calcvm.vm.run.loaded import loaded_of

if TYPE_CHECKING:
    from calcvm.model.model import Model

FORMAT_VERSION = 2


def persistent(program: Program) -> dict[int, Symbol]:
    """Symbols whose values a model is, by number: what a file must hold."""
    return {i: s for i, s in enumerate(program.symbols) if s.persistent and not s.members}


def _state(program: Program, image: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Views of all that persists in an image with its gradients, by the name of its array in a file: its number."""
    loaded, cells = loaded_of(program), image.view(np.uint8)
    for i, s in persistent(program).items():
        yield f"state/{i}", cells[loaded.in_image(s)].view(s.dtype)


def heap_of(program: Program, page_folder: str | PathLike[str] | None = None) -> CalcHeap:
    """A heap for one model of a program."""
    return CalcHeap(program.heap_bytes, device=program.info.get("device", "cpu"), page_folder=page_folder)


def write(model: Model, path: str | PathLike[str] | BinaryIO) -> None:
    """`Model.save`."""
    documents, arrays = model.program.to_parts()
    resident = model.resident
    with resident.record.turn.mine:
        documents["model"] = {
            "seed": resident.seed,
            "epochs": model.epochs_done,
            "learning_batch": model.learning_batch,
            "open": resident.adding,
        }
        image = resident.image()
    for key, cells in _state(model.program, image):
        arrays[key] = cells
    write_archive(path, documents, arrays, kind="model", version=FORMAT_VERSION)


_MODEL = record(
    {"seed": integer(0, MAX_SEED), "epochs": integer(0, MAX_ROUNDS), "learning_batch": integer(1, MAX_LEARNING)},
    optional={"open": boolean},
)


def read(path: str | PathLike[str] | BinaryIO, memory: int | str | None) -> Resident:
    """The model of a file, in a heap of its own (see `calcvm.model.load`)."""
    archive = read_archive(path, kinds=("model",), versions=(FORMAT_VERSION,))
    program = Program.from_parts(archive.documents, archive.arrays, where=archive.name)
    where = f"{archive.name}: document 'model'"
    facts = {"program": program.hash, **schema.check(_MODEL, archive.document("model"), where)}
    facts["rounds"] = facts.pop("epochs")
    check_learning_batch(program, facts["learning_batch"], f"{where}.", ProgramError)
    for i, s in persistent(program).items():  # before any memory is asked for
        given = archive.array(f"state/{i}")
        if program.former and given.dtype == program.dtype and given.nbytes == s.bytes.b:
            continue  # eight bytes of a number were elements of the heap
        if given.shape != (s.elems.b,) or given.dtype != s.dtype:
            raise ProgramError(
                f"{archive.name}: the state of {s.name!r} is {given.dtype} of shape {given.shape}, "
                f"{s.dtype} of shape {(s.elems.b,)} is wanted"
            )
    allowed = None if memory is None else parse_bytes(memory)
    if allowed is not None and program.heap_bytes > allowed:
        raise PlanError(
            f"{archive.name}: its heap takes {program.heap_bytes:,} bytes, memory= allows {allowed:,}",
            program.heap_bytes,
            allowed,
        )
    heap = heap_of(program)
    image = np.zeros(loaded_of(program).image_bytes(open=True), np.uint8)
    for key, cells in _state(program, image):
        cells.view(np.uint8)[:] = archive.array(key).view(np.uint8)
    return heap.adopt(program, facts, image)

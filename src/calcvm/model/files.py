"""Models in files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from os import PathLike
from typing import Any, BinaryIO

import numpy as np

from calcvm import checks
from calcvm.errors import CalcError, PlanError, ProgramError
from calcvm.vm.memory.base_model import BaseModel
from calcvm.vm.memory.heap import parse_bytes
from calcvm.vm.program import schema
from calcvm.vm.program.encoding import MODEL_VERSION
from calcvm.vm.program.facts import FIELDS, MAX_EPOCHS, MAX_LEARNING, MAX_SEED, Facts, check_learning_batch
from calcvm.vm.program.program import Program, Symbol
from calcvm.vm.program.schema import boolean, integer, mapping
from calcvm.vm.program.serialize import read_archive, write_archive
from calcvm.vm.run.loaded import loaded_of

NOTES = "notes"


class Notes(MutableMapping[str, Any]):
    """`Model.notes`: a part of the model's facts.  Reading a list or mapping marks it as changed, so it may be edited in place."""

    def __init__(self, facts: Facts):
        self._facts = facts

    def _kept(self) -> dict[str, Any]:
        return self._facts.get(NOTES, {})

    def __getitem__(self, name: str) -> Any:
        value = self._kept()[name]
        self._facts.changed |= isinstance(value, (dict, list))
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        self.replace({**self._kept(), name: value})

    def __delitem__(self, name: str) -> None:
        kept = {**self._kept()}
        del kept[name]
        self.replace(kept)

    def __iter__(self) -> Iterator[str]:
        return iter([*self._kept()])

    def __len__(self) -> int:
        return len(self._kept())

    def __repr__(self) -> str:
        return repr(self._kept())

    def replace(self, given: Any) -> None:
        """Replace all notes."""
        given = checks.one_of("notes", given, Mapping, 'a mapping such as {"scaler": [0.5, 2.0]}')
        self._facts[NOTES] = {name: plain(f"notes: {name!r}", value) for name, value in _named("notes", given)}


def _named(what: str, given: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in given.items():
        if not isinstance(name, str):
            raise CalcError(f"{what}: {checks.shown(name)} is no text, and names of notes are texts")
        yield name, value


def plain(what: str, value: Any) -> Any:
    """A value as JSON would return it (CalcError: JSON cannot hold it)."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        return {name: plain(f"{what}[{name!r}]", inner) for name, inner in _named(what, value)}
    if isinstance(value, (list, tuple)):
        return [plain(f"{what}[{i}]", inner) for i, inner in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    hint = ": give its list, .tolist()" if isinstance(value, np.ndarray) else ""
    raise CalcError(f"{what}: {checks.called(value)} cannot be written as JSON{hint}")


def persistent(program: Program) -> dict[int, Symbol]:
    """The persistent symbols, by number: their values make up a model, and a file must hold them."""
    return {i: s for i, s in enumerate(program.symbols) if s.persistent and not s.members}


def _state(program: Program, image: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Views of all persistent values in an image with gradients, by array name in a file; the name has the symbol's number."""
    loaded, cells = loaded_of(program), image.view(np.uint8)
    for i, s in persistent(program).items():
        yield f"state/{i}", cells[loaded.in_image(s)].view(s.dtype)


def write(model: BaseModel, path: str | PathLike[str] | BinaryIO, state: bool) -> None:
    """`Model.save`."""
    documents, arrays = model.program.to_parts()
    with model.record.turn.mine:
        image = model.image(state)  # first: a fleet that trains the model updates its epochs when it releases it
        documents["model"] = {
            "seed": model.seed,
            "epochs": model.epochs_done,
            "learning_batch": model.learning_batch,
            "open": model.adding,
        }
        own = {name: value for name, value in model.facts.items() if name not in (*FIELDS, "learning_batch")}
        if own:
            documents["model"]["facts"] = {name: plain(f"save: {name!r}", value) for name, value in own.items()}
    for key, cells in _state(model.program, image):
        arrays[key] = cells
    write_archive(path, documents, arrays, kind="model", version=MODEL_VERSION)


_MODEL = mapping(
    {"seed": integer(0, MAX_SEED), "epochs": integer(0, MAX_EPOCHS), "learning_batch": integer(1, MAX_LEARNING)},
    optional={"open": boolean, "facts": mapping({}, others=True)},
)


def read(path: str | PathLike[str] | BinaryIO, memory: int | str | None) -> tuple[Program, dict[str, Any], np.ndarray]:
    """The program, facts and image of a model's file (see `calcvm.model.load`)."""
    archive = read_archive(path, kinds={"model": MODEL_VERSION})
    program = Program.from_parts(archive.documents, archive.arrays, where=archive.name)
    where = f"{archive.name}: document 'model'"
    facts = {"program": program.hash, **schema.check(_MODEL, archive.document("model"), where)}
    facts |= {name: value for name, value in facts.pop("facts", {}).items() if name not in facts}
    check_learning_batch(program, facts["learning_batch"], f"{where}.", ProgramError)
    for i, s in persistent(program).items():  # checked before any memory is allocated
        given = archive.array(f"state/{i}")
        if given.shape != (s.elems.b,) or given.dtype != s.dtype:
            raise ProgramError(
                f"{archive.name}: the state of {s.name!r} is {given.dtype} of shape {given.shape}, "
                f"{s.dtype} of shape {(s.elems.b,)} is wanted"
            )
    allowed = None if memory is None else parse_bytes(memory)
    if allowed is not None and program.heap_bytes > allowed:
        raise PlanError(
            f"{archive.name}: its heap takes {program.heap_bytes:,} bytes, memory= allows {allowed:,}: raise memory=, or leave it out",
            program.heap_bytes,
            allowed,
        )
    image = np.zeros(loaded_of(program).image_bytes(open=True), np.uint8)
    for key, cells in _state(program, image):
        cells.view(np.uint8)[:] = archive.array(key).view(np.uint8)
    return program, facts, image

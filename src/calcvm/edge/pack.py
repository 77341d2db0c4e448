"""A pack: a model's steps for another processor as an object file, its C header, and what they take of flash, RAM and stack."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from keyword import iskeyword
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calcvm import checks
from calcvm.edge.description import OWN, Array, Description, Function, Labels, c_name
from calcvm.edge.elf import Elf
from calcvm.edge.emission import emit
from calcvm.edge.formats import written
from calcvm.edge.micropython import MODULES
from calcvm.edge.places import Places, places_of
from calcvm.edge.self_test import expected
from calcvm.edge.state import Lasting, from_device, lasting_of, newest, to_device
from calcvm.edge.targets import Processor
from calcvm.edge.web import wasm
from calcvm.errors import CalcError, FileError, PlanError, telling
from calcvm.files import replace
from calcvm.frozen import frozen
from calcvm.kernels_cpu import own_kernels
from calcvm.ops.statement import PHASES
from calcvm.planner.lifetimes import Machine
from calcvm.tables import laid_out
from calcvm.vm.run.device import Cpu
from calcvm.vm.run.loaded import FORWARD

if TYPE_CHECKING:
    from calcvm.vm.memory.base_model import BaseModel
    from calcvm.vm.run.loaded import Loaded

TAKEN = (  # whose files would stand for others
    "assert", "complex", "ctype", "errno", "fenv", "float", "inttypes", "iso646", "limits", "locale", "main", "math", "setjmp", "signal",
    "stdarg", "stdbool", "stddef", "stdint", "stdio", "stdlib", "string", "tgmath", "time", "wchar", "wctype",
)  # fmt: skip
NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
HELPERS = (
    "memcpy",
    "memset",
    "__aeabi_memcpy",
    "__aeabi_memcpy4",
    "__aeabi_memclr",
    "__aeabi_memclr4",
    "__aeabi_memclr8",
)  # what a C compiler supposes to be there, too


@frozen(kw_only=True)
class Pack:
    """What `Model.export` has written.

    files : paths.  target, batch_size : what it is for.
    flash, ram : bytes of code and constants, and of the heap.  stack : bytes of stack by function.
    undefined : functions of the compiler's runtime that it calls, besides memcpy and memset; their stack is not counted.
    program : the hash of the program whose rows it is made of.
    state : where what lasts begins in the heap, and its bytes.  lasting : its values.
    """

    files: tuple[Path, ...]
    target: str
    batch_size: int
    flash: int
    ram: int
    stack: Mapping[str, int]
    undefined: tuple[str, ...]
    program: str
    state: tuple[int, int]
    lasting: Mapping[str, Lasting]

    def __str__(self) -> str:
        rows = [("flash", self.flash, "code and start values"), ("RAM", self.ram, "the heap")]
        rows += [("stack", size, name) for name, size in self.stack.items()]
        told = laid_out([(what, f"{n:,} bytes", of) for what, n, of in rows])
        linked = (
            f"{len(self.undefined)} functions of the compiler's runtime are not counted: {', '.join(self.undefined)}"
        )
        return "\n".join([f"{self.target}, batch of {self.batch_size}", *told, *[linked] * bool(self.undefined)])

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Pack:
        """The pack that a file such as ``pack/model.json`` describes.

        Raises
        ------
        FileError : the file cannot be read, or describes no pack.
        """
        with telling(str(path), "read"):
            text = Path(path).read_text()
        try:
            facts = json.loads(text)
            return cls._of((Path(path),), facts)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FileError(f"{path} describes no pack: give the .json of model.export") from error

    @classmethod
    def _of(cls, files: tuple[Path, ...], facts: Mapping[str, Any]) -> Pack:
        """A pack from the facts that are written beside its code."""
        same = {name: facts[name] for name in ("target", "batch_size", "flash", "ram", "stack", "program")}
        lasting = {name: Lasting(*of) for name, of in facts["lasting"].items()}
        return cls(
            files=files, undefined=tuple(facts["undefined"]), state=tuple(facts["state"]), lasting=lasting, **same
        )

    def state_of(self, model: BaseModel) -> bytes:
        """A model's state as the device has it in its heap, `state` bytes: to go on there from what the model has learned.

        Raises
        ------
        CalcError : the pack is of another graph.
        """
        return to_device(model.image(), model.loaded, self.lasting, self.state[1])

    def restore(self, model: BaseModel, *states: bytes) -> None:
        """Set a model to what a device has learned; training goes on from there.

        Parameters
        ----------
        states : the bytes of the state from a device's heap, or pages that ``NAME_save`` has written, of which the newest whole one
            counts.

        Raises
        ------
        CalcError : no page is whole, or of this program; or the pack is of another graph.
        """
        for state in states:
            checks.one_of(
                "restore: a state", state, (bytes, bytearray, memoryview), "bytes, such as open(page, 'rb').read(),"
            )
        given = [bytes(state) for state in states]
        state = (
            given[0]
            if len(given) == 1 and len(given[0]) == self.state[1]
            else newest(given, self.program, self.state[1])
        )
        image = model.image()
        from_device(state, image, model.loaded, self.lasting)
        model.restore(image)


@frozen
class Order:
    """What `Model.export` is given: see there."""

    processor: Processor
    name: str
    batch: int | None
    objective: str
    format: str
    flash: int | None
    ram: int | None


def export(loaded: Loaded, paths: Sequence[tuple[str, str]], model: BaseModel, folder: Any, order: Order) -> Pack:
    """`Model.export`; ``loaded`` : the program, of the model's graph.  ``paths`` : of each function its name and path."""
    processor, name, batch = order.processor, order.name, order.batch
    taken = (*TAKEN, *MODULES) if order.format == "micropython" else TAKEN
    if not isinstance(name, str) or not NAME.fullmatch(name) or name in taken or iskeyword(name):
        raise CalcError(
            f"export: name {checks.shown(name)}: a C name of small letters, digits and _, at most 32, is wanted, not that of a header of C, "
            "a module of MicroPython or a word of Python"
        )
    if not paths:
        raise CalcError("export: paths is empty: name one, or leave it out")
    program, narrow = loaded.program, processor.bits == 32
    batch = program.batch_size if batch is None else checks.integer("export: batch_size", batch, 1, program.batch_size)
    _check(loaded, processor)
    functions = [_function(loaded, what, path) for what, path in paths]
    if len({*OWN, *(f.name for f in functions)}) < len(OWN) + len(paths):
        raise CalcError(
            f"export: paths {', '.join(path for _, path in paths)} give two functions one name, or one of {', '.join(OWN)}: rename a path"
        )
    entries = {f"{name}_{f.name}": f.spans for f in functions}
    places = places_of(program, [span for spans in entries.values() for span in spans], loaded.image)
    lasting, constant = (lasting_of(loaded, span, batch, narrow) for span in (places.state, places.constants))
    image, size = model.image(), places.state[1] - places.state[0]
    kept = to_device(image, model.loaded, lasting, size)
    constants = to_device(image, model.loaded, constant, places.constants[1] - places.constants[0])
    _check_cap("ram", places.ram, order.ram, f"the heap of a batch of {batch}")
    start, source = kept.rstrip(b"\0"), name if order.format in ("c", "micropython") else ""
    arrays = {v: _array(loaded, v, batch, places) for f in functions for v in (*f.feeds, *f.outputs)}
    labels = {f"{name}_{f.name}": _labels(loaded, f, arrays) for f in functions}
    code = emit(
        program, batch, entries, processor, order.objective, places, f"{name}_start", start, constants, labels, source
    )
    stack = {entry: code.stack(entry) for entry in (f"{name}_start", *entries)}
    binary = wasm(code.object, processor, [*stack], max(stack.values())) if processor.wasm else code.object
    elf = None if processor.wasm else Elf(binary)
    pack = Description(
        name=name, processor=processor, program=program.hash, batch=batch, functions=tuple(functions),
        arrays=arrays, self_test=expected(model, {path: f for (_, path), f in zip(paths, functions)}, arrays),
        flash=elf.flash if elf else len(binary), ram=places.ram, align=Machine(program.itemsize, device=loaded.device.name).line,
        state=(places.of(places.state[0])[0], size), lasting=lasting, stack=stack,
        undefined=tuple(f for f in elf.undefined if f not in HELPERS) if elf else (),
    )  # fmt: skip
    numbers = f"code and constants, {len(start) + len(constants):,} of them the model's numbers"
    _check_cap("flash", pack.flash, order.flash, numbers)
    made = code.source.encode() if source else binary
    return Pack._of(_write(folder, written(order.format, pack, made)), pack.facts())


def _check_cap(what: str, needed: int, cap: int | None, of: str) -> None:
    if cap is not None and needed > cap:
        raise PlanError(f"export: {what}={cap:,} bytes is too little: {needed:,} are needed for {of}", needed, cap)


def _check(loaded: Loaded, processor: Processor) -> None:
    """Raise a CalcError if a program is none for other processors."""
    if not isinstance(loaded.device, Cpu):
        raise CalcError(f"export: the model is compiled for {loaded.device.name!r}: compile it for the CPU")
    names = [instruction.name for instruction in loaded.program.instructions]
    if own := sorted(own_kernels(names)):
        raise CalcError(
            f"export: {own[0]} is a kernel that only this process has: write the operator as an equation (cv.equation)"
        )
    if loaded.paged[1] > loaded.paged[0]:
        raise CalcError("export: the program keeps values in a file (pages): plan it without them")
    if processor.bits == 32 and loaded.program.dtype != "float32":
        raise CalcError(f"export: {processor.name} computes in float32, and the program has {loaded.program.dtype}")


def _function(loaded: Loaded, what: str, path: str) -> Function:
    """The function of a path, whose first rows are those of the results: a trap there ends it."""
    phases = PHASES if loaded.paths[path]["backward"] else PHASES[:1]
    spans = [*loaded.round(path, *phases[: len(FORWARD)])]
    if phases == PHASES:
        spans.append(loaded.span(path, phases[len(FORWARD) :]))
    return Function(
        c_name(what),
        spans,
        tuple(loaded.feeds(path, phases)),
        tuple(_outputs(loaded, path)),
    )


def _array(loaded: Loaded, name: str, batch: int, places: Places) -> Array:
    symbol = loaded.symbol(name)
    classes = loaded.variables[name]["classes"] or 0
    return Array(places.of(symbol.start)[0], tuple(loaded.shape(name, batch)), symbol.dtype, classes)


def _labels(loaded: Loaded, function: Function, arrays: Mapping[str, Array]) -> list[Labels]:
    """The labels that a function takes; a trap tells the first row that reads them."""
    program, found = loaded.program, []
    numbers = {symbol.name: k for k, symbol in enumerate(program.symbols)}
    for name in function.feeds:
        of = arrays[name]
        if of.classes:
            rows = (pc for span in function.spans for pc in range(*span))
            row = next((pc for pc in rows if numbers[name] in program.operand_values[pc]), 0)
            ignored = loaded.variables[name].get("ignored")
            found.append((of.at, of.dtype, math.prod(of.shape), of.classes, ignored, row))
    return found


def _outputs(loaded: Loaded, path: str) -> list[str]:
    facts = loaded.paths[path]
    if facts["backward"]:
        return [facts["loss"]]
    return [y for y in facts.get("outputs", [facts["output"]]) if y is not None]


# ---------------------------------------------------------------- files
def _write(folder: Any, files: Mapping[str, bytes | str]) -> tuple[Path, ...]:
    if not isinstance(folder, (str, PathLike)):
        raise CalcError(f"export: {checks.shown(folder)} is not the path of a folder")
    place = Path(folder)
    with telling(str(folder), "written"):
        place.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            replace(place / name, _writer(data if isinstance(data, bytes) else data.encode()))
    return tuple(place / name for name in files)


def _writer(data: bytes) -> Callable[[Any], object]:
    return lambda file: file.write(data)

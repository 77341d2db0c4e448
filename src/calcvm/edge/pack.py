"""A pack: a model's steps for another processor as an object file, its C header, and what they take of flash, RAM and stack."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calcvm import checks
from calcvm.edge.emission import emit
from calcvm.edge.targets import Processor, processor_of
from calcvm.errors import CalcError, telling
from calcvm.files import replace
from calcvm.formulas.steps import BETA1_T, BETA2_T, COSINE, COSINE_RESTARTS, N_SLOTS
from calcvm.frozen import frozen
from calcvm.kernels_cpu import own_kernels
from calcvm.ops.statement import PHASES
from calcvm.tables import laid_out
from calcvm.vm.program.encoding import decode_row
from calcvm.vm.run.device import Cpu
from calcvm.vm.run.loaded import FORWARD

if TYPE_CHECKING:
    from calcvm.vm.run.loaded import Loaded

NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
C_TYPES = {"float32": "float", "float64": "double", "int64": "int64_t", "int32": "int32_t", "uint8": "uint8_t", "int8": "int8_t", "bool": "uint8_t"}  # fmt: skip
HELPERS = (
    "memcpy",
    "memset",
    "__aeabi_memcpy",
    "__aeabi_memcpy4",
    "__aeabi_memclr",
    "__aeabi_memclr4",
)  # what a C compiler supposes to be there, too
ALLOCATED, SYMBOLS, WITHOUT_BITS = 2, 2, 8  # of ELF: a flag, and types of sections


@frozen
class Pack:
    """What `Model.export` has written.

    files : paths.  target, batch_size : what it is for.
    flash, ram : bytes of code and constants, and of the heap.  stack : bytes of stack by function.
    undefined : functions of the compiler's runtime that it calls, besides memcpy and memset; their stack is not counted.
    """

    files: tuple[Path, ...]
    target: str
    batch_size: int
    flash: int
    ram: int
    stack: Mapping[str, int]
    undefined: tuple[str, ...]

    def __str__(self) -> str:
        rows = [("flash", self.flash, "code and start values"), ("RAM", self.ram, "the heap")]
        rows += [("stack", size, name) for name, size in self.stack.items()]
        told = laid_out([(what, f"{n:,} bytes", of) for what, n, of in rows])
        linked = (
            f"{len(self.undefined)} functions of the compiler's runtime are not counted: {', '.join(self.undefined)}"
        )
        return "\n".join([f"{self.target}, batch of {self.batch_size}", *told, *[linked] * bool(self.undefined)])


def export(
    loaded: Loaded,
    paths: Mapping[str, str],
    image: np.ndarray,
    folder: Any,
    target: object,
    name: str,
    batch: int | None,
) -> Pack:
    """`Model.export`; ``paths`` : by function.  ``image`` : the model's persistent bytes with gradients."""
    processor = processor_of(target)
    if not NAME.fullmatch(name):
        raise CalcError(
            f"export: name {checks.shown(name)}: a C name of small letters, digits and _, at most 32, is wanted"
        )
    program = loaded.program
    batch = program.batch_size if batch is None else checks.integer("export: batch_size", batch, 1, program.batch_size)
    _check(loaded, processor)
    functions = {what: re.sub(r"\W", "_", what) for what in paths}
    if len({"start", *functions.values()}) <= len(paths):
        raise CalcError(f"export: paths {', '.join(paths.values())} give two functions one name: rename a path")
    of = {
        f"{name}_{functions[what]}": (path, PHASES if loaded.paths[path]["backward"] else PHASES[:1])
        for what, path in paths.items()
    }
    entries = {function: _spans(loaded, path, phases) for function, (path, phases) in of.items()}
    start = _start(loaded, image, processor)
    code = emit(program, batch, entries, processor, f"{name}_start", (loaded.image[0], start))
    stack = {entry: code.stack(entry) for entry in (f"{name}_start", *entries)}
    elf, ram = Elf(code.object), program.heap_bytes
    flash, undefined = elf.flash, tuple(f for f in elf.undefined if f not in HELPERS)
    arrays = {function: (loaded.feeds(path, phases), _outputs(loaded, path)) for function, (path, phases) in of.items()}
    header = _header(loaded, processor, name, batch, arrays, stack, flash, ram)
    facts = {
        "target": processor.name, "program": program.hash, "batch_size": batch, "flash": flash, "ram": ram, "stack": stack,
        "state": list(loaded.image), "undefined": undefined,
    }  # fmt: skip
    files = {
        f"{name}.o": code.object,
        f"{name}.h": header.encode(),
        f"{name}.json": json.dumps(facts, indent=1).encode(),
    }
    return Pack(_write(folder, files), processor.name, batch, flash, ram, stack, undefined)


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
    specs = [(loaded.program.spec(pc), row) for pc, row in enumerate(loaded.program.rows)] if processor.small else []
    if any(
        spec.name == "tick" and decode_row(spec, row)[0]["schedule"] in (COSINE, COSINE_RESTARTS) for spec, row in specs
    ):
        raise CalcError(
            f"export: {processor.name} has no cosine, which the schedule of the learning rate needs: take another one"
        )
    if processor.small and loaded.program.dtype != "float32":
        raise CalcError(f"export: {processor.name} computes in float32, and the program has {loaded.program.dtype}")


def _spans(loaded: Loaded, path: str, phases: tuple[str, ...]) -> list[tuple[int, int]]:
    """The rows of a function: results first, on which a trap ends it."""
    before = loaded.round(path, *phases[: len(FORWARD)])
    return [*before, loaded.span(path, phases[len(FORWARD) :])] if phases == PHASES else before


def _start(loaded: Loaded, image: np.ndarray, processor: Processor) -> bytes:
    """The bytes with which a heap starts, those of `Loaded.image`."""
    (first, last), begin = loaded.image, loaded.opened[0]
    start = image[first - begin : last - begin].copy()
    for facts in loaded.paths.values() if processor.small else ():
        if facts["backward"]:  # see calcvm.kernels_cpu._small
            at = loaded.program.symbols[facts["hyper"]].start - first
            slots = start[at : at + 8 * N_SLOTS].view(np.float64).copy()
            slots[[BETA1_T, BETA2_T]] = 1 - slots[[BETA1_T, BETA2_T]]
            start[at : at + 4 * N_SLOTS] = slots.astype(np.float32).view(np.uint8)
    return start.tobytes().rstrip(b"\0")


def _outputs(loaded: Loaded, path: str) -> list[str]:
    facts = loaded.paths[path]
    if facts["backward"]:
        return [facts["loss"]]
    return [y for y in facts.get("outputs", [facts["output"]]) if y is not None]


# ---------------------------------------------------------------- files
def _header(
    loaded: Loaded, processor: Processor, name: str, batch: int, arrays: Mapping, stack: Mapping, flash: int, ram: int
) -> str:
    upper, program = name.upper(), loaded.program
    shown = dict.fromkeys(v for feeds, outputs in arrays.values() for v in (*feeds, *outputs))
    lines = [
        f"/* {name}: a model for {processor.name} ({processor.what}), made by calcvm of program {program.hash[:12]}.",
        "",
        f"   {flash:,} bytes of code and constants, {ram:,} bytes of heap; stack in bytes: "
        + ", ".join(f"{f} {size}" for f, size in stack.items())
        + ".",
        "",
        f"   {name}_start sets a heap to the model's start.  The other functions return 0, or the code of a trap (low byte) and its row:",
        "   data that the program cannot use, such as a label that is no class.  A heap serves one call at a time.",
        "*/",
        f"#ifndef {upper}_H",
        f"#define {upper}_H",
        "#include <stdint.h>",
        "",
        f"#define {upper}_HEAP_BYTES {ram}",
        f"#define {upper}_HEAP_ALIGN {program.itemsize if processor.small else 64}",
        f"#define {upper}_BATCH {batch}",
        f"#define {upper}_STATE_OFFSET {loaded.image[0]} /* parameters and the optimizer's state */",
        f"#define {upper}_STATE_BYTES {loaded.image[1] - loaded.image[0]}",
        "",
        f"int32_t {name}_start(void *heap);",
        *(
            f"int32_t {f}(void *heap); /* {', '.join(feeds)} -> {', '.join(outputs)} */"
            for f, (feeds, outputs) in arrays.items()
        ),
        "",
        *(_accessor(loaded, name, v, batch) for v in shown),
        "",
        "#endif",
        "",
    ]
    return "\n".join(lines)


def _accessor(loaded: Loaded, name: str, variable: str, batch: int) -> str:
    symbol, shape = loaded.symbol(variable), loaded.shape(variable, batch)
    c_type, called = C_TYPES[symbol.dtype], re.sub(r"\W", "_", variable)
    size = "".join(f"[{n}]" for n in shape) or "[1]"
    return f"static inline {c_type} *{name}_{called}(void *heap) {{ return ({c_type} *)((char *)heap + {symbol.start}); }} /* {size} */"


def _write(folder: Any, files: Mapping[str, bytes]) -> tuple[Path, ...]:
    if not isinstance(folder, (str, PathLike)):
        raise CalcError(f"export: {checks.shown(folder)} is not the path of a folder")
    place = Path(folder)
    with telling(str(folder), "written"):
        place.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            replace(place / name, _writer(data))
    return tuple(place / name for name in files)


def _writer(data: bytes) -> Callable[[Any], object]:
    return lambda file: file.write(data)


class Elf:
    """An object file in the format ELF: its sections, (name, type, flags, place, size, link, size of an entry)."""

    def __init__(self, code: bytes):
        self.code, self.wide = code, code[4] == 2
        place, *_ = struct.unpack_from("<Q" if self.wide else "<I", code, 40 if self.wide else 32)
        size, count = struct.unpack_from("<HH", code, 58 if self.wide else 46)
        form = "<IIQQQQIIQQ" if self.wide else "<IIIIIIIIII"
        found = [struct.unpack_from(form, code, place + k * size) for k in range(count)]
        self.sections = [
            (name, kind, flags, at, n, link, each) for name, kind, flags, _, at, n, link, _, _, each in found
        ]

    @property
    def flash(self) -> int:
        """Bytes of code and constants."""
        return sum(n for _, kind, flags, _, n, *_ in self.sections if flags & ALLOCATED and kind != WITHOUT_BITS)

    @property
    def undefined(self) -> tuple[str, ...]:
        """The functions that it calls and does not have."""
        names = []
        for _, kind, _, at, n, link, each in self.sections:
            if kind == SYMBOLS:
                texts = self.sections[link][3]
                for k in range(at + each, at + n, each):  # the first is none
                    (name,), (section,) = (
                        struct.unpack_from("<I", self.code, k),
                        struct.unpack_from("<H", self.code, k + (6 if self.wide else 14)),
                    )
                    if section == 0:
                        start = texts + name
                        names.append(self.code[start : self.code.index(0, start)].decode())
        return tuple(sorted(names))

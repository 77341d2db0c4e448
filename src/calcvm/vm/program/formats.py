"""Programs of the former format, made into those of today where they are read.

Format 2 had rows of 32 words.  Word 0 was an opcode, a number that each instruction of the table had for ever, and that its
digest told of as well.  So a row of a file is that instruction of the file's list whose digest tells of its opcode.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from calcvm.errors import ProgramError
from calcvm.ops.losses import SOFTMAX
from calcvm.ops.reduction import EXTREMUM, SUM
from calcvm.ops.spec import HEADER_WORDS, ROWS, RowSpec, row_words
from calcvm.ops.types import BYTES, FLOAT, dtype_of
from calcvm.vm.program import schema
from calcvm.vm.program.documents import DTYPES, MAX_SIZE, SIZE, STARTS
from calcvm.vm.program.encoding import form_parts, instructions
from calcvm.vm.program.schema import boolean, entry, integer, listing, one_of, optional, record, table, text

FORMER = 2
SUM_WORDS = {
    "K1": "P",
    "R2": "R1",
    "K0": None,
    "R1": None,
}  # by today's name the former one; None: there was none, and it is 1
_FORM = listing(integer(-MAX_SIZE, MAX_SIZE))
_SYMBOL = entry(
    name=text(), kind=text(), offset=SIZE, elems=_FORM, shape=listing(_FORM), persistent=boolean, resident=boolean,
    members=listing(SIZE),
)  # fmt: skip
_STATE = listing(record({"symbol": optional(SIZE), "kind": text()}, others=True))
_FORMER = record(
    {
        "dtype": one_of(*DTYPES),
        "instructions": table(text()),
        "symbols": listing(_SYMBOL),
        "info": record({}, optional={"state": _STATE}, others=True),
    },
    others=True,
)


def converted(
    document: Mapping[str, Any], arrays: Mapping[str, np.ndarray], where: str
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A program's document and arrays as of today; they are not verified yet."""
    document = schema.check(_FORMER, document, f"{where}: not a well-formed program, it")
    listed = document["instructions"]
    rows, values = (arrays.get(f"program/{name}", np.empty(0)) for name in ("rows", "operand_values"))
    if rows.dtype != np.int64 or rows.shape[1:] != (32,) or values.shape != rows.shape:
        raise ProgramError(f"{where}: the program's rows are not those of format {FORMER}: copy the file anew")
    patches = arrays.get("program/patches", np.empty(0)).copy()
    if patches.dtype != np.int64 or patches.shape[1:] != (4,) or not np.isin(patches[:, 0], np.arange(len(rows))).all():
        raise ProgramError(f"{where}: the program's patches are not those of format {FORMER}: copy the file anew")
    opcodes = np.unique(rows[:, 0]).tolist()
    known = [ROWS[name] for name in listed if name in ROWS]
    found = {c: s for c in opcodes[: len(ROWS)] for s in known if _former(c, s) == listed[s.name]}
    if len(found) < max(len(opcodes), len(listed)):
        missing = {*listed} - {s.name for s in found.values()} or {f"opcode {c}" for c in {*opcodes} - {*found}}
        raise ProgramError(
            f"{where}: written for other instructions ({', '.join(sorted(missing))}): register a user's operators first "
            "(cv.register_op), or compile the graph again"
        )
    dtype = document["dtype"]
    slots, types = 8 // BYTES[dtype], _types(document)
    today, width = instructions(found.values()), row_words(found.values())
    places = {name: k for k, (name, _) in enumerate(today)}
    numbered, behind = np.zeros_like(rows), np.full_like(values, -1)
    for opcode, spec in found.items():
        of = rows[:, 0] == opcode
        patched = of[patches[:, 0]]
        then = patches[patched, 1]
        for k, was in enumerate(_places(spec)):
            numbered[of, k], behind[of, k] = (rows[of, was], values[of, was]) if was is not None else (1, -1)
            patches[np.flatnonzero(patched)[then == was], 1] = k
        numbered[of, 0] = places[spec.name]
        for k, operand in enumerate(spec.operands, HEADER_WORDS + len(spec.words)):
            if operand.type in BYTES:
                numbered[of, k] //= slots
                types |= dict.fromkeys(np.unique(behind[of, k]).tolist(), operand.type)
    symbols = [_symbol(s, types.get(k, FLOAT), dtype, slots) for k, s in enumerate(document["symbols"])]
    return (
        {
            **document,
            "format_version": FORMER + 1,
            "instructions": [list(instruction) for instruction in today],
            "symbols": symbols,
        },
        {
            **arrays,
            "program/rows": numbered[:, :width],
            "program/operand_values": behind[:, :width],
            "program/patches": patches,
        },
    )


def _former(opcode: int, spec: RowSpec) -> str:
    """The digest of an instruction: sizes counted elements of the heap, of which eight bytes were D."""
    words, operands = form_parts(_then(spec))
    told = [
        (name, access, elems if not of else "D" if elems == "1" else f"{elems}*D", optional)
        for name, access, elems, optional, *of in operands
    ]
    return hashlib.sha256(repr((opcode, spec.name, words, told)).encode()).hexdigest()[:16]


def _then(spec: RowSpec) -> RowSpec:
    """An instruction as the former format had it, but for the types of its operands."""
    operands = spec.operands
    if spec.words == SUM.words:
        sizes = {SUM.x: EXTREMUM.x, SUM.y: EXTREMUM.y}
        return replace(spec, words=EXTREMUM.words, operands=tuple(replace(o, elems=sizes[o.elems]) for o in operands))
    if spec.name == SOFTMAX:
        return replace(spec, operands=tuple(replace(o, optional=False) for o in operands))
    return spec


def _places(spec: RowSpec) -> list[int | None]:
    """Of each word of a row where it was; None: it is 1."""
    if spec.words != SUM.words:
        return [*range(row_words([spec]))]
    then = [word.name for word in _then(spec).words]
    names = [SUM_WORDS.get(word.name, word.name) for word in spec.words]
    first = HEADER_WORDS + len(then)
    places = [None if name is None else HEADER_WORDS + then.index(name) for name in names]
    return [*range(HEADER_WORDS), *places, *range(first, first + len(spec.operands))]


def _types(document: Mapping[str, Any]) -> dict[int, str]:
    """Of symbols of the state, by number, those that are no floats of the program's own."""
    state = document["info"].get("state", [])
    return {s["symbol"]: STARTS[s["kind"]][0] for s in state if s["kind"] in STARTS and s["symbol"] is not None}


def _symbol(former: list[Any], type_: str, dtype: str, slots: int) -> list[Any]:
    name, kind, offset, (a, b), shape, *rest = former
    if type_ != FLOAT:
        offset, b, shape = offset // slots, b // slots, [[a, b // slots]]
    return [name, kind, offset, [a, b], shape, *rest, dtype_of(type_, dtype)]

"""Programs of the former format, made into those of today where they are read.

Format 2 had rows of 32 words.  Word 0 was an opcode, a number that each instruction of the table had for ever, and that its
digest told of as well.  So a row of a file is that instruction of the file's list whose digest tells of its opcode.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from calcvm.errors import ProgramError
from calcvm.ops.spec import ROWS, RowSpec, row_words
from calcvm.vm.program import schema
from calcvm.vm.program.encoding import form_parts, instructions
from calcvm.vm.program.schema import record, table, text

FORMER = 2
_FORMER = record({"instructions": table(text())}, others=True)


def converted(
    document: Mapping[str, Any], arrays: Mapping[str, np.ndarray], where: str
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A program's document and arrays as of today; they are not verified yet."""
    listed = schema.check(_FORMER, document, f"{where}: not a well-formed program, it")["instructions"]
    rows, values = (arrays.get(f"program/{name}", np.empty(0)) for name in ("rows", "operand_values"))
    if rows.dtype != np.int64 or rows.shape[1:] != (32,) or values.shape != rows.shape:
        raise ProgramError(f"{where}: the program's rows are not those of format {FORMER}: copy the file anew")
    opcodes = np.unique(rows[:, 0]).tolist()
    known = [ROWS[name] for name in listed if name in ROWS]
    found = {c: s for c in opcodes[: len(ROWS)] for s in known if _former(c, s) == listed[s.name]}
    if len(found) < max(len(opcodes), len(listed)):
        missing = {*listed} - {s.name for s in found.values()} or {f"opcode {c}" for c in {*opcodes} - {*found}}
        raise ProgramError(
            f"{where}: written for other instructions ({', '.join(sorted(missing))}): register a user's operators first "
            "(cv.register_op), or compile the graph again"
        )
    today, width = instructions(found.values()), row_words(found.values())
    places = {name: k for k, (name, _) in enumerate(today)}
    numbered = rows.copy()
    for opcode, spec in found.items():
        numbered[rows[:, 0] == opcode, 0] = places[spec.name]
    return (
        {**document, "format_version": FORMER + 1, "instructions": [list(instruction) for instruction in today]},
        {**arrays, "program/rows": numbered[:, :width], "program/operand_values": values[:, :width]},
    )


def _former(opcode: int, spec: RowSpec) -> str:
    return hashlib.sha256(repr((opcode, spec.name, *form_parts(spec))).encode()).hexdigest()[:16]

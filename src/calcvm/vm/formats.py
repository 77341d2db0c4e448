"""Programs of the former format, made into those of today where they are read.

Format 2 had rows of 32 words.  Word 0 was an opcode, a number that each instruction of the table had for ever, and that its
digest told of as well.  So a row of a file is that instruction of the file's list whose digest tells of its opcode.
Scratch had extents of its own (`SCRATCH`), where today they follow from the word ``wn``: what speed wants is as much.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import count
from typing import Any

import numpy as np

from calcvm.errors import ProgramError
from calcvm.ops.sizes import On, evaluate, workspace
from calcvm.ops.spec import HEADER_WORDS, PHASES, ROWS, WN, Operand, RowSpec, Word, row_words
from calcvm.vm import schema
from calcvm.vm.documents import MAX_BLOCKS
from calcvm.vm.encoding import ABSENT, FLAG_PHASES, form_parts, instructions
from calcvm.vm.schema import integer, record, table, text

FORMER = 2
_FORMER = record(
    {"instructions": table(text()), "workers": integer(1, MAX_BLOCKS), "info": record({}, others=True)}, others=True
)


def _panel(k: str, n: str) -> str:
    return f"nw*min({k}, 512)*min({n} + 15, 256)"


def _wide(k: str, n: str) -> str:
    return f"({_panel(k, n)} if {n} >= 512 else 0)"


def _partial(elems: str) -> str:
    return f"min(64*{elems}, max(1048576, {elems})) if nw > 1 else 0"


_W = "(K + 1)*N"
SCRATCH = {  # of rows that have another extent today
    "linear_fwd": f"0 if gpu else {_wide('K', 'N')}",
    "linear_bwd_w": f"((max(1048576, {_W}) if {_W} >= 65536 else rows*inner*ceil_div({_W}, 512) + {_W}) if nw > 1 else 0) "
    f"if gpu else {_wide('rows*inner', 'N')}",
    "linear_bwd_x": f"0 if gpu else {_panel('N', 'K')}",
    "matmul_fwd": f"0 if gpu else {_panel('K', 'N')} if tb else {_wide('K', 'N')}",
    "matmul_bwd_a": f"(0 if by or ab else {_partial('M*K')}) if gpu else "
    f"{_panel('N', 'M')} if ta else {_wide('N', 'K')} if tb else {_panel('N', 'K')}",
    "matmul_bwd_b": f"(0 if bb and not by else {_partial('K*N')}) if gpu else "
    f"({_panel('M', 'K')} if ta or K >= 512 else 0) if tb else {_wide('M', 'N')}",
}


def converted(
    document: Mapping[str, Any], arrays: Mapping[str, np.ndarray], where: str
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A program's document and arrays as of today; they are not verified yet."""
    facts = schema.check(_FORMER, document, f"{where}: not a well-formed program, it")
    listed, on = facts["instructions"], On(0, facts["workers"], int(facts["info"].get("device") == "cuda"))
    rows, values, patches = (
        arrays.get(f"program/{name}", np.empty(0)) for name in ("rows", "operand_values", "patches")
    )
    shapes = (rows.shape[1:], values.shape, patches.shape[1:]) == ((32,), rows.shape, (4,))
    if not shapes or rows.dtype != np.int64 or patches.dtype != np.int64:
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
    new, symbols, words = (
        np.zeros((len(rows), width), np.int64),
        np.full((len(rows), width), -1, np.int32),
        patches.copy(),
    )
    for opcode, spec in found.items():
        own, patched = rows[:, 0] == opcode, np.isin(patches[:, 0], np.flatnonzero(rows[:, 0] == opcode))
        new[own, 0], new[own, 1] = places[spec.name], rows[own, 1]
        for k, former in enumerate(_places(spec), HEADER_WORDS):
            if former is not None:
                new[own, k], symbols[own, k] = rows[own, former], values[own, former]
                words[patched & (patches[:, 1] == former), 1] = k
            elif k >= HEADER_WORDS + len(spec.words):
                new[own, k] = ABSENT
        for i in np.flatnonzero(own):
            _complete(spec, new[i], on)
    return (
        {**document, "format_version": FORMER + 1, "instructions": [list(instruction) for instruction in today]},
        {**arrays, "program/rows": new, "program/operand_values": symbols, "program/patches": words},
    )


def _places(spec: RowSpec) -> list[int | None]:
    """For each word of an instruction, and each operand, its place in rows of the former format; None: it had none."""
    places = count(HEADER_WORDS)
    parts: tuple[Word | Operand, ...] = (*spec.words, *spec.operands)
    return [next(places) if _had(spec, part) else None for part in parts]


def _had(spec: RowSpec, part: Word | Operand) -> bool:
    """Whether an instruction of the former format had a word or operand."""
    if isinstance(part, Operand):
        return not spec.workspace or part.access != "s" or spec.name in SCRATCH
    return part not in (PHASES, WN)


def _complete(spec: RowSpec, row: np.ndarray, on: On) -> None:
    """Set what lowering and assembly give a row today: its workspace and phases."""
    words = {w.name: v for w, v in zip(spec.words, row[HEADER_WORDS:].tolist())}
    if spec.workspace and spec.name in SCRATCH:
        wanted = workspace(spec, words, on)[1].at(1)
        words["wn"] = row[HEADER_WORDS + spec.words.index(WN)] = max(0, min(wanted, int(WN.hi)))
    if spec.phases != "1":
        row[HEADER_WORDS] = evaluate(spec.phases, {**words, **on._asdict()})
        row[1] |= FLAG_PHASES if row[HEADER_WORDS] > 1 else 0


def _former(opcode: int, spec: RowSpec) -> str:
    words, operands = form_parts(spec)
    words = [word for word, part in zip(words, spec.words) if _had(spec, part)]
    operands = [(n, how, SCRATCH[spec.name] if how == "s" and spec.workspace else e, o)
                for (n, how, e, o), part in zip(operands, spec.operands) if _had(spec, part)]  # fmt: skip
    return hashlib.sha256(repr((opcode, spec.name, words, operands)).encode()).hexdigest()[:16]

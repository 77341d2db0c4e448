"""Programs of the former format, made into those of today where they are read.

Format 2 had rows of 32 words.  Word 0 was an opcode, a number that each instruction of the table had for ever, and that its
digest told of as well.  So a row of a file is that instruction of the file's list whose digest tells of its opcode.
Sizes counted elements of the heap, eight bytes of which were ``D``; scratch had extents of its own (`SCRATCH`), where today
they follow from the word ``wn``: what speed wants is as much; a sum was over one block of axes.
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
from calcvm.ops.sizes import On, evaluate, workspace
from calcvm.ops.spec import HEADER_WORDS, PHASES, ROWS, WN, RowSpec, row_words
from calcvm.ops.types import BYTES, FLOAT, dtype_of
from calcvm.vm.program import schema
from calcvm.vm.program.documents import DTYPES, MAX_BLOCKS, MAX_SIZE, SIZE, STARTS
from calcvm.vm.program.encoding import ABSENT, FLAG_PHASES, form_parts, instructions
from calcvm.vm.program.schema import boolean, entry, integer, listing, one_of, optional, record, table, text

FORMER = 2
SUM_WORDS = {
    "K1": "P",
    "R2": "R1",
    "K0": "",
    "R1": "",
}  # by today's name the former one; "": there was none, and it is 1
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
        "workers": integer(1, MAX_BLOCKS),
        "info": record({}, optional={"state": _STATE}, others=True),
    },
    others=True,
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
            f"{where}: written for other instructions ({', '.join(sorted(missing))}): declare a user's operators as "
            "the program did that made it (calcvm.operators.elementwise, cv.register_op), or compile the graph again"
        )
    dtype = document["dtype"]
    slots, types = 8 // BYTES[dtype], _types(document)
    on = On(document["workers"], int(document["info"].get("device") == "cuda"))
    today, width = instructions(found.values()), row_words(found.values())
    places = {name: k for k, (name, _) in enumerate(today)}
    numbered, behind = np.zeros_like(rows), np.full_like(values, -1)
    for opcode, spec in found.items():
        of = rows[:, 0] == opcode
        patched = of[patches[:, 0]]
        then = patches[patched, 1]
        operands = HEADER_WORDS + len(spec.words)
        for k, was in enumerate(_places(spec)):
            if was is None:
                numbered[of, k] = ABSENT if k >= operands else 1
            else:
                numbered[of, k], behind[of, k] = rows[of, was], values[of, was]
                patches[np.flatnonzero(patched)[then == was], 1] = k
        numbered[of, 0] = places[spec.name]
        for i in np.flatnonzero(of) if spec.workspace or spec.phases != "1" else ():
            _complete(spec, numbered[i], on)
        for k, operand in enumerate(spec.operands, operands):
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
    words, operands = tuple(word for word in spec.words if word not in (PHASES, WN)), spec.operands
    if spec.workspace:
        sized = ((o, SCRATCH.get(spec.name) if o.access == "s" else o.elems) for o in operands)
        operands = tuple(replace(o, elems=elems) for o, elems in sized if elems is not None)
    if words == SUM.words:
        sizes = {SUM.elems(which): EXTREMUM.elems(which) for which in ("KR", "K")}
        words, operands = EXTREMUM.words, tuple(replace(o, elems=sizes[o.elems]) for o in operands)
    if spec.name == SOFTMAX:
        operands = tuple(replace(o, optional=False) for o in operands)
    return replace(spec, words=words, operands=operands, workspace=None, phases="1")


def _places(spec: RowSpec) -> list[int | None]:
    """Of each word of a row where it was; None: there was none."""
    then = _then(spec)
    places = {name: k for k, name in enumerate(_names(then), HEADER_WORDS)}
    renamed = SUM_WORDS if {*SUM_WORDS} <= {*_names(spec)} else {}
    names = [renamed.get(name, name) for name in _names(spec)]
    return [*range(HEADER_WORDS), *map(places.get, names)]


def _names(spec: RowSpec) -> list[str]:
    return [*(word.name for word in spec.words), *(operand.name for operand in spec.operands)]


def _complete(spec: RowSpec, row: np.ndarray, on: On) -> None:
    """Set what lowering and assembly give a row today: its workspace and phases."""
    words = {w.name: v for w, v in zip(spec.words, row[HEADER_WORDS:].tolist())}
    wanted = workspace(spec, words, on)[1].at(1) if spec.name in SCRATCH else 0
    words["wn"] = max(0, min(wanted, int(WN.hi)))
    row[HEADER_WORDS + spec.words.index(WN)] = words["wn"]
    if spec.phases != "1":
        phases = row[HEADER_WORDS] = evaluate(spec.phases, {**words, **on._asdict()})
        row[1] |= FLAG_PHASES if phases > 1 else 0


def _types(document: Mapping[str, Any]) -> dict[int, str]:
    """Of symbols of the state, by number, those that are no floats of the program's own."""
    state = document["info"].get("state", [])
    return {s["symbol"]: STARTS[s["kind"]][0] for s in state if s["kind"] in STARTS and s["symbol"] is not None}


def _symbol(former: list[Any], type_: str, dtype: str, slots: int) -> list[Any]:
    name, kind, offset, (a, b), shape, *rest = former
    if type_ != FLOAT:
        offset, b, shape = offset // slots, b // slots, [[a, b // slots]]
    return [name, kind, offset, [a, b], shape, *rest, dtype_of(type_, dtype)]

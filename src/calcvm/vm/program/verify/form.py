"""The form of a program: its numbers, its instructions, its sections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np

from calcvm.errors import ProgramError
from calcvm.ops.sizes import MACHINE, MAX_BATCH, On, function
from calcvm.ops.spec import HEADER_WORDS, RowSpec, row_words
from calcvm.ops.statement import PHASES
from calcvm.vm.program.documents import MAX_BLOCKS, MAX_HEAP, MAX_WORKERS
from calcvm.vm.program.encoding import FORMAT_VERSION, ITEMSIZE, RESERVED
from calcvm.vm.program.program_data import ProgramData

LATE = ("backward", "optimize", "end_round")  # phases that may change parameters
EARLY = ("forward", "loss")  # phases that may change buffers, in a path with late phases


class Row:
    """One instruction's ranges and size expressions, compiled once."""

    def __init__(self, spec: RowSpec):
        self.spec = spec
        self.words = spec.words
        self.first_operand = HEADER_WORDS + len(spec.words)
        self.stop = self.first_operand + len(spec.operands)
        self.dims = tuple(k for k, w in enumerate(spec.words) if w.kind == "dim")
        self.floats = tuple(k for k, w in enumerate(spec.words) if w.kind == "float")
        self.in_place = frozenset(spec.in_place)
        names = [w.name for w in spec.words]

        def table(expressions: Sequence[str]) -> Callable[..., tuple]:
            return function(expressions, (*names, *MACHINE))

        self.extents = table([o.elems for o in spec.operands])
        self.parts = table([o.part if o.part not in ("", "w0") else "0" for o in spec.operands])
        self.require = table(spec.require)
        self.phases = table([spec.phases]) if spec.phases != "1" else None
        self.names, self.wn = tuple(names), names.index("wn") if "wn" in names else None
        self.optional = table([o.optional if isinstance(o.optional, str) else str(o.optional) for o in spec.operands])
        self.acc = names.index("acc") if "acc" in names else None

    def spare(self, words: Sequence[Any], on: On) -> tuple:
        """The words of scratch beyond the minimum, if the instruction states one."""
        if self.wn is None or self.spec.workspace is None:
            return ()
        return (words[self.wn] - self.spec.workspace(SimpleNamespace(**dict(zip(self.names, words))), on)[0],)


_ROWS: dict[str, Row] = {}


def row_of(spec: RowSpec) -> Row:
    row = _ROWS.get(spec.name)
    if row is None or row.spec is not spec:
        row = _ROWS[spec.name] = Row(spec)
    return row


class RowForm:
    """The form of a program; all later checks rely on it."""

    def __init__(self, program: ProgramData):
        self.program = program
        self.batch = program.batch_size

    def name(self, symbol: int) -> str:
        return self.program.symbols[symbol].name if symbol >= 0 else "nothing"

    def fail(self, row: int, message: str) -> NoReturn:
        place = self.decoded[row][0][0]
        name = self.program.instructions[place].name if 0 <= place < len(self.known) else "?"
        label = f" ({self.program.labels[row]})" if self.program.labels[row] else ""
        raise ProgramError(f"row {row} {name}{label}: {message}")

    def check_form(self) -> None:
        p = self.program
        n = len(p.rows)
        if p.format_version != FORMAT_VERSION:
            raise ProgramError(f"program format {p.format_version}, this calcvm runs {FORMAT_VERSION}")
        if p.dtype not in ITEMSIZE:
            raise ProgramError(f"dtype {p.dtype!r} is neither float32 nor float64")
        p.check_instructions()
        self.known = [row_of(spec) for spec in p.specs]
        self.width = row_words(row.spec for row in self.known)
        for name, array, dtype, shape in (
            ("rows", p.rows, np.int64, (n, self.width)),
            ("operand_values", p.operand_values, np.int32, (n, self.width)),
            ("patches", p.patches, np.int64, (len(p.patches), 4)),
        ):
            if array.dtype != dtype or array.shape != shape:
                raise ProgramError(f"{name} is {array.dtype}{array.shape}, not {np.dtype(dtype)}{shape}")
        self.on = On.of(p.workers, p.info.get("device", "cpu"))
        for name, value, low, high in (
            ("batch_size", p.batch_size, 1, MAX_BATCH),
            ("workers", p.workers, 1, MAX_BLOCKS if self.on.gpu else MAX_WORKERS),
            ("heap_elems", p.heap_elems, RESERVED, MAX_HEAP),
        ):
            if not isinstance(value, int) or not low <= value <= high:
                raise ProgramError(f"{name} is {value}: it must be from {low} to {high}")
        if len(p.labels) != n:
            raise ProgramError(f"{len(p.labels)} labels for {n} rows")
        self.decoded = list(zip(p.rows.tolist(), p.operand_values.tolist()))
        self.phases, self.trains = [""] * n, [False] * n
        for i, (row, _) in enumerate(self.decoded):
            if not 0 <= row[0] < len(self.known):
                self.fail(i, f"it is instruction {row[0]} of a program that has {len(self.known)}")

    def check_sections(self) -> None:
        at, n = 0, len(self.decoded)
        self.spans: dict[str, range] = {}  # rows by path
        path_before = None
        for (path, phase), (start, stop) in self.program.sections.items():
            if phase not in PHASES:
                raise ProgramError(f"section {path}/{phase}: no such phase")
            if start != at or not start <= stop <= n:
                raise ProgramError(f"section {path}/{phase} is [{start}, {stop}): it must begin at {at} and end by {n}")
            if path != path_before:
                if path in self.spans:
                    raise ProgramError(f"section {path}/{phase}: the sections of a path must follow each other")
                self.spans[path], path_before = range(start, start), path
                rank = -1
            if PHASES.index(phase) <= rank:
                raise ProgramError(f"section {path}/{phase}: phases must be in the order {', '.join(PHASES)}")
            rank = PHASES.index(phase)
            self.phases[start:stop] = [phase] * (stop - start)
            self.spans[path] = range(self.spans[path].start, stop)
            at = stop
        if at != n:
            raise ProgramError(f"rows {at} to {n - 1} belong to no section")
        for rows in self.spans.values():
            trains = bool(self.program.info.get("part")) or any(self.phases[i] in LATE for i in rows)
            self.trains[rows.start : rows.stop] = [trains] * len(rows)  # of a split program, other parts may train

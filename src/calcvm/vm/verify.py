"""The verifier: proves that a program stays inside its heap and computes with what it means to.

The hot loop checks nothing, so no program runs unverified.  This file shares no code with the planner.

Memory safety rests on the rows and ``heap_elems`` alone.  It holds for every batch from 1 to the
largest because sizes are exact functions of the batch (`calcvm.ops.sizes`), whose least and largest values
are known; what is no such function is refused.  Sizes are Python integers: nothing overflows.  Extents bound
all loops: a row with a zero size must also fit with that size taken as one, so that no product of its other
sizes is unbounded.

The rest makes a program mean what it says: each operand lies inside its symbol, symbols that are kept
share cells with none, reads find what their symbol last wrote (interval shadow map), and no worker meets
another's write without a barrier.  Shares are compared at every batch; what reads find is decided at batch 1
and at the largest: between them extents are affine (of scratch, the largest counts), so that what covers at
both ends does so everywhere.
"""

from __future__ import annotations

import ast
import math
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NoReturn

import numpy as np

from calcvm.errors import ProgramError
from calcvm.ops.dims import ZERO, Affine
from calcvm.ops.sizes import MACHINE, MAX_BATCH, Extent, Piecewise, exact, function
from calcvm.ops.spec import HEADER_WORDS, ROWS, Operand, RowSpec, row_words
from calcvm.ops.statement import PHASES
from calcvm.vm.documents import MAX_BLOCKS, MAX_HEAP, MAX_WORKERS, check_info
from calcvm.vm.encoding import ABSENT, FLAG_PC_SHIFT, FLAG_SYNC, form_of
from calcvm.vm.program import FORMAT_VERSION, ITEMSIZE, Program, Symbol

LINE = 64  # bytes of a cache line, on which storage begins
RESERVED = 16  # elements at the heap's start that no operand may touch
EMPTY_LIMIT = 2**20  # work that a row of size zero may imply, whatever the heap
LATE = ("backward", "optimize", "end_round")  # phases that may change parameters
EARLY = ("forward", "loss")  # phases that may change buffers, in a path that has some of those


def verify(program: Program) -> None:
    """Prove a program safe and consistent, for every batch from 1 to its largest.

    Raises
    ------
    ProgramError
        Naming the row, operator, operand, variable and numbers of the first thing wrong.
    """
    _Verifier(program).run()


# ---------------------------------------------------------------- a row's spec, ready for checking


class _Row:
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
        self.optional = table([o.optional if isinstance(o.optional, str) else str(o.optional) for o in spec.operands])
        self.aligned = tuple("D" in {n.id for n in ast.walk(ast.parse(o.elems)) if isinstance(n, ast.Name)}
                             for o in spec.operands)  # fmt: skip
        self.acc = names.index("acc") if "acc" in names else None


_ROWS: dict[str, _Row] = {}


def _row(spec: RowSpec) -> _Row:
    row = _ROWS.get(spec.name)
    if row is None or row.spec is not spec:
        row = _ROWS[spec.name] = _Row(spec)
    return row


# ---------------------------------------------------------------- accesses
class _Access:
    """What one operand of one row touches: [start, start+first) at batch 1, [start, start+last) at the largest.

    how : who of the workers touches which of these cells, for every batch.
    """

    __slots__ = ("row", "operand", "symbol", "start", "first", "last", "reads", "writes", "how")

    def __init__(
        self, row: int, operand: Operand, symbol: int, start: int, ends: tuple[int, int], reads: bool, how: object
    ):
        self.row, self.operand, self.symbol, self.start = row, operand, symbol, start
        self.first, self.last = ends
        self.reads, self.writes, self.how = reads, operand.writes, how


class _Shadow:
    """Which symbol last wrote each cell, as disjoint intervals in order."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.stops: list[int] = []
        self.owners: list[int] = []

    def write(self, start: int, stop: int, owner: int) -> None:
        i = bisect_right(self.stops, start)  # the first interval that ends after start
        j = bisect_left(self.starts, stop)  # the first that begins at stop or later
        starts, stops, owners = [start], [stop], [owner]
        if i < j:
            if self.starts[i] < start:
                starts.insert(0, self.starts[i])
                stops.insert(0, start)
                owners.insert(0, self.owners[i])
            if self.stops[j - 1] > stop:
                starts.append(stop)
                stops.append(self.stops[j - 1])
                owners.append(self.owners[j - 1])
        self.starts[i:j], self.stops[i:j], self.owners[i:j] = starts, stops, owners

    def foreign(self, start: int, stop: int, owner: int) -> tuple[int, int] | None:
        """The first cell of [start, stop) that ``owner`` did not write last, and who did (-1: nobody)."""
        i, cell = bisect_right(self.stops, start), start
        while cell < stop:
            if i == len(self.starts) or self.starts[i] > cell:
                return cell, -1
            if self.owners[i] != owner:
                return cell, self.owners[i]
            cell = self.stops[i]
            i += 1
        return None


# ---------------------------------------------------------------- the checks
class _Verifier:
    def __init__(self, program: Program):
        self.program = program
        self.batch = program.batch_size

    def run(self) -> None:
        self.check_form()
        self.check_sections()
        self.check_zones()
        self.check_symbols()
        self.check_patches()
        check_info(self.program)
        self.accesses = [self.check_row(i, row, values) for i, (row, values) in enumerate(self.decoded)]
        self.check_kept_apart()
        self.check_needs()
        for path in self.program.paths:
            span = self.path_rows(path)
            if span:
                self.check_barriers(span)
                self.check_dataflow(span, largest=True)
                if len(self.program.patches) and self.batch > 1:
                    self.check_dataflow(span, largest=False)

    # ------------------------------------------------------------ messages
    def name(self, symbol: int) -> str:
        return self.program.symbols[symbol].name if symbol >= 0 else "nothing"

    def fail(self, row: int, message: str) -> NoReturn:
        place = self.decoded[row][0][0]
        name = self.program.instructions[place].name if 0 <= place < len(self.known) else "?"
        label = f" ({self.program.labels[row]})" if self.program.labels[row] else ""
        raise ProgramError(f"row {row} {name}{label}: {message}")

    # ------------------------------------------------------------ the whole
    def check_form(self) -> None:
        p = self.program
        n = len(p.rows)
        if p.format_version != FORMAT_VERSION:
            raise ProgramError(f"program format {p.format_version}, this calcvm runs {FORMAT_VERSION}")
        if p.dtype not in ITEMSIZE:
            raise ProgramError(f"dtype {p.dtype!r} is neither float32 nor float64")
        self.check_instructions()
        self.width = row_words(row.spec for row in self.known)
        for name, array, dtype, shape in (
            ("rows", p.rows, np.int64, (n, self.width)),
            ("operand_values", p.operand_values, np.int32, (n, self.width)),
            ("patches", p.patches, np.int64, (len(p.patches), 4)),
        ):
            if array.dtype != dtype or array.shape != shape:
                raise ProgramError(f"{name} is {array.dtype}{array.shape}, not {np.dtype(dtype)}{shape}")
        self.slots, self.gpu = 8 // p.itemsize, int(p.info.get("device") == "cuda")
        for name, value, low, high in (
            ("batch_size", p.batch_size, 1, MAX_BATCH),
            ("workers", p.workers, 1, MAX_BLOCKS if self.gpu else MAX_WORKERS),
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

    def check_instructions(self) -> None:
        """Each is in the table, in the form that the program was made for, and they are in order."""
        listed = self.program.instructions
        names = [name for name, _ in listed]
        if names != sorted(set(names)):
            raise ProgramError("the program's instructions are not in the order of their names, or one is there twice")
        for name in names:
            if name not in ROWS:
                raise ProgramError(
                    f"no operator has the instruction {name!r}: register a user's operator first (cv.register_op), or "
                    "compile the graph again"
                )
        changed = ", ".join(name for name, form in listed if form != form_of(ROWS[name]))
        if changed:
            raise ProgramError(f"written for other instructions ({changed}): compile the graph again")
        self.known = [_row(ROWS[name]) for name in names]

    def check_sections(self) -> None:
        at, n = 0, len(self.decoded)
        order: list[str] = []
        for (path, phase), (start, stop) in self.program.sections.items():
            if phase not in PHASES:
                raise ProgramError(f"section {path}/{phase}: no such phase")
            if start != at or not start <= stop <= n:
                raise ProgramError(f"section {path}/{phase} is [{start}, {stop}): it must begin at {at} and end by {n}")
            if not order or order[-1] != path:
                if path in order:
                    raise ProgramError(f"section {path}/{phase}: the sections of a path must follow each other")
                order.append(path)
                rank = -1
            if PHASES.index(phase) <= rank:
                raise ProgramError(f"section {path}/{phase}: phases must be in the order {', '.join(PHASES)}")
            rank = PHASES.index(phase)
            self.phases[start:stop] = [phase] * (stop - start)
            at = stop
        if at != n:
            raise ProgramError(f"rows {at} to {n - 1} belong to no section")
        for path in order:
            rows = self.path_rows(path)
            self.trains[rows.start : rows.stop] = [any(self.phases[i] in LATE for i in rows)] * len(rows)

    def path_rows(self, path: str) -> range:
        spans = [span for (p, _), span in self.program.sections.items() if p == path]
        return range(spans[0][0], spans[-1][1])

    def check_zones(self) -> None:
        at = 0
        for z in sorted(self.program.zones, key=lambda z: (z.start, z.stop)):
            if not at <= z.start <= z.stop <= self.program.heap_elems:
                raise ProgramError(
                    f"zone {z.name} is [{z.start}, {z.stop}): zones must not overlap or leave the heap "
                    f"of {self.program.heap_elems} elements"
                )
            if z.persistent_stop and not z.start <= z.persistent_start <= z.persistent_stop <= z.stop:
                raise ProgramError(
                    f"zone {z.name} is [{z.start}, {z.stop}), its persistent block "
                    f"[{z.persistent_start}, {z.persistent_stop}) is not inside it"
                )
            at = z.stop

    def check_symbols(self) -> None:
        p = self.program
        zones = sorted((z for z in p.zones if z.stop > z.start), key=lambda z: z.start)
        starts = [z.start for z in zones]
        self.gaps: list[tuple[int, int, str]] = []  # between members of blocks: [start, stop), block
        self.sizes = []  # (elements at batch 1, at the largest batch)
        names: set[str] = set()
        for s in p.symbols:
            if s.name in names:
                raise ProgramError(f"two symbols are called {s.name!r}: names tell them apart in listings")
            names.add(s.name)
            first, last = s.elems.at(1), s.elems.at(self.batch)
            if s.elems.a < 0 or first < 0:
                raise ProgramError(f"symbol {s.name}: size {s.elems} shrinks with the batch or is negative")
            if s.offset < RESERVED or s.offset + last > p.heap_elems:
                raise ProgramError(
                    f"symbol {s.name} is [{s.offset}, {s.offset + last}): outside the heap's "
                    f"[{RESERVED}, {p.heap_elems})"
                )
            self.sizes.append((first, last))
            if last:
                k = bisect_right(starts, s.offset) - 1
                zone = zones[k] if k >= 0 else None
                if zone is None or s.offset + last > zone.stop:
                    raise ProgramError(f"symbol {s.name} is [{s.offset}, {s.offset + last}): in no zone")
                if s.persistent and zone.persistent_stop == 0:
                    raise ProgramError(f"symbol {s.name} persists, but zone {zone.name} has no persistent block")
        for i, s in enumerate(p.symbols):
            if s.members:
                self.check_block(i, s)
        self.check_padding()
        self.check_image()

    def check_image(self) -> None:
        """What persists lies together, so that an image is as large as what it holds."""
        at, line = RESERVED, LINE // self.program.itemsize
        lasting = sorted(
            (s.offset, s.elems.b, s.name, s.elems.a) for s in self.program.symbols if s.persistent and not s.members
        )
        for start, elems, name, grows in lasting:
            if grows:
                raise ProgramError(f"symbol {name} persists, and depends on the batch")
            if start - at >= line:
                raise ProgramError(f"symbol {name} persists at {start}, far from what persists before it, up to {at}")
            at = max(at, start + elems)

    def check_block(self, index: int, block: Symbol) -> None:
        """A block's members lie inside it in order."""
        p, at = self.program, block.offset
        stop = block.offset + self.sizes[index][1]
        for m in block.members:
            if not 0 <= m < len(p.symbols) or p.symbols[m].members:
                raise ProgramError(f"block {block.name}: member {m} is no value")
            s = p.symbols[m]
            if (s.kind, s.persistent, s.resident) != (block.kind, block.persistent, block.resident):
                raise ProgramError(f"block {block.name}: member {s.name} is of another kind")
            if s.offset < at or s.elems.a or s.offset + s.elems.b > stop:
                raise ProgramError(f"block {block.name}: member {s.name} at {s.offset} is outside or out of order")
            if s.offset > at:
                self.gaps.append((at, s.offset, block.name))
            at = s.offset + s.elems.b
        if at != stop or block.elems.a:
            raise ProgramError(f"block {block.name} ends at {stop}, its members at {at}")

    def check_padding(self) -> None:
        """What lies between members of a block is nobody's."""
        gaps = sorted(self.gaps)
        starts, reach = [start for start, _, _ in gaps], [*accumulate(((stop, name) for _, stop, name in gaps), max)]
        for s, (_, size) in zip(self.program.symbols, self.sizes):
            k = bisect_left(starts, s.offset + size)
            if not s.members and k and reach[k - 1][0] > s.offset:
                raise ProgramError(f"block {reach[k - 1][1]}: {s.name} uses the padding between its members")

    def check_kept_apart(self) -> None:
        """Values that are kept, or that several paths use, share cells with none at any time."""
        p = self.program
        self.kept = [s.kept for s in p.symbols]
        users: list[str | None] = [None] * len(p.symbols)
        for path in p.paths:
            for i in self.path_rows(path):
                for access in self.accesses[i]:
                    for leaf in p.symbols[access.symbol].members or (access.symbol,):
                        if users[leaf] is None:
                            users[leaf] = path
                        elif users[leaf] != path:
                            self.kept[leaf] = True
        ordered = sorted(
            (s.offset, s.offset + self.sizes[i][1], i)
            for i, s in enumerate(p.symbols)
            if not s.members and self.sizes[i][1]
        )
        last: tuple[int, int] = (0, -1)  # end and index of what reaches farthest so far, of all symbols
        last_kept: tuple[int, int] = (0, -1)
        for start, stop, i in ordered:
            other = last if self.kept[i] else last_kept
            if other[0] > start:
                raise ProgramError(
                    f"symbols {self.name(other[1])} and {self.name(i)} share cells from {start} on, but "
                    f"{self.name(i if self.kept[i] else other[1])} must keep its own"
                )
            last = max(last, (stop, i))
            if self.kept[i]:
                last_kept = max(last_kept, (stop, i))

    def check_needs(self) -> None:
        """What a path reads and does not compute is what ``info`` says it needs, in whatever shape."""
        p = self.program
        if "paths" not in p.info:
            return
        maker = {a.symbol: path for path in p.paths for i in self.path_rows(path) for a in self.accesses[i] if a.writes}
        for path in p.paths:
            names = [name for names in p.info["paths"][path]["needs"].values() for name in names]
            needed = {p.info["variables"][name]["symbol"] for name in names}
            for i in self.path_rows(path):
                for a in self.accesses[i]:
                    s = p.symbols[a.symbol]
                    outside = s.kind == "placeholder" or (not s.persistent and maker.get(a.symbol, path) != path)
                    if a.reads and outside and a.symbol not in needed:
                        self.fail(i, f'operand {a.operand.name} reads {s.name!r}, and info["paths"] says nothing of it')

    def check_patches(self) -> None:
        """Patched words are sizes, at most one patch each, that agree with the rows at the largest batch."""
        p = self.program
        self.patched: dict[int, dict[int, Affine]] = {}  # row -> {word: its size}
        before = (-1, -1)
        for row, word, a, b in p.patches.tolist():
            if not 0 <= row < len(p.rows):
                raise ProgramError(f"patch of row {row}: there are {len(p.rows)} rows")
            spec = self.known[self.decoded[row][0][0]].spec
            k = word - HEADER_WORDS
            if not 0 <= k < len(spec.words) or spec.words[k].kind != "dim":
                self.fail(row, f"word {word} is no size, only sizes may depend on the batch")
            if (row, word) <= before:
                self.fail(row, f"patch of word {spec.words[k].name} is repeated or out of order")
            if a < 1:
                self.fail(row, f"size {spec.words[k].name} = {a}*B{b:+d} does not grow with the batch")
            if a * self.batch + b != self.decoded[row][0][word]:
                self.fail(
                    row,
                    f"size {spec.words[k].name} = {a}*B{b:+d} is {a * self.batch + b} at batch {self.batch}, "
                    f"but the row says {self.decoded[row][0][word]}",
                )
            self.patched.setdefault(row, {})[k] = Affine(a, b)
            before = (row, word)

    # ------------------------------------------------------------ one row
    def check_row(self, i: int, row: list[int], values: list[int]) -> list[_Access]:
        """Check a row by itself; returns what its operands touch."""
        r = self.known[row[0]]
        if row[1] & ~FLAG_SYNC != i << FLAG_PC_SHIFT:
            self.fail(i, f"flags {row[1]:#x} are malformed: bits 8 up must hold the row's index")
        if any(row[r.stop :]):
            self.fail(i, f"words {r.stop} to {self.width - 1} must be zero")
        if max(values[: r.first_operand]) != -1 or max(values[r.stop :], default=-1) != -1:
            self.fail(i, "a word that is no operand has a symbol")
        at_last: list[Any] = row[HEADER_WORDS : r.first_operand]
        for k in r.floats:
            at_last[k] = struct.unpack("<d", struct.pack("<q", at_last[k]))[0]
        self.check_ranges(i, r, at_last)
        tail = (self.slots, self.program.workers, self.gpu)
        patched = self.patched.get(i)
        at_first = at_last
        if patched:
            at_first = at_last.copy()
            for k, size in patched.items():
                at_first[k] = size.at(1)
            self.check_ranges(i, r, at_first)
        extents, parts = self.exactly(i, r, at_last, tail, patched or {})
        if any(not at_first[k] for k in r.dims):
            self.check_empty(i, r, at_last, tail)
        out = []
        for k, operand in enumerate(r.spec.operands):
            first, last = self.ends(i, operand, extents[k])
            start, symbol = row[r.first_operand + k], values[r.first_operand + k]
            if start == ABSENT:
                if (first or last) and not r.optional(*at_last, *tail)[k]:
                    self.fail(i, f"operand {operand.name} of {last} elements is left out")
                if symbol != -1:
                    self.fail(i, f"operand {operand.name} is left out, but has symbol {symbol}")
                continue
            self.check_place(i, operand, symbol, start, first, last)
            if r.aligned[k] and start % self.slots:
                self.fail(i, f"operand {operand.name} at {start} holds 8-byte numbers: it must be at a multiple of 2")
            if not last:
                continue
            how = self.sharing(i, operand, start, extents[k], parts[k])
            reads = operand.access in "ru" or (operand.access == "a" and r.acc is not None and at_last[r.acc] == 1)
            out.append(_Access(i, operand, symbol, start, (first, last), reads, how))
        if len(out) > 1:
            self.check_aliases(i, r, out)
        return out

    def check_ranges(self, i: int, r: _Row, words: list[Any]) -> None:
        for word, value in zip(r.words, words):
            if not word.lo <= value <= word.hi or (word.kind == "float" and not math.isfinite(value)):
                self.fail(i, f"{word.name} = {value} is outside [{word.lo}, {word.hi}]")

    def exactly(
        self, i: int, r: _Row, at_last: list[Any], tail: tuple[int, int, int], patched: Mapping[int, Affine]
    ) -> tuple[Sequence[Extent], Sequence[Extent]]:
        """Each operand's elements, and the units that it is shared by; what the row requires holds for every batch."""
        words = [patched.get(k, v) for k, v in enumerate(at_last)]
        n = len(r.spec.operands)

        def on(words: list[Any]) -> tuple:
            return (*r.extents(*words, *tail), *r.parts(*words, *tail), *r.require(*words, *tail))

        try:
            found = exact(on, words, self.batch) if patched else tuple(Affine(0, v) for v in on(words))
            for expression, size in zip(r.spec.require, found[2 * n :]):
                least = size.bounds(self.batch)[0]
                if least < 0:
                    self.fail(i, f"{expression} = {least}, it must not be negative")
            return found[:n], found[n : 2 * n]
        except ArithmeticError as error:
            self.fail(i, f"its sizes cannot be bounded for all batches from 1 to {self.batch}: {error}")

    def ends(self, i: int, operand: Operand, size: Extent) -> tuple[int, int]:
        """Elements at batch 1 and at the largest, between which they are affine; of scratch, if it is not, the most."""
        if not isinstance(size, Piecewise):
            return max(size.at(1), 0), max(size.at(self.batch), 0)
        if operand.access != "s":
            self.fail(i, f"operand {operand.name} is of {size} elements: only scratch need not be linear in the batch")
        most = max(self.bounds(i, size)[1], 0)
        return most, most

    def bounds(self, i: int, size: Extent) -> tuple[int, int]:
        try:
            return size.bounds(self.batch)
        except ArithmeticError as error:
            self.fail(i, f"its sizes cannot be bounded for all batches from 1 to {self.batch}: {error}")

    def sharing(self, i: int, operand: Operand, start: int, size: Extent, units: Extent) -> object:
        """A key: accesses with equal keys give every worker the same cells at every batch.

        None: any worker may touch any cell.
        """
        if operand.part == "w0":
            return "first worker"
        if units == 1:
            return "last worker"  # share(1, w, nw) is empty but for w = nw - 1
        if units != ZERO and self.bounds(i, units)[0] > 0:
            return (start, size, units)
        return (start, size, "scratch") if operand.access == "s" and not self.gpu else None

    def check_empty(self, i: int, r: _Row, words: list[Any], tail: tuple[int, int, int]) -> None:
        """A size of zero must not hide a product of the others that no operand bounds."""
        ones = [max(v, 1) if r.words[k].kind == "dim" else v for k, v in enumerate(words)]
        limit = max(self.program.heap_elems, EMPTY_LIMIT)
        try:
            extents = r.extents(*ones, *tail)
        except ArithmeticError as error:
            self.fail(i, f"its sizes have no value ({error})")
        if max(extents, default=0) > limit:
            self.fail(i, f"a size is zero, and the others make {max(extents)} elements: more than {limit}")

    def check_place(self, i: int, operand: Operand, symbol: int, start: int, first: int, last: int) -> None:
        """The operand lies in the heap, inside its symbol, and the symbol may be used so."""
        p = self.program
        where = f"operand {operand.name} [{start}, {start + last})"
        if start < RESERVED or start + max(first, last) > p.heap_elems:
            self.fail(i, f"{where} leaves the heap's [{RESERVED}, {p.heap_elems})")
        if not 0 <= symbol < len(p.symbols):
            self.fail(i, f"{where} has symbol {symbol}, there are {len(p.symbols)}")
        s = p.symbols[symbol]
        for n, size in zip((first, last), self.sizes[symbol]):
            if start < s.offset or start + n > s.offset + size:
                self.fail(i, f"{where} leaves {s.name} [{s.offset}, {s.offset + size})")
        if not operand.writes:
            return
        if operand.access == "s" and s.kind != "workspace":
            self.fail(i, f"{where} is scratch, but {s.name} is of kind {s.kind}")
        if s.kind == "placeholder":
            self.fail(i, f"{where} writes placeholder {s.name}")
        if s.kind in ("parameter", "optimizer"):
            if operand.access != "u":
                self.fail(i, f"{where} overwrites {s.kind} {s.name}: only updates may change it")
            if self.phases[i] not in LATE:
                self.fail(i, f"{where} changes {s.kind} {s.name} in phase {self.phases[i]}: it is read-only there")
        if s.kind == "buffer":
            if operand.access != "u":
                self.fail(i, f"{where} overwrites buffer {s.name}: only updates may change it")
            if self.phases[i] not in EARLY:
                self.fail(i, f"{where} changes buffer {s.name} in phase {self.phases[i]}: it is read-only there")
            if not self.trains[i]:
                self.fail(i, f"{where} changes buffer {s.name} in a path that does not train")
        if s.kind == "state" and operand.access == "s":
            self.fail(i, f"{where} overwrites state {s.name}")

    def check_aliases(self, i: int, r: _Row, accesses: list[_Access]) -> None:
        """Operands of one row overlap only where both are read, or where the spec allows in-place work."""
        ordered = sorted(accesses, key=lambda a: a.start)
        for k, a in enumerate(ordered):
            stop = a.start + a.last
            for b in ordered[k + 1 :]:
                if b.start >= stop:
                    break
                if not (a.writes or b.writes):
                    continue
                same = (a.start, a.first, a.last) == (b.start, b.first, b.last)
                pairs = {(a.operand.name, b.operand.name), (b.operand.name, a.operand.name)}
                if not same or not pairs & r.in_place:
                    self.fail(
                        i,
                        f"operand {a.operand.name} ({self.name(a.symbol)}) [{a.start}, {stop}) and operand "
                        f"{b.operand.name} ({self.name(b.symbol)}) [{b.start}, {b.start + b.last}) overlap",
                    )

    # ------------------------------------------------------------ rows together
    def check_dataflow(self, span: range, *, largest: bool) -> None:
        """Every read of a transient value finds that value, written earlier in the path."""
        shadow = _Shadow()
        for i in span:
            accesses = [a for a in self.accesses[i] if not self.kept[a.symbol]]
            for a in accesses:
                if a.reads:
                    for start, stop, owner in self.cells(a, largest):
                        found = shadow.foreign(start, stop, owner)
                        if found:
                            cell, other = found
                            batch = self.batch if largest else 1
                            self.fail(
                                i,
                                f"operand {a.operand.name} reads {self.name(owner)} [{start}, {stop}), but cell "
                                f"{cell} holds {self.name(other)} there (batch {batch})",
                            )
            for a in accesses:
                if a.writes:
                    for start, stop, owner in self.cells(a, largest):
                        shadow.write(start, stop, owner)

    def cells(self, a: _Access, largest: bool) -> list[tuple[int, int, int]]:
        """[start, stop) and symbol of what an access touches; a block's members by themselves."""
        stop = a.start + (a.last if largest else a.first)
        symbols = self.program.symbols
        if not symbols[a.symbol].members:
            return [(a.start, stop, a.symbol)] if stop > a.start else []
        out = []
        for m in symbols[a.symbol].members:
            start, end = symbols[m].offset, symbols[m].offset + symbols[m].elems.b
            if start < stop and a.start < end and not self.kept[m]:
                out.append((max(start, a.start), min(end, stop), m))
        return out

    def check_barriers(self, span: range) -> None:
        """Between two barriers, no worker reads or writes what another one writes."""
        if not self.decoded[span[-1]][0][1] & FLAG_SYNC:
            self.fail(span[-1], "the last row of a path must be followed by a barrier")
        group: list[_Access] = []
        for i in span:
            group += self.accesses[i]
            if self.decoded[i][0][1] & FLAG_SYNC:
                self.check_group(group)
                group = []

    def check_group(self, group: list[_Access]) -> None:
        merged: dict[tuple[int, int, bool, object], list[_Access]] = {}
        for a in group:
            merged.setdefault((a.start, a.start + a.last, a.writes, a.how), []).append(a)
        active: list[tuple[int, bool, object, list[_Access]]] = []
        for (start, stop, writes, how), accesses in sorted(merged.items(), key=lambda item: item[0][:3]):
            active = [entry for entry in active if entry[0] > start]
            if writes and how is None and len({a.row for a in accesses}) > 1:
                self.race(accesses[0], accesses[-1])
            for _, wrote, before, others in active:
                if (writes or wrote) and (how is None or how != before):
                    for other in others:
                        for a in accesses:
                            if a.row != other.row:
                                self.race(other, a)
            active.append((stop, writes, how, accesses))

    def race(self, a: _Access, b: _Access) -> NoReturn:
        if a.row > b.row:
            a, b = b, a
        self.fail(
            b.row,
            f"operand {b.operand.name} ({self.name(b.symbol)}) [{b.start}, {b.start + b.last}) meets operand "
            f"{a.operand.name} ({self.name(a.symbol)}) [{a.start}, {a.start + a.last}) of row {a.row} "
            "with no barrier between them",
        )

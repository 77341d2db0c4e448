"""Checks of single rows: words are in range and operands inside their symbols, at every batch."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from calcvm.errors import ProgramError
from calcvm.ops.dims import ZERO, Affine
from calcvm.ops.sizes import Extent, On, Piecewise, exact, times
from calcvm.ops.spec import HEADER_WORDS, Operand
from calcvm.ops.types import bytes_of, dtype_of
from calcvm.vm.program.encoding import ABSENT, FLAG_PC_SHIFT, FLAG_PHASES, FLAG_SYNC
from calcvm.vm.program.verify.form import EARLY, LATE, Row
from calcvm.vm.program.verify.storage import Storage

EMPTY_LIMIT = 2**20  # work that a row of size zero may imply, for any heap


class Access:
    """Bytes that one operand of one row touches: [start, start+first) at batch 1, [start, start+last) at the largest.

    size : bytes of an element.
    how : a key for the distribution of these cells among the workers, at every batch.
    """

    __slots__ = ("row", "operand", "symbol", "start", "first", "last", "reads", "writes", "size", "how")

    def __init__(
        self, row: int, operand: Operand, symbol: int, span: tuple[int, int, int], size: int, reads: bool, how: object
    ):
        self.row, self.operand, self.symbol, self.size = row, operand, symbol, size
        self.start, self.first, self.last = span
        self.reads, self.writes, self.how = reads, operand.writes, how

    def __str__(self) -> str:
        """Its elements, in the notation of listings."""
        return f"[{self.start // self.size}, {(self.start + self.last) // self.size})"


class Rows(Storage):
    """Rows stay inside the heap and inside their symbols."""

    def check_patches(self) -> None:
        """Patched words are sizes, have one patch at most, and agree with the rows at the largest batch."""
        p = self.program
        self.patched: dict[int, dict[int, Affine]] = {}  # row -> {word: its size}
        self.sized: dict[tuple, tuple[Sequence[Extent], Sequence[Extent]]] = {}  # the results of `exactly`
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

    def check_row(self, i: int, row: list[int], values: list[int]) -> list[Access]:
        """Check a single row; returns the accesses of its operands."""
        r = self.known[row[0]]
        several = FLAG_PHASES if r.phases and row[HEADER_WORDS] > 1 else 0
        if row[1] & ~FLAG_SYNC != i << FLAG_PC_SHIFT | several:
            self.fail(
                i, f"flags {row[1]:#x} are malformed: bit 1 tells of several phases, bits 8 up hold the row's index"
            )
        if any(row[r.stop :]):
            self.fail(i, f"words {r.stop} to {self.width - 1} must be zero")
        others = values[: r.first_operand] + values[r.stop :]
        if others.count(-1) < len(others):
            self.fail(i, "a word that is no operand has a symbol")
        at_last: list[Any] = row[HEADER_WORDS : r.first_operand]
        for k in r.floats:
            at_last[k] = struct.unpack("<d", struct.pack("<q", at_last[k]))[0]
        self.check_ranges(i, r, at_last)
        tail = self.on
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
            wide = bytes_of(operand.type, self.program.itemsize)
            self.check_place(i, operand, symbol, start, (first, last), wide)
            if not last:
                continue
            how = self.sharing(i, operand, start * wide, times(extents[k], wide), parts[k])
            reads = operand.access in "ru" or (operand.access == "a" and r.acc is not None and at_last[r.acc] == 1)
            out.append(Access(i, operand, symbol, (start * wide, first * wide, last * wide), wide, reads, how))
        if len(out) > 1:
            self.check_aliases(i, r, out)
        return out

    def check_ranges(self, i: int, r: Row, words: list[Any]) -> None:
        for word, value in zip(r.words, words):
            if not word.lo <= value <= word.hi or (word.kind == "float" and not math.isfinite(value)):
                self.fail(i, f"{word.name} = {value} is outside [{word.lo}, {word.hi}]")

    def exactly(
        self, i: int, r: Row, at_last: list[Any], tail: On, patched: Mapping[int, Affine]
    ) -> tuple[Sequence[Extent], Sequence[Extent]]:
        """Each operand's elements, and the units for sharing it; checks the row's requirements for every batch."""
        words = [patched.get(k, v) for k, v in enumerate(at_last)]
        key = (r.spec.name, *((type(w), w) for w in words))
        if (known := self.sized.get(key)) is not None:  # rows with equal words
            return known
        n = len(r.spec.operands)

        def on(words: list[Any]) -> tuple:
            return (
                *r.extents(*words, *tail),
                *r.parts(*words, *tail),
                *r.require(*words, *tail),
                *r.spare(words, tail),
                *((words[0] - r.phases(*words, *tail)[0],) if r.phases else ()),
            )

        try:
            found = exact(on, words, self.batch) if patched else tuple(Affine(0, v) for v in on(words))
            if r.phases and found[-1] != ZERO:
                self.fail(i, f"it has {words[0]} phases, which is {found[-1]} too many")
            for expression, size in zip((*r.spec.require, "wn less the least workspace"), found[2 * n :]):
                least = size.bounds(self.batch)[0]
                if least < 0:
                    self.fail(i, f"{expression} = {least}, it must not be negative")
            self.sized[key] = found[:n], found[n : 2 * n]
            return self.sized[key]
        except ArithmeticError as error:
            self.fail(i, f"its sizes cannot be bounded for all batches from 1 to {self.batch}: {error}")

    def ends(self, i: int, operand: Operand, size: Extent) -> tuple[int, int]:
        """Elements at batch 1 and at the largest batch, affine in between; for scratch that is not affine, the maximum."""
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
            return "last worker"  # share(1, w, nw) is empty except for w = nw - 1
        if units != ZERO and self.bounds(i, units)[0] > 0:
            return (start, size, units)
        own = operand.access == "s" and not self.on.gpu and not self.decoded[i][0][1] & FLAG_PHASES
        return (start, size, "scratch") if own else None

    def check_empty(self, i: int, r: Row, words: list[Any], tail: On) -> None:
        """A size of zero must not hide a product of the other sizes that no operand bounds."""
        ones = [max(v, 1) if r.words[k].kind == "dim" else v for k, v in enumerate(words)]
        limit = max(self.program.heap_elems, EMPTY_LIMIT)
        try:
            extents = r.extents(*ones, *tail)
        except ArithmeticError as error:
            self.fail(i, f"its sizes have no value ({error})")
        if max(extents, default=0) > limit:
            self.fail(i, f"a size is zero, and the others make {max(extents)} elements: more than {limit}")

    def check_place(self, i: int, operand: Operand, symbol: int, start: int, ends: tuple[int, int], size: int) -> None:
        """The operand lies in the heap, inside its symbol, and the symbol allows this use."""
        p = self.program
        where = f"operand {operand.name} [{start}, {start + ends[1]})"
        low, high = self.range_of(operand.paged)
        if start * size < low or (start + max(ends)) * size > high:
            of = "the pages'" if operand.paged else "the heap's"
            self.fail(i, f"{where} leaves {of} [{low // p.itemsize}, {high // p.itemsize})")
        if not 0 <= symbol < len(p.symbols):
            self.fail(i, f"{where} has symbol {symbol}, there are {len(p.symbols)}")
        s = p.symbols[symbol]
        if s.dtype != dtype_of(operand.type, p.dtype) and not (operand.moved and s.itemsize == size):
            self.fail(i, f"{where} is of {dtype_of(operand.type, p.dtype)}, {s.name} of {s.dtype}")
        for n, own in zip(ends, self.sizes[symbol]):
            if start < s.offset or (start + n) * size > s.start + own:
                self.fail(i, f"{where} leaves {s.name} [{s.offset}, {s.offset + own // size})")
        if s.kind == "carry":
            each, rest = divmod(s.elems.b, self.batch)
            if s.elems.a or rest or (start, *ends) != (s.offset, each, s.elems.b):  # streams move it by whole samples
                self.fail(i, f"{where} is not {each} elements of carry {s.name} for each sample of a batch")
        if not operand.writes:
            return
        if operand.access == "s" and s.kind != "workspace":
            self.fail(i, f"{where} is scratch, but {s.name} is of kind {s.kind}")
        if s.kind == "placeholder":
            self.fail(i, f"{where} writes placeholder {s.name}")
        if s.kind in ("parameter", "optimizer"):
            if operand.access != "u" and not operand.paged:
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
        if s.kind == "carry" and self.phases[i] not in EARLY:
            self.fail(i, f"{where} changes carry {s.name} in phase {self.phases[i]}: it is read-only there")
        if s.kind in ("state", "carry") and operand.access == "s":
            self.fail(i, f"{where} overwrites {s.kind} {s.name}")

    def check_aliases(self, i: int, r: Row, accesses: list[Access]) -> None:
        """Operands of one row overlap only if both are read, or if the spec allows in-place work."""
        ordered = sorted(accesses, key=lambda a: a.start)
        for k, a in enumerate(ordered):
            stop = a.start + a.last
            for b in ordered[k + 1 :]:
                if b.start >= stop:
                    break
                if not (a.writes or b.writes):
                    continue
                same = (a.start, a.first, a.last, a.size) == (b.start, b.first, b.last, b.size)
                pairs = {(a.operand.name, b.operand.name), (b.operand.name, a.operand.name)}
                if not same or not pairs & r.in_place:
                    self.fail(
                        i,
                        f"operand {a.operand.name} ({self.name(a.symbol)}) {a} and operand "
                        f"{b.operand.name} ({self.name(b.symbol)}) {b} overlap",
                    )

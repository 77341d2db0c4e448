"""Storage of a program's values: zones, symbols, blocks, and the image of persistent values."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate

from calcvm.errors import ProgramError
from calcvm.vm.program.documents import MAX_HEAP, PAGES
from calcvm.vm.program.encoding import ALIGN_BYTES, RESERVED
from calcvm.vm.program.program_data import Symbol
from calcvm.vm.program.verify.form import RowForm


class Storage(RowForm):
    """Symbols lie in zones and in the heap; persistent values lie together."""

    def check_zones(self) -> None:
        at = 0
        for z in sorted(self.program.zones, key=lambda z: (z.start, z.stop)):
            if z.name == PAGES:
                if not self.program.heap_elems == z.start <= z.stop <= MAX_HEAP:
                    raise ProgramError(f"zone {z.name} is [{z.start}, {z.stop}): it must begin where the heap ends")
            elif not at <= z.start <= z.stop <= self.program.heap_elems:
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
        starts = [z.start * p.itemsize for z in zones]
        self.gaps: list[tuple[int, int, str]] = []  # between members of blocks: [start, stop), block
        self.sizes = []  # (bytes at batch 1, at the largest batch)
        names: set[str] = set()
        for s in p.symbols:
            if s.name in names:
                raise ProgramError(f"two symbols are called {s.name!r}: names tell them apart in listings")
            names.add(s.name)
            first, last = s.elems.at(1), s.elems.at(self.batch)
            if s.elems.a < 0 or first < 0:
                raise ProgramError(f"symbol {s.name}: size {s.elems} shrinks with the batch or is negative")
            stop = s.start + last * s.itemsize
            low, high = self.range_of(s.start >= p.heap_bytes)
            if s.start < low or stop > high:
                of = "" if s.dtype == p.dtype else f" {s.dtype}"
                raise ProgramError(
                    f"symbol {s.name} is [{s.offset}, {s.offset + last}){of}: outside the heap's "
                    f"[{low // p.itemsize}, {high // p.itemsize})"
                )
            self.sizes.append((first * s.itemsize, last * s.itemsize))
            if last:
                k = bisect_right(starts, s.start) - 1
                zone = zones[k] if k >= 0 else None
                if zone is None or stop > zone.stop * p.itemsize:
                    raise ProgramError(f"symbol {s.name} is [{s.offset}, {s.offset + last}): in no zone")
                if s.persistent and zone.persistent_stop == 0:
                    raise ProgramError(f"symbol {s.name} persists, but zone {zone.name} has no persistent block")
        for i, s in enumerate(p.symbols):
            if s.members:
                self.check_block(i, s)
        self.check_padding()
        self.check_image()

    def range_of(self, paged: bool) -> tuple[int, int]:
        """Bytes [start, stop) of the pages, or of the part of the heap that rows may touch."""
        p = self.program
        return (p.heap_bytes, p.heap_bytes + p.page_bytes) if paged else (RESERVED * p.itemsize, p.heap_bytes)

    def check_image(self) -> None:
        """Persistent values lie together, so that an image has no gaps."""
        at = RESERVED * self.program.itemsize
        lasting = sorted(
            (s.start, s.bytes.b, s.name, s.elems.a) for s in self.program.symbols if s.persistent and not s.members
        )
        for start, nbytes, name, grows in lasting:
            if grows:
                raise ProgramError(f"symbol {name} persists, and depends on the batch")
            if start >= self.program.heap_bytes > at:
                at = self.program.heap_bytes  # persistent values in pages are a separate part of the image
            if start - at >= ALIGN_BYTES:
                raise ProgramError(
                    f"symbol {name} persists from byte {start} on, far from what persists before it, up to {at}"
                )
            at = max(at, start + nbytes)

    def check_block(self, index: int, block: Symbol) -> None:
        """A block's members lie inside it in order."""
        p, at = self.program, block.start
        stop = block.start + self.sizes[index][1]
        for m in block.members:
            if not 0 <= m < len(p.symbols) or p.symbols[m].members:
                raise ProgramError(f"block {block.name}: member {m} is no value")
            s = p.symbols[m]
            if (s.kind, s.dtype, s.persistent, s.resident) != (
                block.kind,
                block.dtype,
                block.persistent,
                block.resident,
            ):
                raise ProgramError(f"block {block.name}: member {s.name} is of another kind")
            if s.start < at or s.elems.a or s.start + s.bytes.b > stop:
                raise ProgramError(f"block {block.name}: member {s.name} at {s.offset} is outside or out of order")
            if s.start > at:
                self.gaps.append((at, s.start, block.name))
            at = s.start + s.bytes.b
        if at != stop or block.elems.a:
            ends = stop // block.itemsize, at // block.itemsize
            raise ProgramError(f"block {block.name} ends at {ends[0]}, its members at {ends[1]}")

    def check_padding(self) -> None:
        """The gaps between members of a block belong to no symbol."""
        gaps = sorted(self.gaps)
        starts, reach = [start for start, _, _ in gaps], [*accumulate(((stop, name) for _, stop, name in gaps), max)]
        for s, (_, size) in zip(self.program.symbols, self.sizes):
            k = bisect_left(starts, s.start + size)
            if not s.members and k and reach[k - 1][0] > s.start:
                raise ProgramError(f"block {reach[k - 1][1]}: {s.name} uses the padding between its members")

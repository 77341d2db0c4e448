"""Where a pack has the bytes of a program's heap: in the device's heap, or among its constants."""

from __future__ import annotations

from collections.abc import Iterable

from calcvm.errors import ProgramError
from calcvm.frozen import frozen
from calcvm.ops.spec import HEADER_WORDS
from calcvm.vm.program.encoding import RESERVED
from calcvm.vm.program.program import Program
from calcvm.vm.program.program_data import Symbol

Span = tuple[int, int]


@frozen
class Places:
    """Pieces of a program's heap, each (start, stop, place, whether among the constants), in bytes.

    ram : bytes of the device's heap.  state, constants : the bytes of the program's heap that last, and that nothing writes.
    """

    pieces: tuple[tuple[int, int, int, bool], ...]
    ram: int
    state: Span
    constants: Span

    def of(self, byte: int) -> tuple[int, bool]:
        """The place of a byte, and whether it is among the constants."""
        for last in (0, 1):  # empty values may lie behind the last byte
            for start, stop, place, constant in self.pieces:
                if start <= byte < stop + last:
                    return byte - start + place, constant
        raise ProgramError(f"byte {byte} of the heap is in no piece that the functions use")


def places_of(program: Program, spans: Iterable[Span], state: Span) -> Places:
    """The places for the rows of some functions; ``state`` : what lasts in the program's heap.

    If no row writes a parameter, a buffer or an optimizer's state, these are constants, and the heap has the others' values alone.
    """
    read, written = _touched(program, spans)
    lasting = [s for s in read | written if s.persistent]
    own = [s for s in written if s.persistent]
    if any(s.kind != "carry" for s in own) or not lasting:
        return Places(((0, program.heap_bytes, 0, False),), program.heap_bytes, state, (0, 0))
    first = max(s.start + s.bytes.b for s in program.symbols if s.persistent)
    reserved = -(-RESERVED * program.itemsize // 8) * 8
    carried, constants = _hull(own), _hull([s for s in lasting if s not in own])
    pieces, at = [(0, reserved, 0, False), (*constants, 0, True)], reserved
    for start, stop in (carried, (-(-first // 8) * 8, max(s.start + _bytes(program, s) for s in read | written))):
        pieces.append((start, stop, at, False))
        at += -(-max(stop - start, 0) // 8) * 8
    return Places(tuple(pieces), at, carried, constants)


def _touched(program: Program, spans: Iterable[Span]) -> tuple[set[Symbol], set[Symbol]]:
    """The symbols that rows read, and those that they write."""
    read, written = set[Symbol](), set[Symbol]()
    for pc in (pc for span in spans for pc in range(*span)):
        spec = program.spec(pc)
        for k, operand in enumerate(spec.operands, HEADER_WORDS + len(spec.words)):
            number = int(program.operand_values[pc, k])
            if number >= 0:
                (read if operand.access == "r" else written).add(program.symbols[number])
    return read, written


def _bytes(program: Program, symbol: Symbol) -> int:
    return symbol.bytes.at(program.batch_size)


def _hull(symbols: list[Symbol]) -> Span:
    return (min(s.start for s in symbols), max(s.start + s.bytes.b for s in symbols)) if symbols else (0, 0)

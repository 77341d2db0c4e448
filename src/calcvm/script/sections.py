"""The rows of a program as Python statements, by section, with names for their operands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from calcvm.ops.dims import Affine, Shape, affine, numel
from calcvm.ops.layouts import laid
from calcvm.ops.sizes import On, extent
from calcvm.ops.spec import HEADER_WORDS
from calcvm.script.code import show, trace
from calcvm.script.derived import writer_of
from calcvm.script.names import Names
from calcvm.script.row import Row, Seen, lines_of
from calcvm.vm.program.encoding import ABSENT, ALIGN_BYTES, RESERVED, bits_float
from calcvm.vm.program.program import Program, Symbol

NO_WORDS = ("wn", "phases")  # words for kernels, which scripts do not need


@dataclass
class ScriptLine:
    """A row: its label and statements.  live : bytes in use meanwhile, at the planned batch."""

    label: str
    about: str
    live: int
    texts: list[str] = field(default_factory=list)


class Listing:
    """A program's rows as statements on named views.

    names : by number of symbol, for all symbols that rows use.
    """

    def __init__(self, program: Program, taken: Iterable[str] = ()):
        self.program = program
        self.names: Names[int] = Names(taken)
        self.patches = {(int(r), int(w)): Affine(int(a), int(b)) for r, w, a, b in program.patches}
        live = _live(program)
        self.sections: dict[tuple[str, str], list[ScriptLine]] = {
            section: [self._line(pc, live[pc]) for pc in range(*span)] for section, span in program.sections.items()
        }

    def name(self, number: int) -> str:
        """The name of a symbol's view in the script."""
        return self.names.of(number, self.program.symbols[number].name)

    def _line(self, pc: int, live: int) -> ScriptLine:
        program, spec = self.program, self.program.spec(pc)
        words, row = {}, program.rows[pc]
        for k, word in enumerate(spec.words, HEADER_WORDS):
            value = bits_float(row[k]) if word.kind == "float" else int(row[k])
            if word.name not in NO_WORDS:
                words[word.name] = self.patches.get((pc, k), value)
        of, operands, about = trace(), {}, []
        for k, o in enumerate(spec.operands, HEADER_WORDS + len(spec.words)):
            if o.access == "s" or row[k] == ABSENT:
                continue
            number = int(program.operand_values[pc, k])
            symbol, name = program.symbols[number], self.name(number)
            start = int(row[k]) - symbol.offset
            elems = extent(o.elems, On(1, 0)._asdict() | words)
            shape = shape_of(symbol)
            if symbol.kind == "carry" and not start and elems == Affine(numel(shape[1:]).b, 0):
                name, shape = f"{name}[:B]", (Affine(1, 0), *shape[1:])
            elif start or (elems != symbol.elems and isinstance(elems, Affine)):
                assert isinstance(elems, Affine)
                name, shape = f"{name}.reshape(-1)[{start}:{show(elems + start)}]", (elems,)
            operands[o.name] = Seen(of.of(name), shape, symbol.dtype)
            if o.writes:
                about.append(f"{self.name(number)} {show(shape)}")
        r = Row(spec, words, operands, of)
        writer_of(spec.name)(r)
        return ScriptLine(program.labels[pc], ", ".join(about), live, lines_of(r))


def shape_of(symbol: Symbol) -> Shape:
    """The stored shape of a symbol."""
    shape = tuple(map(affine, symbol.shape))
    return shape if symbol.members else laid(shape, symbol.layout)


# ---------------------------------------------------------------- live bytes
def _lives(program: Program) -> Iterator[tuple[Symbol, int, int]]:
    """Symbols that rows use, with their first and last row.  Kept symbols always live."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for pc in range(len(program.rows)):
        for number in {int(n) for n in program.operand_values[pc] if n >= 0}:
            for member in program.symbols[number].members or (number,):
                first.setdefault(member, pc)
                last[member] = pc
    for number, symbol in enumerate(program.symbols):
        if symbol.kept and not symbol.members:
            yield symbol, 0, len(program.rows) - 1
        elif number in first:
            yield symbol, first[number], last[number]


def _live(program: Program) -> list[int]:
    """Live bytes at each row, at the planned batch.  Shared memory counts once."""
    n = len(program.rows)
    spans: list[list[tuple[int, int]]] = [[] for _ in range(n)]
    kept = [(0, RESERVED * program.itemsize)]
    for symbol, first, last in _lives(program):
        stop = symbol.start + symbol.bytes.at(program.batch_size)
        span = symbol.start, -(-stop // ALIGN_BYTES) * ALIGN_BYTES  # the next symbol begins there at the earliest
        if (first, last) == (0, n - 1):
            kept.append(span)
        else:
            for pc in range(first, last + 1):
                spans[pc].append(span)
    base = _joined(kept)
    return [_total(_joined([*base, *at])) for at in spans]


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], stop)
        else:
            out.append((start, stop))
    return out


def _total(spans: list[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in spans)

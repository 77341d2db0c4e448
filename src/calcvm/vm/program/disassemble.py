"""A program as text: one line per row, with its equation, its sizes, and its operands' shapes and offsets."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from calcvm.equations.text import show_equation
from calcvm.equations.tree import Element, Name, Node, rewritten
from calcvm.errors import CalcError
from calcvm.ops.dims import Affine
from calcvm.ops.equation import equation_of
from calcvm.ops.spec import HEADER_WORDS, STATED, stem_of
from calcvm.ops.specialized import specialized
from calcvm.vm.program.encoding import ABSENT, FLAG_SYNC, bits_float
from calcvm.vm.program.program_data import ProgramData, Zone

HIDDEN = ("act", "acc")  # words that the equation shows
PLAIN = {"wn": 0, "phases": 1}  # words shown only if they have another value


def disassemble(program: ProgramData, batch: int | None = None) -> str:
    """The program as text: zones, then each section with one line per row.

    Parameters
    ----------
    batch : int, optional
        Show sizes for this batch; by default they are expressions of the batch ``B``.
    """
    if batch is not None and not 1 <= batch <= program.batch_size:
        raise CalcError(f"batch {batch}: the program is planned for 1 to {program.batch_size}")
    lines = [
        f"program {program.hash[:12]}  {program.dtype}  batch 1..{program.batch_size}  workers 1..{program.workers}  "
        f"{len(program.rows)} rows  heap {program.heap_elems} elements, {program.heap_bytes:,} bytes"
        + "  specialized"
        * program.info.get("specialize", False)
    ]
    lines += [_zone(z, program.itemsize) for z in program.zones]
    patches = _patches(program)
    for (path, phase), (start, stop) in program.sections.items():
        if start == stop:
            continue
        lines += ["", f"{path} / {phase}  [{start}, {stop})"]
        for i in range(start, stop):
            lines.append(_Line(program, i, patches, batch).text())
    return "\n".join(lines) + "\n"


def equation_at(program: ProgramData, index: int) -> str:
    """The equation of one row, as in the listing."""
    return _Line(program, index, _patches(program), None).equation()


def _patches(program: ProgramData) -> dict[tuple[int, int], Affine]:
    return {(int(row), int(word)): Affine(int(a), int(b)) for row, word, a, b in program.patches}


def _zone(z: Zone, itemsize: int) -> str:
    persistent = f"  persistent [{z.persistent_start}, {z.persistent_stop})" if z.persistent_stop else ""
    return f"zone {z.name:<10} [{z.start}, {z.stop})  {(z.stop - z.start) * itemsize:,} bytes{persistent}"


class _Line:
    """One row: its equation with the values' names, its words as sizes, and its operands with shapes and offsets."""

    def __init__(self, program: ProgramData, index: int, patches: dict[tuple[int, int], Affine], batch: int | None):
        self.program, self.index, self.batch = program, index, batch
        self.row = [int(w) for w in program.rows[index]]
        self.spec = program.spec(index)
        self.words: dict[str, Any] = {}
        self.operands: dict[str, tuple[int, int]] = {}  # offset and symbol
        for k, word in enumerate(self.spec.words, HEADER_WORDS):
            value: Any = bits_float(program.rows[index, k]) if word.kind == "float" else self.row[k]
            if (index, k) in patches:
                form = patches[index, k]
                value = form if batch is None else form.at(batch)
            self.words[word.name] = value
        first = HEADER_WORDS + len(self.spec.words)
        for k, operand in enumerate(self.spec.operands, first):
            self.operands[operand.name] = (self.row[k], int(program.operand_values[index, k]))

    def text(self) -> str:
        plain = {**PLAIN, **self.spec.defaults}
        shown = {n: v for n, v in self.words.items() if n not in HIDDEN and (n not in plain or v != plain[n])}
        words = [f"{name}={_show(value)}" for name, value in shown.items()]
        tail = f"  {{{' '.join(words)}}}" if words else ""
        there = [name for name, (offset, _) in self.operands.items() if offset != ABSENT]
        there.sort(key=lambda name: not self.spec.operand(name).writes)  # results first
        tail += f"  {' '.join(dict.fromkeys(self._operand(name) for name in there))}"
        tail += "  |sync" if self.row[1] & FLAG_SYNC else ""
        return f"{self.index:5d}  {short(self.spec.name):<16} {self.equation()}{tail}".rstrip()

    def equation(self) -> str:
        equation = equation_of(self.spec)
        if equation is None:
            return self.spec.synopsis
        absent = [name for name, (offset, _) in self.operands.items() if offset == ABSENT]
        called = {name: self._symbol(name) for name in self.operands if name not in absent}
        clauses = []
        orders = self.spec.lies(self.words) if self.spec.lies else {}
        for e in specialized(equation, self.words, absent, orders=orders).equations:
            adds = self.words.get("acc") == 1 and self.spec.operand(e.name).access == "a"
            text = show_equation(
                replace(e, name=called.get(e.name, e.name), value=rewritten(e.value, lambda n: _called(n, called)))
            )
            clauses.append(text.replace(" = ", " += ", 1) if adds else text)
        return "; ".join(clauses)

    def _symbol(self, name: str) -> str:
        """An operand's name, plus its offset within the symbol."""
        offset, index = self.operands[name]
        if not 0 <= index < len(self.program.symbols):
            return f"?@{offset}"
        symbol = self.program.symbols[index]
        return f"{symbol.name}+{offset - symbol.offset}" if offset != symbol.offset else symbol.name

    def _operand(self, name: str) -> str:
        """An operand with its shape and its offset into the heap."""
        offset, index = self.operands[name]
        if not 0 <= index < len(self.program.symbols):
            return f"?@{offset}"
        sizes = [str(d if self.batch is None else d.at(self.batch)) for d in self.program.symbols[index].shape]
        return f"{self._symbol(name)}[{','.join(sizes)}]@{offset}"


def short(name: str) -> str:
    """A row's name; of the digest in that of a custom equation or cell only the first digits."""
    return re.sub(r"_([0-9a-f]{8})[0-9a-f]{24}", r"_\1", name) if stem_of(name) in STATED else name


def _called(node: Node, names: dict[str, str]) -> Node:
    if isinstance(node, Element):
        return replace(node, array=names.get(node.array, node.array))
    return replace(node, name=names.get(node.name, node.name)) if isinstance(node, Name) else node


def _show(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

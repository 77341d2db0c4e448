"""A program as text: one line a row, the operator's equation with names, shapes and offsets put in."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from calcvm.errors import CalcError
from calcvm.ops.dims import Affine
from calcvm.ops.epilogues import ACTIVATIONS
from calcvm.ops.spec import HEADER_WORDS
from calcvm.vm.program.encoding import ABSENT, FLAG_SYNC, bits_float

if TYPE_CHECKING:
    from calcvm.vm.program.program import Program, Symbol, Zone

NAMED_WORDS = {"act": ACTIVATIONS}  # words whose numbers have names
PLAIN = {"wn": 0, "phases": 1}  # words that are shown where they are something else


def disassemble(program: Program, batch: int | None = None) -> str:
    """The program as text: zones, then each section with one line a row.

    Parameters
    ----------
    batch : int, optional
        Show sizes for this batch; without it they are forms of the batch ``B``.
    """
    if batch is not None and not 1 <= batch <= program.batch_size:
        raise CalcError(f"batch {batch}: the program is planned for 1 to {program.batch_size}")
    lines = [
        f"program {program.hash[:12]}  {program.dtype}  batch 1..{program.batch_size}  workers 1..{program.workers}  "
        f"{len(program.rows)} rows  heap {program.heap_elems} elements, {program.heap_bytes:,} bytes"
    ]
    lines += [_zone(z, program.itemsize) for z in program.zones]
    patches = {(int(row), int(word)): Affine(int(a), int(b)) for row, word, a, b in program.patches}
    for (path, phase), (start, stop) in program.sections.items():
        if start == stop:
            continue
        lines += ["", f"{path} / {phase}  [{start}, {stop})"]
        for i in range(start, stop):
            lines.append(_Line(program, i, patches, batch).text())
    return "\n".join(lines) + "\n"


def _zone(z: Zone, itemsize: int) -> str:
    persistent = f"  persistent [{z.persistent_start}, {z.persistent_stop})" if z.persistent_stop else ""
    return f"zone {z.name:<10} [{z.start}, {z.stop})  {(z.stop - z.start) * itemsize:,} bytes{persistent}"


class _Line:
    """One row: its words as sizes, its operands as names, put into the operator's synopsis."""

    def __init__(self, program: Program, index: int, patches: dict[tuple[int, int], Affine], batch: int | None):
        self.program, self.index, self.batch = program, index, batch
        self.row = [int(w) for w in program.rows[index]]
        self.spec = program.spec(index)
        self.words: dict[str, Any] = {}
        self.operands: dict[str, tuple[int, int]] = {}  # offset and symbol
        self.shown: set[str] = set()  # operands whose shape and offset the line has given already
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
        clauses = [self._clause(c.strip()) for c in self._acts(self.spec.synopsis).split(";")]
        equation = "; ".join(c for c in clauses if c)
        used = set(re.findall(r"[A-Za-z_]\w*", self.spec.synopsis))
        others = [
            f"{name} {self._operand(name)}"
            for name, (offset, _) in self.operands.items()
            if name not in used and offset != ABSENT
        ]
        shown = {n: v for n, v in self.words.items() if n not in NAMED_WORDS and (n not in PLAIN or v != PLAIN[n])}
        words = [f"{name}={_show(value)}" for name, value in shown.items()]
        tail = f"  {{{' '.join(words)}}}" if words else ""
        tail += f"  with {', '.join(others)}" if others else ""
        tail += "  |sync" if self.row[1] & FLAG_SYNC else ""
        return f"{self.index:5d}  {self.spec.name:<16} {equation}{tail}".rstrip()

    def _acts(self, text: str) -> str:
        """Words with names, and whether a gradient is set or added to."""
        for word, names in NAMED_WORDS.items():
            value = self.words.get(word)
            if isinstance(value, int) and 0 <= value < len(names):
                text = re.sub(rf"\b{word}\b", "" if names[value] == "none" else names[value], text)
        if "acc" in self.words:
            text = text.replace("(+)=", "+=" if self.words["acc"] == 1 else "=")
        return text

    def _clause(self, text: str) -> str:
        """One equation of a synopsis with names put in; nothing if what it sets is left out."""
        target = re.match(r"[A-Za-z_]\w*", text)
        if target and self.operands.get(target.group(), (0, 0))[0] == ABSENT:
            return ""
        for name, (offset, _) in self.operands.items():
            if offset == ABSENT:
                index = r"(\[[^\]]*\])?"
                if self.spec.operand(name).reads:
                    text = re.sub(
                        rf"\s*(\+\s*|-\s*|\)\*)\b{name}\b{index}", lambda m: ")" * m.group().startswith(")"), text
                    )
                text = re.sub(rf"\w*'?\(\b{name}\b{index}\)\s*\*\s*", "", text)
                text = re.sub(rf"\b{name}\b{index}", "_", text)
        text = _without_idle_parentheses(text)
        names = "|".join(sorted((n for n, o in self.operands.items() if o[0] != ABSENT), key=len, reverse=True))
        if not names:
            return text
        return re.sub(rf"(?<![\w.])({names})(?![\w(])(\[[^\]]*\])?", lambda m: self._operand(m.group(1)), text)

    def _operand(self, name: str) -> str:
        offset, index = self.operands[name]
        if not 0 <= index < len(self.program.symbols):
            return f"?@{offset}"
        symbol = self.program.symbols[index]
        inner = f"+{offset - symbol.offset}" if offset != symbol.offset else ""
        if name in self.shown:
            return f"{symbol.name}{inner}"
        self.shown.add(name)
        return f"{symbol.name}{inner}{self._shape(symbol)}@{offset}"

    def _shape(self, symbol: Symbol) -> str:
        sizes = [str(d if self.batch is None else d.at(self.batch)) for d in symbol.shape]
        return f"[{','.join(sizes)}]"


def _without_idle_parentheses(text: str) -> str:
    """Around a sum to which nothing is done but adding."""
    for found in re.finditer(r"(?<=\()\(|(?<== )\(", text):
        start = end = found.start()
        depth = 1
        while depth and end + 1 < len(text):
            end += 1
            depth += {"(": 1, ")": -1}.get(text[end], 0)
        if text[end + 1 :].startswith((")", " +")) or end + 1 == len(text):
            return _without_idle_parentheses(text[:start] + text[start + 1 : end] + text[end + 1 :])
    return text


def _show(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

"""Write docs/operators.md, the operator reference, from the operator table.

python tools/operators.py           # write it
python tools/operators.py --check   # only check whether it is up to date (exit status 1 if not)
"""

from __future__ import annotations

import argparse
import ast
import difflib
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

from calcvm.ops import FAMILIES, OPS, OpSpec, RowSpec
from calcvm.ops.spec import Operand, Word

TARGET = Path(__file__).parent.parent / "docs" / "operators.md"
WIDTH = 140
ACCESS = {"r": "reads", "w": "sets", "a": "sets or adds to", "u": "updates", "s": "scratch"}
DIM_LIMIT = 2**40

INTRODUCTION = """\
# The operators

This file is generated from the operator table, `src/calcvm/ops/`: change the table, then run `make docs`.
[architecture.md](architecture.md) explains the terms.

Graphs consist of **operators**; a **row** is one instruction of the VM. The forward rows of an operator run in order. A
backward row is emitted if a gradient that it sets is needed. Each row is listed with its name and equation, followed by:

- **words**: the integers (or float64 bits) after the header, in order. A word without a range is a size, from 0 to 2^40. Only
  sizes may depend on the batch.
- **operands**: element offsets into the heap, in order. A row *reads* an operand; *sets* every element; *sets or adds to* it, by
  the word `acc`; or *updates* it in place (parameters, state). *scratch* belongs to this row alone. Next come the extent in
  elements, as a formula of the words, and how the workers share it. *by n*: worker w of W touches only units `n*w // W` to
  `n*(w + 1) // W` of n equal ones. *all*: any worker may touch any element. *worker 0*: no other worker touches it.
  *a part each*: equal parts of the extent. If n is 0, as in some choices between sizes, it is *all*.
- **in place**: `y = x` means that y may take x's storage if x dies in this row.
- **requires**: expressions that must not be negative, beyond the ranges of the words. The verifier proves it for every batch.
- **flops**: operations of the row, each counted once (exp too).

`nw` is the planned number of workers; `gpu` is 1 on the device "cuda", else 0.
Names that begin with `t_` are temporaries between the rows of one operator; names that begin with `d` are gradients.
"""


def family_of(spec: OpSpec) -> str:
    return spec.words.__module__.rpartition(".")[2]


def families() -> dict[str, list[OpSpec]]:
    """The operators of each family, in the table's order, without those that users registered."""
    out: dict[str, list[OpSpec]] = {name: [] for name in FAMILIES}
    for spec in OPS.values():
        if spec.words.__module__.startswith("calcvm.ops."):
            out[family_of(spec)].append(spec)
    return out


# ---------------------------------------------------------------- a row
def wrapped(head: str, text: str, indent: int = 6) -> Iterator[str]:
    """``head`` and the text after it, with continuation lines indented to the text."""
    lead = " " * indent + f"{head:<10}"
    yield from textwrap.wrap(
        text, WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead), break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def word_text(word: Word) -> str:
    if word.kind == "dim" and (word.lo, word.hi) == (0, DIM_LIMIT):
        return word.name
    kind = "" if word.kind == "int" else f" {word.kind}"
    return f"{word.name} ({number(word.lo)}..{number(word.hi)}{kind})"


def number(x: float) -> str:
    return str(int(x)) if abs(x) < 2**53 and x == int(x) else f"{x:g}"


def shared(operand: Operand) -> str:
    if operand.part == "w0":
        return "worker 0"
    if operand.access == "s" and not operand.part:
        return "a part each"
    return f"by {grouped(operand.part)}" if operand.part else "all"


def grouped(expression: str) -> str:
    """Put a bare conditional in parentheses."""
    node = ast.parse(expression, mode="eval").body
    return f"({expression})" if isinstance(node, ast.IfExp) and node.col_offset == 0 else expression


def operand_lines(row: RowSpec) -> Iterator[str]:
    for o in row.operands:
        left_out = {True: "; may be left out", False: ""}.get(o.optional, f"; may be left out if {o.optional}")  # type: ignore[arg-type]
        yield from wrapped(o.name, f"{ACCESS[o.access]} {grouped(o.elems)}; {shared(o)}{left_out}")


def row_lines(row: RowSpec) -> Iterator[str]:
    yield from textwrap.wrap(
        f"{row.name}: {row.synopsis}", WIDTH, subsequent_indent=" " * 8, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    yield from wrapped("words", ", ".join(map(word_text, row.words)) or "none")
    yield from operand_lines(row)
    if row.takes:
        yield from wrapped("does", ", then ".join(row.takes))
    if row.epilogues:
        yield from wrapped("is", ", ".join(dict.fromkeys(by.kind for by in row.epilogues)))
    if row.in_place:
        yield from wrapped("in place", ", ".join(f"{written} = {read}" for written, read in row.in_place))
    for expression in row.require:
        yield from wrapped("requires", f"{grouped(expression)} >= 0")
    yield from wrapped("flops", row.flops)


# ---------------------------------------------------------------- an operator
def listed(names: Iterable[str], none: str = "none") -> str:
    return ", ".join(f"`{n}`" for n in names) or none


def facts(spec: OpSpec) -> Iterator[str]:
    """The facts about the operator other than its rows."""
    given = [f"`{n}`" + (" (may be left out)" if n in spec.optional_inputs else "") for n in spec.inputs]
    yield f"Inputs: {', '.join(given) or 'none'}. Outputs: {listed(spec.outputs)}."
    if spec.saved:
        yield f"Saved by the forward for the backward: {listed(spec.saved)}."
    if spec.view:
        yield "A view: the output is the input under another shape, and there is no row in either direction."
    if spec.broadcast:
        yield "Operands are broadcast as in NumPy; lowering reduces the gradients of broadcast inputs."
    if spec.differentiable:
        text = f"Gradients: of {listed(spec.differentiable)}."
        if spec.passes:
            text += f" That of {listed(spec.passes)} is the output's gradient itself: no row."
        if spec.bwd:
            text += f" The backward reads {listed(spec.bwd_reads, 'none of the values')} beside the output's gradient."
        yield text
    for a in spec.attrs:
        default = f"default `{a.default!r}`" if a.check(a.default) else "required"
        yield f"Attribute `{a.name}` ({default}): {a.doc}."
    if spec.onnx:
        yield f"ONNX: {', '.join(spec.onnx)}."
    if spec.source:
        yield f"Source: {spec.source}."


def operator(spec: OpSpec, shown: set[str]) -> Iterator[str]:
    """A section.  Rows that several operators share are listed once."""
    yield f"### {spec.name}"
    yield ""
    for fact in facts(spec):
        yield from textwrap.wrap(
            fact, WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    yield ""
    if spec.rows:
        yield "```text"
        for row in spec.rows:
            if row.name in shown:
                yield f"{row.name}: as above"
            else:
                yield from row_lines(row)
            shown.add(row.name)
        yield "```"
        yield ""


# ---------------------------------------------------------------- the whole
def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{'|'.join('---' for _ in header)}|"
    for line in lines:
        yield f"| {' | '.join(c.replace('|', chr(92) + '|') for c in line)} |"
    yield ""


def overview(spec: OpSpec) -> tuple[str, ...]:
    return (
        f"[{spec.name}](#{spec.name})",
        f"`{spec.synopsis}`",
        ", ".join(spec.inputs),
        ", ".join(spec.outputs),
        ", ".join(spec.saved),
        ", ".join(spec.bwd_reads) if spec.bwd else "",
        ", ".join(spec.onnx),
    )


HEADER = ("operator", "equation", "inputs", "outputs", "saved", "backward reads", "ONNX")


def reference() -> str:
    lines = INTRODUCTION.splitlines() + [""]
    groups = families()
    for family, specs in groups.items():
        lines.append(f"- [{family}](#{family}): {', '.join(s.name for s in specs)}")
    lines = [part for line in lines for part in (textwrap.wrap(line, WIDTH, subsequent_indent="  ") or [""])]
    lines.append("")
    shown: set[str] = set()
    for family, specs in groups.items():
        about = (import_module(f"calcvm.ops.{family}").__doc__ or "").strip()
        lines += [f"## {family}", "", *about.splitlines(), "", *table(HEADER, map(overview, specs))]
        for spec in specs:
            lines += operator(spec, shown)
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="do not write; fail if the file is not up to date")
    text = reference()
    if parser.parse_args().check:
        old = TARGET.read_text() if TARGET.exists() else ""
        for line in difflib.unified_diff(
            old.splitlines(), text.splitlines(), "docs/operators.md", "table", lineterm=""
        ):
            print(line)
        return int(old != text)
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

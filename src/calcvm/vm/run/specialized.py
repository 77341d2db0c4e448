"""Specialized programs: at the planned batch each section is one row, whose kernel is the section's straight code.

A row of a tiny network spends most of its nanoseconds on finding out its sizes, which straight code knows.  The row of a section
stands in the place of the section's first row, and says how far it is to the next section's; all other rows stay where they are.

    rows        | forward      | loss  | backward             | optimize |
                | 0     1    2 | 3   4 | 5   6   7   8   9    | 10       |
    specialized | 0 ---------> | 3 --> | 5 -----------------> | 10 ----> |
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from calcvm.kernels_cpu import FAMILIES, _native, own_kernels
from calcvm.kernels_cpu._target import Target
from calcvm.vm.program.encoding import FLAG_PC_SHIFT, FLAG_SKIPS, HEADER_WORDS, copied

if TYPE_CHECKING:
    from calcvm.vm.program.program import Program

Span = tuple[int, int]


class Code(NamedTuple):
    """The straight code of rows (`calcvm.kernels_cpu._straight`): its symbol, what builds it, its modules, and whether it is cached."""

    symbol: str
    build: _native.Build
    modules: _native.Modules
    kept: bool

    @property
    def address(self) -> int:
        """Native address; at first use it is compiled, or linked from the cache."""
        return _native.address(self.symbol, self.build, self.modules, kept=self.kept)


def sections_of(program: Program) -> dict[Span, Code]:
    """The code of each section that has rows, if the program is specialized."""
    spans = [span for span in program.sections.values() if program.info.get("specialize") and span[0] < span[1]]
    return {span: _code_of(program, span) for span in spans}


def _code_of(program: Program, span: Span) -> Code:
    names, rows = [name for name, _ in program.instructions], program.rows[slice(*span)]
    dtype, device = program.dtype, program.info.get("device", "cpu")

    def build(symbol: str, places: tuple[_native.Modules, ...], target: Target) -> _native.ObjectCode:
        from calcvm.kernels_cpu._straight import section

        return _native.ObjectCode(places[0], section(symbol, rows, names, dtype, device, target), {})

    own = own_kernels(names[k] for k in {*rows[:, 0].tolist()})
    known = [own[name].symbol(dtype, device) if name in own else name for name in names]
    digest = hashlib.sha256(repr((known, rows.tolist())).encode()).hexdigest()[:20]
    modules = (*(f"kernels_cpu.{name}" for name in (*FAMILIES, "_straight")), *_native.of_device(device))
    return Code(_native.symbol_of(f"rows-{digest}", dtype, device), build, modules, not own)


def joined(rows: np.ndarray, sections: Mapping[Span, int]) -> np.ndarray:
    """Rows with a row for each section, whose instructions are given."""
    out = copied(rows)
    for (start, stop), instruction in sections.items():
        out[start, : HEADER_WORDS + 1] = (
            instruction,
            start << FLAG_PC_SHIFT | FLAG_SKIPS,
            (stop - start) * out.strides[0],
        )
    return out

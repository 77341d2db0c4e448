"""Kernels of rows that are given by their equation alone, see `_plain`.  The equation is evaluated when the kernel is compiled."""

from __future__ import annotations

from calcvm.equations.declare import Row
from calcvm.equations.declared import declared_rows
from calcvm.equations.plain import Plain
from calcvm.equations.stated import Stated
from calcvm.kernel import words
from calcvm.kernels_cpu._common import KERNELS, kernel_as
from calcvm.kernels_cpu._plain import kernel_of


def add(row: Plain | Row, own: bool = False) -> None:
    """Register the kernel of a row; ``own`` : a user's row, which no other process knows."""
    loops = kernel_of(lambda: row.plain if isinstance(row, Row) else row)
    typed = [f"{name}.{row.types[name]}" if name in row.types else name for name in row.operands]

    @kernel_as(row.name, words(" ".join(row.words), " ".join(row.reals), typed), own)
    def run(me, *given):
        loops(me, given)


def state(row: Stated) -> None:
    """Register the kernel of a user's equation.  The row's name identifies the equation, so its code can be cached by name."""
    if row.name not in KERNELS:
        add(row.plain)


for _row in declared_rows():
    add(_row)

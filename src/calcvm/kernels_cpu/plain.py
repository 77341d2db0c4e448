"""Kernels of rows whose equation says all: see `_plain`.  What a row's equation is, is found when its kernel is compiled."""

from __future__ import annotations

from calcvm.equations.declare import Row
from calcvm.equations.declared import declared_rows
from calcvm.equations.plain import Plain
from calcvm.equations.stated import Stated
from calcvm.kernel import words
from calcvm.kernels_cpu._common import KERNELS, kernel_as
from calcvm.kernels_cpu._plain import kernel_of


def add(row: Plain | Row, own: bool = False) -> None:
    """The kernel of a row; ``own`` : of a user's, which no other process knows."""
    loops = kernel_of(lambda: row.plain if isinstance(row, Row) else row)
    typed = [f"{name}.{row.types[name]}" if name in row.types else name for name in row.operands]

    @kernel_as(row.name, words(" ".join(row.words), " ".join(row.reals), typed), own)
    def run(me, *given):
        loops(me, given)


def state(row: Stated) -> None:
    """The kernel of a row that is a user's equation: the row's name says which, so that compiled code is kept by it."""
    if row.name not in KERNELS:
        add(row.plain)


for _row in declared_rows():
    add(_row)

"""Kernels of rows whose equation says all: see `_plain`."""

from __future__ import annotations

from calcvm.equations.declared import plain_rows
from calcvm.equations.plain import Plain
from calcvm.equations.stated import Stated
from calcvm.kernel import words
from calcvm.kernels_cpu._common import KERNELS, kernel_as
from calcvm.kernels_cpu._plain import kernel_of


def add(plain: Plain, own: bool = False) -> None:
    """The kernel of a row; ``own`` : of a user's, which no other process knows."""
    loops = kernel_of(plain)
    typed = [f"{name}.{plain.types[name]}" if name in plain.types else name for name in plain.operands]

    @kernel_as(plain.name, words(" ".join(plain.words), " ".join(plain.reals), typed), own)
    def run(me, *given):
        loops(me, given)


def state(row: Stated) -> None:
    """The kernel of a row that is a user's equation: the row's name says which, so that compiled code is kept by it."""
    if row.name not in KERNELS:
        add(row.plain)


for _plain in plain_rows():
    add(_plain)

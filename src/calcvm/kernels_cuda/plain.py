"""Kernels of rows that are given by their equation alone, see `_plain`."""

from __future__ import annotations

from collections.abc import Callable

from calcvm.equations.declare import Row
from calcvm.equations.declared import declared_rows
from calcvm.equations.plain import Plain
from calcvm.kernel import Words, words
from calcvm.kernels_cuda._common import KERNELS, Kernel
from calcvm.kernels_cuda._plain import kernel_of
from calcvm.lazy import cached_property


def kernel(plain: Plain) -> Kernel:
    """The kernel of a row."""
    return Kernel(kernel_of(plain), plain.name, words_of(plain))


def words_of(row: Plain | Row) -> Words:
    typed = [f"{name}.{row.types[name]}" if name in row.types else name for name in row.operands]
    return words(" ".join(row.words), " ".join(row.reals), typed)


class Declared(Kernel):
    """The kernel of a declared row; its equation is looked up when the function is first needed."""

    def __init__(self, row: Row):
        self.row, self.name, self.words, self.instances = row, row.name, words_of(row), {}

    @cached_property
    def fn(self) -> Callable:  # type: ignore[override]
        return kernel_of(self.row.plain)


for _row in declared_rows():
    KERNELS[_row.name] = Declared(_row)

"""Kernels of rows whose equation says all: see `_plain`."""

from __future__ import annotations

from calcvm.equations.declared import plain_rows
from calcvm.equations.plain import Plain
from calcvm.kernel import words
from calcvm.kernels_cuda._common import KERNELS, Kernel
from calcvm.kernels_cuda._plain import kernel_of


def kernel(plain: Plain) -> Kernel:
    """The kernel of a row."""
    typed = [f"{name}.{plain.types[name]}" if name in plain.types else name for name in plain.operands]
    return Kernel(kernel_of(plain), plain.name, words(" ".join(plain.words), " ".join(plain.reals), typed))


for _plain in plain_rows():
    KERNELS[_plain.name] = kernel(_plain)

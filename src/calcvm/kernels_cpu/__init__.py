"""Hand-written CPU kernels, a file a family; imported and compiled when a program first uses them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from calcvm.kernels_cpu._common import Kernel

# The order in which they are looked through: what most programs need comes first.
FAMILIES = ("contraction", "losses", "optimizers", "elementwise", "reduction", "shape", "random")


def load() -> None:
    """Import all families, so that every kernel is registered."""
    for family in FAMILIES:
        import_module(f"calcvm.kernels_cpu.{family}")


def find(name: str) -> Kernel:
    """The kernel of a row, from the first family that has it."""
    from calcvm.kernels_cpu._common import KERNELS

    for family in FAMILIES:
        if name in KERNELS:
            break
        import_module(f"calcvm.kernels_cpu.{family}")
    return KERNELS[name]


def address_of(name: str, dtype: str, device: str = "cpu") -> int:
    """Address of a row's C-callable kernel for heaps of ``dtype`` (ImportError: the device's package is missing)."""
    _prepare(device)
    return find(name).address(dtype, device)


def body_of(name: str, dtype: str, device: str = "cpu") -> int:
    """Address of the same code as the VM calls it."""
    _prepare(device)
    return find(name).body(dtype, device)


def _prepare(device: str) -> None:
    if device == "blas":
        from calcvm.kernels_cpu import _blas

        _blas.require()

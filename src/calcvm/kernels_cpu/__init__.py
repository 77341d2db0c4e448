"""Hand-written CPU kernels, a file a family; imported and compiled when a program first uses them."""

from __future__ import annotations

from importlib import import_module

# The order in which they are looked through: what most programs need comes first.
FAMILIES = ("contraction", "losses", "optimizers", "elementwise", "reduction", "shape", "random")


def load() -> None:
    """Import all families, so that every kernel is registered."""
    for family in FAMILIES:
        import_module(f"calcvm.kernels_cpu.{family}")


def address_of(name: str, dtype: str, device: str = "cpu") -> int:
    """Native address of a row's kernel for heaps of ``dtype`` (ImportError: the device's package is missing)."""
    from calcvm.kernels_cpu._common import KERNELS

    if device == "blas":
        from calcvm.kernels_cpu import _blas

        _blas.require()

    for family in FAMILIES:
        if name in KERNELS:
            break
        import_module(f"calcvm.kernels_cpu.{family}")
    return KERNELS[name].address(dtype, device)

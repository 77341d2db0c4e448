"""Hand-written CPU kernels, a file a family; imported and compiled when a program first uses them."""

from __future__ import annotations

from importlib import import_module

FAMILIES = ("contraction", "elementwise", "reduction", "shape", "random", "losses", "optimizers")


def load() -> None:
    """Import all families, so that their kernels are registered."""
    for family in FAMILIES:
        import_module(f"calcvm.kernels_cpu.{family}")


def address_of(name: str, dtype: str) -> int:
    """Native address of a row's kernel for heaps of ``dtype``."""
    from calcvm.kernels_cpu._common import KERNELS

    if name not in KERNELS:
        load()
    return KERNELS[name].address(dtype)

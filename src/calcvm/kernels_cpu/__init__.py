"""CPU kernels, one file per family.  A family is imported, and its rows compiled, when a program first uses them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from calcvm.kernels_cpu import _native
from calcvm.kernels_cpu._target import Target

if TYPE_CHECKING:
    from calcvm.kernels_cpu._common import Kernel

# The search order: families that most programs need come first.
FAMILIES = (
    "contraction",
    "transformers",
    "losses",
    "optimizers",
    "elementwise",
    "reduction",
    "shape",
    "resizing",
    "random",
    "normalization",
    "convolution",
    "pooling",
    "quantized",
    "recurrent",
    "paging",
    "exchange",
    "plain",
)

FEW = 4  # from this many missing functions on, other processes help to compile


def load() -> None:
    """Import all families, which registers every kernel."""
    for family in FAMILIES:
        import_module(f"calcvm.kernels_cpu.{family}")


def find(name: str) -> Kernel:
    """The kernel of a row, from the first family that has it; imports Numba."""
    from calcvm.kernels_cpu._common import KERNELS

    _state(name)
    for family in FAMILIES:
        if name in KERNELS:
            break
        import_module(f"calcvm.kernels_cpu.{family}")
    return KERNELS[name]


def _state(name: str) -> None:
    """Register the kernel of a row that comes from a user's equation, or those of a user's recurrent cell."""
    stated = sys.modules.get("calcvm.equations.stated")
    if stated is not None and name in stated.STATED:
        import_module("calcvm.kernels_cpu.plain").state(stated.STATED[name])
    cells = sys.modules.get("calcvm.equations.cells")
    if cells is not None and (own := cells.own_cell(name)) is not None:
        import_module("calcvm.kernels_cpu.recurrent").register_own(own)


def address_of(name: str, dtype: str, device: str = "cpu") -> int:
    """Native address of a row's kernel for heaps of ``dtype`` (ImportError: the device's package is missing).

    Functions in the cache are linked without importing Numba.
    """
    if device == "blas":
        from calcvm.kernels_cpu import _blas

        _blas.require()
    own = own_kernels([name])
    if own:
        return own[name].address(dtype, device)
    symbol = _native.symbol_of(name, dtype, device)
    return _native.address(symbol, _build, *(_native.modules_of(family, device) for family in FAMILIES))


def prepare(
    names: Iterable[str],
    dtype: str,
    device: str = "cpu",
    others: Mapping[str, tuple[_native.Modules, ...]] | None = None,
) -> None:
    """Compile the rows' kernels that the cache lacks, in several processes if there are many; see `address_of`.

    others : symbols of further functions to compile, with the modules that each may come from.
    """
    if device == "blas":
        from calcvm.kernels_cpu import _blas

        _blas.require()
    names = [*names]
    own = own_kernels(names)
    places = tuple(_native.modules_of(family, device) for family in FAMILIES)
    wanted = {_native.symbol_of(name, dtype, device): places for name in names if name not in own} | dict(others or {})
    missing = {symbol: of for symbol, of in wanted.items() if not _native.is_there(symbol, of)}
    if len(missing) >= FEW:
        from calcvm.kernels_cpu._compile_workers import compile_ahead

        compile_ahead(missing, lambda: [kernel.address(dtype, device) for kernel in own.values()])


def emit(names: Iterable[str], dtype: str, target: Target, device: str = "cpu") -> dict[str, bytes]:
    """Object files of rows' kernels and of the routines that they call, for a target, by symbol.

    Nothing is linked or loaded, so the target may be another processor than this one.  A symbol is the C function
    ``void(heap *, const int64_t *row, int64_t worker, int64_t workers, int64_t phase)``.  The functions that it calls are
    among the object files, or in libc and libm.
    """
    names = [*names]
    own, places = own_kernels(names), [_native.modules_of(family, device) for family in FAMILIES]
    found: dict[str, _native.ObjectCode] = {}
    for name in names:
        symbol = own[name].symbol(dtype, device) if name in own else _native.symbol_of(name, dtype, device)
        found |= _native.objects(symbol, _build, *places, target=target, kept=name not in own)
    return {symbol: made.code for symbol, made in found.items()}


def own_kernels(names: Iterable[str]) -> dict[str, Any]:
    """The users' kernels among them, which only this process knows."""
    common = sys.modules.get("calcvm.kernels_cpu._common")
    known = {name: common.KERNELS[name] for name in names if name in common.KERNELS} if common else {}
    return {name: kernel for name, kernel in known.items() if kernel.mark}


def _build(symbol: str, places: tuple[_native.Modules, ...], target: Target) -> _native.ObjectCode:
    from calcvm.kernels_cpu._common import build

    _state(_native.name_of(symbol))
    return build(symbol, places, target)

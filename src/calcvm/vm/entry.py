"""The compiled loops as functions that Python calls; each call releases the interpreter's lock."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from calcvm.kernels_cpu import _native

ARGUMENTS = {
    "run_rows": 2, "run_rounds": 2, "run_task": 2, "run_fleet": 2, "run_team": 3, "serve": 1,
    "permute": 5, "copy_rows": 8,
}  # all int64  # fmt: skip
NEEDS = {"run_rounds": ("permute", "copy_rows")}  # entries that an entry calls by symbol
ANY = "any"  # the loops are the same for every dtype
MODULES = ("vm.loop",)  # what they come from


def symbol(name: str) -> str:
    return _native.symbol_of(name, ANY)


@cache
def address(name: str) -> int:
    """Native address of an entry: the code of a job."""
    return _native.address(symbol(name), _build, MODULES)


@cache
def entry(name: str) -> Any:
    """A compiled loop, from the cache where it can be (then Numba is not imported)."""
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * ARGUMENTS[name])(address(name))


def _build(symbol_: str, places: tuple[_native.Modules, ...]) -> _native.Compiled:
    from numba import types

    from calcvm.kernels_cpu._common import compile_object
    from calcvm.vm import loop

    name = symbol_.removeprefix("calcvm_").rsplit("_", 2)[0]
    signature = types.void(*[types.int64] * ARGUMENTS[name])
    needs = NEEDS.get(name, ())
    for need in needs:  # before what calls them: Numba links its pieces as it compiles
        address(need)
    code = compile_object(getattr(loop, name), signature, symbol_, fastmath=set())
    return _native.Compiled(MODULES, code, {symbol(need): MODULES for need in needs})

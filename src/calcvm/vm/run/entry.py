"""The compiled loops as functions for Python; each call releases the interpreter's lock."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from typing import Any

from calcvm.kernels_cpu import _native
from calcvm.kernels_cpu._target import Target

ARGUMENTS = {
    "run_rows": 2, "run_rounds": 2, "run_task": 2, "run_fleet": 2, "run_team": 3, "serve": 1,
    "permute": 5, "copy_rows": 8, "flush": 2, "draw": 2,
    "method": 5, "methods": 1,
}  # all int64  # fmt: skip
METHODS = {  # in `calcvm.vm.calls.entries`, by their names in Python
    "step": "step", "run_steps": "run_steps", "predict": "predict", "evaluate": "evaluate", "run": "run_by_name",
    "__setitem__": "set_item",
}  # fmt: skip
STREAMS = {"__call__": "stream"}  # the same of `calcvm.model.stream.Stream`
OWN = "_calcvm_"  # prefix of the fallbacks of compiled methods: a user's class may define ``_step`` itself
TUPLE_SIZE = 16  # where a tuple's length is, in bytes
ANSWERS = {"method", "methods"}  # entries that return a number: the address of an object, or of code
NEEDS = {  # entries that an entry calls by symbol
    "run_rounds": ("permute", "copy_rows"),
    "method": ("run_rows", "run_team", "copy_rows"),
}
OF = {
    "draw": "vm.run.sampling",
    "method": "vm.calls.compiled",
    "methods": "vm.calls.entries",
}  # modules of entries; all others are in "vm.run.loop"
ANY = "any"  # the loops are the same for every dtype


def modules(name: str) -> tuple[str, ...]:
    """The modules that an entry is compiled from."""
    return (OF.get(name, "vm.run.loop"),)


def symbol(name: str) -> str:
    return _native.symbol_of(name, ANY)


def places(names: Iterable[str]) -> dict[str, tuple[_native.Modules, ...]]:
    """The symbols of entries, and the modules of each."""
    return {symbol(name): (modules(name),) for name in names}


@cache
def address(name: str) -> int:
    """Native address of an entry: the code of a job."""
    return _native.address(symbol(name), _build, modules(name))


@cache
def entry(name: str) -> Any:
    """A compiled loop, from the cache if possible (then Numba is not imported)."""
    result = ctypes.c_int64 if name in ANSWERS else None
    return ctypes.CFUNCTYPE(result, *[ctypes.c_int64] * ARGUMENTS[name])(address(name))


def _build(symbol_: str, places: tuple[_native.Modules, ...], target: Target) -> _native.ObjectCode:
    name = symbol_.removeprefix("calcvm_").rsplit("_", 2)[0]
    (module,) = modules(name)
    needs, source = NEEDS.get(name, ()), import_module(f"calcvm.{module}")
    if hasattr(source, "build"):
        code = source.build(symbol_, target)
    else:
        from numba import types

        from calcvm.kernels_cpu._common import compile_object

        result = types.int64 if name in ANSWERS else types.void
        signature = result(*[types.int64] * ARGUMENTS[name])
        code, _ = compile_object(getattr(source, name), signature, symbol_, fastmath=set(), target=target)
    return _native.ObjectCode((module,), code, {symbol(need): modules(need) for need in needs})

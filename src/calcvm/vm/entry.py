"""The compiled loops as functions that Python calls; each call releases the interpreter's lock."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from calcvm.kernels_cpu import _native

ARGUMENTS = {"run_rows": 2, "run_rounds": 2, "post": 3, "join": 3, "serve": 3}  # all int64
ANY = "any"  # the loops are the same for every dtype


@cache
def address(name: str) -> int:
    """Native address of an entry: the code of a job."""
    return _native.address(_native.symbol_of(name, ANY), _build)


@cache
def entry(name: str) -> Any:
    """One of `calcvm.vm.loop`'s entries, from the cache where it can be (then Numba is not imported)."""
    result = ctypes.c_int64 if name in ("post", "serve") else None
    return ctypes.CFUNCTYPE(result, *[ctypes.c_int64] * ARGUMENTS[name])(address(name))


def _build(symbol: str) -> tuple[bytes, tuple[str, ...]]:
    from calcvm.kernels_cpu._common import compile_object
    from calcvm.vm import loop

    name = symbol.removeprefix("calcvm_").rsplit("_", 2)[0]
    return compile_object(getattr(loop, name), loop.SIGNATURES[name], symbol), ()

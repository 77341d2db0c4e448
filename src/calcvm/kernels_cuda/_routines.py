"""Routines: functions that are compiled once, each to separate PTX, and called by name.

Kernels of rows are routines, and so is code that many rows share, such as a tile of a product.  A program's PTX is assembled from
their texts (`calcvm.vm.run.cuda.build`).  For a call, the compiler sees only the routine's name and types.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from calcvm.kernels_cuda._cuda import TOGETHER, CUDACABICallConv, compiled_by, ir, types

Signature = Callable[[Any], Any]  # a routine's types, from the type of the heap's pointer, its first argument


@dataclass(frozen=True)
class Routine:
    """A function, its types, and the module of calcvm that it comes from; the module's imports count too."""

    name: str
    fn: Callable
    signature: Signature
    modules: tuple[str, ...]
    mark: str = ""  # of code from elsewhere

    def symbol(self, dtype: str) -> str:
        return symbol_of(self.name, dtype)


ROUTINES: dict[str, Routine] = {}


def symbol_of(name: str, dtype: str) -> str:
    """The name of a routine's PTX function: ASCII, without dots."""
    return f"calcvm_{re.sub(r'[^A-Za-z0-9_]', lambda c: f'${ord(c[0]):x}$', name)}_{dtype}"


def ints(n: int) -> list[Any]:
    """The types of n integers."""
    return [types.int64] * n


def routine(signature: Signature, name: str = "") -> Callable[[Callable], Callable]:
    """Decorator: the function becomes a routine, which its callers call by name."""

    def mark(fn: Callable) -> Callable:
        known = Routine(name or fn.__name__, fn, signature, (fn.__module__.removeprefix("calcvm."),))
        ROUTINES[known.name] = known
        return external(known.name, signature)(fn)

    return mark


def external(name: str, signature: Signature) -> Callable[[Callable], Callable]:
    """Decorator of a simulation: when compiled, it calls the routine of this name."""

    def codegen(tc, h, *args):
        known = signature(h)

        def build(ctx, b, sig, values):
            symbol = symbol_of(name, str(h.dtype))
            packer = ctx.get_arg_packer(known.args)
            kind = CUDACABICallConv(ctx).get_function_type(known.return_type, known.args)
            callee = b.module.globals.get(symbol) or ir.Function(b.module, kind, symbol)
            callee.attributes.add("convergent")  # it may contain a barrier
            out = b.call(callee, packer.as_arguments(b, values), attrs=TOGETHER)
            return ctx.get_returned_value(b, known.return_type, out)

        return known, build

    return compiled_by(codegen)

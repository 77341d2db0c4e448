"""Routines: functions that are compiled once, each to PTX of its own, and called by name.

A row's kernel is one, and so is what many rows do alike, such as a tile of a product.  Their texts are what a program's PTX is put
together from (`calcvm.vm.run.cuda.build`): the compiler sees of a routine that is called its name and its types, and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from calcvm.kernels_cuda._cuda import TOGETHER, CUDACABICallConv, compiled_by, ir, types

Signature = Callable[[Any], Any]  # of a routine, by the type of the heap's pointer, which is its first argument


@dataclass(frozen=True)
class Routine:
    """A function, its types, and the module of calcvm that it comes from, with all that this imports."""

    name: str
    fn: Callable
    signature: Signature
    modules: tuple[str, ...]
    mark: str = ""  # of code from elsewhere

    def symbol(self, dtype: str) -> str:
        return symbol_of(self.name, dtype)


ROUTINES: dict[str, Routine] = {}


def symbol_of(name: str, dtype: str) -> str:
    """What a routine's function is called: names in PTX are of ASCII, and have no dots."""
    return f"calcvm_{re.sub(r'[^A-Za-z0-9_]', lambda c: f'${ord(c[0]):x}$', name)}_{dtype}"


def ints(n: int) -> list[Any]:
    """The types of so many integers."""
    return [types.int64] * n


def routine(signature: Signature, name: str = "") -> Callable[[Callable], Callable]:
    """Decorator: the function is a routine, and who calls it calls it by name."""

    def mark(fn: Callable) -> Callable:
        known = Routine(name or fn.__name__, fn, signature, (fn.__module__.removeprefix("calcvm."),))
        ROUTINES[known.name] = known
        return external(known.name, signature)(fn)

    return mark


def external(name: str, signature: Signature) -> Callable[[Callable], Callable]:
    """Decorator of a simulation: compiled, it is a call of the routine of this name."""

    def codegen(tc, h, *args):
        known = signature(h)

        def build(ctx, b, sig, values):
            symbol = symbol_of(name, str(h.dtype))
            packer = ctx.get_arg_packer(known.args)
            kind = CUDACABICallConv(ctx).get_function_type(known.return_type, known.args)
            callee = b.module.globals.get(symbol) or ir.Function(b.module, kind, symbol)
            callee.attributes.add("convergent")  # threads may meet in it
            out = b.call(callee, packer.as_arguments(b, values), attrs=TOGETHER)
            return ctx.get_returned_value(b, known.return_type, out)

        return known, build

    return compiled_by(codegen)

"""Tuples of pointers and of numbers: operations on all operands of a kernel, and choices among functions.

The lengths are known at compile time, so nothing here is a loop on the device, and each element has a register.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

from calcvm.kernels_cuda._cuda import I64, at, call_of, compiled_by, device, like, types


# ---------------------------------------------------------------- all of a tuple
def _mapped(tc, f, columns, *same):
    calls = [call_of(tc, f, (*row, *same)) for row in zip(*columns)]
    returned = types.Tuple(tuple(result for result, _ in calls))

    def build(ctx, b, sig, args):
        unpacked = [_unpacked(b, column, len(calls)) for column in _unpacked(b, args[1], len(columns))]
        out = [call(ctx, b, [*row, *args[2:]]) for (_, call), row in zip(calls, zip(*unpacked))]
        return ctx.make_tuple(b, sig.return_type, out)

    return returned(f, columns, *same), build


def _unpacked(b: Any, x: Any, n: int) -> list[Any]:
    return [b.extract_value(x, k) for k in range(n)]


@compiled_by(_mapped)
def mapped(f, columns, *same):
    """The tuple of ``f(*row, *same)`` for the rows of a tuple of columns, which are tuples of equal length."""
    return tuple(f(*row, *same) for row in zip(*columns))


def _folded(tc, f, xs):
    first, *others = xs
    calls, result = [], first
    for x in others:
        result, call = call_of(tc, f, (result, x))
        calls.append(call)

    def build(ctx, b, sig, args):
        total, *others = _unpacked(b, args[1], len(xs))
        for call, x in zip(calls, others):
            total = call(ctx, b, [total, x])
        return total

    return result(f, xs), build


@compiled_by(_folded)
def folded(f, xs):
    """``f(f(f(xs[0], xs[1]), xs[2]), ...)``."""
    return reduce(f, xs)


# ---------------------------------------------------------------- of operands
@device
def _set(p, x):
    p[0] = x


_element = device(lambda p: p[0])
_number = device(lambda c, x: like(x, c))

ats = device(lambda ps, off: mapped(at, (ps,), off))  # the pointers ``off`` elements further
loads = device(lambda ps: mapped(_element, (ps,)))  # the elements at pointers
stores = device(lambda ps, xs: mapped(_set, (ps, xs)))  # set them
likes = device(lambda x, numbers: mapped(_number, (numbers,), x))  # numbers in the dtype of ``x``


# ---------------------------------------------------------------- several functions
def by_number(table: Mapping[int, Callable]) -> Callable:
    """A function ``chosen(number, *args)`` that calls the table's function of that number with them, if there is one."""

    def codegen(tc, number, *args):
        calls = {k: call_of(tc, f, args)[1] for k, f in table.items()}

        def build(ctx, b, sig, values):
            after = b.append_basic_block("chosen")
            switch = b.switch(values[0], after)
            for k, call in calls.items():
                switch.add_case(I64(k), b.append_basic_block())
                b.position_at_end(switch.cases[-1][1])
                call(ctx, b, values[1:])
                b.branch(after)
            b.position_at_end(after)
            return ctx.get_dummy_value()

        return types.void(types.int64, *args), build

    @compiled_by(codegen)
    def chosen(number, *args):
        if number in table:
            table[number](*args)

    return chosen


def in_turn(functions: Sequence[Callable]) -> Callable:
    """A function that calls all of these with its arguments, one after the other."""

    def codegen(tc, *args):
        calls = [call_of(tc, f, args)[1] for f in functions]

        def build(ctx, b, sig, values):
            for call in calls:
                call(ctx, b, values)
            return ctx.get_dummy_value()

        return types.void(*args), build

    @compiled_by(codegen)
    def each(*args):
        for f in functions:
            f(*args)

    return each

"""Loops of a formula over a row's operands: flat, or with strides if operands are broadcast.

Everything in a row after its sizes comes as one tuple, ``given``: strides of each broadcast operand, parameters, operands.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import add
from typing import Any

from llvmlite import ir
from numba import types

from calcvm.formulas.declare import Formula
from calcvm.kernel import AXES
from calcvm.kernels_cpu._common import I1, WORD, intrinsic_of
from calcvm.kernels_cpu._formulas import V
from calcvm.kernels_cpu._math import Lanes, each, reduced
from calcvm.kernels_cpu._target import current
from calcvm.kernels_cpu._types import as_number, in_memory
from calcvm.kernels_cpu._vectors import bits_of, outline


class Given:
    """The tuple ``given`` as LLVM values."""

    def __init__(self, ctx: Any, b: Any, f: Formula, strided: tuple[str, ...], given: Any, type_: Any):
        n = len(type_.types)
        values = [b.extract_value(given, k) for k in range(n)]
        pointers, first = n - len(f.operands), AXES * len(strided)
        self.f, self.dtypes = f, {name: t.dtype for name, t in zip(f.operands, type_.types[pointers:])}
        self.dtype = next((t for name, t in self.dtypes.items() if name not in f.types), type_.types[-1].dtype)
        self.elements = {name: ctx.get_data_type(t) for name, t in self.dtypes.items()}
        self.element = max(self.elements.values(), key=bits_of)  # its vectors are the widest
        self.strides = {s: values[AXES * k : AXES * (k + 1)] for k, s in enumerate(strided)}
        self.reals = [ctx.cast(b, v, types.float64, self.dtype) for v in values[first : first + len(f.reals)]]
        self.before = values[pointers - 1]  # the operand that precedes the formula's own, if there is one
        self.operands = dict(zip(f.operands, values[pointers:]))

    def of(self, fn: Callable) -> Callable:
        """A formula's function, applied to elements as stored in memory."""
        reads, to = self.f.reads, self.f.writes
        if not self.f.types:
            return fn

        def over(*elements: V) -> V:
            numbers = [as_number(v, self.dtypes[name], self.f.types.get(name, "")) for v, name in zip(elements, reads)]
            return in_memory(fn(*numbers, *elements[len(reads) :]), self.dtypes[to], self.elements[to])

        return over


def _over(f: Formula, n: int, emit: Callable, result: bool = False) -> Any:
    """An intrinsic of n integers, ``start`` and ``given``: ``emit(e, integers..., at, row)``; ``at`` : operands from ``start`` on."""

    def typing(*args: Any) -> Any:
        given = args[n + 1]

        def codegen(ctx: Any, b: Any, sig: Any, values: Any) -> Any:
            row = Given(ctx, b, f, (), values[n + 1], given)
            at = {name: b.gep(p, [values[n]]) for name, p in row.operands.items()}
            out = emit(Lanes(b, row.element, current()), *values[:n], at, row)
            return out if result else ctx.get_dummy_value()

        return (given.types[-1].dtype if result else types.void)(*[types.intp] * (n + 1), given), codegen

    return intrinsic_of(n + 2, typing)


def flat(f: Formula, which: int = 0) -> Any:
    """A loop ``each(n, start, given)`` over elements start to start + n of all operands; which : the branch of a choice."""
    fn, modes = f.variant(which), "v" * len(f.reads)

    def loop(e: Lanes, n: Any, at: dict[str, Any], row: Given) -> None:
        each(row.of(fn), modes)(e, n, *(at[v] for v in (*f.reads, f.writes)), *row.reals)

    return _over(f, 1, loop)


def total(f: Formula) -> Any:
    """The sum ``total(n, start, given)`` of the formula over elements start to start + n."""
    emit = reduced(add, 0.0, f.variant(), len(f.reads))
    return _over(f, 1, lambda e, n, at, row: emit(e, n, *(at[v] for v in f.reads), *row.reals), result=True)


def scaled(f: Formula) -> Any:
    """As `flat`, ``each(n, count, start, given)``, times the formula's factor and the first operand (a number in memory) over ``count``."""
    emit = each(f.scaled(), "v" * len(f.reads))

    def loop(e: Lanes, n: Any, count: Any, at: dict[str, Any], row: Given) -> None:
        part = e.b.fdiv(row.element(1), e.b.sitofp(count, row.element))
        by = e.b.fmul(e.b.load(row.before), part)  # in the order in which the mean computes it
        emit(e, n, *(at[v] for v in (*f.reads, f.writes)), *row.reals, by)

    return _over(f, 2, loop)


# ---------------------------------------------------------------- broadcasting
class Broadcast:
    """The parts of a kernel of a formula with ``strided`` operands; a stride of 0 broadcasts.

    flat : a loop, see `flat`, for rows that broadcast nothing.
    whole : ``whole(n, given)``, whether nothing is broadcast; n elements lie below the leading axis.
    single : ``single(given)``, whether each operand has at most one element per index of the leading axis, and not all are scalars.
    line0, line5 : ``line5(n, o, i0, i1, i2, i3, i4, given)``, n elements along an axis from these indexes on; the first is
        element o of operands that are not broadcast.
    """

    def __init__(self, f: Formula, strided: tuple[str, ...]):
        self.f, self.strided = f, strided
        self.most = max(1, len(strided) - 1)  # operands that may be a single element along a line
        self.flat = self._intrinsic(2, types.void, self._flat)
        self.whole = self._intrinsic(1, types.boolean, self._whole)
        self.single = self._intrinsic(0, types.boolean, self._single)
        self.line0 = self._intrinsic(7, types.void, lambda *args: self._line(0, *args))
        self.line5 = self._intrinsic(7, types.void, lambda *args: self._line(AXES - 1, *args))

    def _intrinsic(self, n: int, result: Any, emit: Callable) -> Any:
        """An intrinsic of n integers and ``given``."""

        def typing(*args: Any) -> Any:
            def codegen(ctx: Any, b: Any, sig: Any, values: Any) -> Any:
                out = emit(b, Given(ctx, b, self.f, self.strided, values[n], args[n]), *values[:n])
                return ctx.get_dummy_value() if out is None else out

            return result(*[types.intp] * n, args[n]), codegen

        return intrinsic_of(n + 1, typing)

    def _whole(self, b: Any, row: Given, n: Any) -> Any:
        out = ir.Constant(I1, 1)
        for s in row.strides.values():
            out = b.and_(out, b.icmp_signed("==", s[0], n))
        return out

    def _single(self, b: Any, row: Given) -> Any:
        out, alone = ir.Constant(I1, 1), WORD(0)
        for s in row.strides.values():
            out = b.and_(out, b.icmp_signed("<=", s[0], WORD(1)))
            alone = b.add(alone, b.zext(b.icmp_signed("==", s[0], WORD(0)), WORD))
        return b.and_(out, b.icmp_signed("<=", alone, WORD(self.most)))

    def _flat(self, b: Any, row: Given, n: Any, start: Any) -> None:
        self._call(b, row, (), n, {name: b.gep(p, [start]) for name, p in row.operands.items()})

    def _line(self, axis: int, b: Any, row: Given, n: Any, o: Any, *index: Any) -> None:
        at = {name: b.gep(p, [o]) for name, p in row.operands.items()}
        for name, s in row.strides.items():
            off = b.mul(index[0], s[0])
            for i, stride in zip(index[1:], s[1:]):
                off = b.add(off, b.mul(i, stride))
            at[name] = b.gep(row.operands[name], [off])
        done = b.append_basic_block("line")
        self._lines(b, row, axis, n, at, (), tuple(row.strides), done)
        b.position_at_end(done)

    def _lines(
        self,
        b: Any,
        row: Given,
        axis: int,
        n: Any,
        at: dict[str, Any],
        ones: tuple[str, ...],
        left: tuple[str, ...],
        done: Any,
    ) -> None:
        """A loop for each set of operands that may be a single element along a line."""
        if not left:
            self._call(b, row, ones, n, at)
            b.branch(done)
            return
        name, *others = left
        if len(ones) < self.most:
            here, there = b.append_basic_block(f"{name}.one"), b.append_basic_block(f"{name}.all")
            b.cbranch(b.icmp_signed("==", row.strides[name][axis], WORD(0)), here, there)
            b.position_at_end(here)
            self._lines(b, row, axis, n, at, (*ones, name), tuple(others), done)
            b.position_at_end(there)
        self._lines(b, row, axis, n, at, ones, tuple(others), done)

    def _call(self, b: Any, row: Given, ones: tuple[str, ...], n: Any, at: dict[str, Any]) -> None:
        """The loop in which some operands are a single element each."""
        modes = "".join("s" if v in ones else "v" for v in self.f.reads)
        values = [n, *(at[v] for v in self.f.reads), at[self.f.writes], *row.reals]
        outline(b, f"{self.f.name}_{modes}", Lanes, row.element, each(row.of(self.f.variant()), modes), values)

"""Loops of a block's threads over elements: flat, over lines, over up to six axes.

A loop is built from a formula over elements.  It reads first and writes afterwards, so that a thread has several
independent loads in flight.  A load past the end repeats the first place instead, so that no branch separates the loads.
Neighbouring threads take neighbouring elements, or neighbouring *quads*: four elements in 16-byte accesses, if all
operands are aligned to 16 bytes.  Only the order of accesses depends on that: an element has the same bits
either way.  A loop's operands are tuples of pointers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from calcvm.kernels_cuda._cuda import I64, at, compiled_by, device, ir, thread, threads, types
from calcvm.kernels_cuda._tuples import ats, folded, loads, mapped


# ---------------------------------------------------------------- quads
def _quad(pointer: Any) -> Any:
    return ir.VectorType(pointer.type.pointee, 4).as_pointer()


def _align(p: Any) -> int:
    return min(16, 4 * p.dtype.bitwidth // 8)


def _load4(tc, p):
    def build(ctx, b, sig, args):
        quad = b.load(b.bitcast(args[0], _quad(args[0])), align=_align(p))
        return ctx.make_tuple(b, sig.return_type, [b.extract_element(quad, I64(k)) for k in range(4)])

    return types.UniTuple(p.dtype, 4)(p), build


@compiled_by(_load4)
def load4(p):
    """The four elements at a pointer aligned to 16 bytes."""
    assert aligned(p)
    return p[0], p[1], p[2], p[3]


def _store4(tc, p, xs):
    def build(ctx, b, sig, args):
        place = b.bitcast(args[0], _quad(args[0]))
        quad = ir.Constant(place.type.pointee, ir.Undefined)
        for k in range(4):
            quad = b.insert_element(quad, b.extract_value(args[1], k), I64(k))
        b.store(quad, place, align=_align(p))
        return ctx.get_dummy_value()

    return types.void(p, types.UniTuple(p.dtype, 4)), build


@compiled_by(_store4)
def store4(p, xs):
    """Set the four elements at a pointer aligned to 16 bytes."""
    assert aligned(p)
    p[0], p[1], p[2], p[3] = xs


def _aligned(tc, p):
    def build(ctx, b, sig, args):
        return b.icmp_signed("==", b.and_(b.ptrtoint(args[0], I64), I64(15)), I64(0))

    return types.boolean(p), build


@compiled_by(_aligned)
def aligned(p):
    """Whether a pointer is aligned to 16 bytes."""
    return p.ctypes.data % 16 == 0


@device
def spread4(p, step):
    """Four elements from a pointer on, or the first one four times if ``step`` is 0."""
    if step == 0:
        return p[0], p[0], p[0], p[0]
    return load4(p)


both = device(lambda a, b: a and b)
all_aligned = device(lambda ps: folded(both, mapped(aligned, (ps,))))


# ---------------------------------------------------------------- places
@device
def split(k, n):
    """k // n and k % n for 0 <= k < 2**31 - 1 and n > 0, by a 32-bit division."""
    small = np.uint32(min(n, 0x7FFFFFFF))
    q = np.int64(np.uint32(k) // small)
    return q, k - q * n


@device
def digits(k, d):
    """The indexes (i0, ..., i5) of element k < 2**31 - 1 in an array of inner sizes ``d``, all of them positive."""
    k, i5 = split(k, d[4])
    k, i4 = split(k, d[3])
    k, i3 = split(k, d[2])
    k, i2 = split(k, d[1])
    i0, i1 = split(k, d[0])
    return i0, i1, i2, i3, i4, i5


@device
def carry(i, d):
    """A digit below 2*d reduced below d, and its carry."""
    if i >= d:
        return i - d, 1
    return i, 0


@device
def onward(i, step, d):
    """The indexes ``step`` further in an array of inner sizes ``d``."""
    i5, c = carry(i[5] + step[5], d[4])
    i4, c = carry(i[4] + step[4] + c, d[3])
    i3, c = carry(i[3] + step[3] + c, d[2])
    i2, c = carry(i[2] + step[2] + c, d[1])
    i1, c = carry(i[1] + step[1] + c, d[0])
    return i[0] + step[0] + c, i1, i2, i3, i4, i5


offset = device(lambda i, s: i[0] * s[0] + i[1] * s[1] + i[2] * s[2] + i[3] * s[3] + i[4] * s[4] + i[5] * s[5])


# ---------------------------------------------------------------- flat
_read = device(lambda ps, of: loads(ps))
_read_at = device(lambda xs, i: loads(ats(xs, i)))
_read4_at = device(lambda xs, i: mapped(load4, (ats(xs, i),)))
_read_at_and_i = device(lambda xs, i: (*loads(ats(xs, i)), i))
_read4_at_and_i = device(lambda xs, i: (*mapped(load4, (ats(xs, i),)), (i, i + 1, i + 2, i + 3)))


def elementwise(formula: Callable, indexed: bool = False, ways: int = 2) -> Any:
    """A loop ``each(start, stop, xs, y, params)``: y[i] = formula(xs[i]..., params...), i from start to stop.

    y may be one of the arrays.  indexed : the formula gets i before the params.  ways : quads that a thread reads at
    once: 2; or 1 for a long formula, because each quad repeats its code; or 0: no quads.
    """
    read, read4 = (_read_at_and_i, _read4_at_and_i) if indexed else (_read_at, _read4_at)

    @device
    def by_none(i, step, tail, xs, y, params):
        pass

    @device
    def by_one(i, step, tail, xs, y, params):
        while i < tail:
            store4(at(y, i), mapped(formula, read4(xs, i), *params))
            i += step

    @device
    def by_two(i, step, tail, xs, y, params):
        while i < tail:
            second = i + step
            more = second < tail
            a, b = read4(xs, i), read4(xs, second if more else i)
            store4(at(y, i), mapped(formula, a, *params))
            if more:
                store4(at(y, second), mapped(formula, b, *params))
            i = second + step

    by_quads = (by_none, by_one, by_two)[ways]

    @device
    def each(start, stop, xs, y, params):
        head, tail = (start + 3) & -4, stop & -4
        if ways == 0 or head >= tail or not all_aligned((*xs, y)):
            head = tail = stop
        by_quads(head + 4 * thread(), 4 * threads(), tail, xs, y, params)
        k, n = threads() - 1 - thread(), stop - start - (tail - head)
        while k < n:  # taken by the last threads, which have no quads if the array is small
            i = start + k if start + k < head else start + k + tail - head
            y[i] = formula(*read(xs, i), *params)
            k += threads()

    return each


# ---------------------------------------------------------------- turns
def _by_two(more: Callable, onward: Callable, where: Callable, read: Callable, write: Callable) -> Any:
    """A loop ``each(at, of)`` while ``more(at, of)``: it reads at two successive places (see ``onward``), then writes there.

    ``of`` : further arguments of these functions.  It reads at ``where(at, of)``, and past the end at the first place again.
    """

    @device
    def each(at, of):
        while more(at, of):
            first, second = where(at, of), onward(at, of)
            also, there = more(second, of), where(second, of)
            a, b = read(first, of), read(there if also else first, of)
            write(at, a, of)
            if also:
                write(second, b, of)
            at = onward(second, of)

    return each


def _by_four(more: Callable, onward: Callable, where: Callable, read: Callable, write: Callable) -> Any:
    """The same with four places."""

    @device
    def each(at, of):
        while more(at, of):
            second = onward(at, of)
            third = onward(second, of)
            fourth = onward(third, of)
            p, p2, p3, p4 = where(at, of), where(second, of), where(third, of), where(fourth, of)
            two, three, four = more(second, of), more(third, of), more(fourth, of)
            a, b = read(p, of), read(p2 if two else p, of)
            c, d = read(p3 if three else p, of), read(p4 if four else p, of)
            write(at, a, of)
            if two:
                write(second, b, of)
            if three:
                write(third, c, of)
            if four:
                write(fourth, d, of)
            at = onward(fourth, of)

    return each


# ---------------------------------------------------------------- lines
_place_in_line = device(lambda x, stride, step, l, j: at(x, l * stride + j * step))
_can_be_quads = device(lambda x, stride, step: step == 0 or (stride & 3 == 0 and aligned(x)))
_more_lines = device(lambda lj, of: lj[0] < of[0])


@device
def _along_lines(lj, of):
    j, c = carry(lj[1] + of[3], of[1])
    return lj[0] + of[2] + c, j


_in_lines = device(lambda lj, of: mapped(_place_in_line, of[4], lj[0], lj[1]))
_quads_in_lines = device(lambda lj, of: mapped(_place_in_line, of[4], lj[0], 4 * lj[1]))
_read_quads = device(lambda ps, of: mapped(spread4, (ps, of[4][2])))


def linewise(formula: Callable, quads: bool = True) -> Any:
    """A loop ``each(lines, n, xs, strides, steps, y, y_stride, params)`` over elements j of n in lines l.

    y[l*y_stride + j] = formula(x[l*stride + j*step]..., params...); a step is 1, or 0 for one element per line.  y may be an
    operand with the same strides.  quads : elements are read in quads.
    """

    @device
    def write4(lj, quads, of):
        store4(at(of[5], lj[0] * of[6] + 4 * lj[1]), mapped(formula, quads, *of[7]))

    @device
    def write(lj, xs, of):
        of[5][lj[0] * of[6] + lj[1]] = formula(*(xs + of[7]))

    by_quads = _by_two(_more_lines, _along_lines, _quads_in_lines, _read_quads, write4)
    by_ones = _by_four(_more_lines, _along_lines, _in_lines, _read, write)

    @device
    def by_elements(lines, n, xs, strides, steps, y, y_stride, params):
        if lines > 0 and n > 0:
            dl, dj = split(threads(), n)
            by_ones(split(thread(), n), (lines, n, dl, dj, (xs, strides, steps), y, y_stride, params))

    if not quads:
        return by_elements

    @device
    def each(lines, n, xs, strides, steps, y, y_stride, params):
        if lines <= 0 or n <= 0:
            return
        operands = (xs, strides, steps)
        if (n | y_stride) & 3 == 0 and aligned(y) and folded(both, mapped(_can_be_quads, operands)):
            dl, dj = split(threads(), n >> 2)
            by_quads(split(thread(), n >> 2), (lines, n >> 2, dl, dj, operands, y, y_stride, params))
        else:
            by_elements(lines, n, xs, strides, steps, y, y_stride, params)

    return each


# ---------------------------------------------------------------- axes
_place_in_axes = device(lambda x, s, ki: at(x, ki[0]) if s is None else at(x, offset(ki[1], s)))
_more_elements = device(lambda ki, of: ki[0] < of[0])
_along_axes = device(lambda ki, of: (ki[0] + threads(), onward(ki[1], of[1], of[2])))
_in_axes = device(lambda ki, of: mapped(_place_in_axes, of[3], ki))


def axiswise(formula: Callable) -> Any:
    """A loop ``each(n0, d, xs, strides, y, y_strides, params)`` over an array (n0, *d) of six axes: y = formula(*xs, *params).

    strides : six per operand, or None for a dense one.  y may be an operand with the same strides.  An element costs
    additions for six axes; `linewise` is for one or two.
    """

    @device
    def write(ki, xs, of):
        _place_in_axes(of[4], of[5], ki)[0] = formula(*(xs + of[6]))

    elements = _by_four(_more_elements, _along_axes, _in_axes, _read, write)

    @device
    def each(n0, d, xs, strides, y, y_strides, params):
        stop = n0 * d[0] * d[1] * d[2] * d[3] * d[4]
        if stop > 0:
            step = digits(threads(), d)
            elements((thread(), digits(thread(), d)), (stop, step, d, (xs, strides), y, y_strides, params))

    return each


# ---------------------------------------------------------------- copies
_same = device(lambda x: x)
_filled = elementwise(device(lambda i, value: value), indexed=True)
_copied_lines, _copied = linewise(_same), axiswise(_same)


@device
def fill(start, stop, y, value):
    _filled(start, stop, (), y, (value,))


@device
def copy_lines(lines, n, x, x_stride, y, y_stride):
    _copied_lines(lines, n, (x,), (x_stride,), (1,), y, y_stride, ())


@device
def gather(n0, d, x, strides, y):
    _copied(n0, d, (x,), (strides,), y, None, ())


@device
def scatter(n0, d, x, y, strides):
    _copied(n0, d, (x,), (None,), y, strides, ())

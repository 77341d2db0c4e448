"""Elementwise kernels: loops over the formulas of `calcvm.formulas.elementwise`, and powers.

All are the loops of `_loops` over the worker's rows, so y may be any operand of its size.  ``rows`` are shared; every
worker reads all of a broadcast operand.
"""

from __future__ import annotations

import math

import numpy as np

from calcvm.formulas.declare import Elementwise, Formula
from calcvm.formulas.elementwise import ACCUMULATE, CAST, ELEMENTWISE, FILL
from calcvm.formulas.functions import FUNCTIONS
from calcvm.kernel import words_for
from calcvm.kernels_cuda._common import Float, Ptr, kernel, kernel_as, share
from calcvm.kernels_cuda._cuda import at, cells, device, like
from calcvm.kernels_cuda._formulas import formula, typed
from calcvm.kernels_cuda._loops import axiswise, elementwise, fill, linewise
from calcvm.kernels_cuda._math import fabs, fma, log, power, sqrt
from calcvm.kernels_cuda._tuples import likes, mapped

LONG = {f.name for f in FUNCTIONS.values() if f.long}


# ---------------------------------------------------------------- operands of one shape
def _flat(f: Formula) -> None:
    n, end = len(f.reals), len(f.reals) + len(f.reads)
    words, ways = words_for(f, "rows cols"), 1 if f.functions & LONG else 2
    if f.types:
        of_types = elementwise(typed(f), ways=0)

        @kernel_as(f.name, words)
        def run_typed(me, rows, cols, *given):
            lo, hi = share(me, rows)
            operands = mapped(cells, (given[n:],))
            of_types(lo * cols, hi * cols, operands[:-1], operands[-1], (*likes(me.heap, given[:n]), given[-1]))

        return
    loop = elementwise(formula(f.variant()), ways=ways)
    if len(f.words) == n:

        @kernel_as(f.name, words)
        def run(me, rows, cols, *given):
            lo, hi = share(me, rows)
            loop(lo * cols, hi * cols, given[n:end], given[-1], likes(me.heap, given[:n]))

        return
    other = elementwise(formula(f.variant(1)), ways=ways)

    @kernel_as(f.name, words)
    def choose(me, rows, cols, choice, *given):
        lo, hi = share(me, rows)
        if choice == 1:
            other(lo * cols, hi * cols, given[n:end], given[-1], likes(me.heap, given[:n]))
        else:
            loop(lo * cols, hi * cols, given[n:end], given[-1], likes(me.heap, given[:n]))


@kernel_as(FILL.name)
def _fill(me, rows, cols, value: Float, y: Ptr):
    """y = value.  Rows are shared."""
    lo, hi = share(me, rows)
    fill(lo * cols, hi * cols, y, like(y, value))


# ---------------------------------------------------------------- broadcasting
@device
def _begin(x, s, lo, n):
    """A dense operand has no strides."""
    return at(x, lo * n) if s is None else at(x, lo * s[0])


@device
def _line(s, n):
    return n if s is None else s[0]


@device
def _step(s):
    return 1 if s is None else s[5]


_written = device(lambda y: (y,))  # formulas of other types also get y (`_formulas.typed`)
_nothing = device(lambda y: ())


def _broadcast(f: Formula, strided: tuple[str, ...]) -> None:
    """A formula whose last operands are ``strided``: strides are 0 where an operand is broadcast."""
    own = bool(f.types)
    of = typed(f) if own else formula(f.variant())
    flat, lines, axes = elementwise(of, ways=0 if own else 2), linewise(of, not own), axiswise(of)
    n_reals, written = len(f.reals), _written if own else _nothing

    @device
    def loop(me, d0, d, nothing_is_broadcast, given, strides):
        lo, hi = share(me, d0)
        n = d[0] * d[1] * d[2] * d[3] * d[4]
        xs, y = mapped(cells, (given[n_reals:-1],)), cells(given[-1])
        params = likes(me.heap, given[:n_reals]) + written(y)
        if nothing_is_broadcast:
            flat(lo * n, hi * n, xs, y, params)
        else:
            xs, y = mapped(_begin, (xs, strides), lo, n), at(y, lo * n)
            if n == d[4]:  # a row is one line
                lines(hi - lo, n, xs, mapped(_line, (strides,), n), mapped(_step, (strides,)), y, n, params)
            else:
                axes(hi - lo, d, xs, strides, y, None, params)

    dense = (None,) * (len(f.reads) - len(strided))

    def of_one(me, d0, d1, d2, d3, d4, d5, s0, s1, s2, s3, s4, s5, *given):
        s, same = (s0, s1, s2, s3, s4, s5), s0 == d1 * d2 * d3 * d4 * d5
        loop(me, d0, (d1, d2, d3, d4, d5), same, given, (*dense, s))

    def of_two(me, d0, d1, d2, d3, d4, d5, a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5, *given):
        s, t, n = (a0, a1, a2, a3, a4, a5), (b0, b1, b2, b3, b4, b5), d1 * d2 * d3 * d4 * d5
        loop(me, d0, (d1, d2, d3, d4, d5), a0 == n and b0 == n, given, (*dense, s, t))

    def of_three(
        me, d0, d1, d2, d3, d4, d5, c0, c1, c2, c3, c4, c5, a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5, *given
    ):
        r, s, t = (c0, c1, c2, c3, c4, c5), (a0, a1, a2, a3, a4, a5), (b0, b1, b2, b3, b4, b5)
        n = d1 * d2 * d3 * d4 * d5
        same = c0 == n and a0 == n and b0 == n
        loop(me, d0, (d1, d2, d3, d4, d5), same, given, (*dense, r, s, t))

    kernel_as(f.name, words_for(f, "d0 d1 d2 d3 d4 d5", strided))((of_one, of_two, of_three)[len(strided) - 1])


def add(op: Elementwise) -> None:
    """The kernels of an operator."""
    for f in op.formulas:
        if strided := op.strided(f):
            _broadcast(f, strided)
        else:
            _flat(f)


for _op in [*ELEMENTWISE.values()]:
    add(_op)
_flat(ACCUMULATE)
_flat(CAST)


# ---------------------------------------------------------------- powers
@device
def power_of(x, p):
    """x**p for float64 p: by a simpler formula if there is one, which rounds less, else in float64."""
    if p == 0.0:
        return like(x, 1)
    if p == 1.0:
        return x
    if p == 2.0:
        return x * x
    if p == -1.0:
        return like(x, 1) / x
    if p == 0.5:  # differs from the square root at -0 and -inf
        return like(x, math.inf) if x == like(x, -math.inf) else fabs(sqrt(x))
    return like(x, power(np.float64(x), p))


@device
def _pow_bwd(dy, x, p):
    if p == 0.0 or dy == like(dy, 0):
        return like(dy, 0)
    y, lost = power_of(x, p - 1.0), p - (p - 1.0 + 1.0)
    if lost != 0.0 and x > like(x, 0) and x < like(x, math.inf):
        y = fma(y, like(x, lost) * log(x), y)
    return dy * like(x, p) * y


_powers, _slopes = elementwise(power_of, ways=0), elementwise(_pow_bwd, ways=0)


@kernel
def pow_fwd(me, rows, cols, exponent: Float, x: Ptr, y: Ptr):
    """y = x^exponent.  Rows are shared; in place."""
    lo, hi = share(me, rows)
    _powers(lo * cols, hi * cols, (x,), y, (exponent,))


@kernel
def pow_bwd(me, rows, cols, exponent: Float, dy: Ptr, x: Ptr, dx: Ptr):
    """dx = dy*exponent*x^(exponent - 1).  Rows are shared; in place over either operand."""
    lo, hi = share(me, rows)
    _slopes(lo * cols, hi * cols, (dy, x), dx, (exponent,))

"""Elementwise kernels: loops over the formulas of `calcvm.formulas.elementwise`, and powers.

All are loops of vectors over the worker's rows, so a result may be any operand of its size.  Rows are shared;
every worker reads all of a broadcast operand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from calcvm.formulas.declare import Elementwise, Formula
from calcvm.formulas.elementwise import ACCUMULATE, CAST, ELEMENTWISE, FILL
from calcvm.kernel import words_for
from calcvm.kernels_cpu import _formulas as F
from calcvm.kernels_cpu._common import Float, Ptr, at, floor, kernel, kernel_as, like, njit, share
from calcvm.kernels_cpu._formulas import V
from calcvm.kernels_cpu._loops import Broadcast, flat
from calcvm.kernels_cpu._math import Lanes, each, fill, loop_of


def _flat(f: Formula) -> None:
    """The kernel of a formula whose operands have one shape (rows, cols)."""
    words, loop = words_for(f, "rows cols"), flat(f)
    if len(f.words) == len(f.reals):

        @kernel_as(f.name, words, f.own)
        def run(me, rows, cols, *given):
            lo, hi = share(me, rows)
            loop((hi - lo) * cols, lo * cols, given)

        return
    other = flat(f, 1)

    @kernel_as(f.name, words, f.own)
    def choose(me, rows, cols, choice, *given):
        lo, hi = share(me, rows)
        if choice == 1:
            other((hi - lo) * cols, lo * cols, given)
        else:
            loop((hi - lo) * cols, lo * cols, given)


def _broadcast(f: Formula, strided: tuple[str, ...]) -> None:
    """The kernel of a formula whose operands are broadcast to (d0..d5); d0 is shared."""
    over = Broadcast(f, strided)
    flat, whole, single, line0, line5 = over.flat, over.whole, over.single, over.line0, over.line5

    @kernel_as(f.name, words_for(f, "d0 d1 d2 d3 d4 d5", strided), f.own)
    def run(me, d0, d1, d2, d3, d4, d5, *given):
        lo, hi = share(me, d0)
        n = d1 * d2 * d3 * d4 * d5
        if n == 0:
            return
        if whole(n, given):
            flat((hi - lo) * n, lo * n, given)
        elif n == 1 and single(given):  # the rows are the inner loop
            line0(hi - lo, lo, lo, 0, 0, 0, 0, given)
        elif n == d5:  # a row is one inner loop
            for i0 in range(lo, hi):
                line5(n, i0 * n, i0, 0, 0, 0, 0, given)
        else:
            o = lo * n
            for i0 in range(lo, hi):
                for i1 in range(d1):
                    for i2 in range(d2):
                        for i3 in range(d3):
                            for i4 in range(d4):
                                line5(d5, o, i0, i1, i2, i3, i4, given)
                                o += d5


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
_flat(FILL)
_flat(CAST)


# ---------------------------------------------------------------- powers
def power_of(x: V, p: V, low: V, odd: V) -> V:
    """x**(p + low) as float64, for float64 p; ``odd`` is (-1)**p: 1, -1, or NaN if p is not an integer."""
    wide = x.as_f64()
    size = F.fabs(wide)
    y = F.power(size, p, low) if x.is_f64 else F.exp(p * F.log(size))  # its error is far below float32's
    signed = (-y).where(odd < 0, y)  # also -0 and -inf, whose powers exist for any p
    y = (y * odd).where(wide < 0, signed.where(wide.bits() < 0, y))
    return signed.where(wide.equals(float("-inf")), y)


def _root(x: V) -> V:
    """x**0.5, which differs from the square root at -0 and -inf."""
    return x.const(float("inf")).where(x.equals(float("-inf")), F.fabs(F.sqrt(x)))


# Powers with a simpler form, which is faster and rounds less; others go by logarithms.
POWERS: dict[float, Callable[[V], V]] = {
    0.0: lambda x: x.const(1.0),
    1.0: lambda x: x,
    2.0: lambda x: x * x,
    3.0: lambda x: x * x * x,
    -1.0: lambda x: 1 / x,
    -2.0: lambda x: (1 / x) * (1 / x),
    0.5: _root,
    -0.5: lambda x: 1 / _root(x),
}


def powers(formula: Callable, reads: str) -> Any:
    """A loop ``powers(n, reads..., y, p, low, odd, exponent)``: y = formula(reads..., x**p, exponent); x is the last of the reads."""

    def by(power: Callable) -> Callable:
        def whole(*given: V) -> V:
            *read, p, low, odd, exponent = given
            return formula(*read, power(read[-1], p, low, odd).as_f64(), exponent).rounded(read[-1])

        return each(whole, reads)

    def emit(e: Lanes, n: Any, *args: Any) -> None:
        b, p = e.b, args[-4]
        done = b.append_basic_block("done")
        for power, simple in POWERS.items():
            here, there = b.append_basic_block("simple"), b.append_basic_block("else")
            b.cbranch(b.fcmp_ordered("==", p, p.type(power)), here, there)
            b.position_at_end(here)
            by(lambda x, *_, simple=simple: simple(x))(e, n, *args)
            b.branch(done)
            b.position_at_end(there)
        by(power_of)(e, n, *args)
        b.branch(done)
        b.position_at_end(done)

    return loop_of("p" * (len(reads) + 1) + "dddd", emit)


power_y = powers(lambda x, y, p: y, "v")
_pow_dx = powers(lambda dy, x, y, p: y.const(0.0).where(dy.as_f64().equals(0.0), dy.as_f64() * p * y), "vv")


@njit(inline=True)
def odd_power(p):
    """(-1)**p: 1, -1, or NaN if p is not an integer."""
    return 1.0 - 4.0 * (0.5 * p - floor(0.5 * p)) if p == floor(p) else np.nan


@kernel
def pow_fwd(me, rows, cols, exponent: Float, x: Ptr, y: Ptr):
    """y = x^exponent; rows are shared; in place."""
    lo, hi = share(me, rows)
    i = lo * cols
    power_y((hi - lo) * cols, at(x, i), at(y, i), exponent, 0.0, odd_power(exponent), exponent)


@kernel
def pow_bwd(me, rows, cols, exponent: Float, dy: Ptr, x: Ptr, dx: Ptr):
    """dx = dy*exponent*x^(exponent - 1); rows are shared; in place over either operand."""
    lo, hi = share(me, rows)
    i, n = lo * cols, (hi - lo) * cols
    if exponent == 0.0:
        fill(n, at(dx, i), like(dx, 0))
        return
    p = exponent - 1.0
    low = exponent - (p + 1.0)  # the rounding error of the difference
    _pow_dx(n, at(dy, i), at(x, i), at(dx, i), p, low, odd_power(p), exponent)

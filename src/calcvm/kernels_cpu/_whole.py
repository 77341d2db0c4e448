"""Integers and conditions of equations in LLVM IR: one, or one per lane; values known at compile time are computed then.

An integer that grows by a constant step from lane to lane keeps this form through sums and products.  With a step of 1, the elements
at such places are contiguous.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir

from calcvm.kernels_cpu._common import I1, WORD
from calcvm.kernels_cpu._math import Lanes
from calcvm.kernels_cpu._vectors import word

Int = Any  # a Python int, or one of code (`calcvm.kernels_cpu._common.WORD`)
LEAST, MOST = -(2 ** (WORD.width - 1)), 2 ** (WORD.width - 1) - 1
COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class Whole:
    """The integer ``base + step*lane`` of each lane, or any integers, ``vector``."""

    __slots__ = ("base", "step", "vector")

    def __init__(self, base: Int, step: Int = 0, vector: Any = None):
        self.base, self.step, self.vector = base, step, vector

    @property
    def wide(self) -> bool:
        """Whether it differs between lanes."""
        return self.vector is not None or not (isinstance(self.step, int) and self.step == 0)


class Cond:
    """A condition: known (``True`` or ``False``), an i1, or a vector of them."""

    __slots__ = ("v",)

    def __init__(self, v: Any):
        self.v = v

    @property
    def known(self) -> bool:
        return isinstance(self.v, bool)

    @property
    def wide(self) -> bool:
        return not self.known and isinstance(self.v.type, ir.VectorType)


TRUE, FALSE = Cond(True), Cond(False)


class Wholes:
    """Operations on integers and conditions, with the builder of ``e``."""

    def __init__(self, e: Lanes):
        self.e, self.b = e, e.b
        self.vec = ir.VectorType(WORD, e.lanes)
        self.iota = ir.Constant(self.vec, list(range(e.lanes)))

    # ------------------------------------------------------------ one integer
    @staticmethod
    def value(x: Int) -> Any:
        return word(x) if isinstance(x, int) else x

    def plus(self, x: Int, y: Int) -> Int:
        if isinstance(x, int) and isinstance(y, int):
            return x + y
        if isinstance(x, int) and x == 0:
            return y
        return x if isinstance(y, int) and y == 0 else self.b.add(self.value(x), self.value(y))

    def minus(self, x: Int, y: Int) -> Int:
        if isinstance(y, int):
            return self.plus(x, -y)
        return self.b.sub(self.value(x), y)

    def times(self, x: Int, y: Int) -> Int:
        if isinstance(x, int) and isinstance(y, int):
            return x * y
        x, y = (y, x) if isinstance(x, int) else (x, y)
        if isinstance(y, int) and y in (0, 1):
            return x if y else 0
        return self.b.mul(self.value(x), self.value(y))

    def smaller(self, x: Int, y: Int) -> Int:
        if isinstance(x, int) and isinstance(y, int):
            return min(x, y)
        x, y = self.value(x), self.value(y)
        return self.b.select(self.b.icmp_signed("<", x, y), x, y)

    def larger(self, x: Int, y: Int) -> Int:
        if isinstance(x, int) and isinstance(y, int):
            return max(x, y)
        x, y = self.value(x), self.value(y)
        return self.b.select(self.b.icmp_signed(">", x, y), x, y)

    # ------------------------------------------------------------ integers per lane
    def lanes(self, x: Whole) -> Any:
        """As a vector."""
        if x.vector is not None:
            return x.vector
        base = self.e.splat(self.value(x.base))
        if not x.wide:
            return base
        if isinstance(x.step, int):
            return self.b.add(base, ir.Constant(self.vec, [x.step * k for k in range(self.e.lanes)]))
        return self.b.add(base, self.b.mul(self.e.splat(x.step), self.iota))

    def each(self, make: Callable[..., Any], *xs: Whole) -> Whole:
        """The result of ``make``; with vectors if any argument is one."""
        if any(x.wide for x in xs):
            return Whole(0, vector=make(*map(self.lanes, xs)))
        return Whole(make(*(self.value(x.base) for x in xs)))

    def add(self, x: Whole, y: Whole) -> Whole:
        if x.vector is None and y.vector is None:
            return Whole(self.plus(x.base, y.base), self.plus(x.step, y.step))
        return self.each(self.b.add, x, y)

    def sub(self, x: Whole, y: Whole) -> Whole:
        if x.vector is None and y.vector is None:
            return Whole(self.minus(x.base, y.base), self.minus(x.step, y.step))
        return self.each(self.b.sub, x, y)

    def mul(self, x: Whole, y: Whole) -> Whole:
        x, y = (y, x) if not x.wide else (x, y)
        if x.vector is None and not y.wide:
            return Whole(self.times(x.base, y.base), self.times(x.step, y.base))
        return self.each(self.b.mul, x, y)

    def neg(self, x: Whole) -> Whole:
        return self.sub(Whole(0), x)

    def max(self, x: Whole, y: Whole) -> Whole:
        return self.where(self.compare(">", x, y), x, y)

    def min(self, x: Whole, y: Whole) -> Whole:
        return self.where(self.compare("<", x, y), x, y)

    def abs(self, x: Whole) -> Whole:
        return self.max(x, self.neg(x))

    def divided(self, x: Whole, y: Whole) -> tuple[Whole, Whole]:
        """Quotient and remainder, rounded down; division by 0 gives 0 and x, because nothing stops a kernel."""
        if not x.wide and not y.wide and isinstance(x.base, int) and isinstance(y.base, int) and y.base:
            return Whole(x.base // y.base), Whole(x.base % y.base)
        b = self.b
        if isinstance(y.base, int) and not y.wide and y.base == 1:
            return x, Whole(0)
        one, minus, none = Whole(1), self.compare("==", y, Whole(-1)), self.compare("==", y, Whole(0))
        by = self.where(self.either(minus, none), one, y)
        q = self.each(b.sdiv, x, by)
        r = self.sub(x, self.mul(q, by))
        down = self.both(self.compare("!=", r, Whole(0)), self.compare("!=", self.negative(r), self.negative(by)))
        q, r = self.where(down, self.sub(q, one), q), self.where(down, self.add(r, by), r)
        q = self.where(minus, self.neg(x), q)
        return self.where(none, Whole(0), q), r

    def negative(self, x: Whole) -> Whole:
        """-1 if it is below 0, else 0."""
        return self.where(self.compare("<", x, Whole(0)), Whole(-1), Whole(0))

    # ------------------------------------------------------------ conditions
    def compare(self, op: str, x: Whole, y: Whole, unsigned: bool = False) -> Cond:
        if not x.wide and not y.wide and isinstance(x.base, int) and isinstance(y.base, int):
            return Cond(COMPARE[op](x.base, y.base))
        make = self.b.icmp_unsigned if unsigned else self.b.icmp_signed
        if x.wide or y.wide:
            return Cond(make(op, self.lanes(x), self.lanes(y)))
        return Cond(make(op, self.value(x.base), self.value(y.base)))

    def inside(self, x: Whole, n: Whole) -> Cond:
        """Whether 0 <= x < n, for n >= 0."""
        if not x.wide and not n.wide and isinstance(x.base, int) and isinstance(n.base, int):
            return Cond(0 <= x.base < n.base)
        return self.compare("<", x, n, unsigned=True)

    def mask(self, c: Cond) -> Any:
        """As a vector."""
        if c.known:
            return ir.Constant(self.e.mask, [int(c.v)] * self.e.lanes)
        return c.v if c.wide else self.e.splat(c.v)

    def bit(self, c: Cond) -> Any:
        return I1(int(c.v)) if c.known else c.v

    def joined(self, make: Callable, x: Cond, y: Cond) -> Cond:
        if x.wide or y.wide:
            return Cond(make(self.mask(x), self.mask(y)))
        return Cond(make(x.v, y.v))

    def both(self, x: Cond, y: Cond) -> Cond:
        if x.known or y.known:
            x, y = (x, y) if x.known else (y, x)
            return y if x.v else FALSE
        return self.joined(self.b.and_, x, y)

    def either(self, x: Cond, y: Cond) -> Cond:
        if x.known or y.known:
            x, y = (x, y) if x.known else (y, x)
            return TRUE if x.v else y
        return self.joined(self.b.or_, x, y)

    def holds_not(self, x: Cond) -> Cond:
        return Cond(not x.v) if x.known else Cond(self.b.not_(x.v))

    def where(self, c: Cond, x: Whole, y: Whole) -> Whole:
        if c.known:
            return x if c.v else y
        if c.wide or x.wide or y.wide:
            return Whole(0, vector=self.b.select(self.mask(c) if c.wide else c.v, self.lanes(x), self.lanes(y)))
        return Whole(self.b.select(c.v, self.value(x.base), self.value(y.base)))

    def any(self, c: Cond) -> Any:
        """Whether it holds in any lane, an i1."""
        if not c.wide:
            return self.bit(c)
        bits = ir.IntType(self.e.lanes)
        return self.b.icmp_unsigned("!=", self.b.bitcast(c.v, bits), bits(0))

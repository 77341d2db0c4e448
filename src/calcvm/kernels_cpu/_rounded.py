"""Sums, products and quotients of equations that round the same way everywhere.

LLVM may fuse a product and a sum in some loops and not in others, so a team's bits would depend on which worker does what.  These
functions decide it themselves: a product is added in one rounding, on machines that can, and nothing else is fused.
"""

from __future__ import annotations

from typing import Any

from calcvm.kernels_cpu._formulas import V

FLAGS = ("nsz",)  # neither "contract" nor "arcp"


class Product(V):
    """The product of ``factors``."""

    __slots__ = ("factors",)

    def __init__(self, x: V, y: V):
        super().__init__(x.b, x.b.fmul(x.v, y.v, flags=FLAGS))
        self.factors = x, y


def added(x: V, y: V) -> V:
    """x + y."""
    for one, other in ((x, y), (y, x)):
        if isinstance(one, Product):
            return one.factors[0].fma(one.factors[1], other)
    return V(x.b, x.b.fadd(x.v, y.v, flags=FLAGS))


def subtracted(x: V, y: V) -> V:
    """x - y."""
    return added(x, Product(-y.factors[0], y.factors[1]) if isinstance(y, Product) else -y)


def multiplied(x: V, y: V) -> V:
    """x * y."""
    return Product(x, y)


def divided(x: V, y: V) -> V:
    """x / y."""
    return V(x.b, x.b.fdiv(x.v, y.v, flags=FLAGS))


def widened(x: V, splat: Any) -> V:
    """A number in all lanes; a product stays a product, so that it is still added in one rounding."""
    if x.lanes:
        return x
    return Product(*(widened(f, splat) for f in x.factors)) if isinstance(x, Product) else V(x.b, splat(x.v))

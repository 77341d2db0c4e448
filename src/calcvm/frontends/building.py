"""What the tables of other libraries' operators share: the network that is being built, and arguments of all kinds.

An argument is `Arranged` if it depends on inputs or weights, an array or a number if it is known, or `Filled` if it is one number in a
shape that has the batch.  `Cannot` says why a use has no counterpart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from calcvm import functions as F
from calcvm.errors import CalcError
from calcvm.frontends.arrangement import Arranged
from calcvm.graph import CalcGraph, Variable
from calcvm.ops.dims import Affine, affine, show

FLOATS = ("float16", "bfloat16", "float32", "float64")
OF_BATCH = "it computes with the batch's size: take a mean over the batch, or give the number as an input"
Sizes = Sequence[int | Affine]


class Cannot(CalcError):
    """There is no counterpart of an operator, or of this use of it."""


class Filled:
    """A tensor of one number, whose shape has the batch."""

    def __init__(self, value: float, sizes: Sizes, dtype: str | None = None):
        self.value, self.shape, self.type = value, tuple([affine(n) for n in sizes]), None if dtype in FLOATS else dtype


class Building(Protocol):
    """What the functions need of the network that is being built.

    training : whether the operator does what it does in training.  zeros : a zero for each sample, (B,).
    type : of the operator's result there.  outputs : how many results it has.
    as_written : whether normalization and dropout do what the file says, and not what the path is for.
    """

    graph: CalcGraph
    training: bool
    type: str
    outputs: int
    as_written: bool

    @property
    def zeros(self) -> Variable: ...
    def constant(self, value: Any) -> Variable: ...


def declaring(
    table: dict[str, Callable[..., Any]],
) -> Callable[..., Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """A decorator that puts a function into a table, under the names of the operators that it is for."""

    def named(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def declare(f: Callable[..., Any]) -> Callable[..., Any]:
            table.update(dict.fromkeys(names, f))
            return f

        return declare

    return named


# ---------------------------------------------------------------- arguments
def plain(b: Building, x: Any) -> Any:
    """A variable; arrays and numbers as they are."""
    if isinstance(x, Filled):
        fixed = np.full([n.b if n.constant else 1 for n in x.shape], float(x.value))
        if all(n.constant for n in x.shape):
            return fixed.astype(x.type or float)
        zeros = F.reshape(_zeros(b, x.shape), [1 if n.constant else n for n in x.shape])
        return F.cast(zeros + fixed, x.type)
    return x.variable() if isinstance(x, Arranged) else x


def _zeros(b: Building, shape: Sequence[Affine]) -> Variable:
    """A zero for each place of the one axis that depends on the batch."""
    (n, *more) = (n for n in shape if not n.constant)
    if more or n.b:
        raise Cannot(f"a constant of the shape {show(tuple(shape))}")
    if n.a == 1:
        return b.zeros
    return F.reshape(F.reshape(b.zeros, (None, 1)) + np.zeros(n.a), (n,))


def variable(b: Building, x: Any) -> Variable:
    x = plain(b, x)
    return x if isinstance(x, Variable) else b.constant(x)


def given(b: Building, x: Any) -> Any:
    """A variable, or None."""
    return None if x is None else variable(b, x)


def whole(n: Any) -> int:
    """A size that is a number."""
    size = affine(n)
    if not size.constant:
        raise Cannot(f"the size {size} depends on the batch")
    return size.b


def axis_of(x: Arranged, axis: int) -> int:
    return axis % x.rank if x.rank else 0


def arranged(b: Building, x: Any) -> Arranged:
    return x if isinstance(x, Arranged) else Arranged.of(variable(b, x))


def is_number(x: Any) -> bool:
    return isinstance(x, (bool, int, float))


def one_by_one(b: Building, f: Callable[..., Variable], x: Any, y: Any) -> Arranged:
    """A function of the elements of two operands, of which one is a variable."""
    if isinstance(x, Affine) or isinstance(y, Affine):
        raise Cannot(OF_BATCH)
    if isinstance(x, Arranged) and (is_number(y) or (isinstance(y, Arranged) and x.like(y))):
        return x.again(f, y)
    if isinstance(y, Arranged) and is_number(x):
        return y.again(lambda v: f(x, v))
    return Arranged.of(f(plain(b, x), plain(b, y)))


def clipped(x: Arranged, low: float, high: float) -> Arranged:
    """x between two numbers."""
    return x.again(F.relu6 if (low, high) == (0, 6) else lambda v: F.clip(v, low, high))


def over_axis(x: Arranged, axis: int, f: Callable[[Variable], Variable]) -> Arranged:
    """A function of each vector along an axis."""
    axis, last = axis_of(x, axis), x.rank - 1
    if axis == last:
        return x.rows(f)
    order = [*(k for k in range(x.rank) if k != axis), axis]
    back = [*range(axis), last, *range(axis, last)]
    return x.permuted(order).rows(f).permuted(back)

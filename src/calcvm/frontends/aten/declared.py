"""The table of operators of PyTorch's library ATen, and what its functions share.

A function of the table gets the `Building`, then the operator's arguments: `Arranged` for what depends on inputs or weights, arrays and
numbers for what does not, `Filled` for constants of the batch's size, and types by name.  `Cannot` says why a use has no counterpart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from calcvm import functions as F
from calcvm.errors import CalcError
from calcvm.frontends.arrangement import Arranged
from calcvm.graph import CalcGraph, Variable
from calcvm.ops.dims import Affine, affine

FLOATS = ("float16", "bfloat16", "float32", "float64")
RANDOM = "bernoulli multinomial normal normal_functional rand rand_like randint randint_like randn randn_like randperm uniform".split()
CHECKS = "_assert_async _assert_scalar _assert_tensor_metadata sym_constrain_range sym_constrain_range_for_size".split()
# the argument with weights that rows read as (inputs, outputs)
ACROSS = {"linear": 1, "lstm": 2, "gru": 2, "rnn_tanh": 2, "rnn_relu": 2}
GETITEM, SIZE = "getitem", "sym_size"
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
    type : of the operator's result in PyTorch.
    """

    graph: CalcGraph
    training: bool
    type: str

    @property
    def zeros(self) -> Variable: ...
    def constant(self, value: Any) -> Variable: ...


ATEN: dict[str, Callable[..., Any]] = {}


def aten(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare the counterpart of operators, by their names without their forms: "max" for aten.max.dim."""

    def declare(f: Callable[..., Any]) -> Callable[..., Any]:
        ATEN.update(dict.fromkeys(names, f))
        return f

    return declare


def counterpart(name: str) -> Callable[..., Any] | None:
    """The function for an operator, which may work in place, or None."""
    return ATEN.get(name) or ATEN.get(name.removesuffix("_"))


# ---------------------------------------------------------------- arguments
def plain(b: Building, x: Any) -> Any:
    """A variable; arrays and numbers as they are."""
    if isinstance(x, Filled):
        fixed = np.full([n.b if n.constant else 1 for n in x.shape], float(x.value))
        return F.cast(F.reshape(b.zeros, [1 if n.constant else n for n in x.shape]) + fixed, x.type)
    return x.variable() if isinstance(x, Arranged) else x


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
        raise Cannot("it computes with the batch's size: take a mean over the batch, or give the number as an input")
    if isinstance(x, Arranged) and (is_number(y) or (isinstance(y, Arranged) and x.like(y))):
        return x.again(f, y)
    if isinstance(y, Arranged) and is_number(x):
        return y.again(lambda v: f(x, v))
    return Arranged.of(f(plain(b, x), plain(b, y)))


def over_axis(x: Arranged, axis: int, f: Callable[[Variable], Variable]) -> Arranged:
    """A function of each vector along an axis."""
    axis, last = axis_of(x, axis), x.rank - 1
    if axis == last:
        return x.rows(f)
    order = [*(k for k in range(x.rank) if k != axis), axis]
    back = [*range(axis), last, *range(axis, last)]
    return x.permuted(order).rows(f).permuted(back)

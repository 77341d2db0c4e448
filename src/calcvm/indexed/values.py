"""Values of expressions: variables of a graph, or constants, with an index for each axis; and operations on axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from calcvm import functions as F
from calcvm.errors import CalcError
from calcvm.graph import CalcGraph, Variable, apply
from calcvm.ops.dims import Affine
from calcvm.ops.layouts import LAST
from calcvm.ops.layouts import axes as lying

Size = int | Affine


@dataclass(frozen=True, eq=False)
class Value:
    """data : a variable, or a constant: an array or a number.  axes : the index of each axis."""

    data: Any
    axes: tuple[str, ...] = ()

    @property
    def constant(self) -> bool:
        return not isinstance(self.data, Variable)

    def called(self, names: dict[str, str]) -> Value:
        """The same data with other index names."""
        return Value(self.data, tuple(names.get(v, v) for v in self.axes))


def size_of(n: Size) -> Size:
    """A size as an int, if it is the same for every batch."""
    return n.b if isinstance(n, Affine) and n.constant else n


def numel(sizes: Iterable[Size]) -> Any:
    return math.prod(sizes)  # type: ignore[arg-type]


def reshaped(x: Any, shape: Sequence[Size]) -> Any:
    """x in another shape, in which one size may be the batch's."""
    if isinstance(x, np.ndarray):
        return x.reshape([int(n) for n in shape])
    if tuple(x.shape) == tuple(shape):
        return x
    return apply("reshape", x, shape=tuple(-1 if isinstance(size_of(n), Affine) else int(size_of(n)) for n in shape))


def transposed(x: Any, order: Sequence[int]) -> Any:
    """x with its axes in another order; a view if one of the orders is channels last in memory."""
    order, rank = tuple(order), len(order)
    if order == tuple(range(rank)):
        return x
    if isinstance(x, np.ndarray):
        return x.transpose(order)
    if x.layout == LAST and rank > 2:
        lie = lying(LAST, rank)
        return transposed(F.channels_last(x), [lie.index(axis) for axis in order])
    if rank > 2 and order == (0, rank - 1, *range(1, rank - 1)):
        return F.channels_first(x)
    return F.transpose(x, order)


def ordered(v: Value, axes: Sequence[str]) -> Any:
    """Its data with its axes in this order."""
    return transposed(v.data, [v.axes.index(name) for name in axes]) if v.axes else v.data


def aligned(v: Value, axes: Sequence[str]) -> Any:
    """Its data, shaped to broadcast along these axes."""
    if not v.axes:
        return v.data
    own = [name for name in axes if name in v.axes]
    data = ordered(v, own)
    sizes = dict(zip(own, data.shape))
    first = axes.index(own[0])
    return reshaped(data, [sizes.get(name, 1) for name in axes[first:]])


# ---------------------------------------------------------------- parts of an axis
def _along(x: Variable, axis: int, start: int, stop: int) -> Variable:
    starts, stops = [None] * axis, [None] * axis
    return F.slice(x, (*starts, start), (*stops, stop))


def cut(x: Variable, axis: int, start: int, stop: int) -> Variable:
    """``x[start:stop]`` along an axis."""
    return x if (start, stop) == (0, size_of(x.shape[axis])) else _along(x, axis, start, stop)


def dropped(x: Variable, axis: int) -> Variable:
    """x without an axis of one element."""
    return reshaped(x, (*x.shape[:axis], *x.shape[axis + 1 :]))


def padded(x: Variable, axis: int, before: int, after: int, value: float) -> Variable:
    """x with elements of a value before and after it along an axis."""
    if not before and not after:
        return x
    n, rank = int(x.shape[axis]), x.rank
    pads = [0] * (2 * rank)
    pads[axis], pads[rank + axis] = before, after
    wide = apply("pad", x, pads=tuple(pads), value=value if math.isfinite(value) else 0.0)
    if math.isfinite(value):
        return wide
    at = np.arange(before + n + after)
    inside = ((at >= before) & (at < before + n)).reshape([-1] + [1] * (rank - 1 - axis))
    return F.where(inside, wide, value)


def spaced(x: Variable, axis: int, start: int, step: int, count: int, beyond: float) -> Variable:
    """``count`` elements ``start, start + step, ...`` along an axis; ``beyond`` for those outside."""
    n = int(x.shape[axis])
    end = start + step * count if step > 1 else start + count
    x, start = padded(x, axis, max(0, -start), max(0, end - n), beyond), max(0, start)
    x = cut(x, axis, start, start + step * count)
    if step == 1:
        return x
    x = reshaped(x, (*x.shape[:axis], count, step, *x.shape[axis + 1 :]))
    return dropped(cut(x, axis + 1, 0, 1), axis + 1)


def apart(x: Variable, axis: int, step: int, beyond: float) -> Variable:
    """Elements along an axis at places 0, step, 2*step, ...; ``beyond`` in between."""
    n = int(x.shape[axis])
    x = padded(reshaped(x, (*x.shape[: axis + 1], 1, *x.shape[axis + 1 :])), axis + 1, 0, step - 1, beyond)
    return reshaped(x, (*x.shape[:axis], n * step, *x.shape[axis + 2 :]))


def diagonal(x: Variable, axis: int, other: int) -> Variable:
    """Elements whose places along two axes are equal; the new axis is the last."""
    rest = [k for k in range(x.rank) if k not in (axis, other)]
    n = int(x.shape[axis])
    x = transposed(x, [*rest, axis, other])
    lead = x.shape[:-2]
    x = padded(reshaped(x, (*lead, n * n)), len(lead), 0, n, 0.0)
    return dropped(cut(reshaped(x, (*lead, n, n + 1)), len(lead) + 1, 0, 1), len(lead) + 1)


def stacked(pieces: Sequence[Value], name: str) -> Value:
    """Values of the same axes, one for each place of an index, combined to one value."""
    axes = pieces[0].axes
    parts = [ordered(piece, axes) for piece in pieces]
    return Value(F.concat([reshaped(x, (*x.shape, 1)) for x in parts]), (*axes, name))


def ones(graph: CalcGraph, n: Size, given: Iterable[Variable] = ()) -> Variable:
    """Ones for a multiple of the batch, derived from a given variable or a placeholder: no row counts samples."""
    assert isinstance(n, Affine)
    known = (*given, *(v for v in graph.variables.values() if v.kind == "placeholder"))
    found = ((v, k) for v in known for k, d in enumerate(v.shape) if d == Affine(1, 0))
    x, along = next(((v, k) for v, k in found if all(size_of(d) != 0 for d in v.shape)), (None, 0))
    if x is None or n.b:
        raise CalcError(f"a value for each of {n} is needed, but no placeholder has an axis of the batch")
    for axis in [k for k in range(x.rank) if k != along]:
        x = cut(x, axis, 0, 1)
    column = F.stop_gradient(reshaped(F.cast(x, None), (x.shape[along], 1)))
    made = reshaped(expanded(F.pow(column, 0.0), (1, n.a)), (n,))  # x^0 is 1, even for NaN
    made.rename(graph.unique("ones")).unnamed = True
    return made


def repeated(graph: CalcGraph, data: Any, shape: Sequence[Size], given: Iterable[Variable] = ()) -> Any:
    """Data repeated to a shape along axes where it has one element; along the batch by `ones`."""
    sizes = [*shape]
    for k, n in enumerate(sizes):
        if isinstance(n, Affine):
            made = reshaped(ones(graph, n, given), [n if i == k else 1 for i in range(len(sizes))])
            data, sizes[k] = made if _is_one(data) else data * made, 1
    return expanded(data, [int(n) for n in sizes])


def _is_one(data: Any) -> bool:
    """Whether it is the number 1."""
    value = data.init if isinstance(data, Variable) and data.kind == "constant" else data
    return not isinstance(value, Variable) and np.size(value) == 1 and bool(np.all(value == 1))


def spread(x: Variable, shape: Sequence[Size]) -> Variable:
    """x broadcast to a shape."""
    x = reshaped(x, (*(1,) * (len(shape) - x.rank), *x.shape))
    return repeated(x.graph, x, [1 if size_of(n) != 1 else size_of(m) for n, m in zip(x.shape, shape)])


def expanded(data: Any, shape: Sequence[int]) -> Any:
    """Data broadcast to a shape."""
    if not isinstance(data, Variable):
        data = np.asarray(data)
        return np.broadcast_to(data, np.broadcast_shapes(data.shape, tuple(shape))).copy()
    return data if all(n == 1 for n in shape) and data.rank == len(shape) else F.where(np.ones(shape, bool), data, 0)

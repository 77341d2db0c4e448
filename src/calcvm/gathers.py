"""Elements at places that are data, places in order, and running products and extrema, as functions.

Indexes are integers from 0 on.  One that is outside its axis traps, and negative ones are outside: they do not count from the end.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from calcvm import checks
from calcvm.errors import CalcError, ShapeError
from calcvm.functions import expand_dims, reshape, transpose
from calcvm.graph import Variable, apply, as_numbers
from calcvm.ops.dims import Affine

__all__ = [
    "argmax", "argmin", "argsort", "cummax", "cummin", "cumprod", "embedding", "one_hot", "scatter_add", "sort", "take",
    "take_along_axis", "top_k",
]  # fmt: skip


# ---------------------------------------------------------------- arguments
def _floats(what: str, x: Any) -> Variable:
    if isinstance(x, Variable) and x.type in ("int32", "int64"):
        raise CalcError(
            f"{what} of {x} gives floats, which cannot represent every {x.type}: if its numbers are small enough "
            "(below 2**24, in float64 2**53), use cv.cast(x, None)"
        )
    return checks.one_of(what, x, Variable, "a variable")


def _axis(what: str, x: Any, axis: Any) -> int:
    """An axis of a variable of floats, counted from 0."""
    if not _floats(what, x).rank:
        raise ShapeError(f"{what} of {x}: a number has no axis")
    return checks.integer(f"{what} of {x}: axis", axis, -x.rank, x.rank - 1) % x.rank


def _indexes(what: str, given: Any, n: Affine) -> Variable | np.ndarray:
    """Indexes below n; those that are numbers are checked now, the others when the row runs."""
    if isinstance(given, Variable):
        if given.type == "bool":
            raise CalcError(f"{what}: {given} are bools, and indexes are integers: a mask is for cv.where")
        return given
    array = as_numbers(f"{what}: indexes", given)
    if array.dtype.kind not in "iu" or not array.size:
        raise CalcError(f"{what}: indexes are integers, at least one, not {checks.shown(given)}")
    for i in (array.min(), array.max()):
        if i < 0 or (n.constant and i >= n.b):
            raise CalcError(f"{what}: index {i} is not in [0, {n}); negative ones do not count from the end")
    return array


# ---------------------------------------------------------------- elements at places
def take(x: Variable, indexes: Any, axis: int = 0) -> Variable:
    """Parts of x at places of an axis, as `numpy.take`: ``y[..., *k, ...] = x[..., indexes[*k], ...]``.

    Parameters
    ----------
    x : Variable of floats, any shape but ()
    indexes : Variable or array of integers, any shape, each in [0, n) for an axis of n
        One outside traps; negative ones do not count from the end.
    axis : int, which may be the batch

    Returns
    -------
    Variable, shape ``x.shape[:axis] + indexes.shape + x.shape[axis + 1:]``
        Its gradient adds up, for each place of x, in the order of the indexes: the same bits for any team.

    Raises
    ------
    CalcError, ShapeError : an axis, or an index that is a number, is outside; x is of integers of 32 or 64 bits.
    Trap : an index is outside, when the model runs.

    Examples
    --------
    >>> g = cv.CalcGraph()
    >>> x = g.constant("x", [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    >>> with g.path("look") as look:
    ...     y = cv.take(x, [2, 0, 2])
    >>> look.evaluate({})[y.name].tolist()
    [[5.0, 6.0], [1.0, 2.0], [5.0, 6.0]]
    """
    axis = _axis("take", x, axis)
    indexes = _indexes(f"take of {x}", indexes, x.shape[axis])
    return apply("take", x, indexes, axis=axis) if axis else apply("embedding", x, indexes)


def take_along_axis(x: Variable, indexes: Any, axis: int) -> Variable:
    """One element of x for each index, along an axis, as `numpy.take_along_axis` and `torch.gather`.

    Parameters
    ----------
    x : Variable of floats
    indexes : Variable or array of integers, of the shape of x except along the axis, each in [0, n) for an axis of n
        One outside traps; negative ones do not count from the end.
    axis : int, which may be the batch

    Returns
    -------
    Variable, of the shape of indexes

    Raises
    ------
    CalcError, ShapeError : the shapes do not fit; an axis, or an index that is a number, is outside.
    Trap : an index is outside, when the model runs.

    Examples
    --------
    >>> g = cv.CalcGraph()
    >>> x = g.constant("x", [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    >>> with g.path("look") as look:
    ...     y = cv.take_along_axis(x, [[2, 2], [0, 1]], axis=1)
    >>> look.evaluate({})[y.name].tolist()
    [[3.0, 3.0], [4.0, 5.0]]
    """
    axis = _axis("take_along_axis", x, axis)
    return apply("take_along_axis", x, _indexes(f"take_along_axis of {x}", indexes, x.shape[axis]), axis=axis)


def embedding(indexes: Any, weight: Variable, padding_idx: int | None = None) -> Variable:
    """The vectors of a table at indexes, ``weight[indexes]``, as `torch.nn.functional.embedding`; `nn.Embedding` is the layer.

    Parameters
    ----------
    indexes : Variable or array of integers in [0, n), any shape
    weight : Variable, shape (n, dim)
    padding_idx : int, optional
        The index whose vector gets no gradient.

    Returns
    -------
    Variable, shape (\\*indexes.shape, dim)

    Raises
    ------
    CalcError : ``padding_idx`` is outside the table.
    Trap : an index is outside, when the model runs.

    Examples
    --------
    >>> g = cv.CalcGraph()
    >>> words, table = g.placeholder("words", (None, 12), "int64"), g.parameter("table", (1000, 64))
    >>> with g.path("look"):
    ...     print(cv.embedding(words, table, padding_idx=0))
    embedding (B, 12, 64)
    """
    _axis("embedding: weight", weight, 0)
    indexes, padding = _indexes(f"embedding of {weight}", indexes, weight.shape[0]), -1
    if padding_idx is not None:
        padding = checks.integer("embedding: padding_idx", padding_idx, 0, weight.shape[0].b - 1)
    return apply("embedding", weight, indexes, padding=padding)


def one_hot(indexes: Variable, num_classes: int) -> Variable:
    """1 at the place of each index and 0 elsewhere, on a new last axis, as `torch.nn.functional.one_hot`, in floats.

    Parameters
    ----------
    indexes : Variable of integers in [0, num_classes), any shape
    num_classes : int

    Returns
    -------
    Variable, shape (\\*indexes.shape, num_classes)

    Raises
    ------
    Trap : an index is outside, when the model runs.

    Examples
    --------
    >>> g = cv.CalcGraph()
    >>> x = g.constant("x", [2, 0], "int64")
    >>> with g.path("look") as look:
    ...     y = cv.one_hot(x, 3)
    >>> look.evaluate({})[y.name].tolist()
    [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    """
    n = checks.integer("one_hot: num_classes", num_classes)
    checks.one_of("one_hot", indexes, Variable, "a variable")
    return apply("one_hot", np.ones(n), _indexes("one_hot", indexes, Affine(0, n)))


def scatter_add(x: Variable, indexes: Any, updates: Any, axis: int = 0) -> Variable:
    """x with updates added at places of an axis: ``y[..., indexes[*k], ...] += updates[..., *k, ...]``, as `numpy.add.at`.

    What goes to one place is added up in the order of the indexes, and then to x: the same bits for any team.

    Parameters
    ----------
    x : Variable of floats, any shape but ()
    indexes : Variable or array of integers, any shape, each in [0, n) for an axis of n; they may repeat
        One outside traps; negative ones do not count from the end.
    updates : Variable or array, shape ``x.shape[:axis] + indexes.shape + x.shape[axis + 1:]``, as `take` returns it
    axis : int, which may be the batch

    Raises
    ------
    CalcError, ShapeError : the shapes do not fit; an axis, or an index that is a number, is outside.
    Trap : an index is outside, when the model runs.

    Examples
    --------
    >>> g = cv.CalcGraph()
    >>> x = g.constant("x", [0.0, 0.0, 0.0])
    >>> with g.path("look") as look:
    ...     y = cv.scatter_add(x, [2, 0, 2], [1.0, 2.0, 3.0])
    >>> look.evaluate({})[y.name].tolist()
    [2.0, 0.0, 4.0]
    """
    axis = _axis("scatter_add", x, axis)
    indexes = _indexes(f"scatter_add to {x}", indexes, x.shape[axis])
    rank = len(indexes.shape)
    if axis:
        u = updates if isinstance(updates, Variable) else x.graph.constant(x.graph.unique("updates"), updates)
        if u.rank != x.rank - 1 + rank:
            raise ShapeError(
                f"scatter_add: updates {u} must have {x.rank - 1 + rank} axes: those of x {x}, and of indexes for axis {axis}"
            )
        moved = [*range(axis, axis + rank), *range(axis), *range(axis + rank, u.rank)]
        order = [axis, *range(axis), *range(axis + 1, x.rank)]
        x, updates = transpose(x, order), transpose(u, moved)
    if isinstance(indexes, Variable):
        indexes = apply("inside", reshape(x, (*x.shape[:1], -1)), indexes)
    y = apply("scatter_add", x, indexes, updates)
    return transpose(y, [*range(1, axis + 1), 0, *range(axis + 1, x.rank)]) if axis else y


# ---------------------------------------------------------------- places of extrema, and in order
def argmax(x: Variable, axis: int | None = None, keepdims: bool = False) -> Variable:
    """The place of the largest element along an axis, of equals the first; NaN wins, as in NumPy.

    Parameters
    ----------
    x : Variable, any shape but ()
    axis : int, which may be the batch; None counts all elements, in order
    keepdims : whether the axis stays, with size 1

    Returns
    -------
    Variable of int64; no gradient goes through it

    Examples
    --------
    >>> g = cv.CalcGraph()
    >>> x = g.constant("x", [[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]])
    >>> with g.path("look") as look:
    ...     largest, least = cv.argmax(x, axis=1), cv.argmin(x)
    >>> values = look.evaluate({})
    >>> values["largest"].tolist(), int(values["least"])
    ([1, 0], 4)
    """
    return _place("argmax", x, axis, keepdims)


def argmin(x: Variable, axis: int | None = None, keepdims: bool = False) -> Variable:
    """The place of the smallest element along an axis; otherwise as `argmax`."""
    return _place("argmin", x, axis, keepdims)


def _place(name: str, x: Any, axis: Any, keepdims: bool) -> Variable:
    keepdims = checks.flag(f"{name}: keepdims", keepdims)
    of = _floats(name, x)
    if axis is None:
        y = apply(name, reshape(of, (-1,)), axis=0)
        return reshape(y, (1,) * of.rank) if keepdims else y
    axis = _axis(name, x, axis)
    y = apply(name, of, axis=axis)
    return expand_dims(y, axis) if keepdims else y


def argsort(x: Variable, axis: int = -1, descending: bool = False) -> Variable:
    """The places of the elements along an axis in ascending order: ``cv.take_along_axis(x, cv.argsort(x), -1)`` is sorted.

    Of equals the first comes first (a stable order, also if ``descending``), and NaN counts as the largest.

    Parameters
    ----------
    x : Variable, any shape but ()
    axis : int, which may be the batch
    descending : the largest first

    Returns
    -------
    Variable of int64, of the shape of x; no gradient goes through it

    Examples
    --------
    >>> g = cv.CalcGraph()
    >>> x = g.constant("x", [3.0, 1.0, 3.0, 2.0])
    >>> with g.path("look") as look:
    ...     up, down = cv.argsort(x), cv.argsort(x, descending=True)
    >>> values = look.evaluate({})
    >>> values["up"].tolist(), values["down"].tolist()
    ([1, 3, 0, 2], [0, 2, 3, 1])
    """
    return apply(
        "argsort", x, axis=_axis("argsort", x, axis), descending=checks.flag("argsort: descending", descending)
    )


def sort(x: Variable, axis: int = -1, descending: bool = False) -> Variable:
    """x with the elements along an axis in order, NaN as the largest; the gradient goes to their places in x.

    Parameters
    ----------
    x : Variable, any shape but ()
    axis : int, which may be the batch
    descending : the largest first

    Examples
    --------
    >>> g = cv.CalcGraph()
    >>> x = g.constant("x", [3.0, 1.0, 2.0])
    >>> with g.path("look") as look:
    ...     y = cv.sort(x)
    >>> look.evaluate({})[y.name].tolist()
    [1.0, 2.0, 3.0]
    """
    return take_along_axis(x, argsort(x, axis, descending), axis)


def top_k(x: Variable, k: int, axis: int = -1) -> tuple[Variable, Variable]:
    """The k largest elements along an axis, the largest first, and their places, as `torch.topk`.

    Of equals the first comes first, and NaN counts as the largest.

    Parameters
    ----------
    x : Variable, any shape but ()
    k : int, from 1 to the elements of the axis
    axis : int, but not the batch

    Returns
    -------
    values, indexes : Variables of the shape of x with k along the axis, indexes of int64
        The gradient of values goes to their places in x.

    Raises
    ------
    CalcError : k is not an integer of at least 1.
    ShapeError : it is more than the elements of the axis, or the axis is the batch.

    Examples
    --------
    >>> g = cv.CalcGraph()
    >>> x = g.constant("x", [3.0, 1.0, 2.0, 5.0])
    >>> with g.path("look") as look:
    ...     largest, places = cv.top_k(x, 2)
    >>> values = look.evaluate({})
    >>> values["largest"].tolist(), values["places"].tolist()
    ([5.0, 3.0], [3, 0])
    """
    axis = _axis("top_k", x, axis)
    indexes = apply("argsort", x, axis=axis, k=checks.integer(f"top_k of {x}: k", k), descending=True)
    return apply("take_along_axis", x, indexes, axis=axis), indexes


# ---------------------------------------------------------------- running products and extrema
def cumprod(x: Variable, axis: int) -> Variable:
    """Cumulative product along an axis.

    Parameters
    ----------
    x : Variable, any shape but ()
    axis : int, which may be the batch

    Examples
    --------
    >>> g = cv.CalcGraph()
    >>> x = g.constant("x", [2.0, 3.0, 1.0])
    >>> with g.path("look") as look:
    ...     products, largest, least = cv.cumprod(x, 0), cv.cummax(x, 0), cv.cummin(x, 0)
    >>> values = look.evaluate({})
    >>> [values[name].tolist() for name in ("products", "largest", "least")]
    [[2.0, 6.0, 6.0], [2.0, 3.0, 3.0], [2.0, 2.0, 1.0]]
    """
    return apply("cumprod", x, axis=axis)


def cummax(x: Variable, axis: int) -> Variable:
    """The largest element so far along an axis; of equals the last gets the gradient, as in PyTorch.

    Parameters
    ----------
    x : Variable, any shape but ()
    axis : int, which may be the batch
    """
    return apply("cummax", x, axis=axis)


def cummin(x: Variable, axis: int) -> Variable:
    """The smallest element so far along an axis; otherwise as `cummax`."""
    return apply("cummin", x, axis=axis)

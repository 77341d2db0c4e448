"""Operators that take elements at places, or put them there.

Places are known, or data: integers that may count from the end.  Data outside an axis trap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from calcvm import functions as F
from calcvm import gathers, images
from calcvm.frontends.arrangement import Arranged
from calcvm.frontends.aten.shapes import cat
from calcvm.frontends.building import Building, Cannot, Filled, arranged, plain, variable, whole
from calcvm.frontends.onnx.declared import (
    floats,
    in_floats,
    in_type,
    is_known,
    keeps_type,
    known,
    onnx,
    place_of,
    rank_of,
    type_of,
    whole_numbers,
    wrapped,
)
from calcvm.graph import Variable, apply
from calcvm.indexed import equation
from calcvm.ops.dims import BATCH, Affine, affine, numel
from calcvm.ops.types import FLOAT


# ---------------------------------------------------------------- places
def nothing(b: Building, x: Any, sizes: Sequence[Affine | int]) -> Any:
    """A tensor without elements, of the type of x."""
    kind, shape = type_of(x), [affine(n) for n in sizes]
    if any(not n.constant for n in shape):
        return Filled(0.0, shape, None if kind == FLOAT else kind)
    return np.zeros([n.b for n in shape], b.type if kind == FLOAT else kind)


def numbers(b: Building, n: Affine) -> Variable:
    """0, 1, 2, ... for each sample, int64."""
    if n != BATCH:
        raise Cannot(f"it counts to {n}, and to the batch's size alone has a counterpart")
    return F.cast(F.cumsum(b.zeros + 1.0, 0) - 1.0, "int64")


def _from_start(b: Building, places: Any, n: Affine) -> Any:
    """Places of an axis of n, without negative ones."""
    if is_known(places) and (n.constant or (places >= 0).all()):
        if n.constant and ((places < -n.b) | (places >= n.b)).any():
            raise Cannot(f"places {places.tolist()} of an axis of {n}")
        return np.where(places < 0, places + n.b, places)
    v = variable(b, places)
    size = n.b if n.constant else F.sum(b.zeros + 1.0) * n.a + n.b
    return F.where(v < 0, F.cast(in_floats(v) + size, v.type), v)


def taken(b: Building, x: Any, places: Any, axis: int) -> Any:
    """Elements at places of an axis."""
    n, rank = x.shape[axis], len(places.shape)
    if not rank:
        return taken(b, x, places.reshape(1) if is_known(places) else places.reshaped([1]), axis).without([axis])
    if is_known(places) and not places.size:
        return nothing(b, x, [*x.shape[:axis], *places.shape, *x.shape[axis + 1 :]])
    places = _from_start(b, places, affine(n))
    if is_known(places) and rank == 1 and (np.diff(places) == 1).all() and affine(n).constant:
        return arranged(b, x).part(axis, int(places[0]), int(places[-1]) + 1)
    return keeps_type(b, lambda v: gathers.take(v, places, axis), x)


# ---------------------------------------------------------------- elements at places
@onnx("Gather")
def gather(b: Building, x: Any, places: Any, *, axis: int = 0) -> Any:
    return taken(b, x, places, place_of(axis, rank_of(x)))


@onnx("ArrayFeatureExtractor")
def array_feature_extractor(b: Building, x: Any, places: Any) -> Any:
    flat = places.reshape(-1) if is_known(places) else places.reshaped([-1])
    y = taken(b, x, flat, rank_of(x) - 1)
    return y if rank_of(x) > 1 else y.reshaped([1, -1])


@onnx("Compress")
def compress(b: Building, x: Any, condition: Any, *, axis: int | None = None) -> Any:
    places = np.flatnonzero(known(condition, "the condition"))
    if axis is None:
        return taken(b, arranged(b, x).reshaped([-1]), places, 0)
    return taken(b, x, places, place_of(axis, rank_of(x)))


@onnx("NonZero", "Unique")
def of_unknown_size(b: Building, *inputs: Any, **settings: Any) -> Any:
    raise Cannot("the size of its result depends on data")


@onnx("GatherElements")
def gather_elements(b: Building, x: Any, places: Any, *, axis: int = 0) -> Any:
    axis = place_of(axis, rank_of(x))
    if is_known(places) and not places.size:
        return nothing(b, x, places.shape)
    of = _first_of(arranged(b, x), places.shape, axis)
    places = _from_start(b, places, of.shape[axis])
    return keeps_type(b, lambda v: gathers.take_along_axis(v, places, axis), of)


def _first_of(x: Arranged, sizes: Sequence[Any], axis: int) -> Arranged:
    """The first elements along all axes but one."""
    for k, n in enumerate(sizes):
        if k != axis and x.shape[k] != affine(n):
            x = x.part(k, 0, whole(n))
    return x


def _columns(b: Building, places: Any, sizes: Sequence[Affine], lead: Sequence[Any]) -> list[Any]:
    """Places along several axes, which stand on the last axis, in another shape."""
    if is_known(places):
        flat = places.reshape([*(whole(m) for m in lead), len(sizes)])
        return [_from_start(b, flat[..., k], n) for k, n in enumerate(sizes)]
    places = places.reshaped([*lead, len(sizes)])
    axis = len(lead)
    return [_from_start(b, places.part(axis, k, k + 1).without([axis]), n) for k, n in enumerate(sizes)]


@onnx("GatherND")
def gather_nd(b: Building, x: Any, places: Any, *, batch_dims: int = 0) -> Any:
    k, shape = whole(places.shape[-1]), [affine(n) for n in x.shape]
    batch, sizes, rest = shape[:batch_dims], shape[batch_dims:][:k], shape[batch_dims + k :]
    out = [*places.shape[:-1], *rest]
    if any(affine(n) == 0 for n in out):
        return nothing(b, x, out)
    lead = [*[numel(tuple(batch))][: len(batch)], numel(tuple([affine(n) for n in places.shape[batch_dims:-1]]))]
    columns, at = _columns(b, places, sizes, lead), "b,m" if batch else "m"
    v = in_floats(arranged(b, x).reshaped([*lead[:-1], *sizes, numel(tuple(rest))]).variable())
    first = ["b"] if batch else []
    if not batch and (k == 1 or not sizes[0].constant):
        v, first, columns = gathers.take(v, columns[0]), ["m"], columns[1:]
    if columns:
        given: dict[str, Any] = {f"i{j}": column for j, column in enumerate(columns)}
        read = ",".join([*first, *(f"{name}[{at}]" for name in given), "r"])
        v = equation(f"y[{at},r] = x[{read}]", x=v, **given)
    return Arranged.of(in_type(v, type_of(x))).reshaped(out)


# ---------------------------------------------------------------- elements put at places
INTO = {  # of x, its updates u, and for each of them c = 1
    "add": ("{x} + sum[m] {u}", "0"),
    "mul": ("{x}*prod[m] {u}", "1"),
    "max": ("max({x}, max[m] {u})", "-inf"),
    "min": ("min({x}, min[m] {u})", "inf"),
    "none": ("where((sum[m] {c}) > 0, (sum[m] {u})/max(sum[m] {c}, 1), {x})", "0"),
}
To = tuple[str, Any, str, Affine]  # an index of x, its places, which of them is an update's, and the size of the axis


def _into(b: Building, x: Any, kept: str, to: Sequence[To], u: Any, update: str, reduction: str) -> Variable:
    """x[kept] with u[update] where its indexes are places.

    Without a reduction, several updates of one place, which have no meaning in ONNX, give their mean.
    """
    given: dict[str, Any] = {"x": floats(b, x), "u": floats(b, u)}
    conditions = []
    for name, places, at, n in to:
        given[f"to_{name}"] = places if is_known(places) and n.constant else _inside(b, places, n)
        if not n.constant:
            given[f"all_{name}"] = numbers(b, n)
        conditions.append(f"to_{name}[{at}] == {name if n.constant else f'all_{name}[{name}]'}")
    here, (text, otherwise) = " and ".join(conditions), INTO[reduction]
    text = text.format(x=f"x[{kept}]", u=f"where({here}, u[{update}], {otherwise})", c=f"where({here}, 1, 0)")
    return wrapped(equation(f"y[{kept}] = {text}", **given), type_of(x))


def _inside(b: Building, places: Any, n: Affine) -> Variable:
    """Places; one that is not inside an axis of n traps."""
    axis = b.constant(np.zeros((n.b, 1))) if n.constant else F.reshape(b.zeros, (-1, 1))
    return apply("inside", axis, variable(b, places))


def _put(b: Building, x: Any, places: np.ndarray, updates: Any) -> Variable:
    """x (n, ...) with updates at known places; of several of one place the last counts."""
    source = np.full(whole(x.shape[0]), -1)
    source[places] = np.arange(places.size)
    new = taken(b, updates, np.maximum(source, 0), 0).variable()
    there = (source >= 0).reshape(-1, *(1,) * (rank_of(x) - 1))
    return new if there.all() else F.where(there, new, variable(b, x))


def _flat(places: Sequence[np.ndarray], sizes: Sequence[Affine]) -> np.ndarray:
    return np.ravel_multi_index([k.reshape(-1) for k in places], [n.b for n in sizes])


@onnx("ScatterElements")
def scatter_elements(b: Building, x: Any, places: Any, updates: Any, *, axis: int = 0, reduction: str = "none") -> Any:
    if is_known(places) and not places.size:
        return x
    x, updates, axis = arranged(b, x), arranged(b, updates), place_of(axis, rank_of(x))
    shape = x.shape
    for k, m in enumerate(places.shape):
        if k != axis and shape[k] != affine(m):  # elements behind the places stay
            first, behind = x.part(k, 0, whole(m)), x.part(k, whole(m), whole(shape[k]))
            return cat(b, [scatter_elements(b, first, places, updates, axis=axis, reduction=reduction), behind], k)
    n, at = shape[axis], _from_start(b, places, shape[axis])
    if is_known(at) and reduction == "none" and all(m.constant for m in shape):
        each = [*np.indices(at.shape)]
        each[axis] = at
        return Arranged.of(_put(b, x.reshaped([-1]), _flat(each, shape), updates.reshaped([-1]))).reshaped(shape)
    around = numel(shape[:axis]), numel(shape[axis + 1 :])
    x, updates, at = (
        arranged(b, y).reshaped([around[0], y.shape[axis], around[1]]).variable() for y in (x, updates, at)
    )
    return Arranged.of(_into(b, x, "a,n,r", [("n", at, "a,m,r", n)], updates, "a,m,r", reduction)).reshaped(shape)


@onnx("ScatterND")
def scatter_nd(b: Building, x: Any, places: Any, updates: Any, *, reduction: str = "none") -> Any:
    if is_known(places) and not places.size:
        return x
    x, updates, k = arranged(b, x), arranged(b, updates), whole(places.shape[-1])
    shape, sizes, rest = x.shape, x.shape[:k], numel(x.shape[k:])
    count = numel(tuple([affine(n) for n in places.shape[:-1]]))
    columns, updates = _columns(b, places, sizes, [count]), updates.reshaped([count, rest])
    if is_known(places) and reduction == "none" and all(n.constant for n in sizes):
        y = _put(b, x.reshaped([numel(sizes), rest]), _flat(columns, sizes), updates)
    else:
        to = [(f"n{j}", column, "m", n) for j, (column, n) in enumerate(zip(columns, sizes))]
        kept = ",".join([*(name for name, *_ in to), "r"])
        y = _into(b, x.reshaped([*sizes, rest]), kept, to, updates, "m,r", reduction)
    return Arranged.of(y).reshaped(shape)


@onnx("TensorScatter")
def tensor_scatter(
    b: Building, x: Any, updates: Any, start: Any = None, *, axis: int = -2, mode: str = "linear"
) -> Arranged:
    axis, shape = place_of(axis, rank_of(x)), [affine(n) for n in x.shape]
    n, steps = whole(shape[axis]), whole(updates.shape[axis])
    if start is None:
        behind = [arranged(b, x).part(axis, steps, n)] if steps < n else []
        return cat(b, [updates, *behind], axis)
    lead, last = [shape[0], numel(tuple(shape[1:axis]))], numel(tuple(shape[axis + 1 :]))
    v, u = (floats(b, arranged(b, y).reshaped([*lead, -1, last])) for y in (x, updates))
    step = "(n - start[b])" + f"%{n}" * (mode == "circular")
    text = f"y[b,a,n,r] = where(0 <= {step} and {step} < {steps}, u[b,a,{step},r; 0], x[b,a,n,r])"
    y = equation(text, x=v, u=u, start=plain(b, start))
    return Arranged.of(in_type(y, type_of(x))).reshaped(shape)


@onnx("MaxUnpool")
def max_unpool(
    b: Building, x: Any, places: Any, output_shape: Any = None, *, kernel_shape: Sequence[int], strides: Sequence[int] = (),
    pads: Sequence[int] = (),
) -> Arranged:  # fmt: skip
    rank = len(kernel_shape)
    strides, pads = strides or [1] * rank, pads or [0] * 2 * rank
    sizes = [
        (whole(n) - 1) * stride - first - last + kernel
        for n, stride, first, last, kernel in zip(x.shape[2:], strides, pads, pads[rank:], kernel_shape)
    ]
    count, channels = math.prod(sizes), whole(x.shape[1])
    lead = [affine(n) for n in x.shape[:2]]
    v, at = (arranged(b, y).reshaped([*lead, -1]).variable() for y in (x, places))
    here = f"at[b,c,m] - (b*{channels} + c)*{count} == n"
    text = f"y[b,c,n<{count}] = sum[m] where({here}, x[b,c,m], 0)"
    y = equation(text, x=in_floats(v), at=at, fused=True)
    if any(kernel > stride for kernel, stride in zip(kernel_shape, strides)):  # windows may share an element
        several = equation(f"y[b,c,n<{count}] = sum[m] where({here}, 1, 0)", at=at, fused=True)
        y = y / F.maximum(in_floats(several), 1.0)
    y = F.reshape(y, [*lead, *sizes])
    if output_shape is not None:
        wanted = [whole(n) for n in whole_numbers(output_shape, "output_shape")[2:]]
        y = images.pad(y, [(0, n - size) for n, size in zip(wanted, sizes)])
    return Arranged.of(in_type(y, type_of(x)))

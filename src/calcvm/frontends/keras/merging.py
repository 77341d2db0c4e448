"""Layers that merge their inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from calcvm import functions as F
from calcvm.frontends.arrangement import Arranged
from calcvm.frontends.aten.layers import matmul
from calcvm.frontends.aten.shapes import cat
from calcvm.frontends.building import Building, Cannot, arranged, axis_of, one_by_one
from calcvm.frontends.keras.declared import keras
from calcvm.frontends.keras.layers import unit_norm


def merged(b: Building, f: Callable[..., Any], inputs: Sequence[Any]) -> Arranged:
    """A function of each element, one input after the other; those of fewer axes get some behind the batch."""
    each = [arranged(b, x) for x in inputs]
    most = max(x.rank for x in each)
    each = [x.reshaped([x.shape[0], *(1,) * (most - x.rank), *x.shape[1:]]) for x in each]
    return reduce(lambda x, y: one_by_one(b, f, x, y), each)


def _merging(name: str, f: Callable[..., Any]) -> None:
    keras(name)(lambda b, inputs, **_: merged(b, f, inputs))


for _name, _function in {
    "Add": F.add, "Subtract": F.sub, "Multiply": F.mul, "Maximum": F.maximum, "Minimum": F.minimum,
}.items():  # fmt: skip
    _merging(_name, _function)


@keras("Average")
def average(b: Building, inputs: Sequence[Any], **_: Any) -> Arranged:
    return merged(b, F.add, inputs).again(lambda v: v / float(len(inputs)))


@keras("Concatenate")
def concatenate(b: Building, inputs: Sequence[Any], *, axis: int = -1, **_: Any) -> Arranged:
    return cat(b, inputs, axis)


@keras("Dot")
def dot(b: Building, inputs: Sequence[Any], *, axes: Any, normalize: bool = False, **_: Any) -> Arranged:
    x, y = (arranged(b, v) for v in inputs)
    first, second = (axis_of(v, a) for v, a in zip((x, y), [axes, axes] if isinstance(axes, int) else axes))
    if normalize:
        x, y = unit_norm(b, x, axis=first), unit_norm(b, y, axis=second)
    if x.rank > 3 or y.rank > 3:
        raise Cannot("inputs of 2 or 3 axes have a counterpart")
    left = (x.reshaped([x.shape[0], 1, x.shape[1]]) if x.rank == 2 else x.swapped(first, 2)) if first else x
    right = y.reshaped([*y.shape, 1]) if y.rank == 2 else y.swapped(second, 1)
    z = matmul(b, left, right)
    if x.rank == y.rank == 2:
        return z.without([2])
    return z.without([1] if x.rank == 2 else [2] if y.rank == 2 else [])

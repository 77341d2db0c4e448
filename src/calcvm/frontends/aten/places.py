"""Operators that take elements at places, or order them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from calcvm import gathers
from calcvm.frontends.arrangement import Arranged
from calcvm.frontends.aten.declared import aten
from calcvm.frontends.building import Building, Cannot, arranged, axis_of, plain, variable, whole


def taken(b: Building, x: Arranged, places: Any, axis: int) -> Arranged:
    """Elements at places of an axis, which are numbers or a variable."""
    if isinstance(places, np.ndarray):
        n = whole(x.shape[axis]) if x.shape[axis].constant else 0
        places = np.where(places < 0, places + n, places)
        if places.ndim == 1 and places.size and (np.diff(places) == 1).all():
            return x.part(axis, int(places[0]), int(places[-1]) + 1)
    return Arranged.of(gathers.take(x.variable(), plain(b, places), axis))


@aten("embedding")
def embedding(b: Building, weight: Any, places: Any, padding: int = -1, *_: Any) -> Arranged:
    if isinstance(places, np.ndarray):
        return taken(b, arranged(b, weight), places, 0)
    return Arranged.of(gathers.embedding(plain(b, places), variable(b, weight), None if padding < 0 else padding))


@aten("index_select")
def index_select(b: Building, x: Arranged, axis: int, places: Any) -> Arranged:
    return taken(b, x, places, axis_of(x, axis))


@aten("index")
def index(b: Building, x: Any, places: Sequence[Any]) -> Arranged:
    given = [(axis, p) for axis, p in enumerate(places) if p is not None]
    if len(given) != 1 or (str(getattr(given[0][1], "dtype", "")) == "bool"):
        raise Cannot("integers for one axis have a counterpart")
    axis, places = given[0]
    if isinstance(places, Arranged) and places.base.type == "bool":
        raise Cannot("a mask takes as many elements as are true: the size depends on data")
    return taken(b, arranged(b, x), places, axis)


@aten("gather")
def gather(b: Building, x: Arranged, axis: int, places: Any, **_: Any) -> Arranged:
    return Arranged.of(gathers.take_along_axis(x.variable(), plain(b, places), axis))


@aten("one_hot")
def one_hot(b: Building, places: Arranged, n: int = -1) -> Arranged:
    if n < 0:
        raise Cannot("num_classes depends on data: give it")
    return Arranged.of(gathers.one_hot(places.variable(), n))


@aten("topk")
def topk(
    b: Building, x: Arranged, k: int, axis: int = -1, largest: bool = True, sorted_: bool = True
) -> tuple[Arranged, Arranged]:
    if not largest:
        raise Cannot("the smallest ones: take those of the negative")
    return tuple(Arranged.of(v) for v in gathers.top_k(x.variable(), whole(k), axis))  # type: ignore[return-value]


@aten("sort")
def sort(b: Building, x: Arranged, axis: int = -1, descending: bool = False, **_: Any) -> tuple[Any, Any]:
    v = x.variable()
    return Arranged.of(gathers.sort(v, axis, descending)), lambda: Arranged.of(gathers.argsort(v, axis, descending))


@aten("argsort")
def argsort(b: Building, x: Arranged, axis: int = -1, descending: bool = False, **_: Any) -> Arranged:
    return Arranged.of(gathers.argsort(x.variable(), axis, descending))

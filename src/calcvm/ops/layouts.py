"""How values lie in the heap where that is not as users see them: the same axes in another order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

LAST = "channels last"  # a user's (N, C, *sizes) as (N, *sizes, C)
WINDOW = "window first"  # a user's weights (O, I, *window) as (*window, I, O)
LAYOUTS = (LAST, WINDOW)
T = TypeVar("T")


def axes(layout: str, rank: int) -> tuple[int, ...]:
    """The axes that users see, in the order in which they lie."""
    if layout == LAST and rank > 2:
        return (0, *range(2, rank), 1)
    return (*range(2, rank), 1, 0) if layout == WINDOW else (*range(rank),)


def back(layout: str, rank: int) -> tuple[int, ...]:
    """The axes as they lie, in the order in which users see them."""
    order = axes(layout, rank)
    return tuple(order.index(axis) for axis in range(rank))


def between(one: str, other: str, rank: int) -> tuple[int, ...]:
    """The axes as they lie in one way, in the order in which they lie in another."""
    order = axes(one, rank)
    return tuple(order.index(axis) for axis in axes(other, rank))


def laid(shape: Sequence[T], layout: str) -> tuple[T, ...]:
    """What users see as ``shape``, as it lies."""
    return tuple(shape[axis] for axis in axes(layout, len(shape)))


def seen(shape: Sequence[T], layout: str) -> tuple[T, ...]:
    """What lies as ``shape``, as users see it."""
    return tuple(shape[axis] for axis in back(layout, len(shape)))

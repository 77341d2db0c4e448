"""Layouts: how values are stored in the heap if not as users see them, with the same axes in another order.

A parameter lies as its first reader wants, for good; so do its gradient and the optimizer's state.  If two operators disagree on
a value, the graph inserts a copy, once per path (``x.channels_last`` in listings).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

LAST = "channels last"  # a user's (N, C, *sizes) as (N, *sizes, C)
WINDOW = "window first"  # a user's weights (O, I, *window) as (*window, I, O)
LAYOUTS = (LAST, WINDOW)
T = TypeVar("T")


def axes(layout: str, rank: int) -> tuple[int, ...]:
    """The axes that users see, in storage order."""
    if layout == LAST and rank > 2:
        return (0, *range(2, rank), 1)
    return (*range(2, rank), 1, 0) if layout == WINDOW else (*range(rank),)


def back(layout: str, rank: int) -> tuple[int, ...]:
    """The stored axes, in the order that users see."""
    order = axes(layout, rank)
    return tuple(order.index(axis) for axis in range(rank))


def between(one: str, other: str, rank: int) -> tuple[int, ...]:
    """The axes stored in one layout, in the order of another."""
    order = axes(one, rank)
    return tuple(order.index(axis) for axis in axes(other, rank))


def laid(shape: Sequence[T], layout: str) -> tuple[T, ...]:
    """The stored shape of a value that users see as ``shape``."""
    return tuple(shape[axis] for axis in axes(layout, len(shape)))


def seen(shape: Sequence[T], layout: str) -> tuple[T, ...]:
    """The shape that users see of a value stored as ``shape``."""
    return tuple(shape[axis] for axis in back(layout, len(shape)))

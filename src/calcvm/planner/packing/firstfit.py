"""First-fit with gap reuse: each item in turn goes into the lowest gap between the placed items."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence

import numpy as np


def first_fit(
    sizes: Sequence[int],
    first: Sequence[int],
    last: Sequence[int],
    order: Iterable[int],
    below: int,
    offsets: dict[int, int],
) -> bool:
    """Place the items of ``order``, in addition to those in ``offsets``; stop and return False if one does not end below ``below``."""
    placed = sorted((o, o + sizes[i], first[i], last[i]) for i, o in offsets.items())
    largest = max((sizes[i] for i in offsets), default=0)
    full = np.zeros(max(last, default=0) + 1, np.int64)  # per time: the offset below which nothing is free
    for start, stop, f, e in placed:
        _fill(full[f : e + 1], start, stop)
    for i in order:
        size, f, e = sizes[i], first[i], last[i]
        top = int(full[f : e + 1].max())
        for k in range(bisect_right(placed, (top - largest,)), len(placed)):
            start, stop, pf, pe = placed[k]
            if pf <= e and pe >= f:
                if start - top >= size:
                    break
                if stop > top:
                    top = stop
        if top + size >= below:
            return False
        offsets[i] = top
        insort(placed, (top, top + size, f, e))
        largest = max(largest, size)
        _fill(full[f : e + 1], top, top + size)
    return True


def _fill(full: np.ndarray, start: int, stop: int) -> None:
    full[full == start] = stop

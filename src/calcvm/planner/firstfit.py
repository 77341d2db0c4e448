"""First-fit with gap reuse: items one after the other, each as low as it can lie between those that are placed."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence

import numpy as np


MANY = 100  # items that are placed: from there on a profile over time says of most where they lie


def first_fit(
    sizes: Sequence[int],
    first: Sequence[int],
    last: Sequence[int],
    order: Iterable[int],
    below: int,
    offsets: dict[int, int],
) -> bool:
    """Place the items of ``order`` beside those that ``offsets`` has; False, and no more is placed, where one ends not below."""
    placed = sorted((o, o + sizes[i], first[i], last[i]) for i, o in offsets.items())
    profile = None
    for i in order:
        size, f, e = sizes[i], first[i], last[i]
        if profile is None and len(placed) >= MANY:
            profile = _Profile(max(last) + 1, placed)
        top = profile.top(f, e, size) if profile else None
        if top is None:
            top = 0
            for start, stop, pf, pe in placed:
                if pf <= e and pe >= f:
                    if start - top >= size:
                        break
                    if stop > top:
                        top = stop
        if top + size >= below:
            return False
        offsets[i] = top
        insort(placed, (top, top + size, f, e))
        if profile:
            profile.add(top + size, f, e, size)
    return True


class _Profile:
    """Of each time where what is placed ends, and how much of that it takes."""

    def __init__(self, times: int, placed: Iterable[tuple[int, int, int, int]]):
        self.ends, self.taken = np.zeros(times, np.int64), np.zeros(times, np.int64)
        for start, stop, f, e in placed:
            self.add(stop, f, e, stop - start)

    def top(self, f: int, e: int, size: int) -> int | None:
        """Where an item goes that finds no gap at the time at which most lies below it (None: there may be one)."""
        t = f + int(self.ends[f : e + 1].argmax())
        end = int(self.ends[t])
        return end if end - int(self.taken[t]) < size else None

    def add(self, stop: int, f: int, e: int, size: int) -> None:
        own = self.ends[f : e + 1]
        np.maximum(own, stop, out=own)
        self.taken[f : e + 1] += size

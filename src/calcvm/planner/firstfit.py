"""First-fit with gap reuse: items one after the other, each as low as it can lie between those that are placed."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence


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
    for i in order:
        size, f, e = sizes[i], first[i], last[i]
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
    return True

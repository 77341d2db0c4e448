"""Dynamic storage allocation: intervals in time and sizes to offsets.

First-fit with gap reuse in several orders, against the liveness lower bound; where a gap remains, a
local search over the order with a fixed budget and a fixed seed, so that equal inputs give equal plans.
"""

from __future__ import annotations

import random
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Packing:
    """Offsets of the items, the height they need, and the liveness lower bound of that height."""

    offsets: tuple[int, ...]
    height: int
    bound: int


def load(sizes: Sequence[int], first: Sequence[int], last: Sequence[int]) -> list[int]:
    """Live size at each time from 0 to the last one (lifetimes inclusive)."""
    if not sizes:
        return []
    change = [0] * (max(last) + 2)
    for size, f, e in zip(sizes, first, last, strict=True):
        change[f] += size
        change[e + 1] -= size
    out, total = [], 0
    for c in change[:-1]:
        total += c
        out.append(total)
    return out


def pack(sizes: Sequence[int], first: Sequence[int], last: Sequence[int], *, effort: int = 4000) -> Packing:
    """Place every item so that no two that are live at once overlap; the height is kept small.

    Parameters
    ----------
    sizes : size of each item.
    first, last : lifetimes, inclusive.
    effort : items that the local search may place, over all its trials (0: plain orders alone).
    """
    bound = max(load(sizes, first, last), default=0)
    offsets, height = [0] * len(sizes), 0
    parts = sorted(_segments(sizes, first, last), key=lambda p: -len(p))
    for part in parts:
        local = [0] * len(sizes)
        height = max(height, _pack_segment(part, sizes, first, last, effort, max(bound, height), local))
        for i in part:
            offsets[i] = local[i]
    return Packing(tuple(offsets), height, bound)


def _segments(sizes: Sequence[int], first: Sequence[int], last: Sequence[int]) -> list[list[int]]:
    """Items split where nothing is live."""
    out: list[list[int]] = []
    end = -1
    for i in sorted((i for i in range(len(sizes)) if sizes[i]), key=lambda i: (first[i], i)):
        if not out or first[i] > end:
            out.append([])
        out[-1].append(i)
        end = max(end, last[i])
    return out


def _pack_segment(
    items: list[int],
    sizes: Sequence[int],
    first: Sequence[int],
    last: Sequence[int],
    effort: int,
    enough: int,
    offsets: list[int],
) -> int:
    """Pack one segment into ``offsets``; stops at a height of ``enough``."""
    best_order: list[int] = []
    best = 1 << 62

    def attempt(order: list[int]) -> int:
        nonlocal best, best_order
        height = _first_fit(order, sizes, first, last, best, trial)
        if height < best:
            best, best_order = height, order
            for i in items:
                offsets[i] = trial[i]
        return height

    trial = [0] * len(sizes)
    for order in _orders(items, sizes, first, last):
        attempt(order)
        if best <= enough:
            return best
    rng = random.Random(len(items))
    current, current_height = best_order, best
    for _ in range(effort // max(len(items), 1)):
        top = [k for k, i in enumerate(current) if offsets[i] + sizes[i] == best]
        order = current[:]
        k = rng.choice(top) if top and rng.random() < 0.5 else rng.randrange(len(order))
        moved = order.pop(k)
        order.insert(rng.randrange(k + 1) if rng.random() < 0.8 else rng.randrange(len(order) + 1), moved)
        height = attempt(order)
        if height <= current_height:
            current, current_height = order, height
        if best <= enough:
            break
    return best


def _orders(items: list[int], sizes: Sequence[int], first: Sequence[int], last: Sequence[int]) -> list[list[int]]:
    """Plain orders: size, area, duration, birth, conflicts times size."""
    duration = {i: last[i] - first[i] + 1 for i in items}
    span = {t: 0 for i in items for t in (first[i], last[i])}
    events = sorted(span)
    births = sorted(first[i] for i in items)
    deaths = sorted(last[i] for i in items)
    born, dead, b, d = {}, {}, 0, 0
    for t in events:  # born by the end of t, dead before t
        while b < len(births) and births[b] <= t:
            b += 1
        while d < len(deaths) and deaths[d] < t:
            d += 1
        born[t], dead[t] = b, d
    conflicts = {i: born[last[i]] - dead[first[i]] for i in items}
    return [
        sorted(items, key=lambda i: (-sizes[i], -duration[i], first[i], i)),
        sorted(items, key=lambda i: (-duration[i], -sizes[i], first[i], i)),
        sorted(items, key=lambda i: (-sizes[i] * duration[i], first[i], i)),
        sorted(items, key=lambda i: (-sizes[i] * conflicts[i], first[i], i)),
        sorted(items, key=lambda i: (first[i], -duration[i], -sizes[i], i)),
    ]


def _first_fit(
    order: list[int],
    sizes: Sequence[int],
    first: Sequence[int],
    last: Sequence[int],
    limit: int,
    offsets: list[int],
) -> int:
    """Each item at the lowest gap that fits; gives up as soon as the height reaches ``limit``."""
    placed: list[tuple[int, int, int, int]] = []  # (offset, end, first, last), by offset
    height = 0
    for i in order:
        size, f, e = sizes[i], first[i], last[i]
        top = 0
        for start, stop, pf, pe in placed:
            if pf <= e and pe >= f:
                if start - top >= size:
                    break
                if stop > top:
                    top = stop
        offsets[i] = top
        if top + size > height:
            height = top + size
            if height >= limit:
                return height
        insort(placed, (top, top + size, f, e))
    return height

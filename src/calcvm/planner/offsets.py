"""Dynamic storage allocation: intervals in time and sizes to offsets.

First-fit with gap reuse in several orders, against the liveness lower bound.  Where a gap remains, a
squeaky-wheel search: items are placed lowest offset first, and those that end up too high gain priority
for the next trial (Joslin and Clements, Squeaky Wheel Optimization, 1999).  Its budget and its seed are
fixed, so that equal inputs give equal plans; the result is never worse than the best plain order.
"""

from __future__ import annotations

import random
from bisect import insort
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from calcvm.record import record


@record
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


def pack(
    sizes: Sequence[int], first: Sequence[int], last: Sequence[int], *, effort: int = 4000, enough: int = 0
) -> Packing:
    """Place every item so that no two that are live at once overlap; the height is kept small.

    Parameters
    ----------
    sizes : size of each item.
    first, last : lifetimes, inclusive.
    effort : items that the search may place, over all its trials (0: plain orders alone).
    enough : a height that is good enough to stop at.
    """
    bound = max(load(sizes, first, last), default=0)
    offsets, height = [0] * len(sizes), 0
    for part in _segments(sizes, first, last):
        segment = _Segment([sizes[i] for i in part], [first[i] for i in part], [last[i] for i in part])
        segment.pack(effort, max(bound, height, enough))
        height = max(height, segment.height)
        for i, offset in zip(part, segment.offsets, strict=True):
            offsets[i] = offset
    return Packing(tuple(offsets), height, bound)


def _segments(sizes: Sequence[int], first: Sequence[int], last: Sequence[int]) -> list[list[int]]:
    """Items split where nothing is live, the largest part first."""
    out: list[list[int]] = []
    end = -1
    for i in sorted((i for i in range(len(sizes)) if sizes[i]), key=lambda i: (first[i], i)):
        if not out or first[i] > end:
            out.append([])
        out[-1].append(i)
        end = max(end, last[i])
    return sorted(out, key=lambda part: -len(part))


class _Segment:
    """Items that must be packed together, and the best packing found."""

    def __init__(self, sizes: list[int], first: list[int], last: list[int]):
        self.sizes, self.first, self.last = sizes, first, last
        self.offsets: list[int] = []
        self.height = 1 << 62
        times = {t: k for k, t in enumerate(sorted({*first, *(e + 1 for e in last)}))}
        self.duration = [times[e + 1] - times[f] for f, e in zip(first, last, strict=True)]  # in events

    def pack(self, effort: int, enough: int) -> None:
        """Stops at a height of ``enough``."""
        for order in self._orders():
            self._first_fit(order)
            if self.height <= enough:
                return
        if effort:
            self._search(effort, enough)

    def _orders(self) -> list[list[int]]:
        """Plain orders: size, duration, area, conflicts times size, birth."""
        size, duration, first, items = self.sizes, self.duration, self.first, range(len(self.sizes))
        conflicts = self._count_conflicts()
        return [
            sorted(items, key=lambda i: (-size[i], -duration[i], first[i], i)),
            sorted(items, key=lambda i: (-duration[i], -size[i], first[i], i)),
            sorted(items, key=lambda i: (-size[i] * duration[i], first[i], i)),
            sorted(items, key=lambda i: (-size[i] * conflicts[i], first[i], i)),
            sorted(items, key=lambda i: (first[i], -duration[i], -size[i], i)),
        ]

    def _count_conflicts(self) -> list[int]:
        """How many items are live together with each: born by its end, less dead before its birth."""
        born: dict[int, int] = {}
        dead: dict[int, int] = {}
        births, deaths, b, d = sorted(self.first), sorted(self.last), 0, 0
        for t in sorted({*births, *deaths}):
            while b < len(births) and births[b] <= t:
                b += 1
            while d < len(deaths) and deaths[d] < t:
                d += 1
            born[t], dead[t] = b, d
        return [born[e] - dead[f] for f, e in zip(self.first, self.last, strict=True)]

    def _first_fit(self, order: list[int]) -> None:
        """Each item at the lowest gap that fits; gives up when the height reaches the best one."""
        placed: list[tuple[int, int, int, int]] = []  # (offset, end, first, last), by offset
        offsets, height = [0] * len(order), 0
        for i in order:
            size, f, e = self.sizes[i], self.first[i], self.last[i]
            top = 0
            for start, stop, pf, pe in placed:
                if pf <= e and pe >= f:
                    if start - top >= size:
                        break
                    if stop > top:
                        top = stop
            offsets[i] = top
            height = max(height, top + size)
            if height >= self.height:
                return
            insort(placed, (top, top + size, f, e))
        self.offsets, self.height = offsets, height

    # ------------------------------------------------------------ search
    def _search(self, effort: int, enough: int) -> None:
        n = len(self.sizes)
        rng = random.Random(n)
        neighbours = self._neighbours()
        area = [s * d for s, d in zip(self.sizes, self.duration, strict=True)]
        seeds = [[-x / max(by) for x in by] for by in (area, self.duration, self.sizes)]
        priority = seeds[0][:]
        for trial in range(effort // n):
            if trial < len(seeds):
                offsets = self._lowest_first(seeds[trial], neighbours)
            else:
                offsets = self._lowest_first(priority, neighbours)
                limit = 0.93 * self.height
                for i, offset in enumerate(offsets):
                    if offset + self.sizes[i] > limit:
                        priority[i] -= 0.3 * rng.random()
                if trial % 200 == 0:
                    priority = [p * rng.uniform(0.5, 1.5) for p in seeds[0]]
            if self.height <= enough:
                return

    def _neighbours(self) -> list[list[int]]:
        """Items that are live together with each."""
        out: list[list[int]] = [[] for _ in self.sizes]
        order = sorted(range(len(out)), key=lambda i: self.first[i])
        for k, i in enumerate(order):
            for j in order[k + 1 :]:
                if self.first[j] > self.last[i]:
                    break
                out[i].append(j)
                out[j].append(i)
        return out

    def _lowest_first(self, priority: list[float], neighbours: list[list[int]]) -> list[int]:
        """Whatever can lie lowest on top of what is placed goes next; the least priority number first."""
        n = len(self.sizes)
        offsets = [0] * n
        placed = [False] * n
        queue = [(0, p, i) for i, p in enumerate(priority)]
        heapify(queue)
        height = 0
        while queue:
            offset, _, i = heappop(queue)
            if placed[i] or offset != offsets[i]:
                continue  # an entry from before something was placed below it
            placed[i] = True
            end = offset + self.sizes[i]
            height = max(height, end)
            for j in neighbours[i]:
                if not placed[j] and offsets[j] < end:
                    offsets[j] = end
                    heappush(queue, (end, priority[j], j))
        if height < self.height:
            self.offsets, self.height = offsets[:], height
        return offsets

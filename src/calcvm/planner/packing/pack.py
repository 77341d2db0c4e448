"""Dynamic storage allocation: offsets for items with a size and an interval of time.

The packer tries first-fit with gap reuse in several orders, and stops at the liveness lower bound.  If it
ends above the bound, it packs from the peak outward (`calcvm.planner.packing.peak`), and then looks for a
canonical solution of the whole.  The last resort is a descent over orders: items are placed lowest offset
first, and the order breaks ties.  Each step moves one item that ends high to an earlier place, and keeps
the move unless the packing gets worse.  Budget and seed are fixed, so equal inputs give equal plans.  The
result is never worse than the best plain order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from calcvm.frozen import frozen
from calcvm.planner.packing.firstfit import first_fit
from calcvm.planner.packing.minimalloc import NETWORK, Canonical
from calcvm.planner.packing.peak import Peak

AROUND = 8  # the search from the peak gets one in this many placements
SHARE = 16  # the canonical search gets one in this many placements, since each takes that much longer


@frozen
class Packing:
    """Offsets of the items, the height they need, its liveness lower bound, and a note on why the search ended."""

    offsets: tuple[int, ...]
    height: int
    bound: int
    note: str = ""


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
    """Place the items so that no two that are live at once overlap, with a small height.

    Parameters
    ----------
    sizes : size of each item.
    first, last : lifetimes, inclusive.
    effort : number of placements in all trials of the search (0: plain orders only).
    enough : a height at which to stop.
    """
    bound = max(load(sizes, first, last), default=0)
    offsets, height = [0] * len(sizes), 0
    for part in segments(sizes, first, last):
        segment = _Segment([sizes[i] for i in part], [first[i] for i in part], [last[i] for i in part])
        segment.pack(effort, max(bound, height, enough))
        height = max(height, segment.height)
        for i, offset in zip(part, segment.offsets, strict=True):
            offsets[i] = offset
    return Packing(tuple(offsets), height, bound)


def segments(sizes: Sequence[int], first: Sequence[int], last: Sequence[int]) -> list[list[int]]:
    """Items split at times when nothing is live, the largest part first."""
    out: list[list[int]] = []
    end = -1
    for i in sorted((i for i in range(len(sizes)) if sizes[i]), key=lambda i: (first[i], i)):
        if not out or first[i] > end:
            out.append([])
        out[-1].append(i)
        end = max(end, last[i])
    return sorted(out, key=lambda part: -len(part))


class _Segment:
    """Items to pack together, and the best packing found."""

    def __init__(self, sizes: list[int], first: list[int], last: list[int]):
        self.sizes, self.first, self.last = sizes, first, last
        self.offsets: list[int] = []
        self.height = 1 << 62
        times = {t: k for k, t in enumerate(sorted({*first, *(e + 1 for e in last)}))}
        self.duration = [times[e + 1] - times[f] for f, e in zip(first, last, strict=True)]  # in events

    def pack(self, effort: int, enough: int) -> None:
        """Search for a packing; stop at a height of ``enough``."""
        for order in self._orders():
            self._first_fit(order)
            if self.height <= enough:
                return
        if effort and not self._from_peak(effort, enough) and not self._canonical(effort, enough):
            self._search(effort, enough)

    def _orders(self) -> list[list[int]]:
        """Plain orders: by size, duration, area, conflicts times size, and birth."""
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
        """For each item, how many are live together with it: born by its end, minus dead before its birth."""
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
        """Place each item in the lowest gap that fits; give up if the height reaches the best one."""
        offsets: dict[int, int] = {}
        if first_fit(self.sizes, self.first, self.last, order, self.height, offsets):
            self.offsets = [offsets[i] for i in range(len(order))]
            self.height = max(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    # ------------------------------------------------------------ search
    def _from_peak(self, effort: int, enough: int) -> bool:
        """Search from the peak outward for a packing of height ``enough``; whether one was found."""
        peak = Peak(self.sizes, self.first, self.last, load(self.sizes, self.first, self.last), enough)
        found = peak.search(effort // AROUND)
        if found is None:
            return False
        self.offsets, self.height = [found[i] for i in range(len(self.sizes))], enough
        return True

    def _canonical(self, effort: int, enough: int) -> bool:
        """Search for a canonical packing of height ``enough``; whether one was found."""
        search = Canonical(self.sizes, self.first, self.last, enough)
        if not search.search(lambda: search.placed >= effort // SHARE, NETWORK):
            return False
        self.offsets, self.height = search.offsets.tolist(), enough
        return True

    def _search(self, effort: int, enough: int) -> None:
        """Descend over orders, starting from the plain ones."""
        n, rng = len(self.sizes), random.Random(len(self.sizes))
        if (sum(self.sizes) + 1) * n > _NEVER:  # an offset and a rank must fit into one integer
            return
        lowest_first = _LowestFirst(self)
        best: tuple[tuple[int, int], list[int], list[int]] | None = None
        starts = self._orders()
        for trial in range(effort // n):
            if trial < len(starts):
                order = starts[trial]
            else:
                assert best is not None
                order = self._moved(rng, best[1], best[2], best[0][0])
            offsets = lowest_first(order)
            ends = [o + s for o, s in zip(offsets, self.sizes, strict=True)]
            height = max(ends)
            if height < self.height:
                self.offsets, self.height = offsets, height
                if height <= enough:
                    return
            cost = height, sum(end - enough for end in ends if end > enough)
            if best is None or cost <= best[0]:
                best = cost, order, ends

    @staticmethod
    def _moved(rng: random.Random, order: list[int], ends: list[int], height: int) -> list[int]:
        """The order with one item that ends high moved to an earlier place."""
        limit = height * (1 - 0.25 * rng.random() ** 2)
        high = [k for k, i in enumerate(order) if k and ends[i] > limit]
        out = order[:]
        if high:
            k = rng.choice(high)
            out.insert(rng.randrange(k), out.pop(k))
        return out


_NEVER = 1 << 62


class _LowestFirst:
    """Packing by lowest offset: the next item is the one that can lie lowest on top of the placed ones."""

    def __init__(self, segment: _Segment):
        self.birth = sorted(range(len(segment.sizes)), key=lambda i: (segment.first[i], i))
        self.sizes = [segment.sizes[i] for i in self.birth]
        self.first = [segment.first[i] for i in self.birth]
        self.last = np.array([segment.last[i] for i in self.birth])
        self.born = np.searchsorted(self.first, self.last, side="right").tolist()  # by the end of each

    def __call__(self, order: list[int]) -> list[int]:
        """Offsets of the items; ``order`` breaks ties."""
        n = len(order)
        place = np.empty(n, np.int64)
        place[order] = np.arange(n)
        rank = place[self.birth]
        key = rank.copy()  # n * (lowest offset on top of the placed items) + rank
        above, together = np.empty(n, np.int64), np.empty(n, np.bool_)
        offsets = [0] * n
        for _ in range(n):
            k = int(key.argmin())
            offset = int(key[k]) // n
            offsets[self.birth[k]] = offset
            key[k] = _NEVER
            born = self.born[k]
            np.greater_equal(self.last[:born], self.first[k], out=together[:born])
            np.add(rank[:born], (offset + self.sizes[k]) * n, out=above[:born])
            np.maximum(key[:born], above[:born], out=key[:born], where=together[:born])
        return offsets

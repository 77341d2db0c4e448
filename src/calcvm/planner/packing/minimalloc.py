"""Packing by canonical solutions: a depth-first search for offsets within a height, with restarts that learn.

Every packing can be pushed down and built from the bottom up: items in the order of their offsets, each on top of the items
placed below it.  So the search tries only such orders.  It backtracks if the remaining items cannot lie above the placed ones
(Moffitt 2023, MiniMalloc: canonical solutions, bounds by section, no gap that another item would fill).  Items that separate
into parts that do not overlap in time are placed part by part.  A *section* is the time between two events.

After a fixed number of placements without an answer, the search restarts.  Items that were pending when it had to backtrack
move forward in the order, plus some noise.  So it learns from failures which items are difficult (as Boussemart et al. 2004 do
for constraints).  Equal inputs and equal counts of placements give equal answers.

This search alone packed six of the eleven public instances of MiniMalloc within 53 thousand placements: 3 s on a core of Zen 5
(restarts of 1000).  The number of placements varies much with chance, also with the order of equal items.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from calcvm.frozen import frozen

LEARNED = 0.5  # how far the most difficult item moves forward in an order, as a part of the number of items
FORGET = 0.8  # the part of the learned difficulty that a restart keeps
NEVER = 1 << 61


@frozen
class SearchSetting:
    """Parameters of the search.

    orders : orders that break ties, used in turn.
    placements : placements until a restart, before and after learning; at least ``times`` the number of items.
    chance : noise in the order of a restart, as a part of the number of items.
    """

    orders: tuple[str, ...]
    placements: tuple[int, int]
    times: float
    chance: float


HARD = SearchSetting(("duration", "crowd"), (3000, 500), 1.5, 0.1)
NETWORK = SearchSetting(("reach",), (0, 0), 1.5, 0.02)  # values of the forward form a stack, highest at the peak


@dataclass
class _Frame:
    """A node of the search: the candidates for the next placement, and the parts that remain after the current one."""

    items: np.ndarray
    choices: list[int]
    tops: np.ndarray
    rest: np.ndarray
    span: slice
    offset: int = 0
    parts: list[np.ndarray] | None = None


class Canonical:
    """Items that are live together, a height, and the learned difficulty of each.

    Parameters
    ----------
    sizes, first, last : of the items; lifetimes are inclusive.
    height : upper limit of their ends.
    duration : of each item, if it is longer than ``first`` to ``last``.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        first: Sequence[int],
        last: Sequence[int],
        height: int,
        duration: Sequence[int] | None = None,
    ):
        self.n, self.height, self.rng = len(sizes), height, random.Random(len(sizes))
        times = sorted({*first, *(t + 1 for t in last)})
        self.sizes = np.array(sizes, np.int64)
        self.first = np.searchsorted(times, first)  # sections, inclusive
        self.last = np.searchsorted(times, [t + 1 for t in last]) - 1
        living = [np.flatnonzero((self.first <= s) & (s <= self.last)) for s in range(len(times) - 1)]
        self.living = np.concatenate(living)  # items by section
        self.starts = np.cumsum([0, *map(len, living)])
        self.meets = [(self.first <= e) & (f <= self.last) for f, e in zip(self.first, self.last, strict=True)]
        self.load = np.array([self.sizes[items].sum() for items in living])
        self.orders = self._orders(np.array(last) - np.array(first) + 1 if duration is None else np.array(duration))
        self.failures = np.zeros(self.n)
        self.placed = self.begun = 0
        self.offsets = np.zeros(self.n, np.int64)

    def _orders(self, duration: np.ndarray) -> dict[str, np.ndarray]:
        """Ranks of the items: by duration, by the load of their times, and by how far they extend past the peak."""
        crowd = np.array([self.load[f : e + 1].max() for f, e in zip(self.first, self.last, strict=True)])
        peak = int(self.load.argmax())
        reach = np.minimum(np.maximum(self.last - peak, 0), np.maximum(peak - self.first, 0))
        keys = {"duration": (-crowd, -duration), "crowd": (-duration, -crowd), "reach": (-duration, -reach)}
        equal = np.arange(self.n), -self.sizes * duration
        return {name: _inverse(np.lexsort((*equal, *key))) for name, key in keys.items()}

    def search(self, stop: Callable[[], bool], setting: SearchSetting = HARD) -> bool | None:
        """Whether the items fit, with their places in ``offsets``; None if ``stop`` came first.

        The next call continues with the next order, and may find another packing.
        """
        first, then = (max(count, int(setting.times * self.n)) for count in setting.placements)
        while not stop():
            rank, count = self.orders[setting.orders[self.begun % len(setting.orders)]], first
            if self.begun >= len(setting.orders):
                rank, count = self._learned(rank, setting.chance), then
            self.begun += 1
            found = self._descend(rank, self.placed + count, stop)
            if found is not None:
                return found
        return None

    def _learned(self, order: np.ndarray, by: float) -> np.ndarray:
        """Ranks of the items, adjusted by the learned difficulty and noise."""
        worst = max(self.failures.max(), 1.0)
        chance = np.array([self.rng.random() - 0.5 for _ in range(self.n)])
        order = np.argsort(order + self.n * (by * chance - LEARNED * self.failures / worst), kind="stable")
        self.failures *= FORGET
        return _inverse(order)

    def _descend(self, rank: np.ndarray, end: int, stop: Callable[[], bool]) -> bool | None:
        """One search in which ``rank`` breaks ties (None: no answer until ``end`` placements)."""
        self.rank, self.tops, self.rest = rank, np.zeros(self.n, np.int64), self.load.copy()
        self.lowest = np.full(self.n, NEVER)
        by_birth = np.lexsort((np.arange(self.n), self.first))
        stack = [self._open(by_birth, 0)]
        while True:
            frame = stack[-1]
            if frame.parts:
                stack.append(self._open(frame.parts.pop(), frame.offset))
            elif frame.parts is not None:  # all of its items are placed
                stack.pop()
                if not stack:
                    return True
            elif frame.choices:
                if self.placed >= end or stop():
                    return None
                self._place(frame)
            else:
                stack.pop()
                if not stack:
                    return False
                self._take_back(stack[-1])

    def _open(self, items: np.ndarray, least: int) -> _Frame:
        """The candidates for the next placement among ``items`` (by birth), at ``least`` or above; none if they cannot all fit."""
        tops, first, last = self.tops[items], self.first[items[0]], self.last[items].max() + 1
        span = slice(int(first), int(last))
        self.lowest[items] = lowest = np.maximum(tops, least)
        start, stop = self.starts[first], self.starts[last]
        floor = np.minimum.reduceat(self.lowest[self.living[start:stop]], self.starts[first:last] - start)
        rest = self.rest[span]
        over = (floor + rest > self.height) & (rest > 0)
        choices: list[int] = []
        if over.any():
            s = int(over.argmax()) + span.start
            living = self.living[self.starts[s] : self.starts[s + 1]]
            self.failures[living[self.lowest[living] < NEVER]] += 1
        else:  # an item above the end of another one would leave a gap that this one would fill
            able = (tops >= least) & (tops < (lowest + self.sizes[items]).min())
            ready = items[able]
            choices = ready[np.lexsort((self.rank[ready], tops[able]))[::-1]].tolist()
        return _Frame(items, choices, tops, rest.copy(), span)

    def _place(self, frame: _Frame) -> None:
        """Place the next choice; split the remaining items into parts that do not overlap in time."""
        i = frame.choices.pop()
        frame.offset = offset = int(self.tops[i])
        self.placed += 1
        self.offsets[i], self.lowest[i] = offset, NEVER
        end = offset + self.sizes[i]
        left = frame.items[frame.items != i]
        self.tops[left] = np.where(self.meets[i][left], np.maximum(self.tops[left], end), self.tops[left])
        self.rest[self.first[i] : self.last[i] + 1] -= self.sizes[i]
        if len(left):
            apart = self.first[left[1:]] > np.maximum.accumulate(self.last[left])[:-1]
            frame.parts = sorted(np.split(left, np.flatnonzero(apart) + 1), key=len, reverse=True)
        else:
            frame.parts = []

    def _take_back(self, frame: _Frame) -> None:
        """Undo the choice that failed."""
        self.tops[frame.items], self.rest[frame.span] = frame.tops, frame.rest
        self.lowest[frame.items] = np.maximum(frame.tops, 0)
        frame.parts = None


def _inverse(order: np.ndarray) -> np.ndarray:
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return place

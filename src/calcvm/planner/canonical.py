"""Packing by canonical solutions: a depth-first search for offsets within a height, with restarts that learn.

Every packing can be pushed down and built from the bottom up: items in the order of their offsets, each lying on top of
what is placed below it.  So only such orders are tried, and one is given up where the items that are left cannot lie
above what is placed (Moffitt 2023, MiniMalloc: canonical solutions, bounds by section, what leaves a gap that another
item would fill).  What falls apart in time is placed part by part.  A *section* is the time between two events.

A search that has placed so many items without an answer starts anew, with items earlier that were to be placed where it
had to give up, and a little chance; which items are difficult is learned from failures (as of constraints in Boussemart
et al. 2004).  Equal inputs and equal counts of placements give equal answers.

Of the eleven public instances in docs/architecture.md the search alone packed six within 53 thousand placements, 3 s on a
core of Zen 5 (restarts of 1000); how many an instance takes depends much on chance, also on the order of equal items.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from calcvm.record import record

LEARNED = 0.5  # and by which the most difficult item moves forward
FORGET = 0.8  # of what was learned, what a restart keeps
NEVER = 1 << 61


@record
class Way:
    """How to search.

    orders : in which items go first between equals, in turn.
    placements : until a restart, without and with what was learned; at least ``times`` the number of items.
    chance : by how much of the number of items chance moves one in the order of a restart.
    """

    orders: tuple[str, ...]
    placements: tuple[int, int]
    times: float
    chance: float


HARD = Way(("duration", "crowd"), (3000, 500), 1.5, 0.1)
NETWORK = Way(("reach",), (0, 0), 1.5, 0.02)  # values of the forward are a stack, highest at the peak


@dataclass
class _Frame:
    """Items of which one after the other goes first, at or above an offset; the parts that are left once it is placed."""

    items: np.ndarray
    choices: list[int]
    tops: np.ndarray
    rest: np.ndarray
    span: slice
    offset: int = 0
    parts: list[np.ndarray] | None = None


class Canonical:
    """Items that are live together, a height, and what is known of how difficult each is.

    Parameters
    ----------
    sizes, first, last : of the items; lifetimes are inclusive.
    height : that they must not exceed.
    duration : of each, where that is more than its time here.
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
        """Places of the items: by duration, by how crowded their times are, and by how far they reach over the peak."""
        crowd = np.array([self.load[f : e + 1].max() for f, e in zip(self.first, self.last, strict=True)])
        peak = int(self.load.argmax())
        reach = np.minimum(np.maximum(self.last - peak, 0), np.maximum(peak - self.first, 0))
        keys = {"duration": (-crowd, -duration), "crowd": (-duration, -crowd), "reach": (-duration, -reach)}
        equal = np.arange(self.n), -self.sizes * duration
        return {name: _inverse(np.lexsort((*equal, *key))) for name, key in keys.items()}

    def search(self, stop: Callable[[], bool], way: Way = HARD) -> bool | None:
        """Whether the items fit, and then ``offsets`` say where; None where ``stop`` came first.

        One more search goes on with the next order, and may find another packing.
        """
        first, then = (max(count, int(way.times * self.n)) for count in way.placements)
        while not stop():
            rank, count = self.orders[way.orders[self.begun % len(way.orders)]], first
            if self.begun >= len(way.orders):
                rank, count = self._learned(rank, way.chance), then
            self.begun += 1
            found = self._descend(rank, self.placed + count, stop)
            if found is not None:
                return found
        return None

    def _learned(self, order: np.ndarray, by: float) -> np.ndarray:
        """Places of the items by what was learned, and chance."""
        worst = max(self.failures.max(), 1.0)
        chance = np.array([self.rng.random() - 0.5 for _ in range(self.n)])
        order = np.argsort(order + self.n * (by * chance - LEARNED * self.failures / worst), kind="stable")
        self.failures *= FORGET
        return _inverse(order)

    def _descend(self, rank: np.ndarray, end: int, stop: Callable[[], bool]) -> bool | None:
        """One search in an order of the items between equals (None: not until so many are placed)."""
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
        """The choices of what goes next of ``items`` (by birth), at ``least`` or above: none where they cannot all fit."""
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
        else:  # one that lies above the end of another would leave it a gap to fall into
            able = (tops >= least) & (tops < (lowest + self.sizes[items]).min())
            ready = items[able]
            choices = ready[np.lexsort((self.rank[ready], tops[able]))[::-1]].tolist()
        return _Frame(items, choices, tops, rest.copy(), span)

    def _place(self, frame: _Frame) -> None:
        """The next choice at its place; what is left, in parts that do not meet in time."""
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
        """All as it was before the choice that failed."""
        self.tops[frame.items], self.rest[frame.span] = frame.tops, frame.rest
        self.lowest[frame.items] = np.maximum(frame.tops, 0)
        frame.parts = None


def _inverse(order: np.ndarray) -> np.ndarray:
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return place

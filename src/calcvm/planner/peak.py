"""Packing from the peak outward: what is hard is the time in which almost all of the height is taken.

Networks' traces are that full for a part of the backward, a *window* in time.  What lives through all of it may be a pile at
the bottom: any packing stays one, within the window, where such items go down and what was below them up.  So a window is a
small problem, the few items that begin or end in it above the pile, and canonical solutions (`calcvm.planner.canonical`) are
soon found.  Before and after it there is room: with the window's items in place, first-fit, the largest item first, mostly
suffices for the others.  Where not, another solution of the window or a wider one may do.

So all 36 traces of the zoo (12 networks at batch 1, 8, 32) are packed at the lower bound, of which orders and canonical
solutions of the whole left 0.32, 0.05 and 0.02 % (GoogLeNet, ResNet-50, ResNet-34 at batch 1, 2 workers), in 0.02 to 0.05 s.
Tried in vain on these three: items that fit nowhere driving others out (15 s each), CP-SAT on whole traces (100 to 200 s), other
orders of the same peak (nine batches, seven widths).  Of other batches and teams some gaps stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from calcvm.planner.canonical import Canonical, Way
from calcvm.planner.firstfit import first_fit

LEVELS = (0.99, 0.985, 0.98, 0.97, 0.96, 0.95, 0.93, 0.9, 0.85)  # of the most that is live: windows reach as far
LARGEST = 1000  # items of a window, and at most half of all: more are no small problem
WINDOW = Way(("reach",), (0, 0), 1.2, 0.03)
TURN = 4  # times the number of a window's items are placed before it is the next one's turn


class Peak:
    """Items that are live together, and windows around the time at which most is live.

    Parameters
    ----------
    sizes, first, last : of the items; lifetimes are inclusive.
    load : live size at each time.
    height : that no item may end above.
    """

    def __init__(
        self, sizes: Sequence[int], first: Sequence[int], last: Sequence[int], load: Sequence[int], height: int
    ):
        self.sizes, self.first, self.last, self.height = sizes, first, last, height
        self.load, self.most = load, max(load)
        self.placed = 0
        self.impossible = False

    def search(self, effort: int) -> dict[int, int] | None:
        """Offsets of all items; None where so many placements have found none, or none are: a window is ``impossible``."""
        windows: list[Window] = []
        for window in self.windows():  # each is made when its first turn comes
            windows.append(window)
            if (offsets := window.packing()) or self.impossible or self.placed >= effort:
                return offsets
        while windows:
            for window in windows:
                if (offsets := window.packing()) or self.impossible or self.placed >= effort:
                    return offsets
        return None

    def windows(self) -> Iterator[Window]:
        """From the first to the last time at which so much is live, for each level: the narrowest first."""
        done = set()
        for level in LEVELS:
            times = [t for t, live in enumerate(self.load) if live >= level * self.most]
            if (span := (times[0], times[-1])) not in done:
                done.add(span)
                window = Window(self, *span)
                if 0 < len(window.inside) <= min(LARGEST, len(self.sizes) // 2):
                    yield window


class Window:
    """The items that live through a time, those inside, which begin or end in it, and the others.

    sizes, first, last, height : the problem that is left of those inside.
    """

    def __init__(self, of: Peak, start: int, stop: int):
        self.of = of
        first, last, everything = of.first, of.last, range(len(of.sizes))
        meets = [i for i in everything if first[i] <= stop and last[i] >= start]
        through = [i for i in meets if first[i] <= start and last[i] >= stop]
        self.inside = [i for i in meets if first[i] > start or last[i] < stop]
        self.others = sorted(set(everything).difference(meets), key=lambda i: (-of.sizes[i], i))
        reach = sorted(through, key=lambda i: (-min(last[i] - stop, start - first[i]), i))
        duration = sorted(through, key=lambda i: (first[i] - last[i], i))
        self.piles = [self._pile(reach), self._pile(duration)]
        self.height = of.height - sum(of.sizes[i] for i in through)
        self.sizes = [of.sizes[i] for i in self.inside]
        self.first = [max(first[i], start) for i in self.inside]
        self.last = [min(last[i], stop) for i in self.inside]
        self.canonical: Canonical | None = None

    def _pile(self, order: Sequence[int]) -> dict[int, int]:
        """Each item on top of the one before."""
        offsets, top = {}, 0
        for i in order:
            offsets[i] = top
            top += self.of.sizes[i]
        return offsets

    def packing(self) -> dict[int, int] | None:
        """Offsets by one more canonical solution of the window, if all others fit around it."""
        of = self.of
        if self.canonical is None:
            duration = [of.last[i] - of.first[i] + 1 for i in self.inside]
            self.canonical = Canonical(self.sizes, self.first, self.last, self.height, duration)
        search, before = self.canonical, self.canonical.placed
        found = search.search(lambda: search.placed >= before + TURN * len(self.inside), WINDOW)
        of.placed += search.placed - before
        of.impossible = found is False
        return self.around(search.offsets.tolist()) if found else None

    def around(self, solution: Sequence[int]) -> dict[int, int] | None:
        """Offsets of all items, if the others fit around a solution: offsets of those inside, above the pile."""
        of = self.of
        places = {i: of.height - self.height + o for i, o in zip(self.inside, solution, strict=True)}
        for pile in self.piles:
            offsets = pile | places
            before = len(offsets)
            fits = first_fit(of.sizes, of.first, of.last, self.others, of.height + 1, offsets)
            of.placed += len(offsets) - before
            if fits:
                return offsets
        return None

"""Packing from the peak outward: the hard part is the time at which almost all of the height is in use.

    offset 0     1     2     3     4     5     6  time
         6 |.....+-----------+-----------+.....|  peak: six are live at 2 and 3, so no packing is lower
           |     |     b     |     d     |     |
         4 |     +-----+-----+-----------+     |  b ends and d begins in the window: they lie above the pile
           |       gap |        c        |     |
         2 +-----------+-----------------+-----+  gap: free cells outside the window, which first-fit can use
           |                 a                 |
         0 +-----------------------------------+  a and c are live throughout the window: the pile
                       |  window   |

Traces of networks are that full during a part of the backward, a *window* in time.  Items that are live throughout the window
can form a pile at the bottom: within the window, a packing stays valid if these items move down and the items below them move
up.  So a window is a small problem: place the few items that begin or end in it above the pile.  Canonical solutions
(`calcvm.planner.packing.minimalloc`) are found soon.  There is room before and after the window.  With the window's items in
place, first-fit, largest item first, usually places the others.  If not, another solution of the window or a wider window may do.

All 36 traces of the zoo (12 networks at batch 1, 8, 32) are packed at the lower bound, in 0.02 to 0.05 s.  Orders and canonical
solutions of the whole trace left 0.32, 0.05 and 0.02 % (GoogLeNet, ResNet-50, ResNet-34 at batch 1, 2 workers).  Other methods
did not help on these three: evicting placed items for items that fit nowhere (15 s each), CP-SAT on whole traces (100 to 200 s),
and other orders with the same peak (nine batches, seven widths).  Some gaps remain for other batches and teams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from calcvm.planner.packing.firstfit import first_fit
from calcvm.planner.packing.minimalloc import Canonical, SearchSetting

LEVELS = (0.99, 0.985, 0.98, 0.97, 0.96, 0.95, 0.93, 0.9, 0.85)  # of the peak: each load has a window
LARGEST = 1000  # items in a window, and at most half of all items
WINDOW = SearchSetting(("reach",), (0, 0), 1.2, 0.03)
TURN = 4  # placements per item of a window before the next window has its turn


class Peak:
    """Items that are live together, and windows around the peak.

    Parameters
    ----------
    sizes, first, last : of the items; lifetimes are inclusive.
    load : live size at each time.
    height : upper limit of the end of every item.
    """

    def __init__(
        self, sizes: Sequence[int], first: Sequence[int], last: Sequence[int], load: Sequence[int], height: int
    ):
        self.sizes, self.first, self.last, self.height = sizes, first, last, height
        self.load, self.most = load, max(load)
        self.placed = 0
        self.impossible = False

    def search(self, effort: int) -> dict[int, int] | None:
        """Offsets of all items; None after ``effort`` placements, or if a window is ``impossible``, so that no packing exists."""
        windows: list[Window] = []
        for window in self.windows():  # each is created when its first turn comes
            windows.append(window)
            if (offsets := window.packing()) or self.impossible or self.placed >= effort:
                return offsets
        while windows:
            for window in windows:
                if (offsets := window.packing()) or self.impossible or self.placed >= effort:
                    return offsets
        return None

    def windows(self) -> Iterator[Window]:
        """One window per level, from the first to the last time with that load: the narrowest first."""
        done = set()
        for level in LEVELS:
            times = [t for t, live in enumerate(self.load) if live >= level * self.most]
            if (span := (times[0], times[-1])) not in done:
                done.add(span)
                window = Window(self, *span)
                if 0 < len(window.inside) <= min(LARGEST, len(self.sizes) // 2):
                    yield window


class Window:
    """A span of time: the items live throughout it, the items inside, which begin or end in it, and the others.

    sizes, first, last, height : the remaining problem, of the items inside.
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
        """Offsets with each item on top of the previous one."""
        offsets, top = {}, 0
        for i in order:
            offsets[i] = top
            top += self.of.sizes[i]
        return offsets

    def packing(self) -> dict[int, int] | None:
        """Offsets of all items from the next canonical solution of the window; None if the others do not fit around it."""
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
        """Offsets of all items, if the others fit around a solution.

        solution : offsets of the items inside, above the pile.
        """
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

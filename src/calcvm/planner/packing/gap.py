"""Closing the gap that the packer leaves, if the caller allows time for it: two searches in parallel.

One is the search for canonical solutions (`calcvm.planner.packing.minimalloc`).  The other is CP-SAT, if installed.  Its model has
a variable for each item's offset, and states three times that items do not overlap: within each maximal set of items that are
live at one time, for all items as rectangles, and as a cumulative constraint with the offsets as time.

The two complement each other.  Together they pack 10 of the 11 public instances of MiniMalloc within the capacity, in 1 to 26 s of
60 s allowed (2 cores of Zen 5, busy with other work).  The first alone packed six in 3 s.  CP-SAT alone, on both cores and with
only the first set of constraints, packed six in 12 s.

Both first solve windows around the peak (`calcvm.planner.packing.peak`), for at most a quarter of the time.  Which search finishes
first depends on the machine, so this is off by default.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import gcd

from calcvm.errors import MissingExtra
from calcvm.planner.packing.minimalloc import Canonical
from calcvm.planner.packing.pack import Packing, load, segments
from calcvm.planner.packing.peak import Peak

LARGEST = 4000  # items: with more, the constraints take too long to build


def close_gap(
    sizes: Sequence[int],
    first: Sequence[int],
    last: Sequence[int],
    known: Packing,
    *,
    seconds: float,
    enough: int = 0,
    stop: Callable[[], bool] = bool,
) -> Packing:
    """A packing as low as the bound, or as ``enough``; else the lowest one found, which may be ``known``.

    Parameters
    ----------
    sizes, first, last : of the items, as in `calcvm.planner.packing.pack.pack`.
    known : a packing of them.
    seconds : time limit; no time is spent if nothing can be gained.
    enough : a height at which to stop.
    stop : polled during the search; when it returns True, or on Ctrl-C, the best packing so far is returned.
    """
    end, offsets, note = time.monotonic() + seconds, list(known.offsets), ""
    try:
        for part in segments(sizes, first, last):
            if len(part) > LARGEST:
                continue
            unit = gcd(*(sizes[i] for i in part))
            low, height = max(known.bound, enough) // unit, max(offsets[i] + sizes[i] for i in part) // unit
            target = low
            if low >= height:
                continue
            search = _Search([sizes[i] // unit for i in part], [first[i] for i in part], [last[i] for i in part])
            while low < height and not _over(end, stop):
                now = time.monotonic()
                quarter = (end - now) / 4
                found = search.around_peak(target, quarter / 2, partial(_over, now + quarter, stop))
                if found is None and not search.impossible:
                    found = search.within(target, partial(_over, _most(end), stop))
                note = search.note
                if found is not None:
                    height = max(o + s for o, s in zip(found, search.sizes, strict=True))
                    for i, offset in zip(part, found, strict=True):
                        offsets[i] = int(offset) * unit
                elif search.impossible:
                    low = target + 1
                target = (low + height) // 2  # first try to close the whole gap, with most of the time; then half of it
    except KeyboardInterrupt:
        note = "interrupted"
    height = max((offset + size for offset, size in zip(offsets, sizes, strict=True) if size), default=0)
    return Packing(tuple(offsets), height, known.bound, note)


def _over(end: float, stop: Callable[[], bool]) -> bool:
    return time.monotonic() >= end or stop()


def _most(end: float) -> float:
    """The end of three quarters of the remaining time."""
    now = time.monotonic()
    return now + (end - now) * 3 / 4


class _Search:
    """Items to pack together, and the two searches for their offsets."""

    def __init__(self, sizes: list[int], first: list[int], last: list[int]):
        self.sizes, self.first, self.last = sizes, first, last
        self.impossible = False
        self.note = ""

    def around_peak(self, height: int, seconds: float, stop: Callable[[], bool]) -> Sequence[int] | None:
        """Offsets from the peak outward, or None as in `within`.

        seconds : time limit for each window.
        """
        for window in Peak(
            self.sizes, self.first, self.last, load(self.sizes, self.first, self.last), height
        ).windows():
            if stop():
                break
            search = _Search(window.sizes, window.first, window.last)
            solution = search.within(window.height, partial(_over, time.monotonic() + seconds, stop))
            self.note, self.impossible = search.note, search.impossible
            if self.impossible:
                return None
            if solution and (offsets := window.around(solution)):
                return [offsets[i] for i in range(len(self.sizes))]
        return None

    def within(self, height: int, stop: Callable[[], bool]) -> Sequence[int] | None:
        """Offsets within a height; None if none were found, or, with ``impossible`` set, if none exist."""
        self.impossible = False
        canonical = Canonical(self.sizes, self.first, self.last, height)
        try:
            solver = _Solver(self.sizes, self.first, self.last, height)
        except MissingExtra as e:
            self.note = str(e)
            found = canonical.search(stop)
            self.impossible = found is False
            return canonical.offsets.tolist() if found else None
        with solver:
            found = canonical.search(lambda: solver.done or stop())
        self.impossible = found is False or solver.impossible
        return canonical.offsets.tolist() if found else solver.offsets


class _Solver:
    """CP-SAT on a separate thread, for the time of a ``with`` block.

    Raises
    ------
    MissingExtra : OR-Tools is not installed.
    """

    def __init__(self, sizes: Sequence[int], first: Sequence[int], last: Sequence[int], height: int):
        try:
            from ortools.sat.python import cp_model
        except ImportError as e:
            raise MissingExtra("ortools", "solver", "packing with a solver") from e
        self.cp = cp_model
        self.model = model = cp_model.CpModel()
        duration = [e - f + 1 for f, e in zip(first, last, strict=True)]
        self.variables = [model.new_int_var(0, height - size, "") for size in sizes]
        lies = [model.new_fixed_size_interval_var(v, size, "") for v, size in zip(self.variables, sizes, strict=True)]
        lives = [model.new_fixed_size_interval_var(f, n, "") for f, n in zip(first, duration, strict=True)]
        for together in largest_sets(first, last):
            model.add_no_overlap([lies[i] for i in together])
        model.add_no_overlap_2d(lives, lies)
        model.add_cumulative(lies, duration, max(last) + 1 - min(first))
        self.solver = cp_model.CpSolver()
        self.solver.parameters.num_workers = 1  # the canonical search has the other core
        self.solver.parameters.catch_sigint_signal = False
        self.status: int | None = None
        self.thread = threading.Thread(target=self._solve, name="calcvm-packing", daemon=True)

    def _solve(self) -> None:
        self.status = int(self.solver.solve(self.model))

    def __enter__(self) -> _Solver:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        while self.thread.is_alive():  # a solver that has not begun ignores the request
            self.solver.stop_search()
            self.thread.join(0.05)

    @property
    def done(self) -> bool:
        return not self.thread.is_alive()

    @property
    def impossible(self) -> bool:
        return self.status == self.cp.INFEASIBLE

    @property
    def offsets(self) -> list[int] | None:
        if self.status not in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            return None
        return [self.solver.value(v) for v in self.variables]


def largest_sets(first: Sequence[int], last: Sequence[int]) -> list[set[int]]:
    """Maximal sets of items that are live at one time."""
    out: list[set[int]] = []
    live: set[int] = set()
    grown = False
    for _, dies, i in sorted(_events(first, last)):
        if dies and grown:
            out.append(live.copy())
        (live.discard if dies else live.add)(i)
        grown = not dies
    return out


def _events(first: Sequence[int], last: Sequence[int]) -> Iterable[tuple[int, bool, int]]:
    """(time, whether the item dies, item): at equal times, births sort before deaths."""
    for i, (f, e) in enumerate(zip(first, last, strict=True)):
        yield f, False, i
        yield e, True, i

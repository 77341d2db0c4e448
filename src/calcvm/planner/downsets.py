"""The order of a few statements with the lowest peak: dynamic programming over what may have run, or a beam of it.

What has run is a *downset*: with a statement all that must come before it.  What is live depends on the downset alone, so
of all orders of one only the lowest peak counts, and the number of downsets, not of orders, is the work.  A statement
that leaves no more alive and adds nothing to the peak goes at once: later it could do no better.  Where there are more
downsets than the width, those of the lowest (peak, live bytes) are followed: a beam search, no longer exact.
"""

from __future__ import annotations

from collections.abc import Sequence

from calcvm.record import record

Mask = int  # statements, a bit each


@record
class Touch:
    """A value that a statement touches: its size, all statements that touch it, whether it is born or dies among them."""

    size: int
    by: Mask
    born: bool
    dies: bool


@record
class Task:
    """A statement: what it touches, (made, read) of these by place where the first may lie in the second's cells."""

    touches: tuple[Touch, ...]
    pairs: tuple[tuple[int, int], ...]
    before: Mask


class Downsets:
    """Statements whose order is free but for what must come before, and the bytes that are live when they begin."""

    def __init__(self, tasks: Sequence[Task], live: int):
        self.tasks, self.live, self.steps = tasks, live, 0
        self.after: list[list[int]] = [[] for _ in tasks]
        for k, task in enumerate(tasks):
            left = task.before
            while left:
                self.after[(left & -left).bit_length() - 1].append(k)
                left &= left - 1

    def step(self, k: int, done: Mask, live: int) -> tuple[int, int]:
        """Bytes live while a statement runs after others, and after it."""
        self.steps += 1
        task = self.tasks[k]
        grows = frees = shared = 0
        mine, ends, begins = 1 << k, 0, 0
        for j, touch in enumerate(task.touches):
            by = touch.by
            if touch.born and not by & done:
                grows += touch.size
                begins |= 1 << j
            if touch.dies and not by & ~done & ~mine:
                frees += touch.size
                ends |= 1 << j
        for made, read in task.pairs:
            if begins >> made & 1 and ends >> read & 1 and not begins >> read & 1:
                shared += task.touches[made].size
                begins &= ~(1 << made)
                ends &= ~(1 << read)
        return live + grows - shared, live + grows - frees

    def peak(self, order: Sequence[int]) -> int:
        done, live, peak = 0, self.live, 0
        for k in order:
            during, live = self.step(k, done, live)
            peak, done = max(peak, during), done | 1 << k
        return peak

    def best(self, floor: int, below: int, width: int, effort: int = 1 << 60) -> list[int] | None:
        """An order with a peak less than ``below``: the lowest one, or any of at most ``floor``.

        None: none was found, in so many `steps`.
        """
        whole = (1 << len(self.tasks)) - 1
        ready = sum(1 << k for k, task in enumerate(self.tasks) if not task.before)
        level = {0: (floor, self.live, ready, ())}
        while level:
            if whole in level:
                return _unlinked(level[whole][3])
            following: dict[Mask, tuple] = {}
            for done, (peak, live, ready, order) in level.items():
                left = ready
                while left:
                    k = (left & -left).bit_length() - 1
                    left &= left - 1
                    if self.steps > effort:
                        return None
                    during, then = self.step(k, done, live)
                    if during >= below:
                        continue
                    state = self._settled(k, done, max(peak, during), then, ready, order)
                    known = following.get(state[0])
                    if known is None or state[1] < known[0]:
                        following[state[0]] = state[1:]
            if len(following) > width:
                low = sorted(following.items(), key=lambda item: item[1][:2])
                following = dict(low[:width])
            level = following
        return None

    def _settled(self, k: int, done: Mask, peak: int, live: int, ready: Mask, order: tuple) -> tuple:
        """(what has run, peak, live, ready, order) when a statement has, and all that then costs nothing."""
        while True:
            done, ready, order = done | 1 << k, ready & ~(1 << k), (k, order)
            fresh = [j for j in self.after[k] if not self.tasks[j].before & ~done]
            for j in fresh:
                ready |= 1 << j
            left = ready
            while left:
                k = (left & -left).bit_length() - 1
                left &= left - 1
                during, then = self.step(k, done, live)
                if then <= live and during <= peak:
                    live = then
                    break
            else:
                return done, peak, live, ready, order


def _unlinked(order: tuple) -> list[int]:
    out: list[int] = []
    while order:
        k, order = order
        out.append(k)
    return out[::-1]

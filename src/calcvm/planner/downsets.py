"""The order of a few statements with the lowest peak: dynamic programming over downsets, or a beam search.

A *downset* is a set of statements that contains, with each statement, all that must come before it: the statements that have
run so far.  The live values depend on the downset only, so the search keeps one order per downset: the one with the lowest
peak.  The work grows with the number of downsets, not of orders.  A statement that adds neither live bytes nor to the peak
runs at once, since it could do no better later.  If there are more downsets than the width, only those with the lowest (peak,
live bytes) are followed: a beam search, which is not exact.
"""

from __future__ import annotations

from collections.abc import Sequence

from calcvm.frozen import frozen

Mask = int  # a set of statements, one bit each


@frozen
class Touch:
    """A value that a statement touches: its size, all statements that touch it, and whether it is born or dies among them."""

    size: int
    by: Mask
    born: bool
    dies: bool


@frozen
class Item:
    """A statement.

    touches : the values it touches.
    pairs : (made, read), indices in ``touches``: the first may take the cells of the second.
    before : the statements that must come before it.
    """

    touches: tuple[Touch, ...]
    pairs: tuple[tuple[int, int], ...]
    before: Mask


class Downsets:
    """Statements with their dependencies, and the bytes that are live when the first begins."""

    def __init__(self, tasks: Sequence[Item], live: int):
        self.tasks, self.live, self.steps = tasks, live, 0
        self.after: list[list[int]] = [[] for _ in tasks]
        for k, task in enumerate(tasks):
            left = task.before
            while left:
                self.after[(left & -left).bit_length() - 1].append(k)
                left &= left - 1

    def step(self, k: int, done: Mask, live: int) -> tuple[int, int]:
        """Bytes live during statement ``k`` and after it, if the statements in ``done`` have run."""
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
        """An order with a peak below ``below``: the lowest found, or any that is at most ``floor``.

        None: none was found within ``effort`` steps.
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
        """(done, peak, live, ready, order) after a statement and all that then run for free."""
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

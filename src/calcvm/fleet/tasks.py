"""The task table that a fleet's workers read.  A model's training has one row, and its evaluation another."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from calcvm.vm.memory.turns import Turns
from calcvm.vm.program.encoding import aligned
from calcvm.vm.run import job as J

FIRST_ROWS = 64


class Tasks:
    """Rows of words, in memory that compiled code reads.

    rows : int64, shape (n_places, TASK_WORDS).
    turn : held for a slice of the fleet's work, or another change of the table.
    stops : whether a model was stopped since the last slice.
    used : places that models occupy now.  Free places are found by it after an interrupted change.
    """

    def __init__(self, used: Callable[[], Iterable[int]]):
        self.rows, self._address = np.zeros((0, J.TASK_WORDS), np.int64), 0
        self._free: list[int] = []
        self._used = used
        self.turn, self.stops = Turns("the fleet"), False

    def take(self, words: np.ndarray, judges: int | None = None) -> int:
        """Store ``words`` in a free place and return it; ``judges``: the place of the task that this one evaluates."""
        if not self._free:
            used = {judges, *self._used()}
            self._free = [place for place in range(len(self.rows)) if place not in used]
        if not self._free:
            self._grow()
        place = self._free.pop()
        self.rows[place] = words
        if judges is not None:
            self.rows[judges, J.JUDGE] = self._address + place * self.rows.strides[0]
        return place

    def _grow(self) -> None:
        n, more = len(self.rows), max(FIRST_ROWS, 2 * len(self.rows))
        table = aligned(8 * J.TASK_WORDS * more).view(np.int64).reshape(more, J.TASK_WORDS)
        table[:n] = self.rows
        judge = table[:n, J.JUDGE]
        address = table.ctypes.data
        judge[judge != 0] += address - self._address
        self.rows, self._address, self._free = table, address, list(range(more - 1, n - 1, -1))

    def give_back(self, places: Iterable[int]) -> None:
        self._free += places

    def judges(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The indexes of ``places`` that have judges, and the places of these judges."""
        judges = self.rows[places, J.JUDGE]
        judged = np.flatnonzero(judges)
        return judged, (judges[judged] - self._address) // self.rows.strides[0]

    def rounds_done(self, places: np.ndarray) -> int:
        """Rounds done by tasks and their judges."""
        with_judges, of_judges = self.judges(places)
        epochs, rounds, first = (self.rows[places, word] for word in (J.EPOCH, J.ROUNDS, J.FIRST))
        rounds[with_judges] += self.rows[of_judges, J.ROUNDS]
        return int((epochs * rounds + first).sum() + self.rows[of_judges, J.FIRST].sum())

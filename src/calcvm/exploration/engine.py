"""Engines: what carries a search's turns to workers.  Here the one in this process; `cluster` has the one on Ray."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from calcvm.exploration.worker import Report, Task, Turn, Worker
from calcvm.model import Model


class Engine(Protocol):
    """Workers by their homes, 0 to ``homes``; each does one turn at a time."""

    homes: int

    def submit(self, home: int, turn: Turn) -> None:
        """Hand a turn to a worker that is idle."""

    def wait(self) -> tuple[int, list[Report] | None]:
        """The next worker that is done, and its reports; None: it was lost with its trials, another has its home."""

    def model(self, number: int) -> Model | None:
        """The model of a trial that was to be kept, if it is here."""

    def close(self) -> None:
        """End the workers; models stay."""


class Local:
    """One worker in this process."""

    homes = 1

    def __init__(self, task: Task):
        self.worker = Worker(task)
        self._turns: deque[Turn] = deque()

    def submit(self, home: int, turn: Turn) -> None:
        self._turns.append(turn)

    def wait(self) -> tuple[int, list[Report] | None]:
        return 0, self.worker.turn(self._turns.popleft())

    def model(self, number: int) -> Model | None:
        return self.worker.model(number)

    def close(self) -> None:
        pass

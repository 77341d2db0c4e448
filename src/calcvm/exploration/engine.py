"""Engines, which run a search's turns on workers.  This one is local; `cluster` has the one on Ray."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from calcvm.exploration.worker import Report, Task, Turn, Worker
from calcvm.model import Model


class Engine(Protocol):
    """Workers at homes 0 to ``homes`` - 1; each does one turn at a time."""

    homes: int

    def submit(self, home: int, turn: Turn) -> None:
        """Give a turn to an idle worker."""

    def wait(self) -> tuple[int, list[Report] | None]:
        """The home of the next worker to finish, and its reports; None if it died with its trials and was replaced."""

    def model(self, number: int) -> Model | None:
        """The model of a trial to keep, if it is here."""

    def close(self) -> None:
        """Stop the workers; models stay."""


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

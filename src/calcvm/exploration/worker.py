"""Where trials are trained: a fleet in a heap of its own.  One in this process, or one on each node of a cluster."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from calcvm.errors import CalcError
from calcvm.exploration.programs import Programs
from calcvm.exploration.trial import Trial
from calcvm.fleet import Fleet, Handle
from calcvm.graph import CalcGraph
from calcvm.model import Model
from calcvm.vm.program.program import Program

HERE = str(Path(__file__).parent.parent)
Build = Callable[[Trial], Any]


@dataclass(frozen=True)
class Task:
    """What the trials of a search have in common."""

    build: Build
    data: Any
    validation: Any
    rounds: int
    batch_size: int
    memory: int
    workers: int | None


@dataclass(frozen=True)
class Turn:
    """What a worker does next: take trials on, let models go, hand models over, train each trial for some rounds."""

    start: list[Trial] = field(default_factory=list)
    release: list[int] = field(default_factory=list)
    keep: list[int] = field(default_factory=list)
    rounds: Mapping[int, int] = field(default_factory=dict)


@dataclass
class Report:
    """What a turn has made of a trial: the figures of its new rounds."""

    number: int
    status: str = "running"  # complete | pruned | failed
    reason: str = ""
    curves: dict[str, list[float]] = field(default_factory=dict)
    nbytes: int | None = None


class Worker:
    """A fleet and the trials in it.  Trials that do not fit beside those in training wait until one leaves."""

    def __init__(self, task: Task):
        self.task = task
        self.fleet = Fleet(memory=task.memory, workers=task.workers)
        self.programs = Programs(task.memory)
        self._waiting: dict[int, tuple[Trial, Program, dict[str, float]]] = {}
        self._training: dict[int, int] = {}  # the rounds that were reported
        self._handles: dict[int, Handle] = {}  # of those in training, and of those that may be kept

    def turn(self, turn: Turn) -> list[Report]:
        """Do a turn; a report for each trial that was trained or could not be."""
        for number in turn.release:
            self.release(number)
        failed = [self._prepare(trial) for trial in turn.start] + self._admit()
        self.fleet.advance({self._handles[number]: turn.rounds[number] for number in self._training})
        return [*filter(None, failed), *map(self._report, list(self._training))]

    def release(self, number: int) -> None:
        """Let a trial go, and its model with it."""
        self._waiting.pop(number, None)
        self._training.pop(number, None)
        if number in self._handles:
            self._handles.pop(number).close()

    def model(self, number: int) -> Model | None:
        """The model of a trial that has not been released."""
        handle = self._handles.get(number)
        return None if handle is None else handle.model

    def file(self, number: int) -> bytes:
        """The model as `Model.save` writes it."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.calc"
            self._handles[number].model.save(path)
            return path.read_bytes()

    def _prepare(self, trial: Trial) -> Report | None:
        """Build and compile; a report if that fails, whatever the reason."""
        try:
            graph, hyper = _built(self.task.build(trial))
            program, own = self.programs.of(graph, hyper.pop("batch_size", self.task.batch_size))
        except Exception as error:  # build is the user's
            return _failed(trial.number, error)
        self._waiting[trial.number] = trial, program, {**own, **hyper}
        return None

    def _admit(self) -> list[Report | None]:
        """Load as many of the waiting trials as there is room for, in their order."""
        failed: list[Report | None] = []
        room = self.task.memory - sum(self._handles[number].nbytes for number in self._training)
        for number, (trial, program, hyper) in list(self._waiting.items()):
            if program.heap_bytes > room and self._training:
                break
            del self._waiting[number]
            try:
                self._handles[number] = self.fleet.add(
                    program, data=self.task.data, validation=self.task.validation, seed=trial.seed, hyper=hyper,
                    name=f"trial-{number}",
                )  # fmt: skip
            except CalcError as error:
                failed.append(_failed(number, error))
                continue
            self._training[number] = 0
            room -= program.heap_bytes
        return failed

    def _report(self, number: int) -> Report:
        handle, before = self._handles[number], self._training[number]
        curves = {"loss": handle.losses, **handle.metrics}
        report = Report(number, curves={k: v[before:].tolist() for k, v in curves.items()}, nbytes=handle.nbytes)
        self._training[number] = handle.epochs_done
        if handle.status in ENDS:
            report.status, report.reason = ENDS[handle.status], handle.error
        if handle.status in ENDS or handle.epochs_done >= self.task.rounds:
            del self._training[number]
        return report


ENDS = {"not finite": "pruned", "trapped": "failed"}  # of a handle's status: the trial's


def _built(answer: Any) -> tuple[CalcGraph, dict[str, Any]]:
    """What build has returned, checked."""
    graph, hyper = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, {})
    if not isinstance(graph, CalcGraph) or not isinstance(hyper, Mapping):
        kinds = ", ".join(type(part).__name__ for part in (answer if isinstance(answer, tuple) else [answer]))
        raise CalcError(f"build must return a graph (cv.build_graph), or a graph and a dict, not {kinds}")
    return graph, dict(hyper)


def _failed(number: int, error: Exception) -> Report:
    """A trial's failure, with the line of the user's code that it comes from."""
    text = str(error) if isinstance(error, CalcError) else f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    line = next((f"{f.filename}:{f.lineno}" for f in reversed(frames) if not f.filename.startswith(HERE)), "")
    return Report(number, "failed", f"{text} ({line})" if line else text)

"""Workers, which train trials: a fleet with its own heap, in this process or on each node of a cluster."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from calcvm.errors import CalcError
from calcvm.exploration.trial import Trial
from calcvm.fleet import Fleet, Handle
from calcvm.graph import CalcGraph
from calcvm.model import Model
from calcvm.vm.program.program import Program

HERE = str(Path(__file__).parent.parent)
Build = Callable[[Trial], Any]


@dataclass(frozen=True)
class Task:
    """The settings common to all trials of a search."""

    build: Build
    data: Any
    validation: Any
    epochs: int
    batch_size: int
    memory: int
    workers: int | None


@dataclass(frozen=True)
class Turn:
    """A worker's next turn: add trials, release models, return models, and train each trial for some epochs."""

    start: list[Trial] = field(default_factory=list)
    release: list[int] = field(default_factory=list)
    keep: list[int] = field(default_factory=list)
    epochs: Mapping[int, int] = field(default_factory=dict)


@dataclass
class Report:
    """The outcome of a turn for one trial: the figures of its new epochs."""

    number: int
    status: str = "running"  # complete | pruned | failed
    reason: str = ""
    curves: dict[str, list[float]] = field(default_factory=dict)
    nbytes: int | None = None


class Worker:
    """A fleet and its trials.  A trial without room waits until a training trial leaves."""

    def __init__(self, task: Task):
        self.task = task
        self.fleet = Fleet(memory=task.memory, workers=task.workers)
        self._waiting: dict[int, tuple[Trial, Program, dict[str, float]]] = {}
        self._training: dict[int, int] = {}  # epochs reported so far
        self._handles: dict[int, Handle] = {}  # trials in training, and those that may be kept

    def turn(self, turn: Turn) -> list[Report]:
        """Do a turn, and return a report for each trial that was trained or failed."""
        for number in turn.release:
            self.release(number)
        failed = [self._prepare(trial) for trial in turn.start] + self._admit()
        self.fleet.advance({self._handles[number]: turn.epochs[number] for number in self._training})
        return [*filter(None, failed), *map(self._report, list(self._training))]

    def release(self, number: int) -> None:
        """Remove a trial and its model."""
        self._waiting.pop(number, None)
        self._training.pop(number, None)
        if number in self._handles:
            self._handles.pop(number).close()

    def model(self, number: int) -> Model | None:
        """The model of a trial that was not released."""
        handle = self._handles.get(number)
        return None if handle is None else handle.model

    def file(self, number: int) -> bytes:
        """The model in the format of `Model.save`."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.calc"
            self._handles[number].model.save(path)
            return path.read_bytes()

    def _prepare(self, trial: Trial) -> Report | None:
        """Build and compile a trial; return a report if that fails for any reason."""
        try:
            graph, hyper = _built(self.task.build(trial))
            program, own = self.fleet.programs.of(
                graph,
                batch_size=hyper.pop("batch_size", self.task.batch_size),
                memory=self.task.memory,
                recompute=False,
            )
        except Exception as error:  # the user's build may raise anything
            return _failed(trial.number, error)
        self._waiting[trial.number] = trial, program, {**own, **hyper}
        return None

    def _admit(self) -> list[Report | None]:
        """Load waiting trials, in order, until there is no more room."""
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
        if handle.status in ENDS or handle.epochs_done >= self.task.epochs:
            del self._training[number]
        return report


ENDS = {"not finite": "pruned", "trapped": "failed"}  # status of a handle: status of its trial


def _built(answer: Any) -> tuple[CalcGraph, dict[str, Any]]:
    """The return value of build, checked."""
    graph, hyper = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, {})
    if not isinstance(graph, CalcGraph) or not isinstance(hyper, Mapping):
        kinds = ", ".join(type(part).__name__ for part in (answer if isinstance(answer, tuple) else [answer]))
        raise CalcError(f"build must return a graph (cv.build_graph), or a graph and a dict, not {kinds}")
    return graph, dict(hyper)


def _failed(number: int, error: Exception) -> Report:
    """A report of a failed trial, with the line of the user's code that raised."""
    text = str(error) if isinstance(error, CalcError) else f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    line = next((f"{f.filename}:{f.lineno}" for f in reversed(frames) if not f.filename.startswith(HERE)), "")
    return Report(number, "failed", f"{text} ({line})" if line else text)

"""What `fit` says while it runs: one plain line an epoch, or a bar where rich and a terminal are there."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from calcvm.tables import duration


class Reporter(Protocol):
    """Called by `fit` between calls into compiled code; never from inside them."""

    def step(self, epoch: int, step: int, loss: float) -> None:
        """``step`` steps of epoch ``epoch`` (both from 0) are done; ``loss`` is the latest."""

    def epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Epoch ``epoch`` is done."""

    def close(self) -> None:
        """Training has ended, by its end or by an error.  May be called twice."""


def reporter(total_epochs: int, steps_per_epoch: int | None, enabled: bool = True) -> Reporter:
    """The reporter that fits where we are: silent, a bar on a terminal with rich, else plain lines on stderr.

    steps_per_epoch : None where nobody knows.
    """
    if not enabled:
        return Silent()
    if sys.stderr.isatty():
        try:
            return Bar(total_epochs, steps_per_epoch)
        except ImportError:  # rich is in the extra cli
            pass
    return Lines(total_epochs)


def describe(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {_number(value)}" for name, value in metrics.items())


def _number(value: float) -> str:
    if not math.isfinite(value) or value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4f}"
    return f"{value:.3e}"


class Count:
    """A bar over epochs of many models (or another ``unit``) on a terminal with rich, else a line now and then."""

    SECONDS = 2.0  # between plain lines

    def __init__(self, total: int, enabled: bool = True, unit: str = "epochs"):
        self.total, self.enabled, self.unit, self.bar = total, enabled, unit, None
        self.since = self.shown = time.perf_counter()
        if enabled and sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            except ImportError:  # rich is in the extra cli
                return
            self.bar = Progress(
                TextColumn(f"{{task.completed:,}}/{{task.total:,}} {unit}"), BarColumn(), TimeElapsedColumn(),
                TimeRemainingColumn(), TextColumn("{task.fields[text]}"), console=Console(stderr=True),
            )  # fmt: skip
            self.task = self.bar.add_task("", total=total, text="")
            self.bar.start()

    def step(self, done: int, text: Callable[[], str]) -> None:
        """``done`` of the total are done; ``text()`` is shown beside it."""
        now = time.perf_counter()
        if self.bar is not None:
            self.bar.update(self.task, completed=done, text=text())
        elif self.enabled and (now - self.shown > self.SECONDS or done >= self.total):
            self.shown = now
            took = duration(now - self.since)
            print(f"{done:,}/{self.total:,} {self.unit}  {text()}  {took}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Training has ended."""
        if self.bar is not None:
            self.bar.stop()


class SolverLine:
    """What solvers have found: a line that is written over on a terminal, else one where something is new."""

    def __init__(self, enabled: bool = True):
        self.enabled, self.last = enabled, ""

    def __call__(self, seconds: float, overhead: float, bound: float) -> None:
        if not self.enabled:
            return
        text = f"overhead {100 * overhead:.2f} %, at least {100 * bound:.2f} %"
        if sys.stderr.isatty():
            print(f"\r{text}  {duration(seconds)}\033[K", end="", file=sys.stderr, flush=True)
        elif text != self.last:
            print(f"{text}  {duration(seconds)}", file=sys.stderr, flush=True)
        self.last = text

    def close(self) -> None:
        """Solvers have ended."""
        if self.last and sys.stderr.isatty():
            print(file=sys.stderr)
        self.last = ""


class Silent:
    def step(self, epoch: int, step: int, loss: float) -> None:
        pass

    def epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


class Lines(Silent):
    """``epoch 3/20  loss 0.1234  val_loss 0.2345  120 ms``"""

    def __init__(self, total_epochs: int):
        self.total = total_epochs
        self.since = time.perf_counter()

    def epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        now = time.perf_counter()
        width = len(str(self.total))
        line = f"epoch {epoch + 1:{width}}/{self.total}  {describe(metrics)}  {duration(now - self.since)}"
        print(line, file=sys.stderr, flush=True)
        self.since = now


class Bar:
    """One bar over all steps; the line says the epoch and its metrics."""

    def __init__(self, total_epochs: int, steps_per_epoch: int | None):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self.epochs, self.steps = total_epochs, steps_per_epoch or 1
        self.known = steps_per_epoch is not None
        self.metrics = ""
        self.progress = Progress(
            TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[metrics]}"),
            console=Console(stderr=True),
        )
        self.task = self.progress.add_task(
            "", total=total_epochs * self.steps, epoch=0, epochs=total_epochs, metrics=""
        )
        self.progress.start()

    def step(self, epoch: int, step: int, loss: float) -> None:
        metrics = self.metrics or describe({"loss": loss})
        self.progress.update(
            self.task, completed=epoch * self.steps + (step if self.known else 0), epoch=epoch + 1, metrics=metrics
        )

    def epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        self.metrics = describe(metrics)
        self.progress.update(self.task, completed=(epoch + 1) * self.steps, epoch=epoch + 1, metrics=self.metrics)

    def close(self) -> None:
        self.progress.stop()

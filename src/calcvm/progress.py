"""Progress of long work: a bar on a terminal, one display in a notebook, a line now and then elsewhere.

Errors of the output never stop the work: after the first error (missing, closed, full or in use) nothing more is written.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from calcvm.tables import duration, escape

SECONDS = 2.0  # minimal time between two lasting outputs of a process: lines, or bars and displays of short work
SHORT = 0.1  # shorter work shows nothing before its end
_left: tuple[float, Any] = -math.inf, None  # time and notebook cell of the last lasting output


class Progress:
    """The progress of some work.  Updates may be frequent; the output decides how often it shows them.

    Short work shows nothing until its end, and then at most one output every `SECONDS`.
    """

    def __init__(self, enabled: bool = True):
        self._began = time.perf_counter()
        self._next = self._began + SHORT if enabled else math.inf
        self._state: tuple[Callable[[], str], float | None, Callable[[], str]] | None = None
        self._output: Any = None

    def update(self, head: Callable[[], str], share: float | None, text: Callable[[], str]) -> None:
        """Set the state: ``share`` is the part of the work done (None: unknown); ``head()`` and ``text()`` run only when shown."""
        self._state = head, share, text
        if time.perf_counter() >= self._next:
            self._show(last=False)

    def close(self) -> None:
        """End the display; the last state stays visible.  May be called twice."""
        if self._next < math.inf and self._state is not None:
            self._show(last=True)
        self._next = math.inf

    def _show(self, last: bool) -> None:
        head, share, text = self._state or (str, None, str)
        said, took = f"{head()}  {text()}".rstrip(), time.perf_counter() - self._began
        stays = last and _leaves(took)
        if last and self._output is None and not stays:
            return
        try:
            self._output = self._output or _output()
            self._next = time.perf_counter() + self._output.seconds
            if last:
                self._output.end(said, share, took, stays)
            else:
                self._output.show(said, share, took)
        except Exception:  # an error of a stream, a terminal or a notebook must not stop the work
            self._next = math.inf
            try:
                self._output.end(said, share, took, False)
            except Exception:
                pass


class Epochs(Progress):
    """The progress of training: epochs, steps, and the figures of the last epoch."""

    def __init__(self, total: int, steps: int | None, enabled: bool = True):
        """steps : steps of an epoch; None: unknown."""
        super().__init__(enabled)
        self._total, self._steps = total, steps
        self._figures: Mapping[str, float] = {}

    def step(self, epoch: int, step: int, loss: float) -> None:
        """``step`` steps of epoch ``epoch`` (from 0) are done; ``loss`` is their mean."""
        self._tell(epoch, step / self._steps if self._steps else 0.0, self._figures or {"loss": loss})

    def epoch(self, epoch: int, figures: Mapping[str, float]) -> None:
        """Epoch ``epoch`` is done."""
        self._figures = figures
        self._tell(epoch, 1.0, figures)

    def _tell(self, epoch: int, part: float, figures: Mapping[str, float]) -> None:
        if self._next < math.inf:
            self.update(partial(self._head, epoch), (epoch + part) / self._total, partial(describe, figures))

    def _head(self, epoch: int) -> str:
        return f"epoch {epoch + 1:{len(str(self._total))}}/{self._total}"


class Count(Progress):
    """The progress of many models: how many of ``total`` epochs (or another ``unit``) are done."""

    def __init__(self, total: int, enabled: bool = True, unit: str = "epochs"):
        super().__init__(enabled)
        self._total, self._unit = total, unit

    def step(self, done: int, text: Callable[[], str]) -> None:
        """``done`` of the total are done; ``text()`` is shown beside it."""
        self.update(lambda: f"{done:,}/{self._total:,} {self._unit}", done / max(self._total, 1), text)


class Solving(Progress):
    """The progress of solvers: overhead and lower bound."""

    def __call__(self, seconds: float, overhead: float, bound: float) -> None:
        self.update(lambda: f"overhead {100 * overhead:.2f} %, at least {100 * bound:.2f} %", None, str)


def describe(figures: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {_number(value)}" for name, value in figures.items())


def _number(value: float) -> str:
    if not math.isfinite(value) or value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4f}"
    return f"{value:.3e}"


# ---------------------------------------------------------------- outputs
def _output() -> Any:
    """The best output available."""
    for kind in (_Notebook, _Bar):
        try:
            return kind()
        except Exception:  # not available, rich is not installed, or there is another bar already
            continue
    return _Lines()


def _cell() -> Any:
    """The number of the running notebook cell (None: this is no notebook)."""
    try:
        shell = sys.modules["IPython"].get_ipython()
        return shell.execution_count if shell.kernel is not None else None  # a terminal's shell has no kernel
    except (KeyError, AttributeError):
        return None


def _leaves(took: float) -> bool:
    """Whether work of this duration may leave an output now; if so, this is recorded."""
    global _left
    now, cell = time.perf_counter(), _cell()
    if took < SECONDS and now - _left[0] < SECONDS and cell == _left[1]:
        return False
    _left = now, cell
    return True


class _Lines:
    """``epoch 3/20  loss 0.1234  val_loss 0.2345  120 ms``"""

    seconds = 0.2  # interval of checks whether a line is due

    def __init__(self) -> None:
        self.stream, self.said = sys.stderr, ""

    def show(self, said: str, share: float | None, took: float) -> None:
        if took >= SECONDS and said != self.said and _leaves(0.0):
            self.said = said
            self.stream.write(f"{said}  {duration(took)}\n")
            self.stream.flush()

    def end(self, said: str, share: float | None, took: float, stays: bool) -> None:
        if stays and said != self.said:
            self.stream.write(f"{said}  {duration(took)}\n")
            self.stream.flush()


class _Bar:
    """A bar on a terminal, by rich (extra ``cli``)."""

    seconds = 0.1

    def __init__(self) -> None:
        if not sys.stderr.isatty():
            raise OSError("no terminal")
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        console = Console(file=sys.stderr)
        console.on_broken_pipe = _Bar._broken_pipe  # type: ignore[method-assign]
        self.progress = Progress(
            BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[said]}", markup=False), console=console, auto_refresh=False,
            redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),  # prints appear above the bar
        )  # fmt: skip
        self.task = self.progress.add_task("", total=1.0, said="")
        self.progress.start()

    @staticmethod
    def _broken_pipe() -> None:
        raise  # the current error; rich would end the process

    def show(self, said: str, share: float | None, took: float) -> None:
        known: dict[str, Any] = {"total": None} if share is None else {"completed": share}
        self.progress.update(self.task, said=said, refresh=True, **known)

    def end(self, said: str, share: float | None, took: float, stays: bool) -> None:
        self.progress.live.transient = not stays
        try:
            self.show(said, share, took)
        finally:
            self.progress.stop()


class _Shown:
    """The object that a notebook displays."""

    def __init__(self, text: str, share: float | None):
        self.text, self.share = text, share

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        value = "" if self.share is None else f' value="{self.share:.4f}"'
        style = "font-family: monospace; white-space: pre"
        return f'<progress{value} max="1"></progress> <span style="{style}">{escape(self.text)}</span>'


class _Notebook:
    """An updated display in a notebook.  Work that follows short work in the same cell reuses its display."""

    seconds = 0.2
    free: tuple[Any, Any] = None, None  # a cell, and the reusable display of short work in it

    def __init__(self) -> None:
        self.cell = _cell()
        if self.cell is None:
            raise OSError("no notebook")
        from IPython.display import display

        cell, self.handle = _Notebook.free
        _Notebook.free = None, None
        if self.handle is None or cell != self.cell:
            self.handle = display(_Shown("", None), display_id=True)

    def show(self, said: str, share: float | None, took: float) -> None:
        self.handle.update(_Shown(f"{said}  {duration(took)}", share))

    def end(self, said: str, share: float | None, took: float, stays: bool) -> None:
        self.show(said, share, took)
        if took < SECONDS:
            _Notebook.free = self.cell, self.handle

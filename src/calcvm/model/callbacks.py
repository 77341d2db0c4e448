"""Callbacks: `Model.fit` calls them after epochs, or after a number of steps."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from calcvm import checks
from calcvm.errors import CalcError
from calcvm.hints import Closed
from calcvm.model.figures import largest_of

if TYPE_CHECKING:
    from calcvm.model.history import History


OTHERS = re.compile("on_[a-z_]*_(begin|start|end)")  # method names of other libraries' callbacks


class Callback:
    """Base of callbacks; ``model`` is the `Model` that is trained.  A method ends training by returning True or a text (the reason).

    Between calls training runs in compiled code; it returns for `on_step` after every ``every`` steps
    (None: never).

    Examples
    --------
    >>> class Limit(cv.Callback):
    ...     def on_epoch_end(self, model, epoch, figures):
    ...         return "good enough" if figures["loss"] < 0.5 else None
    >>> X = np.ones((32, 4), "float32")
    >>> model = cv.Model(nn.Linear(1), input_shape=(4,), loss="mse", optimizer=cv.SGD(0.1), batch_size=8)
    >>> history = model.fit(X, X[:, :1], epochs=50, callbacks=[Limit()], progress=False)
    >>> len(history["loss"]) < 50, history.stopped
    (True, 'good enough')
    """

    every: int | None = None

    def on_train_begin(self, model: Any) -> None:
        """Training begins."""

    def on_step(self, model: Any, step: int, loss: float) -> Any:
        """``step`` steps of an epoch are done, a multiple of ``every``; ``loss`` is the epoch's mean so far."""

    def on_epoch_end(self, model: Any, epoch: int, figures: Mapping[str, float]) -> Any:
        """Epoch ``epoch`` (from 0) is done; ``figures`` are those of the `History`."""

    def on_train_end(self, model: Any, history: History) -> None:
        """Training has ended normally, by a callback or by Ctrl-C.  It is not called after an exception."""


class Function(Callback):
    """A plain function of (model, epoch, figures), called after each epoch."""

    def __init__(self, function: Callable[..., Any]):
        self.on_epoch_end = function  # type: ignore[method-assign]


def callbacks_of(given: Any) -> list[Callback]:
    """The callbacks given to `fit`, checked (CalcError: something is not a callback)."""
    wanted = "a list of callbacks: cv.Callback, or functions of (model, epoch, figures)"
    found = []
    for c in checks.items("callbacks", given, wanted):
        if isinstance(c, (type, Closed)) or not (isinstance(c, Callback) or callable(c)):
            raise CalcError(f"callbacks: {wanted} is wanted, not {checks.called(c)}")
        strange = [name for name in dir(c) if OTHERS.fullmatch(name) and not hasattr(Callback, name)]
        if isinstance(c, Callback) and strange:
            raise CalcError(
                f"callbacks: nothing calls {type(c).__name__}.{strange[0]}: a cv.Callback has on_train_begin, on_step, "
                "on_epoch_end and on_train_end"
            )
        if not isinstance(c, Callback) and not _takes_three(c):
            raise CalcError(f"callbacks: a function takes (model, epoch, figures), which {checks.called(c)} does not")
        found.append(c if isinstance(c, Callback) else Function(c))
        if isinstance(c, Callback) and any(c is other for other in found[:-1]):
            raise CalcError(f"callbacks: the same {type(c).__name__} is there twice")
        if found[-1].every is not None:
            checks.integer(f"{type(c).__name__}: every, a number of steps,", found[-1].every)
    return found


def _takes_three(function: Callable[..., Any]) -> bool:
    """Whether a function's signature, if known, accepts three arguments."""
    try:
        inspect.signature(function).bind(None, None, None)
    except TypeError:
        return False
    except ValueError:  # written in C
        pass
    return True


def reason(callback: Callback, answer: Any) -> str:
    """The reason if a callback's answer ends training; "" if it does not."""
    if isinstance(answer, str):
        return answer
    return f"{type(callback).__name__} has ended training" if checks.plain(answer) is True else ""


class _Watch(Callback):
    """Base of callbacks that watch a figure.

    figure : its name (default: ``val_loss`` with validation data, else ``loss``).
    largest : whether larger is better (default: by its name, such as loss, rmse, accuracy, r2, f1 or auc).
    min_delta : the minimum improvement over the best so far.
    """

    def __init__(self, figure: str | None, largest: bool | None, min_delta: float, first: object):
        what = type(self).__name__
        if isinstance(first, str):
            first = checks.shown(first)
            raise CalcError(f"{what}({first}): give a figure by keyword: {what}(figure={first})")
        self.figure = None if figure is None else checks.text(f"{what}: figure", figure, "val_loss")
        self.largest = None if largest is None else checks.flag(f"{what}: largest", largest)
        if self.figure is not None:
            self.largest = largest_of(what, self.figure, self.largest)
        self.min_delta = checks.number(f"{what}: min_delta", min_delta, 0)

    def on_train_begin(self, model: Any) -> None:
        self.best, self.since = np.inf, 0  # the smallest so far, or minus the largest; epochs since

    def better(self, figures: Mapping[str, float]) -> bool:
        """Whether the figure is a new best; counts the epochs since the last one."""
        name = self.watched(figures)
        if name not in figures:
            raise CalcError(f"{type(self).__name__}: no figure {name!r}; there are {', '.join(figures)}")
        value = -figures[name] if self.largest else figures[name]
        if value < self.best - self.min_delta:
            self.best, self.since = value, 0
            return True
        self.since += 1
        return False

    def watched(self, figures: Mapping[str, float]) -> str:
        return self.figure or ("val_loss" if "val_loss" in figures else "loss")


class EarlyStopping(_Watch):
    """Ends training when a figure has not improved for ``patience`` epochs (0 and 1: at the first such epoch; None: never).

    keep_best : at the end, restore the state after the best epoch: parameters, optimizer state and step counters.
        `Model.epochs_done` still counts all epochs, so the next epoch has a new order.  The state is kept in memory, in
        ``program.heap_bytes`` at most.

    Examples
    --------
    >>> stop = cv.EarlyStopping(patience=3, keep_best=True)
    >>> X = np.ones((32, 4), "float32")
    >>> model = cv.Model(nn.Linear(1), input_shape=(4,), loss="mse", optimizer=cv.SGD(0.1), batch_size=8)
    >>> history = model.fit(X, X[:, :1], epochs=9, validation=(X, X[:, :1]), callbacks=[stop], progress=False)
    """

    def __init__(
        self, patience: int | None = 10, *, figure: str | None = None, largest: bool | None = None,
        min_delta: float = 0.0, keep_best: bool = False,
    ):  # fmt: skip
        super().__init__(figure, largest, min_delta, patience)
        self.patience = None if patience is None else checks.integer("patience", patience, 0)
        self.keep_best = checks.flag("keep_best", keep_best)

    def on_train_begin(self, model: Any) -> None:
        super().on_train_begin(model)
        self._image: np.ndarray | None = None
        self._epoch = 0

    def on_epoch_end(self, model: Any, epoch: int, figures: Mapping[str, float]) -> Any:
        if self.better(figures) and self.keep_best:
            self._image, self._epoch = model.image(), epoch
        if self.patience is not None and self.since >= max(self.patience, 1):
            name = self.watched(figures)
            what = "the validation loss has not fallen" if name == "val_loss" else f"{name} has not become better"
            return f"{what} for {self.since} epoch{'s' if self.since > 1 else ''}"

    def on_train_end(self, model: Any, history: History) -> None:
        if self._image is not None:
            if self._epoch < len(history) - 1:
                model.restore(self._image)
                history.kept = self._epoch
            self._image = None


class ReduceOnPlateau(_Watch):
    """Multiplies the learning rate by ``factor`` when a figure has not improved for ``patience`` epochs.

    It stops at ``min_rate``.  After a reduction it waits ``cooldown`` epochs before it counts again.  As Keras's ReduceLROnPlateau.

    Examples
    --------
    >>> slower = cv.ReduceOnPlateau(factor=0.5, patience=2)
    >>> X = np.ones((32, 4), "float32")
    >>> model = cv.Model(nn.Linear(1), input_shape=(4,), loss="mse", optimizer=cv.SGD(0.1), batch_size=8)
    >>> history = model.fit(X, X[:, :1], epochs=9, callbacks=[slower], progress=False)
    """

    def __init__(
        self, factor: float = 0.1, patience: int = 10, *, min_rate: float = 0.0, cooldown: int = 0,
        figure: str | None = None, largest: bool | None = None, min_delta: float = 1e-4,
    ):  # fmt: skip
        super().__init__(figure, largest, min_delta, factor)
        self.factor = checks.number("ReduceOnPlateau: factor", factor, 0, 1, ends="()")
        self.patience = checks.integer("ReduceOnPlateau: patience", patience)
        self.min_rate = checks.number("ReduceOnPlateau: min_rate", min_rate, 0)
        self.cooldown = checks.integer("ReduceOnPlateau: cooldown", cooldown, 0)

    def on_train_begin(self, model: Any) -> None:
        super().on_train_begin(model)
        self._rest = 0

    def on_epoch_end(self, model: Any, epoch: int, figures: Mapping[str, float]) -> Any:
        if self._rest:
            self._rest, self.since = self._rest - 1, 0
        self.better(figures)
        if self._rest:
            self.since = 0
        if self.since >= self.patience:
            rate = model.hyper["learning_rate"]
            if rate > self.min_rate:
                model.hyper["learning_rate"] = max(rate * self.factor, self.min_rate)
            self._rest, self.since = self.cooldown, 0

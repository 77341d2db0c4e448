"""`History`: the figures of a training, epoch by epoch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from calcvm import checks, hints
from calcvm.errors import CalcError, MissingExtra
from calcvm.tables import frame, html, laid_out, number

SHOWN = 20  # epochs in a table


@dataclass(repr=False)
class History:
    """Figures of each epoch, by name: ``loss``, ``seconds``, and with validation data ``val_loss``, ``val_accuracy``.

    The loss is the mean over the training steps, while the parameters change.  If the loss is a function of means or sums over
    samples, such as `calcvm.rmse`, it is that function of the epoch's means or sums.

    A model with ``train_metrics=True`` also has metrics of its training data, such as ``accuracy``.  Printing shows the
    last epochs as a table.

    ``stopped`` says why training ended, and from which epoch on the loss was not finite.  ``kept`` is the epoch, from 0,
    whose state the model has at the end (``keep_best``; None: the last one's).

    Examples
    --------
    >>> X = np.ones((32, 4), "float32")
    >>> model = cv.Model(nn.Linear(1), input_shape=(4,), loss="mse", optimizer=cv.SGD(0.1), batch_size=8)
    >>> history = model.fit(X, X[:, :1], epochs=3, validation=0.25, progress=False)
    >>> history.names, len(history["loss"])
    (['loss', 'val_loss', 'seconds'], 3)
    """

    epochs: list[dict[str, float]] = field(default_factory=list)
    stopped: str = "all epochs done"
    kept: int | None = None

    @property
    def names(self) -> list[str]:
        """Names of the figures."""
        return [*dict.fromkeys(k for e in self.epochs for k in e)]

    def __getitem__(self, name: str) -> list[float]:
        if self.epochs and not (isinstance(name, str) and name in self.names):
            raise CalcError(
                f"no figure {checks.shown(name)} of the epochs; there are {', '.join(self.names)} (validation= adds val_loss and "
                "others, cv.Model(..., train_metrics=True) metrics of the training data)"
            )
        return [e[name] for e in self.epochs if name in e]

    def __getattr__(self, name: str) -> Any:
        raise hints.unknown_name("History", name, {n: n for n in dir(self)})

    def __iter__(self) -> Iterator[dict[str, float]]:
        return iter(self.epochs)

    def __len__(self) -> int:
        return len(self.epochs)

    def to_frame(self) -> Any:
        """The figures as a pandas DataFrame: one row per epoch, from 1, and one column per figure.

        Raises
        ------
        MissingExtra : pandas is not installed (extra ``pandas``).
        """
        rows = [{"epoch": i, **figures} for i, figures in enumerate(self.epochs, 1)]
        return frame("History.to_frame", rows, "epoch", self.names)

    def plot(self, figures: Iterable[str] | None = None, *, ax: Any = None) -> Any:
        """Plot figures over the epochs, training and validation values together, such as loss and val_loss.

        Parameters
        ----------
        figures : list of str, optional
            Their names (default: all except the seconds).
        ax : matplotlib Axes, optional
            Where to draw all of them (default: a new figure with one axes per kind).

        Returns
        -------
        ndarray of Axes, shape (n_kinds,) : ``history.plot()[0].figure.savefig("loss.png")``

        Raises
        ------
        CalcError : there is no such figure, or no epoch.
        MissingExtra : matplotlib is not installed (extra ``plot``).
        """
        wanted = "a list of names of figures"
        names = (
            [n for n in self.names if n != "seconds"] if figures is None else checks.items("figures", figures, wanted)
        )
        if not names or not self.epochs:
            raise CalcError(
                "History.plot: there is no epoch to draw" if not self.epochs else "History.plot: name a figure"
            )
        values = {name: self[name] for name in names}
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise MissingExtra("matplotlib", "plot", "History.plot") from error
        kinds = [*dict.fromkeys(name.removeprefix("val_") for name in names)]
        if ax is None:
            _, axes = pyplot.subplots(1, len(kinds), figsize=(5 * len(kinds), 3.5), squeeze=False, layout="constrained")
            axes = axes[0]
        else:
            axes = [ax] * len(kinds)
        for name, of in values.items():
            place = axes[kinds.index(name.removeprefix("val_"))]
            at = [i for i, e in enumerate(self.epochs, 1) if name in e]
            place.plot(at, of, marker="." if len(of) < SHOWN else "", label=name)
        for place in axes:
            place.set(xlabel="epoch")
            place.grid(alpha=0.3)
            place.legend()
        return axes

    def __repr__(self) -> str:
        last = ", ".join(f"{name} {number(value)}" for name, value in self.epochs[-1].items()) if self.epochs else ""
        return f"<History: {len(self)} epochs{last and ', the last with '}{last}; {self._ended}>"

    @property
    def _ended(self) -> str:
        return self.stopped + ("" if self.kept is None else f"; the state after epoch {self.kept + 1} was kept")

    def _table(self) -> tuple[list[str], list[list[str]]]:
        """Column names, and the last rows."""
        names, first = self.names, max(len(self) - SHOWN, 0)
        rows = [[number(e[k]) if k in e else "" for k in names] for e in self.epochs[first:]]
        return ["epoch", *names], [[str(i), *row] for i, row in enumerate(rows, first + 1)]

    def __str__(self) -> str:
        names, rows = self._table()
        before = len(self) - len(rows)
        head, *lines = laid_out([names, *rows])
        return "\n".join([head, *([f"... {before} epochs before"] if before else []), *lines, self._ended])

    def _repr_html_(self) -> str:
        names, rows = self._table()
        which = f", of which the last {len(rows)}" if len(rows) < len(self) else ""
        return html(f"{len(self)} epochs{which}", names, rows, self._ended)

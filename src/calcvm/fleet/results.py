"""`Results`: figures of all models of a fleet, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np

from calcvm import checks
from calcvm.errors import CalcError, Uncopied
from calcvm.fleet.handle import Handle
from calcvm.model.figures import largest_of
from calcvm.tables import Table, frame, number


class Results(Table, Sequence, Uncopied):
    """The handles of a fleet as a table, current at the time of reading; printing shows the first rows.

    The columns are name, status, epochs, loss, the other `Handle.figures`, bytes of the heap, and error.
    """

    _instead = "copy its figures and models: handle.losses, handle.model"

    SHOWN = 20

    def __init__(self, handles: Mapping[str, Handle], stopped: str = ""):
        self._handles, self.stopped = handles, stopped

    @overload
    def __getitem__(self, i: int) -> Handle: ...
    @overload
    def __getitem__(self, i: slice) -> list[Handle]: ...
    def __getitem__(self, i: int | slice) -> Any:
        if not (isinstance(i, slice) or checks.is_integer(i)):
            raise CalcError(f"results[{i!r}]: give a place or a slice; by its name it is fleet.handles[{i!r}]")
        return [*self._handles.values()][i]

    def __iter__(self) -> Iterator[Handle]:
        return iter([*self._handles.values()])  # a copy: other threads may add models meanwhile

    def __len__(self) -> int:
        return len(self._handles)

    def to_frame(self) -> Any:
        """A pandas DataFrame with one row per model, indexed by name (MissingExtra: pandas is not installed, extra ``pandas``)."""
        return frame("Results.to_frame", [*map(_row, self)], "name")

    def column(self, name: str) -> np.ndarray:
        """One figure of every model, shape (n_models,); NaN if a model has none.

        Raises
        ------
        CalcError : no model has such a figure.
        """
        rows = [*map(_row, self)]
        _known(name, rows)
        return np.array([row.get(name, np.nan) for row in rows])

    def best(self, k: int = 1, by: str | None = None, largest: bool | None = None) -> list[Handle]:
        """The k best models, the best first.  Those without a finite figure come last.

        Parameters
        ----------
        k : int
        by : a figure (default: "val_loss" if a model has one, else "loss").
        largest : whether larger figures are better (default: inferred from names such as loss or accuracy).

        Raises
        ------
        CalcError : no model has such a figure, none has a finite one, or it is not known which direction is better.
        """
        k, handles = checks.integer("k, the number of models,", k), [*self]
        rows = [*map(_row, handles)]
        largest = None if largest is None else checks.flag("largest", largest)
        if by is None:
            by = "val_loss" if any("val_loss" in row for row in rows) else "loss"
        _known(by, rows)
        figures = [row.get(by, np.nan) for row in rows]
        if any(isinstance(figure, str) for figure in figures):
            raise CalcError(f"{by!r} is not a number: there is no best by it")
        if rows and not np.isfinite(figures).any():
            raise CalcError(f"no model has a finite {by!r}, so none is the best: train them, or look at their status")
        sign = -1 if largest_of("best", by, largest) else 1
        order = sorted(range(len(rows)), key=lambda i: _finite_first(sign * figures[i]))
        return [handles[i] for i in order[:k]]

    def __repr__(self) -> str:
        return f"<results of {len(self)} models, of which {sum(h.open for h in self)} can go on>"

    def _shown(self) -> tuple[list[str], list[list[str]], list[str]]:
        """Column names, the first rows, and the notes below them."""
        rows = [*map(_row, self)]
        names = [n for n in dict.fromkeys(k for row in rows for k in row) if n != "error"]
        if any(row["error"] for row in rows):
            names.append("error")
        cells = [[_text(row.get(name, "")) for name in names] for row in rows[: self.SHOWN]]
        more = len(self) - len(cells)
        return names, cells, [*([f"... {more} more"] if more > 0 else []), *([self.stopped] if self.stopped else [])]


def _row(h: Handle) -> dict[str, Any]:
    return {
        "name": h.name,
        "status": h.status,
        "epochs": h.epochs_done,
        **h.figures,
        "bytes": h.nbytes,
        "error": h.error,
    }


def _known(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise CalcError if no row has a figure of this name."""
    checks.text("the name of a figure", name, "loss")
    if rows and not any(name in row for row in rows):
        known = ", ".join(dict.fromkeys(key for row in rows for key in row))
        raise CalcError(f"no model has a figure {checks.shown(name)}; there are {known}")


def _finite_first(value: float) -> tuple[bool, float]:
    return (not np.isfinite(value), value)


def _text(value: Any) -> str:
    return number(value) if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)

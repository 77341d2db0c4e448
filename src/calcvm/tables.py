"""Tables as text, and as HTML for notebooks; short forms of numbers, times and names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from calcvm.errors import MissingExtra


def escape(text: str) -> str:
    """Text escaped for HTML."""
    import html  # only notebooks need it, with its table of 2231 characters

    return html.escape(text)


def laid_out(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]


def html(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], rest: str = "") -> str:
    """A table with a title above it and a line below."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    end = f"<p>{escape(rest)}</p>" if rest else ""
    return f"<p>{escape(title)}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{end}"


class Table:
    """An object that is shown as a table; ``_shown`` gives the column names, the rows of cells, and the notes below them."""

    _shown: Callable[[], tuple[Sequence[str], Sequence[Sequence[str]], Sequence[str]]]

    def __str__(self) -> str:
        names, rows, rest = self._shown()
        return "\n".join([*laid_out([names, *rows]), *rest])

    def _repr_html_(self) -> str:
        names, rows, rest = self._shown()
        return html(repr(self), names, rows, "; ".join(rest))


def preformatted(text: str) -> str:
    """Text with aligned columns, as HTML."""
    return f'<pre style="font-family: monospace">{escape(text)}</pre>'


class Lines(str):
    """A text of several lines that consoles and notebooks display as lines, not as a quoted string."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return preformatted(self)


def number(value: float) -> str:
    """A number in few characters."""
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    """A time in a suitable unit: ``0.41 ms``, ``12.3 s``."""
    if not math.isfinite(seconds):
        return "?"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size or unit == "us":
            value = seconds / size
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    raise AssertionError


def some(names: Sequence[str]) -> str:
    """The first ten of some names, and their number if there are more."""
    return ", ".join(names[:10]) + (f", ... ({len(names)})" if len(names) > 10 else "") if names else "none"


def frame(what: str, rows: Sequence[Mapping[str, Any]], index: str, columns: Sequence[str] | None = None) -> Any:
    """Rows as a pandas DataFrame, indexed by one of their entries (MissingExtra: pandas is not installed)."""
    try:
        import pandas
    except ImportError as error:
        raise MissingExtra("pandas", "pandas", what) from error
    return pandas.DataFrame(rows, columns=[index, *columns] if columns is not None else None).set_index(index)

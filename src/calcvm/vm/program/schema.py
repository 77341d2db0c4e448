"""Schemas of documents in files: the type, range and fields of each value, declared beside the code that reads it.

A spec is a function that returns a value ready for use, or raises `Misfit`.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from calcvm import checks
from calcvm.errors import CalcError, ProgramError

Spec = Callable[[Any], Any]


class Misfit(Exception):
    """A value does not match its spec; ``place`` is its place in the document, as far as known."""

    def __init__(self, message: str):
        super().__init__(message)
        self.place = ""


def check(spec: Spec, value: Any, where: str, error: type[CalcError] = ProgramError) -> Any:
    """The value as returned by the spec; ``where`` names the document in errors."""
    try:
        return spec(value)
    except Misfit as misfit:
        raise error(f"{where}{misfit.place} {misfit}") from None


def _wanted(value: Any, wanted: str) -> Misfit:
    return Misfit(f"must be {wanted}, not {checks.shown(value)}")


def _inside(place: str, spec: Spec, value: Any) -> Any:
    try:
        return spec(value)
    except Misfit as misfit:
        misfit.place = place + misfit.place
        raise


# ---------------------------------------------------------------- single values
def integer(low: int, high: int) -> Spec:
    """An integer from ``low`` to ``high``; NumPy integers count, booleans do not."""

    wanted = f"an integer >= {low}" if high == checks.LARGEST else f"an integer from {low} to {high}"

    def read(value: Any) -> int:
        if type(value) is int and low <= value <= high:  # the most frequent case
            return value
        if not checks.is_integer(value) or not low <= value <= high:
            raise _wanted(value, wanted)
        return int(value)

    return read


def number(low: float = -math.inf, high: float = math.inf, infinite: bool = False) -> Spec:
    """A float or an integer, finite unless ``infinite`` allows otherwise."""

    def read(value: Any) -> float:
        if (
            not checks.is_number(value)
            or not low <= value <= high
            or abs(value) > MOST
            and not (infinite and math.isinf(value))
        ):
            raise _wanted(value, "a finite number" if (low, high) == (-math.inf, math.inf) else f"from {low} to {high}")
        return value

    return read


MOST = sys.float_info.max


def boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wanted(value, "true or false")
    return value


def text(pattern: str = "(?s:.*)", what: str = "a text") -> Spec:
    """A text that matches all of ``pattern`` and can be encoded as UTF-8."""
    matches = re.compile(pattern).fullmatch

    def read(value: Any) -> str:
        if not isinstance(value, str) or not matches(value):
            raise _wanted(value, what)
        return value

    return read


def one_of(*values: Any) -> Spec:
    """One of the given texts (or None)."""

    def read(value: Any) -> Any:
        if not isinstance(value, (str, type(None))) or value not in values:
            raise _wanted(value, f"one of {', '.join(map(repr, values))}")
        return value

    return read


def optional(spec: Spec) -> Spec:
    """None, or a value that ``spec`` accepts."""
    return lambda value: None if value is None else spec(value)


# ---------------------------------------------------------------- composed values
def listing(spec: Spec, most: int | None = None) -> Spec:
    """A list of any length, or of at most ``most``."""

    def read(value: Any) -> list[Any]:
        if not isinstance(value, list) or (most is not None and len(value) > most):
            raise _wanted(value, "a list" if most is None else f"a list of at most {most}")
        return [_inside(f"[{i}]", spec, item) for i, item in enumerate(value)]

    return read


def entry(**specs: Spec) -> Spec:
    """A list with one item per spec, in order."""

    def read(value: Any) -> list[Any]:
        if not isinstance(value, list) or len(value) != len(specs):
            raise _wanted(value, f"a list of {', '.join(specs)}")
        return [_inside(f".{name}", spec, item) for (name, spec), item in zip(specs.items(), value)]

    return read


def table(spec: Spec) -> Spec:
    """A mapping with arbitrary names."""

    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise _wanted(value, "a mapping")
        return {name: _inside(f"[{name!r}]", spec, item) for name, item in value.items()}

    return read


def mapping(fields: Mapping[str, Spec], optional: Mapping[str, Spec] = {}, others: bool = False) -> Spec:  # noqa: B006
    """A mapping with these fields; ``optional`` ones may be missing, and ``others`` are allowed if set."""
    known = {**fields, **optional}

    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise _wanted(value, f"a mapping with {', '.join(known)}")
        missing, strange = fields.keys() - value.keys(), value.keys() - known.keys()
        if missing or (strange and not others):
            raise Misfit(f"lacks {min(missing)!r}" if missing else f"has an unknown field {min(strange)!r}")
        return {name: _inside(f".{name}", known.get(name, _as_it_is), item) for name, item in value.items()}

    return read


def _as_it_is(value: Any) -> Any:
    return value

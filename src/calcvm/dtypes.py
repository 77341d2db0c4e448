"""Types of numbers by name, and conversion of numbers to arrays of a type."""

from __future__ import annotations

from typing import Any

import numpy as np

from calcvm import checks
from calcvm.errors import CalcError
from calcvm.ops.types import BYTES, FLOAT, TYPES


def type_of(what: str, value: Any) -> str:
    """A type of `calcvm.ops.types`, by its name or NumPy type; None: the program's float."""
    if value is None or value is float or (isinstance(value, str) and value == FLOAT):
        return FLOAT
    try:
        name = np.dtype(value).name
    except (TypeError, ValueError, SyntaxError):
        name = ""
    if name not in BYTES:
        raise CalcError(f"{what}: dtype {checks.shown(value)} is unknown; take one of {', '.join(TYPES)}")
    return name


def as_type(what: str, numbers: np.ndarray, type_: str) -> np.ndarray:
    """Convert numbers to an array of a type that can represent them all; floats are rounded.

    Raises
    ------
    CalcError : the type cannot represent a number.
    """
    if numbers.dtype == type_:
        return numbers
    with np.errstate(all="ignore"):
        out = numbers.astype(type_)
    if out.dtype.kind != "f":
        wrong = np.flatnonzero((out != numbers).reshape(-1))
        if wrong.size:
            where = tuple(map(int, np.unravel_index(wrong[0], numbers.shape)))
            raise CalcError(f"{what}: {numbers[where]}{f' at index {where}' if where else ''} is no {type_}")
    return out

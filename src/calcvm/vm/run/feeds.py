"""User data: this module decides how inputs are read, in place or converted."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from calcvm import checks, dtypes
from calcvm.errors import CalcError, ShapeError
from calcvm.vm.run import job as J

PADDED = "; as an array, sequences of different lengths are cv.pad_sequences(sequences, steps)"
FINITE_BLOCK = 1 << 20
JOIN = (
    "; evaluate, predict and validation take arrays, only fit takes batches, fit(batches): join them, "
    "np.concatenate([x for x, _ in batches])"
)
IN_PLACE = frozenset(np.dtype(name) for name in J.FEED_DTYPES)  # in the machine's byte order


def numbers(name: str, value: Any, dtype: str = "") -> np.ndarray:
    """A value as an array of a type that compiled code reads; arrays of these types (`IN_PLACE`) are not copied.

    dtype : type of the array, for a placeholder that does not have the heap's float type.

    Others are converted without loss, except longdouble and uint64 numbers, which become the nearest float64.  A value that is not
    numeric is left as it is, except a table with named columns: `BaseModel.check` rejects it.

    Raises
    ------
    CalcError : it is no array, has masked values or numbers that ``dtype`` cannot hold, or a table has a non-numeric column.
    """
    if type(value) is np.ndarray and (value.dtype == dtype if dtype else value.dtype in IN_PLACE):
        return value
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(value, masked.MaskedArray) and masked.is_masked(value):
        count = int(masked.count_masked(value))
        raise CalcError(f"{name!r}: {count} values are masked: fill them (.filled(0)), or leave their samples out")
    try:
        array = np.asarray(value)
    except (RuntimeError, TypeError) as error:  # from other libraries' arrays
        raise CalcError(f"{name!r}: {checks.called(value)} cannot be read as an array ({error})") from None
    except ValueError:  # rows of different lengths, mostly
        hint = of_batches(value) + PADDED * (
            isinstance(value, list) and all(isinstance(row, np.ndarray) for row in value)
        )
        raise ShapeError(f"{name!r}: {checks.shown(value)} is no array: its rows differ in shape{hint}") from None
    given = array.dtype
    if given.kind not in "fiub":
        return numeric(name, array, value.columns) if hasattr(value, "columns") else array
    if dtype:
        return dtypes.as_type(repr(name), array, dtype)
    if given in IN_PLACE:
        return array
    if given.kind == "b":
        return array.view(np.uint8)
    if given.kind == "f":
        return array.astype(np.float32 if given.itemsize <= 4 else np.float64)
    if given.kind == "u" and given.itemsize == 8 and array.size and array.max() > np.iinfo(np.int64).max:
        return array.astype(np.float64)
    return array.astype(np.int32 if np.can_cast(given, np.int32) else np.int64)


def of_batches(value: Any) -> str:
    """The end of an error where arrays are wanted: how to join batches, if the value seems to be some; else ""."""
    if isinstance(value, (list, tuple)):
        found = any(getattr(a, "ndim", 0) for part in value[:1] if np.iterable(part) for a in part)
    else:
        found = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
    return JOIN * found


def code_of(array: np.ndarray, own: bool) -> int:
    """A feed's DTYPE for an array; ``own`` : the placeholder has the array's type instead of the heap's float type."""
    return J.FEED_CELLS[array.itemsize] if own else J.FEED_DTYPES[array.dtype.name]


def numeric(name: str, array: np.ndarray, columns: Any = None) -> np.ndarray:
    """An array of numbers (CalcError: it holds something else).

    columns : the column names of a table; numbers of mixed types become float64, and other objects are rejected.
    """
    if array.dtype.kind in "fiub":
        return array
    strange = (i for i, v in enumerate(array.flat) if not (checks.is_number(v) or isinstance(v, (bool, np.bool_))))
    at = next(strange, None)
    if at is None and columns is not None:
        return array.astype(np.float64)
    if at is None:
        whole = all(isinstance(value, (int, np.integer)) for value in array.flat)
        what, remedy = "", f"give data.astype(np.{'int64' if whole else 'float32'})"
        large = next((i for i, v in enumerate(array.flat) if abs(v) > sys.float_info.max), None)
        if large is not None:
            what, remedy = f" (its number at index {index_of(array, large)} is beyond 1.8e308)", "give smaller ones"
    else:
        where, value = index_of(array, at), array.flat[at]
        value = value.item() if isinstance(value, np.generic) else value
        column = f", column {columns[where[-1]]!r}" if columns is not None and len(where) == 2 else ""
        what, remedy = f" ({checks.shown(value)} at index {where}{column})", "give numbers"
        if isinstance(value, (str, bytes)) and array.ndim == 1:
            remedy += ": for classes y, labels are np.unique(y, return_inverse=True)[1]"
        elif isinstance(value, (str, bytes)):
            remedy += ": leave the column out, or give a 0/1 column for each of its values"
        elif array.dtype.kind == "O":
            remedy += f": {_remedy(value)}"
    raise CalcError(f"{name!r}: data of dtype {array.dtype}{what} cannot be used; {remedy}")


def _remedy(value: Any) -> str:
    """The remedy for an object among numbers."""
    if np.ndim(value):
        return "join the arrays, such as by np.stack"
    if value is None or type(value).__name__ in ("NAType", "NaTType") or not value == value:
        return "give it a value, or leave its sample out"
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return "convert it to a number, or leave its column out"
    return "convert them, data.astype(float)"


def outside(array: np.ndarray, found: Any) -> str:
    """The finding for an array with invalid numbers: the first NaN if there is one, else ``found``."""
    missing = np.isnan(array)
    return (
        f"nan at index {index_of(array, int(np.argmax(missing)))}: give it a value, or leave its sample out"
        if missing.any()
        else str(found)
    )


def index_of(array: np.ndarray, at: int) -> tuple[int, ...]:
    """The index of the element at a position in an array's flat order."""
    return tuple(map(int, np.unravel_index(at, array.shape)))


def plain(name: str, value: Any, dtype: str = "") -> np.ndarray:
    """`readable`, with NumPy's own object for its dtype: the form that compiled methods take."""
    array = readable(name, value, dtype=dtype)
    return array if array.dtype is np.dtype(array.dtype.type) else array.view(array.dtype.type)


def readable(name: str, value: Any, finite: str = "", dtype: str = "") -> np.ndarray:
    """`numbers`, C-contiguous; rejects values that are NaN or Inf in ``finite``, the model's float type."""
    array = np.asarray(numbers(name, value, dtype), order="C")
    if finite and array.dtype.kind == "f":
        flat = array.reshape(-1)
        for i in range(0, flat.size, FINITE_BLOCK):
            with np.errstate(over="ignore"):
                block = flat[i : i + FINITE_BLOCK].astype(finite if not dtype else array.dtype, copy=False)
            bad = np.flatnonzero(~np.isfinite(block))
            if bad.size:
                at = i + int(bad[0])
                where = index_of(array, at)
                seen = f", which is {block[bad[0]]} in {finite}," if np.isfinite(flat[at]) else ""
                raise CalcError(f"{name!r}: {flat[at]}{seen} at index {where}; remove it")
    return array

"""Checks of users' arguments: NumPy's numbers become Python's, and an error is one sentence.

Every function takes ``what``, the place and name of the value, and returns the value as Python's int, float, str or
bool, which a file can hold.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any, TypeVar

from calcvm.errors import CalcError, ShapeError

SHOWN = 60  # characters of a value in a message
LARGEST = 2**63 - 1
HUGE = 1e300  # messages omit larger bounds
T = TypeVar("T")


def shown(value: Any) -> str:
    """A value in a message: on one line, and cut if it is long."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:
        return f"{type(value).__name__} of shape {shape}"
    if isinstance(value, (bytes, bytearray)) and len(value) > SHOWN:
        return f"{type(value).__name__} of length {len(value)}"
    if isinstance(value, (list, tuple, dict, set, str)) and len(value) > SHOWN:
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and abs(value) > 2**200:  # Python does not print integers of thousands of digits
        return f"an integer of {value.bit_length()} bits"
    text = " ".join(repr(value).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def plain(value: Any) -> Any:
    """Convert NumPy's numbers, and constant sizes of variables, to Python's, also inside tuples and lists."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(plain, value)) if type(value) in (tuple, list) else value
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item() if value.dtype.kind in "iufb" else value
    if type(value).__module__ == "calcvm.ops.dims" and value.constant:
        return value.b
    return value


def is_integer(value: Any) -> bool:
    """Whether it has an integer type of Python or NumPy, and is no bool."""
    return isinstance(plain(value), Integral) and not isinstance(plain(value), bool)


def is_number(value: Any) -> bool:
    """Whether it has a real type of Python or NumPy, and is no bool."""
    return isinstance(plain(value), Real) and not isinstance(plain(value), bool)


def integer(what: str, value: Any, low: int = 1, high: int = LARGEST, *, unless: str = "") -> int:
    """An integer in [low, high].

    Raises
    ------
    CalcError : it is not one; ``unless`` adds an alternative to the message.
    """
    if type(value) is int and low <= value <= high:  # the common case
        return value
    if is_integer(value) and low <= (number := operator.index(plain(value))) <= high:
        return number
    small = high == LARGEST and not (is_integer(value) and value > high)
    bounds = f">= {low}" if small else f"from {low} to {high}"
    raise CalcError(f"{what} must be an integer {bounds}{unless}, not {shown(value)}")


def number(
    what: str, value: Any, low: float = -math.inf, high: float = math.inf, *, ends: str = "[]", unless: str = ""
) -> float:
    """A finite number between two bounds; ``ends`` is as in mathematics: "[)" includes only the lower bound."""
    if is_number(value):
        try:
            x = float(value)
        except OverflowError:
            x = math.inf
        if (
            math.isfinite(x)
            and (low < x if ends[0] == "(" else low <= x)
            and (x < high if ends[1] == ")" else x <= high)
        ):
            return given if isinstance(given := plain(value), (int, float)) else x
    raise CalcError(f"{what} must be {_interval(low, high, ends)}{unless}, not {shown(value)}")


def _interval(low: float, high: float, ends: str) -> str:
    if -HUGE < low and high < HUGE:
        return f"a number in {ends[0]}{low:g}, {high:g}{ends[1]}"
    if low > -HUGE:
        return f"a number {'>' if ends[0] == '(' else '>='} {low:g}"
    return "a finite number"


def called(value: Any) -> str:
    """An object in a message: its value and type."""
    if isinstance(value, type):
        return f"the class {value.__name__} (write {value.__name__}(...))"
    return shown(value) if value is None else f"{shown(value)} ({type(value).__name__})"


def flag(what: str, value: Any) -> bool:
    """True or False."""
    value = plain(value)
    if not isinstance(value, bool):
        raise CalcError(f"{what} must be True or False, not {shown(value)}")
    return value


def text(what: str, value: Any, example: str = "") -> str:
    """A nonempty text."""
    if not isinstance(value, str) or not value:
        raise CalcError(f"{what} is a text{example and f' such as {example!r}'}, not {shown(value)}")
    return value


def choice(what: str, value: Any, known: Iterable[Any]) -> Any:
    """One of the known values."""
    known = tuple(known)
    if not any(value is k or (isinstance(value, str) and value == k) for k in known):
        raise CalcError(f"{what} {shown(value)} is unknown; take one of {', '.join(str(k) for k in known)}")
    return value


def one_of(what: str, value: Any, kind: type[T] | tuple[type, ...], wanted: str) -> T:
    """An object of a type; ``wanted`` names the type and how to get one."""
    if not isinstance(value, kind):
        raise CalcError(f"{what}: {wanted} is wanted, not {called(value)}")
    return value  # type: ignore[return-value]


def items(what: str, value: Any, wanted: str) -> list[Any]:
    """The items of a list, tuple, array or other iterable, but not of a text or mapping."""
    try:
        if isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping)):
            return list(value)
    except TypeError:
        pass
    raise CalcError(f"{what}: {wanted} is wanted, not {called(value)}")


def sizes(
    what: str, shape: Any, *, batch: bool = False, low: int = 1, no_batch: str = "the batch is added to it"
) -> tuple[Any, ...]:
    """A shape: integers, and, with ``batch``, None for the batch; else ``no_batch`` says why there is no None."""
    try:
        shape = tuple(items(what, shape, "a tuple of sizes"))
    except CalcError:
        hint = f": write ({plain(shape)},)" if is_integer(shape) else ""
        raise ShapeError(f"{what} must be a tuple of sizes such as (8, 8), not {shown(shape)}{hint}") from None
    out: list[int | None] = []
    for size in shape:
        if size is None and batch:
            out.append(None)
        elif is_integer(size) and low <= operator.index(plain(size)) <= LARGEST:
            out.append(operator.index(plain(size)))
        else:
            why = no_batch if size is None else f"{shown(size)} is no size"
            raise ShapeError(f"{what} must be a tuple of sizes such as (8, 8), not {shown(shape)}: {why}")
    return tuple(out)

"""The base class of formulas' numbers, and functions of several numbers: choices, conditions, constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Number:
    """A number with +, -, *, / and comparisons, and a method for each function below, with its name.

    It has ``select(condition, x, y)``, and a method for each function of one number (`calcvm.formulas.functions`) that is
    not computed by its ``value``.
    """

    def __bool__(self) -> bool:
        raise TypeError(
            "a formula is evaluated for all elements at once, so if, and, or, not, max, min and chained comparisons cannot "
            "depend on an element: take where(condition, x, y), both, either or holds_not of calcvm.formulas.number"
        )

    def rarely(self, condition: Any, usual: Sequence[Any], make: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        return [where(condition, x, y) for x, y in zip(make(), usual)]


def fma(x: Any, y: Any, z: Any) -> Any:
    """x*y + z, rounded once if the device can."""
    return x.fma(y, z)


def where(condition: Any, x: Any, y: Any) -> Any:
    """x if the condition (a comparison of numbers) holds, else y; one of them may be a constant."""
    if not isinstance(x, Number) and not isinstance(y, Number):
        raise TypeError(f"where(condition, {x!r}, {y!r}): constants have no type: make one a number, like(x, {x!r})")
    number: Any = x if isinstance(x, Number) else y
    return number.select(condition, x, y)


def rarely(condition: Any, usual: Sequence[Any], make: Callable[[], Sequence[Any]]) -> Any:
    """The numbers of ``make()`` if the condition holds, else the usual ones; it costs time only if an element of the vector needs it."""
    return usual[0].rarely(condition, usual, make)


def both(a: Any, b: Any) -> Any:
    """Whether both conditions hold."""
    return a & b


def either(a: Any, b: Any) -> Any:
    """Whether at least one condition holds."""
    return a | b


def one(a: Any, b: Any) -> Any:
    """Whether exactly one condition holds."""
    return a ^ b


def holds_not(a: Any) -> Any:
    """Whether a condition does not hold."""
    return ~a


def like(x: Any, c: float) -> Any:
    """The constant c as a number of x's type."""
    return x.const(c)


def pick(x: Any, f32: Any, f64: Any) -> Any:
    """The one of two values that matches x's precision."""
    return f64 if x.is_f64 else f32


def leading(x: Any) -> Any:
    """x without the lower half of its bits: the product of two such numbers is exact, contracted or not."""
    return x.leading()


def poly(x: Any, f32: tuple[float, ...], f64: tuple[float, ...]) -> Any:
    """c[0] + c[1]*x + ... by Horner's rule, with the coefficients for x's precision."""
    c = pick(x, f32, f64)
    y = like(x, c[-1])
    for a in c[-2::-1]:
        y = fma(y, x, a)
    return y


def equal(x: Any, y: Any) -> Any:
    number: Any
    number, other = (x, y) if isinstance(x, Number) else (y, x)
    return number.equals(other)

"""What numbers of formulas are, and what formulas do with several of them: choices, conditions, constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Number:
    """What has +, -, *, /, comparisons, and methods of the names of the functions below.

    ``select(condition, x, y)``, and a method for each function of one number (`calcvm.formulas.functions`) that is not
    computed by its ``value``.
    """

    def __bool__(self) -> bool:
        raise TypeError(
            "a formula is one for all elements, so if, and, or, not, max, min and chained comparisons cannot ask an "
            "element: take where(condition, x, y), both, either or holds_not of calcvm.formulas.number"
        )

    def rarely(self, condition: Any, usual: Sequence[Any], make: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        return [where(condition, x, y) for x, y in zip(make(), usual)]


def fma(x: Any, y: Any, z: Any) -> Any:
    """x*y + z, rounded once where the device can."""
    return x.fma(y, z)


def where(condition: Any, x: Any, y: Any) -> Any:
    """x where the condition (a comparison of numbers) holds, else y; one of them may be a constant."""
    if not isinstance(x, Number) and not isinstance(y, Number):
        raise TypeError(f"where(condition, {x!r}, {y!r}): constants have no type: make one a number, like(x, {x!r})")
    number: Any = x if isinstance(x, Number) else y
    return number.select(condition, x, y)


def rarely(condition: Any, usual: Sequence[Any], make: Callable[[], Sequence[Any]]) -> Any:
    """Numbers that ``make()`` gives where the condition holds, else the usual ones: takes time where a vector has such an element."""
    return usual[0].rarely(condition, usual, make)


def both(a: Any, b: Any) -> Any:
    """Whether both conditions hold."""
    return a & b


def either(a: Any, b: Any) -> Any:
    """Whether one condition holds, or both."""
    return a | b


def one(a: Any, b: Any) -> Any:
    """Whether one condition holds, and not both."""
    return a ^ b


def holds_not(a: Any) -> Any:
    """Whether a condition does not hold."""
    return ~a


def like(x: Any, c: float) -> Any:
    """The constant c as a number of x's type."""
    return x.const(c)


def pick(x: Any, f32: Any, f64: Any) -> Any:
    """What is for numbers of x's precision."""
    return f64 if x.is_f64 else f32


def leading(x: Any) -> Any:
    """x without the lower half of its bits: the product of two such is exact, contracted or not."""
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

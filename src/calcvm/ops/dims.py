"""Sizes known up to the batch: ``a*B + b``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


class Quadratic(ValueError):
    """A size that grows with the square of the batch."""


@dataclass(frozen=True)
class Affine:
    """The integer ``a*B + b`` of the batch size ``B``; ``a == 0`` is a plain number."""

    a: int = 0
    b: int = 0

    def at(self, batch: int) -> int:
        return self.a * batch + self.b

    def until(self, last: int) -> Affine:
        """The same size for batches up to ``last``."""
        return self

    def around(self, batch: int) -> Affine:
        """The form of the size near a batch."""
        return self

    def bounds(self, last: int) -> tuple[int, int]:
        """The smallest and the largest value for batches from 1 to ``last``."""
        ends = self.at(1), self.at(last)
        return min(ends), max(ends)

    @property
    def constant(self) -> bool:
        return self.a == 0

    def __add__(self, other: Size) -> Affine:
        o = affine(other)
        return Affine(self.a + o.a, self.b + o.b)

    __radd__ = __add__

    def __neg__(self) -> Affine:
        return Affine(-self.a, -self.b)

    def __sub__(self, other: Size) -> Affine:
        return self + -affine(other)

    def __rsub__(self, other: Size) -> Affine:
        return affine(other) - self

    def __mul__(self, other: Size) -> Affine:
        if type(other) is int:
            return self if other == 1 else Affine(self.a * other, self.b * other)
        o = affine(other)
        if self.a and o.a:
            raise Quadratic(f"({self}) * ({o}) is quadratic in the batch size")
        return Affine(self.a * o.b + self.b * o.a, self.b * o.b)

    __rmul__ = __mul__

    def __floordiv__(self, other: Size) -> Affine:
        """Exact division, by a number or by a multiple of the same form."""
        o = affine(other)
        if o.a == 0:
            if o.b and self.a % o.b == 0 and self.b % o.b == 0:
                return Affine(self.a // o.b, self.b // o.b)
        elif self.a % o.a == 0 and self.b == o.b * (self.a // o.a):
            return Affine(0, self.a // o.a)
        raise ArithmeticError(f"({self}) is not a multiple of ({o})")

    def __index__(self) -> int:
        if not self.constant:
            raise TypeError(f"the size {self} is not known before the batch is")
        return self.b

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            return self.a == 0 and self.b == other
        return isinstance(other, Affine) and (self.a, self.b) == (other.a, other.b)

    def __bool__(self) -> bool:
        return self.a != 0 or self.b != 0

    def __hash__(self) -> int:
        return hash(self.b) if self.a == 0 else hash((self.a, self.b))

    def __str__(self) -> str:
        if self.a == 0:
            return str(self.b)
        head = "B" if self.a == 1 else f"{self.a}*B"
        return head if self.b == 0 else f"{head}{self.b:+d}"

    __repr__ = __str__


Size = Affine | int
Shape = tuple[Affine, ...]
BATCH = Affine(1, 0)
ZERO, ONE = Affine(0, 0), Affine(0, 1)


def affine(n: Size) -> Affine:
    return n if isinstance(n, Affine) else Affine(0, int(n))


def shape_of(sizes: tuple | list) -> Shape:
    """A shape from numbers, affine sizes and None (the batch)."""
    return tuple(BATCH if s is None else affine(s) for s in sizes)


def numel(shape: Shape) -> Affine:
    """Elements of a tensor.

    Raises
    ------
    Quadratic
        More than one axis depends on the batch.
    """
    n = ONE
    for s in shape:
        n = n * s
    return n


def show(shape: Shape) -> str:
    return "(" + ", ".join(str(s) for s in shape) + ("," if len(shape) == 1 else "") + ")"


def check_linear(shapes: Mapping[str, Shape]) -> None:
    """Reject shapes that have the batch twice (`Quadratic`)."""
    for shape in shapes.values():
        if sum(not s.constant for s in shape) > 1:
            raise Quadratic(
                f"the result {show(shape)} has the batch more than once, but sizes must be linear in it: if an axis "
                f"of 1 is missing, reshape an input, such as {show((BATCH,))} to {show((BATCH, ONE))}"
            )

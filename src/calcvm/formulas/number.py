"""The numbers that formulas compute with, and what formulas may do with them.

A formula is a Python function of numbers.  What they are decides what comes of it: on a CPU they are vectors of LLVM IR
under construction (`kernels_cpu`), on a GPU scalars of it (`kernels_cuda`), in the simulator NumPy's; here they are
texts, for listings (`text_of`), and counters, of operations (`operations`).  Constants are Python's own; they have the
type of the number that they meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Number:
    """What has +, -, *, /, comparisons, and methods of the names of the functions below.

    ``select(condition, x, y)``, and where a device knows no better way these:
    """

    def __bool__(self) -> bool:
        raise TypeError(
            "a formula is one for all elements, so if, and, or, not, max, min and chained comparisons cannot ask an "
            "element: take where(condition, x, y), both, either or holds_not of calcvm.formulas.number"
        )

    def logistic(self) -> Any:
        return 1 / (1 + exp(-self))  # type: ignore[operator]

    def softplus(self) -> Any:
        return log(1 + exp(self))  # type: ignore[operator]

    def sign(self) -> Any:
        return where(self > 0, like(self, 1.0), where(self < 0, like(self, -1.0), 0.0))  # type: ignore[operator]


# ---------------------------------------------------------------- what formulas are written with
def exp(x: Any) -> Any:
    return x.exp()


def expm1(x: Any) -> Any:
    return x.expm1()


def log(x: Any) -> Any:
    return x.log()


def log1p(x: Any) -> Any:
    return x.log1p()


def tanh(x: Any) -> Any:
    return x.tanh()


def logistic(x: Any) -> Any:
    """1/(1 + exp(-x))"""
    return x.logistic()


def softplus(x: Any) -> Any:
    """log(1 + exp(x))"""
    return x.softplus()


def erf(x: Any) -> Any:
    return x.erf()


def sqrt(x: Any) -> Any:
    return x.sqrt()


def fabs(x: Any) -> Any:
    return x.fabs()


def floor(x: Any) -> Any:
    return x.floor()


def ceil(x: Any) -> Any:
    return x.ceil()


def rint(x: Any) -> Any:
    """The nearest integer, of two the even one."""
    return x.rint()


def fma(x: Any, y: Any, z: Any) -> Any:
    """x*y + z, rounded once where the device can."""
    return x.fma(y, z)


def where(condition: Any, x: Any, y: Any) -> Any:
    """x where the condition (a comparison of numbers) holds, else y; one of them may be a constant."""
    number: Any = x if isinstance(x, Number) else y
    return number.select(condition, x, y)


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


def equal(x: Any, y: Any) -> Any:
    return x.equals(y)


def sign(x: Any) -> Any:
    """-1, 0 or 1; NaN is 0, as no gradient passes there."""
    return x.sign()


# of one number, that every device has
FUNCTIONS = ("exp", "expm1", "log", "log1p", "tanh", "erf", "sqrt", "fabs", "floor", "ceil", "rint")


# ---------------------------------------------------------------- texts
class Text(Number):
    """A formula as it would be written on paper."""

    def __init__(self, text: str, rank: int = 9):
        self.text, self.rank = text, rank

    def __eq__(self, other: object) -> bool:
        raise TypeError("== and != ask whether two numbers are one: take equal(x, y) of calcvm.formulas.number")

    def at(self, rank: int) -> str:
        return self.text if self.rank >= rank else f"({self.text})"

    def const(self, c: Any) -> Text:
        if isinstance(c, Text):
            return c
        text = f"{c:g}"
        return Text(text, 9 if c >= 0 else 3)

    def select(self, condition: Text, x: Any, y: Any) -> Text:
        return Text(f"{condition.text} ? {self.const(x).at(2)} : {self.const(y).at(1)}", 1)

    def fma(self, y: Any, z: Any) -> Text:
        return self * y + z

    def fabs(self) -> Text:
        return Text(f"|{self.text}|")

    def equals(self, other: Any) -> Text:
        return Text(f"{self.at(3)} = {self.const(other).at(3)}", 2)

    def __invert__(self) -> Text:
        return Text(f"not {self.at(3)}", 2)

    def __neg__(self) -> Text:
        return Text(f"-{self.at(4)}", 4)


def _written(sign: str, rank: int, right: int, space: str) -> tuple[Callable, Callable]:
    def forward(x: Text, y: Any) -> Text:
        y = x.const(y)
        if sign == "*" and y.text == x.text:
            return Text(f"{x.at(6)}^2", 5)
        return Text(f"{x.at(rank)}{space}{sign}{space}{y.at(right)}", rank)

    return forward, lambda x, y: forward(x.const(y), x)


for _name, _sign, _rank, _right, _space in (
    ("add", "+", 3, 3, " "), ("sub", "-", 3, 4, " "), ("mul", "*", 4, 4, ""), ("truediv", "/", 4, 5, ""),
):  # fmt: skip
    _forward, _backward = _written(_sign, _rank, _right, _space)
    setattr(Text, f"__{_name}__", _forward)
    setattr(Text, f"__r{_name}__", _backward)
for _name, _sign in (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">=")):
    setattr(Text, f"__{_name}__", lambda x, y, sign=_sign: Text(f"{x.at(3)} {sign} {x.const(y).at(3)}", 2))
for _name, _sign in (("and", "and"), ("or", "or"), ("xor", "xor")):
    setattr(Text, f"__{_name}__", lambda x, y, sign=_sign: Text(f"{x.at(2)} {sign} {y.at(2)}", 1))
for _name in (*FUNCTIONS, "sign"):
    if _name != "fabs":
        setattr(Text, _name, lambda x, name=_name: Text(f"{name}({x.text})"))


def text_of(fn: Callable, names: Sequence[str], *choices: Any) -> str:
    """What a formula says of numbers of these names."""
    return fn(*map(Text, names), *choices).text


# ---------------------------------------------------------------- counts
class Count(Number):
    """A number that counts how often one is made, by an operation on others."""

    def __init__(self, made: list[int]):
        self.made = made

    def _one_more(self, *others: Any) -> Count:
        self.made[0] += 1
        return Count(self.made)

    def const(self, c: Any) -> Count:
        return c if isinstance(c, Count) else Count(self.made)

    def select(self, condition: Any, x: Any, y: Any) -> Count:
        return self._one_more()

    def fma(self, y: Any, z: Any) -> Count:
        return self._one_more()._one_more()

    def _compared(self, *other: Any) -> Count:
        return Count(self.made)

    __and__ = __or__ = __xor__ = __invert__ = _compared
    __neg__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _one_more
    __lt__ = __le__ = __gt__ = __ge__ = equals = _compared


for _name in FUNCTIONS:
    setattr(Count, _name, Count._one_more)


def operations(fn: Callable, n: int, *choices: Any) -> int:
    """Operations of a formula of ``n`` numbers."""
    made = [0]
    fn(*(Count(made) for _ in range(n)), *choices)
    return made[0]

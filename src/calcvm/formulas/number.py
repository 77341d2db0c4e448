"""The numbers that formulas compute with, and the operations that formulas may use on them.

A formula is a Python function of numbers.  The kind of numbers decides the result: on a CPU they are vectors of LLVM IR
under construction (`kernels_cpu`), on a GPU scalars of it (`kernels_cuda`), in the simulator NumPy's.  Here they are
texts, for listings (`text_of`), and counters of operations (`operations`).  Constants are Python's own; they take the
type of the number that they meet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from numbers import Integral, Real
from typing import Any

from calcvm.formulas.arithmetic import *  # noqa: F403
from calcvm.formulas.arithmetic import Number
from calcvm.formulas.functions import *  # noqa: F403
from calcvm.formulas.functions import FUNCTIONS

# ---------------------------------------------------------------- texts
FLOAT, ANY, CELLS, CONDITION = "float", "any", "cells", "bool"  # kinds of values in a formula
INSTEAD = {  # advice if a value has the wrong kind
    FLOAT: "a number is no condition: compare it, such as x > 0",
    ANY: "a value annotated Any may be integers, which are compared and selected: without annotation it is a float",
    CELLS: "a value annotated Cells is moved as it is, and nothing else",
    CONDITION: "a condition, such as x > 0, is no number: take where(condition, x, y)",
}
SHORT = 16  # texts up to this length are repeated rather than named


class Trace:
    """The values of a formula as texts: each is created once, after its parts.

    number : the class of its values, `Text` or one with another notation.
    """

    def __init__(self, number: type[Text] | None = None) -> None:
        self.number = number or Text
        self.made: dict[tuple[Any, ...], Text] = {}

    def of(self, form: str, rank: int = 9, parts: tuple[tuple[Text, int], ...] = (), kind: str = FLOAT) -> Any:
        """The value of a form such as "{} + {}", with the parts that fill its places; see `Text`."""
        key = (form, kind, *((id(part), least) for part, least in parts))
        if key not in self.made:
            self.made[key] = self.number(self, form, rank, parts, kind)
        return self.made[key]

    def equations(
        self, results: Sequence[tuple[str, Text]], called: Mapping[int, str] | None = None, places: str = ""
    ) -> list[tuple[str, str]]:
        """Names and texts of results, in the order of their creation, each after the parts that it shares with others.

        A value that is used again is written once, under its name in ``called`` (by its id), or, if it is longer than `SHORT`
        characters, as u1, u2, ..., each with ``places`` after it, such as "[r,c]".
        """
        called = called or {}
        named: dict[int, list[str]] = {}
        for name, result in results:
            named.setdefault(id(result), []).append(name)
        uses = dict.fromkeys(named, 1)
        for value in reversed(self.made.values()):
            for part, _ in value.parts if id(value) in uses else ():
                uses[id(part)] = uses.get(id(part), 0) + 1
        taken = {value.form for value in self.made.values()} | {name for name, _ in results}
        free = (f"{name}{places}" for k in count(1) if (name := f"u{k}") not in taken)
        written: dict[int, tuple[str, int]] = {}  # and rank
        out: list[tuple[str, str]] = []
        for value in self.made.values():
            if id(value) not in uses:
                continue
            parts = [(*written[id(part)], least) for part, least in value.parts]
            text = value.form.format(*(said if rank >= least else f"({said})" for said, rank, least in parts))
            written[id(value)] = text, value.rank
            again = id(value) not in named and value.parts and uses[id(value)] > 1
            if again and (len(text) > SHORT or id(value) in called):
                name = called.get(id(value)) or next(free)
                written[id(value)] = name, 9
                out.append((name, text))
            for name in named.get(id(value), ()):
                out.append((name, text))
                if name.isidentifier():
                    written[id(value)], text = (name, 9), name
        return out

    def program(self, name: str, result: Text, places: str = "") -> str:
        """The equations of a result, preceded by those of values that it uses repeatedly."""
        return "; ".join(f"{name} = {said}" for name, said in self.equations([(name, result)], places=places))


class Text(Number):
    """A formula in mathematical notation.

    rank : how tightly it binds.  parts : values, with the lowest rank that needs no parentheses in its place.
    kind : FLOAT, ANY, CELLS or CONDITION; a formula that mixes them is rejected (TypeError).
    """

    def __init__(self, trace: Trace, form: str, rank: int, parts: tuple[tuple[Text, int], ...], kind: str):
        self.trace, self.form, self.rank, self.parts, self.kind = trace, form, rank, parts, kind

    def _of(self, kind: str, form: str, rank: int, *parts: tuple[Text, int]) -> Text:
        return self.trace.of(form, rank, parts, kind)

    def _all(self, wanted: tuple[str, ...], *others: Any) -> list[Text]:
        """Itself and the others, all of one of the wanted kinds."""
        given = [self, *map(self.const, others)]
        for value in given:
            if value.kind not in wanted:
                raise TypeError(INSTEAD[value.kind])
            if value.kind != self.kind:
                raise TypeError("values of different types meet: annotate all of them, or none")
        return given

    def __eq__(self, other: object) -> bool:
        raise TypeError("== and != do not compare numbers of a formula: take equal(x, y) of calcvm.formulas.number")

    __hash__ = None  # type: ignore[assignment]

    def __float__(self) -> float:
        raise TypeError("a formula is evaluated for all elements at once: take the functions of calcvm.formulas.number")

    def _none(self, *others: Any) -> Any:
        raise TypeError(f"formulas have + - * /, comparisons, and {', '.join(FUNCTIONS)} of calcvm.formulas.number")

    __pow__ = __rpow__ = __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = __abs__ = __pos__ = __getitem__ = _none

    def const(self, c: Any) -> Text:
        if isinstance(c, Text):
            return c
        if isinstance(c, bool) or not isinstance(c, Real):
            raise TypeError(f"{c!r} is no number, and no condition, of the formula")
        if self.kind in (CELLS, CONDITION):
            raise TypeError(INSTEAD[self.kind])
        if self.kind == ANY and not (isinstance(c, Integral) and -(2**31) <= int(c) < 2**31):
            raise TypeError(f"{c!r} meets what may be integers of 32 bits: take one of these, such as 2")
        return self._of(self.kind, show_number(float(c)), 9 if float(c) >= 0 else 3)

    def select(self, condition: Any, x: Any, y: Any) -> Text:
        (condition,) = self.const(condition)._all((CONDITION,))
        x, y = self.const(x)._all((FLOAT, ANY, CELLS, CONDITION), y)
        return self._of(x.kind, "where({}, {}, {})", 9, (condition, 0), (x, 0), (y, 0))

    def fma(self, y: Any, z: Any) -> Text:
        return self * y + z

    def equals(self, other: Any) -> Text:
        return _compared("==", self, other)

    def __and__(self, other: Any) -> Text:
        return self._joined("and", other)

    def __or__(self, other: Any) -> Text:
        return self._joined("or", other)

    def __xor__(self, other: Any) -> Text:
        return (self | other) & ~(self & other)

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def _joined(self, word: str, other: Any) -> Text:
        x, y = self._all((CONDITION,), other)
        return self._of(CONDITION, f"{{}} {word} {{}}", 1, (x, 2), (y, 2))

    def __invert__(self) -> Text:
        (x,) = self._all((CONDITION,))
        return self._of(CONDITION, "not {}", 2, (x, 3))

    def __neg__(self) -> Text:
        return _applied("-{}", self, 4, 4)


def _written(sign: str, rank: int, right: int, space: str) -> tuple[Callable, Callable]:
    def forward(x: Text, y: Any) -> Text:
        x, y = x._all((FLOAT,), y)
        if sign == "*" and y is x:
            return x._of(FLOAT, "{}^2", 5, (x, 6))
        return x._of(FLOAT, f"{{}}{space}{sign}{space}{{}}", rank, (x, rank), (y, right))

    return forward, lambda x, y: forward(x.const(y), x)


def _compared(sign: str, x: Text, y: Any) -> Text:
    x, y = x._all((FLOAT, ANY), y)
    return x._of(CONDITION, f"{{}} {sign} {{}}", 2, (x, 3), (y, 3))


def _applied(form: str, x: Text, rank: int = 9, least: int = 0) -> Text:
    (x,) = x._all((FLOAT,))
    return x._of(FLOAT, form, rank, (x, least))


for _name, _sign, _rank, _right, _space in (
    ("add", "+", 3, 4, " "), ("sub", "-", 3, 4, " "), ("mul", "*", 4, 5, ""), ("truediv", "/", 4, 5, ""),
):  # fmt: skip
    _forward, _backward = _written(_sign, _rank, _right, _space)
    setattr(Text, f"__{_name}__", _forward)
    setattr(Text, f"__r{_name}__", _backward)
for _name, _sign in (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">=")):
    setattr(Text, f"__{_name}__", lambda x, y, sign=_sign: _compared(sign, x, y))
for _function in FUNCTIONS.values():
    if _function.said:
        setattr(Text, _function.name, lambda x, form=_function.said: _applied(form, x))


def traced(fn: Callable, *numbers: Text) -> Text:
    """The text of a formula, from texts of its numbers.

    Raises
    ------
    TypeError : it mixes kinds, uses an operation that formulas lack, or returns no value.
    """
    try:
        out = fn(*numbers)
    except AttributeError as error:
        if isinstance(error.obj, Text):
            raise TypeError(f"there is no {error.name!r} of a formula's numbers, but {', '.join(FUNCTIONS)}") from None
        if isinstance(error.obj, (int, float)):
            raise TypeError(f"{error.name} of the constant {error.obj}: like(x, c) makes a number of it") from None
        raise
    if not isinstance(out, Text):
        what = "several values" if isinstance(out, (tuple, list)) else f"{out!r}"
        raise TypeError(f"it makes {what}, which is no number of the formula: like(x, c) makes one of a constant")
    return out


def text_of(fn: Callable, names: Sequence[str], result: str = "y") -> str:
    """The equations of a formula over numbers of these names."""
    trace = Trace()
    return trace.program(result, traced(fn, *map(trace.of, names)))


def show_number(c: float) -> str:
    """All its digits, so that parsing gives the same number."""
    return str(int(c)) if float(c).is_integer() and abs(c) < 1e15 else repr(float(c))


# ---------------------------------------------------------------- counts
class Count(Number):
    """A number that counts the operations that create numbers."""

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


for _function in FUNCTIONS.values():
    if _function.said:
        setattr(Count, _function.name, Count._one_more)


def operations(fn: Callable, n: int) -> int:
    """The operations of a formula of ``n`` numbers."""
    made = [0]
    fn(*(Count(made) for _ in range(n)))
    return made[0]

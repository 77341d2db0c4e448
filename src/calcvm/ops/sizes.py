"""Size expressions: one exact function of the batch, shared by lowering, planner and verifier.

The words of an expression are numbers or ``a*B + b``.  On a range of batches its value is a polynomial of B with integer
coefficients, until a decision: ``min``, ``max``, a comparison.  If the answer changes inside the range, the range is
cut there, and the remainder is evaluated again.  So a size is a piecewise polynomial, exact for every batch from 1 to
`MAX_BATCH`; equal forms cancel, and equal sizes compare equal.
Only scratch may have several pieces: any other extent is the size of a value, ``a*B + b``.
"""

from __future__ import annotations

import ast
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import zip_longest
from types import CodeType, SimpleNamespace
from typing import Any, NamedTuple

from calcvm.frozen import frozen
from calcvm.ops.dims import Affine, affine

MAX_BATCH = 2**40  # the largest possible batch


class Undecided(ArithmeticError):
    """An expression is not a polynomial on any range of batches, or its direction is unknown."""


class _Cut(Exception):
    """A decision changes at batch ``at``."""

    def __init__(self, at: int):
        self.at = at


class Form:
    """A polynomial of the batch that is not constant, for batches from ``first`` to ``last``.

    coefficients : of B^0, B^1, ...
    """

    __slots__ = ("coefficients", "first", "last")

    def __init__(self, coefficients: tuple[int, ...], first: int, last: int):
        self.coefficients, self.first, self.last = coefficients, first, last

    def at(self, batch: int) -> int:
        return _value(self.coefficients, batch)

    def _new(self, coefficients: Sequence[int]) -> Form | int:
        n = len(coefficients)
        while n and not coefficients[n - 1]:
            n -= 1
        return Form(tuple(coefficients[:n]), self.first, self.last) if n > 1 else coefficients[0] if n else 0

    # ------------------------------------------------------------ arithmetic
    def __add__(self, other: Form | int) -> Form | int:
        return self._new([a + b for a, b in zip_longest(self.coefficients, _coefficients(other), fillvalue=0)])

    def __neg__(self) -> Form | int:
        return self._new([-a for a in self.coefficients])

    def __sub__(self, other: Form | int) -> Form | int:
        return self + -other

    def __rsub__(self, other: int) -> Form | int:
        return -self + other

    def __mul__(self, other: Form | int) -> Form | int:
        theirs = _coefficients(other)
        out = [0] * (len(self.coefficients) + len(theirs) - 1)
        for i, a in enumerate(self.coefficients):
            for j, b in enumerate(theirs):
                out[i + j] += a * b
        return self._new(out)

    __radd__, __rmul__ = __add__, __mul__

    def __floordiv__(self, other: Form | int) -> Form | int:
        """Defined only for a number that divides the growing part."""
        if isinstance(other, Form) or not other or any(a % other for a in self.coefficients[1:]):
            raise Undecided(f"({_show(self.coefficients)}) // ({other}) is not a polynomial of the batch")
        return self._new([a // other for a in self.coefficients])

    def __rfloordiv__(self, other: int) -> int:
        raise Undecided(f"({other}) // ({_show(self.coefficients)}) is not a polynomial of the batch")

    def __abs__(self) -> Form | int:
        return self if self >= 0 else -self

    def __str__(self) -> str:
        return _show(self.coefficients)

    # ------------------------------------------------------------ decisions
    def bounds(self) -> tuple[int, int]:
        """The smallest and the largest value: those at both ends, because it is monotonic."""
        begin, end = self.at(self.first), self.at(self.last)
        if len(self.coefficients) > 2:
            ways = {c > 0 for c in _shifted(self.coefficients, self.first)[1:] if c}
            if len(ways) > 1:
                raise Undecided(f"{self} cannot be shown to be monotonic")
        return min(begin, end), max(begin, end)

    def _decide(self, key: Callable[[int], int]) -> int:
        """``key`` of all values; like the form, it must be monotonic."""
        self.bounds()
        begin = key(self.at(self.first))
        if key(self.at(self.last)) == begin:
            return begin
        raise _Cut(bisect_left(range(self.last + 1), True, self.first, key=lambda b: key(self.at(b)) != begin))

    def __bool__(self) -> bool:
        return self._decide(_sign) != 0

    def __eq__(self, other: object) -> bool:
        return not self - other  # type: ignore[operator]

    def __ne__(self, other: object) -> bool:
        return bool(self - other)  # type: ignore[operator]

    def __lt__(self, other: Form | int) -> bool:
        return _negative(self - other)

    def __gt__(self, other: Form | int) -> bool:
        return _negative(other - self)

    def __le__(self, other: Form | int) -> bool:
        return not self > other

    def __ge__(self, other: Form | int) -> bool:
        return not self < other

    __hash__ = None  # type: ignore[assignment]


def _negative(n: Form | int) -> bool:
    return bool(n._decide(lambda v: v < 0)) if isinstance(n, Form) else n < 0


def _coefficients(n: Form | int) -> tuple[int, ...]:
    return n.coefficients if isinstance(n, Form) else (int(n),)


def _sign(n: int) -> int:
    return (n > 0) - (n < 0)


def _value(coefficients: Sequence[int], batch: int) -> int:
    out = 0
    for c in reversed(coefficients):
        out = out * batch + c
    return out


def _shifted(coefficients: Sequence[int], by: int) -> list[int]:
    """Coefficients of the same polynomial in B - ``by``."""
    out: list[int] = []
    for c in reversed(coefficients):
        out = [a + b for a, b in zip_longest([by * a for a in out], [0, *out], fillvalue=0)] or [0]
        out[0] += c
    return out


def _show(coefficients: Sequence[int]) -> str:
    terms = (f"{c}" if k == 0 else f"{c}*B" if k == 1 else f"{c}*B^{k}" for k, c in enumerate(coefficients) if c)
    return " + ".join(reversed([*terms])) or "0"


# ---------------------------------------------------------------- sizes for all batches
@frozen
class Piecewise:
    """A size that is not ``a*B + b`` throughout.

    pieces : (first batch, coefficients of B^0, B^1, ...) in order, the first from batch 1 on.
    """

    pieces: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def constant(self) -> bool:
        return False

    def at(self, batch: int) -> int:
        return _value(self._coefficients(batch), batch)

    def around(self, batch: int) -> Affine:
        """The form of the size at a batch: a number if its piece is not ``a*B + b``."""
        found = self._coefficients(batch)
        return _affine(found) if len(found) <= 2 else Affine(0, _value(found, batch))

    def _coefficients(self, batch: int) -> tuple[int, ...]:
        return self.pieces[bisect_left(self.pieces, batch + 1, key=lambda piece: piece[0]) - 1][1]

    def until(self, last: int) -> Affine | Piecewise:
        """The same size for batches up to ``last``."""
        return _joined([piece for piece in self.pieces if piece[0] <= last])

    def bounds(self, last: int) -> tuple[int, int]:
        """The smallest and the largest value for batches from 1 to ``last``."""
        pieces = [piece for piece in self.pieces if piece[0] <= last]
        ends = [first - 1 for first, _ in pieces[1:]] + [last]
        found = [Form(c, first, end).bounds() for (first, c), end in zip(pieces, ends)]
        return min(least for least, _ in found), max(most for _, most in found)

    def __str__(self) -> str:
        return ", ".join(f"{_show(c)} from {first} on" for first, c in self.pieces)


Extent = Affine | Piecewise


def _joined(pieces: Sequence[tuple[int, tuple[int, ...]]]) -> Extent:
    """Pieces in order as a size; neighbours with equal coefficients are merged."""
    kept = [piece for before, piece in zip([(0, None), *pieces], pieces) if before[1] != piece[1]]
    if len(kept) == 1 and len(kept[0][1]) <= 2:
        return _affine(kept[0][1])
    return Piecewise(tuple(kept))


def _affine(coefficients: tuple[int, ...]) -> Affine:
    b, a = (*coefficients, 0)[:2]
    return Affine(a, b)


def exact(function: Callable[[list[Any]], Sequence[Form | int]], words: Sequence[Any], last: int) -> tuple[Extent, ...]:
    """The result of ``function`` on ``words`` (numbers and sizes), for all batches from 1 to ``last``.

    Raises
    ------
    Undecided
        A value is not a polynomial of the batch, or its direction is unknown where it matters.
    """
    pieces: list[tuple[int, Sequence[Form | int]]] = []
    first = 1
    while first <= last:
        end = last
        while True:
            try:
                found = function([_piece(w, first, end) if isinstance(w, Extent) else w for w in words])
                break
            except _Cut as cut:
                end = cut.at - 1
        pieces.append((first, found))
        first = end + 1
    columns = zip(*(found for _, found in pieces))
    return tuple(_joined([(b, _coefficients(n)) for (b, _), n in zip(pieces, column)]) for column in columns)


def times(size: Extent, n: int) -> Extent:
    """``n`` times a size."""
    if isinstance(size, Affine):
        return size * n
    return Piecewise(tuple((first, tuple(n * c for c in coefficients)) for first, coefficients in size.pieces))


def largest(a: Extent, b: Extent) -> Extent:
    """The larger of two sizes at every batch."""

    def on(words: list[Any]) -> tuple[Form | int]:
        first, last = words[0].first, words[0].last
        return (max(_piece(size, first, last) for size in (a, b)),)

    return a if a == b else exact(on, [Affine(1, 0)], MAX_BATCH)[0]


def _piece(size: Extent, first: int, last: int) -> Form | int:
    if isinstance(size, Affine):
        return Form((size.b, size.a), first, last) if size.a else size.b
    later = [b for b, _ in size.pieces if first < b <= last]
    if later:
        raise _Cut(later[0])
    return Form((0, 1), first, last)._new(size._coefficients(first))


# ---------------------------------------------------------------- the language
def parts(n: Any, m: int) -> Any:
    """A size of at least n / m for every batch: the smallest that is a number or a polynomial."""
    if isinstance(n, Form):
        return n._new([-(-c // m) for c in n.coefficients])
    return -(-n // m)


def _ceil_div(n: Any, m: Any) -> Any:
    return -(-n // m)


FUNCTIONS: dict[str, Any] = {"__builtins__": {}, "max": max, "min": min, "abs": abs, "ceil_div": _ceil_div}


@cache
def _compiled(expression: str) -> tuple[CodeType, tuple[str, ...]]:
    code = compile(expression, f"<size {expression}>", "eval")
    return code, tuple(n for n in code.co_names if n not in FUNCTIONS)


LANGUAGE = (
    ast.Expression, ast.Name, ast.Load, ast.Constant, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.UnaryOp,
    ast.USub, ast.Not, ast.BoolOp, ast.And, ast.Or, ast.Compare, ast.cmpop, ast.IfExp, ast.Call,
)  # fmt: skip


class On(NamedTuple):
    """What sizes may depend on besides words: the planned team, whether it is on a GPU, and whether the device is ``small``."""

    nw: int
    gpu: int
    small: int = 0

    @classmethod
    def of(cls, workers: int, device: str) -> On:
        """Workers of a device."""
        return cls(workers, int(device == "cuda"), int(device == "small"))

    @property
    def plain(self) -> bool:
        """Whether products are loops without packed panels."""
        return bool(self.gpu or self.small)


MACHINE = On._fields


def reads(expression: str) -> tuple[str, ...]:
    """The names that an expression of sizes reads.

    Raises
    ------
    SyntaxError : it contains more than words, whole numbers, + - * //, comparisons, and, or, not, if-else, min, max, abs, ceil_div.
    """
    for node in ast.walk(ast.parse(expression, mode="eval")):
        called = not isinstance(node, ast.Call) or (isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS)
        if (
            not isinstance(node, LANGUAGE)
            or not called
            or (isinstance(node, ast.Constant) and type(node.value) is not int)
        ):
            raise SyntaxError(
                "sizes know words, whole numbers, + - * //, comparisons, if-else, min, max, abs and ceil_div"
            )
    return _compiled(expression)[1]


def evaluate(expression: str, words: Mapping[str, Any]) -> Any:
    """Value of a size expression over ``words``: a number, or an `Affine` or `Piecewise` if words depend on the batch.

    Raises
    ------
    Undecided
        The expression has no value of these forms.
    """
    code, names = _compiled(expression)
    values = [(n, words[n]) for n in names if n in words]
    if any(isinstance(v, Extent) for _, v in values):
        return _evaluated(expression, tuple(values))
    return eval(code, FUNCTIONS, dict(values))


def function(expressions: Sequence[str], names: Sequence[str]) -> Callable[..., tuple[Any, ...]]:
    """The values of expressions as a function of the words ``names``, for frequent evaluation (see `exact`)."""
    body = "".join(f"({e}), " for e in expressions)
    return eval(compile(f"lambda {', '.join(names)}: ({body})", "<sizes>", "eval"), FUNCTIONS)


@lru_cache(maxsize=1 << 14)
def _evaluated(expression: str, words: tuple[tuple[str, Any], ...]) -> Extent:
    code, _ = _compiled(expression)
    names = [n for n, _ in words]

    def on(values: list[Any]) -> tuple[Any]:
        return (eval(code, FUNCTIONS, dict(zip(names, values))),)

    return exact(on, [v for _, v in words], MAX_BATCH)[0]


def extent(expression: str, words: Mapping[str, Any]) -> Extent:
    """The same as a size for all batches, even if it is a number."""
    n = evaluate(expression, words)
    return n if isinstance(n, Piecewise) else affine(n)


# ---------------------------------------------------------------- scratch
def workspace(spec: Any, words: Mapping[str, Any], on: On) -> tuple[Extent, Extent]:
    """A row's smallest ``wn``, and the best for speed, for all batches.

    Raises
    ------
    Undecided : they are not sizes of the batch.
    """
    return _workspace(spec.workspace, tuple((w.name, words[w.name]) for w in spec.words if w.name in words), on)


@lru_cache(maxsize=1 << 12)
def _workspace(rule: Callable, words: tuple[tuple[str, Any], ...], on: On) -> tuple[Extent, Extent]:
    names = [n for n, _ in words]

    def over(values: list[Any]) -> tuple[Any, Any]:
        return rule(SimpleNamespace(**dict(zip(names, values))), on)

    least, wanted = exact(over, [v for _, v in words], MAX_BATCH)
    return least, wanted

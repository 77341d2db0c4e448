"""Formulas as NumPy expressions: apply a formula to named arrays and write the result as text."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

from calcvm.errors import CalcError
from calcvm.formulas.functions import FUNCTIONS
from calcvm.formulas.number import CELLS, CONDITION, FLOAT, Text, Trace, traced
from calcvm.ops.dims import Affine

ATOM, POWER, UNARY, PRODUCT, SUM, COMPARED, LOWEST = 9, 6, 4, 4, 3, 2, 0  # precedence


class Code(Text):
    """A NumPy expression.  Formulas compute with it, and rows that are not formulas are composed of it.

    Conditions are arrays of bool; ``& | ^ ~`` bind more tightly than comparisons.

    scalar : the expression consists of numbers only, so it has one element and no axes.
    """

    scalar = False

    def _of(self, kind: str, form: str, rank: int, *parts: tuple[Text, int]) -> Any:
        made = super()._of(kind, form, rank, *parts)
        made.scalar = all(part.scalar for part, _ in parts)  # type: ignore[attr-defined]
        return made

    # ------------------------------------------------------------ for formulas
    def const(self, c: Any) -> Any:
        return (
            c if isinstance(c, Text) else number(self.trace, c, FLOAT if self.kind in (CELLS, CONDITION) else self.kind)
        )

    def _all(self, wanted: tuple[str, ...], *others: Any) -> list[Any]:
        return [self, *map(self.const, others)]  # kinds were checked when the formula was declared

    def select(self, condition: Any, x: Any, y: Any) -> Any:
        x, y = self.const(x), self.const(y)
        return self._of(x.kind, "np.where({}, {}, {})", ATOM, (condition, LOWEST), (x, LOWEST), (y, LOWEST))

    def _joined(self, word: str, other: Any) -> Any:
        sign = {"and": "&", "or": "|", "xor": "^"}[word]
        return self._of(CONDITION, f"{{}} {sign} {{}}", LOWEST, (self, SUM), (self.const(other), SUM))

    def __invert__(self) -> Any:
        return self._of(CONDITION, "~{}", UNARY, (self, POWER))

    def equals(self, other: Any) -> Any:
        return self._of(CONDITION, "{} == {}", COMPARED, (self, SUM), (self.const(other), SUM))

    # products with 1 and -1 and sums with 0 are omitted
    def __add__(self, other: Any) -> Any:
        other = self.const(other)
        if ZERO in (self.form, other.form):
            return self if other.form == ZERO else other
        return self._of(FLOAT, "{} + {}", SUM, (self, SUM), (other, SUM))

    def __sub__(self, other: Any) -> Any:
        other = self.const(other)
        return self if other.form == ZERO else self._of(FLOAT, "{} - {}", SUM, (self, SUM), (other, PRODUCT))

    def __mul__(self, other: Any) -> Any:
        other = self.const(other)
        if ONE in (self.form, other.form):
            return self if other.form == ONE else other
        # a*b/c may overflow if a*(b/c) does not; for products and sums alone the order only affects rounding
        return self._of(FLOAT, "{}*{}", PRODUCT, (self, PRODUCT), (other, PRODUCT + (other.form == "{}/{}")))

    def __truediv__(self, other: Any) -> Any:
        other = self.const(other)
        return self if other.form == ONE else self._of(FLOAT, "{}/{}", PRODUCT, (self, PRODUCT), (other, PRODUCT + 1))

    def __radd__(self, other: Any) -> Any:
        return self.const(other) + self

    def __rsub__(self, other: Any) -> Any:
        return self.const(other) - self

    def __rmul__(self, other: Any) -> Any:
        return self.const(other) * self

    def __rtruediv__(self, other: Any) -> Any:
        return self.const(other) / self

    def __neg__(self) -> Any:
        return self._of(FLOAT, "-{}", UNARY, (self, UNARY))

    # ------------------------------------------------------------ for arrays
    def __matmul__(self, other: Any) -> Any:
        return self._of(FLOAT, "{} @ {}", PRODUCT, (self, PRODUCT), (other, PRODUCT + 1))

    def __getitem__(self, index: Any) -> Any:  # type: ignore[override]
        return self._of(self.kind, f"{{}}[{index}]", ATOM, (self, ATOM))

    def __pow__(self, power: Any) -> Any:  # type: ignore[override]
        return self if power == 1 else self._of(FLOAT, "{}**{}", POWER, (self, ATOM), (self.const(power), ATOM))

    def method(self, said: str) -> Any:
        """A method call: ``x.sum(0)`` for the text "sum(0)"."""
        return self._of(self.kind, f"{{}}.{said}", ATOM, (self, ATOM))

    def reshape(self, *sizes: Any) -> Any:
        if self.scalar:
            return call("np.full", sizes, self) if sizes else self
        return self.method(f"reshape({', '.join(map(show, sizes)) or '()'})")

    def sum(self, *axes: int) -> Any:
        return self.method(f"sum({show_axes(axes)})")


ZERO, ONE = "0", "1"
for _function in FUNCTIONS.values():
    setattr(Code, _function.name, lambda x, form=_function.numpy: x._of(FLOAT, form, ATOM, (x, LOWEST)))


def written(x: Any) -> str:
    """The text of one expression, without shared names."""
    parts = ((written(part), part.rank, least) for part, least in x.parts)
    return x.form.format(*(said if rank >= least else f"({said})" for said, rank, least in parts))


def trace() -> Trace:
    return Trace(Code)


def number(of: Trace, c: Any, kind: str = FLOAT) -> Any:
    """A number, or a size that depends on the batch, as an expression."""
    if isinstance(c, Affine):
        made = of.of(show(c), SUM if not c.constant and c.b else PRODUCT if not c.constant and c.a != 1 else ATOM)
    elif isinstance(c, float) and not math.isfinite(c):
        made = of.of("np.nan" if math.isnan(c) else "np.inf" if c > 0 else "-np.inf", SUM)
    else:
        text = repr(int(c)) if c == int(c) and abs(c) < 1e6 else repr(c)
        made = of.of(text, ATOM if c >= 0 else SUM, (), kind)
    made.scalar = True
    return made


def call(name: str, *args: Any, kind: str = FLOAT, **named: Any) -> Any:
    """``name(args..., key=value)``.  At least one argument is an expression; others are written as Python constants."""
    of = next(a for a in (*args, *named.values()) if isinstance(a, Text)).trace
    said = [*("{}" if isinstance(a, Text) else show(a) for a in args)]
    said += [f"{key}={'{}' if isinstance(a, Text) else show(a)}" for key, a in named.items()]
    parts = tuple((a, LOWEST) for a in (*args, *named.values()) if isinstance(a, Text))
    return of.of(f"{name}({', '.join(said)})", ATOM, parts, kind)


def show(value: Any) -> str:
    """A constant, a size, or a tuple of them, as Python source."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(show, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, Affine):
        form = f"{value.a}*B" if value.a != 1 else "B"
        return (
            str(value.b)
            if value.constant
            else f"{form} + {value.b}"
            if value.b > 0
            else f"{form} - {-value.b}"
            if value.b
            else form
        )
    return repr(value) if isinstance(value, str) and not value.startswith("np.") else str(value)


def show_axes(axes: tuple[int, ...]) -> str:
    return show(axes[0]) if len(axes) == 1 else show(axes) if axes else ""


def formula(fn: Callable[..., Any], *values: Any) -> Any:
    """Apply a formula to expressions."""
    return traced(fn, *values)


def module_text(module: ModuleType) -> str:
    """A module's source (CalcError: there is only bytecode)."""
    try:
        return inspect.getsource(module)
    except OSError:
        raise CalcError(
            f"to_python: this application lacks the source of {module.__name__}, from which scripts are made: add calcvm's "
            "sources to it, or write the script elsewhere (PyInstaller's hook in calcvm adds them)"
        ) from None

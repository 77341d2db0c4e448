"""A row as seen by the writer of its text: its words, and its operands as expressions of any shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from calcvm.errors import UnsupportedOperator
from calcvm.formulas.number import Trace
from calcvm.frozen import frozen
from calcvm.ops.dims import Shape, affine, numel
from calcvm.ops.spec import RowSpec
from calcvm.script.code import call, number

Writer = Callable[["Row"], None]
WRITERS: dict[str, Writer] = {}
FALLBACKS: list[Callable[[str], Writer | None]] = []  # find writers for rows that are formulas


@frozen
class Seen:
    """An operand: its expression, and its stored shape."""

    text: Any
    shape: Shape
    dtype: str


NONE = Seen(None, (), "")


@frozen
class Made:
    """An assignment of a row: operands, and the expression of their new values, a tuple for several; None for absent operands.

    add : add to the old value.
    """

    names: tuple[str | None, ...]
    value: Any
    add: bool = False
    at: str = ""  # the index that is set, if it is not the whole operand


class Row:
    """A row of a program, or a statement: ``r.w`` has its words, ``r.x(...)`` reads an operand, `put` sets one.

    trace : the trace that its expressions belong to.
    """

    def __init__(self, spec: RowSpec, words: Mapping[str, Any], operands: Mapping[str, Seen], trace: Trace):
        self.spec, self.trace, self.operands = spec, trace, operands
        real = {word.name for word in spec.words if word.kind == "float"}
        self.w = SimpleNamespace(
            **{k: float(v) if k in real else affine(v) if isinstance(v, int) else v for k, v in words.items()}
        )
        self.made: list[Made] = []

    # ------------------------------------------------------------ reading
    def __contains__(self, name: str) -> bool:
        return name in self.operands

    def shape(self, name: str) -> Shape:
        return self.operands[name].shape

    def dtype(self, name: str) -> str:
        return self.operands[name].dtype

    def x(self, name: str, *sizes: Any) -> Any:
        """An operand's expression, in its own shape or in another."""
        return self.shaped(name, tuple(map(affine, sizes)) or self.shape(name))

    def shaped(self, name: str, shape: Shape) -> Any:
        """An operand's expression in a given shape, which may have no axes."""
        seen = self.operands[name]
        return _shaped(seen.text, () if seen.text.scalar else seen.shape, shape)

    def together(self, names: Sequence[str], shapes: Sequence[Shape], full: Shape) -> list[Any]:
        """Operands in shapes that broadcast to ``full``.  Numbers stay numbers if an array has this shape."""
        seen = [self.operands[name].text for name in names]
        wide = any(shape == full and not text.scalar for text, shape in zip(seen, shapes))
        return [
            text if text.scalar and wide else self.shaped(name, shape) for name, text, shape in zip(names, seen, shapes)
        ]

    def like(self, name: str, other: str) -> Any:
        """An operand in the shape of another one with as many elements."""
        return self.shaped(name, self.shape(other))

    def factor(self, name: str, shape: Shape) -> Any:
        """An operand in a shape, as a factor for larger arrays: a number stays a number."""
        text = self.operands[name].text
        return text if text.scalar else self.shaped(name, shape)

    def number(self, value: Any) -> Any:
        return number(self.trace, value)

    def integer(self, word: str) -> int:
        """A word that does not depend on the batch."""
        value = getattr(self.w, word)
        if not value.constant:
            raise UnsupportedOperator(f"row {self.spec.name!r}: its {word} depends on the batch, which has no text")
        return value.b

    # ------------------------------------------------------------ writing
    def put(self, name: str, value: Any, *sizes: Any, add: bool = False) -> None:
        """Set an operand to an expression, in the operand's shape or a given one.  An absent operand is skipped."""
        self.put_shaped(name, value, tuple(map(affine, sizes)) or self.operands.get(name, NONE).shape, add)

    def put_shaped(self, name: str, value: Any, shape: Shape, add: bool = False) -> None:
        """As `put`, for an expression of a given shape, which may have no axes."""
        if name in self.operands:
            value = value if value.scalar else _shaped(value, shape, self.shape(name))
            self.made.append(Made((name,), value, add))

    def put_at(self, name: str, index: str, value: Any) -> None:
        """Set one element."""
        self.made.append(Made((name,), value, at=index))

    def run(self, call: Any) -> None:
        """Add a call that sets its arguments."""
        self.made.append(Made((), call))

    def put_all(self, value: Any, *names: str) -> None:
        """Set several operands to the elements of a tuple, in their own shapes."""
        there = [name for name in names if name in self.operands]
        if len(there) == 1:
            self.put(there[0], value[names.index(there[0])])
        elif there:
            self.made.append(Made(tuple(name if name in there else None for name in names), value))

    def call(self, name: str, *args: Any, **named: Any) -> Any:
        return call(name, *args, **named)


def slot(r: Row, name: str) -> Any:
    """A hyperparameter."""
    return r.call("float", r.x("hyper")[name.upper()])


def _shaped(value: Any, own: Shape, wanted: Shape) -> Any:
    if own == wanted:
        return value
    assert numel(own) == numel(wanted), f"{own} is not {wanted} in another shape"
    return value.reshape(*wanted)


def writes(*names: str) -> Callable[[Writer], Writer]:
    """Decorator that registers a writer for rows of these names."""

    def add(fn: Writer) -> Writer:
        for name in names:
            WRITERS[name] = fn
        return fn

    return add


def lines_of(r: Row) -> list[str]:
    """The Python statements of a row whose text has been written; they set operands in place."""
    signs: dict[str, str] = {}
    results = []
    for made in r.made:
        targets = ["_" if name is None else f"{r.operands[name].text.form}[{made.at or '...'}]" for name in made.names]
        target = ", ".join(targets)
        signs[target] = f"{target} {'+=' if made.add else '='} " if target else ""
        results.append((target, made.value))
    return [f"{signs.get(name, f'{name} = ')}{text}" for name, text in r.trace.equations(results)]

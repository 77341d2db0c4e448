"""Parts of users' equations as new operators: texts over words, from which rows, gradients and kernels follow."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, count

from calcvm.equations.functions import ARGUMENTS
from calcvm.equations.kinds import CONDITION, INTEGER, KINDS
from calcvm.equations.rows import said_once
from calcvm.equations.stated import TYPES, Stated
from calcvm.equations.text import show, show_equations
from calcvm.equations.tree import (
    COMPARISONS,
    ONE,
    OPERATORS,
    Call,
    Element,
    Equation,
    Index,
    Name,
    Node,
    Number,
    Reduction,
    own_elements,
)
from calcvm.errors import CalcError
from calcvm.graph import Variable, applied
from calcvm.indexed.products import Extents, varies
from calcvm.indexed.values import Size, Value, size_of
from calcvm.ops.stated import OUT, operator_of
from calcvm.ops.types import FLOAT

FEW = 8  # sizes up to this are numbers in a text, so loops over taps are unrolled.  Larger ones are words, and one kernel serves all
OURS = re.compile(r"y|x\d+|d(y|x\d+)|t_.*|.*[^A-Za-z0-9_].*")  # names that indexes in a text may not have
LETTERS = "ijklmnopqrs"


class Unfit(Exception):
    """A part of an equation that cannot be a row."""


At = tuple[Variable, Sequence[Node], float]  # an array, places in it, and the value beyond its ends


class Row:
    """An equation as a row's text.

    opened : replaces a node by another, or by an element of an operand.  literal : all known sizes are numbers in the text.
    """

    def __init__(self, extents: Extents, opened: Callable[[Node], Node | At], literal: bool = False):
        self.extents, self.opened, self.literal = extents, opened, literal
        self.operands: dict[str, Variable] = {}
        self.called: dict[str, str] = {}  # indexes
        self.words: dict[str, Size] = {}
        self.read: list[Element] = []  # in the row's names

    def value(self, equation: Equation) -> Value:
        """The result of a new operator of the equation; its axes are the equation's indexes.

        Raises
        ------
        Unfit : it cannot be a row.
        """
        kept = [i.name for i in equation.kept or ()]
        self.scan = equation.name if own_elements(equation) else ""
        indexes = [self.index(v) for v in kept]
        value = self.node(equation.value)
        if not self.operands:
            raise Unfit("it reads nothing")
        ranges = {name: self.range(v) for v, name in self.called.items()}
        declares = "; ".join(self.declared(name, x, ranges) for name, x in self.operands.items() if self.is_moved(name))
        text = show_equations(said_once([Equation(OUT, tuple(map(Index, indexes)), value)], ranges))
        types = {name: x.type for name, x in self.operands.items() if x.type != FLOAT}
        if other := [t for t in types.values() if t not in TYPES]:
            raise Unfit(f"an operand has the type {other[0]}")
        stated = Stated(text, tuple(self.words), tuple(self.operands), (OUT,), types, declares)
        try:
            kind = stated.kinds()[OUT]
            types |= {OUT: {INTEGER: "int64", CONDITION: "bool"}[kind]} if kind in (INTEGER, CONDITION) else {}
            spec = operator_of(Stated(text, stated.words, stated.reads, (OUT,), types, declares))
        except CalcError as error:
            raise Unfit(str(error)) from None
        y = applied(spec, *self.operands.values())
        return Value(y, tuple(kept))

    # ------------------------------------------------------------ names
    def index(self, name: str) -> str:
        if name not in self.called:
            taken = {v.upper() for v in self.called.values()}
            stems: Iterator[str] = chain([name], LETTERS, (f"i{k}" for k in count()))
            self.called[name] = next(v for v in stems if not OURS.fullmatch(v) and v.upper() not in taken)
        return self.called[name]

    def operand(self, x: Variable) -> str:
        name = next((name for name, other in self.operands.items() if other is x), None)
        if name is None:
            name = f"x{len(self.operands) + 1}"
            self.operands[name] = x
        return name

    # ------------------------------------------------------------ nodes
    def node(self, node: Node, whole: bool = False) -> Node:
        """A node in the row's names.  whole : it is a place, or compared, so integers stay exact; elsewhere they become numbers."""
        if isinstance(node, Number):
            return Number(node.value)
        if isinstance(node, Element) and node.array == self.scan:
            return Element(OUT, tuple(self.node(n, True) for n in node.places), node.beyond)
        if isinstance(node, Name) and node.name in self.extents:
            return Name(self.index(node.name))
        found = self.opened(node)
        if isinstance(found, tuple):
            made = self.element(*found)
            return made if whole or KINDS.get(found[0].type) != INTEGER else Call("/", (made, ONE))
        node = found
        match node:
            case Reduction():
                over = tuple(Index(self.index(i.name)) for i in node.indexes)
                return Reduction(node.how, over, self.node(node.body, whole))
            case Call() if node.function in ARGUMENTS or node.function in OPERATORS:
                exact = whole or node.function in COMPARISONS
                return Call(node.function, tuple(self.node(n, exact) for n in node.arguments))
            case Number():
                return Number(node.value)
        raise Unfit(f"{show(node)} cannot be in a row")

    def element(self, x: Variable, places: Sequence[Node], beyond: float) -> Node:
        """An element of an array at places of the equation."""
        if not places:
            return Name(self.operand(x))
        made = Element(self.operand(x), tuple(self.node(n, True) for n in places), beyond)
        self.read.append(made)
        return made

    # ------------------------------------------------------------ sizes
    def range(self, index: str) -> Node:
        """A word if an operand has an axis for it; else a number."""
        n, name = size_of(self.extents[index]), self.called[index]
        seen = any(
            place == Name(name) and size_of(self.operands[e.array].shape[k]) == n
            for e in self.read
            for k, place in enumerate(e.places)
        )
        if varies(n) and not seen:
            raise Unfit(f"no operand has the range of {index}")
        return self.word(name.upper(), n) if seen else Number(int(n))  # type: ignore[arg-type]

    def word(self, name: str, n: Size) -> Node:
        n = size_of(n)
        if not varies(n) and (self.literal or n <= FEW):  # type: ignore[operator]
            return Number(int(n))  # type: ignore[arg-type]
        self.words[name] = n
        return Name(name)

    def plain(self, name: str, axis: int) -> str:
        """The index by which an axis is always read, or ""."""
        places = {e.places[axis] for e in self.read if e.array == name}
        index = next(iter(places)) if len(places) == 1 else None
        if not isinstance(index, Name):
            return ""
        of = next(v for v, called in self.called.items() if called == index.name)
        return index.name if size_of(self.extents[of]) == size_of(self.operands[name].shape[axis]) else ""

    def is_moved(self, name: str) -> bool:
        return not all(self.plain(name, k) for k in range(self.operands[name].rank))

    def declared(self, name: str, x: Variable, ranges: Mapping[str, Node]) -> str:
        axes = []
        for k, n in enumerate(x.shape):
            index = self.plain(name, k)
            axes.append(f"{name}_{k}<{show(ranges[index] if index else self.word(f'{name.upper()}_{k}', n))}")
        return f"{name}[{','.join(axes)}]"

"""Equations opened: each index under a name that no other has, arrays by elements alone; and closed again, for readers.

Opened, ``n'3`` is an index, ``#n'3`` its extent, an array without axes an element without places.  So parts of equations can be put
into others without a clash of names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from calcvm.equations.grammar import WORDS, wrong
from calcvm.equations.places import size
from calcvm.equations.ranges import Ranges, Sizes
from calcvm.equations.simplify import simplified
from calcvm.equations.tree import (
    REDUCTIONS,
    ZERO,
    Element,
    Equation,
    Index,
    Name,
    Node,
    Number,
    Reduction,
    arrays,
    bound,
    names,
    parts,
    substituted,
    walk,
    with_parts,
)
from calcvm.errors import CalcError

TYPICAL_BATCH = 64  # where sizes of the batch are compared, to choose between equal forms
LETTERS = "ijklmnopq"  # of axes that no index names


def typical(n: Any) -> int:
    """A size as a number."""
    return n.at(TYPICAL_BATCH) if hasattr(n, "at") else n


def plain(n: Any) -> Any:
    """A size that depends on no batch is an int."""
    return n.b if getattr(n, "a", 1) == 0 else n


def extent(index: str) -> Name:
    return Name(f"#{index}")


class Scope:
    """Indexes with their extents, arrays with their shapes, and names that are taken."""

    def __init__(self, found: Ranges, equations: Sequence[Equation], integers: Collection[str] = ()):
        self.extents: dict[str, Any] = {}
        self.shapes: dict[str, Sizes] = {name: tuple(map(plain, shape)) for name, shape in found.shapes.items()}
        self.sizes: dict[str, Any] = dict(found.sizes)
        self.given = found
        used = {node.name for e in equations for node in walk(e.value) if isinstance(node, Name)}
        places = [p for e in equations for node in walk(e.value) if isinstance(node, Element) for p in node.places]
        counts = {e.name for e in equations if isinstance(e.value, Reduction) and e.value.how in ("argmax", "argmin")}
        self.integers = {*integers, *counts}.union(*map(arrays, places))
        self.taken = {*self.shapes, *self.sizes, *used, *found.extents, *WORDS, *REDUCTIONS}

    def index(self, like: str, n: Any) -> str:
        """A new index, which readers see as ``like`` where they can."""
        name = f"{like.split(chr(39))[0]}'{len(self.extents)}"
        self.extents[name] = self.sizes[extent(name).name] = plain(n)
        return name

    def again(self, index: str) -> str:
        return self.index(index, self.extents[index])

    def array(self, name: str, shape: Sizes) -> str:
        """The name of a new array: this one, or this with ``_`` behind."""
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        self.shapes[name] = shape
        return name

    def numbered(self, name: str, shape: Sizes) -> str:
        """The name of a new array, with the first number that is free."""
        k = 1
        while f"{name}{k}" in self.taken:
            k += 1
        return self.array(f"{name}{k}", shape)

    def indexes(self, node: Node) -> list[str]:
        """Indexes that are free in it, in the order in which it has them."""
        free = names(node)
        met = dict.fromkeys(part.name for part in walk(node) if isinstance(part, Name))
        return [name for name in met if name in self.extents and name in free]

    def volume(self, indexes: Iterable[str]) -> int:
        out = 1
        for index in indexes:
            out *= max(1, typical(self.extents[index]))
        return out

    def size(self, node: Node) -> Any:
        """Its value, or None: it is no size."""
        try:
            return plain(size(node, self.sizes))
        except (ArithmeticError, KeyError, TypeError, ValueError):
            return None

    def whole(self, node: Node) -> bool:
        """Whether all that it reads are integers."""
        if isinstance(node, Name):
            return node.name in self.extents or node.name in self.sizes
        return {*arrays(node)} <= self.integers

    # ------------------------------------------------------------ opening
    def opened(self, equation: Equation) -> Equation:
        """The equation with indexes of its own, and all that it reads by elements."""
        shape = self.shapes[equation.name]
        kept = equation.kept
        axes = [i.name for i in kept] if kept is not None else [*LETTERS[: len(shape)]]
        own = [self.index(name, n) for name, n in zip(axes, shape)]
        known: dict[str, Node] = {}
        for index in bound(equation):  # an extent may be read outside the reduction
            known[index.name.upper()] = extent(self.index(index.name, self.given.extents[index.name]))
        for name, new in zip(axes, own) if kept is not None else ():
            known |= {name: Name(new), name.upper(): extent(new)}
        value = self._open(equation, equation.value, known, own)
        return Equation(equation.name, tuple(Index(v) for v in own), value, equation.text, equation.at)

    def _open(self, equation: Equation, node: Node, known: Mapping[str, Node], kept: list[str]) -> Node:
        if isinstance(node, Name):
            if node.name in known:
                return known[node.name]
            shape = self.shapes.get(node.name)
            if shape is None:
                return node
            at = kept[len(kept) - len(shape) :]
            places = tuple(ZERO if n == 1 != self.extents[v] else Name(v) for v, n in zip(at, shape))
            return Element(node.name, places, at=node.at)
        if isinstance(node, Reduction):
            new = {i.name: self.index(i.name, self.given.extents[i.name]) for i in node.indexes}
            inner = {**known, **{name: Name(v) for name, v in new.items()}}
            inner |= {name.upper(): extent(v) for name, v in new.items()}
            body = self._open(equation, node.body, inner, kept)
            return Reduction(node.how, tuple(Index(new[i.name]) for i in node.indexes), body, node.at)
        return with_parts(node, tuple(self._open(equation, part, known, kept) for part in parts(node)))

    # ------------------------------------------------------------ closing
    def closed(self, equations: Iterable[Equation]) -> tuple[list[Equation], dict[str, Any]]:
        """Equations with names for readers, and the sizes that they name and no axis says."""
        return _Closing(self).all(equations)


class _Closing:
    def __init__(self, scope: Scope):
        self.scope = scope
        self.extents = {name: plain(n) for name, n in scope.given.extents.items()}  # one for each name in all equations
        self.capitals = {name.upper(): n for name, n in self.extents.items()}
        self.sizes: dict[str, Any] = {}

    def all(self, equations: Iterable[Equation]) -> tuple[list[Equation], dict[str, Any]]:
        return [self.one(equation) for equation in equations], self.sizes

    def one(self, equation: Equation) -> Equation:
        called: dict[str, str] = {}
        for index in bound(equation):
            if index.name not in called:
                called[index.name] = self.name(index.name, called.values())
        by: dict[str, Node] = {v: Name(name) for v, name in called.items()}
        extents = {n.name for n in walk(equation.value) if isinstance(n, Name) and n.name[0] == "#"}
        by |= {name: self.extent(name[1:], called) for name in extents}
        said = {v: self.said(v, equation) for v in called}
        value = substituted(equation.value, by)
        if any(isinstance(by[name], Number) for name in extents):
            value = simplified(value)
        value = self.shown(value, {called[v]: n for v, n in said.items() if n is not None})
        kept = tuple(Index(called[i.name], said[i.name]) for i in equation.kept or ())
        return Equation(equation.name, kept or None, value)

    def name(self, index: str, used: Collection[str]) -> str:
        """Like that of the index it was made of, if it has one extent everywhere."""
        n, name = self.scope.extents[index], index.split("'")[0]
        while name in used or not self.fits(name, n):
            name += "_"
        self.extents[name] = self.capitals[name.upper()] = n
        return name

    def fits(self, name: str, n: Any) -> bool:
        scope, capital = self.scope, name.upper()
        if name in scope.shapes or capital in scope.shapes or name in WORDS or name in REDUCTIONS:
            return False
        if any(
            word in scope.taken and word not in known
            for word, known in ((name, scope.given.extents), (capital, scope.given.sizes))
        ):
            return False
        known = (self.extents.get(name, n), self.capitals.get(capital, n), scope.given.sizes.get(capital, n))
        return all(plain(k) == n for k in known)

    def extent(self, index: str, called: Mapping[str, str]) -> Node:
        """The extent of an index: the capital of one of its kind that the equation has, or a number."""
        n, base = self.scope.extents[index], index.split("'")[0]
        near = (called[v] for v in called if self.scope.extents[v] == n and v.split("'")[0] == base)
        capital = next(near, None)
        return self.number(n) if capital is None else Name(capital.upper())

    def number(self, n: Any) -> Node:
        if isinstance(n, int):
            return Number(n)
        name = next((k for k, known in {**self.scope.given.sizes, **self.sizes}.items() if plain(known) == n), None)
        if name is None:
            raise CalcError(f"no index and no parameter has the extent {n}: give it a name, as a parameter")
        self.sizes[name] = n
        return Name(name)

    def said(self, index: str, equation: Equation) -> Node | None:
        """The extent to say, unless an axis says it that the equation reads."""
        n = self.scope.extents[index]
        read = [
            size
            for node in walk(equation.value)
            if isinstance(node, Element) and node.array != equation.name
            for place, size in zip(node.places, self.scope.shapes[node.array])
            if place == Name(index)
        ]
        return None if read and all(size == n for size in read) else self.number(n)

    def shown(self, node: Node, said: Mapping[str, Node]) -> Node:
        """Ranges said, and arrays without axes by their names."""
        if isinstance(node, Element) and not node.places:
            return Name(node.array)
        below = parts(node)
        node = with_parts(node, tuple(self.shown(part, said) for part in below)) if below else node
        if isinstance(node, Reduction):
            return replace(node, indexes=tuple(Index(i.name, said.get(i.name)) for i in node.indexes))
        return node


def refused(equation: Equation, what: str) -> CalcError:
    return wrong(equation.text, equation.at, what)

"""Opened equations: each index has a unique name, and arrays are read by elements only.  Closing them restores readable names.

In opened form, ``n'3`` is an index, ``#n'3`` its extent, and an array without axes is an element without places.  So parts of
equations can be substituted into others without name clashes.
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

TYPICAL_BATCH = 64  # the batch assumed to compare equal forms whose sizes depend on it
LETTERS = "ijklmnopq"  # names for axes without an index


def typical(n: Any) -> int:
    """A size as a number."""
    return n.at(TYPICAL_BATCH) if hasattr(n, "at") else n


def plain(n: Any) -> Any:
    """A size that does not depend on the batch as an int."""
    return n.b if getattr(n, "a", 1) == 0 else n


def extent(index: str) -> Name:
    return Name(f"#{index}")


class Scope:
    """Indexes with their extents, arrays with their shapes, and the names in use."""

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
        """A new index, shown to readers as ``like`` if possible."""
        name = f"{like.split(chr(39))[0]}'{len(self.extents)}"
        self.extents[name] = self.sizes[extent(name).name] = plain(n)
        return name

    def again(self, index: str) -> str:
        return self.index(index, self.extents[index])

    def array(self, name: str, shape: Sizes) -> str:
        """The name of a new array: ``name``, with ``_`` appended if it is taken."""
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        self.shapes[name] = shape
        return name

    def numbered(self, name: str, shape: Sizes) -> str:
        """The name of a new array: ``name`` and the first free number."""
        k = 1
        while f"{name}{k}" in self.taken:
            k += 1
        return self.array(f"{name}{k}", shape)

    def indexes(self, node: Node) -> list[str]:
        """Its free indexes, in order of occurrence."""
        free = names(node)
        met = dict.fromkeys(part.name for part in walk(node) if isinstance(part, Name))
        return [name for name in met if name in self.extents and name in free]

    def volume(self, indexes: Iterable[str]) -> int:
        out = 1
        for index in indexes:
            out *= max(1, typical(self.extents[index]))
        return out

    def size(self, node: Node) -> Any:
        """Its value; None if it is not a size."""
        try:
            return plain(size(node, self.sizes))
        except (ArithmeticError, KeyError, TypeError, ValueError):
            return None

    def whole(self, node: Node) -> bool:
        """Whether it reads only integers."""
        if isinstance(node, Name):
            return node.name in self.extents or node.name in self.sizes
        return {*arrays(node)} <= self.integers

    # ------------------------------------------------------------ opening
    def opened(self, equation: Equation) -> Equation:
        """The equation with fresh indexes, reading everything by elements."""
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
        """Equations with readable names, and the sizes they name that are no axis of an array they read."""
        return _Closing(self).all(equations)


class _Closing:
    def __init__(self, scope: Scope):
        self.scope = scope
        self.extents = {
            name: plain(n) for name, n in scope.given.extents.items()
        }  # each name has one extent in all equations
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
        """The original name of an index, if that has one extent everywhere; else with ``_`` appended."""
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
        """The extent of an index: the capital of a similar index in the equation, or a number."""
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
        """The range to state; None if an axis that the equation reads implies it."""
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
        """The node with ranges stated, and arrays without axes by name."""
        if isinstance(node, Element) and not node.places:
            return Name(node.array)
        below = parts(node)
        node = with_parts(node, tuple(self.shown(part, said) for part in below)) if below else node
        if isinstance(node, Reduction):
            return replace(node, indexes=tuple(Index(i.name, said.get(i.name)) for i in node.indexes))
        return node


def refused(equation: Equation, what: str) -> CalcError:
    return wrong(equation.text, equation.at, what)

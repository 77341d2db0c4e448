"""Equations as trees: the nodes, and functions to walk and rewrite them.  Equal trees are ``==``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, replace
from typing import Any

from calcvm.frozen import frozen

REDUCTIONS = ("sum", "prod", "max", "min", "mean", "var", "logsumexp", "argmax", "argmin", "any", "all")
COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
OPERATORS = ("or", "and", *COMPARISONS, "+", "-", "*", "/", "//", "%", "^")  # binary infix operators


def _at() -> Any:
    return field(default=-1, compare=False, repr=False)


@frozen
class Number:
    """A constant: an int, or a float."""

    value: int | float
    at: int = _at()  # its place in the text, as in all nodes


@frozen
class Name:
    """An index, its extent (the capital), a parameter, or an operand that is read without places."""

    name: str
    at: int = _at()


class _Said(float):
    """A number that equals only itself, and is true."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Said)

    def __ne__(self, other: object) -> bool:
        return not isinstance(other, _Said)

    def __bool__(self) -> bool:
        return True

    def __hash__(self) -> int:
        return hash(_Said)


SAID = _Said(
    0
)  # the 0 of ``tab[t[b]; 0]``; an implicit 0 also applies beyond the ends, but places from data trap there


@frozen
class Element:
    """An element of an array, ``x[b, o*s + t]``; if a place is outside, its value is ``beyond``.

    beyond : 0.0 by default; `SAID` if an explicit 0 belongs to a place from data.
    """

    array: str
    places: tuple[Node, ...]
    beyond: float = 0.0
    at: int = _at()


@frozen
class Index:
    """An index where it is bound: kept on the left, or reduced.  extent : given by ``<``, or None."""

    name: str
    extent: Node | None = None
    at: int = _at()


@frozen
class Reduction:
    """``sum[i,j] body``: one of `REDUCTIONS`."""

    how: str
    indexes: tuple[Index, ...]
    body: Node
    at: int = _at()


@frozen
class Call:
    """A function of numbers, or one of `OPERATORS`, with its arguments; ``neg`` and ``not`` are unary."""

    function: str
    arguments: tuple[Node, ...]
    at: int = _at()


Node = Number | Name | Element | Reduction | Call


@frozen
class Equation:
    """``name[kept] = value``.

    kept : None if the left side has no brackets; then names of arrays are whole arrays, as in NumPy.
    text : the text that it was parsed from, or "".
    """

    name: str
    kept: tuple[Index, ...] | None
    value: Node
    text: str = field(default="", compare=False, repr=False)
    at: int = _at()


# ---------------------------------------------------------------- construction
ZERO, ONE = Number(0), Number(1)


def call(function: str, *arguments: Node) -> Call:
    return Call(function, arguments)


def element(array: str, *names: str) -> Element:
    """An element at the places of these indexes."""
    return Element(array, tuple(Name(name) for name in names))


# ---------------------------------------------------------------- walking
def parts(node: Node) -> tuple[Node, ...]:
    """The direct children of a node."""
    if isinstance(node, Call):
        return node.arguments
    if isinstance(node, Element):
        return node.places
    return (node.body,) if isinstance(node, Reduction) else ()


def with_parts(node: Node, new: tuple[Node, ...]) -> Node:
    """The node with other children; the same object if they are unchanged."""
    if all(a is b for a, b in zip(parts(node), new)):
        return node
    if isinstance(node, Call):
        return Call(node.function, new, node.at)
    if isinstance(node, Element):
        return Element(node.array, new, node.beyond, node.at)
    assert isinstance(node, Reduction)
    return Reduction(node.how, node.indexes, new[0], node.at)


def walk(node: Node) -> Iterator[Node]:
    """The node and its descendants, parents first."""
    todo = [node]
    while todo:
        node = todo.pop()
        yield node
        todo += reversed(parts(node))


def rewritten(node: Node, rule: Callable[[Node], Node]) -> Node:
    """``rule`` applied to every node, bottom-up."""
    below = parts(node)
    return rule(with_parts(node, tuple(rewritten(part, rule) for part in below)) if below else node)


def is_data(place: Node) -> bool:
    """Whether it depends on an array."""
    return any(isinstance(n, Element) for n in walk(place))


def said_beyond(value: float, places: tuple[Node, ...]) -> float:
    """The value of ``beyond`` in the tree for an explicit value beyond the ends."""
    return float(value) or (SAID if any(map(is_data, places)) else 0.0)


def names(node: Node) -> set[str]:
    """Its free names: indexes that it does not reduce, extents, parameters; not arrays with places."""
    if isinstance(node, Name):
        return {node.name}
    found = set().union(*map(names, parts(node)))
    return found - {i.name for i in node.indexes} if isinstance(node, Reduction) else found


def arrays(node: Node) -> dict[str, None]:
    """The arrays whose elements it reads, in order."""
    return dict.fromkeys(n.array for n in walk(node) if isinstance(n, Element))


def values(node: Node) -> set[str]:
    """All names that it reads: arrays by elements, and anything by name, including indexes and sizes."""
    return {n.array if isinstance(n, Element) else n.name for n in walk(node) if isinstance(n, Element | Name)}


def bound(equation: Equation) -> list[Index]:
    """The bound indexes, in order: kept, then reduced."""
    reduced = [i for node in walk(equation.value) if isinstance(node, Reduction) for i in node.indexes]
    return [*(equation.kept or ()), *reduced]


def own_elements(equation: Equation) -> list[Element]:
    """The elements that it reads from its result: it is a scan, or updates the old value."""
    return [n for n in walk(equation.value) if isinstance(n, Element) and n.array == equation.name]


def substituted(node: Node, by: Mapping[str, Node]) -> Node:
    """Names replaced by nodes; a bound index is renamed if its name is replaced by a name."""
    if isinstance(node, Name):
        return by.get(node.name, node)
    if isinstance(node, Reduction):
        new = []
        for index in node.indexes:
            to = by.get(index.name)
            new.append(replace(index, name=to.name) if isinstance(to, Name) else index)
        return Reduction(node.how, tuple(new), substituted(node.body, by), node.at)
    return with_parts(node, tuple(substituted(part, by) for part in parts(node)))

"""Symbolic sizes over the words of a row: ranges and gradients compute with them in place of numbers."""

from __future__ import annotations

from calcvm.equations.places import Terms, of_terms, terms
from calcvm.equations.tree import Node, Number, call


class OfWords:
    """A sum of products of words, such as ``2*N + 1``, that is not a constant.  A word may be 0."""

    def __init__(self, found: Terms):
        self.terms = found

    @property
    def node(self) -> Node:
        return of_terms(self.terms)

    # ------------------------------------------------------------ the interface of batch sizes
    def at(self, n: int) -> int:
        """Its value if every word is ``n``."""
        return sum(times * n ** len(key) for key, times in self.terms.items())

    @property
    def a(self) -> int:
        """1: it never decreases; -1: it never increases, or its direction is unknown and ``at(1)`` >= 0; 1 if ``at(1)`` < 0."""
        signs = {times > 0 for times in self.terms.values()}
        return (1 if signs == {True} else -1) if len(signs) == 1 else -1 if self.at(1) >= 0 else 1

    # ------------------------------------------------------------ arithmetic
    def __add__(self, other: OfWords | int) -> OfWords | int:
        return _sized(call("+", self.node, _node(other)))

    def __sub__(self, other: OfWords | int) -> OfWords | int:
        return _sized(call("-", self.node, _node(other)))

    def __rsub__(self, other: int) -> OfWords | int:
        return _sized(call("-", Number(other), self.node))

    def __mul__(self, other: OfWords | int) -> OfWords | int:
        return _sized(call("*", self.node, _node(other)))

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> OfWords | int:
        return _sized(call("neg", self.node))

    def __floordiv__(self, other: OfWords | int) -> OfWords | int:
        if other == self or other == 1:
            return 1 if other == self else self
        raise ArithmeticError(f"cannot tell whether {self} is a multiple of {other}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OfWords) and self.terms == other.terms

    def __hash__(self) -> int:
        return hash(frozenset(self.terms.items()))

    def __str__(self) -> str:
        from calcvm.equations.text import show

        return show(self.node)

    __repr__ = __str__


def of_word(name: str) -> OfWords:
    return OfWords({(name,): 1})


def _node(n: OfWords | int) -> Node:
    return n.node if isinstance(n, OfWords) else Number(n)


def _sized(node: Node) -> OfWords | int:
    found = terms(node)
    assert found is not None
    return OfWords(found) if {*found} - {()} else found.get((), 0)

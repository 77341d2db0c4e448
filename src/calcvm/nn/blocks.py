"""Layers built from layers that all read one input."""

from __future__ import annotations

from collections.abc import Sequence

from calcvm import functions as F
from calcvm.errors import CalcError, ShapeError
from calcvm.graph import Variable
from calcvm.nn.layers import Layer, Sequential


class Residual(Layer):
    """``branch(x) + shortcut(x)``, or ``branch(x) + x``: He et al. 2016.

    Raises
    ------
    ShapeError : the two have different shapes.
    """

    branch: Sequential
    shortcut: Sequential | None

    def __init__(self, branch: Layer, shortcut: Layer | None = None):
        self.branch = Sequential(branch)
        self.shortcut = None if shortcut is None else Sequential(shortcut)
        self.random = _all_different(self, self.branch, *([self.shortcut] if self.shortcut else [])).random

    def __repr__(self) -> str:
        return f"Residual({self.branch!r}{f', {self.shortcut!r}' if self.shortcut else ''})"

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        self._given(x)
        y = self.branch.build(x, f"{scope}.branch.", training)
        s = self.shortcut.build(x, f"{scope}.shortcut.", training) if self.shortcut else x
        if y.shape != s.shape:
            what = "shortcut" if self.shortcut else "input"
            raise ShapeError(
                f"{scope}: the branch gives {y}, the {what} is {s}: they are added, and must have one shape "
                "(shortcut= changes that of the input)"
            )
        return y + s


class Concat(Layer):
    """The results of several branches (or of a list of them) on one input, joined along the channels (axis 1): Szegedy et al. 2015."""

    branches: list[Sequential]

    def __init__(self, *branches: Layer | Sequence[Layer]):
        if len(branches) == 1 and isinstance(branches[0], (list, tuple)):
            branches = tuple(branches[0])
        if not branches:
            raise CalcError("Concat: at least one branch is wanted")
        self.branches = [Sequential(branch) for branch in branches]
        self.random = _all_different(self, *self.branches).random

    def __repr__(self) -> str:
        return f"Concat({', '.join(map(repr, self.branches))})"

    def build(self, x: Variable, scope: str, training: bool) -> Variable:
        self._given(x)
        made = [branch.build(x, f"{scope}.branch_{i}.", training) for i, branch in enumerate(self.branches, 1)]
        first = made[0]
        for y in made[1:]:
            if y.rank != first.rank or (y.shape[:1], y.shape[2:]) != (first.shape[:1], first.shape[2:]):
                raise ShapeError(f"{scope}: {first} and {y} differ in more than their channels, and cannot be joined")
        return F.concat(made, axis=1) if len(made) > 1 else first


def _all_different(layer: Layer, *parts: Sequential) -> Sequential:
    """All layers of the parts; CalcError if a layer with parameters occurs twice."""
    try:
        return Sequential(*parts)
    except CalcError as error:
        raise CalcError(f"{type(layer).__name__}: {error}") from None

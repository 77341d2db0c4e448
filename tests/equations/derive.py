"""What tests do with equations: read, derive, check what was derived by its text, and compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from calcvm.equations.check import check
from calcvm.equations.gradient import Gradient, gradient
from calcvm.equations.grammar import read
from calcvm.equations.kinds import INTEGER, NUMBER
from calcvm.equations.meaning import evaluate
from calcvm.equations.ranges import Ranges, ranges
from calcvm.equations.text import show_equations
from calcvm.equations.tree import Equation


def shapes_of(values: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: np.asarray(value).shape for name, value in values.items()}


def checked(text: str, values: Mapping[str, Any], parameters: Mapping[str, Any]) -> tuple[tuple[Equation, ...], Ranges]:
    """The equations of a text, and their ranges."""
    equations = read(text)
    kinds = {name: INTEGER if np.asarray(v).dtype.kind == "i" else NUMBER for name, v in values.items()}
    check(equations, kinds, {name: INTEGER if isinstance(v, int) else NUMBER for name, v in parameters.items()})
    whole = {name: v for name, v in parameters.items() if isinstance(v, int)}
    return equations, ranges(equations, shapes_of(values), whole)


def derived(
    equations: Sequence[Equation],
    found: Ranges,
    wrt: Sequence[str],
    out: str,
    values: Mapping[str, Any],
    parameters: Mapping[str, Any],
) -> tuple[Gradient, tuple[Equation, ...], Ranges]:
    """A gradient, and its equations as they are read from their text, checked, with the ranges that shapes alone give."""
    integers = [name for name, v in values.items() if np.asarray(v).dtype.kind == "i"]
    made = gradient(equations, wrt, [out], found, integers)
    text = show_equations(made.equations)
    given = {**values, made.seeds[out]: np.zeros(tuple(found.shapes[out]))}
    again, known = checked(text, given, {**parameters, **made.sizes})
    assert show_equations(again) == text
    for name in wrt:
        assert known.shapes[made.of[name]] == shapes_of(values)[name], text
    return made, again, known


class Derived:
    """A text, its gradient by some operands, and the gradient of one of these again."""

    def __init__(self, text: str, values: Mapping[str, Any], parameters: Mapping[str, Any], wrt: Sequence[str]):
        self.values, self.parameters, self.wrt = dict(values), dict(parameters), list(wrt)
        self.equations, self.found = checked(text, values, parameters)
        self.out = self.equations[-1].name
        self.shape = tuple(self.found.shapes[self.out])
        self.made, self.first, self.ranges = derived(self.equations, self.found, wrt, self.out, values, parameters)
        self.seed = self.made.seeds[self.out]

    def forward(self) -> np.ndarray:
        """The value by the equations of which the gradient reads results."""
        return evaluate(self.made.forward, self.values, {**self.parameters, **self.made.sizes})[self.out]

    def value(self, **other: Any) -> np.ndarray:
        return evaluate(self.equations, {**self.values, **other}, self.parameters)[self.out]

    def gradient(self, seed: Any, **other: Any) -> dict[str, np.ndarray]:
        found = evaluate(self.first, {**self.values, self.seed: seed, **other}, {**self.parameters, **self.made.sizes})
        return {name: found[made] for name, made in self.made.of.items()}

    def derive_again(self, of: str, seed: np.ndarray) -> None:
        """By all operands and by the seed, the gradient of one of the gradients."""
        self.of = self.made.of[of]
        given = {**self.values, self.seed: seed}
        self.again, self.second, _ = derived(
            self.first, self.ranges, [*self.wrt, self.seed], self.of, given, {**self.parameters, **self.made.sizes}
        )

    def second_gradient(self, seed: Any, with_: Any, **other: Any) -> dict[str, np.ndarray]:
        given = {**self.values, self.seed: seed, self.again.seeds[self.of]: with_, **other}
        found = evaluate(self.second, given, {**self.parameters, **self.made.sizes, **self.again.sizes})
        return {name: found[made] for name, made in self.again.of.items()}

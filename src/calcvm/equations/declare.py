"""Operators declared by their equation alone; the backward rows are derived when they are first read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING

from calcvm.frozen import frozen
from calcvm.lazy import cached_property

if TYPE_CHECKING:
    from calcvm.equations.plain import Plain


@frozen
class Declared:
    """An operator whose rows follow from its equation.

    text : the forward's equation, over its words, every index with its range.
    sizes, integers, reals : names of its words; an extent is an expression of sizes.
    inputs, outputs : in the row's order, inputs first.
    gradients : the values that each backward row sets, and those that it reads.
    types, declares : as in `Plain`.
    """

    name: str
    text: str
    sizes: tuple[str, ...]
    integers: tuple[str, ...]
    reals: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    gradients: Mapping[tuple[str, ...], tuple[str, ...]]
    types: Mapping[str, str] = field(default_factory=dict)
    declares: str = ""

    @cached_property
    def forward(self) -> Row:
        return Row(self, f"{self.name}_fwd", self.inputs, self.outputs)

    @cached_property
    def backward(self) -> tuple[Row, ...]:
        names = {sets: "".join(f"_{name[1:]}" for name in sets) for sets in self.gradients if len(self.gradients) > 1}
        return tuple(
            Row(self, f"{self.name}_bwd{names.get(sets, '')}", reads, sets) for sets, reads in self.gradients.items()
        )


@frozen
class Row:
    """One of its rows: the operands that it reads come before those that it sets."""

    of: Declared
    name: str
    reads: tuple[str, ...]
    sets: tuple[str, ...]

    @property
    def words(self) -> tuple[str, ...]:
        return (*self.of.sizes, *self.of.integers)

    @property
    def reals(self) -> tuple[str, ...]:
        return self.of.reals

    @property
    def operands(self) -> tuple[str, ...]:
        return (*self.reads, *self.sets)

    @property
    def types(self) -> Mapping[str, str]:
        return {name: t for name, t in self.of.types.items() if name in self.operands}

    @cached_property
    def plain(self) -> Plain:
        from calcvm.equations.facts import check
        from calcvm.equations.plain import Plain

        of = self.of
        plain = Plain(
            f"{of.name}_fwd", of.text, self.words, (*of.inputs, *of.outputs), of.reals, dict(of.types), of.declares
        )
        if self.sets != of.outputs:
            from calcvm.equations.backward import backward_of

            text, declares = backward_of(plain, of.outputs, self.sets, self.reads)
            plain = Plain(self.name, text, self.words, self.operands, self.reals, self.types, declares)
        check(plain)
        return plain


DECLARED: dict[str, Declared] = {}


def declare(
    name: str,
    text: str,
    sizes: str,
    *,
    inputs: str = "x",
    outputs: str = "y",
    integers: str = "",
    reals: str = "",
    types: Mapping[str, str] | None = None,
    declares: str = "",
    backward: Mapping[str, str] | None = None,
) -> Declared:
    """An operator declared by the equation of its forward; names are separated by spaces.

    backward : ``{"dx": "dy y"}``: a row that sets dx reads dy and y, and nothing else; ``{"dx dw": "dy x w"}`` sets both.  If the
        gradient of a scan is another scan, the row sets it too: ``{"t_dy dx": "dy x y"}``.  Inputs that are not named
        have no gradient.
    """
    by = {tuple(sets.split()): tuple(reads.split()) for sets, reads in (backward or {}).items()}
    words, whole, real, read, made = (tuple(names.split()) for names in (sizes, integers, reals, inputs, outputs))
    DECLARED[name] = Declared(name, text, words, whole, real, read, made, by, types or {}, declares)
    return DECLARED[name]


def declared_rows() -> Iterator[Row]:
    """The rows of all declared operators."""
    for declared in DECLARED.values():
        yield from (declared.forward, *declared.backward)

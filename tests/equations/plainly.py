"""Equations of numbers as rows whose kernels follow from them: extents become words, and arrays what lies in a heap."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from calcvm.equations.grammar import read
from calcvm.equations.meaning import evaluate
from calcvm.equations.plain import Plain
from calcvm.equations.ranges import ranges
from calcvm.equations.text import show_equations
from calcvm.equations.tree import Element, Equation, Index, Name, Node, Reduction, rewritten, walk
from calcvm.kernel import PREFIX

GUARD, RESERVED = 8, 2  # 8-byte cells around an operand, and at a heap's begin
TYPES = {"i": "int64", "b": "bool"}


class Row:
    """The row of a text: its `Plain`, its words, its operands, and what its results are by `evaluate`.

    results : of its equations, those that are operands; all, if None.
    """

    def __init__(
        self,
        name: str,
        text: str,
        values: Mapping[str, np.ndarray],
        results: Collection[str] | None = None,
        types: Mapping[str, str] | None = None,
    ):
        self.equations = read(text, values)
        found = ranges(self.equations, {k: v.shape for k, v in values.items()}, {})
        self.words: dict[str, int] = {}
        extents = {v: self.size(f"n_{v}", n) for v, n in found.extents.items()}
        self.values = dict(values)
        self.extents = dict(found.extents)
        self.shapes = {e.name: found.shapes[e.name] for e in self.equations if results is None or e.name in results}
        declares = "; ".join(self.declared(k, v.shape, extents) for k, v in values.items() if v.ndim)
        said = {**(types or {}), **{k: TYPES[v.dtype.kind] for k, v in values.items() if v.dtype.kind != "f"}}
        text = show_equations(_ranged(self.equations, extents))
        self.plain = Plain(name, text, tuple(self.words), (*values, *self.shapes), (), said, declares)

    def declared(self, array: str, shape: tuple[int, ...], extents: Mapping[str, Name]) -> str:
        """Its axes: as long as an index that is all that is read there, or of a word of their own."""
        axes = []
        for k, n in enumerate(shape):
            at = {p for e in self.equations for p in _places(e.value, array, k)}
            (index,) = at if len(at) == 1 else (None,)
            own = isinstance(index, Name) and self.words[extents[index.name].name] == n
            size = extents[index.name] if own else self.size(f"{array}_{k}", n)
            axes.append(f"{array.lower()}{k}_<{size.name}")
        return f"{array}[{','.join(axes)}]"

    def size(self, name: str, n: int) -> Name:
        self.words[name] = n
        return Name(name)

    def expected(self) -> dict[str, np.ndarray]:
        made = evaluate(self.equations, self.values)
        return {name: made[name] for name in self.shapes}

    def laid(self, dtype: str) -> tuple[np.ndarray, np.ndarray, dict[str, tuple[int, int]]]:
        """A heap, the row, and where each operand lies in bytes; all else is NaN, and so are results."""
        at, places, off = RESERVED + GUARD, {}, []
        sizes = {
            name: prod(self.shapes[name]) if name in self.shapes else self.values[name].size
            for name in self.plain.operands
        }
        for name, n in sizes.items():
            wide = np.dtype(self.type_of(name, dtype)).itemsize
            places[name] = (8 * at, n * wide)
            off.append(8 * at // wide)
            at += -(-n * wide // 8) + GUARD
        heap = np.full(at * 8, 0xFF, np.uint8)
        heap[: RESERVED * 8] = 0
        for name, value in self.values.items():
            begin, n = places[name]
            heap[begin : begin + n] = value.astype(self.type_of(name, dtype)).reshape(-1).view(np.uint8)
        return heap, np.array([0] * PREFIX + [*self.words.values(), *off]), places

    def type_of(self, name: str, dtype: str) -> str:
        return self.plain.types.get(name, dtype)

    def taken(
        self, heap: np.ndarray, before: np.ndarray, places: Mapping[str, tuple[int, int]], dtype: str
    ) -> dict[str, np.ndarray]:
        """Results in a heap; nothing else in it has changed, but for a trap."""
        outside = np.ones(heap.size, bool)
        outside[: RESERVED * 8] = False
        out = {}
        for name, shape in self.shapes.items():
            begin, n = places[name]
            outside[begin : begin + n] = False
            out[name] = heap[begin : begin + n].view(self.type_of(name, dtype)).reshape(shape).copy()
        assert (heap[outside] == before[outside]).all(), f"{self.plain.name} wrote outside its results"
        return out


def _places(node: Node, array: str, k: int) -> Iterator[Node]:
    yield from (n.places[k] for n in walk(node) if isinstance(n, Element) and n.array == array)


def _ranged(equations: Sequence[Equation], extents: Mapping[str, Name]) -> list[Equation]:
    """Every range said where its index is met first."""
    said: set[str] = set()

    def of(indexes: Sequence[Index]) -> tuple[Index, ...]:
        out = tuple(Index(i.name, None if i.name in said else extents[i.name]) for i in indexes)
        said.update(i.name for i in indexes)
        return out

    made = []
    for e in equations:
        kept = of(e.kept or ())
        made.append(
            replace(
                e,
                kept=kept,
                value=rewritten(
                    e.value, lambda n: replace(n, indexes=of(n.indexes)) if isinstance(n, Reduction) else n
                ),
            )
        )
    return made


def close(got: Any, want: Any, tolerance: float) -> bool:
    """Within a tolerance of the largest, or of 1; NaN and infinities alike."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    finite = np.isfinite(want)
    if not np.array_equal(np.where(finite, 0, got), np.where(finite, 0, want), equal_nan=True):
        return False
    return bool(
        np.abs(got - want, where=finite, out=np.zeros(want.shape)).max(initial=0)
        <= tolerance * max(1, np.abs(want[finite]).max(initial=0))
    )

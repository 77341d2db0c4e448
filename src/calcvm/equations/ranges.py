"""The range of each index of equations, and so the shape of each result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from calcvm.equations.grammar import wrong
from calcvm.equations.places import linear, size, terms
from calcvm.equations.tree import Element, Equation, Index, Name, Node, Reduction, bound, names, walk
from calcvm.errors import CalcError, ShapeError
from calcvm.frozen import frozen

Sizes = tuple[Any, ...]  # ints, or sizes of the batch


@frozen
class Ranges:
    """extents : of indexes, by name.  shapes : of operands and results.  sizes : values of names in places or extents."""

    extents: dict[str, Any]
    shapes: dict[str, Sizes]
    sizes: dict[str, Any]


def ranges(equations: Sequence[Equation], shapes: Mapping[str, Sizes], parameters: Mapping[str, Any]) -> Ranges:
    """Ranges of checked equations.

    An index gets the range that ``<`` states.  Else it gets the length of an axis that it is a place of.  Else, if it is the only
    index without a range in a place such as ``o*s - p + t*d``, it runs as far as windows are inside, with ``p`` on both sides;
    no index may have a minus there.

    Raises
    ------
    ShapeError : the numbers of places and axes differ, axes of one index differ, or a range is unknown.
    """
    found = _Ranges(dict(shapes), dict(parameters))
    for equation in equations:
        found.add(equation)
    return Ranges(found.extents, found.shapes, found.sizes)


class _Ranges:
    def __init__(self, shapes: dict[str, Sizes], sizes: dict[str, Any]):
        self.extents: dict[str, Any] = {}
        self.shapes, self.sizes = shapes, sizes

    def add(self, equation: Equation) -> None:
        self.equation = equation
        indexes = bound(equation)
        own = {i.name for i in indexes}
        said = {i.name: i for i in indexes if i.extent is not None}
        places: list[tuple[Node, Any, str]] = []
        for node in walk(equation.value):
            if isinstance(node, Element) and node.array in self.shapes:  # not a scan's own result
                shape = self.shapes[node.array]
                if len(node.places) != len(shape):
                    raise self.wrong(
                        node,
                        f"{node.array} has {_axes(shape)}, and {len(node.places)} place{'s' * (len(node.places) != 1)} here",
                    )
                places += [(place, n, node.array) for place, n in zip(node.places, shape)]
        for place, n, array in places:
            if isinstance(place, Name) and place.name in own and place.name not in said:
                self.put(place, place.name, n, f"{array} has {n} there")
        waiting = [(i, i.extent) for i in indexes if i.extent is not None]
        while ready := [pair for pair in waiting if names(pair[1]) <= {*self.sizes}]:
            for index, extent in ready:
                self.put(index, index.name, self.size(extent, index), "its range is given twice")
            waiting = [pair for pair in waiting if pair not in ready]
        for place, n, _ in places:
            self.window(place, n, own, own - {*said})
        for index in indexes:
            if index.name not in self.extents:
                raise self.wrong(
                    index,
                    f"the range of {index.name} is unknown: write it, as in {index.name}<10, or read an axis with it",
                )
        self.shapes[equation.name] = self.shape(equation)

    def shape(self, equation: Equation) -> Sizes:
        if equation.kept is not None:
            for node in walk(equation.value):
                if self.is_whole(node):
                    raise self.wrong(
                        node,
                        f"{node.name} has {_axes(self.shapes[node.name])}: read an element of it, as in {node.name}[...]",
                    )
            return tuple(self.extents[i.name] for i in equation.kept)
        shape: Sizes = ()
        for node in walk(equation.value):
            if isinstance(node, Reduction) and (whole := next((n for n in walk(node.body) if self.is_whole(n)), None)):
                raise self.wrong(
                    whole, f"{node.how} is over elements: write {whole.name}[{','.join(i.name for i in node.indexes)}]"
                )
            if self.is_whole(node):
                shape = self.broadcast(node, shape)
        return shape

    def is_whole(self, node: Node) -> TypeGuard[Name]:
        return isinstance(node, Name) and bool(self.shapes.get(node.name))

    def broadcast(self, node: Name, shape: Sizes) -> Sizes:
        other = self.shapes[node.name]
        n = max(len(shape), len(other))
        pairs = zip((1,) * (n - len(shape)) + shape, (1,) * (n - len(other)) + other)
        out = []
        for a, b in pairs:
            if a != b and a != 1 and b != 1:
                raise self.wrong(node, f"{node.name} of shape {_show(other)} does not broadcast with {_show(shape)}")
            out.append(b if a == 1 else a)
        return tuple(out)

    # ------------------------------------------------------------ one index
    def put(self, node: Node | Index, name: str, n: Any, why: str) -> None:
        if name in self.extents and self.extents[name] != n:
            raise self.wrong(node, f"the index {name} runs over {self.extents[name]}, and over {n} here: {why}")
        capital = name.upper()
        if capital in self.sizes and self.sizes[capital] != n:
            raise self.wrong(
                node,
                f"the index {name} runs over {n}, and {capital} is {self.sizes[capital]}: name the index otherwise",
            )
        self.extents[name] = self.sizes[capital] = n

    def window(self, place: Node, n: Any, own: set[str], open_: set[str]) -> None:
        found = names(place) & own
        left = [name for name in found if name in open_ and name not in self.extents]
        parts = linear(place, left[0]) if len(left) == 1 < len(found) else None
        if parts is None:
            return
        step, rest = parts
        if any((term := terms(rest)) and term.get((name,), 0) < 0 for name in found):
            return  # windows that run backwards: their number must be stated
        ends = [{**self.sizes, **{v: at(e) for v, e in self.extents.items()}} for at in (lambda e: 0, lambda e: e - 1)]
        try:
            s, low, high = (size(node, ends[k]) for node, k in ((step, 0), (rest, 0), (rest, 1)))
            if s < 1:
                return
            count = (n - 1 - high + max(0, -low)) // s + 1
        except (ArithmeticError, KeyError, TypeError):
            return
        self.put(place, left[0], count, "so many windows lie inside")

    def size(self, node: Node, index: Index) -> Any:
        try:
            return size(node, self.sizes)
        except ArithmeticError as error:
            raise self.wrong(index, f"the extent of {index.name} is not a size: {error}") from None

    def wrong(self, node: Node | Index, what: str) -> CalcError:
        return wrong(self.equation.text, node.at, what, ShapeError)


def _show(shape: Sizes) -> str:
    return f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"


def _axes(shape: Sizes) -> str:
    return f"{len(shape)} {'axis' if len(shape) == 1 else 'axes'} {_show(shape)}"

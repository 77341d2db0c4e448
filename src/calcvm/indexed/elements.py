"""Elements of arrays at any places: the places of windows, and the values that are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count as counting
from typing import Any, TypeVar

import numpy as np

from calcvm import functions as F
from calcvm.equations.grammar import wrong
from calcvm.equations.places import size, terms
from calcvm.equations.ranges import Ranges
from calcvm.equations.tree import (
    Call,
    Element,
    Equation,
    Index,
    Name,
    Node,
    Number,
    Reduction,
    names,
    substituted,
    walk,
)
from calcvm.errors import CalcError, ShapeError, UnsupportedOperator
from calcvm.graph import CalcGraph, Variable, apply
from calcvm.indexed.products import Extents, contract, varies
from calcvm.indexed.values import Size, Value, aligned, apart, diagonal, dropped, ordered, reshaped, spaced, stacked
from calcvm.indexed.windows import Window
from calcvm.ops.types import FLOAT

MOST_TAPS = 64  # places of a window that no row computes; each place is then a separate operator
MOST_ROWS = 4096  # rows of a table that is read by a product with rows of 0 and 1
T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """``(c1*i1 + c2*i2 + ... + first) / step``, of indexes with nonzero factors."""

    factors: dict[str, int]
    first: int
    step: int = 1

    @property
    def index(self) -> str:
        """Its only index, if the place grows with it; else ""."""
        return next(iter(self.factors)) if len(self.factors) == 1 and min(self.factors.values()) > 0 else ""


class Elements:
    """The part of lowering that reads elements.

    equations : of one text.  operands : variables, by name.  numbers : parameters.  found : ranges of the equations.
    known, made : values by key, and values of parts by name.
    """

    def __init__(
        self,
        graph: CalcGraph,
        equations: Sequence[Equation],
        operands: Mapping[str, Variable],
        numbers: Mapping[str, Any],
        found: Ranges,
    ):
        self.graph, self.text, self.numbers, self.found = graph, equations[0].text, numbers, found
        self.parts = {equation.name: equation for equation in equations}
        self.operands = operands
        self.known: dict[Any, Value] = {}
        self.made: dict[str, Value] = {}
        self.extents: Extents = dict(found.extents)
        self.fresh = (f"{n}~" for n in counting())

    def value(self, node: Node, order: Sequence[str] = ()) -> Value:
        """The value of a node, preferably with its axes in the given order."""
        raise NotImplementedError

    def whole(self, name: str) -> Any:
        """The array of an operand or a part, with all of its axes in order."""
        raise NotImplementedError

    def opened(self, node: Node) -> Node:
        """An element of a part replaced by its equation's value, if its places are indexes."""
        raise NotImplementedError

    def reduced(self, node: Reduction, v: Value, over: Sequence[str], order: Sequence[str]) -> Value:
        """A value reduced over those of its axes; it is constant along the others."""
        raise NotImplementedError

    def is_product(self, node: Node, over: Sequence[str]) -> bool:
        """Whether its sum is a product in which no factor has all indexes."""
        raise NotImplementedError

    def wrong(self, node: Node | Index, what: str, error: type[CalcError] = UnsupportedOperator) -> CalcError:
        return wrong(self.text, node.at, what, error)

    def tried(self, node: Node, make: Callable[[], T]) -> T:
        """The result of ``make``; an operator's error is shown with its place in the text."""
        try:
            return make()
        except CalcError as error:
            if "\n" in str(error):
                raise
            raise self.wrong(node, str(error), type(error)) from None

    def another(self, n: Size) -> str:
        """A new index with this extent."""
        new = next(self.fresh)
        self.extents[new] = n
        return new

    def indexes(self, node: Node, bound: bool = False) -> list[str]:
        """The node's free indexes, in order; with ``bound`` also those that it reduces."""
        found: dict[str, None] = {}
        for n in walk(node):
            if isinstance(n, Name) and n.name in self.extents:
                found[n.name] = None
            elif isinstance(n, Reduction) and bound:
                found |= dict.fromkeys(i.name for i in n.indexes)
        free = names(node)
        return [name for name in found if bound or name in free]

    def variable(self, v: Value) -> Value:
        """The same value; a constant becomes a constant of the graph."""
        if not v.constant:
            return v
        x = self.graph.constant(self.graph.unique("numbers"), np.asarray(v.data, float))
        x.unnamed = True
        return Value(x, v.axes)

    # ------------------------------------------------------------ windows
    def taps(self, nodes: Sequence[Node], over: Sequence[str]) -> list[str]:
        """Reduced indexes whose places contain further indexes, or other expressions of them."""
        found: dict[str, None] = {}
        for node in nodes:
            for n in walk(node):
                for place in n.places if isinstance(n, Element) else ():
                    form = self.form(place)
                    if form is None or form.step != 1 or (form.factors and not form.index):
                        found |= dict.fromkeys(v for v in self.direct(place) if v in over)
        return [*found]

    def direct(self, place: Node) -> list[str]:
        """The indexes of a place itself, not of arrays in it."""
        if isinstance(place, Name):
            return [place.name] if place.name in self.extents else []
        return [v for argument in place.arguments for v in self.direct(argument)] if isinstance(place, Call) else []

    def of_data(self, place: Node) -> bool:
        """Whether the place depends on arrays, including one without axes, read by name."""
        return any(isinstance(n, Element) or (isinstance(n, Name) and n.name in self.found.shapes) for n in walk(place))

    def form(self, place: Node) -> Place | None:
        """A place as a sum of indexes; None if it has another form."""
        if self.of_data(place):
            return None
        step = 1
        if isinstance(place, Call) and place.function == "/":
            above, below = place.arguments
            place, step = above, self.whole_number(below)
        if not self.direct(place):
            return Place({}, self.whole_number(place), step)
        fixed = names(place) - {*self.extents}
        by: dict[str, Node] = {name: Number(self.whole_number(Name(name))) for name in fixed}
        found = terms(substituted(place, by))
        if found is None or any(len(key) > 1 for key in found):
            return None
        return Place({key[0]: x for key, x in found.items() if key}, found.get((), 0), step)

    def whole_number(self, node: Node) -> int:
        try:
            return int(size(node, {**self.found.sizes, **self.numbers}))
        except (ArithmeticError, KeyError) as error:
            raise self.wrong(node, f"this is not a number of places: {error}", ShapeError) from None

    def windows(self, node: Element, taps: Sequence[str]) -> tuple[Element, list[Window]] | None:
        """An element with the windows' places replaced by new indexes, and the windows; None if it has other places."""
        places, found = [*node.places], list[Window]()
        shape = self.shape(node)
        for k, place in enumerate(node.places):
            form = self.form(place)
            if form is None:
                return None
            tap = [v for v in form.factors if v in taps]
            if not tap:
                continue
            if len(form.factors) != 2 or len(tap) != 1:
                return None
            (out,) = {*form.factors} - {*tap}
            step, far, first = form.factors[out], form.factors[tap[0]], form.first
            new = self.another(shape[k])
            sizes = (int(shape[k]), int(self.extents[out]), int(self.extents[tap[0]]))
            if step > 0 and far > 0 and form.step == 1:
                found.append(Window(new, out, tap[0], step, far, -first, *sizes))
            elif step == 1 and far < 0:
                found.append(Window(new, out, tap[0], form.step, -far, first, *sizes, transposed=True))
            else:
                return None
            places[k] = Name(new, place.at)
        kinds, each = {w.transposed for w in found}, [name for w in found for name in (w.out, w.tap)]
        own = [v for place in places for v in self.indexes(place)]
        if len(kinds) != 1 or len(each) != len({*each}) or {*each} & {*own}:
            return None
        return Element(node.array, tuple(places), node.beyond, node.at), found

    def few(self, node: Node, n: Any) -> None:
        if varies(n) or int(n) > MOST_TAPS:
            raise self.wrong(
                node,
                f"no row has such windows of {n} places, and only up to {MOST_TAPS} are read place by place: write it as a "
                "convolution (a sum of products with taps of one array), as pooling, or with fewer places",
            )

    # ------------------------------------------------------------ elements
    def shape(self, node: Element) -> tuple[Any, ...]:
        return self.found.shapes[node.array]

    def element(self, node: Element, order: Sequence[str]) -> Value:
        """An element of an array, at any places."""
        for k, place in enumerate(node.places):
            if self.of_data(place):
                return self.at_data(node, k, order)
        forms = [self.form(place) for place in node.places]
        shape = self.shape(node)
        plain = [f is not None and f.index != "" and (f.first, f.step, f.factors[f.index]) == (0, 1, 1) for f in forms]
        several = [
            v
            for form, place in zip(forms, node.places)
            if form is None or (form.factors and not form.index)
            for v in self.direct(place)
        ]
        seen: dict[str, int] = {}
        for k, form in enumerate(forms):
            for v in form.factors if form else ():
                if v in seen and not (plain[k] and plain[seen[v]] and shape[k] == shape[seen[v]] == self.extents[v]):
                    several.append(v)
                seen.setdefault(v, k)
        if several:
            return self.place_by_place(node, min(several, key=lambda v: int(self.extents[v])), order)
        x, axes, axis = self.whole(node.array), [], 0
        for k, form in enumerate(forms):
            assert form is not None
            n, v = shape[k], form.index
            if not plain[k] or self.extents[v] != n:
                if varies(n) or varies(self.extents.get(v, 0)):
                    raise self.wrong(node, f"{node.array}: a place that counts the batch")
                x = self.moved(x, axis, form, int(n), node.beyond)
            if v:
                axes.append(v)
                axis += 1
        for v in [v for v in dict.fromkeys(axes) if axes.count(v) > 1]:
            while axes.count(v) > 1:
                first = axes.index(v)
                second = axes.index(v, first + 1)
                x = diagonal(x, first, second)
                axes = [a for i, a in enumerate(axes) if i not in (first, second)] + [v]
        return Value(x, tuple(axes))

    def moved(self, x: Variable, axis: int, form: Place, n: int, beyond: float) -> Variable:
        """Elements along an axis at the places of one index; if there is no index, without the axis."""
        first, step = form.first, form.factors.get(form.index, 1)
        if form.step > 1:
            x, n = apart(x, axis, form.step, beyond), n * form.step
        if form.index:
            return spaced(x, axis, first, step, int(self.extents[form.index]), beyond)
        return dropped(spaced(x, axis, min(max(first, -1), n), 1, 1, beyond), axis)

    def place_by_place(self, node: Element, index: str, order: Sequence[str]) -> Value:
        """Elements at places that no row can read together: one part for each place of an index."""
        self.few(node, self.extents[index])
        pieces = [self.value(substituted(node, {index: Number(k)}), order) for k in range(int(self.extents[index]))]
        return stacked(pieces, index)

    def at_data(self, node: Element, axis: int, order: Sequence[str]) -> Value:
        """Elements at places that come from data."""
        name = self.another(self.shape(node)[axis])
        places = (*node.places[:axis], Name(name), *node.places[axis + 1 :])
        x = self.value(Element(node.array, places, node.beyond, node.at), order)
        return self.gathered(x, name, self.value(node.places[axis], order), node, order)

    def gathered(self, x: Value, name: str, place: Value, node: Node, order: Sequence[str]) -> Value:
        """x at an integer place, which depends on some indexes, along its axis ``name``.

        A place beyond the ends traps, unless the element has an explicit value there.
        """
        rest = [v for v in x.axes if v != name]
        place = self.variable(place)
        n = int(self.extents[name])
        if isinstance(node, Element) and node.beyond:
            inside = F.logical_and(place.data >= 0, place.data < n)
            if place.data.type == FLOAT:  # a fractional quotient is not a place
                inside = F.logical_and(inside, F.equal(F.floor(place.data), place.data))
            within = Value(F.where(inside, place.data, 0), place.axes)
            found = self.gathered(x, name, within, Element(node.array, node.places, at=node.at), order)
            chosen = aligned(Value(inside, place.axes), found.axes)
            return Value(F.where(chosen, found.data, float(node.beyond)), found.axes)
        index = ordered(place, [v for v in rest if v in place.axes] if {*rest} == {*place.axes} else place.axes)
        index = F.cast(index, "int64") if index.type == "int8" else index
        if {*rest} == {*place.axes}:
            return self.tried(node, lambda: Value(F.pick(ordered(x, (*rest, name)), index), tuple(rest)))
        if n > MOST_ROWS:
            raise self.wrong(
                node,
                f"no row reads by an index out of {n} yet, and the product with rows of 0 and 1 that replaces it is limited to "
                f"{MOST_ROWS}",
            )
        axes = (*place.axes, name)
        one = F.cast(apply("equal", aligned(place, axes), np.arange(n)), None)
        one = one * reshaped(F.pick(one, index), (*index.shape, 1))  # traps
        kept = [*dict.fromkeys(v for v in (*order, *place.axes, *rest) if v in place.axes or v in rest)]

        def of(data: Any) -> Value:
            return contract([Value(one, axes), Value(data, x.axes)], kept, self.extents)

        return self.tried(node, lambda: _with_infinities(x.data, of))


def _with_infinities(x: Any, of: Callable[[Any], Value]) -> Value:
    """A sum with weights 0 and 1 of values that may be infinite or NaN, for which 0 times the value is not 0."""
    finite = F.equal(x - x, 0)
    found = of(F.where(finite, x, 0))
    above, below = (F.cast(F.logical_and(F.logical_not(finite), c), None) for c in (x > 0, x < 0))
    none = F.cast(F.not_equal(x, x), None)
    kind = of(above + 2 * below + 3 * none).data
    zero = kind * 0
    y = F.where(
        F.equal(kind, 1),
        1 / zero,
        F.where(F.equal(kind, 2), -1 / zero, F.where(F.equal(kind, 3), zero / zero, found.data)),
    )
    return Value(y, found.axes)

"""The device-independent basis of a kernel that follows from a row's equation: the equation in stages.

A stage is an equation whose value is one reduction or has none.  Every reduction of an equation becomes a separate stage, equal ones
only once; means, variances and logsumexp become sums and maxima.  Equations that are not operands are inlined where they are
read.  So ``y[r<R,k<N] = exp(x[r,k])/sum[j<N] exp(x[r,j])`` has two stages, ``t[r] = sum[j] exp(x[r,j])`` and ``y``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field

from calcvm.equations.rows import Ranged, read_ranged
from calcvm.equations.simplify import conjunction
from calcvm.equations.text import show
from calcvm.equations.tree import (
    COMPARISONS,
    SAID,
    Call,
    Element,
    Equation,
    Index,
    Name,
    Node,
    Number,
    Reduction,
    call,
    names,
    own_elements,
    parts,
    rewritten,
    substituted,
    walk,
    with_parts,
)
from calcvm.errors import CalcError
from calcvm.frozen import frozen
from calcvm.lazy import cached_property

Another = Callable[[Index], Index]  # an index of the same range, with a fresh name


@frozen
class Plain:
    """A row whose kernels follow from its equation.

    name : the row's.
    text : its equation over its words, every index with its range.
    words : integer words, in the row's order, followed by ``reals``, each the bits of a float64.
    operands : in the row's order.
    types : of operands that do not have the program's float type.
    declares : axes of operands that are read at other places than indexes, and the values of operands that are left out.
    """

    name: str
    text: str
    words: tuple[str, ...]
    operands: tuple[str, ...]
    reals: tuple[str, ...] = ()
    types: Mapping[str, str] = field(default_factory=dict)
    declares: str = ""

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        return _Stages(self).stages

    @cached_property
    def axes(self) -> dict[str, tuple[Node, ...]]:
        """The extents of each operand's axes, over the words."""
        return {name: extents for name, extents in _read(self).axes.items() if name in self.operands}

    @cached_property
    def left_out(self) -> dict[str, int | float]:
        """The values that stand for operands that are left out."""
        return _read(self).left_out

    @cached_property
    def shared(self) -> Index | None:
        """The first index of every result, which workers share; None if the results are numbers, which worker 0 computes."""
        first = {stage.kept[:1] for stage in self.stages if stage.result}
        if len(first) > 1:
            raise CalcError(
                f"row {self.name!r}: its results begin with different indexes, so workers cannot share them"
            )
        (kept,) = first
        return kept[0] if kept else None


@frozen
class Stage:
    """``name[kept] = how[over] value``, where ``value`` has no reduction.

    kept : indexes, outermost first.  how : "" (no reduction), sum, prod, max, min, argmax, argmin, any or all.
    value : reads elements of operands, and of earlier results and stages; these only at indexes.
    result : whether it is an operand of the row; other stages are computed inside the loops over their kept indexes.
    scan : the index along which it reads its own elements, and the direction: 1 (those before) or -1 (those after).
    """

    name: str
    kept: tuple[Index, ...]
    how: str
    over: tuple[Index, ...]
    value: Node
    result: bool
    scan: tuple[str, int] | None = None


def _read(plain: Plain) -> Ranged:
    try:
        return read_ranged(plain.text, plain.declares, plain.operands)
    except CalcError as error:
        raise type(error)(f"row {plain.name!r}: {error}") from None


class _Stages:
    def __init__(self, plain: Plain):
        self.plain, self.made = plain, 0
        self.stages: tuple[Stage, ...] = ()
        self.extents: dict[str, Node] = {}
        self.parts: dict[str, Equation] = {}  # equations that are not operands
        self.known: dict[str, tuple[str, tuple[str, ...]]] = {}  # reducing stages, by their text
        for equation in _read(plain).equations:
            if equation.kept is None:
                raise CalcError(f"row {plain.name!r}: {equation.name} has no indexes: write [] for a number")
            self.extents |= {i.name: i.extent for i in bound_in(equation)}  # type: ignore[misc]
            self.add(equation)

    def add(self, equation: Equation) -> None:
        kept = equation.kept or ()
        value = rewritten(rewritten(equation.value, self.opened), self.chosen)
        equation = Equation(equation.name, kept, expanded(value, self.another))
        if equation.name not in self.plain.operands:
            if own_elements(equation):
                raise CalcError(
                    f"row {self.plain.name!r}: the scan {equation.name} is not an operand of the row: make it a result, or a "
                    "separate operator"
                )
            self.parts[equation.name] = equation
            return
        value = self.lifted(equation.value, top=not own_elements(equation))
        how, over = "", kept[:0]
        if isinstance(value, Reduction):
            how, over, value = value.how, value.indexes, value.body
        stage = Stage(equation.name, kept, how, over, value, True, _scan(equation, self.plain.name))
        self.stages = (*self.stages, stage)

    def opened(self, node: Node) -> Node:
        """An element of an equation that is not an operand, replaced by its value."""
        of = self.parts.get(node.array if isinstance(node, Element) else node.name if isinstance(node, Name) else "")
        if of is None:
            return node
        if not isinstance(node, Element):
            return put_in(of.value, {}, self.another)
        inside: Node | None = None
        at: dict[str, Node] = {}
        for index, place in zip(of.kept or (), node.places):
            at[index.name], there = self.within(place, index)
            if there is not None:
                inside = there if inside is None else call("and", inside, there)
        value = put_in(of.value, at, self.another)
        if inside is None:
            return value
        if isinstance(value, Call) and value.function in (*COMPARISONS, "and", "or", "not"):
            return call("and", inside, value)
        beyond = int(node.beyond) if node.beyond.is_integer() else node.beyond
        return call("where", inside, value, Number(beyond))

    def chosen(self, node: Node) -> Node:
        """A condition that is explicitly 0 (false) beyond the ends, as a test that the place is inside, and the condition."""
        if not isinstance(node, Element) or node.beyond != SAID or self.plain.types.get(node.array) != "bool":
            return node
        places, inside = list[Node](), list[Node]()
        for place, extent in zip(node.places, self.plain.axes[node.array]):
            at, there = self.within(place, Index("", extent))
            inside += [] if there is None else [there]
            places.append(at if there is None else call("%", at, extent))
        return call("and", conjunction(inside), Element(node.array, tuple(places)))

    def within(self, place: Node, index: Index) -> tuple[Node, Node | None]:
        """A place as an integer, and the test that it is in an index's range; None if it always is."""
        assert index.extent is not None
        if isinstance(place, Name) and self.extents.get(place.name) == index.extent:
            return place, None
        exact: Node | None = None
        if isinstance(place, Call) and place.function == "/":
            above, below = place.arguments
            place, exact = call("//", above, below), call("==", call("%", above, below), Number(0))
        inside = call("and", call("<=", Number(0), place), call("<", place, index.extent))
        return place, inside if exact is None else call("and", exact, inside)

    def another(self, index: Index) -> Index:
        """An index of the same range with a fresh name."""
        self.made += 1
        new = Index(f"{index.name}_{self.made}", index.extent)
        assert index.extent is not None
        self.extents[new.name] = index.extent
        return new

    def lifted(self, node: Node, top: bool = False) -> Node:
        """The value with each reduction replaced by an element of a stage; an outermost one stays if it is on ``top``."""
        below = parts(node)
        node = with_parts(node, tuple(map(self.lifted, below))) if below else node
        if not isinstance(node, Reduction) or top:
            return node
        free = tuple(v for v in self.extents if v in names(node))
        key = show(substituted(node, {i.name: Name(f"#{k}") for k, i in enumerate(node.indexes)}))
        key += f" {[show(i.extent) for i in node.indexes if i.extent is not None]}"
        if key not in self.known:
            name = f"t{len(self.known) + 1}"
            while name in self.plain.operands or name in self.plain.words or name in self.extents:
                name += "_"
            self.known[key] = name, free
            kept = tuple(Index(v, self.extents[v]) for v in free)
            self.stages = (*self.stages, Stage(name, kept, node.how, node.indexes, node.body, False))
        name, kept_names = self.known[key]
        return Element(name, tuple(map(Name, kept_names)))


def bound_in(equation: Equation) -> Iterator[Index]:
    yield from equation.kept or ()
    for node in walk(equation.value):
        if isinstance(node, Reduction):
            yield from node.indexes


def put_in(node: Node, by: Mapping[str, Node], another: Another) -> Node:
    """Names replaced by nodes; reduced indexes are renamed, so that they cannot capture names in these nodes."""
    if isinstance(node, Reduction):
        new = tuple(another(i) for i in node.indexes)
        by = {**by, **{i.name: Name(n.name) for i, n in zip(node.indexes, new)}}
        return Reduction(node.how, new, put_in(node.body, by, another))
    if isinstance(node, Name):
        return by.get(node.name, node)
    return with_parts(node, tuple(put_in(part, by, another) for part in parts(node)))


def expanded(node: Node, another: Another) -> Node:
    """``mean``, ``var`` and ``logsumexp`` as sums and maxima: var in two passes; logsumexp and logaddexp relative to the largest."""

    def again(how: str, over: Sequence[Index], body: Node) -> Node:
        return put_in(Reduction(how, tuple(over), body), {}, another)

    def rule(n: Node) -> Node:
        if isinstance(n, Call) and n.function == "logaddexp":
            apart = call("neg", call("abs", call("-", *n.arguments)))
            apart = call("where", call("==", *n.arguments), Number(0), apart)
            return call("+", call("max", *n.arguments), call("softplus", apart))
        if not isinstance(n, Reduction) or n.how not in ("mean", "var", "logsumexp"):
            return n
        over, body = n.indexes, n.body
        if n.how == "logsumexp":
            top = again("max", over, body)
            spread = call("log", Reduction("sum", over, call("exp", call("-", body, top))))
            finite = call("<", call("abs", top), Number(float("inf")))
            return call("where", finite, call("+", top, spread), top)
        count: Node = Number(1)
        for index in over:
            assert index.extent is not None
            count = index.extent if count == Number(1) else call("*", count, index.extent)
        if n.how == "var":
            off = call("-", body, call("/", again("sum", over, body), count))
            body = call("*", off, off)
        return call("/", Reduction("sum", over, body), count)

    return rewritten(node, rule)


def _scan(equation: Equation, row: str) -> tuple[str, int] | None:
    own = own_elements(equation)
    if not own:
        return None
    found = set()
    for element in own:
        for index, place in zip(equation.kept or (), element.places):
            if place != Name(index.name):
                found.add((index.name, 1 if any(n == "-" for n in _signs(place)) else -1))
    if len(found) != 1:
        raise CalcError(f"row {row!r}: {equation.name} reads its own elements along one index, in one direction")
    return found.pop()


def _signs(place: Node) -> list[str]:
    return [n.function for n in walk(place) if not isinstance(n, (Name, Number, Element, Reduction))]

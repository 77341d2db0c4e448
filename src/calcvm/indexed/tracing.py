"""Equations written in Python: index objects, elements of variables at them, and expressions of these.

They become the text of an equation, which is then parsed, so both notations share one path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from calcvm import checks
from calcvm.equations import tree
from calcvm.equations.grammar import NAME, WORDS, read
from calcvm.equations.text import show_equation
from calcvm.equations.tree import REDUCTIONS, Call, Element, Equation, Name, Node, Number, said_beyond
from calcvm.errors import CalcError, NoNumber
from calcvm.graph import Traced as Base
from calcvm.graph import Variable
from calcvm.indexed.operators import SIGNS, functions
from calcvm.ops import OPS


class Traced(Base):
    """A number for each place of an equation's indexes.

    node : its tree, in which arrays are named by `key`.  arrays : the arrays by key.
    """

    def __init__(self, node: Node, arrays: Mapping[str, Variable]):
        self.node, self.arrays = node, dict(arrays)

    def beyond(self, value: float) -> Traced:
        """The same element, with this value if its places are beyond the ends of the array (default 0)."""
        if not isinstance(self.node, Element):
            raise CalcError("beyond applies to an element, such as x[n, o + t].beyond(-np.inf)")
        if not checks.is_number(value):
            raise CalcError(f"beyond: a number is wanted, such as 0 or -np.inf, not {checks.shown(value)}")
        places = self.node.places
        return Traced(Element(self.node.array, places, said_beyond(value, places)), self.arrays)

    # ------------------------------------------------------------ called by the graph
    def _element(self, x: Variable, places: tuple[Any, ...]) -> Traced:
        found = [_traced(f"a place of {x.name}", place) for place in places]
        return _of(Element(_key(x), tuple(t.node for t in found)), found, {_key(x): x})

    def _called(self, operator: str, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Traced:
        given = [_traced(operator, v) for v in inputs]
        if operator == "square":
            return _of(Call("^", (given[0].node, Number(2))), given)
        if operator == "pow":
            return _of(Call("^", (given[0].node, Number(attrs["exponent"]))), given)
        if operator not in SIGNS and operator not in functions():
            raise CalcError(f"{operator} applies to variables, not to elements of an equation")
        default = {a.name: a.default for a in OPS[operator].attrs}
        if told := ", ".join(f"{k}={v!r}" for k, v in attrs.items() if v != default.get(k)):
            raise CalcError(f"{operator}({told}) in an equation: only default settings work; write it out by cv.where")
        return _of(Call(SIGNS.get(operator, operator), tuple(t.node for t in given)), given)

    def _reduced(self, how: str, over: Any) -> Traced:
        indexes = over if isinstance(over, tuple) else (over,)
        for index in indexes:
            if not isinstance(index, Index):
                raise CalcError(
                    f"{how} in an equation is over indexes that cv.indexes makes, not {checks.shown(index)}"
                )
        return _of(tree.Reduction(how, tuple(i.bound for i in indexes), self.node), [self])

    # ------------------------------------------------------------ operators
    def __add__(self, other: Any) -> Traced:
        return self._called("add", (self, other), {})

    def __radd__(self, other: Any) -> Traced:
        return self._called("add", (other, self), {})

    def __sub__(self, other: Any) -> Traced:
        return self._called("sub", (self, other), {})

    def __rsub__(self, other: Any) -> Traced:
        return self._called("sub", (other, self), {})

    def __mul__(self, other: Any) -> Traced:
        return self._called("mul", (self, other), {})

    def __rmul__(self, other: Any) -> Traced:
        return self._called("mul", (other, self), {})

    def __truediv__(self, other: Any) -> Traced:
        return self._called("div", (self, other), {})

    def __rtruediv__(self, other: Any) -> Traced:
        return self._called("div", (other, self), {})

    def __mod__(self, other: Any) -> Traced:
        return self._called("mod", (self, other), {})

    def __rmod__(self, other: Any) -> Traced:
        return self._called("mod", (other, self), {})

    def __floordiv__(self, other: Any) -> Traced:
        given = [self, _traced("//", other)]
        return _of(Call("//", tuple(t.node for t in given)), given)

    def __matmul__(self, other: Any) -> Traced:
        raise CalcError(
            "@ applies to variables, not to elements: cv.sum(a[n, k] * b[k, m], over=k) is a product in an equation"
        )

    __rmatmul__ = __matmul__

    def __pow__(self, exponent: Any) -> Traced:
        given = [self, _traced("**", exponent)]
        return _of(Call("^", tuple(t.node for t in given)), given)

    def __rpow__(self, base: Any) -> Traced:
        return _traced("**", base) ** self

    def __neg__(self) -> Traced:
        return self._called("neg", (self,), {})

    def __pos__(self) -> Traced:
        return self

    def __abs__(self) -> Traced:
        return self._called("abs", (self,), {})

    def __lt__(self, other: Any) -> Traced:
        return self._called("less", (self, other), {})

    def __le__(self, other: Any) -> Traced:
        return self._called("less_equal", (self, other), {})

    def __gt__(self, other: Any) -> Traced:
        return self._called("greater", (self, other), {})

    def __ge__(self, other: Any) -> Traced:
        return self._called("greater_equal", (self, other), {})

    def __eq__(self, other: Any) -> Any:
        return self._called("equal", (self, other), {})

    def __ne__(self, other: Any) -> Any:
        return self._called("not_equal", (self, other), {})

    __hash__ = object.__hash__

    def __and__(self, other: Any) -> Traced:
        return self._called("logical_and", (self, other), {})

    def __or__(self, other: Any) -> Traced:
        return self._called("logical_or", (self, other), {})

    def __invert__(self) -> Traced:
        return self._called("logical_not", (self,), {})

    def _no_number(self, *_: Any) -> NoReturn:
        raise NoNumber(
            f"{self!r} stands for numbers of an equation: take & | ~ for and, or, not, cv.where(c, a, b) for an if, and variables "
            "of the graph, such as g.constant(name, array), instead of arrays at its places"
        )

    __bool__ = __float__ = __int__ = __index__ = __len__ = __iter__ = _no_number
    __array__ = _no_number

    def __repr__(self) -> str:
        from calcvm.equations.text import show

        return show(_renamed(self.node, _names(self.node, self.arrays)))


class Index(Traced):
    """An index of equations, by its name; ``t<3`` gives its range."""

    def __init__(self, bound: tree.Index):
        super().__init__(Name(bound.name), {})
        self.bound = bound


class Kept:
    """``cv.equation[b, o]``: the indexes of a result; call it with the result's value."""

    def __init__(self, indexes: Sequence[Any], build: Callable[[Sequence[Index], Any], Variable]):
        for index in indexes:
            if not isinstance(index, Index):
                raise CalcError(f"cv.equation[...] takes indexes that cv.indexes makes, not {checks.shown(index)}")
        self._indexes, self._build = indexes, build

    def __call__(self, value: Any) -> Variable:
        """A variable whose elements are the value's, for all places of the indexes."""
        return self._build(self._indexes, value)

    def __repr__(self) -> str:
        return f"cv.equation[{', '.join(i.bound.name for i in self._indexes)}]"


def indexes(names: str) -> Any:
    """Indexes for equations written in Python: ``b, o, i = cv.indexes("b o i")``; a single name gives the index itself.

    names : separated by spaces or commas.  If no axis gives an index's number of places, write it: ``"t<3"``.

    Raises
    ------
    CalcError : a name is invalid, or a word of the language.

    Examples
    --------
    >>> g = cv.CalcGraph()
    >>> x, w = g.placeholder("x", (None, 4)), g.parameter("w", (4, 3))
    >>> b, i, o = cv.indexes("b i o")
    >>> with g.path("forward"):
    ...     print(cv.equation[b, o](cv.sum(i, x[b, i] * w[i, o])))
    y (B, 3)
    """
    if not isinstance(names, str) or not names.replace(",", " ").split():
        raise CalcError(f"indexes: give names, such as 'b o i', not {checks.shown(names)}")
    found = []
    for part in names.replace(",", " ").split():
        name = part.partition("<")[0]
        try:
            (equation,) = read(f"y[{part}] = 0")
            (bound,) = equation.kept or ()
        except (CalcError, ValueError):
            why = "a word of the language" if name in WORDS or name in REDUCTIONS else "not an index, such as i, or t<3"
            raise CalcError(f"indexes: {part!r} is {why}") from None
        found.append(Index(bound))
    return found[0] if len(found) == 1 else tuple(found)


# ---------------------------------------------------------------- the text
def _key(x: Variable) -> str:
    return f"array~{id(x)}"


def _of(node: Node, given: Sequence[Traced], more: Mapping[str, Variable] | None = None) -> Traced:
    arrays = dict(more or {})
    for t in given:
        arrays |= t.arrays
    return Traced(node, arrays)


def _traced(what: str, value: Any) -> Traced:
    if isinstance(value, Traced):
        return value
    if isinstance(value, Variable):
        if value.rank:
            raise CalcError(
                f"{what}: {value} has {value.rank} axes: read an element of it in an equation, as in {value.name}[...]"
            )
        return Traced(Name(_key(value)), {_key(value): value})
    if isinstance(value, slice):
        raise CalcError(f"{what}: in an equation a place is an index or a number, not a slice")
    if checks.is_integer(value):
        return Traced(_number(int(checks.plain(value))), {})
    if checks.is_number(value):
        return Traced(_number(float(checks.number(what, value))), {})
    raise CalcError(
        f"{what}: an element such as x[b, i], or a number, is wanted in an equation, not {checks.called(value)}"
    )


def _number(value: int | float) -> Node:
    return Number(value)


def _names(node: Node, arrays: Mapping[str, Variable]) -> dict[str, str]:
    """Names for arrays by key: the variables' own names if they are valid and not an index's."""
    taken = {n.name for n in tree.walk(node) if isinstance(n, Name)}
    taken |= {i.name for n in tree.walk(node) if isinstance(n, tree.Reduction) for i in n.indexes}
    taken |= {name.upper() for name in taken}
    found: dict[str, str] = {}
    for key, x in arrays.items():
        fits = NAME.fullmatch(x.name) and x.name not in (*WORDS, *REDUCTIONS)
        stem = x.name if fits else "x"
        name, n = stem, 1
        while name in taken:
            n += 1
            name = f"{stem}_{n}"
        found[key] = name
        taken.add(name)
    return found


def _renamed(node: Node, by: Mapping[str, str]) -> Node:
    def rule(n: Node) -> Node:
        if isinstance(n, Element):
            return Element(by.get(n.array, n.array), n.places, n.beyond)
        return Name(by[n.name]) if isinstance(n, Name) and n.name in by else n

    return tree.rewritten(node, rule)


def traced_equation(kept: Sequence[Index], value: Any) -> tuple[str, dict[str, Variable]]:
    """The text of an equation, and its operands."""
    value = _traced("equation", value)
    indexes_ = tuple(i.bound for i in kept)
    by = _names(_with(value.node, indexes_), value.arrays)
    operands = {by[key]: x for key, x in value.arrays.items()}
    name = next(
        n
        for n in ("y", "z", *(f"y_{k}" for k in range(2, 99)))
        if n not in operands and n not in {i.name for i in indexes_}
    )
    return show_equation(Equation(name, indexes_, _renamed(value.node, by))), operands


def _with(node: Node, kept: Sequence[tree.Index]) -> Node:
    """A node that also contains the kept indexes."""
    return Call("", (node, *(Name(i.name) for i in kept)))

"""Checks of equations before any size is known: names, numbers of arguments and places, kinds of values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches

from calcvm.equations.functions import ARGUMENTS
from calcvm.equations.grammar import wrong
from calcvm.equations.kinds import CONDITION, INTEGER, NUMBER, WHOLE
from calcvm.equations.places import linear
from calcvm.equations.tree import (
    COMPARISONS,
    ONE,
    ZERO,
    Call,
    Element,
    Equation,
    Index,
    Name,
    Node,
    Number,
    Reduction,
    bound,
    own_elements,
    walk,
)
from calcvm.errors import CalcError

DIVIDES = ("/", "//", "%")
MOST_PLACE = 2**40


def check(
    equations: Collection[Equation],
    operands: Mapping[str, str],
    parameters: Mapping[str, str],
    functions: Mapping[str, int] = ARGUMENTS,
) -> dict[str, str]:
    """The kind of each result.

    Parameters
    ----------
    operands, parameters : names with their kinds: `NUMBER`, `INTEGER` or `CONDITION`.  Parameters have no places.
    functions : names with their numbers of arguments.

    Raises
    ------
    CalcError : a name is unknown, is ambiguous, or is used as the wrong kind.
    """
    check_places(equations, {})
    kinds = dict(operands)
    capitals = {i.name.upper() for equation in equations for i in bound(equation)}
    for equation in equations:
        kinds[equation.name] = _Equation(equation, kinds, parameters, functions, capitals).kind()
    return kinds


def check_places(equations: Collection[Equation], numbers: Mapping[str, int | float]) -> None:
    """Reject places and ranges so large that integers computed from them would overflow (CalcError).

    numbers : values of known parameters.
    """

    def reach(node: Node) -> int | float:
        """Its magnitude if every index is 1."""
        if isinstance(node, Number):
            return abs(node.value)
        if not isinstance(node, Call):
            return abs(numbers.get(node.name, 1)) if isinstance(node, Name) else 1
        found = [reach(argument) for argument in node.arguments]
        if node.function == "*":
            return min(found[0] * found[1], 2 * MOST_PLACE)
        return found[0] if node.function in DIVIDES else sum(found)

    for e in equations:
        places = [p for node in walk(e.value) if isinstance(node, Element) for p in node.places]
        for node in (*places, *(i.extent for i in bound(e) if i.extent is not None)):
            if not reach(node) <= MOST_PLACE:
                raise wrong(e.text, node.at, "a place, or a range, of numbers above 2^40: no array is as long")


class _Equation:
    def __init__(
        self,
        equation: Equation,
        kinds: Mapping[str, str],
        parameters: Mapping[str, str],
        functions: Mapping[str, int],
        capitals: Collection[str],
    ):
        self.equation, self.kinds, self.parameters, self.functions = equation, kinds, parameters, functions
        self.capitals = capitals  # of the program's indexes

    def wrong(self, node: Node | Index, what: str) -> CalcError:
        return wrong(self.equation.text, node.at, what)

    def kind(self) -> str:
        kept = self.equation.kept or ()
        self.bind(kept, frozenset())
        if self.equation.name not in self.kinds and (own := own_elements(self.equation)):
            self.scan(own, [i.name for i in kept])
            self.kinds = {**self.kinds, self.equation.name: NUMBER}
        return self.of(self.equation.value, frozenset(i.name for i in kept))

    def bind(self, indexes: tuple[Index, ...], around: frozenset[str]) -> None:
        """Reject indexes whose name has two meanings."""
        seen = set(around)
        for index in indexes:
            if index.name in seen:
                raise self.wrong(index, f"the index {index.name} is there already: another index needs another name")
            if index.name in self.kinds or index.name in self.parameters:
                raise self.wrong(index, f"{index.name} is the name of an operand: name the index otherwise")
            if index.name.upper() in self.kinds:
                raise self.wrong(
                    index,
                    f"{index.name.upper()} would be the extent of the index {index.name}, and is an operand: rename one of them",
                )
            seen.add(index.name)
            if index.extent is not None:
                self.whole(index.extent, frozenset(), "the extent of an index")

    def scan(self, own: list[Element], kept: list[str]) -> None:
        """Reject a scan unless it reads its own result before, or after, along exactly one index."""
        moved = set()
        for node in own:
            for index, place in zip(kept, node.places):
                step = linear(place, index)
                if place == Name(index):
                    continue
                if step is None or step[0] != ONE or not (isinstance(step[1], Number) and step[1].value):
                    raise self.wrong(place, f"a scan reads its own result a number of places before, as in {index} - 1")
                moved.add((index, step[1].value < 0))
            if len(node.places) != len(kept):
                raise self.wrong(node, f"{node.array} has the {len(kept)} indexes {', '.join(kept)}")
        if len(moved) != 1:
            raise self.wrong(own[0], "a scan reads its own result before or behind along one index, as in y[r,i - 1]")

    # ------------------------------------------------------------ kinds
    def of(self, node: Node, known: frozenset[str]) -> str:
        """The kind of a value; ``known`` are the indexes around it."""
        if isinstance(node, Number):
            return INTEGER if isinstance(node.value, int) else NUMBER
        if isinstance(node, Name):
            return self.named(node, known)
        if isinstance(node, Element):
            if node.array in self.parameters:
                raise self.wrong(node, f"{node.array} is a number, and has no places: write it without brackets")
            if node.array not in self.kinds:
                raise self.wrong(node, f"there is no operand {node.array!r}{self.among()}")
            for place in node.places:
                self.whole(place, known, f"a place of {node.array}")
            return self.kinds[node.array]
        if isinstance(node, Reduction):
            self.bind(node.indexes, known)
            return self.reduced(node, self.of(node.body, known | {i.name for i in node.indexes}))
        return self.called(node, [self.of(argument, known) for argument in node.arguments])

    def named(self, node: Name, known: frozenset[str]) -> str:
        if node.name in known or node.name in self.capitals:
            return INTEGER
        found = self.kinds.get(node.name) or self.parameters.get(node.name)
        if found is None:
            elsewhere = node.name in {i.name for i in bound(self.equation)}
            why = " outside the reduction that has it" if elsewhere else self.among()
            raise self.wrong(
                node, f"there is no {'index' if elsewhere else 'index, size or operand'} {node.name!r}{why}"
            )
        return found

    def among(self) -> str:
        names = ", ".join(dict.fromkeys((*self.kinds, *self.parameters)))
        return f"; operands are {names}" if names else ""

    def reduced(self, node: Reduction, kind: str) -> str:
        logical = node.how in ("any", "all")
        if logical != (kind == CONDITION):
            raise self.wrong(node.body, f"{node.how} is of {CONDITION if logical else 'numbers'}, and this is {kind}")
        if node.how in ("argmax", "argmin"):
            return INTEGER
        return kind if node.how in ("sum", "prod", "max", "min", "any", "all") else NUMBER

    def called(self, node: Call, kinds: list[str]) -> str:
        function = node.function
        if function in ("and", "or", "not"):
            self.all(node, kinds, CONDITION)
            return CONDITION
        if function == "where":
            self.count(node, 3)
            self.all(Call(function, node.arguments[:1]), kinds[:1], CONDITION)
            if (kinds[1] == CONDITION) != (kinds[2] == CONDITION):
                raise self.wrong(node, f"where chooses between {kinds[1]} and {kinds[2]}: both must be of one kind")
            return kinds[1] if kinds[1] == kinds[2] else NUMBER
        if function == "stop":
            self.count(node, 1)
            return kinds[0]
        if function in COMPARISONS:
            self.all(node, kinds, kinds[0])
            return CONDITION
        self.all(node, kinds, NUMBER)
        if function not in ("+", "-", "*", "/", "//", "%", "^"):
            if function not in self.functions:
                known = sorted({*self.functions} - {"neg", "not"})
                near = get_close_matches(function.lower(), known, 1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
                raise self.wrong(node, f"there is no function {function!r}; {hint}")
            self.count(node, self.functions[function])
        return INTEGER if function in WHOLE and {*kinds} == {INTEGER} else NUMBER

    def count(self, node: Call, n: int) -> None:
        if len(node.arguments) != n:
            raise self.wrong(node, f"{node.function} takes {n} argument{'s' * (n != 1)}, not {len(node.arguments)}")

    def all(self, node: Call, kinds: list[str], wanted: str) -> None:
        for argument, kind in zip(node.arguments, kinds):
            if (kind == CONDITION) != (wanted == CONDITION):
                remedy = (
                    "compare it, as in x > 0" if wanted == CONDITION else "choose by it, as in where(condition, 1, 0)"
                )
                raise self.wrong(argument, f"{node.function!r} takes {wanted}, and this is {kind}: {remedy}")

    def whole(self, node: Node, known: frozenset[str], what: str) -> None:
        """A place or an extent must consist of integers, or of ``/`` of them."""
        if zero := next(
            (n for n in walk(node) if isinstance(n, Call) and n.function in DIVIDES and n.arguments[1] == ZERO), None
        ):
            raise self.wrong(zero, f"{what} is divided by 0")
        for part in node.arguments if isinstance(node, Call) and node.function == "/" else (node,):
            if (kind := self.of(part, known)) != INTEGER:
                raise self.wrong(
                    part, f"{what} is {kind}: take indexes, sizes, whole numbers, + - * // %, and arrays of integers"
                )

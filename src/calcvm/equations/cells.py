"""Recurrent cells that users declare: equations of one step of one unit, and the backward that is derived from them.

    t1 = sigmoid(z0); t2 = tanh(z1); new_h = h + t1*(t2 - h)

z0, z1, ... are the sums of the gates, m0, m1, ... the state's own sums of gates that are kept apart; then the states before the
step and parameters of the unit, by name.  What the backward reads is kept, if it does not follow from what is there anyway: the
states, m and parameters.  So t1 and t2 are kept here, in the place of z0 and z1, and nothing of new_h = tanh(z0).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from itertools import count
from operator import add, and_, ge, gt, invert, le, lt, mul, neg, or_, sub, truediv
from typing import Any

from calcvm.equations.check import check
from calcvm.equations.functions import ARGUMENTS, DERIVATIVES
from calcvm.equations.gradient import gradient, needed
from calcvm.equations.grammar import NAME, WORDS, read
from calcvm.equations.kinds import CONDITION, NUMBER
from calcvm.equations.ranges import ranges
from calcvm.equations.stated import LANGUAGE, MOST_CHARACTERS
from calcvm.equations.text import show_equations
from calcvm.equations.tree import (
    COMPARISONS,
    REDUCTIONS,
    ZERO,
    Call,
    Element,
    Equation,
    Index,
    Name,
    Node,
    Number,
    rewritten,
    values,
    walk,
)
from calcvm.errors import CalcError
from calcvm.formulas import number as n
from calcvm.formulas.cells import Cell, Numbers
from calcvm.formulas.functions import FUNCTIONS
from calcvm.frozen import frozen
from calcvm.lazy import cached_property

MOST = 16  # gates; states; parameters
MOST_EQUATIONS = 32  # the gradient of 20 that follow each other takes 3 s
TAKEN = re.compile(r"[zmt]\d+|new_.*")  # names of sums, of parts, of states after the step
CONDITIONS = (*COMPARISONS, "and", "or", "not")
DEEPEST = 20  # levels of an equation; deeper parts get another one


@frozen
class OwnCell:
    """A recurrent cell, as `calcvm.cell` makes it.

    name : of its function.  text : its equations.  gates, apart : how many.  states, parameters : names.
    starts : initial values of the parameters; None: random.
    """

    name: str
    text: str
    gates: int
    apart: int
    states: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    starts: tuple[float | None, ...] = field(default=(), compare=False)

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple:
        return OwnCell, tuple(getattr(self, name) for name in self.__dataclass_fields__)  # type: ignore[attr-defined]

    @property
    def document(self) -> dict[str, Any]:
        """Its representation in files."""
        many = {"states": [*self.states], "parameters": [*self.parameters]}
        return {
            "language": LANGUAGE,
            "name": self.name,
            "text": self.text,
            "gates": self.gates,
            "apart": self.apart,
        } | many

    @cached_property
    def stem(self) -> str:
        """The name of its operator, with which those of its rows begin: a digest makes it the same cell in every process."""
        return f"{self.name}_{hashlib.sha256(json.dumps(self.document, sort_keys=True).encode()).hexdigest()[:32]}"

    # ------------------------------------------------------------ names
    @cached_property
    def sums(self) -> tuple[str, ...]:
        return tuple(f"z{k}" for k in range(self.gates))

    @cached_property
    def mores(self) -> tuple[str, ...]:
        return tuple(f"m{k}" for k in range(self.apart))

    @cached_property
    def news(self) -> tuple[str, ...]:
        return tuple(f"new_{name}" for name in self.states)

    @cached_property
    def reads(self) -> tuple[str, ...]:
        return (*self.sums, *self.mores, *self.states, *self.parameters)

    # ------------------------------------------------------------ checks
    def checked(self) -> OwnCell:
        """Itself, if its rows can be made.

        Raises
        ------
        CalcError : a name or a number is not possible, or the text is none of a cell.
        """
        for what, many, least, most in (
            ("gates", self.gates, 1, MOST), ("apart", self.apart, 0, self.gates), ("states", len(self.states), 1, MOST),
            ("parameters", len(self.parameters), 0, MOST),
        ):  # fmt: skip
            if not least <= many <= most:
                raise CalcError(f"{what}: {least} to {most} are possible, not {many}")
        if not NAME.fullmatch(self.name) or len(self.name) > 64:
            raise CalcError("it needs a name: a function that def makes, of at most 64 letters")
        for name in (*self.states, *self.parameters):
            if not NAME.fullmatch(name) or name in (*WORDS, *REDUCTIONS) or TAKEN.fullmatch(name):
                raise CalcError(f"{name!r} has a meaning in equations, or is none of their names: choose another one")
            if self.reads.count(name) > 1:
                raise CalcError(f"{name!r} names two values")
        if len(self.text) > MOST_CHARACTERS:
            raise CalcError(f"its equations have {len(self.text)} characters; {MOST_CHARACTERS} are possible")
        equations = self.equations
        if show_equations(equations) != self.text:
            raise CalcError("its equations are not in their canonical form")
        if len(equations) > MOST_EQUATIONS:
            raise CalcError(
                f"it has {len(equations)} functions and values that are used again: {MOST_EQUATIONS} are possible"
            )
        made = [e.name for e in equations]
        if wrong := [name for name in made if made.count(name) > 1 or name in self.reads] or {*self.news} - {*made}:
            raise CalcError(f"{min(wrong)} must be set by one equation")
        nodes = [node for e in equations for node in walk(e.value)]
        if any(e.kept is not None for e in equations) or not all(isinstance(v, Number | Name | Call) for v in nodes):
            raise CalcError("an equation of a cell has no indexes")
        kinds = check(equations, dict.fromkeys(self.reads, NUMBER), {}, ARGUMENTS)
        if wrong := [name.removeprefix("new_") for name in made if kinds[name] == CONDITION]:
            raise CalcError(f"the new {wrong[0]} is a condition: take cv.where(condition, a, b)")
        powers = [v.arguments[1] for v in nodes if isinstance(v, Call) and v.function == "^"]
        if not all(isinstance(v, Number) for v in powers):
            raise CalcError("an exponent is a number: write cv.exp(exponent*cv.log(x)) for positive x")
        found = {name for e in equations for name in values(e.value)}
        if unread := [name for name in (*self.sums, *self.mores, *self.parameters) if name not in found]:
            raise CalcError(f"{unread[0]} is never read: leave it out{', with fewer gates' * (unread[0] in self.sums)}")
        return self

    # ------------------------------------------------------------ what follows
    @cached_property
    def equations(self) -> tuple[Equation, ...]:
        return read(self.text, self.reads)

    @cached_property
    def cell(self) -> Cell:
        """The cell with its backward."""
        return _Derived(self).cell


class _Derived:
    """A cell's gradient, and which values of the forward it keeps."""

    def __init__(self, of: OwnCell):
        self.of = of
        made = [*of.reads, *(e.name for e in of.equations)]
        index = next(name for k in count() if (name := f"i{k}") not in made and name.upper() not in made)
        at = (Name(index),)

        def placed(e: Equation) -> Equation:
            return Equation(
                e.name, (Index(index),), rewritten(e.value, lambda v: Element(v.name, at) if isinstance(v, Name) else v)
            )

        equations = [*map(placed, of.equations)]
        slopes = gradient(equations, of.reads, of.news, ranges(equations, dict.fromkeys(of.reads, (2,)), {}))
        self.forward, backward = _whole(slopes.forward), _whole(slopes.backward)
        self.slopes, self.seeds = [slopes.of[name] for name in of.reads], [slopes.seeds[name] for name in of.news]
        self.of_h = slopes.of[of.states[0]]
        self.kept = self._kept(backward)
        given = {*self.kept, *of.mores, *of.states, *of.parameters, *of.news, *self.seeds}
        self.backward = needed([e for e in (*self.forward, *backward) if e.name not in given], self.slopes)
        self.direct = next(e.value for e in backward if e.name == self.of_h) != ZERO

    def _kept(self, backward: Sequence[Equation]) -> tuple[str, ...]:
        """The sums and parts that the backward reads and cannot compute without any sum; if they are many, the sums."""
        of, kept = self.of, list[str]()

        def known() -> set[str]:
            out = {*of.mores, *of.states, *of.parameters, *of.news, *kept}
            for e in self.forward:
                if values(e.value) <= out:
                    out.add(e.name)
            return out

        reads = {name for e in needed(backward, self.slopes) for name in values(e.value)}
        parts = sorted(self.forward, key=lambda e: not _is_function(e.value))  # others may follow from these
        for name in (*of.sums, *(e.name for e in parts)):
            if name in reads and name not in known():
                kept.append(name)
        return tuple(kept) if len(kept) <= of.gates else of.sums

    @property
    def cell(self) -> Cell:
        of, used = self.of, {name for e in self.backward for name in values(e.value)}
        size = of.gates + of.apart + len(of.states) + len(of.parameters)

        def forward(z: Numbers, more: Numbers, before: Numbers) -> Any:
            found = computed(self.forward, dict(zip(of.reads, (*z, *more, *before))))
            return tuple(found[name] for name in self.kept), tuple(more), tuple(found[name] for name in of.news)

        def backward(gates: Numbers, more: Numbers, before: Numbers, after: Numbers, d: Numbers) -> Any:
            names = (*self.kept, *of.mores, *of.states, *of.parameters, *of.news, *self.seeds)
            found = computed(self.backward, dict(zip(names, (*gates, *more, *before, *after, *d), strict=True)))
            out = [found[name] for name in self.slopes]
            dz, dmore, dbefore = out[: of.gates], out[of.gates : of.gates + of.apart], out[of.gates + of.apart :]
            return dz, dmore, [dbefore[0] if self.direct else None, *dbefore[1:]]

        def flat(*x: Any) -> Any:
            return forward(x[: of.gates], x[of.gates : of.gates + of.apart], x[of.gates + of.apart :])

        return Cell(
            name=of.stem, synopsis=of.text, gates=of.gates, apart=of.apart, states=len(of.states),
            parameters=len(of.parameters), kept=len(self.kept), reads_before=of.states[0] in used,
            reads_after=of.news[0] in used, direct=self.direct, forward=forward, backward=backward,
            flops=n.operations(flat, size),
        )  # fmt: skip


def _whole(equations: Iterable[Equation]) -> list[Equation]:
    """Equations without their index."""
    return [
        replace(e, kept=None, value=rewritten(e.value, lambda v: Name(v.array) if isinstance(v, Element) else v))
        for e in equations
    ]


def _is_function(node: Node) -> bool:
    return isinstance(node, Call) and node.function in DERIVATIVES


# ---------------------------------------------------------------- values
def computed(equations: Iterable[Equation], given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of equations on the numbers of a device (`calcvm.formulas.number`), beside those ``given`` by name; None: not read.

    A product in a sum is rounded once, everywhere: otherwise compilers decide it, for each loop alone.
    """
    found, made = dict(given), dict[Node, Any]()
    like = next(x for x in given.values() if x is not None)

    def number(x: Any) -> Any:
        return x if isinstance(x, n.Number) else n.like(like, x)

    def of(node: Node) -> Any:
        if isinstance(node, Number):
            return node.value
        if isinstance(node, Name):
            return found[node.name]
        assert isinstance(node, Call)
        if node not in made:
            made[node] = called(node.function, node.arguments)
        return made[node]

    def called(function: str, arguments: tuple[Node, ...]) -> Any:
        if function in ("+", "-"):
            a, b = arguments
            if isinstance(b, Call) and b.function == "*":
                x, y = (number(of(part)) for part in b.arguments)
                return n.fma(-x if function == "-" else x, y, number(of(a)))
            if isinstance(a, Call) and a.function == "*":
                x, y = (number(of(part)) for part in a.arguments)
                return n.fma(x, y, number(-of(b) if function == "-" else of(b)))
        first, *others = map(of, arguments)
        if function == "where":
            return n.where(number(first), number(others[0]), others[1])
        return APPLIED[function](number(first), *others)

    for e in equations:
        found[e.name] = number(of(e.value))
    return found


def power(x: Any, exponent: float) -> Any:
    """x^exponent; for exponents that are neither integers nor halves, of x >= 0."""
    size = abs(exponent)
    if size == 0.5:
        y = n.sqrt(x)
    elif size == int(size) and size <= 64:
        y = n.like(x, 1.0)
        for bit in f"{int(size):b}".lstrip("0"):
            y = y * y * x if bit == "1" else y * y
    else:
        return n.exp(exponent * n.log(x))
    return 1 / y if exponent < 0 else y


def _logaddexp(x: Any, y: Any) -> Any:
    """Equal infinities have no difference, and stay."""
    apart = n.where(n.equal(x, y), 0.0, n.fabs(x - y))
    return n.where(x < y, y, x) + n.softplus(-apart)


APPLIED: dict[str, Callable[..., Any]] = {f.equation: f for f in FUNCTIONS.values() if f.equation} | {
    "+": add, "-": sub, "*": mul, "/": truediv, "neg": neg, ">": gt, ">=": ge, "<": lt, "<=": le, "and": and_, "or": or_,
    "not": invert, "==": n.equal, "!=": lambda x, y: ~n.equal(x, y), "stop": lambda x: x, "logaddexp": _logaddexp,
    "relu": lambda x: n.where(x < 0, 0.0, x), "max": lambda x, y: n.where(x < y, y, x), "min": lambda x, y: n.where(x > y, y, x),
    "^": power, "//": lambda x, y: n.floor(x / y), "%": lambda x, y: x - y * n.floor(x / y),
}  # fmt: skip


# ---------------------------------------------------------------- texts
def equations_of(results: Mapping[str, Node]) -> list[Equation]:
    """Equations of results; functions, parts that are read again, and deep ones have one each: t1, t2, ..."""
    known: dict[Any, Node] = {}  # equal nodes, once, parts first
    seen: dict[int, tuple[Node, Node]] = {}

    def once(node: Node) -> Node:
        if id(node) not in seen:
            new = Call(node.function, tuple(map(once, node.arguments))) if isinstance(node, Call) else node
            key = (new.function, *map(id, new.arguments)) if isinstance(new, Call) else repr(new)
            seen[id(node)] = node, known.setdefault(key, new)
        return seen[id(node)][1]

    names: dict[int, list[str]] = {}
    for name, node in results.items():
        names.setdefault(id(once(node)), []).append(name)
    uses: dict[int, int] = {}
    for node in known.values():
        for part in node.arguments if isinstance(node, Call) else ():
            uses[id(part)] = uses.get(id(part), 0) + 1
    said: dict[int, tuple[Node, int]] = {}  # what stands for a node, and its levels
    out: list[Equation] = []
    free = (f"t{k}" for k in count(1))
    for node in known.values():
        value, deep, named = node, 0, names.get(id(node), [])
        if isinstance(node, Call):
            value = Call(node.function, tuple(said[id(part)][0] for part in node.arguments))
            deep = 1 + max(said[id(part)][1] for part in node.arguments)
            again = node.function not in CONDITIONS and (uses.get(id(node), 0) > 1 or deep > DEEPEST)
            if not named and (again or node.function in DERIVATIVES):
                named = [next(free)]
        out += [
            Equation(name, None, Name(named[0]) if k and value is not node else value) for k, name in enumerate(named)
        ]
        said[id(node)] = (Name(named[0]), 0) if named and isinstance(node, Call) else (value, deep)
    return out


# ---------------------------------------------------------------- known cells
CELLS: dict[str, OwnCell] = {}  # those of this process, by the names of their operators


def own_cell(row: str) -> OwnCell | None:
    """The cell that a row belongs to, if a user declared it."""
    for end in ("_fwd", "_bwd", "_bwd_w"):
        if (found := CELLS.get(row.partition(".")[0].removesuffix(end))) is not None:
            return found
    return None


def of_document(document: Mapping[str, Any]) -> OwnCell:
    """A cell read from a file.

    Raises
    ------
    CalcError : it has another version of the language, or is not a valid cell.
    """
    what = f"the recurrent cell {document['name']!r}"
    if document["language"] != LANGUAGE:
        raise CalcError(
            f"{what} is of version {document['language']} of the language, and this calcvm reads {LANGUAGE}: build the graph again"
        )
    states, parameters = (tuple(document[key]) for key in ("states", "parameters"))
    own = OwnCell(document["name"], document["text"], document["gates"], document["apart"], states, parameters)
    if own.stem not in CELLS:
        try:
            own.checked()
        except CalcError as error:
            raise CalcError(f"{what}, {own.text!r}: {error}") from None
    return CELLS.setdefault(own.stem, own)

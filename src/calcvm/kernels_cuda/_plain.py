"""GPU kernels derived from equations: each row gets a Python text, which is compiled like the hand-written kernels.

Blocks share the units of the results' first index, and a block processes its units in batches.  The row's stages decide how many
indexes a unit has (`_plain_units`).  There are three kinds of stages:

- Reductions per unit (results and temporaries) use all threads of the block, one batch of units at a time, through shared
  memory (`_plain_loops.together`).
- Results with more indexes use one thread per element, neighbouring threads on neighbouring elements; each thread loops over
  reductions in its element.
- A scan uses one thread per line.

The bits do not depend on the numbers of blocks and threads: one block computes all of a unit, and the order of a sum depends only on
its length.  The length determines the number of slots (`_reduce.slots_of`); each slot sums in blocks of `LENGTH` elements, and a
tree joins the slots.  Threads write to separate places, and meet before one reads what another wrote.

Each stage is a function ``term_NAME(a, here, k)`` or ``value_NAME(a, q, k)``, see `_plain_loops`; ``kernel_of(plain).text`` shows them.
"""

from __future__ import annotations

import keyword
import linecache
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from calcvm.equations.kinds import CONDITION as BOOL
from calcvm.equations.kinds import INTEGER as INT
from calcvm.equations.kinds import KINDS, kind_of
from calcvm.equations.kinds import NUMBER as FLOAT
from calcvm.equations.plain import Plain, Stage
from calcvm.equations.text import show, show_indexes
from calcvm.equations.tree import COMPARISONS, Call, Element, Index, Name, Node, Number, arrays, call, names, walk
from calcvm.errors import CalcError
from calcvm.kernels_cuda import _plain_loops
from calcvm.kernels_cuda._plain_loops import KNOWN
from calcvm.kernels_cuda._plain_units import Cut, Units

FIRST = "first"  # the smallest place: the second stage of argmax and argmin, after the extremum
MOST_TEMPORARIES = 16  # per unit, in shared memory beside its slots
JOINS = {  # by reduction and kind: the function that joins two values, and the neutral value
    ("sum", FLOAT): ("add", "like(h, 0)"),
    ("prod", FLOAT): ("multiply", "like(h, 1)"),
    ("max", FLOAT): ("maximum", "like(h, -INF)"),
    ("min", FLOAT): ("minimum", "like(h, INF)"),
    ("sum", INT): ("add", "0"),
    ("prod", INT): ("multiply", "1"),
    ("max", INT): ("greater", "-NOWHERE"),
    ("min", INT): ("smaller", "NOWHERE"),
    (FIRST, INT): ("smaller", "NOWHERE"),
    ("any", BOOL): ("greater", "0"),
    ("all", BOOL): ("smaller", "1"),
}
TAKEN = {  # names used in the texts
    "me", "h", "a", "c", "q", "k", "u", "lo", "hi", "n", "run", "here", "first", "stop", "slots", "most", "before", "totals", "counts", "max", "min",
    *(f"{name}{level}" for level in range(2, 9) for name in ("first", "stop", "n", "slots", "most")), *KNOWN,
}  # fmt: skip


def kernel_of(plain: Plain) -> Callable:
    """The kernel of a row; its attribute ``text`` is the Python text that it was compiled from.

    Raises
    ------
    CalcError : the row contains something that no kernel can compute.
    """
    text = text_of(plain)
    file = f"<kernel of the equation of {plain.name}>"
    linecache.cache[file] = len(text), None, text.splitlines(True), file  # for tracebacks
    space = KNOWN | {"__name__": f"{__package__}.plain"}
    exec(compile(text, file, "exec"), space)
    made = space["run"]
    made.text = text
    return made


def text_of(plain: Plain) -> str:
    """The text of a row's kernel."""
    return _Text(plain).written()


def _first_places(stages: Iterable[Stage]) -> list[Stage]:
    """Replace argmax and argmin by two stages: the extremum, and the first place of an element that equals it (or is NaN)."""
    out = []
    for stage in stages:
        if stage.how in ("argmax", "argmin"):
            top = Stage(f"{stage.name}_top", stage.kept, stage.how[3:], stage.over, stage.value, False)
            found = Element(top.name, tuple(Name(i.name) for i in stage.kept))
            place: Node = Name(stage.over[0].name)
            for index in stage.over[1:]:
                assert index.extent is not None
                place = call("+", call("*", place, index.extent), Name(index.name))
            is_top = call("or", call("==", stage.value, found), call("!=", stage.value, stage.value))
            out += [top, replace(stage, how=FIRST, value=call("where", is_top, place, Number(_plain_loops.NOWHERE)))]
        else:
            out.append(stage)
    return out


class _Text:
    def __init__(self, plain: Plain):
        self.plain = plain
        self.stages = _first_places(plain.stages)
        self.by_name = {stage.name: stage for stage in self.stages}
        self.results = [stage for stage in self.stages if stage.result]
        self.extents: dict[str, str] = {}  # sizes computed from the words: texts, and their names
        self.called: dict[str, str] = {}
        self.ranges = {i.name: i.extent for s in self.stages for i in (*s.kept, *s.over)}
        for name in dict.fromkeys((*plain.words, *plain.reals, *plain.operands, *self.ranges, *self.by_name)):
            self.called[name] = self.free(name)
        self.kinds: dict[str, str] = {}  # of stages
        self.read_as = {name: KINDS.get(plain.types.get(name, ""), FLOAT) for name in plain.operands}
        self.read_as |= dict.fromkeys(plain.reals, FLOAT)
        for stage in self.stages:
            self.kinds[stage.name] = self.kind(stage.value)
            self.read_as.setdefault(stage.name, self.kinds[stage.name])
        self.cut = Cut(plain, self.stages)
        self.home = self.cut.home
        if len(self.home) > MOST_TEMPORARIES:
            raise self.wrong(f"its units have {len(self.home)} temporaries, more than {MOST_TEMPORARIES}")
        self.functions: list[str] = []
        self.numbered: tuple[
            Index, ...
        ] = ()  # the indexes that the current function derives from the number k of an element

    def wrong(self, what: str) -> CalcError:
        return CalcError(f"row {self.plain.name!r}: {what}")

    def free(self, name: str) -> str:
        """An unused Python name."""
        taken = {*TAKEN, *self.called.values(), *self.extents.values()}
        while (
            name in taken or keyword.iskeyword(name) or name.startswith(("term_", "value_", "set_", "unit_", "line_"))
        ):
            name = f"_{name}" if "_" in name else f"{name}_"
        return name

    # ------------------------------------------------------------ stages
    def along(self, stage: Stage) -> bool:
        """Whether neighbours in memory are reduced; they are kept if any operand has a kept index last."""
        over, kept = {i.name for i in stage.over}, {i.name for i in stage.kept[-1:]}
        found = [n for n in walk(stage.value) if isinstance(n, Element) and n.places and over & names(n)]
        return not any(kept & names(n.places[-1]) for n in found)

    def temporaries(self, stage: Stage) -> list[Stage]:
        """Stages that it reads and that each thread computes itself."""
        read = [self.by_name[v] for v in arrays(stage.value) if v in self.by_name]
        return [s for s in read if not s.result and s.name not in self.home]

    def ahead(self, stage: Stage) -> list[Stage]:
        """The temporaries of a reduction that do not depend on its reduced indexes."""
        kept = {i.name for i in stage.kept}
        return [s for s in self.temporaries(stage) if {i.name for i in s.kept} <= kept]

    # ------------------------------------------------------------ kinds
    def kind(self, node: Node) -> str:
        return kind_of(node, self.read_as)

    # ------------------------------------------------------------ sizes
    def extent(self, node: Node | None) -> str:
        """The name of a size computed from the words, or the number itself."""
        assert node is not None
        if isinstance(node, Number):
            return str(node.value)
        if isinstance(node, Name) and node.name in self.plain.words:
            return self.called[node.name]
        text = f"max(0, {self.whole(node)})"
        if text not in self.extents:
            self.extents[text] = self.free(f"size{len(self.extents) + 1}")
        return self.extents[text]

    def volume(self, indexes: Iterable[Index]) -> str:
        texts = [self.extent(i.extent) for i in indexes]
        return " * ".join(t for t in texts if t != "1") or "1"

    def flat(self, places: Sequence[str], extents: Sequence[str]) -> str:
        """The linear number of an element."""
        text = places[0] if places else "0"
        for place, n in zip(places[1:], extents[1:]):
            text = f"({text}) * {n} + {place}" if " " in text else f"{text} * {n} + {place}"
        return text

    # ------------------------------------------------------------ values
    def value(self, node: Node, kind: str) -> str:
        """The text of a node as a value of a kind."""
        text, own = self.plainly(node), self.kind(node)
        if own == kind:
            return text
        if kind == FLOAT:
            return f"like(h, {text})" if own == INT else f"(like(h, 1) if {text} else like(h, 0))"
        if kind == INT:
            return f"(1 if {text} else 0)" if own == BOOL else f"whole({text})"
        raise self.wrong(f"{show(node)} is no condition")

    def stored(self, node: Node, kind: str) -> str:
        """The text that is stored as an element of a kind: numbers are truncated to integers, and are true unless 0."""
        if (self.kind(node), kind) == (FLOAT, INT):
            return self.plainly(node)
        if kind == BOOL != self.kind(node):
            node = call("!=", node, Number(0))
        return self.value(node, INT if kind == BOOL else kind)

    def whole(self, node: Node) -> str:
        """The text of an integer: a place or a size."""
        if {*arrays(node)} & {*self.plain.operands}:
            return self.near(node)
        if isinstance(node, Call) and node.function == "/":
            return f"exact({', '.join(self.value(x, INT) for x in node.arguments)})"
        return self.value(node, INT)

    def near(self, node: Node) -> str:
        """The text of a place that comes from data; it is nowhere if an integer on the way exceeds 64 bits."""
        if isinstance(node, Call) and node.function in NEAR:
            return f"{NEAR[node.function]}({', '.join(map(self.near, node.arguments))})"
        if isinstance(node, Call) and node.function == "where":
            held, one, other = node.arguments
            return f"({self.near(one)} if {self.value(held, BOOL)} else {self.near(other)})"
        return self.value(node, INT)

    def plainly(self, node: Node) -> str:
        if isinstance(node, Number):
            return str(node.value) if isinstance(node.value, int) else f"like(h, {_number(node.value)})"
        if isinstance(node, Name):
            return self.named(node.name)
        if isinstance(node, Element):
            return self.element(node)
        assert isinstance(node, Call)
        return self.of_call(node)

    def named(self, name: str) -> str:
        if name in self.plain.operands:
            return self.element(Element(name, ()))
        if name in self.plain.reals:
            return f"like(h, {self.called[name]})"
        if name in self.called:
            return self.called[name]
        sizes = [n for v, n in self.ranges.items() if v.upper() == name]
        if not sizes:
            raise self.wrong(f"there is no {name}")
        return self.extent(sizes[0])

    def of_call(self, node: Call) -> str:
        function, arguments, kind = node.function, node.arguments, self.kind(node)
        if function == "where":
            return f"({self.value(arguments[1], kind)} if {self.value(arguments[0], BOOL)} else {self.value(arguments[2], kind)})"
        if function in COMPARISONS:
            kinds = {self.kind(x) for x in arguments}
            kind = kinds.pop() if len(kinds) == 1 else FLOAT
        taken = [self.value(x, kind) for x in arguments]
        if function in ("and", "or", "+", "-", "*", "/", *COMPARISONS) and not (function == "/" and kind != FLOAT):
            return f"({taken[0]} {function} {taken[1]})"
        if function in ("//", "%"):
            down = f"floor({taken[0]} / {taken[1]})"
            of_floats = down if function == "//" else f"({taken[0]} - {down} * {taken[1]})"
            return of_floats if kind == FLOAT else f"{INTEGERS[function]}({', '.join(taken)})"
        if function == "^":
            return self.power(taken[0], arguments[1], taken[1])
        if function in ("neg", "not"):
            return f"({'-' if function == 'neg' else 'not '}{taken[0]})"
        if function == "stop":
            return taken[0]
        name = (INTEGERS if kind == INT else FLOATS).get(function, function)
        if name not in KNOWN:
            raise self.wrong(f"no kernel computes the function {function!r}")
        return f"{name}({', '.join(taken)})"

    def power(self, x: str, exponent: Node, p: str) -> str:
        n = exponent.value if isinstance(exponent, Number) else None
        if n in (2, 3, 4):
            return f"power{int(n)}({x})"  # type: ignore[arg-type]
        simple = {1: x, 0.5: f"sqrt({x})", -1: f"(like(h, 1) / {x})"}
        return f"power({x}, {p})" if n is None else simple.get(n, f"power({x}, {p})")

    # ------------------------------------------------------------ elements
    def element(self, node: Element) -> str:
        of, array = self.by_name.get(node.array), self.called[node.array]
        kind, type_ = self.read_as[node.array], self.plain.types.get(node.array, "")
        if of is not None and not of.result:
            home = self.home.get(of.name)
            text = array if home is None else f"{array}[0]" if home.single else f"{array}[c]"
            return f"({text} != 0)" if kind == BOOL else text
        if of is not None and of.scan and self.carried(of) and node.places == self.before(of):
            return "before"
        axes = self.plain.axes.get(node.array, ())
        if len(axes) != len(node.places):
            raise self.wrong(f"{node.array} has {len(axes)} axes, and is read at {len(node.places)} places")
        sure = [self.is_sure(place, axis) for place, axis in zip(node.places, axes)]
        places, extents = [self.whole(place) for place in node.places], [self.extent(axis) for axis in axes]
        x = self.cells(node.array)
        own = {INT: "wide_at", BOOL: "holds_at", FLOAT: "number_at"}[kind]
        if not all(sure):
            of_data = any({*arrays(place)} & {*self.plain.operands} for place in node.places)
            triples = ", ".join(map("({}, {}, {})".format, places, extents, sure))
            taken = f"{own}, h, {x}, ({triples},), {self.constant(node.beyond, kind)}"
            text = f"read_known(me, {taken})" if of_data and not node.beyond else f"read({taken})"
        else:
            place = self.flat(*self.merged(node.places, places, extents))
            text = f"{x}[{place}]" if kind == FLOAT and not type_ else f"{own}(h, {x}, {place})"
        if node.array in self.plain.left_out:
            text = f"({text} if given(me, {array}) else {self.constant(self.plain.left_out[node.array], kind)})"
        return text

    def cells(self, name: str) -> str:
        """An operand's elements as stored: conditions are bytes."""
        return f"cells({self.called[name]})" if self.read_as[name] == BOOL else self.called[name]

    def merged(self, nodes: Sequence[Node], places: list[str], extents: list[str]) -> tuple[list[str], list[str]]:
        """Places, with neighbouring indexes merged if the number k of an element already combines them: this saves divisions."""
        met, own = [n.name if isinstance(n, Name) else "" for n in nodes], [i.name for i in self.numbered]
        for j in range(len(met)) if own else ():
            if met[j : j + len(own)] == own:
                many = self.volume(self.numbered)
                whole = f"({many})" if " " in many else many
                return [*places[:j], "k", *places[j + len(own) :]], [*extents[:j], whole, *extents[j + len(own) :]]
        return places, extents

    def constant(self, value: float, kind: str) -> str:
        return str(int(value)) if kind == INT else str(value != 0) if kind == BOOL else f"like(h, {_number(value)})"

    def is_sure(self, place: Node, axis: Node) -> bool:
        """Whether a place is inside its axis for all values of the words."""
        if isinstance(place, Number):
            return isinstance(axis, Number) and 0 <= place.value < axis.value
        return isinstance(place, Name) and self.ranges.get(place.name) == axis

    def before(self, stage: Stage) -> tuple[Node, ...]:
        """The places of a scan's previous element."""
        assert stage.scan is not None
        along, direction = stage.scan
        step = call("-" if direction > 0 else "+", Name(along), Number(1))
        return tuple(step if i.name == along else Name(i.name) for i in stage.kept)

    def carried(self, stage: Stage) -> bool:
        """Whether a scan reads only its previous element."""
        return all(n.places == self.before(stage) for n in self.own(stage))

    def own(self, stage: Stage) -> list[Element]:
        return [n for n in walk(stage.value) if isinstance(n, Element) and n.array == stage.name]

    # ------------------------------------------------------------ functions
    def parameters(self) -> list[str]:
        """The contents of ``a``; later sizes are appended."""
        own = [self.called[n] for n in (*self.words(), *self.home)]
        return ["first", "me", "h", *own, *self.extents.values()]

    def words(self) -> tuple[str, ...]:
        return (*self.plain.words, *self.plain.reals, *self.plain.operands)

    def function(self, head: str, said: str, body: Sequence[str]) -> None:
        """Add a function; it unpacks from ``a`` the names that it uses."""
        known = [f"{name} = a[{k}]" for k, name in enumerate(self.parameters()) if _named(body, [name])]
        lines = ["; ".join(known)] if known else []
        self.functions += ["@device", f"def {head}:", f'    """{said}"""', *_indented([*lines, *body]), "", ""]

    def computed(self, stage: Stage) -> str:
        """A reduction computed by the thread."""
        join, zero = self.join(stage)
        return f"alone(term_{stage.name}, {join}, {zero}, a, {self.here(stage)}, {self.volume(stage.over)})"

    def here(self, stage: Stage) -> str:
        """The terms' argument ``here``: the number in the batch, the indexes, and the temporaries computed ahead."""
        return (
            f"({', '.join(['c', *(self.called[i.name] for i in stage.kept), *map(self.computed, self.ahead(stage))])},)"
        )

    def taken(self, names_: Iterable[str]) -> str:
        return f"{', '.join(['c', *(self.called[name] for name in names_)])}, = here"

    def join(self, stage: Stage) -> tuple[str, str]:
        key = stage.how, self.kinds[stage.name]
        if key not in JOINS:
            raise self.wrong(f"{stage.how} of {show(stage.value)} cannot be computed by a kernel")
        return JOINS[key]

    def made_here(self, stages: Iterable[Stage]) -> list[str]:
        return [f"{self.called[s.name]} = {self.computed(s)}" for s in stages]

    def digits(self, flat: str, indexes: Sequence[Index]) -> list[str]:
        """Lines that derive the indexes from the number of an element."""
        if len(indexes) < 2:
            return [f"{self.called[i.name]} = {flat}" for i in indexes]
        lines = [] if flat == "u" else [f"u = {flat}"]
        for index in reversed(indexes[1:]):
            name, n = self.called[index.name], self.extent(index.extent)
            lines += [f"{name}, u = u, divide(u, {n})", f"{name} -= u * {n}"]
        return [*lines, f"{self.called[indexes[0].name]} = u"]

    def batch(self, loop: Units) -> str:
        """The line that computes a unit's number in the batch."""
        places, extents = [self.called[i.name] for i in loop.indexes], [self.extent(i.extent) for i in loop.indexes]
        return f"c = {self.flat(places, extents)} - first"

    def term(self, stage: Stage) -> None:
        ahead, self.numbered = self.ahead(stage), stage.over
        rest = [s for s in self.temporaries(stage) if s not in ahead]
        kind = INT if self.kinds[stage.name] == BOOL else self.kinds[stage.name]
        kept = [i.name for i in stage.kept]
        lines = [*self.made_here(rest), f"return {self.value(stage.value, kind)}"]
        if _named(lines, [self.called[i.name] for i in stage.over]):
            lines = [*self.digits("k", stage.over), *lines]
        taken = self.taken([*kept, *(s.name for s in ahead)])
        self.function(f"term_{stage.name}(a, here, k)", self.said(stage), [taken, *lines])

    def said(self, stage: Stage) -> str:
        how = f"{stage.how}[{show_indexes(Index(i.name) for i in stage.over)}] " if stage.how else ""
        kept = f"[{show_indexes(Index(i.name) for i in stage.kept)}]"
        value = "the place of it" if stage.how == FIRST else show(stage.value)
        return f"{stage.name}{kept} = {how}{value}"

    def reduced(self, stage: Stage, loop: Units) -> list[str]:
        """The call that reduces a stage for each unit."""
        lines = ["u = first + c", *self.digits("u", loop.indexes), f"return {self.here(stage)}"]
        self.function(f"unit_{stage.name}(a, c)", "Where a unit's terms are.", lines)
        join, zero = self.join(stage)
        by = "strand" if self.temporaries(stage) else "strands"
        first, most, n = (_of(loop, name) for name in ("first", "most", "n"))
        y = f"at({self.cells(stage.name)}, {first})" if stage.result else self.called[stage.name]
        totals = "totals" if self.kinds[stage.name] == FLOAT else "counts"
        shape = f"{totals}, {most}, {n}, {self.volume(stage.over)}, {self.along(stage)}"
        return [f"together({by}, term_{stage.name}, {join}, {zero}, a, unit_{stage.name}, {y}, {shape})"]

    def set(self, stage: Stage, loop: Units) -> list[str]:
        """The loop that sets a result element by element."""
        to, temporaries = self.read_as[stage.name], self.temporaries(stage)
        self.numbered = stage.kept if stage.kept[: len(loop.indexes)] == loop.indexes else ()
        if stage.how:
            value = self.computed(stage)
            if to == FLOAT != self.kinds[stage.name]:
                value = f"like(h, {value})"
            temporaries = []
        else:
            value = self.stored(stage.value, to)
        y, lines = self.cells(stage.name), self.made_here(temporaries)
        if stage.kept[: len(loop.indexes)] != loop.indexes:
            place = self.flat([self.called[i.name] for i in stage.kept], [self.extent(i.extent) for i in stage.kept])
            return self.lines(stage, loop, f"set_{stage.name}", stage.kept, [*lines, f"{y}[{place}] = {value}"])
        self.function(
            f"value_{stage.name}(a, q, k)", self.said(stage), self.where(loop, stage.kept, [*lines, f"return {value}"])
        )
        by = "every" if stage.how or temporaries else "each"
        return [f"{by}(value_{stage.name}, a, 0, {y}, {self.range(loop, stage.kept)})", "sync()"]

    def lines(self, stage: Stage, loop: Units, name: str, indexes: Sequence[Index], lines: list[str]) -> list[str]:
        """The loop that calls a function for all values of some indexes."""
        self.function(f"{name}(a, q, k)", self.said(stage), self.where(loop, indexes, lines))
        return [f"lines({name}, a, {_of(loop, 'n')}, {self.range(loop, indexes)})", "sync()"]

    def range(self, loop: Units, indexes: Sequence[Index]) -> str:
        """The numbers of a batch's elements that a thread processes: first, last, step."""
        first, n = _of(loop, "first"), _of(loop, "n")
        many = self.volume(i for i in indexes if i not in loop.indexes)
        begin, end = (first, f"{first} + {n}") if many == "1" else (f"{first} * {many}", f"({first} + {n}) * {many}")
        if tuple(indexes[: len(loop.indexes)]) != loop.indexes:
            begin, end = "0", n if many == "1" else f"{n} * {many}"
        return f"{begin} + thread(), {end} - 1, threads()"

    def where(self, loop: Units, indexes: Sequence[Index], lines: list[str]) -> list[str]:
        """The lines, preceded by lines that derive the indexes they name from k, the number of an element overall or in the batch.

        In the batch, neighbours belong to neighbouring units if these are neighbours in memory.
        """
        names_ = [self.called[i.name] for i in indexes]
        if tuple(indexes[: len(loop.indexes)]) == loop.indexes:
            if _named(lines, ["c"]):
                lines = [self.batch(loop), *lines]
            return [*self.digits("k", indexes), *lines] if _named(lines, names_) else lines
        rest = [i for i in indexes if i not in loop.indexes]
        many = self.volume(rest)
        if indexes[-1] in loop.indexes:
            begin = ["u = divide(k, q)", "c = k - u * q"]
        else:
            begin = [f"c = divide(k, {many})", f"u = k - c * ({many})"]
        return [*begin, *self.digits("u", rest), "u = first + c", *self.digits("u", loop.indexes), *lines]

    def scanned(self, stage: Stage, loop: Units) -> list[str]:
        """The loop over the lines of a scan."""
        assert stage.scan is not None
        (along, direction), self.numbered = stage.scan, ()
        k = [i.name for i in stage.kept].index(along)
        line, i = [*stage.kept[:k], *stage.kept[k + 1 :]], self.called[along]
        lines = [self.taken(i.name for i in line), *self.made_here(self.temporaries(stage))]
        step = [*lines, f"return {self.value(stage.value, FLOAT)}"]
        self.function(f"value_{stage.name}(a, here, {i}, before)", self.said(stage), step)
        places = [self.called[j.name] if j.name != along else "0" for j in stage.kept]
        shape = f"{self.called[stage.name]}, {self.flat(places, [self.extent(j.extent) for j in stage.kept])}, "
        shape += f"{self.volume(stage.kept[k + 1 :])}, {self.extent(stage.kept[k].extent)}, {direction > 0}"
        here = f"({', '.join(['c', *(self.called[i.name] for i in line)])},)"
        begins = f"like(h, {_number(self.own(stage)[0].beyond)})"
        return self.lines(
            stage, loop, f"line_{stage.name}", line, [f"scan(value_{stage.name}, a, {here}, {begins}, {shape})"]
        )

    # ------------------------------------------------------------ the kernel
    def written(self) -> str:
        for stage in self.stages:
            if stage.how:
                self.term(stage)
        lines = [*self.memory(), *self.share(), *self.loop(self.cut.root)]
        given = ", ".join(self.called[n] for n in self.words())
        sizes = ["h = me.heap", *(f"{name} = {text}" for text, name in self.extents.items())]
        body = _indented([f'"""{self.plain.text}"""', *sizes, *lines])
        return "\n".join([*self.functions, f"def run(me, {given}):", *body, ""])

    def share(self) -> list[str]:
        """The units of the worker."""
        indexes = self.cut.root.indexes
        if not indexes:
            return ["first, stop = 0, 1 if me.worker == 0 else 0"]
        share, per = f"share(me, {self.extent(indexes[0].extent)})", self.volume(indexes[1:])
        return [f"first, stop = {share}", *([] if per == "1" else [f"first, stop = first * {per}, stop * {per}"])]

    def memory(self) -> list[str]:
        """The lines that divide shared memory: totals, which all loops use, and each loop's temporaries."""
        lines, kinds = (
            [],
            {
                INT if self.kinds[s.name] == BOOL else self.kinds[s.name]
                for loop in self.cut.root.loops()
                for s in loop.wide()
            },
        )
        lines += [
            f"{name} = {MEMORY[kind]}(h, 0)" for name, kind in (("totals", FLOAT), ("counts", INT)) if kind in kinds
        ]
        for loop in self.cut.root.loops():
            own, sizes = (
                [n for n in self.home if self.home[n] is loop],
                dict.fromkeys(self.volume(s.over) for s in loop.wide()),
            )
            slots = [f"1 << slots_of({n})" for n in sizes]
            if not slots:
                continue
            number, most = _of(loop, "slots"), _of(loop, "most")
            if loop.single:
                lines.append(f"{most} = 1")
            else:
                lines.append(f"{number} = " + (slots[0] if len(slots) == 1 else f"max({', '.join(slots)})"))
                lines.append(f"{most} = units_at_once({number}, {len(own)})")
            for k, name in enumerate(own):
                cell = f"({number} + {k}) * {most}" if k else f"{number} * {most}"
                if loop.single:
                    cell = f"behind({[n for n in self.home if self.home[n].single].index(name)})"
                lines.append(f"{self.called[name]} = {MEMORY.get(self.kinds[name], MEMORY[INT])}(h, {cell})")
        return lines

    def loop(self, loop: Units) -> list[str]:
        """The lines of a loop over units."""
        lines: list[str] = []
        for part in loop.inside:
            if isinstance(part, Units):
                per, first = self.volume(part.indexes[len(loop.indexes) :]), _of(loop, "first")
                lines.append(f"{_of(part, 'first')}, {_of(part, 'stop')} = {first} * {per}, ({first} + 1) * {per}")
                lines += self.loop(part)
            elif part in loop.wide():
                lines += self.reduced(part, loop)
            else:
                lines += self.scanned(part, loop) if part.scan else self.set(part, loop)
        first, n, stop = (_of(loop, name) for name in ("first", "n", "stop"))
        known = f"a = ({', '.join([first, *self.parameters()[1:]])})"
        if not loop.wide():  # all at once, without waiting for the last
            return [known, f"{n} = {stop} - {first}", *(lines if loop.level else lines[:-1])]
        many = "1" if loop.single else f"min({_of(loop, 'most')}, {stop} - {first})"
        return [f"while {first} < {stop}:", *_indented([f"{n} = {many}", known, *lines, f"{first} += {n}"])]


def _of(loop: Units, name: str) -> str:
    """The loop's name for one of its variables."""
    return f"{name}{loop.level + 1}" if loop.level else name


MEMORY = {FLOAT: "scratch", INT: "whole_scratch"}
INTEGERS = {"//": "floor_div", "%": "floor_mod", "max": "greater", "min": "smaller", "abs": "magnitude"}
NEAR = {
    "+": "near_sum",
    "-": "near_difference",
    "*": "near_product",
    "//": "near_quotient",
    "%": "near_rest",
    "/": "near_exact",
}
FLOATS = {"max": "maximum", "min": "minimum"}


def _number(value: float) -> str:
    """A constant."""
    if value != value:
        return "NAN"
    if value in (float("inf"), -float("inf")):
        return "INF" if value > 0 else "-INF"
    return repr(int(value) if float(value).is_integer() and abs(value) < 1e15 else value)


def _named(lines: Iterable[str], names_: Sequence[str]) -> bool:
    """Whether the lines contain one of the names."""
    return any(word in names_ for line in lines for word in re.findall(r"[A-Za-z_]\w*", line))


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]

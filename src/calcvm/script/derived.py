"""The NumPy text of a row, from its equation.  Each index becomes an axis, or as many axes as an operand has for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from operator import add, and_, ge, gt, invert, le, lt, methodcaller, mul, neg, or_, sub, truediv
from typing import Any

from calcvm.equations.places import linear, placed, size
from calcvm.equations.scans import is_scan, running_sum
from calcvm.equations.tree import ONE as ONE_NODE
from calcvm.equations.tree import (
    ZERO,
    Call,
    Element,
    Equation,
    Name,
    Node,
    Number,
    Reduction,
    arrays,
    bound,
    names,
    own_elements,
    rewritten,
    substituted,
    walk,
)
from calcvm.errors import UnsupportedOperator
from calcvm.formulas.elementwise import ACTIVATIONS
from calcvm.formulas.functions import FUNCTIONS
from calcvm.frozen import frozen
from calcvm.ops.dims import ONE, Affine, Shape, affine, numel
from calcvm.ops.equation import equation_of
from calcvm.ops.spec import is_own, stem_of
from calcvm.ops.specialized import specialized
from calcvm.script.code import ATOM, LOWEST, call, number, show, show_axes, trace, written
from calcvm.script.elementwise import activated, derived
from calcvm.script.row import FALLBACKS, WRITERS, Row, Writer, slot

WHOLE = ""  # the single axis of whole arrays
METHODS = {f.equation: f.name for f in FUNCTIONS.values()}
APPLIED: dict[str, Callable[..., Any]] = {
    "logaddexp": partial(call, "np.logaddexp"),
    "+": add, "-": sub, "*": mul, "/": truediv, "neg": neg, ">": gt, ">=": ge, "<": lt, "<=": le, "and": and_, "or": or_,
    "not": invert, "==": lambda x, y: x.equals(y), "!=": lambda x, y: ~x.equals(y),
    "where": lambda condition, x, y: x.select(condition, x, y), "relu": lambda x: call("np.maximum", x, 0),
    "max": partial(call, "np.maximum"), "min": partial(call, "np.minimum"), "//": partial(call, "np.floor_divide"),
    "%": partial(call, "np.mod"),
}  # fmt: skip


@frozen
class Value:
    """A value with one axis per index: an expression, or a function applied elementwise to other values.

    name : the operand that the value is.
    spread : for a reduction, the expression with reduced axes kept at size 1, and all axes.
    """

    axes: tuple[str, ...]
    code: Any = None
    name: str = ""
    spread: tuple[Any, tuple[str, ...]] | None = None
    parts: tuple[Value, ...] = ()
    apply: Callable[..., Any] | None = None


def writer_of(name: str) -> Writer:
    """The writer for a row of a given name: a special one of its family, else `write`, which uses its equation."""
    stem = stem_of(name)
    return WRITERS.get(stem) or next((w for find in FALLBACKS if (w := find(stem)) is not None), write)


def write(r: Row, wide: bool = False) -> None:
    """Write a row from its equation.

    wide : sum in float64 for stored sums and means, and for variances.

    Raises
    ------
    UnsupportedOperator : the row is a user's, whose kernel may differ from its synopsis.
    """
    Axes(r, wide).write()


class Axes:
    """The axes of a row's operands and of its equation's indexes, and the writing of the equation.

    dims : by index, the axes that operands have for it.
    """

    def __init__(self, r: Row, wide: bool = False):
        equation = None if is_own(r.spec) else equation_of(r.spec)
        if equation is None:
            raise UnsupportedOperator(
                f"row {r.spec.name!r} has no text in NumPy: a custom operator has one if it is a formula "
                "(calcvm.operators.elementwise, pair_loss)"
            )
        self.r, self.wide, self.operand_axes = r, wide, equation.axes
        words = {k: v.b if isinstance(v, Affine) and v.constant else v for k, v in vars(r.w).items()}
        extents = {i.name: i.extent for e in equation.equations for i in bound(e)}
        self.extents = {name: affine(size(extent, words)) for name, extent in extents.items() if extent is not None}
        self.known = {name.upper(): n for name, n in self.extents.items()} | words
        self.orders = r.spec.lies(words) if r.spec.lies else {}
        left_out = [o.name for o in r.spec.operands if o.name not in r]
        self.equations = specialized(equation, words, left_out, axes=len(extents)).equations
        self.made: dict[str, Value] = {}  # values other than operands
        lying = sorted(dict.fromkeys(self._lying()), key=lambda at: -len(at[1]))
        self.rank = [*dict.fromkeys(name for _, at in lying for name in at), *self.extents, WHOLE]
        self._line_up(lying)

    # ------------------------------------------------------------ axes
    def stored(self, name: str, axes: tuple[Any, ...]) -> tuple[Any, ...]:
        """Axes of an operand in stored order."""
        order = self.orders.get(name)
        return axes if order is None else tuple(axes[k] for k in order)

    def lengths(self, name: str) -> list[Affine]:
        """Sizes of an operand's axes."""
        return [affine(size(n, self.known)) for n in self.operand_axes[name]]

    def _lying(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Operands with the indexes of their axes, if every axis has one."""
        for e in self.equations:
            if e.kept is not None and e.name in self.r:
                yield e.name, self.stored(e.name, tuple(i.name for i in e.kept))
        for e in self.equations:
            for node in walk(e.value):
                if isinstance(node, Element) and node.array in self.r:
                    at = tuple(place.name for place in node.places if isinstance(place, Name))
                    if [self.extents[v] for v in at] == self.lengths(node.array):
                        yield node.array, self.stored(node.array, at)

    def _line_up(self, lying: list[tuple[str, tuple[str, ...]]]) -> None:
        """Find the axes of each index.  An index of size 1 has none if an operand has none for it."""
        nodes = [node for e in self.equations for node in walk(e.value)]
        product = any(isinstance(node, Reduction) and self._is_product(node) for node in nodes)
        kept = {i.name for e in self.equations for i in e.kept or ()}
        units = {v for v, n in self.extents.items() if n == ONE}
        gone = units - ({v for _, at in lying for v in at} if product else kept)

        def split(name: str, at: tuple[str, ...]) -> dict[str, Shape]:
            there = [v for v in at if v not in gone]
            return dict(zip(there, _split(self.r.shape(name), [(self.extents[v], v in kept) for v in there])))

        for name, at in lying:
            own = split(name, at)
            gone |= {v for v in at if v in units and not own.get(v)}
        self.dims: dict[str, Shape] = {v: () if v in gone else (n,) for v, n in self.extents.items()}
        parted = {
            v for node in nodes if isinstance(node, Element) and node.array in self.r
            for place, n in zip(node.places, self.lengths(node.array))
            if not isinstance(place, Name) or self.extents[place.name] != n for v in names(place)
        }  # fmt: skip
        for name, at in () if product else lying:
            self.dims |= {v: part for v, part in split(name, at).items() if v not in parted}
            parted |= {*at}

    def shape(self, axes: tuple[str, ...], there: tuple[str, ...] | None = None) -> Shape:
        """The shape of axes, with size 1 for those that are not ``there``."""
        return tuple(n if there is None or v in there else ONE for v in axes for n in self.dims[v])

    def turned(self, v: Value, order: tuple[str, ...]) -> Any:
        """A value's expression with its axes in a given order."""
        code = self.at(v, v.axes)
        places = [(a, k) for a in v.axes for k in range(len(self.dims[a]))]
        to = [places.index((a, k)) for a in order for k in range(len(self.dims[a]))]
        moved = [k for k, at in enumerate(to) if k != at]
        if not moved:
            return code
        if len(to) == 2:
            return code.method("T")
        return code.method(f"swapaxes({show(moved)[1:-1]})" if len(moved) == 2 else f"transpose({show(to)[1:-1]})")

    def at(self, v: Value, axes: tuple[str, ...]) -> Any:
        """A value's expression in a shape that broadcasts to the given axes."""
        if v.apply:
            return v.apply(*(self.at(part, axes) for part in v.parts))
        own = tuple(a for a in axes if a in v.axes)
        if not own:
            return v.code
        wanted = axes[axes.index(own[0]) :]
        if v.spread and v.spread[1] == wanted:
            return v.spread[0]
        if v.name and v.axes == own:
            lies = self.r.shape(v.name)  # possibly with leading axes of size 1
            whole = any(lies == self.shape(axes[k:], own) for k in range(len(axes) - len(wanted)))
            return self.r.x(v.name) if whole else self.r.shaped(v.name, self.shape(wanted, own))
        if v.axes != own:
            return self.at(Value(own, self.turned(v, own)), axes)
        return v.code if own == wanted else v.code.reshape(*self.shape(wanted, own))

    def joined(self, apply: Callable[..., Any], *parts: Value) -> Value:
        """A function applied elementwise to values."""
        return Value(tuple(sorted({a for v in parts for a in v.axes}, key=self.rank.index)), parts=parts, apply=apply)

    # ------------------------------------------------------------ equations
    def write(self) -> None:
        r, access = self.r, {o.name: o.access for o in self.r.spec.operands}
        for e in self.equations:
            if e.kept is None:
                self.dims[WHOLE] = r.shape(e.name)
            at = (WHOLE,) if e.kept is None else tuple(i.name for i in e.kept)
            axes = tuple(a for a in self.stored(e.name, at) if self.dims[a] or a == WHOLE)
            node, more = _increment(e)
            self.sums_wide = self.wide and (e.name in access or e.name == "var")
            value = self.scanned(e, axes) if is_scan(e) else self.value(node, axes)
            if e.name not in r:
                self.made[e.name] = value
                continue
            if not value.axes and numel(self.shape(axes)) == ONE:
                axes = ()
            code = self.at(value, axes)
            if {*value.axes} != {*axes}:
                code = r.call("np.broadcast_to", code, self.shape(axes))
            r.put_shaped(e.name, code, self.shape(axes), more or (access[e.name] == "a" and self.known.get("acc") == 1))

    # ------------------------------------------------------------ scans
    def scanned(self, e: Equation, axes: tuple[str, ...]) -> Value:
        """A result whose elements depend on the one before, or behind, along an index."""
        own = own_elements(e)
        moved = {(i.name, p) for n in own for i, p in zip(e.kept or (), n.places) if p != Name(i.name)}
        steps = [(v, self.number(rest[1])) for v, p in moved if (rest := linear(p, v))]
        if len(steps) != 1 or steps[0][1] not in (-1, 1) or len({n.beyond for n in own}) > 1:
            raise UnsupportedOperator(
                f"row {self.r.spec.name!r}: a scan that reads more than the element before has no text"
            )
        ((along, step),) = steps
        if not self.dims[along]:
            return self.value(rewritten(e.value, lambda n: Number(own[0].beyond) if n in own else n), axes)
        k = sum(len(self.dims[a]) for a in axes[: axes.index(along)])
        if found := running_sum(e):
            v, back = self.value(found.value, axes), ", ".join([":"] * k + ["::-1"])
            code = self.at(v, axes)
            code = code if {*v.axes} == {*axes} else self.r.call("np.broadcast_to", code, self.shape(axes))
            return Value(axes, code[back].method(f"cumsum({k})")[back] if step > 0 else code.method(f"cumsum({k})"))
        inner, given = trace(), dict[Node, str]()

        def of_step(node: Node) -> Any:
            if node in own:
                return inner.of("before")
            if (known := self.number(node)) is not None:
                return number(inner, known)
            if e.name not in arrays(node):
                return inner.of(given.setdefault(node, f"x{len(given) + 1}"))
            assert isinstance(node, Call)
            return self.applied(node)(*map(of_step, node.arguments))

        text = f"lambda {{}}: {written(of_step(e.value))}"
        text = f"scan({text.format(', '.join(('before', *given.values())))}, {k}, {written(number(inner, own[0].beyond))}, {step > 0}"
        parts = tuple((self.at(self.value(node, axes), axes), LOWEST) for node in given)
        return Value(axes, self.r.trace.of(f"{text}{', {}' * len(parts)})", ATOM, parts))

    # ------------------------------------------------------------ nodes
    def value(self, node: Node, over: tuple[str, ...]) -> Value:
        """The value of a node for indexes: the result's, then the reduced ones."""
        if (known := self.number(node)) is not None:
            return self.constant(known)
        if isinstance(node, Name):
            return self.named(node.name)
        if isinstance(node, Element):
            return self.element(node)
        if isinstance(node, Reduction):
            return self.reduced(node, over)
        assert isinstance(node, Call)
        return self.called(node, over)

    def constant(self, n: Any) -> Value:
        return Value((), self.r.number(n))

    def number(self, node: Node) -> Any:
        """The number that a node has for these words, or None."""
        if isinstance(node, Number):
            return node.value
        try:
            return size(node, self.known)
        except (KeyError, ArithmeticError, ValueError, TypeError):
            return None

    def named(self, name: str) -> Value:
        """A whole operand, or a hyperparameter."""
        r = self.r
        if name in self.extents:
            dims = self.dims[name]
            places = r.trace.of(f"np.arange({show(numel(dims))})")
            return Value((name,), places if len(dims) == 1 else places.reshape(*dims)) if dims else self.constant(0)
        if name not in r:
            return Value((), slot(r, name))
        text = r.operands[name].text
        return Value((), text) if text.scalar else Value((WHOLE,), r.shaped(name, self.dims[WHOLE]), name)

    def element(self, node: Element) -> Value:
        r, name = self.r, node.array
        if name in self.made:
            return self.made[name]
        if r.operands[name].text.scalar:
            return Value((), r.operands[name].text)
        units = {v: ZERO for v, n in self.dims.items() if not n}
        places = (placed(substituted(place, units)) for place in node.places)
        axes: list[str] = []
        index: list[str] = []
        beyond: list[tuple[int, Affine, Affine]] = []  # axes read beyond their ends: axis, start, stop
        shape: Shape = ()
        for place, n in self.stored(name, tuple(zip(places, self.lengths(name)))):
            if len(own := names(place) & {*self.extents}) > 1:  # drop indexes with one place
                place = placed(substituted(place, {v: ZERO for v in own if self.extents[v] == ONE}))
            if not names(place) & {*self.extents}:
                if n != ONE:
                    index.append(show(affine(self.number(place))))
                    shape += (n,)
                continue
            v, start, stop = self.along(place)
            part = "" if start == 0 and stop == n else f"{show(start)}:{show(stop)}"
            if start.at(1) < 0 or (stop - n).at(1) > 0:
                beyond.append((sum(len(self.dims[a]) for a in axes), start, stop))
                part = ":"
            axes.append(v)
            index += [part] if part else [":"] * len(self.dims[v])
            shape += (n,) if part else self.dims[v]
        code = r.shaped(name, shape)
        if all(part == ":" for part in index) and not beyond:
            return Value(tuple(axes), code, name)
        code = code if all(part == ":" for part in index) else code[", ".join(index)]
        for k, start, stop in beyond:
            code = r.call("stretched", code, k, start, stop, r.number(node.beyond))
        return Value(tuple(axes), code)

    def along(self, place: Node) -> tuple[str, Affine, Affine]:
        """The index that runs along an axis, and the range of the axis that it covers."""
        (v,) = names(place) & {*self.extents}
        _, rest = linear(place, v) or (None, ZERO)
        start = affine(self.number(rest))
        return v, start, start + self.extents[v]

    # ------------------------------------------------------------ reductions
    def reduced(self, node: Reduction, over: tuple[str, ...]) -> Value:
        free = names(node.body)
        to: dict[str, str] = {}
        for i in node.indexes:  # reuse an index of the result that the body does not read
            like = (v for v in over if v not in {*free, *to.values()} and self.dims[v] == self.dims[i.name] != ())
            to[i.name] = next(like, i.name)
        gone = tuple(v for v in to.values() if self.dims[v])
        body, how = substituted(node.body, {v: Name(of) for v, of in to.items() if v != of}), node.how
        inner = over + tuple(v for v in gone if v not in over)
        if how == "sum" and isinstance(body, Call) and body.function == "/" and not names(body.arguments[1]) & {*gone}:
            body, by = body.arguments
            if not gone or self.number(by) != numel(tuple(self.extents[v] for v in gone)):
                return self.joined(truediv, self.folded("sum", body, gone, inner), self.value(by, over))
            how = "mean"
        return self.folded(how, body, gone, inner)

    def folded(self, how: str, body: Node, gone: tuple[str, ...], over: tuple[str, ...]) -> Value:
        if how == "sum" and (product := self.contracted(body, gone, over)):
            return product
        v = self.value(_counted(body) if how == "sum" else body, over)
        if not gone or not v.axes:
            if how == "var":
                return self.joined(sub, v, v)
            return self.joined(mul, v, self.constant(numel(self.shape(gone)))) if how == "sum" else v
        axes, kept = v.axes, tuple(a for a in v.axes if a not in gone)
        at = tuple(k for k, a in enumerate(a for a in axes for _ in self.dims[a]) if a in gone)
        code = self.at(v, axes)
        if self.sums_wide and how in ("sum", "mean"):
            return Value(kept, self.r.call(f"{how}_of", code, *at))
        said = show_axes(at) if kept else ""
        more = f"{', ' * bool(said)}keepdims=True"
        if how == "logsumexp":
            form = f"logsumexp({{}}{', ' * bool(said)}{said}"
            whole, single = (
                self.r.trace.of(f"{form}{end})", ATOM, ((code, LOWEST),)) for end in ("", ", keepdims=True")
            )
            return Value(kept, whole, spread=(single, axes))
        return Value(kept, code.method(f"{how}({said})"), spread=(code.method(f"{how}({said}{more})"), axes))

    def _is_product(self, node: Reduction) -> bool:
        """Whether a sum may be a matrix product: two factors, each with an index of the result that the other lacks."""
        parts = _factors(node.body)
        if node.how != "sum" or len(parts) != 2:
            return False
        gone = {i.name for i in node.indexes}
        a, b = (names(part) & {*self.extents} for part in parts)
        return bool(a & b & gone) and bool(a - b - gone) and bool(b - a - gone)

    def contracted(self, body: Node, gone: tuple[str, ...], over: tuple[str, ...]) -> Value | None:
        """A sum of products as a matrix product."""
        parts = _factors(body)
        if len(parts) != 2:
            return None
        a, b = (self.value(part, over) for part in parts)
        if not {*a.axes} - {*b.axes} - {*gone} or not {*b.axes} - {*a.axes} - {*gone}:
            return None
        summed = tuple(k for k in a.axes if k in gone)
        *lead, m, n = (k for k in over if k in a.axes + b.axes and k not in gone)
        a, b = (b, a) if n in a.axes else (a, b)
        if len(summed) == 1 and m in a.axes and not {m, n} <= {*a.axes} and m not in b.axes:
            left, right = (tuple(k for k in lead if k in v.axes) for v in (a, b))
            if left == right or not left or not right:
                return Value((*lead, m, n), self.turned(a, (*left, m, *summed)) @ self.turned(b, (*right, *summed, n)))
        if {*a.axes} & {*b.axes} == {*summed}:
            axes = tuple(tuple(v.axes.index(k) for k in summed) for v in (a, b))
            rest = tuple(k for v in (a, b) for k in v.axes if k not in summed)
            return Value(rest, self.r.call("np.tensordot", self.at(a, a.axes), self.at(b, b.axes), axes))
        return None

    # ------------------------------------------------------------ functions
    def called(self, node: Call, over: tuple[str, ...]) -> Value:
        name, arguments = node.function, node.arguments
        if name == "stop":
            return self.value(arguments[0], over)
        if name == "where" and self.holds(arguments[0]):
            return self.value(arguments[1], over)
        if name == "max" and self.holds(Call(">", arguments)):
            return self.value(arguments[0], over)
        for a, rest in (arguments, arguments[::-1]) if name == "*" else ():
            if (known := self.number(a)) in (0, -1):
                return self.joined(neg, self.value(rest, over)) if known else self.constant(0)
            if isinstance(a, Call) and a.function[0] == "d" and a.function[1:] in ACTIVATIONS:
                return self.joined(partial(derived, self.r), self.value(rest, over), self.value(a.arguments[0], over))
        return self.joined(self.applied(node), *(self.value(a, over) for a in arguments))

    def holds(self, condition: Node) -> bool:
        """Whether a condition always holds, such as a size of the batch above a number."""
        match condition:
            case Call(">", (a, b)):
                n, least = self.number(a), self.number(b)
                return isinstance(n, Affine) and isinstance(least, int) and n.at(1) > least
        return bool(self.number(condition))

    def applied(self, node: Call) -> Callable[..., Any]:
        """The Python function for a call."""
        name = node.function
        if name == "^" and (power := self.number(node.arguments[1])) is not None:
            return lambda x, _: x**power
        if name in APPLIED:
            return APPLIED[name]
        return (
            partial(activated, self.r) if name in ACTIVATIONS and "act" in self.known else methodcaller(METHODS[name])
        )


def _factors(node: Node) -> list[Node]:
    if isinstance(node, Call) and node.function == "*":
        return [*_factors(node.arguments[0]), *_factors(node.arguments[1])]
    return [node]


def _counted(node: Node) -> Node:
    """``where(condition, 1, 0)`` as the condition itself, which counts as 1 if true."""
    chosen = isinstance(node, Call) and node.function == "where" and node.arguments[1:] == (ONE_NODE, ZERO)
    return node.arguments[0] if chosen else node  # type: ignore[union-attr]


def _increment(e: Equation) -> tuple[Node, bool]:
    """The value of an equation, or its increment if it adds to the old value; and whether it does."""
    if isinstance(e.value, Call) and e.value.function == "+":
        own, more = e.value.arguments
        places = tuple(Name(i.name) for i in e.kept or ())
        if own in (Name(e.name), Element(e.name, places)):
            return more, True
    return e.value, False


def _split(shape: Shape, groups: list[tuple[Affine, bool]]) -> list[Shape]:
    """Divide the axes of a shape into groups with these sizes; empty if that is impossible.

    An axis of size 1 belongs to a group of size 1, or stays with a group that is kept.
    """
    out: list[Shape] = [()] * len(groups)
    k, left = -1, ONE
    for n in shape:
        while (
            left == ONE and k + 1 < len(groups) and (n != ONE or k < 0 or groups[k + 1][0] == ONE or not groups[k][1])
        ):
            k += 1
            left = groups[k][0]
            if n == ONE:
                break
        try:
            left = left // n
        except ArithmeticError:
            return []
        if k >= 0:
            out[k] += (n,)
    return out if left == ONE and all(n == ONE for n, _ in groups[k + 1 :]) else []

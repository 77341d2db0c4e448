"""Values of equations in LLVM IR: the value of a node at a point, which has an integer for each index, or one per lane.

A value that depends on no lane's index stays a single number, even if it is combined with vectors.  A value computed at a point is
reused while it is in scope: a loop contains only what depends on its index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types

from calcvm.equations.kinds import CONDITION, INTEGER, NUMBER, kind_of
from calcvm.equations.plain import Plain, Stage
from calcvm.equations.tree import COMPARISONS, Call, Element, Name, Node, Number, names, walk
from calcvm.errors import CalcError
from calcvm.kernels_cpu import _formulas as F
from calcvm.kernels_cpu._common import WORD
from calcvm.kernels_cpu._formulas import V
from calcvm.kernels_cpu._math import Lanes
from calcvm.kernels_cpu._rounded import added, divided, multiplied, subtracted, widened
from calcvm.kernels_cpu._types import as_number, in_memory
from calcvm.kernels_cpu._vectors import bits_of, phi
from calcvm.kernels_cpu._whole import FALSE, LEAST, TRUE, Cond, Whole, Wholes
from calcvm.kernels_cpu.elementwise import POWERS, power_of

MOST = 2 ** (WORD.width - 2)  # of an integer in a place computed from data
BAD_PLACE = 1  # trap code, as that of a label
CALLED = {"abs": "fabs", "sigmoid": "logistic"}  # functions whose formulas have another name
Value = Any  # V, Whole or Cond


class Point(NamedTuple):
    """A point at which values are computed.

    at : the place of each index.  live : the lanes in use.  loose : indexes that may be out of their range.
    """

    at: Mapping[str, Whole]
    live: Cond = TRUE
    loose: frozenset[str] = frozenset()

    def to(self, name: str, where: Whole, live: Cond | None = None) -> Point:
        return Point({**self.at, name: where}, self.live if live is None else live, self.loose - {name})


class Operand(NamedTuple):
    """An operand in memory; if it is left out, a vector of its default.

    place : the mask of offsets: -1, or 0 if the operand is left out.
    """

    pointer: Any
    dtype: Any
    kind: str
    axes: tuple[Node, ...]
    place: Any = -1


class Values:
    """Values of a row's stages, emitted on demand."""

    def __init__(
        self,
        e: Lanes,
        plain: Plain,
        stages: Sequence[Stage],
        words: Mapping[str, Whole],
        reals: Mapping[str, Any],
        operands: Mapping[str, Operand],
        trap: Callable[[], None],
    ):
        self.e, self.b, self.w, self.plain = e, e.b, Wholes(e), plain
        self.stages = {stage.name: stage for stage in stages}
        self.words, self.operands, self.trap = words, operands, trap
        self.reals = {name: V(e.b, x) for name, x in reals.items()}
        indexes = [i for stage in stages for i in (*stage.kept, *stage.over)]
        self.extents: dict[str, Node] = {i.name: i.extent for i in indexes if i.extent is not None}
        self.capitals = {name.upper(): extent for name, extent in self.extents.items()}
        self.kinds = {name: o.kind for name, o in operands.items()} | dict.fromkeys(reals, NUMBER)
        for stage in stages:
            of = {"argmax": INTEGER, "argmin": INTEGER, "any": CONDITION, "all": CONDITION}.get(stage.how)
            own = NUMBER if stage.scan else of or kind_of(stage.value, self.kinds)
            self.kinds[stage.name] = own
        self.again: dict[str, Stage] = {}  # texts of values that are stored in a result's memory
        self.true: set[tuple[str, ...]] = set()  # conditions, and places with the extents of the axes that contain them
        self.memo: list[dict[Any, tuple[Value, Any]]] = [{}]
        self.keys: dict[int, tuple[Node, str, frozenset[str]]] = {}

    # ------------------------------------------------------------ known values
    @contextmanager
    def scope(self) -> Iterator[None]:
        """Code that may not run; the values it computes are forgotten after it."""
        self.memo.append({})
        yield
        self.memo.pop()

    @contextmanager
    def knowing(self, true: Sequence[tuple[str, ...]]) -> Iterator[None]:
        """Code that runs only if some facts hold; they are not tested again in it."""
        new = {*true} - self.true
        self.true |= new
        yield
        self.true -= new

    def key(self, node: Node) -> tuple[str, frozenset[str]]:
        """A text that is the same for equal nodes, and the names in it."""
        found = self.keys.get(id(node))
        if found is None:
            found = self.keys[id(node)] = node, repr(node), frozenset(names(node))
        return found[1], found[2]

    def known(self, what: str, indexes: Iterator[str] | Sequence[str], p: Point) -> tuple[Any, Any]:
        """The key of a value at a point, and the value if it is known."""
        at = tuple(p.at[v] for v in indexes)
        key = (what, tuple(map(id, at)))
        for scope in reversed(self.memo):
            if key in scope:
                return key, scope[key][0]
        return (key, at), None

    def keep(self, key: Any, value: Value) -> Value:
        key, at = key
        self.memo[-1][key] = value, at  # with the objects whose ids are in the key
        return value

    def of(self, node: Node, p: Point) -> Value:
        """The value of a node at a point."""
        if isinstance(node, Number):
            return Whole(node.value) if isinstance(node.value, int) else V(self.b, self.e.element(node.value))
        if isinstance(node, Name):
            return self.named(node.name, p)
        text, free = self.key(node)
        if (text,) in self.true:
            return TRUE
        key, value = self.known(text, sorted(free & p.at.keys()), p)
        if value is None and text in self.again:
            value = self.keep(key, self.stored_before(self.again[text], p))
        if value is None:
            value = self.keep(key, self.element(node, p) if isinstance(node, Element) else self.called(node, p))
        return value

    def named(self, name: str, p: Point) -> Value:
        if name in p.at:
            return p.at[name]
        if name in self.words:
            return self.words[name]
        if name in self.reals:
            return self.reals[name]
        if name in self.kinds:
            return self.of(Element(name, ()), p)
        return self.of(self.capitals[name], p)

    def size(self, extent: Node) -> Any:
        """An extent, at least 0."""
        return self.w.larger(self.of(extent, Point({})).base, 0)

    def product(self, extents: Sequence[Node | None]) -> Any:
        """The product of the extents, an i64."""
        count: Any = 1
        for extent in extents:
            assert extent is not None
            count = self.w.times(count, self.size(extent))
        return self.w.value(count)

    # ------------------------------------------------------------ kinds
    def number(self, x: Value) -> V:
        """A value as a number."""
        e, b = self.e, self.b
        if isinstance(x, V):
            return x
        if isinstance(x, Cond):
            return V(b, b.uitofp(self.w.mask(x) if x.wide else self.w.bit(x), e.vec if x.wide else e.element))
        if x.wide:
            return V(b, b.sitofp(self.w.lanes(x), e.vec))
        return V(b, e.element(float(x.base)) if isinstance(x.base, int) else b.sitofp(x.base, e.element))

    def wide(self, x: V) -> V:
        return widened(x, self.e.splat)

    def level(self, *xs: Value) -> list[V]:
        """Numbers of one width."""
        found = [self.number(x) for x in xs]
        return [*map(self.wide, found)] if any(x.lanes for x in found) else found

    def condition(self, node: Node, p: Point) -> Cond:
        found = self.of(node, p)
        assert isinstance(found, Cond)
        return found

    # ------------------------------------------------------------ functions
    def called(self, node: Call, p: Point) -> Value:
        function, w = node.function, self.w
        if function == "where":
            return self.chosen(self.condition(node.arguments[0], p), *(self.of(n, p) for n in node.arguments[1:]))
        xs = [self.of(argument, p) for argument in node.arguments]
        if function in ("and", "or"):
            return (w.both if function == "and" else w.either)(*xs)
        if function == "not":
            return w.holds_not(xs[0])
        if function == "stop":
            return xs[0]
        if function in COMPARISONS:
            return self.compared(function, *xs)
        if function == "^":
            return self.power(xs[0], xs[1])
        if all(isinstance(x, Whole) for x in xs) and function != "/":
            found = self.whole(function, xs)
            if found is not None:
                return found
        if function == "/":
            return self.quotient(*map(self.number, xs))
        return self.function(function, self.level(*xs))

    def quotient(self, x: V, y: V) -> V:
        """x / y; lanes are divided by a common number via its reciprocal, which the compiler would do in some vectors only."""
        if x.lanes and not y.lanes:
            return multiplied(x, self.wide(divided(y.const(1.0), y)))
        return divided(*self.level(x, y))

    def whole(self, function: str, xs: list[Whole]) -> Whole | None:
        w = self.w
        of: dict[str, Callable[..., Any]] = {
            "+": w.add, "-": w.sub, "*": w.mul, "neg": w.neg, "abs": w.abs, "max": w.max, "min": w.min,
            "//": lambda x, y: w.divided(x, y)[0], "%": lambda x, y: w.divided(x, y)[1],
        }  # fmt: skip
        return of[function](*xs) if function in of else None

    def function(self, function: str, xs: list[V]) -> V:
        match function:
            case "+":
                return added(*xs)
            case "-":
                return subtracted(*xs)
            case "*":
                return multiplied(*xs)
            case "//":
                return F.floor(divided(*xs))
            case "%":
                return subtracted(xs[0], multiplied(F.floor(divided(*xs)), xs[1]))
            case "neg":
                return -xs[0]
            case "max":
                return F.maximum(xs[0], xs[1])
            case "min":
                return F.minimum(xs[0], xs[1])
            case "relu":
                return xs[0].const(0.0).where(xs[0] < 0, xs[0])
            case "float32":
                return xs[0] if not xs[0].is_f64 else self.single(xs[0])
        try:
            return getattr(xs[0], CALLED.get(function, function))()
        except AttributeError:
            raise CalcError(f"row {self.plain.name!r}: no kernel computes the function {function!r}") from None

    def single(self, x: V) -> V:
        narrow = self.b.fptrunc(x.v, x.over(ir.FloatType()))
        return V(self.b, self.b.fpext(narrow, x.v.type))

    def chosen(self, c: Cond, x: Value, y: Value) -> Value:
        w, b = self.w, self.b
        if isinstance(x, Whole) and isinstance(y, Whole):
            return w.where(c, x, y)
        if isinstance(x, Cond) and isinstance(y, Cond):
            return w.either(w.both(c, x), w.both(w.holds_not(c), y))
        if c.known:
            return self.number(x if c.v else y)
        one, other = self.level(x, y)
        if c.wide:
            one, other = self.wide(one), self.wide(other)
        return V(b, b.select(c.v, one.v, other.v))

    def compared(self, op: str, x: Value, y: Value) -> Cond:
        w, b = self.w, self.b
        if isinstance(x, Whole) and isinstance(y, Whole):
            return w.compare(op, x, y)
        if isinstance(x, Cond) and isinstance(y, Cond):
            same = w.holds_not(w.either(w.both(x, w.holds_not(y)), w.both(w.holds_not(x), y)))
            return same if op == "==" else w.holds_not(same)
        one, other = self.level(x, y)
        return Cond((b.fcmp_unordered if op == "!=" else b.fcmp_ordered)(op, one.v, other.v))

    def power(self, x: Value, p: Value) -> V:
        """A power as in IEEE 754 (2019, 9.2.1): x^0 and 1^p are 1, for NaN too."""
        x = self.number(x)
        if isinstance(p, Whole) and not p.wide and isinstance(p.base, int) and float(p.base) in POWERS:
            return POWERS[float(p.base)](x)
        exponent = self.number(p)
        if isinstance(exponent.v, ir.Constant) and exponent.v.constant in POWERS:
            return POWERS[exponent.v.constant](x)
        x, exponent = self.level(x, exponent)
        exponent = exponent.as_f64()
        finite = F.clamp(exponent, -1e30, 1e30)  # beyond that every power is 0 or inf, unless |x| is 1
        half = 0.5 * finite
        odd = (1.0 - 4.0 * (half - F.floor(half))).where(finite.equals(F.floor(finite)), float("nan"))
        y = power_of(x, finite, exponent.const(0.0), odd).rounded(x)
        y = y.where(exponent.equals(exponent), float("nan"))
        return y.const(1.0).where(exponent.equals(0.0), y.const(1.0).where(x.equals(1.0), y))

    # ------------------------------------------------------------ elements
    def element(self, node: Element, p: Point) -> Value:
        stage = self.stages.get(node.array)
        if stage is not None and not stage.scan:
            return self.result(stage, node, p)
        o = self.operands[node.array]
        offset, inside = self.place(node, o.axes, p)
        value = self.loaded(o, offset, inside, p)
        if not (inside.known and inside.v) and node.beyond != 0:
            value = self.chosen(inside, value, self.as_kind(node.beyond, o.kind))
        return value

    def as_kind(self, x: float, kind: str) -> Value:
        if kind == CONDITION:
            return Cond(x != 0)
        if kind == INTEGER and float(x).is_integer():
            return Whole(int(x))
        return V(self.b, self.e.element(float(x)))

    def place(self, node: Element, axes: Sequence[Node], p: Point) -> tuple[Whole, Cond]:
        """The place of an element, and whether it is inside; a place that comes from data traps if it is outside."""
        w, offset, inside = self.w, Whole(0), TRUE
        for place, extent in zip(node.places, axes):
            size = Whole(self.size(extent))
            at, exact = self.divided(place, p)
            here = w.both(exact, TRUE if self.lies_inside(place, extent, p) else w.inside(at, size))
            if self.is_data(place) and isinstance(place, Call):
                here = w.both(here, self.fits(place, p))
            if not (here.known and here.v) and node.beyond == 0 and self.is_data(place):
                self.refuse(w.holds_not(here), p)
            inside = w.both(inside, here)
            offset = w.add(w.mul(offset, size), at)
        return offset, inside

    def divided(self, place: Node, p: Point) -> tuple[Whole, Cond]:
        """A place, and whether it exists: a quotient must have no remainder."""
        if not (isinstance(place, Call) and place.function == "/"):
            at = self.of(place, p)
            return at if isinstance(at, Whole) else self.integer(at), TRUE
        text, free = self.key(place)
        key, found = self.known(f"place {text}", sorted(free & p.at.keys()), p)
        if found is None:
            (above, exact), (below, _) = (self.divided(argument, p) for argument in place.arguments)
            quotient, rest = self.w.divided(above, below)
            found = self.keep(key, (quotient, self.w.both(exact, self.w.compare("==", rest, Whole(0)))))
        return found[0], TRUE if ("divides", text) in self.true else found[1]

    def lies_inside(self, place: Node, extent: Node, p: Point) -> bool:
        text = self.key(place)[0], self.key(extent)[0]
        if text in self.true:
            return True
        return (
            isinstance(place, Name)
            and place.name in p.at
            and place.name not in p.loose
            and (self.key(self.extents[place.name])[0] == text[1])
        )

    def fits(self, node: Node, p: Point) -> Cond:
        """Whether the integers of a place from data stay in 64 bits and divisors are not 0; otherwise the place does not exist."""
        w = self.w
        if isinstance(node, Element):
            return self.within(self.integer_at(node, p), MOST)
        if not isinstance(node, Call) or not self.is_data(node):
            return TRUE
        if node.function == "where":
            held, (one, other) = self.condition(node.arguments[0], p), (self.fits(n, p) for n in node.arguments[1:])
            return w.either(w.both(held, one), w.both(w.holds_not(held), other))
        found = TRUE
        for argument in node.arguments:
            found = w.both(found, self.fits(argument, p))
        if node.function in ("//", "%", "/"):
            return w.both(found, w.compare("!=", self.integer_at(node.arguments[1], p), Whole(0)))
        if node.function == "*":
            factors = [self.integer_at(n, p) for n in node.arguments]
            wide = any(x.wide for x in factors)
            x, y = (self.as_f64(x, wide) for x in factors)
            size = F.fabs(multiplied(x, y))
            return w.both(found, Cond(self.b.fcmp_ordered("<", size.v, size.const(float(MOST)).v)))
        if node.function in ("+", "-"):
            return w.both(found, self.within(self.integer_at(node, p), MOST))
        return found

    def within(self, x: Whole, most: int) -> Cond:
        return self.w.both(self.w.compare("<", x, Whole(most)), self.w.compare(">", x, Whole(-most)))

    def integer_at(self, node: Node, p: Point) -> Whole:
        return self.divided(node, p)[0]

    def as_f64(self, x: Whole, wide: bool) -> V:
        if wide:
            return V(self.b, self.b.sitofp(self.w.lanes(x), ir.VectorType(ir.DoubleType(), self.e.lanes)))
        return V(self.b, self.b.sitofp(self.w.value(x.base), ir.DoubleType()))

    def is_data(self, place: Node) -> bool:
        return any(isinstance(n, Element) for n in walk(place))

    def refuse(self, wrong: Cond, p: Point) -> None:
        """Trap if something is wrong in a live lane."""
        with self.b.if_then(self.w.any(self.w.both(wrong, p.live)), likely=False):
            self.trap()

    def loaded(self, o: Operand, offset: Whole, inside: Cond, p: Point) -> Value:
        """An element; 0 outside."""
        b, e, w = self.b, self.e, self.w
        element = o.pointer.type.pointee
        if offset.wide or inside.wide:
            mask = w.both(inside, p.live)
            mask = None if mask.known and mask.v else w.mask(mask)
            if offset.vector is None and isinstance(offset.step, int) and offset.step == 1:
                v = e.load(self.where(o, offset.base), mask)
            else:
                offsets = w.lanes(offset)
                if not isinstance(o.place, int):
                    offsets = b.and_(offsets, e.splat(o.place))
                v = self.gathered(o.pointer, offsets, w.mask(TRUE) if mask is None else mask)
        elif inside.known and inside.v:
            v = b.load(self.where(o, offset.base), align=bits_of(element) // 8)
        else:
            before = b.block
            with b.if_then(w.bit(inside)):
                found = b.load(self.where(o, offset.base), align=bits_of(element) // 8)
                here = b.block
            v = phi(b, element, (found, here), (ir.Constant(element, 0), before))
        return self.seen(V(b, v), o)

    def where(self, o: Operand, offset: Any) -> Any:
        """The pointer to an element."""
        place = self.w.value(offset)
        return self.b.gep(o.pointer, [place if isinstance(o.place, int) else self.b.and_(place, o.place)])

    def gathered(self, pointer: Any, offsets: Any, mask: Any) -> Any:
        b, e = self.b, self.e
        element, n = pointer.type.pointee, e.lanes
        vec, size = ir.VectorType(element, n), bits_of(element) // 8
        pointers = ir.VectorType(pointer.type, n)
        if n == 1:
            place = b.gep(pointer, [b.extract_element(offsets, ir.Constant(ir.IntType(32), 0))])
            at = b.bitcast(place, pointers)
        else:
            scaled = b.mul(offsets, ir.Constant(self.w.vec, [size] * n))
            at = b.inttoptr(b.add(e.splat(b.ptrtoint(pointer, WORD)), scaled), pointers)
        tag = f"v{n}{'i' if isinstance(element, ir.IntType) else 'f'}{size * 8}.v{n}p0"
        gather = e.fn(f"llvm.masked.gather.{tag}", vec, pointers, ir.IntType(32), e.mask, vec)
        return b.call(gather, [at, ir.Constant(ir.IntType(32), size), mask, ir.Constant(vec, [0] * n)])

    def seen(self, v: V, o: Operand) -> Value:
        """A loaded element as a value."""
        b = self.b
        if o.kind == CONDITION:
            return Cond(as_number(v, o.dtype, "bool").v)
        if o.kind == NUMBER:
            return V(b, in_memory(as_number(v, o.dtype, ""), None, self.e.element).v)
        x = in_memory(as_number(v, o.dtype, ""), types.intp, WORD)
        return Whole(0, vector=x.v) if x.lanes else Whole(x.v)

    def integer(self, v: V) -> Whole:
        """A float as a place; a fractional one does not exist."""
        b = self.b
        x = in_memory(v, types.intp, WORD)
        same = b.fcmp_ordered("==", b.sitofp(x.v, v.v.type), v.v)
        x = V(b, b.select(same, x.v, x.const(LEAST).v))
        return Whole(0, vector=x.v) if x.lanes else Whole(x.v)

    def stored_before(self, stage: Stage, p: Point) -> Value:
        """The element that a result's memory holds so far."""
        return self.loaded(
            self.operands[stage.name], self.where_kept(stage.name, p, [i.name for i in stage.kept]), TRUE, p
        )

    def where_kept(self, name: str, p: Point, kept: Sequence[str]) -> Whole:
        """The offset of an element of a result."""
        w, offset = self.w, Whole(0)
        for v, extent in zip(kept, self.operands[name].axes):
            offset = w.add(w.mul(offset, Whole(self.size(extent))), p.at[v])
        return offset

    def stored(self, name: str, value: Value, p: Point, kept: Sequence[str]) -> None:
        """Store an element of a result."""
        o, b, w = self.operands[name], self.b, self.w
        offset = self.where_kept(name, p, kept)
        wide = offset.wide
        if isinstance(value, Cond):
            value = V(b, w.mask(value) if wide else w.bit(value))
        elif isinstance(value, Whole):
            value = V(b, w.lanes(value) if wide else w.value(value.base))
        if wide and not value.lanes:
            value = self.wide(value)
        v = in_memory(value, o.dtype, o.pointer.type.pointee)
        at = b.gep(o.pointer, [w.value(offset.base)])
        if wide:
            assert offset.vector is None and offset.step == 1
            self.e.store(v.v, at, None if p.live.known else w.mask(p.live))
        else:
            b.store(v.v, at, align=bits_of(v.element) // 8)

    # ------------------------------------------------------------ stages
    def result(self, stage: Stage, node: Element, p: Point) -> Value:
        """An element of a stage, at places that are indexes of the same ranges, or anything else."""
        w, inside, at, loose = self.w, TRUE, {}, set()
        for i, place in zip(stage.kept, node.places):
            where, exact = self.divided(place, p)
            assert i.extent is not None
            if not self.lies_inside(place, i.extent, p):
                loose.add(i.name)
                inside = w.both(inside, w.both(exact, w.inside(where, Whole(self.size(i.extent)))))
            at[i.name] = where
        value = self.stage(stage, Point(at, p.live, frozenset(loose)))
        if loose and not (inside.known and inside.v):
            value = self.chosen(inside, value, self.as_kind(node.beyond, self.kinds[stage.name]))
        return value

    def stage(self, stage: Stage, p: Point) -> Value:
        """The value of a stage where its indexes are at ``p``."""
        key, value = self.known(f"stage {stage.name}", [i.name for i in stage.kept], p)
        if value is None:
            found = self.reduce(stage, [p])[0] if stage.how else self.of(stage.value, p)
            value = self.keep(key, found)
        return value

    def reduce(self, stage: Stage, points: Sequence[Point]) -> list[Value]:
        raise NotImplementedError

    def hoist(self, node: Node, points: Sequence[Point], without: frozenset[str]) -> None:
        """Compute the parts of a node that depend on none of these indexes."""
        if isinstance(node, (Number, Name)):
            return
        if not self.key(node)[1] & without:
            for p in points:
                self.of(node, p)
            return
        for part in node.arguments if isinstance(node, Call) else node.places if isinstance(node, Element) else ():
            self.hoist(part, points, without)


FALSE = FALSE  # for modules that import conditions from here

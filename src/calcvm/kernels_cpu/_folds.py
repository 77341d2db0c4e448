"""Reductions of equations in LLVM IR: an accumulator takes values, joins another, and reduces its lanes to one."""

from __future__ import annotations

from operator import add, mul
from typing import Any

from llvmlite import ir

from calcvm.kernels_cpu import _formulas as F
from calcvm.kernels_cpu._common import I1, I32, WORD
from calcvm.kernels_cpu._formulas import V
from calcvm.kernels_cpu._rounded import Product, added, multiplied
from calcvm.kernels_cpu._values import CONDITION, INTEGER, NUMBER, Value, Values
from calcvm.kernels_cpu._whole import LEAST, MOST, Cond, Whole

Accumulator = list[Any]  # LLVM values: the combined value, and for argmax and argmin its place


class Fold:
    """The reduction ``how`` of values of a kind."""

    def __init__(self, values: Values, how: str, kind: str, wide: bool):
        self.values, self.e, self.b, self.w = values, values.e, values.b, values.w
        self.how, self.kind, self.wide = how, kind, wide
        self.places = how in ("argmax", "argmin")
        self.exact = how == "sum" and kind == NUMBER
        self.n = 2 if self.places else 1

    def constant(self, element: Any, x: Any) -> Any:
        return ir.Constant(ir.VectorType(element, self.e.lanes), [x] * self.e.lanes) if self.wide else element(x)

    @property
    def neutral(self) -> Accumulator:
        """The neutral element."""
        if self.kind == CONDITION:
            return [self.constant(I1, int(self.how == "all"))]
        whole = self.kind == INTEGER
        element = WORD if whole else self.e.element
        least, most = (LEAST, MOST) if whole else (float("-inf"), float("inf"))
        zero, one = (0, 1) if whole else (0.0, 1.0)
        of = {"sum": zero, "prod": one, "max": least, "argmax": least, "min": most, "argmin": most}
        return [self.constant(element, of[self.how]), *([self.constant(WORD, MOST)] if self.places else [])]

    def lifted(self, x: Value, place: Whole | None, live: Cond) -> Accumulator:
        """A value as an accumulator; dead lanes are neutral."""
        w = self.w
        if isinstance(x, Cond):
            out = [w.mask(x) if self.wide else w.bit(x)]
        elif self.kind == INTEGER:
            out = [w.lanes(x) if self.wide else w.value(x.base)]
        else:
            number = self.values.number(x)
            out = [(self.values.wide(number) if self.wide else number).v]
        if place is not None:
            out.append(w.lanes(place) if self.wide else w.value(place.base))
        if live.wide:
            out = [self.b.select(live.v, v, none) for v, none in zip(out, self.neutral)]
        return out

    def with_term(self, acc: Accumulator, x: Value, place: Whole | None, live: Cond) -> Accumulator:
        """An accumulator with a further value, which comes after all others; a product is added in one rounding."""
        if not (self.exact and isinstance(x, Product)):
            return self.taken(acc, self.lifted(x, place, live))
        new = added(self.values.wide(x) if self.wide else x, V(self.b, acc[0])).v
        return [self.b.select(live.v, new, acc[0]) if live.wide else new]

    def taken(self, acc: Accumulator, term: Accumulator) -> Accumulator:
        """An accumulator with a further term, which comes after all others."""
        if not self.places:
            return self.both(acc, term)
        b, (x, i), (y, j) = self.b, acc, term
        op = ">" if self.how == "argmax" else "<"
        if self.kind == INTEGER:
            takes = b.icmp_signed(op, y, x)
        else:  # the first NaN is kept
            takes = b.and_(b.fcmp_unordered(op, y, x), b.fcmp_ordered("ord", x, x))
        return [b.select(takes, y, x), b.select(takes, j, i)]

    def both(self, one: Accumulator, other: Accumulator) -> Accumulator:
        """Two accumulators joined."""
        b = self.b
        x, y = (V(b, acc[0]) for acc in (one, other))
        if self.kind == CONDITION:
            return [(b.and_ if self.how == "all" else b.or_)(x.v, y.v)]
        if self.how in ("sum", "prod"):
            whole = (add, mul) if self.kind == INTEGER else (added, multiplied)
            return [whole[self.how == "prod"](x, y).v]
        if self.places:
            return self.earlier(one, other)
        if self.kind == INTEGER:
            return [b.select(b.icmp_signed(">" if self.how == "max" else "<", x.v, y.v), x.v, y.v)]
        return [(F.maximum if self.how == "max" else F.minimum)(x, y).v]

    def earlier(self, one: Accumulator, other: Accumulator) -> Accumulator:
        """The larger of two (for argmin the smaller); of equals the first.  NaN beats every number."""
        b = self.b
        (x, i), (y, j) = one, other
        op = ">" if self.how == "argmax" else "<"
        if self.kind == INTEGER:
            above, same = b.icmp_signed(op, y, x), b.icmp_signed("==", y, x)
        else:
            none, known = (b.fcmp_unordered("uno", v, v) for v in (x, y))
            above = b.or_(b.fcmp_ordered(op, y, x), b.and_(known, b.not_(none)))
            same = b.or_(b.fcmp_ordered("==", y, x), b.and_(known, none))
        takes = b.or_(above, b.and_(same, b.icmp_signed("<", j, i)))
        return [b.select(takes, y, x), b.select(takes, j, i)]

    def together(self, accumulators: list[Accumulator]) -> Accumulator:
        """Several accumulators joined by a tree."""
        found = accumulators
        while len(found) > 1:
            pairs = [self.both(*pair) for pair in zip(found[::2], found[1::2])]
            found = pairs + found[len(pairs) * 2 :]
        return found[0]

    def across(self, acc: Accumulator) -> Accumulator:
        """The lanes of an accumulator joined by a tree."""
        b, n = self.b, self.e.lanes
        while n > 1:
            n //= 2
            halves = []
            for first in (0, n):
                order = ir.Constant(ir.VectorType(I32, n), list(range(first, first + n)))
                halves.append([b.shuffle_vector(v, ir.Constant(v.type, ir.Undefined), order) for v in acc])
            acc = self.both(*halves)
        return [b.extract_element(v, I32(0)) for v in acc]

    def extreme(self, acc: Accumulator) -> Value:
        """For argmax and argmin, the value at the place."""
        return self.whole(acc[0]) if self.kind == INTEGER else V(self.b, acc[0])

    def value(self, acc: Accumulator) -> Value:
        """The result of the reduction."""
        if self.places:
            place = acc[1]
            none = (
                ir.Constant(place.type, [MOST] * place.type.count)
                if isinstance(place.type, ir.VectorType)
                else WORD(MOST)
            )
            zero = ir.Constant(place.type, None) if isinstance(place.type, ir.VectorType) else WORD(0)
            return self.whole(self.b.select(self.b.icmp_signed("==", place, none), zero, place))
        if self.kind == CONDITION:
            return Cond(acc[0])
        return self.whole(acc[0]) if self.kind == INTEGER else V(self.b, acc[0])

    @staticmethod
    def whole(v: Any) -> Whole:
        return Whole(0, vector=v) if isinstance(v.type, ir.VectorType) else Whole(v)

"""Checked equations become operators of a graph: products, windows, elementwise operators, reductions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from calcvm import functions as F
from calcvm.equations import meaning
from calcvm.equations.places import placed
from calcvm.equations.ranges import Ranges
from calcvm.equations.scans import RunningSum, is_scan, running_sum
from calcvm.equations.tree import (
    ONE,
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
    rewritten,
    substituted,
    walk,
)
from calcvm.errors import CalcError
from calcvm.graph import CalcGraph, Variable, apply
from calcvm.indexed import patterns
from calcvm.indexed.elements import MOST_TAPS, Elements
from calcvm.indexed.fused import Fused
from calcvm.indexed.operators import FOLDS, OPERATORS, REDUCED, functions
from calcvm.indexed.products import Addend, contract, varies
from calcvm.indexed.values import Value, aligned, cut, dropped, numel, ordered, repeated, reshaped, size_of
from calcvm.indexed.windows import convolution, pooled
from calcvm.ops.types import FLOAT

EXACT = 1 << 24  # up to here float32 represents every integer


class Lowering(Elements):
    """Lowers the equations of one text.

    operands : variables, by name.  numbers : parameters.  found : ranges of the equations.
    fused : whether parts become separate rows; None: if that is better.
    """

    def __init__(
        self,
        graph: CalcGraph,
        equations: Sequence[Equation],
        operands: Mapping[str, Variable],
        numbers: Mapping[str, Any],
        found: Ranges,
        fused: bool | None = None,
    ):
        super().__init__(graph, equations, operands, numbers, found)
        self.rows = Fused(self, fused)
        self.twice = self._reductions_read_twice()

    # ------------------------------------------------------------ results
    def result(self, name: str) -> Variable:
        """A result of the equations, with all of its axes."""
        equation, v = self.parts[name], self.part(name)
        data = v.data
        if equation.kept is not None:
            data = aligned(v, [i.name for i in equation.kept])
            new = [1 if i.name in v.axes else size_of(self.extents[i.name]) for i in equation.kept]
            data = repeated(self.graph, data, new, self.operands.values())
        if not isinstance(data, Variable):
            data = self.graph.constant(self.graph.unique(name), np.asarray(data))
        return data

    def part(self, name: str) -> Value:
        """The value of an equation, computed when it is first read."""
        if name not in self.made:
            equation = self.parts[name]
            order, scan = tuple(i.name for i in equation.kept or ()), running_sum(equation)
            if scan:
                self.made[name] = self.running(scan, order)
            elif own_elements(equation):
                self.made[name] = self.rows.scan(name)
            else:
                self.made[name] = self.rows.whole(equation) or self.rows.after(
                    equation.value, order, lambda: self.value(equation.value, order)
                )
        return self.made[name]

    def running(self, scan: RunningSum, order: Sequence[str]) -> Value:
        """A running sum along an index; a value that is constant along it is multiplied by the count."""
        v, n = self.value(scan.value, order), self.extents[scan.index]
        if scan.index not in v.axes:
            times = np.arange(1, int(n) + 1)
            return self.of_two("*", scan.value, v, Value(times[::-1] if scan.reverse else times, (scan.index,)), order)
        v = self.variable(v)
        return Value(F.cumsum(v.data, v.axes.index(scan.index), scan.reverse), v.axes)

    def whole(self, name: str) -> Any:
        """The array of an operand or a part, with all of its axes in order."""
        return self.operands[name] if name in self.operands else self.result(name)

    def opened(self, node: Node) -> Node:
        """An element of a part replaced by its equation's value, if its places are indexes."""
        equation = self.parts.get(node.array) if isinstance(node, Element) else None
        if equation is None or equation.kept is None or is_scan(equation):
            return node
        by: dict[str, Node] = {}
        for index, place in zip(equation.kept, node.places):  # type: ignore[union-attr]
            if not isinstance(place, Name) or self.extents.get(place.name) != self.extents[index.name]:
                return node
            by[index.name] = place
        for n in walk(equation.value):  # its own indexes are renamed, to avoid clashes
            if isinstance(n, Reduction):
                for index in n.indexes:
                    by[index.name] = Name(self.another(self.extents[index.name]))
        return self.opened(substituted(equation.value, by))

    # ------------------------------------------------------------ values, each once
    def value(self, node: Node, order: Sequence[str] = ()) -> Value:
        """The value of a node, preferably with its axes in the given order."""
        if isinstance(node, Number):
            return Value(node.value)
        if isinstance(node, Name):
            return self.named(node)
        key, own = self.key(node)
        if key not in self.known:
            v = self.computed(node, order)
            self.known[key] = v.called({name: f"{k}" for k, name in enumerate(own)})
            return v
        return self.known[key].called({f"{k}": name for k, name in enumerate(own)})

    def key(self, node: Node) -> tuple[Any, list[str]]:
        """A key that is equal for nodes that differ only in index names; and these names."""
        own = self.indexes(node, bound=True)
        by: dict[str, Node] = {name: Name(f"{k}") for k, name in enumerate(own)}
        return (substituted(node, by), tuple(self.extents[name] for name in own)), own

    def _reductions_read_twice(self) -> set[Any]:
        seen: set[Any] = set()
        twice: set[Any] = set()
        for equation in self.parts.values():
            for node in walk(equation.value):
                if isinstance(node, Reduction):
                    key, _ = self.key(node)
                    (twice if key in seen else seen).add(key)
        return twice

    def computed(self, node: Element | Reduction | Call, order: Sequence[str]) -> Value:
        found = patterns.rewritten(node, self.opened, self.extents)
        if found is not None:
            return self.value(found, order)
        if isinstance(node, Element):
            v = self.rows.gathered(node, order)
            return self.rows.after(node, order, lambda: self.element(node, order)) if v is None else v
        if isinstance(node, Reduction):
            return self.rows.after(node, order, lambda: self.reduction(node, order))
        if node.function in ("softmax", "log_softmax"):
            return self.soft(node, order)
        if node.function == "pick":
            x, name, place = node.arguments
            return self.gathered(
                self.variable(self.value(x, order)), self._name(name), self.value(place, order), node, order
            )
        if node.function == "+" and (v := self.with_addend(node, order)) is not None:
            return v
        return self.applied(node, [self.value(argument, order) for argument in node.arguments], order)

    @staticmethod
    def _name(node: Node) -> str:
        assert isinstance(node, Name)
        return node.name

    def named(self, node: Name) -> Value:
        if node.name in self.extents:
            n = self.extents[node.name]
            if varies(n):
                raise self.wrong(
                    node,
                    f"{node.name} counts the batch, and no row generates its numbers yet: give them as an operand of integers",
                )
            return Value(np.arange(int(n)), (node.name,))
        if node.name in self.operands or node.name in self.parts:
            x = self.whole(node.name)
            return Value(x, tuple(f"~{k}" for k in reversed(range(x.rank))))
        n = self.numbers.get(node.name, self.found.sizes.get(node.name))
        if varies(n):
            raise self.wrong(
                node,
                f"{node.name} is the size of the batch, and no row turns it into a number yet: take mean over "
                f"{node.name.lower()} instead of dividing a sum by it",
            )
        return Value(n)

    # ------------------------------------------------------------ operators
    def applied(self, node: Call, given: Sequence[Value], order: Sequence[str]) -> Value:
        """A function or an operator, applied to values that broadcast."""
        axes = _joined(given, order)
        data = [aligned(v, axes) for v in given]
        function = node.function
        if all(v.constant for v in given):
            if function not in meaning.FUNCTIONS:
                raise self.wrong(node, f"{function} of numbers alone: give the number itself")
            with np.errstate(all="ignore"):
                made = np.asarray(meaning.FUNCTIONS[function](*data))
            return Value(made if made.ndim else made.item(), tuple(axes))
        if function == "where" and not isinstance(data[0], (Variable, np.ndarray)):
            return given[1] if data[0] else given[2]
        if function in ("+", "-", "logaddexp"):  # there is no row for an infinite number, as beyond the ends
            far = [isinstance(x, float) and math.isinf(x) for x in data]
            data = [self.graph.constant(self.graph.unique("far"), x) if is_far else x for x, is_far in zip(data, far)]
        try:
            return Value(self._operator(node)(*data), tuple(axes))
        except CalcError as error:
            if "\n" in str(error):
                raise
            raise self.wrong(node, str(error), type(error)) from None

    def of_two(self, sign: str, node: Node, a: Value, b: Value, order: Sequence[str]) -> Value:
        """An operator applied to two values; errors refer to the place of a node."""
        return self.applied(Call(sign, (ONE, ONE), node.at), [a, b], order)

    def _operator(self, node: Call) -> Callable[..., Any]:
        function = node.function
        if function in OPERATORS:
            return OPERATORS[function]
        if function not in functions():
            raise self.wrong(
                node,
                f"{function} has no row yet: write it by other functions, or declare a custom operator "
                "(calcvm.operators.elementwise)",
            )
        return lambda *x: apply(function, *x)

    def with_addend(self, node: Call, order: Sequence[str]) -> Value | None:
        """``sum[i] x*w + v`` as one row that also adds v, if there is one."""
        for one, other in (node.arguments, node.arguments[::-1]):
            if not (isinstance(one, Reduction) and one.how == "sum") or self.key(one)[0] in {*self.twice, *self.known}:
                continue
            addend = Addend(self.value(other, order))
            if addend.value.constant or getattr(addend.value.data, "type", "") != FLOAT:
                continue
            v = self.reduction(one, order, addend)
            if addend.used:
                return v
            self.known[self.key(one)[0]] = v.called({name: f"{k}" for k, name in enumerate(self.key(one)[1])})
            return self.applied(node, [self.value(argument, order) for argument in node.arguments], order)
        return None

    # ------------------------------------------------------------ reductions
    def reduction(self, node: Reduction, order: Sequence[str], addend: Addend | None = None) -> Value:
        how, over = node.how, [i.name for i in node.indexes]
        inner = (*order, *over)
        if how == "sum":
            return self.sum(node, order, addend)
        if how == "mean":
            loss = self.cross_entropy(node, order)
            if loss is not None:
                return loss
            divisor = numel(self.extents[name] for name in over)
            weighted = len(self.factors(node.body)[1]) > 1 and self.taps([node.body], over)
            if not varies(divisor) and (weighted or self.is_product(node.body, over)):
                total = self.value(Reduction("sum", node.indexes, node.body, node.at), order)
                return self.of_two("/", node, total, Value(int(divisor)), order)
        taps = self.taps([node.body], over)
        if taps:
            seen = self.seen_at_once(node.body, taps) if how in ("max", "min") else None
            v = self.pooling(how, seen or node.body, over, taps, order) or self.rows.instead(node, order)
            if v is None and how in FOLDS:
                v = self.unrolled(node, taps, order)
        else:
            v = None if isinstance(node.body, Element) else self.rows.instead(node, order)
        if v is not None:
            return v
        return self.reduced(node, self.value(node.body, inner), over, order)

    def reduced(self, node: Reduction, v: Value, over: Sequence[str], order: Sequence[str]) -> Value:
        """A value reduced over those of its axes; it is constant along the others."""
        how, here = node.how, [name for name in v.axes if name in over]
        axes = tuple(name for name in v.axes if name not in over)
        at = tuple(v.axes.index(name) for name in here)
        times = numel(self.extents[name] for name in over if name not in here)
        if how in ("sum", "prod", "argmax", "argmin") and times != 1:
            if varies(times) or how != "sum":
                without = ", ".join(sorted({*over} - {*here}))
                remedy = {"sum": "multiply, or take mean", "prod": "take a power"}.get(how, f"leave {without} out")
                raise self.wrong(node, f"the argument of {how} is the same for every {without}: {remedy}")
            v = self.of_two("*", node, v, Value(int(times)), order)
        if how == "logsumexp" and times != 1:
            more = Value(math.log(int(self.times(node, times).data)))
            return self.of_two("+", node, self.reduced(node, v, here, order), more, order)
        if v.constant:
            if how in meaning.REDUCE:
                made = np.asarray(meaning.REDUCE[how](np.asarray(v.data), axis=at))
                return Value(made if made.ndim else made.item(), axes)
            raise self.wrong(node, f"{how} of numbers alone: give the number itself")
        if not here:
            if how == "var":
                return self.of_two("-", node, v, v, order)
            return Value(0) if how in ("argmax", "argmin") else v
        if how in ("argmax", "argmin"):
            return Value(self.place_of(node, v, over, at), axes)
        if how == "prod":
            return self.product(node, v, here)
        return Value(REDUCED[how](v.data, at), axes)

    def product(self, node: Reduction, v: Value, over: Sequence[str]) -> Value:
        """The product along axes, factor by factor, because it has no row."""
        for name in over:
            axis, n = v.axes.index(name), self.extents[name]
            if varies(n) or int(n) > MOST_TAPS:
                raise self.wrong(
                    node, f"prod over {n} has no row yet, and only up to {MOST_TAPS} factors are multiplied one by one: "
                    "take exp(sum[..] log(..)) of positive factors"
                )  # fmt: skip
            parts = [dropped(cut(v.data, axis, k, k + 1), axis) for k in range(int(n))]
            while len(parts) > 1:
                parts = [a * b for a, b in zip(parts[::2], parts[1::2])] + parts[len(parts) & ~1 :]
            v = Value(parts[0], tuple(a for a in v.axes if a != name))
        return v

    def place_of(self, node: Reduction, v: Value, over: Sequence[str], at: tuple[int, ...]) -> Variable:
        """The place of the first largest or smallest element, counted along all indexes in their order."""
        n = numel(self.extents[name] for name in over)
        if varies(n) or n > EXACT:
            raise self.wrong(
                node, f"{node.how} over {n} has no row yet: it takes up to {EXACT} places, and not the batch"
            )
        places = Value(np.arange(int(n)).reshape([int(self.extents[name]) for name in over]), tuple(over))
        x, best = v.data, {"argmax": F.max, "argmin": F.min}[node.how]
        here = F.logical_or(
            F.equal(x, best(x, at, True)), F.not_equal(x, x)
        )  # NaN is both the largest and the smallest
        return F.cast(F.min(F.where(here, aligned(places, v.axes).astype(float), float(n)), at), "int64")

    # ------------------------------------------------------------ sums of products
    def sum(self, node: Reduction, order: Sequence[str], addend: Addend | None) -> Value:
        over = [i.name for i in node.indexes]
        scale, above, below = self.factors(node.body)
        outside, inside, apart_ = list[Node](), list[Node](), list[Node]()
        for factor in above:
            (inside if {*self.indexes(factor)} & {*over} else outside).append(factor)
        for factor in below:
            if {*self.indexes(factor)} & {*over}:
                self.divide(inside, factor)
            else:
                apart_.append(factor)
        if len(inside) == 1 and (split := self.distributed(node, inside[0], over)) is not None:
            v = self.value(split, order)
        else:
            alone = scale == 1 and not outside and not apart_
            v = self.summed(node, inside, over, order, addend if alone else None)
        if scale != 1:
            v = self.of_two("*", node, v, Value(scale), order)
        for function, factors in (("*", outside), ("/", apart_)):
            for factor in factors:
                v = self.of_two(function, node, v, self.value(factor, order), order)
        return v

    def factors(self, node: Node) -> tuple[float, list[Node], list[Node]]:
        """A product as a number, its factors, and its divisors."""
        if isinstance(node, Call) and node.function in ("*", "/", "neg"):
            scale, above, below = self.factors(node.arguments[0])
            if node.function == "neg":
                return -scale, above, below
            s, a, b = self.factors(node.arguments[1])
            if node.function == "*":
                return scale * s, above + a, below + b
            if s == 0:
                raise self.wrong(node, "division by zero", CalcError)
            return scale / s, above + b, below + a
        if isinstance(node, Number):
            return node.value, [], []
        if isinstance(node, Name) and isinstance(
            n := self.numbers.get(node.name, self.found.sizes.get(node.name)), (int, float)
        ):
            if node.name not in self.extents:
                return n, [], []
        return 1, [node], []

    def divide(self, inside: list[Node], by: Node) -> None:
        """Divide the factor that has the divisor's indexes."""
        own = {*self.indexes(by)}
        k = next((k for k, factor in enumerate(inside) if own <= {*self.indexes(factor)}), None)
        if k is None:
            inside.append(Call("/", (ONE, by), by.at))
        else:
            inside[k] = Call("/", (inside[k], by), by.at)

    def is_product(self, node: Node, over: Sequence[str]) -> bool:
        """Whether its sum is a product in which no factor has all indexes."""
        _, above, _ = self.factors(node)
        own = [{*self.indexes(factor)} for factor in above]
        inside = [s for s in own if s & {*over}]
        return len(inside) > 1 and {*set().union(*inside)} not in inside

    def distributed(self, node: Reduction, factor: Node, over: Sequence[str]) -> Node | None:
        """A sum of sums, if one term is a product of matrices."""
        found = patterns.terms(factor)
        if len(found) < 2 or not any(self.is_product(term, over) for _, term in found):
            return None
        return patterns.sum_of([(s, Reduction("sum", node.indexes, term, node.at)) for s, term in found])

    def summed(
        self, node: Reduction, inside: list[Node], over: Sequence[str], order: Sequence[str], addend: Addend | None
    ) -> Value:
        inner = (*order, *over)
        if taps := self.taps(inside, over):
            v = self.convolved(inside, over, taps, order, addend)
            v = self.rows.instead(self.over(node, inside), order) if v is None else v
            return self.unrolled(self.over(node, inside), taps, order) if v is None else v
        if not inside:
            return self.reduced(node, Value(1), over, order)
        if (v := self.rows.instead(self.over(node, inside), order)) is not None:
            return v
        if len(inside) == 2 and inside[0] == inside[1]:
            inside = [Call("^", (inside[0], Number(2)), inside[0].at)]
        square = inside[0]
        if (
            len(inside) == 1
            and isinstance(square, Call)
            and square.function == "^"
            and square.arguments[1] == Number(2)
        ):
            root = self.value(square.arguments[0], inner)
            if not root.constant and all(name in root.axes for name in over):
                return self.tried(node, lambda: _sum_squares(root, over))
        values = [self.value(factor, inner) for factor in inside]
        if len(values) == 1:
            return self.reduced(node, values[0], over, order)
        everyone = [*dict.fromkeys(name for v in values for name in v.axes)]
        times = numel(self.extents[name] for name in over if name not in everyone)
        kept = [name for name in order if name in everyone]
        kept += [name for name in everyone if name not in over and name not in kept]
        v = self.tried(node, lambda: contract(values, kept, self.extents, addend if times == 1 else None))
        return v if times == 1 else self.of_two("*", node, v, self.times(node, times), order)

    def times(self, node: Reduction, n: Any) -> Value:
        if varies(n):
            raise self.wrong(
                node, "a sum over the batch of a value that is the same for each sample: take mean, or multiply"
            )
        return Value(int(n))

    @staticmethod
    def over(node: Reduction, factors: Sequence[Node]) -> Reduction:
        """The same reduction, of a product of factors."""
        body = factors[0]
        for factor in factors[1:]:
            body = call("*", body, factor)
        return Reduction(node.how, node.indexes, body, node.at)

    # ------------------------------------------------------------ windows
    def convolved(
        self, inside: list[Node], over: Sequence[str], taps: list[str], order: Sequence[str], addend: Addend | None
    ) -> Value | None:
        """A sum over windows as a row of convolution or of pooling."""
        sliding = [factor for factor in inside if self.taps([factor], over)]
        others = [factor for factor in inside if factor not in sliding]
        if len(sliding) != 1 or not isinstance(sliding[0], Element):
            return None
        if not others:
            return self.pooling("sum", sliding[0], over, taps, order)
        found = self.windows(sliding[0], taps)
        if found is None:
            return None
        element, windows = found
        if element.beyond and not all(w.inside and not w.transposed for w in windows):
            return None
        x, values = self.value(element, order), [self.value(factor, (*order, *over)) for factor in others]
        everyone = {*x.axes, *order, *(w.tap for w in windows)}
        kept = [*dict.fromkeys(v for value in values for v in value.axes if v in everyone or v not in over)]
        w = contract(values, kept, self.extents)
        left = [v for v in over if v not in {*x.axes, *w.axes}]
        if left or not w.axes:
            return None
        weights = self.variable(w)
        return self.tried(element, lambda: convolution(x, weights, windows, {*over}, self.extents, addend))

    def pooling(self, how: str, body: Node, over: Sequence[str], taps: list[str], order: Sequence[str]) -> Value | None:
        """An extremum, sum or mean over a window as a row of pooling."""
        if how not in ("max", "min", "sum", "mean") or not isinstance(body, Element):
            return None
        found = self.windows(body, taps)
        if found is None:
            return None
        element, windows = found
        x = self.value(element, order)
        v = self.tried(element, lambda: pooled(how, x, windows, self.extents, element.beyond))
        rest = [name for name in over if name not in taps]
        if v is None or not rest:
            return v
        return self.reduced(Reduction(how, tuple(map(Index, rest)), body, body.at), v, rest, order)

    def seen_at_once(self, body: Node, taps: Sequence[str]) -> Element | None:
        """An expression whose elements are all at one place of a window, as an element of a new array; None if they are not.

        The array is computed once per place, and in a row of pooling the first of equal elements gets the gradient.
        """
        at: dict[str, Node] = {}

        def rule(node: Node) -> Node:
            if not isinstance(node, Element):
                return node
            places = [*node.places]
            for k, (place, n) in enumerate(zip(node.places, self.shape(node))):
                if names(place) & {*taps}:
                    new = next((v for v, p in at.items() if p == placed(place) and self.extents[v] == n), None)
                    at[new := new or self.another(n)] = placed(place)
                    places[k] = Name(new)
            return Element(node.array, tuple(places), node.beyond, node.at)

        value = rewritten(body, rule)
        free = names(value)
        if isinstance(body, Element) or not at or free & set().union(*map(names, at.values())):
            return None
        kept = self.indexes(value)
        array = next(self.fresh)
        self.parts[array] = Equation(array, tuple(map(Index, kept)), value, self.text, body.at)
        self.found.shapes[array] = tuple(self.extents[v] for v in kept)
        element = Element(array, tuple(at.get(v, Name(v)) for v in kept), at=body.at)
        found = self.windows(element, taps)
        return element if found and all(w.inside for w in found[1]) else None

    def unrolled(self, node: Reduction, taps: Sequence[str], order: Sequence[str]) -> Value:
        """A reduction over windows, unrolled over the taps."""
        n = numel(self.extents[name] for name in taps)
        self.few(node, n)
        rest = tuple(i for i in node.indexes if i.name not in taps)
        fold, total = FOLDS[node.how], None
        for at in product(*(range(int(self.extents[name])) for name in taps)):
            by: dict[str, Node] = dict(zip(taps, map(Number, at)))
            body = substituted(node.body, by)
            v = self.value(Reduction(node.how, rest, body, node.at) if rest else body, order)
            total = v if total is None else self.of_two(fold, node, total, v, order)
        assert total is not None
        if node.how == "mean":
            total = self.of_two("/", node, total, Value(int(n)), order)
        return total

    # ------------------------------------------------------------ softmax, and a loss of it
    def soft(self, node: Call, order: Sequence[str]) -> Value:
        """softmax, or its logarithm, over indexes; the row works on the last axis."""
        over = [self._name(argument) for argument in node.arguments[1:]]
        v = self.variable(self.value(node.arguments[0], order))
        rest = [name for name in v.axes if name not in over]
        lead = [self.extents[name] for name in rest]
        classes = [self.extents[name] for name in over]
        y = apply(node.function, reshaped(ordered(v, (*rest, *over)), (*lead, numel(classes))))
        return Value(reshaped(y, (*lead, *classes)), (*rest, *over))

    def cross_entropy(self, node: Reduction, order: Sequence[str]) -> Value | None:
        """The mean of ``-log_softmax(x)``, picked by labels, over everything, as its row."""
        body = patterns.rewritten(self.opened(node.body), self.opened, self.extents)
        if not (isinstance(body, Call) and body.function == "neg"):
            return None
        pick = body.arguments[0]
        if not (isinstance(pick, Call) and pick.function == "pick"):
            return None
        soft, name, place = pick.arguments
        over = [i.name for i in node.indexes]
        x, label = self.value(soft.arguments[0], order), self.value(place, order)  # type: ignore[union-attr]
        classes = self._name(name)
        if {*x.axes} != {*over, classes} or {*label.axes} != {*over} or x.constant:
            return None
        logits, target = ordered(x, (*over, classes)), ordered(label, over)
        return Value(apply("softmax_cross_entropy", logits, target))


def _joined(given: Sequence[Value], order: Sequence[str]) -> list[str]:
    """The axes of a result: those of a value that has all of them, else in the given order."""
    found = [*dict.fromkeys(name for v in given for name in v.axes)]
    for v in given:
        if len(v.axes) == len(found):
            return [*v.axes]
    place = {name: k for k, name in enumerate(order)}
    return sorted(found, key=lambda name: place.get(name, len(place)))


def _sum_squares(v: Value, over: Sequence[str]) -> Value:
    at = tuple(v.axes.index(name) for name in over)
    return Value(F.sum_squares(v.data, at), tuple(name for name in v.axes if name not in over))

"""Gradients of equations, as equations: each equation reversed, with sums over all places where an element is read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from calcvm.equations.cost import value_weight, weight
from calcvm.equations.deltas import solved
from calcvm.equations.functions import DERIVATIVES, derivative
from calcvm.equations.grammar import wrong
from calcvm.equations.ranges import Ranges
from calcvm.equations.reuse import pointwise, reused
from calcvm.equations.scope import Scope, extent, refused
from calcvm.equations.shared import Shared
from calcvm.equations.simplify import (
    addends,
    conjunction,
    deep,
    factored,
    factors,
    guarded,
    product,
    simplified,
    total,
    where,
)
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
    arrays,
    call,
    own_elements,
    parts,
    substituted,
    values,
    walk,
    with_parts,
)
from calcvm.errors import CalcError
from calcvm.frozen import frozen

CONSTANT = (*COMPARISONS, "and", "or", "not", "stop", "sign", "floor", "ceil", "rint", "//")
TWO = Number(2)


@frozen
class Gradient:
    """Equations of a gradient.

    forward : the equations that were derived, with each reduction as a separate equation; the backward reads some of their results.
    backward : the gradient, computed from ``seeds`` and results of ``forward``.
    of, seeds : names of gradients, by the arrays that they belong to; those of results are given.
    sizes : further parameters of the backward: sizes of the batch, if it reads no array with that axis.
    """

    forward: tuple[Equation, ...]
    backward: tuple[Equation, ...]
    of: dict[str, str]
    seeds: dict[str, str]
    sizes: dict[str, Any]

    @property
    def equations(self) -> tuple[Equation, ...]:
        """The backward, preceded by the equations of the forward that it needs."""
        return (*needed(self.forward, {a for e in self.backward for a in values(e.value)}), *self.backward)


def gradient(
    equations: Sequence[Equation],
    wrt: Collection[str],
    outs: Collection[str],
    found: Ranges,
    integers: Collection[str] = (),
) -> Gradient:
    """Equations of the gradient, with respect to arrays ``wrt``, of the sum of results ``outs``, each times its seed.

    Parameters
    ----------
    equations : checked equations; ``found`` are their ranges.
    integers : operands of integers.  Operands read in places need not be listed.

    Raises
    ------
    CalcError : a name is not an array; an equation has no derivative, or sets an array that an earlier one sets or reads.

    Examples
    --------
    >>> from calcvm.equations.grammar import read
    >>> from calcvm.equations.ranges import ranges
    >>> from calcvm.equations.text import show_equations
    >>> softmax = read("y[r,j] = exp(x[r,j] - logsumexp[k] x[r,k])")
    >>> found = gradient(softmax, ["x"], ["y"], ranges(softmax, {"x": (4, 5)}, {}))
    >>> show_equations(found.backward)
    't2[r] = sum[j] dy[r,j]*y[r,j]; dx[r,j] = y[r,j]*(dy[r,j] - t2[r])'
    """
    for kind, known, wanted in (("array", [*found.shapes], wrt), ("result", [e.name for e in equations], outs)):
        for name in wanted:
            if name not in known:
                raise CalcError(f"there is no {kind} {name!r} to derive; there are {', '.join(known)}")
    return _Reverse(equations, wrt, outs, found, integers).all()


def needed(equations: Sequence[Equation], wanted: Iterable[str]) -> list[Equation]:
    """The equations that the wanted results need, in their order."""
    names, out = {*wanted}, []
    for equation in reversed(equations):
        if equation.name in names:
            names |= values(equation.value)
            out.append(equation)
    return out[::-1]


def _updates(equation: Equation) -> bool:
    """Whether it reads the old value of its result."""
    kept = tuple(Name(i.name) for i in equation.kept or ())
    return Name(equation.name) in walk(equation.value) or any(e.places == kept for e in own_elements(equation))


Contribution = tuple[
    tuple[Node, ...], Node, tuple[str, ...]
]  # places, the value added there, and the indexes over which it is added


class _Reverse:
    def __init__(
        self,
        equations: Sequence[Equation],
        wrt: Collection[str],
        outs: Collection[str],
        found: Ranges,
        integers: Collection[str],
    ):
        self.wrt, self.outs = list(wrt), list(outs)
        self.scope = Scope(found, equations, integers)
        self.shared = Shared(self.scope)
        self.parts: dict[str, list[Contribution]] = {}
        for k, equation in enumerate(equations):
            if any(equation.name == e.name or equation.name in values(e.value) for e in equations[:k]) or _updates(
                equation
            ):
                raise refused(equation, f"{equation.name} is used before: a gradient needs another name for the result")
            self.forward(self.scope.opened(equation))
        self.forwards = self.shared.equations
        self.shared.equations, self.shared.derives = [], True
        self.axes_of = {e.name: [i.name for i in e.kept or ()] for e in self.forwards}

    def forward(self, equation: Equation) -> None:
        own = any(isinstance(n, Reduction) and equation.name in arrays(n) for n in walk(equation.value))
        if own:
            raise refused(equation, f"a scan in a reduction has no gradient: read {equation.name} outside it")
        value = self.shared.lifted(equation.value, top=True)
        self.shared.add(Equation(equation.name, equation.kept, value, equation.text, equation.at))

    # ------------------------------------------------------------ all equations
    def all(self) -> Gradient:
        scope = self.scope
        self.needs = self.reached()
        self.seeds = {out: scope.array(f"d{out}", scope.shapes[out]) for out in self.outs}
        made: dict[str, str] = {}
        for equation in reversed(self.forwards):
            self.equation(equation, made)
        for name in self.wrt:
            if name not in made:
                made[name] = self.adjoint(name, self.summed(name))
        backward = self.finished(self.shared.equations, [made[name] for name in self.wrt])
        of = {name: made[name] for name in self.wrt}
        backward, of = self.renamed(backward, of)
        (forward, _), (shown, sizes) = scope.closed(self.forwards), scope.closed(backward)
        return Gradient(tuple(forward), tuple(shown), of, self.seeds, sizes)

    def reached(self) -> set[str]:
        """Arrays that depend on those in ``wrt``."""
        out = {*self.wrt}
        for equation in self.forwards:
            if out & {*arrays(equation.value)}:
                out.add(equation.name)
        return out

    def equation(self, equation: Equation, made: dict[str, str]) -> None:
        """The gradients of an equation's result and of the arrays that it reads."""
        name = equation.name
        if name not in self.needs or (name not in self.outs and name not in self.parts):
            return
        kept = tuple(i.name for i in equation.kept or ())
        own = tuple(map(Name, kept))
        self.current, self.at = equation, Element(name, own)
        if own_elements(equation):  # a scan: its gradient reads itself
            made[name] = self.scope.array(f"d{name}", self.scope.shapes[name])
            self.back(equation.value, Element(made[name], own), kept)
            value, axes = self.summed(name)
            self.shared.add(Equation(made[name], axes, value))
            return
        value, axes = self.summed(name)
        if name in self.wrt:
            made[name] = self.adjoint(name, (value, axes))
        if value == ZERO:
            return
        seed = substituted(value, {i.name: place for i, place in zip(axes, own)})
        _, above, below = factors(value)
        if below or len(above) > 1 or not all(isinstance(f, Element) for f in above):
            array = made.get(name) or self.adjoint(name, (value, axes))
            seed = Element(array, own)
        self.back(equation.value, seed, kept)

    def adjoint(self, name: str, found: tuple[Node, tuple[Index, ...]]) -> str:
        """Add an equation of an array's gradient; returns the gradient's name."""
        value, axes = found
        made = self.scope.array(f"d{name}", self.scope.shapes[name])
        self.shared.add(Equation(made, axes, value))
        return made

    # ------------------------------------------------------------ one equation
    def back(self, node: Node, seed: Node, free: tuple[str, ...]) -> None:
        """Record the contribution to each element that the node reads, if the node's gradient is ``seed``."""
        if seed == ZERO or not self.needs & {*arrays(node)}:
            return
        if isinstance(node, Element):
            if node.array in self.needs:
                self.parts.setdefault(node.array, []).append((node.places, seed, free))
        elif isinstance(node, Reduction):
            self.reduction(node, seed, free)
        elif isinstance(node, Call) and node.function not in CONSTANT:
            value = self.at if node is self.current.value else node
            for argument, times in zip(node.arguments, self.derivatives(node, value)):
                if times != ZERO and self.needs & {*arrays(argument)}:
                    self.back(argument, self.simple(call("*", seed, times)), free)

    def simple(self, node: Node) -> Node:
        return guarded(simplified(node))

    def derivatives(self, node: Call, value: Node) -> tuple[Node, ...]:
        """The derivatives of a function with this value, by its arguments."""
        function, a = node.function, node.arguments
        match function:
            case "+":
                return ONE, ONE
            case "-":
                return ONE, Number(-1)
            case "neg":
                return (Number(-1),)
            case "*":
                return a[1], a[0]
            case "/":
                return call("/", ONE, a[1]), call("neg", call("/", value, a[1]))
            case "%":
                return ONE, call("neg", call("//", *a))
            case "^":
                return self.power(a[0], a[1], value)
            case "where":
                return ZERO, call("where", a[0], ONE, ZERO), call("where", a[0], ZERO, ONE)
            case "max" | "min":
                first = call(">=" if function == "max" else "<=", *a)
                return call("where", first, ONE, ZERO), call("where", first, ZERO, ONE)
            case "logaddexp":  # equal infinities have no difference
                alike = call("and", call("==", *a), call("==", call("abs", a[0]), Number(float("inf"))))
                ways = call("-", *a), call("-", *a[::-1])
                return tuple(call("where", alike, Number(0.5), call("sigmoid", off)) for off in ways)
        if function not in DERIVATIVES:
            raise wrong(self.current.text, node.at, f"the function {function} has no derivative here")
        return (substituted(derivative(function), {"x": a[0], "y": value}),)

    def power(self, base: Node, exponent: Node, value: Node) -> tuple[Node, Node]:
        slope = call("*", exponent, call("^", base, simplified(call("-", exponent, ONE))))
        if not isinstance(exponent, Number):
            slope = call("where", call("==", exponent, ZERO), ZERO, slope)
        return slope, call("where", call("==", base, ZERO), ZERO, call("*", value, call("log", base)))

    def reduction(self, node: Reduction, seed: Node, free: tuple[str, ...]) -> None:
        over = tuple(i.name for i in node.indexes)
        inner, body = free + over, node.body
        count = product(1, map(extent, over))
        match node.how:
            case "sum":
                times: Node = ONE
            case "mean":
                times = call("/", ONE, count)
            case "var":
                mean = self.shared.lifted(self.anew(Reduction("mean", node.indexes, body)))
                times = call("/", call("*", TWO, call("-", body, mean)), count)
            case "logsumexp":
                times = call("exp", call("-", body, self.at))
            case "max" | "min":
                place: Node = Name(over[0])
                for v in over[1:]:
                    n = self.scope.extents[v]
                    place = call("+", call("*", place, Number(n) if isinstance(n, int) else extent(v)), Name(v))
                first = self.anew(Reduction(f"arg{node.how}", node.indexes, body))
                first = self.shared.lifted(first, name=f"arg_{self.current.name}")
                self.scope.integers |= {*arrays(first)}
                times = call("where", call("==", place, first), ONE, ZERO)
            case "prod":
                other = {v: Name(self.scope.again(v)) for v in over}
                same = conjunction(call("==", new, Name(v)) for v, new in other.items())
                rest = call("where", same, ONE, substituted(body, other))
                times = self.shared.lifted(Reduction("prod", tuple(Index(n.name) for n in other.values()), rest))
            case _:
                return
        self.back(body, self.simple(call("*", seed, times)), inner)

    def anew(self, node: Reduction) -> Node:
        """The reduction over fresh indexes."""
        return substituted(node, {i.name: Name(self.scope.again(i.name)) for i in node.indexes})

    # ------------------------------------------------------------ sums
    def summed(self, name: str) -> tuple[Node, tuple[Index, ...]]:
        """The gradient of an array: its seed, plus the contributions to its elements."""
        found = self.parts.pop(name, [])
        axes = self.axes(name, found)
        own = tuple(map(Name, axes))
        terms = [self.one(own, *contribution) for contribution in found]
        if name in self.outs:
            terms.insert(0, Element(self.seeds[name], own))
        value = self.simple(total([term for node in terms for term in addends(node)]))
        value = self.shorter(value)
        return value, tuple(map(Index, axes))

    def axes(self, name: str, found: list[Contribution]) -> list[str]:
        """New indexes for its axes, named as in the places where it is read."""
        shape = self.scope.shapes[name]
        out: list[str] = []
        for k, n in enumerate(shape):
            read = [c[0][k] for c in found]
            plain = [p.name for p in read if isinstance(p, Name) and self.scope.extents.get(p.name) == n]
            plain = [*self.axes_of.get(name, [])[k : k + 1], *plain]
            used = {v.split("'")[0] for v in out}
            other = f"{name.lower().lstrip('_0123456789') or 'i'}{k}"
            like = next((v for v in plain if v.split("'")[0] not in used), other)
            out.append(self.scope.index(like, n))
        return out

    def one(self, own: tuple[Name, ...], places: tuple[Node, ...], seed: Node, free: tuple[str, ...]) -> Node:
        """The sum over ``free`` of the seed where the places equal the array's ``own``; its sums become equations."""
        left, value, guards = solved(self.scope, list(free), list(zip(own, places)), seed)
        value = reused(self.simple(where(guards, value)), self.patterns(self.shared.equations), self.scope)
        if left:
            value = Reduction("sum", tuple(map(Index, left)), value)
        value = self.shared.inward(value)
        return simplified(self.shared.lifted(value, top=isinstance(value, Reduction)))

    def patterns(self, before: Sequence[Equation]) -> list[Equation]:
        return [e for e in (*self.forwards, *before) if pointwise(e)]

    def shorter(self, value: Node) -> Node:
        """The value, with small equations of the backward inlined if that is cheaper."""
        if isinstance(value, Reduction):
            return value
        value = self.shared.lifted(value)
        by = {e.name: e for e in self.shared.equations if not isinstance(e.value, Reduction) and not own_elements(e)}
        other = self.simple(inlined(value, by, self.scope))
        return other if value_weight(other, self.scope) < value_weight(value, self.scope) else value

    # ------------------------------------------------------------ the whole
    def finished(self, equations: Sequence[Equation], wanted: list[str]) -> list[Equation]:
        """The needed equations in their cheapest forms, with those that are read once inlined."""
        equations = needed(equations, wanted)
        out: list[Equation] = []
        single: dict[str, Equation] = {}
        for equation in equations:
            value = equation.value
            if not isinstance(value, Reduction):
                patterns = self.patterns([e for e in out if e.name not in single])
                value = self.cheapest(value, patterns)
                other = self.cheapest(inlined(value, single, self.scope), patterns)
                gone = sum(weight(single[name], self.scope) for name in arrays(value) if name in single)
                if value_weight(other, self.scope) < value_weight(value, self.scope) + gone:
                    value = other
            equation = Equation(equation.name, equation.kept, value)
            small = not isinstance(value, Reduction) and equation.name not in wanted and not own_elements(equation)
            if small and sum(_count(e.value, equation.name) for e in equations) == 1:
                single[equation.name] = equation
            out.append(equation)
        return needed(out, wanted)

    def cheapest(self, value: Node, patterns: Sequence[Equation]) -> Node:
        value = self.simple(value)
        forms = [value, reused(value, patterns, self.scope)]
        forms += [deep(form, factored) for form in forms]
        return min(forms, key=lambda value: value_weight(value, self.scope))

    def renamed(self, equations: list[Equation], of: dict[str, str]) -> tuple[list[Equation], dict[str, str]]:
        """Merge gradients that only copy another array of the backward with that array."""
        for made in of.values():
            by = {e.name: e for e in equations}
            value = by[made].value
            if not isinstance(value, Element) or value.array not in by or value.array in of.values():
                continue
            if value.places != tuple(Name(i.name) for i in by[made].kept or ()):
                continue
            copied = value.array
            equations = [_with_array(e, copied, made) for e in equations if e.name != made]
        return equations, of


def _count(node: Node, array: str) -> int:
    return sum(isinstance(n, Element) and n.array == array for n in walk(node))


def _with_array(equation: Equation, old: str, new: str) -> Equation:
    def go(node: Node) -> Node:
        below = parts(node)
        node = with_parts(node, tuple(map(go, below))) if below else node
        return Element(new, node.places, node.beyond) if isinstance(node, Element) and node.array == old else node

    name = new if equation.name == old else equation.name
    return Equation(name, equation.kept, go(equation.value))


def inlined(node: Node, by: dict[str, Equation], scope: Scope) -> Node:
    """The node with elements of these equations replaced by their values, except in sums and where a place may be outside."""
    if isinstance(node, Reduction):
        return node
    if isinstance(node, Element) and node.array in by:
        equation = by[node.array]
        kept = equation.kept or ()
        inside = [
            isinstance(p, Name) and scope.extents.get(p.name) == scope.extents[i.name]
            for p, i in zip(node.places, kept)
        ]
        if all(inside):
            return inlined(substituted(equation.value, {i.name: p for i, p in zip(kept, node.places)}), by, scope)
    below = parts(node)
    return with_parts(node, tuple(inlined(part, by, scope) for part in below)) if below else node

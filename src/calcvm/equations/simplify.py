"""Simplified values: constants folded, terms and factors collected, conditions moved outside what they guard."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from calcvm.equations.places import placed
from calcvm.equations.tree import (
    COMPARISONS,
    ONE,
    ZERO,
    Call,
    Element,
    Name,
    Node,
    Number,
    Reduction,
    call,
    names,
    parts,
    with_parts,
)

FINITE: tuple[str, ...] = (
    "+",
    "-",
    "*",
    "neg",
    "abs",
    "sin",
    "cos",
    "atan",
    "tanh",
    "erf",
    "sigmoid",
    "sign",
    "relu",
    "max",
    "min",
)
FINITE += ("floor", "ceil", "rint", "stop")
COMPARE: dict[str, Callable[[float, float], bool]] = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def simplified(node: Node) -> Node:
    """A simpler value that is equal wherever all its numbers are finite.

    Constants are folded; ``1*t``, ``0*t``, ``t + 0``, ``t - t``, ``t/t`` and double signs disappear; products and sums are flat.
    """
    return rewritten_values(node, _simpler)


def rewritten_values(node: Node, rule: Callable[[Node], Node]) -> Node:
    """``rule`` applied to every node except places, bottom-up.  Places get their canonical form."""
    if isinstance(node, Element):
        return with_parts(node, tuple(map(placed, node.places)))
    below = parts(node)
    return rule(with_parts(node, tuple(rewritten_values(part, rule) for part in below)) if below else node)


def _simpler(node: Node) -> Node:
    if isinstance(node, Reduction):
        return ZERO if node.how == "sum" and node.body == ZERO else node
    if not isinstance(node, Call):
        return node
    function, arguments = node.function, node.arguments
    if function in ("*", "/", "neg"):
        return product(*factors(node))
    if function in ("+", "-"):
        return total(addends(node))
    if function == "^":
        return _power(node, *arguments)
    if function == "where":
        return chosen(*arguments)
    if function == "and":
        return conjunction(conditions(node))
    return node


def _power(node: Call, base: Node, exponent: Node) -> Node:
    if exponent == ONE:
        return base
    if exponent == ZERO:
        return ONE
    if isinstance(base, Number) and isinstance(exponent, Number) and base.value > 0 and math.isfinite(base.value):
        return Number(float(base.value) ** exponent.value)
    return node


# ---------------------------------------------------------------- products
def factors(node: Node) -> tuple[int | float, list[Node], list[Node]]:
    """A product as (number, factors, divisors).  A number that divides is a divisor."""
    if isinstance(node, Number) and math.isfinite(node.value):
        return node.value, [], []
    if isinstance(node, Call) and node.function in ("*", "/", "neg"):
        c, above, below = factors(node.arguments[0])
        if node.function == "neg":
            return -c, above, below
        d, more, under = factors(node.arguments[1])
        if node.function == "*":
            return c * d, above + more, below + under
        if d == 0:
            return c, above, [*below, node.arguments[1]]
        return c, above + under, [*below, *more, *([] if d == 1 else [Number(d)])]
    return 1, [node], []


def product(number: int | float, above: Iterable[Node], below: Iterable[Node] = ()) -> Node:
    """``number * above / below``, with common factors canceled."""
    divisor: int | float = 1
    under = []
    for node in below:
        if isinstance(node, Number) and node.value and math.isfinite(node.value):
            divisor *= node.value
        else:
            under.append(node)
    over = []
    for node in above:
        if node in under:
            under.remove(node)
        else:
            over.append(node)
    number, divisor = _lowest(number, divisor)
    if number == 0:
        return ZERO
    sign = number == -1 and bool(over)
    out = _times(over if sign or number == 1 and over else [Number(number), *over])
    assert out is not None
    down = _times(under if divisor == 1 else [Number(divisor), *under])
    if down is not None:
        out = call("/", out, down)
    return call("neg", out) if sign else out


def _times(nodes: Iterable[Node]) -> Node | None:
    out = None
    for node in nodes:
        out = node if out is None else call("*", out, node)
    return out


def _lowest(number: int | float, divisor: int | float) -> tuple[int | float, int | float]:
    if divisor < 0:
        number, divisor = -number, -divisor
    if isinstance(number, int) and isinstance(divisor, int):
        common = math.gcd(number, divisor)
        return number // common, divisor // common
    return number / divisor, 1


# ---------------------------------------------------------------- sums
def addends(node: Node) -> list[tuple[int | float, Node]]:
    """A sum as its terms, each a number and its factor."""
    if isinstance(node, Call) and node.function in ("+", "-"):
        first, second = map(addends, node.arguments)
        return first + (second if node.function == "+" else [(-c, rest) for c, rest in second])
    c, above, below = factors(node)
    return [(c, product(1, above, below))] if c else []


def total(terms: Iterable[tuple[int | float, Node]]) -> Node:
    """The sum of terms: equal ones merged, one that is not subtracted first, numbers last if possible."""
    found: dict[Node, int | float] = {}
    number: int | float = 0
    for c, node in terms:
        if node == ONE:
            number += c
        else:
            found[node] = found.get(node, 0) + c
    left = [(c, node) for node, c in found.items() if c]
    if number:
        left.append((number, ONE))
    first = next((k for k, (c, _) in enumerate(left) if c > 0), 0)
    left = [*left[first : first + 1], *left[:first], *left[first + 1 :]]
    out: Node = ZERO
    for c, node in left:
        if out is ZERO:
            out = product(*_scaled(c, node))
        else:
            out = call("+" if c > 0 else "-", out, product(*_scaled(abs(c), node)))
    return out


def _scaled(c: int | float, node: Node) -> tuple[int | float, list[Node], list[Node]]:
    number, above, below = factors(node)
    return c * number, above, below


# ---------------------------------------------------------------- conditions
def conditions(node: Node) -> list[Node]:
    """The conditions that a conjunction consists of."""
    if isinstance(node, Call) and node.function == "and":
        return [c for argument in node.arguments for c in conditions(argument)]
    return [node]


def conjunction(nodes: Iterable[Node]) -> Node:
    """The conjunction of at least one condition; equal ones count once."""
    out = None
    for node in dict.fromkeys(nodes):
        out = node if out is None else call("and", out, node)
    assert out is not None
    return out


def chosen(condition: Node, yes: Node, no: Node) -> Node:
    """``where(condition, yes, no)``."""
    known = _truth(condition)
    if known is not None:
        return yes if known else no
    if yes == no:
        return yes
    if isinstance(yes, Call) and yes.function == "where" and yes.arguments[2] == no:
        inner, yes, _ = yes.arguments
        return chosen(conjunction([*conditions(condition), *conditions(inner)]), yes, no)
    return call("where", condition, yes, no)


def where(guards: Iterable[Node], node: Node) -> Node:
    """The value if all of these hold, else 0."""
    guards = [guard for guard in guards if _truth(guard) is not True]
    return chosen(conjunction(guards), node, ZERO) if guards else node


def _truth(node: Node) -> bool | None:
    """The truth of a comparison of numbers; None for anything else."""
    if not isinstance(node, Call) or node.function not in COMPARISONS:
        return None
    a, b = node.arguments
    return COMPARE[node.function](a.value, b.value) if isinstance(a, Number) and isinstance(b, Number) else None


def finite(node: Node) -> bool:
    """Whether a value is finite if the elements that it reads are; then 0 times it is 0."""
    if isinstance(node, Number):
        return math.isfinite(node.value)
    if isinstance(node, Element):
        return math.isfinite(node.beyond)
    if isinstance(node, Call):
        if node.function == "where":
            return all(map(finite, node.arguments[1:]))
        return node.function in FINITE and all(map(finite, node.arguments))
    return isinstance(node, Name)


def zero_where(node: Node) -> tuple[Node, Node, bool] | None:
    """(condition, value, whether the value applies if the condition holds), for a value that is otherwise 0; else None."""
    if isinstance(node, Call) and node.function == "where":
        condition, yes, no = node.arguments
        if no == ZERO:
            return condition, yes, True
        if yes == ZERO:
            return condition, no, False
    return None


def guarded(node: Node) -> Node:
    """The value with conditions moved outside what they guard: ``where(c, a, 0)/b`` becomes ``where(c, a/b, 0)``.

    A finite factor that has more indexes than the condition stays outside, since it may belong to a contraction.
    """
    return rewritten_values(node, _guarded)


def _guarded(node: Node) -> Node:
    if isinstance(node, Call) and node.function in ("*", "/", "neg"):
        return guarded_product(*factors(node))
    if isinstance(node, Call) and node.function in ("+", "-"):
        return total(_merged(addends(node)))
    return node


def guarded_product(number: int | float, above: list[Node], below: list[Node]) -> Node:
    for k, factor in enumerate(above):
        found = zero_where(factor)
        if found is None:
            continue
        condition, value, holds = found
        others = [*above[:k], *above[k + 1 :]]
        known = names(factor)
        inside = [isinstance(value, Number) or not finite(f) or names(f) <= known for f in others]
        more = factors(value)
        value = guarded_product(
            number * more[0], [*(f for f, i in zip(others, inside) if i), *more[1]], [*below, *more[2]]
        )
        pulled = chosen(condition, value, ZERO) if holds else chosen(condition, ZERO, value)
        return product(1, [*(f for f, i in zip(others, inside) if not i), pulled])
    return product(number, above, below)


def _merged(terms: list[tuple[int | float, Node]]) -> Iterator[tuple[int | float, Node]]:
    """Terms under the same condition merged to one, ``where(c, a, b)``."""
    by: dict[Node, tuple[list, list]] = {}
    for c, node in terms:
        found = zero_where(node)
        if found is None:
            yield c, node
        else:
            condition, value, holds = found
            by.setdefault(condition, ([], []))[not holds].extend((c * d, rest) for d, rest in addends(value))
    for condition, (yes, no) in by.items():
        if len(yes) == 1 and not no:
            yield yes[0][0], chosen(condition, yes[0][1], ZERO)
        else:
            yield 1, chosen(condition, total(yes), total(no))


# ---------------------------------------------------------------- common factors
def factored(node: Node) -> Node:
    """A sum with the most common factor of its terms moved out: ``a*b - a*c`` becomes ``a*(b - c)``."""
    terms = addends(node)
    if len(terms) < 2:
        return node
    found = [_scaled(c, rest) for c, rest in terms]
    count: dict[tuple[Node, bool], int] = {}
    for _, above, below in found:
        for factor in dict.fromkeys([(f, True) for f in above] + [(f, False) for f in below]):
            count[factor] = count.get(factor, 0) + 1
    factor, most = max(count.items(), key=lambda item: item[1], default=((ONE, True), 0))
    if most < 2:
        return node
    common, up = factor
    inside, outside = [], []
    for c, above, below in found:
        side = above if up else below
        if common in side:
            side.remove(common)
            inside.append((c, product(1, above, below)))
        else:
            outside.append((c, product(1, above, below)))
    number, above, below = factors(factored(total(inside)))
    held = product(number, [common, *above], below) if up else product(number, above, [common, *below])
    return factored(total([(1, held), *outside])) if outside else held


def deep(node: Node, rule: Callable[[Node], Node]) -> Node:
    """``rule`` applied to all outermost sums."""
    if isinstance(node, Call) and node.function in ("+", "-"):
        return rule(node)
    return with_parts(node, tuple(deep(part, rule) for part in parts(node)))

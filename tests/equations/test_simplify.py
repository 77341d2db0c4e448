"""Values in simpler forms: the same numbers, shorter texts."""

from __future__ import annotations

import numpy as np
import pytest

from calcvm.equations.deltas import solved
from calcvm.equations.grammar import read
from calcvm.equations.meaning import evaluate
from calcvm.equations.ranges import ranges
from calcvm.equations.scope import Scope
from calcvm.equations.simplify import conjunction, factored, finite, guarded, simplified
from calcvm.equations.text import show
from calcvm.equations.tree import Equation, Index, Name, Node
from tests.equations.generate import generate


def value(text: str) -> Node:
    return read(f"y = {text}")[0].value


@pytest.mark.parametrize(
    "text, want",
    [
        ("1*a*1", "a"),
        ("0*a + b", "b"),
        ("a + 0 - 0", "a"),
        ("2*3*a/4", "3*a/2"),
        ("a*b/a", "b"),
        ("a/b/c*b", "a/c"),
        ("--a", "a"),
        ("-(-a*b)", "a*b"),
        ("a - (b - a)", "2*a - b"),
        ("-a + b", "b - a"),
        ("-a - b", "-a - b"),
        ("1 - a - 3 + a", "-2"),
        ("2*a - a", "a"),
        ("a*b - b*a + c", "a*b - b*a + c"),  # factors stay in their order
        ("a^1 + b^0", "a + 1"),
        ("0.5*a/0.25", "2*a"),
        ("where(1 < 2, a, b)", "a"),
        ("where(a > 0, b, b)", "b"),
        ("where(a > 0, where(b > 0, c, 0), 0)", "where(a > 0 and b > 0, c, 0)"),
        ("sum[i] 0*a", "0"),
        ("a/0", "a/0"),
    ],
)
def test_simpler_forms(text: str, want: str) -> None:
    assert show(simplified(value(text))) == want


@pytest.mark.parametrize(
    "text, want",
    [
        ("where(a > 0, 1, 0)*b", "where(a > 0, b, 0)"),
        ("b*where(a > 0, b, 0)/a", "where(a > 0, b*b/a, 0)"),
        ("-(where(a > 0, 0, c)/log(a))", "where(a > 0, 0, -(c/log(a)))"),
        ("where(a > 0, b, 0)*where(b > 0, a, 0)", "where(a > 0 and b > 0, b*a, 0)"),
        ("where(a > 0, b, 0) + where(a > 0, 0, c)", "where(a > 0, b, c)"),
        ("where(m[i] > 0, p[i], 0)*x[i,j]", "x[i,j]*where(m[i] > 0, p[i], 0)"),  # a contraction's other factor
        ("where(m[i] > 0, p[i], 0)*exp(x[i,j])", "where(m[i] > 0, exp(x[i,j])*p[i], 0)"),  # which may be infinite
    ],
)
def test_conditions_outside_what_they_guard(text: str, want: str) -> None:
    assert show(guarded(simplified(value(text)))) == want


@pytest.mark.parametrize(
    "text, want",
    [
        ("a*b - a*c", "a*(b - c)"),
        ("a*b + c", "a*b + c"),
        ("a/c - b/c", "(a - b)/c"),
        ("a*b*c - a*b + a", "a*(b*(c - 1) + 1)"),
        ("2*a*b + 4*a", "a*(2*b + 4)"),
    ],
)
def test_common_factors(text: str, want: str) -> None:
    assert show(factored(simplified(value(text)))) == want


@pytest.mark.parametrize(
    "text, is_one",
    [("x[i]*2 + tanh(i)", True), ("x[i; -inf]", False), ("1/x[i]", False), ("exp(x[i])", False), ("inf", False)],
)
def test_what_is_finite(text: str, is_one: bool) -> None:
    assert finite(value(text)) == is_one


@pytest.mark.parametrize("first", range(0, 100, 50))
def test_random_values_stay_what_they_are(first: int) -> None:
    for seed in range(first, first + 50):
        drawn = generate(seed)
        equations = read(drawn.text)
        want = evaluate(equations, drawn.values)
        for rule in (simplified, lambda node: guarded(simplified(node))):
            changed = [Equation(e.name, e.kept, rule(e.value)) for e in equations]
            got = evaluate(changed, drawn.values)
            for name, array in want.items():
                np.testing.assert_allclose(got[name], array, rtol=1e-9, atol=1e-9, err_msg=drawn.text)


# ---------------------------------------------------------------- places
@pytest.mark.parametrize(
    "place, free, want",
    [
        ("o", {"o": 7}, "dy[j]"),
        ("o", {"o": 5}, "dy[j]"),  # dy is as long as o runs
        ("o*2 - 1 + t", {"o": 5, "t": 3}, "dy[(j + 1 - t)/2]"),
        ("6 - o", {"o": 7}, "dy[6 - j]"),
        ("(o + 1)/2", {"o": 7}, "dy[j*2 - 1]"),
        ("3", {"o": 7}, "where(j == 3, dy[o], 0)"),
        ("ids[o]", {"o": 7}, "where(j == ids[o], dy[o], 0)"),
        ("o//2", {"o": 7}, "where(j == o // 2, dy[o], 0)"),
    ],
)
def test_places_are_solved_for_the_index_with_the_largest_range(place: str, free: dict[str, int], want: str) -> None:
    scope = _scope(free)
    left, found, guards = solved(scope, [*free], [(Name("j"), value(place))], value("dy[o]"))
    text = show(found) if not guards else f"where({show(conjunction(guards))}, {show(found)}, 0)"
    assert text == want and {*left} == {*free} - ({"o"} if "dy[o]" not in want else set())


def test_a_place_that_may_be_beyond_is_a_condition() -> None:
    scope = _scope({"o": 5, "t": 3})
    _, found, guards = solved(scope, ["o", "t"], [(Name("j"), value("o*2 - 1 + t"))], value("1/dy[o]"))
    assert show(found) == "1/dy[(j + 1 - t)/2]"
    assert show(conjunction(guards)) == "(j + 1 - t) % 2 == 0 and 0 <= j + 1 - t"  # j is at most 6


def _scope(free: dict[str, int]) -> Scope:
    equations = read("y[j] = x[j]")
    scope = Scope(ranges(equations, dict(x=(7,), dy=(free["o"],), ids=(7,)), {}), equations, ["ids"])
    scope.extents |= {**free, "j": 7}
    scope.sizes |= {f"#{name}": n for name, n in scope.extents.items()}
    return scope


def test_an_index_keeps_its_name_where_it_can() -> None:
    equations = read("y[j] = x[j]")
    scope = Scope(ranges(equations, dict(x=(7,), k=()), {}), equations)
    kept = tuple(Index(scope.index(like, n)) for like, n in (("j", 7), ("j", 7), ("j", 3), ("k", 2)))
    (closed,), sizes = scope.closed([Equation("z", kept, value("1"))])
    assert [i.name for i in closed.kept or ()] == ["j", "j_", "j__", "k_"] and not sizes  # k is an operand
    (other,), _ = scope.closed([Equation("z", kept[2:3], value("1"))])
    assert [i.name for i in other.kept or ()] == ["j_"]  # j runs over 7

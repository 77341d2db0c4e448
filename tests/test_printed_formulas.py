"""Printed equations say what is computed: read by the rules of arithmetic alone, they are the formulas' own trees."""

from __future__ import annotations

import re

import numpy as np

from calcvm.equations import grammar
from calcvm.equations.tree import Call, Node, Number, call, rewritten, substituted
from calcvm.formulas import number as n
from calcvm.formulas.declare import ELEMENTWISE, PAIR_LOSSES, UPDATES, arguments
from calcvm.formulas.number import Text, Trace, traced
from calcvm.script import code


def read(text: str) -> Node:
    """The tree of a text: the last equation's value, with those before put in."""
    *named, last = grammar.read(text)
    known: dict[str, Node] = {}
    for equation in (*named, last):
        known[equation.name] = rewritten(substituted(equation.value, known), signed)
    return known[last.name]


def signed(node: Node) -> Node:
    """-(a*b) is (-a)*b, and -(a/b) is (-a)/b, to the bit."""
    if isinstance(node, Call) and node.function == "neg":
        (of,) = node.arguments
        if isinstance(of, Number):
            return Number(-of.value)
        if isinstance(of, Call) and of.function in ("*", "/"):
            return call(of.function, signed(call("neg", of.arguments[0])), of.arguments[1])
    return node


def spelt(value: Text) -> str:
    """With parentheses around everything."""
    parts = [spelt(part) for part, _ in value.parts]
    return (
        f"({value.form.format(*parts)})" if parts else value.form if re.match(r"\w", value.form) else f"({value.form})"
    )


def agrees(value: Text) -> None:
    text = value.trace.program("y", value)
    assert read(text) == read(f"y = {spelt(value)}"), (text, spelt(value))


def test_printed_formulas_of_the_table_are_what_is_computed():
    formulas = [f for op in ELEMENTWISE.values() for f in op.formulas]
    formulas += [f for loss in PAIR_LOSSES.values() for f in (loss.term, *loss.slopes.values())]
    for f in formulas:
        agrees(f.traced())
    steps = [fn for update in UPDATES.values() for fn in update.steps.values()]
    for fn in steps:
        agrees(traced(fn, *map(Trace().of, arguments(fn))))
    assert len(formulas) >= 100 and len(steps) >= 20


MAKE = [
    lambda x, y: x + y, lambda x, y: x - y, lambda x, y: x * y, lambda x, y: x / y, lambda x, y: -x, lambda x, y: n.exp(x),
    lambda x, y: n.fabs(x), lambda x, y: n.where(x > y, y, x), lambda x, y: x * 0.5, lambda x, y: 1 - x, lambda x, y: x * -2.0,
    lambda x, y: n.where(n.equal(x, 0), 0.0, y), lambda x, y: n.fma(x, y, x),
]  # fmt: skip


def test_any_printed_formula_is_what_is_computed(whole):
    """Products of quotients, sums of differences, signs, choices and what is used again."""
    for seed in range(20_000 if whole else 300):
        rng, trace = np.random.default_rng(seed), Trace()
        made = [trace.of(name) for name in "abc"]
        for _ in range(rng.integers(2, 9)):
            x, y = (made[i] for i in rng.integers(len(made), size=2))
            made.append(MAKE[rng.integers(len(MAKE))](x, y))
        agrees(made[-1])


def test_a_quotient_of_large_numbers_is_in_a_script_what_it_is_in_the_formula():
    for formula in (lambda x, y, z: x * (y / z), lambda x, y, z: x * (y / z) * (y / z), lambda x, y, z: -(x * (y / z))):
        of = code.trace()
        scope = dict.fromkeys("xyz", 1e200)
        exec(said := of.program("y", formula(*map(of.of, "xyz"))), scope)
        assert abs(scope["y"]) == 1e200, said

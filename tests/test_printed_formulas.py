"""Printed equations say what is computed: read by the rules of arithmetic alone, they are the formulas' own trees."""

from __future__ import annotations

import re

import numpy as np

from calcvm.formulas import number as n
from calcvm.formulas.declare import ELEMENTWISE, PAIR_LOSSES, UPDATES, arguments
from calcvm.formulas.number import Text, Trace, traced
from calcvm.script import code

TOKEN = re.compile(r"\s*(\d+\.?\d*(?:e[-+]?\d+)?|\w+|<=|>=|!=|.)")
LEVELS = [("and", "or", "xor"), ("=", "!=", "<", "<=", ">", ">="), ("+", "-"), ("*", "/")]  # the last binds closest


class Reader:
    """A tree of an equation: (operator, operands...), names and numbers as texts."""

    def __init__(self, text: str, known: dict[str, object]):
        self.tokens, self.known = TOKEN.findall(text), known

    def whole(self) -> object:
        tree = self.choice()
        assert not self.tokens, self.tokens
        return tree

    def take(self, *wanted: str) -> str:
        return self.tokens.pop(0) if self.tokens and (not wanted or self.tokens[0] in wanted) else ""

    def choice(self) -> object:
        tree = self.chain(0)
        if self.take("?"):
            first = self.choice()
            assert self.take(":")
            tree = ("?", tree, first, self.choice())
        return tree

    def chain(self, level: int) -> object:
        """Operators of a level, from the left."""
        if level == len(LEVELS):
            return self.sign()
        if level == 1 and self.take("not"):
            return ("not", self.chain(1))
        tree = self.chain(level + 1)
        while name := self.take(*LEVELS[level]):
            tree = (name, tree, self.chain(level + 1))
        return tree

    def sign(self) -> object:
        if self.take("-"):
            return negative(self.sign())
        tree = self.atom()
        while self.take("^"):
            tree = ("^", tree, self.atom())
        return tree

    def atom(self) -> object:
        name = self.take()
        if name in ("(", "|"):
            tree = self.choice()
            assert self.take(")" if name == "(" else "|")
            return tree if name == "(" else ("|", tree)
        assert re.match(r"\w", name), name
        if self.take("("):
            operands = [self.choice()]
            while self.take(","):
                operands.append(self.choice())
            assert self.take(")")
            return (name, *operands)
        return self.known.get(name, name)


def negative(tree: object) -> object:
    """-(a*b) is (-a)*b, and -(a/b) is (-a)/b, to the bit."""
    if isinstance(tree, tuple) and tree[0] in ("*", "/"):
        return (tree[0], negative(tree[1]), tree[2])
    return ("-", tree)


def read(text: str) -> object:
    """What is said, with what stands after "where" put in its place."""
    said, _, rest = text.partition(" where ")
    known: dict[str, object] = {}
    for named in re.split(r", (?=u\d+ = )", rest) if rest else []:
        name, _, of = named.partition(" = ")
        known[name] = Reader(of, known).whole()
    return Reader(said, known).whole()


def spelt(value: Text) -> str:
    """With parentheses around everything."""
    parts = [spelt(part) for part, _ in value.parts]
    return (
        f"({value.form.format(*parts)})" if parts else value.form if re.match(r"\w", value.form) else f"({value.form})"
    )


def agrees(value: Text) -> None:
    assert read(value.text) == read(spelt(value)), (value.text, spelt(value))


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
        said = of.text(formula(*map(of.of, "xyz")))
        assert abs(eval(said, dict.fromkeys("xyz", 1e200))) == 1e200, said

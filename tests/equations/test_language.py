"""The language of equations: texts and trees, what is refused and where the caret stands, ranges, values."""

from __future__ import annotations

import random

import numpy as np
import pytest

import calcvm as cv
from calcvm.equations.check import check
from calcvm.equations.grammar import MOST_LEVELS, MOST_TERMS, read, read_declarations
from calcvm.equations.kinds import CONDITION, INTEGER, NUMBER
from calcvm.equations.meaning import evaluate
from calcvm.equations.places import linear, placed
from calcvm.equations.ranges import ranges
from calcvm.equations.text import show, show_equation, show_equations
from calcvm.equations.tree import (
    OPERATORS,
    REDUCTIONS,
    Call,
    Element,
    Equation,
    Index,
    Name,
    Node,
    Number,
    Reduction,
    call,
)

SIZES = {"x": (5, 7), "w": (7, 3), "v": (3,), "index": (5,)}
KINDS = {"x": NUMBER, "w": NUMBER, "v": NUMBER, "index": INTEGER}


# ---------------------------------------------------------------- texts and trees
@pytest.mark.parametrize(
    "text",
    [
        "y[b,o] = sum[i] x[b,i]*w[i,o] + v[o]",
        "y = x*sigmoid(x)",
        "y[n,o] = max[t<3] x[n, o*s - p + t*d; -inf]",
        "dx[n,i<9] = sum[t<3,f] dy[n, (i + 1 - t)/2, f]*w[t,f]",
        "m[r] = stop(max[k] x[r,k]); p[r,j] = exp(x[r,j] - m[r])/sum[k] exp(x[r,k] - m[r])",
        "y[r] = x[r, index[r]]",
        "c[k] += momentum*(m[k] - c[k])",
        "y[i] = where(x[i] > 0 and not (x[i] > 1 or x[i] == 2), -x[i]^2, |x[i]|)",
        "y[i] = -mean[k] x[i,k]; z[] = (sum[i] y[i])*2",
        "y = 0.1 + 1e-30*x - 1.0507009873554805",
        "y = x - (a - b) - a/b/c*(d/e)",
    ],
)
def test_canonical_texts_are_written_as_they_are_read(text):
    assert show_equations(read(text)) == text


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("y[ b , o ]=sum[ i ]x[b,i] * w[i,o];", "y[b,o] = sum[i] x[b,i]*w[i,o]"),
        ("y = ((x))", "y = x"),
        ("y = y + x", "y += x"),
        ("y = 2*sum[i] a[i]*b[i]/n + c", "y = 2*(sum[i] (a[i]*b[i])/n) + c"),
        ("y = -x^2", "y = -(x^2)"),
        ("y = 2^3^2", "y = 2^(3^2)"),
        ("y = a or b and not c == d", "y = a or (b and (not (c == d)))"),
        ("y = .5*1.0", "y = 0.5*1"),
    ],
)
def test_texts_that_say_the_same_are_one_tree(text, same):
    assert read(text) == read(same)
    assert show_equations(read(text)) == show_equations(read(same))


def drawn(r: random.Random, depth: int) -> Node:
    kind = r.randrange(12) if depth else r.randrange(3)
    below = depth - 1
    if kind == 0:
        return Number(r.choice([1, 2, -3, 0.5, -0.25, 1e-30, float("inf"), float("-inf"), 1 / 3]))
    if kind == 1:
        return Name(r.choice(["a", "b", "N"]))
    if kind == 2:
        places = tuple(drawn(r, 0) if r.random() < 0.3 else Name("i") for _ in range(r.randint(1, 3)))
        return Element(r.choice("xyz"), places, r.choice([0.0, 0.0, float("-inf"), -1.5]))
    if kind < 5:
        extent = r.choice([None, Number(3), call("+", Name("a"), Name("b"))])
        return Reduction(r.choice(REDUCTIONS), (Index("k", extent),), drawn(r, below))
    if kind < 9:
        return call(r.choice(OPERATORS), drawn(r, below), drawn(r, below))
    if kind == 9:
        of = drawn(r, below)
        return of if isinstance(of, Number) else call("neg", of)
    return (
        call(r.choice(["abs", "exp", "not"]), drawn(r, below)) if kind == 10 else call("where", *(drawn(r, below),) * 3)
    )


def test_any_tree_is_read_from_its_text(whole):
    r = random.Random(1)
    for _ in range(50_000 if whole else 2000):
        kept = r.choice([None, (), (Index("i"),), (Index("i", Number(4)), Index("j"))])
        equation = Equation("y", kept, drawn(r, 4))
        assert read(text := show_equation(equation)) == (equation,), text


def test_any_text_is_an_equation_or_refused_with_a_caret(whole):
    r = random.Random(2)
    pieces = [
        *"xyzijk0123()[]|,;<>=+-*/%^. ",
        "sum",
        "max",
        "where",
        "and",
        "not",
        "inf",
        "==",
        "<=",
        "+=",
        "1e9",
        "é",
        "\n",
    ]
    base = "y[b,o] = sum[i<3] x[b, o*2 + i; -inf]*where(w[i,o] > 0, 1, v) + |max(a, b)|"
    for _ in range(50_000 if whole else 2000):
        text = list(base)
        for _ in range(r.randint(1, 4)):
            at = r.randrange(len(text))
            text[at : at + r.randint(0, 2)] = [r.choice(pieces)] if r.random() < 0.7 else []
        said = "".join(text)
        try:
            assert read(show_equations(read(said))) == read(said)
        except cv.CalcError as error:
            assert str(error).endswith("^") or "is wanted at the end" in str(error), (said, error)


# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("text", "what", "under"),
    [
        ("y[b,o] = sum[i x[b,i]", "',' or ']' is wanted here, not 'x'", "x[b,i]"),
        ("y[B] = x[B]", "an index is lowercase: its capital is its extent, as 'B' of 'b'", "B] ="),
        ("y[b] = x[b] x[b]", "an operator or ';' is wanted here, not 'x'", "x[b]$"),
        ("y = 2x", "an operator is wanted between 2 and x, such as 2*x", "x"),
        ("y = a < b < c", "comparisons do not chain: write a < b and b < c", "< c"),
        ("y = a = b", "'=' sets a result: write == to compare, and ; before a further equation", "= b"),
        ("x == 3", "'=' is wanted here, not '=='", "=="),
        ("y = x ? 1 : 2", "'?' is no part of an equation", "?"),
        ("y = sum(x)", "indexes of sum stand in brackets, such as sum[i] x[i]", "(x)"),
        ("y[i] = x[i; a]", "the value of x beyond its ends is a number, such as 0 or -inf", "a]"),
        ("where = 1", "'where' is a word of the language: the name of a result must have another name", "where"),
        ("y[i] = x[]", "an array without axes is read without brackets: x", "]$"),
        ("y = " + "(" * 99 + "x" + ")" * 99, f"more than {MOST_LEVELS} nested levels", "("),
        ("y = " + "x + " * 200 + "x", f"more than {MOST_TERMS} + in a row", "x"),
        ("y[b,o] = sum[k] x[b,i]*w[i,o]", "there is no index, size or operand 'i'; operands are x, w, v, index", "i]*w"),
        ("y[b] = (sum[i] x[b,i])*w[i,0]", "there is no index 'i' outside the reduction that has it", "i,0]"),
        ("y[b,i] = q[b,i]", "there is no operand 'q'; operands are x, w, v, index", "q["),
        ("y[x] = v[x]", "x is the name of an operand: name the index otherwise", "x] ="),
        ("y[b,b] = x[b,b]", "the index b is there already: another index needs another name", "b] ="),
        ("y[b,i] = x[b, i*0.5]", "a place of x is a number: take indexes, sizes, whole numbers", "*0.5"),
        ("y[i,r] = w[i, v[r]]", "a place of w is a number: take indexes, sizes, whole numbers", "v[r]]"),
        ("y[b,i] = x[b,i] and 1", "'and' takes a condition, and this is a number: compare it, as in x > 0", "x[b,i] and"),
        ("y[b,i] = 1 + (x[b,i] > 0)", "'+' takes a number, and this is a condition: choose by it", "> 0"),
        ("y[b] = any[i] x[b,i]", "any is of a condition, and this is a number", "x[b,i]"),
        ("y[b,i] = foo(x[b,i])", "there is no function 'foo'; did you mean floor?", "foo"),
        ("y[b,i] = exp(x[b,i], 2)", "exp takes 1 argument, not 2", "exp"),
        ("y[b,i] = where(x[b,i] > 0, 1, x[b,i] > 1)", "where chooses between an integer and a condition", "where"),
        ("y[b,i] = y[b, 2*i] + x[b,i]", "a scan reads its own result a number of places before, as in i - 1", "*i]"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_shown(text, what, under):
    with pytest.raises(cv.CalcError) as error:
        check(read(text), KINDS, {})
    said, line, caret = str(error.value).split("\n")
    assert said.startswith(what)
    at = caret.index("^") - 4
    assert line[4:] == text
    assert text[at:] == under[:-1] if under.endswith("$") else text[at:].startswith(under)


@pytest.mark.parametrize(
    ("text", "what", "under"),
    [
        ("y[b,o] = sum[i] x[b,i]*w[o,i]", "the index i runs over 7, and over 3 here: w has 3 there", "i]$"),
        (
            "y[b,o] = sum[k] x[b,o]",
            "the range of k is unknown: write it, as in k<10, or read an axis with it",
            "k]",
        ),
        (
            "y[b,i] = x[b, i + 1]",
            "the range of i is unknown: write it, as in i<10, or read an axis with it",
            "i] =",
        ),
        ("y[b] = x[b]", "x has 2 axes (5, 7), and 1 place here", "x[b]"),
        ("y[b] = x[b,0] + v", "v has 1 axis (3,): read an element of it, as in v[...]", "v$"),
        ("y = x + w", "w of shape (7, 3) does not broadcast with (5, 7)", "w"),
        ("y[b,i] = x[b,i]*B*W", "there is no index, size or operand 'W'", "W"),
    ],
)
def test_shapes_that_do_not_fit_are_shown(text, what, under):
    with pytest.raises(cv.CalcError) as error:
        check(equations := read(text), KINDS, {})
        ranges(equations, SIZES, {})
    said, line, caret = str(error.value).split("\n")
    at = caret.index("^") - 4
    assert said.startswith(what) and line[4:] == text
    assert text[at:] == under[:-1] if under.endswith("$") else text[at:].startswith(under)


def test_a_capital_is_an_extent_and_no_operand():
    with pytest.raises(cv.CalcError, match="X would be the extent of the index x, and is an operand"):
        check(read("y[x] = X[x]"), {"X": NUMBER}, {})
    with pytest.raises(cv.ShapeError, match="the index k runs over 3, and K is 4: name the index otherwise"):
        ranges(read("y[k] = v[k]*K"), {"v": (3,)}, {"K": 4})


def test_the_caret_stands_under_the_line_of_a_longer_text():
    with pytest.raises(cv.CalcError) as error:
        read("m[r] = max[k] x[r,k];\ny[r] = m[r")
    assert str(error.value).split("\n")[1:] == ["    y[r] = m[r", "              ^"]


# ---------------------------------------------------------------- kinds, places, ranges
def test_kinds():
    found = check(
        read(
            "a[b,i] = x[b,i] > 0; n[b] = argmax[i] x[b,i]; y[b] = where(a[b,0], n[b], 0.5); k[b] = b + B; z[b] = any[i] a[b,i]"
        ),
        KINDS,
        {},
    )
    assert {name: found[name] for name in "anykz"} == {
        "a": CONDITION,
        "n": INTEGER,
        "y": NUMBER,
        "k": INTEGER,
        "z": CONDITION,
    }


@pytest.mark.parametrize(
    ("one", "other"),
    [("o*s - p + t*d", "t*d + s*o - p"), ("i + 1 - 1", "i"), ("2*(i + 3)", "6 + i*2"), ("-i - j", "-j - i")],
)
def test_places_have_one_form(one, other):
    trees = [placed(read(f"y = {text}")[0].value) for text in (one, other)]
    assert trees[0] == trees[1] and placed(trees[0]) == trees[0]


def test_a_place_is_linear_in_an_index():
    place = read("y = o*s - p + t*d")[0].value
    assert [show(part) for part in linear(place, "t")] == ["d", "o*s - p"]
    assert linear(read("y = t*t")[0].value, "t") is None and linear(read("y = t//2")[0].value, "t") is None


@pytest.mark.parametrize(
    ("n", "s", "p", "d", "taps"), [(9, 1, 0, 1, 3), (9, 2, 1, 1, 3), (10, 3, 2, 2, 2), (5, 1, 4, 1, 5)]
)
def test_windows_that_lie_inside_are_counted_as_a_convolution_counts_them(n, s, p, d, taps):
    found = ranges(read("y[o] = sum[t] x[o*s - p + t*d]*w[t]"), {"x": (n,), "w": (taps,)}, {"s": s, "p": p, "d": d})
    assert found.shapes["y"] == ((n + 2 * p - d * (taps - 1) - 1) // s + 1,)


# ---------------------------------------------------------------- values
X = np.random.default_rng(0).normal(size=(5, 7))


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("y[b,i<7] = x[b, i + 1]", np.pad(X, ((0, 0), (0, 1)))[:, 1:]),
        ("y[b,i<7] = x[b, i - 1; 9]", np.pad(X, ((0, 0), (1, 0)), constant_values=9)[:, :-1]),
        ("y[b,i<14] = x[b, i/2]", np.stack([X, 0 * X], -1).reshape(5, 14)),
        ("y[b,i<7] = x[b, 6 - i]", X[:, ::-1]),
        ("y[b] = x[b, index[b]]", X[range(5), [3, 0, 6, 6, 1]]),
        ("y[b,i] = y[b, i - 1] + x[b,i]", X.cumsum(1)),
        ("y[b,i] = x[b,i] + y[b, i + 1]", X[:, ::-1].cumsum(1)[:, ::-1]),
        ("y[i] = y[i - 1] + x[0,i]", X[0].cumsum()),
        ("y[i] = mean[b] x[b,i]; z[i] = var[b] x[b,i]", X.var(0)),
        ("y[b] = logsumexp[i] 1000*x[b,i]", 1000 * X.max(1)),
        ("y[b<5] = argmax[i<7] where(i > 2, 1, 0)", np.full(5, 3)),
        ("y = sum[b,i] where(x[b,i] > 0, 1/2, 0)", (X > 0).sum() / 2),
        ("y[b] = prod[i<3] x[b,i]", X[:, :3].prod(1)),
        ("y[b] = sum[i,j<4] x[b,i]*x[b,j]*2", 2 * X.sum(1) * X[:, :4].sum(1)),
        ("y = where(x > 0, log(x), 0)", np.log(np.where(X > 0, X, 1))),
        ("y[b<5] = 7//2 + -7//2 + 7%4 + B", np.full(5, 3 - 4 + 3 + 5)),
        ("y[b] = all[i] (x[b,i] < 9 and i < I)", np.full(5, True)),
    ],
)
def test_values(text, want):
    equations = read(text)
    check(equations, {"x": NUMBER, "index": INTEGER}, {})
    made = evaluate(equations, {"x": X, "index": np.array([3, 0, 6, 6, 1])})
    np.testing.assert_allclose(made[equations[-1].name], want, 1e-13, 1e-13)


def test_declarations_say_axes_and_what_is_left_out():
    x, scale = read_declarations("x[n,i<I,c]; scale[c] = 1")
    assert [i.name for i in x.kept] == ["n", "i", "c"] and scale.value == Number(1)
    assert isinstance(read("y = mean[c]", ["mean"])[0].value, Element)
    assert isinstance(read("mean[c] = sum[r] x[r,c]; y[c] = mean[c]")[1].value, Element)
    assert isinstance(read("y = -x")[0].value, Call)

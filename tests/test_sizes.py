"""Size expressions mean one thing: what Python's integers give at every batch, whoever asks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calcvm.ops import ROWS
from calcvm.ops.dims import Affine
from calcvm.ops.sizes import MAX_BATCH, Piecewise, Undecided, evaluate, extent, largest

PYTHON = {"max": max, "min": min, "abs": abs, "ceil_div": lambda n, m: -(-n // m)}
TABLE = sorted(
    {e for row in ROWS.values() for o in row.operands for e in (o.elems, o.part) if e not in ("", "w0")}
    | {e for row in ROWS.values() for e in (*row.require, row.flops)}
)
NAMES = st.sampled_from("xyz")
NUMBERS = st.integers(0, 9).map(str)


def _joined(inner):
    pair = st.tuples(inner, inner)
    return st.one_of(
        pair.map(lambda p: f"({p[0]} + {p[1]})"),
        pair.map(lambda p: f"({p[0]} - {p[1]})"),
        pair.map(lambda p: f"{p[0]}*{p[1]}"),
        pair.map(lambda p: f"min({p[0]}, {p[1]})"),
        pair.map(lambda p: f"max({p[0]}, {p[1]})"),
        inner.map(lambda e: f"abs({e})"),
        st.tuples(inner, st.integers(1, 5)).map(lambda p: f"({p[0]}) // {p[1]}"),
        st.tuples(inner, st.sampled_from(("<", "<=", "==", "!=", ">", ">=")), inner, inner, inner).map(
            lambda p: f"({p[3]} if {p[0]} {p[1]} {p[2]} else {p[4]})"
        ),
        st.tuples(inner, inner, inner).map(lambda p: f"({p[1]} if {p[0]} else {p[2]})"),
    )


EXPRESSIONS = st.recursive(NAMES | NUMBERS, _joined, max_leaves=8)
FORMS = st.builds(Affine, st.integers(0, 4), st.integers(-20, 30))


def at(words, batch):
    return {n: w.at(batch) if isinstance(w, Affine) else w for n, w in words.items()}


def same_at_every_batch(expression, words, batches):
    """Compare with Python's integers; returns the size, or None where the expression is refused."""
    try:
        size = extent(expression, words)
    except Undecided:
        return None
    want = {b: eval(expression, PYTHON, at(words, b)) for b in batches}
    assert {b: size.at(b) for b in batches} == want, f"{expression} over {words} is {size}"
    last = max(batches)
    assert {b: size.until(last).at(b) for b in batches} == want
    try:
        least, most = size.bounds(last)
    except Undecided:
        return size
    assert least <= min(want.values()) and max(want.values()) <= most
    if len(batches) == last:
        assert (least, most) == (min(want.values()), max(want.values()))
    return size


@given(EXPRESSIONS, FORMS, FORMS, FORMS)
@settings(max_examples=1000, deadline=None)
def test_sizes_are_exact_at_every_batch(expression, x, y, z):
    same_at_every_batch(expression, {"x": x, "y": y, "z": z}, range(1, 61))


@given(EXPRESSIONS, FORMS)
@settings(max_examples=300, deadline=None)
def test_linear_expressions_of_one_size_are_never_refused(expression, x):
    """Only products of sizes and divisions can have no form."""
    if "//" not in expression and "*" not in expression:
        assert same_at_every_batch(expression, {"x": x, "y": 3, "z": 7}, range(1, 61)) is not None


@pytest.mark.parametrize("expression", TABLE)
def test_every_expression_of_the_table_is_exact(expression):
    """Each size of a row in turn is the batch, the others small numbers: as most graphs have it."""
    names = [n for n in compile(expression, "size", "eval").co_names if n not in PYTHON]
    for batch_word in names:
        for others in (0, 1, 2, 600):
            for form in (Affine(1, 0), Affine(3, 0), Affine(2, 1)):
                words = {n: form if n == batch_word else others for n in names}
                size = same_at_every_batch(expression, words, (1, 2, 3, 170, 171, 511, 512, 513, 2000, MAX_BATCH))
                assert size is not None or "ceil_div" in expression


def test_equal_forms_cancel_and_equal_sizes_compare_equal():
    batch = Affine(1, 0)
    assert evaluate("rows - first - d0", {"rows": batch, "first": 0, "d0": batch}) == 0
    assert evaluate("a0 - (1 + (d1 - 1)*a1)", {"a0": batch, "d1": batch, "a1": 1}) == 0
    assert evaluate("d0 if d0 == rows else 0", {"rows": batch, "d0": batch}) == batch
    a, b = (evaluate(e, {"n": batch}) for e in ("2*min(n, 512)", "min(n, 512)*2"))
    assert isinstance(a, Piecewise) and a == b and hash(a) == hash(b)
    assert a != evaluate("2*min(n, 511)", {"n": batch})
    assert a.until(512) == Affine(2, 0) == evaluate("2*min(n, 511)", {"n": batch}).until(511)


def test_what_has_no_form_is_refused():
    for expression in ("n // 2", "ceil_div(n, 2)", "7 // n", "1 if (n - 3)*(n - 9) > 0 else 0"):
        with pytest.raises(Undecided):
            evaluate(expression, {"n": Affine(1, 0)})
    with pytest.raises(Undecided, match="monotonic"):
        extent("(n - 3)*(n - 9)", {"n": Affine(1, 0)}).bounds(20)
    assert extent("(2*n + 5) // 2", {"n": Affine(1, 0)}) == Affine(1, 2)
    assert extent("ceil_div(4*n + 5, 4)", {"n": Affine(1, 0)}) == Affine(1, 2)


@given(EXPRESSIONS, EXPRESSIONS, FORMS)
@settings(max_examples=200, deadline=None)
def test_the_larger_of_two_sizes_is_so_at_every_batch(a, b, x):
    try:
        sizes = [extent(e, {"x": x, "y": 3, "z": 7}) for e in (a, b)]
        both = largest(*sizes)
    except Undecided:
        return
    assert [both.at(n) for n in range(1, 61)] == [max(s.at(n) for s in sizes) for n in range(1, 61)]

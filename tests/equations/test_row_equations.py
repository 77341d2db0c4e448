"""Rows beside their equations: each example, by the CPU's kernel and by the equation alone, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import pytest

from calcvm.equations.check import check
from calcvm.equations.grammar import read
from calcvm.equations.kinds import INTEGER
from calcvm.equations.meaning import evaluate
from calcvm.equations.places import size
from calcvm.equations.tree import Index, Node, Reduction, bound, rewritten
from calcvm.errors import CalcError
from calcvm.ops import OPS, ROWS, epilogues
from calcvm.ops.equation import read_row as read_once
from calcvm.ops.repetition import each
from calcvm.ops.sizes import evaluate as size_of
from calcvm.ops.spec import Operand, RowSpec
from calcvm.ops.specialized import specialized
from calcvm.script.evaluation import activation, row_values
from tests.rowrun import Case, _row_runs, cases, run_row, words_of

MOST_WITHOUT = 22  # twelve are of recurrent cells


def readable(row: RowSpec) -> bool:
    try:
        read_once(row)
    except CalcError:
        return False
    return True


def has_equation(row: RowSpec) -> bool:
    return not row.no_equation


NAMES = [name for name, spec in OPS.items() if any(map(has_equation, spec.rows))]


# ---------------------------------------------------------------- what there is
def test_every_row_has_an_equation_or_says_why_not():
    without = {name for name, row in ROWS.items() if row.no_equation}
    assert len(without) <= MOST_WITHOUT
    assert not [name for name, row in ROWS.items() if name not in without and not readable(row)]


def operands_of(row: RowSpec, known: set[str]) -> list[Operand]:
    """Those that are there, without scratch."""
    return [o for o in row.operands if o.access != "s" and not (o.optional and o.name not in known)]


def numbers_of(row: RowSpec, words: Mapping[str, Any]) -> dict[str, Any]:
    """The row's words as numbers."""
    known = words_of(row, words)
    return {w.name: float(known[w.name]) if w.kind == "float" else int(known[w.name]) for w in row.words}


@pytest.mark.parametrize("name", NAMES)
def test_declared_extents_are_those_of_equations(name):
    for case in cases(OPS[name], "float64"):
        for row in filter(has_equation, case.spec.rows):
            axes, words = read_once(row).axes, numbers_of(row, case.words)
            for operand in operands_of(row, case.known()):
                if operand.name in axes:  # all that are read or set by places
                    want = prod(int(size(n, words)) for n in axes[operand.name])
                    got = int(size_of(operand.elems, words_of(row, case.words)))
                    assert got == want, f"{row.name}: {operand.name} of {case.example.shapes}"


# ---------------------------------------------------------------- numbers
def beside_kernel(row: RowSpec, words: Mapping[str, Any], values: dict, known: set[str], what: str) -> None:
    """The row's results by its kernel, and by its equation."""
    got = run_row(row, words, values, "float64", known=known)
    there = {o.name: values[o.name] for o in operands_of(row, known) if o.name in values}
    made = row_values(row, numbers_of(row, words), there)
    for name, value in got.items():
        value, want = value.astype(np.float64), made[name].astype(np.float64)
        most = np.abs(want[np.isfinite(want)]).max(initial=0)
        np.testing.assert_allclose(value, want, 1e-12, 1e-12 * most, err_msg=f"{row.name}: {name} of {what}")


def runs(name: str, whole: bool) -> Iterator[tuple[Case, RowSpec, dict[str, np.ndarray]]]:
    """Every example with --whole, else three."""
    found = cases(OPS[name], "float64")
    for case in found[:: 1 if whole else -(-len(found) // 3)]:
        yield from ((case, row, values) for row, values in _row_runs(case) if has_equation(row))


@pytest.mark.parametrize("name", NAMES)
def test_kernels_compute_equations(name, whole):
    for case, row, values in runs(name, whole):
        beside_kernel(row, case.words, values, case.known(), f"{case.example.shapes}, {case.attrs}")


@pytest.mark.parametrize("axes", [-1, 4, 99])
@pytest.mark.parametrize("name", NAMES)
def test_what_listings_print_is_what_is_computed(name, axes, whole):
    """With flags, numbers and what is left out put in, and without axes of one place."""
    for case, row, values in runs(name, whole):
        equation, words = read_once(row), numbers_of(row, case.words)
        known = {k: v for k, v in words.items() if isinstance(v, int)}
        there = {
            o.name: values[o.name] for o in operands_of(row, case.known()) if o.access in "ru" and o.name in values
        }
        reads = [o.name for o in row.operands if o.access in "ru"]
        gone = [n for n in reads if n not in there] + [o.name for o in row.writes if o.name not in case.known()]
        orders = row.lies(words) if row.lies else {}
        special = specialized(equation, words, gone, axes, orders)
        if any(e.kept is None for e in special.equations) or any(o.name == "hyper" for o in row.operands):
            continue
        indexes = {i.name: i.extent for e in equation.equations for i in bound(e)}
        given = {}
        for operand, value in there.items():
            if operand in equation.axes:
                sizes = [int(size(equation.axes[operand][k], known)) for k in special.axes[operand]]
                given[operand] = value.reshape(sizes)
        said = [
            replace(e, kept=_ranged(e.kept, indexes), value=rewritten(e.value, partial(_said, extents=indexes)))
            for e in special.equations
        ]
        made = evaluate(said, given, words, activation(words))
        want = row_values(row, words, there)
        for e in special.equations:
            if e.name in want:
                most = np.abs(want[e.name][np.isfinite(want[e.name])]).max(initial=0)
                np.testing.assert_allclose(
                    np.broadcast_to(made[e.name].reshape(-1), want[e.name].shape), want[e.name], 1e-12, 1e-12 * most,
                    err_msg=f"{row.name}: {e.name} of {case.example.shapes}, {case.attrs}",
                )  # fmt: skip


def _ranged(indexes: tuple[Index, ...], extents: Mapping[str, Any]) -> tuple[Index, ...]:
    return tuple(Index(i.name, extents[i.name]) for i in indexes)


def _said(node: Node, extents: Mapping[str, Any]) -> Node:
    return Reduction(node.how, _ranged(node.indexes, extents), node.body) if isinstance(node, Reduction) else node


@pytest.mark.parametrize("name", [n for n in NAMES if any(row.takes for row in OPS[n].rows)])
def test_kernels_compute_equations_with_epilogues(name, whole):
    rng = np.random.default_rng(3)
    for case, row, values in runs(name, whole):
        own = epilogues.operands_of(row.takes, "", "")
        sizes = {o.name: int(size_of(row.operand(o.name).elems, words_of(row, case.words))) for o in own}
        drawn = {n: rng.uniform(-1, 1, many) for n, many in sizes.items()}
        words = {**case.words, "act": 2, "alpha": 0.3} if epilogues.words_of(row.takes) else case.words
        beside_kernel(row, words, {**values, **drawn}, case.known() | {*drawn}, f"{case.example.shapes} completed")


@pytest.mark.parametrize("name", [n for n in NAMES if any(o.access == "a" for r in OPS[n].rows for o in r.operands)])
def test_kernels_add_what_equations_say(name, whole):
    for case, row, values in runs(name, whole):
        if any(o.access == "a" for o in row.operands):
            beside_kernel(row, {**case.words, "acc": 1}, values, case.known(), f"{case.example.shapes} added")


@pytest.mark.parametrize(("name", "read_from", "written"), [("page_out", "x", "page"), ("page_in", "page", "y")])
def test_pages(name, read_from, written):
    """Kernels need a file: tests/test_paging.py has them."""
    values = np.arange(7.0)
    assert row_values(ROWS[name], {"n": 7}, {read_from: values})[written].tolist() == values.tolist()


# ---------------------------------------------------------------- what rows needed of the language
def test_integers_stay_whole_beside_the_ends():
    large = np.array([2**53 + 1, -(2**62) - 1])
    equations = read("y[i<3] = x[i]; z[j<3] = x[j; -1]; e[k<3] = none[k] + x[0]")
    made = evaluate(equations, {"x": large, "none": large[:0]})
    assert made["y"].tolist() == [*large.tolist(), 0] and made["z"].tolist() == [*large.tolist(), -1]
    assert made["e"].tolist() == [2**53 + 1] * 3


def test_a_place_may_reflect():
    equations = read("y[i<5] = x[2 - |2 - i|]")
    assert check(equations, {"x": INTEGER}, {}) == {"x": INTEGER, "y": INTEGER}
    assert evaluate(equations, {"x": np.array([3, 5, 7])})["y"].tolist() == [3, 5, 7, 5, 3]
    with pytest.raises(CalcError, match="a place of x is a number"):
        check(read("y[i<5] = x[|i - 0.5|]"), {"x": INTEGER}, {})


def test_equations_of_several_axes_are_written_for_one():
    assert each("dhw", "y[n,{od<OD}] = x[n, {od*sd - pd}] if {and d < D and od > 0}") == (
        "y[n,od<OD,oh<OH,ow<OW] = x[n, od*sd - pd, oh*sh - ph, ow*sw - pw] "
        "if d < D and od > 0 and h < H and oh > 0 and w < W and ow > 0"
    )
    assert each("01", "{; a0[i] = i*s0}; y[i] = {+ a0[i]}; d0 = {* min(k0, 1)}") == (
        "a0[i] = i*s0; a1[i] = i*s1; y[i] = a0[i] + a1[i]; d0 = min(k0, 1)*min(k1, 1)"
    )

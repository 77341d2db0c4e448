"""Rows of the table by kernels that follow from their equations: beside these in float64, in both types, by teams.

In `make test` a sample; ``pytest --whole tests/equations/test_plain_rows.py`` takes every row and every example.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from calcvm.errors import CalcError
from calcvm.ops import OPS, ROWS
from calcvm.ops.spec import RowSpec
from calcvm.script.evaluation import row_values
from tests.equations.test_row_equations import NAMES, numbers_of, operands_of
from tests.plainrows import as_plain, plain_of
from tests.rowrun import EPS, Case, _row_runs, cases, run_row, same_bits

TOLERANCES = {"float64": 1e-12, "float32": 256 * EPS["float32"]}
TEAMS = (2, 3)
SAMPLE = ("exp", "softmax", "max_pool", "pick", "layer_norm", "transpose")
# LLVM takes one to two minutes for each example of these: the first is taken, in one type
ONE_TYPE = {"attention": "float32", "attention_packed": "float64"}
# LLVM takes over nine minutes for this one's kernel, which is that of attention_bwd with its operands side by side
TOO_LONG = ("attention_packed_bwd",)
NOT_PLAIN = {  # rows of which no plain kernel can be made, by why
    "its whole operands are of several extents": 40,
    "it updates an operand": 17,
    "its results begin with different indexes, so workers cannot share them": 6,
    "it has no equation": 22,
    "words say how its operands lie": 3,
    "an integer word stands after a float": 1,
    "kh has no indexes": 1,
    "it reads slots of hyperparameters": 1,
}


def why_not(error: CalcError) -> str:
    """The reason without the row's name, and without what is this row's alone."""
    return next((why for why in NOT_PLAIN if why in str(error)), str(error))


def test_rows_that_are_not_plain():
    """Those that have become plain, or are no more, show here."""
    found: Counter[str] = Counter()
    for row in ROWS.values():
        try:
            plain_of(row, "plain")
        except CalcError as error:
            found[why_not(error)] += 1
    assert found == NOT_PLAIN


def rows_beside_equations(
    case: Case, made: Callable[[RowSpec], RowSpec] = as_plain, refused: Sequence[str] = ()
) -> None:
    """The rows of a case that ``made`` makes plain ones of; others are none of the table's, or refused for reasons."""
    dtype = case.dtype
    for row, values in _row_runs(case):
        if row.name in TOO_LONG:
            continue
        try:
            plain = made(row)
        except CalcError as error:
            assert why_not(error) in NOT_PLAIN or any(why in str(error) for why in refused), error
            continue
        known, what = case.known(), f"{row.name} of {case.example.shapes}, {case.attrs}"
        got = run_row(plain, case.words, values, dtype, known=known)
        for n in TEAMS:
            for operand, value in run_row(plain, case.words, values, dtype, known=known, n_workers=n).items():
                assert same_bits(value, got[operand]), f"{operand} of {what} differs by {n} workers"
        there = {o.name: values[o.name] for o in operands_of(row, known) if o.name in values}
        said = row_values(row, numbers_of(row, case.words), there)
        for operand, value in got.items():
            want, tolerance = said[operand].astype(np.float64), TOLERANCES[dtype]
            most = np.abs(want[np.isfinite(want)]).max(initial=0)
            np.testing.assert_allclose(
                value.astype(np.float64), want, tolerance, tolerance * most, err_msg=f"{operand} of {what}"
            )


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", NAMES)
def test_plain_kernels_compute_rows(name, dtype, whole):
    if not whole and name not in SAMPLE:
        pytest.skip("with --whole")
    if ONE_TYPE.get(name, dtype) != dtype:
        pytest.skip("the other of the two does this type")
    every = [*cases(OPS[name], dtype)]
    for case in every[:1] if not whole or name in ONE_TYPE else every:
        rows_beside_equations(case)

"""Kernels for a GPU from elsewhere: what they are written with, which fit their rows, and by what compiled ones are kept."""

from __future__ import annotations

import numpy as np
import pytest

import calcvm as cv
from calcvm.kernels_cuda._common import KERNELS, Kernel
from calcvm.kernels_cuda._loops import elementwise
from calcvm.operators import OpSpec, R, RowSpec, W, dims, register_op, rows_cols, same_shape
from calcvm.operators.cuda import Float, Ptr, given, kernel, like, share, thread, threads
from calcvm.ops import spec as table
from tests.cuda.simulated import Simulated

SIZE = "rows*cols"


@pytest.fixture
def own():
    """An operator y = x + b of the user, b optional, for the time of a test."""
    before = [(known, dict(known)) for known in (table.OPS, table.ROWS, KERNELS)]
    operands = (R("x", SIZE, "rows"), R("b", SIZE, "rows", optional=True), W("y", SIZE, "rows"))
    row = RowSpec(name="own_fwd", synopsis="y = x + b", words=dims("rows cols"), operands=operands)
    register_op(
        OpSpec(
            name="own", synopsis="y = x + b", category="binary", inputs=("x", "b"), shape=same_shape,
            words=lambda shapes, attrs: rows_cols(shapes["x"]), fwd=(row,),
        )
    )  # fmt: skip
    yield
    for known, was in before:
        known.clear()
        known.update(was)


def test_an_operand_may_be_left_out(own):
    @kernel
    def own_fwd(me, rows, cols, x: Ptr, b: Ptr, y: Ptr):
        lo, hi = share(me, rows)
        i = lo * cols + thread()
        while i < hi * cols:
            y[i] = x[i] + (b[i] if given(me, b) else like(x, 0.5))
            i += threads()

    cells = np.arange(32, dtype=np.float32)
    for b_off, want in ((8, np.arange(8.0) * 2 + 8), (-1, np.arange(8.0) + 0.5)):
        Simulated().run("own_fwd", "float32", cells, np.array([0, 0, 2, 4, 0, b_off, 16]), 2, 0, None, False)
        assert np.array_equal(cells[16:24], want) and np.array_equal(cells[24:], np.arange(24.0, 32.0))


def test_a_kernel_that_does_not_fit_its_row_is_refused(own):
    def of_team(w, nw, rows, cols, x: Ptr, b: Ptr, y: Ptr):
        pass

    def in_another_order(me, cols, rows, x: Ptr, b: Ptr, y: Ptr):
        pass

    def of_numbers(me, rows, cols, x: Ptr, b: Float, y: Ptr):
        pass

    for wrong in (of_team, in_another_order, of_numbers):
        wrong.__name__ = "own_fwd"
        with pytest.raises(cv.CalcError, match=r"must be \(me, rows, cols, x: Ptr, b: Ptr, y: Ptr\)"):
            kernel(wrong)
        assert "own_fwd" not in KERNELS


def test_compiled_kernels_are_kept_by_their_code():
    def helped(factor):
        def half(x):
            return x * factor

        def own_fwd(me, rows, x: Ptr):
            x[0] = half(x[0])

        return Kernel(own_fwd).mark

    def by(formula):
        loop = elementwise(formula)

        def own_fwd(me, rows, x: Ptr):
            loop(0, rows, (x,), x, ())

        return Kernel(own_fwd).mark

    assert helped(2) == helped(2) != helped(3)
    assert by(lambda x: x + x) == by(lambda x: x + x) != by(lambda x: x * x)

"""Rows that move values between the heap and its pages: a file beside it, of a size that is planned too.

No operator of a graph has them: the planner puts them in.  A page lies beyond the heap's end in the same count of elements, so
that who wrote what is found as it is for all other values; of the operands of all rows, only those that say so may lie there.
"""

from __future__ import annotations

from dataclasses import replace

from calcvm.ops.spec import R, RowSpec, W, dims, instruction
from calcvm.ops.types import CELLS

PAGE_OUT = instruction(
    RowSpec(
        name="page_out",
        synopsis="page[k<n] = x[k]",
        words=dims("n"),
        operands=(R("x", "n", "n", type=CELLS), replace(W("page", "n", "n", type=CELLS), paged=True)),
    )
)
PAGE_AHEAD = instruction(
    RowSpec(
        name="page_ahead",
        synopsis="page will be read soon",
        no_equation="it computes nothing",
        words=dims("n"),
        operands=(replace(R("page", "n", "n", type=CELLS), paged=True),),
    )
)
PAGE_IN = instruction(
    RowSpec(
        name="page_in",
        synopsis="y[k<n] = page[k]",
        words=dims("n"),
        operands=(replace(R("page", "n", "n", type=CELLS), paged=True), W("y", "n", "n", type=CELLS)),
    )
)

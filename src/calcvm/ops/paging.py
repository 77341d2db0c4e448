"""Rows that move values between the heap and its pages, a file next to it, whose size is planned too.

No operator has these rows; the planner inserts them.  A page has an offset in elements beyond the heap's end, so the writer of a
page is found like that of any other value.  Only operands declared as paged may lie there.
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

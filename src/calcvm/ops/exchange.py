"""Rows at which a program of several devices gives a value away, or has got one: who runs the programs copies it there.

They compute nothing.  To what plans and proves a program they say until when the value must be there, and from when on.
"""

from __future__ import annotations

from calcvm.ops.spec import R, RowSpec, W, dims, instruction
from calcvm.ops.types import CELLS

SEND = instruction(
    RowSpec(
        name="send",
        synopsis="x is copied to another device after this row",
        no_equation="it computes nothing",
        words=dims("n"),
        operands=(R("x", "n", "n", type=CELLS),),
    )
)
RECEIVE = instruction(
    RowSpec(
        name="receive",
        synopsis="y has been copied from another device before this row",
        no_equation="it computes nothing: the value is another device's",
        words=dims("n"),
        operands=(W("y", "n", "n", type=CELLS),),
    )
)

"""Rows at which a program of several devices sends or has received a value; the runner of the programs copies it there.

They compute nothing.  They tell the planner and the verifier until when, or from when on, the value must be there.
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

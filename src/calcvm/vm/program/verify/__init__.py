"""The verifier: proves that a program stays inside its heap and computes with what it means to.

The hot loop checks nothing, so no program runs unverified.  It shares no code with the planner.

Memory safety rests on the rows and ``heap_elems`` alone.  It holds for every batch from 1 to the
largest because sizes are exact functions of the batch (`calcvm.ops.sizes`), whose least and largest values
are known; what is no such function is refused.  Sizes are Python integers: nothing overflows.  Extents bound
all loops: a row with a zero size must also fit with that size taken as one, so that no product of its other
sizes is unbounded.

The rest makes a program mean what it says: each operand lies inside its symbol, symbols that are kept
share cells with none, reads find what their symbol last wrote (interval shadow map), and no worker meets
another's write without a barrier.  Shares are compared at every batch; what reads find is decided at batch 1
and at the largest: between them extents are affine (of scratch, the largest counts), so that what covers at
both ends does so everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from calcvm.vm.program.verify.together import Together

if TYPE_CHECKING:
    from calcvm.vm.program.program import Program


def verify(program: Program) -> None:
    """Prove a program safe and consistent, for every batch from 1 to its largest.

    Raises
    ------
    ProgramError
        Naming the row, operator, operand, variable and numbers of the first thing wrong.
    """
    Together(program).check()

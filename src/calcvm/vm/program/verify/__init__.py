"""The verifier: proves that a program stays inside its heap and that its reads find the intended values.

The hot loop checks nothing, so no program runs unverified.  The verifier shares no code with the planner.

Memory safety rests on the rows and ``heap_elems`` alone.  It holds for every batch from 1 to the largest, because sizes are exact
functions of the batch (`calcvm.ops.sizes`) with known minima and maxima; any other size is rejected.  Sizes are Python integers,
so nothing overflows.  Extents bound all loops.  A row with a zero size must also fit with that size set to one, so that no
product of its other sizes is unbounded.

The other checks ensure that a program computes what it states.  Each operand lies inside its symbol.  Kept symbols share no cells.
Each read finds the last write of its symbol (interval shadow map).  No worker touches another's write without a barrier in
between.  Workers' shares are compared at every batch.  Reads are checked at batch 1 and at the largest batch.  Extents are affine
in between (scratch uses the maximum), so a write that covers a read at both ends covers it at every batch.
"""

from __future__ import annotations

from calcvm.vm.program.program_data import ProgramData
from calcvm.vm.program.verify.together import Together


def verify(program: ProgramData) -> None:
    """Prove a program safe and consistent, for every batch from 1 to its largest.

    Raises
    ------
    ProgramError
        Names the row, operator, operand, variable and numbers of the first error.
    """
    Together(program).check()

"""Lowering: a graph becomes statements, one per row, by the operator table alone.

`lower` walks each path once: operators become forward rows, autodiff appends the backward rows that the
trainable parameters need (`autodiff.py`), and the optimizer's rows follow.  Simplification (`simplify.py`) and
fusion (`fuse.py`) shorten the result.  Only these two and `inserted.py` refer to operators by name.
"""

from __future__ import annotations

from calcvm.lowering.sections import LARGE_PARAMETER, lower

__all__ = ["LARGE_PARAMETER", "lower"]

"""Lowering: a graph becomes statements, one a row, by the operator table alone.

`lower` walks each path once: operators become forward rows, autodiff appends the backward rows that the
trainable parameters need (`autodiff.py`), the optimizer's rows follow, and simplification (`simplify.py`) and
fusion (`fuse.py`) shorten the result.  Nothing here knows an operator by name except where these two say so.
"""

from __future__ import annotations

from calcvm.lowering.sections import LARGE_PARAMETER, lower

__all__ = ["LARGE_PARAMETER", "lower"]

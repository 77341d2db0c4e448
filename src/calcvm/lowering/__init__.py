"""Lowering: a graph becomes statements, one a row, by the operator table alone.

`lower` walks each path once: operators become forward rows, autodiff appends the backward rows that the
trainable parameters need (`autodiff.py`), the optimizer's rows follow, and fusion shortens the result
(`fuse.py`).  Nothing here knows an operator by name except where the fusion says so.
"""

from __future__ import annotations

from calcvm.lowering.sections import LARGE_PARAMETER, lower

__all__ = ["LARGE_PARAMETER", "lower"]

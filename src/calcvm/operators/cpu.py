"""The functions that CPU kernels are written with.

``@kernel`` registers the kernel of a row.  Its parameters are ``me``, which identifies the worker (``share(me, n)``,
``trap(me, code)``, ``given(me, operand)``), and the row's words and operands.
Functions that kernels call are decorated with ``@njit``.  Sums and maxima of contiguous elements (``rsum(n, x)``) use vectors
of a fixed width, so they give the same bits for any team.
"""

from __future__ import annotations

from collections.abc import Callable

from calcvm.kernels_cpu import _common
from calcvm.kernels_cpu._common import (
    Float,
    Ptr,
    at,
    fabs,
    floor,
    given,
    like,
    njit,
    share,
    sqrt,
    trap,
)
from calcvm.kernels_cpu._math import copy, erf, exp, fill, log, rdot, rmax, rmin, rsum, rsumsq, tanh
from calcvm.operators import register_kernel

__all__ = [
    "Float", "Ptr", "at", "copy", "erf", "exp", "fabs", "fill", "floor", "given", "kernel", "like", "log", "njit",
    "rdot", "rmax", "rmin", "rsum", "rsumsq", "share", "sqrt", "tanh", "trap",
]  # fmt: skip


def kernel(fn: Callable) -> Callable:
    """Register the kernel of the row of its name.

    Raises
    ------
    CalcError : its parameters are not the row's words and operands, or the row is calcvm's own.
    """
    return register_kernel(_common, fn)

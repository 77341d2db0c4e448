"""The functions that GPU kernels are written with (extra ``cuda``).

``@kernel`` registers the kernel of a row.  Its parameters are ``me``, which identifies the worker (``share(me, n)``,
``trap(me, code)``, ``given(me, operand)``), and the row's words and operands.  A worker is a thread block.  Its threads divide
its share by ``thread()`` and ``threads()`` and meet at ``sync()``.  Functions that kernels call are decorated with ``@device``.
"""

from __future__ import annotations

from collections.abc import Callable

from calcvm.kernels_cuda import _common
from calcvm.kernels_cuda._common import Float, Ptr, first, given, share, trap
from calcvm.kernels_cuda._cuda import (
    at,
    device,
    like,
    shared,
    shuffle_xor,
    sync,
    sync_warp,
    thread,
    threads,
)
from calcvm.kernels_cuda._math import copysign, cos, erf, exp, fabs, floor, fma, log, power, sqrt, tanh
from calcvm.kernels_cuda._reduce import add, each, element, fold, larger, reduce
from calcvm.operators import register_kernel

__all__ = [
    "Float", "Ptr", "add", "at", "copysign", "cos", "device", "each", "element", "erf", "exp",
    "fabs", "first", "floor", "fma", "fold", "given", "kernel", "larger", "like", "log", "power", "reduce", "share", "shared",
    "shuffle_xor", "sqrt", "sync", "sync_warp", "tanh", "thread", "threads", "trap",
]  # fmt: skip


def kernel(fn: Callable) -> Callable:
    """Register the kernel of the row of its name.

    Raises
    ------
    CalcError : its parameters are not the row's words and operands, or the row is calcvm's own.
    """
    return register_kernel(_common, fn)

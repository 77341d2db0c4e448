"""Hand-written CUDA kernels, with the families, rows and contract of `kernels_cpu`; a thread block is a worker.

Importing a family needs numba-cuda (extra ``cuda``), but neither a GPU nor a driver: compiling to PTX and the
simulator work without them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from calcvm.kernels_cuda._common import Kernel

FAMILIES = (
    "contraction",
    "transformers",
    "convolution",
    "losses",
    "optimizers",
    "elementwise",
    "reduction",
    "shape",
    "resizing",
    "random",
    "normalization",
    "pooling",
    "quantized",
    "recurrent",
    "exchange",
    "plain",
)


def kernels(names: Iterable[str] = ()) -> dict[str, Kernel]:
    """All kernels by row (MissingExtra: numba-cuda is not installed), and those of users' equations and cells that are named.

    Raises
    ------
    CalcError : an equation contains something that no kernel can compute.
    """
    for family in FAMILIES:
        import_module(f"calcvm.kernels_cuda.{family}")
    from calcvm.kernels_cuda._common import KERNELS

    stated = sys.modules.get("calcvm.equations.stated")
    names = {*names}
    for name in names - {*KERNELS}:
        if stated is not None and name in stated.STATED:
            KERNELS[name] = import_module("calcvm.kernels_cuda.plain").kernel(stated.STATED[name].plain)
    cells = sys.modules.get("calcvm.equations.cells")
    for name in names if cells is not None else ():
        if (own := cells.own_cell(name)) is not None:
            import_module("calcvm.kernels_cuda.recurrent").register_own(own)
    return KERNELS

"""Hand-written CUDA kernels: the families, rows and contract of `kernels_cpu`, a thread block for a worker.

Importing a family needs numba-cuda (extra ``cuda``) and neither a GPU nor a driver: compiling to PTX and the
simulator work without.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from calcvm.kernels_cuda._common import Kernel

FAMILIES = (
    "contraction",
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
    "exchange",
    "plain",
)


def kernels() -> dict[str, Kernel]:
    """All kernels by row (MissingExtra: numba-cuda is not installed)."""
    for family in FAMILIES:
        import_module(f"calcvm.kernels_cuda.{family}")
    from calcvm.kernels_cuda._common import KERNELS

    return KERNELS

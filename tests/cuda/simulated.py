"""Rows by the CUDA kernels in the simulator: what `tests.rowrun` runs in place of the CPU's kernels."""

from __future__ import annotations

from importlib import import_module

from calcvm.kernels_cuda import FAMILIES
from calcvm.kernels_cuda._common import KERNELS
from calcvm.kernels_cuda._cuda import SCRATCH_AT, block, blocks
from calcvm.kernels_cuda._product import shared_bytes
from calcvm.ops.spec import Operand
from calcvm.testing.cuda_threads import launch
from tests import rowrun

for _family in FAMILIES:
    import_module(f"calcvm.kernels_cuda.{_family}")


def on_each(fn, h, r, phase):  # type: ignore[no-untyped-def]
    fn(h, r, block(), blocks(), phase)


class Simulated:
    """``threads`` to a block; all blocks at once, in an order that a seed draws."""

    gpu, kernels, teams = 1, KERNELS, (2, 3)

    def __init__(self, threads: int = 4):
        self.threads = threads

    def kind(self, o: Operand) -> str:
        return rowrun.Cpu().kind(o)

    def run(self, name, dtype, cells, row, n_workers, phase, only, reverse) -> None:  # type: ignore[no-untyped-def]
        heap = cells.view(dtype)
        launch(
            on_each, (KERNELS[name].bound, heap, row, phase), blocks=n_workers, threads=self.threads, seed=int(reverse),
            shared_bytes=SCRATCH_AT + shared_bytes(self.threads, heap.itemsize),
            only=None if only is None else [only],
        )  # fmt: skip

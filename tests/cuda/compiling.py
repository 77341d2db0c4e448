"""PTX of single kernels, compiled by processes beside the tests: what compiling leaves in memory goes with them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager

from calcvm.kernels_cuda import kernels
from calcvm.kernels_cuda._cuda import POINTERS, WORDS, block, blocks, compile_ptx, types

Key = tuple[str, str, tuple[int, int]]  # kernel, dtype, compute capability


def symbol_of(name: str) -> str:
    """What the entry of a kernel is called: PTX has no names with dots."""
    return f"calcvm_{name}".replace(".", "_")


def ptx_of(name: str, dtype: str, cc: tuple[int, int] = (9, 0)) -> str:
    kernel = kernels()[name]
    one = kernel.bound

    def run(h, r, phase):  # type: ignore[no-untyped-def]
        one(h, r, block(), blocks(), phase)

    return compile_ptx(run, (POINTERS[dtype], WORDS, types.int64), symbol_of(name), cc, 256, 2)


@contextmanager
def process() -> Iterator[ProcessPoolExecutor]:
    """One process, started afresh: what kernels share it types once."""
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def submit(pool: ProcessPoolExecutor, keys: list[Key]) -> dict[Key, Future]:
    """Begin to compile kernels, in the order of ``keys``."""
    return {key: pool.submit(ptx_of, *key) for key in keys}

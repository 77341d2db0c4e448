"""Blocks of threads on the host: every simulated thread is a greenlet, and one of them runs at a time.

All blocks of a grid are alive at once, so that they can wait for each other.  When a thread waits, the next one
continues, in an order drawn from a seed.  So a run can be repeated, a missing `sync` shows as a wrong number under some
seed, and a `sync` that some thread never reaches is an error instead of a hang.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any

import numpy as np

from calcvm.errors import CalcError, MissingExtra
from calcvm.without_signals import uncollected

try:
    from greenlet import greenlet
except ImportError as error:
    raise MissingExtra("greenlet", "dev", "the simulated CUDA device") from error

WARP = 4  # threads per warp, so that blocks of 16 have several warps
READY, AT_SYNC, AT_WARP, DONE = range(4)


class Thread(greenlet):
    """A CUDA thread, with the operations that `calcvm.kernels_cuda._cuda` needs from the current one."""

    def __init__(self, block: Block, number: int):
        super().__init__(self._work)
        self.block, self.number = block, number
        self.state = READY
        self.gr_context = copy_context()  # with the launch's NumPy errstate

    def _work(self) -> None:
        self.block.grid.fn(*self.block.grid.args)
        self.state = DONE

    def _give_up_turn(self, state: int) -> None:
        self.state = state
        self.parent.switch()

    def sync(self) -> None:
        self._give_up_turn(AT_SYNC)

    def sync_warp(self) -> None:
        self._give_up_turn(AT_WARP)

    def pause(self) -> None:
        self._give_up_turn(READY)

    def exchange(self, x: Any, mask: int) -> Any:
        """`x` of another thread of the warp."""
        self.block.offered[self.number] = x
        self.sync_warp()
        got = self.block.offered[self.number ^ mask]
        self.sync_warp()
        return got


class Block:
    """The state that a block's threads share."""

    def __init__(self, grid: Grid, number: int, threads: int, shared_bytes: int):
        self.grid, self.number, self.threads, self.blocks = grid, number, threads, grid.blocks
        self.warp = min(WARP, threads)
        self.shared = np.full(shared_bytes, 0xFF, np.uint8)  # NaN: nothing may be read before it is written
        self.offered: list[Any] = [None] * threads
        self.memory, self.now = grid.memory, time.monotonic_ns
        self.members = [Thread(self, k) for k in range(threads)]


class Grid:
    """One launch."""

    def __init__(
        self, fn: Callable, args: Sequence[Any], memory: Callable[[int, Any], np.ndarray], blocks: int, seed: int
    ):
        self.fn, self.args, self.memory, self.blocks = fn, args, memory, blocks
        self.order = random.Random(seed)

    def run(self, running: list[Block]) -> None:
        """Run these blocks to their end; an exception in a thread ends all."""
        members = [t for b in running for t in b.members]
        try:
            while waiting := [t for t in members if t.state != DONE]:
                ready = [t for t in waiting if t.state == READY]
                if not ready:
                    raise CalcError(
                        f"{len(waiting)} threads, of them thread {waiting[0].number} of block {waiting[0].block.number}, "
                        "wait for others that have ended or wait elsewhere"
                    )
                self.order.shuffle(ready)
                for t in ready:
                    t.switch()
                for b in running:
                    self._meet(b)
        finally:
            for t in members:
                if not t.dead:
                    t.throw()  # GreenletExit ends it where it waits

    def _meet(self, block: Block) -> None:
        """Resume the threads whose whole block, or whole warp, has reached a sync."""
        for together, state in ((block.threads, AT_SYNC), (block.warp, AT_WARP)):
            for k in range(0, block.threads, together):
                group = block.members[k : k + together]
                if all(t.state == state for t in group):
                    for t in group:
                        t.state = READY


def no_memory(address: int, dtype: Any) -> np.ndarray:
    raise CalcError(f"address {address:#x}: this launch got only arrays")


def launch(
    fn: Callable,
    args: Sequence[Any],
    *,
    blocks: int,
    threads: int,
    shared_bytes: int,
    only: Sequence[int] | None = None,
    memory: Callable[[int, Any], np.ndarray] = no_memory,
    seed: int = 0,
) -> None:
    """Run ``fn(*args)`` on every thread of a grid.

    only : the numbers of the blocks to run, instead of all.  memory : the memory at an address, as an array of a dtype.
    """
    grid = Grid(fn, args, memory, blocks, seed)
    with np.errstate(all="ignore"):  # its threads inherit it
        running = [Block(grid, k, threads, shared_bytes) for k in (range(blocks) if only is None else only)]
        uncollected(lambda: grid.run(running))  # no finalizer may call the driver in the middle of a kernel

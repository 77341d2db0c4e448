"""Blocks of threads on the host: Numba's simulator, with a scheduler of its own.

Numba's simulator runs one block after the other and lets the operating system interleave a block's threads.
Here all blocks of a grid are alive at once, so that grids may wait for each other, and one thread runs at a
time, from one point where it waits to the next, in an order drawn from a seed: a run can be repeated, a
missing `sync` shows as a wrong number under some seed, and a `sync` that some thread never reaches is an
error instead of a hang.
"""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba.cuda.simulator.kernel import BlockThread

from calcvm.errors import CalcError

WARP = 4  # threads: blocks of 16 have several warps
READY, AT_SYNC, AT_WARP, DONE = range(4)


class Thread(BlockThread):
    """A CUDA thread: a Python thread that runs while it has the turn."""

    def __init__(self, grid: Grid, block: Block, number: int):
        super().__init__(self._work, block, (block.number, 0, 0), (number, 0, 0), False)
        self.grid, self.block, self.number = grid, block, number
        self.turn = threading.Semaphore(0)
        self.state = READY

    def _work(self) -> None:
        self.turn.acquire()
        try:
            with np.errstate(all="ignore"):
                if not self.grid.stopped:
                    self.grid.fn(*self.grid.args)
        finally:
            self.state = DONE
            self.grid.back.release()

    def give_up_turn(self, state: int) -> None:
        self.state = state
        self.grid.back.release()
        self.turn.acquire()
        if self.grid.stopped:
            raise SystemExit

    def syncthreads(self) -> None:
        self.give_up_turn(AT_SYNC)

    def pause(self) -> None:
        self.give_up_turn(READY)

    def exchange(self, x: Any, mask: int) -> Any:
        """`x` of another thread of the warp."""
        self.block.offered[self.number] = x
        self.sync_warp()
        got = self.block.offered[self.number ^ mask]
        self.sync_warp()
        return got

    def sync_warp(self) -> None:
        self.give_up_turn(AT_WARP)


class Block:
    """What a block's threads share."""

    def __init__(self, grid: Grid, number: int, threads: int, shared_bytes: int):
        self.number, self.threads, self.blocks = number, threads, grid.blocks
        self.warp = min(WARP, threads)
        self._block_dim = (threads, 1, 1)  # what Numba's threads ask
        self.shared = np.full(shared_bytes, 0xFF, np.uint8)  # NaN: nothing may be read before it is written
        self.offered: list[Any] = [None] * threads
        self.memory, self.now = grid.memory, time.monotonic_ns
        self.members = [Thread(grid, self, k) for k in range(threads)]


class Grid:
    """One launch."""

    def __init__(
        self, fn: Callable, args: Sequence[Any], memory: Callable[[int, Any], np.ndarray], blocks: int, seed: int
    ):
        self.fn, self.args, self.memory, self.blocks = fn, args, memory, blocks
        self.back = threading.Semaphore(0)
        self.stopped = False
        self.order = random.Random(seed)

    def run(self, running: list[Block]) -> None:
        members = [t for b in running for t in b.members]
        for t in members:
            t.start()
        try:
            while any(t.state != DONE for t in members):
                ready = [t for t in members if t.state == READY]
                self.order.shuffle(ready)
                for t in ready:
                    t.turn.release()
                    self.back.acquire()
                    if t.exception:
                        raise t.exception[0].with_traceback(t.exception[1])
                for b in running:
                    self._meet(b)
                if all(t.state in (AT_SYNC, AT_WARP, DONE) for t in members) and any(t.state != DONE for t in members):
                    stuck = [t for t in members if t.state != DONE]
                    raise CalcError(
                        f"{len(stuck)} threads, of them thread {stuck[0].number} of block {stuck[0].block.number}, "
                        "wait for others that have ended or wait elsewhere"
                    )
        finally:
            self.stopped = True
            for t in members:
                t.turn.release()
            for t in members:
                t.join()

    def _meet(self, block: Block) -> None:
        """Let threads go on whose block has come to a sync as a whole, or whose warp has."""
        for together, state in ((block.threads, AT_SYNC), (block.warp, AT_WARP)):
            for k in range(0, block.threads, together):
                group = block.members[k : k + together]
                if all(t.state == state for t in group):
                    for t in group:
                        t.state = READY


def no_memory(address: int, dtype: Any) -> np.ndarray:
    raise CalcError(f"address {address:#x}: this launch was given arrays alone")


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

    only : numbers of the blocks that run, in place of all.  memory : what is at an address, as an array of a dtype.
    """
    grid = Grid(fn, args, memory, blocks, seed)
    collecting = gc.isenabled()
    gc.disable()  # a finalizer that waits for what the launching thread holds would wait for ever
    try:
        grid.run([Block(grid, k, threads, shared_bytes) for k in (range(blocks) if only is None else only)])
    finally:
        if collecting:
            gc.enable()

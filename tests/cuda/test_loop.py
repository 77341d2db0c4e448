"""The VM's loops on a grid, in the simulator: what they share with the CPU's, and barriers that do not come."""

from __future__ import annotations

import numpy as np
import pytest

from calcvm.kernels_cuda._cuda import SCRATCH_AT, block, blocks, i64_at, sync, thread
from calcvm.testing.cuda_threads import launch
from calcvm.vm.memory.epoch import shuffling_key
from calcvm.vm.run import job as J
from calcvm.vm.run.cuda import loop
from calcvm.vm.run.entry import entry


def words(n: int) -> np.ndarray:
    return np.zeros(n, np.int64)


def over(*arrays: np.ndarray):
    """Memory at addresses: of these arrays alone."""

    def memory(address, dtype):
        for array in arrays:
            start = array.ctypes.data
            if start <= address < start + array.nbytes:
                return array.reshape(-1).view(np.uint8)[address - start :].view(dtype)
        raise IndexError(f"no array is at {address:#x}")

    return memory


def run(fn, *args, n_blocks=1, threads=4, memory=None, **how):
    launch(fn, args, blocks=n_blocks, threads=threads, shared_bytes=SCRATCH_AT, memory=memory or over(), **how)


@pytest.mark.parametrize("n", [1, 2, 3, 31, 32, 33, 1000, 2**20 + 7])
def test_samples_are_shuffled_as_on_the_cpu(n):
    places, got = words(32), words(32)
    for epoch in range(3):
        key = shuffling_key(seed=5, epoch=epoch)
        entry("permute")(places.ctypes.data, 0, min(n, 32) - 1, n, key)

        def fill(out):
            if thread() == 0:
                for i in range(min(n, 32)):
                    out[i] = loop.permuted(i, n, key)  # noqa: B023  (run at once)

        run(fill, got)
        assert got[: min(n, 32)].tolist() == places[: min(n, 32)].tolist()


@pytest.mark.parametrize("epoch", [0, 1, 1000])
def test_keys_of_epochs_are_those_of_the_cpu(epoch):
    with np.errstate(over="ignore"):
        assert int(loop.epoch_key(17, epoch)) == shuffling_key(17, epoch)


@pytest.mark.parametrize("seed", range(5))
def test_blocks_meet(seed):
    """No block passes the k-th barrier before all have come to it."""
    control, seen = words(48), words(4)
    control[loop.PATIENCE_NS] = 20 * 10**9

    def work(control, seen):
        for k in range(3):
            if thread() == 0:
                seen[block()] += 1
            assert loop.meet(control, blocks()) == 0
            assert (seen > k).all(), "a block is behind"
            assert loop.meet(control, blocks()) == 0

    run(work, control, seen, n_blocks=4, seed=seed)
    assert control[loop.ARRIVED] == 4 * 6 and control[loop.GAVE_UP] == 0


def test_a_barrier_that_does_not_come_is_given_up():
    control, late = words(48), words(1)
    control[loop.PATIENCE_NS] = 10**6

    def work(control, late):
        late[0] = loop.meet(control, blocks())

    run(work, control, late, n_blocks=2, only=[0])  # the second block never starts
    assert late[0] == 1 and control[loop.GAVE_UP] == 1


@pytest.mark.parametrize("threads", [4, 16])
@pytest.mark.parametrize("elems", [1, 3, 4, 11])
@pytest.mark.parametrize("scattered", [False, True])
def test_fetch(threads, elems, scattered):
    rng = np.random.default_rng(elems)
    source = rng.integers(0, 200, (23, elems)).astype(np.uint8)
    index = rng.permutation(23).astype(np.int64)
    job, feed = words(J.STAGED + 1), words(4)
    job[[J.FEEDS, J.N_FEEDS, J.N_SAMPLES]] = feed.ctypes.data, 1, 23
    job[J.INDEX] = index.ctypes.data if scattered else 0
    feed[[J.ADDRESS, J.DTYPE, J.ELEMS, J.OFFSET]] = source.ctypes.data, 2, elems, 5
    heap = np.full(5 + 8 * elems + 3, -1, np.float32)

    def work(job, heap):
        loop.fetch(job, job, heap, 9, 7, block(), blocks())

    run(work, job, heap, n_blocks=3, threads=threads, memory=over(job, feed, source, index))
    want = source[index[9:16]] if scattered else source[9:16]
    assert heap[5 : 5 + 7 * elems].tolist() == want.reshape(-1).tolist()
    assert (heap[:5] == -1).all() and (heap[5 + 7 * elems :] == -1).all()


def test_i64_at_reads_what_is_there():
    array, got = np.arange(4), words(1)

    def work(address, got):
        sync()
        got[0] = i64_at(address)[2]

    run(work, array.ctypes.data, got, memory=over(array))
    assert got[0] == 2


def test_what_a_block_keeps_of_rows_lies_before_scratch():
    assert 8 * max(loop.LATE, loop.TURN) + 8 <= SCRATCH_AT

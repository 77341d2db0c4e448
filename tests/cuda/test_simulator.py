"""The simulator of CUDA threads: an order drawn from a seed, errors in place of hangs, and no thread left behind."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings

import numpy as np
import pytest

from calcvm.errors import CalcError
from calcvm.kernels_cuda._cuda import SCRATCH_AT, block, pause, sync, thread, threads
from calcvm.testing.cuda_threads import Thread, launch


def run(fn, *args, blocks=2, threads=16, **how):
    launch(fn, args, blocks=blocks, threads=threads, shared_bytes=SCRATCH_AT, **how)


def turns(seed):
    """(block, thread) in the order in which they run."""
    told = []

    def work():
        for _ in range(3):
            told.append((block(), thread()))
            sync()

    run(work, seed=seed)
    return told


def test_the_order_is_drawn_from_the_seed():
    assert turns(5) == turns(5) != turns(6)
    assert sorted(turns(5)) == sorted([(b, t) for b in range(2) for t in range(16)] * 3)
    for k in range(0, 96, 32):
        assert len(set(turns(5)[k : k + 32])) == 32, "a thread has passed a sync that others had not come to"


def test_a_missing_sync_shows_under_some_seed():
    def neighbours(meet):
        def work(x, y):
            x[thread()] = 1
            if meet:
                sync()
            y[thread()] = x[(thread() + 1) % threads()]

        found = []
        for seed in range(5):
            x, y = np.zeros(16), np.zeros(16)
            run(work, x, y, blocks=1, seed=seed)
            found.append(bool(y.all()))
        return found

    assert all(neighbours(meet=True)) and not all(neighbours(meet=False))


def test_a_sync_that_a_thread_does_not_reach_is_an_error():
    ended = []

    def work():
        try:
            if thread() == 3:
                return
            sync()
        finally:
            ended.append((block(), thread()))

    with pytest.raises(CalcError, match="30 threads, of them thread 0 of block 0, wait for others that have ended"):
        run(work)
    assert len(set(ended)) == 32, "a thread that waits was not ended"


def test_what_a_thread_raises_ends_all_and_leaves_nothing():
    ended = []

    def work():
        try:
            sync()
            if (block(), thread()) == (1, 7):
                raise KeyError("of thread 7")
            pause()
            sync()
        finally:
            ended.append((block(), thread()))

    for seed in range(3):
        ended.clear()
        with pytest.raises(KeyError, match="of thread 7"):
            run(work, seed=seed)
        assert len(set(ended)) == 32
    gc.collect()
    assert not [o for o in gc.get_objects() if issubclass(type(o), Thread)]


def test_a_launch_leaves_the_collector_and_the_warnings_of_numpy_as_they_were():
    def work(x):
        assert not gc.isenabled()
        x[thread()] = np.float32(1e38) * np.float32(1e38) / np.float32(0)
        sync()
        x[thread()] *= np.float32(0)

    with warnings.catch_warnings(), np.errstate(all="warn"):
        warnings.simplefilter("error")
        run(work, np.zeros(16))
        assert gc.isenabled()
        with pytest.raises(RuntimeWarning, match="overflow"):
            np.float32(1e38) * np.float32(1e38)


def test_a_kernel_may_launch_another():
    def inner(x):
        sync()
        x[thread()] += 1

    def outer(x):
        sync()
        if thread() == block() == 0:
            run(inner, x, blocks=1)
        sync()

    x = np.zeros(16)
    run(outer, x)
    assert (x == 1).all()


def test_without_greenlet_the_extra_is_named():
    code = "import sys; sys.modules['greenlet'] = None\nimport calcvm.testing.cuda_threads"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert 'the simulated CUDA device needs greenlet: install it with pip install "calcvm[dev]"' in done.stderr

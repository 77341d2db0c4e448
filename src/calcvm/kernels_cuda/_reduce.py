"""What the threads of a warp compute together.

Every reduction is one warp's: each lane sums every warp_size()-th element, then a butterfly adds the lanes, so that
the result's bits depend on the number of elements alone, not on blocks or threads of a block.  All threads of a
warp must call these together; all of them get the result.
"""

from __future__ import annotations

from calcvm.kernels_cuda._cuda import device, shuffle_xor, thread, threads, warp_size


@device
def warp():
    """Number of the thread's warp in its block."""
    return thread() // warp_size()


@device
def warps():
    """Warps of a block."""
    return threads() // warp_size()


@device
def warp_sum(x):
    """Sum of the lanes' ``x``."""
    step = warp_size() // 2
    while step > 0:
        x += shuffle_xor(x, step)
        step //= 2
    return x

"""Random kernels: a hash of (seed, counter, stream, element index), the same bits as the CPU's."""

from __future__ import annotations

import numpy as np

from calcvm.kernel import words
from calcvm.kernels_cuda._common import Ptr, first, kernel, kernel_as, share
from calcvm.kernels_cuda._cuda import device, like
from calcvm.kernels_cuda._loops import elementwise

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FACTOR_1, FACTOR_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@device
def _mix(z):
    """SplitMix64's finalizer: every bit of z changes every bit of the result with probability near 1/2."""
    z = (z ^ (z >> np.uint64(30))) * FACTOR_1
    z = (z ^ (z >> np.uint64(27))) * FACTOR_2
    return z ^ (z >> np.uint64(31))


@device
def _key(seed, counter, stream):
    """The key that one row of one step hashes its element indexes with."""
    key = _mix(np.uint64(seed) * GOLDEN + np.uint64(1))
    key = _mix(key + np.uint64(counter) * GOLDEN)
    return _mix(key + np.uint64(stream) * GOLDEN)


@device
def _dropout(x, i, scale, key, threshold):
    """x*scale where the element's 62 random bits are not below the threshold, else 0."""
    return x * scale if _mix(key + np.uint64(i) * GOLDEN) >> np.uint64(2) >= threshold else like(x, 0)


_dropped = elementwise(_dropout, indexed=True)


def _of(name: str, read: str, out: str) -> None:
    """out = read/(1 - rate) where the hash of (seed, counter, stream, i) keeps i, else 0; rows are shared; in place."""

    @kernel_as(name, words("rows cols stream", "", [read, "rng.int64", "rate.float64", out]))
    def run(me, rows, cols, stream, x, rng, rate, y):
        lo, hi = share(me, rows)
        p = rate[0]
        p = like(p, 0) if not p > 0 else like(p, 1) if p > 1 else p
        key = _key(rng[0], rng[1], stream)
        threshold = np.uint64(p * 4611686018427387904.0)  # of 2**62
        _dropped(lo * cols, hi * cols, (x,), y, (like(x, 1.0 / (1.0 - p)), key, threshold))


_of("dropout_fwd", "x", "y")
_of("dropout_bwd", "dy", "dx")


@kernel
def rng_advance(me, rng: Ptr.int64):
    """rng.counter += 1; one thread."""
    if first(me):
        rng[1] += 1

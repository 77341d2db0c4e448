"""Random kernels: a hash of (seed, counter, stream, element index), the same bits as the CPU's."""

from __future__ import annotations

import numpy as np

from calcvm.kernels_cuda._common import Ptr, first, kernel, kernel_from, share  # noqa: F401  (kernels' text uses them)
from calcvm.kernels_cuda._cuda import as_f64, as_i64, device, like  # noqa: F401
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


def _dropout(x, i, scale, key, threshold):
    """x*scale where the element's 62 random bits are not below the threshold, else 0."""
    return x * scale if _mix(key + np.uint64(i) * GOLDEN) >> np.uint64(2) >= threshold else like(x, 0)


_loop_dropout = elementwise(_dropout, 1, 3, indexed=True)
DROPOUT = '''\
def dropout_{direction}(w, nw, rows, cols, stream, {x}: Ptr, rng: Ptr, rate: Ptr, {y}: Ptr):
    """{y} = {x}/(1 - rate) where the hash of (seed, counter, stream, i) keeps i, else 0; rows are shared; in place."""
    lo, hi = share(rows, w, nw)
    p = as_f64(rate)[0]
    p = like(p, 0) if not p > 0 else like(p, 1) if p > 1 else p
    state = as_i64(rng)
    key = _key(state[0], state[1], stream)
    threshold = np.uint64(p * 4611686018427387904.0)  # of 2**62
    _loop_dropout(lo * cols, hi * cols, {x}, {y}, like(h, 1.0 / (1.0 - p)), key, threshold)
'''
kernel_from(DROPOUT.format(direction="fwd", x="x", y="y"), globals())
kernel_from(DROPOUT.format(direction="bwd", x="dy", y="dx"), globals())


@kernel
def rng_advance(w, nw, rng: Ptr):
    """rng.counter += 1; one thread."""
    if first(w):
        as_i64(rng)[1] += 1

"""Random kernels: a hash of (seed, counter, stream, element index), by vectors."""

from __future__ import annotations

from numba import types
from numba.extending import intrinsic

from calcvm.kernel import words
from calcvm.kernels_cpu._common import Ptr, at, kernel, kernel_as, like, share
from calcvm.kernels_cpu._formulas import V
from calcvm.kernels_cpu._math import elementwise

GOLDEN = 0x9E3779B97F4A7C15


def _mix(z: V) -> V:
    """SplitMix64's finalizer: every bit of z changes every bit of the result with probability near 1/2."""
    z = (z ^ z.shift_right(30)) * 0xBF58476D1CE4E5B9
    z = (z ^ z.shift_right(27)) * 0x94D049BB133111EB
    return z ^ z.shift_right(31)


def _key(seed: V, counter: V, stream: V) -> V:
    return _mix(_mix(_mix(seed * GOLDEN + 1) + counter * GOLDEN) + stream * GOLDEN)


@intrinsic
def key_of(tc, seed, counter, stream):
    """The key that one row of one step hashes its element indexes with."""
    i64 = types.int64
    return i64(i64, i64, i64), lambda ctx, b, sig, args: _key(*(V(b, a) for a in args)).v


def _dropout(x: V, index: V, scale: V, key: V, threshold: V) -> V:
    """x*scale where the element's 62 random bits are not below the threshold, else 0."""
    random = _mix(key + index * GOLDEN).shift_right(2)
    return (x * scale).where(random >= threshold, 0.0)


_loop_dropout = elementwise(_dropout, "v", "fii", indexed=True)


@kernel_as("dropout_fwd", words("rows cols stream", "", ("x", "rng.int64", "rate.float64", "y")))
@kernel_as("dropout_bwd", words("rows cols stream", "", ("dy", "rng.int64", "rate.float64", "dx")))
def _drop(me, rows, cols, stream, x, rng, rate, y):
    """y = x/(1 - rate) where the hash of (seed, counter, stream, i) keeps i, else 0; rows are shared; in place."""
    lo, hi = share(me, rows)
    i = lo * cols
    p = rate[0]
    p = 0.0 if not p > 0 else 1.0 if p > 1 else p
    key = key_of(rng[0], rng[1], stream)
    threshold = int(p * 4611686018427387904.0)  # of 2**62
    _loop_dropout((hi - lo) * cols, at(x, i), at(y, i), i, like(x, 1.0 / (1.0 - p)), key, threshold)


@kernel
def rng_advance(me, rng: Ptr.int64):
    """rng.counter += 1; worker 0."""
    if me.worker == 0:
        rng[1] += 1

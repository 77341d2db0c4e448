"""Definitions of the random operators: the hash is SplitMix64's, in wrapping 64-bit integers."""

import numpy as np

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def _mix(z):
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def bits(seed, counter, stream, n):
    """62 random bits for each of n elements (Python integers)."""
    key = _mix((_mix((_mix((seed * GOLDEN + 1) & MASK) + counter * GOLDEN) & MASK) + stream * GOLDEN) & MASK)
    return [_mix((key + i * GOLDEN) & MASK) >> 2 for i in range(n)]


def dropout(x, rng, rate, stream=0):
    seed, counter = (int(v) & MASK for v in rng)
    rate = float(rate)
    drawn = bits(seed, counter, stream, x.size)
    keep = np.array([b >= int(rate * 2**62) for b in drawn], bool).reshape(x.shape)
    return np.where(keep, x / (1 - rate), 0.0)


def rng_advance(rng):
    return {"rng": rng + np.array([0, 1])}

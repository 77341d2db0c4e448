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


def of_state(rng, stream, n):
    seed, counter = (int(v) & MASK for v in rng)
    return bits(seed, counter, stream, n)


def dropout(x, rng, rate, stream=0):
    rate = float(rate)
    drawn = of_state(rng, stream, x.size)
    keep = np.array([b >= int(rate * 2**62) for b in drawn], bool).reshape(x.shape)
    return np.where(keep, x / (1 - rate), 0.0)


def dropout_mask(x, rng, rate, axis=1, stream=0):
    shape = [n if i in (0, axis) else 1 for i, n in enumerate(x.shape)]
    return dropout(np.ones(shape), rng, rate, stream)


def crop(x, rng=None, sizes=(), padding=(), flips=(), mode="constant", first=2, stream=0):
    n = len(sizes)
    sides = [(0, 0)] * first + [(p, p) for p in padding]
    x = np.pad(x, sides + [(0, 0)] * (x.ndim - len(sides)), mode)
    rooms = [x.shape[first + i] - e for i, e in enumerate(sizes)]
    out = []
    for k, image in enumerate(x):
        drawn = None if rng is None else of_state(rng, stream, 6 * k + 6)[-6:]
        for i, (e, room, rate) in enumerate(zip(sizes, rooms, flips)):
            j = 0 if i == 0 else i + 3 - n  # of three axes
            start = room // 2 if drawn is None else drawn[j] % (room + 1)
            image = image.take(range(start, start + e), first - 1 + i)
            if drawn is not None and drawn[3 + j] < int(rate * 2**62):
                image = np.flip(image, first - 1 + i)
        out.append(image)
    return np.stack(out)


def rng_advance(rng):
    return {"rng": rng + np.array([0, 1])}

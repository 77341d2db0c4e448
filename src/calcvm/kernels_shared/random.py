"""Random numbers: a hash of (seed, counter, stream, element index)."""

from __future__ import annotations

from numpy import uint64

GOLDEN, FACTOR_1, FACTOR_2 = map(uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
ONE = uint64(1)
ALL = 4611686018427387904.0  # 2**62, the number of values of `bits`


def hashing(compiled, number, right):
    """The functions ``mix``, ``key`` and ``bits``.  number : converts to 64 bits without a sign.  right : shifts them."""

    @compiled
    def mix(z):
        """SplitMix64's finalizer: every bit of z changes every bit of the result with probability near 1/2."""
        z = (z ^ right(z, 30)) * FACTOR_1
        z = (z ^ right(z, 27)) * FACTOR_2
        return z ^ right(z, 31)

    @compiled
    def key(seed, counter, stream):
        """The key with which a row of a step hashes its element indexes."""
        one = mix(number(seed) * GOLDEN + ONE)
        return mix(mix(one + number(counter) * GOLDEN) + number(stream) * GOLDEN)

    @compiled
    def bits(key, i):
        """62 random bits of an element."""
        return right(mix(key + number(i) * GOLDEN), 2)

    return mix, key, bits

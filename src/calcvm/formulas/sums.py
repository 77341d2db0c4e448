"""How the means of batches are added up: a function that each device compiles."""

from __future__ import annotations

EPS32, EPS64 = 2.0**-23, 2.0**-52
WHOLE = 1.5 * 2.0**52  # added and taken off again, it leaves the nearest whole number


def sum_of(mean, n, itemsize):  # type: ignore[no-untyped-def]
    """The sum of n terms, from their mean, which is a float of ``itemsize`` bytes.

    A sum that is a whole number but for the mean's rounding is that number.  So right answers add up to the same in any batches.
    """
    s = mean * n
    whole = (s + WHOLE) - WHOLE
    return whole if abs(whole - s) <= abs(s) * (EPS32 if itemsize == 4 else EPS64) else s

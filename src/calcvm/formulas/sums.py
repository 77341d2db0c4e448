"""Summation over batches: a function that each device compiles."""

from __future__ import annotations

EPS32, EPS64 = 2.0**-23, 2.0**-52
WHOLE = 1.5 * 2.0**52  # adding and subtracting it rounds to the nearest integer


def sum_of(mean, n, itemsize):  # type: ignore[no-untyped-def]
    """The sum of n terms, from their mean, which is a float of ``itemsize`` bytes.

    If the sum is an integer up to the mean's rounding error, it becomes that integer: counts of right answers add up alike in all batches.
    """
    s = mean * n
    whole = (s + WHOLE) - WHOLE
    return whole if abs(whole - s) <= abs(s) * (EPS32 if itemsize == 4 else EPS64) else s

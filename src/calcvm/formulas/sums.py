"""What batches' means are added up by: a function that each device compiles."""

from __future__ import annotations

EPS32, EPS64 = 2.0**-23, 2.0**-52
WHOLE = 1.5 * 2.0**52  # added and taken off again, it leaves the nearest whole number


def sum_of(mean, n, itemsize):  # type: ignore[no-untyped-def]
    """n times a mean of floats of so many bytes: a whole number, where no more than the mean's rounding parts it from one.

    So what is counted, such as right answers, adds up to the same number in any batches.
    """
    s = mean * n
    whole = (s + WHOLE) - WHOLE
    return whole if abs(whole - s) <= abs(s) * (EPS32 if itemsize == 4 else EPS64) else s

"""Functions that the texts of `calcvm.kernels_cuda._plain` call: elements at places, reductions by a thread or a block, scans.

A *unit* is one value of each leading index; a block processes its share of the units in batches.  ``term(a, here, k)`` is the term of
element k of a reduction: ``a`` holds the row's words and operands; ``here`` is the unit's number in its batch, then its indexes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from calcvm.formulas.arithmetic import where
from calcvm.formulas.functions import FUNCTIONS
from calcvm.kernels_cuda._common import given, share, trap
from calcvm.kernels_cuda._copies import itemsize
from calcvm.kernels_cuda._cuda import as_i64, at, cells, device, like, shared, sync, thread, threads, wide
from calcvm.kernels_cuda._formulas import formula
from calcvm.kernels_cuda._math import power
from calcvm.kernels_cuda._reduce import ROOM, add, divide, each, fold, join_apart, maximum, minimum, slot_in, slots_of
from calcvm.kernels_cuda._tuples import folded

BAD_PLACE = 1  # trap code
NOWHERE = 1 << 62  # a place outside everything, larger than every integer that is reduced
INF, NAN = float("inf"), float("nan")
LENGTH = 128  # elements per partial total, so that the error of a sum does not grow with every element

functions = {f.equation: formula(f) for f in FUNCTIONS.values()}  # of one number
functions |= {"relu": formula(lambda x: where(x < 0, 0.0, x))}


# ---------------------------------------------------------------- integers
@device
def floor_div(a, b):
    """a // b, rounded down; 0 if b is 0."""
    if b == 0:
        return 0
    if b < 0:
        a, b = -a, -b
    return divide(a, b) if a >= 0 else -divide(b - 1 - a, b)


@device
def floor_mod(a, b):
    """The remainder of a // b; 0 if b is 0."""
    return a - floor_div(a, b) * b if b != 0 else 0


@device
def exact(a, b):
    """The place a / b; nowhere if there is a remainder."""
    q = floor_div(a, b)
    return q if q * b == a and b != 0 else NOWHERE


# Integers of places that come from data: overflow of 64 bits and division by 0 give nowhere.
@device
def _near(a, b):
    return -NOWHERE < a < NOWHERE and -NOWHERE < b < NOWHERE


@device
def near_sum(a, b):
    c = a + b if _near(a, b) else NOWHERE
    return c if -NOWHERE < c < NOWHERE else NOWHERE


@device
def near_difference(a, b):
    c = a - b if _near(a, b) else NOWHERE
    return c if -NOWHERE < c < NOWHERE else NOWHERE


@device
def near_product(a, b):
    if not _near(a, b):
        return NOWHERE
    x, y = magnitude(a), magnitude(b)
    small = x < 1 << 31 and y < 1 << 31
    return a * b if small or y == 0 or x <= divide(NOWHERE - 1, y) else NOWHERE


@device
def near_quotient(a, b):
    return floor_div(a, b) if b != 0 and _near(a, b) else NOWHERE


@device
def near_rest(a, b):
    return floor_mod(a, b) if b != 0 and _near(a, b) else NOWHERE


@device
def near_exact(a, b):
    return exact(a, b) if _near(a, b) else NOWHERE


@device
def smaller(a, b):
    return min(a, b)


@device
def greater(a, b):
    return max(a, b)


@device
def magnitude(a):
    return max(a, -a)


@device
def whole(x):
    """An element as an integer; nowhere if it is fractional."""
    x = wide(x)
    if x > like(x, -1e18) and x < like(x, 1e18):
        k = int(x)
        if like(x, k) == x:
            return k
    return NOWHERE


# ---------------------------------------------------------------- numbers
@device
def float32(x):
    """x rounded to float32, in any heap."""
    return like(x, np.float32(x))


@device
def multiply(x, y):
    return x * y


power2 = device(lambda x: x * x)
power3 = device(lambda x: x * x * x)
power4 = device(lambda x: (x * x) * (x * x))


# ---------------------------------------------------------------- elements
@device
def _axis(before, axis):
    """The place in the axes up to this one, and whether it is inside all of them; ``sure`` : it is inside this one."""
    place, inside = before
    k, n, sure = axis
    there = sure or (k >= 0 and k < n)
    return place * n + (k if there else 0), inside and there


@device
def find(axes):
    """The place in an array, and whether it is inside; ``axes`` : per axis the place, the extent, and whether it is surely inside."""
    return folded(_axis, ((0, True),) + axes)


number_at = device(lambda h, x, k: like(h, x[k]))
wide_at = device(lambda h, x, k: wide(x[k]))
holds_at = device(lambda h, x, k: x[k] != 0)


@device
def read(of, h, x, axes, beyond):
    """The element of x at these places, as the value ``of(h, x, k)``; outside it is ``beyond``."""
    place, inside = find(axes)
    return of(h, x, place) if inside else beyond


@device
def read_known(me, of, h, x, axes, beyond):
    """The same for places that come from data; outside traps."""
    place, inside = find(axes)
    if inside:
        return of(h, x, place)
    trap(me, BAD_PLACE)
    return beyond


# ---------------------------------------------------------------- by a thread
@device
def strand(term, join, zero, a, here, k, last, step):
    """The joined terms of elements k, k + step, ... up to ``last``, one at a time, in blocks of fixed length."""
    total = zero
    while k <= last:
        part, end = zero, min(last, k + (LENGTH - 1) * step)
        while k <= end:
            part = join(part, term(a, here, k))
            k += step
        total = join(total, part)
    return total


@device
def strands(term, join, zero, a, here, k, last, step):
    """The same, four at a time, so that their loads are in flight together."""
    total = zero
    while k <= last:
        end = min(last, k + (LENGTH - 1) * step)
        total = join(total, fold(term, join, zero, zero, a, here, k, end, step))
        k += LENGTH * step
    return total


@device
def alone(term, join, zero, a, here, n):
    """The joined terms of n elements, computed by this thread."""
    return strand(term, join, zero, a, here, 0, n - 1, 1)


@device
def every(value, a, q, y, k, last, step):
    """y[k] = value(a, q, k) for k, k + step, ... up to ``last``, by this thread, one at a time; see `_reduce.each`."""
    while k <= last:
        y[k] = value(a, q, k)
        k += step


@device
def lines(line, a, q, k, last, step):
    """Calls line(a, q, k) for k, k + step, ... up to ``last``, in this thread."""
    while k <= last:
        line(a, q, k)
        k += step


@device
def scan(value, a, here, before, y, place, step, n, forward):
    """y[i] = value(a, here, i, the previous y) along an axis of n elements, ``step`` apart from ``place`` on."""
    k = 0
    while k < n:
        i = k if forward else n - 1 - k
        before = value(a, here, i, before)
        y[place + i * step] = before
        k += 1


# ---------------------------------------------------------------- by a block
@device
def units_at_once(slots, temporaries):
    """The number of units, with so many slots and temporaries each, that fit shared memory; odd, to avoid bank conflicts."""
    return (ROOM * threads() // (slots + temporaries) - 1) | 1


@device
def behind(k):
    """The k-th cell after those of all units."""
    return ROOM * threads() + k


@device
def scratch(like_this, cell):
    """Shared memory from an 8-byte cell on, with the element type of a pointer."""
    return at(shared(like_this), cell * (8 // itemsize(like_this)))


@device
def whole_scratch(like_this, cell):
    """The same as integers."""
    return at(as_i64(shared(like_this)), cell)


@device
def _put(y, q, c, t):
    y[c] = t


@device
def together(by, term, join, zero, a, unit, y, totals, most, n, R, along):
    """y[c] = the joined terms of the R elements of unit c, for c < n, computed by all threads of the block, which then meet.

    by : `strand` or `strands`.  unit(a, c) : the terms' argument ``here``.  along : whether the reduced elements are contiguous.
    """
    shift = slots_of(R)
    u = thread()
    while u < n << shift:
        c, slot = slot_in(u, n, shift, along)
        t = by(term, join, zero, a, unit(a, c), slot, R - 1, 1 << shift)
        if shift == 0:
            y[c] = t
        else:
            totals[slot * most + c] = t
        u += threads()
    sync()
    if shift > 0:
        join_apart(join, zero, zero, totals, most, _put, y, 0, n, shift)


# ---------------------------------------------------------------- all names that texts use
KNOWN: dict[str, Any] = functions | {
    "INF": INF, "NAN": NAN, "NOWHERE": NOWHERE, "power": power, "number_at": number_at, "wide_at": wide_at, "holds_at": holds_at, "power2": power2, "power3": power3, "power4": power4,
} | {
    f.__name__: f
    for f in (
        add, alone, at, behind, cells, device, divide, each, every, exact, float32, floor_div, floor_mod, given, greater, like, lines, magnitude, maximum,
        minimum, multiply, near_difference, near_exact, near_product, near_quotient, near_rest, near_sum, read, read_known, scan, scratch, share, slots_of, smaller, strand, strands, sync, thread, threads,
        together, units_at_once, whole, whole_scratch, wide,
    )
}  # fmt: skip

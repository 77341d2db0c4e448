"""Reductions by several threads: over a row by lanes of a warp, over many elements by a block.

The order of every reduction depends only on the number of elements, so the bits depend neither on the blocks nor on
the threads of a block.  A row is folded by 1, 2, 4, ... lanes of a warp, which a butterfly then joins
(`fold`, `joined`); short rows share a warp.  Longer rows are split into slots, which the threads of a block take in
turn and join in shared memory (`reduce`).  All threads of a warp, or of the block, must call these functions together.

``term(args, q, k)`` is the term of element k for output q; ``join`` combines two terms; ``zero`` is neutral.
"""

from __future__ import annotations

import numpy as np

from calcvm.kernels_cuda._cuda import device, lane, shuffle_xor, sync, thread, threads, warp_size

PER_LANE = 4  # elements of a row per lane before a second lane joins in
PER_SLOT = 8  # elements of a column per slot before there are two slots
WARPS_OF_SLOTS = 8  # slots of a long column, in warps: a block of 256 threads takes them all at once
ROOM = 16  # totals per thread of a block that shared memory holds, even in float64


@device
def warp():
    """The number of the thread's warp in its block."""
    return thread() // warp_size()


@device
def warps():
    """Warps per block."""
    return threads() // warp_size()


@device
def warp_sum(x):
    """The sum of the lanes' ``x``."""
    step = warp_size() // 2
    while step > 0:
        x += shuffle_xor(x, step)
        step //= 2
    return x


# ---------------------------------------------------------------- terms and joins
@device
def element(x, q, k):
    return x[k]


@device
def square(x, q, k):
    return x[k] * x[k]


@device
def product(pair, q, k):
    x, y = pair
    return x[k] * y[k]


@device
def add(x, y):
    return x + y


@device
def maximum(x, y):
    """The larger of two; NaN if either is."""
    return x if x > y or x != x else y


@device
def minimum(x, y):
    """The smaller of two; NaN if either is."""
    return x if x < y or x != x else y


@device
def larger(x, y):
    """The larger of two; a NaN may be lost."""
    return x if x > y else y


# ---------------------------------------------------------------- numbers
@device
def divide(a, b):
    """a // b for a >= 0 and b > 0; the compiler divides in 32 bits if they suffice."""
    return np.int64(np.uint64(a) // np.uint64(b))


@device
def log2_up(n, most):
    """The smallest s with 2**s >= min(n, most)."""
    s = 0
    while (1 << s) < n and (1 << s) < most:
        s += 1
    return s


@device
def lanes_of(n):
    """log2 of the lanes for a row of n elements: the fewest with at most PER_LANE elements each, at most a warp."""
    return log2_up((n + PER_LANE - 1) // PER_LANE, warp_size())


@device
def slots_of(n):
    """log2 of the slots for n elements."""
    return log2_up((n + PER_SLOT - 1) // PER_SLOT, WARPS_OF_SLOTS * warp_size())


# ---------------------------------------------------------------- by a thread, by lanes
@device
def fold(term, join, zero, total, args, q, k, last, step):
    """``total`` joined with the terms of elements k, k + step, ... up to ``last``, by this thread.

    Four at a time, none behind a branch, so that their loads are in flight together.
    """
    while k <= last:
        k1, k2, k3 = k + step, k + 2 * step, k + 3 * step
        a, b = term(args, q, k), term(args, q, min(k1, last))
        c, d = term(args, q, min(k2, last)), term(args, q, min(k3, last))
        ab = join(a, b if k1 <= last else zero)
        cd = join(c if k2 <= last else zero, d if k3 <= last else zero)
        total = join(total, join(ab, cd))
        k += 4 * step
    return total


@device
def each(term, args, q, y, k, last, step):
    """y[k] = term(args, q, k) for k, k + step, ... up to ``last``, by this thread, four at a time.

    y may be an array that the term reads at k: past the end the last element is read again and discarded.
    """
    while k <= last:
        k1, k2, k3 = k + step, k + 2 * step, k + 3 * step
        a, b = term(args, q, k), term(args, q, min(k1, last))
        c, d = term(args, q, min(k2, last)), term(args, q, min(k3, last))
        y[k] = a
        if k1 <= last:
            y[k1] = b
        if k2 <= last:
            y[k2] = c
        if k3 <= last:
            y[k3] = d
        k += 4 * step


@device
def joined(join, x, shift):
    """``x`` of 2**shift neighbouring lanes combined; each of them gets the result."""
    step = (1 << shift) >> 1
    while step > 0:
        x = join(x, shuffle_xor(x, step))
        step >>= 1
    return x


@device
def lane_in(shift):
    """The lane's number among its 2**shift."""
    return lane() & ((1 << shift) - 1)


@device
def group_in(shift):
    """The number of its group of 2**shift lanes in the warp."""
    return lane() >> shift


@device
def group_before(shift):
    """The number of groups of 2**shift lanes in earlier warps; uniform over a warp, for loops."""
    return (thread() - lane()) >> shift


# ---------------------------------------------------------------- by a block
@device
def outputs_at_once(shift):
    """Outputs of 2**shift slots whose totals fit shared memory; odd, to avoid bank conflicts."""
    return ((ROOM * threads()) >> shift) - 1


@device
def slot_in(u, count, shift, row):
    """The output and slot of unit u of ``count`` outputs of 2**shift slots each.

    Neighbouring threads take neighbouring elements, of a ``row`` or of columns.
    """
    along = 1 << shift if row else count
    major = np.int64(np.uint32(u) // np.uint32(along))  # 32 bits suffice: both are at most ROOM * threads()
    minor = u - major * along
    return (major, minor) if row else (minor, major)


@device
def slot_of(u, count, shift, q, R, I):
    """Output, slot, first and last element of unit u of ``count`` outputs from q on, each of 2**shift slots."""
    c, slot = slot_in(u, count, shift, I == 1)
    k = q + c + divide(q + c, I) * (R - 1) * I  # the output's element at r = 0
    return c, slot, k + slot * I, k + (R - 1) * I


@device
def reduce(term, join, zero, total, args, totals, put, to, q, stop, R, I):
    """Call ``put(to, q, c, t)`` with the joined terms t of output q + c, for as many c as fit; returns how many.

    Elements are (O, R, I), outputs (O, I), of which q to ``stop`` are needed; the join is over R.  totals : shared memory,
    in the dtype of ``total``, the initial value of the join.
    """
    shift, most = slots_of(R), outputs_at_once(slots_of(R))
    count = min(most, stop - q)
    u = thread()
    while u < count << shift:
        c, slot, k, last = slot_of(u, count, shift, q, R, I)
        t = fold(term, join, zero, total, args, q + c, k, last, I << shift)
        if shift == 0:
            put(to, q, c, t)
        else:
            totals[slot * most + c] = t
        u += threads()
    if shift > 0:
        sync()
        join_slots(join, zero, total, totals, put, to, q, count, shift)
    return count


@device
def join_slots(join, zero, total, totals, put, to, q, count, shift):
    """Call ``put(to, q, c, t)`` for c < count with the joined totals t of output c; ``totals`` are free afterwards."""
    join_apart(join, zero, total, totals, outputs_at_once(shift), put, to, q, count, shift)


@device
def join_apart(join, zero, total, totals, most, put, to, q, count, shift):
    """The same for totals whose slots are ``most`` apart."""
    g = log2_up(1 << shift, warp_size())
    u = group_before(g)
    while u < count:
        c = u + group_in(g)
        last = (((1 << shift) - 1) * most + c) if c < count else -1
        t = fold(element, join, zero, total, totals, 0, lane_in(g) * most + c, last, most << g)
        t = joined(join, t, g)
        if lane_in(g) == 0 and c < count:
            put(to, q, c, t)
        u += threads() >> g
    sync()

"""What threads compute together: reductions over a row by lanes of a warp, over many elements by a block.

The shape of every reduction follows from the number of elements alone, so that the result's bits depend neither on
blocks nor on the threads of a block.  A row is folded by 1, 2, 4, ... lanes of a warp, which a butterfly then joins
(`fold`, `joined`): short rows share a warp.  What is longer is cut into slots, which the threads of a block take in
turn, and which meet in shared memory (`reduce`).  All threads of a warp, or of the block, must call these together.

``term(args, q, k)`` is what element k gives to output q; ``join`` puts two terms together; ``zero`` changes nothing.
"""

from __future__ import annotations

import numpy as np

from calcvm.kernels_cuda._cuda import device, lane, shuffle_xor, sync, thread, threads, warp_size

PER_LANE = 4  # elements of a row that a lane takes before it shares the row with another
PER_SLOT = 8  # elements of a column that a slot takes before there are two
WARPS_OF_SLOTS = 8  # slots that a long column is cut into, in warps: a block of 256 threads takes them all at once
ROOM = 16  # totals of a block that shared memory holds, for each of its threads; in float64 too


@device
def warp():
    """Number of the thread's warp in its block."""
    return thread() // warp_size()


@device
def warps():
    """Warps of a block."""
    return threads() // warp_size()


@device
def warp_sum(x):
    """Sum of the lanes' ``x``."""
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
    """The larger; NaN if either is."""
    return x if x > y or x != x else y


@device
def minimum(x, y):
    """The smaller; NaN if either is."""
    return x if x < y or x != x else y


@device
def larger(x, y):
    """The larger; a NaN may be missed."""
    return x if x > y else y


# ---------------------------------------------------------------- numbers
@device
def divide(a, b):
    """a // b of a >= 0 and b > 0; the compiler does it in 32 bits where they suffice."""
    return np.int64(np.uint64(a) // np.uint64(b))


@device
def log2_up(n, most):
    """The smallest s with 2**s >= n, or with 2**s >= most where n is larger."""
    s = 0
    while (1 << s) < n and (1 << s) < most:
        s += 1
    return s


@device
def lanes_of(n):
    """log2 of the lanes that a row of n elements takes: as few as leave each at most PER_LANE, at most a warp."""
    return log2_up((n + PER_LANE - 1) // PER_LANE, warp_size())


@device
def slots_of(n):
    """log2 of the slots that n elements are cut into."""
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

    y may be what the term reads at k: past the end the last element is read again, and nothing is made of it.
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
    """``x`` of 2**shift neighbouring lanes put together; each of them gets the result."""
    step = (1 << shift) >> 1
    while step > 0:
        x = join(x, shuffle_xor(x, step))
        step >>= 1
    return x


@device
def lane_in(shift):
    """Number of the lane among its 2**shift."""
    return lane() & ((1 << shift) - 1)


@device
def group_in(shift):
    """Number among the warp's groups of 2**shift lanes."""
    return lane() >> shift


@device
def group_before(shift):
    """Groups of 2**shift lanes in the warps before the thread's: the same for all lanes of a warp, for loops."""
    return (thread() - lane()) >> shift


# ---------------------------------------------------------------- by a block
@device
def outputs_at_once(shift):
    """Outputs of 2**shift slots whose totals fit shared memory; odd, so that threads meet no bank twice."""
    return ((ROOM * threads()) >> shift) - 1


@device
def slot_in(u, count, shift, row):
    """Of unit u of ``count`` outputs of 2**shift slots each: output and slot.

    Neighbouring threads take neighbouring elements: those of a ``row``, or of columns.
    """
    along = 1 << shift if row else count
    major = np.int64(np.uint32(u) // np.uint32(along))  # 32 bits suffice: both are at most ROOM * threads()
    minor = u - major * along
    return (major, minor) if row else (minor, major)


@device
def slot_of(u, count, shift, q, R, I):
    """Of unit u of ``count`` outputs from q on, each of 2**shift slots: output, slot, first and last element."""
    c, slot = slot_in(u, count, shift, I == 1)
    k = q + c + divide(q + c, I) * (R - 1) * I  # the output's element at r = 0
    return c, slot, k + slot * I, k + (R - 1) * I


@device
def reduce(term, join, zero, total, args, totals, put, to, q, stop, R, I):
    """Call ``put(to, q, c, t)`` for output q + c, t its joined terms, for as many c as fit; returns how many.

    Elements are (O, R, I), outputs (O, I), of which q to stop are wanted; the join is over R.  totals : shared memory,
    in the dtype of ``total``, which the joining begins with.
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
    """Call ``put(to, q, c, t)`` for c < count, t the joined totals of output c: ``totals`` are free afterwards."""
    join_apart(join, zero, total, totals, outputs_at_once(shift), put, to, q, count, shift)


@device
def join_apart(join, zero, total, totals, most, put, to, q, count, shift):
    """The same of totals whose slots are ``most`` apart."""
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

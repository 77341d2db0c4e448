"""Products over taps: what convolutions are made of.

A tap is a shift of the image; its product with its weights is a GEMM whose rows are wherever the shift finds them, or
zeros beside the image.  A table holds the address of each row: [tap, pixel].  So neither the image is copied (im2col), nor
do borders, strides, dilations or ends of rows have code of their own, and a tile takes pixels of several rows.  An entry
costs 0.3 ns, its product of 64 by 64 channels 30.

Sums run through taps, in order, and channels, in order, in chains of `blocks` of them: the same bits for any sharing.
"""

from __future__ import annotations

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from calcvm.kernels_cpu._common import I64, PI64, at, lanes, njit
from calcvm.kernels_cpu._gemm import MID, WIDE, mid_tiles, panel_vectors, wide_tiles
from calcvm.kernels_cpu._simd import Tiles, gather, lanewise, slides, taps

ENTRIES = 4096  # of a table: 32 KiB
MOST_TAPS = 170  # of a block: 24 pixels each
PIXELS = 240  # as in ops.convolution: of a block at most, whole tiles of 6 and 8
ROWS = 2048  # as there: of weights in a block of taps, 512 KiB of a panel

wide_taps, mid_taps = taps(wide_tiles), taps(mid_tiles)
tail_taps = taps(lambda target: Tiles(((8, 8), (4, 1)), 1, True))
wide_gather, mid_gather = gather(wide_tiles), gather(mid_tiles)
tail_gather = gather(lambda target: Tiles(((8, 8), (4, 1)), 1, True))
wide_lanes, mid_lanes = lanewise(wide_tiles), lanewise(mid_tiles)
wide_slides, mid_slides = slides(wide_tiles), slides(mid_tiles)
tail_slides = slides(lambda target: Tiles(((8, 8), (4, 1)), 1, True))
tail_lanes = lanewise(lambda target: Tiles(((8, 8), (4, 1)), 1, True))


@intrinsic
def address(tc, p):
    """A pointer as a number."""
    return types.int64(p), lambda ctx, b, sig, args: b.ptrtoint(args[0], I64)


@intrinsic
def table(tc):
    """Room for `ENTRIES` addresses on the stack."""

    def codegen(ctx, b, sig, args):
        return cgutils.alloca_once(b, I64, ENTRIES)

    return PI64(), codegen


@njit(inline=True)
def blocks(n_taps, depth):
    """Taps of a block, for weights of so many channels."""
    return min(n_taps, max(ROWS // max(depth, 1), 1), MOST_TAPS)


@njit(inline=True)
def pixels(n_taps):
    """Pixels of a block: their entries fit the table."""
    return min(ENTRIES // n_taps // 24 * 24, PIXELS)


@njit(inline=True)
def spread(entries, n, lo, hi, first, step, zero):
    """entries[j] = first + j*step for lo <= j < hi, ``zero`` for the others of n."""
    lo = min(max(lo, 0), n)
    hi = max(min(hi, n), lo)
    for j in range(lo):
        entries[j] = zero
    for j in range(lo, hi):
        entries[j] = first + j * step
    for j in range(hi, n):
        entries[j] = zero


@njit(inline=True)
def over_taps(m, n, n_taps, depth, entries, stride, b, brs, c, crs, init, irs, mode):
    """C (m, n) = init + the products of taps: A's rows from the table, B (n_taps*depth, n)."""
    size = lanes(b)
    j = 0
    while j < n:
        nv = panel_vectors(n - j, size)
        rem = min(n - j - (nv - 1) * size, size)
        bj, cj, dj = at(b, j), at(c, j), at(init, j)
        if nv == WIDE():
            wide_taps(m, n_taps, depth, entries, stride, bj, brs, cj, crs, dj, irs, mode, rem)
        elif nv == MID() and nv > 1:
            mid_taps(m, n_taps, depth, entries, stride, bj, brs, cj, crs, dj, irs, mode, rem)
        else:
            tail_taps(m, n_taps, depth, entries, stride, bj, brs, cj, crs, dj, irs, mode, rem)
        j += nv * size


@njit(inline=True)
def over_pixels(m, n, n_pixels, entries, off, b, brs, c, crs, mode):
    """C (m, n) (+)= sum over pixels of m elements from ``off`` on of where the table says, times a row of B."""
    size = lanes(b)
    j = 0
    while j < n:
        nv = panel_vectors(n - j, size)
        rem = min(n - j - (nv - 1) * size, size)
        bj, cj = at(b, j), at(c, j)
        if nv == WIDE():
            wide_gather(m, n_pixels, entries, off, bj, brs, cj, crs, cj, crs, mode, rem)
        elif nv == MID() and nv > 1:
            mid_gather(m, n_pixels, entries, off, bj, brs, cj, crs, cj, crs, mode, rem)
        else:
            tail_gather(m, n_pixels, entries, off, bj, brs, cj, crs, cj, crs, mode, rem)
        j += nv * size


@njit(inline=True)
def over_lanes(m, n, count, entries, rs, ks, b, brs, c, crs, init, irs, mode):
    """C (m, n) = init + sums over ``count`` elements of where the table says times those of B, column by column."""
    size = lanes(b)
    j = 0
    while j < n:
        nv = panel_vectors(n - j, size)
        rem = min(n - j - (nv - 1) * size, size)
        bj, cj, dj = at(b, j), at(c, j), at(init, j)
        if nv == WIDE():
            wide_lanes(m, count, entries, rs, ks, j, bj, brs, cj, crs, dj, irs, mode, rem)
        elif nv == MID() and nv > 1:
            mid_lanes(m, count, entries, rs, ks, j, bj, brs, cj, crs, dj, irs, mode, rem)
        else:
            tail_lanes(m, count, entries, rs, ks, j, bj, brs, cj, crs, dj, irs, mode, rem)
        j += nv * size


@njit(inline=True)
def over_planes(m, n, n_taps, depth, a, ars, ats, acs, entries, plane, c):
    """C (m, n) = products of A (m, n_taps, depth) and of planes of elements side by side, shifted by what the table says."""
    size = lanes(c)
    j = 0
    while j < n:
        nv = panel_vectors(n - j, size)
        rem = min(n - j - (nv - 1) * size, size)
        cj = at(c, j)
        if nv == WIDE():
            wide_slides(m, n_taps, depth, a, ars, ats, acs, entries, j, c, plane, cj, n, cj, n, 0, rem)
        elif nv == MID() and nv > 1:
            mid_slides(m, n_taps, depth, a, ars, ats, acs, entries, j, c, plane, cj, n, cj, n, 0, rem)
        else:
            tail_slides(m, n_taps, depth, a, ars, ats, acs, entries, j, c, plane, cj, n, cj, n, 0, rem)
        j += nv * size

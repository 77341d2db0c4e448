"""Products over taps, of which convolutions consist.

A tap is a shift of the image.  Its product with its weights is a GEMM whose rows lie wherever the shift finds them, or are
zeros beside the image.  A table holds the address of each row: [tap, pixel].  So the image is not copied (im2col); borders,
strides, dilations and ends of rows need no separate code; and a tile takes pixels of several rows.  An entry costs
0.3 ns, its product of 64 by 64 channels 30.

Sums run in order through taps and channels, in chains of `blocks` of them: the bits are the same for any sharing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from calcvm.kernels_cpu._common import PINT, WORD, at, lanes, njit, routine
from calcvm.kernels_cpu._gemm import (
    MID,
    WIDE,
    ends_half,
    half_tiles,
    mid_tiles,
    panel_vectors,
    tail_tiles,
    transposed,
    wide_tiles,
)
from calcvm.kernels_cpu._simd import Tiles, gather, lanewise, slides, taps, unfold
from calcvm.kernels_cpu._target import Target

ENTRIES = 4096  # of a table: 32 KiB
MOST_TAPS = 170  # taps of a block: 24 pixels each
PIXELS = 240  # as in ops.convolution: pixels of a block at most, whole tiles of 6 and 8
ROWS = 2048  # as in ops.convolution: rows of weights in a block of taps, 512 KiB of a panel


@intrinsic
def address(tc, p):
    """A pointer as an integer."""
    return types.intp(p), lambda ctx, b, sig, args: b.ptrtoint(args[0], WORD)


@intrinsic
def table(tc):
    """Space for `ENTRIES` addresses on the stack."""

    def codegen(ctx, b, sig, args):
        return cgutils.alloca_once(b, WORD, ENTRIES)

    return PINT(), codegen


@njit(inline=True)
def blocks(n_taps, depth):
    """The number of taps in a block, for weights of ``depth`` channels."""
    return min(n_taps, max(ROWS // max(depth, 1), 1), MOST_TAPS)


@njit(inline=True)
def pixels(n_taps):
    """The number of pixels in a block, whose entries fit the table."""
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


def _over(name: str, kinds: str, micro: Callable, last: Callable[[Target], Tiles] = half_tiles) -> Any:
    """A routine ``f(m, n, b, brs, c, crs, init, irs, mode, *own)``: C (m, n) = init + products, a panel of columns at a time."""
    wide, mid, half, tail = map(micro, (wide_tiles, mid_tiles, last, tail_tiles))

    def over(m, n, b, brs, c, crs, init, irs, mode, *own):
        size = lanes(b)
        j = 0
        while j < n:
            nv = panel_vectors(n - j, size)
            rem = min(n - j - (nv - 1) * size, size)
            bj, cj, dj = at(b, j), at(c, j), at(init, j)
            if nv == WIDE():
                wide(m, *own, j, bj, brs, cj, crs, dj, irs, mode, rem)
            elif nv == MID() and rem <= ends_half(size):
                half(m, *own, j, bj, brs, cj, crs, dj, irs, mode, rem)
            elif nv == MID() and nv > 1:
                mid(m, *own, j, bj, brs, cj, crs, dj, irs, mode, rem)
            else:
                tail(m, *own, j, bj, brs, cj, crs, dj, irs, mode, rem)
            j += nv * size

    over.__name__ = name
    return routine("iipipipii" + kinds)(over)


# Products of taps: A's rows from the table, B (n_taps*depth, n); own: n_taps, depth, entries, stride.
over_taps = _over("over_taps", "iiti", taps)
# Sums over pixels: m elements, from ``off`` on, at the table's address, times a row of B; own: n_pixels, entries, off.
over_pixels = _over("over_pixels", "iti", gather)
# Sums over elements at the table's addresses times those of B, column by column; own: count, entries, rs, ks.
over_lanes = _over("over_lanes", "itii", lanewise, mid_tiles)
# Products of A (m, n_taps, depth) with planes of contiguous elements (``brs`` apart), shifted by the table;
# own: n_taps, depth, a, ars, ats, acs, entries.
over_planes = _over("over_planes", "iipiiit", slides, mid_tiles)


unfolded = unfold()


@routine("iipipi")
def turn(n, k, src, stride, dst, width):
    """dst[p*width + x] = src[x*stride + p] for x < n and p < k; columns past n, up to a whole vector, repeat n-1."""
    transposed(n, k, src, stride, dst, width)

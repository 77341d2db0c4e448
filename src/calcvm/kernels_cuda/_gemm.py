"""Matrix products of a thread block, C = init + A B by tiles, and sums that all workers compute in parts.

`_product` describes a product, and `_tiles` computes it.

Determinism.  Each element is one chain of fma over k in a block of ``kc`` summands, in order.  Block sums are added in
order, in every tile.  So the bits do not depend on tiles, on shares, or on splitting the sum.
"""

from __future__ import annotations

from calcvm.kernels_cuda._cuda import device, thread, threads
from calcvm.kernels_cuda._product import C_RS, described
from calcvm.kernels_cuda._tiles import choose, tile

KC = 512  # summands in a block: a multiple of every step
SLOTS, SLOT_ELEMS = 64, 1 << 20  # partial results of a split sum, and the number of their elements


@device
def gemm(h, m, n, last):
    """The m x n elements of the described `product`, of ``last`` summands, computed by this block alone."""
    which, rows, cols = choose(h, m, n, 1, 1)
    i = 0
    while i < m:
        j = 0
        while j < n:
            tile(h, which, i, j, min(rows, m - i), min(cols, n - j), 0, last, 0)
            j += cols
        i += rows


@device
def summands(last, elems):
    """Summands per block, for results of so many elements; small results may have many partial sums."""
    slots = min(max(SLOT_ELEMS // max(elems, 1), 1), SLOTS)
    if last <= KC * slots:
        return KC
    return (last + KC * slots - 1) // (KC * slots) * KC


@device
def worth_splitting(nw, last, kc, elems, wn):
    """Whether all workers should compute partial sums of a result that is shared by rows, and scratch suffices for them."""
    parts = (last + kc - 1) // kc
    return nw > 1 and (parts > 1 or (last > 128 and elems >= 1 << 18)) and parts * elems <= wn


@device
def partial_sums(me, m, n, last, kc):
    """The sums of each block of ``kc`` summands, as m rows of C per block; the workers share the tiles of all blocks."""
    h, nw = me.heap, me.workers
    blocks = (last + kc - 1) // kc
    which, rows, cols = choose(h, m, n, blocks, nw)
    down, across = (m + rows - 1) // rows, (n + cols - 1) // cols
    unit = me.worker
    while unit < down * across * blocks:
        part = unit // (down * across)
        i = unit // across - part * down
        j = (unit - (part * down + i) * across) * cols
        i *= rows
        first = part * kc
        off = part * m * described(h)[C_RS]
        tile(h, which, i, j, min(rows, m - i), min(cols, n - j), first, min(first + kc, last), off)
        unit += nw


@device
def add_up(lo, hi, last, kc, elems, ws, c, acc):
    """c[i] (+)= the sum of the blocks' partial sums ws[p*elems + i], in order, for i in [lo, hi)."""
    blocks = (last + kc - 1) // kc
    i = lo + thread()
    while i < hi:
        p, x = 1, ws[i]
        if acc:
            x = c[i] + x
        while p + 3 < blocks:
            x0, x1 = ws[p * elems + i], ws[(p + 1) * elems + i]
            x2, x3 = ws[(p + 2) * elems + i], ws[(p + 3) * elems + i]
            x = x + x0
            x = x + x1
            x = x + x2
            x = x + x3
            p += 4
        while p < blocks:
            x = x + ws[p * elems + i]
            p += 1
        c[i] = x
        i += threads()

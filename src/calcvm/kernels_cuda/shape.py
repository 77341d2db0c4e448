"""Kernels that move elements."""

from __future__ import annotations

from calcvm.kernel import words
from calcvm.kernels_cuda._common import Ptr, given, kernel, kernel_as, share
from calcvm.kernels_cuda._cuda import at, device, like, shared, sync, thread, threads
from calcvm.kernels_cuda._loops import copy_lines, fill, gather, offset, onward, scatter
from calcvm.kernels_cuda._tuples import mapped


# ---------------------------------------------------------------- transposition
@device
def _side():
    """The side of a tile: two float64 tiles fit a block's shared memory."""
    return 32 if threads() > 64 else min(threads(), 16)


@device
def _tile(m, n, x, x_stride, y, y_stride, side, tile):
    """y[i*y_stride + j] = x[i + j*x_stride] for i below m and j below n, both cut to ``side``, through shared memory.

    Lines of the tile are one element longer than ``side``, so that a column of it spreads over as many banks as a line.
    """
    m, n = min(m, side), min(n, side)
    a, b, turn = thread() & (side - 1), thread() // side, threads() // side
    j = b
    while j < n and a < m:  # neighbouring threads take neighbours in x; four loads are in flight
        j1, j2, j3 = min(j + turn, n - 1), min(j + 2 * turn, n - 1), min(j + 3 * turn, n - 1)
        v, v1, v2, v3 = x[j * x_stride + a], x[j1 * x_stride + a], x[j2 * x_stride + a], x[j3 * x_stride + a]
        tile[j * (side + 1) + a] = v
        tile[j1 * (side + 1) + a] = v1
        tile[j2 * (side + 1) + a] = v2
        tile[j3 * (side + 1) + a] = v3
        j += 4 * turn
    sync()
    i = b
    while i < m and a < n:  # and now neighbours in y
        y[i * y_stride + a] = tile[a * (side + 1) + i]
        i += turn


@device
def _tiles(n0, d, x, s, y, y_s, m, y_stride):
    """y = x[strides s] over axes (n0, *d), where x is contiguous along another axis, of size m and stride ``y_stride``.

    The block processes tiles of that axis and the last one in turn, in two buffers: a thread may fill one while others
    still empty the other, so it waits once per tile.
    """
    side, n = _side(), d[4]
    now, other = shared(x), at(shared(x), side * (side + 1))
    i, over = (0, 0, 0, 0, 0, 0), (d[0], d[1], d[2], d[3], 1)
    while i[0] < n0:
        x_i, y_i = at(x, offset(i, s)), at(y, offset(i, y_s))
        p = 0
        while p < m:
            q = 0
            while q < n:
                _tile(m - p, n - q, at(x_i, p + q * s[5]), s[5], at(y_i, p * y_stride + q), y_stride, side, now)
                now, other = other, now
                q += side
            p += side
        i = onward(i, (0, 0, 0, 0, 0, 1), over)


@device
def _permute(n0, d, x, s, y):
    """y[i0..i5] = x[sum_k ik*sk]; y is dense, (n0, *d)."""
    d1, d2, d3, d4, d5 = d
    y_s = (d1 * d2 * d3 * d4 * d5, d2 * d3 * d4 * d5, d3 * d4 * d5, d4 * d5, d5, 1)
    m, y_stride, c0, c1, c2, c3, c4 = 1, 0, n0, d1, d2, d3, d4
    if s[4] == 1 and d4 > 1:  # x is contiguous along this axis
        m, y_stride, c4 = d4, y_s[4], 1
    elif s[3] == 1 and d3 > 1:
        m, y_stride, c3 = d3, y_s[3], 1
    elif s[2] == 1 and d2 > 1:
        m, y_stride, c2 = d2, y_s[2], 1
    elif s[1] == 1 and d1 > 1:
        m, y_stride, c1 = d1, y_s[1], 1
    elif s[0] == 1:
        m, y_stride, c0 = n0, y_s[0], 1
    if n0 * y_s[0] <= 0:
        return
    if s[5] == 1 and y_s[0] == d5:  # a line is a copy
        copy_lines(n0, d5, x, s[0], y, d5)
    elif s[5] != 1 and 4 * min(m, d5) >= _side():
        _tiles(c0, (c1, c2, c3, c4, d5), x, s, y, y_s, m, y_stride)
    else:  # neighbouring threads are neighbours in y, and in x or at least in its cache lines
        gather(n0, d, x, s, y)


@kernel_as("transpose_fwd", words("d0 d1 d2 d3 d4 d5 s0 s1 s2 s3 s4 s5 same", "", ("x.cells", "y.cells")))
@kernel_as("transpose_bwd", words("e0 e1 e2 e3 e4 e5 t0 t1 t2 t3 t4 t5 back", "", ("dy", "dx")))
def _transpose(me, d0, d1, d2, d3, d4, d5, s0, s1, s2, s3, s4, s5, stays, x, y):
    """y[i0..i5] = x[sum_k ik*sk]; y (d0..d5); d0 is shared, and x too if its leading axis stays."""
    lo, hi = share(me, d0)
    n = d1 * d2 * d3 * d4 * d5
    _permute(hi - lo, (d1, d2, d3, d4, d5), at(x, lo * s0), (s0, s1, s2, s3, s4, s5), at(y, lo * n))


# ---------------------------------------------------------------- concatenation
@kernel
def concat_fwd(me, rows, inner, A, B, a: Ptr.cells, b: Ptr.cells, y: Ptr.cells):
    """y[r] = a[r] followed by b[r]; a (rows*inner, A), b (rows*inner, B); rows are shared."""
    lo, hi = share(me, rows)
    r, lines = lo * inner, (hi - lo) * inner
    copy_lines(lines, A, at(a, r * A), A, at(y, r * (A + B)), A + B)
    copy_lines(lines, B, at(b, r * B), B, at(y, r * (A + B) + A), A + B)


@kernel
def concat_bwd_a(me, rows, inner, A, B, dy: Ptr, da: Ptr):
    """da[r] = the first A of dy[r]; rows are shared."""
    lo, hi = share(me, rows)
    copy_lines((hi - lo) * inner, A, at(dy, lo * inner * (A + B)), A + B, at(da, lo * inner * A), A)


@kernel
def concat_bwd_b(me, rows, inner, A, B, dy: Ptr, db: Ptr):
    """db[r] = the last B of dy[r]; rows are shared."""
    lo, hi = share(me, rows)
    copy_lines((hi - lo) * inner, B, at(dy, lo * inner * (A + B) + A), A + B, at(db, lo * inner * B), B)


PARTS = "abcdefgh"


@device
def _starts(sizes):
    """The starts of the parts of a line, and its length."""
    A, B, C, D, E, F, G, H = sizes
    ab, efg = A + B, E + F + G
    abcd = ab + C + D
    return (0, A, ab, ab + C, abcd, abcd + E, abcd + E + F, abcd + efg), abcd + efg + H


@device
def _join(x, n, start, me, r, lines, y, total):
    if given(me, x):
        copy_lines(lines, n, at(x, r * n), n, at(y, r * total + start), total)


@device
def _part(dx, n, start, me, r, lines, dy, total):
    if given(me, dx):
        copy_lines(lines, n, at(dy, r * total + start), total, at(dx, r * n), n)


@kernel_as(
    "concat_many_fwd", words(f"rows inner {' '.join(PARTS.upper())}", "", (*(f"{p}.cells" for p in PARTS), "y.cells"))
)
def concat_many_fwd(me, rows, inner, A, B, C, D, E, F, G, H, a, b, c, d, e, f, g, h, y):
    """y[r] = a[r] followed by b[r], ..., of A, B, ... elements; rows are shared."""
    lo, hi = share(me, rows)
    starts, total = _starts((A, B, C, D, E, F, G, H))
    parts = (a, b, c, d, e, f, g, h), (A, B, C, D, E, F, G, H), starts
    mapped(_join, parts, me, lo * inner, (hi - lo) * inner, y, total)


@kernel_as("concat_many_bwd", words(f"rows inner {' '.join(PARTS.upper())}", "", ("dy", *(f"d{p}" for p in PARTS))))
def concat_many_bwd(me, rows, inner, A, B, C, D, E, F, G, H, dy, da, db, dc, dd, de, df, dg, dh):
    """da[r] = the first A of dy[r], db[r] = the next B, ...; rows are shared."""
    lo, hi = share(me, rows)
    starts, total = _starts((A, B, C, D, E, F, G, H))
    parts = (da, db, dc, dd, de, df, dg, dh), (A, B, C, D, E, F, G, H), starts
    mapped(_part, parts, me, lo * inner, (hi - lo) * inner, dy, total)


# ---------------------------------------------------------------- slices
@kernel
def slice_fwd(me, rows, cols, first, off, d0, d1, d2, d3, d4, d5, s1, s2, s3, s4, x: Ptr.cells, y: Ptr.cells):
    """y[i0] = the block (d1..d5) at ``off`` in row first + i0 of x (rows, cols); d0 is shared."""
    lo, hi = share(me, d0)
    n = d1 * d2 * d3 * d4 * d5
    x, y = at(x, (first + lo) * cols + off), at(y, lo * n)
    if n == d5:
        copy_lines(hi - lo, n, x, cols, y, n)
    else:
        gather(hi - lo, (d1, d2, d3, d4, d5), x, (cols, s1, s2, s3, s4, 1), y)


@kernel
def slice_bwd(me, rows, cols, first, off, d0, d1, d2, d3, d4, d5, s1, s2, s3, s4, dy: Ptr, dx: Ptr):
    """dx = dy in the block that `slice_fwd` read, 0 elsewhere; all of dx is set; rows are shared."""
    lo, hi = share(me, rows)
    n = d1 * d2 * d3 * d4 * d5
    fill(lo * cols, hi * cols, dx, like(dx, 0))
    sync()
    lo, hi = max(lo, first), min(hi, first + d0)
    dy, dx = at(dy, (lo - first) * n), at(dx, lo * cols + off)
    if n == d5:
        copy_lines(hi - lo, n, dy, n, dx, cols)
    else:
        scatter(hi - lo, (d1, d2, d3, d4, d5), dy, dx, (cols, s1, s2, s3, s4, 1))

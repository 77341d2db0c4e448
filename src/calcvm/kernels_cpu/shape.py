"""Kernels that move elements."""

from __future__ import annotations

from calcvm.kernel import words
from calcvm.kernels_cpu._common import Ptr, at, given, kernel, kernel_as, lanes, like, njit, share
from calcvm.kernels_cpu._math import copy, fill, tiles, unweave2, unweave3, unweave4, weave2, weave3, weave4

TILE = 16  # a tile of lines of x and y fits L1, whatever the strides


@njit
def _move(m, n, y, y_stride, x, x_stride, x_step):
    """y[i*y_stride + j] = x[i*x_stride + j*x_step] for i in [0, m), j in [0, n)."""
    if x_step == 1:
        if x_stride == n and y_stride == n:
            m, n = 1, m * n
        for i in range(m):
            copy(n, at(x, i * x_stride), at(y, i * y_stride))
        return
    size, i_start, j_start = lanes(x), 0, 0
    if x_stride == 1 and min(m, n) >= size:  # the last tiles begin early enough to be whole
        for i0 in range(0, m, size):
            i = min(i0, m - size)
            tiles(n - n % size, x_step, y_stride, at(x, i), at(y, i * y_stride))
            if n % size != 0:
                j = n - size
                tiles(size, x_step, y_stride, at(x, i + j * x_step), at(y, i * y_stride + j))
        return
    if x_stride == 1 and x_step == m and 2 <= m <= 4:
        j_start = n - n % size
        if m == 2:
            unweave2(j_start, y_stride, x, y)
        elif m == 3:
            unweave3(j_start, y_stride, x, y)
        else:
            unweave4(j_start, y_stride, x, y)
    elif x_stride == 1 and y_stride == n and 2 <= n <= 4:
        i_start = m - m % size
        if n == 2:
            weave2(i_start, x_step, x, y)
        elif n == 3:
            weave3(i_start, x_step, x, y)
        else:
            weave4(i_start, x_step, x, y)
    for i0 in range(i_start, m, TILE):
        for j0 in range(j_start, n, TILE):
            for i in range(i0, min(i0 + TILE, m)):
                xi, yi = at(x, i * x_stride), at(y, i * y_stride)
                for j in range(j0, min(j0 + TILE, n)):
                    yi[j] = xi[j * x_step]


@kernel_as("transpose_fwd", words("d0 d1 d2 d3 d4 d5 s0 s1 s2 s3 s4 s5 same", "", ("x.cells", "y.cells")))
@kernel_as("transpose_bwd", words("e0 e1 e2 e3 e4 e5 t0 t1 t2 t3 t4 t5 back", "", ("dy", "dx")))
def _permute(me, d0, d1, d2, d3, d4, d5, s0, s1, s2, s3, s4, s5, same, x, y):
    """y[i0..i5] = x[sum_k ik*sk]; y (d0..d5); d0 is shared, and x too if its leading axis stays."""
    lo, hi = share(me, d0)
    d0, x, y = hi - lo, at(x, lo * s0), at(y, lo * d1 * d2 * d3 * d4 * d5)
    if d1 * d2 * d3 * d4 == 1:
        _move(d0, d5, y, d5, x, s0, s5)
        return
    if d1 * d2 * d3 * d4 * d5 == 0:
        return
    t4, t3 = d5, d4 * d5
    t2 = d3 * t3
    t1 = d2 * t2
    t0 = d1 * t1
    if s5 != 1 and s4 != 1:  # the axis along which x is contiguous moves beside y's: 32x10x64x8 by (0, 3, 1, 2)
        if s3 == 1:
            d3, s3, t3, d4, s4, t4 = d4, s4, t4, d3, s3, t3
        elif s2 == 1:
            d2, s2, t2, d4, s4, t4 = d4, s4, t4, d2, s2, t2
        elif s1 == 1:
            d1, s1, t1, d4, s4, t4 = d4, s4, t4, d1, s1, t1
        elif s0 == 1 and d0 > 1:
            d0, s0, t0, d4, s4, t4 = d4, s4, t4, d0, s0, t0
    for i0 in range(d0):
        for i1 in range(d1):
            for i2 in range(d2):
                for i3 in range(d3):
                    to = at(y, i0 * t0 + i1 * t1 + i2 * t2 + i3 * t3)
                    _move(d4, d5, to, t4, at(x, i0 * s0 + i1 * s1 + i2 * s2 + i3 * s3), s4, s5)


# ---------------------------------------------------------------- concatenation
@kernel
def concat_fwd(me, rows, inner, A, B, a: Ptr.cells, b: Ptr.cells, y: Ptr.cells):
    """y[r] = a[r] followed by b[r]; a (rows*inner, A), b (rows*inner, B); rows are shared."""
    lo, hi = share(me, rows)
    for r in range(lo * inner, hi * inner):
        copy(A, at(a, r * A), at(y, r * (A + B)))
        copy(B, at(b, r * B), at(y, r * (A + B) + A))


def _concat_bwd(wrt: str, first: bool) -> None:
    @kernel_as(f"concat_bwd_{wrt}", words("rows inner A B", "", ("dy", f"d{wrt}")))
    def run(me, rows, inner, A, B, dy, dx):
        """dx[r] = the first A of dy[r], or the last B; rows are shared."""
        lo, hi = share(me, rows)
        n, start = (A, 0) if first else (B, A)
        for r in range(lo * inner, hi * inner):
            copy(n, at(dy, r * (A + B) + start), at(dx, r * n))


_concat_bwd("a", True)
_concat_bwd("b", False)


PARTS = "abcdefgh"


@njit(inline=True)
def _append(n, x, r, y):
    """Copy line r of x, of n elements, to y; returns the place after it."""
    if n != 0:
        copy(n, at(x, r * n), y)
    return at(y, n)


@njit(inline=True)
def _take(me, n, y, dx, r):
    """Copy n elements at y to line r of dx, if that is given; returns the place after them."""
    if n != 0 and given(me, dx):
        copy(n, y, at(dx, r * n))
    return at(y, n)


@kernel_as(
    "concat_many_fwd", words(f"rows inner {' '.join(PARTS.upper())}", "", (*(f"{p}.cells" for p in PARTS), "y.cells"))
)
def concat_many_fwd(me, rows, inner, A, B, C, D, E, F, G, H, a, b, c, d, e, f, g, h, y):
    """y[r] = a[r] followed by b[r], ..., of A, B, ... elements; rows are shared."""
    lo, hi = share(me, rows)
    y = at(y, lo * inner * (A + B + C + D + E + F + G + H))
    for r in range(lo * inner, hi * inner):
        y = _append(C, c, r, _append(B, b, r, _append(A, a, r, y)))
        y = _append(F, f, r, _append(E, e, r, _append(D, d, r, y)))
        y = _append(H, h, r, _append(G, g, r, y))


@kernel_as("concat_many_bwd", words(f"rows inner {' '.join(PARTS.upper())}", "", ("dy", *(f"d{p}" for p in PARTS))))
def concat_many_bwd(me, rows, inner, A, B, C, D, E, F, G, H, dy, da, db, dc, dd, de, df, dg, dh):
    """da[r] = the first A of dy[r], db[r] = the next B, ...; rows are shared."""
    lo, hi = share(me, rows)
    dy = at(dy, lo * inner * (A + B + C + D + E + F + G + H))
    for r in range(lo * inner, hi * inner):
        dy = _take(me, C, _take(me, B, _take(me, A, dy, da, r), db, r), dc, r)
        dy = _take(me, F, _take(me, E, _take(me, D, dy, dd, r), de, r), df, r)
        dy = _take(me, H, _take(me, G, dy, dg, r), dh, r)


# ---------------------------------------------------------------- slices
@njit
def _slices(rows, cols, d1, d2, d3, d4, d5, s1, s2, s3, s4, dense, strided, back):
    """Copy a (d1..d5) block of each row from its strided form to its dense form, or back."""
    if d5 == 0:
        return
    if (
        d1 * d2 * d3 * d4 == 1
    ):  # the loop over rows moves as far inside as possible: 1024 of 47 elements take 5 us instead of 27
        rows, d4, s4 = 1, rows, cols
    elif d1 * d2 * d3 == 1:
        rows, d3, s3 = 1, rows, cols
    elif d1 * d2 == 1:
        rows, d2, s2 = 1, rows, cols
    for i in range(rows):
        _block(d1, d2, d3, d4, d5, s1, s2, s3, s4, at(dense, i * d1 * d2 * d3 * d4 * d5), at(strided, i * cols), back)


@njit
def _block(d1, d2, d3, d4, d5, s1, s2, s3, s4, dense, strided, back):
    """The same for one row."""
    to = 0
    for i1 in range(d1):
        for i2 in range(d2):
            for i3 in range(d3):
                for i4 in range(d4):
                    start = i1 * s1 + i2 * s2 + i3 * s3 + i4 * s4
                    if back:
                        copy(d5, at(dense, to), at(strided, start))
                    else:
                        copy(d5, at(strided, start), at(dense, to))
                    to += d5


@kernel
def slice_fwd(me, rows, cols, first, off, d0, d1, d2, d3, d4, d5, s1, s2, s3, s4, x: Ptr.cells, y: Ptr.cells):
    """y[i0] = the block (d1..d5) at ``off`` in row first + i0 of x (rows, cols); d0 is shared."""
    lo, hi = share(me, d0)
    n = d1 * d2 * d3 * d4 * d5
    x = at(x, (first + lo) * cols + off)
    _slices(hi - lo, cols, d1, d2, d3, d4, d5, s1, s2, s3, s4, at(y, lo * n), x, False)


@kernel
def slice_bwd(me, rows, cols, first, off, d0, d1, d2, d3, d4, d5, s1, s2, s3, s4, dy: Ptr, dx: Ptr):
    """dx = dy in the block that `slice_fwd` read, 0 elsewhere; all of dx is set; rows are shared."""
    lo, hi = share(me, rows)
    n = d1 * d2 * d3 * d4 * d5
    fill((hi - lo) * cols, at(dx, lo * cols), like(me.heap, 0))
    lo, hi = max(lo, first), min(hi, first + d0)
    dx = at(dx, lo * cols + off)
    _slices(max(hi - lo, 0), cols, d1, d2, d3, d4, d5, s1, s2, s3, s4, at(dy, (lo - first) * n), dx, True)

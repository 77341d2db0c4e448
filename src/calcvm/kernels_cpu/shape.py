"""Kernels that move elements."""

from __future__ import annotations

from calcvm.kernels_cpu._common import Ptr, at, kernel, kernel_from, like, njit, share  # noqa: F401
from calcvm.kernels_cpu._math import copy, fill, lanes, tiles

TILE = 16  # a tile of lines of x and of y fits into L1 whatever the strides


@njit
def _move(m, n, y, y_stride, x, x_stride, x_step):
    """y[i*y_stride + j] = x[i*x_stride + j*x_step] for i in [0, m), j in [0, n)."""
    if x_step == 1:
        for i in range(m):
            copy(n, at(x, i * x_stride), at(y, i * y_stride))
        return
    i_start = 0
    if x_stride == 1:
        size = lanes(x)
        whole = n - n % size
        i_start = m - m % size
        for i in range(0, i_start, size):
            tiles(whole, x_step, y_stride, at(x, i), at(y, i * y_stride))
        for i in range(i_start):
            for j in range(whole, n):
                y[i * y_stride + j] = x[i + j * x_step]
    for i0 in range(i_start, m, TILE):
        for j0 in range(0, n, TILE):
            for i in range(i0, min(i0 + TILE, m)):
                xi, yi = at(x, i * x_stride), at(y, i * y_stride)
                for j in range(j0, min(j0 + TILE, n)):
                    yi[j] = xi[j * x_step]


PERMUTE = '''\
def {name}(w, nw, d0, d1, d2, d3, d4, d5, s0, s1, s2, s3, s4, s5, same, {x}: Ptr, {y}: Ptr):
    """{y}[i0..i5] = {x}[sum_k ik*sk]; {y} (d0..d5); d0 is shared, {x} too where its leading axis stays."""
    lo, hi = share(d0, w, nw)
    n = d4 * d5
    if d1 * d2 * d3 * d4 == 1:
        _move(hi - lo, d5, at({y}, lo * d5), d5, at({x}, lo * s0), s0, s5)
        return
    if d1 * d2 * d3 * n == 0:
        return
    to = lo * d1 * d2 * d3 * n
    for i0 in range(lo, hi):
        for i1 in range(d1):
            for i2 in range(d2):
                for i3 in range(d3):
                    start = i0 * s0 + i1 * s1 + i2 * s2 + i3 * s3
                    _move(d4, d5, at({y}, to), d5, at({x}, start), s4, s5)
                    to += n
'''
kernel_from(PERMUTE.format(name="transpose_fwd", x="x", y="y"), globals())


BACK = PERMUTE
for _k in range(6):
    BACK = BACK.replace(f"d{_k}", f"e{_k}").replace(f"s{_k}", f"t{_k}")
kernel_from(BACK.replace("same", "back").format(name="transpose_bwd", x="dy", y="dx"), globals())


# ---------------------------------------------------------------- concatenation
@kernel
def concat_fwd(w, nw, rows, inner, A, B, a: Ptr, b: Ptr, y: Ptr):
    """y[r] = a[r] followed by b[r]; a (rows*inner, A), b (rows*inner, B); rows are shared."""
    lo, hi = share(rows, w, nw)
    for r in range(lo * inner, hi * inner):
        copy(A, at(a, r * A), at(y, r * (A + B)))
        copy(B, at(b, r * B), at(y, r * (A + B) + A))


@kernel
def concat_bwd_a(w, nw, rows, inner, A, B, dy: Ptr, da: Ptr):
    """da[r] = the first A of dy[r]; rows are shared."""
    lo, hi = share(rows, w, nw)
    for r in range(lo * inner, hi * inner):
        copy(A, at(dy, r * (A + B)), at(da, r * A))


@kernel
def concat_bwd_b(w, nw, rows, inner, A, B, dy: Ptr, db: Ptr):
    """db[r] = the last B of dy[r]; rows are shared."""
    lo, hi = share(rows, w, nw)
    for r in range(lo * inner, hi * inner):
        copy(B, at(dy, r * (A + B) + A), at(db, r * B))


# ---------------------------------------------------------------- slices
@njit
def _slices(d1, d2, d3, d4, d5, s1, s2, s3, s4, dense, strided, back):
    """Copy one (d1..d5) block between its dense form and the strided one."""
    to = 0
    if d5 == 0:
        return
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
def slice_fwd(w, nw, rows, cols, first, off, d0, d1, d2, d3, d4, d5, s1, s2, s3, s4, x: Ptr, y: Ptr):
    """y[i0] = the block (d1..d5) at ``off`` in row first + i0 of x (rows, cols); d0 is shared."""
    lo, hi = share(d0, w, nw)
    n = d1 * d2 * d3 * d4 * d5
    for i in range(lo, hi):
        _slices(d1, d2, d3, d4, d5, s1, s2, s3, s4, at(y, i * n), at(x, (first + i) * cols + off), False)


@kernel
def slice_bwd(w, nw, rows, cols, first, off, d0, d1, d2, d3, d4, d5, s1, s2, s3, s4, dy: Ptr, dx: Ptr):
    """dx = 0, and dy in the block that `slice_fwd` read; all of dx is set; rows are shared."""
    lo, hi = share(rows, w, nw)
    n = d1 * d2 * d3 * d4 * d5
    fill((hi - lo) * cols, at(dx, lo * cols), like(h, 0))  # noqa: F821
    for r in range(max(lo, first), min(hi, first + d0)):
        _slices(d1, d2, d3, d4, d5, s1, s2, s3, s4, at(dy, (r - first) * n), at(dx, r * cols + off), True)

"""General matrix multiply, C = init + A B, blocked for the caches around the micro-kernels of ``_simd``.

Tiles.  C is computed in tiles held in registers, a panel of columns at a time: WIDE panels of 6 rows x 4
vectors (24 accumulators, 4 vectors of B and a broadcast of A fill the 32 registers of AVX-512 and NEON;
6 x 2 on the 16 of AVX2 and SSE), MID panels of 8 x 2 (8 x 1 without AVX-512), and a TAIL of 8 x 1 with dead
lanes.  Leftover rows take the panel's low tile.  With AVX-512 a masked load costs nothing, so panels may end in dead lanes and
50 columns are one WIDE panel; elsewhere only the TAIL is masked.  One Zen 5 core, float32: 6 x 4 and 8 x 2
run at 268-274 GFLOP/s for K from 64 to 784, the FMA peak; 12 x 2 no faster, 12 x 1 at 215, 24 x 1 at 140.

Blocks.  K in blocks of at most KC rows of B: a WIDE panel (128 KB) stays in L2, and the sum of a block is
added to what C holds.  KC = 256 with NC = 512 doubles the traffic of C: 2 to 6 % slower, 512^3 to 4096^3.
ROWS rows of A meet all of a block's columns while they are in L1.

Packing.  Into ``ws``, a block of KC x NC, where B is given by columns (16 x 16 elements transposed in
registers), or has rows so long that a panel meets a new page every row and rows enough of A to pay for the
copy: 32x4096x1024 130 against 98 GFLOP/s, but 24x1024x1024 168 against 215 and 24x128x784 190 against 264.
A is never packed: it is read by broadcast, at any stride.  A by columns with little reuse is prefetched:
784x64x10000 242 against 206 GFLOP/s.

Determinism.  Each element is one chain over k within a K block, in order, and block sums are added in
order, in every tile: the bits do not depend on how rows are shared among workers, nor on M.
"""

from __future__ import annotations

from calcvm.kernels_cpu._common import at, njit, routine
from calcvm.kernels_cpu._gemv import column_sums, dots
from calcvm.kernels_cpu._simd import FREE_MASKS, VECTOR_REGISTERS, lanes_of, micro, pack_rows, transpose

KC = 512  # rows of B in a block: a multiple of every vector's lanes
NC = 256  # columns of B in a packed block: a multiple of every panel's width
ROWS = 24  # rows of A in a block, up to half more in the last: a multiple of every tile's rows
PACK_ROWS, PACK_COLUMNS = 32, 1024  # B given by rows is packed from this size on
AHEAD = 32  # rows of B between the prefetch of A and its use

WIDE_ROWS, WIDE_LOW, WIDE = 6, 2, 4 if VECTOR_REGISTERS == 32 else 2
MID_ROWS, MID_LOW, MID = 8, 4, 2 if FREE_MASKS else 1
TAIL_ROWS = 8

wide, wide_low = micro(WIDE_ROWS, WIDE, FREE_MASKS, prefetch=True), micro(WIDE_LOW, WIDE, FREE_MASKS)
mid, mid_low = micro(MID_ROWS, MID, FREE_MASKS), micro(MID_LOW, MID, FREE_MASKS)
tail = micro(TAIL_ROWS, 1, True)
pack_wide = pack_rows(WIDE, FREE_MASKS)
transpose_block = transpose()


def gemm_ws(M: int, N: int, K: int, b_transposed: bool) -> int:
    """Elements of ``ws`` that a worker needs for any share of M rows; at most KC * NC = 131072.

    ``b_transposed``: ``b_cs != 1``.  ``gemv`` needs none.
    """
    if M == 0 or N <= 1 or not (b_transposed or (M >= 32 and N >= 1024)):
        return 0
    return min(K, 512) * min((N + 15) // 16 * 16, 256)


@njit(inline=True)
def panel_vectors(left, lanes):
    """Vectors in the next panel when ``left`` columns are left."""
    slack = lanes - 1 if FREE_MASKS else 0
    if left + slack >= WIDE * lanes:
        return WIDE
    if left + slack >= MID * lanes:
        return MID
    return 1


@njit(inline=True)
def pack(n, k, b, brs, bcs, ws):
    """Pack B[k, n] into panels of k rows, each panel as wide as its tile."""
    lanes = lanes_of(b)
    j = 0
    while j < n:
        nv = panel_vectors(n - j, lanes)
        width = nv * lanes
        src, dst = at(b, j * bcs), at(ws, j * k)
        live = min(width, n - j)
        if bcs == 1 and nv == WIDE:
            pack_wide(k, src, brs, dst, live - (WIDE - 1) * lanes)
        else:
            blocks = k // lanes * lanes if brs == 1 else 0
            for x in range(0, live, lanes):
                m = min(lanes, live - x)
                sx, dx = at(src, x * bcs), at(dst, x)
                for p in range(0, blocks, lanes):
                    transpose_block(m, at(sx, p), bcs, at(dx, p * width), width)
                for p in range(blocks, k):
                    for y in range(m):
                        dx[p * width + y] = sx[p * brs + y * bcs]
        j += width


@njit(inline=True)
def block(M, N, K, a, ars, acs, b, brs, packed, c, crs, init, irs, mode):
    """C = init + A @ B in tiles, ROWS rows of A at a time against all of B."""
    lanes = lanes_of(b)
    step = K if packed else 1
    r = 0
    while r < M:
        end = r + ROWS if M - r > ROWS + ROWS // 2 else M
        j = 0
        while j < N:
            left = N - j
            nv = panel_vectors(left, lanes)
            width = nv * lanes
            stride = width if packed else brs
            bj = at(b, j * step)
            rem = min(left - width + lanes, lanes)
            i = r
            if nv == WIDE:
                ahead = AHEAD * acs if acs != 1 and N <= 2 * WIDE * lanes else 0
                while i < end:
                    ai, ci, di = at(a, i * ars), at(c, i * crs + j), at(init, i * irs + j)
                    if end - i > 2 * WIDE_LOW:
                        wide(min(end - i, WIDE_ROWS), K, ai, ars, acs, bj, stride, ci, crs, di, irs, mode, rem, ahead)
                        i += WIDE_ROWS
                    else:
                        wide_low(min(end - i, WIDE_LOW), K, ai, ars, acs, bj, stride, ci, crs, di, irs, mode, rem)
                        i += WIDE_LOW
            elif nv == MID and (FREE_MASKS or rem == lanes):
                while i < end:
                    ai, ci, di = at(a, i * ars), at(c, i * crs + j), at(init, i * irs + j)
                    if end - i > MID_LOW:
                        mid(min(end - i, MID_ROWS), K, ai, ars, acs, bj, stride, ci, crs, di, irs, mode, rem)
                        i += MID_ROWS
                    else:
                        mid_low(end - i, K, ai, ars, acs, bj, stride, ci, crs, di, irs, mode, rem)
                        i += MID_LOW
            else:
                while i < end:
                    ai, ci, di = at(a, i * ars), at(c, i * crs + j), at(init, i * irs + j)
                    tail(min(end - i, TAIL_ROWS), K, ai, ars, acs, bj, stride, ci, crs, di, irs, mode, rem)
                    i += TAIL_ROWS
            j += width
        r = end


@routine("iiipiipiipipiip")
def gemm(M, N, K, a, a_rs, a_cs, b, b_rs, b_cs, c, c_rs, init, init_rs, mode, ws):
    """C[i,j] = INIT + sum_k A[i*a_rs + k*a_cs] * B[k*b_rs + j*b_cs]; C's rows are ``c_rs`` apart.

    INIT is 0 in mode 0 and init[i*init_rs + j] in mode 1: a bias with init_rs = 0, or C itself to
    accumulate.  ``b_cs`` is 1, or ``b_rs`` is (any strides are right, others slow).  ``ws``: ``gemm_ws`` elements.
    C may be init, and overlaps nothing else.
    """
    if M <= 0 or N <= 0:
        return
    if N == 1 and c_rs == 1 and b_rs == 1 and a_cs == 1 and (mode == 0 or init_rs <= 1):
        dots(M, K, b, a, a_rs, c, init, init_rs, mode)
        return
    if N == 1 and c_rs == 1 and a_rs == 1 and (mode == 0 or init_rs == 1):
        column_sums(M, K, b, b_rs, a, a_cs, c, init, mode, False)
        return
    packed = N > 1 and (b_cs != 1 or (M >= PACK_ROWS and N >= PACK_COLUMNS))
    kc = K
    if K > KC:  # blocks of equal size
        blocks = (K + KC - 1) // KC
        kc = ((K + blocks - 1) // blocks + 15) // 16 * 16
    p = 0
    while True:
        k = min(kc, K - p)
        j = 0
        while j < N:
            n = N
            bj, cj, dj = at(b, p * b_rs + j * b_cs), at(c, j), at(init, j)
            if packed:
                n = min(N - j, NC)
                pack(n, k, bj, b_rs, b_cs, ws)
                bj = ws
            block(M, n, k, at(a, p * a_cs), a_rs, a_cs, bj, b_rs, packed, cj, c_rs, dj, init_rs, mode)
            j += n
        p += k
        init, init_rs, mode = c, c_rs, 1
        if p >= K:
            return

"""General matrix multiply."""

from __future__ import annotations

from calcvm.kernels_cpu._common import at, njit, routine
from calcvm.kernels_cpu._simd import FREE_MASKS, VECTOR_REGISTERS, lanes_of, micro, pack_rows, transpose

KC = 512  # rows of B a block
NC = 256  # columns of B a packed block
ROWS = 24  # rows of A a block
PACK_MIN_ROWS, PACK_MIN_STRIDE = 48, 512

# tile shapes: (rows, rows of the remainder, vectors)
if VECTOR_REGISTERS == 32:
    WIDE_ROWS, WIDE_REST, WIDE = 6, 2, 4
else:
    WIDE_ROWS, WIDE_REST, WIDE = 6, 2, 2
MID_ROWS, MID_REST, MID = 8, 4, 2 if FREE_MASKS else 1
TAIL_ROWS = 8

wide, wide_rest = micro(WIDE_ROWS, WIDE, FREE_MASKS), micro(WIDE_REST, WIDE, FREE_MASKS)
mid, mid_rest = micro(MID_ROWS, MID, FREE_MASKS), micro(MID_REST, MID, FREE_MASKS)
tail = micro(TAIL_ROWS, 1, True)
pack_wide, pack_one = pack_rows(WIDE, FREE_MASKS), pack_rows(1, True)
transpose_block = transpose()


@njit
def panel_vectors(left, lanes):
    """Vectors in the next panel when ``left`` columns are left."""
    slack = lanes - 1 if FREE_MASKS else 0
    if left + slack >= WIDE * lanes:
        return WIDE
    if left + slack >= MID * lanes:
        return MID
    return 1


@njit
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


@njit
def block(M, N, K, a, ars, acs, b, brs, packed, c, crs, init, irs, mode):
    """C = init + A @ B in tiles, ROWS rows of A at a time against all of B."""
    lanes = lanes_of(b)
    step = K if packed else 1
    r = 0
    while r < M:
        end = min(M, r + ROWS)
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
                while i < end:
                    ai, ci, di = at(a, i * ars), at(c, i * crs + j), at(init, i * irs + j)
                    if end - i > 2 * WIDE_REST:
                        wide(min(end - i, WIDE_ROWS), K, ai, ars, acs, bj, stride, ci, crs, di, irs, mode, rem)
                        i += WIDE_ROWS
                    else:
                        wide_rest(min(end - i, WIDE_REST), K, ai, ars, acs, bj, stride, ci, crs, di, irs, mode, rem)
                        i += WIDE_REST
            elif nv == MID:
                while i < end:
                    ai, ci, di = at(a, i * ars), at(c, i * crs + j), at(init, i * irs + j)
                    if end - i > MID_REST:
                        mid(min(end - i, MID_ROWS), K, ai, ars, acs, bj, stride, ci, crs, di, irs, mode, rem)
                        i += MID_ROWS
                    else:
                        mid_rest(end - i, K, ai, ars, acs, bj, stride, ci, crs, di, irs, mode, rem)
                        i += MID_REST
            else:
                while i < end:
                    ai, ci, di = at(a, i * ars), at(c, i * crs + j), at(init, i * irs + j)
                    tail(min(end - i, TAIL_ROWS), K, ai, ars, acs, bj, stride, ci, crs, di, irs, mode, rem)
                    i += TAIL_ROWS
            j += width
        r = end


@routine("iiipiipiipipiip")
def gemm(M, N, K, a, a_rs, a_cs, b, b_rs, b_cs, c, c_rs, init, init_rs, mode, ws):
    """C[i,j] = INIT + sum_k A[i*a_rs + k*a_cs] * B[k*b_rs + j*b_cs]."""
    if M <= 0 or N <= 0:
        return
    packed = (b_cs != 1 and N > 1) or (b_rs >= PACK_MIN_STRIDE and M >= PACK_MIN_ROWS and K > 1)
    if not packed and K <= KC:
        block(M, N, K, a, a_rs, a_cs, b, b_rs, packed, c, c_rs, init, init_rs, mode)
        return
    blocks = (K + KC - 1) // KC
    kc = (K // max(blocks, 1) + 15) // 16 * 16
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

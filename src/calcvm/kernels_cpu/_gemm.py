"""General matrix multiply, C = init + A B, blocked for the caches around the micro-kernels of ``_simd``.

Tiles.  C is computed in tiles held in registers, one panel of columns at a time.  WIDE panels have tiles of 6 rows x 4
vectors: 24 accumulators, 4 vectors of B and a broadcast of A fill the 32 registers of AVX-512 and NEON (6 x 2 on the
16 registers of AVX2 and SSE).  MID panels have 8 x 2 (8 x 1 without AVX-512), and a TAIL has 8 x 1 with dead lanes.
Leftover rows take lower tiles.  Whole tiles have separate code, which knows how their rows lie.  With AVX-512 a masked
load costs nothing, so panels may end in dead lanes, and 60 columns are one WIDE panel; elsewhere only the TAIL is
masked.  One Zen 5 core, float32: 6 x 4 and 8 x 2 run at 268-274 GFLOP/s for K from 64 to 784, the FMA peak; 12 x 1 runs
at 215 and 24 x 1 at 140, with one pointer per row.  A TAIL of a column-major A has 16 rows off one pointer: 139 instead
of 120 GFLOP/s at 32x10x64.

If at most half of the last vector is left, a panel of two vectors ends in a half vector.  Zen 4 computes two of these at
once, since its AVX-512 units are 256 bits wide: 784x24x96 at 102 instead of 85 GFLOP/s, 640x50x500 at 97 instead of 92
(one core).  Up to THIN columns that the vectors leave are computed in vectors of C's rows, from a column-major A; a
row-major A is copied to be so: 32x3x16 at 69 instead of 28 GFLOP/s, 31x33x37 at 200 instead of 145.

Blocks.  K is split into blocks of at most KC rows of B, so that a WIDE panel (128 KB) stays in L2; each block's sum is
added to C.  KC = 256 with NC = 512 doubles the traffic of C and is 2 to 6 % slower, from 512^3 to 4096^3.
ROWS rows of A meet all columns of a block while they are in L2 (24, 48 and 96 rows make no difference).

Packing.  B is copied into ``ws``, a block of KC x NC, in two cases.  If B is column-major, squares of vectors are
transposed in registers, even if K is shorter than a vector: 32x64x10 A B^T runs at 91 GFLOP/s, element by element at 54
(one Zen 4 core, whose peak is 117).  If B's rows are so long that a panel meets a new page in every row, the copy pays
once A has enough rows: 32x4096x1024 at 130 instead of 98 GFLOP/s and 1000^3 at 234 instead of 213, but 24x1024x1024 at
168 instead of 215 and 24x128x784 at 190 instead of 264.

A is read by broadcast, at any stride.  If A is column-major with columns far apart, and several panels read it,
ROWS x KC elements are copied to the stack (96 KB in float32) and the next block is prefetched: 1000^3 at 238 instead of
199 GFLOP/s.  At strides of a power of two the prefetched lines evict each other from L2 (2048^3 at 220).  A column-major
A with little reuse is prefetched in place: 784x64x10000 at 242 instead of 206 GFLOP/s.

Few rows.  Up to FEW rows of A reuse B too little if B exceeds the caches, because a panel jumps from row to row of B.
Instead B is read eight whole rows at a time, as in ``gemv``, and added to a block's sums in ``ws``: 2x4096x25088 takes
19 instead of 41 ms, 8x4096x4096 4.5 instead of 10.  This does not pay if B is in cache: 4x4096x512 takes 230 instead of
166 us (one Zen 4 core).

Determinism.  Each element is one chain over k within a K block, in order.  The block sums are added in order, up to LONG
rows of B; then the sums of LONG rows each are added.  The order is the same in every tile, so the bits depend neither on
how rows are shared among workers nor on M.
"""

from __future__ import annotations

from calcvm.kernels_cpu._common import at, fact, free_masks, lanes, njit, routine
from calcvm.kernels_cpu._gemv import column_sums, dots, few_rows
from calcvm.kernels_cpu._math import copy, elementwise
from calcvm.kernels_cpu._simd import Tiles, pack_columns, pack_rows, panel, stack, thin, transpose
from calcvm.kernels_cpu._target import Target

KC = 512  # rows of B in a block: a multiple of every vector's lanes
NC = 256  # columns of B in a packed block: a multiple of every panel's width
LONG = 128 * KC  # rows of B summed block by block; longer sums run in parts of LONG rows, PART elements of C at a time
PART = 1 << 16
ROWS = 48  # rows of A in a block: a multiple of every tile's rows
PACK_ROWS, PACK_COLUMNS = 32, 512  # from this size on a row-major B is packed
FAR = 1 << 15  # a column-major A that spans this many elements is copied
THIN = 4  # up to this many leftover columns, vectors hold rows of C
FEW, LARGE = 8, 3 << 20  # B is read by whole rows for at most FEW rows of A and at least LARGE elements of B
AHEAD = 32  # columns of A between the prefetch of A and its use


def wide_tiles(target: Target) -> Tiles:
    return Tiles(((6, 6), (4, 3), (2, 1)), 4 if target.registers == 32 else 2, target.free_masks)


def mid_tiles(target: Target) -> Tiles:
    return Tiles(((8, 8), (4, 1)), 2 if target.free_masks else 1, target.free_masks)


def tail_tiles(target: Target) -> Tiles:
    return Tiles(((8, 8), (4, 1)), 1, True)


def half_tiles(target: Target) -> Tiles:
    return Tiles(((8, 8), (4, 1)), 2, True, half=True) if target.free_masks else tail_tiles(target)


add = elementwise(lambda x, y: x + y, "vv")
WIDE, MID = fact(lambda target: wide_tiles(target).vectors), fact(lambda target: mid_tiles(target).vectors)
wide, mid = panel(wide_tiles), panel(mid_tiles)
half, tail = panel(half_tiles), panel(tail_tiles)
tail_columns = panel(lambda target: Tiles(((16, 16),), 1, True), columns=True)
thin_block = thin()
copy_columns = pack_columns(ROWS)
a_block = stack(KC * ROWS)
of_long = stack(PART)
pack_wide = pack_rows(wide_tiles)
transposed = transpose()


@njit(inline=True)
def ends_half(size):
    """The most elements for which a half vector ends a panel; -1 if there are none."""
    return size // 2 if free_masks() else -1


@njit(inline=True)
def panel_vectors(left, size):
    """Vectors of ``size`` in the next panel when ``left`` columns are left."""
    slack = size - 1 if free_masks() else 0
    if left + slack >= WIDE() * size:
        return MID() if left <= (WIDE() - 1) * size + ends_half(size) else WIDE()
    if left + slack >= MID() * size:
        return MID()
    return 1


@njit(inline=True)
def pack(n, k, b, brs, bcs, ws):
    """Pack B[k, n] into panels of k rows, each as wide as its tile."""
    size = lanes(b)
    j = 0
    while j < n:
        nv = panel_vectors(n - j, size)
        width = nv * size
        src, dst = at(b, j * bcs), at(ws, j * k)
        live = min(width, n - j)
        if bcs == 1 and nv == WIDE():
            pack_wide(k, src, brs, dst, live - (WIDE() - 1) * size)
        elif brs == 1:
            transposed(live, k, src, bcs, dst, width)
        else:
            for p in range(k):
                for y in range(live):
                    dst[p * width + y] = src[p * brs + y * bcs]
        j += width


@njit(inline=True)
def block(M, N, K, a, ars, acs, b, brs, packed, c, crs, init, irs, mode):
    """C = init + A @ B in tiles, ROWS rows of A at a time against all of B."""
    size = lanes(b)
    step = K if packed else 1
    own = a_block(a)
    few = free_masks() and 1 <= N % size <= THIN and N % (WIDE() * size) < 3 * size
    r = 0
    while r < M:
        m = ROWS // 2 if ROWS < M - r < ROWS + ROWS // 2 else min(ROWS, M - r)
        ai, rs, cs = at(a, r * ars), ars, acs
        ahead, ahead_cs = ai, 0
        if acs == 1 and few and m >= 16:
            transposed(m, K, ai, ars, own, ROWS)
            ai, rs, cs = own, 1, ROWS
        elif ars == 1 and N > WIDE() * size and K * acs > FAR and (free_masks() or m == ROWS):
            copy_columns(m, K, ai, acs, own)
            ahead, ahead_cs = at(a, r + m if r + m < M else 0), acs
            ai, rs, cs = own, 1, ROWS
        elif ars == 1:
            ahead, ahead_cs = at(ai, AHEAD * acs), acs
        j = 0
        while j < N:
            left = N - j
            nv = panel_vectors(left, size)
            width = nv * size
            stride = width if packed else brs
            bj = at(b, j * step)
            rem = min(left - width + size, size)
            cj, dj = at(c, r * crs + j), at(init, r * irs + j)
            if nv == WIDE():
                wide(m, K, ai, rs, cs, bj, stride, ahead, ahead_cs, cj, crs, dj, irs, mode, rem)
                ahead, ahead_cs = ai, 0
            elif nv == MID() and rem <= ends_half(size):
                half(m, K, ai, rs, cs, bj, stride, ai, 0, cj, crs, dj, irs, mode, rem)
            elif nv == MID() and (free_masks() or rem == size):
                mid(m, K, ai, rs, cs, bj, stride, ai, 0, cj, crs, dj, irs, mode, rem)
            elif few and rs == 1 and m >= 16:
                thin_block(m, left, K, ai, cs, bj, stride, cj, crs, dj, irs, mode)
            else:
                x = m // 16 * 16 if rs == 1 else 0
                if x > 0:
                    tail_columns(x, K, ai, 1, cs, bj, stride, ai, 0, cj, crs, dj, irs, mode, rem)
                if x < m:
                    ax, cx, dx = at(ai, x * rs), at(cj, x * crs), at(dj, x * irs)
                    tail(m - x, K, ax, rs, cs, bj, stride, ai, 0, cx, crs, dx, irs, mode, rem)
            j += width
        r += m


@njit(inline=True)
def by_rows(M, N, K, a, ars, acs, b, brs, c, crs, init, irs, mode, ws):
    """C = init + A @ B by whole rows of B, with the bits of ``block``.  ``ws`` has M elements per lane of N's vectors."""
    size = lanes(b)
    few_rows(M, N, K, a, ars, acs, b, brs, ws)
    for j in range(0, N, size):
        for i in range(M):
            sums = at(ws, j * M + i * size)
            if mode:
                add(min(size, N - j), sums, at(init, i * irs + j), at(c, i * crs + j))
            else:
                copy(min(size, N - j), sums, at(c, i * crs + j))


@njit
def blocks_of(M, N, K, a, a_rs, a_cs, b, b_rs, b_cs, c, c_rs, init, init_rs, mode, ws, wn):
    """`gemm` of up to LONG summands, in blocks of K."""
    kc = K
    if K > KC:  # blocks of equal size
        blocks = (K + KC - 1) // KC
        kc = ((K + blocks - 1) // blocks + 15) // 16 * 16
    few = M <= FEW and b_cs == 1 and K * N >= LARGE and wn >= M * (N + lanes(b))
    packed = N > 1 and (b_cs != 1 or (M >= PACK_ROWS and N >= PACK_COLUMNS and wn >= 16 * kc))
    nc = NC if not packed or wn >= kc * min(N + 15, NC) else wn // kc // 16 * 16
    p = 0
    while True:
        k = min(kc, K - p)
        j = 0
        while j < N:
            n = N
            bj, cj, dj = at(b, p * b_rs + j * b_cs), at(c, j), at(init, j)
            if packed:
                n = min(N - j, nc)
                pack(n, k, bj, b_rs, b_cs, ws)
                bj = ws
            ap = at(a, p * a_cs)
            if few:
                by_rows(M, n, k, ap, a_rs, a_cs, bj, b_rs, cj, c_rs, dj, init_rs, mode, ws)
            else:
                block(M, n, k, ap, a_rs, a_cs, bj, b_rs, packed, cj, c_rs, dj, init_rs, mode)
            j += n
        p += k
        init, init_rs, mode = c, c_rs, 1
        if p >= K:
            return


@routine("iiipiipiipipiipi")
def gemm(M, N, K, a, a_rs, a_cs, b, b_rs, b_cs, c, c_rs, init, init_rs, mode, ws, wn):
    """C[i,j] = INIT + sum_k A[i*a_rs + k*a_cs] * B[k*b_rs + j*b_cs]; C's rows are ``c_rs`` apart.

    INIT is 0 in mode 0 and init[i*init_rs + j] in mode 1: a bias if init_rs = 0, or C itself to accumulate.
    ``b_cs`` or ``b_rs`` should be 1; other strides are correct but slow.  ``ws`` has ``wn`` elements: any number if
    ``b_cs`` is 1, else at least 16 * min(K, KC).  C may be init, and overlaps nothing else.
    """
    if M <= 0 or N <= 0:
        return
    if N == 1 and c_rs == 1 and b_rs == 1 and a_cs == 1 and (mode == 0 or init_rs <= 1):
        dots(M, K, b, a, a_rs, c, init, init_rs, mode)
        return
    if N == 1 and c_rs == 1 and a_rs == 1 and (mode == 0 or init_rs == 1):
        column_sums(M, K, b, b_rs, a, a_cs, c, init, mode, False)
        return
    if K <= LONG:
        blocks_of(M, N, K, a, a_rs, a_cs, b, b_rs, b_cs, c, c_rs, init, init_rs, mode, ws, wn)
        return
    blocks_of(M, N, LONG, a, a_rs, a_cs, b, b_rs, b_cs, c, c_rs, init, init_rs, mode, ws, wn)
    part, width = of_long(a), min(N, PACK_COLUMNS)
    height = PART // width // ROWS * ROWS
    for p in range(LONG, K, LONG):
        for j in range(0, N, width):
            for i in range(0, M, height):
                m, n = min(height, M - i), min(width, N - j)
                ai, bj = at(a, i * a_rs + p * a_cs), at(b, p * b_rs + j * b_cs)
                blocks_of(m, n, min(LONG, K - p), ai, a_rs, a_cs, bj, b_rs, b_cs, part, n, part, n, 0, ws, wn)
                for r in range(m):
                    to = at(c, (i + r) * c_rs + j)
                    add(n, to, at(part, r * n), to)

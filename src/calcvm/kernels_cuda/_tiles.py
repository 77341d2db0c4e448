"""Tiles of a product: factors in shared memory, sums in registers.

Tiles.  The threads of a block form a square of ``side()`` rows and columns.  Each computes a micro-tile of RM x RN
elements in registers, with rows ``side()`` apart and columns in groups of four neighbours, so that a warp's 4 x 8
threads read fragments of 16 bytes without bank conflicts.  `choose` takes the cheapest micro-tile for the shape.

Copies.  K is processed in steps of some columns of A and rows of B.  Up to four steps are in shared memory: later ones
are copied asynchronously while one is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from calcvm.kernels_cuda._copies import (
    by_major,
    by_minor,
    commit,
    copy,
    copy16,
    fetch,
    itemsize,
    log2,
    wait_for_step,
)
from calcvm.kernels_cuda._cuda import (
    I32,
    I64,
    at,
    compiled_by,
    device,
    in_global,
    ir,
    lane,
    like,
    sync,
    thread,
    threads,
    types,
)
from calcvm.kernels_cuda._loops import aligned
from calcvm.kernels_cuda._product import (
    A_GS,
    A_KS,
    A_RS,
    B_CS,
    B_GS,
    B_KS,
    BLOCK,
    C_RS,
    FIRST,
    INIT_RS,
    REAL,
    SEEN,
    SUMMANDS,
    A,
    B,
    described,
    put,
    tiles_at,
)
from calcvm.kernels_cuda._routines import ints, routine
from calcvm.kernels_cuda._tensor import (
    by_tensor_cores,
    place_of_warp,
    tensor_products,
    tensor_sum_at,
    warp_halves,
)
from calcvm.kernels_cuda._tuples import by_number, folded, in_turn, mapped, stores
from calcvm.kernels_cuda._windows import (
    PIXELS,
    image,
    lies,
    note_rows,
    of_row,
    pixel_at,
    table_bytes,
    tap_at,
    weights_at,
)


# ---------------------------------------------------------------- threads in a tile
@device
def side():
    """The number of rows of threads, and of columns."""
    return 1 << (log2(threads()) >> 1)


@device
def place():
    """A thread's row and column.  A warp is 4 x 8 threads."""
    t, bits = thread(), log2(threads()) >> 1
    if bits < 3:
        return t >> bits, t & ((1 << bits) - 1)
    warp = t >> 5
    across = bits - 3
    return ((t >> 3) & 3) + 4 * (warp >> across), (t & 7) + 8 * (warp & ((1 << across) - 1))


# ---------------------------------------------------------------- a tile
# Micro-tiles: rows and columns per thread, rounds in which results leave through shared memory, and cost per summand:
# the instructions of a thread, RM*RN of them products (SASS of sm_90; small tiles wait longer than they compute).
MICRO = (
    (8, 8, 4, 90),
    (4, 8, 2, 50),
    (5, 4, 1, 31),
    (4, 4, 1, 26),
    (2, 4, 1, 17),
    (1, 4, 1, 13),
    (5, 1, 1, 14),
    (1, 1, 1, 8),
)
TENSOR = (
    (2, 4, 10),
    (1, 4, 8),
    (1, 1, 6),
)  # tiles of tensor cores: fragments of a warp, down and across, and cost
DEPTH = 32  # float32 summands per step if two steps fit; half as many in float64
FEW = 64  # up to so many summands, steps are half as deep, so that all are copied at once

# The numbers of a tile's layout: `layout` computes them, `bring` uses them.
A_AT, B_AT, A_WIDE, B_WIDE, STEP, LDA, LDB, SIZE, IN_FLIGHT, A_HOW, B_HOW, A_TO, B_TO, A_ACROSS, B_ACROSS = range(15)
_HOW, _ACROSS = types.UniTuple(types.int64, 4), types.UniTuple(types.int64, 3)
LAYOUT = types.Tuple((*ints(9), _HOW, _HOW, *ints(2), _ACROSS, _ACROSS))
STATE = types.UniTuple(types.int64, 6)  # the state of `bring`


# Tiles call the code that they share, so a program has one copy, typed once.  With a copy per tile, and products as statements,
# a process's first matrix product took 19 s to PTX instead of 9 (Zen 5), and NVIDIA's assembler 2.5 s instead of 1.0.
@routine(lambda h: LAYOUT(h, *ints(7)))
def layout(h, i, j, first, last, rows, cols, pad):
    """How this thread copies a tile of rows x cols at (i, j) of a `product`: the start of A and B, whether 16 bytes are copied
    at once, summands per step, rows of the copies, their size, steps in flight, and each axis' first and next places."""
    h = in_global(h)
    p = described(h)
    S, a_rs, a_ks, b_ks, b_cs = p[SUMMANDS], p[A_RS], p[A_KS], p[B_KS], p[B_CS]
    a, b = p[A] + i * a_rs, p[B] + j * b_cs
    room = tiles_at(h)[1]
    if p[SEEN] != 0:
        room -= table_bytes(rows) // itemsize(h)
        note_rows(h, p[SEEN] == PIXELS, p[FIRST] + i, min(rows, p[REAL] - i))
        sync()
    v = 16 // itemsize(h)
    ldb = cols + pad * v
    depth = DEPTH * 4 // itemsize(h) if last - first > FEW else DEPTH * 2 // itemsize(h)
    while 2 * (rows * (depth + v) + depth * ldb) > room:
        depth >>= 1
    lda = depth + v
    size = rows * lda + depth * ldb
    stages = 4 if 4 * size <= room else 3 if 3 * size <= room else 2
    a_wide = a_ks == 1 and aligned(at(h, a)) and ((a_rs | p[A_GS]) & (v - 1)) == 0 and ((S & (v - 1)) == 0 or last <= S)
    b_wide = b_cs == 1 and aligned(at(h, b)) and ((b_ks | p[B_GS] | ldb) & (v - 1)) == 0
    a0, a1, a2, a3 = by_minor(depth, v if a_wide else 1) if a_ks == 1 else by_major(depth)
    b0, b1, b2, b3 = by_minor(cols, v if b_wide else 1) if b_cs == 1 else by_major(cols)
    a_at, b_at = a + a0 * a_rs + a2 * a_ks, b + b0 * b_ks + b2 * b_cs
    a_to, b_to = a0 * lda + a2, rows * lda + b0 * ldb + b2
    a_across, b_across = (a1 * a_rs, a3 * a_ks, a1 * lda), (b1 * b_ks, b3 * b_cs, b1 * ldb)
    a_how, b_how = (a0, a1, a2, a3), (b0, b1, b2, b3)
    wide = 1 if a_wide else 0, 1 if b_wide else 0
    return a_at, b_at, *wide, depth, lda, ldb, size, stages, a_how, b_how, a_to, b_to, a_across, b_across


@routine(lambda h: types.void(h, LAYOUT, STATE, *ints(4)))
def gather(h, t, state, stop, real, m, whole):
    """Start copying a step of A seen through a `window`, element by element, with 0 beside the image."""
    h = in_global(h)
    to, slot, k, g, _, _ = state
    p, dst = described(h), at(tiles_at(h)[0], slot + t[A_TO])
    there, f = min(min(t[STEP], p[SUMMANDS] - k), stop - to), g * p[SUMMANDS] + k
    full = (there + whole - 1) & -whole
    start, dp, q, dq = t[A_HOW]
    a, step, across, wide, by_pixels = at(h, p[A]), t[A_ACROSS][2], 0, t[A_WIDE] != 0, p[SEEN] == PIXELS
    size = image(h)
    while q < full:
        column = tap_at(h, f + q) if by_pixels else pixel_at(h, f + q)
        i, to = start, across
        while i < m:
            src = lies(size, by_pixels, of_row(h, i), column)
            if wide:
                copy16(dst, to, a, max(src, 0), there - q if src >= 0 else 0)
            elif i < real and q < there and src >= 0:
                copy(dst, to, a, src)
            else:
                dst[to] = like(h, 0 if i < real else 1)
            i += dp
            to += step
        q += dq
        across += dq


@routine(lambda h: STATE(h, LAYOUT, STATE, *ints(5)))
def bring(h, t, state, stop, real, m, n, whole):
    """Start copying a step of A and B; returns the next step's state: summand, part of shared memory, place in its product,
    that product, and the offsets of A and B."""
    h = in_global(h)
    p, s = described(h), tiles_at(h)[0]
    to, slot, k, g, a_off, b_off = state
    S = p[SUMMANDS]
    there = min(min(t[STEP], S - k), stop - to)
    full = (there + whole - 1) & -whole
    a, b = at(h, t[A_AT] + a_off), at(h, t[B_AT] + b_off)
    if p[SEEN] == 0:
        fetch(at(s, slot + t[A_TO]), real, there, m, full, a, t[A_HOW], t[A_ACROSS], t[A_WIDE] != 0, like(h, 1))
    fetch(at(s, slot + t[B_TO]), there, n, full, n, b, t[B_HOW], t[B_ACROSS], t[B_WIDE] != 0, like(h, 0))
    slot += t[SIZE]
    if slot == t[SIZE] * t[IN_FLIGHT]:
        slot = 0
    to += there
    k += there
    a_off += there * p[A_KS]
    b_off += there * p[B_KS]
    if k == S:
        k = 0
        g += 1
        a_off, b_off = g * p[A_GS], weights_at(h, g) if p[SEEN] != 0 else g * p[B_GS]
    return to, slot, k, g, a_off, b_off


# Operations of a thread on its sums, one intrinsic each: as statements, Numba would take seconds to type them.
def _no_sums(n: int) -> Any:
    def codegen(tc, h):
        def build(ctx, b, sig, args):
            return ctx.get_constant_null(sig.return_type)

        return types.UniTuple(h.dtype, n)(h), build

    @compiled_by(codegen)
    def no_sums(h):
        """Zero sums, in the dtype of the pointer ``h``."""
        return (h.dtype.type(0),) * n

    return no_sums


def _products(RM: int, RN: int) -> Any:
    group = min(RN, 4)

    def codegen(tc, s, pa, pb, d, lda, ldb, c):
        def build(ctx, b, sig, args):
            s, pa, pb, d, lda, ldb, c = args
            sums = [b.extract_value(c, k) for k in range(RM * RN)]
            steps = [b.mul(b.mul(d, lda), I64(i)) for i in range(RM)]
            rows = [b.load(_four(b, s, b.add(pa, step)), align=16) for step in steps]
            for q in range(4):
                if RN == 1:
                    columns = [b.load(b.gep(s, [pb]))]
                else:
                    fours = [b.load(_four(b, s, b.add(pb, b.mul(d, I64(j)))), align=16) for j in range(0, RN, group)]
                    columns = [b.extract_element(four, I32(k)) for four in fours for k in range(group)]
                for i in range(RM):
                    x = b.extract_element(rows[i], I32(q))
                    for j in range(RN):
                        sums[i * RN + j] = b.fma(x, columns[j], sums[i * RN + j])
                pb = b.add(pb, ldb)
            return ctx.make_tuple(b, sig.return_type, sums)

        return c(s, *[types.int64] * 5, c), build

    @compiled_by(codegen)
    def products(s, pa, pb, d, lda, ldb, c):
        """The sums plus four products each: rows of A ``d*lda`` apart, columns of B in fours ``4*d`` apart."""
        sums = list(c)
        for q in range(4):
            columns = [s[pb + j // group * group * d + j % group] for j in range(RN)]
            for i in range(RM):
                x = s[pa + i * d * lda + q]
                for j in range(RN):
                    sums[i * RN + j] = x * columns[j] + sums[i * RN + j]
            pb += ldb
        return tuple(sums)

    return products


def _leave(RM: int, RN: int, first: int, last: int) -> Any:
    def places(i: int) -> list[tuple[int, int]]:
        return [((first + i) * RN + j, j) for j in range(0, RN, min(RN, 4))]

    def codegen(tc, s, at_, d, ldb, c):
        def build(ctx, b, sig, args):
            s, start, d, ldb, c = args
            for i in range(last - first):
                row = b.add(start, b.mul(b.mul(d, ldb), I64(i)))
                for k, j in places(i):
                    to = b.add(row, b.mul(d, I64(j)))
                    if RN == 1:
                        b.store(b.extract_value(c, k), b.gep(s, [to]))
                        continue
                    v = ir.Constant(ir.VectorType(s.type.pointee, 4), ir.Undefined)
                    for lane_ in range(4):
                        v = b.insert_element(v, b.extract_value(c, k + lane_), I32(lane_))
                    b.store(v, _four(b, s, to), align=16)
            return ctx.get_dummy_value()

        return types.void(s, *[types.int64] * 3, c), build

    @compiled_by(codegen)
    def leave(s, at_, d, ldb, c):
        """Store the sums of some rows of the micro-tile to shared memory, arranged as in `products`."""
        for i in range(last - first):
            for k, j in places(i):
                for n in range(min(RN, 4)):
                    s[at_ + i * d * ldb + j * d + n] = c[k + n]

    return leave


def _four(b: Any, p: Any, i: Any) -> Any:
    element = p.type.pointee
    return b.bitcast(b.gep(p, [i]), ir.VectorType(element, 4).as_pointer())


@device
def put_rows(h, tile_at, sizes, first, rows, ldb, cols, again, whole):
    """Move ``rows`` rows of a tile, from the ``first`` on, from shared memory to C."""
    (i, j, off), (m, n), p = tile_at, sizes, described(h)
    c_off, init_off = off + (i + first) * p[C_RS] + j, (i + first) * p[INIT_RS] + j
    sync()
    put(h, first, min(m - first, rows), n, ldb, cols, c_off, init_off, again, whole)
    sync()


def _round(RM: int, RN: int, first: int, rows: int) -> Any:
    """Move the sums of a thread's rows, from the ``first`` on, to C."""
    leave = _leave(RM, RN, first, min(first + rows, RM))

    @device
    def some(h, tile_at, sizes, place, ldb, cols, again, whole, c):
        (y, x), d = place, side()
        if sizes[0] > first * d:
            leave(tiles_at(h)[0], y * ldb + x, d, ldb, c)
        put_rows(h, tile_at, sizes, first * d, rows * d, ldb, cols, again, whole)

    return some


def _micro_tile(RM: int, RN: int, rounds: int) -> Any:
    """A tile computed by threads, RM x RN elements each, with products in registers."""
    step = -(-RM // rounds)

    @device
    def place_in():
        y, x = place()
        return RM * side(), RN * side(), y, x * min(RN, 4)

    leave = in_turn([_round(RM, RN, first, step) for first in range(0, RM, step)])
    return _tile(f"tile_{RM}_{RN}", 4, 1, place_in, _no_sums(RM * RN), _products(RM, RN), leave)


def _tensor_tile(down: int, across: int) -> Any:
    """A tile computed by warps, down x across fragments of 16 x 8 each, on tensor cores, with factors rounded to tf32."""
    sums = tuple(zip(*((i, j, k) for i in range(down) for j in range(across) for k in range(4))))

    @device
    def place_in():
        return place_of_warp(down, across)

    @device
    def all_leave(h, tile_at, sizes, place, ldb, cols, again, whole, c):
        pairs, (y, x), (rows, _, _, _) = warp_halves()[1], place, place_of_warp(down, across)
        if sizes[0] > 0:
            start = (y + lane() // pairs) * ldb + x + lane() % pairs * 2
            stores(mapped(tensor_sum_at, sums, tiles_at(h)[0], start, ldb), c)
        put_rows(h, tile_at, sizes, 0, rows, ldb, cols, again, whole)

    return _tile(
        f"tensor_tile_{down}_{across}", 8, 2, place_in, _no_sums(len(sums[0])), tensor_products(down, across), all_leave
    )


def _tile(
    name: str, whole: int, pad: int, place_in: Callable, no_sums: Callable, products: Callable, leave: Callable
) -> Any:
    """A function that computes the tile of m x n elements at (i, j) of a `product`, over summands ``first`` to ``last``.

    C is shifted by ``off`` elements.  ``products`` takes ``whole`` summands at a time; ``pad`` keeps rows of B out of the
    same banks.
    """

    @routine(lambda h: types.void(h, *ints(7)), name)
    def tile(h, i, j, m, n, first, last, off):
        h = in_global(h)
        p = described(h)
        S, kc, real = p[SUMMANDS], p[BLOCK], min(p[REAL] - i, m)
        d = side()
        rows, cols, y, x = place_in()
        s = tiles_at(h)[0]
        t = layout(h, i, j, first, last, rows, cols, pad)
        lda, ldb, size, stages = t[LDA], t[LDB], t[SIZE], t[IN_FLIGHT]
        g = first // S if first >= S and S > 0 else 0
        of_k = first - g * S  # the next summand's place in its product
        state = first, 0, of_k, g, g * p[A_GS] + of_k * p[A_KS], g * p[B_GS] + of_k * p[B_KS]
        done, out = first, 0  # summands already multiplied; the part of shared memory to multiply from
        while True:
            stop = min(done + kc, last)
            c = no_sums(h)
            ahead = 1 - stages
            while done < stop:
                if ahead >= 0:
                    wait_for_step(stages)
                    sync()
                if state[0] < stop:
                    if p[SEEN] != 0:
                        gather(h, t, state, stop, real, m, whole)
                    state = bring(h, t, state, stop, real, m, n, whole)
                commit()
                if ahead >= 0:
                    there = min(min(t[STEP], S - of_k), stop - done)
                    pa = out + y * lda
                    pb = out + rows * lda + x
                    end = pa + there
                    while pa < end:
                        c = products(s, pa, pb, d, lda, ldb, c)
                        pb += whole * ldb
                        pa += whole
                    out = out + size if out + size < stages * size else 0
                    done += there
                    of_k = of_k + there if of_k + there < S else 0
                ahead += 1
            sync()
            leave(h, (i, j, off), (m, n), (y, x), ldb, cols, done > first + kc, done >= last, c)
            if done >= last:
                return

    return tile


_tensor_tiles = by_number({k: _tensor_tile(a, b) for k, (a, b, _) in enumerate(TENSOR)})
_micro_tiles = by_number({k: _micro_tile(RM, RN, rounds) for k, (RM, RN, rounds, _) in enumerate(MICRO)})


@routine(lambda h: types.void(h, *ints(8)))
def tile(h, which, i, j, m, n, first, last, off):
    """Compute a tile by its number."""
    h = in_global(h)
    if by_tensor_cores(h):
        _tensor_tiles(which, h, i, j, m, n, first, last, off)
    else:
        _micro_tiles(which, h, i, j, m, n, first, last, off)


# ---------------------------------------------------------------- which tile
OF_TENSOR = (tuple(range(len(TENSOR))), *zip(*TENSOR))  # number, rows, columns, cost
OF_MICRO = (tuple(range(len(MICRO))), *zip(*((RM, RN, cost) for RM, RN, _, cost in MICRO)))


@device
def _candidate(number, a, b, cost, down, across, parts, nw):
    """The cost of tiles of a x b units, and the tile."""
    tiles = (down + a - 1) // a * ((across + b - 1) // b) * parts
    return (tiles + nw - 1) // nw * cost if nw > 1 else tiles * cost, number, a, b


_cheaper = device(lambda one, other: other if other[0] < one[0] else one)


@routine(lambda h: types.UniTuple(types.int64, 3)(h, *ints(4)))
def choose(h, m, n, parts, nw):
    """The cheapest tile for m x n results in ``parts`` parts each, computed by ``nw`` workers; with its rows and columns of elements."""
    h = in_global(h)
    if by_tensor_cores(h):
        rows, cols, y, x = place_of_warp(1, 1)
        down, across = (m + rows - 1) >> log2(rows), (n + cols - 1) >> log2(cols)
        cost, which, a, b = folded(_cheaper, mapped(_candidate, OF_TENSOR, down, across, parts, nw))
    else:
        rows, cols = side(), side()
        down, across = (m + rows - 1) >> log2(rows), (n + cols - 1) >> log2(cols)
        cost, which, a, b = folded(_cheaper, mapped(_candidate, OF_MICRO, down, across, parts, nw))
    return which, a * rows, b * cols

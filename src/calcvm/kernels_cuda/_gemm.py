"""Matrix products of a thread block: C = init + A B by tiles in shared memory and registers.

Tiles.  The threads of a block form a square of ``side()`` rows and columns; each computes a micro-tile of RM x RN
elements in registers, rows ``side()`` apart and columns in groups of four neighbours, so that a warp's 4 x 8
threads read fragments of 16 bytes that meet in no bank.  `choose` takes the micro-tile that costs least for the shape at hand.

Copies.  K is walked in steps of some columns of A and rows of B.  Up to four steps lie in shared memory: later ones
are copied asynchronously (cp.async) while one is multiplied, 16 bytes at once where rows lie so, else element by
element with neighbouring threads on neighbouring elements, along whichever axis is contiguous.

Results.  Sums go through shared memory, so that C, a bias and an activation's output are read and written row by row.

Determinism.  Each element is one chain of fma over k in a block of ``kc`` summands, in order, and block sums are
added in order, in every tile: the bits do not depend on tiles, on shares, or on a split of the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from calcvm.formulas.elementwise import ELEMENTWISE
from calcvm.kernels_cuda._cuda import (
    I32,
    I64,
    TOGETHER,
    as_f64,
    as_i64,
    asm,
    at,
    bit_length,
    call_of,
    called,
    compiled_by,
    device,
    in_global,
    ir,
    lane,
    like,
    ptx_line,
    shared,
    special_register,
    sync,
    thread,
    threads,
    types,
    warp_size,
)
from calcvm.kernels_cuda._formulas import formula
from calcvm.kernels_cuda._loops import aligned
from calcvm.kernels_cuda._reduce import add, warp, warps
from calcvm.kernels_cuda._tuples import by_number, folded, in_turn, mapped, stores

KC = 512  # summands in a block: a multiple of every step
STAGES = 4  # steps in shared memory, at most
SLOTS, SLOT_ELEMS = 64, 1 << 20  # partial results of a split sum, and their elements
NONE, RELU, LEAKY_RELU, SIGMOID, TANH, ELU = range(6)  # as in ops.contraction.ACTIVATIONS
DERIVATIVE = 8  # added to an activation: multiply by its derivative instead
SET, FROM_INIT = 0, 1  # modes
# Words of a product's description, and how many there are.
A, A_RS, A_KS, A_GS, B, B_KS, B_CS, B_GS, C, C_RS, INIT, INIT_RS, YA, MODE, ACT, ALPHA, SUMMANDS, BLOCK, REAL = range(
    19
)
FIELDS = 32


def shared_bytes(threads: int, itemsize: int) -> int:
    """Shared scratch of a block of so many threads: what kernels may use."""
    return max(min(192 * threads, 47104), 8192)


# ---------------------------------------------------------------- what the device offers beside _cuda
def _itemsize(tc, p):
    return types.int64(p), lambda ctx, b, sig, args: I64(p.dtype.bitwidth // 8)


@compiled_by(_itemsize)
def itemsize(p):
    """Bytes of an element."""
    return p.itemsize


def _since(tc, base, p):
    def build(ctx, b, sig, args):
        base, p = (b.ptrtoint(x, I64) for x in args)
        return b.ashr(b.sub(p, base), I64({32: 2, 64: 3}[sig.args[0].dtype.bitwidth]))

    return types.int64(base, p), build


@compiled_by(_since)
def since(base, p):
    """Elements from one pointer to another."""
    return (p.ctypes.data - base.ctypes.data) // p.itemsize


def _four(b: Any, p: Any, i: Any) -> Any:
    element = p.type.pointee
    return b.bitcast(b.gep(p, [i]), ir.VectorType(element, 4).as_pointer())


def _to_shared(b: Any, p: Any) -> Any:
    """The address of a pointer into shared memory, as cp.async takes it."""
    inside = b.addrspacecast(p, ir.PointerType(p.type.pointee, 3))
    return b.trunc(b.ptrtoint(inside, I64), I32)


def _copy(tc, dst, i, src, j):
    def build(ctx, b, sig, args):
        to, src_at = _to_shared(b, b.gep(args[0], [args[1]])), b.ptrtoint(b.gep(args[2], [args[3]]), I64)
        text = f"cp.async.ca.shared.global [$0], [$1], {dst.dtype.bitwidth // 8};"
        asm(b, text, "r,l,~{memory}", args=[to, src_at])
        return ctx.get_dummy_value()

    return types.void(dst, types.int64, src, types.int64), build


@compiled_by(_copy)
def copy(dst, i, src, j):
    """Begin to copy src[j] to dst[i], in shared memory."""
    dst[i] = src[j]


def _copy16(tc, dst, i, src, j, n):
    size = dst.dtype.bitwidth // 8

    def build(ctx, b, sig, args):
        to, src_at = _to_shared(b, b.gep(args[0], [args[1]])), b.ptrtoint(b.gep(args[2], [args[3]]), I64)
        text = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
        n = b.trunc(args[4], I32)
        n = b.select(b.icmp_signed(">", n, I32(0)), n, I32(0))
        n = b.select(b.icmp_signed("<", n, I32(16 // size)), n, I32(16 // size))
        asm(b, text, "r,l,r,~{memory}", args=[to, src_at, b.mul(n, I32(size))])
        return ctx.get_dummy_value()

    return types.void(dst, types.int64, src, types.int64, types.int64), build


@compiled_by(_copy16)
def copy16(dst, i, src, j, n):
    """Begin to copy 16 bytes from src[j] on to dst[i], in shared memory; elements from the n-th on become 0."""
    assert aligned(at(dst, i)) and (n <= 0 or aligned(at(src, j)))
    for k in range(16 // dst.itemsize):
        dst[i + k] = src[j + k] if k < n else 0


@compiled_by(ptx_line("cp.async.commit_group;", "~{memory}"))
def commit():
    """The copies begun since the last time are one group."""


def _wait_for(n: int) -> Any:
    @compiled_by(ptx_line(f"cp.async.wait_group {n};", "~{memory}"))
    def wait():
        """Wait until all but so many of this thread's last groups are there."""

    return wait


wait_all, wait_but_1, wait_but_2 = _wait_for(0), _wait_for(1), _wait_for(2)


@device
def wait_for_step(stages):
    """Wait for the oldest of ``stages`` - 1 groups."""
    if stages == 4:
        wait_but_2()
    elif stages == 3:
        wait_but_1()
    else:
        wait_all()


# ---------------------------------------------------------------- threads in a tile
@device
def log2(n):
    """Whole part of the logarithm of a positive number."""
    return bit_length(n) - 1


@device
def side():
    """Rows of threads, and columns."""
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


@device
def described(h):
    """The description of the product at hand: words in shared scratch."""
    return as_i64(shared(h))


@device
def tiles_at(h):
    """Where tiles lie in shared scratch, of the type of the pointer ``h``, and how many elements there are."""
    before = 8 * FIELDS // itemsize(h)
    return at(shared(h), before), max(min(192 * threads(), 47104), 8192) // itemsize(h) - before


@device
def by_minor(minors, v):
    """How threads divide a matrix whose minor axis is contiguous, v elements at once: (first, step) on both axes."""
    t, bits = thread(), log2(max(min(threads(), minors // v), 1))
    return t >> bits, threads() >> bits, (t & ((1 << bits) - 1)) * v, v << bits


@device
def by_major(minors):
    """The same where the major axis is contiguous: patches of 8 x 4 to a warp, which meet in no bank."""
    t, n = thread(), threads()
    across = min(log2(n), 3)
    down = min(log2(n) - across, log2(minors))
    major = (t & ((1 << across) - 1)) + ((t >> (across + down)) << across)
    return major, n >> down, (t >> across) & ((1 << down) - 1), 1 << down


@device
def fetch(dst, majors, minors, to_major, to_minor, src, how, across, wide, filler):
    """dst[p*ld + q] = src[p*ms + q*ns] for p < majors, q < minors; ``filler`` up to to_major, to_minor.

    ``across``: what a step of either axis (as `by_minor` and `by_major` have them) adds to the places in src and dst; src and
    dst are where this thread begins.
    """
    start, dp, q, dq = how
    src_dp, src_dq, dst_dp = across
    i, j = 0, 0
    while q < to_minor:
        p, ip, jp = start, i, j
        if wide:
            while p < majors:
                copy16(dst, ip, src, jp, minors - q)
                p += dp
                ip += dst_dp
                jp += src_dp
        elif q < minors:
            while p + 3 * dp < majors:
                copy(dst, ip, src, jp)
                copy(dst, ip + dst_dp, src, jp + src_dp)
                copy(dst, ip + 2 * dst_dp, src, jp + 2 * src_dp)
                copy(dst, ip + 3 * dst_dp, src, jp + 3 * src_dp)
                p += 4 * dp
                ip += 4 * dst_dp
                jp += 4 * src_dp
            while p < majors:
                copy(dst, ip, src, jp)
                p += dp
                ip += dst_dp
                jp += src_dp
        while p < to_major:
            dst[ip] = filler
            if wide:
                dst[ip + 1] = filler
                if itemsize(dst) == 4:
                    dst[ip + 2] = filler
                    dst[ip + 3] = filler
            p += dp
            ip += dst_dp
        q += dq
        i += dq
        j += src_dq


# ---------------------------------------------------------------- tensor cores
precision = "float32"  # of products in the simulator: "float32" or "tf32"


@compiled_by(special_register("envreg0"))
def use_tf32():
    """Whether products of float32 are computed by tensor cores, from factors rounded to tf32.

    A register that means nothing: who builds a program writes 0 or 1 in its place.
    """
    return int(precision == "tf32")


@device
def by_tensor_cores(h):
    """Whether products in this heap are: tf32 stands in for float32 alone."""
    return use_tf32() != 0 and itemsize(h) == 4


def _fragment(places: tuple[tuple[int, int], ...], rows_apart: bool) -> Any:
    """Elements (p, q) of a matrix in shared memory, rounded to tf32, each moved by the lane: by lane // 4 rows and lane % 4
    columns where lanes of four are ``rows_apart``, else the other way round."""

    def codegen(tc, s, i, ld):
        def build(ctx, b, sig, args):
            s, i, ld = args
            number = b.zext(asm(b, "mov.u32 $0, %laneid;", "=r", I32, effect=False), I64)
            slow, fast = b.lshr(number, I64(2)), b.and_(number, I64(3))
            down, across = (slow, fast) if rows_apart else (fast, slow)
            i = b.add(b.add(i, across), b.mul(down, ld))
            found = []
            for p, q in places:
                x = b.load(b.gep(s, [b.add(b.add(i, I64(q)), b.mul(I64(p), ld))]))
                if sig.args[0].dtype == types.float32:
                    x = b.bitcast(asm(b, "cvt.rna.tf32.f32 $0, $1;", "=r,f", I32, [x], effect=False), x.type)
                found.append(x)
            return ctx.make_tuple(b, sig.return_type, found)

        return types.UniTuple(s.dtype, len(places))(s, types.int64, types.int64), build

    return codegen


# In the simulator, whose warps are smaller, a fragment is where it lies; `mma` finds its elements there.
@compiled_by(_fragment(((0, 0), (8, 0), (0, 4), (8, 4)), True))
def fragment_a(s, i, ld):
    """A warp's 16 x 8 elements of A from s[i] on, rows ``ld`` apart: four to a thread."""
    return s, i, ld, None


@compiled_by(_fragment(((0, 0), (4, 0)), False))
def fragment_b(s, i, ld):
    """A warp's 8 x 8 elements of B: two to a thread."""
    return i, ld


def _mma(tc, c0, c1, c2, c3, a0, a1, a2, a3, b0, b1):
    def build(ctx, b, sig, args):
        results = args[:4]  # in a heap of float64, which has no tensor core of this kind, nobody comes here
        if sig.args[0] == types.float32:
            text = (
                "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
            )
            four = ir.LiteralStructType([ir.FloatType()] * 4)
            given = [*(b.bitcast(x, I32) for x in args[4:]), *args[:4]]
            sums = asm(b, text, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", four, given, attrs=TOGETHER)
            results = [b.extract_value(sums, k) for k in range(4)]
        return ctx.make_tuple(b, sig.return_type, results)

    return types.UniTuple(c0, 4)(*[c0] * 10), build


@compiled_by(_mma)
def mma(c0, c1, c2, c3, a0, a1, a2, a3, b0, b1):
    """A warp's C += A B of 16 x 8 x 8: neighbours in row lane // 4, and 8 rows below, to a thread."""
    s, i, lda, j, ldb = a0, a1, a2, b0, b1
    half, pairs = warp_halves()
    out = []
    for k, c in enumerate((c0, c1, c2, c3)):
        p, q = lane() // pairs + k // 2 * half, lane() % pairs * 2 + k % 2
        for e in range(8):
            c = c + tf32(s[i + p * lda + e]) * tf32(s[j + e * ldb + q])
        out.append(c)
    return tuple(out)


def tf32(x):
    """A float32 as tensor cores take it: with 10 bits of mantissa, ties away from zero (in the simulator)."""
    bits = (x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return x if np.isnan(x) else bits.view(np.float32)


@device
def warp_halves():
    """Rows of half a fragment of C, and pairs of columns: 8 and 4 (in the simulator 2 and 2)."""
    pairs = 4 if warp_size() > 4 else 2
    return warp_size() // pairs, pairs


@device
def place_of_warp(down, across):
    """Warps of a block, each of down x across fragments of C: rows and columns of their tile, and where this one's begin."""
    half, pairs = warp_halves()
    n = warps()
    beside = 2 if n >= 8 else 1
    rows, cols = 2 * half * down, 2 * pairs * across
    return n // beside * rows, beside * cols, warp() // beside * rows, warp() % beside * cols


# ---------------------------------------------------------------- activations, and derivatives by their outputs
def _act(name: str) -> tuple[Any, Any]:
    op = ELEMENTWISE[name]
    return formula(op.forward.variant()), formula(op.backward["x"].variant())


relu, relu_slope = _act("relu")
leaky_relu, leaky_relu_slope = _act("leaky_relu")
sigmoid, sigmoid_slope = _act("sigmoid")
tanh, tanh_slope = _act("tanh")
elu, elu_slope = _act("elu")


# ---------------------------------------------------------------- results
_cell = device(lambda i, p, row, j: p[i * row + j])
_place = device(lambda i, p, row, j: at(p, i * row + j))
_or_first = device(lambda i, rows, first: i if i < rows else first)


@device(inline=False)
def put(h, rows, cols, ld, width, off, i_off, again, whole):
    """C's elements from ``off`` on: act(init + sum), the sum in shared memory, the activation where the sum is ``whole``;
    ``again``: a sum is there already, and this one is added to it.

    Four rows at once: their reads are independent, where one after the other would wait for memory four times.  A row
    beyond the last is the thread's own first one again.
    """
    called()
    h = in_global(h)
    p, s = described(h), tiles_at(h)[0]
    c, c_rs = at(h, p[C] + off), p[C_RS]
    init, init_rs, mode = (c, c_rs, FROM_INIT) if again else (at(h, p[INIT] + i_off), p[INIT_RS], p[MODE])
    act = p[ACT] if whole else NONE
    ya = at(h, p[YA] + off)
    a = like(h, as_f64(p)[ALPHA])
    i_first, di, j, dj = by_minor(width, 1)
    while j < cols:
        i = i_first
        while i < rows:
            four = mapped(_or_first, ((i, i + di, i + 2 * di, i + 3 * di),), rows, i)
            x = mapped(_cell, (four,), s, ld, j)
            if mode == FROM_INIT:
                x = mapped(add, (mapped(_cell, (four,), init, init_rs, j), x))
            y = mapped(_cell, (four,), ya, c_rs, j) if act > DERIVATIVE else x
            if act == RELU:
                x = mapped(relu, (x,))
            if act == LEAKY_RELU:
                x = mapped(leaky_relu, (x,), a)
            if act == SIGMOID:
                x = mapped(sigmoid, (x,))
            if act == TANH:
                x = mapped(tanh, (x,))
            if act == ELU:
                x = mapped(elu, (x,), a)
            if act == RELU + DERIVATIVE:
                x = mapped(relu_slope, (x, y))
            if act == LEAKY_RELU + DERIVATIVE:
                x = mapped(leaky_relu_slope, (x, y), a)
            if act == SIGMOID + DERIVATIVE:
                x = mapped(sigmoid_slope, (x, y))
            if act == TANH + DERIVATIVE:
                x = mapped(tanh_slope, (x, y))
            if act == ELU + DERIVATIVE:
                x = mapped(elu_slope, (x, y), a)
            stores(mapped(_place, (four,), c, c_rs, j), x)
            i += 4 * di
        j += dj


# ---------------------------------------------------------------- a tile
# Micro-tiles: rows and columns of a thread, rounds in which results leave through shared memory, and what a summand costs:
# a thread's instructions, of which RM*RN are products (SASS of sm_90; the small ones wait longer than they compute).
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
)  # the same of tensor cores' tiles: fragments of a warp, down and across, and cost
DEPTH = 32  # summands in a step, of float32, where two steps fit; of float64 half
FEW = 64  # summands up to which steps are half as deep: all of them are copied at once

# Numbers of a tile's layout, which `layout` finds and `bring` goes by.
A_AT, B_AT, A_WIDE, B_WIDE, STEP, LDA, LDB, SIZE, IN_FLIGHT, A_HOW, B_HOW, A_TO, B_TO, A_ACROSS, B_ACROSS = range(15)


# What all tiles do alike is called by them: one copy of it in a program, and typed once.  With a copy in each, and each product
# a statement, the first matrix product of a process took 19 s to PTX, not 9 (Zen 5), and NVIDIA's assembler 2.5 s, not 1.0.
@device(inline=False)
def layout(h, i, j, first, last, rows, cols, pad):
    """How this thread copies a tile of rows x cols at (i, j) of a `product`: where A and B begin, whether 16 bytes go at
    once, summands of a step, rows of the copies, their size, steps in flight, and each axis' first and next places."""
    called()
    h = in_global(h)
    p = described(h)
    S, a_rs, a_ks, b_ks, b_cs = p[SUMMANDS], p[A_RS], p[A_KS], p[B_KS], p[B_CS]
    a, b = p[A] + i * a_rs, p[B] + j * b_cs
    room = tiles_at(h)[1]
    v = 16 // itemsize(h)
    ldb = cols + pad * v
    depth = DEPTH * 4 // itemsize(h) if last - first > FEW else DEPTH * 2 // itemsize(h)
    while 2 * (rows * (depth + v) + depth * ldb) > room:
        depth >>= 1
    lda = depth + v
    size = rows * lda + depth * ldb
    stages = 4 if 4 * size <= room else 3 if 3 * size <= room else 2
    a_wide = a_ks == 1 and aligned(at(h, a)) and ((a_rs | p[A_GS]) & (v - 1)) == 0 and ((S & (v - 1)) == 0 or last <= S)
    b_wide = b_cs == 1 and aligned(at(h, b)) and ((b_ks | p[B_GS]) & (v - 1)) == 0
    a0, a1, a2, a3 = by_minor(depth, v if a_wide else 1) if a_ks == 1 else by_major(depth)
    b0, b1, b2, b3 = by_minor(cols, v if b_wide else 1) if b_cs == 1 else by_major(cols)
    a_at, b_at = a + a0 * a_rs + a2 * a_ks, b + b0 * b_ks + b2 * b_cs
    a_to, b_to = a0 * lda + a2, rows * lda + b0 * ldb + b2
    a_across, b_across = (a1 * a_rs, a3 * a_ks, a1 * lda), (b1 * b_ks, b3 * b_cs, b1 * ldb)
    a_how, b_how = (a0, a1, a2, a3), (b0, b1, b2, b3)
    wide = 1 if a_wide else 0, 1 if b_wide else 0
    return a_at, b_at, *wide, depth, lda, ldb, size, stages, a_how, b_how, a_to, b_to, a_across, b_across


@device(inline=False)
def bring(h, t, state, stop, real, m, n, whole):
    """Begin to copy a step of A and B; returns what the next one begins with: summand, part of shared memory, place in
    its product, that product, and how far A and B are on."""
    called()
    h = in_global(h)
    p, s = described(h), tiles_at(h)[0]
    to, slot, k, g, a_off, b_off = state
    S = p[SUMMANDS]
    there = min(min(t[STEP], S - k), stop - to)
    full = (there + whole - 1) & -whole
    a, b = at(h, t[A_AT] + a_off), at(h, t[B_AT] + b_off)
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
        a_off, b_off = g * p[A_GS], g * p[B_GS]
    return to, slot, k, g, a_off, b_off


# What a thread does with its sums, each as one intrinsic: as statements, Numba would take seconds to type them.
def _no_sums(n: int) -> Any:
    def codegen(tc, h):
        def build(ctx, b, sig, args):
            return ctx.get_constant_null(sig.return_type)

        return types.UniTuple(h.dtype, n)(h), build

    @compiled_by(codegen)
    def no_sums(h):
        """Sums of nothing, in the dtype of the pointer ``h``."""
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
        """The sums with four products more each: rows of A ``d*lda`` apart, columns of B in fours ``4*d`` apart."""
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
        """Sums of some rows of the micro-tile to shared memory, as `products` has them."""
        for i in range(last - first):
            for k, j in places(i):
                for n in range(min(RN, 4)):
                    s[at_ + i * d * ldb + j * d + n] = c[k + n]

    return leave


def _tensor_products(down: int, across: int) -> Any:
    def codegen(tc, s, pa, pb, d, lda, ldb, c):
        _, load_a = call_of(tc, fragment_a, (s, types.int64, types.int64))
        _, load_b = call_of(tc, fragment_b, (s, types.int64, types.int64))
        _, multiply = call_of(tc, mma, (s.dtype,) * 10)

        def build(ctx, b, sig, args):
            s, pa, pb, _, lda, ldb, c = args
            sums = [b.extract_value(c, k) for k in range(4 * down * across)]
            of_a = [load_a(ctx, b, [s, b.add(pa, b.mul(I64(16 * i), lda)), lda]) for i in range(down)]
            of_a = [[b.extract_value(fragment, k) for k in range(4)] for fragment in of_a]
            for j in range(across):
                fragment = load_b(ctx, b, [s, b.add(pb, I64(8 * j)), ldb])
                of_b = [b.extract_value(fragment, k) for k in range(2)]
                for i in range(down):
                    k = 4 * (i * across + j)
                    out = multiply(ctx, b, [*sums[k : k + 4], *of_a[i], *of_b])
                    sums[k : k + 4] = [b.extract_value(out, n) for n in range(4)]
            return ctx.make_tuple(b, sig.return_type, sums)

        return c(s, *[types.int64] * 5, c), build

    @compiled_by(codegen)
    def products(s, pa, pb, d, lda, ldb, c):
        """The sums of a warp's down x across fragments with the products of eight columns of A and rows of B more."""
        half, pairs = warp_halves()
        sums = list(c)
        of_a = [fragment_a(s, pa + i * 2 * half * lda, lda) for i in range(down)]
        for j in range(across):
            of_b = fragment_b(s, pb + j * 2 * pairs, ldb)
            for i in range(down):
                k = 4 * (i * across + j)
                sums[k : k + 4] = mma(*sums[k : k + 4], *of_a[i], *of_b)
        return tuple(sums)

    return products


@device
def _sum_at(i, j, k, s, start, ldb):
    """Where sum k of a warp's fragment (i, j) goes, from where its first one does."""
    half, pairs = warp_halves()
    return at(s, start + (2 * i + k // 2) * half * ldb + 2 * j * pairs + k % 2)


@device
def put_rows(h, tile_at, sizes, first, rows, ldb, cols, again, whole):
    """Let ``rows`` rows of a tile from the ``first`` on leave through shared memory, where they are."""
    (i, j, off), (m, n), p = tile_at, sizes, described(h)
    c_off, init_off = off + (i + first) * p[C_RS] + j, (i + first) * p[INIT_RS] + j
    sync()
    put(h, min(m - first, rows), n, ldb, cols, c_off, init_off, again, whole)
    sync()


def _round(RM: int, RN: int, first: int, rows: int) -> Any:
    """Rows of a thread, from the ``first`` on, leave."""
    leave = _leave(RM, RN, first, min(first + rows, RM))

    @device
    def some(h, tile_at, sizes, place, ldb, cols, again, whole, c):
        (y, x), d = place, side()
        if sizes[0] > first * d:
            leave(tiles_at(h)[0], y * ldb + x, d, ldb, c)
        put_rows(h, tile_at, sizes, first * d, rows * d, ldb, cols, again, whole)

    return some


def _micro_tile(RM: int, RN: int, rounds: int) -> Any:
    """A tile by threads, RM x RN elements each: products in registers."""
    step = -(-RM // rounds)

    @device
    def place_in():
        y, x = place()
        return RM * side(), RN * side(), y, x * min(RN, 4)

    leave = in_turn([_round(RM, RN, first, step) for first in range(0, RM, step)])
    return _tile(4, 1, place_in, _no_sums(RM * RN), _products(RM, RN), leave)


def _tensor_tile(down: int, across: int) -> Any:
    """A tile by warps, down x across fragments of 16 x 8 each: products by tensor cores, of factors rounded to tf32."""
    sums = tuple(zip(*((i, j, k) for i in range(down) for j in range(across) for k in range(4))))

    @device
    def place_in():
        return place_of_warp(down, across)

    @device
    def all_leave(h, tile_at, sizes, place, ldb, cols, again, whole, c):
        pairs, (y, x), (rows, _, _, _) = warp_halves()[1], place, place_of_warp(down, across)
        if sizes[0] > 0:
            start = (y + lane() // pairs) * ldb + x + lane() % pairs * 2
            stores(mapped(_sum_at, sums, tiles_at(h)[0], start, ldb), c)
        put_rows(h, tile_at, sizes, 0, rows, ldb, cols, again, whole)

    return _tile(8, 2, place_in, _no_sums(len(sums[0])), _tensor_products(down, across), all_leave)


def _tile(whole: int, pad: int, place_in: Callable, no_sums: Callable, products: Callable, leave: Callable) -> Any:
    """A function of the tile of m x n elements at (i, j) of a `product`: its summands from ``first`` to ``last``.

    C is ``off`` elements further on.  ``products`` takes ``whole`` summands at a time; ``pad`` keeps rows of B from meeting
    in banks.
    """

    @device(inline=False)
    def tile(h, i, j, m, n, first, last, off):
        called()
        h = in_global(h)
        p = described(h)
        S, kc, real = p[SUMMANDS], p[BLOCK], min(p[REAL] - i, m)
        d = side()
        rows, cols, y, x = place_in()
        s = tiles_at(h)[0]
        t = layout(h, i, j, first, last, rows, cols, pad)
        lda, ldb, size, stages = t[LDA], t[LDB], t[SIZE], t[IN_FLIGHT]
        g = first // S if first >= S and S > 0 else 0
        of_k = first - g * S  # place of the next summand to be multiplied in its product
        state = first, 0, of_k, g, g * p[A_GS] + of_k * p[A_KS], g * p[B_GS] + of_k * p[B_KS]
        done, out = first, 0  # summands multiplied; the part of shared memory to multiply from
        while True:
            stop = min(done + kc, last)
            c = no_sums(h)
            ahead = 1 - stages
            while done < stop:
                if ahead >= 0:
                    wait_for_step(stages)
                    sync()
                if state[0] < stop:
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


@device(inline=False)
def tile(which, h, i, j, m, n, first, last, off):
    """A tile by its number."""
    called()
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
    """What a tile of a x b units costs, and the tile."""
    tiles = (down + a - 1) // a * ((across + b - 1) // b) * parts
    return (tiles + nw - 1) // nw * cost if nw > 1 else tiles * cost, number, a, b


_cheaper = device(lambda one, other: other if other[0] < one[0] else one)


@device(inline=False)
def choose(h, m, n, parts, nw):
    """The cheapest tile for m x n results, each in ``parts`` parts, by ``nw`` workers; its rows and columns of elements."""
    called()
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


# ---------------------------------------------------------------- products
@device
def product(
    h, S, kc, real, a, a_rs, a_ks, a_gs, b, b_ks, b_cs, b_gs, c, c_rs, init, init_rs, mode, act, alpha, ya
):  # fmt: skip
    """Describe what `gemm` and `partial_sums` shall compute: C[i,j] = act(INIT + sum_f A[i,f] * B[f,j]).

    f = g*S + k: A[i,f] = a[g*a_gs + i*a_rs + k*a_ks], B[f,j] = b[g*b_gs + k*b_ks + j*b_cs]; A's rows from ``real`` on
    are 1.  INIT is 0 in mode SET, init[i*init_rs + j] in FROM_INIT.  C's and ya's rows are ``c_rs`` apart.  ``kc``
    summands are one chain.  The description lies in shared memory, where it takes no registers of the tiles.
    """
    p = described(h)
    if thread() == 0:
        p[A], p[A_RS], p[A_KS], p[A_GS] = since(h, a), a_rs, a_ks, a_gs
        p[B], p[B_KS], p[B_CS], p[B_GS] = since(h, b), b_ks, b_cs, b_gs
        p[C], p[C_RS], p[INIT], p[INIT_RS], p[YA] = since(h, c), c_rs, since(h, init), init_rs, since(h, ya)
        p[MODE], p[ACT], p[SUMMANDS], p[BLOCK], p[REAL] = mode, act, S, kc, real
        as_f64(p)[ALPHA] = alpha
    sync()


@device
def gemm(h, m, n, last):
    """The m x n elements of the `product` described, of ``last`` summands, by this block alone."""
    which, rows, cols = choose(h, m, n, 1, 1)
    i = 0
    while i < m:
        j = 0
        while j < n:
            tile(which, h, i, j, min(rows, m - i), min(cols, n - j), 0, last, 0)
            j += cols
        i += rows


@device
def summands(last, elems):
    """Summands in a block, for results of so many elements: of few elements, partial sums may be many."""
    slots = min(max(SLOT_ELEMS // max(elems, 1), 1), SLOTS)
    if last <= KC * slots:
        return KC
    return (last + KC * slots - 1) // (KC * slots) * KC


@device
def worth_splitting(nw, last, kc, elems):
    """Whether all workers should compute partial sums of a result that is shared by rows; ops.contraction gives them room."""
    return nw > 1 and (last > kc or (last > 128 and elems >= 1 << 18))


@device
def partial_sums(me, m, n, last, kc):
    """The sums of each block of ``kc`` summands, an (m, n) result after the other; all workers share tiles of blocks."""
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
        tile(which, h, i, j, min(rows, m - i), min(cols, n - j), first, min(first + kc, last), part * m * n)
        unit += nw


@device
def add_up(lo, hi, last, kc, elems, ws, c, acc):
    """c[i] (+)= sum of the blocks' partial sums ws[p*elems + i], in order, for i in [lo, hi)."""
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

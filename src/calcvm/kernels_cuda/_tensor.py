"""Tensor cores: sums of a warp's fragments, with factors rounded to tf32."""

from __future__ import annotations

from typing import Any

import numpy as np

from calcvm.kernels_cuda._copies import itemsize
from calcvm.kernels_cuda._cuda import (
    I32,
    I64,
    TOGETHER,
    asm,
    at,
    call_of,
    compiled_by,
    device,
    ir,
    lane,
    special_register,
    types,
    warp_size,
)
from calcvm.kernels_cuda._reduce import warp, warps

precision = "float32"  # of products in the simulator: "float32" or "tf32"


@compiled_by(special_register("envreg0"))
def use_tf32():
    """Whether tensor cores compute products of float32, from factors rounded to tf32.

    The register stands for a constant: building a program replaces it by 0 or 1.
    """
    return int(precision == "tf32")


@device
def by_tensor_cores(h):
    """Whether they compute products in this heap: tf32 only replaces float32."""
    return use_tf32() != 0 and itemsize(h) == 4


def _fragment(places: tuple[tuple[int, int], ...], rows_apart: bool) -> Any:
    """Elements (p, q) of a matrix in shared memory, rounded to tf32, shifted by the lane: by lane // 4 rows and lane % 4
    columns if groups of four lanes are ``rows_apart``, else the other way round."""

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


# The simulator's warps are smaller: there a fragment is only its place, and `mma` reads the elements.
@compiled_by(_fragment(((0, 0), (8, 0), (0, 4), (8, 4)), True))
def fragment_a(s, i, ld):
    """A warp's 16 x 8 elements of A from s[i] on, rows ``ld`` apart: four per thread."""
    return s, i, ld, None


@compiled_by(_fragment(((0, 0), (4, 0)), False))
def fragment_b(s, i, ld):
    """A warp's 8 x 8 elements of B: two per thread."""
    return i, ld


def _mma(tc, c0, c1, c2, c3, a0, a1, a2, a3, b0, b1):
    def build(ctx, b, sig, args):
        results = args[:4]  # never run in a heap of float64, which has no tensor core of this kind
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
    """A warp's C += A B of 16 x 8 x 8; a thread has two neighbours in row lane // 4, and two 8 rows below."""
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
    """A float32 rounded as by tensor cores: a 10-bit mantissa, ties away from zero (in the simulator)."""
    bits = (x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return x if np.isnan(x) else bits.view(np.float32)


@device
def warp_halves():
    """Rows of half a fragment of C, and pairs of columns: 8 and 4 (in the simulator 2 and 2)."""
    pairs = 4 if warp_size() > 4 else 2
    return warp_size() // pairs, pairs


@device
def place_of_warp(down, across):
    """Rows and columns of the tile that a block's warps compute, each down x across fragments of C; and where this warp's begin."""
    half, pairs = warp_halves()
    n = warps()
    beside = 2 if n >= 8 else 1
    rows, cols = 2 * half * down, 2 * pairs * across
    return n // beside * rows, beside * cols, warp() // beside * rows, warp() % beside * cols


def tensor_products(down: int, across: int) -> Any:
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
        """The sums of a warp's down x across fragments, plus the products of eight columns of A with eight rows of B."""
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
def tensor_sum_at(i, j, k, s, start, ldb):
    """The place of sum k of a warp's fragment (i, j), relative to the first fragment's."""
    half, pairs = warp_halves()
    return at(s, start + (2 * i + k // 2) * half * ldb + 2 * j * pairs + k % 2)

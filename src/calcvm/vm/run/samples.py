"""Samples into the heap, results out of it: indexes in shuffled order, rows of arrays copied and converted.

Indexes are computed for 32 samples at once, and rows are copied as whole vectors, in vector IR.  A round of a small model takes
as long as a few cache misses, and loops over single samples took a tenth of it.

The permutation has three rounds above 64 samples: the counts of successive pairs vary 1.16 times (128 samples) and 1.00 times
(300) as much as in random orders.  Multipliers that did not depend on the key gave 166 and 8.  Up to 64 samples it has six rounds
(16 samples: 1.3 times, with three rounds 17).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from calcvm.formulas import sums as formula
from calcvm.kernels_cpu._common import njit
from calcvm.vm.run import job as J
from calcvm.vm.run.atomics import I64, call_entry, call_job, f32_at, f64_at, i64_at

BYTES, FOURS, EIGHTS = J.FEED_CELLS.values()
LANES = 32  # samples whose indexes are computed together
WIDTHS = (16, 4, 1)  # elements of the vectors; each copies rows of at least that size
FAR_BYTES = 1 << 19  # larger arrays do not stay in a core's private caches
AHEAD_BYTES = 256  # prefetched per row, one round ahead; the hardware prefetcher continues from there

F32, F64 = ir.FloatType(), ir.DoubleType()
SOURCES = (F32, F64, ir.IntType(8), ir.IntType(32), I64)  # by a feed's DTYPE
CELLS = {J.FEED_CELLS[bits // 8]: ir.IntType(bits) for bits in (8, 32, 64)}


def helper(fn: Any) -> Any:
    """Compile a function of the loops."""
    return njit(fn, fastmath=set())


def inlined(fn: Any) -> Any:
    """A `helper` that is inlined: a call, with the registers that it saves, takes as long as a tiny kernel."""
    return njit(fn, fastmath=set(), inline=True)


sum_of = inlined(formula.sum_of)


# ---------------------------------------------------------------- vector IR
@intrinsic
def scratch(tc):
    """Address of LANES int64 on the stack."""

    def codegen(ctx, b, sig, args):
        return b.ptrtoint(cgutils.alloca_once(b, I64, size=LANES), I64)

    return types.int64(), codegen


@intrinsic
def prefetch(tc, address):
    """Prefetch the cache line at an address into the core's L2 cache; never faults."""

    def codegen(ctx, b, sig, args):
        p, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        f = cgutils.get_or_insert_function(
            b.module, ir.FunctionType(ir.VoidType(), [p, i32, i32, i32]), "llvm.prefetch.p0"
        )
        b.call(f, [b.inttoptr(args[0], p), i32(0), i32(2), i32(1)])
        return ctx.get_dummy_value()

    return types.void(types.int64), codegen


def mix(b, x):  # type: ignore[no-untyped-def]
    """splitmix64's finalizer: a bijection of 64 bits."""
    x = b.mul(b.xor(x, b.lshr(x, I64(30))), I64(0xBF58476D1CE4E5B9))
    x = b.mul(b.xor(x, b.lshr(x, I64(27))), I64(0x94D049BB133111EB))
    return b.xor(x, b.lshr(x, I64(31)))


@intrinsic
def _permute(tc, places, first, last, n, key):
    """places[i] = the position of sample min(first + i, last) in a permutation of [0, n), for LANES samples.

    Each round multiplies, adds and xor-shifts modulo the next power of two, with numbers from the key; this is a bijection.
    A position outside [0, n) goes through the rounds again until it is inside.  Few bits need more rounds.  With these
    rounds all pairs of samples follow each other about equally often.
    """
    vec, bit = ir.VectorType(I64, LANES), ir.VectorType(ir.IntType(1), LANES)

    def codegen(ctx, b, sig, args):
        def splat(x):
            undef = ir.Constant(vec, ir.Undefined)
            one = b.insert_element(undef, x, ir.IntType(32)(0))
            return b.shuffle_vector(one, undef, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))

        where, first, last, n, key = args
        bits = b.sub(I64(64), b.ctlz(b.sub(n, I64(1)), ir.IntType(1)(0)))
        few = b.icmp_unsigned("<=", bits, I64(J.FEW_BITS))
        mask = splat(b.sub(b.shl(I64(1), bits), I64(1)))
        half, n = splat(b.lshr(b.add(bits, I64(1)), I64(1))), splat(n)

        def own(rounds: range) -> list[tuple[Any, Any]]:
            """Multiplier and summand of each round."""
            mixed = [mix(b, b.add(key, I64((k + 1) * 0x9E3779B97F4A7C15 % 2**64))) for k in rounds]
            return [(splat(b.or_(b.lshr(h, I64(32)), I64(1))), splat(h)) for h in mixed]

        def through(y: Any, numbers: list[tuple[Any, Any]]) -> Any:
            for times, plus in numbers:
                y = b.and_(b.add(b.mul(y, times), plus), mask)
                y = b.xor(y, b.lshr(y, half))
            return y

        numbers = own(range(J.MANY_ROUNDS))
        x = b.add(splat(first), ir.Constant(vec, list(range(LANES))))
        x = b.select(b.icmp_signed("<", x, splat(last)), x, splat(last))
        start, walk, done = b.block, b.append_basic_block("walk"), b.append_basic_block("walked")
        more, enough = b.append_basic_block("more"), b.append_basic_block("enough")
        b.branch(walk)
        b.position_at_end(walk)
        old, out = b.phi(vec), b.phi(bit)
        some = through(old, numbers)
        b.cbranch(few, more, enough)
        b.position_at_end(more)
        all_ = through(some, own(range(J.MANY_ROUNDS, J.FEW_ROUNDS)))
        b.branch(enough)
        b.position_at_end(enough)
        z = b.phi(vec)
        z.add_incoming(some, walk)
        z.add_incoming(all_, more)
        y = b.select(out, z, old)
        still = b.icmp_unsigned(">=", y, n)
        for phi, begin, again in ((old, x, y), (out, ir.Constant(bit, [1] * LANES), still)):
            phi.add_incoming(begin, start)
            phi.add_incoming(again, enough)
        b.cbranch(b.icmp_unsigned("!=", b.bitcast(still, ir.IntType(LANES)), ir.IntType(LANES)(0)), walk, done)
        b.position_at_end(done)
        b.store(y, b.inttoptr(where, vec.as_pointer()), align=8)
        return ctx.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@intrinsic
def _copy_rows(tc, dst, src, places, rows, stride, length, dtype, size):
    """dst[i*stride : i*stride+length] = src[places[i]*stride : ...+length] for i < rows, as floats of ``size`` bytes.

    A row's last vector overlaps the one before it, so no element is copied alone, and none past the row.
    """

    def codegen(ctx, b, sig, args):
        dst, src, places, rows, stride, length, dtype, size = args
        places = b.inttoptr(places, I64.as_pointer())
        done = b.append_basic_block("copied")
        switch = b.switch(b.add(b.mul(dtype, I64(16)), size), done)
        pairs: list[Any] = [
            (k, source, (size_,), t) for k, source in enumerate(SOURCES) for size_, t in ((4, F32), (8, F64))
        ]
        pairs += [(k, cell, (4, 8), cell) for k, cell in CELLS.items()]
        for k, source, sizes, target in pairs:
            case = b.append_basic_block(f"copy.{k}.{sizes[0]}")
            for size_ in sizes:
                switch.add_case(I64(16 * k + size_), case)
            b.position_at_end(case)
            to, of = b.inttoptr(dst, target.as_pointer()), b.inttoptr(src, source.as_pointer())
            for lanes in WIDTHS:
                fits = b.icmp_signed(">=", length, I64(lanes))
                use, skip = b.append_basic_block("use"), b.append_basic_block("skip")
                b.cbranch(fits, use, skip)
                b.position_at_end(use)
                with cgutils.for_range(b, rows) as row:
                    row_of = b.gep(of, [b.mul(b.load(b.gep(places, [row.index])), stride)])
                    row_to = b.gep(to, [b.mul(row.index, stride)])
                    with cgutils.for_range_slice(b, I64(0), length, I64(lanes), I64) as (i, _):
                        last = b.sub(length, I64(lanes))
                        at = b.select(b.icmp_signed("<", i, last), i, last) if lanes > 1 else i
                        _copy(b, b.gep(row_to, [at]), b.gep(row_of, [at]), lanes)
                b.branch(done)
                b.position_at_end(skip)
            b.branch(done)
        b.position_at_end(done)
        return ctx.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen


def _copy(b, to, of, lanes):  # type: ignore[no-untyped-def]
    """Copy and convert ``lanes`` elements between pointers."""
    source, target = (t if lanes == 1 else ir.VectorType(t, lanes) for t in (of.type.pointee, to.type.pointee))
    x = b.load(b.bitcast(of, source.as_pointer()), align=1)
    if of.type != to.type:
        if of.type.pointee in (F32, F64):
            x = b.fpext(x, target) if to.type.pointee == F64 else b.fptrunc(x, target)
        else:
            x = b.uitofp(x, target) if of.type.pointee == SOURCES[2] else b.sitofp(x, target)
    b.store(x, b.bitcast(to, target.as_pointer()), align=1 if to.type.pointee == ir.IntType(8) else 4)


def permute(places, first, last, n, key):
    _permute(places, first, last, n, key)


def copy_rows(dst, src, places, rows, stride, length, dtype, size):
    _copy_rows(dst, src, places, rows, stride, length, dtype, size)


@intrinsic
def call_permute(tc, places, first, last, n, key):
    return call_entry("permute")


@intrinsic
def call_copy_rows(tc, dst, src, places, rows, stride, length, dtype, size):
    return call_entry("copy_rows")


# ---------------------------------------------------------------- batches
@helper
def locate(job, places, first, m):
    """Indexes in the arrays of a pass's samples first, first + 1, ...; m <= LANES."""
    words, out = i64_at(job), i64_at(places)
    if words[J.SHUFFLE]:
        call_permute(places, first, first + m - 1, words[J.N_SAMPLES], words[J.KEY])
    else:
        for i in range(m):
            out[i] = first + i
    if words[J.INDEX]:
        index = i64_at(words[J.INDEX])
        for i in range(m):
            out[i] = index[out[i]]


@helper
def bytes_of(dtype, size):
    """Bytes of a heap element that a feed fills."""
    return 1 if dtype == BYTES else 4 if dtype == FOURS else 8 if dtype == EIGHTS else size


@helper
def fetch(job, of, base, n, worker):
    """Copy samples base, base + 1, ... of a pass into the placeholders of path ``of``; workers share the batch."""
    words, path, places = i64_at(job), i64_at(of), scratch()
    size, scattered = words[J.ITEMSIZE], words[J.SHUFFLE] | words[J.INDEX]
    at, stop = n * worker // words[J.TEAM], n * (worker + 1) // words[J.TEAM]
    while at < stop:
        m = stop - at
        rows, together = 1, m  # a contiguous part of the arrays
        if scattered:
            m = LANES if m > LANES else m
            rows, together = m, 1
            locate(job, places, base + at, m)
        else:
            i64_at(places)[0] = base + at
        for k in range(path[J.N_FEEDS]):
            feed = i64_at(path[J.FEEDS] + 8 * J.FEED_WORDS * k)
            e = feed[J.ELEMS]
            dst = words[J.HEAP] + bytes_of(feed[J.DTYPE], size) * (feed[J.OFFSET] + at * e)
            call_copy_rows(dst, feed[J.ADDRESS], places, rows, e, together * e, feed[J.DTYPE], size)
        at += m


@helper
def given_bytes(dtype):
    """Bytes of an element of a feed's array."""
    return 1 if dtype == 2 or dtype == BYTES else 4 if dtype == 0 or dtype == 3 or dtype == FOURS else 8


@helper
def sample_bytes(feed):
    return i64_at(feed)[J.ELEMS] * given_bytes(i64_at(feed)[J.DTYPE])


@helper
def far(job):
    """Whether a pass has random access to arrays that do not stay in a core's private caches."""
    words, total = i64_at(job), 0
    for k in range(words[J.N_FEEDS]):
        total += sample_bytes(words[J.FEEDS] + 8 * J.FEED_WORDS * k)
    return (words[J.SHUFFLE] | words[J.INDEX]) != 0 and total * words[J.N_SAMPLES] > FAR_BYTES


@helper
def fetch_ahead(job, base, n, worker):
    """Prefetch the lines that `fetch` of these samples will read: 32 rows of 64 B out of 20 MB take 0.4 us instead of 1.6."""
    words, places = i64_at(job), scratch()
    at, stop = n * worker // words[J.TEAM], n * (worker + 1) // words[J.TEAM]
    while at < stop:
        m = LANES if stop - at > LANES else stop - at
        locate(job, places, base + at, m)
        for k in range(words[J.N_FEEDS]):
            feed = words[J.FEEDS] + 8 * J.FEED_WORDS * k
            row_bytes = sample_bytes(feed)
            for i in range(m):
                row = i64_at(feed)[J.ADDRESS] + i64_at(places)[i] * row_bytes
                for byte in range(0, AHEAD_BYTES if row_bytes > AHEAD_BYTES else row_bytes, 64):
                    prefetch(row + byte)
        at += m


@helper
def sample(job, sampler, scores, round_):
    """Let a sampler set the next tokens; the job ends after this round if all texts are complete, or a kernel has trapped."""
    words = i64_at(job)
    trapped = (f32_at(words[J.HEAP])[0] if words[J.ITEMSIZE] == 4 else f64_at(words[J.HEAP])[0]) != 0.0
    if not trapped:
        call_job(i64_at(sampler)[J.DRAW], sampler, scores)
    if trapped or i64_at(sampler)[J.OVER] != 0:
        words[J.UNTIL] = round_ + 1


@helper
def deliver(job, of, base, n, of_learning):
    """Copy the results of a batch of path ``of`` out, in sample order, and add up weighted scalars.

    A mean is weighted by the samples of its round.  A sum over samples has a negative offset (see `_counted` in
    `calcvm.vm.memory.epoch`): it is weighted by the samples of the pass, or, below -BY_LEARNING, by those of its learning batch.
    """
    words, path, places = i64_at(job), i64_at(of), scratch()
    heap, size = words[J.HEAP], words[J.ITEMSIZE]
    i64_at(places)[0] = 0
    for k in range(path[J.N_DRAINS]):
        drain = i64_at(path[J.DRAINS] + 8 * J.FEED_WORDS * k)
        e = drain[J.ELEMS]
        each = bytes_of(drain[J.DTYPE], size)
        dst, src = drain[J.ADDRESS] + each * base * e, heap + each * drain[J.OFFSET]
        if drain[J.DTYPE] == J.SAMPLED:
            sample(job, drain[J.ADDRESS], src, base // n)
            continue
        call_copy_rows(dst, src, places, 1, 0, n * e, drain[J.DTYPE], size)
    sums, offsets = f64_at(path[J.SUMS]), i64_at(path[J.RESULTS])
    for k in range(path[J.N_RESULTS]):
        off = offsets[k]
        weight = n
        if off < 0:
            weight = path[J.N_SAMPLES] if off >= -J.BY_LEARNING else of_learning
            off = (-1 - off) % J.BY_LEARNING
        value = np.float64(f32_at(heap)[off]) if size == 4 else f64_at(heap)[off]
        sums[k] += sum_of(value, n, size) if offsets[k] >= 0 else value * weight

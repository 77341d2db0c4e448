"""Copies of matrices to shared memory: asynchronous (cp.async), 16 bytes at once if rows allow it.

Otherwise element by element, with neighbouring threads on neighbouring elements along the contiguous axis.
"""

from __future__ import annotations

from typing import Any

from calcvm.kernels_cuda._cuda import (
    I32,
    I64,
    asm,
    at,
    bit_length,
    compiled_by,
    device,
    ir,
    ptx_line,
    thread,
    threads,
    types,
)
from calcvm.kernels_cuda._loops import aligned


# ---------------------------------------------------------------- device functions besides _cuda
def _itemsize(tc, p):
    return types.int64(p), lambda ctx, b, sig, args: I64(p.dtype.bitwidth // 8)


@compiled_by(_itemsize)
def itemsize(p):
    """Bytes of an element."""
    return p.itemsize


def _to_shared(b: Any, p: Any) -> Any:
    """The address of a pointer into shared memory, in the form that cp.async takes."""
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
    """Start copying src[j] to dst[i], in shared memory."""
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
    """Start copying 16 bytes from src[j] on to dst[i], in shared memory; elements from the n-th on become 0."""
    assert aligned(at(dst, i)) and (n <= 0 or aligned(at(src, j)))
    for k in range(16 // dst.itemsize):
        dst[i + k] = src[j + k] if k < n else 0


@compiled_by(ptx_line("cp.async.commit_group;", "~{memory}"))
def commit():
    """Group the copies started since the last commit."""


def _wait_for(n: int) -> Any:
    @compiled_by(ptx_line(f"cp.async.wait_group {n};", "~{memory}"))
    def wait():
        """Wait until all but the last n groups of this thread have arrived."""

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


# ---------------------------------------------------------------- division of a matrix among threads
@device
def log2(n):
    """The integer part of the base-2 logarithm of a positive number."""
    return bit_length(n) - 1


@device
def by_minor(minors, v):
    """The division of a matrix with a contiguous minor axis among threads, v elements at once: (first, step) on both axes."""
    t, bits = thread(), log2(max(min(threads(), minors // v), 1))
    return t >> bits, threads() >> bits, (t & ((1 << bits) - 1)) * v, v << bits


@device
def by_major(minors):
    """The same for a contiguous major axis: patches of 8 x 4 per warp, without bank conflicts."""
    t, n = thread(), threads()
    across = min(log2(n), 3)
    down = min(log2(n) - across, log2(minors))
    major = (t & ((1 << across) - 1)) + ((t >> (across + down)) << across)
    return major, n >> down, (t >> across) & ((1 << down) - 1), 1 << down


@device
def fetch(dst, majors, minors, to_major, to_minor, src, how, across, wide, filler):
    """dst[p*ld + q] = src[p*ms + q*ns] for p < majors, q < minors; ``filler`` up to to_major, to_minor.

    ``across``: how far a step along either axis (see `by_minor` and `by_major`) moves in src and dst.  src and dst point to
    this thread's first place.
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

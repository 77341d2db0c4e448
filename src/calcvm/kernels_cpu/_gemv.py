"""Vector times matrix: y = init + x B, in place of GEMM tiles with a single row.

One row of A reuses nothing of B, so the speed is the rate at which B is read.  Reading at full rate takes eight
independent loads in flight, so sums run in several chains, whose fixed order differs from ``gemm``'s.

* Column-major B (``b_rs == 1``): a dot product per column, eight columns at once (``dots``).
* Row-major B, few columns: four vectors of columns in two chains over k, or one vector in eight (``column_sums``).
* Row-major B, many columns: eight rows at a time are added to y, so that B is read in eight sequential
  streams.  1x1024x1024 takes 38 us; GEMM's tiles, which meet a new page in every row, took 94.  GEMM of a few
  rows does the same (``few_rows``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.core import cgutils

from calcvm.kernels_cpu._common import at, free_masks, lanes, like, njit, routine
from calcvm.kernels_cpu._math import exactly, fill
from calcvm.kernels_cpu._simd import native, stack
from calcvm.kernels_cpu._vectors import word

CHAINS = 8


def _accumulators(e: Any, n: int) -> list:
    return [cgutils.alloca_once_value(e.b, e.zero) for _ in range(n)]


def _add(e: Any, acc: Any, x: Any, y: Any) -> None:
    e.b.store(e.fma(x, y, e.b.load(acc)), acc)


def _by_vectors(e: Any, n: Any, step: Callable) -> None:
    """``step(i, mask)`` for each vector of n elements; only the last has a mask."""
    b = e.b
    whole = b.and_(n, word(-e.lanes))
    with cgutils.for_range_slice(b, word(0), whole, word(e.lanes)) as (i, _):
        step(i, None)
    with b.if_then(b.icmp_signed("<", whole, n)):
        step(whole, e.lanes_below(b.sub(n, whole)))


def _dots() -> Any:
    """y[j] = init[j*is] + sum_k x[k] * B[j*cs + k] for j < n, n at most the lanes and CHAINS."""

    def emit(e, n, k, x, b_ptr, cs, y, init, ist, mode):  # type: ignore[no-untyped-def]
        b, columns = e.b, min(CHAINS, e.lanes)
        starts = [e.at(b_ptr, b.mul(cs, e.smaller(j, b.sub(n, word(1))))) for j in range(columns)]
        acc = _accumulators(e, columns)

        def step(at_k, mask):  # type: ignore[no-untyped-def]
            xv = e.load(e.at(x, at_k), mask)
            for j in range(columns):
                _add(e, acc[j], xv, e.load(e.at(starts[j], at_k), mask))

        _by_vectors(e, k, step)
        v = [b.load(p) for p in acc]
        even, odd = ([*range(s, 2 * e.lanes, 2)] for s in (0, 1))
        folds = e.lanes.bit_length() - 1
        for _ in range(folds):  # adds neighbours: lanes / 2^folds of each column are left, in column order
            pairs = list(zip(v[::2], v[1::2])) if len(v) > 1 else [(v[0], v[0])]
            v = [
                b.fadd(b.shuffle_vector(p, q, e.indices(even)), b.shuffle_vector(p, q, e.indices(odd)))
                for p, q in pairs
            ]
        mask = e.lanes_below(n)
        out = cgutils.alloca_once_value(b, v[0])
        with b.if_then(b.icmp_signed("!=", mode, word(0))):
            same = b.icmp_signed("==", ist, word(0))
            with b.if_else(same) as (one, each):
                with one:
                    b.store(b.fadd(v[0], e.splat(b.load(init, align=e.size))), out)
                with each:
                    b.store(b.fadd(v[0], e.load(init, mask)), out)
        e.store(b.load(out), y, mask)

    return native("gemv_dots", "iippippii", emit)


def _column_sums(nv: int) -> Any:
    """y[j] = init[j] + sum_k x[k*xs] * B[k*rs + j] for nv vectors of columns, the last with ``rem`` live lanes."""
    chains = CHAINS // nv

    def emit(e, rem, k, x, xs, b_ptr, rs, y, init, mode):  # type: ignore[no-untyped-def]
        b = e.b
        masks = [None] * (nv - 1) + [e.lanes_below(rem)]
        acc = _accumulators(e, CHAINS)

        def step(at_k, chain):  # type: ignore[no-untyped-def]
            xv = e.splat(b.load(e.at(x, b.mul(at_k, xs)), align=e.size))
            row = e.at(b_ptr, b.mul(at_k, rs))
            if nv > 1:  # 8 % faster at 1x64x784, where B is in L2
                for j in range(nv):
                    e.prefetch(e.at(row, b.mul(rs, word(8)), j * e.lanes))
            for j, mask in enumerate(masks):
                _add(e, acc[chain * nv + j], xv, e.load(e.at(row, None, j * e.lanes), mask))

        whole = b.and_(k, word(-chains))
        with cgutils.for_range_slice(b, word(0), whole, word(chains)) as (at_k, _):
            for chain in range(chains):
                step(b.add(at_k, word(chain)), chain)
        with cgutils.for_range_slice(b, whole, k, word(1)) as (at_k, _):
            step(at_k, 0)
        v = [b.load(p) for p in acc]
        while len(v) > nv:
            v = [b.fadd(p, q) for p, q in zip(v[: len(v) // 2], v[len(v) // 2 :])]
        for j in range(nv):
            b.store(v[j], acc[j])
        with b.if_then(b.icmp_signed("!=", mode, word(0))):
            for j, mask in enumerate(masks):
                b.store(b.fadd(v[j], e.load(e.at(init, None, j * e.lanes), mask)), acc[j])
        for j, mask in enumerate(masks):
            e.store(b.load(acc[j]), e.at(y, None, j * e.lanes), mask)

    return native(f"gemv_columns{nv}", "iipipippi", emit)


def _whole_rows(e: Any, n: Any, k: Any, b_ptr: Any, rs: Any, begin: Callable) -> None:
    """Read B[:k, :n] eight whole rows at a time, then row by row; ``begin(at_k, rows)`` returns ``visit(j, mask, vectors)``."""
    b = e.b

    def read(at_k: Any, rows: int) -> None:
        visit = begin(at_k, rows)
        starts = [e.at(b_ptr, b.mul(rs, b.add(at_k, word(r)))) for r in range(rows)]
        _by_vectors(e, n, lambda j, mask: visit(j, mask, [e.load(e.at(start, j), mask) for start in starts]))

    whole = b.and_(k, word(-8))
    with cgutils.for_range_slice(b, word(0), whole, word(8)) as (at_k, _):
        read(at_k, 8)
    with cgutils.for_range_slice(b, whole, k, word(1)) as (at_k, _):
        read(at_k, 1)


def _one_row() -> Any:
    """y[j] = (init[j] if mode) + sum_k x[k*xs] * B[k*rs + j] for j < n, k > 0."""

    def emit(e, n, k, x, xs, b_ptr, rs, y, init, mode):  # type: ignore[no-untyped-def]
        b = e.b

        def begin(at_k, rows):  # type: ignore[no-untyped-def]
            xv = [e.splat(b.load(e.at(x, b.mul(xs, b.add(at_k, word(r)))), align=e.size)) for r in range(rows)]
            first = b.icmp_signed("==", at_k, word(0))
            fresh = b.and_(first, b.icmp_signed("==", mode, word(0)))
            source = b.select(first, init, y)

            def visit(j, mask, of_b):  # type: ignore[no-untyped-def]
                chains = [b.select(fresh, e.zero, e.load(e.at(source, j), mask)), e.zero]
                for r in range(rows):
                    chains[r % 2] = e.fma(xv[r], of_b[r], chains[r % 2])
                e.store(b.fadd(*chains) if rows > 1 else chains[0], e.at(y, j), mask)

            return visit

        _whole_rows(e, n, k, b_ptr, rs, begin)

    return native("gemv_rows", "iipipippi", emit)


def _few_rows() -> Any:
    """C[i,j] = sum_k A[i*ars + k*acs] * B[k*brs + j] for i < m, j < n, k > 0, in one chain over k.

    The rows of C alternate, one vector each: [i,j] is at j // lanes * lanes * m + i * lanes + j % lanes.
    """

    def emit(e, m, n, k, a, ars, acs, b_ptr, brs, c):  # type: ignore[no-untyped-def]
        b = e.b

        def begin(at_k, rows):  # type: ignore[no-untyped-def]
            fresh = b.icmp_signed("==", at_k, word(0))
            columns = [b.mul(acs, b.add(at_k, word(r))) for r in range(rows)]

            def visit(j, mask, of_b):  # type: ignore[no-untyped-def]
                with cgutils.for_range_slice(b, word(0), m, word(1)) as (i, _):
                    place = e.at(c, b.add(b.mul(j, m), b.mul(i, word(e.lanes))))
                    of_a = e.at(a, b.mul(i, ars))
                    chain = b.select(fresh, e.zero, e.load(place, mask))
                    for column, v in zip(columns, of_b):
                        chain = e.fma(e.splat(b.load(e.at(of_a, column), align=e.size)), v, chain)
                    e.store(chain, place, mask)

            return visit

        _whole_rows(e, n, k, b_ptr, brs, begin)

    return native("gemm_rows", "iiipiipip", emit)


_dots_block, _columns4, _columns1 = _dots(), _column_sums(4), _column_sums(1)
_one_row_block, few_rows = _one_row(), _few_rows()


# Longer sums are split into parts of LONG or LONG_ROWS terms (CHAINS chains each), which are added by `add_exactly`.
LONG, LONG_ROWS = 2048, 4096
AT_ONCE = 2048  # columns of B whose partial sums fit the stack
_room = stack(2 * AT_ONCE)


@njit
def _long_dots(n, K, x, b, b_cs, y, init, init_s, mode):
    part, lost = _room(b), at(_room(b), AT_ONCE)
    fill(n, lost, like(b, 0))
    _dots_block(n, LONG, x, b, b_cs, y, init, init_s, mode)
    for k in range(LONG, K, LONG):
        _dots_block(n, min(K - k, LONG), at(x, k), at(b, k), b_cs, part, part, 0, 0)
        exactly(n, y, lost, part, y, lost)


@njit
def _long_columns(n, K, x, x_s, b, b_rs, y, init, mode):
    part, lost = _room(b), at(_room(b), AT_ONCE)
    fill(n, lost, like(b, 0))
    _columns1(n, LONG, x, x_s, b, b_rs, y, init, mode)
    for k in range(LONG, K, LONG):
        _columns1(n, min(K - k, LONG), at(x, k * x_s), x_s, at(b, k * b_rs), b_rs, part, part, 0)
        exactly(n, y, lost, part, y, lost)


@njit
def _long_rows(N, K, x, x_s, b, b_rs, y, init, mode):
    part, lost = _room(b), at(_room(b), AT_ONCE)
    for j in range(0, N, AT_ONCE):
        n, yj = min(N - j, AT_ONCE), at(y, j)
        fill(n, lost, like(b, 0))
        _one_row_block(n, LONG_ROWS, x, x_s, at(b, j), b_rs, yj, at(init, j), mode)
        for k in range(LONG_ROWS, K, LONG_ROWS):
            _one_row_block(n, min(K - k, LONG_ROWS), at(x, k * x_s), x_s, at(b, k * b_rs + j), b_rs, part, part, 0)
            exactly(n, yj, lost, part, yj, lost)


@njit(inline=True)
def dots(N, K, x, b, b_cs, y, init, init_s, mode):
    """y[j] = init[j*init_s] + sum_k x[k] * B[j*b_cs + k]."""
    width = min(CHAINS, lanes(b))
    for j in range(0, N, width):
        n, bj, yj, ij = min(width, N - j), at(b, j * b_cs), at(y, j), at(init, j * init_s)
        if K > LONG:
            _long_dots(n, K, x, bj, b_cs, yj, ij, init_s, mode)
        else:
            _dots_block(n, K, x, bj, b_cs, yj, ij, init_s, mode)


@njit(inline=True)
def column_sums(N, K, x, x_s, b, b_rs, y, init, mode, wide):
    """y[j] = init[j] + sum_k x[k*x_s] * B[k*b_rs + j]; with ``wide`` the order of a sum depends on j's place."""
    size = lanes(b)
    j = 0
    while j < N:
        bj, yj, ij, left = at(b, j), at(y, j), at(init, j), N - j
        if K > LONG:
            _long_columns(min(left, size), K, x, x_s, bj, b_rs, yj, ij, mode)
            j += size
        elif wide and left > 3 * size:
            _columns4(min(left - 3 * size, size), K, x, x_s, bj, b_rs, yj, ij, mode)
            j += 4 * size
        else:
            _columns1(min(left, size), K, x, x_s, bj, b_rs, yj, ij, mode)
            j += size


@routine("iipipiippi")
def gemv(N, K, a, a_cs, b, b_rs, b_cs, c, init, mode):
    """C[j] = INIT[j] + sum_k A[k*a_cs] * B[k*b_rs + j*b_cs]; INIT is 0 in mode 0, init in mode 1."""
    if b_cs == 1 and (N > 1 or b_rs != 1):
        if K == 0 or N <= (4 * lanes(b) if free_masks() else lanes(b) - 1):
            column_sums(N, K, a, a_cs, b, b_rs, c, init, mode, True)
            return
        first = init if mode else c  # mode 0 ignores the init that it loads
        if K > LONG_ROWS:
            _long_rows(N, K, a, a_cs, b, b_rs, c, first, mode)
        else:
            _one_row_block(N, K, a, a_cs, b, b_rs, c, first, mode)
    elif b_rs == 1 and a_cs == 1:
        dots(N, K, a, b, b_cs, c, init, 1, mode)
    else:
        for j in range(N):
            s = like(c, 0)
            for k in range(K):
                s += a[k * a_cs] * b[k * b_rs + j * b_cs]
            c[j] = s + init[j] if mode else s

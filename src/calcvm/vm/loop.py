"""The VM: jitted loops that walk rows, and whole epochs of them.

A *job* is an int64 array that says what to run, by which code (`run_rows`, `run_rounds`); every worker of
a team runs the same job, meeting the others at barriers.  Python is entered once a job.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types

from calcvm.vm.atomics import (
    atomic_add,
    atomic_load,
    atomic_store,
    call_job,
    call_kernel,
    f32_at,
    f64_at,
    i32_at,
    i64_at,
    pause,
    u8_at,
)
from calcvm.vm.job import (
    ADDRESS,
    ARRIVED,
    BARRIER,
    BATCH,
    CODE,
    COUNT,
    DONE,
    DRAINS,
    DTYPE,
    ELEMS,
    END_SPANS,
    FEED_WORDS,
    FEEDS,
    FIRST,
    GENERATION,
    HEAP,
    ITEMSIZE,
    JOB,
    KEY,
    LEARNING,
    LINE,
    N_DRAINS,
    N_END_SPANS,
    N_FEEDS,
    N_RESULTS,
    N_SAMPLES,
    N_SPANS,
    OFFSET,
    PARK_AFTER,
    PARKED,
    RESULTS,
    ROW_BYTES,
    ROWS,
    ROWS_FULL,
    ROWS_LAST,
    ROWS_SHORT,
    SEED_OFF,
    SEQ,
    SHUFFLE,
    SPANS,
    SPINS,
    START,
    STEPS,
    STOP,
    SUMS,
    TABLE,
    TEAM,
)  # fmt: skip

_sched_yield = types.ExternalFunction("sched_yield", types.int32())


def _helper(fn: Any) -> Any:
    return numba.njit(error_model="numpy", nogil=True)(fn)


@_helper
def idle(looks):
    """Spin for a moment, then offer the processor to others."""
    if looks > SPINS:
        _sched_yield()
    else:
        pause()


# ---------------------------------------------------------------- rows
@_helper
def barrier(control, n_workers):
    generation = atomic_load(control + GENERATION)
    if atomic_add(control + ARRIVED, 1) == n_workers - 1:
        atomic_store(control + ARRIVED, 0)
        atomic_store(control + GENERATION, generation + 1)
    else:
        spins = 0
        while atomic_load(control + GENERATION) == generation:
            spins += 1
            idle(spins)


@_helper
def run_span(control, table, heap, rows, start, stop, worker, n_workers):
    addresses = i64_at(table)
    for pc in range(start, stop):
        row = rows + pc * ROW_BYTES
        words = i64_at(row)
        call_kernel(addresses[words[0]], heap, row, worker, n_workers)
        if n_workers > 1 and words[1] & 1:
            barrier(control, n_workers)


# ---------------------------------------------------------------- data
U = np.uint64


@_helper
def mix(x):
    """splitmix64's finalizer: a bijection of 64 bits."""
    x = (x ^ (x >> U(30))) * U(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> U(27))) * U(0x94D049BB133111EB)
    return x ^ (x >> U(31))


@_helper
def shuffled(i, n, bits, key):
    """Place i of a permutation of [0, n) that the key chooses; needs no table.

    Three rounds of multiply and xor-shift are a bijection of ``bits`` bits; walk its cycle back into [0, n).
    """
    mask = (U(1) << U(bits)) - U(1)
    half = U((bits + 1) // 2)
    k1, k2 = mix(key), mix(key + U(0x9E3779B97F4A7C15))
    x = U(i)
    while True:
        x = (x * U(0x9E3779B97F4A7C15) + k1) & mask
        x = ((x ^ (x >> half)) * U(0xBF58476D1CE4E5B9)) & mask
        x = ((x ^ (x >> half)) * U(0x94D049BB133111EB) + k2) & mask
        x = x ^ (x >> half)
        if x < U(n):
            return np.int64(x)


@_helper
def copy_in(dst, i0, address, dtype, j0, n):
    """dst[i0 : i0+n] = source[j0 : j0+n], converted to the heap's type."""
    if dtype == 0:
        s0 = f32_at(address + 4 * j0)
        for i in range(n):
            dst[i0 + i] = s0[i]
    elif dtype == 1:
        s1 = f64_at(address + 8 * j0)
        for i in range(n):
            dst[i0 + i] = s1[i]
    elif dtype == 2:
        s2 = u8_at(address + j0)
        for i in range(n):
            dst[i0 + i] = s2[i]
    elif dtype == 3:
        s3 = i32_at(address + 4 * j0)
        for i in range(n):
            dst[i0 + i] = s3[i]
    else:
        s4 = i64_at(address + 8 * j0)
        for i in range(n):
            dst[i0 + i] = s4[i]


@_helper
def fetch(job, base, n, bits, worker):
    """Gather a batch of samples into the placeholders; workers take shares of the batch."""
    words = i64_at(job)
    feeds, heap, n_samples, key = words[FEEDS], words[HEAP], words[N_SAMPLES], U(words[KEY])
    nw = words[TEAM]
    lo, hi = n * worker // nw, n * (worker + 1) // nw
    for i in range(lo, hi):
        j = shuffled(base + i, n_samples, bits, key) if words[SHUFFLE] else base + i
        for k in range(words[N_FEEDS]):
            feed = i64_at(feeds + 8 * FEED_WORDS * k)
            e = feed[ELEMS]
            if words[ITEMSIZE] == 4:
                copy_in(f32_at(heap), feed[OFFSET] + i * e, feed[ADDRESS], feed[DTYPE], j * e, e)
            else:
                copy_in(f64_at(heap), feed[OFFSET] + i * e, feed[ADDRESS], feed[DTYPE], j * e, e)


@_helper
def deliver(job, base, n):
    """Copy results of a batch out, in the order of the samples, and add up weighted scalars."""
    words = i64_at(job)
    heap, narrow = words[HEAP], words[ITEMSIZE] == 4
    for k in range(words[N_DRAINS]):
        drain = i64_at(words[DRAINS] + 8 * FEED_WORDS * k)
        e, off = drain[ELEMS], drain[OFFSET]
        if narrow:
            dst32, src32 = f32_at(drain[ADDRESS] + 4 * base * e), f32_at(heap + 4 * off)
            for i in range(n * e):
                dst32[i] = src32[i]
        else:
            dst64, src64 = f64_at(drain[ADDRESS] + 8 * base * e), f64_at(heap + 8 * off)
            for i in range(n * e):
                dst64[i] = src64[i]
    sums, offsets = f64_at(words[SUMS]), i64_at(words[RESULTS])
    for k in range(words[N_RESULTS]):
        off = offsets[k]
        value = np.float64(f32_at(heap)[off]) if narrow else f64_at(heap)[off]
        sums[k] += value * n


# ---------------------------------------------------------------- jobs
def run_rows(job, worker):
    """Rows [START, STOP), STEPS times."""
    words = i64_at(job)
    for _ in range(words[STEPS]):
        run_span(words[BARRIER], words[TABLE], words[HEAP], words[ROWS], words[START], words[STOP], worker, words[TEAM])


def run_rounds(job, worker):
    """Rounds [FIRST, FIRST+COUNT) of an epoch: fetch, run the round's sections, and those that end a learning batch."""
    words = i64_at(job)
    control = words[BARRIER]
    n, batch, learning, nw = words[N_SAMPLES], words[BATCH], words[LEARNING], words[TEAM]
    table, heap = words[TABLE], words[HEAP]
    per_learning = (learning + batch - 1) // batch
    spans, end_spans = i64_at(words[SPANS]), i64_at(words[END_SPANS])
    bits = 0
    while (1 << bits) < n:
        bits += 1
    for k in range(words[FIRST], words[FIRST] + words[COUNT]):
        start = k // per_learning * learning
        stop = min(start + learning, n)
        base = start + k % per_learning * batch
        m = min(batch, stop - base)
        rows = words[ROWS_FULL]
        if m != batch:
            rows = words[ROWS_SHORT] if stop - start == learning else words[ROWS_LAST]
        fetch(job, base, m, bits, worker)
        if worker == 0 and words[SEED_OFF] >= 0:
            if words[ITEMSIZE] == 4:
                f32_at(heap)[words[SEED_OFF]] = np.float32(m / (stop - start))
            else:
                f64_at(heap)[words[SEED_OFF]] = m / (stop - start)
        if nw > 1:
            barrier(control, nw)
        for s in range(words[N_SPANS]):
            run_span(control, table, heap, rows, spans[2 * s], spans[2 * s + 1], worker, nw)
        if base + m == stop:
            for s in range(words[N_END_SPANS]):
                run_span(control, table, heap, rows, end_spans[2 * s], end_spans[2 * s + 1], worker, nw)
        if nw > 1:
            barrier(control, nw)
        if worker == 0:
            deliver(job, base, m)


# ---------------------------------------------------------------- the team
def post(control, job, n_workers):
    """Give a job to the team; returns whether a worker sleeps and must be woken."""
    atomic_store(control + JOB, job)
    atomic_store(control + DONE, 0)
    atomic_add(control + SEQ, 1)
    sleeping = 0
    for w in range(1, n_workers):
        sleeping += atomic_load(control + PARKED + w * LINE)
    return sleeping


def join(control, job, n_workers):
    """Work on the posted job as worker 0, then wait for the others."""
    call_job(i64_at(job)[CODE], job, 0)
    spins = 0
    while atomic_load(control + DONE) < n_workers - 1:
        spins += 1
        idle(spins)


def serve(control, worker, seen):
    """Run jobs as ``worker`` until none has come for a while; returns the last job number seen."""
    looks = 0
    while True:
        seq = atomic_load(control + SEQ)
        if seq != seen:
            seen, looks = seq, 0
            job = atomic_load(control + JOB)
            if job == 0:
                return -1
            if worker < i64_at(job)[TEAM]:
                call_job(i64_at(job)[CODE], job, worker)
                atomic_add(control + DONE, 1)
            continue
        looks += 1
        idle(looks)
        if looks > PARK_AFTER:
            atomic_store(control + PARKED + worker * LINE, 1)
            if atomic_load(control + SEQ) == seen:  # else a job came while we were lying down
                return seen
            atomic_store(control + PARKED + worker * LINE, 0)
            looks = 0


SIGNATURES = {
    "run_rows": types.void(types.int64, types.int64),
    "run_rounds": types.void(types.int64, types.int64),
    "post": types.int64(types.int64, types.int64, types.int64),
    "join": types.void(types.int64, types.int64, types.int64),
    "serve": types.int64(types.int64, types.int64, types.int64),
}

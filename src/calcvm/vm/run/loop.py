"""The VM: jitted loops that walk rows, and whole epochs of them.

A *job* is an int64 array that says what to run, by which code (`run_rows`, `run_rounds`); every worker of
a team runs the same job, meeting the others at barriers.  Python is entered once a job.
"""

from __future__ import annotations

from time import CLOCK_MONOTONIC

import numpy as np
from numba import types

from calcvm.vm.run.atomics import (
    atomic_add,
    atomic_load,
    atomic_store,
    atomic_swap,
    call_job,
    call_kernel,
    f32_at,
    f64_at,
    flush_line,
    i32_at,
    i64_at,
    pause,
)
from calcvm.vm.run.job import (
    AGAIN,
    ARRIVED,
    BARRIER,
    BATCH,
    BEST,
    BOXES,
    BUSY,
    CLAIM,
    CODE,
    COUNT,
    CROWDED,
    DEADLINE,
    END_SPANS,
    EPOCH,
    FINISHED,
    FIRST,
    FIT,
    FUNCTIONS,
    GENERATION,
    HEAP,
    HIRED,
    IMAGE,
    IMAGE_BYTES,
    ITEMSIZE,
    JUDGE,
    KEEP,
    KEY,
    LAPS,
    LATE_NS,
    LEARNING,
    LIMIT,
    LINE,
    MEANS,
    MOST_PENALTY,
    N_DRAINS,
    N_END_SPANS,
    N_RESULTS,
    N_SAMPLES,
    N_SPANS,
    N_TASKS,
    NEXT,
    NOT_FINITE,
    NUMBER,
    PACE,
    PARK_AFTER,
    PARKED,
    PART,
    PARTS,
    PATIENCE,
    PENALTY,
    REACHED,
    READY,
    ROUNDS,
    ROW_BYTES,
    ROWS,
    ROWS_FULL,
    ROWS_LAST,
    ROWS_SHORT,
    SEED,
    SEED_OFF,
    SEMAPHORE,
    SERVE,
    SINCE,
    SLICE,
    SPANS,
    SPINS,
    START,
    STATUS,
    STEPS,
    STOP,
    STOPPED,
    SUMS,
    TABLE,
    TASKS,
    TEAM,
    THREAD,
    TRAPPED,
    TURN,
    UNITS,
    UNTIL,
)  # fmt: skip
from calcvm.vm.run.pace import note, pace_of, team_of
from calcvm.vm.run.samples import copy_rows, deliver, far, fetch, fetch_ahead, helper, inlined, permute, scratch  # noqa: F401 (entries)

U = np.uint64
_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_getcpuclockid = types.ExternalFunction("pthread_getcpuclockid", types.int32(types.int64, types.int64))
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))
_pthread_create = types.ExternalFunction("pthread_create", types.int32(*[types.int64] * 4))
_sem_init = types.ExternalFunction("sem_init", types.int32(types.int64, types.int32, types.int32))
_sem_post = types.ExternalFunction("sem_post", types.int32(types.int64))
_sem_wait = types.ExternalFunction("sem_wait", types.int32(types.int64))


@helper
def idle(looks):
    """Spin for a moment, then offer the processor to others."""
    if looks > SPINS:
        _sched_yield()
    else:
        pause()


@helper
def now():
    """Nanoseconds of the system's monotonic clock."""
    t = scratch()
    _clock_gettime(CLOCK_MONOTONIC, t)
    return i64_at(t)[0] * 1_000_000_000 + i64_at(t)[1]


# ---------------------------------------------------------------- workers without a core
@helper
def ran(control, n_workers):
    """Nanoseconds for which workers 1 to ``n_workers - 1`` have had a core, all together."""
    total, t = 0, scratch()
    for w in range(1, n_workers):
        _getcpuclockid(i64_at(control + BOXES + w * LINE + THREAD)[0], t)
        _clock_gettime(i32_at(t)[0], t)
        total += i64_at(t)[0] * 1_000_000_000 + i64_at(t)[1]
    return total


@helper
def await_others(control, job, n_workers, address, value):
    """Worker 0 waits on while an address holds a value, and sees whether the others run meanwhile.

    A team loses as many workers at its next barrier as had no core, and jobs that begin soon have so many fewer, too.  A worker
    that is waited for because a row gave it most of the work does run.
    """
    begun, before, look, took, late = now(), ran(control, n_workers), LATE_NS, 0, False
    while atomic_load(address) == value:
        _sched_yield()
        took = now() - begun
        if took > look:
            look = 2 * took
            missing = (n_workers - 1) * took - (ran(control, n_workers) - before)
            if 4 * missing > took:  # of one worker, a quarter of the time: as many as fill what is missing
                atomic_store(control + FIT, max(1, n_workers - (4 * missing + 3 * took) // (4 * took)))
                late = True
    if late:
        crowd(control, job, took)


@helper
def crowd(control, job, lost):
    """Jobs have FIT workers for a multiple of the time that was lost, and for longer each time that a larger team loses again soon."""
    times, words, t = i64_at(control + CROWDED), i64_at(job), now()
    again = t - times[0] < AGAIN * times[1]
    times[1] = min(max(PENALTY * lost, 2 * times[1] if again else 0), MOST_PENALTY)
    atomic_store(control + CROWDED, t + times[1])
    if words[DEADLINE] > t + times[1]:
        words[DEADLINE] = t + times[1]


@helper
def that_fit(control, job, n_workers):
    """Of so many workers those that a job has now; a job that has fewer ends when more may fit."""
    words, fit = i64_at(job), atomic_load(control + FIT)
    if words[TABLE] != 0 and fit < n_workers:  # a fleet, which has no table, waits for nobody
        until = atomic_load(control + CROWDED)
        if now() < until:
            n_workers = fit
            if words[DEADLINE] > until:
                words[DEADLINE] = until
    return n_workers


# ---------------------------------------------------------------- rows
@helper
def barrier(control, job, n_workers, worker, phase):
    """Wait for all of the team; returns how many stay, of whom others leave: whoever opens says so, not between phases of a row."""
    generation = atomic_load(control + GENERATION)
    if atomic_add(control + ARRIVED, 1) == n_workers - 1:
        atomic_store(control + ARRIVED, 0)
        fit = atomic_load(control + FIT)
        if fit < n_workers and phase == 0:
            atomic_store(job + 8 * TEAM, fit)
        atomic_store(control + GENERATION, generation + 1)
    else:
        spins = 0
        while atomic_load(control + GENERATION) == generation:
            spins += 1
            if spins == SPINS and worker == 0:
                await_others(control, job, n_workers, control + GENERATION, generation)
            idle(spins)
    return atomic_load(job + 8 * TEAM)


@inlined
def what_rows_need(job):
    """Of a job: read before the loop over steps (1x16x4: 14.0 ns a step; where each step is a call 16.2, Zen 4)."""
    words = i64_at(job)
    return words[BARRIER], job, i64_at(words[TABLE]), words[HEAP], words[ROW_BYTES]


@inlined
def run_span(needed, rows, start, stop, worker, n_workers):
    """Rows [start, stop), each as often as it has phases; returns how many the team still has, of whom others leave."""
    control, job, addresses, heap, row_bytes = needed
    row, end, phase = rows + start * row_bytes, rows + stop * row_bytes, 0
    while worker < n_workers and row < end:
        meets = False
        while row < end and not meets:  # a loop of its own: what the barrier needs is not kept at hand in it
            words = i64_at(row)
            call_kernel(addresses[words[0]], heap, row, worker, n_workers, phase)
            phase = phase + 1 if words[1] & 2 and phase + 1 < words[2] else 0
            meets = n_workers > 1 and (phase != 0 or words[1] & 1 != 0)
            if phase == 0:
                row += row_bytes
        if meets:
            n_workers = barrier(control, job, n_workers, worker, phase)
    return n_workers


@helper
def run_spans(job, rows, spans, first, last, worker, n_workers):
    """Spans [first, last) of a list."""
    needed = what_rows_need(job)
    for s in range(first, last):
        if worker < n_workers:
            n_workers = run_span(needed, rows, spans[2 * s], spans[2 * s + 1], worker, n_workers)
    return n_workers


@helper
def put(job, offset, value):
    """Set an element of the heap."""
    words = i64_at(job)
    if words[ITEMSIZE] == 4:
        f32_at(words[HEAP])[offset] = np.float32(value)
    else:
        f64_at(words[HEAP])[offset] = value


@helper
def element(job, offset):
    """An element of the heap."""
    words = i64_at(job)
    return np.float64(f32_at(words[HEAP])[offset]) if words[ITEMSIZE] == 4 else f64_at(words[HEAP])[offset]


@helper
def weigh(job, share):
    """Scale the gradient of the loss by a round's share of its learning batch."""
    put(job, i64_at(job)[SEED_OFF], share)


@helper
def enough(job, k, worker):
    """Whether a team leaves its job after step or round ``k``, since it is past its deadline.

    Worker 0 says so one ahead: a barrier in step ``k + 1`` lies between that and the others' look at it.
    """
    if worker == 0 and atomic_load(job + 8 * UNTIL) == 0 and now() > i64_at(job)[DEADLINE]:
        atomic_store(job + 8 * UNTIL, k + 2)
    return atomic_load(job + 8 * UNTIL) == k + 1


# ---------------------------------------------------------------- jobs
def flush(start, stop):
    """No cache holds the lines from an address to another."""
    for address in range(start, stop, LINE):
        flush_line(address)


def run_rows(job, worker):
    """Rows [START, STOP), STEPS times."""
    words = i64_at(job)
    needed, limited, nw = what_rows_need(job), words[DEADLINE] != 0, words[TEAM]
    rows, start, stop, k = words[ROWS], words[START], words[STOP], 0
    for k in range(words[STEPS]):
        nw = run_span(needed, rows, start, stop, worker, nw)
        if worker >= nw or (limited and enough(job, k, worker)):
            break
    if worker == 0:
        words[UNITS] = k + 1


def run_rounds(job, worker):
    """Rounds [FIRST, FIRST+COUNT) of an epoch: fetch, run the round's sections, and those that end a learning batch."""
    words = i64_at(job)
    control = words[BARRIER]
    n, batch, learning, nw = words[N_SAMPLES], words[BATCH], words[LEARNING], words[TEAM]
    per_learning = (learning + batch - 1) // batch
    spans, end_spans = i64_at(words[SPANS]), i64_at(words[END_SPANS])
    ahead = far(job)
    first_span, last_span = 0, words[N_SPANS]
    if words[PART] > 0:
        first_span = words[PART] - 1
        if words[PART] < words[PARTS]:
            last_span = words[PART]
    for k in range(words[FIRST], words[FIRST] + words[COUNT]):
        start = k // per_learning * learning
        stop = start + learning if start + learning < n else n
        base = start + k % per_learning * batch
        m = batch if base + batch < stop else stop - base
        rows = words[ROWS_FULL]
        if m != batch:
            rows = words[ROWS_SHORT] if stop - start == learning else words[ROWS_LAST]
        if words[PART] <= 1:
            fetch(job, base, m, worker)
            if ahead:
                fetch_ahead(job, base + m, batch if base + m + batch < n else n - base - m, worker)
            if worker == 0 and words[SEED_OFF] >= 0:
                weigh(job, m / (stop - start))
            if nw > 1:
                nw = barrier(control, job, nw, worker, 0)
        nw = run_spans(job, rows, spans, first_span, last_span, worker, nw)
        if 0 < words[PART] < words[PARTS]:
            continue
        if base + m == stop:
            nw = run_spans(job, rows, end_spans, 0, words[N_END_SPANS], worker, nw)
        if 1 < nw > worker:
            nw = barrier(control, job, nw, worker, 0)
        if worker == 0:
            deliver(job, base, m, stop - start)
            words[REACHED], words[UNITS] = k + 1, k + 1 - words[FIRST]
        if (
            1 < nw > worker and words[N_DRAINS]
        ):  # a result may lie in a placeholder, into which others fetch next samples
            nw = barrier(control, job, nw, worker, 0)
        if worker >= nw or (words[DEADLINE] and enough(job, k, worker)):
            break


# ---------------------------------------------------------------- tasks
@helper
def begin(job):
    """Start a pass over the samples."""
    words = i64_at(job)
    for k in range(words[N_RESULTS]):
        f64_at(words[SUMS])[k] = 0.0


@helper
def advance(job, most):
    """Run up to ``most`` rounds of a pass, alone, or the next part of a long one; returns what of ``most`` that was worth."""
    words = i64_at(job)
    left = words[ROUNDS] - words[FIRST]
    if words[FIRST] == 0 and words[PART] == 0:
        begin(job)
    words[TEAM], words[COUNT] = 1, most if most < left else left
    if words[PARTS] > 1:
        words[COUNT] = 1
        words[PART] += 1
        call_job(words[CODE], job, 0)
        if words[PART] == words[PARTS]:
            words[PART] = 0
            words[FIRST] += 1
        return most
    call_job(words[CODE], job, 0)
    words[FIRST] += words[COUNT]
    return words[COUNT]


@helper
def trapped(job):
    return element(job, 0) != 0.0


@helper
def compute(job):
    """Results that are functions of totals: those of the whole pass into the heap, the rows that make of them the result."""
    words = i64_at(job)
    needed, rows = what_rows_need(job), words[ROWS_FULL]
    table, means = i64_at(words[FUNCTIONS]), f64_at(words[MEANS])
    i = 1
    for _ in range(table[0]):
        n = table[i]
        for k in range(i + 1, i + 1 + 2 * n, 2):
            put(job, table[k + 1], means[table[k]])
        i += 1 + 2 * n
        n = table[i]
        for k in range(i + 1, i + 1 + n):
            run_span(needed, rows, table[k], table[k] + 1, 0, 1)
        i += 1 + n
        means[table[i]] = element(job, table[i + 1])
        i += 2


@helper
def conclude(job):
    """Append the means of a whole pass to MEANS; returns the first of them."""
    words = i64_at(job)
    sums, means = f64_at(words[SUMS]), f64_at(words[MEANS])
    for k in range(words[N_RESULTS]):
        means[k] = sums[k] / words[N_SAMPLES]
    if words[FUNCTIONS]:
        compute(job)
    words[MEANS] += 8 * words[N_RESULTS]
    return means[0]


@helper
def epoch_key(seed, epoch):
    """`calcvm.vm.memory.epoch.shuffling_key`."""
    return np.int64((U(seed) * U(0x9E3779B97F4A7C15) + U(epoch) * U(0xD1342543DE82EF95) + U(1)) & U(2**63 - 1))


@helper
def keep(task):
    """Copy the image of the heap to KEEP."""
    words = i64_at(task)
    image, kept = i32_at(words[HEAP] + words[IMAGE]), i32_at(words[KEEP])
    for k in range(words[IMAGE_BYTES] // 4):
        kept[k] = image[k]


@helper
def end_epoch(task):
    """After an epoch's last round, and the judge's: their means, what they decide."""
    words = i64_at(task)
    loss = conclude(task)
    words[FIRST] = 0
    words[EPOCH] += 1
    if words[SEED_OFF] >= 0:
        weigh(task, 1.0)
    if words[JUDGE]:
        score = conclude(words[JUDGE])
        i64_at(words[JUDGE])[FIRST] = 0
        best = f64_at(task + 8 * BEST)
        if score < best[0]:
            best[0], words[SINCE] = score, 0
            if words[KEEP] and not trapped(task):
                keep(task)
        else:
            words[SINCE] += 1
    if not np.isfinite(loss):
        words[STATUS] = NOT_FINITE
    elif words[JUDGE] and words[SINCE] > 0 and 0 <= words[PATIENCE] <= words[SINCE]:
        words[STATUS] = STOPPED
    if trapped(task):
        words[STATUS] = TRAPPED


def run_task(task, budget):
    """Up to ``budget`` rounds of a task and its judge, from where they stopped, through the ends of epochs."""
    words = i64_at(task)
    while words[STATUS] == READY and words[EPOCH] < words[LIMIT] and budget > 0:
        judge = words[JUDGE]
        if words[FIRST] < words[ROUNDS]:
            words[KEY] = epoch_key(words[SEED], words[EPOCH])
            budget -= advance(task, budget)
            if trapped(task):
                words[STATUS] = TRAPPED
                continue
        if words[FIRST] == words[ROUNDS]:
            if judge and budget > 0:
                budget -= advance(judge, budget)
            if judge == 0 or i64_at(judge)[FIRST] == i64_at(judge)[ROUNDS]:
                end_epoch(task)
    if words[STATUS] == READY and words[EPOCH] >= words[LIMIT]:
        words[STATUS] = FINISHED


give_turn = helper(run_task)  # for compiled callers


def run_fleet(job, worker):
    """Turns of SLICE rounds for tasks one after the other, LAPS times around, by any number of workers.

    Nobody waits: a task that another worker holds is passed over.  A worker to whom a whole lap had nothing to
    give is done, and so is one that comes back from a turn after the deadline.
    """
    words = i64_at(job)
    n, vain = words[N_TASKS], 0
    while vain < n:
        turn = atomic_add(job + 8 * NEXT, 1)
        if turn >= n * words[LAPS]:
            break
        task = i64_at(words[TASKS])[turn % n]
        vain += 1
        if atomic_add(task + 8 * CLAIM, 1) == 0 and i64_at(task)[STATUS] == READY:
            most = i64_at(task)[TURN]
            give_turn(task, most if 0 < most < words[SLICE] else words[SLICE])
            vain = 0
        atomic_add(task + 8 * CLAIM, -1)
        if words[DEADLINE] and now() > words[DEADLINE]:
            break


# ---------------------------------------------------------------- the team
def run_team(control, job, n_workers):
    """Run a job as worker 0 of a team of at most ``n_workers``, alone where another thread has the team.

    All there is to a team is done here, in one call: what calls it sees before or after.  When it is over no worker
    looks at the job any more.
    """
    words, team, most, pace, begun = i64_at(job), 1, n_workers, 0, 0
    if n_workers > 1:
        n_workers = that_fit(control, job, n_workers)
    if 1 < n_workers == most and words[PACE] != 0:
        pace, begun = pace_of(control, job), now()
        n_workers = team_of(pace, job, most, begun)
    mine = n_workers > 1 and atomic_swap(control + BUSY, 1) == 0
    if mine:
        if words[TABLE] != 0 and atomic_load(control + FIT) < n_workers:
            atomic_store(control + FIT, n_workers)
        team = hire(control, n_workers)
    words[TEAM], words[BARRIER] = team, control
    for w in range(1, team):
        post(control + BOXES + w * LINE, job)
    call_job(words[CODE], job, 0)
    for w in range(1, team):
        looks, box = 0, control + BOXES + w * LINE
        while atomic_load(box) != 0:
            looks += 1
            if looks == SPINS and words[TABLE] != 0:
                await_others(control, job, team, box, job)
            idle(looks)
    if pace != 0:
        t = now()
        note(pace, job, team, most, t, t - begun)
    if mine:
        atomic_store(control + BUSY, 0)


@helper
def hire(control, n_workers):
    """See that workers 1 to ``n_workers - 1`` are there, as far as the system has threads; returns the team's size."""
    hired = i64_at(control + HIRED)
    while hired[0] < n_workers - 1:
        box = control + BOXES + (hired[0] + 1) * LINE
        i64_at(box + NUMBER)[0] = hired[0] + 1
        if (
            _sem_init(box + SEMAPHORE, 0, 0) != 0
            or _pthread_create(box + THREAD, 0, i64_at(control + SERVE)[0], box) != 0
        ):
            break
        hired[0] += 1
    return min(n_workers, hired[0] + 1)


@helper
def post(box, job):
    """Give a worker a job, and wake it if it sleeps."""
    atomic_store(box, job)
    if atomic_load(box + PARKED) and atomic_swap(box + PARKED, 0):
        _sem_post(box + SEMAPHORE)


def serve(box):
    """A worker's life: run the jobs that come into its box, and empty it after each."""
    worker, looks = i64_at(box + NUMBER)[0], 0
    control = box - BOXES - worker * LINE
    while True:
        job = atomic_load(box)
        if job != 0:
            call_job(i64_at(job)[CODE], job, worker)
            atomic_store(box, 0)
            looks = 0
        elif looks < SPINS or (looks < PARK_AFTER and not 0 < atomic_load(control + FIT) <= worker):
            looks += 1
            idle(looks)
        else:
            park(box)
            looks = 0


@helper
def park(box):
    """Sleep until a job is posted.  Whoever lowers the flag, poster or worker, decides whether there is a token."""
    atomic_store(box + PARKED, 1)
    if atomic_load(box) == 0 or atomic_swap(box + PARKED, 0) == 0:
        while _sem_wait(box + SEMAPHORE) != 0:  # a signal
            pass

"""The VM: jitted loops over rows, and over the rounds of whole epochs.

A *job* is an int64 array with the data of a run and the address of its code (`run_rows`, `run_rounds`).  All workers of a team
run the same job, and meet at barriers.  Python is entered once per job.

    worker 0   |== row 0 ==|= row 1 =|.........|=== row 2 ===|  a team of 3 runs a job:
    worker 1   |== row 0 ==|====== row 1 ======|=== row 2 ===|  each worker computes its share of every row,
    worker 2   |= row 0 =|= row 1 =|...........|== row 2 ==|.|  and waits (...) for the others at a barrier
                                               ^             ^
                                            barrier       barrier

Only a row (or a phase of a row) that others depend on has a barrier after it: here rows 1 and 2.  The last worker that arrives
opens the barrier; the others spin, then yield.  If workers lack cores, the barrier lets them leave the team.
"""

from __future__ import annotations

from time import CLOCK_MONOTONIC

import numpy as np
from numba import types

from calcvm.vm.run import job as J
from calcvm.vm.run import rounds
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
from calcvm.vm.run.pace import note, pace_of, team_of
from calcvm.vm.run.samples import copy_rows, deliver, far, fetch, fetch_ahead, helper, inlined, permute, scratch  # noqa: F401 (entries)

round_of, rows_of, epoch_key, status_of = map(
    inlined, (rounds.round_of, rounds.rows_of, rounds.epoch_key, rounds.status_of)
)
turn_of, begin, average, loss_of = rounds.passes(inlined, i64_at, f64_at)
_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_getcpuclockid = types.ExternalFunction("pthread_getcpuclockid", types.int32(types.int64, types.int64))
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))
_pthread_create = types.ExternalFunction("pthread_create", types.int32(*[types.int64] * 4))
_sem_init = types.ExternalFunction("sem_init", types.int32(types.int64, types.int32, types.int32))
_sem_post = types.ExternalFunction("sem_post", types.int32(types.int64))
_sem_wait = types.ExternalFunction("sem_wait", types.int32(types.int64))


@helper
def idle(looks):
    """Spin briefly, then yield the processor."""
    if looks > J.SPINS:
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
    """Total nanoseconds for which workers 1 to ``n_workers - 1`` had a core."""
    total, t = 0, scratch()
    for w in range(1, n_workers):
        _getcpuclockid(i64_at(control + J.BOXES + w * J.LINE + J.THREAD)[0], t)
        _clock_gettime(i32_at(t)[0], t)
        total += i64_at(t)[0] * 1_000_000_000 + i64_at(t)[1]
    return total


@helper
def await_others(control, job, n_workers, address, value):
    """Worker 0 waits while an address holds a value, and checks whether the other workers run meanwhile.

    At its next barrier the team shrinks by the number of workers without a core, and so do jobs that start soon.  A worker that
    runs, because its share of a row is the largest, does not count as missing.
    """
    begun, before, look, took, late = now(), ran(control, n_workers), J.LATE_NS, 0, False
    while atomic_load(address) == value:
        _sched_yield()
        took = now() - begun
        if took > look:
            look = 2 * took
            missing = (n_workers - 1) * took - (ran(control, n_workers) - before)
            if 4 * missing > took:  # a quarter of one worker's time or more: round up to whole workers
                atomic_store(control + J.FIT, max(1, n_workers - (4 * missing + 3 * took) // (4 * took)))
                late = True
    if late:
        crowd(control, job, took)


@helper
def crowd(control, job, lost):
    """Limit jobs to FIT workers for a multiple of the lost time; the limit lasts longer if a larger team soon loses time again."""
    times, words, t = i64_at(control + J.CROWDED), i64_at(job), now()
    again = t - times[0] < J.AGAIN * times[1]
    times[1] = min(max(J.PENALTY * lost, 2 * times[1] if again else 0), J.MOST_PENALTY)
    atomic_store(control + J.CROWDED, t + times[1])
    if words[J.DEADLINE] > t + times[1]:
        words[J.DEADLINE] = t + times[1]


@helper
def that_fit(control, job, n_workers):
    """The number of workers a job gets now, up to ``n_workers``; a job that gets fewer ends when more may fit."""
    words, fit = i64_at(job), atomic_load(control + J.FIT)
    if words[J.TABLE] != 0 and fit < n_workers:  # a fleet, which has no table, waits for no worker
        until = atomic_load(control + J.CROWDED)
        if now() < until:
            n_workers = fit
            if words[J.DEADLINE] > until:
                words[J.DEADLINE] = until
    return n_workers


# ---------------------------------------------------------------- rows
@helper
def barrier(control, job, n_workers, worker, phase):
    """Wait for the whole team; returns its size from here on.  The worker that opens it sets this, except between a row's phases."""
    generation = atomic_load(control + J.GENERATION)
    if atomic_add(control + J.ARRIVED, 1) == n_workers - 1:
        atomic_store(control + J.ARRIVED, 0)
        fit = atomic_load(control + J.FIT)
        if fit < n_workers and phase == 0:
            atomic_store(job + 8 * J.TEAM, fit)
        atomic_store(control + J.GENERATION, generation + 1)
    else:
        spins = 0
        while atomic_load(control + J.GENERATION) == generation:
            spins += 1
            if spins == J.SPINS and worker == 0:
                await_others(control, job, n_workers, control + J.GENERATION, generation)
            idle(spins)
    return atomic_load(job + 8 * J.TEAM)


@inlined
def what_rows_need(job):
    """Fields of a job that rows need, read before the loop over steps (1x16x4: 14.0 ns per step; in a call per step 16.2, Zen 4)."""
    words = i64_at(job)
    return words[J.BARRIER], job, i64_at(words[J.TABLE]), words[J.HEAP], words[J.ROW_BYTES]


@inlined
def run_span(needed, rows, start, stop, worker, n_workers):
    """Run rows [start, stop), each once per phase; returns the team's size, from which workers may have been dropped."""
    control, job, addresses, heap, row_bytes = needed
    row, end, phase = rows + start * row_bytes, rows + stop * row_bytes, 0
    while worker < n_workers and row < end:
        meets = False
        while row < end and not meets:  # a separate loop, so that registers need not hold the barrier's data in it
            words = i64_at(row)
            call_kernel(addresses[words[0]], heap, row, worker, n_workers, phase)
            phase = phase + 1 if words[1] & 2 and phase + 1 < words[2] else 0
            meets = n_workers > 1 and (phase != 0 or words[1] & 1 != 0)
            if phase == 0:
                row += words[2] if words[1] & 4 else row_bytes
        if meets:
            n_workers = barrier(control, job, n_workers, worker, phase)
    return n_workers


@helper
def run_spans(job, rows, spans, first, last, worker, n_workers):
    """Run spans [first, last) of a list."""
    needed = what_rows_need(job)
    for s in range(first, last):
        if worker < n_workers:
            n_workers = run_span(needed, rows, spans[2 * s], spans[2 * s + 1], worker, n_workers)
    return n_workers


@helper
def put(job, offset, value):
    """Set an element of the heap."""
    words = i64_at(job)
    if words[J.ITEMSIZE] == 4:
        f32_at(words[J.HEAP])[offset] = np.float32(value)
    else:
        f64_at(words[J.HEAP])[offset] = value


@helper
def element(job, offset):
    """An element of the heap."""
    words = i64_at(job)
    return np.float64(f32_at(words[J.HEAP])[offset]) if words[J.ITEMSIZE] == 4 else f64_at(words[J.HEAP])[offset]


@helper
def weigh(job, of, share):
    """Scale the gradient of path ``of``'s loss by a round's share of its learning batch."""
    put(job, i64_at(of)[J.SEED_OFF], share)


@helper
def enough(job, k, worker):
    """Whether a team leaves its job after step or round ``k``, because the deadline has passed.

    Worker 0 decides this one step ahead: a barrier in step ``k + 1`` then lies between its write and the others' read.
    """
    if worker == 0 and atomic_load(job + 8 * J.UNTIL) == 0 and now() > i64_at(job)[J.DEADLINE]:
        atomic_store(job + 8 * J.UNTIL, k + 2)
    return atomic_load(job + 8 * J.UNTIL) == k + 1


# ---------------------------------------------------------------- jobs
def flush(start, stop):
    """Remove the lines between two addresses from all caches."""
    for address in range(start, stop, J.LINE):
        flush_line(address)


def run_rows(job, worker):
    """Run rows [START, STOP), STEPS times."""
    words = i64_at(job)
    needed, limited, nw = what_rows_need(job), words[J.DEADLINE] != 0, words[J.TEAM]
    rows, start, stop, k = words[J.ROWS], words[J.START], words[J.STOP], 0
    for k in range(words[J.STEPS]):
        nw = run_span(needed, rows, start, stop, worker, nw)
        if worker >= nw or (limited and enough(job, k, worker)):
            break
    if worker == 0:
        words[J.UNITS] = k + 1


def run_rounds(job, worker):
    """Run rounds [FIRST, FIRST+COUNT) of an epoch: fetch, the round's sections, then those that end a learning batch."""
    words = path = i64_at(job)
    control, nw, ahead, of, order = words[J.BARRIER], words[J.TEAM], far(job), job, words[J.ORDER]
    n, batch, learning = words[J.N_SAMPLES], words[J.BATCH], words[J.LEARNING]
    spans, end_spans = i64_at(words[J.SPANS]), i64_at(words[J.END_SPANS])
    first_span, last_span = 0, words[J.N_SPANS]
    if words[J.PART] > 0:
        first_span = words[J.PART] - 1
        if words[J.PART] < words[J.PARTS]:
            last_span = words[J.PART]
    for k in range(words[J.FIRST], words[J.FIRST] + words[J.COUNT]):
        j = k
        if order:  # another path's words take the place of the job's
            of, j = turn_of(words, k)
            path = i64_at(of)
            n, batch, learning, last_span = path[J.N_SAMPLES], path[J.BATCH], path[J.LEARNING], path[J.N_SPANS]
            spans, end_spans = i64_at(path[J.SPANS]), i64_at(path[J.END_SPANS])
        base, m, of_learning, is_last = round_of(n, batch, learning, j)
        rows = rows_of(path, m, of_learning)
        if words[J.PART] <= 1:
            fetch(job, of, base, m, worker)
            if ahead:
                fetch_ahead(job, base + m, batch if base + m + batch < n else n - base - m, worker)
            if worker == 0 and path[J.SEED_OFF] >= 0:
                weigh(job, of, m / of_learning)
            if nw > 1:
                nw = barrier(control, job, nw, worker, 0)
        nw = run_spans(job, rows, spans, first_span, last_span, worker, nw)
        if 0 < words[J.PART] < words[J.PARTS]:
            continue
        if is_last:
            nw = run_spans(job, rows, end_spans, 0, path[J.N_END_SPANS], worker, nw)
        if 1 < nw > worker:
            nw = barrier(control, job, nw, worker, 0)
        if worker == 0:
            deliver(job, of, base, m, of_learning)
            if order and is_last and path[J.SEED_OFF] >= 0:
                weigh(job, of, 1.0)
            words[J.REACHED], words[J.UNITS] = k + 1, k + 1 - words[J.FIRST]
        if (
            1 < nw > worker and path[J.N_DRAINS]
        ):  # a result may lie in a placeholder that other workers fill with the next samples
            nw = barrier(control, job, nw, worker, 0)
        if worker >= nw or (words[J.DEADLINE] and enough(job, k, worker)):
            break


# ---------------------------------------------------------------- tasks
@helper
def advance(job, most):
    """Run up to ``most`` rounds of a pass with one worker, or the next part of a long round; returns the used share of ``most``."""
    words = i64_at(job)
    left = words[J.ROUNDS] - words[J.FIRST]
    if words[J.FIRST] == 0 and words[J.PART] == 0:
        begin(words)
    words[J.TEAM], words[J.COUNT] = 1, most if most < left else left
    if words[J.PARTS] > 1:
        words[J.COUNT] = 1
        words[J.PART] += 1
        call_job(words[J.CODE], job, 0)
        if words[J.PART] == words[J.PARTS]:
            words[J.PART] = 0
            words[J.FIRST] += 1
        return most
    call_job(words[J.CODE], job, 0)
    words[J.FIRST] += words[J.COUNT]
    return words[J.COUNT]


@helper
def trapped(job):
    return element(job, 0) != 0.0


@helper
def compute(job):
    """Compute results that are functions of totals: write the pass's totals to the heap, and run the rows of each result."""
    words = i64_at(job)
    needed, rows = what_rows_need(job), words[J.ROWS_FULL]
    table, means = i64_at(words[J.FUNCTIONS]), f64_at(words[J.MEANS])
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
    """Append the means of a whole pass to MEANS; returns the loss."""
    words = i64_at(job)
    average(words)
    if words[J.FUNCTIONS]:
        compute(job)
    loss = loss_of(words)
    words[J.MEANS] += 8 * words[J.N_RESULTS]
    return loss


@helper
def keep(task):
    """Copy the image of the heap to KEEP."""
    words = i64_at(task)
    image, kept = i32_at(words[J.HEAP] + words[J.IMAGE]), i32_at(words[J.KEEP])
    for k in range(words[J.IMAGE_BYTES] // 4):
        kept[k] = image[k]


@helper
def end_epoch(task):
    """Finish an epoch after its last round and the judge's: take their means, and decide whether to go on."""
    words = i64_at(task)
    loss = conclude(task)
    words[J.FIRST] = 0
    words[J.EPOCH] += 1
    if words[J.SEED_OFF] >= 0:
        weigh(task, task, 1.0)
    if words[J.JUDGE]:
        score = conclude(words[J.JUDGE])
        i64_at(words[J.JUDGE])[J.FIRST] = 0
        best = f64_at(task + 8 * J.BEST)
        if score < best[0]:
            best[0], words[J.SINCE] = score, 0
            if words[J.KEEP] and not trapped(task):
                keep(task)
        else:
            words[J.SINCE] += 1
    words[J.STATUS] = J.TRAPPED if trapped(task) else status_of(words, loss)


def run_task(task, budget):
    """Run up to ``budget`` rounds of a task and its judge, from where they stopped, across the ends of epochs."""
    words = i64_at(task)
    while words[J.STATUS] == J.READY and words[J.EPOCH] < words[J.LIMIT] and budget > 0:
        judge = words[J.JUDGE]
        if words[J.FIRST] < words[J.ROUNDS]:
            words[J.KEY] = epoch_key(words[J.SEED], words[J.EPOCH])
            budget -= advance(task, budget)
            if trapped(task):
                words[J.STATUS] = J.TRAPPED
                continue
        if words[J.FIRST] == words[J.ROUNDS]:
            if judge and budget > 0:
                budget -= advance(judge, budget)
            if judge == 0 or i64_at(judge)[J.FIRST] == i64_at(judge)[J.ROUNDS]:
                end_epoch(task)
    if words[J.STATUS] == J.READY and words[J.EPOCH] >= words[J.LIMIT]:
        words[J.STATUS] = J.FINISHED


give_turn = helper(run_task)  # for compiled callers


def run_fleet(job, worker):
    """Run turns of SLICE rounds of tasks in rotation, LAPS times around, with any number of workers.

    Workers do not wait: a task that another worker holds is skipped.  A worker is done after a whole lap without a task, or
    after a turn that ends past the deadline.
    """
    words = i64_at(job)
    n, vain = words[J.N_TASKS], 0
    while vain < n:
        turn = atomic_add(job + 8 * J.NEXT, 1)
        if turn >= n * words[J.LAPS]:
            break
        task = i64_at(words[J.TASKS])[turn % n]
        vain += 1
        if atomic_add(task + 8 * J.CLAIM, 1) == 0 and i64_at(task)[J.STATUS] == J.READY:
            most = i64_at(task)[J.TURN]
            give_turn(task, most if 0 < most < words[J.SLICE] else words[J.SLICE])
            vain = 0
        atomic_add(task + 8 * J.CLAIM, -1)
        if words[J.DEADLINE] and now() > words[J.DEADLINE]:
            break


# ---------------------------------------------------------------- the team
def run_team(control, job, n_workers):
    """Run a job as worker 0 of a team of at most ``n_workers``, or alone if another thread has the team.

    One call does all of a team's work, so the caller only sees the state before or after it.  At the end no worker reads
    the job any more.
    """
    n_workers = min(n_workers, J.MAX_WORKERS)
    words, team, most, pace, begun = i64_at(job), 1, n_workers, 0, 0
    if n_workers > 1:
        n_workers = that_fit(control, job, n_workers)
    if 1 < n_workers == most and words[J.PACE] != 0:
        pace, begun = pace_of(control, job), now()
        n_workers = team_of(pace, job, most, begun)
    mine = n_workers > 1 and atomic_swap(control + J.BUSY, 1) == 0
    if mine:
        if words[J.TABLE] != 0 and atomic_load(control + J.FIT) < n_workers:
            atomic_store(control + J.FIT, n_workers)
        team = hire(control, n_workers)
    words[J.TEAM], words[J.BARRIER] = team, control
    for w in range(1, team):
        post(control + J.BOXES + w * J.LINE, job)
    call_job(words[J.CODE], job, 0)
    for w in range(1, team):
        looks, box = 0, control + J.BOXES + w * J.LINE
        while atomic_load(box) != 0:
            looks += 1
            if looks == J.SPINS and words[J.TABLE] != 0:
                await_others(control, job, team, box, job)
            idle(looks)
    if pace != 0:
        t = now()
        note(pace, job, team, most, t, t - begun)
    if mine:
        atomic_store(control + J.BUSY, 0)


@helper
def hire(control, n_workers):
    """Ensure that workers 1 to ``n_workers - 1`` exist, if the system has the threads; returns the team's size."""
    hired = i64_at(control + J.HIRED)
    while hired[0] < n_workers - 1:
        box = control + J.BOXES + (hired[0] + 1) * J.LINE
        i64_at(box + J.NUMBER)[0] = hired[0] + 1
        if (
            _sem_init(box + J.SEMAPHORE, 0, 0) != 0
            or _pthread_create(box + J.THREAD, 0, i64_at(control + J.SERVE)[0], box) != 0
        ):
            break
        hired[0] += 1
    return min(n_workers, hired[0] + 1)


@helper
def post(box, job):
    """Give a worker a job, and wake it if it sleeps."""
    atomic_store(box, job)
    if atomic_load(box + J.PARKED) and atomic_swap(box + J.PARKED, 0):
        _sem_post(box + J.SEMAPHORE)


def serve(box):
    """A worker's main loop: run each job that arrives in its box, then empty the box."""
    worker, looks = i64_at(box + J.NUMBER)[0], 0
    control = box - J.BOXES - worker * J.LINE
    while True:
        job = atomic_load(box)
        if job != 0:
            call_job(i64_at(job)[J.CODE], job, worker)
            atomic_store(box, 0)
            looks = 0
        elif looks < J.SPINS or (looks < J.PARK_AFTER and not 0 < atomic_load(control + J.FIT) <= worker):
            looks += 1
            idle(looks)
        else:
            park(box)
            looks = 0


@helper
def park(box):
    """Sleep until a job is posted.  The side that lowers the flag, poster or worker, decides whether there is a token."""
    atomic_store(box + J.PARKED, 1)
    if atomic_load(box) == 0 or atomic_swap(box + J.PARKED, 0) == 0:
        while _sem_wait(box + J.SEMAPHORE) != 0:  # a signal
            pass

"""The VM on a GPU: the counterpart of `calcvm.vm.run.loop`, with the blocks of a grid instead of a team of threads.

Every block runs the same rows.  A job or a task has the same words as on the CPU (`calcvm.vm.run.job`), with device addresses.
These are plain functions on top of `calcvm.kernels_cuda._cuda`, compiled for a program's instructions
(`calcvm.vm.run.cuda.build`) or run by the simulator.

A barrier's counter only grows, so it needs no reset.  If a block waits too long (PATIENCE_NS), it says so in the control block
and returns, the others follow, and the host raises an error.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from calcvm.formulas import sums as formula
from calcvm.kernels_cuda._common import is_first, part_of
from calcvm.kernels_cuda._cuda import (
    as_f64,
    at,
    atomic_add,
    atomic_load,
    bit_length,
    block,
    blocks,
    copy_async,
    copy_wait,
    device,
    f32_at,
    f64_at,
    fence,
    i32_at,
    i64_at,
    like,
    now,
    pause,
    shared_words,
    sync,
    thread,
    threads,
    u8_at,
    warp_size,
)
from calcvm.kernels_cuda.random import mix
from calcvm.kernels_shared.random import GOLDEN
from calcvm.ops.spec import HEADER_WORDS, MAX_WORDS
from calcvm.vm.program.encoding import FLAG_PHASES
from calcvm.vm.run import job as J
from calcvm.vm.run import rounds

BYTES, FOURS, EIGHTS = J.FEED_CELLS.values()  # DTYPE of feeds and drains that are copied unchanged

U = np.uint64

# Words of a grid's control block, each on a separate cache line; all but PATIENCE_NS are 0 when a launch begins.
ARRIVED, STAGED_ROUNDS, TAKEN_ROUNDS, GAVE_UP, PATIENCE_NS = range(0, 40, 8)
CONTROL_BYTES = 8 * 48
LATE, TURN = 2 * MAX_WORDS, 2 * MAX_WORDS + 1  # words in the block's shared memory, after two rows
sum_of = device(formula.sum_of)
round_at, rows_of, epoch_key, status_of = map(
    device, (rounds.round_of, rounds.rows_of, rounds.epoch_key, rounds.status_of)
)
turn_of, begin, average, loss_of = rounds.passes(device, i64_at, f64_at)


# ---------------------------------------------------------------- waiting
@device
def wait_until(counter, goal, control):
    """Thread 0 waits until another block has raised ``counter`` to ``goal``; returns in all threads whether it timed out."""
    sync()
    if thread() == 0:
        start, late = now(), 0
        while late == 0 and atomic_load(counter) < goal:
            pause()
            if now() - start > control[PATIENCE_NS]:
                late = 1
                atomic_add(at(control, GAVE_UP), 1)
        fence()
        shared_words()[LATE] = late
    sync()
    return shared_words()[LATE]


@device
def meet(control, nw):
    """Wait for all blocks of the grid; returns 1 after a timeout: the caller then returns at once."""
    late = 0
    if nw == 1:
        sync()
    else:
        sync()
        goal = 0
        if thread() == 0:
            fence()
            goal = (atomic_add(at(control, ARRIVED), 1) // nw + 1) * nw
        late = wait_until(at(control, ARRIVED), goal, control)
    return late


# ---------------------------------------------------------------- samples
@device
def permuted(i, n, key):
    """Position of sample ``i`` in the permutation of [0, n) that `calcvm.vm.run.samples` computes from ``key``."""
    bits = bit_length(n - 1)
    mask, half = (U(1) << U(bits)) - U(1), U((bits + 1) // 2)
    rounds = J.FEW_ROUNDS if bits <= J.FEW_BITS else J.MANY_ROUNDS
    y, out = U(i), True
    while out:
        k, r = U(key), 0
        while r < rounds:
            k += GOLDEN
            h = mix(k)
            y = (y * ((h >> U(32)) | U(1)) + h) & mask
            y = y ^ (y >> half)
            r += 1
        out = y >= U(n)
    return np.int64(y)


@device
def place(words, i):
    """Index in the arrays of sample ``i`` of a pass."""
    if words[J.SHUFFLE]:
        i = permuted(i, words[J.N_SAMPLES], words[J.KEY])
    if words[J.INDEX]:
        i = i64_at(words[J.INDEX])[i]
    return i


@device
def convert(n, x, y, start, step):
    """y[j] = x[j] for j = start, start + step, ... below n."""
    j = start
    while j < n:
        y[j] = like(y, x[j])
        j += step


@device
def read_array(n, address, dtype, of, y, start, step):
    """As `convert`, for an array at an address, from element ``of`` on."""
    if dtype == 0:
        convert(n, at(f32_at(address), of), y, start, step)
    elif dtype == 1:
        convert(n, at(f64_at(address), of), y, start, step)
    elif dtype == 2 or dtype == BYTES:
        convert(n, at(u8_at(address), of), y, start, step)
    elif dtype == 3 or dtype == FOURS:
        convert(n, at(i32_at(address), of), y, start, step)
    else:
        convert(n, at(i64_at(address), of), y, start, step)


@device
def copy_cells(n, dtype, address, of, there, to):
    """As `convert`, by all threads, for unchanged data: from element ``of`` at one address to element ``to`` at another."""
    if dtype == BYTES:
        convert(n, at(u8_at(address), of), at(u8_at(there), to), thread(), threads())
    elif dtype == FOURS:
        convert(n, at(i32_at(address), of), at(i32_at(there), to), thread(), threads())
    else:
        convert(n, at(i64_at(address), of), at(i64_at(there), to), thread(), threads())


@device
def fetch_one(words, feed, y, base, lo, hi):
    """Copy samples base + lo, ... base + hi - 1 of a pass to rows lo, ... hi - 1 of ``y``."""
    e = feed[J.ELEMS]
    if words[J.SHUFFLE] == 0 and words[J.INDEX] == 0:  # a contiguous part of the array
        read_array((hi - lo) * e, feed[J.ADDRESS], feed[J.DTYPE], (base + lo) * e, at(y, lo * e), thread(), threads())
        return
    width, shift = 1, 0  # lanes that share a sample
    while width < e and width < warp_size():
        width, shift = 2 * width, shift + 1
    i = lo + (thread() >> shift)
    while i < hi:
        of = place(words, base + i) * e
        read_array(e, feed[J.ADDRESS], feed[J.DTYPE], of, at(y, i * e), thread() & (width - 1), width)
        i += threads() >> shift


@device
def fetch_cells(words, feed, address, first, base, lo, hi):
    """As `fetch_one`, for unchanged data, to elements from ``first`` on of the memory at an address."""
    if feed[J.DTYPE] == BYTES:
        fetch_one(words, feed, at(u8_at(address), first), base, lo, hi)
    elif feed[J.DTYPE] == FOURS:
        fetch_one(words, feed, at(i32_at(address), first), base, lo, hi)
    else:
        fetch_one(words, feed, at(i64_at(address), first), base, lo, hi)


@device
def fetch(words, path, h, base, m, w, nw):
    """Copy samples base, base + 1, ... of a pass into the placeholders of a path; workers share the batch."""
    lo, hi = part_of(m, w, nw)
    k = 0
    while k < path[J.N_FEEDS]:
        feed = i64_at(path[J.FEEDS] + 8 * J.FEED_WORDS * k)
        if feed[J.DTYPE] < BYTES:
            fetch_one(words, feed, at(h, feed[J.OFFSET]), base, lo, hi)
        else:
            fetch_cells(words, feed, words[J.HEAP], feed[J.OFFSET], base, lo, hi)
        k += 1


@device
def take_staged(words, h, m, w, nw):
    """Copy the samples that `stage` has brought into the placeholders."""
    lo, hi = part_of(m, w, nw)
    k = 0
    while k < words[J.N_FEEDS]:
        staged = i64_at(words[J.STAGED] + 8 * J.FEED_WORDS * k)
        e, dtype = staged[J.ELEMS], staged[J.DTYPE]
        n, of, to = (hi - lo) * e, lo * e, staged[J.OFFSET] + lo * e
        if dtype < BYTES:
            read_array(n, staged[J.ADDRESS], dtype, of, at(h, to), thread(), threads())
        else:
            copy_cells(n, dtype, staged[J.ADDRESS], of, words[J.HEAP], to)
        k += 1


@device
def deliver(words, path, h, base, m, of_learning, w, nw):
    """Copy the results of a path's batch out, in sample order, and add up weighted scalars."""
    lo, hi = part_of(m, w, nw)
    k = 0
    while k < path[J.N_DRAINS]:
        drain = i64_at(path[J.DRAINS] + 8 * J.FEED_WORDS * k)
        e = drain[J.ELEMS]
        n, of, to = (hi - lo) * e, drain[J.OFFSET] + lo * e, (base + lo) * e
        if drain[J.DTYPE] == 0:
            convert(n, at(h, of), at(f32_at(drain[J.ADDRESS]), to), thread(), threads())
        elif drain[J.DTYPE] < BYTES:
            convert(n, at(h, of), at(f64_at(drain[J.ADDRESS]), to), thread(), threads())
        else:
            copy_cells(n, drain[J.DTYPE], words[J.HEAP], of, drain[J.ADDRESS], to)
        k += 1
    if is_first(w):
        sums, offsets = f64_at(path[J.SUMS]), i64_at(path[J.RESULTS])
        k = 0
        while k < path[J.N_RESULTS]:
            off = offsets[k]
            if off >= 0:
                sums[k] += sum_of(np.float64(h[off]), m, words[J.ITEMSIZE])
            elif off >= -J.BY_LEARNING:  # sums over samples, as in `calcvm.vm.run.samples`
                sums[k] += np.float64(h[-1 - off]) * path[J.N_SAMPLES]
            else:
                sums[k] += np.float64(h[-1 - off - J.BY_LEARNING]) * of_learning
            k += 1


# ---------------------------------------------------------------- rounds and epochs
@device
def round_of(words, k):
    return round_at(words[J.N_SAMPLES], words[J.BATCH], words[J.LEARNING], k)


@device
def path_at(words, address):
    """The words of a path at an address that `turn_of` found."""
    return i64_at(address) if address else words


@device
def weigh(path, h, part):
    """Scale the gradient of a path's loss by a round's share of its learning batch."""
    if path[J.SEED_OFF] >= 0:
        h[path[J.SEED_OFF]] = like(h, part)


@device
def conclude(words):
    """The loss of a whole pass; advances MEANS for the next pass."""
    loss = loss_of(words)
    words[J.MEANS] += 8 * words[J.N_RESULTS]
    return loss


@device
def end_epoch(words, h):
    """Finish an epoch after its last round and its judge's, in one thread: take the means, and decide whether to go on."""
    loss = conclude(words)
    words[J.FIRST] = 0
    words[J.EPOCH] += 1
    weigh(words, h, 1.0)
    if words[J.JUDGE]:
        score, best = conclude(i64_at(words[J.JUDGE])), as_f64_word(words, J.BEST)
        if score < best[0]:
            best[0] = score
            words[J.SINCE] = 0
        else:
            words[J.SINCE] += 1
    words[J.STATUS] = status_of(words, loss)


@device
def as_f64_word(words, k):
    """A word, reinterpreted as float64."""
    return as_f64(at(words, k))


@device
def phases_of(r):
    """Number of a row's phases (`calcvm.vm.program.encoding.phases_of`)."""
    return r[HEADER_WORDS] if r[1] & FLAG_PHASES else 1


# ---------------------------------------------------------------- entries
def entries(dispatch: Callable, heap_at: Callable) -> dict[str, Callable]:
    """The kernels of a program: functions with one argument, the address of a job (`row`: heap, row and phase).

    dispatch(h, r, w, nw, phase) runs a phase of a row by the row's number.
    heap_at : converts an address to a pointer to the heap's elements.
    """

    @device
    def ask_for(rows, row_bytes, pc):
        """Start to copy a row to the block's shared memory."""
        to, of = at(shared_words(), (pc & 1) * MAX_WORDS), i64_at(rows + pc * row_bytes)
        k = 2 * thread()
        while 8 * k < row_bytes:
            copy_async(at(to, k), at(of, k))
            k += 2 * threads()

    @device(inline=False)
    def run_span(h, rows, row_bytes, start, stop, control, w, nw):
        """Run rows [start, stop); returns 1 if a barrier timed out."""
        pc, late = start, 0
        if start < stop:
            ask_for(rows, row_bytes, start)
        copy_wait()
        sync()
        while pc < stop and late == 0:
            r = at(shared_words(), (pc & 1) * MAX_WORDS)
            last = pc + 1 == stop
            if not last:
                ask_for(rows, row_bytes, pc + 1)
            phase, phases = 0, phases_of(r)
            while phase < phases and late == 0:
                if phase > 0:
                    late = meet(control, nw)
                if late == 0:
                    dispatch(h, r, w, nw, phase)
                phase += 1
            copy_wait()
            if nw > 1 and late == 0 and (last or r[1] & 1):
                late = meet(control, nw)
            else:
                sync()
            pc += 1
        return late

    @device(inline=False)
    def run_rounds(words, start, count, w, nw):
        """Run rounds [start, start + count) of a pass with ``nw`` workers."""
        h, control = heap_at(words[J.HEAP]), i64_at(words[J.BARRIER])
        k, late = start, 0
        while k < start + count and late == 0:
            of, j = turn_of(words, k)
            path = path_at(words, of)
            spans, ends = i64_at(path[J.SPANS]), i64_at(path[J.END_SPANS])
            base, m, of_learning, is_last = round_of(path, j)
            if words[J.STAGED]:
                late = wait_until(at(control, STAGED_ROUNDS), k - start + 1, control)
                take_staged(words, h, m, w, nw)
            else:
                fetch(words, path, h, base, m, w, nw)
            if is_first(w):
                weigh(path, h, np.float64(m) / np.float64(of_learning))
            if late == 0:
                late = meet(control, nw)
            if words[J.STAGED] and is_first(w):
                atomic_add(at(control, TAKEN_ROUNDS), 1)
            rows, n_spans = rows_of(path, m, of_learning), path[J.N_SPANS]
            n_all = n_spans + path[J.N_END_SPANS] if is_last else n_spans
            s = 0
            while s < n_all and late == 0:
                span = at(spans, 2 * s) if s < n_spans else at(ends, 2 * (s - n_spans))
                late = run_span(h, rows, words[J.ROW_BYTES], span[0], span[1], control, w, nw)
                s += 1
            deliver(words, path, h, base, m, of_learning, w, nw)
            if of and is_last and is_first(w):
                weigh(path, h, 1.0)
            if path[J.N_DRAINS] and late == 0:
                late = meet(control, nw)
            k += 1
        return late

    @device
    def stage(words, start, count):
        """The feeder, a block beside the workers: it brings the next round's samples while they run the current one."""
        control = i64_at(words[J.BARRIER])
        k, late = 0, 0
        while k < count and late == 0:
            base, m, _, _ = round_of(words, start + k)
            late = wait_until(at(control, TAKEN_ROUNDS), k, control)
            f = 0
            while f < words[J.N_FEEDS]:
                staged = i64_at(words[J.STAGED] + 8 * J.FEED_WORDS * f)
                feed = i64_at(words[J.FEEDS] + 8 * J.FEED_WORDS * f)
                if feed[J.DTYPE] < BYTES:
                    fetch_one(words, feed, heap_at(staged[J.ADDRESS]), base, 0, m)
                else:
                    fetch_cells(words, feed, staged[J.ADDRESS], 0, base, 0, m)
                f += 1
            sync()
            if thread() == 0:
                atomic_add(at(control, STAGED_ROUNDS), 1)
            k += 1

    @device(inline=False)
    def end_pass(words):
        """The means of a pass, and functions of its totals (`calcvm.vm.run.loop.compute`), with the whole block."""
        if thread() == 0:
            average(words)
        sync()
        if words[J.FUNCTIONS]:
            h, control = heap_at(words[J.HEAP]), i64_at(words[J.BARRIER])
            table, means = i64_at(words[J.FUNCTIONS]), f64_at(words[J.MEANS])
            f, i = 0, 1
            while f < table[0]:
                stop = i + 1 + 2 * table[i]
                k = i + 1
                while k < stop:
                    if thread() == 0:
                        h[table[k + 1]] = like(h, means[table[k]])
                    k += 2
                sync()
                i, k = stop + 1 + table[stop], stop + 1
                while k < i:
                    run_span(h, words[J.ROWS_FULL], words[J.ROW_BYTES], table[k], table[k] + 1, control, 0, 1)
                    k += 1
                sync()
                if thread() == 0:
                    means[table[i]] = np.float64(h[table[i + 1]])
                sync()
                f, i = f + 1, i + 2

    @device
    def run_turn(words, budget):
        """Run up to ``budget`` rounds of a task in this block, across the ends of its epochs."""
        h = heap_at(words[J.HEAP])
        while words[J.STATUS] == J.READY and words[J.EPOCH] < words[J.LIMIT] and budget > 0:
            start = words[J.FIRST]
            count = min(budget, words[J.ROUNDS] - start)
            ended = start + count == words[J.ROUNDS]
            sync()
            if thread() == 0 and start == 0:
                begin(words)
                words[J.KEY] = epoch_key(words[J.SEED], words[J.EPOCH])
            sync()
            run_rounds(words, start, count, 0, 1)
            sync()
            trapped = h[0] != 0
            if ended and words[J.JUDGE] and not trapped:
                judge = i64_at(words[J.JUDGE])
                if thread() == 0:
                    begin(judge)
                sync()
                run_rounds(judge, 0, judge[J.ROUNDS], 0, 1)
                sync()
                end_pass(judge)
            if ended and not trapped:
                end_pass(words)
            if thread() == 0:
                words[J.FIRST] = start + count
                if trapped:
                    words[J.STATUS] = J.TRAPPED
                elif ended:
                    end_epoch(words, h)
                    if h[0] != 0:
                        words[J.STATUS] = J.TRAPPED
            sync()
            if ended and words[J.KEEP] and words[J.SINCE] == 0 and words[J.STATUS] != J.TRAPPED:
                copy_cells(words[J.IMAGE_BYTES] // 4, FOURS, words[J.HEAP] + words[J.IMAGE], 0, words[J.KEEP], 0)
            budget -= count
        sync()
        if thread() == 0 and words[J.STATUS] == J.READY and words[J.EPOCH] >= words[J.LIMIT]:
            words[J.STATUS] = J.FINISHED

    def rows(job):
        """Run rows [START, STOP), STEPS times."""
        words = i64_at(job)
        h, control = heap_at(words[J.HEAP]), i64_at(words[J.BARRIER])
        step, late = 0, 0
        while step < words[J.STEPS] and late == 0:
            rows = words[J.ROWS]
            late = run_span(h, rows, words[J.ROW_BYTES], words[J.START], words[J.STOP], control, block(), blocks())
            step += 1

    def rounds(job):
        """Run rounds [FIRST, FIRST + COUNT) of a pass; if samples are staged, the last block is the feeder."""
        words = i64_at(job)
        nw = blocks()
        if words[J.STAGED]:
            nw -= 1
        if block() == nw:
            stage(words, words[J.FIRST], words[J.COUNT])
        else:
            run_rounds(words, words[J.FIRST], words[J.COUNT], block(), nw)

    def fleet(job):
        """Run a turn of SLICE rounds for each task; blocks take tasks from a queue, and do not wait for each other."""
        words = i64_at(job)
        turn = 0
        while turn < words[J.N_TASKS]:
            sync()
            if thread() == 0:
                shared_words()[TURN] = atomic_add(at(words, J.NEXT), 1)
            sync()
            turn = shared_words()[TURN]
            if turn < words[J.N_TASKS]:
                run_turn(i64_at(i64_at(words[J.TASKS])[turn]), words[J.SLICE])

    def row(heap, address, phase):
        """Run a phase of a row, if the row has it at the current batch, as a separate launch."""
        h, r = heap_at(heap), i64_at(address)
        if phase < phases_of(r):
            dispatch(h, r, block(), blocks(), phase)

    def bring(job):
        """Copy the samples of round FIRST into the placeholders, as a separate launch."""
        words = i64_at(job)
        h = heap_at(words[J.HEAP])
        of, j = turn_of(words, words[J.FIRST])
        path = path_at(words, of)
        base, m, of_learning, _ = round_of(path, j)
        fetch(words, path, h, base, m, block(), blocks())
        if is_first(block()):
            weigh(path, h, np.float64(m) / np.float64(of_learning))

    def hand_over(job):
        """Deliver the results of round FIRST with one block, which then counts the round."""
        words = i64_at(job)
        of, j = turn_of(words, words[J.FIRST])
        path, h = path_at(words, of), heap_at(words[J.HEAP])
        base, m, of_learning, is_last = round_of(path, j)
        deliver(words, path, h, base, m, of_learning, 0, 1)
        if of and is_last and is_first(0):
            weigh(path, h, 1.0)
        sync()
        if thread() == 0:
            words[J.FIRST] += 1

    return {"rows": rows, "rounds": rounds, "fleet": fleet, "row": row, "bring": bring, "hand_over": hand_over}

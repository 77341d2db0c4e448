"""Best size of a team: measured while it works, since every size gives the same bits.

A barrier takes 0.1 us among a few cores that share a cache, and several times as long otherwise.  A host may also migrate the
cores of a virtual machine.  So the best size depends on the rows, on the machine and on the moment.

From time to time, jobs with the same rows run for some ms with the best size so far, then with half or twice as many workers.
The faster size stays.  The first half of each turn does not count: idle workers poll for work for a while before they sleep, and
slow others down.  From the second half, the fastest window in which no worker lost its core counts.

If a step or round takes longer than `LONG_NS`, barriers matter little, and fewer workers are not tried.  The data about a job are
in the team's control block.  Concurrent callers may spoil a choice there, but never a result.
"""

from __future__ import annotations

import numpy as np

from calcvm.vm.run.atomics import i64_at
from calcvm.vm.run.job import DEADLINE, N_PACES, PACE, PACE_BYTES, PACES, ROW_BYTES, ROWS, START, UNITS
from calcvm.vm.run.samples import helper

TURN_NS, SHARE = 8_000_000, 64  # minimum length of a turn: TURN_NS, and 1/SHARE of the pause before it
WINDOW_NS, WINDOWS = 500_000, 3  # a window has jobs of WINDOW_NS together; minimum number of windows per turn
LONG_NS = 1_000_000  # a longer step or round counts as long; a trial's job ends after this time, if it can
FIRST_PAUSE, MOST_PAUSE = 50_000_000, 2_000_000_000  # ns between trials; doubled after each trial that changes nothing
FINE = 256  # steps are measured in nanoseconds / FINE
BETTER = 64  # the other size must be faster by 1/BETTER to replace the best
NEVER = 2**62
# Words of a job's data.  OF: its rows; SIZE: the best size; OTHER: the size on trial (0: none); TURN: 0 while SIZE runs, 1 while
# OTHER runs; SINCE: start of the turn; TOOK, DONE: ns and steps of this window; SEEN: windows of this turn; FASTEST: shortest step,
# followed by that of OTHER; NEXT: start of the next trial; PAUSE: time to the trial after it; MORE: whether it tries more workers.
OF, SIZE, OTHER, TURN, SINCE, TOOK, DONE, SEEN, FASTEST, OTHERS_FASTEST, NEXT, PAUSE, MORE, N_WORDS = range(14)


@helper
def pace_of(control, job):
    """Address of the data about jobs that run the same rows."""
    words = i64_at(job)
    rows = words[PACE] if words[PACE] != 1 else words[ROWS] + words[START] * words[ROW_BYTES]
    place = (np.uint64(rows) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
    pace = control + PACES + np.int64(place % np.uint64(N_PACES)) * PACE_BYTES
    if i64_at(pace)[OF] != rows:
        for k in range(N_WORDS):
            i64_at(pace)[k] = 0
        i64_at(pace)[OF] = rows
    return pace


@helper
def begin_turn(pace, turn, t):
    """Begin the turn of the best size (0) or of the other (1)."""
    known = i64_at(pace)
    known[TURN], known[SINCE], known[TOOK], known[DONE], known[SEEN] = turn, t, 0, 0, 0
    known[FASTEST + turn] = NEVER


@helper
def team_of(pace, job, most, t):
    """The team size for a job that starts at ``t``, with at most ``most`` workers."""
    known, words = i64_at(pace), i64_at(job)
    if known[SIZE] < 1 or known[SIZE] > most:
        known[SIZE], known[OTHER], known[NEXT], known[PAUSE] = most, 0, t, FIRST_PAUSE
    size = known[SIZE]
    if known[OTHER] == 0 and t >= known[NEXT]:
        if size in (1, most):
            known[MORE] = size == 1
        known[OTHER] = min(2 * size, most) if known[MORE] else size // 2
        begin_turn(pace, 0, t)
    if known[OTHER] > 0:
        if words[DEADLINE] > t + LONG_NS:
            words[DEADLINE] = t + LONG_NS
        if known[TURN] != 0:
            size = known[OTHER]
    return max(1, min(size, most))


@helper
def note(pace, job, team, most, t, took):
    """Record that a job with ``team`` workers took ``took`` ns and ended at ``t``."""
    known, units = i64_at(pace), i64_at(job)[UNITS]
    size, other, turn = known[SIZE], known[OTHER], known[TURN]
    if other < 1 or units < 1 or team != (other if turn else size):  # there is no trial, or another caller had the team
        return
    lasts = max(TURN_NS, known[PAUSE] // SHARE)
    if 2 * (t - took - known[SINCE]) < lasts:
        return
    took += known[TOOK]
    units += known[DONE]
    known[TOOK], known[DONE] = took, units
    if took >= WINDOW_NS:
        known[FASTEST + turn] = min(known[FASTEST + turn], took * FINE // units)
        known[TOOK], known[DONE] = 0, 0
        known[SEEN] += 1
    if known[SEEN] < WINDOWS or t - known[SINCE] < lasts:
        return
    if turn == 0 and (other > size or known[FASTEST] < LONG_NS * FINE):
        begin_turn(pace, 1, t)
        return
    known[OTHER] = 0
    if turn != 0 and known[OTHERS_FASTEST] + known[OTHERS_FASTEST] // BETTER < known[FASTEST]:
        known[SIZE], known[NEXT], known[PAUSE] = other, t, FIRST_PAUSE  # and try the next size beyond it at once
    else:
        known[NEXT] = t + max(known[PAUSE], SHARE * (t - known[SINCE] - lasts))  # rare jobs make this long
        known[PAUSE], known[MORE] = min(2 * known[PAUSE], MOST_PAUSE), 1 - known[MORE]

"""How large a team is best: measured while it works, since the same bits come from any.

A barrier takes 0.1 us among a few cores that share a cache, and several times as long among cores that do not.  A host may move
the cores of a virtual machine from one to the other.  So the best size depends on the rows, on the machine and on the moment.

Now and then jobs that run the same rows are run for some ms by the size that was best, then by half or twice as many workers.  The
faster size stays.  The first half of each turn does not count: workers that have nothing to do look for work for a while before
they sleep, and slow others down.  Of the rest the fastest window counts, in which nobody lost a core.

Where a step or round takes longer than `LONG_NS`, barriers count for little, and fewer workers are not tried.  What is known of
a job lies in the team's control block; callers that write there at once may spoil a choice, never a result.
"""

from __future__ import annotations

import numpy as np

from calcvm.vm.run.atomics import i64_at
from calcvm.vm.run.job import DEADLINE, N_PACES, PACE, PACE_BYTES, PACES, ROW_BYTES, ROWS, START, UNITS
from calcvm.vm.run.samples import helper

TURN_NS, SHARE = 8_000_000, 64  # a turn lasts so long at least, and a part of 64 of the pause before it
WINDOW_NS, WINDOWS = 500_000, 3  # a window has jobs of so many ns together; a turn has so many windows at least
LONG_NS = 1_000_000  # a step or round is long from here on; a job of a trial is ended then, if it can be
FIRST_PAUSE, MOST_PAUSE = 50_000_000, 2_000_000_000  # ns between trials: twice as long after each that changes nothing
FINE = 256  # parts of a nanosecond, in which steps are measured
BETTER = 64  # a size takes the place of another that takes a part of 64 longer
NEVER = 2**62
# Words of what is known.  OF: which rows; SIZE: what is best; OTHER: what is tried beside it (0: nothing); TURN: 0 while SIZE runs,
# 1 while OTHER does; SINCE: when that began; TOOK, DONE: ns and steps of this window; SEEN: windows of this turn; FASTEST, and after
# it that of OTHER: of a step; NEXT: when the next trial begins; PAUSE: how long after this one; MORE: whether it is one of more workers.
OF, SIZE, OTHER, TURN, SINCE, TOOK, DONE, SEEN, FASTEST, OTHERS_FASTEST, NEXT, PAUSE, MORE, N_WORDS = range(14)


@helper
def pace_of(control, job):
    """Address of what is known of jobs that run the same rows."""
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
    """The best size begins its turn (0), or the other one (1)."""
    known = i64_at(pace)
    known[TURN], known[SINCE], known[TOOK], known[DONE], known[SEEN] = turn, t, 0, 0, 0
    known[FASTEST + turn] = NEVER


@helper
def team_of(pace, job, most, t):
    """The size of the team of a job that begins at ``t``, of at most so many workers."""
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
    """Take note that a job by so many workers took so long, and is over at ``t``."""
    known, units = i64_at(pace), i64_at(job)[UNITS]
    size, other, turn = known[SIZE], known[OTHER], known[TURN]
    if other < 1 or units < 1 or team != (other if turn else size):  # no trial; or another caller had the team
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
        known[SIZE], known[NEXT], known[PAUSE] = other, t, FIRST_PAUSE  # and what lies beyond it at once
    else:
        known[NEXT] = t + max(known[PAUSE], SHARE * (t - known[SINCE] - lasts))  # jobs that come seldom make it long
        known[PAUSE], known[MORE] = min(2 * known[PAUSE], MOST_PAUSE), 1 - known[MORE]

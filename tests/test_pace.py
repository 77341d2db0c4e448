"""The size of a team that is sought while it works (`calcvm.vm.run.pace`)."""

import ctypes
import time

import numpy as np
import pytest
from numba import njit

import calcvm as cv
from calcvm import nn
from calcvm.vm.run import job as J
from calcvm.vm.run import pace, team
from calcvm.vm.run.pace import note, pace_of, team_of

ROWS = 12345


@njit
def work(control, job, words, most, times, idle, t, until):
    """Run jobs of so many ns by size, one after the other, from a time to another; returns that, and how many there were."""
    jobs = 0
    while t < until:
        known = pace_of(control, job)
        size = team_of(known, job, most, t)
        words[J.UNITS] = 1
        t += times[size - 1]
        note(known, job, size, most, t, times[size - 1])
        t += idle
        jobs += 1
    return t, jobs


def paces(control):
    """A row for each job of which something may be known."""
    words = (ctypes.c_int64 * (J.CONTROL_BYTES // 8)).from_address(control)
    return np.ctypeslib.as_array(words)[J.PACES // 8 :].reshape(-1, J.PACE_BYTES // 8)


class Machine:
    """A control block, a job and a clock."""

    def __init__(self, most):
        self.most, self.t = most, 10**12
        self.control, self.job = np.zeros(J.CONTROL_BYTES // 8, np.int64), np.zeros(J.JOB_WORDS, np.int64)
        self.job[J.PACE] = ROWS

    def work(self, times, seconds, idle=0):
        """The size that is best after so many seconds of jobs, and the mean ns of one."""
        before, table = self.t, np.array(times, np.int64)
        until = before + int(1e9 * seconds)
        places = self.control.ctypes.data, self.job.ctypes.data
        self.t, jobs = work(*places, self.job, self.most, table, idle, before, until)
        (known,) = (row for row in paces(self.control.ctypes.data) if row[pace.OF] == ROWS)
        return int(known[pace.SIZE]), (self.t - before) / jobs - idle


def times(most, best):
    """Of each size, falling up to the best and rising from there on."""
    return [int(30_000 * 1.4 ** abs(np.log2(n / best))) for n in range(1, most + 1)]


@pytest.mark.parametrize("most", [2, 3, 4, 6, 8, 16, 56])
def test_the_fastest_size_is_found_and_found_again(most):
    halves = [most >> k for k in range(most.bit_length())]
    for best in halves:
        machine = Machine(most)
        assert machine.work(times(most, best), 1.0)[0] == best
        for other in halves:  # the machine changes
            takes = times(most, other)
            size, _ = machine.work(takes, 20.0)
            assert takes[size - 1] <= 1.2 * min(takes), f"{size} of {most} workers, where {other} are the fastest"


@pytest.mark.parametrize("takes", [[20_000, 11_000], [20_000, 40_000], [300_000, 150_000, 200_000, 400_000]])
@pytest.mark.parametrize("idle", [0, 10_000_000])
def test_trials_take_little_where_nothing_changes(takes, idle):
    machine = Machine(len(takes))
    machine.work(takes, 30.0, idle)
    size, mean = machine.work(takes, 60.0, idle)
    assert takes[size - 1] == min(takes)
    assert mean <= 1.05 * min(takes)


def test_fewer_do_not_run_what_is_long():
    takes = [5_000_000, 4_000_000, 3_000_000, 1_500_000]
    assert Machine(4).work(takes, 10.0) == (4, takes[3])


def test_other_rows_have_a_size_of_their_own():
    machine = Machine(2)
    assert machine.work([20_000, 30_000], 1.0)[0] == 1
    machine.job[J.PACE] += 2
    machine.work([30_000, 20_000], 1.0)
    assert {row[pace.OF]: row[pace.SIZE] for row in paces(machine.control.ctypes.data) if row[pace.OF]} == {
        ROWS: 1,
        ROWS + 2: 2,
    }


def test_rows_of_a_few_numbers_are_run_by_one_worker():
    """Twenty barriers a step, which take longer than all there is to compute."""
    net = nn.Linear(16) >> nn.ReLU() >> nn.Linear(3)
    model = cv.Model(
        net, input_shape=(4,), loss="softmax_cross_entropy", optimizer=cv.SGD(0.1), batch_size=16, workers=2
    )
    model.step(np.ones((16, 4), "f4"), np.zeros(16, int))
    job, ends = model.slot.job, time.monotonic() + 20
    while time.monotonic() < ends:  # while others have the cores nothing is tried
        model.run_steps(3000)
        rows = job[J.ROWS] + job[J.START] * job[J.ROW_BYTES]
        known = [row for row in paces(team.control()) if row[pace.OF] == rows]
        if known and known[0][pace.SIZE] == 1:
            return
    raise AssertionError(f"two workers after 20 s: {known}")

"""A team of workers: threads that wait inside compiled code and run each job together with the caller.

Python's thread pools and Numba's threading layers fork and join for every call (1.8 to 50 us); these
threads spin for a moment, then yield, then sleep, so that a job given to an awake team starts within a
fraction of a microsecond and an idle team costs nothing.

The protocol is in `calcvm.vm.run.loop.run_team`: an exception, which can come between any two of Python's instructions,
finds a job not begun or over.  Here is only the memory that it is about.
"""

from __future__ import annotations

import ctypes
import time

import numpy as np

from calcvm.system import at_fork, has_teams, time_on_cores
from calcvm.vm.program.encoding import aligned
from calcvm.vm.run import job as layout
from calcvm.vm.run.entry import address as address_of
from calcvm.vm.run.entry import entry

_controls: dict[str, int] = {}  # address of this process's control block, from its first job on
at_fork(after_in_child=_controls.clear)  # threads do not survive a fork: a child has a team of its own


def run(code: str, job: np.ndarray, address: int, n_workers: int, team: str = "team") -> None:
    """Run the job at ``address`` by ``code`` with up to ``n_workers`` workers; the result is the same for any team.

    A team that another thread is using leaves the caller to run its job alone.  ``team`` : which of the process's; threads
    of one may run where the thread may that first ran a job by it.
    """
    if not has_teams():
        job[layout.TEAM] = 1
        entry(code)(address, 0)
        return
    job[layout.CODE] = address_of(code)
    entry("run_team")(control(team), address, min(n_workers, layout.MAX_WORKERS))


def control(team: str = "team") -> int:
    """Address of the control block of a team of this process's."""
    found = _controls.get(team)
    return _controls.setdefault(team, _control()) if found is None else found


def _control() -> int:
    """Address of a control block: no worker, no job.  It is never freed, for workers look at it until the process is gone."""
    control = aligned(layout.CONTROL_BYTES).view(np.int64)
    control[layout.SERVE // 8] = address_of("serve")
    ran, waited = time_on_cores()
    if 2 * waited > ran:  # others want the cores: the first jobs find that out without a team
        pause = min(waited, layout.MOST_PENALTY)
        control[layout.FIT // 8], control[layout.CROWDED // 8] = 1, time.monotonic_ns() + pause
        control[layout.CROWDED // 8 + 1] = pause
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(control))
    return control.ctypes.data

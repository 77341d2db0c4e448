"""A team of workers: threads that wait inside compiled code and run each job together with the caller.

Python's thread pools and Numba's threading layers fork and join for every call (1.8 to 50 us).  These threads spin briefly,
then yield, then sleep.  A job for an awake team starts within a fraction of a microsecond, and an idle team costs nothing.

The protocol is in `calcvm.vm.run.loop.run_team`: when an exception comes, between any two Python instructions, a job either has
not begun or is over.  This module allocates the memory, and hands jobs over.

These hold at every moment; `tests/protocol.py` explores all states:

1. Only the caller that holds the busy flag fills an empty box, and only the box's worker empties it.
2. A worker reads a job only while its box holds it, and the call returns when all boxes are empty.  So a job outlives its
   readers.
3. When a job begins, no worker is inside another one or waits at the barrier.  So the barrier's counter is 0.
4. A raised flag (PARKED) is lowered once, and the caller posts one token for each flag that it lowers.  So there is at most one
   token, a running worker has none, and no job lies in the box of a worker that sleeps on.
5. The end of all calls can be reached from every state.

Beside two busy processes per core, a default team takes 0.91 to 1.20 times as long as one worker (`python -m bench busy`, 2
cores of Zen 5), and took up to 13 times as long before teams could shrink.  A prototype that ended the job and began again alone
lost a step each time, all of whose barriers were late.  Two ideas were not built: a worker that takes over shares that others
have not begun (a worker loses its core in the middle of a share), and the system's load average (it covers cores that the
process may not use).
"""

from __future__ import annotations

import ctypes
import time

import numpy as np

from calcvm.system import at_fork, has_teams, time_on_cores
from calcvm.vm.program.encoding import aligned
from calcvm.vm.run import job as J
from calcvm.vm.run.entry import address as address_of
from calcvm.vm.run.entry import entry

_controls: dict[str, int] = {}  # address of this process's control block, since its first job
at_fork(after_in_child=_controls.clear)  # threads do not survive a fork: a child hires a new team


def run(code: str, job: np.ndarray, address: int, n_workers: int, team: str = "team") -> None:
    """Run the job at ``address`` with ``code`` and up to ``n_workers`` workers; the result is the same for any team.

    If another thread is using the team, the caller runs the job alone.  ``team`` : the name of one of the process's teams; its
    threads may run on the cores that were allowed to the first thread that used it.
    """
    if not has_teams():
        job[J.TEAM] = 1
        entry(code)(address, 0)
        return
    job[J.CODE] = address_of(code)
    entry("run_team")(control(team), address, n_workers)


def control(team: str = "team") -> int:
    """Address of the control block of one of this process's teams."""
    found = _controls.get(team)
    return _controls.setdefault(team, _control()) if found is None else found


def _control() -> int:
    """Address of a control block without workers or a job.  It is never freed, since workers poll it until the process ends."""
    control = aligned(J.CONTROL_BYTES).view(np.int64)
    control[J.SERVE // 8] = address_of("serve")
    ran, waited = time_on_cores()
    if 2 * waited > ran:  # the cores are busy: the first jobs run without a team, instead of finding that out
        pause = min(waited, J.MOST_PENALTY)
        control[J.FIT // 8], control[J.CROWDED // 8] = 1, time.monotonic_ns() + pause
        control[J.CROWDED // 8 + 1] = pause
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(control))
    return control.ctypes.data

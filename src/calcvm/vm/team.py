"""A team of workers: threads that wait inside compiled code and run each job together with the caller.

Python's thread pools and Numba's threading layers fork and join for every call (1.8 to 50 us); these
threads spin for a moment, then yield, then sleep, so that a job given to an awake team starts within a
fraction of a microsecond and an idle team costs nothing.
"""

from __future__ import annotations

import os
import threading

import numpy as np

from calcvm.errors import CalcError
from calcvm.vm import job as layout
from calcvm.vm.entry import address as address_of
from calcvm.vm.entry import entry
from calcvm.vm.pieces import aligned

MAX_WORKERS = (layout.CONTROL_BYTES - layout.PARKED) // layout.LINE


class Team:
    """Workers 1, 2, ... of a process; the caller is worker 0."""

    def __init__(self) -> None:
        self._control = aligned(layout.CONTROL_BYTES).view(np.int64)
        self.address = self._control.ctypes.data
        self._wake: list[threading.Semaphore] = [threading.Semaphore(0)]
        self._busy = threading.Lock()
        self._pid = os.getpid()

    def run(self, code: str, job: np.ndarray, address: int, n_workers: int) -> None:
        """Run the job at ``address`` by ``code`` with up to ``n_workers`` workers; the result is the same for any team.

        A team that another thread is using leaves the caller to run its job alone.
        """
        if n_workers > 1 and self._busy.acquire(blocking=False):
            try:
                self._grow(n_workers)
                job[layout.TEAM], job[layout.BARRIER] = n_workers, self.address
                job[layout.CODE] = address_of(code)
                if entry("post")(self.address, address, n_workers):
                    self._rouse(n_workers)
                entry("join")(self.address, address, n_workers)
            finally:
                self._busy.release()
        else:
            job[layout.TEAM] = 1
            entry(code)(address, 0)

    def _rouse(self, n_workers: int) -> None:
        for w in range(1, n_workers):
            word = (layout.PARKED + w * layout.LINE) // 8
            if self._control[word]:
                self._control[word] = 0
                self._wake[w].release()

    def _grow(self, n_workers: int) -> None:
        if n_workers > MAX_WORKERS:
            raise CalcError(f"workers={n_workers}: a team has at most {MAX_WORKERS}")
        for w in range(len(self._wake), n_workers):
            self._wake.append(threading.Semaphore(0))
            seen = int(self._control[layout.SEQ // 8])
            threading.Thread(target=self._work, args=(w, seen), name=f"calcvm-{w}", daemon=True).start()

    def _work(self, worker: int, seen: int) -> None:
        serve = entry("serve")
        while True:
            seen = serve(self.address, worker, seen)
            self._wake[worker].acquire()


_team: Team | None = None


def team() -> Team:
    """The process's team (a forked child gets a new one: threads do not survive a fork)."""
    global _team
    if _team is None or _team._pid != os.getpid():
        _team = Team()
    return _team

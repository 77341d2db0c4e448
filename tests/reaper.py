"""End what a test run has started and left, when it is gone: also where it was killed, and told nobody.

`start` begins a process that waits for the end of the one at hand.  It finds what that has started by a mark in the
environment, which goes on to children of children; and what was forked, whose environment is the parent's, by a list.
Linux alone has what this takes; elsewhere nothing is started.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

MARK = "CALCVM_TEST_RUN"
GRACE = 3.0  # seconds in which it may end by itself
PROC = Path("/proc")


def start() -> None:
    """Watch over this process."""
    if not (PROC / "self" / "environ").exists():
        return
    forked = Path(tempfile.mkdtemp(prefix="calcvm-test-run-"))
    os.environ[MARK] = str(forked)
    os.register_at_fork(after_in_child=lambda: _note(forked))
    command = [sys.executable, "-S", __file__, str(os.getpid()), str(forked)]
    nowhere = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
    os.posix_spawn(sys.executable, command, os.environ, file_actions=nowhere, setsid=True)


def _note(forked: Path) -> None:
    if forked.is_dir():
        (forked / str(os.getpid())).touch()


def wait_and_end(parent: int, forked: Path) -> None:
    command = _read(parent, "cmdline")
    while os.getppid() == parent:
        time.sleep(0.2)
    time.sleep(GRACE)
    while left := [pid for pid in _started(forked, command) if pid != os.getpid()]:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:  # it has ended
                pass
        time.sleep(0.2)
    shutil.rmtree(forked, ignore_errors=True)


def _started(forked: Path, command: bytes) -> list[int]:
    """Processes of the run that are there; ``command`` is its own, which what it forked has, too."""
    pids = [int(path.name) for path in PROC.iterdir() if path.name.isdigit()]
    entry = f"{MARK}={forked}".encode()
    marked = [pid for pid in pids if entry in _read(pid, "environ").split(b"\0")]
    noted = {int(path.name) for path in forked.glob("*")}  # none where the folder was cleared away
    return marked + [pid for pid in noted.intersection(pids) if command and _read(pid, "cmdline") == command]


def is_there(pid: int) -> bool:
    """Whether a process runs: one that has ended, and that nobody has asked for, has no command."""
    return bool(_read(pid, "cmdline"))


def _read(pid: int, name: str) -> bytes:
    """What /proc has of a process: nothing of a dead one, or of somebody else's."""
    try:
        return (PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""


if __name__ == "__main__":
    wait_and_end(int(sys.argv[1]), Path(sys.argv[2]))

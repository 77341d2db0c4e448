"""Features of the operating system that not every system has, and their replacements.

calcvm is tested on Linux, which has all of them.  Elsewhere a program runs with one worker, or an unavailable feature is refused
by name.  Teams need ``sem_init``, pages need ``posix_fadvise``, a `FileStore` needs the locks of ``fcntl``, and running a program
needs a POSIX clock.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

from calcvm.cgroups import cpus, memory
from calcvm.errors import CalcError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
try:
    import resource
except ImportError:
    resource = None  # type: ignore[assignment]

CHUNK = bytes(1 << 20)


# ---------------------------------------------------------------- the system
def has_teams() -> bool:
    """Whether several workers can run a program: their threads sleep on unnamed semaphores, which macOS lacks."""
    return sys.platform.startswith("linux")


def time_on_cores() -> tuple[int, int]:
    """Nanoseconds that this thread ran on a core, and that it waited for one; zeros if the system does not report them."""
    try:
        with open("/proc/thread-self/schedstat") as stat:
            ran, waited, _ = map(int, stat.read().split())
    except (OSError, ValueError):
        return 0, 0
    return ran, waited


def check_runs(what: str, paged: bool) -> None:
    """Refuse to run a program (CalcError) if compiled code would call missing functions of the system."""
    if sys.platform == "win32":
        raise CalcError(
            f"{what}: calcvm plans on Windows but cannot run there, where POSIX's clock is missing: take WSL or Linux"
        )
    if paged and not has_teams():
        raise CalcError(
            f"{what}: pages are written by calls that Linux alone has: plan it without page_bytes= on {sys.platform}"
        )


def interpreter() -> str | None:
    """The Python interpreter to start; None inside a frozen or embedding application, whose executable would start the application."""
    name = os.path.basename(sys.executable or "")
    if os.name != "posix" or getattr(sys, "frozen", False) or not re.fullmatch(r"python[\d.]*t?", name):
        return None
    return sys.executable


def at_fork(
    before: Callable[[], Any] | None = None,
    after_in_parent: Callable[[], Any] | None = None,
    after_in_child: Callable[[], Any] | None = None,
) -> None:
    """Call functions around each fork, if the system has forks."""
    if hasattr(os, "register_at_fork"):
        given = {"before": before, "after_in_parent": after_in_parent, "after_in_child": after_in_child}
        os.register_at_fork(**{when: call for when, call in given.items() if call is not None})  # type: ignore[call-overload]


# ---------------------------------------------------------------- cores
def affinity() -> list[int]:
    """Numbers of the cores on which the thread may run."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]


def set_affinity(cores: Iterable[int]) -> None:
    """Restrict the thread to cores (CalcError: the system cannot)."""
    if not hasattr(os, "sched_setaffinity"):
        raise CalcError(f"cores: {sys.platform} does not keep threads on cores: leave cores= out")
    os.sched_setaffinity(0, cores)


def n_cores() -> int:
    """Cores that the process may use: by its affinity, and by its container's quota, rounded down, but at least one."""
    quota = cpus()
    there = len(affinity())
    return there if quota is None else max(1, min(there, int(quota)))


# ---------------------------------------------------------------- memory
def machine_bytes() -> int:
    """Bytes of the machine's memory, or fewer if the process's address limit or its container's limit is lower."""
    return machine_memory()[0]


def machine_memory() -> tuple[int, str]:
    """The same, and the reason for the limit as text."""
    found = []
    if hasattr(os, "sysconf"):
        found.append(
            (os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "the machine has not so much memory, but {:,}")
        )
    if resource is not None:
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            found.append((limit, "the process's limit of addresses (ulimit -v) is {:,}"))
    room = memory()
    if room is not None:
        text = f"the memory limit of the container is {room.limit:,} bytes ({room.folder}), of which are left {{:,}}"
        found.append((room.left, text))
    there, text = min(found, default=(sys.maxsize, "there are {:,}"))
    return there, text.format(there)


def give_back(array: Any) -> None:
    """Return the memory of an array to the system, if possible; its contents are lost."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    page = mmap.PAGESIZE
    start = -(-array.ctypes.data // page) * page
    size = (array.ctypes.data + array.nbytes - start) // page * page
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


# ---------------------------------------------------------------- files
def lock(file: Any, what: str) -> None:
    """Lock a file until it is closed (BlockingIOError: another process has the lock; CalcError: the system has no locks)."""
    if fcntl is None:
        raise CalcError(
            f"{what}: {sys.platform} has no locks of POSIX, which keep two processes apart: take a MemoryStore, or save models"
        )
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def set_mode(file: Any, mode: int) -> None:
    """Set the permissions of an open file."""
    os.chmod(file.fileno() if os.chmod in os.supports_fd else file.name, mode)


def allocate(file: int, start: int, size: int) -> None:
    """Reserve disk space for bytes of a file (OSError: there is not enough)."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, start, size)
        return
    os.lseek(file, start, os.SEEK_SET)
    while size > 0:
        size -= os.write(file, CHUNK[:size])

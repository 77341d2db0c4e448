"""Work that must not be interrupted: by signals, or by garbage collection."""

from __future__ import annotations

import atexit
import gc
import threading
from _thread import LockType, allocate_lock, start_new_thread
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_running: set[LockType] = set()  # one lock per running thread, held until it ends


def without_signals(make: Callable[[], T]) -> T:
    """Run ``make`` in a separate thread, which receives no signals, and return its result.

    llvmlite frees an LLVM string and records that one statement later; a signal in between would cause a double free by
    a finalizer.  If the caller is interrupted, the thread continues; a later call for the same result waits for its lock.
    """
    if threading.get_ident() != threading.main_thread().ident:
        return make()
    answers: list[T] = []
    errors: list[BaseException] = []
    done = allocate_lock()
    done.acquire()

    def run() -> None:
        _running.add(done)
        try:
            answers.append(make())
        except BaseException as error:
            errors.append(error)
        finally:
            _running.discard(done)
            done.release()

    try:  # one call in C: after an interrupted `threading.Thread.start` it is unknown whether the thread has begun
        start_new_thread(run, ())
    except RuntimeError:  # no more threads: the process is ending, or at its limit
        return make()
    with done:
        if errors:
            raise errors[0]
        return answers[0]


def uncollected(make: Callable[[], T]) -> T:
    """Run ``make`` without garbage collection and return its result: collections take a tenth of a compiler's time.

    This is no context manager: an interrupt between its methods and the block would leave collection disabled.
    """
    collecting = gc.isenabled()
    try:
        if collecting:  # what has not disabled it does not enable it: another thread that has, may end in between
            gc.disable()
        return make()
    finally:
        if collecting:
            gc.enable()


@atexit.register
def _wait() -> None:
    """Wait for running threads: the process must not end in the middle of LLVM."""
    for done in [*_running]:
        done.acquire(timeout=60)

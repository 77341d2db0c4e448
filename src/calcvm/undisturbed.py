"""Work that nothing else may come in the middle of: no signal, no collection of garbage."""

from __future__ import annotations

import atexit
import gc
import threading
from _thread import LockType, allocate_lock, start_new_thread
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_running: set[LockType] = set()  # taken until the thread that is about it ends


def undisturbed(make: Callable[[], T]) -> T:
    """What ``make`` returns, made where no signal is heard: in a thread of its own.

    What a signal raises in the middle of llvmlite may leave a string of LLVM's freed and not marked so, to be freed once
    more by a finalizer.  The thread goes on where the caller is interrupted; who wants the same next waits for its lock.
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

    try:  # one call in C: an interrupted `threading.Thread.start` may leave a thread that has begun and one that has not alike
        start_new_thread(run, ())
    except RuntimeError:  # there can be no more: the process ends, or is full
        return make()
    with done:
        if errors:
            raise errors[0]
        return answers[0]


def uncollected(make: Callable[[], T]) -> T:
    """What ``make`` returns, without collections of garbage: among a compiler's many small objects they take a tenth of its time.

    No context manager: an interrupt between its methods and the block would leave the process without collections.
    """
    collecting = gc.isenabled()
    try:
        gc.disable()
        return make()
    finally:
        if collecting:
            gc.enable()


@atexit.register
def _wait() -> None:
    """Let what is being made be made: the process must not end in the middle of LLVM."""
    for done in [*_running]:
        done.acquire(timeout=60)

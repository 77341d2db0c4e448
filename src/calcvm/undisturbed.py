"""Work that no signal may come in the middle of."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def undisturbed(make: Callable[[], T]) -> T:
    """What ``make`` returns, made where no signal is heard: in a thread of its own.

    What a signal raises in the middle of llvmlite may leave a string of LLVM's freed and not marked so, to be freed once
    more by a finalizer.  The thread goes on where the caller is interrupted; who wants the same next waits for its lock.
    """
    if threading.current_thread() is not threading.main_thread():
        return make()
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(make())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="calcvm compiles")
    try:
        thread.start()
    except RuntimeError:  # there can be no more: the process ends, or is full
        return make()
    thread.join()
    return done.result()

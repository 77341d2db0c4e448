"""An orderly end where the process is asked to end, or the user interrupts."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def orderly_end() -> Iterator[None]:
    """Let SIGTERM end the process as ``sys.exit`` does, so that what is open is written and closed.

    Only where nobody else handles the signal, and on the main thread (others cannot set handlers).
    """
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def kept_interrupts() -> Iterator[Callable[[], None]]:
    """Yields a function that raises `KeyboardInterrupt` where one has come meanwhile.

    Ctrl-C raises it, too, but Python drops what is raised in finalizers and callbacks.
    """
    handler, came = signal.getsignal(signal.SIGINT), False

    def note(number: int, frame: Any) -> None:
        nonlocal came
        came = True
        handler(number, frame)  # type: ignore[misc, operator]

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield check
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, handler)

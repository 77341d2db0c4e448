"""An orderly end where the process is asked to end, or the user interrupts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def orderly_end() -> Iterator[Callable[[], None]]:
    """Let SIGTERM end the process as ``sys.exit`` does, so that what is open is written and closed.

    Yields a function to call now and then: it raises once more what SIGTERM or Ctrl-C has raised, since Python
    drops what is raised in finalizers and callbacks.  Signals that someone else handles are left alone, and all are
    outside the main thread, which alone can handle them.
    """
    came: list[BaseException] = []

    def check() -> None:
        if came:
            raise came[0]

    def end(number: int, frame: Any) -> None:
        came.append(KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number))
        raise came[-1]

    ours = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    if threading.current_thread() is not threading.main_thread():
        ours = {}
    before = {number: handler for number, handler in ours.items() if signal.getsignal(number) is handler}
    try:
        for number in before:
            signal.signal(number, end)
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

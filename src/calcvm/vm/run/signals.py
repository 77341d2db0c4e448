"""An orderly end of the process after SIGTERM or Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

DEFAULTS: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}


class _Context:
    """Exceptions that signals have raised while it is open."""

    def __init__(self) -> None:
        self.came: list[BaseException] = []


# weak, so that an interrupted exit cannot leave a context open; by id, since a WeakSet cannot be iterated while threads add to it
_open: weakref.WeakValueDictionary[int, _Context] = weakref.WeakValueDictionary()


@contextmanager
def orderly_end() -> Iterator[Callable[[], None]]:
    """Make SIGTERM end the process as ``sys.exit`` does, so that open files are written and closed.

    Yields a function to call regularly: it raises the exception from SIGTERM or Ctrl-C again, because Python drops exceptions in
    finalizers and callbacks.  Signals with other handlers are left alone.  Outside the main thread, which alone can handle
    signals, all are.
    """
    context, before = _Context(), {}

    def check() -> None:
        if context.came:
            raise context.came[0]

    if threading.current_thread() is threading.main_thread():
        for number, default in DEFAULTS.items():
            if (handler := signal.getsignal(number)) is default or handler is _end:
                before[number] = handler
    try:
        _open[id(context)] = context
        for number in before:
            signal.signal(number, _end)
        yield check
    finally:
        _open.pop(id(context), None)
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, frame: Any) -> None:
    """Notify all open contexts.  If a signal at a context's end leaves this handler without one, it acts as the default."""
    if number == signal.SIGTERM and not _open:
        signal.signal(number, DEFAULTS[signal.SIGTERM])
        os.kill(os.getpid(), number)
        return
    error = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
    for ref in _open.valuerefs():
        if (context := ref()) is not None:
            context.came.append(error)
    raise error

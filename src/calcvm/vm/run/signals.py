"""An orderly end where the process is asked to end, or the user interrupts."""

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
    """What signals have raised while it is open."""

    def __init__(self) -> None:
        self.came: list[BaseException] = []


# weak: an interrupted end of a context cannot leave one open; by their ids: a WeakSet cannot be gone through while threads add to it
_open: weakref.WeakValueDictionary[int, _Context] = weakref.WeakValueDictionary()


@contextmanager
def orderly_end() -> Iterator[Callable[[], None]]:
    """Let SIGTERM end the process as ``sys.exit`` does, so that what is open is written and closed.

    Yields a function to call now and then: it raises once more what SIGTERM or Ctrl-C has raised, since Python
    drops what is raised in finalizers and callbacks.  Signals that someone else handles are left alone, and all are
    outside the main thread, which alone can handle them.
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
    """Tell all open contexts.  A signal that comes at a context's end may leave this where none is open: as the default."""
    if number == signal.SIGTERM and not _open:
        signal.signal(number, DEFAULTS[signal.SIGTERM])
        os.kill(os.getpid(), number)
        return
    error = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
    for ref in _open.valuerefs():
        if (context := ref()) is not None:
            context.came.append(error)
    raise error

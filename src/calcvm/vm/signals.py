"""An orderly end where the process is asked to end."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


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

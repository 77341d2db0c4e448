"""A helper process: a Python that serves one module of calcvm, and may be killed at any moment.

It receives lines of JSON on its standard input and answers on its standard output.  It imports its module without calcvm's public
names, which would take half of its start.  It runs in its own session, so that Ctrl-C in the terminal reaches the caller only.
When the caller ends, the helper reads the end of its input and ends too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from calcvm.system import interpreter

START = """
import importlib, json, sys, types
sys.path[:] = json.loads(sys.argv[2])
calcvm = sys.modules["calcvm"] = types.ModuleType("calcvm")
calcvm.__path__ = [sys.argv[1]]
importlib.import_module(sys.argv[3]).serve(*sys.argv[4:])
"""


class HelperProcess:
    """A process in which ``module.serve(*arguments)`` runs.

    before : Python statements that the process runs first.  errors : where its messages go, as for `subprocess.Popen`.

    Raises
    ------
    OSError : no process can be started.
    """

    def __init__(self, module: str, *arguments: str, before: str = "", errors: int = subprocess.DEVNULL):
        python = interpreter()
        if python is None:
            raise OSError("it runs in a separate process, and there is no Python to start in this application")
        self.process = subprocess.Popen(
            [python, "-I", "-c", before + START, str(Path(__file__).parent), json.dumps(sys.path), module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        self._dropped = weakref.finalize(self, _end, self.process)  # if an interrupt prevents `end`
        self._dropped.atexit = False

    def say(self, what: Any) -> None:
        """Send a line (`OSError`: the process has ended)."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what).encode() + b"\n")
        self.process.stdin.flush()

    def fileno(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def read(self) -> bytes:
        """New output; empty if the process has ended."""
        return os.read(self.fileno(), 1 << 20)

    def end(self) -> None:
        _end(self.process)
        self._dropped.detach()


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with suppress(OSError):  # unread input
                pipe.close()

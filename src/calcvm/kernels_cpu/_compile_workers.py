"""Compiling several functions at a time, in separate processes.

A worker is a Python process that imports only the kernels, receives symbols, and answers with object files.  It writes
no files, so it can be killed at any moment.  Its failures (no Python to start, an error, a warning) are not
reported: the process that needs the function then compiles it as usual, and sees them.

With an empty cache, the first step of 784-64-64-10 comes after 4.2 s instead of 7.8 (2 cores, Zen 4).
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable
from importlib import import_module
from typing import Any

from calcvm.helper_process import HelperProcess
from calcvm.kernels_cpu import _native
from calcvm.kernels_cpu._native import Modules, ObjectCode
from calcvm.kernels_cpu._target import host
from calcvm.system import interpreter, n_cores
from calcvm.without_signals import without_signals

WARM = (
    16  # from this many functions on workers pay if Numba is already imported here, because each must import it first
)
DEPTH = 2  # symbols queued at a worker, so that it never waits for the next
# the slowest to compile
DEAR = ("softmax_cross_entropy_fwd", "gemm", "slice_fwd", "slice_bwd", "transpose_fwd", "transpose_bwd")
PATIENCE = 120.0  # seconds without any answer, after which workers are given up
# Numba looks for SciPy's BLAS; without it a worker starts in half the time
BEFORE = 'import gc, sys\ngc.disable()\nsys.modules["scipy"] = None\n'


def compile_ahead(wanted: dict[str, tuple[Modules, ...]], here: Callable[[], Any]) -> None:
    """Compile functions in several processes if that is faster; `_native.address` links them.

    wanted : by symbol, the modules that each may come from.
    here : compiles in this process meanwhile.
    """
    number = min(n_cores(), len(wanted) // 2)
    if number < 2 or interpreter() is None or ("numba" in sys.modules and len(wanted) < WARM):
        return
    workers = Workers(number)
    try:
        without_signals(lambda: workers.make(wanted, here))
    except BaseException:
        workers.stopped = True  # takes effect before the next worker starts, or at the next poll
        raise


class Workers:
    """Processes that compile while `make` runs."""

    def __init__(self, number: int):
        self.number, self.stopped = number, False
        self.team: list[Worker] = []

    def make(self, wanted: dict[str, tuple[Modules, ...]], here: Callable[[], Any]) -> None:
        with _native._LOCK:
            try:
                self._make({symbol: p for symbol, p in wanted.items() if not _native.is_there(symbol, p)}, here)
            except (OSError, ValueError, KeyError):  # a worker cannot start, has ended, or answers nonsense
                pass
            finally:
                for worker in self.team:
                    worker.end()

    def _make(self, wanted: dict[str, tuple[Modules, ...]], here: Callable[[], Any]) -> None:
        left = deque(sorted(wanted, key=_rank))
        places, heard = dict(wanted), time.monotonic()
        with selectors.DefaultSelector() as selector:
            for _ in range(self.number):
                if self.stopped:
                    return
                worker = Worker()
                self.team.append(worker)
                worker.say({"target": repr(host())})
                selector.register(worker, selectors.EVENT_READ, worker)
                self._ask(worker, left, places)
            here()
            while any(worker.asked for worker in self.team) and not self.stopped:
                for key, _ in selector.select(0.05):
                    worker, heard = key.data, time.monotonic()
                    if not (data := worker.read()):  # it has ended
                        selector.unregister(worker)
                        worker.asked, worker.there = set(), False
                        continue
                    for symbol, made in worker.understand(data):
                        for need, modules in _native.accept(symbol, made).items() if made else ():
                            if need not in places and not _native.is_there(need, (modules,)):
                                places[need] = (modules,)
                                left.appendleft(need)
                    for other in sorted(self.team, key=lambda worker: len(worker.asked)):
                        self._ask(other, left, places)
                if time.monotonic() - heard > PATIENCE:
                    return

    @staticmethod
    def _ask(worker: Worker, left: deque[str], places: dict[str, tuple[Modules, ...]]) -> None:
        while left and worker.there and len(worker.asked) < DEPTH:
            symbol = left.popleft()
            worker.ask(symbol, places[symbol])


def _rank(symbol: str) -> int:
    name = symbol.removeprefix("calcvm_").rsplit("_", 2)[0]
    return DEAR.index(name) if name in DEAR else len(DEAR)


class Worker(HelperProcess):
    """A process that compiles."""

    def __init__(self) -> None:
        super().__init__("calcvm.kernels_cpu._compile_workers", before=BEFORE)
        self.asked: set[str] = set()
        self.there = True
        self.heard = b""

    def ask(self, symbol: str, places: tuple[Modules, ...]) -> None:
        self.asked.add(symbol)
        self.say([symbol, places, [str(_native.folder(modules, host())) for modules in places]])

    def understand(self, data: bytes) -> list[tuple[str, ObjectCode | None]]:
        """The answers contained in its output so far."""
        self.heard += data
        found: list[tuple[str, ObjectCode | None]] = []
        while b"\n" in self.heard:
            head, _, rest = self.heard.partition(b"\n")
            answer = json.loads(head)
            if len(rest) < answer["bytes"]:
                break
            code, self.heard = rest[: answer["bytes"]], rest[answer["bytes"] :]
            self.asked.discard(answer["symbol"])
            needs = {need: tuple(of) for need, of in answer["needs"].items()}
            found.append((answer["symbol"], ObjectCode(tuple(answer["modules"]), code, needs) if code else None))
        return found


# ---------------------------------------------------------------- in the worker
def serve() -> None:
    """Answer requests until the parent process is gone."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else may be written between the answers
    given = json.loads(sys.stdin.buffer.readline())
    if given["target"] != repr(host()):
        return
    import_module("calcvm.kernels_cpu._common")
    gc.freeze()  # the imports stay
    gc.enable()
    for question in sys.stdin.buffer:
        symbol, places, folders = json.loads(question)
        made = _made(symbol, tuple(map(tuple, places)), folders)
        head = {"symbol": symbol, "modules": made.modules, "needs": made.needs, "bytes": len(made.code)}
        answers.write(json.dumps(head).encode() + b"\n" + made.code)
        answers.flush()


def _made(symbol: str, places: tuple[Modules, ...], folders: list[str]) -> ObjectCode:
    """A compiled function; without code if compiling failed or warned, or if sources have changed since."""
    nothing = ObjectCode((), b"", {})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            for device in {module for modules in places for module in modules[1:]}:
                import_module(f"calcvm.{device}")
            entry_room = import_module(
                "calcvm.vm.run.entry" if places[0][0].startswith("vm.") else "calcvm.kernels_cpu"
            )
            made: ObjectCode = entry_room._build(symbol, places, host())
        except Exception:
            return nothing
    same = str(_native.folder(made.modules, host())) in folders
    return made if same and not told else nothing

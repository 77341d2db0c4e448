"""Compiling in processes of its own, several functions at a time.

A builder is a Python that imports the kernels alone, is asked for symbols, and answers with object files; it writes
nothing, so that it can be killed at any moment.  What goes wrong there (no Python to start, an error, a warning) is
not told of: who wants the function compiles it as ever, and sees it.

The first step of 784-64-64-10 with an empty cache comes after 4.2 s instead of 7.8 (2 cores, Zen 4).
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import subprocess
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable
from importlib import import_module
from typing import Any

from calcvm.kernels_cpu import _native
from calcvm.kernels_cpu._native import Compiled, Modules
from calcvm.kernels_cpu._target import host
from calcvm.system import interpreter, n_cores
from calcvm.undisturbed import undisturbed

WARM = 16  # functions from which builders pay where Numba is imported already: they import it first
DEPTH = 2  # symbols that a builder has been asked for: it never waits for the next
# what takes longest
DEAR = ("softmax_cross_entropy_fwd", "gemm", "slice_fwd", "slice_bwd", "transpose_fwd", "transpose_bwd")
PATIENCE = 120.0  # seconds without any answer, then builders are given up
# calcvm without its public names, and Numba without SciPy, whose BLAS it looks for: half the time of a builder's start
START = """
import gc, json, sys, types
gc.disable()
sys.path[:] = json.loads(sys.argv[2])
sys.modules["scipy"] = None
calcvm = sys.modules["calcvm"] = types.ModuleType("calcvm")
calcvm.__path__ = [sys.argv[1]]
import calcvm.kernels_cpu._aside
calcvm.kernels_cpu._aside.serve()
"""


def compile_ahead(wanted: dict[str, tuple[Modules, ...]], here: Callable[[], Any]) -> None:
    """Compile functions, where that is faster than one after the other; `_native.address` links them.

    wanted : the modules that each may come from, by symbol.
    here : compiles in this process meanwhile.
    """
    number = min(n_cores(), len(wanted) // 2)
    command = interpreter()
    if number < 2 or command is None or ("numba" in sys.modules and len(wanted) < WARM):
        return
    builders = Builders(command, number)
    try:
        undisturbed(lambda: builders.make(wanted, here))
    except BaseException:
        builders.stopped = True  # as soon as they are asked for, or at the next look
        raise


class Builders:
    """Processes that compile, as long as `make` runs."""

    def __init__(self, command: str, number: int):
        self.command, self.number, self.stopped = command, number, False
        self.team: list[Builder] = []

    def make(self, wanted: dict[str, tuple[Modules, ...]], here: Callable[[], Any]) -> None:
        with _native._LOCK:
            try:
                self._make({symbol: p for symbol, p in wanted.items() if not _native.is_there(symbol, p)}, here)
            except (OSError, ValueError, KeyError):  # a builder cannot be started, is gone, or is none
                pass
            finally:
                for builder in self.team:
                    builder.end()

    def _make(self, wanted: dict[str, tuple[Modules, ...]], here: Callable[[], Any]) -> None:
        left = deque(sorted(wanted, key=_rank))
        places, heard = dict(wanted), time.monotonic()
        with selectors.DefaultSelector() as selector:
            for _ in range(self.number):
                if self.stopped:
                    return
                builder = Builder(self.command)
                self.team.append(builder)
                builder.say({"target": repr(host())})
                selector.register(builder.answers, selectors.EVENT_READ, builder)
                self._ask(builder, left, places)
            here()
            while any(builder.asked for builder in self.team) and not self.stopped:
                for key, _ in selector.select(0.05):
                    builder, heard = key.data, time.monotonic()
                    if not (data := os.read(key.fd, 1 << 20)):  # it has ended
                        selector.unregister(builder.answers)
                        builder.asked, builder.there = set(), False
                        continue
                    for symbol, made in builder.understand(data):
                        for need, modules in _native.accept(symbol, made).items() if made else ():
                            if need not in places and not _native.is_there(need, (modules,)):
                                places[need] = (modules,)
                                left.appendleft(need)
                    for other in sorted(self.team, key=lambda builder: len(builder.asked)):
                        self._ask(other, left, places)
                if time.monotonic() - heard > PATIENCE:
                    return

    @staticmethod
    def _ask(builder: Builder, left: deque[str], places: dict[str, tuple[Modules, ...]]) -> None:
        while left and builder.there and len(builder.asked) < DEPTH:
            symbol = left.popleft()
            builder.ask(symbol, places[symbol])


def _rank(symbol: str) -> int:
    name = symbol.removeprefix("calcvm_").rsplit("_", 2)[0]
    return DEAR.index(name) if name in DEAR else len(DEAR)


class Builder:
    """One process, in a session of its own: Ctrl-C in the terminal is for the process that waits for it."""

    def __init__(self, command: str):
        self.process = subprocess.Popen(
            [command, "-I", "-c", START, str(_native.PACKAGE), json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self.process.stdin and self.process.stdout
        self.questions, self.answers = self.process.stdin, self.process.stdout
        self.asked: set[str] = set()
        self.there = True
        self.heard = b""

    def say(self, question: Any) -> None:
        self.questions.write(json.dumps(question).encode() + b"\n")
        self.questions.flush()

    def ask(self, symbol: str, places: tuple[Modules, ...]) -> None:
        self.asked.add(symbol)
        self.say([symbol, places, [str(_native.folder(modules, host())) for modules in places]])

    def understand(self, data: bytes) -> list[tuple[str, Compiled | None]]:
        """What it has answered."""
        self.heard += data
        found: list[tuple[str, Compiled | None]] = []
        while b"\n" in self.heard:
            head, _, rest = self.heard.partition(b"\n")
            answer = json.loads(head)
            if len(rest) < answer["bytes"]:
                break
            code, self.heard = rest[: answer["bytes"]], rest[answer["bytes"] :]
            self.asked.discard(answer["symbol"])
            needs = {need: tuple(of) for need, of in answer["needs"].items()}
            found.append((answer["symbol"], Compiled(tuple(answer["modules"]), code, needs) if code else None))
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.questions, self.answers):
            try:
                pipe.close()
            except OSError:  # what it was told last and has not read
                pass


# ---------------------------------------------------------------- in the builder
def serve() -> None:
    """Answer what is asked for, until the asker is gone."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else may get among the answers
    given = json.loads(sys.stdin.buffer.readline())
    if given["target"] != repr(host()):
        return
    import_module("calcvm.kernels_cpu._common")
    gc.freeze()  # what is imported stays
    gc.enable()
    for question in sys.stdin.buffer:
        symbol, places, folders = json.loads(question)
        made = _made(symbol, tuple(map(tuple, places)), folders)
        head = {"symbol": symbol, "modules": made.modules, "needs": made.needs, "bytes": len(made.code)}
        answers.write(json.dumps(head).encode() + b"\n" + made.code)
        answers.flush()


def _made(symbol: str, places: tuple[Modules, ...], folders: list[str]) -> Compiled:
    """A function, compiled; without code where there is anything to be told, or sources have changed since."""
    nothing = Compiled((), b"", {})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            for device in {module for modules in places for module in modules[1:]}:
                import_module(f"calcvm.{device}")
            builder = import_module("calcvm.vm.run.entry" if places[0][0].startswith("vm.") else "calcvm.kernels_cpu")
            made: Compiled = builder._build(symbol, places, host())
        except Exception:
            return nothing
    same = str(_native.folder(made.modules, host())) in folders
    return made if same and not told else nothing

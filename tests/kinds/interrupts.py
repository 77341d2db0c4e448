"""Exceptions at the n-th step of a call, signals as the interpreter delivers them and memory that cannot be had; models to try it on."""

from __future__ import annotations

import ctypes
import gc
import logging
import signal
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

import calcvm as cv
from calcvm import nn
from calcvm.errors import PlanError
from calcvm.vm.memory.turns import unlocked
from calcvm.vm.run import signals

RETURN, C_CALL = 3, 4
ALLOCATE = ("zeros", "empty", "array", "asarray", "ascontiguousarray", "fromiter", "full", "ones")


SAMPLE = 12  # steps of each call in `make test`
MOST = 200  # evenly spread steps in the whole, of calls that have very many and of further kinds of the same calls
RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((24, 4)).astype("f4"), RNG.integers(0, 3, 24)
B = X[:8], Y[:8]
NET = nn.Linear(6) >> nn.Tanh() >> nn.Dropout(0.2) >> nn.Linear(3)
ADDING_NET = nn.Linear(6) >> nn.Tanh() >> nn.Linear(3)


class Terminated(BaseException):
    """What SIGTERM raises here."""


def _terminate(*_: Any) -> None:
    raise Terminated


@cache
def _profiler() -> tuple[Any, np.ndarray]:
    """A native profile function, and its state: events to come, the signal (0: none).

    It only counts, and at the last event does what a signal does; Python's own handler then runs where the
    interpreter looks for signals next, and nowhere else.  (What a trace function written in Python raises, comes
    where no signal can: between a lock and its block.)
    """
    from numba import cfunc, types

    from calcvm.vm.run.atomics import i64_at

    state = np.zeros(2, np.int64)
    address = state.ctypes.data
    trip = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(
        ctypes.cast(ctypes.pythonapi.PyErr_SetInterruptEx, ctypes.c_void_p).value
    )

    @cfunc(types.int32(types.intp, types.intp, types.int32, types.intp))
    def profile(_, frame, what, arg):
        words = i64_at(address)
        if what != RETURN and what != C_CALL:  # after a return the interpreter does not look
            words[0] -= 1
            if words[0] == 0 and words[1] != 0:
                trip(words[1])
        return 0

    return profile, state


def steps_of(act: Callable[[], Any]) -> int:
    """At how many steps of a call a signal can come."""
    _, left = interrupted(act, 0, 0)
    return -left


def interrupted(act: Callable[[], Any], n: int, number: int = signal.SIGINT) -> tuple[BaseException | None, int]:
    """Call ``act``, with a signal at its n-th step; what it raised, and how many steps were left.

    SIGTERM raises `Terminated`, which fleets and searches take for the process's default: there it is a SystemExit.
    """
    profile, state = _profiler()
    set_profile = ctypes.pythonapi.PyEval_SetProfile
    set_profile.argtypes = [ctypes.c_void_p, ctypes.py_object]
    raised: BaseException | None = None
    state[:] = n, number
    default, signals.DEFAULTS[signal.SIGTERM] = signals.DEFAULTS[signal.SIGTERM], _terminate
    handler = signal.signal(signal.SIGTERM, _terminate)
    often = gc.get_threshold()
    gc.set_threshold(0)  # what is collected meanwhile would be steps too
    try:
        try:
            try:
                set_profile(profile.address, None)
                act()
            finally:
                set_profile(None, None)
        finally:  # where the signal came in that call, too
            gc.set_threshold(*often)
            while logging._lock._is_owned():  # type: ignore[attr-defined]
                logging._lock.release()  # type: ignore[attr-defined] (a signal came in it: others could not fork any more)
            signals.DEFAULTS[signal.SIGTERM] = default
            signal.signal(signal.SIGTERM, handler)
    except (KeyboardInterrupt, SystemExit, Terminated) as error:
        raised = error
    assert gc.isenabled(), f"nothing is collected any more after an interrupt at step {n}"
    return raised, int(state[0])


def starved(act: Callable[[], Any], n: int, monkeypatch: Any) -> tuple[BaseException | None, int]:
    """Call ``act``, where the n-th array cannot be had; what it raised, and how many were to come."""
    left, raised = n, None

    def failing(function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise MemoryError("no more")
            return function(*args, **options)

        return call

    with monkeypatch.context() as patch:
        for name in ALLOCATE:
            patch.setattr(np, name, failing(getattr(np, name)))
        try:
            act()
        except (MemoryError, PlanError) as error:  # PlanError: of a heap's memory
            raised = error
    return raised, left


def chosen(total: int, whole: bool, seed: Any, sample: int = SAMPLE, most: int | None = None) -> Sequence[int]:
    """Steps of a call: all of them, or at most ``most`` evenly spread ones; a sample in `make test`."""
    if whole and most is not None and total > most:
        return np.linspace(1, total, most).astype(int).tolist()
    if whole or total <= sample:
        return range(1, total + 1)
    return sorted((np.random.default_rng(seed).choice(total, sample, replace=False) + 1).tolist())


# ---------------------------------------------------------------- callbacks
class Failed(Exception):
    """What a callback raises."""


class Hook:
    """What callbacks call: raises at the n-th time."""

    def __init__(self) -> None:
        self.calls, self.at = 0, 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise Failed


class HookedStore(cv.MemoryStore):
    """A user's store, which calls a hook before and after all that it does."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.persistent, self.hook = persistent, Hook()


def _hooked(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        self.hook()
        answer = getattr(cv.MemoryStore, name)(self, *args)
        self.hook()
        return answer

    return method


for _name in ("put", "get", "__contains__", "names", "remove", "put_program", "get_program"):
    setattr(HookedStore, _name, _hooked(_name))


# ---------------------------------------------------------------- a heap and its models
@cache
def program_of(accumulate: bool = False, workers: int = 1) -> cv.Program:
    net = ADDING_NET if accumulate else NET
    graph = cv.build_graph(net, (4,), "softmax_cross_entropy", cv.Adam(0.02))
    return cv.compile(graph, batch_size=8, workers=workers, accumulate=accumulate)


@cache
def streaming_program(workers: int = 1) -> cv.Program:
    """The network, and a path of tokens with two states that only a whole step moves on together."""
    graph = cv.build_graph(NET, (4,), "softmax_cross_entropy", cv.Adam(0.02))
    token = graph.placeholder("token", (None,), "int64")
    h, n = graph.carry("h", (None, 6), init="ones"), graph.carry("n", (None, 6))
    words, U, V = (graph.parameter(name, shape) for name, shape in (("words", (5, 6)), ("U", (6, 6)), ("V", (6, 5))))
    with graph.path("stream") as stream:
        new = cv.carry(h, cv.tanh(cv.embedding(token, words) + h @ U))
        stream.output = (new + 0.1 * cv.carry(n, n + new)) @ V
    return cv.compile(graph, batch_size=8, workers=workers)


class World:
    """A heap with room for one (or more) of its models: the one that is used and one that must stay as it is."""

    def __init__(
        self, room: int = 1, store: Any = None, accumulate: bool = False, workers: int = 1, streams: bool = False
    ) -> None:
        self.program = streaming_program(workers) if streams else program_of(accumulate, workers)
        self.heap = cv.CalcHeap(room * -(-self.program.heap_bytes // 64) * 64, store)
        self.model = self.heap.create(self.program, seed=1, name="model")
        self.other = self.heap.create(self.program, seed=2, name="other")
        if accumulate:
            self.model.learning_batch = 24
        self.model.step(*B)
        self.other.step(*B)
        if streams:
            self.one, self.pair = self.model.stream(place=3), self.model.stream(batch=2, place=4)
            for token in (1, 2):
                self.one(token)
                self.pair([token, 0])
            self.other.stream()(1)
        self.fleet: cv.Fleet | None = None
        self.untouched = self.contents("other")
        self.threads = set(threading.enumerate())  # of other libraries, too, which other tests have started

    def fleets(self) -> World:
        self.fleet = cv.Fleet(2 * self.program.heap_bytes + 128, workers=1)
        for i in range(3):
            self.fleet.add(self.program, data=(X, Y), seed=i, name=f"f{i}")
        return self

    def contents(self, model: str = "model") -> tuple[bytes, dict[str, Any]]:
        """All that a model is: its image, with gradients where they add up, and its facts."""
        resident = self.heap[model]
        with resident:
            loaded = resident.loaded
            span = loaded.opened if loaded.accumulating else loaded.image
            start, stop = (i - loaded.opened[0] for i in span)
            facts = {k: v for k, v in resident.facts.items() if k != "open"}
            return resident.image()[start:stop].tobytes(), facts

    def sound(self) -> None:
        """What holds after whatever came: nothing is locked, all pieces are there, the other model is what it was."""
        for resident in (self.heap[name] for name in self.heap.names):
            assert unlocked(resident.record.turn.lock) and unlocked(resident.record.training.lock)
        assert unlocked(self.heap._lock)
        free = self.heap.free_bytes
        slots = list(self.heap._slots)
        assert free + sum(f.stop - f.start for f in slots) == self.heap.nbytes
        assert all(f.record is not None and f.record.slot is f for f in slots)
        assert self.contents("other") == self.untouched
        assert set(threading.enumerate()) <= self.threads

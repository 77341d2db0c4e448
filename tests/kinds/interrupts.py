"""Exceptions at the n-th step of a call: signals as the interpreter delivers them, and memory that cannot be had."""

from __future__ import annotations

import ctypes
import gc
import signal
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from calcvm.errors import PlanError

RETURN, C_CALL = 3, 4
ALLOCATE = ("zeros", "empty", "array", "asarray", "ascontiguousarray", "fromiter", "full", "ones")


class Terminated(BaseException):
    """What SIGTERM raises here."""


@cache
def _profiler() -> tuple[Any, np.ndarray]:
    """A native profile function, and its state: events to come, the signal (0: none).

    It only counts, and at the last event does what a signal does; Python's own handler then runs where the
    interpreter looks for signals next, and nowhere else.  (What a trace function written in Python raises, comes
    where no signal can: between a lock and its block.)
    """
    from numba import cfunc, types

    from calcvm.vm.atomics import i64_at

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
    """Call ``act``, with a signal at its n-th step; what it raised, and how many steps were left."""
    profile, state = _profiler()
    set_profile = ctypes.pythonapi.PyEval_SetProfile
    set_profile.argtypes = [ctypes.c_void_p, ctypes.py_object]
    raised: BaseException | None = None
    state[:] = n, number
    gc.disable()  # what is collected meanwhile would be steps too
    try:
        try:
            set_profile(profile.address, None)
            act()
        finally:
            set_profile(None, None)
    except (KeyboardInterrupt, Terminated) as error:
        raised = error
    gc.enable()
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

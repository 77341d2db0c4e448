"""What the tests of threads and processes share: models, threads that begin at once, children."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from contextlib import contextmanager

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn

N_THREADS = 8
RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((96, 5)).astype("f4"), RNG.integers(0, 3, 96)


@pytest.fixture(autouse=True)
def impatient():
    """Threads are exchanged as often as can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def network(**options):
    net = nn.Linear(16) >> nn.Tanh() >> nn.Dropout(0.3) >> nn.Linear(3)
    options = {"batch_size": 16, "workers": 1, **options}
    return cv.Model(net, input_shape=(5,), optimizer=cv.Adam(1e-2), **options)


def counter(heap=None, name=None):
    """A model whose w falls by 1 with each step, so that the order of steps does not matter."""
    g = cv.CalcGraph()
    x, w = g.placeholder("x", (None, 1)), g.parameter("w", (1, 1), init=cv.init.Zeros())
    with g.path("learn", backward=True) as learn:
        learn.minimize(cv.mean(cv.matmul(x, w)), optimizer=cv.SGD(1.0))
    program = cv.compile(g, batch_size=2, workers=1)
    return (heap or cv.CalcHeap(program.heap_bytes)).create(program, name=name)


ONE = np.ones((2, 1), "f4")


def counting_program(accumulate=True):
    """As `counter`'s, of a `Model`: its weight falls by 1 with each update, however many samples that is made from."""
    net = nn.Linear(1, bias=False, init=cv.init.Zeros())
    graph = cv.build_graph(net, (1,), lambda y, target: cv.mean(y - target), cv.SGD(1.0))
    return cv.compile(graph, batch_size=2, workers=1, accumulate=accumulate)


def at_once(*works, limit=60):
    """Run functions in a thread each; what they return, or raised first."""
    start, out = threading.Barrier(len(works)), [None] * len(works)

    def run(i, work):
        start.wait()
        try:
            out[i] = work()
        except BaseException as error:
            out[i] = error

    threads = [threading.Thread(target=run, args=(i, work), daemon=True) for i, work in enumerate(works)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(limit)
    hung = [sys._current_frames()[t.ident] for t in threads if t.is_alive()]
    assert not hung, "".join(f"waits:\n{''.join(traceback.format_stack(f))}" for f in hung)
    return out


@contextmanager
def pausing(function, pause, line=None):
    """In this thread ``pause()`` is called at a line of a function, or (None) where it returns, each time."""
    code = function.__code__

    def within(frame, event, arg):
        if (event == "return") if line is None else (event == "line" and frame.f_lineno == line):
            pause()
        return within

    sys.settrace(lambda frame, event, arg: within if frame.f_code is code else None)
    try:
        yield
    finally:
        sys.settrace(None)


def lines_of(function):
    """Numbers of a function's lines."""
    return sorted({line for *_, line in function.__code__.co_lines() if line} - {function.__code__.co_firstlineno})


def fine(out):
    for result in out:
        if isinstance(result, BaseException):
            raise result
    return out


def in_child(work):
    """What a forked child says of ``work``: its answer, or its error."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)  # a child that hangs ends, with no answer
        try:
            answer = f"{work()}"
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(write, answer.encode()[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        answer = file.read()
    os.waitpid(pid, 0)
    return answer


def trained(model):
    return model.fit(X, Y, epochs=3, progress=False)["loss"]


def fresh():
    return trained(network())

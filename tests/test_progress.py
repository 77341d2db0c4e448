"""What long work shows: how much of it, where, and that nothing that becomes of it ends the work."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn, progress

X = np.random.default_rng(0).standard_normal((64, 4)).astype("float32")
Y = np.arange(64) % 3


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_left", (-np.inf, None))


@cache
def program() -> cv.Program:
    return cv.compile(graph(), batch_size=16, workers=1)


def graph() -> cv.CalcGraph:
    return cv.build_graph(nn.Linear(8) >> nn.ReLU() >> nn.Linear(3), (4,), "softmax_cross_entropy", cv.SGD(0.1))


# ---------------------------------------------------------------- works, and outputs that fail
def fit() -> bool:
    return len(cv.CalcHeap("1 MiB").create(program()).fit(X, Y, epochs=3)) == 3


def stream() -> bool:
    model = cv.CalcHeap("1 MiB").create(program())
    return len(model.fit(((X[:16], Y[:16]) for _ in range(12)), epochs=3, steps_per_epoch=4)) == 3


def fleet() -> bool:
    many = cv.Fleet("1 MiB", workers=1)
    for seed in range(3):
        many.add(program(), data=(X, Y), seed=seed)
    return [handle.epochs_done for handle in many.fit(2)] == [2, 2, 2]


def explore() -> bool:
    pytest.importorskip("optuna")
    found = cv.explore(
        lambda trial: cv.build_graph(nn.Linear(3), (4,), "softmax_cross_entropy", cv.SGD(trial["rate"])),
        {"rate": (0.01, 0.1)}, data=(X, Y), n_trials=3, epochs=1, sampler="random",
    )  # fmt: skip
    return len(found.trials) == 3


def solvers() -> bool:
    tell = progress.Solving()
    for i in range(5):
        tell(0.1 * i, 0.2 - 0.01 * i, 0.1)
        tell._next = 0.0  # as if time had passed
    tell.close()
    return True


WORKS = [fit, stream, fleet, explore, solvers]


class Stream:
    """A stream, of which ``at`` fails: from the start, or after ``after`` calls of it."""

    encoding = "utf-8"

    def __init__(self, at: str, error: BaseException, terminal: bool, after: int = 0):
        self.at, self.error, self.terminal, self.left = at, error, terminal, after

    def _call(self, what: str) -> None:
        if what == self.at:
            self.left -= 1
            if self.left < 0:
                raise self.error

    def write(self, text: str) -> int:
        self._call("write")
        return len(text)

    def flush(self) -> None:
        self._call("flush")

    def isatty(self) -> bool:
        self._call("isatty")
        return self.terminal

    def fileno(self) -> int:
        self._call("fileno")
        raise io.UnsupportedOperation("fileno")


class Bare:
    """Neither a terminal nor anything else is known of it."""

    def write(self, text: str) -> None:
        pass


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


def closed_pipe() -> io.TextIOWrapper:
    r, w = os.pipe()
    os.close(r)
    return os.fdopen(w, "w")


ERRORS = (
    BrokenPipeError(32, "Broken pipe"),
    OSError(28, "No space left on device"),
    OSError(5, "Input/output error"),
    BlockingIOError(11, "Resource temporarily unavailable"),
    ValueError("I/O operation on closed file"),
    UnicodeEncodeError("ascii", "x", 0, 1, "ordinal not in range(128)"),
    RuntimeError("of another library"),
    AttributeError("write"),
)
OUTPUTS: dict[str, Callable[[], object]] = {
    "None": lambda: None,
    "object": object,
    "bare": Bare,
    "closed": closed,
    "closed pipe": closed_pipe,
    "full disk": lambda: open("/dev/full", "w"),
    "ascii": lambda: io.TextIOWrapper(io.BytesIO(), encoding="ascii"),
    "bytes": io.BytesIO,
    **{
        f"{at} {type(error).__name__} {error.args[0]} {'terminal' if terminal else 'file'} after {after}": (
            lambda at=at, error=error, terminal=terminal, after=after: Stream(at, error, terminal, after)
        )
        for at in ("isatty", "write", "flush", "fileno")
        for error in ERRORS
        for terminal in (False, True)
        for after in (0, 1, 2, 5)
    },
}


def cases(whole: bool) -> Iterator[tuple[str, Callable[[], bool]]]:
    names = [*OUTPUTS] if whole else [*[*OUTPUTS][:8], *[*OUTPUTS][8::7]]
    for i, name in enumerate(names):
        yield from ((name, work) for work in (WORKS if whole else [WORKS[i % len(WORKS)]]))


def test_no_output_ends_any_work(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, n = [], 0
    monkeypatch.setattr(progress, "SECONDS", 0.0)  # every line is written
    threads = []
    monkeypatch.setattr(threading, "excepthook", threads.append)  # rich has a thread of its own
    keep = []  # streams that cannot be flushed when they go
    for name, work in cases(whole):
        keep.append(OUTPUTS[name]())
        with monkeypatch.context() as changed:
            changed.setattr(sys, "stderr", keep[-1])
            try:
                right = work()
            except BaseException as error:
                wrong.append(f"{name}, {work.__name__}: {type(error).__name__}: {error}")
                right = True
            if sys.stderr is not keep[-1]:
                wrong.append(f"{name}, {work.__name__}: sys.stderr is left as {sys.stderr!r}")
        n += 1
        assert right
    for stream in keep:
        if isinstance(stream, io.TextIOWrapper):
            try:
                stream.close()
            except OSError:
                pass
    assert not wrong and not threads, "\n".join([*wrong, *map(str, threads)])
    print(f"{n} works with outputs that fail")


def test_bars_of_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a bar of the user's, and by several threads at once."""
    rich = pytest.importorskip("rich.progress")
    terminal = Stream("nothing", OSError(), True)
    monkeypatch.setattr(sys, "stderr", terminal)
    for _ in rich.track(range(3), console=rich.Progress().console):
        assert fit()
    done: list[bool] = []
    threads = [threading.Thread(target=lambda: done.append(fit())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [True] * 4 and sys.stderr is terminal


def test_ctrl_c_is_heard_in_an_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", Stream("write", KeyboardInterrupt(), False, 1))
    model = cv.CalcHeap("1 MiB").create(program())
    callbacks = [lambda *_: time.sleep(0.3)]  # so that lines are due
    assert model.fit(X, Y, epochs=9, callbacks=callbacks).stopped == "interrupted"


# ---------------------------------------------------------------- how much
def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def test_a_line_at_the_end_of_short_work(capsys: pytest.CaptureFixture[str]) -> None:
    model = cv.CalcHeap("1 MiB").create(program())
    model.fit(X, Y, epochs=500, validation=(X, Y))
    (line,) = lines_of(capsys)
    assert re.fullmatch(
        r"epoch 500/500  loss 0\.\d{4}  val_loss 0\.\d{4}  val_accuracy [01]\.\d{4}  [\d.]+ (us|ms|s)", line
    )


@pytest.mark.parametrize("work", [fit, stream, fleet, explore])
def test_a_loop_of_short_works_says_no_more_than_one(
    work: Callable[[], bool], capsys: pytest.CaptureFixture[str]
) -> None:
    since = time.perf_counter()
    for _ in range(5):
        work()
    assert 1 <= len(lines_of(capsys)) <= 1 + (time.perf_counter() - since) / progress.SECONDS


def test_lines_are_two_seconds_apart(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    report = progress.Epochs(10**6, 100)
    for epoch in range(7):  # of 1.5 s, in 100 steps
        for step in range(100):
            now[0] += 0.015
            report.step(epoch, step + 1, 0.5)
        report.epoch(epoch, {"loss": 0.25, "val_loss": 1.5e-7})
    report.close()
    report.close()
    monkeypatch.undo()
    said = lines_of(capsys)
    assert said[-1] == "epoch       7/1000000  loss 0.2500  val_loss 1.500e-07  10.5 s"
    at = [float(line.split()[-2]) for line in said]
    assert len(at) == 5 and all(2 <= later - at[i] < 2.3 for i, later in enumerate(at[1:])), said


def test_who_wants_nothing_gets_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    model = cv.CalcHeap("1 MiB").create(program())
    model.fit(X, Y, epochs=3, progress=False)
    assert lines_of(capsys) == []


# ---------------------------------------------------------------- terminals
TERMINAL = """
import sys, numpy as np, calcvm as cv
from calcvm import nn
{before}
X = np.zeros((64, 4), "float32")
model = cv.Model(nn.Linear(1), input_shape=(4,), loss="mse", optimizer=cv.SGD(0.1), batch_size=16)
model.fit(X, X[:, :1], epochs=500, callbacks=[lambda m, epoch, f: print("from a callback") if epoch == 9 else None])
for _ in range(50):
    model.fit(X, X[:, :1])
"""


def terminal(before: str = "", stdout: bool = True) -> str:
    """What a terminal shows of trainings, which is its stderr and perhaps its stdout."""
    master, slave = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", TERMINAL.format(before=before)], stdin=slave, stderr=slave,
        stdout=slave if stdout else subprocess.DEVNULL, env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )  # fmt: skip
    os.close(slave)
    shown = b""
    try:
        while part := os.read(master, 1 << 16):
            shown += part
    except OSError:  # of a terminal that nobody has any more
        pass
    os.close(master)
    assert child.wait() == 0, shown
    return shown.decode()


def test_a_terminal_gets_a_bar() -> None:
    pytest.importorskip("rich")
    shown = terminal()
    assert "epoch 500/500" in shown and "\u2501" in shown
    assert shown.count("from a callback") == 1
    assert shown.count("epoch 1/1") <= 2  # of 50
    assert "from a callback" not in terminal(stdout=False)  # stdout is where it was sent


def test_a_terminal_without_rich_gets_lines() -> None:
    shown = terminal("sys.modules['rich.console'] = sys.modules['rich'] = None")
    assert re.fullmatch(r"from a callback\r\nepoch 500/500  loss [\d.]+  [\d.]+ m?s\r\n", shown)

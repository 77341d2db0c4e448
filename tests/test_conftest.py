"""What the tests stand on: none waits for ever, nothing that they started outlives them, signals are heard."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import reaper

ROOT = Path(__file__).parent.parent
IGNORING = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, "-m", "pytest", "-q", *sys.argv[1:]])
"""
HEAD = "import ctypes, os, subprocess, sys, threading, time, pytest\n"


def begin(*arguments):
    """A run of tests whose caller ignores SIGINT and SIGTERM."""
    command = [sys.executable, "-c", IGNORING, *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def of(tmp_path, text, *options):
    """The same of the tests in ``text``."""
    (tmp_path / "test_it.py").write_text(HEAD + text)
    return begin(
        "-p",
        "tests.conftest",
        f"--config-file={ROOT / 'pyproject.toml'}",
        f"--rootdir={tmp_path}",
        str(tmp_path),
        *options,
    )


def ended(run, seconds=120):
    """What a run has printed; it has to end by itself."""
    try:
        return run.communicate(timeout=seconds)[0]
    finally:
        run.kill()
        run.communicate()


LIMIT = "@pytest.mark.time_limit(2)\n"
HANGS = {  # what hangs: tests, options
    "code that keeps Python's lock": (LIMIT + "def test(): ctypes.PyDLL(None).sleep(1000)",),
    "a test that swallows what ends it": (
        LIMIT
        + """
def test():
    while True:
        try:
            time.sleep(1000)
        except BaseException:
            pass
""",
    ),
    "a fixture": ("@pytest.fixture\ndef f():\n    yield\n    time.sleep(1000)\n\n" + LIMIT + "def test(f): pass",),
    "a module": ("time.sleep(1000)", "--time-limit=10"),
    "a process that others share tests out to": (
        LIMIT + "def test(): time.sleep(1000)",
        *("-p", "no:benchmark", "--numprocesses=1", "--max-worker-restart=0"),
    ),
    "a thread that is left": (
        "def test(): threading.Thread(target=lambda: time.sleep(1000)).start()",
        "--time-limit=10",
    ),
}


def test_what_hangs_is_ended_and_shown(tmp_path):
    runs = {}
    for what, (text, *options) in HANGS.items():
        (tmp_path / what).mkdir()
        runs[what] = of(tmp_path / what, text, *options)
    for what, run in runs.items():
        told = ended(run)
        assert run.returncode == 1 and "Timeout (0:00:" in told and "test_it.py" in told, (what, told)


STARTS = """
def test():
    if not (forked := os.fork()):
        time.sleep(1000)
        os._exit(0)
    started = subprocess.Popen([sys.executable, "-c", 'import os, time; print(os.fork(), flush=True); time.sleep(1000)'],
                               start_new_session=True, stdout=subprocess.PIPE)
    child = int(started.stdout.readline())
    with open(os.path.join(os.path.dirname(__file__), "pids"), "w") as file:
        print(forked, started.pid, child, file=file, flush=True)
    time.sleep(1000)
"""


def test_a_run_that_is_ended_leaves_no_process(tmp_path):
    runs = {}
    for end in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        (folder := tmp_path / end.name).mkdir()
        runs[end] = of(folder, STARTS), folder / "pids"
    for end, (run, pids) in runs.items():
        wait_until(lambda pids=pids: pids.exists() and pids.read_text().endswith("\n"))
        run.send_signal(end)
        run.wait(timeout=120)
        assert run.returncode == (2 if end == signal.SIGINT else -end)
        run.stdout.close()
    started = [int(pid) for _, pids in runs.values() for pid in pids.read_text().split()]
    assert len(started) == 9
    wait_until(lambda: not any(map(reaper.is_there, started)))


def wait_until(holds, seconds=120):
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.1)


def test_tests_that_interrupt_themselves_pass_where_the_caller_ignores_signals():
    pytest.importorskip("optuna")
    run = begin("tests/test_explore.py", "-k", "ctrl_c_that_python_drops or any_moment and 0.2")
    told = ended(run, 200)
    assert run.returncode == 0 and "2 passed" in told, told

"""An orderly end: signals are heard wherever they come, also after one that came at the end of another context."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys

import numpy as np
import pytest

from calcvm.vm.run import signals
from calcvm.vm.run.signals import orderly_end


@pytest.mark.parametrize("left", [signal.default_int_handler, signals._end], ids=["as ever", "left by another end"])
def test_what_python_drops_is_raised_once_more(left):
    signal.signal(signal.SIGINT, left)
    with pytest.raises(KeyboardInterrupt), orderly_end() as check:
        check()
        with contextlib.suppress(KeyboardInterrupt):  # as in a finalizer
            signal.raise_signal(signal.SIGINT)
        check()
    assert signal.getsignal(signal.SIGINT) is left and not signals._open


def test_contexts_within_each_other_all_hear():
    with orderly_end() as outer:
        with contextlib.suppress(KeyboardInterrupt), orderly_end():
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            outer()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_of_others_are_left_alone():
    heard = []
    signal.signal(signal.SIGINT, lambda *_: heard.append(1))
    with orderly_end() as check:
        signal.raise_signal(signal.SIGINT)
        check()
    assert heard == [1]


def test_a_handler_that_was_left_ends_the_process_as_the_default_does():
    code = "import signal; from calcvm.vm.run import signals; signal.signal(15, signals._end); signal.raise_signal(15); print('on')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGTERM and not done.stdout


@pytest.fixture(autouse=True)
def handlers():
    """The defaults, whatever an earlier test has left; afterwards as they were."""
    before = {number: signal.getsignal(number) for number in signals.DEFAULTS}
    for number, default in signals.DEFAULTS.items():
        signal.signal(number, default)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


INSIDE_LLVM = """
import gc, os, signal
from llvmlite.binding import ffi
dispose, came = ffi.lib.LLVMPY_DisposeString, []

class Disposing:  # Ctrl-C comes when LLVM has freed a string, and llvmlite has not yet marked it so
    def __call__(self, *a):
        dispose(*a)
        if not came:
            came.append(1)
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):
                pass

ffi.lib._fntab["LLVMPY_DisposeString"] = Disposing()
import numpy as np
import calcvm as cv
from calcvm import nn

def step():
    model = cv.Model(nn.Linear(3), input_shape=(4,), optimizer="adam", batch_size=8)
    return model.step(np.zeros((8, 4)), np.zeros(8))

try:
    step()
    raise SystemExit("no interrupt")
except KeyboardInterrupt as error:
    kept = error
del kept
gc.collect()
texts = [b"x" * k for k in range(2000)]
gc.collect()
print(step())
"""


def test_ctrl_c_in_the_middle_of_linking_leaves_memory_whole():
    """Red before: free(): double free detected, since llvmlite's finalizer freed the string once more."""
    run = subprocess.run([sys.executable, "-c", INSIDE_LLVM], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) == pytest.approx(np.log(3))

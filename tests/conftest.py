"""What all tests share: a time limit, samples of long suites, one thread for the peers' libraries, where a GPU is."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from functools import cache
from typing import TextIO

import pytest

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # idle threads of other libraries would spin against ours
os.environ.setdefault("MPLBACKEND", "Agg")
SIMULATOR = "CALCVM_CUDA_SIMULATOR"
STDERR = pytest.StashKey[TextIO]()
TIME_LIMIT = 300.0  # seconds of a test, unless it is marked time_limit
WHOLE_TIME_LIMIT = 3600.0  # of one that runs the whole of a suite


# ---------------------------------------------------------------- long suites, and no test for ever
@pytest.fixture
def whole(request: pytest.FixtureRequest) -> bool:
    """Whether the test runs all that it has (--whole), not a sample."""
    return bool(request.config.getoption("--whole"))


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.fdopen(os.dup(2), "w")  # here pytest does not capture


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """End the process where a test takes too long: by a thread of C, which needs neither signals nor Python's lock."""
    mark = item.get_closest_marker("time_limit")
    limit = WHOLE_TIME_LIMIT if item.config.getoption("--whole") else mark.args[0] if mark else TIME_LIMIT
    faulthandler.dump_traceback_later(limit, exit=True, file=item.config.stash[STDERR])
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


# ---------------------------------------------------------------- tests that need a GPU
def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="run all of the suites of which `make test` has a sample")
    parser.addoption("--gpu", action="store_true", help="there must be a GPU: none, or a skipped test, is a failure")


def pytest_sessionstart(session: pytest.Session) -> None:
    if not session.config.getoption("--gpu"):
        return
    missing = f"{SIMULATOR} is set: what it simulates is none" if simulated() else no_gpu()
    if missing:
        pytest.exit(f"no GPU to test on: {missing}", returncode=2)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests marked gpu unless they are asked for; what is asked for and cannot run is skipped, and says why."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    if not config.getoption("--gpu") and "gpu" not in config.option.markexpr:
        config.hook.pytest_deselected(items=on_gpu)
        items[:] = [item for item in items if item not in on_gpu]
    elif not simulated() and no_gpu():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {no_gpu()}"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With --gpu, what was skipped has not passed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.getoption("--gpu") and reporter and reporter.stats.get("skipped") and not session.exitstatus:
        reporter.write_line("--gpu: tests were skipped, which is no pass", red=True)
        session.exitstatus = 1


def simulated() -> bool:
    """Whether the device "cuda" is asked to be a simulated one: tests of few values can be tried out on it."""
    return os.environ.get(SIMULATOR) == "1"


@cache
def no_gpu() -> str:
    """What is missing for the device "cuda" (nothing: an empty text)."""
    from calcvm.errors import DeviceError, MissingExtra

    try:
        import calcvm.kernels_cuda._cuda  # noqa: F401
        from calcvm.vm.cuda.driver import Driver

        Driver.open().close()
    except (DeviceError, MissingExtra) as error:
        return str(error)
    return ""

"""What all tests share: time limits, signals, samples of long suites, one thread for the peers' libraries, a GPU."""

from __future__ import annotations

import faulthandler
import gc
import os
import shutil
import signal
from collections.abc import Generator, Iterable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import TextIO

import pytest

from tests import reaper

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # idle threads of other libraries would spin against ours
os.environ.setdefault(
    "CALCVM_WORKERS", str(1 << 10)
)  # which caps our default teams no more: they are tested at all cores
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("KERAS_BACKEND", "torch")
SIMULATOR = "CALCVM_CUDA_SIMULATOR"
STDERR = pytest.StashKey[TextIO]()
TIME_LIMIT, WHOLE_TIME_LIMIT = 300.0, 3600.0  # seconds of a test, or of one that runs the whole of a suite
ENDING_TIME_LIMIT = 60.0  # of what the process does after its last test
ENOUGH = 600.0  # that solvers of small problems may take, which need seconds: what they answer depends on no clock


# ---------------------------------------------------------------- long suites
@pytest.fixture(scope="session")
def whole(pytestconfig: pytest.Config) -> bool:
    """Whether the test runs all that it has (--whole), not a sample."""
    return bool(pytestconfig.getoption("--whole"))


def whole_of(metafunc: pytest.Metafunc) -> bool:
    """The same for a test's parameters."""
    metafunc.function.has_sample = True
    return bool(metafunc.config.getoption("--whole"))


def has_sample(item: pytest.Item) -> bool:
    """Whether `make test` runs less of a test than --whole."""
    return "whole" in getattr(item, "fixturenames", ()) or getattr(getattr(item, "function", None), "has_sample", False)


def by_turns(metafunc: pytest.Metafunc, n: int, **values: Iterable[object]) -> None:
    """Parametrize a test by an n-th of all combinations, in which each value is met; with --whole by all.

    Those whose places in their lists add up to a multiple of ``n``.
    """
    every = product(*map(enumerate, values.values()))
    whole = whole_of(metafunc)
    some = [[value for _, value in places] for places in every if whole or sum(i for i, _ in places) % n == 0]
    metafunc.parametrize(tuple(values), some)


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What a test declares is gone after it."""
    from calcvm import kernels_cpu, kernels_cuda
    from calcvm.formulas import declare
    from calcvm.kernels_cpu._common import KERNELS
    from calcvm.ops import spec

    kernels_cpu.load()  # or those that the test is the first to import would be gone too
    tables = (
        spec.OPS,
        spec.ROWS,
        KERNELS,
        kernels_cuda.kernels(),
        declare.ELEMENTWISE,
        declare.PAIR_LOSSES,
        declare.UPDATES,
    )
    before, own = [dict(known) for known in tables], set(spec.OWN)
    yield
    for known, then in zip(tables, before):
        known.clear()
        known.update(then)
    spec.OWN.intersection_update(own)


@pytest.fixture
def package(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the package that may be edited; its test's module has a function ``forget`` of what is known of the sources."""
    from calcvm.kernels_cpu import _native

    copy = tmp_path / "sources" / "calcvm"
    shutil.copytree(_native.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(_native, "PACKAGE", copy)
    request.module.forget()
    yield copy
    request.module.forget()


# ---------------------------------------------------------------- nothing for ever
def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.fdopen(os.dup(2), "w")  # here pytest does not capture
    # What started us may ignore or block signals (a shell does for its background jobs), which children inherit.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    reaper.start()


def end_after(seconds: float, config: pytest.Config) -> None:
    """End the process, telling what its threads do, unless this is called again: a thread of C does, without a signal."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=config.stash[STDERR])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Without collections of garbage: a third of its time went there, and modules and tests stay."""
    limit = session.config.getoption("--time-limit")  # of a test, where others run them: they end themselves
    end_after(WHOLE_TIME_LIMIT if shares_out(session.config) else limit, session.config)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    mark = item.get_closest_marker("time_limit")
    limit = mark.args[0] if mark else item.config.getoption("--time-limit")
    end_after(WHOLE_TIME_LIMIT if item.config.getoption("--whole") else limit, item.config)


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    # threads that are left and finalizers may wait for ever, too
    end_after(min(ENDING_TIME_LIMIT, config.getoption("--time-limit")), config)


# ---------------------------------------------------------------- several processes
def shares_out(config: pytest.Config) -> bool:
    """Whether others run the tests for this process (pytest-xdist)."""
    return bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """No collection of garbage looks again at what a file's tests leave, such as compiled code: a tenth of all time went there."""
    assert gc.isenabled(), "garbage is not collected any more: this test has disabled it"
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


# ---------------------------------------------------------------- tests that need a GPU
def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--time-limit", type=float, default=TIME_LIMIT, help="seconds of a test that is not marked time_limit"
    )
    parser.addoption("--whole", action="store_true", help="run all of the suites of which `make test` has a sample")
    parser.addoption("--sampled", action="store_true", help="run only tests of which `make test` has a sample")
    parser.addoption("--gpu", action="store_true", help="there must be a GPU: none, or a skipped test, is a failure")


def pytest_sessionstart(session: pytest.Session) -> None:
    if not session.config.getoption("--gpu"):
        return
    missing = f"{SIMULATOR} is set: what it simulates is none" if simulated() else no_gpu()
    if missing:
        pytest.exit(f"no GPU to test on: {missing}", returncode=2)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests without a sample, if asked to, and tests marked gpu, unless asked for them.

    A test that is asked for and cannot run is skipped with the reason.
    """
    if config.getoption("--sampled"):
        config.hook.pytest_deselected(items=[item for item in items if not has_sample(item)])
        items[:] = filter(has_sample, items)
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
        from calcvm.vm.run.cuda.driver import Driver

        Driver.open().close()
    except (DeviceError, MissingExtra) as error:
        return str(error)
    return ""

"""What all tests share: one thread for the peers' libraries; tests that need a GPU run where there is one."""

from __future__ import annotations

import os
from functools import cache

import pytest

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # idle threads of other libraries would spin against ours
os.environ.setdefault("MPLBACKEND", "Agg")
SIMULATOR = "CALCVM_CUDA_SIMULATOR"


# ---------------------------------------------------------------- tests that need a GPU
def pytest_addoption(parser: pytest.Parser) -> None:
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

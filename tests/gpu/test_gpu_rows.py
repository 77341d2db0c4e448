"""Every operator of the table by its compiled CUDA kernels on a GPU: right, and the same bits however it is shared."""

from __future__ import annotations

import pytest

pytest.importorskip("numba_cuda", reason="the extra cuda is not installed")

from calcvm.ops import OPS  # noqa: E402
from tests import rowrun  # noqa: E402
from tests.rowrun import Case, cases, close, same_bits  # noqa: E402

pytestmark = pytest.mark.gpu
NAMES = sorted(OPS)
DIFFERENTIABLE = [n for n in NAMES if OPS[n].differentiable and OPS[n].category != "optimizer"]
BENCHED = [n for n in NAMES if any(e.bench for e in OPS[n].examples)]
SMALL_BLOCKS = 64  # threads of a fleet's block


@pytest.fixture(scope="module")
def backends():
    """By the threads of a block: 0 stands for the device's own."""
    from tests.gpu.device_rows import DeviceRows

    made = {0: DeviceRows()}
    made[SMALL_BLOCKS] = DeviceRows(SMALL_BLOCKS if made[0].device.compiled else made[0].device.fleet_threads)
    return made


@pytest.fixture(autouse=True)
def on_device(backends, monkeypatch):
    monkeypatch.setattr(rowrun, "backend", backends[0])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", NAMES)
def test_forward(name, dtype):
    for case in cases(OPS[name], dtype):
        rowrun.check_forward(case)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients(name):
    for case in cases(OPS[name], "float64"):
        rowrun.check_gradients(case)
    for case in cases(OPS[name], "float32"):
        rowrun.check_gradients_float32(case)


@pytest.mark.parametrize("check", ["workers", "in_place", "accumulation"])
@pytest.mark.parametrize("name", NAMES)
def test_declared(name, check):
    """Twice by each of several numbers of blocks: the same bits."""
    rowrun.CHECKS[check](cases(OPS[name], "float32"))


@pytest.mark.parametrize("name", NAMES)
def test_the_threads_of_a_block_do_not_change_a_bit(name, backends, monkeypatch):
    for case in cases(OPS[name], "float32"):
        outcomes = []
        for backend in backends.values():
            monkeypatch.setattr(rowrun, "backend", backend)
            outcomes.append([rowrun._run(case, row, values, n_workers=3) for row, values in rowrun._row_runs(case)])
        for row, one, other in zip([*case.spec.fwd, *case.spec.bwd], *outcomes):
            for value in one:
                assert same_bits(one[value], other[value]), f"{row.name}: {value} differs"


@pytest.mark.parametrize("name", BENCHED)
def test_the_sizes_that_benchmarks_take(name, backends, monkeypatch):
    """Against the CPU's kernels: rows long enough for many tiles and blocks."""
    for example in OPS[name].examples:
        if not example.bench:
            continue
        case = Case(OPS[name], example, "float32", example.batch)
        outcomes = []
        for backend in (rowrun.Cpu(), backends[0]):
            monkeypatch.setattr(rowrun, "backend", backend)
            values = case.forward(
                n_workers=1 if isinstance(backend, rowrun.Cpu) else backends[0].driver.multiprocessors
            )
            outcomes.append(values)
        want, got = outcomes
        for value in OPS[name].outputs:
            close(got[value].astype("float64"), want[value], 1e-4, f"{name}.{value}")


@pytest.mark.parametrize("name", [n for n in NAMES if any(None in s for e in OPS[n].examples for s in e.shapes)])
def test_empty_batch(name):
    for example in OPS[name].examples:
        if not example.bench and any(None in s for s in example.shapes):
            case = Case(OPS[name], example, "float32", 0)
            values = case.forward(n_workers=2)
            if OPS[name].differentiable:
                case.backward(values | case.output_gradients(), n_workers=2)

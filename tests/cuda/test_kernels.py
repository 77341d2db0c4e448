"""Every operator of the table by its CUDA kernels, in the simulator: the same checks as the CPU's kernels pass."""

from __future__ import annotations

import pytest

from calcvm.ops import OPS
from tests import rowrun
from tests.cuda.simulated import Simulated
from tests.rowrun import CHECKS, Case, cases

NAMES = sorted(OPS)
DIFFERENTIABLE = [n for n in NAMES if OPS[n].differentiable and OPS[n].category != "optimizer"]


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    monkeypatch.setattr(rowrun, "backend", Simulated(4))


@pytest.mark.parametrize("name", NAMES)
def test_complete(name):
    rowrun.check_names(OPS[name])


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", NAMES)
def test_declared(name, check):
    CHECKS[check](cases(OPS[name], "float32"))


@pytest.mark.parametrize("name", NAMES)
def test_forward(name, monkeypatch):
    """All examples again, with several warps to a block."""
    monkeypatch.setattr(rowrun, "backend", Simulated(16))
    for dtype in ("float32", "float64"):
        for case in cases(OPS[name], dtype):
            rowrun.check_forward(case)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients(name, monkeypatch):
    monkeypatch.setattr(rowrun, "backend", Simulated(16))
    for case in cases(OPS[name], "float64"):
        rowrun.check_gradients(case)
    for case in cases(OPS[name], "float32"):
        rowrun.check_gradients_float32(case)


@pytest.mark.parametrize("name", [n for n in NAMES if any(None in s for e in OPS[n].examples for s in e.shapes)])
def test_empty_batch(name):
    for example in OPS[name].examples:
        if not example.bench and any(None in s for s in example.shapes):
            case = Case(OPS[name], example, "float32", 0)
            values = case.forward(n_workers=2)
            if OPS[name].differentiable:
                case.backward(values | case.output_gradients(), n_workers=2)

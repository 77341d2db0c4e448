"""Every operator of the table by its CUDA kernels, in the simulator: the same checks as the CPU's kernels pass."""

from __future__ import annotations

import pytest

from calcvm.ops import OPS
from tests import rowrun
from tests.conftest import by_turns
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


def some(name, dtype, whole, turn=0):
    """The cases of an operator; of those for images, which have many and large ones, every eighth, with --whole all."""
    found = [*cases(OPS[name], dtype)]
    return found if whole or not OPS[name].layouts else found[turn % min(8, len(found)) :: 8]


def pytest_generate_tests(metafunc):
    """Every sixth check of each operator, and every sixth operator by each check, unless --whole: the CPU's pass them all."""
    if metafunc.function is test_declared:
        by_turns(metafunc, 6, name=NAMES, check=CHECKS)


def test_declared(name, check, whole):
    CHECKS[check](some(name, "float32", whole, [*CHECKS].index(check)))


@pytest.mark.parametrize("name", [n for n in NAMES if any(row.takes for row in OPS[n].rows)])
def test_epilogues(name, whole):
    for case in some(name, "float32", whole):
        rowrun.check_epilogues(case)


@pytest.mark.parametrize("name", NAMES)
def test_forward(name, monkeypatch, whole):
    """The examples again, with several warps to a block."""
    monkeypatch.setattr(rowrun, "backend", Simulated(16))
    for turn, dtype in enumerate(("float32", "float64")):
        for case in some(name, dtype, whole, turn):
            rowrun.check_forward(case)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients(name, monkeypatch, whole):
    """In float64 beside slopes, in float32 beside those; unless --whole by turns."""
    monkeypatch.setattr(rowrun, "backend", Simulated(16))
    turn = DIFFERENTIABLE.index(name) % 2
    if whole or turn == 0:
        for case in some(name, "float64", whole, 2):
            rowrun.check_gradients(case)
    if whole or turn == 1:
        for case in some(name, "float32", whole, 1):
            rowrun.check_gradients_float32(case)


@pytest.mark.parametrize("name", [n for n in NAMES if any(None in s for e in OPS[n].examples for s in e.shapes)])
def test_empty_batch(name):
    for example in OPS[name].examples:
        if not example.bench and any(None in s for s in example.shapes):
            case = Case(OPS[name], example, "float32", 0)
            values = case.forward(n_workers=2)
            if OPS[name].differentiable:
                case.backward(values | case.output_gradients(), n_workers=2)

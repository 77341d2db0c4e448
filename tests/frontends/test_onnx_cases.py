"""ONNX's own suite of cases: what passes, what docs/onnx.md says of it, and gradients beside differences."""

from __future__ import annotations

import warnings

import pytest

from tests.conftest import whole_of
from tests.frontends import onnx_cases
from tests.frontends.onnx_cases import LEFT, PAGE, TARGET, cases, official, slopes, target

pytestmark = pytest.mark.filterwarnings("ignore")  # onnx's own, where it makes the cases
BITS, TENTHS = 6, 10  # BitCast has no counterpart
ROUNDING = ("test_dft_inverse", "test_dft_inverse_opset19")  # expected numbers of 2e-7, which are 0
PARTS = ["conv", "gemm", "reduce_sum", "attention_4d", "lstm", "gather", "resize", "pool", "split", "softmax"]


def left():
    return {line.partition(": ")[0] for line in LEFT.read_text().splitlines()}


def pytest_generate_tests(metafunc):
    if "part" in metafunc.fixturenames:
        metafunc.parametrize("part", [""] if whole_of(metafunc) else PARTS)
    if "tenth" in metafunc.fixturenames:
        metafunc.parametrize("tenth", range(TENTHS) if whole_of(metafunc) else [0])


@pytest.mark.time_limit(900)
def test_the_suite_by_its_own_runner(part):
    """All kinds: what fails is what the list says."""
    found = {name: why for of in official(part).values() for name, why in of.items()}
    assert len(found) > (2000 if not part else 5)
    failed = {name for name, why in found.items() if why}
    assert failed == left() & {*found}


def test_target_cases():
    """Of the cases that are static, and of floats, int32, int64 and bool, all pass but those of two kinds."""
    if not TARGET.exists():
        pytest.skip("the list of target cases is not here")
    missing = {*target()} & left()
    assert missing == {name for name in missing if "bitcast" in name} | {*ROUNDING}
    assert len([name for name in missing if "bitcast" in name]) == BITS


@pytest.mark.time_limit(900)
def test_gradients_of_cases(tenth):
    """Along random directions, in float64."""
    checked = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k, (name, op, case) in enumerate(cases()):
            if k % TENTHS != tenth or not op or name in left():
                continue
            for ours, differences in slopes(case) or ():
                assert ours == pytest.approx(differences, rel=1e-5, abs=1e-5), name
                checked += 1
    assert checked > 100


def test_the_page_is_up_to_date():
    """The table of docs/onnx.md has the counts of the list."""
    counts = {}
    for name, op, _ in cases():
        if op and "expanded" not in name:
            passed, of = counts.get(op, (0, 0))
            counts[op] = passed + (name not in left()), of + 1
    table = PAGE.read_text().partition(onnx_cases.BEGIN)[2]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| ")
    ][1:]
    assert {row[0]: (int(row[1]), int(row[2])) for row in rows} == counts

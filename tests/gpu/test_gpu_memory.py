"""Memory on a GPU is what the plan says, to the byte; and the errors of what does not fit or cannot be computed."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra cuda is not installed")

import calcvm as cv  # noqa: E402
from calcvm.vm.memory import base_model  # noqa: E402
from calcvm.vm.run.cuda.device import cuda  # noqa: E402
from tests.gpu.on_gpu import BATCH, MODES, SIZES, compiled, data, fleet_of, model_of, network  # noqa: E402

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]


def held() -> int:
    gc.collect()
    return cuda().allocated_bytes


# ---------------------------------------------------------------- bytes
@pytest.mark.parametrize("mode", MODES)
def test_the_plan_says_what_is_allocated(mode):
    X, y = data(BATCH)
    before = held()
    model = cv.Model(
        network(), input_shape=(SIZES[0],), optimizer=cv.Adam(1e-3), batch_size=BATCH, device="cuda", **MODES[mode]
    )
    for _ in range(3):
        model.step(X, y)
    plan = model.plan
    of_its_own = plan.device_total - plan.device_bytes["process"]  # which was taken when the device was opened
    assert held() - before == of_its_own, plan.device_bytes
    model.run_steps(5)
    model.step(X[: BATCH // 2], y[: BATCH // 2])  # a smaller batch has rows of its own, for which there is room
    assert held() - before == of_its_own, plan.device_bytes
    del model
    assert held() == before, "not all was given back"


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_allocated_after_the_first_step(mode):
    X, y = data(BATCH)
    model = model_of(compiled("cuda", **MODES[mode]))
    model.step(X, y)
    before = cuda().allocations
    for _ in range(5):
        model.step(X, y)
    model.run_steps(10)
    assert cuda().allocations == before


def test_nothing_is_allocated_after_the_first_epoch():
    X, y = data()
    model = model_of(compiled("cuda", **MODES["all blocks"]))
    model.fit(X, y, epochs=1, progress=False)
    before, bytes_before = cuda().allocations, held()
    model.fit(X, y, epochs=5, progress=False)
    assert (cuda().allocations, held()) == (before, bytes_before)


def test_a_fleet_allocates_nothing_after_its_first_epoch():
    fleet = fleet_of(compiled("cuda", mode="fleet"), seeds=range(5))
    fleet.fit(1, progress=False)
    before = cuda().allocations
    fleet.fit(3, progress=False)
    assert cuda().allocations == before


def test_a_heap_that_is_closed_gives_its_memory_back():
    before = held()
    heap = cv.CalcHeap("1 MiB", device="cuda")
    assert held() - before >= 1 << 20
    heap.close()
    assert held() == before


# ---------------------------------------------------------------- errors
def test_too_little_memory_names_what_is_needed_and_free():
    free, total = cuda().driver.memory()
    before = cuda().allocated_bytes
    with pytest.raises(cv.PlanError) as raised:
        cv.CalcHeap(2 * total, device="cuda")
    assert raised.value.needed == 2 * total and raised.value.allowed <= total
    assert str(2 * total) in str(raised.value).replace(",", "") and cuda().allocated_bytes == before
    model_of(compiled("cuda", **MODES["one block"])).step(*data(BATCH))  # the device goes on


def test_a_program_larger_than_the_heap_names_both():
    program = compiled("cuda", **MODES["one block"])
    with pytest.raises(cv.PlanError) as raised:
        cv.CalcHeap(program.heap_bytes // 2, device="cuda").create(program)
    assert raised.value.needed == program.heap_bytes


@pytest.mark.parametrize("mode", MODES)
def test_a_bad_label_traps_and_names_the_row(mode):
    X, y = data(BATCH)
    model = model_of(compiled("cuda", **MODES[mode]))
    model.step(X, y)
    with model:
        slot = model.slot
        symbol = model.program.symbol("target")
        slot.write(symbol, np.full(BATCH, SIZES[-1] + 1.0), (BATCH,))  # behind the setter's back
    with pytest.raises(cv.Trap, match="softmax_cross_entropy.*label"):
        model.run_steps(1)
    assert np.isfinite(model.step(X, y)), "a trap is told once"


@pytest.mark.parametrize("mode", MODES)
def test_a_bad_label_in_a_data_set_traps(mode, monkeypatch):
    monkeypatch.setattr(base_model, "_check_labels", lambda *a: None)
    X, y = data()
    model = model_of(compiled("cuda", **MODES[mode]))
    with pytest.raises(cv.Trap, match="softmax_cross_entropy.*label"):
        model.fit(X, np.where(np.arange(len(y)) == len(y) // 2, SIZES[-1], y), epochs=1, progress=False)
    model = model_of(compiled("cuda", **MODES[mode]))
    assert np.isfinite(model.fit(X, y, epochs=1, progress=False)["loss"][0]), "a trap is one model's"


def test_data_are_refused_before_anything_has_changed():
    X, y = data(BATCH)
    model = model_of(compiled("cuda", **MODES["all blocks"]))
    before = [value.tobytes() for value in model.parameters.values()]
    with pytest.raises(cv.CalcError, match="labels must be integers"):
        model.step(X, y + SIZES[-1])
    with pytest.raises(cv.ShapeError):
        model.step(X[:, :-1], y)
    assert [value.tobytes() for value in model.parameters.values()] == before


def test_a_program_of_another_device_is_refused():
    with pytest.raises(cv.CalcError, match="cuda"):
        cv.CalcHeap("1 MiB", device="cuda").create(compiled("cpu", workers=1))
    with pytest.raises(cv.CalcError, match="cuda"):
        cv.CalcHeap("64 MiB").create(compiled("cuda", **MODES["one block"]))


# ---------------------------------------------------------------- the sanitizer's script
@pytest.mark.parametrize("mode", ["grid", "graph", "fleet"])
def test_the_script_for_the_sanitizer_runs(mode):
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/gpu/sanitize.py"), mode],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and f"{mode}: " in done.stdout, done.stdout + done.stderr

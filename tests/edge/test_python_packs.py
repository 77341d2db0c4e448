"""Packs as Python packages and as libraries, run on this machine: on Python's stable ABI, by ctypes, and from C."""

from __future__ import annotations

import copy
import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.edge.targets import TARGETS
from tests.edge.native import COMPILER, STRICT
from tests.edge.test_packs import STEPS, apart, model_of, network

HERE = "linux-x86_64"
WAYS = ["abi3", "ctypes"]
pytestmark = pytest.mark.skipif(
    not llvm.get_host_cpu_features().get("avx2", False), reason="this machine is no x86-64-v3"
)


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """Packages by what they are of, each made once."""
    folder, made = tmp_path_factory.mktemp("packs"), {}
    sys.path.insert(0, str(folder))

    def make(model, what="network", **how):
        if what not in made:
            name = f"pack_of_{what}"
            made[what] = model.export(folder / name, HERE, "it", format="python", **how), importlib.import_module(name)
        return made[what]

    yield make
    sys.path.remove(str(folder))


@pytest.fixture
def package(packages, monkeypatch):
    """The package of a model as it was exported, called in one of the two ways."""

    def make(model, way="abi3", *what, **how):
        pack, module = packages(model, *what, **how)
        if way == "ctypes":
            monkeypatch.setattr(module, "_code", None)
        assert (module._code is None) == (way == "ctypes")
        return pack, module

    return make


def steps(shape, classes, n=STEPS, batch=1):
    rng = np.random.default_rng(1)
    return [(rng.uniform(-1, 1, (batch, *shape)).astype("f4"), rng.integers(0, classes, batch)) for _ in range(n)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("objective", ["size", "speed"])
def test_it_trains_as_the_model_does(way, objective, package):
    model = model_of(network(), (4,))
    _, module = package(model, way, objective, objective=objective)
    there = module.Model()
    for x, y in steps((4,), 3):
        assert there.step(x, y) == pytest.approx(model.step(x, y), rel=1e-5)
        assert apart(there.predict(x[0]), model.predict(x)) < 2e-6


@pytest.mark.parametrize("way", WAYS)
def test_batches_integers_and_several_results(way, package):
    model = model_of(nn.Embedding(9, 4) >> nn.Flatten() >> nn.Linear(3), (5,), batch_size=4)
    there = package(model, way, "embedding")[1].Model()
    rng = np.random.default_rng(0)
    for _ in range(3):
        x, y = rng.integers(0, 9, (4, 5)), rng.integers(0, 3, 4)
        assert there.step(x, y) == pytest.approx(model.step(x, y), rel=1e-5)
        assert apart(there.predict(x), model.predict(x)) < 2e-6
    with pytest.raises(ValueError, match=r"input has shape \(5,\): \(4, 5\) is wanted"):
        there.predict(x[0])
    with pytest.raises(ValueError, match="data that the model cannot use"):
        there.predict(x + 9)


@pytest.mark.parametrize("way", WAYS)
def test_what_a_model_cannot_use(way, package):
    there = package(model_of(network(), (4,)), way)[1].Model()
    x, y = steps((4,), 3, 1)[0]
    before = there.state
    for given, error, text in [
        ((x,), TypeError, "step takes 2 arrays: 1 are given"),
        ((x[:, :3], y), ValueError, r"input has shape \(1, 3\): \(1, 4\) is wanted"),
        ((x.T, y), ValueError, r"input has shape \(4, 1\)"),
        ((x, 7), ValueError, r"step: data that the model cannot use, .* \(trap 1, row \d+\)"),
        ((x, "a"), TypeError, "target is of type <U1: numbers are wanted"),
        ((x, None), TypeError, "target is of type object"),
        ((x + 1j, y), TypeError, "input is of type complex64"),
        ((None, y), ValueError, "shape"),
    ]:
        with pytest.raises(error, match=text):
            there.step(*given)
    assert there.state == before
    with pytest.raises(ValueError, match="a state has"):
        there.state = before[1:]
    loss, wanted = there.step(x, y), package(model_of(network(), (4,)), way)[1].Model().step(x, y)
    assert loss == wanted


@pytest.mark.parametrize("way", WAYS)
def test_anything_that_is_an_array(way, package):
    """Types, orders and shapes that stand for the same numbers give the same result."""
    module = package(model_of(network(), (4,)), way)[1]
    x, y = np.arange(4, dtype="f4")[None], np.array([2])
    wanted = module.Model().step(x, y)
    wide = np.zeros((1, 8), "f4")
    wide[:, ::2] = x
    for inputs in (x[0], x.astype("f8"), x.astype("i8"), x.tolist(), [0, 1, 2, 3], wide[:, ::2], x.astype(">f4")):
        for label in (y, 2, 2.0, np.int64(2), np.float32(2), [2], y.astype("u1"), y.astype("f4")):
            assert module.Model().step(inputs, label) == wanted


def test_models_are_apart_and_results_are_the_callers(package):
    """Each model has its own heap.  A heap lives as long as a function of its model.  A result is a copy."""
    module = package(model_of(network(), (4,)))[1]
    (x, y), (other, _) = steps((4,), 3, 2)
    one, two = module.Model(), module.Model()
    predict, first = one.predict, one.predict(x)
    kept = first.copy()
    for _ in range(3):
        one.step(x, y)
    assert (two.predict(x) == kept).all() and (one.predict(other) != kept).any()
    assert (first == kept).all()
    trained = one.predict(x)
    del one
    assert (predict(x) == trained).all()
    two.start()
    assert (two.predict(x) == kept).all()


@pytest.mark.parametrize("way", WAYS)
def test_states_go_both_ways(way, package, tmp_path):
    model = model_of(network(), (4,))
    pack, module = package(model, way)
    there, file = module.Model(), tmp_path / "state"
    data = steps((4,), 3)
    for x, y in data[:10]:
        there.step(x, y)
    there.save(file)
    pack.restore(model, file.read_bytes())
    again = module.Model(file)
    for x, y in data[10:]:
        assert again.step(x, y) == pytest.approx(model.step(x, y), rel=1e-5)
    again.state = pack.state_of(model)
    x, y = data[0]
    assert again.step(x, y) == pytest.approx(model.step(x, y), rel=1e-5)
    assert module.Model(tmp_path / "none yet").predict(x).shape == (1, 3)


def test_copies_are_apart(package):
    there = package(model_of(network(), (4,)))[1].Model()
    x, y = steps((4,), 3, 1)[0]
    there.step(x, y)
    before = there.state
    for copied in (copy.copy(there), copy.deepcopy(there), pickle.loads(pickle.dumps(there))):
        assert copied.state == before
        copied.step(x, y)
        assert there.state == before != copied.state


def test_a_page_of_any_counter_is_read(package, tmp_path):
    """As the functions for C write it."""
    module = package(model_of(network(), (4,)))[1]
    there, file = module.Model(), tmp_path / "state"
    there.step(*steps((4,), 3, 1)[0])
    file.write_bytes(module._page(there.state, (7).to_bytes(4, "little")))
    assert module.Model(file).state == there.state


def test_a_file_that_cannot_be_written_leaves_nothing(package, tmp_path):
    there = package(model_of(network(), (4,)))[1].Model()
    with pytest.raises(OSError):
        there.save(tmp_path)
    assert [*tmp_path.parent.glob("*.new")] == []
    with pytest.raises(TypeError):
        there.state = None


def test_a_damaged_file_is_refused(package, tmp_path):
    module = package(model_of(network(), (4,)))[1]
    there, file = module.Model(), tmp_path / "state"
    there.save(file)
    whole, rng = file.read_bytes(), np.random.default_rng(0)
    for _ in range(200):
        data = bytearray(whole)
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        for damaged in (data, whole[: rng.integers(len(whole))], whole + b"\0"):
            file.write_bytes(damaged)
            with pytest.raises(ValueError, match="is no state of this model"):
                module.Model(file)
    file.write_bytes(whole)
    assert module.Model(file).state == there.state


@pytest.mark.parametrize("way", WAYS)
def test_a_stream_keeps_its_state(way, package):
    model = model_of(nn.GRU(5) >> nn.Linear(2), (6, 3), loss="mse", stream=True)
    there, stream = package(model, way, "stream")[1].Model(), model.stream()
    for x in np.random.default_rng(0).uniform(-1, 1, (6, 3)).astype("f4"):
        assert apart(there.stream(x[None]), stream(x)) < 2e-6


def test_a_board_needs_numpy_alone(package):
    """Neither calcvm nor Numba is imported; with -S there is nothing but NumPy."""
    folder = package(model_of(network(), (4,)))[0].files[0].parents[1]
    numpy = str(Path(np.__file__).parents[1])
    code = (
        "import sys; before = set(sys.modules); import numpy; from pack_of_network import Model; m = Model();"
        "print(m.step([1, 2, 3, 4], 1)); print([n for n in sys.modules if n.split('.')[0] in ('calcvm', 'numba', 'llvmlite')])"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": f"{folder}:{numpy}"},
        capture_output=True,
        text=True,
        check=True,
    )
    loss, others = done.stdout.splitlines()
    assert float(loss) > 0 and others == "[]"


MAIN = """
#include <stdio.h>
#include "it.h"
static _Alignas(IT_HEAP_ALIGN) unsigned char heap[IT_HEAP_BYTES];
int main(void)
{
    it_start(heap);
    for (int k = 0; k < 10; k++) {
        for (int i = 0; i < 4; i++)
            it_input(heap)[i] = 0.1f * (float)(i + k);
        it_target(heap)[0] = (float)(k % 3);
        if (it_step(heap))
            return 1;
        printf("%.9g\\n", (double)it_loss(heap)[0]);
    }
    return 0;
}
"""


@pytest.mark.parametrize("form", ["object", "archive", "shared"])
def test_a_program_in_c(form, tmp_path):
    model = model_of(network(), (4,))
    pack = model.export(tmp_path, HERE, "it", format=form)
    (tmp_path / "main.c").write_text(MAIN)
    library = next(f.name for f in pack.files if f.suffix in (".o", ".a", ".so"))
    options = [*STRICT[1:], "-Wl,-rpath,$ORIGIN", "main.c", library, "-o", "main"]
    subprocess.run([*COMPILER, *options], cwd=tmp_path, check=True)
    told = subprocess.run(["./main"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    x = np.arange(4, dtype="f4")
    wanted = [model.step(np.float32(0.1) * (x + k)[None], np.array([k % 3])) for k in range(10)]
    np.testing.assert_allclose([float(line) for line in told.split()], wanted, rtol=1e-5)


@pytest.mark.parametrize("target", [name for name, processor in TARGETS.items() if processor.linux])
def test_every_board_with_linux_has_a_package(target, tmp_path):
    pack = model_of(network(), (4,)).export(tmp_path, target, "it", format="python")
    sizes = {f.name: f.stat().st_size for f in pack.files}
    assert sizes["_code.abi3.so"] < 13_000 and sizes["__init__.py"] < 8_000


def test_formats_that_a_processor_has_not(tmp_path):
    model = model_of(network(), (4,))
    for target, form in (("cortex-m4f", "python"), ("browser", "object"), ("pico", "shared"), (HERE, "wheel")):
        with pytest.raises(cv.CalcError, match="format, of those for .* is unknown; take one of"):
            model.export(tmp_path / "none", target, format=form)
    assert not (tmp_path / "none").exists()

"""Devices: BLAS trains the same; what is of another device is refused; slots of the host."""

import itertools
import sys

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.kernels_cpu import find
from calcvm.kernels_cpu._common import KERNELS
from calcvm.ops import OPS
from calcvm.ops.spec import ROWS, Example
from calcvm.vm.memory.slot import HostMemory, Slot
from calcvm.vm.run.device import Cpu
from calcvm.vm.run.loaded import loaded_of
from calcvm.vm.run.pieces import Shared
from tests import rowrun
from tests.rowrun import NATIVE, Case


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("batch", [1, 33])
def test_blas_trains_as_cpu_does(dtype, batch):
    pytest.importorskip("scipy")
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((batch, 20)), rng.integers(0, 5, batch)
    losses = []
    for device in ("cpu", "blas"):
        net = nn.Linear(40) >> nn.Tanh() >> nn.Linear(17) >> nn.ReLU() >> nn.Linear(5)
        model = cv.Model(net, input_shape=(20,), optimizer=cv.Adam(0.01), batch_size=batch, dtype=dtype, device=device)
        losses.append([model.step(X, y) for _ in range(20)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4 if dtype == "float32" else 1e-10)
    kernel = find("linear_fwd")
    assert kernel.address(dtype, "blas") != kernel.address(dtype)


def test_blas_matmul_in_every_layout():
    pytest.importorskip("scipy")
    rng = np.random.default_rng(0)
    for ta in (False, True):
        for tb in (False, True):
            g = cv.CalcGraph()
            a = g.placeholder("a", (None, *((4, 3) if ta else (3, 4))))
            b = g.parameter("b", (5, 4) if tb else (4, 5))
            with g.path("run"):
                y = cv.matmul(a, b, transpose_a=ta, transpose_b=tb)  # noqa: F841
            model = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=6, dtype="float64", device="blas"))
            x = rng.standard_normal((6, *((4, 3) if ta else (3, 4))))
            model["a"] = x
            model.forward("run")
            left = x.swapaxes(1, 2) if ta else x
            np.testing.assert_allclose(model["y"], left @ (model["b"].T if tb else model["b"]), rtol=1e-12)


class Blas(rowrun.Cpu):
    """Rows by the CPU's kernels over BLAS's products, by one worker."""

    def run(self, name, dtype, cells, row, n_workers, phase, only, reverse):
        NATIVE(KERNELS[name].address(dtype, "blas"))(cells.ctypes.data, row.ctypes.data, 0, 1, phase)


SMALL = [
    ("linear", ((m, k), (k, n), (n,)), {}) for m, k, n in itertools.product((1, 2, 3, 5), repeat=3)
] + [
    ("matmul", ((*lead, *((k, m) if ta else (m, k))), (n, k) if tb else (k, n)), {"transpose_a": ta, "transpose_b": tb})
    for lead in ((), (1,), (3,))
    for m, k, n in itertools.product((1, 2, 5), repeat=3)
    for ta, tb in itertools.product((False, True), repeat=2)
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_blas_multiplies_small_matrices_of_every_layout_as_cpu_does(dtype, monkeypatch, capfd):
    """Forward and backward: what BLAS refuses it says on the process's own output, and computes nothing."""
    pytest.importorskip("scipy")
    from calcvm.kernels_cpu import _blas

    _blas.require()
    for name, shapes, attrs in SMALL:
        case = Case(OPS[name], Example(shapes=shapes, attrs=attrs), dtype, 1)
        results = []
        for backend in (rowrun.Cpu(), Blas()):
            monkeypatch.setattr(rowrun, "backend", backend)
            values = case.forward() | case.output_gradients()
            results.append({"y": values["y"], **case.backward(values)})
        for what, want in results[0].items():
            tolerance = 1e-5 if dtype == "float32" else 1e-13
            np.testing.assert_allclose(
                results[1][what], want, tolerance, tolerance, err_msg=f"{what} of {name} {shapes} {attrs}"
            )
    assert capfd.readouterr() == ("", "")


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.linalg.cython_blas", None)
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(cv.MissingExtra, match=r"calcvm\[blas\]"):
        cv.Model(nn.Linear(2), input_shape=(2,), optimizer=cv.Adam(), batch_size=1, device="blas")


def test_unknown_devices_and_teams_are_refused():
    for options, message in (({"device": "tpu"}, "tpu"), ({"device": "blas", "workers": 2}, "workers=1")):
        with pytest.raises(cv.CalcError, match=message):
            cv.Model(nn.Linear(2), input_shape=(2,), optimizer=cv.Adam(), batch_size=1, **options)


# ---------------------------------------------------------------- the device cuda, without one
def small_graph():
    net = nn.Linear(3) >> nn.Tanh() >> nn.Linear(2)
    return cv.build_graph(net, (4,), "softmax_cross_entropy", cv.Adam())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda", "mode": "warp"}, "mode 'warp' is unknown; take one of grid, graph, fleet"),
        ({"device": "cuda", "precision": "float16"}, "precision 'float16' is unknown; take one of float32, tf32"),
        ({"device": "cuda", "precision": "tf32", "dtype": "float64"}, "needs dtype 'float32', not 'float64'"),
        ({"device": "cuda", "mode": "fleet", "workers": 2}, "workers=1"),
        ({"mode": "grid"}, "of device 'cuda'"),
        ({"device": "blas", "precision": "tf32"}, "of device 'cuda'"),
    ],
)
def test_unknown_modes_and_precisions_are_refused(options, message):
    with pytest.raises(cv.CalcError, match=message):
        cv.plan(small_graph(), batch_size=8, **options)


def test_a_row_without_a_cuda_kernel_is_named(monkeypatch):
    monkeypatch.setattr("calcvm.kernels_cuda.kernels", lambda names: {"linear_fwd": None})
    with pytest.raises(cv.UnsupportedOperator, match=r"row '(?!linear_fwd)\w+' \(of .+\) has no CUDA kernel.*'cpu'"):
        cv.plan(small_graph(), batch_size=8, device="cuda", mode="grid", workers=2)


@pytest.fixture
def kernels(monkeypatch):
    """As if there were a CUDA kernel for every row."""
    monkeypatch.setattr("calcvm.kernels_cuda.kernels", lambda names: dict.fromkeys(ROWS))


@pytest.mark.parametrize("mode", ["grid", "graph", "fleet"])
def test_a_program_says_how_it_is_run(mode, kernels):
    workers = 1 if mode == "fleet" else 40
    program = cv.compile(small_graph(), batch_size=8, device="cuda", mode=mode, workers=workers)
    assert [program.info[name] for name in ("device", "mode", "precision")] == ["cuda", mode, "float32"]
    assert program.workers == workers
    host = cv.compile(small_graph(), batch_size=8)
    assert host.info["device"] == "cpu" and not {"mode", "precision"} & {*host.info}


def test_blocks_are_more_than_a_team_may_have(kernels):
    graph = small_graph()
    assert cv.compile(graph, batch_size=2, device="cuda", mode="grid", workers=2000).workers == 2000
    for device, workers in (("cuda", 65536), ("cpu", 2000)):
        mode = "grid" if device == "cuda" else None
        with pytest.raises(cv.CalcError, match=f"workers must be an integer from 1 to .* not {workers}"):
            cv.compile(graph, batch_size=2, device=device, mode=mode, workers=workers)


def test_programs_and_heaps_of_other_devices_are_refused(kernels):
    graph = small_graph()
    program = cv.compile(graph, batch_size=8, device="cuda", mode="grid", workers=2)
    heap = cv.CalcHeap("1 MiB")
    with pytest.raises(cv.CalcError, match=r"compiled for 'cuda', the heap is of device 'cpu': .*device='cuda'\)"):
        heap.create(program)
    assert not heap.names and heap.free_bytes == heap.nbytes
    with pytest.raises(cv.CalcError, match="compiled for 'cuda'"):
        cv.Fleet("1 MiB").add(program, data=(np.zeros((8, 4)), np.zeros(8, int)))
    with pytest.raises(cv.CalcError, match="device 'tpu'"):
        cv.CalcHeap("1 MiB", device="tpu")
    pytest.importorskip("scipy")
    blas = cv.compile(graph, batch_size=8, device="blas")
    for device in ("cpu", "blas"):
        assert cv.CalcHeap("1 MiB", device=device).create(blas).program is blas


# ---------------------------------------------------------------- slots of the host
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_slot_reads_and_writes(dtype):
    program = cv.compile(small_graph(), batch_size=8, dtype=dtype, workers=1)
    model = cv.CalcHeap(2 * program.heap_bytes).create(program, seed=1)
    weight, state = program.by_name["linear_1.weight"], program.symbols[model.loaded.training(None)["hyper"]]
    with model:
        slot = model.slot
        assert slot.writable
        view = slot.cells(weight)
        slot.write(weight, np.arange(3.0))
        assert view.shape == (4, 3) and (view == [0, 1, 2]).all()  # live, broadcast, converted
        assert slot.scalar(weight.offset + 2) == 2
        words = np.linspace(0, 1, state.elems.b)
        slot.write(state, words, (state.elems.b,))
        np.testing.assert_array_equal(slot.cells(state, (state.elems.b,)), words)
        whole, image = slot.snapshot(), slot.get_image()
        slot.write(weight, 0)
        assert not view.any() and slot.cells(state, (state.elems.b,)).any()
        slot.set_image(image)
        assert (view == [0, 1, 2]).all()
        slot.clear()
        assert not slot.elements.any()
        slot.fill(whole)
        np.testing.assert_array_equal(slot.elements, whole)
        blank = slot.blank()
        blank[weight.offset] = 5
        slot.fill(blank)
        assert slot.scalar(weight.offset) == 5 and slot.bytes.any() and not view.reshape(-1)[1:].any()


@pytest.mark.parametrize("open", [False, True])
def test_a_slot_is_kept_and_restored(open):  # noqa: A002
    program = cv.compile(small_graph(), batch_size=8, workers=1, accumulate=True)
    loaded = loaded_of(program)
    slot = HostMemory(program.heap_bytes).slot(loaded, 0, program.heap_bytes)
    store = cv.MemoryStore()
    slot.elements[:] = np.arange(1, program.heap_elems + 1)
    image, opened = slot.get_image(), slot.get_image(open=True)
    start, stop = loaded.opened if open else loaded.image
    assert len(opened) > len(image) and image.base is None
    assert slot.keep(store, "a", {}, open) == stop - start
    slot.elements[:] = -1
    assert slot.trap() == (-1, -1) and slot.trap() == (0, 0)
    slot.elements[:2] = 1, 2
    assert slot.restore(store, "a", open) == stop - start
    np.testing.assert_array_equal(slot.get_image(open), opened if open else image)
    gradients = slot.bytes[slice(*loaded.gradient)].view(program.dtype)
    assert slot.trap() == (0, 0) and gradients.any() == open  # without: as between two learning batches
    slot.elements[:] = 1
    slot.clear_padding()
    assert not slot.elements[loaded.padding].any() and slot.elements.sum() == program.heap_elems - len(loaded.padding)


def test_a_trap_is_raised_once():
    model = cv.Model(nn.Linear(2), input_shape=(2,), optimizer=cv.SGD(0.1), batch_size=1)
    with model:
        slot = model.slot
        slot.elements[:2] = 1, 1
        with pytest.raises(cv.Trap, match="row 1 .*label"):
            slot.check()
        slot.check()


class Copies(Slot):
    """A slot as a device with memory of its own has it: what it gives are copies."""

    __slots__ = ()
    writable = False

    def cells(self, symbol, shape=None):
        return super().cells(symbol, shape).copy()

    def blank(self):
        return np.zeros_like(self.elements)


def test_models_of_slots_that_copy_train_as_others(monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((50, 4), dtype=np.float32), rng.integers(0, 2, 50)
    net = nn.Linear(3) >> nn.Tanh() >> nn.Dropout(0.2) >> nn.Linear(2)

    def train():
        models = [
            cv.Model(net, input_shape=(4,), optimizer=cv.Adam(), batch_size=8, learning_batch=learning, seed=3)
            for learning in (None, 16)
        ]
        told = []
        for k, model in enumerate(models):
            model.hyper["learning_rate"] = 0.02
            told += [model.step(X[:8], y[:8]), *model.fit(X, y, epochs=2, validation=0.2, progress=False)["val_loss"]]
            model.save(tmp_path / f"{k}.model")
            again, copied = cv.load(tmp_path / f"{k}.model"), model.copy(heap=cv.CalcHeap("1 MB"))
            told += [a.tobytes() for m in (model, again, copied) for a in (*m.parameters.values(), m.predict(X))]
        return model, told

    _, expected = train()
    monkeypatch.setattr("calcvm.vm.memory.slot.Slot", Copies)
    model, told = train()
    assert told == expected
    resident = model
    assert not resident.record.exposed
    with pytest.raises(ValueError, match="read-only"):
        model.parameters["linear_1.bias"][0] = 1
    monkeypatch.setattr(resident.heap.device, "name", "cuda")
    for name in ("elements", "heap_address"):
        with pytest.raises(cv.CalcError, match="memory of device 'cuda'"):
            getattr(resident, name)


def test_shared_memory_is_held_while_it_is_used(monkeypatch):
    class Shortlived(Shared):
        def __del__(self):
            self.array[:] = np.nan

    def shared(self, elems, dtype=np.float64):
        array = np.zeros(elems, dtype)
        return Shortlived(array, array.ctypes.data)

    monkeypatch.setattr(Cpu, "shared", shared)
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((50, 4), dtype=np.float32), rng.integers(0, 2, 50)
    program = cv.compile(small_graph(), batch_size=8, workers=1)
    fleet = cv.Fleet("1 MiB", workers=1)
    handle = fleet.add(program, data=(X, y), validation=(X, y))
    fleet.fit(2, progress=False)
    fleet.advance(3)  # its figures move
    assert len(handle.losses) == 5 and np.isfinite([handle.losses, handle.val_losses]).all()
    assert handle.model.evaluate(X, y)["loss"] == handle.val_loss

"""Models on a simulated GPU, in all three ways: the numbers of the CPU, known memory, errors that tell."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.errors import DeviceError, Trap
from calcvm.vm.run.cuda.device import PROCESS_BYTES

RNG = np.random.default_rng(0)
X = RNG.standard_normal((17, 4)).astype(np.float32)
Y = RNG.integers(0, 3, 17)
WAYS = {
    "one block": dict(mode="grid", workers=1),
    "grid": dict(mode="grid", workers=2),
    "graph": dict(mode="graph", workers=2),
}
OPTIMIZERS = {
    "sgd": cv.SGD(0.1),
    "momentum": cv.SGD(0.1, momentum=0.9),
    "nesterov": cv.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": cv.Adam(1e-2),
    "adamw": cv.AdamW(1e-2),
    "adamhat": cv.AdamHat(1e-2),
    "rmsprop": cv.RMSProp(1e-2, momentum=0.5),
    "adagrad": cv.Adagrad(0.1),
}


def net():
    return nn.Linear(5) >> nn.Sigmoid() >> nn.Dropout(0.2) >> nn.Linear(3)


def graph(optimizer=None):
    return cv.build_graph(net(), (4,), "softmax_cross_entropy", optimizer or cv.Adam(1e-2))


def model(device, optimizer=None, batch=17, accumulate=False, seed=1, **how):
    program = cv.compile(graph(optimizer), batch_size=batch, device=device, accumulate=accumulate, **how)
    return cv.CalcHeap(program.heap_bytes, device=device).create(program, seed=seed)


def same(a, b, tolerance=1e-5):
    for name, value in a.parameters.items():
        np.testing.assert_allclose(b.parameters[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


def bits(m):
    return {name: value.tobytes() for name, value in m.parameters.items()}


# ---------------------------------------------------------------- the numbers of the CPU
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_of_every_optimizer(gpu, optimizer):
    how = OPTIMIZERS[optimizer]
    cpu = model("cpu", how)
    want = [cpu.step(X, Y) for _ in range(4)]
    found = {}
    for way, arguments in WAYS.items():
        m = model("cuda", how, **arguments)
        got = [m.step(X, Y) for _ in range(4)]
        np.testing.assert_allclose(got, want, rtol=1e-5)
        same(cpu, m)
        found[way] = bits(m)
    assert found["one block"] == found["grid"] == found["graph"]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_fit(gpu, way, far, accumulate):
    """Shuffled epochs with a short last batch, validation, prediction; data on the device, or in the host's memory."""
    gpu.reserved_bytes = 1 << 60 if far else 0
    histories, models = [], []
    for device, how in (("cpu", {}), ("cuda", WAYS[way])):
        m = model(device, batch=5, accumulate=accumulate, **how)
        if accumulate:
            m.learning_batch = 12
        histories.append(m.fit(X, Y, epochs=2, validation=(X[:7], Y[:7]), progress=False))
        models.append(m)
    for name in ("loss", "val_loss", "val_accuracy"):
        np.testing.assert_allclose(histories[1][name], histories[0][name], rtol=2e-5)
    same(*models)
    np.testing.assert_allclose(models[1].predict(X), models[0].predict(X), rtol=1e-4, atol=1e-5)
    got, want = (m.evaluate(X, Y) for m in reversed(models))
    assert got["accuracy"] == want["accuracy"] and np.isclose(got["loss"], want["loss"])


@pytest.mark.parametrize("way", WAYS)
def test_fit_by_buckets(gpu, way):
    """The order of each epoch is made by the host."""
    lengths = RNG.integers(0, 5, 17)
    data = [RNG.standard_normal((n, 4)).astype(np.float32) for n in lengths]
    models = []
    for device, how in (("cpu", {}), ("cuda", WAYS[way])):
        options = dict(input_shape=(4, 4), loss="mse", optimizer=cv.SGD(0.1), batch_size=5, lengths=True, seed=1)
        m = cv.Model(nn.Linear(4), device=device, **options, **how)
        m.fit(data, data, epochs=3, bucket_by_length=True, progress=False)
        models.append(m)
    same(*models)
    for a, b in zip(models[0].predict(data), models[1].predict(data), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)


def test_float64(gpu):
    cpu, gpu_model = (model(d, dtype="float64") for d in ("cpu", "cuda"))
    for _ in range(3):
        np.testing.assert_allclose(gpu_model.step(X, Y), cpu.step(X, Y), rtol=1e-12)
    same(cpu, gpu_model, 1e-12)


def test_buffers(gpu):
    """A running mean moves as on the CPU, and inference reads it."""
    found = []
    for device in ("cpu", "cuda"):
        g = cv.build_graph(nn.Center() >> nn.Linear(3), (4,), "softmax_cross_entropy", cv.SGD(0.1))
        program = cv.compile(g, batch_size=17, device=device, dtype="float64")
        m = cv.CalcHeap(program.heap_bytes, device=device).create(program, seed=1)
        m.fit(X + 3, Y, epochs=3, progress=False)
        found.append((m.buffers["center_1.running"], m.predict(X)))
    for cpu, cuda in zip(*found):
        np.testing.assert_allclose(cuda, cpu, rtol=1e-12)
    assert (found[0][0] > 0.5).all()


def test_sections(gpu):
    """Forward, backward, optimize and end_round one by one, with gradients to look at."""
    models = [model(d, accumulate=True) for d in ("cpu", "cuda")]
    for m in models:
        m["input"], m["target"] = X, Y
        m.forward("learn")
        m.backward("learn")
    for name in models[0].parameters:
        np.testing.assert_allclose(models[1].grad(name), models[0].grad(name), rtol=1e-4, atol=1e-6)
    for m in models:
        m.optimize("learn")
        m.end_round("learn")
    np.testing.assert_allclose(models[1]["loss"], models[0]["loss"], rtol=1e-6)
    models[1].hyper["learning_rate"] = 0.5
    assert models[1].hyper["learning_rate"] == 0.5


# ---------------------------------------------------------------- many models
@pytest.mark.parametrize("validation", [None, slice(0, 7)])
def test_fleet(gpu, validation):
    """Different models in one launch, each with its own seed and samples: the figures of the CPU's fleet."""
    losses = []
    for device in ("cpu", "cuda"):
        nets, options = (net(), nn.Linear(3)), {"input_shape": (4,), "optimizer": cv.Adam(1e-2), "batch_size": 5}
        fleet = cv.Fleet("1 MiB", device=device)
        handles = [
            fleet.add(
                nets[k % 2], **options, data=(X, Y), seed=k, samples=slice(k, 17), validation=validation, patience=patience
            )
            for k, patience in ((0, None), (1, None), (2, None), (3, 1 if validation else None))
        ]  # fmt: skip
        launches = getattr(gpu.library, "launches", 0)
        fleet.fit(epochs=3, progress=False)
        if device == "cuda":
            assert gpu.library.launches - launches <= 3  # a launch a slice, however many models
        losses.append([h.losses for h in handles])
        if validation:
            losses[-1] += [h.val_losses for h in handles]
    for want, got in zip(*losses):
        np.testing.assert_allclose(got, want, rtol=2e-5)


def test_a_model_of_a_fleet_has_the_bits_of_fit(gpu):
    program = cv.compile(graph(), batch_size=5, device="cuda", mode="fleet")
    fleet = cv.Fleet("1 MiB", device="cuda")
    handle = fleet.add(program, data=(X, Y), seed=1)
    fleet.fit(epochs=2, progress=False)
    alone = cv.CalcHeap("1 MiB", device="cuda").create(program, seed=1)
    alone.fit(X, Y, epochs=2, progress=False)
    assert bits(handle.model) == bits(alone)


def test_a_fleet_gives_the_best_epoch_back(gpu):
    program = cv.compile(graph(cv.Adam(0.5)), batch_size=5, device="cuda", mode="fleet")
    fleet, held = cv.Fleet("1 MiB", device="cuda"), (X[12:], Y[12:])
    handles = [fleet.add(program, data=(X[:12], Y[:12]), seed=s, validation=held, keep_best=True) for s in range(3)]
    fleet.fit(epochs=4, progress=False)
    for seed, handle in enumerate(handles):
        alone = cv.CalcHeap("1 MiB", device="cuda").create(program, seed=seed)
        history = alone.fit(X[:12], Y[:12], epochs=4, validation=held, keep_best=True, progress=False)
        assert handle.kept == (3 if history.kept is None else history.kept)
        assert bits(handle.model) == bits(alone)
        assert handle.model.step(X[:5], Y[:5]) == alone.step(X[:5], Y[:5])
    assert {h.kept for h in handles} - {3}


def test_programs_of_one_launch_have_lists_and_widths_of_their_own(gpu):
    g = cv.CalcGraph()
    x, w, s = g.placeholder("x", (None, 4)), g.parameter("w", (4, 3)), g.parameter("s", (3,))
    with g.path("learn", backward=True) as learn:
        learn.minimize(cv.mean(cv.square(cv.tanh(x @ w) * s - 0.5)), cv.SGD(0.3))
    with g.path("predict") as predict:
        predict.output = (cv.tanh(x @ w) * s).rename("score")
    how = dict(batch_size=5, device="cuda", mode="fleet")
    programs = {cv.compile(graph(), **how): (X, Y), cv.compile(g, **how): (X,)}
    assert [p.row_bytes for p in programs] == [128, 192]
    fleet = cv.Fleet("1 MiB", device="cuda")
    handles = [fleet.add(program, data=data, seed=k) for k, (program, data) in enumerate(programs.items())]
    launches = gpu.library.launches
    fleet.fit(epochs=2, progress=False)
    assert gpu.library.launches - launches <= 2
    for k, (program, data) in enumerate(programs.items()):
        alone = cv.CalcHeap("1 MiB", device="cuda").create(program, seed=k)
        alone.fit(*data, epochs=2, progress=False)
        assert bits(handles[k].model) == bits(alone)


@pytest.mark.parametrize("store", ["memory", "file"])
def test_switching(gpu, store, tmp_path):
    """Models that take turns in a heap with room for one train on with the bits of models that never left."""
    program = cv.compile(graph(), batch_size=17, device="cuda", mode="grid", workers=2)
    keeper = cv.FileStore(tmp_path / "s") if store == "file" else None
    with cv.CalcHeap(program.heap_bytes, store=keeper, device="cuda") as heap:
        turns = [heap.create(program, seed=s) for s in (1, 2)]
        alone = [cv.CalcHeap(program.heap_bytes, device="cuda").create(program, seed=s) for s in (1, 2)]
        for _ in range(3):
            for a, b in zip(turns, alone):
                assert a.step(X, Y) == b.step(X, Y)
        assert heap.stats.switches >= 5
        for a, b in zip(turns, alone):
            assert {k: v.tobytes() for k, v in a.parameters.items()} == {
                k: v.tobytes() for k, v in b.parameters.items()
            }


def test_models_of_a_reader_take_turns(gpu, tmp_path):
    """Each in the version in which it was opened, and with what it has learnt since."""
    program = cv.compile(graph(), batch_size=17, device="cuda", mode="grid", workers=2)
    with cv.CalcHeap("1 MiB", store=cv.FileStore(tmp_path), device="cuda") as heap:
        written = [heap.create(program, seed=s, name=str(s)) for s in (1, 2)]
        heap.flush()
        alone = [cv.CalcHeap(program.heap_bytes, device="cuda").create(program, seed=s) for s in (1, 2)]
        reader = cv.CalcHeap(program.heap_bytes, store=cv.FileStore(tmp_path, read_only=True), device="cuda")
        with reader:
            turns = [reader.open(str(s)) for s in (1, 2)]
            for model in written:
                model.step(X, Y)
                model.commit()
            for _ in range(2):
                for a, b in zip(turns, alone):
                    assert a.step(X, Y) == b.step(X, Y)
            assert reader.stats.switches >= 4


def test_save_and_load(gpu, tmp_path):
    m = model("cuda", mode="grid", workers=2)
    m.step(X, Y)
    m.save(tmp_path / "m.calc")
    again = cv.load(tmp_path / "m.calc")
    assert again.program.info["device"] == "cuda" and bits(again) == bits(m)
    assert again.step(X, Y) == m.step(X, Y)


# ---------------------------------------------------------------- memory
@pytest.mark.parametrize("way", WAYS)
def test_predicted_bytes_are_allocated_and_no_more(gpu, way):
    plan = cv.plan(g := graph(), batch_size=17, device="cuda", **WAYS[way])
    program = cv.compile(g, plan=plan)
    before = gpu.allocated_bytes
    assert before == PROCESS_BYTES == gpu.library.device.n_bytes
    m = cv.CalcHeap(program.heap_bytes, device="cuda").create(program, seed=0)
    m.step(X, Y)
    assert gpu.allocated_bytes == plan.device_total == gpu.library.device.n_bytes
    assert f"{plan.device_total:,} bytes" in str(plan)
    allocations = gpu.allocations
    for n in (17, 5, 17, 3):
        m.step(X[:n], Y[:n])
    assert {address % 256 for _, address in m.loaded._rows.values()} == {0}
    assert len({address for _, address in m.loaded._rows.values()}) == 3
    m.run_steps(3)
    assert gpu.allocations == allocations
    del m, program
    gc.collect()
    assert gpu.allocated_bytes == PROCESS_BYTES


def test_data_sets_are_given_back(gpu):
    m = model("cuda", batch=5)
    before = gpu.allocated_bytes
    m.fit(X.copy(), Y.copy(), epochs=1, progress=False)
    gc.collect()
    assert gpu.allocated_bytes == before and gpu.library.left < 40


def test_data_that_change_are_read_again(gpu):
    x, m, cpu = X.copy(), model("cuda", batch=5), model("cpu", batch=5)
    for scale in (1.0, 0.5):
        x[:] = X * scale
        want, got = (n.fit(x, Y, epochs=1, progress=False)["loss"] for n in (cpu, m))
        np.testing.assert_allclose(got, want, rtol=1e-5)


# ---------------------------------------------------------------- bad input
def test_too_little_memory(gpu):
    with pytest.raises(cv.PlanError, match="free") as error:
        cv.CalcHeap("1 GiB", device="cuda")
    assert error.value.needed == 1 << 30 and error.value.allowed < 1 << 24
    assert gpu.allocated_bytes == PROCESS_BYTES


@pytest.mark.parametrize("way", WAYS)
def test_a_bad_label_traps(gpu, way):
    m = model("cuda", **WAYS[way])
    m.step(X, Y)
    with m:
        slot = m.slot
        slot.write(m.program.symbol("target"), 9.0, (17,))
    with pytest.raises(Trap, match="softmax_cross_entropy.*label"):
        m.run_steps(1)
    m.step(X, Y)


def test_an_altered_row_is_refused(gpu):
    """A program for a GPU is held to the same proofs as any."""
    from dataclasses import replace

    from calcvm.vm.program.verify import verify

    program = cv.compile(graph(), batch_size=5, device="cuda", mode="grid", workers=2)
    verify(program)
    pc = next(i for i in range(len(program.rows)) if program.spec(i).name == "linear_fwd")
    for word, value in ((2 + 6, program.heap_elems - 1), (2 + 2, 10**6), (0, 9999)):
        rows = program.rows.copy()
        rows[pc, word] = value
        with pytest.raises(cv.ProgramError, match=f"row {pc}"):
            verify(replace(program, rows=rows))


def test_a_lost_device_leaves_the_last_state(gpu, tmp_path):
    m = model("cuda", mode="grid", workers=2)
    for _ in range(2):
        m.step(X, Y)
    want = bits(m)
    gpu.library.lose_after(1)
    with pytest.raises(DeviceError) as error:
        m.step(X, Y)
    assert error.value.lost
    assert bits(m) == want
    m.save(tmp_path / "rescued.calc")


def test_a_stuck_grid_is_given_up(gpu, monkeypatch):
    from calcvm.vm.run.cuda import device, loop

    monkeypatch.setattr(device, "PATIENCE_SECONDS", 0.05)
    m = model("cuda", mode="grid", workers=2)
    real = loop.atomic_add
    monkeypatch.setattr(
        loop, "atomic_add", lambda at, n: real(at, n) + 10**6
    )  # a block more than there are is expected
    with pytest.raises(DeviceError, match="waited"):
        m.step(X, Y)

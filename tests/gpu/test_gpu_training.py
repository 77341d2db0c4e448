"""Training on a GPU: the CPU's losses, and the same bits again, in whatever way a program is run."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra cuda is not installed")

import calcvm as cv  # noqa: E402
from calcvm import nn  # noqa: E402
from calcvm.vm.memory import base_model  # noqa: E402
from calcvm.vm.run.cuda.device import cuda  # noqa: E402
from tests.gpu.on_gpu import (  # noqa: E402
    BATCH,
    BATCHES,
    MODES,
    OPTIMIZERS,
    SIZES,
    SMALL,
    STEPS,
    bits,
    compiled,
    data,
    fleet_of,
    model_of,
    network,
    stepped,
)

pytestmark = pytest.mark.gpu
RTOL = {"float32": 1e-5, "float64": 1e-10}


# ---------------------------------------------------------------- steps
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_agrees_with_the_cpu_in_every_mode(name):
    """100 steps: losses as on the CPU; two runs, and all modes, with the same bits."""
    expected, model = stepped(compiled("cpu", OPTIMIZERS[name], workers=1))
    assert expected[-BATCHES:].mean() < expected[:BATCHES].mean()
    outcomes = {}
    for mode, how in MODES.items():
        if SMALL and mode == "graph":  # many blocks to a row: minutes in the simulator
            continue
        program = compiled("cuda", OPTIMIZERS[name], **how)
        runs = [stepped(program) for _ in range(2)]
        for losses, ours in runs:
            np.testing.assert_allclose(losses, expected, rtol=RTOL["float32"], err_msg=mode)
            for key, value in model.parameters.items():
                scale = np.abs(value).max() + 1e-3
                assert np.abs(ours.parameters[key] - value).max() <= 1e-3 * scale, f"{mode}: {key}"
        (one, first), (two, second) = runs
        assert one.tobytes() == two.tobytes() and bits(first) == bits(second), f"{mode}: two runs differ"
        outcomes[mode] = one.tobytes(), bits(first)
    reference = outcomes["one block"]
    for mode, outcome in outcomes.items():
        assert outcome == reference, f"{mode} differs from one block of a grid"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_in_float64_it_is_the_cpu_to_ten_digits(name, mode):
    expected, _ = stepped(compiled("cpu", OPTIMIZERS[name], workers=1, dtype="float64"))
    losses, _ = stepped(compiled("cuda", OPTIMIZERS[name], dtype="float64", **MODES[mode]))
    np.testing.assert_allclose(losses, expected, rtol=RTOL["float64"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_fleet_trains_each_model_as_it_is_trained_alone(name):
    """Three models: mean losses of epochs as on the CPU, bits as of `Model.fit` alone."""
    (epochs, optimizer), (X, y) = (STEPS // BATCHES, OPTIMIZERS[name]), data()
    program = compiled("cuda", optimizer, mode="fleet")
    fleets = [fleet_of(program, seeds=(1, 2, 3)) for _ in range(2)]
    for fleet in fleets:
        fleet.fit(epochs, progress=False)
    again = fleets[1].handles.values()
    for handle, other, seed in zip(fleets[0].handles.values(), again, (1, 2, 3)):
        alone = model_of(compiled("cpu", optimizer, workers=1), seed)
        history = alone.fit(X, y, epochs=epochs, shuffle=False, progress=False)
        np.testing.assert_allclose(handle.losses, history["loss"], rtol=RTOL["float32"])
        assert handle.losses.tobytes() == other.losses.tobytes() and bits(handle.model) == bits(other.model)
    alone = model_of(program, 1)
    alone.fit(X, y, epochs=epochs, shuffle=False, progress=False)
    assert bits(alone) == bits(next(iter(fleets[0].handles.values())).model)


@pytest.mark.parametrize("mode", MODES)
def test_many_steps_in_one_call_are_steps(mode):
    X, y = data(BATCH)
    program = compiled("cuda", **MODES[mode])
    one, many = model_of(program), model_of(program)
    many["input"], many["target"] = X, y
    assert many.run_steps(7) == [one.step(X, y) for _ in range(7)][-1]
    assert bits(one) == bits(many)


@pytest.mark.parametrize("mode", ["all blocks", "graph"])
def test_tf32_learns_about_the_same(mode):
    expected, _ = stepped(compiled("cpu", workers=1))
    losses, _ = stepped(compiled("cuda", precision="tf32", **MODES[mode]))
    np.testing.assert_allclose(losses, expected, rtol=2e-2)
    assert SMALL or losses.tobytes() != stepped(compiled("cuda", **MODES[mode]))[0].tobytes(), "it is not used"


# ---------------------------------------------------------------- whole data sets
def pair(net=None, learning_batch=None, optimizer=None, **how):
    """A model on the CPU and one on the GPU with the same start."""
    made = []
    for device, options in (("cpu", {"workers": 1}), ("cuda", how)):
        model = cv.Model(
            net or network(), input_shape=(SIZES[0],), optimizer=optimizer or cv.Adam(1e-3), batch_size=BATCH, seed=4,
            learning_batch=learning_batch, device=device, **options,
        )  # fmt: skip
        made.append(model)
    return made


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("learning_batch", [None, 2 * BATCH + 1])
@pytest.mark.parametrize("shuffle", [False, True])
def test_fit_with_validation(mode, learning_batch, shuffle):
    """Odd numbers of samples, rounds that add up, a judge after each epoch; then predict and evaluate."""
    X, y = data(BATCH * BATCHES - 3)
    cpu, gpu = pair(learning_batch=learning_batch, **MODES[mode])
    histories = [m.fit(X, y, epochs=3, shuffle=shuffle, validation=0.2, progress=False) for m in (cpu, gpu)]
    for figure in ("loss", "val_loss", "val_accuracy"):
        np.testing.assert_allclose(histories[1][figure], histories[0][figure], rtol=1e-4, err_msg=figure)
    predicted = [m.predict(X) for m in (cpu, gpu)]
    np.testing.assert_allclose(predicted[1], predicted[0], rtol=1e-3, atol=1e-4)
    figures = [m.evaluate(X, y) for m in (cpu, gpu)]
    assert figures[1]["loss"] == pytest.approx(figures[0]["loss"], rel=1e-4)
    assert abs(figures[1]["accuracy"] - figures[0]["accuracy"]) <= 1.5 / len(X)
    again = pair(learning_batch=learning_batch, **MODES[mode])[1]
    repeated = again.fit(X, y, epochs=3, shuffle=shuffle, validation=0.2, progress=False)
    assert repeated["loss"] == histories[1]["loss"] and bits(again) == bits(gpu), "two runs differ"


@pytest.mark.parametrize("mode", ["one block", "all blocks", "graph"])
def test_data_that_stay_on_the_host_give_the_same_bits(mode, monkeypatch):
    """A data set is copied to the device, or read where it is, page-locked, when it does not fit."""
    X, y = data(BATCH * BATCHES - 3)
    outcomes = []
    for reserved in (cuda().reserved_bytes, 1 << 60):
        monkeypatch.setattr(cuda(), "reserved_bytes", reserved)
        model = pair(**MODES[mode])[1]
        history = model.fit(X.copy(), y.copy(), epochs=3, validation=0.25, progress=False)
        outcomes.append((history["loss"], history["val_loss"], bits(model), model.predict(X).tobytes()))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64", "float32", "float64"])
@pytest.mark.parametrize("mode", ["all blocks", "graph", "fleet"])
def test_samples_of_every_type(dtype, mode):
    rng = np.random.default_rng(0)
    X = rng.integers(0, 4, (BATCH * 2 + 1, SIZES[0])).astype(dtype)
    y = rng.integers(0, SIZES[-1], len(X))
    cpu, gpu = pair(**MODES[mode])
    losses = [m.fit(X, y, epochs=2, progress=False)["loss"] for m in (cpu, gpu)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


def test_an_array_that_changes_between_two_fits_is_read_anew():
    X, y = data(BATCH * 2)
    losses = []
    for model in pair(**MODES["all blocks"]):
        given = X.copy()
        model.fit(given, y, epochs=1, progress=False)
        given *= 0.5
        model.fit(given, y, epochs=1, progress=False)
        losses.append(model.evaluate(given, y)["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_dropout_draws_the_masks_of_the_cpu(mode):
    X, y = data()
    cpu, gpu = pair(network(nn.ReLU, dropout=0.4), optimizer=cv.SGD(0.05), **MODES[mode])
    losses = [[m.step(X[:BATCH], y[:BATCH]) for _ in range(10)] for m in (cpu, gpu)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_augmentation_draws_the_places_of_the_cpu(mode):
    X, y = data()
    augment = nn.Reshape(SIZES[0], 1) >> nn.Dropout2d(0.2) >> nn.Reshape(1, SIZES[0]) >> nn.RandomShift(2, "wrap")
    augment = augment >> nn.RandomHorizontalFlip() >> nn.Flatten()
    cpu, gpu = pair(augment >> nn.Linear(SIZES[-1]), optimizer=cv.SGD(0.05), **MODES[mode])
    losses = [[m.step(X[:BATCH], y[:BATCH]) for _ in range(10)] for m in (cpu, gpu)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


def test_hyperparameters_and_schedules_take_effect():
    X, y = data(BATCH)
    cpu, gpu = pair(optimizer=cv.SGD(0.1, schedule=cv.Step(3, 0.5), momentum=0.5), **MODES["all blocks"])
    losses = []
    for model in (cpu, gpu):
        told = [model.step(X, y) for _ in range(5)]
        model.hyper["learning_rate"] = 0.01
        losses.append(told + [model.step(X, y) for _ in range(5)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


# ---------------------------------------------------------------- fleets
def test_a_fleet_of_many_programs_with_samples_validation_and_patience():
    X, y = data(BATCH * BATCHES)
    numbers = np.random.default_rng(1).permutation(len(X))[: BATCH * 2 + 1]
    results = {}
    for device in ("cpu", "cuda"):
        fleet = cv.Fleet("16 MiB" if SMALL else "256 MiB", device=device)
        for width in (3, 5) if SMALL else (16, 33, 64):
            net = nn.Linear(width) >> nn.Tanh() >> nn.Linear(SIZES[-1])
            how = {"workers": 1} if device == "cpu" else {"mode": "fleet"}
            program = compiled(device, cv.Adam(1e-2), net, **how)
            options = dict(samples=numbers, validation=slice(len(X) - BATCH, len(X)), patience=2, shuffle=True)
            for seed in (1, 2):
                fleet.add(program, data=(X, y), seed=seed, hyper={"learning_rate": 1e-3 * seed}, **options)
        results[device] = fleet.fit(3, progress=False)
    for figure in ("loss", "val_loss", "epochs"):
        np.testing.assert_allclose(results["cuda"].column(figure), results["cpu"].column(figure), rtol=1e-4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_fleet_gives_the_best_epoch_back(name):
    (X, y), program = data(), compiled("cuda", OPTIMIZERS[name], mode="fleet")
    held, epochs = (X[-BATCH:], y[-BATCH:]), 3 if SMALL else 12
    fleet = cv.Fleet("16 MiB" if SMALL else "256 MiB", device="cuda")
    rates, (kept, last) = (1.0, 10.0, 100.0), ([], [])
    for rate in rates:
        model = model_of(program, 1)
        model.hyper["learning_rate"] *= rate
        history = model.fit(X, y, epochs=epochs, validation=held, keep_best=True, progress=False)
        last.append((len(history) - 1 if history.kept is None else history.kept, bits(model)))
        hyper = {"learning_rate": model.hyper["learning_rate"]}
        kept.append(fleet.add(program, data=(X, y), seed=1, hyper=hyper, validation=held, keep_best=True))
    fleet.fit(epochs, progress=False)
    assert [(handle.kept, bits(handle.model)) for handle in kept] == last


def test_more_models_than_fit_take_turns_with_the_same_bits():
    program = compiled("cuda", mode="fleet")
    seeds = range(6)
    roomy, tight = fleet_of(program, seeds), fleet_of(program, seeds, memory=2 * (program.heap_bytes + 64))
    for fleet in (roomy, tight):
        fleet.fit(2, progress=False)
    assert tight.heap.stats.switches > 0
    for one, other in zip(roomy.handles.values(), tight.handles.values()):
        assert bits(one.model) == bits(other.model)


def test_a_model_of_a_fleet_that_fails_is_alone_in_it(monkeypatch):
    monkeypatch.setattr(base_model, "_check_labels", lambda *a: None)
    X, y = data(BATCH * 2)
    program = compiled("cuda", cv.SGD(0.05), mode="fleet")
    fleet = cv.Fleet(4 * (program.heap_bytes + 256), device="cuda")
    bad = np.where(np.arange(len(X))[:, None] == 3, np.inf, X).astype(np.float32)
    fleet.add(program, data=(X, y), name="fine")
    fleet.add(program, data=(bad, y), name="diverges")
    fleet.add(program, data=(X, y + SIZES[-1]), name="traps")
    status = {handle.name: handle.status for handle in fleet.fit(2, progress=False)}
    assert status["fine"] == "done" and status["diverges"] == "not finite"
    assert status["traps"] not in ("done", "not finite"), status


# ---------------------------------------------------------------- heaps and files
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("in_files", [False, True])
def test_models_that_share_a_heap_have_the_bits_of_models_that_never_left(mode, in_files, tmp_path):
    X, y = data(BATCH)
    programs = [compiled("cuda", optimizer, **MODES[mode]) for optimizer in (cv.Adam(1e-3), cv.SGD(0.05, momentum=0.9))]
    room = max(program.heap_bytes for program in programs)
    store = cv.FileStore(tmp_path, durable=False) if in_files else None
    with cv.CalcHeap(room, store, device="cuda") as heap:
        shared = [heap.create(program, seed=k) for k, program in enumerate(programs * 2)]
        alone = [model_of(program, k) for k, program in enumerate(programs * 2)]
        for k in np.random.default_rng(0).integers(0, 4, 12 if SMALL else 60):
            assert shared[k].step(X, y) == alone[k].step(X, y)
        assert heap.stats.switches > 5
        for one, other in zip(shared, alone):
            assert bits(one) == bits(other)


@pytest.mark.parametrize("mode", ["all blocks", "graph"])
def test_a_model_that_was_saved_goes_on_with_the_same_bits(mode, tmp_path):
    X, y = data()
    gpu = pair(**MODES[mode])[1]
    gpu.fit(X, y, epochs=2, progress=False)
    gpu.save(tmp_path / "model.calc")
    other = cv.load(tmp_path / "model.calc")
    assert other.program.info["device"] == "cuda" and bits(other) == bits(gpu)
    assert other.predict(X).tobytes() == gpu.predict(X).tobytes()
    losses = [m.fit(X, y, epochs=2, progress=False)["loss"] for m in (gpu, other)]
    assert losses[0] == losses[1] and bits(other) == bits(gpu)


def test_parameters_go_from_device_to_device():
    """What the GPU has trained predicts on the CPU, and the other way round: parameters are initial arrays there."""
    X, y = data()
    cpu, gpu = pair(**MODES["all blocks"])
    for trained, device, how in ((gpu, "cpu", {"workers": 1}), (cpu, "cuda", MODES["all blocks"])):
        trained.fit(X, y, epochs=2, progress=False)
        values = [np.array(value) for value in trained.parameters.values()]
        net = None
        for w, b in zip(values[::2], values[1::2]):
            layer = nn.Linear(w.shape[1], init=w, bias_init=b)
            net = layer if net is None else net >> nn.Sigmoid() >> layer
        there = model_of(compiled(device, net=net, **how))
        for mine, given in zip(there.parameters.values(), values):
            np.testing.assert_array_equal(mine, given)
        np.testing.assert_allclose(there.predict(X), trained.predict(X), rtol=1e-4, atol=1e-5)


def test_a_copy_and_a_reset():
    X, y = data(BATCH)
    program = compiled("cuda", **MODES["all blocks"])
    model = cv.CalcHeap(2 * program.heap_bytes + 256, device="cuda").create(program, seed=1)
    start = bits(model)
    first = [model.step(X, y) for _ in range(3)]
    twin = model.copy()
    assert [twin.step(X, y) for _ in range(3)] == [model.step(X, y) for _ in range(3)]
    model.reset(seed=1)
    assert bits(model) == start and [model.step(X, y) for _ in range(3)] == first


def test_parameters_are_copies_that_cannot_be_written_to():
    model = model_of(compiled("cuda", **MODES["all blocks"]))
    value = next(iter(model.parameters.values()))
    with pytest.raises(ValueError, match="read-only"):
        value[...] = 0
    with pytest.raises(cv.CalcError, match="cuda"):
        _ = model.elements


# ---------------------------------------------------------------- users' equations
@pytest.mark.parametrize(
    "text",
    [
        "y[b,i] = w[i]*x[b,i]/sqrt(mean[j] x[b,j]*x[b,j] + 0.01)",
        "y[b,o<4] = max[k<3] w[t[b]]*tanh(x[b, 2*o + k - 1])",
    ],
)
def test_users_equations(text):
    """Values and gradients are the processor's; one block and all give the same bits."""
    rng, n = np.random.default_rng(5), 8 if SMALL else 300
    x, t, w = rng.standard_normal((BATCH, n)), rng.integers(0, n, BATCH), rng.standard_normal(n)
    g = cv.CalcGraph()
    of = {"x": g.placeholder("x", (None, n)), "w": g.parameter("w", (n,), init=w)}
    given = {**of, "t": g.placeholder("t", (None,), "int64")} if "t[b]" in text else of
    with g.path("p"):
        y = cv.equation(text, **given, fused=True).rename("y")
        for name, operand in of.items():
            cv.gradient(cv.sum(y * y), operand).rename(f"d{name}")
    outcomes = []
    for device, how in (("cpu", {}), ("cuda", MODES["one block"]), ("cuda", MODES["all blocks"])):
        program = cv.compile(g, batch_size=BATCH, device=device, keep=("y", "dx", "dw"), **how)
        assert any(row.startswith("equation_") for row, _ in program.instructions)
        with cv.CalcHeap(program.heap_bytes, device=device) as heap:
            model = heap.create(program)
            for name, value in (("x", x), ("t", t)):
                if name in given:
                    model[name] = value
            model.forward("p")
            outcomes.append([np.array(model[name]) for name in ("y", "dx", "dw")])
    for want, one, all_ in zip(*outcomes):
        np.testing.assert_allclose(one, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())
        assert one.tobytes() == all_.tobytes()

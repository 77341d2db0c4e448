"""fit, evaluate, predict, save and load, and the errors of bad input, which lose nothing."""

import math
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.vm.memory.epoch import Epoch, shuffling_key
from calcvm.vm.program.encoding import MODEL_VERSION
from calcvm.vm.program.serialize import read_archive, write_archive
from calcvm.vm.run.entry import entry
from calcvm.vm.run.samples import LANES


def quadrants(n=400, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1, 1, (n, 2)).astype("float32")
    return X, (X[:, 0] * X[:, 1] > 0).astype("int64")


def make(**options):
    defaults = dict(input_shape=(2,), optimizer=cv.Adam(0.01), batch_size=50, seed=0)
    return cv.Model(nn.Linear(16) >> nn.Tanh() >> nn.Linear(2), **{**defaults, **options})


def bits(model):
    return {k: v.tobytes() for k, v in model.parameters.items()}


def test_it_learns_and_reports(capsys, monkeypatch):
    monkeypatch.setattr("calcvm.progress._left", (-1e9, None))  # what other tests have said in the last two seconds
    X, y = quadrants()
    model = make()
    history = model.fit(X, y, epochs=60, validation=0.25)
    assert history["loss"][-1] < history["loss"][0] / 2 and history["val_accuracy"][-1] > 0.9
    assert len(history) == 60 and "epoch 60/60" in capsys.readouterr().err
    accuracy = np.mean(model.predict(X).argmax(1) == y)
    assert model.evaluate(X, y)["accuracy"] == pytest.approx(accuracy, abs=1e-6)


def test_early_stopping():
    X, y = quadrants()
    history = make(optimizer=cv.SGD(0.0)).fit(X, y, epochs=50, validation=0.2, patience=3, progress=False)
    assert len(history) == 4 and "has not fallen for 3 epochs" in history.stopped


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("learning_batch", [None, 120])
def test_epochs_one_after_the_other_are_those_of_fit(workers, shuffle, learning_batch):
    X, y = quadrants(430)
    models = [make(workers=workers, learning_batch=learning_batch) for _ in range(2)]
    history = models[0].fit(X, y, epochs=7, shuffle=shuffle, progress=False)
    train = Epoch(models[1], {"input": X, "target": y}, "learn", train=True, learning=learning_batch, results=["loss"])
    losses = []
    for n, seconds in ((1, 0.1), (5, 0.0), (1, 0.1)):  # also with a look at Python after every round
        losses += [loss for (loss,) in train.epochs(n, seconds, shuffle)]
    assert losses == history["loss"] and bits(models[0]) == bits(models[1])
    assert models[1].epochs_done == 7


def test_epochs_go_on_after_a_loss_that_is_not_finite_and_stop_at_a_trap():
    X, y = quadrants()
    model = make(loss="mse", optimizer=cv.SGD(1e30))
    data = {"input": X, "target": np.stack([y, y], 1)}
    train = Epoch(model, data, "learn", train=True, results=["loss"])
    losses = [loss for (loss,) in train.epochs(5, 0.1)]
    assert len(losses) == 5 and np.isnan(losses[-1])
    model, labels = make(), y.copy()
    train = Epoch(model, {"input": X, "target": labels}, "learn", train=True, results=["loss"])
    labels[:] = 7  # behind the back of what has checked them
    with pytest.raises(cv.Trap, match="label"):
        list(train.epochs(3, 0.1))


@pytest.mark.parametrize("dtype", ["float64", "uint8", "int32", "int64", "int16", "bool"])
def test_every_dtype_of_data_trains_as_float32_does(dtype):
    rng = np.random.default_rng(1)
    X = rng.integers(0, 2, (130, 2)).astype(dtype)
    y = rng.integers(0, 2, 130)
    models = [make(), make()]
    for model, data in zip(models, (X, X.astype("float32"))):
        model.fit(data, y, epochs=2, progress=False)
    assert bits(models[0]) == bits(models[1])


def test_bytes_scaled_by_a_preprocessing_path():
    rng = np.random.default_rng(1)
    X, y = rng.integers(0, 256, (130, 2)).astype("uint8"), rng.integers(0, 2, 130)
    raw = make(preprocess=nn.Scale(1 / 255), dtype="float64")
    scaled = make(dtype="float64")
    raw.fit(X, y, epochs=3, progress=False)
    scaled.fit(X * (1 / 255), y, epochs=3, progress=False)
    for name, value in scaled.parameters.items():
        np.testing.assert_allclose(raw.parameters[name], value, rtol=1e-12)
    np.testing.assert_allclose(raw.predict(X), scaled.predict(X / 255), rtol=1e-12)
    assert raw.step(X[:50], y[:50]) == pytest.approx(scaled.step(X[:50] / 255, y[:50]))


def orders(n: int, epochs: int, seed: int) -> np.ndarray:
    """The order of n samples in each epoch, shape (epochs, n)."""
    permute, out = entry("permute"), np.zeros((epochs, -(-n // LANES) * LANES), np.int64)
    for epoch, row in enumerate(out):
        for first in range(0, n, LANES):
            permute(row[first:].ctypes.data, first, n - 1, n, shuffling_key(seed, epoch))
    return out[:, :n]


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 8, 9, 16, 17, 33, 64, 65, 128, 300])
def test_every_order_is_about_as_likely_as_another(n):
    """Of orders at random, both quotients of variances are 1 on the mean."""
    found = np.concatenate([orders(n, 2000, seed) for seed in range(3)])
    assert (np.sort(found, axis=1) == np.arange(n)).all()
    places = np.stack([np.bincount(found[:, k], minlength=n) for k in range(n)])  # where samples are in an epoch
    pairs = np.bincount((found[:, :-1] * n + found[:, 1:]).ravel(), minlength=n * n)  # which follow each other
    pairs = pairs.reshape(n, n)[~np.eye(n, dtype=bool)]
    for counts, freedom in ((places, (n - 1) ** 2), (pairs, max(pairs.size - 1, 1))):
        mean = counts.mean()
        assert ((counts - mean) ** 2).sum() / mean / freedom < (4 if n < 6 else 1.5)
    assert len(np.unique(found, axis=0)) >= min(math.factorial(min(n, 9)), 4000)


def test_shuffling_visits_every_sample_once_in_a_new_order():
    X = np.arange(1, 1001, dtype="float64").reshape(-1, 1)
    seen = []
    model = cv.Model(nn.Linear(1, bias=False, init=cv.init.Zeros()), input_shape=(1,), loss="mse",
                     optimizer=cv.SGD(0.0), batch_size=1, dtype="float64")  # fmt: skip
    # With weight 0 and batches of one the loss is the square of the sample: read it after each round.
    for key in (1, 2):
        run = Epoch(model, {"input": X, "target": X}, "learn", results=["loss"])
        run.begin(key)
        order = []
        for run._done in range(1000):
            total = run._sums.array[0]
            run._run(1)
            order.append(round((run._sums.array[0] - total) ** 0.5))
        assert sorted(order) == list(range(1, 1001))
        seen.append(order)
    assert seen[0] != seen[1] and seen[0] != sorted(seen[0])


def test_save_and_load_go_on_bit_for_bit(tmp_path):
    X, y = quadrants()
    net = nn.Linear(16) >> nn.Tanh() >> nn.Dropout(0.2) >> nn.Linear(2)
    model = cv.Model(net, input_shape=(2,), optimizer=cv.Adam(0.01), batch_size=50, seed=5)
    model.fit(X, y, epochs=2, progress=False)
    model.save(tmp_path / "m.calc")
    loaded = cv.load(tmp_path / "m.calc")
    assert bits(loaded) == bits(model) and loaded.program == model.program
    for m in (model, loaded):
        m.fit(X, y, epochs=2, progress=False)
    assert bits(loaded) == bits(model)


def test_damaged_model_files_are_refused_by_name(tmp_path):
    model, path = make(), tmp_path / "m.calc"
    model.save(path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    damaged = [whole[: len(whole) // 2], whole[:-1], b"", b"PK nothing", whole + b"x"]
    for _ in range(100):  # one flipped bit each
        data = bytearray(whole)
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        damaged.append(bytes(data))
    refused = 0
    for data in damaged:
        path.write_bytes(data)
        try:
            loaded = cv.load(path)
        except cv.ProgramError as error:
            assert str(path) in str(error)
            refused += 1
        else:  # a bit that no reader of zip files looks at
            assert bits(loaded) == bits(model)
    assert refused >= 95
    model.program.save(path)
    with pytest.raises(cv.ProgramError, match="holds a program, not a model"):
        cv.load(path)
    model.save(path)
    archive = read_archive(path, kinds={"model": MODEL_VERSION})
    write_archive(path, archive.documents, archive.arrays, kind="model", version=99)
    with pytest.raises(cv.ProgramError, match="format 99"):
        cv.load(path)


def test_hyperparameters_change_without_compiling():
    X, y = quadrants(50)
    model = make(optimizer=cv.SGD(0.1))
    before = bits(model)
    model.hyper["learning_rate"] = 0.0
    model.step(X, y)
    assert bits(model) == before
    with pytest.raises(cv.CalcError, match="no hyperparameter 'lr'"):
        model.hyper["lr"] = 1.0


REFUSED = {
    "rank": (lambda X, y: (X[0], y[:2]), cv.ShapeError, r"rank 1"),
    "sizes": (lambda X, y: (np.ones((400, 3)), y), cv.ShapeError, r"\(400, 3\).*\(B, 2\)"),
    "counts": (lambda X, y: (X, y[:7]), cv.ShapeError, "400 samples, y has 7"),
    "empty": (lambda X, y: (X[:0], y[:0]), cv.CalcError, "empty"),
    "dtype": (lambda X, y: (X.astype(str), y), cv.CalcError, "dtype <U"),
    "complex": (lambda X, y: (X + 1j, y), cv.CalcError, "complex"),
    "label too large": (lambda X, y: (X, y + 1), cv.CalcError, r"integers in \[0, 2\); found 1 to 2"),
    "label negative": (lambda X, y: (X, y - 1), cv.CalcError, r"found -1 to 0"),
    "label fraction": (lambda X, y: (X, y / 2), cv.CalcError, "labels must be integers"),
    "label NaN": (lambda X, y: (X, np.where(y, np.nan, 0)), cv.CalcError, "labels must be integers"),
    "NaN": (lambda X, y: (np.where(np.arange(800).reshape(400, 2) == 333, np.nan, X), y), cv.CalcError, r"\(166, 1\)"),
    "Inf": (lambda X, y: (np.where(np.arange(800).reshape(400, 2) == 9, np.inf, X), y), cv.CalcError, r"inf.*\(4, 1\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_data_are_refused_before_anything_runs(case):
    change, error, message = REFUSED[case]
    model = make()
    before = bits(model)
    with pytest.raises(error, match=message):
        model.fit(*change(*quadrants()), epochs=1, check_finite=True, progress=False)
    assert bits(model) == before


def test_bad_steps_and_reads():
    X, y = quadrants()
    model = make()
    before = bits(model)
    with pytest.raises(cv.CalcError, match="batch of 400 is above the planned 50"):
        model.step(X, y)
    with pytest.raises(cv.ShapeError, match="number of samples"):
        model.step(X[:50], y[:49])
    with pytest.raises(cv.CalcError, match=r"labels must be integers in \[0, 2\)"):
        model.step(X[:50], y[:50] + 5)
    with pytest.raises(cv.CalcError, match="never set"):
        model.run_steps(3)
    with pytest.raises(cv.CalcError, match="path 'learn', which has not been run"):
        model["loss"]
    with pytest.raises(cv.CalcError, match="no variable 'losss'"):
        model["losss"]
    with pytest.raises(cv.CalcError, match="is a parameter"):
        model["linear_1.weight"] = np.zeros((2, 16))
    assert bits(model) == before


def test_a_trap_names_the_row():
    X, y = quadrants(50)
    model = make()
    model.step(X, y)
    symbol = model.program.symbol("target")
    model.elements[symbol.offset] = 7  # behind the setter's back
    with pytest.raises(cv.Trap, match="softmax_cross_entropy.*label"):
        model.run_steps(1)
    model.step(X, y)


def test_a_heap_too_small_says_both_numbers():
    program = make().program
    with pytest.raises(cv.PlanError) as error:
        cv.CalcHeap(program.heap_bytes - 1).create(program)
    assert (error.value.needed, error.value.allowed) == (program.heap_bytes, program.heap_bytes - 1)


def test_two_models_side_by_side():
    X, y = quadrants(50)
    program = make().program
    heap = cv.CalcHeap(3 * program.heap_bytes)
    a, b = heap.create(program, seed=0), heap.create(program, seed=1)
    alone = cv.CalcHeap(program.heap_bytes).create(program, seed=1)
    for m in (a, b, alone):
        m["input"], m["target"] = X, y
        m.run_steps(5, "learn")
    np.testing.assert_array_equal(b["linear_1.weight"], alone["linear_1.weight"])
    a.close()
    assert heap.free_bytes == 2 * program.heap_bytes


def test_ctrl_c_leaves_a_consistent_model():
    code = """
import numpy as np, calcvm as cv
from calcvm import nn
rng = np.random.default_rng(0)
X, y = rng.standard_normal((50000, 20)), rng.integers(0, 3, 50000)
m = cv.Model(nn.Linear(64) >> nn.Tanh() >> nn.Linear(3), input_shape=(20,), optimizer=cv.Adam(), batch_size=32)
m.step(X[:32], y[:32])
m.fit(X[:32], y[:32], progress=False)  # what is compiled at first use is there
print("ready", flush=True)
h = m.fit(X, y, epochs=100000, progress=False)
assert h.stopped == "interrupted", h.stopped
assert all(np.isfinite(v).all() for v in m.parameters.values())
print("done", m.step(X[:32], y[:32]) > 0, flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "ready\n"
        threading.Event().wait(1.0)
        child.send_signal(signal.SIGINT)
        out, _ = child.communicate(timeout=60)
        assert (out, child.returncode) == ("done True\n", 0)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()

"""Fleets: the bits of `Model.fit` for any workers, order and heap; stopping, quotas, stores, bad input."""

from __future__ import annotations

import copy
import pickle
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn

RNG = np.random.default_rng(0)
X = RNG.standard_normal((210, 6)).astype(np.float32)
Y = (X[:, 0] + X[:, 1] ** 2 > 0.5).astype(np.int64)


def network(width: int = 8, depth: int = 1, rate: float = 0.0) -> nn.Layer:
    net: nn.Layer = nn.Linear(width) >> nn.Tanh()
    for _ in range(depth - 1):
        net = net >> nn.Linear(width) >> nn.ReLU()
    return (net >> nn.Dropout(rate) if rate else net) >> nn.Linear(2)


def program(
    width: int = 8, depth: int = 1, rate: float = 0.0, optimizer=None, batch: int = 16, **options
) -> cv.Program:
    graph = cv.build_graph(network(width, depth, rate), (6,), "softmax_cross_entropy", optimizer or cv.Adam(1e-2))
    return cv.compile(graph, batch_size=batch, **{"accumulate": False, "workers": 1, **options})


PROGRAMS = {
    "adam": program(),
    "deep": program(12, 3, optimizer=cv.AdamW(1e-2, weight_decay=0.1, no_decay="1d")),
    "dropout": program(10, 2, 0.3),
    "momentum": program(9, optimizer=cv.SGD(0.05, momentum=0.9), batch=7),
    "float64": program(dtype="float64"),
}


def alone(prog: cv.Program, epochs: int, seed: int = 0, data=(X, Y), **fit) -> tuple[cv.Model, cv.History]:
    """The model by itself: what a fleet must reproduce."""
    model = cv.CalcHeap(prog.heap_bytes).create(prog, seed=seed)
    return model, model.fit(*data, epochs=epochs, progress=False, **fit)


def same(handle: cv.Handle, model: cv.Model, history: cv.History) -> None:
    np.testing.assert_array_equal(handle.losses, history["loss"])
    with handle.model:
        for name, value in handle.model.parameters.items():
            np.testing.assert_array_equal(value, model.parameters[name])


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("room", ["all", "few", "one"])
def test_the_bits_of_each_model_alone(workers, room):
    sizes = [p.heap_bytes for p in PROGRAMS.values()]
    memory = {"all": 4 * sum(sizes) + 4096, "few": 3 * max(sizes), "one": max(sizes)}[room]
    fleet = cv.Fleet(memory, workers=workers)
    handles = {(n, s): fleet.add(p, data=(X, Y), seed=s) for s in range(3) for n, p in PROGRAMS.items()}
    fleet.fit(2, progress=False)
    results = fleet.fit(3, progress=False)
    assert [handle.status for handle in results] == ["done"] * 15
    assert (fleet.heap.stats.switches > 0) == (room != "all")
    for (name, seed), handle in handles.items():
        same(handle, *alone(PROGRAMS[name], 5, seed))


OPTIONS = dict(input_shape=(6,), optimizer=cv.Adam(1e-2), batch_size=16)


def test_layers_a_graph_and_a_program_are_one_model():
    """Optimizers that differ in numbers share a program."""
    fleet = cv.Fleet("1 MiB", workers=2)
    graph = cv.build_graph(network(), (6,), "softmax_cross_entropy", cv.Adam(1e-2))
    handles = [
        fleet.add(network(), data=(X, Y), seed=3, **OPTIONS),
        fleet.add(graph, data=(X, Y), seed=3, batch_size=16),
        fleet.add([*network()], data=(X, Y), seed=3, **OPTIONS),
        fleet.add(network(), data=(X, Y), seed=3, **{**OPTIONS, "optimizer": cv.Adam(0.5)}),
        fleet.add(network(), data=(X, Y), seed=3, **OPTIONS, hyper={"learning_rate": 0.5}),
    ]
    fleet.fit(3, progress=False)
    for handle in handles[:3]:
        same(handle, *alone(PROGRAMS["adam"], 3, 3))
    np.testing.assert_array_equal(handles[3].losses, handles[4].losses)
    assert handles[3].loss != handles[0].loss and len({id(h.model.program) for h in handles}) == 1
    assert {(h.model.program.workers, h.model.batch_size) for h in handles} == {(1, 16)}


def test_layers_are_compiled_as_by_model():
    fleet = cv.Fleet("1 MiB", workers=2)
    handles = [
        fleet.add(network(), data=(X, Y), **{**OPTIONS, "batch_size": 8}, learning_batch=50),
        fleet.add(network(), data=(X, Y), input_shape=(6,), optimizer="adam"),
        fleet.add(network(), data=(X, Y), input_shape=(6,), optimizer="adam", dtype="float64", memory="10 KiB"),
    ]
    fleet.fit(2, progress=False)
    models = [
        cv.Model(network(), **{**OPTIONS, "batch_size": 8}, learning_batch=50),
        cv.Model(network(), input_shape=(6,), optimizer="adam"),
        cv.Model(network(), input_shape=(6,), optimizer="adam", dtype="float64", memory="10 KiB"),
    ]
    for handle, model in zip(handles, models):
        same(handle, model, model.fit(X, Y, epochs=2, progress=False))
        assert handle.model.batch_size == model.batch_size and handle.model.learning_batch == model.learning_batch
    assert handles[2].nbytes <= 10240


def test_a_model_is_copied_and_goes_on():
    model = cv.Model(network(rate=0.3), **OPTIONS, seed=5)
    model.fit(X, Y, epochs=2, progress=False)
    fleet = cv.Fleet("1 MiB", workers=2)
    handle = fleet.add(model, data=(X, Y))
    assert handle.epochs_done == 2 and handle.losses.size == 0
    fleet.fit(3, progress=False)
    assert model.epochs_done == 2
    same(handle, model, model.fit(X, Y, epochs=3, progress=False))


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (network(), {"optimizer": "adam"}, "Fleet.add: input_shape is missing"),
        (network(), {"inputshape": (6,)}, "no argument 'inputshape': did you mean input_shape="),
        (network(), {"lerning_batch": 6}, "no argument 'lerning_batch': did you mean learning_batch="),
        (PROGRAMS["adam"], {"batch_size": 3}, "batch_size is an option of layers and graphs: leave it out"),
        (cv.Model(network(), **OPTIONS), {"seed": 3}, "a Model keeps its seed .* add model.program"),
        (cv.build_graph(network(), (6,), "mse", "adam"), {"loss": "mse"}, "has its loss already"),
        (cv.CalcGraph(), {}, "no path trains"),
        (nn.Linear, {}, "layers, a graph, a cv.Model or a program .* is wanted, not the class Linear"),
        (network(), {**OPTIONS, "device": "cuda"}, "compiled for 'cuda', the heap is of device 'cpu'"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(given, options, message):
    fleet = cv.Fleet("1 MiB")
    with pytest.raises(cv.CalcError, match=message):
        fleet.add(given, data=(X, Y), **options)
    assert len(fleet) == 0 and fleet.free_bytes == fleet.heap.nbytes and not fleet.heap.names


def test_a_handle_names_the_attribute_of_what_was_a_column():
    fleet = cv.Fleet("1 MiB")
    handle = fleet.add(PROGRAMS["adam"], data=(X, Y), validation=slice(0, 50))
    fleet.fit(2, progress=False)
    assert handle.figures == {name: fleet.results.column(name)[0] for name in ("loss", "val_loss", "val_accuracy")}
    columns = {"name": "name", "epochs": "epochs_done", "bytes": "nbytes", "val_loss": r"figures\['val_loss'\]", 0: "0"}
    for column, attribute in columns.items():
        with pytest.raises(cv.CalcError, match=f"a handle has attributes: read handle.{attribute} in place of"):
            handle[column]
    with pytest.raises(AttributeError, match="did you mean epochs_done"):
        print(handle.epochs)


def test_one_sample_for_one_of_many_models():
    """By name, with the numbers of each alone; models that do not fit at once take turns."""
    prog = program(batch=1)
    fleet, alone = cv.Fleet(memory=3 * prog.heap_bytes), {}
    for i in range(8):
        fleet.add(prog, data=(X, Y), seed=i, name=f"m{i}")
        alone[f"m{i}"] = cv.CalcHeap(prog.heap_bytes).create(prog, seed=i)
    out = np.empty((1, 2), "float32")
    for k in np.random.default_rng(1).integers(0, 8, 300):
        name, x, y = f"m{k}", X[k : k + 1], Y[k : k + 1]
        assert fleet.step(name, x, y) == alone[name].step(x, y)
        np.testing.assert_array_equal(fleet.predict(name, x), alone[name].predict(x))
        assert fleet.predict(name, x, out=out) is out
    assert fleet.predict("m3", X).shape == (210, 2)
    for call in (lambda: fleet.step("none", X[:1], Y[:1]), lambda: fleet.predict([], X)):
        with pytest.raises(cv.CalcError, match="the fleet has no model .*; it has m0, m1"):
            call()


def test_the_order_does_not_matter():
    losses = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        fleet = cv.Fleet("1 MiB", workers=2)
        handles = {s: fleet.add(PROGRAMS["dropout"], data=(X, Y), seed=s) for s in order}
        fleet.fit(4, progress=False)
        losses.append([handles[s].losses for s in range(4)])
    np.testing.assert_array_equal(*losses)


def test_learning_batches_of_several_rounds():
    prog = program(batch=8, accumulate=True)
    fleet = cv.Fleet("1 MiB", workers=2)
    handle = fleet.add(prog, data=(X, Y), seed=1, learning_batch=50)
    for _ in range(3):
        fleet.advance(1)
    heap = cv.CalcHeap(prog.heap_bytes)
    model = heap.create(prog, seed=1)
    model.learning_batch = 50
    same(handle, model, model.fit(X, Y, epochs=3, progress=False))


def test_samples_by_number_by_slice_and_shared_arrays():
    numbers = np.random.default_rng(1).permutation(210)[:100]
    fleet = cv.Fleet("1 MiB")
    by_number = fleet.add(PROGRAMS["adam"], data=(X, Y), samples=numbers)
    by_slice = fleet.add(PROGRAMS["adam"], data={"target": Y, "input": X}, samples=slice(50, 150), validation=numbers)
    fleet.fit(3, progress=False)
    same(by_number, *alone(PROGRAMS["adam"], 3, data=(X[numbers], Y[numbers])))
    model, history = alone(PROGRAMS["adam"], 3, data=(X[50:150], Y[50:150]), validation=(X[numbers], Y[numbers]))
    same(by_slice, model, history)
    np.testing.assert_array_equal(by_slice.val_losses, history["val_loss"])
    np.testing.assert_array_equal(by_slice.metrics["val_accuracy"], history["val_accuracy"])
    assert by_slice.val_loss == history["val_loss"][-1] and by_slice.loss == history["loss"][-1]


def test_numbers_of_samples_are_read_as_they_were_when_they_were_given():
    fleet, order, rng = cv.Fleet("1 MiB"), np.arange(210), np.random.default_rng(1)
    kept = []
    for _ in range(3):
        rng.shuffle(order)  # one array for all splits
        fleet.add(PROGRAMS["adam"], data=(X, Y), samples=order[:150], validation=order[150:])
        kept.append(order.copy())
    order[:] = 2**40
    fleet.fit(2, progress=False)
    for handle, split in zip(fleet.handles.values(), kept):
        train, held = (X[split[:150]], Y[split[:150]]), (X[split[150:]], Y[split[150:]])
        model, history = alone(PROGRAMS["adam"], 2, data=train, validation=held)
        same(handle, model, history)
        np.testing.assert_array_equal(handle.val_losses, history["val_loss"])
    before = kept[0][:150].copy()
    shared = [fleet.add(PROGRAMS["adam"], data=(X, Y), samples=before.copy())._train._index for _ in range(2)]
    assert shared[0] is shared[1]


def test_models_that_are_judged_come_and_go_between_epochs():
    """The table of tasks grows while judges lie in it, and their places are given to others."""
    fleet = cv.Fleet("2 MiB", workers=2)
    held = (X[150:], Y[150:])

    def add(n):
        return [fleet.add(PROGRAMS["adam"], data=(X, Y), validation=held, seed=3) for _ in range(n)]

    first = add(20)
    fleet.advance(2)
    for handle in first[5:10]:
        handle.close()
    second = add(80)
    fleet.advance(2)
    _, history = alone(PROGRAMS["adam"], 4, 3, validation=held)
    for handle in first[:5] + first[10:]:
        np.testing.assert_array_equal(handle.val_losses, history["val_loss"])
    for handle in second:
        np.testing.assert_array_equal(handle.val_losses, history["val_loss"][:2])


def test_patience_is_that_of_fit():
    held = (X[150:], Y[150:])
    fleet = cv.Fleet("1 MiB", workers=2)
    rates = [1e-3, 1e-1, 1.0]
    handles = [
        fleet.add(PROGRAMS["adam"], data=(X[:150], Y[:150]), validation=held, patience=2, hyper={"learning_rate": r})
        for r in rates
    ]
    fleet.fit(30, progress=False)
    for rate, handle in zip(rates, handles):
        model = cv.CalcHeap("1 MiB").create(PROGRAMS["adam"])
        model.hyper["learning_rate"] = rate
        history = model.fit(X[:150], Y[:150], epochs=30, validation=held, patience=2, progress=False)
        same(handle, model, history)
        assert (handle.status == "stopped early") == (len(history) < 30)
    assert {h.status for h in handles} == {"done", "stopped early"}


@pytest.mark.parametrize("room", ["all", "one", "files"])
def test_keep_best_is_that_of_fit(room, tmp_path):
    """Parameters, buffers and the optimizer's state after the best epoch, which is not the last of every model."""
    programs = [*PROGRAMS.values(), program(batch=8, accumulate=True), normalized()]
    held, rates = (X[150:], Y[150:]), (1e-3, 1e-1, 1.0)
    memory = max(p.heap_bytes for p in programs) if room == "one" else "1 MiB"
    store = cv.FileStore(tmp_path) if room == "files" else None
    fleet, kept = cv.Fleet(memory, workers=2, store=store), []
    for program_ in programs:
        for rate in rates:
            how = {"learning_batch": 20} if program_ is programs[-2] else {}
            hyper = {"learning_rate": rate}
            fleet.add(
                program_, data=(X[:150], Y[:150]), validation=held, hyper=hyper, keep_best=True, patience=6, **how
            )
    fleet.fit(9, progress=False)
    for k, handle in enumerate(fleet.handles.values()):
        model = cv.CalcHeap("1 MiB").create(programs[k // 3])
        model.hyper["learning_rate"] = rates[k % 3]
        if programs[k // 3] is programs[-2]:
            model.learning_batch = 20
        history = model.fit(X[:150], Y[:150], epochs=9, validation=held, patience=6, keep_best=True, progress=False)
        same(handle, model, history)
        assert handle.kept == (len(history) - 1 if history.kept is None else history.kept)
        kept.append(history.kept)
        assert handle.model.step(X[:7], Y[:7]) == model.step(X[:7], Y[:7])
        same(handle, model, history)
    assert None in kept and len({*kept}) > 3


def test_keep_best_is_of_all_calls_of_fit_in_a_fleet_and_of_one_in_a_model():
    held, fleet, kept = (X[150:], Y[150:]), cv.Fleet("1 MiB", workers=1), set()
    for rate in (1e-3, 1.0, 30.0):
        fleet.add(
            PROGRAMS["adam"], data=(X[:150], Y[:150]), validation=held, hyper={"learning_rate": rate}, keep_best=True
        )
    for calls in (1, 2, 3):
        fleet.fit(3, progress=False)
        for handle in fleet.handles.values():
            assert len(handle.val_losses) == 3 * calls and handle.kept == handle.val_losses.argmin()
            assert handle.model.evaluate(*held)["loss"] == pytest.approx(handle.val_losses.min(), rel=1e-5)
            kept.add((calls, handle.kept))
    assert any(epoch < 3 * (calls - 1) for calls, epoch in kept) and any(epoch >= 3 for _, epoch in kept)
    model = cv.CalcHeap("1 MiB").create(PROGRAMS["adam"])
    model.hyper["learning_rate"] = 30.0
    found = [model.fit(X[:150], Y[:150], epochs=3, validation=held, keep_best=True, progress=False) for _ in range(3)]
    assert model.evaluate(*held)["loss"] == pytest.approx(min(found[-1]["val_loss"]), rel=1e-5)
    assert min(found[-1]["val_loss"]) > min(found[0]["val_loss"])


def normalized() -> cv.Program:
    """With buffers."""
    net = nn.Linear(8) >> nn.BatchNorm() >> nn.ReLU() >> nn.Linear(2)
    graph = cv.build_graph(net, (6,), "softmax_cross_entropy", cv.Adam(1e-2))
    return cv.compile(graph, batch_size=15, workers=1)


def trained_elsewhere(fleet: cv.Fleet) -> threading.Thread:
    """The thread that trains it, until its models are stopped; each of them is through an epoch."""
    training = threading.Thread(target=lambda: fleet.fit(1_000_000, progress=False))
    training.start()
    while not all(h.epochs_done for h in fleet.handles.values()):
        time.sleep(0.01)
    return training


def test_copies_while_another_thread_trains_the_fleet_are_of_one_moment(tmp_path):
    """What a model has learnt, and how many epochs that took."""
    fleet = cv.Fleet("1 MiB", workers=1)
    handles = [fleet.add(PROGRAMS["adam"], data=(X, Y), seed=s) for s in range(4)]
    training = trained_elsewhere(fleet)
    copies = []
    for k, handle in enumerate(handles):
        handle.model.save(tmp_path / f"{k}.calc")
        copies += [cv.load(tmp_path / f"{k}.calc"), copy.copy(handle.model), pickle.loads(pickle.dumps(handle.model))]
        copies.append(handle.model.copy(heap=cv.CalcHeap("1 MiB")))
    for handle in handles:
        handle.stop()
    training.join()
    for model in copies:
        steps = -(-len(X) // model.batch_size)
        assert model.epochs_done == model.steps_done // steps > 0


def test_a_model_is_stopped_and_closed_while_another_thread_trains_the_fleet():
    fleet = cv.Fleet("1 MiB", workers=2)
    handles = [fleet.add(PROGRAMS["adam"], data=(X, Y), seed=s) for s in range(8)]
    training = trained_elsewhere(fleet)
    for handle in handles[:3]:
        handle.stop()
        handle.close()
    handles[3].close()
    assert [*fleet.handles.values()] == handles[4:]
    for handle in handles[4:]:
        handle.stop()
    training.join(30)
    assert not training.is_alive() and all(np.isfinite(h.loss) for h in handles)


@pytest.mark.parametrize("files", [False, True])
def test_models_that_wait_predict_while_others_train(files, tmp_path, monkeypatch):
    monkeypatch.setattr(cv.fleet.fleet, "STAY", 1e9)  # only those that predict take turns
    store = cv.FileStore(tmp_path) if files else None
    fleet = cv.Fleet(3 * PROGRAMS["adam"].heap_bytes, workers=1, store=store)
    handles = [fleet.add(PROGRAMS["adam"], data=(X, Y), seed=s) for s in range(8)]
    training = threading.Thread(target=lambda: fleet.fit(1_000_000, progress=False, checkpoint="end"))
    looking = threading.Thread(target=lambda: [h.model.predict(X) for h in 2 * handles[::-1]])
    training.start()
    while not any(h.epochs_done for h in handles):
        time.sleep(0.01)
    looking.start()
    looking.join(30)
    waited = looking.is_alive()
    for handle in handles:
        handle.stop()
    training.join()
    looking.join()
    assert not waited
    fleet.close()


def test_a_figure_that_is_not_there_is_said():
    g = cv.CalcGraph()
    x, t = g.placeholder("x", (None, 6)), g.placeholder("t", (None, 2))
    w = g.parameter("w", (6, 2))
    with g.path("learn", backward=True) as learn:
        learn.minimize(cv.mse(x @ w, t), cv.Adam(1e-2))
    with g.path("predict") as predict:
        predict.output = x @ w
        cv.mean(cv.abs(predict.output - t)).rename("error")
    fleet, y = cv.Fleet("1 MiB"), np.zeros((210, 2))
    handle = fleet.add(cv.compile(g, batch_size=10), data=(X, y), validation=(X[:9], y[:9]))
    fleet.fit(1, progress=False)
    assert handle.kept is None and len(handle.metrics["val_error"]) == 1
    with pytest.raises(cv.CalcError, match="has the figures val_error, and no val_loss: read handle.metrics"):
        print(handle.val_loss)


def test_the_best_is_that_of_all_epochs_and_kept_where_training_fails():
    held = (X[150:], Y[150:])
    fleet = cv.Fleet("1 MiB", workers=2)
    handle = fleet.add(program(optimizer=cv.SGD(0.05)), data=(X[:150], Y[:150]), validation=held, keep_best=True)
    other = fleet.add(PROGRAMS["adam"], data=(X[:150], Y[:150]), validation=held)
    fleet.fit(4, progress=False)
    assert handle.kept == 3 and other.kept is None
    best = {name: value.copy() for name, value in handle.model.parameters.items()}
    for rate, status in ((30.0, "done"), (1e38, "not finite")):
        handle.model.hyper["learning_rate"] = rate
        fleet.advance(1)
        if status == "done":
            assert (handle.model.parameters["linear_1.weight"] != best["linear_1.weight"]).any()
            fleet.fit(3, progress=False)
        assert handle.kept == 3 and handle.status == status and not handle.val_loss <= handle.val_losses[3]
        for name, value in handle.model.parameters.items():
            np.testing.assert_array_equal(value, best[name])


def test_epochs_of_its_own_and_advancing_each_by_its_own():
    fleet = cv.Fleet("1 MiB", workers=2)
    a = fleet.add(PROGRAMS["adam"], data=(X, Y), epochs=2)
    b = fleet.add(PROGRAMS["adam"], data=(X, Y))
    fleet.fit(5, progress=False)
    assert (a.epochs_done, b.epochs_done) == (2, 5)
    assert fleet.advance({a: 3, b: 0}) == [a]
    assert (a.epochs_done, b.epochs_done) == (5, 5)
    np.testing.assert_array_equal(a.losses, b.losses)
    b.stop("enough")
    assert fleet.advance(1) == [a] and (b.status, b.error, b.epochs_done) == ("stopped", "enough", 5)


def test_a_loss_that_is_not_finite_stops_that_model_only():
    broken = X.copy()
    broken[3, 2] = np.nan
    fleet = cv.Fleet("1 MiB", workers=2)
    bad = fleet.add(PROGRAMS["adam"], data=(broken, Y), name="bad")
    good = fleet.add(PROGRAMS["adam"], data=(X, Y))
    results = fleet.fit(4, progress=False)
    assert (bad.status, bad.epochs_done) == ("not finite", 1) and "nan" in bad.error
    same(good, *alone(PROGRAMS["adam"], 4))
    assert results.best(1, "loss") == [good] and "not finite" in str(results)
    assert fleet.advance(1) == [good]


def test_a_trap_is_reported_and_the_others_go_on():
    labels = Y.copy()
    fleet = cv.Fleet("1 MiB", workers=2)
    bad = fleet.add(PROGRAMS["adam"], data=(X, labels))
    good = fleet.add(PROGRAMS["adam"], data=(X, Y))
    labels[5] = 9  # behind the check's back
    fleet.fit(2, progress=False)
    assert bad.status == "trapped" and "label" in bad.error and good.status == "done"
    same(good, *alone(PROGRAMS["adam"], 2))


def test_what_does_not_fit_is_refused_with_the_bytes():
    prog = PROGRAMS["deep"]
    fleet = cv.Fleet(prog.heap_bytes)
    with pytest.raises(cv.PlanError, match="quota") as error:
        fleet.add(prog, data=(X, Y), memory=1000)
    assert (error.value.needed, error.value.allowed) == (prog.heap_bytes, 1000)
    with pytest.raises(cv.PlanError) as error:
        cv.Fleet(prog.heap_bytes - 64).add(prog, data=(X, Y))
    assert (error.value.needed, error.value.allowed) == (prog.heap_bytes, prog.heap_bytes - 64)
    assert len(fleet) == 0 and fleet.free_bytes == prog.heap_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": (X,)}, "2 arrays are wanted"),
        ({"data": {"input": X}}, "wanted are input, target"),
        ({"data": (X[:, :5], Y)}, "do not fit"),
        ({"data": (X[:10], Y)}, "differ in their number"),
        ({"data": (X, Y + 1)}, "labels must be integers"),
        ({"samples": np.array([0, 210])}, "there are 210 samples"),
        ({"samples": np.array([-1])}, "there are 210 samples"),
        ({"samples": np.array([0.5])}, "indexes of samples"),
        ({"patience": 3}, "patience needs validation"),
        ({"keep_best": True}, "keep_best needs validation"),
        ({"hyper": {"learning_rat": 1.0}}, "learning_rat"),
        ({"hyper": {"learning_rate": float("nan")}}, "must be a number >= 0, not nan"),
        ({"name": "first"}, "has a model 'first'"),
        ({"name": ""}, "non-empty"),
    ],
)
def test_bad_input_adds_nothing(change, message):
    fleet = cv.Fleet("1 MiB")
    fleet.add(PROGRAMS["adam"], data=(X, Y), name="first")
    free = fleet.free_bytes
    with pytest.raises(cv.CalcError, match=message):
        fleet.add(PROGRAMS["adam"], **{"data": (X, Y), **change})
    assert len(fleet) == 1 and fleet.free_bytes == free and fleet.heap.names == ["first"]


def test_closing_gives_the_slice_back_and_the_rest_is_unchanged():
    fleet = cv.Fleet(2 * PROGRAMS["adam"].heap_bytes)
    a, b = (fleet.add(PROGRAMS["adam"], data=(X, Y), seed=s) for s in range(2))
    fleet.advance(1)
    a.close()
    assert a.status == "closed" and fleet.free_bytes == PROGRAMS["adam"].heap_bytes and list(fleet.handles) == [b.name]
    c = fleet.add(PROGRAMS["adam"], data=(X, Y), seed=2)
    fleet.advance(2)
    assert fleet.heap.stats.switches == 0
    same(b, *alone(PROGRAMS["adam"], 3, 1))
    same(c, *alone(PROGRAMS["adam"], 2, 2))


def test_a_handle_that_is_closed_again_leaves_another_of_its_name_alone():
    fleet = cv.Fleet("1 MiB", workers=1)
    old = fleet.add(PROGRAMS["adam"], data=(X, Y), name="m")
    old.close()
    new = fleet.add(PROGRAMS["adam"], data=(X, Y), name="m")
    old.close()
    assert fleet.handles == {"m": new} and old.status == "closed" and old.losses.size == 0
    fleet.fit(2, progress=False)
    assert new.epochs_done == 2


def test_a_file_store_keeps_every_epoch_and_another_fleet_goes_on(tmp_path):
    fleet = cv.Fleet(2 * PROGRAMS["dropout"].heap_bytes, workers=2, store=cv.FileStore(tmp_path))
    for s in range(5):
        fleet.add(PROGRAMS["dropout"], data=(X, Y), seed=s, name=f"user {s}")
    fleet.fit(3, progress=False)
    fleet.heap.close()
    fleet = cv.Fleet(2 * PROGRAMS["dropout"].heap_bytes, store=cv.FileStore(tmp_path))
    assert fleet.heap.names == [f"user {s}" for s in range(5)]
    handles = [fleet.add(name, data=(X, Y)) for name in fleet.heap.names]
    assert [h.epochs_done for h in handles] == [3] * 5
    fleet.fit(2, progress=False)
    for s, handle in enumerate(handles):
        model, history = alone(PROGRAMS["dropout"], 5, s)
        np.testing.assert_array_equal(handle.losses, history["loss"][3:])
        np.testing.assert_array_equal(handle.model.predict(X), model.predict(X))
    with pytest.raises(cv.CalcError, match="has a model 'user 1'"):
        fleet.add("user 1", data=(X, Y))
    fleet.heap.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_training_with_the_store_in_order(tmp_path, number):
    code = f"""
import numpy as np, calcvm as cv
from tests.test_fleet import PROGRAMS, X, Y
fleet = cv.Fleet("1 MiB", workers=2, store=cv.FileStore({str(tmp_path)!r}))
for s in range(3):
    fleet.add(PROGRAMS["adam"], data=(X, Y), seed=s, name=str(s))
fleet.fit(1, progress=False)  # what is compiled at first use is there
print("ready", flush=True)
results = fleet.fit(1000000, progress=False, checkpoint=50)
print(results.stopped, flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "ready\n"
        time.sleep(1.0)
        child.send_signal(number)
        out, _ = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    expected = ("interrupted\n", 0) if number == signal.SIGINT else ("", 128 + signal.SIGTERM)
    assert (out, child.returncode) == expected
    with cv.CalcHeap("1 MiB", store=cv.FileStore(tmp_path)) as heap:
        for name in heap.names:
            model = heap.open(name)
            assert model.epochs_done > 1 and model.evaluate(X, Y)["accuracy"] > 0.8
        assert heap.names == ["0", "1", "2"]


@pytest.mark.parametrize("checkpoint", [None, 1, "end"])
def test_models_that_wait_get_turns(checkpoint, tmp_path, monkeypatch):
    """Whenever training ends, all have done about the same epochs, and files hold whole ones."""
    monkeypatch.setattr(cv.fleet.fleet, "STAY", 0)  # a turn is a slice,
    monkeypatch.setattr(cv.fleet.fleet, "SLICE_SECONDS", 0)  # and a slice some rounds
    prog = PROGRAMS["dropout"]
    fleet = cv.Fleet(3 * prog.heap_bytes, workers=1, store=cv.FileStore(tmp_path) if checkpoint else None)
    handles = [fleet.add(prog, data=(X, Y), validation=slice(50), seed=s) for s in range(10)]
    fleet.advance({handles[0]: 4})
    slices, run = iter(range(120)), fleet._slice

    def interrupted(*given):
        run(*given)
        if next(slices, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(fleet, "_slice", interrupted)
    results = fleet.fit(1000, progress=False, checkpoint=checkpoint or 1)
    epochs = results.column("epochs")
    assert results.stopped and 4 < min(epochs) and max(epochs) - min(epochs) <= 2, epochs
    for handle in [h for h in handles if checkpoint and h.model.record.slot is None]:
        assert handle.model.steps_done == 14 * handle.epochs_done
    monkeypatch.setattr(fleet, "_slice", run)
    fleet.advance({h: 15 - h.epochs_done for h in handles})
    for seed, handle in enumerate(handles):
        same(handle, *alone(prog, 15, seed))
    fleet.close()


def test_results_are_a_table():
    fleet = cv.Fleet("4 MiB")
    for s in range(25):
        fleet.add(PROGRAMS["adam"], data=(X, Y), seed=s, validation=slice(0, 50))
    results = fleet.fit(2, progress=False)
    assert len(results) == 25 and results[3].name == "model-3" and len(results[:2]) == 2
    np.testing.assert_array_equal(results.column("loss"), [h.loss for h in fleet.handles.values()])
    best = results.best(3, "val_accuracy")
    assert best[0].figures["val_accuracy"] == results.column("val_accuracy").max()
    assert results.best(1, "val_accuracy", largest=False)[0].metrics["val_accuracy"][-1] == min(
        results.column("val_accuracy")
    )
    assert results.best()[0].val_loss == results.column("val_loss").min()
    assert [handle.val_loss for handle in results.best(25)] == sorted(results.column("val_loss"))
    lines = str(results).splitlines()
    assert len(lines) == 22 and lines[0].split()[:4] == ["name", "status", "epochs", "loss"] and "5 more" in lines[-1]


def test_the_best_without_validation_has_the_smallest_loss_and_what_is_not_finite_is_last():
    fleet = cv.Fleet("4 MiB")
    for rate in (0.0, 1e300, 0.01, 0.1):
        fleet.add(PROGRAMS["adam"], data=(X, Y), hyper={"learning_rate": rate}, name=f"rate {rate}")
    with pytest.raises(cv.CalcError, match="no model has a finite 'loss', so none is the best: train them"):
        fleet.results.best()
    results = fleet.fit(3, progress=False)
    losses = results.column("loss")
    order = [handle.name for handle in results.best(4)]
    assert np.isnan(losses[1]) and order[3] == "rate 1e+300"
    assert order[:3] == [f"rate {rate}" for rate in (0.1, 0.01, 0.0)] and losses[3] < losses[2] < losses[0]


def test_a_figure_that_no_model_has_is_refused_by_name():
    fleet = cv.Fleet("4 MiB")
    assert fleet.results.best(2) == [] and fleet.results.column("loss").shape == (0,)
    fleet.add(PROGRAMS["adam"], data=(X, Y))
    fleet.add(PROGRAMS["adam"], data=(X, Y), validation=slice(0, 50))
    results = fleet.fit(1, progress=False)
    there = "there are name, status, epochs, loss, bytes, error, val_loss, val_accuracy"
    for ask in (results.column, lambda name: results.best(by=name)):
        with pytest.raises(cv.CalcError, match=f"no model has a figure 'val_acuracy'; {there}"):
            ask("val_acuracy")
    with pytest.raises(cv.CalcError, match="'status' is not a number"):
        results.best(by="status")
    assert results.best(2)[0].name == "model-1"  # the only one with a val_loss
    assert np.isnan(results.column("val_loss")[0])


def test_progress_says_how_far_it_is(capsys):
    fleet = cv.Fleet("1 MiB")
    for s in range(2):
        fleet.add(PROGRAMS["adam"], data=(X, Y), seed=s)
    fleet.fit(3)
    assert "6/6 epochs  mean loss 0." in capsys.readouterr().err


@pytest.mark.parametrize("mistake", [{"hyper": {"nope": 1}}, {"patience": 1}, {"learning_batch": 1}, {"samples": [99]}])
def test_a_refused_model_leaves_nothing_in_the_store(mistake, tmp_path):
    program = cv.compile(cv.build_graph(nn.Linear(2), (3,), "mse", cv.SGD(0.1)), batch_size=4, workers=1)
    data = np.ones((8, 3), "f4"), np.ones((8, 2), "f4")
    fleet = cv.Fleet("1 MiB", store=cv.FileStore(tmp_path / "s"))
    with pytest.raises(cv.CalcError):
        fleet.add(program, data=data, name="q", **mistake)
    assert "q" not in fleet.heap.names and not fleet.handles
    fleet.add(program, data=data, name="q")
    fleet.heap.close()


def test_a_block_closes_the_fleet_and_keeps_its_models(tmp_path):
    with cv.Fleet("1 MiB", store=cv.FileStore(tmp_path)) as fleet:
        handle = fleet.add(PROGRAMS["adam"], data=(X, Y), name="kept")
        fleet.fit(2, progress=False)
    assert len(handle.losses) == 2 and "kept" in str(fleet.results)
    with pytest.raises(cv.CalcError, match="closed"):
        handle.model.predict(X)
    with cv.Fleet("1 MiB", store=cv.FileStore(tmp_path)) as fleet:
        assert fleet.add("kept", data=(X, Y)).epochs_done == 2


def test_a_closed_heap_is_said_to_be_closed():
    fleet = cv.Fleet("1 MiB", workers=1)
    fleet.add(PROGRAMS["adam"], data=(X, Y))
    fleet.heap.close()
    calls = (
        fleet.fit,
        fleet.advance,
        lambda: fleet.add(PROGRAMS["adam"], data=(X, Y)),
        lambda: fleet.heap.open("model-0"),
    )
    for call in calls:
        with pytest.raises(cv.CalcError, match="the heap is closed"):
            call()
    assert fleet.heap.closed

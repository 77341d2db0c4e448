"""`Model` as people from Keras, PyTorch and scikit-learn expect it: weights, metrics, callbacks, streams, several inputs."""

from __future__ import annotations

import copy
import io
import pickle
import re

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.tables import duration

RNG = np.random.default_rng(3)
X = RNG.uniform(-1, 1, (300, 2)).astype("float32")
Y = (X[:, 0] * X[:, 1] > 0).astype("int64")
T = np.stack([X[:, 0] * X[:, 1], X[:, 0] - X[:, 1]], 1)
LOSSES = ["softmax_cross_entropy", "binary_cross_entropy", "mse", "mae", "huber"]


def classifier(**options):
    net = nn.Linear(8) >> nn.Tanh() >> nn.Linear(2)
    options = {"loss": "softmax_cross_entropy", "optimizer": cv.Adam(1e-2), "batch_size": 50, **options}
    return cv.Model(net, input_shape=(2,), **options)


def target_of(loss):
    return Y if loss == "softmax_cross_entropy" else (T > 0).astype("float32") if loss == "binary_cross_entropy" else T


def fitted(model, *data, epochs=3, **options):
    return model.fit(*data, epochs=epochs, progress=False, **options)


# ---------------------------------------------------------------- weights of samples
@pytest.mark.parametrize("loss", LOSSES)
def test_samples_that_count_one_train_as_if_nobody_counted(loss):
    plain, weighted = (classifier(loss=loss, dtype="float64", sample_weight=w) for w in (False, True))
    y = target_of(loss)
    a, b = fitted(plain, X, y), fitted(weighted, X, y)
    np.testing.assert_allclose(b["loss"], a["loss"], rtol=1e-9)
    for name, want in plain.parameters.items():
        np.testing.assert_allclose(weighted.parameters[name], want, rtol=1e-7, atol=1e-9)
    assert weighted.evaluate(X, y) == pytest.approx(plain.evaluate(X, y), rel=1e-7)
    c = fitted(classifier(loss=loss, dtype="float64", sample_weight=True), X, y, sample_weight=np.ones(300))
    assert c["loss"] == b["loss"]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_sample_of_weight_two_is_two_samples_and_one_of_weight_zero_is_none(loss):
    y, weights = target_of(loss), RNG.integers(0, 3, 300)
    w = np.repeat(np.arange(300), weights)
    weighted = classifier(loss=loss, dtype="float64", sample_weight=True, batch_size=300, optimizer=cv.SGD(0.1))
    repeated = classifier(loss=loss, dtype="float64", batch_size=len(w), optimizer=cv.SGD(0.1))
    got, want = weighted.step(X, y, weights), repeated.step(X[w], y[w])
    assert got * 300 == pytest.approx(want * len(w), rel=1e-9)
    moved = [[p - q for p, q in zip(m.get_weights().values(), start_of(m))] for m in (weighted, repeated)]
    for ours, theirs in zip(*moved):
        np.testing.assert_allclose(ours * 300, theirs * len(w), rtol=1e-6, atol=1e-11)


def start_of(model):
    with cv.CalcHeap(model.program.heap_bytes) as heap:
        return [np.array(p) for p in heap.create(model.program, seed=0).parameters.values()]


def test_weights_of_classes_are_those_of_their_samples():
    by_class, by_sample, both = (classifier(sample_weight=True) for _ in range(3))
    w = np.where(Y == 1, 4.0, 1.0)
    a = fitted(by_class, X, Y, class_weight={1: 4.0})
    assert a["loss"] == fitted(by_sample, X, Y, sample_weight=w)["loss"]
    assert fitted(both, X, Y, class_weight={1: 4}, sample_weight=np.full(300, 0.5))["loss"] != a["loss"]
    few = np.concatenate([np.flatnonzero(Y == 1)[:20], np.flatnonzero(Y == 0)[:80]])
    balanced, same = classifier(sample_weight=True), classifier(sample_weight=True)
    x = fitted(balanced, X[few], Y[few], class_weight="balanced")
    assert x["loss"] == fitted(same, X[few], Y[few], sample_weight=np.where(Y[few] == 1, 2.5, 0.625))["loss"]


def test_weights_go_with_their_samples_into_shares_batches_and_files():
    model = classifier(sample_weight=True, learning_batch=100)
    w = np.linspace(0, 2, 300)
    history = fitted(model, X, Y, sample_weight=w, validation=0.25)
    assert len(history) == 3 and {"val_loss", "val_accuracy"} <= {*history.epochs[0]}
    file = io.BytesIO()
    model.save(file)
    file.seek(0)
    again = cv.load(file)
    one, other = (fitted(m, X, Y, sample_weight=w, epochs=1) for m in (again, model))
    assert one["loss"] == other["loss"]


def test_a_loss_of_ones_own_gives_a_term_a_sample():
    def terms(y, t):
        return cv.mean(cv.square(y - t), axis=-1)

    own = classifier(loss=terms, sample_weight=True, dtype="float64")
    named = classifier(loss="mse", sample_weight=True, dtype="float64")
    w = RNG.random(300)
    assert fitted(own, X, T, sample_weight=w)["loss"] == pytest.approx(fitted(named, X, T, sample_weight=w)["loss"])
    assert own.evaluate(X, T)["loss"] == pytest.approx(named.evaluate(X, T)["loss"])
    with pytest.raises(cv.CalcError, match="one term per sample"):
        classifier(loss=cv.mse, sample_weight=True)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"sample_weight": np.ones(299)}, r"sample_weight: shape \(299,\) for 300 samples"),
        ({"sample_weight": np.ones((300, 1))}, "sample_weight: shape"),
        ({"sample_weight": -np.ones(300)}, "finite numbers >= 0; found -1.0"),
        ({"sample_weight": np.full(300, np.nan)}, "finite numbers >= 0"),
        ({"sample_weight": "heavy"}, "sample_weight"),
        ({"class_weight": "even"}, 'a mapping such as {0: 1.0, 1: 5.0}, or "balanced"'),
        ({"class_weight": {"a": 1}}, "class_weight: a class must be an integer"),
        ({"class_weight": {0: 1, 7: 2}}, "class_weight: there is no class 7: the model's are 0 to 1"),
        ({"class_weight": {0: -1}}, "class_weight of 0 must be a number >= 0"),
    ],
)
def test_weights_that_are_none_are_refused(options, why):
    model = classifier(sample_weight=True)
    with pytest.raises(cv.CalcError, match=why):
        fitted(model, X, Y, **options)
    assert model.epochs_done == 0


def test_weights_want_a_model_that_has_some():
    for options in ({"sample_weight": np.ones(300)}, {"class_weight": {0: 1.0}}):
        with pytest.raises(cv.CalcError, match=r"make it with cv.Model\(..., sample_weight=True\)"):
            fitted(classifier(), X, Y, **options)
    with pytest.raises(cv.CalcError, match="the model's target is not one integer per sample"):
        fitted(classifier(loss="mse", sample_weight=True), X, T, class_weight={0: 1.0})
    with pytest.raises(cv.CalcError, match=r"step takes 3 arrays \(input, target, sample_weight\), not 2"):
        classifier(sample_weight=True).step(X[:50], Y[:50])


# ---------------------------------------------------------------- metrics
def test_metrics_by_name_and_by_function():
    def worst(y, t):
        return cv.max(cv.abs(y - t))

    model = classifier(loss="mse", metrics=["mae", "mse", worst])
    with pytest.raises(cv.CalcError, match="'worst' of 100 samples in batches of 50: .* max .*batch_size=100"):
        fitted(model, X, T, validation=(X[:100], T[:100]))
    history = fitted(model, X, T, validation=(X[:50], T[:50]))
    assert {"val_loss", "val_mae", "val_mse", "val_worst"} <= {*history.epochs[0]}
    figures, error = model.evaluate(X[:50], T[:50]), np.abs(model.predict(X[:50]) - T[:50])
    assert figures["mae"] == pytest.approx(error.mean(), rel=1e-5)
    assert figures["worst"] == pytest.approx(error.max(), rel=1e-5)
    assert figures["mse"] == figures["loss"] == pytest.approx((error**2).mean(), rel=1e-5)
    again = pickle.loads(pickle.dumps(model))
    assert again.evaluate(X[:50], T[:50]) == figures


def test_accuracy_of_scores_of_one_class_each():
    model = classifier(loss="binary_cross_entropy", metrics=["accuracy"])
    y = (T > 0).astype("float32")
    fitted(model, X, y, epochs=20)
    right = (model.predict(X) > 0) == (y > 0.5)
    assert model.evaluate(X, y)["accuracy"] == pytest.approx(right.mean(), rel=1e-6)
    assert right.mean() > 0.8


def test_without_metrics_there_is_the_loss_alone():
    assert [*classifier(metrics=[]).evaluate(X, Y)] == ["loss"]


@pytest.mark.parametrize(
    ("metrics", "why"),
    [(["f1"], "metric 'f1' is unknown"), ("accuracy", "a list of names"), ([3], "metric 3 is unknown"),
     ([lambda y, t: 3.0], "a variable"), ([nn.ReLU], "is unknown"), (["mse", "mse"], "two figures would be called 'mse'"),
     ([lambda y, t: cv.max(y), lambda y, t: cv.min(y)], "two figures would be called 'lambda'"),
     ([lambda y, t: y], "of one element is wanted, not .*: reduce it")],
)  # fmt: skip
def test_metrics_that_are_none_are_refused(metrics, why):
    with pytest.raises(cv.CalcError, match=why):
        classifier(metrics=metrics)


# ---------------------------------------------------------------- callbacks
class Log(cv.Callback):
    def __init__(self, every=None, answers=()):
        self.every, self.seen, self.answers = every, [], dict(answers)

    def on_train_begin(self, model):
        self.seen.append("begin")

    def on_step(self, model, step, loss):
        self.seen.append(step)
        return self.answers.get(step)

    def on_epoch_end(self, model, epoch, figures):
        self.seen.append((epoch, round(figures["loss"], 6)))
        return self.answers.get(("epoch", epoch))

    def on_train_end(self, model, history):
        self.seen.append("end")


def test_callbacks_see_every_epoch_and_the_steps_they_ask_for_and_change_no_bit():
    log, plain = Log(every=4), classifier()
    model = classifier()
    history = fitted(model, X, Y, epochs=2, callbacks=[log])
    losses = [round(loss, 6) for loss in fitted(plain, X, Y, epochs=2)["loss"]]
    assert log.seen == ["begin", 4, (0, losses[0]), 4, (1, losses[1]), "end"]
    assert history.stopped == "all epochs done"
    for name, p in plain.parameters.items():
        np.testing.assert_array_equal(model.parameters[name], p)


def test_all_callbacks_see_the_epoch_and_the_step_that_end_training():
    class Log(cv.Callback):
        every = 2

        def __init__(self):
            self.epochs, self.steps = [], []

        def on_epoch_end(self, model, epoch, figures):
            self.epochs.append(epoch)

        def on_step(self, model, step, loss):
            self.steps.append(step)

    class Ends(cv.Callback):
        every = 2

        def __init__(self, steps):
            self.left = steps

        def on_step(self, model, step, loss):
            self.left -= 1
            return self.left == 0

    X, stop = np.ones((16, 2)), lambda model, epoch, figures: "enough" if epoch == 2 else None
    for end, epochs, steps in ((stop, [0, 1, 2], 6), (Ends(3), [0], 3)):
        first, last = Log(), Log()
        model = cv.Model(nn.Linear(1), input_shape=(2,), loss="mse", optimizer="adam", batch_size=4)
        model.fit(X, X[:, :1], epochs=5, callbacks=[first, end, last], progress=False)
        assert first.epochs == last.epochs == epochs and first.steps == last.steps and len(last.steps) == steps


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_steps_are_learning_batches(every, workers):
    log = Log(every=every)
    fitted(classifier(learning_batch=100, workers=workers), X, Y, epochs=1, callbacks=[log])
    assert [s for s in log.seen if isinstance(s, int)] == [*range(every, 4, every)]


def test_a_callback_ends_training_after_an_epoch_or_in_its_middle():
    history = fitted(classifier(), X, Y, epochs=9, callbacks=[lambda model, epoch, figures: epoch == 1])
    assert len(history) == 2 and history.stopped == "Function has ended training"
    history = fitted(classifier(), X, Y, epochs=9, callbacks=[lambda model, epoch, figures: np.float64(epoch) > 0])
    assert len(history) == 2
    history = fitted(classifier(), X, Y, epochs=9, callbacks=[Log(answers={("epoch", 3): "enough"})])
    assert len(history) == 4 and history.stopped == "enough"
    log, model = Log(every=3, answers={3: "now"}), classifier()
    history = fitted(model, X, Y, epochs=9, callbacks=[log])
    assert (len(history), history.stopped, model.epochs_done) == (0, "now", 0)
    assert log.seen == ["begin", 3, "end"] and model.hyper["t"] == 3


def test_callbacks_may_use_the_model_and_set_its_rate():
    seen = []

    def drop(model, epoch, figures):
        seen.append((model.predict(X[:3]).shape, model.evaluate(X, Y)["loss"]))
        model.hyper["learning_rate"] = 0.01 / (epoch + 2)

    model = classifier()
    fitted(model, X, Y, callbacks=[drop])
    assert [shape for shape, _ in seen] == [(3, 2)] * 3 and model.hyper["learning_rate"] == 0.01 / 4
    assert seen[0][1] > seen[2][1]


def test_an_error_of_a_callback_is_the_users():
    def wrong(model, epoch, figures):
        raise LookupError("mine")

    model = classifier()
    with pytest.raises(LookupError, match="mine"):
        fitted(model, X, Y, callbacks=[wrong])
    assert model.epochs_done == 1 and len(fitted(model, X, Y)) == 3


@pytest.mark.parametrize("wrong", [3, [3], [cv.Callback], "stop", [None], cv.EarlyStopping(3)])
def test_what_is_no_callback_is_refused(wrong):
    with pytest.raises(cv.CalcError, match="a list of callbacks"):
        fitted(classifier(), X, Y, callbacks=wrong)
    stop = cv.EarlyStopping(3)
    with pytest.raises(cv.CalcError, match="the same EarlyStopping is there twice"):
        fitted(classifier(), X, Y, callbacks=[stop, stop])


def test_the_best_state_is_kept():
    model, other = classifier(optimizer=cv.SGD(0.5)), classifier(optimizer=cv.SGD(0.5))
    images = []
    held = (X[:100], Y[:100])
    kick = iter([0.5, 0.5, 0.5, 300.0, 300.0, 0.1])

    def rate(model, epoch, figures):
        images.append(model.get_weights())
        model.hyper["learning_rate"] = next(kick)

    history = fitted(model, X[100:], Y[100:], epochs=6, validation=held, keep_best=True, callbacks=[rate])
    best = int(np.argmin(history["val_loss"]))
    assert history.kept == best < 5 and history.stopped == "all epochs done" and model.epochs_done == 6
    for name, p in model.parameters.items():
        np.testing.assert_array_equal(p, images[best][name])
    assert model.evaluate(*held)["loss"] == history["val_loss"][best] and model.hyper["t"] == 4 * (best + 1)
    with pytest.raises(cv.CalcError, match="patience needs validation data"):
        fitted(other, X, Y, patience=2)
    assert fitted(other, X, Y, keep_best=True).kept in (None, 0, 1)


def test_patience_with_the_best_state():
    model = classifier(optimizer=cv.SGD(30.0))
    history = fitted(model, X[100:], Y[100:], epochs=200, validation=(X[:100], Y[:100]), patience=5, keep_best=True)
    assert history.stopped == "the validation loss has not fallen for 5 epochs" and len(history) < 200
    assert history.kept == len(history) - 6 == int(np.argmin(history["val_loss"]))


def test_early_stopping_by_another_figure():
    stop = cv.EarlyStopping(2, figure="val_accuracy", min_delta=1.0)
    history = fitted(classifier(), X, Y, epochs=50, validation=(X, Y), callbacks=[stop])
    assert len(history) == 3 and history.stopped == "val_accuracy has not become better for 2 epochs"
    with pytest.raises(cv.CalcError, match="EarlyStopping: no figure 'val_f1'; there are loss"):
        fitted(classifier(), X, Y, callbacks=[cv.EarlyStopping(2, figure="val_f1")])


def test_the_rate_falls_on_a_plateau_as_in_keras():
    figures = [5.0, 4.0, 4.0, 4.0, 4.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    reduce = cv.ReduceOnPlateau(0.5, 2, cooldown=1, min_rate=0.002)
    model = classifier()
    reduce.on_train_begin(model)
    rates = []
    for epoch, value in enumerate(figures):
        reduce.on_epoch_end(model, epoch, {"loss": value})
        rates.append(model.hyper["learning_rate"])
    # Keras 3 (ReduceLROnPlateau(factor=.5, patience=2, cooldown=1, min_lr=.002)) on the same losses
    assert rates == pytest.approx([0.01] * 3 + [0.005] * 4 + [0.0025] * 2 + [0.002] * 2)
    for wrong in ({"factor": 1.0}, {"factor": 0}, {"patience": 0}, {"min_rate": -1}, {"figure": 3}, {"cooldown": 0.5}):
        with pytest.raises(cv.CalcError, match="ReduceOnPlateau"):
            cv.ReduceOnPlateau(**wrong)


# ---------------------------------------------------------------- batches as they come
def batches(n=6, size=50):
    return [(X[i * size : (i + 1) * size], Y[i * size : (i + 1) * size]) for i in range(n)]


def test_batches_train_as_the_data_set_in_their_order():
    model, whole, by_name = (classifier() for _ in range(3))
    a = fitted(model, batches())
    b = fitted(whole, X, Y, shuffle=False)
    c = fitted(by_name, [{"target": y, "input": x} for x, y in batches()])
    assert a["loss"] == pytest.approx(b["loss"], rel=1e-6) and a["loss"] == c["loss"] and model.epochs_done == 3
    for name, p in whole.parameters.items():
        np.testing.assert_array_equal(model.parameters[name], p)
        np.testing.assert_array_equal(by_name.parameters[name], p)


def test_batches_may_be_lists_of_arrays():
    one, other = classifier(), classifier()
    assert fitted(one, [[x, y] for x, y in batches()])["loss"] == fitted(other, batches())["loss"]


class Kerass(cv.Callback):
    def on_epoch_begin(self, model, epoch):
        raise AssertionError


@pytest.mark.parametrize(
    ("callback", "why"),
    [
        (Kerass(), "nothing calls Kerass.on_epoch_begin: a cv.Callback has on_train_begin, on_step"),
        (lambda epoch, logs: None, r"a function takes \(model, epoch, figures\), which .* does not"),
    ],
)
def test_callbacks_that_would_not_be_called_are_refused(callback, why):
    model = classifier()
    with pytest.raises(cv.CalcError, match=why):
        fitted(model, X, Y, callbacks=[callback])
    assert model.epochs_done == 0


def test_a_validation_loss_that_is_not_finite_is_told():
    broken = X.copy()
    broken[0, 0] = np.nan
    model = classifier()
    with pytest.warns(cv.CalcWarning, match="the val_loss of epoch 1 is nan"):
        fitted(model, X, Y, epochs=2, validation=(broken, Y))
    history = fitted(model, X, Y, epochs=3, validation=(broken, Y), terminate_on_nan=True)
    assert history.stopped == "the val_loss of epoch 1 is nan" and len(history) == 1


def test_a_generator_is_read_on_from_epoch_to_epoch_and_may_end():
    log = Log(every=2)
    history = fitted(classifier(), iter(batches()), epochs=5, steps_per_epoch=4, callbacks=[log], validation=(X, Y))
    assert len(history) == 2 and history.stopped == "no batch came in epoch 3"
    assert [s for s in log.seen if isinstance(s, int)] == [2, 4, 2] and "val_loss" in history.epochs[0]
    history = fitted(classifier(), (b for b in batches() * 3), epochs=3, steps_per_epoch=6)
    assert len(history) == 3 and history.stopped == "all epochs done"
    with pytest.raises(cv.CalcError, match="no batch came: the iterable is empty"):
        fitted(classifier(), iter([]), epochs=3)


def test_a_loader_of_pytorch_is_an_iterable_of_batches():
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    history = fitted(classifier(), torch.utils.data.DataLoader(data, batch_size=50, shuffle=False))
    assert history["loss"] == pytest.approx(fitted(classifier(), batches())["loss"])


@pytest.mark.parametrize(
    ("data", "options", "why"),
    [
        ([(X[:5],)], {}, "a batch is a tuple of arrays for input, target, or a mapping by name, not a tuple of 1"),
        (iter([X[:5]]), {}, "a batch is a tuple of arrays"),
        ([{"input": X[:5]}], {}, "a batch has arrays for input; wanted: input, target"),
        ([(X, Y)], {}, "above the planned 50"),
        (batches(), {"validation": 0.2}, "no share can be held out"),
        (batches(), {"sample_weight": np.ones(3)}, "sample_weight: not possible with batches"),
        (batches(), {"class_weight": {0: 1}}, "class_weight: not possible with batches"),
        (batches(), {"check_finite": True}, "check_finite: not possible with batches"),
        (batches(), {"steps_per_epoch": 0}, "steps_per_epoch must be an integer >= 1"),
    ],
)
def test_batches_that_do_not_fit_are_refused(data, options, why):
    with pytest.raises(cv.CalcError, match=why):
        fitted(classifier(), data, **options)


def test_arrays_have_no_steps_of_an_epoch_and_want_their_targets():
    with pytest.raises(cv.CalcError, match="steps_per_epoch: of arrays an epoch is all their samples"):
        fitted(classifier(), X, Y, steps_per_epoch=3)
    with pytest.raises(cv.CalcError, match="y: an array of samples is wanted, not None"):
        classifier().fit(X, progress=False)


# ---------------------------------------------------------------- classes and parameters
def test_probabilities_and_classes():
    model = classifier()
    fitted(model, X, Y, epochs=40)
    scores = model.predict(X).astype(np.float64)
    p = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    np.testing.assert_allclose(model.predict_proba(X), p, rtol=1e-5)
    assert model.predict_proba(X).dtype == np.float32
    np.testing.assert_array_equal(model.predict_classes(X), scores.argmax(1))
    assert np.mean(model.predict_classes(X) == Y) > 0.9
    binary = classifier(loss="binary_cross_entropy")
    np.testing.assert_allclose(binary.predict_proba(X), 1 / (1 + np.exp(-binary.predict(X).astype(float))), rtol=1e-5)
    np.testing.assert_array_equal(binary.predict_classes(X), (binary.predict(X) > 0).astype(int))
    for method in (classifier(loss="mse").predict_proba, classifier(loss="mse").predict_classes):
        with pytest.raises(cv.CalcError, match="has no classes"):
            method(X)


def test_weights_are_read_and_set_all_or_none():
    model, other = classifier(seed=1), classifier(seed=2)
    weights = model.get_weights()
    assert [*weights] == ["linear_1.weight", "linear_1.bias", "linear_2.weight", "linear_2.bias"]
    weights["linear_1.weight"][0, 0] += 1  # a copy
    assert weights["linear_1.weight"][0, 0] != model.parameters["linear_1.weight"][0, 0]
    other.set_weights(model.get_weights())
    np.testing.assert_array_equal(other.predict(X), model.predict(X))
    fitted(other, X, Y)
    other.set_weights([*weights.values()])
    np.testing.assert_array_equal(other.parameters["linear_1.weight"], weights["linear_1.weight"])
    before = other.get_weights()
    for wrong, why in (
        ([1.0], "1 arrays for 4 parameters"), ({"w": 1}, "no parameter is called 'w'"), (3, "arrays by name, or a list"),
        ({k: v for k, v in weights.items() if "bias" in k}, "there is no array for 'linear_1.weight'"),
        ({**weights, "linear_2.bias": np.zeros(3)}, r"'linear_2.bias' of shape \(3,\); \(2,\) is wanted"),
        ({**weights, "linear_2.bias": "ab"}, "linear_2.bias"), ({**weights, "linear_2.bias": ["a", "b"]}, "cannot be used"),
        ({**weights, "linear_2.bias": [1j, 2]}, "cannot be used"), ({**weights, "linear_2.bias": [None, 2]}, "cannot be used"),
        ({**weights, "linear_2.bias": [1e300, 0]}, "'linear_2.bias' has numbers beyond 3.4e"),
    ):  # fmt: skip
        with pytest.raises(cv.CalcError, match=why):
            other.set_weights(wrong)
    for name, value in before.items():
        np.testing.assert_array_equal(other.parameters[name], value)


def test_weights_are_a_whole_network_with_its_statistics():
    def make(seed):
        net = nn.Linear(5) >> nn.BatchNorm() >> nn.Linear(2)
        return cv.Model(net, input_shape=X.shape[1:], loss="mse", optimizer=cv.SGD(0.1), batch_size=10, seed=seed)

    one, other = make(1), make(2)
    for _ in range(5):
        one.step(X[:10], np.ones((10, 2)))
    weights = one.get_weights()
    assert [*weights][-2:] == ["batchnorm_1.running_mean", "batchnorm_1.running_var"]
    for given in weights, [*weights.values()]:
        other.reset(3)
        other.set_weights(given)
        np.testing.assert_array_equal(other.predict(X), one.predict(X))
    known = other.buffers["batchnorm_1.running_var"].copy()
    other.set_weights({name: w + 1 for name, w in weights.items() if "running" not in name})
    np.testing.assert_array_equal(other.buffers["batchnorm_1.running_var"], known)
    with pytest.raises(cv.CalcError, match="there is no array for 'batchnorm_1.running_var'"):
        other.set_weights({name: w for name, w in weights.items() if "running_var" not in name})
    with pytest.raises(cv.CalcError, match="3 arrays for 6 parameters and 2 buffers"):
        other.set_weights([*weights.values()][:3])


def test_setting_weights_keeps_the_optimizer_and_an_open_accumulation():
    model, other = (classifier(learning_batch=100) for _ in range(2))
    for m in (model, other):
        fitted(m, X, Y, epochs=1)
        m["input"], m["target"] = X[:50], Y[:50]
        m.forward("learn")
        m.backward("learn")
    other.set_weights(other.get_weights())
    for m in (model, other):
        m.optimize("learn")
        m.end_round("learn")
    for name, p in model.parameters.items():
        np.testing.assert_array_equal(other.parameters[name], p)


class Noted(cv.Model):
    note = ""

    def predict(self, x, **options):
        return -super().predict(x, **options)


def test_copies_of_ones_own_class_are_of_it():
    model = Noted(nn.Linear(2), input_shape=(2,), optimizer="adam", batch_size=50)
    model.note = "mine"
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is Noted and other.note == "mine"
        np.testing.assert_array_equal(other.predict(X), model.predict(X))
        assert fitted(other, X, Y)["loss"]


def test_predictions_into_what_they_are_made_of():
    model = cv.Model(nn.Linear(2), input_shape=(2,), loss="mse", optimizer="adam", batch_size=7)
    memory = np.concatenate([X, X[:5]])
    for shift in (0, 1, 5):
        given = memory.copy()
        want = model.predict(given[: len(X)])
        out = given[shift : shift + len(X)]
        assert model.predict(given[: len(X)], out=out) is out
        np.testing.assert_array_equal(out, want)


def test_a_closed_model_is_shown():
    model = classifier()
    model.close()
    assert repr(model) == "<Model 'model-0': closed>" and "closed" in model._repr_html_()


def test_copies_by_every_means(tmp_path):
    model = classifier()
    fitted(model, X, Y)
    copies = [copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    joblib = pytest.importorskip("joblib")
    joblib.dump(model, tmp_path / "m.joblib")
    copies.append(joblib.load(tmp_path / "m.joblib"))
    want = fitted(model, X, Y)["loss"]
    assert all(fitted(m, X, Y)["loss"] == want for m in copies)


# ---------------------------------------------------------------- graphs of one's own
def test_a_learning_rate_is_set_where_it_has_an_effect():
    model = classifier()
    for name in ("lr", "learning_rate"):
        with pytest.raises(cv.CalcError, match=rf'model.{name} is no setting: model.hyper\["learning_rate"\] = 0.5'):
            setattr(model, name, 0.5)
    with pytest.raises(AttributeError, match="did you mean notes"):
        model.note = "a user's own"
    model.notes["mine"] = "a user's own"
    assert model.notes["mine"] == "a user's own"


def test_a_model_is_a_turn_that_lasts():
    model = classifier()
    with model, model:
        model["input"] = X[:50]
        np.testing.assert_array_equal(model["input"], X[:50])
    with pytest.raises(KeyError), model:
        raise KeyError
    assert model.record.turn.lock.acquire(blocking=False)
    model.record.turn.lock.release()


def test_variables_are_asked_for_by_name():
    model = classifier()
    for one in (model, model):
        with pytest.raises(cv.CalcError, match="no variable 0"):
            one[0]
        assert "input" in one and "nothing" not in one and 3 not in one
        with pytest.raises(TypeError, match="not iterable"):
            list(one)
        with pytest.raises(cv.CalcError, match="'input' cannot be removed"):
            del one["input"]


def two_headed(batch_size=50, **options):
    """Two inputs, two outputs, a loss of two parts, two metrics."""
    g = cv.CalcGraph()
    a, b = g.placeholder("a", (None, 2)), g.placeholder("b", (None, 3))
    label, value = g.placeholder("label", (None,)), g.placeholder("value", (None, 1))
    body, head, tail = nn.Linear(16) >> nn.Tanh(), nn.Linear(2), nn.Linear(1)
    with g.path("learn", backward=True) as learn:
        h = body.build(cv.concat([a, b]), "body.", True)
        scores, guess = head.build(h, "head.", True), tail.build(h, "tail.", True)
        loss = cv.softmax_cross_entropy(scores, label) + 0.5 * cv.mse(guess, value)
        learn.minimize(loss, cv.Adam(1e-2), output=(scores, guess))
    with g.path("predict") as predict:
        h = body.build(cv.concat([a, b]), "body.", False)
        classes, amount = head.build(h, "head.", False), tail.build(h, "tail.", False)
        predict.output = classes, amount
        error = cv.mse(amount, value)
        accuracy = cv.accuracy(classes, label)
    assert (error.name, accuracy.name) == ("error", "accuracy")
    return cv.Model(g, batch_size=batch_size, **options)


B = RNG.standard_normal((300, 3)).astype("float32")
V = (X[:, :1] + B[:, :1]).astype("float32")


def test_a_model_of_several_inputs_and_outputs():
    model = two_headed(seed=1)
    assert (model.roles.inputs, model.roles.targets) == (("a", "b"), ("label", "value"))
    assert model.roles.outputs == ("classes", "amount")
    history = fitted(model, {"a": X, "b": B}, {"label": Y, "value": V}, epochs=60, validation=((X, B), (Y, V)))
    assert {"loss", "val_error", "val_accuracy"} <= {*history.epochs[0]}
    assert history["loss"][-1] < history["loss"][0] / 2 and history["val_accuracy"][-1] > 0.9
    out = model.predict((X, B))
    assert {n: v.shape for n, v in out.items()} == {"classes": (300, 2), "amount": (300, 1)}
    figures = model.evaluate((X, B), (Y, V))
    assert figures["accuracy"] == pytest.approx(np.mean(out["classes"].argmax(1) == Y), rel=1e-6)
    assert figures["error"] == pytest.approx(np.mean((out["amount"] - V) ** 2), rel=1e-4)
    place = {"classes": np.zeros((300, 2), "float32")}
    again = model.predict({"b": B, "a": X}, out=place)
    assert again["classes"] is place["classes"]
    np.testing.assert_array_equal(again["amount"], out["amount"])
    assert "a (B, 2), b (B, 3)" in repr(model) and "classes (B, 2), amount (B, 1)" in model.summary()


def test_several_inputs_step_by_step_in_the_declared_order_and_natively():
    model, other = two_headed(), two_headed()
    a = [model.step(X[:50], B[:50], Y[:50], V[:50]) for _ in range(50)]
    b = fitted(other, (X[:50], B[:50]), (Y[:50], V[:50]), epochs=50, shuffle=False)
    assert a == pytest.approx(b["loss"], rel=1e-6)
    bound = model.bind(X[:50], B[:50], np.ascontiguousarray(Y[:50]), V[:50])
    assert bound() == pytest.approx(fitted(other, (X[:50], B[:50]), (Y[:50], V[:50]), epochs=1)["loss"][0], rel=1e-6)
    with pytest.raises(cv.CalcError, match=r"step takes 4 arrays \(a, b, label, value\), not 2"):
        model.step(X[:50], B[:50])


def test_a_model_of_several_outputs_in_files_copies_and_streams():
    model = two_headed()
    fitted(model, [(X[:50], B[:50], Y[:50], V[:50])] * 3)
    again = pickle.loads(pickle.dumps(model))
    assert again.roles == model.roles
    for name, value in model.predict((X, B)).items():
        np.testing.assert_array_equal(again.predict((X, B))[name], value)
    one, two = (fitted(m, (X, B), (Y, V), validation=0.2) for m in (model, again))
    assert one["loss"] == two["loss"] and one["val_error"] == two["val_error"]


@pytest.mark.parametrize(
    ("x", "y", "why"),
    [
        (X, (Y, V), "X: a tuple or mapping of arrays for a, b is wanted"),
        ((X,), (Y, V), "X: a tuple or mapping of arrays for a, b is wanted, not tuple of 1"),
        ({"a": X}, (Y, V), "X: arrays for a, b are wanted, there is none for 'b'"),
        ({"a": X, "b": B, "c": B}, (Y, V), "X: arrays for a, b are wanted, not for 'c'"),
        ((X, B), Y, "y: a tuple or mapping of arrays for label, value is wanted"),
        ((X, B[:9]), (Y, V), "X has 300 samples, 'b' has 9"),
        ((X, B), (Y, V[:9]), "X has 300 samples, 'value' has 9"),
        ((B, X), (Y, V), r"'a': data of shape \(300, 3\) do not fit"),
    ],
)
def test_data_that_do_not_fit_several_inputs_are_refused(x, y, why):
    model = two_headed()
    with pytest.raises(cv.CalcError, match=why):
        fitted(model, x, y)
    with pytest.raises(cv.CalcError):
        model.evaluate(x, y)
    assert model.epochs_done == 0


def autoencoder():
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 3))
    net = nn.Linear(2) >> nn.Linear(3)
    with g.path("learn", backward=True) as learn:
        learn.minimize(cv.mse(net.build(x, "net.", True), x), cv.Adam(1e-2))
    with g.path("predict") as predict:
        predict.output = y = net.build(x, "net.", False)
        error = cv.mse(y, x)
    assert error.name == "error"
    return cv.Model(g, batch_size=50)


def test_a_model_without_targets():
    model = autoencoder()
    history = fitted(model, B, epochs=30, validation=0.2)
    assert history["val_error"][-1] < history["val_error"][0] and model.predict(B).shape == (300, 3)
    assert model.evaluate(B) == {"error": pytest.approx(np.mean((model.predict(B) - B) ** 2), rel=1e-4)}
    many = [model.step(B[:50]) for _ in range(50)]
    assert many[-1] < many[0] and fitted(model, iter([(B[:50],)])).stopped == "no batch came in epoch 2"
    with pytest.raises(cv.CalcError, match="y: the model takes none"):
        fitted(model, B, B)
    one, two, three = (fitted(autoencoder(), B, validation=v) for v in (B[:50], (B[:50],), (B[:50], None)))
    assert one["val_error"] == two["val_error"] == three["val_error"]
    assert (
        fitted(autoencoder(), iter([B[:50]]), epochs=1)["loss"]
        == fitted(autoencoder(), iter([(B[:50],)]), epochs=1)["loss"]
    )
    with pytest.raises(cv.ShapeError, match="differ in their number of samples"):
        classifier().bind(X[:5], Y[:4])


def test_a_graph_has_what_is_said_of_layers():
    g = two_headed().roles
    assert g.labels == ("label", "value")
    graph = cv.CalcGraph()
    with pytest.raises(cv.CalcError, match="a custom graph has its loss already"):
        cv.Model(graph, loss="mse", batch_size=3)  # type: ignore[call-overload]
    x = graph.placeholder("x", (None, 2))
    with graph.path("learn", backward=True) as learn:
        learn.minimize(cv.mean(x @ graph.parameter("w", (2, 2))), cv.SGD(0.1))
    with pytest.raises(cv.CalcError, match="this has no path 'predict', but learn"):
        cv.Model(graph, batch_size=3)
    with graph.path("predict"):
        cv.sum(x)
    with pytest.raises(cv.CalcError, match="path 'predict' has no output"):
        cv.Model(graph, batch_size=3)
    for missing in ("input_shape", "optimizer"):
        options = {"input_shape": (2,), "optimizer": "adam"}
        del options[missing]
        with pytest.raises(cv.CalcError, match=f"Model: {missing} is missing"):
            cv.Model(nn.Linear(2), batch_size=3, **options)


def test_patience_wants_a_loss_to_watch():
    model = autoencoder()
    for options in ({"patience": 3}, {"keep_best": True}):
        with pytest.raises(cv.CalcError, match="watch the loss of path 'predict', which has none"):
            fitted(model, B, validation=0.2, **options)
    watch = cv.EarlyStopping(1, figure="val_error", min_delta=1e9)
    assert len(fitted(model, B, validation=0.2, callbacks=[watch])) == 2
    assert fitted(model, B, keep_best=True).stopped == "all epochs done"


def test_a_path_that_predicts_from_nothing_is_refused():
    g = cv.CalcGraph()
    x, w = g.placeholder("x", (None, 2)), g.parameter("w", (2, 2))
    with g.path("learn", backward=True) as learn:
        learn.minimize(cv.mean(x @ w), cv.SGD(0.1))
    with g.path("predict") as predict:
        predict.output = w @ w
    with pytest.raises(cv.CalcError, match="path 'predict' reads no placeholder"):
        cv.Model(g, batch_size=2)


def test_wrong_outputs_are_refused():
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 2))
    with g.path("predict") as predict:
        y = x @ g.parameter("w", (2, 2))
        predict.output = (y, 3)
    with pytest.raises(cv.CalcError, match="path 'predict': output: a variable, or a tuple of them, is wanted, not 3"):
        cv.compile(g, batch_size=2)


# ---------------------------------------------------------------- what is shown
def test_summaries_and_tables():
    model = classifier()
    history = fitted(model, X, Y)
    text = model.summary()
    assert "linear_2.weight  (8, 2)  16        yes" in text and "42 parameters, of which 42 are trained" in text
    assert f"heap {model.program.heap_bytes:,} bytes for batches up to 50" in text and "3 epochs done" in text
    assert str(model) == text and "<Model" in repr(model)
    made = re.search(r"linear_2 +\(B, 2\) +18 +([\d,]+) ", text)  # 50 samples of 8 by 2 products and sums, and the bias
    assert made and 50 * 2 * 8 * 2 <= int(made[1].replace(",", "")) <= 50 * 2 * (8 * 2 + 2)
    fleet = cv.Fleet(memory="1 MiB")
    fleet.add(model.program, data=(X, Y), name="a<b")
    for shown, wanted in (
        (model, "linear_1.bias"), (model.plan, "heap"), (model.heap, "in the heap"), (history, "<th>loss</th>"),
        (fleet, "a&lt;b"), (fleet.results, "<td>a&lt;b</td>"), (cv.build_graph(nn.Linear(2), (2,), "mse", "adam"), "placeholder"),
    ):  # fmt: skip
        page = shown._repr_html_()
        assert wanted in page and "a<b" not in page
        assert page.count("<td>") == page.count("</td>") and page.count("<pre") == page.count("</pre>")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.00041, "410 us"),
        (0.0123, "12.3 ms"),
        (1.234, "1.23 s"),
        (123.4, "123 s"),
        (0.0, "0.00 us"),
        (0.00999, "9.99 ms"),
    ],
)
def test_times_say_something(seconds, text):
    assert duration(seconds) == text


def test_one_number_a_sample_may_come_without_its_axis():
    """A target of shape (n,) where (n, 1) is wanted, by every call and to the bit."""
    x = RNG.standard_normal((40, 4)).astype("f4")
    y = x[:, 0] * 2 + 1
    ours, theirs = (
        cv.Model(
            nn.Linear(1), input_shape=(4,), loss="mse", optimizer=cv.Adam(0.1), batch_size=8, metrics=["rmse"], seed=0
        )
        for _ in range(2)
    )
    fitted = [
        model.fit(x, t, epochs=2, validation=(x[:9], t[:9]), progress=False).epochs
        for model, t in ((ours, y), (theirs, y[:, None]))
    ]
    assert [e["loss"] for e in fitted[0]] == [e["loss"] for e in fitted[1]]
    assert [e["val_rmse"] for e in fitted[0]] == [e["val_rmse"] for e in fitted[1]]
    for given in (y, y.astype("f8"), [*y[:8]], np.arange(8)):
        for _ in range(3):
            assert ours.step(x[:8], given[:8]) == theirs.step(x[:8], np.asarray(given)[:8, None])
        assert ours.evaluate(x[: len(given)], given) == theirs.evaluate(x[: len(given)], np.asarray(given)[:, None])
    assert ours.bind(x[:8].copy(), y[:8].copy())() == theirs.step(x[:8], y[:8, None])
    ours["target"], theirs["target"] = y[:8], y[:8, None]
    np.testing.assert_array_equal(ours["target"], theirs["target"])
    fleet = cv.Fleet("1 MiB")
    handle = fleet.add(ours.program, data=(x, y))
    fleet.fit(2, progress=False)
    assert np.isfinite(handle.loss)
    with pytest.raises(cv.ShapeError, match=r"data of shape \(8,\) has rank 1, \(B, 4\)"):
        ours.step(np.ones(8), y[:8])

"""Sequences of unequal lengths: batches of like lengths, and results as long as each sequence."""

from __future__ import annotations

import io

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.model.data import like_lengths
from calcvm.vm.memory.epoch import shuffling_key

T, K = 9, 3


def ragged(net=None, **how):
    options = {
        "loss": "mse",
        "optimizer": cv.SGD(0.05),
        "batch_size": 4,
        "dtype": "float64",
        "seed": 3,
        "lengths": True,
    }
    return cv.Model(net or nn.Linear(2), input_shape=(T, K), **{**options, "workers": 1, **how})


def sequences(n, seed=0, out=2):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, T + 1, n)
    return [rng.standard_normal((m, K)) for m in lengths], [rng.standard_normal((m, out)) for m in lengths]


# ---------------------------------------------------------------- batches of like lengths
@pytest.mark.parametrize("n, batch", [(1, 4), (4, 4), (5, 4), (31, 32), (640, 32), (1003, 10)])
def test_an_order_has_every_sample_once_and_like_lengths_in_a_batch(n, batch):
    lengths = np.random.default_rng(n).integers(0, 1000, n)

    def spread(order):
        return np.mean([np.ptp(lengths[order[i : i + batch]]) for i in range(0, n - n % batch, batch)] or [0])

    orders = [like_lengths(lengths, batch, key) for key in range(20)]
    for order in orders:
        assert sorted(order) == [*range(n)]
    assert np.array_equal(orders[3], like_lengths(lengths, batch, 3))
    if n > 10 * batch:
        assert all(spread(order) < 3000 * batch / n for order in orders)
        assert spread(np.random.default_rng(0).permutation(n)) > 600
        firsts = [np.mean(lengths[order[:batch]]) for order in orders]  # batches are shuffled
        assert np.std(firsts) > 100
        met = {tuple(sorted(order[i : i + batch])) for order in orders for i in range(0, n - n % batch, batch)}
        assert len(met) > 18 * (n // batch)  # other samples meet in each pass
        if n % batch:
            lasts = [lengths[order[-(n % batch) :]].mean() for order in orders]
            assert np.std(lasts) > 100
    assert np.array_equal(like_lengths(lengths, batch, None), np.argsort(lengths, kind="stable"))


class Plain:
    """One linear layer by NumPy: the mean of squares over the steps that are there, times each sequence's weight."""

    def __init__(self, model):
        self.w, self.b = (model.parameters[f"linear_1.{name}"].copy() for name in ("weight", "bias"))

    def step(self, X, Y, weights, rate=0.05):
        dw, db, loss, count = np.zeros_like(self.w), np.zeros_like(self.b), 0.0, sum(y.size for y in Y)
        for x, y, of in zip(X, Y, weights):
            e = x @ self.w + self.b - y
            loss += of * (e**2).sum()
            dw, db = dw + 2 * of * x.T @ e, db + 2 * of * e.sum(0)
        self.w, self.b = self.w - rate * dw / max(count, 1), self.b - rate * db / max(count, 1)
        return np.array([loss, count])


@pytest.mark.parametrize("weighted", (False, True))
@pytest.mark.parametrize("options", [{}, {"validation": 0.25}, {"shuffle": False}], ids=["all", "held out", "in order"])
def test_training_beside_a_loop_in_numpy(options, weighted):
    """Also with a share held out and weights: losses and parameters of three epochs."""
    X, Y = sequences(50)
    model = ragged(sample_weight=weighted)
    weights = np.random.default_rng(1).uniform(0.5, 2, 50) if weighted else np.ones(50)
    given = {"sample_weight": weights} if weighted else {}
    plain, losses, n = Plain(model), [], 50 - round(50 * options.get("validation", 0))
    history = model.fit(X, Y, epochs=3, progress=False, bucket_by_length=True, **given, **options)
    for epoch in range(3):
        key = shuffling_key(3, epoch) if options.get("shuffle", True) else None
        order, total = like_lengths(np.array([len(x) for x in X[:n]]), 4, key), 0
        for start in range(0, n, 4):
            at = order[start : start + 4]
            total += plain.step([X[i] for i in at], [Y[i] for i in at], weights[at])
        losses.append(total[0] / total[1])  # over all steps
    np.testing.assert_allclose(model.parameters["linear_1.weight"], plain.w, rtol=1e-11)
    np.testing.assert_allclose(history["loss"], losses, rtol=1e-11)
    assert ("val_loss" in history.names) == ("validation" in options)


@pytest.mark.parametrize("dtype", ("float32", "float64"))
def test_the_same_bits_for_any_team_and_again(dtype):
    """And those of a pass over the same order, which is that of a learning batch of several rounds."""
    X, Y = sequences(50, 1)[0], np.random.default_rng(2).standard_normal((50, 4))
    given, found = {"dtype": dtype, "learning_batch": 11}, []
    for workers in (1, 2, 3, 1):
        model = ragged(nn.LSTM(4, return_sequences=False), workers=workers, **given)
        history = model.fit(X, Y, epochs=2, progress=False, bucket_by_length=True)
        found.append([*model.get_weights().values(), np.array(history["loss"])])
    model = ragged(nn.LSTM(4, return_sequences=False), **given)
    padded, lengths = cv.pad_sequences(X, T)
    for epoch in range(2):
        order = like_lengths(lengths, 11, shuffling_key(3, epoch))
        for start in range(0, 50, 11):
            at = order[start : start + 11]
            model.fit((padded[at], lengths[at]), Y[at], shuffle=False, progress=False)
    found.append([*model.get_weights().values(), found[0][-1]])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert a.tobytes() == b.tobytes()


def test_a_training_goes_on_with_the_epochs_of_before():
    X, Y = sequences(30)
    one, two = ragged(), ragged()
    one.fit(X, Y, epochs=3, progress=False, bucket_by_length=True)
    for _ in range(3):
        two.fit(X, Y, progress=False, bucket_by_length=True)
    assert one.parameters["linear_1.weight"].tobytes() == two.parameters["linear_1.weight"].tobytes()


def test_what_has_no_lengths_has_no_buckets():
    X, Y = sequences(8)
    padded, targets = cv.pad_sequences(X, T)[0], cv.pad_sequences(Y, T)[0]
    model = ragged()
    before = model.get_weights()
    for call, message in (
        (lambda: ragged(lengths=False).fit(padded, targets, bucket_by_length=True), r"no lengths: cv.Model\(..., lengths=True\)"),
        (lambda: model.fit(iter([(X, Y)]), bucket_by_length=True), "bucket_by_length: not possible with batches that come one by one"),
        (lambda: model.fit(X, Y, bucket_by_length="yes"), "bucket_by_length"),
        (lambda: model.fit(X, Y, order=("learn",), bucket_by_length=True), "in turn"),
    ):  # fmt: skip
        with pytest.raises(cv.CalcError, match=message):
            call()
    for name, value in model.get_weights().items():
        assert value.tobytes() == before[name].tobytes()


# ---------------------------------------------------------------- results of each sequence
def alike(found, right, lengths):
    assert isinstance(found, list) and [len(y) for y in found] == [*lengths]
    for y, all_, n in zip(found, right, lengths):
        assert y.dtype == right.dtype
        np.testing.assert_array_equal(y, all_[:n])


@pytest.mark.parametrize("dtype", ("float32", "float64"))
def test_a_list_of_sequences_gives_a_list_of_results(dtype):
    """In any number of batches, by compiled calls too, and from a file; each is that of the sequence alone."""
    X, _ = sequences(11)
    model, file = ragged(nn.GRU(3) >> nn.LayerNorm() >> nn.Linear(2), dtype=dtype), io.BytesIO()
    padded, lengths = cv.pad_sequences(X, T)
    model.save(file)
    file.seek(0)
    for of in (model, cv.load(file)):
        for n in (11, 3, 3, 3, 1):
            right = of.predict((padded[:n], lengths[:n]))
            assert isinstance(right, np.ndarray)
            alike(of.predict(X[:n]), right, lengths[:n])
            out = np.empty_like(right)
            assert of.predict(X[:n], out=out) is out
            np.testing.assert_array_equal(out, right)
    for x, y in zip(X, model.predict(X)):
        np.testing.assert_allclose(model.predict([x])[0], y, rtol=1e-5 if dtype == "float32" else 1e-12, atol=1e-6)
    whole = [*np.ones((2, T, K))]
    assert [y.shape for y in model.predict(whole)] == [(T, 2)] * 2  # a list, also if all are as long
    assert model.predict(np.ones((2, T, K))).shape == (2, T, 2)


class Again(nn.Layer):
    """T steps that are not those of the input."""

    def build(self, x, scope, training):
        return cv.reshape(x, (None, T, 2))


def test_outputs_without_steps_are_arrays():
    X, _ = sequences(5)
    assert ragged(nn.LSTM(4, return_sequences=False) >> nn.Linear(2)).predict(X).shape == (5, 2)
    assert ragged(nn.LSTM(4, return_sequences=False) >> nn.Linear(T)).predict(X).shape == (5, T)
    assert ragged(nn.LSTM(4, return_sequences=False) >> nn.Linear(2 * T) >> Again()).predict(X).shape == (5, T, 2)


def test_classes_and_probabilities_of_each_sequence():
    rng = np.random.default_rng(0)
    words = [rng.integers(0, 6, n) for n in (3, 9, 1, 4)]
    net = nn.Embedding(6, 4) >> nn.GRU(4) >> nn.Linear(3)
    model = cv.Model(net, input_shape=(T,), optimizer="adam", batch_size=3, lengths=True, seed=0, workers=1)
    padded, lengths = cv.pad_sequences(words, T)
    for method in (model.predict, model.predict_proba, model.predict_classes):
        alike(method(words), method((padded, lengths)), lengths)
    assert {y.dtype for y in model.predict_classes(words)} == {np.dtype(np.int64)}
    with pytest.raises(cv.ShapeError, match="sequence 1 has 10 steps, and 9 are the most"):
        model.predict([words[0], np.zeros(10, int)])


# ---------------------------------------------------------------- data that do not fit
def test_targets_have_the_steps_of_their_sequences():
    model, (X, Y) = ragged(), sequences(8)
    i = next(i for i, x in enumerate(X) if len(x) > 1)
    wrong = [*Y[:i], Y[i][:-1], *Y[i + 1 :]]
    for call in (model.fit, model.evaluate):
        with pytest.raises(
            cv.ShapeError, match=rf"y: sequence {i} has {len(X[i]) - 1} steps, and that of X has {len(X[i])}"
        ):
            call(X, wrong)


@pytest.mark.parametrize("where", ["X", "y"])
def test_what_is_past_the_ends_is_no_matter(where):
    """Also where it is NaN."""
    X, Y = sequences(12)
    (padded, lengths), (targets, _) = cv.pad_sequences(X, T), cv.pad_sequences(Y, T)
    past = np.arange(T) >= lengths[:, None]
    trained = []
    for filled in (0.0, np.nan, np.inf):
        (padded if where == "X" else targets)[past] = filled
        model = ragged(nn.LSTM(4) >> nn.Linear(2))
        model.fit((padded, lengths), targets, epochs=2, progress=False)
        trained.append(model.get_weights())
    for other in trained[1:]:
        for name, array in other.items():
            np.testing.assert_array_equal(array, trained[0][name])


def test_a_mean_over_steps_is_of_those_that_are_there():
    X, _ = sequences(9)
    model = ragged(nn.MeanOverSteps() >> nn.Linear(K), stream=True)
    model.set_weights({"linear_1.weight": np.eye(K), "linear_1.bias": np.zeros(K)})
    wanted = [x.mean(0) if len(x) else np.zeros(K) for x in X]
    np.testing.assert_allclose(model.predict(X), wanted, rtol=1e-12, atol=1e-15)
    whole = max(X, key=len)
    stream = model.stream()
    so_far = [stream(x) for x in whole]
    np.testing.assert_allclose(so_far, np.cumsum(whole, axis=0) / np.arange(1, len(whole) + 1)[:, None], rtol=1e-12)


def test_what_knows_no_lengths_is_refused():
    X, Y = sequences(8)
    for norm in (nn.BatchNorm(), nn.GroupNorm(3), nn.InstanceNorm()):
        with pytest.raises(cv.ShapeError, match=r"with lengths, which have no channels: take nn.LayerNorm\(\)"):
            ragged(nn.LSTM(6) >> norm >> nn.Linear(2))
    with pytest.raises(cv.CalcError, match="no layer reads the lengths, and the output has no steps"):
        ragged(nn.Flatten() >> nn.Linear(2))
    ragged(nn.LSTM(6) >> nn.Flatten() >> nn.Linear(2))
    with pytest.raises(cv.ShapeError, match=r"sequences of different lengths are cv.pad_sequences\(sequences, steps\)"):
        ragged().step(X, [len(x) for x in X], Y)


def test_a_wrong_label_is_one_of_the_target():
    model = ragged(loss="softmax_cross_entropy")
    with pytest.raises(cv.Trap, match=r"a label of 'target.there.counted' is not an integer in \[0, 2\)"):
        model.fit([np.ones((4, K))] * 4, [np.array([0, 1, 2, 1])] * 4, progress=False)


def test_the_classifier_of_the_zoo_averages_the_steps_that_are_there():
    """Room for more steps changes nothing."""
    results, weights = [], None
    for room in (6, 15):
        net = cv.zoo.transformer_classifier(3, width=8, layers=1, heads=2, steps=15, vocabulary=11)
        model = cv.Model(net, input_shape=(room,), optimizer="adam", dtype="float64", lengths=True, seed=1)
        weights = weights or model.get_weights()
        model.set_weights(weights)
        results.append(model.predict([[1, 2, 3], [4], [5, 6, 7, 8, 9, 10]]))
    np.testing.assert_allclose(*results, rtol=1e-12)


def test_arrays_of_arrays_are_lists():
    X, _ = sequences(5)
    objects = np.empty(5, object)
    objects[:] = X
    model = ragged()
    for found, wanted in zip(model.predict(objects), model.predict(X)):
        np.testing.assert_array_equal(found[: len(wanted)], wanted)
    with pytest.raises(cv.CalcError, match="np.stack"):
        cv.Model(nn.Linear(2), input_shape=(T, K), optimizer="adam").predict(objects)


def test_adapt_counts_no_padding():
    X, _ = sequences(8)
    model = ragged(nn.Standardize(axis=-1) >> nn.LSTM(3))
    with pytest.raises(cv.CalcError, match="past their ends"):
        model.adapt(X)
    model.adapt([np.full((T, K), 5.0), np.full((T, K), 7.0)])
    assert (model.get_weights()["standardize_1.mean"].ravel() == 6).all()

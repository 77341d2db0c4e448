"""Augmentation of images, dropout of channels, and data channels last: by graphs and models."""

from __future__ import annotations

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from tests.reference import random as reference

RNG = np.random.default_rng(0)
X = RNG.integers(0, 256, (200, 3, 8, 6)).astype(np.uint8)
LABELS = np.arange(200) % 4


def run(layer, x=X, *, workers=1, dtype="uint8", passes=1, training=True, batch=None, channels_last=False):
    """What a layer makes of a batch, pass after pass, and the generator's state before each."""
    g = cv.CalcGraph()
    image = g.placeholder("x", (None, *x.shape[1:]), dtype, channels_last)
    with g.path("run"):
        y = layer.build(image, "layer", training)
    model = cv.CalcHeap("8 MiB").create(cv.compile(g, batch_size=batch or len(x), workers=workers), seed=5)
    out, states = [], []
    for _ in range(passes):
        model["x"] = x
        model.forward("run")
        out.append(np.array(model[y.name]))
        states.append(np.array(model["rng"]) if "rng" in g.variables else None)
    return out, states


LAYERS = {
    "crop": (nn.RandomCrop((5, 6), padding=(1, 2)), {"sizes": (5, 6), "padding": (1, 2), "flips": (0, 0)}),
    "shift": (nn.RandomShift(2, "edge"), {"sizes": (8, 6), "padding": (2, 2), "flips": (0, 0), "mode": "edge"}),
    "left to right": (nn.RandomHorizontalFlip(), {"sizes": (8, 6), "padding": (0, 0), "flips": (0, 0.5)}),
    "top to bottom": (nn.RandomVerticalFlip(0.2), {"sizes": (8, 6), "padding": (0, 0), "flips": (0.2, 0)}),
}


@pytest.mark.parametrize("dtype", ["uint8", None])
@pytest.mark.parametrize("name", LAYERS)
def test_images_are_those_of_the_reference(name, dtype):
    layer, settings = LAYERS[name]
    out, states = run(layer, dtype=dtype, passes=2)
    for y, state in zip(out, states):
        assert y.dtype == (dtype or "float32")
        np.testing.assert_array_equal(y, reference.crop(X, state, **settings))
    assert (out[0] != out[1]).any()
    for workers, batch in ((2, None), (3, 300)):
        again, _ = run(layer, dtype=dtype, passes=2, workers=workers, batch=batch)
        assert all(map(np.array_equal, out, again))
    last, _ = run(layer, X.transpose(0, 2, 3, 1).copy(), dtype=dtype, passes=2, channels_last=True)
    assert all(map(np.array_equal, out, last))


def test_signals_and_volumes():
    for shape, layer in (((50, 2, 9), nn.RandomShift(3)), ((50, 2, 4, 5, 6), nn.RandomCrop((4, 3, 2), (1, 0, 2)))):
        x = RNG.standard_normal(shape).astype(np.float32)
        (y,), (state,) = run(layer, x, dtype=None)
        n = len(shape) - 2
        settings = {"sizes": shape[2:], "padding": (3,)} if n == 1 else {"sizes": (4, 3, 2), "padding": (1, 0, 2)}
        np.testing.assert_array_equal(y, reference.crop(x, state, **settings, flips=(0,) * n))


def test_all_places_are_equally_frequent():
    x = np.zeros((6000, 1, 5, 5), np.float32)
    x[:, 0, 2, 2] = 1
    (y,), _ = run(nn.RandomShift(2), x, dtype=None)
    counts = y.sum((0, 1))
    assert counts.sum() == 6000 and abs(counts - 240).max() < 5 * 240**0.5  # of 25 places
    (crops,), _ = run(nn.RandomCrop(3), x, dtype=None)
    assert abs(crops.sum((0, 1)) - 6000 / 9).max() < 5 * (6000 / 9) ** 0.5


@pytest.mark.parametrize("p", [0.0, 0.2, 1.0])
def test_flips_come_as_often_as_said(p):
    x = np.broadcast_to(np.arange(4, dtype=np.float32), (5000, 1, 2, 4)).copy()
    (y,), _ = run(nn.RandomHorizontalFlip(p), x, dtype=None)
    mirrored = y[:, 0, 0, 0] == 3
    assert (y[mirrored] == x[0, :, :, ::-1]).all() and (y[~mirrored] == x[0]).all()
    assert abs(mirrored.mean() - p) <= 5 * (p * (1 - p) / 5000) ** 0.5


def test_what_is_drawn_for_offset_and_flip_is_independent():
    x = np.zeros((8000, 1, 1, 4), np.float32)
    x[:, 0, 0] = [1, 2, 0, 0]
    (y,), _ = run(nn.RandomHorizontalFlip() >> nn.RandomShift((0, 1), "wrap"), x, dtype=None)
    patterns, counts = np.unique(y.reshape(-1, 4), axis=0, return_counts=True)
    assert len(patterns) == 6 and abs(counts - 8000 / 6).max() < 5 * (8000 / 6) ** 0.5


@pytest.mark.parametrize("name", LAYERS)
def test_nothing_is_drawn_without_training(name):
    (y,), (state,) = run(LAYERS[name][0], training=False)
    assert state is None
    np.testing.assert_array_equal(y, X[:, :, 1:6] if name == "crop" else X)


def test_middles_of_padded_images():
    (y,), _ = run(nn.RandomCrop(9, padding=2), training=False)
    np.testing.assert_array_equal(y, np.pad(X, ((0, 0), (0, 0), (2, 2), (2, 2)))[:, :, 1:10, :9])


def test_channels_are_normalized():
    mean, std = np.array([1.0, 2.0, 3.0]), np.array([0.5, 4.0, 10.0])
    (y,), _ = run(nn.Normalize(mean, std))
    np.testing.assert_allclose(y, (X - mean.reshape(3, 1, 1)) / std.reshape(3, 1, 1), rtol=1e-6)
    (y,), _ = run(nn.Normalize(mean=128, std=[64]))
    np.testing.assert_allclose(y, (X - 128.0) / 64, rtol=1e-6)


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (lambda x: cv.random_crop(x, 9), cv.ShapeError, r"crop of 9 is larger than 8 of \(B, 3, 8, 6\) with 0"),
        (lambda x: cv.random_crop(x, 8, 8, "reflect"), cv.ShapeError, "padding 8 of 8"),
        (lambda x: cv.random_crop(x, (8, 0)), cv.CalcError, "size"),
        (lambda x: cv.random_crop(x, 4, -1), cv.CalcError, "padding"),
        (lambda x: cv.random_crop(x, 4, 1, "mirror"), cv.CalcError, "mode"),
        (lambda x: nn.RandomShift(-1), cv.CalcError, "RandomShift: most must be an integer from 0 to"),
        (lambda x: nn.RandomCrop(None), cv.CalcError, "RandomCrop: size"),
        (lambda x: nn.RandomCrop(4, padding=(1, -1)), cv.CalcError, "RandomCrop: padding"),
        (lambda x: nn.RandomCrop(4, mode="mirror"), cv.CalcError, "RandomCrop: mode"),
        (lambda x: nn.RandomShift((1, 2, 3)).build(x, "layer", True), cv.CalcError, "each of the 2 spatial axes"),
        (lambda x: nn.RandomHorizontalFlip(1.5), cv.CalcError, r"RandomHorizontalFlip: p must be a number in \[0, 1\]"),
        (lambda x: cv.random_flip(x, 0.5, 1), cv.CalcError, "axis 1 of x .* is not a spatial axis"),
        (lambda x: cv.random_flip(cv.flatten(x)), cv.ShapeError, "1 to 3 sizes"),
        (lambda x: nn.Normalize([1, 2], 1).build(x, "layer", True), cv.ShapeError, "2 numbers of mean for the channels"),
        (lambda x: nn.Normalize(0, [1, 0, 1]), cv.CalcError, "give numbers above 0"),
        (lambda x: nn.Normalize(np.nan, 1), cv.CalcError, "give finite numbers"),
        (lambda x: cv.dropout2d(x, 1), cv.CalcError, "rate"),
        (lambda x: x.graph.placeholder("y", (None, 3), channels_last=True), cv.ShapeError, r"\(N, \*sizes, channels\)"),
        (lambda x: cv.apply("crop", x, np.zeros(1), sizes=(1, 1), padding=(0, 0), flips=(0, 0)), cv.ShapeError, "rng"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused(build, error, text):
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 3, 8, 6))
    with g.path("learn", backward=True), pytest.raises(error, match=text):
        build(x)
    assert not g.states and "rng" not in g.variables


def test_what_has_no_channels_has_none_to_drop():
    g = cv.CalcGraph()
    x = g.placeholder("x", (None,))
    with g.path("learn", backward=True), pytest.raises(cv.ShapeError, match="no channels"):
        cv.dropout2d(x)
    assert [*g.variables] == ["x"] and not g.states


def test_images_that_are_trained_cannot_be_augmented():
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 3, 8, 6))
    w = g.parameter("w", (2, 3, 3, 3))
    with g.path("learn", backward=True) as learn:
        learn.minimize(cv.mean(cv.random_flip(cv.conv2d(x, w))), "adam")
    with pytest.raises(cv.UnsupportedOperator, match="'crop' has no gradient"):
        cv.compile(g, batch_size=4)


# ---------------------------------------------------------------- dropout of channels
@pytest.mark.parametrize("rate", [0.2, 0.7])
@pytest.mark.parametrize("shape", [(3000, 5), (3000, 4, 3), (3000, 4, 3, 2)])
def test_whole_channels_are_dropped(rate, shape):
    x = RNG.uniform(1, 2, shape).astype(np.float32)
    out, states = run(nn.Dropout2d(rate), x, dtype=None, passes=2)
    mask = reference.dropout_mask(x, states[0], rate)
    np.testing.assert_allclose(out[0], x * mask, rtol=1e-6)
    kept = mask != 0
    assert abs(kept.mean() - (1 - rate)) < 5 * (rate * (1 - rate) / kept.size) ** 0.5
    assert ((out[1] != 0) != (out[0] != 0)).any()
    assert all(map(np.array_equal, out, run(nn.Dropout2d(rate), x, dtype=None, passes=2, workers=3)[0]))


def test_dropped_channels_have_no_gradient():
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 3, 6, 7))
    w = g.parameter("w", (4, 3, 1, 1))
    with g.path("learn", backward=True) as learn:
        y = cv.dropout2d(cv.conv2d(x, w), 0.5)
        learn.minimize(cv.sum(y), optimizer=cv.SGD(0.0), output=y)
    model = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=1))
    names = [model.program.spec(pc).name for pc in range(len(model.program.rows))]
    assert names.count("dropout_mask_fwd") == 1 and "mul_bwd_b" not in names
    model["x"] = np.ones((1, 3, 6, 7))
    for _ in range(8):
        model.forward("learn")
        model.backward("learn")
        dropped = ~np.array(model[y.name])[0].any((1, 2))
        np.testing.assert_allclose(model.grad("w", "learn").sum((1, 2, 3)), np.where(dropped, 0, 3 * 42 * 2), rtol=1e-5)
        model.end_round("learn")


# ---------------------------------------------------------------- models
def network():
    return (
        nn.Conv2d(4, 3, padding=1)
        >> nn.ReLU()
        >> nn.Dropout2d(0.2)
        >> nn.GlobalAvgPool()
        >> nn.Flatten()
        >> nn.Linear(4)
    )


AUGMENT = nn.RandomHorizontalFlip() >> nn.RandomShift(1) >> nn.Scale(1 / 255) >> nn.Normalize([0.5, 0.4, 0.3], 0.25)


def model_of(preprocess=AUGMENT, net=None, **settings):
    return cv.Model(
        net or network(), **{"input_shape": X.shape[1:]} | settings, loss="softmax_cross_entropy", optimizer=cv.SGD(0.01),
        batch_size=32, seed=2, preprocess=preprocess,
    )  # fmt: skip


@pytest.mark.parametrize("settings", [{"input_dtype": "uint8"}, {}], ids=["uint8", "float"])
def test_training_augments_and_prediction_does_not(settings):
    model, plain = model_of(**settings), model_of(nn.Scale(1 / 255) >> nn.Normalize([0.5, 0.4, 0.3], 0.25), **settings)
    before = np.array(model["rng"])
    np.testing.assert_array_equal(model.predict(X), plain.predict(X))
    assert model.evaluate(X, LABELS) == plain.evaluate(X, LABELS)
    assert np.array_equal(model["rng"], before)
    losses = [m.fit(X, LABELS, epochs=3, progress=False, shuffle=False)["loss"] for m in (model, plain)]
    assert np.isfinite(losses).all() and losses[0] != losses[1]
    assert list(model["rng"] - before) == [0, 3 * 7]  # seven batches an epoch, none in prediction
    again = model_of(**settings, workers=2)
    assert again.fit(X, LABELS, epochs=3, progress=False, shuffle=False)["loss"] == losses[0]
    np.testing.assert_array_equal(again.predict(X), model.predict(X))


def test_what_is_learnt_from_are_the_images_of_the_reference():
    """A loss of the images alone, step by step and by whole epochs."""

    def seen(preprocess):
        net = nn.Flatten() >> nn.Linear(1, init="ones", trainable=False) >> nn.Linear(1, init="ones", bias=False)
        return cv.Model(net, input_shape=X.shape[1:], loss=lambda y, t: cv.mean(y * t), optimizer=cv.SGD(0.0), batch_size=50,
                        preprocess=preprocess, target_shape=(1,), seed=2, dtype="float64")  # fmt: skip

    target = RNG.standard_normal((200, 1))
    settings = {"sizes": (8, 6), "padding": (3, 3), "flips": (0, 0)}
    stepped, fitted = seen(nn.RandomShift(3)), seen(nn.RandomShift(3))
    want = []
    for _ in range(2):
        losses = fitted.fit(X, target, epochs=1, shuffle=False, progress=False)["loss"]
        for i in range(0, 200, 50):
            loss = stepped.step(X[i : i + 50], target[i : i + 50])
            images = reference.crop(X[i : i + 50], np.array(stepped["rng"]), **settings).reshape(50, -1)
            want.append(np.mean(images.sum(1, keepdims=True, dtype=float) * target[i : i + 50]))
            assert loss == pytest.approx(want[-1])
        assert losses[0] == pytest.approx(np.mean(want[-4:]))
    assert len({*np.round(want, 3)}) == 8


@pytest.mark.parametrize(
    "preprocess",
    [
        nn.Residual(nn.Dropout(0.5)),
        nn.Concat(nn.Scale(2.0) >> nn.RandomVerticalFlip(), nn.Scale(1.0)),
        nn.Dropout2d(0.3),
    ],
    ids=repr,
)
def test_layers_that_hold_what_draws_do_so_while_training_alone(preprocess):
    model = model_of(nn.Scale(1 / 255) >> preprocess, nn.Flatten() >> nn.Linear(4))
    assert "preprocess" in model.program.paths
    first = model.predict(X)
    assert list(model["rng"])[1] == 0 and np.array_equal(first, model.predict(X))
    model.fit(X, LABELS, progress=False)
    assert list(model["rng"])[1] == 7


def test_rounds_that_add_up_draw_each_for_themselves():
    models = [model_of(learning_batch=64, workers=workers) for workers in (1, 2)]
    one, two = (m.fit(X, LABELS, epochs=2, progress=False)["loss"] for m in models)
    assert one == two and list(models[0]["rng"])[1] == 2 * 7  # a round has a technical batch of 32


def test_a_fleet_has_the_bits_of_a_model_alone():
    graph = cv.build_graph(network(), X.shape[1:], "softmax_cross_entropy", cv.SGD(0.01), preprocess=AUGMENT)
    program = cv.compile(graph, batch_size=32)
    fleet = cv.Fleet(2 * program.heap_bytes, workers=2)
    handles = [fleet.add(program, data=(X, LABELS), seed=seed) for seed in (2, 3, 4)]
    fleet.fit(epochs=2, progress=False)
    alone = model_of()
    alone.fit(X, LABELS, epochs=2, progress=False)
    np.testing.assert_array_equal(handles[0].model.predict(X), alone.predict(X))
    assert (handles[1].model.predict(X) != alone.predict(X)).any()


def test_a_saved_model_draws_on(tmp_path):
    model = model_of()
    model.fit(X, LABELS, progress=False)
    model.save(tmp_path / "m.calc")
    again = cv.load(tmp_path / "m.calc")
    assert again.fit(X, LABELS, progress=False)["loss"] == model.fit(X, LABELS, progress=False)["loss"]


# ---------------------------------------------------------------- channels last
@pytest.mark.parametrize("dtype", ["uint8", "float32", None])
@pytest.mark.parametrize("preprocess", [None, nn.Scale(1 / 255), AUGMENT], ids=["none", "scale", "augment"])
def test_images_channels_last_are_read_as_they_are(preprocess, dtype):
    last = np.ascontiguousarray(X.transpose(0, 2, 3, 1))
    first, other = (
        model_of(preprocess, input_dtype=dtype, **of)
        for of in ({}, {"channels_last": True, "input_shape": last.shape[1:]})
    )
    assert (
        first.fit(X, LABELS, epochs=2, progress=False)["loss"]
        == other.fit(last, LABELS, epochs=2, progress=False)["loss"]
    )
    np.testing.assert_array_equal(first.predict(X), other.predict(last))
    assert first.step(X[:32], LABELS[:32]) == other.step(last[:32], LABELS[:32])
    assert np.array_equal(first["input"], X[:32]) and np.array_equal(other["input"], last[:32])

    turned = [model.program.disassemble().count("transpose_fwd") for model in (first, other)]
    assert turned == [2, 0]  # once a path


def test_channels_last_is_what_the_input_is_and_no_more(tmp_path):
    last = np.ascontiguousarray(X.transpose(0, 2, 3, 1))
    settings = {"channels_last": True, "input_shape": last.shape[1:]}
    net = nn.Flatten() >> nn.Linear(4)  # which sees axes in their usual order
    model, other = model_of(None, net, **settings), model_of(None, nn.Flatten() >> nn.Linear(4))
    np.testing.assert_array_equal(model.predict(last), other.predict(X))
    model.save(tmp_path / "m.calc")
    np.testing.assert_array_equal(cv.load(tmp_path / "m.calc").predict(last), other.predict(X))
    with pytest.raises(cv.ShapeError, match=r"\(n, 8, 6, 3\)|8, 6, 3"):
        model.predict(X)
    with pytest.raises(cv.CalcError, match="has its channels_last already"):
        cv.Model(cv.CalcGraph(), channels_last=True)

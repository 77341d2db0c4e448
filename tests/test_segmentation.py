"""A class for each pixel: losses, metrics and softmax over channels, views of images by their layout, outputs that are judged."""

from __future__ import annotations

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn

RNG = np.random.default_rng(0)
SIZES = {1: (9,), 2: (6, 5), 3: (3, 4, 2)}  # by spatial axes
X = {n: RNG.standard_normal((12, 2, *sizes)) for n, sizes in SIZES.items()}
LABELS = {n: RNG.integers(0, 3, (12, *sizes)) for n, sizes in SIZES.items()}
DENSE = {n: RNG.dirichlet([1.0] * 3, (12, *sizes)).astype("float32") for n, sizes in SIZES.items()}


def network(n):
    conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[n]
    return conv(4, 3, padding=1) >> nn.Tanh() >> conv(3, 1)


def model_of(n, **options):
    loss = options.pop("loss", "softmax_cross_entropy")
    how = {"optimizer": cv.SGD(0.5), "batch_size": 5, "dtype": "float64", "seed": 1, **options}
    return cv.Model(network(n), input_shape=X[n].shape[1:], loss=loss, **how)


def channels(x):
    """The axis of channels first, of an array that has it last."""
    return np.moveaxis(x, -1, 1)


def theirs(torch, n, model, x):
    w = {name: torch.tensor(v, requires_grad=True) for name, v in model.get_weights().items()}
    f = getattr(torch.nn.functional, f"conv{n}d")
    first, second = f"conv{n}d_1", f"conv{n}d_2"
    h = torch.tanh(f(torch.tensor(x), w[f"{first}.weight"], w[f"{first}.bias"], padding=1))
    return w, f(h, w[f"{second}.weight"], w[f"{second}.bias"])


@pytest.mark.peers
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("dense", [False, True], ids=["labels", "probabilities"])
@pytest.mark.parametrize("n", SIZES)
def test_a_step_against_torch(n, dense, workers):
    torch = pytest.importorskip("torch")
    targets = channels(DENSE[n]).astype(float) if dense else LABELS[n]
    model = model_of(n, workers=workers, target_shape=targets.shape[1:])
    for batch in (5, 3, 1):
        x, t = X[n][:batch], targets[:batch]
        w, scores = theirs(torch, n, model, x)
        loss = torch.nn.functional.cross_entropy(scores, torch.tensor(t))
        loss.backward()
        assert model.step(x, t) == pytest.approx(loss.item(), rel=1e-12)
        for name, v in w.items():
            np.testing.assert_allclose(model.parameters[name], (v - 0.5 * v.grad).detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("n", SIZES)
def test_classes_and_figures(n):
    model = model_of(n)
    scores = model.predict(X[n])
    assert scores.shape == (12, 3, *SIZES[n])
    p = np.exp(scores - scores.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    np.testing.assert_allclose(model.predict_proba(X[n]), p, rtol=1e-12)
    classes = model.predict_classes(X[n])
    assert (classes == scores.argmax(1)).all() and classes.shape == LABELS[n].shape
    chosen = np.take_along_axis(p, LABELS[n][:, None], 1)
    figures = model.evaluate(X[n], LABELS[n])
    assert figures["loss"] == pytest.approx(-np.log(chosen).mean(), rel=1e-12)
    assert figures["accuracy"] == pytest.approx((classes == LABELS[n]).mean(), rel=1e-12)


@pytest.mark.parametrize("n", SIZES)
def test_weights_of_samples_weigh_all_their_pixels(n):
    weights = np.arange(12.0)
    model, plain = (model_of(n, sample_weight=weighted, batch_size=12) for weighted in (True, False))
    scores = plain.predict(X[n])
    log_p = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    terms = -np.take_along_axis(log_p, LABELS[n][:, None], 1)
    history = model.fit(X[n], LABELS[n], sample_weight=weights, epochs=1, shuffle=False, progress=False)
    weighted = weights.reshape(-1, *(1,) * (n + 1)) * terms
    assert history["loss"][0] == pytest.approx(weighted.mean(), rel=1e-12)


@pytest.mark.parametrize("loss", ["softmax_cross_entropy", "mse"])
@pytest.mark.parametrize("method", ["mean", "vote"])
def test_an_ensemble_judges_images(loss, method):
    """Of one model it judges as the model does; its outputs lie otherwise than those that are given to be judged."""
    if (loss, method) == ("mse", "vote"):
        return
    targets = LABELS[2] if loss != "mse" else RNG.standard_normal((12, 3, *SIZES[2]))
    model, other = (model_of(2, loss=loss, seed=seed) for seed in (1, 2))
    for m in (model, other):
        m.fit(X[2], targets, epochs=2, progress=False)
    one = cv.Ensemble([model], method=method)
    assert one.evaluate(X[2], targets) == pytest.approx(model.evaluate(X[2], targets), rel=1e-9)
    both = cv.Ensemble([model, other], method=method)
    if loss == "mse":
        mean = (model.predict(X[2]) + other.predict(X[2])) / 2
        assert both.evaluate(X[2], targets)["loss"] == pytest.approx(((mean - targets) ** 2).mean(), rel=1e-9)
        return
    eye = np.eye(3)
    of = {"mean": lambda m: m.predict_proba(X[2]), "vote": lambda m: channels(eye[m.predict_classes(X[2])])}[method]
    mean = (of(model) + of(other)) / 2
    np.testing.assert_allclose(both.predict(X[2]), mean, rtol=1e-12)
    assert (both.predict_classes(X[2]) == mean.argmax(1)).all()
    assert both.evaluate(X[2], targets)["accuracy"] == pytest.approx((mean.argmax(1) == targets).mean(), rel=1e-12)


def test_one_pixel_and_sequences():
    """Channels of one pixel are classes; of what is no image the last axis is."""
    net = nn.Conv2d(3, 2) >> nn.GlobalAvgPool()
    model = cv.Model(net, input_shape=(2, 4, 4), loss="softmax_cross_entropy", optimizer="adam", batch_size=4)
    x = RNG.standard_normal((4, 2, 4, 4))
    assert model.predict(x).shape == (4, 3, 1, 1)
    assert (model.predict_classes(x) == model.predict(x).argmax(1)).all()
    model.step(x, np.zeros((4, 1, 1), int))
    model = cv.Model(nn.Linear(3), input_shape=(7, 2), loss="softmax_cross_entropy", optimizer="adam", batch_size=4)
    x = RNG.standard_normal((4, 7, 2))
    assert (model.predict_classes(x) == model.predict(x).argmax(2)).all()
    model.step(x, np.zeros((4, 7), int))


def test_a_unet_learns_which_pixels_are_bright():
    x = RNG.standard_normal((16, 1, 32, 32))
    x = (x + np.roll(x, 1, 2) + np.roll(x, 1, 3)).astype("float32")
    labels = (x[:, 0] > 0).astype(int)
    net = cv.zoo.unet(classes=2, width=4, size=32)
    options = {"loss": "softmax_cross_entropy", "optimizer": cv.Adam(3e-2), "batch_size": 4, "seed": 0}
    model = cv.Model(net, input_shape=(1, 32, 32), **options)
    model.fit(x, labels, epochs=10, progress=False)
    assert model.evaluate(x, labels)["accuracy"] > 0.9


# ---------------------------------------------------------------- views
def test_views_of_images_are_no_copies():
    g = cv.CalcGraph()
    x, w = g.placeholder("x", (None, 2, 6, 5)), g.parameter("w", (3, 2, 1, 1))
    with g.path("p") as p:
        a = cv.conv2d(x, w)
        last = cv.channels_last(a)
        views = {
            "last": last, "again": cv.channels_first(last), "stopped": cv.stop_gradient(a),
            "turned": cv.channels_first(x), "pooled": cv.reshape(cv.global_avg_pool(a), (None, 1, 3)),
        }  # fmt: skip
        soft = cv.softmax(a, axis=1)
        p.output = (a, last)
    for name, v in views.items():
        v.rename(name)
    program = cv.compile(g, batch_size=4, keep=[*views, soft.name])
    m = cv.CalcHeap(program.heap_bytes).create(program, seed=0)
    m["x"] = X[2][:4]
    m.forward("p")
    y = m[a.name]
    np.testing.assert_array_equal(m["last"], y.transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(m["again"], y)
    np.testing.assert_array_equal(m["stopped"], y)
    np.testing.assert_array_equal(m["turned"], X[2][:4].astype("float32").transpose(0, 3, 1, 2))
    np.testing.assert_allclose(m["pooled"], y.mean((2, 3)).reshape(4, 1, 3), rtol=1e-5)
    exp = np.exp(y)
    np.testing.assert_allclose(m[soft.name], exp / exp.sum(1, keepdims=True), rtol=1e-5)
    rows = [program.spec(pc).name for pc in range(len(program.rows))]
    assert rows.count("transpose_fwd") == 2  # the data, and the output as users see it


@pytest.mark.parametrize("axis", [1, -2, 2, -1, None])
def test_axes_of_classes(axis):
    """Of what is no image the last, where nothing else is asked for."""
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 4, 7))
    t = g.placeholder("t", (None, 7 if axis in (1, -2) else 4))
    with g.path("p"):
        loss = cv.softmax_cross_entropy(x, t, axis=axis)
        share = cv.accuracy(x, t, axis=axis)
    program = cv.compile(g, batch_size=6, dtype="float64")
    m = cv.CalcHeap(program.heap_bytes).create(program)
    scores = RNG.standard_normal((6, 4, 7))
    last = scores.transpose(0, 2, 1) if axis in (1, -2) else scores
    labels = RNG.integers(0, last.shape[2], last.shape[:2])
    m["x"], m["t"] = scores, labels
    m.forward("p")
    chosen = np.take_along_axis(last, labels[:, :, None], 2)[:, :, 0]
    assert float(m[loss.name]) == pytest.approx((np.log(np.exp(last).sum(2)) - chosen).mean(), rel=1e-12)
    assert float(m[share.name]) == pytest.approx((last.argmax(2) == labels).mean(), rel=1e-12)


def _of_scores(function):
    return nn.Conv2d(3, 1) >> nn.Function(function)


KEPT = {
    "sliced": nn.Conv2d(5, 1) >> nn.Function(lambda x: x[:, 1:4]),
    "split": nn.Conv2d(6, 1) >> nn.Function(lambda x: cv.split(x, 2, axis=1)[0]),
    "joined": nn.Conv2d(4, 1) >> nn.Function(lambda x: cv.concat([x[:, :2], x[:, 3:]], axis=1)),
    "scaled": _of_scores(lambda x: cv.exp(x[:, :]) * 0.5),
    "normalized": nn.Conv2d(3, 1) >> nn.LayerNorm(),
}
MOVED = {
    "transposed": lambda x: cv.transpose(x, (0, 2, 3, 1)),
    "reshaped": lambda x: cv.reshape(x, (None, 3, 3, 3)),
    "stacked": lambda x: cv.stack([cv.reshape(x[:, i : i + 1], (None, 3, 3)) for i in range(3)], axis=1),
    "equation": lambda x: cv.equation("y[b,i,j,c] = x[b,c,j,i]", x=x),
}
SCORES, CLASSES = RNG.standard_normal((20, 2, 3, 3)), RNG.integers(0, 3, (20, 3, 3))


@pytest.mark.parametrize("net", KEPT.values(), ids=KEPT)
def test_operators_that_keep_the_axes_of_images_keep_the_classes_on_axis_1(net):
    """There are as many classes as places, so that only the numbers show which axis was taken."""
    model = cv.Model(net, input_shape=(2, 3, 3), optimizer=cv.Adam(0.1), batch_size=20, dtype="float64")
    model.fit(SCORES, CLASSES, epochs=5, progress=False)
    scores, figures = model.predict(SCORES), model.evaluate(SCORES, CLASSES)
    chosen = np.take_along_axis(scores, CLASSES[:, None], 1)[:, 0]
    assert figures["loss"] == pytest.approx((np.log(np.exp(scores).sum(1)) - chosen).mean(), rel=1e-12)
    assert figures["accuracy"] == pytest.approx((scores.argmax(1) == CLASSES).mean(), rel=1e-12)
    np.testing.assert_array_equal(model.predict_classes(SCORES), scores.argmax(1))


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("function", MOVED.values(), ids=MOVED)
def test_where_the_axes_of_images_were_moved_an_axis_is_asked_for_and_holds_for_all(function, axis):
    how = {"input_shape": (2, 3, 3), "optimizer": cv.SGD(0.1), "batch_size": 20, "dtype": "float64"}
    with pytest.raises(cv.ShapeError, match=r"axis 1 or -1\?.*axis=1"):
        cv.Model(_of_scores(function), **how)
    with pytest.raises(cv.ShapeError, match=r"axis 1 or -1\?"):
        cv.Model(_of_scores(function) >> nn.Softmax(), loss="mse", **how)

    def loss(output, target):
        return cv.softmax_cross_entropy(output, target, axis=axis)

    model = cv.Model(_of_scores(function), loss=loss, target_shape=(3, 3), metrics=["accuracy"], **how)
    model.fit(SCORES, CLASSES, progress=False)
    scores = model.predict(SCORES)
    assert model.evaluate(SCORES, CLASSES)["accuracy"] == pytest.approx(
        (scores.argmax(axis) == CLASSES).mean(), rel=1e-12
    )
    np.testing.assert_array_equal(model.predict_classes(SCORES), scores.argmax(axis))
    np.testing.assert_allclose(model.predict_proba(SCORES).sum(axis), 1)


def test_softmax_of_images_is_over_channels_and_of_what_linear_makes_over_the_last_axis():
    how = {"input_shape": (2, 3, 4), "optimizer": "adam", "batch_size": 20}
    x = RNG.standard_normal((20, 2, 3, 4))
    y = cv.Model(nn.Conv2d(5, 1) >> nn.Softmax(), loss="mse", **how).predict(x)
    np.testing.assert_allclose(y.sum(1), 1, rtol=1e-5)
    tokens = _of_scores(lambda x: cv.reshape(x, (None, 3, 12)).transpose(0, 2, 1)) >> nn.Linear(4)
    assert cv.Model(tokens, **how).predict_classes(x).shape == (20, 12)


@pytest.mark.parametrize(
    ("axis", "text"), [(2, "neither 1 nor the last"), (4, "axis"), ("1", "axis"), (1.0, "axis"), (True, "axis")]
)
@pytest.mark.parametrize("function", [cv.softmax_cross_entropy, cv.accuracy])
def test_other_axes_are_refused(function, axis, text):
    g = cv.CalcGraph()
    x, t = g.placeholder("x", (None, 4, 5, 6)), g.placeholder("t", (None, 5, 6))
    with g.path("p"), pytest.raises(cv.CalcError, match=text):
        function(x, t, axis=axis)


# ---------------------------------------------------------------- outputs that are data
@pytest.mark.parametrize("channels_last", [False, True])
def test_data_are_an_output_in_any_team(channels_last):
    """A worker that goes on fetches the next samples into what another still copies out."""
    g = cv.CalcGraph()
    x, t = g.placeholder("x", (None, 3, 8, 8), channels_last=channels_last), g.placeholder("t", (None, 2))
    net = nn.Conv2d(4, 3) >> nn.ReLU() >> nn.Flatten() >> nn.Linear(2)
    with g.path("learn", backward=True) as learn:
        learn.minimize(cv.mse(net.build(x), t), cv.SGD(0.1))
    with g.path("predict") as predict:
        same = cv.stop_gradient(x).rename("same")
        predict.output = net.build(x, training=False), x, same
    data = RNG.standard_normal((64, 3, 8, 8)).astype("float32")
    seen = data.transpose(0, 3, 1, 2) if channels_last else data
    model = cv.Model(g, batch_size=8, workers=2, seed=0)
    for _ in range(20):
        found = model.predict(data)
        assert np.array_equal(found["x"], data)
        assert np.array_equal(found["same"], seen)


def test_an_output_beside_its_view():
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 3, 8, 8))
    with g.path("predict") as p:
        y = nn.Conv2d(4, 3).build(x, "c", False)
        p.output = y, cv.stop_gradient(y).rename("same")
    program = cv.compile(g, batch_size=2)
    m = cv.CalcHeap(program.heap_bytes).create(program, seed=0)
    m["x"] = RNG.standard_normal((2, 3, 8, 8))
    m.forward("predict")
    assert np.array_equal(m[y.name], m["same"])


def test_what_is_refused_leaves_nothing_behind():
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 3, 8, 8))
    with g.path("p") as p:
        y = cv.relu(x)
        before = {**g.variables}
        for layer in (nn.Conv2d(16, 10), nn.Linear(4) >> nn.Tanh() >> nn.Conv2d(2, 3) >> nn.Conv2d(2, 9)):
            with pytest.raises(cv.ShapeError):
                layer.build(y, "n", True)
            assert g.variables == before and len(p.operations) == 1 and not p.layers
        nn.Conv2d(16, 3).build(y, "n", True)
    assert g.variables["n.weight"].shape[0] == 16


@pytest.mark.parametrize("padding", [(0, 0, 1, 1), (1, 1, 1), (1,)])
def test_padding_is_numbers_of_spatial_axes_or_pairs(padding):
    g = cv.CalcGraph()
    x = g.placeholder("x", (None, 3, 8, 8))
    with g.path("p"):
        with pytest.raises(cv.CalcError, match=r"pairs \(before, after\)"):
            cv.pad(x, padding)
        assert [n.b for n in cv.pad(x, (1, 2)).shape[1:]] == [3, 10, 12]
        assert [n.b for n in cv.pad(x, ((0, 1), (2, 3))).shape[1:]] == [3, 9, 13]


def test_errors_say_what_data_of_images_lack():
    net = nn.Conv2d(4, 3) >> nn.Flatten() >> nn.Linear(10)
    options = {"loss": "softmax_cross_entropy", "optimizer": cv.SGD(0.1), "batch_size": 4}
    with pytest.raises(cv.ShapeError, match=r"with one channel it is \(N, 1, \.\.\.\)"):
        cv.Model(net, input_shape=(8, 8), **options)
    model = cv.Model(net, input_shape=(3, 8, 8), **options)
    with pytest.raises(cv.ShapeError, match="channels_last=True"):
        model.predict(np.zeros((4, 8, 8, 3)))
    with pytest.raises(cv.ShapeError, match="target_shape with the classes"):
        model.step(np.zeros((4, 3, 8, 8)), np.eye(10)[:4])

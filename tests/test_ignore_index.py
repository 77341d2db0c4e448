"""Ignored labels: they have no part in loss, gradients and accuracy, whatever their scores are; the mean is over the others."""

from __future__ import annotations

import itertools
import runpy
import warnings

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from tests.cuda.conftest import gpu  # noqa: F401 (a fixture)

torch = pytest.importorskip("torch")

# Shapes of the scores of a sample, and the axis of their classes in a batch.
SHAPES = [((4,), -1), ((17,), -1), ((3, 5), -1), ((3, 4), 1), ((2, 3, 4), 1), ((40,), -1), ((2,), -1)]
TYPES = [None, "int64", "int32", "uint8"]
IGNORED = [-100, -1, 255, 0, 1]
SHARES = [0.0, 0.4, 0.9, 1.0]  # of the rows that are ignored
SMOOTHINGS = [0.0, 0.1, 0.7]
CASES = [
    case
    for case in itertools.product(
        SHAPES, TYPES, IGNORED, SHARES, SMOOTHINGS, ("float32", "float64"), ("finite", "special")
    )
    if case[1] != "uint8" or case[2] >= 0
]
BATCH = 5
SPECIAL = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0])


def graph_of(shape, axis, ignored, smoothing=0.0, dtype=None):
    """Scores x of samples against labels t: the loss, its gradient by each score, and the accuracy."""
    g = cv.CalcGraph()
    labels = [n for i, n in enumerate((None, *shape)) if i != axis % (1 + len(shape))]
    x, t = g.placeholder("x", (None, *shape)), g.placeholder("t", tuple(labels), dtype)
    options = {"axis": axis, "ignore_index": ignored}
    with g.path("learn", backward=True) as learn:
        scores = x + g.parameter("b", shape, init="zeros")
        learn.minimize(cv.softmax_cross_entropy(scores, t, smoothing, **options), cv.SGD(0.0), output=scores)
    with g.path("judge") as judge:
        judge.output = loss = cv.softmax_cross_entropy(x, t, smoothing, **options).rename("value")
        cv.gradient(loss, x).rename("dx")
        cv.accuracy(x, t, **options).rename("accuracy")
    return g


def data_of(rng, shape, axis, ignored, share, special, n=BATCH):
    """Scores and labels; ``special``: the scores of ignored rows are anything."""
    x = 3 * rng.standard_normal((n, *shape))
    classes = x.shape[axis]
    t = rng.integers(0, classes, tuple(n for i, n in enumerate(x.shape) if i != axis % x.ndim))
    away = rng.random(t.shape) < share
    t[away] = ignored
    if special:
        rows = np.moveaxis(x, axis, -1)  # a view
        rows[t == ignored] = rng.choice(SPECIAL, (np.count_nonzero(t == ignored), classes))
    return x, t


def by_torch(x, t, axis, ignored, smoothing):
    """Loss, gradient and accuracy of those that count."""
    counts = np.expand_dims(t != ignored, axis)
    y = torch.tensor(np.where(counts, x, 0.0), requires_grad=True)
    if not counts.any():
        return 0.0, np.zeros(x.shape), 0.0
    loss = torch.nn.functional.cross_entropy(
        y.movedim(axis, 1), torch.tensor(t), ignore_index=ignored, label_smoothing=smoothing
    )
    loss.backward()
    return loss.item(), y.grad.numpy(), (np.argmax(y.detach().numpy(), axis) == t)[t != ignored].mean()


def check(case, rng, device="cpu", workers=1):
    (shape, axis), type_, ignored, share, smoothing, dtype, special = case
    x, t = data_of(rng, shape, axis, ignored, share, special == "special")
    x = x.astype(dtype)
    g = graph_of(shape, axis, ignored, smoothing, type_)
    program = cv.compile(g, batch_size=BATCH + 2, dtype=dtype, device=device, workers=workers, keep=["dx"])
    model = cv.CalcHeap(program.heap_bytes, device=device).create(program, seed=0)
    loss, gradient, accuracy = by_torch(x.astype(np.float64), t, axis, ignored, smoothing)
    near = dict(rtol=40 * np.finfo(dtype).eps, atol=10 * np.finfo(dtype).eps)
    model["x"], model["t"] = x, t if type_ is None else t.astype(type_)
    model.forward("judge")
    np.testing.assert_allclose(float(model["value"]), loss, **near, err_msg=str(case))
    np.testing.assert_allclose(model["dx"], gradient, **near, err_msg=str(case))
    assert float(model["accuracy"]) == pytest.approx(accuracy, rel=float(4 * np.finfo(dtype).eps)), case
    assert not np.moveaxis(model["dx"], axis, -1)[t == ignored].any(), "no gradient comes to what is ignored"
    np.testing.assert_allclose(model.step(x, t), loss, **near, err_msg=str(case))
    np.testing.assert_allclose(model.grad("b"), gradient.sum(0), **near, err_msg=str(case))


def test_loss_gradients_and_accuracy_are_pytorchs(whole):
    """Of any shape, type of labels, ignored number, share, smoothing; ignored scores may be NaN and infinite."""
    rng = np.random.default_rng(0)
    chosen = CASES[::3] if whole else [CASES[i] for i in rng.choice(len(CASES), 60, replace=False)]
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i, case in enumerate(chosen):
            check(case, rng, workers=1 + i % 3)


def test_a_simulated_gpu_ignores_the_same(whole, gpu):  # noqa: F811
    rng = np.random.default_rng(1)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in rng.choice(len(CASES), 60 if whole else 3, replace=False):
            check(CASES[i], rng, device="cuda")


# ---------------------------------------------------------------- data sets
N = 103
RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((N, 5)), RNG.integers(0, 3, N)
Y[RNG.random(N) < 0.4] = -100
Y[20:40] = -100  # whole batches of nothing else


def model_of(batch, **options):
    options = {"ignore_index": -100, "dtype": "float64", "optimizer": cv.SGD(0.0), **options}
    return cv.Model(nn.Linear(6) >> nn.Tanh() >> nn.Linear(3), input_shape=(5,), batch_size=batch, seed=1, **options)


def right(scores, labels):
    loss, _, accuracy = by_torch(scores, labels, 1, -100, 0.0)
    return {"loss": loss, "accuracy": accuracy}


@pytest.mark.parametrize("batch", [7, 20, 32, N])
def test_figures_are_means_over_all_of_a_data_set_that_count(batch, tmp_path):
    """By evaluate (compiled too), while training, of a file, of an ensemble, of a script."""
    m = model_of(batch, train_metrics=True)
    wanted, near = right(m.predict(X), Y), dict(rel=1e-9)
    for _ in range(3):
        assert m.evaluate(X, Y) == pytest.approx(wanted, **near)
    history = m.fit(X, Y, epochs=2, validation=(X, Y), progress=False)  # at a rate of 0
    for name, value in wanted.items():
        assert history[name] == pytest.approx([value] * 2, **near), name
        assert history[f"val_{name}"] == pytest.approx([value] * 2, **near), name
    m.save(tmp_path / "m")
    loaded = cv.load(tmp_path / "m")
    assert loaded.evaluate(X, Y) == pytest.approx(wanted, **near)
    assert cv.Ensemble([m, loaded]).evaluate(X, Y) == pytest.approx(wanted, **near)
    m.to_python(tmp_path / "train.py")
    script = runpy.run_path(str(tmp_path / "train.py"))
    assert script["evaluate"](X, Y) == pytest.approx(wanted, **near)
    assert script["step"](X[:7], Y[:7]) == pytest.approx(m.step(X[:7], Y[:7]), **near)
    assert m.evaluate(X[20:40], Y[20:40]) == {"loss": 0.0, "accuracy": 0.0}
    assert m.step(X[20:27], Y[20:27]) == 0.0
    assert not any(m.grad(name).any() for name in m.parameters)


def test_training_is_pytorchs():
    """By steps of batches with different counts, one of them with none."""
    m = model_of(20, optimizer=cv.SGD(0.5))
    net = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()
    with torch.no_grad():
        for p, name in zip(net.parameters(), m.parameters):
            p.copy_(torch.tensor(m.parameters[name].T.copy()))
    trained = torch.optim.SGD(net.parameters(), 0.5)
    for _ in range(3):
        m.fit(X, Y, shuffle=False, progress=False)
        for start in range(0, N, 20):
            x, t = torch.tensor(X[start : start + 20]), torch.tensor(Y[start : start + 20])
            if (t == -100).all():  # PyTorch's loss is NaN
                continue
            trained.zero_grad()
            torch.nn.functional.cross_entropy(net(x), t).backward()  # -100 is PyTorch's default
            trained.step()
    for p, name in zip(net.parameters(), m.parameters):
        np.testing.assert_allclose(m.parameters[name], p.detach().numpy().T, rtol=1e-9, atol=1e-12)


def test_rounds_cannot_make_a_mean_over_those_that_count():
    with pytest.raises(cv.CalcError, match=r"learning_batch=60 .* rounds cannot make the loss .* \(ignore_index\)"):
        model_of(20, learning_batch=60)
    assert model_of(20, learning_batch=20).fit(X, Y, progress=False)["loss"]


def test_weights_of_samples_are_of_those_that_count():
    """The mean over those that count of each one's loss times its weight; balanced classes are the real ones."""
    m = model_of(N, sample_weight=True)
    weights = RNG.random(N)
    counts = Y != -100
    terms = torch.nn.functional.cross_entropy(torch.tensor(m.predict(X)), torch.tensor(Y), reduction="none").numpy()
    bad = np.where(counts[:, None], X, 1e200)  # and whatever the others are
    assert m.step(X, Y, weights) == pytest.approx((terms * weights)[counts].mean(), rel=1e-9)
    assert m.step(bad, Y, weights) == pytest.approx((terms * weights)[counts].mean(), rel=1e-9)
    assert m.step(X, Y, np.ones(N)) == pytest.approx(model_of(N).step(X, Y), rel=1e-12)
    balanced = m.fit(X, Y, class_weight="balanced", progress=False)["loss"]
    each = counts.sum() / (3 * np.bincount(Y[counts]))
    assert balanced == [pytest.approx((terms[counts] * each[Y[counts]]).mean(), rel=1e-9)]


def test_images_have_ignored_pixels():
    rng = np.random.default_rng(0)
    x, t = rng.standard_normal((9, 1, 6, 5)), rng.integers(0, 4, (9, 6, 5))
    t[rng.random(t.shape) < 0.5] = 255
    m = cv.Model(
        nn.Conv2d(4, 3, padding="same"), input_shape=(1, 6, 5), optimizer=cv.SGD(0.0), batch_size=4, ignore_index=255,
        dtype="float64", target_dtype="uint8",
    )  # fmt: skip
    loss, _, accuracy = by_torch(m.predict(x), t, 1, 255, 0.0)
    assert m.evaluate(x, t.astype(np.uint8)) == pytest.approx({"loss": loss, "accuracy": accuracy}, rel=1e-9)
    assert m.predict_classes(x).shape == t.shape and m.predict_proba(x).shape == (9, 4, 6, 5)


def test_classes_are_known_to_a_model_that_ignores_a_label():
    m = model_of(20)
    np.testing.assert_array_equal(m.predict_classes(X), m.predict(X).argmax(1))
    np.testing.assert_allclose(m.predict_proba(X).sum(1), 1)


# ---------------------------------------------------------------- equations
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_equations_of_the_gradient_are_what_is_computed(smoothing):
    g = graph_of((4,), -1, -100, smoothing, "int64")
    x, t = data_of(np.random.default_rng(3), (4,), -1, -100, 0.4, special=False)
    m = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=BATCH, dtype="float64"), seed=0)
    m.step(x, t)
    found = g.paths["learn"].gradient_of("b").evaluate({"x": x, "t": t, "b": np.zeros(4)})
    np.testing.assert_allclose(found, m.grad("b"), rtol=1e-12, atol=1e-15)


# ---------------------------------------------------------------- labels
@pytest.mark.parametrize("dtype", [None, "int64", "int32"])
def test_labels_are_checked_at_every_call(dtype):
    """Those that are neither a class nor ignored; before anything has changed, and by compiled calls too."""
    m = model_of(20, target_dtype=dtype, optimizer=cv.SGD(0.1))
    y = Y.astype(dtype or np.int64)
    m.step(X[:20], y[:20]), m.evaluate(X, y)
    for bad in (3, -1, -99, 2**20):
        labels = y.copy()
        labels[5] = bad
        before = m.get_weights()
        for call in (m.step, m.evaluate, lambda a, b: m.fit(a, b, progress=False)):
            for _ in range(2):
                with pytest.raises(cv.CalcError, match=r"integers in \[0, 3\), or -100, which is ignored; found"):
                    call(X[:20], labels[:20])
        assert all((before[name] == m.get_weights()[name]).all() for name in before)
    for kept in (y, y.astype(np.float32)) if dtype is None else (y,):
        for _ in range(3):
            assert np.isfinite(m.step(X[:20], kept[:20]))


def test_what_a_path_does_not_ignore_everywhere_is_refused():
    g = cv.CalcGraph()
    x, t = g.placeholder("x", (None, 3)), g.placeholder("t", (None,), "int64")
    with g.path("learn", backward=True) as learn:
        y = x + g.parameter("b", (3,))
        learn.minimize(
            cv.softmax_cross_entropy(y, t, ignore_index=-1) + cv.softmax_cross_entropy(y, t), cv.SGD(0.1), output=y
        )
    m = cv.CalcHeap("1 MiB").create(cv.compile(g, batch_size=4))
    with pytest.raises(cv.CalcError, match=r"integers in \[0, 3\); found -1 to 2"):
        m.step(np.zeros((4, 3)), np.array([0, 1, 2, -1]))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: model_of(4, loss="mse"), "ignore_index needs the loss 'softmax_cross_entropy'"),
        (lambda: model_of(4, ignore_index=0.5), "ignore_index must be an integer"),
        (lambda: model_of(4, ignore_index="x"), "ignore_index must be an integer"),
        (lambda: model_of(4, target_dtype="uint8"), r"ignore_index of labels target \(B,\): -100 is no uint8"),
        (lambda: model_of(4, target_shape=(3,)), r"ignore_index needs labels, and target \(B, 3\) has one number per class"),
        (lambda: model_of(4, loss=lambda y, t: cv.mse(y, t)), "a loss function passes it to cv.softmax_cross"),
        (lambda: cv.Model(nn.Linear(3), input_shape=(2,), optimizer="sgd", ignore_class=1), "mean ignore_index=?"),
    ],
)  # fmt: skip
def test_what_cannot_be_ignored_is_refused(make, why):
    with pytest.raises((cv.CalcError, TypeError), match=why):
        make()


def test_a_softmax_before_the_loss_is_warned_of_as_without():
    with pytest.warns(cv.CalcWarning, match="leave that out"):
        cv.Model(nn.Linear(3) >> nn.Softmax(), input_shape=(2,), optimizer="adam", batch_size=4, ignore_index=-1)

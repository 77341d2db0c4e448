"""Figures: of the data set and not of its batches, of what outputs are, better one way, counted as their names say."""

from __future__ import annotations

import itertools
import runpy

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn
from calcvm.model.figures import LARGE, SMALL, largest_is_best
from tests.cuda.conftest import gpu  # noqa: F401 (a fixture)

N = 103
RNG = np.random.default_rng(0)
X = RNG.standard_normal((N, 3)).astype("float32")
Y = (3 * X[:, :1] + RNG.standard_normal((N, 1)) ** 3).astype("float32")
BATCHES = (1, 7, 32, 103)


# ---------------------------------------------------------------- of the data set
def r2(y, t):
    return 1 - cv.mean(cv.square(y - t)) / (cv.mean(cv.square(t)) - cv.square(cv.mean(t)))


def f1(y, t):
    is_, told = cv.cast(t > 0, None), cv.cast(y > 0, None)
    return 2 * cv.sum(is_ * told) / (cv.sum(is_) + cv.sum(told))


def masked(y, t):
    mask = cv.cast(t > 0, None)
    return cv.sum(mask * cv.abs(y - t)) / cv.sum(mask)


def total(y, t):
    return cv.sum(cv.square(y - t))


def log_mean(y, t):
    return cv.log(cv.mean(cv.square(y - t)) + 1.0)


def correlation(y, t):
    def m(v):
        return cv.mean(v, axis=0)

    return cv.sum(
        (m(y * t) - m(y) * m(t)) / cv.sqrt((m(y * y) - cv.square(m(y))) * (m(t * t) - cv.square(m(t)))), axis=None
    )


def norm_of_mean(y, t):
    return cv.sqrt(cv.sum_squares(cv.mean(y - t, axis=0)))


def rmse(y, t):
    return cv.rmse(y, t)


RIGHT = {
    "loss": lambda y, t: np.mean((y - t) ** 2),
    "mae": lambda y, t: np.mean(np.abs(y - t)),
    "rmse": lambda y, t: np.sqrt(np.mean((y - t) ** 2)),
    "r2": lambda y, t: 1 - np.mean((y - t) ** 2) / t.var(),
    "f1": lambda y, t: 2 * np.sum((t > 0) & (y > 0)) / (np.sum(t > 0) + np.sum(y > 0)),
    "masked": lambda y, t: np.abs(y - t)[t > 0].mean(),
    "total": lambda y, t: np.sum((y - t) ** 2),
    "log_mean": lambda y, t: np.log(np.mean((y - t) ** 2) + 1),
    "correlation": lambda y, t: np.corrcoef(y[:, 0], t[:, 0])[0, 1],
    "norm_of_mean": lambda y, t: abs(np.mean(y - t)),
}
METRICS = ["mae", rmse, r2, f1, masked, total, log_mean, correlation, norm_of_mean]


def model(batch, **options):
    options = {"metrics": METRICS, "loss": "mse", "dtype": "float64", **options}
    return cv.Model(nn.Linear(1), input_shape=(3,), optimizer=cv.SGD(0.01), batch_size=batch, seed=1, **options)


def right(outputs, targets=Y):
    return {name: of(outputs.astype(np.float64), targets.astype(np.float64)) for name, of in RIGHT.items()}


@pytest.mark.parametrize("batch, workers", [*zip(BATCHES, (1, 2, 1, 1))])
def test_figures_are_of_the_data_set(batch, workers, tmp_path):
    """By evaluate, in a training, of a file, and of an ensemble: the same at any batch."""
    m = model(batch, workers=workers)
    wanted = right(m.predict(X))
    near = dict(rel=1e-9)
    assert m.evaluate(X, Y) == pytest.approx(wanted, **near)
    assert m.evaluate(X, Y) == pytest.approx(wanted, **near), "by compiled calls too"
    m.save(tmp_path / "m")
    assert cv.load(tmp_path / "m").evaluate(X, Y) == pytest.approx(wanted, **near)
    assert cv.Ensemble([m, m]).evaluate(X, Y) == pytest.approx(wanted, **near)
    history = m.fit(X, Y, epochs=2, validation=(X, Y), progress=False)
    last = right(m.predict(X))
    assert {k: history[f"val_{k}"][-1] for k in last} == pytest.approx(last, **near)
    again = m.evaluate(X[:5], Y[:5])
    assert m.evaluate(X[:5], Y[:5]) == again
    assert m.evaluate(X, Y) == pytest.approx(last, **near), "after fewer samples"


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: getattr(metric, "__name__", metric))
def test_compiled_calls_have_the_figures_of_the_data_set(metric):
    """Which take few figures: each alone, once a call was compiled, and of fewer samples between."""
    name = getattr(metric, "__name__", metric)
    for batch in (7, 32, N):
        m = model(batch, metrics=[metric], workers=1)
        m.predict(X)
        wanted = right(m.predict(X))[name]
        assert [m.evaluate(X, Y)[name] for _ in range(6)] == pytest.approx([wanted] * 6, rel=1e-9), batch
        few = [m.evaluate(X[:7], Y[:7])[name] for _ in range(3)]
        assert few == pytest.approx([right(m.predict(X[:7]), Y[:7])[name]] * 3, rel=1e-9), batch
        assert m.evaluate(X, Y)[name] == pytest.approx(wanted, rel=1e-9), batch


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("batch", BATCHES[1:])
def test_a_fleet_has_the_figures_of_the_data_set(batch, device, request):
    """All in one program, with losses that are functions of means; a slice of few rounds at a time is the whole, too."""
    on = {"device": device, "mode": "fleet"} if device == "cuda" else {"device": device}
    if device == "cuda":
        pytest.importorskip("numba_cuda")
        request.getfixturevalue("gpu")
    for loss, metrics in ((rmse, METRICS), ("mse", [correlation]), (log_mean, [])):
        graph = cv.build_graph(nn.Linear(1), (3,), loss, cv.SGD(0.01), metrics=metrics)
        program = cv.compile(graph, batch_size=batch, dtype="float64", **on)
        fleet = cv.Fleet(2 * program.heap_bytes, device=device, **({} if device == "cuda" else {"workers": 1}))
        handle = fleet.add(program, data=(X, Y), validation=(X, Y), seed=1, shuffle=False)
        fleet.fit(1, progress=False)
        after_one = handle.model.evaluate(X, Y)
        fleet.fit(2, progress=False)
        wanted = handle.model.evaluate(X, Y)
        for epoch, figures in ((0, after_one), (2, wanted)):
            assert {k: handle.metrics[f"val_{k}"][epoch] for k in figures} == pytest.approx(figures, rel=1e-9)
        alone = cv.Model(graph, batch_size=batch, dtype="float64", seed=1)
        history = alone.fit(X, Y, epochs=3, validation=(X, Y), shuffle=False, progress=False)
        assert handle.losses == pytest.approx(history["loss"], rel=1e-9)
        assert handle.val_losses == pytest.approx(history["val_loss"], rel=1e-9)


@pytest.mark.parametrize("loss", ["mse", rmse, masked, log_mean, total, norm_of_mean, "ignored"])
def test_a_training_tells_the_loss_of_the_data_set(loss):
    """However samples come: arrays, batches one by one, a fleet; of a model that stands still it is what evaluate says."""
    options = dict(loss=loss, optimizer=cv.SGD(0.0), batch_size=10, dtype="float64", seed=1)
    y, outputs = Y, 1
    if loss == "ignored":
        y, outputs = np.where(RNG.random(N) < 0.8, -100, RNG.integers(0, 3, N)), 3
        options |= {"loss": "softmax_cross_entropy", "ignore_index": -100}
    m = cv.Model(nn.Linear(outputs), input_shape=(3,), **options)
    wanted = m.evaluate(X, y)["loss"]
    told = m.fit(X, y, progress=False, shuffle=False)["loss"][0]
    streamed = m.fit([(X[i : i + 10], y[i : i + 10]) for i in range(0, N, 10)], epochs=2, progress=False)["loss"]
    fleet = cv.Fleet(2 * m.program.heap_bytes)
    handle = fleet.add(m.program, data=(X, y), seed=1, shuffle=False)
    fleet.fit(2, progress=False)
    if loss is total:  # of a sum, what the steps have descended: a batch's
        assert told == pytest.approx(wanted * 10 / N, rel=0.5)
        wanted = told
    assert [told, *streamed, *handle.losses] == pytest.approx([wanted] * 5, rel=1e-9)


def test_a_fleets_patience_counts_over_calls():
    program = model(20, loss="mse", metrics=[]).program
    ends = []
    for calls in ([40], [2] * 20, [1] * 40):
        fleet = cv.Fleet("1 MiB", workers=1)
        own = {"patience": 3, "hyper": {"learning_rate": 0.9}}
        handle = fleet.add(program, data=(X[:60], Y[:60]), validation=(X[60:], Y[60:]), seed=0, **own)
        for epochs in calls:
            fleet.fit(epochs, progress=False)
        ends.append((handle.epochs_done, handle.status, *handle.val_losses))
    assert ends[0][1] == "stopped early" and ends[0] == ends[1] == ends[2]


def worst(y, t):
    return cv.max(cv.abs(y - t))


def centered(y, t):
    return cv.mean(cv.square(y - cv.mean(y)))


@pytest.mark.parametrize("metric, op", [(worst, "max"), (centered, "square")])
def test_what_batches_cannot_make_is_refused_where_there_are_several(metric, op):
    m = model(32, metrics=[metric])
    assert m.evaluate(X[:32], Y[:32])[metric.__name__] > 0
    with pytest.raises(cv.CalcError, match=f"'{metric.__name__}' of 103 samples in batches of 32: .* {op} "):
        m.evaluate(X, Y)
    before = m.parameters["linear_1.weight"].copy()
    with pytest.raises(cv.CalcError, match="in batches of 32"):
        m.fit(X, Y, validation=(X, Y), progress=False)
    np.testing.assert_array_equal(m.parameters["linear_1.weight"], before)


# ---------------------------------------------------------------- accuracy
def bce(y, t):
    return cv.binary_cross_entropy(y, t)


def softmax(y, t):
    return cv.softmax_cross_entropy(y, t)


def squares(y, t):
    return cv.mean(cv.square(y - t))


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize(
    "loss",
    ["mse", "mae", "huber", "binary_cross_entropy", bce, softmax, squares],
    ids=lambda loss: getattr(loss, "__name__", loss),
)
def test_accuracy_means_what_outputs_are(loss, outputs):
    """Of one output or several, by the loss: a logit each, numbers near 0 and 1, or scores of which one is the largest."""
    labels = np.eye(3)[RNG.integers(0, 3, N)] if outputs == 3 else RNG.integers(0, 2, (N, 1))
    make = lambda: cv.Model(  # noqa: E731
        nn.Linear(outputs),
        input_shape=(3,),
        loss=loss,
        optimizer=cv.SGD(0.1),
        batch_size=20,
        metrics=["accuracy"],
        seed=2,
    )
    if outputs == 1 and loss in (softmax, squares):
        with pytest.raises(cv.CalcError, match="one output"):
            make()
        return
    m = make()
    logits = loss in ("binary_cross_entropy", bce)
    for _ in range(2):
        y = m.predict(X)
        if logits or outputs == 1:
            hits = (y > (0 if logits else 0.5)) == (labels > 0.5)
        else:
            hits = y.argmax(1) == labels.argmax(1)
        assert 0 < hits.mean() < 1
        assert m.evaluate(X, labels)["accuracy"] == pytest.approx(hits.mean(), rel=1e-6)
        history = m.fit(X, labels, epochs=3, validation=(X, labels), progress=False)
    assert history["val_accuracy"][-1] == pytest.approx(m.evaluate(X, labels)["accuracy"])


def test_an_ensemble_that_votes_on_logits_takes_the_majority():
    labels = RNG.integers(0, 2, (N, 1))
    models = [
        cv.Model(nn.Linear(1), input_shape=(3,), loss="binary_cross_entropy", optimizer=cv.SGD(0.1), batch_size=20, metrics=["accuracy"], seed=s)
        for s in range(5)
    ]  # fmt: skip
    ensemble = cv.Ensemble(models, "vote")
    hits = ensemble.predict_classes(X) == labels
    assert ensemble.evaluate(X, labels)["accuracy"] == pytest.approx(hits.mean(), rel=1e-6)


def test_the_accuracy_of_one_class_is_refused():
    g = cv.CalcGraph()
    scores, target = g.placeholder("scores", (None, 1)), g.placeholder("target", (None,))
    with g.path("judge"), pytest.raises(cv.ShapeError, match="a single score is always the largest"):
        cv.accuracy(scores, target)


# ---------------------------------------------------------------- which way is better
def test_which_way_a_figure_is_better_is_known_or_asked_for():
    for name in sorted(SMALL):
        assert largest_is_best(f"val_{name}") is False and largest_is_best(f"my_{name}_2") is False
    for name in sorted(LARGE):
        assert largest_is_best(f"val_{name}") is True and largest_is_best(f"{name.upper()}-score") is True
    unknown = ["score", "val_gain", "accuracy_loss", "neg_mse", "negative_loss", "spread", "x", "val_", "closeness"]
    for name in unknown:
        assert largest_is_best(name) is None
        for watch in (cv.EarlyStopping, cv.ReduceOnPlateau):
            with pytest.raises(cv.CalcError, match=f"{watch.__name__}: the name .* does not tell .* largest=True"):
                watch(figure=name)
            assert watch(figure=name, largest=False).largest is False
    with pytest.raises(cv.CalcError, match="explore: .* whether .* maximize=True"):
        cv.explore(lambda trial: None, {"a": [1]}, data=(X, Y), validation=0.2, metric="val_gain")


def test_the_best_epoch_of_a_figure_that_grows_is_kept():
    grows = cv.EarlyStopping(2, figure="val_r2", keep_best=True)
    m = model(20)
    history = m.fit(X, Y, epochs=8, validation=(X, Y), callbacks=[grows], progress=False)
    best = int(np.argmax(history["val_r2"]))
    assert m.evaluate(X, Y)["r2"] == pytest.approx(history["val_r2"][best], rel=1e-12)


# ---------------------------------------------------------------- counters
class Told(cv.Callback):
    """Gives a validation loss of its own to those after it."""

    def __init__(self, values):
        self.values = values

    def on_epoch_end(self, model, epoch, figures):
        figures["val_loss"] = self.values[epoch]


def stops_after(values, patience):
    """Epochs that a patience lets pass: at the first that ends ``patience`` in a row without a new best."""
    best, since = np.inf, 0
    for i, v in enumerate(values, 1):
        best, since = (v, 0) if v < best else (best, since + 1)
        if since >= max(patience, 1):
            return i
    return len(values)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_accuracy_is_the_share_of_right_answers_in_any_batches(dtype):
    """To the bit: else one of as many right answers is better than another, and `EarlyStopping` goes on."""
    rng, ignored = np.random.default_rng(5), -1
    for _ in range(12):
        n, classes = (int(k) for k in rng.integers((2, 2), (200, 5)))
        X, y = rng.standard_normal((n, 3)).astype(dtype), rng.integers(0, classes, n)
        some, turned = np.where(rng.random(n) < 0.3, ignored, y), rng.permutation(n)
        for batch in {1, n, *(int(b) for b in rng.integers(1, n + 1, 2))}:
            options = {"input_shape": (3,), "optimizer": "adam", "batch_size": batch, "dtype": dtype, "seed": n}
            m = cv.Model(nn.Linear(classes), metrics=["accuracy"], **options)
            right = (m.predict(X).argmax(1) == y).sum() / n
            assert [m.evaluate(X, y)["accuracy"] for _ in range(3)] == [right] * 3
            history = m.fit(X, y, validation=(X, y), progress=False)
            assert history["val_accuracy"] == [(m.predict(X).argmax(1) == y).sum() / n]
            m = cv.Model(nn.Linear(classes), metrics=["accuracy"], ignore_index=ignored, **options)
            assert m.evaluate(X, some) == pytest.approx(m.evaluate(X[turned], some[turned]), rel=1e-5)
            assert m.evaluate(X, some)["accuracy"] == m.evaluate(X[turned], some[turned])["accuracy"]


@pytest.mark.parametrize("patience", [0, 1, 2, 3])
def test_patience_is_so_many_epochs_without_a_better_one(patience, whole):
    """Of any course of a figure, NaN and infinities among it."""
    courses = [*itertools.product((1.0, 2.0, 3.0, np.nan), repeat=5)]
    chosen = courses if whole else courses[:: len(courses) // 40]
    m = model(N, metrics=[])
    for values in chosen:
        stop = cv.EarlyStopping(patience, figure="val_loss")
        stop.on_train_begin(m)
        ends = next((i for i, v in enumerate(values, 1) if stop.on_epoch_end(m, i - 1, {"val_loss": v})), len(values))
        assert ends == stops_after(values, patience), values


def state(m):
    return {name: a.tobytes() for name, a in m.get_weights().items()}, m.epochs_done, dict(m.hyper)


STOPS = {
    "patience": dict(patience=1),
    "EarlyStopping": dict(callbacks=[cv.EarlyStopping(1, figure="val_mae")]),
    "a function": dict(callbacks=[lambda model, epoch, figures: epoch == 1 or None]),
    "keep_best": dict(patience=2, keep_best=True),
    "NaN": dict(terminate_on_nan=True),
    "epochs": dict(epochs=3),
}


@pytest.mark.parametrize("how", STOPS)
@pytest.mark.parametrize("learning_batch", [None, 40])
def test_going_on_after_any_end_has_the_bits_of_a_training_without_it(how, learning_batch):
    options = dict(batch_size=20, seed=3, learning_batch=learning_batch, metrics=["mae"])
    make = lambda: cv.Model(  # noqa: E731
        nn.Linear(5) >> nn.Tanh() >> nn.Dropout(0.2) >> nn.Linear(1),
        input_shape=(3,),
        loss="mse",
        optimizer=cv.Adam(0.3),
        **options,
    )
    given = {"epochs": 12, "validation": (X[:40], Y[40:80]), "progress": False, **STOPS[how]}
    m, straight = make(), make()
    history = m.fit(X, Y, **given)
    if how == "keep_best":  # the state after the best epoch; how many there were stays
        assert history.kept is not None and m.epochs_done == len(history)
        m.facts["epochs"] = history.kept + 1
    elif how not in ("NaN", "epochs"):
        assert len(history) < 12 == given["epochs"]
    done = m.epochs_done
    straight.fit(X, Y, epochs=done, progress=False)
    assert state(m) == state(straight)
    m.fit(X, Y, epochs=3, progress=False)
    straight.fit(X, Y, epochs=3, progress=False)
    assert state(m) == state(straight)


def test_a_fleets_patience_watches_the_loss_wherever_it_stands():
    g = cv.CalcGraph()
    x, t, W = g.placeholder("x", (None, 3)), g.placeholder("t", (None, 1)), g.parameter("W", (3, 1))
    with g.path("learn", backward=True) as learn:
        learn.minimize(cv.mse(x @ W, t), cv.SGD(0.01))
    with g.path("predict") as predict:
        predict.output = y = x @ W
        cv.mean(y * 0.0).rename("flat")  # it never becomes better
        cv.mse(y, t).rename("predict.loss")
    fleet = cv.Fleet("1 MiB", workers=1)
    handle = fleet.add(cv.compile(g, batch_size=20), data=(X, Y), validation=(X, Y), patience=1)
    fleet.fit(6, progress=False)
    assert handle.status == "done" and handle.epochs_done == 6 and {"val_flat", "val_loss"} == {*handle.metrics}


# ---------------------------------------------------------------- weights, and what the model sees
def test_balanced_classes_are_those_that_are_trained_on():
    y = np.r_[np.zeros(40), np.ones(40), np.zeros(20)].astype(int)  # the last fifth is held out
    net = lambda: cv.Model(
        nn.Linear(2), input_shape=(3,), optimizer=cv.SGD(0.1), batch_size=20, sample_weight=True, seed=0
    )  # noqa: E731
    a, b = net(), net()
    a.fit(X[:100], y, validation=0.2, class_weight="balanced", progress=False)
    b.fit(X[:80], y[:80], progress=False)  # as many of each
    assert state(a) == state(b)


@pytest.mark.parametrize("value", [1e300, -1e39, np.inf, np.nan])
def test_what_is_not_finite_in_the_model_is_refused(value):
    data = X.astype(np.float64)
    data[5, 1] = value
    m = model(20, dtype="float32", metrics=[])
    for call in (
        lambda: m.fit(data, Y, check_finite=True, progress=False),
        lambda: m.fit(X, Y, validation=(data, Y), check_finite=True, progress=False),
        lambda: m.evaluate(data, Y, check_finite=True),
    ):
        with pytest.raises(cv.CalcError, match=r"at index \(5, 1\)"):
            call()
    if np.isfinite(value):
        model(20, metrics=[]).evaluate(data, Y, check_finite=True)  # in float64 it is finite
    weighted = model(20, dtype="float32", metrics=[], sample_weight=True)
    with pytest.raises(cv.CalcError, match="weights are finite numbers >= 0"):
        weighted.fit(X, Y, sample_weight=np.full(N, abs(value)), progress=False)


def test_figures_while_training_are_of_the_epoch():
    """At a rate of 0, those of the data set; functions of means and sums over samples, in rounds too."""
    for batch, learning_batch in ((7, None), (32, 64), (N, None)):
        m = cv.Model(
            nn.Linear(1), input_shape=(3,), loss="mse", optimizer=cv.SGD(0.0), batch_size=batch, learning_batch=learning_batch,
            metrics=["mae", rmse, r2, f1, masked], train_metrics=True, dtype="float64",
        )  # fmt: skip
        history = m.fit(X, Y, epochs=2, progress=False)
        wanted = right(m.predict(X))
        for name in ("loss", "mae", "rmse", "r2", "f1", "masked"):
            assert history[name] == pytest.approx([wanted[name]] * 2, rel=1e-9), (name, batch)
        if learning_batch is None:
            streamed = m.fit([(X[i : i + batch], Y[i : i + batch]) for i in range(0, N, batch)], progress=False)
            told = [name for name in history.names if name != "seconds"]
            assert [streamed[k][0] for k in told] == pytest.approx([history[k][0] for k in told], rel=1e-9), batch
    with pytest.raises(cv.CalcError, match="'learn.worst' is no function of means or sums over samples"):
        model(32, metrics=[worst], train_metrics=True).fit([(X[:32], Y[:32])], progress=False)


@pytest.mark.parametrize("loss", [rmse, masked, log_mean, norm_of_mean, total])
@pytest.mark.parametrize("batch", [7, 32, N])
def test_the_loss_of_an_epoch_is_of_what_it_trains_on(loss, batch):
    """At a rate of 0; a sum is the mean of those of batches, since each of these was descended."""
    m = cv.Model(
        nn.Linear(1), input_shape=(3,), loss=loss, optimizer=cv.SGD(0.0), batch_size=batch, dtype="float64", metrics=[]
    )
    history = m.fit(X, Y, epochs=2, validation=(X, Y), shuffle=False, progress=False)
    wanted = right(m.predict(X))[loss.__name__]
    assert history["val_loss"] == pytest.approx([wanted] * 2, rel=1e-9)
    if loss is total:
        wanted = history["loss"][0]
        assert batch < N or wanted == pytest.approx(right(m.predict(X))["total"], rel=1e-9)
    assert history["loss"] == pytest.approx([wanted] * 2, rel=1e-9)


@pytest.mark.parametrize("loss", ["mse", "binary_cross_entropy"])
def test_accuracy_of_one_output_with_weights_while_training(loss):
    labels = RNG.integers(0, 2, (N, 1))
    m = cv.Model(
        nn.Linear(1), input_shape=(3,), loss=loss, optimizer=cv.SGD(0.0), batch_size=20, metrics=["accuracy"], train_metrics=True,
        sample_weight=True,
    )  # fmt: skip
    history = m.fit(X, labels, progress=False)
    hits = (m.predict(X) > (0.5 if loss == "mse" else 0.0)) == labels
    assert history["accuracy"] == [pytest.approx(hits.mean(), rel=1e-6)]


def test_scripts_have_the_figures_of_the_data_set_or_refuse_them(tmp_path):
    def script(metrics):
        model(32, metrics=metrics, dtype="float32").to_python(tmp_path / "train.py")
        return runpy.run_path(str(tmp_path / "train.py"))["evaluate"]

    wanted = model(N, metrics=["mae", total]).evaluate(X, Y)
    assert script(["mae", total])(X, Y) == pytest.approx(wanted, rel=1e-5)
    functions = model(N).evaluate(X, Y)
    assert script(METRICS)(X, Y) == pytest.approx(functions, rel=1e-4)
    evaluate = script([worst])
    assert evaluate(X[:32], Y[:32])["worst"] > 0
    with pytest.raises(ValueError, match="worst, neither a mean nor a sum over samples"):
        evaluate(X, Y)

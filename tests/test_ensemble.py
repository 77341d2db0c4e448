"""Ensembles against plain NumPy over the members' outputs; snapshots against the same training by hand."""

import numpy as np
import pytest

import calcvm as cv
from calcvm import nn


def blobs(n=300, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, n)
    return (rng.standard_normal((n, 4)) + 0.7 * np.eye(4)[y]).astype("float32"), y


def make(seed=0, outputs=3, **options):
    defaults = dict(input_shape=(4,), optimizer=cv.Adam(0.02), batch_size=50, seed=seed)
    return cv.Model(nn.Linear(8) >> nn.Tanh() >> nn.Linear(outputs), **{**defaults, **options})


def trained(k=3, **options):
    X, y = blobs()
    models = [make(seed, **options) for seed in range(k)]
    for model in models:
        model.fit(X, y, epochs=3, progress=False)
    return models


def constant(*outputs, **options):
    """A model whose outputs are the same for every input."""
    model = make(outputs=len(outputs), **options)
    model.parameters["linear_2.weight"][...] = 0
    model.parameters["linear_2.bias"][...] = outputs
    return model


def softmax(z):
    e = np.exp(z.astype(np.float64))
    return e / e.sum(axis=-1, keepdims=True)


def bits(model):
    return {k: v.tobytes() for k, v in model.parameters.items()}


# ---------------------------------------------------------------- predictions
def test_handles_of_a_fleet_are_models():
    fleet, (X, y) = cv.Fleet("1 MiB"), blobs()
    for seed in range(4):
        fleet.add(make(seed), data=(X, y))
    results = fleet.fit(2, progress=False)
    best = results.best(2)
    np.testing.assert_array_equal(cv.Ensemble(best).predict(X), cv.Ensemble([h.model for h in best]).predict(X))
    assert len(cv.Ensemble(results)) == 4 and len(cv.Ensemble([best[0], make()])) == 2


@pytest.mark.parametrize("weights", [None, [1, 0, 3]])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_mean_of_classifiers_is_of_probabilities(dtype, weights):
    models, (X, y) = trained(dtype=dtype), blobs(seed=1)
    ensemble = cv.Ensemble(models, weights=weights)
    p = np.average([softmax(m.predict(X)) for m in models], axis=0, weights=weights)
    rtol = 1e-5 if dtype == "float32" else 1e-12
    assert ensemble.predict(X).dtype == dtype and len(ensemble) == 3
    np.testing.assert_allclose(ensemble.predict(X), p, rtol=rtol)
    np.testing.assert_array_equal(ensemble.predict_proba(X), ensemble.predict(X))
    np.testing.assert_array_equal(ensemble.predict_classes(X), p.argmax(axis=1))
    figures = ensemble.evaluate(X, y)
    assert figures["loss"] == pytest.approx(-np.log(p[np.arange(len(y)), y]).mean(), rel=rtol)
    assert figures["accuracy"] == pytest.approx(np.mean(p.argmax(axis=1) == y), rel=1e-6)


@pytest.mark.parametrize("loss", ["mse", "huber", "mae", lambda out, target: cv.mean(cv.abs(out - target)) * 3.0])
def test_the_mean_of_others_is_of_outputs(loss):
    X, _ = blobs()
    Y = np.stack([X[:, 0] * X[:, 1], X.sum(axis=1)], axis=1)
    models = [make(seed, outputs=2, loss=loss, target_shape=(2,), dtype="float64") for seed in range(3)]
    for model in models:
        model.fit(X, Y, epochs=2, progress=False)
    ensemble, outputs = cv.Ensemble(models, weights=[2, 1, 1]), [m.predict(X) for m in models]
    mean = (2 * outputs[0] + outputs[1] + outputs[2]) / 4
    np.testing.assert_allclose(ensemble.predict(X), mean, rtol=1e-12)
    figures = ensemble.evaluate(X, Y)
    assert figures.keys() == models[0].evaluate(X, Y).keys() == {"loss"}
    wanted = {"mse": ((mean - Y) ** 2).mean(), "mae": np.abs(mean - Y).mean()}
    if loss in wanted:
        assert figures["loss"] == pytest.approx(wanted[loss], rel=1e-12)
    alone = cv.Ensemble(models[:1])
    np.testing.assert_array_equal(alone.predict(X), outputs[0])
    assert alone.evaluate(X, Y) == models[0].evaluate(X, Y)


@pytest.mark.parametrize("method", ["mean", "vote"])
def test_one_model_is_judged_as_it_is_alone(method):
    X, y = blobs(seed=2)
    scaled = make(preprocess=nn.Scale(0.5))
    for model in [*trained(1, dtype="float64"), scaled]:
        ours, alone = cv.Ensemble([model], method).evaluate(X, y), model.evaluate(X, y)
        assert list(ours) == list(alone)
        assert ours == pytest.approx(alone, rel=1e-6)


def test_votes_are_counted_and_equals_go_to_the_lowest_class():
    X, y = np.zeros((7, 4), "float32"), np.array([0, 1, 1, 2, 1, 0, 0])
    one, two, also_two = constant(0, 9, 0, 0), constant(0, 1, 2, 0), constant(0, 1, 1.5, 0)
    ensemble = cv.Ensemble([one, two, also_two], "vote")
    np.testing.assert_allclose(ensemble.predict(X), [[0, 1 / 3, 2 / 3, 0]] * 7, rtol=1e-6)
    assert ensemble.predict_classes(X).tolist() == [2] * 7
    assert cv.Ensemble([one, two, also_two]).predict_classes(X).tolist() == [1] * 7  # by far the most probable
    assert ensemble.evaluate(X, y)["accuracy"] == pytest.approx(1 / 7)
    assert ensemble.evaluate(X, y)["loss"] == cv.Ensemble([one, two, also_two]).evaluate(X, y)["loss"]
    np.testing.assert_array_equal(ensemble.predict_proba(X), cv.Ensemble([one, two, also_two]).predict_proba(X))
    for models in ([one, two], [two, one]):
        assert cv.Ensemble(models, "vote").predict_classes(X).tolist() == [1] * 7
    assert cv.Ensemble([one, two, also_two], "vote", [3, 1, 2]).predict_classes(X).tolist() == [1] * 7
    assert cv.Ensemble([one, two, also_two], "vote", [3, 2, 2]).predict_classes(X).tolist() == [2] * 7
    tied = constant(5, 5, 1, 0)  # its own vote, too, goes to the first largest
    assert cv.Ensemble([tied], "vote").predict_classes(X).tolist() == [0] * 7


def test_each_output_of_binary_cross_entropy_is_a_class_of_its_own():
    X, y = blobs()
    Y = np.stack([y == 0, y == 1], axis=1).astype("float32")
    models = [make(seed, outputs=2, loss="binary_cross_entropy", dtype="float64") for seed in range(3)]
    for model in models:
        model.fit(X, Y, epochs=5, progress=False)
    p = np.mean([1 / (1 + np.exp(-m.predict(X))) for m in models], axis=0)
    ensemble = cv.Ensemble(models)
    np.testing.assert_allclose(ensemble.predict(X), p, rtol=1e-12)
    np.testing.assert_array_equal(ensemble.predict_classes(X), p > 0.5)
    assert ensemble.evaluate(X, Y) == {"loss": pytest.approx(-np.log(np.where(Y, p, 1 - p)).mean(), rel=1e-12)}
    shares = np.mean([m.predict(X) > 0 for m in models], axis=0)
    np.testing.assert_allclose(cv.Ensemble(models, "vote").predict(X), shares, rtol=1e-12)
    yes, no = (constant(z, -z, loss="binary_cross_entropy") for z in (1.0, -1.0))
    assert cv.Ensemble([yes, no], "vote").predict_classes(X[:1]).tolist() == [[0, 0]]


def test_what_all_find_improbable_keeps_a_finite_loss():
    X = np.zeros((1, 4), "float32")
    sure = [constant(0, 200, 0), constant(0, 300, 0)]
    p = cv.Ensemble(sure).predict_proba(X)
    assert p[0, 0] == 0
    assert cv.Ensemble(sure).evaluate(X, [0])["loss"] == pytest.approx(200 + np.log(2), rel=1e-6)
    sure = [constant(z, loss="binary_cross_entropy") for z in (200, 300)]
    assert cv.Ensemble(sure).evaluate(X, [[0.0]])["loss"] == pytest.approx(200 + np.log(2), rel=1e-6)


def test_models_of_different_shapes_join():
    X, y = blobs()
    small = cv.Model(nn.Linear(3), input_shape=(4,), optimizer=cv.SGD(0.1), batch_size=7)
    large = make(dtype="float64")
    p = cv.Ensemble([small, large]).predict(X)
    assert p.dtype == np.float64
    np.testing.assert_allclose(p, (softmax(small.predict(X)) + softmax(large.predict(X))) / 2, rtol=1e-12)


def test_predictions_do_not_depend_on_where_the_models_are():
    X, y = blobs()
    program = make().program
    narrow = cv.Model(nn.Linear(3), input_shape=(4,), optimizer=cv.SGD(0.1), batch_size=64).program
    seen = []
    for memory in (4, 1):  # all side by side; one at a time
        heap = cv.CalcHeap(memory * max(program.heap_bytes, narrow.heap_bytes))
        models = [heap.create(p, seed=s) for s, p in enumerate([program, narrow, program, program])]
        for model in models:
            model.fit(X, y, epochs=2, progress=False)
        heap.stats.reset()
        found = [cv.Ensemble(models, method) for method in ("mean", "vote")]
        seen.append([(e.predict(X).tobytes(), e.predict_proba(X).tobytes(), e.evaluate(X, y)) for e in found])
        assert (heap.stats.switches > 0) == (memory == 1)
    assert seen[0] == seen[1]


REFUSED = {
    "none": (lambda: cv.Ensemble([]), cv.CalcError, "at least one model"),
    "method": (lambda: cv.Ensemble([make()], "median"), cv.CalcError, "'median' is unknown; take one of mean, vote"),
    "weights": (lambda: cv.Ensemble([make()], weights=[1, 2]), cv.ShapeError, r"shape \(2,\) for 1 models"),
    "negative": (lambda: cv.Ensemble([make()] * 2, weights=[1, -2]), cv.CalcError, "finite numbers >= 0"),
    "zero": (lambda: cv.Ensemble([make()] * 2, weights=[0, 0]), cv.CalcError, "at least one above 0"),
    "outputs": (lambda: cv.Ensemble([make(), make(outputs=2)]), cv.ShapeError, r"model 1: its output is \(B, 2\)"),
    "inputs": (lambda: cv.Ensemble([make(), make(input_shape=(5,))]), cv.ShapeError, r"model 1: its input is \(B, 5\)"),
    "losses": (lambda: cv.Ensemble([make(), make(loss="mse")]), cv.CalcError, "model 1: .*losses differ"),
    "vote": (lambda: cv.Ensemble([make(loss="mse")], "vote"), cv.CalcError, "no classes"),
    "proba": (lambda: cv.Ensemble([make(loss="mse")]).predict_proba(blobs()[0]), cv.CalcError, "use predict"),
    "labels": (lambda: cv.Ensemble([make()]).evaluate(blobs()[0], blobs()[1] + 1), cv.CalcError, r"in \[0, 3\)"),
    "counts": (lambda: cv.Ensemble([make()]).evaluate(blobs()[0], [0, 1]), cv.ShapeError, "number of samples"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused(case):
    make_it, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        make_it()


def test_a_transformed_output_is_no_score():
    """Only where the loss reads the output itself are its probabilities known."""
    X, y = blobs()
    model = make(loss=lambda out, target: cv.softmax_cross_entropy(out * 2.0, target), target_shape=())
    ensemble = cv.Ensemble([model, model])
    np.testing.assert_allclose(ensemble.predict(X), model.predict(X), rtol=1e-6)
    assert ensemble.evaluate(X, y)["loss"] == pytest.approx(model.evaluate(X, y)["loss"], rel=1e-6)


# ---------------------------------------------------------------- snapshots
def cyclic(rate=0.2, schedule=None, **options):
    return make(optimizer=cv.SGD(rate, momentum=0.9, schedule=schedule or cv.CosineRestarts(1)), **options)


@pytest.mark.parametrize("learning", [None, 100])
def test_snapshots_are_the_model_at_the_end_of_each_cycle(learning):
    X, y = blobs()
    model = cyclic(learning_batch=learning)
    snapshots = cv.snapshot_ensemble(model, X, y, cycles=3, epochs_per_cycle=4, progress=False)
    steps = 4 * (6 if learning is None else 3)
    by_hand = cyclic(schedule=cv.CosineRestarts(steps), learning_batch=learning)
    for snapshot in snapshots.models:
        by_hand.fit(X, y, epochs=4, progress=False)
        assert bits(snapshot) == bits(by_hand)
        assert snapshot.epochs_done == by_hand.epochs_done and snapshot.learning_batch == by_hand.learning_batch
        assert dict(snapshot.hyper) == dict(by_hand.hyper)
    assert bits(model) == bits(by_hand)
    before = bits(snapshots.models[-1])
    model.fit(X, y, epochs=1, progress=False)
    assert bits(snapshots.models[-1]) == before != bits(model)


def test_snapshots_take_no_more_than_their_heap():
    X, y = blobs()
    model = cyclic()
    snapshots = cv.snapshot_ensemble(model, X, y, cycles=3, epochs_per_cycle=1, progress=False)
    heap = snapshots.models[0].heap
    assert heap.nbytes == 3 * model.program.heap_bytes and heap is not model.heap
    snapshots.evaluate(X, y)
    assert heap.stats.switches == 0 and all(m.heap is heap for m in snapshots.models)


@pytest.mark.parametrize("warmup", [0, 20])
def test_cycles_begin_where_the_model_stands(warmup):
    X, y = blobs()
    model = cyclic(rate=0.01, schedule=cv.CosineRestarts(50, 2.0, warmup_steps=warmup))
    for _ in range(7):
        model.step(X[:50], y[:50])
    cv.snapshot_ensemble(model, X, y, cycles=2, epochs_per_cycle=3, learning_rate=0.3, progress=False)
    assert model.hyper["t"] == 7 + 36
    assert model.hyper["lr_t"] == pytest.approx(0.3 * (1 + np.cos(np.pi * 17 / 18)) / 2)
    model.step(X[:50], y[:50])
    assert model.hyper["lr_t"] == 0.3


def test_snapshots_of_ctrl_c_are_those_of_whole_cycles(monkeypatch):
    X, y = blobs()
    model, fit = cyclic(), cv.Model.fit

    def interrupted(self, *data, **options):
        history = fit(self, *data, **options)
        if self.epochs_done == stop:
            history.epochs.pop()
        return history

    monkeypatch.setattr(cv.Model, "fit", interrupted)
    stop = 6
    assert len(cv.snapshot_ensemble(model, X, y, cycles=5, epochs_per_cycle=2, progress=False)) == 2
    stop = 8
    with pytest.raises(KeyboardInterrupt):
        cv.snapshot_ensemble(model, X, y, cycles=5, epochs_per_cycle=2, progress=False)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"cycles": 0}, "cycles must be an integer >= 1, not 0"),
        ({"epochs_per_cycle": 2.5}, "epochs_per_cycle must be an integer >= 1, not 2.5"),
        ({"learning_rate": 1e38}, "cycle 1 of 5 ended with a loss of nan: use a smaller learning_rate"),
        ({"learning_rate": float("nan")}, "'learning_rate' must be a number >= 0, not nan"),
    ],
)
def test_bad_cycles_are_refused(how, message):
    with pytest.raises(cv.CalcError, match=message):
        cv.snapshot_ensemble(cyclic(), *blobs(), **{"epochs_per_cycle": 1, "progress": False, **how})


def test_snapshots_need_the_schedule():
    with pytest.raises(cv.CalcError, match=r"schedule is 'cosine': compile it with .*CosineRestarts"):
        cv.snapshot_ensemble(cyclic(schedule=cv.Cosine(10)), *blobs(), progress=False)


# ---------------------------------------------------------------- outputs of their own types
def of_type(output, k=0.0, dtype="float32"):
    """A model whose output is made of a regression by ``output``."""
    g = cv.CalcGraph()
    x, t, w = g.placeholder("x", (None, 4)), g.placeholder("t", (None, 4)), g.parameter("w", (4,), init=np.ones(4))
    with g.path("learn", backward=True) as learn:
        y = x * w + k
        loss = cv.mse(y, t)
        learn.minimize(loss, cv.SGD(0.0), output=y)
    with g.path("predict") as predict:
        predict.output = out = output(x * w + k).rename("out")
        cv.mean(cv.cast(cv.equal(out, t), None)).rename("agreed")
    return cv.Model(g, batch_size=50, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_mean_of_bools_is_the_share_that_holds(dtype):
    X, _ = blobs()
    ensemble = cv.Ensemble([of_type(lambda y: y > 0, k, dtype) for k in (0.0, 0.5, -0.5)], weights=[2, 1, 1])
    share = np.average([X + np.float32(k) > 0 for k in (0.0, 0.5, -0.5)], axis=0, weights=[2, 1, 1])
    assert ensemble.predict(X).dtype == dtype
    np.testing.assert_array_equal(ensemble.predict(X), share.astype(dtype))
    truth = (X > 0.1).astype(dtype)
    agreed = np.mean((share > 0.5) == truth)
    assert ensemble.evaluate(X, truth) == {"agreed": pytest.approx(agreed, rel=1e-6)} and agreed < 1
    for ask in (ensemble.predict_classes, ensemble.predict_proba):
        with pytest.raises(cv.CalcError, match="no classes"):
            ask(X)


@pytest.mark.parametrize("method", ["mean", "vote"])
@pytest.mark.parametrize("to", ["int64", "int32", "uint8", "int8"])
def test_integers_have_no_mean(to, method):
    models = [of_type(lambda y: cv.cast(y, to), k) for k in (0.0, 0.5)]
    with pytest.raises(
        cv.CalcError,
        match=f"model 0: its output 'out' is of {to}, and integers, such as classes, have no meaningful mean",
    ):
        cv.Ensemble(models, method=method)


def test_outputs_of_one_kind():
    with pytest.raises(cv.CalcError, match="model 1: its output is of bools, that of model 0 of floats"):
        cv.Ensemble([of_type(lambda y: y * 1.0), of_type(lambda y: y > 0)])
    with pytest.raises(cv.CalcError, match="model 1: its output 'out' is of int64"):
        cv.Ensemble([of_type(lambda y: y * 1.0), of_type(lambda y: cv.cast(y, "int64"))])
    mixed = cv.Ensemble([of_type(lambda y: y * 1.0), of_type(lambda y: cv.cast(y, "float64"))])
    np.testing.assert_allclose(mixed.predict(blobs()[0]), blobs()[0])


@pytest.mark.parametrize("loss", ["softmax_cross_entropy", "binary_cross_entropy"])
def test_numpys_way_with_errors_changes_no_probability(loss):
    """What is too small is 0, and raises nothing."""
    X, width = np.linspace(-1, 1, 8, dtype=np.float32)[:, None], 2 if loss == "softmax_cross_entropy" else 1
    model = cv.Model(nn.Linear(width), input_shape=(1,), loss=loss, optimizer=cv.SGD(0.1), batch_size=8)
    model.parameters["linear_1.weight"][...] = [[1e3, -1e3][:width]]
    both = cv.Ensemble([model, model])
    y = np.zeros(8, int) if width > 1 else np.zeros((8, 1))
    calls = [model.predict_proba, both.predict, both.predict_proba, both.predict_classes]
    calls += [lambda X: [*both.evaluate(X, y).values()], lambda X: [*model.evaluate(X, y).values()]]
    for call in calls:
        expected = call(X)
        with np.errstate(all="raise"):
            np.testing.assert_array_equal(call(X), expected)

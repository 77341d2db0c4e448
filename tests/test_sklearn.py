"""The estimators against scikit-learn's own: its checks, equal curves from equal weights, equal searches."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest

sklearn = pytest.importorskip("sklearn", minversion="1.7")

from sklearn import neural_network as theirs  # noqa: E402
from sklearn.base import clone  # noqa: E402
from sklearn.datasets import load_digits, make_regression  # noqa: E402
from sklearn.exceptions import ConvergenceWarning  # noqa: E402
from sklearn.model_selection import (  # noqa: E402
    GridSearchCV,
    KFold,
    ShuffleSplit,
    cross_val_score,
    train_test_split,
)
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402
from sklearn.utils.estimator_checks import parametrize_with_checks  # noqa: E402

from calcvm.errors import CalcError, PlanError  # noqa: E402
from calcvm.sklearn import FleetSearchCV, MLPClassifier, MLPRegressor, estimators, network  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore:.*Use `safe_cast_to_index`"),
]
# float64 sums in another order; the curves of 10 epochs from equal weights differ by no more than some 1e-15
RTOL = 1e-11


@parametrize_with_checks(
    [MLPClassifier(max_iter=100), MLPRegressor(max_iter=100), MLPClassifier(), MLPRegressor(solver="sgd")]
)
def test_checks_of_scikit_learn(estimator, check):
    check(estimator)


# ---------------------------------------------------------------- parity
rng = np.random.default_rng(0)
X = rng.normal(size=(130, 7))
Z = X @ rng.normal(size=(7, 4)) + 0.3 * rng.normal(size=(130, 4))
W = rng.uniform(0, 2, 130)
Y = {
    "classes": Z[:, :3].argmax(axis=1),
    "two classes": np.where(Z[:, 0] > 0, "yes", "no"),
    "labels": (Z[:, :3] > 0).astype(int),
    "number": Z[:, 0],
    "numbers": Z[:, :3],
    "count": np.round(np.exp(Z[:, 0] / 2)),
    "counts": np.round(np.exp(Z[:, :2] / 2)),
}


def pair(target, **options):
    """Our estimator and theirs, of equal parameters; ours exact."""
    if target in ("classes", "two classes", "labels"):
        return MLPClassifier(dtype="float64", **options), theirs.MLPClassifier(**options)
    if target.startswith("count"):
        options["loss"] = "poisson"
    return MLPRegressor(dtype="float64", **options), theirs.MLPRegressor(**options)


def same(ours, other, rtol=RTOL):
    for a, b in zip([*ours.coefs_, *ours.intercepts_], [*other.coefs_, *other.intercepts_]):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e4 * rtol)
    assert ours.loss_ == pytest.approx(other.loss_, rel=rtol)
    np.testing.assert_allclose(ours.loss_curve_, other.loss_curve_, rtol=rtol)
    for name in (
        "n_iter_",
        "t_",
        "n_layers_",
        "n_outputs_",
        "out_activation_",
        "n_features_in_",
        "_no_improvement_count",
    ):
        assert getattr(ours, name) == getattr(other, name), name
    for name in ("best_loss_", "best_validation_score_", "validation_scores_"):
        mine, its = getattr(ours, name), getattr(other, name)
        assert (mine is None) == (its is None)
        if mine is not None:
            np.testing.assert_allclose(mine, its, rtol=rtol)


@pytest.mark.parametrize("weights", [None, W], ids=["", "weights"])
@pytest.mark.parametrize("solver", ["adam", "sgd"])
@pytest.mark.parametrize("target", Y)
def test_curves_from_equal_weights(target, solver, weights):
    """Batches of 50, 50 and 30; targets of every kind."""
    ours, other = pair(
        target, solver=solver, hidden_layer_sizes=(9, 5), batch_size=50, max_iter=10, shuffle=False, random_state=1,
        alpha=0.3, learning_rate_init=0.01,
    )  # fmt: skip
    same(ours.fit(X, Y[target], weights), other.fit(X, Y[target], weights))
    for method in ("predict", "predict_proba", "predict_log_proba"):
        if hasattr(other, method):
            a, b = getattr(ours, method)(X), getattr(other, method)(X)
            assert a.shape == b.shape and a.dtype == b.dtype
            np.testing.assert_array_equal(a, b) if a.dtype.kind in "iU" else np.testing.assert_allclose(a, b, rtol=1e-6)
    assert ours.score(X, Y[target]) == pytest.approx(other.score(X, Y[target]), rel=1e-9)


OPTIONS = {
    "identity, no hidden layer": dict(activation="identity", hidden_layer_sizes=()),
    "logistic": dict(activation="logistic"),
    "tanh": dict(activation="tanh", hidden_layer_sizes=[4, 4]),
    "no penalty": dict(alpha=0),
    "one layer as a number": dict(hidden_layer_sizes=6),
    "epsilon": dict(epsilon=0.1, beta_1=0.5, beta_2=0.9),
    "beta 0": dict(beta_1=0, beta_2=0),
    "momentum": dict(solver="sgd", momentum=0.7, nesterovs_momentum=False),
    "no momentum": dict(solver="sgd", momentum=0),
    "invscaling": dict(solver="sgd", learning_rate="invscaling", learning_rate_init=0.05, power_t=0.3),
    "adaptive": dict(solver="sgd", learning_rate="adaptive", learning_rate_init=0.05, n_iter_no_change=1, tol=0.05),
    "adaptive to the end": dict(
        solver="sgd", learning_rate="adaptive", learning_rate_init=2e-6, tol=1, n_iter_no_change=1
    ),
    "converges": dict(tol=0.02, n_iter_no_change=3, max_iter=200),
    "never converges": dict(n_iter_no_change=np.inf, max_iter=15),
    "early stopping": dict(early_stopping=True, validation_fraction=0.2, n_iter_no_change=3, learning_rate_init=0.05),
    "early stopping, sgd": dict(early_stopping=True, solver="sgd", learning_rate="adaptive", n_iter_no_change=2),
    "batch of one": dict(batch_size=1, max_iter=2),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("target", ["classes", "number"])
def test_options(target, options):
    options = dict(hidden_layer_sizes=(8,), batch_size=32, max_iter=30, shuffle=False, random_state=2) | options
    ours, other = pair(target, **options)
    same(ours.fit(X, Y[target]), other.fit(X, Y[target]), rtol=1e-8)


@pytest.mark.parametrize("target", ["two classes", "labels", "numbers", "count"])
@pytest.mark.parametrize("weights", [None, W], ids=["", "weights"])
def test_early_stopping(target, weights):
    ours, other = pair(target, early_stopping=True, max_iter=25, shuffle=False, random_state=5, learning_rate_init=0.01)
    same(ours.fit(X, Y[target], weights), other.fit(X, Y[target], weights))


@pytest.mark.parametrize("target", [name for name in Y if name != "numbers"])
@pytest.mark.parametrize("weights", [None, W], ids=["", "weights"])
def test_lbfgs(target, weights, monkeypatch):
    monkeypatch.setattr(estimators, "LBFGS_BATCH", 48)  # the gradient adds up over three batches
    ours, other = pair(target, solver="lbfgs", hidden_layer_sizes=(4,), alpha=0.1, random_state=3, max_iter=12)
    ours.set_params(dtype="float32").fit(X, Y[target], weights)  # whatever dtype says
    other.fit(X, Y[target], weights)
    assert ours.coefs_[0].dtype == np.float64
    assert (ours.n_iter_, ours.loss_) == (other.n_iter_, pytest.approx(other.loss_, rel=1e-6))


def test_gradient_of_several_outputs_is_scikit_learns():
    """It reports the mean over the outputs and descends the sum: the line search of both is lost in it."""
    ours, other = pair("numbers", solver="lbfgs", hidden_layer_sizes=(4,), random_state=3, max_iter=1)
    same_start = {}
    for estimator in (ours, other):
        estimator.fit(X, Y["numbers"])
        same_start[estimator] = estimator.loss_
    assert same_start[ours] == pytest.approx(same_start[other], rel=1e-9)


def test_partial_fit_goes_on():
    """Batches grow and shrink, weights come and go, a pickle lies in between."""
    ours, other = pair("classes", batch_size=60, hidden_layer_sizes=(8,), shuffle=False, random_state=0)
    for step, (rows, weighted) in enumerate([(20, 0), (130, 0), (70, 1), (130, 1), (10, 0), (130, 0)]):
        for estimator in (ours, other):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Got `batch_size` less than 1")
                estimator.partial_fit(
                    X[:rows], Y["classes"][:rows], W[:rows] if weighted else None,
                    classes=[0, 1, 2] if step == 0 else None,
                )  # fmt: skip
        if step == 2:
            ours = pickle.loads(pickle.dumps(ours))
        same(ours, other)


@pytest.mark.parametrize(
    "options",
    [
        dict(solver="sgd", learning_rate="invscaling", learning_rate_init=0.1, momentum=0.0),
        dict(solver="sgd", learning_rate="invscaling", power_t=0.9, n_iter_no_change=1, momentum=0.9),
        dict(solver="sgd", learning_rate="adaptive", learning_rate_init=0.3, n_iter_no_change=2, tol=1e-2),
        dict(solver="sgd", momentum=0.5, nesterovs_momentum=False, alpha=0.3),
        dict(solver="adam", n_iter_no_change=1, tol=1.0),
        dict(solver="adam", learning_rate_init=0.01, beta_1=0.5, beta_2=0.99, batch_size=32),
    ],
    ids=["invscaling", "invscaling, nesterov", "adaptive", "momentum", "adam", "adam, batches"],
)
@pytest.mark.parametrize("target", ["classes", "number"])
def test_hundreds_of_partial_fits_take_scikit_learns_steps(target, options):
    """Long after an epoch has improved nothing for the last time: what a call leaves behind is what the next begins with."""
    ours, other = pair(target, hidden_layer_sizes=(6,), shuffle=False, random_state=0, **options)
    first = {"classes": [0, 1, 2]} if target == "classes" else {}
    for _ in range(300):
        ours.partial_fit(X, Y[target], **first)
        other.partial_fit(X, Y[target], **first)
        first = {}
    same(ours, other, rtol=1e-6)
    rate = ours._network.resident.hyper["learning_rate"]
    assert rate == pytest.approx(other._optimizer.learning_rate if ours.solver == "sgd" else ours.learning_rate_init)


def test_partial_fit_after_fit_and_with_another_solver():
    ours, other = pair("number", max_iter=4, batch_size=64, shuffle=False, random_state=0)
    for estimator in (ours, other):
        estimator.fit(X, Y["number"]).partial_fit(X, Y["number"])
    same(ours, other)
    ours.set_params(solver="sgd").partial_fit(X, Y["number"])  # another optimizer starts from its hyperparameters
    assert ours.loss_ < 1.1 * other.loss_


def test_weights_may_be_changed_between_calls():
    ours, other = pair("number", batch_size=130, shuffle=False, random_state=0)
    for estimator in (ours, other):
        estimator.partial_fit(X, Y["number"])
        estimator.coefs_[0][:] *= 0.5
        estimator.partial_fit(X, Y["number"])
    same(ours, other)


def test_warm_start():
    ours, other = pair("classes", warm_start=True, max_iter=5, batch_size=64, shuffle=False, random_state=0)
    for _ in range(3):
        same(ours.fit(X, Y["classes"]), other.fit(X, Y["classes"]))


# ---------------------------------------------------------------- what they are to scikit-learn
def test_they_have_scikit_learns_parameters_and_defaults():
    for ours, other in ((MLPClassifier(), theirs.MLPClassifier()), (MLPRegressor(), theirs.MLPRegressor())):
        expected = other.get_params() | {"dtype": "auto", "workers": None}
        assert ours.get_params() == expected
        assert isinstance(ours, type(other))
    assert MLPRegressor("poisson", (3,)).get_params()["hidden_layer_sizes"] == (3,)  # positions too
    expected = GridSearchCV(None, {}).get_params() | {"memory": "1 GiB"}
    assert FleetSearchCV(None, {}).get_params().keys() == expected.keys()


def test_precision():
    few, many = MLPClassifier(max_iter=1).fit(X, Y["classes"]), MLPClassifier(max_iter=1)
    assert few.coefs_[0].dtype == np.float64 and few.predict_proba(X).dtype == np.float64
    many.fit(np.tile(X, (20, 1)), np.tile(Y["classes"], 20))
    assert {c.dtype for c in [*many.coefs_, *many.intercepts_]} == {np.dtype("float32")}
    narrow = MLPClassifier(max_iter=1).fit(X.astype("float32"), Y["classes"])
    assert narrow.coefs_[0].dtype == np.float32 and narrow.predict_proba(X.astype("float32")).dtype == np.float32
    assert (
        MLPClassifier(max_iter=1, dtype="float64").fit(X.astype("float32"), Y["classes"]).coefs_[0].dtype == np.float64
    )


def test_digits_are_learned_as_well():
    data, labels = load_digits(return_X_y=True)
    a, b, c, d = train_test_split(data, labels, random_state=0)
    scores = {}
    for kind in (MLPClassifier, theirs.MLPClassifier):
        scores[kind] = np.mean([kind(random_state=seed, max_iter=60).fit(a, c).score(b, d) for seed in range(3)])
    assert scores[MLPClassifier] > 0.95
    assert abs(scores[MLPClassifier] - scores[theirs.MLPClassifier]) < 0.015  # three seeds scatter by 0.004


def test_a_seed_decides_all():
    fits = [MLPClassifier(random_state=s, max_iter=5).fit(X, Y["classes"]).coefs_ for s in (0, 0, 1)]
    assert all(map(np.array_equal, fits[0], fits[1])) and not np.array_equal(fits[0][0], fits[2][0])
    a, b = (MLPClassifier(max_iter=5).fit(X, Y["classes"]).coefs_ for _ in range(2))
    assert not np.array_equal(a[0], b[0])
    one = MLPClassifier(random_state=0, batch_size=16, max_iter=4).fit(X, Y["classes"])
    still = MLPClassifier(random_state=0, batch_size=16, max_iter=4, shuffle=False).fit(X, Y["classes"])
    assert not np.array_equal(one.coefs_[0], still.coefs_[0])


def test_copies_and_pickles_go_on_with_the_same_bits():
    model = MLPRegressor(random_state=0, batch_size=32)
    for _ in range(3):
        model.partial_fit(X, Y["number"])
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    expected = model.partial_fit(X, Y["number"]).predict(X)
    for other in others:
        np.testing.assert_array_equal(other.partial_fit(X, Y["number"]).predict(X), expected)
    assert not hasattr(clone(model), "coefs_")
    fitted = MLPClassifier(max_iter=3).fit(X, Y["two classes"])
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(fitted)).predict(X), fitted.predict(X))
    assert fitted._network._resident is None  # a fitted estimator holds no heap


def test_pipelines_and_searches():
    model = make_pipeline(StandardScaler(), MLPClassifier((8,), max_iter=20, random_state=0))
    assert cross_val_score(model, X, Y["classes"], cv=3).mean() > 0.5
    search = GridSearchCV(model, {"mlpclassifier__alpha": [1e-4, 10.0]}, cv=2).fit(X, Y["classes"])
    assert search.best_params_["mlpclassifier__alpha"] == 1e-4
    parallel = cross_val_score(MLPClassifier((8,), max_iter=5, random_state=0), X, Y["classes"], cv=3, n_jobs=2)
    alone = cross_val_score(MLPClassifier((8,), max_iter=5, random_state=0), X, Y["classes"], cv=3)
    np.testing.assert_array_equal(parallel, alone)


def test_a_design_is_compiled_once():
    network.program_of.cache_clear()
    for alpha in (1e-4, 1e-2):  # hyperparameters are values in the heap
        for rows in (slice(0, 120), slice(10, 128)):
            MLPClassifier(alpha=alpha, learning_rate_init=alpha, max_iter=1).fit(X[rows], Y["classes"][rows])
    assert network.program_of.cache_info().misses == 1


def test_sparse_features_and_frames():
    sparse = pytest.importorskip("scipy.sparse")
    ours, other = pair("classes", max_iter=3, shuffle=False, random_state=0)
    for kind in (sparse.csr_matrix, sparse.csc_array):
        same(ours.fit(kind(X), Y["classes"]), other.fit(kind(X), Y["classes"]))
        np.testing.assert_allclose(ours.predict_proba(kind(X)), other.predict_proba(kind(X)))


@pytest.mark.parametrize("target", Y)
@pytest.mark.parametrize("options", [dict(activation="logistic"), dict(hidden_layer_sizes=()), dict(solver="lbfgs")])
def test_many_samples_are_predicted_by_a_program(target, options, monkeypatch):
    model = pair(target, max_iter=8, random_state=0, **options)[0].fit(X, Y[target])
    for features in (X, X.astype("float32"), np.round(3 * X).astype(int), np.asfortranarray(X)):
        expected = model._forward_pass_fast(features)
        with monkeypatch.context() as patch:
            patch.setattr(estimators, "LARGE_FLOPS", 0)
            found = model._forward_pass_fast(features)
        assert found.dtype == expected.dtype == np.float64
        np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-12)


def test_many_features_are_not_copied(monkeypatch):
    options = dict(max_iter=4, random_state=0, dtype="float32", batch_size=32)
    copied = MLPClassifier(**options).fit(X, Y["classes"])
    monkeypatch.setattr(estimators, "COPIED_BYTES", 0)
    assert estimators.dense(X, "float32") is X and estimators.dense(X.T, "float32").flags.c_contiguous
    in_place = MLPClassifier(**options).fit(X, Y["classes"])
    assert all(map(np.array_equal, copied.coefs_, in_place.coefs_))


# ---------------------------------------------------------------- bad input
def test_what_is_refused():
    with pytest.raises(ValueError, match="'dtype' parameter"):
        MLPClassifier(dtype="float16").fit(X, Y["classes"])
    with pytest.raises(ValueError, match="'workers' parameter"):
        MLPClassifier(workers=0).fit(X, Y["classes"])
    with pytest.raises(ValueError, match="hidden_layer_sizes must be > 0"):
        MLPClassifier((3, 0)).fit(X, Y["classes"])
    with pytest.raises(ValueError, match="partial_fit does not support early_stopping"):
        MLPClassifier(early_stopping=True).partial_fit(X, Y["classes"], classes=[0, 1, 2])
    with pytest.raises(ValueError, match="The validation set is too small"):
        MLPRegressor(early_stopping=True).fit(X[:9], Y["number"][:9])
    known = MLPClassifier().partial_fit(X, Y["classes"], classes=[0, 1, 2])
    for labels in (Y["classes"] + 1, Y["classes"] - 1, Y["classes"] + 0.5, Y["two classes"]):
        with pytest.raises(ValueError, match="classes not in|type|continuous|could not convert"):
            known.partial_fit(X, labels)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        known.partial_fit(X, Y["classes"][1:])
    with pytest.raises(AttributeError, match="partial_fit"):
        MLPClassifier(solver="lbfgs").partial_fit(X, Y["classes"], classes=[0, 1, 2])
    with pytest.warns(UserWarning, match="going to be clipped"):
        MLPClassifier(batch_size=1000, max_iter=1).fit(X, Y["classes"])
    with pytest.warns(ConvergenceWarning, match="Maximum iterations"):
        MLPClassifier(max_iter=1).fit(X, Y["classes"])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_weights_that_are_not_finite(dtype):
    with pytest.raises(ValueError, match="non-finite parameter weights"):
        MLPRegressor(dtype=dtype, max_iter=3, solver="sgd", learning_rate_init=1e30).fit(1e30 * X, Y["number"])


def test_an_interrupt_leaves_a_fitted_estimator(monkeypatch):
    ends = estimators.Compiled._epoch_ends

    def interrupted(self, *epoch):
        if self.n_iter_ == 2:
            raise KeyboardInterrupt
        return ends(self, *epoch)

    monkeypatch.setattr(estimators.Compiled, "_epoch_ends", interrupted)
    model = MLPClassifier(random_state=0)
    with pytest.warns(UserWarning, match="interrupted"):
        model.fit(X, Y["classes"])
    assert model.n_iter_ == 2 and model.predict(X).shape == (130,)


def test_another_scikit_learn_is_refused(monkeypatch):
    monkeypatch.setattr(theirs.MLPClassifier, "_fit_stochastic", lambda self, X, y: None)
    with pytest.raises(CalcError, match="_fit_stochastic"):
        estimators._check_hooks()


def test_without_scikit_learn_the_extra_is_named():
    code = "import sys; sys.modules['sklearn'] = None\nimport calcvm.sklearn"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "MissingExtra" in done.stderr and "calcvm[sklearn]" in done.stderr


# ---------------------------------------------------------------- FleetSearchCV
GRID = {"hidden_layer_sizes": [(4,), (6, 3)], "alpha": [0.0, 1.0]}


def equal_searches(estimator, grid, target, *, given=None, fleet=None, **options):
    """A fleet's search and GridSearchCV's: what they report and what they predict is the same."""
    ours = FleetSearchCV(estimator, grid, **options, **(fleet or {})).fit(X, Y[target], **(given or {}))
    other = GridSearchCV(estimator, grid, **options).fit(X, Y[target], **(given or {}))
    assert ours.cv_results_.keys() == other.cv_results_.keys()
    for name, column in other.cv_results_.items():
        if "time" not in name:
            np.testing.assert_array_equal(ours.cv_results_[name], column, err_msg=name)
    if options.get("refit", True):
        assert (ours.best_index_, ours.best_params_) == (other.best_index_, other.best_params_)
        np.testing.assert_array_equal(ours.predict(X), other.predict(X))
    return ours


def trained_by_fleet(monkeypatch):
    """How many fits the fleet trained, and how many trained by themselves, in a list that fills as they do."""
    counts = {"fleet": 0, "alone": 0}
    from calcvm.sklearn import search

    together, alone = search.train_together, network.Network.resident.fget

    def count_together(fits, *rest):
        together(fits, *rest)
        counts["fleet"] += sum(fit.trained for fit in fits)

    def count_alone(self):
        counts["alone"] += self._resident is None
        return alone(self)

    monkeypatch.setattr(search, "train_together", count_together)
    monkeypatch.setattr(network.Network, "resident", property(count_alone))
    return counts


@pytest.mark.parametrize("target", ["classes", "two classes", "labels", "number", "count"])
def test_a_fleet_finds_what_grid_search_finds(target, monkeypatch):
    counts = trained_by_fleet(monkeypatch)
    estimator = pair(target, max_iter=15, random_state=0)[0].set_params(dtype="auto")
    search = equal_searches(estimator, GRID, target, cv=3, return_train_score=True)
    assert counts["fleet"] == 12
    assert search.n_jobs is None and (search.cv_results_["mean_fit_time"] > 0).all()


@pytest.mark.parametrize(
    "options",
    [
        dict(solver="sgd", learning_rate="adaptive", n_iter_no_change=1, tol=0.1, learning_rate_init=0.5),
        dict(solver="sgd", learning_rate="invscaling", momentum=0.5),
        dict(early_stopping=True, n_iter_no_change=2),
        dict(n_iter_no_change=np.inf, max_iter=7),
        dict(tol=0.5, n_iter_no_change=2),
        dict(batch_size=17, shuffle=False, dtype="float32"),
    ],
    ids=lambda o: ", ".join(o),
)
def test_training_ends_and_rates_fall_as_they_do_alone(options, monkeypatch):
    counts = trained_by_fleet(monkeypatch)
    estimator = MLPClassifier(**(dict(max_iter=30, random_state=1) | options))
    equal_searches(estimator, GRID, "classes", cv=2, refit=False)
    assert counts == {"fleet": 8, "alone": 8}  # alone: GridSearchCV's


def test_what_a_fleet_cannot_do_is_done_alone(monkeypatch):
    counts = trained_by_fleet(monkeypatch)
    grid = {"solver": ["lbfgs", "adam"], "hidden_layer_sizes": [(4,), (0,)], "learning_rate_init": [0.01, 1e300]}
    with pytest.warns(Warning, match="fits failed|non-finite"):
        equal_searches(MLPRegressor(max_iter=5, random_state=0), grid, "number", cv=2, refit=False)
    assert counts["fleet"] == 2  # adam with (4,) and 0.01, on two folds
    counts = trained_by_fleet(monkeypatch)
    equal_searches(MLPRegressor(max_iter=5, random_state=0), GRID, "numbers", cv=2)
    assert counts["fleet"] == 0


def test_folds_without_a_class_and_random_splits():
    order = np.argsort(Y["classes"], kind="stable")
    search = FleetSearchCV(MLPClassifier(max_iter=5, random_state=0), GRID, cv=KFold(3), refit=False)
    other = GridSearchCV(MLPClassifier(max_iter=5, random_state=0), GRID, cv=KFold(3), refit=False)
    for s in (search, other):
        s.fit(X[order], Y["classes"][order])
    np.testing.assert_array_equal(search.cv_results_["mean_test_score"], other.cv_results_["mean_test_score"])
    free = FleetSearchCV(MLPClassifier(max_iter=5), GRID, cv=ShuffleSplit(2), n_jobs=1).fit(X, Y["classes"])
    assert free.best_score_ > 0.2 and free.n_jobs == 1


def test_weights_several_scores_and_a_choice_of_their_own():
    equal_searches(
        MLPClassifier(max_iter=9, random_state=0), GRID, "two classes", given={"sample_weight": W}, cv=2,
        scoring=["accuracy", "roc_auc"], refit="roc_auc",
    )  # fmt: skip
    equal_searches(MLPClassifier(max_iter=9, random_state=0), GRID, "classes", cv=2, refit=lambda results: 1)


def test_a_small_heap_and_any_number_of_workers():
    estimator = MLPClassifier(max_iter=12, random_state=0)
    room = network.program_of  # as many models as fit twice; the others wait for their turn
    equal_searches(estimator, GRID, "classes", cv=3, refit=False, fleet={"memory": "64 KiB", "n_jobs": 2})
    assert room.cache_info().hits
    with pytest.raises(PlanError, match="needs"):
        FleetSearchCV(estimator, GRID, memory=1000).fit(X, Y["classes"])


def test_a_pipeline_is_searched_as_scikit_learn_does():
    model = make_pipeline(StandardScaler(), MLPClassifier((4,), max_iter=5, random_state=0))
    equal_searches(model, {"mlpclassifier__alpha": [0.0, 1.0]}, "classes", cv=2)


def test_features_a_fleet_does_not_take(monkeypatch):
    counts = trained_by_fleet(monkeypatch)
    sparse = pytest.importorskip("scipy.sparse")
    search = FleetSearchCV(MLPClassifier(max_iter=3, random_state=0), GRID, cv=2).fit(
        sparse.csr_matrix(X), Y["classes"]
    )
    assert search.best_score_ > 0 and counts["fleet"] == 0
    bad = X.copy()
    bad[0, 0] = np.nan
    with pytest.raises(ValueError, match="fits failed|NaN"):
        FleetSearchCV(MLPClassifier(max_iter=3), GRID, cv=2, error_score="raise").fit(bad, Y["classes"])


def test_regression_by_search():
    data, target = make_regression(300, 10, noise=1.0, random_state=0)
    model = MLPRegressor(hidden_layer_sizes=(16,), max_iter=200, random_state=0)
    search = FleetSearchCV(model, {"learning_rate_init": [1e-5, 0.03]}, cv=3).fit(data, target)
    assert search.best_params_ == {"learning_rate_init": 0.03} and search.best_score_ > 0.9

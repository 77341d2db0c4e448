"""Estimators of scikit-learn as networks."""

from __future__ import annotations

import numpy as np
import pytest

import calcvm as cv

pytest.importorskip("sklearn")
from sklearn import linear_model, preprocessing, svm
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline

RNG = np.random.default_rng(0)
X = RNG.normal(2.0, 3.0, (60, 4))
Y = X @ RNG.standard_normal((4, 2)) + 1
MANY, TWO = (X[:, :3].argmax(1), X[:, 0] > 2)
pytestmark = pytest.mark.filterwarnings("ignore:Stochastic Optimizer", "ignore:Maximum number of iteration")


def results(estimator, x=X):
    net = cv.from_sklearn(estimator)
    own = cv.Model(net, input_shape=(4,), loss="mse", optimizer=cv.SGD(0.1), batch_size=len(x))
    return own.predict(x)


REGRESSORS = {
    "linear": linear_model.LinearRegression(),
    "ridge": linear_model.Ridge(),
    "no intercept": linear_model.Ridge(fit_intercept=False),
    "sgd": linear_model.SGDRegressor(eta0=1e-4),
    "svr": svm.LinearSVR(),
    "mlp": MLPRegressor(hidden_layer_sizes=(8, 5), max_iter=20),
    "tanh": MLPRegressor(hidden_layer_sizes=(8,), activation="tanh", max_iter=20),
    "identity": MLPRegressor(hidden_layer_sizes=(8,), activation="identity", max_iter=20),
    "standard": make_pipeline(
        preprocessing.StandardScaler(), MLPRegressor(hidden_layer_sizes=(8,), activation="logistic", max_iter=20)
    ),
    "mean alone": make_pipeline(preprocessing.StandardScaler(with_std=False), linear_model.Ridge()),
    "min and max": make_pipeline(preprocessing.MinMaxScaler((-1, 2)), linear_model.Ridge()),
    "robust": make_pipeline(
        preprocessing.RobustScaler(), "passthrough", preprocessing.MaxAbsScaler(), linear_model.Ridge()
    ),
}


@pytest.mark.parametrize("name", REGRESSORS)
def test_regressor(name):
    for y in [Y[:, 0], Y] if name not in ("sgd", "svr") else [Y[:, 0]]:
        estimator = REGRESSORS[name].fit(X, y)
        want = estimator.predict(X).reshape(len(X), -1)
        np.testing.assert_allclose(results(estimator), want, rtol=1e-5, atol=1e-5)


CLASSIFIERS = [
    linear_model.LogisticRegression(), linear_model.SGDClassifier(), linear_model.RidgeClassifier(), svm.LinearSVC(),
    linear_model.Perceptron(),
]  # fmt: skip


@pytest.mark.parametrize("estimator", CLASSIFIERS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("y", [MANY, TWO], ids=["many", "two"])
def test_linear_classifier(estimator, y):
    want = estimator.fit(X, y).decision_function(X).reshape(len(X), -1)
    np.testing.assert_allclose(results(estimator), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("y", [MANY, TWO], ids=["many", "two"])
def test_mlp_classifier(y):
    estimator = make_pipeline(preprocessing.StandardScaler(), MLPClassifier((8, 6), max_iter=20)).fit(X, y)
    z = results(estimator)
    shares = 1 / (1 + np.exp(-z)) if z.shape[1] == 1 else np.exp(z) / np.exp(z).sum(1, keepdims=True)
    np.testing.assert_allclose(shares[:, -1], estimator.predict_proba(X)[:, -1], atol=1e-5)


def test_training_goes_on():
    estimator = make_pipeline(preprocessing.StandardScaler(), MLPClassifier((16,), max_iter=3)).fit(X, MANY)
    own = cv.Model(
        cv.from_sklearn(estimator), input_shape=(4,), loss="softmax_cross_entropy", optimizer=cv.Adam(0.02), batch_size=20, seed=0
    )  # fmt: skip
    own.fit(X, MANY, epochs=60, progress=False)
    assert own.evaluate(X, MANY)["accuracy"] > max(estimator.score(X, MANY), 0.9)


def test_what_is_refused():
    with pytest.raises(cv.UnsupportedOperator, match="PCA, KMeans"):
        cv.from_sklearn(make_pipeline(PCA(), KMeans()))
    with pytest.raises(cv.CalcError, match="not fitted"):
        cv.from_sklearn(MLPRegressor())
    with pytest.raises(cv.CalcError, match="an estimator of scikit-learn"):
        cv.from_sklearn("mlp")
    poisson = MLPRegressor(hidden_layer_sizes=(4,), loss="poisson", max_iter=5).fit(X, np.abs(Y[:, 0]))
    with pytest.raises(cv.UnsupportedOperator, match="MLPRegressor"):
        cv.from_sklearn(poisson)


@pytest.mark.parametrize("how", [{"with_mean": False}, {"with_std": False}, {"with_mean": False, "with_std": False}])
def test_scalers_do_what_they_are_told(how):
    from sklearn.linear_model import Ridge
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x = np.random.default_rng(0).normal(5, 2, (40, 3))
    estimator = make_pipeline(StandardScaler(**how), Ridge()).fit(x, x @ [1.0, 2, 3])
    model = cv.Model(cv.from_sklearn(estimator), input_shape=(3,), loss="mse", optimizer="adam")
    np.testing.assert_allclose(model.predict(x).ravel(), estimator.predict(x), rtol=1e-4)


def test_clipping_scalers_and_empty_pipelines_are_refused():
    from sklearn.linear_model import Ridge
    from sklearn.pipeline import Pipeline, make_pipeline
    from sklearn.preprocessing import MinMaxScaler

    x = np.random.default_rng(0).normal(5, 2, (40, 3))
    with pytest.raises(cv.UnsupportedOperator, match=r"MinMaxScaler\(clip=True\)"):
        cv.from_sklearn(make_pipeline(MinMaxScaler(clip=True), Ridge()).fit(x, x[:, 0]))
    with pytest.raises(cv.CalcError, match="has no steps"):
        cv.from_sklearn(Pipeline([("a", "passthrough")]))

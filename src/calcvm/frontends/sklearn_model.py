"""`from_sklearn`: fitted estimators of scikit-learn as networks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from calcvm import checks, nn
from calcvm.errors import CalcError, MissingExtra, UnsupportedOperator
from calcvm.nn.layers import Layer

ACTIVATIONS: dict[str, type[Layer]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "logistic": nn.Sigmoid}
LINEAR = (
    "ARDRegression BayesianRidge ElasticNet ElasticNetCV HuberRegressor Lars Lasso LassoCV LassoLars LinearRegression LinearSVC LinearSVR "
    "LogisticRegression LogisticRegressionCV Perceptron Ridge RidgeCV RidgeClassifier RidgeClassifierCV SGDClassifier SGDRegressor"
).split()

SCALERS: dict[str, Callable[[Any], tuple[Any, Any]]] = {  # mean and deviation of each feature; None: 0, or 1
    "MaxAbsScaler": lambda x: (None, x.scale_),
    "MinMaxScaler": lambda x: (-x.min_ / x.scale_, 1 / x.scale_),
    "RobustScaler": lambda x: (x.center_, x.scale_),
    "StandardScaler": lambda x: (x.mean_ if x.with_mean else None, x.scale_),
}


def from_sklearn(estimator: Any) -> nn.Sequential:
    """A fitted estimator of scikit-learn as a network of `calcvm.nn`, with its weights.

    The network gives a regressor's values, and a classifier's scores: those before softmax, one for each of its ``classes_``; of two
    classes the one score of the second.

    Parameters
    ----------
    estimator : a fitted MLPClassifier or MLPRegressor, or a linear model, such as Ridge or LogisticRegression; or a Pipeline that ends
        with one and has scalers before it (StandardScaler, MinMaxScaler, MaxAbsScaler, RobustScaler), whose numbers are buffers.

    Returns
    -------
    nn.Sequential
        ``cv.Model(net, input_shape=(estimator.n_features_in_,), loss="softmax_cross_entropy", optimizer=...)`` trains on.

    Raises
    ------
    MissingExtra : scikit-learn is not installed (extra ``sklearn``).
    UnsupportedOperator : the estimator, or a step of the pipeline, has no counterpart.
    CalcError : the estimator is not fitted.

    Examples
    --------
    >>> from sklearn.linear_model import LinearRegression
    >>> x = np.array([[0.0], [1.0], [2.0]])
    >>> net = cv.from_sklearn(LinearRegression().fit(x, [1.0, 3.0, 5.0]))
    >>> model = cv.Model(net, input_shape=(1,), loss="mse", optimizer=cv.SGD(0.1), batch_size=3)
    >>> model.predict(x).round(3).tolist()
    [[1.0], [3.0], [5.0]]
    """
    try:
        from sklearn.base import BaseEstimator
        from sklearn.exceptions import NotFittedError
        from sklearn.pipeline import Pipeline
        from sklearn.utils.validation import check_is_fitted
    except ImportError as error:
        raise MissingExtra("scikit-learn", "sklearn", "from_sklearn") from error
    checks.one_of("from_sklearn", estimator, BaseEstimator, "an estimator of scikit-learn")
    steps = [step for _, step in estimator.steps] if isinstance(estimator, Pipeline) else [estimator]
    steps = [step for step in steps if step not in (None, "passthrough")]
    if not steps:
        raise CalcError("from_sklearn: the pipeline has no steps")
    *before, last = steps
    unknown = [name for x in before if (name := type(x).__name__) not in SCALERS]
    unknown += [f"{type(x).__name__}(clip=True)" for x in before if getattr(x, "clip", False)]
    if type(last).__name__ not in (*LINEAR, "MLPClassifier", "MLPRegressor") or _output(last) == "exp":
        unknown.append(type(last).__name__)
    if unknown:
        raise UnsupportedOperator(
            f"from_sklearn: no counterpart of {', '.join(unknown)}: MLPs, linear models, and scalers before them have one"
        )
    try:
        for step in steps:
            check_is_fitted(step)
    except NotFittedError as error:
        raise CalcError(f"from_sklearn: {error}") from error
    return nn.Sequential(*map(_scaler, before), *_layers(last))


def _output(x: Any) -> str:
    """What an MLP computes of its scores."""
    return getattr(x, "out_activation_", "")


def _linear(weight: Any, bias: Any) -> nn.Linear:
    weight = np.asarray(weight, float)
    start = np.broadcast_to(np.asarray(bias, float), weight.shape[1:])
    return nn.Linear(weight.shape[1], init=weight, bias_init=start)


def _layers(x: Any) -> Iterator[Layer]:
    """The layers of an estimator."""
    if not hasattr(x, "coefs_"):
        coef = x.coef_.toarray() if hasattr(x.coef_, "toarray") else x.coef_  # sparse after sparsify()
        yield _linear(np.atleast_2d(coef).T, x.intercept_)
        return
    for k, (weight, bias) in enumerate(zip(x.coefs_, x.intercepts_)):
        if k and x.activation != "identity":
            yield ACTIVATIONS[x.activation]()
        yield _linear(weight, bias)


def _scaler(x: Any) -> nn.Standardize:
    """The layer of a scaler."""
    mean, std = SCALERS[type(x).__name__](x)
    n = x.n_features_in_
    return nn.Standardize(np.zeros(n) if mean is None else mean, np.ones(n) if std is None else std)

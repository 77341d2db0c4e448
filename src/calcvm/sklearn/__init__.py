"""Estimators for scikit-learn (extra ``sklearn``): `MLPClassifier`, `MLPRegressor`, `FleetSearchCV`."""

from __future__ import annotations

from calcvm.errors import MissingExtra

try:
    import sklearn  # noqa: F401
except ImportError as error:
    raise MissingExtra("scikit-learn", "sklearn", "calcvm.sklearn") from error

from calcvm.sklearn.estimators import MLPClassifier, MLPRegressor
from calcvm.sklearn.search import FleetSearchCV

__all__ = ["FleetSearchCV", "MLPClassifier", "MLPRegressor"]

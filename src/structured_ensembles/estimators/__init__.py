"""Estimators for scikit-learn: ensembles that are fitted, cloned, searched and pickled like its own."""

from structured_ensembles.estimators.classifier import StructuredEnsembleClassifier
from structured_ensembles.estimators.regressor import StructuredEnsembleRegressor

__all__ = ["StructuredEnsembleClassifier", "StructuredEnsembleRegressor"]

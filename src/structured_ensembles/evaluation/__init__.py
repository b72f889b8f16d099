"""Evaluation of an ensemble: accuracy, calibration, uncertainty, robustness and size."""

from structured_ensembles.evaluation.attacks import fgsm
from structured_ensembles.evaluation.corruptions import CORRUPTIONS, corrupt
from structured_ensembles.evaluation.deep_equivalent import deep_ensemble_equivalent
from structured_ensembles.evaluation.evaluate import evaluate

__all__ = ["CORRUPTIONS", "corrupt", "deep_ensemble_equivalent", "evaluate", "fgsm"]

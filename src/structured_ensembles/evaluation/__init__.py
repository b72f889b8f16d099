"""How good an ensemble is, and how well it knows it."""

from structured_ensembles.evaluation.evaluate import evaluate

__all__ = ["evaluate"]

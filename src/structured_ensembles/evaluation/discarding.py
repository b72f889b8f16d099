"""When a prediction is better discarded: the entropy threshold."""

from structured_ensembles.data import Data
from structured_ensembles.ensemble import Ensemble, combined, entropy_of
from structured_ensembles.evaluation.predictions import predictions


def discard_threshold(ensemble: Ensemble, data: Data, percentile: float = 75.0) -> float:
    """The percentile of the predictive entropy of correctly classified validation samples; above it, discard."""
    logits, targets = predictions(ensemble, data.split("validation"))
    probabilities = combined(logits)
    entropy = entropy_of(probabilities)
    correct = entropy[probabilities.argmax(-1) == targets]
    return float((correct if len(correct) else entropy).double().quantile(percentile / 100))

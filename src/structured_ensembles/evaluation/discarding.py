"""When a prediction is better discarded: the entropy threshold, and what discarding is worth."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from structured_ensembles.data import Data
from structured_ensembles.ensemble import Ensemble, combined, entropy_of
from structured_ensembles.evaluation.predictions import predictions


def discard_threshold(ensemble: Ensemble, data: Data, percentile: float = 75.0) -> float:
    """The paper's threshold: see `percentile_of_right`, on the validation split.

    Whatever the network, it discards a quarter of what is right; the ensemble's own threshold is another one, see
    `Ensemble.threshold_for`.
    """
    return percentile_of_right(*predictions(ensemble, data.split("validation")), percentile)


def percentile_of_right(logits: Tensor, targets: Tensor, percentile: float = 75.0) -> float:
    """The percentile of the entropy, without temperature, of right predictions; of all, where none is right.

    logits: (members, samples, classes). targets: labels (samples,).
    """
    probabilities = combined(logits)
    entropy = entropy_of(probabilities)
    correct = entropy[probabilities.argmax(-1) == targets]
    return float((correct if len(correct) else entropy).double().quantile(percentile / 100))


@dataclass(frozen=True)
class Discarding:
    """What a threshold does, as shares: A, FA and D of the paper."""

    accuracy: float  # of all samples
    filtered_accuracy: float  # of those kept; not a number if none is
    discarded: float


def discarding(entropy: Tensor, correct: Tensor, threshold: float) -> Discarding:
    """Discard the samples whose entropy (samples,) is above the threshold; correct: booleans (samples,)."""
    kept = entropy.double() <= threshold
    right = correct.double()
    return Discarding(float(right.mean()), float(right[kept].mean()), 1 - float(kept.double().mean()))


def discarding_curve(entropy: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """The share of samples discarded and the accuracy of the others, for every threshold: shapes (thresholds,).

    From nothing discarded to only the surest kept. Samples of the same entropy are discarded together.
    """
    values, index, counts = entropy.double().unique(return_inverse=True, return_counts=True)
    right = torch.zeros_like(values).index_add_(0, index, correct.double())
    kept = counts.cumsum(0)
    return (1 - kept / len(entropy)).flip(0), (right.cumsum(0) / kept).flip(0)

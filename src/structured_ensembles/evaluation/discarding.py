"""Discarding of uncertain predictions: the entropy threshold, and what it does to the accuracy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from structured_ensembles.data import Data
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.evaluation.predictions import gather_predictions
from structured_ensembles.evaluation.ranking import mean_over_ties
from structured_ensembles.prediction.calibration_fit import percentile_of_right
from structured_ensembles.prediction.combination import Combine


def fit_discard_threshold(ensemble: Ensemble, data: Data, percentile: float = 75.0, combine: Combine = "mean") -> float:
    """Fit the paper's threshold on the validation split: see `percentile_of_right`.

    It discards a quarter of the correct predictions of any network; `Ensemble.keep` has another threshold, see
    `Ensemble.threshold_for`.
    """
    return percentile_of_right(*gather_predictions(ensemble, data.split("validation")), percentile, combine)


@dataclass(frozen=True)
class Discarding:
    """Accuracy, filtered accuracy and discarded share under a threshold: A, FA and D of the paper."""

    accuracy: float  # of all samples
    filtered_accuracy: float  # of the kept ones; NaN if none is
    discarded: float


def measure_discarding(entropy: Tensor, correct: Tensor, threshold: float) -> Discarding:
    """Discard the samples whose entropy (samples,) is above the threshold; correct: booleans (samples,)."""
    kept = entropy.double() <= threshold
    right = correct.double()
    return Discarding(float(right.mean()), float(right[kept].mean()), 1 - float(kept.double().mean()))


def discarding_curve(entropy: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the share discarded and the accuracy of the rest, for every threshold: shapes (thresholds,).

    Ordered from nothing discarded to only the surest kept. Samples of the same entropy are discarded together.
    """
    values, index, counts = entropy.double().unique(return_inverse=True, return_counts=True)
    right = torch.zeros_like(values).index_add_(0, index, correct.double())
    kept = counts.cumsum(0).double()
    return (1 - kept / len(entropy)).flip(0), (right.cumsum(0) / kept).flip(0)


def risk_coverage_area(uncertainty: Tensor, correct: Tensor) -> float:
    """Compute the AURC: the area under the risk-coverage curve, the error rate of the surest samples by their share.

    uncertainty: (samples,), low for the surest, such as the negative confidence. correct: booleans (samples,).
    As in torch-uncertainty: trapezoids between coverages of 1/n and 1, divided by that range; NaN for fewer than two
    samples, or if an uncertainty is NaN. Unlike there, samples of the same uncertainty count with their mean error,
    whatever their order.
    """
    samples = len(uncertainty)
    if samples < 2 or bool(uncertainty.isnan().any()):
        return math.nan
    scores = uncertainty.double()
    errors = mean_over_ties(scores, 1 - correct.double())[scores.argsort(stable=True)]
    risks = errors.cumsum(0) / torch.arange(1, samples + 1, device=errors.device)
    return float((risks[1:] + risks[:-1]).sum() / 2 / (samples - 1))


def coverage_at_risk(uncertainty: Tensor, correct: Tensor, risk: float = 0.05) -> float:
    """Find the largest share of samples, the surest first, with an error rate of at most `risk`; NaN if none has.

    uncertainty, correct: (samples,), as above; NaN also if an uncertainty is NaN. As in torch-uncertainty
    (`CovAtxRisk`), except that samples of the same uncertainty are kept or discarded together, as no threshold can tell
    them apart.
    """
    if bool(uncertainty.isnan().any()):
        return math.nan
    discarded, accuracy = discarding_curve(uncertainty, correct)
    # Counts are whole numbers: 1 error in 20 is a risk of 0.05, whatever the rounding.
    allowed = 1 - discarded[(1 - accuracy) <= risk + 1e-12]
    return float(allowed.max()) if len(allowed) else math.nan

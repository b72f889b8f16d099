"""Figures of a calibrated ensemble: after temperature, of the predictions it keeps, of its conformal sets."""

from __future__ import annotations

import math

from torch import Tensor

from structured_ensembles.calibration.conformal import ConformalIntervals, ConformalSets
from structured_ensembles.common.gaussian import mean_and_spread
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.evaluation.calibration import expected_calibration_error, negative_log_likelihood
from structured_ensembles.prediction.combination import Combine, combine_logits, entropy_of, exact_probabilities


def compute_calibrated_figures(
    ensemble: Ensemble, logits: Tensor, targets: Tensor, combine: Combine
) -> dict[str, float]:
    """Compute the figures of whatever was fitted: logits (members, samples, classes), targets (samples,).

    The temperature is that of `combine`; threshold and conformal sets are of the rule "mean", as `keep` and
    `predict_set` are.
    """
    calibration, figures = ensemble.calibration, {}
    if combine in calibration.temperatures:
        probabilities = combine_logits(logits, combine, calibration.temperature(combine))
        figures["cal/nll_t"] = negative_log_likelihood(probabilities, targets)
        figures["cal/ece_t"] = expected_calibration_error(probabilities, targets, bins=30)
        figures["cal/ece15_t"] = expected_calibration_error(probabilities, targets, bins=15)
    if calibration.threshold is not None:
        entropy = entropy_of(combine_logits(logits, "mean", ensemble.temperature))
        figures |= _kept_figures(
            entropy.double() <= calibration.threshold, combine_logits(logits).argmax(-1) == targets
        )
    if isinstance(calibration.conformal, ConformalSets):
        sets = calibration.conformal.sets(exact_probabilities(logits, ensemble.temperature))
        figures["conf/coverage"] = float(sets.gather(-1, targets[:, None]).double().mean())
        figures["conf/size"] = float(sets.double().sum(-1).mean())
    return figures


def compute_interval_figures(ensemble: Ensemble, outputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Compute coverage and mean width of a regression's intervals: outputs (members, samples, …), targets (samples, …).

    Each value of a target with several values counts by itself.
    """
    rule = ensemble.calibration.conformal
    if not isinstance(rule, ConformalIntervals):
        return {}
    lower, upper = rule.interval(*mean_and_spread(outputs, ensemble.gaussian))
    truth = targets.view_as(lower)
    width = float((upper - lower).double().mean())
    figures = {"conf/coverage": float(((lower <= truth) & (truth <= upper)).double().mean())}
    return figures if math.isinf(width) else {**figures, "conf/width": width}


def _kept_figures(kept: Tensor, correct: Tensor) -> dict[str, float]:
    """Compute the share kept and the accuracy of the kept, leaving NaN out; kept, correct: booleans (samples,)."""
    hits, keeps = correct.double(), kept.double()
    figures = {
        "unc/kept": float(keeps.mean()),
        "unc/kept_right": float(keeps[correct].mean()),
        "unc/kept_accuracy": float(hits[kept].mean()),
    }
    return {name: value for name, value in figures.items() if not math.isnan(value)}

"""Fit an ensemble's calibration to its outputs on held-out samples."""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
from torch import Tensor

from structured_ensembles.calibration import (
    KEEP,
    KEEPS_NOTHING,
    RULES,
    Calibration,
    ThresholdRule,
    fit_supported_temperature,
    fit_threshold,
    repeat_for_rules,
)
from structured_ensembles.calibration.conformal import (
    Conformal,
    ConformalSets,
    Method,
    fit_intervals,
    fit_sets,
    samples_needed,
)
from structured_ensembles.common.gaussian import mean_and_spread
from structured_ensembles.data.assembly import Task
from structured_ensembles.prediction.combination import (
    FLOAT64_CHUNK,
    Combine,
    combine_logits,
    combine_logs,
    entropy_of,
    exact_probabilities,
    uncertainty_of,
)

COVERAGE = 0.9  # of the sets and intervals that training leaves behind


def fit_all(before: Calibration, outputs: Tensor, targets: Tensor, task: Task, gaussian: bool) -> Calibration:
    """Fit what the number of samples allows: temperature, thresholds, conformal sets or intervals of 90 %.

    before: the calibration so far, which a regression keeps where there are too few samples.
    outputs: (members, samples, …). targets: (samples, …). gaussian: whether outputs are those of Gaussian heads.
    """
    enough = len(targets) >= samples_needed(COVERAGE)
    if task == "regression":
        mean, spread = mean_and_spread(outputs, gaussian)
        if not enough or mean.numel() != targets.numel():
            return before
        return replace(before, conformal=fit_intervals(mean, spread, targets, COVERAGE, floored=not gaussian))
    fitted = fit_calibration(Calibration(), outputs, targets, None)
    if not enough:
        return fitted
    probabilities = exact_probabilities(outputs, fitted.temperature("mean"))
    # Not "thr": where an ensemble is right more often than the coverage, some of its sets are empty.
    return replace(fitted, conformal=fit_sets(probabilities, targets, COVERAGE, "aps"))


def fit_calibration(before: Calibration, logits: Tensor, targets: Tensor, temperature: float | None) -> Calibration:
    """Fit temperatures, unless one is given, then refit what depends on them: the threshold and any conformal sets.

    logits: (members, samples, classes). targets: labels (samples,).
    """
    if logits.dim() != 3:
        output_shape = f"{tuple(logits.shape[2:])} for each sample"
        raise ValueError(
            f"a temperature needs members that give one logit for each class, but they give {output_shape}"
        )
    if temperature is None:
        temperatures = {str(rule): fit_supported_temperature(_exact_logs(logits, rule), targets) for rule in RULES}
    else:
        temperatures = repeat_for_rules(temperature)
    fitted = replace(before, temperatures=temperatures, paper_threshold=percentile_of_right(logits, targets))
    rule: ThresholdRule = before.threshold_rule or ("keep", KEEP)
    fitted = replace(fitted, threshold=_fit_threshold(fitted, logits, targets, rule), threshold_rule=rule)
    sets = before.conformal
    if isinstance(sets, ConformalSets):
        probabilities = exact_probabilities(logits, fitted.temperature("mean"))
        refitted = fit_sets(probabilities, targets, sets.coverage, sets.method, sets.penalty, sets.free_ranks)
        fitted = replace(fitted, conformal=refitted)
    return fitted


def fit_threshold_rule(
    before: Calibration, logits: Tensor, targets: Tensor, rule: ThresholdRule
) -> tuple[Calibration, float]:
    """Fit the threshold at the current temperature; return the new calibration and the threshold.

    logits: (members, samples, classes). targets: labels (samples,).
    """
    threshold = _fit_threshold(before, logits, targets, rule)
    return replace(before, threshold=threshold, threshold_rule=rule), threshold


def fit_conformal(
    before: Calibration,
    outputs: Tensor,
    targets: Tensor,
    task: Task,
    gaussian: bool,
    *,
    coverage: float,
    method: Method,
    penalty: float,
    free_ranks: int,
) -> Conformal:
    """Fit prediction sets at the current temperature, or the intervals of a regression.

    outputs: (members, samples, …). targets: (samples, …). method, penalty, free_ranks: of sets, see `ConformalSets`.
    """
    if task == "regression":
        mean, spread = mean_and_spread(outputs, gaussian)
        return fit_intervals(mean, spread, targets, coverage, floored=not gaussian)
    probabilities = exact_probabilities(outputs, before.temperature("mean"))
    return fit_sets(probabilities, targets, coverage, method, penalty, free_ranks)


def percentile_of_right(logits: Tensor, targets: Tensor, percentile: float = 75.0, combine: Combine = "mean") -> float:
    """Compute a percentile of the entropy, before temperature, over the right predictions; over all if none is right.

    logits: (members, samples, classes). targets: labels (samples,).
    """
    entropy = uncertainty_of(logits, combine=combine).entropy
    correct = entropy[combine_logits(logits, combine).argmax(-1) == targets]
    return float((correct if len(correct) else entropy).double().quantile(percentile / 100))


def _fit_threshold(calibration: Calibration, logits: Tensor, targets: Tensor, rule: ThresholdRule) -> float:
    """Fit the threshold of a rule; warn if it keeps no prediction."""
    entropy = entropy_of(combine_logits(logits, "mean", calibration.temperature("mean")))
    correct = combine_logits(logits).argmax(-1) == targets
    threshold = fit_threshold(entropy, correct, rule)
    if threshold == KEEPS_NOTHING:
        warnings.warn(
            f"no threshold has a risk of at most {rule[1]:g} on these samples: even the surest predictions are wrong "
            "more often, so none is kept",
            stacklevel=4,
        )
    return threshold


def _exact_logs(logits: Tensor, rule: Combine) -> Tensor:
    """Combine to log-probabilities (samples, classes) in float64, some samples at a time to save memory."""
    return torch.cat([combine_logs(chunk.double(), rule) for chunk in logits.split(FLOAT64_CHUNK, dim=1)])

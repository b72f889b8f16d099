"""Fit an ensemble's calibration on a split: predict its samples once, then fit to the outputs."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

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
    same_for_all_rules,
)
from structured_ensembles.common.gaussian import mean_and_spread
from structured_ensembles.data import Data
from structured_ensembles.data.arrays import as_inputs, as_targets, check_pair
from structured_ensembles.data.conversion import check_bytes
from structured_ensembles.data.dataset import SplitName, Task, check_data
from structured_ensembles.data.splits import TensorSplit
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.evaluation.discarding import percentile_of_right
from structured_ensembles.evaluation.predictions import predictions
from structured_ensembles.prediction.combination import (
    FLOAT64_CHUNK,
    Combine,
    combined,
    combined_logs,
    entropy_of,
    exact_probabilities,
)
from structured_ensembles.prediction.conformal import (
    Conformal,
    ConformalSets,
    Method,
    fit_intervals,
    fit_sets,
    samples_needed,
)
from structured_ensembles.prediction.input_checks import warn_of_unknown_inputs

HeldOut = Data | tuple[Any, Any]  # data with a split to calibrate on, or a pair of arrays: inputs and targets
COVERAGE = 0.9  # of the sets and intervals that training leaves behind


def calibrate_trained(ensemble: Ensemble, data: Data) -> None:
    """Fit all that a validation split allows: temperature, thresholds, and conformal sets or intervals of 90 %.

    Outputs that it cannot be fitted to, such as those of a loss of one's own, get a warning: training must not fail in
    the end.
    """
    if data.validation is None:
        return
    outputs, targets = predictions(ensemble, data.validation)
    try:
        ensemble.calibration = _fitted_all(ensemble.calibration, outputs, targets, data.task, ensemble.gaussian)
    except ValueError as error:
        warnings.warn(f"the ensemble stays uncalibrated: {error}", stacklevel=3)


def _fitted_all(before: Calibration, outputs: Tensor, targets: Tensor, task: Task, gaussian: bool) -> Calibration:
    enough = len(targets) >= samples_needed(COVERAGE)
    if task == "regression":
        mean, spread = mean_and_spread(outputs, gaussian)
        if not enough or mean.numel() != targets.numel():
            return before
        return replace(before, conformal=fit_intervals(mean, spread, targets, COVERAGE, floored=not gaussian))
    found = _fitted(outputs, targets, Calibration(), None)
    if not enough:
        return found
    probabilities = exact_probabilities(outputs, found.temperature("mean"))
    # Not "thr": where an ensemble is right more often than the coverage, some of its sets are empty.
    return replace(found, conformal=fit_sets(probabilities, targets, COVERAGE, "aps"))


def fit_calibration(ensemble: Ensemble, data: HeldOut, split: SplitName, temperature: float | None) -> Calibration:
    """Fit temperatures (or take the given one), then refit what depends on them: see `Ensemble.calibrate`."""
    logits, targets = _checked_predictions(ensemble, data, split)
    return _fitted(logits, targets, ensemble.calibration, temperature)


def fit_threshold_on(
    ensemble: Ensemble, data: HeldOut, split: SplitName, rule: ThresholdRule
) -> tuple[Calibration, float]:
    """Fit the threshold at the ensemble's temperature; return the new calibration and the threshold."""
    logits, targets = _checked_predictions(ensemble, data, split)
    threshold = _threshold(ensemble.calibration, logits, targets, rule)
    return replace(ensemble.calibration, threshold=threshold, threshold_rule=rule), threshold


def fit_conformal(
    ensemble: Ensemble,
    data: HeldOut,
    split: SplitName,
    coverage: float,
    method: Method,
    penalty: float,
    free_ranks: int,
) -> Conformal:
    """Fit sets, or intervals, at the ensemble's temperature; see `Ensemble.conformal`."""
    if ensemble.task == "regression" and method != "thr":
        raise ValueError(f"method must be left out for a regression, whose intervals have only one, not {method!r}")
    outputs, targets = _checked_predictions(ensemble, data, split)
    if ensemble.task == "regression":
        mean, spread = mean_and_spread(outputs, ensemble.gaussian)
        return fit_intervals(mean, spread, targets, coverage, floored=not ensemble.gaussian)
    probabilities = exact_probabilities(outputs, ensemble.temperature)
    return fit_sets(probabilities, targets, coverage, method, penalty, free_ranks)


def _checked_predictions(ensemble: Ensemble, data: HeldOut, split: SplitName) -> tuple[Tensor, Tensor]:
    if isinstance(data, tuple):
        return predictions(ensemble, _split_of(ensemble, data))
    check_data(data)
    if data.task != ensemble.task:
        raise ValueError(
            f"data are for {data.task}, but the ensemble is for {ensemble.task}: Ensemble(…, task={data.task!r})"
        )
    warn_of_unknown_inputs(ensemble, data)
    return predictions(ensemble, data.split(split))


def _split_of(ensemble: Ensemble, pair: tuple[Any, Any]) -> TensorSplit:
    """Read a pair of arrays: inputs (samples, …) as the ensemble takes them, targets (samples, …)."""
    if len(pair) != 2:
        raise ValueError(f"data must be a Data or a pair (inputs, targets), not a tuple of {len(pair)}")
    check = check_bytes if ensemble.pixels else None
    inputs, targets = as_inputs("inputs", pair[0], ensemble.ids, check), as_targets("targets", pair[1], ensemble.task)
    check_pair("inputs", inputs, "targets", targets)
    return TensorSplit(inputs, targets, torch.arange(len(targets)))


def _fitted(logits: Tensor, targets: Tensor, before: Calibration, temperature: float | None) -> Calibration:
    """Fit temperatures, thresholds and, if there were some, sets to logits (members, samples, classes)."""
    if logits.dim() != 3:
        given = f"{tuple(logits.shape[2:])} for each sample"
        raise ValueError(f"a temperature needs members that give one logit for each class, but they give {given}")
    if temperature is None:
        temperatures = {str(rule): fit_supported_temperature(_exact_logs(logits, rule), targets) for rule in RULES}
    else:
        temperatures = same_for_all_rules(temperature)
    found = replace(before, temperatures=temperatures, paper_threshold=percentile_of_right(logits, targets))
    rule: ThresholdRule = before.threshold_rule or ("keep", KEEP)
    found = replace(found, threshold=_threshold(found, logits, targets, rule), threshold_rule=rule)
    sets = before.conformal
    if isinstance(sets, ConformalSets):
        probabilities = exact_probabilities(logits, found.temperature("mean"))
        refitted = fit_sets(probabilities, targets, sets.coverage, sets.method, sets.penalty, sets.free_ranks)
        found = replace(found, conformal=refitted)
    return found


def _threshold(own: Calibration, logits: Tensor, targets: Tensor, rule: ThresholdRule) -> float:
    entropy = entropy_of(combined(logits, "mean", own.temperature("mean")))
    correct = combined(logits).argmax(-1) == targets
    threshold = fit_threshold(entropy, correct, rule)
    if threshold == KEEPS_NOTHING:
        warnings.warn(
            f"no threshold has a risk of at most {rule[1]:g} on these samples: its surest predictions are wrong more "
            "often, so that none is kept",
            stacklevel=4,
        )
    return threshold


def _exact_logs(logits: Tensor, rule: Combine) -> Tensor:
    return torch.cat([combined_logs(part.double(), rule) for part in logits.split(FLOAT64_CHUNK, dim=1)])

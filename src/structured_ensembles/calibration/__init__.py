"""Calibration on plain arrays: temperature, discard threshold, conformal sets and intervals."""

from structured_ensembles.calibration.calibration import Calibration
from structured_ensembles.calibration.temperature import (
    FEW_ERRORS,
    PRIOR,
    RULES,
    apply_temperature,
    checked_temperature,
    fit_supported_temperature,
    fit_temperature,
    same_for_all_rules,
)
from structured_ensembles.calibration.threshold import (
    KEEP,
    KEEPS_NOTHING,
    ThresholdRule,
    checked_rule,
    checked_threshold,
    fit_threshold,
    threshold_rule,
)

__all__ = [
    "FEW_ERRORS",
    "KEEP",
    "KEEPS_NOTHING",
    "PRIOR",
    "RULES",
    "Calibration",
    "ThresholdRule",
    "apply_temperature",
    "checked_rule",
    "checked_temperature",
    "checked_threshold",
    "fit_supported_temperature",
    "fit_temperature",
    "fit_threshold",
    "same_for_all_rules",
    "threshold_rule",
]

"""Calibration on plain arrays: temperature, discard threshold, conformal sets and intervals."""

from structured_ensembles.calibration.calibration import Calibration
from structured_ensembles.calibration.temperature import (
    FEW_ERRORS,
    PRIOR,
    RULES,
    apply_temperature,
    check_temperature,
    fit_supported_temperature,
    fit_temperature,
    repeat_for_rules,
)
from structured_ensembles.calibration.threshold import (
    KEEP,
    KEEPS_NOTHING,
    ThresholdRule,
    check_threshold,
    check_threshold_rule,
    choose_threshold_rule,
    fit_threshold,
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
    "check_temperature",
    "check_threshold",
    "check_threshold_rule",
    "choose_threshold_rule",
    "fit_supported_temperature",
    "fit_temperature",
    "fit_threshold",
    "repeat_for_rules",
]

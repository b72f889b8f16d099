"""Calibration: temperature, threshold and conformal rule of an ensemble, and their JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from structured_ensembles.calibration.conformal import Conformal, conformal_from_json, conformal_to_json
from structured_ensembles.calibration.temperature import RULES, check_temperature
from structured_ensembles.calibration.threshold import ThresholdRule, check_threshold, check_threshold_rule


@dataclass(frozen=True)
class Calibration:
    """Temperature, threshold and conformal rule of an ensemble, fitted on held-out samples.

    temperatures: by combination rule; one that is not there is 1.
    threshold: the entropy of the combined prediction, after temperature, above which it is better discarded.
    threshold_rule: how the threshold was fitted; None for a number given by hand.
    paper_threshold: the paper's, on the entropy before temperature; for its tables.
    conformal: prediction sets, or intervals of a regression.
    """

    temperatures: Mapping[str, float] = field(default_factory=dict)
    threshold: float | None = None
    threshold_rule: ThresholdRule | None = None
    paper_threshold: float | None = None
    conformal: Conformal | None = None

    @property
    def fitted(self) -> bool:
        """Tell whether anything was fitted; a threshold set by hand, or by a file of an earlier version, was not."""
        return self != Calibration(threshold=self.threshold, paper_threshold=self.threshold)

    def temperature(self, combine: str) -> float:
        """Return the temperature of a combination rule; 1.0 where none was fitted."""
        return self.temperatures.get(combine, 1.0)

    def temperature_for(self, combine: str, requested: float | None) -> float:
        """Return the requested temperature, checked; the fitted one of this combination rule for None."""
        if requested is None:
            return self.temperature(combine)
        temperature = check_temperature(requested)
        if combine == "vote" and temperature != 1:
            raise ValueError(f"temperature must be left out for combine='vote', which has none, not {requested!r}")
        return temperature

    def to_json(self) -> dict[str, Any]:
        """Encode as a dict for JSON."""
        return {
            "temperatures": dict(self.temperatures),
            "threshold": self.threshold,
            "threshold_rule": None if self.threshold_rule is None else list(self.threshold_rule),
            "paper_threshold": self.paper_threshold,
            "conformal": None if self.conformal is None else conformal_to_json(self.conformal),
        }

    @classmethod
    def from_json(cls, value: Any) -> Calibration:
        """Restore what `to_json` wrote; raise a ValueError that says what is invalid."""
        fields = ("temperatures", "threshold", "threshold_rule", "paper_threshold", "conformal")
        if not isinstance(value, dict) or set(value) != set(fields):
            raise ValueError(f"calibration must have the entries {', '.join(fields)}, not {value!r}")
        temperatures, rule, conformal = value["temperatures"], value["threshold_rule"], value["conformal"]
        if not isinstance(temperatures, dict) or not set(temperatures) <= set(RULES):
            raise ValueError(
                f"temperatures must be a dict with entries of {' and '.join(RULES)} only, not {temperatures!r}"
            )
        if rule is not None and not (isinstance(rule, list) and len(rule) == 2):
            raise ValueError(
                f"threshold_rule must be a list of a name and a share, such as ['keep', 0.95], not {rule!r}"
            )
        return cls(
            {name: check_temperature(temperature) for name, temperature in temperatures.items()},
            check_threshold(value["threshold"]),
            None if rule is None else check_threshold_rule(*rule),
            check_threshold(value["paper_threshold"], "paper_threshold"),
            None if conformal is None else conformal_from_json(conformal),
        )
